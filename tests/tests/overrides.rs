//! Overrides by annotation, applied live to an enrolled pod; interfaces that appear later; connections older than
//! the enrolment and their deadline; whose probes are exempt. With `weir agent` as a process.
#![cfg(feature = "root")]

use std::{
    io::{self, Write},
    net::SocketAddr,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use weir_common::Counter;
use weir_tests::{
    app::{App, Client},
    cluster::{self, Cluster, Pod},
    meshed::start_ztunnel,
    observer::Observer,
    world::{Child, Families, Host, addresses},
    ztunnel::{Mesh, Ztunnel},
};

const APP: u16 = 8080;
const OTHER: u16 = 9090;

/// A cluster node with one enrolled pod.
struct Fixture {
    cluster: Cluster,
    ztunnel: Ztunnel,
    pod: Pod,
    _apps: [App; 4],
}

impl Fixture {
    fn new(agent_flags: &[&str]) -> Self {
        let mut cluster = Cluster::new().unwrap();
        let outside = &cluster.world.outside;
        let pod = cluster.pod("shop", "a", Families::Dual).unwrap();
        let apps = [
            App::start(outside, APP).unwrap(),
            App::start(outside, OTHER).unwrap(),
            App::start(&pod.host, APP).unwrap(),
            App::start(&pod.host, OTHER).unwrap(),
        ];
        let mesh = Mesh::default();
        mesh.join(&pod.uid, &addresses(&pod.host));
        let ztunnel = start_ztunnel(&mesh).unwrap();
        cluster.start_agent_with(agent_flags).unwrap();
        Self { cluster, ztunnel, pod, _apps: apps }
    }

    fn enrolled(agent_flags: &[&str]) -> Self {
        let f = Self::new(agent_flags);
        f.enrol();
        f
    }

    fn enrol(&self) {
        self.cluster.namespace("shop", true);
        self.cluster.wait_redirection(&self.pod, Some("enabled")).unwrap();
    }

    fn annotate(&self, annotations: &[(&str, &str)]) {
        let mut all = vec![("ambient.istio.io/redirection", "enabled")];
        all.extend(annotations);
        self.cluster.api.set_pod_annotations("shop", "a", &all);
    }

    fn count(&self, counter: Counter) -> u64 {
        let pinned = weir_agent::redirect::pinned(weir_tests::world::PIN_ROOT.as_ref());
        pinned.first().map_or(0, |pod| pod.counters.total(counter))
    }

    /// Whether connections of the pod to the outside go through ztunnel.
    fn out_captured(&self, v6: bool, port: u16) -> bool {
        let before = self.ztunnel.log().counts().outbound;
        talk(&self.pod.host, self.cluster.world.outside.addr(v6, port));
        self.ztunnel.log().counts().outbound > before
    }

    /// Whether connections from the outside to the pod go through ztunnel.
    fn in_captured(&self, v6: bool, port: u16) -> bool {
        let before = self.ztunnel.log().counts().inbound;
        Client::connect(&self.cluster.world.outside, self.pod.host.addr(v6, port))
            .unwrap()
            .exchange()
            .unwrap();
        self.ztunnel.log().counts().inbound > before
    }

    fn wait(&self, what: &str, done: impl FnMut() -> bool) {
        self.cluster.wait(what, done).unwrap();
    }
}

/// A captured connection to what has just become excluded is ended, so one that is under way may fail: but the next
/// does not.
fn talk(from: &Host, to: SocketAddr) {
    let talk = || Client::connect(from, to).and_then(|mut client| client.exchange());
    talk().or_else(|_| talk()).unwrap();
}

/// A case: annotations, and what they must lead to: out to two ports, in to two ports.
type Case = (&'static [(&'static str, &'static str)], [bool; 4]);

#[test]
fn annotations_are_applied_live() {
    let f = Fixture::enrolled(&[]);
    const ALL: [bool; 4] = [true; 4];
    const CASES: &[Case] = &[
        (&[], ALL),
        (&[("ambient.istio.io/bypass-inbound-capture", "true")], [true, true, false, false]),
        (&[("weir.dev/exclude-inbound-ports", "9090")], [true, true, true, false]),
        (&[("weir.dev/exclude-outbound-ports", "9090")], [true, false, true, true]),
        (&[("weir.dev/exclude-outbound-cidrs", "10.88.2.0/24,fd88:2::/64")], [false, false, true, true]),
        (&[("weir.dev/exclude-outbound-cidrs", "10.99.0.0/16,fd99::/16")], ALL),
        (
            &[("weir.dev/exclude-inbound-ports", "8080"), ("weir.dev/exclude-outbound-ports", "8080")],
            [false, true, false, true],
        ),
        // What does not parse changes nothing.
        (&[("weir.dev/exclude-inbound-ports", "all")], ALL),
        (&[], ALL),
    ];
    for (annotations, wanted) in CASES {
        f.annotate(annotations);
        for v6 in [false, true] {
            let look = || {
                [
                    f.out_captured(v6, APP),
                    f.out_captured(v6, OTHER),
                    f.in_captured(v6, APP),
                    f.in_captured(v6, OTHER),
                ]
            };
            f.wait(&format!("{annotations:?} leads to {wanted:?}, v6 {v6}"), || look() == *wanted);
        }
        assert_eq!(f.cluster.redirection(&f.pod).as_deref(), Some("enabled"), "{annotations:?}");
    }
    assert!(f.count(Counter::ExcludedIn) >= 4 && f.count(Counter::ExcludedOut) >= 8);
    let log = f.cluster.agent_log();
    assert!(log.contains("weir.dev/exclude-inbound-ports") && log.contains("\"all\""), "{log}");
    f.wait("the user is told as well", || {
        let events = f.cluster.api.events();
        events.iter().any(|event| event.reason.as_deref() == Some("BadAnnotation"))
    });
    assert_eq!(f.count(Counter::Guarded), 0, "something legitimate met the guard");
}

/// A second interface that appears on an enrolled pod is captured on, and guarded, within the time of one look.
#[test]
fn an_interface_that_appears_later_is_captured() {
    let f = Fixture::enrolled(&[]);
    let (node, pod) = (&f.cluster.world.node, &f.pod.host);
    node.configure(&[
        &format!("link add second type veth peer name net1 netns {}", pod.name()),
        "link set second up",
        "addr add 10.77.0.1/24 dev second",
    ])
    .unwrap();
    pod.configure(&["link set net1 up", "addr add 10.77.0.2/24 dev net1"]).unwrap();
    let server = App::start(node, 7070).unwrap();
    let (out, inward): (SocketAddr, SocketAddr) =
        ("10.77.0.1:7070".parse().unwrap(), "10.77.0.2:8080".parse().unwrap());
    f.wait("captured out by the second interface", || {
        let before = f.ztunnel.log().counts().outbound;
        Client::connect(pod, out).is_ok() && f.ztunnel.log().counts().outbound > before
    });
    f.wait("captured in by the second interface", || {
        let before = f.ztunnel.log().counts().inbound;
        Client::connect(node, inward).is_ok() && f.ztunnel.log().counts().inbound > before
    });
    f.wait("its own new address is a self-call", || {
        let before = f.count(Counter::SelfCall);
        Client::connect(pod, inward).is_ok() && f.count(Counter::SelfCall) > before
    });
    f.cluster.wait_redirection(&f.pod, Some("enabled")).unwrap();
    // And an address that goes again.
    pod.configure(&["addr del 10.77.0.2/24 dev net1", "link del net1"]).unwrap();
    f.wait("the rest still works", || f.out_captured(false, APP));
    drop(server);
}

/// Arrivals on a rerouted interface are the pod's own outbound traffic, as of a virtual machine behind it.
#[test]
fn a_rerouted_interface_is_outbound() {
    let f = Fixture::enrolled(&[]);
    let guest = f.cluster.world.pod("guest", Families::V4).unwrap();
    let pod = &f.pod.host;
    guest.configure(&["link del eth0"]).unwrap();
    pod.configure(&[
        &format!("link add tap0 type veth peer name eth0 netns {}", guest.name()),
        "link set tap0 up",
        "addr add 10.66.0.1/24 dev tap0",
    ])
    .unwrap();
    pod.sysctl("net.ipv4.ip_forward", "1").unwrap();
    guest
        .configure(&[
            "link set eth0 up",
            "addr add 10.66.0.2/24 dev eth0",
            "route add default via 10.66.0.1 dev eth0",
        ])
        .unwrap();
    f.annotate(&[("istio.io/reroute-virtual-interfaces", "tap0")]);
    let to = f.cluster.world.outside.addr(false, APP);
    f.wait("the guest's connection goes through ztunnel", || {
        let before = f.ztunnel.log().counts().outbound;
        Client::connect(&guest, to).is_ok_and(|mut client| client.exchange().is_ok())
            && f.ztunnel.log().counts().outbound > before
    });
    let seen = f.ztunnel.log().accepted();
    let last = seen.last().unwrap();
    assert_eq!((last.original_dst, last.client.ip()), (to, "10.66.0.2".parse().unwrap()));
}

/// As many exclusions as may be asked for, and others instead: both fit at once while one replaces the other. More
/// than may be asked for are no annotation at all: the pod stays captured, and its user is told.
#[test]
fn as_many_exclusions_as_there_may_be_are_replaced_by_others() {
    let f = Fixture::enrolled(&[]);
    let list = |number: usize, name: fn(usize) -> String| (0..number).map(name).collect::<Vec<_>>().join(",");
    let annotate = |ports: &str, networks: &str| {
        f.annotate(&[
            ("weir.dev/exclude-inbound-ports", ports),
            ("weir.dev/exclude-outbound-ports", ports),
            ("weir.dev/exclude-outbound-cidrs", networks),
        ]);
    };
    let excludes = |port: u16, excluded: bool| {
        let what = format!("{port} is excluded: {excluded}");
        f.wait(&what, || [false, true].iter().all(|v6| f.in_captured(*v6, port) != excluded));
        f.cluster.wait_redirection(&f.pod, Some("enabled")).unwrap();
    };
    annotate(&list(256, |n| (APP as usize + n).to_string()), &list(256, |n| format!("10.100.{n}.0/24")));
    excludes(APP, true);
    annotate(&list(256, |n| (OTHER as usize + n).to_string()), &list(256, |n| format!("10.101.{n}.0/24")));
    excludes(APP, false);
    excludes(OTHER, true);
    annotate(&list(257, |n| (APP as usize + n).to_string()), "");
    excludes(APP, false);
    f.wait("the user is told", || {
        let events = f.cluster.api.events();
        events.iter().any(|event| event.reason.as_deref() == Some("BadAnnotation"))
    });
    assert!(!f.cluster.agent_log().contains("switch_on_failed"), "{}", f.cluster.agent_log());
}

/// Connections older than the enrolment go on until the deadline, then exactly they are ended, within a second.
#[test]
fn old_connections_end_at_their_deadline_and_no_others() {
    let f = Fixture::new(&["--existing-connections", "3s"]);
    let outside = &f.cluster.world.outside;
    let connect = || -> Vec<Client> {
        (0..200)
            .flat_map(|number| {
                let v6 = number % 2 == 1;
                [
                    Client::connect(&f.pod.host, outside.addr(v6, APP)).unwrap(),
                    Client::connect(outside, f.pod.host.addr(v6, APP)).unwrap(),
                ]
            })
            .collect()
    };
    let mut old = connect();
    let began = Instant::now();
    f.enrol();
    let enrolled = Instant::now();
    let mut captured = connect();
    // Busy ones and idle ones, of both directions: every third says something now.
    old.iter_mut().step_by(3).for_each(|client| client.exchange().expect("before the deadline"));
    assert!(enrolled.elapsed() < Duration::from_secs(2), "too slow a machine for this test");
    std::thread::sleep((began + Duration::from_millis(2900)).saturating_duration_since(Instant::now()));
    for client in &mut old {
        client.exchange().expect("not before the deadline");
    }
    std::thread::sleep((enrolled + Duration::from_secs(4)).saturating_duration_since(Instant::now()));
    for client in &mut old {
        let error = client.exchange().expect_err("ended within a second after the deadline");
        assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "silent instead of ended");
    }
    captured.iter_mut().for_each(|client| client.exchange().expect("captured connections are not touched"));
    let pinned = weir_agent::redirect::pinned(weir_tests::world::PIN_ROOT.as_ref());
    assert_eq!(pinned[0].old.adopted, [200, 200]);
    assert_eq!(pinned[0].old.expired, [200, 200]);
    let status = Command::new(cluster::weir().unwrap()).arg("status").output().unwrap();
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains("adopted=400") && status.contains("expired=400"), "{status}");
}

/// The policy can be another per pod, and can change while connections are old.
#[test]
fn the_policy_for_old_connections_is_followed_live() {
    let f = Fixture::new(&[]);
    let outside = &f.cluster.world.outside;
    let mut old = Client::connect(&f.pod.host, outside.addr(false, APP)).unwrap();
    f.enrol();
    std::thread::sleep(Duration::from_millis(600));
    old.exchange().expect("the default is ten minutes");
    f.annotate(&[("weir.dev/existing-connections", "keep")]);
    std::thread::sleep(Duration::from_millis(600));
    old.exchange().expect("keep");
    f.annotate(&[("weir.dev/existing-connections", "reset")]);
    f.wait("reset", || old.exchange().is_err());
}

/// Whose connections from the node are exempt: the kubelet's cgroup, also a new one; every process; nobody's.
#[test]
fn probes_are_exempt_as_configured() {
    for (flags, kubelet_exempt, others_exempt) in [
        (vec![], true, false),
        (vec!["--probe-exemption", "host"], true, true),
        (vec!["--probe-exemption", "off"], false, false),
    ] {
        let f = Fixture::enrolled(&flags);
        for v6 in [false, true] {
            let to = f.pod.host.addr(v6, APP);
            f.wait(&format!("{flags:?}: kubelet, v6 {v6}"), || {
                probe_is_captured(&f, to, true) != kubelet_exempt
            });
            f.wait(&format!("{flags:?}: others, v6 {v6}"), || {
                probe_is_captured(&f, to, false) != others_exempt
            });
        }
    }
}

fn probe_is_captured(f: &Fixture, to: SocketAddr, kubelet: bool) -> bool {
    let before = f.ztunnel.log().counts().inbound;
    let mut command = Command::new(cluster::gear().unwrap());
    command.args(["probe", &to.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Child::start_in(&f.cluster.world.node, &mut command).unwrap();
    if kubelet {
        f.cluster.kubelet.add(child.pid()).unwrap();
    }
    child.stdin().unwrap().write_all(b"\n").unwrap();
    let status = child.wait(Duration::from_secs(5)).unwrap();
    assert!(status.success());
    f.ztunnel.log().counts().inbound > before
}

/// With DNS capture off by annotation, and back on, queries go where they must.
#[test]
fn dns_capture_follows_the_annotation() {
    let f = Fixture::enrolled(&[]);
    let observer = |f: &Fixture| {
        Observer::start(&f.cluster.world.node, &f.cluster.world.device_of(&f.pod.host)).unwrap()
    };
    let ask = |f: &Fixture| {
        let server = f.cluster.world.outside.addr(false, 53);
        f.pod.host.inside(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            // A query for "a.test", type A.
            let query = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x04test\x00\x00\x01\x00\x01";
            socket.send_to(query, server).unwrap();
            let mut answer = [0; 512];
            socket.recv_from(&mut answer).is_ok_and(|(_, from)| from == server)
        })
    };
    assert!(ask(&f), "ztunnel answers in the server's name");
    f.annotate(&[("ambient.istio.io/dns-capture", "false")]);
    f.wait("nobody answers: the query goes to the server, which is not there", || !ask(&f));
    assert!(f.count(Counter::GuardedDns) == 0, "a query that may leave met the guard");
    f.annotate(&[]);
    f.wait("ztunnel answers again", || ask(&f));
    drop(observer(&f).stop());
}
