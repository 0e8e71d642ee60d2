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

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

mod agent;
pub mod dns;
mod log;
mod mesh;
mod netns;
mod proxy;
mod socket;
mod state;
mod workload;

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
            ipv6: true,
            drain_deadline: Duration::from_secs(5),
        }
    }
}

/// A running stand-in. Dropping it kills it.
pub struct Ztunnel {
    commands: UnboundedSender<Command>,
    log: Arc<Log>,
    link: Option<agent::Link>,
    thread: Option<JoinHandle<()>>,
}

type Reply<T> = mpsc::SyncSender<T>;

enum Command {
    Serve { netns: OwnedFd, uid: String, reply: Reply<io::Result<()>> },
    Remove { uid: String, reply: Reply<()> },
    Workloads { reply: Reply<Vec<String>> },
    Stop,
    Kill,
}

impl Ztunnel {
    /// Starts a stand-in that serves nobody yet. Its thread stays in the caller's namespaces.
    pub fn start(options: Options) -> io::Result<Self> {
        let (commands, receiver) = unbounded_channel();
        let log = Arc::new(Log::default());
        let state = (options.mesh.clone(), log.clone(), options.ipv6);
        let (started, start) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name(options.name.clone()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let (mesh, log, ipv6) = state;
            let ready = runtime.and_then(|runtime| Ok((runtime, State::new(mesh, log, ipv6)?)));
            let (runtime, state) = match ready {
                Ok(ready) => ready,
                Err(e) => return drop(started.send(Err(e))),
            };
            let _ = started.send(Ok(()));
            // With the runtime go all tasks, and with them all sockets.
            runtime.block_on(run(options, Arc::new(Mutex::new(state)), receiver));
        })?;
        let ztunnel = Self { commands, log, link: None, thread: Some(thread) };
        start.recv().map_err(|_| io::Error::other("stand-in's thread died"))??;
        Ok(ztunnel)
    }

    /// Starts a stand-in that serves the pods an agent tells it of, and connects again whenever it has to.
    pub fn start_with_agent(options: Options, socket: PathBuf) -> io::Result<Self> {
        let mut ztunnel = Self::start(options)?;
        ztunnel.link = Some(agent::Link::start(socket, ztunnel.commands.clone())?);
        Ok(ztunnel)
    }

    /// What the agent did that would have made a real ztunnel exit or spin. Must be empty.
    pub fn violations(&self) -> Vec<String> {
        self.link.as_ref().map(agent::Link::violations).unwrap_or_default()
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

    /// What it saw so far; stays readable after its end.
    pub fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// Connections it is proxying right now.
    pub fn connections(&self) -> u64 {
        self.log.counts().open
    }

    /// As on SIGTERM: leaves the agent, closes the listeners, gives connections until the deadline of
    /// the options. Returns when it is gone.
    pub fn stop_gracefully(mut self) {
        drop(self.link.take());
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
        drop(self.link.take());
        let _ = self.commands.send(Command::Kill);
        self.join();
    }
}

async fn run(options: Options, state: Arc<Mutex<State>>, mut commands: UnboundedReceiver<Command>) {
    let locked = || state.lock().expect("nobody panics holding the state");
    while let Some(command) = commands.recv().await {
        match command {
            Command::Serve { netns, uid, reply } => {
                let mut state = locked();
                let served =
                    state.pod_netns(netns).and_then(|netns| state.add(&uid, netns).map_err(io::Error::other));
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
            Command::Stop => {
                let drained = locked().drain(options.drain_deadline);
                return drained.await;
            }
            Command::Kill => return,
        }
    }
}
