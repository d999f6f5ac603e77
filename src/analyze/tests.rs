//! Properties of whole analyses.

use serde_json::{Value, json};

use super::*;

fn mesh(yaml: &str) -> Mesh {
    let content = read("mesh.yaml", yaml.as_bytes(), "");
    assert_eq!(content.problems, Vec::<String>::new());
    Mesh::new(content.objects, Settings::default())
}

fn codes(yaml: &str, scope: &Scope) -> Vec<String> {
    let messages = analyze(&mesh(yaml), scope);
    messages
        .iter()
        .map(|it| format!("{} {}", it.code, it.resource))
        .collect()
}

fn only(analyzer: &str) -> Scope {
    Scope {
        analyzers: vec![analyzer.to_owned()],
        ..Scope::default()
    }
}

const NAMESPACES: &str = "
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Namespace, metadata: {name: a}}
- {apiVersion: v1, kind: Namespace, metadata: {name: b, annotations: {galley.istio.io/analyze-suppress: 'IST0102,X'}}}
- {apiVersion: v1, kind: Namespace, metadata: {name: kube-system}}
- {apiVersion: v1, kind: Namespace, metadata: {name: c}}
";

#[test]
fn messages_are_suppressed() {
    let mut scope = only("injection.Analyzer");
    assert_eq!(
        codes(NAMESPACES, &scope),
        ["IST0102 Namespace a", "IST0102 Namespace c"]
    );
    scope.suppressions = vec![Suppression::parse("IST0102=Namespace c*").unwrap()];
    assert_eq!(codes(NAMESPACES, &scope), ["IST0102 Namespace a"]);
    scope.namespace = Some("c".to_owned());
    assert_eq!(codes(NAMESPACES, &scope), [""; 0]);
}

#[test]
fn problems_have_places() {
    let text = "a: [\n---\nkind: Pod\n---\n\n# comment\napiVersion: v1\nkind: Pod\nmetadata: {}\n---\nx";
    let content = read("f.yaml", text.as_bytes(), "");
    assert_eq!(content.objects, []);
    let places: Vec<&str> = content
        .problems
        .iter()
        .map(|it| it.split_inclusive(": ").next().unwrap())
        .collect();
    assert_eq!(places, ["f.yaml: ", "f.yaml:3: ", "f.yaml:6: ", "f.yaml:11: "]);
    assert!(content.problems[0].contains("line 1"), "{:?}", content.problems);
    assert_eq!(read("f.yaml", b"\xff", "").problems.len(), 1);
}

#[test]
fn later_objects_replace_earlier_ones() {
    let text = "{apiVersion: v1, kind: Namespace, metadata: {name: a}}\n---\n\
                {apiVersion: v1, kind: Namespace, metadata: {name: a, labels: {istio-injection: disabled}}}";
    assert_eq!(codes(text, &only("injection.Analyzer")), [""; 0]);
}

#[test]
fn services_of_clusters_are_compared() {
    let service = |cluster: &str, spec: Value| {
        let manifest = json!({"metadata": {"name": "s", "namespace": "n"}, "spec": spec});
        Object {
            cluster: cluster.into(),
            ..Object::of(crate::api::Kind::Service.into(), manifest, "").unwrap()
        }
    };
    let scope = only("services.MultiClusterServiceAnalyzer");
    let port = |port: u16| json!({"ports": [{"name": "http", "port": port}]});
    for (other, want) in [
        (port(80), 0),
        (port(81), 1),
        (json!({"ports": [{"name": "http", "port": 80}], "clusterIP": "None"}), 1),
        (
            json!({"ports": [{"name": "http", "port": 80}], "type": "LoadBalancer"}),
            1,
        ),
    ] {
        let mesh = Mesh::new([service("c1", port(80)), service("c2", other)], Settings::default());
        let messages = analyze(&mesh, &scope);
        assert_eq!(messages.len(), want, "{messages:?}");
        assert!(
            messages
                .iter()
                .all(|it| it.code == "IST0170" && it.text.contains("c1, c2"))
        );
    }
}

/// Manifests whose fields have wrong types.
#[test]
fn wrong_types_do_not_panic() {
    let values = [
        json!(null),
        json!(1),
        json!("x"),
        json!([1]),
        json!([[]]),
        json!({"a": 1}),
        json!([{"a": []}]),
    ];
    let fields = [
        "spec",
        "status",
        "webhooks",
        "data",
        "selector",
        "hosts",
        "http",
        "servers",
        "ports",
        "gateways",
        "rules",
        "workloadSelector",
        "configPatches",
        "template",
        "accessLogging",
        "tracing",
        "subsets",
        "trafficPolicy",
    ];
    for kind in Type::all() {
        let mut objects = Vec::new();
        for (index, value) in values.iter().enumerate() {
            for field in fields {
                let mut manifest = json!({"metadata": {
                    "name": format!("{field}-{index}"), "namespace": "n", "labels": value, "annotations": value,
                }});
                manifest[field] = value.clone();
                if field != "spec" {
                    manifest["spec"] = json!({field: value});
                }
                objects.extend(Object::of(kind, manifest, ""));
            }
        }
        analyze(&Mesh::new(objects, Settings::default()), &Scope::default());
    }
}

/// The work grows with the number of objects, not with its square. A square of all pairs would take minutes.
#[test]
fn large_meshes_are_analyzed() {
    let mut objects = Vec::new();
    let mut add = |kind: Type, namespace: String, name: String, labels: Value, spec: Value| {
        let metadata = json!({"name": name, "namespace": namespace, "labels": labels});
        objects.extend(Object::of(kind, json!({"metadata": metadata, "spec": spec}), ""));
    };
    use crate::api::Kind;
    for number in 0..1000 {
        let namespace = || format!("n{}", number % 50);
        let name = || format!("x{number}");
        let labels = json!({"app": name()});
        let ports = json!([{"name": "http", "port": 80, "protocol": "TCP"}]);
        add(Kind::Pod.into(), namespace(), name(), labels.clone(), json!({}));
        let service = json!({"selector": labels, "ports": ports});
        add(Kind::Service.into(), namespace(), name(), json!({}), service);
        let route = json!([{"route": [{"destination": {"host": name()}}]}]);
        let virtual_service = json!({"hosts": [name()], "gateways": ["g/x1"], "http": route});
        add(
            Kind::VirtualService.into(),
            namespace(),
            name(),
            json!({}),
            virtual_service,
        );
        let server = json!({"port": {"number": 80}, "hosts": [format!("{}.example.com", name())]});
        let gateway = json!({"selector": {"app": name()}, "servers": [server]});
        add(Kind::Gateway.into(), "g".to_owned(), name(), json!({}), gateway);
        let rule = json!({"host": name(), "subsets": [{"name": "v", "labels": {"app": name()}}]});
        add(Kind::DestinationRule.into(), namespace(), name(), json!({}), rule);
        let sidecar = json!({"workloadSelector": {"labels": {"app": name()}}});
        add(Kind::Sidecar.into(), namespace(), name(), json!({}), sidecar);
    }
    let messages = analyze(&Mesh::new(objects, Settings::default()), &Scope::default());
    assert!(messages.iter().all(|it| it.code != "IST0173"), "every subset has a pod");
    assert!(messages.iter().any(|it| it.code == "IST0132"));
}

/// One object with many mistakes has few messages of bounded size. Their number times the size of the object would be
/// gigabytes for the largest object that an API server accepts.
#[test]
fn large_objects_have_few_messages() {
    use crate::api::Kind;
    let object = |kind: Kind, name: &str, spec: Value| {
        let metadata = json!({"name": name, "namespace": "n", "labels": {"app": "g"}});
        Object::of(kind.into(), json!({"metadata": metadata, "spec": spec}), "").unwrap()
    };
    let hosts: Vec<String> = (0..2000).map(|number| format!("a{number}.example.com")).collect();
    let mut gateways: Vec<String> = (0..3000).map(|number| format!("absent{number}")).collect();
    gateways.extend((0..3000).map(|_| "g".to_owned()));
    let claim = json!({"headers": {"@request.auth.claims.group": {"exact": "a"}}});
    let routes: Vec<Value> = (0..2000).map(|_| json!({"destination": {"host": "many"}})).collect();
    let http = json!([{"match": [claim], "route": routes}]);
    let ports: Vec<Value> = (1..3000)
        .map(|number| json!({"name": "http", "port": number}))
        .collect();
    let mut objects = vec![
        object(
            Kind::VirtualService,
            "v",
            json!({"hosts": hosts, "gateways": gateways, "http": http}),
        ),
        object(Kind::Service, "many", json!({"ports": ports})),
        object(Kind::Gateway, "g", json!({"selector": {"app": "g"}})),
    ];
    objects.extend((0..50).map(|number| object(Kind::Pod, &format!("p{number}"), json!({}))));
    let messages = analyze(&Mesh::new(objects, Settings::default()), &Scope::default());
    let of = |code: &str| -> Vec<&Message> {
        let found = messages.iter();
        found.filter(|it| it.code == code && it.resource.name == "v").collect()
    };
    for (code, count) in [("IST0101", 101), ("IST0132", 101), ("IST0112", 101), ("IST0149", 10)] {
        let found = of(code);
        assert_eq!(found.len(), count, "{code}");
        let omitted = found.iter().filter(|it| it.text.ends_with("are omitted"));
        assert_eq!(omitted.count(), usize::from(count == 101), "{code}");
    }
    let serves_none = of("IST0132").iter().any(|it| it.text.ends_with(", and 1990 more"));
    assert!(serves_none, "{:?}", of("IST0132"));
    let bytes: usize = messages.iter().map(|it| it.text.len()).sum();
    assert!(bytes < 1_000_000, "{bytes}");
}

/// With `PILOT_SCOPE_GATEWAY_TO_NAMESPACE`, Gateways of other namespaces select other pods.
#[test]
fn certificates_are_compared_where_gateways_select_the_same_pods() {
    use crate::api::Kind;
    let gateway = |namespace: &str, name: &str| {
        let server = json!({"port": {"number": 443}, "hosts": ["*"], "tls": {"credentialName": "c"}});
        let manifest = json!({
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"selector": {"app": "g"}, "servers": [server]},
        });
        Object::of(Kind::Gateway.into(), manifest, "").unwrap()
    };
    let objects = [gateway("a", "g"), gateway("b", "g"), gateway("b", "h")];
    for (scopes_gateways, want) in [
        (false, &["a/g", "a/g", "b/g", "b/g", "b/h", "b/h"][..]),
        (true, &["b/g", "b/h"]),
    ] {
        let settings = Settings {
            scopes_gateways,
            ..Settings::default()
        };
        let messages = analyze(
            &Mesh::new(objects.clone(), settings),
            &only("gateway.CertificateAnalyzer"),
        );
        let about: Vec<String> = messages
            .iter()
            .map(|it| format!("{}/{}", it.resource.namespace, it.resource.name))
            .collect();
        assert_eq!(about, want, "{messages:?}");
    }
}

/// The pods of a Gateway, and their Secrets, may be in another cluster than the Gateway.
#[test]
fn credentials_are_found_in_further_clusters() {
    use crate::api::Kind;
    let of = |kind: Kind, cluster: &str, manifest: Value| Object {
        cluster: cluster.into(),
        ..Object::of(kind.into(), manifest, "n").unwrap()
    };
    let server = json!({"port": {"number": 443}, "hosts": ["*"], "tls": {"credentialName": "c"}});
    let gateway = json!({"metadata": {"name": "g"}, "spec": {"selector": {"app": "g"}, "servers": [server]}});
    let pod = json!({"metadata": {"name": "p", "labels": {"app": "g"}}});
    let objects = [
        of(Kind::Gateway, "default", gateway),
        of(Kind::Pod, "other", pod),
        of(Kind::Secret, "other", json!({"metadata": {"name": "c"}})),
    ];
    let mesh = Mesh::new(objects, Settings::default());
    let messages = analyze(&mesh, &only("gateway.SecretAnalyzer"));
    let codes: Vec<&str> = messages.iter().map(|it| it.code).collect();
    assert_eq!(codes, ["IST0161"], "the Secret exists and has no certificate");
}
