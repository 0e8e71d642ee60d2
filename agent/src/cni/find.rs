//! Finds the pod that a runtime speaks of: a runtime may know it before our watch does.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, timeout_at};

use crate::{
    cache::{index::Entry, pods::Pods},
    domain::{cni::PodId, workload::Pod},
};

/// How long the watch may take to bring a pod, before the API server is asked for it.
const WATCH_PATIENCE: Duration = Duration::from_millis(500);

/// Asks the API server for one pod.
pub trait Lookup: Send + Sync + 'static {
    /// The pod of this name; `None` when there is none.
    fn pod(&self, namespace: &str, name: &str) -> impl Future<Output = Result<Option<Pod>, String>> + Send;
}

impl Lookup for crate::kube::lookup::Lookup {
    async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, String> {
        Self::pod(self, namespace, name).await
    }
}

/// The pod, if it is in the cache.
pub fn known(cache: &Pods, pod: &PodId) -> Option<Entry> {
    // A static pod is known to the kubelet by a hash, and to the API server by another UID. Runtimes of old tell
    // no UID at all.
    let by_name_alone = pod.uid.is_empty() || !pod.uid.contains('-');
    let found = cache.named(&pod.namespace, &pod.name)?;
    (by_name_alone || found.pod.uid.as_str() == pod.uid).then_some(found)
}

/// The pod, once the watch has brought it, or else the API server has it.
///
/// # Errors
/// In words, when neither has.
pub async fn find(
    cache: &Pods,
    lookup: &impl Lookup,
    pod: &PodId,
    deadline: Instant,
) -> Result<Entry, String> {
    let changes = cache.subscribe();
    let patience = Instant::now() + WATCH_PATIENCE;
    loop {
        if let Some(entry) = known(cache, pod) {
            return Ok(entry);
        }
        if timeout_at(patience, changes.take()).await.is_err() {
            break;
        }
    }
    let ask = || timeout_at(deadline, lookup.pod(&pod.namespace, &pod.name));
    match ask().await.unwrap_or_else(|_| Err("no answer in time".into())) {
        Ok(Some(found)) if pod.uid.contains('-') && found.uid.as_str() != pod.uid => {
            return Err("the API server has a pod of this name with another UID".into());
        }
        Ok(Some(found)) => cache.apply_pod(found),
        Ok(None) => return Err("the API server has no such pod".into()),
        Err(error) => return Err(format!("asking the API server for the pod: {error}")),
    }
    let Some(entry) = known(cache, pod) else { return Err("the pod has just been replaced".into()) };
    // Had it been deleted between the answer and our taking it in, no watch would ever tell of it again.
    if let Ok(Ok(None)) = ask().await {
        cache.delete_pod(&entry.pod.uid);
        return Err("the pod has just been deleted".into());
    }
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        sync::{Arc, Mutex},
    };

    use super::*;
    use crate::domain::{config::AgentConfig, workload::testing::pod};

    /// Answers in this order.
    struct Fake(Mutex<VecDeque<Result<Option<Pod>, String>>>);

    impl Fake {
        fn new(answers: impl IntoIterator<Item = Result<Option<Pod>, String>>) -> Self {
            Self(Mutex::new(answers.into_iter().collect()))
        }

        fn left(&self) -> usize {
            self.0.lock().unwrap().len()
        }
    }

    impl Lookup for Fake {
        async fn pod(&self, _: &str, _: &str) -> Result<Option<Pod>, String> {
            let next = self.0.lock().unwrap().pop_front();
            match next {
                Some(answer) => answer,
                None => std::future::pending().await,
            }
        }
    }

    fn cache() -> Arc<Pods> {
        Arc::new(Pods::new(AgentConfig::default().policy()))
    }

    fn wanted(uid: &str) -> PodId {
        PodId { namespace: "ns".into(), name: "a".into(), uid: uid.into() }
    }

    async fn found(cache: &Pods, lookup: &Fake, pod: &PodId) -> Result<String, String> {
        let deadline = Instant::now() + Duration::from_secs(4);
        find(cache, lookup, pod, deadline).await.map(|entry| entry.pod.uid.to_string())
    }

    #[tokio::test(start_paused = true)]
    async fn the_watch_is_waited_for_and_nobody_is_asked() {
        let (cache, lookup) = (cache(), Fake::new([]));
        cache.apply_pod(pod("u-0", "ns", "a"));
        let later = cache.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(300)).await;
            later.apply_pod(pod("u-1", "ns", "a"));
        });
        // The one before it, of the same name, is not meant.
        assert_eq!(found(&cache, &lookup, &wanted("u-1")).await, Ok("u-1".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn then_the_api_server_is_asked() {
        let is = || Ok(Some(pod("u-1", "ns", "a")));
        for (answers, result, kept) in [
            (vec![is(), is()], Ok("u-1"), true),
            // Whether it is still there cannot be said: then it is.
            (vec![is(), Err("x".into())], Ok("u-1"), true),
            (vec![is(), Ok(None)], Err("just been deleted"), false),
            (vec![Ok(None)], Err("no such pod"), false),
            (vec![Ok(Some(pod("u-2", "ns", "a")))], Err("another UID"), false),
            (vec![Err("forbidden".into())], Err("forbidden"), false),
            (vec![], Err("no answer in time"), false),
        ] {
            let (cache, lookup) = (cache(), Fake::new(answers));
            let began = Instant::now();
            match (found(&cache, &lookup, &wanted("u-1")).await, result) {
                (Ok(uid), Ok(wanted)) => assert_eq!(uid, wanted),
                (Err(error), Err(wanted)) => assert!(error.contains(wanted), "{error}"),
                other => panic!("{other:?}"),
            }
            assert!(began.elapsed() >= WATCH_PATIENCE && began.elapsed() <= Duration::from_secs(4));
            assert_eq!((cache.named("ns", "a").is_some(), lookup.left()), (kept, 0));
        }
    }

    #[test]
    fn static_pods_and_old_runtimes_go_by_the_name() {
        let cache = cache();
        cache.apply_pod(pod("u-1", "ns", "a"));
        for (uid, is) in
            [("u-1", true), ("u-2", false), ("", true), ("0123456789abcdef0123456789abcdef", true)]
        {
            assert_eq!(known(&cache, &wanted(uid)).is_some(), is, "{uid}");
        }
    }
}
