//! Watches a pod's interface from the node's side: what the pod really sends, whatever it believes.

use std::{
    mem::MaybeUninit,
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    world::Host,
    ztunnel::{HBONE_PORT, PASSTHROUGH_TOS},
};

/// IP protocol numbers, as in [`Segment::protocol`].
pub const TCP: u8 = 6;
/// See [`TCP`].
pub const UDP: u8 = 17;
const DNS_PORT: u16 = 53;

/// A TCP segment, or another IP packet, that left the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// IPv6.
    pub v6: bool,
    /// IP protocol, that of the last header of an IPv6 chain.
    pub protocol: u8,
    /// More fragments follow, or this is not the first.
    pub fragment: bool,
    /// Source port; zero in all that has none.
    pub source_port: u16,
    /// Destination port; zero in all that has none.
    pub destination_port: u16,
    /// TCP flags.
    pub flags: u8,
    /// IP_TOS or traffic class.
    pub tos: u8,
}

impl Segment {
    /// First segment of a connection.
    pub fn is_syn(&self) -> bool {
        self.protocol == TCP && self.flags & 0x12 == 0x02
    }

    /// Something Istio captures that was not sent by the stand-in: a connection without its TOS.
    pub fn is_escaped(&self) -> bool {
        self.is_syn() && u32::from(self.tos) != PASSTHROUGH_TOS && self.destination_port != HBONE_PORT
    }
}

/// What an [`Observer`] saw.
#[derive(Clone, Debug, Default)]
pub struct Seen(pub Vec<Segment>);

impl Seen {
    /// Segments of the connection with this source port.
    pub fn from_port(&self, port: u16) -> usize {
        self.0.iter().filter(|segment| segment.protocol == TCP && segment.source_port == port).count()
    }

    /// Connections the pod opened.
    pub fn syns(&self) -> impl Iterator<Item = &Segment> {
        self.0.iter().filter(|segment| segment.is_syn())
    }

    /// What was sent to port 53, by either protocol.
    pub fn dns(&self) -> impl Iterator<Item = &Segment> {
        self.0
            .iter()
            .filter(|segment| matches!(segment.protocol, TCP | UDP) && segment.destination_port == DNS_PORT)
    }
}

/// A packet socket on one interface.
pub struct Observer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

impl Observer {
    /// Starts watching what arrives on the node's end of a pod's interface.
    ///
    /// # Errors
    /// When the interface does not exist.
    pub fn start(node: &Host, device: &str) -> Result<Self> {
        let socket = node.inside(|| packet_socket(device)).with_context(|| format!("watching {device}"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || watch(&socket, &stopped));
        Ok(Self { stop, thread })
    }

    /// Stops watching.
    ///
    /// # Panics
    /// When its thread did.
    pub fn stop(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the observer does not panic")
    }
}

fn packet_socket(device: &str) -> std::io::Result<Socket> {
    /// `ETH_P_ALL`.
    const ALL: u16 = 3;
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(i32::from(ALL.to_be()))))?;
    let index = nix::net::if_::if_nametoindex(device)?;
    // SAFETY: all fields of the address are plain integers.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = ALL.to_be();
    address.sll_ifindex = index.cast_signed();
    // SAFETY: a live address of the length that is given.
    let status = unsafe {
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length)
    };
    if status != 0 {
        return Err(std::io::Error::last_os_error());
    }
    socket.set_recv_buffer_size(8 << 20)?;
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    Ok(socket)
}

fn watch(socket: &Socket, stop: &AtomicBool) -> Seen {
    let mut seen = Seen::default();
    let mut buffer = [MaybeUninit::uninit(); 256];
    loop {
        // What is queued already counts: stop only when nothing more comes.
        match socket.recv_from(&mut buffer) {
            Ok((length, from)) => {
                if is_outgoing(&from) {
                    continue;
                }
                // SAFETY: the kernel filled that many bytes.
                let packet =
                    unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), length.min(256)) };
                seen.0.extend(parse(packet));
            }
            Err(_) if stop.load(Ordering::Relaxed) => return seen,
            Err(_) => {}
        }
    }
}

/// Sent by the node itself.
fn is_outgoing(from: &socket2::SockAddr) -> bool {
    // SAFETY: a packet socket's addresses are of this kind.
    let address = unsafe { &*from.as_ptr().cast::<libc::sockaddr_ll>() };
    address.sll_pkttype == libc::PACKET_OUTGOING
}

fn parse(packet: &[u8]) -> Option<Segment> {
    let ip = packet.get(14..)?;
    let first = *ip.first()?;
    let (v6, tos, protocol, offset, fragment) = match packet.get(12..14)? {
        [0x08, 0x00] => {
            let fragment = u16::from_be_bytes([*ip.get(6)?, *ip.get(7)?]) & 0x3fff;
            (false, *ip.get(1)?, *ip.get(9)?, usize::from(first & 0xf) * 4, fragment)
        }
        [0x86, 0xdd] => {
            let (protocol, offset, fragment) = v6_chain(ip)?;
            (true, first << 4 | ip.get(1)? >> 4, protocol, offset, fragment)
        }
        _ => return None,
    };
    // Not the first fragment: what is there are no ports.
    let transport = ip.get(offset..).filter(|_| fragment & 0x1fff == 0).unwrap_or_default();
    let port = |at: usize| match transport.get(at..at + 2) {
        Some(&[high, low]) if matches!(protocol, TCP | UDP) => u16::from_be_bytes([high, low]),
        _ => 0,
    };
    Some(Segment {
        v6,
        protocol,
        fragment: fragment != 0,
        source_port: port(0),
        destination_port: port(2),
        flags: transport.get(13).copied().filter(|_| protocol == TCP).unwrap_or(0),
        tos,
    })
}

/// Last protocol of an IPv6 chain, where its header starts, and the fragment's offset with the bit for more.
fn v6_chain(ip: &[u8]) -> Option<(u8, usize, u16)> {
    let (mut protocol, mut offset, mut fragment) = (*ip.get(6)?, 40, 0);
    loop {
        let header = ip.get(offset..offset + 4);
        match (protocol, header) {
            (0 | 43 | 60, Some(&[next, length, ..])) => {
                (protocol, offset) = (next, offset + (usize::from(length) + 1) * 8);
            }
            (44, Some(&[next, _, high, low])) => {
                // In units of eight bytes, as in IPv4, and the bit where IPv4 has it.
                let raw = u16::from_be_bytes([high, low]);
                fragment = raw >> 3 | (raw & 1) << 13;
                (protocol, offset) = (next, offset + 8);
                if fragment & 0x1fff != 0 {
                    return Some((protocol, offset, fragment));
                }
            }
            _ => return Some((protocol, offset, fragment)),
        }
    }
}
