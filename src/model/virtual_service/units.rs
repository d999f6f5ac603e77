//! The number of routes that a declared route counts as, where the output of objects is limited.
//!
//! Each match repeats the whole route, so the size of a route multiplies like the number of its matches.

use prost::Message;

use crate::proto::istio::networking::v1alpha3::{HttpRoute, TcpRoute, TlsRoute};

/// The encoded size of a route with one of its matches, in bytes, for which the match counts once more. Most routes are
/// smaller.
const BYTES: usize = 1 << 10;
/// The number of destinations and mirrors for which a match counts once more: each has the name of a cluster, which may
/// be much longer than the declared host.
const DESTINATIONS: usize = 32;
/// A number beyond every limit. Its products with the numbers of hosts and servers fit in 64 bits.
const MOST: u64 = 1 << 33;

/// Returns what routes count together.
pub(super) fn sum(units: impl Iterator<Item = u64>) -> u64 {
    units.fold(0, u64::saturating_add).min(MOST)
}

/// Returns what an HTTP route counts: at least one for each match.
pub(super) fn of_http(route: &HttpRoute) -> u64 {
    let destinations = route.route.len() + route.mirrors.len() + usize::from(route.mirror.is_some());
    of_matches(route, &route.r#match, destinations).into_iter().sum()
}

/// Returns what a TLS route counts.
pub(super) fn of_tls(route: &TlsRoute) -> u64 {
    of_tls_matches(route).into_iter().sum()
}

/// Returns what a TCP route counts.
pub(super) fn of_tcp(route: &TcpRoute) -> u64 {
    of_tcp_matches(route).into_iter().sum()
}

/// Returns what each match of a TLS route counts.
pub(super) fn of_tls_matches(route: &TlsRoute) -> Vec<u64> {
    of_matches(route, &route.r#match, route.route.len())
}

/// Returns what each match of a TCP route counts.
pub(super) fn of_tcp_matches(route: &TcpRoute) -> Vec<u64> {
    of_matches(route, &route.r#match, route.route.len())
}

/// Returns what each match of a route counts. A route without a match counts like one with an empty match.
fn of_matches<M: Message>(route: &impl Message, matches: &[M], destinations: usize) -> Vec<u64> {
    let mut sizes: Vec<usize> = matches.iter().map(field_len).collect();
    let repeated = route.encoded_len() - sizes.iter().sum::<usize>();
    if sizes.is_empty() {
        sizes.push(0);
    }
    let of_match = |size: usize| (1 + (repeated + size) / BYTES + destinations / DESTINATIONS) as u64;
    sizes.into_iter().map(of_match).collect()
}

/// Returns the encoded size of a match in its route.
fn field_len(condition: &impl Message) -> usize {
    let len = condition.encoded_len();
    // The key of the field is one byte.
    1 + prost::length_delimiter_len(len) + len
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::istio::networking::v1alpha3::{
        Destination, Headers, HttpMatchRequest, HttpMirrorPolicy, HttpRouteDestination, RouteDestination,
        TlsMatchAttributes, headers::HeaderOperations,
    };

    fn matches(number: usize, size: usize) -> Vec<HttpMatchRequest> {
        let condition = HttpMatchRequest {
            name: "m".repeat(size),
            ..Default::default()
        };
        vec![condition; number]
    }

    fn destination() -> Option<Destination> {
        Some(Destination {
            host: "w".to_owned(),
            ..Default::default()
        })
    }

    fn to(number: usize) -> Vec<HttpRouteDestination> {
        let destination = HttpRouteDestination {
            destination: destination(),
            ..Default::default()
        };
        vec![destination; number]
    }

    #[test]
    fn usual_routes_count_once_for_each_match() {
        let of = |number| {
            of_http(&HttpRoute {
                name: "n".repeat(200),
                r#match: matches(number, 700),
                route: to(3),
                ..Default::default()
            })
        };
        assert_eq!([of(0), of(1), of(5000)], [1, 1, 5000]);
    }

    #[test]
    fn each_match_repeats_the_size_of_the_route() {
        let operations = |value: usize| HeaderOperations {
            set: [("x-long".to_owned(), "v".repeat(value))].into(),
            ..Default::default()
        };
        let of = |value, number, size| {
            of_http(&HttpRoute {
                r#match: matches(number, size),
                headers: Some(Box::new(Headers {
                    request: Some(operations(value)),
                    response: Some(operations(value)),
                })),
                ..Default::default()
            })
        };
        assert_eq!(of(5 << 10, 0, 0), 11);
        assert_eq!(of(5 << 10, 100, 10), 1100);
        assert_eq!(of(0, 100, 3 << 10), 400);
    }

    #[test]
    fn destinations_and_mirrors_count() {
        let mirror = HttpMirrorPolicy {
            destination: destination(),
            ..Default::default()
        };
        let http = HttpRoute {
            r#match: matches(2, 1),
            route: to(32),
            mirrors: vec![mirror; 31],
            mirror: destination().map(Box::new),
            ..Default::default()
        };
        assert_eq!(of_http(&http), 6);
        let route = |number| {
            let destination = RouteDestination {
                destination: destination(),
                ..Default::default()
            };
            vec![destination; number]
        };
        let tcp = TcpRoute {
            route: route(64),
            ..Default::default()
        };
        assert_eq!(of_tcp(&tcp), 3);
        let tls = TlsRoute {
            r#match: vec![TlsMatchAttributes::default(); 2],
            route: route(64),
        };
        assert_eq!(of_tls(&tls), 6);
    }
}
