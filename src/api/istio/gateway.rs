//! Validation of Istio Gateways.

use std::collections::BTreeSet;

use super::{
    common::{self, is_plain_http, is_protocol, is_tls},
    field_path::FieldPath,
};
use crate::{
    api::{
        Meta,
        names::{is_label, is_partial_wildcard, is_wildcard_domain},
    },
    base::{cidr, cipher_suite, fingerprint},
    proto::istio::networking::v1alpha3::{
        Gateway, Server, ServerTlsSettings,
        server_tls_settings::{TlSmode as Mode, TlsProtocol},
    },
};

/// The annotation of Gateways that are converted from the Gateway API. Their names may have dots.
pub const SEMANTICS_ANNOTATION: &str = "internal.istio.io/gateway-semantics";

/// Checks a Gateway.
pub fn check(at: &FieldPath<'_>, gateway: &Gateway, meta: &Meta) {
    let is_label_like = is_label(meta.name()) || meta.annotations.contains_key(SEMANTICS_ANNOTATION);
    at.require_on_admission(is_label_like, "the name of a Gateway has no dots");
    at.field("servers").require(!gateway.servers.is_empty(), "is required");
    // Istio admits such a selector, and no workload has such labels.
    let is_plain = |(key, value): (&String, &String)| !key.is_empty() && !key.contains('*') && !value.contains('*');
    if !gateway.selector.iter().all(is_plain) {
        at.field("selector")
            .warning("selects nothing; wildcards are not supported");
    }
    let mut names = BTreeSet::new();
    at.each("servers", &gateway.servers, |at, server| {
        self::server(at, server);
        if let Some(port) = &server.port
            && !names.insert(port.name.as_str())
        {
            at.field("port")
                .field("name")
                .refuse(format!("{:?} is a duplicate", port.name));
        }
    });
}

fn server(at: &FieldPath<'_>, server: &Server) {
    at.field("hosts").require(!server.hosts.is_empty(), "is required");
    at.each("hosts", &server.hosts, |at, host| {
        let (namespace, host) = host.split_once('/').unwrap_or(("*", host));
        at.require(
            matches!(namespace, "*" | ".") || is_label(namespace),
            "the part before the slash is not a namespace",
        );
        if !is_wildcard_domain(host) && cidr::parse_ip(host).is_none() {
            at.error(format!("{host:?} is not a host name"));
        } else if is_partial_wildcard(host) {
            at.refuse(format!("{host:?} is a partial wildcard, want `*` or `*.` and a domain"));
        } else if host != "*" && !host.contains('.') {
            at.refuse(format!("{host:?} is a short name, want a full one"));
        }
    });
    let Some(port) = &server.port else {
        return at.field("port").error("is required");
    };
    let unix = server.bind.starts_with("unix://");
    if let Some(path) = server.bind.strip_prefix("unix://") {
        common::unix_path_on_admission(&at.field("bind"), path);
    }
    if !server.bind.is_empty() && !unix && cidr::parse_ip(&server.bind).is_none() {
        at.field("bind")
            .error(format!("{:?} is not an IP address", server.bind));
    }
    {
        let at = at.field("port");
        if unix {
            at.field("number")
                .require(port.number == 0, "must be 0 with a unix socket");
        } else {
            common::port(&at.field("number"), port.number);
        }
        at.field("name")
            .require_on_admission(!port.name.is_empty(), "is required");
        if !is_protocol(&port.protocol) {
            at.field("protocol")
                .refuse(format!("{:?} is not a protocol", port.protocol));
        }
        at.field("targetPort")
            .require_on_admission(port.target_port == 0, "has no meaning in a Gateway");
    }
    tls_and_protocol(at, server, &port.protocol);
}

fn tls_and_protocol(at: &FieldPath<'_>, server: &Server, protocol: &str) {
    let at = at.field("tls");
    let Some(tls) = &server.tls else {
        let needed = ["HTTPS", "TLS"]
            .iter()
            .any(|known| known.eq_ignore_ascii_case(protocol));
        return at.require(!needed, "is required for HTTPS and TLS");
    };
    if is_tls(protocol) {
        if tls.https_redirect {
            at.field("httpsRedirect").warning("has an effect for plain HTTP only");
        }
        server_tls(&at, tls);
    } else if is_plain_http(protocol) {
        let files = [&tls.server_certificate, &tls.private_key, &tls.ca_certificates];
        let passes = matches!(tls.mode(), Mode::Passthrough | Mode::AutoPassthrough);
        let other = !passes || files.iter().any(|file| !file.is_empty());
        at.require(!other, "plain HTTP takes httpsRedirect only");
        if !other {
            unused_tls(&at, tls);
        }
    } else {
        at.refuse("has no meaning for this protocol");
    }
}

/// Checks TLS settings of a plain HTTP server, none of which has an effect except `httpsRedirect`.
///
/// Parity (pkg/config/validation/validation.go, `validateServer`): they are checked as those of other servers.
fn unused_tls(at: &FieldPath<'_>, tls: &ServerTlsSettings) {
    versions(at, tls);
    let sources = [
        !tls.credential_name.is_empty(),
        !tls.credential_names.is_empty(),
        !tls.tls_certificates.is_empty(),
    ];
    at.require_on_admission(
        sources.into_iter().filter(|given| *given).count() <= 1,
        "tlsCertificates, credentialName and credentialNames cannot be combined",
    );
    unused_certificates(at, tls);
}

/// Checks the certificates of a server that passes TLS through.
fn unused_certificates(at: &FieldPath<'_>, tls: &ServerTlsSettings) {
    let texts = [
        &tls.server_certificate,
        &tls.private_key,
        &tls.ca_certificates,
        &tls.ca_crl,
        &tls.credential_name,
    ];
    let lists_any = !tls.credential_names.is_empty() || !tls.tls_certificates.is_empty();
    if lists_any || texts.iter().any(|text| !text.is_empty()) {
        at.warning("certificates have no effect with passthrough");
    }
    at.field("caCrl").require_on_admission(
        tls.ca_crl.is_empty() || tls.credential_name.is_empty(),
        "cannot be combined with credentialName",
    );
}

/// Checks the TLS settings of a server, or of a Sidecar's ingress listener.
pub fn server_tls(at: &FieldPath<'_>, tls: &ServerTlsSettings) {
    let mode = Mode::try_from(tls.mode).unwrap_or(Mode::Passthrough);
    let files = [&tls.server_certificate, &tls.private_key, &tls.ca_certificates];
    let any_file = files.iter().any(|file| !file.is_empty());
    let credential = !tls.credential_name.is_empty() || !tls.credential_names.is_empty();
    versions(at, tls);
    at.require(
        tls.credential_name.is_empty() || tls.credential_names.is_empty(),
        "credentialName and credentialNames cannot be combined",
    );
    let sources = [
        !tls.server_certificate.is_empty() && !tls.private_key.is_empty(),
        credential,
        !tls.tls_certificates.is_empty(),
    ];
    at.require_on_admission(
        sources.into_iter().filter(|given| *given).count() <= 1,
        "serverCertificate, tlsCertificates and credentials cannot be combined",
    );
    match mode {
        Mode::IstioMutual => at.require_on_admission(
            !any_file && !credential && tls.tls_certificates.is_empty(),
            "ISTIO_MUTUAL takes no certificates",
        ),
        Mode::Passthrough | Mode::AutoPassthrough => unused_certificates(at, tls),
        Mode::Simple | Mode::Mutual | Mode::OptionalMutual if credential => {
            if !tls.ca_crl.is_empty() {
                at.field("caCrl")
                    .warning("has no effect with credentialName; hint: add the list to the Secret");
            }
        }
        Mode::Simple | Mode::Mutual | Mode::OptionalMutual => own_certificates(at, tls, mode),
    }
    if tls.credential_names.len() > 2 || tls.tls_certificates.len() > 2 {
        at.warning("more than two certificates: only one RSA and one ECDSA certificate make sense");
    }
    if mode == Mode::Simple && !tls.subject_alt_names.is_empty() {
        at.field("subjectAltNames")
            .warning("have no effect with SIMPLE, which asks for no client certificate");
    }
    fingerprints(at, tls);
}

/// Checks the certificates of a server without credentials.
fn own_certificates(at: &FieldPath<'_>, tls: &ServerTlsSettings, mode: Mode) {
    let is_single = tls.tls_certificates.is_empty();
    if is_single {
        at.field("serverCertificate")
            .require(!tls.server_certificate.is_empty(), "or credentialName is required");
        at.field("privateKey")
            .require(!tls.private_key.is_empty(), "or credentialName is required");
    }
    at.each("tlsCertificates", &tls.tls_certificates, |at, certificate| {
        at.field("serverCertificate")
            .require_on_admission(!certificate.server_certificate.is_empty(), "is required");
        at.field("privateKey")
            .require_on_admission(!certificate.private_key.is_empty(), "is required");
    });
    let (has_authority, authority) = (!tls.ca_certificates.is_empty(), at.field("caCertificates"));
    match mode {
        Mode::Mutual if is_single => authority.require(has_authority, "is required with MUTUAL"),
        Mode::Mutual => authority.require_on_admission(has_authority, "is required with MUTUAL"),
        Mode::OptionalMutual => authority.require_on_admission(has_authority, "is required with OPTIONAL_MUTUAL"),
        _ => at
            .field("caCrl")
            .require_on_admission(tls.ca_crl.is_empty(), "cannot be combined with SIMPLE"),
    }
}

/// Warns of fingerprints that no certificate has.
fn fingerprints(at: &FieldPath<'_>, tls: &ServerTlsSettings) {
    at.each("verifyCertificateSpki", &tls.verify_certificate_spki, |at, text| {
        if !fingerprint::is_of_key(text) {
            at.warning("is not the SHA-256 of a key in Base64, so no client has it");
        }
    });
    at.each("verifyCertificateHash", &tls.verify_certificate_hash, |at, text| {
        if !fingerprint::is_of_certificate(text) {
            at.warning("is not the SHA-256 of a certificate in hexadecimal digits, so no client has it");
        }
    });
}

fn versions(at: &FieldPath<'_>, tls: &ServerTlsSettings) {
    let version = |version: i32| TlsProtocol::try_from(version).unwrap_or(TlsProtocol::TlsAuto);
    let (least, most) = (version(tls.min_protocol_version), version(tls.max_protocol_version));
    // Parity (pkg/config/validation/validation.go, `validateTLSOptions`): suites for older versions have to be named.
    if matches!(least, TlsProtocol::Tlsv10 | TlsProtocol::Tlsv11) && tls.cipher_suites.is_empty() {
        at.field("minProtocolVersion")
            .warning("versions below 1.2 need cipherSuites, because the default ones are for later versions");
    }
    if most != TlsProtocol::TlsAuto && least as i32 > most as i32 {
        at.field("minProtocolVersion").warning("is above maxProtocolVersion");
    }
    let mut seen = BTreeSet::new();
    at.each("cipherSuites", &tls.cipher_suites, |at, suite| {
        if !cipher_suite::is_known(suite) {
            at.warning(format!("{suite:?} is not a cipher suite of proxies and has no effect"));
        } else if !seen.insert(suite) {
            at.warning(format!("{suite} is a duplicate"));
        }
    });
}
