//! Every name that a resource refers to has an answer.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::check::{Received, Violations};

/// Clusters of the bootstrap, the placeholder of code that the agent fetches, and names that never exist.
const BOOTSTRAP: [&str; 7] = [
    "_",
    // Backends of the Gateway API that are missing or not permitted.
    "UnknownService",
    "xds-grpc",
    "sds-grpc",
    "prometheus_stats",
    "agent",
    "envoy_accesslog_service",
];

/// Names that objects of users refer to, and that nothing may answer.
pub(super) struct Named {
    /// Hosts of destinations and ExternalName services, as written.
    hosts: BTreeSet<String>,
    /// Names of credentials.
    credentials: BTreeSet<String>,
    /// The properties that decide whether services of a host are merged, for each object that declares the host.
    declared: BTreeMap<String, BTreeSet<String>>,
}

impl Named {
    /// Collects the names in these objects and in the mesh config.
    pub(super) fn of<'a>(objects: impl Iterator<Item = &'a Value>) -> Named {
        let mut named = Named {
            hosts: BTreeSet::new(),
            credentials: BTreeSet::new(),
            declared: BTreeMap::new(),
        };
        for object in objects {
            named.collect(object);
            named.declare(object);
        }
        named
    }

    /// Records the hosts of a Service or ServiceEntry.
    fn declare(&mut self, object: &Value) {
        let (metadata, spec) = (&object["metadata"], &object["spec"]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (hosts, class) = match object["kind"].as_str() {
            Some("Service") => {
                let (name, namespace) = (text(&metadata["name"]), text(&metadata["namespace"]));
                (
                    vec![format!("{name}.{namespace}.svc.cluster.local")],
                    "Kubernetes".to_owned(),
                )
            }
            Some("ServiceEntry") => {
                let hosts = spec["hosts"].as_array().into_iter().flatten().map(text);
                let parts = [
                    &metadata["namespace"],
                    &metadata["labels"],
                    &spec["resolution"],
                    &spec["workloadSelector"],
                    &spec["exportTo"],
                ];
                (hosts.collect(), parts.map(Value::to_string).join(" "))
            }
            _ => return,
        };
        for host in hosts {
            self.declared.entry(host).or_default().insert(class.clone());
        }
    }

    /// Returns true if objects that are not merged declare this host. Parity (pilot/pkg/model/sidecar.go,
    /// `appendSidecarServices`): listeners and routes have the ports of each, clusters those of one.
    fn is_disputed(&self, host: &str) -> bool {
        self.declared.get(host).is_some_and(|classes| classes.len() > 1)
    }

    fn collect(&mut self, value: &Value) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    // References of the Gateway API have names instead of hosts.
                    let references = match key.as_str() {
                        "backendRefs" | "certificateRefs" => value.as_array().map(Vec::as_slice).unwrap_or_default(),
                        "backendRef" => std::slice::from_ref(value),
                        _ => &[],
                    };
                    for name in references.iter().filter_map(|reference| reference["name"].as_str()) {
                        self.hosts.insert(name.to_owned());
                        self.credentials.insert(name.to_owned());
                    }
                    match (key.as_str(), value.as_str()) {
                        ("host" | "externalName" | "service", Some(host)) => drop(self.hosts.insert(host.to_owned())),
                        ("credentialName", Some(name)) => drop(self.credentials.insert(name.to_owned())),
                        _ => self.collect(value),
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| self.collect(value)),
            _ => {}
        }
    }

    /// Returns true if an object names this host, perhaps in a short form.
    fn has_host(&self, host: &str) -> bool {
        let mut parts = host.split('.');
        let name = parts.next().unwrap_or_default();
        let namespace = parts.next().unwrap_or_default();
        let forms = [host, name, &format!("{name}.{namespace}")];
        forms.iter().any(|form| self.hosts.contains(*form))
    }

    fn has_credential(&self, secret: &str) -> bool {
        let name = secret.rsplit('/').next().unwrap_or_default();
        let name = name.strip_suffix("-cacert").unwrap_or(name);
        self.credentials
            .iter()
            .any(|credential| credential.rsplit('/').next() == Some(name))
    }
}

/// Checks the references of one proxy.
pub(super) fn check(received: &Received, named: &Named, violations: &mut Violations) {
    let check = Check { received, named };
    for (name, cluster) in received.all("cds") {
        if cluster["type"] == "EDS" {
            let service = cluster["edsClusterConfig"]["serviceName"].as_str().unwrap_or(name);
            violations.refer("no-assignment", received.has("eds", service), || {
                format!("cluster {name}: no load assignment {service}")
            });
        }
        check.visit(cluster, &format!("cluster {name}"), violations);
    }
    for (kind, title) in [
        ("lds", "listener"),
        ("rds", "route configuration"),
        ("ecds", "extension"),
    ] {
        for (name, resource) in received.all(kind) {
            check.visit(resource, &format!("{title} {name}"), violations);
        }
    }
}

struct Check<'a> {
    received: &'a Received,
    named: &'a Named,
}

impl Check<'_> {
    fn visit(&self, value: &Value, place: &str, violations: &mut Violations) {
        match value {
            Value::Object(map) => {
                let text = |key: &str| map.get(key).and_then(Value::as_str);
                if let Some(name) = text("routeConfigName") {
                    violations.refer("no-route-configuration", self.received.has("rds", name), || {
                        format!("{place}: {name} has no answer")
                    });
                }
                if map.contains_key("configDiscovery")
                    && let Some(name) = text("name")
                    && !self.received.has("ecds", name)
                {
                    violations.add("no-extension", format!("{place}: {name} has no answer"));
                }
                if let Some(config) = map.get("sdsConfig")
                    && let Some(name) = text("name")
                {
                    self.secret(name, config, place, violations);
                }
                for key in ["cluster", "clusterName"] {
                    if let Some(name) = text(key) {
                        self.cluster(name, place, violations);
                    }
                }
                let weighted = map
                    .get("weightedClusters")
                    .and_then(|weighted| weighted["clusters"].as_array());
                for name in weighted
                    .into_iter()
                    .flatten()
                    .filter_map(|cluster| cluster["name"].as_str())
                {
                    self.cluster(name, place, violations);
                }
                map.values().for_each(|value| self.visit(value, place, violations));
            }
            Value::Array(values) => values.iter().for_each(|value| self.visit(value, place, violations)),
            _ => {}
        }
    }

    /// Secrets over ADS are those of the control plane. A credential whose Secret is missing or not permitted has no
    /// answer.
    fn secret(&self, name: &str, config: &Value, place: &str, violations: &mut Violations) {
        // CA certificates that are missing block connections.
        if name == "invalid://" {
            return;
        }
        if config.get("ads").is_some() && !self.received.has("sds", name) && !self.named.has_credential(name) {
            violations.add("no-secret", format!("{place}: secret {name} has no answer"));
        }
    }

    /// A cluster may be absent if an object of the user names its host: the host, its port or its subset may be
    /// unknown or invisible. So may a port of a disputed host, and a subset without endpoints of a service that is
    /// resolved by DNS. Envoy then answers with 503 or closes the connection.
    fn cluster(&self, name: &str, place: &str, violations: &mut Violations) {
        if name.is_empty() || BOOTSTRAP.contains(&name) {
            return;
        }
        let may_be_absent = || ServiceCluster::parse(name).is_some_and(|cluster| self.may_be_absent(&cluster));
        violations.refer("no-cluster", self.received.has("cds", name) || may_be_absent(), || {
            format!("{place}: cluster {name} is missing")
        });
    }

    fn may_be_absent(&self, cluster: &ServiceCluster) -> bool {
        let of_port = ServiceCluster { subset: "", ..*cluster }.name();
        let mut of_port = self.received.all("cds").filter(|(name, _)| *name == of_port);
        let is_dns = |cluster: &Value| matches!(cluster["type"].as_str(), Some("STRICT_DNS" | "LOGICAL_DNS"));
        // Routes of the Gateway API without backends lead there.
        if cluster.host == "internal.cluster.local" {
            return true;
        }
        match of_port.next() {
            Some((_, service)) => self.named.has_host(cluster.host) || is_dns(service),
            None => self.named.has_host(cluster.host) || self.named.is_disputed(cluster.host),
        }
    }
}

/// The name of a cluster of a service port: the direction, the port, the subset and the host.
struct ServiceCluster<'a> {
    separator: &'a str,
    direction: &'a str,
    port: &'a str,
    subset: &'a str,
    host: &'a str,
}

impl<'a> ServiceCluster<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let separator = if name.starts_with("outbound_.") { "_." } else { "|" };
        let parts: Vec<&str> = name.splitn(4, separator).collect();
        let [direction, port, subset, host] = parts[..] else {
            return None;
        };
        Some(Self {
            separator,
            direction,
            port,
            subset,
            host,
        })
    }

    fn name(&self) -> String {
        [self.direction, self.port, self.subset, self.host].join(self.separator)
    }
}
