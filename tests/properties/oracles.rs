//! The oracles: a second, simpler way to the same result.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use istiod::{
    api::{Kind, document},
    base::{ClusterId, ObjectKey, SmolStr},
    generate::{
        Proxy, RequestedResources, ResourceType,
        proxy::{Extensions, Identity},
        store::ConnectionId,
    },
    model::{Change, Installation, features::Features, inputs::Row},
};
use libtest_mimic::Failed;
use serde_json::{Value, json};

use super::control_plane::{ControlPlane, first_difference, upserts};
use super::corpus;
use crate::support::random::Random;

/// A control plane with [`proxies`].
fn fresh(installation: Installation) -> ControlPlane {
    let installation = Installation {
        registries: corpus::REGISTRIES.map(ClusterId::new).to_vec(),
        ..installation
    };
    let proxies = proxies().into_iter().map(Arc::new);
    let requested = [(ConnectionId(GRPC), requested_names())];
    ControlPlane::new(installation, proxies, requested)
}

/// The proxyless gRPC client and server; the first one is a sidecar of the same workload.
const GRPC: u64 = 5;
const SERVED: u64 = 0;
/// The waypoint of some services of an ambient mesh, in some of the meshes.
const WAYPOINT: u64 = 6;

/// The subscriptions of the gRPC client: all resources that may exist, and some that do not.
pub(super) fn requested_names() -> RequestedResources {
    let hosts = corpus::HOSTS
        .iter()
        .flat_map(|host| corpus::PORTS.map(|(_, port)| (*host, port)));
    let listeners = hosts
        .clone()
        .map(|(host, port)| SmolStr::from(format!("{host}:{port}")));
    let sockets = [8080, 8081, 82].map(|port| SmolStr::from(format!("xds.istio.io/grpc/lds/inbound/0.0.0.0:{port}")));
    let clusters = |subsets: &'static [&'static str]| {
        let of_host = hosts.clone().flat_map(|(host, port)| {
            subsets
                .iter()
                .map(move |subset| SmolStr::from(format!("outbound|{port}|{subset}|{host}")))
        });
        of_host.collect()
    };
    RequestedResources::new([
        (ResourceType::Listener, listeners.chain(sockets).collect()),
        (ResourceType::Route, clusters(&[""])),
        (ResourceType::Cluster, clusters(&["", "v1"])),
        (ResourceType::Endpoint, clusters(&["", "v1"])),
    ])
}

fn proxies() -> Vec<Proxy> {
    let proxy = |kind: &str, ip: &str, id: &str, namespace: &str, labels: Value| {
        let (kind, generator) = match kind {
            "grpc" => ("sidecar", "grpc"),
            kind => (kind, ""),
        };
        let metadata = json!({ "NAMESPACE": namespace, "CLUSTER_ID": "Kubernetes", "LABELS": labels,
            "ISTIO_VERSION": "1.30.3",
            "SERVICE_ACCOUNT": "sa", "GENERATOR": generator });
        let metadata = metadata
            .as_object()
            .expect("the metadata is an object")
            .iter()
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        let node = format!("{kind}~{ip}~{id}.{namespace}~{namespace}.svc.cluster.local");
        let proxy = Proxy::new(&node, "", metadata, "r1/z1".into(), Extensions::default());
        let mut proxy = proxy.expect("the node is valid");
        proxy.identity = Identity::from_spiffe(&format!("spiffe://cluster.local/ns/{namespace}/sa/sa"));
        proxy
    };
    vec![
        proxy("sidecar", "10.1.0.1", "s0-0", "a", json!({ "app": "s0" })),
        proxy(
            "sidecar",
            "10.1.0.2",
            "s1-1",
            "a",
            json!({ "app": "s1", "version": "v1" }),
        ),
        proxy("sidecar", "10.1.0.3", "s2-0", "b", json!({ "app": "s2" })),
        proxy("sidecar", "10.9.0.1", "vm", "b", json!({ "app": "s3" })),
        proxy("router", "10.1.0.9", "gw", "istio-system", json!({ "istio": "gw" })),
        proxy("grpc", "10.1.0.1", "s0-0", "a", json!({ "app": "s0" })),
        proxy("waypoint", "10.1.1.4", "waypoint-0", "a", waypoint_labels()),
    ]
}

fn waypoint_labels() -> Value {
    json!({ "app": corpus::WAYPOINT, "gateway.networking.k8s.io/gateway-name": "s0" })
}

/// The waypoint's pod and its Service.
fn waypoint_rows() -> impl Iterator<Item = Row> {
    let name = corpus::WAYPOINT;
    let meta = |name: &str| json!({ "name": name, "namespace": "a" });
    let mut pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": meta("waypoint-0"),
        "spec": { "serviceAccountName": "sa" },
        "status": { "phase": "Running", "podIP": "10.1.1.4", "conditions": [{ "type": "Ready", "status": "True" }] } });
    pod["metadata"]["labels"] = waypoint_labels();
    let service = json!({ "apiVersion": "v1", "kind": "Service", "metadata": meta(name),
        "spec": { "clusterIP": "10.2.2.1", "selector": { "app": name },
            "ports": [{ "name": "mesh", "port": 15008 }] } });
    [pod, service].into_iter().flat_map(|object| rows(&object))
}

fn rows(object: &Value) -> Vec<Row> {
    document::parse(&ClusterId::new("Kubernetes"), object).rows
}

fn mesh_rows() -> Vec<Row> {
    let installation = Installation::default();
    let folder = istiod::api::folder::read(
        &Vec::<(String, Vec<u8>)>::new(),
        &installation.cluster,
        &installation.mesh_config_key(),
    );
    folder.rows.into_values().flatten().chain(waypoint_rows()).collect()
}

/// The base seed of all random numbers.
const SEED: u64 = 20_261;

/// Applies 13,000 random edits in all, and compares the incremental result with one built from scratch at intervals.
pub(super) fn incremental_equals_from_scratch() -> Result<(), Failed> {
    edited(&Installation::default(), SEED, 7_000)?;
    let mut exported = Installation::default();
    exported.features.enable_mcs_service_discovery = true;
    exported.features.enable_mcs_host = true;
    exported.features.pilot_strict_host_ownership = true;
    edited(&exported, SEED + 2, 3_000)?;
    edited(&ambient(), SEED + 4, 3_000)
}

/// The installation with `PILOT_ENABLE_AMBIENT`.
fn ambient() -> Installation {
    let variables = [("PILOT_ENABLE_AMBIENT".to_owned(), "true".to_owned())].into();
    let (features, errors) = Features::parse(&variables);
    assert!(errors.is_empty(), "{errors:?}");
    Installation {
        features,
        ..Installation::default()
    }
}

fn edited(installation: &Installation, seed: u64, edits: usize) -> Result<(), Failed> {
    let mut random = Random::new(seed);
    let mut control_plane = fresh(installation.clone());
    let mut objects: BTreeMap<(Kind, ObjectKey), Row> = BTreeMap::new();
    let mut rejected = 0;
    let mut served_by_waypoint = 0;
    control_plane.commit(upserts(mesh_rows()))?;
    for edit in 0..edits {
        let mut batch = Vec::new();
        for _ in 0..=random.below(3) {
            if objects.len() > 60 || (random.below(4) == 0 && !objects.is_empty()) {
                let key = objects
                    .keys()
                    .nth(random.below(objects.len()))
                    .cloned()
                    .expect("the index is in range");
                objects.remove(&key);
                batch.push(Change::Remove(key.0, key.1));
            } else {
                let parsed = corpus::rows(&mut random);
                rejected += usize::from(parsed.is_empty());
                for row in parsed {
                    objects.insert((row.kind(), row.key().clone()), row.clone());
                    batch.push(Change::Upsert(row));
                }
            }
        }
        control_plane.commit(batch)?;
        if edit % 50 == 0 || edit + 1 == edits {
            let mut scratch = fresh(installation.clone());
            scratch.commit(upserts(mesh_rows().into_iter().chain(objects.values().cloned())))?;
            let (incremental, scratch) = (control_plane.bytes(), scratch.bytes());
            let behind = incremental.keys().filter(|(proxy, resource_type, name)| {
                *proxy == WAYPOINT && *resource_type == ResourceType::Cluster && name.starts_with("inbound-vip|")
            });
            served_by_waypoint += usize::from(behind.count() > 0);
            if incremental != scratch {
                let difference = first_difference(&incremental, &scratch);
                return Err(format!("seed {seed}, edit {edit}: differences: {difference}").into());
            }
            if edit > 1000 && incremental.len() < 20 {
                return Err(format!(
                    "edit {edit}: only {} resources; the oracle tests nothing",
                    incremental.len()
                )
                .into());
            }
        }
    }
    if installation.features.pilot_enable_ambient && served_by_waypoint < 5 {
        return Err(
            format!("a waypoint had resources only {served_by_waypoint} times; the oracle tests nothing").into(),
        );
    }
    if rejected > 100 {
        return Err(format!("{rejected} random objects were rejected; the corpus is invalid").into());
    }
    Ok(())
}

/// The same objects in any order and in any batches give the same bytes.
pub(super) fn any_order_gives_the_same_bytes() -> Result<(), Failed> {
    let mut random = Random::new(SEED + 1);
    for round in 0..30 {
        let installation = if round < 20 { Installation::default() } else { ambient() };
        let mut objects: BTreeMap<(Kind, ObjectKey), Row> = BTreeMap::new();
        for _ in 0..60 {
            objects.extend(
                corpus::rows(&mut random)
                    .into_iter()
                    .map(|row| ((row.kind(), row.key().clone()), row)),
            );
        }
        let mut rows: Vec<Row> = mesh_rows().into_iter().chain(objects.into_values()).collect();
        let mut expected = None;
        for _ in 0..4 {
            for index in (1..rows.len()).rev() {
                rows.swap(index, random.below(index + 1));
            }
            let mut control_plane = fresh(installation.clone());
            let mut rest = rows.as_slice();
            while !rest.is_empty() {
                let (batch, later) = rest.split_at((1 + random.below(20)).min(rest.len()));
                control_plane.commit(upserts(batch.iter().cloned()))?;
                rest = later;
            }
            let bytes = control_plane.bytes();
            if bytes.len() < 20 {
                return Err(format!(
                    "round {round}: only {} resources; the oracle tests nothing",
                    bytes.len()
                )
                .into());
            }
            if let Some(expected) = expected.replace(bytes.clone())
                && expected != bytes
            {
                return Err(format!(
                    "round {round}: results depend on the order for {}",
                    first_difference(&expected, &bytes)
                )
                .into());
            }
        }
    }
    Ok(())
}

/// The effects of each object are the difference to a mesh that never had the object, and asking changes nothing.
pub(super) fn effects_equal_a_mesh_without_the_object() -> Result<(), Failed> {
    let mut random = Random::new(SEED + 6);
    let (mut with_effect, mut without_effect) = (0, 0);
    for round in 0..4 {
        let installation = if round < 3 { Installation::default() } else { ambient() };
        let mut objects: BTreeMap<(Kind, ObjectKey), Row> = BTreeMap::new();
        for _ in 0..50 {
            let rows = corpus::rows(&mut random).into_iter();
            objects.extend(rows.map(|row| ((row.kind(), row.key().clone()), row)));
        }
        let mesh = || mesh_rows().into_iter();
        let mut control_plane = fresh(installation.clone());
        control_plane.commit(upserts(mesh().chain(objects.values().cloned())))?;
        let present = control_plane.bytes();
        for key in objects.keys() {
            let given = control_plane.without(key.0, &key.1)?.ok_or("an object is missing")?;
            let mut scratch = fresh(installation.clone());
            let others = objects.iter().filter(|(other, _)| *other != key);
            scratch.commit(upserts(mesh().chain(others.map(|(_, row)| row.clone()))))?;
            let expected = scratch.bytes();
            if given != expected {
                let difference = first_difference(&given, &expected);
                return Err(format!("round {round}: without {key:?}: {difference}").into());
            }
            *(if given == present {
                &mut without_effect
            } else {
                &mut with_effect
            }) += 1;
        }
        // After all questions, the control plane works as before.
        let (key, row) = objects.first_key_value().ok_or("no objects")?;
        control_plane.commit(vec![Change::Remove(key.0, key.1.clone())])?;
        control_plane.commit(upserts([row.clone()]))?;
        if control_plane.bytes() != present {
            return Err(format!("round {round}: questions changed the control plane").into());
        }
    }
    if with_effect < 20 || without_effect < 8 {
        return Err(format!("{with_effect} objects with and {without_effect} without effect are too few").into());
    }
    Ok(())
}

/// The part of a route configuration for a host, without the differences between gRPC and Envoy.
fn host_routes(configuration: &Value, name: &str) -> Option<Value> {
    let mut hosts = configuration["virtualHosts"].as_array()?.iter();
    let mut routes = hosts.find(|host| host["name"] == name)?["routes"].clone();
    for route in routes.as_array_mut().into_iter().flatten() {
        if let Some(action) = route.get_mut("route").and_then(Value::as_object_mut) {
            action.remove("maxGrpcTimeout");
            action.remove("maxStreamDuration");
        }
    }
    Some(routes)
}

/// A gRPC client subscribes to each host separately and gets the same routes as a sidecar, except for EnvoyFilters,
/// which apply only to Envoys.
pub(super) fn grpc_clients_get_the_routes_of_sidecars() -> Result<(), Failed> {
    let mut random = Random::new(SEED + 3);
    let mut compared = 0;
    for round in 0..120 {
        let mut control_plane = fresh(Installation::default());
        let rows = (0..60).flat_map(|_| corpus::rows(&mut random));
        let rows = rows.filter(|row| !matches!(row, Row::EnvoyFilter(_)));
        let rows: Vec<Row> = mesh_rows().into_iter().chain(rows).collect();
        control_plane.commit(upserts(rows))?;
        let view = |member: u64| {
            let key = control_plane.store.group_of(ConnectionId(member))?;
            Some(
                control_plane
                    .store
                    .snapshot(key)?
                    .resources(ResourceType::Route)
                    .clone(),
            )
        };
        let (Some(sidecar), Some(grpc)) = (view(SERVED), view(GRPC)) else {
            return Err("a proxy has no resources".into());
        };
        for (_, port) in corpus::PORTS {
            let Some(all) = sidecar.get(&port.to_string()) else {
                continue;
            };
            let all = istiod::proto::json::any_to_json(&all.any());
            for host in corpus::HOSTS {
                let name = format!("{host}:{port}");
                let Some(expected) = host_routes(&all, &name) else {
                    continue;
                };
                let own = grpc.get(&format!("outbound|{port}||{host}"));
                let own = own.map(|own| istiod::proto::json::any_to_json(&own.any()));
                let own = own.and_then(|own| host_routes(&own, &name));
                if own.as_ref() != Some(&expected) {
                    return Err(format!("round {round}, {name}: {own:?}, expected {expected}").into());
                }
                compared += 1;
            }
        }
    }
    if compared < 100 {
        return Err(format!("only {compared} hosts were compared; the oracle tests nothing").into());
    }
    Ok(())
}

fn named(kind: &str, namespace: &str, name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "networking.istio.io/v1", "kind": kind,
        "metadata": { "name": name, "namespace": namespace }, "spec": spec })
}

fn service(namespace: &str, name: &str, address: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": name, "namespace": namespace },
        "spec": { "clusterIP": address, "ports": [{ "name": "http", "port": 80 }] } })
}

fn slice(namespace: &str, name: &str, addresses: &[&str]) -> Value {
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|address| json!({ "addresses": [address], "conditions": { "ready": true } }))
        .collect();
    json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": name, "namespace": namespace, "labels": { "kubernetes.io/service-name": name } },
        "ports": [{ "name": "http", "port": 8080 }], "endpoints": endpoints })
}

/// An endpoint change affects one load assignment, a VirtualService affects no clusters and no endpoints, and a service
/// outside the Sidecar affects nothing.
pub(super) fn irrelevant_changes_cause_no_updates() -> Result<(), Failed> {
    let mut control_plane = fresh(Installation::default());
    let mut objects = vec![];
    for index in 0..20 {
        let name = format!("web{index}");
        objects.push(service("b", &name, &format!("10.7.0.{index}")));
        objects.push(slice("b", &name, &["10.1.1.1"]));
    }
    objects.push(service("hidden", "far", "10.7.1.1"));
    objects.push(slice("hidden", "far", &["10.1.1.2"]));
    objects.push(named(
        "Sidecar",
        "a",
        "default",
        json!({ "egress": [{ "hosts": ["b/*"] }] }),
    ));
    control_plane.commit(upserts(mesh_rows().into_iter().chain(objects.iter().flat_map(rows))))?;
    let mut changed_by = |object: &Value| -> Result<BTreeMap<ResourceType, usize>, Failed> {
        let before = control_plane.bytes();
        control_plane.commit(upserts(rows(object)))?;
        let mut counts = BTreeMap::new();
        let after = control_plane.bytes();
        let keys: BTreeSet<_> = before.keys().chain(after.keys()).collect();
        let (own, others): (Vec<_>, Vec<_>) = keys
            .into_iter()
            .filter(|key| before.get(*key) != after.get(*key))
            // The Sidecar resource of namespace a applies to the first sidecar.
            .partition(|(proxy, ..)| *proxy == 0);
        if others.is_empty() {
            return Err(format!("no proxy without the Sidecar sees {object}").into());
        }
        for (_, resource_type, _) in own {
            *counts.entry(*resource_type).or_insert(0) += 1;
        }
        Ok(counts)
    };
    let endpoint = changed_by(&slice("b", "web3", &["10.1.1.1", "10.1.1.9"]))?;
    let route = json!({ "hosts": ["web3.b.svc.cluster.local"],
        "http": [{ "timeout": "3s", "route": [{ "destination": { "host": "web3.b.svc.cluster.local" } }] }] });
    let virtual_service = changed_by(&named("VirtualService", "b", "web3", route))?;
    let irrelevant = changed_by(&slice("hidden", "far", &["10.1.1.3"]))?;
    let hidden_service = changed_by(&service("hidden", "farther", "10.7.1.2"))?;
    if endpoint != BTreeMap::from([(ResourceType::Endpoint, 1)]) {
        return Err(format!("one endpoint changed {endpoint:?}").into());
    }
    if virtual_service != BTreeMap::from([(ResourceType::Route, 1)]) {
        return Err(format!("one VirtualService changed {virtual_service:?}").into());
    }
    if !irrelevant.is_empty() || !hidden_service.is_empty() {
        return Err(format!("a service excluded by the Sidecar changed {irrelevant:?} {hidden_service:?}").into());
    }
    Ok(())
}

/// Twice as many services record about twice as many dependencies, at most.
pub(super) fn dependencies_grow_linearly() -> Result<(), Failed> {
    let reads = |services: usize| -> Result<usize, Failed> {
        let mut control_plane = fresh(Installation::default());
        let objects = (0..services).flat_map(|index| {
            let name = format!("web{index}");
            [
                service("b", &name, &format!("10.7.{}.{}", index / 200, index % 200)),
                slice("b", &name, &["10.1.1.1"]),
            ]
        });
        let objects: Vec<Value> = objects.collect();
        control_plane.commit(upserts(mesh_rows().into_iter().chain(objects.iter().flat_map(rows))))?;
        Ok(control_plane.store.size().reads)
    };
    let (once, twice) = (reads(200)?, reads(400)?);
    if once < 200 || twice * 10 > once * 23 {
        return Err(format!("{once} recorded reads for 200 services, {twice} for 400").into());
    }
    Ok(())
}
