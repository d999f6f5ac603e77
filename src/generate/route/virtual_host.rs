//! Virtual hosts of sidecars: one per host, with no domain twice.

use rustc_hash::FxHashSet;

use super::{
    RouteConfigProxyView,
    assembly::Host,
    domains::{self, Domains, NameSpace, PortForms},
    filters,
    name_set::NameSet,
};
use crate::{
    base::SmolStr,
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

    fn contains(&self, domain: &str) -> bool {
        if self.hosts.get(domain).is_some() {
            return true;
        }
        let Some((host, port)) = domain.rsplit_once(':') else {
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
    known: ServiceNames,
    /// The names of the virtual hosts.
    named: NameSet,
    /// Domains in lower case.
    domains: NameSet,
    /// Duplicates, for the notes of the resource.
    pub(crate) notes: Vec<Note>,
}

impl<'a> VirtualHosts<'a> {
    /// Returns an empty collection; `known` has the full names of all its services.
    pub(crate) fn new(ctx: &'a BuildContext<'a>, client: &'a RouteConfigProxyView, known: ServiceNames) -> Self {
        let count = known.hosts.len();
        Self {
            ctx,
            client,
            known,
            named: NameSet::with_capacity(count),
            domains: NameSet::with_capacity(2 * count),
            notes: Vec::new(),
        }
    }

    /// Returns the virtual host of a service port, unless it exists already or all its names are taken.
    pub(super) fn of_service(&mut self, service: &Service, port: u32, forms: PortForms) -> Option<Host> {
        let features = &self.ctx.mesh.installation.features;
        let names = NameSpace {
            dns_domain: &self.client.dns_domain,
            absolute: features.pilot_enable_absolute_fqdn_vhost_domain,
        };
        let host = super::domains::lower_case(&service.key.hostname);
        let domains = domains::of_service(service, names, &self.client.vip, forms);
        let (name, domains) = self.named(&host, port, domains)?;
        let include_attempt_count = self.client.include_attempt_count;
        Some(match filters::stateful_session(service, features) {
            None => Host::plain(name, domains, include_attempt_count),
            Some(session) => Host::whole(VirtualHost {
                name,
                domains,
                include_request_attempt_count: include_attempt_count,
                typed_per_filter_config: [(filters::STATEFUL_SESSION.to_owned(), session)].into(),
                ..Default::default()
            }),
        })
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
        let (name, domains) = self.named(host, port, domains)?;
        Some(Host::plain(name, domains, self.client.include_attempt_count))
    }

    /// Returns the name and the free domains, unless such a virtual host exists or no domain is free.
    fn named(&mut self, host: &SmolStr, port: u32, domains: Domains) -> Option<(String, Vec<String>)> {
        let name = domains::host_port(host, port);
        if !self.named.insert(&name) {
            self.duplicate(&name);
            return None;
        }
        let count = domains.all.len();
        // The full name of another service takes precedence over a short form.
        let foreign = domains.alternatives().filter(|domain| self.known.contains(domain));
        let foreign: Vec<String> = foreign.cloned().collect();
        let mut left = domains.all;
        left.retain(|domain| {
            let is_lower_case = !domain.bytes().any(|byte| byte.is_ascii_uppercase());
            let mut is_new = |domain: &str| self.domains.insert(domain);
            !foreign.contains(domain)
                && if is_lower_case {
                    is_new(domain)
                } else {
                    is_new(&domain.to_ascii_lowercase())
                }
        });
        if left.len() != count {
            self.duplicate(&name);
        }
        (!left.is_empty()).then_some((name, left))
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
