//! The charts, installed, upgraded and removed by Helm in a real API server.

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use super::{istio, rendered::find};
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::{helm, missing, project, scratch};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test("charts::installed::releases_work", releases_work),
        Trial::ignorable_test(
            "charts::installed::releases_of_istio_are_upgraded_and_rolled_back",
            releases_of_istio_are_upgraded_and_rolled_back,
        ),
    ]
}

/// A cluster of its own: the injector's webhooks would refuse the pods of other tests.
struct Installer {
    cluster: Cluster,
    namespace: &'static str,
    kubeconfig: String,
}

impl Installer {
    fn start(namespace: &'static str) -> Result<Self, Failed> {
        let cluster = Cluster::start(&format!("charts/{namespace}-cluster"))?;
        let kubeconfig = scratch(&format!("charts/{namespace}")).join("kubeconfig");
        cluster.account_kubeconfig(namespace, "installer", &kubeconfig)?;
        cluster.api.apply(
            &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": { "name": "charts-installer" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin" },
            "subjects": [{ "kind": "ServiceAccount", "namespace": namespace, "name": "installer" }] }),
        )?;
        let kubeconfig = kubeconfig.display().to_string();
        Ok(Self {
            cluster,
            namespace,
            kubeconfig,
        })
    }

    /// Runs Helm with values, separated by commas.
    fn helm(&self, words: &[&str], values: &str) -> Result<String, String> {
        let root = format!("global.istioNamespace={}", self.namespace);
        let common = ["--namespace", self.namespace, "--kubeconfig", &self.kubeconfig];
        let more = if values.is_empty() {
            vec![]
        } else {
            vec!["--set", &root, "--set", values]
        };
        helm::run(&[words, &common, &more].concat())
    }

    fn get(&self, version: &str, kind: &str, name: &str) -> Result<Value, Failed> {
        let found = self.cluster.get(&Reference::new(version, kind, self.namespace, name))?;
        Ok(found.ok_or_else(|| format!("the {kind} {name} does not exist"))?)
    }
}

fn releases_work() -> Result<Completion, Failed> {
    if !kubernetes::is_installed() || !helm::is_installed() {
        return missing("the Kubernetes API server or Helm is missing; `make tools` installs them");
    }
    let installer = Installer::start("charts-installed")?;
    // The CRDs are already installed, and Helm would refuse to adopt them.
    installer.helm(&["install", "base", "base"], "global.resourceScope=namespace")?;
    control_planes_are_installed(&installer)?;
    upgrades_keep_failure_policies(&installer)?;
    gateways_are_installed(&installer)?;
    remote_objects_are_accepted(&installer)?;
    for release in ["canary", "istiod", "base"] {
        installer.helm(&["uninstall", release], "")?;
    }
    let left = installer.get("apps/v1", "Deployment", "istiod");
    assert!(left.is_err(), "uninstalling must remove the Deployment");
    Ok(Completion::Completed)
}

fn control_planes_are_installed(installer: &Installer) -> Result<(), Failed> {
    let without_effect = "taint.enabled=true,global.agentgateway.image=a,global.waypoint.nodeSelector.a=b";
    let output = installer.helm(&["install", "istiod", "istiod"], without_effect)?;
    assert!(output.contains("no effect yet: global.agentgateway."), "{output}");
    // That of `global.hub` is the image of istiod alone.
    let image = "Proxies have the image registry.istio.io/release/proxyv2:1.30.3 (global.proxy.image).";
    assert!(output.contains(image), "{output}");
    let canary = "revision=canary,revisionTags={prod},autoscaleMin=2,global.networkPolicy.enabled=true,\
        gatewayClasses.istio.service.spec.type=ClusterIP,profile=demo,platform=openshift";
    installer.helm(&["install", "canary", "istiod"], canary)?;
    let replicas = "autoscaleEnabled=false,replicaCount=2";
    installer.helm(&["upgrade", "istiod", "istiod"], replicas)?;
    for name in ["istiod", "istiod-canary", "istio-reader-service-account"] {
        installer.cluster.token(installer.namespace, name, &[])?;
    }
    let deployment = installer.get("apps/v1", "Deployment", "istiod")?;
    assert_eq!(deployment["spec"]["replicas"], 2);
    let service = installer.get("v1", "Service", "istiod-revision-tag-prod")?;
    assert_eq!(service["spec"]["ports"].as_array().map(Vec::len), Some(4));
    Ok(())
}

/// istiod raises the policy and writes the CA bundle; an upgrade by Helm keeps both.
fn upgrades_keep_failure_policies(installer: &Installer) -> Result<(), Failed> {
    let (version, kind) = ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration");
    let name = format!("istio-validator-canary-{}", installer.namespace);
    let reference = Reference::new(version, kind, "", &name);
    let webhook = |field: &str| -> Result<Value, Failed> {
        let found = installer.cluster.get(&reference)?.ok_or("no validator")?;
        Ok(found["webhooks"][0][field].clone())
    };
    assert_eq!(webhook("failurePolicy")?, "Ignore");
    let mut raised = installer.cluster.get(&reference)?.ok_or("no validator")?;
    raised["webhooks"][0]["failurePolicy"] = json!("Fail");
    raised["webhooks"][0]["clientConfig"]["caBundle"] = json!("YQ==");
    installer
        .cluster
        .api
        .patch(&reference, &json!({ "webhooks": raised["webhooks"] }))?;
    for replicas in ["2", "3"] {
        let values = format!("revision=canary,autoscaleMin={replicas}");
        installer.helm(&["upgrade", "canary", "istiod"], &values)?;
        assert_eq!(webhook("failurePolicy")?, "Fail");
        assert_eq!(webhook("clientConfig")?["caBundle"], "YQ==");
    }
    Ok(())
}

fn gateways_are_installed(installer: &Installer) -> Result<(), Failed> {
    let ingress = "podDisruptionBudget.minAvailable=1,autoscaling.minReplicas=2,global.networkPolicy.enabled=true,\
        autoscaling.targetMemoryUtilizationPercentage=80,service.annotations.a=b,env.A=1,revision=canary";
    installer.helm(&["install", "istio-ingress", "gateway"], ingress)?;
    installer.helm(
        &["install", "istio-eastwest", "gateway"],
        "networkGateway=east,kind=DaemonSet,strategy.type=OnDelete,autoscaling.enabled=false,replicaCount=2",
    )?;
    let egress = "service.type=ClusterIP,serviceAccount.create=false,rbac.enabled=false,autoscaling.enabled=false";
    installer.helm(&["install", "istio-egress", "gateway"], egress)?;
    let service = installer.get("v1", "Service", "istio-eastwest")?;
    assert_eq!(service["metadata"]["labels"]["topology.istio.io/network"], "east");
    let deployment = installer.get("apps/v1", "Deployment", "istio-ingress")?;
    assert_eq!(deployment["spec"]["template"]["spec"]["containers"][0]["image"], "auto");
    let daemon_set = installer.get("apps/v1", "DaemonSet", "istio-eastwest")?;
    assert_eq!(daemon_set["spec"]["updateStrategy"]["type"], "OnDelete");
    installer.helm(&["upgrade", "istio-ingress", "gateway"], "service.type=ClusterIP")?;
    for release in ["istio-ingress", "istio-eastwest", "istio-egress"] {
        installer.helm(&["uninstall", release], "")?;
    }
    Ok(())
}

/// Users of Istio's chart change to this one with `helm upgrade`, and back with `helm rollback`. No immutable field may
/// change, and only Istio's objects disappear.
fn releases_of_istio_are_upgraded_and_rolled_back() -> Result<Completion, Failed> {
    let Ok(rendered) = std::fs::read_to_string(project().join(istio::RENDERED)) else {
        return Ok(Completion::ignored_with(
            "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
        ));
    };
    if !kubernetes::is_installed() || !helm::is_installed() {
        return missing("the Kubernetes API server or Helm is missing; `make tools` installs them");
    }
    let chart = scratch("charts/of-istio");
    std::fs::create_dir(chart.join("templates"))?;
    std::fs::write(
        chart.join("Chart.yaml"),
        "apiVersion: v2\nname: istiod\nversion: 1.30.3\n",
    )?;
    std::fs::write(chart.join("rendered.yaml"), rendered)?;
    std::fs::write(chart.join("templates/all.yaml"), "{{ .Files.Get \"rendered.yaml\" }}\n")?;

    let installer = Installer::start("istio-system")?;
    installer.helm(&["install", "istiod", &chart.display().to_string()], "")?;
    let before = installer.get("apps/v1", "Deployment", "istiod")?;
    installer.helm(&["upgrade", "istiod", "istiod"], "revisionTags={prod}")?;
    let upgraded = installer.get("apps/v1", "Deployment", "istiod")?;
    assert_eq!(
        upgraded["metadata"]["uid"], before["metadata"]["uid"],
        "the Deployment must not be replaced"
    );
    assert_eq!(upgraded["spec"]["selector"], before["spec"]["selector"]);
    let image = |deployment: &Value| deployment["spec"]["template"]["spec"]["containers"][0]["image"].clone();
    assert_eq!(image(&upgraded), "localhost:5000/pilot:latest");
    let role = Reference::new(
        "rbac.authorization.k8s.io/v1",
        "ClusterRole",
        "",
        "istiod-gateway-controller-istio-system",
    );
    let deletes = || -> Result<bool, Failed> {
        let found = installer.cluster.get(&role)?.ok_or("no role")?;
        let verbs = found["rules"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|rule| &rule["verbs"]);
        Ok(verbs.into_iter().any(|verbs| verbs.to_string().contains("delete")))
    };
    assert!(!deletes()?, "rights of Istio's chart must disappear");
    installer.get("v1", "Service", "istiod-revision-tag-prod")?;
    installer.helm(&["rollback", "istiod", "1"], "")?;
    let back = installer.get("apps/v1", "Deployment", "istiod")?;
    assert_eq!(image(&back), image(&before));
    assert!(deletes()?);
    Ok(Completion::Completed)
}

/// The API server accepts the objects of remote clusters, and the policy of all objects.
fn remote_objects_are_accepted(installer: &Installer) -> Result<(), Failed> {
    for (revision, address) in [("a", "192.0.2.1"), ("b", "2001:db8::1"), ("c", "istiod.example.com")] {
        let values = format!("profile=remote,revision={revision},global.remotePilotAddress={address}");
        let release = format!("remote-{revision}");
        installer.helm(&["install", &release, "istiod"], &values)?;
        installer.get("v1", "Service", &format!("istiod-{revision}"))?;
        installer.helm(&["uninstall", &release], "")?;
    }
    let policies = helm::objects("base", &["profile=stable"])?;
    let binding = find(
        &policies,
        "ValidatingAdmissionPolicyBinding",
        "stable-channel-default-policy-binding.istio.io",
    );
    let policy = find(
        &policies,
        "ValidatingAdmissionPolicy",
        "stable-channel-default-policy.istio.io",
    );
    for object in [policy, binding] {
        installer.cluster.api.apply(object)?;
    }
    Ok(())
}
