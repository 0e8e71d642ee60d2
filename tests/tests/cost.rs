//! What a pod costs the kernel, as counts: they do not depend on how busy the machine is.
#![cfg(feature = "root")]

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use nix::time::ClockId;
use weir_agent::{
    domain::overrides::{Defaults, Overrides},
    kernel::{Hook, PodDir},
    work::{Count, LOADS, NETLINK, VISITS},
};
use weir_tests::{
    mesh_node::MeshNode,
    world::{Families, Host, pin_dir},
};

/// Instructions the verifier walks per program: loading takes about a microsecond for every ten.
const VERIFIED: [(Hook, u32); 3] = [(Hook::Arrive, 6_000), (Hook::Local, 14_000), (Hook::Guard, 2_500)];

/// The counts are of the process: one test at a time.
static COUNTED: Mutex<()> = Mutex::new(());

#[test]
fn programs_are_cheap_to_verify() {
    let _counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let node = MeshNode::new().unwrap();
    let pod = node.pod("a", Families::Dual).unwrap();
    node.redirector.prepare(&MeshNode::owner(&pod), pod.netns()).unwrap();
    let dir = PodDir::new(pin_dir(&pod));
    for (hook, ceiling) in VERIFIED {
        let cost = dir.program_cost(hook).unwrap();
        println!("{}: {} instructions verified, {} bytes", hook.name(), cost.verified, cost.jitted);
        assert!(cost.verified > 0 && cost.verified <= ceiling, "{}: {cost:?}", hook.name());
    }
}

/// What one enrolment asks of the kernel, and what the checks of an enrolled pod do, again and again.
#[test]
fn an_enrolment_is_so_much_work() {
    let _counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let node = MeshNode::new().unwrap();
    let pods: Vec<_> = (0..10).map(|n| node.pod(&format!("p{n}"), Families::Dual).unwrap()).collect();
    let overrides = Overrides::none(Defaults::default());
    type Step<'a> = (&'a str, [f64; 3], &'a dyn Fn(&Host));
    // Per pod: program loads, netlink requests, visits.
    let steps: [Step<'_>; 4] = [
        ("prepare", [4.0, 10.0, 3.0], &|pod| {
            node.redirector.prepare(&MeshNode::owner(pod), pod.netns()).unwrap();
        }),
        ("switch on", [0.0, 30.0, 4.0], &|pod| {
            node.redirector.switch_on(pod.netns(), &overrides).unwrap();
        }),
        ("verify", [0.0, 14.0, 1.0], &|pod| {
            node.redirector.verify(pod.netns(), &overrides).unwrap();
        }),
        ("switch off", [0.0, 50.0, 4.0], &|pod| node.redirector.switch_off(pod.netns()).unwrap()),
    ];
    for (name, bounds, step) in steps {
        let before = ([&LOADS, &NETLINK, &VISITS].map(Count::get), cpu());
        pods.iter().for_each(step);
        let per_pod = |total: u64| total as f64 / pods.len() as f64;
        let after = [&LOADS, &NETLINK, &VISITS].map(Count::get);
        let done = [0, 1, 2].map(|n| per_pod(after[n] - before.0[n]));
        let time = (cpu() - before.1) / pods.len() as u32;
        println!("{name}: {done:?} loads, netlink requests, visits; {time:.1?} of processor time");
        assert!(
            done.iter().zip(bounds).all(|(done, bound)| *done <= bound),
            "{name}: {done:?} of {bounds:?}"
        );
    }
}

/// Processor time of this process so far: unlike the clock it does not depend on who else works.
fn cpu() -> Duration {
    ClockId::CLOCK_PROCESS_CPUTIME_ID.now().unwrap().into()
}
