//! Puts the plugin on the node, and takes it away again: the binary first in, the configuration first out, so that no
//! runtime is ever told to run what is not there.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use thiserror::Error;
use tracing::warn;

use crate::domain::cni::{
    conflist::{self, Edit, TYPE},
    ordered::Json,
};

/// Where things go.
#[derive(Clone, Debug)]
pub struct Places {
    /// Where runtimes look for plugins.
    pub bin_dir: PathBuf,
    /// Where they look for configurations.
    pub conf_dir: PathBuf,
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
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => "; this platform keeps plugins elsewhere: see --cni-bin-dir",
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

/// Installs `binary` and puts `entry` last into the configuration that runtimes use. Returns that configuration's file,
/// and whether anything had to be written.
///
/// # Errors
/// See [`InstallError`]; what was there before is there still.
pub fn install(places: &Places, binary: &Path, entry: &Json) -> Result<(PathBuf, bool), InstallError> {
    let new = fs::read(binary).map_err(failed("read", binary))?;
    let target = places.bin_dir.join(TYPE);
    let copied = fs::read(&target).ok().as_ref() != Some(&new);
    if copied {
        replace(&target, &new, 0o755, None)?;
    }
    let mut seen = String::new();
    for path in configurations(&places.conf_dir)? {
        let (name, text) = (file_name(&path), fs::read_to_string(&path).map_err(failed("read", &path))?);
        match conflist::insert(&name, &text, entry) {
            Ok(Edit::Nothing) => return Ok((path, copied)),
            Ok(Edit::Write(text)) => {
                rewrite(&path, &path, &text)?;
                return Ok((path, true));
            }
            Ok(Edit::Replace(name, text)) => {
                let list = places.conf_dir.join(name);
                rewrite(&list, &path, &text)?;
                // Both would do until here: the old one sorts first, and is what was used so far.
                fs::remove_file(&path).map_err(failed("remove", &path))?;
                return Ok((list, true));
            }
            Err(invalid) => {
                warn!(file = %path.display(), "skipped, as runtimes do: {invalid}");
                seen += &format!(" ({name}: {invalid})");
            }
        }
    }
    Err(InstallError::NoConfiguration { dir: places.conf_dir.clone(), seen })
}

/// Takes our entry out of every configuration, then the binary away.
///
/// # Errors
/// See [`InstallError`]. The binary stays while any configuration may name it.
pub fn uninstall(places: &Places) -> Result<(), InstallError> {
    for path in configurations(&places.conf_dir)? {
        let text = fs::read_to_string(&path).map_err(failed("read", &path))?;
        if let Ok(Edit::Write(text)) = conflist::remove(&file_name(&path), &text) {
            rewrite(&path, &path, &text)?;
        }
    }
    let binary = places.bin_dir.join(TYPE);
    match fs::remove_file(&binary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &binary)(error)),
        _ => Ok(()),
    }
}

/// Files that runtimes would read, in their order.
fn configurations(dir: &Path) -> Result<Vec<PathBuf>, InstallError> {
    let entries = fs::read_dir(dir).map_err(failed("list", dir))?;
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_file() && conflist::is_config(&file_name(path)))
        .collect();
    paths.sort();
    Ok(paths)
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// New text for a configuration, with mode and owner of the one it is made of.
fn rewrite(path: &Path, like: &Path, text: &str) -> Result<(), InstallError> {
    let like = fs::metadata(like).map_err(failed("look at", like))?;
    replace(path, text.as_bytes(), like.permissions().mode() & 0o7777, Some((like.uid(), like.gid())))
}

/// Whole or not at all.
fn replace(path: &Path, content: &[u8], mode: u32, owner: Option<(u32, u32)>) -> Result<(), InstallError> {
    // Hidden, and of no ending that a runtime would read.
    let new = path.with_file_name(format!(".{}.weir-new", file_name(path)));
    let written = (|| {
        let mut file = OpenOptions::new().create(true).write(true).truncate(true).mode(mode).open(&new)?;
        file.write_all(content)?;
        // The mask of the process does not count.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        if let Some((uid, gid)) = owner {
            fchown(&file, Some(uid), Some(gid))?;
        }
        file.sync_all()?;
        fs::rename(&new, path)
    })();
    written.map_err(|error| {
        let _ = fs::remove_file(&new);
        failed("write", path)(error)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use serde_json::json;

    use super::*;

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
            Places { bin_dir: self.0.join("bin"), conf_dir: self.0.join("conf") }
        }

        fn install(&self) -> Result<(PathBuf, bool), InstallError> {
            install(&self.places(), &self.0.join("weir-cni"), &json!({ "type": TYPE }).into())
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
        for (places, wanted) in [
            (Places { bin_dir: "/missing/bin".into(), ..dir.places() }, "/missing/bin/weir-cni"),
            (Places { conf_dir: "/missing/conf".into(), ..dir.places() }, "/missing/conf"),
        ] {
            let error = install(&places, &dir.0.join("weir-cni"), &json!({}).into()).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let error = install(&dir.places(), Path::new("/missing/program"), &json!({}).into()).unwrap_err();
        assert!(error.to_string().contains("/missing/program"), "{error}");
    }
}
