//! A server to talk to, and a peer that says exactly what a test wants.

use std::{
    fs::{self, File},
    os::fd::{AsRawFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::{task::JoinHandle, time::timeout};
use tokio_seqpacket::{UnixSeqpacket, ancillary::OwnedAncillaryMessage};
use weir_agent::{
    cache::members::Members,
    domain::workload::{PodUid, WorkloadInfo},
    zds::{
        codec::{Request, encode_answer, encode_hello},
        counters::Counters,
        server::{Config, Server},
        session::Timeouts,
    },
};

/// Longer than anything takes that is going to happen.
pub const SOON: Duration = Duration::from_secs(10);
/// Long enough for what must not happen to happen.
pub const A_WHILE: Duration = Duration::from_millis(80);

pub fn uid(n: usize) -> PodUid {
    format!("uid-{n}").as_str().into()
}

pub fn info(n: usize) -> WorkloadInfo {
    WorkloadInfo { name: format!("pod-{n}"), namespace: "ns".into(), service_account: "sa".into() }
}

/// A directory that goes with its owner.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("weir-zds-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    /// Descriptors that pass for namespaces: all the agent and ztunnel look at is device and inode.
    pub fn netns(&self, n: usize) -> Arc<OwnedFd> {
        let path = self.0.join(format!("netns-{n}"));
        let file = File::options().create(true).truncate(false).write(true).open(path).unwrap();
        Arc::new(file.into())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// A server in a scratch directory; dropping it stops it.
pub struct Fixture {
    pub members: Members,
    pub counters: Arc<Counters>,
    pub path: PathBuf,
    pub scratch: Scratch,
    task: JoinHandle<()>,
}

/// Patience of a test's server: beyond any scheduling delay, where no test waits for it to end.
pub const PATIENT: Timeouts = Timeouts { hello: SOON, answer: SOON };

impl Fixture {
    pub fn start(timeouts: Timeouts, nack_backoff: Duration) -> Self {
        let scratch = Scratch::new();
        let path = scratch.0.join("run/ztunnel.sock");
        // The tests need no root: whoever runs them may connect.
        let allowed_uid = Some(nix::unistd::geteuid().as_raw());
        let members = Members::new(nack_backoff);
        let config = Config { path: path.clone(), allowed_uid, timeouts };
        let server = Server::bind(config, members.clone()).unwrap();
        let counters = server.counters();
        Self { members, counters, path, scratch, task: tokio::spawn(server.run()) }
    }

    /// A server whose set is complete and has pods `0..pods`, each in a namespace of its number.
    pub fn with_pods(pods: usize) -> Self {
        let fixture = Self::start(PATIENT, SOON);
        for n in 0..pods {
            fixture.publish(n);
        }
        fixture.members.set_complete();
        fixture
    }

    pub fn publish(&self, n: usize) -> u64 {
        self.members.publish(uid(n), info(n), Some(self.scratch.netns(n))).unwrap()
    }

    pub async fn connect(&self) -> Peer {
        let mut peer = Peer::connect(&self.path).await;
        peer.say(&encode_hello()).await;
        peer
    }

    /// A peer that has acknowledged everything so far.
    pub async fn connect_and_sync(&self) -> Peer {
        let mut peer = self.connect().await;
        while peer.accept_one().await != Request::SnapshotSent {}
        peer
    }

    pub async fn eventually(&self, what: &str, mut holds: impl FnMut(&Members) -> bool) {
        let mut version = self.members.subscribe();
        let wait = async {
            while !holds(&self.members) {
                // Some of what a test waits for changes without the set's knowledge.
                let _ = timeout(Duration::from_millis(5), version.changed()).await;
            }
        };
        timeout(SOON, wait).await.unwrap_or_else(|_| panic!("never: {what}; {:#?}", self.members.sessions()));
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The other end of a connection.
pub struct Peer {
    socket: UnixSeqpacket,
}

impl Peer {
    pub async fn connect(path: &PathBuf) -> Self {
        Self { socket: UnixSeqpacket::connect(path).await.unwrap() }
    }

    pub fn into_fd(self) -> OwnedFd {
        self.socket.into()
    }

    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { socket: fd.try_into().unwrap() }
    }

    pub async fn say(&mut self, packet: &[u8]) {
        // A server that has closed already is what some tests wait for.
        let _ = self.socket.send(packet).await;
    }

    pub async fn say_nonsense(&mut self, packet: &[u8], with_fds: bool) {
        if !with_fds {
            return self.say(packet).await;
        }
        let file = File::open("/dev/null").unwrap();
        let control = [ControlMessage::ScmRights(&[file.as_raw_fd(); 3])];
        let iov = [std::io::IoSlice::new(packet)];
        // The server may have closed already.
        let flags = MsgFlags::MSG_NOSIGNAL;
        let _ = sendmsg::<()>(self.socket.as_raw_fd(), &iov, &control, flags, None);
    }

    /// The next request and the descriptors that came with it; `None` when the server has closed.
    pub async fn receive(&mut self) -> Option<(Request, Vec<OwnedFd>)> {
        timeout(SOON, self.receive_at_leisure()).await.expect("the server says something")
    }

    /// The same, however long it takes.
    pub async fn receive_at_leisure(&mut self) -> Option<(Request, Vec<OwnedFd>)> {
        let (mut buffer, mut control) = ([0; 1024], [0; 256]);
        let received = self.socket.recv_with_ancillary(&mut buffer, &mut control).await;
        let (read, ancillary) = received.ok()?;
        assert!(!read.truncated(), "a packet over 1024 bytes makes ztunnel reconnect");
        let mut fds = Vec::new();
        for message in ancillary.into_messages() {
            let OwnedAncillaryMessage::FileDescriptors(received) = message else { panic!("strange control") };
            fds.extend(received);
        }
        if read.bytes_read() == 0 {
            return None;
        }
        Some((Request::decode(&buffer[..read.bytes_read()]).unwrap(), fds))
    }

    pub async fn ack(&mut self) {
        self.say(&encode_answer(&Ok(()))).await;
    }

    pub async fn nack(&mut self, text: &str) {
        self.say(&encode_answer(&Err(text.into()))).await;
    }

    /// Acknowledges the next request, whatever it is.
    pub async fn accept_one(&mut self) -> Request {
        let (request, _) = self.receive().await.expect("the server is there");
        self.ack().await;
        request
    }

    /// The server closes, having said nothing more.
    pub async fn expect_closed(&mut self) {
        let said = self.receive().await;
        assert!(said.is_none(), "instead of closing: {said:?}");
    }

    /// The server says nothing for a while, and stays.
    pub async fn expect_silence(&mut self) {
        let mut buffer = [0; 1024];
        let said = timeout(A_WHILE, self.socket.recv(&mut buffer)).await;
        assert!(said.is_err(), "instead of silence: {said:?}");
    }
}

/// What a peer may say that makes no sense wherever it is said: a name, the packet, whether with descriptors.
pub fn nonsense() -> Vec<(&'static str, Vec<u8>, bool)> {
    vec![
        ("malformed", vec![0xff; 20], false),
        ("empty message", vec![0x12, 0x00], false),
        ("empty packet", vec![], false),
        ("oversized", vec![0x0a; 8193], false),
        ("with descriptors", b"\x0a\x00".to_vec(), true),
    ]
}
