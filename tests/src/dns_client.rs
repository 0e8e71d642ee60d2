//! A client of DNS as applications are: plain sockets, and a strict look at every answer.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use socket2::SockRef;

use crate::{world::Host, ztunnel::dns};

/// The port of DNS.
pub const DNS: u16 = 53;
/// How long a client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A UDP socket of the host, on any port, that waits long enough and has room for a flood.
///
/// # Panics
/// When the kernel refuses, as all of these helpers do: they are for tests.
pub fn udp(host: &Host, ip: IpAddr) -> UdpSocket {
    udp_at(host, SocketAddr::new(ip, 0))
}

/// The same on a certain port.
///
/// # Panics
/// As [`udp`].
pub fn udp_at(host: &Host, address: SocketAddr) -> UdpSocket {
    let socket = host.inside(|| UdpSocket::bind(address)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    SockRef::from(&socket).set_recv_buffer_size(4 << 20).unwrap();
    socket
}

/// The unspecified address of a family.
pub fn any(v6: bool) -> IpAddr {
    if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
}

/// Checks that a packet answers this very question: its id, its question section, the address of its name.
///
/// # Panics
/// When it does not.
pub fn check(answer: &[u8], question: &[u8], name: &str) {
    let (id, address) = dns::parse_answer(answer).expect("an answer");
    assert_eq!(id.to_be_bytes(), question[..2], "{name}: id");
    assert_eq!(answer[12..question.len()], question[12..], "{name}: question");
    assert_eq!(address, dns::address_of(name));
}

/// A connection to a server.
///
/// # Errors
/// What the kernel says.
pub fn connect_tcp(host: &Host, server: SocketAddr) -> io::Result<TcpStream> {
    let stream = host.inside(|| TcpStream::connect_timeout(&server, PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Asks over TCP, checks the answer and returns it.
///
/// # Panics
/// When the answer is wrong or none.
pub fn ask_tcp(stream: &mut TcpStream, id: u16, name: &str) -> Vec<u8> {
    let question = dns::query(id, name);
    stream.write_all(&[&(question.len() as u16).to_be_bytes()[..], &question].concat()).unwrap();
    let mut length = [0; 2];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer).unwrap();
    check(&answer, &question, name);
    answer
}
