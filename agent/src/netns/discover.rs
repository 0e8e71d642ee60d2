//! Finds the network namespace of a running pod.
//!
//! A pod's processes are known by their cgroup, whose path carries the pod's UID. A process can sit in a namespace
//! that is not its pod's (a privileged one in the host's, a debugger passing through another pod's), so a namespace
//! is taken only when it owns one of the pod's addresses, and the host's never.

use std::{
    collections::HashMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{Netns, interfaces};

/// Why no namespace was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiscoverError {
    /// No process has the pod's cgroup.
    #[error("no process of the pod found under {}", .0.display())]
    NoProcess(PathBuf),
    /// There are processes, but none in a namespace that can be the pod's.
    #[error("no namespace of the pod's {processes} process(es) has one of its addresses ({why})")]
    Refused {
        /// Processes looked at.
        processes: usize,
        /// What was wrong with the last of them.
        why: String,
    },
}

/// A process of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    /// Clock ticks since boot, field 22 of `/proc/PID/stat`: the oldest wins.
    started: u64,
    pid: u32,
}

/// Processes of all pods, by UID, oldest first.
type Scan = HashMap<String, Vec<Candidate>>;

/// Looks pods up in a proc mount. One scan serves every pod it knows, for what it says is checked again; only a pod
/// that is not found where it says has the mount read anew.
pub struct Discovery {
    proc: PathBuf,
    host: Netns,
    scan: Mutex<Option<(Instant, Scan)>>,
}

/// How young a scan must be for "there is no such process" to be believed. Pods that wait for their processes ask
/// again and again, and share scans.
const FRESH: Duration = Duration::from_millis(200);
/// How old a scan may be for what it does know.
const USABLE: Duration = Duration::from_secs(30);

impl Discovery {
    /// `proc` is the host's, `host` the namespace that never belongs to a pod.
    pub fn new(proc: PathBuf, host: Netns) -> Self {
        Self { proc, host, scan: Mutex::new(None) }
    }

    /// The namespace of the pod with this UID and these addresses.
    pub fn find(&self, uid: &str, ips: &[IpAddr]) -> Result<Netns, DiscoverError> {
        self.choose(self.candidates(uid, USABLE), uid, ips)
            .or_else(|_| self.choose(self.candidates(uid, FRESH), uid, ips))
    }

    fn choose(&self, candidates: Vec<Candidate>, uid: &str, ips: &[IpAddr]) -> Result<Netns, DiscoverError> {
        if candidates.is_empty() {
            return Err(DiscoverError::NoProcess(self.proc.clone()));
        }
        let mut why = String::new();
        for candidate in &candidates {
            match self.judge(*candidate, uid, ips) {
                Ok(netns) => return Ok(netns),
                Err(reason) => why = format!("process {}: {reason}", candidate.pid),
            }
        }
        Err(DiscoverError::Refused { processes: candidates.len(), why })
    }

    /// The namespace of this pod that has this cookie: one that was found before, and need not be judged again.
    pub fn find_by_cookie(&self, uid: &str, cookie: u64) -> Option<Netns> {
        self.candidates(uid, USABLE)
            .into_iter()
            .filter_map(|candidate| {
                Netns::open(&self.proc.join(candidate.pid.to_string()).join("ns/net")).ok()
            })
            .find(|netns| netns.cookie() == cookie)
    }

    /// Every namespace that a process of the pod is in, for diagnosis: none is judged.
    pub fn namespaces_of(&self, uid: &str) -> Vec<Netns> {
        let open = |candidate: Candidate| {
            Netns::open(&self.proc.join(candidate.pid.to_string()).join("ns/net")).ok()
        };
        self.candidates(uid, FRESH).into_iter().filter_map(open).collect()
    }

    fn judge(&self, candidate: Candidate, uid: &str, ips: &[IpAddr]) -> Result<Netns, String> {
        let dir = self.proc.join(candidate.pid.to_string());
        let netns = Netns::open(&dir.join("ns/net")).map_err(|error| error.to_string())?;
        // The pid may have been used again since the scan.
        if pod_of(&dir).as_deref() != Some(uid) {
            return Err("is gone".into());
        }
        if netns.cookie() == self.host.cookie() {
            return Err("is in the host's namespace".into());
        }
        let interfaces = netns
            .enter(interfaces::list)
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())?;
        let own = |ip: &IpAddr| interfaces.iter().any(|interface| interface.addresses.contains(ip));
        if ips.iter().any(own) { Ok(netns) } else { Err("its namespace has none of them".into()) }
    }

    /// Processes of the pod, from a scan that is no older than `age`; from a new one if it knows of none.
    fn candidates(&self, uid: &str, age: Duration) -> Vec<Candidate> {
        let mut scan = self.scan.lock().unwrap_or_else(PoisonError::into_inner);
        let known = scan.as_ref().filter(|(at, _)| at.elapsed() < age).map(|(_, pods)| pods.get(uid));
        match known {
            Some(Some(candidates)) => return candidates.clone(),
            // Nothing about this pod: a scan that has just been made would say the same.
            Some(None) if scan.as_ref().is_some_and(|(at, _)| at.elapsed() < FRESH) => return Vec::new(),
            _ => {}
        }
        let pods = scan_proc(&self.proc);
        let candidates = pods.get(uid).cloned().unwrap_or_default();
        *scan = Some((Instant::now(), pods));
        candidates
    }
}

/// Processes of all pods, oldest first. What vanishes meanwhile is left out.
fn scan_proc(proc: &Path) -> Scan {
    let mut pods = Scan::new();
    let Ok(entries) = fs::read_dir(proc) else { return pods };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let dir = entry.path();
        let Some(uid) = pod_of(&dir) else { continue };
        let Ok(started) = started(&dir) else { continue };
        pods.entry(uid).or_default().push(Candidate { started, pid });
    }
    pods.values_mut().for_each(|candidates| candidates.sort_unstable());
    pods
}

fn pod_of(process: &Path) -> Option<String> {
    pod_of_cgroups(&fs::read_to_string(process.join("cgroup")).ok()?)
}

/// The pod UID that the lines of `/proc/PID/cgroup` agree on.
fn pod_of_cgroups(lines: &str) -> Option<String> {
    let mut found: Option<String> = None;
    // hierarchy:controllers:path
    for path in lines.lines().filter_map(|line| line.splitn(3, ':').nth(2)) {
        for uid in path.split('/').filter_map(pod_of_component) {
            if found.as_ref().is_some_and(|other| *other != uid) {
                return None;
            }
            found = Some(uid);
        }
    }
    found
}

/// `pod<UID>`, `kubepods-burstable-pod<UID with underscores>.slice`, and their like.
fn pod_of_component(component: &str) -> Option<String> {
    let name = component.strip_suffix(".slice").unwrap_or(component);
    let start = if name.starts_with("pod") { 0 } else { name.find("-pod")? + 1 };
    let uid = &name[start + 3..];
    let plausible =
        uid.len() >= 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || matches!(byte, b'-' | b'_'));
    plausible.then(|| uid.replace('_', "-"))
}

fn started(process: &Path) -> io::Result<u64> {
    let stat = fs::read_to_string(process.join("stat"))?;
    // The second field is the name in parentheses, which may hold spaces and parentheses itself.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field = after_name.split_whitespace().nth(19).and_then(|field| field.parse().ok());
    field.ok_or_else(|| io::Error::other("no start time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";

    #[test]
    fn pods_are_known_by_their_cgroup() {
        let underscored = UID.replace('-', "_");
        for (lines, expected) in [
            // cgroupfs driver
            (format!("0::/kubepods/burstable/pod{UID}/0123abcd"), Some(UID)),
            (format!("0::/kubepods/pod{UID}/0123abcd"), Some(UID)),
            // systemd driver, several runtimes
            (
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{underscored}.slice/cri-containerd-0123.scope"
                ),
                Some(UID),
            ),
            (
                format!("0::/kubepods.slice/kubepods-pod{underscored}.slice/crio-0123.scope/container"),
                Some(UID),
            ),
            // hybrid: lines of other hierarchies say nothing
            (format!("9:name=systemd:/\n4:memory:/\n0::/kubepods/besteffort/pod{UID}/x"), Some(UID)),
            (format!("4:memory:/kubepods/pod{UID}/x\n0::/kubepods/pod{UID}/x"), Some(UID)),
            // a static pod's hash
            (
                "0::/kubepods/pod0123456789abcdef0123456789abcdef/x".into(),
                Some("0123456789abcdef0123456789abcdef"),
            ),
            // lines that disagree
            (
                format!(
                    "4:memory:/kubepods/pod{UID}/x\n0::/kubepods/podffffffff-4b5a-6978-8796-a5b4c3d2e1f0/x"
                ),
                None,
            ),
            // no pod
            ("0::/system.slice/kubelet.service".into(), None),
            ("0::/".into(), None),
            ("0::/podman/machine".into(), None),
            ("0::/pod-of-something-else-that-is-long-enough".into(), None),
            (String::new(), None),
            ("nonsense".into(), None),
        ] {
            assert_eq!(pod_of_cgroups(&lines).as_deref(), expected, "{lines}");
        }
    }

    #[test]
    fn a_start_time_survives_any_process_name() {
        let dir = std::env::temp_dir().join(format!("weir-discover-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let fields: Vec<String> = (3..=30).map(|number| number.to_string()).collect();
        for name in ["sh", "a b", ") 1 2 (", "((", "))"] {
            fs::write(dir.join("stat"), format!("1 ({name}) {}", fields.join(" "))).unwrap();
            assert_eq!(started(&dir).unwrap(), 22, "{name}");
        }
        fs::write(dir.join("stat"), "1 (sh) S").unwrap();
        assert!(started(&dir).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
