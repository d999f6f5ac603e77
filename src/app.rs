//! Builds every part, hands each its inputs, runs until shutdown. Nothing imports this but `cli`.

mod clients;
pub mod controllers;
mod folder;
mod identity;
mod keys;
mod kubernetes;
mod listen;
mod process;
pub mod remote;
mod wants;

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc};

use futures::{FutureExt, future::BoxFuture};
use tokio::{
    runtime::Handle,
    signal::unix::{SignalKind, signal},
};

use self::{folder::Folder, identity::IdentityError, kubernetes::Kubernetes, remote::RemoteError};
use crate::{
    admin::{debug, metrics::PushMetrics},
    base::{ClusterId, Namespace},
    environment::{self, Environment},
    ingest::{access, file::FileError, findings, resolve},
    kube::{
        client::{ClientError, install_cryptography},
        health::WatchMetrics,
    },
    model::{Installation, World, features::Features, wants::Wants},
    push::{PushHandle, PushOptions, debounce::DebounceOptions, push_loop::PushLoop},
    settings::Settings,
    xds::server::{Server, ServerOptions},
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
    /// A range of addresses that nothing is to be fetched from cannot be read; it would be no protection.
    #[error("BLOCKED_CIDRS_IN_JWKS_URIS: {0:?} is no range of addresses; hint: write 10.0.0.0/8 or fd00::/8")]
    BlockedRange(String),
    /// Two metrics have one name; a defect.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The thread that owns the model is gone: whoever started the process should start it again.
    #[error("the model's thread ended unexpectedly; this is a defect of istiod")]
    WorldEnded,
    /// The task that reads the config cluster is gone: as above.
    #[error("the config cluster is read no longer; this is a defect of istiod")]
    SourceEnded,
    /// There is no access to the config cluster.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Remote clusters cannot be followed.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// There is no CA, or no certificate of ours.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Runs the control plane until a signal ends it.
pub fn run(settings: Settings) -> Result<(), AppError> {
    install_cryptography();
    process::allow_many_files();
    // Certificates are signed on threads of their own, so that they do not wait behind pushes. Ends after the other runtime,
    // to which some of its connections move.
    let lane = tokio::runtime::Builder::new_multi_thread()
        .thread_name("certificates")
        .enable_all()
        .build()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .on_thread_start(process::give_way)
        .enable_all()
        .build()?;
    // Generation in parallel. If a test has made the pool already, so be it.
    let _ = rayon::ThreadPoolBuilder::new()
        .start_handler(|_| process::give_way())
        .build_global();
    let shutdown = settings.flags.shutdown_duration;
    let environment = Arc::new(Environment::new(settings));
    let ended = runtime.block_on(serve(&environment, lane.handle()));
    runtime.block_on(async {
        if !environment.tasks.end(shutdown).await {
            tracing::warn!("some streams did not end by themselves and were cut");
        }
    });
    ended
}

async fn serve(environment: &Arc<Environment>, lane: &Handle) -> Result<(), AppError> {
    let settings = &environment.settings;
    let mut installation = installation(settings);
    let report = findings::counting(&environment.registry)?;
    let folder = Folder::open(settings, &installation, report.clone())?;
    let variables = folder.as_ref().map(Folder::env);
    installation.features = features(settings, variables.unwrap_or(&BTreeMap::new()));
    let features = installation.features.clone();
    let client = kubernetes::client(settings).await?;
    installation.reviews_access = client.is_some();
    let (push, run) = PushHandle::new(
        World::new(installation.clone()),
        push_options(&features),
        environment::now,
    );
    start_push_loop(run, PushMetrics::new(&environment.registry)?)?;
    let events = client.is_some().then(|| controllers::events(&features)).flatten();
    let (events, told) = events.unzip();
    let options = server_options(settings, &features);
    let xds = Server::new(environment, push.groups.clone(), options, events)?;
    let watches = WatchMetrics::new(&environment.registry)?;
    let wants = wants::follow(environment, push.mesh.clone());
    let mut kubernetes = match client {
        Some(client) => {
            let (watches, wants) = (watches.clone(), wants.clone());
            let report = report.clone();
            let start = Kubernetes::start(environment, &installation, client, &push, report, watches, wants);
            Some(start.await?)
        }
        None => None,
    };
    let clients = kubernetes
        .as_ref()
        .map(|kubernetes| kubernetes.clients(environment, &installation));
    if let Some(clients) = clients.clone() {
        access::start(environment, clients, push.subjects.clone(), push.changes.clone())?;
    }
    let fetcher = keys::fetcher(&features)?;
    let identity = identity::start(identity::Parts {
        environment,
        installation: &installation,
        client: kubernetes.as_ref().map(Kubernetes::client),
        clients,
        watches: watches.clone(),
        mesh: push.mesh.clone(),
        fetcher: fetcher.clone(),
    });
    let identity = identity.await?;
    let (authenticators, trust) = (identity.authenticators.clone(), identity.trust.clone());
    let (grpc, secure) = identity.routers(xds);
    let keys = keys::start(environment, &installation, fetcher, wants.clone(), &push, report)?;
    let sources = debug::Sources {
        mesh: push.mesh.clone(),
        inspect: push.inspect.clone(),
        connections: grpc.streams().registry().clone(),
        remote: kubernetes.as_ref().map(Kubernetes::remote),
        watches,
        keys: keys.clone(),
    };
    listen::pages(environment, sources, &grpc, authenticators)?;
    resolve::start(environment, installation.cluster.clone(), wants, push.changes.clone());
    let ended: BoxFuture<'_, ()> = match &kubernetes {
        Some(kubernetes) => kubernetes.ended().boxed(),
        None => std::future::pending().boxed(),
    };
    let serving = async {
        if let Some(folder) = folder {
            folder.start(environment, push.changes.clone()).await;
        }
        if let Some(kubernetes) = &mut kubernetes
            && !kubernetes.synced().await
        {
            return Err(AppError::SourceEnded);
        }
        // What was sent is in the snapshot, or the process ends. What the snapshot asks for should be there when proxies ask.
        if push.flush().await {
            let wants = Wants::of(&push.mesh.borrow());
            keys.answered(&wants, keys::PATIENCE).await;
        }
        if push.flush().await {
            listen::xds(environment, &grpc)?;
            if let Some((secure, acceptor)) = secure {
                listen::secure(environment, &secure, acceptor, lane).await?;
            }
            tracing::info!("ready");
            environment.ready.send_replace(true);
        }
        if let Some(kubernetes) = &kubernetes {
            kubernetes.start_controllers(environment, &installation, push.mesh.clone(), trust, told)?;
        }
        std::future::pending::<Result<(), AppError>>().await
    };
    tokio::select! {
        signal = until_signal() => signal?,
        failed = serving => return failed,
        () = push.inspect.closed() => return Err(AppError::WorldEnded),
        () = ended => return Err(AppError::SourceEnded),
    }
    tracing::info!("ending");
    Ok(())
}

fn push_options(features: &Features) -> PushOptions {
    PushOptions {
        debounce: DebounceOptions {
            after: features.pilot_debounce_after,
            max: features.pilot_debounce_max,
            endpoints_wait: features.pilot_enable_eds_debounce,
        },
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
        revision: settings.variable("REVISION").unwrap_or("default").into(),
        reviews_access: false,
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

/// The world has a thread of its own: its work is synchronous and may take long.
fn start_push_loop(run: PushLoop, metrics: PushMetrics) -> Result<(), AppError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("world".into()).spawn(move || {
        process::give_way();
        runtime.block_on(run.run(metrics));
    })?;
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

async fn until_signal() -> Result<(), AppError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
