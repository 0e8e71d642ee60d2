//! Any order of anything: ztunnels and pods that come, go, stall and fail, and what they all end with.
//!
//! `WEIR_ZDS_SEQUENCES` sets the number of sequences, `WEIR_ZDS_SEED` the first seed.

mod pure;
mod sockets;

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc, time::Duration};

use rand::{Rng, SeedableRng, rngs::StdRng};
use weir_agent::cache::members::Members;

use crate::{
    model::{Inode, Model, inode},
    peer::{Scratch, info, uid},
};

pub const PODS: usize = 6;

/// Seeds to run: as many as asked for, else `default`.
pub fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let first = number("WEIR_ZDS_SEED").unwrap_or_else(|| rand::rng().random_range(0..1 << 32));
    let count = number("WEIR_ZDS_SEQUENCES").unwrap_or(default);
    println!("{count} sequences from WEIR_ZDS_SEED={first}");
    first..first + count
}

/// Publishes and retracts at random, and knows what the set should hold.
pub struct Pods {
    members: Members,
    netns: Vec<Arc<OwnedFd>>,
    /// By number: the namespace published last, and whether it is known right now.
    pub wanted: BTreeMap<usize, (usize, bool)>,
}

impl Pods {
    pub fn new(members: Members, scratch: &Scratch) -> Self {
        // Few, so that they pass from one pod to the next.
        let netns = (0..PODS + 2).map(|n| scratch.netns(n)).collect();
        Self { members, netns, wanted: BTreeMap::new() }
    }

    pub fn change(&mut self, random: &mut StdRng) {
        let n = random.random_range(0..PODS);
        if random.random_bool(0.35) {
            self.members.retract(&uid(n));
            self.wanted.remove(&n);
            return;
        }
        let netns = random.random_range(0..self.netns.len());
        if self.wanted.iter().any(|(&other, (taken, _))| other != n && *taken == netns) {
            return;
        }
        let known = random.random_bool(0.8);
        let fd = known.then(|| self.netns[netns].clone());
        let mut info = info(n);
        if random.random_bool(0.1) {
            info.service_account = "other".into();
        }
        self.members.publish(uid(n), info, fd).unwrap();
        // Not known: the pod is where it was, as far as anybody can tell.
        let was = self.wanted.get(&n).map_or(netns, |(was, _)| *was);
        self.wanted.insert(n, (if known { netns } else { was }, known));
    }

    /// Whether nothing runs that should not, nor elsewhere than it should; with `all`, whether everything
    /// runs that should.
    pub fn verdict(&self, model: &Model, all: bool) -> Result<(), String> {
        for (uid, at) in &model.running {
            let number = uid.trim_start_matches("uid-").parse().unwrap();
            match self.wanted.get(&number) {
                None => return Err(format!("{uid} runs and is no member")),
                // Where one runs that was only kept the agent never knew; the newest is told in the end.
                Some((netns, true)) if *at != self.inode(*netns) && (all || !model.kept.contains(uid)) => {
                    return Err(format!("{uid} runs elsewhere"));
                }
                Some(_) => {}
            }
        }
        for (n, (netns, _)) in self.wanted.iter().filter(|(_, (_, known))| all && *known) {
            if model.running.get(uid(*n).as_str()) != Some(&self.inode(*netns)) {
                return Err(format!("{n} does not run: {model:?}"));
            }
        }
        Ok(())
    }

    pub fn inode(&self, netns: usize) -> Inode {
        inode(&self.netns[netns])
    }
}
