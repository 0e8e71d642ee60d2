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

use crate::world::Host;

/// A TCP segment that left the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// IPv6.
    pub v6: bool,
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// TCP flags.
    pub flags: u8,
    /// IP_TOS or traffic class.
    pub tos: u8,
}

impl Segment {
    /// First segment of a connection.
    pub fn is_syn(&self) -> bool {
        self.flags & 0x12 == 0x02
    }
}

/// What an [`Observer`] saw.
#[derive(Clone, Debug, Default)]
pub struct Seen(pub Vec<Segment>);

impl Seen {
    /// Segments of the connection with this source port.
    pub fn from_port(&self, port: u16) -> usize {
        self.0.iter().filter(|segment| segment.source_port == port).count()
    }

    /// Connections the pod opened.
    pub fn syns(&self) -> impl Iterator<Item = &Segment> {
        self.0.iter().filter(|segment| segment.is_syn())
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
    let (v6, tos, tcp) = match (packet.get(12..14)?, ip.first()?) {
        ([0x08, 0x00], first) => {
            (*ip.get(9)? == 6).then_some(())?;
            (false, *ip.get(1)?, ip.get(usize::from(first & 0xf) * 4..)?)
        }
        ([0x86, 0xdd], first) => {
            (*ip.get(6)? == 6).then_some(())?;
            (true, first << 4 | ip.get(1)? >> 4, ip.get(40..)?)
        }
        _ => return None,
    };
    Some(Segment {
        v6,
        source_port: u16::from_be_bytes([*tcp.first()?, *tcp.get(1)?]),
        destination_port: u16::from_be_bytes([*tcp.get(2)?, *tcp.get(3)?]),
        flags: *tcp.get(13)?,
        tos,
    })
}
