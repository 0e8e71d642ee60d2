//! `weir agent`: one node's parts, put together.
//!
//! Start order: sockets for ztunnel and the CNI plugin bound → the plugin served, as far as can be → watches listed →
//! pins of an earlier agent taken over → ztunnel served → pods reconciled. ztunnel may connect at any time; it gets its snapshot when there is one that is complete.

mod args;
mod data_path;
mod kubelet;
mod tracked;
mod verify;
mod ztunnel;

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
pub use args::AgentArgs;
use data_path::NodeDataPath;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use tracing::info;
use tracked::Tracked;

use crate::{
    admin::{Admin, Sources, log},
    cache::{members::Members, pods::Pods},
    cni::{self, handed::Handed, requests::Requests},
    domain::{config::AgentConfig, overrides::Defaults},
    kernel::{Objects, heap},
    kube::{annotate::Patcher, client, events, lookup::Lookup},
    netns::{Netns, discover::Discovery},
    preflight,
    reconcile::Reconciler,
    redirect::{Redirector, Settings, claim},
    work,
    zds::server::Server,
};

/// How long the agent before this one may take to end.
const PREDECESSOR: Duration = Duration::from_secs(5);

/// Notices that wait to become Events; more are dropped.
const NOTICES: usize = 256;

/// Runs until SIGTERM or SIGINT. The data path stays when the agent goes.
pub fn run(args: AgentArgs) -> Result<()> {
    let config = args.config()?;
    preflight::check(&args.paths)?;
    let level = log::start(args.log_json)?;
    heap::one_arena();
    // Before the sockets: an agent that is one too many must not take them from the first.
    let _claim = claim(&args.paths.bpffs, PREDECESSOR)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let stopped = runtime.block_on(async {
        tokio::select! {
            result = serve(args, config, level) => result,
            signal = terminated() => signal,
        }
    });
    // Steps on blocking threads are left to their end, but not waited for: each can be repeated.
    runtime.shutdown_background();
    stopped
}

async fn serve(args: AgentArgs, config: AgentConfig, level: log::Level) -> Result<()> {
    let members = Members::new(args.nack_backoff());
    let server = Server::bind(args.zds(), members.clone())?;
    let admin = Admin::bind(args.metrics_addr, args.health_addr, &args.admin_socket).await?;
    let plugins = cni::server::Server::bind(&args.cni_socket)?;
    let client = client::connect(args.kubeconfig.as_deref()).await?;
    let (notices, told) = mpsc::channel(NOTICES);
    let (changed, mut changes) = mpsc::unbounded_channel();
    let tracked = Tracked::new(changed);
    let (redirector, discovery, host) = {
        let args = args.clone();
        tokio::task::spawn_blocking(move || open(&args)).await??
    };
    let redirector = Arc::new(redirector);
    tokio::spawn(tracked.clone().watch_deadlines(redirector.clone()));
    let defaults = Defaults { dns: config.dns_capture, existing: args.existing()? };
    let handed = Handed::default();
    let data_path = NodeDataPath::new(
        redirector.clone(),
        discovery,
        defaults,
        tracked.clone(),
        handed.clone(),
        notices.clone(),
    );
    info!(node = config.node_name, "data path ready");

    let cache = Arc::new(Pods::new(config.policy()));
    let watches = tokio::spawn(crate::kube::run(client.clone(), config.clone(), cache.clone()));
    tokio::spawn(events::run(client.clone(), config.clone(), told));

    tokio::spawn(cni::decisions::keep_saved(cache.clone(), args.decisions.clone()));

    let port = ztunnel::Port::new(members.clone());
    let mut reconciler = Reconciler::new(
        cache.clone(),
        config.reconcile.clone(),
        data_path,
        port,
        Patcher::new(client.clone()),
    )
    .with_notices(notices);
    let handle = reconciler.handle();
    let pinned = redirector.clone();
    tokio::spawn(admin.run(Sources {
        cache: cache.clone(),
        members: members.clone(),
        zds: server.counters(),
        reconciler: handle.clone(),
        bpffs: args.paths.bpffs.clone(),
        node: config.node_name.clone(),
        log: level,
    }));
    let home = host.clone();
    let requests = Requests {
        cache,
        reconciler: handle.clone(),
        handed,
        members: members.clone(),
        host,
        lookup: Lookup::new(client),
        owner_of: Arc::new(move |cookie| pinned.owner_of(cookie)),
    };
    let plugins = tokio::spawn(plugins.run(requests));
    reconciler.recover().await;
    members.set_complete();
    tokio::spawn(ztunnel::retry_on_arrival(members, handle.clone()));
    verify::keep_glancing(tracked, handle.clone(), home, args.verify_interval()?)
        .context("the verifier's thread")?;
    tokio::spawn(async move {
        while let Some(uid) = changes.recv().await {
            handle.recheck([uid]);
        }
    });
    tokio::spawn(kubelet::keep_exempt(redirector, args.probes()?, args.paths.clone()));
    tokio::select! {
        () = server.run() => {}
        () = reconciler.run() => {}
        ended = plugins => ended.context("serving the CNI plugin")?,
        ended = watches => ended.context("watching the API server")?,
    }
    Ok(())
}

/// Everything that touches the kernel at start.
fn open(args: &AgentArgs) -> Result<(Redirector, Discovery, Netns)> {
    let host = Netns::open(&args.paths.host_netns()).context("the host's network namespace")?;
    let settings = Settings { root: args.paths.bpffs.clone(), proc: args.paths.proc.clone() };
    let redirector = Redirector::open(settings, &Objects::get()?)?;
    redirector.clear_leftovers().context("clearing what an agent that was killed has left")?;
    heap::give_back();
    Ok((redirector, Discovery::new(args.paths.proc.clone(), host.clone()), host))
}

async fn terminated() -> Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    let (loads, netlink, visits) = (work::LOADS.get(), work::NETLINK.get(), work::VISITS.get());
    info!(loads, netlink, visits, "stopping; pods stay captured");
    Ok(())
}
