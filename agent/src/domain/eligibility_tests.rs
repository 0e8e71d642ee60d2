use super::*;
use crate::domain::workload::testing::pod as plain_pod;

fn policy() -> Policy {
    crate::domain::config::AgentConfig::default().policy()
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

fn mode(value: &str) -> Labels {
    if value.is_empty() { Labels::new() } else { labels(&[(names::DATAPLANE_MODE, value)]) }
}

fn pod(namespace: &str, labels: Labels) -> Pod {
    Pod { labels, ..plain_pod("u", namespace, "p") }
}

/// Istio's table for its default selectors: every value of the label on the pod against every one on
/// the namespace.
#[test]
fn istios_truth_table() {
    let (enrol, leave) = (Decision::Enrol, Decision::Leave(Reason::NotSelected));
    let table = [
        ("ambient", "", enrol),
        ("ambient", "ambient", enrol),
        ("ambient", "none", enrol),
        ("ambient", "other", enrol),
        ("none", "", leave),
        ("none", "ambient", leave),
        ("none", "none", leave),
        ("", "", leave),
        ("", "ambient", enrol),
        ("", "none", leave),
        ("", "other", leave),
        ("other", "ambient", enrol),
        ("other", "", leave),
        ("other", "none", leave),
    ];
    for (on_pod, on_namespace, expected) in table {
        let decision = policy().decide(&pod("ns", mode(on_pod)), Some(&mode(on_namespace)));
        assert_eq!(decision, expected, "pod {on_pod:?}, namespace {on_namespace:?}");
    }
}

/// What rules a pod out does so with the label on the pod and on the namespace, and names itself.
#[test]
fn what_rules_a_pod_out() {
    type Change = fn(&mut Pod);
    let table: [(&str, Change, Reason); 8] = [
        ("ended", |p| p.terminal = true, Reason::Terminal),
        ("node's network", |p| p.host_network = true, Reason::HostNetwork),
        ("excluded namespace", |p| p.info.namespace = "kube-system".into(), Reason::ExcludedNamespace),
        (
            "sidecar",
            |p| drop(p.annotations.insert(names::SIDECAR_STATUS.into(), "{}".into())),
            Reason::Sidecar,
        ),
        (
            "sidecar, empty value",
            |p| drop(p.annotations.insert(names::SIDECAR_STATUS.into(), String::new())),
            Reason::Sidecar,
        ),
        (
            "ztunnel",
            |p| {
                p.info.namespace = "istio-system".into();
                p.labels.insert("app".into(), "ztunnel".into());
            },
            Reason::ZtunnelPod,
        ),
        (
            "weir",
            |p| {
                p.info.namespace = "istio-system".into();
                p.labels.insert("app.kubernetes.io/name".into(), "weir".into());
            },
            Reason::OwnPod,
        ),
        // Without an address it would have to wait, were it not ruled out.
        (
            "node's network, no address",
            |p| {
                p.host_network = true;
                p.ips.clear();
            },
            Reason::HostNetwork,
        ),
    ];
    for (what, change, reason) in table {
        let mut it = pod("ns", mode("ambient"));
        change(&mut it);
        assert_eq!(policy().decide(&it, Some(&mode("ambient"))), Decision::Leave(reason), "{what}");
        // Nor does it wait for the labels of its namespace.
        assert_eq!(policy().decide(&it, None), Decision::Leave(reason), "{what}, namespace unknown");
    }
}

#[test]
fn the_labels_of_ztunnel_and_weir_mean_nothing_in_other_namespaces() {
    for (key, value) in [names::ZTUNNEL_APP, names::OWN_APP] {
        let mut it = pod("ns", mode("ambient"));
        it.labels.insert(key.into(), value.into());
        assert_eq!(policy().decide(&it, Some(&Labels::new())), Decision::Enrol, "{key}={value}");
    }
}

#[test]
fn ztunnel_is_found_where_the_configuration_says_it_runs() {
    let policy = Policy { system_namespace: "mesh".into(), ..policy() };
    let mut it = pod("mesh", mode("ambient"));
    it.labels.insert("app".into(), "ztunnel".into());
    assert_eq!(policy.decide(&it, Some(&Labels::new())), Decision::Leave(Reason::ZtunnelPod));
}

#[test]
fn excluding_one_namespace_leaves_the_others() {
    let policy = Policy { excluded_namespaces: BTreeSet::from(["a".into()]), ..policy() };
    let ambient = mode("ambient");
    assert_eq!(
        policy.decide(&pod("a", Labels::new()), Some(&ambient)),
        Decision::Leave(Reason::ExcludedNamespace)
    );
    assert_eq!(policy.decide(&pod("b", Labels::new()), Some(&ambient)), Decision::Enrol);
    assert_eq!(policy.decide(&pod("kube-system", Labels::new()), Some(&ambient)), Decision::Enrol);
}

#[test]
fn a_selected_pod_waits_for_its_address_and_an_unselected_one_does_not() {
    let mut it = pod("ns", Labels::new());
    it.ips.clear();
    assert_eq!(policy().decide(&it, Some(&mode("ambient"))), Decision::Wait(Reason::NoAddress));
    assert_eq!(policy().decide(&it, Some(&Labels::new())), Decision::Leave(Reason::NotSelected));
    it.ips = vec!["fd00::1".parse().unwrap()];
    assert_eq!(policy().decide(&it, Some(&mode("ambient"))), Decision::Enrol);
}

#[test]
fn an_unknown_namespace_is_waited_for() {
    assert_eq!(policy().decide(&pod("ns", Labels::new()), None), Decision::Wait(Reason::NamespaceUnknown));
}

#[test]
fn several_selectors_are_alternatives_and_both_parts_of_one_must_match() {
    let selectors = EnablementSelectors::from_yaml(
        "
        - podSelector: {matchLabels: {tier: web}}
          namespaceSelector: {matchExpressions: [{key: env, operator: In, values: [dev, test]}]}
        - namespaceSelector: {matchLabels: {mesh: all}}
        ",
    )
    .unwrap();
    let policy = Policy { selectors, ..policy() };
    let (web, none) = (labels(&[("tier", "web")]), Labels::new());
    for (of_pod, of_namespace, expected) in [
        (&web, labels(&[("env", "dev")]), true),
        (&web, labels(&[("env", "prod")]), false),
        (&none, labels(&[("env", "dev")]), false),
        (&none, labels(&[("mesh", "all")]), true),
        (&web, labels(&[("mesh", "all"), ("env", "prod")]), true),
        (&web, Labels::new(), false),
    ] {
        let decision = policy.decide(&pod("ns", of_pod.clone()), Some(&of_namespace));
        assert_eq!(decision == Decision::Enrol, expected, "{of_pod:?} in {of_namespace:?}");
    }
}

#[test]
fn istios_own_yaml_is_the_default() {
    let yaml = "
- podSelector:
    matchLabels:
      istio.io/dataplane-mode: ambient
- podSelector:
    matchExpressions:
    - key: istio.io/dataplane-mode
      operator: NotIn
      values:
      - none
  namespaceSelector:
    matchLabels:
      istio.io/dataplane-mode: ambient
";
    let read = EnablementSelectors::from_yaml(yaml).unwrap();
    assert_eq!(read, EnablementSelectors::default());
    // The plugin's form of the same thing.
    let json = serde_json::to_string(&read).unwrap();
    assert_eq!(EnablementSelectors::from_yaml(&json).unwrap(), read);
}

#[test]
fn absent_and_empty_selectors_match_everything_and_no_selector_nothing() {
    let it = pod("ns", Labels::new());
    for (yaml, expected) in [
        ("[]", false),
        ("[{}]", true),
        ("[{podSelector: {}, namespaceSelector: {}}]", true),
        ("- podSelector:\n  namespaceSelector:\n", true),
    ] {
        let selectors = EnablementSelectors::from_yaml(yaml).unwrap_or_else(|e| panic!("{yaml}: {e}"));
        let policy = Policy { selectors, ..policy() };
        assert_eq!(policy.decide(&it, Some(&Labels::new())) == Decision::Enrol, expected, "{yaml}");
    }
}

#[test]
fn a_selector_that_is_not_understood_is_refused_in_one_line_that_names_it() {
    for (yaml, named) in [
        ("- podselector: {}", "podselector"),
        ("- podSelector: {matchLabel: {a: b}}", "matchLabel"),
        ("- podSelector: {matchExpressions: [{key: a, operator: Is, values: [b]}]}", "Is"),
        ("podSelector: {}", ""),
        ("- podSelector: [", ""),
        ("just text", ""),
    ] {
        let error = EnablementSelectors::from_yaml(yaml).unwrap_err().to_string();
        assert!(error.contains(named), "{yaml}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}
