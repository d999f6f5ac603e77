//! Remote clusters: origin of their declarations, and start of their sources.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    task::spawn_blocking,
    time::timeout,
};
use tokio_util::sync::DropGuard;

use super::{
    clients,
    controllers::{self, Controllers},
};
use crate::{
    base::{ClusterId, Namespace},
    environment::Environment,
    ingest::{
        cluster::{ClusterSettings, ClusterSource},
        context::IngestContext,
        discovery_filter::Filters,
        kinds::{Role, resource},
        remote::{
            Declarations, Remote, RemoteClusters, RemoteSettings, RemoteSource, RunningCluster, SECRET_SELECTOR, Start,
            stored::{StoredSettings, StoredStates},
        },
        source::{RunningSource, Sources},
    },
    kube::{
        client::{self, Access, ClientError, Rate},
        health::{WatchHealth, WatchMetrics},
        requests::RequestMetrics,
        watch::{WatchTarget, watch},
    },
    model::Installation,
    status::store::Store,
};

/// Queue length of the watch of Secrets, in events.
const EVENTS: usize = 16;
/// Delay before the watch of Secrets is started again after a panic.
const RESTART_DELAY: Duration = Duration::from_millis(500);
/// Longest time of a credential plugin.
const PLUGIN_TIMEOUT: Duration = Duration::from_mins(1);

/// Inputs shared with the config cluster.
pub struct RemoteInputs<'a> {
    pub environment: &'a Arc<Environment>,
    pub installation: &'a Installation,
    /// Client of the config cluster.
    pub client: ::kube::Client,
    /// Counter of the requests to all clusters.
    pub requests: &'a RequestMetrics,
    pub shared: &'a Arc<IngestContext>,
    /// Filters of objects.
    pub filters: watch::Receiver<Option<Filters>>,
}

/// Reason why remote clusters cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// `LOCAL_CLUSTER_SECRET_WATCHER` requires the cluster that istiod runs in, which is not accessible.
    #[error("cannot watch remote cluster Secrets (LOCAL_CLUSTER_SECRET_WATCHER): {0}")]
    Local(#[from] ClientError),
    /// Two metrics have the same name; a bug.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Watches the declarations of remote clusters. The receiver always has the present state; the start of istiod waits
/// until it is ready.
pub async fn start(
    inputs: RemoteInputs<'_>,
    sources: &mut Sources,
) -> Result<watch::Receiver<Arc<RemoteClusters>>, RemoteError> {
    let environment = inputs.environment;
    let features = &inputs.installation.features;
    let allowed = features.pilot_insecure_multicluster_kubeconfig_options.iter();
    let settings = RemoteSettings {
        own: inputs.installation.cluster.clone(),
        timeout: features.pilot_remote_cluster_timeout,
        allowed: allowed.map(ToString::to_string).collect(),
    };
    let rate = clients::rate(&environment.settings);
    let report = inputs.shared.report.clone();
    let start = starting(
        inputs.shared.clone(),
        inputs.filters.clone(),
        rate,
        inputs.requests.clone(),
    );
    let stored = stored(&inputs)?;
    let (remote, shown) = Remote::new(&environment.registry, settings, start, report, stored)?;
    let declarations = declarations(&inputs, rate).await?;
    sources.start(RemoteSource { remote, declarations });
    Ok(shown)
}

/// Returns the stored states, if a folder for them is set, and starts writing them.
fn stored(inputs: &RemoteInputs<'_>) -> Result<Option<StoredStates>, prometheus::Error> {
    let environment = inputs.environment;
    let flags = &environment.settings.flags;
    let folder = flags
        .remote_state_dir
        .clone()
        .filter(|folder| !folder.as_os_str().is_empty());
    let Some(folder) = folder else { return Ok(None) };
    let settings = StoredSettings {
        folder,
        max_age: flags.remote_state_max_age,
    };
    let (rules, watches) = (&inputs.shared.rules, inputs.shared.watch_metrics.clone());
    let (stored, writer) = StoredStates::new(&environment.registry, settings, rules, inputs.filters.clone(), watches)?;
    let tasks = &environment.tasks;
    // Not cancelled at shutdown: it writes what is left.
    tasks.spawn("stored states", writer.run(tasks.shutdown().clone()));
    Ok(Some(stored))
}

/// Returns a function that creates the client of a cluster and starts reading it.
fn starting(
    shared: Arc<IngestContext>,
    filters: watch::Receiver<Option<Filters>>,
    rate: Rate,
    requests: RequestMetrics,
) -> Start {
    let locks = PluginLocks::default();
    Arc::new(move |start| {
        let (shared, filters) = (shared.clone(), filters.clone());
        let (lock, requests) = (locks.of(&start.cluster), requests.of(&start.cluster));
        Box::pin(async move {
            let config = start
                .kubeconfig
                .client_config()
                .await
                .map_err(|error| error.to_string())?;
            // A credential plugin blocks its thread until it has answered, and must not hold up other clusters.
            let has_plugin = runs_plugin(&config);
            let runtime = Handle::current();
            let access = Access::Given(Box::new(config));
            let connecting = move || runtime.block_on(client::counted_client(&access, rate, requests));
            let client = if has_plugin {
                with_plugin_lock(lock, PLUGIN_TIMEOUT, connecting).await?
            } else {
                spawn_blocking(connecting).await.map_err(|error| error.to_string())?
            };
            let client = client.map_err(|error| error.to_string())?;
            let settings = ClusterSettings {
                id: start.cluster,
                client: client.clone(),
                role: Role::Remote,
                filters,
            };
            let source = ClusterSource::new(settings, &shared);
            let running = RunningSource::start(source, &shared.environment.tasks, start.changes);
            Ok(RunningCluster::new(Some(client), move || drop(running)))
        })
    })
}

/// The right to run the credential plugin of a cluster. A plugin that hangs keeps it, so that there is never a second
/// process.
type PluginLock = Arc<tokio::sync::Mutex<()>>;

/// The locks of all clusters.
#[derive(Default)]
struct PluginLocks {
    /// A lock instead of a message: it is held for a lookup.
    by_cluster: Mutex<BTreeMap<ClusterId, PluginLock>>,
}

impl PluginLocks {
    fn of(&self, cluster: &ClusterId) -> PluginLock {
        let mut locks = self.by_cluster.lock().unwrap_or_else(PoisonError::into_inner);
        // Others have no plugin that runs or waits.
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        locks.entry(cluster.clone()).or_default().clone()
    }
}

/// Returns true if the library starts a process to get credentials. Other clients never wait for one, so that a
/// kubeconfig without a plugin replaces one whose plugin hangs.
fn runs_plugin(config: &::kube::Config) -> bool {
    config.auth_info.exec.is_some() || config.auth_info.auth_provider.is_some()
}

/// Does work that may run a plugin and blocks, once the lock is free. Both together are limited: the work continues
/// after the limit, and keeps the lock.
async fn with_plugin_lock<T: Send + 'static>(
    lock: PluginLock,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let working = async {
        let guard = lock.lock_owned().await;
        let working = spawn_blocking(move || {
            let done = work();
            drop(guard);
            done
        });
        working.await.map_err(|error| error.to_string())
    };
    let answered = timeout(limit, working).await;
    answered.unwrap_or_else(|_| Err(format!("no answer of the credential plugin within {limit:?}")))
}

async fn declarations(inputs: &RemoteInputs<'_>, rate: Rate) -> Result<Declarations, ClientError> {
    let settings = &inputs.environment.settings;
    let features = &inputs.installation.features;
    if !features.pilot_multicluster_kubeconfig_path.is_empty() {
        return Ok(Declarations::Folder(
            features.pilot_multicluster_kubeconfig_path.as_str().into(),
        ));
    }
    let is_external = controllers::is_external(settings);
    let client = if features.local_cluster_secret_watcher && is_external {
        let requests = inputs.requests.of(&inputs.installation.cluster);
        client::counted_client(&Access::InCluster, rate, requests).await?
    } else {
        inputs.client.clone()
    };
    let named = settings
        .flags
        .cluster_registries_namespace
        .as_deref()
        .filter(|namespace| !namespace.is_empty());
    let namespace = named.map_or_else(|| inputs.installation.namespace.clone(), Namespace::from);
    let mut target = WatchTarget::all(resource("Secret", "secrets", "", "v1"));
    target.namespace = Some(namespace.to_string());
    target.labels = Some(SECRET_SELECTOR.to_owned());
    let own: &ClusterId = &inputs.installation.cluster;
    let health = WatchHealth::new(own, &target.name(), &inputs.shared.watch_metrics);
    let (sender, events) = mpsc::channel(EVENTS);
    // Its sender stays here, so after a panic the declared clusters stay until all are listed again.
    let watching = move || watch(client.clone(), target.clone(), health.clone(), sender.clone());
    let tasks = &inputs.environment.tasks;
    tasks.spawn_again_after_panics("remote secrets", RESTART_DELAY, watching);
    Ok(Declarations::Secrets(events))
}

/// Annotation on a remote cluster's control plane namespace: ids of the clusters, or `*`, whose control planes write
/// into it.
const LEADERS: &str = "topology.istio.io/controlPlaneClusters";
/// Delay before the namespace is read again.
const RETRY: Duration = Duration::from_secs(10);

/// Starts the controllers of remote clusters, if there are any, and stops them with the source of the cluster.
pub async fn control(
    controllers: Controllers,
    metrics: WatchMetrics,
    environment: Arc<Environment>,
    installation: Installation,
    mut shown: watch::Receiver<Arc<RemoteClusters>>,
) {
    let mut running: BTreeMap<ClusterId, (u64, DropGuard)> = BTreeMap::new();
    loop {
        let now = shown.borrow_and_update().clone();
        running.retain(|cluster, (source, _)| now.clusters.get(cluster).is_some_and(|shown| shown.source == *source));
        for (id, shown) in &now.clusters {
            let Some(client) = shown.client.clone().filter(|_| !running.contains_key(id)) else {
                continue;
            };
            let until = environment.tasks.shutdown().child_token();
            let cluster = controllers::Cluster {
                id: id.clone(),
                client,
                metrics: metrics.clone(),
                remote: true,
                led: false,
                until: until.clone(),
            };
            running.insert(id.clone(), (shown.source, until.clone().drop_guard()));
            let (controllers, installation) = (controllers.clone(), installation.clone());
            environment.tasks.spawn("remote controllers", async move {
                let starting = async {
                    let led = controllers.is_external() && is_led(&cluster, &installation).await;
                    if led || controllers.exports_services() {
                        controllers.start_in(&controllers::Cluster { led, ..cluster });
                    }
                };
                until.run_until_cancelled(starting).await;
            });
        }
        if shown.changed().await.is_err() {
            return;
        }
    }
}

/// Returns true if the cluster names this control plane in its annotation. Every cluster that is read grants the right
/// to list its namespaces.
async fn is_led(cluster: &controllers::Cluster, installation: &Installation) -> bool {
    let namespaces = Store::new(cluster.client.clone(), "", "v1", "Namespace", "namespaces");
    loop {
        match namespaces.metadata("", &installation.namespace).await {
            Ok(metadata) => {
                let metadata = metadata.unwrap_or_default();
                let leaders = metadata["annotations"][LEADERS].as_str();
                let is_own = |leader: &str| leader == "*" || installation.cluster == *leader;
                return leaders.unwrap_or_default().split(',').map(str::trim).any(is_own);
            }
            Err(error) => {
                tracing::warn!(cluster = %cluster.id, %error, "failed to read the control plane clusters of a remote cluster");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::sync_channel,
    };

    use super::*;

    #[tokio::test]
    async fn one_plugin_of_a_cluster_runs_at_a_time() {
        let locks = PluginLocks::default();
        let (a, b) = (ClusterId::new_static("a"), ClusterId::new_static("b"));
        let (release, hangs) = sync_channel::<()>(1);
        let hung = with_plugin_lock(locks.of(&a), Duration::ZERO, move || hangs.recv().is_ok()).await;
        assert_eq!(hung, Err("no answer of the credential plugin within 0ns".to_owned()));
        // A second one does not start, however often it is tried.
        let started = Arc::new(AtomicBool::new(false));
        for _ in 0..2 {
            let second = started.clone();
            let second = with_plugin_lock(locks.of(&a), Duration::ZERO, move || second.store(true, Relaxed)).await;
            assert!(second.is_err());
        }
        assert_eq!(with_plugin_lock(locks.of(&b), PLUGIN_TIMEOUT, || 1).await, Ok(1));
        release.send(()).expect("a plugin that hangs");
        assert_eq!(with_plugin_lock(locks.of(&a), PLUGIN_TIMEOUT, || 2).await, Ok(2));
        assert!(!started.load(Relaxed));
    }

    #[test]
    fn locks_of_other_clusters_are_forgotten() {
        let locks = PluginLocks::default();
        let clusters = ["a", "b", "c"].map(ClusterId::new_static);
        let kept = locks.of(&clusters[0]);
        for cluster in &clusters {
            drop(locks.of(cluster));
        }
        assert!(Arc::ptr_eq(&kept, &locks.of(&clusters[0])));
        assert_eq!(locks.by_cluster.lock().unwrap().len(), 1);
    }
}
