//! A whole chain of plugins (Debian's ptp, host-local and portmap, then ours), driven as a runtime drives it.
#![cfg(feature = "root")]

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use weir_tests::{
    app::App,
    cluster::{Cluster, gear, weir, weir_cni},
    cni::{Outcome, Sandbox},
    meshed::start_ztunnel,
    world::{Child, PIN_ROOT},
    ztunnel::Mesh,
};

const APP: u16 = 8080;
const DEBIAN: &str = "/usr/lib/cni";
const LEASES: &str = "/run/cni-leases";

const BINARIES: &str = "/run/cni-bin";
const CONFIGURATIONS: &str = "/run/net.d";

/// The node's network as it was, and `weir install` over it. Returns the plugins, ours last.
fn install() -> Vec<Value> {
    let list = json!({ "cniVersion": "1.0.0", "name": "chain", "plugins": [
        {
            "type": "ptp",
            "ipam": {
                "type": "host-local", "dataDir": LEASES,
                "ranges": [[{ "subnet": "10.90.0.0/24" }], [{ "subnet": "fd90::/64" }]],
                "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
            },
        },
        { "type": "portmap", "capabilities": { "portMappings": true } },
    ] });
    for dir in [BINARIES, CONFIGURATIONS] {
        std::fs::create_dir_all(dir).unwrap();
    }
    let file = format!("{CONFIGURATIONS}/10-chain.conflist");
    std::fs::write(&file, list.to_string()).unwrap();
    let plugin = weir_cni().unwrap();
    for said in ["installed in", "already in"] {
        let flags = [
            "install",
            "--cni-bin-dir",
            BINARIES,
            "--cni-conf-dir",
            CONFIGURATIONS,
            "--log-file",
            "/run/log",
        ];
        let output = Command::new(weir().unwrap()).args(flags).arg("--plugin").arg(&plugin).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).starts_with(said), "{output:?}");
    }
    let list: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let plugins = list["plugins"].as_array().unwrap().clone();
    let types: Vec<_> = plugins.iter().map(|plugin| plugin["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["ptp", "portmap", "weir-cni"]);
    plugins
}

fn program(plugin: &Value) -> PathBuf {
    match plugin["type"].as_str().unwrap() {
        "weir-cni" => PathBuf::from(BINARIES).join("weir-cni"),
        name => PathBuf::from(DEBIAN).join(name),
    }
}

fn call(cluster: &Cluster, sandbox: &Sandbox, verb: &str, plugin: &Value, previous: &Value) -> Outcome {
    let mut config = plugin.clone();
    config["cniVersion"] = json!("1.0.0");
    config["name"] = json!("chain");
    let mut call = sandbox
        .call(verb, &config)
        .with("CNI_PATH", Some(DEBIAN))
        .with("PATH", Some("/usr/sbin:/usr/bin:/sbin:/bin"));
    if previous.is_null() {
        config.as_object_mut().unwrap().remove("prevResult");
    } else {
        config["prevResult"] = previous.clone();
    }
    call.stdin = config.to_string();
    // A runtime's plugins run in the node's namespace.
    cluster.world.node.inside(|| call.make_with(&program(plugin)).unwrap())
}

/// Stops at the first error, as a runtime does.
fn add(cluster: &Cluster, sandbox: &Sandbox, plugins: &[Value]) -> Result<Value, String> {
    plugins.iter().try_fold(Value::Null, |previous, plugin| {
        let outcome = call(cluster, sandbox, "ADD", plugin, &previous);
        if outcome.success {
            Ok(outcome.stdout)
        } else {
            Err(format!("{}: {}", plugin["type"], outcome.error()))
        }
    })
}

fn del(cluster: &Cluster, sandbox: &Sandbox, plugins: &[Value], result: &Value) {
    for plugin in plugins.iter().rev() {
        let outcome = call(cluster, sandbox, "DEL", plugin, result);
        assert!(outcome.success, "{}: {}", plugin["type"], outcome.error());
    }
}

fn count(dir: &str) -> usize {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names
        .filter(|name| {
            name.to_str().is_some_and(|name| name.starts_with(|c: char| c.is_ascii_digit() || c == 'f'))
        })
        .count()
}

#[test]
fn a_real_chain() {
    let mut c = Cluster::new().unwrap();
    let _outside = App::start(&c.world.outside, APP).unwrap();
    c.namespace("shop", true);
    c.namespace("legacy", false);
    c.start_agent().unwrap();
    c.wait("the agent listens", || std::path::Path::new("/run/weir/cni.sock").exists()).unwrap();
    let ztunnel = start_ztunnel(&Mesh::default()).unwrap();
    assert!(ztunnel.wait_ready(Duration::from_secs(10)));
    let plugins = install();
    let pins = || count(&format!("{PIN_ROOT}/v1/pods"));
    let leases = || count(&format!("{LEASES}/chain"));

    for round in 0..5 {
        let shop = c.bare_sandbox("shop", &format!("in{round}")).unwrap();
        let legacy = c.bare_sandbox("legacy", &format!("out{round}")).unwrap();
        let mut results = Vec::new();
        for (sandbox, captured) in [(&shop, 1), (&legacy, 0)] {
            let result =
                add(&c, sandbox, &plugins).unwrap_or_else(|error| panic!("{error}\n{}", c.agent_log()));
            assert_eq!(result["ips"].as_array().unwrap().len(), 2, "{result}");
            for v6 in [false, true] {
                let before = ztunnel.log().counts().outbound;
                let mut command = Command::new(gear().unwrap());
                let to = c.world.outside.addr(v6, APP).to_string();
                command.args(["probe", &to]).stdin(Stdio::null()).stdout(Stdio::null());
                let mut process = Child::start_in(&sandbox.host, &mut command).unwrap();
                assert!(process.wait(Duration::from_secs(5)).unwrap().success(), "{to}");
                assert_eq!(ztunnel.log().counts().outbound - before, captured, "{to}");
            }
            results.push(result);
        }
        assert_eq!((pins(), leases()), (1, 4));
        for (sandbox, result) in [&shop, &legacy].into_iter().zip(&results) {
            del(&c, sandbox, &plugins, result);
        }
        c.wait("all is released", || (pins(), leases()) == (0, 0)).unwrap();
    }
    // Ours fails: the runtime takes the whole chain back.
    ztunnel.kill();
    let shop = c.bare_sandbox("shop", "late").unwrap();
    let error = add(&c, &shop, &plugins).unwrap_err();
    assert!(error.starts_with("\"weir-cni\"") && error.contains("no_ztunnel"), "{error}");
    del(&c, &shop, &plugins, &Value::Null);
    c.wait("all is released", || (pins(), leases()) == (0, 0)).unwrap();

    let flags = ["uninstall", "--cni-bin-dir", BINARIES, "--cni-conf-dir", CONFIGURATIONS];
    assert!(Command::new(weir().unwrap()).args(flags).status().unwrap().success());
    assert!(!PathBuf::from(BINARIES).join("weir-cni").exists());
    assert!(
        !std::fs::read_to_string(format!("{CONFIGURATIONS}/10-chain.conflist")).unwrap().contains("weir-cni")
    );
}
