use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::*;
use crate::ingest::{fixture::commit, registry_metrics::RegistryMetrics};

fn rows() -> RegistryRows {
    let metrics = RegistryMetrics::new(&prometheus::Registry::new()).expect("new names");
    RegistryRows::new("Consul".into(), metrics.of("Consul"), Arc::new(|_: &Diagnostic| {}))
}

fn service(instances: &[(&str, u32)]) -> Service {
    let ports = instances.iter().map(|(_, port)| {
        let port_of = Port {
            name: "http".to_owned(),
            protocol: "HTTP",
        };
        (*port, port_of)
    });
    let instance = |(address, port): &(&str, u32)| Instance {
        address: (*address).to_owned(),
        port: *port,
        target_port: *port,
        ..Instance::default()
    };
    Service {
        hostname: "shop.service.consul".to_owned(),
        ports: ports.collect(),
        instances: instances.iter().map(instance).collect(),
        ..Service::default()
    }
}

fn summary(changes: &[Change]) -> Vec<String> {
    let text = |change: &Change| match change {
        Change::Upsert(row) => format!("+{}", row.key().name),
        Change::Remove(_, key) => format!("-{}", key.name),
        other => format!("{other:?}"),
    };
    changes.iter().map(text).collect()
}

#[test]
fn each_port_is_an_entry_with_its_own_instances() {
    let mut rows = rows();
    let name = SmolStr::new("shop");
    let changes = rows.set(&name, Some(service(&[("10.0.0.1", 80), ("10.0.0.2", 81)])));
    assert_eq!(summary(&changes), ["+shop", "+shop:81"]);
    let endpoints = |change: &Change| match change {
        Change::Upsert(Row::ServiceEntry(entry)) => {
            let addresses = entry.spec.endpoints.iter().map(|endpoint| endpoint.address.clone());
            (entry.spec.ports[0].name.clone(), addresses.collect::<Vec<_>>())
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(
        endpoints(&changes[0]),
        ("http-80".to_owned(), vec!["10.0.0.1".to_owned()])
    );
    assert_eq!(
        endpoints(&changes[1]),
        ("http-81".to_owned(), vec!["10.0.0.2".to_owned()])
    );
    assert!(
        rows.set(&name, Some(service(&[("10.0.0.1", 80), ("10.0.0.2", 81)])))
            .is_empty()
    );
    let changes = rows.set(&name, Some(service(&[("10.0.0.1", 80)])));
    assert_eq!(summary(&changes), ["-shop:81", "+shop"]);
    assert_eq!(summary(&rows.set(&name, None)), ["-shop"]);
}

#[test]
fn an_invalid_service_is_reported_and_others_stay() {
    let mut rows = rows();
    let invalid = Service {
        hostname: "not a host".to_owned(),
        ..service(&[("10.0.0.1", 80)])
    };
    let services = [("a", service(&[("10.0.0.1", 80)])), ("b", invalid)];
    let services = services
        .into_iter()
        .map(|(name, service)| (SmolStr::new(name), service))
        .collect();
    assert_eq!(summary(&rows.replace(services)), ["+a"]);
}

#[test]
fn an_invalid_address_leaves_out_only_its_instance() {
    let found = Arc::new(Mutex::new(Vec::new()));
    let report = found.clone();
    let metrics = RegistryMetrics::new(&prometheus::Registry::new()).expect("new names");
    let mut rows = RegistryRows::new(
        "Consul".into(),
        metrics.of("Consul"),
        Arc::new(move |diagnostic: &Diagnostic| report.lock().expect("no panic").push(diagnostic.to_string())),
    );
    let instances = [("10.0.0.1", 80), ("web_1", 80), ("10.0.0.2:80", 80), ("", 80)];
    let changes = rows.set(&"shop".into(), Some(service(&instances)));
    let [Change::Upsert(Row::ServiceEntry(entry))] = &changes[..] else {
        panic!("{changes:?}");
    };
    let addresses = entry.spec.endpoints.iter().map(|endpoint| endpoint.address.as_str());
    assert_eq!(addresses.collect::<Vec<_>>(), ["10.0.0.1"]);
    assert_eq!(entry.spec.resolution().as_str_name(), "STATIC");
    let found = found.lock().expect("no panic").join("\n");
    for address in ["\"web_1\"", "\"10.0.0.2:80\"", "\"\""] {
        let left_out = format!("the instance with address {address} and port 80 is left out");
        assert!(found.contains(&left_out), "{found}");
    }
    // Nothing connects to the instances of an external service.
    let external = Service {
        is_external: true,
        ..service(&instances)
    };
    assert_eq!(external.unusable().count(), 0);
}

#[test]
fn a_refused_port_keeps_its_last_entry() {
    let mut rows = rows();
    let name = SmolStr::new("shop");
    rows.set(&name, Some(service(&[("10.0.0.1", 80), ("10.0.0.1", 81)])));
    let mut refused = service(&[("10.0.0.1", 80), ("10.0.0.2", 81)]);
    let instances = std::mem::take(&mut refused.instances).into_iter();
    refused.instances = instances
        .map(|instance| Instance {
            target_port: if instance.port == 80 { 70_000 } else { 81 },
            ..instance
        })
        .collect();
    assert_eq!(summary(&rows.set(&name, Some(refused.clone()))), ["+shop:81"]);
    let mut all = BTreeMap::new();
    commit(&mut all, rows.all());
    assert_eq!(all.len(), 2, "the first port stays");
    let other = SmolStr::new("other");
    assert_eq!(
        summary(&rows.set(&other, Some(refused))),
        ["+other:81"],
        "the first port has no last entry"
    );
    assert_eq!(summary(&rows.set(&name, None)), ["-shop", "-shop:81"]);
}

#[test]
fn labels_that_are_no_labels_are_left_out() {
    let instance = Instance {
        address: "10.0.0.1".to_owned(),
        labels: [("version", "v1"), ("not a key", "x"), ("key", "not a value!")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        ..Instance::default()
    };
    assert_eq!(instance.endpoint("http")["labels"], json!({ "version": "v1" }));
    assert_eq!(instance.endpoint("http")["serviceAccount"], "");
}

#[test]
fn protocols_are_words_in_any_case() {
    assert_eq!(
        (protocol("HTTP"), protocol("gRPC-Web"), protocol("")),
        (Some("HTTP"), Some("GRPC-Web"), Some("TCP"))
    );
    assert_eq!(protocol("carrier-pigeon"), None);
    assert_eq!(
        (port_name("HTTP_2"), port_name("--"), port_name("")),
        ("http-2".into(), "tcp".into(), "tcp".into())
    );
}

/// A state of one of some services: its instances, by the end of the address and the port; `None` if it is gone.
fn state() -> impl Strategy<Value = (u8, Option<BTreeMap<u8, u32>>)> {
    let instances = proptest::collection::btree_map(1..6_u8, 80..83_u32, 0..4);
    (0..5_u8, proptest::option::weighted(0.8, instances))
}

proptest! {
    #[test]
    fn any_series_of_services_ends_as_its_last_state(
        states in proptest::collection::vec((state(), any::<bool>()), 1..30),
        order in 0..5_usize,
    ) {
        let named = |name: u8| SmolStr::from(format!("s{name}"));
        let (mut rows, mut model, mut last) = (rows(), BTreeMap::new(), BTreeMap::new());
        for ((name, instances), is_whole) in states {
            let state = instances.map(|instances| {
                let texts: Vec<(String, u32)> = instances
                    .into_iter()
                    .map(|(last, port)| (format!("10.0.0.{last}"), port))
                    .collect();
                let pairs: Vec<(&str, u32)> = texts.iter().map(|(address, port)| (address.as_str(), *port)).collect();
                Service { hostname: format!("{}.service.consul", named(name)), ..service(&pairs) }
            });
            match &state {
                Some(state) => last.insert(named(name), state.clone()),
                None => last.remove(&named(name)),
            };
            let changes = if is_whole { rows.replace(last.clone()) } else { rows.set(&named(name), state) };
            commit(&mut model, changes);
        }
        let (mut scratch, mut expected) = (self::rows(), BTreeMap::new());
        let mut services: Vec<_> = last.into_iter().collect();
        let rotation = order % services.len().max(1);
        services.rotate_left(rotation);
        for (name, service) in services {
            commit(&mut expected, scratch.set(&name, Some(service)));
        }
        prop_assert_eq!(&model, &expected);
        let mut all = BTreeMap::new();
        commit(&mut all, scratch.all());
        prop_assert_eq!(all, expected);
    }
}
