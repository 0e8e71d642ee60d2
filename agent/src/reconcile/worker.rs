//! One pod's turn: step after step until its aim is reached or a step fails.

use std::{panic::AssertUnwindSafe, pin::pin, sync::Arc, time::SystemTime};

use futures::FutureExt;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{Instant, timeout},
};
use tracing::{debug, info, warn};

use super::{
    fault::FaultPlan,
    ports::{Annotated, Annotator, DataPath, Netns, Recovered, SwitchedOn, Ztunnel},
    view::{PodView, Views},
};
use crate::{
    cache::pods::Pods,
    domain::{
        config::ReconcileConfig,
        eligibility::Decision,
        enrolment::{Enrolment, State, Step},
        notice::{Notice, What},
        reason::{Failure, Reason},
        workload::{Pod, PodUid, Redirection},
    },
};

/// A failure that is over before this many attempts were made is not worth an Event.
const STUCK_AFTER: u32 = 5;

/// What every worker needs.
#[derive(Debug)]
pub(super) struct Context<D, Z, A> {
    pub(super) cache: Arc<Pods>,
    pub(super) data_path: D,
    pub(super) ztunnel: Z,
    pub(super) annotator: A,
    pub(super) config: ReconcileConfig,
    pub(super) faults: Option<FaultPlan>,
    pub(super) notices: Option<mpsc::Sender<Notice>>,
    pub(super) views: Views,
    pub(super) permits: Arc<Semaphore>,
}

/// All there is about one pod. Travels to the worker and back.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) uid: PodUid,
    pub(super) machine: Enrolment,
    /// Attempts failed in a row.
    pub(super) attempts: u32,
    /// The pod as last seen; stays when the pod has gone.
    pod: Option<Arc<Pod>>,
    /// None: the pod has gone.
    decision: Option<Decision>,
    netns: Option<Netns>,
    acked_by: Option<String>,
    old_connections: usize,
    /// The pod was in the mesh when last heard of, as far as its user knows.
    known_in: bool,
    /// It has lost something since.
    lost: bool,
    /// The failure the log, and the user, have been told of.
    logged: Option<Reason>,
    told: Option<Reason>,
}

impl Work {
    pub(super) fn new(uid: PodUid) -> Self {
        Self {
            uid,
            machine: Enrolment::default(),
            attempts: 0,
            pod: None,
            decision: None,
            netns: None,
            acked_by: None,
            old_connections: 0,
            known_in: false,
            lost: false,
            logged: None,
            told: None,
        }
    }

    pub(super) fn recovered(pod: Recovered) -> Self {
        let Recovered { uid, netns, captured } = pod;
        let machine = Enrolment::recovered(netns.is_some(), captured);
        Self { machine, netns, known_in: captured, ..Self::new(uid) }
    }

    /// The pod has gone, and nothing of it is left.
    pub(super) fn is_over(&self) -> bool {
        self.decision.is_none() && self.machine.reached()
    }

    fn view(&self) -> PodView {
        let last_error = self.machine.last_failure().cloned();
        let decided = self.decision.map_or(Reason::Deleted, Decision::reason);
        PodView {
            uid: self.uid.clone(),
            info: self.pod.as_ref().map(|pod| pod.info.clone()),
            state: self.machine.state(),
            reason: last_error.as_ref().map_or(decided, |failure| failure.reason),
            since: SystemTime::now(),
            last_error,
            failed_attempts: self.attempts,
            slow: None,
            acked_by: self.acked_by.clone(),
            old_connections: self.old_connections,
            generation: self.machine.generation(),
        }
    }

    fn name(&self) -> String {
        match &self.pod {
            Some(pod) => format!("{}/{}", pod.info.namespace, pod.info.name),
            None => "(gone)".into(),
        }
    }
}

/// What a step brought.
enum Gain {
    Nothing,
    Netns(Netns),
    AckedBy(String),
    SwitchedOn(SwitchedOn),
    Annotated(Option<Redirection>, u64),
}

impl<D: DataPath, Z: Ztunnel, A: Annotator> Context<D, Z, A> {
    /// Takes in what the cache says now.
    pub(super) fn look(&self, work: &mut Work) {
        let entry = self.cache.get(&work.uid);
        work.decision = entry.as_ref().map(|entry| entry.decision);
        let pod = entry.map(|entry| entry.pod);
        let generation = work.machine.generation();
        work.machine.aim(work.decision.into(), pod.as_ref());
        if work.machine.generation() != generation {
            work.attempts = 0;
            work.logged = None;
            work.told = None;
        }
        work.pod = pod.or(work.pod.take());
    }

    /// Shows where the pod stands.
    pub(super) fn show(&self, work: &Work) {
        self.views.show(work.view());
    }

    /// One attempt. What is wanted is asked for again before each step.
    pub(super) async fn attempt(&self, mut work: Work) -> Work {
        let mut permit = None;
        work.machine.retry();
        loop {
            if permit.is_none() {
                permit = Arc::clone(&self.permits).acquire_owned().await.ok();
            }
            self.look(&mut work);
            self.show(&work);
            let Some(step) = work.machine.next() else { break };
            work.machine.begin(step, work.pod.as_ref());
            let result = self.take(step, &work, &mut permit).await;
            self.gain(step, result, &mut work);
        }
        self.close(&mut work);
        work
    }

    /// Takes one step, to its end however long it takes: to leave it and begin another would be to work
    /// on one pod twice at once. One that takes long makes room for other pods.
    async fn take(
        &self,
        step: Step,
        work: &Work,
        permit: &mut Option<OwnedSemaphorePermit>,
    ) -> Result<Gain, Failure> {
        let start = Instant::now();
        let mut call = pin!(AssertUnwindSafe(self.call_in_time(step, work)).catch_unwind());
        let result = match timeout(self.config.slow, &mut call).await {
            Ok(result) => result,
            Err(_) => {
                permit.take();
                self.views.slow(&work.uid, Some(step));
                warn!(pod = work.name(), uid = %work.uid, step = step.as_str(), "step takes long");
                let result = call.await;
                self.views.slow(&work.uid, None);
                result
            }
        };
        debug!(pod = work.name(), uid = %work.uid, step = step.as_str(), took = ?start.elapsed(), "step");
        result.unwrap_or_else(|_| Err(Failure::new(Reason::Internal, format!("panic in {}", step.as_str()))))
    }

    /// What waits for others has a deadline, and is dropped when it has passed.
    async fn call_in_time(&self, step: Step, work: &Work) -> Result<Gain, Failure> {
        let (deadline, reason) = match step {
            Step::Publish => (self.config.ztunnel_deadline, Reason::ZtunnelTimeout),
            Step::Retract => (self.config.ztunnel_deadline, Reason::RetractFailed),
            Step::Annotate(_) => (self.config.annotate_deadline, Reason::AnnotateFailed),
            _ => return self.call(step, work).await,
        };
        match timeout(deadline, self.call(step, work)).await {
            Ok(result) => result,
            Err(_) => Err(Failure::new(reason, format!("no answer within {deadline:?}"))),
        }
    }

    async fn call(&self, step: Step, work: &Work) -> Result<Gain, Failure> {
        if let Some(faults) = &self.faults {
            faults.before(step, work.pod.as_deref()).await?;
        }
        match step {
            Step::Retract => self.ztunnel.retract(&work.uid).await?,
            Step::Forget => self.data_path.forget(&work.uid).await?,
            _ => {
                let missing = || Failure::new(Reason::Internal, format!("{} without a pod", step.as_str()));
                return self.call_on(step, work.pod.as_ref().ok_or_else(missing)?, work.netns.as_ref()).await;
            }
        }
        Ok(Gain::Nothing)
    }

    /// The steps that need the pod, and mostly its namespace.
    async fn call_on(&self, step: Step, pod: &Arc<Pod>, netns: Option<&Netns>) -> Result<Gain, Failure> {
        if let Step::Annotate(value) = step {
            return match self.annotator.set(pod, value).await? {
                Annotated::Done { version } => Ok(Gain::Annotated(value, version)),
                // There is no annotation on a pod that has gone.
                Annotated::Gone if value.is_none() => Ok(Gain::Annotated(None, u64::MAX)),
                Annotated::Gone => Err(Failure::new(Reason::Deleted, "the pod has gone")),
            };
        }
        if step == Step::Locate {
            return self.data_path.locate(pod).await.map(Gain::Netns);
        }
        let missing = || Failure::new(Reason::Internal, format!("{} without a namespace", step.as_str()));
        let netns = netns.ok_or_else(missing)?;
        match step {
            Step::Prepare => self.data_path.prepare(pod, netns).await?,
            Step::Publish => {
                let published = self.ztunnel.publish(&pod.uid, &pod.info, netns.clone()).await;
                return published.into_result().map(Gain::AckedBy);
            }
            Step::SwitchOn => return self.data_path.switch_on(pod, netns).await.map(Gain::SwitchedOn),
            Step::Verify => {
                let verified = self.data_path.verify(pod, netns).await;
                verified.map_err(|faults| Failure::new(Reason::VerifyFailed, faults.join("; ")))?;
            }
            Step::Drain => self.data_path.drain(pod, netns).await?,
            Step::SwitchOff => self.data_path.switch_off(pod, netns).await?,
            Step::Locate | Step::Annotate(_) | Step::Retract | Step::Forget => {}
        }
        Ok(Gain::Nothing)
    }

    /// Takes in what a step brought, and tells of it.
    fn gain(&self, step: Step, result: Result<Gain, Failure>, work: &mut Work) {
        let result = result.map(|gain| match gain {
            Gain::Nothing => {}
            Gain::Netns(netns) => work.netns = Some(netns),
            Gain::AckedBy(ztunnel) => work.acked_by = Some(ztunnel),
            Gain::Annotated(value, version) => work.machine.annotated(value, version),
            Gain::SwitchedOn(SwitchedOn { old_connections }) => work.old_connections = old_connections,
        });
        if result.is_ok() {
            match step {
                Step::Retract => work.acked_by = None,
                Step::SwitchOff | Step::Forget => {
                    work.netns = None;
                    work.old_connections = 0;
                }
                _ => {}
            }
        }
        if let Err(failure) = &result {
            self.tell_failure(step, failure, work);
        }
        work.machine.end(step, result);
    }

    fn tell_failure(&self, step: Step, failure: &Failure, work: &mut Work) {
        let (pod, uid, step_name) = (work.name(), &work.uid, step.as_str());
        work.lost |= work.known_in && failure.reason == Reason::VerifyFailed;
        if work.logged.replace(failure.reason) == Some(failure.reason) {
            debug!(pod, %uid, step = step_name, reason = %failure.reason, attempts = work.attempts, "still failing: {}", failure.detail);
        } else {
            warn!(pod, %uid, step = step_name, reason = %failure.reason, "failed, will be repeated: {}", failure.detail);
        }
        if work.attempts >= STUCK_AFTER && work.told.replace(failure.reason) != Some(failure.reason) {
            self.tell(work, What::Stuck { step, failure: failure.clone() });
        }
    }

    /// The attempt is over.
    pub(super) fn close(&self, work: &mut Work) {
        if !work.machine.reached() {
            work.attempts = work.attempts.saturating_add(1);
            self.show(work);
            return;
        }
        work.attempts = 0;
        work.logged = None;
        work.told = None;
        self.show(work);
        match work.machine.state() {
            State::Enrolled => {
                let what = match (work.known_in, work.lost) {
                    (false, _) => Some(What::Enrolled { old_connections: work.old_connections }),
                    (true, true) => Some(What::Repaired),
                    (true, false) => None,
                };
                work.known_in = true;
                work.lost = false;
                if let Some(what) = what {
                    info!(pod = work.name(), uid = %work.uid, old_connections = work.old_connections, "enrolled");
                    self.tell(work, what);
                }
            }
            State::Outside if work.known_in => {
                work.known_in = false;
                info!(pod = work.name(), uid = %work.uid, reason = %work.view().reason, "out of the mesh");
                if work.decision.is_some() {
                    self.tell(work, What::Unenrolled);
                }
            }
            _ => {}
        }
    }

    /// Best effort: an Event that finds no room is not worth waiting for.
    fn tell(&self, work: &Work, what: What) {
        if let (Some(notices), Some(pod)) = (&self.notices, &work.pod) {
            let _ = notices.try_send(Notice { pod: Arc::clone(pod), what });
        }
    }
}
