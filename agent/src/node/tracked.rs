//! The pods that are captured: who listens to their interfaces, and when their old connections end.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nix::time::{ClockId, clock_gettime};
use tokio::{sync::mpsc::UnboundedSender, task::JoinHandle};
use tracing::{info, warn};

use crate::{
    domain::{overrides::Existing, workload::PodUid},
    netns::{Netns, monitor::Monitor},
    redirect::{Glance, Redirector},
};

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(250);

/// Between two looks because of changes in one pod.
const CALM: Duration = Duration::from_millis(250);

/// Shared by the data path, which adds and removes, and the task that watches the clock.
#[derive(Clone)]
pub struct Tracked {
    pods: Arc<Mutex<HashMap<PodUid, Entry>>>,
    changed: UnboundedSender<PodUid>,
}

struct Entry {
    netns: Netns,
    name: String,
    /// When the old connections end, on CLOCK_BOOTTIME; none when they may stay, or have ended.
    deadline: Option<Duration>,
    /// What the deadline was made of: another makes another.
    made_of: (Duration, Existing),
    listener: JoinHandle<()>,
    /// How to see that all is as it was when all was right.
    glance: Option<Arc<Glance>>,
}

/// A captured pod, to be looked at again.
pub struct Watched {
    /// Whose.
    pub uid: PodUid,
    /// Where.
    pub netns: Netns,
    /// How.
    pub glance: Arc<Glance>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl Tracked {
    /// Tells `changed` of pods in which something has changed that the kernel tells of.
    pub fn new(changed: UnboundedSender<PodUid>) -> Self {
        Self { pods: Arc::default(), changed }
    }

    /// Takes a captured pod in, or takes note of another policy. `captured_at` is on CLOCK_BOOTTIME.
    pub fn add(&self, uid: &PodUid, name: String, netns: Netns, captured_at: Duration, existing: Existing) {
        let deadline = match existing {
            Existing::Keep => None,
            Existing::EndAfter(time) => Some(captured_at + time),
        };
        let mut pods = self.lock();
        if let Some(entry) = pods.get_mut(uid).filter(|entry| entry.netns.cookie() == netns.cookie()) {
            if entry.made_of != (captured_at, existing) {
                entry.made_of = (captured_at, existing);
                entry.deadline = deadline;
            }
            return;
        }
        let listener = tokio::spawn(listen(uid.clone(), netns.clone(), self.changed.clone()));
        let made_of = (captured_at, existing);
        pods.insert(uid.clone(), Entry { netns, name, deadline, made_of, listener, glance: None });
    }

    /// A look at everything found all right.
    pub fn seen_right(&self, uid: &PodUid, cookie: u64, glance: Glance) {
        if let Some(entry) = self.lock().get_mut(uid).filter(|entry| entry.netns.cookie() == cookie) {
            entry.glance = Some(Arc::new(glance));
        }
    }

    /// The pods that were right when they were looked at last.
    pub fn watched(&self) -> Vec<Watched> {
        let watched = |(uid, entry): (&PodUid, &Entry)| {
            let glance = Arc::clone(entry.glance.as_ref()?);
            Some(Watched { uid: uid.clone(), netns: entry.netns.clone(), glance })
        };
        self.lock().iter().filter_map(watched).collect()
    }

    /// Lets go of a pod that is not captured any more.
    pub fn remove(&self, uid: &PodUid) {
        self.lock().remove(uid);
    }

    /// Ends old connections when their time has come; runs until dropped.
    pub async fn watch_deadlines(self, redirector: Arc<Redirector>) {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tick.tick().await;
            for (uid, name, netns) in self.due() {
                let redirector = Arc::clone(&redirector);
                let ended = tokio::task::spawn_blocking(move || redirector.end_old_connections(&netns)).await;
                match ended
                    .map_err(|error| error.to_string())
                    .and_then(|ended| ended.map_err(|e| e.to_string()))
                {
                    Ok(connections) => {
                        info!(pod = name, %uid, connections, "connections older than the enrolment have been ended");
                        if let Some(entry) = self.lock().get_mut(&uid) {
                            entry.deadline = None;
                        }
                    }
                    Err(error) => {
                        warn!(pod = name, %uid, %error, "old connections could not be ended; tried again")
                    }
                }
            }
        }
    }

    fn due(&self) -> Vec<(PodUid, String, Netns)> {
        let now = boot_time();
        let pods = self.lock();
        let due = pods.iter().filter(|(_, entry)| entry.deadline.is_some_and(|deadline| deadline <= now));
        due.map(|(uid, entry)| (uid.clone(), entry.name.clone(), entry.netns.clone())).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PodUid, Entry>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn listen(uid: PodUid, netns: Netns, changed: UnboundedSender<PodUid>) {
    let monitor = match Monitor::open(&netns) {
        Ok(monitor) => monitor,
        Err(error) => {
            return warn!(%uid, %error, "interfaces that appear later are found by the next check only");
        }
    };
    while monitor.changed().await.is_ok() {
        if changed.send(uid.clone()).is_err() {
            return;
        }
        // The first change at once, more of them together: who changes things all the time shall not keep us busy.
        tokio::time::sleep(CALM).await;
    }
}

/// CLOCK_BOOTTIME: goes on over suspension, and no one sets it.
fn boot_time() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
}
