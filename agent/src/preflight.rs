//! What must hold on a machine before weir can do anything there. Each thing that does not is one line with the
//! remedy.

use std::{fs, path::Path};

use crate::cli::Paths;

/// The machine or the process is not fit.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{what}; {remedy}")]
pub struct Unfit {
    what: String,
    remedy: &'static str,
}

/// Capabilities that are needed, by their numbers in `linux/capability.h`, and what for.
const CAPABILITIES: [(u32, &str, &str); 4] = [
    (12, "CAP_NET_ADMIN", "rules, routes, filters and marks"),
    (19, "CAP_SYS_PTRACE", "finding the namespaces of pods"),
    (21, "CAP_SYS_ADMIN", "entering the namespaces of pods"),
    (39, "CAP_BPF", "loading programs"),
];

/// Oldest kernel that is supported: major, minor.
const KERNEL: (u32, u32) = (5, 15);

/// Checks capabilities, kernel and mounts.
pub fn check(paths: &Paths) -> Result<(), Unfit> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    capabilities(&status)?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    kernel(release.trim())?;
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Err(Unfit {
            what: "the kernel has no BTF (/sys/kernel/btf/vmlinux)".into(),
            remedy: "use a kernel built with CONFIG_DEBUG_INFO_BTF=y",
        });
    }
    bpffs(&paths.bpffs)
}

fn capabilities(status: &str) -> Result<(), Unfit> {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    let missing: Vec<String> = CAPABILITIES
        .iter()
        .filter(|(bit, ..)| effective & 1 << bit == 0)
        .map(|(_, name, why)| format!("{name} ({why})"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Unfit {
        what: format!("missing {}", missing.join(", ")),
        remedy: "run as root, or add them to securityContext.capabilities",
    })
}

fn kernel(release: &str) -> Result<(), Unfit> {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= KERNEL {
        return Ok(());
    }
    Err(Unfit {
        what: format!("Linux {release} is too old"),
        remedy: "6.1 or newer is supported (5.15 by intent)",
    })
}

fn bpffs(root: &Path) -> Result<(), Unfit> {
    let existing = root.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let is_bpffs = nix::sys::statfs::statfs(existing)
        .is_ok_and(|stat| stat.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC);
    if is_bpffs {
        return Ok(());
    }
    Err(Unfit {
        what: format!("{} is not on bpffs", root.display()),
        remedy: "mount one: mount -t bpf bpf /sys/fs/bpf",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(capabilities("CapEff:\t000001ffffffffff\n"), Ok(()));
        let none = capabilities("CapEff:\t0000000000000000\n").unwrap_err().to_string();
        for (_, name, _) in CAPABILITIES {
            assert!(none.contains(name), "{none}");
        }
        let one = capabilities(&format!("CapEff:\t{:016x}\n", !(1_u64 << 39))).unwrap_err().to_string();
        assert!(one.contains("CAP_BPF") && !one.contains("CAP_NET_ADMIN"), "{one}");
        assert!(capabilities("").is_err());
    }

    #[test]
    fn old_kernels_are_refused() {
        for (release, fit) in [
            ("6.18.44-fc", true),
            ("6.1.0-13-cloud-amd64", true),
            ("5.15.0", true),
            ("5.10.0-26", false),
            ("4.19.0", false),
            ("", false),
        ] {
            assert_eq!(kernel(release).is_ok(), fit, "{release}");
        }
    }
}
