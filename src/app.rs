//! Builds every part, hands each its inputs, runs until shutdown. Nothing imports this but `cli`.

pub mod controllers;
pub mod remote;
mod wants;

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc};

use axum::{Router, extract::ConnectInfo};
use prometheus::{IntCounterVec, Opts};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};

use crate::{
    admin::{
        debug::{self, Sources},
        metrics::PushMetrics,
        server,
    },
    api::{Diagnostic, Severity},
    base::{ClusterId, Namespace},
    environment::{self, Environment},
    ingest::{
        file::{FileError, FileSettings, FileSource, Objects, Report},
        resolve,
    },
    model::{Change, Installation, MeshSnapshot, World, features::Features},
    push::{Pump, PushOptions, debounce::Timing, pump::PumpLoop},
    settings::{Address, Settings},
    xds::{
        body::FlatBody,
        server::{Peer, Server, ServerOptions, is_grpc},
    },
};

/// Why the control plane could not start.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The folder of `--configDir` cannot be read.
    #[error(transparent)]
    Folder(#[from] FileError),
    /// An address is taken or not ours.
    #[error("cannot listen on {address} ({flag}): {source}; hint: is another istiod running?")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The flag that gives it.
        flag: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// The system refuses threads, timers or signals.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
    /// Two metrics have one name; a defect.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The thread that owns the model is gone: whoever started the process should start it again.
    #[error("the model's thread ended unexpectedly; this is a defect of istiod")]
    WorldEnded,
    /// Nothing to serve.
    #[error("no source of configuration: --configDir is needed (Kubernetes as a source is not served by this build)")]
    NoSource,
}

/// Runs the control plane until a signal ends it.
pub fn run(settings: Settings) -> Result<(), AppError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let shutdown = settings.flags.shutdown_duration;
    let environment = Arc::new(Environment::new(settings));
    let ended = runtime.block_on(serve(&environment));
    runtime.block_on(async {
        if !environment.tasks.end(shutdown).await {
            tracing::warn!("some streams did not end by themselves and were cut");
        }
    });
    ended
}

async fn serve(environment: &Arc<Environment>) -> Result<(), AppError> {
    let mut installation = installation(&environment.settings);
    let (source, changes) = open_folder(environment, &installation)?;
    installation.features = features(&environment.settings, source.env());
    let features = installation.features.clone();
    let cluster = installation.cluster.clone();
    let options = PushOptions {
        timing: Timing {
            after: features.pilot_debounce_after,
            max: features.pilot_debounce_max,
            endpoints_wait: features.pilot_enable_eds_debounce,
        },
    };
    let (pump, run) = Pump::new(World::new(installation), options, environment::now);
    start_pump(run, PushMetrics::new(&environment.registry)?)?;
    let xds = Server::new(
        environment,
        pump.groups.clone(),
        server_options(&environment.settings, &features),
        None,
    )?;
    listen(environment, &pump, &xds).await?;
    let wants = wants::follow(environment, pump.mesh.clone());
    resolve::start(environment, cluster, wants, pump.changes.clone());
    start_source(environment, source, pump.changes.clone(), changes, pump.mesh.clone());
    tokio::select! {
        signal = until_signal() => signal?,
        () = pump.inspect.closed() => return Err(AppError::WorldEnded),
    }
    tracing::info!("ending");
    Ok(())
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
        revision: settings.variable("REVISION").unwrap_or("default").into(),
        features: Features::default(),
    }
}

/// Variables of the process stand over those of `env.yaml`.
fn features(settings: &Settings, file: &BTreeMap<String, String>) -> Features {
    let mut variables = file.clone();
    variables.extend(
        settings
            .variables
            .iter()
            .map(|(name, value)| (name.clone(), value.clone())),
    );
    let (features, errors) = Features::parse(&variables);
    for error in errors {
        tracing::error!("{error}");
    }
    features
}

fn open_folder(
    environment: &Arc<Environment>,
    installation: &Installation,
) -> Result<(FileSource, Vec<Change>), AppError> {
    let settings = &environment.settings;
    let folder = settings.flags.config_dir.clone().ok_or(AppError::NoSource)?;
    if !settings.is_folder_only() {
        return Err(AppError::NoSource);
    }
    let counter = IntCounterVec::new(
        Opts::new(
            "pilot_total_rejected_configs",
            "Total number of configs that Pilot had to reject or ignore.",
        ),
        &["type", "name"],
    )?;
    environment.registry.register(Box::new(counter.clone()))?;
    let report: Report = Arc::new(move |diagnostic: &Diagnostic| count(&counter, diagnostic));
    let file_settings = FileSettings {
        folder,
        cluster: installation.cluster.clone(),
        mesh_key: installation.mesh_config_key(),
        objects: Objects::All,
        mesh_file: settings.flags.mesh_config.clone(),
        networks_file: settings.flags.networks_config.clone(),
    };
    Ok(FileSource::open(file_settings, report)?)
}

/// Counts an error in config. The source tells it.
fn count(counter: &IntCounterVec, diagnostic: &Diagnostic) {
    if diagnostic.severity == Severity::Error {
        let kind = diagnostic.kind.map_or("document", crate::api::Kind::name);
        counter.with_label_values(&[kind, &diagnostic.key.to_string()]).inc();
    }
}

/// The world has a thread of its own: its work is synchronous and may take long.
fn start_pump(run: PumpLoop, metrics: PushMetrics) -> Result<(), AppError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new()
        .name("world".into())
        .spawn(move || runtime.block_on(run.run(metrics)))?;
    Ok(())
}

fn server_options(settings: &Settings, features: &Features) -> ServerOptions {
    let mut options = ServerOptions::from_flags(&settings.flags);
    options.max_streams = features.istio_gprc_maxstreams;
    options.max_message_bytes = features.istio_gprc_maxrecvmsgsize as usize;
    let rate = features.pilot_max_requests_per_second;
    options.limits.streams_per_second = (rate > 0.0).then_some(rate);
    options
}

/// Opens every port. Empty addresses move what they serve to `--httpAddr`.
async fn listen(environment: &Arc<Environment>, pump: &Pump, xds: &Server) -> Result<(), AppError> {
    let flags = &environment.settings.flags;
    let sources = Arc::new(Sources {
        mesh: pump.mesh.clone(),
        inspect: pump.inspect.clone(),
        connections: xds.registry().clone(),
        remote: None,
    });
    let pages = || server::local_only(debug::pages(sources.clone()));
    let mut http = server::readiness(environment).merge(pages());
    let monitoring = server::monitoring(environment, pump.inspect.clone())?;
    match flags.monitoring_addr {
        Address(Some(address)) => {
            serve_http(environment, "--monitoringAddr", address, monitoring.merge(pages())).await?;
        }
        Address(None) => http = http.merge(monitoring),
    }
    match flags.grpc_addr {
        Address(Some(address)) => {
            let listener = bind("--grpcAddr", address).await?;
            let xds = xds.clone();
            environment.tasks.spawn("xds", async move { xds.serve(listener).await });
        }
        Address(None) => http = with_xds(http, xds),
    }
    if let Address(Some(address)) = flags.http_addr {
        serve_http(environment, "--httpAddr", address, http).await?;
    }
    Ok(())
}

/// xDS beside other pages: whatever is gRPC goes to the xDS server.
fn with_xds(router: Router, xds: &Server) -> Router {
    let xds = xds.clone();
    router.fallback(move |mut request: axum::extract::Request| {
        let xds = xds.clone();
        async move {
            if !is_grpc(request.headers()) {
                return axum::response::IntoResponse::into_response(axum::http::StatusCode::NOT_FOUND);
            }
            let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
            if let Some(peer) = peer.map(|ConnectInfo(address)| Peer { address: *address }) {
                request.extensions_mut().insert(peer);
            }
            xds.handle(request)
                .await
                .map(|body| axum::body::Body::new(FlatBody::from(body)))
        }
    })
}

async fn bind(flag: &'static str, address: SocketAddr) -> Result<TcpListener, AppError> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| AppError::Listen { address, flag, source })?;
    tracing::info!(flag, address = %listener.local_addr()?, "listening");
    Ok(listener)
}

async fn serve_http(
    environment: &Arc<Environment>,
    flag: &'static str,
    address: SocketAddr,
    router: Router,
) -> Result<(), AppError> {
    let listener = bind(flag, address).await?;
    let shutdown = environment.tasks.shutdown().clone();
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    environment.tasks.spawn("http", async move {
        let serving = axum::serve(listener, service).with_graceful_shutdown(shutdown.cancelled_owned());
        if let Err(error) = serving.await {
            tracing::error!(%error, "an HTTP server ended");
        }
    });
    Ok(())
}

/// Hands over the first state, then follows the folder. Ready once the first snapshot stands.
fn start_source(
    environment: &Arc<Environment>,
    source: FileSource,
    sender: mpsc::Sender<Vec<Change>>,
    first: Vec<Change>,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
) {
    let held = environment.clone();
    environment.tasks.spawn_until_shutdown("readiness", async move {
        // The first snapshot holds at least the mesh config.
        if mesh.wait_for(|mesh| mesh.revision.0 > 0).await.is_ok() {
            tracing::info!("ready");
            held.ready.send_replace(true);
        }
    });
    environment.tasks.spawn_until_shutdown("folder", async move {
        if sender.send(first).await.is_ok() {
            source.run(sender).await;
        }
    });
}

async fn until_signal() -> Result<(), AppError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
