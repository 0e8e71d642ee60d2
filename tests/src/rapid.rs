//! Very many short connections, as fast as the kernel makes them: blocking sockets, one byte from server to client.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::{load::Outcome, world::Host};

const PATIENCE: Duration = Duration::from_secs(5);

/// How an end closes its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// By FIN: whoever does so first keeps the port in TIME_WAIT.
    Orderly,
    /// By reset: nothing stays.
    Reset,
}

/// A server on several ports of both families: one byte to every client, then it waits for the end.
pub struct Server {
    listeners: Vec<Socket>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens on the ports of the host.
    ///
    /// # Errors
    /// When one cannot be had.
    pub fn start(host: &Host, ports: &[u16], close: Close) -> io::Result<Self> {
        let (mut listeners, mut threads) = (Vec::new(), Vec::new());
        for &port in ports {
            let listener = host.inside(|| listen(port))?;
            let accepting = listener.try_clone()?;
            threads.push(std::thread::spawn(move || serve(&accepting, close)));
            listeners.push(listener);
        }
        Ok(Self { listeners, threads })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ends the accept of a listener.
        self.listeners.iter().for_each(|listener| drop(listener.shutdown(std::net::Shutdown::Both)));
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn listen(port: u16) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), port).into())?;
    socket.listen(1024)?;
    Ok(socket)
}

fn serve(listener: &Socket, close: Close) {
    // What one client does is not the next one's business.
    while let Ok((socket, _)) = listener.accept() {
        let mut stream = TcpStream::from(socket);
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let _ = stream.write_all(b"x");
        let _ = stream.read(&mut [0]);
        end(&stream, close);
    }
}

fn end(stream: &TcpStream, close: Close) {
    if close == Close::Reset {
        let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
    }
}

/// What a client does.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Servers, in turn.
    pub to: Vec<SocketAddr>,
    /// Source port; any if none.
    pub source_port: Option<u16>,
    /// How the client closes.
    pub close: Close,
    /// How long any step may take.
    pub patience: Duration,
    /// Connections a second; as many as it can if none.
    pub rate: Option<u32>,
}

impl Plan {
    /// As fast as possible, from any port, closed in order.
    pub fn to(to: Vec<SocketAddr>) -> Self {
        Self { to, source_port: None, close: Close::Orderly, patience: PATIENCE, rate: None }
    }

    /// Makes connections one after the other from the namespace of the calling thread while `more` says so of
    /// their number.
    pub fn run_here(&self, mut more: impl FnMut(u32) -> bool) -> Outcome {
        let mut outcome = Outcome::default();
        let started = Instant::now();
        for (number, to) in (0..).zip(self.to.iter().cycle()) {
            if !more(number) {
                return outcome;
            }
            if let Some(rate) = self.rate {
                let due = started + Duration::from_secs(1) * number / rate;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            let began = Instant::now();
            let result = self.connection(*to);
            outcome.add(&result, began.elapsed());
        }
        outcome
    }

    /// The same from a host, for a number of connections.
    pub fn run(&self, host: &Host, count: u32) -> Outcome {
        host.inside(|| self.run_here(|number| number < count))
    }

    /// Opens one connection to each server from a host and keeps all of them open to the end; returns what failed.
    pub fn hold(&self, host: &Host) -> Vec<(SocketAddr, io::Error)> {
        let (mut held, mut failed) = (Vec::new(), Vec::new());
        for &to in &self.to {
            match host.inside(|| self.connect(to)) {
                Ok(stream) => held.push(stream),
                Err(error) => failed.push((to, error)),
            }
        }
        held.iter().for_each(|stream| end(stream, self.close));
        failed
    }

    fn connection(&self, to: SocketAddr) -> io::Result<()> {
        self.connect(to).map(|stream| end(&stream, self.close))
    }

    /// Connects and reads the server's byte.
    fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        if let Some(port) = self.source_port {
            socket.set_reuse_address(true)?;
            let any = crate::dns_client::any(to.is_ipv6());
            socket.bind(&SocketAddr::new(any, port).into())?;
        }
        // It bounds a blocking connect as well.
        socket.set_write_timeout(Some(self.patience))?;
        socket.set_read_timeout(Some(self.patience))?;
        socket.connect(&to.into())?;
        let mut stream = TcpStream::from(socket);
        if let Err(error) = stream.read_exact(&mut [0]) {
            end(&stream, self.close);
            return Err(error);
        }
        Ok(stream)
    }
}
