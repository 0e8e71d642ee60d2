//! Who is told what when several ztunnels are connected.

use weir_agent::zds::codec::Request;

use crate::peer::{Fixture, Peer, info, uid};

fn add(n: usize) -> Request {
    Request::Add { uid: uid(n), info: info(n) }
}

/// All orders of three.
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

#[tokio::test]
async fn newest_is_told_of_what_comes_all_of_what_goes() {
    for leaving in ORDERS {
        let fixture = Fixture::with_pods(1);
        let mut peers: Vec<Option<Peer>> = Vec::new();
        for _ in 0..3 {
            peers.push(Some(fixture.connect_and_sync().await));
        }
        // Which pods each has been told of, by number.
        let mut told = [vec![0], vec![0], vec![0]];
        for (next_pod, leaves) in (1..).zip(leaving) {
            let newest = (0..3).rev().find(|&i| peers[i].is_some()).unwrap();
            fixture.publish(next_pod);
            assert_eq!(peers[newest].as_mut().unwrap().accept_one().await, add(next_pod));
            told[newest].push(next_pod);
            peers[leaves] = None;
            let left = peers.iter().flatten().count();
            fixture.eventually("disconnected", |m| m.connected() == left).await;
            let Some(newest) = (0..3).rev().find(|&i| peers[i].is_some()) else { break };
            // The one that is newest now catches up on what it had not been told; nobody else hears a word.
            for missing in (0..=next_pod).filter(|n| !told[newest].contains(n)) {
                assert_eq!(peers[newest].as_mut().unwrap().accept_one().await, add(missing), "{leaving:?}");
            }
            told[newest] = (0..=next_pod).collect();
            let statuses = fixture.members.sessions();
            assert!(statuses.last().unwrap().newest && statuses.iter().filter(|s| s.newest).count() == 1);
        }
    }
}

#[tokio::test]
async fn all_are_told_of_what_goes_but_only_if_they_knew_it() {
    let fixture = Fixture::with_pods(1);
    let mut old = fixture.connect_and_sync().await;
    let mut new = fixture.connect_and_sync().await;
    fixture.publish(1);
    assert_eq!(new.accept_one().await, add(1));
    fixture.members.retract(&uid(1));
    assert_eq!(new.accept_one().await, Request::Del(uid(1)));
    old.expect_silence().await;
    fixture.members.retract(&uid(0));
    assert_eq!(new.accept_one().await, Request::Del(uid(0)));
    assert_eq!(old.accept_one().await, Request::Del(uid(0)));
}

/// The newest does not get through its snapshot: it loses its place without anybody else's losing theirs.
#[tokio::test]
async fn snapshot_is_complete_for_each_even_when_another_connects_meanwhile() {
    let fixture = Fixture::with_pods(3);
    let mut first = fixture.connect().await;
    assert_eq!(first.accept_one().await, add(0));
    let mut second = fixture.connect().await;
    fixture.eventually("connected", |m| m.connected() == 2).await;
    fixture.publish(3);
    // A pod the first did not name would be cut by its SnapshotSent.
    for expected in [add(1), add(2), add(3), Request::SnapshotSent] {
        assert_eq!(first.accept_one().await, expected);
    }
    for expected in [add(0), add(1), add(2), add(3), Request::SnapshotSent] {
        assert_eq!(second.accept_one().await, expected);
    }
    fixture.publish(4);
    assert_eq!(second.accept_one().await, add(4));
    first.expect_silence().await;
    let acked: Vec<_> = fixture.members.acked_by(&uid(3)).iter().map(|by| by.session).collect();
    assert_eq!(acked, [2, 1]);
}
