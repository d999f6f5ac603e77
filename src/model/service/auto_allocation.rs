//! Computed addresses of ServiceEntry hosts without one, if the control plane does not allocate them in statuses
//! (`PILOT_ENABLE_IP_AUTOALLOCATE=false`). Slots follow from hashes and addresses from slots, so all replicas agree.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{ServiceKey, entry};
use crate::{model::MeshSnapshot, table::Cx};

/// Number of slots.
const SLOTS: u32 = 65_024;
/// Prime of the second hash.
const PRIME: u32 = 65_011;
/// The number of probes for all services together, beyond which services whose slot is taken get the first free one.
/// Usual names fill all slots with less than a million; names with chosen hashes would need billions.
const MAX_PROBES: u32 = 4_000_000;

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

/// The slots, and the services that have them.
struct Slots<'a> {
    by_number: Vec<Option<&'a ServiceKey>>,
    /// The number of probes that are left.
    probes: u32,
    /// No slot before this one is free.
    first_free: u32,
}

impl<'a> Slots<'a> {
    fn new() -> Self {
        Self {
            by_number: vec![None; SLOTS as usize],
            probes: MAX_PROBES,
            first_free: 0,
        }
    }

    /// Assigns a free slot to a service, if there is one.
    fn assign(&mut self, hash: u32, key: &'a ServiceKey) {
        if let Some(slot) = self.find(hash) {
            self.by_number[slot as usize] = Some(key);
        }
    }

    /// Returns the free slot of a hash; `None` if all are taken.
    fn find(&mut self, hash: u32) -> Option<u32> {
        let first = hash % SLOTS;
        if self.is_free(first) {
            return Some(first);
        }
        let step = PRIME - hash % PRIME;
        // Bounded, because the probes need not visit every slot.
        for i in 1..=SLOTS.min(self.probes) {
            self.probes -= 1;
            // Wraps like 32-bit hashes.
            let slot = hash.wrapping_add(i.wrapping_mul(step)) % (SLOTS - 1);
            if self.is_free(slot) {
                return Some(slot);
            }
        }
        // Slots are never returned.
        while self.first_free < SLOTS && !self.is_free(self.first_free) {
            self.first_free += 1;
        }
        (self.first_free < SLOTS).then_some(self.first_free)
    }

    fn is_free(&self, slot: u32) -> bool {
        self.by_number[slot as usize].is_none()
    }

    /// Returns the taken slots in order.
    fn taken(&self) -> impl Iterator<Item = (u32, &'a ServiceKey)> {
        (0_u32..)
            .zip(&self.by_number)
            .filter_map(|(slot, key)| Some((slot, (*key)?)))
    }
}

/// Assigns a slot to every declaration of a host; a host uses the address of its first slot.
fn allocate<'a>(wanting: impl IntoIterator<Item = &'a ServiceKey>) -> AutoAllocation {
    let mut slots = Slots::new();
    for key in wanting.into_iter().take(SLOTS as usize) {
        let hash = fnv1a(format!("{}/{}", key.namespace, key.hostname).as_bytes());
        slots.assign(hash, key);
    }
    let mut allocation = AutoAllocation::default();
    let (mut last_slot, mut x) = (None, 0);
    for (slot, key) in slots.taken() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Hostname, Namespace};

    #[test]
    fn equal_hashes_share_a_bounded_number_of_probes() {
        let key = ServiceKey {
            namespace: Namespace::new("default"),
            hostname: Hostname::new("a.example.com"),
        };
        let mut slots = Slots::new();
        let hash = fnv1a(b"default/a.example.com");
        slots.assign(hash, &key);
        assert_eq!((slots.probes, slots.taken().count()), (MAX_PROBES, 1));
        // Those of an ordinary mesh have the addresses that the probes give.
        let step = PRIME - hash % PRIME;
        assert_eq!(slots.find(hash), Some(hash.wrapping_add(step) % (SLOTS - 1)));
        for _ in 1..SLOTS {
            slots.assign(hash, &key);
        }
        assert_eq!((slots.probes, slots.taken().count()), (0, SLOTS as usize));
        assert_eq!(slots.find(hash), None);
    }

    #[test]
    fn ordinary_names_fill_all_slots_by_probes() {
        let keys: Vec<ServiceKey> = (0..SLOTS)
            .map(|number| ServiceKey {
                namespace: Namespace::new("default"),
                hostname: Hostname::new(format!("host-{number}.example.com")),
            })
            .collect();
        let mut slots = Slots::new();
        for key in &keys {
            slots.assign(fnv1a(format!("{}/{}", key.namespace, key.hostname).as_bytes()), key);
        }
        assert!(slots.probes > 0, "{}", slots.probes);
        assert_eq!(slots.taken().count(), SLOTS as usize);
    }
}
