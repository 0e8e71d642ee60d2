//! Marks the TCP sockets of a namespace that are older than the enrolment, so that they keep going straight out.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::{
    bindings::seq_file,
    cty::c_void,
    helpers::{bpf_getsockopt, bpf_seq_write, bpf_setsockopt, bpf_skc_to_tcp_sock},
};
use weir_common::{KernelOffsets, OLD_MARK, SocketNote, SocketVerdict, is_marked};

/// Where the kernel keeps what is read below. Set by the loader from the kernel's BTF before the program is loaded;
/// constants to the verifier, because the section is read-only.
#[unsafe(no_mangle)]
static OFFSETS: KernelOffsets = KernelOffsets {
    skc_state: 0,
    skc_family: 0,
    skc_daddr: 0,
    sk_rx_dst_ifindex: 0,
    sk_dst_cache: 0,
    dst_dev: 0,
    dev_ifindex: 0,
};

/// `struct bpf_iter__tcp` (Linux 5.9).
#[repr(C)]
pub struct IterTcp {
    meta: *const IterMeta,
    socket: *mut c_void,
    uid: u32,
}

/// `struct bpf_iter_meta`.
#[repr(C)]
struct IterMeta {
    seq: *mut seq_file,
    session_id: u64,
    seq_num: u64,
}

/// Which sockets are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Before the rules: all.
    All,
    /// After the rules: those that do not go over `lo`.
    Rest,
}

const LISTEN: u8 = 10;
const AF_INET6: u16 = 10;
/// `LOOPBACK4_IPV6` of the kernel's `net/ipv6.h`, 127.0.0.6: what the IPv4 address of a socket says that is connected
/// over IPv6. A dual-stack socket's says its IPv4 peer.
const NO_IPV4: u32 = 0x7f00_0006_u32.to_be();
const SOL_SOCKET: i32 = 1;
const SO_MARK: i32 = 36;
const LOOPBACK_IFINDEX: i32 = 1;

/// Reads a field of a kernel structure at an offset from [`OFFSETS`].
macro_rules! field {
    ($base:expr, $offset:ident as $type:ty) => {
        *$base.cast::<u8>().add(read_volatile(addr_of!(OFFSETS.$offset)) as usize).cast::<$type>()
    };
}

#[inline(always)]
pub fn adopt(ctx: *mut IterTcp, pass: Pass) -> i32 {
    // SAFETY: the context of an iterator over TCP sockets; the socket is null once, at the end. Fields are read at
    // offsets that the kernel's BTF gave, and the verifier checks each against that BTF.
    unsafe {
        let socket = (*ctx).socket;
        if socket.is_null() || field!(socket, skc_state as u8) == LISTEN {
            return 0;
        }
        let (verdict, errno) = judge(socket, pass);
        let daddr = field!(socket, skc_daddr as u32);
        let v6 = field!(socket, skc_family as u16) == AF_INET6 && (daddr == 0 || daddr == NO_IPV4);
        let note = SocketNote { verdict: verdict as u32, errno, v6: u32::from(v6) };
        bpf_seq_write((*(*ctx).meta).seq, (&raw const note).cast(), size_of::<SocketNote>() as u32);
    }
    0
}

/// # Safety
/// `socket` is a `struct sock_common` from the iterator.
#[inline(always)]
unsafe fn judge(socket: *mut c_void, pass: Pass) -> (SocketVerdict, i32) {
    // SAFETY: see `adopt`; the helper returns a full socket or null.
    unsafe {
        let tcp: *mut c_void = bpf_skc_to_tcp_sock(socket).cast();
        if tcp.is_null() {
            return (SocketVerdict::Unfinished, 0);
        }
        let mut mark = 0_u32;
        bpf_getsockopt(tcp, SOL_SOCKET, SO_MARK, (&raw mut mark).cast(), 4);
        if mark == OLD_MARK {
            return (SocketVerdict::Old, 0);
        }
        if is_marked(mark) {
            return (SocketVerdict::Marked, 0);
        }
        if pass == Pass::Rest && interface(tcp) == LOOPBACK_IFINDEX {
            return (SocketVerdict::Captured, 0);
        }
        let mut mark = OLD_MARK;
        match bpf_setsockopt(tcp, SOL_SOCKET, SO_MARK, (&raw mut mark).cast(), 4) {
            0 => (SocketVerdict::Adopted, 0),
            error => (SocketVerdict::Failed, error as i32),
        }
    }
}

/// The interface the connection uses: that of its last received segment, or, where none came or all came through
/// the backlog, that of its cached route. 0 when neither is known.
///
/// # Safety
/// `tcp` is a `struct tcp_sock` from the iterator.
#[inline(always)]
unsafe fn interface(tcp: *mut c_void) -> i32 {
    // SAFETY: see `adopt`. Pointers read from the socket may be null: they are compared first.
    unsafe {
        let received = field!(tcp, sk_rx_dst_ifindex as i32);
        if received != 0 {
            return received;
        }
        let route = field!(tcp, sk_dst_cache as *mut c_void);
        if route.is_null() {
            return 0;
        }
        let device = field!(route, dst_dev as *mut c_void);
        if device.is_null() {
            return 0;
        }
        field!(device, dev_ifindex as i32)
    }
}
