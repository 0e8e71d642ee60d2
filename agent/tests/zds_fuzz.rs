//! Arbitrary packets and descriptors at every point of a conversation, while a well-behaved ztunnel is served.
//!
//! Two seconds in a plain run; `WEIR_FUZZ_SECONDS` makes it longer, `WEIR_SEED` repeats a run. A binary of its own: the
//! count of descriptors is the whole process's.

#[path = "zds/peer.rs"]
#[allow(dead_code, reason = "shared with the tests that need all of it")]
mod peer;

use std::{
    env,
    time::{Duration, Instant},
};

use peer::{Fixture, PATIENT, Peer, SOON, uid};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use tokio::time::timeout;
use weir_agent::zds::codec::{Request, decode_answer, decode_hello, encode_answer, encode_hello};

/// Pods that come and go meanwhile.
const PODS: usize = 6;

fn number(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_said_the_next_is_served() {
    let seed = number("WEIR_SEED", rand::random());
    let until = Instant::now() + Duration::from_secs(number("WEIR_FUZZ_SECONDS", 2));
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let fixture = Fixture::start(PATIENT, Duration::from_millis(20));
    fixture.members.set_complete();
    let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (mut conversations, mut packets) = (0_u64, 0_u64);
    while Instant::now() < until {
        let which = rng.random_range(0..PODS);
        if rng.random() {
            fixture.publish(which);
        } else {
            fixture.members.retract(&uid(which));
        }
        packets += converse(&fixture, &mut rng).await;
        conversations += 1;
        if conversations.is_multiple_of(50) {
            let good = timeout(SOON, fixture.connect_and_sync()).await.expect("the good one is served");
            drop(good);
        }
    }
    println!("{conversations} conversations, {packets} packets");
    assert!(packets > 100, "nothing was said");
    for pod in 0..PODS {
        fixture.members.retract(&uid(pod));
    }
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    fixture.eventually("no connection is left", |_| fixture.counters.open.get() == 0).await;
    fixture.eventually("descriptors are closed", |_| open() <= before).await;
}

/// One connection: some of what is said is right, so that every state is reached.
async fn converse(fixture: &Fixture, rng: &mut StdRng) -> u64 {
    let mut peer = Peer::connect(&fixture.path).await;
    let mut said = 0;
    if rng.random_bool(0.9) {
        peer.say(&encode_hello()).await;
        said += 1;
    }
    for _ in 0..rng.random_range(0..12) {
        let packet = packet(rng);
        if rng.random_bool(0.6) {
            // A request may be there to be answered, or not.
            let heard = timeout(Duration::from_millis(2), peer.receive_at_leisure()).await;
            if matches!(heard, Ok(None)) {
                return said;
            }
        }
        if rng.random_bool(0.1) {
            peer.say_nonsense(&packet, true).await;
        } else {
            peer.say(&packet).await;
        }
        said += 1;
    }
    said
}

/// Random bytes, or a message with random damage, or a right answer.
fn packet(rng: &mut StdRng) -> Vec<u8> {
    let templates = [
        encode_hello(),
        encode_answer(&Ok(())),
        encode_answer(&Err("no".repeat(rng.random_range(0..3000)))),
        Request::SnapshotSent.encode(),
        Request::Del(uid(1)).encode(),
    ];
    let mut packet = templates.choose(rng).expect("there are some").clone();
    match rng.random_range(0..4) {
        0 => {}
        1 => packet = (0..rng.random_range(0..9000)).map(|_| rng.random()).collect(),
        2 => packet.truncate(rng.random_range(0..=packet.len())),
        _ => {
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..=packet.len());
                packet.insert(at, rng.random());
            }
        }
    }
    // The decoders see all of it, not only what the state of a conversation lets through.
    let _ = (decode_hello(&packet), decode_answer(&packet), Request::decode(&packet));
    packet
}
