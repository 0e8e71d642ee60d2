//! The loop that gives every pod its turns.

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore, mpsc},
    task::{JoinError, JoinSet},
    time::{Instant, sleep_until},
};
use tracing::info;

use super::{
    fault::FaultPlan,
    ports::{Annotator, DataPath, Ztunnel},
    queue::Queue,
    view::Views,
    worker::{Context, Work},
};
use crate::{
    cache::{dirty::Dirty, pods::Pods},
    domain::{config::ReconcileConfig, notice::Notice, workload::PodUid},
};

/// Brings every pod of the node to where the cache says it belongs, and keeps it there.
///
/// `Reconciler::new(…)`, then [`recover`](Self::recover), then let ztunnel connect, then
/// [`run`](Self::run).
#[derive(Debug)]
pub struct Reconciler<D, Z, A> {
    context: Arc<Context<D, Z, A>>,
    handle: Handle,
    dirty: Dirty<PodUid>,
    queue: Queue<PodUid>,
    /// Pods nobody is working on.
    idle: HashMap<PodUid, Work>,
    busy: JoinSet<Work>,
    recheck: HashSet<PodUid>,
}

/// Reaches a running reconciler. Clones reach the same one.
#[derive(Clone, Debug, Default)]
pub struct Handle {
    views: Views,
    recheck: Dirty<PodUid>,
    wake: Arc<Notify>,
}

impl Handle {
    /// Where each pod stands.
    pub fn views(&self) -> &Views {
        &self.views
    }

    /// Has these pods verified again, and repaired where that fails.
    pub fn recheck(&self, uids: impl IntoIterator<Item = PodUid>) {
        self.recheck.mark(uids);
    }

    /// Has every pod that waits for its next attempt make it now: a ztunnel has come, for example.
    pub fn retry_now(&self) {
        self.wake.notify_one();
    }
}

impl<D: DataPath, Z: Ztunnel, A: Annotator> Reconciler<D, Z, A> {
    /// A reconciler over these. Does nothing yet.
    pub fn new(cache: Arc<Pods>, config: ReconcileConfig, data_path: D, ztunnel: Z, annotator: A) -> Self {
        let handle = Handle::default();
        let dirty = cache.subscribe();
        let context = Context {
            cache,
            data_path,
            ztunnel,
            annotator,
            faults: None,
            notices: None,
            views: handle.views.clone(),
            permits: Arc::new(Semaphore::new(config.concurrency)),
            config,
        };
        Self {
            context: Arc::new(context),
            handle,
            dirty,
            queue: Queue::default(),
            idle: HashMap::new(),
            busy: JoinSet::new(),
            recheck: HashSet::new(),
        }
    }

    /// Plays these faults. For tests.
    #[must_use]
    pub fn with_faults(mut self, faults: FaultPlan) -> Self {
        self.context_mut().faults = Some(faults);
        self
    }

    /// Sends what users should be told of to `notices`. When it is full, nobody waits.
    #[must_use]
    pub fn with_notices(mut self, notices: mpsc::Sender<Notice>) -> Self {
        self.context_mut().notices = Some(notices);
        self
    }

    fn context_mut(&mut self) -> &mut Context<D, Z, A> {
        Arc::get_mut(&mut self.context).expect("nothing runs before `run`")
    }

    /// Reaches this reconciler while it runs.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Waits for the cache to be complete, then takes over the pods an earlier agent has captured, and
    /// makes them part of the first snapshot ztunnel will get. Before ztunnel may connect.
    pub async fn recover(&mut self) {
        self.context.cache.synced().await;
        let recovered = self.context.data_path.recovered().await;
        info!(pods = recovered.len(), "taken over from an earlier agent");
        for pod in recovered {
            if let Some(entry) = self.context.cache.get(&pod.uid) {
                self.context.ztunnel.restore(&pod.uid, &entry.pod.info, pod.netns.clone());
            }
            self.queue.push(pod.uid.clone());
            self.idle.insert(pod.uid.clone(), Work::recovered(pod));
        }
    }

    /// Runs until dropped. Steps under way on blocking threads then run to their end; what is captured
    /// stays captured.
    pub async fn run(mut self) {
        self.context.cache.synced().await;
        loop {
            self.queue.advance(Instant::now());
            self.start();
            let due = self.queue.next_due();
            let next_due = sleep_until(due.unwrap_or_else(Instant::now));
            tokio::select! {
                changed = self.dirty.take() => changed.into_iter().for_each(|uid| self.queue.push(uid)),
                Some(worked) = self.busy.join_next() => self.back(worked),
                uids = self.handle.recheck.take() => self.check_again(uids),
                () = self.handle.wake.notified() => self.queue.wake_all(),
                () = next_due, if due.is_some() => {}
            }
        }
    }

    /// Starts whatever is ready. A pod with nothing to be done does not cost a task.
    fn start(&mut self) {
        while let Some(uid) = self.queue.pop() {
            let mut work = self.idle.remove(&uid).unwrap_or_else(|| Work::new(uid.clone()));
            work.machine.retry();
            if self.recheck.remove(&uid) {
                work.machine.recheck();
            }
            self.context.look(&mut work);
            if work.machine.reached() {
                self.context.close(&mut work);
                self.back(Ok(work));
            } else {
                let context = Arc::clone(&self.context);
                self.busy.spawn(async move { context.attempt(work).await });
            }
        }
    }

    fn back(&mut self, worked: Result<Work, JoinError>) {
        // Steps that panic are failures. What is left is a defect in here, and no state to go on from:
        // the node keeps what it has while the agent is started anew.
        let work = worked.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => panic!("{error}"),
        });
        let uid = work.uid.clone();
        let retry = (!work.machine.reached())
            .then(|| Instant::now() + backoff(&self.context.config, &uid, work.attempts));
        if work.is_over() {
            self.handle.views.remove(&uid);
        } else {
            self.idle.insert(uid.clone(), work);
        }
        self.queue.done(uid, retry);
    }

    fn check_again(&mut self, uids: BTreeSet<PodUid>) {
        for uid in uids {
            self.queue.push(uid.clone());
            self.recheck.insert(uid);
        }
    }
}

/// How long to wait after the `attempts`-th failure in a row: doubles each time, less up to a half. The
/// half is drawn from the pod's UID, so that pods that failed together do not come back together.
fn backoff(config: &ReconcileConfig, uid: &PodUid, attempts: u32) -> Duration {
    let doublings = attempts.saturating_sub(1).min(31);
    let full = config.backoff_min.saturating_mul(1 << doublings).min(config.backoff_max);
    let mut hasher = DefaultHasher::new();
    (uid, attempts).hash(&mut hasher);
    let share = f64::from(u32::try_from(hasher.finish() & 0xffff).unwrap_or(0)) / f64::from(0x1_0000);
    full.mul_f64(1.0 - share / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_from_the_least_to_the_most_and_differs_between_pods() {
        let config = ReconcileConfig::default();
        let (a, b) = (PodUid::from("a"), PodUid::from("b"));
        let mut full = config.backoff_min;
        for attempt in 1..=40 {
            let wait = backoff(&config, &a, attempt);
            assert!(wait <= full && wait >= full / 2, "{attempt}: {wait:?} of {full:?}");
            assert_ne!(wait, backoff(&config, &b, attempt));
            full = (full * 2).min(config.backoff_max);
        }
        assert!(backoff(&config, &a, u32::MAX) <= config.backoff_max);
    }
}
