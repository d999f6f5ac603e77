//! Matcher that selects the chain of a connection in a waypoint's inner listener: by destination address, then by port,
//! then by detected protocol on ports without a declared one. With several networks, the host and port that the client
//! requested come before the address.

use prost::Name;
use smol_str::SmolStr;

use crate::{
    base::cidr,
    generate::tunnel::{CONNECT_AUTHORITY, FROM_GATEWAY, FROM_WAYPOINT, REQUEST_SOURCE},
    proto::{
        Any,
        envoy::extensions::matching::common_inputs::network::v3::{
            ApplicationProtocolInput, DestinationIpInput, DestinationPortInput, FilterStateInput,
        },
        xds::{
            core::v3::{CidrRange, TypedExtensionConfig},
            r#type::matcher::v3::{
                IpMatcher, Matcher,
                ip_matcher::IpRangeMatcher,
                matcher::{
                    MatcherTree, MatcherType, OnMatch,
                    matcher_tree::{MatchMap, TreeType},
                    on_match,
                },
            },
        },
    },
};

/// Chain of a port's connections.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PortChain {
    /// A single chain.
    One(String),
    /// A chain by detected protocol.
    Sniffed {
        /// Chain of other protocols.
        tcp: String,
        /// Chain of plaintext HTTP.
        http: String,
        /// ALPN values that the HTTP inspector reports.
        alpns: &'static [&'static str],
    },
    /// A chain by the kind of proxy that originated the tunnel.
    BySource {
        /// Chain of tunnels of waypoints.
        from_waypoint: String,
        /// Chain of tunnels of gateways.
        from_gateway: String,
        /// Chain of other tunnels.
        from_others: String,
    },
}

/// Returns the matcher of the whole listener. `matchers` are the encoded fields of an [`IpMatcher`].
pub(super) fn by_address(matchers: Vec<u8>) -> Matcher {
    let addresses = Any {
        type_url: IpMatcher::type_url(),
        value: matchers.into(),
    };
    let tree = TreeType::CustomMatch(extension("ip", addresses));
    tree_by("ip", Any::pack(&DestinationIpInput {}), tree)
}

/// Returns the matcher of the whole listener by the authority that clients request (`host:port`), before `rest`.
///
/// Parity (pilot/pkg/networking/core/listener_waypoint.go): addresses of services may overlap between networks.
pub(super) fn by_authority(chains: Vec<(String, PortChain)>, rest: Matcher) -> Matcher {
    if chains.is_empty() {
        return rest;
    }
    Matcher {
        on_no_match: Some(Box::new(nested(rest))),
        ..tree_by("authority-filter-state", filter_state(CONNECT_AUTHORITY), exact(chains))
    }
}

/// Returns the input of a matcher by filter state.
fn filter_state(key: &str) -> Any {
    Any::pack(&FilterStateInput {
        key: key.to_owned(),
        ..Default::default()
    })
}

/// Returns the matcher of one service; `None` without addresses or ports.
pub(super) fn service(addresses: &[SmolStr], chains: Vec<(u32, PortChain)>) -> Option<IpRangeMatcher> {
    let ranges = ranges(addresses);
    (!ranges.is_empty() && !chains.is_empty()).then(|| IpRangeMatcher {
        ranges,
        on_match: Some(nested(by_port(chains))),
        exclusive: false,
    })
}

/// Returns the matcher of workloads, whose connections on all ports have one chain; `None` without addresses.
pub(super) fn workloads(addresses: &[SmolStr], chain: PortChain) -> Option<IpRangeMatcher> {
    let ranges = ranges(addresses);
    (!ranges.is_empty()).then(|| IpRangeMatcher {
        ranges,
        on_match: Some(chosen(chain)),
        exclusive: false,
    })
}

fn ranges(addresses: &[SmolStr]) -> Vec<CidrRange> {
    let ranges = addresses.iter().filter_map(|address| cidr::parse(address));
    ranges
        .map(|range| CidrRange {
            address_prefix: range.addr().to_string(),
            prefix_len: Some(u32::from(range.prefix_len())),
        })
        .collect()
}

fn by_port(chains: Vec<(u32, PortChain)>) -> Matcher {
    let chains = chains.into_iter().map(|(port, chain)| (port.to_string(), chain));
    tree_by("port", Any::pack(&DestinationPortInput {}), exact(chains))
}

/// Selects a chain by a text.
fn exact(chains: impl IntoIterator<Item = (String, PortChain)>) -> TreeType {
    let map = chains.into_iter().map(|(text, chain)| (text, chosen(chain))).collect();
    TreeType::ExactMatchMap(MatchMap { map })
}

fn chosen(chain: PortChain) -> OnMatch {
    match chain {
        PortChain::One(name) => to_chain(name),
        PortChain::Sniffed { tcp, http, alpns } => nested(by_protocol(tcp, &http, alpns)),
        PortChain::BySource {
            from_waypoint,
            from_gateway,
            from_others,
        } => {
            let map = [(FROM_WAYPOINT, from_waypoint), (FROM_GATEWAY, from_gateway)];
            let map = map.map(|(source, chain)| (source.to_owned(), to_chain(chain)));
            let tree = TreeType::ExactMatchMap(MatchMap { map: map.into() });
            nested(Matcher {
                on_no_match: Some(Box::new(to_chain(from_others))),
                ..tree_by("request-source-filter-state", filter_state(REQUEST_SOURCE), tree)
            })
        }
    }
}

/// Matches the result of the HTTP inspector.
fn by_protocol(tcp: String, http: &str, alpns: &[&str]) -> Matcher {
    // The input is a list with each value in quotes.
    let map = alpns
        .iter()
        .map(|alpn| (format!("'{alpn}'"), to_chain(http.to_owned())))
        .collect();
    let tree = TreeType::ExactMatchMap(MatchMap { map });
    Matcher {
        on_no_match: Some(Box::new(to_chain(tcp))),
        ..tree_by("application-protocol", Any::pack(&ApplicationProtocolInput {}), tree)
    }
}

fn tree_by(input: &str, config: Any, tree: TreeType) -> Matcher {
    Matcher {
        matcher_type: Some(MatcherType::MatcherTree(MatcherTree {
            input: Some(extension(input, config)),
            tree_type: Some(tree),
        })),
        on_no_match: None,
    }
}

fn nested(matcher: Matcher) -> OnMatch {
    OnMatch {
        on_match: Some(on_match::OnMatch::Matcher(Box::new(matcher))),
        ..Default::default()
    }
}

/// Selects the chain with this name.
fn to_chain(name: String) -> OnMatch {
    let value = Any::pack(&name);
    OnMatch {
        on_match: Some(on_match::OnMatch::Action(extension(&name, value))),
        ..Default::default()
    }
}

fn extension(name: &str, config: Any) -> TypedExtensionConfig {
    TypedExtensionConfig {
        name: name.to_owned(),
        typed_config: Some(config),
    }
}
