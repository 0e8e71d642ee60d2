//! A reconciler at work in a world.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep},
};
use weir_agent::{
    cache::pods::Pods,
    domain::{
        config::{AgentConfig, ReconcileConfig},
        notice::Notice,
        workload::PodUid,
    },
    reconcile::{Handle, Reconciler, fault::FaultPlan, view::PodView},
};

use crate::world::{News, World};

/// A running reconciler in its world.
pub struct Rig {
    pub world: World,
    pub cache: Arc<Pods>,
    pub handle: Handle,
    pub notices: mpsc::Receiver<Notice>,
    watching: JoinHandle<()>,
    running: JoinHandle<()>,
}

fn reconciler(world: &World, cache: &Arc<Pods>, config: ReconcileConfig) -> Reconciler<World, World, World> {
    Reconciler::new(Arc::clone(cache), config, world.clone(), world.clone(), world.clone())
}

/// Set up, but not running yet.
pub struct Still {
    world: World,
    news: mpsc::UnboundedReceiver<(u32, News)>,
}

impl Still {
    pub fn new() -> (Self, World) {
        let (world, news) = World::new();
        (Self { world: world.clone(), news }, world)
    }

    /// Everything the world has is listed, then the reconciler runs. The watch lags by what `lag` says.
    pub async fn start(
        self,
        config: ReconcileConfig,
        faults: Option<FaultPlan>,
        mut lag: impl FnMut() -> Duration + Send + 'static,
    ) -> Rig {
        let Self { world, mut news } = self;
        let cache = Arc::new(Pods::new(AgentConfig::default().policy()));
        while news.try_recv().is_ok() {}
        world.blind(false);
        let watching = tokio::spawn({
            let (world, cache) = (world.clone(), Arc::clone(&cache));
            async move {
                while let Some((agent, news)) = news.recv().await {
                    sleep(lag()).await;
                    match news {
                        _ if agent != world.lock().agent => {}
                        News::Pod(pod) => cache.apply_pod(pod),
                        News::Gone(uid) => cache.delete_pod(&uid),
                        News::Namespace(name, labels) => cache.apply_namespace(&name, labels),
                        News::List(pods, namespaces) => {
                            cache.reset_pods(pods);
                            cache.reset_namespaces(namespaces);
                        }
                    }
                }
            }
        });
        let (notices_in, notices) = mpsc::channel(1024);
        let mut reconciler = reconciler(&world, &cache, config).with_notices(notices_in);
        if let Some(faults) = faults {
            reconciler = reconciler.with_faults(faults);
        }
        let handle = reconciler.handle();
        reconciler.recover().await;
        let running = tokio::spawn(reconciler.run());
        Rig { world, cache, handle, notices, watching, running }
    }
}

impl Rig {
    /// A rig with a prompt watch, in a world set up by `set_up`.
    pub async fn new(set_up: impl FnOnce(&World)) -> Self {
        Self::with_faults("", set_up).await
    }

    pub async fn with_faults(faults: &str, set_up: impl FnOnce(&World)) -> Self {
        let (still, world) = Still::new();
        set_up(&world);
        let faults = faults.parse().unwrap();
        still.start(ReconcileConfig::default(), Some(faults), || Duration::from_millis(1)).await
    }

    /// The agent dies in the middle of whatever it does, and another starts with a list of its own.
    pub async fn restart(&mut self) {
        self.running.abort();
        let _ = (&mut self.running).await;
        let (pods, namespaces) = {
            let mut state = self.world.lock();
            state.agent += 1;
            state.list()
        };
        self.cache.reset_pods(pods);
        self.cache.reset_namespaces(namespaces);
        let mut reconciler = reconciler(&self.world, &self.cache, ReconcileConfig::default());
        self.handle = reconciler.handle();
        reconciler.recover().await;
        self.running = tokio::spawn(reconciler.run());
    }

    /// Lets the world go on until `done`, for ten minutes of its time at most.
    pub async fn until(&self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(
                start.elapsed() < Duration::from_secs(600),
                "never: {what}; {:#?}",
                self.handle.views().list()
            );
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// Lets the world go on for a while, in which nothing more should happen.
    pub async fn rest(&self) {
        sleep(Duration::from_secs(60)).await;
    }

    pub fn view(&self, uid: &PodUid) -> PodView {
        self.handle.views().get(uid).unwrap_or_else(|| panic!("no view of {uid}"))
    }

    pub fn told(&mut self) -> Vec<Notice> {
        std::iter::from_fn(|| self.notices.try_recv().ok()).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.watching.abort();
        self.running.abort();
        if !std::thread::panicking() {
            assert_eq!(self.world.breaches(), Vec::<String>::new());
        }
    }
}
