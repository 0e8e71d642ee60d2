//! Failures a test asks for.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// How the server is out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// Every request is answered with this status.
    Status(u16),
    /// Connections are accepted and closed at once, as by a load balancer without a backend.
    Close,
    /// Nothing listens: connections are refused.
    Refuse,
}

/// Requests still to fail.
struct Planned {
    verb: Option<String>,
    resource: Option<String>,
    left: usize,
    code: u16,
}

#[derive(Default)]
struct State {
    outage: Option<Outage>,
    planned: Vec<Planned>,
    delay: Duration,
}

/// The faults in force.
#[derive(Default)]
pub(super) struct Faults(Mutex<State>);

impl Faults {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_outage(&self, outage: Option<Outage>) {
        self.state().outage = outage;
    }

    pub(super) fn set_delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    pub(super) fn delay(&self) -> Duration {
        self.state().delay
    }

    /// The next `left` requests of that verb and resource (any, if absent) get `code`.
    pub(super) fn plan(&self, verb: Option<&str>, resource: Option<&str>, left: usize, code: u16) {
        let (verb, resource) = (verb.map(Into::into), resource.map(Into::into));
        self.state().planned.push(Planned { verb, resource, left, code });
    }

    pub(super) fn clear(&self) {
        let mut state = self.state();
        state.planned.clear();
        state.delay = Duration::ZERO;
    }

    /// The code this request must fail with, if any. Counts it.
    pub(super) fn strike(&self, verb: &str, resource: &str) -> Option<u16> {
        let mut state = self.state();
        if let Some(Outage::Status(code)) = state.outage {
            return Some(code);
        }
        let fits = |wanted: &Option<String>, is: &str| wanted.as_deref().is_none_or(|wanted| wanted == is);
        let planned = state
            .planned
            .iter_mut()
            .find(|one| one.left > 0 && fits(&one.verb, verb) && fits(&one.resource, resource))?;
        planned.left -= 1;
        let code = planned.code;
        state.planned.retain(|one| one.left > 0);
        Some(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planned_faults_are_used_up() {
        let faults = Faults::default();
        assert_eq!(faults.strike("get", "pods"), None);
        faults.plan(Some("patch"), Some("pods/status"), 2, 500);
        faults.plan(None, None, 1, 429);
        let strikes: Vec<_> = [("patch", "pods/status"), ("get", "pods"), ("get", "pods"), ("patch", "pods")]
            .into_iter()
            .chain([("patch", "pods/status"), ("patch", "pods/status")])
            .map(|(verb, resource)| faults.strike(verb, resource))
            .collect();
        assert_eq!(strikes, [Some(500), Some(429), None, None, Some(500), None]);
    }

    #[test]
    fn an_outage_comes_first_and_uses_nothing_up() {
        let faults = Faults::default();
        faults.plan(None, None, 1, 500);
        faults.set_outage(Some(Outage::Status(503)));
        assert_eq!(faults.strike("get", "pods"), Some(503));
        faults.set_outage(None);
        assert_eq!(faults.strike("get", "pods"), Some(500));
        assert_eq!(faults.strike("get", "pods"), None);
    }
}
