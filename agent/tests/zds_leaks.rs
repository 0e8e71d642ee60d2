//! Descriptors come back whatever a peer does. A binary of its own: the count is the whole process's.

#[path = "zds/peer.rs"]
#[allow(dead_code, reason = "shared with the tests that need all of it")]
mod peer;

use std::time::Duration;

use peer::{Fixture, Peer, nonsense};
use tokio::time::timeout;
use weir_agent::zds::codec::encode_hello;

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn descriptors_come_back() {
    let fixture = Fixture::with_pods(4);
    let mut witness = fixture.connect_and_sync().await;
    let before = open_fds();
    let rounds = if std::env::var_os("WEIR_LONG").is_some() { 1000 } else { 200 };
    for round in 0..rounds {
        leave_after(&fixture, round % 6, round % 2 == 0).await;
        let synced = timeout(Duration::from_secs(1), fixture.connect_and_sync()).await;
        synced.expect("the next ztunnel has its snapshot within a second");
    }
    for (_, packet, with_fds) in (0..20).flat_map(|_| nonsense()) {
        for mut peer in [Peer::connect(&fixture.path).await, fixture.connect_and_sync().await] {
            peer.say_nonsense(&packet, with_fds).await;
            peer.expect_closed().await;
        }
    }
    fixture.eventually("only the witness is left", |m| m.connected() == 1).await;
    fixture.eventually("no other connection is open", |_| fixture.counters.open.get() == 1).await;
    fixture.eventually("descriptors are closed", |_| open_fds() == before).await;
    // Namespaces of pods that are gone are let go of as well.
    for n in 0..4 {
        fixture.members.retract(&peer::uid(n));
        witness.accept_one().await;
    }
    fixture.eventually("namespaces are closed", |_| open_fds() == before - 4).await;
}

/// A ztunnel that dies after so many messages in either direction.
async fn leave_after(fixture: &Fixture, messages: usize, answer_last: bool) {
    let mut peer = Peer::connect(&fixture.path).await;
    if messages > 0 {
        peer.say(&encode_hello()).await;
    }
    for n in 1..messages {
        peer.receive().await.unwrap();
        if n + 1 < messages || answer_last {
            peer.ack().await;
        }
    }
}
