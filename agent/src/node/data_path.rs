//! The data path of this node's pods, as the reconciler drives it: discovery and [`Redirector`], on blocking
//! threads.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::mpsc::Sender;
use tracing::{info, warn};
use weir_common::PodFlags;

use super::tracked::Tracked;
use crate::{
    cni::handed::Handed,
    domain::{
        notice::{Notice, What},
        overrides::{Defaults, Overrides},
        reason::{Failure, Reason},
        workload::{Pod, PodUid},
    },
    netns::discover::{DiscoverError, Discovery},
    reconcile::{DataPath, Netns, Recovered, SwitchedOn, blocking},
    redirect::{Owner, RedirectError, Redirector, Verified},
};

/// What short connections get to come to their end at un-enrolment. The app's new ones wait meanwhile, and try
/// again a second after they began.
const GRACE: Duration = Duration::from_millis(250);

/// See [`DataPath`].
pub struct NodeDataPath {
    parts: Arc<Parts>,
    notices: Sender<Notice>,
}

struct Parts {
    redirector: Arc<Redirector>,
    discovery: Discovery,
    defaults: Defaults,
    tracked: Tracked,
    handed: Handed,
}

impl Parts {
    fn overrides(&self, pod: &Pod) -> Overrides {
        Overrides::read(&pod.annotations, self.defaults).0
    }
}

impl NodeDataPath {
    /// Over these.
    pub fn new(
        redirector: Arc<Redirector>,
        discovery: Discovery,
        defaults: Defaults,
        tracked: Tracked,
        handed: Handed,
        notices: Sender<Notice>,
    ) -> Self {
        Self { parts: Arc::new(Parts { redirector, discovery, defaults, tracked, handed }), notices }
    }

    async fn run<T: Send + 'static>(
        &self,
        reason: Reason,
        work: impl FnOnce(&Parts) -> Result<T, RedirectError> + Send + 'static,
    ) -> Result<T, Failure> {
        let parts = Arc::clone(&self.parts);
        blocking(move || {
            work(&parts).map_err(|error| {
                Failure::new(if error.is_full() { Reason::MapFull } else { reason }, error.to_string())
            })
        })
        .await
    }
}

fn owner(pod: &Pod) -> Owner {
    Owner { uid: pod.uid.clone(), info: pod.info.clone() }
}

/// Threads that replace programs: most of the work is the kernel's verifier, which takes no lock.
const UPGRADES: usize = 4;

/// Replaces the programs of another build. What fails is found by the first look at the pod, and tried again.
fn upgrade(redirector: &Redirector, recovered: &[Recovered]) {
    let began = Instant::now();
    let replaced = &AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for some in recovered.chunks(recovered.len().div_ceil(UPGRADES).max(1)) {
            scope.spawn(move || {
                for pod in some {
                    let Some(netns) = &pod.netns else { continue };
                    match redirector.upgrade(netns) {
                        Ok(true) => _ = replaced.fetch_add(1, Ordering::Relaxed),
                        Ok(false) => {}
                        Err(error) => warn!(uid = %pod.uid, %error, "the programs could not be replaced"),
                    }
                }
            });
        }
    });
    let (pods, took) = (replaced.load(Ordering::Relaxed), began.elapsed());
    if pods > 0 {
        info!(pods, ?took, "programs of another build replaced");
    }
}

impl DataPath for NodeDataPath {
    async fn recovered(&self) -> Vec<Recovered> {
        let recovered = self.run(Reason::Internal, |parts| {
            let find = |uid: &str, cookie| parts.discovery.find_by_cookie(uid, cookie);
            let recovered: Vec<Recovered> = parts
                .redirector
                .pinned()
                .into_iter()
                .map(|pod| Recovered {
                    uid: pod.record.uid(),
                    captured: pod.config.flags.has(PodFlags::INBOUND),
                    netns: find(&pod.record.uid, pod.record.cookie),
                })
                .collect();
            upgrade(&parts.redirector, &recovered);
            Ok(recovered)
        });
        recovered.await.unwrap_or_default()
    }

    async fn locate(&self, pod: &Arc<Pod>) -> Result<Netns, Failure> {
        // Handed over by the runtime: no process is needed, and nobody's word but its own for whose it is.
        if let Some(netns) = self.parts.handed.netns(&pod.uid) {
            return Ok(netns);
        }
        let (parts, pod) = (Arc::clone(&self.parts), Arc::clone(pod));
        blocking(move || match parts.discovery.find(pod.uid.as_str(), &pod.ips) {
            Ok(netns) => Ok(netns),
            Err(error @ DiscoverError::NoProcess(_)) => {
                Err(Failure::new(Reason::NetnsNotFound, error.to_string()))
            }
            Err(error @ DiscoverError::Refused { .. }) => {
                Err(Failure::new(Reason::NetnsRefused, error.to_string()))
            }
        })
        .await
    }

    async fn prepare(&self, pod: &Arc<Pod>, netns: &Netns) -> Result<(), Failure> {
        let (owner, netns) = (owner(pod), netns.clone());
        for bad in Overrides::read(&pod.annotations, self.parts.defaults).1 {
            warn!(pod = format!("{}/{}", pod.info.namespace, pod.info.name), uid = %pod.uid, "{bad}");
            // Best effort: the log has it in any case.
            let _ = self.notices.try_send(Notice { pod: Arc::clone(pod), what: What::BadAnnotation(bad) });
        }
        self.run(Reason::PrepareFailed, move |parts| {
            parts.redirector.forget(&owner.uid, Some(netns.cookie()))?;
            parts.redirector.prepare(&owner, &netns)
        })
        .await
    }

    async fn switch_on(&self, pod: &Arc<Pod>, netns: &Netns) -> Result<SwitchedOn, Failure> {
        let (netns, pod) = (netns.clone(), Arc::clone(pod));
        self.run(Reason::SwitchOnFailed, move |parts| {
            let old = parts.redirector.switch_on(&netns, &parts.overrides(&pod))?;
            Ok(SwitchedOn { old_connections: usize::try_from(old.left).unwrap_or(usize::MAX) })
        })
        .await
    }

    async fn verify(&self, pod: &Arc<Pod>, netns: &Netns) -> Result<(), Vec<String>> {
        let (netns, pod) = (netns.clone(), Arc::clone(pod));
        let (runtime, tracked) = (tokio::runtime::Handle::current(), Arc::clone(&pod));
        let missing = self.run(Reason::VerifyFailed, move |parts| {
            let overrides = parts.overrides(&tracked);
            let handed = parts.handed.netns(&tracked.uid);
            if handed.is_some_and(|handed| handed.cookie() != netns.cookie()) {
                return Ok(vec![Failure::new(Reason::NetnsOther, "the pod: its sandbox is another now")]);
            }
            // Before the look: what changes after it is heard.
            let _runtime = runtime.enter();
            let captured_at = parts.redirector.captured_at(&netns)?;
            let name = format!("{}/{}", tracked.info.namespace, tracked.info.name);
            parts.tracked.add(&tracked.uid, name, netns.clone(), captured_at, overrides.existing);
            match parts.redirector.verify(&netns, &overrides)? {
                Verified::Right(glance) => {
                    parts.tracked.seen_right(&tracked.uid, netns.cookie(), glance);
                    parts.handed.set_captured(&tracked.uid, netns.cookie());
                    Ok(Vec::new())
                }
                Verified::Lacking(missing) => Ok(missing),
            }
        });
        match missing.await {
            Ok(missing) if missing.is_empty() => Ok(()),
            Ok(missing) => Err(missing.into_iter().map(|lack| lack.detail).collect()),
            Err(failure) => Err(vec![failure.detail]),
        }
    }

    async fn drain(&self, _: &Arc<Pod>, netns: &Netns) -> Result<(), Failure> {
        let netns = netns.clone();
        self.run(Reason::DrainFailed, move |parts| parts.redirector.drain(&netns, GRACE)).await
    }

    async fn switch_off(&self, pod: &Arc<Pod>, netns: &Netns) -> Result<(), Failure> {
        self.parts.tracked.remove(&pod.uid);
        let netns = netns.clone();
        self.run(Reason::SwitchOffFailed, move |parts| parts.redirector.switch_off(&netns)).await
    }

    async fn forget(&self, uid: &PodUid) -> Result<(), Failure> {
        self.parts.tracked.remove(uid);
        let uid = uid.clone();
        self.run(Reason::ForgetFailed, move |parts| parts.redirector.forget(&uid, None)).await
    }
}
