//! A certificate authority for tests.

use std::sync::Arc;

use bytes::Bytes;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};
use rustls::{
    crypto::aws_lc_rs::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use time::{Duration, OffsetDateTime};

use super::ServingCertificate;

/// A root or intermediate CA.
pub(crate) struct TestCa {
    pub(crate) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate with its chain and key.
pub(crate) struct TestCertificate {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl TestCertificate {
    pub(crate) fn leaf(&self) -> &CertificateDer<'static> {
        &self.chain[0]
    }
}

fn ca_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::OrganizationName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

impl TestCa {
    pub(crate) fn new(name: &str) -> Self {
        let (params, key) = (ca_params(name), KeyPair::generate().expect("a key"));
        let pem = params.self_signed(&key).expect("a root").pem();
        let issuer = Issuer::new(params, key);
        Self { pem, issuer }
    }

    pub(crate) fn intermediate(&self, name: &str) -> Self {
        let (params, key) = (ca_params(name), KeyPair::generate().expect("a key"));
        let pem = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        let issuer = Issuer::new(params, key);
        Self { pem, issuer }
    }

    pub(crate) fn roots(&self) -> Bytes {
        self.pem.clone().into_bytes().into()
    }

    /// A certificate with these URIs, valid for an hour.
    pub(crate) fn client(&self, uris: &[&str]) -> TestCertificate {
        self.leaf(uris, &[], 7, OffsetDateTime::now_utc() + Duration::hours(1))
    }

    pub(crate) fn leaf(&self, uris: &[&str], names: &[&str], serial: u64, until: OffsetDateTime) -> TestCertificate {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).expect("valid names");
        params.distinguished_name.remove(DnType::CommonName);
        let uris = uris.iter().map(|uri| SanType::URI((*uri).try_into().expect("a URI")));
        params.subject_alt_names.extend(uris);
        params.serial_number = Some(SerialNumber::from(serial));
        params.not_before = until - Duration::hours(24);
        params.not_after = until;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().expect("a key");
        let leaf = params.signed_by(&key, &self.issuer).expect("a certificate");
        let mut chain = vec![leaf.der().clone()];
        chain.extend(CertificateDer::pem_slice_iter(self.pem.as_bytes()).map(|ca| ca.expect("our own PEM")));
        TestCertificate {
            chain,
            key: PrivateKeyDer::try_from(key.serialize_der()).expect("a key"),
        }
    }

    pub(crate) fn serving(&self, name: &str) -> ServingCertificate {
        let until = OffsetDateTime::now_utc() + Duration::hours(1);
        let certificate = self.leaf(&[], &[name], 9, until);
        let key = CertifiedKey::from_der(certificate.chain, certificate.key, &default_provider())
            .expect("a matching key pair");
        ServingCertificate {
            key: Arc::new(key),
            roots: self.roots(),
            expires_at: until.into(),
        }
    }

    /// A CRL that revokes these serial numbers.
    pub(crate) fn revoke(&self, serials: &[u64]) -> Bytes {
        let now = OffsetDateTime::now_utc();
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: now - Duration::hours(1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: now - Duration::hours(1),
            next_update: now + Duration::hours(1),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).expect("a list");
        list.pem().expect("valid PEM").into_bytes().into()
    }
}
