//! Sysctls of a namespace.
//!
//! `/proc/sys/net` shows the namespace of the thread that opens a file there, whichever proc mount it is. A
//! container's own is read-only, so the host's is used.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::OwnedFd,
    path::Path,
};

use nix::{
    fcntl::{OFlag, open, openat},
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

/// Sysctls of one namespace: that of the thread that opens them. `sys/net` is looked up once: the kernel finds it
/// among those of all namespaces one by one, which takes the longer the more pods there are.
pub struct Sysctls {
    net: OwnedFd,
}

impl Sysctls {
    /// By this proc mount. To be used by threads in the namespace they were opened in.
    pub fn open(proc: &Path) -> Result<Self, SysctlError> {
        let net =
            open(&proc.join("sys/net"), OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty());
        let net = net.map_err(|errno| SysctlError { name: "net".into(), source: errno.into() })?;
        Ok(Self { net })
    }

    /// Reads one, such as `net.ipv4.fwmark_reflect`; none when the kernel does not have it.
    pub fn read(&self, name: &str) -> Result<Option<String>, SysctlError> {
        let mut value = String::new();
        match self.file(name, OFlag::O_RDONLY).and_then(|mut file| file.read_to_string(&mut value)) {
            Ok(_) => Ok(Some(value.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(SysctlError { name: name.to_owned(), source }),
        }
    }

    /// Writes one.
    pub fn write(&self, name: &str, value: &str) -> Result<(), SysctlError> {
        self.file(name, OFlag::O_WRONLY)
            .and_then(|mut file| file.write_all(value.as_bytes()))
            .map_err(|source| SysctlError { name: name.to_owned(), source })
    }

    fn file(&self, name: &str, how: OFlag) -> io::Result<File> {
        let path = name.strip_prefix("net.").unwrap_or(name).replace('.', "/");
        Ok(openat(&self.net, path.as_str(), how | OFlag::O_CLOEXEC, Mode::empty())?.into())
    }
}
