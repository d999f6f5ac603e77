//! `--registries`: the registries besides Kubernetes.

use super::AppError;
use crate::{
    base::ClusterId,
    environment::Environment,
    ingest::{
        diagnostics::Report,
        registry::{
            cloud_foundry::{CloudFoundrySettings, CloudFoundrySettingsError, CloudFoundrySource},
            consul::{ConsulSettings, ConsulSettingsError, ConsulSource},
            eureka::{EurekaSettingsError, EurekaSource},
            mock::MockSource,
        },
        registry_metrics::RegistryMetrics,
        source::Sources,
    },
    settings::{BUILT_IN_REGISTRIES, Registry},
};

/// Invalid settings of a registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Those of Consul.
    #[error(transparent)]
    Consul(#[from] ConsulSettingsError),
    /// Those of Eureka.
    #[error(transparent)]
    Eureka(#[from] EurekaSettingsError),
    /// Those of Cloud Foundry.
    #[error(transparent)]
    CloudFoundry(#[from] CloudFoundrySettingsError),
    /// No settings file of Cloud Foundry.
    #[error("--registries=CloudFoundry needs --cfConfig")]
    NoFile,
}

/// Starts the registries of the flag, in order.
pub(super) fn start(
    environment: &Environment,
    sources: &mut Sources,
    metrics: &RegistryMetrics,
    report: &Report,
) -> Result<(), AppError> {
    let settings = &environment.settings;
    let flags = &settings.flags;
    warn(flags.registries.as_deref().unwrap_or_default());
    for registry in flags.registries() {
        let name = registry.name();
        let (cluster, metrics, report) = (ClusterId::new_static(name), metrics.of(name), report.clone());
        match registry {
            Registry::Consul => {
                let settings = ConsulSettings::of(settings).map_err(RegistryError::from)?;
                sources.start(ConsulSource::new(settings, cluster, metrics, report));
            }
            Registry::Eureka => {
                let (url, interval) = (&flags.eureka_server_url, flags.eureka_server_interval);
                let source = EurekaSource::new(url, interval, cluster, metrics, report);
                sources.start(source.map_err(RegistryError::from)?);
            }
            Registry::CloudFoundry => {
                let file = flags.cf_config.as_deref().ok_or(RegistryError::NoFile)?;
                let settings = CloudFoundrySettings::read(file).map_err(RegistryError::from)?;
                sources.start(CloudFoundrySource::new(settings, cluster, metrics, report));
            }
            Registry::Mock => {
                let domain = flags.domain.as_str().into();
                sources.start(MockSource::new(cluster, flags.mock_services, domain, metrics, report));
            }
        }
    }
    Ok(())
}

/// Parity (pilot/pkg/bootstrap/server.go of release 1.0): a repeated registry is skipped with a warning.
fn warn(names: &[String]) {
    for (index, name) in names.iter().enumerate() {
        if names[..index].contains(name) {
            tracing::warn!(registry = name, "registry is listed twice, the first one counts");
        } else if BUILT_IN_REGISTRIES.contains(&name.as_str()) {
            tracing::warn!(
                registry = name,
                "registry has no effect: ServiceEntries are always read"
            );
        }
    }
}
