//! VirtualServices as declared: by an object, or by routes of the Gateway API.

use std::collections::BTreeSet;

use super::{Destination, units};
use crate::{
    api::Config,
    base::{Namespace, ObjectKey, Shared},
    model::MeshSnapshot,
    proto::istio::networking::v1alpha3::{HttpRoute, VirtualService},
    table::Cx,
};

/// HTTP routes, in order, with their destinations. A route of the Gateway API may contribute the same ones to thousands
/// of VirtualServices, which share them: with copies, `istiod render` takes 388 MiB for 64 listeners, 16 hosts and 128
/// matches, without them 109.
#[derive(Debug)]
pub struct Requests {
    /// Routes. A boxed slice, because a list that is collected from a list of routes keeps the memory of that one.
    pub routes: Box<[Shared<HttpRoute>]>,
    /// Destinations of the routes, sorted and unique. A `BTreeSet` would take 640 bytes for the first one.
    pub destinations: Shared<[Destination]>,
}

impl Requests {
    /// Returns routes with their destinations.
    pub fn new(routes: Vec<Shared<HttpRoute>>) -> Self {
        let mut destinations = BTreeSet::new();
        for route in &routes {
            let named = route.r#match.iter().filter(|m| !m.source_namespace.is_empty());
            let sources: BTreeSet<Namespace> = named.map(|m| Namespace::new(&m.source_namespace)).collect();
            let sources: Vec<Namespace> = sources.into_iter().collect();
            let weighted = route.route.iter().filter_map(|route| route.destination.as_ref());
            let mirrors = route.mirrors.iter().filter_map(|mirror| mirror.destination.as_ref());
            let all = weighted.chain(route.mirror.as_deref()).chain(mirrors);
            destinations.extend(all.map(|destination| Destination::new(destination, &sources)));
        }
        Self {
            routes: routes.into_boxed_slice(),
            destinations: destinations.into_iter().collect::<Vec<_>>().into(),
        }
    }

    /// Returns the number of routes that these count as, where the output of objects is limited.
    pub fn counted(&self) -> u64 {
        units::sum(self.routes.iter().map(|route| units::of_http(route)))
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
    pub object: Config<VirtualService>,
    /// Its HTTP routes.
    pub requests: Shared<Requests>,
}

/// A VirtualService before its names are resolved.
pub(super) struct Declared<'a> {
    /// The object; without HTTP routes if it is converted.
    pub object: &'a Config<VirtualService>,
    /// The HTTP routes if it is converted.
    pub converted: Option<Shared<Requests>>,
}

impl<'a> Declared<'a> {
    /// Finds a VirtualService.
    pub(super) fn get(cx: &Cx, mesh: &'a MeshSnapshot, key: &ObjectKey) -> Option<Self> {
        if let Some(object) = mesh.raw_virtual_services.get(cx, key) {
            return Some(Self {
                object,
                converted: None,
            });
        }
        let converted = mesh.converted_virtual_service(cx, key)?;
        Some(Self {
            object: &converted.object,
            converted: Some(converted.requests.clone()),
        })
    }

    /// Returns the HTTP routes.
    pub(super) fn http(&self) -> impl Iterator<Item = &HttpRoute> {
        let converted = self.converted.iter().flat_map(|requests| &requests.routes);
        self.object.spec.http.iter().chain(converted.map(|route| &**route))
    }
}
