//! The injector's configuration: ConfigMap `istio-sidecar-injector[-REVISION]`, or the files that replace it. An
//! invalid edit keeps the last valid one, and so does the removal of the ConfigMap.
//!
//! Parity (pilot/pkg/bootstrap/sidecarinjector.go, pkg/kube/inject/watcher.go).

use std::{path::PathBuf, sync::Arc};

use ::kube::{Client, core::ApiResource};
use prometheus::{IntCounter, Registry};
use smol_str::{SmolStr, format_smolstr};
use tokio::sync::{mpsc, watch};

use crate::{
    base::ClusterId,
    ca::files::FileWatch,
    inject::Injector,
    kube::{
        Object,
        health::{WatchHealth, WatchMetrics},
        watch::{WatchEvent, WatchTarget, watch_as},
    },
    metrics,
};

/// The folder of the files, where a ConfigMap is mounted.
pub const FOLDER: &str = "./var/lib/istio/inject";
/// The keys of the ConfigMap, and the names of the files.
const KEYS: [&str; 2] = ["config", "values"];
/// The capacity of the event queue.
const QUEUE: usize = 8;

/// The state of the injector's configuration.
#[derive(Clone, Default)]
pub enum InjectorState {
    /// The configuration is not read yet.
    #[default]
    Unknown,
    /// There was never a valid configuration.
    Missing,
    /// The last valid configuration.
    Valid(Arc<Injector>),
}

/// The present state.
pub type InjectorReceiver = watch::Receiver<InjectorState>;

/// The origin of the configuration.
pub struct InjectorSource {
    /// The folder of the files that replace the ConfigMap, if they exist at the start.
    pub folder: PathBuf,
    /// The config cluster with its id; `None` if everything comes from a folder.
    pub cluster: Option<(ClusterId, Client)>,
    /// The metrics of watches.
    pub watches: WatchMetrics,
    /// The namespace of the control plane.
    pub namespace: SmolStr,
    /// The revision of the control plane.
    pub revision: SmolStr,
}

/// Both texts of a configuration.
type Texts = [String; 2];

/// Compiles configurations and keeps the last valid one.
struct Compiler {
    /// The origin, for logs.
    origin: String,
    last: Option<Texts>,
    out: watch::Sender<InjectorState>,
    errors: IntCounter,
}

impl InjectorSource {
    /// Returns the state of the configuration and a task that follows it.
    ///
    /// # Errors
    /// If the name of a metric is in use.
    pub fn start(
        self,
        registry: &Registry,
    ) -> Result<(InjectorReceiver, impl Future<Output = ()> + Send + use<>), prometheus::Error> {
        let errors = metrics::counter(
            registry,
            "istiod_injector_configuration_errors_total",
            "Invalid configurations of the injector.",
        )?;
        let (out, injector) = watch::channel(InjectorState::Unknown);
        let compiler = Compiler {
            origin: String::new(),
            last: None,
            out,
            errors,
        };
        Ok((injector, self.follow(compiler)))
    }

    async fn follow(self, mut compiler: Compiler) {
        let files = KEYS.map(|key| self.folder.join(key));
        if files[0].is_file() {
            compiler.origin = self.folder.display().to_string();
            return follow_files(&files, compiler).await;
        }
        let Some((cluster, client)) = self.cluster else {
            compiler.missing();
            return;
        };
        let name = match self.revision.as_str() {
            "" | "default" => SmolStr::new_static("istio-sidecar-injector"),
            revision => format_smolstr!("istio-sidecar-injector-{revision}"),
        };
        compiler.origin = format!("ConfigMap {}/{name}", self.namespace);
        let target = WatchTarget {
            namespace: Some(self.namespace.to_string()),
            fields: Some(format!("metadata.name={name}")),
            ..WatchTarget::all(config_maps())
        };
        let health = WatchHealth::new(&cluster, &target.name(), &self.watches);
        let (sender, events) = mpsc::channel(QUEUE);
        tokio::select! {
            () = watch_as(client, target, health, texts, sender) => {}
            () = follow_config_map(events, compiler) => {}
        }
    }
}

fn config_maps() -> ApiResource {
    ApiResource {
        group: String::new(),
        version: "v1".into(),
        api_version: "v1".into(),
        kind: "ConfigMap".into(),
        plural: "configmaps".into(),
    }
}

async fn follow_files(files: &[PathBuf; 2], mut compiler: Compiler) {
    let mut watch = FileWatch::new(files.iter().map(PathBuf::as_path));
    loop {
        let read =
            |file: &PathBuf| std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()));
        match (read(&files[0]), read(&files[1])) {
            (Ok(config), Ok(values)) => compiler.compile([config, values]),
            (Err(error), _) | (_, Err(error)) => compiler.failed(&error),
        }
        watch.changed().await;
    }
}

/// The texts of a ConfigMap, or the key that it lacks.
type Found = Result<Texts, &'static str>;

/// Returns the texts of a ConfigMap.
fn texts(object: Object) -> Found {
    let text = |key: &'static str| object.value["data"][key].as_str().map(str::to_owned).ok_or(key);
    Ok([text(KEYS[0])?, text(KEYS[1])?])
}

async fn follow_config_map(mut events: mpsc::Receiver<WatchEvent<Found>>, mut compiler: Compiler) {
    while let Some(event) = events.recv().await {
        let found = match event {
            WatchEvent::Restarted(all) => {
                let Some(found) = all.into_iter().next() else {
                    tracing::info!(
                        origin = compiler.origin,
                        "injector configuration missing, not injecting pods"
                    );
                    compiler.missing();
                    continue;
                };
                found
            }
            WatchEvent::Applied(found) => found,
            WatchEvent::Deleted(_) => continue,
        };
        match found {
            Ok(texts) => compiler.compile(texts),
            Err(key) => compiler.failed(&format!("data.{key}: is missing")),
        }
    }
}

impl Compiler {
    fn compile(&mut self, texts: Texts) {
        if self.last.as_ref() == Some(&texts) {
            return;
        }
        match Injector::parse(&texts[0], &texts[1]) {
            Ok(injector) => {
                tracing::info!(origin = self.origin, "injector configuration changed");
                if let Some(policy) = injector.unknown_policy() {
                    tracing::error!(
                        origin = self.origin,
                        policy,
                        "unknown injection policy, not injecting pods; hint: use enabled or disabled"
                    );
                }
                self.out.send_replace(InjectorState::Valid(Arc::new(injector)));
            }
            Err(error) => self.failed(&error.to_string()),
        }
        self.last = Some(texts);
    }

    /// Records that there is no configuration; the last valid one stays.
    fn missing(&self) {
        self.out.send_if_modified(|state| {
            let is_unknown = matches!(state, InjectorState::Unknown);
            if is_unknown {
                *state = InjectorState::Missing;
            }
            is_unknown
        });
    }

    fn failed(&self, error: &str) {
        self.missing();
        self.errors.inc();
        tracing::error!(
            origin = self.origin,
            error,
            "invalid injector configuration, keeping the last valid one"
        );
    }
}
