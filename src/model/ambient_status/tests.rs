use super::*;
use crate::model::{
    Change, Installation, World,
    features::Features,
    fixture::{self, folder, key},
};

const MESH: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {name: istio-waypoint}
spec: {controllerName: istio.io/mesh-controller}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {name: istio}
spec: {controllerName: istio.io/gateway-controller}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: own, namespace: shop}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: IPAddress, value: 10.0.0.9}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: private, namespace: infra}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: IPAddress, value: 10.0.0.8}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: workloads, namespace: shop, labels: {istio.io/waypoint-for: workload}}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: IPAddress, value: 10.0.0.7}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio.io/use-waypoint: own}}
---
apiVersion: v1
kind: Namespace
metadata: {name: bare}
---
apiVersion: v1
kind: Service
metadata: {name: own, namespace: shop, labels: {gateway.istio.io/managed: istio.io-mesh-controller}}
spec: {clusterIP: 10.0.0.9, ports: [{port: 15008, name: mesh}]}
---
apiVersion: v1
kind: Service
metadata: {name: far, namespace: bare}
spec: {clusterIP: 10.0.0.5, ports: [{port: 80, name: http}]}
";

fn installation(status: bool) -> Installation {
    Installation {
        features: Features {
            pilot_enable_ambient: true,
            pilot_enable_ambient_waypoints: true,
            ambient_enable_status: status,
            ..Features::default()
        },
        ..Installation::default()
    }
}

fn world_of(more: &str) -> World {
    let text = format!("{MESH}---\n{more}");
    fixture::folder_world(installation(true), &[("kube.yaml", &text)])
}

/// Returns the conditions of an object, `namespace/name`, as text.
fn conditions_in(mesh: &MeshSnapshot, kind: Kind, name: &str) -> Vec<String> {
    let target = StatusTarget {
        kind,
        object: key(name),
    };
    let row = mesh.ambient_statuses.get(&Cx::untracked(), &target);
    let row = row.map(|row| row.conditions.clone()).unwrap_or_default();
    let present = row.into_iter().filter_map(|(name, condition)| Some((name, condition?)));
    present
        .map(|(name, one)| format!("{name} {} {}: {}", one.is_true, one.reason, one.message))
        .collect()
}

fn conditions(kind: Kind, name: &str, manifest: &str) -> Vec<String> {
    conditions_in(&world_of(manifest).snapshot(), kind, name)
}

/// Returns the condition of a Service `shop/a` with these labels.
fn of_service(labels: &str) -> Vec<String> {
    let manifest = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: a, namespace: shop, labels: {{{labels}}}}}\n\
         spec: {{clusterIP: 10.0.1.1, ports: [{{port: 80, name: http}}]}}\n"
    );
    conditions(Kind::Service, "shop/a", &manifest)
}

#[test]
fn services_name_their_waypoint_or_the_reason_for_none() {
    let bound = "istio.io/WaypointBound";
    let attached = format!("{bound} true WaypointAccepted: Successfully attached to waypoint shop/own");
    assert_eq!(of_service(""), [attached.as_str()], "by the namespace");
    let through = format!("{attached}. Ingress traffic will traverse the waypoint");
    assert_eq!(of_service("istio.io/ingress-use-waypoint: 'true'"), [through.as_str()]);
    let around = format!(
        "{attached}. Ingress traffic is not using the waypoint, set the istio.io/ingress-use-waypoint label to true if \
         desired."
    );
    for value in ["'false'", "maybe"] {
        assert_eq!(
            of_service(&format!("istio.io/ingress-use-waypoint: {value}")),
            [around.as_str()]
        );
    }
    assert_eq!(of_service("istio.io/use-waypoint: none"), [""; 0]);
    assert_eq!(
        of_service("istio.io/use-waypoint: gone"),
        [format!(
            "{bound} false WaypointIsNotReady: waypoint \"shop/gone\" is not ready"
        )]
    );
    for (labels, name) in [
        ("istio.io/use-waypoint: None", "shop/None"),
        ("istio.io/use-waypoint: ''", "shop/"),
        (
            "istio.io/use-waypoint: own, istio.io/use-waypoint-namespace: ''",
            "/own",
        ),
    ] {
        assert_eq!(
            of_service(labels),
            [format!(
                "{bound} false WaypointIsNotReady: waypoint \"{name}\" is not ready"
            )]
        );
    }
    assert_eq!(
        of_service("istio.io/use-waypoint: private, istio.io/use-waypoint-namespace: infra"),
        [format!(
            "{bound} false AttachmentDenied: we are not permitted to attach to waypoint \"infra/private\" (missing \
             allowedRoutes?)"
        )]
    );
    assert_eq!(
        of_service("istio.io/use-waypoint: workloads"),
        [format!(
            "{bound} false UnsupportedTrafficType: attempting to bind to traffic type \"service\" which the waypoint \
             \"shop/workloads\" does not support"
        )]
    );
    let mesh = world_of("").snapshot();
    assert_eq!(
        conditions_in(&mesh, Kind::Service, "shop/own"),
        [""; 0],
        "a waypoint has none"
    );
}

#[test]
fn service_entries_say_that_a_waypoint_is_missing() {
    let of = |name: &str, namespace: &str, annotations: &str, hosts: &str| {
        let manifest = format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\n\
             metadata: {{name: {name}, namespace: {namespace}, annotations: {{{annotations}}}}}\n\
             spec: {{hosts: [{hosts}], resolution: DNS, ports: [{{number: 80, name: http, protocol: HTTP}}]}}\n"
        );
        conditions(Kind::ServiceEntry, &format!("{namespace}/{name}"), &manifest)
    };
    let missing = "istio.io/WaypointMissing true";
    assert_eq!(
        of("a", "bare", "", "one.example.com, '*.example.com'"),
        [format!(
            "{missing} NoWaypointForWildcardService: ServiceEntry will not apply until it is bound to a valid waypoint."
        )]
    );
    assert_eq!(
        of(
            "a",
            "bare",
            "istio.io/connect-strategy: RACE_FIRST_TCP_CONNECT",
            "'*.example.com'"
        ),
        [format!(
            "{missing} NoWaypointForRacingConnectStrategy: ServiceEntry has a non-default connect strategy but no \
             waypoint bound. A waypoint is required for connect strategies to take effect for ambient clients."
        )]
    );
    assert_eq!(of("a", "bare", "", "one.example.com"), [""; 0]);
    let bound = of("a", "shop", "", "'*.example.com'");
    assert_eq!(
        bound,
        ["istio.io/WaypointBound true WaypointAccepted: Successfully attached to waypoint shop/own"]
    );
}

#[test]
fn service_entries_without_a_host_of_their_own_have_no_conditions() {
    let entry = |name: &str, year: u32, hosts: &str| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\n\
             metadata: {{name: {name}, namespace: shop, creationTimestamp: '{year}-01-01T00:00:00Z'}}\n\
             spec: {{hosts: [{hosts}], resolution: DNS, ports: [{{number: 80, name: http, protocol: HTTP}}]}}\n"
        )
    };
    let objects = [
        entry("old", 2020, "a.example.com"),
        entry("new", 2021, "a.example.com"),
        entry("both", 2022, "a.example.com, b.example.com"),
        entry("service", 2019, "own.shop.svc.cluster.local"),
    ];
    let mut world = world_of(&objects.join("---\n"));
    let of = |world: &World, name: &str| conditions_in(&world.snapshot(), Kind::ServiceEntry, &format!("shop/{name}"));
    let attached = "istio.io/WaypointBound true WaypointAccepted: Successfully attached to waypoint shop/own";
    let (attached, none): (&[&str], &[&str]) = (&[attached], &[]);
    for (name, want) in [("old", attached), ("both", attached), ("new", none), ("service", none)] {
        assert_eq!(of(&world, name), want, "{name}");
    }
    let target = StatusTarget {
        kind: Kind::ServiceEntry,
        object: key("shop/new"),
    };
    let mesh = world.snapshot();
    let row = mesh.ambient_statuses.get(&Cx::untracked(), &target).expect("a row");
    let want: [(&str, Option<Condition>); 2] = [(WAYPOINT_BOUND, None), (WAYPOINT_MISSING, None)];
    assert_eq!(row.conditions, want, "those of an earlier time are removed");
    world.commit(vec![Change::Remove(Kind::ServiceEntry, key("shop/old"))]);
    assert_eq!(of(&world, "new"), attached);
}

#[test]
fn workload_entries_name_waypoints_for_workloads() {
    let of = |labels: &str| {
        let manifest = format!(
            "apiVersion: networking.istio.io/v1\nkind: WorkloadEntry\n\
             metadata: {{name: a, namespace: shop, labels: {{{labels}}}}}\nspec: {{address: 10.0.2.1}}\n"
        );
        conditions(Kind::WorkloadEntry, "shop/a", &manifest)
    };
    assert_eq!(of(""), [""; 0], "the waypoint of the namespace is for services");
    assert_eq!(
        of("istio.io/use-waypoint: workloads"),
        ["istio.io/WaypointBound true WaypointAccepted: Successfully attached to waypoint shop/workloads"]
    );
    assert_eq!(
        of("istio.io/use-waypoint: own"),
        [
            "istio.io/WaypointBound false UnsupportedTrafficType: attempting to bind to traffic type \"workload\" which \
             the waypoint \"shop/own\" does not support"
        ]
    );
}

/// Returns the condition of a policy in a namespace with this specification.
fn of_policy(namespace: &str, annotations: &str, spec: &str) -> String {
    let manifest = format!(
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
         metadata: {{name: p, namespace: {namespace}, generation: 3, annotations: {{{annotations}}}}}\nspec: {spec}\n"
    );
    let mesh = world_of(&manifest).snapshot();
    let target = StatusTarget {
        kind: Kind::AuthorizationPolicy,
        object: key(&format!("{namespace}/p")),
    };
    let row = mesh.ambient_statuses.get(&Cx::untracked(), &target).expect("a row");
    let generations: Vec<i64> = row
        .conditions
        .iter()
        .filter_map(|(_, one)| Some(one.as_ref()?.observed_generation))
        .collect();
    assert_eq!(generations, [3]);
    let mut all = conditions_in(&mesh, Kind::AuthorizationPolicy, &format!("{namespace}/p"));
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

#[test]
fn policies_without_references_are_for_ztunnels() {
    let of = |spec: &str| of_policy("shop", "", spec);
    assert_eq!(of("{}"), "ZtunnelAccepted true Accepted: attached to ztunnel");
    assert_eq!(
        of("{action: CUSTOM, provider: {name: a}, rules: [{}]}"),
        "ZtunnelAccepted false UnsupportedValue: ztunnel does not support the CUSTOM action"
    );
    assert_eq!(
        of("{action: AUDIT, rules: [{}]}"),
        "ZtunnelAccepted false UnsupportedValue: ztunnel does not support the AUDIT action"
    );
    let rules = "[{to: [{operation: {paths: [/a], methods: [GET]}}], from: [{source: {requestPrincipals: ['*']}}]}, \
                 {when: [{key: 'request.headers[a]', values: [b]}, {key: source.ip, values: [10.0.0.1]}]}]";
    let start = "ZtunnelAccepted true UnsupportedValue: ztunnel does not support HTTP attributes (found: methods, paths, \
                 request.headers[a], requestPrincipals). In ambient mode you must use a waypoint proxy to enforce HTTP \
                 rules. ";
    assert_eq!(
        of(&format!("{{action: ALLOW, rules: {rules}}}")),
        format!(
            "{start}Within an ALLOW policy, rules matching HTTP attributes are omitted. This will be more restrictive \
             than requested."
        )
    );
    assert_eq!(
        of(&format!("{{action: DENY, rules: {rules}}}")),
        format!(
            "{start}DENY policy with HTTP attributes is enforced without the HTTP rules. This will be more restrictive \
             than requested."
        )
    );
    assert_eq!(
        of("{rules: [{from: [{source: {namespaces: [web], trustDomains: [td], notTrustDomains: [other]}}]}]}"),
        "ZtunnelAccepted true UnsupportedValue: ztunnel does not support HTTP attributes (found: notTrustDomains, \
         trustDomains). In ambient mode you must use a waypoint proxy to enforce HTTP rules. Within an ALLOW policy, \
         rules matching HTTP attributes are omitted. This will be more restrictive than requested."
    );
    assert_eq!(
        of_policy("shop", "istio.io/dry-run: 'true'", "{}"),
        "ZtunnelAccepted false UnsupportedValue: found policy \"shop/p\" using dry-run annotation, but support for \
         ambient dry-run authorizationPolicies isn't enabled"
    );
}

#[test]
fn policies_with_references_are_for_waypoints() {
    let of = |namespace: &str, references: &str| of_policy(namespace, "", &format!("{{targetRefs: [{references}]}}"));
    let service = |name: &str| format!("{{group: '', kind: Service, name: {name}}}");
    let class = |name: &str| format!("{{group: gateway.networking.k8s.io, kind: GatewayClass, name: {name}}}");
    let gateway = |name: &str| format!("{{group: gateway.networking.k8s.io, kind: Gateway, name: {name}}}");
    let cases = [
        (
            "shop",
            service("gone"),
            "false TargetNotFound: Service shop/gone was not found",
        ),
        (
            "bare",
            service("far"),
            "false AncestorNotBound: Service bare/far is not bound to a waypoint",
        ),
        ("shop", gateway("own"), "true Accepted: bound to shop/own"),
        ("shop", gateway("gone"), "false TargetNotFound: not bound"),
        (
            "shop",
            class("istio-waypoint"),
            "false Invalid: AuthorizationPolicy must be in the root namespace `istio-system` when referencing a \
             GatewayClass",
        ),
        (
            "istio-system",
            class("istio-waypoint"),
            "true Accepted: bound to istio-waypoint",
        ),
        (
            "istio-system",
            class("istio"),
            "false Invalid: GatewayClass must use controller name `istio.io/mesh-controller` for waypoints",
        ),
        ("istio-system", class("gone"), "false TargetNotFound: not bound"),
        (
            "shop",
            [gateway("own"), service("gone"), gateway("gone")].join(", "),
            "true PartiallyInvalid: Invalid targetRefs: Service.core:shop/gone, \
             Gateway.gateway.networking.k8s.io:shop/gone",
        ),
        (
            "shop",
            [gateway("own"), gateway("workloads")].join(", "),
            "true Accepted: ",
        ),
        (
            "bare",
            [service("a"), service("b")].join(", "),
            "false Invalid: Invalid targetRefs: Service.core:bare/a, Service.core:bare/b",
        ),
    ];
    for (namespace, references, want) in cases {
        assert_eq!(
            of(namespace, &references),
            format!("WaypointAccepted {want}"),
            "{references}"
        );
    }
}

#[test]
fn conditions_follow_gateways_and_namespaces() {
    let mut world = world_of("");
    let far = |world: &World| conditions_in(&world.snapshot(), Kind::Service, "bare/far");
    assert_eq!(far(&world), [""; 0]);
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: bare, labels: {istio.io/use-waypoint: w}}\n";
    let rows = folder(&installation(true), &[("n.yaml", namespace)]);
    world.commit(rows.into_iter().map(Change::Upsert).collect());
    assert_eq!(
        far(&world),
        ["istio.io/WaypointBound false WaypointIsNotReady: waypoint \"bare/w\" is not ready"]
    );
    let gateway = "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: w, namespace: bare}\n\
                   spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}\n\
                   status: {addresses: [{type: IPAddress, value: 10.0.0.4}]}\n";
    let rows = folder(&installation(true), &[("g.yaml", gateway)]);
    world.commit(rows.into_iter().map(Change::Upsert).collect());
    assert_eq!(
        far(&world),
        ["istio.io/WaypointBound true WaypointAccepted: Successfully attached to waypoint bare/w"]
    );
}

#[test]
fn there_are_no_conditions_without_the_feature() {
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: shop}\n\
                   spec: {clusterIP: 10.0.1.1, ports: [{port: 80, name: http}]}\n";
    let text = format!("{MESH}---\n{service}");
    for has_feature in [false, true] {
        let mesh = fixture::folder_world(installation(has_feature), &[("kube.yaml", &text)]).snapshot();
        assert_eq!(mesh.ambient_statuses.is_empty(), !has_feature);
    }
}
