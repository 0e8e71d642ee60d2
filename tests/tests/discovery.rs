//! Whose namespace is it? Processes of a pod can sit in namespaces that are not the pod's.
#![cfg(feature = "root")]

use std::{
    net::IpAddr,
    path::PathBuf,
    process::{Command, Stdio},
};

use weir_agent::netns::{
    Netns,
    discover::{DiscoverError, Discovery},
};
use weir_tests::{
    cluster::gear,
    world::{Cgroup, Child, Families, Host, World},
};

/// A process of the pod that `cgroup` stands for, in the namespace of `host`.
fn process(cgroup: &Cgroup, host: &Host) -> Child {
    let child =
        Child::start_in(host, Command::new(gear().unwrap()).arg("pause").stdin(Stdio::piped())).unwrap();
    cgroup.add(child.pid()).unwrap();
    // Start times are in ticks of ten milliseconds: the next process is younger.
    std::thread::sleep(std::time::Duration::from_millis(20));
    child
}

/// Older processes of the pod sit in the node's namespace and in another pod's: neither is taken for the pod's. Of
/// its own, any one of its addresses is proof; no address is none.
#[test]
fn a_namespace_is_taken_only_when_it_is_the_pods() {
    let world = World::new().unwrap();
    let [own, foreign] = ["own", "foreign"].map(|name| world.pod(name, Families::Dual).unwrap());
    let uid = format!("{:08x}-0000-4000-8000-000000000001", rand::random::<u32>());
    let cgroup = Cgroup::new(&format!("{}/kubepods/pod{uid}/main", world.id())).unwrap();
    let host = Netns::open(&world.node.path()).unwrap();
    // One scan serves for 200 ms: each question gets a fresh one.
    let find = |ips: &[IpAddr]| Discovery::new(PathBuf::from("/proc"), host.clone()).find(&uid, ips);
    let ips = [own.ip(false), own.ip(true)];
    assert!(matches!(find(&ips), Err(DiscoverError::NoProcess(_))));

    let _in_node = process(&cgroup, &world.node);
    let _in_foreign = process(&cgroup, &foreign);
    assert!(matches!(find(&ips), Err(DiscoverError::Refused { processes: 2, .. })), "{:?}", find(&ips));
    // The node's own address does not make the node's namespace a pod's.
    assert!(find(&[world.node.ip(false)]).is_err());

    let first = process(&cgroup, &own);
    let found = |ips: &[IpAddr]| find(ips).map(|netns| netns.cookie());
    let cookie = Ok(own.netns().cookie());
    for some in [&ips[..], &ips[..1], &ips[1..], &["192.0.2.1".parse().unwrap(), ips[1]]] {
        assert_eq!(found(some), cookie, "{some:?}");
    }
    for none in [&[][..], &["192.0.2.1".parse().unwrap()]] {
        assert!(matches!(found(none), Err(DiscoverError::Refused { processes: 3, .. })), "{none:?}");
    }
    // Both its namespaces qualify by an address: the older process's is the pod's.
    let both = [foreign.ip(false), own.ip(false)];
    assert_eq!(found(&both), Ok(foreign.netns().cookie()));
    drop(first);
    assert!(found(&ips).is_err(), "nobody is left in it");
}
