//! Objects that apply to a class of proxies: its scope, Gateways, patches and extensions.
//!
//! They are looked up once for all proxies of a class. The result consists of keys and small projections, so that
//! classes without a relevant difference get the same [`ProxyGroupKey`](super::ProxyGroupKey).

#[cfg(test)]
mod tests;

use std::{borrow::Cow, cmp::Reverse, collections::BTreeSet};

use smol_str::SmolStr;

use super::{
    BuildContext,
    patch::Patches,
    proxy::{NodeMetadata, ProxyType},
    proxy_class::{ProxyClass, ServiceTarget},
    waypoint::WaypointView,
};
use crate::{
    api::Config,
    base::{Labels, Namespace, NetworkId, ObjectKey, Shared, select},
    model::{
        ScopeKey,
        extension::{ExtensionFilter, ExtensionId},
        gateway::{PARENT_NAMESPACE_ANNOTATION, SERVICE_ANNOTATION, converted_annotation},
        gateway_api::used_pool::UsedPool,
        policy::{self, GATEWAY_NAME_LABEL, Subject},
        waypoint::{self, ServingRole},
    },
    proto::istio::{
        extensions::v1alpha1::{TrafficExtension, WasmPlugin},
        mesh::v1alpha1::ProxyConfig,
        networking::v1alpha3 as networking,
    },
};

/// The objects that apply to one class. The `select` functions of the types take from it what their parts depend on.
pub struct Selected<'a> {
    /// The node metadata.
    pub proxy: &'a NodeMetadata,
    /// The class of the proxy, which its replicas share.
    pub class: &'a ProxyClass,
    /// The labels that selectors match: those of the class.
    pub labels: Shared<Labels>,
    /// The network of the node. Parity (pilot/pkg/model/context.go): the network in the registry affects labels only.
    pub network: NetworkId,
    /// The scope, whose services the proxy sees.
    pub scope: ScopeKey,
    /// The service ports that the workload itself serves.
    pub targets: Shared<[ServiceTarget]>,
    /// The effective ProxyConfig: `PROXY_CONFIG` of the node, else the mesh's default.
    pub proxy_config: Cow<'a, ProxyConfig>,
    /// The patches of EnvoyFilters, in the order of application.
    pub patches: Patches,
    /// WasmPlugins and TrafficExtensions, in the order of application.
    pub extensions: Shared<[ExtensionId]>,
    /// The Gateways that select a router or a gateway between networks, oldest first; empty for others.
    pub gateways: Shared<[ObjectKey]>,
    /// The services of a waypoint or a gateway between networks; none for others.
    pub serves: ServingRole,
    /// The workload that policies are matched against.
    pub subject: Subject,
}

impl<'a> Selected<'a> {
    /// Looks up the objects that apply to a class.
    pub fn of(ctx: &BuildContext<'a>, class: &'a ProxyClass) -> Self {
        let (proxy, labels) = (&*class.node, &class.labels);
        let serves = match proxy.proxy_type {
            ProxyType::Waypoint => role(ctx, class),
            _ => ServingRole::none(),
        };
        let gateways = if proxy.proxy_type == ProxyType::Router || serves == ServingRole::EastWest {
            gateways(ctx, proxy, labels, &class.targets)
        } else {
            Vec::new()
        };
        let subject = Subject {
            is_waypoint: proxy.proxy_type == ProxyType::Waypoint,
            ..Subject::workload(proxy.namespace.clone(), Labels::clone(labels))
        };
        Self {
            proxy,
            class,
            network: proxy.network.clone(),
            scope: scope(ctx, proxy, labels),
            targets: class.targets.clone(),
            proxy_config: proxy_config(ctx, proxy),
            patches: Patches::of(ctx, class, &envoy_filters(ctx, &subject)),
            extensions: attached_extensions(ctx, &subject),
            gateways: gateways.into(),
            serves,
            labels: labels.clone(),
            subject,
        }
    }
}

impl Selected<'_> {
    /// Returns the InferencePools that routes of a router's Gateway use.
    ///
    /// Parity (pilot/pkg/networking/core/listener_builder.go): a label of the proxy names the Gateway.
    pub fn inference_pools<'m>(&self, ctx: &BuildContext<'m>) -> impl Iterator<Item = &'m Shared<UsedPool>> + use<'m> {
        let name = self.labels.get(GATEWAY_NAME_LABEL);
        let name = name.filter(|_| self.proxy.proxy_type == ProxyType::Router);
        let mesh = ctx.mesh;
        let cluster = &mesh.installation.cluster;
        let gateway = name.map(|name| ObjectKey::new(cluster, self.proxy.namespace.clone(), name.clone()));
        let pools = gateway.map(|gateway| mesh.pools_by_gateway.get(ctx.cx, &gateway));
        pools.into_iter().flatten().map(|(_, pool)| pool)
    }

    /// Returns the attributes that the services of a waypoint depend on.
    pub fn waypoint_view(&self) -> WaypointView {
        WaypointView {
            namespace: self.proxy.namespace.clone(),
            role: self.serves.clone(),
        }
    }
}

/// Returns the role of a waypoint: its Gateways are those whose address belongs to a service of the workload.
fn role(ctx: &BuildContext, class: &ProxyClass) -> ServingRole {
    let proxy = &*class.node;
    if waypoint::is_east_west(&ctx.mesh.installation.features, &class.labels) {
        return ServingRole::EastWest;
    }
    let services = class.targets.iter().filter_map(|target| ctx.service(&target.service));
    let gateways = waypoint::at(ctx.cx, ctx.mesh, &proxy.namespace, &proxy.cluster, services);
    ServingRole::Waypoint(gateways.into())
}

/// Returns the scope of a proxy. For sidecars: the oldest Sidecar that selects it, or else the one of its namespace
/// without a selector, or else that of the root namespace, or else the default. Sidecars do not apply to routers and
/// waypoints.
fn scope(ctx: &BuildContext, proxy: &NodeMetadata, labels: &Labels) -> ScopeKey {
    let namespace = proxy.namespace.clone();
    if proxy.proxy_type != ProxyType::Sidecar {
        return ScopeKey::Gateway(namespace);
    }
    let sorted = |namespace: &Namespace| {
        let rows = ctx.mesh.sidecars_by_namespace.get(ctx.cx, namespace);
        let mut rows: Vec<_> = rows.map(|(_, row)| row).collect();
        rows.sort_by_key(|row| (row.spec.workload_selector.is_none(), row.meta.age_order()));
        rows
    };
    let own = sorted(&namespace);
    let mut chosen = own.into_iter().find(|row| {
        row.spec.workload_selector.as_ref().is_none_or(|selector| {
            let pairs = selector.labels.iter().map(|(k, v)| (k.as_str(), v.as_str()));
            select::matches(pairs, labels)
        })
    });
    if chosen.is_none() {
        let of_root = sorted(&policy::root_namespace(ctx.cx, ctx.mesh));
        chosen = of_root.into_iter().find(|row| row.spec.workload_selector.is_none());
    }
    match chosen {
        Some(row) => ScopeKey::Sidecar(namespace, row.meta.key.clone()),
        None => ScopeKey::Default(namespace),
    }
}

/// Returns true if sidecars of a namespace have the default scope unless a Sidecar selects them.
pub(super) fn has_default_scope(ctx: &BuildContext, namespace: &Namespace) -> bool {
    let root = policy::root_namespace(ctx.cx, ctx.mesh);
    [namespace, &root].into_iter().all(|namespace| {
        let mut sidecars = ctx.mesh.sidecars_by_namespace.get(ctx.cx, namespace);
        sidecars.all(|(_, row)| row.spec.workload_selector.is_some())
    })
}

/// Returns `PROXY_CONFIG` of the node, or else the mesh's default. ProxyConfig resources affect injection and bootstrap
/// only, and reach a proxy through its node.
fn proxy_config<'a>(ctx: &BuildContext<'a>, proxy: &'a NodeMetadata) -> Cow<'a, ProxyConfig> {
    let own = proxy.proxy_config.as_deref();
    let config = own.or_else(|| ctx.mesh_config().default_config.as_ref());
    config.map_or_else(Cow::default, Cow::Borrowed)
}

/// Returns the EnvoyFilters of the root namespace and the proxy's namespace that select it: by priority, root namespace
/// first, then by age.
fn envoy_filters(ctx: &BuildContext, subject: &Subject) -> Vec<ObjectKey> {
    let root = policy::root_namespace(ctx.cx, ctx.mesh);
    let mut keys = policy::attached::<networking::EnvoyFilter>(ctx.cx, ctx.mesh, subject);
    keys.sort_by_cached_key(|key| {
        let row = ctx.mesh.envoy_filters.get(ctx.cx, key);
        let (priority, creation) = row.map_or((0, 0), |row| (row.spec.priority, row.meta.creation));
        let name = format!("{}.{}", key.name, key.namespace);
        (priority, key.namespace != root, creation, name)
    });
    keys
}

/// Returns the Gateways that select a proxy by its labels or services, oldest first.
fn gateways(ctx: &BuildContext, proxy: &NodeMetadata, labels: &Labels, targets: &[ServiceTarget]) -> Vec<ObjectKey> {
    // The ports of the workload and the hosts in an annotation may be tens of thousands.
    let services = targets.iter().map(|target| &target.service);
    let served: BTreeSet<(&str, &str)> = services
        .map(|service| (service.namespace.as_str(), service.hostname.as_str()))
        .collect();
    let selects = |gateway: &Config<networking::Gateway>| {
        let Some(services) = gateway.meta.annotations.get(SERVICE_ANNOTATION) else {
            let pairs = gateway.spec.selector.iter().map(|(k, v)| (k.as_str(), v.as_str()));
            return select::matches(pairs, labels);
        };
        let parent = converted_annotation(&gateway.meta, PARENT_NAMESPACE_ANNOTATION);
        let parent = parent.filter(|parent| !parent.is_empty());
        let namespace = parent.map_or(gateway.meta.namespace().as_str(), SmolStr::as_str);
        services.split(',').any(|host| served.contains(&(namespace, host)))
    };
    let mut rows: Vec<_> = if ctx.mesh.installation.features.pilot_scope_gateway_to_namespace {
        let own = ctx.mesh.gateways_by_namespace.get(ctx.cx, &proxy.namespace);
        own.map(|(_, row)| row).filter(|row| selects(row)).collect()
    } else {
        let all = ctx.mesh.gateways.iter(ctx.cx);
        all.map(|(_, row)| row).filter(|row| selects(row)).collect()
    };
    rows.sort_by_key(|row| row.meta.age_order());
    rows.into_iter().map(|row| row.meta.key.clone()).collect()
}

/// Returns the extensions of a workload in the order of application.
pub fn attached_extensions(ctx: &BuildContext, subject: &Subject) -> Shared<[ExtensionId]> {
    let (cx, mesh) = (ctx.cx, ctx.mesh);
    let root = policy::root_namespace(cx, mesh);
    let plugins = policy::attached::<WasmPlugin>(cx, mesh, subject);
    let extensions = policy::attached::<TrafficExtension>(cx, mesh, subject);
    let plugins = plugins.into_iter().map(ExtensionId::WasmPlugin);
    let extensions = extensions.into_iter().map(ExtensionId::TrafficExtension);
    let mut found: Vec<_> = plugins
        .chain(extensions)
        .filter_map(|id| mesh.extension_filters.get(cx, &id).map(|row| (id, row)))
        .collect();
    let order = |id: &ExtensionId| namespace_order(subject, &root, id.namespace());
    found.sort_by(|(a, a_row), (b, b_row)| extension_order(order(a), a_row).cmp(&extension_order(order(b), b_row)));
    found.into_iter().map(|(id, _)| id).collect::<Vec<_>>().into()
}

/// Returns the sort key: phase; higher priority first, no priority last; namespace; age and name.
fn extension_order(namespace: usize, row: &ExtensionFilter) -> impl Ord {
    let priority = Reverse(row.priority.unwrap_or(i32::MIN));
    (row.phase, priority, namespace, row.creation, &row.name)
}

/// Returns the position of a namespace: that of the workload, the root namespace, then those of the services.
///
/// Parity (pilot/pkg/model/push_context.go, TrafficExtensionsByListenerInfo).
fn namespace_order(subject: &Subject, root: &Namespace, namespace: &Namespace) -> usize {
    let services = subject.services.iter().map(|service| &service.namespace);
    let mut order = [&subject.namespace, root].into_iter().chain(services);
    order.position(|known| known == namespace).unwrap_or(usize::MAX)
}
