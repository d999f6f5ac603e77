//! MeshNetworks: the networks of endpoints, and the gateways of each network.

use serde_json::Value;

use super::{FieldError, istio::Validation, mesh_config::field_error, unknown::unknown_fields};
use crate::proto::{
    istio::mesh::v1alpha1::{
        MeshNetworks, Network,
        network::{IstioNetworkGateway, istio_network_gateway::Gw, network_endpoints::Ne},
    },
    json::{Unknown, from_json},
    message_descriptor,
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
    let networks: MeshNetworks = from_json(file, Unknown::Ignore).map_err(|error| vec![field_error(error)])?;
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

fn check(path: &str, network: &Network, validation: &mut Validation) {
    for (position, endpoints) in network.endpoints.iter().enumerate() {
        let path = format!("{path}.endpoints[{position}]");
        match &endpoints.ne {
            Some(Ne::FromCidr(text)) if text.parse::<ipnet::IpNet>().is_err() => {
                validation.error(format!("{path}.fromCidr"), format!("{text:?} is not an address range"));
            }
            Some(Ne::FromRegistry(name)) if !is_registry_name(name) => {
                validation.error(
                    format!("{path}.fromRegistry"),
                    format!("{name:?} is not a registry name"),
                );
            }
            Some(_) => {}
            None => validation.error(path, "needs fromCidr or fromRegistry"),
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
        Some(Gw::Address(address))
            if address.parse::<std::net::IpAddr>().is_err() && !super::names::is_fqdn(address) =>
        {
            validation.error(
                format!("{path}.address"),
                format!("{address:?} is neither an IP address nor a host name"),
            );
        }
        Some(_) => {}
        None => validation.error(path, "needs address or registryServiceName"),
    }
    if !(1..=65_535).contains(&gateway.port) {
        validation.error(
            format!("{path}.port"),
            format!("{} is not a port, want 1 to 65535", gateway.port),
        );
    }
}

/// True for a nonempty name of letters, digits, `-`, `_` and `.`.
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
        let warnings = |network: Value| {
            let errors = parse(&json!({"networks": {"n": network}})).unwrap_err();
            errors.into_iter().map(|error| error.field).collect::<Vec<_>>()
        };
        assert_eq!(
            warnings(json!({"endpoints": [{"fromCidr": "10.0.0.0"}, {}]})),
            ["networks.n.endpoints[0].fromCidr", "networks.n.endpoints[1]"]
        );
        assert_eq!(
            warnings(json!({"gateways": [{"address": "a b", "port": 0}, {"port": 1}]})),
            [
                "networks.n.gateways[0].address",
                "networks.n.gateways[0].port",
                "networks.n.gateways[1]"
            ]
        );
        assert_eq!(parse(&json!({"network": {}})).unwrap().warnings[0].field, "network");
    }
}
