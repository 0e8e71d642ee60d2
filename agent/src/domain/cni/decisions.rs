//! What the plugin decides by while the agent cannot be asked: the agent's last table.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::AgentDown;

/// Who a pod is.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodId {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; empty where the runtime does not say.
    #[serde(default)]
    pub uid: String,
}

impl std::fmt::Display for PodId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decisions {
    /// Namespaces, and whether a pod of which nothing else is known is in the mesh there.
    pub namespaces: BTreeMap<String, bool>,
    /// Namespaces that are never in the mesh.
    pub excluded: BTreeSet<String>,
    /// Pods in the mesh, or about which nothing was decided yet.
    pub inside: BTreeSet<PodId>,
    /// Pods outside.
    pub outside: BTreeSet<PodId>,
}

/// What becomes of a pod while the agent cannot be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It starts.
    Pass(&'static str),
    /// It does not.
    Fail(&'static str),
}

impl Decisions {
    /// The verdict on a pod. `table`: none has been saved, or it cannot be read.
    pub fn judge(policy: AgentDown, table: Option<&Self>, pod: &PodId) -> Verdict {
        match (policy, table) {
            (AgentDown::Pass, _) => Verdict::Pass("agentDown is set to pass"),
            (AgentDown::Fail, _) => Verdict::Fail("agentDown is set to fail"),
            (AgentDown::Table, None) => Verdict::Fail("there is no table of its last decisions"),
            (AgentDown::Table, Some(table)) => table.look_up(pod),
        }
    }

    fn look_up(&self, pod: &PodId) -> Verdict {
        if self.excluded.contains(&pod.namespace) {
            return Verdict::Pass("excluded namespace");
        }
        let known = |set: &BTreeSet<PodId>| {
            // Without a UID a name has to do; with one, another pod of the name says nothing.
            set.contains(pod)
                || pod.uid.is_empty()
                    && set.iter().any(|it| (&it.namespace, &it.name) == (&pod.namespace, &pod.name))
        };
        if known(&self.inside) {
            return Verdict::Fail("the pod belongs to the mesh");
        }
        if known(&self.outside) {
            return Verdict::Pass("known outside the mesh");
        }
        match self.namespaces.get(&pod.namespace) {
            Some(true) => Verdict::Fail("its namespace belongs to the mesh"),
            // The namespace does not, but pods of it do, by their own labels: this may be one more.
            Some(false) if self.inside.iter().any(|it| it.namespace == pod.namespace) => {
                Verdict::Fail("other pods of its namespace belong to the mesh")
            }
            Some(false) => Verdict::Pass("its namespace is outside the mesh"),
            None => Verdict::Fail("its namespace was not known to the agent"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(namespace: &str, name: &str, uid: &str) -> PodId {
        PodId { namespace: namespace.into(), name: name.into(), uid: uid.into() }
    }

    fn table() -> Decisions {
        Decisions {
            namespaces: [("shop", true), ("legacy", false), ("mixed", false), ("kube-system", true)]
                .map(|(name, mesh)| (name.to_owned(), mesh))
                .into(),
            excluded: ["kube-system".to_owned()].into(),
            inside: [pod("shop", "in", "1"), pod("mixed", "in", "2")].into(),
            outside: [pod("shop", "out", "3"), pod("mixed", "out", "4")].into(),
        }
    }

    #[test]
    fn the_table_of_outcomes() {
        let table = table();
        for (pod, passes) in [
            (pod("kube-system", "any", "9"), true),
            (pod("shop", "in", "1"), false),
            (pod("shop", "out", "3"), true),
            // A new pod of a known name.
            (pod("shop", "out", "9"), false),
            (pod("shop", "new", "9"), false),
            // An older runtime.
            (pod("shop", "out", ""), true),
            (pod("shop", "in", ""), false),
            (pod("legacy", "new", "9"), true),
            (pod("mixed", "new", "9"), false),
            (pod("mixed", "out", "4"), true),
            (pod("unheard-of", "new", "9"), false),
        ] {
            let verdict = Decisions::judge(AgentDown::Table, Some(&table), &pod);
            assert_eq!(matches!(verdict, Verdict::Pass(_)), passes, "{pod:?}: {verdict:?}");
            for (policy, table, passes) in [
                (AgentDown::Pass, Some(&table), true),
                (AgentDown::Fail, Some(&table), false),
                (AgentDown::Table, None, false),
            ] {
                let verdict = Decisions::judge(policy, table, &pod);
                assert_eq!(matches!(verdict, Verdict::Pass(_)), passes, "{policy:?} {pod:?}");
            }
        }
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<Decisions>(&text).unwrap(), table);
    }
}
