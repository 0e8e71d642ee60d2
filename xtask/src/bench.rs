//! The measurements: built here with optimisation, made by a program of the tests' package.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result, anyhow};

use crate::{
    ebpf, packages,
    run::{self, check, step, toolchain},
};

/// Builds everything that is measured and becomes the measuring program; returns only if that fails.
///
/// # Errors
/// When not root, a program is missing, or something does not build.
pub fn run(args: &[String]) -> Result<()> {
    run::need_root("bench")?;
    packages::ensure(packages::BENCH)?;
    ebpf::build()?;
    step("building the programs, optimised", || {
        check(toolchain("cargo").args(["build", "--release", "--bins"]).args(run::ROOT_TESTS))
    })?;
    let dir = run::target_dir().join("release");
    let bench = dir.join("weir-bench");
    let mut command = Command::new(&bench);
    command.args(args).env("WEIR_BIN", dir.join("weir")).env("WEIR_GEAR", dir.join("weir-gear"));
    // Instead of waiting for it: what it needs of the machine is its own, and its exit status is ours.
    Err(anyhow!(command.exec())).with_context(|| format!("cannot run {}", bench.display()))
}
