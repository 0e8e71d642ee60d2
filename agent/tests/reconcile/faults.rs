//! Every step, each way it can go wrong.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use weir_agent::domain::{
    enrolment::{State, Step},
    reason::Reason,
    workload::{PodUid, Redirection},
};

use crate::{
    rig::Rig,
    world::{ENABLED, How, PENDING, Sim, pod},
};

const IN: [&str; 6] = ["locate", "prepare", "publish", "switch_on", "verify", "annotate_enabled"];
const OUT: [&str; 4] = ["unannotate", "drain", "retract", "switch_off"];
const GONE: [&str; 2] = ["retract", "forget"];

const FAULTS: [How; 4] =
    [How::Fails, How::FailsAfterwards, How::Takes(Duration::from_secs(4)), How::NeverAnswers];

/// Only what waits for somebody else may be given up while it is under way: the rest runs on a thread that
/// cannot be stopped.
fn applies(step: &str, fault: How) -> bool {
    fault != How::NeverAnswers || ["publish", "retract", "annotate_enabled", "unannotate"].contains(&step)
}

fn uid() -> PodUid {
    "u".into()
}

fn state(rig: &Rig) -> Option<State> {
    rig.handle.views().get(&uid()).map(|view| view.state)
}

/// `step` goes wrong `times` times; once if it does its work all the same, and nothing is left to repeat.
fn go_wrong(rig: &Rig, step: &'static str, fault: How, times: u32) -> Arc<AtomicU32> {
    let seen_to_work = step.contains("annotate") && fault != How::Fails;
    let times = if seen_to_work || matches!(fault, How::Takes(_)) { 1 } else { times };
    let left = Arc::new(AtomicU32::new(times));
    let counter = Arc::clone(&left);
    rig.world.behave(move |_, now| {
        let due = now == step
            && counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        if due { fault } else { How::Well }
    });
    left
}

/// A rig whose pod is enrolled already.
async fn enrolled() -> Rig {
    let rig = Rig::new(|world| {
        world.label("ns", true);
        world.create(pod("u", "a"));
    })
    .await;
    rig.until("enrolled", |rig| state(rig) == Some(State::Enrolled)).await;
    rig
}

#[tokio::test(start_paused = true)]
async fn every_step_in_goes_wrong_then_well() {
    for step in IN {
        for fault in FAULTS.into_iter().filter(|fault| applies(step, *fault)) {
            for times in [1, 3] {
                let rig = Rig::new(|world| world.create(pod("u", "a"))).await;
                let left = go_wrong(&rig, step, fault, times);
                rig.world.label("ns", true);
                rig.until("enrolled", |rig| state(rig) == Some(State::Enrolled)).await;
                assert_eq!(left.load(Ordering::SeqCst), 0, "{step} {fault:?}");
                rig.rest().await;
                assert_eq!(rig.world.annotation(&uid()), ENABLED, "{step} {fault:?}");
                let view = rig.view(&uid());
                assert_eq!((view.last_error, view.failed_attempts), (None, 0), "{step} {fault:?}");
                // And nothing is left of it all afterwards.
                rig.world.label("ns", false);
                rig.until("out", |rig| state(rig) == Some(State::Outside)).await;
                assert_eq!(rig.world.sim(&uid()), Sim::default(), "{step} {fault:?}");
                assert_eq!(rig.world.annotation(&uid()), None);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn while_a_step_in_keeps_failing_the_pod_is_pending_with_the_reason() {
    let table = [
        ("locate", Reason::NetnsNotFound),
        ("prepare", Reason::PrepareFailed),
        ("publish", Reason::ZtunnelRefused),
        ("switch_on", Reason::SwitchOnFailed),
        ("verify", Reason::VerifyFailed),
    ];
    for (step, reason) in table {
        let rig = Rig::new(|world| world.create(pod("u", "a"))).await;
        go_wrong(&rig, step, How::Fails, u32::MAX);
        rig.world.label("ns", true);
        rig.rest().await;
        let view = rig.view(&uid());
        assert_eq!((view.state, view.reason), (State::Pending, reason), "{step}");
        assert_eq!(rig.world.annotation(&uid()), PENDING, "{step}");
        let steps = rig.world.steps(&uid());
        assert_eq!(steps.matches("annotate_pending").count(), 1, "{step}: {steps}");
        // Its being pending does not keep it from leaving.
        rig.world.label("ns", false);
        rig.until("out", |rig| state(rig) == Some(State::Outside)).await;
        assert_eq!((rig.world.annotation(&uid()), rig.world.sim(&uid())), (None, Sim::default()), "{step}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_step_out_goes_wrong_then_well() {
    for step in OUT {
        for fault in FAULTS.into_iter().filter(|fault| applies(step, *fault)) {
            let rig = enrolled().await;
            let left = go_wrong(&rig, step, fault, 2);
            rig.world.label("ns", false);
            rig.until("out", |rig| state(rig) == Some(State::Outside)).await;
            rig.rest().await;
            assert_eq!(left.load(Ordering::SeqCst), 0, "{step} {fault:?}");
            assert_eq!((rig.world.annotation(&uid()), rig.world.sim(&uid())), (None, Sim::default()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_step_for_a_deleted_pod_goes_wrong_then_well() {
    for step in GONE {
        for fault in FAULTS.into_iter().filter(|fault| applies(step, *fault)) {
            let rig = enrolled().await;
            let left = go_wrong(&rig, step, fault, 2);
            rig.world.delete(&uid());
            rig.until("gone", |rig| state(rig).is_none()).await;
            assert_eq!(left.load(Ordering::SeqCst), 0, "{step} {fault:?}");
            assert_eq!(rig.world.sim(&uid()), Sim::default(), "{step} {fault:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_step_for_a_pod_that_has_ended_goes_wrong_then_well() {
    for step in ["unannotate", "retract", "forget"] {
        for fault in FAULTS.into_iter().filter(|fault| applies(step, *fault)) {
            let rig = enrolled().await;
            let left = go_wrong(&rig, step, fault, 2);
            rig.world.edit(&uid(), |pod| pod.terminal = true);
            rig.until("out", |rig| state(rig) == Some(State::Outside)).await;
            rig.rest().await;
            assert_eq!(left.load(Ordering::SeqCst), 0, "{step} {fault:?}");
            assert_eq!((rig.world.annotation(&uid()), rig.world.sim(&uid())), (None, Sim::default()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_step_out_that_keeps_failing_stops_those_behind_it() {
    let rig = enrolled().await;
    rig.world.steps(&uid());
    go_wrong(&rig, "unannotate", How::Fails, u32::MAX);
    rig.world.label("ns", false);
    rig.rest().await;
    let steps = rig.world.steps(&uid());
    assert!(steps.split(' ').all(|step| step == "unannotate"), "{steps}");
    assert!(rig.world.sim(&uid()).captured, "peers still send HBONE");
    assert_eq!(rig.view(&uid()).reason, Reason::AnnotateFailed);
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_step_is_a_failure_of_that_step() {
    for step in IN {
        let rig = Rig::new(|world| world.create(pod("u", "a"))).await;
        go_wrong(&rig, step, How::Panics, 1);
        rig.world.label("ns", true);
        rig.until("enrolled", |rig| state(rig) == Some(State::Enrolled)).await;
    }
}

/// The seam itself: each step of the plan by its name, failing and hanging.
#[tokio::test(start_paused = true)]
async fn the_fault_plan_reaches_every_step() {
    for step in Step::ALL {
        for fault in ["fail*2", "hang:2500"] {
            let plan = format!("{}={fault}", step.as_str());
            let rig = Rig::with_faults(&plan, |world| {
                world.label("ns", true);
                world.create(pod("u", "a"));
                // Something has to go wrong for `pending` to be written.
                if step == Step::Annotate(Some(Redirection::Pending)) {
                    world.ztunnel(false);
                }
            })
            .await;
            tokio::time::sleep(Duration::from_secs(10)).await;
            rig.world.ztunnel(true);
            rig.until("enrolled", |rig| state(rig) == Some(State::Enrolled)).await;
            if step == Step::Forget {
                rig.world.delete(&uid());
                rig.until("gone", |rig| state(rig).is_none()).await;
            } else {
                rig.world.label("ns", false);
                rig.until("out", |rig| state(rig) == Some(State::Outside)).await;
            }
            assert_eq!(rig.world.sim(&uid()), Sim::default(), "{plan}");
        }
    }
}
