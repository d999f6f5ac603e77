//! Cloud Foundry: routes and their backends from Copilot, by its gRPC API.
//!
//! Parity (pilot/pkg/serviceregistry/cloudfoundry of release 1.0): services, ports and labels. Note: changes of
//! internal routes count too, and backends of a route are served with and without a subset.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use http::uri::PathAndQuery;
use smol_str::SmolStr;
use tokio::{sync::mpsc, time::timeout};
use tonic::{
    Status,
    client::Grpc,
    transport::{Channel, Endpoint as TonicEndpoint},
};
use tonic_prost::ProstCodec;

use super::{
    Instance, Port, Service,
    poll::{Client, Failure, Poller},
};
use crate::{
    api::yaml,
    base::{ClusterId, Sensitive, duration},
    fetch::{ClientTls, Dialer, Endpoint, with_causes},
    ingest::{
        diagnostics::Report,
        registry_metrics::OfRegistry,
        source::{Readiness, Source},
    },
    model::change::Batch,
};

/// The limit of a connection and its requests.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The largest response.
const MAX_BYTES: usize = 64 << 20;
/// The label with the process of an application.
const PROCESS: &str = "cfapp";
const ROUTES: &str = "/api.IstioCopilot/Routes";
const INTERNAL_ROUTES: &str = "/api.IstioCopilot/InternalRoutes";

/// An empty request.
#[derive(Clone, PartialEq, prost::Message)]
struct Request {}

/// The answer of `Routes`.
#[derive(Clone, PartialEq, prost::Message)]
struct RoutesResponse {
    #[prost(message, repeated, tag = "2")]
    routes: Vec<Route>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Route {
    #[prost(string, tag = "1")]
    hostname: String,
    #[prost(string, tag = "2")]
    path: String,
    #[prost(message, optional, tag = "3")]
    backends: Option<BackendSet>,
    #[prost(string, tag = "4")]
    process: String,
}

/// The answer of `InternalRoutes`.
#[derive(Clone, PartialEq, prost::Message)]
struct InternalRoutesResponse {
    #[prost(message, repeated, tag = "1")]
    routes: Vec<InternalRoute>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct InternalRoute {
    #[prost(string, tag = "1")]
    hostname: String,
    #[prost(string, tag = "2")]
    vip: String,
    #[prost(message, optional, tag = "3")]
    backends: Option<BackendSet>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct BackendSet {
    #[prost(message, repeated, tag = "1")]
    backends: Vec<Backend>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Backend {
    #[prost(string, tag = "1")]
    address: String,
    #[prost(uint32, tag = "2")]
    port: u32,
}

/// Settings, from the file of `--cfConfig`.
#[derive(Clone, Debug, PartialEq)]
pub struct CloudFoundrySettings {
    host: String,
    port: u16,
    server_ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    poll_interval: Duration,
    service_port: u32,
}

/// An invalid file.
#[derive(Debug, thiserror::Error)]
#[error("--cfConfig: {file}: {problem}")]
pub struct CloudFoundrySettingsError {
    file: String,
    problem: String,
}

impl CloudFoundrySettings {
    /// Reads the file. All fields are required.
    pub fn read(file: &Path) -> Result<Self, CloudFoundrySettingsError> {
        let invalid = |problem: String| CloudFoundrySettingsError {
            file: file.display().to_string(),
            problem,
        };
        let bytes = std::fs::read(file).map_err(|error| invalid(error.to_string()))?;
        Self::parse(&bytes).map_err(invalid)
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let text = yaml::text(bytes).map_err(|error| error.to_string())?;
        let documents = yaml::documents(text);
        let document = documents.first().ok_or("it is empty")?;
        let value = document.parse().map_err(|error| error.to_string())?;
        let copilot = &value["copilot"];
        let text = |name: &str| {
            let text = copilot[name].as_str().filter(|text| !text.is_empty());
            text.ok_or_else(|| format!("copilot.{name} is required"))
        };
        let address = text("address")?;
        let (host, port) = address.rsplit_once(':').ok_or("copilot.address: want host:port")?;
        let poll_interval = duration::parse(text("poll_interval")?);
        let poll_interval = poll_interval.map_err(|error| format!("copilot.poll_interval: {error}"))?;
        if poll_interval.is_zero() {
            return Err("copilot.poll_interval: want a positive duration".to_owned());
        }
        let service_port = value["service_port"].as_u64().and_then(|port| u32::try_from(port).ok());
        let service_port = service_port.filter(|port| (1..=65_535).contains(port));
        Ok(Self {
            host: host.to_owned(),
            port: port.parse().map_err(|_| "copilot.address: the port is not a number")?,
            server_ca: text("server_ca_cert_path")?.into(),
            certificate: text("client_cert_path")?.into(),
            key: text("client_key_path")?.into(),
            poll_interval,
            service_port: service_port.ok_or("service_port is required")?,
        })
    }

    /// Connects with the certificates that are valid now.
    async fn connect(&self) -> Result<Channel, Status> {
        let failed = |error: String| Status::unavailable(error);
        let read = |path: &Path| {
            let bytes = std::fs::read(path).map_err(|error| failed(format!("cannot read {}: {error}", path.display())));
            bytes.map(Bytes::from)
        };
        let tls = ClientTls {
            roots: Some(read(&self.server_ca)?),
            identity: Some((read(&self.certificate)?, Sensitive::new(read(&self.key)?))),
            alpn: vec![b"h2".to_vec()],
            ..ClientTls::default()
        };
        let config = tls.config().map_err(|error| failed(error.to_string()))?;
        let endpoint = Endpoint::Host(self.host.clone(), self.port);
        let dialer = Dialer::new(endpoint, Some(("", config))).map_err(|error| failed(error.to_string()))?;
        let endpoint = TonicEndpoint::from_shared(format!("http://{}:{}", self.host, self.port));
        let endpoint = endpoint.map_err(|error| failed(error.to_string()))?.timeout(TIMEOUT);
        let connected = endpoint.connect_with_connector(dialer).await;
        connected.map_err(|error| failed(with_causes(&error)))
    }
}

/// The source.
pub struct CloudFoundrySource {
    client: CopilotClient,
    poller: Poller,
}

impl CloudFoundrySource {
    /// Returns the source.
    pub fn new(settings: CloudFoundrySettings, cluster: ClusterId, metrics: OfRegistry, report: Report) -> Self {
        Self {
            poller: Poller::new("Copilot", settings.poll_interval, cluster, metrics, report),
            client: CopilotClient {
                settings,
                channel: None,
            },
        }
    }
}

/// The client of Copilot.
struct CopilotClient {
    settings: CloudFoundrySettings,
    /// The connection; `None` after a failed request.
    channel: Option<Channel>,
}

impl CopilotClient {
    /// Requests all routes, on a new connection if the last request failed.
    async fn routes(&mut self) -> Result<Routes, Status> {
        let channel = match self.channel.take() {
            Some(connected) => connected,
            None => self.settings.connect().await?,
        };
        let routes = (call(&channel, ROUTES).await?, call(&channel, INTERNAL_ROUTES).await?);
        self.channel = Some(channel);
        Ok(routes)
    }
}

impl Client for CopilotClient {
    type State = Routes;

    fn read<'a>(&'a mut self, _: Option<&'a Routes>) -> BoxFuture<'a, Result<Routes, Failure>> {
        async move {
            let routes = self.routes().await;
            routes.map_err(|status| {
                let message: String = status.message().chars().take(500).collect();
                Failure {
                    reason: "unreachable",
                    error: format!("{:?}: {message}", status.code()),
                }
            })
        }
        .boxed()
    }

    fn services(&self, routes: &Routes) -> BTreeMap<SmolStr, Service> {
        services(routes, self.settings.service_port)
    }
}

/// The routes.
type Routes = (RoutesResponse, InternalRoutesResponse);

async fn call<T: prost::Message + Default + 'static>(channel: &Channel, path: &'static str) -> Result<T, Status> {
    let mut client = Grpc::new(channel.clone()).max_decoding_message_size(MAX_BYTES);
    client
        .ready()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    let codec: ProstCodec<Request, T> = ProstCodec::default();
    let request = tonic::Request::new(Request {});
    let answer = client.unary(request, PathAndQuery::from_static(path), codec);
    let answer = timeout(TIMEOUT, answer).await;
    let answer = answer.map_err(|_| Status::deadline_exceeded("no response in time"))?;
    answer.map(tonic::Response::into_inner)
}

impl Source for CloudFoundrySource {
    fn name(&self) -> &'static str {
        "cloud foundry"
    }

    fn readiness(&self) -> Readiness {
        self.poller.readiness()
    }

    async fn run(self, changes: mpsc::Sender<Batch>) {
        self.poller.run(self.client, changes).await;
    }
}

/// Returns the services: one for each host name.
fn services((routes, internal): &Routes, service_port: u32) -> BTreeMap<SmolStr, Service> {
    let mut services: BTreeMap<SmolStr, Service> = BTreeMap::new();
    let mut add = |hostname: &str, vip: &str, (name, protocol): (&str, &'static str), instances: BTreeSet<Instance>| {
        if hostname.is_empty() {
            return;
        }
        let service = services.entry(SmolStr::new(hostname)).or_insert_with(|| Service {
            hostname: hostname.to_owned(),
            addresses: Some(vip)
                .filter(|vip| !vip.is_empty())
                .map(str::to_owned)
                .into_iter()
                .collect(),
            ..Service::default()
        });
        service.ports.entry(service_port).or_insert_with(|| Port {
            name: name.to_owned(),
            protocol,
        });
        service.instances.extend(instances);
    };
    let instances = |backends: Option<&BackendSet>, labels: &BTreeMap<String, String>| {
        let backends = backends.into_iter().flat_map(|set| &set.backends);
        let instances = backends.filter(|backend| backend.port > 0).map(|backend| Instance {
            address: backend.address.clone(),
            port: service_port,
            target_port: backend.port,
            labels: labels.clone(),
            ..Instance::default()
        });
        instances.collect::<BTreeSet<_>>()
    };
    for route in &routes.routes {
        let labels = [(PROCESS.to_owned(), route.process.clone())];
        let labels = labels.into_iter().filter(|(_, process)| !process.is_empty()).collect();
        add(
            &route.hostname,
            "",
            ("http", "HTTP"),
            instances(route.backends.as_ref(), &labels),
        );
    }
    for route in &internal.routes {
        let backends = instances(route.backends.as_ref(), &BTreeMap::new());
        add(&route.hostname, &route.vip, ("tcp", "TCP"), backends);
    }
    services
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "copilot:
  server_ca_cert_path: /a
  client_cert_path: /b
  client_key_path: /c
  address: copilot.example.com:9000
  poll_interval: 10s
service_port: 8080
";

    #[test]
    fn all_settings_are_required() {
        let settings = CloudFoundrySettings::parse(FILE.as_bytes()).expect("a valid file");
        assert_eq!(
            (settings.host.as_str(), settings.port, settings.service_port),
            ("copilot.example.com", 9000, 8080)
        );
        assert_eq!(settings.poll_interval, Duration::from_secs(10));
        for line in FILE.lines().filter(|line| *line != "copilot:") {
            let without: Vec<&str> = FILE.lines().filter(|other| *other != line).collect();
            let without = without.join("\n");
            let name = line.trim().split(':').next().expect("a name");
            let error = CloudFoundrySettings::parse(without.as_bytes()).expect_err(line);
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn routes_and_internal_routes_make_services() {
        let backends = |address: &str, port| {
            let backend = Backend {
                address: address.to_owned(),
                port,
            };
            Some(BackendSet {
                backends: vec![backend],
            })
        };
        let route = Route {
            hostname: "shop.example.com".to_owned(),
            path: String::new(),
            backends: backends("10.0.0.1", 61001),
            process: "guid".to_owned(),
        };
        let internal = InternalRoute {
            hostname: "shop.apps.internal".to_owned(),
            vip: "127.128.0.1".to_owned(),
            backends: backends("10.255.0.1", 8080),
        };
        let routes = (
            RoutesResponse { routes: vec![route] },
            InternalRoutesResponse { routes: vec![internal] },
        );
        let services = services(&routes, 8080);
        let external = &services["shop.example.com"];
        let instance = external.instances.first().expect("an instance");
        assert_eq!(
            (instance.port, instance.target_port, external.ports[&8080].protocol),
            (8080, 61001, "HTTP")
        );
        assert_eq!(instance.labels["cfapp"], "guid");
        let internal = &services["shop.apps.internal"];
        assert_eq!(
            (internal.addresses[0].as_str(), internal.ports[&8080].protocol),
            ("127.128.0.1", "TCP")
        );
    }
}
