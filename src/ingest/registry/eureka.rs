//! Eureka: instances that are up, by its REST API.
//!
//! All instances are read once, and after that only their changes. Servers report a hash of the statuses of all
//! instances; if that of the own state differs after a change, all instances are read again.
//!
//! Parity (pilot/pkg/serviceregistry/eureka of release 0.8): a service for each host name, from instances with status
//! `UP`; ports, protocol and labels from the same fields. Note: a failed or malformed answer keeps the last state, and
//! a lone object where a list is expected, or a number as text, is understood.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use http::{HeaderMap, HeaderValue, header::ACCEPT};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use smol_str::SmolStr;
use tokio::sync::mpsc;
use url::Url;

use super::{
    Instance, Port, Service,
    poll::{Client, Failure, Poller},
    protocol,
};
use crate::{
    base::ClusterId,
    fetch::{ClientTls, ClientTlsError, Dialer, Endpoint, HttpClient, HttpError},
    ingest::{
        diagnostics::Report,
        registry_metrics::OfRegistry,
        source::{Readiness, Source},
    },
    model::change::Batch,
};

/// The path of the API where the address has none.
const DEFAULT_PATH: &str = "/eureka/v2";
/// The largest response.
const MAX_BYTES: usize = 128 << 20;
/// The limit of a request.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The status of instances that are served.
const UP: &str = "UP";
/// The key of metadata with the protocol.
const PROTOCOL: &str = "istio.protocol";
/// A key of metadata that the serializer of the server adds.
const CLASS: &str = "@class";

/// An invalid `--eurekaserverURL`.
#[derive(Debug, thiserror::Error)]
pub enum EurekaSettingsError {
    /// The address.
    #[error("--eurekaserverURL: {0:?} {1}; hint: want http://host:port or https://host:port, with the path of the API")]
    Address(String, String),
    /// Certificates.
    #[error("TLS with Eureka: {0}")]
    Tls(#[from] ClientTlsError),
}

/// The source.
pub struct EurekaSource {
    client: EurekaClient,
    poller: Poller,
}

impl EurekaSource {
    /// Returns the source of the server at an address.
    pub fn new(
        address: &str,
        interval: Duration,
        cluster: ClusterId,
        metrics: OfRegistry,
        report: Report,
    ) -> Result<Self, EurekaSettingsError> {
        let invalid = |why: &str| EurekaSettingsError::Address(address.to_owned(), why.to_owned());
        let url = Url::parse(address).map_err(|error| invalid(&error.to_string()))?;
        let (host, port) = (url.host_str().unwrap_or_default(), url.port_or_known_default());
        let (false, Some(port)) = (host.is_empty(), port) else {
            return Err(invalid("has no host"));
        };
        let tls = ClientTls {
            alpn: vec![b"http/1.1".to_vec()],
            ..ClientTls::default()
        };
        let tls = match url.scheme() {
            "http" => None,
            "https" => Some(("", tls.config()?)),
            _ => return Err(invalid("is neither http nor https")),
        };
        let dialer = Dialer::new(Endpoint::Host(host.to_owned(), port), tls).map_err(|why| invalid(&why))?;
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        let path = match url.path().trim_end_matches('/') {
            "" => DEFAULT_PATH,
            path => path,
        };
        Ok(Self {
            client: EurekaClient {
                http: HttpClient::new(dialer, headers, MAX_BYTES),
                path: path.to_owned(),
            },
            poller: Poller::new("Eureka", interval, cluster, metrics, report),
        })
    }
}

/// The client of the API.
struct EurekaClient {
    http: HttpClient,
    path: String,
}

impl EurekaClient {
    async fn get(&self, path: &str) -> Result<Applications, ReadError> {
        let (_, body) = self.http.get(&format!("{}{path}", self.path), TIMEOUT).await?;
        let parsed: Envelope =
            serde_json::from_slice(&body).map_err(|error| ReadError::Malformed(error.to_string()))?;
        Ok(parsed.applications)
    }

    /// Returns the present instances.
    async fn registered(&self, known: Option<&Registered>) -> Result<Registered, ReadError> {
        if let Some(known) = known {
            match self.get("/apps/delta").await {
                Ok(delta) => {
                    let mut next = known.clone();
                    let hash = delta.hash.clone();
                    next.apply(delta);
                    if next.hash() == hash {
                        return Ok(next);
                    }
                }
                // Servers may have disabled changes.
                Err(ReadError::Http(HttpError::Status(_))) => {}
                Err(error) => return Err(error),
            }
        }
        let mut registered = Registered::default();
        registered.apply(self.get("/apps").await?);
        Ok(registered)
    }
}

impl Client for EurekaClient {
    type State = Registered;

    fn read<'a>(&'a mut self, known: Option<&'a Registered>) -> BoxFuture<'a, Result<Registered, Failure>> {
        async move {
            let registered = self.registered(known).await;
            registered.map_err(|error| Failure {
                reason: error.label(),
                error: error.to_string(),
            })
        }
        .boxed()
    }

    fn services(&self, registered: &Registered) -> BTreeMap<SmolStr, Service> {
        registered.services()
    }
}

impl Source for EurekaSource {
    fn name(&self) -> &'static str {
        "eureka"
    }

    fn readiness(&self) -> Readiness {
        self.poller.readiness()
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        self.poller.run(self.client, changes).await;
    }
}

/// A failed request.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("malformed response: {0}")]
    Malformed(String),
}

impl ReadError {
    /// Returns the label of the error in metrics.
    fn label(&self) -> &'static str {
        match self {
            Self::Http(error) => error.label(),
            Self::Malformed(_) => "malformed",
        }
    }
}

/// A response.
#[derive(Deserialize)]
struct Envelope {
    applications: Applications,
}

#[derive(Deserialize)]
struct Applications {
    #[serde(rename = "apps__hashcode", default)]
    hash: String,
    #[serde(default, deserialize_with = "one_or_many")]
    application: Vec<Application>,
}

#[derive(Deserialize)]
struct Application {
    #[serde(default)]
    name: String,
    #[serde(default, deserialize_with = "one_or_many")]
    instance: Vec<Registration>,
}

/// An instance as it was registered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Registration {
    instance_id: String,
    host_name: String,
    ip_addr: String,
    status: String,
    #[serde(deserialize_with = "port")]
    port: Option<u32>,
    #[serde(deserialize_with = "port")]
    secure_port: Option<u32>,
    #[serde(deserialize_with = "metadata")]
    metadata: BTreeMap<String, String>,
    action_type: String,
}

/// Reads a list, or a lone item of one.
fn one_or_many<'de, D: Deserializer<'de>, T: for<'a> Deserialize<'a>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let items = match Value::deserialize(deserializer)? {
        Value::Null => Vec::new(),
        Value::Array(items) => items,
        item => vec![item],
    };
    let items = items
        .into_iter()
        .map(|item| serde_json::from_value(item).map_err(serde::de::Error::custom));
    items.collect()
}

/// Reads a port; `None` if it is disabled.
fn port<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let is_enabled = match &value["@enabled"] {
        Value::Bool(enabled) => *enabled,
        Value::String(text) => text == "true",
        _ => false,
    };
    if !is_enabled {
        return Ok(None);
    }
    let number = match &value["$"] {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    let number = number
        .and_then(|number| u32::try_from(number).ok())
        .filter(|number| (1..=65_535).contains(number));
    number
        .map(Some)
        .ok_or_else(|| serde::de::Error::custom(format!("{} is no port", value["$"])))
}

/// Reads metadata; values that are no text are ignored.
fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    let Value::Object(map) = Value::deserialize(deserializer)? else {
        return Ok(BTreeMap::new());
    };
    let texts = map
        .into_iter()
        .filter_map(|(key, value)| Some((key, value.as_str()?.to_owned())));
    Ok(texts.collect())
}

/// All registered instances by application and instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Registered(BTreeMap<(String, String), Registration>);

impl Registered {
    /// Applies instances: all of them, or their changes.
    fn apply(&mut self, applications: Applications) {
        for application in applications.application {
            for instance in application.instance {
                let id = match instance.instance_id.as_str() {
                    "" => &instance.host_name,
                    id => id,
                };
                let key = (application.name.clone(), id.to_owned());
                if instance.action_type == "DELETED" {
                    self.0.remove(&key);
                } else {
                    let instance = Registration {
                        action_type: String::new(),
                        ..instance
                    };
                    self.0.insert(key, instance);
                }
            }
        }
    }

    /// Returns the hash that servers report: the number of instances of each status.
    fn hash(&self) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for instance in self.0.values() {
            *counts.entry(&instance.status).or_default() += 1;
        }
        let mut hash = String::new();
        for (status, count) in counts {
            hash.push_str(status);
            hash.push('_');
            hash.push_str(&count.to_string());
            hash.push('_');
        }
        hash
    }

    fn services(&self) -> BTreeMap<SmolStr, Service> {
        let mut services: BTreeMap<SmolStr, Service> = BTreeMap::new();
        let up = self
            .0
            .values()
            .filter(|instance| instance.status == UP && !instance.host_name.is_empty());
        for registration in up {
            let ports: BTreeSet<u32> = [registration.port, registration.secure_port]
                .into_iter()
                .flatten()
                .collect();
            if ports.is_empty() {
                continue;
            }
            let word = registration.metadata.get(PROTOCOL).map_or("", String::as_str);
            let protocol = protocol(word).unwrap_or_else(|| {
                tracing::warn!(host = registration.host_name, word, "unknown protocol, using TCP");
                "TCP"
            });
            let labels = registration.metadata.iter();
            let labels = labels.filter(|(key, _)| !matches!(key.as_str(), PROTOCOL | CLASS));
            let labels: BTreeMap<String, String> = labels.map(|(key, value)| (key.clone(), value.clone())).collect();
            let service = services
                .entry(SmolStr::new(&registration.host_name))
                .or_insert_with(|| Service {
                    hostname: registration.host_name.clone(),
                    ..Service::default()
                });
            for number in ports {
                service.ports.entry(number).or_insert_with(|| Port {
                    name: number.to_string(),
                    protocol,
                });
                service.instances.insert(Instance {
                    address: registration.ip_addr.clone(),
                    port: number,
                    target_port: number,
                    labels: labels.clone(),
                    ..Instance::default()
                });
            }
        }
        services
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const APPS: &str = r#"{"applications": {"versions__delta": "1", "apps__hashcode": "DOWN_1_UP_1_", "application": [
        {"name": "SHOP", "instance": [
            {"instanceId": "a", "hostName": "shop.example.com", "ipAddr": "10.0.0.1", "status": "UP",
             "port": {"$": 8080, "@enabled": "true"}, "securePort": {"$": "8443", "@enabled": "true"},
             "metadata": {"@class": "java.util.Collections$EmptyMap", "istio.protocol": "http", "version": "v1"}},
            {"instanceId": "b", "hostName": "shop.example.com", "ipAddr": "10.0.0.2", "status": "DOWN",
             "port": {"$": 8080, "@enabled": "true"}, "securePort": {"$": 443, "@enabled": "false"}}]}]}}"#;
    const DELTA: &str = r#"{"applications": {"apps__hashcode": "UP_1_", "application": {"name": "SHOP", "instance": [
        {"instanceId": "a", "hostName": "shop.example.com", "ipAddr": "10.0.0.1", "status": "UP", "actionType": "DELETED"},
        {"instanceId": "b", "hostName": "shop.example.com", "ipAddr": "10.0.0.2", "status": "UP",
         "port": {"$": 8080, "@enabled": true}, "actionType": "MODIFIED"}]}}}"#;

    fn parsed(text: &str) -> Applications {
        serde_json::from_str::<Envelope>(text).expect("valid JSON").applications
    }

    #[test]
    fn instances_that_are_up_make_services() {
        let mut registered = Registered::default();
        registered.apply(parsed(APPS));
        assert_eq!(registered.hash(), "DOWN_1_UP_1_");
        let services = registered.services();
        let service = &services["shop.example.com"];
        let ports: Vec<(u32, &str, &str)> = service
            .ports
            .iter()
            .map(|(number, port)| (*number, port.name.as_str(), port.protocol))
            .collect();
        assert_eq!(ports, [(8080, "8080", "HTTP"), (8443, "8443", "HTTP")]);
        let instances: Vec<(&str, u32)> = service
            .instances
            .iter()
            .map(|instance| (instance.address.as_str(), instance.port))
            .collect();
        assert_eq!(instances, [("10.0.0.1", 8080), ("10.0.0.1", 8443)]);
        let labels = &service.instances.first().expect("an instance").labels;
        assert_eq!(labels, &[("version".to_owned(), "v1".to_owned())].into());
    }

    #[test]
    fn changes_lead_to_the_state_whose_hash_the_server_reports() {
        let mut registered = Registered::default();
        registered.apply(parsed(APPS));
        let delta = parsed(DELTA);
        let hash = delta.hash.clone();
        registered.apply(delta);
        assert_eq!(registered.hash(), hash);
        let services = registered.services();
        let addresses: Vec<&str> = services["shop.example.com"]
            .instances
            .iter()
            .map(|instance| instance.address.as_str())
            .collect();
        assert_eq!(addresses, ["10.0.0.2"]);
    }

    #[test]
    fn malformed_answers_are_errors() {
        for text in [
            "",
            "{",
            "[]",
            r#"{"applications": 1}"#,
            r#"{"applications": {"application": [{"instance": [{"port": {"$": 99999, "@enabled": "true"}}]}]}}"#,
            r#"{"applications": {"application": [{"instance": ["x"]}]}}"#,
        ] {
            assert!(serde_json::from_str::<Envelope>(text).is_err(), "{text}");
        }
    }
}
