//! What the reconciler drives: the data path, ztunnel and the annotation, as three traits, so that the
//! same machinery runs over the kernel and over fakes.
//!
//! Of one pod, never more than one call is under way. Every call may be repeated after it failed, after
//! it succeeded, and after its future was dropped.

use std::{future::Future, sync::Arc};

use crate::{
    domain::{
        reason::{Failure, Reason},
        workload::{Pod, PodUid, Redirection, WorkloadInfo},
    },
    kube::annotate::Patcher,
};
// A pod's network namespace: held by whoever needs it, it lives as long as anyone does.
pub use crate::netns::Netns;

/// A pod's data path in the kernel.
///
/// Calls that block belong on a blocking thread: see [`blocking`].
pub trait DataPath: Send + Sync + 'static {
    /// The pods an earlier agent left something of. Asked once, before anything else.
    fn recovered(&self) -> impl Future<Output = Vec<Recovered>> + Send;

    /// Finds the namespace of a running pod. Reasons: `netns_not_found`, `netns_refused`.
    fn locate(&self, pod: &Arc<Pod>) -> impl Future<Output = Result<Netns, Failure>> + Send;

    /// Loads, pins and attaches everything as the pod's annotations ask for, but neutral: nothing is
    /// captured or dropped yet. On a pod that is captured already, capture goes on without a gap. What
    /// is held for this pod in another namespace is dropped.
    fn prepare(&self, pod: &Arc<Pod>, netns: &Netns) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Adopts the connections that exist, then captures. Ends draining.
    fn switch_on(
        &self,
        pod: &Arc<Pod>,
        netns: &Netns,
    ) -> impl Future<Output = Result<SwitchedOn, Failure>> + Send;

    /// Checks that the pod is captured, in the namespace it has now, as its annotations ask for, and that
    /// ztunnel's listeners answer in there. Otherwise says in words what is not so.
    fn verify(&self, pod: &Arc<Pod>, netns: &Netns) -> impl Future<Output = Result<(), Vec<String>>> + Send;

    /// From now on new connections of the pod are dropped silently.
    fn drain(&self, pod: &Arc<Pod>, netns: &Netns) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Ends what is left of captured connections, stops capturing, removes every trace. Runs to its end
    /// and reports all that failed as one.
    fn switch_off(&self, pod: &Arc<Pod>, netns: &Netns) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Drops pins and handles of a pod whose namespace is going or gone.
    fn forget(&self, uid: &PodUid) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// A pod an earlier agent has worked on.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// The pod.
    pub uid: PodUid,
    /// Its namespace, if it has been found again; else it is looked for, and prepared anew.
    pub netns: Option<Netns>,
    /// Everything that makes up capture is there, and the pod is not draining. Otherwise it is prepared
    /// and switched on anew.
    pub captured: bool,
}

/// What switching on found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchedOn {
    /// Connections that existed before and go on outside the mesh.
    pub old_connections: usize,
}

/// The ztunnels of this node.
///
/// The reconciler puts a deadline on each call, so none needs one of its own; one that is cut off is
/// repeated.
pub trait Ztunnel: Send + Sync + 'static {
    /// At start, before any ztunnel may connect: a pod that may be captured already, and so must be in the
    /// first snapshot, lest ztunnel cuts its connections. Without a namespace, ztunnel is to keep what it has.
    fn restore(&self, uid: &PodUid, info: &WorkloadInfo, netns: Option<Netns>);

    /// Makes the pod known and waits until ztunnel listens in its namespace.
    fn publish(
        &self,
        uid: &PodUid,
        info: &WorkloadInfo,
        netns: Netns,
    ) -> impl Future<Output = Published> + Send;

    /// Takes the pod from every ztunnel. Ends when each has let go of it or has gone.
    fn retract(&self, uid: &PodUid) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// What became of a pod handed to ztunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Published {
    /// A ztunnel listens in the pod's namespace; this is what it is known by.
    Acked(String),
    /// ztunnel refused, in its own words.
    Nacked(String),
    /// None is connected.
    NoZtunnel,
    /// No answer.
    Timeout,
}

impl Published {
    pub(super) fn into_result(self) -> Result<String, Failure> {
        match self {
            Self::Acked(by) => Ok(by),
            Self::Nacked(words) => Err(Failure::new(Reason::ZtunnelRefused, words)),
            Self::NoZtunnel => Err(Failure::new(Reason::NoZtunnel, "no ztunnel is connected")),
            Self::Timeout => Err(Failure::new(Reason::ZtunnelTimeout, "ztunnel has not answered in time")),
        }
    }
}

/// Writes the annotation `ambient.istio.io/redirection`.
pub trait Annotator: Send + Sync + 'static {
    /// Sets it, or removes it (`None`). Must not touch another pod of the same name.
    fn set(
        &self,
        pod: &Pod,
        value: Option<Redirection>,
    ) -> impl Future<Output = Result<Annotated, Failure>> + Send;
}

pub use crate::domain::workload::Annotated;

impl Annotator for Patcher {
    async fn set(&self, pod: &Pod, value: Option<Redirection>) -> Result<Annotated, Failure> {
        Patcher::set(self, pod, value).await
    }
}

/// Runs what blocks where blocking is allowed. A panic in there is a failure of the step.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Failure::new(Reason::Internal, error.to_string())),
    }
}
