//! Outbound clusters: one for each service port in a scope and for each subset of its DestinationRule. Gateways that
//! pass mutual TLS through have the same clusters once more without TLS.

use std::{cell::OnceCell, collections::BTreeSet};

use super::{
    ClusterKey, ClusterList, ClusterResource,
    discovery::DiscoveryTypes,
    dynamic, finished,
    outbound_key::{InlineProxyView, OutboundClusterKey},
    referenced_services::{ServiceRestriction, ServiceSet},
    service::Context,
};
use crate::{
    base::{Hashed, Shared},
    generate::{
        BuildContext,
        endpoint::{self, EndpointKey, EndpointProxyView},
        gateway::GatewayView,
        name::{ClusterMode, ClusterName},
        patch::{self, PatchContext, cluster::ClusterPatches},
        proxy::ProxyType,
        proxy_view::{ProxyLocation, UpstreamProxyView},
        resource::{Built, Note},
        selected::Selected,
        traffic_policy::{self, EffectivePolicy, PortPolicies},
    },
    model::{
        ScopeKey, Service, ServiceKey, SidecarScope,
        destination_rule::{self, DestinationRule, OwnRules, RuleRef},
        gateway_api::inference_pool,
        service::{MergedPort, Protocol, Resolution, ServicePort},
    },
    proto::{envoy::config::cluster::v3::cluster::DiscoveryType, istio::networking::v1alpha3::server_tls_settings},
};

/// Outbound clusters of a scope with their endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundClusterPart {
    /// Scope.
    pub scope: ScopeKey,
    /// Attributes of the proxy.
    pub client: Hashed<UpstreamProxyView>,
    /// Mode of the clusters.
    pub mode: ClusterMode,
    /// `None` for the resources that do not depend on the proxy's location; otherwise only those that do.
    pub location: Option<ProxyLocation>,
    /// Restriction of the services, if only referenced ones count.
    pub restriction: Option<ServiceRestriction>,
}

impl OutboundClusterPart {
    /// Selects the parts of a proxy.
    pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<Self> {
        let client = UpstreamProxyView::of(ctx, selected);
        let is_router = selected.proxy.proxy_type == ProxyType::Router;
        let general = Self {
            scope: selected.scope.clone(),
            client,
            mode: ClusterMode::Default,
            location: None,
            restriction: ServiceRestriction::select(ctx, selected),
        };
        let mut parts = vec![general];
        if is_router && passes_mtls_through(ctx, selected) {
            parts.push(Self {
                mode: ClusterMode::SniDnat,
                restriction: None,
                ..parts[0].clone()
            });
        }
        if let Some(location) = ProxyLocation::of(ctx, selected) {
            let located = parts.clone().into_iter().map(|part| Self {
                location: Some(location.clone()),
                ..part
            });
            parts.extend(located);
        }
        parts
    }

    /// Returns the part of a namespace without objects; `None` for that part, and if labels of the proxy count, which
    /// few share.
    pub(super) fn common(&self) -> Option<Self> {
        let is_general = self.restriction.is_none() && self.client.rule_labels.is_empty();
        (is_general && !self.scope.namespace().is_empty()).then_some(Self {
            scope: self.scope.common()?,
            ..self.clone()
        })
    }

    /// Lists clusters, and endpoints of EDS clusters.
    pub fn list(&self, ctx: &BuildContext, list: &mut impl ClusterList) {
        let restriction = self.restriction.as_ref();
        let allowed = restriction.map(|restriction| restriction.services(ctx, self.scope.namespace()));
        if allowed.as_ref().is_some_and(ServiceSet::is_empty) && self.client.patches.is_empty() {
            return;
        }
        let mut listing = Listing::of(self, ctx);
        if allowed.is_none() && listing.requests_no_endpoints() {
            let scope = list.begin_services(ctx, &self.scope);
            let own = OwnRules::of(ctx.cx, ctx.mesh, self.scope.namespace());
            for (position, key) in scope.services.iter().enumerate() {
                let is_common = !own.concern(key);
                list.add_service(ctx, position, is_common, |ctx, listed| {
                    listing.list_service(ctx, &scope, key, listed);
                });
            }
            return;
        }
        let scope = ctx.tcp_scope(&self.scope);
        let mut listed = Vec::new();
        let is_allowed = |key: &&ServiceKey| allowed.as_ref().is_none_or(|allowed| allowed.contains(key));
        for key in scope.services.iter().filter(is_allowed) {
            listing.list_service(ctx, &scope, key, &mut listed);
        }
        listing.list_requested(ctx, &scope, &mut listed);
        for resource in listed {
            list.add(resource);
        }
    }

    /// Returns the view that a service's endpoints depend on, or `None` if they belong to the other part: endpoints
    /// that do not depend on the proxy's location belong to the general part.
    fn endpoint_client(
        &self,
        ctx: &BuildContext,
        service: &Service,
        policy: Option<EffectivePolicy>,
    ) -> Option<EndpointProxyView> {
        self.client.endpoints(ctx, self.location.as_ref(), service, policy)
    }
}

impl UpstreamProxyView {
    /// Returns the view that a cluster's endpoints depend on, for a part with a location or the general one; `None` if
    /// they belong to the other part. The policy is that of the port or subset.
    pub(super) fn endpoints(
        &self,
        ctx: &BuildContext,
        location: Option<&ProxyLocation>,
        service: &Service,
        policy: Option<EffectivePolicy>,
    ) -> Option<EndpointProxyView> {
        let needs = endpoint::needs(ctx, service, policy);
        match (location, needs.any()) {
            (None, false) => Some(EndpointProxyView::of(ctx, service, self, None)),
            (Some(location), true) => Some(EndpointProxyView::of(ctx, service, self, Some((location, &needs)))),
            _ => None,
        }
    }
}

/// Resources of a part while they are listed.
struct Listing<'a> {
    part: &'a OutboundClusterPart,
    patches: ClusterPatches<'a>,
    /// EDS names requested because of patches and not listed yet.
    requested: BTreeSet<String>,
}

impl<'a> Listing<'a> {
    fn of(part: &'a OutboundClusterPart, ctx: &BuildContext<'a>) -> Self {
        let patches = &part.client.patches;
        let context = if part.client.socket.is_router {
            PatchContext::Gateway
        } else {
            PatchContext::SidecarOutbound
        };
        Self {
            part,
            patches: ClusterPatches::of(ctx, patches, context),
            requested: patch::cluster::requested_endpoints(ctx, patches),
        }
    }

    /// Returns true if patches request no endpoints, whatever is listed. Then the resources of a service do not depend
    /// on other services.
    fn requests_no_endpoints(&self) -> bool {
        self.requested.is_empty() && !self.patches.makes_eds()
    }

    fn rule(&self, ctx: &BuildContext, service: &Service) -> Option<(RuleRef, Shared<DestinationRule>)> {
        let labels = Some(&self.part.client.rule_labels);
        let namespace = self.part.scope.namespace();
        destination_rule::find(ctx.cx, ctx.mesh, namespace, labels, &service.key)
    }

    fn list_service(
        &mut self,
        ctx: &BuildContext,
        scope: &SidecarScope,
        key: &ServiceKey,
        listed: &mut Vec<ClusterResource>,
    ) {
        let Some(row) = ctx.service(key) else { return };
        let merged = if row.members.is_empty() {
            None
        } else {
            scope.merged.get(&row.key)
        };
        let service = merged.map_or(Some(row), |merged| Service::member(row, merged.member));
        let Some(service) = service else { return };
        let unsuited = self.part.mode == ClusterMode::SniDnat && service.mesh_external;
        if service.resolution == Resolution::Alias || unsuited {
            return;
        }
        let found = self.rule(ctx, service);
        if let Some(merged) = merged {
            for number in merged.ports.keys().copied() {
                let origin = merged.port(number);
                if let Some((service, port)) = Service::merged_port(row, origin, number) {
                    self.list_port(ctx, service, port, origin, found.as_ref(), listed);
                }
            }
            return;
        }
        for port in self.clustered_ports(service) {
            if port.protocol != Protocol::Udp && scope.shows_port(&service.key, port.number) {
                self.list_port(ctx, service, port, None, found.as_ref(), listed);
            }
        }
    }

    /// Returns the ports of a service that have clusters. For gateways, an InferencePool has one cluster for all its
    /// ports. Sidecars, which have routes for each port, keep a cluster for each, unlike in Istio.
    fn clustered_ports<'s>(&self, service: &'s Service) -> &'s [ServicePort] {
        let is_pool = service.ports.len() > 1
            && self.part.mode == ClusterMode::Default
            && self.part.client.socket.is_router
            && inference_pool::is_shadow(&service.labels);
        if is_pool { &service.ports[..1] } else { &service.ports }
    }

    fn list_port(
        &mut self,
        ctx: &BuildContext,
        service: &Shared<Service>,
        port: &ServicePort,
        merged: Option<MergedPort>,
        found: Option<&(RuleRef, Shared<DestinationRule>)>,
        listed: &mut Vec<ClusterResource>,
    ) {
        let part = self.part;
        let rule = found.map(|(_, rule)| rule);
        let dynamic = dynamic::is_dynamic(service, part.mode);
        if dynamic && !dynamic::serves(port.protocol) {
            return;
        }
        let subsets = rule
            .filter(|_| !dynamic)
            .into_iter()
            .flat_map(|rule| traffic_policy::subset_names(rule));
        let policies = PortPolicies::of(rule.map(|rule| &**rule), port.number);
        let types = DiscoveryTypes::new(ctx, service, port, part.mode, &part.client.socket, &policies);
        for subset in std::iter::once("").chain(subsets) {
            let policy = policies.of_subset(subset);
            let discovery = types.of(rule, subset, policy);
            let key = self.patched(OutboundClusterKey {
                service: service.key.clone(),
                port: port.number,
                merged,
                subset: subset.into(),
                mode: part.mode,
                rule: found.map(|(found, _)| found.clone()),
                client: part.client.socket.clone(),
                inline: None,
                patches: self.patches.none(),
            });
            let endpoints = || part.endpoint_client(ctx, service, policy);
            if types.is_inline() {
                if let Some(endpoints) = endpoints() {
                    let ip_mode = part.client.ip_mode;
                    let inline = Some(InlineProxyView { ip_mode, endpoints });
                    listed.push(OutboundClusterKey { inline, ..key }.listed());
                }
                continue;
            }
            if discovery.resolved == DiscoveryType::Eds {
                if !self.requested.is_empty() {
                    self.requested.remove(&key.name());
                }
                listed.extend(endpoints().map(|client| key.endpoints(key.rule.clone(), client)));
            }
            if part.location.is_none() {
                listed.push(key.listed());
            }
        }
    }

    /// Adds the patches that apply to the cluster. If they may turn it into an EDS cluster, its endpoints are
    /// requested.
    fn patched(&mut self, key: OutboundClusterKey) -> OutboundClusterKey {
        if self.patches.is_empty() {
            return key;
        }
        let patches = self.patches.concerning(&key.name(), &[]);
        if !patches.is_empty() && self.patches.makes_eds() {
            self.requested.insert(key.name());
        }
        OutboundClusterKey { patches, ..key }
    }

    /// Lists requested endpoints whose clusters do not use EDS by themselves, or belong to another part.
    fn list_requested(&mut self, ctx: &BuildContext, scope: &SidecarScope, listed: &mut Vec<ClusterResource>) {
        for name in std::mem::take(&mut self.requested) {
            let parsed = ClusterName::parse(&name);
            let service = scope.by_host.get(parsed.host);
            let Some(service) = service.and_then(|key| ctx.service(key)) else {
                continue;
            };
            let found = self.rule(ctx, service);
            let key = OutboundClusterKey {
                service: service.key.clone(),
                port: parsed.port,
                merged: scope.merged_port(&service.key, parsed.port),
                subset: parsed.subset.into(),
                mode: self.part.mode,
                rule: found.as_ref().map(|(found, _)| found.clone()),
                client: self.part.client.socket.clone(),
                inline: None,
                patches: self.patches.none(),
            };
            if key.name() != name {
                continue;
            }
            let policy = found
                .as_ref()
                .and_then(|(_, rule)| traffic_policy::policy_of(rule, key.port, &key.subset));
            let client = self.part.endpoint_client(ctx, service, policy);
            listed.extend(client.map(|client| key.endpoints(key.rule.clone(), client)));
        }
    }
}

/// Returns true if a server of the gateways passes mutual TLS through to the service in the SNI. Gateways are merged
/// only if one of them may.
fn passes_mtls_through(ctx: &BuildContext, selected: &Selected) -> bool {
    let rows = selected.gateways.iter();
    let rows = rows.filter_map(|key| ctx.mesh.gateways.get(ctx.cx, key));
    let mut modes = rows
        .flat_map(|row| &row.spec.servers)
        .filter_map(|server| server.tls.as_ref());
    modes.any(|tls| tls.mode() == server_tls_settings::TlSmode::AutoPassthrough)
        && GatewayView::of(ctx, selected).merged(ctx).auto_passthrough
}

impl OutboundClusterKey {
    pub(super) fn listed(self) -> ClusterResource {
        ClusterResource::Cluster(ClusterKey::Outbound(self))
    }

    /// Returns the load assignment of an EDS cluster, with the rule that applies to it.
    pub(super) fn endpoints(&self, rule: Option<RuleRef>, client: EndpointProxyView) -> ClusterResource {
        let key = EndpointKey {
            service: self.service.clone(),
            port: self.port,
            merged: self.merged,
            subset: self.subset.clone(),
            mode: self.mode,
            rule,
            client,
        };
        ClusterResource::Endpoint(key)
    }

    /// Builds the cluster; none if the service or port is gone, or if a DNS cluster has no endpoints.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let Some((service, port)) = ctx.service_port(&self.service, self.merged, self.port) else {
            return Built::none();
        };
        let rule = self.rule.as_ref();
        let rule = rule.and_then(|found| destination_rule::rule(ctx.cx, ctx.mesh, found));
        let policies = PortPolicies::of(rule.as_deref(), self.port);
        let context = Context {
            key: self,
            ctx,
            service,
            port,
            rule: rule.as_ref(),
            policies,
            policy: policies.of_subset(&self.subset),
            known: OnceCell::new(),
        };
        match context.cluster() {
            Some(cluster) => finished(ctx, &self.patches, &[], cluster, Vec::new()),
            None => Built::none().with_notes(vec![Note {
                code: "pilot_dns_cluster_without_endpoints",
                detail: self.name().into(),
            }]),
        }
    }
}
