//! The programs as they are shipped: linked with everything they need, so that they run on any node, whatever its C
//! library.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    ebpf, packages,
    run::{self, check, output, step, toolchain},
};

/// The plugin is copied to every node and read for every pod.
const PLUGIN_LIMIT: u64 = 4 << 20;
/// What its start and end may take, without the agent's share.
const PLUGIN_TIME: Duration = Duration::from_millis(5);
/// Starts whose median is told.
const STARTS: usize = 101;

/// Builds `weir` and `weir-cni` and returns the directory they are in.
///
/// # Errors
/// When the compiler lacks something that cannot be had, or what comes out is not what is promised.
pub fn build() -> Result<PathBuf> {
    ebpf::build()?;
    let dir = compile(&["weir", "weir-cni"])?;
    look_at_agent(&dir.join("weir"))?;
    look_at_plugin(&dir.join("weir-cni"))?;
    Ok(dir)
}

fn compile(programs: &[&str]) -> Result<PathBuf> {
    // ring's C parts are the only ones there are.
    packages::ensure(packages::STATIC)?;
    let target = format!("{}-unknown-linux-musl", env::consts::ARCH);
    let sysroot = PathBuf::from(output(toolchain("rustc").args(["--print", "sysroot"]))?);
    if !sysroot.join("lib/rustlib").join(&target).is_dir() {
        let add = ["target", "add", &target, "--toolchain", run::pinned_toolchain()];
        step(&format!("getting the library for {target}"), || output(Command::new("rustup").args(add)))?;
    }
    let mut cargo = toolchain("cargo");
    cargo.args(["build", "--package", "weir-agent", "--profile", "static", "--target", &target]);
    for program in programs {
        cargo.args(["--bin", program]);
    }
    cargo.env(format!("CC_{}", target.replace('-', "_")), "musl-gcc");
    step(&format!("building {} static", programs.join(" and ")), || check(&mut cargo))?;
    Ok(run::target_dir().join(target).join("static"))
}

fn look_at_agent(program: &Path) -> Result<()> {
    refuse_dynamic(program)?;
    let version = output(Command::new(program).arg("--version"))?;
    println!("{version}: {} kB", fs::metadata(program)?.len() / 1024);
    Ok(())
}

fn look_at_plugin(program: &Path) -> Result<()> {
    refuse_dynamic(program)?;
    let size = fs::metadata(program)?.len();
    let (median, said) = start_to_end(program)?;
    println!("weir-cni: {} kB; {median:.1?} from start to end, the median of {STARTS}", size / 1024);
    if size >= PLUGIN_LIMIT {
        bail!("{} has {size} bytes, {PLUGIN_LIMIT} are too many", program.display());
    }
    if !said.contains("supportedVersions") {
        bail!("{} says {said:?} for VERSION", program.display());
    }
    // Times are told and not gated on, but for what no load of the machine explains.
    if median > 20 * PLUGIN_TIME {
        bail!("{} takes {median:.1?}, {PLUGIN_TIME:?} are promised", program.display());
    }
    Ok(())
}

/// How long VERSION takes, and what is said. Nothing else needs neither agent nor pod.
fn start_to_end(program: &Path) -> Result<(Duration, String)> {
    let mut took = Vec::new();
    let mut said = String::new();
    for _ in 0..STARTS {
        let mut command = Command::new(program);
        command.env_clear().env("CNI_COMMAND", "VERSION").stdin(Stdio::null());
        let began = Instant::now();
        said = output(&mut command)?;
        took.push(began.elapsed());
    }
    took.sort_unstable();
    Ok((took[STARTS / 2], said))
}

/// A program that names an interpreter needs the libraries of the machine it was built on.
fn refuse_dynamic(program: &Path) -> Result<()> {
    let elf = fs::read(program).with_context(|| program.display().to_string())?;
    if has_interpreter(&elf).with_context(|| format!("{} is no ELF file of 64 bits", program.display()))? {
        bail!("{} is not static", program.display());
    }
    Ok(())
}

/// Whether one of the program headers is PT_INTERP; `None` for what is no such file.
fn has_interpreter(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    if elf.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let number = |at: usize, length: usize| -> Option<usize> {
        let mut bytes = [0; 8];
        bytes[..length].copy_from_slice(elf.get(at..at + length)?);
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        if number(start + index * size, 4)? == PT_INTERP as usize {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_is_told_from_others() {
        // Tests are linked to the system's C library.
        let own = fs::read(env::current_exe().unwrap()).unwrap();
        assert_eq!(has_interpreter(&own), Some(true));
        assert_eq!(has_interpreter(b"#!/bin/sh"), None);
        assert_eq!(has_interpreter(&own[..64]), None);
    }
}
