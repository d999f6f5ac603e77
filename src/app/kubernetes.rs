//! Kubernetes sources: the config cluster, its mesh config and the remote clusters declared by its Secrets.

use std::{collections::BTreeSet, sync::Arc};

use ::kube::Client;
use tokio::sync::{mpsc, watch};

use super::{
    AppError, clients,
    controllers::{self, ConfigClusterInputs, Controllers, DistributionInputs, StatusInputs},
    folder,
    injection::Injection,
    remote::{self, RemoteInputs},
};
use crate::{
    api::Kind,
    base::SmolStr,
    ca::TrustBundle,
    distribution::Distribution,
    environment::Environment,
    ingest::{
        cluster::{ClusterSettings, ClusterSource},
        config_sources::ConfigSources,
        context::IngestContext,
        crd,
        diagnostics::Report,
        discovery_filter::Filters,
        kinds::{Role, Rules},
        mesh::{self, MeshSettings, MeshSource},
        remote::RemoteClusters,
        source::Sources,
        tag,
    },
    kube::{
        client::{self, Access, ClientError},
        clients::Clients,
        config_cluster::Search,
        health::WatchMetrics,
        requests::{ClusterRequests, RequestMetrics},
    },
    model::{Installation, MeshSnapshot, external_dependencies::ExternalDependencies, gateway_api},
    proto::istio::mesh::v1alpha1::MeshConfig,
    settings::Settings,
    status::{distribution_status, gateway_status::ServedKinds, watching::Watches},
    task,
    xds::events::Event,
};

/// Mount path of the mesh config.
const MESH_FILE: &str = "./etc/istio/config/mesh";
/// Mount path of the networks.
const NETWORKS_FILE: &str = "./etc/istio/config/meshNetworks";

/// Returns the credentials of the config cluster; `None` if everything comes from elsewhere. That is the case with
/// `--registries` that leave Kubernetes out, and where `--configDir` is given and no cluster is found.
pub(super) fn access(settings: &Settings) -> Result<Option<Access>, ClientError> {
    let flags = &settings.flags;
    let (has_folder, has_flag) = (flags.config_dir.is_some(), flags.kubeconfig.is_some());
    let is_elsewhere = has_folder || flags.registries().next().is_some();
    if is_elsewhere && !has_flag && !flags.reads_kubernetes() {
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

/// Returns a client of the config cluster, whose requests are counted.
pub(super) async fn client(
    settings: &Settings,
    access: Option<&Access>,
    requests: ClusterRequests,
) -> Result<Option<Client>, ClientError> {
    match access {
        Some(access) => client::counted_client(access, clients::rate(settings), requests)
            .await
            .map(Some),
        None => Ok(None),
    }
}

/// The part of the config cluster in the configuration.
pub(super) enum Config<'a> {
    /// Its objects count, unless a folder replaces them.
    Direct,
    /// It is one of several stores, at this index.
    Store(&'a mut ConfigSources, usize),
    /// Other stores have all configuration.
    Elsewhere,
}

/// Returns the mesh config of the config cluster, for what must be known before the sources start.
pub(super) async fn mesh_config(settings: &Settings, installation: &Installation, client: &Client) -> MeshConfig {
    mesh::read_once(&mesh_settings(settings, installation), client).await
}

/// Inputs of the sources.
pub(super) struct SourceInputs<'a> {
    pub(super) client: Client,
    pub(super) report: Report,
    pub(super) requests: &'a RequestMetrics,
    pub(super) watches: WatchMetrics,
    pub(super) dependencies: watch::Receiver<Option<Arc<ExternalDependencies>>>,
    pub(super) config: Config<'a>,
}

/// Inputs of the controllers.
pub(super) struct ControllerInputs<'a> {
    pub(super) mesh: watch::Receiver<Arc<MeshSnapshot>>,
    pub(super) trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
    pub(super) events: Option<mpsc::Receiver<Event>>,
    pub(super) injection: Option<&'a Injection>,
    pub(super) distribution: Arc<Distribution>,
}

/// The running sources.
pub(super) struct Kubernetes {
    client: Client,
    remote: watch::Receiver<Arc<RemoteClusters>>,
    watches: WatchMetrics,
    /// Tags of the own revision; `None` while unknown.
    tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    shared: Arc<IngestContext>,
}

impl Kubernetes {
    /// Starts all sources.
    pub(super) async fn start(
        environment: &Arc<Environment>,
        installation: &Installation,
        sources: &mut Sources,
        inputs: SourceInputs<'_>,
    ) -> Result<Self, AppError> {
        let SourceInputs {
            client,
            report,
            requests,
            watches,
            dependencies,
            config,
        } = inputs;
        let mut rules = rules(&environment.settings, installation);
        rules.config_kinds = match &config {
            Config::Direct => rules.config_kinds,
            Config::Store(..) => true,
            Config::Elsewhere => false,
        };
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
        let id = installation.cluster.clone();
        let following = tag::follow(
            id.clone(),
            client.clone(),
            installation.namespace.clone(),
            installation.revision.clone(),
            shared.clone(),
            tags_out,
        );
        tasks.spawn_until_shutdown("revision tags", following);
        let (filters_out, filters) = watch::channel(None);
        let following = follow_filters(dependencies, tags.clone(), filters_out);
        tasks.spawn_until_shutdown("filters", following);
        let cluster = ClusterSettings {
            id,
            client: client.clone(),
            role: Role::Config,
            filters: filters.clone(),
        };
        let cluster_source = ClusterSource::new(cluster, &shared);
        match config {
            Config::Store(stores, index) => sources.start(stores.split(index, cluster_source)),
            Config::Direct | Config::Elsewhere => sources.start(cluster_source),
        }
        let remote_inputs = RemoteInputs {
            environment,
            installation,
            client: client.clone(),
            requests,
            shared: &shared,
            filters,
        };
        let remote = remote::start(remote_inputs, sources).await?;
        Ok(Self {
            client,
            remote,
            watches,
            tags,
            shared,
        })
    }

    /// Returns a function that starts to follow which of these kinds the config cluster serves.
    fn served(
        &self,
        environment: &Arc<Environment>,
        installation: &Installation,
        kinds: &[Kind],
    ) -> Arc<dyn Fn() -> ServedKinds + Send + Sync> {
        let rules = rules(&environment.settings, installation);
        let read = rules.kinds(Role::Config);
        let kinds = kinds.iter().copied().filter(|kind| read.contains(kind));
        let kinds: Vec<crd::CustomKind> = kinds
            .map(|kind| {
                let (group, versions) = rules.group_and_versions(kind);
                crd::CustomKind { kind, group, versions }
            })
            .collect();
        let (id, client, shared) = (installation.cluster.clone(), self.client(), self.shared.clone());
        let tasks = environment.tasks.clone();
        Arc::new(move || {
            let (out, served) = watch::channel(None);
            let following = crd::follow(id.clone(), client.clone(), kinds.clone(), shared.clone(), out);
            tasks.spawn_until_shutdown("kinds with statuses", following);
            served
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

    /// Returns a factory of watches in the config cluster.
    pub(super) fn watches(&self, installation: &Installation) -> Watches {
        Watches {
            client: self.client.clone(),
            cluster: installation.cluster.clone(),
            metrics: self.watches.clone(),
        }
    }

    /// Returns the clients of all clusters.
    pub(super) fn clients(&self, environment: &Environment, installation: &Installation) -> Clients {
        let cluster = installation.cluster.clone();
        clients::follow(environment, cluster, self.client.clone(), self.remote())
    }

    /// Starts the controllers.
    pub(super) fn start_controllers(
        &self,
        environment: &Arc<Environment>,
        installation: &Installation,
        inputs: ControllerInputs<'_>,
    ) -> Result<(), AppError> {
        let ControllerInputs {
            mesh,
            trust,
            events,
            injection,
            distribution,
        } = inputs;
        let config = controllers::Cluster {
            id: installation.cluster.clone(),
            client: self.client.clone(),
            metrics: self.watches.clone(),
            remote: false,
            led: true,
            until: environment.tasks.shutdown().clone(),
        };
        let inputs = ConfigClusterInputs {
            mesh,
            trust,
            events,
            statuses: StatusInputs {
                tags: self.tags.clone(),
                served: self.served(environment, installation, &gateway_api::status::KINDS),
            },
            distribution: DistributionInputs {
                served: self.served(environment, installation, distribution_status::KINDS),
                distribution,
            },
            gateways: injection.map(|injection| injection.gateways(environment, self.tags.clone())),
        };
        let controllers = Controllers::start(environment, installation, &config, inputs)?;
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
        watch_namespaces: settings.watch_namespaces(),
        config_kinds: settings.flags.config_dir.is_none(),
        gateway_api: features.pilot_enable_gateway_api,
        inference: features.enable_gateway_api_inference_extension,
        network_gateways: features.pilot_multi_network_discover_gateway_api,
        ambient: features.pilot_enable_ambient,
        mcs: mcs.then(|| (features.mcs_api_group.clone(), features.mcs_api_version.clone())),
        // Parity (pilot/pkg/serviceregistry/kube/controller/multicluster.go, `initializeCluster`): unless Services
        // select WorkloadEntries, those of remote clusters are not read, and ServiceEntries lack them too.
        remote_workload_entries: features.pilot_enable_k8s_select_workload_entries
            && features.pilot_enable_cross_cluster_workload_entry,
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
            task::publish(&out, Some(Filters { selectors, tags }));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::features::Features, settings::fixture};

    fn kinds(role: Role, flags: &[&str], variables: &[(&str, &str)]) -> BTreeSet<Kind> {
        let settings = fixture::settings(flags, variables);
        let (features, _) = Features::parse(&settings.variables);
        let installation = Installation {
            features,
            ..Installation::default()
        };
        rules(&settings, &installation).kinds(role)
    }

    #[test]
    fn remote_workload_entries_are_read_for_services_that_select_them() {
        let reads = |role: Role, variables: &[(&str, &str)]| kinds(role, &[], variables).contains(&Kind::WorkloadEntry);
        assert!(reads(Role::Remote, &[]));
        for variable in [
            "PILOT_ENABLE_CROSS_CLUSTER_WORKLOAD_ENTRY",
            "PILOT_ENABLE_K8S_SELECT_WORKLOAD_ENTRIES",
        ] {
            let off = [(variable, "false")];
            assert!(!reads(Role::Remote, &off), "{variable}");
            assert!(reads(Role::Config, &off), "{variable}");
        }
    }

    #[test]
    fn network_gateways_and_waypoints_do_not_need_the_gateway_api() {
        let read = |role: Role, variables: &[(&str, &str)]| {
            let variables = [&[("PILOT_ENABLE_GATEWAY_API", "false")][..], variables].concat();
            let kinds = kinds(role, &[], &variables).into_iter();
            kinds.filter(|kind| kind.is_gateway_api()).collect::<Vec<Kind>>()
        };
        for role in [Role::Config, Role::Remote] {
            assert_eq!(read(role, &[]), [Kind::KubeGateway], "{role:?}");
        }
        let undiscovered = ("PILOT_MULTI_NETWORK_DISCOVER_GATEWAY_API", "false");
        assert!(read(Role::Config, &[undiscovered]).is_empty());
        let ambient = read(Role::Config, &[undiscovered, ("PILOT_ENABLE_AMBIENT", "true")]);
        let both = [Kind::KubeGateway, Kind::GatewayClass];
        assert_eq!(BTreeSet::from_iter(ambient), BTreeSet::from(both));
    }

    #[test]
    fn flags_and_features_decide_which_kinds_are_read() {
        let config = |variables: &[(&str, &str)]| kinds(Role::Config, &[], variables);
        assert!(config(&[]).contains(&Kind::HttpRoute) && config(&[]).contains(&Kind::VirtualService));
        let without = config(&[("PILOT_ENABLE_GATEWAY_API", "false")]);
        assert!(!without.contains(&Kind::HttpRoute) && without.contains(&Kind::VirtualService));
        let ignoring = config(&[
            ("PILOT_IGNORE_RESOURCES", "*.networking.istio.io"),
            ("PILOT_INCLUDE_RESOURCES", "sidecars.networking.istio.io"),
        ]);
        assert!(!ignoring.contains(&Kind::VirtualService) && ignoring.contains(&Kind::Sidecar));
        for (variable, kind) in [
            ("ENABLE_GATEWAY_API_INFERENCE_EXTENSION", Kind::InferencePool),
            ("ENABLE_MCS_SERVICE_DISCOVERY", Kind::ServiceExport),
            ("ENABLE_MCS_HOST", Kind::ServiceImport),
            ("ENABLE_MCS_CLUSTER_LOCAL", Kind::ServiceExport),
            ("ENABLE_MCS_AUTO_EXPORT", Kind::ServiceExport),
        ] {
            assert!(!config(&[]).contains(&kind), "{variable}");
            assert!(config(&[(variable, "true")]).contains(&kind), "{variable}");
        }
        let beside_a_folder = kinds(Role::Config, &["--configDir", "/etc/mesh"], &[]);
        assert!(!beside_a_folder.contains(&Kind::VirtualService) && beside_a_folder.contains(&Kind::Service));
    }
}
