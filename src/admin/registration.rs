//! The pages of old releases on the HTTP port: `/v1/registration`, and `/cache_stats`.
//!
//! Parity (pilot/pkg/proxy/envoy/discovery.go of release 0.8): the same JSON. The pages of the xDS API v1 are gone, and
//! say so.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    access::{Access, Readers},
    renderer::Renderer,
};
use crate::{
    model::{
        Endpoint, MeshSnapshot,
        endpoint::Health,
        service::{Service, ServicePort},
    },
    table::Cx,
};

/// The answer of pages of the xDS API v1.
const GONE: &str = "the xDS API v1 is no longer served; hint: proxies connect to the xDS port by gRPC\n";

type Mesh = watch::Receiver<Arc<MeshSnapshot>>;

/// Returns the pages, for callers that may read all debug pages. Those that list services are rendered beside serving.
pub fn pages(mesh: Mesh, access: &Access, renderer: &Renderer) -> Router {
    let lists = Router::new()
        .route("/v1/registration", get(all))
        .route("/v1/registration/{key}", get(hosts_of_key))
        .with_state(mesh);
    let pages = renderer
        .render(lists)
        .route("/v1/clusters/{*rest}", get(gone))
        .route("/v1/routes/{*rest}", get(gone))
        .route("/v1/listeners/{*rest}", get(gone))
        .route("/v1/az/{*rest}", get(gone))
        // Responses are not cached by the address of a page any more.
        .route("/cache_stats", get(async || Json(json!({ "cache_stats": {} }))))
        .route("/cache_stats_delete", post(async || StatusCode::OK));
    access.guard(pages, |_| Readers::ControlPlane)
}

async fn gone() -> Response {
    (StatusCode::GONE, GONE).into_response()
}

async fn all(State(mesh): State<Mesh>) -> Json<Value> {
    let mesh = mesh.borrow().clone();
    let services = registered(&mesh).into_iter();
    Json(
        services
            .map(|(key, hosts)| json!({ "service-key": key, "hosts": hosts }))
            .collect(),
    )
}

async fn hosts_of_key(State(mesh): State<Mesh>, Path(key): Path<String>) -> Json<Value> {
    let mesh = mesh.borrow().clone();
    let wanted = Key::parse(&key);
    let cx = Cx::untracked();
    let services = mesh
        .services
        .iter(&cx)
        .filter(|(key, _)| key.hostname.as_str() == wanted.host);
    let hosts = services.flat_map(|(key, service)| {
        let endpoints = mesh
            .endpoints
            .get(&cx, key)
            .map(|row| &*row.endpoints)
            .unwrap_or_default();
        let ports = service.ports.iter().filter(|port| wanted.has_port(&port.name));
        ports
            .flat_map(|port| hosts(endpoints, port, &wanted.labels))
            .collect::<Vec<_>>()
    });
    Json(json!({ "hosts": hosts.collect::<Vec<_>>() }))
}

/// A key `host|port,port|k=v,k=v;k=v`: a service, names of ports and sets of labels, of which one must match.
struct Key<'a> {
    host: &'a str,
    ports: Vec<&'a str>,
    labels: Vec<BTreeMap<&'a str, &'a str>>,
}

impl<'a> Key<'a> {
    fn parse(text: &'a str) -> Self {
        let mut parts = text.split('|');
        let host = parts.next().unwrap_or_default();
        let list = |text: Option<&'a str>, separator| {
            let items = text
                .unwrap_or_default()
                .split(separator)
                .filter(|item| !item.is_empty());
            items.collect::<Vec<_>>()
        };
        let ports = list(parts.next(), ',');
        let sets = list(parts.next(), ';').into_iter();
        let pairs = |set: &'a str| set.split(',').filter_map(|pair| pair.split_once('=')).collect();
        Self {
            host,
            ports,
            labels: sets.map(pairs).collect(),
        }
    }

    fn has_port(&self, name: &str) -> bool {
        self.ports.is_empty() || self.ports.contains(&name)
    }
}

/// Returns the hosts by service key; services outside the mesh are left out.
fn registered(mesh: &MeshSnapshot) -> BTreeMap<String, Vec<Value>> {
    let cx = Cx::untracked();
    let mut services = BTreeMap::new();
    let inside = |service: &Service| !service.mesh_external;
    for (key, service) in mesh.services.iter(&cx).filter(|(_, service)| inside(service)) {
        let endpoints = mesh
            .endpoints
            .get(&cx, key)
            .map(|row| &*row.endpoints)
            .unwrap_or_default();
        for port in &service.ports {
            let name = format!("{}|{}", key.hostname.as_str(), port.name);
            services.insert(name, hosts(endpoints, port, &[]));
        }
    }
    services
}

fn hosts(endpoints: &[Endpoint], port: &ServicePort, labels: &[BTreeMap<&str, &str>]) -> Vec<Value> {
    let serves = |endpoint: &&Endpoint| match endpoint.service_port {
        0 => endpoint.port_name == port.name,
        number => number == port.number,
    };
    let has = |endpoint: &Endpoint, set: &BTreeMap<&str, &str>| {
        let mut pairs = set.iter();
        pairs.all(|(key, value)| endpoint.origin.labels.get(*key).is_some_and(|known| known == value))
    };
    let is_healthy = |endpoint: &&Endpoint| matches!(endpoint.health, Health::Healthy | Health::Unknown);
    let selected = endpoints.iter().filter(serves).filter(is_healthy);
    let selected = selected.filter(|endpoint| labels.is_empty() || labels.iter().any(|set| has(endpoint, set)));
    let host = |endpoint: &Endpoint| {
        let mut host = json!({ "ip_address": endpoint.address, "port": endpoint.port });
        let zone = endpoint.origin.locality.as_str();
        if !zone.is_empty() {
            host["tags"] = json!({ "az": zone });
        }
        host
    };
    selected.map(host).collect()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use axum::{body::Body, extract::ConnectInfo};
    use futures::FutureExt;
    use tower::ServiceExt;

    use super::*;
    use crate::{
        auth::Authenticators,
        model::{Installation, fixture::folder_world},
        task::Tasks,
    };

    const MESH: &str = "apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: a, namespace: shop}
spec:
  hosts: [a.example.com]
  location: MESH_INTERNAL
  ports: [{number: 80, name: http, protocol: HTTP}, {number: 81, name: tcp, protocol: TCP}]
  resolution: STATIC
  endpoints:
  - {address: 10.0.0.1, labels: {version: v1}, locality: region/zone}
  - {address: 10.0.0.2, labels: {version: v2}, ports: {tcp: 9000}}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: b, namespace: shop}
spec: {hosts: [b.example.com], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}
";

    #[tokio::test]
    async fn services_inside_the_mesh_are_registered_by_port() {
        let world = folder_world(Installation::default(), &[("a.yaml", MESH)]);
        let (_sender, mesh) = watch::channel(world.snapshot());
        let Json(list) = all(State(mesh.clone())).await;
        let first = json!({ "ip_address": "10.0.0.1", "port": 80, "tags": { "az": "region/zone" } });
        let keys: Vec<&Value> = list
            .as_array()
            .expect("a list")
            .iter()
            .map(|item| &item["service-key"])
            .collect();
        assert_eq!(keys, ["a.example.com|http", "a.example.com|tcp"]);
        assert_eq!(list[0]["hosts"][0], first);
        assert_eq!(list[1]["hosts"][1]["port"], 9000);
        let ask = async |key: &str| hosts_of_key(State(mesh.clone()), Path(key.to_owned())).await.0;
        assert_eq!(ask("a.example.com|http|version=v1").await, json!({ "hosts": [first] }));
        assert_eq!(ask("a.example.com").await["hosts"].as_array().map(Vec::len), Some(4));
        assert_eq!(ask("c.example.com|http").await, json!({ "hosts": [] }));
    }

    #[test]
    fn services_are_listed_beside_serving() {
        let world = folder_world(Installation::default(), &[("a.yaml", MESH)]);
        let (_sender, mesh) = watch::channel(world.snapshot());
        let access = Access::new(Authenticators::new(Vec::new()), mesh.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let renderer = Renderer::new(Tasks::default(), runtime.handle().clone());
        let pages = pages(mesh, &access, &renderer);
        let answer = |path: &str| {
            let mut request = http::Request::get(path).body(Body::empty()).expect("a request");
            let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
            request.extensions_mut().insert(ConnectInfo(local));
            pages.clone().oneshot(request)
        };
        for path in ["/v1/registration", "/v1/registration/a.example.com"] {
            // The runtime of the renderer does not run yet.
            assert!(answer(path).now_or_never().is_none(), "{path}");
            let Ok(response) = runtime.block_on(answer(path));
            assert_eq!(response.status(), StatusCode::OK, "{path}");
        }
        let Some(Ok(response)) = answer("/v1/clusters/a").now_or_never() else {
            panic!("the page needs no rendering");
        };
        assert_eq!(response.status(), StatusCode::GONE);
    }
}
