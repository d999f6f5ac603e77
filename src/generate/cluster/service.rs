//! One outbound cluster, made from a service port and the policy for it.

mod dynamic_cluster;

use std::{cell::OnceCell, collections::BTreeSet};

use super::{
    connection_pool,
    discovery::{self, Kinds},
    draft::{Draft, Finished},
    dynamic, load_balancer,
    outbound_key::OutboundKey,
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
    },
    model::{
        EndpointTraits, Service,
        authentication::{self, MtlsMode},
        destination_rule::DestinationRule,
        endpoint::PortTraits,
        service::{Protocol, Registry, Resolution, ServicePort},
    },
    proto::{
        Any,
        envoy::{
            config::{
                cluster::v3::cluster::{
                    CommonLbConfig, DiscoveryType, DnsLookupFamily, LbConfig, LbPolicy, OriginalDstLbConfig,
                },
                core::v3::{HealthStatus, HealthStatusSet, TypedExtensionConfig},
                endpoint::v3::ClusterLoadAssignment,
            },
            extensions::network::dns_resolver::cares::v3::CaresDnsResolverConfig,
        },
        istio::networking::v1alpha3::{TrafficPolicy, client_tls_settings::TlSmode, load_balancer_settings::SimpleLb},
    },
};

const CARES_RESOLVER: &str = "envoy.network.dns_resolver.cares";

/// Everything that one outbound cluster is made of.
pub(super) struct Context<'a> {
    pub(super) key: &'a OutboundKey,
    pub(super) ctx: &'a BuildContext<'a>,
    pub(super) service: &'a Service,
    pub(super) port: &'a ServicePort,
    pub(super) rule: Option<&'a Shared<DestinationRule>>,
    pub(super) policy: Option<TrafficPolicy>,
    /// What is known of the service's endpoints, once asked for.
    pub(super) known: OnceCell<Option<&'a EndpointTraits>>,
}

impl Context<'_> {
    pub(super) fn cluster(&self) -> Option<Finished> {
        if dynamic::is_dynamic(self.service, self.key.mode) {
            return Some(dynamic_cluster::cluster(self).finish());
        }
        let mut draft = self.discovery()?;
        self.set_statistics(&mut draft);
        self.set_protocol(&mut draft);
        self.apply_policy(&mut draft);
        if self.key.client.metadata_exchange && !self.key.mode.is_vip() {
            draft.exchange_metadata();
        }
        self.set_metadata(&mut draft, true);
        Some(draft.finish())
    }

    /// The cluster with its way of finding endpoints.
    fn discovery(&self) -> Option<Draft> {
        let name = self.key.name();
        let kinds = Kinds::new(self.ctx, self.service, self.port, self.key.mode, &self.key.client);
        let begun = kinds.of(self.rule, &self.key.subset).begun;
        if kinds.inline() && begun == DiscoveryType::OriginalDst {
            self.inline_assignment(&name, "")?;
        }
        let mut draft = Draft::new(name, begun);
        draft.cluster.common_lb_config = Some(CommonLbConfig::default());
        match begun {
            DiscoveryType::StrictDns | DiscoveryType::LogicalDns => self.set_dns(&mut draft)?,
            DiscoveryType::OriginalDst => set_port_override(&mut draft, Some(self.service), self.port),
            DiscoveryType::Eds | DiscoveryType::Static => {}
        }
        if self.key.subset.is_empty()
            && self.key.mode == ClusterMode::Default
            && has_persistent_sessions(self.ctx, self.service)
        {
            let common = draft.cluster.common_lb_config.get_or_insert_default();
            common.override_host_status = Some(statuses_of_sessions());
        }
        Some(draft)
    }

    fn set_dns(&self, draft: &mut Draft) -> Option<()> {
        let inline = self.key.inline.as_ref()?;
        let features = &self.ctx.mesh.installation.features;
        let cluster = &mut draft.cluster;
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
        cluster.load_assignment = Some(self.inline_assignment(&cluster.name, &self.key.subset)?);
        Some(())
    }

    /// The addresses that stand in the cluster; `None` if there are none.
    fn inline_assignment(&self, name: &str, subset: &str) -> Option<ClusterLoadAssignment> {
        let inline = self.key.inline.as_ref()?;
        let target = endpoint::Target {
            service: self.service,
            port: self.port,
            subset,
            mode: self.key.mode,
            rule: self.rule,
            waypoint_target: None,
        };
        endpoint::inline_assignment(self.ctx, name, &target, &inline.endpoints)
    }

    fn set_statistics(&self, draft: &mut Draft) {
        let pattern = &self.ctx.mesh_config().outbound_cluster_stat_name;
        if !pattern.is_empty() && !self.key.mode.is_vip() {
            let host = &self.service.key.hostname;
            let filled = name::stat_prefix(pattern, host, &self.key.subset, self.port, 0, Some(self.service));
            draft.cluster.alt_stat_name = name::delimited_stat(&filled);
        }
    }

    pub(super) fn set_protocol(&self, draft: &mut Draft) {
        let client = &self.key.client;
        set_protocol(draft, self.port.protocol, !client.is_router, client.keeps_header_case);
    }

    fn apply_policy(&self, draft: &mut Draft) {
        let features = &self.ctx.mesh.installation.features;
        let policy = self.policy.as_ref();
        self.apply_pool(draft);
        self.apply_outlier(draft);
        if outlier::sends_unhealthy(self.service, features) {
            outlier::set_panic_threshold(draft, 0.0);
        }
        let locality = endpoint::locality_setting(self.ctx, self.service, policy);
        if features.enable_locality_weighted_lb_config || locality.is_some_and(|locality| locality.weighs()) {
            load_balancer::weigh_localities(draft);
        }
        let settings = policy.and_then(|policy| policy.load_balancer.as_ref());
        load_balancer::apply(draft, settings, discovery::is_redis(self.ctx, self.port));
        match self.key.mode {
            ClusterMode::Default => self.apply_tls(draft),
            ClusterMode::SniDnat => {}
            ClusterMode::Vip(_) => self.apply_tunnel(draft),
        }
        if draft.is_original_dst() {
            draft.cluster.set_lb_policy(LbPolicy::ClusterProvided);
        }
    }

    /// Behind a waypoint all goes through the listener that opens tunnels; inside them TLS is spoken where a rule says so,
    /// not for identities of the mesh.
    fn apply_tunnel(&self, draft: &mut Draft) {
        let settings = self.policy.as_ref().and_then(|policy| policy.tls.as_ref());
        if settings.is_some_and(|tls| matches!(tls.mode(), TlSmode::Simple | TlSmode::Mutual)) {
            self.apply_tls(draft);
        }
        tunnel::lead_through(draft);
    }

    pub(super) fn apply_outlier(&self, draft: &mut Draft) {
        let settings = self
            .policy
            .as_ref()
            .and_then(|policy| policy.outlier_detection.as_ref());
        if let Some(settings) = settings {
            let sends_unhealthy = outlier::sends_unhealthy(self.service, &self.ctx.mesh.installation.features);
            outlier::apply(draft, settings, sends_unhealthy);
        }
    }

    pub(super) fn apply_pool(&self, draft: &mut Draft) {
        let policy = self.policy.as_ref();
        let pool = policy.and_then(|policy| policy.connection_pool.as_ref());
        let pool = pool.copied().unwrap_or_default();
        connection_pool::upgrade(draft, self.ctx.mesh_config(), &pool, self.port.protocol);
        let budget = policy.and_then(|policy| policy.retry_budget.as_ref());
        connection_pool::apply(draft, self.ctx, &pool, budget);
    }

    pub(super) fn apply_tls(&self, draft: &mut Draft) {
        let features = &self.ctx.mesh.installation.features;
        let mesh = self.ctx.mesh_config();
        // What each request asks for is not known beforehand: neither its SNI nor who answers.
        let dynamic = dynamic::is_dynamic(self.service, self.key.mode);
        let is_vip = self.key.mode.is_vip();
        let inputs = TlsInputs {
            client: &self.key.client,
            registry: self.service.registry,
            mesh_external: self.service.mesh_external,
            prefer_rule: features.prefer_destinationrule_tls_for_external_services,
            auto_mtls: !is_vip && mesh.enable_auto_mtls.unwrap_or(false) && self.peers_accept_mtls(),
            identities: if dynamic {
                Vec::new()
            } else {
                identities_of(self.ctx, self.service, self.traits())
            },
            default_sni: if dynamic {
                String::new()
            } else {
                name::sni_cluster(self.key.port, &self.key.subset, &self.service.key.hostname)
            },
            rule_selects: is_vip || self.rule.is_some_and(|rule| rule.spec.workload_selector.is_some()),
            exchange_alpn: self.key.client.metadata_exchange && !features.pilot_disable_mx_alpn,
            is_http: self.port.protocol.is_http(),
            defaults: mesh.tls_defaults.as_ref(),
            features,
        };
        let policy = self.policy.as_ref();
        tls::apply(draft, &inputs, policy.and_then(|policy| policy.tls.as_ref()));
        if self.key.client.sends_tunnels && !is_vip {
            tunnel::prefer(draft);
        }
        if let Some(settings) = policy.and_then(|policy| policy.proxy_protocol.as_ref()) {
            tls::apply_proxy_protocol(draft, settings);
        }
    }

    /// Whether the service's peers may be assumed to accept mutual TLS. Where the client picks the address itself,
    /// nothing tells it apart from plaintext ones; so all must accept it.
    fn peers_accept_mtls(&self) -> bool {
        let own_policy = self.rule.and_then(|rule| match self.key.subset.as_str() {
            "" => rule.spec.traffic_policy.as_ref(),
            name => rule.subset(name)?.traffic_policy.as_ref(),
        });
        let simple = load_balancer::simple(own_policy.and_then(|policy| policy.load_balancer.as_ref()));
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

    /// Metadata: the service, whether it is external or behind tunnels, the rule and the subset.
    pub(super) fn set_metadata(&self, draft: &mut Draft, with_service: bool) {
        if with_service && self.ctx.mesh.installation.features.pilot_enable_telemetry_label {
            draft.set_services([self.service]);
        }
        let (is_default, is_vip) = (self.key.subset.is_empty(), self.key.mode.is_vip());
        let tunnelled =
            self.key.mode == ClusterMode::Default && self.port_traits().is_some_and(|traits| traits.all_tunnel);
        if is_default && !is_vip && (tunnelled || self.service.mesh_external) {
            let key = if tunnelled { "disable_mx" } else { "external" };
            draft.set_true(key);
        }
        if let ClusterMode::Vip(traffic) = self.key.mode {
            draft.set_text("subset", &traffic.label(&self.key.subset));
        }
        let Some(rule) = self.rule.filter(|_| !is_vip || self.policy.is_some()) else {
            return;
        };
        draft.set_text("config", &rule.meta.config_path());
        if is_vip {
            return;
        }
        if !is_default {
            draft.set_text("subset", &self.key.subset);
        }
        let tls = self.policy.as_ref().and_then(|policy| policy.tls.as_ref());
        if tls.is_some_and(|tls| matches!(tls.mode(), TlSmode::Simple | TlSmode::Mutual)) {
            draft.set_text("alpn_override", "false");
        }
    }
}

/// The identities of the service's endpoints, each under every trust domain of the mesh.
pub(in super::super) fn identities(ctx: &BuildContext, service: &Service) -> Vec<String> {
    let traits = ctx.mesh.endpoint_traits.get(ctx.cx, &service.key);
    identities_of(ctx, service, traits.map(|traits| &**traits))
}

fn identities_of(ctx: &BuildContext, service: &Service, traits: Option<&EndpointTraits>) -> Vec<String> {
    let known = traits.map_or(&[][..], |traits| &traits.identities);
    let aliases = &ctx.mesh_config().trust_domain_aliases;
    let mut identities: BTreeSet<String> = BTreeSet::new();
    for identity in known.iter().chain(&service.service_accounts) {
        identities.insert(identity.to_string());
        let workload = identity.strip_prefix("spiffe://").and_then(|rest| rest.split_once('/'));
        if let Some((_, workload)) = workload.filter(|(_, workload)| workload.starts_with("ns/")) {
            identities.extend(aliases.iter().map(|domain| format!("spiffe://{domain}/{workload}")));
        }
    }
    identities.into_iter().collect()
}

/// True if a service's labels ask that clients stay with the endpoint that they were served by.
pub(in super::super) fn has_persistent_sessions(ctx: &BuildContext, service: &Service) -> bool {
    let features = &ctx.mesh.installation.features;
    let labels = [
        &features.pilot_persistent_session_label,
        &features.pilot_persistent_session_header_label,
    ];
    let mut values = labels.into_iter().filter(|label| !label.is_empty());
    values.any(|label| service.label(label).is_some_and(|value| !value.is_empty()))
}

/// The endpoints that such clients stay with.
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

/// The protocol that the port's declaration calls for; `sniffs`: the client follows undeclared ones.
pub(super) fn set_protocol(draft: &mut Draft, protocol: Protocol, sniffs: bool, keeps_header_case: bool) {
    if protocol.is_http2() {
        draft.use_http2();
        return;
    }
    if keeps_header_case && (protocol.is_http() || protocol.is_unsupported()) {
        draft.keep_header_case();
    }
    if protocol.is_unsupported() && sniffs {
        draft.use_client_protocol();
    }
}

/// ServiceEntries that leave the address to the client may still name the port that traffic goes to.
pub(super) fn set_port_override(draft: &mut Draft, service: Option<&Service>, port: &ServicePort) {
    let passes = service
        .is_some_and(|service| service.registry == Registry::External && service.resolution == Resolution::Passthrough);
    if let TargetPort::Number(target) = port.target
        && target != 0
        && passes
        && draft.is_original_dst()
    {
        draft.cluster.lb_config = Some(LbConfig::OriginalDstLbConfig(OriginalDstLbConfig {
            upstream_port_override: Some(target),
            ..Default::default()
        }));
    }
}
