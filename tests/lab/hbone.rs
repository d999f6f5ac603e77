//! HBONE between real Envoys: policies inside tunnels, TLS of users inside tunnels, and policies of tunnels themselves.

use std::process::Command;
use std::sync::Arc;

use http::{Method, Request, StatusCode};
use http_body_util::Empty;
use hyper_util::rt::{TokioExecutor, TokioIo};
use libtest_mimic::{Completion, Failed, Trial};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use tokio_rustls::TlsConnector;

use super::app::{Application, Call};
use super::missing_component;
use super::pods::{Mesh, Pod, Role};
use crate::kube::tenant::TIMEOUT;
use crate::support::agent::{Agent, Trust};
use crate::support::http::RUNTIME;
use crate::support::{kubernetes, missing, wait};

const MESH: &str = include_str!("hbone.yaml");
/// The name in the certificate of the application with TLS.
const TLS_NAME: &str = "secure.example";
/// The port of HBONE.
const HBONE: u16 = 15008;

pub(super) fn trials() -> Vec<Trial> {
    vec![kubernetes::optional_trial(
        "lab::hbone::tunnels_keep_policies_and_tls",
        tunnels_keep_policies_and_tls,
    )]
}

/// Enables ambient mode, with tunnels between sidecars too.
fn ambient(command: &mut Command) {
    command.envs([("PILOT_ENABLE_AMBIENT", "true"), ("PILOT_PREFER_SENDING_HBONE", "true")]);
}

/// The pods: a server, and two clients of which the policy denies `other`.
struct Pods {
    mesh: Mesh<'static>,
    server: Pod,
    friend: Pod,
    other: Pod,
}

fn tunnels_keep_policies_and_tls(name: &str) -> Result<Completion, Failed> {
    if let Some(reason) = missing_component() {
        return missing(reason);
    }
    let mesh = Mesh::new(name, MESH, ambient)?;
    let server = mesh.pod("server", 1, Some(Role::HboneSidecar))?;
    let mut pods = Pods {
        friend: mesh.pod("friend", 2, Some(Role::HboneSidecar))?,
        other: mesh.pod("other", 3, Some(Role::HboneSidecar))?,
        mesh,
        server,
    };
    let _declared = Application::start(&pods.server.host, "declared", 8080)?;
    let _undeclared = Application::start(&pods.server.host, "undeclared", 8081)?;
    pods.denies_inside_tunnels()?;
    let _secure = pods.carries_tls_of_users()?;
    pods.denies_tunnels()?;
    for pod in [&pods.server, &pods.friend, &pods.other] {
        let rejected = pod.sum("update_rejected")?;
        assert_eq!(rejected, 0, "{} must accept every update", pod.host.name);
    }
    Ok(Completion::Completed)
}

impl Pods {
    /// A request to a service, by the last part of its cluster IP.
    fn call(&self, service: &str, last: u8) -> Call {
        let address = format!("10.96.{{n}}.{last}");
        let address = self.mesh.tenant.fill(&address);
        Call {
            address: address.parse().expect("the address is valid"),
            ..self.mesh.call(service, "/")
        }
    }

    /// A policy by principal applies to connections out of a tunnel, on declared and on undeclared ports. Nothing but
    /// the peer of the tunnel tells the clients apart.
    fn denies_inside_tunnels(&self) -> Result<(), String> {
        for (service, last) in [("declared", 60), ("undeclared", 61)] {
            let call = self.call(service, last);
            self.friend.until_status(&call, 200)?;
            self.other.until_status(&call, 403)?;
        }
        let tunnels = self.server.sum(r"^http\.connect_terminate\.downstream_rq_total$")?;
        assert!(tunnels > 0, "the requests must arrive in tunnels");
        let denied = self.server.sum(r"^http\.InboundPassthroughCluster.*rbac\.denied$")?;
        assert!(denied > 0, "the chain of undeclared ports must have denied a request");
        Ok(())
    }

    /// An application with TLS at an undeclared port is reached once a DestinationRule originates TLS. Returns it.
    fn carries_tls_of_users(&self) -> Result<Application, String> {
        let certified = rcgen::generate_simple_self_signed([TLS_NAME.to_owned()]).map_err(|error| error.to_string())?;
        let roots = self.mesh.tenant.folder.join("secure.pem");
        std::fs::write(&roots, certified.cert.pem()).map_err(|error| error.to_string())?;
        let secure = Application::start_tls(&self.server.host, "secure", 8443, server_config(&certified)?)?;
        let call = self.call("secure", 62);
        let plain = self.friend.status(&call)?;
        assert!(plain >= 500, "the application must not answer plaintext: {plain}");
        self.mesh.tenant.apply(&format!(
            "apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {{name: secure, namespace: '{{app}}'}}
spec:
  host: secure.{{app}}.svc.cluster.local
  trafficPolicy:
    tls: {{mode: SIMPLE, caCertificates: {}, sni: {TLS_NAME}, subjectAltNames: [{TLS_NAME}]}}
",
            roots.display()
        ))?;
        let tunnels = self.tunnels()?;
        self.friend.until_status(&call, 200)?;
        assert!(self.tunnels()? > tunnels, "the connection must be inside a tunnel");
        // The server sees bytes, and closes the connection.
        self.other.until_status(&call, 503)?;
        Ok(secure)
    }

    /// The number of tunnels that the server has accepted.
    fn tunnels(&self) -> Result<u64, String> {
        self.server.sum(r"^http\.connect_terminate\.downstream_rq_total$")
    }

    /// With layered policies, sidecars and waypoints refuse the tunnel itself.
    fn denies_tunnels(&mut self) -> Result<(), String> {
        let log = self.mesh.tenant.folder.join("istiod-layered.log");
        let layered = |command: &mut Command| {
            ambient(command);
            command.env("ENABLE_LAYERED_WAYPOINT_AUTHORIZATION_POLICIES", "true");
        };
        self.mesh.restart(&log, layered)?;
        // The server closes connections of `other` to this service, so each request needs a new tunnel.
        let call = self.call("secure", 62);
        wait::until("a tunnel that the sidecar refuses", TIMEOUT, || {
            let answer = self.other.status(&call).ok()?;
            let denied = self.server.sum(r"^http\.connect_terminate\.rbac\.denied$").ok()?;
            (answer == 503 && denied > 0).then_some(())
        })?;
        self.friend.until_status(&call, 200)?;

        // It serves no Gateway, so it has no listener for what the tunnels of its clients contain.
        let waypoint = self.mesh.pod("waypoint", 4, Some(Role::Waypoint))?;
        let connect = |client: &Pod| connect(client, &waypoint);
        let counter = |name: &str| waypoint.sum(&format!(r"^http\.connect_terminate\.rbac\.{name}$"));
        wait::until("a tunnel that the waypoint accepts", TIMEOUT, || {
            let answer = connect(&self.friend);
            (answer != Ok(StatusCode::FORBIDDEN) && counter("allowed").ok()? > 0).then_some(())
        })?;
        assert_eq!(counter("denied")?, 0, "only permitted clients so far");
        assert_eq!(connect(&self.other)?, StatusCode::FORBIDDEN, "a denied client");
        assert_eq!(counter("denied")?, 1, "the policy must have denied it");
        assert_eq!(
            waypoint.sum("update_rejected")?,
            0,
            "the waypoint must accept every update"
        );
        Ok(())
    }
}

/// Requests a tunnel with the certificate of a client. Returns the status of the response.
fn connect(client: &Pod, waypoint: &Pod) -> Result<StatusCode, String> {
    let agent = client.agent.as_ref().ok_or("the client has no certificate")?;
    let certificate = agent.known().borrow().clone();
    let to = std::net::SocketAddr::from(([127, 0, 0, 1], HBONE));
    let tls = Agent::new(HBONE, Trust::Anything).tls(Some(&certificate))?;
    let stream = waypoint
        .host
        .enter(|| std::net::TcpStream::connect_timeout(&to, TIMEOUT));
    let stream = stream.map_err(|error| error.to_string())?;
    stream.set_nonblocking(true).map_err(|error| error.to_string())?;
    RUNTIME.block_on(async {
        let exchange = tokio::time::timeout(TIMEOUT, exchange(stream, TlsConnector::from(Arc::new(tls))));
        exchange
            .await
            .unwrap_or_else(|_| Err("no response to CONNECT in time".to_owned()))
    })
}

async fn exchange(stream: std::net::TcpStream, tls: TlsConnector) -> Result<StatusCode, String> {
    let stream = tokio::net::TcpStream::from_std(stream).map_err(|error| error.to_string())?;
    let name = ServerName::try_from("waypoint").map_err(|error| error.to_string())?;
    let stream = tls.connect(name, stream).await.map_err(|error| error.to_string())?;
    let connected = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (mut sender, connection) = connected.map_err(|error| format!("{error:?}"))?;
    RUNTIME.spawn(crate::support::http::quietly(connection));
    let request = Request::builder().method(Method::CONNECT).uri("10.96.0.1:80");
    let request = request
        .body(Empty::<bytes::Bytes>::new())
        .map_err(|error| error.to_string())?;
    let response = sender.send_request(request).await;
    response
        .map(|response| response.status())
        .map_err(|error| format!("{error:?}"))
}

fn server_config(certified: &rcgen::CertifiedKey<rcgen::KeyPair>) -> Result<ServerConfig, String> {
    let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der())?;
    ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .map_err(|error| error.to_string())
}
