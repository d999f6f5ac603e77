//! Objects that the control plane writes: locks, root certificates, addresses, WorkloadEntries. Each test has its own
//! cluster, because writes affect all namespaces.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::ads::AdsClient;
use crate::support::authority::Authority;
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::missing;
use crate::support::wait;
use crate::support::{helm, http};

pub(super) const SYSTEM: &str = "istio-system";
/// Longer than a released lock stays free: attempts are 7.5 s apart.
const TIMEOUT: Duration = Duration::from_mins(1);

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial("kube::status::only_the_leader_writes", only_the_leader_writes),
        trial("kube::status::vms_register", vms_register),
    ]
}

/// A test whose daemons have the rights granted by the chart, which Helm renders.
pub(super) fn trial(name: &str, run: fn(&str) -> Result<(), Failed>) -> Trial {
    let name_of_folder = name.replace("::", "/");
    Trial::ignorable_test(name, move || {
        if !kubernetes::is_installed() || !helm::is_installed() {
            return missing("the Kubernetes API server or Helm is missing; `make tools` installs them");
        }
        run(&name_of_folder).map(|()| Completion::Completed)
    })
}

fn root_reference(namespace: &str) -> Reference {
    Reference::new("v1", "ConfigMap", namespace, "istio-ca-root-cert")
}

/// Waits until a namespace has exactly these root certificates.
fn until_root(cluster: &Cluster, namespace: &str, roots: &str) -> Result<(), String> {
    wait::until(&format!("the roots in {namespace}"), TIMEOUT, || {
        let found = cluster.get(&root_reference(namespace)).ok()??;
        let right = found["data"]["root-cert.pem"] == roots && found["metadata"]["labels"]["istio.io/config"] == "true";
        right.then_some(())
    })
}

/// The roles and bindings of the chart.
const GRANTS: [&str; 5] = [
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ServiceAccount",
];
/// The service account of the chart's pods.
const ACCOUNT: &str = "istiod";

/// Writes the kubeconfig of an account with the rights that the chart grants with these values.
pub(super) fn grant(cluster: &Cluster, folder: &Path, values: &[&str]) -> Result<PathBuf, String> {
    for object in helm::objects("istiod", values)? {
        if object["kind"].as_str().is_some_and(|kind| GRANTS.contains(&kind)) {
            cluster.api.apply(&object)?;
        }
    }
    let kubeconfig = folder.join("kubeconfig");
    cluster.account_kubeconfig(SYSTEM, ACCOUNT, &kubeconfig)?;
    Ok(kubeconfig)
}

/// Fails if a request was forbidden.
pub(super) fn no_request_was_forbidden(cluster: &Cluster) -> Result<(), String> {
    let asked = cluster.audit(&format!("system:serviceaccount:{SYSTEM}:{ACCOUNT}"));
    assert!(!asked.is_empty(), "the daemons must use this account");
    let forbidden: Vec<_> = asked.into_iter().filter(|request| request.status == 403).collect();
    if forbidden.is_empty() {
        return Ok(());
    }
    Err(format!("rights missing in the chart: {forbidden:?}"))
}

pub(super) fn start(
    kubeconfig: &Path,
    folder: &Path,
    name: &str,
    variables: &[(&str, &str)],
) -> Result<Daemon, String> {
    let log = folder.join(format!("{name}.log"));
    Daemon::in_kubernetes(kubeconfig, SYSTEM, &log, |command| {
        command.env("POD_NAME", name);
        command.envs(variables.iter().copied());
    })
}

fn holder(cluster: &Cluster, lock: &str) -> Option<String> {
    let lock = cluster.get(&Reference::new("v1", "ConfigMap", SYSTEM, lock)).ok()??;
    let record = lock["metadata"]["annotations"]["control-plane.alpha.kubernetes.io/leader"].as_str()?;
    let record: Value = serde_json::from_str(record).ok()?;
    let holder = record["holderIdentity"].as_str()?.to_owned();
    (!holder.is_empty()).then_some(holder)
}

fn only_the_leader_writes(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    let folder = crate::support::scratch(&format!("{name}-logs"));
    for namespace in [SYSTEM, "before"] {
        cluster.namespace(namespace, &json!({}))?;
    }
    let (first, second) = (Authority::new("first"), Authority::new("second"));
    cluster.api.apply(&first.secret(SYSTEM, None))?;
    let all = [
        ("ISTIO_MULTIROOT_MESH", "true"),
        ("PILOT_ENABLE_ANALYSIS", "true"),
        ("PILOT_ANALYSIS_INTERVAL", "100ms"),
        ("ENABLE_MCS_AUTO_EXPORT", "true"),
        ("PILOT_ENABLE_NODE_UNTAINT_CONTROLLERS", "true"),
    ];
    cluster.api.apply(&service_exports())?;
    let values = [
        "global.istiod.enableAnalysis=true",
        "env.ENABLE_MCS_AUTO_EXPORT=true",
        "taint.enabled=true",
    ];
    let kubeconfig = grant(&cluster, &folder, &values)?;
    let mut daemons = vec![
        ("istiod-a", start(&kubeconfig, &folder, "istiod-a", &all)?),
        ("istiod-b", start(&kubeconfig, &folder, "istiod-b", &all)?),
    ];
    let roots = roots_are_in_all_namespaces(&cluster, &first, &second)?;
    addresses_are_assigned(&cluster)?;
    findings_are_in_the_status(&cluster)?;
    services_are_exported(&cluster)?;
    taints_are_removed(&cluster)?;
    let lock = "istio-namespace-controller-election";
    let leads = wait::until("a leader", TIMEOUT, || holder(&cluster, lock))?;
    let index = daemons
        .iter()
        .position(|(name, _)| *name == leads)
        .ok_or("an unknown leader")?;
    let (_, leader) = daemons.remove(index);
    leader.process.terminate();
    leader.process.end_of(TIMEOUT)?;
    let left = daemons[0].0;
    wait::until("another leader", TIMEOUT, || {
        (holder(&cluster, lock).as_deref() == Some(left)).then_some(())
    })?;
    cluster.namespace("after", &json!({}))?;
    until_root(&cluster, "after", &roots)?;
    wait::until("another leader of analysis", TIMEOUT, || {
        (holder(&cluster, "istio-analyze-leader").as_deref() == Some(left)).then_some(())
    })?;
    let late = route("late", "nowhere.example.com");
    cluster.api.apply(&late)?;
    until_codes(&cluster, &late, &["IST0101", "IST0101", "IST0132"])?;
    no_request_was_forbidden(&cluster)?;
    Ok(())
}

/// Returns the roots that all namespaces have in the end.
fn roots_are_in_all_namespaces(cluster: &Cluster, first: &Authority, second: &Authority) -> Result<String, String> {
    let root = first.root();
    until_root(cluster, "before", &root)?;
    cluster.namespace("later", &json!({}))?;
    until_root(cluster, "later", &root)?;
    cluster.api.delete(&root_reference("later"))?;
    until_root(cluster, "later", &root)?;
    cluster.api.patch(
        &root_reference("later"),
        &json!({ "data": { "root-cert.pem": "spoilt" } }),
    )?;
    until_root(cluster, "later", &root)?;
    // An additional root is trusted without a restart.
    let roots = root + &second.root();
    let mut secret = first.secret(SYSTEM, None);
    secret["data"]["root-cert.pem"] = BASE64_STANDARD.encode(&roots).into();
    cluster.api.apply(&secret)?;
    for namespace in ["before", "later", "kube-system"] {
        until_root(cluster, namespace, &roots)?;
    }
    let public = cluster.get(&root_reference("kube-public"))?;
    public.map_or(Ok(roots), |_| Err("kube-public must get the roots".to_owned()))
}

fn service_entry(name: &str, hosts: &[&str]) -> Value {
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "namespace": "before", "name": name },
        "spec": { "hosts": hosts, "resolution": "DNS", "location": "MESH_EXTERNAL",
            "ports": [{ "number": 80, "name": "http", "protocol": "HTTP" }] } })
}

/// Waits until every host of the entry has its two addresses, and returns them.
fn until_addresses(cluster: &Cluster, entry: &Value) -> Result<Vec<(String, String)>, String> {
    let hosts = entry["spec"]["hosts"].as_array().map_or(0, Vec::len);
    wait::until("addresses of a ServiceEntry", TIMEOUT, || {
        let found = cluster.get(&Reference::of(entry)).ok()??;
        let addresses = found["status"]["addresses"].as_array()?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let pairs: Vec<_> = addresses
            .iter()
            .map(|address| (text(&address["host"]), text(&address["value"])))
            .collect();
        (pairs.len() == 2 * hosts).then_some(pairs)
    })
}

fn addresses_are_assigned(cluster: &Cluster) -> Result<(), String> {
    let one = service_entry("one", &["one.example.com"]);
    cluster.api.apply(&one)?;
    let given = until_addresses(cluster, &one)?;
    let pair = |host: &str, address: &str| (host.to_owned(), address.to_owned());
    assert_eq!(
        given,
        [
            pair("one.example.com", "240.240.0.1"),
            pair("one.example.com", "2001:2::1")
        ]
    );
    let more = service_entry("one", &["one.example.com", "two.example.com"]);
    cluster.api.apply(&more)?;
    let given = until_addresses(cluster, &more)?;
    assert_eq!(
        given[0],
        pair("one.example.com", "240.240.0.1"),
        "a host must keep its addresses"
    );
    assert_eq!(given[2], pair("two.example.com", "240.240.0.2"));
    let mut own = service_entry("one", &["one.example.com"]);
    own["spec"]["addresses"] = json!(["10.9.8.7"]);
    cluster.api.apply(&own)?;
    wait::until("a status without addresses", TIMEOUT, || {
        let found = cluster.get(&Reference::of(&own)).ok()??;
        (found["status"]["addresses"] == json!([])).then_some(())
    })
}

fn route(name: &str, host: &str) -> Value {
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": { "namespace": "before", "name": name },
        "spec": { "hosts": ["one.example.com"], "gateways": [format!("{SYSTEM}/{name}")],
            "http": [{ "route": [{ "destination": { "host": host } }] }] } })
}

/// Waits until the status of an object has messages with these codes, and returns its resource version.
fn until_codes(cluster: &Cluster, object: &Value, codes: &[&str]) -> Result<Value, String> {
    wait::until(&format!("status messages {codes:?}"), TIMEOUT, || {
        let found = cluster.get(&Reference::of(object)).ok()??;
        let messages = found["status"]["validationMessages"].as_array();
        let messages = messages.map(Vec::as_slice).unwrap_or_default();
        let found_codes: Vec<_> = messages.iter().map(|message| message["type"]["code"].clone()).collect();
        let is_current = codes.is_empty() || found["status"]["observedGeneration"] == found["metadata"]["generation"];
        (found_codes == codes && is_current).then(|| found["metadata"]["resourceVersion"].clone())
    })
}

/// Messages of several analyzers are written once, follow the object, and are removed when they are resolved.
fn findings_are_in_the_status(cluster: &Cluster) -> Result<(), String> {
    let gateway = |name: &str| {
        json!({ "apiVersion": "networking.istio.io/v1", "kind": "Gateway",
            "metadata": { "namespace": SYSTEM, "name": name },
            "spec": { "selector": { "istio": "absent" }, "servers": [{ "hosts": ["*"],
                "port": { "number": 80, "name": "http", "protocol": "HTTP" } }] } })
    };
    let policy = json!({ "apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy",
        "metadata": { "namespace": "before", "name": "none" },
        "spec": { "selector": { "matchLabels": { "app": "absent" } }, "rules": [{}] } });
    cluster.api.apply(&gateway("rule"))?;
    cluster.api.apply(&policy)?;
    let astray = route("rule", "nowhere.example.com");
    cluster.api.apply(&astray)?;
    until_codes(cluster, &gateway("rule"), &["IST0101"])?;
    let written = until_codes(cluster, &policy, &["IST0127"])?;
    until_codes(cluster, &astray, &["IST0101"])?;
    // Of another generation, with a second message.
    let mut twice = astray.clone();
    twice["spec"]["gateways"] = json!(["absent"]);
    cluster.api.apply(&twice)?;
    until_codes(cluster, &twice, &["IST0101", "IST0101", "IST0132"])?;
    cluster.api.apply(&route("rule", "one.example.com"))?;
    until_codes(cluster, &astray, &[])?;
    let policy = cluster
        .get(&Reference::of(&policy))?
        .ok_or("the policy does not exist")?;
    assert_eq!(
        policy["metadata"]["resourceVersion"], written,
        "a status with the same messages must not be written"
    );
    Ok(())
}

/// The CRD of ServiceExport, which istiod does not install.
fn service_exports() -> Value {
    let schema = json!({ "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } });
    json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "serviceexports.multicluster.x-k8s.io",
            "annotations": { "api-approved.kubernetes.io": "https://github.com/kubernetes/enhancements" } },
        "spec": { "group": "multicluster.x-k8s.io", "scope": "Namespaced",
            "names": { "kind": "ServiceExport", "plural": "serviceexports", "singular": "serviceexport" },
            "versions": [{ "name": "v1alpha1", "served": true, "storage": true, "schema": schema }] } })
}

fn services_are_exported(cluster: &Cluster) -> Result<(), String> {
    let service = |namespace: &str| {
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": namespace, "name": "web" },
            "spec": { "ports": [{ "name": "http", "port": 80 }] } })
    };
    cluster.api.apply(&service("kube-system"))?;
    let owner = cluster.api.apply(&service("before"))?;
    let export = |namespace: &str| Reference::new("multicluster.x-k8s.io/v1alpha1", "ServiceExport", namespace, "web");
    let exported = wait::until("a ServiceExport", TIMEOUT, || cluster.get(&export("before")).ok()?)?;
    let uid = &exported["metadata"]["ownerReferences"][0]["uid"];
    assert_eq!(*uid, owner["metadata"]["uid"]);
    assert!(
        cluster.get(&export("kube-system"))?.is_none(),
        "cluster-local services must not be exported"
    );
    Ok(())
}

/// A node loses the taint when its CNI pod becomes ready, and keeps other taints.
fn taints_are_removed(cluster: &Cluster) -> Result<(), String> {
    let taint = |key: &str| json!({ "key": key, "effect": "NoSchedule" });
    let node = |name: &str| {
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name },
            "spec": { "taints": [taint("other"), taint("cni.istio.io/not-ready")] } })
    };
    let pod = |node: &str, ready: &str| {
        json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": SYSTEM, "name": node, "labels": { "k8s-app": "istio-cni-node" } },
            "spec": { "nodeName": node, "containers": [{ "name": "install-cni", "image": "unused" }],
                "tolerations": [{ "operator": "Exists" }] },
            "status": { "conditions": [{ "type": "Ready", "status": ready }] } })
    };
    let keys = |name: &str| -> Option<Vec<Value>> {
        let found = cluster.get(&Reference::of(&node(name))).ok()??;
        let taints = found["spec"]["taints"].as_array()?.iter();
        Some(taints.map(|taint| taint["key"].clone()).collect())
    };
    for (name, ready) in [("n1", "True"), ("n2", "False")] {
        cluster.api.apply(&node(name))?;
        cluster.api.apply(&pod(name, ready))?;
    }
    let until_untainted = |name: &str| {
        wait::until(&format!("the removal of the taint of {name}"), TIMEOUT, || {
            (!keys(name)?.contains(&json!("cni.istio.io/not-ready"))).then_some(())
        })
    };
    until_untainted("n1")?;
    assert!(keys("n1").is_some_and(|keys| keys.contains(&json!("other"))));
    let tainted = keys("n2").unwrap_or_default();
    assert!(
        tainted.contains(&json!("cni.istio.io/not-ready")),
        "its pod is not ready"
    );
    cluster.api.apply(&pod("n2", "True"))?;
    until_untainted("n2")
}

fn machine(address: &str) -> Node {
    Node {
        id: format!("sidecar~{address}~vm-1.vms~vms.svc.cluster.local"),
        metadata: json!({ "NAMESPACE": "vms", "AUTO_REGISTER_GROUP": "web", "NETWORK": "net1",
            "LABELS": { "app": "web" }, "PROXY_CONFIG": { "readinessProbe": { "httpGet": { "port": 8080 } } } }),
    }
}

fn vms_register(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    let folder = crate::support::scratch(&format!("{name}-logs"));
    for namespace in [SYSTEM, "vms"] {
        cluster.namespace(namespace, &json!({}))?;
    }
    let lenient = [
        ("ISTIO_WORKLOAD_ENTRY_VALIDATE_IDENTITY", "false"),
        ("PILOT_WORKLOAD_ENTRY_GRACE_PERIOD", "1s"),
    ];
    let kubeconfig = grant(&cluster, &folder, &[])?;
    let one = start(&kubeconfig, &folder, "istiod-a", &lenient)?;
    let other = start(&kubeconfig, &folder, "istiod-b", &lenient)?;
    let strict = start(&kubeconfig, &folder, "istiod-c", &[])?;

    let early = AdsClient::connect(one.xds, &machine("10.9.9.1"));
    let refusal = until_ended(&early)?;
    assert!(refusal.contains("WorkloadGroup vms/web"), "{refusal}");
    let group_written = json!({ "apiVersion": "networking.istio.io/v1", "kind": "WorkloadGroup",
        "metadata": { "namespace": "vms", "name": "web" },
        "spec": { "metadata": { "labels": { "tier": "front" } },
            "template": { "serviceAccount": "web", "ports": { "http": 8080 } } } });
    let group = cluster.api.apply(&group_written)?;
    let refusal = until_ended(&AdsClient::connect(strict.xds, &machine("10.9.9.1")))?;
    assert!(refusal.contains("verified identity"), "{refusal}");

    let connection = AdsClient::connect(one.xds, &machine("10.9.9.1"));
    let reference = Reference::new("networking.istio.io/v1", "WorkloadEntry", "vms", "web-10.9.9.1-net1");
    let entry = wait::until("a WorkloadEntry", TIMEOUT, || cluster.get(&reference).ok()?)?;
    assert_eq!(entry["spec"]["address"], "10.9.9.1");
    assert_eq!(entry["spec"]["labels"], json!({ "app": "web", "tier": "front" }));
    assert_eq!(entry["metadata"]["ownerReferences"][0]["uid"], group["metadata"]["uid"]);
    let controller = |entry: &Value| entry["metadata"]["annotations"]["istio.io/workloadController"].clone();
    assert_eq!(controller(&entry), "istiod-a");
    connection.first()?;
    for (complaint, status) in [(Some("connection refused"), "False"), (None, "True")] {
        connection.report_health(complaint)?;
        wait::until("the workload's health", TIMEOUT, || {
            let entry = cluster.get(&reference).ok()??;
            let condition = &entry["status"]["conditions"][0];
            (condition["type"] == "Healthy" && condition["status"] == status).then_some(())
        })?;
    }

    // Garbage collection would delete an entry with its group; no controller runs here.
    for gone in [&Reference::of(&group_written), &reference] {
        cluster.api.delete(gone)?;
    }
    cluster.api.apply(&group_written)?;
    wait::until("the WorkloadEntry again", TIMEOUT, || cluster.get(&reference).ok()?)?;

    let elsewhere = AdsClient::connect(other.xds, &machine("10.9.9.1"));
    elsewhere.first()?;
    drop(connection);
    // The entry of a machine that comes to the first instance and leaves it later is removed after a grace period. By
    // then, that of the machine above would be removed, too.
    let later = AdsClient::connect(one.xds, &machine("10.9.9.2"));
    let its_reference = Reference::new("networking.istio.io/v1", "WorkloadEntry", "vms", "web-10.9.9.2-net1");
    wait::until("another WorkloadEntry", TIMEOUT, || cluster.get(&its_reference).ok()?)?;
    drop(later);
    wait::until("the removal of the other WorkloadEntry", TIMEOUT, || {
        cluster.get(&its_reference).ok()?.is_none().then_some(())
    })?;
    // The entry belongs to another instance now.
    let entry = cluster.get(&reference)?.ok_or("the WorkloadEntry does not exist")?;
    assert_eq!(controller(&entry), "istiod-b");
    drop(elsewhere);
    wait::until("the removal of the WorkloadEntry", TIMEOUT, || {
        cluster.get(&reference).ok()?.is_none().then_some(())
    })?;
    let counted = http::get(one.monitoring, "istiod", "/metrics")?.body;
    for line in ["auto_registration_success_total 3", "auto_registration_errors_total 1"] {
        assert!(counted.contains(line), "no {line} in the metrics");
    }
    no_request_was_forbidden(&cluster)?;
    Ok(())
}

fn until_ended(connection: &AdsClient) -> Result<String, String> {
    wait::until("the end of the connection", TIMEOUT, || connection.ended())
}
