//! Connections at a steady rate, and what became of each.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{
    app::{Client, Connect},
    world::Host,
};

/// What became of the connections of a [`Load`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Connected, greeted, one byte there and back.
    pub ok: u64,
    /// All others, by the kind of error.
    pub failed: BTreeMap<String, u64>,
    /// The longest any took.
    pub slowest: Duration,
}

impl Outcome {
    pub(crate) fn add(&mut self, result: &io::Result<()>, took: Duration) {
        match result {
            Ok(()) => self.ok += 1,
            Err(error) => *self.failed.entry(format!("{:?}", error.kind())).or_default() += 1,
        }
        self.slowest = self.slowest.max(took);
    }
}

/// A client that makes one connection after the other.
pub struct Load {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Outcome>,
}

impl Load {
    /// Starts making `rate` connections a second from the host, to the servers in turn.
    pub fn start(host: &Host, to: Vec<SocketAddr>, rate: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = host.spawn(move || {
            // A SYN may be dropped by one un-enrolment, and its retries by the next ones: 1, 3, 7 seconds later.
            let patient = Connect { patience: Some(Duration::from_secs(20)), ..Connect::default() };
            let mut outcome = Outcome::default();
            let started = Instant::now();
            for (number, to) in (0_u32..).zip(to.iter().cycle()) {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let due = started + Duration::from_secs(1) * number / rate;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                let began = Instant::now();
                let result = Client::connect_here_with(*to, patient).and_then(|mut client| client.exchange());
                outcome.add(&result, began.elapsed());
            }
            outcome
        });
        Self { stop, thread }
    }

    /// Lets it finish the connection it is at.
    ///
    /// # Panics
    /// When its thread did.
    pub fn stop(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the load does not panic")
    }
}
