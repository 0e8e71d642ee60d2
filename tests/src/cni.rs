//! A container runtime, as far as a CNI plugin sees one: sandboxes, and calls of the plugin's program.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{
    cluster::weir_cni,
    world::{self, Host},
};

/// A pod before its first process: a namespace, and an object in the API that has no address yet.
pub struct Sandbox {
    /// The namespace.
    pub host: Host,
    /// Namespace of the object.
    pub namespace: String,
    /// UID of the object.
    pub uid: String,
    /// Container id of the sandbox.
    pub container: String,
}

/// What came of a call.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Exit status 0.
    pub success: bool,
    /// What was on standard output: null for nothing.
    pub stdout: Value,
}

impl Outcome {
    /// The message of the error, with its code; empty for a success.
    pub fn error(&self) -> String {
        if self.success { String::new() } else { format!("{}: {}", self.stdout["code"], self.stdout["msg"]) }
    }
}

/// One call of the plugin: environment and standard input.
#[derive(Clone, Debug)]
pub struct Call {
    /// The environment, all of it.
    pub env: Vec<(&'static str, String)>,
    /// Standard input.
    pub stdin: String,
}

impl Call {
    /// Makes it.
    ///
    /// # Errors
    /// When there is no such program, or it prints something else than JSON.
    pub fn make(&self) -> Result<Outcome> {
        self.make_with(&weir_cni()?)
    }

    /// The same call of another plugin.
    ///
    /// # Errors
    /// As [`Call::make`].
    pub fn make_with(&self, program: &Path) -> Result<Outcome> {
        let mut child = Command::new(program)
            .env_clear()
            .envs(self.env.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| program.display().to_string())?;
        // It may have failed already, without reading.
        let _ = child.stdin.take().context("a pipe")?.write_all(self.stdin.as_bytes());
        let output = child.wait_with_output()?;
        let stdout = match output.stdout.as_slice() {
            [] => Value::Null,
            text => serde_json::from_slice(text)
                .with_context(|| format!("not JSON: {}", String::from_utf8_lossy(text)))?,
        };
        Ok(Outcome { success: output.status.success(), stdout })
    }

    /// The same with one variable set otherwise, or unset.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: Option<&str>) -> Self {
        self.env.retain(|(known, _)| *known != name);
        self.env.extend(value.map(|value| (name, value.to_owned())));
        self
    }
}

/// The plugin's entry of a network configuration.
pub fn config() -> Value {
    json!({
        "cniVersion": "1.1.0",
        "name": "pod-network",
        "type": "weir-cni",
        "logFile": "/run/weir-cni.log",
        "excludeNamespaces": ["kube-system"],
        "ownNamespace": "weir",
    })
}

impl Sandbox {
    /// A namespace as the sandbox of a pod.
    pub(crate) fn of(host: Host, namespace: &str, uid: &str) -> Self {
        let container = format!("{:032x}", rand::random::<u128>());
        Self { host, namespace: namespace.to_owned(), uid: uid.to_owned(), container }
    }

    /// What the plugins before ours have made of it.
    pub fn prev_result(&self) -> Value {
        let ips = world::addresses(&self.host);
        let ips = ips.iter().map(|ip| {
            let bits = if ip.is_ipv4() { 24 } else { 64 };
            json!({ "address": format!("{ip}/{bits}"), "interface": 1 })
        });
        json!({
            "cniVersion": "1.1.0",
            "interfaces": [
                { "name": "veth0", "mac": "02:00:00:00:00:01" },
                { "name": "eth0", "sandbox": self.host.path(), "mtu": 1500 },
            ],
            "ips": ips.collect::<Vec<_>>(),
            "routes": [{ "dst": "0.0.0.0/0" }],
            "dns": { "nameservers": ["10.96.0.10"] },
            "somethingOfSomebody": { "else": [1, null, 2.5] },
        })
    }

    /// A call about it.
    pub fn call(&self, verb: &str, config: &Value) -> Call {
        let mut config = config.clone();
        if matches!(verb, "ADD" | "CHECK" | "DEL") {
            config["prevResult"] = self.prev_result();
        }
        let Self { host, namespace, uid, container } = self;
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={container};K8S_POD_UID={uid}",
            host.name()
        );
        let env = vec![
            ("CNI_COMMAND", verb.to_owned()),
            ("CNI_CONTAINERID", container.clone()),
            ("CNI_NETNS", host.path().display().to_string()),
            ("CNI_IFNAME", "eth0".to_owned()),
            ("CNI_ARGS", args),
            ("CNI_PATH", "/opt/cni/bin".to_owned()),
        ];
        Call { env, stdin: config.to_string() }
    }

    /// ADD, as [`config`] has it.
    ///
    /// # Errors
    /// As [`Call::make`].
    pub fn add(&self) -> Result<Outcome> {
        self.call("ADD", &config()).make()
    }

    /// DEL.
    ///
    /// # Errors
    /// As [`Call::make`].
    pub fn del(&self) -> Result<Outcome> {
        self.call("DEL", &config()).make()
    }

    /// File of its namespace.
    pub fn path(&self) -> PathBuf {
        self.host.path()
    }
}
