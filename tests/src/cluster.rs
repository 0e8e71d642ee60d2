//! A node of a cluster: namespaces, an API server, a kubelet's cgroup, and `weir agent` as a process of its own.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::time::clock_getcpuclockid;
use serde_json::json;
use tokio::runtime::Runtime;

use crate::{
    apiserver::ApiServer,
    cni::Sandbox,
    world::{self, Cgroup, Child, Families, Host, World},
};

/// Name of the one node.
pub const NODE: &str = "node";
/// Where the agent listens for ztunnel, in the world's own `/run`.
pub const ZDS_SOCKET: &str = "/run/ztunnel/ztunnel.sock";
/// The label that puts a namespace or a pod into the mesh.
pub const MODE: &str = "istio.io/dataplane-mode";

/// Ends every wait with an error: the user wants to stop.
pub static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// The node.
pub struct Cluster {
    /// Drives the API server.
    pub runtime: Runtime,
    /// Its namespaces.
    pub world: World,
    /// Its API server.
    pub api: ApiServer,
    /// What runs in here is the kubelet.
    pub kubelet: Cgroup,
    agent: Option<Agent>,
    kubeconfig: PathBuf,
}

/// The agent process and what it has said so far.
struct Agent {
    child: Child,
    log: Arc<Mutex<String>>,
}

/// Resident memory of a process, in kB.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// `VmRSS`: all of it.
    pub all: u64,
    /// `RssAnon`: the process's own.
    pub private: u64,
    /// `RssFile`: pages of the program's file, which the kernel can drop at any time.
    pub files: u64,
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mb = |kb: u64| kb as f64 / 1024.0;
        let (all, private, files) = (mb(self.all), mb(self.private), mb(self.files));
        write!(f, "{all:.1} MB resident ({private:.1} private, {files:.1} of the program's file)")
    }
}

/// A pod: its namespace with one process, and its object in the API.
pub struct Pod {
    /// The namespace.
    pub host: Host,
    /// Namespace of the object.
    pub namespace: String,
    /// UID of the object.
    pub uid: String,
    _process: Child,
    _cgroup: Cgroup,
}

impl Cluster {
    /// Makes the node, without an agent. For the calling thread, which must outlive it.
    ///
    /// # Errors
    /// When the kernel refuses any part.
    pub fn new() -> Result<Self> {
        let world = World::new()?;
        let runtime = Runtime::new()?;
        let api = runtime.block_on(ApiServer::start());
        let kubeconfig = PathBuf::from("/run/kubeconfig");
        api.write_kubeconfig(&kubeconfig)?;
        let kubelet = Cgroup::new(&format!("{}/kubelet", world.id()))?;
        Ok(Self { runtime, world, api, kubelet, agent: None, kubeconfig })
    }

    /// Starts the agent; its log is kept, and shown when something takes too long.
    ///
    /// # Errors
    /// When there is no such program.
    pub fn start_agent(&mut self) -> Result<()> {
        self.start_agent_with(&[])
    }

    /// The same with more flags.
    ///
    /// # Errors
    /// When there is no such program.
    pub fn start_agent_with(&mut self, flags: &[&str]) -> Result<()> {
        let mut command = self.agent_command()?;
        self.spawn_agent(command.args(flags))
    }

    fn spawn_agent(&mut self, command: &mut Command) -> Result<()> {
        let mut child = Child::start(command.stderr(Stdio::piped()).stdin(Stdio::null()))?;
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, kept) = (BufReader::new(child.stderr().context("a pipe")?).lines(), log.clone());
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut log = kept.lock().expect("nobody panics with it");
                log.push_str(&line);
                log.push('\n');
            }
        });
        self.agent = Some(Agent { child, log });
        Ok(())
    }

    /// The same with the programs of a directory (`WEIR_BPF_DIR`) in the place of its own.
    ///
    /// # Errors
    /// When there is no such program.
    pub fn start_agent_of(&mut self, programs: &std::path::Path) -> Result<()> {
        let mut command = self.agent_command()?;
        command.env("WEIR_BPF_DIR", programs);
        self.spawn_agent(&mut command)
    }

    /// The agent's command line.
    ///
    /// # Errors
    /// When there is no such program.
    pub fn agent_command(&self) -> Result<Command> {
        let mut command = Command::new(weir()?);
        command
            .args(["agent", "--node-name", NODE, "--ztunnel-socket", ZDS_SOCKET])
            // Several worlds share the namespace that their agents run in.
            .args(["--metrics-addr", "127.0.0.1:0", "--health-addr", "127.0.0.1:0"])
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--host-netns")
            .arg(self.world.node.path())
            .arg("--kubelet-cgroup")
            .arg(self.kubelet.path());
        Ok(command)
    }

    /// SIGKILL.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill_agent(&mut self) -> Result<()> {
        self.agent.take().map_or(Ok(()), |mut agent| agent.child.kill().map(drop))
    }

    /// SIGTERM, and waits for the end; returns all it has said.
    ///
    /// # Errors
    /// When it does not come in time.
    pub fn stop_agent(&mut self) -> Result<String> {
        let Some(mut agent) = self.agent.take() else { return Ok(String::new()) };
        agent.child.signal(nix::sys::signal::Signal::SIGTERM)?;
        let status = agent.child.wait(Duration::from_secs(10))?;
        if !status.success() {
            bail!("the agent ended with {status}:\n{}", agent.log.lock().expect("nobody panics with it"));
        }
        // The reader of its log ends with the pipe.
        let deadline = Instant::now() + Duration::from_secs(1);
        while Arc::strong_count(&agent.log) > 1 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let log = agent.log.lock().expect("nobody panics with it").clone();
        Ok(log)
    }

    /// What the agent has said so far.
    pub fn agent_log(&self) -> String {
        self.agent
            .as_ref()
            .map_or_else(String::new, |agent| agent.log.lock().expect("nobody panics with it").clone())
    }

    /// Resident memory of the agent.
    ///
    /// # Errors
    /// When it does not run.
    pub fn agent_memory(&self) -> Result<Memory> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.agent_pid()?))?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).context("no such field")?;
            Ok(line.trim_matches([':', ' ', '\t']).trim_end_matches(" kB").parse()?)
        };
        let (all, private, files) = (field("VmRSS")?, field("RssAnon")?, field("RssFile")?);
        Ok(Memory { all, private, files })
    }

    /// Processor time the agent has taken so far, all threads, also those that have ended.
    ///
    /// # Errors
    /// When it does not run.
    pub fn agent_cpu(&self) -> Result<Duration> {
        Ok(clock_getcpuclockid(self.agent_pid()?)?.now()?.into())
    }

    /// Open descriptors of the agent.
    ///
    /// # Errors
    /// When it does not run.
    pub fn agent_descriptors(&self) -> Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/fd", self.agent_pid()?))?.count())
    }

    fn agent_pid(&self) -> Result<nix::unistd::Pid> {
        Ok(self.agent.as_ref().context("no agent runs")?.child.pid())
    }

    /// Makes a namespace object.
    pub fn namespace(&self, name: &str, in_mesh: bool) {
        let labels: &[(&str, &str)] = if in_mesh { &[(MODE, "ambient")] } else { &[] };
        self.api.put_namespace(name, labels);
    }

    /// Makes a running pod: a namespace on the node, a process in the pod's cgroup, and an object.
    ///
    /// # Errors
    /// When the kernel refuses any part.
    pub fn pod(&self, namespace: &str, name: &str, families: Families) -> Result<Pod> {
        let host = self.world.pod(name, families)?;
        self.run_pod(namespace, host, new_uid())
    }

    /// A pod before its first process: a namespace on the node, and an object that has no address yet.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn sandbox(&self, namespace: &str, name: &str, families: Families) -> Result<Sandbox> {
        let uid = new_uid();
        self.api.put_pod(object(namespace, name, &uid, json!({ "phase": "Pending" })));
        self.another_sandbox(namespace, name, &uid, families)
    }

    /// The same with a namespace that has no interface yet.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn bare_sandbox(&self, namespace: &str, name: &str) -> Result<Sandbox> {
        let uid = new_uid();
        self.api.put_pod(object(namespace, name, &uid, json!({ "phase": "Pending" })));
        Ok(Sandbox::of(self.world.empty(name)?, namespace, &uid))
    }

    /// A sandbox for a pod that has its object.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn another_sandbox(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        families: Families,
    ) -> Result<Sandbox> {
        Ok(Sandbox::of(self.world.pod(name, families)?, namespace, uid))
    }

    /// A pod's sandbox is made anew: the same object, another namespace with other addresses, another process.
    ///
    /// # Errors
    /// When the kernel refuses any part.
    pub fn replace_sandbox(&self, old: Pod) -> Result<Pod> {
        let Pod { host, namespace, uid, _process: process, _cgroup: cgroup } = old;
        let families = match (host.v4, host.v6) {
            (Some(_), Some(_)) => Families::Dual,
            (Some(_), None) => Families::V4,
            _ => Families::V6,
        };
        let name = host.name().to_owned();
        drop((process, cgroup, host));
        world::forget_name(&name)?;
        self.run_pod(&namespace, self.world.pod(&name, families)?, uid)
    }

    fn run_pod(&self, namespace: &str, host: Host, uid: String) -> Result<Pod> {
        let cgroup = Cgroup::new(&format!("{}/kubepods/pod{uid}/main", self.world.id()))?;
        let mut command = Command::new(gear()?);
        let process = Child::start_in(&host, command.arg("pause").stdin(Stdio::piped()))?;
        cgroup.add(process.pid())?;
        let ips: Vec<_> = world::addresses(&host).iter().map(|ip| json!({ "ip": ip })).collect();
        let first = world::addresses(&host)[0];
        let annotations = self.api.pod(namespace, host.name()).and_then(|pod| pod.metadata.annotations);
        let status = json!({ "phase": "Running", "podIP": first, "podIPs": ips });
        let mut object = object(namespace, host.name(), &uid, status);
        object["metadata"]["annotations"] = json!(annotations);
        self.api.put_pod(object);
        Ok(Pod { host, namespace: namespace.to_owned(), uid, _process: process, _cgroup: cgroup })
    }

    /// What the annotation `ambient.istio.io/redirection` of a pod says.
    pub fn redirection(&self, pod: &Pod) -> Option<String> {
        let object = self.api.pod(&pod.namespace, pod.host.name())?;
        object.metadata.annotations?.get("ambient.istio.io/redirection").cloned()
    }

    /// Waits until the annotation says so, and returns how long that took.
    ///
    /// # Errors
    /// When it does not in ten seconds; the error has the agent's log.
    pub fn wait_redirection(&self, pod: &Pod, wanted: Option<&str>) -> Result<Duration> {
        let what = format!("{}/{} is {wanted:?}", pod.namespace, pod.host.name());
        self.wait(&what, || self.redirection(pod).as_deref() == wanted)
    }

    /// Waits for something, and returns how long that took.
    ///
    /// # Errors
    /// When it does not happen in ten seconds; the error has the agent's log.
    pub fn wait(&self, what: &str, done: impl FnMut() -> bool) -> Result<Duration> {
        self.wait_for(what, Duration::from_secs(10), done)
    }

    /// The same with another patience.
    ///
    /// # Errors
    /// As [`Cluster::wait`].
    pub fn wait_for(
        &self,
        what: &str,
        patience: Duration,
        mut done: impl FnMut() -> bool,
    ) -> Result<Duration> {
        let began = Instant::now();
        while !done() {
            if INTERRUPTED.load(Ordering::SeqCst) {
                bail!("interrupted");
            }
            if began.elapsed() > patience {
                bail!("never: {what}; the agent says:\n{}", self.agent_log());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(began.elapsed())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.kill_agent();
    }
}

/// Every agent of the machine looks into the same /proc: no two worlds may share a UID.
fn new_uid() -> String {
    let random = rand::random::<u128>();
    format!("{:08x}-0000-4000-8000-{:012x}", random >> 96, random & 0xffff_ffff_ffff)
}

fn object(namespace: &str, name: &str, uid: &str, status: serde_json::Value) -> serde_json::Value {
    json!({
        "metadata": { "namespace": namespace, "name": name, "uid": uid },
        "spec": {
            "nodeName": NODE,
            "serviceAccountName": "default",
            "containers": [{ "name": "app", "image": "app" }],
        },
        "status": status,
    })
}

/// The CNI plugin's program.
///
/// # Errors
/// When it has not been built.
pub fn weir_cni() -> Result<PathBuf> {
    program("WEIR_CNI_BIN", "weir-cni")
}

/// The agent's program.
///
/// # Errors
/// When it has not been built.
pub fn weir() -> Result<PathBuf> {
    program("WEIR_BIN", "weir")
}

/// The program of small helpers.
///
/// # Errors
/// When it has not been built.
pub fn gear() -> Result<PathBuf> {
    program("WEIR_GEAR", "weir-gear")
}

/// A program of the workspace: named by the environment, or beside the one that runs.
fn program(variable: &str, name: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        return Ok(path.into());
    }
    let here = env::current_exe()?;
    let found = here.ancestors().skip(1).take(2).map(|dir| dir.join(name)).find(|path| path.is_file());
    found.with_context(|| format!("{name} is not built: run `cargo build` first, or set {variable}"))
}

/// Whether nothing of a world is left on the machine: cgroups are the one thing that does not go by itself.
///
/// # Errors
/// When cgroup v2 is not mounted.
pub fn leftovers() -> Result<Vec<String>> {
    let mine = format!("weir-test-{}-", std::process::id());
    let root = world::cgroup_root()?;
    Ok(fs::read_dir(root)?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(&mine))
        .collect())
}
