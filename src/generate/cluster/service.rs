//! Builds one outbound cluster from a service port and its traffic policy.

mod dynamic_cluster;

use std::{cell::OnceCell, collections::BTreeSet};

use super::{
    builder::{ClusterBuilder, EncodedCluster},
    connection_pool,
    discovery::{self, DiscoveryTypes},
    dynamic, load_balancer,
    outbound_key::OutboundClusterKey,
    outlier,
    tls::{self, TlsInputs},
    tunnel,
};
use crate::{
    api::kube::service::TargetPort,
    base::{Shared, cidr::IpMode},
    generate::{
        BuildContext, constant, endpoint,
        name::{self, ClusterMode},
        traffic_policy::{EffectivePolicy, PortPolicies},
    },
    model::{
        EndpointTraits, Service,
        authentication::{self, MtlsMode},
        destination_rule::DestinationRule,
        endpoint::PortTraits,
        gateway_api::inference_pool,
        service::{Protocol, Registry, Resolution, ServicePort},
    },
    proto::{
        Any,
        envoy::{
            config::{
                cluster::v3::cluster::{
                    ClusterDiscoveryType, CommonLbConfig, DiscoveryType, DnsLookupFamily, LbConfig, LbPolicy,
                    OriginalDstLbConfig,
                },
                core::v3::{HealthStatus, HealthStatusSet, TypedExtensionConfig},
                endpoint::v3::ClusterLoadAssignment,
            },
            extensions::network::dns_resolver::cares::v3::CaresDnsResolverConfig,
        },
        istio::networking::v1alpha3::{client_tls_settings::TlSmode, load_balancer_settings::SimpleLb},
    },
};

const CARES_RESOLVER: &str = "envoy.network.dns_resolver.cares";

/// Inputs of one outbound cluster.
pub(super) struct Context<'a> {
    pub(super) key: &'a OutboundClusterKey,
    pub(super) ctx: &'a BuildContext<'a>,
    pub(super) service: &'a Service,
    pub(super) port: &'a ServicePort,
    pub(super) rule: Option<&'a Shared<DestinationRule>>,
    pub(super) policies: PortPolicies<'a>,
    /// Policy of the port or subset.
    pub(super) policy: Option<EffectivePolicy<'a>>,
    /// Traits of the service's endpoints, read on first use.
    pub(super) known: OnceCell<Option<&'a EndpointTraits>>,
}

impl Context<'_> {
    pub(super) fn cluster(&self) -> Option<EncodedCluster> {
        if dynamic::is_dynamic(self.service, self.key.mode) {
            return Some(dynamic_cluster::cluster(self).finish());
        }
        let mut builder = self.discovery()?;
        self.set_statistics(&mut builder);
        self.set_protocol(&mut builder);
        self.apply_policy(&mut builder);
        if self.has_picker() {
            load_balancer::follow_picker(&mut builder);
        }
        if self.key.client.metadata_exchange && !self.key.mode.is_vip() {
            builder.exchange_metadata(&self.ctx.mesh.installation.features.pilot_mx_additional_labels);
        }
        // Parity (pilot/pkg/networking/core/cluster_waypoint.go): a gateway between networks passes the baggage of the
        // tunnels that it forwards.
        let client = &self.key.client;
        let is_forwarded = client.is_east_west && self.key.mode.is_vip();
        if client.baggage.is_exchanged() && client.sends_tunnels && builder.is_eds() && !is_forwarded {
            builder.read_baggage();
        }
        self.set_service(&mut builder);
        self.set_metadata(&mut builder);
        Some(builder.finish())
    }

    /// Returns true if an endpoint picker selects the endpoint of each request.
    ///
    /// Parity (pilot/pkg/networking/core/cluster.go): that is not so in clusters of subsets, nor for sidecars.
    fn has_picker(&self) -> bool {
        let is_default = self.key.subset.is_empty() && self.key.mode == ClusterMode::Default;
        is_default && self.key.client.is_router && inference_pool::is_shadow(&self.service.labels)
    }

    /// Returns the cluster with its discovery type.
    fn discovery(&self) -> Option<ClusterBuilder> {
        let name = self.key.name();
        let (mode, client) = (self.key.mode, &self.key.client);
        let types = DiscoveryTypes::new(self.ctx, self.service, self.port, mode, client, &self.policies);
        let initial = types.of(self.rule, &self.key.subset, self.policy).initial;
        if types.is_inline() && initial == DiscoveryType::OriginalDst {
            self.inline_assignment(&name, "")?;
        }
        let mut builder = ClusterBuilder::new(name, initial);
        builder.cluster.common_lb_config = Some(CommonLbConfig::default());
        match initial {
            DiscoveryType::StrictDns | DiscoveryType::LogicalDns => self.set_dns(&mut builder)?,
            // Parity (pilot/pkg/networking/core/cluster.go): a port that another service adds keeps its number.
            DiscoveryType::OriginalDst => {
                if let Some(own) = self.service.port(self.port.number) {
                    set_port_override(&mut builder, Some(self.service), own);
                }
            }
            DiscoveryType::Eds | DiscoveryType::Static => {}
        }
        if self.key.subset.is_empty()
            && self.key.mode == ClusterMode::Default
            && has_persistent_sessions(self.ctx, self.service)
        {
            let common = builder.cluster.common_lb_config.get_or_insert_default();
            common.override_host_status = Some(statuses_of_sessions());
        }
        Some(builder)
    }

    fn set_dns(&self, builder: &mut ClusterBuilder) -> Option<()> {
        let inline = self.key.inline.as_ref()?;
        let features = &self.ctx.mesh.installation.features;
        let cluster = &mut builder.cluster;
        let family = match inline.ip_mode {
            _ if self.service.race_first_tcp_connect => DnsLookupFamily::All,
            IpMode::V4 => DnsLookupFamily::V4Only,
            IpMode::V6 if features.istio_enable_ipv4_outbound_listener_for_ipv6_clusters => DnsLookupFamily::All,
            IpMode::V6 => DnsLookupFamily::V6Only,
            IpMode::Dual if features.istio_dual_stack => DnsLookupFamily::All,
            IpMode::Dual => DnsLookupFamily::V4Only,
        };
        cluster.set_dns_lookup_family(family);
        cluster.dns_refresh_rate = self.ctx.mesh_config().dns_refresh_rate;
        cluster.respect_dns_ttl = true;
        cluster.dns_jitter = Some(constant::duration(features.pilot_dns_jitter_duration));
        cluster.typed_dns_resolver_config = Some(TypedExtensionConfig {
            name: CARES_RESOLVER.to_owned(),
            typed_config: Some(Any::pack(&CaresDnsResolverConfig {
                udp_max_queries: Some(features.pilot_dns_cares_udp_max_queries),
                ..Default::default()
            })),
        });
        let assignment = self.inline_assignment(&cluster.name, &self.key.subset)?;
        // Envoy refuses a cluster of type LOGICAL_DNS with several endpoints, or with several localities, even if all
        // but one of them are empty.
        let is_single = matches!(&assignment.endpoints[..], [locality] if locality.lb_endpoints.len() < 2);
        if !is_single {
            cluster.cluster_discovery_type = Some(ClusterDiscoveryType::Type(DiscoveryType::StrictDns as i32));
        }
        cluster.load_assignment = Some(assignment);
        Some(())
    }

    /// Returns the inline endpoints; `None` without endpoints.
    fn inline_assignment(&self, name: &str, subset: &str) -> Option<ClusterLoadAssignment> {
        let inline = self.key.inline.as_ref()?;
        let target = endpoint::Target {
            service: self.service,
            port: self.port,
            subset,
            mode: self.key.mode,
            rule: self.rule,
            through_waypoint: None,
        };
        endpoint::inline_assignment(self.ctx, name, &target, &inline.endpoints)
    }

    fn set_statistics(&self, builder: &mut ClusterBuilder) {
        let pattern = &self.ctx.mesh_config().outbound_cluster_stat_name;
        if !pattern.is_empty() && !self.key.mode.is_vip() {
            let host = &self.service.key.hostname;
            let filled = name::stat_prefix(pattern, host, &self.key.subset, self.port, 0, Some(self.service));
            builder.cluster.alt_stat_name = name::delimited_stat(&filled);
        }
    }

    pub(super) fn set_protocol(&self, builder: &mut ClusterBuilder) {
        let client = &self.key.client;
        let protocol = UpstreamProtocol {
            declared: self.port.protocol,
            sniffs: !client.is_router,
            keeps_header_case: client.keeps_header_case,
        };
        protocol.apply(builder);
    }

    fn apply_policy(&self, builder: &mut ClusterBuilder) {
        let features = &self.ctx.mesh.installation.features;
        let policy = self.policy;
        self.apply_pool(builder);
        self.apply_outlier(builder);
        if outlier::sends_unhealthy(self.service, features) {
            outlier::set_panic_threshold(builder, 0.0);
        }
        let locality = endpoint::locality_setting(self.ctx, self.service, policy);
        if features.enable_locality_weighted_lb_config || locality.is_some_and(|locality| locality.weighs()) {
            load_balancer::weigh_localities(builder);
        }
        let settings = policy.and_then(|policy| policy.load_balancer);
        load_balancer::apply(builder, settings, discovery::is_redis(self.ctx, self.port));
        match self.key.mode {
            ClusterMode::Default => self.apply_tls(builder),
            ClusterMode::SniDnat => {}
            ClusterMode::Vip(_) if self.key.client.is_east_west => {
                tunnel::forward(builder, self.key.client.baggage);
            }
            ClusterMode::Vip(_) => self.apply_tunnel(builder),
        }
        if builder.is_original_dst() {
            builder.cluster.set_lb_policy(LbPolicy::ClusterProvided);
        }
    }

    /// Applies the transport sockets behind a waypoint: connections use the listener that originates tunnels. Inside
    /// the tunnel, TLS is used if a rule says so, but not for identities of the mesh.
    ///
    /// Parity (pilot/pkg/networking/core/cluster_waypoint.go): certificates in files that the node names do not count,
    /// and the PROXY protocol is inside the tunnel too.
    pub(super) fn apply_tunnel(&self, builder: &mut ClusterBuilder) {
        let policy = self.policy;
        let settings = policy.and_then(|policy| policy.tls);
        if let Some(settings) = settings.filter(|tls| matches!(tls.mode(), TlSmode::Simple | TlSmode::Mutual)) {
            tls::apply_rule(builder, &self.tls_inputs(), settings);
        }
        if let Some(settings) = policy.and_then(|policy| policy.proxy_protocol) {
            tls::apply_proxy_protocol(builder, settings);
        }
        if builder.cluster.transport_socket.is_some() && self.key.client.baggage.is_exchanged() {
            builder.disable_baggage();
        }
        tunnel::originate(builder, self.key.client.baggage);
    }

    pub(super) fn apply_outlier(&self, builder: &mut ClusterBuilder) {
        if let Some(settings) = self.policy.and_then(|policy| policy.outlier_detection) {
            let sends_unhealthy = outlier::sends_unhealthy(self.service, &self.ctx.mesh.installation.features);
            outlier::apply(builder, settings, sends_unhealthy);
        }
    }

    pub(super) fn apply_pool(&self, builder: &mut ClusterBuilder) {
        let policy = self.policy;
        let pool = policy.and_then(|policy| policy.connection_pool);
        let pool = pool.copied().unwrap_or_default();
        // A gateway between networks passes bytes.
        if !self.key.client.is_east_west {
            connection_pool::upgrade(builder, self.ctx.mesh_config(), &pool, self.port.protocol);
        }
        let budget = policy.and_then(|policy| policy.retry_budget);
        connection_pool::apply(builder, self.ctx, &pool, budget);
    }

    /// Applies the transport sockets of a cluster whose traffic does not come from a waypoint.
    pub(super) fn apply_tls(&self, builder: &mut ClusterBuilder) {
        let policy = self.policy;
        let settings = policy.and_then(|policy| policy.tls);
        let origin = tls::apply(builder, &self.tls_inputs(), settings);
        if self.key.client.sends_tunnels {
            tunnel::prefer(builder, origin, self.key.client.baggage);
        }
        if let Some(settings) = policy.and_then(|policy| policy.proxy_protocol) {
            if self.key.client.sends_tunnels && self.key.client.baggage.is_exchanged() {
                builder.disable_baggage();
            }
            tls::apply_proxy_protocol(builder, settings);
        }
    }

    fn tls_inputs(&self) -> TlsInputs<'_> {
        let features = &self.ctx.mesh.installation.features;
        let mesh = self.ctx.mesh_config();
        // With dynamic DNS, neither the SNI nor the server is known in advance.
        let dynamic = dynamic::is_dynamic(self.service, self.key.mode);
        let is_vip = self.key.mode.is_vip();
        TlsInputs {
            client: &self.key.client,
            registry: self.service.registry,
            mesh_external: self.service.mesh_external,
            prefer_rule: features.prefer_destinationrule_tls_for_external_services,
            auto_mtls: !is_vip && mesh.enable_auto_mtls.unwrap_or(false) && self.peers_accept_mtls(),
            identities: if dynamic || is_vip {
                Vec::new()
            } else {
                identities_of(self.ctx, self.service, self.traits())
            },
            default_sni: if dynamic {
                String::new()
            } else {
                name::sni_cluster(self.key.port, &self.key.subset, &self.service.key.hostname)
            },
            rule_selects: self.rule.is_some_and(|rule| rule.spec.workload_selector.is_some()),
            exchange_alpn: self.key.client.metadata_exchange && !features.pilot_disable_mx_alpn,
            is_http: self.port.protocol.is_http(),
            defaults: mesh.tls_defaults.as_ref(),
            features,
        }
    }

    /// Returns true if the service's peers accept mutual TLS. If the proxy selects the address itself, it cannot tell
    /// endpoints apart, so all of them must accept it.
    fn peers_accept_mtls(&self) -> bool {
        let own_policy = self.rule.and_then(|rule| rule.own_policy(&self.key.subset));
        let simple = load_balancer::simple(own_policy.and_then(|policy| policy.load_balancer.as_deref()));
        let by_address = self.service.resolution == Resolution::Passthrough || simple == SimpleLb::Passthrough;
        if by_address && self.port_traits().is_none_or(|traits| traits.plaintext) {
            return false;
        }
        let namespace = &self.service.key.namespace;
        authentication::namespace_mode(self.ctx.cx, self.ctx.mesh, namespace) != MtlsMode::Disable
    }

    fn port_traits(&self) -> Option<&PortTraits> {
        self.traits()?.ports.get(&self.port.number)
    }

    fn traits(&self) -> Option<&EndpointTraits> {
        let read = || self.ctx.mesh.endpoint_traits.get(self.ctx.cx, &self.service.key);
        *self.known.get_or_init(|| read().map(|traits| &**traits))
    }

    /// Sets metadata of the service, if telemetry uses it.
    pub(super) fn set_service(&self, builder: &mut ClusterBuilder) {
        if self.ctx.mesh.installation.features.pilot_enable_telemetry_label || self.key.mode.is_vip() {
            builder.set_services([self.service]);
        }
    }

    /// Sets other metadata: whether the service is external or behind tunnels, the rule and the subset.
    pub(super) fn set_metadata(&self, builder: &mut ClusterBuilder) {
        let (is_default, is_vip) = (self.key.subset.is_empty(), self.key.mode.is_vip());
        let tunnelled =
            self.key.mode == ClusterMode::Default && self.port_traits().is_some_and(|traits| traits.all_tunnel);
        if is_default && !is_vip && (tunnelled || self.service.mesh_external) {
            let key = if tunnelled { "disable_mx" } else { "external" };
            builder.set_true(key);
        }
        if let ClusterMode::Vip(traffic) = self.key.mode {
            builder.set_text("subset", &traffic.label(&self.key.subset));
        }
        let Some(rule) = self.rule.filter(|_| !is_vip || self.policy.is_some()) else {
            return;
        };
        builder.set_text("config", &rule.meta.config_path());
        if is_vip {
            return;
        }
        if !is_default {
            builder.set_text("subset", &self.key.subset);
        }
        let tls = self.policy.and_then(|policy| policy.tls);
        if tls.is_some_and(|tls| matches!(tls.mode(), TlSmode::Simple | TlSmode::Mutual)) {
            builder.set_text("alpn_override", "false");
        }
    }
}

/// Returns the identities of the service's endpoints, each in every trust domain of the mesh.
pub(in super::super) fn identities(ctx: &BuildContext, service: &Service) -> Vec<String> {
    let traits = ctx.mesh.endpoint_traits.get(ctx.cx, &service.key);
    identities_of(ctx, service, traits.map(|traits| &**traits))
}

fn identities_of(ctx: &BuildContext, service: &Service, traits: Option<&EndpointTraits>) -> Vec<String> {
    let known = traits.map_or(&[][..], |traits| &traits.identities);
    let aliases = &ctx.mesh_config().trust_domain_aliases;
    let mut identities: BTreeSet<String> = BTreeSet::new();
    for identity in known.iter().chain(service.service_accounts.iter()) {
        identities.insert(identity.to_string());
        let workload = identity.strip_prefix("spiffe://").and_then(|rest| rest.split_once('/'));
        if let Some((_, workload)) = workload.filter(|(_, workload)| is_service_account(workload)) {
            identities.extend(aliases.iter().map(|domain| format!("spiffe://{domain}/{workload}")));
        }
    }
    identities.into_iter().collect()
}

/// Returns true for `ns/NAMESPACE/sa/ACCOUNT`. Other identities have no equivalents in other trust domains.
fn is_service_account(workload: &str) -> bool {
    let mut parts = workload.split('/');
    let names = [parts.next(), parts.nth(1)];
    names == [Some("ns"), Some("sa")] && parts.count() == 1
}

/// Returns true if the labels of a service request persistent sessions.
pub(in super::super) fn has_persistent_sessions(ctx: &BuildContext, service: &Service) -> bool {
    let features = &ctx.mesh.installation.features;
    let labels = [
        &features.pilot_persistent_session_label,
        &features.pilot_persistent_session_header_label,
    ];
    let mut values = labels.into_iter().filter(|label| !label.is_empty());
    values.any(|label| service.label(label).is_some_and(|value| !value.is_empty()))
}

/// Returns the health statuses that persistent sessions keep using.
pub(in super::super) fn statuses_of_sessions() -> HealthStatusSet {
    let statuses = [
        HealthStatus::Healthy,
        HealthStatus::Draining,
        HealthStatus::Unknown,
        HealthStatus::Degraded,
    ];
    HealthStatusSet {
        statuses: statuses.into_iter().map(|status| status as i32).collect(),
    }
}

/// The protocol of connections to endpoints.
pub(super) struct UpstreamProtocol {
    /// The declared protocol of the port.
    pub(super) declared: Protocol,
    /// True if the proxy follows the client's protocol where none is declared.
    pub(super) sniffs: bool,
    /// True if HTTP/1.1 keeps the case of headers.
    pub(super) keeps_header_case: bool,
}

impl UpstreamProtocol {
    pub(super) fn apply(&self, builder: &mut ClusterBuilder) {
        let protocol = self.declared;
        if protocol.is_http2() {
            builder.use_http2();
            return;
        }
        if self.keeps_header_case && (protocol.is_http() || protocol.is_unsupported()) {
            builder.keep_header_case();
        }
        if protocol.is_unsupported() && self.sniffs {
            builder.use_client_protocol();
        }
    }
}

/// Sets the port of ServiceEntries that leave the address to the client but declare a target port.
pub(super) fn set_port_override(builder: &mut ClusterBuilder, service: Option<&Service>, port: &ServicePort) {
    let passes = service
        .is_some_and(|service| service.registry == Registry::External && service.resolution == Resolution::Passthrough);
    if let TargetPort::Number(target) = port.target
        && target != 0
        && passes
        && builder.is_original_dst()
    {
        builder.cluster.lb_config = Some(LbConfig::OriginalDstLbConfig(OriginalDstLbConfig {
            upstream_port_override: Some(target),
            ..Default::default()
        }));
    }
}
