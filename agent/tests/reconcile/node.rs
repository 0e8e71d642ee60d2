//! What the reconciler drives, played by the world.

use std::sync::Arc;

use weir_agent::{
    domain::{
        reason::{Failure, Reason},
        workload::{Pod, PodUid, Redirection, WorkloadInfo},
    },
    reconcile::{Annotated, Annotator, DataPath, Netns, Published, Recovered, SwitchedOn, Ztunnel},
};

use crate::world::{ENABLED, PENDING, Sim, State, World};

impl DataPath for World {
    async fn recovered(&self) -> Vec<Recovered> {
        let state = self.lock();
        let left = state.sims.iter().filter(|(_, sim)| sim.prepared);
        let recovered = left.map(|(uid, sim)| Recovered {
            uid: uid.clone(),
            netns: (!state.hidden.contains(uid)).then(|| state.netns.clone()),
            captured: sim.captured && !sim.draining,
        });
        recovered.collect()
    }

    async fn locate(&self, pod: &Arc<Pod>) -> Result<Netns, Failure> {
        self.call(&pod.uid, "locate", Reason::NetnsNotFound, |state| Ok(state.netns.clone())).await
    }

    async fn prepare(&self, pod: &Arc<Pod>, _: &Netns) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            state.sim(&pod.uid).prepared = true;
            Ok(())
        };
        self.call(&pod.uid, "prepare", Reason::PrepareFailed, effect).await
    }

    async fn switch_on(&self, pod: &Arc<Pod>, _: &Netns) -> Result<SwitchedOn, Failure> {
        let effect = |state: &mut State| {
            let sim = state.sim(&pod.uid);
            sim.captured = sim.prepared;
            sim.draining = false;
            sim.torn_down = false;
            Ok(SwitchedOn { old_connections: 3 })
        };
        self.call(&pod.uid, "switch_on", Reason::SwitchOnFailed, effect).await
    }

    async fn verify(&self, pod: &Arc<Pod>, _: &Netns) -> Result<(), Vec<String>> {
        let effect = |state: &mut State| {
            let sim = state.sim(&pod.uid);
            let lost = || Failure::new(Reason::VerifyFailed, "not captured");
            if sim.captured { Ok(()) } else { Err(lost()) }
        };
        let verified = self.call(&pod.uid, "verify", Reason::VerifyFailed, effect).await;
        verified.map_err(|failure| vec![failure.detail])
    }

    async fn drain(&self, pod: &Arc<Pod>, _: &Netns) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            state.sim(&pod.uid).draining = true;
            Ok(())
        };
        self.call(&pod.uid, "drain", Reason::DrainFailed, effect).await
    }

    async fn switch_off(&self, pod: &Arc<Pod>, _: &Netns) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            let sim = state.sim(&pod.uid);
            *sim = Sim { at_ztunnel: sim.at_ztunnel, acked: sim.acked, ..Sim::default() };
            Ok(())
        };
        self.call(&pod.uid, "switch_off", Reason::SwitchOffFailed, effect).await
    }

    async fn forget(&self, uid: &PodUid) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            *state.sim(uid) = Sim::default();
            Ok(())
        };
        self.call(uid, "forget", Reason::ForgetFailed, effect).await
    }
}

impl Ztunnel for World {
    fn restore(&self, uid: &PodUid, _: &WorkloadInfo, _: Option<Netns>) {
        self.lock().sim(uid).at_ztunnel = true;
    }

    async fn publish(&self, uid: &PodUid, _: &WorkloadInfo, _: Netns) -> Published {
        let effect = |state: &mut State| {
            let up = state.ztunnel_up;
            let sim = state.sim(uid);
            sim.at_ztunnel = true;
            sim.acked |= up;
            Ok(up)
        };
        match self.call(uid, "publish", Reason::ZtunnelRefused, effect).await {
            Ok(true) => Published::Acked("ztunnel-1".into()),
            Ok(false) => Published::NoZtunnel,
            Err(failure) => Published::Nacked(failure.detail),
        }
    }

    async fn retract(&self, uid: &PodUid) -> Result<(), Failure> {
        let effect = |state: &mut State| {
            let sim = state.sim(uid);
            sim.at_ztunnel = false;
            sim.acked = false;
            Ok(())
        };
        self.call(uid, "retract", Reason::RetractFailed, effect).await
    }
}

impl Annotator for World {
    async fn set(&self, pod: &Pod, value: Option<Redirection>) -> Result<Annotated, Failure> {
        let step = match value {
            ENABLED => "annotate_enabled",
            PENDING => "annotate_pending",
            _ => "unannotate",
        };
        let effect = |state: &mut State| {
            let written = state.edit(&pod.uid, |pod| pod.redirection = value);
            Ok(written.map_or(Annotated::Gone, |version| Annotated::Done { version }))
        };
        self.call(&pod.uid, step, Reason::AnnotateFailed, effect).await
    }
}
