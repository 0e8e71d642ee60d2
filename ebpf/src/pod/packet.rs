//! A packet at a tc hook: the quick look by direct packet access, and the careful parse.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::{bpf_skb_load_bytes, bpf_skb_store_bytes},
};
use weir_common::{Addr, Family, Tuple, is_marked};

/// tc verdict: go on, also to the filters of others.
pub const PASS: i32 = TC_ACT_UNSPEC;
/// tc verdict: drop.
pub const DROP: i32 = TC_ACT_SHOT;

/// IP protocol numbers.
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;

const ETH_P_IP: u32 = 0x0800_u16.to_be() as u32;
const ETH_P_IPV6: u32 = 0x86dd_u16.to_be() as u32;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// A chain of so many extension headers is not understood: guard drops it.
const MAX_EXTENSIONS: u32 = 6;

/// TCP flags.
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
const RST: u8 = 0x04;

/// An skb and where its network header starts.
#[derive(Clone, Copy)]
pub struct Packet {
    skb: *mut __sk_buff,
    network: u32,
}

/// What the network header says.
pub enum Network {
    /// Neither IPv4 nor IPv6, or too short to tell.
    Other,
    /// An IPv6 chain of extension headers that is too long or broken.
    Opaque,
    /// A transport header, or a fragment without one.
    Transport(Transport),
}

/// The transport header of a packet.
#[derive(Clone, Copy)]
pub struct Transport {
    /// IP family.
    pub family: Family,
    /// TCP, UDP or anything else.
    pub protocol: u8,
    /// Offset of the transport header from the start of the packet.
    pub offset: u32,
    /// More fragments follow, or this is not the first.
    pub fragment: bool,
    /// Not the first fragment: there is no transport header here.
    pub headless: bool,
    /// Addresses; ports are filled in by [`Packet::ports`].
    pub tuple: Tuple,
}

impl Packet {
    #[inline(always)]
    pub fn new(skb: *mut __sk_buff, network: u32) -> Self {
        Self { skb, network }
    }

    #[inline(always)]
    pub fn skb(&self) -> *mut __sk_buff {
        self.skb
    }

    /// Offset of the network header.
    #[inline(always)]
    pub fn network(&self) -> u32 {
        self.network
    }

    #[inline(always)]
    pub fn is_marked(&self) -> bool {
        // SAFETY: the context pointer of a tc program.
        is_marked(unsafe { (*self.skb).mark })
    }

    #[inline(always)]
    pub fn set_mark(&self, mark: u32) {
        // SAFETY: the context pointer of a tc program; `mark` is writable there.
        unsafe { (*self.skb).mark = mark };
    }

    /// Index of the interface the packet is on.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        // SAFETY: the context pointer of a tc program.
        unsafe { (*self.skb).ifindex }
    }

    /// Copies bytes out of the packet, linear or not.
    #[inline(always)]
    pub fn load<T: Copy>(&self, offset: u32) -> Option<T> {
        let mut value = core::mem::MaybeUninit::<T>::uninit();
        // SAFETY: the helper fills exactly size_of::<T>() bytes or fails; every T used here is plain bytes.
        unsafe {
            let len = size_of::<T>() as u32;
            (bpf_skb_load_bytes(self.skb.cast(), offset, value.as_mut_ptr().cast(), len) == 0)
                .then(|| value.assume_init())
        }
    }

    /// Overwrites bytes of the packet; checksums are the caller's business.
    #[inline(always)]
    pub fn store<T: Copy>(&self, offset: u32, value: &T) -> bool {
        // SAFETY: the helper reads size_of::<T>() bytes of a live value.
        unsafe {
            bpf_skb_store_bytes(self.skb.cast(), offset, (&raw const *value).cast(), size_of::<T>() as u32, 0)
                == 0
        }
    }

    /// True for what makes up nearly all traffic: a whole TCP segment that is no SYN, without options in its
    /// network header, found by direct packet access. With `dns`, its ports must not be those of DNS either.
    #[inline(always)]
    pub fn is_plain_segment(&self, dns: bool) -> bool {
        // SAFETY: data and data_end are packet pointers; every access below is inside a bound that was compared
        // with data_end first.
        unsafe {
            let data = (*self.skb).data as usize + self.network as usize;
            let end = (*self.skb).data_end as usize;
            let tcp = match (*self.skb).protocol {
                ETH_P_IP => {
                    if data + 40 > end {
                        return false;
                    }
                    let ip = data as *const u8;
                    let fragment = *ip.add(6) & 0x3f | *ip.add(7);
                    if *ip != 0x45 || *ip.add(9) != TCP || fragment != 0 {
                        return false;
                    }
                    ip.add(20)
                }
                ETH_P_IPV6 => {
                    if data + 60 > end {
                        return false;
                    }
                    let ip = data as *const u8;
                    if *ip.add(6) != TCP {
                        return false;
                    }
                    ip.add(40)
                }
                _ => return false,
            };
            if *tcp.add(13) & SYN != 0 {
                return false;
            }
            if !dns {
                return true;
            }
            let source = u16::from_be_bytes([*tcp, *tcp.add(1)]);
            let destination = u16::from_be_bytes([*tcp.add(2), *tcp.add(3)]);
            destination != weir_common::DNS_PORT && source != weir_common::DNS_PROXY_PORT
        }
    }

    /// Finds the transport header.
    #[inline(always)]
    pub fn network_header(&self) -> Network {
        // SAFETY: the context pointer of a tc program.
        match unsafe { (*self.skb).protocol } {
            ETH_P_IP => self.ipv4(),
            ETH_P_IPV6 => self.ipv6(),
            _ => Network::Other,
        }
    }

    #[inline(always)]
    fn ipv4(&self) -> Network {
        let Some(header) = self.load::<[u32; 5]>(self.network) else { return Network::Other };
        let version_and_length = u32::from_be(header[0]) >> 24;
        let length = (version_and_length & 0xf) * 4;
        if version_and_length >> 4 != 4 || length < 20 {
            return Network::Other;
        }
        let fragment = u32::from_be(header[1]) & 0x3fff;
        Network::Transport(Transport {
            family: Family::V4,
            protocol: (u32::from_be(header[2]) >> 16) as u8,
            offset: self.network + length,
            fragment: fragment != 0,
            headless: fragment & 0x1fff != 0,
            tuple: Tuple {
                source: Addr::v4(header[3]),
                destination: Addr::v4(header[4]),
                source_port: 0,
                destination_port: 0,
            },
        })
    }

    #[inline(always)]
    fn ipv6(&self) -> Network {
        let Some(header) = self.load::<[u32; 10]>(self.network) else { return Network::Other };
        if u32::from_be(header[0]) >> 28 != 6 {
            return Network::Other;
        }
        let [_, lengths, s0, s1, s2, s3, d0, d1, d2, d3] = header;
        let mut transport = Transport {
            family: Family::V6,
            protocol: (u32::from_be(lengths) >> 8) as u8,
            offset: self.network + 40,
            fragment: false,
            headless: false,
            tuple: Tuple {
                source: Addr([s0, s1, s2, s3]),
                destination: Addr([d0, d1, d2, d3]),
                source_port: 0,
                destination_port: 0,
            },
        };
        for _ in 0..MAX_EXTENSIONS {
            let protocol = transport.protocol;
            if !matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS) {
                return Network::Transport(transport);
            }
            let Some([next, length, high, low]) = self.load::<[u8; 4]>(transport.offset) else {
                return Network::Opaque;
            };
            transport.protocol = next;
            if protocol == FRAGMENT {
                transport.fragment = true;
                transport.offset += 8;
                if high | (low & 0xf8) != 0 {
                    transport.headless = true;
                    return Network::Transport(transport);
                }
            } else {
                transport.offset += (u32::from(length) + 1) * 8;
            }
        }
        Network::Opaque
    }

    /// The tuple with its ports; none for a fragment without a transport header, or a truncated one.
    #[inline(always)]
    pub fn ports(&self, transport: &Transport) -> Option<Tuple> {
        if transport.headless {
            return None;
        }
        let [source_port, destination_port] = self.load::<[u16; 2]>(transport.offset)?;
        Some(Tuple { source_port, destination_port, ..transport.tuple })
    }

    /// True for the first segment of a TCP connection.
    #[inline(always)]
    pub fn is_syn(&self, transport: &Transport) -> bool {
        self.load::<u8>(transport.offset + 13).is_some_and(|flags| flags & (SYN | ACK) == SYN)
    }

    /// True for a TCP reset.
    #[inline(always)]
    pub fn is_reset(&self, transport: &Transport) -> bool {
        self.load::<u8>(transport.offset + 13).is_some_and(|flags| flags & RST != 0)
    }
}
