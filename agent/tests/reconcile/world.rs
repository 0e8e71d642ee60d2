//! A small world around the reconciler: an API server with a watch that lags, pods with a data path, a
//! ztunnel. It keeps its own books and notes every breach of the rules that must hold at all times.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{sync::mpsc, time::sleep};
use weir_agent::{
    domain::{
        names,
        reason::{Failure, Reason},
        selector::Labels,
        workload::{Pod, PodUid, Redirection, WorkloadInfo},
    },
    reconcile::Netns,
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
pub enum News {
    Pod(Pod),
    Gone(PodUid),
    Namespace(String, Labels),
    List(Vec<Pod>, Vec<(String, Labels)>),
}

pub struct State {
    watch: mpsc::UnboundedSender<(u32, News)>,
    /// Which agent it is: what the watch of an earlier one has not told, it never tells.
    pub agent: u32,
    pods: BTreeMap<PodUid, Pod>,
    /// Counts changes, as the API server does.
    version: u64,
    namespaces: BTreeMap<String, Labels>,
    /// The watch is broken: what happens is not told until it is whole again.
    blind: bool,
    pub sims: BTreeMap<PodUid, Sim>,
    pub ztunnel_up: bool,
    behaviour: Behaviour,
    calls: Vec<(PodUid, String)>,
    under_way: BTreeSet<PodUid>,
    breaches: Vec<String>,
    /// Namespaces an agent that starts anew does not find at once.
    pub hidden: BTreeSet<PodUid>,
    pub netns: Netns,
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
    /// A world with one namespace, and what its watch tells.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<(u32, News)>) {
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
            netns: Netns::known(Arc::new(File::open("/dev/null").unwrap().into()), 0),
        };
        (Self(Arc::new(Mutex::new(state))), news)
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
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
    pub async fn call<T>(
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
    pub fn list(&self) -> (Vec<Pod>, Vec<(String, Labels)>) {
        (self.pods.values().cloned().collect(), self.namespaces.clone().into_iter().collect())
    }

    fn tell(&self, news: News) {
        if !self.blind {
            self.watch.send((self.agent, news)).expect("the world is watched");
        }
    }

    /// Changes a pod, if there is one; says which version of it there is then.
    pub fn edit(&mut self, uid: &PodUid, edit: impl FnOnce(&mut Pod)) -> Option<u64> {
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

    pub fn sim(&mut self, uid: &PodUid) -> &mut Sim {
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
