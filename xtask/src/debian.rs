//! Debian's `rust-src`: the library source of the compiler, for machines whose rustup cannot get it.

use std::{
    fs,
    path::Path,
    process::{self, Command},
};

use anyhow::{Context, Result, bail, ensure};

use crate::run::{check, output};

/// The suite that has the pinned compiler's version.
pub const SUITE: &str = "trixie-backports";

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Unpacks the directory `library` of exactly this version to `into`, by way of `scratch`; nothing is
/// installed.
///
/// The mirror is the one apt is configured with. The suite is usually not among apt's sources, so apt
/// works on a private state and verifies signature and checksum there as always.
pub fn unpack_rust_src(version: &str, scratch: &Path, into: &Path) -> Result<()> {
    let work = scratch.join(format!("debian-{}", process::id()));
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let result = unpack(version, &work, into);
    // Only disk space is lost if this fails.
    let _ = fs::remove_dir_all(&work);
    result
}

fn unpack(version: &str, work: &Path, into: &Path) -> Result<()> {
    let mirror = mirror()?;
    fs::create_dir_all(work.join("lists/partial"))?;
    fs::create_dir_all(work.join("cache/archives/partial"))?;
    let source = format!("deb [signed-by={KEYRING}] {mirror} {SUITE} main\n");
    fs::write(work.join("sources.list"), source)?;
    fs::write(work.join("apt.conf"), configuration(work))?;

    output(private("apt-get", work).arg("update"))?;
    let listed = output(private("apt-cache", work).args(["madison", "rust-src"]))?;
    let exact = listed
        .lines()
        .filter_map(|line| line.split('|').nth(1))
        .map(str::trim)
        .find(|have| have.strip_prefix(version).is_some_and(|rest| rest.starts_with(['+', '-'])))
        .with_context(|| format!("{SUITE} has no rust-src {version}"))?;
    output(private("apt-get", work).arg("download").arg(format!("rust-src={exact}")))?;

    let package = only(work, "rust-src_")?;
    let content = work.join("content");
    check(Command::new("dpkg-deb").arg("-x").arg(package).arg(&content))?;
    let library = only(&content.join("usr/src"), "rustc-")?.join("library");
    if let Some(parent) = into.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    // Renamed into place when complete, so that an interrupted run leaves no half of it.
    fs::rename(&library, into).with_context(|| format!("{} cannot be moved", library.display()))
}

/// The repository this system's own release comes from, out of apt's sources.
fn mirror() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    let field = |name: &str| {
        let value = release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_default().trim_matches('"').to_owned()
    };
    ensure!(field("ID") == "debian", "this system is {}, not Debian", field("PRETTY_NAME"));
    let codename = field("VERSION_CODENAME");
    let targets = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(RELEASE) $(REPO_URI)",
        "Created-By: Packages",
        "Component: main",
    ]))?;
    let mirror = targets.lines().filter_map(|line| line.split_once(' ')).find_map(|(name, uri)| {
        let own = [codename.as_str(), "stable", "testing", "unstable", "sid"].contains(&name);
        own.then(|| uri.to_owned())
    });
    match mirror {
        Some(uri) => Ok(uri),
        None => bail!("apt has no source of Debian {codename}"),
    }
}

/// apt with the state below `work`.
fn private(program: &str, work: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(work).arg("-qq").arg("-c").arg(work.join("apt.conf"));
    command
}

/// What differs from the system's configuration.
fn configuration(work: &Path) -> String {
    format!(
        "Dir::Etc::SourceList \"{work}/sources.list\";\n\
         Dir::Etc::SourceParts \"/dev/null\";\n\
         Dir::State::Lists \"{work}/lists\";\n\
         Dir::Cache \"{work}/cache\";\n\
         Acquire::Languages \"none\";\n\
         // Without this a mirror that does not answer is no error.\n\
         APT::Update::Error-Mode \"any\";\n\
         // Root's apt hands downloads to a user who may not be able to write here.\n\
         APT::Sandbox::User \"root\";\n",
        work = work.display()
    )
}

/// The one entry of a directory whose name starts so.
fn only(dir: &Path, start: &str) -> Result<std::path::PathBuf> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    entries
        .filter_map(Result::ok)
        .find(|entry| entry.file_name().to_string_lossy().starts_with(start))
        .map(|entry| entry.path())
        .with_context(|| format!("no {start}* in {}", dir.display()))
}
