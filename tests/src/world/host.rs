//! One network namespace with addresses: the node, a pod, or a host outside.

use std::{
    fs,
    io::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::{Command, Stdio},
    thread::JoinHandle,
};

use anyhow::{Context, Result, bail};
use weir_agent::netns::Netns;

use super::{netns_path, new_netns};

/// A namespace and its addresses.
#[derive(Debug)]
pub struct Host {
    name: String,
    netns: Netns,
    /// Its IPv4 address.
    pub v4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub v6: Option<Ipv6Addr>,
}

impl Host {
    pub(super) fn new(name: &str, v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>) -> Result<Self> {
        let netns = new_netns(&netns_path(name)).with_context(|| format!("namespace {name}"))?;
        let host = Self { name: name.to_owned(), netns, v4, v6 };
        for scope in ["all", "default"] {
            host.sysctl(&format!("net.ipv6.conf.{scope}.accept_dad"), "0")?;
        }
        host.sysctl("net.ipv6.conf.default.dad_transmits", "0")?;
        host.configure(&["link set lo up"])?;
        Ok(host)
    }

    /// Its name in this world.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// File that names the namespace.
    pub fn path(&self) -> PathBuf {
        netns_path(&self.name)
    }

    /// Its address of a family.
    ///
    /// # Panics
    /// When it has none.
    pub fn ip(&self, v6: bool) -> IpAddr {
        let ip = if v6 { self.v6.map(IpAddr::V6) } else { self.v4.map(IpAddr::V4) };
        ip.unwrap_or_else(|| panic!("{} has no such address", self.name))
    }

    /// One of its sockets.
    pub fn addr(&self, v6: bool, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(v6), port)
    }

    /// Runs `f` inside, on a thread of its own, and waits for it.
    ///
    /// # Panics
    /// When the namespace cannot be entered, or `f` panics.
    pub fn inside<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.netns.enter(f).expect("a namespace of this world can be entered")
    }

    /// Starts `f` inside, on a thread of its own.
    pub fn spawn<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        let netns = self.netns.clone();
        std::thread::spawn(move || netns.enter(f).expect("a namespace of this world can be entered"))
    }

    /// Runs commands of `ip` inside, all or nothing.
    ///
    /// # Errors
    /// When one is refused.
    pub fn configure(&self, commands: &[&str]) -> Result<()> {
        let mut batch = String::new();
        for command in commands {
            // A batch takes one family: the option of a line is not known to it.
            if let Some(rest) = command.strip_prefix("-6 ") {
                self.ip_batch(&std::mem::take(&mut batch), "-4")?;
                self.ip_batch(rest, "-6")?;
            } else {
                batch += command;
                batch.push('\n');
            }
        }
        self.ip_batch(&batch, "-4")
    }

    fn ip_batch(&self, batch: &str, family: &str) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut ip = Command::new("ip")
            .args(["-n", &self.name, family, "-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("running ip (package iproute2)")?;
        ip.stdin.take().context("a pipe")?.write_all(batch.as_bytes())?;
        let output = ip.wait_with_output()?;
        if !output.status.success() {
            bail!("ip in {}: {batch}: {}", self.name, String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }

    /// Writes a sysctl inside.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = PathBuf::from("/proc/sys").join(name.replace('.', "/"));
        self.inside(|| fs::write(&path, value)).with_context(|| format!("{name} in {}", self.name))
    }

    /// Reads a sysctl inside.
    ///
    /// # Errors
    /// When the kernel has none of that name.
    pub fn read_sysctl(&self, name: &str) -> Result<String> {
        let path = PathBuf::from("/proc/sys").join(name.replace('.', "/"));
        let value = self.inside(|| fs::read_to_string(&path)).with_context(|| name.to_owned())?;
        Ok(value.trim().to_owned())
    }
}
