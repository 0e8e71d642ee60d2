//! TCP sockets of a namespace, seen and ended through inet_diag (`SOCK_DIAG_BY_FAMILY`, Linux 3.3; `SOCK_DESTROY`,
//! Linux 4.5).

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
};

use netlink_packet_core::{DecodeError, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use super::netlink::{Netlink, NetlinkError, Request};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const IPPROTO_TCP: u8 = 6;
const INET_DIAG_MARK: u16 = 15;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// `struct inet_diag_sockid`: ports, addresses, interface, cookie.
const ID: usize = 48;
/// `struct inet_diag_req_v2`.
const REQUEST: usize = 8 + ID;
/// `struct inet_diag_msg`.
const ANSWER: usize = 4 + ID + 20;

/// TCP states, as bits of a mask and as inet_diag numbers them.
pub mod state {
    /// `TCP_ESTABLISHED`.
    pub const ESTABLISHED: u8 = 1;
    /// `TCP_SYN_SENT`.
    pub const SYN_SENT: u8 = 2;
    /// `TCP_SYN_RECV`.
    pub const SYN_RECV: u8 = 3;
    /// `TCP_TIME_WAIT`.
    pub const TIME_WAIT: u8 = 6;
    /// `TCP_LISTEN`.
    pub const LISTEN: u8 = 10;
}

/// One TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpSocket {
    family: u8,
    id: [u8; ID],
    /// TCP state.
    pub state: u8,
    /// SO_MARK; 0 also for sockets in states that carry none.
    pub mark: u32,
}

impl TcpSocket {
    /// Local port.
    pub fn local_port(&self) -> u16 {
        u16::from_be_bytes([self.id[0], self.id[1]])
    }

    /// Remote port.
    pub fn remote_port(&self) -> u16 {
        u16::from_be_bytes([self.id[2], self.id[3]])
    }

    /// Local address.
    pub fn local(&self) -> IpAddr {
        self.address(4)
    }

    /// Remote address.
    pub fn remote(&self) -> IpAddr {
        self.address(20)
    }

    fn address(&self, at: usize) -> IpAddr {
        let bytes: [u8; 16] = self.id[at..at + 16].try_into().expect("sixteen bytes");
        if self.family == AF_INET {
            IpAddr::from([bytes[0], bytes[1], bytes[2], bytes[3]])
        } else {
            IpAddr::from(Ipv6Addr::from(bytes)).to_canonical()
        }
    }
}

/// Lists the TCP sockets of the calling thread's namespace in the given states (a mask of `1 << state`).
pub fn list(states: u32) -> Result<Vec<TcpSocket>, NetlinkError> {
    let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
    let mut sockets = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let request = Diag::Request { kind: SOCK_DIAG_BY_FAMILY, family, states, id: [0; ID] };
        match netlink.dump("listing TCP sockets", request) {
            Ok(answers) => sockets.extend(answers.into_iter().filter_map(|answer| match answer {
                Diag::Socket(socket) => Some(socket),
                Diag::Request { .. } => None,
            })),
            // A kernel without IPv6 knows no such sockets.
            Err(error) if family == AF_INET6 && error.errno() == Some(nix::libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sockets)
}

/// Which socket the kernel gives a new connection to 127.0.0.1, for each port; none where nobody listens there. A
/// listener on all addresses is found, also one of IPv6. Unlike [`list`] this does not walk the tables of the machine.
pub fn listeners<const N: usize>(ports: [u16; N]) -> Result<[Option<TcpSocket>; N], NetlinkError> {
    let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
    let mut found = [const { None }; N];
    for (port, found) in ports.into_iter().zip(&mut found) {
        let mut id = [0; ID];
        id[..2].copy_from_slice(&port.to_be_bytes());
        // From some port there.
        id[2..4].copy_from_slice(&1_u16.to_be_bytes());
        id[4..8].copy_from_slice(&[127, 0, 0, 1]);
        id[20..24].copy_from_slice(&[127, 0, 0, 1]);
        // INET_DIAG_NOCOOKIE: whichever it is.
        id[40..].fill(u8::MAX);
        let request = Diag::Request { kind: SOCK_DIAG_BY_FAMILY, family: AF_INET, states: u32::MAX, id };
        match netlink.ask("looking for a listener", request) {
            Ok(Diag::Socket(socket)) if socket.state == state::LISTEN => *found = Some(socket),
            Ok(_) => {}
            Err(error) if error.errno() == Some(nix::libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Ends connections with a reset to both sides. Those that ended meanwhile are no error.
pub fn destroy(sockets: &[TcpSocket]) -> Result<(), NetlinkError> {
    let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
    // A packet must fit the socket's send buffer.
    for chunk in sockets.chunks(256) {
        netlink.apply(
            chunk
                .iter()
                .map(|socket| Request {
                    what: format!("ending a connection to {}", socket.remote()),
                    message: Diag::Request {
                        kind: SOCK_DESTROY,
                        family: socket.family,
                        states: u32::MAX,
                        id: socket.id,
                    },
                    flags: 0,
                    tolerate: Some(nix::libc::ENOENT),
                })
                .collect(),
        )?;
    }
    Ok(())
}

/// Messages of inet_diag: requests out, sockets in.
enum Diag {
    Request { kind: u16, family: u8, states: u32, id: [u8; ID] },
    Socket(TcpSocket),
}

impl NetlinkSerializable for Diag {
    fn message_type(&self) -> u16 {
        match self {
            Self::Request { kind, .. } => *kind,
            Self::Socket(_) => SOCK_DIAG_BY_FAMILY,
        }
    }

    fn buffer_len(&self) -> usize {
        REQUEST
    }

    fn serialize(&self, buffer: &mut [u8]) {
        let Self::Request { family, states, id, .. } = self else { return };
        buffer[..4].copy_from_slice(&[*family, IPPROTO_TCP, 0, 0]);
        buffer[4..8].copy_from_slice(&states.to_ne_bytes());
        buffer[8..REQUEST].copy_from_slice(id);
    }
}

impl NetlinkDeserializable for Diag {
    type Error = DecodeError;

    fn deserialize(_: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let fixed = payload
            .get(..ANSWER)
            .ok_or_else(|| DecodeError::from(io::Error::other("short answer of inet_diag").to_string()))?;
        let id = fixed[4..4 + ID].try_into().expect("the id's length");
        let mut mark = 0;
        let mut rest = &payload[ANSWER..];
        while let [l0, l1, t0, t1, ..] = *rest {
            let length = usize::from(u16::from_ne_bytes([l0, l1]));
            if u16::from_ne_bytes([t0, t1]) == INET_DIAG_MARK
                && let Some([a, b, c, d]) = rest.get(4..8)
            {
                mark = u32::from_ne_bytes([*a, *b, *c, *d]);
            }
            rest = rest.get(length.max(4).next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(Self::Socket(TcpSocket { family: fixed[0], id, state: fixed[1], mark }))
    }
}
