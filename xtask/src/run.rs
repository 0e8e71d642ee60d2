//! Running other programs: where, with which environment, and what the user sees of it.

use std::{
    env,
    ffi::OsStr,
    fs, iter,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail};

/// The workspace's directory.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a member of the workspace")
}

/// Where all results and tools go: always `target/` of the workspace, whatever `CARGO_TARGET_DIR`
/// says, so that one look finds them and removing one directory removes them.
pub fn target_dir() -> PathBuf {
    workspace().join("target")
}

/// The compiler release `rust-toolchain.toml` pins.
pub fn pinned_toolchain() -> &'static str {
    include_str!("../../rust-toolchain.toml")
        .lines()
        .find_map(|line| line.strip_prefix("channel = \"")?.strip_suffix('"'))
        .expect("rust-toolchain.toml has a line `channel = \"…\"`")
}

/// Path of a program that `cargo build` makes.
pub fn program(name: &str) -> PathBuf {
    target_dir().join("debug").join(name)
}

/// Switches on the tests that need root. The same everywhere: with and without are two builds of the test gear.
pub const ROOT_TESTS: [&str; 2] = ["--features", "weir-tests/root"];

/// Tells a command where the programs are that tests and demo run.
pub fn name_programs(command: &mut Command) -> &mut Command {
    command
        .env("WEIR_BIN", program("weir"))
        .env("WEIR_CNI_BIN", program("weir-cni"))
        .env("WEIR_GEAR", program("weir-gear"))
}

/// A command of the pinned toolchain (`cargo`, `rustc`), to run in the workspace.
///
/// The cargo that runs this xtask exports its own idea of the toolchain and facts about the xtask
/// package. The former must not decide what the inner one uses; the latter make build scripts that
/// watch them (ring's) run again whenever a plain `cargo build` follows.
pub fn toolchain(program: &str) -> Command {
    const EXACT: [&str; 5] = ["CARGO", "CARGO_BUILD_TARGET", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"];
    let mut command = Command::new("rustup");
    command.args(["run", pinned_toolchain(), program]).current_dir(workspace());
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if EXACT.contains(&&*text) || text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command.env("CARGO_TARGET_DIR", target_dir());
    command
}

/// Removes settings a user may have for builds of the host: none of them fits a build of the BPF
/// programs or of their linker, and the result must not depend on them.
pub fn without_host_settings(command: &mut Command) -> &mut Command {
    const EXACT: [&str; 4] =
        ["CARGO_ENCODED_RUSTFLAGS", "RUSTC_WORKSPACE_WRAPPER", "RUSTC_WRAPPER", "RUSTFLAGS"];
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if EXACT.contains(&&*text) || text.starts_with("CARGO_BUILD_") || text.starts_with("CARGO_PROFILE_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Fails unless root runs this.
pub fn need_root(subcommand: &str) -> Result<()> {
    let process = fs::metadata("/proc/self").context("cannot read /proc/self")?;
    if process.uid() != 0 {
        bail!(
            "`cargo xtask {subcommand}` makes network namespaces and loads eBPF programs, which takes root: \
             run `sudo -E env PATH=\"$PATH\" cargo xtask {subcommand}`"
        );
    }
    Ok(())
}

/// Runs a command to its end; an error names the command and how it ended.
pub fn check(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", line(command));
    }
    Ok(())
}

/// Runs a command to its end and returns what it printed, without the white space around it.
/// What it says on stderr is part of the error if it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let out = command.output().with_context(|| format!("cannot run `{}`", line(command)))?;
    if !out.status.success() {
        let said = String::from_utf8_lossy(&out.stderr);
        bail!("`{}` failed: {}: {}", line(command), out.status, said.trim());
    }
    let text = String::from_utf8(out.stdout).with_context(|| format!("output of `{}`", line(command)))?;
    Ok(text.trim().to_owned())
}

/// Does something that may take long: says what before, and how long it took after.
pub fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("==> {what}");
    let start = Instant::now();
    let result = work();
    let outcome = if result.is_ok() { "took" } else { "failed after" };
    eprintln!("    {what}: {outcome} {:.1} s", start.elapsed().as_secs_f64());
    result
}

/// A command as one would type it.
pub fn line(command: &Command) -> String {
    let words = iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// The path of a program in `PATH`.
pub fn find_program(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}
