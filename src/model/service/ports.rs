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
    /// The places of the ports that [`Self::served`] returns, by number; `None` for short lists.
    by_number: Option<Shared<[u32]>>,
}

impl ServicePorts {
    /// Returns the first port with this number that is not one of UDP.
    pub(super) fn served(&self, number: u32) -> Option<&ServicePort> {
        let Some(by_number) = &self.by_number else {
            let mut served = self.all.iter().filter(|port| is_served(port));
            return served.find(|port| port.number == number);
        };
        let number_at = |place: &u32| self.all[*place as usize].number;
        let found = by_number.binary_search_by_key(&number, number_at).ok()?;
        self.all.get(by_number[found] as usize)
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

fn is_served(port: &ServicePort) -> bool {
    port.protocol != Protocol::Udp
}

/// Returns the places of the first port of each number that is not one of UDP, by number.
fn by_number(all: &[ServicePort]) -> Vec<u32> {
    let mut places: Vec<u32> = (0..all.len() as u32).collect();
    places.retain(|place| is_served(&all[*place as usize]));
    places.sort_by_key(|place| all[*place as usize].number);
    places.dedup_by_key(|place| all[*place as usize].number);
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
                let mut of_number = all.iter().filter(|port| port.number == number);
                let served = of_number.find(|port| port.protocol != Protocol::Udp);
                assert_eq!(ports.served(number), served, "{count} {number}");
            }
        }
    }
}
