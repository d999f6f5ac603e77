//! Outbound clusters: one for each service port that a scope sees, and for each subset of its DestinationRule; on
//! gateways that pass mutual TLS through, the same once more without TLS.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use super::{
    ClusterKey,
    client::{OutboundClient, Place, SocketClient},
    discovery::Kinds,
    dynamic, rule,
    service::Context,
};
use crate::{
    base::{Hashed, Namespace, ObjectKey, Shared, cidr::IpMode},
    generate::{
        EncodedResource, ResourceType, View,
        endpoint::{self, EndpointClient, EndpointKey},
        group::{Built, Listed, Note, Resource},
        name,
        patch::PatchRef,
        proxy::ProxyType,
        select::Selected,
    },
    model::{
        ScopeKey, Service, ServiceKey, SidecarScope,
        destination_rule::{self, DestinationRule, RuleRef},
        service::{Protocol, Resolution, ServicePort},
        virtual_service,
    },
    proto::{envoy::config::cluster::v3::cluster::DiscoveryType, istio::networking::v1alpha3::server_tls_settings},
};

/// The outbound clusters of a scope with their endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundPart {
    /// What the client sees.
    pub scope: ScopeKey,
    /// The client.
    pub client: Hashed<OutboundClient>,
    /// With TLS, or to pass it through.
    pub mode: ClusterMode,
    /// `None`: everything that is the same wherever the client is. Else only what depends on that.
    pub place: Option<Place>,
    /// Gateways whose routes limit the services, where only those are wanted that are routed to.
    pub limited_to: Option<Shared<[ObjectKey]>>,
}

/// What outbound clusters are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClusterMode {
    /// For connections that the client makes.
    Default,
    /// For mutual TLS that a gateway passes through to the service named by the SNI.
    SniDnat,
}

/// One outbound cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundKey {
    /// The service.
    pub service: ServiceKey,
    /// The service port.
    pub port: u32,
    /// The subset, empty for the default cluster.
    pub subset: SmolStr,
    /// What it is for.
    pub mode: ClusterMode,
    /// The rule, if there is one.
    pub rule: Option<RuleRef>,
    /// The client.
    pub client: Hashed<SocketClient>,
    /// What endpoints that stand inline depend on of the client: for DNS clusters only.
    pub inline: Option<InlineClient>,
    /// EnvoyFilter patches of clusters that apply, in order.
    pub patches: Shared<[PatchRef]>,
}

/// What DNS clusters depend on of a client besides the rest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InlineClient {
    /// The address families, which are asked for.
    pub ip_mode: IpMode,
    /// As for endpoints of EDS.
    pub endpoints: EndpointClient,
}

impl OutboundPart {
    /// The parts of a proxy.
    pub fn select(view: &View, selected: &Selected) -> Vec<Self> {
        let client = OutboundClient::of(view, selected);
        let is_router = selected.proxy.proxy_type == ProxyType::Router;
        let filtered = is_router && view.mesh.installation.features.pilot_filter_gateway_cluster_config;
        let general = Self {
            scope: selected.scope.clone(),
            client,
            mode: ClusterMode::Default,
            place: None,
            limited_to: filtered.then(|| selected.gateways.clone()),
        };
        let mut parts = vec![general];
        if is_router && passes_mtls_through(view, &selected.gateways) {
            parts.push(Self {
                mode: ClusterMode::SniDnat,
                limited_to: None,
                ..parts[0].clone()
            });
        }
        if let Some(place) = Place::of(view, selected) {
            let placed = parts.clone().into_iter().map(|part| Self {
                place: Some(place.clone()),
                ..part
            });
            parts.extend(placed);
        }
        parts
    }

    /// Clusters, and for those that use EDS the endpoints.
    pub fn list(&self, view: &View) -> Vec<Listed> {
        let scope = view.scope(&self.scope);
        let wanted = self
            .limited_to
            .as_ref()
            .map(|gateways| routed_hosts(view, scope.key.namespace(), gateways));
        let mut listed = Vec::new();
        for key in scope.services.iter() {
            if wanted
                .as_ref()
                .is_some_and(|hosts| !hosts.contains(key.hostname.as_str()))
            {
                continue;
            }
            if let Some(service) = view.service(key) {
                self.list_service(view, &scope, service, &mut listed);
            }
        }
        listed
    }

    fn list_service(&self, view: &View, scope: &SidecarScope, service: &Shared<Service>, listed: &mut Vec<Listed>) {
        let unsuited = self.mode == ClusterMode::SniDnat && service.mesh_external;
        if service.resolution == Resolution::Alias || unsuited {
            return;
        }
        let namespace = scope.key.namespace();
        let labels = Some(&self.client.rule_labels);
        let found = destination_rule::find(view.cx, view.mesh, namespace, labels, &service.key);
        for port in &service.ports {
            if port.protocol != Protocol::Udp && scope.shows_port(&service.key, port.number) {
                self.list_port(view, service, port, found.as_ref(), listed);
            }
        }
    }

    fn list_port(
        &self,
        view: &View,
        service: &Shared<Service>,
        port: &ServicePort,
        found: Option<&(RuleRef, Shared<DestinationRule>)>,
        listed: &mut Vec<Listed>,
    ) {
        let rule = found.map(|(_, rule)| rule);
        let dynamic = service.resolution == Resolution::DynamicDns;
        if dynamic && !dynamic::serves(port.protocol) {
            return;
        }
        let subsets = rule
            .filter(|_| !dynamic)
            .into_iter()
            .flat_map(|rule| rule::subset_names(rule));
        let kinds = Kinds::new(view, service, port, rule, self.client.socket.is_router);
        for subset in std::iter::once("").chain(subsets) {
            let kind = kinds.of(rule, subset);
            let key = OutboundKey {
                service: service.key.clone(),
                port: port.number,
                subset: subset.into(),
                mode: self.mode,
                rule: found.map(|(found, _)| found.clone()),
                client: self.client.socket.clone(),
                inline: None,
                patches: self.client.patches.clone(),
            };
            let endpoints = || self.endpoint_client(view, service, rule, &key);
            match kind {
                DiscoveryType::Eds => {
                    if let Some(client) = endpoints() {
                        listed.push(key.endpoints(client));
                    }
                    if self.place.is_none() {
                        listed.push(key.listed());
                    }
                }
                DiscoveryType::StrictDns | DiscoveryType::LogicalDns => {
                    if let Some(endpoints) = endpoints() {
                        let ip_mode = self.client.ip_mode;
                        let inline = Some(InlineClient { ip_mode, endpoints });
                        listed.push(OutboundKey { inline, ..key }.listed());
                    }
                }
                DiscoveryType::OriginalDst | DiscoveryType::Static => {
                    if self.place.is_none() {
                        listed.push(key.listed());
                    }
                }
            }
        }
    }

    /// What endpoints depend on of the client; `None` if they are another part's: the general one has those that do not
    /// depend on the client's place.
    fn endpoint_client(
        &self,
        view: &View,
        service: &Service,
        rule: Option<&Shared<DestinationRule>>,
        key: &OutboundKey,
    ) -> Option<EndpointClient> {
        let policy = rule.and_then(|rule| rule::policy_of(rule, key.port, &key.subset));
        let needs = endpoint::needs(view, service, policy.as_ref());
        match (&self.place, needs.any()) {
            (None, false) => Some(EndpointClient::of(view, service, &self.client, None)),
            (Some(place), true) => Some(EndpointClient::of(view, service, &self.client, Some((place, &needs)))),
            _ => None,
        }
    }
}

/// True if some server of the gateways passes mutual TLS through to the service that the SNI names.
fn passes_mtls_through(view: &View, gateways: &[ObjectKey]) -> bool {
    let rows = gateways.iter().filter_map(|key| view.mesh.gateways.get(view.cx, key));
    let mut modes = rows
        .flat_map(|row| &row.spec.servers)
        .filter_map(|server| server.tls.as_ref());
    modes.any(|tls| tls.mode() == server_tls_settings::TlSmode::AutoPassthrough)
}

/// The hosts that a gateway needs clusters for: those that its VirtualServices route to, and those of extension
/// providers.
fn routed_hosts(view: &View, namespace: &Namespace, gateways: &[ObjectKey]) -> BTreeSet<SmolStr> {
    let mut hosts = BTreeSet::new();
    for gateway in gateways {
        let name = format!("{}/{}", gateway.namespace, gateway.name);
        let routes = virtual_service::for_gateway(view.cx, view.mesh, namespace, &name);
        let destinations = routes.into_iter().flat_map(|(_, reach)| &reach.destinations);
        hosts.extend(destinations.map(|destination| SmolStr::new(destination.host.as_str())));
    }
    let providers = view.mesh_config().extension_providers.iter();
    hosts.extend(providers.filter_map(dynamic::provider_host));
    hosts
}

impl OutboundKey {
    /// The cluster's name.
    pub fn name(&self) -> String {
        match self.mode {
            ClusterMode::Default => name::outbound_cluster(self.port, &self.subset, &self.service.hostname),
            ClusterMode::SniDnat => name::sni_cluster(self.port, &self.subset, &self.service.hostname),
        }
    }

    fn listed(self) -> Listed {
        Listed::new(ResourceType::Cluster, Resource::Cluster(ClusterKey::Outbound(self)))
    }

    /// The load assignment of an EDS cluster.
    fn endpoints(&self, client: EndpointClient) -> Listed {
        let key = EndpointKey {
            service: self.service.clone(),
            port: self.port,
            subset: self.subset.clone(),
            mode: self.mode,
            rule: self.rule.clone(),
            client,
        };
        Listed::new(ResourceType::Endpoint, Resource::Endpoint(key))
    }

    /// Builds the cluster. Nothing if the service or port is gone, or a DNS cluster has no endpoints.
    pub fn build(&self, view: &View) -> Built {
        let Some((service, port)) = view
            .service(&self.service)
            .and_then(|service| Some((service, service.port(self.port)?)))
        else {
            return Built::none();
        };
        let rule = self.rule.as_ref();
        let rule = rule.and_then(|found| destination_rule::rule(view.cx, view.mesh, found));
        let context = Context {
            key: self,
            view,
            service,
            port,
            rule: rule.as_ref(),
            policy: rule
                .as_ref()
                .and_then(|rule| rule::policy_of(rule, self.port, &self.subset)),
        };
        match context.cluster() {
            Some(cluster) => Built::new(EncodedResource::new(cluster.name.as_str(), &cluster)),
            None => Built::none().with_notes(vec![Note {
                code: "pilot_dns_cluster_without_endpoints",
                detail: self.name().into(),
            }]),
        }
    }
}
