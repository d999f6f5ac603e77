//! The config cluster as one of several config sources, and as a part of itself.

use std::path::Path;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::chain::{FRONT, TlsFront, entry, has, routes_have};
use super::{TIMEOUT, sidecar};
use crate::secure::authority::Authority;
use crate::support::ads::{AdsClient, Type};
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::scratch;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial("registries::kubernetes::is_a_config_source", is_a_config_source),
        kubernetes::trial(
            "registries::kubernetes::secrets_have_roots_of_servers",
            secrets_have_roots_of_servers,
        ),
        kubernetes::trial("registries::kubernetes::namespaces_are_a_list", namespaces_are_a_list),
    ]
}

/// Creates namespaces that only this test's daemons read.
fn namespaces(cluster: &Cluster, test: &str, names: &[&str]) -> Result<(), String> {
    names
        .iter()
        .try_for_each(|name| cluster.namespace(name, &json!({ "test": test })))
}

fn service_entry(namespace: &str, name: &str, address: &str) -> Value {
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "namespace": namespace, "name": name },
        "spec": {
            "hosts": [format!("{name}.example.com")], "addresses": [address], "resolution": "STATIC",
            "ports": [{ "number": 80, "name": "http", "protocol": "HTTP" }],
            "endpoints": [{ "address": "10.2.0.1" }],
        } })
}

/// Returns the namespace of a test's control plane.
fn system(folder: &Path) -> String {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    format!("{}-system", name.replace('_', "-"))
}

fn start(cluster: &Cluster, folder: &Path, mesh: &str, flags: &[&str]) -> Result<Daemon, String> {
    let file = folder.join("mesh.yaml");
    std::fs::write(&file, mesh).map_err(|error| error.to_string())?;
    let system = system(folder);
    cluster.namespace(&system, &json!({}))?;
    Daemon::in_kubernetes(
        &cluster.admin_kubeconfig(),
        &system,
        &folder.join("istiod.log"),
        |command| {
            command.arg("--meshConfig").arg(&file).args(flags);
        },
    )
}

fn is_a_config_source(name: &str) -> Result<(), Failed> {
    let (cluster, folder) = (kubernetes::shared(0)?, scratch(name));
    let namespace = "k8s-source";
    namespaces(cluster, "k8s-source", &[namespace])?;
    let object = service_entry(namespace, "api", "240.1.2.3");
    cluster.api.apply(&object)?;
    cluster.api.apply(&json!({ "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": namespace, "name": "web" },
        "spec": { "clusterIP": "None", "ports": [{ "name": "http", "port": 80 }] } }))?;
    let file = folder.join("local.yaml");
    let local = serde_json::to_string(&service_entry(namespace, "api", "240.9.9.9"))?;
    std::fs::write(&file, local + "\n---\n" + &entry("local"))?;
    let mesh = format!(
        "configSources: [{{address: 'k8s://'}}, {{address: 'fs://{}'}}]\n\
         discoverySelectors: [{{matchLabels: {{test: k8s-source}}}}]\n",
        file.display()
    );
    // Another registry beside the cluster.
    let daemon = start(
        cluster,
        &folder,
        &mesh,
        &["--registries=Kubernetes,Mock", "--mockServices"],
    )?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    proxy.until("the objects of both", TIMEOUT, has("local"))?;
    proxy.until("the object of the cluster", TIMEOUT, routes_have("240.1.2.3"))?;
    let services = [format!("web.{namespace}"), "hello.default".to_owned()];
    let services = services.map(|name| (Type::Cluster, format!("outbound|80||{name}.svc.cluster.local")));
    proxy.until("the services of both registries", TIMEOUT, |resources| {
        services.iter().all(|name| resources.contains_key(name)).then_some(())
    })?;
    cluster.api.delete(&Reference::of(&object))?;
    proxy.until("the object of the file", TIMEOUT, routes_have("240.9.9.9"))?;
    cluster.api.apply(&object)?;
    proxy.until("the object of the cluster again", TIMEOUT, routes_have("240.1.2.3"))?;
    Ok(())
}

fn namespaces_are_a_list(name: &str) -> Result<(), Failed> {
    let (cluster, folder) = (kubernetes::shared(1)?, scratch(name));
    let names = ["app-list-a", "app-list-b", "app-list-c"];
    namespaces(cluster, "app-list", &names)?;
    for namespace in names {
        cluster.api.apply(&service_entry(namespace, namespace, "240.5.0.1"))?;
    }
    let flag = format!("--appNamespace={}, {}", names[0], names[1]);
    let daemon = start(cluster, &folder, "{}\n", &[flag.as_str()])?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    proxy.until("the objects of the first namespace", TIMEOUT, has(names[0]))?;
    proxy.until("the objects of the second namespace", TIMEOUT, has(names[1]))?;
    // Changes of each namespace arrive, and none of the others'.
    for namespace in [names[2], names[1], names[0]] {
        let added = format!("{namespace}-more");
        cluster.api.apply(&service_entry(namespace, &added, "240.5.0.2"))?;
    }
    proxy.until("the added object", TIMEOUT, has(&format!("{}-more", names[0])))?;
    proxy.until("the added object", TIMEOUT, has(&format!("{}-more", names[1])))?;
    cluster
        .api
        .delete(&Reference::of(&service_entry(names[1], names[1], "")))?;
    let resources = proxy.until("the removal", TIMEOUT, |resources| {
        has(names[1])(resources).is_none().then(|| resources.clone())
    })?;
    for absent in [names[2].to_owned(), format!("{}-more", names[2])] {
        assert!(has(&absent)(&resources).is_none(), "{absent} is of another namespace");
    }
    assert!(has(names[0])(&resources).is_some());
    Ok(())
}

fn secrets_have_roots_of_servers(name: &str) -> Result<(), Failed> {
    let (cluster, folder) = (kubernetes::shared(1)?, scratch(name));
    std::fs::create_dir(folder.join("files"))?;
    std::fs::write(folder.join("files/entry.yaml"), entry("remote"))?;
    let server = Daemon::start(&folder.join("files"), &folder.join("server.log"))?;
    let authority = Authority::new("front");
    let front = TlsFront::start(&authority, server.xds)?;
    let mesh = format!(
        "configSources:
- address: 'xds://127.0.0.1:{}'
  tlsSettings: {{mode: SIMPLE, credentialName: roots, sni: {FRONT}}}
",
        front.port
    );
    cluster.namespace(&system(&folder), &json!({}))?;
    let metadata = json!({ "namespace": system(&folder), "name": "roots" });
    cluster
        .api
        .apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata,
        "stringData": { "ca.crt": authority.root } }))?;
    let daemon = start(cluster, &folder, &mesh, &[])?;
    let proxy = AdsClient::connect(daemon.xds, &sidecar());
    proxy.until("the object of the server", TIMEOUT, has("remote"))?;
    Ok(())
}
