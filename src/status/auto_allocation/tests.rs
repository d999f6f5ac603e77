use serde_json::json;

use super::*;

fn service_entry(name: &str, resolution: &str, address: Option<&str>) -> Object {
    let addresses: Vec<_> = address
        .iter()
        .map(|value| json!({"value": value, "host": "a.example"}))
        .collect();
    let value = json!({
        "metadata": {"name": name, "namespace": "shop", "resourceVersion": "7", "labels": {"istio.io/rev": "other"}},
        "spec": {"hosts": ["a.example"], "resolution": resolution,
            "ports": [{"number": 80, "name": "http", "protocol": "HTTP"}]},
        "status": {"addresses": addresses},
    });
    Object::from_value(value).unwrap()
}

#[test]
fn addresses_of_other_writers_stay_and_are_reserved() {
    let mut entries = Entries::default();
    entries.apply_event(WatchEvent::Restarted(vec![
        entry_row(service_entry("ours", "DNS", None)),
        entry_row(service_entry("invalid", "NONSENSE", Some("240.240.0.1"))),
        entry_row(service_entry("left-out", "NONE", Some("240.240.0.2"))),
    ]));
    let left_out = entries
        .entries
        .get_mut(&NamespacedName::new("shop", "left-out"))
        .unwrap();
    left_out.selected = false;
    let mut allocator = Allocator::new("240.240.0.0/16".parse().unwrap(), "2001:2::/48".parse().unwrap());
    let patches = allocator.plan(&entries.entries);
    let [patch] = &patches[..] else { panic!("{patches:?}") };
    assert_eq!(patch.key.name, "ours", "whatever revision its label names");
    let addresses = &patch.operations[1]["value"];
    assert_eq!(addresses[0]["value"], "240.240.0.3", "{addresses}");
    entries.apply_event(WatchEvent::Deleted(entry_row(service_entry("ours", "DNS", None))));
    assert_eq!(entries.entries.len(), 2);
}

#[test]
fn entries_of_other_namespaces_get_no_addresses() {
    let plan = |only: &[&str]| {
        let mut entries = Entries {
            only: WatchedNamespaces::new(only.iter().map(SmolStr::new).collect()),
            ..Entries::default()
        };
        entries.apply_event(WatchEvent::Restarted(vec![entry_row(service_entry("a", "DNS", None))]));
        let mut allocator = Allocator::new("240.240.0.0/16".parse().unwrap(), "2001:2::/48".parse().unwrap());
        allocator.plan(&entries.entries).len()
    };
    let planned = [plan(&[]), plan(&["other", "shop"]), plan(&["other", "more"])];
    assert_eq!(planned, [1, 1, 0]);
}
