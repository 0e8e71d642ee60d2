//! The rules that Istio's agents put into a pod, applied with the programs they use: what weir is compared with.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::world::Host;

/// In-pod rules of the iptables back end for one family, DNS capture on.
const IPTABLES: &str = "\
*mangle
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
*nat
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A OUTPUT -j ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A ISTIO_PRERT -s PROBE -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT -d PROBE -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d LOOPBACK -p tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT ! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-port 15053
-A ISTIO_OUTPUT ! -d LOOPBACK -p tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d LOOPBACK -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d LOOPBACK -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
*raw
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1
-A ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1
COMMIT
";

/// In-pod rules of the nftables back end, both families, in one transaction.
const NFTABLES: &str = "\
table inet istio-ambient-nat {
  chain istio-prerouting {
    meta l4proto tcp ip saddr 169.254.7.127 counter accept
    meta l4proto tcp ip6 saddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
    ip daddr != 127.0.0.1/32 tcp dport != 15008 meta mark & 0xfff != 0x539 counter redirect to :15006
    ip6 daddr != ::1/128 tcp dport != 15008 meta mark & 0xfff != 0x539 counter redirect to :15006
  }
  chain istio-output {
    meta l4proto tcp ip daddr 169.254.7.127 counter accept
    meta l4proto tcp ip6 daddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
    oifname != \"lo\" meta mark & 0xfff != 0x539 udp dport 53 counter redirect to :15053
    ip daddr != 127.0.0.1/32 tcp dport 53 meta mark & 0xfff != 0x539 counter redirect to :15053
    ip6 daddr != ::1/128 tcp dport 53 meta mark & 0xfff != 0x539 counter redirect to :15053
    meta l4proto tcp meta mark & 0xfff == 0x111 counter accept
    oifname \"lo\" ip daddr != 127.0.0.1/32 counter accept
    oifname \"lo\" ip6 daddr != ::1/128 counter accept
    meta l4proto tcp ip daddr != 127.0.0.1/32 meta mark & 0xfff != 0x539 counter redirect to :15001
    meta l4proto tcp ip6 daddr != ::1/128 meta mark & 0xfff != 0x539 counter redirect to :15001
  }
  chain prerouting { type nat hook prerouting priority -100; jump istio-prerouting; }
  chain output { type nat hook output priority -100; jump istio-output; }
}
table inet istio-ambient-mangle {
  chain istio-prerouting {
    meta mark & 0xfff == 0x539 counter ct mark set ct mark & 0xfffff000 | 0x111
  }
  chain istio-output { ct mark & 0xfff == 0x111 counter meta mark set ct mark; }
  chain prerouting { type filter hook prerouting priority -150; jump istio-prerouting; }
  chain output { type route hook output priority -150; jump istio-output; }
}
table inet istio-ambient-raw {
  chain istio-output { udp dport 53 meta mark & 0xfff == 0x539 counter ct zone set 1; }
  chain istio-prerouting { udp sport 53 meta mark & 0xfff != 0x539 counter ct zone set 1; }
  chain prerouting { type filter hook prerouting priority -300; jump istio-prerouting; }
  chain output { type filter hook output priority -300; jump istio-output; }
}
";

/// Empties the tables that [`IPTABLES`] fills.
const EMPTY: &str = "*mangle\nCOMMIT\n*nat\nCOMMIT\n*raw\nCOMMIT\n";

/// Which programs put the rules in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// `iptables-legacy-restore`.
    Legacy,
    /// `iptables-nft-restore`.
    IptablesNft,
    /// `nft`.
    Nft,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Legacy, Self::IptablesNft, Self::Nft];

    /// As an arm of a measurement is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Legacy => "iptables-legacy",
            Self::IptablesNft => "iptables-nft",
            Self::Nft => "nft",
        }
    }

    /// Puts the rules of both families into a pod, by as many launches as Istio's agent needs for them.
    ///
    /// # Errors
    /// When a program is missing or refuses them.
    pub fn apply(self, pod: &Host) -> Result<()> {
        if self == Self::Nft {
            return feed(pod, "nft", &["-f", "-"], NFTABLES);
        }
        for (v6, loopback, probe) in [
            (false, "127.0.0.1/32", "169.254.7.127"),
            (true, "::1/128", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
        ] {
            let rules = IPTABLES.replace("LOOPBACK", loopback).replace("PROBE", probe);
            feed(pod, self.restore(v6), &["--noflush", "--wait=30"], &rules)?;
        }
        Ok(())
    }

    /// Takes the rules away.
    ///
    /// # Errors
    /// As [`Backend::apply`].
    pub fn remove(self, pod: &Host) -> Result<()> {
        if self == Self::Nft {
            return feed(pod, "nft", &["-f", "-"], "flush ruleset\n");
        }
        [false, true].into_iter().try_for_each(|v6| feed(pod, self.restore(v6), &["--wait=30"], EMPTY))
    }

    fn restore(self, v6: bool) -> &'static str {
        match (self, v6) {
            (Self::IptablesNft, false) => "iptables-nft-restore",
            (Self::IptablesNft, true) => "ip6tables-nft-restore",
            (_, false) => "iptables-legacy-restore",
            (_, true) => "ip6tables-legacy-restore",
        }
    }
}

/// The rule and the route of both families that go with the rules; Istio's agent makes them by netlink.
///
/// # Errors
/// When the kernel refuses them.
pub fn route(pod: &Host) -> Result<()> {
    pod.configure(&[
        "rule add fwmark 0x111/0xfff pref 32764 lookup 100",
        "route add local 0.0.0.0/0 dev lo table 100",
        "-6 rule add fwmark 0x111/0xfff pref 32764 lookup 100",
        "-6 route add local ::/0 dev lo table 100",
    ])
}

/// Runs a program in the pod with its input.
fn feed(pod: &Host, program: &str, args: &[&str], input: &str) -> Result<()> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = pod.inside(|| command.spawn()).with_context(|| format!("running {program}"))?;
    child.stdin.take().context("a pipe")?.write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
