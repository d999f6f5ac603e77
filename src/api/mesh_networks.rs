//! MeshNetworks: the networks of endpoints, and the gateways of each network.

use std::net::IpAddr;

use serde_json::Value;

use super::{
    FieldError, ambiguous::remove_overridden, istio::Validation, mesh_config::field_error, unknown::unknown_fields,
};
use crate::{
    base::cidr,
    proto::{
        istio::mesh::v1alpha1::{
            MeshNetworks, Network,
            network::{IstioNetworkGateway, istio_network_gateway::Gw, network_endpoints::Ne},
        },
        json::{Unknown, from_json},
        message_descriptor,
    },
};

/// Networks with warnings about their file.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedMeshNetworks {
    /// The networks.
    pub networks: MeshNetworks,
    /// Fields that have no effect or are likely mistakes.
    pub warnings: Vec<FieldError>,
}

/// Parses a networks file. After an error the caller keeps its last valid networks.
pub fn parse(file: &Value) -> Result<ParsedMeshNetworks, Vec<FieldError>> {
    let mut validation = Validation::default();
    let descriptor =
        message_descriptor("istio.mesh.v1alpha1.MeshNetworks").expect("because the pool has every message of the API");
    for path in unknown_fields(&descriptor, file) {
        validation.warning(path, "is not a field of the networks and has no effect");
    }
    let mut file = file.clone();
    for path in remove_overridden(&descriptor, &mut file) {
        validation.warning(path, "has no effect, because another field that excludes it is set");
    }
    let networks: MeshNetworks = from_json(&file, Unknown::Ignore).map_err(|error| vec![field_error(error)])?;
    for (name, network) in &networks.networks {
        check(&format!("networks.{name}"), network, &mut validation);
    }
    if validation.errors.is_empty() {
        Ok(ParsedMeshNetworks {
            networks,
            warnings: validation.into_warnings(),
        })
    } else {
        Err(validation.errors)
    }
}

/// Checks a network.
///
/// Parity (pkg/config/validation/agent/validation.go, validateNetwork): what names nothing must not cost the rest.
fn check(path: &str, network: &Network, validation: &mut Validation) {
    for (position, endpoints) in network.endpoints.iter().enumerate() {
        let path = format!("{path}.endpoints[{position}]");
        match &endpoints.ne {
            Some(Ne::FromCidr(text)) if cidr::parse(text).is_none() && !cidr::is_ip_or_zoned(text) => {
                validation.error(format!("{path}.fromCidr"), format!("{text:?} is not an address range"));
            }
            Some(Ne::FromCidr(text)) if !text.contains('/') => {
                let message = "is an address without a length, so the network has no endpoints by it";
                validation.warning(format!("{path}.fromCidr"), message);
            }
            Some(Ne::FromRegistry(name)) if !is_registry_name(name) => {
                validation.error(
                    format!("{path}.fromRegistry"),
                    format!("{name:?} is not a registry name"),
                );
            }
            Some(_) => {}
            None => validation.warning(path, "has no effect without fromCidr or fromRegistry"),
        }
    }
    for (position, gateway) in network.gateways.iter().enumerate() {
        check_gateway(&format!("{path}.gateways[{position}]"), gateway, validation);
    }
}

fn check_gateway(path: &str, gateway: &IstioNetworkGateway, validation: &mut Validation) {
    match &gateway.gw {
        Some(Gw::RegistryServiceName(name)) if !super::names::is_fqdn(name) => {
            validation.error(
                format!("{path}.registryServiceName"),
                format!("{name:?} is not a host name"),
            );
        }
        Some(Gw::Address(address)) if address.parse::<IpAddr>().is_err() && !super::names::is_fqdn(address) => {
            validation.error(
                format!("{path}.address"),
                format!("{address:?} is neither an IP address nor a host name"),
            );
        }
        Some(_) => {}
        None => validation.warning(path, "has no effect without address or registryServiceName"),
    }
    if !(1..=65_535).contains(&gateway.port) {
        validation.error(
            format!("{path}.port"),
            format!("{} is not a port, want 1 to 65535", gateway.port),
        );
    }
}

/// Returns true for a nonempty name of letters, digits, `-`, `_` and `.`.
fn is_registry_name(name: &str) -> bool {
    !name.is_empty()
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn networks_are_parsed_and_validated() {
        let file = json!({"networks": {"n1": {"endpoints": [{"fromRegistry": "west_1"}, {"fromCidr": "10.0.0.0/8"}],
            "gateways": [{"address": "1.2.3.4", "port": 15443},
                {"registryServiceName": "gw.istio-system.svc.cluster.local", "port": 443}]}}});
        let parsed = parse(&file).unwrap();
        assert_eq!(
            (parsed.networks.networks["n1"].endpoints.len(), parsed.warnings.len()),
            (2, 0)
        );
        assert_eq!(parse(&Value::Null).unwrap().networks, MeshNetworks::default());
        let fields = |found: Vec<FieldError>| found.into_iter().map(|found| found.field).collect::<Vec<_>>();
        let errors = |network: Value| fields(parse(&json!({"networks": {"n": network}})).unwrap_err());
        assert_eq!(
            errors(json!({"endpoints": [{"fromCidr": "10.0.0"}, {"fromCidr": "10.0.0.0/33"}]})),
            ["networks.n.endpoints[0].fromCidr", "networks.n.endpoints[1].fromCidr"]
        );
        assert_eq!(
            errors(json!({"gateways": [{"address": "a b", "port": 0}]})),
            ["networks.n.gateways[0].address", "networks.n.gateways[0].port"]
        );
        assert_eq!(parse(&json!({"network": {}})).unwrap().warnings[0].field, "network");
        let both = json!([{"fromCidr": "10.0.0.0/8", "fromRegistry": "c"}]);
        let parsed = parse(&json!({"networks": {"n": {"endpoints": both}}})).expect("networks with warnings");
        let endpoints = &parsed.networks.networks["n"].endpoints;
        assert_eq!(endpoints[0].ne, Some(Ne::FromRegistry("c".to_owned())));
        assert_eq!(fields(parsed.warnings), ["networks.n.endpoints[0].fromCidr"]);
        let odd = json!({"n": {"endpoints": [{"fromCidr": "fe80::1%eth0"}, {}], "gateways": [{"port": 1}]},
            "other": {"endpoints": [{"fromCidr": "10.1.0.0/16"}]}});
        let parsed = parse(&json!({"networks": odd})).expect("networks with warnings");
        assert_eq!(parsed.networks.networks.len(), 2);
        assert_eq!(
            fields(parsed.warnings),
            [
                "networks.n.endpoints[0].fromCidr",
                "networks.n.endpoints[1]",
                "networks.n.gateways[0]"
            ]
        );
    }
}
