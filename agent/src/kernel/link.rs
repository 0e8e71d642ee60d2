//! A BPF link of a network namespace, seen and moved to another program. aya neither tells which namespace a link is
//! attached to, nor updates one that it has not made.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    os::unix::ffi::OsStrExt,
    path::Path,
};

const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_LINK_UPDATE: libc::c_int = 29;

/// Head of `union bpf_attr` for BPF_OBJ_GET.
#[repr(C)]
#[derive(Default)]
struct ObjGet {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// Head of `union bpf_attr` for BPF_OBJ_GET_INFO_BY_FD.
#[repr(C)]
#[derive(Default)]
struct GetInfo {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// Head of `union bpf_attr` for BPF_LINK_UPDATE (Linux 5.7).
#[repr(C)]
#[derive(Default)]
struct LinkUpdate {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

/// Head of `struct bpf_link_info`, with what it says of a link of type netns.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    netns_inode: u32,
    attach_type: u32,
}

/// A link, by its pin.
pub struct Link(OwnedFd);

impl Link {
    /// Opens a pin.
    pub fn open(pin: &Path) -> io::Result<Self> {
        let path = CString::new(pin.as_os_str().as_bytes())?;
        let attr = ObjGet { pathname: path.as_ptr() as u64, ..ObjGet::default() };
        let fd = bpf(BPF_OBJ_GET, &attr)?;
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    /// Whether it is attached: one that was detached, or whose namespace has gone, says inode 0.
    pub fn is_attached(&self) -> io::Result<bool> {
        Ok(self.info()?.netns_inode != 0)
    }

    /// Runs another program from now on, without a moment in between. ENOLINK: it is not attached any more.
    pub fn set_program(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        let number = |fd: RawFd| fd.cast_unsigned();
        let (link_fd, new_prog_fd) = (number(self.0.as_raw_fd()), number(program.as_raw_fd()));
        bpf(BPF_LINK_UPDATE, &LinkUpdate { link_fd, new_prog_fd, ..LinkUpdate::default() }).map(|_| ())
    }

    fn info(&self) -> io::Result<LinkInfo> {
        let mut info = LinkInfo::default();
        let attr = GetInfo {
            bpf_fd: self.0.as_raw_fd().cast_unsigned(),
            info_len: size_of::<LinkInfo>() as u32,
            info: (&raw mut info) as u64,
        };
        bpf(BPF_OBJ_GET_INFO_BY_FD, &attr)?;
        Ok(info)
    }
}

/// bpf(2). `attr` is the head of `union bpf_attr` that the command reads; the kernel takes the rest as zero.
fn bpf<T>(command: libc::c_int, attr: &T) -> io::Result<i64> {
    // SAFETY: `attr` lives over the call and has the size that is told; pointers in it are to live values of the
    // callers, of the sizes they tell.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
