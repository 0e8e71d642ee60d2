//! The kernel side: loading programs, pins, maps. One of the two rooms where `unsafe` may live.

mod btf;
pub mod heap;
mod link;
mod node;
mod object;
mod pod;

pub use node::{Adopted, NodeObjects};
pub use object::{ObjectError, Objects};
pub use pod::{Fill, Hook, OldConnections, PodDir, PodPrograms, ProgramCost, raw_fd};

use std::{io, path::PathBuf};

use aya::{
    Ebpf,
    programs::{Program, ProgramError},
};

/// What can go wrong between weir and the kernel's BPF subsystem.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A program or map could not be created.
    #[error("loading {what}: {source}")]
    Load {
        /// Program or map.
        what: &'static str,
        /// The kernel's answer, with the verifier's log where there is one.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A pin could not be made, opened or removed.
    #[error("{action} {}: {source}", path.display())]
    Pin {
        /// What was tried.
        action: &'static str,
        /// The pin or directory.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel's own description of its types does not say what is needed.
    #[error("kernel BTF: {0}")]
    Btf(String),
    /// A pod's record cannot be used.
    #[error("pod record: {0}")]
    Record(String),
    /// The objects are missing from this build.
    #[error(transparent)]
    Object(#[from] ObjectError),
}

impl KernelError {
    /// A map has no more room.
    pub fn is_full(&self) -> bool {
        use aya::{maps::MapError, sys::SyscallError};
        let Self::Load { source, .. } = self else { return false };
        let Some(MapError::SyscallError(SyscallError { io_error, .. })) = source.downcast_ref() else {
            return false;
        };
        matches!(io_error.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC))
    }

    fn load<E: std::error::Error + Send + Sync + 'static>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Load { what, source: Box::new(source) }
    }

    fn pin(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Pin { action, path, source }
    }
}

/// One of an object's programs, loaded or not.
fn program<'a, P>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut P, KernelError>
where
    &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    let program = ebpf.program_mut(name).ok_or_else(|| KernelError::Btf(format!("no program {name}")))?;
    program.try_into().map_err(KernelError::load(name))
}

/// Attempts before a load is given up.
const LOADS: u32 = 10;

/// Loads a program. Linux breaks the verifier off with EAGAIN when a signal for the thread is pending; that says nothing
/// of the program, and the next attempt finds the signal taken.
fn load_program(mut load: impl FnMut() -> Result<(), ProgramError>) -> Result<(), ProgramError> {
    for _ in 1..LOADS {
        match load() {
            Err(ProgramError::LoadError { io_error, .. })
                if io_error.raw_os_error() == Some(libc::EAGAIN) =>
            {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            result => return result,
        }
    }
    load()
}
