//! Probes and lifecycle hooks of applications: the kubelet asks the proxy's agent, which asks the application, so that
//! mutual TLS does not refuse the kubelet.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::{InjectError, data, overrides, pod, request::Request};
use crate::{base::boolean, template::Value};

const REWRITE: &str = "sidecar.istio.io/rewriteAppHTTPProbers";
const STATUS_PORT: &str = "status.sidecar.istio.io/port";

/// The variable that tells the agent what to ask.
const VARIABLE: &str = "ISTIO_KUBE_APP_PROBERS";

/// A probe or hook: the path of its field in a container, the path in the agent, and the actions that the agent knows.
struct Place {
    field: &'static [&'static str],
    folder: &'static str,
    name: &'static str,
    actions: &'static [&'static str],
}

const PLACES: [Place; 5] = [
    probe(&["readinessProbe"], "readyz"),
    probe(&["livenessProbe"], "livez"),
    probe(&["startupProbe"], "startupz"),
    hook(&["lifecycle", "preStop"], "prestopz"),
    hook(&["lifecycle", "postStart"], "poststartz"),
];

const fn probe(field: &'static [&'static str], name: &'static str) -> Place {
    Place {
        field,
        folder: "app-health",
        name,
        actions: &["httpGet", "tcpSocket", "grpc"],
    }
}

const fn hook(field: &'static [&'static str], name: &'static str) -> Place {
    Place {
        field,
        folder: "app-lifecycle",
        name,
        actions: &["httpGet", "tcpSocket"],
    }
}

impl Place {
    fn url(&self, container: &Json) -> String {
        format!("/{}/{}/{}", self.folder, pod::name(container), self.name)
    }

    fn of<'a>(&self, container: &'a Json) -> Option<&'a Json> {
        self.field.iter().try_fold(container, |value, field| value.get(field))
    }

    fn of_mut<'a>(&self, container: &'a mut Json) -> Option<&'a mut Map<String, Json>> {
        let found = self
            .field
            .iter()
            .try_fold(container, |value, field| value.get_mut(field));
        found.and_then(Json::as_object_mut)
    }

    /// Returns the action of a probe that the agent can take over.
    fn action<'a>(&self, probe: &'a Json) -> Option<(&'static str, &'a Json)> {
        self.actions
            .iter()
            .find_map(|action| Some((*action, probe.get(action)?)))
    }
}

/// Redirects probes to the agent if the annotation or the values say so.
pub(super) fn rewrite(request: &Request<'_>, pod: &mut Json) -> Result<(), InjectError> {
    let by_annotation = pod::annotation(pod, REWRITE).and_then(boolean::parse);
    if !by_annotation.unwrap_or_else(|| request.config.values.rewrites_probes()) || pod::sidecar(pod).is_none() {
        return Ok(());
    }
    let status_port = pod::annotation(pod, STATUS_PORT).and_then(|port| port.trim().parse().ok());
    let status_port = status_port.unwrap_or_else(|| i64::from(request.mesh().status_port()));
    if status_port == 0 {
        // The agent answers no probes, and API servers refuse pods with a probe of port 0.
        return Ok(());
    }
    let probes = probes(pod, status_port);
    if !probes.is_empty() {
        set_agent_variable(pod, probes)?;
    }
    for field in [pod::CONTAINERS, pod::INIT_CONTAINERS] {
        if pod::list(pod, field).is_empty() {
            continue;
        }
        let containers = pod::list_mut(pod, field).iter_mut();
        for container in containers.filter(|container| pod::name(container) != pod::PROXY) {
            for place in &PLACES {
                redirect(place, container, status_port);
            }
        }
    }
    Ok(())
}

/// Returns what the agent has to ask, by its path.
fn probes(pod: &Json, status_port: i64) -> BTreeMap<String, Json> {
    let mut probes = BTreeMap::new();
    let lists = [pod::INIT_CONTAINERS, pod::CONTAINERS].into_iter();
    let containers = lists.flat_map(|field| pod::list(pod, field));
    for container in containers.filter(|container| pod::name(container) != pod::PROXY) {
        for place in &PLACES {
            let url = place.url(container);
            let Some(probe) = place.of(container) else { continue };
            let Some((name, action)) = place.action(probe) else {
                continue;
            };
            let Some(port) = resolved(container, action.get("port")) else {
                continue;
            };
            if port == status_port && pod::text(action, "path") == url {
                continue;
            }
            let mut action = action.clone();
            pod::object_mut(&mut action).insert("port".to_owned(), Json::from(port));
            let mut entry = Map::new();
            entry.insert(name.to_owned(), action);
            if let Some(timeout) = probe.get("timeoutSeconds") {
                entry.insert("timeoutSeconds".to_owned(), timeout.clone());
            }
            probes.insert(url, Json::Object(entry));
        }
    }
    probes
}

/// Returns the number of a port, which may be a name of the container or a number in quotes.
fn resolved(container: &Json, port: Option<&Json>) -> Option<i64> {
    let name = match port? {
        Json::Number(number) => return number.as_i64(),
        Json::String(name) => name,
        _ => return None,
    };
    let ports = container.get("ports").and_then(Json::as_array).into_iter().flatten();
    let mut named = ports.filter(|port| pod::text(port, "name") == name);
    let number = named.find_map(|port| port.get("containerPort")?.as_i64());
    number.or_else(|| name.parse().ok())
}

/// Writes the variable of the agent. What an earlier injection wrote there takes precedence: it has the original.
fn set_agent_variable(pod: &mut Json, mut probes: BTreeMap<String, Json>) -> Result<(), InjectError> {
    let was_injected = pod::annotation(pod, overrides::STATUS).is_some();
    let Some(sidecar) = pod::sidecar_mut(pod) else {
        return Ok(());
    };
    let variables = pod::items_mut(sidecar, "env");
    let earlier = variables.iter_mut().find(|variable| pod::name(variable) == VARIABLE);
    let Some(variable) = earlier.filter(|_| was_injected) else {
        let text = text(&probes)?;
        variables.push(json!({"name": VARIABLE, "value": text}));
        return Ok(());
    };
    if let Ok(Json::Object(earlier)) = serde_json::from_str(pod::text(variable, "value")) {
        probes.extend(earlier);
        *variable = json!({"name": VARIABLE, "value": text(&probes)?});
    }
    Ok(())
}

/// Returns the value of the variable, with the fields of each action in Go's order.
fn text(probes: &BTreeMap<String, Json>) -> Result<String, InjectError> {
    let mut members = Vec::new();
    for (url, probe) in probes {
        let go = |value: &Value| {
            data::go_json(value).map_err(|error| InjectError::Overrides {
                container: url.clone(),
                message: error.to_string(),
            })
        };
        let mut entries = Vec::new();
        for (action, type_name) in [
            ("httpGet", "HTTPGetAction"),
            ("tcpSocket", "TCPSocketAction"),
            ("grpc", "GRPCAction"),
        ] {
            if let Some(value) = probe.get(action) {
                entries.push(format!("{action:?}:{}", go(&data::kube_value(type_name, value))?));
            }
        }
        if let Some(timeout) = probe
            .get("timeoutSeconds")
            .filter(|timeout| timeout.as_i64() != Some(0))
        {
            entries.push(format!("\"timeoutSeconds\":{timeout}"));
        }
        members.push(format!("{}:{{{}}}", go(&url.as_str().into())?, entries.join(",")));
    }
    Ok(format!("{{{}}}", members.join(",")))
}

/// Makes a probe ask the agent. The agent uses HTTPS itself where the probe did.
fn redirect(place: &Place, container: &mut Json, status_port: i64) {
    let url = place.url(container);
    let Some(probe) = place.of(container) else { return };
    let Some((name, action)) = place.action(probe) else {
        return;
    };
    let mut action = match (name, action) {
        ("httpGet", Json::Object(action)) => action.clone(),
        _ => Map::new(),
    };
    action.insert("path".to_owned(), Json::String(url));
    action.insert("port".to_owned(), Json::from(status_port));
    if action.get("scheme").and_then(Json::as_str) == Some("HTTPS") {
        action.insert("scheme".to_owned(), Json::from("HTTP"));
    }
    if let Some(probe) = place.of_mut(container) {
        probe.remove(name);
        probe.insert("httpGet".to_owned(), Json::Object(action));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ports_are_resolved() {
        let container = json!({"ports": [{"name": "http", "containerPort": 80}]});
        assert_eq!(resolved(&container, Some(&json!("http"))), Some(80));
        assert_eq!(resolved(&container, Some(&json!("81"))), Some(81));
        assert_eq!(resolved(&container, Some(&json!("grpc"))), None);
        assert_eq!(resolved(&container, None), None);
    }
}
