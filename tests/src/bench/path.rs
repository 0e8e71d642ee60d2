//! The arms of the data path: the same client and server behind different redirections, in turn, many short rounds.

use std::{net::IpAddr, net::Ipv4Addr, net::Ipv6Addr, net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use weir_agent::domain::overrides::{Defaults, Overrides};

use super::{
    Options,
    endpoint::{Client, Server, Slice, Work},
    stats::{self, Estimate},
};
use crate::{
    istio::{self, Backend},
    mesh_node::MeshNode,
    world::{Families, Host},
    ztunnel::{HBONE_PORT, INBOUND_PORT, MARK, OUTBOUND_PORT},
};

/// Where the app wants to go, and where clients think the pod's app is.
const APP: u16 = 8080;
/// Connections after which tracked entries are counted.
pub const FLOWS: u32 = 10_000;

/// The ways a connection can be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Straight to the listener in a clean namespace.
    Limit,
    /// By weir.
    Weir,
    /// By rules of Istio's.
    Istio(Backend),
}

impl Way {
    /// As reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Weir => "weir",
            Self::Istio(backend) => backend.name(),
        }
    }
}

/// Who opens the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The app, to somewhere else.
    Out,
    /// The node, to the app, over the pod's veth pair.
    In,
    /// ztunnel or what else is exempt, to the node: not captured.
    Exempt,
}

/// One measurement: what is done, by whom, and what it is called in reports.
pub const MEASURES: [(&str, Work, Direction); 7] = [
    ("connect_out", Work::Connect, Direction::Out),
    ("connect_in", Work::Connect, Direction::In),
    ("rtt", Work::RoundTrip, Direction::Out),
    ("rtt_in", Work::RoundTrip, Direction::In),
    ("bulk", Work::Bulk, Direction::Out),
    ("not_captured_connect", Work::Connect, Direction::Exempt),
    ("not_captured_rtt", Work::RoundTrip, Direction::Exempt),
];

/// What one arm needed for one measure and family.
#[derive(Clone, Debug, Serialize)]
pub struct Arm {
    /// Name of the measure.
    pub measure: &'static str,
    /// `v4` or `v6`.
    pub family: &'static str,
    /// Name of the way.
    pub arm: &'static str,
    /// Nanoseconds per operation: the median of the rounds' medians.
    pub ns: Estimate,
    /// The median of the rounds' 99th percentiles.
    pub p99_ns: f64,
    /// Processor nanoseconds of both ends per operation.
    pub cpu_ns: Estimate,
    /// Operations in all.
    pub operations: usize,
    /// The median of each round.
    pub samples: Vec<f64>,
    /// The processor time of each round.
    pub cpu_samples: Vec<f64>,
}

/// What the data path's arms showed.
pub struct Path {
    /// Of each measure, family and way.
    pub arms: Vec<Arm>,
    /// Tracked connections in the pod of each way after [`FLOWS`] of them.
    pub tracked: Vec<(&'static str, u64)>,
}

impl Path {
    /// One arm's rounds.
    pub fn arm(&self, measure: &str, v6: bool, arm: &str) -> Option<&Arm> {
        let family = family(v6);
        self.arms.iter().find(|one| one.measure == measure && one.family == family && one.arm == arm)
    }
}

/// A pod that is redirected in one way.
struct Pod {
    way: Way,
    host: Host,
    outbound: Server,
    inbound: Server,
    _hbone: Server,
}

impl Pod {
    fn new(node: &MeshNode, way: Way, cpu: usize) -> Result<Self> {
        let host = node.pod(way.name(), Families::Dual)?;
        // What closes first would keep its port.
        host.sysctl("net.ipv4.tcp_max_tw_buckets", "0")?;
        let [outbound, inbound, hbone] =
            [OUTBOUND_PORT, INBOUND_PORT, HBONE_PORT].map(|port| Server::start(&host, port, cpu));
        let pod = Self { way, outbound: outbound?, inbound: inbound?, _hbone: hbone?, host };
        match way {
            Way::Limit => {}
            Way::Weir => capture(node, &pod.host)?,
            Way::Istio(backend) => {
                backend.apply(&pod.host)?;
                istio::route(&pod.host)?;
            }
        }
        Ok(pod)
    }

    /// Who connects where, so that the way leads to a server of the pod; and to which.
    fn client<'a>(&'a self, bench: &'a Bench, direction: Direction, v6: bool) -> (Client<'a>, &'a Server) {
        let (node, cpu) = (&bench.node.world.node, bench.cpu);
        let to = match (direction, self.way) {
            (Direction::Out, Way::Limit) => SocketAddr::new(loopback(v6), OUTBOUND_PORT),
            (Direction::Out, _) => bench.node.world.outside.addr(v6, APP),
            (Direction::In, Way::Limit) => self.host.addr(v6, INBOUND_PORT),
            (Direction::In, _) => self.host.addr(v6, APP),
            (Direction::Exempt, _) => node.addr(v6, APP),
        };
        match direction {
            Direction::Out => (Client { host: &self.host, to, mark: None, cpu }, &self.outbound),
            Direction::In => (Client { host: node, to, mark: None, cpu }, &self.inbound),
            // The clean namespace's client has the mark as well: it does the same.
            Direction::Exempt => (Client { host: &self.host, to, mark: Some(MARK), cpu }, &bench.on_node),
        }
    }

    /// How many connections the pod's namespace tracks.
    fn tracked(&self) -> Result<u64> {
        Ok(self.host.read_sysctl("net.netfilter.nf_conntrack_count")?.parse()?)
    }
}

fn capture(node: &MeshNode, pod: &Host) -> Result<()> {
    let overrides = Overrides::none(Defaults::default());
    node.redirector.prepare(&MeshNode::owner(pod), pod.netns())?;
    node.redirector.switch_on(pod.netns(), &overrides)?;
    let missing = node.redirector.verify(pod.netns(), &overrides)?.missing();
    ensure!(missing.is_empty(), "missing: {}", missing.join(", "));
    Ok(())
}

fn loopback(v6: bool) -> IpAddr {
    if v6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() }
}

fn family(v6: bool) -> &'static str {
    if v6 { "v6" } else { "v4" }
}

/// The world of the arms.
struct Bench {
    node: MeshNode,
    on_node: Server,
    cpu: usize,
}

/// Measures all arms. For a thread of its own, whose world it is.
///
/// # Errors
/// When the kernel refuses a part, or an operation fails.
pub fn measure(options: &Options) -> Result<Path> {
    let node = MeshNode::new()?;
    // The last one: most interrupts are served by the first.
    let cpu = std::thread::available_parallelism()?.get() - 1;
    node.world.node.sysctl("net.ipv4.tcp_max_tw_buckets", "0")?;
    let on_node = Server::start(&node.world.node, APP, cpu)?;
    let bench = Bench { node, on_node, cpu };
    let mut ways = vec![Way::Limit, Way::Weir];
    ways.extend(Backend::ALL.map(Way::Istio));
    let pods = ways.into_iter().map(|way| Pod::new(&bench.node, way, cpu)).collect::<Result<Vec<_>>>()?;

    let mut cells = Vec::new();
    for (measure, work, direction) in MEASURES {
        for v6 in [false, true] {
            let arms =
                pods.iter().filter(|pod| direction != Direction::Exempt || !matches!(pod.way, Way::Istio(_)));
            cells.push(Cell {
                measure,
                work,
                direction,
                v6,
                arms: arms.map(|pod| (pod, Vec::new())).collect(),
            });
        }
    }
    for round in 0..options.rounds {
        for cell in &mut cells {
            cell.round(&bench, options.slice, round % 2 == 1)?;
        }
    }
    let arms = cells.iter().flat_map(Cell::results).collect();
    let tracked = pods.iter().map(|pod| tracked(&bench, pod)).collect::<Result<_>>()?;
    Ok(Path { arms, tracked })
}

/// Makes [`FLOWS`] connections out of a pod and says how many it tracks then.
fn tracked(bench: &Bench, pod: &Pod) -> Result<(&'static str, u64)> {
    let (client, _) = pod.client(bench, Direction::Out, false);
    client.connect_times(FLOWS)?;
    Ok((pod.way.name(), pod.tracked()?))
}

/// One measure of one family, and what each arm showed so far.
struct Cell<'a> {
    measure: &'static str,
    work: Work,
    direction: Direction,
    v6: bool,
    arms: Vec<(&'a Pod, Vec<Slice>)>,
}

impl Cell<'_> {
    /// One slice of each arm; every other round in the opposite order, so that a drift hits all alike.
    fn round(&mut self, bench: &Bench, time: Duration, backwards: bool) -> Result<()> {
        let count = self.arms.len();
        for place in 0..count {
            let (pod, slices) = &mut self.arms[if backwards { count - 1 - place } else { place }];
            let (client, server) = pod.client(bench, self.direction, self.v6);
            let slice = client.run(server, self.work, time);
            slices.push(slice.with_context(|| format!("{} by {}", self.measure, pod.way.name()))?);
        }
        Ok(())
    }

    fn results(&self) -> impl Iterator<Item = Arm> {
        self.arms.iter().map(|(pod, slices)| {
            let each = |of: &dyn Fn(&Slice) -> f64| slices.iter().map(of).collect::<Vec<f64>>();
            let samples = each(&|slice| stats::median(&slice.times));
            let cpu_samples = each(&|slice| slice.cpu);
            Arm {
                measure: self.measure,
                family: family(self.v6),
                arm: pod.way.name(),
                ns: stats::estimate(&samples),
                p99_ns: stats::median(&each(&|slice| stats::quantile(&slice.times, 0.99))),
                cpu_ns: stats::estimate(&cpu_samples),
                operations: slices.iter().map(|slice| slice.times.len()).sum(),
                samples,
                cpu_samples,
            }
        })
    }
}
