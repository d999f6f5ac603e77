//! Computed addresses of ServiceEntry hosts without one, if the control plane does not allocate them in statuses
//! (`PILOT_ENABLE_IP_AUTOALLOCATE=false`). Slots follow from hashes and addresses from slots, so all replicas agree.

use std::collections::{BTreeMap, btree_map::Entry};

use smol_str::SmolStr;

use super::{ServiceKey, entry};
use crate::{model::MeshSnapshot, table::Cx};

/// Number of slots.
const SLOTS: u32 = 65_024;
/// Prime of the second hash.
const PRIME: u32 = 65_011;

/// Addresses of one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutoAddresses {
    /// In 240.240.0.0/16.
    pub ipv4: SmolStr,
    /// In 2001:2::/48.
    pub ipv6: SmolStr,
}

/// Last two octets of every service with an address.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct AutoAllocation {
    octets: BTreeMap<ServiceKey, (u32, u32)>,
}

/// Derives the whole allocation; `None` if statuses have the addresses.
pub fn allocation(cx: &Cx, mesh: &MeshSnapshot, _key: &()) -> Option<AutoAllocation> {
    if mesh.installation.features.pilot_enable_ip_autoallocate {
        return None;
    }
    let mut wanting = Vec::new();
    for key in mesh.service_entries_by_host.keys(cx) {
        let entries = entry::entries(cx, mesh, key);
        let count = entries
            .iter()
            .filter(|row| entry::wants_address(&row.spec, &key.hostname))
            .count();
        wanting.extend(std::iter::repeat_n(key, count));
    }
    Some(allocate(wanting))
}

/// Derives the addresses of one service.
pub fn addresses(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<AutoAddresses> {
    let (third, fourth) = *mesh.auto_allocation.get(cx, &())?.octets.get(key)?;
    let ipv6 = if third == 0 {
        format!("2001:2::f0f0:{fourth:x}")
    } else {
        format!("2001:2::f0f0:{third:x}{fourth:x}")
    };
    Some(AutoAddresses {
        ipv4: SmolStr::from(format!("240.240.{third}.{fourth}")),
        ipv6: SmolStr::from(ipv6),
    })
}

/// Assigns a slot to every declaration of a host; a host uses the address of its first slot.
fn allocate<'a>(wanting: impl IntoIterator<Item = &'a ServiceKey>) -> AutoAllocation {
    let mut slots: BTreeMap<u32, &ServiceKey> = BTreeMap::new();
    for key in wanting.into_iter().take(SLOTS as usize) {
        let hash = fnv1a(format!("{}/{}", key.namespace, key.hostname).as_bytes());
        match slots.entry(hash % SLOTS) {
            Entry::Vacant(slot) => {
                slot.insert(key);
            }
            Entry::Occupied(_) => {
                let step = PRIME - hash % PRIME;
                // Wraps like 32-bit hashes. Bounded, because the probes need not visit every slot.
                let probes = (1..=SLOTS).map(|i| hash.wrapping_add(i.wrapping_mul(step)) % (SLOTS - 1));
                let free = probes.into_iter().find(|slot| !slots.contains_key(slot));
                if let Some(free) = free.or_else(|| (0..SLOTS).find(|slot| !slots.contains_key(slot))) {
                    slots.insert(free, key);
                }
            }
        }
    }
    let mut allocation = AutoAllocation::default();
    let (mut last_slot, mut x) = (None, 0);
    for (slot, key) in slots {
        x += slot - last_slot.unwrap_or(0) + u32::from(last_slot.is_none());
        last_slot = Some(slot);
        // No address ends in .0; every later one moves on by one.
        if x % 255 == 0 {
            x += 1;
        }
        allocation.octets.entry(key.clone()).or_insert((x / 255, x % 255));
    }
    allocation
}

fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}
