use std::{cell::Cell, collections::VecDeque, sync::Mutex};

use bytes::Bytes;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::CertificateDer;

use super::{
    endpoint::{INTERVAL, RETRY},
    *,
};
use crate::task::Tasks;

fn params(name: &str, is_ca: bool) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    if is_ca {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    }
    params
}

/// A root, as PEM.
pub(super) fn root(name: &str) -> String {
    let key = KeyPair::generate().expect("a key");
    params(name, true).self_signed(&key).expect("a root").pem()
}

/// The certificate of a PEM text.
pub(super) fn der(pem: &str) -> Vec<u8> {
    CertificateDer::from_pem_slice(pem.as_bytes())
        .expect("valid PEM")
        .to_vec()
}

/// A certificate that is not a CA.
pub(super) fn leaf() -> Vec<u8> {
    let key = KeyPair::generate().expect("a key");
    params("leaf", false).self_signed(&key).expect("a leaf").der().to_vec()
}

fn down() -> RootsError {
    FetchError::Status(503).into()
}

fn own(roots: &[&str]) -> TrustBundle {
    TrustBundle {
        roots: roots.concat().into(),
        crl: None,
    }
}

fn anchor(source: AnchorSource, signers: &[&str], domains: &[&str]) -> Anchor {
    Anchor {
        source,
        signers: signers.iter().map(SmolStr::new).collect(),
        trust_domains: domains.iter().map(SmolStr::new).collect(),
    }
}

fn pem(text: &str, signers: &[&str], domains: &[&str]) -> Anchor {
    anchor(AnchorSource::Pem(text.into()), signers, domains)
}

fn mesh(anchors: Vec<Anchor>) -> MeshTrust {
    MeshTrust {
        trust_domain: "own".into(),
        aliases: vec!["alias".into()],
        anchors,
        ..MeshTrust::default()
    }
}

fn certificates(pem: &str) -> Vec<Certificate> {
    Certificate::all_from_pem(pem.as_bytes()).expect("root certificates")
}

/// The blocks as anchors have them.
fn blocks(pems: &[&str]) -> Vec<String> {
    let mut blocks: Vec<String> = pems
        .iter()
        .flat_map(|pem| certificates(pem))
        .map(|one| one.pem())
        .collect();
    blocks.sort();
    blocks
}

fn pool(trusted: &TrustState, domain: &str) -> Vec<String> {
    let roots = trusted.pools.roots(domain).iter().cloned();
    let mut blocks: Vec<String> = roots
        .map(|root| Certificate::from_der(root).expect("a root").pem())
        .collect();
    blocks.sort();
    blocks
}

#[test]
fn without_multi_root_only_the_own_ca_is_trusted() {
    let (own_root, other, extra, signer) = (root("own_root"), root("other"), root("extra"), root("signer"));
    let mesh = mesh(vec![
        pem(&extra, &[], &[]),
        pem(&signer, &["a/b"], &[]),
        pem(&extra, &[], &["friend"]),
    ]);
    let trusted = TrustState::of(
        &[&own(&[&own_root, &other, &own_root])],
        &mesh,
        &Endpoints::default(),
        false,
    );
    assert_eq!(trusted.anchors, blocks(&[&own_root, &other]), "sorted and unique");
    assert_eq!(pool(&trusted, "own"), blocks(&[&own_root, &other, &signer]));
    assert_eq!(pool(&trusted, "alias"), pool(&trusted, "own"));
    assert_eq!(pool(&trusted, "unknown"), blocks(&[]));
}

#[test]
fn r11_clients_of_other_trust_domains_are_not_admitted() {
    let (own_root, friend) = (root("own_root"), root("friend"));
    let mesh = mesh(vec![
        pem(&friend, &[], &["friend"]),
        pem(&friend, &["a/b"], &["friend"]),
    ]);
    for multi_root in [false, true] {
        let trusted = TrustState::of(&[&own(&[&own_root])], &mesh, &Endpoints::default(), multi_root);
        assert_eq!(trusted.pools.domains.keys().collect::<Vec<_>>(), ["alias", "own"]);
        assert_eq!(pool(&trusted, "own"), blocks(&[&own_root]));
    }
}

#[test]
fn several_roots_are_merged() {
    let (own_root, extra, both) = (root("own_root"), root("extra"), format!("{}{}", root("x"), root("y")));
    let mesh = mesh(vec![
        pem(&extra, &[], &[]),
        pem(&own_root, &[], &[]),
        pem(&both, &[], &["friend", "own"]),
    ]);
    let trusted = TrustState::of(&[&own(&[&own_root])], &mesh, &Endpoints::default(), true);
    assert_eq!(trusted.anchors, blocks(&[&own_root, &extra, &both]));
    assert_eq!(pool(&trusted, "own"), blocks(&[&own_root, &extra, &both]));
    assert_eq!(pool(&trusted, "alias"), blocks(&[&own_root, &extra]));
}

#[test]
fn an_invalid_entry_does_not_affect_others() {
    let (own_root, extra) = (root("own_root"), root("extra"));
    let key = KeyPair::generate().expect("a key");
    let leaf = params("leaf", false).self_signed(&key).expect("a leaf").pem();
    let bad = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
    let mesh = mesh(vec![
        pem(&format!("{extra}{leaf}"), &[], &[]),
        pem(bad, &[], &[]),
        pem(&extra, &[], &[]),
    ]);
    let trusted = TrustState::of(&[&own(&[&own_root])], &mesh, &Endpoints::default(), true);
    assert_eq!(trusted.anchors, blocks(&[&own_root, &extra]));
    let trusted = TrustState::of(&[], &mesh, &Endpoints::default(), true);
    assert_eq!(trusted.anchors, blocks(&[&extra]));
}

#[test]
fn crls_of_the_own_ca_are_used() {
    let key = KeyPair::generate().expect("a key");
    let mut params = params("one", true);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let issuer = Issuer::from_params(&params, &key);
    let list = CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2026, 1, 1),
        next_update: rcgen::date_time_ymd(2027, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: Vec::new(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let list = list.signed_by(&issuer).expect("a list");
    let bundle = TrustBundle {
        crl: Some(Bytes::from(list.pem().expect("valid PEM"))),
        ..own(&[])
    };
    let trusted = TrustState::of(&[&bundle], &mesh(Vec::new()), &Endpoints::default(), false);
    assert_eq!(trusted.pools.crls, [list.der().clone()]);
}

#[test]
fn endpoints_are_fetched_on_schedule_and_keep_their_roots() {
    let now = environment::now();
    let roots = || certificates(&root("one"));
    let mut endpoints = Endpoints::default();
    let urls: Vec<SmolStr> = vec!["https://a".into(), "https://b".into()];
    assert!(!endpoints.set_urls(&urls, now));
    assert_eq!(endpoints.take_due(now), urls);
    assert!(endpoints.take_due(now).is_empty(), "they are being asked");
    let published = roots();
    assert!(endpoints.record_response("https://a", Some(published.clone()), now));
    assert!(!endpoints.record_response("https://b", None, now));
    assert!(endpoints.take_due(now + RETRY / 2).is_empty());
    assert_eq!(endpoints.take_due(now + RETRY), ["https://b"]);
    endpoints.record_response("https://b", None, now);
    assert!(endpoints.take_due(now + RETRY).is_empty(), "twice as long");
    assert_eq!(endpoints.take_due(now + 2 * RETRY), ["https://b"]);
    for _ in 0..20 {
        endpoints.record_response("https://b", None, now);
    }
    assert_eq!(endpoints.take_due(now + INTERVAL), urls);
    assert!(
        !endpoints.record_response("https://a", Some(published.clone()), now),
        "the same again"
    );
    assert!(!endpoints.record_response("https://a", None, now));
    assert_eq!(endpoints.roots("https://a"), published, "the last good roots stay");
    assert!(endpoints.set_urls(&urls[1..], now), "the roots are removed");
    assert!(endpoints.roots("https://a").is_empty());
    assert!(
        !endpoints.record_response("https://a", Some(published), now),
        "the endpoint was removed"
    );
}

#[test]
fn endpoints_are_https() {
    assert_eq!(endpoint::url("https://a/b"), Ok("https://a/b".into()));
    assert_eq!(endpoint::url("a:8443/b"), Ok("https://a:8443/b".into()));
    assert!(endpoint::url("http://a/b").is_err());
    assert!(endpoint::url("file:///etc/passwd").is_err());
}

thread_local! {
    static PASSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

#[tokio::test]
async fn trust_follows_its_sources() {
    let (one, published, later) = (root("one"), root("published"), root("later"));
    let answers: VecDeque<_> = [Ok(certificates(&published)), Err(down()), Ok(certificates(&later))].into();
    let answers = Arc::new(Mutex::new(answers));
    let remaining = answers.clone();
    let (own_sender, own_receiver) = watch::channel(Some(Arc::new(own(&[&one]))));
    let (told_sender, told_receiver) = watch::channel(None);
    let (mesh_sender, mesh_receiver) = watch::channel(None);
    let (pools, mut pools_receiver) = watch::channel(Arc::default());
    let (anchors, mut anchors_receiver) = watch::channel(Arc::default());
    let controller = TrustController {
        own: own_receiver,
        published: told_receiver,
        mesh: mesh_receiver,
        fetch: Some(Arc::new(move |url| {
            assert_eq!(url, "https://friend");
            let answer = answers.lock().expect("a lock").pop_front();
            async move { answer.unwrap_or_else(|| Err(down())) }.boxed()
        })),
        now: || environment::now() + PASSED.get(),
        poll_interval: Duration::from_millis(10),
        pools,
        anchors,
    };
    let tasks = Tasks::default();
    tasks.spawn_until_shutdown("test", controller.run());
    let mut next = async || {
        let changed = tokio::time::timeout(Duration::from_secs(10), anchors_receiver.changed()).await;
        changed.expect("a result in time").expect("an open channel");
        anchors_receiver.borrow_and_update().to_vec()
    };
    assert_eq!(next().await, blocks(&[&one]));
    let endpoint = anchor(AnchorSource::Endpoint("https://friend".into()), &[], &["own"]);
    mesh_sender.send_replace(Some(Arc::new(mesh(vec![endpoint]))));
    assert_eq!(next().await, blocks(&[&one, &published]));
    assert_eq!(pools_receiver.borrow_and_update().roots("own").len(), 2);
    // The second answer is a failure, which changes nothing; the third one comes a minute later.
    PASSED.set(INTERVAL);
    let failed = async {
        while remaining.lock().expect("a lock").len() > 1 {
            tokio::task::yield_now().await;
        }
    };
    let failed = tokio::time::timeout(Duration::from_secs(10), failed).await;
    failed.expect("a second request in time");
    PASSED.set(INTERVAL + RETRY);
    assert_eq!(next().await, blocks(&[&one, &later]));
    mesh_sender.send_replace(Some(Arc::new(mesh(Vec::new()))));
    assert_eq!(next().await, blocks(&[&one]));
    own_sender.send_replace(Some(Arc::new(own(&[&one, &later]))));
    assert_eq!(next().await, blocks(&[&one, &later]));
    told_sender.send_replace(Some(Arc::new(own(&[&published]))));
    assert_eq!(next().await, blocks(&[&one, &later, &published]));
    assert!(tasks.end(Duration::from_secs(5)).await);
}

/// A response that changes nothing, and a change of the mesh config, arrive at the same time.
#[tokio::test]
async fn a_change_during_a_response_is_published() {
    let (one, extra) = (root("one"), root("extra"));
    let endpoint = || anchor(AnchorSource::Endpoint("https://friend".into()), &[], &[]);
    let changed_mesh = Arc::new(mesh(vec![endpoint(), pem(&extra, &[], &[])]));
    let (_own, own_receiver) = watch::channel(Some(Arc::new(own(&[&one]))));
    let (_told, told_receiver) = watch::channel(None);
    let (mesh_sender, mesh_receiver) = watch::channel(Some(Arc::new(mesh(vec![endpoint()]))));
    let (anchors, mut anchors_receiver) = watch::channel(Arc::default());
    let controller = TrustController {
        own: own_receiver,
        published: told_receiver,
        mesh: mesh_receiver,
        fetch: Some(Arc::new(move |_| {
            let (sender, changed_mesh) = (mesh_sender.clone(), changed_mesh.clone());
            async move {
                sender.send_replace(Some(changed_mesh));
                Err(down())
            }
            .boxed()
        })),
        now: environment::now,
        poll_interval: Duration::from_millis(10),
        pools: watch::channel(Arc::default()).0,
        anchors,
    };
    let tasks = Tasks::default();
    tasks.spawn_until_shutdown("test", controller.run());
    let expected = blocks(&[&one, &extra]);
    let published = anchors_receiver.wait_for(|anchors| **anchors == expected);
    let published = tokio::time::timeout(Duration::from_secs(10), published).await;
    assert!(published.is_ok_and(|anchors| anchors.is_ok()), "the change was lost");
    assert!(tasks.end(Duration::from_secs(5)).await);
}
