//! Services that share a host and a namespace.
//!
//! Istio has one service for each address of each ServiceEntry, beside that of Kubernetes, and every reader treats them
//! in its own way: listeners, routes and name tables see each of them, clusters see one with the ports of those that
//! agree with it, and references see one. A row holds them all, because they share their endpoints.

use std::collections::{BTreeMap, BTreeSet};

use super::{Registry, Resolution, Service, ServiceKey, ServicePort, TargetPort, Visibility};
use crate::base::Shared;

/// A service by its row and its position among [`Service::members`]; 0 for the only service of a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceRef {
    /// Row.
    pub key: ServiceKey,
    /// Position.
    pub member: u32,
}

/// The members that a port of a merged service comes from: one has the attributes of the service, one the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MergedPort {
    /// Position of the member that decides.
    pub service: u32,
    /// Position of the member with the port.
    pub port: u32,
}

/// Services of one host as a scope sees them: the one that decides, and the ports of all that agree with it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MergedService {
    /// Position of the member that decides.
    pub member: u32,
    /// Position of the member that each port comes from, by the port's number.
    pub ports: BTreeMap<u32, u32>,
}

impl MergedService {
    /// Returns the members that a port comes from.
    pub fn port(&self, number: u32) -> Option<MergedPort> {
        let port = *self.ports.get(&number)?;
        let service = self.member;
        Some(MergedPort { service, port })
    }
}

/// A service as a scope sees it, for readers that need the whole of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopedService {
    /// Row.
    pub key: ServiceKey,
    /// The visible services, if the row has several.
    pub merged: Option<Shared<MergedService>>,
}

impl ScopedService {
    /// Returns the service that represents the host, alone.
    pub fn representative(key: ServiceKey, row: &Visibility) -> Self {
        let merged = (!row.members.is_empty()).then(|| {
            let member = row.primary();
            let ports = row.member(member).ports.iter();
            let ports = ports.map(|port| (*port, member)).collect();
            Shared::new(MergedService { member, ports })
        });
        Self { key, merged }
    }

    /// Returns the service with two of its ports at most, for readers that depend only on whether it has exactly one.
    #[must_use]
    pub fn with_few_ports(self, row: &Shared<Service>) -> Self {
        let merged = self.merged.map(|merged| {
            let served = merged.ports.iter().filter(|(number, member)| {
                let service = Service::member(row, **member);
                service.is_some_and(|service| service.port(**number).is_some())
            });
            Shared::new(MergedService {
                member: merged.member,
                ports: served.take(2).map(|(number, member)| (*number, *member)).collect(),
            })
        });
        Self { key: self.key, merged }
    }

    /// Returns the service.
    pub fn of(&self, row: &Shared<Service>) -> Option<Shared<Service>> {
        let Some(merged) = &self.merged else {
            return Some(row.clone());
        };
        let decisive = Service::member(row, merged.member)?;
        let ports = merged.ports.iter();
        let ports = ports.filter_map(|(number, member)| Service::member(row, *member)?.port(*number).cloned());
        Some(Shared::new(Service {
            ports: ports.collect(),
            ..Service::clone(decisive)
        }))
    }
}

/// Combines the services of a host, given the ServiceEntries' oldest first. Members of one age are in the order of
/// their names.
///
/// Parity (pilot/pkg/model/push_context.go, `initServiceRegistry`): a Kubernetes service, or else the oldest one,
/// represents the host. The additional accounts of the last one count for all.
pub(super) fn combined(
    own: Option<Service>,
    mut members: Vec<Service>,
    aliases: &Shared<[ServiceKey]>,
) -> Option<Service> {
    if let Some(own) = own {
        // The name of a Service is a prefix of the host, which is the name of the others.
        let position = members.partition_point(|entry| entry.creation < own.creation);
        members.insert(position, own);
    }
    let accounts = members.last()?.service_accounts.clone();
    for member in &mut members {
        member.service_accounts = accounts.clone();
        if member.resolution != Resolution::Alias {
            member.aliases = aliases.clone();
        }
    }
    if members.len() == 1 {
        return members.pop();
    }
    let first = primary(members.iter().map(|member| member.registry));
    let mut service = members[first].clone();
    let mut known: BTreeSet<u32> = service.ports.iter().map(|port| port.number).collect();
    let others = members
        .iter()
        .filter(|member| member.merge_class == service.merge_class);
    let added = others
        .flat_map(|member| &member.ports)
        .filter(|port| known.insert(port.number));
    service.ports = service.ports.iter().chain(added).cloned().collect();
    service.members = members.into_iter().map(Shared::new).collect();
    Some(service)
}

/// Returns the position of the service that represents a host.
fn primary(mut registries: impl Iterator<Item = Registry>) -> usize {
    registries
        .position(|registry| registry == Registry::Kubernetes)
        .unwrap_or_default()
}

impl Service {
    /// Returns a member of a row by its position.
    pub fn member(row: &Shared<Self>, position: u32) -> Option<&Shared<Self>> {
        if row.members.is_empty() {
            return Some(row);
        }
        row.members.get(position as usize)
    }

    /// Returns all services of a row.
    pub fn all(&self) -> impl Iterator<Item = &Self> {
        let only = self.members.is_empty().then_some(self);
        only.into_iter().chain(self.members.iter().map(|member| &**member))
    }

    /// Returns a port of a row, or of a merged service of its members, with the service that has its attributes; UDP
    /// ports are ignored.
    pub fn merged_port(
        row: &Shared<Self>,
        merged: Option<MergedPort>,
        number: u32,
    ) -> Option<(&Shared<Self>, &ServicePort)> {
        let Some(merged) = merged else {
            return Some((row, row.port(number)?));
        };
        let port = Self::member(row, merged.port)?.port(number)?;
        Some((Self::member(row, merged.service)?, port))
    }

    /// Returns the port with this number that leads to a workload's port, or else the first one with this number. UDP
    /// ports count. The ports of all services of the row count, after its own.
    pub fn inbound_port(&self, number: u32, target_port: u32) -> Option<&ServicePort> {
        let mut ports = self.all_ports().filter(|port| port.number == number);
        let first = ports.clone().next();
        ports.find(|port| leads_to(port, target_port)).or(first)
    }

    /// Returns a port of the row by its position ([`InboundPorts::position`]), with the service that has its
    /// attributes.
    pub fn port_at(&self, mut position: usize) -> Option<(&Self, &ServicePort)> {
        let members = self.members.iter().map(|member| &**member);
        for service in std::iter::once(self).chain(members) {
            match service.ports.get(position) {
                Some(port) => return Some((service, port)),
                None => position -= service.ports.len(),
            }
        }
        None
    }

    /// Returns the ports of the row, then those of all its services.
    fn all_ports(&self) -> impl Iterator<Item = &ServicePort> + Clone {
        let further = self.members.iter().flat_map(|member| &member.ports);
        self.ports.iter().chain(further)
    }

    /// Returns the port with this number; UDP ports are ignored.
    pub fn port(&self, number: u32) -> Option<&ServicePort> {
        self.ports.served(number)
    }
}

/// Returns true if a port leads to a workload's port.
fn leads_to(port: &ServicePort, target_port: u32) -> bool {
    port.target == TargetPort::Number(target_port)
}

/// The ports of a row by number. A service may have tens of thousands, of which none must be searched for one by one.
pub struct InboundPorts<'a>(BTreeMap<u32, Vec<(usize, &'a ServicePort)>>);

impl<'a> InboundPorts<'a> {
    /// Returns the ports of a row.
    pub fn of(service: &'a Service) -> Self {
        let mut by_number: BTreeMap<u32, Vec<(usize, &ServicePort)>> = BTreeMap::new();
        for (position, port) in service.all_ports().enumerate() {
            by_number.entry(port.number).or_default().push((position, port));
        }
        Self(by_number)
    }

    /// Returns true if a port has this number.
    pub fn contains(&self, number: u32) -> bool {
        self.0.contains_key(&number)
    }

    /// Returns the port that [`Service::inbound_port`] returns.
    pub fn get(&self, number: u32, target_port: u32) -> Option<&'a ServicePort> {
        let (_, port) = self.leading_to(number, target_port)?;
        Some(port)
    }

    /// Returns the position of this port, for [`Service::port_at`].
    pub fn position(&self, number: u32, target_port: u32) -> Option<usize> {
        let (position, _) = self.leading_to(number, target_port)?;
        Some(position)
    }

    /// Returns the port with its position.
    fn leading_to(&self, number: u32, target_port: u32) -> Option<(usize, &'a ServicePort)> {
        let ports = self.0.get(&number)?;
        let leading = ports.iter().find(|(_, port)| leads_to(port, target_port));
        leading.or_else(|| ports.first()).copied()
    }
}

impl Visibility {
    /// Returns a member of a row by its position.
    pub fn member(&self, position: u32) -> &Self {
        self.members.get(position as usize).unwrap_or(self)
    }

    /// Returns the positions of the members; 0 for the only service of a row.
    pub fn positions(&self) -> impl Iterator<Item = u32> + use<> {
        0..u32::try_from(self.members.len()).unwrap_or(u32::MAX).max(1)
    }

    /// Returns the position of the member that represents the host.
    pub fn primary(&self) -> u32 {
        let position = primary(self.members.iter().map(|member| member.registry));
        u32::try_from(position).unwrap_or_default()
    }

    /// Returns true if a service of the row has a port with this number.
    pub fn has_port(&self, number: u32) -> bool {
        let mut rows = std::iter::once(self).chain(&self.members);
        rows.any(|row| row.ports.binary_search(&number).is_ok())
    }
}
