//! Debian packages whose programs the tests and the demo run.

use std::process::Command;

use anyhow::{Result, bail};

use crate::run::{find_program, output, step};

/// A program, by name or by path, and the package that has it.
pub type Needed = (&'static str, &'static str);

/// What the demo runs.
pub const DEMO: &[Needed] = &[("ip", "iproute2")];

/// What the measurements run.
pub const BENCH: &[Needed] = &[("ip", "iproute2"), ("iptables-save", "iptables"), ("nft", "nftables")];

/// What builds the static programs.
pub const STATIC: &[Needed] = &[("musl-gcc", "musl-tools")];

/// What the integration tests run.
pub const TESTS: &[Needed] = &[
    ("ip", "iproute2"),
    ("iptables-save", "iptables"),
    ("nft", "nftables"),
    ("conntrack", "conntrack"),
    ("bpftool", "bpftool"),
    ("sysctl", "procps"),
    ("/usr/lib/cni/ptp", "containernetworking-plugins"),
];

/// Installs the packages of programs that are not in `PATH`; does nothing when all are there.
///
/// # Errors
/// When a program is still missing afterwards; the message names it and its package.
pub fn ensure(needed: &[Needed]) -> Result<()> {
    let missing = missing(needed);
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    let by_hand = format!("apt-get install {}", packages.join(" "));
    if find_program("apt-get").is_none() {
        bail!("missing programs, and no apt-get to get them with: {}", list(&missing));
    }
    step(&format!("installing {}", packages.join(" ")), || {
        output(apt_get().arg("update"))?;
        output(apt_get().args(["install", "--yes", "--no-install-recommends"]).args(&packages))
    })
    .map_err(|error| error.context(format!("run `{by_hand}`, then repeat")))?;
    let missing = self::missing(needed);
    if !missing.is_empty() {
        bail!("still not in PATH after `{by_hand}`: {}; has PATH /usr/sbin?", list(&missing));
    }
    Ok(())
}

fn missing(needed: &[Needed]) -> Vec<Needed> {
    needed.iter().copied().filter(|(program, _)| find_program(program).is_none()).collect()
}

fn list(missing: &[Needed]) -> String {
    let each = missing.iter().map(|(program, package)| format!("{program} (package {package})"));
    each.collect::<Vec<_>>().join(", ")
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.arg("-qq").env("DEBIAN_FRONTEND", "noninteractive");
    command
}
