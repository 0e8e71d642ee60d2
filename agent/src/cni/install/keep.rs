//! Keeps the plugin installed: looks whenever something changes in the directories, and puts right what is not.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::{InstallError, Mode, Places, Plan, fight::Fight, files, plan};
use crate::{domain::cni::ordered::Json, netns::directories::Watch};

/// What changes together is looked at together; a file that is being written is whole by then.
const SETTLE: Duration = Duration::from_millis(20);
/// Also without being told: a directory may have come, or a watch may be impossible.
const INTERVAL: Duration = Duration::from_secs(15);

/// What is to be where.
#[derive(Clone, Debug)]
pub struct Installation {
    /// Where.
    pub places: Places,
    /// The plugin's program.
    pub binary: PathBuf,
    /// Our entry.
    pub entry: Json,
    /// How runtimes come to call it.
    pub mode: Mode,
}

/// How the installation stands.
#[derive(Debug, Default)]
pub struct Status {
    installed: AtomicU64,
    copy_failed: AtomicU64,
    configuration_failed: AtomicU64,
    /// Why it is not; none when it is.
    lacking: Mutex<Option<String>>,
}

impl Status {
    /// Nothing has been looked at yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { lacking: Mutex::new(Some("not looked at yet".into())), ..Self::default() })
    }

    /// Attempts so far, by result, under Istio's names.
    pub fn attempts(&self) -> [(&'static str, u64); 3] {
        [
            ("SUCCESS", self.installed.load(Relaxed)),
            ("COPY_BINARIES_FAILURE", self.copy_failed.load(Relaxed)),
            ("CREATE_CNI_CONFIG_FAILURE", self.configuration_failed.load(Relaxed)),
        ]
    }

    /// Why the plugin is not installed; none when it is.
    pub fn lacking(&self) -> Option<String> {
        self.lacking.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes note; is it news?
    fn set(&self, lacking: Option<String>) -> bool {
        let mut now = self.lacking.lock().unwrap_or_else(PoisonError::into_inner);
        let news = *now != lacking;
        *now = lacking;
        news
    }

    fn failed(&self, error: &InstallError, places: &Places) {
        let copying = matches!(error, InstallError::Io { path, .. } if !path.starts_with(&places.conf_dir));
        let count = if copying { &self.copy_failed } else { &self.configuration_failed };
        count.fetch_add(1, Relaxed);
        let news = self.set(Some(error.to_string()));
        match (news, error.is_early()) {
            (true, true) => info!("the CNI plugin is not installed yet: {error}"),
            (true, false) => warn!("the CNI plugin is not installed: {error}"),
            (false, _) => {}
        }
    }
}

/// Keeps it installed until dropped.
pub async fn keep(mut wanted: Installation, status: Arc<Status>) {
    for dir in [&wanted.places.bin_dir, &wanted.places.conf_dir] {
        files::sweep(dir);
    }
    let (mut fight, mut watch, mut written) = (Fight::default(), None, false);
    loop {
        // Before the look: what changes after it is told.
        if watch.is_none() {
            watch = Watch::on(&[&wanted.places.bin_dir, &wanted.places.conf_dir]).ok();
        }
        let again = match look(&wanted).await {
            Ok(plan) if plan.is_empty() => {
                if status.set(None) {
                    info!(configuration = %plan.file.display(), "the CNI plugin is installed");
                }
                // What was installed before this agent was as good: from now on it can be lost.
                written = true;
                INTERVAL
            }
            Ok(plan) => {
                status.set(Some(format!("{} is being written", plan.file.display())));
                let (edits, now) = (plan.edits(), Instant::now());
                if edits && written && fight.lost(now) {
                    evade(&mut wanted, &plan);
                    continue;
                }
                let wait = fight.wait(now);
                if wait.is_zero() {
                    fight.wrote(now);
                    written |= edits;
                    put_right(plan, &wanted, &status).await
                } else {
                    // Not counted as lost once more when its time has come.
                    written = false;
                    wait
                }
            }
            Err(error) => {
                status.failed(&error, &wanted.places);
                INTERVAL
            }
        };
        wait(&mut watch, again).await;
    }
}

async fn look(wanted: &Installation) -> Result<Plan, InstallError> {
    let Installation { places, binary, entry, mode } = wanted.clone();
    blocking(move || plan(&places, &binary, &entry, mode), wanted).await
}

/// Returns when to look again.
async fn put_right(plan: Plan, wanted: &Installation, status: &Status) -> Duration {
    let file = plan.file.clone();
    match blocking(move || plan.carry_out(), wanted).await {
        Ok(()) => {
            status.installed.fetch_add(1, Relaxed);
            status.set(None);
            info!(configuration = %file.display(), "the CNI plugin has been installed");
            // Ours was a change as well, and is seen to be right.
            Duration::ZERO
        }
        Err(error) => {
            status.failed(&error, &wanted.places);
            INTERVAL
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, InstallError> + Send + 'static,
    wanted: &Installation,
) -> Result<T, InstallError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| {
        let source = std::io::Error::other(error);
        Err(InstallError::Io { action: "install into", path: wanted.places.conf_dir.clone(), source })
    })
}

/// Somebody else keeps writing the configuration: a file that is not theirs is used from now on.
fn evade(wanted: &mut Installation, plan: &Plan) {
    let file = files::file_name(&plan.file);
    let own = &wanted.places.own;
    let hint = if file.contains("cilium") { "; with Cilium set cni.exclusive=false" } else { "" };
    if wanted.mode == Mode::Chained && file != *own {
        warn!(
            "another writer keeps dropping the CNI plugin from {file}: {own}, which has what that has and sorts before it, is used from now on{hint}"
        );
        wanted.mode = Mode::OwnList;
    } else {
        warn!(
            "another writer keeps changing {file}: it is put right again, but no more than every ten seconds{hint}"
        );
    }
}

/// For a change, or the time.
async fn wait(watch: &mut Option<Watch>, longest: Duration) {
    match watch {
        Some(it) => match timeout(longest, it.changed()).await {
            Ok(Ok(true)) => sleep(SETTLE).await,
            Ok(Ok(false) | Err(_)) => {
                *watch = None;
                sleep(SETTLE).await;
            }
            Err(_) => {}
        },
        None => sleep(longest.max(SETTLE)).await,
    }
}
