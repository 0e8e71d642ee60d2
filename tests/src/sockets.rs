//! Sockets and packets that applications rarely make.

use std::{
    io,
    mem::MaybeUninit,
    net::{IpAddr, SocketAddr, TcpStream},
    os::fd::AsRawFd,
    time::Duration,
};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::{
    dns_client::{any, udp},
    observer::TCP,
    world::Host,
};

const PATIENCE: Duration = Duration::from_secs(5);

/// A connection whose SYN carries data: no cookie is asked for or wanted, on either side.
///
/// # Errors
/// What the kernel says.
pub fn fast_open(host: &Host, to: SocketAddr) -> io::Result<TcpStream> {
    host.sysctl("net.ipv4.tcp_fastopen", "0x607").map_err(io::Error::other)?;
    let socket = host.inside(|| Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP)))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.send_to_with_flags(b"x", &to.into(), libc::MSG_FASTOPEN)?;
    Ok(socket.into())
}

/// An option that makes the network header longer.
#[derive(Debug)]
pub struct HeaderOption {
    level: i32,
    name: i32,
    bytes: &'static [u8],
}

impl HeaderOption {
    /// Sets it for all that the socket sends.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set(&self, socket: &Socket) -> io::Result<()> {
        // SAFETY: the kernel reads that many bytes of a live slice.
        let status = unsafe {
            let length = self.bytes.len() as libc::socklen_t;
            libc::setsockopt(socket.as_raw_fd(), self.level, self.name, self.bytes.as_ptr().cast(), length)
        };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Those of a family.
pub fn header_options(v6: bool) -> &'static [HeaderOption] {
    const PADDING: &[u8] = &[0, 0, 1, 4, 0, 0, 0, 0];
    if v6 {
        &[
            HeaderOption { level: libc::IPPROTO_IPV6, name: libc::IPV6_HOPOPTS, bytes: PADDING },
            HeaderOption { level: libc::IPPROTO_IPV6, name: libc::IPV6_DSTOPTS, bytes: PADDING },
        ]
    } else {
        &[
            HeaderOption { level: libc::IPPROTO_IP, name: libc::IP_OPTIONS, bytes: &[1, 1, 1, 1] },
            // Time stamps with room for one.
            HeaderOption {
                level: libc::IPPROTO_IP,
                name: libc::IP_OPTIONS,
                bytes: &[68, 8, 5, 0, 0, 0, 0, 0],
            },
        ]
    }
}

/// Sends a SYN made by hand, with its IP header unless the protocol is TCP (IPv4 only).
///
/// # Panics
/// When there is no such socket.
pub fn raw_syn(host: &Host, to: SocketAddr, protocol: Protocol) {
    let mut segment = [0_u8; 20];
    segment[..2].copy_from_slice(&[0x1e, 0x61]);
    segment[2..4].copy_from_slice(&to.port().to_be_bytes());
    segment[12..14].copy_from_slice(&[0x50, 0x02]);
    let mut packet = Vec::new();
    match (host.ip(to.is_ipv6()), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let sum = [&from.octets()[..], &to.octets(), &[0, 6, 0, 20], &segment].concat();
            segment[16..18].copy_from_slice(&checksum(&sum));
            if protocol != Protocol::TCP {
                packet.extend([0x45, 0, 0, 40, 0, 0, 0, 0, 64, TCP, 0, 0]);
                packet.extend([from.octets(), to.octets()].concat());
            }
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            packet.extend([0x60, 0, 0, 0, 0, 20, TCP, 64]);
            packet.extend([from.octets(), to.octets()].concat());
        }
        _ => unreachable!("one family"),
    }
    packet.extend(segment);
    let socket = host.inside(|| Socket::new(Domain::for_address(to), Type::RAW, Some(protocol))).unwrap();
    // A raw IPv6 socket takes no port.
    let to = SocketAddr::new(to.ip(), 0);
    // The kernel may say that the guard dropped it.
    let _ = socket.send_to(&packet, &SockAddr::from(to));
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let sum: u32 = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    (!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes()
}

/// One datagram there and back.
///
/// # Panics
/// When it does not come.
pub fn echo(from: &Host, to: &Host, v6: bool, size: usize) {
    let (client, server) = (udp(from, any(v6)), udp(to, any(v6)));
    client.connect(to.addr(v6, server.local_addr().unwrap().port())).unwrap();
    client.send(&vec![7; size]).unwrap();
    let mut buffer = [0; 8192];
    let (length, peer) = server.recv_from(&mut buffer).unwrap();
    assert_eq!((length, peer.ip()), (size, from.ip(v6)));
    server.send_to(&buffer[..length], peer).unwrap();
    assert_eq!(client.recv(&mut buffer).unwrap(), size);
}

/// An ICMP echo there and back; needs the sysctl `net.ipv4.ping_group_range`.
///
/// # Panics
/// When it does not come.
pub fn ping(from: &Host, to: IpAddr) {
    let (domain, protocol, request, reply) = match to {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
    };
    let socket = from.inside(|| Socket::new(domain, Type::DGRAM, Some(protocol))).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.send_to(&[request, 0, 0, 0, 0, 0, 0, 1], &SocketAddr::new(to, 0).into()).unwrap();
    let mut buffer = [MaybeUninit::new(0xff); 64];
    let (length, _) = socket.recv_from(&mut buffer).unwrap();
    // SAFETY: initialised when it was made.
    assert_eq!((length, unsafe { buffer[0].assume_init() }), (8, reply));
}
