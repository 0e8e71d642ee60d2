//! Looks at every captured pod on an interval: what is "enabled" must be so, whatever happened since.

use std::{io, thread, time::Duration};

use tracing::error;

use super::tracked::{Tracked, Watched};
use crate::{
    netns::{Netns, NetnsError},
    reconcile::Handle,
};

/// A pod is looked at whole every so many times, though nothing seems to have changed: what tells of changes is not
/// relied on for ever.
const WHOLE: usize = 30;

/// The thread that goes round all pods, spread over the interval. A pod that is not as it was is looked at whole by the
/// reconciler, and repaired. Ends with the process.
pub fn keep_glancing(
    tracked: Tracked,
    reconciler: Handle,
    home: Netns,
    interval: Duration,
) -> io::Result<()> {
    let go_round = move || {
        for round in 0_usize.. {
            let pods = tracked.watched();
            let Ok(count @ 1..) = u32::try_from(pods.len()) else {
                thread::sleep(interval);
                continue;
            };
            for (number, pod) in pods.into_iter().enumerate() {
                thread::sleep(interval / count);
                let whole = (round + number) % WHOLE == WHOLE - 1;
                if whole || !is_right(&pod, &home) {
                    reconciler.recheck([pod.uid]);
                }
            }
        }
    };
    thread::Builder::new().name("weir-verify".into()).spawn(go_round).map(drop)
}

/// Goes there, looks, and comes home: a namespace lasts as long as somebody is in it.
fn is_right(pod: &Watched, home: &Netns) -> bool {
    let looked = || -> Result<bool, NetnsError> {
        pod.netns.move_in()?;
        Ok(pod.glance.is_right())
    };
    let right = looked().unwrap_or(false);
    if let Err(error) = home.move_in() {
        error!(%error, "the verifier cannot go home");
    }
    right
}
