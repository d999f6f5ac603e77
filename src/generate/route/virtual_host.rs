//! Virtual hosts of sidecars: one per host, with no domain twice.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use super::{
    RouteConfigProxyView,
    assembly::{Host, Names},
    domains::{self, Domains},
    filters,
    host_names::{ClientNames, Domain, HostNames},
    name_set::NameSet,
};
use crate::{
    base::{Shared, SmolStr},
    generate::{BuildContext, resource::Note},
    model::Service,
    proto::envoy::config::route::v3::{
        DirectResponseAction, Route, RouteAction, RouteMatch, VirtualHost, route::Action,
        route_action::ClusterSpecifier, route_match::PathSpecifier,
    },
};

/// Status of requests to unknown hosts where these are blocked.
const BLOCKED_STATUS: u32 = 502;

/// Treatment of requests that no other virtual host matches.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum CatchAll {
    /// Forward to this cluster.
    AllowAny(SmolStr),
    /// Refuse.
    BlockAll,
}

/// Full names of all services of a route configuration, with their ports.
#[derive(Default)]
pub(crate) struct ServiceNames {
    hosts: NameSet,
    /// Ports by the position of the host.
    ports: FxHashSet<(u32, u32)>,
}

impl ServiceNames {
    /// Reserves capacity for this number of names.
    pub(crate) fn reserve(&mut self, names: usize) {
        self.hosts.reserve(names);
        self.ports.reserve(names);
    }

    /// Adds a name in lower case.
    pub(crate) fn add(&mut self, host: &str, port: u32) {
        self.ports.insert((self.hosts.id_of(host), port));
    }

    fn contains(&self, domain: &Domain) -> bool {
        if self.hosts.contains_known(&domain.text, domain.hash) {
            return true;
        }
        let Some((host, port)) = domain.text.rsplit_once(':') else {
            return false;
        };
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = inner.filter(|host| host.contains(':')).unwrap_or(host);
        let host = self.hosts.get(host);
        host.is_some_and(|host| port.parse().is_ok_and(|port| self.ports.contains(&(host, port))))
    }
}

/// Collects the virtual hosts of one route configuration, without their routes.
pub(crate) struct VirtualHosts<'a> {
    ctx: &'a BuildContext<'a>,
    client: &'a RouteConfigProxyView,
    names: ClientNames<'a>,
    known: ServiceNames,
    /// The names of the virtual hosts.
    named: NameSet,
    /// Domains in lower case.
    domains: NameSet,
    /// Duplicates, for the notes of the resource.
    pub(crate) notes: Vec<Note>,
}

impl<'a> VirtualHosts<'a> {
    /// Returns an empty collection; `known` has the full names of all its services. Domains are repeated with their
    /// port if `with_ports` is true.
    pub(crate) fn new(
        ctx: &'a BuildContext<'a>,
        client: &'a RouteConfigProxyView,
        known: ServiceNames,
        with_ports: bool,
    ) -> Self {
        let count = known.hosts.len();
        let features = &ctx.mesh.installation.features;
        Self {
            ctx,
            client,
            names: ClientNames::new(ctx.memo.get(), features, client, with_ports),
            known,
            named: NameSet::with_capacity(count),
            domains: NameSet::with_capacity(2 * count),
            notes: Vec::new(),
        }
    }

    /// Returns the virtual host of a service port, unless it exists already or all its names are taken.
    pub(super) fn of_service(&mut self, service: &Shared<Service>, port: u32) -> Option<Host> {
        let names = self.names.of(service, port);
        let names = self.free(names)?;
        let include_attempt_count = self.client.include_attempt_count;
        Some(
            match filters::stateful_session(service, &self.ctx.mesh.installation.features) {
                None => Host::plain(names, include_attempt_count),
                Some(session) => {
                    let (name, domains) = names.into_parts();
                    Host::whole(VirtualHost {
                        name,
                        domains,
                        include_request_attempt_count: include_attempt_count,
                        typed_per_filter_config: [(filters::STATEFUL_SESSION.to_owned(), session)].into(),
                        ..Default::default()
                    })
                }
            },
        )
    }

    /// Returns the virtual host of a host that only a VirtualService has.
    pub(super) fn of_host(&mut self, host: &SmolStr, port: u32) -> Option<Host> {
        let mut all = vec![domains::bracketed(host)];
        if self.client.routes.proxyless {
            all.push(domains::host_port(host, port));
        }
        let domains = Domains {
            all,
            ..Default::default()
        };
        let names = self.free(HostNames::new(domains::host_port(host, port), domains).into())?;
        Some(Host::plain(names, self.client.include_attempt_count))
    }

    /// Returns the name with the free domains, unless such a virtual host exists or no domain is free.
    fn free(&mut self, names: Arc<HostNames>) -> Option<Names> {
        if !self.named.insert_known(&names.name, names.name_hash) {
            self.duplicate(&names.name);
            return None;
        }
        // The full name of another service takes precedence over a short form.
        let alternatives = names.domains.iter().filter(|domain| domain.is_alternative);
        let foreign = alternatives.filter(|domain| self.known.contains(domain));
        let foreign: Vec<&str> = foreign.map(|domain| domain.text.as_str()).collect();
        let mut taken = Vec::new();
        for (position, domain) in names.domains.iter().enumerate() {
            let (text, hash) = match &domain.lower_case {
                None => (&domain.text, domain.hash),
                Some((lower, hash)) => (lower, *hash),
            };
            if foreign.contains(&domain.text.as_str()) || !self.domains.insert_known(text, hash) {
                taken.push(position);
            }
        }
        if taken.is_empty() {
            return (!names.domains.is_empty()).then_some(Names::Shared(names));
        }
        self.duplicate(&names.name);
        let domains = names.domains.iter().enumerate();
        let left = domains.filter(|(position, _)| !taken.contains(position));
        let domains: Vec<String> = left.map(|(_, domain)| domain.text.clone()).collect();
        let name = names.name.clone();
        (!domains.is_empty()).then_some(Names::Own { name, domains })
    }

    fn duplicate(&mut self, name: &str) {
        self.notes.push(Note {
            code: "pilot_vservice_dup_domain",
            detail: SmolStr::new(name),
        });
    }
}

/// Returns the last virtual host.
pub(crate) fn catch_all(kind: &CatchAll, client: &RouteConfigProxyView) -> VirtualHost {
    let (name, action) = match kind {
        CatchAll::AllowAny(cluster) => (
            "allow_any",
            Action::Route(RouteAction {
                cluster_specifier: Some(ClusterSpecifier::Cluster(cluster.to_string())),
                timeout: Some(prost_types::Duration::default()),
                max_grpc_timeout: Some(prost_types::Duration::default()),
                append_x_forwarded_host: client.routes.append_forwarded_host,
                ..Default::default()
            }),
        ),
        CatchAll::BlockAll => (
            "block_all",
            Action::DirectResponse(DirectResponseAction {
                status: BLOCKED_STATUS,
                ..Default::default()
            }),
        ),
    };
    let route = Route {
        name: name.to_owned(),
        r#match: Some(RouteMatch {
            path_specifier: Some(PathSpecifier::Prefix("/".to_owned())),
            ..Default::default()
        }),
        action: Some(action),
        ..Default::default()
    };
    VirtualHost {
        name: name.to_owned(),
        domains: vec!["*".to_owned()],
        routes: vec![route],
        include_request_attempt_count: client.include_attempt_count,
        ..Default::default()
    }
}
