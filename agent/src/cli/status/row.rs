//! One pod, by what is pinned and by what the agent tells.

use serde::Serialize;
use weir_common::{Counter, Family, PodFlags};

use crate::{
    cli::Paths,
    domain::{
        enrolment::State,
        reason::{Failure, Reason},
        report::{PodReport, rfc3339},
    },
    netns::discover::Discovery,
    redirect::{Pinned, examine},
};

/// One pod.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    namespace: String,
    name: String,
    uid: String,
    /// Where it stands: the agent's word, or without one what the pins show.
    pub(super) state: String,
    /// Why: the first thing that is wrong, else the agent's word.
    pub(super) reason: Option<Reason>,
    /// In this state since; without an agent: pinned since.
    pub(super) since: String,
    /// The namespace that is captured.
    pub(super) netns_cookie: Option<u64>,
    /// The ztunnel that took the pod; only the agent knows.
    pub(super) acked_by: Option<String>,
    programs: Vec<Program>,
    pub(super) old_connections: Option<Old>,
    pub(super) counters: Vec<Count>,
    /// What is wrong, and what to do; only where it was asked for.
    pub(super) why: Vec<Why>,
}

#[derive(Debug, Serialize)]
struct Program {
    hook: &'static str,
    id: u32,
}

/// Connections older than the enrolment.
#[derive(Debug, Serialize)]
pub(super) struct Old {
    pub(super) adopted: u64,
    pub(super) expired: u64,
    /// Still there; only known where the namespace was looked into.
    pub(super) left: Option<u64>,
}

/// One counter that is not zero.
#[derive(Debug, Serialize)]
pub(super) struct Count {
    pub(super) reason: &'static str,
    pub(super) ipv4: u64,
    pub(super) ipv6: u64,
}

/// One thing that is wrong, or the reason for how it is.
#[derive(Debug, Serialize)]
pub(super) struct Why {
    pub(super) reason: Reason,
    pub(super) meaning: &'static str,
    pub(super) detail: Option<String>,
    pub(super) remedy: Option<&'static str>,
}

impl Why {
    fn of(failure: Failure) -> Self {
        Self { detail: Some(failure.detail), ..Self::reason(failure.reason) }
    }

    fn reason(reason: Reason) -> Self {
        Self { reason, meaning: reason.meaning(), detail: None, remedy: reason.remedy() }
    }
}

/// What a look into the namespace found.
#[derive(Debug, Default)]
pub(super) struct Look {
    findings: Vec<Failure>,
    old_left: Option<u64>,
    programs: Vec<(&'static str, u32)>,
}

/// Finds the namespace of a pinned pod by its processes, and looks into it.
pub(super) fn look(paths: &Paths, discovery: Option<&Discovery>, pod: &Pinned) -> Look {
    let fail =
        |reason, detail: String| Look { findings: vec![Failure::new(reason, detail)], ..Look::default() };
    let Some(discovery) = discovery else {
        return fail(Reason::NetnsNotFound, format!("{} cannot be opened", paths.host_netns().display()));
    };
    let (uid, cookie) = (&pod.record.uid, pod.record.cookie);
    let Some(netns) = discovery.find_by_cookie(uid, cookie) else {
        let others = discovery.namespaces_of(uid);
        return match others.first() {
            Some(other) => fail(
                Reason::NetnsOther,
                format!("captured is namespace {cookie}, the pod's processes are in {}", other.cookie()),
            ),
            None => {
                fail(Reason::NetnsNotFound, format!("no process of the pod under {}", paths.proc.display()))
            }
        };
    };
    match examine(&paths.bpffs, &paths.proc, &netns) {
        Ok(seen) => Look { findings: seen.findings, old_left: Some(seen.old_left), programs: seen.programs },
        Err(error) => fail(Reason::VerifyFailed, error.to_string()),
    }
}

impl Row {
    /// A pod that is pinned, with what the agent tells of it.
    pub(super) fn pinned(pod: Pinned, told: Option<&PodReport>, look: Option<Look>) -> Self {
        let looked = look.is_some();
        let look = look.unwrap_or_default();
        let mut why: Vec<Why> = look.findings.into_iter().map(Why::of).collect();
        let told_why = told.map_or_else(Vec::new, |told| self::told(told, looked));
        why.extend(told_why);
        let link_gone = (!pod.linked).then_some(Reason::LinkGone);
        let [adopted, expired] = [pod.old.adopted, pod.old.expired].map(|counts| counts.iter().sum());
        Self {
            state: told.map_or_else(|| state(&pod), |told| told.state.as_str()).to_owned(),
            reason: why.first().map(|why| why.reason).or(link_gone).or_else(|| told.map(|told| told.reason)),
            since: told.map_or_else(|| rfc3339(pod.record.since), |told| told.since.clone()),
            netns_cookie: Some(pod.record.cookie),
            acked_by: told.and_then(|told| told.acked_by.clone()),
            programs: look.programs.into_iter().map(|(hook, id)| Program { hook, id }).collect(),
            old_connections: Some(Old { adopted, expired, left: look.old_left }),
            counters: counters(&pod),
            why,
            namespace: pod.record.namespace,
            name: pod.record.name,
            uid: pod.record.uid,
        }
    }

    /// A pod of which nothing is pinned.
    pub(super) fn told(told: &PodReport) -> Self {
        Self {
            namespace: told.namespace.clone().unwrap_or_else(|| "-".into()),
            name: told.name.clone().unwrap_or_else(|| told.uid.clone()),
            uid: told.uid.clone(),
            state: told.state.as_str().to_owned(),
            reason: Some(told.reason),
            since: told.since.clone(),
            netns_cookie: None,
            acked_by: told.acked_by.clone(),
            programs: Vec::new(),
            old_connections: None,
            counters: Vec::new(),
            why: self::told(told, true),
        }
    }

    pub(super) fn pod(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    pub(super) fn is(&self, uid: &str) -> bool {
        self.uid == uid
    }

    /// Whether something is wrong, not just as it is meant to be.
    pub(super) fn is_broken(&self) -> bool {
        let meant = |why: &Why| {
            matches!(
                why.reason,
                Reason::Selected
                    | Reason::NotSelected
                    | Reason::HostNetwork
                    | Reason::Sidecar
                    | Reason::ExcludedNamespace
                    | Reason::Terminal
                    | Reason::ZtunnelPod
                    | Reason::OwnPod
            )
        };
        self.why.iter().any(|why| !meant(why))
    }
}

/// What the agent says: what failed, or why the pod is where it is.
fn told(told: &PodReport, looked: bool) -> Vec<Why> {
    match &told.error {
        Some(error) => vec![Why::of(error.clone())],
        None if looked && told.state != State::Enrolled => vec![Why::reason(told.reason)],
        None => Vec::new(),
    }
}

/// What the pins alone tell.
fn state(pod: &Pinned) -> &'static str {
    match pod.config.flags {
        _ if !pod.linked => "broken",
        flags if flags.has(PodFlags::DRAINING) => "draining",
        flags if flags.has(PodFlags::GUARD) => "captured",
        flags if flags.has(PodFlags::SWITCHING_ON) => "switching_on",
        _ => "prepared",
    }
}

fn counters(pod: &Pinned) -> Vec<Count> {
    let counted = Counter::ALL.iter().filter(|counter| pod.counters.total(**counter) > 0);
    counted
        .map(|&counter| Count {
            reason: counter.name(),
            ipv4: pod.counters.get(counter, Family::V4),
            ipv6: pod.counters.get(counter, Family::V6),
        })
        .collect()
}
