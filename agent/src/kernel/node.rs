//! What one node needs of the kernel: the map of the kubelet's connections, probe on its cgroup, and adopt.

use std::{
    fs::{self, File},
    io::Read,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Mutex,
};

use aya::{
    Btf as KernelBtf, Ebpf, EbpfLoader,
    maps::Array,
    programs::{CgroupAttachMode, Iter, SockOps, links::FdLink},
};
use weir_common::{NodeConfig, SocketNote, SocketVerdict};

use super::{KernelError, Objects, btf::Btf, load_program, pod::remove_file, program};
use crate::netns::Netns;

/// Loaded once per node.
pub struct NodeObjects {
    dir: PathBuf,
    ebpf: Mutex<Ebpf>,
}

/// What one pass of adopt found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Connections that are marked as older than the enrolment, by this pass or before: IPv4, IPv6.
    pub old: [u64; 2],
    /// Connections whose handshake was not complete.
    pub unfinished: usize,
    /// Connections the kernel would not let be marked.
    pub failed: usize,
}

impl NodeObjects {
    /// Loads the node's programs; maps and link are pinned in `dir`, which is made.
    pub fn load(objects: &Objects, dir: &Path) -> Result<Self, KernelError> {
        fs::create_dir_all(dir).map_err(KernelError::pin("making", dir))?;
        let offsets = Btf::of_kernel()?.offsets()?;
        let kernel_btf = KernelBtf::from_sys_fs().map_err(KernelError::load("kernel BTF"))?;
        let mut ebpf = EbpfLoader::new()
            .btf(Some(&kernel_btf))
            .override_global("OFFSETS", &offsets, true)
            .map_pin_path("PROBES", dir.join("PROBES"))
            .map_pin_path("NODE", dir.join("NODE"))
            .load(&objects.node)
            .map_err(KernelError::load("the node's maps"))?;
        for name in ["adopt_all", "adopt_rest"] {
            program::<Iter>(&mut ebpf, name)?.load("tcp", &kernel_btf).map_err(KernelError::load("adopt"))?;
        }
        Ok(Self { dir: dir.to_owned(), ebpf: Mutex::new(ebpf) })
    }

    /// Pin of the map of the kubelet's connections.
    pub fn probes(&self) -> PathBuf {
        self.dir.join("PROBES")
    }

    /// Exempts what the cgroup opens in the host's namespace from now on. Replaces an earlier attachment after the
    /// new one is in place.
    pub fn attach_probe(&self, cgroup: &Path, host: &Netns) -> Result<(), KernelError> {
        let directory = File::open(cgroup).map_err(KernelError::pin("opening cgroup", cgroup))?;
        let mut ebpf = self.lock();
        let map = ebpf.map_mut("NODE").ok_or_else(|| KernelError::Btf("no map NODE".into()))?;
        let mut node: Array<_, NodeConfig> = Array::try_from(map).map_err(KernelError::load("NODE"))?;
        node.set(0, NodeConfig { host_cookie: host.cookie() }, 0).map_err(KernelError::load("NODE"))?;
        let program: &mut SockOps = program(&mut ebpf, "probe")?;
        if program.fd().is_err() {
            load_program(|| program.load()).map_err(KernelError::load("probe"))?;
        }
        // A cgroup link takes no flags: links of several owners run one after the other.
        let link = program
            .attach(directory.as_fd(), CgroupAttachMode::Single)
            .map_err(KernelError::load("probe's attachment"))?;
        let link = program.take_link(link).map_err(KernelError::load("probe's link"))?;
        let link = FdLink::try_from(link).map_err(KernelError::load("probe's link"))?;
        let (pin, new) = (self.dir.join("probe_link"), self.dir.join("probe_link_new"));
        let _ = fs::remove_file(&new);
        link.pin(&new).map_err(KernelError::load("probe's pin"))?;
        let _ = fs::remove_file(&pin);
        fs::rename(&new, &pin).map_err(KernelError::pin("renaming", &new))
    }

    /// Exempts nobody any more; what was exempt and is open stays so until it is closed.
    pub fn detach_probe(&self) -> Result<(), KernelError> {
        remove_file(&self.dir.join("probe_link"))
    }

    /// First pass, before the rules: marks every connection of the namespace.
    pub fn adopt_all(&self, netns: &Netns) -> Result<Adopted, KernelError> {
        self.adopt("adopt_all", netns)
    }

    /// Later passes, after the rules: marks every connection that does not go over `lo`.
    pub fn adopt_rest(&self, netns: &Netns) -> Result<Adopted, KernelError> {
        self.adopt("adopt_rest", netns)
    }

    fn adopt(&self, name: &'static str, netns: &Netns) -> Result<Adopted, KernelError> {
        let link = {
            let mut ebpf = self.lock();
            let iterator: &mut Iter = program(&mut ebpf, name)?;
            let link = iterator.attach().map_err(KernelError::load("adopt's attachment"))?;
            iterator.take_link(link).map_err(KernelError::load("adopt's link"))?
        };
        // The iterator walks the sockets of the namespace of the thread that opens it.
        let notes = netns
            .enter(|| -> Result<Vec<u8>, KernelError> {
                let mut notes = Vec::new();
                let mut file = link.into_file().map_err(KernelError::load("adopt's run"))?;
                file.read_to_end(&mut notes).map_err(KernelError::pin("running", "adopt"))?;
                Ok(notes)
            })
            .map_err(KernelError::load("the namespace"))??;
        let mut sum = Adopted::default();
        for note in notes.chunks_exact(size_of::<SocketNote>()) {
            let word = |at: usize| u32::from_ne_bytes([note[at], note[at + 1], note[at + 2], note[at + 3]]);
            let (verdict, v6) = (word(0), word(8) == 1);
            if verdict == SocketVerdict::Adopted as u32 || verdict == SocketVerdict::Old as u32 {
                sum.old[usize::from(v6)] += 1;
            } else if verdict == SocketVerdict::Unfinished as u32 {
                sum.unfinished += 1;
            } else if verdict == SocketVerdict::Failed as u32 {
                sum.failed += 1;
            }
        }
        Ok(sum)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Ebpf> {
        self.ebpf.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
