//! One pod served: its listeners and the connections that came in by them.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream, UdpSocket},
    sync::watch,
    task::{JoinSet, yield_now},
    time::{sleep, timeout},
};

use super::{
    DNS_PORT, HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT, dns,
    log::Listener,
    netns::NetnsId,
    proxy::{self, Pod},
    socket::{self, Transparency::*},
};

const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// A port could not be had; the text is what a nack carries.
#[derive(Debug)]
pub struct StartError {
    address: SocketAddr,
    source: io::Error,
}

impl std::error::Error for StartError {}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "failure to start proxy : failed to bind to address {}: {}", self.address, self.source)
    }
}

/// A served pod. Dropping it cuts everything at once.
pub struct Workload {
    pod: Arc<Pod>,
    drain: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

struct Sockets {
    dns: Vec<(TcpListener, UdpSocket)>,
    proxies: [(Listener, TcpListener); 3],
}

impl Workload {
    /// Opens all sockets, in ztunnel's order, and serves them; on an error none stays open.
    pub fn start(pod: Pod, ipv6: bool) -> Result<Self, StartError> {
        let sockets = Sockets::open(&pod, ipv6)?;
        let (pod, drain, mut tasks) = (Arc::new(pod), watch::Sender::new(false), JoinSet::new());
        for (tcp, udp) in sockets.dns {
            tasks.spawn(serve_udp(pod.clone(), udp, drain.subscribe()));
            tasks.spawn(accept(pod.clone(), tcp, drain.subscribe(), dns::serve_tcp));
        }
        for (kind, listener) in sockets.proxies {
            let serve = move |pod, stream| proxy::serve(pod, kind, stream);
            tasks.spawn(accept(pod.clone(), listener, drain.subscribe(), serve));
        }
        Ok(Self { pod, drain, tasks })
    }

    /// Identity of the namespace it is served in.
    pub fn netns(&self) -> NetnsId {
        self.pod.netns.id()
    }

    /// Cuts everything, and returns when the last socket is closed.
    pub async fn cut(mut self) {
        self.tasks.shutdown().await;
        // Connections are told by the listener's task that was just aborted, and hold the pod to their end.
        while Arc::strong_count(&self.pod) > 1 {
            yield_now().await;
        }
    }

    /// Closes the listeners, lets connections end by themselves for a while, then cuts them.
    pub async fn drain(mut self, deadline: Duration) {
        self.drain.send_replace(true);
        let all_gone = async { while self.tasks.join_next().await.is_some() {} };
        // What is left after the deadline goes with `self`.
        let _ = timeout(deadline, all_gone).await;
    }
}

async fn serve_udp(pod: Arc<Pod>, socket: UdpSocket, mut drain: watch::Receiver<bool>) {
    tokio::select! {
        () = dns::serve_udp(pod, socket) => {}
        _ = drain.wait_for(|&draining| draining) => {}
    }
}

/// Accepts until drained, then waits for what it accepted. Aborted, it takes all of them with it.
async fn accept<F: Future<Output = ()> + Send + 'static>(
    pod: Arc<Pod>,
    listener: TcpListener,
    mut drain: watch::Receiver<bool>,
    serve: impl Fn(Arc<Pod>, TcpStream) -> F,
) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = drain.wait_for(|&draining| draining) => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => drop(connections.spawn(serve(pod.clone(), stream))),
            Err(_) => {
                pod.log.counters.accept_failed.fetch_add(1, Relaxed);
                // Out of descriptors, most likely: give the connections time to end.
                sleep(ACCEPT_PAUSE).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

impl Sockets {
    fn open(pod: &Pod, ipv6: bool) -> Result<Self, StartError> {
        let at = |ip: IpAddr, port| SocketAddr::new(ip, port);
        let listen = |address, transparency| {
            socket::listen(&pod.netns, address, transparency).map_err(|source| StartError { address, source })
        };
        let mut loopbacks = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
        if pod.netns.has_v6_loopback() {
            loopbacks.push(Ipv6Addr::LOCALHOST.into());
        }
        let mut dns = Vec::new();
        for ip in loopbacks {
            let address = at(ip, DNS_PORT);
            let tcp = listen(address, Plain)?;
            let udp = socket::udp(&pod.netns, address).map_err(|source| StartError { address, source })?;
            dns.push((tcp, udp));
        }
        let wildcard: IpAddr = if ipv6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let hbone = listen(at(wildcard, HBONE_PORT), Transparent)?;
        let inbound = listen(at(wildcard, INBOUND_PORT), Transparent)?;
        let outbound = listen(at(wildcard, OUTBOUND_PORT), Transparent)?;
        let proxies =
            [(Listener::Hbone, hbone), (Listener::Inbound, inbound), (Listener::Outbound, outbound)];
        Ok(Self { dns, proxies })
    }
}
