//! The tc programs run by the kernel over packets nobody would send (`BPF_PROG_TEST_RUN`): truncated, overlong,
//! nonsense. What is not understood goes on untouched, bit by bit; guard drops what claims to be TCP.
//!
//! Packets are random. The seed is printed; `WEIR_SEED` in the environment sets it.
#![cfg(feature = "root")]

use std::net::IpAddr;

use aya::{TestRun, TestRunOptions, programs::SchedClassifier};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use weir_agent::kernel::Hook;
use weir_common::{Counter, INSIDE_MARK, ZTUNNEL_MARK};
use weir_tests::{
    mesh_node::MeshNode,
    world::{Families, Host, PIN_ROOT},
};

const PACKETS: usize = 20_000;
const PASS: u32 = u32::MAX;
const DROP: u32 = 2;
const ETHERNET: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;
const EXTENSIONS: [u8; 4] = [0, 43, 44, 60];

struct Fixture {
    node: MeshNode,
    pod: Host,
    programs: [SchedClassifier; 3],
    rng: StdRng,
}

/// What a program did.
#[derive(Debug, PartialEq)]
struct Done {
    verdict: u32,
    mark: u32,
    packet: Vec<u8>,
}

impl Fixture {
    fn new() -> Self {
        let node = MeshNode::new().unwrap();
        let pod = node.pod("a", Families::Dual).unwrap();
        node.capture(&pod).unwrap();
        let dir = format!("{PIN_ROOT}/v1/pods/{}", pod.netns().cookie());
        let programs =
            Hook::ALL.map(|hook| SchedClassifier::from_pin(format!("{dir}/{}", hook.name())).unwrap());
        let seed = std::env::var("WEIR_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
        println!("WEIR_SEED={seed}");
        Self { node, pod, programs, rng: StdRng::seed_from_u64(seed) }
    }

    /// Runs a program, as if the packet were on `lo` of the calling thread's namespace.
    fn run(&self, hook: Hook, mark: u32, packet: &[u8]) -> Done {
        // Of struct __sk_buff only the mark, its third word, is of interest.
        let mut context = [0_u8; 192];
        context[8..12].copy_from_slice(&mark.to_ne_bytes());
        let mut after = [0_u8; 192];
        let mut out = vec![0; packet.len() + 64];
        let options = TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            ctx_out: Some(&mut after),
            ..TestRunOptions::default()
        };
        let result = self.programs[hook as usize].test_run(options).unwrap();
        out.truncate(result.data_size_out as usize);
        let mark = u32::from_ne_bytes(after[8..12].try_into().unwrap());
        Done { verdict: result.return_value, mark, packet: out }
    }

    /// A packet that may be anything; most look like IP at first sight.
    fn packet(&mut self) -> Vec<u8> {
        let rng = &mut self.rng;
        let mut packet = vec![0; ETHERNET - 2];
        let v6 = rng.random_bool(0.5);
        let ether: u16 = match rng.random_range(0..20) {
            0 => rng.random(),
            1 => 0x0806,
            _ if v6 => 0x86dd,
            _ => 0x0800,
        };
        packet.extend(ether.to_be_bytes());
        let mut protocol = *[TCP, TCP, UDP, UDP, 1, 58, 132].choose(rng).unwrap();
        let length = rng.random_range(0..80);
        let mut transport: Vec<u8> = (0..length).map(|_| rng.random()).collect();
        if let Some(ports) = transport.get_mut(..4) {
            let source = *[40_000_u16, 40_001, 15053, 53].choose(rng).unwrap();
            let destination = *[53_u16, 53, 80, 15053, 15001].choose(rng).unwrap();
            ports[..2].copy_from_slice(&source.to_be_bytes());
            ports[2..].copy_from_slice(&destination.to_be_bytes());
        }
        if v6 {
            let mut chain = Vec::new();
            let headers = if rng.random_bool(0.5) { 0 } else { rng.random_range(0..9) };
            for _ in 0..headers {
                let header = *EXTENSIONS.choose(rng).unwrap();
                let more = if header == 44 || rng.random_bool(0.8) { 0 } else { rng.random_range(0..3_u8) };
                let mut bytes = vec![0; 8 + 8 * usize::from(more)];
                rng.fill(&mut bytes[2..]);
                if rng.random_bool(0.7) {
                    bytes[2..4].fill(0);
                }
                (bytes[0], bytes[1]) = (protocol, more);
                protocol = header;
                // Outermost first.
                chain.splice(0..0, bytes);
            }
            packet.extend([0x60, 0, 0, 0]);
            packet.extend(((chain.len() + transport.len()) as u16).to_be_bytes());
            packet.extend([protocol, 64]);
            packet.extend(address(&self.pod, true, rng));
            packet.extend(address(&self.pod, true, rng));
            packet.extend(chain);
        } else {
            let words = if rng.random_bool(0.7) { 5 } else { rng.random_range(0..16_u8) };
            packet.extend([0x40 | words, 0, 0, 40, 0, 0]);
            packet.extend(if rng.random_bool(0.8) { [0x40, 0] } else { rng.random() });
            packet.extend([64, protocol, 0, 0]);
            packet.extend(address(&self.pod, false, rng));
            packet.extend(address(&self.pod, false, rng));
            packet.extend((20..usize::from(words) * 4).map(|_| 1));
        }
        packet.extend(transport);
        // Some are cut, some are longer than they say, some are spoilt.
        if rng.random_bool(0.2) {
            // Linux 6.18 refuses to run a program over less than a whole IP header.
            let least = match ether {
                0x86dd => ETHERNET + 40,
                0x0800 => ETHERNET + 20,
                _ => ETHERNET + 1,
            };
            packet.truncate(rng.random_range(least..=packet.len().max(least)));
        }
        if rng.random_bool(0.1) {
            packet.extend((0..rng.random_range(1..1400)).map(|_| rng.random::<u8>()));
        }
        if rng.random_bool(0.2) {
            let at = rng.random_range(ETHERNET..=packet.len());
            if let Some(byte) = packet.get_mut(at) {
                *byte = rng.random();
            }
        }
        packet
    }
}

fn address(pod: &Host, v6: bool, rng: &mut StdRng) -> Vec<u8> {
    let text = if v6 { ["::1", "fd96::10", "fd88:2::2"] } else { ["127.0.0.1", "10.96.0.10", "10.88.2.2"] };
    let mut ips: Vec<IpAddr> = text.iter().map(|ip| ip.parse().unwrap()).collect();
    ips.push(pod.ip(v6));
    match *ips.choose(rng).unwrap() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// The packet as a careful reader sees it.
#[derive(Debug, PartialEq)]
enum Read<'a> {
    /// No IP, or not enough of it.
    Nothing,
    /// A chain of extension headers without an end.
    Opaque,
    /// What it carries; the transport header is empty where there is none to be found.
    Carries { protocol: u8, fragment: bool, destination: &'a [u8], transport: &'a [u8] },
}

fn read(packet: &[u8]) -> Read<'_> {
    let ip = &packet[ETHERNET..];
    let ether = [packet[12], packet[13]];
    if ether == [0x08, 0] && ip.len() >= 20 && ip[0] >> 4 == 4 && ip[0] & 0xf >= 5 {
        let fragment = u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff;
        let start = if fragment & 0x1fff == 0 { usize::from(ip[0] & 0xf) * 4 } else { ip.len() };
        let transport = ip.get(start..).unwrap_or_default();
        return Read::Carries {
            protocol: ip[9],
            fragment: fragment != 0,
            destination: &ip[16..20],
            transport,
        };
    }
    if ether != [0x86, 0xdd] || ip.len() < 40 || ip[0] >> 4 != 6 {
        return Read::Nothing;
    }
    let (mut protocol, mut at, mut fragment, mut headless) = (ip[6], 40, false, false);
    for _ in 0..6 {
        if headless || !EXTENSIONS.contains(&protocol) {
            let transport = ip.get(at..).filter(|_| !headless).unwrap_or_default();
            return Read::Carries { protocol, fragment, destination: &ip[24..40], transport };
        }
        let Some(header) = ip.get(at..at + 4) else { return Read::Opaque };
        if protocol == 44 {
            fragment = true;
            headless = u16::from_be_bytes([header[2], header[3]]) >> 3 != 0;
            at += 8;
        } else {
            at += 8 * (usize::from(header[1]) + 1);
        }
        protocol = header[0];
    }
    if headless {
        return Read::Carries { protocol, fragment, destination: &ip[24..40], transport: &[] };
    }
    Read::Opaque
}

/// Marks, and touches nothing.
#[test]
fn arrive_marks_everything_and_changes_nothing() {
    let mut f = Fixture::new();
    f.pod
        .netns()
        .clone()
        .enter(|| {
            for _ in 0..PACKETS {
                let packet = f.packet();
                let mark = f.rng.random();
                let done = f.run(Hook::Arrive, mark, &packet);
                assert_eq!(done, Done { verdict: PASS, mark: ZTUNNEL_MARK, packet });
            }
        })
        .unwrap();
}

/// Drops TCP, DNS and what it does not understand, unless it is marked; touches nothing.
#[test]
fn guard_drops_what_is_captured() {
    let mut f = Fixture::new();
    f.pod
        .netns()
        .clone()
        .enter(|| {
            let mut drops = 0;
            for _ in 0..PACKETS {
                let packet = f.packet();
                let mark = *[0, 1, ZTUNNEL_MARK, 0x1000_0539, 0x538].choose(&mut f.rng).unwrap();
                let captured = match read(&packet) {
                    Read::Nothing => false,
                    Read::Opaque => true,
                    Read::Carries { protocol: TCP, .. } => true,
                    Read::Carries { protocol: UDP, transport, .. } => transport.get(2..4) == Some(&[0, 53]),
                    Read::Carries { .. } => false,
                };
                let dropped = captured && mark & 0xfff != ZTUNNEL_MARK;
                let verdict = if dropped { DROP } else { PASS };
                let done = f.run(Hook::Guard, mark, &packet);
                assert_eq!(done, Done { verdict, mark, packet: packet.clone() }, "{:?}", read(&packet));
                drops += u64::from(dropped);
            }
            let counters = f.node.counters(&f.pod).unwrap();
            let counted = counters.total(Counter::Guarded) + counters.total(Counter::GuardedDns);
            println!("{drops} of {PACKETS} dropped");
            assert_eq!(counted, drops);
        })
        .unwrap();
}

/// Clears the mark, and rewrites nothing but DNS.
#[test]
fn local_rewrites_dns_and_nothing_else() {
    let mut f = Fixture::new();
    f.pod
        .netns()
        .clone()
        .enter(|| {
            let own = [false, true].map(|v6| match f.pod.ip(v6) {
                IpAddr::V4(ip) => ip.octets().to_vec(),
                IpAddr::V6(ip) => ip.octets().to_vec(),
            });
            let mut queries = 0;
            for _ in 0..PACKETS {
                let packet = f.packet();
                let mark = *[0, 1, ZTUNNEL_MARK].choose(&mut f.rng).unwrap();
                let query = match read(&packet) {
                    Read::Carries { protocol: TCP | UDP, fragment: false, destination, transport } => {
                        mark != ZTUNNEL_MARK
                            && transport.get(2..4) == Some(&[0, 53])
                            && !ip_of(destination).is_loopback()
                            && !own.iter().any(|own| own == destination)
                    }
                    _ => false,
                };
                let done = f.run(Hook::Local, mark, &packet);
                assert_eq!(done.verdict, PASS, "{:?}", read(&packet));
                assert_eq!(done.mark, if mark == ZTUNNEL_MARK { INSIDE_MARK } else { mark });
                if !query {
                    assert_eq!(done.packet, packet, "{:?}", read(&packet));
                    continue;
                }
                queries += 1;
                assert_rewritten(&packet, &done.packet);
            }
            println!("{queries} of {PACKETS} queries");
            assert_eq!(f.node.counters(&f.pod).unwrap().total(Counter::Dns), queries);
        })
        .unwrap();
}

/// A query differs in destination, ports and checksums, and the sum of each header's words is what it was.
fn assert_rewritten(before: &[u8], after: &[u8]) {
    let (Read::Carries { protocol, transport: old, .. }, Read::Carries { destination, transport: new, .. }) =
        (read(before), read(after))
    else {
        panic!("no longer the same kind of packet");
    };
    let start = before.len() - old.len();
    let v6 = destination.len() == 16;
    assert!(IpAddr::is_loopback(&ip_of(destination)));
    assert_eq!(new[2..4], 15053_u16.to_be_bytes());
    let slot = u16::from_be_bytes([new[0], new[1]]);
    assert!((61_000..64_072).contains(&slot), "{slot}");
    let changed: Vec<usize> = (0..before.len()).filter(|&at| before[at] != after[at]).collect();
    let sum_at = start + if protocol == UDP { 6 } else { 16 };
    let address = if v6 { ETHERNET + 24..ETHERNET + 40 } else { ETHERNET + 16..ETHERNET + 20 };
    for at in changed {
        let expected = (start..start + 4).contains(&at)
            || (sum_at..sum_at + 2).contains(&at)
            || address.contains(&at)
            || !v6 && (ETHERNET + 10..ETHERNET + 12).contains(&at);
        assert!(expected, "byte {at} changed");
    }
    // UDP without a checksum stays without.
    let has_sum = before.get(sum_at..sum_at + 2).is_some_and(|sum| protocol == TCP || sum != [0, 0]);
    if has_sum {
        assert_eq!(sum(before, start, address.clone()), sum(after, start, address), "transport checksum");
    }
    if !v6 {
        assert_eq!(
            fold(&before[ETHERNET..ETHERNET + 20]),
            fold(&after[ETHERNET..ETHERNET + 20]),
            "IP checksum"
        );
    }
}

fn ip_of(bytes: &[u8]) -> IpAddr {
    match <[u8; 4]>::try_from(bytes) {
        Ok(v4) => v4.into(),
        Err(_) => <[u8; 16]>::try_from(bytes).unwrap().into(),
    }
}

/// Sum of the words that the transport checksum covers and that may change, and of the checksum itself.
fn sum(packet: &[u8], start: usize, address: std::ops::Range<usize>) -> u16 {
    let length = (packet.len() - start) / 2 * 2;
    fold(&[&packet[address], &packet[start..start + length]].concat())
}

fn fold(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // Two forms of zero.
    if sum == 0xffff { 0 } else { sum as u16 }
}
