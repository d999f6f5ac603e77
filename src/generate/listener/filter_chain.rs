//! Filter chains of outbound and gateway listeners under construction: their matches and conflicts.

use std::{collections::BTreeSet, net::IpAddr};

use bytes::Bytes;
use ipnet::IpNet;

use crate::{
    base::cidr,
    generate::{constant::duration, filter::chain_fields::NetworkFilters, wire::Writer},
    model::{features::Features, service::UNSPECIFIED_IP},
    proto::{
        envoy::config::{
            core::v3::{CidrRange, Metadata},
            listener::v3::{FilterChain, FilterChainMatch},
        },
        field::filter_chain,
    },
};

/// ALPN values of plaintext HTTP from the HTTP inspector.
pub const PLAINTEXT_HTTP_ALPNS: &[&str] = &["http/1.1", "h2c"];
/// The same with HTTP/1.0 enabled.
pub const PLAINTEXT_HTTP10_ALPNS: &[&str] = &["http/1.0", "http/1.1", "h2c"];
/// Transport protocol of plaintext.
pub const RAW_BUFFER: &str = "raw_buffer";
/// Transport protocol of TLS.
pub const TLS: &str = "tls";

/// Returns the ALPN values of plaintext HTTP.
pub fn plaintext_http_alpns(features: &Features) -> &'static [&'static str] {
    if features.pilot_http10 {
        PLAINTEXT_HTTP10_ALPNS
    } else {
        PLAINTEXT_HTTP_ALPNS
    }
}

/// A filter chain with its match.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    /// Server names; empty, or with `*`, means any.
    pub sni: Vec<String>,
    /// Destination ranges; empty means any.
    pub ranges: Vec<String>,
    /// ALPN values; empty means any.
    pub alpns: &'static [&'static str],
    /// `tls`, `raw_buffer`, or empty for any.
    pub transport: &'static str,
    /// Metadata with its origin.
    pub metadata: Option<Metadata>,
    /// Filters.
    pub filters: NetworkFilters,
    /// Encoded transport socket that terminates TLS.
    pub transport_socket: Option<Bytes>,
}

/// See [`Chain::match_key`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MatchKey {
    transport: &'static str,
    alpns: &'static [&'static str],
    sni: BTreeSet<String>,
    ranges: BTreeSet<IpNet>,
}

impl Chain {
    /// Returns true if the chain matches everything.
    pub fn matches_all(&self) -> bool {
        self.any_sni() && self.alpns.is_empty() && self.transport.is_empty() && self.ranges.is_empty()
    }

    /// Returns true if the chain matches any server name.
    pub fn any_sni(&self) -> bool {
        self.sni.is_empty() || self.sni.iter().any(|sni| sni == "*")
    }

    /// Returns the match as Envoy compares it: Envoy accepts only one of two chains with equal matches.
    pub fn match_key(&self) -> MatchKey {
        let names = self.sni.iter().filter(|name| *name != "*");
        let ranges = self.ranges.iter().filter_map(|range| cidr::parse(range));
        MatchKey {
            transport: self.transport,
            alpns: self.alpns,
            sni: names.cloned().collect(),
            ranges: ranges
                .filter(|range| range.addr() != IpAddr::from([0, 0, 0, 0]))
                .map(|range| range.trunc())
                .collect(),
        }
    }

    /// Returns true if the match or the filters need the server name of the client hello.
    pub fn needs_tls_inspector(&self) -> bool {
        !self.sni.is_empty() || self.filters.resolves_sni
    }

    /// Takes the match out of the chain; `None` if it matches everything.
    fn take_match(&mut self) -> Option<FilterChainMatch> {
        if self.matches_all() {
            return None;
        }
        let mut server_names = if self.any_sni() {
            Vec::new()
        } else {
            std::mem::take(&mut self.sni)
        };
        server_names.sort_unstable();
        self.ranges.sort_unstable();
        let ranges = &self.ranges;
        Some(FilterChainMatch {
            application_protocols: self.alpns.iter().map(|alpn| (*alpn).to_owned()).collect(),
            transport_protocol: self.transport.to_owned(),
            server_names,
            prefix_ranges: ranges
                .iter()
                .filter_map(|range| cidr_range(range))
                .filter(|range| range.address_prefix != UNSPECIFIED_IP)
                .collect(),
            ..Default::default()
        })
    }

    /// Encodes the chain.
    pub fn write(mut self, out: &mut Writer<FilterChain>, features: &Features) {
        if let Some(by) = self.take_match() {
            out.message(filter_chain::FILTER_CHAIN_MATCH, &by);
        }
        out.fields(self.filters.fields());
        if let Some(metadata) = &self.metadata {
            out.message(filter_chain::METADATA, metadata);
        }
        if let Some(socket) = &self.transport_socket {
            out.bytes(filter_chain::TRANSPORT_SOCKET, socket);
        }
        if let Some(timeout) = connect_timeout(features) {
            out.message(filter_chain::TRANSPORT_SOCKET_CONNECT_TIMEOUT, &timeout);
        }
    }
}

/// Returns the timeout of TLS handshakes; `None` for no limit.
pub fn connect_timeout(features: &Features) -> Option<prost_types::Duration> {
    let timeout = features.pilot_gateway_transport_socket_connect_timeout;
    (!timeout.is_zero()).then(|| duration(timeout))
}

/// Returns the number of connections accepted per event loop iteration.
pub fn max_connections_per_event(features: &Features) -> Option<u32> {
    match features.max_connections_per_socket_event_loop {
        0 => None,
        count => Some(count),
    }
}

/// Parses a range, or an address as a range of one.
pub fn cidr_range(text: &str) -> Option<CidrRange> {
    let range = cidr::parse(text)?;
    Some(CidrRange {
        address_prefix: range.addr().to_string(),
        prefix_len: Some(u32::from(range.prefix_len())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(ranges: &[&str], sni: &[&str]) -> Chain {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Chain {
            ranges: owned(ranges),
            sni: owned(sni),
            ..Default::default()
        }
    }

    #[test]
    fn conflicts_compare_masked_ranges() {
        let of = |ranges: &[&str], sni: &[&str]| chain(ranges, sni).match_key();
        assert_eq!(of(&["1.2.3.4/8"], &[]), of(&["1.9.9.9/8"], &[]));
        assert_ne!(of(&["1.2.3.4/8"], &[]), of(&["1.2.3.4/16"], &[]));
        assert_eq!(of(&["0.0.0.0"], &["*"]), of(&[], &[]));
        assert_ne!(of(&[], &["a"]), of(&[], &["b"]));
    }

    #[test]
    fn a_star_matches_all() {
        assert_eq!(chain(&[], &["*", "a"]).take_match(), None);
        let built = chain(&["10.0.0.0/8", "0.0.0.0"], &["b", "a"])
            .take_match()
            .expect("match");
        assert_eq!(built.server_names, ["a", "b"]);
        assert_eq!(built.prefix_ranges.len(), 1);
    }
}
