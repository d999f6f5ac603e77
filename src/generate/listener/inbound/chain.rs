//! Inbound filter chains: what each port accepts under each mode of mutual TLS.

use crate::{
    generate::listener::{
        filter_chain::{RAW_BUFFER, TLS, plaintext_http_alpns},
        outbound::listener::MemberKind,
    },
    model::{authentication::MtlsMode, features::Features},
};

/// HTTP from a sidecar.
const MTLS_HTTP: &[&str] = &["istio-http/1.0", "istio-http/1.1", "istio-h2"];
/// TCP from a sidecar, with metadata exchange where it has it.
const MTLS_TCP: &[&str] = &["istio-peer-exchange", "istio"];
/// Everything from a sidecar.
const MTLS_ANY: &[&str] = &[
    "istio",
    "istio-peer-exchange",
    "istio-http/1.0",
    "istio-http/1.1",
    "istio-h2",
];

/// One chain that a port is expanded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainForm {
    /// ALPN values it matches; none: any.
    pub alpns: &'static [&'static str],
    /// Transport protocol it matches.
    pub transport: &'static str,
    /// It has a connection manager, else a TCP proxy.
    pub http: bool,
    /// It terminates TLS.
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

/// The chains of a port by what is declared for it and what mutual TLS demands, in order.
pub fn chain_forms(declared: MemberKind, mode: MtlsMode, features: &Features) -> Vec<ChainForm> {
    let plaintext_http = plaintext_http_alpns(features);
    match (declared, mode) {
        (MemberKind::Http, MtlsMode::Strict) => vec![form(&[], TLS, true, true)],
        (MemberKind::Http, MtlsMode::Permissive) => {
            vec![form(MTLS_ANY, TLS, true, true), form(&[], RAW_BUFFER, true, false)]
        }
        (MemberKind::Http, MtlsMode::Disable) => vec![form(&[], RAW_BUFFER, true, false)],
        (MemberKind::Tcp, MtlsMode::Strict) => vec![form(&[], TLS, false, true)],
        (MemberKind::Tcp, MtlsMode::Permissive) => vec![
            form(MTLS_ANY, TLS, false, true),
            form(&[], TLS, false, false),
            form(&[], RAW_BUFFER, false, false),
        ],
        (MemberKind::Tcp, MtlsMode::Disable) => vec![form(&[], RAW_BUFFER, false, false)],
        (MemberKind::Auto, MtlsMode::Strict) => {
            vec![form(MTLS_HTTP, TLS, true, true), form(&[], TLS, false, true)]
        }
        (MemberKind::Auto, MtlsMode::Permissive) => vec![
            form(MTLS_HTTP, TLS, true, true),
            form(plaintext_http, RAW_BUFFER, true, false),
            form(MTLS_TCP, TLS, false, true),
            form(&[], RAW_BUFFER, false, false),
            form(&[], TLS, false, false),
        ],
        (MemberKind::Auto, MtlsMode::Disable) => vec![
            form(plaintext_http, RAW_BUFFER, true, false),
            form(&[], RAW_BUFFER, false, false),
        ],
    }
}

/// The one chain of a port whose own TLS is terminated.
pub fn terminating_form(http: bool) -> ChainForm {
    form(&[], TLS, http, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strict_ports_accept_only_mutual_tls() {
        let features = Features::default();
        for declared in [MemberKind::Http, MemberKind::Tcp, MemberKind::Auto] {
            for form in chain_forms(declared, MtlsMode::Strict, &features) {
                assert_eq!((form.transport, form.terminates), (TLS, true), "{declared:?}");
            }
            for form in chain_forms(declared, MtlsMode::Disable, &features) {
                assert_eq!((form.transport, form.terminates), (RAW_BUFFER, false), "{declared:?}");
            }
        }
    }
}
