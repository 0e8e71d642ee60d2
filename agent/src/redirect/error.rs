//! What can go wrong with a pod's data path.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{
    kernel::KernelError,
    netns::{NetnsError, netlink::NetlinkError, sysctl::SysctlError},
};

/// A step failed. What was done before stays; the step can be repeated.
#[derive(Debug, thiserror::Error)]
pub enum RedirectError {
    /// Programs, maps, pins.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The namespace.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// Rules, routes, filters, sockets.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Sysctls.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// A pin is missing or broken.
    #[error("pins: {0}")]
    Pin(String),
    /// The directory cannot be used.
    #[error("{}: {source}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The root is on another file system.
    #[error("{} is not on bpffs; mount one: mount -t bpf bpf /sys/fs/bpf", .0.display())]
    NotBpffs(PathBuf),
    /// Pins of another layout: their maps have other shapes.
    #[error(
        "{} has pods of another version of weir; run that version, or its `weir uninstall`, before this one",
        .0.display()
    )]
    OtherLayout(PathBuf),
    /// Another process drives the same pins.
    #[error("another weir works on {}; is a second agent running on this node?", .0.display())]
    InUse(PathBuf),
    /// The namespace has no address of its own that connections could come from.
    #[error("the namespace has no address besides those of lo")]
    NoAddress,
    /// Several of the above: each part is tried whatever becomes of the others.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<Self>),
}

impl RedirectError {
    /// A map has no more room.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Kernel(error) => error.is_full(),
            Self::Several(errors) => errors.iter().any(Self::is_full),
            _ => false,
        }
    }

    /// None, one, or several.
    pub(super) fn join(mut errors: Vec<Self>) -> Result<(), Self> {
        match errors.len() {
            0 => Ok(()),
            1 => Err(errors.remove(0)),
            _ => Err(Self::Several(errors)),
        }
    }
}

/// Says which directory it was.
pub(super) fn directory(path: &Path) -> impl FnOnce(io::Error) -> RedirectError {
    let path = path.to_owned();
    move |source| RedirectError::Directory { path, source }
}
