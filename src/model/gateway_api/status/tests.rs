//! A mistake of each family in routes, and how it is reported. Objects are those of a small mesh: a Gateway, a service
//! of two namespaces, and a route that each test changes.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Content, Revisions, Status, StatusKey, Statuses};
use crate::{
    api::{Kind, document},
    base::{ClusterId, Namespace, ObjectKey, SmolStr},
    model::{
        Change, Installation, MeshSnapshot, World,
        gateway_api::{class::Controller, listener::SERVICE_ACCOUNT_ANNOTATION},
    },
    table::Cx,
};

mod certificates;
mod invalid;
mod limits;
mod references;

const GROUP: &str = "gateway.networking.k8s.io/v1";

fn cluster() -> ClusterId {
    Installation::default().cluster
}

/// A world with objects.
fn world(objects: &[Value]) -> World {
    let mut world = World::new(Installation::default());
    put(&mut world, objects);
    world
}

fn put(world: &mut World, objects: &[Value]) -> Arc<MeshSnapshot> {
    let rows = objects
        .iter()
        .flat_map(|object| document::parse(&cluster(), object).rows);
    world.commit(rows.map(Change::Upsert).collect()).snapshot
}

fn object(kind: &str, namespace: &str, spec: &Value) -> Value {
    json!({"apiVersion": GROUP, "kind": kind, "spec": spec,
        "metadata": {"name": "x", "namespace": namespace, "generation": 3}})
}

fn gateway(listeners: Value) -> Value {
    object(
        "Gateway",
        "gw",
        &json!({"gatewayClassName": "istio", "listeners": listeners}),
    )
}

fn service(namespace: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": namespace},
        "spec": {"ports": [{"name": "http", "port": 80}]}})
}

/// A host that is declared in a namespace and visible in all.
fn service_entry(namespace: &str, host: &str) -> Value {
    json!({"apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": {"name": "x", "namespace": namespace},
        "spec": {"hosts": [host], "ports": [{"name": "https", "number": 443, "protocol": "HTTPS"}]}})
}

/// The mesh with a route: its kind, and its parents, rules and hosts.
fn mesh(kind: &str, spec: &Value) -> World {
    let all = json!({"namespaces": {"from": "All"}});
    let listeners = json!([
        {"name": "a", "port": 80, "protocol": "HTTP", "hostname": "a.test", "allowedRoutes": all},
        {"name": "own", "port": 81, "protocol": "HTTP", "hostname": "own.test"},
        {"name": "grpc", "port": 82, "protocol": "HTTP", "hostname": "g.test",
            "allowedRoutes": {"namespaces": {"from": "All"}, "kinds": [{"kind": "GRPCRoute"}]}},
    ]);
    world(&[
        gateway(listeners),
        service("app"),
        service("far"),
        service_entry("app", "own.test"),
        service_entry("far", "far.test"),
        object(kind, "app", spec),
    ])
}

fn status(world: &World, kind: Kind, namespace: &str) -> Option<Status> {
    let mut statuses = Statuses::new(Revisions::default());
    statuses.update(&world.snapshot(), Vec::new());
    let object = ObjectKey::new(&cluster(), namespace, "x");
    statuses
        .get(&StatusKey { kind, object })
        .map(|status| Status::clone(status))
}

/// Returns the conditions of the first entry of HTTPRoute `app/x`, as `reason: message`.
fn conditions_of(world: &World) -> Vec<String> {
    let status = status(world, Kind::HttpRoute, "app").expect("the route is converted");
    let Content::Entries(entries) = status.content else {
        panic!("routes have entries");
    };
    assert_eq!(status.generation, 3);
    let conditions = &entries.entries.first().expect("the route has a parent").conditions;
    let texts = conditions.iter().map(|it| format!("{}: {}", it.reason, it.message));
    texts.collect()
}

/// Returns `Accepted` and `ResolvedRefs` of the route's first entry, as `reason: message`.
fn reported(spec: &Value) -> [String; 2] {
    let conditions = conditions_of(&mesh("HTTPRoute", spec));
    [0, 1].map(|index| conditions[index].clone())
}

/// A route with a parent and a rule.
fn route(parent: &Value, host: &str, rule: &Value) -> Value {
    json!({"parentRefs": [parent], "hostnames": [host], "rules": [rule]})
}

fn attached(rule: &Value) -> [String; 2] {
    reported(&route(
        &json!({"name": "x", "namespace": "gw", "sectionName": "a"}),
        "a.test",
        rule,
    ))
}

const VALID: &str = "Accepted: Route was valid";
const RESOLVED: &str = "ResolvedRefs: All references resolved";

#[test]
fn parents_are_checked_in_the_order_of_istio() {
    let rule = json!({"backendRefs": [{"name": "web", "port": 80}]});
    let to = |more: Value, host: &str| {
        let mut parent = json!({"name": "x", "namespace": "gw"});
        for (field, value) in more.as_object().into_iter().flatten() {
            parent[field] = value.clone();
        }
        let [accepted, resolved] = reported(&route(&parent, host, &rule));
        assert_eq!(resolved, RESOLVED);
        accepted
    };
    assert_eq!(to(json!({"sectionName": "a"}), "a.test"), VALID);
    assert_eq!(
        to(json!({"port": 9, "sectionName": "a"}), "a.test"),
        "NoMatchingParent: port 9 not found; port 9 not found; port 9 not found"
    );
    assert_eq!(
        to(json!({"sectionName": "no"}), "a.test"),
        "NoMatchingParent: sectionName \"no\" not found; sectionName \"no\" not found; sectionName \"no\" not found"
    );
    assert_eq!(
        to(json!({"sectionName": "a"}), "b.test"),
        "NoMatchingListenerHostname: no hostnames matched parent hostname \"a.test\""
    );
    assert_eq!(
        to(json!({"sectionName": "own"}), "own.test"),
        "NotAllowedByListeners: hostnames matched parent hostname \"own.test\", but namespace \"app\" is not allowed by \
         the parent"
    );
    assert_eq!(
        to(json!({"sectionName": "grpc"}), "g.test"),
        "NotAllowedByListeners: kind gateway.networking.k8s.io/v1/HTTPRoute is not allowed"
    );
    // A reference without a section is good if one listener is; a host that no listener has outranks other reasons.
    assert_eq!(to(json!({}), "a.test"), VALID);
    let mesh = |kind: &str, group: &str| {
        let parent = json!({"group": group, "kind": kind, "name": "no"});
        reported(&route(&parent, "a.test", &rule))[0].clone()
    };
    assert_eq!(
        mesh("Service", ""),
        "NoMatchingParent: parent service: \"no\" not found"
    );
    assert_eq!(
        mesh("ServiceEntry", "networking.istio.io"),
        "NoMatchingParent: parent service entry: \"no\" not found"
    );
}

#[test]
fn backends_are_checked() {
    let to = |backend: Value| attached(&json!({"backendRefs": [backend]}))[1].clone();
    assert_eq!(to(json!({"name": "web", "port": 80})), RESOLVED);
    assert_eq!(
        to(json!({"name": "no", "port": 80})),
        "BackendNotFound: backend(no.app.svc.cluster.local) not found"
    );
    assert_eq!(
        to(json!({"name": "web", "namespace": "far", "port": 80})),
        "RefNotPermitted: backendRef web/far not accessible to a HTTPRoute in namespace \"app\" (missing a \
         ReferenceGrant?)"
    );
    assert_eq!(
        to(json!({"name": "web.app", "port": 80})),
        "InvalidDestination: service name invalid; the name of the Service must be used, not the hostname."
    );
    assert_eq!(
        to(json!({"name": "web"})),
        "InvalidDestination: port is required in backendRef"
    );
    assert_eq!(
        to(json!({"group": "networking.istio.io", "kind": "Hostname", "name": "a.b", "namespace": "app", "port": 1})),
        "InvalidDestination: namespace may not be set with Hostname type"
    );
    let host = |name: &str| to(json!({"group": "networking.istio.io", "kind": "Hostname", "name": name, "port": 443}));
    assert_eq!(host("own.test"), RESOLVED);
    assert_eq!(host("far.test"), "BackendNotFound: backend(far.test) not found");
    assert_eq!(
        to(json!({"kind": "Bucket", "name": "b"})),
        "InvalidKind: referencing unsupported backendRef: group \"\" kind \"Bucket\""
    );
}

#[test]
fn filters_and_matches_are_checked() {
    let with = |field: &str, value: Value| {
        let mut rule = json!({"backendRefs": [{"name": "web", "port": 80}]});
        rule[field] = json!([value]);
        attached(&rule)[1].clone()
    };
    assert_eq!(
        with("filters", json!({"type": "Unheard"})),
        "InvalidFilter: unsupported filter type \"Unheard\""
    );
    let modifier = json!({"set": [{"name": "h", "value": "a\u{0}b"}]});
    assert_eq!(
        with(
            "filters",
            json!({"type": "RequestHeaderModifier", "requestHeaderModifier": modifier})
        ),
        "InvalidFilter: header \"h\" value contains invalid characters"
    );
    for (name, shown) in [("", "\"\""), ("a\nb", "\"a\\nb\"")] {
        let modifier = json!({"remove": ["h", name]});
        assert_eq!(
            with(
                "filters",
                json!({"type": "ResponseHeaderModifier", "responseHeaderModifier": modifier})
            ),
            format!("InvalidFilter: header {shown} cannot be removed, because it is not a name")
        );
    }
    for (kind, field) in [("RequestRedirect", "requestRedirect"), ("URLRewrite", "urlRewrite")] {
        for (modifier, path) in [
            ("ReplaceFullPath", "replaceFullPath"),
            ("ReplacePrefixMatch", "replacePrefixMatch"),
        ] {
            let broken = json!({"path": {"type": modifier, path: "/a\nb"}});
            assert_eq!(
                with("filters", json!({"type": kind, field: broken})),
                "InvalidFilter: path \"/a\\nb\" contains invalid characters"
            );
        }
    }
    assert_eq!(
        with("matches", json!({"path": {"type": "Glob", "value": "/"}})),
        "InvalidConfiguration: unknown type: \"Glob\" is not supported Path match type"
    );
}

#[test]
fn changed_grant_evaluates_the_route() {
    let rule = json!({"backendRefs": [{"name": "web", "namespace": "far", "port": 80}]});
    let spec = route(
        &json!({"name": "x", "namespace": "gw", "sectionName": "a"}),
        "a.test",
        &rule,
    );
    let mut world = mesh("HTTPRoute", &spec);
    let mut statuses = Statuses::new(Revisions::default());
    assert_eq!(statuses.update(&world.snapshot(), Vec::new()).len(), 2);
    let key = |kind, namespace: &str| StatusKey {
        kind,
        object: ObjectKey::new(&cluster(), namespace, "x"),
    };
    let grant = object(
        "ReferenceGrant",
        "far",
        &json!({"from": [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": "app"}],
            "to": [{"group": "", "kind": "Service"}]}),
    );
    let mesh = put(&mut world, &[grant]);
    assert_eq!(statuses.update(&mesh, Vec::new()), [key(Kind::HttpRoute, "app")]);
    assert!(statuses.update(&mesh, Vec::new()).is_empty());
    // Without the route, the Gateway has none attached.
    let removed = world.commit(vec![Change::Remove(
        Kind::HttpRoute,
        key(Kind::HttpRoute, "app").object,
    )]);
    let changed = statuses.update(&removed.snapshot, Vec::new());
    assert_eq!(changed, [key(Kind::KubeGateway, "gw"), key(Kind::HttpRoute, "app")]);
    assert!(statuses.get(&key(Kind::HttpRoute, "app")).is_none());
}

#[test]
fn transitions_and_other_controllers_are_kept() {
    let rule = json!({"backendRefs": [{"name": "no", "port": 80}]});
    let spec = route(
        &json!({"name": "x", "namespace": "gw", "sectionName": "a"}),
        "a.test",
        &rule,
    );
    let status = status(&mesh("HTTPRoute", &spec), Kind::HttpRoute, "app").expect("the route is converted");
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "lastTransitionTime": "before"});
    let own = json!({"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "x", "namespace": "gw",
        "sectionName": "a"});
    let entry = |controller: &str, reference: &Value| {
        json!({"controllerName": controller, "parentRef": reference,
            "conditions": [condition("Other", "True"), condition("ResolvedRefs", "True"), condition("Accepted", "True")]})
    };
    let theirs = entry("example.com/other", &own);
    let stale = entry("istio.io/gateway-controller", &json!({"name": "gone"}));
    let existing = json!({"parents": [stale, theirs, entry("istio.io/gateway-controller", &own)]});
    let merged = status.merged(&existing, &Namespace::new("app"), "now");
    let parents = merged["parents"].as_array().expect("a list");
    assert_eq!((parents.len(), &parents[0]), (2, &theirs));
    let conditions = parents[1]["conditions"].as_array().expect("a list");
    let times: Vec<_> = conditions
        .iter()
        .map(|condition| (condition["type"].as_str(), condition["lastTransitionTime"].as_str()))
        .collect();
    assert_eq!(
        times,
        [
            (Some("Other"), Some("before")),
            // It was true.
            (Some("ResolvedRefs"), Some("now")),
            (Some("Accepted"), Some("before")),
        ]
    );
    assert_eq!(conditions[2]["observedGeneration"], 3);
    assert_eq!(status.merged(&merged, &Namespace::new("app"), "later"), merged);
}

#[test]
fn r21_endpoints_are_read_once_for_all_ports() {
    let listener = |port: u16| json!({"name": format!("p{port}"), "port": port, "protocol": "HTTP"});
    let listeners: Vec<Value> = [80, 8080, 81, 8081, 82].into_iter().map(listener).collect();
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x-istio", "namespace": "gw"},
    "spec": {"clusterIP": "10.0.0.9", "ports": [
        {"name": "http", "port": 80}, {"name": "other", "port": 443}, {"name": "http", "port": 8443},
        {"name": "idle", "port": 81},
    ]}});
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": "s", "namespace": "gw", "labels": {"kubernetes.io/service-name": "x-istio"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080}, {"name": "other", "port": 8080}, {"name": "unknown", "port": 8081}],
        "endpoints": [{"addresses": ["10.1.0.1", "10.1.0.2"]}]});
    let world = world(&[gateway(listeners.into()), service, slice]);
    let status = status(&world, Kind::KubeGateway, "gw").expect("the Gateway is converted");
    let Content::Gateway(gateway) = &status.content else {
        panic!("a Gateway has the status of one");
    };
    let condition = &gateway.conditions[1];
    let host = "hostname \"x-istio.gw.svc.cluster.local\"";
    let hint = "(hint: the service port should be specified, not the workload port. Did you mean one of these ports: \
                [443 80]?)";
    let missing = |port: u16| format!("port {port} not found for {host}");
    assert_eq!(condition.reason, "AddressNotUsable");
    assert_eq!(
        condition.message,
        format!(
            "Assigned to service(s) x-istio.gw.svc.cluster.local:80, but failed to assign to all requested addresses: \
             {} {hint}; {}; {}; {}",
            missing(8080),
            missing(8081),
            missing(81),
            missing(82)
        )
    );
    let addresses = gateway.addresses.as_ref().map(Vec::len);
    assert_eq!(addresses, Some(1));
}

#[test]
fn addresses_stay_and_pending_ones_are_reported() {
    let listeners = json!([{"name": "a", "port": 80, "protocol": "HTTP"}]);
    let service = |status: Value| {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x-istio", "namespace": "gw"},
            "spec": {"type": "LoadBalancer", "clusterIP": "10.0.0.9", "ports": [{"name": "http", "port": 80}]},
            "status": status})
    };
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": "s", "namespace": "gw", "labels": {"kubernetes.io/service-name": "x-istio"}},
        "addressType": "IPv4", "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["10.1.0.1"], "conditions": {"ready": false}}]});
    // An endpoint counts before it is ready.
    let mut world = world(&[gateway(listeners), service(json!({})), slice]);
    // The load balancer of another cluster does not count.
    let far = service(json!({"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}));
    let far = document::parse(&ClusterId::new("c2"), &far).rows.into_iter();
    world.commit(far.map(Change::Upsert).collect());
    let programmed = |world: &World| {
        let status = status(world, Kind::KubeGateway, "gw").expect("the Gateway is converted");
        let Content::Gateway(gateway) = &status.content else {
            panic!("a Gateway has the status of one");
        };
        let condition = &gateway.conditions[1];
        (format!("{}: {}", condition.reason, condition.message), status.clone())
    };
    let (message, _) = programmed(&world);
    assert_eq!(
        message,
        "AddressNotAssigned: Assigned to service(s) x-istio.gw.svc.cluster.local:80, but failed to assign to all \
         requested addresses: address pending for hostname \"x-istio.gw.svc.cluster.local\""
    );
    put(
        &mut world,
        &[service(json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}))],
    );
    let (message, status) = programmed(&world);
    assert_eq!(
        message,
        "Programmed: Resource programmed, assigned to service(s) x-istio.gw.svc.cluster.local:80"
    );
    let merged = status.merged(&Value::Null, &Namespace::new("gw"), "now");
    assert_eq!(
        merged["addresses"],
        json!([{"type": "IPAddress", "value": "192.0.2.1"}])
    );
    let gone = service(json!({}));
    put(&mut world, &[gone]);
    let (_, status) = programmed(&world);
    let again = status.merged(&merged, &Namespace::new("gw"), "now");
    assert_eq!(again["addresses"], merged["addresses"]);
}

#[test]
fn an_apply_does_not_suffice_for_parts_of_other_field_managers() {
    let world = world(&[gateway(json!([{"name": "a", "port": 80, "protocol": "HTTP"}]))]);
    let status = status(&world, Kind::KubeGateway, "gw").expect("a status");
    let applied = status.applied(&Value::Null, &Namespace::new("gw"), "now");
    for existing in [Value::Null, json!({"listeners": [{"name": "a"}]})] {
        assert_eq!(status.left_over(&applied, &existing), None);
    }
    let kept = json!({"name": "a", "conditions": [{"type": "Other"}]});
    let existing = json!({"listeners": [kept, {"name": "removed"}], "attachedListenerSets": 1});
    let left_over = json!({"listeners": [kept], "attachedListenerSets": null});
    assert_eq!(status.left_over(&applied, &existing), Some(left_over));
}

#[test]
fn a_waypoint_has_an_address_once_it_is_ready() {
    let mut gateway = gateway(json!([{"name": "mesh", "port": 15008, "protocol": "HBONE"}]));
    gateway["spec"]["gatewayClassName"] = "istio-waypoint".into();
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x", "namespace": "gw"},
        "spec": {"clusterIP": "10.0.0.9", "ports": [{"name": "mesh", "port": 15008}]}});
    let slice = |ready: bool| {
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "s", "namespace": "gw", "labels": {"kubernetes.io/service-name": "x"}},
            "addressType": "IPv4", "ports": [{"name": "mesh", "port": 15008, "protocol": "TCP"}],
            "endpoints": [{"addresses": ["10.1.0.1"], "conditions": {"ready": ready}}]})
    };
    let mut installation = Installation::default();
    installation.features.pilot_enable_ambient = true;
    installation.features.pilot_enable_ambient_waypoints = true;
    let mut world = World::new(installation);
    put(&mut world, &[gateway, service, slice(false)]);
    let reported = |world: &World, existing: &Value| {
        let status = status(world, Kind::KubeGateway, "gw").expect("the Gateway is converted");
        let status = status.merged(existing, &Namespace::new("gw"), "now");
        let programmed = reasons(&status["conditions"])[1].clone();
        (programmed, status)
    };
    let (programmed, starting) = reported(&world, &Value::Null);
    assert_eq!(programmed, "Programmed False AddressNotAssigned");
    assert_eq!(starting["addresses"], Value::Null);
    put(&mut world, &[slice(true)]);
    let (programmed, ready) = reported(&world, &starting);
    assert_eq!(programmed, "Programmed True Programmed");
    assert_eq!(ready["addresses"][0]["value"], "10.0.0.9");
    put(&mut world, &[slice(false)]);
    assert_eq!(reported(&world, &ready).1["addresses"], ready["addresses"]);
}

#[test]
fn addresses_of_remote_gateways_are_those_written() {
    let mut gateway = gateway(json!([]));
    gateway["spec"]["gatewayClassName"] = "istio-remote".into();
    let written = json!([{"type": "IPAddress", "value": "192.0.2.9"}]);
    gateway["spec"]["addresses"] = written.clone();
    let mut world = world(&[gateway.clone()]);
    let addresses = |world: &World, existing: &Value| {
        let status = status(world, Kind::KubeGateway, "gw").expect("the Gateway is converted");
        let status = status.merged(&json!({"addresses": existing}), &Namespace::new("gw"), "now");
        status["addresses"].clone()
    };
    assert_eq!(addresses(&world, &Value::Null), written);
    gateway["spec"]["addresses"] = json!([]);
    put(&mut world, &[gateway]);
    assert_eq!(addresses(&world, &written), json!([]));
    assert_eq!(addresses(&world, &Value::Null), Value::Null);
}

#[test]
fn empty_annotations_are_no_names() {
    let mut gateway = gateway(json!([{"name": "a", "port": 80, "protocol": "HTTP"}]));
    gateway["metadata"]["annotations"] =
        json!({"gateway.istio.io/name-override": "", "gateway.istio.io/service-account": ""});
    let world = world(&[gateway]);
    let status = status(&world, Kind::KubeGateway, "gw").expect("the Gateway is converted");
    let status = status.merged(&Value::Null, &Namespace::new("gw"), "now");
    assert_eq!(
        status["conditions"][1]["message"],
        "Failed to assign to any requested addresses: hostname \"x-istio.gw.svc.cluster.local\" not found"
    );
    // Without a name, every service account of the namespace would receive the certificates.
    let key = ObjectKey::new(&cluster(), "gw", "x~istio-autogenerated-k8s-gateway~a");
    let mesh = world.snapshot();
    let converted = mesh.gateways.get(&Cx::untracked(), &key).expect("it is converted");
    let account = converted.meta.annotations.get(SERVICE_ACCOUNT_ANNOTATION);
    assert_eq!(account.map(SmolStr::as_str), Some("x-istio"));
}

#[test]
fn foreign_objects_do_not_replace_built_in_classes() {
    let mut installation = Installation::default();
    installation.features.pilot_gateway_api_controller_name = "example.com/gateway-controller".into();
    let mut world = World::new(installation);
    let mut class = object(
        "GatewayClass",
        "",
        &json!({"controllerName": "istio.io/gateway-controller"}),
    );
    class["metadata"]["name"] = "istio".into();
    let gateway = gateway(json!([{"name": "a", "port": 80, "protocol": "HTTP"}]));
    let mesh = put(&mut world, &[class, gateway]);
    assert!(status(&world, Kind::KubeGateway, "gw").is_some());
    let (cx, class) = (Cx::untracked(), SmolStr::new_static("istio"));
    assert_eq!(Controller::of_class(&cx, &mesh, &class), Some(Controller::Gateway));
    assert_eq!(Controller::of_deployments(&cx, &mesh, &class), None);
    let removed = world.commit(vec![Change::Remove(
        Kind::GatewayClass,
        ObjectKey::new(&cluster(), "", "istio"),
    )]);
    let mesh = removed.snapshot;
    assert_eq!(
        Controller::of_deployments(&cx, &mesh, &class),
        Some(Controller::Gateway)
    );
}

#[test]
fn gateways_are_ancestors_of_tls_policies_with_a_target() {
    let mut installation = Installation::default();
    installation.features.pilot_enable_alpha_gateway_api = true;
    let mut world = World::new(installation);
    let all = json!({"namespaces": {"from": "All"}});
    let listeners = json!([{"name": "a", "port": 80, "protocol": "HTTP", "allowedRoutes": all}]);
    let rule = json!({"backendRefs": [{"name": "web", "port": 80}, {"name": "no", "port": 80}]});
    let route = route(&json!({"name": "x", "namespace": "gw"}), "a.test", &rule);
    let targets = |name: &str| json!([{"group": "", "kind": "Service", "name": name}]);
    let tls = |target: &str| {
        let validation = json!({"hostname": "web.test", "wellKnownCACertificates": "System"});
        let spec = json!({"targetRefs": targets(target), "validation": validation});
        let mut policy = object("BackendTLSPolicy", "app", &spec);
        policy["metadata"]["name"] = target.into();
        policy
    };
    let mut traffic = object("XBackendTrafficPolicy", "app", &json!({"targetRefs": targets("web")}));
    traffic["apiVersion"] = "gateway.networking.x-k8s.io/v1alpha1".into();
    put(
        &mut world,
        &[
            gateway(listeners),
            service("app"),
            object("HTTPRoute", "app", &route),
            tls("web"),
            tls("no"),
            traffic,
        ],
    );
    let mut statuses = Statuses::new(Revisions::default());
    statuses.update(&world.snapshot(), Vec::new());
    let ancestors = |kind: Kind, name: &str| -> Vec<String> {
        let status = merged(&statuses, kind, "app", name);
        let ancestors = status["ancestors"].as_array().expect("a list").iter();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let ancestors = ancestors.map(|entry| &entry["ancestorRef"]);
        ancestors
            .map(|it| text(&it["kind"]) + " " + &text(&it["name"]))
            .collect()
    };
    assert_eq!(ancestors(Kind::BackendTlsPolicy, "web"), ["Service web", "Gateway x"]);
    assert_eq!(ancestors(Kind::BackendTlsPolicy, "no"), ["Service no"]);
    assert_eq!(ancestors(Kind::BackendTrafficPolicy, "x"), ["Service web"]);
}

/// Returns the conditions of a list as `type status reason`.
fn reasons(conditions: &Value) -> Vec<String> {
    let text = |condition: &Value, field: &str| condition[field].as_str().unwrap_or_default().to_owned();
    let conditions = conditions.as_array().into_iter().flatten();
    conditions
        .map(|it| format!("{} {} {}", text(it, "type"), text(it, "status"), text(it, "reason")))
        .collect()
}

fn merged(statuses: &Statuses, kind: Kind, namespace: &str, name: &str) -> Value {
    let object = ObjectKey::new(&cluster(), namespace, name);
    let status = statuses.get(&StatusKey { kind, object });
    status.map_or(Value::Null, |status| {
        status.merged(&Value::Null, &Namespace::new(namespace), "now")
    })
}

/// A ListenerSet for Gateway `gw/x`, created at a second of one minute.
fn listener_set(name: &str, second: u8, listeners: &Value) -> Value {
    json!({"apiVersion": GROUP, "kind": "ListenerSet",
        "metadata": {"name": name, "namespace": "gw", "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z")},
        "spec": {"parentRef": {"name": "x"}, "listeners": listeners}})
}

#[test]
fn listeners_of_sets_conflict_with_preceding_ones() {
    let listener = |name: &str, protocol: &str, host: &str| {
        let mut listener = json!({"name": name, "port": 80, "protocol": protocol});
        if !host.is_empty() {
            listener["hostname"] = host.into();
        }
        listener
    };
    let mut gateway = gateway(json!([listener("own", "HTTP", "own.test")]));
    gateway["spec"]["allowedListeners"] = json!({"namespaces": {"from": "Same"}});
    let old = listener_set(
        "b",
        1,
        &json!([listener("own", "HTTP", "own.test"), listener("b", "HTTP", "b.test")]),
    );
    let young = listener_set("a", 2, &json!([listener("b", "HTTP", "b.test")]));
    let other = listener_set("c", 3, &json!([listener("tcp", "TCP", "")]));
    let mut world = world(&[gateway, old, young, other]);
    let mut statuses = Statuses::new(Revisions::default());
    statuses.update(&world.snapshot(), Vec::new());
    let set = |statuses: &Statuses, name: &str| merged(statuses, Kind::ListenerSet, "gw", name);
    let refused = |reason: &str| {
        [
            format!("Accepted False {reason}"),
            format!("Conflicted True {reason}"),
            format!("Programmed False {reason}"),
            "ResolvedRefs True ResolvedRefs".to_owned(),
        ]
    };
    let fine = [
        "Accepted True Accepted",
        "Conflicted False NoConflicts",
        "Programmed True Programmed",
        "ResolvedRefs True ResolvedRefs",
    ];
    let not_valid = ["Accepted False ListenersNotValid", "Programmed False ListenersNotValid"];
    let status = set(&statuses, "b");
    assert_eq!(reasons(&status["conditions"])[0], "Accepted True Accepted");
    assert_eq!(
        reasons(&status["listeners"][0]["conditions"]),
        refused("HostnameConflict")
    );
    assert_eq!(reasons(&status["listeners"][1]["conditions"]), fine);
    let status = set(&statuses, "a");
    assert_eq!(reasons(&status["conditions"]), not_valid);
    assert_eq!(
        reasons(&status["listeners"][0]["conditions"]),
        refused("HostnameConflict")
    );
    assert_eq!(
        reasons(&set(&statuses, "c")["listeners"][0]["conditions"])[1],
        "Conflicted True ProtocolConflict"
    );
    let gateway = merged(&statuses, Kind::KubeGateway, "gw", "x");
    assert_eq!(gateway["attachedListenerSets"], 1);
    assert_eq!(reasons(&gateway["listeners"][0]["conditions"]), fine);
    // Without the older set, the younger one has the host.
    let removed = world.commit(vec![Change::Remove(
        Kind::ListenerSet,
        ObjectKey::new(&cluster(), "gw", "b"),
    )]);
    statuses.update(&removed.snapshot, Vec::new());
    assert_eq!(reasons(&set(&statuses, "a")["listeners"][0]["conditions"]), fine);
}

#[test]
fn tls_settings_of_a_gateway_are_reported_while_they_exist() {
    let validation = json!({"mode": "AllowInsecureFallback",
        "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "no"}]});
    let mut gateway = gateway(json!([{"name": "a", "port": 443, "protocol": "HTTPS",
        "tls": {"mode": "Terminate", "certificateRefs": [{"name": "no"}]}}]));
    gateway["spec"]["tls"] = json!({"backend": {"clientCertificateRef": {"name": "no"}},
        "frontend": {"default": {"validation": validation}}});
    let with = status(&world(&[gateway.clone()]), Kind::KubeGateway, "gw").expect("the Gateway is converted");
    let with = with.merged(&Value::Null, &Namespace::new("gw"), "now");
    assert_eq!(
        reasons(&with["conditions"]),
        [
            "Accepted True Accepted",
            "InsecureFrontendValidationMode True ConfigurationChanged",
            "Programmed False AddressNotUsable",
            "ResolvedRefs False InvalidClientCertificateRef",
        ]
    );
    gateway["spec"]["tls"] = Value::Null;
    let without = status(&world(&[gateway]), Kind::KubeGateway, "gw").expect("the Gateway is converted");
    let without = without.merged(&with, &Namespace::new("gw"), "now");
    assert_eq!(
        reasons(&without["conditions"]),
        ["Accepted True Accepted", "Programmed False AddressNotUsable"]
    );
}

#[test]
fn one_revision_writes_the_status_of_an_object() {
    let mut installation = Installation {
        revision: "canary".into(),
        ..Installation::default()
    };
    installation.features.pilot_enable_alpha_gateway_api = true;
    let mut world = World::new(installation);
    let of_group = |group: &str, mut object: Value| {
        object["apiVersion"] = group.into();
        object
    };
    let class = json!({"controllerName": "istio.io/gateway-controller"});
    let tls = json!({"targetRefs": [], "validation": {"hostname": "web.test"}});
    let traffic = object("XBackendTrafficPolicy", "app", &json!({"targetRefs": []}));
    let pool = object("InferencePool", "app", &json!({}));
    put(
        &mut world,
        &[
            object("GatewayClass", "", &class),
            object("HTTPRoute", "app", &json!({})),
            object("BackendTLSPolicy", "app", &tls),
            of_group("gateway.networking.x-k8s.io/v1alpha1", traffic),
            of_group("inference.networking.k8s.io/v1", pool),
        ],
    );
    let kinds = |world: &World, revisions: &Revisions| -> Vec<Kind> {
        let mut statuses = Statuses::new(revisions.clone());
        statuses.update(&world.snapshot(), Vec::new());
        statuses.iter().map(|(key, _)| key.kind).collect()
    };
    let all = [
        Kind::GatewayClass,
        Kind::HttpRoute,
        Kind::BackendTlsPolicy,
        Kind::BackendTrafficPolicy,
        Kind::InferencePool,
    ];
    let namespace =
        |labels: Value| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "app", "labels": labels}});
    let none = Revisions::default();
    assert_eq!(kinds(&world, &none), all, "the namespace is unknown");
    put(&mut world, &[namespace(json!({}))]);
    // The class has no namespace, and every revision uses it.
    assert_eq!(kinds(&world, &none), [Kind::GatewayClass]);
    let tagged = Revisions {
        tags: ["default".into()].into(),
        ..Revisions::default()
    };
    assert_eq!(kinds(&world, &tagged), all);
    let of_validator = |revision: &str, default_tag: &str| Revisions {
        default_tag: default_tag.into(),
        default_validator: revision.into(),
        ..Revisions::default()
    };
    assert_eq!(kinds(&world, &of_validator("canary", "")), all);
    assert_eq!(kinds(&world, &of_validator("other", "")), [Kind::GatewayClass]);
    assert_eq!(kinds(&world, &of_validator("canary", "other")), [Kind::GatewayClass]);
    put(&mut world, &[namespace(json!({"istio.io/rev": "canary"}))]);
    assert_eq!(kinds(&world, &none), all);
}

#[test]
fn standard_reasons_replace_those_of_istio() {
    let conditions = |standard: bool, kind: &str| {
        let mut installation = Installation::default();
        installation.features.pilot_gateway_api_standard_reasons = standard;
        let mut world = World::new(installation);
        let mut gateway = gateway(json!([{"name": "a", "port": 443, "protocol": "HTTPS",
            "tls": {"mode": "Terminate", "options": {"gateway.istio.io/tls-terminate-mode": "MUTUAL"}}}]));
        gateway["spec"]["tls"] = json!({"frontend": {"default": {"validation":
            {"caCertificateRefs": [{"group": "", "kind": kind, "name": "no"}]}}}});
        put(&mut world, &[gateway]);
        let status = status(&world, Kind::KubeGateway, "gw").expect("the Gateway is converted");
        let status = status.merged(&Value::Null, &Namespace::new("gw"), "now");
        let reasons = reasons(&status["listeners"][0]["conditions"]);
        [reasons[0].clone(), reasons[3].clone()]
    };
    assert_eq!(
        conditions(false, "ConfigMap"),
        ["Accepted True Accepted", "ResolvedRefs False InvalidCertificateRef"]
    );
    assert_eq!(
        conditions(true, "ConfigMap"),
        [
            "Accepted False NoValidCACertificate",
            "ResolvedRefs False InvalidCACertificateRef"
        ]
    );
    assert_eq!(
        conditions(true, "Service")[1],
        "ResolvedRefs False InvalidCACertificateKind"
    );
}
