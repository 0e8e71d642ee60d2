//! What building for BPF takes beyond the pinned toolchain: library source for `core`, and a linker.
//!
//! Both are looked for first and fetched into `target/bpf-tools` only if missing.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow, bail};

use crate::{
    debian,
    run::{self, check, output, step, toolchain, without_host_settings},
};

/// The last release line that borrows the LLVM of the compiler; later ones want an LLVM of their own.
/// Its default features expect LLVM 22, which is the pinned compiler's.
const BPF_LINKER: &str = "0.10.4";

/// Where a sysroot has the library source.
pub const LIBRARY: &str = "lib/rustlib/src/rust/library";

/// Paths of everything the BPF build uses.
pub struct Tools {
    /// Directory of the pinned toolchain.
    pub toolchain: PathBuf,
    /// A sysroot with library source: the toolchain's, or one of ours that has no more than the build
    /// takes. Cargo derives symbol names from the place of `core` in the sysroot; were the source just
    /// anywhere, the object would depend on the checkout's path.
    pub sysroot: PathBuf,
    /// The linker.
    pub bpf_linker: PathBuf,
    /// A directory with nothing but links to the compiler's LLVM, for `LD_LIBRARY_PATH`.
    pub llvm: PathBuf,
    /// The program that strips debug information, part of the toolchain or the system's.
    pub objcopy: PathBuf,
}

impl Tools {
    /// Finds all tools and fetches those that are missing.
    ///
    /// # Errors
    /// When something is missing and cannot be had; the message says what to run by hand.
    pub fn get() -> Result<Self> {
        let toolchain = PathBuf::from(
            output(toolchain("rustc").args(["--print", "sysroot"]))
                .with_context(|| format!("weir needs rustup with toolchain {}", run::pinned_toolchain()))?,
        );
        let dir = run::target_dir().join("bpf-tools");
        let objcopy = objcopy(&toolchain)?;
        let sysroot = sysroot(&toolchain, &dir)?;
        let linker_root = dir.join(format!("bpf-linker-{BPF_LINKER}"));
        let bpf_linker = bpf_linker(&linker_root)?;
        let llvm = link_llvm(&toolchain, &linker_root.join("llvm"))?;
        Ok(Self { toolchain, sysroot, bpf_linker, llvm, objcopy })
    }
}

/// The toolchain's name of this machine.
fn host() -> String {
    format!("{}-unknown-linux-gnu", env::consts::ARCH)
}

fn has_library(root: &Path) -> bool {
    root.join(LIBRARY).join("core/src/lib.rs").is_file()
}

/// Debian's copy comes before `rustup component add`, which changes the user's toolchain.
fn sysroot(toolchain: &Path, dir: &Path) -> Result<PathBuf> {
    if has_library(toolchain) {
        return Ok(toolchain.to_owned());
    }
    let version = run::pinned_toolchain();
    let own = dir.join(format!("sysroot-{version}"));
    let library = own.join(LIBRARY);
    let complete_own = || {
        // Build scripts and procedural macros are made for the host, with its ready-made libraries.
        let host = Path::new("lib/rustlib").join(host());
        link(&toolchain.join(&host), &own.join(&host)).map(|()| own.clone())
    };
    if has_library(&own) {
        return complete_own();
    }
    let from_debian = step(&format!("getting the library source of Rust {version} from Debian"), || {
        debian::unpack_rust_src(version, dir, &library)
    });
    let why_not_debian = match from_debian {
        Ok(()) if has_library(&own) => return complete_own(),
        Ok(()) => "the package has no core/src/lib.rs".to_owned(),
        Err(error) => format!("{error:#}"),
    };
    let add = ["component", "add", "rust-src", "--toolchain", version];
    let from_rustup = step(&format!("getting the library source of Rust {version} from rustup"), || {
        output(Command::new("rustup").args(add))
    });
    let why_not_rustup = match from_rustup {
        Ok(_) if has_library(toolchain) => return Ok(toolchain.to_owned()),
        Ok(_) => "the component has no core/src/lib.rs".to_owned(),
        Err(error) => format!("{error:#}"),
    };
    bail!(
        "no library source of Rust {version}, which building for BPF needs\n\
         \x20 in the toolchain: {component} does not exist\n\
         \x20 from Debian: {why_not_debian}\n\
         \x20 from rustup: {why_not_rustup}\n\
         Get it by one of these, then repeat:\n\
         \x20 rustup {add}\n\
         \x20 apt-get download 'rust-src={version}*' && dpkg-deb -x rust-src_*.deb src && mkdir -p {parent} && \
         mv src/usr/src/rustc-*/library {parent}   (if apt's sources have Debian {suite})",
        component = toolchain.join(LIBRARY).display(),
        add = add.join(" "),
        parent = library.parent().unwrap_or(&library).display(),
        suite = debian::SUITE,
    )
}

fn bpf_linker(root: &Path) -> Result<PathBuf> {
    let program = root.join("bin/bpf-linker");
    if program.is_file() {
        return Ok(program);
    }
    // A build directory of our own: an interrupted build leaves nothing in /tmp and goes on from there.
    let build = root.join("build");
    let mut install = toolchain("cargo");
    install.args(["install", "bpf-linker", "--locked", "--version", BPF_LINKER, "--root"]).arg(root);
    let by_hand = run::line(&install);
    without_host_settings(&mut install).arg("--target-dir").arg(&build);
    step(&format!("building bpf-linker {BPF_LINKER} (about a minute)"), || check(&mut install))
        .map_err(|error| anyhow!("{error:#}\nGet bpf-linker by this command, then repeat:\n  {by_hand}"))?;
    // Only disk space is lost if this fails.
    let _ = fs::remove_dir_all(&build);
    Ok(program)
}

/// bpf-linker takes the first `libLLVM*` on its search path: give it one with the compiler's alone.
fn link_llvm(toolchain: &Path, dir: &Path) -> Result<PathBuf> {
    let lib = toolchain.join("lib");
    let mut found = false;
    for entry in fs::read_dir(&lib).with_context(|| format!("cannot read {}", lib.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("libLLVM") {
            link(&entry.path(), &dir.join(entry.file_name()))?;
            found = true;
        }
    }
    if !found {
        bail!("{} has no libLLVM: bpf-linker needs a toolchain installed by rustup", lib.display());
    }
    Ok(dir.to_owned())
}

/// Makes a symbolic link, or corrects one into a toolchain that has moved.
fn link(to: &Path, at: &Path) -> Result<()> {
    if fs::read_link(at).is_ok_and(|now| now == to) {
        return Ok(());
    }
    if let Some(parent) = at.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    // It may not exist, and if it stays the next line says so.
    let _ = fs::remove_file(at);
    symlink(to, at).with_context(|| format!("cannot create {}", at.display()))
}

fn objcopy(toolchain: &Path) -> Result<PathBuf> {
    let own = toolchain.join("lib/rustlib").join(host()).join("bin/rust-objcopy");
    if own.is_file() {
        return Ok(own);
    }
    run::find_program("llvm-objcopy").with_context(|| {
        format!(
            "nothing to strip the object with: neither {} nor llvm-objcopy in PATH; \
             run `apt-get install llvm`, then repeat",
            own.display()
        )
    })
}
