//! Inbound filter chains of a port under each mode of mutual TLS.

use crate::{
    generate::listener::{
        filter_chain::{RAW_BUFFER, TLS, plaintext_http_alpns},
        outbound::listener::ChainKind,
    },
    model::{authentication::MtlsMode, features::Features},
};

/// ALPN values of HTTP from a sidecar.
const MTLS_HTTP: &[&str] = &["istio-http/1.0", "istio-http/1.1", "istio-h2"];
/// ALPN values of TCP from a sidecar, with metadata exchange if it has it.
const MTLS_TCP: &[&str] = &["istio-peer-exchange", "istio"];
/// ALPN values of all traffic from a sidecar.
const MTLS_ANY: &[&str] = &[
    "istio",
    "istio-peer-exchange",
    "istio-http/1.0",
    "istio-http/1.1",
    "istio-h2",
];

/// One of the chains of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainForm {
    /// ALPN values that it matches; empty means any.
    pub alpns: &'static [&'static str],
    /// Transport protocol that it matches.
    pub transport: &'static str,
    /// True if it has a connection manager; otherwise a TCP proxy.
    pub http: bool,
    /// True if it terminates TLS.
    pub terminates: bool,
}

const fn form(alpns: &'static [&'static str], transport: &'static str, http: bool, terminates: bool) -> ChainForm {
    ChainForm {
        alpns,
        transport,
        http,
        terminates,
    }
}

/// Returns the chains of a port by its declared protocol and mode of mutual TLS, in order.
pub fn chain_forms(declared: ChainKind, mode: MtlsMode, features: &Features) -> Vec<ChainForm> {
    let plaintext_http = plaintext_http_alpns(features);
    match (declared, mode) {
        (ChainKind::Http, MtlsMode::Strict) => vec![form(&[], TLS, true, true)],
        (ChainKind::Http, MtlsMode::Permissive) => {
            vec![form(MTLS_ANY, TLS, true, true), form(&[], RAW_BUFFER, true, false)]
        }
        (ChainKind::Http, MtlsMode::Disable) => vec![form(&[], RAW_BUFFER, true, false)],
        (ChainKind::Tcp, MtlsMode::Strict) => vec![form(&[], TLS, false, true)],
        (ChainKind::Tcp, MtlsMode::Permissive) => vec![
            form(MTLS_ANY, TLS, false, true),
            form(&[], TLS, false, false),
            form(&[], RAW_BUFFER, false, false),
        ],
        (ChainKind::Tcp, MtlsMode::Disable) => vec![form(&[], RAW_BUFFER, false, false)],
        (ChainKind::Auto, MtlsMode::Strict) => {
            vec![form(MTLS_HTTP, TLS, true, true), form(&[], TLS, false, true)]
        }
        (ChainKind::Auto, MtlsMode::Permissive) => vec![
            form(MTLS_HTTP, TLS, true, true),
            form(plaintext_http, RAW_BUFFER, true, false),
            form(MTLS_TCP, TLS, false, true),
            form(&[], RAW_BUFFER, false, false),
            form(&[], TLS, false, false),
        ],
        (ChainKind::Auto, MtlsMode::Disable) => vec![
            form(plaintext_http, RAW_BUFFER, true, false),
            form(&[], RAW_BUFFER, false, false),
        ],
    }
}

/// Returns the only chain of a port whose own TLS is terminated.
pub fn terminating_form(http: bool) -> ChainForm {
    form(&[], TLS, http, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strict_ports_accept_only_mutual_tls() {
        let features = Features::default();
        for declared in [ChainKind::Http, ChainKind::Tcp, ChainKind::Auto] {
            for form in chain_forms(declared, MtlsMode::Strict, &features) {
                assert_eq!((form.transport, form.terminates), (TLS, true), "{declared:?}");
            }
            for form in chain_forms(declared, MtlsMode::Disable, &features) {
                assert_eq!((form.transport, form.terminates), (RAW_BUFFER, false), "{declared:?}");
            }
        }
    }
}
