//! Hosts of Gateways with many, indexed once for all VirtualServices. An Ingress becomes a VirtualService for each of
//! its thousands of hosts, which all name its Gateway with as many.

use std::collections::{BTreeMap, BTreeSet};

use super::{DeclaredGateway, DeclaredServer, bare_host};
use crate::{
    base::{Namespace, ObjectKey, Shared, host::HostsByEnd},
    model::MeshSnapshot,
    table::{Cx, TableWriter},
};

/// The number of hosts up to which those of a Gateway have no row: they are read from its servers.
const FEW_HOSTS: usize = 256;

/// The hosts of a Gateway with many.
#[derive(Debug, PartialEq)]
pub struct GatewayHosts {
    /// The number of servers.
    servers: usize,
    /// The hosts by the namespace that may use them; `None` for all.
    by_user: BTreeMap<Option<Namespace>, HostsOfUser>,
}

/// Hosts that a namespace may use.
#[derive(Debug, Default, PartialEq)]
struct HostsOfUser {
    count: usize,
    /// The server of each host, and its position among the hosts of the server.
    by_host: HostsByEnd<Vec<(usize, usize)>>,
}

/// Returns the changed Gateways that have many hosts or had them before.
pub fn gateways_with_many(gateways: &TableWriter<ObjectKey, DeclaredGateway>) -> Vec<ObjectKey> {
    let changed = gateways.changes().iter().filter(|(_, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        versions.any(|gateway| has_many(gateway))
    });
    changed.map(|(key, ..)| key.clone()).collect()
}

/// Derives the hosts of a Gateway with many.
pub fn hosts(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<GatewayHosts> {
    let gateway = mesh.declared_gateways.get(cx, key)?;
    has_many(gateway).then(|| GatewayHosts::of(gateway))
}

/// Returns true for a Gateway with many hosts. Those that belong to a selector of namespaces have no row: they are made
/// from listeners, each of which has one.
fn has_many(gateway: &DeclaredGateway) -> bool {
    let servers = || gateway.servers.iter().flatten();
    servers().map(|server| server.spec.hosts.len()).sum::<usize>() > FEW_HOSTS
        && servers().all(|server| server.selector.is_none())
}

impl GatewayHosts {
    fn of(gateway: &DeclaredGateway) -> Self {
        let servers: Vec<&Shared<DeclaredServer>> = gateway.servers.iter().flatten().collect();
        let mut by_user: BTreeMap<Option<Namespace>, HostsOfUser> = BTreeMap::new();
        for (server, declared) in servers.iter().enumerate() {
            for (position, written) in declared.spec.hosts.iter().enumerate() {
                let user = written.split_once('/').map(|(user, _)| user);
                let user = user.filter(|user| *user != "*").map(Namespace::new);
                let hosts = by_user.entry(user).or_default();
                hosts.count += 1;
                hosts.by_host.add(bare_host(written), (server, position));
            }
        }
        Self {
            servers: servers.len(),
            by_user,
        }
    }

    /// Returns the number of servers.
    pub fn servers(&self) -> usize {
        self.servers
    }

    /// Returns the number of hosts that VirtualServices of a namespace may use.
    pub fn count(&self, namespace: &Namespace) -> usize {
        self.of_user(namespace).map(|hosts| hosts.count).sum()
    }

    /// Returns those of these hosts that have a name in common with a host, as server and position.
    pub fn overlapping(&self, namespace: &Namespace, name: &str) -> BTreeSet<(usize, usize)> {
        self.of_user(namespace)
            .flat_map(|hosts| hosts.by_host.overlapping(name))
            .collect()
    }

    fn of_user(&self, namespace: &Namespace) -> impl Iterator<Item = &HostsOfUser> {
        let users = [None, Some(namespace.clone())];
        users.into_iter().filter_map(move |user| self.by_user.get(&user))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::Kind,
        base::host,
        model::{fixture, inputs::Row},
        proto::istio::networking::v1alpha3::{Gateway, Port, Server},
    };

    #[test]
    fn r21_many_hosts_are_looked_up_as_they_are_compared() {
        let server = |hosts: Vec<String>| Server {
            port: Some(Port {
                number: 80,
                protocol: "HTTP".to_owned(),
                ..Default::default()
            }),
            hosts,
            ..Default::default()
        };
        let gateway = |name: &str, count: usize| -> Row {
            let written = ["./", "*/", "", "other/"];
            let mut hosts: Vec<String> = (0..count).map(|n| format!("{}h{n}.test", written[n % 4])).collect();
            hosts.extend(["*.test", "other/*", "app/h1.test"].map(str::to_owned));
            let spec = Gateway {
                servers: vec![server(hosts), Server::default(), server(vec!["*/h2.test".to_owned()])],
                ..Default::default()
            };
            fixture::config(Kind::Gateway, name, 1, spec).into()
        };
        let commit = fixture::world(vec![gateway("app/many", 300), gateway("app/few", 12)]);
        let (cx, mesh) = (Cx::untracked(), commit.snapshot);
        assert!(mesh.gateway_hosts.get(&cx, &fixture::key("app/few")).is_none());
        let many = fixture::key("app/many");
        let (row, declared) = (
            mesh.gateway_hosts.get(&cx, &many),
            mesh.declared_gateways.get(&cx, &many),
        );
        let (row, declared) = (row.expect("it has many hosts"), declared.expect("it exists"));
        assert_eq!(row.servers(), 2);
        for namespace in ["app", "other", "third"] {
            let servers = declared.servers.iter().flatten();
            let offered: Vec<Vec<&str>> = servers.map(|server| server.hosts_for(&cx, &mesh, namespace)).collect();
            let namespace = Namespace::new(namespace);
            assert_eq!(row.count(&namespace), offered.iter().map(Vec::len).sum::<usize>());
            for name in ["h1.test", "h2.test", "*.test", "*2.test", "none.example"] {
                let found = row.overlapping(&namespace, name).into_iter().map(|(server, _)| server);
                let servers = offered.iter().enumerate();
                let expected = servers.flat_map(|(server, hosts)| {
                    let common = hosts.iter().filter(|other| host::overlaps(name, other));
                    std::iter::repeat_n(server, common.count())
                });
                let (found, expected): (Vec<usize>, Vec<usize>) = (found.collect(), expected.collect());
                assert_eq!(found, expected, "{name} in {namespace}");
            }
        }
    }
}
