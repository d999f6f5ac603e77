//! What proxies of a small mesh are sent, through the store as when serving; for tests.

use std::sync::Arc;

use serde_json::Value;

use super::{
    Demand, Proxy, ResourceSnapshot, ResourceType,
    store::{MemberId, Membership, Serial, Store},
};
use crate::{
    base::Shared,
    model::{fixture, installation::Installation},
    proto::json,
    table::ChangeSet,
};

/// A store that serves the proxies of a mesh folder. They are members 0, 1, and so on.
pub(crate) fn store(installation: Installation, files: &[(&str, &str)], proxies: Vec<Proxy>) -> Store {
    store_on_demand(installation, files, proxies, &Demand::default())
}

/// The same; each of the proxies asks for these names.
pub(crate) fn store_on_demand(
    installation: Installation,
    files: &[(&str, &str)],
    proxies: Vec<Proxy>,
    demand: &Demand,
) -> Store {
    let demand = Shared::new(demand.clone());
    let demanded = (0..proxies.len()).map(|index| (MemberId(index as u64), demand.clone()));
    let demanded = demanded.collect();
    let world = fixture::folder_world(installation, files);
    let mut store = Store::default();
    let joined = proxies.into_iter().enumerate();
    let membership = Membership {
        joined: joined
            .map(|(index, proxy)| (MemberId(index as u64), Arc::new(proxy)))
            .collect(),
        demanded,
        ..Membership::default()
    };
    let update = store.update(&world.snapshot(), &ChangeSet::default(), membership, &Serial);
    assert!(update.panics.is_empty(), "{:?}", update.panics);
    store
}

/// A resource of a client as JSON; null if there is none.
pub(crate) fn resource(store: &Store, client: u64, resource_type: ResourceType, name: &str) -> Value {
    let resource = snapshot(store, client).view(resource_type).get(name);
    resource.map_or(Value::Null, |resource| json::any_to_json(&resource.any()))
}

/// The names of a client's resources, in order.
pub(crate) fn names(store: &Store, client: u64, resource_type: ResourceType) -> Vec<String> {
    let all = snapshot(store, client).view(resource_type).iter();
    all.map(|resource| resource.name.to_string()).collect()
}

fn snapshot(store: &Store, client: u64) -> &ResourceSnapshot {
    let group = store.group_of(MemberId(client)).expect("the client has a group");
    store.snapshot(group).expect("the group has a snapshot")
}
