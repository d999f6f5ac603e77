//! Common lists of route configurations, and common route configurations, of many namespaces. A configuration of a
//! namespace differs from the common one only in the names of the namespace's own services, so the common one is built
//! once for a mesh ([`CommonRoutesMemo`]).
//!
//! A namespace whose services share domains with others is built alone, since its short names decide who has them.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use super::{SidecarPart, SidecarRoutes};
use crate::{
    base::{Hashed, Shared, SmolStr},
    generate::{
        BuildContext, EncodedResource,
        block::{Block, BlockPool},
        resource::{Built, Note},
        route::{
            assembly::{self, Host, Names},
            domains,
            host_names::{self, ClientNames},
            virtual_host::{self, TakenNames, UncertainNamespaces},
        },
    },
    model::{SidecarScope, destination_rule::OwnRules, virtual_service::Semantics},
    table::{Memo, Memoized},
};

/// The route configurations of a sidecar in a namespace without objects.
#[derive(Debug, PartialEq)]
pub struct CommonRouteList {
    scope: Shared<SidecarScope>,
    routes: Vec<SidecarRoutes>,
}

impl SidecarPart {
    /// Returns the part of a namespace without objects; `None` for that part, and if labels of the proxy count, which
    /// few share.
    pub(in super::super) fn common(&self) -> Option<Self> {
        let client = &self.client.routes;
        (client.labels.is_empty() && !client.namespace.is_empty()).then_some(())?;
        Some(Self {
            scope: self.scope.common()?,
            client: Hashed::new(self.client.without_source()?),
            ..self.clone()
        })
    }

    /// Lists the common route configurations; `None` if some VirtualService depends on the client's namespace.
    pub(in super::super) fn list_common(&self, ctx: &BuildContext) -> Option<CommonRouteList> {
        let scope = ctx.scope(&self.scope);
        let rows = scope.virtual_services.iter();
        let mut rows = rows.filter_map(|key| ctx.mesh.virtual_service_summaries.get(ctx.cx, key));
        let depends = rows.any(|summary| summary.by_source || summary.semantics == Semantics::Gateway);
        (!depends).then(|| CommonRouteList {
            routes: self.list(ctx),
            scope,
        })
    }

    /// Returns the route configurations with those of the common list; `None` if they may differ in more than the
    /// client.
    pub(in super::super) fn list_from(
        &self,
        ctx: &BuildContext,
        common: &CommonRouteList,
    ) -> Option<Vec<SidecarRoutes>> {
        let own_rules = OwnRules::of(ctx.cx, ctx.mesh, self.scope.namespace());
        if own_rules.may_decide_consistent_hash(ctx.cx, ctx.mesh) || !ctx.scope(&self.scope).shows_same(&common.scope) {
            return None;
        }
        let of_client = |routes: &SidecarRoutes| SidecarRoutes {
            client: self.client.clone(),
            ..routes.clone()
        };
        Some(common.routes.iter().map(of_client).collect())
    }
}

/// Smaller configurations are built alone, which is as fast.
const MIN_HOSTS: usize = 64;

/// The common configurations of a mesh, by the routes of a client without a namespace.
#[derive(Default)]
pub(crate) struct CommonRoutesMemo(Memo<Hashed<SidecarRoutes>, CommonRoutes>);

impl CommonRoutesMemo {
    fn get(&self, ctx: &BuildContext, key: Hashed<SidecarRoutes>) -> Memoized<CommonRoutes> {
        self.0.get(ctx.cx, key.clone(), |cx| {
            CommonRoutes::build(&BuildContext { cx, ..*ctx }, &key)
        })
    }

    /// Returns the number of virtual hosts of all configurations.
    pub(in crate::generate) fn hosts(&self) -> usize {
        self.0.sum(|routes| routes.hosts.len())
    }
}

/// A route configuration for clients without services of their own.
pub(crate) struct CommonRoutes {
    hosts: Vec<Host>,
    /// The positions of the virtual hosts whose names depend on whether the client is in this namespace.
    by_namespace: BTreeMap<SmolStr, Vec<usize>>,
    taken: TakenNames,
    uncertain: UncertainNamespaces,
    /// With the virtual hosts that each consists of.
    blocks: Vec<(Range<usize>, Block)>,
    notes: Vec<Note>,
}

impl CommonRoutes {
    fn build(ctx: &BuildContext, routes: &SidecarRoutes) -> Self {
        let (mut hosts, collection) = routes.hosts(ctx);
        hosts.extend(
            routes
                .catch_all
                .as_ref()
                .map(|kind| virtual_host::last(kind, &routes.client)),
        );
        let mut by_namespace: BTreeMap<SmolStr, Vec<usize>> = BTreeMap::new();
        for (position, host) in hosts.iter().enumerate() {
            let services = host.service.iter();
            for namespace in services.flat_map(|(service, _)| host_names::namespaces(service)) {
                let positions = by_namespace.entry(namespace.into()).or_default();
                if positions.last() != Some(&position) {
                    positions.push(position);
                }
            }
        }
        Self {
            blocks: assembly::blocks(ctx.memo.get::<Shared<BlockPool>>(), &hosts),
            hosts,
            by_namespace,
            taken: collection.taken,
            uncertain: collection.uncertain,
            notes: collection.notes,
        }
    }

    /// Returns the virtual hosts with other names in a namespace; `None` if other hosts may depend on these names.
    fn renamed(&self, namespace: &str, names: &ClientNames) -> Option<Vec<(usize, Host)>> {
        if self.uncertain.contains(namespace) {
            return None;
        }
        let positions = self.by_namespace.get(namespace).into_iter().flatten();
        let mut own = TakenNames::default();
        let renamed = positions.map(|position| {
            let host = &self.hosts[*position];
            let (service, port) = host.service.as_ref()?;
            let Names::Shared(before) = &host.names else {
                return None;
            };
            let names = names.of(service, *port);
            let is_common = |text: &str| before.domains.iter().any(|domain| domain.text == text);
            let common = names.domains.iter().filter(|domain| is_common(&domain.text));
            if common.count() != before.domains.len() {
                return None;
            }
            let added = names.domains.iter().filter(|domain| !is_common(&domain.text));
            let mut are_free = added.map(|domain| self.taken.is_free(domain) && own.take(domain));
            are_free
                .all(|is_free| is_free)
                .then(|| (*position, host.renamed(names)))
        });
        renamed.collect()
    }

    fn resource(&self, pool: &BlockPool, name: &SmolStr, renamed: &[(usize, Host)]) -> EncodedResource {
        let mut rest = renamed;
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (range, block) in &self.blocks {
            let count = rest.iter().take_while(|(position, _)| range.contains(position)).count();
            let (of_block, after) = rest.split_at(count);
            rest = after;
            if of_block.is_empty() {
                blocks.push(block.clone());
                continue;
            }
            let hosts = range.clone().map(|position| {
                let own = of_block.iter().find(|(renamed, _)| *renamed == position);
                own.map_or(&self.hosts[position], |(_, host)| host)
            });
            blocks.extend(assembly::blocks(pool, hosts).into_iter().map(|(_, block)| block));
        }
        assembly::of_blocks(name, blocks)
    }
}

impl SidecarRoutes {
    /// Builds the configuration from the common one, if that is possible.
    pub(super) fn build_from_common(&self, ctx: &BuildContext) -> Option<Built> {
        let is_usual = self.port != 0 && self.catch_all.is_some() && self.single.is_none() && self.patches.is_empty();
        if !is_usual || self.client.routes.proxyless || self.bindings.len() + self.services.len() < MIN_HOSTS {
            return None;
        }
        let (namespace, _) = domains::split_dns_domain(&self.client.dns_domain)?;
        let key = Hashed::new(Self {
            client: Hashed::new(self.client.without_source()?),
            ..self.clone()
        });
        let common = ctx.memo.get::<Arc<CommonRoutesMemo>>().get(ctx, key);
        if !assembly::is_in_blocks(&common.hosts) {
            return None;
        }
        let features = &ctx.mesh.installation.features;
        let names = ClientNames::new(ctx.memo.get(), features, &self.client, false);
        let renamed = common.renamed(namespace, &names)?;
        let resource = common.resource(ctx.memo.get::<Shared<BlockPool>>(), &self.name, &renamed);
        Some(Built::new(resource).with_notes(common.notes.clone()))
    }
}
