//! The set and its sessions without sockets: every message boundary is a place to stop at.

use futures::FutureExt;
use weir_agent::{
    cache::members::{Action, Next, Peer, Session},
    zds::codec::{Answer, Request},
};

use super::*;

#[derive(Default)]
struct Ztunnel {
    model: Model,
    connection: Option<Connection>,
}

struct Connection {
    session: Session,
    asked: Option<Action>,
    answer: Option<Answer>,
}

impl Ztunnel {
    fn connect(&mut self, members: &Members) {
        self.model.connected();
        let session = members.register(Peer { pid: None, uid: 0 });
        self.connection = Some(Connection { session, asked: None, answer: None });
    }

    /// One step of: asked, done, answered. `false` if there is nothing to do.
    fn step(&mut self, refuse: bool) -> bool {
        let Some(Connection { session, asked, answer }) = &mut self.connection else { return false };
        if let Some(answer) = answer.take() {
            session.answered(answer).unwrap();
        } else if let Some(action) = asked.take() {
            let (request, netns) = spell(&action);
            *answer = Some(self.model.handle(request, netns, refuse.then(|| "no".into())));
        } else {
            match session.next_step() {
                Next::Send(action) => *asked = Some(action),
                Next::Idle(_) => return false,
            }
        }
        true
    }
}

fn spell(action: &Action) -> (Request, Option<Inode>) {
    match action {
        Action::Add { uid, info, netns } => {
            (Request::Add { uid: uid.clone(), info: info.clone() }, Some(inode(netns)))
        }
        Action::Keep(uid) => (Request::Keep(uid.clone()), None),
        Action::Del(uid) => (Request::Del(uid.clone()), None),
        Action::SnapshotSent => (Request::SnapshotSent, None),
    }
}

/// What the set says of ztunnels is true of them, at every moment.
fn claims_hold(members: &Members, pods: &Pods, ztunnels: &[Ztunnel; 3], context: &str) {
    let of = |session: u64| {
        let is = |z: &&Ztunnel| z.connection.as_ref().is_some_and(|c| c.session.id() == session);
        ztunnels.iter().find(is).unwrap()
    };
    for n in 0..PODS {
        for by in members.acked_by(&uid(n)) {
            let running = of(by.session).model.running.get(uid(n).as_str());
            assert_eq!(running, Some(&pods.inode(pods.wanted[&n].0)), "{context}: acked {n}");
        }
        if members.wait_released(&uid(n), Duration::ZERO).now_or_never() == Some(Ok(())) {
            let connected = ztunnels.iter().filter(|z| z.connection.is_some());
            let holds = connected.filter(|z| z.model.running.contains_key(uid(n).as_str())).count();
            assert_eq!(holds, 0, "{context}: released {n}");
        }
    }
}

fn settle(ztunnels: &mut [Ztunnel; 3], context: &str) {
    for _ in 0..1000 {
        if ztunnels.iter_mut().map(|z| z.step(false)).filter(|&stepped| stepped).count() == 0 {
            return;
        }
    }
    panic!("{context}: no end to what there is to say");
}

/// After settling: the newest has everything, the others nothing they should not; one after the other
/// leaves.
fn all_end_right(pods: &Pods, ztunnels: &mut [Ztunnel; 3], context: &str) {
    loop {
        settle(ztunnels, context);
        let id = |z: &Ztunnel| z.connection.as_ref().map(|c| c.session.id());
        let Some(newest) = ztunnels.iter().filter_map(id).max() else { return };
        for ztunnel in ztunnels.iter_mut().filter(|z| z.connection.is_some()) {
            let verdict = pods.verdict(&ztunnel.model, id(ztunnel) == Some(newest));
            assert_eq!(verdict, Ok(()), "{context}");
        }
        let newest = ztunnels.iter_mut().find(|z| id(z) == Some(newest)).unwrap();
        newest.connection = None;
    }
}

fn sequence(seed: u64, scratch: &Scratch) {
    let mut random = StdRng::seed_from_u64(seed);
    let members = Members::new(Duration::ZERO);
    let mut pods = Pods::new(members.clone(), scratch);
    let mut ztunnels: [Ztunnel; 3] = Default::default();
    let complete_at = random.random_range(0..30);
    for step in 0..random.random_range(20..150) {
        let context = format!("seed {seed}, step {step}");
        if step == complete_at {
            members.set_complete();
        }
        let ztunnel = &mut ztunnels[random.random_range(0..3)];
        match random.random_range(0..100) {
            0..20 => pods.change(&mut random),
            20..28 => ztunnel.connect(&members),
            28..32 => ztunnel.connection = None,
            _ => drop(ztunnel.step(random.random_bool(0.15))),
        }
        claims_hold(&members, &pods, &ztunnels, &context);
    }
    members.set_complete();
    all_end_right(&pods, &mut ztunnels, &format!("seed {seed}, end"));
    // And after all have come back, each knows everything.
    ztunnels.iter_mut().for_each(|z| z.connect(&members));
    settle(&mut ztunnels, "all back");
    for ztunnel in &ztunnels {
        assert_eq!(pods.verdict(&ztunnel.model, true), Ok(()), "seed {seed}, all back");
    }
}

#[tokio::test]
async fn every_ztunnel_ends_with_the_members() {
    let scratch = Scratch::new();
    for seed in seeds(2_000) {
        sequence(seed, &scratch);
    }
}
