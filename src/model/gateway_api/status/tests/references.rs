//! References of routes and policies to services.

use super::*;

#[test]
fn imported_services_have_the_group_of_the_cluster() {
    let mut installation = Installation::default();
    installation.features.mcs_api_group = "net.gke.io".into();
    let mut world = World::new(installation);
    let resolved = |world: &mut World, group: &str| {
        let rule = json!({"backendRefs": [{"group": group, "kind": "ServiceImport", "name": "web", "port": 80}]});
        let parent = json!({"group": "", "kind": "Service", "name": "web"});
        let route = object("HTTPRoute", "app", &route(&parent, "a.test", &rule));
        put(world, &[service("app"), route]);
        conditions_of(world)[1].clone()
    };
    assert_eq!(resolved(&mut world, "net.gke.io"), RESOLVED);
    assert_eq!(
        resolved(&mut world, "multicluster.x-k8s.io"),
        "InvalidKind: referencing unsupported backendRef: group \"multicluster.x-k8s.io\" kind \"ServiceImport\""
    );
}

/// Sidecars use the routes even if another controller deploys the waypoint.
#[test]
fn services_with_waypoints_of_other_controllers_have_routes() {
    let mut class = object("GatewayClass", "", &json!({"controllerName": "example.com/waypoint"}));
    class["metadata"]["name"] = "other".into();
    let mut waypoint = gateway(json!([{"name": "mesh", "port": 15008, "protocol": "HBONE"}]));
    waypoint["spec"]["gatewayClassName"] = "other".into();
    let mut service = service("app");
    service["metadata"]["labels"] = json!({"istio.io/use-waypoint": "x", "istio.io/use-waypoint-namespace": "gw"});
    let rule = json!({"backendRefs": [{"name": "web", "port": 80}]});
    let parent = json!({"group": "", "kind": "Service", "name": "web"});
    let route = object("HTTPRoute", "app", &route(&parent, "a.test", &rule));
    let world = world(&[class, waypoint, service, route]);
    assert_eq!(conditions_of(&world)[..2], [VALID, RESOLVED]);
}

#[test]
fn traffic_policies_are_for_services() {
    let mut installation = Installation::default();
    installation.features.pilot_enable_alpha_gateway_api = true;
    let mut world = World::new(installation);
    let targets = json!([{"group": "", "kind": "Service", "name": "web"},
        {"group": "networking.istio.io", "kind": "ServiceEntry", "name": "x"},
        {"group": "networking.istio.io", "kind": "ServiceEntry", "name": "no"}]);
    let mut policy = object("XBackendTrafficPolicy", "app", &json!({"targetRefs": targets}));
    policy["apiVersion"] = "gateway.networking.x-k8s.io/v1alpha1".into();
    put(&mut world, &[service("app"), service_entry("app", "own.test"), policy]);
    let mut statuses = Statuses::new(Revisions::default());
    statuses.update(&world.snapshot(), Vec::new());
    let status = merged(&statuses, Kind::BackendTrafficPolicy, "app", "x");
    let ancestors = status["ancestors"].as_array().expect("a list").iter();
    let messages = ancestors.map(|entry| entry["conditions"][0]["message"].as_str().unwrap_or_default());
    assert_eq!(
        messages.collect::<Vec<_>>(),
        [
            "Configuration is valid",
            "targetRefs invalid: unsupported reference kind: ServiceEntry",
            "targetRefs invalid: reference app/no (of kind ServiceEntry) not found",
        ]
    );
}
