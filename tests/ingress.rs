//! The test cases of Istio's own conversion of Ingresses, and the statuses of Ingresses. The cases are part of Istio's
//! conformance set, where it is next to the project.

use std::collections::{BTreeMap, BTreeSet};

use istiod::{
    api::{Config, Row, document, folder, yaml},
    base::Shared,
    model::{
        Change, Installation, MeshSnapshot, World, gateway_api::status::Revisions, ingress::status::IngressStatuses,
    },
    proto::{
        istio::mesh::v1alpha1::{MeshConfig, mesh_config::IngressControllerMode},
        json,
    },
    table::Cx,
};
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::project;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test(
            "ingress::ingresses_are_converted_as_istio_does",
            converted_as_istio_does,
        ),
        Trial::test(
            "ingress::written_objects_precede_converted_ones",
            written_objects_precede_converted_ones,
        ),
        Trial::test("ingress::statuses_have_the_addresses_of_the_gateway", statuses),
        Trial::test(
            "ingress::statuses_are_those_of_the_own_revision",
            statuses_are_those_of_the_own_revision,
        ),
    ]
}

fn converted_as_istio_does() -> Result<Completion, Failed> {
    let folder = project().join("../shared/conformance/upstream/ingress");
    if !folder.is_dir() {
        let reason = "skipped: Istio's conformance set is not next to the project (../shared/conformance)";
        println!("ingress: {reason}");
        return Ok(Completion::ignored_with(reason));
    }
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json"))?)?;
    let mut errors = Vec::new();
    let cases = cases.as_array().ok_or("cases.json is not a list")?;
    assert!(!cases.is_empty(), "no cases");
    for case in cases {
        let text = |key: &str| std::fs::read_to_string(folder.join(case[key].as_str().unwrap_or_default()));
        let (found, wanted) = (
            converted(&world(&text("input")?, &empty()).snapshot()),
            golden(&text("golden")?)?,
        );
        if found != wanted {
            errors.push(format!("{}:\n  found  {found:?}\n  wanted {wanted:?}", case["input"]));
        }
    }
    println!(
        "ingress: {} of {} conversions are equal",
        cases.len() - errors.len(),
        cases.len()
    );
    if errors.is_empty() {
        return Ok(Completion::Completed);
    }
    Err(errors.join("\n").into())
}

/// The mesh config of the cases: Ingresses without a class are served, and nothing else is set.
fn empty() -> MeshConfig {
    MeshConfig {
        ingress_controller_mode: IngressControllerMode::Default.into(),
        ..MeshConfig::default()
    }
}

fn world(objects: &str, config: &MeshConfig) -> World {
    let installation = Installation {
        domain: "mydomain".into(),
        ..Installation::default()
    };
    let key = installation.mesh_config_key();
    let files = [("a.yaml".to_owned(), objects.as_bytes().to_vec())];
    let read = folder::read(&files, &installation.cluster, &key);
    let rows = read.rows.into_values().flatten().map(|row| match row {
        Row::MeshConfig(defaults) => Row::MeshConfig(Shared::new(Config {
            spec: config.clone(),
            ..Config::clone(&defaults)
        })),
        row => row,
    });
    let mut world = World::new(installation);
    world.commit(rows.map(Change::Upsert).collect());
    world
}

/// Specifications by kind and name.
type Objects = BTreeMap<(String, String), Value>;

fn converted(mesh: &MeshSnapshot) -> Objects {
    let cx = Cx::untracked();
    let gateways = mesh.ingress_gateways.iter(&cx).map(|(_, row)| entry(row));
    let services = mesh.ingress_virtual_services.iter(&cx).map(|(_, row)| entry(row));
    gateways.chain(services).collect()
}

fn entry<T: prost::Message + prost::Name>(row: &Config<T>) -> ((String, String), Value) {
    let meta = &row.meta;
    let key = (
        meta.kind.name().to_owned(),
        format!("{}/{}", meta.namespace(), meta.name()),
    );
    let annotations = (!meta.annotations.is_empty()).then_some(&meta.annotations);
    (
        key,
        json!({"annotations": annotations, "spec": json::to_json(&row.spec)}),
    )
}

fn golden(text: &str) -> Result<Objects, Failed> {
    let mut objects = Objects::new();
    for document in yaml::documents(text) {
        let object = document.parse()?;
        if let Some(kind) = object["kind"].as_str() {
            let meta = &object["metadata"];
            let name = |field: &str| meta[field].as_str().unwrap_or_default().to_owned();
            let key = (kind.to_owned(), format!("{}/{}", name("namespace"), name("name")));
            objects.insert(key, json!({"annotations": meta["annotations"], "spec": object["spec"]}));
        }
    }
    Ok(objects)
}

const INGRESS: &str = "
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: web, namespace: app}
spec: {rules: [{http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]}
";

/// A VirtualService with the name of a converted one takes its place while it exists.
fn written_objects_precede_converted_ones() -> Result<(), Failed> {
    let mut world = world(INGRESS, &empty());
    let cx = Cx::untracked();
    let before = world.snapshot();
    let (key, converted) = before
        .raw_virtual_services
        .iter(&cx)
        .next()
        .ok_or("no VirtualService")?;
    let written = json!({"apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": {"name": key.name, "namespace": key.namespace.as_str()},
        "spec": {"hosts": ["written.example.com"], "http": [{"route": [{"destination": {"host": "web"}}]}]}});
    let row = document::parse(&key.cluster, &written).rows.remove(0);
    let removal = Change::Remove(row.kind(), key.clone());
    let with = world.commit(vec![Change::Upsert(row)]).snapshot;
    let hosts = with
        .raw_virtual_services
        .get(&cx, key)
        .map(|row| row.spec.hosts.clone());
    assert_eq!(hosts, Some(vec!["written.example.com".to_owned()]));
    let without = world.commit(vec![removal]).snapshot;
    assert_eq!(without.raw_virtual_services.get(&cx, key), Some(converted));
    Ok(())
}

/// The addresses come from the service of the mesh config, whatever its type, or else from the node of a running pod.
fn statuses() -> Result<(), Failed> {
    let service = |spec: &str, status: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: gw, namespace: istio-system}}\nspec: {spec}\nstatus: {status}\n"
        )
    };
    let of_service = MeshConfig {
        ingress_service: "gw".to_owned(),
        ..empty()
    };
    let ports = "ports: [{port: 80, name: http}]";
    let balanced = "{loadBalancer: {ingress: [{hostname: lb.example.com}, {ip: 192.0.2.7}]}}";
    let node = "---\napiVersion: v1\nkind: Node\nmetadata: {name: n}\nstatus: {addresses: [{type: ExternalIP, address: 192.0.2.9}]}\n";
    let pod = "---\napiVersion: v1\nkind: Pod\nmetadata: {name: gw, namespace: istio-system, labels: {istio: ingressgateway}}\nspec: {nodeName: n}\nstatus: {phase: Running}\n";
    let cases = [
        (
            service(
                &format!("{{{ports}, type: LoadBalancer, externalIPs: [192.0.2.1]}}"),
                balanced,
            ),
            &of_service,
            json!([{"ip": "192.0.2.1"}, {"ip": "192.0.2.7"}, {"hostname": "lb.example.com"}]),
        ),
        (
            service("{type: ExternalName, externalName: gw.example.com}", "{}"),
            &of_service,
            json!([{"hostname": "gw.example.com"}]),
        ),
        (String::new(), &of_service, json!([])),
        ([node, pod].concat(), &empty(), json!([{"ip": "192.0.2.9"}])),
    ];
    for (objects, config, wanted) in cases {
        let mut world = world(&[INGRESS, &objects].concat(), config);
        let mut statuses = IngressStatuses::new(Revisions::default());
        let changed = statuses.update(&world.snapshot());
        let [key] = changed.as_slice() else {
            return Err(format!("{changed:?}: one Ingress is served").into());
        };
        let found = statuses.get(key).ok_or("no status")?;
        assert_eq!(found["loadBalancer"]["ingress"], wanted, "{objects}");
        // Nothing that matters has changed, and the Ingress is deleted.
        assert!(statuses.update(&world.snapshot()).is_empty());
        let row = document::parse(&key.cluster, &yaml_value(INGRESS)?).rows.remove(0);
        world.commit(vec![Change::Remove(row.kind(), row.key().clone())]);
        statuses.update(&world.snapshot());
        assert_eq!(statuses.get(key), None);
    }
    Ok(())
}

/// The label of the Ingress names its revision, or else that of its namespace. Without any, it is the default one.
fn statuses_are_those_of_the_own_revision() -> Result<(), Failed> {
    let labelled = |revision: Option<&str>| match revision {
        Some(revision) => format!("labels: {{istio.io/rev: {revision}}}"),
        None => "labels: {}".to_owned(),
    };
    let namespace = |label: Option<&str>| {
        format!(
            "apiVersion: v1\nkind: Namespace\nmetadata: {{name: app, {}}}\n---\n",
            labelled(label)
        )
    };
    let ingress = |label: Option<&str>| {
        let meta = "name: web, namespace: app";
        INGRESS.replace(meta, &format!("{meta}, {}", labelled(label)))
    };
    // The own revision is `default`, so it is responsible for objects without a label.
    let tagged = Revisions {
        tags: BTreeSet::from(["stable".into()]),
        ..Revisions::default()
    };
    let cases = [
        (None, None, true),
        (None, Some("canary"), false),
        (None, Some("stable"), true),
        (Some("canary"), None, false),
        (Some("canary"), Some("stable"), false),
        (Some("stable"), Some("canary"), true),
    ];
    for (own, of_namespace, is_written) in cases {
        let objects = [namespace(of_namespace), ingress(own)].concat();
        let mut statuses = IngressStatuses::new(tagged.clone());
        let changed = statuses.update(&world(&objects, &empty()).snapshot());
        let key = changed.first().ok_or("no Ingress is served")?;
        assert_eq!(statuses.get(key).is_some(), is_written, "{own:?}, {of_namespace:?}");
    }
    // A label of the namespace changes what belongs to the revision.
    let mut world = world(&[namespace(Some("canary")), ingress(None)].concat(), &empty());
    let mut statuses = IngressStatuses::new(tagged);
    let changed = statuses.update(&world.snapshot());
    let key = changed.first().ok_or("no Ingress is served")?;
    assert_eq!(statuses.get(key), None);
    let row = document::parse(&key.cluster, &yaml_value(&namespace(None))?)
        .rows
        .remove(0);
    world.commit(vec![Change::Upsert(row)]);
    assert_eq!(statuses.update(&world.snapshot()), std::slice::from_ref(key));
    assert!(statuses.get(key).is_some());
    Ok(())
}

fn yaml_value(text: &str) -> Result<Value, Failed> {
    let documents = yaml::documents(text);
    let document = documents.first().ok_or("no document")?;
    Ok(document.parse()?)
}
