//! Puts the plugin on the node, and takes it away again: the binary first in, the configuration first out, so that no
//! runtime is ever told to run what is not there.
//!
//! [`plan`] looks and says what is to be done, [`Plan::carry_out`] does it; [`keep`] does both whenever something changes.

mod fight;
mod files;
pub mod keep;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use files::{Configuration, configurations, remove, replace, rewrite};
use thiserror::Error;

use crate::domain::cni::{
    conflist::{self, Edit, Invalid, TYPE},
    ordered::Json,
};

/// Name of a configuration of our own, where not told otherwise.
pub const OWN: &str = "00-weir.conflist";
const EXECUTABLE: u32 = 0o755;

/// Where things go.
#[derive(Clone, Debug)]
pub struct Places {
    /// Where runtimes look for plugins.
    pub bin_dir: PathBuf,
    /// Where they look for configurations.
    pub conf_dir: PathBuf,
    /// The configuration to be changed, where it is not the one that runtimes use.
    pub primary: Option<String>,
    /// Name of the configuration of our own.
    pub own: String,
}

/// How runtimes come to call the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// By an entry in the configuration that they use. Where one of our own is, that is kept.
    Chained,
    /// By a configuration of our own that has all that theirs has, and sorts first.
    OwnList,
    /// By a configuration of nothing but ours, which something else (Multus) names.
    Alone,
}

/// What keeps the plugin from being installed: one line that names the file.
#[derive(Debug, Error)]
pub enum InstallError {
    /// The file system refuses.
    #[error("cannot {action} {}: {source}{}", path.display(), remedy(source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What came of it.
        source: io::Error,
    },
    /// No runtime could be configured either.
    #[error("{} has no network configuration yet{seen}; install the cluster's network first", dir.display())]
    NoConfiguration {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with the files that are there.
        seen: String,
    },
    /// A configuration of our own that runtimes do not use.
    #[error("{first} sorts before {own}, so runtimes use that: give ours another name with --cni-own-name")]
    NotFirst {
        /// What they use.
        first: String,
        /// Ours.
        own: String,
    },
}

impl InstallError {
    /// Whether all that is missing is a network, which may come any time.
    pub fn is_early(&self) -> bool {
        matches!(self, Self::NoConfiguration { .. })
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            "; this platform keeps plugins elsewhere: see --cni-bin-dir and --cni-conf-dir"
        }
        io::ErrorKind::PermissionDenied => {
            "; run as root, with CAP_DAC_OVERRIDE where the directory is not root's"
        }
        _ => "",
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_owned();
    move |source| InstallError::Io { action, path, source }
}

/// What is not as it shall be.
#[derive(Debug)]
pub struct Plan {
    /// The configuration that has our entry, or will.
    pub file: PathBuf,
    binary: Option<(PathBuf, Vec<u8>)>,
    edit: Option<Rewrite>,
}

#[derive(Debug)]
struct Rewrite {
    text: String,
    like: Option<PathBuf>,
    /// What the new file stands for, and may go.
    replaces: Option<PathBuf>,
}

impl Plan {
    /// Is all as it shall be?
    pub fn is_empty(&self) -> bool {
        self.binary.is_none() && self.edit.is_none()
    }

    /// Is a configuration not as it shall be?
    pub fn edits(&self) -> bool {
        self.edit.is_some()
    }

    /// Does it.
    ///
    /// # Errors
    /// See [`InstallError`]; what was there before is there still.
    pub fn carry_out(self) -> Result<(), InstallError> {
        if let Some((target, content)) = self.binary {
            replace(&target, &content, EXECUTABLE, None)?;
        }
        if let Some(Rewrite { text, like, replaces }) = self.edit {
            rewrite(&self.file, like.as_deref(), &text)?;
            // Both would do until here: the old one sorts first, and is what was used so far.
            replaces.map_or(Ok(()), |old| remove(&old))?;
        }
        Ok(())
    }
}

/// What has to be done to have `binary` installed and `entry` in the configuration that runtimes use.
///
/// # Errors
/// See [`InstallError`].
pub fn plan(places: &Places, binary: &Path, entry: &Json, mode: Mode) -> Result<Plan, InstallError> {
    let new = fs::read(binary).map_err(failed("read", binary))?;
    let target = places.bin_dir.join(TYPE);
    let runs = |path: &Path| fs::metadata(path).is_ok_and(|it| it.permissions().mode() & 0o111 == 0o111);
    let there = fs::read(&target).is_ok_and(|old| old == new) && runs(&target);
    let binary = (!there).then_some((target, new));
    let found = configurations(&places.conf_dir)?;
    let own = found.iter().find(|file| file.name == places.own);
    let (file, edit) = match mode {
        Mode::Alone => alone(places, own, entry),
        Mode::Chained if own.is_none() => chained(places, &found, entry)?,
        Mode::Chained | Mode::OwnList => own_list(places, &found, own, entry)?,
    };
    Ok(Plan { file, binary, edit })
}

type Edited = (PathBuf, Option<Rewrite>);

fn alone(places: &Places, own: Option<&Configuration>, entry: &Json) -> Edited {
    let edit = match conflist::alone(entry, own.map(|own| own.text.as_str())) {
        Edit::Write(text) | Edit::Replace(_, text) => {
            Some(Rewrite { text, like: own.map(|own| own.path.clone()), replaces: None })
        }
        Edit::Nothing => None,
    };
    (places.conf_dir.join(&places.own), edit)
}

fn chained(places: &Places, found: &[Configuration], entry: &Json) -> Result<Edited, InstallError> {
    let (used, edit) = first(places, found, |file| conflist::insert(&file.name, &file.text, entry))?;
    let like = Some(used.path.clone());
    Ok(match edit {
        Edit::Nothing => (used.path.clone(), None),
        Edit::Write(text) => (used.path.clone(), Some(Rewrite { text, like, replaces: None })),
        Edit::Replace(name, text) => {
            (places.conf_dir.join(name), Some(Rewrite { text, replaces: like.clone(), like }))
        }
    })
}

fn own_list(
    places: &Places,
    found: &[Configuration],
    own: Option<&Configuration>,
    entry: &Json,
) -> Result<Edited, InstallError> {
    let path = places.conf_dir.join(&places.own);
    let now = own.map(|own| own.text.as_str());
    let others: Vec<Configuration> = found.iter().filter(|file| file.name != places.own).cloned().collect();
    let (used, edit) = match first(places, &others, |file| {
        conflist::beside(&file.name, &file.text, entry, now)
    }) {
        Ok(used) => used,
        // The network has taken its own away: pods are held by ours, which names what it had.
        Err(InstallError::NoConfiguration { .. }) if own.is_some_and(is_usable) => return Ok((path, None)),
        Err(error) => return Err(error),
    };
    if used.name < places.own && places.primary.is_none() {
        return Err(InstallError::NotFirst { first: used.name.clone(), own: places.own.clone() });
    }
    let edit = match edit {
        Edit::Write(text) | Edit::Replace(_, text) => {
            Some(Rewrite { text, like: Some(used.path.clone()), replaces: None })
        }
        Edit::Nothing => None,
    };
    Ok((path, edit))
}

fn is_usable(file: &Configuration) -> bool {
    conflist::remove(&file.name, &file.text).is_ok_and(|edit| edit != Edit::Nothing)
}

/// The first that a runtime would take, and what is made of it.
fn first<'a>(
    places: &Places,
    found: &'a [Configuration],
    edit: impl Fn(&Configuration) -> Result<Edit, Invalid>,
) -> Result<(&'a Configuration, Edit), InstallError> {
    let mut seen = String::new();
    for file in found {
        if places.primary.as_ref().is_some_and(|name| !is_named(&file.name, name)) {
            continue;
        }
        match edit(file) {
            Ok(edit) => return Ok((file, edit)),
            Err(invalid) => seen += &format!(" ({}: {invalid})", file.name),
        }
    }
    Err(InstallError::NoConfiguration { dir: places.conf_dir.clone(), seen })
}

/// A configuration may have been made a list, by us or by its owner.
fn is_named(name: &str, wanted: &str) -> bool {
    let stem = |name: &str| name.rsplit_once('.').map(|(stem, _)| stem.to_owned());
    name == wanted || stem(name) == stem(wanted)
}

/// [`plan`], and [`Plan::carry_out`]. Returns the configuration's file, and whether anything had to be written.
///
/// # Errors
/// See [`InstallError`]; what was there before is there still.
pub fn install(
    places: &Places,
    binary: &Path,
    entry: &Json,
    mode: Mode,
) -> Result<(PathBuf, bool), InstallError> {
    let plan = plan(places, binary, entry, mode)?;
    let (file, written) = (plan.file.clone(), !plan.is_empty());
    plan.carry_out()?;
    Ok((file, written))
}

/// Takes our entry out of every configuration, then the binary away.
///
/// # Errors
/// See [`InstallError`]. The binary stays while any configuration may name it.
pub fn uninstall(places: &Places) -> Result<(), InstallError> {
    // Not before all is found: of two files that name us, the one runtimes use next is done first.
    for file in configurations(&places.conf_dir)?.iter().rev() {
        if file.name == places.own || conflist::is_alone(&file.name, &file.text) {
            remove(&file.path)?;
        } else if let Ok(Edit::Write(text)) = conflist::remove(&file.name, &file.text) {
            rewrite(&file.path, Some(&file.path), &text)?;
        }
    }
    for dir in [&places.conf_dir, &places.bin_dir] {
        files::sweep(dir);
    }
    remove(&places.bin_dir.join(TYPE))
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::MetadataExt,
        sync::atomic::{AtomicU32, Ordering},
    };

    use serde_json::json;

    use super::{files::file_name, *};

    struct Dir(PathBuf);

    impl Dir {
        fn new() -> Self {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let dir = std::env::temp_dir().join(format!("weir-install-{}-{number}", std::process::id()));
            fs::create_dir_all(dir.join("bin")).unwrap();
            fs::create_dir_all(dir.join("conf")).unwrap();
            fs::write(dir.join("weir-cni"), "program").unwrap();
            Self(dir)
        }

        fn places(&self) -> Places {
            Places {
                bin_dir: self.0.join("bin"),
                conf_dir: self.0.join("conf"),
                primary: None,
                own: OWN.into(),
            }
        }

        fn install(&self) -> Result<(PathBuf, bool), InstallError> {
            self.install_as(Mode::Chained)
        }

        fn install_as(&self, mode: Mode) -> Result<(PathBuf, bool), InstallError> {
            install(&self.places(), &self.0.join("weir-cni"), &json!({ "type": TYPE }).into(), mode)
        }

        fn conf(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.join("conf").join(name);
            fs::write(&path, text).unwrap();
            path
        }

        fn names(&self, dir: &str) -> Vec<String> {
            let entries = fs::read_dir(self.0.join(dir)).unwrap();
            let mut names: Vec<_> = entries.flatten().map(|entry| file_name(&entry.path())).collect();
            names.sort();
            names
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn in_and_out_again() {
        let dir = Dir::new();
        let error = dir.install().unwrap_err().to_string();
        assert!(error.contains("no network configuration"), "{error}");
        dir.conf("00-empty.conflist", "");
        dir.conf("05-broken.conf", "{");
        let error = dir.install().unwrap_err().to_string();
        assert!(error.contains("00-empty.conflist: it is empty") && error.contains("05-broken"), "{error}");
        let path = dir.conf("10-x.conflist", r#"{"name":"n","plugins":[{"type":"ptp"}]}"#);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(dir.install().unwrap(), (path.clone(), true));
        assert_eq!(dir.install().unwrap(), (path.clone(), false));
        let meta = fs::metadata(&path).unwrap();
        assert_eq!(meta.mode() & 0o7777, 0o640);
        assert_eq!(fs::metadata(dir.0.join("bin/weir-cni")).unwrap().mode() & 0o7777, 0o755);
        // A new program is copied, and the configuration left alone.
        fs::write(dir.0.join("weir-cni"), "another").unwrap();
        assert_eq!(dir.install().unwrap(), (path.clone(), true));
        assert_eq!(fs::metadata(&path).unwrap().ino(), meta.ino());
        uninstall(&dir.places()).unwrap();
        assert!(!fs::read_to_string(&path).unwrap().contains(TYPE));
        assert!(dir.names("bin").is_empty());
        uninstall(&dir.places()).unwrap();
        assert_eq!(dir.names("conf"), ["00-empty.conflist", "05-broken.conf", "10-x.conflist"]);
    }

    #[test]
    fn a_single_plugin_s_file_gives_way_to_a_list() {
        let dir = Dir::new();
        dir.conf("10-x.conf", r#"{"type":"ptp"}"#);
        let (path, written) = dir.install().unwrap();
        assert_eq!((file_name(&path).as_str(), written), ("10-x.conflist", true));
        assert_eq!(dir.names("conf"), ["10-x.conflist"]);
        assert!(!dir.install().unwrap().1);
    }

    #[test]
    fn what_is_missing_is_named() {
        let dir = Dir::new();
        dir.conf("10-x.conflist", r#"{"name":"n","plugins":[{"type":"ptp"}]}"#);
        for (places, wanted) in [
            (Places { bin_dir: "/missing/bin".into(), ..dir.places() }, "/missing/bin/weir-cni"),
            (Places { conf_dir: "/missing/conf".into(), ..dir.places() }, "/missing/conf"),
        ] {
            let error = install(&places, &dir.0.join("weir-cni"), &json!({}).into(), Mode::Chained)
                .unwrap_err()
                .to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let error = install(&dir.places(), Path::new("/missing/program"), &json!({}).into(), Mode::Chained)
            .unwrap_err();
        assert!(error.to_string().contains("/missing/program"), "{error}");
    }

    #[test]
    fn a_list_of_our_own_sorts_first_and_stays() {
        let dir = Dir::new();
        let theirs = r#"{"name":"n","plugins":[{"type":"ptp"}]}"#;
        let path = dir.conf("10-x.conflist", theirs);
        let (own, written) = dir.install_as(Mode::OwnList).unwrap();
        assert_eq!((file_name(&own).as_str(), written), (OWN, true));
        assert_eq!(fs::read_to_string(&path).unwrap(), theirs);
        // Kept also by one that was not told so, and while the network is away.
        assert_eq!(dir.install().unwrap(), (own.clone(), false));
        fs::remove_file(&path).unwrap();
        assert_eq!(dir.install().unwrap(), (own, false));
        dir.conf("00-a.conflist", theirs);
        let error = dir.install_as(Mode::OwnList).unwrap_err().to_string();
        assert!(error.contains("00-a.conflist sorts before 00-weir.conflist"), "{error}");
        uninstall(&dir.places()).unwrap();
        assert_eq!(dir.names("conf"), ["00-a.conflist"]);
    }
}
