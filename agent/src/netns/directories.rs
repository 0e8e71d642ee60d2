//! Tells when something changes in the directories.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, RawFd},
    path::Path,
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
};
use tokio::io::unix::AsyncFd;

/// Directories being watched. A directory that is replaced by another ends it: see [`Watch::changed`].
#[derive(Debug)]
pub struct Watch(AsyncFd<Descriptor>);

#[derive(Debug)]
struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Watch {
    /// Watches all of them.
    ///
    /// # Errors
    /// When one is not there, or the kernel refuses.
    pub fn on(dirs: &[&Path]) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let what = AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        for dir in dirs {
            inotify.add_watch(*dir, what)?;
        }
        // SAFETY: the descriptor is the inotify's own, the same until it is closed, and closed after the AsyncFd has let go.
        let registered = unsafe { AsyncFd::register(Descriptor(inotify)) };
        Ok(Self(registered.map_err(io::Error::from)?))
    }

    /// Waits for a change. `false`: a directory is gone, and the watch with it.
    ///
    /// # Errors
    /// When the descriptor cannot be read.
    pub async fn changed(&self) -> io::Result<bool> {
        let mut ready = self.0.readable().await?;
        let mut alive = true;
        loop {
            match self.0.get_ref().0.read_events() {
                // Too many to be told (IN_Q_OVERFLOW) is a change as well.
                Ok(events) => alive &= !events.iter().any(|event| event.mask.intersects(GONE)),
                Err(Errno::EAGAIN) => {
                    ready.clear_ready();
                    return Ok(alive);
                }
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

const GONE: AddWatchFlags = AddWatchFlags::IN_DELETE_SELF
    .union(AddWatchFlags::IN_MOVE_SELF)
    .union(AddWatchFlags::IN_IGNORED)
    .union(AddWatchFlags::IN_UNMOUNT);
