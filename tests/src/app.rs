//! Real applications: a server that says who it is and what it sees, and clients of it.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::oneshot,
};

use crate::world::Host;

/// How long a client waits for anything.
const PATIENCE: Duration = Duration::from_secs(5);

/// A server on one port of a host. Greets every client with a line about the connection, then echoes.
pub struct App {
    accepted: Arc<AtomicU64>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// How a server listens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Listen {
    /// Address; all of both families if none.
    pub ip: Option<IpAddr>,
    /// SO_REUSEPORT.
    pub reuse_port: bool,
    /// Multipath TCP.
    pub multipath: bool,
}

/// IPPROTO_MPTCP: a socket of multipath TCP.
pub const MPTCP: i32 = 262;

impl App {
    /// Starts a server on all addresses of the host.
    ///
    /// # Errors
    /// When the port cannot be had.
    pub fn start(host: &Host, port: u16) -> Result<Self> {
        Self::start_with(host, port, Listen::default())
    }

    /// Starts a server.
    ///
    /// # Errors
    /// When the port cannot be had.
    pub fn start_with(host: &Host, port: u16, listen: Listen) -> Result<Self> {
        let name = host.name().to_owned();
        let listener =
            host.inside(|| bind(port, listen)).with_context(|| format!("port {port} of {name}"))?;
        let accepted = Arc::new(AtomicU64::new(0));
        let (stop, stopped) = oneshot::channel();
        let counter = accepted.clone();
        let thread = std::thread::Builder::new().name(format!("app-{name}")).spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener.into()).expect("a listener");
                tokio::select! {
                    () = serve(listener, name, counter) => {}
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self { accepted, stop: Some(stop), thread: Some(thread) })
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for App {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn bind(port: u16, listen: Listen) -> io::Result<Socket> {
    let any = || match Socket::new(Domain::IPV6, Type::STREAM, None) {
        Ok(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        Err(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let address = SocketAddr::new(listen.ip.unwrap_or_else(any), port);
    let protocol = if listen.multipath { Protocol::from(MPTCP) } else { Protocol::TCP };
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(protocol))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(listen.reuse_port)?;
    if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(socket)
}

async fn serve(listener: tokio::net::TcpListener, name: String, accepted: Arc<AtomicU64>) {
    loop {
        let Ok((mut stream, peer)) = listener.accept().await else { continue };
        accepted.fetch_add(1, Ordering::SeqCst);
        let greeting = stream.local_addr().map(|local| format!("{name} {} {}\n", plain(peer), plain(local)));
        tokio::spawn(async move {
            let Ok(greeting) = greeting else { return };
            let _ = stream.set_nodelay(true);
            if stream.write_all(greeting.as_bytes()).await.is_err() {
                return;
            }
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                if stream.write_all(&buffer[..length]).await.is_err() {
                    return;
                }
            }
        });
    }
}

/// IPv4 addresses of dual-stack sockets in their own form.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// What a client may want of its socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct Connect<'a> {
    /// SO_BINDTODEVICE.
    pub device: Option<&'a str>,
    /// Local address and port.
    pub from: Option<SocketAddr>,
    /// Gives up after this long; five seconds if none.
    pub patience: Option<Duration>,
}

/// A connection whose greeting has been read.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<TcpStream>,
    /// Name of the host the server is on.
    pub server: String,
    /// The client's address as the server sees it.
    pub seen_as: SocketAddr,
    /// The server's own address of the connection.
    pub server_addr: SocketAddr,
}

impl Client {
    /// Connects from a host and reads the greeting.
    ///
    /// # Errors
    /// What the kernel says; `UnexpectedEof` when the connection ends before the greeting.
    pub fn connect(host: &Host, to: SocketAddr) -> io::Result<Self> {
        Self::connect_with(host, to, Connect::default())
    }

    /// Connects from a host and reads the greeting.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_with(host: &Host, to: SocketAddr, options: Connect<'_>) -> io::Result<Self> {
        Self::greeted(host.inside(|| open(to, options))?)
    }

    /// Connects from the namespace of the calling thread.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_here(to: SocketAddr) -> io::Result<Self> {
        Self::greeted(open(to, Connect::default())?)
    }

    /// Takes a connection made otherwise and reads the greeting.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn over(stream: TcpStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        Self::greeted(stream)
    }

    /// Connects from the namespace of the calling thread, as the options say.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_here_with(to: SocketAddr, options: Connect<'_>) -> io::Result<Self> {
        Self::greeted(open(to, options)?)
    }

    fn greeted(stream: TcpStream) -> io::Result<Self> {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let bad = || io::Error::other(format!("not a greeting: {line:?}"));
        let mut words = line.split_whitespace();
        let server = words.next().ok_or_else(bad)?.to_owned();
        let mut address = || words.next().and_then(|word| word.parse::<SocketAddr>().ok()).ok_or_else(bad);
        let (seen_as, server_addr) = (address()?, address()?);
        Ok(Self { stream, server, seen_as, server_addr })
    }

    /// Sends one byte and waits for it to come back.
    ///
    /// # Errors
    /// When it does not.
    pub fn exchange(&mut self) -> io::Result<()> {
        self.stream.get_mut().write_all(b"x")?;
        let mut byte = [0];
        self.stream.read_exact(&mut byte)
    }

    /// The client's own address.
    ///
    /// # Panics
    /// Never for a connected socket.
    pub fn local_addr(&self) -> SocketAddr {
        self.stream.get_ref().local_addr().expect("a connected socket has an address")
    }

    /// The socket, for its options.
    pub fn stream(&self) -> &TcpStream {
        self.stream.get_ref()
    }

    /// Ends the connection with a reset.
    pub fn reset(self) {
        let _ = socket2::SockRef::from(self.stream.get_ref()).set_linger(Some(Duration::ZERO));
    }
}

fn open(to: SocketAddr, options: Connect<'_>) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    if let Some(device) = options.device {
        socket.bind_device(Some(device.as_bytes()))?;
    }
    if let Some(from) = options.from {
        socket.set_reuse_address(true)?;
        socket.bind(&from.into())?;
    }
    let patience = options.patience.unwrap_or(PATIENCE);
    socket.connect_timeout(&to.into(), patience)?;
    socket.set_read_timeout(Some(patience))?;
    socket.set_write_timeout(Some(patience))?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket.into())
}
