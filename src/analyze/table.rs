//! The table of all analyzers.

use super::{
    annotations, authentication, authorization, conditions, deployment, deprecation, destination_rule, envoy_filter,
    gateway, injection, kubernetes_gateway, mesh::Mesh, message::Report, multicluster, schema, service, service_entry,
    sidecar, telemetry, virtual_service, webhook,
};
use crate::api::Kind;

/// An analyzer with Istio's name.
#[derive(Clone, Debug)]
pub struct Analyzer {
    /// The name, such as `gateway.SecretAnalyzer`.
    pub name: String,
    /// The description.
    pub description: String,
    /// True if it runs only where it is named.
    pub on_request: bool,
    check: Check,
}

#[derive(Clone, Copy, Debug)]
enum Check {
    Mesh(fn(&Mesh, &mut Report)),
    Kind(Kind),
}

impl Analyzer {
    pub(super) fn run(&self, mesh: &Mesh, report: &mut Report) {
        match self.check {
            Check::Mesh(check) => check(mesh, report),
            Check::Kind(kind) => schema::validation(kind, mesh, report),
        }
    }
}

/// An analyzer of the mesh: name, description and function.
type Row = (&'static str, &'static str, fn(&Mesh, &mut Report));

/// Experimental annotations are common, so their analyzer runs only on request.
const ON_REQUEST: &str = "annotations.AlphaAnalyzer";

const ANALYZERS: &[Row] = &[
    (
        ON_REQUEST,
        "Annotations of alpha features (runs only with --analyzer)",
        annotations::maturity,
    ),
    (
        "annotations.K8sAnalyzer",
        "Unknown, misplaced, deprecated and invalid annotations of Istio on objects of Kubernetes",
        annotations::placement,
    ),
    (
        "applicationUID.Analyzer",
        "Containers that run as the user of the sidecar",
        deployment::users,
    ),
    (
        "auth.AuthorizationPoliciesAnalyzer",
        "AuthorizationPolicies without workloads, and their references to namespaces",
        authorization::policies,
    ),
    (
        "authn.BlockedCIDRsAnalyzer",
        "Address ranges that istiod must not fetch keys of RequestAuthentications from",
        authentication::blocked_ranges,
    ),
    (
        "conditions.ConditionAnalyzer",
        "Conditions in statuses that report failures",
        conditions::conditions,
    ),
    (
        "deployment.MultiServiceAnalyzer",
        "Services of one Deployment that contradict each other",
        deployment::services,
    ),
    (
        "deprecation.DeprecationAnalyzer",
        "Deprecated kinds and fields of Istio",
        deprecation::deprecation,
    ),
    (
        "destinationrule.CaCertificateAnalyzer",
        "DestinationRules with TLS that does not verify servers",
        destination_rule::certificates,
    ),
    (
        "destinationrule.SubsetSelectPodAnalyzer",
        "Hosts and subsets of DestinationRules without services and pods",
        destination_rule::subsets,
    ),
    (
        "envoyfilter.EnvoyPatchAnalyzer",
        "Patches of EnvoyFilters that depend on their order or have no effect",
        envoy_filter::patches,
    ),
    (
        "externalcontrolplane.ExternalControlPlaneAnalyzer",
        "Addresses of external control planes in webhooks",
        webhook::external,
    ),
    (
        "gateway.CertificateAnalyzer",
        "Certificates that several Gateways use",
        gateway::duplicate_certificates,
    ),
    (
        "gateway.ConflictingGatewayAnalyzer",
        "Gateways that serve the same hosts on one port",
        gateway::conflicts,
    ),
    (
        "gateway.IngressGatewayPortAnalyzer",
        "Ports of Gateways that the Services of their pods lack",
        gateway::ports,
    ),
    (
        "gateway.SecretAnalyzer",
        "Secrets that Gateways refer to",
        gateway::credentials,
    ),
    (
        "injection.Analyzer",
        "Labels about injection, and pods that lack the sidecar",
        injection::injection,
    ),
    (
        "injection.ImageAnalyzer",
        "Images of sidecars that differ from the injector's",
        injection::images,
    ),
    (
        "injection.ImageAutoAnalyzer",
        "Workloads with the image auto that are not injected",
        injection::auto_images,
    ),
    (
        "k8sgateway.CRDVersionAnalyzer",
        "Versions of the definitions of the Gateway API",
        kubernetes_gateway::definitions,
    ),
    (
        "k8sgateway.SelectorAnalyzer",
        "Policies that select Gateways of the Gateway API by labels",
        kubernetes_gateway::selectors,
    ),
    (
        "meshnetworks.MeshNetworksAnalyzer",
        "Registries in the mesh networks",
        multicluster::networks,
    ),
    (
        "service.PortNameAnalyzer",
        "Ports of Services that declare no protocol",
        service::port_names,
    ),
    (
        "serviceentry.Analyzer",
        "TCP ports of ServiceEntries without addresses",
        service_entry::addresses,
    ),
    (
        "services.MultiClusterServiceAnalyzer",
        "Services that differ between clusters",
        multicluster::services,
    ),
    (
        "sidecar.SelectorAnalyzer",
        "Sidecars without pods, and several of one pod",
        sidecar::sidecars,
    ),
    (
        "telemetry.DefaultSelectorAnalyzer",
        "Several Telemetries of a namespace without a selector",
        telemetry::defaults,
    ),
    (
        "telemetry.LightstepAnalyzer",
        "Uses of the deprecated provider Lightstep",
        telemetry::lightstep,
    ),
    (
        "telemetry.ProviderAnalyzer",
        "Access logging of Telemetries without a provider",
        telemetry::providers,
    ),
    (
        "telemetry.SelectorAnalyzer",
        "Telemetries without pods, and several of one pod",
        telemetry::selectors,
    ),
    (
        "virtualservice.ConflictingMeshGatewayHostsAnalyzer",
        "Hosts of sidecars in several VirtualServices",
        virtual_service::conflicts,
    ),
    (
        "virtualservice.DestinationHostAnalyzer",
        "Destinations of VirtualServices and their ports",
        virtual_service::destinations,
    ),
    (
        "virtualservice.DestinationRuleAnalyzer",
        "Subsets in VirtualServices that no DestinationRule declares",
        virtual_service::subsets,
    ),
    (
        "virtualservice.GatewayAnalyzer",
        "Gateways of VirtualServices and their hosts",
        virtual_service::gateways,
    ),
    (
        "virtualservice.JWTClaimRouteAnalyzer",
        "Routes by JWT claims without a RequestAuthentication",
        virtual_service::claims,
    ),
    (
        "webhook.Analyzer",
        "Webhooks that inject twice, or whose control plane does not exist",
        webhook::injectors,
    ),
];

/// Returns all analyzers in the order of their names.
pub fn all() -> Vec<Analyzer> {
    let of_mesh = ANALYZERS.iter().map(|(name, description, check)| Analyzer {
        name: (*name).to_owned(),
        description: (*description).to_owned(),
        on_request: *name == ON_REQUEST,
        check: Check::Mesh(*check),
    });
    let kinds = Kind::ALL
        .iter()
        .copied()
        .filter(|kind| kind.is_istio() && kind.is_object());
    let of_kinds = kinds.map(|kind| Analyzer {
        name: format!("schema.ValidationAnalyzer.{}", kind.name()),
        description: format!("The rules of {}", kind.name()),
        on_request: false,
        check: Check::Kind(kind),
    });
    let mut all: Vec<Analyzer> = of_mesh.chain(of_kinds).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Returns the named analyzers, or those that run by default if none of the names exists.
pub fn selected(names: &[String]) -> Vec<Analyzer> {
    let (named, mut others): (Vec<_>, Vec<_>) = all().into_iter().partition(|analyzer| names.contains(&analyzer.name));
    if named.is_empty() {
        others.retain(|analyzer| !analyzer.on_request);
        return others;
    }
    named
}
