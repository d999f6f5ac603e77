//! Service account tokens, reviewed by the API server of their cluster.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue};
use istiod::auth::{AuthenticationError, Authenticator, Caller, Credentials, KubernetesTokens};
use istiod::kube::client::{self, Access, Rate};
use istiod::kube::clients::Clients;
use libtest_mimic::{Failed, Trial};
use serde_json::json;
use tokio::sync::watch;

use super::tenant::TIMEOUT;
use crate::support::http::RUNTIME;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::{ports, scratch, wait};

const AUDIENCE: &str = "istio-ca";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "kube::tokens::tokens_are_reviewed_by_the_api_server",
            tokens_are_reviewed_by_the_api_server,
        ),
        kubernetes::trial("kube::tokens::tokens_need_the_audience", tokens_need_the_audience),
        kubernetes::trial(
            "kube::tokens::tokens_of_deleted_objects_are_refused",
            tokens_of_deleted_objects_are_refused,
        ),
        kubernetes::trial(
            "kube::tokens::each_cluster_reviews_its_own_tokens",
            each_cluster_reviews_its_own_tokens,
        ),
        kubernetes::trial(
            "kube::tokens::review_failures_are_not_refusals",
            review_failures_are_not_refusals,
        ),
    ]
}

/// An account that may only create token reviews.
fn reviewer(cluster: &Cluster, namespace: &str, path: &Path) -> Result<(), String> {
    cluster.account_kubeconfig(namespace, "istiod", path)?;
    let name = format!("{namespace}-reviewer");
    cluster.api.apply(
        &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": name },
        "rules": [{ "apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"] }] }),
    )?;
    cluster.api.apply(
        &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": { "name": name },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
        "subjects": [{ "kind": "ServiceAccount", "namespace": namespace, "name": "istiod" }] }),
    )?;
    Ok(())
}

/// An authenticator that uses the API servers of these kubeconfigs.
fn authenticator(kubeconfigs: &[(&str, &Path)]) -> Result<KubernetesTokens, String> {
    let rate = Rate {
        per_second: 0.0,
        burst: 0,
    };
    let mut clients = BTreeMap::new();
    for (cluster, path) in kubeconfigs {
        let access = Access::Kubeconfig(path.to_path_buf());
        let client = RUNTIME
            .block_on(client::client(&access, rate))
            .map_err(|error| error.to_string())?;
        clients.insert((*cluster).into(), client);
    }
    let clients = Clients::new(
        "Kubernetes".into(),
        BTreeMap::new(),
        watch::channel(Arc::new(clients)).1,
    );
    Ok(KubernetesTokens::new(
        clients,
        &[AUDIENCE.into()],
        watch::channel(Arc::default()).1,
    ))
}

fn ask(authenticator: &KubernetesTokens, token: &str, cluster: &str) -> Result<Caller, AuthenticationError> {
    let mut headers = HeaderMap::new();
    let bearer = HeaderValue::from_str(&format!("Bearer {token}")).expect("tokens are text");
    headers.insert("authorization", bearer);
    headers.insert("clusterid", HeaderValue::from_str(cluster).expect("names are text"));
    let credentials = Credentials {
        address: None,
        is_tls: true,
        certificate: None,
        headers: &headers,
    };
    RUNTIME.block_on(authenticator.authenticate(credentials))
}

/// Creates a service account and a pod of it. Returns the pod's uid.
fn workload(cluster: &Cluster, namespace: &str, account: &str) -> Result<String, String> {
    cluster.namespace(namespace, &json!({}))?;
    cluster.service_account(namespace, account)?;
    let pod = cluster.api.create(&json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": namespace, "name": format!("{account}-1") },
        "spec": { "serviceAccountName": account, "containers": [{ "name": "app", "image": "app" }] } }))?;
    Ok(pod["metadata"]["uid"].as_str().ok_or("a pod without uid")?.to_owned())
}

/// A token as mounted in a pod.
fn bound_token(cluster: &Cluster, namespace: &str, account: &str, uid: &str) -> Result<String, String> {
    let pod = json!({ "metadata": { "name": format!("{account}-1"), "uid": uid } });
    cluster.bound_token(namespace, account, AUDIENCE, &pod)
}

fn setup(trial: &str) -> Result<(&'static Cluster, String, std::path::PathBuf), String> {
    let cluster = kubernetes::shared(0)?;
    let namespace = trial.trim_start_matches("kube/").replace(['_', '/'], "-");
    let path = scratch(&format!("{trial}/work")).join("istiod.kubeconfig");
    reviewer(cluster, &namespace, &path)?;
    Ok((cluster, namespace, path))
}

fn tokens_are_reviewed_by_the_api_server(trial: &str) -> Result<(), Failed> {
    let (cluster, namespace, path) = setup(trial)?;
    let uid = workload(cluster, &namespace, "reviews")?;
    let token = bound_token(cluster, &namespace, "reviews", &uid)?;
    let caller = ask(&authenticator(&[("Kubernetes", &path)])?, &token, "Kubernetes")?;
    assert_eq!(
        caller.identities,
        [format!("spiffe://cluster.local/ns/{namespace}/sa/reviews")]
    );
    let info = caller
        .kubernetes
        .ok_or("the token must be reviewed by the API server")?;
    assert_eq!(
        (info.pod_name.as_str(), info.pod_uid.as_str()),
        ("reviews-1", uid.as_str())
    );
    assert!(caller.expires_at.is_some());
    // A token that is not bound to a pod.
    let unbound = cluster.token(&namespace, "reviews", &[AUDIENCE])?;
    let caller = ask(&authenticator(&[("Kubernetes", &path)])?, &unbound, "")?;
    assert_eq!(
        caller
            .kubernetes
            .ok_or("the token must be reviewed by the API server")?
            .pod_uid,
        ""
    );
    Ok(())
}

fn tokens_need_the_audience(trial: &str) -> Result<(), Failed> {
    let (cluster, namespace, path) = setup(trial)?;
    workload(cluster, &namespace, "reviews")?;
    let authenticator = authenticator(&[("Kubernetes", &path)])?;
    for audiences in [&[][..], &["other"], &["istio-ca-2", "https://kubernetes.default.svc"]] {
        let token = cluster.token(&namespace, "reviews", audiences)?;
        let refused = ask(&authenticator, &token, "");
        assert!(
            matches!(refused, Err(AuthenticationError::Invalid(_))),
            "{audiences:?}: {refused:?}"
        );
    }
    let both = cluster.token(&namespace, "reviews", &["other", AUDIENCE])?;
    assert!(ask(&authenticator, &both, "").is_ok());
    let (message, signature) = both.rsplit_once('.').ok_or("a JWT")?;
    let forged = format!("{message}.{}", signature.chars().rev().collect::<String>());
    let refused = ask(&authenticator, &forged, "");
    assert!(matches!(refused, Err(AuthenticationError::Invalid(_))), "{refused:?}");
    // The administrator's token is valid, but is not a service account JWT.
    assert!(ask(&authenticator, "administrator", "").is_err());
    Ok(())
}

fn tokens_of_deleted_objects_are_refused(trial: &str) -> Result<(), Failed> {
    let (cluster, namespace, path) = setup(trial)?;
    let authenticator = authenticator(&[("Kubernetes", &path)])?;
    let gone = |token: &str| wait::until("a refusal", TIMEOUT, || ask(&authenticator, token, "").err());
    let uid = workload(cluster, &namespace, "reviews")?;
    let of_pod = bound_token(cluster, &namespace, "reviews", &uid)?;
    let of_account = cluster.token(&namespace, "reviews", &[AUDIENCE])?;
    assert!(ask(&authenticator, &of_pod, "").is_ok() && ask(&authenticator, &of_account, "").is_ok());
    cluster
        .api
        .delete(&Reference::new("v1", "Pod", &namespace, "reviews-1"))?;
    assert!(matches!(gone(&of_pod)?, AuthenticationError::Invalid(_)));
    assert!(ask(&authenticator, &of_account, "").is_ok(), "the account still exists");
    cluster
        .api
        .delete(&Reference::new("v1", "ServiceAccount", &namespace, "reviews"))?;
    assert!(matches!(gone(&of_account)?, AuthenticationError::Invalid(_)));
    Ok(())
}

fn each_cluster_reviews_its_own_tokens(trial: &str) -> Result<(), Failed> {
    let (own, namespace, path) = setup(trial)?;
    let remote = kubernetes::shared(1)?;
    let remote_path = path.with_file_name("remote.kubeconfig");
    reviewer(remote, &namespace, &remote_path)?;
    workload(own, &namespace, "here")?;
    workload(remote, &namespace, "there")?;
    let authenticator = authenticator(&[("Kubernetes", &path), ("remote", &remote_path)])?;
    let here = own.token(&namespace, "here", &[AUDIENCE])?;
    let there = remote.token(&namespace, "there", &[AUDIENCE])?;
    let caller = ask(&authenticator, &there, "remote")?;
    assert_eq!(
        caller.identities,
        [format!("spiffe://cluster.local/ns/{namespace}/sa/there")]
    );
    assert_eq!(
        caller
            .kubernetes
            .ok_or("the token must be reviewed by the API server")?
            .cluster,
        "remote"
    );
    assert!(ask(&authenticator, &here, "Kubernetes").is_ok());
    for (token, cluster) in [
        (&there, ""),
        (&there, "Kubernetes"),
        (&here, "remote"),
        (&here, "elsewhere"),
    ] {
        let refused = ask(&authenticator, token, cluster);
        assert!(
            matches!(refused, Err(AuthenticationError::Invalid(_))),
            "{cluster}: {refused:?}"
        );
    }
    Ok(())
}

fn review_failures_are_not_refusals(trial: &str) -> Result<(), Failed> {
    let (cluster, namespace, path) = setup(trial)?;
    workload(cluster, &namespace, "reviews")?;
    let token = cluster.token(&namespace, "reviews", &[AUDIENCE])?;
    let unprivileged = path.with_file_name("nobody.kubeconfig");
    cluster.account_kubeconfig(&namespace, "nobody", &unprivileged)?;
    let closed = path.with_file_name("closed.kubeconfig");
    cluster.write_admin_kubeconfig(&closed, &format!("https://127.0.0.1:{}", ports::free()));
    let servers = [
        ("Kubernetes", path.as_path()),
        ("mute", &unprivileged),
        ("away", &closed),
    ];
    let authenticator = authenticator(&servers)?;
    assert!(ask(&authenticator, &token, "").is_ok());
    for cluster in ["mute", "away"] {
        let refused = ask(&authenticator, &token, cluster);
        assert!(
            matches!(refused, Err(AuthenticationError::Unavailable(_))),
            "{cluster}: {refused:?}"
        );
    }
    let hint = ask(&authenticator, &token, "mute")
        .map(drop)
        .map_err(|refused| refused.to_string());
    assert!(hint.is_err_and(|hint| hint.contains("tokenreviews.authentication.k8s.io")));
    Ok(())
}
