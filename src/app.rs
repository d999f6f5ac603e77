//! Composition root: starts every part with its inputs and runs until shutdown. Only `cli` imports it.

mod clients;
mod config_sources;
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

use std::{
    collections::{BTreeMap, hash_map::RandomState},
    hash::BuildHasher,
    io,
    sync::Arc,
    time::Duration,
};

use ::kube::Client;
use tokio::{
    runtime::{Handle, Runtime},
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};

use self::{
    config_sources::{ConfigSourceError, Issuer, Stores},
    identity::{Identity, IdentityError},
    injection::Injection,
    keys::Author,
    kubernetes::{Config, ControllerInputs, Kubernetes, SourceInputs},
    listen::{PageInputs, Webhooks},
    registries::RegistryError,
    remote::RemoteError,
    replicas::{ClientInputs, PeerClient, ReplicaService},
    trust_anchors::TrustAnchorsSource,
};
use crate::{
    admin::{
        debug,
        metrics::{PushMetrics, delivery_observer},
    },
    auth::{Authenticators, TrustDomains, tls::Acceptor},
    base::{ClusterId, Namespace, address::HostPort},
    ca::TrustBundle,
    distribution::{
        Distribution, DistributionSources,
        replicas::{OwnReplica, Peers, Replicas},
    },
    environment::{self, Environment},
    ingest::{
        access::AccessReviews,
        config_sources::ConfigSources,
        diagnostics::{self, IngestStatus, Report},
        file::{FileError, FileSource},
        jwks::{Jwks, JwksSettings},
        mcp::IssueCertificate,
        registry_metrics::RegistryMetrics,
        resolve::DnsResolver,
        source::{SourceEnded, Sources},
    },
    kube::{
        client::{ClientError, install_cryptography},
        health::WatchMetrics,
        requests::RequestMetrics,
    },
    log::scope::Scopes,
    model::{
        Installation, World,
        external_dependencies::ExternalDependencies,
        features::{FeatureError, Features, other::WITHOUT_EFFECT},
        installation::ProcessVariables,
    },
    otlp::{Clocks, Traces},
    push::{PushHandle, debounce::DebounceOptions, push_loop::PushLoop},
    rpc::Router,
    settings::Settings,
    xds::{
        events::Event,
        server::{Server, ServerOptions},
    },
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

/// Inputs that the steps of [`ControlPlane::start`] share.
struct StartInputs<'a> {
    environment: &'a Arc<Environment>,
    installation: &'a Installation,
    push: &'a PushHandle,
    report: &'a Report,
    requests: RequestMetrics,
    watches: WatchMetrics,
    registry_metrics: RegistryMetrics,
    dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>,
    page_runtime: &'a Handle,
}

impl StartInputs<'_> {
    /// Starts the sources of the config cluster, if there is one. Also returns the other stores of configuration, whose
    /// certificates come from `issuer`.
    async fn kubernetes(
        &self,
        sources: &mut Sources,
        client: Option<Client>,
        config_sources: Vec<(String, config_sources::Address)>,
        issuer: &Issuer,
    ) -> Result<(Option<Kubernetes>, ConfigSources), AppError> {
        let has_stores = !config_sources.is_empty();
        let stores = Stores {
            settings: &self.environment.settings,
            installation: self.installation,
            client: client.clone(),
            issuer,
            metrics: &self.registry_metrics,
            report: self.report,
        };
        let (mut stores, cluster_at) = stores.all(config_sources)?;
        let Some(client) = client else {
            return Ok((None, stores));
        };
        let inputs = SourceInputs {
            client,
            report: self.report.clone(),
            requests: &self.requests,
            watches: self.watches.clone(),
            dependencies: self.dependencies.clone(),
            config: match cluster_at {
                Some(index) => Config::Store(&mut stores, index),
                None if has_stores => Config::Elsewhere,
                None => Config::Direct,
            },
        };
        let kubernetes = Kubernetes::start(self.environment, self.installation, sources, inputs);
        let kubernetes = kubernetes.await?;
        Ok((Some(kubernetes), stores))
    }

    /// Starts the CA, trust and authentication, and the sources that follow from them.
    async fn identity(&self, sources: &mut Sources, kubernetes: Option<&Kubernetes>) -> Result<Identity, AppError> {
        let features = &self.installation.features;
        let clients = kubernetes.map(|kubernetes| kubernetes.clients(self.environment, self.installation));
        if let Some(clients) = clients.clone() {
            let subjects = self.push.subjects.clone();
            sources.start(AccessReviews::new(&self.environment.registry, clients, subjects)?);
        }
        let identity = identity::start(identity::IdentityInputs {
            environment: self.environment,
            installation: self.installation,
            client: kubernetes.map(Kubernetes::client),
            clients,
            watches: self.watches.clone(),
            mesh: self.push.mesh.clone(),
            fetcher: keys::fetcher(features, Author::Operator)?,
        });
        let identity = identity.await?;
        if features.istio_multiroot_mesh {
            let cluster = self.installation.cluster.clone();
            let anchors = identity.anchors.clone();
            sources.start(TrustAnchorsSource { cluster, anchors });
        }
        Ok(identity)
    }

    /// Returns the source of JWT keys.
    fn jwks(&self) -> Result<Jwks, AppError> {
        let features = &self.installation.features;
        let settings = JwksSettings {
            cluster: self.installation.cluster.clone(),
            fetcher: keys::fetcher(features, Author::User)?,
            refresh: features.pilot_jwt_pub_key_refresh_interval,
            dependencies: self.dependencies.clone(),
            report: self.report.clone(),
        };
        Ok(Jwks::new(&self.environment.registry, settings)?)
    }

    /// Starts to follow the inputs of injection; `None` if it is switched off.
    fn injection(&self, kubernetes: Option<&Kubernetes>) -> Result<Option<Injection>, AppError> {
        let client = kubernetes.map(Kubernetes::client);
        let mesh = self.push.mesh.clone();
        Injection::start(self.environment, self.installation, client, self.watches.clone(), mesh)
    }

    /// Follows the replicas of this control plane and returns the client that asks them; none without a config cluster.
    /// Fails if the name of a metric is in use.
    fn peers(
        &self,
        kubernetes: Option<&Kubernetes>,
        issue: IssueCertificate,
        trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
    ) -> Result<Option<Arc<dyn Peers>>, prometheus::Error> {
        let Some(kubernetes) = kubernetes else {
            return Ok(None);
        };
        let watches = kubernetes.watches(self.installation);
        let replicas = replicas::follow(&self.environment.tasks, &watches, self.installation);
        let inputs = ClientInputs { replicas, issue, trust };
        let client = PeerClient::new(&self.environment.registry, self.installation, inputs)?;
        Ok(Some(Arc::new(client)))
    }

    /// Starts distribution status, to which the streams report what proxies refuse.
    fn distribution(
        &self,
        streams: &Server,
        ingest_status: Arc<IngestStatus>,
        peers: Option<Arc<dyn Peers>>,
    ) -> Arc<Distribution> {
        let sources = DistributionSources {
            mesh: self.push.mesh.clone(),
            inspect: self.push.inspect.clone(),
            flushes: self.push.flushes.clone(),
            tracker: self.push.tracker.clone(),
            connections: streams.registry().clone(),
            ingest_status,
            replica: own_replica(&self.environment.settings),
            peers,
            runtime: self.page_runtime.clone(),
        };
        let (distribution, refusals) = Distribution::start(&self.environment.tasks, sources);
        streams.set_refusal_queue(refusals);
        distribution
    }

    /// Returns the service that answers the queries of other replicas.
    fn replica_service(&self, distribution: Arc<Distribution>, authenticators: Authenticators) -> ReplicaService {
        ReplicaService {
            distribution,
            authenticators,
            mesh: self.push.mesh.clone(),
            account: config_sources::service_account(&self.environment.settings),
            tasks: self.environment.tasks.clone(),
            runtime: self.page_runtime.clone(),
        }
    }

    /// Starts to write Events about objects of the config cluster whose resources proxies refuse.
    fn write_refusal_events(
        &self,
        kubernetes: Option<&Kubernetes>,
        distribution: &Distribution,
    ) -> Result<(), AppError> {
        // Objects of a folder are in no cluster.
        let in_cluster = self.environment.settings.flags.config_dir.is_none();
        let is_on = self.installation.features.pilot_enable_refusal_events && in_cluster;
        if let Some(kubernetes) = kubernetes.filter(|_| is_on) {
            let refused = distribution.refused_objects();
            controllers::write_refusal_events(self.environment, self.installation, kubernetes.client(), refused)?;
        }
        Ok(())
    }

    /// Opens the HTTP ports. Returns the webhooks, which are among their pages unless they are served with TLS.
    async fn open_pages(
        &self,
        shown: debug::Sources,
        grpc: &Router<Server>,
        authenticators: Authenticators,
        injection: Option<&Injection>,
    ) -> Result<Webhooks, AppError> {
        let injected = injection.map(|injection| injection.inputs(&self.environment.settings));
        let webhooks = Webhooks::new(self.environment, injected)?;
        let inputs = PageInputs {
            sources: shown,
            grpc,
            authenticators,
            webhooks: &webhooks,
            runtime: self.page_runtime,
        };
        listen::pages(self.environment, inputs).await?;
        Ok(webhooks)
    }

    /// Starts the sources besides the config cluster.
    fn other_sources(
        &self,
        sources: &mut Sources,
        folder: Option<FileSource>,
        stores: ConfigSources,
    ) -> Result<(), AppError> {
        let cluster = self.installation.cluster.clone();
        sources.start(DnsResolver::new(cluster, self.dependencies.clone()));
        if let Some(folder) = folder {
            sources.start(folder);
        }
        if !stores.is_empty() {
            sources.start(stores);
        }
        registries::start(self.environment, sources, &self.registry_metrics, self.report)
    }
}

/// The running sources and servers.
struct ControlPlane<'a> {
    environment: &'a Arc<Environment>,
    installation: Installation,
    push: PushHandle,
    sources: Sources,
    kubernetes: Option<Kubernetes>,
    grpc: Router<Server>,
    secure: Option<(Router<Server>, Acceptor)>,
    injection: Option<Injection>,
    /// The webhooks, if they are served with TLS.
    webhooks: Option<(Webhooks, Acceptor)>,
    trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
    /// The trust domains of the mesh.
    domains: watch::Receiver<Arc<TrustDomains>>,
    /// Connection events of workloads that register themselves.
    events: Option<mpsc::Receiver<Event>>,
    distribution: Arc<Distribution>,
    /// The replicas of this control plane, if there is a config cluster.
    replicas: Option<watch::Receiver<Replicas>>,
}

impl<'a> ControlPlane<'a> {
    /// Starts the sources and servers, and opens the HTTP ports. Each step needs what those before it have started.
    async fn start(
        environment: &'a Arc<Environment>,
        prepared: Prepared,
        push: PushHandle,
        page_runtime: &Handle,
    ) -> Result<Self, AppError> {
        let Prepared {
            installation,
            report,
            ingest_status,
            folder,
            client,
            requests,
            config_sources,
        } = prepared;
        let features = &installation.features;
        let events = client.is_some().then(|| controllers::events(features)).flatten();
        let (event_sender, events) = events.unzip();
        let options = server_options(&environment.settings, features);
        let xds = Server::new(environment, push.groups.clone(), options, event_sender)?;
        let inputs = StartInputs {
            environment,
            installation: &installation,
            push: &push,
            report: &report,
            requests,
            watches: WatchMetrics::new(&environment.registry)?,
            registry_metrics: RegistryMetrics::new(&environment.registry)?,
            dependencies: external_dependencies::follow(environment, push.mesh.clone()),
            page_runtime,
        };
        let mut sources = Sources::new(&environment.tasks, push.changes.clone());
        let issuer = Issuer::default();
        let kubernetes = inputs.kubernetes(&mut sources, client, config_sources, &issuer);
        let (kubernetes, stores) = kubernetes.await?;
        let identity = inputs.identity(&mut sources, kubernetes.as_ref()).await?;
        let issue =
            config_sources::issue_certificates(&environment.settings, &installation, &identity, push.mesh.clone());
        issuer.set(issue.clone());
        let (grpc, secure) = identity.routers(xds, &environment.ready.subscribe());
        let peers = inputs.peers(kubernetes.as_ref(), issue, identity.trust.clone())?;
        let replicas = peers.as_ref().map(|peers| peers.replicas());
        let jwks = inputs.jwks()?;
        let injection = inputs.injection(kubernetes.as_ref())?;
        let distribution = inputs.distribution(grpc.streams(), ingest_status, peers);
        let secure = secure.map(|(router, acceptor)| {
            let service = inputs.replica_service(distribution.clone(), identity.authenticators.clone());
            (router.with_server_stream(Arc::new(service)), acceptor)
        });
        inputs.write_refusal_events(kubernetes.as_ref(), &distribution)?;
        push.tracker.observe(delivery_observer(&environment.registry)?);
        let shown = debug::Sources {
            authority: identity.authority,
            anchors: identity.anchors,
            distribution: distribution.clone(),
            mesh: push.mesh.clone(),
            committed: push.committed.clone(),
            inspect: push.inspect.clone(),
            flushes: push.flushes.clone(),
            connections: grpc.streams().registry().clone(),
            remote: kubernetes.as_ref().map(Kubernetes::remote),
            watches: inputs.watches.clone(),
            keys: jwks.reports(),
            templates: injection.as_ref().map(Injection::templates),
        };
        sources.start(jwks);
        let webhooks = inputs.open_pages(shown, &grpc, identity.page_authenticators, injection.as_ref());
        let webhooks = webhooks.await?;
        inputs.other_sources(&mut sources, folder, stores)?;
        Ok(Self {
            environment,
            installation,
            push,
            sources,
            kubernetes,
            grpc,
            secure,
            injection,
            webhooks: identity.webhooks.map(|acceptor| (webhooks, acceptor)),
            trust: identity.trust,
            domains: identity.domains,
            events,
            distribution,
            replicas,
        })
    }

    /// Opens the xDS ports once the snapshot contains what the sources sent, and marks the process as ready.
    ///
    /// Both flushes fail only if the push loop has ended, and then the process ends.
    async fn open(&mut self, ca_runtime: &Handle) -> Result<(), AppError> {
        if self.push.flushes.flush().await {
            let dependencies = ExternalDependencies::of(&self.push.mesh.borrow());
            self.sources.answered(dependencies).await;
        }
        if self.push.flushes.flush().await {
            let shedding = match self.replicas.clone() {
                Some(replicas) => rebalance::follow(&self.environment.tasks, replicas),
                None => watch::channel(None).1,
            };
            identity::domains_known(self.domains.clone(), &self.push.mesh).await;
            listen::xds(self.environment, &self.grpc, shedding.clone()).await?;
            if let Some((secure, acceptor)) = self.secure.take() {
                listen::secure(self.environment, &secure, acceptor, ca_runtime, shedding).await?;
            }
            if let Some(injection) = &mut self.injection {
                injection.prepared().await;
            }
            if let Some((webhooks, acceptor)) = self.webhooks.take() {
                listen::webhooks(self.environment, webhooks, acceptor, ca_runtime).await?;
            }
            tracing::info!("ready");
            self.environment.ready.send_replace(true);
        }
        Ok(())
    }

    /// Starts the controllers, which write into clusters.
    fn start_controllers(&mut self) -> Result<(), AppError> {
        let Some(kubernetes) = &self.kubernetes else {
            return Ok(());
        };
        let inputs = ControllerInputs {
            mesh: self.push.mesh.clone(),
            trust: self.trust.clone(),
            events: self.events.take(),
            injection: self.injection.as_ref(),
            distribution: self.distribution.clone(),
        };
        kubernetes.start_controllers(self.environment, &self.installation, inputs)
    }
}

/// Returns the identity of this process among the replicas.
fn own_replica(settings: &Settings) -> OwnReplica {
    // A `RandomState` has random keys.
    let id = RandomState::new().hash_one(std::process::id());
    OwnReplica {
        name: settings.variable("POD_NAME").unwrap_or_default().into(),
        id: format!("{id:016x}").into(),
    }
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

fn server_options(settings: &Settings, features: &Features) -> ServerOptions {
    let mut options = ServerOptions::of(settings);
    options.quarantines = features.pilot_enable_xds_quarantine;
    options.serves_ambient = features.pilot_enable_ambient;
    options.max_streams = features.istio_gprc_maxstreams;
    options.max_message_bytes = features.istio_gprc_maxrecvmsgsize as usize;
    options.max_held_bytes = (features.pilot_xds_subscription_memory_mb as usize) << 20;
    let rate = features.pilot_max_requests_per_second;
    options.limits.streams_per_second = (rate > 0.0).then_some(rate);
    options
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
