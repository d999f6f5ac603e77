//! The time from the daemon's start to readiness, and its memory, with a large mesh in a real API server and no
//! proxies; and HTTPRoutes of one Gateway, with a proxy.
//!
//! `kubernetes` prints a table with the figures and those in `benches/figures.json`; `--keep` writes them there.
//! `start` and `routes` measure one of the two.

mod routes;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support;

use support::daemon::Daemon;
use support::figures;
use support::kubernetes::{self, Cluster};
use support::wait;

const SERVICES: usize = 1_000;
const ENDPOINTS: usize = 5;
const NAMESPACES: usize = 50;
/// Number of starts of each figure, which is their median.
const STARTS: usize = 5;
/// Number of parallel requests while the mesh is written.
const WRITERS: usize = 8;

/// The cost of one start, by the name of the figure.
type Figures = BTreeMap<&'static str, u64>;

/// The parts of the bench.
const PARTS: [&str; 2] = ["start", "routes"];

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let is_given = |name: &str| arguments.iter().any(|argument| argument == name);
    let is_whole = !PARTS.into_iter().any(is_given);
    let [start, routes] = PARTS.map(|part| is_whole || is_given(part));
    if !kubernetes::is_installed() {
        return Err("the Kubernetes API server is missing; `make tools` installs it".into());
    }
    let mut measured = BTreeMap::new();
    if start {
        measured.extend(starts()?);
    }
    if routes {
        measured.extend(routes::measure()?);
    }
    report(&measured, is_given("--keep"))
}

fn starts() -> Result<BTreeMap<&'static str, Figures>, String> {
    let cluster = Cluster::start("bench/kubernetes/cluster")?;
    let folder = support::scratch("bench/kubernetes/work");
    let kubeconfig = cluster.admin_kubeconfig();
    let namespaces = (0..NAMESPACES).map(|index| named("v1", "Namespace", None, &format!("ns-{index}"), &json!({})));
    write(&cluster, namespaces.collect())?;
    write(&cluster, (0..SERVICES).flat_map(service).collect())?;
    let mut measured = BTreeMap::from([("services, endpoints, routing", median(&kubeconfig, &folder)?)]);
    write(&cluster, (0..SERVICES).flat_map(pods).collect())?;
    measured.insert("with a pod for each endpoint", median(&kubeconfig, &folder)?);
    Ok(measured)
}

fn named(api_version: &str, kind: &str, namespace: Option<usize>, name: &str, rest: &Value) -> Value {
    let mut object = json!({ "apiVersion": api_version, "kind": kind, "metadata": { "name": name } });
    if let Some(index) = namespace {
        object["metadata"]["namespace"] = json!(format!("ns-{}", index % NAMESPACES));
    }
    let fields = rest.as_object().cloned().unwrap_or_default();
    object
        .as_object_mut()
        .into_iter()
        .for_each(|object| object.extend(fields.clone()));
    object
}

fn address(service: usize, endpoint: usize) -> String {
    let number = service * ENDPOINTS + endpoint;
    format!("10.{}.{}.{}", 64 + (number >> 16), (number >> 8) & 255, number & 255)
}

/// A service with its endpoints, a VirtualService and a DestinationRule.
fn service(index: usize) -> Vec<Value> {
    let name = format!("svc-{index}");
    let target = |endpoint: usize| {
        json!({ "kind": "Pod", "namespace": format!("ns-{}", index % NAMESPACES),
            "name": format!("{name}-{endpoint}") })
    };
    let endpoints: Vec<Value> = (0..ENDPOINTS)
        .map(|endpoint| {
            json!({ "addresses": [address(index, endpoint)], "targetRef": target(endpoint),
            "conditions": { "ready": true, "serving": true, "terminating": false } })
        })
        .collect();
    let mut slice = named(
        "discovery.k8s.io/v1",
        "EndpointSlice",
        Some(index),
        &format!("{name}-0"),
        &json!({
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{ "name": "http", "port": 8080, "protocol": "TCP" },
            { "name": "tcp", "port": 9090, "protocol": "TCP" }] }),
    );
    slice["metadata"]["labels"] = json!({ "kubernetes.io/service-name": name, "app": name });
    let to = |subset: &str, weight: u32| json!({ "destination": { "host": name, "subset": subset }, "weight": weight });
    let subset = |version: &str| json!({ "name": version, "labels": { "version": version } });
    vec![
        named(
            "v1",
            "Service",
            Some(index),
            &name,
            &json!({ "spec": { "selector": { "app": name }, "ports": [
            { "name": "http", "port": 80, "targetPort": 8080 }, { "name": "tcp", "port": 90, "targetPort": 9090 }] } }),
        ),
        slice,
        named(
            "networking.istio.io/v1",
            "VirtualService",
            Some(index),
            &name,
            &json!({ "spec": { "hosts": [name], "http": [
            { "match": [{ "uri": { "prefix": "/v1/" } }], "timeout": "5s", "route": [to("v1", 100)] },
            { "route": [to("v1", 80), to("v2", 20)], "retries": { "attempts": 3, "perTryTimeout": "1s" } }] } }),
        ),
        named(
            "networking.istio.io/v1",
            "DestinationRule",
            Some(index),
            &name,
            &json!({ "spec": { "host": name,
            "subsets": [subset("v1"), subset("v2")],
            "trafficPolicy": { "connectionPool": { "http": { "http1MaxPendingRequests": 1000 } },
                "outlierDetection": { "consecutive5xxErrors": 5 } } } }),
        ),
    ]
}

/// The pods of a service's endpoints, about as large as real ones.
fn pods(index: usize) -> Vec<Value> {
    let name = format!("svc-{index}");
    (0..ENDPOINTS)
        .map(|endpoint| {
            let ip = address(index, endpoint);
            let variables: Vec<Value> = (0..20)
                .map(|number| json!({ "name": format!("VARIABLE_{number}"), "value": "a value of some length" }))
                .collect();
            let container = |name: &str| {
                json!({ "name": name, "image": format!("registry.example.com/{name}:1.0"), "env": variables,
                "ports": [{ "name": "http", "containerPort": 8080 }, { "name": "tcp", "containerPort": 9090 }] })
            };
            let mut pod = named(
                "v1",
                "Pod",
                Some(index),
                &format!("{name}-{endpoint}"),
                &json!({
                "spec": { "serviceAccountName": name, "nodeName": format!("node-{}", endpoint % 20),
                    "containers": [container("app"), container("istio-proxy")] },
                "status": { "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }],
                    "conditions": [{ "type": "Ready", "status": "True" }] } }),
            );
            pod["metadata"]["labels"] = json!({ "app": name, "version": format!("v{}", 1 + endpoint % 2),
                "security.istio.io/tlsMode": "istio", "pod-template-hash": "5d9b7c8f6" });
            pod
        })
        .collect()
}

fn write(cluster: &Cluster, objects: Vec<Value>) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let one_of = || {
        while let Some(object) = objects.get(next.fetch_add(1, Ordering::Relaxed)) {
            cluster.api.apply(object)?;
        }
        Ok::<_, String>(())
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(one_of)).collect();
        writers
            .into_iter()
            .try_for_each(|writer| writer.join().unwrap_or_else(|_| Err("a writer panicked".into())))
    })
}

fn median(kubeconfig: &Path, folder: &Path) -> Result<Figures, String> {
    let starts: Vec<Figures> = (0..STARTS)
        .map(|_| start(kubeconfig, folder))
        .collect::<Result<_, _>>()?;
    let middle = |name: &&'static str| {
        let mut values: Vec<u64> = starts.iter().map(|figures| figures[*name]).collect();
        values.sort_unstable();
        (*name, values[values.len() / 2])
    };
    Ok(starts[0].keys().collect::<Vec<_>>().into_iter().map(middle).collect())
}

const READY: &str = "ms to ready";
const RESIDENT: &str = "KiB resident when ready";
const LATER: &str = "KiB resident later";
const HIGHEST: &str = "KiB resident peak";

fn start(kubeconfig: &Path, folder: &Path) -> Result<Figures, String> {
    let started_at = wait::now();
    let daemon = Daemon::start_unready(kubeconfig, "istio-system", &folder.join("istiod.log"), |_| {});
    daemon.until_ready()?;
    let ready = started_at.elapsed();
    let resident = memory(&daemon, "VmRSS")?;
    // Allocators return unused memory after a delay.
    let settled = wait::now();
    wait::until("some quiet", Duration::from_secs(10), || {
        (settled.elapsed() > Duration::from_secs(3)).then_some(())
    })?;
    Ok(Figures::from([
        (READY, u64::try_from(ready.as_millis()).unwrap_or(u64::MAX)),
        (RESIDENT, resident),
        (LATER, memory(&daemon, "VmRSS")?),
        (HIGHEST, memory(&daemon, "VmHWM")?),
    ]))
}

/// A line of a process's status in KiB, such as `VmRSS`.
fn memory(daemon: &Daemon, name: &str) -> Result<u64, String> {
    let path = format!("/proc/{}/status", daemon.process.id);
    let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.trim().split(' ').next()?.parse().ok());
    number.ok_or_else(|| format!("no {name} in {status}"))
}

fn report(measured: &BTreeMap<&'static str, Figures>, keep: bool) -> Result<(), String> {
    let kept = figures::kept("kubernetes");
    println!(
        "{SERVICES} services with a VirtualService and a DestinationRule each, {} endpoints, no proxies",
        SERVICES * ENDPOINTS
    );
    println!(
        "on {}; kept figures are from {}\n",
        figures::machine(),
        figures::kept_on("kubernetes")
    );
    println!(
        "{:<36} {:<46} {:>10} {:>10} {:>6} {:>6}",
        "mesh", "figure", "now", "kept", "ratio", "goal"
    );
    for (mesh, figures) in measured {
        for (figure, value) in figures {
            let before = kept[mesh][figure].as_u64();
            let ratio = before.map_or("-".to_owned(), |before| format!("{:.2}", *value as f64 / before as f64));
            let before = before.map_or("-".to_owned(), |before| before.to_string());
            let goal = routes::goal(figure).map_or("-".to_owned(), |goal| format!("{goal:.0}"));
            println!("{mesh:<36} {figure:<46} {value:>10} {before:>10} {ratio:>6} {goal:>6}");
        }
    }
    let seen = measured.iter().flat_map(|(mesh, figures)| {
        let figure = |(name, value): (&&'static str, &u64)| figures::Figure {
            goal: routes::goal(name),
            ..figures::Figure::new(*mesh, *name, *value as f64)
        };
        figures.iter().map(figure)
    });
    let seen: Vec<figures::Figure> = seen.collect();
    figures::seen("kubernetes", &seen)?;
    if keep {
        figures::keep_seen("kubernetes", &seen)?;
    }
    Ok(())
}
