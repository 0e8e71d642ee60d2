//! Writes the annotation `ambient.istio.io/redirection`.

use std::{fmt, time::Duration};

use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client, Error,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::{rate::Rate, wire};
use crate::domain::{
    names,
    reason::{Failure, Reason},
    workload::{Annotated, Pod, Redirection},
};

/// Patches pods. Sparing of the API server: a burst as large as a node, then so many a second.
pub struct Patcher {
    client: Client,
    rate: Rate,
}

impl fmt::Debug for Patcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patcher").field("rate", &self.rate).finish_non_exhaustive()
    }
}

impl Patcher {
    /// A patcher that uses `client`.
    pub fn new(client: Client) -> Self {
        Self { client, rate: Rate::new(Duration::from_millis(10), 250) }
    }

    /// Sets the annotation, or removes it (`None`), on exactly this pod: the UID in the patch makes the
    /// API server refuse if the name belongs to another one by now.
    pub async fn set(&self, pod: &Pod, value: Option<Redirection>) -> Result<Annotated, Failure> {
        self.rate.allow().await;
        let api = self.api(pod);
        let patch = json!({
            "metadata": {
                "uid": pod.uid.as_str(),
                "annotations": { names::REDIRECTION: value.map(Redirection::as_str) },
            },
        });
        let params = PatchParams::default();
        match api.patch_status(&pod.info.name, &params, &Patch::Merge(patch)).await {
            Ok(now) => Ok(Annotated::Done { version: wire::version(&now.metadata) }),
            Err(Error::Api(status)) if status.code == 404 => Ok(Annotated::Gone),
            // A conflict may be the UID's, or one that will not be there the next time.
            Err(Error::Api(status)) if matches!(status.code, 409 | 422) => self
                .gone(&api, pod)
                .await
                .and_then(|gone| if gone { Ok(Annotated::Gone) } else { Err(failure(&Error::Api(status))) }),
            Err(error) => Err(failure(&error)),
        }
    }

    async fn gone(&self, api: &Api<core::Pod>, pod: &Pod) -> Result<bool, Failure> {
        let now = api.get_metadata_opt(&pod.info.name).await.map_err(|error| failure(&error))?;
        Ok(now.is_none_or(|now| now.metadata.uid.as_deref() != Some(pod.uid.as_str())))
    }

    fn api(&self, pod: &Pod) -> Api<core::Pod> {
        Api::namespaced(self.client.clone(), &pod.info.namespace)
    }
}

fn failure(error: &Error) -> Failure {
    let remedy = match error {
        Error::Api(status) if status.code == 403 => "; does weir's ClusterRole allow patch on pods/status?",
        _ => "",
    };
    Failure::new(Reason::AnnotateFailed, format!("{error}{remedy}").replace('\n', " "))
}
