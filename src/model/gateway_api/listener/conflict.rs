//! Conflicts between the listeners of a Gateway and those of its ListenerSets.
//!
//! Two listeners of one port conflict if a connection could belong to both: their protocols cannot share the port, or
//! they have the same host. The listeners of the Gateway precede those of ListenerSets, and older sets precede younger
//! ones. Istio knows no conflicts; the rules are those of the Gateway API's specification. Listeners within one Gateway
//! are not compared: its schema refuses the same host, and as in Istio the first server of a port decides the rest.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::admits;
use crate::{
    api::gateway_api::gateway::Listener,
    base::{ObjectKey, Shared},
    model::{MeshSnapshot, gateway_api::Mistake},
    table::Cx,
};

/// Protocols that can share a port, because the first bytes or the server name tell their connections apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    /// Plaintext HTTP, distinguished by the host of requests.
    Http,
    /// TLS, distinguished by the server name.
    Tls,
    /// TCP.
    Tcp,
    /// UDP, which shares no port with the others, but does not conflict with them either.
    Udp,
    /// Protocols that are not supported.
    Other,
}

impl Family {
    fn of(protocol: &str) -> Self {
        match protocol {
            "HTTP" => Self::Http,
            "HTTPS" | "TLS" => Self::Tls,
            "TCP" => Self::Tcp,
            "UDP" => Self::Udp,
            _ => Self::Other,
        }
    }
}

/// Listeners that were accepted on one port.
struct Port {
    family: Family,
    hosts: BTreeMap<SmolStr, String>,
}

/// The listeners of a Gateway in order of precedence.
#[derive(Default)]
struct Accepted {
    ports: BTreeMap<(u16, bool), Port>,
}

impl Accepted {
    /// Adds a listener of an object, or returns the mistake because of which it is excluded.
    fn add(&mut self, owner: impl Fn() -> String, listener: &Listener) -> Option<Mistake> {
        let number = super::port(listener).ok()?;
        let family = Family::of(&listener.protocol);
        let port = self
            .ports
            .entry((number, family == Family::Udp))
            .or_insert_with(|| Port {
                family,
                hosts: BTreeMap::new(),
            });
        if port.family != family {
            let protocol = &listener.protocol;
            let message = format!("Protocol {protocol} cannot share port {number} with the listeners that precede it");
            return Some(Mistake::new("ProtocolConflict", message));
        }
        let host = listener.hostname.clone().unwrap_or_default();
        if let Some(other) = port.hosts.get(&host) {
            let message = format!("{other} has the same host on port {number} and precedes this listener");
            return Some(Mistake::new("HostnameConflict", message));
        }
        port.hosts
            .insert(host, format!("Listener {} of {}", listener.name, owner()));
        None
    }
}

/// The conflicts of the ListenerSets of a Gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct Conflicts {
    /// For each ListenerSet with a conflict, the conflict of each of its listeners.
    by_set: BTreeMap<ObjectKey, Vec<Option<Mistake>>>,
}

impl Conflicts {
    /// Returns the conflicts of the listeners of a ListenerSet, in their order; empty without any.
    pub(super) fn of_set(&self, set: &ObjectKey) -> &[Option<Mistake>] {
        self.by_set.get(set).map_or(&[], Vec::as_slice)
    }
}

/// Derives the conflicts of the ListenerSets of a Gateway; `None` without any.
pub fn conflicts(cx: &Cx, mesh: &MeshSnapshot, gateway: &ObjectKey) -> Option<Conflicts> {
    let gateway = mesh.kube_gateways.get(cx, gateway)?;
    let mut accepted = Accepted::default();
    for listener in &gateway.spec.listeners {
        accepted.add(|| format!("Gateway {}", gateway.meta.name()), listener);
    }
    let sets = mesh.listener_sets_by_gateway.get(cx, &gateway.meta.key);
    let sets = sets.filter(|(key, _)| admits(cx, mesh, gateway, &key.namespace));
    let mut sets: Vec<(&ObjectKey, &Shared<_>)> = sets.collect();
    sets.sort_by_key(|(key, row)| (row.meta.creation, &key.namespace, &key.name));
    let mut by_set = BTreeMap::new();
    for (key, row) in sets {
        let owner = || format!("ListenerSet {}/{}", key.namespace, key.name);
        let conflicts = row.spec.listeners.iter().map(|listener| accepted.add(owner, listener));
        let conflicts: Vec<Option<Mistake>> = conflicts.collect();
        if conflicts.iter().any(Option::is_some) {
            by_set.insert(key.clone(), conflicts);
        }
    }
    (!by_set.is_empty()).then_some(Conflicts { by_set })
}
