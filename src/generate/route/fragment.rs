//! The routes of one VirtualService, or of a service that none speaks of, as they stand in each virtual host: made once
//! for all route configurations that hold them, since clients differ in far less than they have in common.

use bytes::Bytes;
use prost::Message;

use crate::{
    base::{Hashed, Hostname, ObjectKey, Shared},
    generate::{View, name},
    model::{
        ServiceKey,
        destination_rule::{self, RuleRef},
    },
    proto::envoy::config::route::v3::{Route, VirtualHost, route::Action},
};

use super::{
    RouteClient,
    destination::{PortInference, Target, TargetMap, TargetRows},
    hash,
    http::{self, MESH_GATEWAY, Translation},
};

/// What routes of sidecars are made from, besides what they read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fragment {
    /// The HTTP routes of a VirtualService.
    Declared(Declared),
    /// The route to a port of a service.
    Default {
        /// The service.
        service: ServiceKey,
        /// The port.
        port: u32,
        /// The DestinationRule, if it says what requests are hashed by.
        rule: Option<RuleRef>,
    },
}

/// See [`Fragment::Declared`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Declared {
    virtual_service: ObjectKey,
    /// The port of the listener; 0: every port.
    port: u32,
    /// Where it leads.
    targets: Vec<Found>,
    client: RouteClient,
}

/// A [`Target`] with what the client makes of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Found {
    host: Hostname,
    service: Option<ServiceKey>,
    /// The DestinationRule, if it says what requests are hashed by.
    rule: Option<RuleRef>,
}

/// A fragment's key: hashed once, cheap to compare.
pub type FragmentKey = Hashed<Fragment>;

/// Routes as bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes(Bytes);

impl Routes {
    fn of(routes: Vec<Route>) -> Self {
        let holder = VirtualHost {
            routes,
            ..Default::default()
        };
        Self(holder.encode_to_vec().into())
    }

    /// True without routes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The field `routes` of a virtual host, with tags and lengths.
    pub fn field(&self) -> &Bytes {
        &self.0
    }

    /// The routes as messages.
    pub fn messages(&self) -> Vec<Route> {
        let holder = VirtualHost::decode(self.0.clone());
        holder.expect("because these bytes were encoded from routes").routes
    }
}

impl Fragment {
    /// The routes of a VirtualService for a client. `by_source`: some of its matches ask who the client is.
    pub(super) fn declared(
        view: &View,
        virtual_service: &ObjectKey,
        (port, targets): (u32, Vec<Target>),
        client: &RouteClient,
        by_source: bool,
    ) -> FragmentKey {
        let found = |target: Target| Found {
            rule: target.ruled.and_then(|service| rule(view, client, &service)),
            host: target.host,
            service: target.service,
        };
        let key = Self::Declared(Declared {
            virtual_service: virtual_service.clone(),
            port,
            targets: targets.into_iter().map(found).collect(),
            client: if by_source { client.clone() } else { client.anyone() },
        });
        view.known_fragment(Hashed::new(key))
    }

    /// The route to a port of a service for a client.
    pub(super) fn default(view: &View, service: &ServiceKey, port: u32, client: &RouteClient) -> FragmentKey {
        let key = Self::Default {
            service: service.clone(),
            port,
            rule: rule(view, client, service),
        };
        view.known_fragment(Hashed::new(key))
    }

    /// Makes the routes.
    pub fn build(&self, view: &View) -> Routes {
        Routes::of(match self {
            Self::Declared(declared) => declared.routes(view),
            Self::Default { service, port, rule } => vec![default_route(view, service, *port, rule.as_ref())],
        })
    }
}

/// The rule that a client uses for a service, if it says what requests are hashed by: nothing else of it is read here.
fn rule(view: &View, client: &RouteClient, service: &ServiceKey) -> Option<RuleRef> {
    let labels = Some(&*client.labels);
    let (found, rule) = destination_rule::find(view.cx, view.mesh, &client.namespace, labels, service)?;
    hash::is_used(&rule.spec).then_some(found)
}

impl Declared {
    fn routes(&self, view: &View) -> Vec<Route> {
        let Some(declared) = view.mesh.virtual_services.get(view.cx, &self.virtual_service) else {
            return Vec::new();
        };
        let rows = |target: &Found| {
            let service = target.service.as_ref().and_then(|key| view.service(key)).cloned();
            let rule = target.rule.as_ref();
            let rule = rule.and_then(|found| destination_rule::rule(view.cx, view.mesh, found));
            (target.host.clone(), TargetRows { service, rule })
        };
        let targets: TargetMap = self.targets.iter().map(rows).collect();
        let translation = Translation {
            view,
            client: &self.client,
            gateway: MESH_GATEWAY,
            port: self.port,
            tls: false,
            advertise_http3: false,
            inference: if self.port == 0 {
                PortInference::SolePort
            } else {
                PortInference::Listener
            },
            targets: &targets,
        };
        http::routes(&translation, declared)
    }
}

fn default_route(view: &View, service: &ServiceKey, port: u32, rule: Option<&RuleRef>) -> Route {
    let host = service.hostname.to_ascii_lowercase();
    let cluster = name::outbound_cluster(port, "", &host);
    let mut route = http::default_route(view, cluster, format!("{host}:{port}/*"));
    let rule = rule.and_then(|found| destination_rule::rule(view.cx, view.mesh, found));
    let policy = rule.and_then(|rule| hash::of_service_port(&rule.spec, port).and_then(hash::policy));
    if let (Some(policy), Some(Action::Route(action))) = (policy, &mut route.action) {
        action.hash_policy.push(policy);
    }
    route
}

impl RouteClient {
    /// The same without who it is.
    fn anyone(&self) -> Self {
        Self {
            namespace: crate::base::Namespace::default(),
            labels: Shared::default(),
            ..self.clone()
        }
    }
}
