//! Virtual hosts of sidecars: one for each host, no domain twice.

use std::collections::BTreeSet;

use crate::{
    base::SmolStr,
    generate::{View, group::Note},
    model::Service,
    proto::envoy::config::route::v3::{
        DirectResponseAction, Route, RouteAction, RouteMatch, VirtualHost, route::Action,
        route_action::ClusterSpecifier, route_match::PathSpecifier,
    },
};

use super::{
    Client,
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

/// Collects the virtual hosts of one route configuration, without their routes.
pub(crate) struct VirtualHosts<'a> {
    view: &'a View<'a>,
    client: &'a Client,
    /// Full names of all services of the route configuration.
    known: BTreeSet<String>,
    names: BTreeSet<String>,
    domains: BTreeSet<String>,
    /// Duplicates, for the notes of the resource.
    pub(crate) notes: Vec<Note>,
}

impl<'a> VirtualHosts<'a> {
    /// An empty collection; `known` are the full names of all its services.
    pub(crate) fn new(view: &'a View<'a>, client: &'a Client, known: BTreeSet<String>) -> Self {
        Self {
            view,
            client,
            known,
            names: BTreeSet::new(),
            domains: BTreeSet::new(),
            notes: Vec::new(),
        }
    }

    /// The virtual host of a service port, unless there is one already or none of its names is left.
    pub(crate) fn of_service(&mut self, service: &Service, port: u32, forms: PortForms) -> Option<VirtualHost> {
        let features = &self.view.mesh.installation.features;
        let names = NameSpace {
            dns_domain: &self.client.dns_domain,
            absolute: features.pilot_enable_absolute_fqdn_vhost_domain,
        };
        let host = service.key.hostname.to_ascii_lowercase();
        let domains = domains::of_service(&service.at_port(port), names, &self.client.vip, forms);
        let mut virtual_host = self.virtual_host(&host, port, domains)?;
        if let Some(session) = filters::stateful_session(service, features) {
            let filters = &mut virtual_host.typed_per_filter_config;
            filters.insert(filters::STATEFUL_SESSION.to_owned(), session);
        }
        Some(virtual_host)
    }

    /// The virtual host of a host that only a VirtualService knows.
    pub(crate) fn of_host(&mut self, host: &str, port: u32) -> Option<VirtualHost> {
        let mut all = vec![domains::bracketed(host)];
        if self.client.routes.proxyless {
            all.push(domains::host_port(host, port));
        }
        let domains = Domains {
            all,
            ..Default::default()
        };
        self.virtual_host(host, port, domains)
    }

    fn virtual_host(&mut self, host: &str, port: u32, domains: Domains) -> Option<VirtualHost> {
        let name = domains::host_port(host, port);
        if !self.names.insert(name.clone()) {
            self.duplicate(&name);
            return None;
        }
        let Domains { all, alternative } = domains;
        let count = all.len();
        let domains: Vec<String> = all
            .into_iter()
            .filter(|domain| {
                // The full name of another service wins over a short form.
                !(alternative.contains(domain) && self.known.contains(domain))
                    && self.domains.insert(domain.to_ascii_lowercase())
            })
            .collect();
        if domains.len() != count {
            self.duplicate(&name);
        }
        (!domains.is_empty()).then(|| VirtualHost {
            name,
            domains,
            include_request_attempt_count: self.client.include_attempt_count,
            ..Default::default()
        })
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
