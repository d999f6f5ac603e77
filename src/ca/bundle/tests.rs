use rcgen::{CertificateRevocationListParams, IsCa, KeyIdMethod, KeyPair, SerialNumber};
use time::OffsetDateTime;

use super::{
    super::{
        authority::Authority,
        der,
        fixture::{
            DAY, ID, Issuer, LIMITS, ca_bundle, file, files, intermediate, parameters, request, root, start, verify,
        },
        key,
        plugged_in::{self, BundleFiles},
    },
    *,
};

fn problem(files: &BundleFiles) -> BundleError {
    Authority::new(ca_bundle(files), start()).unwrap_err()
}

fn list(by: &Issuer) -> String {
    let parameters = CertificateRevocationListParams {
        this_update: OffsetDateTime::from(start()),
        next_update: OffsetDateTime::from(start() + DAY),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: Vec::new(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    parameters.signed_by(by).unwrap().pem().unwrap()
}

#[test]
fn a_complete_bundle_is_accepted() {
    let root = root("root", 3650);
    let ca = intermediate("ca", 365, &root);
    Authority::new(ca_bundle(&files(&ca, &root)), start()).unwrap();
    // A root that signs itself needs no chain.
    let mut alone = files(&root, &root);
    alone.insert(plugged_in::CHAIN.into(), file(""));
    Authority::new(ca_bundle(&alone), start()).unwrap();
    // A path by way of the chain alone.
    let lower = intermediate("lower", 300, &ca);
    let mut deep = files(&lower, &root);
    deep.insert(plugged_in::CHAIN.into(), file(lower.pem() + &ca.pem()));
    Authority::new(ca_bundle(&deep), start()).unwrap();
}

#[test]
fn of_several_roots_with_one_key_the_one_that_is_valid_longest_counts() {
    let root = root("root", 3650);
    let ca = intermediate("ca", 365, &root);
    let old = parameters("root", 30).self_signed(root.key()).unwrap().pem();
    for roots in [old.clone() + &root.pem(), root.pem() + &old] {
        let mut files = files(&ca, &root);
        files.insert(plugged_in::ROOTS.into(), file(roots));
        let authority = Authority::new(ca_bundle(&files), start()).unwrap();
        assert_eq!(authority.path_expires_at(), start() + DAY * 365);
    }
}

#[test]
fn keys_are_parsed_in_all_pem_formats() {
    for (name, certificate, key) in [
        (
            "PKCS#1",
            include_str!("testdata/rsa-cert.pem"),
            include_str!("testdata/rsa-pkcs1.pem"),
        ),
        (
            "PKCS#8",
            include_str!("testdata/rsa-cert.pem"),
            include_str!("testdata/rsa-pkcs8.pem"),
        ),
        (
            "SEC1",
            include_str!("testdata/ec-cert.pem"),
            include_str!("testdata/ec-sec1.pem"),
        ),
    ] {
        let files = [
            (plugged_in::CERTIFICATE, certificate),
            (plugged_in::KEY, key),
            (plugged_in::CHAIN, ""),
            (plugged_in::ROOTS, certificate),
        ];
        let files = files
            .into_iter()
            .map(|(name, text)| (name.into(), file(text)))
            .collect();
        // These were made by openssl at the end of 2026, for a hundred years.
        let authority = Authority::new(ca_bundle(&files), start() + DAY * 400);
        authority.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn ecdsa_signatures_have_any_digest() {
    // These were made by openssl: P-256 and P-384 with -sha512, P-521 with its default, which is SHA-256.
    let roots = Certificate::all_from_pem(include_bytes!("testdata/ec-roots.pem")).unwrap();
    assert_eq!(roots.len(), 3);
    for root in &roots {
        assert!(root.is_issued_by(root), "{root:?}");
    }
    for algorithm in [
        &rcgen::PKCS_ECDSA_P521_SHA256,
        &rcgen::PKCS_ECDSA_P521_SHA384,
        &rcgen::PKCS_ECDSA_P521_SHA512,
    ] {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let root = Issuer::self_signed(parameters("root", 3650), key).unwrap();
        let ca = intermediate("ca", 365, &root);
        let authority = Authority::new(ca_bundle(&files(&ca, &root)), start());
        authority.unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
    }
}

#[test]
fn errors_name_the_location_and_the_file() {
    let root = root("root", 3650);
    let ca = intermediate("ca", 365, &root);
    let other = intermediate("other", 365, &root);
    let good = files(&ca, &root);
    let with = |name: &str, text: String| {
        let mut files = good.clone();
        files.insert(name.into(), file(text));
        problem(&files).to_string()
    };
    for (name, text, want) in [
        (
            plugged_in::CERTIFICATE,
            "nonsense".into(),
            "ca-cert.pem: there is no certificate",
        ),
        (
            plugged_in::CERTIFICATE,
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into(),
            "ca-cert.pem: certificate 1 cannot be parsed",
        ),
        (
            plugged_in::CERTIFICATE,
            other.pem(),
            "ca-key.pem: the cert does not match the key",
        ),
        (
            plugged_in::KEY,
            "nonsense".into(),
            "ca-key.pem: no unencrypted private key",
        ),
        (
            plugged_in::KEY,
            other.key().serialize_pem(),
            "ca-key.pem: the cert does not match the key",
        ),
        (
            plugged_in::ROOTS,
            "nonsense".into(),
            "root-cert.pem: there is no certificate",
        ),
        (plugged_in::ROOTS, other.pem(), "ca-cert.pem: cannot verify the cert"),
        (plugged_in::CRL, "nonsense".into(), "ca-crl.pem: there is no X509 CRL"),
    ] {
        let error = with(name, text);
        assert!(
            error.starts_with("folder etc/cacerts: ") && error.contains(want),
            "{error}"
        );
    }
}

#[test]
fn leaf_certificates_are_not_a_ca() {
    let root = root("root", 3650);
    let mut leaf = parameters("leaf", 365);
    leaf.is_ca = IsCa::ExplicitNoCa;
    let leaf = Issuer::signed_by(leaf, KeyPair::generate().unwrap(), &root).unwrap();
    assert!(matches!(problem(&files(&leaf, &root)).problem, Problem::NotCa));
    let mut no_signing = parameters("no signing", 365);
    no_signing.key_usages = vec![rcgen::KeyUsagePurpose::DigitalSignature];
    let no_signing = Issuer::signed_by(no_signing, KeyPair::generate().unwrap(), &root).unwrap();
    assert!(matches!(problem(&files(&no_signing, &root)).problem, Problem::NotCa));
}

#[test]
fn an_expired_certificate_invalidates_the_path() {
    let root = root("root", 3650);
    let ca = intermediate("ca", 10, &root);
    let good = ca_bundle(&files(&ca, &root));
    assert!(Authority::new(good.clone(), start() + DAY * 9).is_ok());
    for now in [start() + DAY * 10, start() - DAY * 2] {
        let error = Authority::new(good.clone(), now).unwrap_err();
        assert!(error.to_string().contains("is expired or not yet valid"), "{error}");
    }
    assert!(Authority::with_expiry_check(good, start() + DAY * 10, ExpiryCheck::Skipped).is_ok());
}

#[test]
fn an_issuer_name_without_a_signature_is_not_a_path() {
    let good = root("root", 3650);
    let forged = root("root", 3650);
    let ca = intermediate("ca", 365, &good);
    let mut files = files(&ca, &good);
    files.insert(plugged_in::ROOTS.into(), file(forged.pem()));
    files.insert(plugged_in::CHAIN.into(), file(ca.pem()));
    assert!(matches!(problem(&files).problem, Problem::NoPath(_)));
}

#[test]
fn crls_are_required_of_every_ca_of_the_chain() {
    let root = root("root", 3650);
    let ca = intermediate("ca", 365, &root);
    let other = intermediate("ca", 365, &root);
    let with = |text: String| {
        let mut files = files(&ca, &root);
        files.insert(plugged_in::CRL.into(), file(text));
        Authority::new(ca_bundle(&files), start())
    };
    let both = list(&ca) + &list(&root);
    let authority = with(both.clone()).unwrap();
    let crl = authority.bundle().crl.clone().unwrap();
    assert_eq!(crl.pem, both.as_bytes());
    for (text, want) in [
        (list(&ca), "root"),
        (list(&root), "ca"),
        (list(&other) + &list(&root), "ca"),
    ] {
        let error = with(text).unwrap_err();
        assert!(
            matches!(&error.problem, Problem::MissingCrl(name) if name.contains(want)),
            "{error}"
        );
    }
}

/// Returns a root with the name and key of another one, of version 1 as `openssl x509 -signkey` makes it.
fn version_1(root: &Issuer) -> String {
    let root_key = PrivateKey::from_pem(&file(root.key().serialize_pem())).unwrap();
    let root = Certificate::all_from_pem(root.pem().as_bytes()).unwrap().remove(0);
    let validity = [der::time(start() - DAY), der::time(start() + DAY * 3650)];
    let parts: [&[u8]; 6] = [
        &der::unsigned(&[1]),
        root_key.algorithm(),
        &root.issuer,
        &der::nested(der::SEQUENCE, &[&validity[0], &validity[1]]),
        &root.subject,
        &root.public_key,
    ];
    let signed = root_key.sign_tbs(&der::nested(der::SEQUENCE, &parts)).unwrap();
    key::pem("CERTIFICATE", &signed)
}

#[test]
fn roots_may_have_version_1() {
    let root = root("root", 3650);
    let ca = intermediate("ca", 365, &root);
    let old = version_1(&root);
    let with = |ca: &Issuer, certificate: String| {
        let mut files = files(ca, &root);
        files.insert(plugged_in::CERTIFICATE.into(), file(certificate));
        files.insert(plugged_in::ROOTS.into(), file(old.clone()));
        files.insert(plugged_in::CHAIN.into(), file(ca.pem() + &old));
        Authority::new(ca_bundle(&files), start())
    };
    let signed = with(&ca, ca.pem())
        .unwrap()
        .issue(&request(&[ID]), start(), LIMITS)
        .unwrap();
    verify(&signed.chain, old.as_bytes(), start()).unwrap();
    // But it signs no certificates of workloads.
    assert!(matches!(with(&root, old.clone()).unwrap_err().problem, Problem::NotCa));
}

#[test]
fn a_ca_that_may_not_sign_crls_has_none() {
    let root = root("root", 3650);
    let signs_crls = intermediate("ca", 365, &root);
    let mut parameters = parameters("ca", 365);
    parameters.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::from_pem(&signs_crls.key().serialize_pem()).unwrap();
    let ca = Issuer::signed_by(parameters, key, &root).unwrap();
    let mut files = files(&ca, &root);
    files.insert(plugged_in::CRL.into(), file(list(&signs_crls) + &list(&root)));
    let error = problem(&files);
    assert!(
        matches!(&error.problem, Problem::MissingCrl(name) if name.contains("ca")),
        "{error}"
    );
}
