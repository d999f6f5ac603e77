//! Logging scopes: Istio's names, the modules that belong to each, and levels that change at run time.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use tracing::Metadata;

use super::levels::{ALL, Level, LevelError, output_pairs, pairs};

/// The name and description of a scope.
#[derive(Debug)]
pub struct Definition {
    /// Istio's name.
    pub name: &'static str,
    /// The subject of its lines.
    pub description: &'static str,
}

const fn scope(name: &'static str, description: &'static str) -> Definition {
    Definition { name, description }
}

/// The scopes of Istio 1.30.3, by name. Scopes without a module here exist, so that flags and tools may name them.
pub const SCOPES: [Definition; 41] = [
    scope("ads", "Streams of proxies and pushes"),
    scope("adsc", "Configuration from other control planes"),
    scope("analysis", "Configuration analysis"),
    scope("authn", "Authentication of callers"),
    scope("authorization", "Authorization policies"),
    scope("ca", "Signing, and the own certificate"),
    scope("controllers", "Controllers that write into clusters"),
    scope("default", "Everything without a scope of its own"),
    scope("delta", "Incremental xDS"),
    scope("deltaadsc", "Clients of incremental xDS; unused"),
    scope("file", "Files and folders with configuration"),
    scope("fullpush", "Generation of configuration"),
    scope("gateway", "Gateway API controllers"),
    scope("gatewaycommon", "Inputs of Gateway API controllers"),
    scope("grpc", "HTTP and gRPC connections"),
    scope("grpcgen", "Configuration of proxyless gRPC clients"),
    scope("ip-autoallocate", "Addresses of ServiceEntries"),
    scope("klog", "The client library of Kubernetes"),
    scope("krt", "Tables and derived rows"),
    scope("kube", "Objects of clusters"),
    scope("model", "The mesh model"),
    scope("monitoring", "Metrics"),
    scope("pkica", "The own CA"),
    scope("pkira", "Signing by Kubernetes"),
    scope("probes", "Readiness"),
    scope("processing", "Parsing of objects"),
    scope("retry", "Documents from URLs"),
    scope("rootcertrotator", "Rotation of the self-signed root"),
    scope("secretcontroller", "Remote clusters and their Secrets"),
    scope("security", "TLS and access to pages"),
    scope("serverca", "The certificate service"),
    scope("serviceentry", "ServiceEntries and workload entries"),
    scope("spiffe", "Trust domains and their roots"),
    scope("status", "Statuses of objects"),
    scope("tag-watcher", "Revision tags"),
    scope("trustBundle", "Trust bundles"),
    scope("untaint", "Taints of nodes"),
    scope("validation", "Validation of objects"),
    scope("validationController", "Webhook configurations"),
    scope("validationServer", "Webhook requests"),
    scope("wle", "WorkloadEntries of machines"),
];

/// The scope of each module, and of crates that istiod uses. The longest prefix decides; the default is `default`.
const MODULES: &[(&str, &str)] = &[
    ("istiod::admin::access", "security"),
    ("istiod::admin::debug", "ads"),
    // The observer of pushes.
    ("istiod::admin::metrics", "ads"),
    ("istiod::admin::metrics::process", "monitoring"),
    ("istiod::admin::server", "probes"),
    ("istiod::analyze", "analysis"),
    ("istiod::api", "validation"),
    ("istiod::auth", "authn"),
    ("istiod::auth::tls", "security"),
    ("istiod::auth::trust", "spiffe"),
    ("istiod::ca", "ca"),
    ("istiod::ca::local", "pkica"),
    ("istiod::ca::multi_root", "trustBundle"),
    ("istiod::ca::registration", "pkira"),
    ("istiod::ca::rotate", "rootcertrotator"),
    ("istiod::ca::server", "serverca"),
    ("istiod::distribution", "ads"),
    ("istiod::fetch", "retry"),
    ("istiod::generate", "fullpush"),
    ("istiod::generate::authorization", "authorization"),
    ("istiod::generate::filter::security", "authorization"),
    ("istiod::generate::grpc", "grpcgen"),
    ("istiod::ingest", "kube"),
    ("istiod::ingest::diagnostics", "processing"),
    ("istiod::ingest::file", "file"),
    ("istiod::ingest::jwks", "model"),
    ("istiod::ingest::mcp", "adsc"),
    ("istiod::ingest::mesh", "model"),
    ("istiod::ingest::registry", "default"),
    ("istiod::ingest::remote", "secretcontroller"),
    ("istiod::ingest::resolve", "model"),
    ("istiod::ingest::tag", "tag-watcher"),
    ("istiod::kube", "kube"),
    ("istiod::model", "model"),
    ("istiod::model::gateway_api", "gatewaycommon"),
    ("istiod::model::service::entry", "serviceentry"),
    ("istiod::otlp", "monitoring"),
    ("istiod::push", "ads"),
    ("istiod::rpc", "grpc"),
    ("istiod::status", "status"),
    ("istiod::status::analysis", "analysis"),
    ("istiod::status::auto_allocation", "ip-autoallocate"),
    ("istiod::status::auto_registration", "wle"),
    ("istiod::status::cluster_trust_bundle", "trustBundle"),
    ("istiod::status::gateway_class", "gateway"),
    ("istiod::status::gateway_deployment", "gateway"),
    ("istiod::status::gateway_status", "gateway"),
    ("istiod::status::leader", "controllers"),
    ("istiod::status::mcs_export", "controllers"),
    ("istiod::status::root_cert", "controllers"),
    ("istiod::status::untaint", "untaint"),
    ("istiod::status::webhook_configuration", "validationController"),
    ("istiod::table", "krt"),
    ("istiod::webhook", "default"),
    ("istiod::webhook::server", "validationServer"),
    ("istiod::webhook::validation", "validationServer"),
    ("istiod::xds", "ads"),
    ("istiod::xds::delta", "delta"),
    // Libraries.
    ("h2", "grpc"),
    ("hyper", "grpc"),
    ("hyper_util", "grpc"),
    ("kube_client", "klog"),
    ("rustls", "security"),
    ("tonic", "grpc"),
    ("tower", "grpc"),
];

/// The prefix of targets whose events count only at level debug. The client library logs every failed request as an
/// error; watches and writers log those that matter.
const CLIENT_LIBRARY: &str = "kube_client";

/// The present settings of a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeState {
    /// The level of lines that are written, and of quieter ones.
    pub output: Level,
    /// The level of lines that have a stack trace.
    pub stack_trace: Level,
    /// True if lines name the file and line of their code.
    pub callers: bool,
}

#[derive(Debug)]
struct Atomics {
    output: AtomicU8,
    stack_trace: AtomicU8,
    callers: AtomicBool,
}

/// The levels of all scopes. They may change at any time.
#[derive(Debug)]
pub struct Scopes {
    states: [Atomics; SCOPES.len()],
    /// Prefixes of targets and the index of their scope, the longest first.
    modules: Vec<(&'static str, usize)>,
}

impl Default for Scopes {
    /// All scopes at info, without stack traces and callers.
    fn default() -> Self {
        let index = |name: &str| SCOPES.iter().position(|scope| scope.name == name);
        let mut modules: Vec<(&str, usize)> = MODULES
            .iter()
            .filter_map(|(module, scope)| Some((*module, index(scope)?)))
            .collect();
        modules.sort_by_key(|(module, _)| std::cmp::Reverse(module.len()));
        Self {
            states: std::array::from_fn(|_| Atomics {
                output: AtomicU8::new(Level::Info as u8),
                stack_trace: AtomicU8::new(Level::None as u8),
                callers: AtomicBool::new(false),
            }),
            modules,
        }
    }
}

impl Scopes {
    /// Returns the scopes with the settings of `--log_output_level`, `--log_stacktrace_level` and `--log_caller`.
    ///
    /// Parity (pkg/log/config.go): `all` sets every scope, and later entries change some of them again; unknown scopes
    /// are ignored.
    pub fn of_flags(output: &str, stack_trace: &str, callers: &str) -> Result<Self, LevelError> {
        let scopes = Self::default();
        for (name, level) in output_pairs(output)? {
            scopes.each(name, |state| state.output.store(level as u8, Ordering::Relaxed));
        }
        for (name, level) in pairs(stack_trace)? {
            scopes.each(name, |state| state.stack_trace.store(level as u8, Ordering::Relaxed));
        }
        for name in callers.split(',') {
            scopes.each(name, |state| state.callers.store(true, Ordering::Relaxed));
        }
        Ok(scopes)
    }

    /// Changes the scope with this name, or each for `all`.
    fn each(&self, name: &str, set: impl Fn(&Atomics)) {
        for (scope, state) in SCOPES.iter().zip(&self.states) {
            if name == ALL || scope.name == name {
                set(state);
            }
        }
    }

    /// Returns the index of the scope with this name.
    pub fn named(name: &str) -> Option<usize> {
        SCOPES.iter().position(|scope| scope.name == name)
    }

    /// Returns the settings of a scope.
    pub fn state(&self, index: usize) -> ScopeState {
        let state = &self.states[index];
        let level = |stored: &AtomicU8| Level::ORDERED[usize::from(stored.load(Ordering::Relaxed))];
        ScopeState {
            output: level(&state.output),
            stack_trace: level(&state.stack_trace),
            callers: state.callers.load(Ordering::Relaxed),
        }
    }

    /// Changes the settings of a scope. They apply to the next line.
    pub fn set(&self, index: usize, to: ScopeState) {
        let state = &self.states[index];
        state.output.store(to.output as u8, Ordering::Relaxed);
        state.stack_trace.store(to.stack_trace as u8, Ordering::Relaxed);
        state.callers.store(to.callers, Ordering::Relaxed);
        // Call sites remember whether they are enabled.
        tracing::callsite::rebuild_interest_cache();
    }

    /// Returns the scope of a module by its path, such as `istiod::xds::stream`.
    pub(super) fn of_target(&self, target: &str) -> usize {
        let is_in = |module: &str| {
            let rest = target.strip_prefix(module);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        let found = self.modules.iter().find(|(module, _)| is_in(module));
        found.map_or_else(|| Self::named("default").unwrap_or(0), |(_, index)| *index)
    }

    /// Returns true if events with this description are written.
    pub(super) fn writes(&self, metadata: &Metadata<'_>) -> bool {
        let Some(level) = Level::of(metadata) else {
            return false;
        };
        let output = self.state(self.of_target(metadata.target())).output;
        let needed = if metadata.target().starts_with(CLIENT_LIBRARY) {
            Level::Debug
        } else {
            level
        };
        metadata.is_event() && output >= needed
    }

    /// Returns the loudest level of any scope.
    pub(super) fn loudest(&self) -> Level {
        let levels = (0..SCOPES.len()).map(|index| self.state(index).output);
        levels.max().unwrap_or(Level::None)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn output(scopes: &Scopes, name: &str) -> Level {
        scopes.state(Scopes::named(name).expect("a scope")).output
    }

    #[test]
    fn scopes_are_sorted_and_modules_exist() {
        assert!(SCOPES.is_sorted_by(|a, b| a.name.to_lowercase() < b.name.to_lowercase()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for (module, scope) in MODULES {
            assert!(Scopes::named(scope).is_some(), "{module}: no scope {scope}");
            if let Some(path) = module.strip_prefix("istiod::") {
                let file = source.join(path.replace("::", "/")).with_extension("rs");
                assert!(file.exists(), "no module {module}");
            }
        }
    }

    #[test]
    fn the_longest_module_decides() {
        let scopes = Scopes::default();
        for (target, name) in [
            ("istiod::xds::stream::session", "ads"),
            ("istiod::xds::delta", "delta"),
            ("istiod::xds::deltas", "ads"),
            ("istiod::ca::server", "serverca"),
            ("istiod::ca::serving", "ca"),
            ("istiod::app", "default"),
            ("h2::proto", "grpc"),
            ("h2x", "default"),
        ] {
            assert_eq!(SCOPES[scopes.of_target(target)].name, name, "{target}");
        }
    }

    #[test]
    fn flags_set_levels_as_in_istio() {
        let levels = |text: &str| Scopes::of_flags(text, "default:none", "").expect("valid levels");
        let scopes = levels("ads:debug,bogus:debug");
        assert_eq!(
            (output(&scopes, "ads"), output(&scopes, "model")),
            (Level::Debug, Level::Info)
        );
        let scopes = levels("warn");
        assert_eq!(
            (output(&scopes, "default"), output(&scopes, "ads")),
            (Level::Warn, Level::Info)
        );
        let scopes = levels("ads:none,all:error,ads:debug");
        assert_eq!(
            (output(&scopes, "ads"), output(&scopes, "wle")),
            (Level::Debug, Level::Error)
        );
        let scopes = levels("ads:debug,all:warn");
        assert_eq!(output(&scopes, "ads"), Level::Warn);
        let scopes = Scopes::of_flags("info", "ads:error", "ca,all").expect("valid levels");
        let ads = scopes.state(Scopes::named("ads").expect("a scope"));
        assert_eq!((ads.stack_trace, ads.callers), (Level::Error, true));
    }
}
