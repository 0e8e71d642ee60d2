//! The state machine of one pod: from what is wanted and what is established to the next step.
//!
//! It does nothing itself. Whoever drives it asks for the [next](Enrolment::next) step, says that it
//! [begins](Enrolment::begin), and reports how it [ended](Enrolment::end); between two steps it is told
//! the [aim](Enrolment::aim) again, so an aim that changes half-way is followed from the next step on.
//!
//! Into the mesh: locate, prepare, publish, switch on, verify, annotate. Out of it: un-annotate, drain,
//! retract, switch off. What must be undone is noted when a step begins, not when it has succeeded: a
//! step that failed may have done half of its work.

use std::sync::Arc;

use super::{
    reason::{Failure, Reason},
    workload::{Pod, Redirection},
};

mod annotation;
mod words;

use annotation::Annotation;
pub use words::{Goal, State, Step};

/// The machine.
#[derive(Debug)]
pub struct Enrolment {
    goal: Goal,
    generation: u64,
    /// The pod as the data path was last set up for.
    set_up_for: Option<Arc<Pod>>,
    annotation: Annotation,
    done: Done,
    undo: Undo,
    /// Why this attempt has ended early.
    failure: Option<Failure>,
    /// Why the last attempt failed; outlives the next attempt until one succeeds.
    last_failure: Option<Failure>,
    /// `pending` could not be written in this attempt. It must not hold up enrolment itself.
    pending_refused: bool,
}

/// What has been achieved on the way in.
#[derive(Debug, Default)]
struct Done {
    located: bool,
    prepared: bool,
    published: bool,
    switched_on: bool,
    verified: bool,
}

/// What is there, or may be, and so must be undone on the way out.
#[derive(Debug, Default)]
struct Undo {
    /// Something is pinned, or attached in the namespace.
    path: bool,
    /// A namespace is in hand.
    netns: bool,
    /// Connections may have been captured.
    steered: bool,
    /// New connections are, or may be, dropped.
    draining: bool,
    /// ztunnel may know the pod.
    ztunnel: bool,
    /// The pod was captured when last heard of. The only thing that allows `enabled` to stay.
    captured: bool,
}

impl Default for Enrolment {
    fn default() -> Self {
        Self {
            goal: Goal::Hold,
            generation: 0,
            set_up_for: None,
            annotation: Annotation::default(),
            done: Done::default(),
            undo: Undo::default(),
            failure: None,
            last_failure: None,
            pending_refused: false,
        }
    }
}

impl Enrolment {
    /// A pod that an earlier agent has worked on. If it left it captured, that holds until a check says
    /// otherwise, and the pod is published and verified again; else it is done anew. `netns`: its namespace
    /// is in hand.
    pub fn recovered(netns: bool, captured: bool) -> Self {
        let there = netns && captured;
        Self {
            done: Done { located: netns, prepared: there, switched_on: there, ..Done::default() },
            undo: Undo { path: true, netns, steered: true, draining: false, ztunnel: true, captured },
            ..Self::default()
        }
    }

    /// Takes in what is wanted now, and what the API server says of the pod (`None`: it is gone).
    pub fn aim(&mut self, goal: Goal, pod: Option<&Arc<Pod>>) {
        if goal != self.goal {
            self.goal = goal;
            self.generation += 1;
            self.last_failure = None;
            self.retry();
        }
        match pod {
            Some(pod) => self.annotation.observe(pod.redirection, pod.version),
            None => self.annotation = Annotation::default(),
        }
        if let (Goal::Enrol, Some(pod), Some(before)) = (goal, pod, &self.set_up_for)
            && !same_set_up(pod, before)
        {
            // Laid over what is there: capture does not pause for it, and `enabled` stays true.
            self.done = Done { prepared: false, switched_on: false, verified: false, ..self.done };
            self.set_up_for = None;
        }
    }

    /// Starts a new attempt.
    pub fn retry(&mut self) {
        self.failure = None;
        self.pending_refused = false;
    }

    /// Asks for what is established to be checked again.
    pub fn recheck(&mut self) {
        self.done.verified = false;
    }

    /// The next step; `None` when the aim is reached, or the attempt has [failed](Self::failed).
    pub fn next(&self) -> Option<Step> {
        match self.goal {
            Goal::Enrol => self.next_in(),
            Goal::Leave => self.next_out(),
            Goal::Forget => self.next_forget(),
            // Half-way out, new connections are being dropped: no state to stay in.
            Goal::Hold if self.undo.draining => self.next_out(),
            Goal::Hold => self.owes_pending().then_some(Step::Annotate(Some(Redirection::Pending))),
        }
    }

    fn next_in(&self) -> Option<Step> {
        let Done { located, prepared, published, switched_on, verified } = self.done;
        let enabled = Some(Redirection::Enabled);
        let steps = [
            (self.owes_pending(), Step::Annotate(Some(Redirection::Pending))),
            (!located, Step::Locate),
            (!prepared, Step::Prepare),
            (!published, Step::Publish),
            (!switched_on, Step::SwitchOn),
            (!verified, Step::Verify),
            (!self.annotation.is(enabled), Step::Annotate(enabled)),
        ];
        // After a failure, saying so is all that is left of an attempt.
        let left = if self.failure.is_some() { &steps[..1] } else { &steps[..] };
        left.iter().find_map(|(due, step)| due.then_some(*step))
    }

    fn next_out(&self) -> Option<Step> {
        let Undo { path, netns, steered, draining, ztunnel, .. } = self.undo;
        self.first_due([
            (!self.annotation.is(None), Step::Annotate(None)),
            (path && !netns, Step::Locate),
            (steered && !draining, Step::Drain),
            (ztunnel, Step::Retract),
            (path, Step::SwitchOff),
        ])
    }

    fn next_forget(&self) -> Option<Step> {
        self.first_due([
            (!self.annotation.is(None), Step::Annotate(None)),
            (self.undo.ztunnel, Step::Retract),
            (self.undo.path, Step::Forget),
        ])
    }

    fn first_due<const N: usize>(&self, steps: [(bool, Step); N]) -> Option<Step> {
        if self.failure.is_some() {
            return None;
        }
        steps.into_iter().find_map(|(due, step)| due.then_some(step))
    }

    /// Must the annotation be taken back to `pending`?
    fn owes_pending(&self) -> bool {
        let enabled = self.annotation.may_be(Some(Redirection::Enabled));
        let untrue = enabled && !self.undo.captured;
        let failed = self.failure.as_ref().is_some_and(|failure| match failure.reason {
            // A captured pod without a ztunnel refuses connections, and is the same pod as before as soon
            // as a ztunnel is back. Sending its peers to plaintext and back in the meantime helps nobody.
            Reason::NoZtunnel => !(enabled && self.undo.captured),
            // What could not be written just now will not be writable now.
            Reason::AnnotateFailed | Reason::Deleted => false,
            _ => true,
        });
        (untrue || failed) && !self.pending_refused && !self.annotation.is(Some(Redirection::Pending))
    }

    /// Notes that `step` begins: from here on its effect may exist.
    pub fn begin(&mut self, step: Step, pod: Option<&Arc<Pod>>) {
        match step {
            Step::Locate | Step::Verify | Step::Annotate(_) => {}
            Step::Prepare => {
                self.undo.path = true;
                self.set_up_for = pod.cloned();
            }
            Step::Publish => self.undo.ztunnel = true,
            Step::SwitchOn => {
                self.undo.path = true;
                self.undo.steered = true;
                self.undo.draining = false;
            }
            Step::Drain => {
                self.undo.draining = true;
                self.undo.captured = false;
                self.done = Done { prepared: false, switched_on: false, verified: false, ..self.done };
            }
            Step::Retract => self.done = Done { published: false, verified: false, ..self.done },
            Step::SwitchOff | Step::Forget => {
                self.undo.captured = false;
                self.done = Done { located: false, published: self.done.published, ..Done::default() };
            }
        }
    }

    /// Takes in how `step` ended.
    pub fn end(&mut self, step: Step, result: Result<(), Failure>) {
        match result {
            Ok(()) => self.succeeded(step),
            Err(failure) => self.broke_off(step, failure),
        }
        if self.reached() {
            self.last_failure = None;
        }
    }

    fn succeeded(&mut self, step: Step) {
        match step {
            Step::Locate => {
                self.done.located = true;
                self.undo.netns = true;
            }
            Step::Prepare => self.done.prepared = true,
            Step::Publish => self.done.published = true,
            Step::SwitchOn => {
                self.done.switched_on = true;
                self.undo.captured = true;
            }
            Step::Verify => self.done.verified = true,
            // See `annotated`.
            Step::Annotate(_) | Step::Drain => {}
            Step::Retract => self.undo.ztunnel = false,
            Step::SwitchOff | Step::Forget => {
                let ztunnel = self.undo.ztunnel;
                self.undo = Undo { ztunnel, ..Undo::default() };
                self.set_up_for = None;
            }
        }
    }

    /// The annotation says `value` since this version of the pod. Comes before the end of its step.
    pub fn annotated(&mut self, value: Option<Redirection>, version: u64) {
        self.annotation.wrote(value, version);
    }

    fn broke_off(&mut self, step: Step, failure: Failure) {
        if matches!(step, Step::Annotate(_)) {
            self.annotation.write_failed();
        }
        match step {
            Step::Annotate(Some(Redirection::Pending)) => {
                self.pending_refused = true;
                // Entering the mesh goes on all the same. A pod that only waits has nothing else to do.
                if self.goal == Goal::Enrol {
                    return;
                }
            }
            // Whatever was lost: all of it is done again, from the search for the namespace on.
            Step::Verify => {
                self.done = Done::default();
                self.undo.captured = false;
            }
            // Half a drain is no drain.
            Step::Drain => self.undo.draining = false,
            _ => {}
        }
        self.last_failure = Some(failure.clone());
        self.failure = Some(failure);
    }

    /// Has this attempt failed, so that another is due after a while?
    pub fn failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Nothing is left to do, nor to repeat.
    pub fn reached(&self) -> bool {
        self.failure.is_none() && self.next().is_none()
    }

    /// Something of ours is there, or may be.
    pub fn holds_anything(&self) -> bool {
        self.undo.path || self.undo.ztunnel
    }

    /// Counts changes of direction.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Why the last attempt failed, until one succeeds.
    pub fn last_failure(&self) -> Option<&Failure> {
        self.last_failure.as_ref()
    }

    /// Where the pod stands.
    pub fn state(&self) -> State {
        match self.goal {
            Goal::Enrol if self.last_failure.is_some() => State::Pending,
            Goal::Enrol if self.reached() => State::Enrolled,
            Goal::Enrol => State::Enrolling,
            Goal::Hold if self.undo.draining => State::Leaving,
            Goal::Hold if self.done.verified => State::Enrolled,
            Goal::Hold => State::Waiting,
            Goal::Leave | Goal::Forget if self.reached() => State::Outside,
            Goal::Leave | Goal::Forget => State::Leaving,
        }
    }
}

/// Would the data path be set up alike for both? The annotation weir writes itself does not count, nor do
/// labels: they decide whether, not how.
fn same_set_up(a: &Pod, b: &Pod) -> bool {
    a.annotations == b.annotations && a.ips == b.ips
}

#[cfg(test)]
#[path = "enrolment/tests.rs"]
mod tests;
