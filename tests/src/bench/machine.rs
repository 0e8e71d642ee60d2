//! What machine the numbers are of, and whether anybody else worked on it meanwhile.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use serde::Serialize;

/// A kernel tick, as /proc counts time.
const TICK: Duration = Duration::from_millis(10);
/// What others may take of the machine before a run counts as disturbed, in percent.
const TOLERATED: f64 = 3.0;
/// What the hypervisor may take.
const STOLEN: f64 = 1.0;
/// Load average before the start that counts as others at work.
const LOAD: f64 = 0.5;

/// Where a run was made.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Release and version of the kernel.
    pub kernel: String,
    /// Processor model.
    pub processor: String,
    /// Processors.
    pub processors: usize,
    /// Memory, in MB.
    pub memory_mb: u64,
    /// What the kernel does against faults of the processor that cost calls.
    pub mitigations: Vec<String>,
    /// Versions of the programs compared with.
    pub programs: Vec<String>,
    /// Whether the programs measured here are optimised.
    pub optimised: bool,
}

impl Machine {
    /// This one.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn this() -> Result<Self> {
        let read = |path: &str| fs::read_to_string(path).with_context(|| path.to_owned());
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo")?, "MemTotal").context("MemTotal")?;
        let mut mitigations: Vec<String> = fs::read_dir("/sys/devices/system/cpu/vulnerabilities")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| Some((entry.file_name(), fs::read_to_string(entry.path()).ok()?)))
            .filter(|(_, state)| state.starts_with("Mitigation"))
            .map(|(name, state)| format!("{}: {}", name.to_string_lossy(), state.trim()))
            .collect();
        mitigations.sort();
        let version = |program: &str| crate::world::run(program, &["--version"]).ok();
        Ok(Self {
            kernel: format!(
                "{} {}",
                read("/proc/sys/kernel/osrelease")?.trim(),
                read("/proc/sys/kernel/version")?.trim()
            ),
            processor: field(&read("/proc/cpuinfo")?, "model name").unwrap_or_else(|| "unknown".into()),
            processors: std::thread::available_parallelism()?.get(),
            memory_mb: memory.trim_end_matches(" kB").parse::<u64>()? / 1024,
            mitigations,
            programs: ["iptables-legacy", "iptables-nft", "nft"]
                .into_iter()
                .filter_map(version)
                .map(|said| said.trim().to_owned())
                .collect(),
            optimised: !cfg!(debug_assertions),
        })
    }
}

/// Watches the machine over a run.
pub struct Watch {
    load: f64,
    machine: Ticks,
    own: Duration,
}

/// Time of all processors, in ticks: working, stolen by the hypervisor, all.
struct Ticks {
    busy: u64,
    stolen: u64,
    all: u64,
}

impl Ticks {
    fn now() -> Result<Self> {
        let stat = fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().context("/proc/stat is empty")?;
        let fields: Vec<u64> =
            line.split_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
        let [user, nice, system, idle, waiting, hard, soft, stolen, ..] = fields[..] else {
            anyhow::bail!("/proc/stat: {line}");
        };
        let busy = user + nice + system + hard + soft;
        Ok(Self { busy, stolen, all: busy + idle + waiting + stolen })
    }
}

fn own_time() -> Result<Duration> {
    let mut own = 0;
    for who in [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN] {
        let usage = getrusage(who)?;
        own += usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    }
    Ok(Duration::from_micros(own.unsigned_abs()))
}

impl Watch {
    /// From now on.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn start() -> Result<Self> {
        let load = fs::read_to_string("/proc/loadavg")?;
        let load = load.split(' ').next().context("/proc/loadavg is empty")?.parse()?;
        Ok(Self { load, machine: Ticks::now()?, own: own_time()? })
    }

    /// Until now: why the numbers are not to be trusted, if there is a reason. Programs that were started and waited
    /// for count as the run's own; the kernel's threads count as others.
    ///
    /// # Errors
    /// As [`Watch::start`].
    pub fn finish(self) -> Result<Option<String>> {
        let now = Ticks::now()?;
        let all = now.all.saturating_sub(self.machine.all).max(1) as f64;
        let percent = |ticks: f64| ticks.max(0.0) / all * 100.0;
        let own = (own_time()? - self.own).as_secs_f64() / TICK.as_secs_f64();
        let others = percent((now.busy - self.machine.busy) as f64 - own);
        let stolen = percent(now.stolen.saturating_sub(self.machine.stolen) as f64);
        let mut reasons = Vec::new();
        if self.load > LOAD {
            reasons.push(format!("load average of {} at the start", self.load));
        }
        if others > TOLERATED {
            reasons.push(format!("others took {others:.1} % of the machine"));
        }
        if stolen > STOLEN {
            reasons.push(format!("the hypervisor took {stolen:.1} %"));
        }
        if cfg!(debug_assertions) {
            reasons.push("a debug build".to_owned());
        }
        Ok((!reasons.is_empty()).then(|| reasons.join("; ")))
    }
}
