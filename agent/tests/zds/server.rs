//! What a server puts up with: other listeners, other users, and peers that talk nonsense.

use std::{fs, os::unix::fs::PermissionsExt};

use weir_agent::{
    cache::members::Members,
    zds::{
        codec::{Request, encode_hello},
        server::{BindError, Config, Server},
    },
};

use crate::peer::{self, Fixture, Peer, Scratch, uid};

#[tokio::test]
async fn directory_and_socket_are_for_the_owner_only() {
    let fixture = Fixture::with_pods(0);
    let mode = |path| fs::metadata(path).map(|m| m.permissions().mode() & 0o7777).unwrap();
    assert_eq!(mode(fixture.path.parent().unwrap()), 0o700);
    assert_eq!(mode(&fixture.path), 0o600);
}

#[tokio::test]
async fn live_socket_is_left_alone_and_named() {
    let fixture = Fixture::with_pods(0);
    let error = Server::bind(Config::new(&fixture.path), Members::default()).unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }));
    let text = error.to_string();
    assert!(text.starts_with("socket path in use") && text.contains("--ztunnel-socket"), "{text}");
    fixture.connect_and_sync().await;
}

#[tokio::test]
async fn stale_socket_is_replaced_anything_else_is_not() {
    let scratch = Scratch::new();
    let path = scratch.0.join("ztunnel.sock");
    drop(tokio_seqpacket::UnixSeqpacketListener::bind(&path).unwrap());
    assert!(path.exists());
    let server = Server::bind(Config::new(&path), Members::default()).unwrap();
    drop(server);
    assert!(!path.exists(), "removed at the end");
    fs::write(&path, "precious").unwrap();
    let error = Server::bind(Config::new(&path), Members::default()).unwrap_err();
    assert!(matches!(error, BindError::NotASocket { .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    // A stream socket with a listener is somebody's, too.
    fs::remove_file(&path).unwrap();
    let _live = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let error = Server::bind(Config::new(&path), Members::default()).unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }), "{error}");
}

#[tokio::test]
async fn socket_of_a_successor_survives_the_end_of_its_predecessor() {
    let scratch = Scratch::new();
    let path = scratch.0.join("ztunnel.sock");
    let old = Server::bind(Config::new(&path), Members::default()).unwrap();
    fs::remove_file(&path).unwrap();
    let _new = Server::bind(Config::new(&path), Members::default()).unwrap();
    drop(old);
    assert!(path.exists());
}

#[tokio::test]
#[ignore = "becomes another user, so it needs root; `cargo xtask test` runs it"]
async fn other_users_are_refused() {
    let fixture = Fixture::with_pods(0);
    let open_to_all = |path: &std::path::Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    open_to_all(fixture.path.parent().unwrap(), 0o755);
    open_to_all(&fixture.path, 0o666);
    let mut peers = connect_as_nobody(&fixture.path, 3).await;
    for peer in &mut peers {
        peer.say(&encode_hello()).await;
        peer.expect_closed().await;
    }
    assert_eq!((fixture.counters.refused.get(), fixture.counters.accepted.get()), (3, 0));
    fixture.connect_and_sync().await;
}

/// The kernel notes the user that connects, so one thread becomes another user for that long.
async fn connect_as_nobody(path: &std::path::Path, count: usize) -> Vec<Peer> {
    let path = path.to_owned();
    let connect = move || {
        // SAFETY: the raw call changes this thread's user only (glibc's would change all threads'), and the
        // thread ends here.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) }, 0);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let mut peers = Vec::new();
            for _ in 0..count {
                peers.push(Peer::connect(&path).await.into_fd());
            }
            peers
        })
    };
    let fds = std::thread::spawn(connect).join().unwrap();
    fds.into_iter().map(Peer::from_fd).collect()
}

#[tokio::test]
async fn nonsense_ends_its_own_connection_and_no_other() {
    let fixture = Fixture::with_pods(1);
    let mut witness = fixture.connect_and_sync().await;
    let hello_of_another_version = ("version 2", vec![0x08, 0x02], false);
    for (what, packet, with_fd) in peer::nonsense().into_iter().chain([hello_of_another_version]) {
        println!("{what}, as hello");
        let mut peer = Peer::connect(&fixture.path).await;
        peer.say_nonsense(&packet, with_fd).await;
        peer.expect_closed().await;
    }
    for (what, packet, with_fd) in peer::nonsense() {
        println!("{what}, as an answer");
        let mut peer = fixture.connect().await;
        peer.receive().await.unwrap();
        peer.say_nonsense(&packet, with_fd).await;
        peer.expect_closed().await;
        println!("{what}, unasked");
        let mut peer = fixture.connect_and_sync().await;
        peer.say_nonsense(&packet, with_fd).await;
        peer.expect_closed().await;
    }
    fixture.eventually("only the witness is left", |m| m.connected() == 1).await;
    fixture.publish(1);
    let Request::Add { uid: added, .. } = witness.accept_one().await else { panic!("no Add") };
    assert_eq!(added, uid(1));
}

#[tokio::test]
async fn refusal_of_what_cannot_be_refused_ends_the_connection() {
    let fixture = Fixture::with_pods(1);
    fixture.members.publish(uid(9), crate::peer::info(9), None).unwrap();
    for refused in 1..3 {
        let mut peer = fixture.connect().await;
        for _ in 0..refused {
            peer.accept_one().await;
        }
        peer.receive().await.unwrap();
        peer.nack("I think not").await;
        peer.expect_closed().await;
    }
    assert_eq!(fixture.counters.closed.get(), 2);
}

#[tokio::test]
async fn second_answer_is_not_taken_for_the_next() {
    let fixture = Fixture::with_pods(1);
    let mut peer = fixture.connect().await;
    peer.receive().await.unwrap();
    // Both are there before the server has taken the first.
    peer.ack().await;
    peer.ack().await;
    // The server may have asked for the next thing just before the second came, but no further.
    let mut asked = 0;
    while peer.receive().await.is_some() {
        asked += 1;
    }
    assert!(asked <= 1, "{asked}");
    fixture.connect_and_sync().await;
}

#[tokio::test]
async fn hundred_connections_at_once() {
    let fixture = Fixture::with_pods(3);
    let mut peers = Vec::new();
    for _ in 0..100 {
        peers.push(fixture.connect().await);
    }
    fixture.eventually("all are connected", |m| m.connected() == 100).await;
    for peer in &mut peers {
        while peer.accept_one().await != Request::SnapshotSent {}
    }
    fixture.eventually("all are counted", |_| fixture.counters.snapshots.get() == 100).await;
}
