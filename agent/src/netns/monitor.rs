//! Tells when interfaces or addresses of a namespace change.

use std::{io, os::fd::AsRawFd};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tokio::io::unix::AsyncFd;

use super::{Netns, NetnsError};

/// `RTMGRP_LINK`, `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR` of `linux/rtnetlink.h`.
const GROUPS: u32 = 0x1 | 0x10 | 0x100;

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
