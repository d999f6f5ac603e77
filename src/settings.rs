//! Parses flags and environment variables into [`Settings`]. The only reader of the process environment.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Command};

use crate::base::duration;

/// The flags of `istiod discovery`, with Istio's names and defaults.
#[derive(Args, Clone, Debug)]
#[command(rename_all = "camelCase")]
pub struct DiscoveryFlags {
    /// Service registries, separated by commas. Only Kubernetes is supported.
    #[arg(long, value_delimiter = ',', value_parser = registry)]
    pub registries: Option<Vec<String>>,
    /// Namespace of the remote-cluster Secrets (default: the own namespace).
    #[arg(long)]
    pub cluster_registries_namespace: Option<String>,
    /// Kubeconfig of the config cluster, when istiod runs outside of it.
    #[arg(long)]
    pub kubeconfig: Option<PathBuf>,
    /// File with the mesh config, watched (default: ./etc/istio/config/mesh, then the ConfigMap).
    #[arg(long)]
    pub mesh_config: Option<PathBuf>,
    /// File with the networks, watched (default: ./etc/istio/config/meshNetworks, then the ConfigMap).
    #[arg(long)]
    pub networks_config: Option<PathBuf>,
    /// Namespace of the control plane (default: POD_NAMESPACE, else istio-system).
    #[arg(short = 'n', long)]
    pub namespace: Option<String>,
    /// Namespace of istio-cni (default: the own namespace).
    #[arg(long)]
    pub cni_namespace: Option<String>,
    /// Time for streams to end at shutdown.
    #[arg(long, default_value = "10s", value_parser = go_duration)]
    pub shutdown_duration: Duration,
    /// Folder with a whole mesh as YAML files, watched.
    #[arg(long)]
    pub config_dir: Option<PathBuf>,
    /// DNS suffix of Kubernetes services.
    #[arg(long, default_value = "cluster.local")]
    pub domain: String,
    /// Id of the config cluster (default: CLUSTER_ID, else Kubernetes).
    #[arg(long = "clusterID")]
    pub cluster_id: Option<String>,
    /// Aliases of clusters: alias=cluster, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = alias)]
    pub cluster_aliases: Vec<(String, String)>,
    /// Address of readiness and debug pages.
    #[arg(long, default_value = ":8080", value_parser = address)]
    pub http_addr: Address,
    /// Address of the webhooks; empty: same as --httpAddr.
    #[arg(long, default_value = ":15017", value_parser = address)]
    pub https_addr: Address,
    /// Address of plaintext xDS; empty: same as --httpAddr.
    #[arg(long, default_value = ":15010", value_parser = address)]
    pub grpc_addr: Address,
    /// Address of xDS and the CA over TLS; empty: off.
    #[arg(long = "secureGRPCAddr", default_value = ":15012", value_parser = address)]
    pub secure_grpc_addr: Address,
    /// Address of metrics, version and debug pages; empty: same as --httpAddr.
    #[arg(long, default_value = ":15014", value_parser = address)]
    pub monitoring_addr: Address,
    /// Profiles under /debug/pprof. Accepted for compatibility: there is no Go runtime to profile.
    #[arg(
        long,
        default_value_t = true,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        action = clap::ArgAction::Set
    )]
    pub profile: bool,
    /// CA certificate of istiod's serving certificate.
    #[arg(long)]
    pub ca_cert_file: Option<PathBuf>,
    /// Serving certificate of istiod.
    #[arg(long)]
    pub tls_cert_file: Option<PathBuf>,
    /// Key of istiod's serving certificate.
    #[arg(long)]
    pub tls_key_file: Option<PathBuf>,
    /// Cipher suites of istiod's servers, separated by commas.
    #[arg(long = "tls-cipher-suites", value_delimiter = ',')]
    pub tls_cipher_suites: Vec<String>,
    /// Minimum TLS version of istiod's servers.
    #[arg(long = "tls-min-version", default_value = "TLS1_2", value_parser = ["TLS1_2", "TLS1_3"])]
    pub tls_min_version: String,
    /// Requests per second to the Kubernetes API.
    #[arg(long = "kubernetesApiQPS", default_value_t = 80.0)]
    pub kubernetes_api_qps: f64,
    /// Burst of requests to the Kubernetes API.
    #[arg(long = "kubernetesApiBurst", default_value_t = 160)]
    pub kubernetes_api_burst: u32,
    /// Interval of gRPC keepalive pings.
    #[arg(long, default_value = "30s", value_parser = go_duration)]
    pub keepalive_interval: Duration,
    /// Timeout of gRPC keepalive responses.
    #[arg(long, default_value = "10s", value_parser = go_duration)]
    pub keepalive_timeout: Duration,
    /// Age at which clients are asked to reconnect (default: never).
    #[arg(long, value_parser = connection_age)]
    pub keepalive_max_server_connection_age: Option<ConnectionAge>,
    /// Log targets: stdout, stderr or a file.
    #[arg(long = "log_target", value_delimiter = ',', default_value = "stdout")]
    pub log_target: Vec<String>,
    /// Log levels by scope, such as default:info or ads:debug.
    #[arg(long = "log_output_level", default_value = "default:info")]
    pub log_output_level: String,
    /// Levels with a stack trace. Accepted for compatibility.
    #[arg(long = "log_stacktrace_level", default_value = "default:none")]
    pub log_stacktrace_level: String,
    /// Scopes with the caller. Accepted for compatibility.
    #[arg(long = "log_caller", default_value = "")]
    pub log_caller: String,
    /// Log as JSON.
    #[arg(
        long = "log_as_json",
        default_value_t = false,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        action = clap::ArgAction::Set
    )]
    pub log_as_json: bool,
    /// Port of ControlZ; 0 disables it.
    #[arg(long = "ctrlz_port", default_value_t = 9876)]
    pub ctrlz_port: u16,
    /// Address of ControlZ.
    #[arg(long = "ctrlz_address", default_value = "localhost")]
    pub ctrlz_address: String,
}

/// A listen address in Go's syntax; `None` if empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub Option<SocketAddr>);

/// `--keepaliveMaxServerConnectionAge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionAge {
    /// `infinity`, or a practically infinite duration.
    Infinite,
    /// A maximum age.
    AtMost(Duration),
}

/// Settings of the process.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Flags.
    pub flags: DiscoveryFlags,
    /// Environment variables of the process.
    pub variables: BTreeMap<String, String>,
}

impl Settings {
    /// Returns settings with these flags and the variables of this process.
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that reads the environment"
    )]
    pub fn from_process(flags: DiscoveryFlags) -> Self {
        // Names or values that are not UTF-8 cannot be settings.
        let variables = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
            .collect();
        Self { flags, variables }
    }

    /// Returns a variable that is set and not empty.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.variables
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    /// Returns true if everything comes from `--configDir` and no cluster is contacted.
    pub fn is_folder_only(&self) -> bool {
        let flags = &self.flags;
        let registries = flags.registries.as_deref().unwrap_or_default();
        let kubernetes = flags.kubeconfig.is_some() || registries.iter().any(|name| name == "Kubernetes");
        flags.config_dir.is_some() && !kubernetes
    }
}

fn go_duration(text: &str) -> Result<Duration, String> {
    duration::parse(text).map_err(|error| error.to_string())
}

fn connection_age(text: &str) -> Result<ConnectionAge, String> {
    if matches!(text, "infinity" | "Infinity" | "2562047h47m16.854775807s") {
        return Ok(ConnectionAge::Infinite);
    }
    match duration::parse(text) {
        Ok(age) if age.is_zero() => Ok(ConnectionAge::Infinite),
        Ok(age) => Ok(ConnectionAge::AtMost(age)),
        Err(_) => Err("--keepaliveMaxServerConnectionAge only accepts positive duration eg: 30m".into()),
    }
}

/// Parity (pilot/pkg/bootstrap/servicecontroller.go): a registry other than Kubernetes is an error.
fn registry(text: &str) -> Result<String, String> {
    match text {
        "" | "Kubernetes" => Ok(text.to_owned()),
        _ => Err(format!(
            "service registry {text} is not supported; hint: want Kubernetes"
        )),
    }
}

fn alias(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((alias, cluster)) if !alias.is_empty() && !cluster.is_empty() => Ok((alias.into(), cluster.into())),
        _ => Err(format!("{text:?} is not of the form alias=cluster")),
    }
}

/// Parses `:8080`, `127.0.0.1:8080`, `[::1]:8080`, `localhost:8080`, or an empty address.
fn address(text: &str) -> Result<Address, String> {
    if text.is_empty() {
        return Ok(Address(None));
    }
    let full = match text.strip_prefix(':') {
        Some(port) => format!("0.0.0.0:{port}"),
        None => text.replacen("localhost:", "127.0.0.1:", 1),
    };
    full.parse()
        .map(|address| Address(Some(address)))
        .map_err(|_| format!("{text:?} is not an address; hint: want host:port or :port"))
}

/// Removes unknown flags, as Istio does: an unknown `--x` swallows the next word unless that begins with `-` or the
/// flag was written `--x=v`. Returns the remaining words and the removed ones.
pub fn without_unknown_flags(command: &Command, words: Vec<String>) -> (Vec<String>, Vec<String>) {
    let knows = |name: &str| {
        name == "help"
            || command.get_arguments().any(|arg| {
                arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
            })
    };
    let (mut kept, mut unknown) = (Vec::new(), Vec::new());
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        if word == "--" {
            kept.push(word);
            kept.extend(words);
            break;
        }
        let Some(flag) = word.strip_prefix("--") else {
            kept.push(word);
            continue;
        };
        let (name, has_value) = flag.split_once('=').map_or((flag, false), |(name, _)| (name, true));
        if knows(name) {
            // A flag with a value keeps its value, whatever it looks like.
            let takes_value = command.get_arguments().any(|arg| {
                arg.get_long() == Some(name) && arg.get_action().takes_values() && !arg.is_require_equals_set()
            });
            kept.push(word.clone());
            if takes_value && !has_value {
                kept.extend(words.next());
            }
            continue;
        }
        unknown.push(word.clone());
        if !has_value && words.peek().is_some_and(|next| !next.starts_with('-')) {
            words.next();
        }
    }
    (kept, unknown)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: DiscoveryFlags,
    }

    fn parse(words: &[&str]) -> Result<DiscoveryFlags, clap::Error> {
        let command = <Line as clap::CommandFactory>::command();
        let (kept, _) = without_unknown_flags(&command, words.iter().map(|word| (*word).to_owned()).collect());
        Line::try_parse_from(std::iter::once("istiod".to_owned()).chain(kept)).map(|line| line.flags)
    }

    #[test]
    fn defaults_are_istios() {
        let flags = parse(&[]).expect("no flags are fine");
        assert_eq!(flags.http_addr, Address(Some(([0, 0, 0, 0], 8080).into())));
        assert_eq!(flags.domain, "cluster.local");
        assert_eq!(flags.keepalive_interval, Duration::from_secs(30));
        assert_eq!(flags.ctrlz_port, 9876);
    }

    #[test]
    fn unknown_flags_consume_a_value() {
        let flags = parse(&[
            "--resync",
            "60s",
            "--consulserverURL=x",
            "--domain",
            "a.b",
            "--odd",
            "--log_as_json",
        ]);
        let flags = flags.expect("unknown flags are accepted");
        assert_eq!(flags.domain, "a.b");
        assert!(flags.log_as_json);
    }

    #[test]
    fn bad_values_of_known_flags_are_errors() {
        assert!(parse(&["--keepaliveMaxServerConnectionAge=-30m"]).is_err());
        assert!(parse(&["--httpAddr", "nonsense"]).is_err());
        assert!(parse(&["--tls-min-version", "TLS9"]).is_err());
        assert!(parse(&["--shutdownDuration", "soon"]).is_err());
        assert!(parse(&["--registries=Mock"]).is_err());
    }

    #[test]
    fn an_empty_address_disables_the_port() {
        assert_eq!(
            parse(&["--grpcAddr", ""]).expect("empty is fine").grpc_addr,
            Address(None)
        );
        assert_eq!(
            parse(&["--secureGRPCAddr="]).expect("empty is fine").secure_grpc_addr,
            Address(None)
        );
    }
}
