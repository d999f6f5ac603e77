//! X.509 certificates and requests: parsing, signature checks, and issuing.

use std::{net::IpAddr, time::SystemTime};

use aws_lc_rs::{
    digest::{SHA256, digest},
    rand,
};
use rustls::pki_types::{
    CertificateDer,
    pem::{self, PemObject},
};
use smol_str::SmolStr;
use x509_parser::{
    nom,
    prelude::{
        CertificateRevocationList, FromDer, PEMError, ParsedExtension, X509Certificate, X509CertificationRequest,
        X509Error, X509Version,
    },
};

use super::{
    der,
    key::{self, KeyError, PrivateKey},
};

const OID_SUBJECT_KEY_ID: &[u8] = &[6, 3, 0x55, 0x1d, 0x0e];
const OID_KEY_USAGE: &[u8] = &[6, 3, 0x55, 0x1d, 0x0f];
const OID_ALTERNATIVE_NAMES: &[u8] = &[6, 3, 0x55, 0x1d, 0x11];
const OID_BASIC_CONSTRAINTS: &[u8] = &[6, 3, 0x55, 0x1d, 0x13];
const OID_AUTHORITY_KEY_ID: &[u8] = &[6, 3, 0x55, 0x1d, 0x23];
const OID_EXTENDED_KEY_USAGE: &[u8] = &[6, 3, 0x55, 0x1d, 0x25];
const OID_SERVER_AUTH: &[u8] = &[6, 8, 0x2b, 6, 1, 5, 5, 7, 3, 1];
const OID_CLIENT_AUTH: &[u8] = &[6, 8, 0x2b, 6, 1, 5, 5, 7, 3, 2];
const OID_ORGANIZATION: &[u8] = &[6, 3, 0x55, 4, 0x0a];
const OID_COMMON_NAME: &[u8] = &[6, 3, 0x55, 4, 0x03];
/// digitalSignature and keyEncipherment.
const LEAF_USAGE: u8 = 0xa0;
/// keyCertSign.
const CA_USAGE: u8 = 0x04;
/// Version 3, in its explicit tag.
const VERSION: &[u8] = &[0xa0, 3, 2, 1, 2];
/// The longest common name that X.520 allows.
const COMMON_NAME_MAX: usize = 64;

/// Reason why a certificate cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// Its PEM block is malformed.
    #[error(transparent)]
    Pem(#[from] pem::Error),
    /// Its DER is malformed.
    #[error(transparent)]
    Der(#[from] nom::Err<X509Error>),
    /// One of its extensions is malformed, or present twice.
    #[error(transparent)]
    Extension(#[from] X509Error),
    /// Bytes follow it.
    #[error("trailing bytes after the certificate")]
    TrailingBytes,
    /// One of several certificates cannot be parsed.
    #[error("certificate {position} cannot be parsed: {error}")]
    At {
        /// Its position; the first one has 1.
        position: usize,
        /// The reason.
        #[source]
        error: Box<CertificateError>,
    },
}

/// A parsed certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The certificate in DER.
    pub der: CertificateDer<'static>,
    /// The subject: a `Name` in DER.
    pub(super) subject: Vec<u8>,
    /// The issuer: a `Name` in DER.
    pub(super) issuer: Vec<u8>,
    /// Its public key: a `SubjectPublicKeyInfo` in DER.
    pub(super) public_key: Vec<u8>,
    /// The subject key identifier, if there is one.
    pub(super) key_id: Option<Vec<u8>>,
    /// The start of its validity.
    pub not_before: SystemTime,
    /// The end of its validity.
    pub not_after: SystemTime,
    /// True if it may sign certificates (basicConstraints and keyUsage).
    pub is_ca: bool,
    /// True if it is self-issued and of version 1, which has no extensions. It may sign if it is a trusted root.
    is_v1_root: bool,
    /// The subject as text.
    pub name: SmolStr,
}

impl Certificate {
    /// Parses DER.
    pub fn from_der(der: CertificateDer<'static>) -> Result<Self, CertificateError> {
        let (rest, parsed) = X509Certificate::from_der(&der)?;
        if !rest.is_empty() {
            return Err(CertificateError::TrailingBytes);
        }
        let fields = &parsed.tbs_certificate;
        let constraints = parsed.basic_constraints()?;
        let usage = parsed.key_usage()?;
        let key_id = fields
            .iter_extensions()
            .find_map(|extension| match extension.parsed_extension() {
                ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
                _ => None,
            });
        Ok(Self {
            subject: fields.subject.as_raw().to_vec(),
            issuer: fields.issuer.as_raw().to_vec(),
            public_key: fields.subject_pki.raw.to_vec(),
            key_id,
            not_before: der::system_time(fields.validity.not_before.timestamp()),
            not_after: der::system_time(fields.validity.not_after.timestamp()),
            is_ca: constraints.is_some_and(|extension| extension.value.ca)
                && usage.is_none_or(|extension| extension.value.key_cert_sign()),
            is_v1_root: fields.version() == X509Version::V1 && fields.subject.as_raw() == fields.issuer.as_raw(),
            name: fields.subject.to_string().into(),
            der,
        })
    }

    /// Parses all certificates of a PEM text; blocks of other types are skipped. The error names the position.
    pub fn all_from_pem(pem: &[u8]) -> Result<Vec<Self>, CertificateError> {
        let blocks = CertificateDer::pem_slice_iter(pem).enumerate();
        let read = blocks.map(|(index, block)| {
            let certificate = block.map_err(CertificateError::from).and_then(Self::from_der);
            certificate.map_err(|error| CertificateError::At {
                position: index + 1,
                error: Box::new(error),
            })
        });
        read.collect()
    }

    /// The certificate as a PEM block that ends in a newline.
    pub fn pem(&self) -> String {
        key::pem("CERTIFICATE", &self.der)
    }

    /// Returns true if subject and issuer are equal.
    pub fn is_self_issued(&self) -> bool {
        self.subject == self.issuer
    }

    /// Returns true if `issuer` signed it, and may have.
    pub fn is_issued_by(&self, issuer: &Self) -> bool {
        if self.issuer != issuer.subject || !(issuer.is_ca || issuer.is_v1_root) {
            return false;
        }
        let (Ok((_, own)), Ok((_, other))) = (
            X509Certificate::from_der(&self.der),
            X509Certificate::from_der(&issuer.der),
        ) else {
            return false;
        };
        let content = own.tbs_certificate.as_ref();
        key::is_signed(
            &other.tbs_certificate.subject_pki,
            &own.signature_algorithm,
            &own.signature_value,
            content,
        )
    }

    /// Returns true if it signed this CRL, in DER, and may sign CRLs (keyUsage). Envoy refuses all peers if it may not.
    pub(super) fn has_signed_crl(&self, crl: &[u8]) -> bool {
        let (Ok((_, own)), Ok((_, crl))) = (
            X509Certificate::from_der(&self.der),
            CertificateRevocationList::from_der(crl),
        ) else {
            return false;
        };
        let may_sign = own
            .key_usage()
            .is_ok_and(|usage| usage.is_none_or(|usage| usage.value.crl_sign()));
        let key = &own.tbs_certificate.subject_pki;
        let content = crl.tbs_cert_list.as_ref();
        may_sign
            && crl.tbs_cert_list.issuer.as_raw() == self.subject
            && key::is_signed(key, &crl.signature_algorithm, &crl.signature_value, content)
    }

    /// Returns true if a time is within its validity.
    pub fn is_valid_at(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }

    /// The subject key identifier, computed if the certificate has none.
    fn own_key_id(&self) -> Vec<u8> {
        self.key_id.clone().unwrap_or_else(|| key_id(&self.public_key))
    }
}

/// Reason why a CSR is not accepted.
#[derive(Debug, thiserror::Error)]
pub(super) enum ParsedCsrError {
    /// It is not PEM.
    #[error("certificate signing request is not properly encoded: want PEM")]
    Pem(#[source] nom::Err<PEMError>),
    /// Its DER is malformed.
    #[error("failed to parse X.509 certificate signing request: {0}")]
    Der(#[source] nom::Err<X509Error>),
    /// Bytes follow it.
    #[error("failed to parse X.509 certificate signing request: trailing data")]
    TrailingData,
    /// It does not prove possession of its key.
    #[error("the signature of the CSR is invalid, or its algorithm is not supported")]
    Signature,
}

/// The parts of a CSR that are used.
pub(super) struct ParsedCsr {
    /// A `SubjectPublicKeyInfo` in DER.
    pub(super) public_key: Vec<u8>,
    /// True if the request has a non-empty common name.
    pub(super) has_common_name: bool,
}

impl ParsedCsr {
    /// Parses a PEM CSR and verifies its signature, which proves possession of the key.
    pub(super) fn from_pem(pem: &[u8]) -> Result<Self, ParsedCsrError> {
        let (_, block) = x509_parser::pem::parse_x509_pem(pem).map_err(ParsedCsrError::Pem)?;
        Self::from_der(&block.contents)
    }

    fn from_der(der: &[u8]) -> Result<Self, ParsedCsrError> {
        let (rest, request) = X509CertificationRequest::from_der(der).map_err(ParsedCsrError::Der)?;
        if !rest.is_empty() {
            return Err(ParsedCsrError::TrailingData);
        }
        let info = &request.certification_request_info;
        let key = &info.subject_pki;
        if !key::is_signed(key, &request.signature_algorithm, &request.signature_value, info.raw) {
            return Err(ParsedCsrError::Signature);
        }
        let has_common_name = info
            .subject
            .iter_common_name()
            .any(|name| name.as_str().map_or(true, |name| !name.is_empty()));
        Ok(Self {
            public_key: key.raw.to_vec(),
            has_common_name,
        })
    }
}

/// Reason why a certificate cannot have these names.
#[derive(Debug, thiserror::Error)]
pub(super) enum SubjectAltNamesError {
    /// There are none.
    #[error("no identity to certify")]
    Empty,
    /// One has characters that a verifier could misread.
    #[error("identity {0:?} is not valid in a certificate")]
    Invalid(SmolStr),
}

/// The subject alternative names of a certificate.
pub(super) struct SubjectAltNames {
    /// The extension value in DER.
    alternative: Vec<u8>,
    first: SmolStr,
}

impl SubjectAltNames {
    /// Encodes SPIFFE ids as URIs, IP addresses as IPs, and all others as DNS names.
    /// Parity (security/pkg/pki/util/san.go).
    pub(super) fn new(names: &[SmolStr]) -> Result<Self, SubjectAltNamesError> {
        let first = names.first().ok_or(SubjectAltNamesError::Empty)?.clone();
        let mut parts = Vec::new();
        for name in names {
            // Printable ASCII without commas only: a verifier must not be able to read one identity as several.
            if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic()) || name.contains(',') {
                return Err(SubjectAltNamesError::Invalid(name.clone()));
            }
            parts.extend(match name.parse() {
                Ok(IpAddr::V4(ip)) => der::value(0x87, &ip.octets()),
                Ok(IpAddr::V6(ip)) => der::value(0x87, &ip.octets()),
                Err(_) if name.starts_with(crate::base::spiffe::SCHEME) => der::value(0x86, name.as_bytes()),
                Err(_) => der::value(0x82, name.as_bytes()),
            });
        }
        Ok(Self {
            alternative: der::value(der::SEQUENCE, &parts),
            first,
        })
    }
}

/// The validity period of a certificate.
#[derive(Clone, Copy)]
pub(super) struct Validity {
    pub(super) not_before: SystemTime,
    pub(super) not_after: SystemTime,
}

/// Issues a workload or serving certificate, in DER.
pub(super) fn leaf(
    request: &ParsedCsr,
    names: &SubjectAltNames,
    validity: Validity,
    issuer: &Certificate,
    key: &PrivateKey,
) -> Result<Vec<u8>, KeyError> {
    let common_name = Some(&names.first).filter(|name| request.has_common_name && name.len() <= COMMON_NAME_MAX);
    let subject = common_name.map_or_else(
        || der::value(der::SEQUENCE, &[]),
        |name| distinguished_name(OID_COMMON_NAME, name),
    );
    let mut extensions = vec![
        der::critical_extension(OID_KEY_USAGE, &der::flags(LEAF_USAGE)),
        der::extension(
            OID_EXTENDED_KEY_USAGE,
            &der::nested(der::SEQUENCE, &[OID_SERVER_AUTH, OID_CLIENT_AUTH]),
        ),
        der::critical_extension(OID_BASIC_CONSTRAINTS, &der::value(der::SEQUENCE, &[])),
    ];
    extensions.extend(issuer.key_id.as_deref().map(authority_key_id));
    extensions.push(der::critical_extension(OID_ALTERNATIVE_NAMES, &names.alternative));
    let contents = TbsCertificate {
        subject: &subject,
        public_key: &request.public_key,
        issuer: &issuer.subject,
        validity,
        extensions: extensions.concat(),
    };
    contents.sign(key)
}

/// Creates a self-signed root of an organization, in DER.
pub(super) fn root(organization: &str, validity: Validity, key: &PrivateKey) -> Result<Vec<u8>, KeyError> {
    let subject = distinguished_name(OID_ORGANIZATION, organization);
    let id = key_id_of_bits(key.public_bits());
    ca_certificate(&subject, &key.public(), &id, validity, None, key)
}

/// Creates a root with the name and key of an old one and a new validity, in DER.
pub(super) fn renewed_root(old: &Certificate, validity: Validity, key: &PrivateKey) -> Result<Vec<u8>, KeyError> {
    ca_certificate(&old.subject, &old.public_key, &old.own_key_id(), validity, None, key)
}

/// Creates a cross-signed certificate: peers that trust `issuer` accept certificates of `subject`. In DER.
pub(super) fn cross_signed(
    subject: &Certificate,
    validity: Validity,
    issuer: &Certificate,
    key: &PrivateKey,
) -> Result<Vec<u8>, KeyError> {
    let id = subject.own_key_id();
    ca_certificate(&subject.subject, &subject.public_key, &id, validity, Some(issuer), key)
}

fn ca_certificate(
    subject: &[u8],
    public_key: &[u8],
    id: &[u8],
    validity: Validity,
    issuer: Option<&Certificate>,
    key: &PrivateKey,
) -> Result<Vec<u8>, KeyError> {
    let is_ca = der::nested(der::SEQUENCE, &[&[1, 1, 0xff]]);
    let mut extensions = vec![
        der::critical_extension(OID_KEY_USAGE, &der::flags(CA_USAGE)),
        der::critical_extension(OID_BASIC_CONSTRAINTS, &is_ca),
        der::extension(OID_SUBJECT_KEY_ID, &der::octets(id)),
    ];
    extensions.extend(issuer.and_then(|issuer| issuer.key_id.as_deref()).map(authority_key_id));
    let contents = TbsCertificate {
        subject,
        public_key,
        issuer: issuer.map_or(subject, |issuer| &issuer.subject),
        validity,
        extensions: extensions.concat(),
    };
    contents.sign(key)
}

/// The `TBSCertificate` of RFC 5280.
struct TbsCertificate<'a> {
    subject: &'a [u8],
    public_key: &'a [u8],
    issuer: &'a [u8],
    validity: Validity,
    extensions: Vec<u8>,
}

impl TbsCertificate<'_> {
    fn sign(&self, key: &PrivateKey) -> Result<Vec<u8>, KeyError> {
        let mut serial = [0; 16];
        rand::fill(&mut serial).map_err(|_| KeyError::Generation)?;
        let validity = der::nested(
            der::SEQUENCE,
            &[
                &der::time(self.validity.not_before),
                &der::time(self.validity.not_after),
            ],
        );
        let extensions = der::value(0xa3, &der::value(der::SEQUENCE, &self.extensions));
        let parts: [&[u8]; 8] = [
            VERSION,
            &der::unsigned(&serial),
            key.algorithm(),
            self.issuer,
            &validity,
            self.subject,
            self.public_key,
            &extensions,
        ];
        key.sign_tbs(&der::nested(der::SEQUENCE, &parts))
    }
}

/// A `Name` with one attribute.
fn distinguished_name(oid: &[u8], text: &str) -> Vec<u8> {
    let attribute = der::nested(der::SEQUENCE, &[oid, &der::utf8(text)]);
    der::value(der::SEQUENCE, &der::value(der::SET, &attribute))
}

fn authority_key_id(id: &[u8]) -> Vec<u8> {
    let content = der::value(der::SEQUENCE, &der::value(0x80, id));
    der::extension(OID_AUTHORITY_KEY_ID, &content)
}

/// The key identifier of a `SubjectPublicKeyInfo`.
fn key_id(public_key: &[u8]) -> Vec<u8> {
    use x509_parser::prelude::SubjectPublicKeyInfo;
    match SubjectPublicKeyInfo::from_der(public_key) {
        Ok((_, info)) => key_id_of_bits(&info.subject_public_key.data),
        Err(_) => key_id_of_bits(public_key),
    }
}

/// RFC 7093, method 1: the leftmost 160 bits of the SHA-256 of the key.
fn key_id_of_bits(bits: &[u8]) -> Vec<u8> {
    digest(&SHA256, bits).as_ref().iter().take(20).copied().collect()
}
