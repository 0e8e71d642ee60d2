use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::json;

use super::*;

const PODS: Resource = Resource::Pods;

fn put(store: &mut Store, name: &str, node: &str) -> u64 {
    let value =
        json!({ "metadata": { "name": name, "namespace": "a", "uid": name }, "spec": { "nodeName": node } });
    store.put(PODS, Key::new("a", name), value).version
}

fn filter(namespace: Option<&str>, fields: &str) -> Filter {
    Filter::new(PODS, namespace, "", fields).unwrap()
}

fn page(
    store: &Store,
    filter: &Filter,
    at: Option<u64>,
    after: Option<Key>,
    limit: usize,
) -> Result<Page, ApiError> {
    store.list(&ListQuery { resource: PODS, filter, at, after, limit })
}

fn names(objects: &[Arc<Object>]) -> Vec<String> {
    objects.iter().map(|object| format!("{}@{}", object.key.name, object.version)).collect()
}

fn code<T: std::fmt::Debug>(result: Result<T, ApiError>) -> u16 {
    result.unwrap_err().code
}

#[test]
fn versions_only_grow() {
    let mut store = Store::new(10);
    assert_eq!(put(&mut store, "x", "n"), 2);
    assert_eq!(put(&mut store, "x", "m"), 3);
    let (old, removed) = store.remove(PODS, &Key::new("a", "x")).unwrap();
    assert_eq!((old.version, removed, store.version()), (3, 4, 4));
    assert!(store.remove(PODS, &Key::new("a", "x")).is_none());
    assert_eq!(store.version(), 4, "nothing was removed");
}

#[test]
fn the_window_forgets() {
    let mut store = Store::new(3);
    let versions: Vec<u64> = (0..5).map(|at| put(&mut store, &format!("p{at}"), "n")).collect();
    // Of five changes three are known: the version of the second is the oldest to start from.
    assert_eq!(code(store.changes(PODS, versions[0], 10)), 410);
    assert_eq!(code(store.reachable(PODS, versions[0])), 410);
    assert!(store.reachable(PODS, versions[1]).is_ok());
    let changes = store.changes(PODS, versions[1], 10).unwrap();
    let told: Vec<u64> = changes.list.iter().map(|change| change.version).collect();
    assert_eq!((told.as_slice(), changes.upto), (&versions[2..], versions[4]));
    // Other kinds have a window of their own.
    assert!(store.reachable(Resource::Nodes, 1).is_ok());
}

#[test]
fn changes_come_in_pieces() {
    let mut store = Store::new(10);
    let versions: Vec<u64> = (0..5).map(|at| put(&mut store, &format!("p{at}"), "n")).collect();
    let piece = store.changes(PODS, versions[0], 2).unwrap();
    assert_eq!((piece.list.len(), piece.upto), (2, versions[2]));
    let rest = store.changes(PODS, piece.upto, 10).unwrap();
    assert_eq!((rest.list.len(), rest.upto), (2, versions[4]));
    // A version of the future is waited for, not gone back from.
    let none = store.changes(PODS, 99, 10).unwrap();
    assert_eq!((none.list.len(), none.upto), (0, 99));
}

#[test]
fn compaction_spares_who_has_seen_all() {
    let mut store = Store::new(10);
    let pod = put(&mut store, "x", "n");
    store.put(Resource::Nodes, Key::new("", "n"), json!({ "metadata": { "name": "n", "uid": "n" } }));
    store.compact();
    assert!(store.changes(PODS, pod, 10).is_ok(), "a running watch missed nothing");
    assert_eq!(code(store.changes(PODS, pod - 1, 10)), 410);
    assert_eq!(code(store.reachable(PODS, pod)), 410);
    assert!(store.reachable(PODS, store.version()).is_ok());
}

#[test]
fn lists_of_the_past_and_of_the_future() {
    let mut store = Store::new(10);
    put(&mut store, "x", "n");
    let then = put(&mut store, "y", "n");
    put(&mut store, "w", "n");
    put(&mut store, "y", "m");
    store.remove(PODS, &Key::new("a", "x"));
    let all = filter(None, "");
    let node = filter(Some("a"), "spec.nodeName=n");
    for filter in [&all, &node] {
        assert_eq!(names(&page(&store, filter, Some(then), None, 0).unwrap().objects), ["x@2", "y@3"]);
    }
    assert_eq!(names(&page(&store, &node, None, None, 0).unwrap().objects), ["w@4"]);
    assert_eq!(page(&store, &all, Some(then), None, 0).unwrap().version, then);
    assert_eq!(code(page(&store, &all, Some(99), None, 0)), 504);
    store.compact();
    assert_eq!(code(page(&store, &all, Some(then), None, 0)), 410);
}

#[test]
fn the_last_page_says_so() {
    let mut store = Store::new(10);
    for name in ["a", "b", "c", "d"] {
        put(&mut store, name, "n");
    }
    let all = filter(None, "");
    let node = filter(None, "spec.nodeName=n");
    let after = |name: &str| Some(Key::new("a", name));
    let table = [
        ((&all, None, 3), (3, after("c"), Some(1))),
        ((&all, after("c"), 3), (1, None, None)),
        ((&all, None, 4), (4, None, None)),
        ((&all, None, 0), (4, None, None)),
        ((&node, None, 3), (3, after("c"), None)),
        ((&node, after("b"), 2), (2, None, None)),
    ];
    for ((filter, after, limit), want) in table {
        let page = page(&store, filter, None, after, limit).unwrap();
        assert_eq!((page.objects.len(), page.next, page.remaining), want, "{filter:?}");
    }
}

/// Random writes against the plainest model there is: a copy of the whole state per version.
#[test]
fn a_model_agrees() {
    for seed in 0..20 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut store = Store::new(30);
        let mut state: BTreeMap<String, (u64, String)> = BTreeMap::new();
        let mut states = BTreeMap::from([(1, state.clone())]);
        for _ in 0..60 {
            let name = format!("p{}", rng.random_range(0..12));
            if rng.random_bool(0.3) {
                store.remove(PODS, &Key::new("a", &name));
                state.remove(&name);
            } else {
                let node = format!("n{}", rng.random_range(0..3));
                let version = put(&mut store, &name, &node);
                state.insert(name, (version, node));
            }
            states.insert(store.version(), state.clone());
        }
        for (&version, state) in &states {
            let reachable = store.reachable(PODS, version).is_ok();
            for (filter, node) in [(filter(None, ""), None), (filter(None, "spec.nodeName=n1"), Some("n1"))] {
                let want: Vec<String> = state
                    .iter()
                    .filter(|(_, (_, is))| node.is_none_or(|node| node == is))
                    .map(|(name, (version, _))| format!("{name}@{version}"))
                    .collect();
                let got = page(&store, &filter, Some(version), None, 0);
                assert_eq!(got.is_ok(), reachable, "seed {seed} version {version}");
                let Ok(got) = got else { continue };
                assert_eq!(names(&got.objects), want, "seed {seed} version {version}");
                let (mut paged, mut after) = (Vec::new(), None);
                loop {
                    let piece = page(&store, &filter, Some(version), after, 2).unwrap();
                    paged.extend(names(&piece.objects));
                    after = piece.next;
                    if after.is_none() {
                        break;
                    }
                }
                assert_eq!(paged, want, "seed {seed} version {version} in pages");
            }
            // From that state, the changes lead to the newest one.
            let changes = store.changes(PODS, version, 1000);
            assert_eq!(changes.is_ok(), reachable);
            let Ok(changes) = changes else { continue };
            let mut replayed = state.clone();
            for change in &changes.list {
                match &change.new {
                    Some(new) => {
                        replayed.insert((*new.key.name).into(), (new.version, (*new.node).into()));
                    }
                    None => {
                        replayed.remove(&*change.key().name);
                    }
                }
            }
            assert_eq!(replayed, *states.values().next_back().unwrap(), "seed {seed} version {version}");
        }
    }
}
