//! Whose connections to pods are not captured: the kubelet's, known by its cgroup (v2).

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use tracing::{info, warn};

use crate::{cli::Paths, netns::Netns, redirect::Redirector};

/// Names of programs that are, or contain, a kubelet. For the latter the whole program is exempt.
const NAMES: [&str; 3] = ["kubelet", "kubelite", "k3s"];

/// How often the kubelet's cgroup is looked at: a restarted kubelet may have another.
const LOOK: Duration = Duration::from_secs(5);

/// Whose connections are exempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exempt {
    /// The kubelet's, wherever it is.
    Kubelet,
    /// Those of this cgroup.
    Cgroup(PathBuf),
    /// Those of every process in the host's network namespace.
    Host,
    /// None.
    Nobody,
}

/// Keeps the exemption on the cgroup that it belongs to; runs until dropped.
pub async fn keep_exempt(redirector: Arc<Redirector>, exempt: Exempt, paths: Paths) {
    let mut attached = None;
    let mut said = None;
    loop {
        let (redirector, exempt, paths) = (redirector.clone(), exempt.clone(), paths.clone());
        let looked = tokio::task::spawn_blocking(move || keep(&redirector, &exempt, &paths, attached)).await;
        match looked.map_err(anyhow::Error::from).and_then(|looked| looked) {
            Ok(now) => {
                attached = now;
                said = None;
            }
            Err(error) => {
                attached = None;
                let text = format!("{error:#}");
                if said.as_ref() != Some(&text) {
                    warn!("the kubelet's probes go through ztunnel: {text}");
                    said = Some(text);
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// One look. `attached` is the inode of the cgroup that is exempt; one that was made anew has another.
fn keep(
    redirector: &Redirector,
    exempt: &Exempt,
    paths: &Paths,
    attached: Option<u64>,
) -> anyhow::Result<Option<u64>> {
    let dir = match exempt {
        Exempt::Nobody => {
            redirector.exempt_nobody()?;
            return Ok(None);
        }
        Exempt::Kubelet => cgroup(&paths.proc)?,
        Exempt::Cgroup(dir) => dir.clone(),
        Exempt::Host => mount()?,
    };
    let inode = fs::metadata(&dir).with_context(|| dir.display().to_string())?.ino();
    if attached != Some(inode) {
        let host = Netns::open(&paths.host_netns()).context("the host's network namespace")?;
        redirector.exempt(&dir, &host).context("exempting the kubelet's probes")?;
        info!(cgroup = %dir.display(), "the kubelet's probes are exempt");
    }
    Ok(Some(inode))
}

/// Why the kubelet's probes cannot be told from other connections.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum KubeletError {
    /// No process of that name.
    #[error("no kubelet found under {}; name its cgroup with --kubelet-cgroup", .0.display())]
    NotFound(PathBuf),
    /// cgroup v2 is not there.
    #[error("cgroup v2 is not mounted; mount it: mount -t cgroup2 none /sys/fs/cgroup/unified")]
    NoCgroup2,
}

/// Directory of the cgroup that the kubelet runs in.
pub fn cgroup(proc: &Path) -> Result<PathBuf, KubeletError> {
    let mount = mount()?;
    let not_found = || KubeletError::NotFound(proc.to_owned());
    let entries = fs::read_dir(proc).map_err(|_| not_found())?;
    entries
        .flatten()
        .filter(|entry| is_kubelet(&entry.path()))
        .find_map(|entry| v2_path(&fs::read_to_string(entry.path().join("cgroup")).ok()?))
        .map(|path| mount.join(path.trim_start_matches('/')))
        .ok_or_else(not_found)
}

/// Root of the unified hierarchy.
fn mount() -> Result<PathBuf, KubeletError> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mount_point(&mountinfo).ok_or(KubeletError::NoCgroup2)
}

fn is_kubelet(process: &Path) -> bool {
    fs::read_to_string(process.join("comm")).is_ok_and(|name| NAMES.contains(&name.trim_end()))
}

/// The path of the unified hierarchy; on a hybrid machine the other lines are of other mounts.
fn v2_path(cgroups: &str) -> Option<String> {
    cgroups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// Where cgroup v2 is mounted: at `/sys/fs/cgroup`, or below it on a hybrid machine.
fn mount_point(mountinfo: &str) -> Option<PathBuf> {
    let line = mountinfo.lines().find(|line| line.contains(" - cgroup2 "))?;
    line.split(' ').nth(4).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unified_hierarchy_is_found() {
        let hybrid = "30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                      42 30 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(hybrid), Some("/sys/fs/cgroup/unified".into()));
        let unified = "25 20 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(unified), Some("/sys/fs/cgroup".into()));
        assert_eq!(mount_point("30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"), None);
        let lines = "9:name=systemd:/\n0::/system.slice/kubelet.service\n";
        assert_eq!(v2_path(lines).as_deref(), Some("/system.slice/kubelet.service"));
        assert_eq!(v2_path("9:name=systemd:/\n"), None);
    }
}
