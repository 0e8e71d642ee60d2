//! Tells when interfaces, addresses, filters, rules or routes of a namespace change.

use std::{io, os::fd::AsRawFd};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tokio::io::unix::AsyncFd;

use super::{Netns, NetnsError};

/// Of `linux/rtnetlink.h`: LINK, TC, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE.
const GROUPS: u32 = 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 18;

/// A socket in the namespace that hears of every change. Needs a tokio runtime around it.
pub struct Monitor {
    socket: AsyncFd<Socket>,
}

impl Monitor {
    /// Starts listening: nothing that happens from here on is missed.
    pub fn open(netns: &Netns) -> Result<Self, NetnsError> {
        let socket = netns.enter(|| -> io::Result<Socket> {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.bind(&SocketAddr::new(0, GROUPS))?;
            socket.set_non_blocking(true)?;
            Ok(socket)
        })?;
        let socket = socket.map_err(NetnsError::Monitor)?;
        // SAFETY: the socket owns its descriptor until it is dropped, and the registration does not outlive it.
        let registered = unsafe { AsyncFd::register(socket) };
        Ok(Self { socket: registered.map_err(|error| NetnsError::Monitor(error.into()))? })
    }

    /// Returns after the next change. Changes that come together are told of once. Cancel-safe.
    pub async fn changed(&self) -> io::Result<()> {
        loop {
            let mut ready = self.socket.readable().await?;
            let heard = ready.try_io(|socket| drain(socket.get_ref()));
            if let Ok(heard) = heard {
                return heard;
            }
        }
    }
}

/// Reads all that is there. What is said does not matter: whoever is told looks for himself. An overrun says so too.
fn drain(socket: &Socket) -> io::Result<()> {
    let mut heard = false;
    loop {
        let mut buffer = Vec::with_capacity(16 * 1024);
        match socket.recv(&mut buffer, 0) {
            Ok(_) => heard = true,
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => heard = true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && heard => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Monitor({})", self.socket.get_ref().as_raw_fd())
    }
}
