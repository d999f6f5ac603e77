use proptest::prelude::*;
use serde_json::{Value, json};

use super::{endpoint_slice::PodReference, service::TargetPort, *};
use crate::{
    api::{
        FieldError, Kind, Meta,
        field::{FieldErrors, Fields},
    },
    base::{ClusterId, Shared},
};

fn meta(kind: Kind, object: &Value) -> Shared<Meta> {
    Shared::new(Meta::parse(kind, &ClusterId::new("c1"), object).expect("because the metadata is fine"))
}

fn fields(errors: &[FieldError]) -> Vec<&str> {
    errors.iter().map(|error| error.field.as_str()).collect()
}

#[test]
fn metadata_has_the_defaults_of_a_mesh_folder() {
    let object = json!({"metadata": {"name": "a", "labels": {"x": "y"}}});
    let pod = Meta::parse(Kind::Pod, &ClusterId::new("c1"), &object).unwrap();
    assert_eq!((pod.namespace().as_str(), pod.name().as_str()), ("default", "a"));
    assert_eq!((pod.creation, pod.resource_version.as_str()), (1_704_067_200, "1"));
    let node = Meta::parse(Kind::Node, &ClusterId::new("c1"), &object).unwrap();
    assert_eq!(node.namespace().as_str(), "");
}

#[test]
fn parsed_lists_have_no_spare_capacity() {
    let object = json!({"metadata": {"name": "a", "labels": {"x": "y"}}, "spec": {"clusterIPs": ["10.0.0.1"]}});
    let service = Service::parse(meta(Kind::Service, &object), &object).unwrap();
    assert_eq!(service.cluster_ips.capacity(), 1);
    let errors = FieldErrors::default();
    let labels = Fields::root(&object, &errors).object("metadata").labels("labels");
    assert_eq!(labels.into_tuple_vec().capacity(), 1);
}

#[test]
fn invalid_metadata_is_reported() {
    let object = json!({"metadata": {"namespace": [], "creationTimestamp": "yesterday", "labels": {"v": {}}}});
    let errors = Meta::parse(Kind::Pod, &ClusterId::new("c1"), &object).unwrap_err();
    let want = [
        "metadata.name",
        "metadata.namespace",
        "metadata.creationTimestamp",
        "metadata.labels.v",
    ];
    assert_eq!(fields(&errors), want);
    assert_eq!(
        fields(&Meta::parse(Kind::Pod, &ClusterId::new("c1"), &json!([])).unwrap_err()),
        ["", "metadata.name"]
    );
}

#[test]
fn service_is_parsed() {
    let object = json!({"metadata": {"name": "a"}, "spec": {
        "clusterIP": "10.0.0.1", "selector": {"app": "a"}, "internalTrafficPolicy": "Local",
        "ports": [{"port": 80, "name": "http", "targetPort": "web"},
            {"port": 81, "protocol": "UDP", "nodePort": 3000}]},
        "status": {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}, {"hostname": "lb.example.com"}]}}});
    let service = Service::parse(meta(Kind::Service, &object), &object).unwrap();
    assert_eq!(service.cluster_ips, ["10.0.0.1"]);
    assert_eq!(service.load_balancer, ["1.2.3.4", "lb.example.com"]);
    assert!(service.node_local && !service.is_headless() && !service.is_external_name());
    assert_eq!(service.ports[0].target, TargetPort::Name("web".into()));
    assert_eq!(service.ports[1].target, TargetPort::Number(0));
    assert_eq!(
        (service.ports[1].protocol.as_str(), service.ports[1].node_port),
        ("UDP", 3000)
    );
}

#[test]
fn type_errors_have_their_paths() {
    let object = json!({"metadata": {"name": "a"}, "spec": {
        "clusterIPs": ["10.0.0.1", []], "selector": [], "ports": [{"port": "80"}, {"port": 70000}, "x", {}]}});
    let errors = Service::parse(meta(Kind::Service, &object), &object).unwrap_err();
    let want = [
        "spec.clusterIPs[1]",
        "spec.ports[2]",
        "spec.ports[0].port",
        "spec.ports[1].port",
        "spec.ports[2].port",
        "spec.ports[3].port",
        "spec.selector",
    ];
    assert_eq!(fields(&errors), want);
}

#[test]
fn pod_has_the_name_of_its_workload() {
    let owned = |kind: &str, name: &str, labels: Value| {
        let object = json!({"metadata": {"name": "p", "generateName": "x-", "labels": labels,
            "ownerReferences": [{"kind": "Other", "name": "o"}, {"kind": kind, "name": name, "controller": true}]}});
        let pod = Pod::parse(meta(Kind::Pod, &object), &object).unwrap();
        format!("{}/{}", pod.workload_kind, pod.workload_name)
    };
    assert_eq!(
        owned("ReplicaSet", "web-5d", json!({"pod-template-hash": "5d"})),
        "Deployment/web"
    );
    assert_eq!(
        owned("ReplicaSet", "web-5d", json!({"rollouts-pod-template-hash": "5d"})),
        "Rollout/web"
    );
    assert_eq!(owned("ReplicaSet", "web-5d", json!({})), "ReplicaSet/web-5d");
    assert_eq!(owned("Job", "tick-28391040", json!({})), "CronJob/tick");
    assert_eq!(owned("Job", "once-7", json!({})), "Job/once-7");
    assert_eq!(owned("Job", "once-123456789012", json!({})), "Job/once-123456789012");
    let config = json!({"deploymentconfig": "web"});
    assert_eq!(owned("ReplicationController", "web-1", config), "DeploymentConfig/web");
    let named = json!({"service.istio.io/workload-name": "other"});
    assert_eq!(owned("StatefulSet", "db", named), "StatefulSet/other");
    assert_eq!(owned("StatefulSet", "db", json!({})), "StatefulSet/db");
}

#[test]
fn named_ports_and_readiness_of_a_pod() {
    let object = json!({"metadata": {"name": "p"}, "spec": {
        "containers": [{"ports": [{"name": "web", "containerPort": 8080}, {"containerPort": 9}]},
            {"ports": [{"name": "web", "containerPort": 1}, {"name": "web", "containerPort": 4, "protocol": "UDP"}]}],
        "initContainers": [{"ports": [{"name": "once", "containerPort": 2}]},
            {"restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 3}]}]},
        "status": {"phase": "Running", "podIP": "10.1.1.1", "conditions": [{"type": "Ready", "status": "True"}]}});
    let pod = Pod::parse(meta(Kind::Pod, &object), &object).unwrap();
    let ports: Vec<_> = pod
        .named_ports
        .iter()
        .map(|((name, protocol), number)| (name.as_str(), protocol.as_str(), *number))
        .collect();
    assert_eq!(ports, [("side", "TCP", 3), ("web", "TCP", 8080), ("web", "UDP", 4)]);
    assert_eq!(
        (pod.named_port("web", "TCP"), pod.named_port("side", "UDP")),
        (Some(8080), None)
    );
    assert!(pod.is_serving());
    assert_eq!((pod.workload_kind.as_str(), pod.workload_name.as_str()), ("Pod", "p"));
}

#[test]
fn secrets_keep_used_keys_and_hide_content() {
    let object = json!({"metadata": {"name": "s", "labels": {"a": "b"}, "annotations": {"last": "hello"}},
        "type": "Opaque", "data": {"tls.key": "aGVsbG8=\n", "tls.crt": "AAE=", "a": "?unused?"},
        "stringData": {"ca.crt": "plain", "b": "unused"}});
    let secret = Secret::parse(meta(Kind::Secret, &object), &object).unwrap();
    let data: Vec<_> = secret
        .data
        .iter()
        .map(|(key, value)| (key.as_str(), &value.reveal()[..]))
        .collect();
    assert_eq!(
        data,
        [("ca.crt", &b"plain"[..]), ("tls.crt", &[0, 1]), ("tls.key", b"hello")]
    );
    assert_eq!(
        (secret.keys.as_str(), secret.meta.labels.len()),
        ("a, b, ca.crt, and 2 more...", 0)
    );
    let printed = format!("{secret:?}");
    assert!(!printed.contains("hello") && !printed.contains("104") && !printed.contains("plain"));
    let bad = json!({"metadata": {"name": "s"}, "data": {"key": "?secret?"}});
    let errors = Secret::parse(meta(Kind::Secret, &bad), &bad).unwrap_err();
    assert_eq!(fields(&errors), ["data.key"]);
    assert!(!errors[0].message.contains("secret"));
    let other =
        json!({"metadata": {"name": "s"}, "data": {"d": "", "a": ""}, "stringData": {"b": "", "c": "", "a": ""}});
    let secret = Secret::parse(meta(Kind::Secret, &other), &other).unwrap();
    assert_eq!((secret.keys.as_str(), secret.data.len()), ("a, b, c, and 1 more...", 0));
}

#[test]
fn slices_nodes_and_config_maps_are_parsed() {
    let object = json!({"metadata": {"name": "s", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": [{"name": "http", "port": 80}, {}],
        "endpoints": [{"addresses": ["10.1.1.1"], "conditions": {"ready": true, "serving": null},
            "targetRef": {"kind": "Pod", "name": "p", "namespace": "n", "uid": "u"}}, {"targetRef": {"kind": "Node"}}]});
    let slice = EndpointSlice::parse(meta(Kind::EndpointSlice, &object), &object).unwrap();
    assert_eq!((slice.service_name.as_str(), slice.mirrored), ("web", false));
    assert_eq!(slice.ports, [("http".into(), 80), ("".into(), 0)]);
    let pod = PodReference {
        namespace: "n".into(),
        name: "p".into(),
        uid: "u".into(),
    };
    assert_eq!(slice.endpoints[0].pod, Some(pod));
    assert_eq!(
        (slice.endpoints[0].ready, slice.endpoints[0].serving),
        (Some(true), None)
    );
    assert_eq!(slice.endpoints[1].pod, None);
    let mirrored = json!({"metadata": {"name": "s", "labels": {"kubernetes.io/service-name": "web",
        "multicluster.kubernetes.io/service-name": "web"}}});
    let slice = EndpointSlice::parse(meta(Kind::EndpointSlice, &mirrored), &mirrored).unwrap();
    assert_eq!((slice.service_name.as_str(), slice.mirrored), ("web", true));
    let object = json!({"metadata": {"name": "n"}, "status": {"addresses": [
        {"type": "Hostname", "address": "n"}, {"type": "InternalIP", "address": "10.0.0.9"},
        {"type": "ExternalIP", "address": ""}, {"type": "ExternalIP", "address": "1.0.0.9"}]}});
    let node = Node::parse(meta(Kind::Node, &object), &object).unwrap();
    assert_eq!(node.external_ips, ["1.0.0.9"]);
    let object = json!({"metadata": {"name": "m"}, "data": {"mesh": "x: y", "ca.crt": "roots"},
        "binaryData": {"cacert": "AAE="}});
    let map = ConfigMap::parse(meta(Kind::ConfigMap, &object), &object).unwrap();
    assert_eq!((map.data.len(), &map.data["ca.crt"][..]), (1, &b"roots"[..]));
    assert_eq!(map.keys, "ca.crt, mesh");
}

#[test]
fn annotations_that_nothing_reads_are_dropped() {
    let object = |redirection: &str, other: &str| {
        json!({"metadata": {"name": "a",
            "annotations": {"a/b": other, "ambient.istio.io/redirection": redirection, "x": other}}})
    };
    let pod = |object: &Value| Pod::parse(meta(Kind::Pod, object), object).unwrap();
    let enabled = pod(&object("enabled", "1"));
    assert_eq!(enabled, pod(&object("enabled", "2")));
    assert_ne!(enabled, pod(&object("disabled", "1")));
    assert_eq!(enabled.meta.annotations.len(), 1);
    let object = object("enabled", "1");
    let slice = EndpointSlice::parse(meta(Kind::EndpointSlice, &object), &object).unwrap();
    let node = Node::parse(meta(Kind::Node, &object), &object).unwrap();
    assert_eq!((slice.meta.annotations.len(), node.meta.annotations.len()), (0, 0));
}

fn any_json() -> impl Strategy<Value = Value> {
    let keys = "metadata|name|namespace|labels|spec|status|ports|port|targetPort|selector|podIPs|conditions|containers\
        |data|stringData|addresses|endpoints|targetRef|ownerReferences|creationTimestamp";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z0-9.=]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(keys, inner, 0..5).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_object_gives_a_row_or_named_errors(object in any_json()) {
        let cluster = ClusterId::new("c1");
        let mut found: Vec<FieldError> = Meta::parse(Kind::Pod, &cluster, &object).err().unwrap_or_default();
        let meta = meta(Kind::Pod, &json!({"metadata": {"name": "x"}}));
        found.extend(Pod::parse(meta.clone(), &object).err().unwrap_or_default());
        found.extend(Service::parse(meta.clone(), &object).err().unwrap_or_default());
        found.extend(EndpointSlice::parse(meta.clone(), &object).err().unwrap_or_default());
        found.extend(Secret::parse(meta.clone(), &object).err().unwrap_or_default());
        found.extend(ConfigMap::parse(meta.clone(), &object).err().unwrap_or_default());
        found.extend(Node::parse(meta, &object).err().unwrap_or_default());
        prop_assert!(found.iter().all(|error| !error.message.is_empty()));
    }
}
