//! discovery.k8s.io/v1 EndpointSlice.

use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    api::{
        FieldError, Meta,
        field::{FieldErrors, Fields},
        meta::{Keyed, with_annotations},
    },
    base::{ObjectKey, Shared},
};

/// An EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Metadata without annotations.
    pub meta: Shared<Meta>,
    /// The label `kubernetes.io/service-name`; empty if the slice belongs to no Service.
    pub service_name: SmolStr,
    /// True if the label `multicluster.kubernetes.io/service-name` marks a copy of another cluster's endpoints.
    pub mirrored: bool,
    /// `addressType`: `IPv4`, `IPv6` or `FQDN`.
    pub address_type: SmolStr,
    /// `ports` as (name, number); a missing name is empty, a missing number is 0.
    pub ports: Vec<(SmolStr, u32)>,
    /// Names of `ports` with another protocol than TCP.
    pub not_tcp: Vec<SmolStr>,
    /// `endpoints`.
    pub endpoints: Vec<SliceEndpoint>,
}

/// An endpoint of a slice.
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
    /// `targetRef` if it is a Pod.
    pub pod: Option<PodReference>,
}

/// A reference to a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodReference {
    /// `namespace`.
    pub namespace: SmolStr,
    /// `name`.
    pub name: SmolStr,
    /// `uid`.
    pub uid: SmolStr,
}

impl EndpointSlice {
    /// Parses a manifest. Each invalid field is an error with its path.
    pub fn parse(meta: Shared<Meta>, object: &Value) -> Result<Self, Vec<FieldError>> {
        let errors = FieldErrors::default();
        let root = Fields::root(object, &errors);
        let ports = root
            .objects("ports")
            .iter()
            .map(|port| (port.text("name"), port.port("port")))
            .collect();
        let listed = root.objects("ports").into_iter();
        let not_tcp = listed.filter(|port| !matches!(port.text("protocol").as_str(), "" | "TCP"));
        let not_tcp = not_tcp.map(|port| port.text("name")).collect();
        let endpoints = root.objects("endpoints").iter().map(SliceEndpoint::parse).collect();
        let service_name = meta.labels.get("kubernetes.io/service-name");
        errors.finish(Self {
            service_name: service_name.cloned().unwrap_or_default(),
            mirrored: meta.labels.contains_key("multicluster.kubernetes.io/service-name"),
            meta: with_annotations(meta, &[]),
            address_type: root.text("addressType"),
            ports,
            not_tcp,
            endpoints,
        })
    }
}

impl SliceEndpoint {
    fn parse(fields: &Fields<'_>) -> Self {
        let conditions = fields.object("conditions");
        let target = fields.object("targetRef");
        Self {
            addresses: fields.texts("addresses"),
            ready: conditions.flag("ready"),
            serving: conditions.flag("serving"),
            terminating: conditions.flag("terminating"),
            hostname: fields.text("hostname"),
            node_name: fields.text("nodeName"),
            pod: (target.text("kind") == "Pod").then(|| PodReference {
                namespace: target.text("namespace"),
                name: target.text("name"),
                uid: target.text("uid"),
            }),
        }
    }
}

impl Keyed for EndpointSlice {
    fn key(&self) -> &ObjectKey {
        &self.meta.key
    }
}
