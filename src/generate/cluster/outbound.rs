//! Outbound clusters: one for each service port that a scope sees, and for each subset of its DestinationRule; on
//! gateways that pass mutual TLS through, the same once more without TLS.

use std::{cell::OnceCell, collections::BTreeSet};

use super::{
    ClusterKey, ClusterResource,
    discovery::Kinds,
    dynamic, finished,
    limit::{Limit, Wanted},
    outbound_key::{InlineProxyView, OutboundKey},
    service::Context,
};
use crate::{
    base::{Hashed, ObjectKey, Shared},
    generate::{
        BuildContext,
        endpoint::{self, EndpointKey, EndpointProxyView},
        name::ClusterMode,
        patch::{
            self, PatchContext,
            cluster::{ClusterPatches, ParsedName},
        },
        proxy::ProxyType,
        proxy_view::{OutboundProxyView, Place},
        resource::{Built, Note},
        selected::Selected,
        traffic_policy,
    },
    model::{
        ScopeKey, Service, SidecarScope,
        destination_rule::{self, DestinationRule, RuleRef},
        service::{Protocol, Resolution, ServicePort},
    },
    proto::{envoy::config::cluster::v3::cluster::DiscoveryType, istio::networking::v1alpha3::server_tls_settings},
};

/// The outbound clusters of a scope with their endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutboundPart {
    /// What the client sees.
    pub scope: ScopeKey,
    /// The client.
    pub client: Hashed<OutboundProxyView>,
    /// With TLS, or to pass it through.
    pub mode: ClusterMode,
    /// `None`: everything that is the same wherever the client is. Else only what depends on that.
    pub place: Option<Place>,
    /// What limits the services, where only those are wanted that something leads to.
    pub limit: Option<Limit>,
}

impl OutboundPart {
    /// The parts of a proxy.
    pub fn select(ctx: &BuildContext, selected: &Selected) -> Vec<Self> {
        let client = OutboundProxyView::of(ctx, selected);
        let is_router = selected.proxy.proxy_type == ProxyType::Router;
        let general = Self {
            scope: selected.scope.clone(),
            client,
            mode: ClusterMode::Default,
            place: None,
            limit: Limit::select(ctx, selected),
        };
        let mut parts = vec![general];
        if is_router && passes_mtls_through(ctx, &selected.gateways) {
            parts.push(Self {
                mode: ClusterMode::SniDnat,
                limit: None,
                ..parts[0].clone()
            });
        }
        if let Some(place) = Place::of(ctx, selected) {
            let placed = parts.clone().into_iter().map(|part| Self {
                place: Some(place.clone()),
                ..part
            });
            parts.extend(placed);
        }
        parts
    }

    /// Clusters, and for those that use EDS the endpoints.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ClusterResource> {
        let limit = self.limit.as_ref();
        let wanted = limit.map(|limit| limit.wanted(ctx, self.scope.namespace()));
        if wanted.as_ref().is_some_and(Wanted::is_empty) && self.client.patches.is_empty() {
            return Vec::new();
        }
        let scope = ctx.scope(&self.scope);
        let mut listing = Listing::of(self, ctx, &scope);
        for key in scope.services.iter() {
            if wanted.as_ref().is_some_and(|wanted| !wanted.contains(key)) {
                continue;
            }
            if let Some(service) = ctx.service(key) {
                listing.list_service(service);
            }
        }
        listing.list_asked();
        listing.listed
    }

    /// What endpoints depend on of the client; `None` if they are another part's: the general one has those that do not
    /// depend on the client's place.
    fn endpoint_client(
        &self,
        ctx: &BuildContext,
        service: &Service,
        rule: Option<&Shared<DestinationRule>>,
        key: &OutboundKey,
    ) -> Option<EndpointProxyView> {
        self.client.endpoints(ctx, self.place.as_ref(), service, rule, key)
    }
}

impl OutboundProxyView {
    /// What the endpoints of a cluster depend on of the client, for a part that is of its place or general; `None` if they
    /// are the other part's.
    pub(super) fn endpoints(
        &self,
        ctx: &BuildContext,
        place: Option<&Place>,
        service: &Service,
        rule: Option<&Shared<DestinationRule>>,
        key: &OutboundKey,
    ) -> Option<EndpointProxyView> {
        let policy = rule.and_then(|rule| traffic_policy::policy_of(rule, key.port, &key.subset));
        let needs = endpoint::needs(ctx, service, policy.as_ref());
        match (place, needs.any()) {
            (None, false) => Some(EndpointProxyView::of(ctx, service, self, None)),
            (Some(place), true) => Some(EndpointProxyView::of(ctx, service, self, Some((place, &needs)))),
            _ => None,
        }
    }
}

/// The resources of a part as they are found.
struct Listing<'a> {
    part: &'a OutboundPart,
    ctx: &'a BuildContext<'a>,
    scope: &'a SidecarScope,
    patches: ClusterPatches<'a>,
    /// Names that endpoints are asked for because of patches, and that are not listed yet.
    asked: BTreeSet<String>,
    listed: Vec<ClusterResource>,
}

impl<'a> Listing<'a> {
    fn of(part: &'a OutboundPart, ctx: &'a BuildContext<'a>, scope: &'a SidecarScope) -> Self {
        let patches = &part.client.patches;
        let context = if part.client.socket.is_router {
            PatchContext::Gateway
        } else {
            PatchContext::SidecarOutbound
        };
        Self {
            part,
            ctx,
            scope,
            patches: ClusterPatches::of(ctx, patches, context),
            asked: patch::cluster::asked_endpoints(ctx, patches),
            listed: Vec::new(),
        }
    }

    fn rule(&self, service: &Service) -> Option<(RuleRef, Shared<DestinationRule>)> {
        let labels = Some(&self.part.client.rule_labels);
        let namespace = self.scope.key.namespace();
        destination_rule::find(self.ctx.cx, self.ctx.mesh, namespace, labels, &service.key)
    }

    fn list_service(&mut self, service: &Shared<Service>) {
        let unsuited = self.part.mode == ClusterMode::SniDnat && service.mesh_external;
        if service.resolution == Resolution::Alias || unsuited {
            return;
        }
        let found = self.rule(service);
        for port in &service.ports {
            if port.protocol != Protocol::Udp && self.scope.shows_port(&service.key, port.number) {
                self.list_port(service, port, found.as_ref());
            }
        }
    }

    fn list_port(
        &mut self,
        service: &Shared<Service>,
        port: &ServicePort,
        found: Option<&(RuleRef, Shared<DestinationRule>)>,
    ) {
        let (part, ctx) = (self.part, self.ctx);
        let rule = found.map(|(_, rule)| rule);
        let dynamic = dynamic::is_dynamic(service, part.mode);
        if dynamic && !dynamic::serves(port.protocol) {
            return;
        }
        let subsets = rule
            .filter(|_| !dynamic)
            .into_iter()
            .flat_map(|rule| traffic_policy::subset_names(rule));
        let kinds = Kinds::new(ctx, service, port, part.mode, &part.client.socket);
        for subset in std::iter::once("").chain(subsets) {
            let kind = kinds.of(rule, subset);
            let key = self.patched(OutboundKey {
                service: service.key.clone(),
                port: port.number,
                subset: subset.into(),
                mode: part.mode,
                rule: found.map(|(found, _)| found.clone()),
                client: part.client.socket.clone(),
                inline: None,
                patches: self.patches.none(),
            });
            let endpoints = || part.endpoint_client(ctx, service, rule, &key);
            if kinds.inline() {
                if let Some(endpoints) = endpoints() {
                    let ip_mode = part.client.ip_mode;
                    let inline = Some(InlineProxyView { ip_mode, endpoints });
                    self.listed.push(OutboundKey { inline, ..key }.listed());
                }
                continue;
            }
            if kind.ended == DiscoveryType::Eds {
                if !self.asked.is_empty() {
                    self.asked.remove(&key.name());
                }
                self.listed.extend(endpoints().map(|client| key.endpoints(client)));
            }
            if part.place.is_none() {
                self.listed.push(key.listed());
            }
        }
    }

    /// The key with the patches that concern its cluster. If they may turn it into one of EDS, its name is asked for.
    fn patched(&mut self, key: OutboundKey) -> OutboundKey {
        if self.patches.is_empty() {
            return key;
        }
        let patches = self.patches.concerning(&key.name(), &[]);
        if !patches.is_empty() && self.patches.makes_eds() {
            self.asked.insert(key.name());
        }
        OutboundKey { patches, ..key }
    }

    /// Lists the endpoints of services whose clusters do not use EDS by themselves, or are of another part.
    fn list_asked(&mut self) {
        for name in std::mem::take(&mut self.asked) {
            let parsed = ParsedName::of(&name);
            let service = self.scope.by_host.get(parsed.host);
            let Some(service) = service.and_then(|key| self.ctx.service(key)) else {
                continue;
            };
            let found = self.rule(service);
            let key = OutboundKey {
                service: service.key.clone(),
                port: parsed.port,
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
            let rule = found.as_ref().map(|(_, rule)| rule);
            let client = self.part.endpoint_client(self.ctx, service, rule, &key);
            self.listed.extend(client.map(|client| key.endpoints(client)));
        }
    }
}

/// True if some server of the gateways passes mutual TLS through to the service that the SNI names.
fn passes_mtls_through(ctx: &BuildContext, gateways: &[ObjectKey]) -> bool {
    let rows = gateways.iter().filter_map(|key| ctx.mesh.gateways.get(ctx.cx, key));
    let mut modes = rows
        .flat_map(|row| &row.spec.servers)
        .filter_map(|server| server.tls.as_ref());
    modes.any(|tls| tls.mode() == server_tls_settings::TlSmode::AutoPassthrough)
}

impl OutboundKey {
    pub(super) fn listed(self) -> ClusterResource {
        ClusterResource::Cluster(ClusterKey::Outbound(self))
    }

    /// The load assignment of an EDS cluster.
    pub(super) fn endpoints(&self, client: EndpointProxyView) -> ClusterResource {
        let key = EndpointKey {
            service: self.service.clone(),
            port: self.port,
            subset: self.subset.clone(),
            mode: self.mode,
            rule: self.rule.clone(),
            client,
        };
        ClusterResource::Endpoint(key)
    }

    /// Builds the cluster. Nothing if the service or port is gone, or a DNS cluster has no endpoints.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let Some((service, port)) = ctx
            .service(&self.service)
            .and_then(|service| Some((service, service.port(self.port)?)))
        else {
            return Built::none();
        };
        let rule = self.rule.as_ref();
        let rule = rule.and_then(|found| destination_rule::rule(ctx.cx, ctx.mesh, found));
        let context = Context {
            key: self,
            ctx,
            service,
            port,
            rule: rule.as_ref(),
            policy: rule
                .as_ref()
                .and_then(|rule| traffic_policy::policy_of(rule, self.port, &self.subset)),
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
