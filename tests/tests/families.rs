//! Pods of one family and of both, with several addresses, with IPv6 switched off in various ways: what they have is
//! captured, and afterwards everything is as it was.
#![cfg(feature = "root")]

use std::net::{IpAddr, SocketAddr};

use weir_tests::{
    app::{App, Client, Connect},
    dns_client::{DNS, any, check, udp},
    mesh_node::{MeshNode, difference},
    observer::Observer,
    world::{Families, Host, addresses, run_in},
    ztunnel::{
        Listener::{Inbound, Outbound},
        dns,
    },
};

const APP: u16 = 8080;
const WEB: u16 = 80;

struct Fixture {
    node: MeshNode,
    pod: Host,
    /// The address by which the pod reaches a remote host without weir, by family.
    direct: [Option<IpAddr>; 2],
    _apps: [App; 2],
}

impl Fixture {
    /// A pod that is not captured yet; `prepare` makes it special.
    fn new(families: Families, prepare: &[&str]) -> Self {
        Self::with_more(families, prepare, &[])
    }

    /// The same, with further addresses that the node knows the way to.
    fn with_more(families: Families, prepare: &[&str], more: &[IpAddr]) -> Self {
        let node = MeshNode::new().unwrap();
        let pod = node.pod("a", families).unwrap();
        for step in prepare {
            match step.split_once('=') {
                Some((name, value)) => pod.sysctl(name, value).unwrap(),
                None => pod.configure(&[step]).unwrap(),
            }
        }
        let apps = [App::start(&pod, APP).unwrap(), App::start(&node.world.outside, WEB).unwrap()];
        reach(&node, &pod, more);
        let direct = [false, true].map(|v6| {
            Client::connect(&pod, node.world.outside.addr(v6, WEB)).ok().map(|client| client.seen_as.ip())
        });
        Self { node, pod, direct, _apps: apps }
    }

    /// Captures, walks, lets go: the namespace must be what it was before.
    fn check(&self, walks: impl FnOnce(&Self)) {
        let before = settled(&self.pod);
        self.node.capture(&self.pod).unwrap();
        let captured = state(&self.pod);
        assert_ne!(before, captured, "the comparison sees nothing");
        walks(self);
        self.node.release(&self.pod).unwrap();
        let after = state(&self.pod);
        for ((what, before), (_, after)) in before.iter().zip(&after) {
            assert_eq!(before, after, "{what}");
        }
        assert!(self.node.redirector.pinned().is_empty());
        // A second time: nothing of the first is in the way.
        self.node.capture(&self.pod).unwrap();
        self.node.release(&self.pod).unwrap();
        assert_eq!(before, state(&self.pod));
    }

    /// Both directions, DNS and the pod by itself, of one family.
    fn walks(&self, v6: bool) {
        let outside = &self.node.world.outside;
        let observer = Observer::start(&self.node.world.node, &self.node.world.device_of(&self.pod)).unwrap();
        let direct = self.direct[usize::from(v6)].expect("a pod that had the family before");
        self.captured(&self.pod, outside.addr(v6, WEB), direct);
        self.captured(outside, self.pod.addr(v6, APP), outside.ip(v6));
        self.untouched(self.pod.addr(v6, APP));
        let (socket, question) = (udp(&self.pod, any(v6)), dns::query(1, "family.example"));
        let server = SocketAddr::new(outside.ip(v6), DNS);
        socket.send_to(&question, server).unwrap();
        let mut buffer = [0; 512];
        let (length, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!(from, server);
        check(&buffer[..length], &question, "family.example");
        let seen = observer.stop();
        assert_eq!((seen.syns().filter(|syn| syn.is_escaped()).count(), seen.dns().count()), (0, 0));
    }

    /// A connection that ztunnel takes, to its end.
    fn captured(&self, from: &Host, to: SocketAddr, seen_as: IpAddr) {
        self.node.ztunnel.log().clear();
        let mut client = Client::connect(from, to).unwrap_or_else(|error| panic!("{to}: {error}"));
        client.exchange().unwrap();
        assert_eq!(client.seen_as.ip(), seen_as, "{to}");
        let listener = if from.name() == self.pod.name() { Outbound } else { Inbound };
        let seen = self.node.ztunnel.log().accepted();
        assert!(
            matches!(&seen[..], [one] if one.listener == listener && one.original_dst == to),
            "{to}: {seen:?}"
        );
    }

    /// A connection of the pod to itself.
    fn untouched(&self, to: SocketAddr) {
        self.node.ztunnel.log().clear();
        let before = self.node.counters(&self.pod).unwrap();
        let client = Client::connect(&self.pod, to).unwrap_or_else(|error| panic!("{to}: {error}"));
        assert_eq!(client.server, "a");
        assert!(self.node.ztunnel.log().accepted().is_empty(), "{to}");
        let counted = difference(&before, &self.node.counters(&self.pod).unwrap());
        assert!(counted.iter().all(|(name, _)| *name == "self_call"), "{to}: {counted:?}");
    }
}

/// The state once it does not change any more: a link-local address comes by itself, a moment after its link.
fn settled(pod: &Host) -> Vec<(String, String)> {
    let mut before = state(pod);
    loop {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = state(pod);
        if now == before {
            return now;
        }
        before = now;
    }
}

/// All that weir may change in a namespace.
fn state(pod: &Host) -> Vec<(String, String)> {
    const COMMANDS: &[&str] = &[
        "ip -4 rule",
        "ip -6 rule",
        "ip -4 route show table all",
        "ip -6 route show table all",
        "ip address",
        "tc qdisc",
        "tc filter show dev eth0 ingress",
        "tc filter show dev eth0 egress",
        "tc filter show dev lo ingress",
        "tc filter show dev lo egress",
        "bpftool net",
        "sysctl -a --pattern ^net\\.",
    ];
    let read = |command: &&str| {
        let mut words = command.split(' ');
        let said = run_in(pod, words.next().unwrap(), &words.collect::<Vec<_>>()).unwrap();
        // What counts by itself.
        let steady =
            |line: &&str| !["expires", "netns_cookie", "random", "nr_"].iter().any(|w| line.contains(w));
        ((*command).to_owned(), said.lines().filter(steady).collect::<Vec<_>>().join("\n"))
    };
    COMMANDS.iter().map(read).collect()
}

#[test]
fn ipv4_only() {
    Fixture::new(Families::V4, &[]).check(|f| f.walks(false));
}

#[test]
fn ipv6_only() {
    Fixture::new(Families::V6, &[]).check(|f| f.walks(true));
}

#[test]
fn dual_stack() {
    Fixture::new(Families::Dual, &[]).check(|f| {
        f.walks(false);
        f.walks(true);
    });
}

/// IPv6 has to work on `lo` for as long as the pod is captured, and only so long.
#[test]
fn ipv6_off_on_lo() {
    Fixture::new(Families::Dual, &["net.ipv6.conf.lo.disable_ipv6=1"]).check(|f| {
        f.walks(false);
        f.walks(true);
    });
}

#[test]
fn ipv6_off_everywhere() {
    Fixture::new(Families::V4, &["net.ipv6.conf.all.disable_ipv6=1"]).check(|f| f.walks(false));
}

#[test]
fn ipv6_off_in_a_pod_that_had_it() {
    Fixture::new(Families::Dual, &["net.ipv6.conf.all.disable_ipv6=1"]).check(|f| f.walks(false));
}

/// Several addresses: each is captured from outside, and between them the pod talks to itself.
#[test]
fn several_addresses() {
    let more = ["10.88.66.1", "fd88::66:1"].map(|ip| ip.parse::<IpAddr>().unwrap());
    let prepare = ["addr add 10.88.66.1/32 dev eth0", "-6 addr add fd88::66:1/128 dev eth0 nodad"];
    let f = Fixture::with_more(Families::Dual, &prepare, &more);
    f.check(|f| {
        f.walks(false);
        f.walks(true);
        for ip in more {
            let outside = &f.node.world.outside;
            f.captured(outside, SocketAddr::new(ip, APP), outside.ip(ip.is_ipv6()));
            let own = addresses(&f.pod).into_iter().find(|own| own.is_ipv6() == ip.is_ipv6()).unwrap();
            for (from, to) in [(own, ip), (ip, own), (ip, ip)] {
                f.untouched(SocketAddr::new(to, APP));
                let connect = |to| {
                    let bound = Connect { from: Some(SocketAddr::new(from, 0)), ..Connect::default() };
                    let mut client = Client::connect_with(&f.pod, to, bound).unwrap();
                    client.exchange().unwrap();
                    client
                };
                assert_eq!(connect(SocketAddr::new(to, APP)).seen_as.ip(), from);
                // What is not the first address is captured as well.
                f.node.ztunnel.log().clear();
                connect(f.node.world.outside.addr(ip.is_ipv6(), WEB));
                assert_eq!(f.node.ztunnel.log().accepted().len(), 1);
            }
        }
    });
}

/// An address on `lo`, as routing daemons have them: captured from outside, the pod's own from inside.
#[test]
fn addresses_on_lo() {
    let more = ["10.88.77.1", "fd88::77:1"].map(|ip| ip.parse::<IpAddr>().unwrap());
    let prepare = ["addr add 10.88.77.1/32 dev lo", "-6 addr add fd88::77:1/128 dev lo nodad"];
    let f = Fixture::with_more(Families::Dual, &prepare, &more);
    f.check(|f| {
        for ip in more {
            f.walks(ip.is_ipv6());
            f.untouched(SocketAddr::new(ip, APP));
            let outside = &f.node.world.outside;
            f.captured(outside, SocketAddr::new(ip, APP), outside.ip(ip.is_ipv6()));
        }
    });
}

/// Makes the node send these addresses to the pod.
fn reach(node: &MeshNode, pod: &Host, ips: &[IpAddr]) {
    let device = node.world.device_of(pod);
    for ip in ips {
        let (family, length) = if ip.is_ipv6() { ("-6 ", 128) } else { ("", 32) };
        let via = pod.ip(ip.is_ipv6());
        let route = format!("{family}route add {ip}/{length} via {via} dev {device} onlink");
        node.world.node.configure(&[&route]).unwrap();
    }
}
