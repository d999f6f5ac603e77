//! The route configuration of one host: what a gRPC client without a proxy asks for, by the name of a cluster.
//!
//! It holds the virtual hosts of the port that are meant by the host, and of these there is seldom more than one; so
//! only those services and VirtualServices are looked at that may have to do with the host. What one would get wrong:
//! the others still count where a destination leads to them, and where a full name stands in the way of a short one.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    base::{Hashed, ObjectKey, Shared, SmolStr, host},
    generate::{BuildContext, name, patch::route::RoutePatches},
    model::{Service, ServiceKey, SidecarScope, service::Resolution, sidecar_scope::EgressListener},
};

use super::{
    Client, Known, SidecarRoutes,
    domains::{self, NameSpace, PortForms},
    listing::{Others, Visible},
};

/// The one host of a route configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Single {
    /// The host in lower case.
    host: SmolStr,
    /// The port that is asked for.
    port: u32,
    /// Full names of other services that are short names of those in the route configuration.
    rivals: Vec<SmolStr>,
}

impl Single {
    /// Adds the full names that take precedence over short ones.
    pub(super) fn add_known(&self, known: &mut Known) {
        for rival in &self.rivals {
            known.add(rival.clone(), self.port);
        }
    }

    /// True if a virtual host with these domains is meant by the host.
    pub(super) fn answers(&self, domains: &[String]) -> bool {
        domains.iter().any(|domain| self.is_meant(&domain.to_ascii_lowercase()))
    }

    fn is_meant(&self, domain: &str) -> bool {
        if domain == domains::bracketed(&self.host) {
            return true;
        }
        let (name, port) = match domain.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
            _ => (domain, None),
        };
        let on_port = port.is_none_or(|port| port.parse() == Ok(self.port));
        on_port
            && (name == domains::bracketed(&self.host) || host::is_wildcard(name) && host::overlaps(name, &self.host))
    }
}

/// The route configurations of these names; those that are not names of clusters have none.
pub(crate) fn list<'n>(
    ctx: &BuildContext,
    scope: &SidecarScope,
    client: &Hashed<Client>,
    names: impl Iterator<Item = &'n SmolStr>,
) -> Vec<SidecarRoutes> {
    let mut catalogues: BTreeMap<usize, Catalogue> = BTreeMap::new();
    let mut listed = Vec::new();
    for asked in names {
        let Some(cluster) = name::parse_outbound(asked) else {
            continue;
        };
        let host = SmolStr::from(cluster.host.to_ascii_lowercase());
        let answers = |egress: &EgressListener| egress.port.as_ref().is_none_or(|port| port.number == cluster.port);
        let mut routes = SidecarRoutes {
            name: asked.clone(),
            port: cluster.port,
            client: client.clone(),
            catch_all: None,
            bindings: Vec::new(),
            services: Vec::new(),
            single: None,
            patches: RoutePatches::default(),
        };
        let mut rivals = Vec::new();
        if let Some(position) = scope.egress.iter().position(answers) {
            let catalogue = catalogues
                .entry(position)
                .or_insert_with(|| Catalogue::of(ctx, &scope.egress[position]));
            rivals = catalogue.fill(&mut routes, ctx, scope, &host);
        }
        routes.single = Some(Single {
            host,
            port: cluster.port,
            rivals,
        });
        listed.push(routes);
    }
    listed
}

/// The hosts that one egress listener knows.
struct Catalogue<'a> {
    egress: &'a EgressListener,
    /// Services by host in lower case.
    by_host: BTreeMap<String, &'a ServiceKey>,
    /// Positions of the VirtualServices that name a host, by the host in lower case.
    speakers: BTreeMap<String, BTreeSet<usize>>,
    /// The hosts of each VirtualService in lower case.
    spoken_of: Vec<Vec<String>>,
}

impl<'a> Catalogue<'a> {
    fn of(ctx: &BuildContext, egress: &'a EgressListener) -> Self {
        let services = egress.services.iter();
        let by_host = services.map(|key| (key.hostname.to_ascii_lowercase(), key)).collect();
        let hosts_of = |key: &ObjectKey| {
            let reach = ctx.mesh.virtual_service_reach.get(ctx.cx, key);
            let hosts = reach.iter().flat_map(|reach| &reach.hosts);
            hosts.map(|host| host.to_ascii_lowercase()).collect()
        };
        let spoken_of: Vec<Vec<String>> = egress.virtual_services.iter().map(hosts_of).collect();
        let mut speakers: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
        for (position, hosts) in spoken_of.iter().enumerate() {
            for host in hosts {
                speakers.entry(host.clone()).or_default().insert(position);
            }
        }
        Self {
            egress,
            by_host,
            speakers,
            spoken_of,
        }
    }

    /// Finds out what a route configuration is made of; returns the names that are other services' own.
    fn fill(&self, routes: &mut SidecarRoutes, ctx: &BuildContext, scope: &SidecarScope, host: &str) -> Vec<SmolStr> {
        let mut hosts = self.related(ctx, &routes.client, host);
        let virtual_services = self.speaking_of(hosts.iter().copied().chain([host]));
        // Away from port 80 a VirtualService counts for all its hosts if it counts for one.
        let direct = self.speaking_of([host].into_iter());
        let allies = direct.iter().flat_map(|position| &self.spoken_of[*position]);
        hosts.extend(allies.filter_map(|host| self.by_host.get_key_value(host).map(|(host, _)| host.as_str())));
        let services = hosts.iter().filter_map(|host| ctx.service(self.by_host.get(*host)?));
        let services: Vec<&Shared<Service>> = services.collect();
        let own_names = services.clone();
        let keys = virtual_services
            .iter()
            .map(|position| &self.egress.virtual_services[*position]);
        let others = Others {
            ctx: *ctx,
            by_host: &self.by_host,
        };
        let visible = Visible::narrowed(ctx, scope, self.egress, services, keys, Some(others));
        if visible.is_http_proxy() {
            routes.port = 0;
        }
        let client = &routes.client.routes;
        let (bindings, taken) = visible.bindings(routes.port, client);
        routes.services = visible.default_hosts(routes.port, client, &taken);
        routes.bindings = bindings;
        for binding in &mut routes.bindings {
            binding.hosts.retain(|name| host::overlaps(name, host));
        }
        routes
            .bindings
            .retain(|binding| !binding.services.is_empty() || !binding.hosts.is_empty());
        self.rivals(ctx, routes, &own_names)
    }

    /// The hosts of the services that may have a name that the host means.
    fn related(&self, ctx: &BuildContext, client: &Client, host: &str) -> BTreeSet<&str> {
        let mut names = vec![host.to_owned()];
        // A pod of a headless service.
        names.extend(host.split_once('.').map(|(_, parent)| parent.to_owned()));
        // Short names.
        let mut suffix = client.dns_domain.as_str();
        while !suffix.is_empty() {
            names.push(format!("{host}.{suffix}"));
            suffix = suffix.split_once('.').map_or("", |(_, rest)| rest);
        }
        let found = names.iter().filter_map(|name| self.by_host.get_key_value(name));
        let wildcards = self.by_host.range("*".to_owned().."+".to_owned());
        let wildcards = wildcards.filter(|(name, _)| host::overlaps(name, host));
        let mut related: BTreeSet<&str> = BTreeSet::new();
        for (name, key) in found.chain(wildcards) {
            related.insert(name);
            // An alias is served under the service that it stands for.
            let service = ctx
                .service(key)
                .filter(|service| service.resolution == Resolution::Alias);
            let target = service.map(|service| service.external_name.to_ascii_lowercase());
            let target = target.and_then(|target| self.by_host.get_key_value(&target));
            related.extend(target.map(|(name, _)| name.as_str()));
        }
        related
    }

    /// The VirtualServices that name one of these hosts, or a wildcard with some of them in it.
    fn speaking_of<'h>(&self, hosts: impl Iterator<Item = &'h str>) -> BTreeSet<usize> {
        let mut positions = BTreeSet::new();
        for host in hosts {
            let range = if host::is_wildcard(host) {
                self.speakers.range::<str, _>(..)
            } else {
                positions.extend(self.speakers.get(host).into_iter().flatten());
                self.speakers.range("*".to_owned().."+".to_owned())
            };
            let overlapping = range.filter(|(name, _)| host::overlaps(name, host));
            positions.extend(overlapping.flat_map(|(_, positions)| positions));
        }
        positions
    }

    fn rivals(&self, ctx: &BuildContext, routes: &SidecarRoutes, services: &[&Shared<Service>]) -> Vec<SmolStr> {
        let names = NameSpace {
            dns_domain: &routes.client.dns_domain,
            absolute: false,
        };
        let hosts = services.iter().flat_map(|service| {
            let aliases = service.aliases.iter().map(|alias| &alias.hostname);
            std::iter::once(&service.key.hostname).chain(aliases)
        });
        let forms = hosts.flat_map(|host| domains::alternatives(host, names, PortForms::Ignored));
        let others = Others {
            ctx: *ctx,
            by_host: &self.by_host,
        };
        let rivals: BTreeSet<SmolStr> = forms
            .filter(|form| others.with_port(form, routes.port).is_some())
            .map(SmolStr::from)
            .collect();
        rivals.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single(host: &str, port: u32) -> Single {
        Single {
            host: host.into(),
            port,
            rivals: Vec::new(),
        }
    }

    fn answers(single: &Single, domain: &str) -> bool {
        single.answers(&[domain.to_owned()])
    }

    #[test]
    fn a_host_means_its_own_domains_and_wildcards_around_it() {
        let single = single("a.ns.svc.cluster.local", 8080);
        for domain in [
            "a.ns.svc.cluster.local",
            "A.ns.svc.cluster.local:8080",
            "*.ns.svc.cluster.local",
            "*.ns.svc.cluster.local:8080",
            "*",
        ] {
            assert!(answers(&single, domain), "{domain}");
        }
        for domain in [
            "a.ns.svc.cluster.local:9090",
            "b.ns.svc.cluster.local",
            "*.other.svc.cluster.local",
            "*.ns.svc.cluster.local:9090",
            "a",
        ] {
            assert!(!answers(&single, domain), "{domain}");
        }
    }

    #[test]
    fn addresses_of_the_sixth_version_stand_in_brackets() {
        let single = single("2001:db8::1", 8080);
        assert!(answers(&single, "[2001:db8::1]"));
        assert!(answers(&single, "[2001:db8::1]:8080"));
        assert!(!answers(&single, "[2001:db8::2]:8080"));
        assert!(!answers(&single, "[2001:db8::1]:80"));
    }
}
