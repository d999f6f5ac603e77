//! Tests of the test cluster itself.

use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::support::kubernetes::api::{Api, Reference};
use crate::support::kubernetes::{self, Cluster};
use crate::support::wait;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial("kube::cluster::objects_round_trip", |_| objects_round_trip()),
        kubernetes::trial("kube::cluster::tokens_have_the_rights_of_their_account", |_| {
            tokens_have_the_rights_of_their_account()
        }),
        kubernetes::trial(
            "kube::cluster::state_survives_an_api_server_restart",
            state_survives_an_api_server_restart,
        ),
    ]
}

fn virtual_service(namespace: &str) -> Value {
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": { "namespace": namespace, "name": "web" },
        "spec": { "hosts": ["web.example.com"], "http": [{ "route": [{ "destination": { "host": "web" } }] }] } })
}

fn objects_round_trip() -> Result<(), Failed> {
    let namespace = "round-trip";
    for index in 0..kubernetes::SHARED {
        let cluster = kubernetes::shared(index)?;
        cluster.namespace(namespace, &json!({ "istio-injection": "enabled" }))?;
        let written = virtual_service(namespace);
        cluster.api.apply(&written)?;
        let reference = Reference::of(&written);
        let read = cluster.get(&reference)?.ok_or("the object does not exist")?;
        assert_eq!(read["spec"], written["spec"]);
        cluster
            .api
            .patch(&reference, &json!({ "spec": { "hosts": ["other.example.com"] } }))?;
        let listed = cluster
            .api
            .list("networking.istio.io/v1", "VirtualService", namespace)?;
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(listed[0]["spec"]["hosts"], json!(["other.example.com"]));
        cluster.api.delete(&reference)?;
        assert!(cluster.get(&reference)?.is_none(), "the object must be deleted");

        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "namespace": namespace, "name": "web" },
            "spec": { "containers": [{ "name": "web", "image": "web" }] },
            "status": { "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }] } });
        let pod = cluster.api.apply(&pod)?;
        assert_eq!(pod["status"]["podIP"], "10.0.0.1", "the status must be written");
    }
    Ok(())
}

fn tokens_have_the_rights_of_their_account() -> Result<(), Failed> {
    let cluster = kubernetes::shared(0)?;
    let namespace = "token-roles";
    let folder = crate::support::scratch("kube/tokens");
    cluster.account_kubeconfig(namespace, "reader", &folder.join("kubeconfig"))?;
    let token = cluster.token(namespace, "reader", &[])?;
    let reader = Api::new(&cluster.url(), &cluster.authority(), &token)?;
    let refused = reader.list("v1", "ConfigMap", namespace);
    assert!(
        refused.is_err_and(|error| error.contains("forbidden")),
        "an account without a role must have no rights"
    );
    let metadata = json!({ "namespace": namespace, "name": "reader" });
    cluster.api.apply(
        &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata,
        "rules": [{ "apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"] }] }),
    )?;
    cluster.api.apply(
        &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader" },
        "subjects": [{ "kind": "ServiceAccount", "namespace": namespace, "name": "reader" }] }),
    )?;
    wait::until("permission to list", Duration::from_secs(20), || {
        reader.list("v1", "ConfigMap", namespace).ok()
    })?;
    let asked = cluster.audit("system:serviceaccount:token-roles:reader");
    assert!(
        asked
            .iter()
            .any(|request| request.verb == "list" && request.resource == "configmaps" && request.status == 200),
        "the audit log must contain the request: {asked:?}"
    );
    assert!(
        asked.iter().any(|request| request.status == 403),
        "the audit log must contain refused requests"
    );
    Ok(())
}

fn state_survives_an_api_server_restart(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    cluster.namespace("kept", &json!({}))?;
    let object = virtual_service("kept");
    cluster.api.apply(&object)?;
    let token = cluster.token("kept", "nobody", &[]);
    assert!(token.is_err(), "the service account must not exist");
    cluster.account_kubeconfig(
        "kept",
        "account",
        &crate::support::project()
            .join("target/integration")
            .join(name)
            .join("kubeconfig"),
    )?;
    let token = cluster.token("kept", "account", &["istio-ca"])?;
    cluster.stop_server();
    assert!(
        cluster.get(&Reference::of(&object)).is_err(),
        "the API server must be down"
    );
    cluster.compact()?;
    cluster.start_server()?;
    let read = cluster
        .get(&Reference::of(&object))?
        .ok_or("the object does not exist")?;
    assert_eq!(read["spec"], object["spec"]);
    let review = cluster.api.post(
        "/apis/authentication.k8s.io/v1/tokenreviews",
        &json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": { "token": token, "audiences": ["istio-ca"] } }),
    )?;
    assert_eq!(
        review["status"]["user"]["username"],
        "system:serviceaccount:kept:account"
    );
    Ok(())
}
