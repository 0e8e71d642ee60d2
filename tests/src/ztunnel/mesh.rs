//! Which addresses are pods behind some stand-in ztunnel: what the control plane tells a real one.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard},
};

type Peers = HashMap<IpAddr, HashSet<Arc<str>>>;

/// Registry shared by all stand-in ztunnels of a test: pod address → UIDs of the pods that have it.
///
/// A stand-in enters a pod when it starts to serve it and strikes it out when the agent tells it to stop.
/// One that dies strikes nothing out, for the control plane does not notice either: its pods stay peers,
/// and are refused on 15008 until the next stand-in serves them.
#[derive(Clone, Debug, Default)]
pub struct Mesh {
    peers: Arc<Mutex<Peers>>,
}

impl Mesh {
    /// Whether `ip` is spoken to on 15008.
    pub fn is_peer(&self, ip: IpAddr) -> bool {
        self.peers().contains_key(&ip)
    }

    /// All peers, in no order.
    pub fn ips(&self) -> Vec<IpAddr> {
        self.peers().keys().copied().collect()
    }

    /// Makes the addresses of a pod peers.
    pub fn join(&self, uid: &str, ips: &[IpAddr]) {
        let uid: Arc<str> = uid.into();
        let mut peers = self.peers();
        for &ip in ips {
            peers.entry(ip).or_default().insert(uid.clone());
        }
    }

    /// Strikes a pod out, whatever its addresses were.
    pub fn leave(&self, uid: &str) {
        self.peers().retain(|_, uids| {
            uids.remove(uid);
            !uids.is_empty()
        });
    }

    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().expect("nobody panics holding the registry")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_a_peer_until_its_last_pod_leaves() {
        let (mesh, ip): (_, IpAddr) = (Mesh::default(), [10, 0, 0, 1].into());
        mesh.join("old", &[ip]);
        mesh.join("new", &[ip]);
        mesh.leave("old");
        assert!(mesh.is_peer(ip));
        mesh.leave("new");
        assert!(mesh.ips().is_empty());
    }
}
