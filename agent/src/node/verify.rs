//! Looks at every enrolled pod on an interval: what is "enabled" must be so, whatever happened since.

use std::time::Duration;

use crate::{domain::enrolment::State, reconcile::Handle};

/// Has the enrolled pods verified, spread over the interval; what is found is repaired by the reconciler. Runs until
/// dropped.
pub async fn keep_verifying(reconciler: Handle, interval: Duration) {
    loop {
        let enrolled: Vec<_> = reconciler
            .views()
            .list()
            .into_iter()
            .filter(|view| view.state == State::Enrolled)
            .map(|view| view.uid)
            .collect();
        let Ok(pods @ 1..) = u32::try_from(enrolled.len()) else {
            tokio::time::sleep(interval).await;
            continue;
        };
        for uid in enrolled {
            tokio::time::sleep(interval / pods).await;
            reconciler.recheck([uid]);
        }
    }
}
