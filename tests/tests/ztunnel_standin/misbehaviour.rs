//! What a stand-in makes of an agent that breaks the protocol: tests of the agent rely on its noticing.

use std::{
    fs::File,
    io::IoSlice,
    os::fd::{AsRawFd, RawFd},
    path::PathBuf,
    time::Duration,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::time::timeout;
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener};
use weir_agent::{
    domain::workload::WorkloadInfo,
    zds::codec::{Answer, Request, decode_answer, decode_hello},
};
use weir_tests::ztunnel::{Options, Ztunnel};

use crate::net::{Net, SOON, eventually, sockets};

/// An agent that says whatever a test wants.
struct Agent {
    path: PathBuf,
    listener: UnixSeqpacketListener,
}

impl Agent {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("weir-standin-{}-{name}", std::process::id()));
        let listener = UnixSeqpacketListener::bind(&path).unwrap();
        Self { path, listener }
    }

    fn ztunnel(&self) -> Ztunnel {
        Ztunnel::start(Options { zds: Some(self.path.clone()), ..Options::default() }).unwrap()
    }

    async fn accept(&mut self) -> UnixSeqpacket {
        let socket = timeout(SOON, self.listener.accept()).await.expect("it connects").unwrap();
        decode_hello(&receive(&socket).await.unwrap()).unwrap();
        socket
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn receive(socket: &UnixSeqpacket) -> Option<Vec<u8>> {
    let mut buffer = [0; 4096];
    let read = timeout(SOON, socket.recv(&mut buffer)).await.expect("it says something").ok()?;
    (read.bytes_read() > 0).then(|| buffer[..read.bytes_read()].to_vec())
}

fn send(socket: &UnixSeqpacket, packet: &[u8], fds: &[RawFd]) {
    let control = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() { &[][..] } else { &control };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(packet)], control, MsgFlags::empty(), None).unwrap();
}

async fn ask(socket: &UnixSeqpacket, request: &Request, fds: &[RawFd]) -> Option<Answer> {
    send(socket, &request.encode(), fds);
    Some(decode_answer(&receive(socket).await?).unwrap())
}

fn add(uid: &str) -> Request {
    let info = WorkloadInfo { name: "n".into(), namespace: "ns".into(), service_account: "sa".into() };
    Request::Add { uid: uid.into(), info }
}

#[tokio::test]
async fn what_makes_ztunnel_exit() {
    let net = Net::pod();
    let ns = net.raw_fd();
    let keep = Request::Keep("u".into()).encode();
    let cases = [
        ("info", b"\x0a\x03\x0a\x01u".to_vec(), vec![ns], false),
        ("Keep after SnapshotSent", keep, vec![], true),
        ("second SnapshotSent", Request::SnapshotSent.encode(), vec![], true),
    ];
    for (n, (what, packet, fds, after_snapshot)) in cases.into_iter().enumerate() {
        let mut agent = Agent::new(&format!("exit-{n}"));
        let ztunnel = agent.ztunnel();
        let socket = agent.accept().await;
        assert_eq!(ask(&socket, &add("running"), &[ns]).await, Some(Ok(())));
        if after_snapshot {
            assert_eq!(ask(&socket, &Request::SnapshotSent, &[]).await, Some(Ok(())));
        }
        send(&socket, &packet, &fds);
        assert_eq!(receive(&socket).await, None, "{what}");
        assert!(ztunnel.violations().iter().any(|v| v.contains(what)), "{:?}", ztunnel.violations());
        while !ztunnel.has_exited() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(ztunnel.workloads().is_empty(), "all proxies go with the process");
        ztunnel.kill();
        eventually("its sockets are closed", || sockets(&net).is_empty());
    }
}

#[tokio::test]
async fn what_makes_ztunnel_reconnect() {
    let net = Net::pod();
    let null = File::open("/dev/null").unwrap();
    let (ns, long) = (net.raw_fd(), "x".repeat(1024));
    let cases = [
        ("more than 1024", add(&long).encode(), vec![ns]),
        ("0 descriptors", add("u").encode(), vec![]),
        ("2 descriptors", add("u").encode(), vec![ns, ns]),
        ("1 descriptors", Request::SnapshotSent.encode(), vec![ns]),
        ("cut short", vec![0x0a, 0x09], vec![]),
    ];
    let mut agent = Agent::new("reconnect");
    let ztunnel = agent.ztunnel();
    for (n, (what, packet, fds)) in cases.into_iter().enumerate() {
        let socket = agent.accept().await;
        send(&socket, &packet, &fds);
        let nack = decode_answer(&receive(&socket).await.unwrap()).unwrap();
        assert!(nack.unwrap_err().contains(what), "{what}");
        assert_eq!(receive(&socket).await, None, "{what}");
        let violations = ztunnel.violations();
        assert!(violations.len() == n + 1 && violations[n].contains(what), "{violations:?}");
    }
    // Not a namespace: refused, and the connection stays.
    let socket = agent.accept().await;
    assert!(matches!(ask(&socket, &add("u"), &[null.as_raw_fd()]).await, Some(Err(_))));
    assert_eq!(ask(&socket, &Request::SnapshotSent, &[]).await, Some(Ok(())));
    assert!(!ztunnel.has_exited());
}

#[tokio::test]
async fn what_an_agent_must_not_do_all_the_same() {
    let net = Net::pod();
    let mut agent = Agent::new("rules");
    let ztunnel = agent.ztunnel();
    let socket = agent.accept().await;
    assert_eq!(ask(&socket, &add("one"), &[net.raw_fd()]).await, Some(Ok(())));
    assert_eq!(ask(&socket, &add("two"), &[net.raw_fd()]).await, Some(Ok(())));
    let violations = ztunnel.violations();
    assert!(violations.len() == 1 && violations[0].contains("one network namespace"), "{violations:?}");
    // Two requests at once.
    ztunnel.delay_acks(Duration::from_millis(20));
    send(&socket, &Request::Del("one".into()).encode(), &[]);
    send(&socket, &Request::SnapshotSent.encode(), &[]);
    for _ in 0..2 {
        assert_eq!(decode_answer(&receive(&socket).await.unwrap()).unwrap(), Ok(()));
    }
    let violations = ztunnel.violations();
    assert!(violations.len() == 2 && violations[1].contains("before the answer"), "{violations:?}");
    assert_eq!(ztunnel.workloads(), ["two"], "not named, so cut");
}
