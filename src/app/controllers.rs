//! Starts the controllers, which write into clusters.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use smol_str::{SmolStr, format_smolstr};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    base::{ClusterId, boolean, cidr},
    ca::TrustBundle,
    distribution::{Distribution, refused::RefusedObject},
    environment::Environment,
    inject::{self, Injector},
    kube::health::WatchMetrics,
    model::{Installation, MeshSnapshot, features::Features},
    settings::{ConnectionAge, Settings, WATCH_NAMESPACE},
    status::{
        analysis,
        auto_allocation::{self, Ranges},
        auto_registration::{self, entry::Limits},
        cluster_trust_bundle, conditions, distribution_status, gateway_class, gateway_deployment,
        gateway_status::{self, ServedKinds},
        ingress_status,
        leader::{self, Election},
        mcs_export, refusal_events, root_cert, shadow_service, untaint,
        watching::{WatchedNamespaces, Watches},
        webhook_configuration,
    },
    task,
    xds::events::{Event, EventOptions, Events},
};

/// A cluster that controllers write into.
#[derive(Clone)]
pub struct Cluster {
    /// Its id.
    pub id: ClusterId,
    /// Its client.
    pub client: ::kube::Client,
    /// Watch metrics.
    pub metrics: WatchMetrics,
    /// True if the control plane runs elsewhere.
    pub remote: bool,
    /// True if this control plane distributes its root certificates there.
    pub led: bool,
    /// Stops its controllers.
    pub until: CancellationToken,
}

impl Cluster {
    fn watches(&self) -> Watches {
        Watches {
            client: self.client.clone(),
            cluster: self.id.clone(),
            metrics: self.metrics.clone(),
        }
    }
}

/// The inputs of the controllers of the config cluster.
pub struct ConfigClusterInputs {
    /// The mesh.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// The trust bundle; `None` without a serving certificate and without distributed root certificates.
    pub trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
    /// Connection events of workloads that register themselves; `None` if that is switched off.
    pub events: Option<mpsc::Receiver<Event>>,
    /// The inputs of statuses.
    pub statuses: StatusInputs,
    /// The inputs of conditions about the distribution of objects.
    pub distribution: DistributionInputs,
    /// The inputs of deployed Gateways; `None` without injection.
    pub gateways: Option<GatewayInputs>,
}

/// The inputs of the statuses of Ingresses and of objects of the Gateway API that the mesh does not contain.
pub struct StatusInputs {
    /// Tags of the own revision; `None` while unknown.
    pub tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    /// Starts to follow the kinds with statuses that the API server serves.
    pub served: Arc<dyn Fn() -> ServedKinds + Send + Sync>,
}

/// The inputs of conditions about the distribution of objects that the mesh does not contain.
pub struct DistributionInputs {
    /// Starts to follow the kinds with the condition that the API server serves.
    pub served: Arc<dyn Fn() -> ServedKinds + Send + Sync>,
    /// The status of objects.
    pub distribution: Arc<Distribution>,
}

/// The inputs of deployed Gateways that the mesh does not contain.
pub struct GatewayInputs {
    /// The injector; `None` while there is none.
    pub injector: watch::Receiver<Option<Arc<Injector>>>,
    /// The environment of injection.
    pub environment: watch::Receiver<inject::Environment>,
    /// Tags of the own revision; `None` while unknown.
    pub tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    /// Variables of the process.
    pub variables: Arc<BTreeMap<String, String>>,
}

/// Dependencies shared by the controllers of all clusters. Cheap to clone.
#[derive(Clone)]
pub struct Controllers {
    environment: Arc<Environment>,
    installation: Installation,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    texts: root_cert::DistributedTexts,
    webhooks: webhook_configuration::Metrics,
}

/// Publishes the root certificates and the revocation lists of the trust bundle.
async fn publish_trust(
    mut trust: watch::Receiver<Option<Arc<TrustBundle>>>,
    roots: watch::Sender<Option<Bytes>>,
    revoked: watch::Sender<Option<Bytes>>,
) {
    loop {
        let known = trust.borrow_and_update().clone();
        let revoked_now = known.as_ref().and_then(|trust| trust.crl.clone());
        for (out, known) in [
            (&roots, known.map(|trust| trust.roots.clone())),
            (&revoked, revoked_now),
        ] {
            task::publish(out, known);
        }
        if trust.changed().await.is_err() {
            return;
        }
    }
}

/// Creates the queue of workload connection events, if a feature needs them.
pub fn events(features: &Features) -> Option<(Events, mpsc::Receiver<Event>)> {
    let options = EventOptions {
        registration: features.pilot_enable_workload_entry_autoregistration,
        health: features.pilot_enable_workload_entry_healthchecks,
        sidecars_accept_hbone: features.pilot_enable_sidecar_listening_hbone,
    };
    (options.registration || options.health).then(|| Events::channel(options))
}

impl Controllers {
    /// Starts the controllers of the config cluster. Fails if the name of a metric is in use.
    pub fn start(
        environment: &Arc<Environment>,
        installation: &Installation,
        config: &Cluster,
        inputs: ConfigClusterInputs,
    ) -> Result<Self, prometheus::Error> {
        let (sender, roots) = watch::channel(None);
        let (revoked_sender, revoked) = watch::channel(None);
        let controllers = Self {
            environment: environment.clone(),
            installation: installation.clone(),
            mesh: inputs.mesh,
            texts: root_cert::DistributedTexts { roots, revoked },
            webhooks: webhook_configuration::Metrics::new(&environment.registry)?,
        };
        if let Some(trust) = inputs.trust {
            environment
                .tasks
                .spawn_until_shutdown("root certificates", publish_trust(trust, sender, revoked_sender));
        }
        let election = controllers.start_in(config);
        controllers.keep_validators(config, &election);
        controllers.untaint(config, &election);
        // Objects of a folder have no writable status.
        if environment.settings.flags.config_dir.is_none() {
            controllers.allocate(config, &election);
            controllers.analyze(config, &election, inputs.statuses.tags.clone());
            controllers.write_statuses(config, &election, inputs.statuses);
            controllers.write_conditions(config, &election);
            controllers.keep_shadow_services(config, &election);
            controllers.write_distribution(config, &election, inputs.distribution);
            controllers.deploy_gateways(config, &election, inputs.gateways)?;
        }
        if let Some(events) = inputs.events {
            controllers.register(config, events)?;
        }
        Ok(controllers)
    }

    /// Returns true if remote clusters need controllers: for root certificates (`EXTERNAL_ISTIOD`) or service export.
    pub fn concern_remote_clusters(&self) -> bool {
        self.is_external() || self.exports_services()
    }

    /// Returns true if every Service is exported (`ENABLE_MCS_AUTO_EXPORT`).
    pub fn exports_services(&self) -> bool {
        self.installation.features.enable_mcs_auto_export
    }

    /// Returns true if the control plane runs outside the clusters that it serves.
    pub fn is_external(&self) -> bool {
        is_external(&self.environment.settings)
    }

    /// Starts the controllers of one cluster and returns its leader election.
    pub fn start_in(&self, cluster: &Cluster) -> Election {
        let features = &self.installation.features;
        let election = self.election(cluster);
        let watches = cluster.watches();
        let tasks = &self.environment.tasks;
        if cluster.led {
            self.keep_injectors(cluster, &election.revision);
        }
        if cluster.led && distributes_roots(&self.environment.settings, features) {
            let rules = root_cert::RootCertOptions {
                config_map: features.pilot_ca_cert_configmap.clone(),
                revoked: features
                    .pilot_enable_ca_crl
                    .then(|| features.pilot_crl_configmap.clone()),
                // Parity (namespacecontroller.go): the flag of earlier releases never limited them.
                only: WatchedNamespaces::new(self.environment.settings.names(WATCH_NAMESPACE)),
            };
            let (election, watches) = (election.clone(), watches.clone());
            let (texts, mesh) = (self.texts.clone(), self.mesh.clone());
            let one_object = features.enable_cluster_trust_bundle_api;
            // Not cancelled at shutdown: the task must release its lock first.
            tasks.spawn("root certificate distribution", async move {
                if one_object {
                    cluster_trust_bundle::run(&election, watches, texts.roots).await;
                } else {
                    Box::pin(root_cert::run(&election, watches, rules, texts, mesh)).await;
                }
            });
        }
        if features.enable_mcs_auto_export {
            let (election, mesh, only) = (election.clone(), self.mesh.clone(), self.watched_namespaces());
            let (group, version) = (features.mcs_api_group.clone(), features.mcs_api_version.clone());
            tasks.spawn("service export", async move {
                mcs_export::run(&election, watches, &group, &version, mesh, only).await;
            });
        }
        election
    }

    /// Starts to keep the CA bundles of the injector's webhook configurations.
    fn keep_injectors(&self, cluster: &Cluster, revision: &SmolStr) {
        if !keeps_injectors(&self.environment.settings, cluster.remote) {
            return;
        }
        let (inputs, until) = (self.webhook_inputs(cluster, revision), cluster.until.clone());
        self.environment.tasks.spawn("injector webhooks", async move {
            let keeping = Box::pin(webhook_configuration::keep_injectors(inputs));
            until.run_until_cancelled_owned(keeping).await;
        });
    }

    /// Starts to keep the webhook configurations of the validator, which only the config cluster has.
    fn keep_validators(&self, cluster: &Cluster, election: &Election) {
        if self.environment.settings.is_emptied("VALIDATION_WEBHOOK_CONFIG_NAME") {
            return;
        }
        let inputs = self.webhook_inputs(cluster, &election.revision);
        let keeping = Box::pin(webhook_configuration::keep_validators(
            inputs,
            election.namespace.clone(),
        ));
        self.environment
            .tasks
            .spawn_until_shutdown("validator webhooks", keeping);
    }

    fn webhook_inputs(&self, cluster: &Cluster, revision: &SmolStr) -> webhook_configuration::Inputs {
        webhook_configuration::Inputs {
            watches: cluster.watches(),
            revision: revision.clone(),
            roots: self.texts.roots.clone(),
            metrics: self.webhooks.clone(),
        }
    }

    fn election(&self, cluster: &Cluster) -> Election {
        let tasks = &self.environment.tasks;
        let (sender, default_revision) = watch::channel(SmolStr::default());
        if follows_default_tag(&self.installation.features, cluster.remote) {
            let watches = cluster.watches();
            let until = cluster.until.clone();
            tasks.spawn("default revision", async move {
                until
                    .run_until_cancelled_owned(leader::default_revision(watches, sender))
                    .await;
            });
        }
        Election {
            client: cluster.client.clone(),
            namespace: self.installation.namespace.as_str().into(),
            identity: identity(&self.environment.settings),
            revision: match self.installation.revision.as_str() {
                "" => SmolStr::new_static("default"),
                _ => self.installation.revision.clone(),
            },
            remote: cluster.remote,
            enabled: self.installation.features.enable_leader_election,
            default_revision,
            shutdown: cluster.until.clone(),
            timing: leader::Timing::default(),
        }
    }

    fn allocate(&self, config: &Cluster, election: &Election) {
        let features = &self.installation.features;
        if !features.pilot_enable_ip_autoallocate {
            return;
        }
        let prefixes = (
            &features.pilot_ip_autoallocate_ipv4_prefix,
            &features.pilot_ip_autoallocate_ipv6_prefix,
        );
        let (Some(ipv4), Some(ipv6)) = (cidr::parse(prefixes.0), cidr::parse(prefixes.1)) else {
            tracing::error!(
                ?prefixes,
                "invalid address ranges, ServiceEntry address allocation disabled"
            );
            return;
        };
        let (election, mesh) = (election.clone(), self.mesh.clone());
        let (watches, only) = (config.watches(), self.watched_namespaces());
        self.environment.tasks.spawn("address allocation", async move {
            auto_allocation::run(&election, watches, mesh, Ranges { ipv4, ipv6 }, only).await;
        });
    }

    fn untaint(&self, config: &Cluster, election: &Election) {
        let features = &self.installation.features;
        if !features.pilot_enable_node_untaint_controllers {
            return;
        }
        let namespace = self.environment.settings.flags.cni_namespace.clone();
        let namespace = namespace.filter(|namespace| !namespace.is_empty());
        let namespace = namespace.unwrap_or_else(|| self.installation.namespace.to_string());
        let taint = features.pilot_node_untaint_controllers_taint_name.clone();
        let (election, watches) = (election.clone(), config.watches());
        self.environment.tasks.spawn("untaint", async move {
            untaint::run(&election, watches, &namespace, &taint).await;
        });
    }

    fn analyze(&self, config: &Cluster, election: &Election, tags: watch::Receiver<Option<BTreeSet<SmolStr>>>) {
        let features = &self.installation.features;
        if !features.pilot_enable_analysis {
            return;
        }
        let (election, watches, mesh) = (election.clone(), config.watches(), self.mesh.clone());
        let options = analysis::AnalysisOptions {
            interval: features.pilot_analysis_interval,
            revision: self.installation.revision.clone(),
            tags,
            only: self.watched_namespaces(),
        };
        self.environment.tasks.spawn("analysis", async move {
            analysis::run(&election, watches, mesh, options).await;
        });
    }

    /// Starts to write the statuses of Ingresses and of objects of the Gateway API.
    fn write_statuses(&self, config: &Cluster, election: &Election, inputs: StatusInputs) {
        let features = &self.installation.features;
        let only = self.watched_namespaces();
        let tasks = &self.environment.tasks;
        if features.pilot_enable_gateway_api && features.pilot_enable_gateway_api_status {
            let inputs = gateway_status::Inputs {
                watches: config.watches(),
                mesh: self.mesh.clone(),
                tags: inputs.tags.clone(),
                served: inputs.served,
                only: only.clone(),
            };
            let election = election.clone();
            tasks.spawn("Gateway API statuses", async move {
                gateway_status::run(&election, inputs).await;
            });
        }
        let inputs = ingress_status::Inputs {
            watches: config.watches(),
            mesh: self.mesh.clone(),
            tags: inputs.tags,
            only,
        };
        let election = election.clone();
        tasks.spawn("Ingress statuses", async move {
            ingress_status::run(&election, inputs).await;
        });
    }

    fn write_conditions(&self, config: &Cluster, election: &Election) {
        let features = &self.installation.features;
        if !features.pilot_enable_ambient || !features.ambient_enable_status {
            return;
        }
        let (election, watches, mesh) = (election.clone(), config.watches(), self.mesh.clone());
        let only = self.watched_namespaces();
        self.environment.tasks.spawn("ambient statuses", async move {
            conditions::run(&election, watches, mesh, only).await;
        });
    }

    /// Starts to keep the Services of InferencePools.
    fn keep_shadow_services(&self, config: &Cluster, election: &Election) {
        let features = &self.installation.features;
        if !features.pilot_enable_gateway_api || !features.enable_gateway_api_inference_extension {
            return;
        }
        let inputs = shadow_service::Inputs {
            watches: config.watches(),
            mesh: self.mesh.clone(),
            only: self.watched_namespaces(),
        };
        let election = election.clone();
        self.environment.tasks.spawn("shadow services", async move {
            shadow_service::run(&election, inputs).await;
        });
    }

    fn write_distribution(&self, config: &Cluster, election: &Election, inputs: DistributionInputs) {
        if !self.installation.features.pilot_enable_status {
            return;
        }
        let inputs = distribution_status::Inputs {
            watches: config.watches(),
            mesh: self.mesh.clone(),
            served: inputs.served,
            only: self.watched_namespaces(),
            distribution: inputs.distribution,
        };
        let election = election.clone();
        self.environment.tasks.spawn("distribution conditions", async move {
            distribution_status::run(&election, inputs).await;
        });
    }

    /// Starts to create GatewayClasses, and to deploy Gateways if there is an injector, which has the templates.
    fn deploy_gateways(
        &self,
        config: &Cluster,
        election: &Election,
        gateways: Option<GatewayInputs>,
    ) -> Result<(), prometheus::Error> {
        let features = &self.installation.features;
        if !features.pilot_enable_gateway_api {
            return Ok(());
        }
        let tasks = &self.environment.tasks;
        if features.pilot_enable_gateway_api_gatewayclass_controller {
            let creating = gateway_class::run(config.watches(), self.mesh.clone());
            tasks.spawn_until_shutdown("gateway classes", creating);
        }
        if !features.pilot_enable_gateway_api_deployment_controller {
            return Ok(());
        }
        let Some(gateways) = gateways else {
            tracing::warn!("injection is switched off, so there are no templates to deploy Gateways with");
            return Ok(());
        };
        let inputs = gateway_deployment::Inputs {
            watches: config.watches(),
            mesh: self.mesh.clone(),
            injector: gateways.injector,
            environment: gateways.environment,
            tags: gateways.tags,
            variables: gateways.variables,
            only: self.watched_namespaces(),
            metrics: gateway_deployment::Metrics::new(&self.environment.registry)?,
        };
        let election = election.clone();
        tasks.spawn("gateway deployments", async move {
            gateway_deployment::run(&election, inputs).await;
        });
        Ok(())
    }

    fn register(&self, config: &Cluster, events: mpsc::Receiver<Event>) -> Result<(), prometheus::Error> {
        let features = &self.installation.features;
        let age = match self.environment.settings.flags.keepalive_max_server_connection_age {
            // Longer by half, because connections do not close exactly on time.
            Some(ConnectionAge::AtMost(age)) => age.checked_add(age / 2),
            Some(ConnectionAge::Infinite) | None => None,
        };
        let rules = auto_registration::Options {
            instance: identity(&self.environment.settings),
            validate_identity: features.istio_workload_entry_validate_identity,
            limits: Limits {
                grace: features.pilot_workload_entry_grace_period,
                connection: age,
            },
        };
        let metrics = auto_registration::Metrics::new(&self.environment.registry)?;
        let registration = auto_registration::run(config.client.clone(), rules, metrics, events, self.mesh.clone());
        self.environment
            .tasks
            .spawn_until_shutdown("workload entries", registration);
        Ok(())
    }

    /// Returns the namespaces that are read.
    fn watched_namespaces(&self) -> WatchedNamespaces {
        WatchedNamespaces::new(self.environment.settings.watch_namespaces())
    }
}

/// Starts to write Events about refused objects into the config cluster.
pub fn write_refusal_events(
    environment: &Environment,
    installation: &Installation,
    client: ::kube::Client,
    refused: mpsc::Receiver<RefusedObject>,
) -> Result<(), prometheus::Error> {
    let inputs = refusal_events::Inputs {
        client,
        cluster: installation.cluster.clone(),
        instance: identity(&environment.settings),
        refused,
        metrics: refusal_events::Metrics::new(&environment.registry)?,
    };
    let writing = refusal_events::run(inputs);
    environment.tasks.spawn_until_shutdown("refusal events", writing);
    Ok(())
}

/// Returns true if this control plane distributes root certificates. Otherwise another program does, such as istio-csr,
/// and both would revert each other's ConfigMaps.
///
/// Parity (pilot/pkg/bootstrap/server.go, shouldStartNsController).
pub(super) fn distributes_roots(settings: &Settings, features: &Features) -> bool {
    features.enable_ca_server && settings.variable("PILOT_CERT_PROVIDER") != Some("none")
}

/// Returns true if this control plane follows the revision that the tag `default` points to in a cluster: for
/// elections, and, in the config cluster, to know which Ingresses and objects of the Gateway API are its own.
///
/// Parity (pkg/revisions/tag_watcher.go, `IsMine`): the tag decides with `ENABLE_LEADER_ELECTION=false`, too.
fn follows_default_tag(features: &Features, is_remote: bool) -> bool {
    features.enable_leader_election || !is_remote
}

/// Returns true if this control plane keeps the CA bundles of the injector's webhook configurations in a cluster. If
/// injection is switched off, another program injects the pods of the config cluster.
///
/// Parity (pilot/pkg/bootstrap/sidecarinjector.go, pilot/pkg/serviceregistry/kube/controller/multicluster.go): in
/// remote clusters, `INJECT_ENABLED` does not matter.
fn keeps_injectors(settings: &Settings, is_remote: bool) -> bool {
    let injects = settings.variable("INJECT_ENABLED").and_then(boolean::parse) != Some(false);
    !settings.is_emptied("INJECTION_WEBHOOK_CONFIG_NAME") && (injects || is_remote)
}

/// `EXTERNAL_ISTIOD`.
pub fn is_external(settings: &Settings) -> bool {
    settings.is_on("EXTERNAL_ISTIOD")
}

/// Returns the identity of this replica in locks and WorkloadEntries: the pod name.
fn identity(settings: &Settings) -> SmolStr {
    if let Some(name) = settings.variable("POD_NAME") {
        return name.into();
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format_smolstr!("unknown-{}", host.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::fixture;

    #[tokio::test]
    async fn unknown_revocation_lists_are_not_published() {
        let (trust_out, trust) = watch::channel(None);
        let (roots_out, roots) = watch::channel(None);
        let (revoked_out, mut revoked) = watch::channel(None);
        let mut roots_known = roots.clone();
        let publishing = publish_trust(trust, roots_out, revoked_out);
        let changing = async {
            let send = |crl: Option<&'static str>| {
                let bundle = TrustBundle {
                    roots: Bytes::from_static(b"roots"),
                    crl: crl.map(Bytes::from),
                };
                trust_out.send_replace(Some(Arc::new(bundle)));
            };
            send(None);
            roots_known.wait_for(Option::is_some).await.expect("roots");
            assert_eq!(*revoked.borrow(), None);
            for text in ["", "list", ""] {
                send(Some(text));
                let published = revoked.wait_for(|published| published.as_deref() == Some(text.as_bytes()));
                published.await.expect("a list");
            }
            drop(trust_out);
        };
        futures::join!(publishing, changing);
        assert_eq!(roots.borrow().as_deref(), Some(&b"roots"[..]));
    }

    #[test]
    fn the_default_tag_counts_without_elections() {
        let features = |enable_leader_election| Features {
            enable_leader_election,
            ..Features::default()
        };
        let with = features(true);
        assert!(follows_default_tag(&with, false) && follows_default_tag(&with, true));
        let without = features(false);
        assert!(follows_default_tag(&without, false) && !follows_default_tag(&without, true));
    }

    #[test]
    fn configurations_of_another_injector_are_left_alone() {
        let keeps = |variables: &[(&str, &str)], is_remote| {
            let settings = fixture::settings(&[], variables);
            keeps_injectors(&settings, is_remote)
        };
        assert!(keeps(&[], false) && keeps(&[("INJECT_ENABLED", "true")], false));
        let off = [("INJECT_ENABLED", "false")];
        assert!(!keeps(&off, false) && keeps(&off, true));
        let emptied = [("INJECTION_WEBHOOK_CONFIG_NAME", "")];
        assert!(!keeps(&emptied, false) && !keeps(&emptied, true));
    }

    #[test]
    fn roots_of_another_ca_are_not_distributed() {
        let distributes = |variables: &[(&str, &str)]| {
            let settings = fixture::settings(&[], variables);
            let (features, _) = Features::parse(&settings.variables);
            distributes_roots(&settings, &features)
        };
        assert!(distributes(&[]));
        assert!(distributes(&[("PILOT_CERT_PROVIDER", "k8s.io/a.b/c")]));
        assert!(!distributes(&[("ENABLE_CA_SERVER", "false")]));
        assert!(!distributes(&[("PILOT_CERT_PROVIDER", "none")]));
    }
}
