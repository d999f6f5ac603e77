//! One request of one caller about one namespace.

use istiod::proto::envoy::service::discovery::v3::DiscoveryResponse;
use istiod::proto::istio::v1::auth::IstioCertificateRequest;
use istiod::proto::json::struct_from_json;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Code, Status, TimeoutExpired};
use tonic_prost::ProstCodec;

use super::fixture::{self, CLUSTER, Caller, Fixture, LISTENER, node};
use super::{Endpoint, GATEWAY};
use crate::support::agent::{KeyKind, signing_request};
use crate::support::http;

const NAMES: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
const PAGE: &str = "istio.io/debug";

/// The reason why the requested resource was not received.
pub(super) enum Failure {
    /// An answer without it: a status, or a response that lacks it.
    Refused(String),
    /// No answer in time, or one that says nothing about access.
    Unanswered(String),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Failure {
        let text = format!("{:?}: {}", status.code(), status.message());
        // The timeout of a call (`Request::set_timeout`) has another code.
        let is_over = status.code() == Code::Cancelled && status.message() == TimeoutExpired(()).to_string();
        if is_over || status.code() == Code::DeadlineExceeded {
            Failure::Unanswered(text)
        } else {
            Failure::Refused(text)
        }
    }
}

/// Sends the request of one cell.
pub(super) async fn attempt(
    fixture: &Fixture,
    caller: &Caller,
    endpoint: Endpoint,
    target: &str,
) -> Result<(), Failure> {
    let (own, account) = caller.says;
    // The node claims an identity; the account exists in every namespace.
    let there = (target, account);
    match endpoint {
        Endpoint::Clusters => configuration(fixture, caller, there, CLUSTER).await,
        Endpoint::Listeners => configuration(fixture, caller, there, LISTENER).await,
        Endpoint::Names => configuration(fixture, caller, there, NAMES).await,
        Endpoint::Secret => secret(fixture, caller, (own, account), target).await,
        Endpoint::SecretThere => secret(fixture, caller, there, target).await,
        Endpoint::SyncStatus => {
            let response = ask(fixture, caller, "istio.io/debug/syncz", &[]).await?;
            contains(&response, &proxy(target))
        }
        Endpoint::Dump => {
            let response = ask(fixture, caller, "istio.io/debug/config_dump", &[&proxy(target)]).await?;
            has_resources(&response)
        }
        Endpoint::PageOfProxy => {
            let response = ask(
                fixture,
                caller,
                PAGE,
                &[&format!("config_dump?proxyID={}", proxy(target))],
            )
            .await?;
            contains(&response, "ClustersConfigDump")
        }
        Endpoint::PageOfMesh => {
            let response = ask(fixture, caller, PAGE, &["syncz"]).await?;
            contains(&response, &proxy(target))
        }
        Endpoint::HttpOfProxy => {
            let path = format!("/debug/config_dump?proxyID={}", proxy(target));
            page(fixture, caller, &path, "ClustersConfigDump").await
        }
        Endpoint::HttpOfMesh => page(fixture, caller, "/debug/syncz", &proxy(target)).await,
        Endpoint::OwnCertificate => certificate(fixture, caller, None, target).await,
        Endpoint::Impersonation => {
            let id = format!("spiffe://cluster.local/ns/{target}/sa/other");
            certificate(fixture, caller, Some(id), target).await
        }
        Endpoint::Replicas => replicas(fixture, caller, &proxy(target)).await,
    }
}

/// Asks as another replica does: once, for the status of all proxies.
async fn replicas(fixture: &Fixture, caller: &Caller, proxy: &str) -> Result<(), Failure> {
    let channel = fixture.channel(caller).await?;
    let mut client = Grpc::new(channel);
    let ready = client.ready().await;
    ready.map_err(|error| Failure::Refused(error.to_string()))?;
    let request = caller.credentials.request(r#"{"milliseconds": 0}"#.to_owned());
    let path = PathAndQuery::from_static("/istiod.v1.Replicas/Status");
    let codec = ProstCodec::<String, Vec<u8>>::default();
    let reports = client.server_streaming(request, path, codec).await;
    let report = reports?.into_inner().message().await?.unwrap_or_default();
    if String::from_utf8_lossy(&report).contains(proxy) {
        Ok(())
    } else {
        Err(Failure::Refused(format!("report without {proxy}")))
    }
}

/// The connection name of a namespace's gateway.
fn proxy(namespace: &str) -> String {
    format!("{GATEWAY}.{namespace}")
}

async fn configuration(fixture: &Fixture, caller: &Caller, is: (&str, &str), type_url: &str) -> Result<(), Failure> {
    let mut stream = fixture.ads(caller, &node(is.0, is.1)).await?;
    let given = stream.ask(type_url, &[]).await?;
    // A gateway's name table may be empty; any response is enough.
    if type_url == NAMES {
        Ok(())
    } else {
        has_resources(&given)
    }
}

async fn secret(fixture: &Fixture, caller: &Caller, is: (&str, &str), target: &str) -> Result<(), Failure> {
    let mut stream = fixture.ads(caller, &node(is.0, is.1)).await?;
    let given = fixture::secret(&mut stream, &format!("kubernetes://{target}/cred")).await?;
    contains(&given, &format!("key of {target}"))
}

async fn ask(fixture: &Fixture, caller: &Caller, type_url: &str, names: &[&str]) -> Result<DiscoveryResponse, Failure> {
    let (namespace, account) = caller.says;
    let mut stream = fixture.ads(caller, &node(namespace, account)).await?;
    Ok(stream.ask(type_url, names).await?)
}

/// A plaintext connection cannot carry a certificate, but it can carry a token.
async fn page(fixture: &Fixture, caller: &Caller, path: &str, text: &str) -> Result<(), Failure> {
    let token = caller.credentials.token.as_deref();
    let answer = http::request_with(fixture.daemon.http, "istiod", path, token).await;
    let answer = answer.map_err(Failure::Unanswered)?;
    if answer.status.is_success() && answer.body.contains(text) {
        return Ok(());
    }
    let text = format!("{} {}", answer.status, answer.body);
    Err(if answer.status.is_server_error() {
        Failure::Unanswered(text)
    } else {
        Failure::Refused(text)
    })
}

async fn certificate(fixture: &Fixture, caller: &Caller, of: Option<String>, target: &str) -> Result<(), Failure> {
    if caller.is_plaintext {
        let why = "certificates are signed only at the secure port";
        return Err(Failure::Refused(why.to_owned()));
    }
    let (_, csr) = signing_request(KeyKind::Ecdsa);
    let metadata = of.map(|id| json!({ "ImpersonatedIdentity": id }));
    let request = IstioCertificateRequest {
        csr,
        validity_duration: 3600,
        metadata: metadata
            .as_ref()
            .and_then(|fields| fields.as_object().map(struct_from_json)),
    };
    let chain = fixture.agent.sign(&caller.credentials, request).await?;
    let leaf = chain.first().map_or("", String::as_str);
    let leaf = CertificateDer::from_pem_slice(leaf.as_bytes());
    let leaf = leaf.map_err(|error| Failure::Unanswered(error.to_string()))?;
    // Names are stored in certificates as plain ASCII.
    let name = format!("spiffe://cluster.local/ns/{target}/sa/");
    if leaf.windows(name.len()).any(|part| part == name.as_bytes()) {
        Ok(())
    } else {
        Err(Failure::Refused("certificate for another namespace".to_owned()))
    }
}

fn has_resources(given: &DiscoveryResponse) -> Result<(), Failure> {
    if given.resources.is_empty() {
        Err(Failure::Refused("response without resources".to_owned()))
    } else {
        Ok(())
    }
}

fn contains(given: &DiscoveryResponse, text: &str) -> Result<(), Failure> {
    let has = |bytes: &[u8]| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    if given.resources.iter().any(|resource| has(&resource.value)) {
        Ok(())
    } else {
        Err(Failure::Refused(format!("response without {text}")))
    }
}
