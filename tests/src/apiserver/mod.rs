//! A Kubernetes API server of one process, for tests and the demo: real HTTP, no cluster.
//!
//! It serves pods, namespaces, nodes and events as strictly as the API conventions have it, as far as
//! a node agent can tell: versions, paging, watches with bookmarks and compaction, selectors, metadata
//! only, merge patches with preconditions, the status subresource. And it fails on demand.
//!
//! [`ApiServer`] is the handle: it also plays the part of everyone else in a cluster who writes.

mod control;
mod error;
mod events;
mod faults;
mod http;
mod listen;
mod object;
mod patch;
mod query;
mod resource;
mod selector;
mod store;
mod validate;
mod watch;
mod writes;

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use axum::Router;
use serde_json::Value;
use tokio::task::JoinHandle;

pub use self::{faults::Outage, resource::Resource};
use self::{
    http::Shared,
    listen::{Admission, Gate},
};

/// What can be chosen of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// How many changes of each kind are remembered: a watch from before gets 410.
    pub history: usize,
    /// How often a watch that wants bookmarks gets one.
    pub bookmark_every: Duration,
    /// Answer to a patch whose `metadata.uid` is of another object. Real servers say 422 (the field
    /// is immutable) and keep 409 for a PUT; a client should take both for the same thing.
    pub patch_uid_mismatch: u16,
}

impl Default for Config {
    fn default() -> Self {
        Self { history: 10_000, bookmark_every: Duration::from_secs(60), patch_uid_mismatch: 422 }
    }
}

/// A kind of request, as counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKind {
    /// As in RBAC: get, list, watch, create, update, patch, delete.
    pub verb: String,
    /// With its subresource, such as `pods/status`; empty for what is not a resource.
    pub resource: String,
    /// HTTP status of the answer.
    pub code: u16,
}

/// A patch that reached the objects, done or refused.
#[derive(Clone, Debug)]
pub struct PatchRecord {
    /// When.
    pub at: Instant,
    /// Such as `pods`.
    pub resource: String,
    /// Namespace of the object, empty for a cluster-wide one.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// By its `/status`?
    pub status: bool,
    /// HTTP status of the answer.
    pub code: u16,
    /// The patch.
    pub body: Value,
}

/// Ends the server with its last handle.
struct Task {
    serving: JoinHandle<()>,
    gate: Arc<Gate>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.serving.abort();
        // A socket that cannot be shut down is not open.
        let _ = self.gate.admit(Admission::Ended);
    }
}

/// Handle of a running server. The server ends when the last clone is dropped.
#[derive(Clone)]
pub struct ApiServer {
    shared: Arc<Shared>,
    task: Arc<Task>,
}

impl ApiServer {
    /// Starts a server on a free loopback port of the calling thread's network namespace, with the
    /// namespaces `default` and `kube-system`.
    pub async fn start() -> Self {
        Self::start_with(Config::default()).await
    }

    /// Same, with other settings.
    pub async fn start_with(config: Config) -> Self {
        loop {
            let socket = listen::loopback().expect("a free loopback port");
            match Self::start_on(socket, config.clone()) {
                Ok(server) => return server,
                // Another process was quicker to take the port while it was made ours.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => panic!("a loopback socket cannot be served on: {error}"),
            }
        }
    }

    /// Starts a server on a socket that listens already, in whatever network namespace.
    ///
    /// # Errors
    /// If the socket is not one that can be served on.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn start_on(socket: std::net::TcpListener, config: Config) -> io::Result<Self> {
        let (gate, listener) = listen::open(socket)?;
        let shared = Arc::new(Shared::new(config));
        let router = Router::new().fallback(http::handle).with_state(shared.clone());
        let serving = tokio::spawn(async move {
            // It ends by being aborted.
            let _ = axum::serve(listener, router).await;
        });
        let server = Self { shared, task: Arc::new(Task { serving, gate }) };
        for namespace in ["default", "kube-system"] {
            server.put_namespace(namespace, &[]);
        }
        Ok(server)
    }

    /// Base URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.task.gate.address())
    }

    /// A kubeconfig for it.
    pub fn kubeconfig_yaml(&self) -> String {
        let url = self.url();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters:\n- name: test\n  cluster:\n    server: {url}\n\
             contexts:\n- name: test\n  context:\n    cluster: test\n    user: test\n\
             users:\n- name: test\n  user: {{}}\n"
        )
    }

    /// Writes the kubeconfig to a file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_kubeconfig(&self, path: impl AsRef<Path>) -> io::Result<()> {
        std::fs::write(path, self.kubeconfig_yaml())
    }

    /// A client of it that shows every failure: kube's own default asks again, for minutes, when the
    /// answer is 429, 503 or 504.
    pub fn client(&self) -> kube::Client {
        let mut config = kube::Config::new(self.url().parse().expect("a socket address makes a URL"));
        config.default_retry = false;
        kube::Client::try_from(config).expect("a client for plain HTTP")
    }

    /// The next `count` requests are answered with `code`; 429 comes with a Retry-After.
    pub fn fail_next(&self, count: usize, code: u16) {
        self.shared.faults.plan(None, None, count, code);
    }

    /// Same, for requests of one verb and resource, as in [`RequestKind`].
    pub fn fail_next_of(&self, verb: &str, resource: &str, count: usize, code: u16) {
        self.shared.faults.plan(Some(verb), Some(resource), count, code);
    }

    /// Begins or ends an outage. It cuts running watches; with [`Outage::Close`] and
    /// [`Outage::Refuse`], every connection.
    pub fn fail_all(&self, outage: Option<Outage>) {
        self.shared.faults.set_outage(outage);
        let admission = match outage {
            None | Some(Outage::Status(_)) => Admission::Serve,
            Some(Outage::Close) => Admission::Close,
            Some(Outage::Refuse) => Admission::Refuse,
        };
        self.task.gate.admit(admission).expect("a listening socket can stop and start to listen");
        if outage.is_some() {
            self.drop_watches();
        }
    }

    /// Cuts all running watches, in the middle of their stream.
    pub fn drop_watches(&self) {
        self.shared.cuts.send_modify(|count| *count += 1);
    }

    /// Forgets all history: watches and pages from before get 410.
    pub fn compact(&self) {
        self.shared.write(store::Store::compact);
    }

    /// Lets every request wait this long before anything else.
    pub fn delay(&self, delay: Duration) {
        self.shared.faults.set_delay(delay);
    }

    /// Ends the outage, the delay and what was planned by [`ApiServer::fail_next`].
    pub fn heal(&self) {
        self.shared.faults.clear();
        self.fail_all(None);
    }

    /// How many requests were answered, by kind.
    pub fn requests(&self) -> BTreeMap<RequestKind, u64> {
        self.shared.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many requests of a verb and resource were answered, well or not.
    pub fn request_count(&self, verb: &str, resource: &str) -> u64 {
        let requests = self.requests();
        let of_kind = requests.iter().filter(|(kind, _)| kind.verb == verb && kind.resource == resource);
        of_kind.map(|(_, count)| count).sum()
    }

    /// All patches so far, in order.
    pub fn patches(&self) -> Vec<PatchRecord> {
        self.shared.patches.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
