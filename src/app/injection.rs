//! Injection of pods: starts the tasks that follow its inputs.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ::kube::Client;
use tokio::sync::watch;

use super::{AppError, controllers::GatewayInputs};
use crate::{
    admin::debug::InjectionTemplates,
    base::{SmolStr, boolean},
    environment::Environment,
    inject::{self, Injector, NativeSidecars, Platform},
    kube::health::WatchMetrics,
    model::{Installation, MeshSnapshot},
    settings::Settings,
    webhook::{
        injection,
        injector::{FOLDER, InjectorReceiver, InjectorSource, InjectorState},
        server::InjectionInputs,
    },
};

/// The interval at which a changing mesh is prepared for injection.
const INTERVAL: Duration = Duration::from_millis(250);

/// The running tasks of injection.
pub(super) struct Injection {
    injector: InjectorReceiver,
    environment: Arc<PreparedEnvironment>,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
}

/// The environment of injection for the present mesh. It is made first, so that no request waits for it.
struct PreparedEnvironment {
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
    out: watch::Sender<inject::Environment>,
    /// The mesh that it was made for. Locked while it is made, by the task that follows the mesh or at the start.
    last: Mutex<Option<Arc<MeshSnapshot>>>,
}

impl PreparedEnvironment {
    /// Publishes the environment of the present mesh, if it is another one.
    fn update(&self) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mesh = self.mesh.borrow().clone();
        let mut environment = self.out.borrow().clone();
        if injection::follow_mesh(&mut environment, &mesh, last.as_deref()) {
            self.out.send_replace(environment);
        }
        *last = Some(mesh);
    }
}

impl Injection {
    /// Starts to follow the injector's configuration and the mesh. `None` if injection is switched off.
    pub(super) fn start(
        environment: &Arc<Environment>,
        installation: &Installation,
        client: Option<Client>,
        watches: WatchMetrics,
        mesh: watch::Receiver<Arc<MeshSnapshot>>,
    ) -> Result<Option<Self>, AppError> {
        let settings = &environment.settings;
        if settings.variable("INJECT_ENABLED").and_then(boolean::parse) == Some(false) {
            return Ok(None);
        }
        let source = InjectorSource {
            folder: FOLDER.into(),
            cluster: client.map(|client| (installation.cluster.clone(), client)),
            watches,
            namespace: installation.namespace.as_str().into(),
            revision: installation.revision.clone(),
        };
        let (injector, following) = source.start(&environment.registry)?;
        let tasks = &environment.tasks;
        tasks.spawn_until_shutdown("injector configuration", following);
        let (out, _) = watch::channel(of_process(settings, installation));
        let pods = Arc::new(PreparedEnvironment {
            mesh: mesh.clone(),
            out,
            last: Mutex::default(),
        });
        tasks.spawn_until_shutdown("injection inputs", follow(mesh.clone(), pods.clone()));
        Ok(Some(Self {
            injector,
            environment: pods,
            mesh,
        }))
    }

    /// Returns the inputs of the webhook.
    pub(super) fn inputs(&self, settings: &Settings) -> InjectionInputs {
        InjectionInputs {
            injector: self.injector.clone(),
            environment: self.environment.out.subscribe(),
            mesh: self.mesh.clone(),
            variables: Arc::new(settings.variables.clone()),
        }
    }

    /// Returns the inputs of deployed Gateways.
    pub(super) fn gateways(
        &self,
        environment: &Environment,
        tags: watch::Receiver<Option<BTreeSet<SmolStr>>>,
    ) -> GatewayInputs {
        let (out, injector) = watch::channel(None);
        let publishing = publish_valid(self.injector.clone(), out);
        environment.tasks.spawn_until_shutdown("gateway templates", publishing);
        GatewayInputs {
            injector,
            environment: self.environment.out.subscribe(),
            tags,
            variables: Arc::new(environment.settings.variables.clone()),
        }
    }

    /// Returns the present texts of the templates, for debug pages.
    pub(super) fn templates(&self) -> InjectionTemplates {
        let injector = self.injector.clone();
        Box::new(move || match &*injector.borrow() {
            InjectorState::Valid(injector) => Some(injector.template_texts().clone()),
            InjectorState::Unknown | InjectorState::Missing => None,
        })
    }

    /// Waits until the injector's configuration was read, and prepares the present mesh. From then on pods are injected
    /// as they will be later.
    pub(super) async fn prepared(&mut self) {
        let is_known = |state: &InjectorState| !matches!(state, InjectorState::Unknown);
        // An error means that the task has ended, as it does at shutdown.
        let _ = self.injector.wait_for(is_known).await;
        self.environment.update();
    }
}

/// Publishes each valid configuration of the injector.
async fn publish_valid(mut injector: InjectorReceiver, out: watch::Sender<Option<Arc<Injector>>>) {
    loop {
        let state = injector.borrow_and_update().clone();
        if let InjectorState::Valid(injector) = state {
            out.send_replace(Some(injector));
        }
        if injector.changed().await.is_err() {
            return;
        }
    }
}

/// Returns the part of the environment that does not change.
fn of_process(settings: &Settings, installation: &Installation) -> inject::Environment {
    let native = settings.variable("ENABLE_NATIVE_SIDECARS").unwrap_or_default();
    let native_sidecars = NativeSidecars::parse(native).unwrap_or_else(|| {
        tracing::warn!(
            value = native,
            "invalid ENABLE_NATIVE_SIDECARS, using false; hint: want true, false or auto"
        );
        NativeSidecars::Disabled
    });
    inject::Environment {
        revision: installation.revision.to_string(),
        native_sidecars,
        platform: match settings.variable("PLATFORM") {
            Some("openshift") => Platform::OpenShift,
            _ => Platform::Other,
        },
        compliance_policy: installation.features.compliance_policy.to_string(),
        ..inject::Environment::default()
    }
}

async fn follow(mut mesh: watch::Receiver<Arc<MeshSnapshot>>, environment: Arc<PreparedEnvironment>) {
    loop {
        mesh.mark_unchanged();
        environment.update();
        tokio::time::sleep(INTERVAL).await;
        if mesh.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::fixture;

    #[test]
    fn unknown_modes_switch_native_sidecars_off() {
        let mode = |value: &str| {
            let settings = fixture::settings(&[], &[("ENABLE_NATIVE_SIDECARS", value)]);
            of_process(&settings, &Installation::default()).native_sidecars
        };
        assert_eq!(mode("true"), NativeSidecars::Enabled);
        assert_eq!(mode("auto"), NativeSidecars::ByNodeVersion);
        for value in ["false", "True", "1"] {
            assert_eq!(mode(value), NativeSidecars::Disabled, "{value}");
        }
    }
}
