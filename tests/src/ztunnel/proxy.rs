//! What happens to a connection once it is accepted.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::TcpStream,
    time::timeout,
};

use super::{
    HBONE_PORT, INBOUND_PORT, OUTBOUND_PORT,
    log::{Accepted, Listener, Log},
    mesh::Mesh,
    netns::PodNetns,
    socket,
};

const PREFACE_TIMEOUT: Duration = Duration::from_secs(5);
/// Two v6 addresses with ports and the words around them fit well.
const PREFACE_MAX: usize = 160;

/// What a connection needs to know of the pod it belongs to.
#[derive(Debug)]
pub struct Pod {
    /// Kubernetes UID, or what a test calls it.
    pub uid: Arc<str>,
    /// Where its sockets live.
    pub netns: PodNetns,
    /// Its own addresses, loopback excepted.
    pub ips: Vec<IpAddr>,
    /// Who is spoken to on 15008.
    pub mesh: Mesh,
    /// Where to record.
    pub log: Arc<Log>,
}

/// First line a stand-in says to another on 15008, in the place of CONNECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preface {
    /// Where the client wanted to go.
    pub original_dst: SocketAddr,
    /// The client as the sending end saw it.
    pub client: SocketAddr,
}

impl fmt::Display for Preface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "WEIR/1 {} {}", self.original_dst, self.client)
    }
}

impl Preface {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(line).ok()?.split(' ');
        let preface = match (words.next()?, words.next()?, words.next()?) {
            ("WEIR/1", dst, client) => Self { original_dst: dst.parse().ok()?, client: client.parse().ok()? },
            _ => return None,
        };
        words.next().is_none().then_some(preface)
    }
}

/// Serves one accepted connection to its end. The client sees the end only after it has been counted.
pub async fn serve(pod: Arc<Pod>, listener: Listener, mut stream: TcpStream) {
    let counters = &pod.log.counters;
    let counter = match listener {
        Listener::Outbound => &counters.outbound,
        Listener::Inbound => &counters.inbound,
        Listener::Hbone => &counters.hbone,
    };
    counter.fetch_add(1, Relaxed);
    let _open = pod.log.opened();
    // A client that is gone already has nothing left to proxy.
    let Ok(accepted) = describe(&pod, listener, &stream) else { return };
    match listener {
        Listener::Outbound => outbound(&pod, accepted, &mut stream).await,
        Listener::Inbound => inbound(&pod, accepted, &mut stream).await,
        Listener::Hbone => hbone(&pod, accepted, &mut stream).await,
    }
}

fn describe(pod: &Pod, listener: Listener, stream: &TcpStream) -> io::Result<Accepted> {
    stream.set_nodelay(true)?;
    let (peer, local) = (socket::canonical(stream.peer_addr()?), socket::canonical(stream.local_addr()?));
    // ztunnel takes the local address of what comes in on 15008 for true.
    let so_original_dst = if listener == Listener::Hbone { None } else { socket::so_original_dst(stream) };
    let so_original_dst = so_original_dst.map(socket::canonical);
    if so_original_dst.is_some() {
        pod.log.counters.so_original_dst.fetch_add(1, Relaxed);
    }
    let original_dst = so_original_dst.unwrap_or(local);
    let (pod, at) = (pod.uid.clone(), Instant::now());
    Ok(Accepted { listener, pod, peer, local, original_dst, client: peer, so_original_dst, at })
}

async fn outbound(pod: &Pod, accepted: Accepted, stream: &mut TcpStream) {
    let (to, client) = (accepted.original_dst, accepted.client);
    pod.log.push(accepted);
    // ztunnel refuses this on loopback only. Ours refuses the pod's addresses as well: what ztunnel sends
    // to itself there ends at 15008, a stand-in outside the mesh would connect to itself for ever.
    let own = to.ip().is_loopback() || pod.ips.contains(&to.ip());
    if own && is_illegal(to.port()) {
        pod.log.counters.illegal.fetch_add(1, Relaxed);
        return;
    }
    let upstream = if pod.mesh.is_peer(to.ip()) {
        connect_peer(pod, Preface { original_dst: to, client }).await
    } else {
        socket::connect_passthrough(&pod.netns, to).await
    };
    join(pod, stream, upstream).await;
}

async fn connect_peer(pod: &Pod, preface: Preface) -> io::Result<TcpStream> {
    let to = SocketAddr::new(preface.original_dst.ip(), HBONE_PORT);
    let mut upstream = socket::connect_hbone(&pod.netns, to).await?;
    upstream.write_all(preface.to_string().as_bytes()).await?;
    Ok(upstream)
}

async fn inbound(pod: &Pod, accepted: Accepted, stream: &mut TcpStream) {
    let (to, client) = (accepted.original_dst, accepted.client);
    pod.log.push(accepted);
    to_app(pod, client, to, &[], stream).await;
}

async fn hbone(pod: &Pod, mut accepted: Accepted, stream: &mut TcpStream) {
    let mut buffer = [0; PREFACE_MAX];
    let read = timeout(PREFACE_TIMEOUT, read_preface(stream, &mut buffer)).await;
    let preface = match read {
        // As ztunnel does: the address the tunnel was opened to has to be the one asked for.
        Ok(Some((preface, used, len))) if preface.original_dst.ip() == accepted.local.ip() => {
            Some((preface, used..len))
        }
        _ => None,
    };
    let Some((preface, early_data)) = preface else {
        pod.log.counters.bad_preface.fetch_add(1, Relaxed);
        return;
    };
    accepted.original_dst = preface.original_dst;
    accepted.client = preface.client;
    pod.log.push(accepted);
    to_app(pod, preface.client, preface.original_dst, &buffer[early_data], stream).await;
}

/// Reads up to the newline; says what the line means, how long it was, and how much was read.
async fn read_preface(stream: &mut TcpStream, buffer: &mut [u8]) -> Option<(Preface, usize, usize)> {
    let mut len = 0;
    loop {
        let read = stream.read(&mut buffer[len..]).await.ok()?;
        if read == 0 {
            return None;
        }
        let end = buffer[len..len + read].iter().position(|&b| b == b'\n').map(|at| len + at);
        len += read;
        if let Some(end) = end {
            return Some((Preface::parse(&buffer[..end])?, end + 1, len));
        }
    }
}

async fn to_app(pod: &Pod, client: SocketAddr, to: SocketAddr, early_data: &[u8], stream: &mut TcpStream) {
    if is_illegal(to.port()) {
        pod.log.counters.illegal.fetch_add(1, Relaxed);
        return;
    }
    let connect = async {
        let mut app = socket::connect_app(&pod.netns, client.ip(), to).await?;
        app.write_all(early_data).await?;
        Ok(app)
    };
    join(pod, stream, connect.await).await;
}

async fn join(pod: &Pod, stream: &mut TcpStream, upstream: io::Result<TcpStream>) {
    match upstream {
        // An error here is one end's reset; both sockets close with it, as in ztunnel.
        Ok(mut upstream) => drop(copy_bidirectional(stream, &mut upstream).await),
        Err(_) => drop(pod.log.counters.upstream_failed.fetch_add(1, Relaxed)),
    }
}

fn is_illegal(port: u16) -> bool {
    [OUTBOUND_PORT, INBOUND_PORT, HBONE_PORT].contains(&port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preface_survives_the_wire() {
        for (dst, client) in [("10.1.2.3:80", "10.9.9.9:4711"), ("[fd00::1]:443", "[fd00::2]:1")] {
            let preface = Preface { original_dst: dst.parse().unwrap(), client: client.parse().unwrap() };
            let line = preface.to_string();
            assert_eq!(Preface::parse(line.trim_end().as_bytes()), Some(preface));
        }
        for bad in
            ["", "WEIR/1", "WEIR/2 1.1.1.1:1 1.1.1.1:1", "WEIR/1 1.1.1.1:1 1.1.1.1:1 x", "GET / HTTP/1.1"]
        {
            assert_eq!(Preface::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
