//! Two replicas of one control plane: either of them answers for the proxies of both.

use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::distribution::{Command, REASON, WEB, virtual_service};
use super::status::{SYSTEM, grant, no_request_was_forbidden, trial};
use super::tenant::{TIMEOUT, Tenant};
use crate::support::ads::{AdsClient, Type};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster, Request};
use crate::support::{http, scratch, wait};

/// The proxies of each replica.
const PROXIES: usize = 10;
/// The proxy that refuses the change, which is connected to the second replica.
const REFUSES: usize = 3;
/// Nothing listens on it.
const CLOSED_PORT: u16 = 1;
const NAMES: [&str; 2] = ["istiod-a", "istiod-b"];

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "kube::replicas::any_replica_answers_for_all",
            any_replica_answers_for_all,
        ),
        trial(
            "kube::replicas::a_condition_counts_the_proxies_of_all",
            a_condition_counts_the_proxies_of_all,
        ),
    ]
}

/// Starts a replica with its secure port.
fn replica(tenant: &Tenant, name: &str) -> Result<Daemon, String> {
    Daemon::secured(&tenant.folder.join(format!("{name}.log")), |command| {
        command.arg("--kubeconfig").arg(tenant.cluster.admin_kubeconfig());
        command.args(["-n", &tenant.system]);
        command
            .env("POD_NAME", name)
            .env("ROOT_CA_DIR", tenant.folder.join("none"));
    })
}

/// Returns the slice of one replica. Ports differ, so there is one for each. API servers refuse loopback addresses, but
/// not as names.
fn slice(namespace: &str, name: &str, port: u16) -> Value {
    slice_with(namespace, name, port, &json!({ "ready": true }))
}

fn slice_with(namespace: &str, name: &str, port: u16, conditions: &Value) -> Value {
    json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": { "namespace": namespace, "name": name,
            "labels": { "kubernetes.io/service-name": "istiod" } },
        "addressType": "FQDN",
        "ports": [{ "name": "https-dns", "port": port, "protocol": "TCP" }],
        "endpoints": [{ "addresses": ["127.0.0.1"], "conditions": conditions,
            "targetRef": { "kind": "Pod", "namespace": namespace, "name": name } }] })
}

/// Waits until each replica knows how many there are. Connections from before would close at some time, to reconnect to
/// a replica that was added.
fn until_counted(replicas: [&Daemon; 2]) -> Result<(), String> {
    for replica in replicas {
        replica.process.until_logged(&["ready replicas changed", " now=2"])?;
    }
    Ok(())
}

fn name_of(tenant: &Tenant, number: usize) -> String {
    format!("client-{number}.{}", tenant.app)
}

/// Connects proxies with these numbers, and waits for their configuration.
fn connect(tenant: &Tenant, daemon: &Daemon, numbers: std::ops::Range<usize>) -> Result<Vec<AdsClient>, String> {
    let proxies = numbers.map(|number| {
        let mut node = tenant.sidecar(&json!({ "app": "client" }));
        let name = name_of(tenant, number);
        node.id = format!("sidecar~10.255.0.1~{name}~{}.svc.cluster.local", tenant.app);
        AdsClient::connect(daemon.xds, &node)
    });
    let proxies: Vec<AdsClient> = proxies.collect();
    for proxy in &proxies {
        proxy.first()?;
    }
    Ok(proxies)
}

/// Returns the names of the replicas of a report that did, or did not, answer.
fn names(report: &Value, answered: bool) -> Vec<String> {
    let replicas = report["replicas"].as_array().cloned().unwrap_or_default();
    let replicas = replicas.iter().filter(|replica| replica["answered"] == answered);
    let mut names: Vec<String> = replicas
        .map(|replica| replica["name"].as_str().unwrap_or_default().to_owned())
        .collect();
    names.sort();
    names
}

/// Returns the status of the mesh.
fn overview(daemon: &Daemon, query: &str) -> Result<Value, String> {
    let page = http::get(daemon.monitoring, "istiod", &format!("/debug/status?{query}"))?;
    serde_json::from_str(&page.body).map_err(|error| format!("{error}: {}", page.body))
}

/// Waits until a replica asks another one, which does not answer.
fn until_missing(daemon: &Daemon, expected: &str) -> Result<(), String> {
    wait::until("the missing replica", TIMEOUT, || {
        let last = overview(daemon, "").ok()?;
        (names(&last, false) == [expected]).then_some(())
    })
}

/// Waits until a replica has the answers of exactly these.
fn until_answered(daemon: &Daemon, expected: &[&str]) -> Result<(), String> {
    let mut last = Value::Null;
    let waited = wait::until("the answers of the replicas", TIMEOUT, || {
        last = overview(daemon, "").ok()?;
        (names(&last, true) == expected && names(&last, false).is_empty()).then_some(())
    });
    waited.map_err(|error| format!("{error}: {:#}", last["replicas"]))
}

fn any_replica_answers_for_all(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    tenant.apply(WEB)?;
    tenant.apply(&virtual_service("10s"))?;
    let (first, second) = (replica(&tenant, NAMES[0])?, replica(&tenant, NAMES[1])?);
    let slices = [
        slice(&tenant.system, NAMES[0], first.secure),
        slice(&tenant.system, NAMES[1], second.secure),
    ];
    for slice in &slices {
        tenant.cluster.api.apply(slice)?;
    }
    until_counted([&first, &second])?;
    let of_first = connect(&tenant, &first, 0..PROXIES)?;
    let of_second = connect(&tenant, &second, PROXIES..2 * PROXIES)?;
    let object = format!("vs/awaited.{}", tenant.app);
    let wait = [object.as_str(), "--wait", "--timeout", "20s"];
    for daemon in [&first, &second] {
        until_answered(daemon, &NAMES)?;
        let (code, report) = Command::start(&tenant, daemon, "first", &wait).end()?;
        assert_eq!(
            (code, &report["state"]),
            (Some(0), &json!("Acknowledged")),
            "{report:#}"
        );
        assert_eq!(report["counts"]["acknowledged"], 2 * PROXIES, "{report:#}");
        assert_eq!(names(&report, true), NAMES, "{report:#}");
        // The sum is of both, and each replica knows only its own.
        let alone = overview(daemon, "scope=replica")?;
        assert_eq!(alone["counts"]["proxies"], PROXIES, "{alone:#}");
        let all = overview(daemon, "")?;
        assert_eq!(all["counts"]["proxies"], 2 * PROXIES, "{all:#}");
    }

    // A proxy of one replica refuses a change, and the other replica is asked.
    of_second[REFUSES].refuse(Type::Route, REASON);
    tenant.apply(&virtual_service("11s"))?;
    let (code, report) = Command::start(&tenant, &first, "second", &wait).end()?;
    assert_eq!((code, &report["state"]), (Some(1), &json!("Refused")), "{report:#}");
    let counts = &report["counts"];
    assert_eq!(counts["acknowledged"], 2 * PROXIES - 1, "{counts}");
    assert_eq!(counts["refused"], 1, "{counts}");
    let refused = &report["proxies"][0];
    assert_eq!(refused["proxy"], name_of(&tenant, PROXIES + REFUSES), "{refused:#}");
    assert_eq!(refused["replica"], NAMES[1], "{refused:#}");
    let resources = refused["resources"].as_array().cloned().unwrap_or_default();
    let resource = resources.iter().find(|resource| resource["state"] == "Refused");
    let resource = resource.ok_or("nothing refused")?;
    assert_eq!(resource["reason"], REASON, "{resource:#}");
    assert_eq!(resource["blamed"][0]["name"], "awaited", "{resource:#}");

    // Without one replica, the state of its proxies is unknown, not good.
    drop(of_second);
    second.process.kill();
    let (code, report) = Command::start(&tenant, &first, "third", &[&object]).end()?;
    assert_eq!((code, &report["state"]), (Some(1), &json!("Incomplete")), "{report:#}");
    assert_eq!(
        (names(&report, true), names(&report, false)),
        (vec![NAMES[0].to_owned()], vec![NAMES[1].to_owned()])
    );
    assert_eq!(report["counts"]["acknowledged"], PROXIES, "{report:#}");
    let metrics = http::get(first.monitoring, "istiod", "/metrics")?.body;
    assert!(
        metrics.contains("istiod_replica_queries_total{result=\"closed\"}"),
        "{metrics}"
    );

    // A query that waits ends when the replica is no longer one, and its proxies have reconnected.
    let waiting = Command::start(&tenant, &first, "fourth", &[&object, "--wait", "--timeout", "60s"]);
    let moved = connect(&tenant, &first, PROXIES..2 * PROXIES)?;
    tenant.cluster.api.delete(&Reference::of(&slices[1]))?;
    let (code, report) = waiting.end()?;
    assert_eq!(
        (code, &report["state"]),
        (Some(0), &json!("Acknowledged")),
        "{report:#}"
    );
    assert_eq!(names(&report, true), [NAMES[0]], "{report:#}");
    wait::until("all proxies at one replica", Duration::from_secs(20), || {
        let all = overview(&first, "").ok()?;
        (all["counts"]["proxies"] == 2 * PROXIES).then_some(())
    })?;
    drop((of_first, moved));
    Ok(())
}

/// Returns a sidecar in `shop`.
fn sidecar(name: &str) -> Node {
    Node {
        id: format!("sidecar~10.255.0.1~{name}.shop~shop.svc.cluster.local"),
        metadata: json!({ "NAMESPACE": "shop", "SERVICE_ACCOUNT": "client", "CLUSTER_ID": "Kubernetes",
            "ISTIO_VERSION": "1.30.3", "INSTANCE_IPS": "10.255.0.1", "LABELS": { "app": "client" } }),
    }
}

/// Returns the condition of an object about its last generation.
fn condition(cluster: &Cluster, kind: &str, name: &str) -> Option<Value> {
    let reference = Reference::new("networking.istio.io/v1", kind, "shop", name);
    let object = cluster.get(&reference).ok()??;
    let conditions = object["status"]["conditions"].as_array()?;
    let condition = conditions.iter().find(|condition| condition["type"] == "Reconciled")?;
    (condition["observedGeneration"] == object["metadata"]["generation"]).then(|| condition.clone())
}

/// Waits for a condition with this status, reason and message.
fn until_condition(cluster: &Cluster, kind: &str, name: &str, expected: [&str; 3]) -> Result<(), String> {
    let mut last = None;
    let waited = wait::until(&format!("{kind} {name}: {expected:?}"), TIMEOUT, || {
        last = condition(cluster, kind, name);
        let found = last.as_ref()?;
        ["status", "reason", "message"]
            .iter()
            .zip(expected)
            .all(|(field, expected)| found[*field] == expected)
            .then_some(())
    });
    waited.map_err(|error| format!("{error}: {last:?}"))
}

fn a_condition_counts_the_proxies_of_all(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    let folder = scratch(&format!("{name}-logs"));
    for namespace in [SYSTEM, "shop"] {
        cluster.namespace(namespace, &json!({}))?;
    }
    let kubeconfig = grant(&cluster, &folder, &["env.PILOT_ENABLE_STATUS=true"])?;
    let start = |name: &str| {
        Daemon::secured(&folder.join(format!("{name}.log")), |command| {
            command.arg("--kubeconfig").arg(&kubeconfig).args(["-n", SYSTEM]);
            command.env("POD_NAME", name).env("ROOT_CA_DIR", folder.join("none"));
            command.env("PILOT_ENABLE_STATUS", "true");
        })
    };
    let in_shop = |text: &str| text.replace("{app}", "shop").replace("{n}", "1");
    cluster.api.apply_all(&in_shop(WEB))?;
    let first = start(NAMES[0])?;
    let lock = Reference::new("coordination.k8s.io/v1", "Lease", SYSTEM, "istio-distribution-leader");
    wait::until("the leader", TIMEOUT, || {
        let lock = cluster.get(&lock).ok()??;
        (lock["spec"]["holderIdentity"] == NAMES[0]).then_some(())
    })?;
    let second = start(NAMES[1])?;
    let slices = [
        slice(SYSTEM, NAMES[0], first.secure),
        slice(SYSTEM, NAMES[1], second.secure),
    ];
    for slice in &slices {
        cluster.api.apply(slice)?;
    }
    until_answered(&first, &NAMES)?;
    until_answered(&second, &NAMES)?;
    until_counted([&first, &second])?;
    let connect = |daemon: &Daemon, names: [&str; 2]| {
        let proxies = names.map(|name| AdsClient::connect(daemon.xds, &sidecar(name)));
        for proxy in &proxies {
            proxy.first()?;
        }
        Ok::<_, String>(proxies)
    };
    let of_first = connect(&first, ["a-0", "a-1"])?;
    let of_second = connect(&second, ["b-0", "b-1"])?;

    cluster.api.apply_all(&in_shop(&virtual_service("10s")))?;
    let arrived = ["True", "Acknowledged", "4/4 proxies up to date."];
    until_condition(&cluster, "VirtualService", "awaited", arrived)?;

    // The proxies of a replica that does not answer are unknown, until it is no longer one.
    // One that is not ready does not count as added.
    let terminating = json!({ "ready": false, "serving": true, "terminating": true });
    let closed = slice_with(SYSTEM, "istiod-c", CLOSED_PORT, &terminating);
    cluster.api.apply(&closed)?;
    until_missing(&first, "istiod-c")?;
    cluster.api.apply_all(&in_shop(&virtual_service("20s")))?;
    let message = "4/4 proxies up to date. Replicas of istiod that did not answer: 1.";
    let incomplete = ["Unknown", "Incomplete", message];
    until_condition(&cluster, "VirtualService", "awaited", incomplete)?;
    cluster.api.delete(&Reference::of(&closed))?;
    until_condition(&cluster, "VirtualService", "awaited", arrived)?;

    of_second[0].refuse(Type::Route, REASON);
    cluster.api.apply_all(&in_shop(&virtual_service("11s")))?;
    let refused = ["False", "Refused", "3/4 proxies up to date. 1 refused it."];
    until_condition(&cluster, "VirtualService", "awaited", refused)?;

    // Another object changes. The object is followed again, and nothing is written that its status says already.
    let writes_of = |name: &'static str| {
        let account = format!("system:serviceaccount:{SYSTEM}:istiod");
        let is_write = move |request: &Request| {
            request.verb == "patch" && request.resource.ends_with("/status") && request.name == name
        };
        let writes = cluster.audited(&account, 1, is_write)?;
        Ok::<_, String>(writes.len())
    };
    let unused = json!({ "apiVersion": "networking.istio.io/v1", "kind": "Sidecar",
        "metadata": { "namespace": "shop", "name": "unused" },
        "spec": { "workloadSelector": { "labels": { "app": "nothing" } }, "egress": [{ "hosts": ["./*"] }] } });
    cluster.api.apply(&unused)?;
    let none = ["True", "Unused", "0/0 proxies up to date."];
    until_condition(&cluster, "Sidecar", "unused", none)?;
    writes_of("unused")?;
    let before = writes_of("awaited")?;

    // The other replica becomes the leader, and counts its own proxies, which are all.
    drop(of_first);
    cluster.api.delete(&Reference::of(&slices[0]))?;
    first.process.terminate();
    first.process.end_of(TIMEOUT)?;
    assert_eq!(writes_of("awaited")?, before);
    cluster.api.apply_all(&in_shop(&virtual_service("12s")))?;
    let refused = ["False", "Refused", "1/2 proxies up to date. 1 refused it."];
    until_condition(&cluster, "VirtualService", "awaited", refused).map_err(|error| {
        let ended = of_second.each_ref().map(AdsClient::ended);
        format!("{error}; ends of connections: {ended:?}")
    })?;

    // Without the proxy that refuses it, the next push shows the object as acknowledged.
    let [refusing, _accepting] = of_second;
    drop(refusing);
    wait::until("one proxy", TIMEOUT, || {
        let all = overview(&second, "").ok()?;
        (all["counts"]["proxies"] == 1).then_some(())
    })?;
    cluster.api.delete(&Reference::of(&unused))?;
    let arrived = ["True", "Acknowledged", "1/1 proxies up to date."];
    until_condition(&cluster, "VirtualService", "awaited", arrived)?;
    no_request_was_forbidden(&cluster)?;
    Ok(())
}
