//! A CA of a test, in the form in which an operator provides it in Secret `cacerts`.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType, IsCa, KeyIdMethod,
    KeyPair, KeyUsagePurpose, SerialNumber, date_time_ymd,
};
use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use serde_json::{Value, json};

type Issuer = CertifiedIssuer<'static, KeyPair>;

/// An intermediate CA under a root.
pub(crate) struct Authority {
    root: Arc<Issuer>,
    issuer: Issuer,
}

impl Authority {
    /// Creates an intermediate under a new root.
    pub(crate) fn new(name: &str) -> Authority {
        let root = Issuer::self_signed(params(&format!("{name} root")), key()).expect("signing succeeds");
        Authority::under(Arc::new(root), name)
    }

    /// Creates another intermediate under the same root.
    pub(crate) fn sibling(&self, name: &str) -> Authority {
        Authority::under(Arc::clone(&self.root), name)
    }

    fn under(root: Arc<Issuer>, name: &str) -> Authority {
        let issuer = Issuer::signed_by(params(name), key(), &root).expect("signing succeeds");
        Authority { root, issuer }
    }

    /// Its root, as PEM.
    pub(crate) fn root(&self) -> String {
        self.root.pem()
    }

    /// Its certificate, as PEM.
    pub(crate) fn certificate(&self) -> String {
        self.issuer.pem()
    }

    /// Empty revocation lists of the intermediate and its root, as PEM.
    pub(crate) fn revoked(&self) -> String {
        let list = |by: &Issuer| {
            let params = CertificateRevocationListParams {
                this_update: date_time_ymd(2020, 1, 1),
                next_update: date_time_ymd(2120, 1, 1),
                crl_number: SerialNumber::from(1),
                issuing_distribution_point: None,
                revoked_certs: Vec::new(),
                key_identifier_method: KeyIdMethod::Sha256,
            };
            let list = params.signed_by(by).expect("signing succeeds");
            list.pem().expect("the list can be encoded")
        };
        list(&self.issuer) + &list(&self.root)
    }

    /// The files of the bundle.
    pub(crate) fn files(&self) -> BTreeMap<&'static str, String> {
        BTreeMap::from([
            ("ca-cert.pem", self.certificate()),
            ("ca-key.pem", self.issuer.key().serialize_pem()),
            ("cert-chain.pem", self.certificate() + &self.root()),
            ("root-cert.pem", self.root()),
        ])
    }

    /// Secret `cacerts` of a namespace, with a revocation list if `revoked` is given.
    pub(crate) fn secret(&self, namespace: &str, revoked: Option<&str>) -> Value {
        let mut texts = self.files();
        texts.extend(revoked.map(|revoked| ("ca-crl.pem", revoked.to_owned())));
        let data: BTreeMap<_, _> = texts
            .iter()
            .map(|(name, text)| (name, BASE64_STANDARD.encode(text)))
            .collect();
        let metadata = json!({ "namespace": namespace, "name": "cacerts" });
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data })
    }
}

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    params
}

fn key() -> KeyPair {
    KeyPair::generate().expect("key generation succeeds")
}

/// Verifies a chain, leaf first, against these roots alone. Both are PEM.
pub(crate) fn verify(chain: &str, roots: &str) -> Result<(), String> {
    let certificates = |pem: &str| {
        let read = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
        read.map_err(|error| error.to_string())
    };
    let mut store = RootCertStore::empty();
    for root in certificates(roots)? {
        store.add(root).map_err(|error| error.to_string())?;
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(store), provider).build();
    let verifier = verifier.map_err(|error| error.to_string())?;
    let chain = certificates(chain)?;
    let (leaf, rest) = chain.split_first().ok_or("there is no certificate")?;
    let verified = verifier.verify_client_cert(leaf, rest, UnixTime::now());
    verified.map(|_| ()).map_err(|error| error.to_string())
}
