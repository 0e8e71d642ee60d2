//! Keeps the cache filled: pods of this node, and the labels of all namespaces.

use std::{pin::pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Error as ApiError,
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use tokio::time::timeout;
use tracing::{info, warn};

use super::wire::WirePod;
use crate::{
    cache::pods::{Pods, Source},
    domain::{config::AgentConfig, selector::Labels, workload::Pod},
};

/// A list that has not moved on for so long is asked for again: there is no other limit on it.
const LIST_PATIENCE: Duration = Duration::from_secs(60);

/// A broken watch tells of another failure within this time; one that does not has recovered. Its next
/// change may be hours away.
const RECOVERED_AFTER: Duration = Duration::from_secs(75);

/// Fills `cache` until dropped. Whatever the API server does, what the cache has is kept until there is
/// something newer; how well the watches do is in [`Pods::sync`].
pub async fn run(client: Client, config: AgentConfig, cache: Arc<Pods>) {
    // Lists are consistent ones: in a list that is a second old, pods younger than that would appear to be
    // gone, and would be forgotten. Not in pages, because only then does the API server answer from its
    // cache, which knows pods by node, instead of reading every pod of the cluster.
    let on_node = watcher::Config::default().fields(&format!("spec.nodeName={}", config.node_name));
    let on_node = watcher::Config { page_size: None, ..on_node };
    let pods = || {
        let api = Api::<WirePod>::all(client.clone());
        watcher(api, on_node.clone()).default_backoff()
    };
    let namespaces = || {
        let api = Api::<PartialObjectMeta<Namespace>>::all(client.clone());
        watcher(api, watcher::Config::default()).default_backoff()
    };
    tokio::join!(
        follow(pods, WirePod::into_pod, Feed { cache: &cache, source: Source::Pods }, apply_pods),
        follow(namespaces, labels, Feed { cache: &cache, source: Source::Namespaces }, apply_namespaces),
    );
}

/// What a watch tells.
enum Change<T> {
    Is(T),
    Gone(T),
    All(Vec<T>),
}

fn apply_pods(cache: &Pods, change: Change<Pod>) {
    match change {
        Change::Is(pod) => cache.apply_pod(pod),
        Change::Gone(pod) => cache.delete_pod(&pod.uid),
        Change::All(pods) => cache.reset_pods(pods),
    }
}

fn apply_namespaces(cache: &Pods, change: Change<(String, Labels)>) {
    match change {
        Change::Is((name, labels)) => cache.apply_namespace(&name, labels),
        Change::Gone((name, _)) => cache.delete_namespace(&name),
        Change::All(all) => cache.reset_namespaces(all),
    }
}

fn labels(namespace: PartialObjectMeta<Namespace>) -> Option<(String, Labels)> {
    Some((namespace.metadata.name?, namespace.metadata.labels.unwrap_or_default()))
}

/// Follows one watch for ever. Objects are reduced by `read` one by one as they come.
async fn follow<K, T, S>(
    start: impl Fn() -> S,
    read: impl Fn(K) -> Option<T>,
    feed: Feed<'_>,
    apply: impl Fn(&Pods, Change<T>),
) where
    S: Stream<Item = watcher::Result<Event<K>>>,
{
    loop {
        let mut stream = pin!(start());
        // What has been listed so far. A list replaces what is known as a whole, once it is complete.
        let mut list: Option<Vec<T>> = None;
        loop {
            let patience = if list.is_some() { LIST_PATIENCE } else { RECOVERED_AFTER };
            let change = match timeout(patience, stream.next()).await {
                Ok(Some(Ok(Event::Init))) => {
                    list = Some(Vec::new());
                    continue;
                }
                Ok(Some(Ok(Event::InitApply(it)))) => {
                    list.get_or_insert_default().extend(read(it));
                    continue;
                }
                Ok(Some(Ok(Event::InitDone))) => Some(Change::All(list.take().unwrap_or_default())),
                Ok(Some(Ok(Event::Apply(it)))) => read(it).map(Change::Is),
                Ok(Some(Ok(Event::Delete(it)))) => read(it).map(Change::Gone),
                Ok(Some(Err(error))) => {
                    feed.failed(describe(&error));
                    continue;
                }
                Err(_) if list.is_some() => {
                    feed.failed(format!("the list has not moved on for {LIST_PATIENCE:?}"));
                    break;
                }
                Ok(None) => break,
                Err(_) => None,
            };
            if let Some(change) = change {
                apply(feed.cache, change);
            }
            feed.works();
        }
    }
}

/// Where a watch reports how it does.
#[derive(Clone, Copy)]
struct Feed<'a> {
    cache: &'a Pods,
    source: Source,
}

impl Feed<'_> {
    fn works(self) {
        if self.cache.report(self.source, None) {
            info!(source = ?self.source, "watch works again");
        }
    }

    /// An outage of hours is one line, not one every thirty seconds.
    fn failed(self, error: String) {
        if self.cache.report(self.source, Some(error.clone())) {
            warn!(source = ?self.source, error, "watch failed; going on with what is known");
        }
    }
}

/// The error in one line, with the remedy where there is one.
fn describe(error: &watcher::Error) -> String {
    use watcher::Error as E;
    let code = match error {
        E::InitialListFailed(ApiError::Api(status))
        | E::WatchStartFailed(ApiError::Api(status))
        | E::WatchFailed(ApiError::Api(status))
        | E::WatchError(status) => status.code,
        _ => 0,
    };
    let remedy = match code {
        401 => "; is the service account's token valid?",
        403 => "; does weir's ClusterRole allow list and watch on pods and namespaces?",
        _ => "",
    };
    format!("{error}{remedy}").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, collections::VecDeque, future};

    use futures::stream;

    use super::*;
    use crate::domain::workload::{PodUid, testing::pod};

    /// What a watch does next.
    enum Script {
        Tells(watcher::Result<Event<Pod>>),
        IsQuietFor(Duration),
    }
    use Script::{IsQuietFor, Tells};

    /// Plays each script as one watch, the last of them ending in silence; for ten minutes.
    async fn play(scripts: Vec<Vec<Script>>) -> (Pods, usize) {
        let cache = Pods::new(AgentConfig::default().policy());
        let started = Cell::new(0);
        let scripts = std::cell::RefCell::new(VecDeque::from(scripts));
        let start = || {
            started.set(started.get() + 1);
            let script = scripts.borrow_mut().pop_front().unwrap_or_default();
            let told = stream::iter(script).filter_map(|next| async {
                match next {
                    Tells(event) => Some(event),
                    IsQuietFor(time) => {
                        tokio::time::sleep(time).await;
                        None
                    }
                }
            });
            told.chain(stream::once(future::pending()))
        };
        let feed = Feed { cache: &cache, source: Source::Pods };
        let follow = follow(start, Some, feed, apply_pods);
        assert!(timeout(Duration::from_secs(600), follow).await.is_err(), "follows for ever");
        (cache, started.get())
    }

    fn knows(cache: &Pods, uid: &str) -> bool {
        cache.get(&PodUid::from(uid)).is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_counts_only_when_it_is_complete() {
        let list = |uid, name| Tells(Ok(Event::InitApply(pod(uid, "ns", name))));
        let first = vec![Tells(Ok(Event::Init)), list("u1", "a"), Tells(Ok(Event::InitDone))];
        // A second one begins, and breaks off.
        let broken = [Tells(Ok(Event::Init)), list("u2", "b"), Tells(Err(watcher::Error::NoResourceVersion))];
        let (cache, _) = play(vec![first.into_iter().chain(broken).collect()]).await;
        assert!(knows(&cache, "u1") && !knows(&cache, "u2"));
        // And is asked for again from the start.
        let whole = vec![Tells(Ok(Event::Init)), list("u3", "c"), Tells(Ok(Event::InitDone))];
        let stuck = vec![Tells(Ok(Event::Init)), list("u2", "b")];
        let (cache, started) = play(vec![stuck, whole]).await;
        assert!(knows(&cache, "u3") && !knows(&cache, "u2"));
        assert_eq!((started, cache.sync().pods.listed, cache.sync().pods.error), (2, true, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_list_that_moves_on_is_not_given_up() {
        let slow = LIST_PATIENCE - Duration::from_secs(1);
        let mut script = vec![Tells(Ok(Event::Init))];
        for n in 0..3 {
            script.push(IsQuietFor(slow));
            script.push(Tells(Ok(Event::InitApply(pod(&format!("u{n}"), "ns", &format!("p{n}"))))));
        }
        script.push(Tells(Ok(Event::InitDone)));
        let (cache, started) = play(vec![script]).await;
        assert_eq!((started, cache.list().len()), (1, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_is_quiet_after_a_failure_works_and_one_that_keeps_failing_does_not() {
        let fails = || Tells(Err(watcher::Error::NoResourceVersion));
        let (cache, _) = play(vec![vec![fails(), IsQuietFor(Duration::from_secs(500))]]).await;
        assert_eq!(cache.sync().pods.error, None);
        let failing = (0..30).flat_map(|_| [fails(), IsQuietFor(Duration::from_secs(30))]);
        let (cache, _) = play(vec![failing.collect()]).await;
        assert!(cache.sync().pods.error.is_some());
    }
}
