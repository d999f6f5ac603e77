//! Services whose ports do not declare a protocol.
//!
//! Parity (pkg/config/analysis/analyzers/service/portname.go).

use super::{
    json::{indexed, text},
    mesh::Mesh,
    message::{EXTERNAL_NAME_PORT, PORT_NAME, Report},
    object::Object,
};
use crate::{
    api::{Kind, Row, document},
    base::ClusterId,
    model::service::Protocol,
};

/// Values of the label of Services that istiod makes for Gateways.
const MANAGED: [&str; 3] = [
    "istio.io-gateway-controller",
    "istio.io-mesh-controller",
    "istio.io-eastwest-controller",
];

/// Returns true for objects of Istio's installation.
pub(super) fn is_of_istio(object: &Object) -> bool {
    object.labels.contains_key("istio") || object.label("release") == "istio"
}

/// Reports ports without a protocol.
pub(super) fn port_names(mesh: &Mesh, report: &mut Report) {
    for service in mesh.of(Kind::Service) {
        if is_of_istio(service) || MANAGED.contains(&service.label("gateway.istio.io/managed")) {
            continue;
        }
        let parsed = document::parse_object(&ClusterId::default(), Kind::Service, &service.manifest);
        let Some(Row::Service(parsed)) = parsed.rows.into_iter().next() else {
            continue;
        };
        let is_external_name = text(service.spec("type")) == "ExternalName";
        for ((path, written), port) in indexed("spec.ports", service.spec("ports")).zip(&parsed.ports) {
            let name = text(&written["name"]);
            let is_undeclared = Protocol::of_kube_port(port).is_unsupported();
            if is_external_name && (is_undeclared || name == "tcp") {
                let text =
                    format!("{path}: the port of an ExternalName service is TCP, which may capture other traffic");
                report.add(EXTERNAL_NAME_PORT, service, text);
            } else if is_undeclared {
                let text = format!(
                    "{path}: the name {name:?} of port {} declares no protocol; want PROTOCOL or PROTOCOL-SUFFIX, \
                     or set appProtocol",
                    port.number
                );
                report.add(PORT_NAME, service, text);
            }
        }
    }
}
