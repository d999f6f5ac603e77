//! TLS settings of both directions: compliance with `COMPLIANCE_POLICY`, and trust domains.

use crate::{
    model::features::Features,
    proto::{
        envoy::{
            extensions::transport_sockets::tls::v3::{CommonTlsContext, tls_parameters::TlsProtocol},
            r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern},
        },
        istio::mesh::v1alpha1::MeshConfig,
    },
};

const FIPS_CIPHERS: &[&str] = &[
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
];

/// Returns matchers of identities in the mesh's own trust domains.
pub fn trust_domain_matchers(features: &Features, mesh: &MeshConfig) -> Vec<StringMatcher> {
    if features.pilot_skip_validate_trust_domain {
        return Vec::new();
    }
    let own = std::iter::once(&mesh.trust_domain);
    let of_roots = mesh.ca_certificates.iter().flat_map(|root| &root.trust_domains);
    let mut domains: Vec<&String> = Vec::new();
    for domain in own.chain(&mesh.trust_domain_aliases).chain(of_roots) {
        if !domain.is_empty() && !domains.contains(&domain) {
            domains.push(domain);
        }
    }
    domains
        .into_iter()
        .map(|domain| StringMatcher {
            match_pattern: Some(MatchPattern::Prefix(format!("spiffe://{domain}/"))),
            ..Default::default()
        })
        .collect()
}

/// Restricts TLS settings to what `COMPLIANCE_POLICY` allows. Must be called last.
pub fn enforce_compliance(features: &Features, common: &mut CommonTlsContext) {
    match features.compliance_policy.as_str() {
        "fips-140-2" => {
            let params = common.tls_params.get_or_insert_default();
            params.tls_minimum_protocol_version = TlsProtocol::TlSv12 as i32;
            params.tls_maximum_protocol_version = TlsProtocol::TlSv12 as i32;
            params
                .cipher_suites
                .retain(|cipher| FIPS_CIPHERS.contains(&cipher.as_str()));
            params.ecdh_curves.clear();
        }
        "pqc" => {
            let params = common.tls_params.get_or_insert_default();
            params.tls_minimum_protocol_version = TlsProtocol::TlSv13 as i32;
            params.cipher_suites = owned(FIPS_CIPHERS);
            params.ecdh_curves = owned(&["X25519MLKEM768"]);
        }
        _ => {}
    }
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}
