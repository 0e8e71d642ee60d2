//! What a stand-in ztunnel saw. Counters are exact; the record of single connections is capped.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Entries kept; the oldest give way.
const CAPACITY: usize = 65_536;

/// One of the three listeners a connection can come in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Listener {
    /// 15001: from an app of the pod.
    Outbound,
    /// 15006: to the pod, in plaintext.
    Inbound,
    /// 15008: to the pod, from another stand-in.
    Hbone,
}

/// A connection a stand-in accepted.
#[derive(Clone, Debug)]
pub struct Accepted {
    /// Where it came in.
    pub listener: Listener,
    /// Whose listener it was.
    pub pod: Arc<str>,
    /// Other end of the accepted socket.
    pub peer: SocketAddr,
    /// This end of the accepted socket.
    pub local: SocketAddr,
    /// Where the client wanted to go: `local`, or for [`Listener::Hbone`] what the preface says.
    pub original_dst: SocketAddr,
    /// Who the client is: `peer`, or for [`Listener::Hbone`] what the preface says.
    pub client: SocketAddr,
    /// Answer of SO_ORIGINAL_DST. Anything but `None` means that somebody runs NAT in the pod.
    pub so_original_dst: Option<SocketAddr>,
    /// When it was accepted.
    pub at: Instant,
}

/// A DNS question that reached 15053.
#[derive(Clone, Debug)]
pub struct DnsQuery {
    /// Whose listener it was.
    pub pod: Arc<str>,
    /// Who asked.
    pub peer: SocketAddr,
    /// The name asked for, dotted.
    pub name: String,
    /// Asked over TCP.
    pub tcp: bool,
}

/// Exact counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Accepted on 15001.
    pub outbound: u64,
    /// Accepted on 15006.
    pub inbound: u64,
    /// Accepted on 15008.
    pub hbone: u64,
    /// Answered on 15053, UDP.
    pub dns_udp: u64,
    /// Answered on 15053, TCP.
    pub dns_tcp: u64,
    /// Refused because they asked for a port of ztunnel's own.
    pub illegal: u64,
    /// Came to 15008 with a preface that made no sense, or one for another pod.
    pub bad_preface: u64,
    /// Accepted, but the way on could not be connected.
    pub upstream_failed: u64,
    /// For which SO_ORIGINAL_DST had an answer.
    pub so_original_dst: u64,
    /// Times accept itself failed.
    pub accept_failed: u64,
    /// Connections being proxied right now.
    pub open: u64,
}

macro_rules! atomics {
    ($($name:ident),*) => {
        #[derive(Debug, Default)]
        pub(super) struct Atomics { $(pub(super) $name: AtomicU64),* }
        impl Atomics {
            fn load(&self) -> Counts {
                Counts { $($name: self.$name.load(Relaxed)),* }
            }
        }
    };
}
atomics!(
    outbound,
    inbound,
    hbone,
    dns_udp,
    dns_tcp,
    illegal,
    bad_preface,
    upstream_failed,
    so_original_dst,
    accept_failed,
    open
);

/// Shared record of one stand-in; it outlives it.
#[derive(Debug, Default)]
pub struct Log {
    pub(super) counters: Atomics,
    records: Mutex<Records>,
    grown: Condvar,
}

#[derive(Debug, Default)]
struct Records {
    accepted: VecDeque<Accepted>,
    dns: VecDeque<DnsQuery>,
}

impl Log {
    /// The counters as they are now.
    pub fn counts(&self) -> Counts {
        self.counters.load()
    }

    /// The connections recorded, oldest first.
    pub fn accepted(&self) -> Vec<Accepted> {
        self.records().accepted.iter().cloned().collect()
    }

    /// The DNS questions recorded, oldest first.
    pub fn dns(&self) -> Vec<DnsQuery> {
        self.records().dns.iter().cloned().collect()
    }

    /// Forgets the records, not the counts.
    pub fn clear(&self) {
        *self.records() = Records::default();
    }

    /// The first recorded connection that `wanted` likes, waiting for it if need be.
    pub fn wait_for(&self, timeout: Duration, mut wanted: impl FnMut(&Accepted) -> bool) -> Option<Accepted> {
        let deadline = Instant::now() + timeout;
        let mut records = self.records();
        loop {
            if let Some(found) = records.accepted.iter().find(|a| wanted(a)) {
                return Some(found.clone());
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            records = self.grown.wait_timeout(records, left).expect("nobody panics holding the records").0;
        }
    }

    pub(super) fn push(&self, accepted: Accepted) {
        push_capped(&mut self.records().accepted, accepted);
        self.grown.notify_all();
    }

    pub(super) fn push_dns(&self, query: DnsQuery) {
        let counter = if query.tcp { &self.counters.dns_tcp } else { &self.counters.dns_udp };
        counter.fetch_add(1, Relaxed);
        push_capped(&mut self.records().dns, query);
    }

    /// Counts a connection as open until the guard goes.
    pub(super) fn opened(self: &Arc<Self>) -> Open {
        self.counters.open.fetch_add(1, Relaxed);
        Open(self.clone())
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().expect("nobody panics holding the records")
    }
}

fn push_capped<T>(queue: &mut VecDeque<T>, item: T) {
    if queue.len() == CAPACITY {
        queue.pop_front();
    }
    queue.push_back(item);
}

/// See [`Log::opened`].
pub(super) struct Open(Arc<Log>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.counters.open.fetch_sub(1, Relaxed);
    }
}
