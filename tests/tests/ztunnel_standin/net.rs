//! Namespaces, apps and clients for tests of the stand-in ztunnel alone.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    os::fd::{AsRawFd, OwnedFd, RawFd},
    process::Command,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket},
};
use weir_tests::ztunnel::Preface;

/// Address of every pod here: each has its own namespace.
pub const POD: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// Another address of it, for a client to have.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
/// Longer than anything takes that is going to happen.
pub const SOON: Duration = Duration::from_secs(5);

/// A namespace and a thread that lives in it.
pub struct Net(OwnedFd);

impl Net {
    /// `setup` is a list of `ip` command lines.
    pub fn new(setup: &[&str]) -> Self {
        let net = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("these tests run as root");
            Self(std::fs::File::open("/proc/thread-self/ns/net").unwrap().into())
        });
        let net = net.join().unwrap();
        for line in setup {
            net.ip(line);
        }
        net
    }

    /// A pod with its own address and one a client may have.
    pub fn pod() -> Self {
        Self::new(&["link set lo up", "addr add 10.77.0.2/32 dev lo", "addr add 10.77.0.3/32 dev lo"])
    }

    pub fn fd(&self) -> OwnedFd {
        self.0.try_clone().unwrap()
    }

    pub fn raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Runs `f` on a thread inside.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                f()
            });
            inside.join().unwrap()
        })
    }

    pub fn ip(&self, line: &str) {
        let status = self.run(|| Command::new("ip").args(line.split(' ')).status().unwrap());
        assert!(status.success(), "ip {line}");
    }

    /// An app that answers what it reads to the end with who it thinks the client is.
    pub fn app(&self, at: SocketAddr) -> mpsc::Receiver<SocketAddr> {
        let listener = self.run(|| TcpListener::bind(at).unwrap());
        let (seen, clients) = mpsc::channel();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, mut said) = (stream.unwrap(), String::new());
                let _ = seen.send(stream.peer_addr().unwrap());
                stream.read_to_string(&mut said).unwrap();
                stream.write_all(said.to_uppercase().as_bytes()).unwrap();
            }
        });
        clients
    }

    /// An app that answers every word at once.
    pub fn app_that_echoes(&self, at: SocketAddr) {
        let listener = self.run(|| TcpListener::bind(at).unwrap());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut from, mut to) = (stream.as_ref().unwrap(), stream.as_ref().unwrap());
                let _ = std::io::copy(&mut from, &mut to);
            }
        });
    }

    pub fn connect(&self, to: impl Into<IpAddr>, port: u16) -> TcpStream {
        let to = SocketAddr::new(to.into(), port);
        let stream = self.run(|| TcpStream::connect(to)).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream
    }

    /// Connects as [`CLIENT`].
    pub fn connect_as_client(&self, to: SocketAddrV4) -> TcpStream {
        let stream: TcpStream = self.run(|| {
            let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
            bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(CLIENT, 0))).unwrap();
            connect(fd.as_raw_fd(), &SockaddrIn::from(to)).unwrap();
            fd.into()
        });
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream
    }
}

/// Says all, ends its half, hears all.
pub fn ask(mut stream: TcpStream, words: &str) -> String {
    stream.write_all(words.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    // A refused connection ends in a reset or in silence; both are an empty answer.
    let _ = stream.read_to_string(&mut answer);
    answer
}

pub fn preface(original_dst: (Ipv4Addr, u16), client: (Ipv4Addr, u16)) -> String {
    Preface { original_dst: original_dst.into(), client: client.into() }.to_string()
}

/// `ss` of the namespace: one line a socket, with its mark.
pub fn sockets(net: &Net) -> Vec<String> {
    let out = net.run(|| Command::new("ss").args(["-Hnltue"]).output().unwrap());
    String::from_utf8(out.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Waits for what is about to happen.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < SOON, "never: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
