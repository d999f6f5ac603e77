//! Requests on a connection to another listener. Clients send requests for several hosts over one connection if its
//! certificate covers them all, but listeners may differ in routes and client certificates. Where several HTTPS
//! listeners of the Gateway API share a port, a request for a host of another one is answered with status 421, after
//! which the client opens a new connection (RFC 9110, section 15.5.20). Istio answers 404, or serves the request if a
//! route of the connection's listener is for all hosts.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

use crate::{
    base::{Shared, SmolStr, address::host_port, host},
    model::gateway::{GatewayServer, MergedGateway},
    proto::envoy::config::route::v3::{
        DirectResponseAction, Route, RouteMatch, VirtualHost, route::Action, route_match::PathSpecifier,
    },
};

/// Host of a listener for all hosts.
const ANY: &str = "*";
/// Status of requests on the wrong connection.
const MISDIRECTED_REQUEST: u32 = 421;
/// Name of the virtual host for them, which is no host name.
const NAME: &str = "~misdirected";

/// Hosts of one listener, and of others on its port that are more specific.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct MisdirectedHosts {
    /// Host of the listener.
    own: SmolStr,
    /// Hosts of other listeners that it covers, sorted.
    others: Shared<[SmolStr]>,
}

impl MisdirectedHosts {
    /// Returns the hosts by route configuration. One whose listener shares its port with none of another host has none.
    pub(super) fn by_route(merged: &MergedGateway) -> BTreeMap<SmolStr, Self> {
        let mut result = BTreeMap::new();
        for (_, port) in &merged.ports {
            let servers = port.servers.iter().map(|index| &merged.servers[*index]);
            let listeners = servers.filter(|server| server.is_listener && server.terminates_https());
            let listeners: Vec<(&GatewayServer, &SmolStr)> = listeners
                .filter_map(|server| Some((server, server.sni.first()?)))
                .collect();
            // Hosts with their characters in reverse order, so that those which a wildcard covers are neighbours.
            let hosts: BTreeMap<String, &SmolStr> = listeners.iter().map(|(_, host)| (reversed(host), *host)).collect();
            if hosts.len() < 2 {
                continue;
            }
            for (server, own) in listeners {
                let others: BTreeSet<SmolStr> = covered(&hosts, own).collect();
                let others = others.into_iter().collect::<Vec<_>>().into();
                result.insert(
                    server.route.clone(),
                    Self {
                        own: own.clone(),
                        others,
                    },
                );
            }
        }
        result
    }

    /// Returns the virtual hosts to add: for the listener's own host, so that its other requests get 404, and for what
    /// belongs to other listeners. `is_known` is true for hosts that have a virtual host.
    pub(super) fn virtual_hosts(&self, port: u32, is_known: impl Fn(&str) -> bool) -> Vec<VirtualHost> {
        let own = (!is_known(&self.own)).then(|| VirtualHost {
            name: host_port(&self.own, port),
            domains: vec![self.own.to_string()],
            ..Default::default()
        });
        let others = self.others.iter().map(SmolStr::as_str);
        let others = others.chain((self.own != ANY).then_some(ANY));
        let others: Vec<String> = others.filter(|host| !is_known(host)).map(str::to_owned).collect();
        let others = (!others.is_empty()).then(|| VirtualHost {
            name: host_port(NAME, port),
            domains: others,
            routes: vec![Route {
                r#match: Some(RouteMatch {
                    path_specifier: Some(PathSpecifier::Prefix("/".to_owned())),
                    ..Default::default()
                }),
                action: Some(Action::DirectResponse(DirectResponseAction {
                    status: MISDIRECTED_REQUEST,
                    ..Default::default()
                })),
                ..Default::default()
            }],
            ..Default::default()
        });
        own.into_iter().chain(others).collect()
    }
}

fn reversed(host: &str) -> String {
    host.chars().rev().collect()
}

/// Returns the hosts that a listener's host covers, without itself.
fn covered<'a>(hosts: &'a BTreeMap<String, &SmolStr>, own: &'a SmolStr) -> impl Iterator<Item = SmolStr> + use<'a> {
    let suffix = host::is_wildcard(own).then(|| reversed(own.trim_start_matches('*')));
    let candidates = suffix.map(|suffix| {
        let from = hosts.range::<str, _>((Bound::Included(suffix.as_str()), Bound::Unbounded));
        from.take_while(move |(reversed, _)| reversed.starts_with(&suffix))
            .collect::<Vec<_>>()
    });
    let candidates = candidates.into_iter().flatten().map(|(_, host)| (*host).clone());
    candidates.filter(move |host| host != own)
}
