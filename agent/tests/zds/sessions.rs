//! What a connection is told, message by message.

use std::time::Duration;

use tokio::time::Instant;
use weir_agent::{
    cache::members::{AckError, PublishError, ReleaseError},
    domain::workload::WorkloadInfo,
    zds::{codec::Request, session::Timeouts},
};

use crate::{
    model::inode,
    peer::{A_WHILE, Fixture, PATIENT, SOON, info, uid},
};

const QUICK: Timeouts = Timeouts { hello: Duration::from_millis(60), answer: Duration::from_millis(60) };

fn add(n: usize) -> Request {
    Request::Add { uid: uid(n), info: info(n) }
}

#[tokio::test]
async fn snapshot_then_changes() {
    let fixture = Fixture::with_pods(2);
    fixture.members.publish(uid(2), info(2), None).unwrap();
    let mut peer = fixture.connect().await;
    for n in 0..2 {
        let (request, fds) = peer.receive().await.unwrap();
        assert_eq!(request, add(n));
        assert_eq!(fds.len(), 1);
        assert_eq!(inode(&fds[0]), inode(&fixture.scratch.netns(n)));
        peer.ack().await;
    }
    for expected in [Request::Keep(uid(2)), Request::SnapshotSent] {
        let (request, fds) = peer.receive().await.unwrap();
        assert_eq!((request, fds.len()), (expected, 0));
        peer.ack().await;
    }
    peer.expect_silence().await;
    assert_eq!(fixture.counters.last_snapshot_size.get(), 3);
    // The namespace of the kept pod is found; a pod comes; one goes.
    fixture.publish(2);
    assert_eq!(peer.accept_one().await, add(2));
    let generation = fixture.publish(3);
    assert_eq!(peer.accept_one().await, add(3));
    let by = fixture.members.wait_acked(&uid(3), generation, SOON).await.unwrap();
    assert_eq!(by.peer.pid, Some(std::process::id() as i32));
    fixture.members.retract(&uid(0));
    assert_eq!(peer.accept_one().await, Request::Del(uid(0)));
    fixture.members.wait_released(&uid(0), SOON).await.unwrap();
    // Saying it again changes nothing.
    assert_eq!(fixture.publish(3), generation);
    fixture.members.retract(&uid(0));
    peer.expect_silence().await;
}

#[tokio::test]
async fn pod_that_came_and_went_unseen_costs_nothing() {
    let fixture = Fixture::with_pods(1);
    let mut peer = fixture.connect().await;
    let (first, _) = peer.receive().await.unwrap();
    assert_eq!(first, add(0));
    fixture.publish(1);
    fixture.members.retract(&uid(1));
    peer.ack().await;
    assert_eq!(peer.accept_one().await, Request::SnapshotSent);
    peer.expect_silence().await;
}

#[tokio::test]
async fn no_snapshot_before_the_set_is_complete() {
    let fixture = Fixture::start(QUICK, SOON);
    let mut peer = fixture.connect().await;
    fixture.publish(0);
    // Not even a timeout: nothing was asked.
    tokio::time::sleep(2 * QUICK.answer).await;
    peer.expect_silence().await;
    fixture.members.set_complete();
    assert_eq!(peer.accept_one().await, add(0));
    assert_eq!(peer.accept_one().await, Request::SnapshotSent);
}

#[tokio::test]
async fn changed_namespace_is_an_add_changed_info_a_del_first() {
    let fixture = Fixture::with_pods(1);
    let mut old = fixture.connect_and_sync().await;
    let mut new = fixture.connect_and_sync().await;
    fixture.members.publish(uid(0), info(0), Some(fixture.scratch.netns(7))).unwrap();
    let (request, fds) = new.receive().await.unwrap();
    assert_eq!(request, add(0));
    assert_eq!(inode(&fds[0]), inode(&fixture.scratch.netns(7)));
    new.ack().await;
    // The namespace the older one serves it in is gone for good.
    assert_eq!(old.accept_one().await, Request::Del(uid(0)));
    let renamed = WorkloadInfo { service_account: "other".into(), ..info(0) };
    fixture.members.publish(uid(0), renamed.clone(), Some(fixture.scratch.netns(7))).unwrap();
    assert_eq!(new.accept_one().await, Request::Del(uid(0)));
    assert_eq!(new.accept_one().await, Request::Add { uid: uid(0), info: renamed });
    old.expect_silence().await;
}

#[tokio::test]
async fn namespace_passes_to_another_pod_after_the_first_has_left_it() {
    let fixture = Fixture::with_pods(1);
    let mut peer = fixture.connect().await;
    // Mid-snapshot ztunnel would not stop the first pod on a Del: the second has to wait for the end.
    let (first, _) = peer.receive().await.unwrap();
    assert_eq!(first, add(0));
    fixture.members.retract(&uid(0));
    fixture.members.publish(uid(1), info(1), Some(fixture.scratch.netns(0))).unwrap();
    peer.ack().await;
    for expected in [Request::Keep(uid(1)), Request::SnapshotSent, Request::Del(uid(0)), add(1)] {
        assert_eq!(peer.accept_one().await, expected);
    }
    peer.expect_silence().await;
}

#[tokio::test]
async fn ack_timeout_closes_and_the_next_connection_is_served() {
    let fixture = Fixture::start(QUICK, SOON);
    let generation = fixture.publish(0);
    fixture.members.set_complete();
    let mut stalled = fixture.connect().await;
    let (request, _) = stalled.receive().await.unwrap();
    assert_eq!(request, add(0));
    let asked = Instant::now();
    stalled.expect_closed().await;
    assert!(asked.elapsed() < SOON / 2);
    // Too late, and for nobody.
    stalled.ack().await;
    assert!(fixture.members.acked_by(&uid(0)).is_empty());
    fixture.eventually("disconnected", |m| m.connected() == 0).await;
    let no_ztunnel = fixture.members.wait_acked(&uid(0), generation, A_WHILE).await;
    assert_eq!(no_ztunnel, Err(AckError::NoZtunnel));
    let _next = fixture.connect_and_sync().await;
    fixture.members.wait_acked(&uid(0), generation, SOON).await.unwrap();
    assert_eq!((fixture.counters.add.lost.get(), fixture.counters.add.acked.get()), (1, 1));
}

#[tokio::test]
async fn silent_peer_is_closed_and_never_counts_as_ztunnel() {
    let fixture = Fixture::start(QUICK, SOON);
    fixture.members.set_complete();
    let mut silent = crate::peer::Peer::connect(&fixture.path).await;
    silent.expect_closed().await;
    assert_eq!((fixture.counters.accepted.get(), fixture.members.connected()), (1, 0));
}

#[tokio::test]
async fn refused_pod_is_offered_again_after_a_pause() {
    let backoff = Duration::from_millis(150);
    let fixture = Fixture::start(PATIENT, backoff);
    let generation = fixture.publish(0);
    fixture.members.set_complete();
    let mut peer = fixture.connect().await;
    let (request, _) = peer.receive().await.unwrap();
    assert_eq!(request, add(0));
    let text = "failure to start proxy : ".to_owned() + &"address in use ".repeat(400);
    let refused = Instant::now();
    peer.nack(&text).await;
    // One bad pod holds up nothing.
    assert_eq!(peer.accept_one().await, Request::SnapshotSent);
    let answer = fixture.members.wait_acked(&uid(0), generation, SOON).await;
    assert_eq!(answer, Err(AckError::Nacked(text.clone())));
    assert_eq!(fixture.members.sessions()[0].nacked, [(uid(0), text)]);
    fixture.publish(1);
    assert_eq!(peer.accept_one().await, add(1));
    // No Del: it would cut what ztunnel has started by its own retry.
    assert_eq!(peer.accept_one().await, add(0));
    assert!(refused.elapsed() >= backoff, "{:?}", refused.elapsed());
    fixture.members.wait_acked(&uid(0), generation, SOON).await.unwrap();
    peer.expect_silence().await;
    assert_eq!((fixture.counters.add.nacked.get(), fixture.counters.add.acked.get()), (1, 2));
}

#[tokio::test]
async fn refused_and_retracted_pod_is_deleted() {
    let fixture = Fixture::with_pods(1);
    let mut peer = fixture.connect().await;
    peer.receive().await.unwrap();
    peer.nack("no").await;
    assert_eq!(peer.accept_one().await, Request::SnapshotSent);
    fixture.members.retract(&uid(0));
    // ztunnel holds it as pending, and its namespace with it.
    assert_eq!(peer.accept_one().await, Request::Del(uid(0)));
}

#[tokio::test]
async fn waiting_for_release_and_for_what_is_no_more() {
    let fixture = Fixture::with_pods(1);
    let generation = fixture.publish(0);
    let mut peer = fixture.connect_and_sync().await;
    let early = fixture.members.wait_released(&uid(0), A_WHILE).await;
    assert_eq!(early, Err(ReleaseError::Superseded), "still a member");
    fixture.members.retract(&uid(0));
    let superseded = fixture.members.wait_acked(&uid(0), generation, SOON).await;
    assert_eq!(superseded, Err(AckError::Superseded));
    assert_eq!(fixture.members.wait_released(&uid(0), A_WHILE).await, Err(ReleaseError::Timeout));
    assert_eq!(peer.accept_one().await, Request::Del(uid(0)));
    fixture.members.wait_released(&uid(0), SOON).await.unwrap();
    // One that has just come may still serve anything, from an earlier connection.
    let mut unsynced = fixture.connect().await;
    let (request, _) = unsynced.receive().await.unwrap();
    assert_eq!(request, Request::SnapshotSent);
    assert_eq!(fixture.members.wait_released(&uid(0), A_WHILE).await, Err(ReleaseError::Timeout));
    drop((peer, unsynced));
    fixture.eventually("disconnected", |m| m.connected() == 0).await;
    fixture.members.wait_released(&uid(0), Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn what_ztunnel_would_choke_on_is_refused_at_publish() {
    let fixture = Fixture::with_pods(1);
    let taken = fixture.members.publish(uid(1), info(1), Some(fixture.scratch.netns(0)));
    assert!(matches!(taken, Err(PublishError::NetnsTaken(other)) if other == uid(0)));
    let exact = |len: usize| WorkloadInfo { name: "n".repeat(len), ..info(0) };
    let overhead = Request::Add { uid: uid(2), info: exact(900) }.encoded_len() - 900;
    let publish =
        |len| fixture.members.publish(uid(2), exact(len - overhead), Some(fixture.scratch.netns(2)));
    assert!(matches!(publish(1025), Err(PublishError::TooLong(1025))));
    assert_eq!(fixture.members.len(), 1);
    publish(1024).unwrap();
    let mut peer = fixture.connect_and_sync().await;
    peer.expect_silence().await;
}
