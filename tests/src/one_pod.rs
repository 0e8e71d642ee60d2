//! A node with one dual-stack pod, an app in it and one outside: what most data-path tests start from.

use weir_common::Counter;

use crate::{
    app::App,
    mesh_node::{MeshNode, difference},
    observer::Observer,
    world::{Families, Host},
};

/// Port of the app in the pod.
pub const APP: u16 = 8080;
/// Port of the app outside.
pub const WEB: u16 = 80;

/// The parts.
pub struct OnePod {
    /// The node, with a stand-in ztunnel.
    pub node: MeshNode,
    /// The pod.
    pub pod: Host,
    _apps: [App; 2],
}

impl OnePod {
    /// The pod is not captured.
    ///
    /// # Panics
    /// When the kernel refuses any part.
    pub fn direct() -> Self {
        let node = MeshNode::new().unwrap();
        let pod = node.pod("a", Families::Dual).unwrap();
        let apps = [App::start(&pod, APP).unwrap(), App::start(&node.world.outside, WEB).unwrap()];
        Self { node, pod, _apps: apps }
    }

    /// The pod is captured.
    ///
    /// # Panics
    /// As [`OnePod::direct`].
    pub fn captured() -> Self {
        let one = Self::direct();
        one.node.capture(&one.pod).unwrap();
        one
    }

    /// The host outside.
    pub fn outside(&self) -> &Host {
        &self.node.world.outside
    }

    /// One of the pod's counters, both families.
    ///
    /// # Panics
    /// When the pod is not captured.
    pub fn count(&self, counter: Counter) -> u64 {
        self.node.counters(&self.pod).unwrap().total(counter)
    }

    /// What `f` adds to the pod's counters.
    ///
    /// # Panics
    /// When the pod is not captured.
    pub fn counted(&self, f: impl FnOnce()) -> Vec<(&'static str, u64)> {
        let before = self.node.counters(&self.pod).unwrap();
        f();
        difference(&before, &self.node.counters(&self.pod).unwrap())
    }

    /// Watches what the pod really sends.
    ///
    /// # Panics
    /// When its interface is gone.
    pub fn observe(&self) -> Observer {
        Observer::start(&self.node.world.node, &self.node.world.device_of(&self.pod)).unwrap()
    }
}
