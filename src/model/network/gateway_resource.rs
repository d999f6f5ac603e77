//! Network gateways declared by Gateway API Gateways with the network label.

use smol_str::SmolStr;

use super::{NetworkGateway, REMOTE_CLASS, template};
use crate::{
    api::{Config, gateway_api, label::NETWORK},
    base::{Labels, ObjectKey},
    model::Installation,
};

/// TLS option with the purpose of a listener.
const LISTENER_PROTOCOL: &str = "gateway.istio.io/listener-protocol";
/// Annotation with the service account of the gateway's pods.
const SERVICE_ACCOUNT: &str = "gateway.istio.io/service-account";

/// Emits the index key of a Gateway with the network label.
pub(in crate::model) fn labelled(_key: &ObjectKey, gateway: &Config<gateway_api::Gateway>, emit: &mut dyn FnMut(())) {
    if network(gateway).is_some() {
        emit(());
    }
}

fn network(gateway: &Config<gateway_api::Gateway>) -> Option<&SmolStr> {
    gateway.meta.labels.get(NETWORK).filter(|network| !network.is_empty())
}

/// Returns the gateways that a labelled Gateway declares: each of its addresses with each listener to its network. A
/// Gateway of the remote class counts only in the config cluster.
pub(super) fn offered(installation: &Installation, gateway: &Config<gateway_api::Gateway>) -> Vec<NetworkGateway> {
    let Some(network) = network(gateway) else {
        return Vec::new();
    };
    let remote = gateway.spec.gateway_class_name == REMOTE_CLASS;
    if remote && *gateway.meta.cluster() != installation.cluster {
        return Vec::new();
    }
    let of_listener = |listener: &gateway_api::gateway::Listener| {
        let port = u32::from(listener.port);
        let passthrough = is_passthrough(&gateway.meta.labels, listener).then_some((port, 0));
        let hbone = (listener.protocol == "HBONE").then_some((port, port));
        passthrough.into_iter().chain(hbone)
    };
    let ports: Vec<(u32, u32)> = gateway.spec.listeners.iter().flat_map(of_listener).collect();
    let service_account = SmolStr::new(format!("{}/{}", gateway.meta.namespace(), account(gateway)));
    // API servers set the default type; an address without one did not come from there.
    let usable = gateway.spec.addresses.iter().filter(|address| {
        matches!(address.address_type.as_deref(), Some("IPAddress" | "Hostname")) && !address.value.is_empty()
    });
    let gateways = usable.flat_map(|address| {
        ports.iter().map(|(port, hbone_port)| NetworkGateway {
            address: address.value.clone(),
            hbone_port: *hbone_port,
            cluster: gateway.meta.cluster().clone(),
            service_account: service_account.clone(),
            ..template(network, *port)
        })
    });
    gateways.collect()
}

/// Returns the service account of the gateway's pods: that of the annotation, or else the name of the deployment.
pub(in crate::model) fn account(gateway: &Config<gateway_api::Gateway>) -> SmolStr {
    let annotation = gateway.meta.annotations.get(SERVICE_ACCOUNT);
    match annotation.filter(|name| !name.is_empty()) {
        Some(name) => name.clone(),
        None if gateway.spec.gateway_class_name == REMOTE_CLASS => {
            SmolStr::new(format!("{}-{REMOTE_CLASS}", gateway.meta.name()))
        }
        None => gateway.meta.name().clone(),
    }
}

/// Returns true if a listener passes mTLS through to any service: by its option, or by the well-known port with TLS.
pub(in crate::model) fn is_passthrough(labels: &Labels, listener: &gateway_api::gateway::Listener) -> bool {
    let Some(tls) = &listener.tls else {
        return false;
    };
    if tls
        .options
        .get(LISTENER_PROTOCOL)
        .is_some_and(|value| value == "auto-passthrough")
    {
        return true;
    }
    let expected = labels.get(super::PORT_LABEL).map_or("15443", SmolStr::as_str);
    labels.contains_key(NETWORK) && listener.port.to_string() == expected
}
