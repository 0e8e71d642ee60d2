//! The files of the two directories: read as runtimes read them, written whole or not at all.

use std::{
    ffi::OsStr,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use super::{InstallError, failed};
use crate::domain::cni::conflist;

/// Ending of what is being written: no runtime reads it.
const NEW: &str = "weir-new";
/// Mode of a configuration that is made of nothing.
const PRIVATE: u32 = 0o600;

/// A file that runtimes would read.
#[derive(Clone)]
pub(super) struct Configuration {
    pub(super) path: PathBuf,
    pub(super) name: String,
    /// Bytes that are no text make no JSON either, and are skipped like that.
    pub(super) text: String,
}

/// All of them, in the order of runtimes.
pub(super) fn configurations(dir: &Path) -> Result<Vec<Configuration>, InstallError> {
    let entries = fs::read_dir(dir).map_err(failed("list", dir))?;
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_file() && conflist::is_config(&file_name(path)))
        .collect();
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        match fs::read(&path) {
            Ok(bytes) => {
                let (name, text) = (file_name(&path), String::from_utf8_lossy(&bytes).into_owned());
                found.push(Configuration { path, name, text });
            }
            // Removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("read", &path)(error)),
        }
    }
    Ok(found)
}

pub(super) fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// New text for a configuration, with mode and owner of the one it is made of.
pub(super) fn rewrite(path: &Path, like: Option<&Path>, text: &str) -> Result<(), InstallError> {
    let Some(like) = like else { return replace(path, text.as_bytes(), PRIVATE, None) };
    let meta = fs::metadata(like).map_err(failed("look at", like))?;
    // What a link leads to is changed, not the link.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    replace(&target, text.as_bytes(), meta.permissions().mode() & 0o7777, Some((meta.uid(), meta.gid())))
}

/// Whole or not at all.
pub(super) fn replace(
    path: &Path,
    content: &[u8],
    mode: u32,
    owner: Option<(u32, u32)>,
) -> Result<(), InstallError> {
    let new = path.with_file_name(format!(".{}.{NEW}", file_name(path)));
    let written = (|| {
        let mut file = OpenOptions::new().create(true).write(true).truncate(true).mode(mode).open(&new)?;
        file.write_all(content)?;
        if let Some((uid, gid)) = owner {
            fchown(&file, Some(uid), Some(gid))?;
        }
        // After the owner, whose change may take bits away; and the mask of the process does not count.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&new, path)
    })();
    written.map_err(|error| {
        let _ = fs::remove_file(&new);
        failed("write", path)(error)
    })
}

/// Removes a file that may be gone already.
pub(super) fn remove(path: &Path) -> Result<(), InstallError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Removes what one that was killed while writing has left.
pub(super) fn sweep(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension() == Some(OsStr::new(NEW)) {
            // It is in nobody's way.
            let _ = fs::remove_file(path);
        }
    }
}
