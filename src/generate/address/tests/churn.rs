//! Random changes: what is generated one change after the other equals what is generated at once.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::json;

use super::{ambient, authorization, request, waypoint, ztunnel};
use crate::{
    api::Kind,
    base::ObjectKey,
    generate::{
        Proxy, RequestedResources, ResourceType, fixture,
        requested::WILDCARD,
        store::{ConfigStore, ConnectionId, ProxyEvents, Serial},
    },
    model::{Change, World, fixture as mesh, inputs::Row, installation::Installation},
    table::ChangeSet,
};

/// A sequence of numbers without a pattern (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).expect("below the limit")
    }
}

/// A random change of a small mesh. Objects have few names, so that they collide.
pub(crate) fn random_change(random: &mut Random) -> (String, bool) {
    let namespaces = ["a", "b", "istio-system"];
    let namespace = namespaces[random.below(namespaces.len())];
    let number = random.below(4);
    let labels = [
        "app: x",
        "app: x, version: v1",
        "app: other",
        "app: x, istio.io/use-waypoint: wp",
    ];
    let label = labels[random.below(labels.len())];
    let selector = ["{app: x}", "{app: other}", "{}"][random.below(3)];
    let node = ["n1", "n2"][random.below(2)];
    let ready = ["True", "False"][random.below(2)];
    let ip = random.below(6);
    let mode = ["STRICT", "PERMISSIVE", "DISABLE", "UNSET"][random.below(4)];
    let host = ["h.com", "wp.svc"][random.below(2)];
    // Slices refer to the present pod of a name, or to another one.
    let (pod, target) = (ip % 2, number % 2);
    let text = match random.below(9) {
        0..=2 => format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p{number}, namespace: {namespace}, labels: {{{label}}}, uid: \
             u{pod}}}\n\
             spec: {{serviceAccountName: sa, nodeName: {node}}}\n\
             status: {{phase: Running, podIP: 10.1.0.{ip}, conditions: [{{type: Ready, status: '{ready}'}}]}}\n"
        ),
        3 => format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s{number}, namespace: {namespace}, labels: {{{label}}}}}\n\
             spec: {{clusterIP: 10.0.0.{ip}, selector: {selector}, ports: [{{port: 80, targetPort: 8080}}]}}\n"
        ),
        4 => format!(
            "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: e{number}, namespace: {namespace}, \
             creationTimestamp: '202{ip}-01-01T00:00:00Z'}}\nspec: {{hosts: [h{ip}.com, {host}], resolution: STATIC, \
             ports: [{{number: 80, name: http, protocol: HTTP}}, {{number: 15008, name: tcp, protocol: TCP}}], endpoints: [{{address: 192.0.2.{ip}}}]}}\n"
        ),
        5 => format!(
            "apiVersion: networking.istio.io/v1\nkind: WorkloadEntry\nmetadata: {{name: w{number}, namespace: \
             {namespace}, labels: {{{label}}}}}\nspec: {{address: 10.2.0.{ip}}}\n"
        ),
        6 => format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: l{number}, namespace: {namespace}, \
             labels: {{kubernetes.io/service-name: s{number}}}}}\naddressType: IPv4\nports: [{{port: 80, name: ''}}]\n\
             endpoints: [{{addresses: [10.3.0.{ip}]}}, {{addresses: [10.1.0.1], targetRef: {{kind: Pod, name: \
             p{ip}, namespace: {namespace}, uid: u{target}}}}}]\n"
        ),
        7 => {
            let selected = if random.below(2) == 0 {
                "selector: {matchLabels: {app: x}}, "
            } else {
                ""
            };
            format!(
                "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: pa{number}, namespace: \
                 {namespace}}}\nspec: {{{selected}mtls: {{mode: {mode}}}, portLevelMtls: {{80: {{mode: STRICT}}}}}}\n"
            )
            .replace(
                ", portLevelMtls: {80: {mode: STRICT}}",
                if selected.is_empty() {
                    ""
                } else {
                    ", portLevelMtls: {80: {mode: STRICT}}"
                },
            )
        }
        _ => match random.below(5) {
            0 => authorization(
                namespace,
                &format!("ap{number}"),
                &format!("selector: {{matchLabels: {{{label}}}}}"),
            ),
            1 => waypoint(namespace, ["all", "service", "workload"][random.below(3)], "Same"),
            2 => format!(
                "apiVersion: v1\nkind: Namespace\nmetadata: {{name: {namespace}, labels: {{topology.istio.io/network: \
                 n{ip}, istio.io/use-waypoint: wp}}}}\n"
            ),
            3 => {
                let class = ["istio-remote", "istio-east-west"][random.below(2)];
                format!(
                    "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: gw{number}, namespace: \
                     istio-system, labels: {{topology.istio.io/network: n{ip}}}}}\nspec: {{gatewayClassName: {class}, \
                     addresses: [{{type: IPAddress, value: 198.51.100.{ip}}}], listeners: [{{name: hbone, port: 15008, \
                     protocol: HBONE, tls: {{mode: Terminate}}}}]}}\n\
                     status: {{addresses: [{{type: IPAddress, value: 198.51.100.{ip}}}]}}\n"
                )
            }
            _ => format!(
                "apiVersion: v1\nkind: Node\nmetadata: {{name: {node}, labels: {{topology.kubernetes.io/region: \
                 r{ip}}}}}\n"
            ),
        },
    };
    (text, random.below(3) == 0)
}

/// Names of all forms that random meshes may have.
pub(crate) const REQUESTED: [&str; 6] = [
    "Kubernetes//Pod/a/p1",
    "/10.1.0.2",
    "n2/10.1.0.2",
    "a/s1.a.svc.cluster.local",
    "/10.0.0.3",
    "b/h.com",
];

/// Cluster of the installation, and another one.
const CLUSTERS: [&str; 2] = ["Kubernetes", "c2"];

/// Returns true for the kinds that count in other clusters than that of the installation.
fn is_read_remotely(kind: Kind) -> bool {
    let kinds = [
        Kind::Pod,
        Kind::Service,
        Kind::EndpointSlice,
        Kind::Namespace,
        Kind::Node,
        Kind::KubeGateway,
    ];
    kinds.contains(&kind)
}

/// A mesh under random changes, with clients of all kinds.
struct Churn {
    installation: Installation,
    clients: Vec<(Proxy, RequestedResources)>,
    world: World,
    store: ConfigStore,
    /// The present objects.
    rows: BTreeMap<(Kind, ObjectKey), Row>,
}

impl Churn {
    /// Creates a mesh with one network or several.
    fn new(is_multi_network: bool) -> Self {
        let mut installation = ambient();
        let features = &mut installation.features;
        features.pilot_auto_allow_waypoint_policy = true;
        features.ambient_enable_multi_network = is_multi_network;
        features.ambient_enable_multi_network_waypoint = is_multi_network;
        let ztunnels = [
            request(ResourceType::Address, &[WILDCARD]),
            request(ResourceType::Address, &REQUESTED),
            request(ResourceType::Workload, &[WILDCARD]),
        ];
        let east_west =
            json!({"LABELS": {"gateway.istio.io/managed": "istio.io-eastwest-controller"}, "NETWORK": "n1"});
        let node = "waypoint~10.1.0.9~e.istio-system~istio-system.svc.cluster.local";
        let east_west = (fixture::client(node, &east_west), RequestedResources::default());
        let ztunnels = ztunnels.map(|names| (ztunnel(), names)).into_iter();
        let mut churn = Self {
            world: World::new(installation.clone()),
            installation,
            clients: ztunnels.chain([east_west]).collect(),
            store: ConfigStore::default(),
            rows: BTreeMap::new(),
        };
        churn.store = churn.connect(&churn.world);
        let scopes = "serviceScopeConfigs: [{servicesSelector: {matchLabels: {app: x}}, scope: GLOBAL}]";
        churn.change(CLUSTERS[0], "mesh.yaml", scopes, false);
        churn
    }

    /// Creates a store with the clients.
    fn connect(&self, world: &World) -> ConfigStore {
        let ids = (0_u64..).map(ConnectionId);
        let connected = ids.clone().zip(&self.clients);
        let requested = ids.zip(&self.clients);
        let events = ProxyEvents {
            connected: connected
                .map(|(id, (proxy, _))| (id, Arc::new(proxy.clone())))
                .collect(),
            requested: requested.map(|(id, (_, names))| (id, names.clone().into())).collect(),
            ..ProxyEvents::default()
        };
        let mut store = ConfigStore::default();
        let update = store.update(&world.snapshot(), &ChangeSet::default(), events, &Serial);
        assert!(update.panics.is_empty(), "{:?}", update.panics);
        store
    }

    /// Adds, changes or removes the objects of a file.
    fn change(&mut self, cluster: &str, file: &str, text: &str, removes: bool) {
        let installation = Installation {
            cluster: cluster.into(),
            ..self.installation.clone()
        };
        let rows = mesh::folder(&installation, &[(file, text)]).into_iter();
        let counted = rows.filter(|row| cluster == CLUSTERS[0] || is_read_remotely(row.kind()));
        let changes = counted.map(|row| {
            let key = (row.kind(), row.key().clone());
            if removes {
                self.rows.remove(&key);
                Change::Remove(key.0, key.1)
            } else {
                self.rows.insert(key, row.clone());
                Change::Upsert(row)
            }
        });
        let commit = self.world.commit(changes.collect());
        let none = ProxyEvents::default();
        let update = self.store.update(&commit.snapshot, &commit.changes, none, &Serial);
        assert!(commit.panics.is_empty(), "{:?}", commit.panics);
        assert!(update.panics.is_empty(), "{:?}", update.panics);
    }

    /// Fails unless each client has the same bytes as after a start with the present objects. They are added in reverse
    /// order, so that the order does not matter either.
    fn check(&self, place: &str) {
        let mut scratch = World::new(self.installation.clone());
        scratch.commit(self.rows.values().rev().cloned().map(Change::Upsert).collect());
        let fresh = self.connect(&scratch);
        for client in 0..self.clients.len() as u64 {
            for resource_type in [
                ResourceType::Address,
                ResourceType::Workload,
                ResourceType::Authorization,
                ResourceType::Listener,
                ResourceType::Cluster,
                ResourceType::Endpoint,
            ] {
                let frames = |store| {
                    let all = fixture::snapshot(store, client).resources(resource_type);
                    let frames = all.iter().map(|one| (one.name.clone(), one.delta_frame().to_bytes()));
                    frames.collect::<BTreeMap<_, _>>()
                };
                let (one, other) = (frames(&self.store), frames(&fresh));
                let differing = one.iter().find(|(name, frame)| other.get(*name) != Some(frame));
                assert_eq!(differing.map(|(name, _)| name), None, "{place}, client {client}");
                assert_eq!(one.len(), other.len(), "{place}, client {client}, {resource_type:?}");
            }
        }
    }
}

/// Any series of changes leads to the same bytes as its last state at once: for all resources, for names, for the
/// policies, and for gateways between networks. Each mesh has this number of changes.
fn compare_with_scratch(changes: usize) {
    for seed in 0..5 {
        let is_multi_network = seed % 2 == 1;
        let mut random = Random(seed);
        let mut churn = Churn::new(is_multi_network);
        for step in 0..changes {
            let (text, removes) = random_change(&mut random);
            let cluster = CLUSTERS[random.below(4) / 3];
            churn.change(cluster, "change.yaml", &text, removes);
            if step % 40 == 39 {
                churn.check(&format!("seed {seed}, step {step}"));
            }
        }
    }
}

#[test]
fn incremental_generation_equals_generation_from_scratch() {
    compare_with_scratch(240);
}

#[test]
#[ignore = "minutes: `make fuzz-ambient`"]
fn ten_thousand_changes_equal_generation_from_scratch() {
    compare_with_scratch(2_000);
}
