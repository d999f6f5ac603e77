//! One request of one caller about one namespace.

use std::time::Duration;

use istiod::proto::envoy::service::discovery::v3::DiscoveryResponse;
use istiod::proto::istio::v1::auth::IstioCertificateRequest;
use istiod::proto::json::struct_from_json;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic_prost::ProstCodec;

use super::fixture::{self, CLUSTER, Caller, Fixture, node};
use super::{Endpoint, GATEWAY, rule};
use crate::support::agent::{KeyKind, signing_request};
use crate::support::{http, wait};

const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const NAMES: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
const PAGE: &str = "istio.io/debug";

/// Silence of a stream after which no response is expected, for requests that must be refused.
const SILENCE: Duration = Duration::from_millis(1500);
/// Time limit for all other responses on a quiet machine; a review of access takes long on a busy one.
const PATIENCE: Duration = Duration::from_mins(1);

/// Returns an error, with the reason, if the request is refused.
pub(super) async fn attempt(
    fixture: &Fixture,
    caller: &Caller,
    endpoint: Endpoint,
    target: &str,
) -> Result<(), String> {
    let (own, account) = caller.says;
    // The node claims an identity; the account exists in every namespace.
    let there = (target, account);
    let patience = if rule(caller, endpoint, target) {
        wait::extended(PATIENCE)
    } else {
        SILENCE
    };
    match endpoint {
        Endpoint::Clusters => configuration(fixture, caller, there, CLUSTER).await,
        Endpoint::Listeners => configuration(fixture, caller, there, LISTENER).await,
        Endpoint::Names => configuration(fixture, caller, there, NAMES).await,
        Endpoint::Secret => secret(fixture, caller, (own, account), target, patience).await,
        Endpoint::SecretThere => secret(fixture, caller, there, target, patience).await,
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
async fn replicas(fixture: &Fixture, caller: &Caller, proxy: &str) -> Result<(), String> {
    let channel = fixture.channel(caller).await.map_err(error_text)?;
    let mut client = Grpc::new(channel);
    client.ready().await.map_err(|error| error.to_string())?;
    let request = caller.credentials.request(r#"{"milliseconds": 0}"#.to_owned());
    let path = PathAndQuery::from_static("/istiod.v1.Replicas/Status");
    let codec = ProstCodec::<String, Vec<u8>>::default();
    let reports = client.server_streaming(request, path, codec).await;
    let report = reports.map_err(error_text)?.into_inner().message().await;
    let report = report.map_err(error_text)?.unwrap_or_default();
    if String::from_utf8_lossy(&report).contains(proxy) {
        Ok(())
    } else {
        Err(format!("report without {proxy}"))
    }
}

/// The connection name of a namespace's gateway.
fn proxy(namespace: &str) -> String {
    format!("{GATEWAY}.{namespace}")
}

async fn configuration(fixture: &Fixture, caller: &Caller, is: (&str, &str), type_url: &str) -> Result<(), String> {
    let mut stream = fixture.ads(caller, &node(is.0, is.1)).await.map_err(error_text)?;
    let given = stream.ask(type_url, &[]).await.map_err(error_text)?;
    // A gateway's name table may be empty; any response is enough.
    if type_url == NAMES {
        Ok(())
    } else {
        has_resources(&given)
    }
}

async fn secret(
    fixture: &Fixture,
    caller: &Caller,
    is: (&str, &str),
    target: &str,
    patience: Duration,
) -> Result<(), String> {
    let mut stream = fixture.ads(caller, &node(is.0, is.1)).await.map_err(error_text)?;
    let name = format!("kubernetes://{target}/cred");
    let given = fixture::secret(&mut stream, &name, patience)
        .await
        .map_err(error_text)?;
    contains(&given, &format!("key of {target}"))
}

async fn ask(fixture: &Fixture, caller: &Caller, type_url: &str, names: &[&str]) -> Result<DiscoveryResponse, String> {
    let (namespace, account) = caller.says;
    let mut stream = fixture
        .ads(caller, &node(namespace, account))
        .await
        .map_err(error_text)?;
    stream.ask(type_url, names).await.map_err(error_text)
}

/// A plaintext connection cannot carry a certificate, but it can carry a token.
async fn page(fixture: &Fixture, caller: &Caller, path: &str, text: &str) -> Result<(), String> {
    let answer = http::request_with(fixture.daemon.http, "istiod", path, caller.credentials.token.as_deref()).await?;
    if answer.status.is_success() && answer.body.contains(text) {
        Ok(())
    } else {
        Err(format!("{} {}", answer.status, answer.body))
    }
}

async fn certificate(fixture: &Fixture, caller: &Caller, of: Option<String>, target: &str) -> Result<(), String> {
    if caller.is_plaintext {
        return Err("certificates are signed only at the secure port".to_owned());
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
    let chain = fixture
        .agent
        .sign(&caller.credentials, request)
        .await
        .map_err(error_text)?;
    let leaf = CertificateDer::from_pem_slice(chain.first().ok_or("no certificate")?.as_bytes());
    let leaf = leaf.map_err(|error| error.to_string())?;
    // Names are stored in certificates as plain ASCII.
    let name = format!("spiffe://cluster.local/ns/{target}/sa/");
    if leaf.windows(name.len()).any(|part| part == name.as_bytes()) {
        Ok(())
    } else {
        Err("certificate for another namespace".to_owned())
    }
}

fn has_resources(given: &DiscoveryResponse) -> Result<(), String> {
    if given.resources.is_empty() {
        Err("response without resources".to_owned())
    } else {
        Ok(())
    }
}

fn contains(given: &DiscoveryResponse, text: &str) -> Result<(), String> {
    let has = |bytes: &[u8]| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    if given.resources.iter().any(|resource| has(&resource.value)) {
        Ok(())
    } else {
        Err(format!("response without {text}"))
    }
}

fn error_text(status: tonic::Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}
