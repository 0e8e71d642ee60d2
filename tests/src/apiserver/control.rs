//! The part of everyone else: the handle's reads and writes of objects.

use std::{fmt, time::Duration};

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::{
    core::v1::{Namespace, Node, Pod},
    events::v1::Event,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::timeout as within;

use super::{
    ApiServer,
    object::{Key, Object},
    patch::Door,
    resource::Resource,
    writes,
};

fn read<T: DeserializeOwned>(object: &Object, resource: Resource) -> T {
    serde_json::from_value(object.value(resource)).expect("only typed objects are stored")
}

fn strings(pairs: &[(&str, &str)]) -> Value {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), Value::from(*value)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// Writing what a real server would refuse is a mistake in the test.
impl ApiServer {
    fn put(&self, resource: Resource, value: impl Serialize) -> std::sync::Arc<Object> {
        let value = serde_json::to_value(value).expect("an object can be written as JSON");
        let done = self.shared.write(|store| writes::put(store, resource, value));
        done.unwrap_or_else(|error| panic!("a {} cannot be put: {}", resource.kind(), error.status()))
    }

    fn merge(&self, resource: Resource, key: &Key, patch: &Value) -> std::sync::Arc<Object> {
        let done = self.shared.write(|store| writes::merge(store, resource, key, Door::Test, patch, 422));
        done.unwrap_or_else(|error| panic!("{key:?} cannot be changed: {}", error.status()))
    }

    /// Sets a map within an object to exactly this.
    fn set_map(&self, resource: Resource, key: &Key, field: &str, pairs: &[(&str, &str)]) {
        let clear = json!({ "metadata": { (field): null } });
        let fill = json!({ "metadata": { (field): strings(pairs) } });
        let done = self.shared.write(|store| {
            // One change, not two: the patch is made of what is there now.
            let old = store.get(resource, key)?.value(resource);
            let mut patch = fill;
            for (key, _) in old["metadata"][field].as_object().into_iter().flatten() {
                if patch["metadata"][field].get(key).is_none() {
                    patch["metadata"][field][key] = Value::Null;
                }
            }
            let patch = if pairs.is_empty() { &clear } else { &patch };
            Some(writes::merge(store, resource, key, Door::Test, patch, 422))
        });
        match done {
            None => panic!("{key:?} does not exist"),
            Some(Err(error)) => panic!("{key:?} cannot be changed: {}", error.status()),
            Some(Ok(_)) => {}
        }
    }

    /// Creates a pod, or replaces all of it, status included. What is missing is filled in: its
    /// namespace (`default`), that namespace itself, its uid, its service account. A pod with another
    /// uid than the one there is takes its place: a deletion and a creation.
    ///
    /// # Panics
    /// If it is not a valid pod.
    pub fn put_pod(&self, pod: impl Serialize) -> Pod {
        read(&self.put(Resource::Pods, pod), Resource::Pods)
    }

    /// Creates a node, or replaces it.
    ///
    /// # Panics
    /// If it is not a valid node.
    pub fn put_node(&self, node: impl Serialize) -> Node {
        read(&self.put(Resource::Nodes, node), Resource::Nodes)
    }

    /// Creates a namespace, or sets its labels (to these, and the one with its name).
    ///
    /// # Panics
    /// If name or labels are not valid.
    pub fn put_namespace(&self, name: &str, labels: &[(&str, &str)]) -> Namespace {
        let key = Key::new("", name);
        let resource = Resource::Namespaces;
        if self.shared.read().get(resource, &key).is_none() {
            let namespace = json!({ "metadata": { "name": name, "labels": strings(labels) } });
            return read(&self.put(resource, namespace), resource);
        }
        self.set_map(resource, &key, "labels", labels);
        self.namespace(name).expect("it was there just now")
    }

    /// Sets a namespace's labels to these (and the one with its name).
    ///
    /// # Panics
    /// If there is no such namespace.
    pub fn set_namespace_labels(&self, name: &str, labels: &[(&str, &str)]) {
        self.set_map(Resource::Namespaces, &Key::new("", name), "labels", labels);
    }

    /// Sets a pod's labels to exactly these.
    ///
    /// # Panics
    /// If there is no such pod.
    pub fn set_pod_labels(&self, namespace: &str, name: &str, labels: &[(&str, &str)]) {
        self.set_map(Resource::Pods, &Key::new(namespace, name), "labels", labels);
    }

    /// Sets a pod's annotations to exactly these.
    ///
    /// # Panics
    /// If there is no such pod.
    pub fn set_pod_annotations(&self, namespace: &str, name: &str, annotations: &[(&str, &str)]) {
        self.set_map(Resource::Pods, &Key::new(namespace, name), "annotations", annotations);
    }

    /// Merges into a pod, whatever the field: spec, status, `metadata.deletionTimestamp`.
    ///
    /// # Panics
    /// If there is no such pod, or what comes out is not a valid one.
    pub fn merge_pod(&self, namespace: &str, name: &str, patch: &Value) -> Pod {
        read(&self.merge(Resource::Pods, &Key::new(namespace, name), patch), Resource::Pods)
    }

    /// Marks a pod as being deleted, with so many seconds of grace. [`ApiServer::delete_pod`] ends it.
    ///
    /// # Panics
    /// If there is no such pod.
    pub fn terminate_pod(&self, namespace: &str, name: &str, grace: u32) -> Pod {
        let metadata = json!({ "deletionTimestamp": writes::now(), "deletionGracePeriodSeconds": grace });
        self.merge_pod(namespace, name, &json!({ "metadata": metadata }))
    }

    /// Deletes a pod at once. Was it there?
    pub fn delete_pod(&self, namespace: &str, name: &str) -> bool {
        let key = Key::new(namespace, name);
        self.shared.write(|store| store.remove(Resource::Pods, &key)).is_some()
    }

    /// Deletes a namespace at once, with all that is in it. Was it there?
    pub fn delete_namespace(&self, name: &str) -> bool {
        let key = Key::new("", name);
        self.shared.write(|store| writes::delete(store, Resource::Namespaces, &key, &Value::Null)).is_ok()
    }

    /// A pod as it is now.
    pub fn pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        let object = self.shared.read().get(Resource::Pods, &Key::new(namespace, name)).cloned();
        object.map(|object| read(&object, Resource::Pods))
    }

    /// All pods, by namespace and name.
    pub fn pods(&self) -> Vec<Pod> {
        let objects: Vec<_> = self.shared.read().objects(Resource::Pods, None).cloned().collect();
        objects.iter().map(|object| read(object, Resource::Pods)).collect()
    }

    /// A namespace as it is now.
    pub fn namespace(&self, name: &str) -> Option<Namespace> {
        let object = self.shared.read().get(Resource::Namespaces, &Key::new("", name)).cloned();
        object.map(|object| read(&object, Resource::Namespaces))
    }

    /// All events, in the newer form whichever way they came, by namespace and name.
    pub fn events(&self) -> Vec<Event> {
        let objects: Vec<_> = self.shared.read().objects(Resource::Events, None).cloned().collect();
        objects.iter().map(|object| read(object, Resource::Events)).collect()
    }

    /// Version of the newest write.
    pub fn resource_version(&self) -> u64 {
        self.shared.read().version()
    }

    /// Waits until `look` finds something, looking again after every write and every answer.
    ///
    /// # Errors
    /// If it has found nothing in time.
    pub async fn wait_for<T>(
        &self,
        timeout: Duration,
        mut look: impl FnMut(&Self) -> Option<T>,
    ) -> anyhow::Result<T> {
        let mut activity = self.shared.activity.subscribe();
        let looking = async {
            loop {
                activity.borrow_and_update();
                if let Some(found) = look(self) {
                    return found;
                }
                // The sender lives as long as this handle.
                let _ = activity.changed().await;
            }
        };
        within(timeout, looking).await.with_context(|| format!("not found within {timeout:?}"))
    }

    /// Waits until a pod is as wanted.
    ///
    /// # Errors
    /// If it is not in time: how it last was.
    pub async fn wait_pod(
        &self,
        namespace: &str,
        name: &str,
        mut wanted: impl FnMut(&Pod) -> bool,
        timeout: Duration,
    ) -> anyhow::Result<Pod> {
        let found = self.wait_for(timeout, |api| api.pod(namespace, name).filter(&mut wanted)).await;
        found.map_err(|_| {
            let last: &dyn fmt::Debug = &self.pod(namespace, name);
            anyhow!("{namespace}/{name} was not as wanted within {timeout:?}: {last:?}")
        })
    }
}
