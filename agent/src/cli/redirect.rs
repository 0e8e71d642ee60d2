//! `weir redirect`: the data path by hand, for debugging and for driving other test-suites.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};

use super::{Degraded, Paths};
use crate::{
    domain::{
        overrides::{Defaults, Overrides},
        workload::{PodUid, WorkloadInfo},
    },
    kernel::Objects,
    netns::Netns,
    preflight,
    redirect::{Owner, Redirector, Settings},
};

/// What short connections get to come to their end.
const GRACE: Duration = Duration::from_millis(250);

#[derive(Debug, Args)]
pub struct RedirectArgs {
    #[command(subcommand)]
    action: Action,
    /// The namespace.
    #[arg(long, global = true, default_value = "/proc/self/ns/net", value_name = "PATH")]
    netns: PathBuf,
    /// Leave DNS alone.
    #[arg(long, global = true)]
    no_dns: bool,
    #[command(flatten)]
    paths: Paths,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum Action {
    /// Captures new connections; those that exist go on.
    Enable,
    /// Ends captured connections and removes everything.
    Disable,
    /// What is pinned for the namespace, and what is missing.
    Show,
}

pub fn run(args: &RedirectArgs) -> Result<()> {
    preflight::check(&args.paths)?;
    let netns = Netns::open(&args.netns)?;
    let settings = Settings { root: args.paths.bpffs.clone(), proc: args.paths.proc.clone() };
    let overrides = Overrides::none(Defaults { dns: !args.no_dns, ..Defaults::default() });
    let redirector = Redirector::open(settings, &Objects::get()?)?;
    match args.action {
        Action::Enable => {
            redirector.prepare(&by_hand(&netns), &netns).context("preparing")?;
            let old = redirector.switch_on(&netns, &overrides).context("switching on")?;
            println!("captured; {} older connections go on", old.left);
        }
        Action::Disable => {
            redirector.drain(&netns, GRACE).context("draining")?;
            redirector.switch_off(&netns).context("switching off")?;
            println!("not captured");
        }
        Action::Show => show(&redirector, &netns, &overrides)?,
    }
    Ok(())
}

/// Nobody's pod.
fn by_hand(netns: &Netns) -> Owner {
    let name = format!("netns-{}", netns.cookie());
    let info = WorkloadInfo { name: name.clone(), namespace: "-".into(), service_account: "-".into() };
    Owner { uid: PodUid::from(name.as_str()), info }
}

fn show(redirector: &Redirector, netns: &Netns, overrides: &Overrides) -> Result<()> {
    let Some(pinned) = redirector.pinned().into_iter().find(|pod| pod.record.cookie == netns.cookie()) else {
        println!("not captured");
        return Ok(());
    };
    println!("captured as {}/{} since {}", pinned.record.namespace, pinned.record.name, pinned.record.since);
    for counter in weir_common::Counter::ALL {
        let total = pinned.counters.total(*counter);
        if total > 0 {
            println!("  {:<20} {total}", counter.name());
        }
    }
    let missing = redirector.verify(netns, overrides)?.missing();
    if !missing.is_empty() {
        bail!(Degraded(format!("missing: {}", missing.join(", "))));
    }
    Ok(())
}
