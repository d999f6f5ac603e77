//! The services of one host in an egress listener, of which one represents the host on each port.

use std::{cell::OnceCell, collections::BTreeMap};

use super::is_routed;
use crate::{
    base::Shared,
    model::{
        Service, ServiceKey,
        output_limit::SMALL,
        service::{MergedService, Protocol, ScopedService, ServicePort, ServiceRef},
        sidecar_scope::EgressListener,
    },
};

/// The services of one host that an egress listener shows.
pub(super) struct VisibleHost<'a> {
    /// Row.
    pub(super) row: &'a Shared<Service>,
    /// The visible services of the row, if it has several.
    members: Option<Box<VisibleMembers>>,
}

/// Several services of one host, by their positions in the row.
#[derive(Default)]
struct VisibleMembers {
    /// In the order of the egress listener.
    positions: Vec<u32>,
    /// The last one with each port, which represents the host on that port.
    by_port: BTreeMap<u32, u32>,
}

/// The services of an egress listener by row. Thousands of hosts with several services may be looked up.
pub(super) struct ListedServices<'a> {
    egress: &'a EgressListener,
    /// Places in the listener in the order of the keys, found on first use.
    sorted: OnceCell<Vec<usize>>,
}

impl<'a> ListedServices<'a> {
    pub(super) fn of(egress: &'a EgressListener) -> Self {
        Self {
            egress,
            sorted: OnceCell::new(),
        }
    }

    /// Returns the positions of the listed services of a row, in the order of the listener.
    fn of_row(&self, key: &ServiceKey) -> impl Iterator<Item = u32> {
        let services = &self.egress.services;
        let sorted = self.sorted.get_or_init(|| {
            let mut places: Vec<usize> = (0..services.len()).collect();
            // A stable sort keeps the order of the services of a row.
            places.sort_by(|one, other| services[*one].key.cmp(&services[*other].key));
            places
        });
        let first = sorted.partition_point(|place| services[*place].key < *key);
        let listed = sorted[first..].iter().map(move |place| &services[*place]);
        listed
            .take_while(move |listed| listed.key == *key)
            .map(|listed| listed.member)
    }
}

impl<'a> VisibleHost<'a> {
    /// Returns a host of which no member is visible yet.
    pub(super) fn new(row: &'a Shared<Service>) -> Self {
        Self {
            row,
            members: (!row.members.is_empty()).then(Box::default),
        }
    }

    /// Returns the services of an egress listener for one row.
    pub(super) fn of(row: &'a Shared<Service>, listed: &ListedServices) -> Self {
        let mut host = Self::new(row);
        if host.members.is_some() {
            listed.of_row(&row.key).for_each(|position| host.add(position));
        }
        host
    }

    /// Returns true if the row has several services.
    pub(super) fn has_members(&self) -> bool {
        self.members.is_some()
    }

    /// Adds a visible service of the row.
    pub(super) fn add(&mut self, position: u32) {
        if let (Some(members), Some(service)) = (&mut self.members, Service::member(self.row, position)) {
            members.positions.push(position);
            let ports = service.ports.iter().filter(|port| port.protocol != Protocol::Udp);
            members.by_port.extend(ports.map(|port| (port.number, position)));
        }
    }

    /// Returns the service that represents the host on a port, with its position; for port 0 the last one.
    ///
    /// Parity (pilot/pkg/networking/core/httproute.go, `servicesByName`).
    pub(super) fn at(&self, port: u32) -> Option<(u32, &'a Shared<Service>)> {
        let Some(members) = &self.members else {
            let found = port == 0 || self.row.port(port).is_some();
            return found.then_some((0, self.row));
        };
        let position = match port {
            0 => *members.positions.last()?,
            port => *members.by_port.get(&port)?,
        };
        Some((position, Service::member(self.row, position)?))
    }

    /// Returns the service that represents the host on a port as a destination: with this port only, or for port 0
    /// with all of its own. Routes of one port depend on no other (`PortInference::Listener`), and there may be tens of
    /// thousands, each with routes to the service.
    pub(super) fn scoped(&self, port: u32) -> Option<ScopedService> {
        let (member, service) = self.at(port)?;
        let merged = self.members.as_ref().map(|_| {
            let ports = match port {
                0 => service.ports.iter().map(|port| (port.number, member)).collect(),
                port => BTreeMap::from([(port, member)]),
            };
            Shared::new(MergedService { member, ports })
        });
        let key = service.key.clone();
        Some(ScopedService { key, merged })
    }

    /// Returns a reference to the service that represents the host on a port.
    pub(super) fn reference(&self, port: u32) -> Option<ServiceRef> {
        let (member, service) = self.at(port)?;
        let key = service.key.clone();
        Some(ServiceRef { key, member })
    }

    /// Returns true if the host has HTTP routes on the port; on port 0, on any.
    pub(super) fn is_routed(&self, port: u32) -> bool {
        let Some((_, service)) = self.at(port) else {
            return false;
        };
        match port {
            0 => service.ports.iter().any(|port| is_routed(port.protocol)),
            number => service.port(number).is_some_and(|port| is_routed(port.protocol)),
        }
    }

    /// Returns the ports of every service, with the service.
    pub(super) fn ports(&self) -> impl Iterator<Item = (&'a Shared<Service>, &'a ServicePort)> + use<'a, '_> {
        let services = self.services();
        services.flat_map(|service| service.ports.iter().map(move |port| (service, port)))
    }

    /// Returns the ports on which [`Self::at`] finds a service, with what [`Self::is_routed`] returns. There may be
    /// tens of thousands, so none is searched for.
    pub(super) fn routed_by_port(&self) -> BTreeMap<u32, bool> {
        let mut found: BTreeMap<u32, bool> = BTreeMap::new();
        for service in self.services() {
            let mut own: BTreeMap<u32, bool> = BTreeMap::new();
            for port in service.ports.iter().filter(|port| port.protocol != Protocol::Udp) {
                own.entry(port.number).or_insert_with(|| is_routed(port.protocol));
            }
            found.extend(own);
        }
        if self.at(0).is_some() {
            found.insert(0, self.is_routed(0));
        }
        found
    }

    /// Returns the numbers of its ports with HTTP routes, sorted, if there are more than a small object has routes.
    pub(super) fn many_routed_ports(&self) -> Vec<u32> {
        let routed = self.ports().filter(|(_, port)| is_routed(port.protocol));
        let mut numbers: Vec<u32> = routed.map(|(_, port)| port.number).collect();
        if numbers.len() as u64 <= SMALL {
            return Vec::new();
        }
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    fn services(&self) -> impl Iterator<Item = &'a Shared<Service>> + use<'a, '_> {
        let only = self.members.is_none().then_some(self.row);
        let positions = self.members.iter().flat_map(|members| &members.positions);
        let members = positions.filter_map(|position| Service::member(self.row, *position));
        only.into_iter().chain(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_services_of_a_row_are_found_in_the_order_of_the_listener() {
        let key = |host: &str| ServiceKey {
            hostname: host.into(),
            namespace: "a".into(),
        };
        let listed = [
            ("b.test", 2),
            ("a.test", 0),
            ("b.test", 0),
            ("c.test", 1),
            ("b.test", 1),
        ];
        let services = listed.map(|(host, member)| ServiceRef { key: key(host), member });
        let egress = EgressListener {
            services: Vec::from(services).into(),
            ..EgressListener::default()
        };
        let listed = ListedServices::of(&egress);
        let of = |host: &str| -> Vec<u32> { listed.of_row(&key(host)).collect() };
        assert_eq!(of("b.test"), [2, 0, 1]);
        assert_eq!((of("a.test"), of("c.test")), (vec![0], vec![1]));
        assert_eq!(of("absent.test"), Vec::<u32>::new());
    }
}
