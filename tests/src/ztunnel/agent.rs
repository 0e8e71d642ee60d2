//! The stand-in's side of the ZDS socket: connects to the agent, does what it says, acknowledges each message.

use std::{
    collections::HashSet,
    io::{self, IoSliceMut},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, connect, recvmsg, send,
    setsockopt, socket, sockopt::ReceiveTimeout,
};
use tokio::sync::mpsc::UnboundedSender;
use weir_agent::zds::codec::{self, Answer, Request};

use super::Command;

/// First wait between two tries to connect; doubles up to [`WAIT_MOST`], as ztunnel's does up to 15 s.
const WAIT: Duration = Duration::from_millis(20);
const WAIT_MOST: Duration = Duration::from_millis(200);
/// How often a reader that waits looks whether it shall stop.
const LOOK: Duration = Duration::from_millis(20);
/// ztunnel's read buffer: what is longer it takes for an error.
const PACKET_MOST: usize = 1024;

/// The connection to an agent, for as long as the stand-in runs.
pub(super) struct Link {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    violations: Arc<Mutex<Vec<String>>>,
}

impl Link {
    pub(super) fn start(path: PathBuf, commands: UnboundedSender<Command>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let violations = Arc::default();
        let worker = Worker { path, commands, stop: stop.clone(), violations: Arc::clone(&violations) };
        let thread = std::thread::Builder::new().name("ztunnel-zds".into()).spawn(move || worker.run())?;
        Ok(Self { stop, thread: Some(thread), violations })
    }

    /// What the agent did that would have made a real ztunnel exit or spin.
    pub(super) fn violations(&self) -> Vec<String> {
        self.violations.lock().expect("nobody panics holding it").clone()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Worker {
    path: PathBuf,
    commands: UnboundedSender<Command>,
    stop: Arc<AtomicBool>,
    violations: Arc<Mutex<Vec<String>>>,
}

impl Worker {
    fn run(&self) {
        let mut wait = WAIT;
        while !self.stopped() {
            match open(&self.path) {
                Ok(socket) => {
                    wait = WAIT;
                    if let Err(error) = self.converse(&socket) {
                        tracing::debug!(%error, "the agent's connection ended");
                    }
                }
                Err(_) => wait = (wait * 2).min(WAIT_MOST),
            }
            if !self.stopped() {
                std::thread::sleep(wait);
            }
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn converse(&self, socket: &OwnedFd) -> io::Result<()> {
        send(socket.as_raw_fd(), &codec::encode_hello(), MsgFlags::MSG_NOSIGNAL)?;
        // Named on this connection; gone with the end of the snapshot.
        let mut snapshot = Some(HashSet::new());
        while let Some((packet, descriptors)) = self.receive(socket)? {
            let request = match Request::decode(&packet) {
                Ok(request) => request,
                Err(error) => return self.violation(format!("{error}")),
            };
            if descriptors.len() != usize::from(matches!(request, Request::Add { .. })) {
                return self.violation(format!("{} descriptors with {request:?}", descriptors.len()));
            }
            let answer = match request {
                Request::Add { uid, .. } => {
                    let uid = uid.to_string();
                    snapshot.as_mut().map(|named| named.insert(uid.clone()));
                    let netns = descriptors.into_iter().next().expect("counted above");
                    self.ask(|reply| Command::Serve { netns, uid, reply }).and_then(|served| served)
                }
                Request::Keep(uid) => match snapshot.as_mut() {
                    Some(named) => {
                        named.insert(uid.to_string());
                        Ok(())
                    }
                    None => return self.violation("Keep after the snapshot".into()),
                },
                Request::Del(uid) => self.ask(|reply| Command::Remove { uid: uid.to_string(), reply }),
                Request::SnapshotSent => match snapshot.take() {
                    Some(named) => self.cut_all_but(&named),
                    None => return self.violation("a second SnapshotSent".into()),
                },
            };
            let answer: Answer = answer.map_err(|error| error.to_string());
            send(socket.as_raw_fd(), &codec::encode_answer(&answer), MsgFlags::MSG_NOSIGNAL)?;
        }
        Ok(())
    }

    fn cut_all_but(&self, named: &HashSet<String>) -> io::Result<()> {
        for uid in self.ask(|reply| Command::Workloads { reply })? {
            if !named.contains(&uid) {
                self.ask(|reply| Command::Remove { uid, reply })?;
            }
        }
        Ok(())
    }

    fn ask<T>(&self, command: impl FnOnce(mpsc::SyncSender<T>) -> Command) -> io::Result<T> {
        let (reply, answer) = mpsc::sync_channel(1);
        let _ = self.commands.send(command(reply));
        answer.recv().map_err(|_| io::Error::other("the stand-in is gone"))
    }

    fn violation(&self, what: String) -> io::Result<()> {
        self.violations.lock().expect("nobody panics holding it").push(what.clone());
        Err(io::Error::other(what))
    }

    /// The next packet and its descriptors; none at the end of the stream, or when the stand-in stops.
    fn receive(&self, socket: &OwnedFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        loop {
            if self.stopped() {
                return Ok(None);
            }
            let mut buffer = [0; PACKET_MOST];
            let mut space = nix::cmsg_space!([i32; 4]);
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message = match recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
                Ok(message) => message,
                Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            let mut descriptors = Vec::new();
            for control in message.cmsgs()? {
                if let ControlMessageOwned::ScmRights(received) = control {
                    // SAFETY: the kernel has just made these descriptors for this process.
                    descriptors.extend(received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                }
            }
            let (length, truncated) = (message.bytes, message.flags.contains(MsgFlags::MSG_TRUNC));
            if truncated {
                self.violation(format!("a packet of more than {PACKET_MOST} bytes"))?;
            }
            return Ok((length > 0).then(|| (buffer[..length].to_vec(), descriptors)));
        }
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    let look = nix::sys::time::TimeVal::new(0, i64::from(LOOK.subsec_micros()));
    setsockopt(&socket, ReceiveTimeout, &look)?;
    Ok(socket)
}
