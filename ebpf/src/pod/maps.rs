//! The maps of one pod. User space pins them under the pod's directory.

use core::{
    intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd},
    ptr,
};

use aya_ebpf::{
    bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST},
    cty::c_void,
    helpers::{bpf_ktime_get_coarse_ns, bpf_map_update_elem},
    macros::map,
    maps::{
        Array, HashMap, LruHashMap, PerCpuArray, SockMap,
        lpm_trie::{Key, LpmTrie},
    },
};
use weir_common::{
    Addr, Counter, Counters, DnsSlot, DnsSlotKey, ExcludedPort, Family, ListenerSlot, PodConfig, Tuple,
};

/// switches, one entry.
#[map]
static CONFIG: Array<PodConfig> = Array::with_max_entries(1, 0);

/// counters, one entry per CPU.
#[map]
static COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(1, 0);

/// ztunnel's listeners by [`ListenerSlot`]. A slot empties by itself when its socket closes.
#[map]
pub static LISTENERS: SockMap = SockMap::with_max_entries(ListenerSlot::COUNT, 0);

/// its own addresses, kept by user space.
#[map]
static OWN: HashMap<Addr, u8> = HashMap::with_max_entries(64, BPF_F_NO_PREALLOC);

/// connections of ztunnel to the app, from loop to steer of the same packet; the value is the time.
#[map]
static INSIDE: LruHashMap<Tuple, u64> = LruHashMap::with_max_entries(512, 0);

/// Ports that are reached directly. Twice what annotations may ask for: the new ones come before the old ones go.
#[map]
static PORTS: HashMap<ExcludedPort, u8> = HashMap::with_max_entries(1024, BPF_F_NO_PREALLOC);

/// Remote networks that are reached directly; twice, as above.
#[map]
static CIDRS: LpmTrie<Addr, u8> = LpmTrie::with_max_entries(512, BPF_F_NO_PREALLOC);

/// DNS queries on their way. Not preallocated: a pod pays for what it asks.
#[map]
pub static DNS_SLOTS: HashMap<DnsSlotKey, DnsSlot> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);

/// connections of ztunnel that have another source port on `lo`: each direction's tuple and the port it gets.
#[map]
static SHIFTED: LruHashMap<Tuple, u64> = LruHashMap::with_max_entries(512, 0);

/// whether there ever was one: until then no segment is looked up.
#[map]
static SHIFTING: Array<u32> = Array::with_max_entries(1, 0);

/// The pod's switches. The entry of an array always exists; the verifier wants the branch all the same.
#[inline(always)]
pub fn config() -> Option<&'static PodConfig> {
    CONFIG.get(0)
}

/// Counts one event.
#[inline(always)]
pub fn count(counter: Counter, family: Family) {
    let Some(counters) = COUNTERS.get_ptr_mut(0) else { return };
    let index = match family {
        Family::V4 => counter as usize,
        Family::V6 => Counter::COUNT + counter as usize,
    };
    // SAFETY: the index is below 2 * COUNT. Atomic although per CPU: a look-up by inet_diag runs steer in process
    // context, where a softirq may interrupt the addition.
    unsafe {
        atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counters.cast::<u64>().add(index), 1);
    }
}

/// Whether the pod owns the address.
#[inline(always)]
pub fn is_own(addr: &Addr) -> bool {
    OWN.get_ptr(addr).is_some()
}

/// Whether the port is excluded; network order.
#[inline(always)]
pub fn is_excluded_port(port: u16, outbound: bool) -> bool {
    PORTS.get_ptr(ExcludedPort { port, outbound: u16::from(outbound) }).is_some()
}

/// Whether the address is in an excluded network.
#[inline(always)]
pub fn is_excluded_address(address: &Addr) -> bool {
    CIDRS.get(Key::new(128, address.by_word())).is_some()
}

/// CLOCK_MONOTONIC at the resolution of a tick (Linux 5.11): a few nanoseconds instead of tens.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: no arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// Remembers a connection that ztunnel opens to the app; false when the map takes no more.
#[inline(always)]
pub fn inside_insert(tuple: &Tuple) -> bool {
    INSIDE.insert(tuple, now(), 0).is_ok()
}

/// Whether this is a connection that ztunnel opens to the app.
#[inline(always)]
pub fn inside_has(tuple: &Tuple) -> bool {
    let Some(at) = INSIDE.get_ptr(tuple) else { return false };
    // SAFETY: a live map value; a torn read is impossible on an aligned u64.
    let at = unsafe { *at };
    now().wrapping_sub(at) <= weir_common::INSIDE_MAX_AGE_NS
}

/// Forgets the tuple; true when it was there.
#[inline(always)]
pub fn inside_remove(tuple: &Tuple) -> bool {
    // A look-up first: connections from outside hardly ever hit, and a delete takes the bucket's lock.
    INSIDE.get_ptr(tuple).is_some() && INSIDE.remove(tuple).is_ok()
}

/// Claims a DNS slot nobody holds; false when somebody does or memory is short.
#[inline(always)]
pub fn dns_slot_claim(key: &DnsSlotKey, slot: &DnsSlot) -> bool {
    DNS_SLOTS.insert(key, slot, u64::from(BPF_NOEXIST)).is_ok()
}

/// Whether any connection was ever given another port.
#[inline(always)]
pub fn is_shifting() -> bool {
    SHIFTING.get(0).is_some_and(|shifting| *shifting != 0)
}

/// The port that packets with this tuple get, if any; network order.
#[inline(always)]
pub fn shifted(tuple: &Tuple) -> Option<u16> {
    let port = SHIFTED.get_ptr(tuple)?;
    // SAFETY: a live map value; a torn read is impossible on an aligned u64.
    Some(unsafe { *port } as u16)
}

/// Notes that a connection of ztunnel has the port that its way `back` leads to.
#[inline(always)]
pub fn shift_insert(tuple: &Tuple, back: &Tuple) -> bool {
    let Some(shifting) = SHIFTING.get_ptr_mut(0) else { return false };
    // SAFETY: a live map value, one aligned word.
    unsafe { *shifting = 1 };
    SHIFTED.insert(back, u64::from(tuple.source_port), 0).is_ok()
        && SHIFTED.insert(tuple, u64::from(back.destination_port), 0).is_ok()
}

/// Forgets what an earlier connection of the tuple had. Its way back runs out of use by itself.
#[inline(always)]
pub fn shift_remove(tuple: &Tuple) {
    let _ = SHIFTED.remove(tuple);
}

/// Notes one more query; false when the slot is being given to another flow.
#[inline(always)]
pub fn dns_slot_asked(slot: *mut DnsSlot) -> bool {
    // SAFETY: a live map value and an aligned word of it.
    let before = unsafe { atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(&raw mut (*slot).pending, 1) };
    before & DnsSlot::TAKEN == 0
}

/// Notes that a query was answered. More answers than queries are not counted.
#[inline(always)]
pub fn dns_slot_answered(slot: *mut DnsSlot) {
    // SAFETY: a live map value and an aligned word of it.
    unsafe {
        let pending = &raw mut (*slot).pending;
        let now = ptr::read_volatile(pending);
        if now & !DnsSlot::TAKEN != 0 {
            atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(pending, u32::MAX);
        }
    }
}

/// Takes the slot from its flow, if no answer to it is on its way, or `anyway`; false when somebody else did.
#[inline(always)]
pub fn dns_slot_take(slot: *mut DnsSlot, anyway: bool) -> bool {
    // SAFETY: a live map value and an aligned word of it.
    unsafe {
        let pending = &raw mut (*slot).pending;
        let old = if anyway { ptr::read_volatile(pending) } else { 0 };
        // One that was taken and not emptied stays usable: its time runs out as well.
        let (_, taken) = atomic_cxchg::<u32, { AtomicOrdering::Relaxed }, { AtomicOrdering::Relaxed }>(
            pending,
            old,
            old | DnsSlot::TAKEN,
        );
        taken
    }
}

/// Puts a socket into the sockmap. aya-ebpf wraps only the helper for sock_ops; the generic update takes a socket
/// from tc since Linux 5.10.
#[inline(always)]
pub fn listener_store(slot: ListenerSlot, socket: *mut c_void) -> bool {
    let key = slot as u32;
    // SAFETY: map and key are valid; the socket is a reference the caller holds.
    unsafe {
        let map = ptr::addr_of!(LISTENERS).cast_mut().cast::<c_void>();
        bpf_map_update_elem(map, (&raw const key).cast(), socket.cast_const(), 0) == 0
    }
}
