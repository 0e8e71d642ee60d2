//! `cargo xtask demo`: a node with three pods, a stand-in ztunnel and `weir agent`, shown as it goes.

use std::{
    io::{Read, Write},
    net::SocketAddr,
    process::{Command, ExitCode, Stdio},
    sync::{atomic::Ordering, mpsc},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{SigSet, Signal};
use weir_tests::{
    app::{App, Client},
    cluster::{self, Cluster, INTERRUPTED, Pod},
    meshed::start_ztunnel,
    world::{Child, Families, Host},
    ztunnel::{Accepted, Listener, Mesh, Ztunnel},
};

fn main() -> ExitCode {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
    // Before any thread: all inherit it, and only one waits for them.
    signals.thread_block().expect("signals can be blocked");
    let (ended, end) = mpsc::channel();
    let interrupted = ended.clone();
    std::thread::spawn(move || {
        let _ = signals.wait();
        INTERRUPTED.store(true, Ordering::SeqCst);
        // What a step waits for may never come; the kernel cleans up what the demo then cannot.
        std::thread::sleep(Duration::from_secs(8));
        let _ = interrupted.send(Err(anyhow::anyhow!("interrupted, and a step did not end")));
    });
    std::thread::spawn(move || ended.send(demo()));
    let result = end.recv().unwrap_or_else(|_| Err(anyhow::anyhow!("the demo's thread died")));
    let leftovers = cluster::leftovers().unwrap_or_default();
    match result {
        Ok(()) if leftovers.is_empty() => {
            println!("\nNothing is left behind.");
            ExitCode::SUCCESS
        }
        Ok(()) => {
            eprintln!("left behind: {}", leftovers.join(", "));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("\ndemo: {error:#}");
            if INTERRUPTED.load(Ordering::SeqCst) { ExitCode::from(130) } else { ExitCode::FAILURE }
        }
    }
}

/// Says what is about to be shown, does it, and says how it went.
fn step<T>(what: &str, work: impl FnOnce() -> Result<(T, String)>) -> Result<T> {
    if INTERRUPTED.load(Ordering::SeqCst) {
        bail!("interrupted");
    }
    print!("  {what} … ");
    std::io::stdout().flush()?;
    let (value, seen) = work().inspect_err(|_| println!("FAILED"))?;
    println!("{seen}");
    Ok(value)
}

/// The things on the node.
struct Node {
    cluster: Cluster,
    ztunnel: Ztunnel,
    web: Pod,
    db: Pod,
    batch: Pod,
    _apps: Vec<App>,
}

const APP: u16 = 8080;

fn demo() -> Result<()> {
    println!("A node with three running pods: shop/web and shop/db in the mesh, legacy/batch outside.\n");
    let mut node = step("namespaces, pods, API server, stand-in ztunnel", set_up)?;
    enrolment(&mut node)?;
    captured(&node)?;
    not_captured(&node)?;
    survival(&mut node)?;
    status()?;
    unenrolment(&node)?;
    step("stop the agent", || {
        node.cluster.stop_agent()?;
        Ok(((), "orderly".into()))
    })
}

fn set_up() -> Result<(Node, String)> {
    let began = Instant::now();
    let cluster = Cluster::new()?;
    cluster.namespace("shop", true);
    cluster.namespace("legacy", false);
    let web = cluster.pod("shop", "web", Families::Dual)?;
    let db = cluster.pod("shop", "db", Families::Dual)?;
    let batch = cluster.pod("legacy", "batch", Families::Dual)?;
    let outside = &cluster.world.outside;
    let apps = [&web.host, &db.host, &batch.host, outside].map(|host| App::start(host, APP));
    let apps = apps.into_iter().collect::<Result<Vec<App>>>()?;
    // What istiod would tell ztunnel: which addresses are reached by HBONE.
    let mesh = Mesh::default();
    [&web, &db].iter().for_each(|pod| mesh.join(&pod.uid, &weir_tests::world::addresses(&pod.host)));
    let ztunnel = start_ztunnel(&mesh)?;
    let took = format!("{:.1?}", began.elapsed());
    Ok((Node { cluster, ztunnel, web, db, batch, _apps: apps }, took))
}

fn enrolment(node: &mut Node) -> Result<()> {
    println!("\nEnrolment of pods that run already:");
    let mut old = Client::connect(&node.web.host, node.db.host.addr(false, APP))?;
    step("start `weir agent`", || {
        node.cluster.start_agent()?;
        Ok(((), "as a process of its own".into()))
    })?;
    for pod in [&node.web, &node.db] {
        step(
            &format!("{}/{} gets ambient.istio.io/redirection=enabled", pod.namespace, pod.host.name()),
            || {
                let took = node.cluster.wait_redirection(pod, Some("enabled"))?;
                Ok(((), format!("after {took:.1?}")))
            },
        )?;
    }
    step("legacy/batch is left alone", || {
        ensure!(node.cluster.redirection(&node.batch).is_none(), "it was annotated");
        Ok(((), "no annotation".into()))
    })?;
    step("a connection that is older than the enrolment goes on", || {
        old.exchange().context("it was broken")?;
        Ok(((), "untouched".into()))
    })
}

fn captured(node: &Node) -> Result<()> {
    println!("\nWhat the mesh sees:");
    for v6 in [false, true] {
        let (from, to) = (&node.web.host, node.db.host.addr(v6, APP));
        step(&format!("shop/web → shop/db {to}"), || {
            node.ztunnel.log().clear();
            let client = talk(from, to)?;
            let out = seen(&node.ztunnel, Listener::Outbound)?;
            let hbone = seen(&node.ztunnel, Listener::Hbone)?;
            ensure!(
                out.original_dst == to && hbone.original_dst == to,
                "another destination: {out:?} {hbone:?}"
            );
            ensure!(client.seen_as.ip() == from.ip(v6), "the app saw {}", client.seen_as);
            Ok((
                (),
                format!("15001 saw {}, 15008 delivered, app saw {}", out.original_dst, client.seen_as.ip()),
            ))
        })?;
        let outside = &node.cluster.world.outside;
        let to = outside.addr(v6, APP);
        step(&format!("shop/web → the world {to}"), || {
            node.ztunnel.log().clear();
            talk(from, to)?;
            let out = seen(&node.ztunnel, Listener::Outbound)?;
            ensure!(out.original_dst == to, "another destination: {out:?}");
            Ok(((), format!("15001 saw {} from {}", out.original_dst, out.client.ip())))
        })?;
        let to = from.addr(v6, APP);
        step(&format!("the world → shop/web {to}"), || {
            node.ztunnel.log().clear();
            let client = talk(outside, to)?;
            let inbound = seen(&node.ztunnel, Listener::Inbound)?;
            ensure!(inbound.original_dst == to, "another destination: {inbound:?}");
            ensure!(client.seen_as.ip() == outside.ip(v6), "the app saw {}", client.seen_as);
            Ok(((), format!("15006 saw {}, app saw {}", inbound.client.ip(), client.seen_as.ip())))
        })?;
    }
    Ok(())
}

fn not_captured(node: &Node) -> Result<()> {
    println!("\nWhat it leaves alone:");
    let pod = &node.web.host;
    for v6 in [false, true] {
        let (to, host) = (pod.addr(v6, APP), node.cluster.world.node.ip(v6));
        step(&format!("kubelet's probe → shop/web {to}"), || {
            node.ztunnel.log().clear();
            let seen_as = probe(&node.cluster, to)?;
            ensure!(seen_as.ip() == host, "the app saw {seen_as}");
            ensure!(node.ztunnel.log().accepted().is_empty(), "ztunnel saw it");
            Ok(((), format!("past ztunnel, app saw the node's address {}", seen_as.ip())))
        })?;
    }
    step("shop/web → itself, by its own address and by loopback", || {
        node.ztunnel.log().clear();
        talk(pod, pod.addr(false, APP))?;
        talk(pod, SocketAddr::from(([127, 0, 0, 1], APP)))?;
        ensure!(node.ztunnel.log().accepted().is_empty(), "ztunnel saw it");
        Ok(((), "past ztunnel".into()))
    })?;
    step("legacy/batch → the world", || {
        talk(&node.batch.host, node.cluster.world.outside.addr(false, APP))?;
        ensure!(node.ztunnel.log().accepted().is_empty(), "ztunnel saw it");
        Ok(((), "direct".into()))
    })
}

fn survival(node: &mut Node) -> Result<()> {
    println!("\nThe agent is killed:");
    step("SIGKILL, and shop/web → the world", || {
        node.cluster.kill_agent()?;
        node.ztunnel.log().clear();
        talk(&node.web.host, node.cluster.world.outside.addr(false, APP))?;
        seen(&node.ztunnel, Listener::Outbound)?;
        Ok(((), "still captured".into()))
    })?;
    step("start it again", || {
        node.cluster.start_agent()?;
        let cluster = &node.cluster;
        cluster.wait("pods are taken over", || cluster.agent_log().contains("taken over"))?;
        cluster.wait_redirection(&node.web, Some("enabled"))?;
        talk(&node.web.host, node.cluster.world.outside.addr(false, APP))?;
        Ok(((), "takes over what is pinned".into()))
    })
}

fn status() -> Result<()> {
    println!("\n$ weir status");
    let output = Command::new(cluster::weir()?).arg("status").output()?;
    ensure!(output.status.success(), "weir status: {}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8(output.stdout)?;
    ensure!(table.contains("shop/web") && table.contains("shop/db"), "pods are missing:\n{table}");
    table.lines().for_each(|line| println!("  {line}"));
    Ok(())
}

fn unenrolment(node: &Node) -> Result<()> {
    println!("\nThe namespace's label is removed:");
    step("the annotation goes", || {
        node.cluster.namespace("shop", false);
        let took = node.cluster.wait_redirection(&node.web, None)?;
        node.cluster.wait_redirection(&node.db, None)?;
        Ok(((), format!("after {took:.1?}")))
    })?;
    step("what was pinned goes", || {
        let pods = format!("{}/v1/pods", weir_tests::world::PIN_ROOT);
        let empty = || std::fs::read_dir(&pods).is_ok_and(|mut entries| entries.next().is_none());
        let took = node.cluster.wait("no pins", empty)?;
        Ok(((), format!("after {took:.1?}")))
    })?;
    step("shop/web → the world", || {
        node.ztunnel.log().clear();
        talk(&node.web.host, node.cluster.world.outside.addr(false, APP))?;
        ensure!(node.ztunnel.log().accepted().is_empty(), "ztunnel saw it");
        Ok(((), "direct again".into()))
    })
}

fn talk(from: &Host, to: SocketAddr) -> Result<Client> {
    let mut client = Client::connect(from, to).with_context(|| format!("{} → {to}", from.name()))?;
    client.exchange()?;
    Ok(client)
}

fn seen(ztunnel: &Ztunnel, listener: Listener) -> Result<Accepted> {
    let found = ztunnel.log().wait_for(Duration::from_secs(2), |accepted| accepted.listener == listener);
    let found = found.with_context(|| format!("ztunnel saw nothing on {listener:?}"))?;
    ensure!(found.so_original_dst.is_none(), "somebody runs NAT");
    Ok(found)
}

/// Connects as the kubelet does: from the node, out of the kubelet's cgroup.
fn probe(cluster: &Cluster, to: SocketAddr) -> Result<SocketAddr> {
    let mut command = Command::new(cluster::gear()?);
    command.args(["probe", &to.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Child::start_in(&cluster.world.node, &mut command)?;
    cluster.kubelet.add(child.pid())?;
    child.stdin().context("a pipe")?.write_all(b"\n")?;
    let mut said = String::new();
    child.stdout().context("a pipe")?.read_to_string(&mut said)?;
    said.trim().parse().with_context(|| format!("the probe says {said:?}"))
}
