//! Virtual hosts of sidecars: one for each host, no domain twice.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::{
    base::SmolStr,
    generate::{BuildContext, group::Note},
    model::Service,
    proto::envoy::config::route::v3::{
        DirectResponseAction, Route, RouteAction, RouteMatch, VirtualHost, route::Action,
        route_action::ClusterSpecifier, route_match::PathSpecifier,
    },
};

use super::{
    Client,
    assembly::Host,
    domains::{self, Domains, NameSpace, PortForms},
    filters,
};

/// The status of requests to hosts that the mesh does not know, where these are not allowed.
const BLOCKED_STATUS: u32 = 502;

/// What happens with requests that no other virtual host is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum CatchAll {
    /// They go to this cluster.
    AllowAny(SmolStr),
    /// They are refused.
    BlockAll,
}

/// Full names of all services of a route configuration, alone and with the ports behind them.
#[derive(Default)]
pub(crate) struct Known(FxHashMap<SmolStr, Vec<u32>>);

impl Known {
    /// Makes room for so many names.
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
    client: &'a Client,
    known: Known,
    /// The hosts and ports that have one.
    named: FxHashSet<(SmolStr, u32)>,
    domains: FxHashSet<String>,
    /// Duplicates, for the notes of the resource.
    pub(crate) notes: Vec<Note>,
}

impl<'a> VirtualHosts<'a> {
    /// An empty collection; `known` are the full names of all its services.
    pub(crate) fn new(ctx: &'a BuildContext<'a>, client: &'a Client, known: Known) -> Self {
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

    /// The virtual host of a service port, unless there is one already or none of its names is left.
    pub(super) fn of_service(&mut self, service: &Service, port: u32, forms: PortForms) -> Option<Host> {
        let features = &self.ctx.mesh.installation.features;
        let names = NameSpace {
            dns_domain: &self.client.dns_domain,
            absolute: features.pilot_enable_absolute_fqdn_vhost_domain,
        };
        let host = super::sidecar::lower_case(&service.key.hostname);
        let domains = domains::of_service(&service.at_port(port), names, &self.client.vip, forms);
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

    /// The virtual host of a host that only a VirtualService knows.
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

    /// The name and the domains that are left for it, unless there is such a virtual host or nothing is left.
    fn named(&mut self, host: &SmolStr, port: u32, domains: Domains) -> Option<(String, Vec<String>)> {
        let name = domains::host_port(host, port);
        if !self.named.insert((host.clone(), port)) {
            self.duplicate(&name);
            return None;
        }
        let count = domains.all.len();
        // The full name of another service wins over a short form.
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

/// The last virtual host.
pub(crate) fn catch_all(kind: &CatchAll, client: &Client) -> VirtualHost {
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
