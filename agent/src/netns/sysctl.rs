//! Sysctls of a namespace.
//!
//! `/proc/sys/net` shows the namespace of the thread that opens a file there, whichever proc mount it is. A
//! container's own is read-only, so the host's is used.

use std::{fs, io, path::Path};

/// A sysctl cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("sysctl {name}: {source}")]
pub struct SysctlError {
    /// Its name, such as `net.ipv4.tcp_fwmark_accept`.
    pub name: String,
    /// Why.
    pub source: io::Error,
}

fn path(proc: &Path, name: &str) -> std::path::PathBuf {
    proc.join("sys").join(name.replace('.', "/"))
}

/// Reads a sysctl of the calling thread's namespace; none when the kernel does not have it.
pub fn read(proc: &Path, name: &str) -> Result<Option<String>, SysctlError> {
    match fs::read_to_string(path(proc, name)) {
        Ok(value) => Ok(Some(value.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(SysctlError { name: name.to_owned(), source }),
    }
}

/// Writes a sysctl of the calling thread's namespace.
pub fn write(proc: &Path, name: &str, value: &str) -> Result<(), SysctlError> {
    fs::write(path(proc, name), value).map_err(|source| SysctlError { name: name.to_owned(), source })
}
