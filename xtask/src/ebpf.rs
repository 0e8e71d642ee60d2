//! The eBPF objects: compiled with the pinned stable compiler, the same bytes wherever the checkout is.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    run::{self, check, step, toolchain, without_host_settings},
    tools::{LIBRARY, Tools},
};

const TARGET: &str = "bpfel-unknown-none";
/// The binaries of `weir-ebpf`: one object for a pod, one for a node.
const OBJECTS: [&str; 2] = ["weir-pod", "weir-node"];

/// Builds the objects and returns the directory they are in, `target/bpf`: `weir-pod.bpf.o`, `weir-node.bpf.o`.
///
/// # Errors
/// When a tool is missing and cannot be had, or the programs do not compile.
pub fn build() -> Result<PathBuf> {
    let tools = Tools::get()?;
    let dir = build_dir();
    step("building the eBPF programs", || {
        check(&mut cargo(&tools, "build")?)?;
        for object in OBJECTS {
            let from = dir.join(TARGET).join("release").join(object);
            strip(&tools, &from, &dir.join(object).with_extension("bpf.o"))?;
        }
        Ok(dir)
    })
}

/// Lints the programs, warnings denied.
///
/// # Errors
/// When there are warnings, or as [`build`].
pub fn clippy() -> Result<()> {
    step("linting the eBPF programs", clippy_quietly)
}

/// [`clippy`] without a headline.
///
/// # Errors
/// As [`clippy`].
pub fn clippy_quietly() -> Result<()> {
    check(cargo(&Tools::get()?, "clippy")?.args(["--", "-D", "warnings"]))
}

fn build_dir() -> PathBuf {
    run::target_dir().join("bpf")
}

fn cargo(tools: &Tools, subcommand: &str) -> Result<Command> {
    let mut command = toolchain("cargo");
    without_host_settings(&mut command)
        .args([subcommand, "--package", "weir-ebpf", "--bins", "--release", "--target", TARGET])
        .args(["-Zbuild-std=core", "--target-dir"])
        .arg(build_dir())
        // compiler_builtins' build script is made for the host, and its name goes into the names of symbols.
        .args(["-Zhost-config", "-Ztarget-applies-to-host", "--config", "target-applies-to-host=false"])
        .args(["--config", &format!("host.rustflags=[\"--sysroot={}\"]", tools.sysroot.display())])
        // The pinned stable compiler takes -Z options, so no second, moving toolchain is needed.
        .env("RUSTC_BOOTSTRAP", "1")
        // The only way to tell -Zbuild-std of library source outside the toolchain.
        .env("__CARGO_TESTS_ONLY_SRC_ROOT", tools.sysroot.join(LIBRARY))
        .env("CARGO_ENCODED_RUSTFLAGS", rustflags(tools)?.join("\x1f"))
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &tools.bpf_linker)
        .env("LD_LIBRARY_PATH", &tools.llvm);
    Ok(command)
}

fn rustflags(tools: &Tools) -> Result<Vec<String>> {
    let cargo_home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".cargo")))
        .context("neither CARGO_HOME nor HOME is set")?;
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    Ok(vec![
        // aya reads the registers of this architecture's calling convention.
        format!("--cfg=bpf_target_arch=\"{}\"", env::consts::ARCH),
        // Atomics that return a value (Linux 5.12) and 32-bit registers.
        "-Ctarget-cpu=v3".to_owned(),
        // BTF is made of debug information, of `core` and aya as well.
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
        format!("--sysroot={}", tools.sysroot.display()),
        // Source paths end up in the object. The last prefix that matches wins. Cargo names files below
        // the workspace, such as our own sysroot's, relative to it.
        remap(run::workspace(), "/weir"),
        remap(&cargo_home, "/cargo"),
        remap(&tools.toolchain, "/rust"),
        remap(tools.sysroot.strip_prefix(run::workspace()).unwrap_or(&tools.sysroot), "/rust"),
    ])
}

/// Strips the debug sections: the kernel and the loader read BTF, which stays.
fn strip(tools: &Tools, from: &Path, to: &Path) -> Result<()> {
    let stripped = to.with_extension("o.new");
    let mut objcopy = Command::new(&tools.objcopy);
    objcopy.arg("--strip-debug").arg(from).arg(&stripped).env("LD_LIBRARY_PATH", &tools.llvm);
    check(&mut objcopy)?;
    // The agent embeds the object: a new time stamp on the same bytes would build the agent again.
    let new = fs::read(&stripped).with_context(|| format!("cannot read {}", stripped.display()))?;
    if fs::read(to).is_ok_and(|old| old == new) {
        return fs::remove_file(&stripped).with_context(|| format!("cannot remove {}", stripped.display()));
    }
    fs::rename(&stripped, to).with_context(|| format!("cannot replace {}", to.display()))
}
