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

mod api;

use std::{collections::BTreeMap, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use http::{
    HeaderMap, HeaderValue,
    header::{ACCEPT, AUTHORIZATION},
};
use smol_str::SmolStr;
use tokio::{sync::mpsc, time::Instant};
use url::Url;

use self::api::{Applications, Envelope, Registration};
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
        let dialer = Dialer::new(Endpoint::Host(host.to_owned(), port), tls);
        let dialer = dialer.map_err(|error| invalid(&error.to_string()))?;
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
mod tests;
