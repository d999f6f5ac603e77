//! Matches of patches: listeners, filter chains and filters.
//!
//! Note: the two listeners of intercepted connections represent many ports. A port in a match means their own address
//! only in patches of listeners. In all others it means the port of a filter chain.

use crate::{
    model::envoy_filter::{ApplyTo, Patch},
    proto::{
        envoy::config::{
            core::v3::{address::Address, socket_address::PortSpecifier},
            listener::v3::{FilterChain, Listener},
        },
        istio::networking::v1alpha3::envoy_filter::listener_match::{FilterChainMatch, FilterMatch},
    },
};

/// Attributes of a listener that matches depend on, taken before its chains are changed.
pub(super) struct Traits {
    name: String,
    port: Option<u32>,
}

impl Traits {
    /// Takes the attributes of a listener.
    pub(super) fn of(listener: &Listener) -> Self {
        let address = listener.address.as_ref().and_then(|address| address.address.as_ref());
        let port = match address {
            Some(Address::SocketAddress(socket)) => match &socket.port_specifier {
                Some(PortSpecifier::PortValue(port)) => Some(*port),
                _ => Some(0),
            },
            _ => None,
        };
        Self {
            name: listener.name.clone(),
            port,
        }
    }

    /// Returns true for the listeners of intercepted connections.
    fn is_virtual(&self) -> bool {
        matches!(self.name.as_str(), "virtualInbound" | "virtualOutbound")
    }

    /// Returns true if the patch matches the listener. `portName` is ignored because listeners have none.
    pub(super) fn matches(&self, patch: &Patch) -> bool {
        let Some(condition) = patch.listener() else { return true };
        if !condition.name.is_empty() && condition.name != self.name {
            return false;
        }
        let any_port = condition.port_number == 0 || (patch.apply_to != ApplyTo::Listener && self.is_virtual());
        any_port || self.port == Some(condition.port_number)
    }

    /// Returns true if the patch matches the chain of a matching listener.
    pub(super) fn matches_chain(&self, chain: &FilterChain, patch: &Patch) -> bool {
        let Some(condition) = patch.listener() else { return true };
        let own_port = destination_port(chain);
        if self.is_virtual() && condition.port_number > 0 && own_port.unwrap_or_default() != condition.port_number {
            return false;
        }
        condition
            .filter_chain
            .as_ref()
            .is_none_or(|condition| chain_matches(chain, condition))
    }
}

fn destination_port(chain: &FilterChain) -> Option<u32> {
    chain.filter_chain_match.as_ref()?.destination_port
}

fn chain_matches(chain: &FilterChain, condition: &FilterChainMatch) -> bool {
    let own = chain.filter_chain_match.as_ref();
    let has_sni = || own.is_some_and(|own| own.server_names.contains(&condition.sni));
    let has_transport = || own.is_some_and(|own| own.transport_protocol == condition.transport_protocol);
    let has_protocols = || {
        let has = |protocol: &str| own.is_some_and(|own| own.application_protocols.iter().any(|own| own == protocol));
        condition.application_protocols.split(',').all(has)
    };
    (condition.name.is_empty() || condition.name == chain.name)
        && (condition.sni.is_empty() || has_sni())
        && (condition.transport_protocol.is_empty() || has_transport())
        && (condition.application_protocols.is_empty() || has_protocols())
        && (condition.destination_port == 0 || destination_port(chain) == Some(condition.destination_port))
}

/// Returns the listener filter that a patch matches; `None` without such a condition.
pub(super) fn listener_filter(patch: &Patch) -> Option<&str> {
    let name = patch.listener()?.listener_filter.as_str();
    (!name.is_empty()).then_some(name)
}

/// Returns the network filter that a patch matches; `None` without such a condition.
pub(super) fn network_filter(patch: &Patch) -> Option<&str> {
    Some(filter_match(patch)?.name.as_str())
}

/// Returns the HTTP filter that a patch matches; `None` without such a condition.
pub(super) fn http_filter(patch: &Patch) -> Option<&str> {
    Some(filter_match(patch)?.sub_filter.as_ref()?.name.as_str())
}

fn filter_match(patch: &Patch) -> Option<&FilterMatch> {
    patch.listener()?.filter_chain.as_ref()?.filter.as_ref()
}
