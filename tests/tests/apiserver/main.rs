//! The API server under the client the agent uses: what it follows and survives here, it must with a
//! real server.

mod follow;
mod rules;
mod scale;
mod watches;

use std::time::Duration;

use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(10);

fn pod(namespace: &str, name: &str, node: &str) -> Value {
    json!({
        "metadata": { "namespace": namespace, "name": name, "labels": { "app": name } },
        "spec": { "nodeName": node, "containers": [{ "name": "main", "image": "none" }] },
        "status": { "phase": "Running", "podIP": "10.0.0.1" },
    })
}

fn code<T: std::fmt::Debug>(result: kube::Result<T>) -> u16 {
    match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("not an answer of the server: {other:?}"),
    }
}
