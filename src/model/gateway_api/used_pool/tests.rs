//! Pools of a small mesh: a Gateway, a pool with its shadow Service, and routes that each test changes.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::{
    api::{document, gateway_api::inference::GROUP},
    base::{ClusterId, Shared},
    model::{Change, Installation, World, features::Features, gateway_api::route::AttachedRouteKey},
};

fn world(enabled: bool, objects: &[Value]) -> World {
    let mut world = World::new(Installation {
        features: Features {
            enable_gateway_api_inference_extension: enabled,
            ..Features::default()
        },
        ..Installation::default()
    });
    put(&mut world, objects);
    world
}

fn put(world: &mut World, objects: &[Value]) -> Arc<MeshSnapshot> {
    let rows = objects
        .iter()
        .flat_map(|object| document::parse(&cluster(), object).rows);
    world.commit(rows.map(Change::Upsert).collect()).snapshot
}

fn cluster() -> ClusterId {
    Installation::default().cluster
}

fn key(namespace: &str, name: &str) -> ObjectKey {
    ObjectKey::new(&cluster(), namespace, name)
}

fn gateway() -> Value {
    json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
        "metadata": {"name": "edge", "namespace": "ai"},
        "spec": {"gatewayClassName": "istio", "listeners": [{"name": "http", "port": 80, "protocol": "HTTP"}]}})
}

fn pool(picker: &Value) -> Value {
    json!({"apiVersion": format!("{GROUP}/v1"), "kind": "InferencePool",
        "metadata": {"name": "models", "namespace": "ai"},
        "spec": {"selector": {"matchLabels": {"app": "models"}}, "targetPorts": [{"number": 8000}, {"number": 8001}],
            "appProtocol": "kubernetes.io/h2c", "endpointPickerRef": picker}})
}

fn picker() -> Value {
    json!({"name": "picker", "port": {"number": 9002}})
}

fn shadow(labels: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": inference_pool::service_name("models"), "namespace": "ai", "labels": labels},
        "spec": {"clusterIP": "None", "ports": [{"name": "http-0", "port": 54321}, {"name": "http-1", "port": 54322}]}})
}

fn labels() -> Value {
    json!({"istio.io/inferencepool-extension-service": "picker", "istio.io/inferencepool-extension-port": "9002",
        "istio.io/inferencepool-extension-failure-mode": "FailClose"})
}

/// A route to a pool.
fn route(parent: &Value, pool: &str, weight: u32) -> Value {
    let backend = json!({"group": GROUP, "kind": "InferencePool", "name": pool, "weight": weight});
    json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": "models", "namespace": "ai"},
        "spec": {"parentRefs": [parent], "hostnames": ["a.test"], "rules": [{"backendRefs": [backend]}]}})
}

fn to_gateway(pool: &str, weight: u32) -> Value {
    route(&json!({"name": "edge"}), pool, weight)
}

fn used_pool(mesh: &MeshSnapshot) -> Option<Shared<UsedPool>> {
    mesh.used_pools.get(&Cx::untracked(), &key("ai", "models")).cloned()
}

#[test]
fn pools_of_routes_are_used() {
    let mut world = world(true, &[gateway(), pool(&picker())]);
    assert_eq!(used_pool(&world.snapshot()), None, "no route uses it");
    let used = used_pool(&put(&mut world, &[to_gateway("models", 1)])).expect("a route uses it");
    assert_eq!(used.gateways, [key("ai", "edge")].into());
    assert_eq!(used.picker.host, "picker.ai.svc.cluster.local");
    assert_eq!((used.picker.port, used.picker.fails_open), (9002, false));
    let service = &used.service;
    assert_eq!(service.name, "models-ip-8edcc26c");
    assert_eq!(service.target_ports, [8000, 8001]);
    assert_eq!(service.app_protocol.as_deref(), Some("kubernetes.io/h2c"));
    let named = |label: &str| service.labels.get(label).map(SmolStr::as_str);
    assert_eq!(
        named("istio.io/inferencepool-extension-failure-mode"),
        Some("FailClose")
    );
    assert_eq!(named("internal.istio.io/service-semantics"), Some("inferencepool"));

    // A change of the route that does not concern the pool leaves the row as it is.
    let again = used_pool(&put(&mut world, &[to_gateway("models", 7)])).expect("a route uses it");
    assert!(used.ptr_eq(&again));
    assert_eq!(used_pool(&put(&mut world, &[to_gateway("other", 1)])), None);

    // A route of the mesh needs the Service, too.
    let to_service = route(&json!({"group": "", "kind": "Service", "name": "web"}), "models", 1);
    let used = used_pool(&put(&mut world, &[to_service])).expect("a route uses it");
    assert!(used.gateways.is_empty());
    assert_eq!(
        used_pool(&put(&mut world, &[pool(&json!({"name": "picker"}))])),
        None,
        "without a port"
    );
}

#[test]
fn listener_sets_lead_to_their_gateway() {
    let listeners = json!([{"name": "more", "port": 81, "protocol": "HTTP"}]);
    let set = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "ListenerSet",
        "metadata": {"name": "more", "namespace": "ai"},
        "spec": {"parentRef": {"name": "edge"}, "listeners": listeners}});
    let mut gateway = gateway();
    gateway["spec"]["allowedListeners"] = json!({"namespaces": {"from": "All"}});
    let parent = json!({"kind": "ListenerSet", "name": "more"});
    let world = world(true, &[gateway, set, pool(&picker()), route(&parent, "models", 1)]);
    let used = used_pool(&world.snapshot()).expect("a route uses it");
    assert_eq!(used.gateways, [key("ai", "edge")].into());
}

/// Returns the mistake of the route's rules for gateways.
fn mistake(enabled: bool, objects: &[Value]) -> Option<(&'static str, String)> {
    let mesh = world(enabled, objects).snapshot();
    let key = AttachedRouteKey {
        kind: Kind::HttpRoute,
        object: key("ai", "models"),
    };
    let route = mesh
        .attached_routes
        .get(&Cx::untracked(), &key)
        .expect("the route is converted");
    let mistake = route.gateway_mistake.as_ref()?;
    Some((mistake.reason, mistake.message.clone()))
}

#[test]
fn mistakes_are_those_of_istio() {
    let (gateway, pool, route) = (gateway(), pool(&picker()), to_gateway("models", 1));
    let mistake = |enabled: bool, more: &[Value]| mistake(enabled, &[std::slice::from_ref(&gateway), more].concat());
    let (reason, message) = mistake(false, std::slice::from_ref(&route)).expect("the feature is disabled");
    assert_eq!(reason, "InvalidKind");
    assert!(message.starts_with("InferencePool is not enabled."), "{message}");
    let not_found = |message: &str| Some(("BackendNotFound", message.to_owned()));
    assert_eq!(
        mistake(true, std::slice::from_ref(&route)),
        not_found("backend(models) not found")
    );
    assert_eq!(
        mistake(true, &[route.clone(), pool.clone()]),
        not_found("backend(models-ip-8edcc26c.ai.svc.cluster.local) not found")
    );
    let unlabelled = Some((
        "InvalidDestination",
        "InferencePool service invalid, extensionRef labels not found".to_owned(),
    ));
    let shadow_without = shadow(&json!({}));
    assert_eq!(
        mistake(true, &[route.clone(), pool.clone(), shadow_without]),
        unlabelled
    );
    assert_eq!(mistake(true, &[route, pool, shadow(&labels())]), None);
    let (reason, message) = mistake(true, &[to_gateway("models.ai", 1)]).expect("a host is no name");
    assert_eq!(reason, "InvalidDestination");
    assert!(message.starts_with("InferencePool.Name invalid;"), "{message}");
}
