//! Resources generated from the objects of an API server.

use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::tenant::{TIMEOUT, Tenant};
use crate::support::ads::{AdsClient, Resources, Type, same};
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::{Reference, documents};
use crate::support::kubernetes::{self, Cluster, crds};
use crate::support::wait;

/// A mesh whose objects all affect a sidecar.
pub(super) const MESH: &str = include_str!("mesh.yaml");

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "kube::mesh::api_server_and_folder_give_the_same_resources",
            api_server_and_folder_give_the_same_resources,
        ),
        kubernetes::trial("kube::mesh::crds_are_added_and_removed", crds_are_added_and_removed),
        kubernetes::trial("kube::mesh::discovery_selectors_change", discovery_selectors_change),
        kubernetes::trial("kube::mesh::other_revisions_are_ignored", other_revisions_are_ignored),
    ]
}

/// The same objects in a folder give byte-identical resources.
fn api_server_and_folder_give_the_same_resources(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    tenant.apply(MESH)?;
    let folder = tenant.folder.join("mesh");
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("mesh.yaml"), tenant.mesh(""))?;
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: '{}', labels: {trial: '{trial}'}}\n---\n";
    let namespaces = [&tenant.app, &tenant.system]
        .map(|name| namespace.replace("{}", name))
        .concat();
    std::fs::write(folder.join("objects.yaml"), tenant.fill(&(namespaces + MESH)))?;

    let from_folder = Daemon::of_folder(&folder, &tenant.system, &tenant.folder.join("folder.log"))?;
    let from_server = tenant.daemon("istiod")?;
    let mut node = tenant.sidecar(&json!({ "app": "client" }));
    let (expected, given) = (
        AdsClient::connect(from_folder.xds, &node),
        AdsClient::connect(from_server.xds, &node),
    );
    let expected = expected.first()?;
    assert!(
        expected.len() > 12,
        "the mesh must give a sidecar some resources: {:?}",
        expected.keys()
    );
    given.until_same(&expected, TIMEOUT)?;

    // The address of a sidecar of a pod in the mesh.
    let address = tenant.fill("10.{n}.0.1");
    node.id = format!(
        "sidecar~{address}~web-1.{app}~{app}.svc.cluster.local",
        app = tenant.app
    );
    node.metadata["INSTANCE_IPS"] = json!(address);
    node.metadata["SERVICE_ACCOUNT"] = json!("web");
    node.metadata["LABELS"] = json!({ "app": "web", "version": "v1" });
    let (expected, given) = (
        AdsClient::connect(from_folder.xds, &node),
        AdsClient::connect(from_server.xds, &node),
    );
    given.until_same(&expected.first()?, TIMEOUT)?;
    Ok(())
}

/// Reports whether a route contains this text.
fn routes_hold(resources: &Resources, text: &str) -> bool {
    let mut routes = resources
        .iter()
        .filter(|((resource_type, _), _)| *resource_type == Type::Route);
    routes.any(|(_, route)| route.body.windows(text.len()).any(|window| window == text.as_bytes()))
}

/// Waits until routes contain a text, or do not.
fn until_routes(ads: &AdsClient, text: &str, hold: bool) -> Result<Resources, String> {
    let what = format!("routes {} {text}", if hold { "with" } else { "without" });
    ads.until(&what, TIMEOUT, |resources| {
        (routes_hold(resources, text) == hold).then(|| resources.clone())
    })
}

fn virtual_service(tenant: &Tenant, name: &str, prefix: &str) -> Value {
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": { "namespace": tenant.app, "name": name },
        "spec": { "hosts": [format!("{name}.{}.svc.cluster.local", tenant.app)], "http": [
            { "match": [{ "uri": { "prefix": prefix } }], "route": [{ "destination": { "host": name } }] },
            { "route": [{ "destination": { "host": name } }] }] } })
}

/// A Service with one endpoint.
pub(super) fn service(name: &str, namespace: &str, last: u8) -> String {
    format!(
        "apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: '{namespace}'}}
spec:
  clusterIP: 10.96.{{n}}.{last}
  ports: [{{name: http, port: 80, targetPort: 8080}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-a, namespace: '{namespace}', labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
endpoints: [{{addresses: [10.{{n}}.3.{last}], conditions: {{ready: true}}}}]
ports: [{{name: http, port: 8080, protocol: TCP}}]
---
"
    )
}

/// A new definition is watched, a removed one removes its objects, and an invalid object affects nothing else.
fn crds_are_added_and_removed(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(&format!("{name}/cluster"))?;
    let tenant = Tenant::within(&cluster, name)?;
    tenant.apply(&(service("web", "{app}", 1) + &service("shop", "{app}", 2)))?;
    // A definition that accepts invalid objects.
    let definition = crds::loose_crd("networking.istio.io", "VirtualService");
    remove_definition(&cluster, &definition)?;

    let daemon = tenant.daemon("istiod")?;
    let ads = AdsClient::connect(daemon.xds, &tenant.sidecar(&json!({})));
    let without = ads.first()?;
    cluster.api.apply(&definition)?;
    crds::established(&cluster.api, &definition)?;
    cluster.api.apply(&virtual_service(&tenant, "web", "/first"))?;
    until_routes(&ads, "/first", true)?;

    let mut senseless = virtual_service(&tenant, "shop", "/never");
    senseless["spec"]["http"] = json!("no list");
    cluster.api.apply(&senseless)?;
    cluster.api.apply(&virtual_service(&tenant, "web", "/second"))?;
    let resources = until_routes(&ads, "/second", true)?;
    assert!(!routes_hold(&resources, "/first"), "the object must be replaced");
    assert!(
        !routes_hold(&resources, "/never"),
        "the invalid object must have no routes"
    );
    assert!(
        tenant.outbound(80, "shop").len() < 200
            && resources.contains_key(&(Type::Cluster, tenant.outbound(80, "shop")))
    );
    cluster.api.apply(&virtual_service(&tenant, "shop", "/corrected"))?;
    until_routes(&ads, "/corrected", true)?;

    remove_definition(&cluster, &definition)?;
    ads.until_same(&without, TIMEOUT)?;
    Ok(())
}

fn remove_definition(cluster: &Cluster, definition: &Value) -> Result<(), String> {
    let reference = Reference::of(definition);
    cluster.api.delete(&reference)?;
    wait::until("the removal of the definition", Duration::from_mins(1), || {
        cluster.get(&reference).ok()?.is_none().then_some(())
    })
}

/// Namespaces are selected and deselected by the mesh config and by their labels.
fn discovery_selectors_change(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(1, name)?;
    let other = format!("{}-other", tenant.trial);
    tenant.cluster.namespace(&other, &json!({ "also": tenant.trial }))?;
    tenant.apply(&(service("web", "{app}", 1) + &service("far", &other, 2)))?;
    let daemon = tenant.daemon("istiod")?;
    let ads = AdsClient::connect(daemon.xds, &tenant.sidecar(&json!({})));
    let narrow = ads.first()?;
    let far = (Type::Cluster, format!("outbound|80||far.{other}.svc.cluster.local"));
    let web = (Type::Cluster, tenant.outbound(80, "web"));
    assert!(
        narrow.contains_key(&web),
        "the test's own namespace must be selected: {:?}",
        narrow.keys()
    );
    assert!(
        !narrow.contains_key(&far),
        "no other namespace may be selected: {:?}",
        narrow.keys()
    );
    let until_wide = |what: &str| ads.until(what, TIMEOUT, |resources| resources.contains_key(&far).then_some(()));

    ads.mark();
    let wide = tenant.mesh("").replace(
        "discoverySelectors: [",
        &tenant.fill("discoverySelectors: [{matchLabels: {also: '{trial}'}}, "),
    );
    tenant.set_config("mesh", &wide)?;
    until_wide("the namespace of another selector")?;
    assert_eq!(ads.lost(), [""; 0], "resources of selected namespaces must stay");
    tenant.set_mesh("")?;
    ads.until_same(&narrow, TIMEOUT)?;
    tenant
        .cluster
        .namespace(&other, &json!({ "also": tenant.trial, "trial": tenant.trial }))?;
    until_wide("the namespace with a new label")?;
    tenant.cluster.namespace(&other, &json!({ "also": tenant.trial }))?;
    ads.until_same(&narrow, TIMEOUT)?;
    Ok(())
}

/// Objects of another revision have no effect.
fn other_revisions_are_ignored(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    tenant.apply(&service("web", "{app}", 1))?;
    tenant.cluster.api.apply(&virtual_service(&tenant, "web", "/all"))?;
    let mut canary = virtual_service(&tenant, "web", "/canary");
    canary["metadata"] = json!({ "namespace": tenant.app, "name": "a-canary", "labels": { "istio.io/rev": "canary" } });
    tenant.cluster.api.apply(&canary)?;

    let stable = tenant.daemon_with("stable", |command| {
        command.env("REVISION", "default");
    })?;
    // The mesh config of a revision is in a separate ConfigMap.
    let map = documents(
        &tenant.fill("{apiVersion: v1, kind: ConfigMap, metadata: {namespace: '{system}', name: istio-canary}}"),
    );
    let mut map = map.into_iter().next().ok_or("the text has one document")?;
    map["data"] = json!({ "mesh": tenant.mesh("") });
    tenant.cluster.api.apply(&map)?;
    let canary_daemon = tenant.daemon_with("canary", |command| {
        command.env("REVISION", "canary");
    })?;
    let node = tenant.sidecar(&json!({}));
    let (stable, canary_proxy) = (
        AdsClient::connect(stable.xds, &node),
        AdsClient::connect(canary_daemon.xds, &node),
    );
    let resources = until_routes(&stable, "/all", true)?;
    assert!(
        !routes_hold(&resources, "/canary"),
        "objects of another revision must have no effect"
    );
    until_routes(&canary_proxy, "/canary", true)?;

    let reference = Reference::of(&canary);
    let label = |value: Value| json!({ "metadata": { "labels": { "istio.io/rev": value } } });
    tenant.cluster.api.patch(&reference, &label(Value::Null))?;
    until_routes(&stable, "/canary", true)?;
    tenant.cluster.api.patch(&reference, &label(json!("default")))?;
    until_routes(&canary_proxy, "/canary", false)?;
    let resources = until_routes(&stable, "/canary", true)?;
    let fresh = tenant.daemon("fresh")?;
    same(&AdsClient::connect(fresh.xds, &node).first()?, &resources)?;
    Ok(())
}
