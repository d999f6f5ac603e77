//! Endpoints that are reached otherwise than by their address: through network gateways and tunnels; and gateways that
//! get only the clusters that they lead to.

use super::*;
use crate::{
    api::resolved_host::ResolvedHost,
    generate::RequestedResources,
    model::{Change, World, fixture::folder_world},
};

const NETWORKS: &str = "
networks:
  in_cluster: {endpoints: [{fromRegistry: Kubernetes}]}
  there: {gateways: [{address: '2001:db8::1', port: 15443}]}
";

/// The service with one endpoint in the other network.
fn service_in_networks() -> String {
    SERVICE.replace(
        "metadata: {name: a-0, labels: {",
        "metadata: {name: a-0, labels: {topology.istio.io/network: there, ",
    )
}

/// The addresses of the endpoints of the first client.
fn endpoint_addresses(fixture: &Fixture) -> Vec<Value> {
    let groups = fixture.endpoints(0, HTTP);
    let groups = groups.as_array().expect("a list").iter();
    let endpoints = groups.flat_map(|group| group["lbEndpoints"].as_array().cloned().unwrap_or_default());
    let address = |endpoint: Value| endpoint["endpoint"]["address"]["socketAddress"]["address"].clone();
    endpoints.map(address).collect()
}

#[test]
fn endpoints_wait_for_the_addresses_of_their_gateways() {
    let service = service_in_networks();
    let networks = NETWORKS.replace("2001:db8::1", "gw.example.com");
    let files = [
        MESH,
        ("a.yaml", service.as_str()),
        ("meshnetworks.yaml", networks.as_str()),
    ];
    let addresses = |world: &World| {
        let more = json!({"NETWORK": "in_cluster", "INSTANCE_IPS": "10.2.0.1"});
        let proxy = client_with("b", "n1", &more, Extensions::default());
        let store = fixture::store_of_world(world, vec![proxy], &RequestedResources::default());
        endpoint_addresses(&Fixture { store })
    };
    let installation = Installation {
        resolves_hosts: true,
        ..Installation::default()
    };
    let key = ResolvedHost::key(&installation.cluster, "gw.example.com");
    let mut world = folder_world(installation, &files);
    assert_eq!(addresses(&world), ["10.1.0.2"]);
    let answer = |world: &mut World, addresses: &[&str]| {
        let addresses = addresses.iter().map(|text| text.parse().expect("an address")).collect();
        let key = key.clone();
        world.commit(vec![Change::Upsert(ResolvedHost { key, addresses }.into())]);
    };
    answer(&mut world, &["10.9.0.1"]);
    assert_eq!(addresses(&world), ["10.9.0.1", "10.1.0.2"]);
    answer(&mut world, &[]);
    assert_eq!(addresses(&world), ["10.1.0.1", "10.1.0.2"], "no gateway");
}

#[test]
fn endpoints_behind_gateways_of_the_other_address_family_are_left_out() {
    let service = service_in_networks();
    let addresses = |ips: &str| {
        let more = json!({"NETWORK": "in_cluster", "INSTANCE_IPS": ips});
        let proxy = client_with("b", "n1", &more, Extensions::default());
        endpoint_addresses(&Fixture::new(
            &[("a.yaml", &service), ("meshnetworks.yaml", NETWORKS)],
            vec![proxy],
        ))
    };
    assert_eq!(addresses("10.2.0.1"), ["10.1.0.2"]);
    assert_eq!(addresses("10.2.0.1,2001:db8::2"), ["2001:db8::1", "10.1.0.2"]);
}

#[test]
fn endpoints_with_hbone_are_reached_by_tunnel_unless_they_have_a_sidecar() {
    let service = SERVICE.replace("labels: {app: a", "labels: {networking.istio.io/tunnel: http, app: a");
    let proxies = vec![
        client("b", "n1"),
        client_with("c", "n1", &json!({"DISABLE_HBONE_SEND": "true"}), Extensions::default()),
    ];
    let fixture = Fixture::new(&[("a.yaml", &service)], proxies);
    let endpoint = |client: u64, group: usize| fixture.endpoints(client, HTTP)[group]["lbEndpoints"][0].clone();
    let inner = json!({"serverListenerName": "connect_originate", "endpointId": "10.1.0.2:8080"});
    let tunnelled = endpoint(0, 1);
    assert_eq!(tunnelled["endpoint"]["address"]["envoyInternalAddress"], inner);
    let metadata = &tunnelled["metadata"]["filterMetadata"];
    assert_eq!(metadata["envoy.transport_socket_match"], json!({"tunnel": "http"}));
    assert_eq!(
        metadata["envoy.filters.listener.original_dst"],
        json!({"local": "10.1.0.2:8080"})
    );
    let address = |endpoint: &Value| endpoint["endpoint"]["address"]["socketAddress"]["address"].clone();
    assert_eq!(address(&endpoint(0, 0)), "10.1.0.1");
    assert_eq!(address(&endpoint(1, 1)), "10.1.0.2");
    let istio = |fixture: &Fixture| fixture.cluster(HTTP)["metadata"]["filterMetadata"]["istio"].clone();
    assert_eq!(istio(&fixture)["disable_mx"], true);
    let plain = Fixture::new(&[("a.yaml", SERVICE)], vec![client("b", "n1")]);
    assert_eq!(istio(&plain)["disable_mx"], Value::Null);
}

#[test]
fn a_gateway_may_get_only_the_clusters_that_something_leads_to() {
    let config = "
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: gw}
spec: {selector: {app: gw}, servers: [{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: vs}
spec: {hosts: ['*'], gateways: [gw], http: [{route: [{destination: {host: routed.com}}]}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: hidden, namespace: other}
spec: {hosts: [a.com], gateways: [default/gw], exportTo: [.], http: [{route: [{destination: {host: hidden.com}}]}]}
---
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: jwt}
spec: {jwtRules: [{issuer: x, jwksUri: 'https://keys.com/jwks'}]}
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: filter, annotations: {envoyfilter.istio.io/referenced-services: 'default/named.com,other/elsewhere.com'}}
spec: {configPatches: []}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: hosts}
spec:
  hosts: [routed.com, hidden.com, keys.com, named.com, elsewhere.com, nothing.com]
  resolution: DNS
  ports: [{number: 443, name: https, protocol: HTTPS}]
";
    let variables = [
        ("PILOT_FILTER_GATEWAY_CLUSTER_CONFIG", "true"),
        ("PILOT_JWT_ENABLE_REMOTE_JWKS", "envoy"),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let (features, _) = Features::parse(&variables.into());
    let installation = Installation {
        features,
        ..Installation::default()
    };
    let id = "router~10.2.0.9~gw.default~default.svc.cluster.local";
    let gateway = fixture::client(id, &json!({"LABELS": {"app": "gw"}}));
    let store = fixture::store(installation, &[MESH, ("config.yaml", config)], vec![gateway]);
    let hosts = [
        "routed.com",
        "hidden.com",
        "keys.com",
        "named.com",
        "elsewhere.com",
        "nothing.com",
    ];
    let has = hosts.map(|host| {
        let name = format!("outbound|443||{host}");
        !fixture::resource(&store, 0, ResourceType::Cluster, &name).is_null()
    });
    assert_eq!(has, [true, true, true, true, false, false]);
}

#[test]
fn nodes_that_send_no_tunnels_have_no_cluster_for_them() {
    let installation = Installation {
        features: Features {
            pilot_enable_sending_hbone: true,
            ..Features::default()
        },
        ..Installation::default()
    };
    let disabled = json!({"DISABLE_HBONE_SEND": "true"});
    let proxies = vec![
        client("b", "n1"),
        client_with("c", "n1", &disabled, Extensions::default()),
    ];
    let store = fixture::store(installation, &[MESH, ("a.yaml", SERVICE)], proxies);
    let has = |client| {
        let cluster = fixture::resource(&store, client, ResourceType::Cluster, "connect_originate");
        !cluster.is_null()
    };
    assert_eq!([has(0), has(1)], [true, false]);
}

#[test]
fn statistics_name_the_sds_provider_and_hosts_of_listeners_without_a_service() {
    let sidecar = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s, namespace: istio-system}
spec: {ingress: [{port: {number: 7000, protocol: HTTP, name: http}, defaultEndpoint: '127.0.0.1:7100'}]}
";
    let proxy = client_with("b", "n1", &json!({"credential": "true"}), Extensions::default());
    let files = [
        ("mesh.yaml", "inboundClusterStatName: '%SERVICE_FQDN%'\n"),
        ("sidecar.yaml", sidecar),
    ];
    let store = fixture::store(Installation::default(), &files, vec![proxy]);
    let statistics = |name: &str| fixture::resource(&store, 0, ResourceType::Cluster, name)["altStatName"].clone();
    assert_eq!(statistics("sds-external"), "sds-external;");
    assert_eq!(
        statistics("inbound|7000||"),
        "s.default;",
        "the namespace of the workload"
    );
}
