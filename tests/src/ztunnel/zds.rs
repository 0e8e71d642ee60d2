//! The client end of the ZDS socket, with ztunnel's patience and ztunnel's manners.

use std::{
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use nix::sys::socket::{MsgFlags, recv};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_seqpacket::{UnixSeqpacket, ancillary::OwnedAncillaryMessage};

use super::{
    controls::Controls,
    state::{Outcome, State},
    wire::{self, Request},
};

const RECONNECT: Duration = Duration::from_millis(20);
/// ztunnel's buffer. One byte more is read here, so that what is too long shows.
const MAX_PACKET: usize = 1024;
const CONTROL_BUFFER: usize = 256;

/// One stand-in's dealings with the agent.
pub struct Client {
    /// The agent's socket.
    pub path: PathBuf,
    /// Longest pause between two attempts to connect.
    pub reconnect_cap: Duration,
    /// Pause between two attempts to serve what is pending.
    pub pending_retry: Duration,
    /// What is served.
    pub state: Arc<Mutex<State>>,
    /// What a test wants, and wants to know.
    pub controls: Arc<Controls>,
}

/// Why a connection is over.
enum End {
    /// The agent has closed, or said what made us close.
    Reconnect,
    /// What the agent did would make ztunnel exit.
    Exit,
}

impl Client {
    /// Talks to the agent, whichever comes and goes, until one makes ztunnel exit.
    pub async fn run(self) {
        loop {
            let socket = self.connect().await;
            self.controls.set_connected(true);
            let end = self.converse(&socket).await.unwrap_or(End::Reconnect);
            self.controls.set_connected(false);
            if matches!(end, End::Exit) {
                self.controls.set_exited();
                return self.state().exit();
            }
        }
    }

    async fn connect(&self) -> UnixSeqpacket {
        let mut pause = RECONNECT;
        loop {
            // A hung process does not connect either.
            self.controls.while_stalled().await;
            match UnixSeqpacket::connect(&self.path).await {
                Ok(socket) => return socket,
                Err(_) => sleep(pause.min(self.reconnect_cap)).await,
            }
            pause *= 2;
        }
    }

    async fn converse(&self, socket: &UnixSeqpacket) -> io::Result<End> {
        self.state().connected();
        socket.send(wire::HELLO).await?;
        let mut retry = None;
        loop {
            let packet = tokio::select! {
                packet = receive(socket) => packet?,
                () = retry_at(retry) => {
                    self.state().retry_pending();
                    retry = (!self.state().pending().is_empty()).then(|| Instant::now() + self.pending_retry);
                    self.report_ready();
                    continue;
                }
            };
            let Some((packet, fds)) = packet else { return Ok(End::Reconnect) };
            let (request, netns) = match parse(&packet, fds) {
                Ok(parsed) => parsed,
                Err(e) => {
                    self.controls.violation(e.clone());
                    self.answer(socket, &format!("failure to read message : {e}")).await?;
                    return Ok(End::Reconnect);
                }
            };
            self.controls.record(&request);
            let error = match self.apply(&request, netns) {
                Outcome::Ack => String::new(),
                Outcome::Nack(text) => {
                    retry.get_or_insert_with(|| Instant::now() + self.pending_retry);
                    text
                }
                Outcome::Exit(text) => {
                    self.controls.violation(text);
                    return Ok(End::Exit);
                }
            };
            self.report_ready();
            self.answer(socket, &error).await?;
        }
    }

    fn apply(&self, request: &Request, netns: Option<OwnedFd>) -> Outcome {
        let mut state = self.state();
        let netns = match netns.map(|fd| state.pod_netns(fd)).transpose() {
            Ok(netns) => netns,
            Err(e) => {
                self.controls.violation(format!("no namespace with an Add: {e}"));
                return Outcome::Nack(e.to_string());
            }
        };
        let refusal = netns.as_ref().and_then(|_| self.controls.take_refusal());
        let outcome = state.apply(request, netns, refusal);
        if let Request::Add { uid, .. } = request
            && let Some(other) = state.shares_netns(uid)
        {
            self.controls.violation(format!("{uid} and {other} in one network namespace"));
        }
        outcome
    }

    async fn answer(&self, socket: &UnixSeqpacket, error: &str) -> io::Result<()> {
        let delay = self.controls.ack_delay();
        if !delay.is_zero() {
            sleep(delay).await;
        }
        self.controls.while_stalled().await;
        let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        if recv(socket.as_raw_fd(), &mut [0], peek).is_ok_and(|len| len > 0) {
            self.controls.violation("request before the answer to the last one".into());
        }
        socket.send(&wire::answer(error)).await.map(drop)
    }

    fn report_ready(&self) {
        self.controls.set_ready(self.state().is_ready());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics holding the state")
    }
}

async fn retry_at(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The next packet with its descriptors; `None` at the end. Cancel-safe.
async fn receive(socket: &UnixSeqpacket) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let (mut buffer, mut control) = ([0; MAX_PACKET + 1], [0; CONTROL_BUFFER]);
    let (read, ancillary) = socket.recv_with_ancillary(&mut buffer, &mut control).await?;
    let mut fds = Vec::new();
    for message in ancillary.into_messages() {
        if let OwnedAncillaryMessage::FileDescriptors(received) = message {
            fds.extend(received);
        }
    }
    Ok((read.bytes_read() > 0).then(|| (buffer[..read.bytes_read()].to_vec(), fds)))
}

fn parse(packet: &[u8], mut fds: Vec<OwnedFd>) -> Result<(Request, Option<OwnedFd>), String> {
    if packet.len() > MAX_PACKET {
        return Err(format!("packet of more than {MAX_PACKET} bytes"));
    }
    let request = wire::decode(packet).map_err(|e| e.to_string())?;
    let wanted = usize::from(matches!(request, Request::Add { .. }));
    if fds.len() != wanted {
        return Err(format!("{} descriptors with {request:?}", fds.len()));
    }
    Ok((request, fds.pop()))
}
