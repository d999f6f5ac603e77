//! The test cases of Istio's own conversion of the Gateway API: objects in, Gateways, VirtualServices and
//! DestinationRules out. They are part of Istio's conformance set, where it is next to the project.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use istiod::{
    api::{Config, folder, yaml},
    model::{Change, Installation, World, features::Features},
    proto::json,
    table::Cx,
};
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::{authority::Authority, project};

/// Known differences with their reasons: (case, reason). The list may only shrink.
const DIFFERENCES: &[(&str, &str)] = &[
    ("http", "InferencePools are not served yet"),
    (
        "tls",
        "unknown cipher suites are left out where listeners are generated",
    ),
];

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
    for case in cases.as_array().ok_or("cases.json is not a list")? {
        let name = case["name"].as_str().unwrap_or_default();
        let is_listed = DIFFERENCES.iter().any(|(known, _)| *known == name);
        let found = compare(&folder, case, &services).map_err(|failed| format!("{name}: {failed:?}"))?;
        match found {
            differences if differences.is_empty() => {
                equal += 1;
                if is_listed {
                    errors.push(format!("{name}: listed in DIFFERENCES, but equal"));
                }
            }
            differences if !is_listed => errors.push(format!("{name}:\n  {}", differences.join("\n  "))),
            _ => {}
        }
    }
    println!(
        "gateway_api: {equal} conversions are equal, {} differ as listed",
        DIFFERENCES.len()
    );
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
    let mut objects: Vec<Value> = registry.filter_map(service).collect();
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

/// Returns a service of the registry as manifest, if it is one of Kubernetes.
fn service(registered: &Value) -> Option<Value> {
    let (name, rest) = registered["hostname"].as_str()?.split_once('.')?;
    rest.ends_with(".svc.domain.suffix").then(|| {
        json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": registered["namespace"]},
            "spec": {"clusterIP": "10.0.0.1", "ports": registered["ports"]}})
    })
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

/// Converted objects by kind, namespace and name, with the parts that are compared.
type Converted = BTreeMap<(String, String, String), Value>;

/// Returns the differences of a case.
fn compare(folder: &Path, case: &Value, services: &[Value]) -> Result<Vec<String>, Failed> {
    let text = |key: &str| -> Result<String, Failed> {
        let file = case[key].as_str().ok_or_else(|| format!("the case has no {key}"))?;
        Ok(std::fs::read_to_string(folder.join(file))?)
    };
    let (found, wanted) = (converted(&text("input")?, services)?, golden(&text("config")?)?);
    let mut differences = Vec::new();
    for (key, wanted) in &wanted {
        match found.get(key) {
            None => differences.push(format!("{key:?} is missing")),
            Some(found) if found != wanted => {
                differences.push(format!("{key:?}:\n    found  {found}\n    wanted {wanted}"));
            }
            Some(_) => {}
        }
    }
    let surplus = found.keys().filter(|key| !wanted.contains_key(key));
    differences.extend(surplus.map(|key| format!("{key:?} is not wanted")));
    Ok(differences)
}

fn golden(text: &str) -> Result<Converted, Failed> {
    let mut objects = Converted::new();
    for document in yaml::documents(text) {
        let object = document.parse()?;
        if object["kind"].is_string() {
            let part = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let meta = &object["metadata"];
            let key = (part(&object["kind"]), part(&meta["namespace"]), part(&meta["name"]));
            let kept = json!({"annotations": meta["annotations"], "spec": object["spec"]});
            objects.insert(key, kept);
        }
    }
    Ok(objects)
}

fn converted(input: &str, services: &[Value]) -> Result<Converted, Failed> {
    let installation = Installation {
        domain: "domain.suffix".into(),
        features: Features {
            pilot_enable_alpha_gateway_api: true,
            pilot_enable_ambient: true,
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
    let mesh = world.snapshot();
    let cx = Cx::untracked();
    let mut objects = Converted::new();
    objects.extend(mesh.converted_gateways.iter(&cx).map(|(_, row)| entry(row)));
    objects.extend(mesh.converted_virtual_services.iter(&cx).map(|(_, row)| entry(row)));
    objects.extend(mesh.converted_destination_rules.iter(&cx).map(|(_, row)| entry(row)));
    Ok(objects)
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
