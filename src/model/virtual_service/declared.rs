//! VirtualServices as declared: by an object, or by routes of the Gateway API.

use std::{borrow::Cow, collections::BTreeSet};

use super::{Destination, Resolver, units};
use crate::{
    api::Config,
    base::{Namespace, ObjectKey, Shared},
    model::{MeshSnapshot, installation::Installation},
    proto::istio::networking::v1alpha3::{self as networking, HttpRoute, VirtualService},
    table::Cx,
};

/// The HTTP routes of a resolved VirtualService.
#[derive(Clone, Debug)]
pub enum HttpRoutes {
    /// Those of an object. Their names are resolved where they are read: resolved copies would take 1.3 MiB more for
    /// 1,000 objects with two routes.
    Written(Shared<Config<VirtualService>>),
    /// Those with fully qualified names: made from routes of the Gateway API, or merged with those of delegates.
    Resolved(Shared<Requests>),
}

impl HttpRoutes {
    /// Returns the routes; their names may be short.
    pub fn as_written(&self) -> impl Iterator<Item = &HttpRoute> {
        let (written, resolved): (&[HttpRoute], &[Shared<RequestRoute>]) = match self {
            Self::Written(object) => (&object.spec.http[..], &[]),
            Self::Resolved(requests) => (&[], &requests.routes[..]),
        };
        written.iter().chain(resolved.iter().map(|route| &route.http))
    }

    /// Returns the routes with fully qualified names.
    pub fn resolved<'a>(&'a self, installation: &'a Installation) -> impl Iterator<Item = Cow<'a, HttpRoute>> {
        let resolver = self.resolver(installation);
        self.as_written().map(move |route| match &resolver {
            Some(resolver) => Cow::Owned(resolver.http(route)),
            None => Cow::Borrowed(route),
        })
    }

    /// Returns the number of routes that these count as, where the output of objects is limited.
    pub(super) fn counted(&self) -> u64 {
        match self {
            Self::Written(object) => units::sum(object.spec.http.iter().map(units::of_http)),
            Self::Resolved(requests) => requests.counted(),
        }
    }

    /// Returns true if the route at this position asks the endpoint picker of its destination.
    pub fn asks_picker(&self, position: usize) -> bool {
        match self {
            Self::Written(_) => false,
            Self::Resolved(requests) => requests.routes.get(position).is_some_and(|route| route.asks_picker),
        }
    }

    /// Returns the weighted destinations with fully qualified hosts, without copies of the routes.
    pub fn weighted<'a>(
        &'a self,
        installation: &'a Installation,
    ) -> impl Iterator<Item = Cow<'a, networking::Destination>> {
        let resolver = self.resolver(installation);
        let weighted = self.as_written().flat_map(|route| &route.route);
        let written = weighted.filter_map(|route| route.destination.as_ref());
        written.map(move |destination| match &resolver {
            Some(resolver) => Cow::Owned(resolver.destination(destination)),
            None => Cow::Borrowed(destination),
        })
    }

    fn resolver<'a>(&'a self, installation: &'a Installation) -> Option<Resolver<'a>> {
        match self {
            Self::Written(object) => Some(Resolver::new(installation, &object.meta)),
            Self::Resolved(_) => None,
        }
    }

    /// Returns the destinations of the routes, sorted and unique.
    pub(super) fn destinations(&self, installation: &Installation) -> Shared<[Destination]> {
        match self {
            Self::Written(_) => destinations(self.as_written(), self.resolver(installation).as_ref()),
            Self::Resolved(requests) => requests.destinations.clone(),
        }
    }
}

impl PartialEq for HttpRoutes {
    /// Compares the routes as they are. Short names also depend on the namespace, which is in the metadata of the
    /// [`super::VirtualService`].
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Written(own), Self::Written(other)) => own.ptr_eq(other) || own.spec.http == other.spec.http,
            (Self::Resolved(own), Self::Resolved(other)) => own == other,
            _ => false,
        }
    }
}

/// Returns the destinations of routes, sorted and unique; without a resolver, their hosts are fully qualified.
fn destinations<'a>(
    routes: impl Iterator<Item = &'a HttpRoute>,
    resolver: Option<&Resolver<'_>>,
) -> Shared<[Destination]> {
    let mut all = BTreeSet::new();
    for route in routes {
        let named = route
            .r#match
            .iter()
            .filter(|condition| !condition.source_namespace.is_empty());
        let sources: BTreeSet<Namespace> = named
            .map(|condition| Namespace::new(&condition.source_namespace))
            .collect();
        let sources: Vec<Namespace> = sources.into_iter().collect();
        let weighted = route.route.iter().filter_map(|route| route.destination.as_ref());
        let mirrors = route.mirrors.iter().filter_map(|mirror| mirror.destination.as_ref());
        let found = weighted.chain(route.mirror.as_deref()).chain(mirrors);
        all.extend(found.map(|destination| match resolver {
            Some(resolver) => Destination::new(&resolver.destination(destination), &sources),
            None => Destination::new(destination, &sources),
        }));
    }
    all.into_iter().collect::<Vec<_>>().into()
}

/// An HTTP route with fully qualified names.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRoute {
    /// The route.
    pub http: HttpRoute,
    /// True if the endpoint picker of an InferencePool among its destinations is asked.
    pub asks_picker: bool,
}

impl RequestRoute {
    /// Returns a route that asks no endpoint picker.
    pub fn of(http: HttpRoute) -> Self {
        Self {
            http,
            asks_picker: false,
        }
    }
}

/// HTTP routes, in order, with their destinations. A route of the Gateway API may contribute the same ones to thousands
/// of VirtualServices, which share them: with copies, `istiod render` takes 388 MiB for 64 listeners, 16 hosts and 128
/// matches, without them 109.
#[derive(Debug)]
pub struct Requests {
    /// Routes. A boxed slice, because a list that is collected from a list of routes keeps the memory of that one.
    pub routes: Box<[Shared<RequestRoute>]>,
    /// Destinations of the routes, sorted and unique. A `BTreeSet` would take 640 bytes for the first one.
    pub destinations: Shared<[Destination]>,
}

impl Requests {
    /// Returns routes with their destinations.
    pub fn new(routes: Vec<Shared<RequestRoute>>) -> Self {
        Self {
            destinations: destinations(routes.iter().map(|route| &route.http), None),
            routes: routes.into_boxed_slice(),
        }
    }

    /// Returns the number of routes that these count as, where the output of objects is limited.
    pub fn counted(&self) -> u64 {
        units::sum(self.routes.iter().map(|route| units::of_http(&route.http)))
    }
}

impl PartialEq for Requests {
    fn eq(&self, other: &Self) -> bool {
        // The destinations follow from the routes.
        self.routes == other.routes
    }
}

/// A VirtualService made from routes of the Gateway API.
#[derive(Debug, PartialEq)]
pub struct Converted {
    /// The object without HTTP routes.
    pub object: Shared<Config<VirtualService>>,
    /// Its HTTP routes.
    pub requests: Shared<Requests>,
}

/// A VirtualService before its names are resolved.
pub(super) struct Declared {
    /// The object; without HTTP routes if it is converted.
    pub object: Shared<Config<VirtualService>>,
    /// The HTTP routes if it is converted.
    pub converted: Option<Shared<Requests>>,
}

impl Declared {
    /// Finds a VirtualService.
    pub(super) fn get(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Self> {
        if let Some(object) = mesh.raw_virtual_services.get(cx, key) {
            return Some(Self {
                object: object.clone(),
                converted: None,
            });
        }
        let converted = mesh.converted_virtual_service(cx, key)?;
        Some(Self {
            object: converted.object.clone(),
            converted: Some(converted.requests.clone()),
        })
    }

    /// Returns the HTTP routes.
    pub(super) fn http(&self) -> impl Iterator<Item = &HttpRoute> {
        let converted = self.converted.iter().flat_map(|requests| &requests.routes);
        self.object.spec.http.iter().chain(converted.map(|route| &route.http))
    }
}
