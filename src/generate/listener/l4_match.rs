//! Matches of TCP and TLS routes, without their conditions on the connection.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    base::ObjectKey,
    model::virtual_service::MESH_GATEWAY,
    proto::istio::networking::v1alpha3::{L4MatchAttributes, TcpRoute, TlsMatchAttributes, TlsRoute},
    table::{Cx, Memo},
};

/// Conditions of a match on the proxy and the port.
pub(super) struct StaticMatch<'m> {
    gateways: &'m [String],
    port: u32,
    /// Namespace of the client; empty for any.
    pub(super) source_namespace: &'m str,
    /// Labels of the client; empty for any.
    pub(super) source_labels: &'m BTreeMap<String, String>,
}

impl<'m> From<&'m TlsMatchAttributes> for StaticMatch<'m> {
    fn from(by: &'m TlsMatchAttributes) -> Self {
        Self {
            gateways: &by.gateways,
            port: by.port,
            source_namespace: &by.source_namespace,
            source_labels: &by.source_labels,
        }
    }
}

impl<'m> From<&'m L4MatchAttributes> for StaticMatch<'m> {
    fn from(by: &'m L4MatchAttributes) -> Self {
        Self {
            gateways: &by.gateways,
            port: by.port,
            source_namespace: &by.source_namespace,
            source_labels: &by.source_labels,
        }
    }
}

impl StaticMatch<'_> {
    /// Returns true if the match is for the gateway `mesh` and this port.
    fn is_for_mesh(&self, port: u32) -> bool {
        self.port_in_mesh().is_some_and(|own| own == 0 || own == port)
    }

    /// Returns the port of a match for the gateway `mesh`, 0 for all ports; `None` for other gateways.
    pub(super) fn port_in_mesh(&self) -> Option<u32> {
        let is_mesh = self.gateways.is_empty() || self.gateways.iter().any(|gateway| gateway == MESH_GATEWAY);
        is_mesh.then_some(self.port)
    }
}

/// A TCP or TLS route.
pub(super) trait StreamRoute {
    /// Match.
    type Match;

    /// Returns the matches, of which one must apply.
    fn matches(&self) -> &[Self::Match];

    /// Returns the conditions of a match on the proxy and the port.
    fn conditions(matched: &Self::Match) -> StaticMatch<'_>;
}

impl StreamRoute for TcpRoute {
    type Match = L4MatchAttributes;

    fn matches(&self) -> &[L4MatchAttributes] {
        &self.r#match
    }

    fn conditions(matched: &L4MatchAttributes) -> StaticMatch<'_> {
        matched.into()
    }
}

impl StreamRoute for TlsRoute {
    type Match = TlsMatchAttributes;

    fn matches(&self) -> &[TlsMatchAttributes] {
        &self.r#match
    }

    fn conditions(matched: &TlsMatchAttributes) -> StaticMatch<'_> {
        matched.into()
    }
}

/// The number of routes, and of their matches, up to which all of them are read.
const FEW: usize = 32;

/// The place of a route, and that of one of its matches; `None` for a route without matches.
type Place = (usize, Option<usize>);

/// The places of matches for the gateway `mesh` by port, 0 for all ports.
type PlacesByPort = BTreeMap<u32, Vec<Place>>;

/// The places of matches of VirtualServices with many. Each of thousands of listeners reads only those for its port.
#[derive(Default)]
pub(in crate::generate) struct MatchMemo {
    /// Matches of TCP routes.
    pub(super) tcp: Memo<ObjectKey, PlacesByPort>,
    /// Matches of TLS routes.
    pub(super) tls: Memo<ObjectKey, PlacesByPort>,
}

/// Returns the routes of a VirtualService with matches for the gateway `mesh` and this port, and with these; and the
/// routes without matches. `cx` must have read the VirtualService.
pub(super) fn on_port<'r, R: StreamRoute>(
    cx: &Cx,
    memo: &Memo<ObjectKey, PlacesByPort>,
    (virtual_service, routes): (&ObjectKey, &'r [R]),
    port: u32,
) -> Vec<(&'r R, Vec<&'r R::Match>)> {
    let matches = || routes.iter().map(|route| route.matches().len()).sum::<usize>();
    if routes.len() <= FEW && matches() <= FEW {
        let of_route = |route: &'r R| {
            let matches = route.matches().iter();
            let matches: Vec<&R::Match> = matches
                .filter(|matched| R::conditions(matched).is_for_mesh(port))
                .collect();
            (route.matches().is_empty() || !matches.is_empty()).then_some((route, matches))
        };
        return routes.iter().filter_map(of_route).collect();
    }
    let by_port = memo.get(cx, virtual_service.clone(), |_| places(routes));
    let lists = BTreeSet::from([0, port]).into_iter();
    let mut places: Vec<Place> = lists.filter_map(|port| by_port.get(&port)).flatten().copied().collect();
    places.sort_unstable();
    let by_route = places.chunk_by(|(one, _), (other, _)| one == other);
    by_route
        .map(|places| {
            let route = &routes[places[0].0];
            let matches = places.iter().filter_map(|(_, place)| Some(&route.matches()[(*place)?]));
            (route, matches.collect())
        })
        .collect()
}

fn places<R: StreamRoute>(routes: &[R]) -> PlacesByPort {
    let mut places = PlacesByPort::new();
    for (route, declared) in routes.iter().enumerate() {
        if declared.matches().is_empty() {
            places.entry(0).or_default().push((route, None));
        }
        for (place, matched) in declared.matches().iter().enumerate() {
            if let Some(port) = R::conditions(matched).port_in_mesh() {
                places.entry(port).or_default().push((route, Some(place)));
            }
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixture;

    #[test]
    fn r21_matches_of_a_port_are_found_as_by_a_search() {
        let (cx, key) = (Cx::untracked(), fixture::key("ns/name"));
        let gateways: [&[&str]; 3] = [&[], &["ns/other"], &["ns/other", MESH_GATEWAY]];
        for count in [3, FEW, FEW + 1, 200] {
            let matched = |place: usize| L4MatchAttributes {
                port: [0, 80, 90, 100][place % 4],
                gateways: gateways[place % 3].iter().map(|name| (*name).to_owned()).collect(),
                source_namespace: place.to_string(),
                ..Default::default()
            };
            let route = |place: usize| TcpRoute {
                r#match: (place..place + place % 7).map(matched).collect(),
                ..Default::default()
            };
            let routes: Vec<TcpRoute> = (0..count).map(route).collect();
            let memo = MatchMemo::default();
            for port in [0, 80, 90, 7] {
                let found = on_port(&cx, &memo.tcp, (&key, &routes[..]), port);
                let expected: Vec<(&TcpRoute, Vec<&L4MatchAttributes>)> = routes
                    .iter()
                    .map(|route| {
                        let all = route.r#match.iter();
                        let matches = all.filter(|matched| StaticMatch::from(*matched).is_for_mesh(port));
                        (route, matches.collect::<Vec<_>>())
                    })
                    .filter(|(route, matches)| route.r#match.is_empty() || !matches.is_empty())
                    .collect();
                assert_eq!(found, expected, "{count} {port}");
            }
        }
    }
}
