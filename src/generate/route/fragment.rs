//! The routes of one VirtualService as they stand in each virtual host: made once for all route configurations that hold
//! them, since clients differ in far less than they have in common.

use bytes::Bytes;
use prost::Message;

use crate::{
    base::{Hashed, Hostname, ObjectKey, Shared, SmolStr},
    generate::{BuildContext, cluster::ClusterMode},
    model::{
        ServiceKey,
        destination_rule::{self, RuleRef},
        virtual_service::Reach,
    },
    proto::envoy::config::route::v3::VirtualHost,
};

use super::{
    RouteProxyView,
    destination::{PortInference, Target, TargetMap, TargetRows},
    hash,
    http::{self, MESH_GATEWAY, Translation},
};

/// What the HTTP routes of a VirtualService are made from, besides what they read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fragment {
    virtual_service: ObjectKey,
    entrance: Entrance,
    /// Where it leads.
    targets: Vec<Found>,
    client: RouteProxyView,
}

/// Where the requests come in that routes are for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Entrance {
    /// At a listener of sidecars with this port; 0: every port.
    Mesh(u32),
    /// At a server of a Gateway.
    Server(Server),
}

/// What routes depend on of a server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Server {
    /// `namespace/name` of the Gateway; empty if no match asks for it.
    pub(super) gateway: SmolStr,
    /// The port as declared; 0 if nothing in the routes follows from it.
    pub(super) port: u32,
    /// It has TLS settings; false where only the port would make a difference of it.
    pub(super) tls: bool,
    /// Responses advertise HTTP/3.
    pub(super) http3: bool,
}

impl Server {
    /// The same without what makes no difference to the routes of a VirtualService: so those of many servers are one.
    /// `sole_port`: true for services of a single port.
    pub(super) fn reduced(mut self, reach: &Reach, sole_port: impl Fn(&Hostname) -> bool) -> Self {
        if !reach.by_gateway {
            self.gateway = SmolStr::default();
        }
        let mut inferred = reach.destinations.iter().filter(|destination| destination.port == 0);
        if !self.http3 && !reach.by_port && inferred.all(|destination| sole_port(&destination.host)) {
            self.port = 0;
            self.tls = false;
        }
        self
    }
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
pub struct Routes {
    field: Bytes,
    /// Where the route for every request begins, which can only be the last; else the end.
    catch_all: usize,
}

impl Routes {
    /// Routes that are encoded already; `catch_all`: where the one for every request begins.
    pub(super) fn of_bytes(field: Vec<u8>, catch_all: Option<usize>) -> Self {
        debug_assert!(
            VirtualHost::decode(&*field).is_ok_and(|holder| holder.encode_to_vec() == field),
            "because routes are written in the order of their fields"
        );
        Self {
            catch_all: catch_all.unwrap_or(field.len()),
            field: field.into(),
        }
    }

    /// True without routes.
    pub fn is_empty(&self) -> bool {
        self.field.is_empty()
    }

    /// The field `routes` of a virtual host, with tags and lengths.
    pub fn field(&self) -> &Bytes {
        &self.field
    }

    /// The same apart: the routes that ask for something, and the one for every request.
    pub fn parts(&self) -> (Bytes, Bytes) {
        (self.field.slice(..self.catch_all), self.field.slice(self.catch_all..))
    }
}

impl Fragment {
    /// The routes of a VirtualService for a client. `by_source`: some of its matches ask who the client is.
    pub(super) fn declared(
        ctx: &BuildContext,
        virtual_service: &ObjectKey,
        (entrance, targets): (Entrance, Vec<Target>),
        client: &RouteProxyView,
        by_source: bool,
    ) -> FragmentKey {
        let found = |target: Target| Found {
            rule: target.ruled.and_then(|service| rule(ctx, client, &service)),
            host: target.host,
            service: target.service,
        };
        let key = Self {
            virtual_service: virtual_service.clone(),
            entrance,
            targets: targets.into_iter().map(found).collect(),
            client: if by_source { client.clone() } else { client.anyone() },
        };
        ctx.known_fragment(Hashed::new(key))
    }
}

/// The rule that a client uses for a service, if it says what requests are hashed by: nothing else of it is read here.
pub(super) fn rule(ctx: &BuildContext, client: &RouteProxyView, service: &ServiceKey) -> Option<RuleRef> {
    let labels = Some(&*client.labels);
    let (found, rule) = destination_rule::find(ctx.cx, ctx.mesh, &client.namespace, labels, service)?;
    hash::is_used(&rule.spec).then_some(found)
}

impl Fragment {
    /// Makes the routes.
    pub fn build(&self, ctx: &BuildContext) -> Routes {
        let Some(declared) = ctx.mesh.virtual_services.get(ctx.cx, &self.virtual_service) else {
            return Routes::default();
        };
        let rows = |target: &Found| {
            let service = target.service.as_ref().and_then(|key| ctx.service(key)).cloned();
            let rule = target.rule.as_ref();
            let rule = rule.and_then(|found| destination_rule::rule(ctx.cx, ctx.mesh, found));
            let mode = ClusterMode::Default;
            (target.host.clone(), TargetRows { service, rule, mode })
        };
        let targets: TargetMap = self.targets.iter().map(rows).collect();
        let sidecars = |port| Server {
            gateway: SmolStr::new_static(MESH_GATEWAY),
            port,
            tls: false,
            http3: false,
        };
        let (server, inference) = match &self.entrance {
            Entrance::Mesh(0) => (&sidecars(0), PortInference::SolePort),
            Entrance::Mesh(port) => (&sidecars(*port), PortInference::Listener),
            Entrance::Server(server) => (server, PortInference::SolePort),
        };
        let translation = Translation {
            ctx,
            client: &self.client,
            gateway: &server.gateway,
            port: server.port,
            tls: server.tls,
            advertise_http3: server.http3,
            inference,
            targets: &targets,
        };
        http::routes(&translation, declared)
    }
}

impl RouteProxyView {
    /// The same without who it is.
    fn anyone(&self) -> Self {
        Self {
            namespace: crate::base::Namespace::default(),
            labels: Shared::default(),
            ..self.clone()
        }
    }
}
