//! The services that servers with `AUTO_PASSTHROUGH` reach.

use std::collections::{BTreeMap, BTreeSet};

use super::GatewayPart;
use crate::{
    base::{
        SmolStr,
        host::{self, HostsByEnd},
    },
    generate::BuildContext,
    model::{
        Service, SidecarScope, destination_rule,
        gateway::GatewayServer,
        service::{Protocol, ScopedService},
    },
};

/// The services of a scope that servers reach. The services, the servers and the hosts of a server may be tens of
/// thousands, so each service and each host is looked up once.
#[derive(Default)]
pub(super) struct ReachableServices {
    /// The positions of all services of the scope by host, known once there is a server.
    by_host: Option<HostsByEnd<Vec<usize>>>,
    /// By position; `None` for services without chains.
    by_position: BTreeMap<usize, Option<ReachableService>>,
    /// The services that each host of the servers covers, in order of age.
    by_pattern: BTreeMap<SmolStr, Vec<ReachableService>>,
}

/// A service of the mesh with chains. The order is that of age: a scope has those first that are exported to its
/// namespace alone, so new ones of a tenant would use up a limit before the others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ReachableService {
    creation: i64,
    /// Position in the scope.
    position: usize,
    /// Number of chains.
    chains: usize,
}

/// The services of a server.
pub(super) struct ServerReach {
    /// In order of age.
    pub(super) services: Vec<ScopedService>,
    /// The number of their chains.
    pub(super) chains: usize,
    /// True if the server covers others, whose chains its share has no room for.
    pub(super) is_cut: bool,
}

impl ReachableServices {
    /// Returns the oldest services whose hosts a server covers, as many as have room in a share of the chains.
    pub(super) fn of_server(
        &mut self,
        part: &GatewayPart,
        ctx: &BuildContext,
        scope: &SidecarScope,
        server: &GatewayServer,
        share: usize,
    ) -> ServerReach {
        let mut oldest: BTreeSet<ReachableService> = BTreeSet::new();
        for pattern in server.sni.iter() {
            let covered = self.covered(part, ctx, scope, pattern);
            // The first one without room shows that the server is cut.
            let count = covered.len().min(fitting(covered, share) + 1);
            oldest.extend(&covered[..count]);
        }
        let oldest: Vec<ReachableService> = oldest.into_iter().collect();
        let reached = &oldest[..fitting(&oldest, share)];
        let keys = reached.iter().map(|service| &scope.services[service.position]);
        ServerReach {
            services: keys.map(|key| scope.scoped(key)).collect(),
            chains: reached
                .iter()
                .map(|service| service.chains)
                .fold(0, usize::saturating_add),
            is_cut: reached.len() < oldest.len(),
        }
    }

    /// Returns the services whose hosts a host of a server covers, in order of age.
    fn covered(
        &mut self,
        part: &GatewayPart,
        ctx: &BuildContext,
        scope: &SidecarScope,
        pattern: &SmolStr,
    ) -> &[ReachableService] {
        let Self {
            by_host,
            by_position,
            by_pattern,
        } = self;
        by_pattern.entry(pattern.clone()).or_insert_with(|| {
            let by_host = by_host.get_or_insert_with(|| {
                let services = scope.services.iter().enumerate();
                HostsByEnd::of(services.map(|(position, key)| (key.hostname.as_str(), position)))
            });
            let mut positions = by_host.overlapping(pattern);
            positions.retain(|position| host::subset_of(&scope.services[*position].hostname, pattern));
            let mut covered: Vec<ReachableService> = Vec::new();
            for position in positions {
                let service = by_position.entry(position);
                covered.extend(*service.or_insert_with(|| ReachableService::of(part, ctx, scope, position)));
            }
            covered.sort_unstable();
            covered
        })
    }
}

impl ReachableService {
    /// Returns the service at a position in a scope; `None` without chains.
    fn of(part: &GatewayPart, ctx: &BuildContext, scope: &SidecarScope, position: usize) -> Option<Self> {
        let service = ctx.scoped(&scope.scoped(&scope.services[position]))?;
        if service.mesh_external {
            return None;
        }
        let chains = part.passed_through(ctx, &service);
        (chains > 0).then_some(Self {
            creation: service.creation,
            position,
            chains,
        })
    }
}

impl GatewayPart {
    /// Returns the number of chains of a service with `AUTO_PASSTHROUGH`: one for each port and subset.
    pub(super) fn passed_through(&self, ctx: &BuildContext, service: &Service) -> usize {
        let client = &self.client;
        let namespace = &client.filters.namespace;
        let rule = destination_rule::lookup(ctx.cx, ctx.mesh, namespace, &client.labels, service);
        let subsets = rule.map_or(0, |rule| rule.spec.subsets.len());
        let ports = service.ports.iter().filter(|port| port.protocol != Protocol::Udp);
        ports.count().saturating_mul(subsets + 1)
    }
}

/// Returns how many services, from the first, have room for their chains in a share.
fn fitting(services: &[ReachableService], share: usize) -> usize {
    let mut chains = 0_usize;
    let fitting = services.iter().take_while(|service| {
        chains = chains.saturating_add(service.chains);
        chains <= share
    });
    fitting.count()
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{SERVICES, auto_passthrough, with_part},
        *,
    };
    use crate::model::{ServiceKey, sidecar_scope};

    #[test]
    fn r21_services_of_a_server_are_looked_up_as_they_are_compared() {
        for (hosts, expected) in [
            ("'*'", 2),
            ("'*.cluster.local', a.default.svc.cluster.local", 2),
            ("x.example, b.default.svc.cluster.local", 1),
            ("'*.example', '*.a.default.svc.cluster.local'", 0),
        ] {
            let gateway = auto_passthrough(hosts);
            let files = [("config.yaml", gateway.as_str()), ("kube.yaml", SERVICES)];
            with_part(&files, |ctx, part| {
                let merged = part.gateways.merged(ctx);
                let scope = sidecar_scope::scope(ctx.cx, ctx.mesh, &part.scope).expect("a scope");
                let server = merged.servers.first().expect("a server");
                let mut reachable = ReachableServices::default();
                let found = reachable.of_server(part, ctx, &scope, server, usize::MAX);
                let covers = |key: &&ServiceKey| {
                    let mut patterns = server.sni.iter();
                    patterns.any(|pattern| host::subset_of(&key.hostname, pattern))
                };
                let covered = scope.services.iter().filter(covers);
                let compared: Vec<ScopedService> = covered.map(|key| scope.scoped(key)).collect();
                assert_eq!(found.services, compared, "{hosts}");
                assert_eq!(found.services.len(), expected, "{hosts}");
                assert!(!found.is_cut, "{hosts}");
                let chains = compared.iter().filter_map(|service| ctx.scoped(service));
                let chains: usize = chains.map(|service| part.passed_through(ctx, &service)).sum();
                assert_eq!(found.chains, chains, "{hosts}");
            });
        }
    }
}
