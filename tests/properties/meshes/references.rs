//! Every name that a resource refers to has an answer.

use std::collections::BTreeSet;

use serde_json::Value;

use super::check::{Received, Violations};

/// Clusters of the bootstrap, and the placeholder of code that the agent fetches.
const BOOTSTRAP: [&str; 6] = [
    "_",
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
}

impl Named {
    /// Collects the names in these objects and in the mesh config.
    pub(super) fn of<'a>(objects: impl Iterator<Item = &'a Value>) -> Named {
        let mut named = Named {
            hosts: BTreeSet::new(),
            credentials: BTreeSet::new(),
        };
        for object in objects {
            named.collect(object);
        }
        named
    }

    fn collect(&mut self, value: &Value) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
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
            if !received.has("eds", service) {
                violations.add("no-assignment", format!("cluster {name}: no load assignment {service}"));
            }
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
                if let Some(name) = text("routeConfigName")
                    && !self.received.has("rds", name)
                {
                    violations.add("no-route-configuration", format!("{place}: {name} has no answer"));
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
        if config.get("ads").is_some() && !self.received.has("sds", name) && !self.named.has_credential(name) {
            violations.add("no-secret", format!("{place}: secret {name} has no answer"));
        }
    }

    /// A cluster may be absent if an object of the user names its host: the host, its port or its subset may be
    /// unknown or invisible. Envoy then answers with 503 or closes the connection.
    fn cluster(&self, name: &str, place: &str, violations: &mut Violations) {
        if name.is_empty() || BOOTSTRAP.contains(&name) || self.received.has("cds", name) {
            return;
        }
        let mut parts = name.split('|').skip(1);
        let (port, subset, host) = (parts.next(), parts.next(), parts.next());
        let (Some(port), Some(subset), Some(host)) = (port, subset, host) else {
            violations.add("no-cluster", format!("{place}: cluster {name} is missing"));
            return;
        };
        let is_named = self.named.has_host(host);
        let is_known = subset.is_empty() && self.received.has("cds", &format!("outbound|{port}||{host}"));
        if !is_named || is_known {
            violations.add("no-cluster", format!("{place}: cluster {name} is missing"));
        }
    }
}
