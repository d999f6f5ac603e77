//! The model as a whole: any history of changes yields what the final inputs alone yield.

use proptest::prelude::*;

use super::{Change, MeshSnapshot, SourceId, World, fixture, inputs::Row, installation::Installation};
use crate::table::Cx;

/// Objects with many interactions. Each may exist or not, some in two forms.
const OBJECTS: &[&str] = &[
    "kube.yaml|{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {clusterIP: 10.0.0.1, selector: {app: a}, ports: [{name: http, port: 80}]}}",
    "kube.yaml|{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {clusterIP: None, ports: [{name: http, port: 81}]}}",
    "kube-c2.yaml|{apiVersion: v1, kind: Service, metadata: {name: a, labels: {topology.istio.io/network: n2}}, spec: {clusterIP: 10.9.0.1, externalIPs: [9.9.9.9], ports: [{name: tls, port: 15443}]}}",
    "kube.yaml|{apiVersion: v1, kind: Service, metadata: {name: b}, spec: {type: ExternalName, externalName: a.default.svc.cluster.local}}",
    "kube.yaml|{apiVersion: v1, kind: Service, metadata: {name: b}, spec: {type: ExternalName, externalName: x.com}}",
    "kube.yaml|{apiVersion: v1, kind: Service, metadata: {name: c}, spec: {type: ExternalName, externalName: b.default.svc.cluster.local}}",
    "kube.yaml|{apiVersion: v1, kind: Service, metadata: {name: n, annotations: {traffic.istio.io/nodeSelector: '{}'}, labels: {topology.istio.io/network: n3}}, spec: {type: NodePort, ports: [{port: 15443, nodePort: 31000}]}}",
    "kube.yaml|{apiVersion: v1, kind: Node, metadata: {name: n1, labels: {topology.kubernetes.io/region: r}}, status: {addresses: [{type: ExternalIP, address: 3.3.3.3}]}}",
    "kube.yaml|{apiVersion: v1, kind: Pod, metadata: {name: p, labels: {app: a}}, spec: {nodeName: n1}, status: {podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}}",
    "kube.yaml|{apiVersion: v1, kind: Pod, metadata: {name: p, labels: {app: b}}, status: {podIP: 10.1.0.1}}",
    "kube.yaml|{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: s, labels: {kubernetes.io/service-name: a}}, addressType: IPv4, ports: [{name: http, port: 8080}], endpoints: [{addresses: [10.1.0.1], targetRef: {kind: Pod, name: p, namespace: default}}]}",
    "kube.yaml|{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: t, labels: {kubernetes.io/service-name: a}}, addressType: IPv4, ports: [{name: http, port: 8080}], endpoints: [{addresses: [10.1.0.1]}]}",
    "kube.yaml|{apiVersion: v1, kind: Namespace, metadata: {name: default, annotations: {networking.istio.io/traffic-distribution: PreferClose}}}",
    "kube.yaml|{apiVersion: v1, kind: Namespace, metadata: {name: istio-system, labels: {topology.istio.io/network: n1}}}",
    "meshnetworks.yaml|{networks: {n1: {endpoints: [{fromRegistry: Kubernetes}], gateways: [{registryServiceName: a.default.svc.cluster.local, port: 443}]}, n2: {endpoints: [{fromCidr: 10.1.0.0/16}], gateways: [{address: 1.1.1.1, port: 443}]}}}",
    "config.yaml|{apiVersion: networking.istio.io/v1, kind: WorkloadEntry, metadata: {name: w, labels: {app: a}}, spec: {address: 10.2.0.1}}",
    "config.yaml|{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: e}, spec: {hosts: [x.com, a.default.svc.cluster.local], resolution: STATIC, ports: [{number: 80, name: http, protocol: HTTP}], workloadSelector: {labels: {app: a}}}}",
    "config.yaml|{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: e}, spec: {hosts: [x.com], resolution: DNS, ports: [{number: 82, name: http, protocol: HTTP}]}}",
    "config.yaml|{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: f}, spec: {hosts: [x.com, z.com], addresses: [7.7.7.7, 8.8.8.8], resolution: STATIC, ports: [{number: 83, name: tcp, protocol: TCP}], endpoints: [{address: 6.6.6.6}]}}",
    "mesh.yaml|{trustDomain: other, defaultServiceExportTo: ['.']}",
];

fn rows_of(installation: &Installation, object: &str) -> Vec<Row> {
    let (file, text) = object.split_once('|').expect("because every object names its file");
    let mut rows = fixture::folder(installation, &[(file, text)]);
    // A folder always has a mesh config, which only its own file should change here.
    rows.retain(|row| file == "mesh.yaml" || !matches!(row, Row::MeshConfig(_)));
    rows
}

fn derived(mesh: &MeshSnapshot) -> String {
    let cx = Cx::untracked();
    let mut text = String::new();
    let mut add = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    mesh.workloads.iter(&cx).for_each(|row| add(format!("{row:?}")));
    mesh.services.iter(&cx).for_each(|row| add(format!("{row:?}")));
    mesh.endpoints.iter(&cx).for_each(|row| add(format!("{row:?}")));
    mesh.endpoint_traits.iter(&cx).for_each(|row| add(format!("{row:?}")));
    mesh.networks.iter(&cx).for_each(|row| add(format!("{row:?}")));
    mesh.auto_addresses.iter(&cx).for_each(|row| add(format!("{row:?}")));
    text
}

/// A derived table would hide an input table of its name, which is reached through it by dereference.
#[test]
fn every_table_has_a_name_of_its_own() {
    let mesh = World::new(Installation::default()).snapshot();
    let mut names: Vec<_> = mesh.relations().into_iter().map(|relation| relation.name).collect();
    names.sort_unstable();
    assert!(names.is_sorted_by(|left, right| left < right), "{names:?}");
}

#[test]
fn replaced_rows_are_dropped() {
    let installation = Installation::default();
    let [before, after] = [0, 1].map(|index| rows_of(&installation, OBJECTS[index]).remove(0));
    let mut world = World::new(installation);
    world.commit(vec![Change::Upsert(before.clone())]);
    world.commit(vec![Change::Upsert(after)]);
    let Row::Service(service) = before else {
        panic!("want a Service");
    };
    assert!(!service.is_shared(), "nothing holds the old row");
}

#[test]
fn the_last_of_several_rows_with_one_key_counts() {
    let installation = Installation::default();
    let [first, last, other] = [0, 1, 3].map(|index| rows_of(&installation, OBJECTS[index]).remove(0));
    let (kind, key) = (last.kind(), last.key().clone());
    let source = SourceId {
        cluster: key.cluster.clone(),
        kind,
    };
    let mut world = World::new(installation);
    world.commit(vec![Change::Replace(source, vec![other, first, last.clone()])]);
    assert_eq!(world.snapshot().object(kind, &key), Some(last));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_history_ends_as_its_last_state(
        allocate in any::<bool>(),
        history in prop::collection::vec((0..OBJECTS.len(), any::<bool>(), any::<bool>()), 1..40),
    ) {
        let mut installation = Installation::default();
        installation.features.pilot_enable_ip_autoallocate = allocate;
        let objects: Vec<Vec<Row>> = OBJECTS.iter().map(|object| rows_of(&installation, object)).collect();
        let mut world = World::new(installation.clone());
        let mut state = std::collections::BTreeMap::new();
        let mut batch = Vec::new();
        for (index, put, commit) in history {
            for row in &objects[index] {
                let key = (row.kind(), row.key().clone());
                if put {
                    state.insert(key, row.clone());
                    batch.push(Change::Upsert(row.clone()));
                } else {
                    state.remove(&key);
                    batch.push(Change::Remove(key.0, key.1));
                }
            }
            if commit {
                world.commit(std::mem::take(&mut batch));
            }
        }
        world.commit(batch);
        let mut scratch = World::new(installation);
        scratch.commit(state.into_values().rev().map(Change::Upsert).collect());
        prop_assert_eq!(derived(&world.snapshot()), derived(&scratch.snapshot()));
    }
}
