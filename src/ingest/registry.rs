//! Registries of services besides Kubernetes. Each one is a cluster of its own, whose services are ServiceEntries with
//! inline endpoints, so that the model knows no difference.
//!
//! A registry that is unreachable, or that answers nonsense, keeps its last state. So does a port of a service that the
//! model refuses. An instance with an invalid address is left out.

pub mod cloud_foundry;
pub mod consul;
pub mod eureka;
pub mod mock;
mod poll;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use smol_str::SmolStr;

use super::{
    defect,
    diagnostics::{ActiveDiagnostics, Report},
    registry_metrics::OfRegistry,
};
use crate::{
    api::{
        Diagnostic, FieldError, Kind, Row, Severity, diagnostics::INVALID, document, istio::common::is_label_pair,
        names::is_fqdn,
    },
    base::{ClusterId, ObjectKey, cidr::parse_ip},
    model::change::{Change, SourceId},
};

/// The namespace of all services.
///
/// Parity (pilot/pkg/serviceregistry/consul/conversion.go of release 1.7): registries have no namespaces.
const NAMESPACE: &str = "default";
/// The service account of instances that accept mutual TLS.
const ACCOUNT: &str = "default";
/// The label by which an instance declares that it accepts mutual TLS.
const TLS_MODE: &str = "security.istio.io/tlsMode";

/// A service of a registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Service {
    hostname: String,
    /// Virtual addresses.
    addresses: Vec<String>,
    /// Ports by number.
    ports: BTreeMap<u32, Port>,
    /// True if it is outside the mesh, and reached at the addresses that clients resolve.
    is_external: bool,
    instances: BTreeSet<Instance>,
}

/// A port of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Port {
    name: String,
    /// The protocol as a ServiceEntry names it.
    protocol: &'static str,
}

/// A healthy instance at one port of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Instance {
    address: String,
    /// The port of the service.
    port: u32,
    /// The port of the instance.
    target_port: u32,
    labels: BTreeMap<String, String>,
    locality: String,
    network: String,
    /// Weight; 0 for the default.
    weight: u32,
}

/// The protocols that registries name, in any case.
const PROTOCOLS: [(&str, &str); 14] = [
    ("tcp", "TCP"),
    ("udp", "UDP"),
    ("grpc", "GRPC"),
    ("grpc-web", "GRPC-Web"),
    ("http", "HTTP"),
    ("http_proxy", "HTTP_PROXY"),
    ("http2", "HTTP2"),
    ("https", "HTTPS"),
    ("tls", "TLS"),
    ("mongo", "Mongo"),
    ("redis", "Redis"),
    ("mysql", "MySQL"),
    ("thrift", "TCP"),
    ("", "TCP"),
];

/// Returns the protocol of a word; `None` for an unknown one, which counts as TCP.
fn protocol(word: &str) -> Option<&'static str> {
    let known = PROTOCOLS.iter().find(|(name, _)| word.eq_ignore_ascii_case(name));
    known.map(|(_, protocol)| *protocol)
}

/// Returns the name of a port: the word, in characters that names may have.
fn port_name(word: &str) -> String {
    let allowed = |character: char| {
        let lower = character.to_ascii_lowercase();
        if lower.is_ascii_alphanumeric() { lower } else { '-' }
    };
    let name: String = word.chars().take(40).map(allowed).collect();
    let name = name.trim_matches('-');
    if name.is_empty() {
        "tcp".to_owned()
    } else {
        name.to_owned()
    }
}

impl Service {
    /// Returns the instances that may be endpoints. One with an invalid address would make the whole entry invalid.
    fn usable(&self) -> impl Iterator<Item = &Instance> {
        self.instances.iter().filter(|instance| instance.has_valid_address())
    }

    /// Returns the instances that are left out of the endpoints.
    fn unusable(&self) -> impl Iterator<Item = &Instance> {
        let has_endpoints = !self.is_external;
        let instances = self.instances.iter();
        instances.filter(move |instance| has_endpoints && !instance.has_valid_address())
    }

    /// Returns the ServiceEntries: one for each port, since instances have different ports. The model merges entries of
    /// one host.
    fn manifests(&self, name: &str) -> Vec<Value> {
        let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
        for port in self.ports.values() {
            *uses.entry(&port.name).or_default() += 1;
        }
        let is_static = self.usable().all(|instance| parse_ip(&instance.address).is_some());
        let resolution = match (self.is_external, is_static) {
            (true, _) => "NONE",
            (false, true) => "STATIC",
            (false, false) => "DNS",
        };
        let location = if self.is_external {
            "MESH_EXTERNAL"
        } else {
            "MESH_INTERNAL"
        };
        let entries = self.ports.iter().enumerate().map(|(index, (number, port))| {
            let port_name = match uses.get(port.name.as_str()) {
                Some(1) => port.name.clone(),
                _ => format!("{}-{number}", port.name),
            };
            let name = if index == 0 {
                name.to_owned()
            } else {
                format!("{name}:{number}")
            };
            let served = self.usable().filter(|instance| instance.port == *number);
            let endpoints: Vec<Value> = if self.is_external {
                Vec::new()
            } else {
                served.map(|instance| instance.endpoint(&port_name)).collect()
            };
            json!({
                "metadata": { "name": name, "namespace": NAMESPACE },
                "spec": {
                    "hosts": [self.hostname],
                    "addresses": self.addresses,
                    "ports": [{ "number": number, "name": port_name, "protocol": port.protocol }],
                    "location": location,
                    "resolution": resolution,
                    "endpoints": endpoints,
                },
            })
        });
        entries.collect()
    }
}

impl Instance {
    fn has_valid_address(&self) -> bool {
        parse_ip(&self.address).is_some() || is_fqdn(&self.address)
    }

    fn endpoint(&self, port_name: &str) -> Value {
        let valid = self.labels.iter().filter(|(key, value)| is_label_pair(key, value));
        let labels: BTreeMap<&String, &String> = valid.collect();
        // Without a sidecar an instance has no identity. Clients use mutual TLS only where the label says so.
        let accepts_tls = self.labels.get(TLS_MODE).is_some_and(|mode| mode == "istio");
        json!({
            "address": self.address,
            "ports": { port_name: self.target_port },
            "labels": labels,
            "locality": self.locality,
            "network": self.network,
            "weight": self.weight,
            "serviceAccount": if accepts_tls { ACCOUNT } else { "" },
        })
    }
}

/// The services of a registry, as rows.
struct RegistryRows {
    cluster: ClusterId,
    rows: BTreeMap<SmolStr, Vec<Row>>,
    services: BTreeMap<SmolStr, Service>,
    findings: ActiveDiagnostics<SmolStr>,
    metrics: OfRegistry,
}

impl RegistryRows {
    /// Returns no services of the registry with this cluster.
    fn new(cluster: ClusterId, metrics: OfRegistry, report: Report) -> Self {
        Self {
            cluster,
            rows: BTreeMap::new(),
            services: BTreeMap::new(),
            findings: ActiveDiagnostics::new(report),
            metrics,
        }
    }

    /// Returns the changes that lead to exactly these services.
    fn replace(&mut self, services: BTreeMap<SmolStr, Service>) -> Vec<Change> {
        let known: BTreeSet<SmolStr> = self.services.keys().cloned().collect();
        let gone = known.into_iter().filter(|name| !services.contains_key(name));
        let gone: Vec<SmolStr> = gone.collect();
        let mut changes: Vec<Change> = gone.iter().flat_map(|name| self.set(name, None)).collect();
        for (name, service) in services {
            changes.extend(self.set(&name, Some(service)));
        }
        changes
    }

    /// Returns the changes that lead to this state of a service.
    fn set(&mut self, name: &SmolStr, service: Option<Service>) -> Vec<Change> {
        if self.services.get(name) == service.as_ref() {
            return Vec::new();
        }
        let unusable = service.iter().flat_map(Service::unusable);
        let mut found: BTreeSet<Diagnostic> = unusable.map(|instance| self.left_out(name, instance)).collect();
        if !found.is_empty() {
            self.metrics.failed("refused_instance", found.len());
        }
        let before = self.rows.remove(name).unwrap_or_default();
        let mut rows = Vec::new();
        for manifest in service.iter().flat_map(|service| service.manifests(name)) {
            let object = manifest["metadata"]["name"].as_str().unwrap_or_default();
            let key = ObjectKey::new(&self.cluster, NAMESPACE, object);
            let parse = || document::parse_object(&self.cluster, Kind::ServiceEntry, &manifest);
            let parsed = defect::parsed(Kind::ServiceEntry, &key, parse);
            if parsed.rows.is_empty() {
                self.metrics.failed("refused_service", 1);
                // A bad answer removes nothing: the last valid entry stays.
                let is_rejected = |row: &&Row| parsed.rejected.iter().any(|(_, key)| key == row.key());
                rows.extend(before.iter().filter(is_rejected).cloned());
            }
            rows.extend(parsed.rows);
            let errors = parsed.diagnostics.into_iter();
            found.extend(errors.filter(|found| found.severity == Severity::Error));
        }
        self.findings.set(name.clone(), found);
        let gone = before
            .iter()
            .filter(|old| rows.iter().all(|new| new.key() != old.key()));
        let mut changes: Vec<Change> = gone
            .map(|row| Change::Remove(Kind::ServiceEntry, row.key().clone()))
            .collect();
        let changed = rows.iter().filter(|row| !before.contains(row));
        changes.extend(changed.map(|row| Change::Upsert(row.clone())));
        match service {
            Some(service) => {
                self.services.insert(name.clone(), service);
                self.rows.insert(name.clone(), rows);
            }
            None => {
                self.services.remove(name);
            }
        }
        self.metrics.objects(self.services.len());
        changes
    }

    /// Returns the diagnostic of an instance that is left out.
    fn left_out(&self, service: &SmolStr, instance: &Instance) -> Diagnostic {
        let (address, port) = (&instance.address, instance.target_port);
        let finding = FieldError {
            field: "spec.endpoints".to_owned(),
            message: format!(
                "the instance with address {address:?} and port {port} is left out: the address is neither a host \
                 name nor an IP address"
            ),
        };
        let key = ObjectKey::new(&self.cluster, NAMESPACE, service.clone());
        Diagnostic::of_object(Kind::ServiceEntry, key, Severity::Error, INVALID, finding)
    }

    /// Returns all rows as one change.
    fn all(&self) -> Vec<Change> {
        let source = SourceId {
            cluster: self.cluster.clone(),
            kind: Kind::ServiceEntry,
        };
        vec![Change::Replace(source, self.rows.values().flatten().cloned().collect())]
    }
}

#[cfg(test)]
mod tests;
