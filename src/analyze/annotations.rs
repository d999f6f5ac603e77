//! Annotations of Istio on objects of Kubernetes: unknown, deprecated, misplaced, invalid or experimental ones.

use super::{
    json::is_set,
    mesh::Mesh,
    message::{
        ALPHA_ANNOTATION, Code, DEPRECATED_ANNOTATION, INVALID_ANNOTATION, MISPLACED_ANNOTATION, Report,
        UNKNOWN_ANNOTATION,
    },
    object::{Object, Type},
};
use crate::{api::Kind, inject::annotation_error};

/// The maturity of an annotation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Alpha,
    Beta,
    Stable,
}

/// The use of an annotation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Current,
    Deprecated,
}

/// An annotation with its maturity, its use and the kinds to which it applies.
type Annotation = (&'static str, Phase, Use, &'static [&'static str]);

/// The annotations of Istio.
///
/// Parity (istio.io/api annotation/annotations.yaml).
const ANNOTATIONS: &[Annotation] = &[
    (
        "alpha.istio.io/canonical-serviceaccounts",
        Phase::Alpha,
        Use::Deprecated,
        &["Service"],
    ),
    (
        "alpha.istio.io/kubernetes-serviceaccounts",
        Phase::Alpha,
        Use::Deprecated,
        &["Service"],
    ),
    (
        "ambient.istio.io/bypass-inbound-capture",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    ("ambient.istio.io/dns-capture", Phase::Alpha, Use::Current, &["Pod"]),
    ("ambient.istio.io/redirection", Phase::Beta, Use::Current, &["Pod"]),
    (
        "ambient.istio.io/waypoint-inbound-binding",
        Phase::Alpha,
        Use::Current,
        &["GatewayClass", "Gateway"],
    ),
    ("galley.istio.io/analyze-suppress", Phase::Alpha, Use::Current, &["Any"]),
    (
        "gateway.istio.io/controller-version",
        Phase::Alpha,
        Use::Current,
        &["Any"],
    ),
    (
        "gateway.istio.io/name-override",
        Phase::Alpha,
        Use::Current,
        &["Gateway"],
    ),
    (
        "gateway.istio.io/service-account",
        Phase::Alpha,
        Use::Current,
        &["Gateway"],
    ),
    ("inject.istio.io/templates", Phase::Alpha, Use::Current, &["Pod"]),
    (
        "istio.io/autoRegistrationGroup",
        Phase::Alpha,
        Use::Current,
        &["WorkloadEntry"],
    ),
    ("istio.io/connectedAt", Phase::Alpha, Use::Current, &["WorkloadEntry"]),
    (
        "istio.io/disconnectedAt",
        Phase::Alpha,
        Use::Current,
        &["WorkloadEntry"],
    ),
    ("istio.io/dry-run", Phase::Alpha, Use::Current, &["AuthorizationPolicy"]),
    (
        "istio.io/reroute-virtual-interfaces",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    ("istio.io/rev", Phase::Alpha, Use::Current, &["Pod"]),
    (
        "istio.io/workloadController",
        Phase::Alpha,
        Use::Current,
        &["WorkloadEntry"],
    ),
    ("kubernetes.io/ingress.class", Phase::Stable, Use::Current, &["Ingress"]),
    ("networking.istio.io/exportTo", Phase::Alpha, Use::Current, &["Service"]),
    (
        "networking.istio.io/service-type",
        Phase::Alpha,
        Use::Current,
        &["Gateway"],
    ),
    (
        "networking.istio.io/traffic-distribution",
        Phase::Alpha,
        Use::Current,
        &["Namespace", "Service", "ServiceEntry"],
    ),
    (
        "prometheus.istio.io/merge-metrics",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    ("proxy.istio.io/config", Phase::Beta, Use::Current, &["Pod"]),
    ("proxy.istio.io/overrides", Phase::Alpha, Use::Current, &["Pod"]),
    (
        "readiness.status.sidecar.istio.io/applicationPorts",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "readiness.status.sidecar.istio.io/failureThreshold",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "readiness.status.sidecar.istio.io/initialDelaySeconds",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "readiness.status.sidecar.istio.io/periodSeconds",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    ("sidecar.istio.io/agentLogLevel", Phase::Alpha, Use::Current, &["Pod"]),
    (
        "sidecar.istio.io/bootstrapOverride",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/componentLogLevel",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/discoveryAddress",
        Phase::Alpha,
        Use::Deprecated,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/extraStatTags",
        Phase::Alpha,
        Use::Deprecated,
        &["Pod"],
    ),
    ("sidecar.istio.io/inject", Phase::Beta, Use::Deprecated, &["Pod"]),
    (
        "sidecar.istio.io/interceptionMode",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    ("sidecar.istio.io/logLevel", Phase::Alpha, Use::Current, &["Pod"]),
    ("sidecar.istio.io/nativeSidecar", Phase::Alpha, Use::Current, &["Pod"]),
    ("sidecar.istio.io/proxyCPU", Phase::Alpha, Use::Current, &["Pod"]),
    ("sidecar.istio.io/proxyCPULimit", Phase::Alpha, Use::Current, &["Pod"]),
    ("sidecar.istio.io/proxyImage", Phase::Alpha, Use::Current, &["Pod"]),
    ("sidecar.istio.io/proxyImageType", Phase::Alpha, Use::Current, &["Pod"]),
    ("sidecar.istio.io/proxyMemory", Phase::Alpha, Use::Current, &["Pod"]),
    (
        "sidecar.istio.io/proxyMemoryLimit",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/rewriteAppHTTPProbers",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/statsCompression",
        Phase::Alpha,
        Use::Deprecated,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/statsEvictionInterval",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/statsFlushInterval",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/statsHistogramBins",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/statsHistogramBuckets",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/statsInclusionPrefixes",
        Phase::Alpha,
        Use::Deprecated,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/statsInclusionRegexps",
        Phase::Alpha,
        Use::Deprecated,
        &["Pod"],
    ),
    (
        "sidecar.istio.io/statsInclusionSuffixes",
        Phase::Alpha,
        Use::Deprecated,
        &["Pod"],
    ),
    ("sidecar.istio.io/status", Phase::Alpha, Use::Current, &["Pod"]),
    ("sidecar.istio.io/userVolume", Phase::Alpha, Use::Current, &["Pod"]),
    ("sidecar.istio.io/userVolumeMount", Phase::Alpha, Use::Current, &["Pod"]),
    ("status.sidecar.istio.io/port", Phase::Alpha, Use::Current, &["Pod"]),
    (
        "topology.istio.io/controlPlaneClusters",
        Phase::Alpha,
        Use::Current,
        &["Namespace"],
    ),
    (
        "traffic.istio.io/nodeSelector",
        Phase::Stable,
        Use::Current,
        &["Service"],
    ),
    (
        "traffic.sidecar.istio.io/excludeInboundPorts",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "traffic.sidecar.istio.io/excludeInterfaces",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "traffic.sidecar.istio.io/excludeOutboundIPRanges",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "traffic.sidecar.istio.io/excludeOutboundPorts",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "traffic.sidecar.istio.io/includeInboundPorts",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "traffic.sidecar.istio.io/includeOutboundIPRanges",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "traffic.sidecar.istio.io/includeOutboundPorts",
        Phase::Alpha,
        Use::Current,
        &["Pod"],
    ),
    (
        "traffic.sidecar.istio.io/kubevirtInterfaces",
        Phase::Alpha,
        Use::Deprecated,
        &["Pod"],
    ),
];

/// Annotations that controllers set.
const IGNORED: [&str; 3] = [
    "gateway.istio.io/controller-version",
    "istio.io/rev",
    "sidecar.istio.io/status",
];

/// Annotations that injection sets in clusters with the CNI plugin.
const SET_BY_INJECTION: [&str; 4] = [
    "sidecar.istio.io/interceptionMode",
    "traffic.sidecar.istio.io/excludeInboundPorts",
    "traffic.sidecar.istio.io/includeInboundPorts",
    "traffic.sidecar.istio.io/includeOutboundIPRanges",
];

const KINDS: [Type; 4] = [
    Type::Known(Kind::Namespace),
    Type::Known(Kind::Service),
    Type::Known(Kind::Pod),
    Type::Deployment,
];

/// Reports annotations that have no effect, or not the meant one.
///
/// Parity (pkg/config/analysis/analyzers/annotations/annotations.go).
pub(super) fn placement(mesh: &Mesh, report: &mut Report) {
    for_each(mesh, |object, name| {
        if IGNORED.contains(&name) {
            return;
        }
        let Some((_, _, usage, kinds)) = find(name) else {
            let text = format!("Istio has no annotation {name}; it has no effect");
            return report.add(UNKNOWN_ANNOTATION, object, text);
        };
        let is_replaced = name == "sidecar.istio.io/inject" && object.labels.contains_key(name);
        if *usage == Use::Deprecated && !is_replaced {
            report.add(DEPRECATED_ANNOTATION, object, deprecation(name));
        }
        if let Some((code, text)) = mistake(object, name, kinds) {
            report.add(code, object, text);
        }
    });
}

fn deprecation(name: &str) -> String {
    let hint = match name {
        "sidecar.istio.io/inject" => "; use the label of the same name",
        _ => "",
    };
    format!("annotation {name} is deprecated{hint}")
}

fn mistake(object: &Object, name: &str, kinds: &[&str]) -> Option<(Code, String)> {
    if kinds.contains(&"Any") {
        return None;
    }
    if !kinds.contains(&object.kind.name()) {
        let text = format!("annotation {name} applies to {} only", kinds.join(", "));
        return Some((MISPLACED_ANNOTATION, text));
    }
    let reason = annotation_error(name, object.annotation(name))?;
    Some((INVALID_ANNOTATION, format!("annotation {name}: {reason}")))
}

/// Reports annotations of alpha features.
///
/// Parity (pkg/config/analysis/analyzers/maturity/maturity.go).
pub(super) fn maturity(mesh: &Mesh, report: &mut Report) {
    for_each(mesh, |object, name| {
        let is_alpha = find(name).is_some_and(|(_, phase, ..)| *phase == Phase::Alpha);
        let is_set_by_injection = SET_BY_INJECTION.contains(&name) && uses_cni(object);
        if is_alpha && !IGNORED.contains(&name) && !is_set_by_injection {
            let text = format!("annotation {name} belongs to an alpha feature");
            report.add(ALPHA_ANNOTATION, object, text);
        }
    });
}

/// Returns true for pods without the container that redirects traffic.
fn uses_cni(object: &Object) -> bool {
    let containers = super::json::items(object.spec("initContainers"));
    object.kind == Kind::Pod.into() && !containers.iter().any(|container| container["name"] == "istio-init")
}

fn for_each(mesh: &Mesh, mut visit: impl FnMut(&Object, &str)) {
    for object in KINDS.iter().flat_map(|kind| mesh.of(*kind)) {
        let annotations = &object.manifest["metadata"]["annotations"];
        if !is_set(annotations) {
            continue;
        }
        let names = annotations.as_object().into_iter().flat_map(|map| map.keys());
        names
            .filter(|name| is_of_istio(name))
            .for_each(|name| visit(object, name));
    }
}

fn is_of_istio(name: &str) -> bool {
    let domain = name.split('/').next().unwrap_or_default();
    name == "kubernetes.io/ingress.class" || domain.ends_with("istio.io")
}

fn find(name: &str) -> Option<&'static Annotation> {
    ANNOTATIONS.iter().find(|(known, ..)| *known == name)
}
