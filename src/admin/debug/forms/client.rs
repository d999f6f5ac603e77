//! Connected clients.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use smol_str::SmolStr;

use super::{moment, put, service};
use crate::{
    base::Labels,
    generate::{
        ProxyType, ResourceType,
        proxy_class::{ProxyClass, ProxyClassKey},
    },
    model::MeshSnapshot,
    xds::registry::{LiveConnection, TypeStatus},
};

/// Returns a client of `connections`.
pub(in crate::admin::debug) fn connection(connection: &LiveConnection) -> Value {
    json!({
        "connectionId": connection.id,
        "connectedAt": moment(connection.connected_at.into()),
        "address": connection.peer.map(|peer| peer.to_string()).unwrap_or_default(),
    })
}

/// Returns a page of clients with their number.
pub(in crate::admin::debug) fn clients(clients: Vec<Value>) -> Value {
    let mut page = json!({ "totalClients": clients.len() });
    if !clients.is_empty() {
        page["clients"] = Value::Array(clients);
    }
    page
}

/// The number of names that a page shows. Ten thousand clients with thousands of names each would take gigabytes.
const MAX_NAMES: usize = 1_000_000;

/// The number of names that a page may still show.
pub(in crate::admin::debug) struct NamesLeft(usize);

impl NamesLeft {
    /// Returns the number for a page about one client, or about all of them.
    pub(in crate::admin::debug) fn of_page(is_of_all: bool) -> Self {
        Self(if is_of_all { MAX_NAMES } else { usize::MAX })
    }

    /// Takes the names of a client. Returns false if they are too many.
    fn take(&mut self, names: usize) -> bool {
        let left = self.0.checked_sub(names);
        self.0 = left.unwrap_or(self.0);
        left.is_some()
    }
}

/// Returns a client of `adsz`, without the names that it watches if they are too many. Labels and locality are those of
/// the registry, once the client has a class.
pub(in crate::admin::debug) fn client(
    live: &LiveConnection,
    class: Option<&ProxyClass>,
    left: &mut NamesLeft,
) -> Value {
    let mut client = connection(live);
    let names = |status: &TypeStatus| status.names.iter().map(|name| json!(name)).collect::<Value>();
    let types = live.types();
    let is_shown = left.take(types.iter().map(|status| status.names.len()).sum());
    let watches = types.iter().filter(|_| is_shown);
    let watches: Map<String, Value> = watches
        .map(|status| (status.resource_type.url().to_owned(), names(status)))
        .collect();
    let labels = class.map_or_else(|| live.proxy.labels(), |class| (*class.labels).clone());
    client["locality"] = locality(&labels, &live.proxy.node_locality);
    if !labels.is_empty() {
        client["labels"] = json!(labels);
    }
    client["metadata"] = json!(live.proxy.metadata.values());
    if !watches.is_empty() {
        client["watches"] = Value::Object(watches);
    }
    client
}

/// Returns the locality of the topology labels, or else that of the node (`region/zone/subzone`).
fn locality(labels: &Labels, node: &str) -> Value {
    let topology = [
        "topology.kubernetes.io/region",
        "topology.kubernetes.io/zone",
        "topology.istio.io/subzone",
    ];
    let mut parts = topology.map(|label| labels.get(label).map(SmolStr::as_str).unwrap_or_default());
    if parts.iter().all(|part| part.is_empty()) {
        let mut of_node = node.splitn(3, '/');
        parts = parts.map(|_| of_node.next().unwrap_or_default());
    }
    let mut locality = Map::new();
    for (field, part) in ["region", "zone", "sub_zone"].into_iter().zip(parts) {
        put(&mut locality, field, part);
    }
    Value::Object(locality)
}

/// The service ports that each client serves, by the id of the proxy. They are written client by client: as one value,
/// those of ten thousand take six times the memory of their text.
pub(in crate::admin::debug) struct Instances<'a> {
    mesh: &'a MeshSnapshot,
    clients: BTreeMap<&'a str, Option<&'a ProxyClassKey>>,
}

impl<'a> Instances<'a> {
    /// Returns the page about clients with their classes, as far as they have one.
    pub(in crate::admin::debug) fn new(
        mesh: &'a MeshSnapshot,
        clients: impl IntoIterator<Item = (&'a LiveConnection, Option<&'a ProxyClassKey>)>,
    ) -> Self {
        let clients = clients.into_iter();
        Self {
            mesh,
            clients: clients.map(|(live, class)| (live.proxy.id.as_str(), class)).collect(),
        }
    }
}

impl Serialize for Instances<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let targets = |class: &ProxyClassKey| -> Vec<Value> {
            let targets = class.targets.iter();
            targets
                .filter_map(|target| service::target(self.mesh, target))
                .collect()
        };
        let clients = self.clients.iter();
        serializer.collect_map(clients.map(|(id, class)| (id, class.map(targets).unwrap_or_default())))
    }
}

/// Returns a row of `syncz` with nonces; empty ones are omitted.
pub(in crate::admin::debug) fn sync(live: &LiveConnection) -> Value {
    let proxy = &live.proxy;
    let types = live.types();
    let mut row = Map::new();
    put(&mut row, "cluster_id", &proxy.node.cluster);
    put(&mut row, "proxy", &proxy.id);
    put(&mut row, "proxy_type", proxy_type(proxy.node.proxy_type));
    put(&mut row, "istio_version", &proxy.node.version_text);
    let fields = [
        (ResourceType::Cluster, "cluster"),
        (ResourceType::Listener, "listener"),
        (ResourceType::Route, "route"),
        (ResourceType::Endpoint, "endpoint"),
        (ResourceType::Extension, "extensionconfig"),
    ];
    for (resource_type, field) in fields {
        if let Some(status) = types.iter().find(|status| status.resource_type == resource_type) {
            put(&mut row, &format!("{field}_sent"), &status.nonce_sent);
            put(&mut row, &format!("{field}_acked"), &status.nonce_acked);
        }
    }
    let resources = types.iter();
    let resources: Map<String, Value> = resources
        .map(|status| (status.resource_type.url().to_owned(), type_status(status)))
        .collect();
    if !resources.is_empty() {
        row.insert("resources".to_owned(), Value::Object(resources));
    }
    Value::Object(row)
}

fn proxy_type(proxy_type: ProxyType) -> &'static str {
    match proxy_type {
        ProxyType::Sidecar => "sidecar",
        ProxyType::Router => "router",
        ProxyType::Waypoint => "waypoint",
        ProxyType::Ztunnel => "ztunnel",
        ProxyType::Agentgateway => "agentgateway",
    }
}

fn type_status(status: &TypeStatus) -> Value {
    let mut entry = Map::new();
    put(&mut entry, "sent", &status.nonce_sent);
    put(&mut entry, "acked", &status.nonce_acked);
    if let Some(sent_at) = status.sent_at {
        entry.insert("sentTime".to_owned(), moment(sent_at.into()));
    }
    put(
        &mut entry,
        "lastError",
        status.last_error.as_deref().unwrap_or_default(),
    );
    Value::Object(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_all_clients_shows_a_limited_number_of_names() {
        let mut left = NamesLeft::of_page(true);
        assert!(left.take(MAX_NAMES - 1));
        assert!(!left.take(2));
        assert!(left.take(1) && left.take(0) && !left.take(1));
        assert!(NamesLeft::of_page(false).take(MAX_NAMES + 1));
    }
}
