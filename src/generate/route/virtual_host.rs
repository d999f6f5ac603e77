//! Virtual hosts of sidecars: one per host, with no domain twice.

use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    RouteConfigProxyView,
    assembly::Host,
    domains::{self, Domains, NameSpace, PortForms},
    filters,
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
pub(crate) struct ServiceNames(FxHashMap<SmolStr, Vec<u32>>);

impl ServiceNames {
    /// Reserves capacity for this number of names.
    pub(crate) fn reserve(&mut self, names: usize) {
        self.0.reserve(names);
    }

    /// Adds a name in lower case.
    pub(crate) fn add(&mut self, host: SmolStr, port: u32) {
        let ports = self.0.entry(host).or_default();
        if !ports.contains(&port) {
            ports.push(port);
        }
    }

    fn contains(&self, domain: &str) -> bool {
        if self.0.contains_key(domain) {
            return true;
        }
        let Some((host, port)) = domain.rsplit_once(':') else {
            return false;
        };
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = inner.filter(|host| host.contains(':')).unwrap_or(host);
        let ports = self.0.get(host);
        ports.is_some_and(|ports| port.parse().is_ok_and(|port| ports.contains(&port)))
    }
}

/// Collects the virtual hosts of one route configuration, without their routes.
pub(crate) struct VirtualHosts<'a> {
    ctx: &'a BuildContext<'a>,
    client: &'a RouteConfigProxyView,
    known: ServiceNames,
    /// Hosts and ports that have a virtual host.
    named: FxHashSet<(SmolStr, u32)>,
    domains: FxHashSet<String>,
    /// Duplicates, for the notes of the resource.
    pub(crate) notes: Vec<Note>,
}

impl<'a> VirtualHosts<'a> {
    /// Returns an empty collection; `known` has the full names of all its services.
    pub(crate) fn new(ctx: &'a BuildContext<'a>, client: &'a RouteConfigProxyView, known: ServiceNames) -> Self {
        let count = known.0.len();
        Self {
            ctx,
            client,
            known,
            named: FxHashSet::with_capacity_and_hasher(count, Default::default()),
            domains: FxHashSet::with_capacity_and_hasher(4 * count, Default::default()),
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
        if !self.named.insert((host.clone(), port)) {
            self.duplicate(&name);
            return None;
        }
        let count = domains.all.len();
        // The full name of another service takes precedence over a short form.
        let is_foreign = |domain: &&String| self.known.contains(domain) && domains.is_alternative(domain);
        let foreign: Vec<String> = domains.all.iter().filter(is_foreign).cloned().collect();
        let mut left = domains.all;
        left.retain(|domain| !foreign.contains(domain) && self.domains.insert(domain.to_ascii_lowercase()));
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
