//! Inbound clusters, from a sidecar to its own workload: one for each port of a service or Sidecar.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use smol_str::SmolStr;

use super::{
    ClusterKey,
    builder::{ClusterBuilder, EncodedCluster},
    connection_pool, finished,
    service::{UpstreamProtocol, set_port_override},
    static_clusters::{bind_config, fixed_endpoint},
};
use crate::{
    api::kube::service::TargetPort,
    base::{Hostname, Namespace, ObjectKey, Shared, cidr::IpMode},
    generate::{
        BuildContext,
        constant::loopbacks,
        name,
        patch::{PatchContext, PatchRef, cluster::ClusterPatches},
        proxy::InterceptionMode,
        proxy_class::ServiceTarget,
        proxy_view,
        resource::Built,
        selected::Selected,
        traffic_policy,
    },
    model::{
        ScopeKey, ServiceKey,
        destination_rule::{self, RuleRef},
        service::{InboundPorts, Protocol, Service, ServicePort},
    },
    proto::{
        envoy::config::cluster::v3::cluster::{CommonLbConfig, DiscoveryType, LbPolicy},
        istio::{
            mesh::v1alpha1::mesh_config::inbound_traffic_policy,
            networking::v1alpha3::{ConnectionPoolSettings, IstioIngressListener, Sidecar},
        },
    },
};

/// Longest time that Envoy accepts, in seconds; connections to the workload are never cleaned up.
const NO_CLEANUP_SECONDS: i64 = 9_223_372_035;

/// Inbound clusters of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InboundClusterPart {
    /// Namespace of the workload.
    pub namespace: Namespace,
    /// Service ports that it serves.
    pub targets: Shared<[ServiceTarget]>,
    /// Sidecar that selects it, if there is one.
    pub sidecar: Option<ObjectKey>,
    /// Address families.
    pub ip_mode: IpMode,
    /// True if ports are bound instead of intercepted, so that only those of the Sidecar are served.
    pub bound_ports: bool,
    /// First IPv4 address of the instance; empty unless the Sidecar sends traffic there.
    pub instance_v4: SmolStr,
    /// First IPv6 address of the instance; empty unless the Sidecar sends traffic there.
    pub instance_v6: SmolStr,
    /// True if HTTP/1.1 header names keep their case.
    pub keeps_header_case: bool,
    /// EnvoyFilter patches of clusters that apply, in order.
    pub patches: Shared<[PatchRef]>,
}

/// One inbound cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InboundClusterKey {
    /// Port in the cluster's name: that of the workload, or of the Sidecar's listener.
    pub port: u32,
    /// Address and port of the endpoint; `None` for the original destination.
    pub endpoint: Option<(SmolStr, u32)>,
    /// Services with their port numbers; the owner of the cluster is first. Empty for a Sidecar's listener on a port
    /// without a service.
    pub services: Shared<[(ServiceKey, u32)]>,
    /// Port of the first service, if only the workload's own cluster has it.
    pub own_port: Option<Box<ServicePort>>,
    /// Position of the port among those of the first service, if it has the port.
    pub port_position: Option<usize>,
    /// Sidecar, for its connection pools.
    pub sidecar: Option<ObjectKey>,
    /// Namespace of the workload.
    pub namespace: Namespace,
    /// True if the cluster belongs to a listener of the Sidecar.
    pub is_listener: bool,
    /// Rule of the first service.
    pub rule: Option<RuleRef>,
    /// Address families, for the source address.
    pub ip_mode: IpMode,
    /// True if HTTP/1.1 header names keep their case.
    pub keeps_header_case: bool,
    /// EnvoyFilter patches that apply, in order.
    pub patches: Shared<[PatchRef]>,
}

impl InboundClusterPart {
    /// Selects the part of a sidecar, if it has one.
    pub fn select(ctx: &BuildContext, selected: &Selected) -> Option<Self> {
        let proxy = selected.proxy;
        let sidecar = match &selected.scope {
            ScopeKey::Sidecar(_, key) => Some(key.clone()),
            ScopeKey::Default(_) | ScopeKey::Gateway(_) => None,
        };
        let (instance_v4, instance_v6) = instance_addresses(ctx, &selected.class.addresses, sidecar.as_ref());
        let part = Self {
            namespace: selected.scope.namespace().clone(),
            targets: selected.targets.clone(),
            sidecar,
            ip_mode: proxy.ip_mode,
            bound_ports: proxy.interception_mode == InterceptionMode::None,
            instance_v4,
            instance_v6,
            keeps_header_case: proxy_view::keeps_header_case(selected),
            patches: selected.patches.clusters.clone(),
        };
        (part.sidecar.is_some() || !part.targets.is_empty()).then_some(part)
    }

    /// Lists the clusters of the part.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ClusterKey> {
        let sidecar = self.sidecar.as_ref().and_then(|key| ctx.mesh.sidecars.get(ctx.cx, key));
        let ingress = sidecar.map_or(&[][..], |sidecar| &sidecar.spec.ingress);
        let mut owners = OwnerPorts::default();
        let mut keys = Vec::new();
        if ingress.is_empty() {
            if !self.bound_ports {
                keys = self.service_keys(ctx, &[], &mut owners);
            }
        } else {
            if ctx
                .mesh
                .installation
                .features
                .pilot_allow_sidecar_service_inbound_listener_merge
            {
                keys = self.service_keys(ctx, ingress, &mut owners);
            }
            let mut by_target: BTreeMap<u32, &ServiceTarget> = BTreeMap::new();
            for target in self.targets.iter() {
                by_target.entry(target.target_port).or_insert(target);
            }
            let listeners = ingress.iter();
            keys.extend(listeners.filter_map(|listener| self.listener_key(ctx, listener, &by_target, &mut owners)));
        }
        let patches = ClusterPatches::of(ctx, &self.patches, PatchContext::SidecarInbound);
        for key in &mut keys {
            key.patches = patches.concerning(&name::inbound_cluster(key.port), &key.hosts());
        }
        keys.into_iter().map(ClusterKey::Inbound).collect()
    }

    /// Returns one cluster for each workload port of a service, unless a listener of the Sidecar has the port.
    fn service_keys<'m>(
        &self,
        ctx: &BuildContext<'m>,
        ingress: &[IstioIngressListener],
        owners: &mut OwnerPorts<'m>,
    ) -> Vec<InboundClusterKey> {
        let mut ports: BTreeMap<u32, Vec<&ServiceTarget>> = BTreeMap::new();
        for target in self.targets.iter() {
            ports.entry(target.target_port).or_default().push(target);
        }
        let policy = ctx.mesh_config().inbound_traffic_policy.unwrap_or_default();
        let endpoint = match policy.mode() {
            inbound_traffic_policy::Mode::Passthrough => None,
            inbound_traffic_policy::Mode::Localhost => Some(SmolStr::new(loopbacks(self.ip_mode)[0])),
        };
        let taken: BTreeSet<u32> = ingress.iter().map(port_of).collect();
        let free = ports.into_iter().filter(|(port, _)| !taken.contains(port));
        let services = |targets: &[&ServiceTarget]| -> Vec<(ServiceKey, u32)> {
            targets
                .iter()
                .map(|target| (target.service.clone(), target.port))
                .collect()
        };
        free.map(|(port, targets)| InboundClusterKey {
            rule: targets.first().and_then(|target| self.rule(ctx, &target.service)),
            own_port: targets.first().and_then(|target| target.own.clone()),
            port_position: targets
                .first()
                .and_then(|target| owners.position(ctx, &target.service, target.port, port)),
            services: services(&targets).into(),
            is_listener: false,
            ..self.key(port, endpoint.clone().map(|address| (address, port)))
        })
        .collect()
    }

    /// Returns the cluster of a listener of the Sidecar. `by_target` has the first target of each workload port.
    fn listener_key<'m>(
        &self,
        ctx: &BuildContext<'m>,
        listener: &IstioIngressListener,
        by_target: &BTreeMap<u32, &ServiceTarget>,
        owners: &mut OwnerPorts<'m>,
    ) -> Option<InboundClusterKey> {
        let port = port_of(listener);
        let endpoint = self.endpoint(&listener.default_endpoint)?;
        // The first service with the listener's port owns the cluster.
        let owner = by_target.get(&port);
        Some(InboundClusterKey {
            rule: owner.and_then(|target| self.rule(ctx, &target.service)),
            port_position: owner.and_then(|target| owners.position(ctx, &target.service, port, port)),
            services: owner
                .map(|target| (target.service.clone(), port))
                .into_iter()
                .collect::<Vec<_>>()
                .into(),
            is_listener: true,
            ..self.key(port, endpoint)
        })
    }

    fn key(&self, port: u32, endpoint: Option<(SmolStr, u32)>) -> InboundClusterKey {
        InboundClusterKey {
            port,
            endpoint,
            services: Shared::from(Vec::new()),
            own_port: None,
            port_position: None,
            sidecar: self.sidecar.clone(),
            namespace: self.namespace.clone(),
            is_listener: false,
            rule: None,
            ip_mode: self.ip_mode,
            keeps_header_case: self.keeps_header_case,
            patches: Vec::new().into(),
        }
    }

    /// Returns the rule of a service. Rules that select clients do not apply to servers, nor do rules for services that
    /// the workload itself does not see.
    fn rule(&self, ctx: &BuildContext, service: &ServiceKey) -> Option<RuleRef> {
        let in_scope = |key: ScopeKey| ctx.tcp_scope(&key).service(&service.hostname).cloned();
        let seen = match &self.sidecar {
            Some(key) => in_scope(ScopeKey::Sidecar(self.namespace.clone(), key.clone())),
            None => {
                let row = ctx.mesh.visibility.get(ctx.cx, service);
                if row.is_some_and(|row| row.export_to.visible_to(&self.namespace)) {
                    Some(service.clone())
                } else {
                    // A route may lead to a service that is not exported to its own namespace.
                    in_scope(ScopeKey::Default(self.namespace.clone()))
                }
            }
        }?;
        destination_rule::find(ctx.cx, ctx.mesh, &self.namespace, None, &seen).map(|(found, _)| found)
    }

    /// Parses `defaultEndpoint`. The outer `None` means that it is invalid and there is no cluster; the inner one that
    /// it is not set and traffic keeps its original destination.
    #[allow(
        clippy::option_option,
        reason = "the two cases differ, and a type of its own would say no more"
    )]
    fn endpoint(&self, text: &str) -> Option<Option<(SmolStr, u32)>> {
        if text.is_empty() {
            return Some(None);
        }
        if text.starts_with("unix://") {
            return Some(Some((SmolStr::new(text), 0)));
        }
        let (host, port) = split_endpoint(text)?;
        let port: u32 = port.parse().ok()?;
        let either = |first: &str, second: &str| SmolStr::new(if first.is_empty() { second } else { first });
        let local = loopbacks(self.ip_mode);
        let of_family = |family: &str| {
            let own = local.iter().find(|address| **address == family);
            SmolStr::new(own.unwrap_or(&local[0]))
        };
        let address = match host {
            "0.0.0.0" => either(&self.instance_v4, "127.0.0.1"),
            "::" => either(&self.instance_v6, "::1"),
            "127.0.0.1" => of_family("127.0.0.1"),
            "::1" => of_family("::1"),
            _ => return Some(None),
        };
        Some(Some((address, port)))
    }
}

/// The ports of the services that own clusters, by number.
#[derive(Default)]
struct OwnerPorts<'m>(BTreeMap<ServiceKey, InboundPorts<'m>>);

impl<'m> OwnerPorts<'m> {
    /// Returns the position of a port among those of a service.
    fn position(
        &mut self,
        ctx: &BuildContext<'m>,
        service: &ServiceKey,
        number: u32,
        target_port: u32,
    ) -> Option<usize> {
        let ports = match self.0.entry(service.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(InboundPorts::of(ctx.service(service)?)),
        };
        ports.position(number, target_port)
    }
}

/// Returns the instance's addresses, as far as the Sidecar sends traffic to them.
fn instance_addresses(ctx: &BuildContext, addresses: &[SmolStr], sidecar: Option<&ObjectKey>) -> (SmolStr, SmolStr) {
    let row = sidecar.and_then(|key| ctx.mesh.sidecars.get(ctx.cx, key));
    let endpoints = || {
        row.into_iter()
            .flat_map(|row| &row.spec.ingress)
            .map(|listener| listener.default_endpoint.as_str())
    };
    let first = |wildcard: &str, is_v6: bool| {
        let wanted = endpoints().any(|endpoint| split_endpoint(endpoint).is_some_and(|(host, _)| host == wildcard));
        let address = addresses.iter().find(|address| address.contains(':') == is_v6);
        address.filter(|_| wanted).cloned().unwrap_or_default()
    };
    (first("0.0.0.0", false), first("::", true))
}

/// Returns the host of `defaultEndpoint` without brackets, and the port. Istio accepts brackets around any host.
fn split_endpoint(text: &str) -> Option<(&str, &str)> {
    let (host, port) = text.rsplit_once(':')?;
    Some((host.trim_start_matches('[').trim_end_matches(']'), port))
}

fn port_of(listener: &IstioIngressListener) -> u32 {
    listener.port.as_ref().map_or(0, |port| port.number)
}

impl InboundClusterKey {
    /// Builds the cluster.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        match self.cluster(ctx) {
            Some(cluster) => finished(ctx, &self.patches, &self.hosts(), cluster, Vec::new()),
            None => Built::none(),
        }
    }

    fn cluster(&self, ctx: &BuildContext) -> Option<EncodedCluster> {
        let sidecar = self.sidecar.as_ref().and_then(|key| ctx.mesh.sidecars.get(ctx.cx, key));
        let owner = self.services.first().and_then(|(key, _)| ctx.service(key));
        let served = self.port_position.and_then(|position| owner?.port_at(position));
        let declared = served.map(|(_, port)| port);
        // Several services may have the host. A port that the first one lacks has the attributes of its own service.
        let further = served.filter(|(_, port)| owner.is_some_and(|owner| owner.port(port.number).is_none()));
        let owner = further.map(|(service, _)| service).or(owner.map(|owner| &**owner));
        let port = self.port(sidecar.map(|sidecar| &sidecar.spec), declared)?;
        let kind = match self.endpoint {
            Some(_) => DiscoveryType::Static,
            None => DiscoveryType::OriginalDst,
        };
        let mut builder = ClusterBuilder::new(name::inbound_cluster(self.port), kind);
        builder.cluster.common_lb_config = Some(CommonLbConfig::default());
        self.set_destination(&mut builder);
        if let Some(declared) = declared {
            set_port_override(&mut builder, owner, declared);
        }
        let host = owner.map_or_else(|| self.synthetic_host(), |owner| owner.key.hostname.to_string());
        let pattern = &ctx.mesh_config().inbound_cluster_stat_name;
        if !pattern.is_empty() {
            let filled = name::stat_prefix(pattern, &host, "", &port, self.port, owner);
            builder.cluster.alt_stat_name = name::delimited_stat(&filled);
        }
        let protocol = UpstreamProtocol {
            declared: port.protocol,
            sniffs: true,
            keeps_header_case: self.keeps_header_case,
        };
        protocol.apply(&mut builder);
        self.set_metadata(&mut builder, ctx, owner, port.number);
        let pool = self.pool(&mut builder, ctx, sidecar.map(|sidecar| &sidecar.spec), port.number);
        connection_pool::apply(&mut builder, ctx, &pool.settings, pool.budget.as_ref());
        self.set_source(&mut builder, ctx);
        Some(builder.finish())
    }

    /// Returns the services that patches match: all services of the cluster.
    fn hosts(&self) -> Vec<Hostname> {
        if self.services.is_empty() {
            return vec![Hostname::from(self.synthetic_host())];
        }
        self.services.iter().map(|(key, _)| key.hostname.clone()).collect()
    }

    /// Returns the declared port: of the Sidecar's listener, or else of the service.
    fn port(&self, sidecar: Option<&Sidecar>, of_owner: Option<&ServicePort>) -> Option<ServicePort> {
        if !self.is_listener {
            return self.own_port.as_deref().or(of_owner).cloned();
        }
        let mut listeners = sidecar?.ingress.iter().filter_map(|listener| listener.port.as_ref());
        let port = listeners.find(|port| port.number == self.port)?;
        Some(ServicePort {
            name: SmolStr::new(&port.name),
            number: port.number,
            target: TargetPort::Number(0),
            protocol: Protocol::parse(&port.protocol),
        })
    }

    /// Returns the host in statistics for a listener on a port without a service.
    ///
    /// Parity (pilot/pkg/model/sidecar.go): a Sidecar of the root namespace counts as one of the workload's namespace.
    fn synthetic_host(&self) -> String {
        let key = self.sidecar.as_ref();
        key.map(|key| format!("{}.{}", key.name, self.namespace))
            .unwrap_or_default()
    }

    fn set_destination(&self, builder: &mut ClusterBuilder) {
        let cluster = &mut builder.cluster;
        match &self.endpoint {
            Some((address, port)) => cluster.load_assignment = Some(fixed_endpoint(&cluster.name, address, *port)),
            None => {
                cluster.set_lb_policy(LbPolicy::ClusterProvided);
                cluster.cleanup_interval = Some(prost_types::Duration {
                    seconds: NO_CLEANUP_SECONDS,
                    nanos: 0,
                });
            }
        }
    }

    /// Adds all services of the same service port to the metadata.
    fn set_metadata(&self, builder: &mut ClusterBuilder, ctx: &BuildContext, owner: Option<&Service>, port: u32) {
        if !ctx.mesh.installation.features.pilot_enable_telemetry_label {
            return;
        }
        // Services outside the mesh have no metadata about the workload.
        if owner.is_some_and(|owner| owner.mesh_external) {
            return;
        }
        let mut hosts = BTreeSet::new();
        let mut services = Vec::new();
        for (key, number) in self.services.iter() {
            let service = match owner {
                Some(owner) if owner.key == *key => Some(owner),
                _ => ctx.service(key).map(|service| &**service),
            };
            if let Some(service) = service
                && *number == port
                && hosts.insert(&key.hostname)
            {
                services.push(service);
            }
        }
        if !services.is_empty() {
            builder.set_services(services);
        }
    }

    /// Applies the connection pool of the rule, unless the Sidecar has one for the port or for all ports.
    fn pool(&self, builder: &mut ClusterBuilder, ctx: &BuildContext, sidecar: Option<&Sidecar>, port: u32) -> Pool {
        let rule = self
            .rule
            .as_ref()
            .and_then(|rule| destination_rule::rule(ctx.cx, ctx.mesh, rule));
        let policy = rule.filter(|rule| rule.spec.traffic_policy.is_some());
        if let Some(rule) = &policy
            && builder.has_metadata()
        {
            builder.set_text("config", &rule.meta.config_path());
        }
        let policy = policy
            .as_ref()
            .and_then(|rule| traffic_policy::policy_of(rule, port, ""));
        let of_listener = |sidecar: &Sidecar| {
            let mut listeners = sidecar.ingress.iter().filter(|listener| port_of(listener) == self.port);
            listeners.find_map(|listener| listener.connection_pool)
        };
        let own = sidecar.and_then(|sidecar| of_listener(sidecar).or(sidecar.inbound_connection_pool));
        let of_rule = policy.and_then(|policy| policy.connection_pool);
        Pool {
            settings: own.or(of_rule.copied()).unwrap_or_default(),
            budget: policy.and_then(|policy| policy.retry_budget).copied(),
        }
    }

    /// Connections other than to loopback have a source address that interception ignores.
    fn set_source(&self, builder: &mut ClusterBuilder, ctx: &BuildContext) {
        let is_loopback = |(address, _): &(SmolStr, u32)| address == "127.0.0.1" || address == "::1";
        if !self.endpoint.as_ref().is_some_and(is_loopback) {
            let both = ctx.mesh.installation.features.istio_dual_stack;
            builder.cluster.upstream_bind_config = Some(bind_config(self.ip_mode, both));
        }
    }
}

struct Pool {
    settings: ConnectionPoolSettings,
    budget: Option<crate::proto::istio::networking::v1alpha3::traffic_policy::RetryBudget>,
}
