use super::*;
use crate::domain::{
    config::AgentConfig,
    reason::Reason,
    workload::{Redirection, testing::*},
};

fn index() -> Index {
    Index::new(AgentConfig::default().policy())
}

fn uids(names: &[&str]) -> Vec<PodUid> {
    names.iter().map(|name| PodUid::from(*name)).collect()
}

fn sorted(mut uids: Vec<PodUid>) -> Vec<PodUid> {
    uids.sort();
    uids
}

fn decision(index: &Index, uid: &str) -> Option<Decision> {
    index.get(&uid.into()).map(|entry| entry.decision)
}

const OUT: Decision = Decision::Leave(Reason::NotSelected);
const UNKNOWN: Decision = Decision::Wait(Reason::NamespaceUnknown);

#[test]
fn a_pod_is_reported_once_and_again_only_if_it_differs() {
    let mut it = index();
    assert_eq!(it.apply_pod(pod("u", "ns", "a")), uids(&["u"]));
    assert_eq!(it.apply_pod(pod("u", "ns", "a")), uids(&[]));
    assert_eq!(it.apply_pod(Pod { version: 7, ..pod("u", "ns", "a") }), uids(&[]));
    assert_eq!(it.get(&"u".into()).unwrap().pod.version, 7, "kept all the same");
    type Change = fn(&mut Pod);
    let changes: [Change; 6] = [
        |p| drop(p.labels.insert("k".into(), "v".into())),
        |p| drop(p.annotations.insert("weir.dev/existing-connections".into(), "keep".into())),
        |p| p.ips.clear(),
        |p| p.host_network = true,
        |p| p.terminal = true,
        |p| p.redirection = Some(Redirection::Enabled),
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut changed = pod("u", "ns", "a");
        change(&mut changed);
        assert_eq!(it.apply_pod(changed), uids(&["u"]), "change {n}");
        assert_eq!(it.apply_pod(pod("u", "ns", "a")), uids(&["u"]), "change {n} taken back");
    }
}

#[test]
fn a_namespace_label_reaches_exactly_the_pods_it_decides_about() {
    let mut it = index();
    it.apply_namespace("ns", Labels::new());
    it.apply_namespace("other", Labels::new());
    it.apply_pod(pod("follows", "ns", "a"));
    it.apply_pod(labelled("in", "ns", "b", "ambient"));
    it.apply_pod(labelled("out", "ns", "c", "none"));
    it.apply_pod(pod("elsewhere", "other", "a"));

    assert_eq!(it.apply_namespace("ns", ambient()), uids(&["follows"]));
    assert_eq!(decision(&it, "follows"), Some(Decision::Enrol));
    assert_eq!(it.apply_namespace("ns", ambient()), uids(&[]));
    let mut more = ambient();
    more.insert("team".into(), "x".into());
    assert_eq!(it.apply_namespace("ns", more), uids(&[]), "a label no selector asks for");
    assert_eq!(it.apply_namespace("ns", Labels::new()), uids(&["follows"]));
    assert_eq!(decision(&it, "follows"), Some(OUT));
    assert_eq!(decision(&it, "elsewhere"), Some(OUT));
}

#[test]
fn pods_may_come_before_their_namespace_and_outlive_it() {
    let mut it = index();
    it.apply_pod(pod("u", "ns", "a"));
    assert_eq!(decision(&it, "u"), Some(UNKNOWN));
    assert_eq!(it.apply_namespace("ns", ambient()), uids(&["u"]));
    assert_eq!(it.delete_namespace("ns"), uids(&["u"]));
    assert_eq!(decision(&it, "u"), Some(UNKNOWN), "held, not thrown out");
    assert_eq!(it.delete_pod(&"u".into()), uids(&["u"]));
    assert!(it.namespaces.is_empty(), "nothing is kept of a namespace without labels and pods");
}

#[test]
fn a_successor_of_the_same_name_is_another_pod() {
    let mut it = index();
    it.apply_namespace("ns", ambient());
    it.apply_pod(pod("old", "ns", "a"));
    assert_eq!(it.apply_pod(pod("new", "ns", "a")), uids(&["old", "new"]));
    assert_eq!(decision(&it, "old"), None);
    assert_eq!(it.delete_pod(&"old".into()), uids(&[]), "the late end of the predecessor");
    assert_eq!(decision(&it, "new"), Some(Decision::Enrol));
    assert_eq!(it.apply_namespace("ns", Labels::new()), uids(&["new"]));
}

#[test]
fn the_same_name_in_two_namespaces_is_two_pods() {
    let mut it = index();
    it.apply_pod(pod("u1", "ns1", "a"));
    assert_eq!(it.apply_pod(pod("u2", "ns2", "a")), uids(&["u2"]));
    assert_eq!(it.delete_pod(&"u1".into()), uids(&["u1"]));
    assert!(it.get(&"u2".into()).is_some());
}

#[test]
fn a_list_says_what_has_gone() {
    let mut it = index();
    it.apply_namespace("ns", ambient());
    for (uid, name) in [("u1", "a"), ("u2", "b"), ("u3", "c")] {
        it.apply_pod(pod(uid, "ns", name));
    }
    let mut changed = pod("u2", "ns", "b");
    changed.terminal = true;
    let list = vec![pod("u1", "ns", "a"), changed, pod("u4", "ns", "c")];
    assert_eq!(sorted(it.reset_pods(list)), uids(&["u2", "u3", "u4"]));
    assert_eq!(it.iter().len(), 3);
}

#[test]
fn a_list_of_namespaces_says_which_have_gone() {
    let mut it = index();
    it.apply_namespace("ns1", ambient());
    it.apply_namespace("ns2", ambient());
    it.apply_pod(pod("u1", "ns1", "a"));
    it.apply_pod(pod("u2", "ns2", "a"));
    let list = vec![("ns2".into(), ambient()), ("ns3".into(), ambient())];
    assert_eq!(it.reset_namespaces(list), uids(&["u1"]));
    assert_eq!(decision(&it, "u1"), Some(UNKNOWN));
    assert_eq!(decision(&it, "u2"), Some(Decision::Enrol));
}

#[test]
fn a_change_of_configuration_reaches_exactly_the_pods_it_decides_about() {
    let mut it = index();
    it.apply_namespace("ns", ambient());
    it.apply_namespace("kube-system", ambient());
    it.apply_pod(pod("u1", "ns", "a"));
    it.apply_pod(pod("u2", "kube-system", "a"));
    it.apply_pod(labelled("u3", "ns", "c", "none"));
    let mut policy = AgentConfig::default().policy();
    policy.excluded_namespaces = ["ns".into()].into();
    assert_eq!(sorted(it.set_policy(policy.clone())), uids(&["u1", "u2", "u3"]));
    assert_eq!(decision(&it, "u1"), Some(Decision::Leave(Reason::ExcludedNamespace)));
    assert_eq!(decision(&it, "u2"), Some(Decision::Enrol));
    assert_eq!(it.set_policy(policy), uids(&[]));
}

#[test]
fn a_sandbox_s_addresses_stand_in_until_the_kubelet_s_come() {
    let mut it = index();
    let uid = PodUid::from("u");
    it.apply_namespace("ns", ambient());
    let unposted = || Pod { ips: vec![], ..pod("u", "ns", "a") };
    it.apply_pod(unposted());
    assert_eq!(decision(&it, "u"), Some(Decision::Wait(Reason::NoAddress)));
    let first = ["10.0.0.7".parse().unwrap()];
    assert_eq!(it.sandbox_made(&uid, &first), uids(&["u"]));
    assert_eq!(it.sandbox_made(&uid, &first), uids(&[]));
    assert_eq!(decision(&it, "u"), Some(Decision::Enrol));
    // Another event without an address changes nothing.
    assert_eq!(it.apply_pod(Pod { version: 2, ..unposted() }), uids(&[]));
    // Another sandbox, before anything was posted.
    let second = ["10.0.0.8".parse().unwrap()];
    assert_eq!(it.sandbox_made(&uid, &second), uids(&["u"]));
    assert_eq!(it.get(&uid).unwrap().pod.ips, second);
    // What is posted holds, also over a later sandbox.
    it.apply_pod(pod("u", "ns", "a"));
    assert_eq!(it.get(&uid).unwrap().pod.ips, pod("u", "ns", "a").ips);
    assert_eq!(it.sandbox_made(&uid, &second), uids(&[]));
    assert_eq!(it.get(&uid).unwrap().pod.ips, pod("u", "ns", "a").ips);
}

#[test]
fn without_its_sandbox_a_pod_is_none_until_it_has_another() {
    let mut it = index();
    let uid = PodUid::from("u");
    it.apply_namespace("ns", ambient());
    it.apply_pod(Pod { ips: vec![], ..pod("u", "ns", "a") });
    let ips = ["10.0.0.7".parse().unwrap()];
    it.sandbox_made(&uid, &ips);
    assert_eq!(it.sandbox_gone(&uid), uids(&["u"]));
    assert!(it.get(&uid).is_none() && it.known(&uid).is_some() && it.named("ns", "a").is_some());
    assert!(it.known(&uid).unwrap().pod.ips.is_empty());
    it.apply_pod(Pod { ips: vec![], version: 3, ..pod("u", "ns", "a") });
    assert!(it.get(&uid).is_none());
    assert_eq!(it.sandbox_made(&uid, &ips), uids(&["u"]));
    assert_eq!(decision(&it, "u"), Some(Decision::Enrol));
    // Posted late, the addresses of the one that is gone; then those of one that we were not told of.
    it.sandbox_gone(&uid);
    it.apply_pod(Pod { ips: ips.to_vec(), ..pod("u", "ns", "a") });
    assert!(it.get(&uid).is_none());
    assert_eq!(
        it.apply_pod(Pod { ips: vec!["10.0.0.9".parse().unwrap()], ..pod("u", "ns", "a") }),
        uids(&["u"])
    );
    assert_eq!(decision(&it, "u"), Some(Decision::Enrol));
    // The pod's end ends that too: nothing of it is kept.
    it.sandbox_gone(&uid);
    it.delete_pod(&uid);
    assert!(it.sandboxes.is_empty());
    assert_eq!(it.sandbox_gone(&uid), uids(&[]));
}

#[test]
fn a_namespace_that_selects_a_pod_without_labels_is_told_from_others() {
    let mut it = index();
    it.apply_namespace("mesh", ambient());
    it.apply_namespace("other", Labels::new());
    it.apply_pod(pod("u", "unknown", "a"));
    let mut namespaces: Vec<_> = it.namespaces().collect();
    namespaces.sort_unstable();
    assert_eq!(namespaces, [("mesh", true), ("other", false)]);
}
