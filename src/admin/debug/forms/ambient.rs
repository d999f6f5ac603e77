//! Workloads, services and policies for ztunnels.

use bytes::Bytes;
use serde_json::{Value, json};

use super::list_or_null;
use crate::{
    generate::authorization,
    model::MeshSnapshot,
    proto::{
        istio::workload::{GatewayAddress, NetworkAddress, Service, Workload, gateway_address::Destination},
        json::to_json,
    },
    table::Cx,
};

/// Returns what all ztunnels may request, by name.
///
/// Parity (pilot/pkg/xds/debug.go): the bytes of addresses are their texts.
pub(in crate::admin::debug) fn ambient(mesh: &MeshSnapshot) -> Value {
    let cx = Cx::untracked();
    let own = mesh.ambient_workloads.iter(&cx).map(|(_, workload)| workload);
    let own = own
        .filter(|workload| !workload.is_hidden)
        .map(|workload| workload.decoded());
    let remote = mesh
        .remote_workloads
        .iter(&cx)
        .flat_map(|(_, workloads)| workloads.iter());
    let remote = remote.map(|(_, workload)| workload.decoded());
    let services = mesh.ambient_services.iter(&cx).map(|(_, service)| service.sent());
    let mut services: Vec<Service> = services.collect();
    services.sort_by(|one, other| (&one.namespace, &one.hostname).cmp(&(&other.namespace, &other.hostname)));
    json!({
        "workloads": list_or_null(own.chain(remote).map(workload)),
        "services": list_or_null(services.into_iter().map(service)),
        "policies": list_or_null(authorization::all(mesh).iter().map(to_json)),
    })
}

fn workload(mut workload: Workload) -> Value {
    workload.addresses.iter_mut().for_each(as_text);
    workload.waypoint.iter_mut().for_each(gateway_as_text);
    workload.network_gateway.iter_mut().for_each(gateway_as_text);
    to_json(&workload)
}

fn service(mut service: Service) -> Value {
    service.addresses.iter_mut().for_each(address_as_text);
    service.waypoint.iter_mut().for_each(gateway_as_text);
    to_json(&service)
}

fn gateway_as_text(gateway: &mut GatewayAddress) {
    if let Some(Destination::Address(address)) = &mut gateway.destination {
        address_as_text(address);
    }
}

fn address_as_text(address: &mut NetworkAddress) {
    as_text(&mut address.address);
}

fn as_text(bytes: &mut Bytes) {
    if let Some(address) = crate::model::ambient::from_octets(bytes) {
        *bytes = address.to_string().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        generate::{address::tests::ambient as installation, fixture::APP},
        model::fixture,
    };

    #[test]
    fn addresses_are_texts() {
        let world = fixture::folder_world(installation(), &[("app.yaml", APP)]);
        let page = ambient(&world.snapshot());
        let texts = (&page["workloads"][0]["addresses"], &page["services"][0]["addresses"]);
        assert_eq!(
            texts,
            (&json!(["MTAuMS4wLjE="]), &json!([{ "address": "MTAuMC4wLjE=" }]))
        );
        assert_eq!(page["policies"], Value::Null);
        let empty = fixture::folder_world(installation(), &[]);
        let null = json!({ "workloads": null, "services": null, "policies": null });
        assert_eq!(ambient(&empty.snapshot()), null);
    }
}
