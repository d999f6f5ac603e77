//! Inbound filter chains of a port under each mode of mutual TLS.

use crate::{
    generate::{
        filter::tls::InnerProtocol,
        listener::{
            filter_chain::{RAW_BUFFER, TLS, plaintext_http_alpns},
            outbound::listener::ChainKind,
        },
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

/// No ALPN value in particular.
const ANY_ALPN: &[&str] = &[];

/// One of the chains of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainForm {
    /// ALPN values that it matches; empty means any.
    pub alpns: &'static [&'static str],
    /// Transport protocol that it matches.
    pub transport: &'static str,
    /// Protocol of the bytes that it handles: HTTP by a connection manager, others by a TCP proxy.
    pub inside: InnerProtocol,
    /// True if it terminates TLS.
    pub terminates: bool,
}

/// TLS that is passed to the application.
const PASSED_TLS: ChainForm = ChainForm {
    alpns: ANY_ALPN,
    transport: TLS,
    inside: InnerProtocol::Tcp,
    terminates: false,
};

/// Returns a chain that terminates TLS.
const fn terminated(inside: InnerProtocol, alpns: &'static [&'static str]) -> ChainForm {
    ChainForm {
        alpns,
        transport: TLS,
        inside,
        terminates: true,
    }
}

const fn plaintext(inside: InnerProtocol, alpns: &'static [&'static str]) -> ChainForm {
    ChainForm {
        alpns,
        transport: RAW_BUFFER,
        inside,
        terminates: false,
    }
}

/// Returns the chains of a port by its declared protocol and mode of mutual TLS, in order.
pub fn chain_forms(declared: ChainKind, mode: MtlsMode, features: &Features) -> Vec<ChainForm> {
    use InnerProtocol::{Http, Tcp};
    let http_alpns = plaintext_http_alpns(features);
    match (declared, mode) {
        (ChainKind::Http, MtlsMode::Strict) => vec![terminated(Http, ANY_ALPN)],
        (ChainKind::Http, MtlsMode::Permissive) => vec![terminated(Http, MTLS_ANY), plaintext(Http, ANY_ALPN)],
        (ChainKind::Http, MtlsMode::Disable) => vec![plaintext(Http, ANY_ALPN)],
        (ChainKind::Tcp, MtlsMode::Strict) => vec![terminated(Tcp, ANY_ALPN)],
        (ChainKind::Tcp, MtlsMode::Permissive) => {
            vec![terminated(Tcp, MTLS_ANY), PASSED_TLS, plaintext(Tcp, ANY_ALPN)]
        }
        (ChainKind::Tcp, MtlsMode::Disable) => vec![plaintext(Tcp, ANY_ALPN)],
        (ChainKind::Auto, MtlsMode::Strict) => vec![terminated(Http, MTLS_HTTP), terminated(Tcp, ANY_ALPN)],
        (ChainKind::Auto, MtlsMode::Permissive) => vec![
            terminated(Http, MTLS_HTTP),
            plaintext(Http, http_alpns),
            terminated(Tcp, MTLS_TCP),
            plaintext(Tcp, ANY_ALPN),
            PASSED_TLS,
        ],
        (ChainKind::Auto, MtlsMode::Disable) => vec![plaintext(Http, http_alpns), plaintext(Tcp, ANY_ALPN)],
    }
}

/// Returns the only chain of a port whose own TLS is terminated.
pub fn terminating_form(declared: ChainKind) -> ChainForm {
    let inside = match declared {
        ChainKind::Http => InnerProtocol::Http,
        ChainKind::Tcp | ChainKind::Auto => InnerProtocol::Tcp,
    };
    terminated(inside, ANY_ALPN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strict_ports_accept_only_mutual_tls() {
        let features = Features::default();
        for declared in [ChainKind::Http, ChainKind::Tcp, ChainKind::Auto] {
            for (mode, expected) in [
                (MtlsMode::Strict, (TLS, true)),
                (MtlsMode::Disable, (RAW_BUFFER, false)),
            ] {
                let forms = chain_forms(declared, mode, &features);
                assert!(!forms.is_empty(), "{declared:?}");
                for form in forms {
                    assert_eq!((form.transport, form.terminates), expected, "{declared:?}");
                }
            }
        }
    }
}
