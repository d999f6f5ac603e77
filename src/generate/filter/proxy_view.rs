//! Attributes of a proxy that filter stacks depend on, shared by all proxies with equal ones.

use std::{collections::BTreeMap, time::Duration};

use smol_str::SmolStr;

use crate::{
    api::Config,
    base::{Hashed, Labels, MessageKey, Namespace, ObjectKey, Shared, duration},
    generate::{
        BuildContext,
        patch::PatchRef,
        proxy::{Extensions, IstioVersion, MetadataKey, NodeMetadata, ProxyType},
        proxy_class::{ProxyClass, names_services_by_conventions},
        selected::{Selected, attached_extensions},
    },
    model::{
        extension::ExtensionId,
        policy::{self, Attach, Subject},
        selector::Selects,
    },
    proto::istio::{
        mesh::v1alpha1::{Tracing, proxy_config::ProxyHeaders},
        security::v1beta1::{AuthorizationPolicy, RequestAuthentication},
        telemetry::v1alpha1::Telemetry,
    },
};

/// Direction of a filter chain's traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ListenerClass {
    /// To the workload of a sidecar.
    SidecarInbound,
    /// From the workload of a sidecar.
    SidecarOutbound,
    /// Through a gateway.
    Gateway,
}

/// The number of inbound ports that every proxy counts as having.
const USUAL_INBOUND_PORTS: usize = 4;

/// Attributes of a proxy that its filters depend on, in all listeners.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FilterProxyView {
    /// Type.
    pub proxy_type: ProxyType,
    /// Release, for features that older releases reject.
    pub version: IstioVersion,
    /// Extensions that it can run.
    pub extensions: Extensions,
    /// Namespace.
    pub namespace: Namespace,
    /// `IDLE_TIMEOUT` of the node, if valid.
    pub idle_timeout: Option<Duration>,
    /// True if the node accepts HTTP/1.0 (`HTTP10=1`).
    pub http10: bool,
    /// `proxyHeaders` of the effective ProxyConfig.
    pub proxy_headers: MessageKey<ProxyHeaders>,
    /// `tracing` of the effective ProxyConfig.
    pub tracing: MessageKey<Tracing>,
    /// Literal tags of traces.
    pub tags: ServiceTags,
    /// Service name in traces: the node's cluster.
    pub service_cluster: SmolStr,
    /// Service name in traces by OpenTelemetry's semantic conventions; empty unless some provider uses these, because
    /// it may contain the pod's name.
    pub otel_service_name: SmolStr,
    /// True for a waypoint that tells the services behind it who the client is.
    pub forwards_client_identity: bool,
    /// True for a gateway whose routes use InferencePools.
    pub picks_endpoints: bool,
    /// Telemetries that apply: of the root namespace, of its own namespace, then those with a selector.
    pub telemetries: Shared<[ObjectKey]>,
    /// Security policies that apply.
    pub security: SecurityPolicies,
    /// Upper bound of the inbound ports whose chains repeat the filters, a power of two.
    pub inbound_ports: usize,
    /// WasmPlugins and TrafficExtensions that apply, in order.
    pub extension_filters: Shared<[ExtensionId]>,
    /// EnvoyFilter patches of listeners that apply, in order.
    pub listener_patches: Shared<[PatchRef]>,
    /// EnvoyFilter patches of routes that apply to inline routes, in order.
    pub route_patches: Shared<[PatchRef]>,
}

/// Security policies that apply to a proxy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SecurityPolicies {
    /// AuthorizationPolicies: root namespace first, oldest first.
    pub authorization: Shared<[ObjectKey]>,
    /// RequestAuthentications: own namespace first, oldest first.
    pub request_authentication: Shared<[ObjectKey]>,
}

impl SecurityPolicies {
    /// Returns the policies that apply to a workload.
    pub fn of(ctx: &BuildContext, subject: &Subject) -> Self {
        let (cx, mesh) = (ctx.cx, ctx.mesh);
        let authorization = policy::attached::<AuthorizationPolicy>(cx, mesh, subject);
        let authentication = policy::attached::<RequestAuthentication>(cx, mesh, subject);
        Self {
            authorization: authorization.into(),
            request_authentication: authentication.into(),
        }
    }
}

/// Tags by which a proxy identifies itself in traces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ServiceTags {
    /// Label `service.istio.io/canonical-revision`, default `latest`.
    pub revision: SmolStr,
    /// Label `service.istio.io/canonical-name`, default `unknown`.
    pub service: SmolStr,
    /// Mesh, default `unknown`.
    pub mesh: SmolStr,
    /// Namespace, default `default`.
    pub namespace: SmolStr,
    /// Cluster, default `unknown`.
    pub cluster: SmolStr,
}

impl FilterProxyView {
    /// Returns the view of a selected proxy.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Hashed<Self> {
        let proxy = selected.proxy;
        let subject = &selected.subject;
        Hashed::new(Self {
            proxy_type: proxy.proxy_type,
            version: proxy.version,
            extensions: proxy.extensions.clone(),
            namespace: proxy.namespace.clone(),
            idle_timeout: idle_timeout(proxy),
            http10: proxy.metadata_value(MetadataKey::Http10) == "1",
            proxy_headers: MessageKey::new(selected.proxy_config.proxy_headers.clone().unwrap_or_default()),
            tracing: MessageKey::new(selected.proxy_config.tracing.clone().unwrap_or_default()),
            tags: ServiceTags::of(proxy, &selected.labels),
            service_cluster: proxy.node_cluster.clone(),
            otel_service_name: if names_services_by_conventions(ctx) {
                otel_service_name(selected.class)
            } else {
                SmolStr::default()
            },
            forwards_client_identity: subject.is_waypoint && proxy.forwards_client_identity,
            picks_endpoints: selected.inference_pools(ctx).next().is_some(),
            telemetries: telemetries(ctx, subject),
            security: SecurityPolicies::of(ctx, subject),
            inbound_ports: USUAL_INBOUND_PORTS,
            extension_filters: selected.extensions.clone(),
            listener_patches: selected.patches.listeners.clone(),
            route_patches: selected.patches.routes.clone(),
        })
    }
}

impl FilterProxyView {
    /// Returns the view of a waypoint for one service, to which policies may refer.
    pub fn for_service(base: &Hashed<Self>, ctx: &BuildContext, subject: &Subject) -> Hashed<Self> {
        let telemetries = telemetries(ctx, subject);
        let security = SecurityPolicies::of(ctx, subject);
        let extension_filters = attached_extensions(ctx, subject);
        if telemetries == base.telemetries && security == base.security && extension_filters == base.extension_filters {
            return base.clone();
        }
        Hashed::new(Self {
            telemetries,
            security,
            extension_filters,
            ..Self::clone(base)
        })
    }

    /// Returns the view for chains of this many inbound ports. The number is rounded up to a power of two: it decides
    /// only whether the filters are too large, so few changes of ports change the view.
    pub fn with_inbound_ports(base: &Hashed<Self>, ports: usize) -> Hashed<Self> {
        let inbound_ports = ports.max(USUAL_INBOUND_PORTS).next_power_of_two();
        if inbound_ports == base.inbound_ports {
            return base.clone();
        }
        Hashed::new(Self {
            inbound_ports,
            ..Self::clone(base)
        })
    }

    /// Returns the view for the termination of tunnels. With layered authorization, the policies of the workload itself
    /// apply there, also at a waypoint.
    ///
    /// Parity (pilot/pkg/networking/plugin/authz/authorization.go): a waypoint counts as a gateway, whose policies may
    /// have selectors.
    pub fn for_tunnels(base: &Hashed<Self>, ctx: &BuildContext, subject: &Subject) -> Hashed<Self> {
        let features = &ctx.mesh.installation.features;
        if !features.enable_layered_waypoint_authorization_policies || !subject.is_waypoint {
            return base.clone();
        }
        let workload = Subject::workload(subject.namespace.clone(), subject.labels.clone());
        let security = SecurityPolicies::of(ctx, &workload);
        if security == base.security {
            return base.clone();
        }
        Hashed::new(Self {
            security,
            ..Self::clone(base)
        })
    }

    /// Returns the view for chains without a connection manager. It has no attribute that names the workload in traces
    /// or headers, so workloads of a namespace share it.
    pub fn without_http(&self) -> Self {
        Self {
            http10: false,
            proxy_headers: MessageKey::new(ProxyHeaders::default()),
            tracing: MessageKey::new(Tracing::default()),
            tags: ServiceTags::default(),
            service_cluster: SmolStr::default(),
            otel_service_name: SmolStr::default(),
            picks_endpoints: false,
            ..self.clone()
        }
    }

    /// Returns the view without what objects of users add to filters, for chains that deny all traffic.
    pub fn without_policies(&self) -> Self {
        Self {
            proxy_headers: MessageKey::new(ProxyHeaders::default()),
            tracing: MessageKey::new(Tracing::default()),
            telemetries: Vec::new().into(),
            security: SecurityPolicies {
                authorization: Vec::new().into(),
                request_authentication: Vec::new().into(),
            },
            extension_filters: Vec::new().into(),
            ..self.clone()
        }
    }
}

/// Returns the Telemetries of a workload: the oldest general one of the root namespace and of its own namespace, then
/// those of its own that select or refer to it.
///
/// Parity (pilot/pkg/model/telemetry.go, applicableTelemetries): for a service behind a waypoint of another namespace,
/// the general one of the service's namespace follows, even if that is the root namespace again. Telemetries with
/// references come from that namespace alone.
fn telemetries(ctx: &BuildContext, subject: &Subject) -> Shared<[ObjectKey]> {
    let index = &ctx.mesh.telemetries_by_namespace;
    let general = |namespace: &Namespace| {
        let rows = index.get(ctx.cx, namespace).map(|(_, row)| row);
        let oldest = rows
            .filter(|row| is_general(row))
            .min_by_key(|row| row.meta.age_order());
        oldest.map(|row| row.meta.key.clone())
    };
    let root = policy::root_namespace(ctx.cx, ctx.mesh);
    let of_root = general(&root);
    let own = Some(&subject.namespace).filter(|namespace| **namespace != root);
    let services = subject.services.iter().map(|service| &service.namespace);
    let others = services.filter(|namespace| **namespace != subject.namespace);
    let of_own = own.into_iter().chain(others).filter_map(general);
    let service = subject.services.last();
    let attaching = service.map_or(&subject.namespace, |service| &service.namespace);
    let special = policy::attached::<Telemetry>(ctx.cx, ctx.mesh, subject)
        .into_iter()
        .filter(|key| key.namespace == *attaching)
        .filter(|key| {
            ctx.mesh
                .telemetries
                .get(ctx.cx, key)
                .is_some_and(|row| !is_general(row))
        });
    let keys: Vec<ObjectKey> = of_root.into_iter().chain(of_own).chain(special).collect();
    keys.into()
}

/// Returns true without selector and references, for the whole namespace.
fn is_general(row: &Config<Telemetry>) -> bool {
    let selector = row.spec.selector();
    selector.is_none_or(BTreeMap::is_empty) && row.spec.target_refs().is_empty()
}

/// Parses `IDLE_TIMEOUT` in Go's syntax; invalid or negative values count as absent.
fn idle_timeout(proxy: &NodeMetadata) -> Option<Duration> {
    let text = proxy.metadata_value(MetadataKey::IdleTimeout);
    (!text.is_empty()).then(|| duration::parse(&text).ok()).flatten()
}

impl ServiceTags {
    fn of(proxy: &NodeMetadata, labels: &Labels) -> Self {
        let label = |key: &str, default: &'static str| or(labels.get(key).cloned().unwrap_or_default(), default);
        Self {
            revision: label("service.istio.io/canonical-revision", "latest"),
            service: label("service.istio.io/canonical-name", "unknown"),
            mesh: or(proxy.mesh_id.clone(), "unknown"),
            namespace: or(proxy.metadata_value(MetadataKey::Namespace), "default"),
            cluster: or(SmolStr::new(proxy.cluster.as_str()), "unknown"),
        }
    }
}

fn or(text: SmolStr, default: &'static str) -> SmolStr {
    if text.is_empty() {
        SmolStr::new_static(default)
    } else {
        text
    }
}

/// Returns `service.name` by OpenTelemetry's conventions for Kubernetes.
fn otel_service_name(class: &ProxyClass) -> SmolStr {
    let (proxy, labels) = (&class.node, &class.labels);
    let containers = proxy.metadata_value(MetadataKey::AppContainers);
    [
        Some(proxy.otel_service_name.clone()),
        labels.get("app.kubernetes.io/instance").cloned(),
        labels.get("app.kubernetes.io/name").cloned(),
        Some(proxy.workload_name.clone()),
        Some(class.pod.clone()),
        (!containers.contains(',')).then_some(containers),
    ]
    .into_iter()
    .flatten()
    .find(|name| !name.is_empty())
    .unwrap_or(SmolStr::new_static("unknown_service"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        generate::{ScopeTables, build_context::PushMemo},
        model::{Installation, fixture, policy::TargetService, service::Registry},
        table::{Cx, RelationId, Table},
    };

    const TELEMETRIES: &str = "
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: mesh, namespace: istio-system}
spec: {}
---
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: general, namespace: shop}
spec: {}
---
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: gateway, namespace: shop}
spec: {targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: waypoint}]}
---
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: general, namespace: data}
spec: {}
---
apiVersion: telemetry.istio.io/v1
kind: Telemetry
metadata: {name: service, namespace: data}
spec: {targetRefs: [{group: '', kind: Service, name: db}]}
";

    fn found(subject: &Subject) -> Vec<String> {
        let world = fixture::folder_world(Installation::default(), &[("telemetries.yaml", TELEMETRIES)]);
        let (cx, mesh) = (Cx::untracked(), world.snapshot());
        let ctx = BuildContext {
            cx: &cx,
            mesh: &mesh,
            scopes: &ScopeTables {
                all: Table::new(RelationId(0)),
                tcp: Table::new(RelationId(0)),
            },
            memo: &PushMemo::default(),
        };
        let keys = telemetries(&ctx, subject);
        keys.iter()
            .map(|key| format!("{}/{}", key.namespace, key.name))
            .collect()
    }

    #[test]
    fn telemetries_of_a_service_are_attached_in_its_namespace() {
        let waypoint = Subject {
            is_waypoint: true,
            ..Subject::workload(
                "shop".into(),
                fixture::labels(&[(policy::GATEWAY_NAME_LABEL, "waypoint")]),
            )
        };
        let service = |namespace: &str, name: &str| TargetService {
            registry: Registry::Kubernetes,
            namespace: namespace.into(),
            name: name.into(),
        };
        let own = ["istio-system/mesh", "shop/general", "shop/gateway"];
        assert_eq!(found(&waypoint), own);
        assert_eq!(found(&waypoint.clone().with_service(service("shop", "web"))), own);
        assert_eq!(
            found(&waypoint.clone().with_service(service("data", "db"))),
            ["istio-system/mesh", "shop/general", "data/general", "data/service"]
        );
        assert_eq!(
            found(&waypoint.with_service(service("istio-system", "ingress"))),
            ["istio-system/mesh", "shop/general", "istio-system/mesh"]
        );
    }
}
