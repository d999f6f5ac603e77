//! Certificates from Kubernetes CSR signers, and roots in a ClusterTrustBundle.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use futures::future::LocalBoxFuture;
use istiod::ca::authority::TtlLimits;
use istiod::ca::mesh_trust::{Anchor, AnchorSource, MeshTrust};
use istiod::ca::registration::{self, Registration, RegistrationRules};
use istiod::ca::serving::{self, ServingInputs, ServingRules, ServingSource};
use istiod::ca::signing::{SignError, SignErrorKind, SignedCertificate, SigningRequest};
use istiod::environment::Environment;
use istiod::kube::client::{self, Access, Rate};
use istiod::kube::health::WatchMetrics;
use istiod::settings::{DiscoveryFlags, Settings};
use istiod::status::cluster_trust_bundle;
use istiod::status::leader::{Election, Timing};
use istiod::status::watching::Watches;
use libtest_mimic::{Failed, Trial};
use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use serde_json::json;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::tenant::TIMEOUT;
use crate::support::http::RUNTIME;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::signer::Signer;
use crate::support::{scratch, wait};

const DEFAULT: &str = "signers.example.com/default";
const NAMED: &str = "signers.example.com/named";
const OWN: &str = "signers.example.com/own";
const ID: &str = "spiffe://cluster.local/ns/default/sa/reviews";
const SIGN_TIMEOUT: Duration = Duration::from_secs(30);

/// A future that waits for a request.
type Requested<'a> = LocalBoxFuture<'a, Result<(), String>>;

/// Checks a use of signers in a cluster, by a client with the rights that the chart grants. No request is left.
type Check = fn(&Cluster, ::kube::Client) -> Result<(), Failed>;

const CHECKS: [(&str, Check); 4] = [
    ("workload_certificates_are_signed", workload_certificates_are_signed),
    ("no_signing_requests_remain", no_signing_requests_remain),
    ("serving_certificate_is_signed", serving_certificate_is_signed),
    (
        "roots_are_in_a_cluster_trust_bundle",
        roots_are_in_a_cluster_trust_bundle,
    ),
];

pub(super) fn trials() -> Vec<Trial> {
    vec![kubernetes::trial("kube::signers::are_used", are_used)]
}

/// Runs the checks in turn, because each of them counts all requests of the cluster.
fn are_used(trial: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(&format!("{trial}/cluster"))?;
    for (name, check) in CHECKS {
        let client = account(&cluster, "signers", &scratch(&format!("{trial}/{name}")))?;
        let checked = check(&cluster, client);
        checked.map_err(|error| format!("{name}: {}", error.message().unwrap_or("failed")))?;
    }
    Ok(())
}

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    flags: DiscoveryFlags,
}

fn environment() -> Environment {
    Environment::new(Settings {
        flags: Line::parse_from(["istiod"]).flags,
        variables: [].into(),
    })
}

/// A client with the rights that the chart grants.
fn account(cluster: &Cluster, namespace: &str, folder: &Path) -> Result<::kube::Client, String> {
    let path = folder.join("kubeconfig");
    cluster.account_kubeconfig(namespace, "istiod", &path)?;
    let name = format!("{namespace}-signers");
    let rule = |resources: &str, verbs: &[&str], names: &[&str]| {
        json!({ "apiGroups": ["certificates.k8s.io"], "resources": [resources], "verbs": verbs,
            "resourceNames": names })
    };
    let rules = [
        rule(
            "certificatesigningrequests",
            &["create", "get", "delete", "list", "watch"],
            &[],
        ),
        rule("certificatesigningrequests/approval", &["update"], &[]),
        rule("signers", &["approve"], &[DEFAULT, NAMED, OWN]),
        rule(
            "clustertrustbundles",
            &["get", "list", "watch", "create", "update"],
            &[],
        ),
        rule("signers", &["attest"], &["istio.io/istiod-ca"]),
    ];
    cluster.api.apply(
        &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": { "name": name }, "rules": rules }),
    )?;
    cluster.api.apply(
        &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": { "name": name },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
        "subjects": [{ "kind": "ServiceAccount", "namespace": namespace, "name": "istiod" }] }),
    )?;
    let rate = Rate {
        per_second: 0.0,
        burst: 0,
    };
    RUNTIME
        .block_on(client::client(&Access::Kubeconfig(path), rate))
        .map_err(|error| error.to_string())
}

/// A mesh config with the roots of signers.
fn mesh(signer: &Signer, names: &[&str]) -> watch::Sender<Option<Arc<MeshTrust>>> {
    let anchors = names.iter().map(|name| Anchor {
        source: AnchorSource::Pem(signer.root(name).to_owned()),
        signers: vec![(*name).into()],
        trust_domains: Vec::new(),
    });
    watch::Sender::new(Some(Arc::new(MeshTrust {
        anchors: anchors.collect(),
        ..MeshTrust::default()
    })))
}

fn register(
    environment: &Environment,
    client: ::kube::Client,
    mesh: &watch::Sender<Option<Arc<MeshTrust>>>,
) -> Result<Registration, Failed> {
    let hours = |hours| Duration::from_hours(hours);
    let rules = RegistrationRules {
        signer: DEFAULT.into(),
        domain: "signers.example.com".into(),
        roots: None,
        own_signer: OWN.into(),
        limits: TtlLimits {
            default: hours(24),
            max: hours(48),
        },
    };
    let _runtime = RUNTIME.enter();
    Ok(registration::start(environment, rules, Some(client), mesh.subscribe())?)
}

/// A request for `id` by the caller [`ID`].
fn request(id: &str, signer: &str) -> SigningRequest {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(id.try_into().expect("ASCII text"))];
    let key = KeyPair::generate().expect("key generation succeeds");
    let csr = params
        .serialize_request(&key)
        .and_then(|request| request.pem())
        .expect("the request can be signed");
    SigningRequest {
        csr: csr.into_bytes(),
        identities: vec![ID.into()],
        lifetime: Some(Duration::from_hours(1)),
        signer: signer.into(),
    }
}

fn sign(registration: &Registration, request: SigningRequest) -> Result<SignedCertificate, SignError> {
    RUNTIME.block_on(registration.signer.sign(request))
}

fn requests(cluster: &Cluster) -> Result<usize, String> {
    let all = cluster
        .api
        .list("certificates.k8s.io/v1", "CertificateSigningRequest", "")?;
    Ok(all.len())
}

/// Runs `action` with a future that waits until the cluster has a CertificateSigningRequest.
fn once_requested<T>(
    cluster: &Cluster,
    action: impl AsyncFnOnce(Requested<'_>) -> Result<T, String>,
) -> Result<T, String> {
    let (sender, receiver) = oneshot::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let requested = wait::until("one CertificateSigningRequest", TIMEOUT, || {
                (requests(cluster).ok()? == 1).then_some(())
            });
            // The action may have ended.
            let _ = sender.send(requested);
        });
        let requested = async { receiver.await.map_err(|error| error.to_string())? };
        RUNTIME.block_on(action(Box::pin(requested)))
    })
}

fn until_none_is_left(cluster: &Cluster) -> Result<(), String> {
    wait::until("no CertificateSigningRequest", TIMEOUT, || {
        (requests(cluster).ok()? == 0).then_some(())
    })
}

fn workload_certificates_are_signed(cluster: &Cluster, client: ::kube::Client) -> Result<(), Failed> {
    let signer = Signer::start(&cluster.api, &[DEFAULT, NAMED]);
    let mesh = mesh(&signer, &[DEFAULT, NAMED]);
    let environment = environment();
    let mut registration = register(&environment, client, &mesh)?;

    let issued = sign(&registration, request(ID, ""))?;
    assert_eq!(issued.chain.len(), 1, "the chain must hold only the leaf");
    assert_eq!(issued.roots.trim(), signer.root(DEFAULT).trim());
    let named = sign(&registration, request(ID, "named"))?;
    assert_eq!(named.roots.trim(), signer.root(NAMED).trim());
    let signed = signer.signed();
    assert_eq!(signed.len(), 2);
    assert_eq!(signed[0]["expirationSeconds"], 3600);
    let usages = json!(["digital signature", "key encipherment", "server auth", "client auth"]);
    assert_eq!(signed[0]["usages"], usages);
    assert_eq!(signed[1]["signerName"], NAMED);
    assert_eq!(signed[0]["username"], "system:serviceaccount:signers:istiod");

    // A caller must not request another identity or a signer that it may not use.
    let other = sign(&registration, request("spiffe://cluster.local/ns/default/sa/other", ""));
    let error = other.expect_err("another identity");
    assert_eq!(error.kind, SignErrorKind::Csr);
    assert!(
        error.text.starts_with("unable to validate SAN Identities in CSR"),
        "{error}"
    );
    let error = sign(&registration, request(ID, "forbidden")).expect_err("the signer is forbidden");
    assert_eq!(error.kind, SignErrorKind::Generation);
    assert!(
        error.text.contains("approve") && error.text.contains("ClusterRole"),
        "{error}"
    );
    assert_eq!(signer.signed().len(), 2);
    until_none_is_left(cluster)?;

    let trust = RUNTIME.block_on(async {
        let known = tokio::time::timeout(SIGN_TIMEOUT, registration.trust.wait_for(Option::is_some)).await;
        known
            .expect("the change arrives in time")
            .expect("the watch is open")
            .clone()
    });
    let trust = trust.ok_or("no trust bundle")?;
    assert_eq!(trust.roots, signer.root(DEFAULT).replace("\r\n", "\n"));
    RUNTIME.block_on(environment.tasks.end(SIGN_TIMEOUT));
    Ok(())
}

fn no_signing_requests_remain(cluster: &Cluster, client: ::kube::Client) -> Result<(), Failed> {
    let signer = Signer::start(&cluster.api, &[DEFAULT]);
    signer.pause(true);
    let mesh = mesh(&signer, &[DEFAULT]);
    let environment = environment();
    let registration = register(&environment, client, &mesh)?;

    // The caller disconnects before the signer has signed.
    once_requested(cluster, async |requested| {
        tokio::select! {
            _ = registration.signer.sign(request(ID, "")) => Err("no signer is running".to_owned()),
            requested = requested => requested,
        }
    })?;
    signer.pause(false);
    until_none_is_left(cluster)?;

    // The process ends before the signer has signed.
    signer.pause(true);
    let (signed, ended) = once_requested(cluster, async |requested| {
        let signing = registration.signer.sign(request(ID, ""));
        let ending = async {
            requested.await?;
            Ok::<_, String>(environment.tasks.end(SIGN_TIMEOUT).await)
        };
        let (signed, ended) = tokio::join!(signing, ending);
        Ok::<_, String>((signed, ended?))
    })?;
    assert_eq!(signed.expect_err("the process has ended").kind, SignErrorKind::NotReady);
    assert!(ended);
    assert_eq!(requests(cluster)?, 0);
    Ok(())
}

fn serving_certificate_is_signed(cluster: &Cluster, client: ::kube::Client) -> Result<(), Failed> {
    let signer = Signer::start(&cluster.api, &[OWN, NAMED]);
    let mesh_sender = mesh(&signer, &[OWN]);
    let environment = environment();
    let rules = ServingRules {
        source: ServingSource::Kubernetes { signer: OWN.into() },
        names: ["istiod.signers.svc".into()].into(),
        lifetime: Duration::from_hours(1),
    };
    let inputs = ServingInputs {
        authority: watch::channel(None).1,
        trust: watch::channel(None).1,
        mesh: mesh_sender.subscribe(),
        client: Some(client),
    };
    let mut serving = {
        let _runtime = RUNTIME.enter();
        serving::start(&environment, rules, inputs)
    };
    let mut next = || {
        RUNTIME.block_on(async {
            let changed = tokio::time::timeout(SIGN_TIMEOUT, serving.changed()).await;
            changed.expect("the change arrives in time").expect("the watch is open");
            serving.borrow_and_update().clone().expect("the certificate is valid")
        })
    };
    let first = next();
    assert_eq!(first.roots, signer.root(OWN));
    let signed = signer.signed();
    assert_eq!(
        signed[0]["usages"],
        json!(["digital signature", "key encipherment", "server auth"])
    );

    // Another root of the signer in the mesh config triggers a new certificate.
    let both = format!("{}{}", signer.root(OWN), signer.root(NAMED));
    mesh_sender.send_modify(|mesh| {
        let mut changed = MeshTrust::clone(mesh.as_ref().expect("the mesh config is known"));
        changed.anchors[0].source = AnchorSource::Pem(both.clone());
        *mesh = Some(Arc::new(changed));
    });
    let second = next();
    assert_eq!(second.roots, both);
    assert_ne!(second.key.cert, first.key.cert);
    until_none_is_left(cluster)?;
    RUNTIME.block_on(environment.tasks.end(SIGN_TIMEOUT));
    Ok(())
}

fn roots_are_in_a_cluster_trust_bundle(cluster: &Cluster, client: ::kube::Client) -> Result<(), Failed> {
    // A signer's root is published like any other.
    let signer = Signer::start(&cluster.api, &[DEFAULT, NAMED]);
    let (one, other) = (signer.root(DEFAULT), signer.root(NAMED));
    let roots = watch::Sender::new(None);
    let election = Election {
        client: client.clone(),
        namespace: "signers".into(),
        identity: "istiod-1".into(),
        revision: "default".into(),
        remote: false,
        enabled: false,
        default_revision: watch::channel("".into()).1,
        shutdown: CancellationToken::new(),
        timing: Timing::default(),
    };
    let watches = Watches {
        client,
        cluster: "Kubernetes".into(),
        metrics: WatchMetrics::new(&prometheus::Registry::new())?,
    };
    let (receiver, shutdown) = (roots.subscribe(), election.shutdown.clone());
    let environment = environment();
    {
        let _runtime = RUNTIME.enter();
        environment.tasks.spawn("bundle", async move {
            cluster_trust_bundle::run(&election, watches, receiver).await;
        });
    }
    let reference = Reference::new(
        "certificates.k8s.io/v1beta1",
        "ClusterTrustBundle",
        "",
        "istio.io:istiod-ca:root-cert",
    );
    let until = |expected: &str| {
        wait::until("the roots in the ClusterTrustBundle", TIMEOUT, || {
            let found = cluster.get(&reference).ok()??;
            assert_eq!(found["spec"]["signerName"], "istio.io/istiod-ca");
            (found["spec"]["trustBundle"] == expected).then_some(())
        })
    };
    let lines = |text: &str| text.replace("\r\n", "\n");
    let (one, other) = (lines(one), lines(other));
    let set = |text: String| roots.send_replace(Some(Bytes::from(text)));
    set(format!("# a comment\n{one}{one}"));
    until(&one)?;
    set(format!("{one}{other}"));
    until(&format!("{one}{other}"))?;
    cluster
        .api
        .patch(&reference, &json!({ "spec": { "trustBundle": other } }))?;
    until(&format!("{one}{other}"))?;
    cluster.api.delete(&reference)?;
    until(&format!("{one}{other}"))?;
    shutdown.cancel();
    RUNTIME.block_on(environment.tasks.end(SIGN_TIMEOUT));
    Ok(())
}
