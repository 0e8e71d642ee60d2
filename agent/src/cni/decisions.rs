//! Saves what the plugin goes by while there is no agent.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tracing::warn;

use crate::{
    cache::{index::Index, pods::Pods},
    domain::{
        cni::{Decisions, PodId},
        eligibility::Decision,
    },
};

/// Changes that come together are saved together.
const DEBOUNCE: Duration = Duration::from_millis(250);

/// A namespace without pods here changes nothing that is told of: looked at on an interval as well.
const INTERVAL: Duration = Duration::from_secs(5);

/// Keeps the table at `path` up to date until dropped. What an earlier agent saved stays until the cache is complete.
pub async fn keep_saved(cache: Arc<Pods>, path: PathBuf) {
    cache.synced().await;
    let changes = cache.subscribe();
    let (mut saved, mut failing) = (None, false);
    loop {
        let table = cache.look(table);
        if saved.as_ref() != Some(&table) {
            let (to, written) = (path.clone(), table.clone());
            let save = tokio::task::spawn_blocking(move || save(&to, &written)).await;
            match save.map_err(io::Error::other).and_then(|saved| saved) {
                Ok(()) => (saved, failing) = (Some(table), false),
                Err(error) if !failing => {
                    failing = true;
                    warn!(path = %path.display(), %error, "decisions cannot be saved; the plugin will go by older ones while the agent is down");
                }
                Err(_) => {}
            }
        }
        let _ = tokio::time::timeout(INTERVAL, changes.take()).await;
        tokio::time::sleep(DEBOUNCE).await;
    }
}

fn table(index: &Index) -> Decisions {
    let mut table = Decisions {
        namespaces: index.namespaces().map(|(name, mesh)| (name.to_owned(), mesh)).collect(),
        excluded: index.policy().excluded_namespaces.clone(),
        ..Decisions::default()
    };
    for (uid, entry) in index.iter() {
        let info = &entry.pod.info;
        let pod = PodId { namespace: info.namespace.clone(), name: info.name.clone(), uid: uid.to_string() };
        match entry.decision {
            Decision::Leave(_) => table.outside.insert(pod),
            Decision::Enrol | Decision::Wait(_) => table.inside.insert(pod),
        };
    }
    table
}

/// Whole or not at all: the plugin may read at any moment.
fn save(path: &Path, table: &Decisions) -> io::Result<()> {
    let mut new = path.to_owned().into_os_string();
    new.push(".new");
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&serde_json::to_vec(table)?)?;
    file.sync_all()?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{config::AgentConfig, selector::Labels, workload::testing::*};

    #[test]
    fn the_table_says_what_the_cache_says() {
        let mut index = Index::new(AgentConfig::default().policy());
        index.apply_namespace("mesh", ambient());
        index.apply_namespace("other", Labels::new());
        index.apply_pod(pod("1", "mesh", "in"));
        index.apply_pod(labelled("2", "mesh", "out", "none"));
        index.apply_pod(pod("3", "other", "out"));
        index.apply_pod(pod("4", "unknown", "undecided"));
        let table = table(&index);
        assert_eq!(table.namespaces, [("mesh".into(), true), ("other".into(), false)].into());
        assert!(table.excluded.contains("kube-system"));
        let names = |set: &std::collections::BTreeSet<PodId>| {
            set.iter().map(|pod| pod.uid.clone()).collect::<Vec<_>>().join("")
        };
        assert_eq!((names(&table.inside), names(&table.outside)), ("14".into(), "23".into()));
    }
}
