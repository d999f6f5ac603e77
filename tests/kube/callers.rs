//! Authorization of certificate requests, by the credentials of the caller.

use std::path::Path;
use std::process::Command;

use istiod::auth::tls::PeerCertificate;
use istiod::proto::istio::v1::auth::IstioCertificateRequest;
use istiod::proto::json::struct_from_json;
use libtest_mimic::{Failed, Trial};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::json;
use tonic::{Code, Status};

use super::tenant::{TIMEOUT, Tenant};
use crate::support::agent::{Agent, ClientCredentials, KeyKind, Trust, signing_request};
use crate::support::daemon::Daemon;
use crate::support::http::RUNTIME;
use crate::support::kubernetes::{self, Cluster};
use crate::support::wait;

const AUDIENCE: &str = "istio-ca";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial(
            "kube::callers::r11_forwarded_headers_of_untrusted_clients_are_ignored",
            r11_forwarded_headers_of_untrusted_clients_are_ignored,
        ),
        kubernetes::trial(
            "kube::callers::node_accounts_request_certificates_for_their_pods",
            node_accounts_request_certificates_for_their_pods,
        ),
        kubernetes::trial(
            "kube::callers::remote_tokens_are_reviewed_by_their_cluster",
            remote_tokens_are_reviewed_by_their_cluster,
        ),
    ]
}

fn daemon(tenant: &Tenant<'_>, name: &str, configure: impl FnOnce(&mut Command)) -> Result<Daemon, String> {
    let kubeconfig = tenant.cluster.admin_kubeconfig();
    Daemon::secured(&tenant.folder.join(name), |command| {
        command
            .arg("--kubeconfig")
            .arg(&kubeconfig)
            .args(["-n", &tenant.system]);
        configure(command);
    })
}

/// Requests a certificate, for another identity if one is given. Returns the names in it.
fn ask(daemon: &Daemon, credentials: &ClientCredentials, impersonated: &str) -> Result<Vec<String>, Status> {
    let (_, csr) = signing_request(KeyKind::Ecdsa);
    let metadata = json!({ "ImpersonatedIdentity": impersonated });
    let request = IstioCertificateRequest {
        csr,
        validity_duration: 3600,
        metadata: metadata.as_object().map(struct_from_json),
    };
    let entries = RUNTIME.block_on(Agent::new(daemon.secure, Trust::Anything).sign(credentials, request))?;
    let leaf = entries
        .first()
        .map(|leaf| CertificateDer::from_pem_slice(leaf.as_bytes()));
    let leaf = leaf
        .and_then(Result::ok)
        .ok_or_else(|| Status::internal("no certificate"))?;
    let leaf = PeerCertificate::of_leaf(&leaf).map_err(|error| Status::internal(error.to_string()))?;
    Ok(leaf.identities.iter().map(ToString::to_string).collect())
}

fn refused(answer: Result<Vec<String>, Status>, message: &str, what: &str) -> Result<(), String> {
    match answer {
        Err(status) if status.code() == Code::Unauthenticated && status.message() == message => Ok(()),
        other => Err(format!("{what}: {other:?}")),
    }
}

/// Creates a service account with a running pod. Returns the token mounted in the pod.
fn workload(cluster: &Cluster, namespace: &str, account: &str, node: &str) -> Result<String, String> {
    cluster.service_account(namespace, account)?;
    let name = format!("{account}-1");
    let pod = cluster.api.apply(&json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": namespace, "name": name },
        "spec": { "serviceAccountName": account, "nodeName": node, "containers": [{ "name": "app", "image": "app" }] },
        "status": { "phase": "Running" } }))?;
    cluster.bound_token(namespace, account, AUDIENCE, &pod)
}

/// All callers come from 127.0.0.1, which is not a trusted gateway by default.
fn r11_forwarded_headers_of_untrusted_clients_are_ignored(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    let evil = "spiffe://cluster.local/ns/istio-system/sa/istiod";
    let forged = ClientCredentials {
        headers: vec![
            ("x-forwarded-client-cert", format!("By=x;URI={evil}")),
            ("x-forwarded-for", "127.0.0.1".to_owned()),
        ],
        ..ClientCredentials::default()
    };
    let unauthenticated = "request authenticate failure";
    let closed = daemon(&tenant, "closed.log", |_| {})?;
    refused(ask(&closed, &forged, ""), unauthenticated, "no gateway is trusted")?;
    refused(
        ask(&closed, &ClientCredentials::default(), ""),
        unauthenticated,
        "no credentials",
    )?;
    drop(closed);
    // With trusted gateways configured, those on the local host are trusted as well.
    let open = daemon(&tenant, "open.log", |command| {
        command.env("TRUSTED_GATEWAY_CIDR", "192.0.2.0/24");
    })?;
    assert_eq!(ask(&open, &forged, "")?, [evil]);
    refused(
        ask(&open, &ClientCredentials::default(), ""),
        unauthenticated,
        "no credentials",
    )?;
    Ok(())
}

fn node_accounts_request_certificates_for_their_pods(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    let node = |number: u8| tenant.fill(&format!("{{trial}}-{number}"));
    let ztunnel = workload(tenant.cluster, &tenant.system, "ztunnel", &node(1))?;
    let here = workload(tenant.cluster, &tenant.app, "here", &node(1))?;
    workload(tenant.cluster, &tenant.app, "there", &node(2))?;
    let accounts = format!("{}/ztunnel", tenant.system);
    let daemon = daemon(&tenant, "istiod.log", |command| {
        command.env("CA_TRUSTED_NODE_ACCOUNTS", &accounts);
    })?;
    let id = |account: &str| format!("spiffe://cluster.local/ns/{}/sa/{account}", tenant.app);
    let ztunnel = ClientCredentials::token(ztunnel);
    assert_eq!(ask(&daemon, &ztunnel, &id("here"))?, [id("here")]);
    let own = format!("spiffe://cluster.local/ns/{}/sa/ztunnel", tenant.system);
    assert_eq!(ask(&daemon, &ztunnel, "")?, [own]);
    let impersonation_refused = "request impersonation authentication failure";
    for other in [
        id("there"),
        id("nobody"),
        id("here").replace("cluster.local", "elsewhere"),
        "here".to_owned(),
    ] {
        refused(ask(&daemon, &ztunnel, &other), impersonation_refused, &other)?;
    }
    let here = ClientCredentials::token(here);
    refused(
        ask(&daemon, &here, &id("here")),
        impersonation_refused,
        "a workload must not request certificates for others",
    )?;
    // A token without a pod binding belongs to no node.
    let unbound = ClientCredentials::token(tenant.cluster.token(&tenant.system, "ztunnel", &[AUDIENCE])?);
    refused(ask(&daemon, &unbound, &id("here")), impersonation_refused, "no pod")?;
    Ok(())
}

fn remote_tokens_are_reviewed_by_their_cluster(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    let remote = kubernetes::shared(1)?;
    tenant.namespaces(remote)?;
    let path = tenant.folder.join("remote.kubeconfig");
    remote.write_admin_kubeconfig(&path, &remote.url());
    let text = read(&path)?;
    let id = tenant.fill("west-{trial}");
    tenant.cluster.api.apply(&json!({ "apiVersion": "v1", "kind": "Secret",
        "metadata": { "namespace": tenant.system, "name": "remote", "labels": { "istio/multiCluster": "true" } },
        "stringData": { id.as_str(): text } }))?;
    let here = workload(tenant.cluster, &tenant.app, "here", "")?;
    let there = workload(remote, &tenant.app, "there", "")?;
    let daemon = daemon(&tenant, "istiod.log", |_| {})?;
    let of = |token: &str, cluster: &str| ClientCredentials {
        cluster: Some(cluster.to_owned()),
        ..ClientCredentials::token(token)
    };
    let names = |account: &str| vec![format!("spiffe://cluster.local/ns/{}/sa/{account}", tenant.app)];
    assert_eq!(ask(&daemon, &of(&here, "Kubernetes"), "")?, names("here"));
    let joined = wait::until("a certificate of the remote cluster's workload", TIMEOUT, || {
        ask(&daemon, &of(&there, &id), "").ok()
    })?;
    assert_eq!(joined, names("there"));
    let pairs = [
        (&there, "Kubernetes"),
        (&there, ""),
        (&here, id.as_str()),
        (&there, "elsewhere"),
    ];
    for (token, cluster) in pairs {
        refused(
            ask(&daemon, &of(token, cluster), ""),
            "request authenticate failure",
            cluster,
        )?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| error.to_string())
}
