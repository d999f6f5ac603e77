use serde_json::json;

use super::*;
use crate::{
    analyze::Message,
    kube::Object as KubeObject,
    model::{Installation, fixture},
};

const SYSTEM: &str = "istio-system";

fn entry(kind: Kind, object: &Value) -> Entry {
    let object = KubeObject::from_value(object.clone()).expect("an object");
    Entry::of(kind.into(), object)
}

fn virtual_service(name: &str, version: &str, status: &Value) -> Value {
    let metadata = json!({"name": name, "namespace": "a", "resourceVersion": version, "generation": 1});
    json!({"apiVersion": "networking.istio.io/v1", "kind": "VirtualService", "metadata": metadata,
        "spec": {"hosts": ["x"], "http": [{"route": [{"destination": {"host": "absent"}}]}]}, "status": status})
}

fn namespace(name: &str, labels: &Value) -> Value {
    json!({"metadata": {"name": name, "labels": labels}})
}

fn mesh(config: &str) -> std::sync::Arc<MeshSnapshot> {
    fixture::folder_world(Installation::default(), &[("mesh.yaml", config)]).snapshot()
}

/// Inputs in which every kind is known, with the mesh config of a folder.
fn inputs(mesh_yaml: &str) -> AnalysisInputs {
    let mut inputs = AnalysisInputs::new("default".into());
    assert!(inputs.observe(&mesh(mesh_yaml)) && inputs.set_tags(BTreeSet::new()));
    for kind in Type::all() {
        inputs.apply_event(kind, WatchEvent::Restarted(Vec::new()));
    }
    inputs
}

fn analyze(inputs: &mut AnalysisInputs) -> Vec<Message> {
    let (objects, settings) = inputs.analysis(SYSTEM, 0).expect("complete inputs");
    crate::analyze::analyze(
        &crate::analyze::Mesh::new(objects, settings),
        &crate::analyze::Scope::default(),
    )
}

#[test]
fn nothing_is_analyzed_before_everything_is_known() {
    let mut inputs = AnalysisInputs::default();
    inputs.observe(&mesh("{}"));
    let all: Vec<Type> = Type::all().collect();
    for kind in &all {
        assert!(inputs.analysis(SYSTEM, 0).is_none(), "{} is unknown", kind.name());
        assert!(
            inputs.apply_event(*kind, WatchEvent::Restarted(Vec::new())),
            "the first list is a change"
        );
    }
    assert!(inputs.analysis(SYSTEM, 0).is_none(), "the tags are unknown");
    inputs.set_tags(BTreeSet::new());
    assert!(inputs.analysis(SYSTEM, 0).is_some());
    inputs.forget(Kind::Service.into());
    assert!(inputs.analysis(SYSTEM, 0).is_none(), "an unknown kind is not empty");
    assert!(inputs.is_absent(Kind::Service.into()));
    assert!(inputs.analysis(SYSTEM, 0).is_some());
}

#[test]
fn messages_are_written_and_removed() {
    let mut inputs = inputs("{}");
    let kind = Type::from(Kind::VirtualService);
    let take = |inputs: &mut AnalysisInputs, version: &str, status: &Value| {
        let object = virtual_service("astray", version, status);
        inputs.apply_event(kind, WatchEvent::Applied(entry(Kind::VirtualService, &object)))
    };
    assert!(take(&mut inputs, "1", &json!({})));
    let found = Found::new(&analyze(&mut inputs), &inputs.exceeded());
    let due = inputs.due(&found);
    assert_eq!(due.len(), 1, "{due:?}");
    let status = due[0].fields["status"].clone();
    assert_eq!(status["validationMessages"][0]["type"]["code"], "IST0101");
    assert!(!take(&mut inputs, "2", &status), "written messages are no change");
    assert_eq!(inputs.due(&found), [], "nothing is written twice");
    let removed = inputs.due(&Found::default());
    assert_eq!(removed[0].fields["status"]["validationMessages"], Value::Null);
    let mut changed = virtual_service("astray", "3", &status);
    changed["spec"]["hosts"] = json!(["y"]);
    assert!(inputs.apply_event(kind, WatchEvent::Applied(entry(Kind::VirtualService, &changed))));
    assert_eq!(
        inputs.due(&Found::default()),
        [],
        "a changed object waits for its analysis"
    );
    assert!(
        inputs.apply_event(kind, WatchEvent::Restarted(Vec::new())),
        "a removed object is a change"
    );
    assert_eq!(inputs.due(&found), []);
}

/// The result of a write can arrive after the watch has reported what happened next.
#[test]
fn results_of_writes_do_not_replace_newer_versions() {
    let mut inputs = inputs("{}");
    let kind = Type::from(Kind::VirtualService);
    let astray = |version: &str| entry(Kind::VirtualService, &virtual_service("astray", version, &json!({})));
    inputs.apply_event(kind, WatchEvent::Applied(astray("1")));
    let mut repaired = virtual_service("astray", "10", &json!({}));
    repaired["spec"]["http"] = json!([{"directResponse": {"status": 200}}]);
    inputs.apply_event(kind, WatchEvent::Applied(entry(Kind::VirtualService, &repaired)));
    assert!(!inputs.take_written(kind, astray("9")), "version 10 is known");
    assert_eq!(analyze(&mut inputs), []);
    assert!(inputs.take_written(kind, astray("11")));
    assert_eq!(analyze(&mut inputs).len(), 1);
    inputs.apply_event(kind, WatchEvent::Deleted(astray("12")));
    assert!(!inputs.take_written(kind, astray("11")), "the object no longer exists");
    assert_eq!(analyze(&mut inputs), []);
    inputs.forget(kind);
    assert!(!inputs.take_written(kind, astray("11")));
    assert!(!inputs.are_complete(), "one object is not the list of its kind");
}

#[test]
fn unselected_namespaces_are_not_analyzed() {
    let mesh = "{discoverySelectors: [{matchLabels: {mesh: mine}}]}";
    let mut inputs = inputs(mesh);
    for (name, labels) in [("a", json!({})), (SYSTEM, json!({})), ("b", json!({"mesh": "mine"}))] {
        let namespace = entry(Kind::Namespace, &namespace(name, &labels));
        inputs.apply_event(Kind::Namespace.into(), WatchEvent::Applied(namespace));
    }
    let astray = virtual_service("astray", "1", &json!({}));
    let astray = entry(Kind::VirtualService, &astray);
    inputs.apply_event(Kind::VirtualService.into(), WatchEvent::Applied(astray));
    assert!(
        analyze(&mut inputs)
            .iter()
            .all(|message| message.resource.namespace != "a")
    );
    let labelled = entry(Kind::Namespace, &namespace("a", &json!({"mesh": "mine"})));
    assert!(inputs.apply_event(Kind::Namespace.into(), WatchEvent::Applied(labelled)));
    assert!(
        analyze(&mut inputs)
            .iter()
            .any(|message| message.resource.name == "astray")
    );
}

/// Parity (pilot/pkg/config/kube/crdclient/client.go): selectors concern objects in namespaces.
#[test]
fn policies_may_name_unselected_namespaces() {
    let mut inputs = inputs("{discoverySelectors: [{matchLabels: {mesh: mine}}]}");
    for (name, labels) in [("a", json!({})), ("b", json!({"mesh": "mine"}))] {
        let namespace = entry(Kind::Namespace, &namespace(name, &labels));
        inputs.apply_event(Kind::Namespace.into(), WatchEvent::Applied(namespace));
    }
    let policy = json!({"metadata": {"name": "p", "namespace": "b"},
        "spec": {"rules": [{"from": [{"source": {"namespaces": ["a", "absent"]}}]}]}});
    let policy = entry(Kind::AuthorizationPolicy, &policy);
    inputs.apply_event(Kind::AuthorizationPolicy.into(), WatchEvent::Applied(policy));
    let messages = analyze(&mut inputs);
    let missing: Vec<&str> = messages
        .iter()
        .filter(|message| message.code == "IST0101")
        .map(|message| message.text.as_str())
        .collect();
    assert_eq!(
        missing,
        ["spec.rules[0].from[0].source.namespaces[1]: namespace \"absent\" does not exist"]
    );
}

/// Parity (pkg/config/analysis/incluster/controller.go): unlike the command, it reads all namespaces.
#[test]
fn services_of_system_namespaces_are_known() {
    let mut inputs = inputs("{}");
    let service = json!({"metadata": {"name": "dns", "namespace": "kube-system"}, "spec": {"ports": [{"port": 53}]}});
    let service = entry(Kind::Service, &service);
    inputs.apply_event(Kind::Service.into(), WatchEvent::Applied(service));
    let rule = |name: &str, host: &str| {
        let metadata = json!({"name": name, "namespace": "a"});
        entry(
            Kind::DestinationRule,
            &json!({"metadata": metadata, "spec": {"host": host}}),
        )
    };
    for rule in [
        rule("known", "dns.kube-system.svc.cluster.local"),
        rule("unknown", "absent.kube-system.svc.cluster.local"),
    ] {
        inputs.apply_event(Kind::DestinationRule.into(), WatchEvent::Applied(rule));
    }
    let messages = analyze(&mut inputs);
    let unknown = messages.iter().filter(|message| message.code == "IST0174");
    let names: Vec<&str> = unknown.map(|message| message.resource.name.as_str()).collect();
    assert_eq!(names, ["unknown"]);
}

#[test]
fn definitions_decide_the_version() {
    let mut inputs = AnalysisInputs::default();
    let kind = Type::from(Kind::VirtualService);
    let definition = |versions: &Value| {
        let object =
            json!({"metadata": {"name": "virtualservices.networking.istio.io"}, "spec": {"versions": versions}});
        Entry::of(Type::Definition, KubeObject::from_value(object).expect("an object"))
    };
    inputs.apply_event(Type::Definition, WatchEvent::Restarted(Vec::new()));
    assert_eq!(inputs.served_version(kind), None);
    let versions = json!([{"name": "v1", "served": false}, {"name": "v1beta1", "served": true}]);
    assert!(inputs.apply_event(Type::Definition, WatchEvent::Applied(definition(&versions))));
    assert_eq!(inputs.served_version(kind), Some("v1beta1"));
    let versions = json!([{"name": "v1", "served": true}, {"name": "v1beta1", "served": true}]);
    assert!(inputs.apply_event(Type::Definition, WatchEvent::Applied(definition(&versions))));
    assert_eq!(inputs.served_version(kind), Some("v1"));
}

#[test]
fn irrelevant_objects_are_no_change() {
    let mut inputs = inputs("{}");
    let config_map = |name: &str, annotations: &Value| {
        entry(
            Kind::ConfigMap,
            &json!({"metadata": {"name": name, "namespace": SYSTEM, "annotations": annotations}}),
        )
    };
    let lock = config_map(
        "istio-leader",
        &json!({"control-plane.alpha.kubernetes.io/leader": "{}"}),
    );
    assert!(!inputs.apply_event(Kind::ConfigMap.into(), WatchEvent::Applied(lock)));
    let other = config_map("application", &json!({}));
    assert!(!inputs.apply_event(Kind::ConfigMap.into(), WatchEvent::Applied(other)));
    let injector = config_map("istio-sidecar-injector", &json!({}));
    assert!(inputs.apply_event(Kind::ConfigMap.into(), WatchEvent::Applied(injector)));
    let pod = |phase: &str| {
        let metadata = json!({"name": "p", "namespace": "a", "resourceVersion": phase});
        entry(
            Kind::Pod,
            &json!({"metadata": metadata, "spec": {}, "status": {"phase": phase}}),
        )
    };
    assert!(inputs.apply_event(Kind::Pod.into(), WatchEvent::Applied(pod("Pending"))));
    assert!(!inputs.apply_event(Kind::Pod.into(), WatchEvent::Applied(pod("Running"))));
    assert!(inputs.apply_event(Kind::Pod.into(), WatchEvent::Deleted(pod("Running"))));
    let mut canary = virtual_service("canary", "1", &json!({}));
    canary["metadata"]["labels"] = json!({"istio.io/rev": "canary"});
    let canary = entry(Kind::VirtualService, &canary);
    assert!(!inputs.apply_event(Kind::VirtualService.into(), WatchEvent::Applied(canary)));
}

/// Objects of other revisions are unknown, and their messages belong to other control planes. Those of a tag are of the
/// revision that it points to.
#[test]
fn revisions_and_tags_decide_what_is_analyzed() {
    let mut inputs = inputs("{}");
    for (name, revision) in [("own", "default"), ("tagged", "tag"), ("foreign", "canary")] {
        let namespace = entry(Kind::Namespace, &namespace(name, &json!({"istio.io/rev": revision})));
        inputs.apply_event(Kind::Namespace.into(), WatchEvent::Applied(namespace));
    }
    let metadata = json!({"name": "p", "namespace": "own", "labels": {"istio.io/rev": "tag"}});
    let source = json!({"namespaces": ["own", "tagged", "foreign"]});
    let status = json!({"validationMessages": [{"type": {"code": "IST0127"}}]});
    let policy = json!({"metadata": metadata, "spec": {"rules": [{"from": [{"source": source}]}]}, "status": status});
    let policy = entry(Kind::AuthorizationPolicy, &policy);
    assert!(
        !inputs.apply_event(Kind::AuthorizationPolicy.into(), WatchEvent::Applied(policy)),
        "the policy is of another revision"
    );
    assert_eq!(analyze(&mut inputs), []);
    assert_eq!(
        inputs.due(&Found::default()),
        [],
        "another control plane has written it"
    );
    assert!(inputs.set_tags([SmolStr::new("tag")].into()));
    assert_eq!(
        inputs.due(&Found::default()),
        [],
        "nothing is written before the analysis"
    );
    let messages = analyze(&mut inputs);
    let missing = messages.iter().filter(|message| message.code == "IST0101");
    let missing: Vec<&str> = missing.map(|message| message.text.as_str()).collect();
    assert_eq!(missing.len(), 1, "{missing:?}");
    assert!(missing[0].contains("\"foreign\""), "{missing:?}");
    assert_eq!(inputs.due(&Found::default()).len(), 1);
}

/// Parity (pilot/pkg/config/kube/crdclient/client.go).
#[test]
fn gateways_of_the_gateway_api_count_in_all_revisions() {
    let mut inputs = inputs("{}");
    let metadata = json!({"name": "g", "namespace": "a", "labels": {"istio.io/rev": "foreign"}});
    let status = json!({"conditions": [{"type": "Accepted", "status": "False"}]});
    let gateway = entry(
        Kind::KubeGateway,
        &json!({"metadata": metadata, "spec": {}, "status": status}),
    );
    assert!(inputs.apply_event(Kind::KubeGateway.into(), WatchEvent::Applied(gateway)));
    let codes: Vec<&str> = analyze(&mut inputs).iter().map(|message| message.code).collect();
    assert_eq!(codes, ["IST0171"]);
}

#[test]
fn settings_follow_feature_variables() {
    let mut installation = Installation::default();
    installation.features.pilot_scope_gateway_to_namespace = true;
    let world = fixture::folder_world(installation, &[("mesh.yaml", "{}")]);
    let mut inputs = inputs("{}");
    assert!(inputs.observe(&world.snapshot()), "a change");
    let (_, settings) = inputs.analysis(SYSTEM, 0).expect("complete inputs");
    assert!(settings.scopes_gateways);
}

#[test]
fn objects_of_other_namespaces_are_not_analyzed() {
    let is_read = |only: &str| {
        let entry = entry(Kind::VirtualService, &virtual_service("x", "1", &json!({})));
        let only = WatchedNamespaces::new([SmolStr::new(only)].into());
        entry.within(&only).object.is_some()
    };
    assert!(is_read("a") && !is_read("b"));
}
