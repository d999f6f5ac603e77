//! Which endpoints of a service port a client may use, and how they look on the wire.

use std::collections::BTreeMap;

use super::{EndpointClient, locality, network};
use crate::{
    base::{Labels, Namespace, NetworkId, Shared, cidr, select},
    generate::{
        View,
        cluster::{ClusterMode, rule},
        constant::{self, ISTIO_METADATA, structure, text},
        listener::hbone::CONNECT_ORIGINATE,
    },
    model::{
        Endpoint, Service,
        authentication::{self, MtlsMode},
        canonical,
        destination_rule::DestinationRule,
        endpoint::Health,
        features::Features,
        service::{ServicePort, TrafficDistribution},
    },
    proto::{
        envoy::config::{
            core::v3::{
                Address, EnvoyInternalAddress, HealthStatus, Locality, Metadata, address,
                envoy_internal_address::AddressNameSpecifier,
            },
            endpoint::v3::{
                Endpoint as EnvoyEndpoint, LbEndpoint, LocalityLbEndpoints, endpoint::AdditionalAddress,
                lb_endpoint::HostIdentifier,
            },
        },
        istio::networking::v1alpha3::{ClientTlsSettings, TrafficPolicy, client_tls_settings::TlSmode},
    },
};

/// The metadata by which the socket of an endpoint is chosen.
const SOCKET_METADATA: &str = "envoy.transport_socket_match";
const MTLS: &str = "istio";
/// The metadata that tells the tunnel where to lead.
const DESTINATION_METADATA: &str = "envoy.filters.listener.original_dst";
/// The label of deployments that a controller made, and its value for waypoints.
const MANAGED_LABEL: &str = "gateway.istio.io/managed";
const MESH_CONTROLLER: &str = "istio.io-mesh-controller";
const PLAINTEXT: &str = "disabled";

/// The service port, or a subset of it, whose endpoints are wanted.
pub struct Target<'a> {
    /// The service.
    pub service: &'a Service,
    /// The port.
    pub port: &'a ServicePort,
    /// The subset, empty for all.
    pub subset: &'a str,
    /// What the cluster is for.
    pub mode: ClusterMode,
    /// The rule, if there is one.
    pub rule: Option<&'a Shared<DestinationRule>>,
}

/// The endpoints of one locality, or of one priority in it.
pub(super) struct Group {
    /// `region/zone/subzone`, empty when unknown.
    pub locality: smol_str::SmolStr,
    /// The endpoints.
    pub endpoints: Vec<Member>,
    /// The sum of their weights; `None` where filters have left none.
    pub weight: Option<u32>,
    /// 0 comes first.
    pub priority: u32,
}

/// An endpoint on the wire, with what later steps ask of it.
pub(super) struct Member {
    /// The message.
    pub message: LbEndpoint,
    /// Labels that failover compares.
    pub labels: Shared<Labels>,
    /// Mutual TLS is used to it.
    pub mtls: bool,
    /// Its network.
    pub network: NetworkId,
    /// Its cluster.
    pub cluster: crate::base::ClusterId,
    /// Its address; empty if it can only be reached through a gateway.
    pub has_address: bool,
}

impl Member {
    /// The weight, 1 if none is given.
    pub(super) fn weight(&self) -> u32 {
        self.message.load_balancing_weight.unwrap_or(1)
    }
}

impl Group {
    /// Sums the weights again.
    pub(super) fn refresh_weight(&mut self) {
        let sum = self
            .endpoints
            .iter()
            .fold(0u32, |sum, member| sum.saturating_add(member.weight()));
        self.weight = (!self.endpoints.is_empty()).then_some(sum);
    }

    fn into_message(self) -> LocalityLbEndpoints {
        LocalityLbEndpoints {
            locality: Some(locality_message(&self.locality)),
            lb_endpoints: self.endpoints.into_iter().map(|member| member.message).collect(),
            load_balancing_weight: self.weight,
            priority: self.priority,
            ..Default::default()
        }
    }
}

fn locality_message(text: &str) -> Locality {
    let mut parts = text.splitn(3, '/').map(str::to_owned);
    Locality {
        region: parts.next().unwrap_or_default(),
        zone: parts.next().unwrap_or_default(),
        sub_zone: parts.next().unwrap_or_default(),
    }
}

impl Target<'_> {
    /// The endpoints that EDS tells.
    pub(super) fn discovered(&self, view: &View, client: &EndpointClient) -> Vec<LocalityLbEndpoints> {
        let Some(row) = view.mesh.endpoints.get(view.cx, &self.service.key) else {
            return Vec::new();
        };
        // Names cannot be told by EDS; a port of 0 means a Unix socket, no address a gateway's.
        let usable = |endpoint: &&Shared<Endpoint>| {
            endpoint.address.is_empty() || endpoint.port == 0 || cidr::parse_ip(&endpoint.address).is_some()
        };
        let served = row
            .endpoints
            .iter()
            .filter(|endpoint| endpoint.port_name == self.port.name);
        let groups = self.groups(view, client, served.filter(usable));
        self.balanced(view, client, groups, true)
    }

    /// The endpoints inside a DNS cluster.
    pub(super) fn inline(&self, view: &View, client: &EndpointClient) -> Vec<LocalityLbEndpoints> {
        let Some(traits) = view.mesh.endpoint_traits.get(view.cx, &self.service.key) else {
            return Vec::new();
        };
        let served = traits.inline.iter().filter(|endpoint| endpoint.serves(self.port));
        let groups = self.groups(view, client, served);
        // Parity: failover priorities do not apply inside other clusters than the default one.
        let by_labels = self.subset.is_empty() && self.mode == ClusterMode::Default;
        self.balanced(view, client, groups, by_labels)
    }

    fn balanced(
        &self,
        view: &View,
        client: &EndpointClient,
        mut groups: Vec<Group>,
        by_labels: bool,
    ) -> Vec<LocalityLbEndpoints> {
        if let Some(locality) = &client.locality
            && !groups.is_empty()
            && let Some(setting) = locality::locality_setting(view, self.service, self.policy().as_ref())
        {
            let labels = client.labels.as_ref().filter(|_| by_labels);
            groups = setting.apply(groups, locality, labels);
        }
        groups.into_iter().map(Group::into_message).collect()
    }

    fn policy(&self) -> Option<TrafficPolicy> {
        self.rule
            .and_then(|rule| rule::policy_of(rule, self.port.number, self.subset))
    }

    /// The endpoints by locality, network gateways in place of those behind them.
    fn groups<'e>(
        &self,
        view: &View,
        client: &EndpointClient,
        endpoints: impl Iterator<Item = &'e Shared<Endpoint>>,
    ) -> Vec<Group> {
        let mut peers = Peers::new(self);
        let mut by_locality: BTreeMap<&str, Vec<Member>> = BTreeMap::new();
        for endpoint in endpoints.filter(|endpoint| self.admits(view, client, endpoint)) {
            let mtls = peers.use_mtls(view, endpoint);
            let mut member = member(view, self.service, endpoint, mtls);
            if !client.no_tunnels && is_tunnelled(view, endpoint) {
                tunnel(&mut member, endpoint);
            }
            by_locality.entry(endpoint.locality.as_str()).or_default().push(member);
        }
        let groups = by_locality.into_iter().map(|(locality, endpoints)| {
            let mut group = Group {
                locality: locality.into(),
                endpoints,
                weight: None,
                priority: 0,
            };
            group.refresh_weight();
            group
        });
        let mut groups: Vec<Group> = match &client.network {
            Some(network) => network::through_gateways(view, self.service, network, groups.collect()),
            None => groups.collect(),
        };
        if self.mode == ClusterMode::SniDnat {
            // A gateway that passes TLS through cannot tell whether it is mutual TLS; so it must lead nowhere else.
            for group in &mut groups {
                group.endpoints.retain(|member| member.mtls);
                group.refresh_weight();
            }
        }
        groups
    }

    fn admits(&self, view: &View, client: &EndpointClient, endpoint: &Endpoint) -> bool {
        self.selects(endpoint)
            && client.node.as_ref().is_none_or(|node| *node == endpoint.node_name)
            && is_for_cluster(client, endpoint)
            && is_in_view(client, endpoint)
            && self.is_served(view, endpoint)
            && (!endpoint.address.is_empty() || is_behind_gateway(client, endpoint))
    }

    fn selects(&self, endpoint: &Endpoint) -> bool {
        let subset = self.rule.and_then(|rule| rule::subset(rule, self.subset));
        subset.is_none_or(|subset| {
            let pairs = subset.labels.iter();
            select::matches(pairs.map(|(k, v)| (k.as_str(), v.as_str())), &endpoint.labels)
        })
    }

    fn is_served(&self, view: &View, endpoint: &Endpoint) -> bool {
        let features = &view.mesh.installation.features;
        match health(view, endpoint) {
            Health::Terminating => false,
            Health::Draining => {
                let label = self.service.label(&features.pilot_persistent_session_label);
                label.is_some_and(|value| !value.is_empty())
            }
            // Parity: `publishNotReadyAddresses` counts for the name table alone. Kubernetes marks the endpoints of such a
            // Service as ready anyhow.
            Health::Unhealthy => {
                features.pilot_send_unhealthy_endpoints || self.service.traffic_distribution != TrafficDistribution::Any
            }
            Health::Healthy | Health::Unknown => true,
        }
    }
}

/// True if clients of the client's cluster may use the endpoint. A client that does not name its cluster may be of any.
fn is_for_cluster(client: &EndpointClient, endpoint: &Endpoint) -> bool {
    client.cluster.as_ref().is_none_or(|cluster| {
        *cluster == endpoint.cluster || !client.cluster_only && (!endpoint.confined || cluster.is_empty())
    })
}

fn is_in_view(client: &EndpointClient, endpoint: &Endpoint) -> bool {
    let view = client.network_view.as_ref();
    endpoint.network.is_empty() || view.is_none_or(|view| view.contains(&endpoint.network))
}

fn is_behind_gateway(client: &EndpointClient, endpoint: &Endpoint) -> bool {
    let network = client.network.as_ref();
    network.is_some_and(|client| !endpoint.network.is_empty() && client.network != endpoint.network)
}

fn health(view: &View, endpoint: &Endpoint) -> Health {
    let label = &view.mesh.installation.features.pilot_draining_label;
    let marked = !label.is_empty() && endpoint.labels.get(label).is_some_and(|value| !value.is_empty());
    if marked { Health::Draining } else { endpoint.health }
}

/// Tells to which endpoints mutual TLS is used.
struct Peers {
    /// What the rule says; it has the last word.
    rule: Option<TlSmode>,
    /// What is known of namespaces: the mode, unless it differs by workload.
    namespaces: BTreeMap<Namespace, Option<MtlsMode>>,
}

impl Peers {
    fn new(target: &Target) -> Self {
        // Parity: of a subset only its own policy is looked at.
        let policy = target.rule.and_then(|rule| match target.subset {
            "" => rule.spec.traffic_policy.as_ref(),
            name => rule::subset(rule, name)?.traffic_policy.as_ref(),
        });
        Self {
            rule: policy.and_then(|policy| tls_mode(policy, target.port.number)),
            namespaces: BTreeMap::new(),
        }
    }

    fn use_mtls(&mut self, view: &View, endpoint: &Endpoint) -> bool {
        if let Some(mode) = self.rule {
            return mode == TlSmode::IstioMutual;
        }
        endpoint.tls_mode == MTLS && self.demanded(view, endpoint) != MtlsMode::Disable
    }

    fn demanded(&mut self, view: &View, endpoint: &Endpoint) -> MtlsMode {
        let namespace = &endpoint.namespace;
        if !self.namespaces.contains_key(namespace) {
            let rows = view.mesh.peer_authentications_by_namespace.get(view.cx, namespace);
            let selectors = rows.filter_map(|(_, row)| row.spec.selector.as_ref());
            let differs = selectors
                .map(|selector| &selector.match_labels)
                .any(|labels| !labels.is_empty());
            let mode = (!differs).then(|| authentication::namespace_mode(view.cx, view.mesh, namespace));
            self.namespaces.insert(namespace.clone(), mode);
        }
        self.namespaces[namespace].unwrap_or_else(|| {
            authentication::mtls_mode(view.cx, view.mesh, namespace, &endpoint.labels, endpoint.port)
        })
    }
}

fn tls_mode(policy: &TrafficPolicy, port: u32) -> Option<TlSmode> {
    let entries = policy.port_level_settings.iter();
    let mut of_port = entries.filter(|entry| entry.port.is_some_and(|selector| selector.number == port));
    let tls = of_port.find_map(|entry| entry.tls.as_ref()).or(policy.tls.as_ref());
    tls.map(ClientTlsSettings::mode)
}

fn member(view: &View, service: &Service, endpoint: &Endpoint, mtls: bool) -> Member {
    let features = &view.mesh.installation.features;
    let extra = endpoint.extra_addresses.iter().filter(|_| features.istio_dual_stack);
    let tls_mode = Some(endpoint.tls_mode.as_str()).filter(|mode| mtls && !mode.is_empty() && *mode != PLAINTEXT);
    let message = LbEndpoint {
        health_status: match health(view, endpoint) {
            Health::Unknown | Health::Terminating => HealthStatus::Unknown,
            Health::Healthy => HealthStatus::Healthy,
            Health::Unhealthy => HealthStatus::Unhealthy,
            Health::Draining => HealthStatus::Draining,
        } as i32,
        load_balancing_weight: Some(endpoint.weight.max(1)),
        host_identifier: Some(HostIdentifier::Endpoint(EnvoyEndpoint {
            address: Some(constant::address(&endpoint.address, endpoint.port)),
            additional_addresses: extra
                .map(|address| AdditionalAddress {
                    address: Some(constant::address(address, endpoint.port)),
                })
                .collect(),
            ..Default::default()
        })),
        metadata: Some(metadata(features, tls_mode, || workload(features, service, endpoint))),
    };
    Member {
        message,
        labels: endpoint.labels.clone(),
        mtls: tls_mode == Some(MTLS),
        network: endpoint.network.clone(),
        cluster: endpoint.cluster.clone(),
        has_address: !endpoint.address.is_empty(),
    }
}

/// True if the endpoint is reached by HBONE: it asks for that, or is a waypoint. Those with a sidecar are reached by
/// mutual TLS all the same, unless HBONE is preferred.
fn is_tunnelled(view: &View, endpoint: &Endpoint) -> bool {
    let is_waypoint = endpoint
        .labels
        .get(MANAGED_LABEL)
        .is_some_and(|by| by == MESH_CONTROLLER);
    let has_sidecar = endpoint.tls_mode == MTLS && !view.mesh.installation.features.pilot_prefer_sending_hbone;
    (is_waypoint || endpoint.supports_tunnel()) && !has_sidecar
}

/// Leads an endpoint through the listener inside the proxy that wraps connections into HBONE.
fn tunnel(member: &mut Member, endpoint: &Endpoint) {
    let address = if endpoint.address.contains(':') {
        format!("[{}]:{}", endpoint.address, endpoint.port)
    } else {
        format!("{}:{}", endpoint.address, endpoint.port)
    };
    let metadata = member.message.metadata.get_or_insert_default();
    let fields = &mut metadata.filter_metadata;
    fields.insert(SOCKET_METADATA.to_owned(), structure([("tunnel", text("http"))]));
    let destination = structure([("local", text(address.as_str()))]);
    fields.insert(DESTINATION_METADATA.to_owned(), destination);
    member.mtls = false;
    member.message.host_identifier = Some(HostIdentifier::Endpoint(EnvoyEndpoint {
        address: Some(Address {
            address: Some(address::Address::EnvoyInternalAddress(EnvoyInternalAddress {
                endpoint_id: address,
                address_name_specifier: Some(AddressNameSpecifier::ServerListenerName(CONNECT_ORIGINATE.to_owned())),
            })),
        }),
        ..Default::default()
    }));
}

/// The metadata of an endpoint: its socket, and who it is.
pub(super) fn metadata(features: &Features, tls_mode: Option<&str>, workload: impl FnOnce() -> String) -> Metadata {
    let mut metadata = Metadata::default();
    let fields = &mut metadata.filter_metadata;
    if let Some(mode) = tls_mode {
        fields.insert(SOCKET_METADATA.to_owned(), structure([("tlsMode", text(mode))]));
    }
    if features.pilot_enable_telemetry_label && features.pilot_endpoint_telemetry_label {
        fields.insert(ISTIO_METADATA.to_owned(), structure([("workload", text(workload()))]));
    }
    metadata
}

/// `name;namespace;canonical name;canonical revision;cluster`, which telemetry takes apart. On demand endpoints outside
/// the mesh belong to the canonical service that the labels of their service name.
fn workload(features: &Features, service: &Service, endpoint: &Endpoint) -> String {
    let of_service = features.label_canonical_services_for_mesh_external_service_entries && service.mesh_external;
    let namespace = if of_service {
        &service.key.namespace
    } else {
        &endpoint.namespace
    };
    let canonical = service.label(canonical::NAME_LABEL).filter(|_| of_service);
    let (name, mut revision) = match canonical {
        Some(name) => {
            let revision = service.label(canonical::REVISION_LABEL);
            (name.clone(), revision.cloned().unwrap_or_default())
        }
        None => canonical::service(&endpoint.labels, &endpoint.workload_name),
    };
    if revision == "latest" {
        revision = Default::default();
    }
    let (workload, cluster) = (&endpoint.workload_name, &endpoint.cluster);
    format!("{workload};{namespace};{name};{revision};{cluster}")
}
