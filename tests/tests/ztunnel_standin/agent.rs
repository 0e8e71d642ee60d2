//! The stand-in at the agent's real server.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tokio::runtime::Runtime;
use weir_agent::{
    cache::members::{AckError, Members},
    domain::workload::{PodUid, WorkloadInfo},
    zds::{
        server::{Config, Server},
        session::Timeouts,
    },
};
use weir_tests::ztunnel::{Options, Ztunnel, wire::Request};

use crate::net::{CLIENT, Net, POD, SOON, ask, eventually, preface, sockets};

/// The part of an agent that ztunnel sees.
struct Agent {
    members: Members,
    path: PathBuf,
    runtime: Runtime,
}

impl Agent {
    fn start(path: PathBuf, nack_backoff: Duration, answer: Duration) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let members = Members::new(nack_backoff);
        let config = Config { timeouts: Timeouts { hello: SOON, answer }, ..Config::new(path.clone()) };
        let _inside = runtime.enter();
        let server = Server::bind(config, members.clone()).unwrap();
        runtime.spawn(server.run());
        drop(_inside);
        Self { members, path, runtime }
    }

    fn new(name: &str) -> Self {
        Self::start(socket_path(name), SOON, SOON)
    }

    fn ztunnel(&self) -> Ztunnel {
        ztunnel_at(&self.path)
    }

    fn publish(&self, uid: &str, net: &Net) -> u64 {
        self.members.publish(PodUid::from(uid), info(uid), Some(Arc::new(net.fd()))).unwrap()
    }

    fn wait_acked(&self, uid: &str, generation: u64) -> Result<(), AckError> {
        self.runtime.block_on(self.members.wait_acked(&uid.into(), generation, SOON)).map(drop)
    }

    fn serve(&self, uid: &str, net: &Net) {
        self.wait_acked(uid, self.publish(uid, net)).unwrap();
    }

    fn release(&self, uid: &str) {
        self.members.retract(&uid.into());
        self.runtime.block_on(self.members.wait_released(&uid.into(), SOON)).unwrap();
    }
}

fn ztunnel_at(path: &std::path::Path) -> Ztunnel {
    let pending_retry = Duration::from_millis(100);
    Ztunnel::start(Options { zds: Some(path.to_owned()), pending_retry, ..Options::default() }).unwrap()
}

fn socket_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("weir-standin-{}-agent-{name}.sock", std::process::id()))
}

fn info(uid: &str) -> WorkloadInfo {
    WorkloadInfo { name: uid.into(), namespace: "ns".into(), service_account: "sa".into() }
}

/// An open connection through ztunnel to an app of the pod.
fn stream_through(net: &Net) -> TcpStream {
    net.app_that_echoes((POD, 8080).into());
    let mut stream = net.connect(POD, 15008);
    stream.write_all(preface((POD, 8080), (CLIENT, 1)).as_bytes()).unwrap();
    assert!(echoes(&mut stream));
    stream
}

fn echoes(stream: &mut TcpStream) -> bool {
    let mut word = [0; 4];
    stream.write_all(b"ping").and_then(|()| stream.read_exact(&mut word)).is_ok_and(|()| &word == b"ping")
}

#[test]
fn listeners_are_up_at_the_ack_and_down_at_the_release() {
    let (net, agent) = (Net::pod(), Agent::new("ack"));
    let ztunnel = agent.ztunnel();
    assert!(!ztunnel.is_ready());
    agent.members.set_complete();
    assert!(ztunnel.wait_ready(SOON));
    agent.serve("a", &net);
    assert_eq!(sockets(&net).len(), 7);
    assert_eq!(ztunnel.workloads(), ["a"]);
    agent.release("a");
    eventually("all sockets are closed", || sockets(&net).is_empty());
    let uids: Vec<_> = ztunnel.requests().into_iter().map(brief).collect();
    assert_eq!(uids, ["snapshot", "add a", "del a"]);
    assert_eq!(ztunnel.violations(), [""; 0]);
}

fn brief(request: Request) -> String {
    match request {
        Request::Add { uid, info } => {
            assert_eq!(info.unwrap().name, uid);
            format!("add {uid}")
        }
        Request::Del(uid) => format!("del {uid}"),
        Request::Keep(uid) => format!("keep {uid}"),
        Request::SnapshotSent => "snapshot".into(),
    }
}

#[test]
fn streams_survive_the_agent_and_pods_that_left_meanwhile_do_not() {
    let path = socket_path("restart");
    let (stays, leaves, unknown) = (Net::pod(), Net::pod(), Net::pod());
    let agent = Agent::start(path.clone(), SOON, SOON);
    let ztunnel = agent.ztunnel();
    agent.members.set_complete();
    for (uid, net) in [("stays", &stays), ("leaves", &leaves), ("unknown", &unknown)] {
        agent.serve(uid, net);
    }
    let mut streams = [&stays, &leaves, &unknown].map(stream_through);
    drop(agent);
    eventually("it notices", || !ztunnel.is_connected());
    assert!(!ztunnel.is_ready());
    assert!(streams.iter_mut().all(echoes), "an agent that is gone cuts nothing");
    let agent = Agent::start(path, SOON, SOON);
    agent.publish("stays", &stays);
    agent.members.publish("unknown".into(), info("unknown"), None).unwrap();
    agent.members.set_complete();
    assert!(ztunnel.wait_ready(SOON));
    let [stays, leaves, unknown] = &mut streams;
    assert!(echoes(stays) && echoes(unknown));
    assert!(!echoes(leaves));
    assert_eq!(ztunnel.workloads(), ["stays", "unknown"]);
    assert_eq!(ztunnel.violations(), [""; 0]);
}

#[test]
fn refusal_is_reported_and_the_success_that_follows_learnt_of() {
    let net = Net::pod();
    let agent = Agent::start(socket_path("nack"), Duration::from_millis(250), SOON);
    let ztunnel = agent.ztunnel();
    agent.members.set_complete();
    assert!(ztunnel.wait_ready(SOON));
    let squatter = net.run(|| TcpListener::bind("127.0.0.1:15053").unwrap());
    let generation = agent.publish("a", &net);
    let Err(AckError::Nacked(text)) = agent.wait_acked("a", generation) else { panic!("no nack") };
    assert!(text.contains("127.0.0.1:15053"), "{text}");
    assert_eq!((ztunnel.is_ready(), ztunnel.pending()), (false, vec!["a".to_owned()]));
    drop(squatter);
    // By its own retry, of which it says nothing …
    eventually("it is served", || ztunnel.workloads() == ["a"]);
    let mut stream = stream_through(&net);
    // … until the agent asks again, which must not cut what is there by now.
    eventually("the agent knows", || !agent.members.acked_by(&"a".into()).is_empty());
    assert!(echoes(&mut stream));
    assert!(ztunnel.is_ready());

    let other = Net::pod();
    ztunnel.nack_next("no reason");
    let generation = agent.publish("b", &other);
    let Err(AckError::Nacked(text)) = agent.wait_acked("b", generation) else { panic!("no nack") };
    assert!(text.ends_with("no reason"), "{text}");
    eventually("the agent knows", || !agent.members.acked_by(&"b".into()).is_empty());
}

#[test]
fn stalled_one_loses_its_place_and_the_pods_are_served_by_another() {
    let (net, other) = (Net::pod(), Net::pod());
    let agent = Agent::start(socket_path("stall"), SOON, Duration::from_millis(100));
    let first = agent.ztunnel();
    agent.members.set_complete();
    assert!(first.wait_ready(SOON));
    let second = agent.ztunnel();
    assert!(second.wait_ready(SOON));
    second.stall(true);
    agent.serve("a", &net);
    assert_eq!(first.workloads(), ["a"]);
    second.stall(false);
    eventually("it is back", || agent.members.connected() == 2 && second.is_ready());
    assert_eq!(second.workloads(), ["a"]);
    agent.serve("b", &other);
    assert_eq!(second.workloads(), ["a", "b"]);
    assert_eq!(first.workloads(), ["a"], "what comes is for the newest");
    assert!(first.violations().is_empty() && second.violations().is_empty());
}

#[test]
fn rolling_update_loses_no_connection() {
    let (net, agent) = (Net::pod(), Agent::new("rolling"));
    agent.members.set_complete();
    net.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_migrate_req", "1").unwrap());
    net.app((POD, 8080).into());
    let mut old = agent.ztunnel();
    agent.serve("a", &net);
    let words = preface((POD, 8080), (CLIENT, 1)) + "hello";
    let (mut connections, mut accepted) = (0, 0);
    for _ in 0..4 {
        let new = agent.ztunnel();
        let stopping = std::thread::spawn({
            let by = agent.members.clone();
            move || {
                eventually("both are connected", || by.acked_by(&"a".into()).len() == 2);
                let log = old.log().clone();
                old.stop_gracefully();
                log.counts().hbone
            }
        });
        while !stopping.is_finished() {
            assert_eq!(ask(net.connect(POD, 15008), &words), "HELLO");
            connections += 1;
        }
        accepted += stopping.join().unwrap();
        old = new;
    }
    accepted += old.log().counts().hbone;
    assert!(connections > 4);
    assert_eq!(connections, accepted);
    assert_eq!(old.violations(), [""; 0]);
}

#[test]
fn moved_pod_is_cut_there_and_served_here() {
    let (from, to, agent) = (Net::pod(), Net::pod(), Agent::new("moved"));
    let ztunnel = agent.ztunnel();
    agent.members.set_complete();
    agent.serve("a", &from);
    let mut stream = stream_through(&from);
    agent.serve("a", &to);
    assert!(!echoes(&mut stream));
    assert_eq!(sockets(&to).len(), 7);
    let seen: Vec<SocketAddr> = ztunnel.log().accepted().iter().map(|a| a.original_dst).collect();
    assert_eq!(seen, [(POD, 8080).into()]);
}
