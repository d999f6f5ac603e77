//! The charts grant exactly the permissions that the daemon uses.

use std::collections::BTreeSet;
use std::time::Duration;

use istiod::api::yaml;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::rendered::find;
use crate::support::ads::{AdsClient, Type};
use crate::support::authority::Authority;
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster, crds};
use crate::support::{helm, missing, scratch, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test(
            "charts::istiod::granted_permissions_equal_used_ones",
            granted_permissions_equal_used_ones,
        ),
        helm::trial(
            "charts::istiod::accounts_may_serve_a_cluster",
            accounts_may_serve_a_cluster,
        ),
        helm::trial("charts::istiod::secrets_are_read_by_name", secrets_are_read_by_name),
        helm::trial(
            "charts::istiod::rights_follow_variables_in_all_forms",
            rights_follow_variables_in_all_forms,
        ),
        helm::trial(
            "charts::istiod::rights_follow_names_in_variables",
            rights_follow_names_in_variables,
        ),
    ]
}

const NAMESPACE: &str = "istio-system";

/// Values that enable everything that writes, with short delays.
const VALUES: &[&str] = &[
    "env.ENABLE_MCS_AUTO_EXPORT=true",
    "global.istiod.enableAnalysis=true",
    "taint.enabled=true",
    "env.PILOT_WORKLOAD_ENTRY_GRACE_PERIOD=1s",
    "env.ISTIO_WORKLOAD_ENTRY_VALIDATE_IDENTITY=false",
    "env.ENABLE_GATEWAY_API_INFERENCE_EXTENSION=true",
];

/// Used only when a client sends a token or requests a Secret, or a VM reports its health; the test's proxy does not.
const NOT_TRIED: &[&str] = &[
    "create authentication.k8s.io tokenreviews",
    "create authorization.k8s.io subjectaccessreviews",
    "update networking.istio.io workloadentries/status",
];

/// Applying an object that does not exist takes `create`, but the request is a `patch`.
const IMPLIED: &[&str] = &[
    "create  serviceaccounts",
    "create  services",
    "create apps deployments",
    "create autoscaling horizontalpodautoscalers",
    "create policy poddisruptionbudgets",
];

/// Settings that renew the root of the CA all the time.
const RENEWING: [(&str, &str); 3] = [
    ("CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL", "1s"),
    ("CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE", "100"),
    ("CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR", "false"),
];

/// Requests of the controllers that run in each cluster that a control plane serves, remote ones included
/// (`status::root_cert`, `status::cluster_trust_bundle`, `status::webhook_configuration`): group, resource, name (empty
/// for any) and verbs.
const SERVING: &[(&str, &str, &str, &[&str])] = &[
    ("", "configmaps", "", &["create"]),
    ("", "configmaps", "roots", &["get", "list", "watch", "update"]),
    ("", "configmaps", "revoked", &["get", "list", "watch", "update"]),
    (
        "certificates.k8s.io",
        "clustertrustbundles",
        "",
        &["get", "list", "watch", "create", "update"],
    ),
    ("certificates.k8s.io", "signers", "istio.io/istiod-ca", &["attest"]),
    (
        "admissionregistration.k8s.io",
        "mutatingwebhookconfigurations",
        "",
        &["list", "watch", "update"],
    ),
];

/// The account of the control plane serves its own cluster, and that of the reader a remote one.
fn accounts_may_serve_a_cluster() -> Result<(), Failed> {
    let values = [
        "global.externalIstiod=true",
        "global.trustBundleName=roots",
        "crlConfigMapName=revoked",
        "env.ENABLE_CLUSTER_TRUST_BUNDLE_API=true",
    ];
    let objects = helm::objects("istiod", &values)?;
    for role in ["istiod-clusterrole", "istio-reader-clusterrole"] {
        let rules = &find(&objects, "ClusterRole", &format!("{role}-{NAMESPACE}"))["rules"];
        for (group, resource, name, verbs) in SERVING {
            for verb in *verbs {
                assert!(
                    allows(rules, verb, group, resource, name),
                    "{role} must {verb} {group} {resource} {name}"
                );
            }
        }
    }
    Ok(())
}

/// Config sources name a Secret with CA certificates (`app::config_sources`). Only those of the CA are changed.
fn secrets_are_read_by_name() -> Result<(), Failed> {
    let objects = helm::objects("istiod", &[])?;
    let rules = &find(&objects, "Role", "istiod")["rules"];
    for (verb, name, is_allowed) in [
        ("get", "roots-of-a-source", true),
        ("update", "roots-of-a-source", false),
        ("update", "istio-ca-secret", true),
        ("update", "cacerts", true),
    ] {
        assert_eq!(allows(rules, verb, "", "secrets", name), is_allowed, "{verb} {name}");
    }
    Ok(())
}

/// Reports whether rules allow a request. An empty name is that of no object.
fn allows(rules: &Value, verb: &str, group: &str, resource: &str, name: &str) -> bool {
    let holds = |value: &Value, text: &str| value.as_array().is_some_and(|all| all.contains(&json!(text)));
    rules.as_array().into_iter().flatten().any(|rule| {
        holds(&rule["apiGroups"], group)
            && holds(&rule["resources"], resource)
            && holds(&rule["verbs"], verb)
            && (rule["resourceNames"].is_null() || holds(&rule["resourceNames"], name))
    })
}

/// Variables that take rights: name, default, and a permission that only the variable grants: role, verb, group,
/// resource.
const SWITCHES: &[(&str, bool, &str)] = &[
    (
        "ENABLE_GATEWAY_API_INFERENCE_EXTENSION",
        false,
        "istiod-clusterrole list inference.networking.k8s.io inferencepools",
    ),
    (
        "PILOT_ENABLE_AMBIENT",
        false,
        "istiod-clusterrole patch  services/status",
    ),
    (
        "ENABLE_MCS_AUTO_EXPORT",
        false,
        "istiod-clusterrole create multicluster.x-k8s.io serviceexports",
    ),
    (
        "ENABLE_MCS_AUTO_EXPORT",
        false,
        "istio-reader-clusterrole create multicluster.x-k8s.io serviceexports",
    ),
    (
        "EXTERNAL_ISTIOD",
        false,
        "istio-reader-clusterrole update admissionregistration.k8s.io mutatingwebhookconfigurations",
    ),
    (
        "PILOT_ENABLE_STATUS",
        false,
        "istiod-clusterrole patch networking.istio.io */status",
    ),
    (
        "PILOT_ENABLE_ANALYSIS",
        false,
        "istiod-clusterrole list apps deployments",
    ),
    (
        "PILOT_ENABLE_NODE_UNTAINT_CONTROLLERS",
        false,
        "istiod-clusterrole patch  nodes",
    ),
    (
        "PILOT_ENABLE_ALPHA_GATEWAY_API",
        false,
        "istiod-clusterrole patch gateway.networking.x-k8s.io */status",
    ),
    (
        "ENABLE_CLUSTER_TRUST_BUNDLE_API",
        false,
        "istiod-clusterrole list certificates.k8s.io clustertrustbundles",
    ),
    (
        "PILOT_ENABLE_GATEWAY_API_STATUS",
        true,
        "istiod-clusterrole patch gateway.networking.k8s.io */status",
    ),
    (
        "PILOT_ENABLE_GATEWAY_API_GATEWAYCLASS_CONTROLLER",
        true,
        "istiod-clusterrole create gateway.networking.k8s.io gatewayclasses",
    ),
    ("PILOT_ENABLE_REFUSAL_EVENTS", true, "istiod-clusterrole create  events"),
];

/// istiod reads more spellings of booleans than `true`, and the variables of `envVarFrom` after those of `env`.
fn rights_follow_variables_in_all_forms() -> Result<(), Failed> {
    let value = |text: &str| json!({ "value": text });
    let elsewhere = json!({ "valueFrom": { "configMapKeyRef": { "name": "settings", "key": "switch" } } });
    for (is_on, text, entry) in [
        (None, Value::Null, Value::Null),
        (None, json!("maybe"), Value::Null),
        (Some(true), json!(true), Value::Null),
        (Some(true), json!("True"), Value::Null),
        (Some(true), json!("t"), Value::Null),
        (Some(true), json!(1), Value::Null),
        (Some(true), Value::Null, value("true")),
        (Some(true), json!(false), elsewhere),
        (Some(false), json!("FALSE"), Value::Null),
        (Some(false), json!(0), Value::Null),
        (Some(false), Value::Null, value("0")),
        (Some(false), json!(true), value("F")),
    ] {
        let (mut variables, mut entries) = (json!({}), Vec::new());
        for (name, ..) in SWITCHES {
            if !text.is_null() {
                variables[*name] = text.clone();
            }
            if !entry.is_null() {
                let mut entry = entry.clone();
                entry["name"] = json!(name);
                entries.push(entry);
            }
        }
        let values = [
            format!("env={variables}"),
            format!("envVarFrom={}", Value::Array(entries)),
        ];
        let [variables, entries] = &values;
        let text = helm::run(&[
            "template",
            "mesh",
            "istiod",
            "--namespace",
            NAMESPACE,
            "--set-json",
            variables,
            "--set-json",
            entries,
        ])?;
        let documents: Result<Vec<Value>, _> = yaml::documents(&text).iter().map(yaml::Document::parse).collect();
        let objects = documents?;
        for (name, default, permission) in SWITCHES {
            let words: Vec<&str> = permission.split(' ').collect();
            let [role, verb, group, resource] = words[..] else {
                return Err(permission.into());
            };
            let rules = &find(&objects, "ClusterRole", &format!("{role}-{NAMESPACE}"))["rules"];
            assert_eq!(
                allows(rules, verb, group, resource, ""),
                is_on.unwrap_or(*default),
                "{name}, {values:?}"
            );
        }
    }
    Ok(())
}

/// Variables with names decide about the objects of rules, and signers about rules. A name that the chart does not know
/// limits nothing.
fn rights_follow_names_in_variables() -> Result<(), Failed> {
    let given = [
        "envVarFrom[0].name=PILOT_CA_CERT_CONFIGMAP",
        "envVarFrom[0].value=roots",
        "envVarFrom[1].name=MCS_API_GROUP",
        "envVarFrom[1].value=mcs.example.com",
        "envVarFrom[2].name=EXTERNAL_CA",
        "envVarFrom[2].value=ISTIOD_RA_KUBERNETES_API",
    ];
    let elsewhere = [
        "envVarFrom[0].name=PILOT_CRL_CONFIGMAP",
        "envVarFrom[0].valueFrom.configMapKeyRef.key=a",
        "envVarFrom[1].name=MCS_API_GROUP",
        "envVarFrom[1].valueFrom.configMapKeyRef.key=b",
        "envVarFrom[2].name=PILOT_CERT_PROVIDER",
        "envVarFrom[2].valueFrom.configMapKeyRef.key=c",
    ];
    let provider = ["env.PILOT_CERT_PROVIDER=k8s.io/example.com/own"];
    let workloads = [
        "env.EXTERNAL_CA=ISTIOD_RA_KUBERNETES_API",
        "env.K8S_SIGNER=example.com/mesh",
        "global.certSigners={example.com/more}",
    ];
    let approvals = "approve certificates.k8s.io signers";
    let exports = "list mcs.example.com serviceexports";
    let certificates = "create certificates.k8s.io certificatesigningrequests";
    for (values, permission, name, is_granted) in [
        (&given[..], "update  configmaps", "roots", true),
        (&given, "update  configmaps", "istio-ca-crl", true),
        (&given, "update  configmaps", "istio-ca-root-cert", false),
        (&given, exports, "", true),
        (&given, "list multicluster.x-k8s.io serviceexports", "", false),
        (&given, certificates, "", true),
        (&elsewhere, "update  configmaps", "any", true),
        (&elsewhere, "list * serviceexports", "", true),
        (&elsewhere, certificates, "", true),
        (&provider, certificates, "", true),
        (&provider, "update  configmaps", "istio-ca-root-cert", true),
        (&[], certificates, "", false),
        (&provider, approvals, "example.com/own", true),
        (&provider, approvals, "example.com/mesh", false),
        (&workloads, approvals, "example.com/mesh", true),
        (&workloads, approvals, "example.com/more", true),
        (&workloads[1..], approvals, "example.com/mesh", false),
        (&given, approvals, "example.com/own", false),
    ] {
        let objects = helm::objects("istiod", values)?;
        let rules = &find(&objects, "ClusterRole", &format!("istiod-clusterrole-{NAMESPACE}"))["rules"];
        let words: Vec<&str> = permission.split(' ').collect();
        assert_eq!(
            allows(rules, words[0], words[1], words[2], name),
            is_granted,
            "{permission} {name}, {values:?}"
        );
    }
    Ok(())
}

fn granted_permissions_equal_used_ones() -> Result<Completion, Failed> {
    if !kubernetes::is_installed() || !helm::is_installed() {
        return missing("the Kubernetes API server or Helm is missing; `make tools` installs them");
    }
    let cluster = Cluster::start("charts/rights")?;
    cluster.namespace(NAMESPACE, &json!({}))?;
    for (group, kind) in [
        ("gateway.networking.k8s.io", "Gateway"),
        ("gateway.networking.k8s.io", "GatewayClass"),
        ("gateway.networking.k8s.io", "HTTPRoute"),
        ("gateway.networking.x-k8s.io", "XBackendTrafficPolicy"),
        ("inference.networking.k8s.io", "InferencePool"),
        ("multicluster.x-k8s.io", "ServiceExport"),
        ("multicluster.x-k8s.io", "ServiceImport"),
    ] {
        let mut definition = crds::loose_crd(group, kind);
        definition["metadata"]["annotations"] = json!({ "api-approved.kubernetes.io": "unapproved, for a test" });
        if kind == "GatewayClass" {
            definition["spec"]["scope"] = json!("Cluster");
        }
        cluster.api.apply(&definition)?;
        crds::established(&cluster.api, &definition)?;
    }
    let objects = helm::objects("istiod", VALUES)?;
    for object in &objects {
        cluster
            .api
            .apply(object)
            .map_err(|error| format!("{}: {error}", object["kind"]))?;
    }
    let folder = scratch("charts/rights-daemon");
    let kubeconfig = folder.join("kubeconfig");
    cluster.write_kubeconfig(&kubeconfig, &cluster.url(), &cluster.token(NAMESPACE, "istiod", &[])?);
    let environment = helm::environment(&objects);
    let daemon = Daemon::in_kubernetes(&kubeconfig, NAMESPACE, &folder.join("istiod.log"), |command| {
        command
            .envs(environment)
            .envs(RENEWING)
            .env("POD_NAME", "istiod-0")
            .env("POD_NAMESPACE", NAMESPACE);
    })?;
    trigger_all_writes(&cluster, &daemon)?;
    daemon.process.terminate();
    daemon.process.end_of(Duration::from_mins(1))?;

    let asked = cluster.audit(&format!("system:serviceaccount:{NAMESPACE}:istiod"));
    let refused: BTreeSet<_> = asked.iter().filter(|request| request.status == 403).collect();
    assert!(refused.is_empty(), "forbidden requests: {refused:#?}");
    let used: BTreeSet<String> = asked
        .iter()
        .flat_map(|request| {
            let subresource = request.resource.split_once('/').map(|(_, name)| format!("*/{name}"));
            let resources = [request.resource.clone(), "*".to_owned()]
                .into_iter()
                .chain(subresource);
            resources.map(|resource| format!("{} {} {resource}", request.verb, request.group))
        })
        .collect();
    let idle: BTreeSet<String> = granted(&objects).difference(&used).cloned().collect();
    assert_eq!(
        idle,
        NOT_TRIED.iter().chain(IMPLIED).map(ToString::to_string).collect(),
        "permissions that are granted but not used"
    );
    Ok(Completion::Completed)
}

/// Returns `verb group resource` of every permission of the account.
fn granted(objects: &[Value]) -> BTreeSet<String> {
    let roles = objects.iter().filter(|object| {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        matches!(object["kind"].as_str(), Some("Role" | "ClusterRole")) && name.starts_with("istiod")
    });
    let words = |value: &Value| -> Vec<String> {
        let words = value.as_array().into_iter().flatten().filter_map(Value::as_str);
        words.map(str::to_owned).collect()
    };
    let mut granted = BTreeSet::new();
    for rule in roles.flat_map(|role| role["rules"].as_array().into_iter().flatten()) {
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                let grants = words(&rule["verbs"])
                    .into_iter()
                    .map(|verb| format!("{verb} {group} {resource}"));
                granted.extend(grants);
            }
        }
    }
    granted
}

/// Makes each controller write its objects.
fn trigger_all_writes(cluster: &Cluster, daemon: &Daemon) -> Result<(), String> {
    let metadata = |namespace: &str, name: &str| json!({ "namespace": namespace, "name": name });
    let networking = "networking.istio.io/v1";
    let absent = json!({ "matchLabels": { "app": "absent" } });
    for object in [
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata("default", "web"),
            "spec": { "selector": { "app": "web" }, "ports": [{ "name": "http", "port": 80 }] } }),
        json!({ "apiVersion": networking, "kind": "ServiceEntry", "metadata": metadata("default", "far"),
            "spec": { "hosts": ["far.example.com"], "ports": [{ "name": "http", "number": 80 }],
                "resolution": "DNS" } }),
        json!({ "apiVersion": networking, "kind": "VirtualService", "metadata": metadata("default", "astray"),
            "spec": { "hosts": ["far.example.com"], "gateways": ["absent"],
                "http": [{ "route": [{ "destination": { "host": "far.example.com" } }] }] } }),
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" },
            "spec": { "taints": [{ "key": "cni.istio.io/not-ready", "effect": "NoSchedule" }] } }),
        json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": NAMESPACE, "name": "cni", "labels": { "k8s-app": "istio-cni-node" } },
            "spec": { "nodeName": "n1", "containers": [{ "name": "install-cni", "image": "unused" }],
                "tolerations": [{ "operator": "Exists" }] },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }] } }),
        json!({ "apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy",
            "metadata": metadata("default", "none"), "spec": { "selector": absent, "rules": [{}] } }),
        json!({ "apiVersion": "telemetry.istio.io/v1", "kind": "Telemetry", "metadata": metadata("default", "none"),
            "spec": { "selector": absent } }),
        json!({ "apiVersion": "extensions.istio.io/v1alpha1", "kind": "WasmPlugin",
            "metadata": metadata("default", "none"),
            "spec": { "url": "192.0.2.1:5000/plugin" } }),
        json!({ "apiVersion": networking, "kind": "WorkloadGroup", "metadata": metadata("default", "machines"),
            "spec": { "template": { "serviceAccount": "machine" } } }),
        json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
            "metadata": metadata("default", "web"),
            "spec": { "parentRefs": [{ "group": "", "kind": "Service", "name": "web" }] } }),
        json!({ "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
            "metadata": metadata("default", "models"),
            "spec": { "selector": { "matchLabels": { "app": "models" } }, "targetPorts": [{ "number": 8000 }],
                "endpointPickerRef": { "name": "web", "port": { "number": 80 } } } }),
        json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
            "metadata": metadata("default", "models"),
            "spec": { "parentRefs": [{ "name": "web" }], "rules": [{ "backendRefs": [
                { "group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "models" }] }] } }),
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata(NAMESPACE, "istio-ingressgateway"),
            "spec": { "externalIPs": ["192.0.2.1"], "ports": [{ "name": "http", "port": 80 }] } }),
        json!({ "apiVersion": "networking.k8s.io/v1", "kind": "Ingress",
            "metadata": { "namespace": "default", "name": "web",
                "annotations": { "kubernetes.io/ingress.class": "istio" } },
            "spec": { "defaultBackend": { "service": { "name": "web", "port": { "number": 80 } } } } }),
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata("default", "parameters"),
            "data": { "horizontalPodAutoscaler": "", "podDisruptionBudget": "" } }),
        json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": metadata("default", "web"),
            "spec": { "gatewayClassName": "istio", "listeners": [{ "name": "http", "port": 80, "protocol": "HTTP" }],
                "infrastructure": {
                    "parametersRef": { "group": "", "kind": "ConfigMap", "name": "parameters" } } } }),
    ] {
        cluster.api.apply(&object)?;
    }
    let is_there = |api_version: &str, kind: &str, name: &str| {
        let reference = Reference::new(api_version, kind, "default", name);
        wait::until(&format!("the {kind} {name}"), Duration::from_mins(1), || {
            cluster.get(&reference).ok()?
        })
    };
    is_there("v1", "ConfigMap", "istio-ca-root-cert")?;
    is_there("multicluster.x-k8s.io/v1alpha1", "ServiceExport", "web")?;
    is_there("policy/v1", "PodDisruptionBudget", "web-istio")?;
    is_there("v1", "Service", "models-ip-8edcc26c")?;
    let entry = Reference::new(networking, "ServiceEntry", "default", "far");
    wait::until("addresses of the ServiceEntry", Duration::from_mins(1), || {
        let entry = cluster.get(&entry).ok()??;
        entry["status"]["addresses"].is_array().then_some(())
    })?;
    wait::until("a node without the taint", Duration::from_mins(1), || {
        let node = cluster.get(&Reference::new("v1", "Node", "", "n1")).ok()??;
        let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        taints
            .iter()
            .all(|taint| taint["key"] != "cni.istio.io/not-ready")
            .then_some(())
    })?;
    for (api_version, kind, name) in [
        (networking, "VirtualService", "astray"),
        ("security.istio.io/v1", "AuthorizationPolicy", "none"),
        ("telemetry.istio.io/v1", "Telemetry", "none"),
        ("extensions.istio.io/v1alpha1", "WasmPlugin", "none"),
    ] {
        let object = Reference::new(api_version, kind, "default", name);
        wait::until(&format!("the status of the {kind}"), Duration::from_mins(1), || {
            let object = cluster.get(&object).ok()??;
            object["status"]["validationMessages"].is_array().then_some(())
        })?;
    }
    for (api_version, kind, name, field) in [
        ("gateway.networking.k8s.io/v1", "HTTPRoute", "web", "/status/parents/0"),
        (
            "inference.networking.k8s.io/v1",
            "InferencePool",
            "models",
            "/status/parents/0",
        ),
        (
            "networking.k8s.io/v1",
            "Ingress",
            "web",
            "/status/loadBalancer/ingress/0",
        ),
    ] {
        let object = Reference::new(api_version, kind, "default", name);
        wait::until(&format!("the status of the {kind}"), Duration::from_mins(1), || {
            cluster.get(&object).ok()??.pointer(field).map(|_| ())
        })?;
    }
    // The self-signed root is renewed each second, until another one takes its place.
    let root = Reference::new("v1", "Secret", NAMESPACE, "istio-ca-secret");
    let stored = || Some(cluster.get(&root).ok()??["metadata"]["resourceVersion"].clone());
    let created = wait::until("the root of the CA", Duration::from_mins(1), stored)?;
    wait::until("a renewed root", Duration::from_mins(1), || {
        stored().filter(|version| *version != created)
    })?;
    // The roots change, so the ConfigMaps are updated, not only created.
    cluster.api.apply(&Authority::new("other").secret(NAMESPACE, None))?;
    let version = "admissionregistration.k8s.io/v1";
    cluster
        .api
        .apply(&json!({ "apiVersion": version, "kind": "MutatingWebhookConfiguration",
        "metadata": { "name": "injector", "labels": { "istio.io/rev": "default" } },
        "webhooks": [{ "name": "object.sidecar-injector.istio.io", "admissionReviewVersions": ["v1"],
            "sideEffects": "None", "clientConfig": { "url": "https://localhost/inject" } }] }))?;
    for (kind, name) in [
        ("MutatingWebhookConfiguration", "injector"),
        ("ValidatingWebhookConfiguration", "istio-validator-istio-system"),
    ] {
        let reference = Reference::new(version, kind, "", name);
        wait::until(&format!("the CA bundle of {name}"), Duration::from_mins(1), || {
            let found = cluster.get(&reference).ok()??;
            found["webhooks"][0]["clientConfig"]["caBundle"]
                .is_string()
                .then_some(())
        })?;
    }
    event_of_a_refusal(cluster, daemon)?;
    let machine = AdsClient::connect(
        daemon.xds,
        &Node {
            id: "sidecar~10.99.0.1~machine.default~default.svc.cluster.local".to_owned(),
            metadata: json!({ "NAMESPACE": "default", "SERVICE_ACCOUNT": "machine",
                "AUTO_REGISTER_GROUP": "machines" }),
        },
    );
    is_there(networking, "WorkloadEntry", "machines-10.99.0.1")?;
    drop(machine);
    wait::until("the removal of the VM's WorkloadEntry", Duration::from_mins(1), || {
        let entries = cluster.api.list(networking, "WorkloadEntry", "default").ok()?;
        entries.is_empty().then_some(())
    })?;
    Ok(())
}

/// Makes a proxy refuse an object, about which an Event is written.
fn event_of_a_refusal(cluster: &Cluster, daemon: &Daemon) -> Result<(), String> {
    let proxy = AdsClient::connect(
        daemon.xds,
        &Node {
            id: "sidecar~10.99.0.2~refuses.default~default.svc.cluster.local".to_owned(),
            metadata: json!({ "NAMESPACE": "default", "SERVICE_ACCOUNT": "default" }),
        },
    );
    proxy.first()?;
    proxy.refuse(Type::Cluster, "not for this proxy");
    cluster.api.apply(
        &json!({ "apiVersion": "networking.istio.io/v1", "kind": "DestinationRule",
        "metadata": { "namespace": "default", "name": "refused" },
        "spec": { "host": "far.example.com", "trafficPolicy": {
            "connectionPool": { "tcp": { "maxConnections": 7 } } } } }),
    )?;
    wait::until("the Event about a refusal", Duration::from_mins(1), || {
        let events = cluster.api.list("v1", "Event", "default").ok()?;
        events
            .iter()
            .any(|event| event["reason"] == "ConfigRefused")
            .then_some(())
    })
}
