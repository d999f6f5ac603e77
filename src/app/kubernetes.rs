//! Kubernetes sources: the config cluster, its mesh config and the remote clusters declared by its Secrets.

use std::{collections::BTreeSet, sync::Arc};

use ::kube::Client;
use tokio::sync::{mpsc, watch};

use super::{
    AppError, clients,
    controllers::{self, Controllers},
    folder,
    injection::Injection,
    remote::{self, Parts},
};
use crate::{
    base::SmolStr,
    ca::TrustBundle,
    environment::Environment,
    ingest::{
        cluster::{ClusterSettings, ClusterSource},
        context::IngestContext,
        diagnostics::Report,
        discovery_filter::Filters,
        kinds::{Role, Rules},
        mesh::{MeshSettings, MeshSource},
        remote::RemoteClusters,
        source::Sources,
        tag,
    },
    kube::{
        client::{self, Access, ClientError},
        clients::Clients,
        config_cluster::Search,
        health::WatchMetrics,
    },
    model::{Installation, MeshSnapshot, external_dependencies::ExternalDependencies},
    settings::Settings,
    xds::events::Event,
};

/// Mount path of the mesh config.
const MESH_FILE: &str = "./etc/istio/config/mesh";
/// Mount path of the networks.
const NETWORKS_FILE: &str = "./etc/istio/config/meshNetworks";

/// Returns the credentials of the config cluster; `None` if everything comes from a folder. That is the case with
/// `--registries=`, and where `--configDir` is given and no cluster is found.
pub(super) fn access(settings: &Settings) -> Result<Option<Access>, ClientError> {
    let flags = &settings.flags;
    let (has_folder, has_flag) = (flags.config_dir.is_some(), flags.kubeconfig.is_some());
    if has_folder && !has_flag && !flags.reads_kubernetes() {
        return Ok(None);
    }
    let search = Search {
        flag: flags.kubeconfig.as_deref(),
        variable: settings.variable("KUBECONFIG"),
        home: settings.variable("HOME"),
        has_service: ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"]
            .iter()
            .all(|name| settings.variable(name).is_some()),
    };
    let found = search.find()?;
    if found.is_none() && has_folder && flags.registries.is_none() {
        return Ok(None);
    }
    // Parity (pkg/kube/util.go): without any configuration Istio waits for an API server on this machine.
    let access = found.unwrap_or(Access::Local);
    if matches!(access, Access::Local) {
        tracing::warn!(server = %access, "no kubeconfig and no service account found; hint: set --kubeconfig or KUBECONFIG");
    } else {
        tracing::info!(credentials = %access, "config cluster found");
    }
    Ok(Some(access))
}

/// Returns a client of the config cluster.
pub(super) async fn client(settings: &Settings, access: Option<&Access>) -> Result<Option<Client>, ClientError> {
    match access {
        Some(access) => client::client(access, clients::rate(settings)).await.map(Some),
        None => Ok(None),
    }
}

/// The running sources.
pub(super) struct Kubernetes {
    client: Client,
    remote: watch::Receiver<Arc<RemoteClusters>>,
    watches: WatchMetrics,
    /// Tags of the own revision; `None` while unknown.
    tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
}

impl Kubernetes {
    /// Starts all sources.
    pub(super) async fn start(
        environment: &Arc<Environment>,
        installation: &Installation,
        client: Client,
        sources: &mut Sources,
        report: Report,
        watches: WatchMetrics,
        dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>,
    ) -> Result<Self, AppError> {
        let rules = rules(&environment.settings, installation);
        let shared = Arc::new(IngestContext::new(environment, rules, report, watches.clone())?);
        let tasks = &environment.tasks;
        if !folder::replaces_mesh_config(&environment.settings) {
            let settings = mesh_settings(&environment.settings, installation);
            sources.start(MeshSource {
                settings,
                client: client.clone(),
                shared: shared.clone(),
            });
        }
        let (tags_out, tags) = watch::channel(None);
        let own = (installation.namespace.clone(), installation.revision.clone());
        let id = installation.cluster.clone();
        let following = tag::follow(id.clone(), client.clone(), own, shared.clone(), tags_out);
        tasks.spawn_until_shutdown("revision tags", following);
        let (filters_out, filters) = watch::channel(None);
        let following = follow_filters(dependencies, tags.clone(), filters_out);
        tasks.spawn_until_shutdown("filters", following);
        let config = ClusterSettings {
            id,
            client: client.clone(),
            role: Role::Config,
            filters: filters.clone(),
        };
        sources.start(ClusterSource::new(config, &shared));
        let parts = Parts {
            environment,
            installation,
            client: client.clone(),
            shared: &shared,
            filters,
        };
        let remote = remote::start(parts, sources).await?;
        Ok(Self {
            client,
            remote,
            watches,
            tags,
        })
    }

    /// Returns the remote clusters.
    pub(super) fn remote(&self) -> watch::Receiver<Arc<RemoteClusters>> {
        self.remote.clone()
    }

    /// Returns the client of the config cluster.
    pub(super) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns the clients of all clusters.
    pub(super) fn clients(&self, environment: &Environment, installation: &Installation) -> Clients {
        let own = (installation.cluster.clone(), self.client.clone());
        clients::follow(environment, own, self.remote())
    }

    /// Starts the controllers.
    pub(super) fn start_controllers(
        &self,
        environment: &Arc<Environment>,
        installation: &Installation,
        mesh: watch::Receiver<Arc<MeshSnapshot>>,
        trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
        events: Option<mpsc::Receiver<Event>>,
        injection: Option<&Injection>,
    ) -> Result<(), AppError> {
        let gateways = injection.map(|injection| injection.gateways(environment, self.tags.clone()));
        let config = controllers::Cluster {
            id: installation.cluster.clone(),
            client: self.client.clone(),
            metrics: self.watches.clone(),
            remote: false,
            led: true,
            until: environment.tasks.shutdown().clone(),
        };
        let controllers = Controllers::start(environment, installation, &config, mesh, trust, events, gateways)?;
        if controllers.concern_remote_clusters() {
            let watches = self.watches.clone();
            let (environment, installation) = (environment.clone(), installation.clone());
            let control = remote::control(controllers, watches, environment.clone(), installation, self.remote());
            environment.tasks.spawn_until_shutdown("remote controllers", control);
        }
        Ok(())
    }
}

fn rules(settings: &Settings, installation: &Installation) -> Rules {
    let features = &installation.features;
    let mcs = features.enable_mcs_service_discovery
        || features.enable_mcs_host
        || features.enable_mcs_cluster_local
        || features.enable_mcs_auto_export;
    Rules {
        system_namespace: installation.namespace.clone(),
        revision: installation.revision.clone(),
        ignored: features.pilot_ignore_resources.clone(),
        included: features.pilot_include_resources.clone(),
        watch_namespace: settings.variable("ISTIO_WATCH_NAMESPACE").map(str::to_owned),
        config_kinds: settings.flags.config_dir.is_none(),
        gateway_api: features.pilot_enable_gateway_api,
        mcs: mcs.then(|| (features.mcs_api_group.clone(), features.mcs_api_version.clone())),
        remote_workload_entries: features.pilot_enable_cross_cluster_workload_entry,
    }
}

fn mesh_settings(settings: &Settings, installation: &Installation) -> MeshSettings {
    let flags = &settings.flags;
    MeshSettings {
        cluster: installation.cluster.clone(),
        mesh_key: installation.mesh_config_key(),
        namespace: installation.namespace.clone(),
        revision: installation.revision.clone(),
        shared_map: settings.variable("SHARED_MESH_CONFIG").map(Into::into),
        mesh_file: flags.mesh_config.clone().unwrap_or_else(|| MESH_FILE.into()),
        networks_file: flags.networks_config.clone().unwrap_or_else(|| NETWORKS_FILE.into()),
    }
}

/// Publishes the inputs of the discovery filter once the mesh config and the revision tags are known.
async fn follow_filters(
    mut dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>,
    mut tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    out: watch::Sender<Option<Filters>>,
) {
    loop {
        let dependencies_now = dependencies.borrow_and_update().clone();
        let tags_now = tags.borrow_and_update().clone();
        if let (Some(dependencies), Some(tags)) = (dependencies_now, tags_now) {
            let selectors = dependencies.discovery_selectors.clone();
            let filters = Some(Filters { selectors, tags });
            out.send_if_modified(|have| {
                let different = *have != filters;
                *have = filters;
                different
            });
        }
        let changed = tokio::select! {
            changed = dependencies.changed() => changed,
            changed = tags.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
    }
}
