//! Random sequences of everything that can happen, in any order: the pods always end where their labels
//! say, and the rules of the world are never broken on the way.
//!
//! `WEIR_CASES` sets how many sequences are tried, `WEIR_SEED` the first one's seed.

use std::{env, time::Duration};

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use tokio::time::sleep;
use weir_agent::domain::{
    config::{AgentConfig, ReconcileConfig},
    eligibility::Decision,
    enrolment::State,
    selector::Labels,
    workload::{Pod, PodUid},
};

use crate::{
    rig::{Rig, Still},
    world::{ENABLED, How, PENDING, Sim, World, mode, pod},
};

const NAMESPACES: [&str; 2] = ["ns", "ns2"];
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

#[test]
fn whatever_happens_pods_end_where_their_labels_say() {
    let setting = |name, default| env::var(name).map_or(default, |text| text.parse().expect("a number"));
    let (cases, first) = (setting("WEIR_CASES", 300), setting("WEIR_SEED", 1));
    for seed in first..first + cases {
        let outcome = std::panic::catch_unwind(|| {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_time().start_paused(true).build().unwrap().block_on(case(seed));
        });
        assert!(outcome.is_ok(), "seed {seed}: repeat with WEIR_SEED={seed} WEIR_CASES=1");
    }
}

async fn case(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let (still, world) = Still::new();
    let mut story = Story { world: world.clone(), born: 0 };
    world.label("ns2", rng.random());
    for _ in 0..rng.random_range(0..6) {
        story.create(&mut rng);
    }
    for pod in world.pods() {
        // Left by an earlier agent, or annotated before the node was rebooted.
        match rng.random_range(0..4) {
            0 => world.left_captured(&pod.uid, rng.random()),
            1 => world.edit(&pod.uid, |pod| pod.redirection = ENABLED),
            _ => {}
        }
    }
    let mut lag = StdRng::seed_from_u64(seed ^ 1);
    let lag = move || Duration::from_millis(if lag.random_bool(0.1) { lag.random_range(0..2000) } else { 1 });
    let mut rig = still.start(ReconcileConfig::default(), None, lag).await;

    for _ in 0..rng.random_range(5..60) {
        story.go_on(&mut rng, &mut rig).await;
        let pause = if rng.random_bool(0.7) { rng.random_range(0..30) } else { rng.random_range(0..20_000) };
        sleep(Duration::from_millis(pause)).await;
    }

    // Then all goes well.
    world.behave(|_, _| How::Well);
    world.ztunnel(true);
    world.blind(false);
    for pod in world.pods() {
        world.edit(&pod.uid, |pod| pod.ips = vec!["10.0.0.1".parse().unwrap()]);
    }
    sleep(Duration::from_secs(120)).await;
    rig.handle.recheck(world.pods().into_iter().map(|pod| pod.uid));
    sleep(Duration::from_secs(120)).await;
    check_end(&rig);
}

/// All of it: what is there, what is annotated, what is shown.
fn check_end(rig: &Rig) {
    let policy = AgentConfig::default().policy();
    let pods = rig.world.pods();
    for pod in &pods {
        let sim = rig.world.sim(&pod.uid);
        let view = rig.view(&pod.uid);
        match policy.decide(pod, Some(&rig.world.labels(&pod.info.namespace))) {
            Decision::Enrol => {
                let whole =
                    Sim { prepared: true, captured: true, at_ztunnel: true, acked: true, ..Sim::default() };
                assert_eq!((sim, pod.redirection, view.state), (whole, ENABLED, State::Enrolled), "{pod:?}");
            }
            Decision::Leave(reason) => {
                assert_eq!((sim, pod.redirection), (Sim::default(), None), "{pod:?}");
                assert_eq!((view.state, view.reason), (State::Outside, reason), "{pod:?}");
            }
            Decision::Wait(reason) => panic!("{reason} at the end: {pod:?}"),
        }
    }
    for (uid, sim) in rig.world.sims() {
        if !pods.iter().any(|pod| pod.uid == uid) {
            assert_eq!(sim, Sim::default(), "{uid} is gone");
        }
    }
    assert_eq!(rig.handle.views().list().len(), pods.len());
    assert_eq!(rig.world.breaches(), Vec::<String>::new());
}

/// What happens next.
struct Story {
    world: World,
    born: u32,
}

impl Story {
    async fn go_on(&mut self, rng: &mut StdRng, rig: &mut Rig) {
        match rng.random_range(0..100) {
            0..20 => self.world.label(NAMESPACES.choose(rng).unwrap(), rng.random()),
            20..32 => self.create(rng),
            32..40 => {
                if let Some(uid) = self.any(rng) {
                    self.world.delete(&uid);
                }
            }
            40..70 => self.change_a_pod(rng),
            70..78 => self.world.ztunnel(rng.random()),
            78..83 => self.world.blind(rng.random()),
            83..91 => self.other_manners(rng),
            91..94 => {
                if let Some(uid) = self.any(rng) {
                    self.world.lose_capture(&uid);
                    rig.handle.recheck([uid]);
                }
            }
            94..97 => rig.handle.retry_now(),
            _ if self.world.is_blind() => {}
            _ => {
                for pod in self.world.pods() {
                    self.world.hide(&pod.uid, rng.random_bool(0.3));
                }
                rig.restart().await;
            }
        }
    }

    fn any(&self, rng: &mut StdRng) -> Option<PodUid> {
        self.world.pods().choose(rng).map(|pod| pod.uid.clone())
    }

    /// A pod under one of few names: whoever has that name goes first.
    fn create(&mut self, rng: &mut StdRng) {
        let (namespace, name) = (NAMESPACES.choose(rng).unwrap(), NAMES.choose(rng).unwrap());
        for before in self.world.pods() {
            if before.info.name == *name && before.info.namespace == *namespace {
                self.world.delete(&before.uid);
            }
        }
        self.born += 1;
        let mut new = pod(&format!("u{:04}", self.born), name);
        new.info.namespace = (*namespace).into();
        new.labels = any_mode(rng);
        new.host_network = rng.random_bool(0.05);
        if rng.random_bool(0.3) {
            new.ips.clear();
        }
        self.world.create(new);
    }

    fn change_a_pod(&self, rng: &mut StdRng) {
        let Some(uid) = self.any(rng) else { return };
        let labels = any_mode(rng);
        let change: fn(&mut Pod) = match rng.random_range(0..12) {
            0..5 => {
                self.world.edit(&uid, |pod| pod.labels = labels);
                return;
            }
            5 => |pod| pod.ips.clear(),
            6 | 7 => |pod| pod.ips = vec!["10.0.0.1".parse().unwrap()],
            8 => |pod| drop(pod.annotations.insert("ambient.istio.io/dns-capture".into(), "false".into())),
            9 => |pod| pod.annotations.clear(),
            10 => |pod| pod.redirection = pod.redirection.and(PENDING),
            _ => |pod| pod.terminal = true,
        };
        self.world.edit(&uid, change);
    }

    /// From now on calls go like this.
    fn other_manners(&self, rng: &mut StdRng) {
        let (fails, lingers) = (rng.random_range(0.0..0.6), rng.random_range(0.0..0.3));
        let mut rng = StdRng::from_rng(rng);
        self.world.behave(move |_, step| {
            let waits_for_others = matches!(step, "publish" | "retract") || step.contains("annotate");
            if rng.random_bool(fails) {
                if rng.random() { How::Fails } else { How::FailsAfterwards }
            } else if rng.random_bool(lingers) {
                How::Takes(Duration::from_millis(rng.random_range(0..8000)))
            } else if waits_for_others && rng.random_bool(0.05) {
                How::NeverAnswers
            } else {
                How::Well
            }
        });
    }
}

fn any_mode(rng: &mut StdRng) -> Labels {
    match rng.random_range(0..3) {
        0 => mode("ambient"),
        1 => mode("none"),
        _ => Labels::new(),
    }
}
