//! The mesh of the tests: three namespaces with the same objects.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use istiod::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use serde_json::{Value, json};
use tonic::transport::{Channel, Endpoint};

use super::{GATEWAY, NAMESPACES, SYSTEM};
use crate::secure::authority::Authority;
use crate::support::agent::{Agent, ClientCredentials, Stream, Trust};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::http::{self, RUNTIME};
use crate::support::kubernetes::Cluster;
use crate::support::kubernetes::api::documents;
use crate::support::{scratch, wait};

pub(super) const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
pub(super) const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// Time limit of reviews of access on a quiet machine. One that fails is repeated after a minute.
const TIMEOUT: Duration = Duration::from_mins(2);

/// The callers' accounts that may not list the Secrets of their own namespace.
const DENIED: [(&str, &str); 2] = [("a", "other"), (SYSTEM, "istiod")];

/// A client.
pub(super) struct Caller {
    pub(super) name: &'static str,
    /// Its authenticated namespace and account; none if it has no valid credentials.
    pub(super) is: Option<(&'static str, &'static str)>,
    /// The identity that it claims.
    pub(super) says: (&'static str, &'static str),
    pub(super) credentials: ClientCredentials,
    /// True if it uses the plaintext port.
    pub(super) is_plaintext: bool,
}

/// The cluster, the daemon and the CA of the tests.
pub(super) struct Fixture {
    cluster: Cluster,
    authority: Authority,
    pub(super) daemon: Daemon,
    pub(super) agent: Agent,
}

impl Fixture {
    pub(super) fn start(name: &str) -> Result<Fixture, String> {
        let cluster = Cluster::start(name)?;
        for namespace in NAMESPACES {
            cluster.namespace(namespace, &json!({}))?;
            for object in documents(&objects(namespace)) {
                cluster.api.apply(&object)?;
            }
        }
        let folder = scratch(&format!("{name}-daemon"));
        let authority = Authority::new("matrix");
        let plugged = folder.join("cacerts");
        authority.plug_into(&plugged);
        let kubeconfig = cluster.admin_kubeconfig();
        let daemon = Daemon::secured_at(non_loopback_address(), &folder.join("istiod.log"), |command| {
            command.arg("--kubeconfig").arg(&kubeconfig).args(["-n", SYSTEM]);
            command.env("ROOT_CA_DIR", &plugged);
        })?;
        let agent = Agent::new(daemon.secure, Trust::Roots(authority.root.clone()));
        Ok(Fixture {
            cluster,
            authority,
            daemon,
            agent,
        })
    }

    /// Connects the gateways of all namespaces, and of [`DENIED`] accounts, and waits for their resources. They stay
    /// connected while the result is held, so their access is not reviewed again for each caller.
    pub(super) async fn connect_proxies(&self) -> Result<Vec<Stream>, String> {
        let mut streams = Vec::new();
        let gateways = NAMESPACES.map(|namespace| (namespace, GATEWAY));
        for (namespace, account) in gateways.into_iter().chain(DENIED) {
            let credentials = self.certificate(namespace, account);
            let says = |status: tonic::Status| format!("{account} of {namespace}: {status}");
            let mut stream = self
                .agent
                .ads(&credentials, &node(namespace, account))
                .await
                .map_err(says)?;
            stream.ask(CLUSTER, &[]).await.map_err(says)?;
            // Once it has its secret, the access review of its API server has completed.
            if account == GATEWAY && namespace != SYSTEM {
                let name = format!("kubernetes://{namespace}/cred");
                stream.ask(SECRET, &[&name]).await.map_err(says)?;
            }
            streams.push(stream);
        }
        Ok(streams)
    }

    /// Waits until the API server has denied access to the [`DENIED`] accounts. They must be connected. Before that,
    /// their Secrets would be withheld for want of an answer.
    pub(super) fn await_denials(&self) -> Result<(), String> {
        let token = self.cluster.token(SYSTEM, "istiod", &["istio-ca"])?;
        let is_denial = |note: &Value, (namespace, account): (&str, &str)| {
            let detail = note["detail"].as_str().unwrap_or_default();
            let denied = format!("kubernetes://{namespace}/cred: the service account may not list Secrets");
            let reader = format!("requested by {account}.{namespace} of cluster Kubernetes");
            detail.starts_with(&denied) && detail.ends_with(&reader)
        };
        let mut seen = String::new();
        let denied = wait::until("the denial of access to Secrets", TIMEOUT, || {
            let page = http::request_with(self.daemon.http, "istiod", "/debug/notez", Some(token.as_str()));
            seen = match RUNTIME.block_on(page) {
                Ok(answer) => answer.body,
                Err(error) => error,
            };
            let notes: Vec<Value> = serde_json::from_str(&seen).unwrap_or_default();
            let mut denied = DENIED.into_iter();
            denied
                .all(|reader| notes.iter().any(|note| is_denial(note, reader)))
                .then_some(())
        });
        denied.map_err(|error| format!("{error}; the notes are {seen}"))
    }

    pub(super) fn callers(&self) -> Result<Vec<Caller>, String> {
        let authenticated = |name, is: (&'static str, &'static str), credentials| Caller {
            name,
            is: Some(is),
            says: is,
            credentials,
            is_plaintext: false,
        };
        let unauthenticated = |name, credentials, is_plaintext| Caller {
            name,
            is: None,
            says: ("a", GATEWAY),
            credentials,
            is_plaintext,
        };
        let token = |namespace, account, audience| {
            let token = self.cluster.token(namespace, account, &[audience])?;
            Ok::<_, String>(ClientCredentials::token(token))
        };
        let id = format!("spiffe://cluster.local/ns/a/sa/{GATEWAY}");
        let foreign_ca = Authority::new("matrix").certificate(&id);
        let foreign = self
            .authority
            .certificate(&format!("spiffe://foreign.example/ns/a/sa/{GATEWAY}"));
        let system = self
            .authority
            .certificate(&format!("spiffe://foreign.example/ns/{SYSTEM}/sa/istiod"));
        let dns = self.authority.certificate(&format!("{GATEWAY}.a.svc"));
        Ok(vec![
            unauthenticated("a plaintext caller", ClientCredentials::default(), true),
            unauthenticated("a caller without credentials", ClientCredentials::default(), false),
            authenticated("a certificate of a/gw", ("a", GATEWAY), self.certificate("a", GATEWAY)),
            authenticated(
                "a certificate of a/other",
                ("a", "other"),
                self.certificate("a", "other"),
            ),
            authenticated("a certificate of b/gw", ("b", GATEWAY), self.certificate("b", GATEWAY)),
            authenticated(
                "a certificate of the control plane",
                (SYSTEM, "istiod"),
                self.certificate(SYSTEM, "istiod"),
            ),
            authenticated("a token of a/gw", ("a", GATEWAY), token("a", GATEWAY, "istio-ca")?),
            authenticated("a token of a/other", ("a", "other"), token("a", "other", "istio-ca")?),
            authenticated("a token of b/gw", ("b", GATEWAY), token("b", GATEWAY, "istio-ca")?),
            authenticated(
                "a token of the control plane",
                (SYSTEM, "istiod"),
                token(SYSTEM, "istiod", "istio-ca")?,
            ),
            unauthenticated(
                "a token for another audience",
                token("a", GATEWAY, "somebody-else")?,
                false,
            ),
            unauthenticated("a malformed token", ClientCredentials::token("no.token.atall"), false),
            unauthenticated(
                "a certificate of another CA",
                ClientCredentials::certificate(foreign_ca),
                false,
            ),
            unauthenticated(
                "a certificate of a foreign trust domain",
                ClientCredentials::certificate(foreign),
                false,
            ),
            unauthenticated("a foreign control plane", ClientCredentials::certificate(system), false),
            unauthenticated(
                "a certificate without an account",
                ClientCredentials::certificate(dns),
                false,
            ),
        ])
    }

    fn certificate(&self, namespace: &str, account: &str) -> ClientCredentials {
        let id = format!("spiffe://cluster.local/ns/{namespace}/sa/{account}");
        ClientCredentials::certificate(self.authority.certificate(&id))
    }

    /// Opens a stream on the port that the caller uses.
    pub(super) async fn ads(&self, caller: &Caller, node: &Node) -> Result<Stream, tonic::Status> {
        Stream::open(self.channel(caller).await?, &caller.credentials, node).await
    }

    /// Opens a connection to the port that the caller uses.
    pub(super) async fn channel(&self, caller: &Caller) -> Result<Channel, tonic::Status> {
        if !caller.is_plaintext {
            let channel = self.agent.channel(&caller.credentials).await;
            return channel.map_err(tonic::Status::unavailable);
        }
        let channel = Endpoint::from_shared(format!("http://127.0.0.1:{}", self.daemon.xds));
        let channel = channel.expect("the address is valid").connect().await;
        channel.map_err(|error| tonic::Status::unavailable(error.to_string()))
    }

    /// Loopback clients may read everything, so pages are tested only if this machine has another address.
    pub(super) fn can_try(&self, endpoint: super::Endpoint) -> bool {
        let is_page = matches!(endpoint, super::Endpoint::HttpOfProxy | super::Endpoint::HttpOfMesh);
        !is_page || !self.daemon.http.ip().is_loopback()
    }
}

/// Requests a secret on a new stream. One that the caller may not have is not answered, so later requests show it: with
/// the answer for clusters, the stream has a configuration, and it answers requests in order, so the answer for
/// listeners follows that for the secret. Without the secret, the result is an empty response.
pub(super) async fn secret(stream: &mut Stream, name: &str) -> Result<DiscoveryResponse, tonic::Status> {
    let request = |type_url: &str, resource_names| DiscoveryRequest {
        type_url: type_url.to_owned(),
        resource_names,
        ..Default::default()
    };
    let mut secret = DiscoveryResponse::default();
    stream.send(request(SECRET, vec![name.to_owned()])).await?;
    for later in [CLUSTER, LISTENER] {
        stream.send(request(later, Vec::new())).await?;
        loop {
            let response = stream.next().await?;
            if response.type_url == later {
                break;
            }
            if response.type_url == SECRET {
                secret = response;
            }
        }
    }
    Ok(secret)
}

/// Returns an address of this machine other than loopback, if it has one. Connections to it stay local and have it as
/// source.
fn non_loopback_address() -> IpAddr {
    let own = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        // Sends nothing; it only looks up the route.
        socket.connect(SocketAddr::from(([192, 0, 2, 1], 9)))?;
        socket.local_addr()
    });
    own.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address| address.ip())
}

/// A gateway's node. Its Gateways refer to the credentials of all namespaces.
pub(super) fn node(namespace: &str, account: &str) -> Node {
    let metadata: Value = json!({ "NAMESPACE": namespace, "SERVICE_ACCOUNT": account, "CLUSTER_ID": "Kubernetes",
        "LABELS": { "app": "gw" }, "PROXY_CONFIG": {} });
    Node {
        id: format!("router~10.0.0.1~{account}.{namespace}~{namespace}.svc.cluster.local"),
        metadata,
    }
}

fn objects(namespace: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: {namespace}}}
spec: {{ports: [{{name: http, port: 80}}]}}
---
apiVersion: v1
kind: Secret
metadata: {{name: cred, namespace: {namespace}}}
stringData: {{cert: chain of {namespace}, key: key of {namespace}}}
---
{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: gw, namespace: {namespace}}}}}
---
{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: other, namespace: {namespace}}}}}
---
{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: istiod, namespace: {namespace}}}}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: gw, namespace: {namespace}}}
rules: [{{apiGroups: [''], resources: [secrets], verbs: [list]}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: gw, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: gw}}
subjects: [{{kind: ServiceAccount, namespace: {namespace}, name: gw}}]
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {{name: gw, namespace: {namespace}}}
spec:
  selector: {{app: gw}}
  servers:
  - port: {{number: 443, name: a, protocol: HTTPS}}
    hosts: ['a.{namespace}.example.com']
    tls: {{mode: SIMPLE, credentialName: 'kubernetes://a/cred'}}
  - port: {{number: 443, name: b, protocol: HTTPS}}
    hosts: ['b.{namespace}.example.com']
    tls: {{mode: SIMPLE, credentialName: 'kubernetes://b/cred'}}
  - port: {{number: 443, name: system, protocol: HTTPS}}
    hosts: ['system.{namespace}.example.com']
    tls: {{mode: SIMPLE, credentialName: 'kubernetes://istio-system/cred'}}
"
    )
}
