//! Secrets that Gateways refer to.

use base64::{Engine, engine::general_purpose::STANDARD};
use x509_parser::{parse_x509_certificate, pem::parse_x509_pem};

use super::missing_pods;
use crate::{
    analyze::{
        hosts,
        json::{indexed, labels, text},
        mesh::Mesh,
        message::{INVALID_CREDENTIAL, REFERENCE_NOT_FOUND, Report},
        object::Object,
    },
    api::Kind,
};

/// Reports credentials that do not exist next to the pods of the Gateway, or that are not valid certificates.
///
/// Parity (pkg/config/analysis/analyzers/gateway/secret.go).
pub(in crate::analyze) fn credentials(mesh: &Mesh, report: &mut Report) {
    for gateway in mesh.of(Kind::Gateway) {
        let selector = labels(gateway.spec("selector"));
        let pod = mesh.pods(None, &selector).next();
        let Some(namespace) = pod
            .map(|pod| pod.namespace.as_str())
            .filter(|namespace| !namespace.is_empty())
        else {
            missing_pods(gateway, &selector, report);
            continue;
        };
        for (path, server) in indexed("spec.servers", gateway.spec("servers")) {
            let credential = text(&server["tls"]["credentialName"]);
            if credential.is_empty() {
                continue;
            }
            let (namespace, name) = hosts::reference(namespace, credential);
            let path = format!("{path}.tls.credentialName");
            match mesh
                .find(Kind::Secret, namespace, name)
                .map(|secret| check(secret, mesh.settings.now))
            {
                None => {
                    let text = format!("{path}: namespace {namespace} has no Secret {name}");
                    report.add(REFERENCE_NOT_FOUND, gateway, text);
                }
                Some(Err(reason)) => {
                    let text = format!("{path}: Secret {namespace}/{name}: {reason}");
                    report.add(INVALID_CREDENTIAL, gateway, text);
                }
                Some(Ok(())) => {}
            }
        }
    }
}

/// Checks that a Secret has a key and a certificate that is valid now. No reason contains its content.
fn check(secret: &Object, now: i64) -> Result<(), &'static str> {
    let data = |key: &str| {
        let plain = text(&secret.manifest["stringData"][key]);
        let compact: String = text(&secret.manifest["data"][key]).split_whitespace().collect();
        let decoded = STANDARD.decode(compact).ok().filter(|bytes| !bytes.is_empty());
        Some(plain.as_bytes().to_vec())
            .filter(|bytes| !bytes.is_empty())
            .or(decoded)
    };
    let pair = |certificate: &str, key: &str| data(certificate).filter(|_| data(key).is_some());
    let certificate = pair("cert", "key").or_else(|| pair("tls.crt", "tls.key"));
    let certificate = certificate.ok_or("it has neither tls.crt and tls.key nor cert and key")?;
    let (_, block) = parse_x509_pem(&certificate).map_err(|_| "its certificate is not PEM")?;
    let (_, parsed) = parse_x509_certificate(&block.contents).map_err(|_| "its certificate cannot be parsed")?;
    let validity = parsed.validity();
    if (validity.not_before.timestamp()..=validity.not_after.timestamp()).contains(&now) {
        Ok(())
    } else {
        Err("its certificate is expired, or not valid yet")
    }
}
