//! Connects to the API server.

use std::{
    env,
    path::{Path, PathBuf},
};

use kube::{
    Client, Config,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

use crate::domain::yaml::YamlError;

/// Why there is no client. One line that names the thing and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A kubeconfig was named, and cannot be used.
    #[error("kubeconfig {path}: {cause}; name a readable kubeconfig with --kubeconfig or KUBECONFIG", path = .path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// None was named, and the pod's own account cannot be used.
    #[error(
        "no way to reach the API server: {cause}; run in a pod with a service account, or name a kubeconfig with --kubeconfig or KUBECONFIG"
    )]
    InCluster {
        /// What is missing.
        cause: String,
    },
    /// The configuration was read, but makes no client.
    #[error("API server {url}: {cause}")]
    Client {
        /// Where it was to connect to.
        url: String,
        /// What is wrong.
        cause: String,
    },
}

/// A client for the server `kubeconfig` names, or else `KUBECONFIG`, or else for the cluster this pod runs
/// in. Plain http is taken as it comes. Does not connect yet: a server that is away is waited for.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    let named = kubeconfig.map(Path::to_path_buf).or_else(named_by_environment);
    let config = match named {
        Some(path) => from_file(path).await?,
        None => Config::incluster().map_err(|error| ConnectError::InCluster { cause: in_cluster(&error) })?,
    };
    let url = config.cluster_url.to_string();
    Client::try_from(config)
        .map_err(|error| ConnectError::Client { url, cause: one_line(&error.to_string()) })
}

fn named_by_environment() -> Option<PathBuf> {
    env::var_os("KUBECONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

async fn from_file(path: PathBuf) -> Result<Config, ConnectError> {
    let read = match Kubeconfig::read_from(&path) {
        Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await,
        Err(error) => Err(error),
    };
    read.map_err(|error| ConnectError::Kubeconfig { path, cause: unreadable(&error) })
}

/// The cause without what the caller says anyway.
fn unreadable(error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::ReadConfig(error, _) => error.to_string(),
        KubeconfigError::Parse(error) => format!("not a kubeconfig: {}", YamlError::from(&**error)),
        KubeconfigError::CurrentContextNotSet => "no current-context".into(),
        other => one_line(&other.to_string()),
    }
}

fn in_cluster(error: &InClusterError) -> String {
    match error {
        InClusterError::ReadEnvironmentVariable(_) => "KUBERNETES_SERVICE_HOST is not set".into(),
        other => one_line(&other.to_string()),
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn temporary(name: &str, text: &str) -> PathBuf {
        let path = env::temp_dir().join(format!("weir-{}-{name}", std::process::id()));
        fs::write(&path, text).unwrap();
        path
    }

    async fn error(path: &Path) -> String {
        let error = connect(Some(path)).await.err().expect("must not connect").to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains(&path.display().to_string()) && error.contains("--kubeconfig"), "{error}");
        error
    }

    #[tokio::test]
    async fn an_unreadable_kubeconfig_is_one_line_that_names_file_cause_and_remedy() {
        let missing = error(Path::new("/nonexistent/kubeconfig")).await;
        assert!(missing.contains("No such file"), "{missing}");
        let directory = error(&env::temp_dir()).await;
        assert!(directory.contains("directory"), "{directory}");
        for (name, text, cause) in [
            ("garbage", "a: [1\nb", "not a kubeconfig"),
            ("empty", "", "current-context"),
            ("context", "current-context: nope\n", "nope"),
        ] {
            let path = temporary(name, text);
            let message = error(&path).await;
            fs::remove_file(&path).unwrap();
            assert!(message.contains(cause), "{message}");
        }
    }

    #[tokio::test]
    async fn plain_http_will_do() {
        let path = temporary(
            "http",
            "current-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n\
             clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u, user: {}}]\n",
        );
        let client = connect(Some(&path)).await;
        fs::remove_file(&path).unwrap();
        client.expect("a client");
    }
}
