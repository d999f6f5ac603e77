use serde_json::json;

use super::*;
use crate::{
    base::Shared,
    model::{Installation, World, change::Change, fixture, inputs::Row},
};

fn reference(name: &str) -> Result<(Store, String), NameError> {
    let reference = Reference::parse(name, &Namespace::new("own"))?;
    Ok((reference.store, format!("{}/{}", reference.namespace, reference.name)))
}

#[test]
fn credential_names_are_parsed() {
    for (credential, resource) in [
        ("cred", "kubernetes://cred"),
        ("ns/cred", "kubernetes://ns/cred"),
        ("kubernetes-gateway://ns/cred", "kubernetes-gateway://ns/cred"),
        ("builtin://", "default"),
        ("invalid://-cacert", "invalid://"),
    ] {
        assert_eq!(resource_name(credential), resource);
    }
    for (name, store, is) in [
        ("kubernetes://cred", Store::Secret, "own/cred"),
        ("kubernetes://ns/cred", Store::Secret, "ns/cred"),
        ("kubernetes://ns/cred/more", Store::Secret, "ns/cred"),
        ("kubernetes-gateway://ns/cred", Store::GatewaySecret, "ns/cred"),
        ("configmap://ns/roots", Store::ConfigMap, "ns/roots"),
    ] {
        assert_eq!(reference(name), Ok((store, is.to_owned())), "{name}");
    }
    for (name, error) in [
        ("configmap://roots", NameError::Parts),
        ("configmap:///roots", NameError::Parts),
        ("kubernetes-gateway://ns/", NameError::Parts),
        ("file:///etc/passwd", NameError::Scheme),
        ("default", NameError::Scheme),
    ] {
        assert_eq!(reference(name), Err(error), "{name}");
    }
}

/// A world with Secrets, each `cluster`, `namespace/name`, type and plain data.
fn mesh(secrets: &[(&str, &str, &str, serde_json::Value)]) -> Shared<MeshSnapshot> {
    let rows = secrets.iter().map(|(cluster, name, kind, data)| {
        let mut meta = (*fixture::meta(crate::api::Kind::Secret, name, 0)).clone();
        meta.key.cluster = ClusterId::new(cluster);
        let object = json!({"type": kind, "stringData": data});
        Change::Upsert(Row::from(Secret::parse(Shared::new(meta), &object).unwrap()))
    });
    let snapshot = World::new(Installation::default()).commit(rows.collect()).snapshot;
    Shared::new((*snapshot).clone())
}

#[test]
fn certificates_are_read_in_all_secret_formats() {
    let mesh = mesh(&[
        (
            "Kubernetes",
            "n/tls",
            "",
            json!({"tls.crt": "c", "tls.key": "k", "tls.ocsp-staple": "s"}),
        ),
        (
            "Kubernetes",
            "n/generic",
            "",
            json!({"cert": "gc", "key": "gk", "tls.crt": "c", "tls.key": "k"}),
        ),
        (
            "Kubernetes",
            "n/half",
            "",
            json!({"cert": "gc", "key": "", "tls.crt": "c", "tls.key": "k"}),
        ),
        ("Kubernetes", "n/empty", "", json!({"tls.crt": "", "tls.key": ""})),
        ("Kubernetes", "n/other", "", json!({"a": "", "b": ""})),
    ]);
    let (cx, cluster, namespace) = (Cx::untracked(), ClusterId::new("Kubernetes"), Namespace::new("n"));
    let secrets = Secrets::of(&cx, &mesh, &cluster);
    let chain = |name: &str| secrets.certificate(&namespace, name).map(|found| found.chain);
    assert_eq!(secrets.certificate(&namespace, "tls").unwrap().staple, Some("s".into()));
    assert_eq!(
        (chain("tls"), chain("generic"), chain("half")),
        (Ok("c".into()), Ok("gc".into()), Ok("c".into()))
    );
    assert_eq!(
        chain("empty").unwrap_err(),
        "found keys \"tls.crt\" and \"tls.key\", but they were empty"
    );
    assert!(chain("other").unwrap_err().ends_with("found: a, b"));
    assert_eq!(chain("absent").unwrap_err(), "there is no such Secret");
}

#[test]
fn ca_certificates_may_be_in_a_separate_secret() {
    let mesh = mesh(&[
        ("Kubernetes", "n/own", "", json!({"ca.crt": "base"})),
        (
            "Kubernetes",
            "n/own-cacert",
            "",
            json!({"cacert": "own", "crl": "", "ca.crt": "not"}),
        ),
        (
            "Kubernetes",
            "n/shared",
            "",
            json!({"ca.crt": "shared", "ca.crl": "revoked"}),
        ),
        ("Kubernetes", "n/bad", "", json!({"ca.crt": "base"})),
        ("Kubernetes", "n/bad-cacert", "", json!({"other": ""})),
    ]);
    let (cx, cluster, namespace) = (Cx::untracked(), ClusterId::new("Kubernetes"), Namespace::new("n"));
    let secrets = Secrets::of(&cx, &mesh, &cluster);
    let of = |name: &str| {
        secrets
            .authority(&namespace, name)
            .map(|found| (found.roots, found.revoked))
    };
    assert_eq!(of("own-cacert"), Ok(("own".into(), Some("".into()))));
    assert_eq!(of("shared-cacert"), Ok(("shared".into(), Some("revoked".into()))));
    assert_eq!(
        of("bad-cacert").unwrap_err(),
        "found secret, but didn't have expected keys cacert or ca.crt; found: other"
    );
}

#[test]
fn the_proxys_cluster_takes_precedence() {
    let mesh = mesh(&[
        ("Kubernetes", "n/both", "", json!({"cert": "config", "key": "k"})),
        ("c2", "n/both", "", json!({"cert": "remote", "key": "k"})),
        ("Kubernetes", "n/one", "", json!({"cert": "config", "key": "k"})),
        ("c3", "n/one", "", json!({})),
        ("c2", "n/pull", DOCKER_CONFIG_TYPE, json!({DOCKER_CONFIG: "{}"})),
        ("Kubernetes", "n/untyped", "Opaque", json!({DOCKER_CONFIG: "{}"})),
    ]);
    let (cx, namespace) = (Cx::untracked(), Namespace::new("n"));
    let (remote, third) = (ClusterId::new("c2"), ClusterId::new("c3"));
    let chain = |cluster, name: &str| {
        Secrets::of(&cx, &mesh, cluster)
            .certificate(&namespace, name)
            .map(|c| c.chain)
    };
    assert_eq!(chain(&remote, "both"), Ok("remote".into()));
    assert_eq!(chain(&third, "one"), Ok("config".into()));
    let config = Secrets::of_config_cluster(&cx, &mesh);
    assert_eq!(config.certificate(&namespace, "both").unwrap().chain, "config");
    let pull = |name: &str| Secrets::of(&cx, &mesh, &remote).docker_config(&namespace, name);
    assert_eq!(pull("pull").unwrap().reveal(), "{}");
    let untyped = config.docker_config(&namespace, "untyped");
    assert!(untyped.unwrap_err().contains(DOCKER_CONFIG_TYPE));
}

#[test]
fn the_first_block_must_be_a_certificate() {
    use pem::{CertificateError, check_certificate};
    let block = |kind: &str, body: &str| format!("-----BEGIN {kind}-----\n{body}\n-----END {kind}-----\n");
    // A sequence of two sequences and a bit string; a key has another form.
    let (certificate, key) = ("MAYwADAAAwA=", "MAMCAQA=");
    let check = |text: &str| check_certificate(text.as_bytes());
    assert_eq!(
        check(&format!("text before\n{}", block("CERTIFICATE", certificate))),
        Ok(())
    );
    assert_eq!(
        check(&(block("CERTIFICATE", certificate) + &block("PRIVATE KEY", key))),
        Ok(())
    );
    assert_eq!(
        check(&block("PRIVATE KEY", key)),
        Err(CertificateError::NotACertificate)
    );
    assert_eq!(check("cert"), Err(CertificateError::NotPem));
    assert_eq!(check(&block("CERTIFICATE", "?")), Err(CertificateError::NotPem));
    assert_eq!(
        check("-----BEGIN CERTIFICATE-----\nMAYw"),
        Err(CertificateError::NotPem)
    );
}

/// Returns a self-signed certificate for a key, as PEM.
fn certificate_for(key: &rcgen::KeyPair) -> String {
    let params = rcgen::CertificateParams::new(vec!["x.test".to_owned()]).expect("valid names");
    params.self_signed(key).expect("a certificate").pem()
}

#[test]
fn a_certificate_belongs_to_its_key() {
    use pem::{KeyPairError, check_key_pair};
    use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256};
    let check = |chain: &str, key: &str| check_key_pair(chain.as_bytes(), key.as_bytes());
    let rsa = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, rcgen::RsaKeySize::_2048);
    let others = [&PKCS_ECDSA_P256_SHA256, &PKCS_ECDSA_P384_SHA384, &PKCS_ED25519].map(KeyPair::generate_for);
    let keys: Vec<KeyPair> = others.into_iter().chain([rsa]).map(|key| key.expect("a key")).collect();
    for key in &keys {
        let algorithm = key.algorithm();
        assert_eq!(
            check(&certificate_for(key), &key.serialize_pem()),
            Ok(()),
            "{algorithm:?}"
        );
    }
    let (chain, key) = (certificate_for(&keys[0]), keys[0].serialize_pem());
    let another = KeyPair::generate().expect("a key").serialize_pem();
    let block = |kind: &str, body: &str| format!("-----BEGIN {kind}-----\n{body}\n-----END {kind}-----\n");
    let damaged = block("CERTIFICATE", "MAYwADAAAwA=");
    let encrypted = block("ENCRYPTED PRIVATE KEY", "MAQwADAA");
    let parameters = block("EC PARAMETERS", "BggqhkjOPQMBBw==");
    for (chain, key, expected) in [
        (key.clone() + &chain, parameters.clone() + &key, Ok(())),
        (chain.clone(), another, Err(KeyPairError::Mismatch)),
        (certificate_for(&keys[2]), key.clone(), Err(KeyPairError::KeyType)),
        (chain.clone(), encrypted.clone(), Err(KeyPairError::Key)),
        (chain.clone(), "Hello".to_owned(), Err(KeyPairError::NoKeyData)),
        (chain.clone(), chain.clone(), Err(KeyPairError::ChainAsKey)),
        (chain.clone(), parameters.clone(), Err(KeyPairError::NoKey)),
        (chain.clone(), parameters.clone() + &chain, Err(KeyPairError::NoKey)),
        ("Hello".to_owned(), key.clone(), Err(KeyPairError::NoChain)),
        (key.clone(), key.clone(), Err(KeyPairError::KeyAsChain)),
        (encrypted.clone(), key.clone(), Err(KeyPairError::KeyAsChain)),
        (parameters.clone(), key.clone(), Err(KeyPairError::NoCertificate)),
        (parameters.clone() + &key, key.clone(), Err(KeyPairError::NoCertificate)),
        (damaged + &chain, key.clone(), Err(KeyPairError::Certificate)),
    ] {
        assert_eq!(check(&chain, &key), expected);
    }
    // Text between blocks may have another encoding than UTF-8.
    let latin = [&b"subject=CN = M\xfcller\n"[..], chain.as_bytes()].concat();
    assert_eq!(check_key_pair(&latin, key.as_bytes()), Ok(()));
    assert_eq!(pem::check_certificate(&latin), Ok(()));
}

#[test]
fn one_certificate_of_a_bundle_suffices() {
    let key = rcgen::KeyPair::generate().expect("a key");
    let block = |kind: &str| format!("-----BEGIN {kind}-----\nMAYwADAAAwA=\n-----END {kind}-----\n");
    let (revoked, damaged) = (block("X509 CRL"), block("CERTIFICATE"));
    let has = |text: &str| pem::has_certificate(text.as_bytes());
    assert!(has(&(revoked.clone() + &damaged + &certificate_for(&key))));
    assert!(!has(&(revoked + &damaged)));
    assert!(!has("hello"));
}
