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

/// Sysctls of one namespace: that of the thread that opens them. The directories of both families are looked up once:
/// the kernel keeps those of all namespaces under one name, and compares them one by one, which takes the longer the
/// more pods there are.
pub struct Sysctls {
    v4: OwnedFd,
    /// None when the kernel is built without.
    v6: Option<OwnedFd>,
}

impl Sysctls {
    /// By this proc mount. To be used by threads in the namespace they were opened in.
    pub fn open(proc: &Path) -> Result<Self, SysctlError> {
        let family = |name: &str| {
            let how = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            open(&proc.join("sys/net").join(name), how, Mode::empty())
                .map_err(|errno| SysctlError { name: format!("net.{name}"), source: errno.into() })
        };
        let v6 = match family("ipv6") {
            Err(error) if error.source.kind() == io::ErrorKind::NotFound => None,
            found => Some(found?),
        };
        Ok(Self { v4: family("ipv4")?, v6 })
    }

    /// Reads one, such as `net.ipv4.fwmark_reflect`; none when the kernel does not have it.
    pub fn read(&self, name: &str) -> Result<Option<String>, SysctlError> {
        // A number and a newline: one read has it all.
        let mut value = [0; 64];
        match self.file(name, OFlag::O_RDONLY).and_then(|mut file| file.read(&mut value)) {
            Ok(length) => Ok(Some(String::from_utf8_lossy(&value[..length]).trim().to_owned())),
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
        let (family, name) = match (name.strip_prefix("net.ipv4."), name.strip_prefix("net.ipv6.")) {
            (Some(name), _) => (Some(&self.v4), name),
            (_, Some(name)) => (self.v6.as_ref(), name),
            _ => (None, name),
        };
        let family = family.ok_or(io::ErrorKind::NotFound)?;
        Ok(openat(family, name.replace('.', "/").as_str(), how | OFlag::O_CLOEXEC, Mode::empty())?.into())
    }
}
