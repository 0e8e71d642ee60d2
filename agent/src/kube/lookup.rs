//! Asks for one pod.

use kube::{Api, Client};

use super::wire::WirePod;
use crate::domain::workload::Pod;

/// Asks the API server.
#[derive(Clone)]
pub struct Lookup(Client);

impl Lookup {
    /// With this client.
    pub fn new(client: Client) -> Self {
        Self(client)
    }

    /// The pod of this name; `None` when there is none.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, String> {
        let api = Api::<WirePod>::namespaced(self.0.clone(), namespace);
        let found = api.get_opt(name).await.map_err(|error| error.to_string().replace('\n', " "))?;
        Ok(found.and_then(WirePod::into_pod))
    }
}
