//! Both ends of a measured connection: blocking sockets, one thread each, both on one processor, so that a
//! connection's time is the work done for it and not the time processors take to wake each other.

use std::{
    fs,
    io::{self, Read, Write},
    net::{Ipv6Addr, Shutdown, SocketAddr, TcpStream},
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::{Pid, gettid},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{world::Host, ztunnel::MARK};

/// First byte of a connection whose bytes are sent back.
const ECHO: u8 = b'e';
/// First byte of a connection whose bytes are taken; one comes back at its end.
const SINK: u8 = b's';
/// Bytes of a round trip.
const MESSAGE: usize = 64;
/// Bytes of a write of the bulk transfer.
const CHUNK: usize = 64 * 1024;
/// ztunnel's.
const BACKLOG: i32 = 128;
/// For any step; a measurement that meets it fails.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Connect, a byte there and back, close; nanoseconds each.
    Connect,
    /// 64 bytes there and back on one connection; nanoseconds each.
    RoundTrip,
    /// As many bytes as go through one connection; nanoseconds per 64 KiB.
    Bulk,
}

/// What one short measurement found.
#[derive(Clone, Debug, Default)]
pub struct Slice {
    /// Of each operation, nanoseconds.
    pub times: Vec<f64>,
    /// Processor time of both ends, nanoseconds per operation.
    pub cpu: f64,
}

/// The echo server, with the socket options of ztunnel's listeners.
pub struct Server {
    listener: Socket,
    thread: Option<JoinHandle<()>>,
    tid: Pid,
}

impl Server {
    /// Listens on a port of the host, both families.
    ///
    /// # Errors
    /// When the port cannot be had.
    pub fn start(host: &Host, port: u16, cpu: usize) -> Result<Self> {
        let listener = host.inside(|| listen(port)).with_context(|| format!("port {port}"))?;
        let accepting = listener.try_clone()?;
        let (started, start) = mpsc::sync_channel(1);
        let thread = std::thread::spawn(move || {
            let pinned = pin(cpu);
            let _ = started.send(gettid());
            if pinned.is_ok() {
                serve(&accepting);
            }
        });
        Ok(Self { listener, tid: start.recv()?, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.listener.shutdown(Shutdown::Both);
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

fn listen(port: u16) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_only_v6(false)?;
    socket.set_mark(MARK)?;
    socket.set_reuse_port(true)?;
    socket.bind(&SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port).into())?;
    socket.listen(BACKLOG)?;
    socket.set_ip_transparent_v4(true)?;
    Ok(socket)
}

fn pin(cpu: usize) -> nix::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &set)
}

fn serve(listener: &Socket) {
    let mut buffer = vec![0; CHUNK];
    while let Ok((socket, _)) = listener.accept() {
        // What one client does is not the next one's business.
        let _ = answer(TcpStream::from(socket), &mut buffer);
    }
}

fn answer(mut stream: TcpStream, buffer: &mut [u8]) -> io::Result<()> {
    let mut length = stream.read(buffer)?;
    if buffer[0] == SINK {
        while length > 0 {
            length = stream.read(buffer)?;
        }
        return stream.write_all(&[SINK]);
    }
    while length > 0 {
        stream.write_all(&buffer[..length])?;
        length = stream.read(buffer)?;
    }
    Ok(())
}

/// Who connects where.
#[derive(Clone, Copy)]
pub struct Client<'a> {
    /// Where it runs.
    pub host: &'a Host,
    /// Where it connects to.
    pub to: SocketAddr,
    /// Its SO_MARK, if any.
    pub mark: Option<u32>,
    /// Its processor, and the server's.
    pub cpu: usize,
}

impl Client<'_> {
    /// Works for so long against the server.
    ///
    /// # Errors
    /// When any operation fails.
    pub fn run(self, server: &Server, work: Work, time: Duration) -> Result<Slice> {
        self.host.inside(|| -> Result<Slice> {
            pin(self.cpu)?;
            // What is in the caches is this arm's.
            self.work(work, time / 10)?;
            let before = [gettid(), server.tid].map(cpu_of);
            let times = self.work(work, time)?;
            let after = [gettid(), server.tid].map(cpu_of);
            let mut cpu = 0;
            for (before, after) in before.into_iter().zip(after) {
                cpu += after?.saturating_sub(before?);
            }
            Ok(Slice { cpu: cpu as f64 / times.len().max(1) as f64, times })
        })
    }

    fn work(self, work: Work, time: Duration) -> Result<Vec<f64>> {
        let done = match work {
            Work::Connect => self.connections(time),
            Work::RoundTrip => self.round_trips(time),
            Work::Bulk => self.bulk(time),
        };
        done.with_context(|| format!("{work:?} from {} to {}", self.host.name(), self.to))
    }

    /// Makes so many connections.
    ///
    /// # Errors
    /// When one fails.
    pub fn connect_times(self, count: u32) -> Result<()> {
        self.host.inside(|| (0..count).try_for_each(|_| self.connection())).context("making connections")
    }

    fn connection(self) -> io::Result<()> {
        let mut stream = self.connect()?;
        stream.write_all(&[ECHO])?;
        stream.read_exact(&mut [0])
    }

    fn connect(self) -> io::Result<TcpStream> {
        let socket = Socket::new(Domain::for_address(self.to), Type::STREAM, Some(Protocol::TCP))?;
        if let Some(mark) = self.mark {
            socket.set_mark(mark)?;
        }
        socket.connect(&self.to.into())?;
        Ok(socket.into())
    }

    fn connections(self, time: Duration) -> io::Result<Vec<f64>> {
        let mut times = Vec::with_capacity(1 << 14);
        let end = Instant::now() + time;
        let mut began = Instant::now();
        while began < end {
            self.connection()?;
            let now = Instant::now();
            times.push((now - began).as_nanos() as f64);
            began = now;
        }
        Ok(times)
    }

    fn round_trips(self, time: Duration) -> io::Result<Vec<f64>> {
        let mut times = Vec::with_capacity(1 << 16);
        let mut stream = self.connect()?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut message = [ECHO; MESSAGE];
        let end = Instant::now() + time;
        let mut began = Instant::now();
        while began < end {
            stream.write_all(&message)?;
            stream.read_exact(&mut message)?;
            let now = Instant::now();
            times.push((now - began).as_nanos() as f64);
            began = now;
        }
        Ok(times)
    }

    /// The time per chunk, over the whole transfer.
    fn bulk(self, time: Duration) -> io::Result<Vec<f64>> {
        let chunk = vec![SINK; CHUNK];
        let mut stream = self.connect()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let began = Instant::now();
        let mut chunks = 0_usize;
        while began.elapsed() < time {
            stream.write_all(&chunk)?;
            chunks += 1;
        }
        stream.shutdown(Shutdown::Write)?;
        stream.read_exact(&mut [0])?;
        Ok(vec![began.elapsed().as_nanos() as f64 / chunks as f64; chunks])
    }
}

/// Processor time of a thread, in nanoseconds.
fn cpu_of(tid: Pid) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/self/task/{tid}/schedstat"))?;
    Ok(stat.split(' ').next().context("schedstat is empty")?.parse()?)
}
