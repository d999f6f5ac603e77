//! Listener filters: original destination and source, TLS and HTTP inspection, and the ports on which they run.

use std::collections::BTreeMap;

use crate::proto::{
    Any,
    envoy::{
        config::listener::v3::{
            FilterChainMatch, ListenerFilter, ListenerFilterChainMatchPredicate, listener_filter,
            listener_filter_chain_match_predicate::{MatchSet, Rule},
        },
        extensions::filters::listener::{
            http_inspector::v3::HttpInspector, original_dst::v3::OriginalDst, original_src::v3::OriginalSrc,
            tls_inspector::v3::TlsInspector,
        },
        r#type::v3::Int32Range,
    },
};

use super::filter_chain::{PLAINTEXT_HTTP_ALPNS, TLS};

/// Packet mark of a transparent sidecar's connections to its workload.
const TPROXY_MARK: u32 = 1337;

/// Returns the filter that reads server name and ALPN of TLS.
pub fn tls_inspector() -> ListenerFilter {
    let config = TlsInspector {
        initial_read_buffer_size: Some(512),
        ..Default::default()
    };
    filter("envoy.filters.listener.tls_inspector", Any::pack(&config))
}

/// Returns the filter that detects plaintext HTTP. It follows the TLS inspector, so that it ignores TLS.
pub fn http_inspector() -> ListenerFilter {
    filter("envoy.filters.listener.http_inspector", Any::pack(&HttpInspector {}))
}

/// Returns the filter that restores the original destination address.
pub fn original_destination() -> ListenerFilter {
    filter(
        "envoy.filters.listener.original_dst",
        Any::pack(&OriginalDst::default()),
    )
}

/// Returns the filter that keeps the source address towards the workload.
pub fn original_source() -> ListenerFilter {
    let config = OriginalSrc {
        mark: TPROXY_MARK,
        ..Default::default()
    };
    filter("envoy.filters.listener.original_src", Any::pack(&config))
}

/// Returns a listener filter that always runs.
pub fn filter(name: &str, config: Any) -> ListenerFilter {
    ListenerFilter {
        name: name.to_owned(),
        config_type: Some(listener_filter::ConfigType::TypedConfig(config)),
        ..Default::default()
    }
}

/// Inspectors that the chains of one port need.
#[derive(Clone, Copy, Default)]
struct RequiredInspectors {
    tls: bool,
    http: bool,
}

/// Inspectors of a listener by port. Chains without a port count as port 0.
#[derive(Default)]
pub struct InspectorsByPort(BTreeMap<u32, RequiredInspectors>);

impl InspectorsByPort {
    /// Adds the match of a chain.
    pub fn add(&mut self, by: &FilterChainMatch) {
        let needs = self.0.entry(by.destination_port.unwrap_or_default()).or_default();
        needs.tls |= by.transport_protocol == TLS;
        let alpns = &mut by.application_protocols.iter();
        needs.http |= alpns.any(|alpn| PLAINTEXT_HTTP_ALPNS.contains(&alpn.as_str()));
    }

    /// Returns the inspectors, disabled on ports that do not need them.
    pub fn inspectors(&self) -> Vec<ListenerFilter> {
        let ports = &self.0;
        let mut filters = Vec::new();
        if ports.values().any(|needs| needs.tls) {
            filters.push(ListenerFilter {
                filter_disabled: tls_disabled(ports),
                ..tls_inspector()
            });
        }
        if ports.values().any(|needs| needs.http) {
            let without = ports.iter().filter(|(_, needs)| !needs.http).map(|(port, _)| *port);
            filters.push(ListenerFilter {
                filter_disabled: on_ports(without.collect()),
                ..http_inspector()
            });
        }
        filters
    }
}

/// Returns the match of the ports where the TLS inspector is disabled. If unknown ports need it, these are the known
/// ports that do not need it; otherwise, all ports except the known ones that need it.
fn tls_disabled(ports: &BTreeMap<u32, RequiredInspectors>) -> Option<ListenerFilterChainMatchPredicate> {
    let by_default = ports.get(&0).is_some_and(|needs| needs.tls);
    let listed = ports
        .iter()
        .filter(|(port, needs)| **port != 0 && needs.tls != by_default);
    let listed = on_ports(listed.map(|(port, _)| *port).collect())?;
    Some(if by_default {
        listed
    } else {
        ListenerFilterChainMatchPredicate {
            rule: Some(Rule::NotMatch(Box::new(listed))),
        }
    })
}

/// Matches connections to these ports; `None` without ports.
pub(super) fn on_ports(ports: Vec<u32>) -> Option<ListenerFilterChainMatchPredicate> {
    let mut rules: Vec<ListenerFilterChainMatchPredicate> = ports
        .into_iter()
        .map(|port| ListenerFilterChainMatchPredicate {
            rule: Some(Rule::DestinationPortRange(Int32Range {
                start: port.cast_signed(),
                end: port.cast_signed() + 1,
            })),
        })
        .collect();
    if rules.len() > 1 {
        return Some(ListenerFilterChainMatchPredicate {
            rule: Some(Rule::OrMatch(MatchSet { rules })),
        });
    }
    rules.pop()
}
