//! Offsets of structure members, read from the running kernel's BTF.
//!
//! Format: `Documentation/bpf/btf.rst` of the kernel. Only what is needed to find a member by name: compiled Rust
//! has no relocations that the loader could apply, and aya does not expose the members it parses.

use std::{fs, path::Path};

use weir_common::KernelOffsets;

use super::KernelError;

const MAGIC: u16 = 0xeb9f;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;

/// Type information of a kernel.
pub struct Btf {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Where each type starts in `types`; type ids count from 1.
    starts: Vec<usize>,
}

/// One member of a structure or union.
struct Member {
    name: u32,
    type_id: u32,
    bits: u32,
}

fn broken(what: &str) -> KernelError {
    KernelError::Btf(what.to_owned())
}

fn word(bytes: &[u8], at: usize) -> Result<u32, KernelError> {
    let word = bytes.get(at..at + 4).ok_or_else(|| broken("truncated"))?;
    Ok(u32::from_ne_bytes(word.try_into().expect("four bytes")))
}

impl Btf {
    /// Reads the running kernel's description of itself.
    pub fn of_kernel() -> Result<Self, KernelError> {
        let path = Path::new("/sys/kernel/btf/vmlinux");
        let bytes = fs::read(path).map_err(|error| {
            KernelError::Btf(format!("{}: {error} (the kernel needs CONFIG_DEBUG_INFO_BTF)", path.display()))
        })?;
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Result<Self, KernelError> {
        if bytes.get(..2) != Some(MAGIC.to_ne_bytes().as_slice()) {
            return Err(broken("not BTF"));
        }
        let header = word(bytes, 4)? as usize;
        let section = |offset: usize, length: usize| -> Result<Vec<u8>, KernelError> {
            let start = header + word(bytes, offset)? as usize;
            let end = start + word(bytes, length)? as usize;
            Ok(bytes.get(start..end).ok_or_else(|| broken("truncated"))?.to_vec())
        };
        let (types, strings) = (section(8, 12)?, section(16, 20)?);
        let mut starts = Vec::new();
        let mut at = 0;
        while at < types.len() {
            starts.push(at);
            at += 12 + extra(word(&types, at + 4)?)?;
        }
        Ok(Self { types, strings, starts })
    }

    /// The offsets that adopt needs.
    pub fn offsets(&self) -> Result<KernelOffsets, KernelError> {
        Ok(KernelOffsets {
            skc_state: self.offset("sock_common", "skc_state")?,
            skc_family: self.offset("sock_common", "skc_family")?,
            skc_daddr: self.offset("sock_common", "skc_daddr")?,
            sk_rx_dst_ifindex: self.offset("sock", "sk_rx_dst_ifindex")?,
            sk_dst_cache: self.offset("sock", "sk_dst_cache")?,
            dst_dev: self.offset("dst_entry", "dev")?,
            dev_ifindex: self.offset("net_device", "ifindex")?,
        })
    }

    /// Byte offset of a member, also inside anonymous structures and unions.
    pub fn offset(&self, structure: &str, member: &str) -> Result<u32, KernelError> {
        for (index, &start) in self.starts.iter().enumerate() {
            let kind = word(&self.types, start + 4)? >> 24 & 0x1f;
            if kind == KIND_STRUCT
                && self.string(word(&self.types, start)?) == structure.as_bytes()
                && let Some(bits) = self.find(index as u32 + 1, member)?
            {
                return Ok(bits / 8);
            }
        }
        Err(KernelError::Btf(format!("struct {structure} has no member {member}")))
    }

    fn find(&self, type_id: u32, name: &str) -> Result<Option<u32>, KernelError> {
        for member in self.members(type_id)? {
            let found = self.string(member.name);
            if found == name.as_bytes() {
                return Ok(Some(member.bits));
            }
            if found.is_empty()
                && let Some(inner) = self.find(member.type_id, name)?
            {
                return Ok(Some(member.bits + inner));
            }
        }
        Ok(None)
    }

    /// Members of a structure or union; none for every other type.
    fn members(&self, type_id: u32) -> Result<Vec<Member>, KernelError> {
        let Some(&start) = (type_id as usize).checked_sub(1).and_then(|index| self.starts.get(index)) else {
            return Ok(Vec::new());
        };
        let info = word(&self.types, start + 4)?;
        if !matches!(info >> 24 & 0x1f, KIND_STRUCT | KIND_UNION) {
            return Ok(Vec::new());
        }
        let bitfields = info >> 31 == 1;
        (0..(info & 0xffff) as usize)
            .map(|index| {
                let at = start + 12 + index * 12;
                let offset = word(&self.types, at + 8)?;
                Ok(Member {
                    name: word(&self.types, at)?,
                    type_id: word(&self.types, at + 4)?,
                    bits: if bitfields { offset & 0x00ff_ffff } else { offset },
                })
            })
            .collect()
    }

    fn string(&self, offset: u32) -> &[u8] {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        rest.split(|&byte| byte == 0).next().unwrap_or_default()
    }
}

/// Bytes that follow a type's common part.
fn extra(info: u32) -> Result<usize, KernelError> {
    let count = (info & 0xffff) as usize;
    Ok(match info >> 24 & 0x1f {
        // Pointers, forward declarations, typedefs, qualifiers, functions, floats, type tags.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables, declaration tags.
        1 | 14 | 17 => 4,
        KIND_ARRAY => 12,
        KIND_STRUCT | KIND_UNION | 15 | 19 => count * 12,
        // Enumerations, function prototypes.
        6 | 13 => count * 8,
        kind => return Err(KernelError::Btf(format!("unknown kind {kind}"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A description of `struct outer { u8 first; union { u8 a; u8 b; }; }`.
    fn sample() -> Vec<u8> {
        let strings = b"\0outer\0first\0a\0b\0";
        let mut types = Vec::new();
        let mut push = |words: &[u32]| words.iter().for_each(|word| types.extend(word.to_ne_bytes()));
        push(&[0, 1 << 24, 1, 8]);
        push(&[0, KIND_UNION << 24 | 2, 1, 13, 1, 0, 15, 1, 0]);
        push(&[1, KIND_STRUCT << 24 | 2, 2, 7, 1, 0, 0, 2, 8]);
        let mut bytes = Vec::new();
        bytes.extend(MAGIC.to_ne_bytes());
        bytes.extend([1, 0]);
        for word in [24, 0, types.len() as u32, types.len() as u32, strings.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(types);
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn members_are_found_by_name_also_inside_anonymous_unions() {
        let btf = Btf::parse(&sample()).unwrap();
        assert_eq!(btf.offset("outer", "first").unwrap(), 0);
        assert_eq!(btf.offset("outer", "b").unwrap(), 1);
        assert!(btf.offset("outer", "c").is_err());
        assert!(btf.offset("inner", "a").is_err());
    }

    #[test]
    fn broken_descriptions_are_errors() {
        let whole = sample();
        for length in 0..whole.len() - 1 {
            let parsed = Btf::parse(&whole[..length]);
            assert!(parsed.is_err(), "{length} of {} bytes", whole.len());
        }
        assert!(Btf::parse(b"ELF").is_err());
    }
}
