//! Which endpoints of a service port a client may use, and how they look on the wire.

use std::collections::BTreeMap;

use super::{EndpointClient, locality, network};
use crate::{
    base::{Labels, Namespace, NetworkId, Shared, cidr, select},
    generate::{
        View,
        cluster::{ClusterMode, rule},
        constant::{self, ISTIO_METADATA, structure, text},
    },
    model::{
        Endpoint, Service,
        authentication::{self, MtlsMode},
        destination_rule::DestinationRule,
        endpoint::Health,
        service::{ServicePort, TrafficDistribution},
    },
    proto::{
        envoy::config::{
            core::v3::{HealthStatus, Locality, Metadata},
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
        let groups = self.groups(view, client, row.endpoints.iter().filter(usable));
        self.balanced(view, client, groups, true)
    }

    /// The endpoints inside a DNS cluster.
    pub(super) fn inline(&self, view: &View, client: &EndpointClient) -> Vec<LocalityLbEndpoints> {
        let Some(traits) = view.mesh.endpoint_traits.get(view.cx, &self.service.key) else {
            return Vec::new();
        };
        let groups = self.groups(view, client, traits.inline.iter());
        // Parity: failover priorities do not apply inside clusters.
        self.balanced(view, client, groups, false)
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
            let member = member(view, endpoint, mtls);
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
            Some(network) => network::through_gateways(view, network, groups.collect()),
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
        endpoint.port_name == self.port.name
            && self.selects(endpoint)
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

fn member(view: &View, endpoint: &Endpoint, mtls: bool) -> Member {
    let features = &view.mesh.installation.features;
    let extra = endpoint.extra_addresses.iter().filter(|_| features.istio_dual_stack);
    let tls_mode = Some(endpoint.tls_mode.as_str()).filter(|mode| mtls && !mode.is_empty() && *mode != PLAINTEXT);
    let workload = workload(endpoint);
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
        metadata: Some(metadata(
            tls_mode,
            features.pilot_endpoint_telemetry_label.then_some(workload),
        )),
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

/// The metadata of an endpoint: its socket, and who it is.
pub(super) fn metadata(tls_mode: Option<&str>, workload: Option<String>) -> Metadata {
    let mut metadata = Metadata::default();
    let fields = &mut metadata.filter_metadata;
    if let Some(mode) = tls_mode {
        fields.insert(SOCKET_METADATA.to_owned(), structure([("tlsMode", text(mode))]));
    }
    if let Some(workload) = workload {
        fields.insert(ISTIO_METADATA.to_owned(), structure([("workload", text(workload))]));
    }
    metadata
}

/// `name;namespace;canonical name;canonical revision;cluster`, which telemetry takes apart.
fn workload(endpoint: &Endpoint) -> String {
    let first = |keys: &[&str]| {
        keys.iter()
            .find_map(|key| endpoint.labels.get(*key))
            .map(smol_str::SmolStr::as_str)
    };
    let name = first(&["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]);
    let revision = first(&[
        "service.istio.io/canonical-revision",
        "app.kubernetes.io/version",
        "version",
    ]);
    format!(
        "{};{};{};{};{}",
        endpoint.workload_name,
        endpoint.namespace,
        name.unwrap_or(&endpoint.workload_name),
        revision.filter(|revision| *revision != "latest").unwrap_or_default(),
        endpoint.cluster
    )
}
