//! Eureka: instances that are up, by its REST API.
//!
//! All instances are read once, and after that only their changes. Servers report a hash of the statuses of all
//! instances; if that of the own state differs after a change, all instances are read again. The hash only counts
//! instances, and servers keep changes for minutes. So all instances are also read after a failed request, and at an
//! interval.
//!
//! A server that was restarted knows no instance before that instance's next heartbeat. So an instance that is missing
//! after an outage stays until its lease would have ended.
//!
//! Parity (pilot/pkg/serviceregistry/eureka of release 0.8): a service for each host name, from instances with status
//! `UP`; ports, protocol and labels from the same fields. Note: unlike in that release, the names that clients of
//! Eureka use (`vipAddress` for the port, `secureVipAddress` for the secure port) are services, too; a failed or
//! malformed answer keeps the last state; and a lone object where a list is expected, or a number as text, is
//! understood.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use http::{
    HeaderMap, HeaderValue,
    header::{ACCEPT, AUTHORIZATION},
};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use smol_str::SmolStr;
use tokio::{sync::mpsc, time::Instant};
use url::Url;

use super::{
    Instance, Port, Service,
    poll::{Client, Failure, Poller},
    protocol,
};
use crate::{
    base::{ClusterId, url::without_credentials},
    fetch::{ClientTls, ClientTlsError, Dialer, Endpoint, HttpClient, HttpError, basic_authorization},
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
/// The longest time between two requests after which changes are read. A server keeps them for 3 minutes by default
/// (`eureka.server.retentionTimeInMSInDeltaQueue`), and may answer from a cache of 30 seconds.
const CHANGES_KEPT: Duration = Duration::from_mins(2);
/// The longest time for which only changes are read.
const COMPLETE_INTERVAL: Duration = Duration::from_mins(5);
/// The lease of instances that declare none. It is that of Eureka's clients.
const DEFAULT_LEASE: Duration = Duration::from_secs(90);
/// The longest time for which an instance stays that is missing after an outage.
const LONGEST_LEASE: Duration = Duration::from_mins(15);
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
        let invalid = |why: &str| EurekaSettingsError::Address(without_credentials(address), why.to_owned());
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
        let credentials = basic_authorization(&url).map_err(|error| invalid(&error.to_string()))?;
        if let Some(credentials) = credentials {
            headers.insert(AUTHORIZATION, credentials);
        }
        let path = match url.path().trim_end_matches('/') {
            "" => DEFAULT_PATH,
            path => path,
        };
        Ok(Self {
            client: EurekaClient {
                http: HttpClient::new(dialer, headers, MAX_BYTES),
                path: path.to_owned(),
                is_lost: false,
                last_answer: None,
                last_complete: None,
                leases: BTreeMap::new(),
            },
            poller: Poller::new("Eureka", interval, cluster, metrics, report),
        })
    }
}

/// The client of the API.
struct EurekaClient {
    http: HttpClient,
    path: String,
    /// True after a failed request.
    is_lost: bool,
    /// The time of the last successful request.
    last_answer: Option<Instant>,
    /// The time of the last request for all instances that succeeded.
    last_complete: Option<Instant>,
    /// The ends of the leases of instances that were missing after an outage.
    leases: BTreeMap<InstanceKey, Instant>,
}

impl EurekaClient {
    async fn get(&self, path: &str) -> Result<Applications, ReadError> {
        let (_, body) = self.http.get(&format!("{}{path}", self.path), TIMEOUT).await?;
        let parsed: Envelope =
            serde_json::from_slice(&body).map_err(|error| ReadError::Malformed(error.to_string()))?;
        Ok(parsed.applications)
    }

    /// Returns true if the changes that the server has kept lead from the known instances to the present ones.
    fn has_all_changes(&self, now: Instant) -> bool {
        let is_recent = |at: Option<Instant>, limit: Duration| at.is_some_and(|at| now.duration_since(at) < limit);
        !self.is_lost && is_recent(self.last_answer, CHANGES_KEPT) && is_recent(self.last_complete, COMPLETE_INTERVAL)
    }

    /// Returns the instances that the server knows.
    async fn registered(&mut self, known: Option<&Registered>, now: Instant) -> Result<Registered, ReadError> {
        if let Some(known) = known
            && self.has_all_changes(now)
        {
            match self.get("/apps/delta").await {
                Ok(delta) => {
                    let mut next = Registered {
                        instances: known.instances.clone(),
                        ..Registered::default()
                    };
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
        self.last_complete = Some(now);
        Ok(registered)
    }

    /// Adds instances that are missing after an outage, and whose leases have not ended. Before the first answer,
    /// nothing was known that could be missing.
    fn keep_leased(&mut self, registered: &mut Registered, known: Option<&Registered>, now: Instant) {
        let was_lost = std::mem::replace(&mut self.is_lost, false);
        let Some(known) = known else { return };
        for (key, instance) in &known.instances {
            if was_lost && !registered.instances.contains_key(key) {
                self.leases.insert(key.clone(), now + instance.lease_info.0);
            }
        }
        self.leases
            .retain(|key, end| *end > now && !registered.instances.contains_key(key));
        let held = self.leases.keys().filter_map(|key| {
            let instance = known.instances.get(key).or_else(|| known.leased.get(key))?;
            Some((key.clone(), instance.clone()))
        });
        registered.leased = held.collect();
    }
}

impl Client for EurekaClient {
    type State = Registered;

    fn read<'a>(&'a mut self, known: Option<&'a Registered>) -> BoxFuture<'a, Result<Registered, Failure>> {
        async move {
            let started = Instant::now();
            match self.registered(known, started).await {
                Ok(mut registered) => {
                    self.last_answer = Some(started);
                    self.keep_leased(&mut registered, known, Instant::now());
                    Ok(registered)
                }
                Err(error) => {
                    self.is_lost = true;
                    Err(Failure {
                        reason: error.label(),
                        error: error.to_string(),
                    })
                }
            }
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
    #[serde(deserialize_with = "or_empty")]
    vip_address: String,
    #[serde(deserialize_with = "or_empty")]
    secure_vip_address: String,
    #[serde(deserialize_with = "port")]
    port: Option<u32>,
    #[serde(deserialize_with = "port")]
    secure_port: Option<u32>,
    #[serde(deserialize_with = "metadata")]
    metadata: BTreeMap<String, String>,
    #[serde(deserialize_with = "lease")]
    lease_info: Lease,
    action_type: String,
}

impl Registration {
    /// Returns the hosts of an instance with their ports: its host name with both ports, and the names of each port.
    /// Such names are lists, in any case, and may have a port.
    fn hosts(&self) -> BTreeSet<(SmolStr, u32)> {
        let names = |list: &str| {
            let names = list
                .split(',')
                .map(|name| name.split(':').next().unwrap_or_default().trim());
            names.map(str::to_ascii_lowercase).collect::<Vec<_>>()
        };
        let mut hosts = BTreeSet::new();
        for (port, list) in [
            (self.port, &self.vip_address),
            (self.secure_port, &self.secure_vip_address),
        ] {
            let hosts_of_port = std::iter::once(self.host_name.clone()).chain(names(list));
            let named = hosts_of_port.filter(|host| !host.is_empty());
            hosts.extend(named.filter_map(|host| Some((SmolStr::from(host), port?))));
        }
        hosts
    }
}

/// The time for which an instance is registered without a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lease(Duration);

impl Default for Lease {
    fn default() -> Self {
        Self(DEFAULT_LEASE)
    }
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

/// Reads a text; `null` is empty.
fn or_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.unwrap_or_default())
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
        .ok_or_else(|| serde::de::Error::custom(format!("{} is not a port", value["$"])))
}

/// Reads a lease.
fn lease<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Lease, D::Error> {
    let seconds = match &Value::deserialize(deserializer)?["durationInSecs"] {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    let duration = seconds.map(|seconds| Duration::from_secs(seconds).min(LONGEST_LEASE));
    Ok(duration.map_or_else(Lease::default, Lease))
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

/// The names of an application and an instance.
type InstanceKey = (String, String);

/// The registered instances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Registered {
    /// Those that the server knows.
    instances: BTreeMap<InstanceKey, Registration>,
    /// Those that the server has not known since an outage, and whose leases have not ended.
    leased: BTreeMap<InstanceKey, Registration>,
}

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
                    self.instances.remove(&key);
                } else {
                    let instance = Registration {
                        action_type: String::new(),
                        ..instance
                    };
                    self.instances.insert(key, instance);
                }
            }
        }
    }

    /// Returns the hash that servers report: the number of instances of each status.
    fn hash(&self) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for instance in self.instances.values() {
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
        let registered = self.instances.values().chain(self.leased.values());
        for registration in registered.filter(|instance| instance.status == UP) {
            let hosts = registration.hosts();
            if hosts.is_empty() {
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
            for (host, number) in hosts {
                let service = services.entry(host.clone()).or_insert_with(|| Service {
                    hostname: host.to_string(),
                    ..Service::default()
                });
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
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;
    use crate::{api::Diagnostic, ingest::registry_metrics::RegistryMetrics};

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

    fn source(address: &str) -> Result<EurekaSource, EurekaSettingsError> {
        let metrics = RegistryMetrics::new(&prometheus::Registry::new()).expect("new names");
        let report = std::sync::Arc::new(|_: &Diagnostic| {});
        EurekaSource::new(
            address,
            Duration::from_secs(1),
            "Eureka".into(),
            metrics.of("Eureka"),
            report,
        )
    }

    fn client(address: &str) -> EurekaClient {
        source(address).expect("a valid address").client
    }

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
    fn names_that_clients_use_are_services_of_their_ports() {
        let mut registered = Registered::default();
        registered.apply(parsed(
            r#"{"applications": {"application": {"name": "SHOP", "instance": {"instanceId": "a",
            "hostName": "a.internal", "ipAddr": "10.0.0.1", "status": "UP", "vipAddress": "Shop,store:8080", "secureVipAddress": "shop",
            "port": {"$": 8080, "@enabled": "true"}, "securePort": {"$": 8443, "@enabled": "true"},
            "leaseInfo": null, "metadata": null}}}}"#,
        ));
        let services = registered.services();
        let ports: Vec<(&str, Vec<u32>)> = services
            .iter()
            .map(|(host, service)| (host.as_str(), service.ports.keys().copied().collect()))
            .collect();
        let both = vec![8080, 8443];
        assert_eq!(
            ports,
            [("a.internal", both.clone()), ("shop", both), ("store", vec![8080])]
        );
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
    fn instances_that_miss_after_an_outage_stay_until_their_leases_end() {
        let mut client = client("http://eureka:1");
        let mut known = Registered::default();
        known.apply(parsed(APPS));
        let now = Instant::now();
        let read = |client: &mut EurekaClient, known: &Registered, seconds: u64| {
            let mut registered = Registered::default();
            client.keep_leased(&mut registered, Some(known), now + Duration::from_secs(seconds));
            registered
        };
        assert!(read(&mut client, &known, 0).leased.is_empty(), "no outage");
        client.is_lost = true;
        let after = read(&mut client, &known, 0);
        assert_eq!(after.leased, known.instances);
        assert_eq!(after.services(), known.services());
        assert_eq!(after.hash(), "", "the hash is that of the server's instances");
        let later = read(&mut client, &after, 89);
        assert_eq!(later.leased, known.instances);
        assert!(read(&mut client, &later, 91).leased.is_empty());
    }

    #[test]
    fn failures_before_the_first_answer_are_no_outage() {
        let mut client = client("http://eureka:1");
        client.is_lost = true;
        let mut known = Registered::default();
        known.apply(parsed(APPS));
        client.keep_leased(&mut known, None, Instant::now());
        assert!(!client.is_lost);
        let mut registered = Registered::default();
        client.keep_leased(&mut registered, Some(&known), Instant::now());
        assert!(registered.leased.is_empty(), "the instances have left");
    }

    #[test]
    fn changes_are_read_only_while_the_server_keeps_them() {
        let mut client = client("http://eureka:1");
        let now = Instant::now();
        assert!(!client.has_all_changes(now), "nothing was read");
        let after = |seconds: u64| now + Duration::from_secs(seconds);
        client.last_complete = Some(now);
        client.last_answer = Some(now);
        assert!(client.has_all_changes(after(119)) && !client.has_all_changes(after(120)));
        client.last_answer = Some(after(200));
        assert!(client.has_all_changes(after(299)), "changes followed");
        assert!(
            !client.has_all_changes(after(300)),
            "all instances are read at an interval"
        );
        client.is_lost = true;
        assert!(!client.has_all_changes(after(201)), "a request failed");
    }

    #[tokio::test]
    async fn credentials_of_the_address_are_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a listening socket");
        let client = client(&format!("http://us%40er:secret@{address}/eureka"));
        let serve = async {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.expect("a request"));
            }
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{APPS}", APPS.len());
            stream.write_all(answer.as_bytes()).await.expect("an open connection");
            String::from_utf8_lossy(&head).into_owned()
        };
        let (answer, head) = tokio::join!(client.get("/apps"), serve);
        assert!(answer.is_ok());
        assert!(head.contains("authorization: Basic dXNAZXI6c2VjcmV0\r\n"), "{head}");
    }

    #[test]
    fn errors_do_not_show_credentials() {
        for address in [
            "ftp://user:secret@eureka",
            "http://user:secret@:1",
            "user:secret@eureka",
        ] {
            let Err(error) = source(address) else {
                panic!("{address} is invalid");
            };
            assert!(!error.to_string().contains("secret"), "{error}");
        }
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
