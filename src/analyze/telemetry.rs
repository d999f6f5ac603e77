//! Telemetries: selectors, providers and deprecated ones.

use std::collections::BTreeSet;

use super::{
    json::{is_set, items, labels, text},
    mesh::Mesh,
    message::{CONFLICTING_TELEMETRIES, DEPRECATED, NO_TELEMETRY_PROVIDER, Report, SEVERAL_DEFAULT_TELEMETRIES},
    sidecar::{by_namespace, conflict, selected, several},
};
use crate::api::Kind;

/// Reports access logging without providers, which is ignored.
///
/// Parity (pkg/config/analysis/analyzers/telemetry/providers.go).
pub(super) fn providers(mesh: &Mesh, report: &mut Report) {
    if !items(&mesh.settings.config["defaultProviders"]["accessLogging"]).is_empty() {
        return;
    }
    for telemetry in mesh.of(Kind::Telemetry) {
        let mut logging = items(telemetry.spec("accessLogging")).iter();
        if logging.any(|entry| entry["disabled"] != true && items(&entry["providers"]).is_empty()) {
            let text = "accessLogging without providers has no effect, because the mesh has no defaultProviders for it";
            report.add(NO_TELEMETRY_PROVIDER, telemetry, text);
        }
    }
}

/// Reports Telemetries that select nothing, or that compete for a pod.
///
/// Parity (pkg/config/analysis/analyzers/telemetry/selector.go).
pub(super) fn selectors(mesh: &Mesh, report: &mut Report) {
    let telemetries = mesh.of(Kind::Telemetry).iter();
    let selecting: Vec<_> = telemetries
        .map(|telemetry| (telemetry, labels(&telemetry.spec("selector")["matchLabels"])))
        .filter(|(_, selector)| !selector.is_empty())
        .collect();
    for (pod, telemetries) in selected(mesh, &selecting, "spec.selector", report) {
        conflict(CONFLICTING_TELEMETRIES, pod, &telemetries, report);
    }
}

/// Reports several Telemetries of a namespace without a selector.
///
/// Parity (pkg/config/analysis/analyzers/telemetry/default_selector.go).
pub(super) fn defaults(mesh: &Mesh, report: &mut Report) {
    let general = mesh
        .of(Kind::Telemetry)
        .iter()
        .filter(|telemetry| !is_set(telemetry.spec("selector")));
    for telemetries in by_namespace(general).values() {
        several(SEVERAL_DEFAULT_TELEMETRIES, telemetries, report);
    }
}

/// Reports uses of Lightstep, which Istio no longer recommends.
///
/// Parity (pkg/config/analysis/analyzers/telemetry/lightstep.go).
pub(super) fn lightstep(mesh: &Mesh, report: &mut Report) {
    let providers = items(&mesh.settings.config["extensionProviders"]).iter();
    let deprecated: BTreeSet<&str> = providers
        .filter(|provider| is_set(&provider["lightstep"]))
        .map(|provider| text(&provider["name"]))
        .collect();
    for telemetry in mesh.of(Kind::Telemetry) {
        let used = items(telemetry.spec("tracing"))
            .iter()
            .flat_map(|tracing| items(&tracing["providers"]));
        for name in used
            .map(|provider| text(&provider["name"]))
            .filter(|name| deprecated.contains(name))
        {
            let text = format!("provider {name} is of Lightstep, which is deprecated; use OpenTelemetry");
            report.add(DEPRECATED, telemetry, text);
        }
    }
}
