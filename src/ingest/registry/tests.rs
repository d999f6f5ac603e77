use std::sync::Arc;

use super::*;
use crate::{api::Diagnostic, ingest::registry_metrics::RegistryMetrics};

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
