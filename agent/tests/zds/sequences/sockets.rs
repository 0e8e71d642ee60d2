//! The same against the real server, with the time and the disorder that real sockets bring.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use tokio::{
    sync::Semaphore,
    task::{AbortHandle, JoinSet, yield_now},
    time::{Instant, sleep},
};
use weir_agent::zds::{
    codec::{encode_answer, encode_hello},
    session::Timeouts,
};

use super::*;
use crate::peer::{Fixture, Peer, SOON};

/// Short, for every stall waits it out; long enough for a busy machine to answer in when nothing stalls.
const ANSWER: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Ztunnel {
    model: Mutex<Model>,
    stalled: AtomicBool,
    refuse_next: AtomicBool,
}

impl Ztunnel {
    /// Connects, and again when the connection is over, for ever.
    async fn run(self: Arc<Self>, path: std::path::PathBuf) {
        loop {
            let mut peer = Peer::connect(&path).await;
            self.model.lock().unwrap().connected();
            peer.say(&encode_hello()).await;
            while let Some((request, fds)) = peer.receive_at_leisure().await {
                while self.stalled.load(Relaxed) {
                    sleep(Duration::from_millis(2)).await;
                }
                let netns = fds.first().map(inode);
                assert!(fds.len() <= 1);
                let refusal = self.refuse_next.swap(false, Relaxed).then(|| "no".into());
                let answer = self.model.lock().unwrap().handle(request, netns, refusal);
                peer.say(&encode_answer(&answer)).await;
            }
            sleep(Duration::from_millis(1)).await;
        }
    }
}

struct Running<'a> {
    fixture: &'a Fixture,
    tasks: JoinSet<()>,
    ztunnels: [(Arc<Ztunnel>, Option<AbortHandle>); 3],
}

impl Running<'_> {
    fn start(&mut self, which: usize) {
        let (ztunnel, task) = &mut self.ztunnels[which];
        if task.is_none() {
            *task = Some(self.tasks.spawn(ztunnel.clone().run(self.fixture.path.clone())));
        }
    }

    async fn kill(&mut self, which: usize) {
        let Some(task) = self.ztunnels[which].1.take() else { return };
        task.abort();
        // It may be in the middle of something on the other thread.
        while !task.is_finished() {
            yield_now().await;
        }
    }

    fn none_panicked(&mut self) {
        while let Some(ended) = self.tasks.try_join_next() {
            assert!(ended.unwrap_err().is_cancelled(), "a ztunnel exits");
        }
    }

    /// Waits until the newest serves all members and no other ztunnel serves anything else.
    async fn settled(&mut self, pods: &Pods, connected: std::ops::Range<usize>, context: &str) {
        let newest = connected.end - 1;
        let verdict = |which: usize| {
            let model = self.ztunnels[which].0.model.lock().unwrap();
            let verdict = pods.verdict(&model, which == newest);
            if model.has_snapshot() { verdict } else { Err("no snapshot".into()) }
        };
        let started = Instant::now();
        while let Some(Err(e)) = connected.clone().map(verdict).find(Result::is_err) {
            assert!(started.elapsed() < SOON, "{context}: {e}; {:#?}", self.fixture.members.sessions());
            sleep(Duration::from_millis(5)).await;
        }
        self.none_panicked();
    }
}

async fn sequence(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let timeouts = Timeouts { hello: ANSWER, answer: ANSWER };
    let fixture = Fixture::start(timeouts, Duration::from_millis(10));
    let mut pods = Pods::new(fixture.members.clone(), &fixture.scratch);
    let ztunnels = Default::default();
    let mut running = Running { fixture: &fixture, tasks: JoinSet::new(), ztunnels };
    let complete_at = random.random_range(0..10);
    for step in 0..random.random_range(10..60) {
        if step == complete_at {
            fixture.members.set_complete();
        }
        let which = random.random_range(0..3);
        match random.random_range(0..100) {
            0..25 => pods.change(&mut random),
            25..40 => running.start(which),
            40..45 => running.kill(which).await,
            45..50 => running.ztunnels[which].0.stalled.store(true, Relaxed),
            50..60 => running.ztunnels[which].0.stalled.store(false, Relaxed),
            60..70 => running.ztunnels[which].0.refuse_next.store(true, Relaxed),
            _ => sleep(Duration::from_millis(random.random_range(0..4))).await,
        }
        running.none_panicked();
    }
    fixture.members.set_complete();
    end(&fixture, &mut running, &mut pods, &mut random, seed).await;
}

/// All come back in turn; more changes; one after the other leaves. At each point all is as it should be.
async fn end(fixture: &Fixture, running: &mut Running<'_>, pods: &mut Pods, random: &mut StdRng, seed: u64) {
    for which in 0..3 {
        running.kill(which).await;
        // Its last connection's snapshot must not be taken for the next one's.
        running.ztunnels[which].0.model.lock().unwrap().connected();
        running.ztunnels[which].0.stalled.store(false, Relaxed);
        running.ztunnels[which].0.refuse_next.store(false, Relaxed);
    }
    fixture.eventually("all have left", |m| m.connected() == 0).await;
    for which in 0..3 {
        running.start(which);
        running.settled(pods, which..which + 1, &format!("seed {seed}, {which} came back")).await;
    }
    for _ in 0..8 {
        pods.change(random);
    }
    for newest in (0..3).rev() {
        running.settled(pods, 0..newest + 1, &format!("seed {seed}, {newest} is the newest")).await;
        running.kill(newest).await;
        fixture.eventually("it has left", |m| m.connected() <= newest).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_ztunnel_ends_with_the_members() {
    let at_once = Arc::new(Semaphore::new(8));
    let mut sequences = JoinSet::new();
    for seed in seeds(200) {
        let permit = at_once.clone().acquire_owned().await.unwrap();
        sequences.spawn(async move {
            let result = tokio::spawn(sequence(seed)).await;
            drop(permit);
            (seed, result)
        });
    }
    while let Some(done) = sequences.join_next().await {
        let (seed, result) = done.unwrap();
        if let Err(e) = result {
            panic!("seed {seed}: {e}");
        }
    }
}
