//! The test cases of Istio's own conversion of the Gateway API: objects in, Gateways, VirtualServices,
//! DestinationRules and statuses out. They are part of Istio's conformance set, where it is next to the project.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use istiod::{
    api::{Config, folder, yaml},
    model::{
        Change, Installation, MeshSnapshot, World,
        features::Features,
        gateway::NO_NAMESPACE,
        gateway_api::status::{Revisions, StatusKey, Statuses},
    },
    proto::json,
    table::Cx,
};
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::{authority::Authority, project};

pub(crate) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test(
        "gateway_api::objects_are_converted_as_istio_does",
        objects_are_converted_as_istio_does,
    )]
}

fn objects_are_converted_as_istio_does() -> Result<Completion, Failed> {
    let folder = project().join("../shared/conformance/upstream/gateway-api");
    if !folder.is_dir() {
        let reason = "skipped: Istio's conformance set is not next to the project (../shared/conformance)";
        println!("gateway_api: {reason}");
        return Ok(Completion::ignored_with(reason));
    }
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json"))?)?;
    let services = environment(&serde_json::from_slice(&std::fs::read(folder.join("services.json"))?)?);
    let (mut equal, mut errors) = (0, Vec::new());
    let cases = cases.as_array().ok_or("cases.json is not a list")?;
    assert!(!cases.is_empty(), "no cases");
    for case in cases {
        let name = case["name"].as_str().unwrap_or_default();
        let found = compare(&folder, case, &services).map_err(|failed| format!("{name}: {failed:?}"))?;
        if found.is_empty() {
            equal += 1;
        } else {
            errors.push(format!("{name}:\n  {}", found.join("\n  ")));
        }
    }
    println!("gateway_api: {equal} conversions are equal");
    if errors.is_empty() {
        return Ok(Completion::Completed);
    }
    Err(errors.join("\n").into())
}

/// Secrets of the cases with a certificate: (namespace, name).
const SECRETS: [(&str, &str); 9] = [
    ("istio-system", "my-cert-http"),
    ("istio-system", "my-cert"),
    ("istio-system", "my-cert-http2"),
    ("ns2", "ns2-cert"),
    ("ns3", "ns3-cert"),
    ("ns4", "ns4-cert"),
    ("cert", "cert"),
    ("bookinfo", "bookinfo-secret"),
    ("bookinfo", "another-secret"),
];

/// Returns the objects that all cases have: services of the registry, and certificates.
fn environment(registry: &Value) -> Vec<Value> {
    let registry = registry.as_array().into_iter().flatten();
    let mut objects: Vec<Value> = registry.filter_map(service).flatten().collect();
    let authority = Authority::new("cases");
    let certificate = authority.certificate();
    let files = authority.files();
    let mut add = |kind: &str, (namespace, name): (&str, &str), field: &str, data: Value| {
        objects.push(json!({"apiVersion": "v1", "kind": kind, field: data,
            "metadata": {"name": name, "namespace": namespace}}));
    };
    for key in SECRETS {
        let data = json!({"tls.crt": certificate, "tls.key": files["ca-key.pem"], "ca.crt": certificate});
        add("Secret", key, "stringData", data);
    }
    let malformed = json!({"tls.crt": "Hello", "tls.key": "Hello"});
    add("Secret", ("istio-system", "malformed"), "stringData", malformed);
    for key in [("istio-system", "my-cert-http"), ("default", "auth-cert")] {
        add("ConfigMap", key, "data", json!({"ca.crt": certificate}));
    }
    for key in [("istio-system", "malformed"), ("default", "malformed")] {
        add("ConfigMap", key, "data", json!({"not-ca.crt": "hello"}));
    }
    let untrusted = ("istio-system", "malformed-trustbundle");
    add("ConfigMap", untrusted, "data", json!({"ca.crt": "hello"}));
    objects
}

/// Returns a service of the registry as manifests: with an endpoint for each port, of which the first one has another
/// number than the service.
fn service(registered: &Value) -> Option<Vec<Value>> {
    let hostname = registered["hostname"].as_str()?;
    let (ports, namespace) = (&registered["ports"], &registered["namespace"]);
    let Some((name, _)) = hostname
        .split_once('.')
        .filter(|(_, rest)| rest.ends_with(".svc.domain.suffix"))
    else {
        let ports = ports.as_array()?.iter();
        let ports =
            ports.map(|port| json!({"name": port["name"], "number": port["port"], "protocol": port["protocol"]}));
        return Some(vec![
            json!({"apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
            "metadata": {"name": format!("registry-{}", hostname.replace('.', "-")), "namespace": namespace},
            "spec": {"hosts": [hostname], "ports": ports.collect::<Vec<_>>(), "resolution": "STATIC",
                "endpoints": [{"address": "192.0.2.1"}]}}),
        ]);
    };
    let external = registered["externalAddresses"]["Kubernetes"].as_array();
    let external = external.map(|all| all.iter().map(|ip| json!({ "ip": ip })).collect::<Vec<_>>());
    let targets = ports.as_array()?.iter().enumerate().map(|(position, port)| {
        let target = if position == 0 { &json!(8080) } else { &port["port"] };
        json!({"name": port["name"], "port": target, "protocol": "TCP"})
    });
    let targets: Vec<Value> = targets.collect();
    let declared = ports
        .as_array()?
        .iter()
        .map(|port| json!({"name": port["name"], "port": port["port"]}));
    Some(vec![
        json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": namespace, "labels": registered["labels"]},
            "spec": {"clusterIP": "10.0.0.1", "ports": declared.collect::<Vec<_>>(),
                "type": if external.is_some() { "LoadBalancer" } else { "ClusterIP" }},
            "status": {"loadBalancer": {"ingress": external}}}),
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4", "ports": targets,
            "endpoints": [{"addresses": ["10.1.0.1"], "conditions": {"ready": true}}]}),
    ])
}

/// Returns the namespaces of a case's objects, labelled with the first word of their names.
fn namespaces(input: &str) -> Result<Vec<Value>, Failed> {
    let mut names = BTreeSet::new();
    for document in yaml::documents(input) {
        let object = document.parse()?;
        names.extend(object["metadata"]["namespace"].as_str().map(str::to_owned));
    }
    let namespace = |name: &String| {
        let label = name.split('-').next();
        json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "labels": {"istio.io/test-name-part": label}}})
    };
    Ok(names.iter().map(namespace).collect())
}

/// Objects by kind, namespace and name, with the parts that are compared.
type Objects = BTreeMap<(String, String, String), Value>;

/// Returns the differences of a case.
fn compare(folder: &Path, case: &Value, services: &[Value]) -> Result<Vec<String>, Failed> {
    let text = |key: &str| -> Result<String, Failed> {
        let file = case[key].as_str().ok_or_else(|| format!("the case has no {key}"))?;
        Ok(std::fs::read_to_string(folder.join(file))?)
    };
    let input = text("input")?;
    let mesh = mesh(&input, services)?;
    let mut differences = differences(&converted(&mesh), &golden(&text("config")?)?);
    let mut wanted: Objects = documents(&text("status")?, |object| normal(&object["status"]))?;
    // An empty status equals none.
    wanted.retain(|_, status| !status.is_null());
    differences.extend(self::differences(&statuses(&mesh, &input)?, &wanted));
    Ok(differences)
}

fn differences(found: &Objects, wanted: &Objects) -> Vec<String> {
    let mut differences = Vec::new();
    for (key, wanted) in wanted {
        match found.get(key) {
            None => differences.push(format!("{key:?} is missing: {wanted}")),
            Some(found) if found != wanted => {
                differences.push(format!("{key:?}:\n    found  {found}\n    wanted {wanted}"));
            }
            Some(_) => {}
        }
    }
    let surplus = found.iter().filter(|(key, _)| !wanted.contains_key(key));
    differences.extend(surplus.map(|(key, found)| format!("{key:?} is not wanted: {found}")));
    differences
}

/// Returns the objects of a text, each with a part of it.
fn documents(text: &str, part: impl Fn(&Value) -> Value) -> Result<Objects, Failed> {
    let mut objects = Objects::new();
    for document in yaml::documents(text) {
        let object = document.parse()?;
        if object["kind"].is_string() {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let meta = &object["metadata"];
            let key = (text(&object["kind"]), text(&meta["namespace"]), text(&meta["name"]));
            objects.insert(key, part(&object));
        }
    }
    Ok(objects)
}

/// Returns a status without empty fields, and with the same time everywhere.
fn normal(value: &Value) -> Value {
    match value {
        Value::Array(values) if values.is_empty() => Value::Null,
        Value::Array(values) => values.iter().map(normal).collect(),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| match name.as_str() {
                "lastTransitionTime" => (name.clone(), "fake".into()),
                _ => (name.clone(), normal(value)),
            });
            let fields: serde_json::Map<_, _> = fields.filter(|(_, value)| !value.is_null()).collect();
            if fields.is_empty() {
                Value::Null
            } else {
                Value::Object(fields)
            }
        }
        other => other.clone(),
    }
}

/// Returns the statuses that the objects of a mesh are to have.
fn statuses(mesh: &Arc<MeshSnapshot>, input: &str) -> Result<Objects, Failed> {
    let existing = documents(input, |object| object["status"].clone())?;
    let name = |key: &StatusKey| {
        let (namespace, name) = (key.object.namespace.to_string(), key.object.name.to_string());
        (key.kind.name().to_owned(), namespace, name)
    };
    let mut statuses = Statuses::new(Revisions::default());
    let changed = statuses.update(mesh, Vec::new());
    let written = changed.into_iter().filter(|key| Statuses::depend_on(key.kind));
    let written = written.filter_map(|key| {
        let status = existing.get(&name(&key)).filter(|status| !status.is_null())?;
        Some((key, Some(status.clone())))
    });
    statuses.update(mesh, written.collect());
    let merged = statuses.iter().map(|(key, status)| {
        let existing = existing.get(&name(key)).unwrap_or(&Value::Null);
        (
            name(key),
            normal(&status.merged(existing, &key.object.namespace, "fake")),
        )
    });
    Ok(merged.filter(|(_, status)| !status.is_null()).collect())
}

fn golden(text: &str) -> Result<Objects, Failed> {
    documents(
        text,
        |object| json!({"annotations": object["metadata"]["annotations"], "spec": object["spec"]}),
    )
}

fn mesh(input: &str, services: &[Value]) -> Result<Arc<MeshSnapshot>, Failed> {
    let installation = Installation {
        domain: "domain.suffix".into(),
        features: Features {
            pilot_enable_alpha_gateway_api: true,
            enable_gateway_api_inference_extension: true,
            pilot_enable_ambient_waypoints: true,
            ambient_enable_multi_network: true,
            ..Features::default()
        },
        ..Installation::default()
    };
    let namespaces = namespaces(input)?;
    let environment = services.iter().chain(&namespaces);
    let environment: Vec<String> = environment.map(|object| format!("---\n{object}\n")).collect();
    let files = [
        ("a.yaml".to_owned(), environment.concat().into_bytes()),
        ("b.yaml".to_owned(), input.as_bytes().to_vec()),
    ];
    let folder = folder::read(&files, &installation.cluster, &installation.mesh_config_key());
    let mut world = World::new(installation);
    world.commit(folder.rows.into_values().flatten().map(Change::Upsert).collect());
    Ok(world.snapshot())
}

fn converted(mesh: &MeshSnapshot) -> Objects {
    let cx = Cx::untracked();
    let mut objects = Objects::new();
    objects.extend(mesh.converted_gateways.iter(&cx).map(|(key, row)| {
        let mut gateway = Config::clone(row);
        // Istio lists the namespaces that a selector selects.
        if let Some(selector) = mesh.listener_selectors.get(&cx, key) {
            let all = mesh.namespace_labels.iter(&cx);
            let selected = all.filter(|(_, labels)| selector.matches(labels));
            let mut namespaces: Vec<&str> = selected.map(|(key, _)| key.name.as_str()).collect();
            if namespaces.is_empty() {
                namespaces.push(NO_NAMESPACE);
            }
            for server in &mut gateway.spec.servers {
                let hosts = server.hosts.iter().map(|host| host.trim_start_matches("~/"));
                let listed = namespaces.iter().flat_map(|namespace| {
                    let hosts = hosts.clone();
                    hosts.map(move |host| format!("{namespace}/{host}"))
                });
                server.hosts = listed.collect();
            }
        }
        entry(&gateway)
    }));
    objects.extend(mesh.converted_virtual_services.iter(&cx).map(|(_, row)| {
        let mut service = Config::clone(&row.object);
        service.spec.http = row.requests.routes.iter().map(|route| route.http.clone()).collect();
        entry(&service)
    }));
    objects.extend(mesh.converted_destination_rules.iter(&cx).map(|(_, row)| entry(row)));
    objects
}

fn entry<T: prost::Message + prost::Name>(row: &Config<T>) -> ((String, String, String), Value) {
    let meta = &row.meta;
    let key = (
        meta.kind.name().to_owned(),
        meta.namespace().to_string(),
        meta.name().to_string(),
    );
    (
        key,
        json!({"annotations": meta.annotations, "spec": json::to_json(&row.spec)}),
    )
}
