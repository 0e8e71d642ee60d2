//! The listening socket, which can go away and come back on the same port.

use std::{
    collections::HashSet,
    future,
    io::{self, ErrorKind},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::fd::{AsRawFd, RawFd},
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::socket::{self, Backlog, Shutdown, SockaddrStorage},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::mpsc,
};

/// What happens to who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Serve,
    Close,
    Refuse,
    /// The server is no more.
    Ended,
}

struct State {
    admission: Admission,
    /// Open connections, to be ended from here.
    connections: HashSet<RawFd>,
}

/// The socket and its connections, as the test controls them.
pub(super) struct Gate {
    socket: TcpListener,
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    fn new(socket: TcpListener) -> io::Result<Self> {
        // The thread that accepts waits in the kernel.
        socket.set_nonblocking(false)?;
        keep_port(&socket)?;
        let state = State { admission: Admission::Serve, connections: HashSet::new() };
        Ok(Self { socket, state: Mutex::new(state), changed: Condvar::new() })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.socket.local_addr().expect("a bound socket has an address")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits otherwise from now on, and ends what was admitted before.
    pub(super) fn admit(&self, admission: Admission) -> io::Result<()> {
        let listens = |admission| matches!(admission, Admission::Serve | Admission::Close);
        let mut state = self.state();
        // A socket shut down keeps its port, but refuses, until it listens again. Closing it could
        // lose the port to another process of a busy machine.
        match (listens(state.admission), listens(admission)) {
            (true, false) => socket::shutdown(self.socket.as_raw_fd(), Shutdown::Both)?,
            (false, true) => socket::listen(&self.socket, Backlog::MAXCONN)?,
            _ => {}
        }
        state.admission = admission;
        self.changed.notify_all();
        if admission != Admission::Serve {
            for fd in &state.connections {
                // It may have been ended by the client already.
                let _ = socket::shutdown(*fd, Shutdown::Both);
            }
        }
        Ok(())
    }

    /// Accepts until the server has ended.
    fn accept(self: &Arc<Self>, accepted: &mpsc::UnboundedSender<Accepted>) {
        loop {
            let state = self.changed.wait_while(self.state(), |state| state.admission == Admission::Refuse);
            if state.unwrap_or_else(PoisonError::into_inner).admission == Admission::Ended {
                return;
            }
            match self.socket.accept() {
                Ok((stream, peer)) => {
                    // Looked at under the lock: a later `admit` finds the connection in the set.
                    let mut state = self.state();
                    if state.admission != Admission::Serve {
                        continue;
                    }
                    state.connections.insert(stream.as_raw_fd());
                    drop(state);
                    let entry = Entry { gate: self.clone(), fd: stream.as_raw_fd() };
                    if accepted.send(Accepted { entry, stream, peer }).is_err() {
                        return;
                    }
                }
                // It was shut down.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {}
                // Nothing that waiting would not help: no descriptors, a client that left.
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

/// Makes the socket's port its own even while it does not listen. The kernel takes back a port it
/// chose itself as soon as listening ends; one asked for by number stays.
fn keep_port(socket: &TcpListener) -> io::Result<()> {
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
pub(super) fn loopback() -> io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
}

/// A connection's place among those its gate can end.
struct Entry {
    gate: Arc<Gate>,
    fd: RawFd,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.gate.state().connections.remove(&self.fd);
    }
}

/// A connection on its way to the server. Fields are dropped in order: a descriptor leaves the set
/// before it is closed, and perhaps used again.
struct Accepted {
    entry: Entry,
    stream: std::net::TcpStream,
    peer: SocketAddr,
}

/// The server's side of a [`Gate`].
pub(super) struct Listener {
    address: SocketAddr,
    accepted: mpsc::UnboundedReceiver<Accepted>,
}

/// A gate for a socket, and what to serve on. A thread accepts: tokio's listeners spin when a socket
/// that was shut down listens again.
pub(super) fn open(socket: TcpListener) -> io::Result<(Arc<Gate>, Listener)> {
    let gate = Arc::new(Gate::new(socket)?);
    let (sender, accepted) = mpsc::unbounded_channel();
    let accepting = gate.clone();
    thread::Builder::new().name("apiserver".into()).spawn(move || accepting.accept(&sender))?;
    let listener = Listener { address: gate.address(), accepted };
    Ok((gate, listener))
}

impl axum::serve::Listener for Listener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        while let Some(Accepted { entry, stream, peer }) = self.accepted.recv().await {
            let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
            // One that failed before it was served is of no use to anyone.
            if let Ok(stream) = stream
                && stream.set_nodelay(true).is_ok()
            {
                return (Connection { _entry: entry, stream }, peer);
            }
        }
        // The server has ended: whoever serves is about to be aborted.
        future::pending().await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// One connection, known to its gate as long as it is open.
pub(super) struct Connection {
    _entry: Entry,
    stream: TcpStream,
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
