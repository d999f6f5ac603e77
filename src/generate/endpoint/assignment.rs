//! Endpoints of a service port that a proxy may use, and their encoding.

use std::collections::BTreeMap;

use prost_types::Struct;

use super::{
    EndpointProxyView, address_in,
    lb_endpoint::{LbEndpoint, LocalityEndpoints, USUAL_LENGTH, limit_weights, write_address, write_metadata},
    locality,
    network::{self, Destination},
    waypoint_service,
};
use crate::{
    base::{Labels, Namespace, Shared, SmolStr, address::host_port, cidr},
    generate::{
        BuildContext,
        name::ClusterMode,
        traffic_policy::{self, EffectivePolicy},
        tunnel::{CONNECT_ORIGINATE, DESTINATION_METADATA, FORWARD_INNER_CONNECT, HBONE_PORT, internal_address},
        wire::{Encoded, Writer},
    },
    model::{
        Endpoint, Service,
        authentication::{MtlsMode, NamespacePolicies},
        canonical,
        destination_rule::DestinationRule,
        endpoint::Health,
        features::Features,
        gateway_api::inference_pool,
        service::{ServicePort, TrafficDistribution},
        waypoint::{MANAGED_LABEL, MESH_CONTROLLER},
        workload::{MUTUAL_TLS, PLAINTEXT},
    },
    proto::{
        envoy::config::core::v3::HealthStatus,
        field::{additional_address, endpoint as endpoint_field, lb_endpoint, metadata},
        istio::networking::v1alpha3::{ClientTlsSettings, client_tls_settings::TlSmode},
    },
};

/// A service port, or a subset of it.
pub struct Target<'a> {
    /// Service.
    pub service: &'a Service,
    /// Port.
    pub port: &'a ServicePort,
    /// Subset, empty for all endpoints.
    pub subset: &'a str,
    /// Mode of the cluster.
    pub mode: ClusterMode,
    /// DestinationRule, if there is one.
    pub rule: Option<&'a Shared<DestinationRule>>,
    /// [`EndpointProxyView::through_waypoint`], if the endpoints are those of the service's waypoint.
    pub through_waypoint: Option<&'a SmolStr>,
}

impl Target<'_> {
    /// Returns the endpoints for EDS, grouped by locality.
    pub(super) fn discovered(&self, ctx: &BuildContext, client: &EndpointProxyView) -> Vec<LocalityEndpoints> {
        if let Some(address) = &client.through_waypoint {
            return self.waypoints(ctx, client, address);
        }
        // Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): endpoints that DNS resolves are in their cluster. A
        // client with another cluster gets none: a proxyless one, or an Envoy with a cluster of an EnvoyFilter.
        if self.service.resolution.is_dns() {
            return Vec::new();
        }
        let Some(row) = ctx.mesh.endpoints.get(ctx.cx, &self.service.key) else {
            return Vec::new();
        };
        // EDS cannot carry host names. Port 0 is a Unix socket, and no address means an endpoint behind a gateway.
        let usable = |endpoint: &&Endpoint| {
            endpoint.address.is_empty() || endpoint.port == 0 || cidr::parse_ip(&endpoint.address).is_some()
        };
        // Registries name ports in their own ways, so that instances of one host have the number in common.
        let registries = &ctx.mesh.installation.registries;
        // The cluster for the first port of an InferencePool has those of all ports, between which the picker selects.
        let first = self.service.ports.first().map(|port| port.number);
        let is_pool = first == Some(self.port.number) && inference_pool::is_shadow(&self.service.labels);
        let serves = |endpoint: &Endpoint| {
            if registries.contains(&endpoint.origin.cluster) {
                endpoint.serves(self.port)
            } else {
                endpoint.port_name == self.port.name
            }
        };
        let selected = self.select(ctx, &row.endpoints, (!is_pool).then_some(serves));
        let groups = self.groups(ctx, client, selected.into_iter().filter(usable));
        self.balanced(ctx, client, groups, client.labels.as_ref())
    }

    /// Returns the endpoints of the service's waypoint; none if its address is unknown.
    ///
    /// Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): they are endpoints of the service, by which gateways of
    /// other networks know it too; only subsets do not apply.
    fn waypoints(&self, ctx: &BuildContext, client: &EndpointProxyView, address: &SmolStr) -> Vec<LocalityEndpoints> {
        let found = || {
            let waypoint = waypoint_service(ctx, self.service)?;
            let port = waypoint.port(HBONE_PORT)?;
            let endpoints = ctx.mesh.endpoints.get(ctx.cx, &waypoint.key)?;
            let target = Target {
                subset: "",
                rule: None,
                through_waypoint: Some(address),
                ..*self
            };
            let served = endpoints.endpoints.iter();
            let served = served.filter(|endpoint| endpoint.port_name == port.name && !endpoint.address.is_empty());
            Some(target.groups(ctx, client, served))
        };
        found().unwrap_or_default()
    }

    /// Returns the endpoints of a DNS cluster.
    pub(super) fn inline(&self, ctx: &BuildContext, client: &EndpointProxyView) -> Vec<LocalityEndpoints> {
        let Some(traits) = ctx.mesh.endpoint_traits.get(ctx.cx, &self.service.key) else {
            return Vec::new();
        };
        let selected = self.select(
            ctx,
            &traits.inline,
            Some(|endpoint: &Endpoint| endpoint.serves(self.port)),
        );
        let groups = self.groups(ctx, client, selected);
        // Parity (pilot/pkg/xds/endpoints/endpoint_builder.go): failover priorities apply only to the default cluster
        // among inline clusters.
        let is_default = self.subset.is_empty() && self.mode == ClusterMode::Default;
        let labels = client.labels.as_ref().filter(|_| is_default);
        self.balanced(ctx, client, groups, labels)
    }

    /// Applies the locality load balancing of the service. `labels` are those of the proxy that failover priorities
    /// compare.
    fn balanced(
        &self,
        ctx: &BuildContext,
        client: &EndpointProxyView,
        mut groups: Vec<LocalityEndpoints>,
        labels: Option<&Labels>,
    ) -> Vec<LocalityEndpoints> {
        if let Some(locality) = &client.locality
            && !groups.is_empty()
            && let Some(setting) = locality::locality_setting(ctx, self.service, self.policy())
        {
            groups = setting.apply(groups, locality, labels);
        }
        groups
    }

    fn policy(&self) -> Option<EffectivePolicy<'_>> {
        self.rule
            .and_then(|rule| traffic_policy::policy_of(rule, self.port.number, self.subset))
    }

    /// Groups selected endpoints by locality, with network gateways in place of the endpoints behind them.
    fn groups<'e>(
        &self,
        ctx: &BuildContext,
        client: &EndpointProxyView,
        endpoints: impl IntoIterator<Item = &'e Endpoint>,
    ) -> Vec<LocalityEndpoints> {
        let mut peers = MtlsChecker::new(self);
        let mut by_locality: BTreeMap<&str, Vec<LbEndpoint>> = BTreeMap::new();
        let listener = if client.forwards {
            FORWARD_INNER_CONNECT
        } else {
            CONNECT_ORIGINATE
        };
        let endpoints = endpoints.into_iter();
        for endpoint in endpoints.filter(|endpoint| self.is_usable(ctx, client, endpoint)) {
            let mtls = peers.use_mtls(ctx, endpoint);
            let tunnelled = self.through_waypoint.is_some() || !client.no_tunnels && self.is_tunnelled(ctx, endpoint);
            let member = member(ctx, self, endpoint, mtls, tunnelled.then_some(listener));
            by_locality
                .entry(endpoint.origin.locality.as_str())
                .or_default()
                .push(member);
        }
        let groups = by_locality.into_iter().map(|(locality, endpoints)| {
            let mut group = LocalityEndpoints {
                locality: locality.into(),
                endpoints,
                weight: None,
                priority: 0,
            };
            group.refresh_weight();
            group
        });
        let mut groups: Vec<LocalityEndpoints> = match &client.network {
            Some(network) => {
                let destination = Destination {
                    service: self.service,
                    port: self.port.number,
                    is_vip: self.mode.is_vip(),
                };
                network::through_gateways(ctx, destination, network, groups.collect())
            }
            None => groups.collect(),
        };
        if self.mode == ClusterMode::SniDnat {
            // A gateway that passes TLS through cannot tell mutual TLS from other TLS, so only endpoints with mutual
            // TLS are allowed.
            for group in &mut groups {
                group.endpoints.retain(|member| member.mtls);
                group.refresh_weight();
            }
        }
        limit_weights(&mut groups);
        groups
    }

    /// Returns true if the client may use the endpoint: because of its node, cluster, network and health.
    fn is_usable(&self, ctx: &BuildContext, client: &EndpointProxyView, endpoint: &Endpoint) -> bool {
        let node = client.node.as_ref();
        node.is_none_or(|node| *node == endpoint.origin.node_name)
            && is_for_cluster(client, endpoint)
            && is_in_view(client, endpoint)
            && self.is_served(ctx, endpoint)
            && (!endpoint.address.is_empty() || self.may_lack_address(client, endpoint))
    }

    /// Returns true if the endpoint counts without an address: a gateway leads to it.
    ///
    /// Parity (pilot/pkg/xds/endpoints/ep_filters.go): if no gateway does, an endpoint for EDS still has a locality,
    /// which is then without endpoints.
    fn may_lack_address(&self, client: &EndpointProxyView, endpoint: &Endpoint) -> bool {
        is_behind_gateway(client, endpoint) || client.network.is_some() && !self.service.resolution.is_dns()
    }

    /// Returns true if the endpoint's health allows traffic. The label that marks endpoints as draining makes none of
    /// them available.
    fn is_served(&self, ctx: &BuildContext, endpoint: &Endpoint) -> bool {
        let features = &ctx.mesh.installation.features;
        let sends_unhealthy =
            features.pilot_send_unhealthy_endpoints || self.service.traffic_distribution != TrafficDistribution::Any;
        // Parity (pilot/pkg/serviceregistry/kube/controller/endpointslice.go): `publishNotReadyAddresses` affects the
        // name table only. Kubernetes marks the endpoints of such a Service as ready anyway.
        if endpoint.health == Health::Terminating || endpoint.health == Health::Unhealthy && !sends_unhealthy {
            return false;
        }
        let has_sessions = || {
            let label = self.service.label(&features.pilot_persistent_session_label);
            label.is_some_and(|value| !value.is_empty())
        };
        health(ctx, endpoint) != Health::Draining || has_sessions()
    }
}

/// Returns true if proxies of this cluster may use the endpoint. A proxy without a cluster name may be of any cluster.
fn is_for_cluster(client: &EndpointProxyView, endpoint: &Endpoint) -> bool {
    client.cluster.as_ref().is_none_or(|cluster| {
        *cluster == endpoint.origin.cluster || !client.cluster_only && (!endpoint.cluster_local || cluster.is_empty())
    })
}

/// Returns true if the endpoint's network is one that the proxy requests (`REQUESTED_NETWORK_VIEW`), or unknown.
fn is_in_view(client: &EndpointProxyView, endpoint: &Endpoint) -> bool {
    let view = client.network_view.as_ref();
    endpoint.origin.network.is_empty() || view.is_none_or(|view| view.contains(&endpoint.origin.network))
}

fn is_behind_gateway(client: &EndpointProxyView, endpoint: &Endpoint) -> bool {
    let network = client.network.as_ref();
    network.is_some_and(|client| !endpoint.origin.network.is_empty() && client.network != endpoint.origin.network)
}

fn health(ctx: &BuildContext, endpoint: &Endpoint) -> Health {
    let label = &ctx.mesh.installation.features.pilot_draining_label;
    let marked = !label.is_empty() && endpoint.origin.labels.get(label).is_some_and(|value| !value.is_empty());
    if marked { Health::Draining } else { endpoint.health }
}

/// Decides which endpoints are reached by mutual TLS.
struct MtlsChecker<'m, 'e> {
    /// Mode of the rule, which takes precedence.
    rule: Option<TlSmode>,
    /// Policies of each namespace of endpoints.
    namespaces: BTreeMap<&'e Namespace, NamespacePolicies<'m>>,
}

impl<'m, 'e> MtlsChecker<'m, 'e> {
    fn new(target: &Target) -> Self {
        // Parity (pilot/pkg/xds/endpoints/mtls_checker.go): only a subset's own policy is read. The default cluster
        // behind a waypoint counts as a subset, `http` or `tcp`.
        let is_default_vip = target.mode.is_vip() && target.subset.is_empty();
        let rule = target.rule.filter(|_| !is_default_vip);
        Self {
            rule: rule.and_then(|rule| tls_mode(rule, target.subset, target.port.number)),
            namespaces: BTreeMap::new(),
        }
    }

    fn use_mtls(&mut self, ctx: &BuildContext<'m>, endpoint: &'e Endpoint) -> bool {
        if let Some(mode) = self.rule {
            return mode == TlSmode::IstioMutual;
        }
        endpoint.origin.accepts_mutual_tls() && self.demanded(ctx, endpoint) != MtlsMode::Disable
    }

    fn demanded(&mut self, ctx: &BuildContext<'m>, endpoint: &'e Endpoint) -> MtlsMode {
        let namespace = &endpoint.origin.namespace;
        let policies = self.namespaces.entry(namespace);
        let policies = policies.or_insert_with(|| NamespacePolicies::of(ctx.cx, ctx.mesh, namespace));
        policies.mode_on(&endpoint.origin.labels, endpoint.port)
    }
}

/// Returns the mode of a rule's own policy, or of that of a subset.
fn tls_mode(rule: &DestinationRule, subset: &str, port: u32) -> Option<TlSmode> {
    let policy = rule.own_policy(subset)?;
    let mut of_port = rule.port_settings((!subset.is_empty()).then_some(subset), port);
    let tls = of_port.find_map(|entry| entry.tls.as_deref()).or(policy.tls.as_deref());
    tls.map(ClientTlsSettings::mode)
}

/// Returns an endpoint. `listener` is the internal listener that leads to it, if it is reached by HBONE.
fn member(
    ctx: &BuildContext,
    target: &Target,
    endpoint: &Endpoint,
    mtls: bool,
    listener: Option<&'static str>,
) -> LbEndpoint {
    let features = &ctx.mesh.installation.features;
    let tls_mode =
        Some(endpoint.origin.tls_mode.as_str()).filter(|mode| mtls && !mode.is_empty() && *mode != PLAINTEXT);
    let health = match health(ctx, endpoint) {
        Health::Unknown | Health::Terminating => HealthStatus::Unknown,
        Health::Healthy => HealthStatus::Healthy,
        Health::Unhealthy => HealthStatus::Unhealthy,
        Health::Draining => HealthStatus::Draining,
    };
    let tunnel = listener.map(|listener| (listener, host_port(&endpoint.address, endpoint.port)));
    let socket = match &tunnel {
        Some(_) if !target.mode.is_vip() => Some(("tunnel", "http")),
        // Clusters behind waypoints have one socket for all endpoints.
        _ => tls_mode.map(|mode| ("tlsMode", mode)),
    };
    let encoded = Encoded::write(USUAL_LENGTH, |out| {
        out.nested(lb_endpoint::ENDPOINT, |out| match &tunnel {
            Some((listener, address)) => {
                out.message(endpoint_field::ADDRESS, &internal_address(listener, address));
            }
            None => {
                out.nested(endpoint_field::ADDRESS, |out| {
                    write_address(out, &endpoint.address, endpoint.port);
                });
                let extra = endpoint.extra_addresses.iter().filter(|_| features.istio_dual_stack);
                for address in extra {
                    out.nested(endpoint_field::ADDITIONAL_ADDRESSES, |out| {
                        out.nested(additional_address::ADDRESS, |out| {
                            write_address(out, address, endpoint.port);
                        });
                    });
                }
            }
        });
        out.number(lb_endpoint::HEALTH_STATUS, health as u32);
        out.nested(lb_endpoint::METADATA, |out| {
            if let Some((_, address)) = &tunnel {
                out.entry(metadata::FILTER_METADATA, DESTINATION_METADATA, |out| {
                    write_destination(out, target, endpoint, address);
                });
            }
            write_metadata(out, features, socket, |workload| {
                write_workload(workload, features, target.service, endpoint);
            });
        });
    });
    LbEndpoint {
        encoded,
        weight: endpoint.origin.weight.max(1),
        labels: endpoint.origin.labels.clone(),
        // Parity (pilot/pkg/xds/endpoints/ep_filters.go): behind a waypoint, endpoints with tunnels keep this mark.
        mtls: tls_mode == Some(MUTUAL_TLS) && (listener.is_none() || target.mode.is_vip()),
        network: endpoint.origin.network.clone(),
        cluster: endpoint.origin.cluster.clone(),
        has_address: !endpoint.address.is_empty() && endpoint.port != 0,
    }
}

/// Writes the destination of a tunnel: the endpoint at this address, or the service behind the waypoint at it.
fn write_destination(out: &mut Writer<Struct>, target: &Target, endpoint: &Endpoint, address: &str) {
    match target.through_waypoint {
        None => out.text_field("local", address),
        // A waypoint knows the address of the service in its own cluster.
        Some(elsewhere) => {
            let own = address_in(target.service, &endpoint.origin.cluster).unwrap_or(elsewhere);
            out.text_field("local", &host_port(own, target.port.number));
            out.text_field("waypoint", address);
        }
    }
}

impl Target<'_> {
    /// Returns true if the endpoint is reached by HBONE: it requests that, or is a waypoint. Endpoints with a sidecar
    /// are reached by mutual TLS all the same, unless HBONE is preferred. Waypoints have no mutual TLS.
    fn is_tunnelled(&self, ctx: &BuildContext, endpoint: &Endpoint) -> bool {
        let managed = endpoint.origin.labels.get(MANAGED_LABEL);
        let is_waypoint = managed.is_some_and(|controller| controller == MESH_CONTROLLER);
        let prefers_tls = !self.mode.is_vip() && !ctx.mesh.installation.features.pilot_prefer_sending_hbone;
        let has_sidecar = endpoint.origin.accepts_mutual_tls();
        (is_waypoint || endpoint.supports_tunnel()) && !(has_sidecar && prefers_tls)
    }
}

/// Writes `name;namespace;canonical name;canonical revision;cluster`, which telemetry parses. With the feature enabled,
/// endpoints outside the mesh belong to the canonical service that the labels of their service name.
fn write_workload(out: &mut String, features: &Features, service: &Service, endpoint: &Endpoint) {
    let of_service = features.label_canonical_services_for_mesh_external_service_entries && service.mesh_external;
    let namespace = if of_service {
        &service.key.namespace
    } else {
        &endpoint.origin.namespace
    };
    let canonical = service.label(canonical::NAME_LABEL).filter(|_| of_service);
    let (name, mut revision) = match canonical {
        Some(name) => {
            let revision = service.label(canonical::REVISION_LABEL);
            (name.clone(), revision.cloned().unwrap_or_default())
        }
        None => canonical::service(&endpoint.origin.labels, &endpoint.origin.workload_name),
    };
    if revision == "latest" {
        revision = Default::default();
    }
    for part in [&endpoint.origin.workload_name, namespace.as_str(), &name, &revision] {
        out.push_str(part);
        out.push(';');
    }
    out.push_str(&endpoint.origin.cluster);
}
