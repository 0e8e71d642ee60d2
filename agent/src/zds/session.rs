//! One ztunnel connection, from its hello to its end.

use std::{
    collections::HashSet,
    convert::Infallible,
    io,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, recv},
};
use thiserror::Error;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_seqpacket::{UnixSeqpacket, ancillary::AncillaryMessageWriter};
use tracing::{debug, info, warn};

use super::{
    codec::{self, Answer, DecodeError, Request},
    counters::Counters,
};
use crate::{
    cache::members::{Action, Members, Next, Peer, Session, UnexpectedNack},
    domain::workload::PodUid,
};

/// A refusal carries an error text of any length; what is longer than this is no answer.
const RECEIVE_BUFFER: usize = 8192;
/// Room for the one descriptor that goes with an Add.
const CONTROL_BUFFER: usize = 64;

/// How long ztunnel may take.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// From connecting to the hello.
    pub hello: Duration,
    /// From a request to its answer.
    pub answer: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { hello: Duration::from_secs(5), answer: Duration::from_secs(5) }
    }
}

/// Why a connection is over. Any of these ends this connection and no other; ztunnel reconnects and starts
/// from a new snapshot.
#[derive(Debug, Error)]
pub enum SessionError {
    /// ztunnel ended it.
    #[error("ztunnel left")]
    Left,
    /// Connected and said nothing.
    #[error("no hello in time")]
    NoHello,
    /// The hello made no sense, or was one of another protocol.
    #[error("hello: {0}")]
    Hello(#[source] DecodeError),
    /// Waiting on would pair a late answer with the next request.
    #[error("no answer in time")]
    NoAnswer,
    /// The answer made no sense.
    #[error("answer: {0}")]
    Answer(#[source] DecodeError),
    /// Something was said without being asked: the two ends are out of step.
    #[error("message without a request")]
    Unsolicited,
    /// A message longer than any answer.
    #[error("message of more than {RECEIVE_BUFFER} bytes")]
    TooLong,
    /// ztunnel has no descriptors to give.
    #[error("message with descriptors")]
    Descriptors,
    /// See [`UnexpectedNack`].
    #[error(transparent)]
    Nack(#[from] UnexpectedNack),
    /// The socket failed.
    #[error(transparent)]
    Io(io::Error),
}

impl From<io::Error> for SessionError {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Left,
            _ => Self::Io(e),
        }
    }
}

/// Serves one connection until it is over, and says why it is.
pub(super) async fn serve(
    socket: UnixSeqpacket,
    peer: Peer,
    members: &Members,
    timeouts: Timeouts,
    counters: &Counters,
) -> SessionError {
    let mut line = Line { socket, buffer: vec![0; RECEIVE_BUFFER] };
    if let Err(e) = line.hello(timeouts.hello).await {
        return e;
    }
    // Before the first look at the set, so that nothing falls between the snapshot and what follows it.
    let mut session = members.register(peer);
    info!(session = session.id(), pid = peer.pid, "ztunnel connected");
    let Err(end) = follow(&mut line, &mut session, timeouts, counters).await;
    end
}

/// Tells ztunnel whatever there is to tell, until that fails.
async fn follow(
    line: &mut Line,
    session: &mut Session,
    timeouts: Timeouts,
    counters: &Counters,
) -> Result<Infallible, SessionError> {
    let (started, mut named, mut refused) = (Instant::now(), 0, HashSet::new());
    loop {
        match session.next_step() {
            Next::Send(action) => {
                let answer = line.exchange_counted(&action, timeouts.answer, counters).await?;
                match &action {
                    Action::Add { uid, .. } => report(session.id(), uid, &answer, &mut refused),
                    Action::Del(uid) => {
                        refused.remove(uid);
                    }
                    Action::Keep(_) | Action::SnapshotSent => {}
                }
                session.answered(answer)?;
                if matches!(action, Action::SnapshotSent) {
                    counters.snapshots.add();
                    counters.last_snapshot_size.set(named);
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    counters.last_snapshot_at.set(now.as_secs());
                    info!(session = session.id(), pods = named, took = ?started.elapsed(), "snapshot sent");
                }
                named += 1;
            }
            Next::Idle(until) => tokio::select! {
                biased;
                packet = line.receive() => return packet.and(Err(SessionError::Unsolicited)),
                () = session.changed() => {}
                () = wait_until(until) => {}
            },
        }
    }
}

/// One line when a pod is refused and one when it no longer is, however often it is tried in between.
fn report(session: u64, uid: &PodUid, answer: &Answer, refused: &mut HashSet<PodUid>) {
    match answer {
        Err(text) if refused.insert(uid.clone()) => {
            warn!(session, %uid, text, "ztunnel cannot serve a pod");
        }
        Err(text) => debug!(session, %uid, text, "ztunnel still cannot serve a pod"),
        Ok(()) if refused.remove(uid) => info!(session, %uid, "ztunnel serves the pod now"),
        Ok(()) => {}
    }
}

async fn wait_until(until: Option<Instant>) {
    match until {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The socket, packet by packet.
struct Line {
    socket: UnixSeqpacket,
    buffer: Vec<u8>,
}

impl Line {
    async fn hello(&mut self, within: Duration) -> Result<(), SessionError> {
        let packet = timeout(within, self.receive()).await.map_err(|_| SessionError::NoHello)??;
        codec::decode_hello(packet).map_err(SessionError::Hello)
    }

    async fn exchange_counted(
        &mut self,
        action: &Action,
        within: Duration,
        counters: &Counters,
    ) -> Result<Answer, SessionError> {
        let began = Instant::now();
        let exchanged = timeout(within, self.exchange(action)).await.unwrap_or(Err(SessionError::NoAnswer));
        if exchanged.is_ok() {
            counters.answers.0.observe(began.elapsed().as_secs_f64());
        }
        let results = counters.of(action);
        match &exchanged {
            Ok(Ok(())) => results.acked.add(),
            Ok(Err(_)) => results.nacked.add(),
            Err(_) => results.lost.add(),
        }
        exchanged
    }

    /// One request and its answer.
    async fn exchange(&mut self, action: &Action) -> Result<Answer, SessionError> {
        if self.has_pending()? {
            // A second answer to the last request, most likely. Taken for the answer to this one it would
            // shift all that follow.
            return self.receive().await.and(Err(SessionError::Unsolicited));
        }
        let (request, netns) = match action {
            Action::Add { uid, info, netns } => {
                (Request::Add { uid: uid.clone(), info: info.clone() }, Some(netns.as_fd()))
            }
            Action::Keep(uid) => (Request::Keep(uid.clone()), None),
            Action::Del(uid) => (Request::Del(uid.clone()), None),
            Action::SnapshotSent => (Request::SnapshotSent, None),
        };
        self.send(&request.encode(), netns).await?;
        codec::decode_answer(self.receive().await?).map_err(SessionError::Answer)
    }

    async fn send(&self, packet: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut control = [0; CONTROL_BUFFER];
        let mut ancillary = AncillaryMessageWriter::new(&mut control);
        if let Some(fd) = &fd {
            ancillary.add_fds([fd]).expect("the buffer has room for one descriptor");
        }
        // A packet goes out whole or not at all.
        self.socket.send_with_ancillary(packet, &mut ancillary).await.map(drop)
    }

    /// The next packet. Cancel-safe: nothing is taken from the socket before it is returned.
    async fn receive(&mut self) -> Result<&[u8], SessionError> {
        // No room for control messages: the kernel then drops descriptors on its own and says so, and they
        // never enter this process.
        let info = self.socket.recv(&mut self.buffer).await?;
        if info.ancillary_truncated() {
            return Err(SessionError::Descriptors);
        }
        if info.truncated() {
            return Err(SessionError::TooLong);
        }
        match info.bytes_read() {
            // An empty packet looks the same as the end, to ztunnel as well.
            0 => Err(SessionError::Left),
            len => Ok(&self.buffer[..len]),
        }
    }

    /// Whether there is a packet, or the end, to be received now.
    fn has_pending(&self) -> io::Result<bool> {
        let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recv(self.socket.as_raw_fd(), &mut [0], peek) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}
