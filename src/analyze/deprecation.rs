//! Deprecated kinds and fields.
//!
//! Parity (pkg/config/analysis/analyzers/deprecation/deprecation.go).

use super::{
    json::{is_set, items, text},
    mesh::Mesh,
    message::{DEPRECATED, Report},
    object::Type,
};
use crate::api::Kind;

/// The group and the kinds of policies before Istio 1.6.
const REMOVED: (&str, [&str; 4]) = (
    "rbac.istio.io",
    ["ClusterRbacConfig", "RbacConfig", "ServiceRole", "ServiceRoleBinding"],
);

/// Reports deprecated kinds and fields.
pub(super) fn deprecation(mesh: &Mesh, report: &mut Report) {
    for service in mesh.of(Kind::VirtualService) {
        let mut delays = items(service.spec("http"))
            .iter()
            .map(|route| &route["fault"]["delay"]["percent"]);
        if delays.any(|percent| percent.as_i64().is_some_and(|percent| percent > 0)) {
            let text = "http[].fault.delay.percent is deprecated; use percentage";
            report.add(DEPRECATED, service, text);
        }
    }
    for sidecar in mesh.of(Kind::Sidecar) {
        if is_set(&sidecar.spec("outboundTrafficPolicy")["egressProxy"]) {
            report.add(DEPRECATED, sidecar, "outboundTrafficPolicy.egressProxy has no effect");
        }
    }
    for definition in mesh.of(Type::Definition) {
        let (group, kind) = (text(definition.spec("group")), text(&definition.spec("names")["kind"]));
        if group == REMOVED.0 && REMOVED.1.contains(&kind) {
            let text = format!("Istio no longer has the kind {kind} of {group}; use AuthorizationPolicy");
            report.add(DEPRECATED, definition, text);
        }
    }
}
