//! Load-balancing endpoints as they are encoded, by locality.

use std::cell::Cell;

use crate::{
    base::{Labels, NetworkId, Shared, scratch},
    generate::{
        constant::{self, ISTIO_METADATA},
        wire::{Encoded, Writer},
    },
    model::features::Features,
    proto::{
        envoy::config::{
            core::v3::{Address, Metadata},
            endpoint::v3::{LbEndpoint as EnvoyLbEndpoint, LocalityLbEndpoints},
        },
        field::{address, endpoint, lb_endpoint, locality, locality_lb_endpoints, metadata, socket_address},
    },
};

/// Metadata that selects the transport socket of an endpoint.
pub(super) const SOCKET_METADATA: &str = "envoy.transport_socket_match";

pub(super) const MTLS: &str = "istio";

/// Typical length of an encoded endpoint, in bytes.
pub(super) const USUAL_LENGTH: usize = 160;

thread_local! {
    /// The description of a workload. Load assignments take a quarter longer if each endpoint allocates its own (bench
    /// `suite`, case `endpoints 1000/1`).
    static SCRATCH: Cell<String> = const { Cell::new(String::new()) };
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
    pub encoded: Encoded<EnvoyLbEndpoint>,
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
    pub(super) fn write(&self, out: &mut Writer<LocalityLbEndpoints>) {
        let parts = self.locality.split('/');
        out.nested(locality_lb_endpoints::LOCALITY, |out| {
            for (field, part) in [locality::REGION, locality::ZONE, locality::SUB_ZONE]
                .into_iter()
                .zip(parts)
            {
                out.text(field, part);
            }
        });
        for member in &self.endpoints {
            out.nested(locality_lb_endpoints::LB_ENDPOINTS, |out| {
                out.fields(&member.encoded);
                out.wrapper(lb_endpoint::LOAD_BALANCING_WEIGHT, member.weight);
            });
        }
        if let Some(weight) = self.weight {
            out.wrapper(locality_lb_endpoints::LOAD_BALANCING_WEIGHT, weight);
        }
        out.number(locality_lb_endpoints::PRIORITY, self.priority);
    }
}

/// Writes an endpoint known by address only and reached by mutual TLS (a network gateway).
pub(super) fn peer(features: &Features, address: &str, port: u32, workload: &str) -> Encoded<EnvoyLbEndpoint> {
    Encoded::write(USUAL_LENGTH, |out| {
        out.nested(lb_endpoint::ENDPOINT, |out| {
            out.nested(endpoint::ADDRESS, |out| write_address(out, address, port));
        });
        out.nested(lb_endpoint::METADATA, |out| {
            write_metadata(out, features, Some(("tlsMode", MTLS)), |out| out.push_str(workload));
        });
    })
}

/// Writes an address, as [`constant::address`] builds it.
pub(super) fn write_address(out: &mut Writer<Address>, address: &str, port: u32) {
    if port == 0 || address.starts_with("unix://") {
        out.whole(&constant::address(address, port));
        return;
    }
    out.nested(address::SOCKET_ADDRESS, |out| {
        out.text(socket_address::ADDRESS, address);
        out.number(socket_address::PORT_VALUE, port);
    });
}

/// Writes the metadata of an endpoint: its transport socket, and its workload.
pub(super) fn write_metadata(
    out: &mut Writer<Metadata>,
    features: &Features,
    socket: Option<(&str, &str)>,
    workload: impl FnOnce(&mut String),
) {
    if let Some((key, value)) = socket {
        out.entry(metadata::FILTER_METADATA, SOCKET_METADATA, |out| {
            out.text_field(key, value);
        });
    }
    if features.pilot_enable_telemetry_label && features.pilot_endpoint_telemetry_label {
        scratch::with(&SCRATCH, |text| {
            workload(text);
            out.entry(metadata::FILTER_METADATA, ISTIO_METADATA, |out| {
                out.text_field("workload", text);
            });
        });
    }
}

/// Returns an address with a port.
pub(super) fn socket_address(address: &str, port: u32) -> String {
    if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    }
}
