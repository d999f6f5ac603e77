//! Allocates addresses to ServiceEntries: rows in, patches out. An address in a row is in use. The position in the
//! range advances, so that a freed address is not reused at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use serde_json::{Value, json};
use smol_str::SmolStr;

use crate::status::NamespacedName;

/// Attributes of a ServiceEntry.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Entry {
    /// Creation time, in seconds since 1970. Of two with the same address, the older keeps it.
    pub creation: i64,
    /// Resource version, to distinguish rows with a written patch from older ones.
    pub resource_version: SmolStr,
    /// True if it is valid, and so can be decided about.
    pub is_valid: bool,
    /// True if its namespace is selected. Addresses in other namespaces were written by others and stay.
    pub selected: bool,
    /// True if it needs addresses: it has none, its resolution uses them, and it did not opt out.
    pub needs_addresses: bool,
    /// Hosts that can have addresses, in declared order.
    pub hosts: Vec<SmolStr>,
    /// Single addresses that its owner declared; no other entry may get them.
    pub own: Vec<IpAddr>,
    /// Present status; `Null` without one.
    pub status: Value,
}

/// Patch of a ServiceEntry's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// ServiceEntry.
    pub key: NamespacedName,
    /// JSON patch operations; the first one tests that the status is still the one decided about.
    pub operations: Value,
    /// Reason, for the log.
    pub reason: &'static str,
    new: Vec<IpAddr>,
}

/// Addresses of one family.
#[derive(Clone, Debug)]
struct Range {
    net: IpNet,
    next: u128,
    /// True once no address was free for a host of the present plan, which frees none. Without it, each further host
    /// would look through the whole range.
    is_full: bool,
}

/// Allocated addresses, and the row they were allocated for.
#[derive(Clone, Debug)]
struct Pending {
    resource_version: SmolStr,
    status: Value,
    addresses: Vec<IpAddr>,
}

/// Allocator, see the module's documentation.
#[derive(Clone, Debug)]
pub struct Allocator {
    ranges: [Range; 2],
    /// Written patches that no row shows yet.
    pending: BTreeMap<NamespacedName, Pending>,
}

impl Entry {
    /// Returns the hosts with addresses in the status.
    fn assigned(&self) -> BTreeMap<SmolStr, Vec<IpAddr>> {
        let mut assigned = BTreeMap::<_, Vec<IpAddr>>::new();
        for address in self.status["addresses"].as_array().into_iter().flatten() {
            let value = address["value"].as_str().and_then(|text| text.parse::<IpAddr>().ok());
            if let Some(value) = value {
                let host = SmolStr::new(address["host"].as_str().unwrap_or_default());
                assigned.entry(host).or_default().push(value.to_canonical());
            }
        }
        assigned
    }

    fn has_addresses(&self) -> bool {
        self.status["addresses"].as_array().is_some_and(|list| !list.is_empty())
    }
}

impl Allocator {
    /// Returns an allocator of these ranges.
    pub fn new(ipv4: IpNet, ipv6: IpNet) -> Self {
        Self {
            ranges: [Range::new(ipv4), Range::new(ipv6)],
            pending: BTreeMap::new(),
        }
    }

    /// Returns the patches to write, given all ServiceEntries. The caller reports failures by [`Self::failed`]; success
    /// shows in the entry's next row.
    pub fn plan(&mut self, entries: &BTreeMap<NamespacedName, Entry>) -> Vec<Patch> {
        self.pending.retain(|key, pending| {
            let entry = entries.get(key);
            entry.is_some_and(|entry| {
                entry.resource_version == pending.resource_version && entry.status == pending.status
            })
        });
        let evicted = self.conflicts(entries);
        let mut used: BTreeSet<IpAddr> = self
            .pending
            .values()
            .flat_map(|pending| pending.addresses.clone())
            .collect();
        for entry in entries.values() {
            used.extend(entry.own.iter().map(IpAddr::to_canonical));
            used.extend(entry.assigned().into_values().flatten());
        }
        for range in &mut self.ranges {
            range.is_full = false;
        }
        let mut oldest_first: Vec<_> = entries.iter().collect();
        oldest_first.sort_by_key(|(key, entry)| (entry.creation, *key));
        let mut patches = Vec::new();
        for (key, entry) in oldest_first {
            if self.pending.contains_key(key) {
                continue;
            }
            let patch = self.patch(key, entry, evicted.contains(key), &mut used);
            if let Some(patch) = patch {
                let pending = Pending {
                    resource_version: entry.resource_version.clone(),
                    status: entry.status.clone(),
                    addresses: patch.new.clone(),
                };
                self.pending.insert(key.clone(), pending);
                patches.push(patch);
            }
        }
        patches
    }

    /// Reports a failed patch: its addresses are free again, and the next plan reconsiders the entry.
    pub fn failed(&mut self, patch: &Patch) {
        self.pending.remove(&patch.key);
        for address in &patch.new {
            if let Some(range) = self.ranges.iter_mut().find(|range| range.net.contains(address)) {
                range.next = range.next.min(number(*address));
            }
        }
    }

    /// Returns the entries with an address that another entry has a better claim to: one whose owner declared it, or an
    /// older one.
    fn conflicts<'a>(&self, entries: &'a BTreeMap<NamespacedName, Entry>) -> BTreeSet<&'a NamespacedName> {
        let mut claims = BTreeMap::<IpAddr, Vec<(bool, i64, &NamespacedName)>>::new();
        for (key, entry) in entries {
            for address in &entry.own {
                claims.entry(address.to_canonical()).or_default().push((false, 0, key));
            }
            let given: BTreeSet<IpAddr> = entry.assigned().into_values().flatten().collect();
            for address in given {
                claims.entry(address).or_default().push((true, entry.creation, key));
            }
        }
        let mut evicted = BTreeSet::new();
        let contested = claims.into_iter().filter(|(address, claims)| {
            claims.len() > 1 && self.ranges.iter().any(|range| range.net.contains(address))
        });
        for (_, mut claims) in contested {
            claims.sort_unstable();
            let losers = claims.into_iter().skip(1).filter(|(given, ..)| *given);
            evicted.extend(losers.map(|(.., key)| key));
        }
        evicted
    }

    fn patch(
        &mut self,
        key: &NamespacedName,
        entry: &Entry,
        evicted: bool,
        used: &mut BTreeSet<IpAddr>,
    ) -> Option<Patch> {
        if !entry.is_valid || !entry.selected {
            return None;
        }
        if !entry.needs_addresses {
            return entry.has_addresses().then(|| Patch {
                key: key.clone(),
                operations: operations(&entry.status, json!([])),
                reason: "the entry no longer needs addresses",
                new: Vec::new(),
            });
        }
        let mut assigned = entry.assigned();
        let hosts: BTreeSet<&SmolStr> = entry.hosts.iter().collect();
        if !evicted && hosts.iter().copied().eq(assigned.keys()) {
            return None;
        }
        if evicted {
            assigned.clear();
        }
        let (mut addresses, mut new, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
        for host in entry.hosts.iter().filter(|host| seen.insert(*host)) {
            let given = assigned.remove(host).unwrap_or_else(|| {
                let given: Vec<IpAddr> = self.ranges.iter_mut().filter_map(|range| range.take(used)).collect();
                new.extend(given.iter().copied());
                given
            });
            addresses.extend(
                given
                    .iter()
                    .map(|address| json!({"value": address.to_string(), "host": host})),
            );
        }
        Some(Patch {
            key: key.clone(),
            operations: operations(&entry.status, Value::Array(addresses)),
            reason: if evicted {
                "an address belongs to another ServiceEntry"
            } else {
                "hosts have no addresses"
            },
            new,
        })
    }
}

/// Returns operations that apply only while the status is this one.
fn operations(status: &Value, addresses: Value) -> Value {
    if status.is_null() {
        return json!([
            {"op": "test", "path": "/status", "value": null},
            {"op": "add", "path": "/status", "value": {"addresses": addresses}},
        ]);
    }
    json!([
        {"op": "test", "path": "/status/addresses", "value": status["addresses"]},
        {"op": "add", "path": "/status/addresses", "value": addresses},
    ])
}

impl Range {
    fn new(net: IpNet) -> Self {
        let net = net.trunc();
        Self {
            net,
            next: number(net.network()) + 1,
            is_full: false,
        }
    }

    /// Returns the next free address, wrapping around; `None` if all are in use.
    fn take(&mut self, used: &mut BTreeSet<IpAddr>) -> Option<IpAddr> {
        if self.is_full {
            return None;
        }
        let first = number(self.net.network()) + 1;
        let last = number(self.net.broadcast());
        // There are at most as many misses as used addresses.
        for _ in 0..=used.len() {
            if !(first..=last).contains(&self.next) {
                self.next = first;
            }
            let address = self.address(self.next);
            self.next += 1;
            if first <= last && used.insert(address) {
                return Some(address);
            }
        }
        self.is_full = true;
        None
    }

    fn address(&self, number: u128) -> IpAddr {
        match self.net {
            IpNet::V4(_) => Ipv4Addr::from(number as u32).into(),
            IpNet::V6(_) => Ipv6Addr::from(number).into(),
        }
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u32::from(address).into(),
        IpAddr::V6(address) => address.into(),
    }
}

#[cfg(test)]
mod tests;
