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

/// Paths of everything the BPF build uses.
pub struct Tools {
    /// Directory of the pinned toolchain.
    pub sysroot: PathBuf,
    /// Directory `library` of the compiler's source.
    pub rust_src: PathBuf,
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
        let sysroot = PathBuf::from(
            output(toolchain("rustc").args(["--print", "sysroot"]))
                .with_context(|| format!("weir needs rustup with toolchain {}", run::pinned_toolchain()))?,
        );
        let dir = run::target_dir().join("bpf-tools");
        let objcopy = objcopy(&sysroot)?;
        let rust_src = rust_src(&sysroot, &dir)?;
        let linker_root = dir.join(format!("bpf-linker-{BPF_LINKER}"));
        let bpf_linker = bpf_linker(&linker_root)?;
        let llvm = link_llvm(&sysroot, &linker_root.join("llvm"))?;
        Ok(Self { sysroot, rust_src, bpf_linker, llvm, objcopy })
    }
}

fn is_library(dir: &Path) -> bool {
    dir.join("core/src/lib.rs").is_file()
}

/// Debian's copy comes before `rustup component add`, which changes the user's toolchain.
fn rust_src(sysroot: &Path, dir: &Path) -> Result<PathBuf> {
    let version = run::pinned_toolchain();
    let component = sysroot.join("lib/rustlib/src/rust/library");
    let unpacked = dir.join(format!("rust-src-{version}"));
    if let Some(found) = [&component, &unpacked].into_iter().find(|dir| is_library(dir)) {
        return Ok(found.clone());
    }
    let from_debian = step(&format!("getting the library source of Rust {version} from Debian"), || {
        debian::unpack_rust_src(version, &unpacked)
    });
    let why_not_debian = match from_debian {
        Ok(()) if is_library(&unpacked) => return Ok(unpacked),
        Ok(()) => "the package has no core/src/lib.rs".to_owned(),
        Err(error) => format!("{error:#}"),
    };
    let add = ["component", "add", "rust-src", "--toolchain", version];
    let from_rustup = step(&format!("getting the library source of Rust {version} from rustup"), || {
        output(Command::new("rustup").args(add))
    });
    let why_not_rustup = match from_rustup {
        Ok(_) if is_library(&component) => return Ok(component),
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
         \x20 (Debian trixie-backports among apt's sources) apt-get download 'rust-src={version}*' && dpkg-deb -x rust-src_*.deb src && \
         mkdir -p {dir} && mv src/usr/src/rustc-*/library {unpacked}",
        component = component.display(),
        add = add.join(" "),
        dir = dir.display(),
        unpacked = unpacked.display(),
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
fn link_llvm(sysroot: &Path, dir: &Path) -> Result<PathBuf> {
    let lib = sysroot.join("lib");
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut found = false;
    for entry in fs::read_dir(&lib).with_context(|| format!("cannot read {}", lib.display()))? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with("libLLVM") {
            continue;
        }
        found = true;
        let link = dir.join(entry.file_name());
        if fs::read_link(&link).is_ok_and(|target| target == entry.path()) {
            continue;
        }
        // A link into a toolchain that has moved.
        let _ = fs::remove_file(&link);
        symlink(entry.path(), &link).with_context(|| format!("cannot create {}", link.display()))?;
    }
    if !found {
        bail!("{} has no libLLVM: bpf-linker needs a toolchain installed by rustup", lib.display());
    }
    Ok(dir.to_owned())
}

fn objcopy(sysroot: &Path) -> Result<PathBuf> {
    let host = format!("lib/rustlib/{}-unknown-linux-gnu/bin/rust-objcopy", env::consts::ARCH);
    let own = sysroot.join(host);
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
