//! Parses flags and environment variables into [`Settings`]. The only reader of the process environment.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use clap::{Arg, ArgAction, Args};

use crate::{
    base::{
        ClusterId, SmolStr,
        address::{AddressError, HostPort, Port},
        boolean, duration,
    },
    log::{
        RotationLimits,
        levels::{self, LevelError},
    },
};

/// Variable with the only namespaces that are read and written into.
pub const WATCH_NAMESPACE: &str = "ISTIO_WATCH_NAMESPACE";

/// Boolean flags that are given with or without a value.
pub trait BooleanFlag {
    /// Makes the value optional: `--flag` means `--flag=true`. The next word is never the value.
    fn optional_value(self) -> Self;
}

impl BooleanFlag for Arg {
    fn optional_value(self) -> Self {
        self.num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
            .action(ArgAction::Set)
    }
}

/// The flags of `istiod discovery`, with Istio's names and defaults. If a flag is repeated, the last value counts;
/// lists are joined.
#[derive(Args, Clone, Debug)]
#[command(rename_all = "camelCase", args_override_self = true)]
pub struct DiscoveryFlags {
    /// Service registries, separated by commas, in order: Kubernetes, Consul, Eureka, CloudFoundry, Mock (default:
    /// Kubernetes).
    #[arg(long, value_delimiter = ',', value_parser = registry)]
    pub registries: Option<Vec<String>>,
    /// Namespace of the remote-cluster Secrets (default: the own namespace).
    #[arg(long)]
    pub cluster_registries_namespace: Option<String>,
    /// Kubeconfig of the config cluster (default: the files of KUBECONFIG, else ~/.kube/config, else the service
    /// account of the pod).
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
    /// Namespaces whose Services, workloads and configuration are read, separated by commas (default:
    /// ISTIO_WATCH_NAMESPACE, else all).
    #[arg(short = 'a', long)]
    pub app_namespace: Option<String>,
    /// Namespace of istio-cni (default: the own namespace).
    #[arg(long)]
    pub cni_namespace: Option<String>,
    /// Time for streams to end at shutdown.
    #[arg(long, default_value = "10s", value_parser = go_duration)]
    pub shutdown_duration: Duration,
    /// Folder with a whole mesh as YAML files, watched.
    #[arg(long)]
    pub config_dir: Option<PathBuf>,
    /// Folder for the last known states of remote clusters and config sources, which serve after a start until these
    /// are read (default: none are kept).
    #[arg(long)]
    pub remote_state_dir: Option<PathBuf>,
    /// Age at which such a state no longer serves; 0: no limit.
    #[arg(long, default_value = "24h", value_parser = go_duration)]
    pub remote_state_max_age: Duration,
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
    #[arg(long = "secureGRPCAddr", alias = "secureGrpcAddr", default_value = ":15012", value_parser = address)]
    pub secure_grpc_addr: Address,
    /// Address of metrics, version and debug pages; empty: same as --httpAddr.
    #[arg(long, default_value = ":15014", value_parser = address)]
    pub monitoring_addr: Address,
    /// Port of metrics, version and debug pages, in place of --monitoringAddr. Old releases had 9093.
    #[arg(long)]
    pub monitoring_port: Option<u16>,
    /// Serve CPU and heap profiles under /debug/pprof.
    #[arg(long, default_value_t = true, value_parser = go_bool, optional_value())]
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
    #[arg(long = "tls-min-version", default_value = "1.2", value_parser = tls_version)]
    pub tls_min_version: TlsVersion,
    /// Requests per second to the Kubernetes API.
    #[arg(long = "kubernetesApiQPS", default_value_t = 80.0)]
    pub kubernetes_api_qps: f64,
    /// Burst of requests to the Kubernetes API.
    #[arg(long = "kubernetesApiBurst", default_value_t = 160)]
    pub kubernetes_api_burst: u32,
    /// Interval of gRPC keepalive pings (default: GRPC_KEEPALIVE_INTERVAL, else 30s).
    #[arg(long, value_parser = go_duration)]
    pub keepalive_interval: Option<Duration>,
    /// Timeout of gRPC keepalive responses (default: GRPC_KEEPALIVE_TIMEOUT, else 10s).
    #[arg(long, value_parser = go_duration)]
    pub keepalive_timeout: Option<Duration>,
    /// Age at which clients are asked to reconnect (default: never).
    #[arg(long, value_parser = connection_age)]
    pub keepalive_max_server_connection_age: Option<ConnectionAge>,
    /// Log targets: stdout, stderr or a file.
    #[arg(long = "log_target", value_delimiter = ',', default_value = "stdout")]
    pub log_target: Vec<String>,
    /// Log file that is rotated, in addition to the log targets.
    #[arg(long = "log_rotate")]
    pub log_rotate: Option<PathBuf>,
    /// Age in days at which rotated log files are removed; 0: no limit.
    #[arg(long = "log_rotate_max_age", default_value_t = 30)]
    pub log_rotate_max_age: u32,
    /// Size in megabytes at which the log file is rotated.
    #[arg(long = "log_rotate_max_size", default_value_t = 100)]
    pub log_rotate_max_size: u64,
    /// Number of rotated log files that are kept; 0: no limit.
    #[arg(long = "log_rotate_max_backups", default_value_t = 1000)]
    pub log_rotate_max_backups: usize,
    /// Log levels, such as info, or by scope, such as default:info,ads:debug; all stands for every scope.
    #[arg(long = "log_output_level", default_value = "default:info")]
    pub log_output_level: String,
    /// Levels at which lines have a stack trace, in the same form.
    #[arg(long = "log_stacktrace_level", default_value = "default:none")]
    pub log_stacktrace_level: String,
    /// Scopes whose lines name the file and line of their code, separated by commas.
    #[arg(long = "log_caller", default_value = "")]
    pub log_caller: String,
    /// Log as JSON.
    #[arg(long = "log_as_json", default_value_t = false, value_parser = go_bool, optional_value())]
    pub log_as_json: bool,
    /// Address of Consul: host:port, http://, https:// or unix:// (default: CONSUL_HTTP_ADDR, else 127.0.0.1:8500).
    #[arg(long = "consulserverURL", default_value = "")]
    pub consul_server_url: String,
    /// Shortest interval between two complete readings of Consul. Changes arrive without it.
    #[arg(long = "consulserverInterval", default_value = "2s", value_parser = go_duration)]
    pub consul_server_interval: Duration,
    /// Datacenters of Consul, separated by commas; *: all (default: that of the server).
    #[arg(long = "consulserverDatacenters", value_delimiter = ',')]
    pub consul_server_datacenters: Vec<String>,
    /// Each datacenter of Consul is a network of its own, with the name of the datacenter.
    #[arg(long = "consulserverNetworks", default_value_t = false, value_parser = go_bool, optional_value())]
    pub consul_server_networks: bool,
    /// Address of Eureka, such as http://eureka:8080 (API below /eureka/v2) or http://eureka:8761/eureka.
    #[arg(long = "eurekaserverURL", default_value = "")]
    pub eureka_server_url: String,
    /// Interval of reading Eureka.
    #[arg(long = "eurekaserverInterval", default_value = "2s", value_parser = go_duration)]
    pub eureka_server_interval: Duration,
    /// File with the settings of Cloud Foundry's Copilot.
    #[arg(long = "cfConfig")]
    pub cf_config: Option<PathBuf>,
    /// The registry Mock has the services hello and world (default: none).
    #[arg(long = "mockServices", default_value_t = false, value_parser = go_bool, optional_value())]
    pub mock_services: bool,
    /// Port of ControlZ; 0 disables it.
    #[arg(long = "ctrlz_port", default_value_t = 9876)]
    pub ctrlz_port: u16,
    /// Address of ControlZ.
    #[arg(long = "ctrlz_address", default_value = "localhost")]
    pub ctrlz_address: String,
}

/// A listen address in Go's syntax; `None` if empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address(pub Option<HostPort>);

/// `--tls-min-version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsVersion {
    /// `1.2`.
    Tls12,
    /// `1.3`.
    Tls13,
}

/// `--keepaliveMaxServerConnectionAge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionAge {
    /// `infinity`, or a practically infinite duration.
    Infinite,
    /// A maximum age.
    AtMost(Duration),
}

/// A registry of services besides Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Registry {
    /// Consul.
    Consul,
    /// Eureka.
    Eureka,
    /// Cloud Foundry's Copilot.
    CloudFoundry,
    /// Services in memory.
    Mock,
}

impl Registry {
    const ALL: [Self; 4] = [Self::Consul, Self::Eureka, Self::CloudFoundry, Self::Mock];

    /// Returns the name, which is also the id of the registry's cluster.
    pub fn name(self) -> &'static str {
        match self {
            Self::Consul => "Consul",
            Self::Eureka => "Eureka",
            Self::CloudFoundry => "CloudFoundry",
            Self::Mock => "Mock",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|registry| registry.name() == text)
    }
}

/// Flags of old releases without an effect, with the reason or the successor.
pub const OLD_FLAGS: [(&str, &str); 10] = [
    ("resync", "watches do not need it: changes arrive at once"),
    (
        "discovery_cache",
        "the xDS API v1 and its cache are gone; all responses are shared",
    ),
    (
        "discoveryCache",
        "the xDS API v1 and its cache are gone; all responses are shared",
    ),
    (
        "clusterRegistriesConfigMap",
        "use Secrets with the label istio/multiCluster=true; istiod create-remote-secret writes them",
    ),
    (
        "webhookEndpoint",
        "the xDS API v1 is gone; use an EnvoyFilter to change configuration",
    ),
    (
        "plugins",
        "use EnvoyFilter, WasmPlugin, Telemetry, AuthorizationPolicy and RequestAuthentication",
    ),
    (
        "disable-install-crds",
        "CRDs are installed by the chart base, or with istiod crds",
    ),
    ("consulconfig", "use --consulserverURL"),
    (
        "mixerCheckServer",
        "Mixer is gone; use Telemetry and AuthorizationPolicy with an extension provider",
    ),
    (
        "mixerReportServer",
        "Mixer is gone; use Telemetry with an extension provider",
    ),
];

/// Names of registries of old releases that are always on today.
pub const BUILT_IN_REGISTRIES: [&str; 3] = ["Config", "ConfigRegistry", "MCP"];

/// Settings of the process.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Flags.
    pub flags: DiscoveryFlags,
    /// Environment variables of the process.
    pub variables: BTreeMap<String, String>,
}

/// Flags that do not go together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlagsError {
    /// Proxies that report the cluster would have several aliases.
    #[error("--clusterAliases: More than one cluster alias for cluster id: {0}")]
    AliasedTwice(String),
    /// A log level.
    #[error(transparent)]
    Levels(#[from] LevelError),
}

impl DiscoveryFlags {
    /// Checks rules that concern several values, and values whose errors have Istio's text alone.
    pub fn check(&self) -> Result<(), FlagsError> {
        levels::output_pairs(&self.log_output_level)?;
        levels::pairs(&self.log_stacktrace_level)?;
        let mut clusters = BTreeSet::new();
        for cluster in self.aliases().into_values() {
            if !clusters.insert(cluster.clone()) {
                return Err(FlagsError::AliasedTwice(cluster.to_string()));
            }
        }
        Ok(())
    }

    /// Returns the rotated log file with its limits.
    pub fn rotated_log(&self) -> Option<(PathBuf, RotationLimits)> {
        let limits = RotationLimits {
            max_megabytes: self.log_rotate_max_size,
            max_days: self.log_rotate_max_age,
            max_files: self.log_rotate_max_backups,
        };
        let path = self.log_rotate.clone().filter(|path| !path.as_os_str().is_empty());
        path.map(|path| (path, limits))
    }

    /// Returns the cluster of each alias.
    pub fn aliases(&self) -> BTreeMap<ClusterId, ClusterId> {
        let pairs = self.cluster_aliases.iter();
        pairs
            .map(|(alias, cluster)| (ClusterId::new(alias), ClusterId::new(cluster)))
            .collect()
    }

    /// Returns the address of metrics, version and debug pages.
    pub fn monitoring_address(&self) -> Address {
        match self.monitoring_port {
            Some(port) => Address(Some(HostPort {
                host: String::new(),
                port: Port::Number(port),
            })),
            None => self.monitoring_addr.clone(),
        }
    }

    /// Returns the registries besides Kubernetes, in order and each once.
    pub fn registries(&self) -> impl Iterator<Item = Registry> {
        let names = self.registries.iter().flatten();
        let mut seen = BTreeSet::new();
        let registries = names.filter_map(|name| Registry::parse(name));
        registries.filter(move |registry| seen.insert(*registry))
    }

    /// Returns true unless `--registries` leaves Kubernetes out.
    pub fn reads_kubernetes(&self) -> bool {
        let registries = self.registries.as_deref();
        registries.is_none_or(|names| names.iter().any(|name| name == "Kubernetes"))
    }
}

/// Returns the environment variables of this process.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the one place that reads the environment"
)]
pub fn process_variables() -> BTreeMap<String, String> {
    // Names or values that are not UTF-8 cannot be settings.
    std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .collect()
}

impl Settings {
    /// Returns settings with these flags and the variables of this process.
    pub fn from_process(flags: DiscoveryFlags) -> Self {
        Self {
            flags,
            variables: process_variables(),
        }
    }

    /// Returns a variable that is set and not empty.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.variables
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    /// Returns the names in a list that a variable has, separated by commas.
    pub fn names(&self, variable: &str) -> BTreeSet<SmolStr> {
        names(self.variable(variable).unwrap_or_default())
    }

    /// Returns the namespaces that are read; empty for all.
    ///
    /// Parity (pilot/cmd/pilot-discovery/main.go of releases 1.7 to 1.9): the flag is a list.
    pub fn watch_namespaces(&self) -> BTreeSet<SmolStr> {
        let namespaces = names(self.flags.app_namespace.as_deref().unwrap_or_default());
        if namespaces.is_empty() {
            return self.names(WATCH_NAMESPACE);
        }
        namespaces
    }

    /// Returns true if a variable is set, and empty.
    pub fn is_emptied(&self, name: &str) -> bool {
        self.variables.get(name).is_some_and(String::is_empty)
    }

    /// Returns true if a variable is set to a true value.
    pub fn is_on(&self, name: &str) -> bool {
        self.variable(name).and_then(boolean::parse) == Some(true)
    }

    /// Returns the duration of a flag, of the variable that is its default, or `default`.
    pub fn duration(&self, flag: Option<Duration>, variable: &str, default: Duration) -> Duration {
        let of_variable = || duration::parse(self.variable(variable)?).ok();
        flag.or_else(of_variable).unwrap_or(default)
    }
}

fn names(list: &str) -> BTreeSet<SmolStr> {
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.map(SmolStr::new).collect()
}

fn go_duration(text: &str) -> Result<Duration, String> {
    duration::parse(text).map_err(|error| error.to_string())
}

fn go_bool(text: &str) -> Result<bool, String> {
    boolean::parse(text).ok_or_else(|| "invalid syntax; hint: want true or false".to_owned())
}

/// Parity (pilot/pkg/bootstrap/options.go): the text of the error is Istio's.
fn tls_version(text: &str) -> Result<TlsVersion, String> {
    match text {
        "1.2" => Ok(TlsVersion::Tls12),
        "1.3" => Ok(TlsVersion::Tls13),
        _ => Err(format!(
            "minimum TLS version: {text} is not supported. Only 1.2 and 1.3 are supported"
        )),
    }
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

/// Parity (pilot/pkg/bootstrap/servicecontroller.go): an unknown registry is an error, and case counts.
fn registry(text: &str) -> Result<String, String> {
    let is_known = matches!(text, "" | "Kubernetes") || BUILT_IN_REGISTRIES.contains(&text);
    if is_known || Registry::parse(text).is_some() {
        return Ok(text.to_owned());
    }
    Err(format!(
        "service registry {text} is not supported; hint: want Kubernetes, Consul, Eureka, CloudFoundry or Mock"
    ))
}

fn alias(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((alias, cluster)) if !alias.is_empty() && !cluster.is_empty() => Ok((alias.into(), cluster.into())),
        _ => Err(format!("{text:?} is not of the form alias=cluster")),
    }
}

fn address(text: &str) -> Result<Address, AddressError> {
    if text.is_empty() {
        return Ok(Address(None));
    }
    HostPort::parse(text).map(|address| Address(Some(address)))
}

#[cfg(test)]
pub(crate) mod fixture {
    use clap::Parser;

    use super::{DiscoveryFlags, Settings};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: DiscoveryFlags,
    }

    /// Returns the flags of a command line.
    pub(crate) fn flags(words: &[&str]) -> Result<DiscoveryFlags, clap::Error> {
        let words = std::iter::once("istiod").chain(words.iter().copied());
        Ok(Line::try_parse_from(words)?.flags)
    }

    /// Returns the settings of a command line and these variables.
    pub(crate) fn settings(words: &[&str], variables: &[(&str, &str)]) -> Settings {
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Settings {
            flags: flags(words).expect("valid flags"),
            variables: variables.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<DiscoveryFlags, String> {
        let flags = fixture::flags(words).map_err(|error| error.to_string())?;
        flags.check().map_err(|error| error.to_string())?;
        Ok(flags)
    }

    #[test]
    fn registries_have_an_order_and_count_once() {
        let registries = |text: &str| {
            let flags = parse(&[&format!("--registries={text}")]).expect("known names");
            (flags.reads_kubernetes(), flags.registries().collect::<Vec<_>>())
        };
        let order = vec![Registry::Eureka, Registry::Consul];
        assert_eq!(registries("Eureka,Kubernetes,Consul,Eureka"), (true, order));
        assert_eq!(registries("Mock,Config,MCP"), (false, vec![Registry::Mock]));
        assert_eq!(registries(""), (false, Vec::new()));
    }

    #[test]
    fn defaults_are_istios() {
        let flags = parse(&[]).expect("no flags are fine");
        assert_eq!(flags.http_addr, address(":8080").expect("an address"));
        assert_eq!(flags.domain, "cluster.local");
        assert_eq!(flags.ctrlz_port, 9876);
        assert_eq!(flags.tls_min_version, TlsVersion::Tls12);
        assert!(flags.reads_kubernetes() && flags.profile && !flags.log_as_json);
    }

    #[test]
    fn the_last_value_of_a_repeated_flag_counts_and_lists_are_joined() {
        let flags = parse(&[
            "--domain=a",
            "--domain=b",
            "--httpAddr=:1",
            "--httpAddr=:2",
            "--profile",
            "--profile=f",
            "--log_output_level=default:debug",
            "--log_output_level=default:warn",
            "--keepaliveMaxServerConnectionAge=1h",
            "--keepaliveMaxServerConnectionAge=30m",
            "--kubeconfig=/a",
            "--kubeconfig=/b",
            "--clusterAliases=a=1,b=2",
            "--clusterAliases=c=3",
            "--clusterAliases=b=4",
            "--log_target=/one",
            "--log_target=/two",
            "--tls-cipher-suites=A,B",
            "--tls-cipher-suites=C",
        ]);
        let flags = flags.expect("valid flags");
        assert_eq!(flags.domain, "b");
        assert_eq!(flags.http_addr, address(":2").expect("an address"));
        assert!(!flags.profile);
        assert_eq!(flags.log_output_level, "default:warn");
        let age = Some(ConnectionAge::AtMost(Duration::from_mins(30)));
        assert_eq!(flags.keepalive_max_server_connection_age, age);
        assert_eq!(flags.kubeconfig, Some("/b".into()));
        let aliases = [("a", "1"), ("b", "4"), ("c", "3")];
        assert_eq!(
            flags.aliases(),
            aliases.map(|(alias, cluster)| (alias.into(), cluster.into())).into()
        );
        assert_eq!(flags.log_target, ["/one", "/two"]);
        assert_eq!(flags.tls_cipher_suites, ["A", "B", "C"]);
    }

    #[test]
    fn booleans_are_those_of_go() {
        for (text, value) in [
            ("0", false),
            ("F", false),
            ("False", false),
            ("1", true),
            ("t", true),
            ("TRUE", true),
        ] {
            let flags = parse(&[&format!("--profile={text}"), &format!("--log_as_json={text}")]).expect("a boolean");
            assert_eq!((flags.profile, flags.log_as_json), (value, value), "{text}");
        }
        assert!(parse(&["--profile=yes"]).is_err());
    }

    #[test]
    fn bad_values_of_known_flags_are_errors() {
        for (flag, message) in [
            (
                "--keepaliveMaxServerConnectionAge=-30m",
                "only accepts positive duration",
            ),
            ("--httpAddr=nonsense", "missing port in address"),
            (
                "--tls-min-version=TLS1_3",
                "minimum TLS version: TLS1_3 is not supported. Only 1.2 and 1.3 are supported",
            ),
            ("--shutdownDuration=soon", "duration"),
            ("--registries=Bogus", "service registry Bogus is not supported"),
            ("--registries=mock", "service registry mock is not supported"),
            ("--log_output_level=bogus", "invalid output level 'bogus'"),
            (
                "--log_output_level=ads:debug:x",
                "invalid output level format 'ads:debug:x'",
            ),
            (
                "--log_stacktrace_level=default:loud",
                "invalid output level 'default:loud'",
            ),
            (
                "--clusterAliases=a=1,b=1",
                "More than one cluster alias for cluster id: 1",
            ),
            ("--clusterAliases=a", "alias=cluster"),
        ] {
            let error = parse(&[flag]).map(drop);
            assert!(
                error.as_ref().is_err_and(|error| error.contains(message)),
                "{flag}: {error:?}"
            );
        }
    }

    #[test]
    fn an_empty_address_disables_the_port() {
        assert_eq!(parse(&["--grpcAddr="]).expect("empty is fine").grpc_addr, Address(None));
        assert_eq!(
            parse(&["--secureGRPCAddr="]).expect("empty is fine").secure_grpc_addr,
            Address(None)
        );
    }

    #[test]
    fn watched_namespaces_are_a_list_whose_flag_precedes_the_variable() {
        let watched = |words: &[&str], variable: &str| {
            let settings = Settings {
                flags: parse(words).expect("valid flags"),
                variables: [(WATCH_NAMESPACE.to_owned(), variable.to_owned())].into(),
            };
            settings.watch_namespaces().into_iter().collect::<Vec<_>>()
        };
        assert_eq!(watched(&[], "b, a,"), ["a", "b"]);
        assert_eq!(watched(&["--appNamespace=c"], "b,a"), ["c"]);
        assert_eq!(watched(&["--appNamespace="], ""), Vec::<SmolStr>::new());
    }

    #[test]
    fn variables_are_the_defaults_of_keepalive_flags() {
        let settings = |words: &[&str], value: &str| Settings {
            flags: parse(words).expect("valid flags"),
            variables: [("GRPC_KEEPALIVE_INTERVAL".to_owned(), value.to_owned())].into(),
        };
        let interval = |settings: Settings| {
            let flag = settings.flags.keepalive_interval;
            settings
                .duration(flag, "GRPC_KEEPALIVE_INTERVAL", Duration::from_secs(30))
                .as_secs()
        };
        assert_eq!(interval(settings(&["--keepaliveInterval=5s"], "7s")), 5);
        assert_eq!(interval(settings(&[], "7s")), 7);
        assert_eq!(interval(settings(&[], "soon")), 30);
        assert_eq!(interval(settings(&[], "")), 30);
    }

    #[test]
    fn only_registries_without_kubernetes_leave_the_cluster_out() {
        assert!(
            parse(&["--registries=Kubernetes"])
                .expect("valid flags")
                .reads_kubernetes()
        );
        assert!(!parse(&["--registries="]).expect("valid flags").reads_kubernetes());
    }
}
