//! The start of the sources, servers and controllers, in the order that their dependencies require.

use std::{collections::hash_map::RandomState, hash::BuildHasher, sync::Arc};

use ::kube::Client;
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
};

use super::{
    AppError, Prepared,
    config_sources::{self, Issuer, Stores},
    controllers, external_dependencies,
    identity::{self, Identity},
    injection::Injection,
    keys::{self, Author},
    kubernetes::{Config, ControllerInputs, Kubernetes, SourceInputs},
    listen::{self, PageInputs, Webhooks},
    rebalance, registries,
    replicas::{self, ClientInputs, PeerClient, ReplicaService},
    trust_anchors::TrustAnchorsSource,
};
use crate::{
    admin::{debug, metrics::delivery_observer},
    auth::{Authenticators, TrustDomains, tls::Acceptor},
    ca::TrustBundle,
    distribution::{
        Distribution, DistributionSources,
        replicas::{OwnReplica, Peers, Replicas},
    },
    environment::Environment,
    ingest::{
        access::AccessReviews,
        config_sources::ConfigSources,
        diagnostics::{IngestStatus, Report},
        file::FileSource,
        jwks::{Jwks, JwksSettings},
        mcp::IssueCertificate,
        registry_metrics::RegistryMetrics,
        resolve::DnsResolver,
        source::Sources,
    },
    kube::{health::WatchMetrics, requests::RequestMetrics},
    model::{Installation, external_dependencies::ExternalDependencies, features::Features},
    push::PushHandle,
    rpc::Router,
    settings::Settings,
    xds::{
        events::Event,
        server::{Server, ServerOptions},
    },
};

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
pub(super) struct ControlPlane<'a> {
    environment: &'a Arc<Environment>,
    installation: Installation,
    pub(super) push: PushHandle,
    pub(super) sources: Sources,
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
    pub(super) async fn start(
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
    pub(super) async fn open(&mut self, ca_runtime: &Handle) -> Result<(), AppError> {
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
    pub(super) fn start_controllers(&mut self) -> Result<(), AppError> {
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
