//! Counters per pod, reason and family.

/// Declares [`Counter`] and its names in one place, so that a new reason is one line.
macro_rules! counters {
    ($($(#[$doc:meta])+ $variant:ident = $name:literal,)+) => {
        /// What happened to a connection or packet. Each is counted per family; the value is the index.
        #[repr(usize)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Counter { $($(#[$doc])+ $variant,)+ }

        impl Counter {
            /// All of them, in index order.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];
            /// How many there are.
            pub const COUNT: usize = Self::ALL.len();

            /// snake_case name, as in status, metrics and traces.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }
        }
    };
}

counters! {
    /// Connection of the app given to ztunnel's outbound listener.
    CapturedOut = "captured_out",
    /// Plaintext connection from outside given to ztunnel's inbound listener.
    CapturedIn = "captured_in",
    /// Connection from outside given to ztunnel's HBONE listener.
    Hbone = "hbone",
    /// Connection from the pod to one of its own addresses: not captured.
    SelfCall = "self_call",
    /// Connection of ztunnel to the app, with the client's source address.
    Inside = "inside",
    /// Connection of the kubelet: not captured.
    Probe = "probe",
    /// Connection from outside while inbound capture is off (enrolment in progress, draining, or opted out).
    BypassInbound = "bypass_inbound",
    /// Connection from outside to a port that is excluded.
    ExcludedIn = "excluded_in",
    /// Connection of the app to a port or network that is excluded.
    ExcludedOut = "excluded_out",
    /// Connection of the app refused because ztunnel does not listen.
    RefusedOut = "refused_out",
    /// Connection from outside refused because ztunnel does not listen.
    RefusedIn = "refused_in",
    /// TCP segment that would have left the pod without ztunnel's mark: dropped.
    Guarded = "guarded",
    /// DNS query that would have left the pod without ztunnel's mark: dropped.
    GuardedDns = "guarded_dns",
    /// DNS packet sent to ztunnel's DNS listener.
    Dns = "dns",
    /// DNS packet given back to the app.
    DnsAnswer = "dns_answer",
    /// DNS packet dropped because no slot could be had.
    DnsFull = "dns_full",
    /// Listener on one of ztunnel's ports that is not ztunnel's.
    Impostor = "impostor",
    /// Connection of ztunnel dropped because its tuple could not be recorded.
    InsideFull = "inside_full",
    /// Connection of ztunnel to the app that got another source port, because a client's connection has its tuple.
    TupleTaken = "tuple_taken",
    /// Recorded tuple of ztunnel that a connection from outside re-used: forgotten before it is steered.
    InsideReused = "inside_reused",
    /// Segment of a connection that was not adopted yet, dropped while switching on (it is sent again).
    SwitchingDropped = "switching_dropped",
    /// SYN dropped while draining (the app's retry goes direct).
    Drained = "drained",
}

/// IP family of a counted event; the value is the index.
#[repr(usize)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4 = 0,
    /// IPv6.
    V6 = 1,
}

/// Value of the counter map: one entry, per CPU, so that a program finds every counter by one look-up.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters(pub [[u64; Counter::COUNT]; 2]);

const _: () = assert!(size_of::<Counters>() == 16 * Counter::COUNT);

impl Default for Counters {
    fn default() -> Self {
        Self([[0; Counter::COUNT]; 2])
    }
}

impl Counters {
    /// One counter of one family.
    pub const fn get(&self, counter: Counter, family: Family) -> u64 {
        self.0[family as usize][counter as usize]
    }

    /// Both families together.
    pub const fn total(&self, counter: Counter) -> u64 {
        self.get(counter, Family::V4) + self.get(counter, Family::V6)
    }

    /// Adds another CPU's share.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().flatten().zip(other.0.iter().flatten()) {
            *mine += theirs;
        }
    }
}

#[cfg(feature = "user")]
// SAFETY: an array of u64, no padding, every bit pattern is valid.
unsafe impl aya::Pod for Counters {}
