//! Load-balancing endpoints as they are encoded, by locality.

use std::cell::Cell;

use crate::{
    base::{Labels, NetworkId, Shared, scratch},
    generate::{
        constant::{self, ISTIO_METADATA},
        wire::{Encoded, Writer},
    },
    model::{features::Features, workload::MUTUAL_TLS},
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

/// Scales weights down if their sum does not fit in 32 bits: with a consistent hash, Envoy refuses such endpoints, and
/// with them those of other clusters in the response.
pub(super) fn limit_weights(groups: &mut [LocalityEndpoints]) {
    let most = u64::from(u32::MAX);
    // The sums of groups are cut off at this number.
    let sums = groups.iter().filter_map(|group| group.weight);
    if sums.map(u64::from).sum::<u64>() < most {
        return;
    }
    let members = groups.iter().flat_map(|group| &group.endpoints);
    let total: u64 = members.map(|member| u64::from(member.weight)).sum();
    if total <= most {
        return;
    }
    // Half of the range leaves room for weights that become 1.
    let divisor = u32::try_from(total.div_ceil(most / 2)).unwrap_or(u32::MAX);
    for group in groups {
        for member in &mut group.endpoints {
            member.weight = (member.weight / divisor).max(1);
        }
        group.refresh_weight();
    }
}

/// Writes an endpoint known by address only and reached by mutual TLS (a network gateway).
pub(super) fn peer(features: &Features, address: &str, port: u32, workload: &str) -> Encoded<EnvoyLbEndpoint> {
    Encoded::write(USUAL_LENGTH, |out| {
        out.nested(lb_endpoint::ENDPOINT, |out| {
            out.nested(endpoint::ADDRESS, |out| write_address(out, address, port));
        });
        out.nested(lb_endpoint::METADATA, |out| {
            write_metadata(out, features, Some(("tlsMode", MUTUAL_TLS)), |out| {
                out.push_str(workload);
            });
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

#[cfg(test)]
mod tests {
    use super::*;

    fn limited(groups: &[&[u32]]) -> (Vec<Vec<u32>>, Vec<Option<u32>>) {
        let member = |weight: &u32| LbEndpoint {
            encoded: Encoded::empty(),
            weight: *weight,
            labels: Shared::default(),
            mtls: false,
            network: NetworkId::default(),
            cluster: crate::base::ClusterId::default(),
            has_address: true,
        };
        let group = |weights: &&[u32]| {
            let mut group = LocalityEndpoints {
                locality: "r".into(),
                endpoints: weights.iter().map(member).collect(),
                weight: None,
                priority: 0,
            };
            group.refresh_weight();
            group
        };
        let mut groups: Vec<LocalityEndpoints> = groups.iter().map(group).collect();
        limit_weights(&mut groups);
        let weights = |group: &LocalityEndpoints| group.endpoints.iter().map(|member| member.weight).collect();
        let sums = groups.iter().map(|group| group.weight).collect();
        (groups.iter().map(weights).collect(), sums)
    }

    #[test]
    fn the_sum_of_weights_fits_in_32_bits() {
        let usual: &[&[u32]] = &[&[1, u32::MAX - 3], &[2]];
        let kept = (vec![vec![1, u32::MAX - 3], vec![2]], vec![Some(u32::MAX - 2), Some(2)]);
        assert_eq!(limited(usual), kept);
        for groups in [
            &[&[u32::MAX, u32::MAX][..], &[1]][..],
            &[&[u32::MAX][..], &[u32::MAX, 1]],
        ] {
            let (weights, sums) = limited(groups);
            let total: u64 = sums.into_iter().flatten().map(u64::from).sum();
            assert!(u32::try_from(total).is_ok(), "{total}");
            let all = weights.concat();
            assert_eq!(all[0], all[1], "equal weights stay equal: {all:?}");
            assert_eq!(all[2], 1);
        }
    }
}
