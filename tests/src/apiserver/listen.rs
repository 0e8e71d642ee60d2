//! The listening socket, which can go away and come back on the same port.

use std::{
    collections::HashSet,
    io,
    net::{Ipv4Addr, SocketAddr},
    os::fd::{AsRawFd, RawFd},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use nix::{
    errno::Errno,
    sys::socket::{self, Backlog, Shutdown, SockaddrStorage},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// What happens to who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Serve,
    Close,
    Refuse,
}

/// The socket and its connections, as the test controls them.
pub(super) struct Gate {
    socket: std::net::TcpListener,
    admission: watch::Sender<Admission>,
    connections: Mutex<HashSet<RawFd>>,
}

impl Gate {
    pub(super) fn new(socket: std::net::TcpListener) -> io::Result<Arc<Self>> {
        socket.set_nonblocking(true)?;
        keep_port(&socket)?;
        let admission = watch::Sender::new(Admission::Serve);
        Ok(Arc::new(Self { socket, admission, connections: Mutex::default() }))
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.socket.local_addr().expect("a bound socket has an address")
    }

    fn connections(&self) -> MutexGuard<'_, HashSet<RawFd>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all connections, whatever is under way on them.
    pub(super) fn disconnect(&self) {
        // Under the lock: a descriptor leaves the set before it is closed.
        for fd in self.connections().iter() {
            // It may have been ended by the client already.
            let _ = socket::shutdown(*fd, Shutdown::Both);
        }
    }

    /// Admits otherwise from now on, and ends what was admitted before.
    pub(super) fn admit(&self, admission: Admission) -> io::Result<()> {
        let before = *self.admission.borrow();
        // A socket shut down keeps its port, but refuses, until it listens again. Closing it could
        // lose the port to another process of a busy machine.
        if admission == Admission::Refuse && before != Admission::Refuse {
            socket::shutdown(self.socket.as_raw_fd(), Shutdown::Both)?;
        }
        if admission != Admission::Refuse && before == Admission::Refuse {
            socket::listen(&self.socket, Backlog::MAXCONN)?;
        }
        self.admission.send_replace(admission);
        if admission != Admission::Serve {
            self.disconnect();
        }
        Ok(())
    }
}

/// The server's side of a [`Gate`].
pub(super) struct Listener {
    gate: Arc<Gate>,
    admission: watch::Receiver<Admission>,
    /// Made anew after each refusal: once shut down, a socket stays "closed" to the reactor.
    socket: Option<TcpListener>,
}

impl Listener {
    pub(super) fn new(gate: Arc<Gate>) -> Self {
        let admission = gate.admission.subscribe();
        Self { gate, admission, socket: None }
    }

    async fn accept_once(&mut self) -> io::Result<Option<(Connection, SocketAddr)>> {
        if *self.admission.borrow_and_update() == Admission::Refuse {
            self.socket = None;
            // The gate outlives this: it is in `self`.
            let _ = self.admission.changed().await;
            return Ok(None);
        }
        if self.socket.is_none() {
            self.socket = Some(TcpListener::from_std(self.gate.socket.try_clone()?)?);
        }
        let Some(socket) = &self.socket else { return Ok(None) };
        let (stream, peer) = tokio::select! {
            accepted = socket.accept() => accepted?,
            _ = self.admission.changed() => {
                self.socket = None;
                return Ok(None);
            }
        };
        stream.set_nodelay(true)?;
        let connection = Connection { gate: self.gate.clone(), stream };
        let mut connections = self.gate.connections();
        // Looked at under the lock: a later `admit` finds the connection in the set.
        if *self.gate.admission.borrow() != Admission::Serve {
            drop(connections);
            return Ok(None);
        }
        connections.insert(connection.stream.as_raw_fd());
        drop(connections);
        Ok(Some((connection, peer)))
    }
}

impl axum::serve::Listener for Listener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            match self.accept_once().await {
                Ok(Some(accepted)) => return accepted,
                Ok(None) => {}
                // Shut down under our hands, or out of descriptors: look again, without spinning.
                Err(_) => {
                    self.socket = None;
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.gate.socket.local_addr()
    }
}

/// One connection, known to its gate as long as it is open.
pub(super) struct Connection {
    gate: Arc<Gate>,
    stream: TcpStream,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.gate.connections().remove(&self.stream.as_raw_fd());
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Makes the socket's port its own even while it does not listen. The kernel takes back a port it
/// chose itself as soon as listening ends; one asked for by number stays.
fn keep_port(socket: &std::net::TcpListener) -> io::Result<()> {
    let address = SockaddrStorage::from(socket.local_addr()?);
    socket::shutdown(socket.as_raw_fd(), Shutdown::Both)?;
    match socket::bind(socket.as_raw_fd(), &address) {
        // It has been asked for by number before.
        Ok(()) | Err(Errno::EINVAL) => {}
        Err(error) => return Err(error.into()),
    }
    socket::listen(socket, Backlog::MAXCONN)?;
    Ok(())
}

/// A free port of this network namespace's loopback.
pub(super) fn loopback() -> io::Result<std::net::TcpListener> {
    std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
}
