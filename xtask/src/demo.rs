//! The demo: built here, shown by a program of the tests' package.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result, anyhow};

use crate::{
    ebpf, packages,
    run::{self, check, step, toolchain},
};

/// Builds everything the demo takes and becomes the demo; returns only if that fails.
///
/// # Errors
/// When not root, a program is missing, or something does not build.
pub fn run() -> Result<()> {
    run::need_root("demo")?;
    packages::ensure(packages::DEMO)?;
    ebpf::build()?;
    step("building the programs", || {
        check(toolchain("cargo").args(["build", "--bins"]).args(run::ROOT_TESTS))
    })?;
    let demo = run::program("weir-demo");
    // Instead of waiting for it: so Ctrl-C reaches the demo alone, which cleans up, and its exit status is ours.
    let error = run::name_programs(&mut Command::new(&demo)).exec();
    Err(anyhow!(error)).with_context(|| format!("cannot run {}", demo.display()))
}
