//! Checks that a CSR requests only identities of its caller, since an external signer certifies its content as it is.
//!
//! Parity (security/pkg/pki/ra/common.go, ValidateCSR).

use std::net::IpAddr;

use smol_str::SmolStr;
use x509_parser::{
    cri_attributes::ParsedCriAttribute,
    extensions::{GeneralName, ParsedExtension, X509Extension},
    nom,
    oid_registry::OID_X509_ORGANIZATION_NAME,
    prelude::{FromDer, PEMError, X509CertificationRequest, X509Error, X509Name},
};

use crate::ca::key;

/// The maximum size of a CSR.
const CSR_BYTES_MAX: usize = 64 * 1024;

/// Reason why a CSR is not passed on.
#[derive(Debug, thiserror::Error)]
pub(super) enum CheckError {
    /// It is too long.
    #[error("it is longer than {CSR_BYTES_MAX} bytes")]
    TooLong,
    /// It is not PEM.
    #[error("not PEM")]
    Pem(#[source] nom::Err<PEMError>),
    /// Its DER is malformed.
    #[error("invalid CSR: {0}")]
    Der(#[source] nom::Err<X509Error>),
    /// Bytes follow it.
    #[error("trailing bytes")]
    TrailingBytes,
    /// It does not prove possession of its key.
    #[error("it is not signed by its own key, or the algorithm is not supported")]
    Signature,
    /// Its subject is not empty.
    #[error("the subject is not empty: {0}")]
    Subject(String),
    /// It requests something else than extensions.
    #[error("an attribute other than the names is requested")]
    Attribute,
    /// It requests another extension than the names.
    #[error("an extension other than the names is requested")]
    Extension,
    /// It has no names.
    #[error("the CSR has no names")]
    NoNames,
    /// It has several names.
    #[error("the CSR has more than one name")]
    SeveralNames,
    /// Its name is not a URI.
    #[error("a name is not a URI: {0}")]
    NotUri(String),
    /// The caller does not have this identity.
    #[error("{0:?} is not an identity of the caller")]
    OtherIdentity(String),
}

/// Checks a PEM CSR of a caller with these identities. Returns the checked CSR alone, re-encoded as PEM, so that
/// trailing data never reaches the signer.
pub(super) fn check(csr: &[u8], identities: &[SmolStr]) -> Result<String, CheckError> {
    if csr.len() > CSR_BYTES_MAX {
        return Err(CheckError::TooLong);
    }
    let (_, block) = x509_parser::pem::parse_x509_pem(csr).map_err(CheckError::Pem)?;
    let (rest, request) = X509CertificationRequest::from_der(&block.contents).map_err(CheckError::Der)?;
    if !rest.is_empty() {
        return Err(CheckError::TrailingBytes);
    }
    let info = &request.certification_request_info;
    let (algorithm, signature) = (&request.signature_algorithm, &request.signature_value);
    if !key::is_signed(&info.subject_pki, algorithm, signature, info.raw) {
        return Err(CheckError::Signature);
    }
    check_subject(&info.subject)?;
    let mut extensions: Vec<&X509Extension<'_>> = Vec::new();
    for attribute in info.iter_attributes() {
        match attribute.parsed_attribute() {
            ParsedCriAttribute::ExtensionRequest(request) => extensions.extend(&request.extensions),
            _ => return Err(CheckError::Attribute),
        }
    }
    match extensions.as_slice() {
        [] => return Err(CheckError::NoNames),
        [names] => check_names(names, identities)?,
        _ => return Err(CheckError::Extension),
    }
    Ok(key::pem("CERTIFICATE REQUEST", &block.contents))
}

/// Checks that the subject is empty, or one empty organization as Istio's agent writes it.
fn check_subject(subject: &X509Name<'_>) -> Result<(), CheckError> {
    let mut attributes = subject.iter_attributes();
    let is_nameless = match (attributes.next(), attributes.next()) {
        (None, _) => true,
        (Some(only), None) => *only.attr_type() == OID_X509_ORGANIZATION_NAME && only.as_slice().is_empty(),
        _ => false,
    };
    if is_nameless {
        Ok(())
    } else {
        Err(CheckError::Subject(subject.to_string()))
    }
}

/// Checks that the names are at most one URI, which is an identity of the caller.
fn check_names(extension: &X509Extension<'_>, identities: &[SmolStr]) -> Result<(), CheckError> {
    let ParsedExtension::SubjectAlternativeName(names) = extension.parsed_extension() else {
        return Err(CheckError::Extension);
    };
    if names.general_names.len() > 1 {
        return Err(CheckError::SeveralNames);
    }
    for name in &names.general_names {
        let GeneralName::URI(uri) = name else {
            return Err(CheckError::NotUri(shown(name)));
        };
        if !identities.iter().any(|identity| identity == uri) {
            return Err(CheckError::OtherIdentity((*uri).to_owned()));
        }
    }
    Ok(())
}

fn shown(name: &GeneralName<'_>) -> String {
    match name {
        GeneralName::DNSName(name) => format!("DNS {name:?}"),
        GeneralName::RFC822Name(name) => format!("e-mail {name:?}"),
        GeneralName::IPAddress(bytes) => match (<[u8; 4]>::try_from(*bytes), <[u8; 16]>::try_from(*bytes)) {
            (Ok(ip), _) => format!("IP {}", IpAddr::from(ip)),
            (_, Ok(ip)) => format!("IP {}", IpAddr::from(ip)),
            _ => "IP".into(),
        },
        _ => "of another kind".into(),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        Attribute, CertificateParams, CustomExtension, DistinguishedName, DnType, KeyPair, KeyUsagePurpose, SanType,
    };

    use super::*;

    const ID: &str = "spiffe://cluster.local/ns/a/sa/b";

    fn uri(text: &str) -> SanType {
        SanType::URI(text.try_into().expect("ASCII text"))
    }

    fn dns(text: &str) -> SanType {
        SanType::DnsName(text.try_into().expect("ASCII text"))
    }

    fn params(names: Vec<SanType>, subject: &[(DnType, &str)]) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, text) in subject {
            params.distinguished_name.push(kind.clone(), *text);
        }
        params.subject_alt_names = names;
        params
    }

    fn request(params: &CertificateParams) -> String {
        let key = KeyPair::generate().expect("a key");
        let request = params.serialize_request(&key).expect("a request");
        request.pem().expect("valid PEM")
    }

    fn checked(params: &CertificateParams) -> Result<String, String> {
        check(request(params).as_bytes(), &["other".into(), ID.into()]).map_err(|error| error.to_string())
    }

    #[test]
    fn csrs_of_agents_and_ztunnels_are_accepted() {
        assert!(checked(&params(vec![uri(ID)], &[])).is_ok());
        assert!(checked(&params(vec![uri(ID)], &[(DnType::OrganizationName, "")])).is_ok());
    }

    #[test]
    fn the_checked_csr_is_the_one_passed_on() {
        let pem = request(&params(vec![uri(ID)], &[]));
        let evil = request(&params(vec![uri("spiffe://cluster.local/ns/a/sa/root")], &[]));
        let passed = check(format!("{pem}{evil}").as_bytes(), &[ID.into()]).expect("an accepted CSR");
        let block = |pem: &str| {
            x509_parser::pem::parse_x509_pem(pem.as_bytes())
                .expect("valid PEM")
                .1
                .contents
        };
        assert_eq!(block(&passed), block(&pem));
        assert_eq!(passed.matches("BEGIN").count(), 1);
    }

    #[test]
    fn other_identities_are_rejected() {
        let other = "spiffe://cluster.local/ns/a/sa/c";
        let refused = |params: &CertificateParams, why: &str| {
            let error = checked(params).expect_err(why);
            assert!(error.contains(why), "{error}");
        };
        refused(&params(vec![], &[]), "no names");
        refused(&params(vec![uri(other)], &[]), "is not an identity of the caller");
        refused(&params(vec![uri(ID), uri(ID)], &[]), "more than one name");
        refused(&params(vec![dns("other")], &[]), "DNS");
        refused(
            &params(vec![SanType::IpAddress([127, 0, 0, 1].into())], &[]),
            "IP 127.0.0.1",
        );
        refused(
            &params(vec![SanType::Rfc822Name("a@b".try_into().expect("ASCII text"))], &[]),
            "e-mail",
        );
        refused(&params(vec![uri(ID)], &[(DnType::CommonName, "")]), "subject");
        refused(&params(vec![uri(ID)], &[(DnType::OrganizationName, "x")]), "subject");
        refused(
            &params(
                vec![uri(ID)],
                &[(DnType::OrganizationName, ""), (DnType::OrganizationalUnitName, "")],
            ),
            "subject",
        );
        let mut more = params(vec![uri(ID)], &[]);
        more.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        refused(&more, "extension other");
        let mut more = params(vec![uri(ID)], &[]);
        more.custom_extensions = vec![CustomExtension::from_oid_content(&[1, 2, 3], vec![5, 0])];
        refused(&more, "extension other");
    }

    #[test]
    fn attributes_are_refused() {
        let key = KeyPair::generate().expect("a key");
        // A challenge password.
        let attribute = Attribute {
            oid: &[1, 2, 840, 113_549, 1, 9, 7],
            values: vec![0x31, 3, 0x0c, 1, b'x'],
        };
        let request = params(vec![uri(ID)], &[])
            .serialize_request_with_attributes(&key, vec![attribute])
            .and_then(|request| request.pem())
            .expect("a request");
        let error = check(request.as_bytes(), &[ID.into()]).expect_err("a refusal");
        assert!(matches!(error, CheckError::Attribute), "{error}");
    }

    #[test]
    fn invalid_csrs_are_rejected() {
        assert!(check(b"", &[]).is_err());
        assert!(check(&vec![b'x'; CSR_BYTES_MAX + 1], &[]).is_err());
        let pem = request(&params(vec![uri(ID)], &[]));
        let mut der = x509_parser::pem::parse_x509_pem(pem.as_bytes())
            .expect("valid PEM")
            .1
            .contents;
        assert!(
            check(
                key::pem("CERTIFICATE REQUEST", &[der.clone(), vec![0]].concat()).as_bytes(),
                &[ID.into()]
            )
            .is_err()
        );
        let last = der.len() - 1;
        der[last] ^= 1;
        let error =
            check(key::pem("CERTIFICATE REQUEST", &der).as_bytes(), &[ID.into()]).expect_err("a wrong signature");
        assert!(matches!(error, CheckError::Signature), "{error}");
    }
}
