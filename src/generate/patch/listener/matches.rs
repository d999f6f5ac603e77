//! Which listeners, filter chains and filters a patch is about.
//!
//! What one would get wrong: the two listeners that intercepted connections come to stand for many ports. A port in the
//! match means their own address only for patches of listeners; for all others it means the port that a filter chain is
//! for.

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

/// What of a listener decides about matches, taken before its chains are changed.
pub(super) struct Traits {
    name: String,
    port: Option<u32>,
}

impl Traits {
    /// Of a listener as it stands.
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

    /// True for the listeners that intercepted connections come to.
    fn is_virtual(&self) -> bool {
        matches!(self.name.as_str(), "virtualInbound" | "virtualOutbound")
    }

    /// True if the patch is about the listener. `portName` is not looked at: listeners do not have one.
    pub(super) fn matches(&self, patch: &Patch) -> bool {
        let Some(wanted) = patch.listener() else { return true };
        if !wanted.name.is_empty() && wanted.name != self.name {
            return false;
        }
        let any_port = wanted.port_number == 0 || (patch.apply_to != ApplyTo::Listener && self.is_virtual());
        any_port || self.port == Some(wanted.port_number)
    }

    /// True if the patch is about the chain, given that it is about the listener.
    pub(super) fn matches_chain(&self, chain: &FilterChain, patch: &Patch) -> bool {
        let Some(wanted) = patch.listener() else { return true };
        let own_port = destination_port(chain);
        if self.is_virtual() && wanted.port_number > 0 && own_port.unwrap_or_default() != wanted.port_number {
            return false;
        }
        wanted
            .filter_chain
            .as_ref()
            .is_none_or(|wanted| chain_matches(chain, wanted))
    }
}

fn destination_port(chain: &FilterChain) -> Option<u32> {
    chain.filter_chain_match.as_ref()?.destination_port
}

fn chain_matches(chain: &FilterChain, wanted: &FilterChainMatch) -> bool {
    let own = chain.filter_chain_match.as_ref();
    let has_sni = || own.is_some_and(|own| own.server_names.contains(&wanted.sni));
    let has_transport = || own.is_some_and(|own| own.transport_protocol == wanted.transport_protocol);
    let has_protocols = || {
        let has = |protocol: &str| own.is_some_and(|own| own.application_protocols.iter().any(|own| own == protocol));
        wanted.application_protocols.split(',').all(has)
    };
    (wanted.name.is_empty() || wanted.name == chain.name)
        && (wanted.sni.is_empty() || has_sni())
        && (wanted.transport_protocol.is_empty() || has_transport())
        && (wanted.application_protocols.is_empty() || has_protocols())
        && (wanted.destination_port == 0 || destination_port(chain) == Some(wanted.destination_port))
}

/// The listener filter that a patch is about; `None`: it does not say.
pub(super) fn listener_filter(patch: &Patch) -> Option<&str> {
    let name = patch.listener()?.listener_filter.as_str();
    (!name.is_empty()).then_some(name)
}

/// The network filter that a patch is about; `None`: it does not say.
pub(super) fn network_filter(patch: &Patch) -> Option<&str> {
    Some(filter_match(patch)?.name.as_str())
}

/// The HTTP filter that a patch is about; `None`: it does not say.
pub(super) fn http_filter(patch: &Patch) -> Option<&str> {
    Some(filter_match(patch)?.sub_filter.as_ref()?.name.as_str())
}

fn filter_match(patch: &Patch) -> Option<&FilterMatch> {
    patch.listener()?.filter_chain.as_ref()?.filter.as_ref()
}
