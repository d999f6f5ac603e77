use super::*;
use crate::model::{World, endpoint::Health, fixture, installation::Installation, service::ServiceKey};

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]}
";

const SLICE: &str = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a-1, labels: {kubernetes.io/service-name: a}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.1.0.1], conditions: {ready: false}}]
";

const EXPORT: &str = "{apiVersion: multicluster.x-k8s.io/v1alpha1, kind: ServiceExport, metadata: {name: a}}";

const IMPORT: &str = "
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceImport
metadata: {name: a}
spec: {type: ClusterSetIP, ips: [240.0.0.2, nonsense, 240.0.0.1], ports: [{port: 80}]}
";

const ROUTE: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: route}
spec:
  parentRefs: [{group: '', kind: Service, name: a}]
  rules: [{backendRefs: [{group: multicluster.x-k8s.io, kind: ServiceImport, name: a, port: 80}]}]
";

const LOCAL: &str = "a.default.svc.cluster.local";
const SET: &str = "a.default.svc.clusterset.local";

fn world(features: &[&str], files: &[(&str, &[&str])]) -> World {
    let mut installation = Installation::default();
    installation.features.enable_mcs_service_discovery = features.contains(&"discovery");
    installation.features.enable_mcs_host = features.contains(&"host");
    installation.features.enable_mcs_cluster_local = features.contains(&"local");
    let files: Vec<(&str, String)> = files
        .iter()
        .map(|(name, documents)| (*name, documents.join("\n---\n")))
        .collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
    fixture::folder_world(installation, &files)
}

fn key(host: &str) -> ServiceKey {
    ServiceKey {
        hostname: host.into(),
        namespace: "default".into(),
    }
}

/// Returns `cluster vip,vip` of a service, the main address first.
fn vips(world: &World, host: &str) -> Vec<String> {
    let mesh = world.snapshot();
    let Some(service) = mesh.services.get(&Cx::untracked(), &key(host)) else {
        return Vec::new();
    };
    let clusters = service.cluster_vips.iter();
    let clusters = clusters.map(|(cluster, vips)| format!("{cluster} {}", vips.join(",")));
    std::iter::once(service.default_address.to_string())
        .chain(clusters)
        .collect()
}

/// Returns cluster, cluster-local flag and health of the endpoints.
fn endpoints(world: &World, host: &str) -> Vec<(String, bool, Health)> {
    let mesh = world.snapshot();
    let row = mesh.endpoints.get(&Cx::untracked(), &key(host)).cloned();
    let endpoints = row.map_or(Vec::new(), |row| row.endpoints.to_vec());
    let of = |endpoint: &crate::model::Endpoint| {
        (
            endpoint.origin.cluster.to_string(),
            endpoint.cluster_local,
            endpoint.health,
        )
    };
    endpoints.iter().map(of).collect()
}

#[test]
fn service_imports_declare_a_host() {
    let files: &[(&str, &[&str])] = &[
        ("kube.yaml", &[SERVICE]),
        ("kube-c2.yaml", &[IMPORT]),
        ("kube-c3.yaml", &[&IMPORT.replace("240.0.0", "241.0.0")]),
    ];
    let on = world(&["discovery", "host"], files);
    assert_eq!(
        vips(&on, SET),
        ["240.0.0.1", "c2 240.0.0.1,240.0.0.2", "c3 241.0.0.1,241.0.0.2"]
    );
    assert_eq!(vips(&on, LOCAL), ["10.0.0.1", "Kubernetes 10.0.0.1"]);
    for off in [&["host"][..], &["discovery"], &[]] {
        assert!(vips(&world(off, files), SET).is_empty(), "{off:?}");
    }
}

#[test]
fn routes_to_imports_use_the_host_only_where_it_exists() {
    for (features, host) in [
        (&["discovery", "host"][..], SET),
        (&["host"][..], LOCAL),
        (&["discovery"][..], LOCAL),
    ] {
        let world = world(features, &[("kube.yaml", &[SERVICE, IMPORT, ROUTE])]);
        let (cx, mesh) = (Cx::untracked(), world.snapshot());
        let mut services = mesh.converted_virtual_services.iter(&cx);
        let (_, service) = services.next().expect("the route");
        let destination = service.requests.routes[0].http.route[0].destination.as_ref();
        assert_eq!(destination.map(|one| one.host.as_str()), Some(host), "{features:?}");
    }
}

#[test]
fn a_multi_cluster_host_requires_import_and_service() {
    let mut world = world(&["discovery", "host"], &[("kube.yaml", &[IMPORT])]);
    assert!(vips(&world, SET).is_empty());
    let rows = |text: &str| fixture::folder(&Installation::default(), &[("kube.yaml", text)]);
    let upsert = |rows: Vec<crate::api::Row>| rows.into_iter().map(crate::model::Change::Upsert).collect::<Vec<_>>();
    world.commit(upsert(rows(SERVICE)));
    assert_eq!(vips(&world, SET)[0], "240.0.0.1");
    world.commit(upsert(rows(&IMPORT.replace("240.0.0.1", "230.0.0.1"))));
    assert_eq!(vips(&world, SET)[0], "230.0.0.1");
    world.commit(upsert(rows(&IMPORT.replace("ips:", "other:"))));
    assert!(vips(&world, SET).is_empty(), "an import without addresses");
}

#[test]
fn endpoints_are_cluster_local_unless_exported() {
    let files: &[(&str, &[&str])] = &[
        ("kube.yaml", &[SERVICE, SLICE, EXPORT, IMPORT]),
        ("kube-c2.yaml", &[SERVICE, SLICE, IMPORT]),
        ("kube-c3.yaml", &[SERVICE, SLICE, EXPORT]),
    ];
    let cluster_local = |features: &[&str], host: &str| -> Vec<bool> {
        let found = endpoints(&world(features, files), host);
        found.into_iter().map(|(_, cluster_local, _)| cluster_local).collect()
    };
    assert_eq!(cluster_local(&[], LOCAL), [false; 3]);
    assert_eq!(cluster_local(&["discovery"], LOCAL), [false, true, false]);
    assert_eq!(cluster_local(&["discovery", "host"], LOCAL), [false, true, false]);
    // A cluster that does not import the service does not have the host.
    assert_eq!(cluster_local(&["discovery", "host"], SET), [false, true, true]);
    assert_eq!(cluster_local(&["discovery", "host", "local"], LOCAL), [true; 3]);
    assert_eq!(cluster_local(&["discovery", "host", "local"], SET), [false, true, true]);
    assert_eq!(cluster_local(&["discovery", "local"], LOCAL), [false, true, false]);
}

#[test]
fn machines_serve_an_imported_host_if_their_cluster_imports_it() {
    let machine = "{apiVersion: networking.istio.io/v1, kind: WorkloadEntry, metadata: {name: vm, labels: {app: a}}, \
                   spec: {address: 10.2.0.1}}";
    let service = SERVICE.replace("clusterIP: 10.0.0.1,", "clusterIP: 10.0.0.1, selector: {app: a},");
    let count = |own: &[&str], host: &str| {
        let files: [(&str, &[&str]); 2] = [("kube.yaml", own), ("kube-c2.yaml", &[IMPORT])];
        endpoints(&world(&["discovery", "host"], &files), host).len()
    };
    assert_eq!(count(&[&service, machine], LOCAL), 1);
    assert_eq!(count(&[&service, machine], SET), 0);
    assert_eq!(count(&[&service, machine, IMPORT], SET), 1);
}

#[test]
fn imported_slices_need_no_service() {
    let ready = SLICE.replace("conditions: {ready: false}", "");
    let files: &[(&str, &[&str])] = &[
        ("kube.yaml", &[SERVICE]),
        ("kube-c2.yaml", &[&ready]),
        ("kube-c3.yaml", &[SLICE]),
        ("kube-c4.yaml", &[SERVICE, SLICE]),
    ];
    let want = [
        ("c2".to_owned(), false, Health::Healthy),
        ("c3".to_owned(), false, Health::Unhealthy),
        ("c4".to_owned(), false, Health::Terminating),
    ];
    assert_eq!(endpoints(&world(&[], files), LOCAL), want);
    let cluster_local = endpoints(&world(&["discovery"], files), LOCAL);
    assert_eq!(cluster_local.len(), want.len());
    assert!(cluster_local.iter().all(|(_, cluster_local, _)| *cluster_local));
}
