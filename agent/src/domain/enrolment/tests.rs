use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::domain::eligibility::Decision;
use crate::domain::workload::testing::pod as plain_pod;

const ENABLED: Option<Redirection> = Some(Redirection::Enabled);
const PENDING: Option<Redirection> = Some(Redirection::Pending);

/// Versions of the pod.
static NEW: AtomicU64 = AtomicU64::new(1);

fn pod(redirection: Option<Redirection>) -> Arc<Pod> {
    let version = NEW.fetch_add(1, Ordering::Relaxed);
    Arc::new(Pod { redirection, version, ..plain_pod("u", "ns", "a") })
}

fn aimed(goal: Goal, redirection: Option<Redirection>) -> Enrolment {
    let mut machine = Enrolment::default();
    machine.aim(goal, Some(&pod(redirection)));
    machine
}

/// Takes the next step successfully.
fn step(machine: &mut Enrolment) -> Option<Step> {
    let next = machine.next()?;
    machine.begin(next, Some(&pod(None)));
    if let Step::Annotate(value) = next {
        machine.annotated(value, NEW.fetch_add(1, Ordering::Relaxed));
    }
    machine.end(next, Ok(()));
    Some(next)
}

/// Takes the next step, which fails.
fn fail(machine: &mut Enrolment, reason: Reason) -> Step {
    let next = machine.next().expect("a step to fail");
    machine.begin(next, Some(&pod(None)));
    machine.end(next, Err(Failure::new(reason, "test")));
    next
}

/// The words for all steps up to the end.
fn walk(machine: &mut Enrolment) -> String {
    let steps: Vec<_> = std::iter::from_fn(|| step(machine)).map(Step::as_str).collect();
    steps.join(" ")
}

fn enrolled() -> Enrolment {
    let mut machine = aimed(Goal::Enrol, None);
    walk(&mut machine);
    assert_eq!(machine.state(), State::Enrolled);
    machine
}

const IN: &str = "locate prepare publish switch_on verify annotate_enabled";
const OUT: &str = "unannotate drain retract switch_off";

#[test]
fn in_and_out_again() {
    let mut machine = aimed(Goal::Enrol, None);
    assert_eq!(machine.state(), State::Enrolling);
    assert_eq!(walk(&mut machine), IN);
    assert_eq!(machine.state(), State::Enrolled);
    assert!(machine.reached() && machine.holds_anything());

    machine.aim(Goal::Leave, Some(&pod(ENABLED)));
    assert_eq!(machine.state(), State::Leaving);
    assert_eq!(walk(&mut machine), OUT);
    assert_eq!(machine.state(), State::Outside);
    assert!(machine.reached() && !machine.holds_anything());

    machine.aim(Goal::Enrol, Some(&pod(None)));
    assert_eq!(walk(&mut machine), IN);
    assert_eq!(machine.generation(), 3);
}

#[test]
fn where_there_is_nothing_there_is_nothing_to_do() {
    for goal in [Goal::Leave, Goal::Forget, Goal::Hold] {
        assert_eq!(aimed(goal, None).next(), None, "{goal:?}");
    }
}

#[test]
fn a_pod_that_is_gone_is_retracted_and_forgotten() {
    let mut machine = enrolled();
    machine.aim(Goal::Forget, None);
    assert_eq!(walk(&mut machine), "retract forget");
    assert!(machine.reached() && !machine.holds_anything());
}

#[test]
fn a_pod_that_has_ended_loses_its_annotation_and_may_come_back() {
    let mut machine = enrolled();
    machine.aim(Goal::Forget, Some(&pod(ENABLED)));
    assert_eq!(walk(&mut machine), "unannotate retract forget");
    machine.aim(Goal::Enrol, Some(&pod(None)));
    assert_eq!(walk(&mut machine), IN);
}

/// Every failure on the way in is answered by `pending`, once, and the next attempt goes on where this one
/// broke off.
#[test]
fn each_step_in_may_fail() {
    let steps: Vec<_> = IN.split(' ').collect();
    for failing in 0..steps.len() - 1 {
        let mut machine = aimed(Goal::Enrol, None);
        for expected in &steps[..failing] {
            assert_eq!(step(&mut machine).unwrap().as_str(), *expected);
        }
        let failed = fail(&mut machine, Reason::PrepareFailed);
        assert!(machine.failed());
        assert_eq!(walk(&mut machine), "annotate_pending", "{failed:?}");
        assert_eq!(machine.state(), State::Pending);
        for _ in 0..3 {
            machine.retry();
            // A failed check starts over; the fake failure then hits the search for the namespace.
            fail(&mut machine, Reason::PrepareFailed);
            assert_eq!(machine.next(), None, "pending is written once");
        }
        machine.retry();
        let rest = if failed == Step::Verify { &steps[..] } else { &steps[failing..] };
        assert_eq!(walk(&mut machine), rest.join(" "), "after {failed:?}");
        assert_eq!((machine.state(), machine.last_failure()), (State::Enrolled, None));
    }
}

/// Each step out stops the ones after it until it has succeeded: to go on would let plaintext out.
#[test]
fn each_step_out_may_fail() {
    let steps: Vec<_> = OUT.split(' ').collect();
    for failing in 0..steps.len() {
        let mut machine = enrolled();
        machine.aim(Goal::Leave, Some(&pod(ENABLED)));
        for _ in 0..failing {
            step(&mut machine);
        }
        for _ in 0..3 {
            machine.retry();
            assert_eq!(fail(&mut machine, Reason::SwitchOffFailed).as_str(), steps[failing]);
            assert_eq!(machine.next(), None);
            assert_eq!(machine.state(), State::Leaving);
        }
        machine.retry();
        assert_eq!(walk(&mut machine), steps[failing..].join(" "));
    }
}

/// A step that failed may have done half its work, so it is undone like one that succeeded.
#[test]
fn what_was_tried_is_undone() {
    for (steps, expected) in [
        (0, ""),
        (1, "switch_off"),
        (2, "retract switch_off"),
        (3, "drain retract switch_off"),
        (4, "drain retract switch_off"),
    ] {
        let mut machine = aimed(Goal::Enrol, None);
        for _ in 0..steps {
            step(&mut machine);
        }
        let failed = fail(&mut machine, Reason::Internal);
        machine.aim(Goal::Leave, Some(&pod(None)));
        assert_eq!(walk(&mut machine), expected, "after {failed:?} failed");
        assert!(!machine.holds_anything());
    }
}

#[test]
fn an_aim_that_changes_halfway_in_is_followed_at_once() {
    let mut machine = aimed(Goal::Enrol, None);
    for _ in 0..3 {
        step(&mut machine);
    }
    machine.aim(Goal::Leave, Some(&pod(None)));
    assert_eq!(walk(&mut machine), "retract switch_off");
}

#[test]
fn an_aim_that_changes_halfway_out_is_followed_at_once() {
    for (steps, expected) in [
        (0, ""),
        (1, "annotate_enabled"),
        (2, "prepare switch_on verify annotate_enabled"),
        (3, "prepare publish switch_on verify annotate_enabled"),
        (4, IN),
    ] {
        let mut machine = enrolled();
        machine.aim(Goal::Leave, Some(&pod(ENABLED)));
        for _ in 0..steps {
            step(&mut machine);
        }
        let annotation = if steps == 0 { ENABLED } else { None };
        machine.aim(Goal::Enrol, Some(&pod(annotation)));
        assert_eq!(walk(&mut machine), expected, "after {steps} steps out");
        assert_eq!(machine.state(), State::Enrolled);
    }
}

#[test]
fn enabled_is_never_trusted() {
    // A node that was rebooted: nothing is attached, the annotation says otherwise.
    let mut machine = aimed(Goal::Enrol, ENABLED);
    assert_eq!(walk(&mut machine), format!("annotate_pending {IN}"));
    // Also while the pod waits for its address.
    let mut machine = aimed(Goal::Hold, ENABLED);
    assert_eq!(walk(&mut machine), "annotate_pending");
    // And where it should not be at all.
    let mut machine = aimed(Goal::Leave, ENABLED);
    assert_eq!(walk(&mut machine), "unannotate");
}

#[test]
fn a_pending_that_cannot_be_written_does_not_hold_up_enrolment() {
    let mut machine = aimed(Goal::Enrol, ENABLED);
    assert_eq!(fail(&mut machine, Reason::AnnotateFailed).as_str(), "annotate_pending");
    // Whether it was written after all is not known.
    assert_eq!(walk(&mut machine), IN);
    // A pod that waits has nothing better to do than to try again.
    let mut machine = aimed(Goal::Hold, ENABLED);
    fail(&mut machine, Reason::AnnotateFailed);
    assert!(machine.failed());
}

#[test]
fn a_captured_pod_stays_captured_and_enabled_while_there_is_no_ztunnel() {
    let mut machine = Enrolment::recovered(true, true);
    machine.aim(Goal::Enrol, Some(&pod(ENABLED)));
    assert_eq!(fail(&mut machine, Reason::NoZtunnel).as_str(), "publish");
    assert_eq!((machine.next(), machine.state()), (None, State::Pending));
    machine.retry();
    assert_eq!(walk(&mut machine), "publish verify");
    assert_eq!(machine.state(), State::Enrolled);
    // A ztunnel that refuses is another matter.
    let mut machine = Enrolment::recovered(true, true);
    machine.aim(Goal::Enrol, Some(&pod(ENABLED)));
    fail(&mut machine, Reason::ZtunnelRefused);
    assert_eq!(walk(&mut machine), "annotate_pending");
}

#[test]
fn recovered_pods_are_checked_not_torn_down() {
    for (netns, goal, annotation, expected) in [
        (true, Goal::Enrol, ENABLED, "publish verify"),
        (true, Goal::Enrol, None, "publish verify annotate_enabled"),
        (false, Goal::Enrol, ENABLED, "locate prepare publish switch_on verify"),
        (true, Goal::Leave, ENABLED, OUT),
        (false, Goal::Leave, ENABLED, "unannotate locate drain retract switch_off"),
        (true, Goal::Hold, ENABLED, ""),
        (false, Goal::Hold, ENABLED, ""),
    ] {
        let mut machine = Enrolment::recovered(netns, true);
        machine.aim(goal, Some(&pod(annotation)));
        assert_eq!(walk(&mut machine), expected, "netns {netns}, {goal:?}, {annotation:?}");
    }
    // Something is there, but not all of it.
    let mut machine = Enrolment::recovered(true, false);
    machine.aim(Goal::Enrol, Some(&pod(ENABLED)));
    assert_eq!(walk(&mut machine), "annotate_pending prepare publish switch_on verify annotate_enabled");
    let mut machine = Enrolment::recovered(false, true);
    machine.aim(Goal::Forget, None);
    assert_eq!(walk(&mut machine), "retract forget");
}

#[test]
fn drift_is_repaired_from_the_search_for_the_namespace_on() {
    let mut machine = enrolled();
    machine.recheck();
    assert_eq!(walk(&mut machine), "verify");
    machine.recheck();
    assert_eq!(fail(&mut machine, Reason::VerifyFailed).as_str(), "verify");
    assert_eq!(walk(&mut machine), "annotate_pending");
    machine.retry();
    assert_eq!(walk(&mut machine), IN);
    // Found lost, and not wanted any more before it was repaired: the namespace in hand is good enough.
    machine.recheck();
    fail(&mut machine, Reason::VerifyFailed);
    machine.aim(Goal::Leave, Some(&pod(ENABLED)));
    assert_eq!(walk(&mut machine), OUT);
}

#[test]
fn a_pod_that_waits_keeps_what_it_has_unless_it_was_on_its_way_out() {
    let mut machine = enrolled();
    machine.aim(Goal::Hold, Some(&pod(ENABLED)));
    assert_eq!((machine.next(), machine.state()), (None, State::Enrolled));
    machine.aim(Goal::Enrol, Some(&pod(ENABLED)));
    assert_eq!((machine.next(), machine.state()), (None, State::Enrolled));

    machine.aim(Goal::Leave, Some(&pod(ENABLED)));
    step(&mut machine);
    step(&mut machine);
    machine.aim(Goal::Hold, Some(&pod(None)));
    assert_eq!(machine.state(), State::Leaving);
    assert_eq!(walk(&mut machine), "retract switch_off");
    assert_eq!(machine.state(), State::Waiting);
}

#[test]
fn what_a_pod_asks_for_is_applied_when_it_changes() {
    let mut machine = enrolled();
    let mut changed = plain_pod("u", "ns", "a");
    changed.redirection = ENABLED;
    changed.version = u64::MAX;
    machine.aim(Goal::Enrol, Some(&Arc::new(changed.clone())));
    assert_eq!(machine.next(), None, "its own annotation is not a change");
    changed.labels.insert("a".into(), "b".into());
    machine.aim(Goal::Enrol, Some(&Arc::new(changed.clone())));
    assert_eq!(machine.next(), None, "nor is a label");
    changed.annotations.insert("ambient.istio.io/dns-capture".into(), "false".into());
    machine.aim(Goal::Enrol, Some(&Arc::new(changed)));
    assert_eq!(walk(&mut machine), "prepare switch_on verify");
}

#[test]
fn an_annotation_lost_to_somebody_else_is_written_again() {
    let mut machine = enrolled();
    for seen in [ENABLED, None] {
        machine.aim(Goal::Enrol, Some(&pod(seen)));
    }
    assert_eq!(walk(&mut machine), "annotate_enabled");
    for seen in [ENABLED, PENDING] {
        machine.aim(Goal::Enrol, Some(&pod(seen)));
    }
    assert_eq!(walk(&mut machine), "annotate_enabled");
}

#[test]
fn decisions_become_goals() {
    for (decision, goal) in [
        (None, Goal::Forget),
        (Some(Decision::Leave(Reason::Terminal)), Goal::Forget),
        (Some(Decision::Leave(Reason::NotSelected)), Goal::Leave),
        (Some(Decision::Leave(Reason::ExcludedNamespace)), Goal::Leave),
        (Some(Decision::Wait(Reason::NoAddress)), Goal::Hold),
        (Some(Decision::Enrol), Goal::Enrol),
    ] {
        assert_eq!(Goal::from(decision), goal, "{decision:?}");
    }
}
