use serde_json::json;

use super::*;
use crate::{
    api::{document::parse_object, hidden_gateway::HiddenGateway},
    base::ClusterId,
};

/// Returns the row of an object, after checking that its manifest is an equal row.
fn row(kind: Kind, object: &Value) -> Row {
    let cluster = ClusterId::new("c1");
    let parsed = parse_object(&cluster, kind, object);
    assert!(parsed.diagnostics.is_empty(), "{:?}", parsed.diagnostics);
    let row = parsed.rows.into_iter().next().expect("a row");
    let written = manifest(&row).expect("a manifest");
    let text = serde_json::to_string(&written).expect("JSON");
    let again = parse_object(&cluster, kind, &serde_json::from_str(&text).expect("JSON"));
    assert_eq!(again.rows, std::slice::from_ref(&row), "{text}");
    row
}

fn metadata(name: &str) -> Value {
    json!({ "name": name, "namespace": "shop", "labels": { "app": "a" }, "annotations": { "x/y": "z\n\"é" },
        "creationTimestamp": "2026-03-04T05:06:07Z", "uid": "u-1" })
}

#[test]
fn every_kind_has_a_manifest_that_parses_to_the_same_row() {
    let pod = json!({ "metadata": metadata("a"), "spec": {
            "nodeName": "n", "serviceAccountName": "s", "hostname": "h", "subdomain": "d", "hostNetwork": true,
            "containers": [{ "ports": [{ "name": "web", "containerPort": 80 },
                { "name": "dns", "containerPort": 53, "protocol": "UDP" },
                { "name": "dns", "containerPort": 54 }, { "containerPort": 1 }] }],
            "initContainers": [{ "restartPolicy": "Always", "ports": [{ "name": "side", "containerPort": 9 }] }] },
        "status": { "phase": "Running", "podIPs": [{ "ip": "10.0.0.1" }, { "ip": "fd00::1" }],
            "conditions": [{ "type": "Ready", "status": "True" }] } });
    let ports = json!([{ "port": 80, "name": "http", "targetPort": "web", "appProtocol": "http2", "nodePort": 3 },
        { "port": 81, "protocol": "UDP", "targetPort": 82 }, { "port": 83, "targetPort": "84" }]);
    let service = json!({ "metadata": metadata("a"), "spec": { "type": "LoadBalancer", "clusterIPs": ["1.1.1.1", "fd00::2"],
            "ports": ports, "selector": { "app": "a" }, "externalIPs": ["2.2.2.2"], "internalTrafficPolicy": "Local",
            "trafficDistribution": "PreferClose", "publishNotReadyAddresses": true },
        "status": { "loadBalancer": { "ingress": [{ "ip": "3.3.3.3" }, { "hostname": "lb.example.com" }] } } });
    let headless = json!({ "metadata": metadata("b"), "spec": { "clusterIP": "None", "clusterIPs": ["None"] } });
    let external =
        json!({ "metadata": { "name": "c" }, "spec": { "type": "ExternalName", "externalName": "x.example.com" } });
    let slice = json!({ "metadata": { "name": "a-1", "namespace": "shop",
            "labels": { "kubernetes.io/service-name": "a" } },
        "addressType": "IPv4", "ports": [{ "name": "http", "port": 80 }, {}], "endpoints": [
            { "addresses": ["10.0.0.1"], "conditions": { "ready": true, "serving": true, "terminating": false },
                "hostname": "h", "nodeName": "n", "targetRef": { "kind": "Pod", "namespace": "shop", "name": "a" } },
            { "addresses": ["10.0.0.2", "10.0.0.3"], "conditions": { "ready": false } }, { "addresses": [] },
            { "addresses": ["10.0.0.4"],
                "targetRef": { "kind": "Pod", "namespace": "shop", "name": "b", "uid": "u-2" } }] });
    let node = json!({ "metadata": { "name": "n", "labels": { "topology.kubernetes.io/zone": "z" } },
        "status": { "addresses": [{ "type": "InternalIP", "address": "1.1.1.1" },
            { "type": "ExternalIP", "address": "5.5.5.5" }] } });
    let entry = json!({ "metadata": metadata("vm"), "spec": { "address": "10.9.9.9", "ports": { "http": 80 },
            "labels": { "app": "a" }, "network": "n1", "locality": "r/z/s", "weight": 3, "serviceAccount": "s" },
        "status": { "conditions": [{ "type": "Healthy", "status": "True" }] } });
    let gateway = json!({ "metadata": metadata("gw"), "spec": { "gatewayClassName": "istio-east-west",
            "addresses": [{ "type": "Hostname", "value": "gw.example.com" }, { "value": "4.4.4.4" }],
            "infrastructure": { "labels": { "a": "b" }, "parametersRef": { "group": "", "kind": "ConfigMap", "name": "p" } },
            "tls": { "frontend": { "default": { "validation": { "caCertificateRefs": [{ "name": "ca" }] } },
                "perPort": [{ "port": 443 }] } },
            "allowedListeners": { "namespaces": { "from": "Selector",
                "selector": { "matchExpressions": [{ "key": "k", "operator": "In", "values": ["v"] }] } } },
            "listeners": [{ "name": "mesh", "port": 15008, "protocol": "HBONE", "hostname": "*.example.com",
                "tls": { "mode": "Terminate", "certificateRefs": [{ "name": "c" }], "options": { "o": "p" } },
                "allowedRoutes": { "kinds": [{ "kind": "HTTPRoute" }] } }] },
        "status": { "addresses": [{ "type": "IPAddress", "value": "4.4.4.4" }] } });
    let import = json!({ "metadata": metadata("a"), "spec": { "type": "ClusterSetIP", "ips": ["6.6.6.6"] } });
    let plain = json!({ "metadata": metadata("a") });
    let mesh = json!({ "metadata": metadata("istio"), "data": { "mesh": "trustDomain: td2\n" } });
    let objects = [
        (Kind::MeshConfig, &mesh),
        (Kind::Namespace, &plain),
        (Kind::Node, &node),
        (Kind::Pod, &pod),
        (Kind::Pod, &plain),
        (Kind::Service, &service),
        (Kind::Service, &headless),
        (Kind::Service, &external),
        (Kind::EndpointSlice, &slice),
        (Kind::WorkloadEntry, &entry),
        (Kind::KubeGateway, &gateway),
        (Kind::ServiceExport, &plain),
        (Kind::ServiceImport, &import),
    ];
    for (kind, object) in objects {
        row(kind, object);
    }
    assert!(
        KINDS
            .iter()
            .all(|kind| objects.iter().any(|(tested, _)| tested == kind))
    );
}

#[test]
fn a_hidden_gateway_has_the_manifest_of_its_gateway() {
    let mut object = json!({ "metadata": metadata("gw"), "spec": { "gatewayClassName": "istio" } });
    object["metadata"]["labels"] = json!({ "topology.istio.io/network": "n1" });
    let whole = row(Kind::KubeGateway, &object);
    let Row::KubeGateway(gateway) = &whole else {
        panic!("not a Gateway");
    };
    let hidden = HiddenGateway::of(gateway).map(Row::from).expect("a network gateway");
    assert_eq!(manifest(&hidden), manifest(&whole));
}

#[test]
fn workloads_of_pods_stay_the_same() {
    let owner = |kind: &str, name: &str, labels: Value| {
        json!({ "metadata": { "name": "p", "generateName": "p-", "labels": labels, "deletionTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [{ "kind": "Other", "name": "o" }, { "kind": kind, "name": name, "controller": true }] } })
    };
    let label = "service.istio.io/workload-name";
    for (pod, name, kind) in [
        (
            owner("ReplicaSet", "web-5d4", json!({ "pod-template-hash": "5d4" })),
            "web",
            "Deployment",
        ),
        (
            owner("ReplicaSet", "web-5d4", json!({ "rollouts-pod-template-hash": "5d4" })),
            "web",
            "Rollout",
        ),
        (
            owner("ReplicaSet", "web", json!({ "pod-template-hash": "5d4" })),
            "web",
            "ReplicaSet",
        ),
        (
            owner("ReplicationController", "web-1", json!({ "deploymentconfig": "web" })),
            "web",
            "DeploymentConfig",
        ),
        (owner("Job", "job-12345678", json!({})), "job", "CronJob"),
        (
            owner("Job", "job-12345678-12345678", json!({})),
            "job-12345678",
            "CronJob",
        ),
        (owner("Job", "job", json!({ label: "x-12345678" })), "x-12345678", "Job"),
        (
            owner("StatefulSet", "db", json!({ label: "base" })),
            "base",
            "StatefulSet",
        ),
        (owner("Pod", "other", json!({})), "other", "Pod"),
        (
            json!({ "metadata": { "name": "p", "labels": { label: "x" } } }),
            "x",
            "Pod",
        ),
    ] {
        let Row::Pod(row) = row(Kind::Pod, &pod) else {
            panic!("not a pod");
        };
        assert_eq!(
            (row.workload_name.as_str(), row.workload_kind.as_str()),
            (name, kind),
            "{pod}"
        );
    }
}

#[test]
fn secrets_have_no_manifest() {
    let secret = json!({ "metadata": metadata("s"), "stringData": { "tls.key": "k" } });
    let parsed = parse_object(&ClusterId::new("c1"), Kind::Secret, &secret);
    assert_eq!(manifest(&parsed.rows[0]), None);
}
