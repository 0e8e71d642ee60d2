//! The metrics, made of what the agent knows at the time of the scrape: nothing is counted twice.

use std::fmt;

use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter as Total, family::Family, gauge::Gauge, info::Info},
    registry::{Registry, Unit},
};
use weir_common::{Counter, Family as IpFamily};

use super::Sources;
use crate::{
    cache::members::Members,
    redirect::pinned,
    zds::counters::{Counters, Results},
};

type Labels = Vec<(&'static str, String)>;

/// Everything, as OpenMetrics text.
pub(super) fn render(sources: &Sources) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("weir_build", "Which weir this is", build);
    pods(&mut registry, sources);
    connections(&mut registry, sources);
    ztunnels(&mut registry, &sources.members);
    messages(&mut registry, &sources.zds);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: usize) {
    let gauge = Gauge::<i64>::default();
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
    registry.register(name, help, gauge);
}

fn total(family: &Family<Labels, Total>, labels: Labels, value: u64) {
    family.get_or_create(&labels).inc_by(value);
}

fn pods(registry: &mut Registry, sources: &Sources) {
    let family = Family::<Labels, Gauge>::default();
    for ((state, reason), count) in sources.reconciler.views().count() {
        let labels = vec![("state", state.as_str().to_owned()), ("reason", reason.as_str().to_owned())];
        family.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
    }
    registry.register("weir_pods", "Pods of this node by state and reason", family);
}

/// Per pod: a sum over pods would go down whenever one leaves.
fn connections(registry: &mut Registry, sources: &Sources) {
    let (by_reason, old) = (Family::<Labels, Total>::default(), Family::<Labels, Total>::default());
    for pod in pinned(&sources.bpffs) {
        let who = |more: [(&'static str, String); 2]| {
            let mut labels =
                vec![("namespace", pod.record.namespace.clone()), ("pod", pod.record.name.clone())];
            labels.extend(more);
            labels
        };
        for (index, (family, name)) in
            [(IpFamily::V4, "ipv4"), (IpFamily::V6, "ipv6")].into_iter().enumerate()
        {
            for &counter in Counter::ALL {
                let value = pod.counters.get(counter, family);
                if value > 0 {
                    let labels = who([("reason", counter.name().to_owned()), ("family", name.to_owned())]);
                    total(&by_reason, labels, value);
                }
            }
            for (what, counts) in [("adopted", pod.old.adopted), ("expired", pod.old.expired)] {
                total(&old, who([("what", what.to_owned()), ("family", name.to_owned())]), counts[index]);
            }
        }
    }
    registry.register("weir_pod_connections", "Connections and packets of a pod by decision", by_reason);
    registry.register("weir_pod_old_connections", "Connections older than the enrolment", old);
}

fn ztunnels(registry: &mut Registry, members: &Members) {
    gauge(registry, "ztunnel_connected", "ztunnels connected to this agent", members.connected());
    gauge(registry, "weir_zds_members", "Pods that ztunnel shall know", members.len());
    let refused = members.sessions().iter().map(|session| session.nacked.len()).sum();
    gauge(registry, "weir_zds_refused_pods", "Pods that a connected ztunnel refuses", refused);
}

fn messages(registry: &mut Registry, zds: &Counters) {
    let family = Family::<Labels, Total>::default();
    for (event, count) in [
        ("accepted", &zds.accepted),
        ("refused", &zds.refused),
        ("accept_error", &zds.accept_errors),
        ("left", &zds.left),
        ("closed", &zds.closed),
    ] {
        total(&family, vec![("event", event.to_owned())], count.get());
    }
    registry.register("weir_zds_connections", "Connections of ztunnels by what became of them", family);
    let family = Family::<Labels, Total>::default();
    let kinds: [(&str, &Results); 4] =
        [("add", &zds.add), ("keep", &zds.keep), ("del", &zds.del), ("snapshot_sent", &zds.snapshot_sent)];
    for (kind, results) in kinds {
        for (result, count) in
            [("acked", &results.acked), ("nacked", &results.nacked), ("lost", &results.lost)]
        {
            let labels = vec![("type", kind.to_owned()), ("result", result.to_owned())];
            total(&family, labels, count.get());
        }
    }
    registry.register("weir_zds_messages", "Messages to ztunnel by type and result", family);
    registry.register_with_unit(
        "weir_zds_ack",
        "Time ztunnel took to answer",
        Unit::Seconds,
        zds.answers.0.clone(),
    );
    let snapshots = Total::<u64>::default();
    snapshots.inc_by(zds.snapshots.get());
    registry.register("weir_zds_snapshots", "Snapshots completed", snapshots);
    let size = usize::try_from(zds.last_snapshot_size.get()).unwrap_or(usize::MAX);
    gauge(registry, "weir_zds_last_snapshot_pods", "Pods in the last snapshot", size);
    let at = usize::try_from(zds.last_snapshot_at.get()).unwrap_or(usize::MAX);
    gauge(registry, "weir_zds_last_snapshot_timestamp_seconds", "When the last snapshot was completed", at);
}
