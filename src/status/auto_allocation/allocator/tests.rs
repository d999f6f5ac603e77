//! Addresses are allocated once, kept, and independent of the order of rows.

use proptest::prelude::*;

use super::*;

fn allocator(ipv4: &str) -> Allocator {
    let net = |text: &str| text.parse().expect("a range");
    Allocator::new(net(ipv4), net("2001:2::/48"))
}

fn key(name: &str) -> NamespacedName {
    NamespacedName::new("default", name)
}

fn entry(creation: i64, hosts: &[&str]) -> Entry {
    Entry {
        creation,
        resource_version: "1".into(),
        is_valid: true,
        selected: true,
        needs_addresses: true,
        hosts: hosts.iter().map(SmolStr::new).collect(),
        ..Entry::default()
    }
}

/// Applies a patch like the API server, if its test holds.
fn apply(entries: &mut BTreeMap<NamespacedName, Entry>, patch: &Patch) -> bool {
    let entry = entries.get_mut(&patch.key).expect("patches are for entries");
    let (test, add) = (&patch.operations[0], &patch.operations[1]);
    let at = |path: &Value| path == "/status";
    let current = if at(&test["path"]) {
        &entry.status
    } else {
        &entry.status["addresses"]
    };
    if *current != test["value"] {
        return false;
    }
    if at(&add["path"]) {
        entry.status = add["value"].clone();
    } else {
        entry.status["addresses"] = add["value"].clone();
    }
    let version: u64 = entry.resource_version.parse().expect("a number");
    entry.resource_version = (version + 1).to_string().into();
    true
}

fn allocate_all(allocator: &mut Allocator, entries: &mut BTreeMap<NamespacedName, Entry>) {
    for _ in 0..10 {
        let patches = allocator.plan(entries);
        if patches.is_empty() {
            return;
        }
        for patch in patches {
            assert!(apply(entries, &patch), "there is no other writer");
        }
    }
    panic!("the allocator never becomes idle");
}

#[test]
fn addresses_are_allocated_in_sequence_by_host() {
    let mut entries = BTreeMap::from([
        (key("a"), entry(1, &["a.com", "b.com"])),
        (key("b"), entry(0, &["c.com"])),
    ]);
    let patches = allocator("240.240.0.0/16").plan(&entries);
    assert_eq!(patches.len(), 2);
    assert_eq!(
        patches[0].operations,
        json!([
            {"op": "test", "path": "/status", "value": null},
            {"op": "add", "path": "/status", "value": {"addresses": [
                {"value": "240.240.0.1", "host": "c.com"},
                {"value": "2001:2::1", "host": "c.com"},
            ]}},
        ]),
        "the oldest comes first"
    );
    assert!(apply(&mut entries, &patches[1]));
    let given = &entries[&key("a")].status["addresses"];
    assert_eq!(given[2], json!({"value": "240.240.0.3", "host": "b.com"}));
    assert_eq!(given[3], json!({"value": "2001:2::3", "host": "b.com"}));
}

#[test]
fn pending_writes_are_not_repeated() {
    let mut allocator = allocator("240.240.0.0/16");
    let mut entries = BTreeMap::from([(key("a"), entry(1, &["a.com"]))]);
    let patches = allocator.plan(&entries);
    assert!(allocator.plan(&entries).is_empty());
    allocator.failed(&patches[0]);
    assert_eq!(allocator.plan(&entries), patches, "and again if it was not written");
    apply(&mut entries, &patches[0]);
    assert!(allocator.plan(&entries).is_empty());
}

#[test]
fn a_new_host_gets_an_address_and_old_ones_keep_theirs() {
    let mut allocator = allocator("240.240.0.0/16");
    let mut entries = BTreeMap::from([(key("a"), entry(1, &["a.com"]))]);
    allocate_all(&mut allocator, &mut entries);
    entries.get_mut(&key("a")).expect("the entry exists").hosts = vec!["b.com".into(), "a.com".into()];
    allocate_all(&mut allocator, &mut entries);
    let given = entries[&key("a")].status["addresses"].clone();
    assert_eq!(given[0], json!({"value": "240.240.0.2", "host": "b.com"}));
    assert_eq!(given[2], json!({"value": "240.240.0.1", "host": "a.com"}));
    let entry = entries.get_mut(&key("a")).expect("the entry exists");
    entry.needs_addresses = false;
    entry.status["conditions"] = json!([]);
    let patches = allocator.plan(&entries);
    assert_eq!(
        patches[0].operations,
        json!([
            {"op": "test", "path": "/status/addresses", "value": given},
            {"op": "add", "path": "/status/addresses", "value": []},
        ])
    );
}

#[test]
fn the_older_entry_keeps_a_contested_address() {
    let status = |text: &str, host: &str| json!({"addresses": [{"value": text, "host": host}]});
    let mut young = entry(5, &["young.com"]);
    young.status = status("240.240.0.1", "young.com");
    let mut old = entry(4, &["old.com"]);
    old.status = status("240.240.0.1", "old.com");
    let mut taken = entry(1, &["taken.com"]);
    taken.status = status("240.240.0.2", "taken.com");
    let mut owner = entry(9, &["owner.com"]);
    owner.needs_addresses = false;
    owner.own = vec!["240.240.0.2".parse().expect("an address")];
    let mut entries = BTreeMap::from([
        (key("a"), young),
        (key("b"), old.clone()),
        (key("c"), taken),
        (key("d"), owner),
    ]);
    allocate_all(&mut allocator("240.240.0.0/16"), &mut entries);
    assert_eq!(entries[&key("b")].status, old.status);
    assert_eq!(
        entries[&key("c")].status["addresses"][0]["value"],
        "240.240.0.3",
        "an owner's word counts most"
    );
    assert_eq!(entries[&key("a")].status["addresses"][0]["value"], "240.240.0.4");
}

#[test]
fn a_full_range_allocates_nothing() {
    let mut allocator = allocator("10.0.0.0/30");
    let mut entries = BTreeMap::from([(key("a"), entry(1, &["a", "b", "c", "d"]))]);
    allocate_all(&mut allocator, &mut entries);
    let given = entries[&key("a")].assigned();
    let count = |host: &str| given.get(host).map_or(0, Vec::len);
    assert_eq!(["a", "b", "c", "d"].map(count), [2, 2, 2, 1]);
    let mut entries = BTreeMap::from([(key("b"), entry(2, &["e"]))]);
    allocate_all(&mut allocator, &mut entries);
    assert_eq!(entries[&key("b")].assigned()["e"].len(), 2, "addresses are free again");
}

#[test]
fn r21_a_full_range_is_searched_once_in_a_plan() {
    let mut range = Range::new("10.0.0.0/30".parse().expect("a range"));
    let mut used = BTreeSet::new();
    assert_eq!(std::iter::from_fn(|| range.take(&mut used)).count(), 3);
    let position = range.next;
    assert_eq!(range.take(&mut used), None);
    assert_eq!(range.next, position, "the next host does not search");
}

#[derive(Clone, Debug)]
enum Event {
    Put(usize, Vec<usize>),
    Remove(usize),
    Refuse,
    Restart,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        6 => (0_usize..6, prop::collection::vec(0_usize..9, 0..4)).prop_map(|(name, hosts)| Event::Put(name, hosts)),
        2 => (0_usize..6).prop_map(Event::Remove),
        1 => Just(Event::Refuse),
        1 => Just(Event::Restart),
    ];
    prop::collection::vec(event, 1..40)
}

proptest! {
    /// In every history, no address has two owners, every host has two addresses, and entries keep theirs.
    #[test]
    fn addresses_are_unique_and_stay(events in events()) {
        let mut allocator = allocator("240.240.0.0/16");
        let mut entries = BTreeMap::new();
        for event in events {
            let before = entries.clone();
            match event {
                Event::Put(name, hosts) => {
                    let hosts: Vec<String> = hosts.iter().map(|host| format!("h{host}.com")).collect();
                    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
                    let new = entry(name as i64, &hosts);
                    let old: Option<Entry> = entries.remove(&key(&name.to_string()));
                    let version = old.as_ref().map_or(0, |old| old.resource_version.parse::<u64>().unwrap_or(0)) + 1;
                    let status = old.map_or(Value::Null, |old| old.status);
                    let resource_version = version.to_string().into();
                    let entry = Entry { resource_version, status, ..new };
                    entries.insert(key(&name.to_string()), entry);
                }
                Event::Remove(name) => {
                    entries.remove(&key(&name.to_string()));
                }
                Event::Refuse => {
                    for patch in allocator.plan(&entries) {
                        allocator.failed(&patch);
                    }
                }
                Event::Restart => allocator = self::allocator("240.240.0.0/16"),
            }
            allocate_all(&mut allocator, &mut entries);
            let mut seen = BTreeSet::new();
            for (key, entry) in &entries {
                let assigned = entry.assigned();
                let hosts: BTreeSet<&SmolStr> = entry.hosts.iter().collect();
                prop_assert!(hosts.iter().copied().eq(assigned.keys()));
                for (host, addresses) in assigned {
                    prop_assert_eq!(addresses.len(), 2);
                    prop_assert!(addresses.iter().all(|address| seen.insert(*address)), "given twice");
                    let old = before.get(key).and_then(|old| old.assigned().remove(&host));
                    prop_assert!(old.is_none_or(|old| old == addresses), "an address was taken away");
                }
            }
        }
    }

    /// Existing entries get the same addresses, whatever the order of arrival.
    #[test]
    fn the_first_plan_depends_on_age_only(mut ages in prop::collection::vec(0_i64..1000, 1..20)) {
        ages.sort_unstable();
        ages.dedup();
        let plan = |reverse: bool| {
            let mut entries = BTreeMap::new();
            for (index, age) in ages.iter().enumerate() {
                let name = if reverse { ages.len() - index } else { index };
                entries.insert(key(&format!("{name:03}")), entry(*age, &[&format!("h{age}.com")]));
            }
            let patches = allocator("240.240.0.0/16").plan(&entries);
            patches.into_iter().map(|patch| patch.operations).collect::<Vec<_>>()
        };
        prop_assert_eq!(plan(false), plan(true));
    }
}
