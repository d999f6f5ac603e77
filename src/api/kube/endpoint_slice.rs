//! discovery.k8s.io/v1 EndpointSlice.

use smol_str::SmolStr;

use crate::{
    api::{Meta, meta::Keyed},
    base::{ObjectKey, Shared},
};

/// An EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Metadata.
    pub meta: Shared<Meta>,
    /// Label `kubernetes.io/service-name`; empty: the slice belongs to no Service.
    pub service_name: SmolStr,
    /// `addressType`: `IPv4`, `IPv6` or `FQDN`.
    pub address_type: SmolStr,
    /// `ports`: name and number (nil name is empty, nil number is 0).
    pub ports: Vec<(SmolStr, u32)>,
    /// `endpoints`.
    pub endpoints: Vec<SliceEndpoint>,
}

/// One endpoint of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// `addresses`.
    pub addresses: Vec<SmolStr>,
    /// `conditions.ready`.
    pub ready: Option<bool>,
    /// `conditions.serving`.
    pub serving: Option<bool>,
    /// `conditions.terminating`.
    pub terminating: Option<bool>,
    /// `hostname`.
    pub hostname: SmolStr,
    /// `nodeName`.
    pub node_name: SmolStr,
    /// `targetRef` when it names a Pod: (namespace, name).
    pub pod: Option<(SmolStr, SmolStr)>,
}

impl Keyed for EndpointSlice {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
