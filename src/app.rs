//! Composition root: starts every part with its inputs and runs until shutdown. Only `cli` imports it.

mod clients;
mod config_sources;
mod control_plane;
pub mod controllers;
mod external_dependencies;
mod folder;
mod grpc;
mod identity;
mod injection;
mod keys;
mod kubernetes;
mod listen;
mod other_variables;
mod process;
mod rebalance;
mod registries;
pub mod remote;
mod replicas;
#[cfg(test)]
mod tests;
mod trust_anchors;

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use ::kube::Client;
use tokio::{
    runtime::{Handle, Runtime},
    signal::unix::{SignalKind, signal},
};

use self::{
    config_sources::ConfigSourceError, control_plane::ControlPlane, identity::IdentityError, registries::RegistryError,
    remote::RemoteError,
};
use crate::{
    admin::metrics::PushMetrics,
    base::{ClusterId, Namespace, address::HostPort},
    environment::{self, Environment},
    ingest::{
        diagnostics::{self, IngestStatus, Report},
        file::{FileError, FileSource},
        source::SourceEnded,
    },
    kube::{
        client::{ClientError, install_cryptography},
        requests::RequestMetrics,
    },
    log::scope::Scopes,
    model::{
        Installation, World,
        features::{FeatureError, Features, other::WITHOUT_EFFECT},
        installation::ProcessVariables,
    },
    otlp::{Clocks, Traces},
    push::{PushHandle, debounce::DebounceOptions, push_loop::PushLoop},
    settings::Settings,
};

/// The time limit of ending a runtime, after its tasks have ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A failure to start or to keep running.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The folder of `--configDir` cannot be read.
    #[error(transparent)]
    Folder(#[from] FileError),
    /// An address is in use or not local.
    #[error("cannot listen on {address} ({flag}): {source}; hint: is another istiod running?")]
    Listen {
        /// The address.
        address: HostPort,
        /// The flag that sets it.
        flag: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The system provides no threads, timers or signal handlers.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
    /// An invalid range of blocked addresses. Ignoring it would drop a protection.
    #[error("BLOCKED_CIDRS_IN_JWKS_URIS: {0:?} is not a CIDR range; hint: want a range such as 10.0.0.0/8 or fd00::/8")]
    BlockedRange(String),
    /// Two metrics share a name; a defect.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The thread that owns the model ended. The process must be restarted.
    #[error("the model thread ended unexpectedly; this is a bug in istiod")]
    WorldEnded,
    /// The task of a source ended. The process must be restarted.
    #[error(transparent)]
    SourceEnded(#[from] SourceEnded),
    /// The config cluster is not accessible.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Remote clusters cannot be watched.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// `meshConfig.configSources` is invalid.
    #[error(transparent)]
    ConfigSource(#[from] ConfigSourceError),
    /// The settings of a registry are invalid.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The CA or the serving certificate is not available.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Runs the control plane until a signal ends it. `scopes` are the levels of the log.
pub fn run(settings: Settings, scopes: Arc<Scopes>) -> Result<(), AppError> {
    install_cryptography();
    process::allow_many_files();
    // Certificates are signed on separate threads, so that they do not wait for pushes. This runtime outlives the other
    // one, because connections move from it to the other.
    let ca_runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("certificates")
        .enable_all()
        .build()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .on_thread_start(process::give_way)
        .enable_all()
        .build()?;
    // Parallel generation. The call fails if a test has already created the pool, which is harmless.
    let _ = rayon::ThreadPoolBuilder::new()
        .start_handler(|_| process::give_way())
        .build_global();
    let page_runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("pages")
        .on_thread_start(process::run_in_background)
        .enable_all()
        .build()?;
    let runtimes = Runtimes {
        certificates: ca_runtime.handle(),
        pages: page_runtime.handle(),
    };
    let shutdown = settings.flags.shutdown_duration;
    let environment = Arc::new(Environment {
        scopes,
        ..Environment::new(settings)
    });
    let traces = runtime.block_on(async { start_traces(&environment) });
    let ended = runtime.block_on(until_signal(serve(&environment, &runtimes, traces.as_ref())));
    runtime.block_on(async {
        if !environment.tasks.end(shutdown).await {
            tracing::warn!("shutdown timed out, closing remaining streams");
        }
    });
    if let Some(traces) = traces {
        traces.end();
    }
    close([page_runtime, runtime, ca_runtime], CLOSE_TIMEOUT);
    ended
}

/// Ends runtimes. A thread that blocks, for example in a file system that does not respond, is left behind: to drop a
/// runtime would be to wait for it.
fn close(runtimes: [Runtime; 3], timeout: Duration) {
    for runtime in runtimes {
        runtime.shutdown_timeout(timeout);
    }
}

/// The runtimes besides the one that serves proxies.
struct Runtimes<'a> {
    /// Signs certificates.
    certificates: &'a Handle,
    /// Renders pages.
    pages: &'a Handle,
}

/// Runs the control plane until a vital task ends.
///
/// The order of the steps matters:
/// 1. [`prepare`] reads `--configDir`: its `env.yaml` sets feature flags, which every later step reads. The API server
///    client comes before the model, which must know whether access reviews are possible.
/// 2. [`start_push`] starts the push loop, because every source sends its changes to it.
/// 3. [`ControlPlane::start`] starts the sources and servers, but opens only the HTTP ports: `/ready` answers 503 and
///    debug pages work while sources sync.
/// 4. [`Sources::synced`] waits for the sources, and [`ControlPlane::open`] opens the xDS ports only then. A proxy that
///    connected earlier would receive an incomplete configuration.
/// 5. [`ControlPlane::start_controllers`] runs last: controllers write into clusters and must see a synced mesh.
///
/// [`Sources::synced`]: crate::ingest::source::Sources::synced
async fn serve(
    environment: &Arc<Environment>,
    runtimes: &Runtimes<'_>,
    traces: Option<&Traces>,
) -> Result<(), AppError> {
    process::ignore_user_signals()?;
    let prepared = prepare(environment).await?;
    let push = start_push(environment, &prepared.installation)?;
    if let Some(traces) = traces {
        push.tracker.trace(traces.pushes());
    }
    let mut control_plane = ControlPlane::start(environment, prepared, push, runtimes.pages).await?;
    let model = control_plane.push.inspect.clone();
    let source_ended = control_plane.sources.ended();
    let serving = async move {
        control_plane.sources.synced().await?;
        control_plane.open(runtimes.certificates).await?;
        control_plane.start_controllers()?;
        std::future::pending::<Result<(), AppError>>().await
    };
    tokio::select! {
        failed = serving => failed,
        () = model.closed() => Err(AppError::WorldEnded),
        ended = source_ended => Err(ended.into()),
    }
}

/// The inputs of all later steps.
struct Prepared {
    installation: Installation,
    report: Report,
    ingest_status: Arc<IngestStatus>,
    folder: Option<FileSource>,
    /// The config cluster; none if everything comes from elsewhere.
    client: Option<Client>,
    /// The counter of requests to API servers.
    requests: RequestMetrics,
    /// `meshConfig.configSources`; empty if the folder or the config cluster has the configuration.
    config_sources: Vec<(String, config_sources::Address)>,
}

/// Reads the settings of the installation and connects to the config cluster.
async fn prepare(environment: &Arc<Environment>) -> Result<Prepared, AppError> {
    let settings = &environment.settings;
    let mut installation = installation(settings);
    let (report, ingest_status) = diagnostics::counting_report(&environment.registry)?;
    let access = kubernetes::access(settings)?;
    let mut folder = folder::open(settings, &installation, access.as_ref(), report.clone())?;
    let of_folder = folder.as_ref().map(FileSource::env);
    let variables = variables(settings, of_folder.unwrap_or(&BTreeMap::new()));
    installation.features = features(&variables);
    report_variables(&other_variables::invalid(settings));
    installation.variables = variables.into();
    let requests = RequestMetrics::new(&environment.registry)?;
    let client = kubernetes::client(settings, access.as_ref(), requests.of(&installation.cluster)).await?;
    installation.reviews_access = client.is_some();
    let in_folder = folder.as_ref().and_then(FileSource::mesh_config);
    let config_sources = match (in_folder, &client) {
        (Some(mesh_config), _) => config_sources::parse(&mesh_config.config_sources)?,
        (None, Some(client)) => {
            let mesh_config = tokio::select! {
                mesh_config = kubernetes::mesh_config(settings, &installation, client) => mesh_config,
                ended = listen::not_ready(environment) => return Err(ended),
            };
            config_sources::parse(&mesh_config.config_sources)?
        }
        (None, None) => Vec::new(),
    };
    if !config_sources.is_empty() && folder.is_some() {
        folder = match in_folder {
            Some(_) => Some(folder::open_mesh(settings, &installation, report.clone())?),
            None => None,
        };
    }
    Ok(Prepared {
        installation,
        report,
        ingest_status,
        folder,
        client,
        requests,
        config_sources,
    })
}

/// Starts the export of traces, if the variables request it. Wrong variables must not end a control plane.
fn start_traces(environment: &Environment) -> Option<Traces> {
    let clocks = Clocks {
        monotonic: environment::now,
        wall: environment::wall_clock,
    };
    let started = Traces::start(&environment.settings, &environment.tasks, &environment.registry, clocks);
    started.unwrap_or_else(|error| {
        tracing::error!(%error, "traces are not exported");
        None
    })
}

/// Starts the push loop.
fn start_push(environment: &Environment, installation: &Installation) -> Result<PushHandle, AppError> {
    let (push, run) = PushHandle::new(
        World::new(installation.clone()),
        debounce_options(&installation.features),
        environment::now,
    );
    start_push_loop(run, PushMetrics::new(&environment.registry)?)?;
    Ok(push)
}

fn debounce_options(features: &Features) -> DebounceOptions {
    DebounceOptions {
        after: features.pilot_debounce_after,
        max: features.pilot_debounce_max,
        endpoints_wait: features.pilot_enable_eds_debounce,
    }
}

fn installation(settings: &Settings) -> Installation {
    let flags = &settings.flags;
    let or = |flag: &Option<String>, variable: &str, default: &str| {
        flag.clone()
            .filter(|text| !text.is_empty())
            .unwrap_or_else(|| settings.variable(variable).unwrap_or(default).to_owned())
    };
    Installation {
        cluster: ClusterId::from(or(&flags.cluster_id, "CLUSTER_ID", "Kubernetes")),
        domain: flags.domain.as_str().into(),
        namespace: Namespace::from(or(&flags.namespace, "POD_NAMESPACE", "istio-system")),
        revision: settings.variable("REVISION").unwrap_or_default().into(),
        reviews_access: false,
        resolves_hosts: true,
        registries: flags
            .registries()
            .map(|registry| ClusterId::new_static(registry.name()))
            .collect(),
        features: Features::default(),
        variables: ProcessVariables::default(),
    }
}

/// Returns the variables of the process, which override those of `env.yaml`.
fn variables(settings: &Settings, file: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut variables = file.clone();
    variables.extend(
        settings
            .variables
            .iter()
            .map(|(name, value)| (name.clone(), value.clone())),
    );
    variables
}

/// Parses the feature flags.
fn features(variables: &BTreeMap<String, String>) -> Features {
    let (features, errors) = Features::parse(variables);
    report_variables(&errors);
    for (variable, reason) in WITHOUT_EFFECT {
        if variables.get(*variable).is_some_and(|value| !value.is_empty()) {
            tracing::warn!(variable, reason, "variable has no effect");
        }
    }
    features
}

/// Logs invalid values of variables.
fn report_variables(errors: &[FeatureError]) {
    for error in errors {
        tracing::error!(
            variable = error.variable,
            value = error.value,
            want = error.expected,
            "invalid value of a variable, using the default"
        );
    }
}

/// Runs the push loop on a thread of its own, because its work is synchronous and may take long.
fn start_push_loop(run: PushLoop, metrics: PushMetrics) -> Result<(), AppError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("world".into()).spawn(move || {
        process::give_way();
        runtime.block_on(run.run(metrics));
    })?;
    Ok(())
}

/// Runs until a signal arrives or `serving` ends.
///
/// The handlers are installed once and before anything else runs: from then on, a signal no longer ends the process by
/// itself, so it must reach every step of the start.
async fn until_signal(serving: impl Future<Output = Result<(), AppError>>) -> Result<(), AppError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        ended = serving => return ended,
    }
    tracing::info!("shutting down");
    Ok(())
}
