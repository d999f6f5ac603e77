//! Chains with `AUTO_PASSTHROUGH` near the limit, which those of a whole mesh reach with hundreds of megabytes.

use serde_json::{Value, json};

use super::{GatewayKey, GatewayPart, ServerChain, Transport};
use crate::{
    base::Shared,
    generate::{
        BuildContext,
        filter::FilterProxyView,
        fixture::{client, with_context},
        proxy_class::ProxyClass,
        selected::Selected,
    },
    model::{ServiceKey, fixture::folder_world, installation::Installation, service::ScopedService},
    proto::json::any_to_json,
};

pub(super) const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec:
  clusterIP: 10.0.0.1
  ports: [{name: tcp, port: 80}, {name: tcp-more, port: 81}, {name: udp, port: 82, protocol: UDP}]
---
apiVersion: v1
kind: Service
metadata: {name: b}
spec: {clusterIP: 10.0.0.2, ports: [{name: tcp, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: a}
spec:
  host: a.default.svc.cluster.local
  subsets: [{name: v1, labels: {version: v1}}, {name: v2, labels: {version: v2}}]
";

/// Returns a Gateway with `AUTO_PASSTHROUGH` for some hosts, as a list in YAML.
pub(super) fn auto_passthrough(hosts: &str) -> String {
    format!(
        "
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {{name: g, namespace: one}}
spec:
  selector: {{istio: edge}}
  servers:
  - {{port: {{number: 15443, name: t, protocol: TLS}}, hosts: [{hosts}], tls: {{mode: AUTO_PASSTHROUGH}}}}
"
    )
}

/// Calls a function with the listeners of a router that Gateways select by `istio: edge`.
pub(super) fn with_part<T>(files: &[(&str, &str)], read: impl FnOnce(&BuildContext, &GatewayPart) -> T) -> T {
    let world = folder_world(Installation::default(), files);
    let metadata = json!({"LABELS": {"istio": "edge"}});
    let proxy = client("router~10.1.0.7~edge.edge~edge.svc.cluster.local", &metadata);
    with_context(&world, |ctx| {
        let class = ProxyClass::of(ctx, &proxy, &Shared::default());
        let selected = Selected::of(ctx, &class);
        let part = GatewayPart::of(ctx, &selected, &FilterProxyView::of(ctx, &selected));
        read(ctx, &part)
    })
}

fn listener(part: &GatewayPart, chain: ServerChain) -> GatewayKey {
    GatewayKey {
        client: part.client.clone(),
        binds: vec!["0.0.0.0".into()],
        port: 15443,
        transport: Transport::Tcp,
        chains: vec![chain],
    }
}

/// Returns true for each chain of the services that leads to its cluster, and the notes, if the first chain has this
/// place and the filters of each take 48 KiB.
fn served(place: usize) -> (Vec<bool>, Vec<String>) {
    let mesh = format!(
        "accessLogFile: /dev/stdout\naccessLogFormat: {}\n",
        "x".repeat(48 << 10)
    );
    let files = [("mesh.yaml", mesh.as_str()), ("kube.yaml", SERVICES)];
    let services = ["a", "b"].map(|name| ScopedService {
        key: ServiceKey {
            hostname: format!("{name}.default.svc.cluster.local").into(),
            namespace: "default".into(),
        },
        merged: None,
    });
    with_part(&files, |ctx, part| {
        let chain = ServerChain::AutoPassthrough {
            gateway: "edge/g".into(),
            services: services.to_vec(),
            place,
            is_cut: false,
        };
        let built = listener(part, chain).build(ctx);
        let listener = any_to_json(&built.resource.expect("a listener").any());
        let chains = listener["filterChains"].as_array().expect("chains");
        let rows = services.iter().filter_map(|service| ctx.scoped(service));
        let expected: usize = rows.map(|service| part.passed_through(ctx, &service)).sum();
        assert_eq!(chains.len(), expected);
        let is_served = |chain: &Value| !chain.to_string().contains("BlackHoleCluster");
        let notes = built.notes.iter().map(|note| note.detail.to_string());
        (chains.iter().map(is_served).collect(), notes.collect())
    })
}

#[test]
fn servers_without_all_chains_are_noted() {
    let chain = ServerChain::AutoPassthrough {
        gateway: "edge/g".into(),
        services: Vec::new(),
        place: 4,
        is_cut: true,
    };
    let built = with_part(&[], |ctx, part| listener(part, chain).build(ctx));
    assert!(built.resource.is_none());
    let notes: Vec<&str> = built.notes.iter().map(|note| note.detail.as_str()).collect();
    let expected = "edge/g: spec.servers: port 15443: servers with AUTO_PASSTHROUGH before it have 262144 filter \
                    chains, so it has those of its oldest services only";
    assert_eq!(notes, [expected]);
}

#[test]
fn r21_only_chains_beyond_the_limit_are_closed() {
    assert_eq!(served(4), (vec![true; 7], Vec::new()));
    let (served, notes) = served(4094);
    assert_eq!(served, [true, true, true, false, false, false, false]);
    let [note] = &notes[..] else {
        panic!("one note: {notes:?}");
    };
    assert!(note.starts_with("edge/g: spec.servers: port 15443: "), "{note}");
}
