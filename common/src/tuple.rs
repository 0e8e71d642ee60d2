//! Addresses and connection tuples as map keys.

/// An IP address: 16 bytes in network order as four native words, IPv4 mapped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Addr(pub [u32; 4]);

/// Second to last word of a mapped IPv4 address, as it lies in memory.
const MAPPED: u32 = 0xffff_u32.to_be();
/// Last word of `::1`, as it lies in memory.
const ONE: u32 = 1_u32.to_be();

impl Addr {
    /// `::1`.
    pub const LOOPBACK_V6: Self = Self([0, 0, 0, ONE]);
    /// `127.0.0.1`.
    pub const LOOPBACK_V4: Self = Self::v4(0x7f00_0001_u32.to_be());

    /// From the four bytes of an IPv4 address as they lie in a packet.
    #[inline(always)]
    pub const fn v4(network_order: u32) -> Self {
        Self([0, 0, MAPPED, network_order])
    }

    /// The IPv4 address in network order; only meaningful for a mapped address.
    #[inline(always)]
    pub const fn last_word(&self) -> u32 {
        self.0[3]
    }

    /// A copy made of four loads and stores. LLVM 22 raises the alignment of some copies on the stack to 16 and then
    /// crashes on them, because its BPF back end knows block copies of up to 8 only.
    #[inline(always)]
    pub fn by_word(&self) -> Self {
        let word = |index: usize| {
            // SAFETY: a reference into this very array, at an index below four.
            unsafe { core::ptr::read_volatile(&raw const self.0[index]) }
        };
        Self([word(0), word(1), word(2), word(3)])
    }

    /// 127.0.0.0/8 as a whole, or `::1`.
    #[inline(always)]
    pub const fn is_loopback(&self) -> bool {
        let [a, b, c, d] = self.0;
        a == 0 && b == 0 && ((c == MAPPED && u32::from_be(d) >> 24 == 127) || (c == 0 && d == ONE))
    }
}

/// One direction of a connection: who sends and to whom. Ports in network order, as they lie in the packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// Source address.
    pub source: Addr,
    /// Destination address.
    pub destination: Addr,
    /// Source port, network order.
    pub source_port: u16,
    /// Destination port, network order.
    pub destination_port: u16,
}

const _: () = assert!(size_of::<Addr>() == 16 && size_of::<Tuple>() == 36);

#[cfg(feature = "user")]
mod user {
    use core::net::IpAddr;

    use super::{Addr, Tuple};

    impl From<IpAddr> for Addr {
        fn from(ip: IpAddr) -> Self {
            let bytes = match ip {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            let word = |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
            Self([word(0), word(4), word(8), word(12)])
        }
    }

    impl From<Addr> for IpAddr {
        fn from(addr: Addr) -> Self {
            let mut bytes = [0; 16];
            for (chunk, word) in bytes.chunks_exact_mut(4).zip(addr.0) {
                chunk.copy_from_slice(&word.to_ne_bytes());
            }
            Self::from(bytes).to_canonical()
        }
    }

    // SAFETY: four words, no padding, every bit pattern is valid.
    unsafe impl aya::Pod for Addr {}
    // SAFETY: 36 bytes of words and half words without padding, every bit pattern is valid.
    unsafe impl aya::Pod for Tuple {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_127_as_a_whole_and_one() {
        let v4 = |a, b, c, d| Addr::v4(u32::from_ne_bytes([a, b, c, d]));
        for (addr, expected) in [
            (v4(127, 0, 0, 1), true),
            (v4(127, 255, 0, 2), true),
            (v4(126, 255, 255, 255), false),
            (v4(10, 0, 0, 1), false),
            (Addr::LOOPBACK_V6, true),
            (Addr::LOOPBACK_V4, true),
            (Addr([0, 0, 0, 0]), false),
            (Addr([0xfd, 0, 0, 1_u32.to_be()]), false),
        ] {
            assert_eq!(addr.is_loopback(), expected, "{addr:?}");
        }
    }
}
