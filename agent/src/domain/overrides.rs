//! What a pod's annotations change about its capture. A value that does not parse changes nothing, and is reported.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use super::names;

/// How a pod is captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrides {
    /// Connections from outside reach the app directly; HBONE still reaches ztunnel.
    pub bypass_inbound: bool,
    /// DNS goes to ztunnel.
    pub dns: bool,
    /// Interfaces whose arriving TCP is the pod's own outbound traffic.
    pub reroute: Vec<String>,
    /// Ports of the pod that are reached directly.
    pub exclude_inbound_ports: Vec<u16>,
    /// Remote ports that are reached directly.
    pub exclude_outbound_ports: Vec<u16>,
    /// Remote networks that are reached directly, for DNS as well.
    pub exclude_outbound_cidrs: Vec<Cidr>,
    /// What becomes of connections older than the enrolment.
    pub existing: Existing,
}

/// A network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    /// Its first address: bits behind the prefix are zero.
    pub address: IpAddr,
    /// Length of the prefix, in the address's own family.
    pub prefix: u8,
}

/// What becomes of connections that are older than the enrolment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// They go on to their own end.
    Keep,
    /// They are ended this long after the enrolment; zero is at once.
    EndAfter(Duration),
}

impl Default for Existing {
    /// Ten minutes: an opt-in to the mesh must not stay without effect for an undefined time.
    fn default() -> Self {
        Self::EndAfter(Duration::from_secs(600))
    }
}

/// What holds where a pod says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// DNS goes to ztunnel.
    pub dns: bool,
    /// What becomes of connections older than the enrolment.
    pub existing: Existing,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { dns: true, existing: Existing::default() }
    }
}

/// An annotation that means nothing; the default holds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {name}: {value:?} is no {wanted}; the default holds")]
pub struct BadAnnotation {
    /// The annotation.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// What it should have been.
    pub wanted: &'static str,
}

/// Most of each kind of exclusion; the maps in the kernel have room for so many.
const MOST: usize = 256;

impl Overrides {
    /// What holds for a pod without annotations.
    pub fn none(defaults: Defaults) -> Self {
        Self {
            bypass_inbound: false,
            dns: defaults.dns,
            reroute: Vec::new(),
            exclude_inbound_ports: Vec::new(),
            exclude_outbound_ports: Vec::new(),
            exclude_outbound_cidrs: Vec::new(),
            existing: defaults.existing,
        }
    }

    /// Reads a pod's annotations.
    pub fn read(annotations: &BTreeMap<String, String>, defaults: Defaults) -> (Self, Vec<BadAnnotation>) {
        let mut bad = Vec::new();
        let mut reader = Reader { annotations, bad: &mut bad };
        let none = Self::none(defaults);
        let read = Self {
            bypass_inbound: reader
                .take(names::BYPASS_INBOUND, "boolean", boolean)
                .unwrap_or(none.bypass_inbound),
            dns: reader.take(names::DNS_CAPTURE, "boolean", boolean).unwrap_or(none.dns),
            reroute: reader
                .take(names::REROUTE, "list of at most 8 interface names", interfaces)
                .unwrap_or_default(),
            exclude_inbound_ports: reader
                .take(names::EXCLUDE_INBOUND_PORTS, "list of ports", |text| list(text, port))
                .unwrap_or_default(),
            exclude_outbound_ports: reader
                .take(names::EXCLUDE_OUTBOUND_PORTS, "list of ports", |text| list(text, port))
                .unwrap_or_default(),
            exclude_outbound_cidrs: reader
                .take(names::EXCLUDE_OUTBOUND_CIDRS, "list of networks", |text| list(text, Cidr::parse))
                .unwrap_or_default(),
            existing: reader
                .take(names::EXISTING_CONNECTIONS, "keep, reset or duration such as 10m", Existing::parse)
                .unwrap_or(none.existing),
        };
        (read, bad)
    }
}

struct Reader<'a> {
    annotations: &'a BTreeMap<String, String>,
    bad: &'a mut Vec<BadAnnotation>,
}

impl Reader<'_> {
    fn take<T>(
        &mut self,
        name: &'static str,
        wanted: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let value = self.annotations.get(name)?;
        let parsed = parse(value.trim());
        if parsed.is_none() {
            self.bad.push(BadAnnotation { name, value: value.clone(), wanted });
        }
        parsed
    }
}

/// The forms that Istio takes for a boolean.
fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// A list with commas between; blanks and empty members mean nothing. All of it is good, or none.
fn list<T>(text: &str, parse: impl Fn(&str) -> Option<T>) -> Option<Vec<T>> {
    let members: Option<Vec<T>> =
        text.split(',').map(str::trim).filter(|member| !member.is_empty()).map(parse).collect();
    members.filter(|members| members.len() <= MOST)
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port != 0)
}

/// Names as the kernel takes them: shorter than 16 bytes, without a slash or a blank.
fn interfaces(text: &str) -> Option<Vec<String>> {
    let name = |text: &str| {
        let good = text.len() < 16 && !text.contains(['/', ' ']) && text != "lo";
        good.then(|| text.to_owned())
    };
    list(text, name).filter(|names| names.len() <= weir_common::MAX_REROUTE)
}

impl Cidr {
    /// `10.0.0.0/8`, `fd00::/8`, or a single address.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Some(longest), |prefix| prefix.parse().ok())?;
        (prefix <= longest).then(|| Self { address: masked(address, prefix), prefix })
    }
}

fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    let prefix = u32::from(prefix);
    match address {
        IpAddr::V4(v4) => {
            IpAddr::from((u32::from(v4) & u32::MAX.checked_shl(32 - prefix).unwrap_or(0)).to_be_bytes())
        }
        IpAddr::V6(v6) => {
            IpAddr::from((u128::from(v6) & u128::MAX.checked_shl(128 - prefix).unwrap_or(0)).to_be_bytes())
        }
    }
}

impl Existing {
    /// `keep`, `reset`, or a time.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "keep" => return Some(Self::Keep),
            "reset" => return Some(Self::EndAfter(Duration::ZERO)),
            _ => {}
        }
        duration(text).map(Self::EndAfter)
    }
}

/// A whole number with `ms`, `s`, `m` or `h`.
pub fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let number = u64::from(number.parse::<u32>().ok()?);
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_secs(number * 60)),
        "h" => Some(Duration::from_secs(number * 3600)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(annotations: &[(&str, &str)]) -> (Overrides, Vec<BadAnnotation>) {
        let annotations = annotations.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Overrides::read(&annotations, Defaults::default())
    }

    fn none() -> Overrides {
        Overrides::none(Defaults::default())
    }

    #[test]
    fn annotations_change_what_they_name() {
        let cidr = |text| Cidr::parse(text).unwrap();
        for (annotations, wanted) in [
            (vec![], none()),
            (vec![("unrelated", "x")], none()),
            (
                vec![("ambient.istio.io/bypass-inbound-capture", "true")],
                Overrides { bypass_inbound: true, ..none() },
            ),
            (vec![("ambient.istio.io/dns-capture", "F")], Overrides { dns: false, ..none() }),
            (
                vec![("istio.io/reroute-virtual-interfaces", " tap0, net1 ,")],
                Overrides { reroute: vec!["tap0".into(), "net1".into()], ..none() },
            ),
            (
                vec![
                    ("weir.dev/exclude-inbound-ports", "8080,9090"),
                    ("weir.dev/exclude-outbound-ports", "5432"),
                ],
                Overrides {
                    exclude_inbound_ports: vec![8080, 9090],
                    exclude_outbound_ports: vec![5432],
                    ..none()
                },
            ),
            (
                vec![("weir.dev/exclude-outbound-cidrs", "10.1.2.3/8, fd00::1/64,192.0.2.1")],
                Overrides {
                    exclude_outbound_cidrs: vec![cidr("10.0.0.0/8"), cidr("fd00::/64"), cidr("192.0.2.1/32")],
                    ..none()
                },
            ),
            (
                vec![("weir.dev/existing-connections", "keep")],
                Overrides { existing: Existing::Keep, ..none() },
            ),
            (
                vec![("weir.dev/existing-connections", "90s")],
                Overrides { existing: Existing::EndAfter(Duration::from_secs(90)), ..none() },
            ),
        ] {
            assert_eq!(read(&annotations), (wanted, vec![]), "{annotations:?}");
        }
    }

    #[test]
    fn what_does_not_parse_changes_nothing_and_is_named() {
        for (name, value) in [
            ("ambient.istio.io/bypass-inbound-capture", "yes"),
            ("ambient.istio.io/dns-capture", ""),
            ("istio.io/reroute-virtual-interfaces", "a-name-that-is-too-long"),
            ("istio.io/reroute-virtual-interfaces", "a/b"),
            ("istio.io/reroute-virtual-interfaces", "a,b,c,d,e,f,g,h,i"),
            ("weir.dev/exclude-inbound-ports", "0"),
            ("weir.dev/exclude-inbound-ports", "8080,http"),
            ("weir.dev/exclude-outbound-ports", "65536"),
            ("weir.dev/exclude-outbound-cidrs", "10.0.0.0/33"),
            ("weir.dev/exclude-outbound-cidrs", "example.com"),
            ("weir.dev/existing-connections", "10"),
            ("weir.dev/existing-connections", "ten m"),
            ("weir.dev/existing-connections", "µ"),
            ("weir.dev/existing-connections", ""),
        ] {
            let (overrides, bad) = read(&[(name, value)]);
            assert_eq!(overrides, none(), "{name}={value}");
            assert_eq!(bad.len(), 1, "{name}={value}");
            assert!(bad[0].to_string().contains(name), "{bad:?}");
        }
    }
}
