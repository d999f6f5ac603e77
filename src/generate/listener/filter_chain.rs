//! Filter chains of outbound and gateway listeners under construction: their matches and conflicts.

use std::{collections::BTreeSet, net::IpAddr};

use bytes::Bytes;
use ipnet::IpNet;
use smol_str::{SmolStr, StrExt};

use crate::{
    api::names::is_partial_wildcard,
    base::cidr,
    generate::{
        constant::{cidr_range, duration},
        filter::chain_fields::NetworkFilters,
        wire::Writer,
    },
    model::{features::Features, service::UNSPECIFIED_IP},
    proto::{
        envoy::config::{
            core::v3::Metadata,
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

/// The maximum number of combinations of server names and ranges in a listener, beyond one for each name and each
/// range. Envoy stores every combination.
const MAX_COMBINATIONS: usize = 1 << 16;

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

/// The combinations of range, server name, transport and application protocol that the chains of a listener match.
/// Envoy refuses the whole listener if two chains match the same one, or if a chain has one twice.
#[derive(Default)]
pub struct TakenMatches {
    taken: BTreeSet<Combination>,
    /// Combinations that count against [`MAX_COMBINATIONS`].
    surplus: usize,
}

/// One combination of a chain's match, as Envoy compares it.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Combination {
    transport: &'static str,
    alpns: &'static [&'static str],
    /// Masked range; `None` for any.
    range: Option<IpNet>,
    /// Server name in lower case; `None` for any.
    name: Option<SmolStr>,
}

/// The part of a chain that no earlier chain matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remainder {
    /// All of it.
    Whole,
    /// Some server names or ranges.
    Part,
    /// Nothing: the chain must not be added. Without names or ranges it would match everything.
    Nothing,
}

impl TakenMatches {
    /// Reduces a chain to the server names and ranges that no earlier chain matches, and records them. Names that Envoy
    /// refuses are removed too.
    pub fn take(&mut self, chain: &mut Chain) -> Remainder {
        let any_name = chain.any_sni();
        let mut names: Vec<Option<SmolStr>> = if any_name {
            vec![None]
        } else {
            let accepted = chain.sni.iter().filter(|name| !is_partial_wildcard(name));
            accepted.map(|name| Some(name.to_ascii_lowercase_smolstr())).collect()
        };
        let has_partial_wildcard = !any_name && names.len() < chain.sni.len();
        let declared = chain.ranges.iter().filter_map(|range| matched_range(range));
        let mut ranges: Vec<Option<IpNet>> = declared.map(Some).collect();
        let declared_ranges = ranges.len();
        if ranges.is_empty() {
            ranges.push(None);
        }
        retain_unique(&mut names);
        retain_unique(&mut ranges);
        let unique = (names.len(), ranges.len());
        let surplus = (names.len() * ranges.len()).saturating_sub(names.len() + ranges.len());
        if self.surplus + surplus > MAX_COMBINATIONS {
            return Remainder::Nothing;
        }
        let (transport, alpns) = (chain.transport, chain.alpns);
        let combination = |range: Option<IpNet>, name: Option<&SmolStr>| Combination {
            transport,
            alpns,
            range,
            name: name.cloned(),
        };
        let is_free = |range: Option<IpNet>, name: Option<&SmolStr>| !self.taken.contains(&combination(range, name));
        ranges.retain(|range| names.iter().any(|name| is_free(*range, name.as_ref())));
        names.retain(|name| ranges.iter().all(|range| is_free(*range, name.as_ref())));
        if ranges.is_empty() || names.is_empty() {
            return Remainder::Nothing;
        }
        for range in &ranges {
            let taken = names.iter().map(|name| combination(*range, name.as_ref()));
            self.taken.extend(taken);
        }
        self.surplus += surplus;
        if !any_name && names.len() < chain.sni.len() {
            let mut kept: BTreeSet<&str> = names.iter().flatten().map(SmolStr::as_str).collect();
            chain
                .sni
                .retain(|name| kept.remove(name.to_ascii_lowercase_smolstr().as_str()));
        }
        if ranges.len() < declared_ranges {
            let mut kept: BTreeSet<IpNet> = ranges.iter().flatten().copied().collect();
            chain
                .ranges
                .retain(|range| matched_range(range).is_some_and(|range| kept.remove(&range)));
        }
        if has_partial_wildcard || (names.len(), ranges.len()) != unique {
            Remainder::Part
        } else {
            Remainder::Whole
        }
    }
}

/// Returns a range as Envoy compares it; `None` for the unspecified address, which stands for any.
fn matched_range(text: &str) -> Option<IpNet> {
    let range = cidr::parse(text)?;
    (range.addr() != IpAddr::from([0, 0, 0, 0])).then(|| range.trunc())
}

/// Removes all but the first of equal items.
fn retain_unique<T: Clone + Ord>(items: &mut Vec<T>) {
    if items.len() > 1 {
        let mut seen = BTreeSet::new();
        items.retain(|item| seen.insert(item.clone()));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    fn chain(ranges: &[&str], sni: &[&str]) -> Chain {
        Chain {
            ranges: owned(ranges),
            sni: owned(sni),
            ..Default::default()
        }
    }

    /// Ranges and server names of a chain.
    type Match<'m> = (&'m [&'m str], &'m [&'m str]);

    /// Returns what remains of the second of two chains.
    fn after(first: Match<'_>, second: Match<'_>) -> (Remainder, Vec<String>, Vec<String>) {
        let mut taken = TakenMatches::default();
        assert_eq!(taken.take(&mut chain(first.0, first.1)), Remainder::Whole);
        let mut second = chain(second.0, second.1);
        let remainder = taken.take(&mut second);
        (remainder, second.ranges, second.sni)
    }

    #[test]
    fn chains_with_equal_matches_are_dropped() {
        let cases: [(Match<'_>, Match<'_>); 5] = [
            ((&["1.2.3.4/8"], &[]), (&["1.9.9.9/8"], &[])),
            ((&[], &[]), (&["0.0.0.0"], &["*"])),
            ((&[], &["*", "a"]), (&[], &[])),
            ((&[], &["a", "b"]), (&[], &["B", "a"])),
            ((&["10.0.0.1", "10.0.0.2"], &["a"]), (&["10.0.0.2"], &["a"])),
        ];
        for (first, second) in cases {
            assert_eq!(after(first, second).0, Remainder::Nothing, "{first:?} {second:?}");
        }
    }

    #[test]
    fn chains_with_different_matches_are_kept() {
        let cases: [(Match<'_>, Match<'_>); 4] = [
            ((&["1.2.3.4/8"], &[]), (&["1.2.3.4/16"], &[])),
            ((&[], &["a"]), (&[], &["b"])),
            ((&[], &["a"]), (&[], &[])),
            ((&["10.0.0.1"], &["a"]), (&["10.0.0.2"], &["A", "b"])),
        ];
        for (first, second) in cases {
            let remaining = after(first, second);
            assert_eq!(remaining, (Remainder::Whole, owned(second.0), owned(second.1)));
        }
    }

    /// Envoy compares each name and each range.
    #[test]
    fn chains_keep_what_no_earlier_chain_matches() {
        let part = |ranges: &[&str], sni: &[&str]| (Remainder::Part, owned(ranges), owned(sni));
        assert_eq!(after((&[], &["a", "b"]), (&[], &["c", "B"])), part(&[], &["c"]));
        let two: &[&str] = &["10.0.0.0/8", "11.0.0.0/8"];
        assert_eq!(after((&["10.1.1.1/8"], &[]), (two, &[])), part(&["11.0.0.0/8"], &[]));
        assert_eq!(after((&["10.0.0.0/8"], &["a"]), (two, &["a", "b"])), part(two, &["b"]));
    }

    #[test]
    fn names_with_partial_wildcards_are_removed() {
        let part = (Remainder::Part, Vec::new(), owned(&["*.a.com"]));
        assert_eq!(after((&[], &["x"]), (&[], &["*a.com", "*.a.com"])), part);
        assert_eq!(after((&[], &["x"]), (&[], &["*a.com"])).0, Remainder::Nothing);
    }

    #[test]
    fn repeated_names_and_ranges_are_removed() {
        let remaining = after((&[], &["x"]), (&["10.0.0.1", "10.0.0.1/32"], &["a", "A", "b"]));
        assert_eq!(remaining, (Remainder::Whole, owned(&["10.0.0.1"]), owned(&["a", "b"])));
    }

    #[test]
    fn protocols_distinguish_chains() {
        let mut taken = TakenMatches::default();
        let mut http = Chain {
            alpns: PLAINTEXT_HTTP_ALPNS,
            transport: RAW_BUFFER,
            ..Default::default()
        };
        assert_eq!(taken.take(&mut http), Remainder::Whole);
        assert_eq!(taken.take(&mut Chain::default()), Remainder::Whole);
        assert_eq!(taken.take(&mut http), Remainder::Nothing);
    }

    /// A tenant may write thousands of names and ranges into one match.
    #[test]
    fn combinations_are_bounded() {
        let address = |number: u32| IpAddr::from(number.to_be_bytes()).to_string();
        let of = |count: u32, first: u32| Chain {
            ranges: (first..first + count).map(address).collect(),
            sni: (0..count).map(|number| format!("{number}.example")).collect(),
            ..Default::default()
        };
        let mut taken = TakenMatches::default();
        assert_eq!(taken.take(&mut of(300, 1 << 24)), Remainder::Nothing);
        assert_eq!(taken.take(&mut of(200, 1 << 24)), Remainder::Whole);
        assert_eq!(taken.take(&mut of(200, 2 << 24)), Remainder::Nothing);
        assert_eq!(taken.take(&mut of(1, 3 << 24)), Remainder::Whole);
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
