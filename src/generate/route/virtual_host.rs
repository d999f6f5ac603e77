//! Virtual hosts of sidecars: one per host, with no domain twice.

use std::{collections::BTreeSet, sync::Arc};

use rustc_hash::FxHashSet;

use super::{
    RouteConfigProxyView,
    assembly::{Host, Names},
    domains::{self, Domains},
    filters,
    host_names::{self, ClientNames, Domain, HostNames},
    name_set::NameSet,
};
use crate::{
    base::{Shared, SmolStr, address::host_port},
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

/// The names and domains of the virtual hosts of a route configuration.
#[derive(Default)]
pub(crate) struct TakenNames {
    /// The full names of all its services.
    known: ServiceNames,
    /// Domains in lower case.
    domains: NameSet,
}

impl TakenNames {
    /// Returns true if a virtual host may have the domain: no other one has it, and it is not the full name of another
    /// service, which takes precedence over a short form.
    pub(super) fn is_free(&self, domain: &Domain) -> bool {
        let (text, hash) = domain.lower_case();
        !self.is_foreign(domain) && !self.domains.contains_known(text, hash)
    }

    /// Takes a domain. Returns true if it was free.
    pub(super) fn take(&mut self, domain: &Domain) -> bool {
        let (text, hash) = domain.lower_case();
        self.domains.insert_known(text, hash)
    }

    fn is_foreign(&self, domain: &Domain) -> bool {
        domain.is_alternative && self.known.contains(domain)
    }
}

/// The namespaces of services that lack some of their names or all of them, because other virtual hosts have these.
pub(crate) type UncertainNamespaces = BTreeSet<SmolStr>;

/// Collects the virtual hosts of one route configuration, without their routes.
pub(crate) struct VirtualHosts<'a> {
    ctx: &'a BuildContext<'a>,
    client: &'a RouteConfigProxyView,
    names: ClientNames<'a>,
    /// The names of the virtual hosts.
    named: NameSet,
    /// Their domains.
    pub(super) taken: TakenNames,
    /// Duplicates, for the notes of the resource.
    pub(crate) notes: Vec<Note>,
    pub(super) uncertain: UncertainNamespaces,
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
            named: NameSet::with_capacity(count),
            taken: TakenNames {
                known,
                domains: NameSet::with_capacity(2 * count),
            },
            notes: Vec::new(),
            uncertain: UncertainNamespaces::new(),
        }
    }

    /// Returns the virtual host of a service port, unless it exists already or all its names are taken.
    pub(super) fn of_service(&mut self, service: &Shared<Service>, port: u32) -> Option<Host> {
        let names = self.names.of(service, port);
        let names = self.free(names);
        if !matches!(names, Some(Names::Shared(_))) {
            self.uncertain.extend(host_names::namespaces(service).map(SmolStr::new));
        }
        let names = names?;
        let include_attempt_count = self.client.include_attempt_count;
        let host = match filters::stateful_session(service, &self.ctx.mesh.installation.features) {
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
        };
        Some(host.with_service(service.clone(), port))
    }

    /// Returns the virtual host of a host that only a VirtualService has.
    pub(super) fn of_host(&mut self, host: &SmolStr, port: u32) -> Option<Host> {
        let mut all = vec![domains::bracketed(host)];
        if self.client.routes.proxyless {
            all.push(host_port(host, port));
        }
        let domains = Domains {
            all,
            ..Default::default()
        };
        let names = self.free(HostNames::new(host_port(host, port), domains).into())?;
        Some(Host::plain(names, self.client.include_attempt_count))
    }

    /// Returns the name with the free domains, unless such a virtual host exists or no domain is free.
    fn free(&mut self, names: Arc<HostNames>) -> Option<Names> {
        if !self.named.insert_known(&names.name, names.name_hash) {
            self.duplicate(&names.name);
            return None;
        }
        let mut taken = Vec::new();
        let foreign = names.domains.iter().filter(|domain| self.taken.is_foreign(domain));
        let foreign: Vec<&str> = foreign.map(|domain| domain.text.as_str()).collect();
        for (position, domain) in names.domains.iter().enumerate() {
            if foreign.contains(&domain.text.as_str()) || !self.taken.take(domain) {
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

/// Returns the last virtual host, for assembly.
pub(super) fn last(kind: &CatchAll, client: &RouteConfigProxyView) -> Host {
    Host::whole(catch_all(kind, client))
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
