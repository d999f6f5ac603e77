//! CAs, requests and verifiers for tests.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose,
};
use rustls::{
    RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::WebPkiClientVerifier,
};
use smol_str::SmolStr;
use time::OffsetDateTime;

use super::{
    authority::TtlLimits,
    bundle::CaBundle,
    key::KeyKind,
    plugged_in::{self, BundleFiles, BundleLookup},
    self_signed::RootOptions,
    signing::SigningRequest,
};
use crate::base::Sensitive;

pub(super) const HOUR: Duration = Duration::from_hours(1);
pub(super) const DAY: Duration = Duration::from_hours(24);
pub(super) const LIMITS: TtlLimits = TtlLimits {
    default: DAY,
    max: Duration::from_hours(90 * 24),
};
pub(super) const ID: &str = "spiffe://cluster.local/ns/default/sa/reviews";

/// 2026-01-01.
pub(super) fn start() -> SystemTime {
    UNIX_EPOCH + Duration::from_hours(490_896)
}

pub(super) fn root_options() -> RootOptions {
    RootOptions {
        lifetime: DAY * 3650,
        key: KeyKind::P256,
    }
}

/// A CA of another library.
pub(super) type Issuer = CertifiedIssuer<'static, KeyPair>;

pub(super) fn parameters(name: &str, days: u32) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::CommonName, name);
    parameters.distinguished_name.push(DnType::OrganizationName, "Example");
    parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    parameters.use_authority_key_identifier_extension = true;
    parameters.not_before = OffsetDateTime::from(start() - DAY);
    parameters.not_after = OffsetDateTime::from(start() + DAY * days);
    parameters
}

pub(super) fn root(name: &str, days: u32) -> Issuer {
    let key = KeyPair::generate().expect("a key");
    CertifiedIssuer::self_signed(parameters(name, days), key).expect("a root")
}

pub(super) fn intermediate(name: &str, days: u32, root: &Issuer) -> Issuer {
    let key = KeyPair::generate().expect("a key");
    CertifiedIssuer::signed_by(parameters(name, days), key, root).expect("an intermediate")
}

pub(super) fn file(text: impl Into<String>) -> Sensitive {
    Sensitive::new(Bytes::from(text.into()))
}

/// The files of a CA under a root, with Istio's names.
pub(super) fn files(ca: &Issuer, root: &Issuer) -> BundleFiles {
    [
        (plugged_in::CERTIFICATE, ca.pem()),
        (plugged_in::KEY, ca.key().serialize_pem()),
        (plugged_in::CHAIN, ca.pem() + &root.pem()),
        (plugged_in::ROOTS, root.pem()),
    ]
    .into_iter()
    .map(|(name, text)| (name.into(), file(text)))
    .collect()
}

pub(super) fn ca_bundle(files: &BundleFiles) -> CaBundle {
    match plugged_in::find("folder etc/cacerts".into(), files, true) {
        BundleLookup::Complete(bundle) => bundle,
        found => panic!("a whole bundle, not {found:?}"),
    }
}

/// A request with a new key.
pub(super) fn request(names: &[&str]) -> SigningRequest {
    let key = KeyPair::generate().expect("a key");
    SigningRequest {
        csr: nameless()
            .serialize_request(&key)
            .and_then(|request| request.pem())
            .expect("a request")
            .into_bytes(),
        identities: names.iter().map(SmolStr::new).collect(),
        lifetime: None,
        signer: SmolStr::default(),
    }
}

/// CSR parameters without names.
pub(super) fn nameless() -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    parameters
}

/// Verifies a chain, leaf first, like a server that trusts these roots.
pub(super) fn verify(chain: &[String], roots: &[u8], now: SystemTime) -> Result<(), String> {
    let mut store = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(roots) {
        store
            .add(root.expect("a certificate"))
            .map_err(|error| error.to_string())?;
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(store), provider).build();
    let verifier = verifier.map_err(|error| error.to_string())?;
    let chain: Vec<_> = chain
        .iter()
        .map(|block| CertificateDer::from_pem_slice(block.as_bytes()).expect("a certificate"))
        .collect();
    let (leaf, rest) = chain.split_first().expect("a leaf");
    let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).expect("a time"));
    let verified = verifier.verify_client_cert(leaf, rest, now);
    verified.map(|_| ()).map_err(|error| error.to_string())
}
