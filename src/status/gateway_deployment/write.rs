//! Writes the objects of one Gateway.

use xxhash_rust::xxh3::xxh3_64;

use crate::{
    base::SmolStr,
    inject::gateway::{GatewayObject, MANAGED, ObjectKind},
    status::{NamespacedName, owned_object::Owner},
};

/// An object as it was applied or found equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Applied {
    /// Hash of what was to be applied.
    desired: u64,
    /// Fingerprint of the object after that.
    pub(super) live: u64,
}

/// The result of a round.
pub(super) struct Written {
    /// The objects that were applied or found equal.
    pub(super) applied: Vec<((ObjectKind, NamespacedName), Applied)>,
    /// Number of writes.
    pub(super) writes: u32,
    /// The reason why the round has ended early.
    pub(super) failure: Option<String>,
}

/// An object to compare and apply.
pub(super) struct Due {
    id: (ObjectKind, NamespacedName),
    /// Hash of the object.
    desired: u64,
    object: GatewayObject,
}

/// Returns the objects to compare and apply. `present` returns how an object was last applied, if it has not changed
/// since.
pub(super) fn due(
    gateway: &NamespacedName,
    objects: Vec<GatewayObject>,
    present: impl Fn(&(ObjectKind, NamespacedName)) -> Option<Applied>,
) -> Vec<Due> {
    let due = objects.into_iter().filter_map(|object| {
        let key = NamespacedName::new(gateway.namespace.clone(), object.name.as_str());
        let id = (object.kind, key);
        let desired = xxh3_64(object.value.to_string().as_bytes());
        let is_same = present(&id).is_some_and(|applied| applied.desired == desired);
        (!is_same).then_some(Due { id, desired, object })
    });
    due.collect()
}

/// Returns the owner of the objects of deployments.
pub(super) fn owner(client: &::kube::Client, manager: SmolStr) -> Owner {
    Owner {
        client: client.clone(),
        manager,
        label: MANAGED,
    }
}

/// Returns a round: it writes each object that differs, in order.
pub(super) fn round(
    owner: &Owner,
    gateway: NamespacedName,
    due: Vec<Due>,
) -> impl Future<Output = (NamespacedName, Written)> + Send + use<> {
    let owner = owner.clone();
    async move {
        let mut written = Written {
            applied: Vec::new(),
            writes: 0,
            failure: None,
        };
        for Due { id, desired, object } in due {
            match owner.ensure(&gateway.namespace, &object).await {
                Ok(Some((live, is_written))) => {
                    written.writes += u32::from(is_written);
                    written.applied.push((id, Applied { desired, live }));
                }
                Ok(None) => {}
                Err(error) => {
                    written.failure = Some(format!("{} {}: {error}", object.kind.name(), object.name));
                    return (gateway, written);
                }
            }
        }
        (gateway, written)
    }
}
