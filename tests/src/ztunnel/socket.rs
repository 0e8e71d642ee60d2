//! The sockets ztunnel makes inside a pod, with exactly its options.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, getsockopt, setsockopt, socket, sockopt,
};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream, UdpSocket},
    time::timeout,
};

use super::netns::PodNetns;

/// SO_MARK of every socket ztunnel makes in a pod.
pub const MARK: u32 = 0x539;
/// IP_TOS (IPV6_TCLASS) of what is passed through in plaintext; ours, so that an observer outside the pod
/// can tell ztunnel's own SYN from one that escaped capture.
pub const PASSTHROUGH_TOS: u32 = 0x68;

const BACKLOG: u32 = 128;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether a listener takes connections to addresses that are not the pod's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Transparency {
    /// IP_TRANSPARENT, inherited by what it accepts.
    Transparent,
    /// A plain listener.
    Plain,
}

fn tcp(netns: &PodNetns, v4: bool) -> io::Result<TcpSocket> {
    let socket = netns.run(|| if v4 { TcpSocket::new_v4() } else { TcpSocket::new_v6() })??;
    setsockopt(&socket, sockopt::Mark, &MARK)?;
    Ok(socket)
}

/// A TCP listener in the pod. No SO_REUSEADDR: ztunnel sets none.
pub fn listen(netns: &PodNetns, address: SocketAddr, transparency: Transparency) -> io::Result<TcpListener> {
    let socket = tcp(netns, address.is_ipv4())?;
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    let listener = socket.listen(BACKLOG)?;
    if transparency == Transparency::Transparent {
        // ztunnel sets the v4 option even on its v6 socket; the kernel keeps one flag for both.
        setsockopt(&listener, sockopt::IpTransparent, &true)?;
    }
    Ok(listener)
}

/// A UDP socket in the pod.
pub fn udp(netns: &PodNetns, address: SocketAddr) -> io::Result<UdpSocket> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = netns.run(|| socket(family, SockType::Datagram, flags, None))??;
    setsockopt(&fd, sockopt::Mark, &MARK)?;
    setsockopt(&fd, sockopt::ReusePort, &true)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    UdpSocket::from_std(fd.into())
}

/// Connects to another ztunnel: marked, nothing else.
pub async fn connect_hbone(netns: &PodNetns, to: SocketAddr) -> io::Result<TcpStream> {
    connect(tcp(netns, to.is_ipv4())?, to).await
}

/// Connects to where the app wanted to go, in plaintext.
pub async fn connect_passthrough(netns: &PodNetns, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = tcp(netns, to.is_ipv4())?;
    // Before connect: the SYN itself has to carry it.
    if to.is_ipv4() {
        socket.set_tos_v4(PASSTHROUGH_TOS)?
    } else {
        socket.set_tclass_v6(PASSTHROUGH_TOS)?
    }
    connect(socket, to).await
}

/// Connects to the pod's app with the client's address as source. The client's port is not kept, and a
/// client that is the destination itself is not imitated: both as ztunnel does.
pub async fn connect_app(netns: &PodNetns, client: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = tcp(netns, to.is_ipv4())?;
    if client != to.ip() {
        // The v4 options set the flags that v6 looks at, too.
        setsockopt(&socket, sockopt::IpTransparent, &true)?;
        setsockopt(&socket, sockopt::IpFreebind, &true)?;
        socket.bind(SocketAddr::new(client, 0))?;
    }
    connect(socket, to).await
}

async fn connect(socket: TcpSocket, to: SocketAddr) -> io::Result<TcpStream> {
    socket.set_nodelay(true)?;
    timeout(CONNECT_TIMEOUT, socket.connect(to)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// What ztunnel asks an accepted connection first. Behind an eBPF redirect nobody rewrote anything, and
/// both questions have to fail.
pub fn so_original_dst(stream: &impl AsFd) -> Option<SocketAddr> {
    if let Ok(a) = getsockopt(stream, sockopt::OriginalDst) {
        return Some((u32::from_be(a.sin_addr.s_addr).to_be_bytes(), u16::from_be(a.sin_port)).into());
    }
    let a = getsockopt(stream, sockopt::Ip6tOriginalDst).ok()?;
    Some((a.sin6_addr.s6_addr, u16::from_be(a.sin6_port)).into())
}

/// A v4 address in the v6 clothes of a dual-stack socket becomes v4 again.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ztunnel::netns;

    /// The thread's own namespace: the options are the same everywhere.
    fn here() -> PodNetns {
        PodNetns::new(Arc::new(netns::current().unwrap()), netns::current().unwrap()).unwrap()
    }

    fn options(socket: &impl AsFd) -> (u32, bool, bool, bool) {
        (
            getsockopt(socket, sockopt::Mark).unwrap(),
            getsockopt(socket, sockopt::ReusePort).unwrap(),
            getsockopt(socket, sockopt::ReuseAddr).unwrap(),
            getsockopt(socket, sockopt::IpTransparent).unwrap(),
        )
    }

    #[tokio::test]
    async fn listeners_have_ztunnels_options() {
        let netns = here();
        for address in ["[::]:0", "0.0.0.0:0", "127.0.0.1:0"] {
            let address = address.parse().unwrap();
            let proxy = listen(&netns, address, Transparency::Transparent).unwrap();
            assert_eq!(options(&proxy), (MARK, true, false, true), "{address}");
            let dns = listen(&netns, address, Transparency::Plain).unwrap();
            assert_eq!(options(&dns), (MARK, true, false, false), "{address}");
            let udp = udp(&netns, address).unwrap();
            assert_eq!(options(&udp), (MARK, true, false, false), "{address}");
        }
    }

    #[tokio::test]
    async fn accepted_sockets_inherit_and_outgoing_ones_have_no_more_than_they_need() {
        let netns = here();
        let loopback = "127.0.0.1:0".parse().unwrap();
        let listener = listen(&netns, loopback, Transparency::Transparent).unwrap();
        let to = listener.local_addr().unwrap();
        let hbone = connect_hbone(&netns, to).await.unwrap();
        assert_eq!(options(&hbone), (MARK, false, false, false));
        let (accepted, _) = listener.accept().await.unwrap();
        let (mark, _, _, transparent) = options(&accepted);
        assert_eq!((mark, transparent, so_original_dst(&accepted)), (MARK, true, None));
        let passthrough = connect_passthrough(&netns, to).await.unwrap();
        assert_eq!(options(&passthrough), (MARK, false, false, false));
        assert_eq!(getsockopt(&passthrough, sockopt::Ipv4Tos).unwrap(), PASSTHROUGH_TOS as i32);
        let app = connect_app(&netns, [127, 0, 0, 9].into(), to).await.unwrap();
        assert_eq!(options(&app), (MARK, false, false, true));
        assert!(getsockopt(&app, sockopt::IpFreebind).unwrap());
        assert_eq!(app.local_addr().unwrap().ip(), IpAddr::from([127, 0, 0, 9]));
        // A client that is the destination is not imitated.
        let own = connect_app(&netns, to.ip(), to).await.unwrap();
        assert_eq!(options(&own), (MARK, false, false, false));
    }
}
