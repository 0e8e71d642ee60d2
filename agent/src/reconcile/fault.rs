//! The seam at which tests make steps fail or hang.

use std::{
    str::FromStr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use crate::domain::{
    enrolment::Step,
    reason::{Failure, Reason},
    workload::Pod,
};

/// Faults to be played, in the order they were given. Written as
/// `STEP[@POD]=fail[*TIMES]` or `STEP[@POD]=hang:MILLISECONDS[*TIMES]`, several separated by commas:
/// `publish=fail*2,switch_on@web-0=hang:3000`. Without `TIMES`, once; `*0` means for ever.
#[derive(Debug, Default)]
pub struct FaultPlan(Mutex<Vec<Rule>>);

#[derive(Debug)]
struct Rule {
    step: Step,
    /// Any pod when `None`.
    pod: Option<String>,
    fault: Fault,
    /// For ever when `None`.
    left: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Fail,
    Hang(Duration),
}

/// A plan that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("fault {text:?}: {problem}; expected STEP[@POD]=fail[*TIMES] or STEP[@POD]=hang:MS[*TIMES]")]
pub struct FaultPlanError {
    text: String,
    problem: &'static str,
}

impl FaultPlan {
    /// To be called before `step` is taken for `pod` (`None`: gone, known by UID only).
    pub async fn before(&self, step: Step, pod: Option<&Pod>) -> Result<(), Failure> {
        match self.next(step, pod) {
            None => Ok(()),
            Some(Fault::Fail) => {
                Err(Failure::new(Reason::Fault, format!("{} was made to fail", step.as_str())))
            }
            Some(Fault::Hang(time)) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
        }
    }

    fn next(&self, step: Step, pod: Option<&Pod>) -> Option<Fault> {
        let mut rules = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let name = pod.map(|pod| &pod.info.name);
        let applies = |rule: &Rule| rule.step == step && (rule.pod.is_none() || rule.pod.as_ref() == name);
        let at = rules.iter().position(applies)?;
        let rule = &mut rules[at];
        let fault = rule.fault;
        if let Some(left) = &mut rule.left {
            *left -= 1;
            if *left == 0 {
                rules.remove(at);
            }
        }
        Some(fault)
    }
}

impl FromStr for FaultPlan {
    type Err = FaultPlanError;

    fn from_str(text: &str) -> Result<Self, FaultPlanError> {
        let rules =
            text.split(',').map(str::trim).filter(|rule| !rule.is_empty()).map(|rule| {
                read_rule(rule).map_err(|problem| FaultPlanError { text: rule.to_owned(), problem })
            });
        Ok(Self(Mutex::new(rules.collect::<Result<_, _>>()?)))
    }
}

fn read_rule(text: &str) -> Result<Rule, &'static str> {
    let (what, fault) = text.split_once('=').ok_or("no '='")?;
    let (step, pod) = match what.split_once('@') {
        Some((step, pod)) => (step, Some(pod.to_owned())),
        None => (what, None),
    };
    let step = Step::ALL.into_iter().find(|known| known.as_str() == step).ok_or("no such step")?;
    let (fault, times) = fault.split_once('*').unwrap_or((fault, "1"));
    let left = match times.parse().map_err(|_| "TIMES is not a number")? {
        0 => None,
        times => Some(times),
    };
    let fault = match fault.split_once(':') {
        None if fault == "fail" => Fault::Fail,
        Some(("hang", ms)) => {
            Fault::Hang(Duration::from_millis(ms.parse().map_err(|_| "MS is not a number")?))
        }
        _ => return Err("neither fail nor hang"),
    };
    Ok(Rule { step, pod, fault, left })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::workload::testing::pod;

    #[tokio::test(start_paused = true)]
    async fn plays_what_was_written() {
        let plan: FaultPlan = "publish=fail*2, verify@a=hang:500, drain=fail*0".parse().unwrap();
        let (a, b) = (pod("u1", "ns", "a"), pod("u2", "ns", "b"));
        for _ in 0..2 {
            assert_eq!(plan.before(Step::Publish, Some(&a)).await.unwrap_err().reason, Reason::Fault);
        }
        assert_eq!(plan.before(Step::Publish, Some(&a)).await, Ok(()));
        let start = tokio::time::Instant::now();
        assert_eq!(plan.before(Step::Verify, Some(&b)).await, Ok(()));
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!(plan.before(Step::Verify, Some(&a)).await, Ok(()));
        assert_eq!(start.elapsed(), Duration::from_millis(500));
        for _ in 0..9 {
            assert!(plan.before(Step::Drain, None).await.is_err());
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        for text in ["publish", "publish=", "nope=fail", "publish=fail*x", "publish=hang", "publish=hang:x"] {
            let error = text.parse::<FaultPlan>().unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!("".parse::<FaultPlan>().unwrap().0.into_inner().unwrap().is_empty());
    }
}
