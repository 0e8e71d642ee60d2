use super::*;

fn namespace(store: &mut Store) {
    put(store, Resource::Namespaces, json!({ "metadata": { "name": "a" } })).unwrap();
}

fn pod(metadata: Value) -> Value {
    json!({ "metadata": metadata, "spec": { "containers": [{ "name": "c" }] } })
}

#[test]
fn uids_are_uuids() {
    let uid = new_uid();
    let lengths: Vec<usize> = uid.split('-').map(str::len).collect();
    assert_eq!(lengths, [8, 4, 4, 4, 12]);
    assert!(uid.as_bytes()[14] == b'4' && b"89ab".contains(&uid.as_bytes()[19]), "{uid}");
    assert_ne!(uid, new_uid());
}

#[test]
fn bodies_of_creates() {
    let code = |body: Value| {
        let mut store = Store::new(10);
        namespace(&mut store);
        create(&mut store, Resource::Pods, Some("a"), body).map_or_else(|error| error.code, |_| 201)
    };
    let table = [
        (pod(json!({ "name": "p" })), 201),
        (pod(json!({ "generateName": "p-" })), 201),
        (pod(json!({ "name": "p", "namespace": "a" })), 201),
        (pod(json!({ "name": "p", "namespace": "b" })), 400),
        (pod(json!({ "name": "p", "resourceVersion": "1" })), 400),
        (pod(json!({ "name": "P" })), 422),
        (pod(json!({})), 422),
        (pod(json!([])), 400),
        (json!(null), 400),
        (json!({ "metadata": { "name": "p" }, "spec": { "containers": [] } }), 422),
        (json!({ "metadata": { "name": "p" }, "spec": "x" }), 400),
        (json!({ "kind": "Node", "metadata": { "name": "p" } }), 400),
    ];
    for (body, want) in table {
        assert_eq!(code(body.clone()), want, "{body}");
    }
}

#[test]
fn the_server_names_and_stamps() {
    let mut store = Store::new(10);
    namespace(&mut store);
    let given = json!({ "generateName": "p-", "uid": "mine", "deletionTimestamp": now() });
    let made = create(&mut store, Resource::Pods, Some("a"), pod(given)).unwrap();
    let metadata = made.value(Resource::Pods)["metadata"].clone();
    assert!(metadata["name"].as_str().unwrap().starts_with("p-") && made.key.name.len() > 2);
    assert_eq!(metadata["namespace"], "a");
    assert!(metadata["uid"] != "mine" && metadata["uid"] == *made.uid);
    assert!(metadata["creationTimestamp"].is_string() && metadata["deletionTimestamp"].is_null());
}

#[test]
fn with_a_namespace_goes_all_in_it() {
    let mut store = Store::new(10);
    for namespace in ["a", "b"] {
        put(&mut store, Resource::Pods, pod(json!({ "name": "p", "namespace": namespace }))).unwrap();
    }
    delete(&mut store, Resource::Namespaces, &Key::new("", "a"), &Value::Null).unwrap();
    let left: Vec<_> = store.objects(Resource::Pods, None).map(|pod| &*pod.key.namespace).collect();
    assert_eq!(left, ["b"]);
}
