//! Multicluster.

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::mesh::service;
use super::tenant::{TIMEOUT, Tenant};
use crate::support::ads::{self, AdsClient, Resources, Type};
use crate::support::fault_proxy::FaultProxy;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::wait;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "kube::remote::unreachable_cluster_joins_later",
            unreachable_cluster_joins_later,
        ),
        kubernetes::trial(
            "kube::remote::secret_is_corrected_rotated_removed",
            secret_is_corrected_rotated_removed,
        ),
        kubernetes::trial(
            "kube::remote::identities_follow_the_remote_mesh_config",
            identities_follow_the_remote_mesh_config,
        ),
    ]
}

/// Namespaces of a test in the first cluster, with the second cluster as a remote.
pub(super) struct TwoClusters {
    pub(super) tenant: Tenant<'static>,
    pub(super) remote: &'static Cluster,
}

/// The clusters of a service's endpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Endpoints {
    Local,
    Both,
}

impl TwoClusters {
    /// Creates `web` in both clusters, `there` only in the remote one, and `here` only in the local one.
    pub(super) fn new(name: &str) -> Result<TwoClusters, String> {
        let two = TwoClusters {
            tenant: Tenant::shared(0, name)?,
            remote: kubernetes::shared(1)?,
        };
        two.tenant.namespaces(two.remote)?;
        two.tenant
            .apply(&(service("web", "{app}", 1) + &service("here", "{app}", 2)))?;
        let text = service("web", "{app}", 3) + &service("there", "{app}", 4);
        two.remote.api.apply_all(&two.tenant.fill(&text))?;
        Ok(two)
    }

    /// The remote Secret.
    pub(super) fn secret(&self) -> Reference {
        Reference::new("v1", "Secret", &self.tenant.system, "remote")
    }

    pub(super) fn set_secret(&self, kubeconfig: &Value) -> Result<(), String> {
        let secret = self.secret();
        self.tenant
            .cluster
            .api
            .apply(&json!({ "apiVersion": "v1", "kind": "Secret",
            "metadata": { "namespace": secret.namespace, "name": secret.name,
                "labels": { "istio/multiCluster": "true" } },
            "stringData": { self.cluster_name(): kubeconfig.to_string() } }))?;
        Ok(())
    }

    pub(super) fn cluster_name(&self) -> String {
        format!("remote-{}", self.tenant.trial)
    }

    /// A kubeconfig of a remote account with read access.
    pub(super) fn kubeconfig(&self, account: &str, port: u16) -> Result<Value, String> {
        self.kubeconfig_for(account, port, &["*"])
    }

    /// A kubeconfig of a remote account with read access to some resources.
    fn kubeconfig_for(&self, account: &str, port: u16, resources: &[&str]) -> Result<Value, String> {
        let tenant = &self.tenant;
        let api = &self.remote.api;
        let metadata = json!({ "namespace": tenant.system, "name": account });
        api.apply(&json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata }))?;
        let name = format!("{}-{account}", tenant.trial);
        api.apply(
            &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": name },
            "rules": [{ "apiGroups": ["*"], "resources": resources, "verbs": ["get", "list", "watch"] }] }),
        )?;
        api.apply(
            &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": { "name": name },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
            "subjects": [{ "kind": "ServiceAccount", "namespace": tenant.system, "name": account }] }),
        )?;
        let token = self.remote.token(&tenant.system, account, &[])?;
        Ok(self.remote.kubeconfig(&format!("https://127.0.0.1:{port}"), &token))
    }

    /// The endpoints of `web`, if they are as in one of the variants.
    pub(super) fn endpoints(&self, resources: &Resources) -> Option<Endpoints> {
        let assignment = resources.get(&(Type::Endpoints, self.tenant.outbound(80, "web")))?;
        let found = ads::endpoints(assignment).ok()?;
        let [local, remote] = ["1", "3"].map(|last| self.tenant.fill(&format!("10.{{n}}.3.{last}:8080")));
        if found == [local.clone()] {
            return Some(Endpoints::Local);
        }
        (found == [local, remote]).then_some(Endpoints::Both)
    }

    pub(super) fn until(&self, proxy: &AdsClient, expected: Endpoints) -> Result<Resources, String> {
        let there = (Type::Cluster, self.tenant.outbound(80, "there"));
        proxy.until(&format!("endpoints of {expected:?}"), TIMEOUT, |resources| {
            let complete = self.endpoints(resources) == Some(expected)
                && resources.contains_key(&there) == (expected == Endpoints::Both);
            complete.then(|| resources.clone())
        })
    }
}

/// An unreachable cluster does not delay the start, and joins when it is reachable.
fn unreachable_cluster_joins_later(name: &str) -> Result<(), Failed> {
    let two = TwoClusters::new(name)?;
    let fault_proxy = FaultProxy::to(two.remote.port());
    fault_proxy.silence();
    two.set_secret(&two.kubeconfig("reader", fault_proxy.port)?)?;
    let daemon = two.tenant.daemon_with("istiod", |command| {
        command.env("PILOT_REMOTE_CLUSTER_TIMEOUT", "2s");
    })?;
    let proxy = AdsClient::connect(daemon.xds, &two.tenant.sidecar(&json!({})));
    proxy.first()?;
    two.until(&proxy, Endpoints::Local)?;
    proxy.mark();
    fault_proxy.open();
    let all = two.until(&proxy, Endpoints::Both)?;

    // A known cluster is kept while it is unreachable.
    fault_proxy.cut();
    let connections = fault_proxy.connections();
    wait::until("attempts to reach the remote cluster", TIMEOUT, || {
        (fault_proxy.connections() > connections + 1).then_some(())
    })?;
    let late = AdsClient::connect(daemon.xds, &two.tenant.sidecar(&json!({})));
    assert_eq!(late.first()?, all, "the last good state must be kept");
    let slice = Reference::new("discovery.k8s.io/v1", "EndpointSlice", &two.tenant.app, "there-a");
    let address = two.tenant.fill("10.{n}.3.44");
    let edit = json!({ "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }] });
    two.remote.api.patch(&slice, &edit)?;
    fault_proxy.open();
    let there = (Type::Endpoints, two.tenant.outbound(80, "there"));
    proxy.until("the changes made meanwhile", TIMEOUT, |resources| {
        (ads::endpoints(resources.get(&there)?).ok()? == [format!("{address}:8080")]).then_some(())
    })?;
    assert_eq!(proxy.lost(), [""; 0], "nothing may be removed on the way");
    Ok(())
}

/// A remote Secret is invalid, then corrected, rotated and removed.
fn secret_is_corrected_rotated_removed(name: &str) -> Result<(), Failed> {
    let two = TwoClusters::new(name)?;
    let right = two.kubeconfig("reader", two.remote.port())?;
    let mut wrong = right.clone();
    wrong["users"][0]["user"]["token"] = json!("nonsense");
    two.set_secret(&wrong)?;
    let daemon = two.tenant.daemon_with("istiod", |command| {
        command.env("PILOT_REMOTE_CLUSTER_TIMEOUT", "2s");
    })?;
    let proxy = AdsClient::connect(daemon.xds, &two.tenant.sidecar(&json!({})));
    proxy.first()?;
    let alone = two.until(&proxy, Endpoints::Local)?;
    proxy.mark();

    // exec plugins are never run.
    let mut foreign = right.clone();
    let executed = two.tenant.folder.join("executed");
    foreign["users"][0]["user"] = json!({ "exec": { "apiVersion": "client.authentication.k8s.io/v1",
        "command": "touch", "args": [executed] } });
    two.set_secret(&foreign)?;
    daemon.process.until_logged(&["exec is not allowed"])?;
    two.set_secret(&right)?;
    let all = two.until(&proxy, Endpoints::Both)?;
    assert!(!executed.exists(), "an exec plugin was run");

    let rotated = two.kubeconfig("other-reader", two.remote.port())?;
    two.set_secret(&rotated)?;
    let user = format!("system:serviceaccount:{}:other-reader", two.tenant.system);
    wait::until("requests of the new account", TIMEOUT, || {
        let requests = two.remote.audit(&user);
        requests
            .iter()
            .any(|request| request.verb == "list" && request.status == 200)
            .then_some(())
    })?;
    proxy.until_same(&all, TIMEOUT)?;
    assert_eq!(proxy.lost(), [""; 0], "nothing may be removed on the way");

    two.tenant.cluster.api.delete(&two.secret())?;
    proxy.until_same(&alone, TIMEOUT)?;
    let web = two.tenant.outbound(80, "web");
    let halves: Vec<_> = proxy.lost().into_iter().filter(|lost| lost.starts_with(&web)).collect();
    assert_eq!(
        halves,
        [format!("{web}: 2 endpoints, then 1")],
        "all endpoints must be removed at once"
    );
    assert!(
        proxy
            .lost()
            .iter()
            .all(|lost| lost.contains("there") || lost.starts_with(&web)),
        "endpoints of the other cluster must stay: {:?}",
        proxy.lost()
    );
    Ok(())
}

/// Clients expect identities in the trust domain of the remote mesh config, from the time at which it may be read: a
/// role of an earlier release lacks this right.
fn identities_follow_the_remote_mesh_config(name: &str) -> Result<(), Failed> {
    let two = TwoClusters::new(name)?;
    let api = &two.remote.api;
    let set_domain = |domain: &str| {
        api.apply(&json!({ "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": { "namespace": two.tenant.system, "name": "istio" },
            "data": { "mesh": format!("trustDomain: {domain}\n") } }))
    };
    set_domain("td2")?;
    let there = Reference::new("v1", "Service", &two.tenant.app, "there");
    let accounts = json!({ "alpha.istio.io/kubernetes-serviceaccounts": "sa" });
    api.patch(&there, &json!({ "metadata": { "annotations": accounts } }))?;
    let resources = [
        "customresourcedefinitions",
        "endpointslices",
        "gateways",
        "namespaces",
        "nodes",
        "pods",
        "secrets",
        "services",
        "workloadentries",
    ];
    two.set_secret(&two.kubeconfig_for("reader", two.remote.port(), &resources)?)?;
    let daemon = two.tenant.daemon("istiod")?;
    let proxy = AdsClient::connect(daemon.xds, &two.tenant.sidecar(&json!({})));
    let cluster = (Type::Cluster, two.tenant.outbound(80, "there"));
    let until = |domain: &str| {
        let identity = format!("spiffe://{domain}/ns/{}/sa/sa", two.tenant.app);
        proxy.until(&identity, TIMEOUT, |resources| {
            let body = &resources.get(&cluster)?.body;
            let mut texts = body.windows(identity.len());
            texts.any(|text| text == identity.as_bytes()).then_some(())
        })
    };
    until("cluster.local")?;
    // Access is added, as with a newer chart.
    two.kubeconfig("reader", two.remote.port())?;
    until("td2")?;
    set_domain("td3")?;
    until("td3")?;
    Ok(())
}
