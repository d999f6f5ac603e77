//! The ports of a service.

use std::ops::Deref;

use super::{Protocol, ServicePort};
use crate::base::Shared;

/// The number of ports up to which one is found by a search.
const MOST_SEARCHED: usize = 32;

/// The ports of a service, in declared order. There may be tens of thousands, and a cluster and a route configuration
/// for each, so a port is found by its number, and copies of the service share the list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServicePorts {
    all: Shared<[ServicePort]>,
    /// The places of the first port of each number and of the first one without UDP, by number; `None` for short lists.
    by_number: Option<Shared<[u32]>>,
}

impl ServicePorts {
    /// Returns the first port with this number.
    pub fn of_number(&self, number: u32) -> Option<&ServicePort> {
        self.search(number, |_| true)
    }

    /// Returns the first port with this number that is not one of UDP.
    pub(super) fn served(&self, number: u32) -> Option<&ServicePort> {
        self.search(number, |port| port.protocol != Protocol::Udp)
    }

    fn search(&self, number: u32, counts: impl Fn(&ServicePort) -> bool) -> Option<&ServicePort> {
        let is_meant = |port: &&ServicePort| port.number == number && counts(port);
        let Some(by_number) = &self.by_number else {
            return self.all.iter().find(is_meant);
        };
        let port_at = |place: &u32| &self.all[*place as usize];
        let begin = by_number.partition_point(|place| port_at(place).number < number);
        let from = by_number[begin..].iter().map(port_at);
        from.take_while(|port| port.number == number).find(is_meant)
    }
}

impl From<Vec<ServicePort>> for ServicePorts {
    fn from(all: Vec<ServicePort>) -> Self {
        Self {
            by_number: (all.len() > MOST_SEARCHED).then(|| by_number(&all).into()),
            all: all.into(),
        }
    }
}

/// Returns the places of ports that [`ServicePorts`] keeps.
fn by_number(all: &[ServicePort]) -> Vec<u32> {
    let mut places: Vec<u32> = (0..all.len() as u32).collect();
    places.sort_by_key(|place| all[*place as usize].number);
    // The number of the last port, and whether one of its ports is without UDP.
    let mut last: Option<(u32, bool)> = None;
    places.retain(|place| {
        let port = &all[*place as usize];
        let is_served = port.protocol != Protocol::Udp;
        let known = last.filter(|(number, _)| *number == port.number);
        let was_served = known.is_some_and(|(_, was_served)| was_served);
        last = Some((port.number, is_served || was_served));
        known.is_none() || is_served && !was_served
    });
    places
}

impl FromIterator<ServicePort> for ServicePorts {
    fn from_iter<I: IntoIterator<Item = ServicePort>>(ports: I) -> Self {
        Self::from(Vec::from_iter(ports))
    }
}

impl Deref for ServicePorts {
    type Target = [ServicePort];

    fn deref(&self) -> &[ServicePort] {
        &self.all
    }
}

impl<'a> IntoIterator for &'a ServicePorts {
    type Item = &'a ServicePort;
    type IntoIter = std::slice::Iter<'a, ServicePort>;

    fn into_iter(self) -> Self::IntoIter {
        self.all.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::kube::service::TargetPort;

    #[test]
    fn r21_ports_are_found_as_by_a_search() {
        let protocols = [
            Protocol::Udp,
            Protocol::Udp,
            Protocol::Tcp,
            Protocol::Http,
            Protocol::Udp,
        ];
        for count in [5, MOST_SEARCHED, MOST_SEARCHED + 1, 200] {
            // Most numbers occur several times, with different protocols.
            let port = |place: usize| ServicePort {
                name: place.to_string().into(),
                number: (place * 7 % 20) as u32,
                target: TargetPort::Number(0),
                protocol: protocols[place / 3 % 5],
            };
            let all: Vec<ServicePort> = (0..count).map(port).collect();
            let ports = ServicePorts::from(all.clone());
            assert_eq!(ports[..], all[..]);
            for number in 0..22 {
                let of_number = || all.iter().filter(|port| port.number == number);
                assert_eq!(ports.of_number(number), of_number().next(), "{count} {number}");
                let served = of_number().find(|port| port.protocol != Protocol::Udp);
                assert_eq!(ports.served(number), served, "{count} {number}");
            }
        }
    }
}
