//! Load-balancing endpoints as they are encoded, by locality.

use std::cell::Cell;

use prost::Message;

use crate::{
    base::{Labels, NetworkId, Shared},
    generate::{
        constant::{self, ISTIO_METADATA},
        wire,
    },
    model::features::Features,
};

/// Metadata that selects the transport socket of an endpoint.
const SOCKET_METADATA: &str = "envoy.transport_socket_match";

pub(super) const MTLS: &str = "istio";

/// Field `filter_metadata` of metadata.
pub(super) const FILTER_METADATA: u32 = 1;

/// Typical length of an encoded endpoint, in bytes.
pub(super) const USUAL_LENGTH: usize = 160;

thread_local! {
    /// Room for a text in the making; empty between two uses.
    static ROOM: Cell<String> = const { Cell::new(String::new()) };
}

/// Endpoints of one locality, or of one priority in it.
pub(super) struct LocalityEndpoints {
    /// `region/zone/subzone`, empty if unknown.
    pub locality: smol_str::SmolStr,
    /// Endpoints.
    pub endpoints: Vec<LbEndpoint>,
    /// Sum of the weights; `None` if filters have left no endpoint.
    pub weight: Option<u32>,
    /// Priority; 0 is the highest.
    pub priority: u32,
}

/// An encoded endpoint, with the attributes that later steps use.
pub(super) struct LbEndpoint {
    /// Encoded message except the weight, which is the last field.
    pub wire: Vec<u8>,
    /// Weight.
    pub weight: u32,
    /// Labels that failover compares.
    pub labels: Shared<Labels>,
    /// True if it is reached by mutual TLS.
    pub mtls: bool,
    /// Network.
    pub network: NetworkId,
    /// Cluster.
    pub cluster: crate::base::ClusterId,
    /// True if it has an address; otherwise it can be reached only through a gateway.
    pub has_address: bool,
}

impl LocalityEndpoints {
    /// Recomputes the sum of the weights.
    pub(super) fn refresh_weight(&mut self) {
        let sum = self
            .endpoints
            .iter()
            .fold(0u32, |sum, member| sum.saturating_add(member.weight));
        self.weight = (!self.endpoints.is_empty()).then_some(sum);
    }

    /// Writes the message.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let parts = self.locality.splitn(3, '/');
        wire::nested(out, 1, |out| {
            for (field, part) in (1..).zip(parts) {
                wire::text(out, field, part);
            }
        });
        for member in &self.endpoints {
            wire::nested(out, 2, |out| {
                out.extend_from_slice(&member.wire);
                wire::wrapped(out, 4, member.weight);
            });
        }
        if let Some(weight) = self.weight {
            wire::wrapped(out, 3, weight);
        }
        if self.priority != 0 {
            wire::number(out, 5, self.priority);
        }
    }
}

/// Writes an endpoint known by address only and reached by mutual TLS (a network gateway).
pub(super) fn peer(features: &Features, address: &str, port: u32, workload: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(USUAL_LENGTH);
    wire::nested(&mut out, 1, |out| {
        wire::nested(out, 1, |out| write_address(out, address, port));
    });
    wire::nested(&mut out, 3, |out| {
        write_metadata(out, features, Some(("tlsMode", MTLS)), |out| out.push_str(workload));
    });
    out
}

/// Writes an address, as [`constant::address`] builds it.
pub(super) fn write_address(out: &mut Vec<u8>, address: &str, port: u32) {
    if port == 0 || address.starts_with("unix://") {
        constant::address(address, port).encode_raw(out);
        return;
    }
    wire::nested(out, 1, |out| {
        wire::text(out, 2, address);
        wire::number(out, 3, port);
    });
}

/// Writes the metadata of an endpoint: its transport socket, and its workload.
pub(super) fn write_metadata(
    out: &mut Vec<u8>,
    features: &Features,
    socket: Option<(&str, &str)>,
    workload: impl FnOnce(&mut String),
) {
    if let Some((key, value)) = socket {
        wire::entry(out, FILTER_METADATA, SOCKET_METADATA, |out| {
            wire::text_field(out, key, value);
        });
    }
    if features.pilot_enable_telemetry_label && features.pilot_endpoint_telemetry_label {
        let mut text = ROOM.take();
        workload(&mut text);
        wire::entry(out, FILTER_METADATA, ISTIO_METADATA, |out| {
            wire::text_field(out, "workload", &text);
        });
        text.clear();
        ROOM.set(text);
    }
}
