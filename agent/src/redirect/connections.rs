//! The TCP sockets of a pod: which are captured, which are older than the enrolment, who listens.

use std::net::IpAddr;

use weir_common::{OLD_MARK, is_marked};

use crate::netns::{
    netlink::NetlinkError,
    sockets::{self, TcpSocket, state},
};

/// ztunnel's ports on which nobody with its mark listens, in words.
pub(super) fn missing_listeners() -> Result<Vec<String>, NetlinkError> {
    let ports = [weir_common::OUTBOUND_PORT, weir_common::INBOUND_PORT, weir_common::HBONE_PORT];
    let found = sockets::listeners(ports)?;
    if found.iter().all(|found| found.as_ref().is_some_and(|socket| is_marked(socket.mark))) {
        return Ok(Vec::new());
    }
    // Somebody else's may have been found in the place of one that is there: the whole list says.
    let listening = sockets::list(1 << state::LISTEN)?;
    Ok(ports
        .into_iter()
        .filter(|port| !listening.iter().any(|socket| socket.local_port() == *port && is_marked(socket.mark)))
        .map(|port| format!("ztunnel's listener on port {port}"))
        .collect())
}

/// The connections that go through ztunnel: everything without a mark that is neither loopback nor the pod talking
/// to itself. What waits for its retry has not been captured.
pub(super) fn captured(own: &[IpAddr]) -> Result<Vec<TcpSocket>, NetlinkError> {
    let spared = 1 << state::SYN_SENT | 1 << state::LISTEN | 1 << state::TIME_WAIT;
    let mut captured = sockets::list(!spared)?;
    captured.retain(|socket| {
        let remote = socket.remote();
        !is_marked(socket.mark) && !remote.is_loopback() && !own.contains(&remote)
    });
    Ok(captured)
}

/// The connections that are older than the enrolment and still there.
pub(super) fn old() -> Result<Vec<TcpSocket>, NetlinkError> {
    let mut old = sockets::list(!(1 << state::LISTEN | 1 << state::TIME_WAIT))?;
    old.retain(|socket| socket.mark == OLD_MARK);
    Ok(old)
}

/// How many there are of each family.
pub(super) fn by_family(sockets: &[TcpSocket]) -> [u64; 2] {
    let v6 = sockets.iter().filter(|socket| socket.remote().is_ipv6()).count() as u64;
    [sockets.len() as u64 - v6, v6]
}
