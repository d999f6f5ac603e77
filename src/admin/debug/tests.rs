use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::forms;
use crate::model::{Installation, fixture};

const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]}
---
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceExport
metadata: {name: a}
---
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceImport
metadata: {name: a}
spec: {ips: [240.0.0.1]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: east, namespace: istio-system, labels: {topology.istio.io/network: n2}}
spec:
  gatewayClassName: istio
  addresses: [{type: IPAddress, value: 1.2.3.4}]
  listeners: [{name: tls, port: 15443, protocol: TLS, tls: {mode: Passthrough}}]
";

#[test]
fn multi_cluster_services_are_listed() {
    let mut installation = Installation::default();
    installation.features.enable_mcs_service_discovery = true;
    installation.features.enable_mcs_host = true;
    let import = OBJECTS.split("---").nth(2).unwrap_or_default();
    let files = [("kube-c2.yaml", OBJECTS), ("kube.yaml", import)];
    let shown = forms::scope::mcs(&fixture::folder_world(installation, &files).snapshot());
    let want = json!([
        { "Cluster": "Kubernetes", "Name": "a", "Namespace": "default", "Exported": false, "Imported": true,
          "ClusterSetVIP": "240.0.0.1", "Discoverability": null },
        { "Cluster": "c2", "Name": "a", "Namespace": "default", "Exported": true, "Imported": true,
          "ClusterSetVIP": "240.0.0.1", "Discoverability": {
              "a.default.svc.cluster.local": "AlwaysDiscoverable",
              "a.default.svc.clusterset.local": "AlwaysDiscoverable" } },
    ]);
    assert_eq!(shown, want);
    let off = fixture::folder_world(Installation::default(), &files);
    assert_eq!(forms::scope::mcs(&off.snapshot()), Value::Null);
}

#[test]
fn a_service_has_the_type_in_the_config_cluster() {
    let service = OBJECTS.split("---").next().unwrap_or_default();
    let remote = service.replace("clusterIP:", "type: LoadBalancer, clusterIP:");
    let files = [("kube-A.yaml", remote.as_str()), ("kube.yaml", service)];
    let shown = forms::service::registry(&fixture::folder_world(Installation::default(), &files).snapshot());
    assert_eq!(shown[0]["Attributes"]["Type"], "ClusterIP");
}

#[test]
fn network_gateways_are_listed() {
    let world = fixture::folder_world(Installation::default(), &[("kube-c2.yaml", OBJECTS)]);
    let want = json!([{ "Network": "n2", "Cluster": "c2", "Addr": "1.2.3.4", "Port": 15443, "HBONEPort": 0,
        "ServiceAccount": { "Namespace": "istio-system", "Name": "east" } }]);
    assert_eq!(forms::endpoint::networks(&world.snapshot()), want);
}

#[test]
fn endpoints_are_listed_by_host_and_namespace() {
    let entry = |namespace: &str, host: &str, address: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\n\
             metadata: {{name: {host}, namespace: {namespace}}}\n\
             spec:\n  hosts: [{host}.example.com]\n  resolution: STATIC\n\
             \x20 ports: [{{number: 80, name: http, protocol: HTTP}}]\n  endpoints: [{{address: {address}}}]\n"
        )
    };
    let entries = [
        entry("one", "a", "10.0.0.1"),
        entry("two", "a", "10.0.0.2"),
        entry("one", "b", "10.0.0.3"),
    ];
    let world = fixture::folder_world(Installation::default(), &[("entries.yaml", &entries.concat())]);
    let page = serde_json::to_value(forms::endpoint::Shards(&world.snapshot())).expect("a page");
    let address = |host: &str, namespace: &str| {
        let shards = page[host][namespace]["Shards"].as_object();
        let mut shards = shards.into_iter().flat_map(|shards| shards.values());
        shards
            .next()
            .map_or(Value::Null, |shard| shard[0]["Addresses"][0].clone())
    };
    assert_eq!(address("a.example.com", "one"), "10.0.0.1");
    assert_eq!(address("a.example.com", "two"), "10.0.0.2");
    assert_eq!(address("b.example.com", "one"), "10.0.0.3");
    assert_eq!(page.as_object().map(serde_json::Map::len), Some(2));
}

#[test]
fn tables_are_listed_with_their_keys() {
    let world = fixture::folder_world(Installation::default(), &[("kube.yaml", OBJECTS)]);
    let page = serde_json::to_value(forms::state::Tables(&world.snapshot())).expect("a page");
    let state = |name: &str| {
        let mut tables = page.as_array().into_iter().flatten();
        let found = tables.find(|table| table["name"] == name);
        found.map_or(Value::Null, |table| table["state"].clone())
    };
    let services = json!({ "outputs": { "default/a": {} }, "synced": true });
    assert_eq!(state("kube_services"), services);
    assert_eq!(state("kube_services_by_namespace")["inputCollection"], "kube_services");
    assert_eq!(state("wasm_plugins"), json!({ "synced": true }));
}

/// Returns a certificate that expires at this time, as PEM.
fn certificate(host: &str, expires: SystemTime) -> String {
    let mut parameters = CertificateParams::new([host.to_owned()]).expect("parameters");
    parameters.not_after = OffsetDateTime::from(expires);
    let key = KeyPair::generate().expect("a key");
    parameters.self_signed(&key).expect("a certificate").pem()
}

#[test]
fn certificates_that_expire_first_are_first() {
    let now = UNIX_EPOCH + Duration::from_hours(500_000);
    let (hour, day) = (Duration::from_hours(1), Duration::from_hours(24));
    let secret = |name: &str, content: &str| {
        let data = json!({ "tls.crt": content });
        let meta = json!({ "name": name, "namespace": "edge" });
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "kubernetes.io/tls", "stringData": data })
    };
    let secrets = [
        secret("soon", &certificate("a.test", now + hour)),
        secret("expired", &certificate("b.test", now - hour)),
        secret(
            "broken",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ),
    ];
    let text = secrets.map(|secret| secret.to_string()).join("\n---\n");
    let mesh = fixture::folder_world(Installation::default(), &[("kube.yaml", &text)]).snapshot();
    let anchors = [certificate("root.test", now + day)];
    let rows = forms::certificate::certificates(&mesh, None, &anchors, now);
    let rows = rows.as_array().expect("rows");
    let name = |row: &Value| {
        (
            row["object"]["name"].clone(),
            row["kind"].clone(),
            row["expiresInSeconds"].clone(),
        )
    };
    let names: Vec<_> = rows.iter().map(name).collect();
    assert_eq!(
        names,
        [
            (json!("broken"), json!("Secret"), Value::Null),
            (json!("expired"), json!("Secret"), json!(-3600)),
            (json!("soon"), json!("Secret"), json!(3600)),
            (Value::Null, json!("root"), json!(86_400)),
        ]
    );
    assert!(rows[0]["error"].is_string() && rows[1]["error"].is_null(), "{rows:?}");
}
