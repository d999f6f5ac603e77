//! The two variants of ADS.

use std::sync::Arc;

use crate::generate::{EncodedResource, encoded::Frame};

/// The variant of the protocol that a stream uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// State of the world.
    Sotw,
    /// Incremental.
    Delta,
}

impl Protocol {
    /// Returns the variant of a method of `AggregatedDiscoveryService`, by its path.
    pub fn of_path(path: &str) -> Option<Self> {
        match path {
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources" => Some(Self::Sotw),
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources" => Some(Self::Delta),
            _ => None,
        }
    }

    /// Returns true for methods of ADS v2, which old proxies call.
    pub(super) fn is_old_path(path: &str) -> bool {
        path.starts_with("/envoy.service.discovery.v2.") || path.starts_with("/envoy.api.v2.")
    }

    /// Returns true for types of ADS v2.
    pub(super) fn is_old_type(type_url: &str) -> bool {
        type_url.starts_with("type.googleapis.com/envoy.api.v2.")
    }

    /// Returns the encoding of a resource as a field of a response.
    pub(super) fn frame(self, resource: &EncodedResource) -> Frame<'_> {
        match self {
            Self::Sotw => resource.sotw_frame(),
            Self::Delta => resource.delta_frame(),
        }
    }

    /// Returns the size of the encoding of resources.
    pub(super) fn size(self, resources: &[Arc<EncodedResource>]) -> usize {
        resources.iter().map(|resource| self.frame(resource).size()).sum()
    }
}
