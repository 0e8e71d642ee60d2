//! Tells users of a pod what happened to it, as Kubernetes Events. Best effort throughout.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{sync::mpsc, time::timeout};
use tracing::debug;

use super::rate::Rate;
use crate::domain::{
    config::AgentConfig,
    notice::{Notice, What},
};

const DEADLINE: Duration = Duration::from_secs(10);

/// The API server refuses a longer note.
const NOTE_MAX: usize = 1000;

/// Publishes what comes through `notices` until the other end is closed. One that cannot be published is
/// dropped.
pub async fn run(client: Client, config: AgentConfig, mut notices: mpsc::Receiver<Notice>) {
    let reporter = Reporter { controller: "weir".into(), instance: config.pod_name };
    let recorder = Recorder::new(client, reporter);
    let rate = Rate::new(Duration::from_millis(100), 50);
    while let Some(Notice { pod, what }) = notices.recv().await {
        rate.allow().await;
        let regarding = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(pod.info.name.clone()),
            namespace: Some(pod.info.namespace.clone()),
            uid: Some(pod.uid.to_string()),
            ..ObjectReference::default()
        };
        match timeout(DEADLINE, recorder.publish(&event(&what), &regarding)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "event not published"),
            Err(_) => debug!("event not published: no answer"),
        }
    }
}

fn event(what: &What) -> Event {
    let (type_, reason, action, mut note) = match what {
        What::Enrolled { old_connections: 0 } => {
            (EventType::Normal, "Enrolled", "Enrol", "The pod is in the mesh.".to_owned())
        }
        What::Enrolled { old_connections } => (
            EventType::Normal,
            "Enrolled",
            "Enrol",
            format!(
                "The pod is in the mesh. It was running before; {old_connections} of its connections \
                 are older and go on outside the mesh."
            ),
        ),
        What::Stuck { step, failure } => (
            EventType::Warning,
            "EnrolmentFailed",
            "Enrol",
            format!("{} failed and will be repeated: {failure}", step.as_str()),
        ),
        What::Repaired => (
            EventType::Warning,
            "Repaired",
            "Repair",
            "The pod had lost a part of its redirection; it is complete again.".to_owned(),
        ),
        What::BadAnnotation(bad) => (EventType::Warning, "BadAnnotation", "Enrol", bad.to_string()),
        What::Unenrolled => {
            (EventType::Normal, "Unenrolled", "Unenrol", "The pod has left the mesh.".to_owned())
        }
    };
    let end = note.floor_char_boundary(NOTE_MAX);
    note.truncate(end);
    Event { type_, reason: reason.into(), note: Some(note), action: action.into(), secondary: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        enrolment::Step,
        reason::{Failure, Reason},
    };

    #[test]
    fn a_failure_names_step_and_reason() {
        let failure = Failure::new(Reason::ZtunnelRefused, "bind [::1]:15053: é".repeat(200));
        let event = event(&What::Stuck { step: Step::Publish, failure });
        let note = event.note.unwrap();
        assert!(note.contains("publish") && note.contains("ztunnel_refused"), "{note}");
        assert!(note.len() <= NOTE_MAX);
    }

    #[test]
    fn late_enrolment_counts_what_is_not_captured() {
        let note = event(&What::Enrolled { old_connections: 7 }).note.unwrap();
        assert!(note.contains('7'), "{note}");
    }
}
