//! Other programs: run to their end, or kept for as long as the test wants them.

use std::{
    os::unix::process::CommandExt,
    process::{Command, ExitStatus, Output},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::Host;

/// Runs a program to its end and returns what it printed.
///
/// # Errors
/// When it cannot be started or fails.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    finish(program, Command::new(program).args(args).output())
}

/// The same inside a namespace.
///
/// # Errors
/// As [`run`].
pub fn run_in(host: &Host, program: &str, args: &[&str]) -> Result<String> {
    // The child inherits the namespace of the thread that starts it.
    finish(program, host.inside(|| Command::new(program).args(args).output()))
}

fn finish(program: &str, output: std::io::Result<Output>) -> Result<String> {
    let output = output.with_context(|| format!("running {program}"))?;
    if !output.status.success() {
        bail!("{program}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A program that runs beside the test. Killed and waited for when dropped, and by the kernel when the thread that
/// started it ends.
#[derive(Debug)]
pub struct Child(std::process::Child);

impl Child {
    /// Starts it from the calling thread, which must outlive it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        // Ctrl-C is for the parent, which cleans up in its order.
        command.process_group(0);
        // SAFETY: two plain system calls that touch no memory of the parent.
        unsafe {
            command.pre_exec(|| {
                // What the parent blocks for itself is not for the child.
                nix::sys::signal::SigSet::empty().thread_set_mask()?;
                Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?)
            });
        }
        Ok(Self(command.spawn().with_context(|| format!("starting {:?}", command.get_program()))?))
    }

    /// Starts it inside a namespace, from the calling thread, which must outlive it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_in(host: &Host, command: &mut Command) -> Result<Self> {
        let netns = host.netns().fd().clone();
        // SAFETY: setns is a plain system call and touches no memory of the parent.
        unsafe {
            command.pre_exec(move || Ok(setns(&netns, CloneFlags::CLONE_NEWNET)?));
        }
        Self::start(command)
    }

    /// Its pid.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed())
    }

    /// Its standard input, where it was piped; once.
    pub fn stdin(&mut self) -> Option<std::process::ChildStdin> {
        self.0.stdin.take()
    }

    /// Its standard output, where it was piped; once.
    pub fn stdout(&mut self) -> Option<std::process::ChildStdout> {
        self.0.stdout.take()
    }

    /// Its standard error, where it was piped; once.
    pub fn stderr(&mut self) -> Option<std::process::ChildStderr> {
        self.0.stderr.take()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(self.pid(), signal)?)
    }

    /// SIGKILL, and waits for the end.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        let _ = self.0.kill();
        Ok(self.0.wait()?)
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// When it does not come in time.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("still running after {timeout:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
