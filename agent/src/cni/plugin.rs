//! The plugin's side: what `weir-cni` does with a runtime's call. The standard library and `nix` only: it is started
//! for every pod, and must come and go quickly.

use std::{
    fs::{self, File, OpenOptions},
    io::{IoSlice, Read, Write},
    os::fd::AsRawFd,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, sendmsg,
            setsockopt, socket, sockopt,
        },
        time::{TimeVal, TimeValLike},
    },
};
use serde_json::{Value, json};

use crate::domain::cni::{
    Answer, Attachment, CniError, Decisions, Environment, MAX_MESSAGE, NetworkConfig, PodId, Request,
    RequestVerb, VERSIONS, Verb, Verdict, code, ordered::Json,
};

/// How long the agent may take; it gives up half a second earlier.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest configuration read.
const MAX_STDIN: u64 = 4 << 20;
/// The log is started anew at this size; one older is kept.
const MAX_LOG: u64 = 4 << 20;

/// One call, from the process's environment and standard input. Returns what belongs on standard output, if anything.
///
/// # Errors
/// What belongs there instead.
pub fn run() -> Result<Option<Json>, CniError> {
    let environment = Environment::read(|name| std::env::var(name).ok())?;
    let mut stdin = String::new();
    std::io::stdin().take(MAX_STDIN).read_to_string(&mut stdin).map_err(|error| {
        CniError::new(code::IO_FAILURE, "weir: standard input cannot be read").with_details(error.to_string())
    })?;
    if environment.verb == Verb::Version {
        return Ok(Some(version(&stdin)));
    }
    let config = NetworkConfig::read(&stdin)?;
    let call = Call { config: &config, environment: &environment };
    call.make().map_err(|error| {
        call.log(&format!(
            "failed: {}{}{}",
            error.msg,
            if error.details.is_empty() { "" } else { ": " },
            error.details
        ));
        CniError { cni_version: config.cni_version.clone(), ..error }
    })
}

/// Told whatever the configuration looks like.
fn version(stdin: &str) -> Json {
    let asked: Value = serde_json::from_str(stdin).unwrap_or_default();
    let spoken = asked["cniVersion"].as_str().unwrap_or("1.1.0");
    json!({ "cniVersion": spoken, "supportedVersions": VERSIONS }).into()
}

/// Why there is no answer.
enum Unanswered {
    /// The agent is down, starting, or too slow.
    Away(String),
    /// What was to be sent cannot be.
    Unsent(CniError),
}

struct Call<'a> {
    config: &'a NetworkConfig,
    environment: &'a Environment,
}

impl Call<'_> {
    fn make(&self) -> Result<Option<Json>, CniError> {
        match self.environment.verb {
            Verb::Add => self.add().map(|()| Some(self.config.result())),
            Verb::Check => self.check().map(|()| None),
            Verb::Status => self.status().map(|()| None),
            Verb::Del | Verb::Gc => {
                self.release();
                Ok(None)
            }
            Verb::Version => Ok(None),
        }
    }

    fn add(&self) -> Result<(), CniError> {
        if let Some(why) = self.config.exempt(&self.environment.pod) {
            self.log(&format!("passes: {why}"));
            return Ok(());
        }
        let netns = self.open_netns()?;
        match self.ask(RequestVerb::Add, Some(&netns)) {
            Ok(Answer::Pass { reason }) => {
                self.log(&format!("passes: {reason}"));
                Ok(())
            }
            Ok(Answer::Captured) => {
                self.log("captured");
                Ok(())
            }
            Ok(Answer::Unready { detail }) | Err(Unanswered::Away(detail)) => self.alone(&detail),
            Ok(answer) => Err(self.not_captured(answer)),
            Err(Unanswered::Unsent(error)) => Err(error),
        }
    }

    /// Decides without the agent.
    fn alone(&self, why: &str) -> Result<(), CniError> {
        let table = fs::read(&self.config.decisions).ok().and_then(|text| serde_json::from_slice(&text).ok());
        match Decisions::judge(self.config.agent_down, table.as_ref(), &self.pod()) {
            Verdict::Pass(rule) => {
                self.log(&format!("passes without the agent ({why}): {rule}"));
                Ok(())
            }
            Verdict::Fail(rule) => {
                let PodId { namespace, name, .. } = self.pod();
                let msg = format!(
                    "weir: pod {namespace}/{name} is held back: the node agent cannot be asked ({why}), and {rule}; it starts when the agent is back"
                );
                Err(CniError::new(code::TRY_AGAIN, msg))
            }
        }
    }

    fn check(&self) -> Result<(), CniError> {
        if self.config.exempt(&self.environment.pod).is_some() {
            return Ok(());
        }
        match self.ask(RequestVerb::Check, None) {
            // Captured pods stay so without the agent: nothing is known to be wrong.
            Err(Unanswered::Away(why)) => {
                self.log(&format!("not checked: {why}"));
                Ok(())
            }
            Ok(Answer::Pass { .. } | Answer::Captured | Answer::Unready { .. }) => Ok(()),
            Ok(answer) => Err(self.not_captured(answer)),
            Err(Unanswered::Unsent(error)) => Err(error),
        }
    }

    fn status(&self) -> Result<(), CniError> {
        if !self.config.status_follows_agent {
            return Ok(());
        }
        let why = match self.ask(RequestVerb::Status, None) {
            Ok(Answer::Done) => return Ok(()),
            Ok(Answer::Unready { detail }) | Err(Unanswered::Away(detail)) => detail,
            Ok(other) => format!("{other:?}"),
            Err(Unanswered::Unsent(error)) => error.msg,
        };
        let msg = format!("weir: pods of the mesh cannot start: {why}");
        Err(CniError::new(code::NOT_AVAILABLE, msg))
    }

    /// DEL and GC: whatever comes of it, the runtime goes on. The agent finds out by itself later.
    fn release(&self) {
        let del = self.environment.verb == Verb::Del;
        if del && self.config.exempt(&self.environment.pod).is_some() {
            return;
        }
        let netns = File::open(&self.environment.netns).ok().filter(|_| del);
        let verb = if del { RequestVerb::Del } else { RequestVerb::Gc };
        match self.ask(verb, netns.as_ref()) {
            Ok(Answer::Done) => self.log("released"),
            Ok(answer) => self.log(&format!("left to the agent: {answer:?}")),
            Err(Unanswered::Away(why)) => self.log(&format!("left to the agent: {why}")),
            Err(Unanswered::Unsent(error)) => self.log(&format!("left to the agent: {}", error.msg)),
        }
    }

    fn open_netns(&self) -> Result<File, CniError> {
        let path = &self.environment.netns;
        File::open(path).map_err(|error| {
            CniError::new(code::IO_FAILURE, format!("weir: the pod's network namespace {path}: {error}"))
        })
    }

    fn not_captured(&self, answer: Answer) -> CniError {
        let PodId { namespace, name, .. } = self.pod();
        let why = match answer {
            Answer::Failed { step, reason, detail } => format!("step {step}: {reason}: {detail}"),
            Answer::Refused { detail } => format!("refused: {detail}"),
            other => format!("unexpected answer {other:?}"),
        };
        CniError::new(code::NOT_CAPTURED, format!("weir: pod {namespace}/{name} is not captured: {why}"))
    }

    fn pod(&self) -> PodId {
        let pod = &self.environment.pod;
        PodId { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() }
    }

    /// One request, one answer.
    fn ask(&self, verb: RequestVerb, netns: Option<&File>) -> Result<Answer, Unanswered> {
        let request = Request {
            verb,
            network: self.config.name.clone(),
            attachment: Attachment {
                container: self.environment.container_id.clone(),
                ifname: self.environment.ifname.clone(),
            },
            pod: self.pod(),
            addresses: self.config.addresses(),
            valid: self.config.valid_attachments.clone(),
        };
        let message =
            serde_json::to_vec(&request).ok().filter(|message| message.len() <= MAX_MESSAGE).ok_or_else(
                || Unanswered::Unsent(CniError::new(code::INVALID_CONFIG, "weir: the request is too long")),
            )?;
        let answer = exchange(&self.config.socket, &message, netns).map_err(|errno| {
            let what = match errno {
                Errno::EAGAIN => "it does not answer".to_owned(),
                Errno::ENOENT | Errno::ECONNREFUSED => "it does not run".to_owned(),
                Errno::ECONNRESET | Errno::EPIPE | Errno::ENODATA => "it has ended meanwhile".to_owned(),
                other => other.desc().to_owned(),
            };
            Unanswered::Away(what)
        })?;
        serde_json::from_slice(&answer)
            .map_err(|error| Unanswered::Away(format!("its answer makes no sense: {error}")))
    }

    /// To the file only: standard output is the runtime's, and what cannot be logged is no reason to fail.
    fn log(&self, what: &str) {
        let path = &self.config.log_file;
        if path.as_os_str().is_empty() {
            return;
        }
        if fs::metadata(path).is_ok_and(|file| file.len() > MAX_LOG) {
            let mut old = path.clone().into_os_string();
            old.push(".1");
            let _ = fs::rename(path, old);
        }
        let Ok(mut file) = OpenOptions::new().create(true).append(true).mode(0o600).open(path) else {
            return;
        };
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let Environment { verb, container_id, ifname, pod, .. } = self.environment;
        // One write: calls run side by side.
        let line = format!(
            "{}.{:03} {verb:?} {}/{} uid={} container={container_id} if={ifname}: {what}\n",
            time.as_secs(),
            time.subsec_millis(),
            pod.namespace,
            pod.name,
            pod.uid,
        );
        let _ = file.write_all(line.as_bytes());
    }
}

fn exchange(path: &Path, message: &[u8], netns: Option<&File>) -> Result<Vec<u8>, Errno> {
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    let patience = TimeVal::seconds(PATIENCE.as_secs().cast_signed());
    // Also for the wait in a full backlog.
    setsockopt(&socket, sockopt::SendTimeout, &patience)?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &patience)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    let descriptors: Vec<_> = netns.iter().map(|file| file.as_raw_fd()).collect();
    let control = [ControlMessage::ScmRights(&descriptors)];
    let control = if descriptors.is_empty() { &[] } else { &control[..] };
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &[IoSlice::new(message)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    let mut answer = vec![0; MAX_MESSAGE];
    match recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())? {
        0 => Err(Errno::ENODATA),
        length => {
            answer.truncate(length);
            Ok(answer)
        }
    }
}
