use std::time::Duration;

use rcgen::{CertificateParams, DnType, KeyPair};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use x509_parser::prelude::*;

use super::{
    super::{
        fixture::{self, DAY, HOUR, ID, LIMITS, ca_bundle, files, intermediate, request, root, start, verify},
        key::KeyKind,
        self_signed::Root,
    },
    *,
};

fn plugged_in() -> Authority {
    let root = root("root", 3650);
    let ca = intermediate("ca", 365, &root);
    Authority::new(ca_bundle(&files(&ca, &root)), start()).unwrap()
}

fn own(kind: KeyKind) -> Authority {
    let options = super::super::self_signed::RootOptions {
        key: kind,
        ..fixture::root_options()
    };
    let root = Root::new("cluster.local", &options, start()).unwrap();
    Authority::new(root.bundle("memory".into(), &Default::default(), start()), start()).unwrap()
}

fn der(block: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(block.as_bytes()).unwrap()
}

fn at(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.unsigned_abs())
}

fn kind_of(result: Result<SignedCertificate, SignError>) -> (SignErrorKind, String) {
    let error = result.unwrap_err();
    (error.kind, error.text)
}

#[test]
fn leaves_have_the_fields_of_istios() {
    let authority = plugged_in();
    let issued = authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    assert_eq!(issued.chain.len(), 3, "the leaf, the CA, the root");
    assert!(
        issued
            .chain
            .iter()
            .all(|block| block.ends_with("-----END CERTIFICATE-----\n"))
    );
    assert_eq!(issued.roots.as_bytes(), authority.trusted_roots().as_ref());
    verify(&issued.chain, authority.trusted_roots(), start()).unwrap();
    let leaf = der(&issued.chain[0]);
    let (rest, leaf) = X509Certificate::from_der(&leaf).unwrap();
    assert!(rest.is_empty());
    assert_eq!(leaf.version(), X509Version::V3);
    assert_eq!(leaf.subject().as_raw(), [0x30, 0], "no subject");
    assert_eq!(at(leaf.validity().not_before.timestamp()), start() - CLOCK_SKEW);
    assert_eq!(at(leaf.validity().not_after.timestamp()), start() + DAY);
    assert!(leaf.raw_serial().len() <= 17);
    let usage = leaf.key_usage().unwrap().unwrap();
    assert!(usage.critical && usage.value.digital_signature() && usage.value.key_encipherment());
    assert!(!usage.value.key_cert_sign());
    let extended = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(extended.server_auth && extended.client_auth && !extended.any);
    let constraints = leaf.basic_constraints().unwrap().unwrap();
    assert!(constraints.critical && !constraints.value.ca);
    let names = leaf.subject_alternative_name().unwrap().unwrap();
    assert!(names.critical);
    assert_eq!(names.value.general_names, [GeneralName::URI(ID)]);
}

#[test]
fn the_issuer_is_copied_to_leaves_byte_for_byte() {
    let authority = plugged_in();
    let issued = authority.issue(&request(&[ID]), start(), LIMITS).unwrap();
    let (leaf, ca) = (der(&issued.chain[0]), der(&issued.chain[1]));
    let (_, leaf) = X509Certificate::from_der(&leaf).unwrap();
    let (_, ca) = X509Certificate::from_der(&ca).unwrap();
    assert_eq!(leaf.issuer().as_raw(), ca.subject().as_raw());
    let id = |certificate: &X509Certificate<'_>, own: bool| {
        certificate
            .iter_extensions()
            .find_map(|extension| match extension.parsed_extension() {
                ParsedExtension::SubjectKeyIdentifier(id) if own => Some(id.0.to_vec()),
                ParsedExtension::AuthorityKeyIdentifier(id) if !own => Some(id.key_identifier.as_ref()?.0.to_vec()),
                _ => None,
            })
    };
    assert_eq!(id(&leaf, false), id(&ca, true));
}

#[test]
fn all_key_types_sign_and_are_signed() {
    for kind in [
        KeyKind::Rsa(2048),
        KeyKind::P256,
        KeyKind::P384,
        KeyKind::P521,
        KeyKind::Ed25519,
    ] {
        let authority = own(kind);
        for algorithm in [
            &rcgen::PKCS_RSA_SHA256,
            &rcgen::PKCS_ECDSA_P256_SHA256,
            &rcgen::PKCS_ECDSA_P384_SHA384,
            &rcgen::PKCS_ECDSA_P521_SHA512,
            &rcgen::PKCS_ED25519,
        ] {
            let key = KeyPair::generate_for(algorithm).unwrap();
            let csr = CertificateParams::default()
                .serialize_request(&key)
                .unwrap()
                .pem()
                .unwrap();
            let request = SigningRequest {
                csr: csr.into_bytes(),
                ..request(&[ID])
            };
            let issued = authority.issue(&request, start(), LIMITS).unwrap();
            assert_eq!(issued.chain.len(), 1, "a root has no chain");
            verify(&issued.chain, authority.trusted_roots(), start())
                .unwrap_or_else(|error| panic!("{kind:?}: {error}"));
        }
    }
}

#[test]
fn names_come_from_the_caller_never_from_the_csr() {
    let authority = own(KeyKind::P256);
    let key = KeyPair::generate().unwrap();
    let mut asked = CertificateParams::new(["admin.example.com".to_owned()]).unwrap();
    asked.distinguished_name.push(DnType::CommonName, "admin");
    let csr = asked.serialize_request(&key).unwrap().pem().unwrap().into_bytes();
    let mut request = request(&[ID, "10.0.0.1", "fd00::1", "a.example.com"]);
    request.csr = csr;
    let issued = authority.issue(&request, start(), LIMITS).unwrap();
    let leaf = der(&issued.chain[0]);
    let (_, leaf) = X509Certificate::from_der(&leaf).unwrap();
    let names = leaf.subject_alternative_name().unwrap().unwrap().value;
    let v6 = "fd00::1".parse::<std::net::Ipv6Addr>().unwrap().octets();
    assert_eq!(
        names.general_names,
        [
            GeneralName::URI(ID),
            GeneralName::IPAddress(&[10, 0, 0, 1]),
            GeneralName::IPAddress(&v6),
            GeneralName::DNSName("a.example.com"),
        ]
    );
    assert_eq!(
        leaf.subject().to_string(),
        format!("CN={ID}"),
        "asked for, so there is one, and it is ours"
    );
    request.identities = vec![format!("spiffe://cluster.local/ns/{}/sa/b", "n".repeat(50)).into()];
    let issued = authority.issue(&request, start(), LIMITS).unwrap();
    let leaf = der(&issued.chain[0]);
    let (_, leaf) = X509Certificate::from_der(&leaf).unwrap();
    assert_eq!(
        leaf.subject().as_raw(),
        [0x30, 0],
        "more than 64 characters are no common name"
    );
}

#[test]
fn ambiguous_names_are_rejected() {
    let authority = own(KeyKind::P256);
    for names in [
        &[][..],
        &[""],
        &["spiffe://cluster.local/ns/a/sa/b,spiffe://cluster.local/ns/istio-system/sa/istiod"],
        &["a.example.com\0.evil.com"],
        &["spiffe://cluster.local/ns/ä/sa/b"],
        &["two words"],
    ] {
        let (kind, text) = kind_of(authority.issue(&request(names), start(), LIMITS));
        assert_eq!(kind, SignErrorKind::Generation, "{names:?}: {text}");
    }
}

#[test]
fn invalid_csrs_are_rejected_with_the_reason() {
    let authority = own(KeyKind::P256);
    let good = request(&[ID]);
    let (_, block) = x509_parser::pem::parse_x509_pem(&good.csr).unwrap();
    let mut forged = block.contents.clone();
    *forged.last_mut().unwrap() ^= 1;
    let mut longer = block.contents.clone();
    longer.push(0);
    let pem = |der: &[u8]| key::pem("CERTIFICATE REQUEST", der).into_bytes();
    for (csr, want) in [
        (Vec::new(), "not properly encoded"),
        (b"nonsense".to_vec(), "not properly encoded"),
        (pem(b"nonsense"), "failed to parse"),
        (pem(&[]), "failed to parse"),
        (pem(&forged), "the signature of the CSR is invalid"),
        (pem(&longer), "trailing data"),
        (vec![b'A'; CSR_BYTES_MAX + 1], "longer than"),
    ] {
        let request = SigningRequest { csr, ..good.clone() };
        let (kind, text) = kind_of(authority.issue(&request, start(), LIMITS));
        assert_eq!(kind, SignErrorKind::Csr);
        assert!(text.contains(want), "{text}");
    }
}

#[test]
fn lifetimes_are_defaulted_limited_and_clamped() {
    let authority = plugged_in();
    let ends = |lifetime: Option<Duration>, now: SystemTime| {
        let request = SigningRequest {
            lifetime,
            ..request(&[ID])
        };
        authority.issue(&request, now, LIMITS).map(|issued| {
            let leaf = der(&issued.chain[0]);
            let (_, leaf) = X509Certificate::from_der(&leaf).unwrap();
            at(leaf.validity().not_after.timestamp())
        })
    };
    assert_eq!(ends(None, start()).unwrap(), start() + DAY);
    assert_eq!(ends(Some(Duration::ZERO), start()).unwrap(), start() + DAY);
    assert_eq!(ends(Some(HOUR), start()).unwrap(), start() + HOUR);
    assert_eq!(ends(Some(LIMITS.max), start()).unwrap(), start() + LIMITS.max);
    let error = ends(Some(LIMITS.max + HOUR), start()).unwrap_err();
    assert_eq!(error.kind, SignErrorKind::Ttl);
    assert_eq!(
        error.text,
        "requested TTL 2161h0m0s is greater than the max allowed TTL 2160h0m0s"
    );
    let late = start() + DAY * 365 - HOUR;
    assert_eq!(
        ends(None, late).unwrap(),
        start() + DAY * 365,
        "no longer than the CA itself"
    );
    let error = ends(None, late + HOUR).unwrap_err();
    assert_eq!(error.kind, SignErrorKind::Generation);
    assert!(error.text.contains("has expired"), "{}", error.text);
    assert!(ends(Some(Duration::MAX), start()).is_err());
}

#[test]
fn leaves_do_not_outlive_the_path_to_the_root() {
    let root = root("root", 100);
    let ca = intermediate("ca", 365, &root);
    let authority = Authority::new(ca_bundle(&files(&ca, &root)), start()).unwrap();
    assert_eq!(authority.path_expires_at(), start() + DAY * 100);
}

#[test]
fn serving_certificates_use_the_ca_key_type_without_ttl_limit() {
    for (kind, want) in [
        (KeyKind::Rsa(2048), KeyKind::Rsa(2048)),
        (KeyKind::P256, KeyKind::P256),
        (KeyKind::P384, KeyKind::P384),
    ] {
        let authority = own(kind);
        let serving = authority
            .issue_serving(&["istiod.istio-system.svc".into()], DAY * 3000, start())
            .unwrap();
        let key = PrivateKey::from_pem(&serving.key).unwrap();
        assert_eq!(key.kind(), want);
        assert_eq!(serving.expires_at, start() + DAY * 3000);
        let chain = Certificate::all_from_pem(serving.chain.as_bytes()).unwrap();
        assert_eq!(chain[0].public_key, key.public());
        assert!(!format!("{serving:?}").contains("PRIVATE"), "keys never print");
        verify(&[serving.chain], authority.trusted_roots(), start()).unwrap();
    }
}

#[test]
fn ca_keys_are_redacted() {
    let authority = plugged_in();
    let key = String::from_utf8(authority.bundle().key.reveal().to_vec()).unwrap();
    let line = key.lines().nth(1).unwrap();
    let printed = format!("{authority:?} {:?} {:#?}", authority.bundle(), authority.key());
    assert!(!printed.contains(line), "{printed}");
}
