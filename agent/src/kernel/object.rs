//! The compiled programs: embedded at build time, or read from the directory that `WEIR_BPF_DIR` names.

use std::{env, fs, path::PathBuf};

include!(concat!(env!("OUT_DIR"), "/objects.rs"));

/// The programs are not there.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// Built without the programs.
    #[error("this build of weir has no eBPF programs in it; run `cargo xtask build-ebpf` and build again")]
    NotBuiltIn,
    /// `WEIR_BPF_DIR` names a directory without them.
    #[error("WEIR_BPF_DIR: cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// The two objects of the data path.
#[derive(Clone)]
pub struct Objects {
    /// Programs and maps of one pod.
    pub pod: Vec<u8>,
    /// Programs and maps of the node.
    pub node: Vec<u8>,
}

impl Objects {
    /// The objects this process shall use.
    pub fn get() -> Result<Self, ObjectError> {
        if let Some(dir) = env::var_os("WEIR_BPF_DIR") {
            let read = |name: &str| {
                let path = PathBuf::from(&dir).join(name);
                fs::read(&path).map_err(|source| ObjectError::Unreadable { path, source })
            };
            return Ok(Self { pod: read("weir-pod.bpf.o")?, node: read("weir-node.bpf.o")? });
        }
        match (POD, NODE) {
            (Some(pod), Some(node)) => Ok(Self { pod: pod.to_vec(), node: node.to_vec() }),
            _ => Err(ObjectError::NotBuiltIn),
        }
    }
}
