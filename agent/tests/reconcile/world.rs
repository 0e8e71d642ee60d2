//! A small world around the reconciler: an API server with a watch that lags, pods with a data path, a
//! ztunnel. It keeps its own books and notes every breach of the rules that must hold at all times.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep},
};
use weir_agent::{
    cache::pods::Pods,
    domain::{
        config::{AgentConfig, ReconcileConfig},
        names,
        notice::Notice,
        reason::{Failure, Reason},
        selector::Labels,
        workload::{Pod, PodUid, Redirection, WorkloadInfo},
    },
    reconcile::{
        Annotated, Annotator, DataPath, Handle, Netns, Published, Reconciler, Recovered, SwitchedOn, Ztunnel,
        fault::FaultPlan, view::PodView,
    },
};

pub const ENABLED: Option<Redirection> = Some(Redirection::Enabled);
pub const PENDING: Option<Redirection> = Some(Redirection::Pending);

/// How a call shall go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Well.
    Well,
    /// It fails and has done nothing.
    Fails,
    /// It does its work and fails all the same.
    FailsAfterwards,
    /// It takes so long, then goes well.
    Takes(Duration),
    /// It does its work and never answers.
    NeverAnswers,
    /// It panics before it has done anything.
    Panics,
}

/// What decides how a call shall go, by pod and step.
type Behaviour = Box<dyn FnMut(&PodUid, &str) -> How + Send>;

/// The world. Clones share it.
#[derive(Clone)]
pub struct World(Arc<Mutex<State>>);

/// What the watch tells.
enum News {
    Pod(Pod),
    Gone(PodUid),
    Namespace(String, Labels),
    List(Vec<Pod>, Vec<(String, Labels)>),
}

struct State {
    watch: mpsc::UnboundedSender<(u32, News)>,
    /// Which agent it is: what the watch of an earlier one has not told, it never tells.
    agent: u32,
    pods: BTreeMap<PodUid, Pod>,
    /// Counts changes, as the API server does.
    version: u64,
    namespaces: BTreeMap<String, Labels>,
    /// The watch is broken: what happens is not told until it is whole again.
    blind: bool,
    sims: BTreeMap<PodUid, Sim>,
    ztunnel_up: bool,
    behaviour: Behaviour,
    calls: Vec<(PodUid, String)>,
    under_way: BTreeSet<PodUid>,
    breaches: Vec<String>,
    /// Namespaces an agent that starts anew does not find at once.
    hidden: BTreeSet<PodUid>,
    netns: Netns,
}

/// What is really there of one pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sim {
    pub prepared: bool,
    pub captured: bool,
    pub draining: bool,
    pub at_ztunnel: bool,
    /// ztunnel has listened in this pod since it was last retracted.
    pub acked: bool,
    /// Somebody else has torn down what captured the pod.
    pub torn_down: bool,
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    // The API server.

    pub fn create(&self, pod: Pod) {
        self.lock().change(&pod.uid, |pods| pods.insert(pod.uid.clone(), pod.clone()));
    }

    pub fn edit(&self, uid: &PodUid, edit: impl FnOnce(&mut Pod)) {
        self.lock().edit(uid, edit);
    }

    pub fn delete(&self, uid: &PodUid) {
        self.lock().change(uid, |pods| pods.remove(uid));
    }

    pub fn label(&self, namespace: &str, ambient: bool) {
        let labels = if ambient { mode("ambient") } else { Labels::new() };
        let mut state = self.lock();
        state.namespaces.insert(namespace.into(), labels.clone());
        state.tell(News::Namespace(namespace.into(), labels));
    }

    /// Breaks the watch, or makes it whole: then everything is listed anew.
    pub fn blind(&self, blind: bool) {
        let mut state = self.lock();
        state.blind = blind;
        let (pods, namespaces) = state.list();
        state.tell(News::List(pods, namespaces));
    }

    pub fn is_blind(&self) -> bool {
        self.lock().blind
    }

    pub fn pods(&self) -> Vec<Pod> {
        self.lock().pods.values().cloned().collect()
    }

    pub fn labels(&self, namespace: &str) -> Labels {
        self.lock().namespaces.get(namespace).cloned().unwrap_or_default()
    }

    pub fn annotation(&self, uid: &PodUid) -> Option<Redirection> {
        self.lock().pods.get(uid).and_then(|pod| pod.redirection)
    }

    // The node.

    pub fn ztunnel(&self, up: bool) {
        self.lock().ztunnel_up = up;
    }

    pub fn behave(&self, behaviour: impl FnMut(&PodUid, &str) -> How + Send + 'static) {
        self.lock().behaviour = Box::new(behaviour);
    }

    pub fn sim(&self, uid: &PodUid) -> Sim {
        self.lock().sims.get(uid).copied().unwrap_or_default()
    }

    pub fn sims(&self) -> BTreeMap<PodUid, Sim> {
        self.lock().sims.clone()
    }

    /// Somebody tears down what captures the pod.
    pub fn lose_capture(&self, uid: &PodUid) {
        if let Some(sim) = self.lock().sims.get_mut(uid).filter(|sim| sim.captured) {
            sim.captured = false;
            sim.torn_down = true;
        }
    }

    /// An earlier agent has left this pod captured; a new one finds its namespace again, or not.
    pub fn left_captured(&self, uid: &PodUid, netns: bool) {
        let sim = Sim { prepared: true, captured: true, at_ztunnel: true, acked: true, ..Sim::default() };
        self.lock().sims.insert(uid.clone(), sim);
        self.hide(uid, !netns);
    }

    /// A new agent does not find this pod's namespace at once, or does.
    pub fn hide(&self, uid: &PodUid, hidden: bool) {
        let mut state = self.lock();
        if hidden {
            state.hidden.insert(uid.clone())
        } else {
            state.hidden.remove(uid)
        };
    }

    // The books.

    /// The steps taken for this pod since the last time, in words.
    pub fn steps(&self, uid: &PodUid) -> String {
        let mut state = self.lock();
        let (of_pod, others) = state.calls.drain(..).partition(|(of, _)| of == uid);
        state.calls = others;
        let of_pod: Vec<(PodUid, String)> = of_pod;
        of_pod.into_iter().map(|(_, step)| step).collect::<Vec<_>>().join(" ")
    }

    pub fn breaches(&self) -> Vec<String> {
        self.lock().breaches.clone()
    }

    /// One call: `effect` is what it does to the world.
    async fn call<T>(
        &self,
        uid: &PodUid,
        step: &str,
        reason: Reason,
        effect: impl FnOnce(&mut State) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let how = {
            let mut state = self.lock();
            state.calls.push((uid.clone(), step.into()));
            if !state.under_way.insert(uid.clone()) {
                state.breaches.push(format!("{uid}: {step} while another call is under way"));
            }
            state.check(uid, step);
            (state.behaviour)(uid, step)
        };
        let _over = Over { world: self.clone(), uid: uid.clone() };
        let failure = Failure::new(reason, format!("{step} fails as told"));
        match how {
            How::Fails => return Err(failure),
            How::Takes(time) => sleep(time).await,
            How::Panics => panic!("{step} panics as told"),
            // Every call lets others run.
            _ => tokio::task::yield_now().await,
        }
        let result = effect(&mut self.lock());
        match how {
            How::FailsAfterwards => Err(failure),
            How::NeverAnswers => std::future::pending().await,
            _ => result,
        }
    }
}

/// Ends a call, also one that is dropped.
struct Over {
    world: World,
    uid: PodUid,
}

impl Drop for Over {
    fn drop(&mut self) {
        self.world.lock().under_way.remove(&self.uid);
    }
}

impl State {
    fn list(&self) -> (Vec<Pod>, Vec<(String, Labels)>) {
        (self.pods.values().cloned().collect(), self.namespaces.clone().into_iter().collect())
    }

    fn tell(&self, news: News) {
        if !self.blind {
            self.watch.send((self.agent, news)).expect("the world is watched");
        }
    }

    /// Changes a pod, if there is one; says which version of it there is then.
    fn edit(&mut self, uid: &PodUid, edit: impl FnOnce(&mut Pod)) -> Option<u64> {
        self.change(uid, |pods| pods.get_mut(uid).map(edit))
    }

    /// Changes pods, and tells what became of this one, if anything.
    fn change<T>(
        &mut self,
        uid: &PodUid,
        change: impl FnOnce(&mut BTreeMap<PodUid, Pod>) -> T,
    ) -> Option<u64> {
        let before = self.pods.get(uid).cloned();
        change(&mut self.pods);
        let Some(now) = self.pods.get_mut(uid) else {
            self.tell(News::Gone(uid.clone()));
            return None;
        };
        if before.is_none_or(|before| now.differs(&before)) {
            self.version += 1;
            now.version = self.version;
            let now = now.clone();
            self.tell(News::Pod(now));
        }
        self.pods.get(uid).map(|pod| pod.version)
    }

    fn sim(&mut self, uid: &PodUid) -> &mut Sim {
        self.sims.entry(uid.clone()).or_default()
    }

    /// The rules that hold whenever a step begins.
    fn check(&mut self, uid: &PodUid, step: &str) {
        let sim = *self.sim(uid);
        let pod = self.pods.get(uid);
        let enabled = pod.is_some_and(|pod| pod.redirection == ENABLED);
        let usable = pod.is_some_and(|pod| !pod.terminal);
        let broken = match step {
            "annotate_enabled" => !((sim.captured || sim.torn_down) && sim.acked && !sim.draining),
            "drain" | "switch_off" => enabled,
            "forget" => enabled || sim.at_ztunnel,
            "switch_on" => !sim.acked,
            // Taken from ztunnel while captured and new connections are not held back: they would fail.
            "retract" => usable && (enabled || (sim.captured && !sim.draining)),
            _ => false,
        } || (step == "switch_off" && sim.captured && sim.at_ztunnel);
        if broken {
            self.breaches.push(format!("{uid}: {step} with {sim:?}, pod {pod:?}"));
        }
    }
}

impl DataPath for World {
    async fn recovered(&self) -> Vec<Recovered> {
        let state = self.lock();
        let left = state.sims.iter().filter(|(_, sim)| sim.prepared);
        let recovered = left.map(|(uid, sim)| Recovered {
            uid: uid.clone(),
            netns: (!state.hidden.contains(uid)).then(|| Arc::clone(&state.netns)),
            captured: sim.captured && !sim.draining,
        });
        recovered.collect()
    }

    async fn locate(&self, pod: &Arc<Pod>) -> Result<Netns, Failure> {
        self.call(&pod.uid, "locate", Reason::NetnsNotFound, |state| Ok(Arc::clone(&state.netns))).await
    }

    async fn prepare(&self, pod: &Arc<Pod>, _: &Netns) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            state.sim(&pod.uid).prepared = true;
            Ok(())
        };
        self.call(&pod.uid, "prepare", Reason::PrepareFailed, effect).await
    }

    async fn switch_on(&self, pod: &Arc<Pod>, _: &Netns) -> Result<SwitchedOn, Failure> {
        let effect = |state: &mut State| {
            let sim = state.sim(&pod.uid);
            sim.captured = sim.prepared;
            sim.draining = false;
            sim.torn_down = false;
            Ok(SwitchedOn { old_connections: 3 })
        };
        self.call(&pod.uid, "switch_on", Reason::SwitchOnFailed, effect).await
    }

    async fn verify(&self, pod: &Arc<Pod>, _: &Netns) -> Result<(), Vec<String>> {
        let effect = |state: &mut State| {
            let sim = state.sim(&pod.uid);
            let lost = || Failure::new(Reason::VerifyFailed, "not captured");
            if sim.captured { Ok(()) } else { Err(lost()) }
        };
        let verified = self.call(&pod.uid, "verify", Reason::VerifyFailed, effect).await;
        verified.map_err(|failure| vec![failure.detail])
    }

    async fn drain(&self, pod: &Arc<Pod>, _: &Netns) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            state.sim(&pod.uid).draining = true;
            Ok(())
        };
        self.call(&pod.uid, "drain", Reason::DrainFailed, effect).await
    }

    async fn switch_off(&self, pod: &Arc<Pod>, _: &Netns) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            let sim = state.sim(&pod.uid);
            *sim = Sim { at_ztunnel: sim.at_ztunnel, acked: sim.acked, ..Sim::default() };
            Ok(())
        };
        self.call(&pod.uid, "switch_off", Reason::SwitchOffFailed, effect).await
    }

    async fn forget(&self, uid: &PodUid) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            *state.sim(uid) = Sim::default();
            Ok(())
        };
        self.call(uid, "forget", Reason::ForgetFailed, effect).await
    }
}

impl Ztunnel for World {
    fn restore(&self, uid: &PodUid, _: &WorkloadInfo, _: Option<Netns>) {
        self.lock().sim(uid).at_ztunnel = true;
    }

    async fn publish(&self, uid: &PodUid, _: &WorkloadInfo, _: Netns) -> Published {
        let effect = |state: &mut State| {
            let up = state.ztunnel_up;
            let sim = state.sim(uid);
            sim.at_ztunnel = true;
            sim.acked |= up;
            Ok(up)
        };
        match self.call(uid, "publish", Reason::ZtunnelRefused, effect).await {
            Ok(true) => Published::Acked("ztunnel-1".into()),
            Ok(false) => Published::NoZtunnel,
            Err(failure) => Published::Nacked(failure.detail),
        }
    }

    async fn retract(&self, uid: &PodUid) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            let sim = state.sim(uid);
            sim.at_ztunnel = false;
            sim.acked = false;
            Ok(())
        };
        self.call(uid, "retract", Reason::RetractFailed, effect).await
    }
}

impl Annotator for World {
    async fn set(&self, pod: &Pod, value: Option<Redirection>) -> Result<Annotated, Failure> {
        let step = match value {
            ENABLED => "annotate_enabled",
            PENDING => "annotate_pending",
            _ => "unannotate",
        };
        let effect = |state: &mut State| {
            let written = state.edit(&pod.uid, |pod| pod.redirection = value);
            Ok(written.map_or(Annotated::Gone, |version| Annotated::Done { version }))
        };
        self.call(&pod.uid, step, Reason::AnnotateFailed, effect).await
    }
}

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
        let (watch, news) = mpsc::unbounded_channel();
        let state = State {
            watch,
            agent: 0,
            pods: BTreeMap::new(),
            version: 0,
            namespaces: BTreeMap::from([("ns".into(), Labels::new())]),
            blind: false,
            sims: BTreeMap::new(),
            ztunnel_up: true,
            behaviour: Box::new(|_, _| How::Well),
            calls: Vec::new(),
            under_way: BTreeSet::new(),
            breaches: Vec::new(),
            hidden: BTreeSet::new(),
            netns: Arc::new(File::open("/dev/null").unwrap().into()),
        };
        let world = World(Arc::new(Mutex::new(state)));
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

pub fn mode(value: &str) -> Labels {
    Labels::from([(names::DATAPLANE_MODE.into(), value.into())])
}

/// A running pod in the namespace `ns`.
pub fn pod(uid: &str, name: &str) -> Pod {
    Pod {
        uid: uid.into(),
        info: WorkloadInfo { name: name.into(), namespace: "ns".into(), service_account: "sa".into() },
        labels: Labels::new(),
        annotations: Labels::new(),
        ips: vec!["10.0.0.1".parse().unwrap()],
        host_network: false,
        terminal: false,
        redirection: None,
        version: 0,
    }
}
