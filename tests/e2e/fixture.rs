//! The mesh of the end-to-end tests: a client with a sidecar, a service `web` with two versions, and a gateway.
//! Everything listens on loopback addresses. The sidecar captures no traffic; requests go to its listeners directly.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use crate::support::daemon::Daemon;
use crate::support::envoy::{Envoy, Node, Protocol};
use crate::support::http::{self, Application};
use crate::support::ports::Reserved;
use crate::support::{scratch, wait};

/// The host of the service in requests.
pub(super) const WEB: &str = "web.shop.svc.cluster.local";

/// A time limit that is long enough for a slow machine; successful tests do not reach it.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// The applications, their mesh folder, and the daemon that serves it.
pub(super) struct Fixture {
    pub(super) folder: PathBuf,
    mesh: PathBuf,
    pub(super) v1: Application,
    pub(super) v2: Application,
    /// The application behind the sidecar.
    _client: Application,
    /// Port of the service, and of the sidecar's listener for it.
    service: Reserved,
    ingress: Reserved,
    edge: Reserved,
    pub(super) daemon: Daemon,
}

impl Fixture {
    /// Starts everything but the proxies. All requests are routed to v1.
    pub(super) fn start(name: &str) -> Result<Fixture, String> {
        Fixture::start_with(name, &[])
    }

    /// Like [`Self::start`], with more files in the folder.
    pub(super) fn start_with(name: &str, more: &[(&str, &str)]) -> Result<Fixture, String> {
        let folder = scratch(name);
        let mesh = folder.join("mesh");
        std::fs::create_dir(&mesh).map_err(|error| error.to_string())?;
        let (v1, v2) = (
            Application::start("v1", "127.0.0.2"),
            Application::start("v2", "127.0.0.3"),
        );
        let client_itself = Application::start("client", "127.0.0.1");
        let [service, ingress, edge] = [Reserved::new(), Reserved::new(), Reserved::new()];
        // No certificates: with automatic mutual TLS, every cluster would wait for one.
        write(&mesh, "mesh.yaml", "enableAutoMtls: false\n");
        write(&mesh, "services.yaml", &services(&v1, &v2, service.port));
        write(&mesh, "slice-v2.yaml", &slice("v2", v2.address));
        write(&mesh, "routing.yaml", &routing(100, 0));
        write(
            &mesh,
            "client.yaml",
            &client(service.port, ingress.port, client_itself.address),
        );
        write(&mesh, "gateway.yaml", &gateway(edge.port));
        for (file, text) in more {
            write(&mesh, file, text);
        }
        let daemon = Daemon::start(&mesh, &folder.join("istiod.log"))?;
        Ok(Fixture {
            folder,
            mesh,
            v1,
            v2,
            _client: client_itself,
            service,
            ingress,
            edge,
            daemon,
        })
    }

    /// Starts the client's sidecar.
    pub(super) fn sidecar(&self, protocol: Protocol) -> Result<Envoy, String> {
        self.sidecar_of(self.daemon.xds, protocol)
    }

    /// Starts the client's sidecar with a control plane at another port.
    pub(super) fn sidecar_of(&self, xds: u16, protocol: Protocol) -> Result<Envoy, String> {
        let node = Node {
            id: "sidecar~127.0.0.1~client.shop~shop.svc.cluster.local".to_owned(),
            metadata: json!({
                "NAMESPACE": "shop",
                "SERVICE_ACCOUNT": "client",
                "CLUSTER_ID": "Kubernetes",
                "ISTIO_VERSION": "1.30.3",
                "INSTANCE_IPS": "127.0.0.1",
                "INTERCEPTION_MODE": "NONE",
                "LABELS": { "app": "client" },
            }),
        };
        Envoy::start(&self.folder, "sidecar", &node, xds, protocol)
    }

    /// Starts the gateway.
    pub(super) fn gateway(&self, protocol: Protocol) -> Result<Envoy, String> {
        self.gateway_of(self.daemon.xds, protocol)
    }

    /// Starts the gateway with a control plane at another port.
    pub(super) fn gateway_of(&self, xds: u16, protocol: Protocol) -> Result<Envoy, String> {
        let node = Node {
            id: "router~127.0.0.4~gateway.shop~shop.svc.cluster.local".to_owned(),
            metadata: json!({
                "NAMESPACE": "shop",
                "SERVICE_ACCOUNT": "gateway",
                "CLUSTER_ID": "Kubernetes",
                "ISTIO_VERSION": "1.30.3",
                "INSTANCE_IPS": "127.0.0.4",
                "LABELS": { "istio": "gateway" },
            }),
        };
        Envoy::start(&self.folder, "gateway", &node, xds, protocol)
    }

    /// The sidecar's listener for requests to the service.
    pub(super) fn outbound(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.service.port))
    }

    /// The sidecar's listener for requests to the client itself.
    pub(super) fn inbound(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.ingress.port))
    }

    /// The gateway's listener.
    pub(super) fn edge(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 4], self.edge.port))
    }

    /// The cluster name of the service, or of a subset.
    pub(super) fn cluster(&self, subset: &str) -> String {
        format!("outbound|{}|{subset}|{WEB}", self.service.port)
    }

    /// Starts another daemon with the same folder.
    pub(super) fn replica(&self, log: &str) -> Result<Daemon, String> {
        Daemon::start(&self.mesh, &self.folder.join(log))
    }

    /// Kills the daemon and starts another on the same ports.
    pub(super) fn restart(&mut self) -> Result<(), String> {
        self.daemon.replace(&self.mesh, &self.folder.join("istiod-again.log"))
    }

    /// Edits the folder: splits requests by weight.
    pub(super) fn split_traffic(&self, v1: u32, v2: u32) {
        write(&self.mesh, "routing.yaml", &routing(v1, v2));
    }

    /// Edits the folder: changes the clusters of the service, and not their endpoints.
    pub(super) fn limit_connections(&self, most: u32) {
        let rule = routing(100, 0).replacen(
            "  subsets:",
            &format!("  trafficPolicy: {{connectionPool: {{tcp: {{maxConnections: {most}}}}}}}\n  subsets:"),
            1,
        );
        write(&self.mesh, "routing.yaml", &rule);
    }

    /// Edits the folder: removes v2 from the endpoints.
    pub(super) fn remove_v2(&self) {
        std::fs::remove_file(self.mesh.join("slice-v2.yaml")).expect("the file exists since the start");
    }

    /// Edits the folder: adds a service that the client's Sidecar excludes.
    pub(super) fn add_invisible_service(&self) {
        let text = "apiVersion: v1
kind: Service
metadata: {name: unseen, namespace: elsewhere}
spec:
  clusterIP: 10.96.0.99
  clusterIPs: [10.96.0.99]
  ports: [{name: http, port: 80, targetPort: 8080, protocol: TCP}]
";
        write(&self.mesh, "unseen.yaml", text);
    }

    /// Edits the folder: writes any file.
    pub(super) fn write(&self, file: &str, text: &str) {
        write(&self.mesh, file, text);
    }

    /// Edits the folder: writes a file with invalid YAML.
    pub(super) fn write_invalid_file(&self) {
        write(&self.mesh, "spoilt.yaml", "kind: [never closed\n");
    }
}

/// Sends `count` requests, all of which must succeed. Returns the application that answered each.
pub(super) fn answers(address: SocketAddr, host: &str, count: usize) -> Result<Vec<String>, String> {
    (0..count)
        .map(|_| {
            let answer = http::get(address, host, "/")?;
            answer
                .application()
                .ok_or_else(|| format!("{} {}", answer.status, answer.body))
        })
        .collect()
}

/// Sends requests until `application` answers.
pub(super) fn answered_by(application: &str, address: SocketAddr, host: &str) -> Result<(), String> {
    wait::until(&format!("a response of {application} at {address}"), TIMEOUT, || {
        (http::get(address, host, "/").ok()?.application()? == application).then_some(())
    })
}

/// Replaces a file atomically, as editors and Kubernetes do.
fn write(mesh: &Path, name: &str, text: &str) {
    let draft = mesh.join(format!(".{name}.draft"));
    std::fs::write(&draft, text).expect("the test's folder is writable");
    std::fs::rename(&draft, mesh.join(name)).expect("the test's folder is writable");
}

fn services(v1: &Application, v2: &Application, port: u16) -> String {
    let pod = |version: &str, address: SocketAddr| {
        format!(
            "---
apiVersion: v1
kind: Pod
metadata: {{name: web-{version}, namespace: shop, labels: {{app: web, version: {version}}}}}
spec: {{serviceAccountName: web}}
status: {{phase: Running, podIP: {ip}, podIPs: [{{ip: {ip}}}], conditions: [{{type: Ready, status: 'True'}}]}}
",
            ip = address.ip()
        )
    };
    let head = format!(
        "apiVersion: v1
kind: Namespace
metadata: {{name: shop}}
---
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  selector: {{app: web}}
  ports: [{{name: http, port: {port}, targetPort: 8080, protocol: TCP}}]
"
    );
    head + &pod("v1", v1.address) + &pod("v2", v2.address) + "---\n" + &slice("v1", v1.address)
}

fn slice(version: &str, address: SocketAddr) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-{version}, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
endpoints:
- addresses: [{ip}]
  conditions: {{ready: true}}
  targetRef: {{kind: Pod, name: web-{version}, namespace: shop}}
ports: [{{name: http, port: {port}, protocol: TCP}}]
",
        ip = address.ip(),
        port = address.port()
    )
}

fn routing(v1: u32, v2: u32) -> String {
    format!(
        "apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {{name: web, namespace: shop}}
spec:
  host: {WEB}
  subsets:
  - {{name: v1, labels: {{version: v1}}}}
  - {{name: v2, labels: {{version: v2}}}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: web, namespace: shop}}
spec:
  hosts: [{WEB}]
  gateways: [mesh, edge]
  http:
  - route:
    - {{destination: {{host: {WEB}, subset: v1}}, weight: {v1}}}
    - {{destination: {{host: {WEB}, subset: v2}}, weight: {v2}}}
"
    )
}

/// The listeners of the client's sidecar. Inbound traffic is plaintext: these tests have no certificates.
fn client(service_port: u16, ingress_port: u16, behind: SocketAddr) -> String {
    format!(
        "apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {{name: client, namespace: shop}}
spec:
  workloadSelector: {{labels: {{app: client}}}}
  egress:
  - port: {{number: {service_port}, protocol: HTTP, name: http}}
    bind: 127.0.0.1
    captureMode: NONE
    hosts: ['./*']
  ingress:
  - port: {{number: {ingress_port}, protocol: HTTP, name: http}}
    bind: 127.0.0.1
    captureMode: NONE
    defaultEndpoint: 127.0.0.1:{port}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {{name: client, namespace: shop}}
spec:
  selector: {{matchLabels: {{app: client}}}}
  mtls: {{mode: DISABLE}}
",
        port = behind.port()
    )
}

fn gateway(port: u16) -> String {
    format!(
        "apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {{name: edge, namespace: shop}}
spec:
  selector: {{istio: gateway}}
  servers:
  - port: {{number: {port}, protocol: HTTP, name: http}}
    bind: 127.0.0.4
    hosts: ['*']
"
    )
}
