//! Sysctls of a namespace.
//!
//! `/proc/sys/net` shows the namespace of the thread that opens a file there, whichever proc mount it is. A
//! container's own is read-only, so the host's is used.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{OFlag, openat},
    sys::stat::Mode,
};

/// A sysctl cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("sysctl {name}: {source}")]
pub struct SysctlError {
    /// Its name, such as `net.ipv4.tcp_fwmark_accept`.
    pub name: String,
    /// Why.
    pub source: io::Error,
}

/// Sysctls of the calling thread's namespace. The two directories are looked up once: the kernel finds them among
/// those of all namespaces one by one, which takes the longer the more pods there are.
pub struct Sysctls {
    proc: PathBuf,
    ipv4: Option<File>,
    ipv6: Option<File>,
}

impl Sysctls {
    /// By this proc mount. To be used on the thread that calls.
    pub fn new(proc: &Path) -> Self {
        let proc = proc.join("sys/net");
        let [ipv4, ipv6] = ["ipv4", "ipv6"].map(|family| File::open(proc.join(family)).ok());
        Self { proc, ipv4, ipv6 }
    }

    /// Reads one, such as `net.ipv4.fwmark_reflect`; none when the kernel does not have it.
    pub fn read(&self, name: &str) -> Result<Option<String>, SysctlError> {
        let mut value = String::new();
        match self.open(name, OFlag::O_RDONLY).and_then(|mut file| file.read_to_string(&mut value)) {
            Ok(_) => Ok(Some(value.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(SysctlError { name: name.to_owned(), source }),
        }
    }

    /// Writes one.
    pub fn write(&self, name: &str, value: &str) -> Result<(), SysctlError> {
        self.open(name, OFlag::O_WRONLY)
            .and_then(|mut file| file.write_all(value.as_bytes()))
            .map_err(|source| SysctlError { name: name.to_owned(), source })
    }

    fn open(&self, name: &str, how: OFlag) -> io::Result<File> {
        let mut parts = name.splitn(3, '.');
        let (_, family, rest) = (parts.next(), parts.next(), parts.next().unwrap_or_default());
        let path = rest.replace('.', "/");
        let directory = if family == Some("ipv4") { &self.ipv4 } else { &self.ipv6 };
        let Some(directory) = directory else {
            // There is none, or the mount is no proc: the error says which.
            return File::open(self.proc.join(family.unwrap_or_default()).join(path));
        };
        Ok(openat(directory, path.as_str(), how | OFlag::O_CLOEXEC, Mode::empty())?.into())
    }
}
