//! Whose the pins are: one agent at a time works on them, and only on those of its own layout.

use std::{
    fs::{self, File},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use super::{RedirectError, error::directory, layout_dir};

/// Asking again after this long for a lock that somebody else has.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Keeps other agents away from the pins under `root` as long as the lock is held. One that is just ending gets
/// `patience`. The kernel lets go of the lock when the process ends, however it does.
pub fn claim(root: &Path, patience: Duration) -> Result<Flock<File>, RedirectError> {
    let path = layout_dir(root);
    fs::create_dir_all(&path).map_err(directory(&path))?;
    let mut dir = File::open(&path).map_err(directory(&path))?;
    let deadline = Instant::now() + patience;
    loop {
        dir = match Flock::lock(dir, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((dir, Errno::EWOULDBLOCK)) if Instant::now() < deadline => dir,
            Err((_, Errno::EWOULDBLOCK)) => return Err(RedirectError::InUse(path)),
            Err((_, errno)) => return Err(directory(&path)(errno.into())),
        };
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// A map of another shape is never used, nor is what uses it left beside ours.
pub(super) fn refuse_other_layouts(root: &Path) -> Result<(), RedirectError> {
    for entry in fs::read_dir(root).map_err(directory(root))?.flatten() {
        let has_pods = fs::read_dir(entry.path().join("pods")).is_ok_and(|mut pods| pods.next().is_some());
        if entry.path() != layout_dir(root) && has_pods {
            return Err(RedirectError::OtherLayout(entry.path()));
        }
    }
    Ok(())
}
