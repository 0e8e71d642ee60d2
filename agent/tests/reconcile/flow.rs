//! What happens to pods when all goes well, and when their labels, or ztunnel, come and go meanwhile.

use std::time::Duration;

use weir_agent::domain::{
    enrolment::{State, Step},
    notice::What,
    reason::Reason,
    workload::{Pod, PodUid},
};

use crate::{
    rig::Rig,
    world::{ENABLED, How, PENDING, Sim, World, mode, pod},
};

const IN: &str = "locate prepare publish switch_on verify annotate_enabled";
const OUT: &str = "unannotate drain retract switch_off";

fn u(uid: &str) -> PodUid {
    uid.into()
}

fn one_in_the_mesh(world: &World) {
    world.label("ns", true);
    world.create(pod("u", "a"));
}

fn enrolled(uid: &'static str) -> impl FnMut(&Rig) -> bool {
    move |rig| rig.handle.views().get(&u(uid)).is_some_and(|view| view.state == State::Enrolled)
}

fn outside(uid: &'static str) -> impl FnMut(&Rig) -> bool {
    move |rig| rig.handle.views().get(&u(uid)).is_some_and(|view| view.state == State::Outside)
}

fn pending(uid: &'static str) -> impl FnMut(&Rig) -> bool {
    move |rig| rig.handle.views().get(&u(uid)).is_some_and(|view| view.state == State::Pending)
}

fn gone(uid: &'static str) -> impl FnMut(&Rig) -> bool {
    move |rig| rig.cache.get(&u(uid)).is_none() && rig.handle.views().get(&u(uid)).is_none()
}

#[tokio::test(start_paused = true)]
async fn a_running_pod_is_enrolled_when_its_namespace_is_labelled_and_leaves_when_it_is_not() {
    let mut rig = Rig::new(|world| world.create(pod("u", "a"))).await;
    rig.until("decided", outside("u")).await;
    assert_eq!((rig.view(&u("u")).reason, rig.world.steps(&u("u")).as_str()), (Reason::NotSelected, ""));

    rig.world.label("ns", true);
    rig.until("enrolled", enrolled("u")).await;
    rig.rest().await;
    assert_eq!(rig.world.steps(&u("u")), IN);
    assert_eq!(rig.world.annotation(&u("u")), ENABLED);
    let view = rig.view(&u("u"));
    assert_eq!((view.acked_by.as_deref(), view.old_connections), (Some("ztunnel-1"), 3));
    assert_eq!((view.reason, view.last_error, view.failed_attempts), (Reason::Selected, None, 0));

    rig.world.label("ns", false);
    rig.until("out", outside("u")).await;
    rig.rest().await;
    assert_eq!(rig.world.steps(&u("u")), OUT);
    assert_eq!((rig.world.annotation(&u("u")), rig.world.sim(&u("u"))), (None, Sim::default()));
    let told: Vec<_> = rig.told().into_iter().map(|notice| notice.what).collect();
    assert_eq!(told, [What::Enrolled { old_connections: 3 }, What::Unenrolled]);
}

#[tokio::test(start_paused = true)]
async fn pods_that_are_not_to_be_enrolled_cost_nothing() {
    let rig = Rig::new(|world| {
        world.label("ns", true);
        world.create(Pod { host_network: true, ..pod("host", "a") });
        world.create(Pod { terminal: true, ..pod("ended", "b") });
        world.create(Pod { labels: mode("none"), ..pod("none", "c") });
        world.create(Pod { ips: vec![], ..pod("no-ip", "d") });
    })
    .await;
    rig.rest().await;
    for (uid, state, reason) in [
        ("host", State::Outside, Reason::HostNetwork),
        ("ended", State::Outside, Reason::Terminal),
        ("none", State::Outside, Reason::NotSelected),
        ("no-ip", State::Waiting, Reason::NoAddress),
    ] {
        let view = rig.view(&u(uid));
        assert_eq!((view.state, view.reason), (state, reason), "{uid}");
        assert_eq!(rig.world.steps(&u(uid)), "", "{uid}");
    }
    rig.world.edit(&u("no-ip"), |pod| pod.ips = vec!["fd00::1".parse().unwrap()]);
    rig.until("its address has come", enrolled("no-ip")).await;
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pod_is_retracted_and_forgotten_without_a_patch() {
    let rig = Rig::new(one_in_the_mesh).await;
    rig.until("enrolled", enrolled("u")).await;
    rig.world.steps(&u("u"));
    rig.world.delete(&u("u"));
    rig.until("gone", gone("u")).await;
    rig.rest().await;
    assert_eq!(rig.world.steps(&u("u")), "retract forget");
    assert_eq!(rig.world.sim(&u("u")), Sim::default());
}

#[tokio::test(start_paused = true)]
async fn a_successor_under_the_same_name_is_another_pod() {
    let rig = Rig::new(one_in_the_mesh).await;
    rig.until("enrolled", enrolled("u")).await;
    // The watch misses the end of the first.
    rig.world.blind(true);
    rig.world.delete(&u("u"));
    rig.world.create(pod("u2", "a"));
    rig.world.blind(false);
    rig.until("the first has gone", gone("u")).await;
    rig.until("the second is enrolled", enrolled("u2")).await;
    assert!(rig.world.steps(&u("u")).ends_with("retract forget"));
    assert_eq!(rig.world.steps(&u("u2")), IN);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_ends_leaves_and_may_come_back() {
    let rig = Rig::new(one_in_the_mesh).await;
    rig.until("enrolled", enrolled("u")).await;
    rig.world.steps(&u("u"));
    // Kubernetes may post the end without addresses.
    rig.world.edit(&u("u"), |pod| {
        pod.terminal = true;
        pod.ips.clear();
    });
    rig.until("out", outside("u")).await;
    assert_eq!(rig.world.steps(&u("u")), "unannotate retract forget");
    assert_eq!(rig.world.annotation(&u("u")), None);
    rig.world.edit(&u("u"), |pod| {
        pod.terminal = false;
        pod.ips = vec!["10.0.0.2".parse().unwrap()];
    });
    rig.until("back", enrolled("u")).await;
}

#[tokio::test(start_paused = true)]
async fn a_label_that_flips_during_any_step_is_followed_after_it() {
    let second = Duration::from_secs(1);
    for step in IN.split(' ') {
        let rig = Rig::new(|world| {
            one_in_the_mesh(world);
            world.behave(move |_, now| if now == step { How::Takes(second) } else { How::Well });
        })
        .await;
        tokio::time::sleep(second / 2).await;
        assert_eq!(rig.world.steps(&u("u")).split(' ').next_back(), Some(step));
        rig.world.label("ns", false);
        rig.until("out", outside("u")).await;
        rig.rest().await;
        assert_eq!((rig.world.annotation(&u("u")), rig.world.sim(&u("u"))), (None, Sim::default()), "{step}");
        // And the other way round.
        rig.world.label("ns", true);
        rig.until("in", enrolled("u")).await;
    }
    for step in OUT.split(' ') {
        let rig = Rig::new(one_in_the_mesh).await;
        rig.until("enrolled", enrolled("u")).await;
        rig.world.behave(move |_, now| if now == step { How::Takes(second) } else { How::Well });
        rig.world.label("ns", false);
        tokio::time::sleep(second / 2).await;
        assert_eq!(rig.world.steps(&u("u")).split(' ').next_back(), Some(step));
        rig.world.label("ns", true);
        rig.until("in again", |rig| enrolled("u")(rig) && rig.world.annotation(&u("u")) == ENABLED).await;
        assert!(rig.world.sim(&u("u")).captured, "{step}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_deleted_during_any_step_is_forgotten_after_it() {
    let second = Duration::from_secs(1);
    for step in IN.split(' ') {
        let rig = Rig::new(|world| {
            one_in_the_mesh(world);
            world.behave(move |_, now| if now == step { How::Takes(second) } else { How::Well });
        })
        .await;
        tokio::time::sleep(second / 2).await;
        rig.world.delete(&u("u"));
        rig.until("gone", gone("u")).await;
        rig.rest().await;
        assert_eq!(rig.world.sim(&u("u")), Sim::default(), "{step}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_ztunnel_pods_are_pending_and_enrolled_as_soon_as_it_comes() {
    let mut rig = Rig::new(|world| {
        one_in_the_mesh(world);
        world.ztunnel(false);
    })
    .await;
    rig.until("pending", pending("u")).await;
    assert_eq!(rig.world.annotation(&u("u")), PENDING);
    rig.rest().await;
    let view = rig.view(&u("u"));
    assert_eq!((view.reason, view.last_error.unwrap().reason), (Reason::NoZtunnel, Reason::NoZtunnel));
    assert!(!rig.world.sim(&u("u")).captured, "nothing is captured that nobody listens for");
    let told: Vec<_> = rig.told().into_iter().map(|notice| notice.what).collect();
    let [What::Stuck { step: Step::Publish, failure }] = &told[..] else { panic!("{told:?}") };
    assert_eq!(failure.reason, Reason::NoZtunnel);

    let steps = rig.world.steps(&u("u"));
    assert_eq!(steps.matches("annotate_pending").count(), 1, "{steps}");
    let attempts = steps.matches("publish").count();
    // 5, 10, 20 … ms up to 15 s, each up to a half shorter, and one more for the echo of `pending`.
    assert!((14..=24).contains(&attempts), "{attempts} attempts in a minute");

    rig.world.ztunnel(true);
    rig.handle.retry_now();
    let start = tokio::time::Instant::now();
    rig.until("enrolled", enrolled("u")).await;
    assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_captured_pod_stays_captured_when_ztunnel_goes() {
    let rig = Rig::new(one_in_the_mesh).await;
    rig.until("enrolled", enrolled("u")).await;
    rig.world.steps(&u("u"));
    rig.world.ztunnel(false);
    rig.handle.recheck([u("u")]);
    rig.rest().await;
    assert_eq!(rig.world.steps(&u("u")), "verify");
    assert!(rig.world.sim(&u("u")).captured);
    assert_eq!(rig.world.annotation(&u("u")), ENABLED);
}

#[tokio::test(start_paused = true)]
async fn other_pods_do_not_wait_for_one_that_hangs() {
    let hang = Duration::from_secs(3600);
    let rig = Rig::new(|world| {
        world.label("ns", true);
        for n in 0..100 {
            world.create(pod(&format!("u{n}"), &format!("p{n}")));
        }
        world.behave(move |uid, step| match (uid.as_str(), step) {
            ("u0", "prepare") => How::Takes(hang),
            _ => How::Takes(Duration::from_millis(10)),
        });
    })
    .await;
    let start = tokio::time::Instant::now();
    let count = |rig: &Rig| rig.handle.views().count().get(&(State::Enrolled, Reason::Selected)).copied();
    rig.until("99 enrolled", |rig| count(rig) == Some(99)).await;
    // 100 pods, 16 at a time, six steps of 10 ms each: 420 ms if the hanging one took no place at all.
    assert!(start.elapsed() < Duration::from_millis(550), "{:?}", start.elapsed());
    rig.until("said to be slow", |rig| rig.view(&u("u0")).slow == Some(Step::Prepare)).await;
    assert_eq!(rig.view(&u("u0")).state, State::Enrolling);
}

#[tokio::test(start_paused = true)]
async fn as_many_hanging_pods_as_there_are_places_do_not_stop_the_others() {
    let rig = Rig::new(|world| {
        world.label("ns", true);
        for n in 0..40 {
            world.create(pod(&format!("u{n:02}"), &format!("p{n}")));
        }
        world.behave(|uid, step| match (uid.as_str() < "u20", step) {
            (true, "locate") => How::Takes(Duration::from_secs(3600)),
            _ => How::Well,
        });
    })
    .await;
    let count = |rig: &Rig| rig.handle.views().count().get(&(State::Enrolled, Reason::Selected)).copied();
    rig.until("the 20 others are enrolled", |rig| count(rig) == Some(20)).await;
}

#[tokio::test(start_paused = true)]
async fn never_more_pods_at_once_than_allowed() {
    let rig = Rig::new(|world| {
        world.label("ns", true);
        for n in 0..100 {
            world.create(pod(&format!("u{n}"), &format!("p{n}")));
        }
        world.behave(|_, _| How::Takes(Duration::from_millis(100)));
    })
    .await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(rig.world.sims().len(), 16);
}

#[tokio::test(start_paused = true)]
async fn pods_of_an_earlier_agent_are_verified_not_torn_down() {
    let mut rig = Rig::new(|world| {
        world.label("ns", true);
        for uid in ["found", "lost", "unwanted", "ended"] {
            world.create(Pod { redirection: ENABLED, ..pod(uid, uid) });
        }
        world.edit(&u("unwanted"), |pod| pod.labels = mode("none"));
        world.edit(&u("ended"), |pod| pod.terminal = true);
        for uid in ["found", "unwanted", "ended", "deleted"] {
            world.left_captured(&u(uid), true);
        }
        world.left_captured(&u("lost"), false);
        world.create(Pod { redirection: ENABLED, ..pod("rebooted", "rebooted") });
    })
    .await;
    rig.rest().await;
    for (uid, steps) in [
        ("found", "publish verify"),
        ("lost", "locate prepare publish switch_on verify"),
        ("unwanted", OUT),
        ("ended", "unannotate retract forget"),
        ("deleted", "retract forget"),
        ("rebooted", &format!("annotate_pending {IN}")),
    ] {
        assert_eq!(rig.world.steps(&u(uid)), steps, "{uid}");
    }
    for uid in ["found", "lost", "rebooted"] {
        assert_eq!(rig.view(&u(uid)).state, State::Enrolled, "{uid}");
    }
    let told: Vec<_> = rig.told().into_iter().map(|it| (it.pod.uid.to_string(), it.what)).collect();
    let expected = [
        ("unwanted".into(), What::Unenrolled),
        ("ended".into(), What::Unenrolled),
        ("rebooted".into(), What::Enrolled { old_connections: 3 }),
    ];
    assert!(told.len() == expected.len() && expected.iter().all(|it| told.contains(it)), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn drift_is_repaired_and_told() {
    let mut rig = Rig::new(one_in_the_mesh).await;
    rig.until("enrolled", enrolled("u")).await;
    rig.world.steps(&u("u"));
    rig.told();
    rig.world.lose_capture(&u("u"));
    rig.handle.recheck([u("u")]);
    rig.rest().await;
    assert_eq!(rig.view(&u("u")).state, State::Enrolled);
    assert_eq!(rig.world.steps(&u("u")), format!("verify annotate_pending {IN}"));
    assert_eq!(rig.told().into_iter().map(|it| it.what).collect::<Vec<_>>(), [What::Repaired]);
}

#[tokio::test(start_paused = true)]
async fn an_annotation_taken_away_by_somebody_is_put_back() {
    let rig = Rig::new(one_in_the_mesh).await;
    rig.until("enrolled", enrolled("u")).await;
    rig.rest().await;
    rig.world.steps(&u("u"));
    for foreign in [None, PENDING] {
        rig.world.edit(&u("u"), |pod| pod.redirection = foreign);
        rig.rest().await;
        assert_eq!(rig.world.annotation(&u("u")), ENABLED);
        assert_eq!(rig.world.steps(&u("u")), "annotate_enabled");
    }
}

#[tokio::test(start_paused = true)]
async fn an_update_that_decides_nothing_costs_nothing() {
    let rig = Rig::new(|world| {
        one_in_the_mesh(world);
        world.create(pod("v", "b"));
    })
    .await;
    rig.until("enrolled", |rig| enrolled("u")(rig) && enrolled("v")(rig)).await;
    rig.world.edit(&u("v"), |pod| pod.labels = mode("none"));
    rig.until("out", outside("v")).await;
    rig.rest().await;
    for uid in ["u", "v"] {
        rig.world.steps(&u(uid));
        rig.world.edit(&u(uid), |pod| drop(pod.labels.insert("version".into(), "v2".into())));
    }
    rig.rest().await;
    assert_eq!((rig.world.steps(&u("u")).as_str(), rig.world.steps(&u("v")).as_str()), ("", ""));
}

/// Excluded while the agent was away: what an earlier one captured is let go of, and a pod that has gone meanwhile
/// is cleaned up after as anywhere else.
#[tokio::test(start_paused = true)]
async fn a_captured_pod_in_an_excluded_namespace_leaves_and_its_end_is_cleaned_up() {
    let rig = Rig::new(|world| {
        world.label("kube-system", true);
        for uid in ["stays", "goes"] {
            let mut excluded = Pod { redirection: ENABLED, labels: mode("ambient"), ..pod(uid, uid) };
            excluded.info.namespace = "kube-system".into();
            world.create(excluded);
            world.left_captured(&u(uid), true);
        }
        world.delete(&u("goes"));
    })
    .await;
    rig.rest().await;
    let view = rig.view(&u("stays"));
    assert_eq!((view.state, view.reason), (State::Outside, Reason::ExcludedNamespace));
    assert_eq!(rig.world.steps(&u("stays")), OUT);
    assert_eq!((rig.world.annotation(&u("stays")), rig.world.sim(&u("stays"))), (None, Sim::default()));
    assert_eq!(rig.world.steps(&u("goes")), "retract forget");
    assert!(gone("goes")(&rig));
}
