//! One pod's programs and maps, and the directory they are pinned in.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, HashMap, LpmTrie, Map, MapData, PerCpuArray, lpm_trie::Key},
    programs::{ProgramFd, SchedClassifier, SkLookup, links::FdLink},
};
use nix::time::{ClockId, clock_gettime};
use weir_common::{Addr, Counters, DnsSlot, DnsSlotKey, ExcludedPort, PodConfig};

use super::{KernelError, Objects, link::Link, load_program, program};
use crate::domain::record::{LAYOUT, Record};

/// Where a tc program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Ingress of every interface but `lo`.
    Arrive,
    /// Ingress of `lo`.
    Local,
    /// Egress of every interface but `lo`.
    Guard,
}

impl Hook {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Arrive, Self::Local, Self::Guard];

    /// Name of the program, its pin and, with a prefix, its filter.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Arrive => "arrive",
            Self::Local => "local",
            Self::Guard => "guard",
        }
    }
}

/// Connections older than the enrolment, IPv4 and IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OldConnections {
    /// Since when the pod is captured, on CLOCK_BOOTTIME; zero before that.
    pub captured_at: Duration,
    /// Found at enrolment.
    pub adopted: [u64; 2],
    /// Ended by their deadline.
    pub expired: [u64; 2],
    /// Still there, both families, where somebody has looked.
    pub left: u64,
}

/// What a program costs the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramCost {
    /// Instructions the verifier walked (Linux 5.16): what loading costs.
    pub verified: u32,
    /// Bytes of machine code.
    pub jitted: u32,
}

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Which.
    pub map: &'static str,
    /// Entries in it.
    pub used: usize,
    /// Entries it has room for.
    pub room: usize,
}

/// Maps that are pinned with the pod. The node's map is opened by its own pin.
const MAPS: [&str; 8] = ["CONFIG", "COUNTERS", "LISTENERS", "OWN", "INSIDE", "PORTS", "CIDRS", "DNS_SLOTS"];
/// Room for a record: names of Kubernetes are at most 253 bytes each.
const RECORD: usize = 4096;
const STEER_LINK: &str = "steer_link";

/// Loads pods' programs. The object's file is parsed per pod (0.2 ms), the kernel's BTF never.
pub struct PodPrograms {
    object: Vec<u8>,
    version: String,
    /// aya's loader keeps the kernel's BTF and the pin paths; building one per load would parse BTF each time.
    loader: Mutex<EbpfLoader<'static>>,
}

impl PodPrograms {
    /// `probes` is the pin of the node's map of the kubelet's connections.
    pub fn new(objects: &Objects, probes: &Path) -> Self {
        let mut loader = EbpfLoader::new();
        // The programs need no relocation by it: not kept.
        loader.map_pin_path("PROBES", probes.to_owned());
        let mut hasher = DefaultHasher::new();
        objects.pod.hash(&mut hasher);
        let version = format!("{:016x}", hasher.finish());
        Self { object: objects.pod.clone(), version, loader: Mutex::new(loader) }
    }

    /// Tells these programs from those of another build. That two builds of the same programs may differ is no harm:
    /// the programs are replaced once more.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Loads programs and maps into `dir`, which must exist, attaches steer to the namespace and pins its link.
    pub fn load(&self, dir: &PodDir, netns: BorrowedFd<'_>) -> Result<(), KernelError> {
        let mut ebpf = self.with_maps_of(dir)?;
        for hook in Hook::ALL {
            let program = tc_program(&mut ebpf, hook)?;
            program.pin(dir.path.join(hook.name())).map_err(KernelError::load("a program's pin"))?;
        }
        let steer = steer_program(&mut ebpf)?;
        let link = steer.attach(netns).map_err(KernelError::load("steer's attachment"))?;
        let link: FdLink = steer.take_link(link).map_err(KernelError::load("steer's link"))?.into();
        link.pin(dir.path.join(STEER_LINK)).map_err(KernelError::load("steer's pin"))?;
        Ok(())
    }

    /// Puts these programs in the place of a pod's, over the maps it has: each at once, steer at its link, the others at
    /// their pins. To be repeated when it was broken off.
    pub fn replace(&self, dir: &PodDir) -> Result<(), KernelError> {
        let mut ebpf = self.with_maps_of(dir)?;
        for hook in Hook::ALL {
            let (pin, new) = (dir.path.join(hook.name()), dir.path.join(format!("new_{}", hook.name())));
            remove_file(&new)?;
            let program = tc_program(&mut ebpf, hook)?;
            program.pin(&new).map_err(KernelError::load("a program's pin"))?;
            fs::rename(&new, &pin).map_err(KernelError::pin("replacing", &pin))?;
        }
        let steer = steer_program(&mut ebpf)?.fd().map_err(KernelError::load("steer"))?.as_fd();
        let link = dir.path.join(STEER_LINK);
        Link::open(&link)
            .and_then(|link| link.set_program(steer))
            .map_err(KernelError::pin("updating", &link))
    }

    /// The object with a pod's maps: those that are pinned, the others new and pinned now.
    fn with_maps_of(&self, dir: &PodDir) -> Result<Ebpf, KernelError> {
        let mut loader = self.loader.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for map in MAPS {
            loader.map_pin_path(map, dir.path.join(map));
        }
        let ebpf = loader.load(&self.object).map_err(KernelError::load("a pod's maps"))?;
        crate::work::LOADS.add(Hook::ALL.len() + 1);
        Ok(ebpf)
    }
}

fn tc_program(ebpf: &mut Ebpf, hook: Hook) -> Result<&mut SchedClassifier, KernelError> {
    let classifier: &mut SchedClassifier = program(ebpf, hook.name())?;
    load_program(|| classifier.load()).map_err(KernelError::load(hook.name()))?;
    Ok(classifier)
}

fn steer_program(ebpf: &mut Ebpf) -> Result<&mut SkLookup, KernelError> {
    let steer: &mut SkLookup = program(ebpf, "steer")?;
    load_program(|| steer.load()).map_err(KernelError::load("steer"))?;
    Ok(steer)
}

/// The directory of one pod in bpffs.
#[derive(Clone, Debug)]
pub struct PodDir {
    path: PathBuf,
}

impl PodDir {
    /// Names a directory; nothing is touched.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn classifier(&self, hook: Hook) -> Result<SchedClassifier, KernelError> {
        SchedClassifier::from_pin(self.path.join(hook.name())).map_err(KernelError::load("a pinned program"))
    }

    /// A tc program, by its pin.
    pub fn program(&self, hook: Hook) -> Result<ProgramFd, KernelError> {
        let program = self.classifier(hook)?;
        let fd = program.fd().map_err(KernelError::load("a pinned program"))?;
        fd.try_clone().map_err(KernelError::pin("opening", self.path.join(hook.name())))
    }

    /// Kernel id of a tc program.
    pub fn program_id(&self, hook: Hook) -> Result<u32, KernelError> {
        let program = self.classifier(hook)?;
        Ok(program.info().map_err(KernelError::load("a pinned program"))?.id())
    }

    /// The map of the pod's own addresses.
    pub fn own(&self) -> Result<Vec<Addr>, KernelError> {
        let map = Map::HashMap(self.map("OWN")?);
        let map: HashMap<_, Addr, u8> = HashMap::try_from(map).map_err(KernelError::load("OWN"))?;
        Ok(map.keys().flatten().collect())
    }

    /// Whether the map of the pod's own addresses says exactly this.
    pub fn has_own(&self, addresses: &[Addr]) -> Result<bool, KernelError> {
        let present = self.own()?;
        Ok(addresses.iter().all(|own| present.contains(own))
            && present.iter().all(|own| addresses.contains(own)))
    }

    /// How many connections were older than the enrolment, and were ended for it.
    pub fn old_connections(&self) -> Result<OldConnections, KernelError> {
        let [a4, a6, e4, e6, at] = self.old_map()?.get(&0, 0).map_err(KernelError::load("OLD"))?;
        let captured_at = Duration::from_millis(at);
        Ok(OldConnections { captured_at, adopted: [a4, a6], expired: [e4, e6], left: 0 })
    }

    /// Notes that the pod is captured from now on, and how many connections are older than that.
    pub fn captured_now(&self, adopted: [u64; 2]) -> Result<(), KernelError> {
        let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
        let mut map = self.old_map()?;
        let [a4, a6, e4, e6, _] = map.get(&0, 0).map_err(KernelError::load("OLD"))?;
        let at = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        map.set(0, [a4 + adopted[0], a6 + adopted[1], e4, e6, at], 0).map_err(KernelError::load("OLD"))
    }

    /// Counts connections that were ended. Only the agent writes here, one step of a pod at a time.
    pub fn count_expired(&self, expired: [u64; 2]) -> Result<(), KernelError> {
        let mut map = self.old_map()?;
        let [a4, a6, e4, e6, at] = map.get(&0, 0).map_err(KernelError::load("OLD"))?;
        map.set(0, [a4, a6, e4 + expired[0], e6 + expired[1], at], 0).map_err(KernelError::load("OLD"))
    }

    fn old_map(&self) -> Result<Array<MapData, [u64; 5]>, KernelError> {
        Array::try_from(Map::Array(self.map("OLD")?)).map_err(KernelError::load("OLD"))
    }

    /// What the kernel says of a tc program: how much it had to verify, how large it became.
    pub fn program_cost(&self, hook: Hook) -> Result<ProgramCost, KernelError> {
        let program = self.classifier(hook)?;
        let info = program.info().map_err(KernelError::load("a pinned program"))?;
        Ok(ProgramCost {
            verified: info.verified_instruction_count().unwrap_or_default(),
            jitted: info.size_jitted(),
        })
    }

    /// Pins the pod's record, and what will be counted of its old connections.
    pub fn write_record(&self, record: &Record) -> Result<(), KernelError> {
        let bytes = record_bytes(record)?;
        let mut map: Array<MapData, [u8; RECORD]> =
            Array::create(1, 0).map_err(KernelError::load("the pod's record"))?;
        map.set(0, bytes, 0).map_err(KernelError::load("the pod's record"))?;
        map.pin(self.path.join("RECORD")).map_err(KernelError::load("the pod's record"))?;
        let old: Array<MapData, [u64; 5]> = Array::create(1, 0).map_err(KernelError::load("OLD"))?;
        old.pin(self.path.join("OLD")).map_err(KernelError::load("OLD"))
    }

    /// Replaces what the pod's record says.
    pub fn rewrite_record(&self, record: &Record) -> Result<(), KernelError> {
        let mut map: Array<MapData, [u8; RECORD]> = Array::try_from(Map::Array(self.map("RECORD")?))
            .map_err(KernelError::load("the pod's record"))?;
        map.set(0, record_bytes(record)?, 0).map_err(KernelError::load("the pod's record"))
    }

    /// Reads the pod's record.
    pub fn read_record(&self) -> Result<Record, KernelError> {
        let map: Array<_, [u8; RECORD]> = Array::try_from(Map::Array(self.map("RECORD")?))
            .map_err(KernelError::load("the pod's record"))?;
        let bytes = map.get(&0, 0).map_err(KernelError::load("the pod's record"))?;
        let length = bytes.iter().position(|&byte| byte == 0).unwrap_or(RECORD);
        let record: Record =
            serde_json::from_slice(&bytes[..length]).map_err(KernelError::load("the pod's record"))?;
        if record.layout == LAYOUT {
            Ok(record)
        } else {
            Err(KernelError::Record(format!("layout {}", record.layout)))
        }
    }

    /// Whether steer's link is there, and attached.
    pub fn has_link(&self) -> bool {
        Link::open(&self.path.join(STEER_LINK)).and_then(|link| link.is_attached()).unwrap_or(false)
    }

    /// Detaches steer.
    pub fn detach_steer(&self) -> Result<(), KernelError> {
        remove_file(&self.path.join(STEER_LINK))
    }

    /// The pod's switches.
    pub fn config(&self) -> Result<PodConfig, KernelError> {
        let map: Array<_, PodConfig> =
            Array::try_from(Map::Array(self.map("CONFIG")?)).map_err(KernelError::load("CONFIG"))?;
        map.get(&0, 0).map_err(KernelError::load("CONFIG"))
    }

    /// Replaces the pod's switches as a whole.
    pub fn set_config(&self, config: PodConfig) -> Result<(), KernelError> {
        let mut map: Array<_, PodConfig> =
            Array::try_from(Map::Array(self.map("CONFIG")?)).map_err(KernelError::load("CONFIG"))?;
        map.set(0, config, 0).map_err(KernelError::load("CONFIG"))
    }

    /// Makes the map of the pod's own addresses say exactly this.
    pub fn set_own(&self, addresses: &[Addr]) -> Result<(), KernelError> {
        self.set_members("OWN", addresses)
    }

    /// Makes the map of excluded ports say exactly this.
    pub fn set_excluded_ports(&self, ports: &[ExcludedPort]) -> Result<(), KernelError> {
        self.set_members("PORTS", ports)
    }

    /// The map of excluded ports.
    pub fn excluded_ports(&self) -> Result<Vec<ExcludedPort>, KernelError> {
        let map = Map::HashMap(self.map("PORTS")?);
        let map: HashMap<_, ExcludedPort, u8> = HashMap::try_from(map).map_err(KernelError::load("PORTS"))?;
        Ok(map.keys().flatten().collect())
    }

    /// The map of excluded networks.
    pub fn excluded_networks(&self) -> Result<Vec<(Addr, u32)>, KernelError> {
        let map = Map::LpmTrie(self.map("CIDRS")?);
        let map: LpmTrie<_, Addr, u8> = LpmTrie::try_from(map).map_err(KernelError::load("CIDRS"))?;
        Ok(map.keys().flatten().map(|key| (key.data(), key.prefix_len())).collect())
    }

    /// Makes the map of excluded networks say exactly this; prefixes count in mapped addresses.
    pub fn set_excluded_networks(&self, networks: &[(Addr, u32)]) -> Result<(), KernelError> {
        let map = Map::LpmTrie(self.map("CIDRS")?);
        let mut map: LpmTrie<_, Addr, u8> = LpmTrie::try_from(map).map_err(KernelError::load("CIDRS"))?;
        let present: Vec<Key<Addr>> = map.keys().flatten().collect();
        for (address, prefix) in networks {
            map.insert(&Key::new(*prefix, *address), 1, 0).map_err(KernelError::load("CIDRS"))?;
        }
        for key in present {
            if !networks.contains(&(key.data(), key.prefix_len())) {
                map.remove(&key).map_err(KernelError::load("CIDRS"))?;
            }
        }
        Ok(())
    }

    /// Makes a hash map that is a set have exactly these members: new ones first.
    fn set_members<K: Pod + PartialEq>(&self, name: &'static str, members: &[K]) -> Result<(), KernelError> {
        let map = Map::HashMap(self.map(name)?);
        let mut map: HashMap<_, K, u8> = HashMap::try_from(map).map_err(KernelError::load(name))?;
        for member in members {
            map.insert(member, 1, 0).map_err(KernelError::load(name))?;
        }
        let stale: Vec<K> = map.keys().flatten().filter(|old| !members.contains(old)).collect();
        for member in stale {
            map.remove(&member).map_err(KernelError::load(name))?;
        }
        Ok(())
    }

    /// How full the maps are that take no more when they are full. Those with a policy to evict are never.
    pub fn fill(&self) -> Result<[Fill; 4], KernelError> {
        Ok([
            self.fill_of::<Addr, u8>("OWN")?,
            self.fill_of::<ExcludedPort, u8>("PORTS")?,
            self.networks_fill()?,
            self.fill_of::<DnsSlotKey, DnsSlot>("DNS_SLOTS")?,
        ])
    }

    fn fill_of<K: Pod, V: Pod>(&self, map: &'static str) -> Result<Fill, KernelError> {
        let data = self.map(map)?;
        let room = data.info().map_err(KernelError::load(map))?.max_entries() as usize;
        let entries: HashMap<_, K, V> =
            HashMap::try_from(Map::HashMap(data)).map_err(KernelError::load(map))?;
        // Bounded: entries that come and go meanwhile can have the walk begin anew.
        Ok(Fill { map, used: entries.keys().take(room).filter(Result::is_ok).count(), room })
    }

    fn networks_fill(&self) -> Result<Fill, KernelError> {
        let map = "CIDRS";
        let room = self.map(map)?.info().map_err(KernelError::load(map))?.max_entries() as usize;
        Ok(Fill { map, used: self.excluded_networks()?.len(), room })
    }

    /// The pod's counters, over all CPUs.
    pub fn counters(&self) -> Result<Counters, KernelError> {
        let map: PerCpuArray<_, Counters> = PerCpuArray::try_from(Map::PerCpuArray(self.map("COUNTERS")?))
            .map_err(KernelError::load("COUNTERS"))?;
        let per_cpu = map.get(&0, 0).map_err(KernelError::load("COUNTERS"))?;
        let mut sum = Counters::default();
        per_cpu.iter().for_each(|cpu| sum.add(cpu));
        Ok(sum)
    }

    fn map(&self, name: &str) -> Result<MapData, KernelError> {
        MapData::from_pin(self.path.join(name)).map_err(KernelError::load("a pinned map"))
    }

    /// Removes every pin and the directory. Succeeds when there is nothing.
    pub fn remove(&self) -> Result<(), KernelError> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(KernelError::pin("reading", &self.path)(error)),
        };
        for entry in entries.flatten() {
            remove_file(&entry.path())?;
        }
        fs::remove_dir(&self.path).map_err(KernelError::pin("removing", &self.path))
    }
}

fn record_bytes(record: &Record) -> Result<[u8; RECORD], KernelError> {
    let json = serde_json::to_vec(record).map_err(KernelError::load("the pod's record"))?;
    let mut bytes = [0; RECORD];
    bytes
        .get_mut(..json.len())
        .ok_or_else(|| KernelError::Record(format!("{} bytes do not fit", json.len())))?
        .copy_from_slice(&json);
    Ok(bytes)
}

/// Descriptor of a pinned program, for a netlink message.
pub fn raw_fd(fd: &ProgramFd) -> u32 {
    use std::os::fd::AsRawFd;
    fd.as_fd().as_raw_fd().cast_unsigned()
}

pub(super) fn remove_file(path: &Path) -> Result<(), KernelError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(KernelError::pin("removing", path)(error))
        }
        _ => Ok(()),
    }
}
