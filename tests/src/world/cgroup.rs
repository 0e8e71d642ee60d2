//! Cgroups (v2) for pods and for the kubelet: how the agent tells who is who.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

/// A cgroup of the test's own. What still runs in it when it is dropped is killed.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes `path` below the machine's cgroup v2 mount.
    ///
    /// # Errors
    /// When there is no such mount, or it cannot be written.
    pub fn new(path: &str) -> Result<Self> {
        let dir = mount_point()?.join(path);
        fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        Ok(Self(dir))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Moves a process into it.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn add(&self, pid: nix::unistd::Pid) -> Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid.to_string())
            .with_context(|| format!("moving {pid} to {}", self.0.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let deadline = Instant::now() + Duration::from_secs(2);
        // Parents that the path made go too, as far as they are empty.
        let mut dir = self.0.as_path();
        while dir.components().any(|part| part.as_os_str().to_string_lossy().starts_with("weir-test-")) {
            match fs::remove_dir(dir) {
                Err(error) if error.raw_os_error() == Some(nix::libc::EBUSY) => {
                    if Instant::now() >= deadline || dir != self.0 {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => return,
                _ => {}
            }
            let Some(parent) = dir.parent() else { return };
            dir = parent;
        }
    }
}

/// Where cgroup v2 is mounted: on a hybrid machine not at the usual place.
///
/// # Errors
/// When it is not mounted.
pub fn mount_point() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    mounts
        .lines()
        .find(|line| line.contains(" - cgroup2 "))
        .and_then(|line| line.split(' ').nth(4))
        .map(PathBuf::from)
        .context("cgroup v2 is not mounted")
}
