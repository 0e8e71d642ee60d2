//! What a pod costs the kernel, as counts: they do not depend on how busy the machine is.
#![cfg(feature = "root")]

use weir_agent::kernel::{Hook, PodDir};
use weir_tests::{
    mesh_node::MeshNode,
    world::{Families, PIN_ROOT},
};

/// Instructions the verifier walks per program: loading takes about a microsecond for every ten.
const VERIFIED: [(Hook, u32); 3] = [(Hook::Arrive, 6_000), (Hook::Local, 14_000), (Hook::Guard, 2_500)];

#[test]
fn programs_are_cheap_to_verify() {
    let node = MeshNode::new().unwrap();
    let pod = node.pod("a", Families::Dual).unwrap();
    node.redirector.prepare(&MeshNode::owner(&pod), pod.netns()).unwrap();
    let dir = PodDir::new(format!("{PIN_ROOT}/v1/pods/{}", pod.netns().cookie()).into());
    for (hook, ceiling) in VERIFIED {
        let cost = dir.program_cost(hook).unwrap();
        println!("{}: {} instructions verified, {} bytes", hook.name(), cost.verified, cost.jitted);
        assert!(cost.verified > 0 && cost.verified <= ceiling, "{}: {cost:?}", hook.name());
    }
}
