//! Whether a request asks only for what its sender is: another signer is going to certify whatever stands in it.

use std::net::IpAddr;

use smol_str::SmolStr;
use x509_parser::{
    cri_attributes::ParsedCriAttribute,
    extensions::{GeneralName, ParsedExtension, X509Extension},
    oid_registry::OID_X509_ORGANIZATION_NAME,
    prelude::{FromDer, X509CertificationRequest, X509Name},
};

use crate::ca::key;

/// More than any request needs.
const CSR_BYTES_MAX: usize = 64 * 1024;

/// Checks a PEM request of a caller with these identities. What is given back is the request that was checked, as PEM
/// and without anything around it. The error says what is wrong.
pub(super) fn check(csr: &[u8], identities: &[SmolStr]) -> Result<String, String> {
    if csr.len() > CSR_BYTES_MAX {
        return Err(format!("it is longer than {CSR_BYTES_MAX} bytes"));
    }
    let (_, block) = x509_parser::pem::parse_x509_pem(csr).map_err(|_| "it is no PEM")?;
    let (rest, request) =
        X509CertificationRequest::from_der(&block.contents).map_err(|error| format!("it cannot be read: {error}"))?;
    if !rest.is_empty() {
        return Err("bytes follow it".into());
    }
    let info = &request.certification_request_info;
    let (algorithm, signature) = (&request.signature_algorithm, &request.signature_value);
    if !key::is_signed(&info.subject_pki, algorithm, signature, info.raw) {
        return Err("it is not signed by its own key, or its algorithm is not supported".into());
    }
    check_subject(&info.subject)?;
    let mut extensions: Vec<&X509Extension<'_>> = Vec::new();
    for attribute in info.iter_attributes() {
        match attribute.parsed_attribute() {
            ParsedCriAttribute::ExtensionRequest(request) => extensions.extend(&request.extensions),
            _ => return Err("it has an attribute besides the names".into()),
        }
    }
    match extensions.as_slice() {
        [] => return Err("it has no names".into()),
        [names] => check_names(names, identities)?,
        _ => return Err("it asks for an extension besides the names".into()),
    }
    Ok(key::pem("CERTIFICATE REQUEST", &block.contents))
}

/// The subject is empty, or an organization without a name, as Istio's agent writes it.
fn check_subject(subject: &X509Name<'_>) -> Result<(), String> {
    let mut attributes = subject.iter_attributes();
    let is_nameless = match (attributes.next(), attributes.next()) {
        (None, _) => true,
        (Some(only), None) => *only.attr_type() == OID_X509_ORGANIZATION_NAME && only.as_slice().is_empty(),
        _ => false,
    };
    if is_nameless {
        Ok(())
    } else {
        Err(format!("its subject is not empty: {subject}"))
    }
}

/// There is at most one URI and nothing else, and it is a name of the caller.
fn check_names(extension: &X509Extension<'_>, identities: &[SmolStr]) -> Result<(), String> {
    let ParsedExtension::SubjectAlternativeName(names) = extension.parsed_extension() else {
        return Err("it asks for an extension besides the names".into());
    };
    if names.general_names.len() > 1 {
        return Err("it has more than one name".into());
    }
    for name in &names.general_names {
        let GeneralName::URI(uri) = name else {
            return Err(format!("it has a name that is no URI: {}", shown(name)));
        };
        if !identities.iter().any(|identity| identity == uri) {
            return Err(format!("{uri:?} is not who the caller is"));
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
        SanType::URI(text.try_into().expect("ASCII"))
    }

    fn dns(text: &str) -> SanType {
        SanType::DnsName(text.try_into().expect("ASCII"))
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
        request.pem().expect("PEM")
    }

    fn checked(params: &CertificateParams) -> Result<String, String> {
        check(request(params).as_bytes(), &["other".into(), ID.into()])
    }

    #[test]
    fn requests_of_agents_and_ztunnels_pass() {
        assert!(checked(&params(vec![uri(ID)], &[])).is_ok());
        assert!(checked(&params(vec![uri(ID)], &[(DnType::OrganizationName, "")])).is_ok());
    }

    #[test]
    fn what_is_passed_on_is_what_was_checked() {
        let pem = request(&params(vec![uri(ID)], &[]));
        let evil = request(&params(vec![uri("spiffe://cluster.local/ns/a/sa/root")], &[]));
        let passed = check(format!("{pem}{evil}").as_bytes(), &[ID.into()]).expect("it passes");
        let block = |pem: &str| {
            x509_parser::pem::parse_x509_pem(pem.as_bytes())
                .expect("PEM")
                .1
                .contents
        };
        assert_eq!(block(&passed), block(&pem));
        assert_eq!(passed.matches("BEGIN").count(), 1);
    }

    #[test]
    fn what_the_caller_is_not_is_refused() {
        let other = "spiffe://cluster.local/ns/a/sa/c";
        let refused = |params: &CertificateParams, why: &str| {
            let error = checked(params).expect_err(why);
            assert!(error.contains(why), "{error}");
        };
        refused(&params(vec![], &[]), "no names");
        refused(&params(vec![uri(other)], &[]), "not who the caller is");
        refused(&params(vec![uri(ID), uri(ID)], &[]), "more than one name");
        refused(&params(vec![dns("other")], &[]), "DNS");
        refused(
            &params(vec![SanType::IpAddress([127, 0, 0, 1].into())], &[]),
            "IP 127.0.0.1",
        );
        refused(
            &params(vec![SanType::Rfc822Name("a@b".try_into().expect("ASCII"))], &[]),
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
        refused(&more, "extension besides");
        let mut more = params(vec![uri(ID)], &[]);
        more.custom_extensions = vec![CustomExtension::from_oid_content(&[1, 2, 3], vec![5, 0])];
        refused(&more, "extension besides");
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
        assert!(error.contains("attribute"), "{error}");
    }

    #[test]
    fn what_is_no_request_is_refused() {
        assert!(check(b"", &[]).is_err());
        assert!(check(&vec![b'x'; CSR_BYTES_MAX + 1], &[]).is_err());
        let pem = request(&params(vec![uri(ID)], &[]));
        let mut der = x509_parser::pem::parse_x509_pem(pem.as_bytes())
            .expect("PEM")
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
        assert!(error.contains("signed"), "{error}");
    }
}
