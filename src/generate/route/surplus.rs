//! Refusal of HTTP routes of a VirtualService for surplus ports of services with very many.
//!
//! The routes are repeated for each port of a service, and so are the other hosts of the VirtualService. Note: the
//! services of a wildcard may be those of other tenants. What applies on a port of a service depends on the
//! VirtualService and this service alone, and a service with many ports takes few from the other hosts
//! ([`first_ports`]).

use std::{collections::BTreeSet, sync::LazyLock};

use super::{action, matches, routes::Routes};
use crate::{
    api::Kind,
    generate::wire::Encoded,
    model::{
        MeshSnapshot,
        output_limit::{Limits, SMALL},
        virtual_service::Semantics,
    },
    proto::{
        envoy::config::route::v3::{Route, VirtualHost},
        field::virtual_host,
        istio::networking::v1alpha3::HttpDirectResponse,
    },
};

/// The multiple of the limit of an object up to which hosts of a VirtualService are repeated for ports that their
/// services lack.
const MULTIPLE: u64 = 10;
/// The status of requests to surplus ports.
const REFUSED_STATUS: u32 = 404;

/// Returns the last of some ports by number if only `most` of them count; `u32::MAX` if all do.
pub(crate) fn last_port(ports: impl Iterator<Item = u32>, most: u32) -> u32 {
    let mut ports: Vec<u32> = ports.collect();
    if ports.len() <= most as usize {
        return u32::MAX;
    }
    ports.sort_unstable();
    ports.dedup();
    let first_surplus = ports.get(most as usize);
    first_surplus.map_or(u32::MAX, |port| port.saturating_sub(1))
}

/// Returns the number of ports for which a number of hosts may be repeated.
pub(crate) fn most_ports_of_hosts(mesh: &MeshSnapshot, hosts: usize) -> u32 {
    let limit = Limits::of(mesh, Kind::VirtualService).object.saturating_mul(MULTIPLE);
    let most = (limit / (hosts as u64).max(1)).max(SMALL);
    u32::try_from(most).unwrap_or(u32::MAX)
}

/// Returns `most` of the ports of services, given their creation times and ports: the first ports of each service
/// before its further ones, and those of older services before. So one with many ports takes few from the others.
pub(crate) fn first_ports(services: Vec<(i64, Vec<u32>)>, most: u32) -> BTreeSet<u32> {
    let mut ranked: Vec<(usize, i64, u32)> = Vec::new();
    for (creation, mut numbers) in services {
        numbers.sort_unstable();
        numbers.dedup();
        let numbers = numbers.into_iter().enumerate();
        ranked.extend(numbers.map(|(rank, number)| (rank, creation, number)));
    }
    ranked.sort_unstable();
    let mut first = BTreeSet::new();
    for (_, _, number) in ranked {
        if first.len() == most as usize {
            break;
        }
        first.insert(number);
    }
    first
}

/// Returns the routes of surplus ports, which refuse every request.
pub(crate) fn refusal() -> Routes {
    static REFUSAL: LazyLock<Routes> = LazyLock::new(|| {
        let response = HttpDirectResponse {
            status: REFUSED_STATUS,
            body: None,
        };
        let route = Route {
            name: "surplus".to_owned(),
            r#match: Some(matches::route_match(None, Semantics::Istio)),
            action: Some(action::direct_response(&response)),
            ..Default::default()
        };
        let encoded = Encoded::<VirtualHost>::write(64, |out| out.message(virtual_host::ROUTES, &route));
        Routes::new(encoded, None)
    });
    REFUSAL.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_first_ports_by_number_count() {
        let last = |ports: &[u32], most| last_port(ports.iter().copied(), most);
        assert_eq!(last(&[9, 7, 80, 8], 4), u32::MAX);
        assert_eq!(last(&[9, 7, 80, 8], 3), 79);
        assert_eq!(last(&[9, 7, 80, 8], 2), 8);
        assert_eq!(last(&[9, 9, 7, 7], 2), u32::MAX);
        assert_eq!(last(&[], 0), u32::MAX);
    }

    #[test]
    fn r21_a_service_with_many_ports_takes_few_from_others() {
        let many: Vec<u32> = (1..=100).collect();
        let first = |services: Vec<(i64, Vec<u32>)>, most| Vec::from_iter(first_ports(services, most));
        let services = vec![(2, many), (1, vec![9090, 8080]), (3, vec![7070])];
        assert_eq!(first(services, 5), [1, 2, 7070, 8080, 9090]);
        assert_eq!(first(vec![(2, vec![1]), (1, vec![2])], 1), [2], "of the older one");
        assert_eq!(first(vec![(2, vec![80]), (1, vec![80])], 5), [80]);
    }
}
