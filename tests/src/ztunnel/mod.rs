//! A stand-in for ztunnel: its sockets with its options inside real network namespaces, its side of the
//! ZDS socket, and none of its TLS.
//!
//! A stand-in runs on a thread of its own and is driven from any other:
//!
//! ```no_run
//! # use weir_tests::ztunnel::{Mesh, Options, Ztunnel};
//! # fn netns() -> std::os::fd::OwnedFd { unimplemented!() }
//! let mesh = Mesh::default();
//! let ztunnel = Ztunnel::start(Options { mesh: mesh.clone(), ..Options::default() })?;
//! ztunnel.serve_in_netns(netns(), "some-uid")?; // listeners are up when it returns
//! // … make connections …
//! assert_eq!(ztunnel.log().counts().outbound, 1);
//! ztunnel.kill();
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! With [`Options::zds`] it connects to an agent and does as it is told, as ztunnel would. What ztunnel
//! would not survive, or what it must never be asked, is noted in [`Ztunnel::violations`]: a test asserts
//! that there are none.
//!
//! What differs from the real one: on 15008 stand-ins greet each other with a line of text
//! ([`Preface`]); what leaves in plaintext carries [`PASSTHROUGH_TOS`]; DNS answers are made up
//! ([`dns::address_of`]).

use std::{
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::JoinSet,
};

mod controls;
pub mod dns;
mod log;
mod mesh;
mod netns;
mod proxy;
mod socket;
mod state;
pub mod wire;
mod workload;
mod zds;

use controls::Controls;
pub use log::{Accepted, Counts, DnsQuery, Listener, Log};
pub use mesh::Mesh;
pub use proxy::Preface;
pub use socket::{MARK, PASSTHROUGH_TOS};
use state::State;

/// Takes what apps of the pod send.
pub const OUTBOUND_PORT: u16 = 15001;
/// Takes what comes to the pod in plaintext.
pub const INBOUND_PORT: u16 = 15006;
/// Takes what other stand-ins send.
pub const HBONE_PORT: u16 = 15008;
/// DNS, UDP and TCP, on loopback only.
pub const DNS_PORT: u16 = 15053;

/// How a stand-in behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of its thread.
    pub name: String,
    /// Who is spoken to on 15008; share one among all stand-ins of a test.
    pub mesh: Mesh,
    /// Socket of the agent; without one, pods are served by [`Ztunnel::serve_in_netns`] alone.
    pub zds: Option<PathBuf>,
    /// Longest pause between two attempts to reach the agent. ztunnel's own is 15 s.
    pub reconnect_cap: Duration,
    /// Pause between two attempts to serve a pod that could not be served. ztunnel's own is 5 s.
    pub pending_retry: Duration,
    /// The three TCP listeners are dual-stack; else v4 only. A setting of the process, as in ztunnel.
    pub ipv6: bool,
    /// How long connections may outlive a graceful stop.
    pub drain_deadline: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "ztunnel".into(),
            mesh: Mesh::default(),
            zds: None,
            reconnect_cap: Duration::from_millis(160),
            pending_retry: Duration::from_secs(5),
            ipv6: true,
            drain_deadline: Duration::from_secs(5),
        }
    }
}

/// A running stand-in. Dropping it kills it.
pub struct Ztunnel {
    commands: UnboundedSender<Command>,
    log: Arc<Log>,
    controls: Arc<Controls>,
    thread: Option<JoinHandle<()>>,
}

type Reply<T> = mpsc::SyncSender<T>;

enum Command {
    Serve { netns: OwnedFd, uid: String, reply: Reply<io::Result<()>> },
    Remove { uid: String, reply: Reply<()> },
    Workloads { reply: Reply<Vec<String>> },
    Pending { reply: Reply<Vec<String>> },
    Stop,
    Kill,
}

impl Ztunnel {
    /// Starts a stand-in that serves nobody yet. Its thread stays in the caller's namespaces.
    pub fn start(options: Options) -> io::Result<Self> {
        let (commands, receiver) = unbounded_channel();
        let (log, controls) = (Arc::new(Log::default()), Arc::new(Controls::default()));
        let (started, start) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name(options.name.clone()).spawn({
            let (log, controls) = (log.clone(), controls.clone());
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                let state = State::new(options.mesh.clone(), log, options.ipv6);
                let (runtime, state) = match runtime.and_then(|runtime| Ok((runtime, state?))) {
                    Ok(ready) => ready,
                    Err(e) => return drop(started.send(Err(e))),
                };
                let _ = started.send(Ok(()));
                // With the runtime go all tasks, and with them all sockets.
                runtime.block_on(run(options, Arc::new(Mutex::new(state)), controls, receiver));
            }
        })?;
        let ztunnel = Self { commands, log, controls, thread: Some(thread) };
        start.recv().map_err(|_| io::Error::other("stand-in's thread died"))??;
        Ok(ztunnel)
    }

    /// Serves a pod without any agent. Its listeners are up when this returns.
    pub fn serve_in_netns(&self, netns: OwnedFd, uid: &str) -> io::Result<()> {
        self.ask(|reply| Command::Serve { netns, uid: uid.into(), reply })
    }

    /// Cuts a pod served by [`Ztunnel::serve_in_netns`]. Its sockets are closed when this returns.
    pub fn remove(&self, uid: &str) {
        self.ask(|reply| Command::Remove { uid: uid.into(), reply });
    }

    /// UIDs of the pods served, sorted.
    pub fn workloads(&self) -> Vec<String> {
        self.ask(|reply| Command::Workloads { reply })
    }

    /// UIDs of the pods it was told to serve but could not so far, sorted.
    pub fn pending(&self) -> Vec<String> {
        self.ask(|reply| Command::Pending { reply })
    }

    /// What it saw so far; stays readable after its end.
    pub fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// Connections it is proxying right now.
    pub fn connections(&self) -> u64 {
        self.log.counts().open
    }

    /// Connected to an agent.
    pub fn is_connected(&self) -> bool {
        self.controls.is_connected()
    }

    /// Connected, has its snapshot, and nothing is pending: what ztunnel calls ready.
    pub fn is_ready(&self) -> bool {
        self.controls.is_ready()
    }

    /// Waits until [`Ztunnel::is_ready`]; `false` if that took too long.
    pub fn wait_ready(&self, timeout: Duration) -> bool {
        self.controls.wait_ready(timeout)
    }

    /// The agent did what makes ztunnel exit; nothing is served any more.
    pub fn has_exited(&self) -> bool {
        self.controls.has_exited()
    }

    /// What the agent must never do, and did.
    pub fn violations(&self) -> Vec<String> {
        self.controls.violations()
    }

    /// The agent's requests, oldest first.
    pub fn requests(&self) -> Vec<wire::Request> {
        self.controls.requests()
    }

    /// Hangs as far as the agent can see: no more answers, no reconnecting. What is served goes on.
    pub fn stall(&self, stalled: bool) {
        self.controls.stall(stalled);
    }

    /// The next pod to be added is refused with `text` and stays pending.
    pub fn nack_next(&self, text: impl Into<String>) {
        self.controls.nack_next(text.into());
    }

    /// Every answer from now on comes this much later.
    pub fn delay_acks(&self, delay: Duration) {
        self.controls.delay_acks(delay);
    }

    /// As on SIGTERM: leaves the agent, closes the listeners, gives connections until the deadline of
    /// the options. Returns when it is gone.
    pub fn stop_gracefully(mut self) {
        let _ = self.commands.send(Command::Stop);
        self.join();
    }

    /// As on SIGKILL: everything closes at once. Returns when it is gone.
    pub fn kill(self) {
        drop(self);
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> T {
        let (reply, answer) = mpsc::sync_channel(1);
        let _ = self.commands.send(command(reply));
        answer.recv().expect("the stand-in's thread lives as long as its handle")
    }

    fn join(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let ended = thread.join();
        if ended.is_err() && !std::thread::panicking() {
            panic!("the stand-in's thread panicked");
        }
    }
}

impl Drop for Ztunnel {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Kill);
        self.join();
    }
}

async fn run(
    options: Options,
    state: Arc<Mutex<State>>,
    controls: Arc<Controls>,
    mut commands: UnboundedReceiver<Command>,
) {
    let mut agent = JoinSet::new();
    if let Some(path) = options.zds {
        let Options { reconnect_cap, pending_retry, .. } = options;
        agent.spawn(zds::Client { path, reconnect_cap, pending_retry, state: state.clone(), controls }.run());
    }
    let locked = || state.lock().expect("nobody panics holding the state");
    loop {
        let command = tokio::select! {
            command = commands.recv() => command.unwrap_or(Command::Kill),
            // It ends when ztunnel would exit; a panic in it is ours.
            Some(ended) = agent.join_next() => {
                ended.expect("the stand-in's ZDS client does not panic");
                continue;
            }
        };
        match command {
            Command::Serve { netns, uid, reply } => {
                let mut state = locked();
                let served =
                    state.pod_netns(netns).and_then(|netns| state.add(uid.as_str().into(), netns, None));
                if served.is_err() {
                    // Nobody is there to want it tried again.
                    drop(state.del(&uid));
                }
                let _ = reply.send(served);
            }
            Command::Remove { uid, reply } => {
                let known = locked().del(&uid);
                if let Some(workload) = known {
                    workload.cut().await;
                }
                let _ = reply.send(());
            }
            Command::Workloads { reply } => drop(reply.send(locked().running())),
            Command::Pending { reply } => drop(reply.send(locked().pending())),
            Command::Stop => {
                // ztunnel leaves the agent first: pods that come from now on are for its successor.
                agent.shutdown().await;
                let drained = locked().drain(options.drain_deadline);
                return drained.await;
            }
            Command::Kill => return,
        }
    }
}
