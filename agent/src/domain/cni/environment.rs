//! What a runtime says in the environment.

use super::{CniError, code};

/// `CNI_COMMAND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A container is added to the network.
    Add,
    /// It leaves.
    Del,
    /// Is all in place?
    Check,
    /// Could a container be added?
    Status,
    /// All but these containers are gone.
    Gc,
    /// Which versions are spoken?
    Version,
}

/// The variables, checked as far as the verb needs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// `CNI_COMMAND`.
    pub verb: Verb,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_NETNS`: a path; may be empty with DEL.
    pub netns: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `CNI_ARGS`.
    pub pod: PodArgs,
}

/// Of `CNI_ARGS`, what names the pod. Empty where the runtime is not Kubernetes'.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodArgs {
    /// `K8S_POD_NAMESPACE`.
    pub namespace: String,
    /// `K8S_POD_NAME`.
    pub name: String,
    /// `K8S_POD_UID`; older runtimes leave it out.
    pub uid: String,
    /// `K8S_POD_INFRA_CONTAINER_ID`: the sandbox.
    pub sandbox: String,
}

impl Environment {
    /// Reads it through `get`.
    ///
    /// # Errors
    /// When the command is unknown, or a variable it needs is missing.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, CniError> {
        let var = |name: &str| get(name).unwrap_or_default();
        let verb = match var("CNI_COMMAND").as_str() {
            "ADD" => Verb::Add,
            "DEL" => Verb::Del,
            "CHECK" => Verb::Check,
            "STATUS" => Verb::Status,
            "GC" => Verb::Gc,
            "VERSION" => Verb::Version,
            "" => return Err(invalid("CNI_COMMAND is not set")),
            other => return Err(invalid(&format!("CNI_COMMAND {other:?} is not known"))),
        };
        let needed: &[&str] = match verb {
            Verb::Add | Verb::Check => &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"],
            Verb::Del => &["CNI_CONTAINERID", "CNI_IFNAME"],
            Verb::Status | Verb::Gc | Verb::Version => &[],
        };
        let missing: Vec<&str> = needed.iter().copied().filter(|name| var(name).is_empty()).collect();
        if !missing.is_empty() {
            return Err(invalid(&format!("{} not set", missing.join(", "))));
        }
        Ok(Self {
            verb,
            container_id: var("CNI_CONTAINERID"),
            netns: var("CNI_NETNS"),
            ifname: var("CNI_IFNAME"),
            pod: PodArgs::parse(&var("CNI_ARGS"))?,
        })
    }
}

impl PodArgs {
    fn parse(args: &str) -> Result<Self, CniError> {
        let mut pod = Self::default();
        for pair in args.split(';').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| invalid(&format!("CNI_ARGS: {pair:?} is no KEY=VALUE")))?;
            let field = match key {
                "K8S_POD_NAMESPACE" => &mut pod.namespace,
                "K8S_POD_NAME" => &mut pod.name,
                "K8S_POD_UID" => &mut pod.uid,
                "K8S_POD_INFRA_CONTAINER_ID" => &mut pod.sandbox,
                _ => continue,
            };
            value.clone_into(field);
        }
        Ok(pod)
    }
}

fn invalid(what: &str) -> CniError {
    CniError::new(code::INVALID_ENVIRONMENT, format!("weir: environment: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Environment, CniError> {
        Environment::read(|name| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_runtime_s_environment() {
        let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=a-0;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u=1";
        let add = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/x"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_ARGS", args),
        ];
        let read_add = read(&add).unwrap();
        assert_eq!((read_add.verb, read_add.netns.as_str()), (Verb::Add, "/run/netns/x"));
        let pod =
            PodArgs { namespace: "shop".into(), name: "a-0".into(), uid: "u=1".into(), sandbox: "c1".into() };
        assert_eq!(read_add.pod, pod);
        // Without CNI_ARGS the runtime is not Kubernetes'.
        assert_eq!(read(&add[..4]).unwrap().pod, PodArgs::default());
    }

    #[test]
    fn what_is_missing_is_named() {
        let add = ("CNI_COMMAND", "ADD");
        for (vars, wanted) in [
            (&[][..], "CNI_COMMAND"),
            (&[("CNI_COMMAND", "add")], "\"add\""),
            (&[add], "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME"),
            (&[add, ("CNI_CONTAINERID", "c"), ("CNI_IFNAME", "e")], "CNI_NETNS"),
            (&[("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "c")], "CNI_IFNAME"),
            (&[("CNI_COMMAND", "GC"), ("CNI_ARGS", "a=b;nonsense")], "nonsense"),
        ] {
            let error = read(vars).unwrap_err();
            assert_eq!(error.code, code::INVALID_ENVIRONMENT);
            assert!(error.msg.contains(wanted), "{error}");
        }
        for verb in ["STATUS", "GC", "VERSION"] {
            assert!(read(&[("CNI_COMMAND", verb)]).is_ok(), "{verb}");
        }
        assert!(
            read(&[("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "c"), ("CNI_IFNAME", "e"), ("CNI_NETNS", "")])
                .is_ok()
        );
    }
}
