//! `--registries=Mock`: a registry in memory. It is empty unless `--mockServices` adds the two services that the tests
//! of old releases had.
//!
//! Parity (pilot/pkg/proxy/envoy/mock/discovery.go of release 0.8): hosts, addresses, ports and versions.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;
use tokio::sync::{mpsc, watch};

use super::{Instance, Port, RegistryRows, Service};
use crate::{
    base::ClusterId,
    ingest::{
        diagnostics::Report,
        registry_metrics::OfRegistry,
        source::{Readiness, Source},
    },
    model::change::Batch,
};

/// The services with their second octet.
const SERVICES: [(&str, u8); 2] = [("hello", 1), ("world", 2)];
/// The ports: number, name and protocol.
const PORTS: [(u32, &str, &str); 5] = [
    (80, "http", "HTTP"),
    (81, "http-status", "HTTP"),
    (90, "custom", "TCP"),
    (100, "mongo", "Mongo"),
    (110, "redis", "Redis"),
];
/// Number of versions of each service, each with one instance.
const VERSIONS: u8 = 2;
/// The port of an instance is that of the service and this number.
const TARGET_OFFSET: u32 = 1000;

/// The source.
pub struct MockSource {
    rows: RegistryRows,
    has_services: bool,
    domain: SmolStr,
    is_synced: watch::Sender<bool>,
}

impl MockSource {
    /// Returns the registry, with or without services.
    pub fn new(cluster: ClusterId, has_services: bool, domain: SmolStr, metrics: OfRegistry, report: Report) -> Self {
        metrics.connected(true);
        Self {
            rows: RegistryRows::new(cluster, metrics, report),
            has_services,
            domain,
            is_synced: watch::Sender::new(false),
        }
    }
}

impl Source for MockSource {
    fn name(&self) -> &'static str {
        "mock registry"
    }

    fn readiness(&self) -> Readiness {
        Readiness::synced(&self.is_synced)
    }

    async fn run(mut self, changes: mpsc::Sender<Batch>) {
        if self.has_services {
            let batch = self.rows.replace(services(&self.domain));
            if changes.send(batch).await.is_err() {
                return;
            }
        }
        self.is_synced.send_replace(true);
        changes.closed().await;
    }
}

fn services(domain: &str) -> BTreeMap<SmolStr, Service> {
    let ports = PORTS.iter().map(|(number, name, protocol)| {
        let port = Port {
            name: (*name).to_owned(),
            protocol,
        };
        (*number, port)
    });
    let ports: BTreeMap<u32, Port> = ports.collect();
    let service = |(name, octet): &(&str, u8)| {
        let instances: BTreeSet<Instance> = (0..VERSIONS)
            .flat_map(|version| PORTS.iter().map(move |(number, ..)| (version, *number)))
            .map(|(version, port)| Instance {
                address: format!("10.{octet}.1.{version}"),
                port,
                target_port: port + TARGET_OFFSET,
                labels: [("version".to_owned(), format!("v{version}"))].into(),
                locality: "region/zone".to_owned(),
                ..Instance::default()
            })
            .collect();
        let service = Service {
            hostname: format!("{name}.default.svc.{domain}"),
            addresses: vec![format!("10.{octet}.0.0")],
            ports: ports.clone(),
            is_external: false,
            instances,
        };
        (SmolStr::new(name), service)
    };
    SERVICES.iter().map(service).collect()
}
