//! HTTPRoutes of one Gateway in a real API server, with a connected Envoy: the time until a thousand new routes have
//! their effect, the delay of a new one beside five thousand, and requests that fail during changes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Figures, write};
use crate::support::ads::{AdsClient, Resources, Type};
use crate::support::daemon::Daemon;
use crate::support::envoy::{Envoy, Node, Protocol};
use crate::support::http::{self, Application};
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{Cluster, crds};
use crate::support::ports::Reserved;
use crate::support::{scratch, wait};

/// Routes whose arrival is measured as a whole.
const COUNTED: usize = 1_000;
/// Routes beside which single changes are measured.
const ATTACHED: usize = 5_000;
/// Routes that are added one by one. Before each, nothing changes for [`QUIET`], so that it waits for one debounce.
const SINGLE: usize = 100;
const QUIET: Duration = Duration::from_millis(1200);
/// Changes without a pause: half of them add a route, the others remove it again.
const CHANGES: usize = 500;
/// Interval of requests during all these changes.
const REQUESTS_APART: Duration = Duration::from_millis(5);
/// Interval of looks at the Envoy.
const LOOKS_APART: Duration = Duration::from_millis(1);
const TIMEOUT: Duration = Duration::from_mins(5);

pub(crate) const FEW: &str = "1,000 HTTPRoutes of a Gateway";
pub(crate) const MANY: &str = "changes of HTTPRoutes beside 5,000";
const SERVED: &str = "ms from the last route to its effect";
const COUNT: &str = "ms from the last route to the Gateway's count";
const STATUSES: &str = "ms from the last route to all statuses";
const WRITES: &str = "writes of the Gateway's status";
const RECEIVED: [&str; 2] = ["ms p50 to a new route's arrival", "ms p99 to a new route's arrival"];
const EFFECTIVE: [&str; 2] = ["ms p50 to a new route's effect", "ms p99 to a new route's effect"];
const FAILED: &str = "failed requests";
const REQUESTS: &str = "requests";

/// Returns the upper limit of a figure.
pub(crate) fn goal(figure: &str) -> Option<f64> {
    match figure {
        SERVED | COUNT => Some(2000.0),
        WRITES => Some(311.0),
        name if name == RECEIVED[1] => Some(60.0),
        FAILED => Some(0.0),
        _ => None,
    }
}

const SYSTEM: &str = "istio-system";
const ACCOUNT: &str = "istiod";
const GROUP: &str = "gateway.networking.k8s.io";

/// A Gateway with its proxy.
struct Edge<'a> {
    cluster: &'a Cluster,
    /// The Envoy's listener.
    address: SocketAddr,
    /// A client that connects as the Envoy does, and receives the same.
    twin: AdsClient,
    /// The name of the route configuration.
    routes: String,
}

/// Measures both.
pub(crate) fn measure() -> Result<BTreeMap<&'static str, Figures>, String> {
    let cluster = Cluster::start("bench/kubernetes/routes")?;
    let folder = scratch("bench/kubernetes/routes-work");
    let kubeconfig = prepare(&cluster, &folder)?;
    let (backend, port) = (Application::start("web", "127.0.0.2"), Reserved::new());
    write(&cluster, mesh(port.port, backend.address))?;
    let daemon = Daemon::in_kubernetes(&kubeconfig, SYSTEM, &folder.join("istiod.log"), |command| {
        command.env("POD_NAME", "istiod-0");
    })?;
    let envoy = Envoy::start(&folder, "edge", &node("edge-0"), daemon.xds, Protocol::Delta)?;
    let edge = Edge {
        cluster: &cluster,
        address: SocketAddr::from(([127, 0, 0, 1], port.port)),
        twin: AdsClient::connect(daemon.xds, &node("edge-0")),
        routes: format!("http.{}", port.port),
    };
    let few = edge.few()?;
    let many = edge.many()?;
    envoy.rejected_nothing()?;
    Ok(BTreeMap::from([(FEW, few), (MANY, many)]))
}

/// Defines the kinds, and returns the kubeconfig of an account whose requests are audited.
fn prepare(cluster: &Cluster, folder: &Path) -> Result<std::path::PathBuf, String> {
    for kind in ["Gateway", "GatewayClass", "HTTPRoute"] {
        let mut definition = crds::loose_crd(GROUP, kind);
        definition["metadata"]["annotations"] = json!({ "api-approved.kubernetes.io": "unapproved, for a test" });
        if kind == "GatewayClass" {
            definition["spec"]["scope"] = json!("Cluster");
        }
        cluster.api.apply(&definition)?;
        crds::established(&cluster.api, &definition)?;
    }
    cluster.namespace("app", &json!({}))?;
    let kubeconfig = folder.join("kubeconfig");
    cluster.account_kubeconfig(SYSTEM, ACCOUNT, &kubeconfig)?;
    let group = "rbac.authorization.k8s.io";
    cluster.api.apply(
        &json!({ "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding",
        "metadata": { "name": ACCOUNT },
        "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin" },
        "subjects": [{ "kind": "ServiceAccount", "namespace": SYSTEM, "name": ACCOUNT }] }),
    )?;
    Ok(kubeconfig)
}

/// An instance of the Gateway. Its address is that of the Service; it listens at all addresses.
fn node(pod: &str) -> Node {
    Node {
        id: format!("router~10.9.0.1~{pod}.{SYSTEM}~{SYSTEM}.svc.cluster.local"),
        metadata: json!({ "NAMESPACE": SYSTEM, "SERVICE_ACCOUNT": "edge", "CLUSTER_ID": "Kubernetes",
            "ISTIO_VERSION": "1.30.3", "INSTANCE_IPS": "10.9.0.1" }),
    }
}

fn mesh(port: u16, backend: SocketAddr) -> Vec<Value> {
    let metadata = |namespace: &str, name: &str| json!({ "namespace": namespace, "name": name });
    let listener = json!({ "name": "http", "port": port, "protocol": "HTTP",
        "allowedRoutes": { "namespaces": { "from": "All" } } });
    let endpoint = json!({ "address": backend.ip(), "ports": { "http": backend.port() } });
    vec![
        // The Envoy has no agent that could supply certificates.
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(SYSTEM, "istio"),
            "data": { "mesh": "enableAutoMtls: false\n" } }),
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata(SYSTEM, "edge"),
            "spec": { "externalIPs": ["192.0.2.1"], "selector": { "app": "edge" },
                "ports": [{ "name": "http", "port": port, "targetPort": port }] } }),
        json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "namespace": SYSTEM, "name": "edge", "labels": { "kubernetes.io/service-name": "edge" } },
            "addressType": "IPv4", "ports": [{ "name": "http", "port": port, "protocol": "TCP" }],
            "endpoints": [{ "addresses": ["10.9.0.1"], "conditions": { "ready": true } }] }),
        // The daemon finds the services of a proxy through its pod.
        json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": SYSTEM, "name": "edge-0", "labels": { "app": "edge" } },
            "spec": { "nodeName": "node-0", "containers": [{ "name": "proxy", "image": "envoy:1.0" }] },
            "status": { "phase": "Running", "podIP": "10.9.0.1", "podIPs": [{ "ip": "10.9.0.1" }],
                "conditions": [{ "type": "Ready", "status": "True" }] } }),
        json!({ "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry", "metadata": metadata("app", "web"),
            "spec": { "hosts": ["web.app.test"], "resolution": "STATIC", "endpoints": [endpoint],
                "ports": [{ "name": "http", "number": 80, "protocol": "HTTP" }] } }),
        json!({ "apiVersion": format!("{GROUP}/v1"), "kind": "Gateway", "metadata": metadata(SYSTEM, "edge"),
            "spec": { "gatewayClassName": "istio", "listeners": [listener],
                "addresses": [{ "type": "Hostname", "value": "edge" }] } }),
        route("r0"),
    ]
}

fn host(route: &str) -> String {
    format!("{route}.example.com")
}

fn route(name: &str) -> Value {
    let backend = json!({ "group": "networking.istio.io", "kind": "Hostname", "name": "web.app.test", "port": 80 });
    json!({ "apiVersion": format!("{GROUP}/v1"), "kind": "HTTPRoute",
        "metadata": { "namespace": "app", "name": name },
        "spec": { "parentRefs": [{ "name": "edge", "namespace": SYSTEM }], "hostnames": [host(name)],
            "rules": [{ "matches": [{ "path": { "type": "PathPrefix", "value": "/" } }],
                "backendRefs": [backend] }] } })
}

/// Waits for a condition, with frequent looks.
fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> Result<T, String> {
    let started = wait::now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if started.elapsed() > TIMEOUT {
            return Err(format!("timed out waiting for {what}"));
        }
        std::thread::park_timeout(LOOKS_APART);
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Edge<'_> {
    /// True if a request for a route's host reaches the backend.
    fn serves(&self, route: &str) -> bool {
        http::get(self.address, &host(route), "/").is_ok_and(|answer| answer.application().is_some())
    }

    /// Returns the version of the routes that the twin has received.
    fn version(&self) -> Option<String> {
        let routes = (Type::Route, self.routes.clone());
        let version = |resources: &Resources| resources.get(&routes).map(|found| found.version.clone());
        self.twin.until("the routes", Duration::ZERO, version).ok()
    }

    /// Waits until this many routes are attached.
    fn until_attached(&self, count: usize) -> Result<(), String> {
        let gateway = Reference::new(&format!("{GROUP}/v1"), "Gateway", SYSTEM, "edge");
        wait::until(&format!("{count} attached routes"), TIMEOUT, || {
            let gateway = self.cluster.get(&gateway).ok()??;
            (gateway["status"]["listeners"][0]["attachedRoutes"] == count).then_some(())
        })
    }

    /// Returns the numbers of status writes of Gateways, and of routes that have a status.
    fn writes(&self) -> (usize, usize) {
        let asked = self.cluster.audit(&format!("system:serviceaccount:{SYSTEM}:{ACCOUNT}"));
        let written = asked
            .iter()
            .filter(|request| request.verb == "patch" && request.status == 200);
        let of = |resource: &str| written.clone().filter(|request| request.resource == resource).count();
        (of("gateways/status"), of("httproutes/status"))
    }

    /// Writes the routes of these numbers.
    fn attach(&self, from: usize, to: usize) -> Result<(), String> {
        write(
            self.cluster,
            (from..to).map(|index| route(&format!("r{index}"))).collect(),
        )
    }

    fn few(&self) -> Result<Figures, String> {
        until("the first route", || self.serves("r0").then_some(()))?;
        self.until_attached(1)?;
        let before = self.writes().0;
        self.attach(1, COUNTED - 1)?;
        let last = format!("r{}", COUNTED - 1);
        self.cluster.api.apply(&route(&last))?;
        let applied = wait::now();
        until("the last route", || self.serves(&last).then_some(()))?;
        let served = applied.elapsed();
        self.until_attached(COUNTED)?;
        let counted = applied.elapsed();
        wait::until("the statuses of all routes", TIMEOUT, || {
            (self.writes().1 >= COUNTED).then_some(())
        })?;
        Ok(Figures::from([
            (SERVED, millis(served)),
            (COUNT, millis(counted)),
            (STATUSES, millis(applied.elapsed())),
            (WRITES, (self.writes().0 - before) as u64),
        ]))
    }

    fn many(&self) -> Result<Figures, String> {
        self.attach(COUNTED, ATTACHED)?;
        self.until_attached(ATTACHED)?;
        wait::until("the statuses of all routes", TIMEOUT, || {
            (self.writes().1 >= ATTACHED).then_some(())
        })?;
        let (ends, failed, sent) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
        let load = || {
            while !ends.load(Ordering::Relaxed) {
                let number = sent.fetch_add(1, Ordering::Relaxed);
                if !self.serves(&format!("r{}", number % ATTACHED)) {
                    failed.fetch_add(1, Ordering::Relaxed);
                }
                std::thread::park_timeout(REQUESTS_APART);
            }
        };
        let (received, effective) = std::thread::scope(|scope| {
            let loading = scope.spawn(load);
            let changed = self.single().and_then(|samples| self.burst().map(|()| samples));
            ends.store(true, Ordering::Relaxed);
            loading.join().map_err(|_| "the load panicked".to_owned())?;
            changed
        })?;
        let mut figures = Figures::from([
            (FAILED, failed.into_inner() as u64),
            (REQUESTS, sent.into_inner() as u64),
        ]);
        for (names, mut samples) in [(RECEIVED, received), (EFFECTIVE, effective)] {
            samples.sort_unstable();
            let at = |share: usize| samples[(samples.len() * share).div_ceil(100) - 1];
            figures.extend([(names[0], millis(at(50))), (names[1], millis(at(99)))]);
        }
        Ok(figures)
    }

    /// Adds routes one by one. Returns the two times of each.
    fn single(&self) -> Result<(Vec<Duration>, Vec<Duration>), String> {
        let samples = (0..SINGLE).map(|index| {
            let since = wait::now();
            until("some quiet", || (since.elapsed() > QUIET).then_some(()))?;
            self.one(&format!("n{index}"))
        });
        samples
            .collect::<Result<Vec<_>, _>>()
            .map(|samples| samples.into_iter().unzip())
    }

    /// Adds and removes routes without a pause.
    fn burst(&self) -> Result<(), String> {
        let names: Vec<String> = (0..CHANGES / 2).map(|index| format!("m{index}")).collect();
        write(self.cluster, names.iter().map(|name| route(name)).collect())?;
        for name in &names {
            self.cluster
                .api
                .delete(&Reference::new(&format!("{GROUP}/v1"), "HTTPRoute", "app", name))?;
        }
        self.until_attached(ATTACHED + SINGLE)
    }

    /// Adds a route. Returns the time from the API server's answer to the arrival of the change,
    /// and to the first request that follows the route.
    fn one(&self, name: &str) -> Result<(Duration, Duration), String> {
        let before = self.version();
        self.cluster.api.apply(&route(name))?;
        let applied = wait::now();
        std::thread::scope(|scope| {
            let twin = scope.spawn(|| {
                until("a new version", || (self.version() != before).then_some(()))
                    .map_err(|error| format!("{error}: {}", self.twin.outstanding()))?;
                Ok::<_, String>(applied.elapsed())
            });
            until("the new route", || self.serves(name).then_some(()))?;
            let effect = applied.elapsed();
            let arrival = twin.join().map_err(|_| "the twin panicked".to_owned())??;
            Ok((arrival, effect))
        })
    }
}
