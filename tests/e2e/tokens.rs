//! JWTs, verified by a real Envoy with keys that the daemon fetched.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use ::http::{Request, Response, StatusCode};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use libtest_mimic::Failed;
use rcgen::{KeyPair, PublicKeyData};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::fixture::{Fixture, TIMEOUT};
use crate::support::envoy::{Envoy, Protocol};
use crate::support::http::{self, RUNTIME};
use crate::support::wait;

/// Keys are refreshed often, from servers with self-signed certificates.
const SETTINGS: &str = "PILOT_JWT_PUB_KEY_REFRESH_INTERVAL: 1s\nJWKS_RESOLVER_INSECURE_SKIP_VERIFY: 'true'\n";

/// A key that signs tokens.
struct Key {
    id: &'static str,
    pair: KeyPair,
}

impl Key {
    fn new(id: &'static str) -> Self {
        let pair = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("key generation succeeds");
        Self { id, pair }
    }

    /// The public key that verifies the signatures.
    fn public(&self) -> Value {
        let point = self.pair.der_bytes();
        let coordinate = |from: usize| BASE64_URL_SAFE_NO_PAD.encode(&point[from..from + 32]);
        json!({ "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": self.id,
            "x": coordinate(1), "y": coordinate(33) })
    }

    fn token(&self, issuer: &str) -> String {
        let header = Header {
            kid: Some(self.id.to_owned()),
            ..Header::new(Algorithm::ES256)
        };
        let claims = json!({ "iss": issuer, "sub": "somebody", "exp": 4_000_000_000_u64 });
        let key = EncodingKey::from_ec_der(&self.pair.serialize_der());
        jsonwebtoken::encode(&header, &claims, &key).expect("signing succeeds")
    }
}

fn key_set(keys: &[&Key]) -> String {
    let keys: Vec<Value> = keys.iter().map(|key| key.public()).collect();
    json!({ "keys": keys }).to_string()
}

/// A server of documents by path. Dropping it ends it.
struct KeyServer {
    address: SocketAddr,
    documents: Arc<Mutex<BTreeMap<String, String>>>,
    server: JoinHandle<()>,
}

impl KeyServer {
    fn start(tls: Option<TlsAcceptor>) -> Self {
        let listener = RUNTIME
            .block_on(TcpListener::bind("127.0.0.1:0"))
            .expect("a loopback port is free");
        let address = listener.local_addr().expect("a bound socket has an address");
        let documents = Arc::new(Mutex::new(BTreeMap::new()));
        let server = RUNTIME.spawn(serve(listener, tls, documents.clone()));
        Self {
            address,
            documents,
            server,
        }
    }

    fn set(&self, path: &str, document: String) {
        let mut documents = self.documents.lock().expect("no thread panics while it holds the lock");
        documents.insert(path.to_owned(), document);
    }
}

impl Drop for KeyServer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(listener: TcpListener, tls: Option<TlsAcceptor>, documents: Arc<Mutex<BTreeMap<String, String>>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let documents = documents.clone();
        let answers = service_fn(move |request: Request<Incoming>| {
            let found = documents
                .lock()
                .expect("no thread panics while it holds the lock")
                .get(request.uri().path())
                .cloned();
            let status = if found.is_some() {
                StatusCode::OK
            } else {
                StatusCode::NOT_FOUND
            };
            let mut response = Response::new(Full::new(Bytes::from(found.unwrap_or_default())));
            *response.status_mut() = status;
            async move { Ok::<_, Infallible>(response) }
        });
        let http = hyper::server::conn::http1::Builder::new();
        // The daemon may close a connection at any time.
        match &tls {
            None => {
                let _ = http.serve_connection(TokioIo::new(stream), answers).await;
            }
            Some(tls) => {
                if let Ok(stream) = tls.accept(stream).await {
                    let _ = http.serve_connection(TokioIo::new(stream), answers).await;
                }
            }
        }
    }
}

/// A TLS server with a self-signed certificate.
fn self_signed() -> TlsAcceptor {
    let certified = rcgen::generate_simple_self_signed(vec!["keys.test".to_owned()]).expect("the certificate is valid");
    let key =
        rustls::pki_types::PrivateKeyDer::try_from(certified.signing_key.serialize_der()).expect("the key is valid");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the default versions are supported")
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .expect("the key belongs to the certificate");
    TlsAcceptor::from(Arc::new(config))
}

fn policy(rules: &[String]) -> String {
    format!(
        "apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {{name: tokens, namespace: shop}}
spec: {{jwtRules: [{}]}}
",
        rules.join(", ")
    )
}

/// Returns the status of a request to the client with this token.
fn status(fixture: &Fixture, token: Option<&str>) -> Result<u16, String> {
    let path = token.map_or("/".to_owned(), |token| format!("/?access_token={token}"));
    Ok(http::get(fixture.inbound(), "client", &path)?.status.as_u16())
}

/// Sends requests with this token until one gets the status.
fn until_status(fixture: &Fixture, what: &str, token: &str, expected: u16) -> Result<(), String> {
    wait::until(what, TIMEOUT, || {
        status(fixture, Some(token)).ok().filter(|status| *status == expected)
    })
    .map(|_| ())
}

/// Returns the entry of a key server on the debug page.
fn report(fixture: &Fixture, url: &str) -> Value {
    let page = http::get(fixture.daemon.monitoring, "istiod", "/debug/jwksz").map(|answer| answer.body);
    let page: Value = serde_json::from_str(&page.unwrap_or_default()).unwrap_or_default();
    let mut reports = page.as_array().into_iter().flatten();
    reports.find(|report| report["url"] == url).cloned().unwrap_or_default()
}

pub(super) fn are_verified_with_fetched_keys(name: &str) -> Result<(), Failed> {
    let [first, second, described, forger] = ["first", "second", "described", "first"].map(Key::new);
    let good = KeyServer::start(Some(self_signed()));
    good.set("/keys", key_set(&[&first]));
    let issuer = KeyServer::start(None);
    let issuer_name = format!("http://{}/realm", issuer.address);
    let location = json!({ "issuer": issuer_name, "jwks_uri": format!("http://{}/there", issuer.address) });
    issuer.set("/realm/.well-known/openid-configuration", location.to_string());
    issuer.set("/there", key_set(&[&described]));
    // A server that accepts connections and never answers.
    let hangs = RUNTIME
        .block_on(TcpListener::bind("127.0.0.1:0"))
        .expect("a loopback port is free");
    let hanging = format!(
        "http://{}/keys",
        hangs.local_addr().expect("a bound socket has an address")
    );
    let good_url = format!("https://{}/keys", good.address);
    let without_keys = format!("{{issuer: hangs, jwksUri: '{hanging}', timeout: 1s}}");
    let rules = [
        format!("{{issuer: good, jwksUri: '{good_url}'}}"),
        format!("{{issuer: '{issuer_name}'}}"),
        without_keys.clone(),
    ];

    let fixture = Fixture::start_with(name, &[("env.yaml", SETTINGS), ("tokens.yaml", &policy(&rules))])?;
    let sidecar = fixture.sidecar(Protocol::Delta)?;
    // The daemon becomes ready only after it has requested all keys, so no Envoy starts without them.
    assert_eq!(status(&fixture, Some(&first.token("good")))?, 200, "a valid token");
    assert_eq!(
        status(&fixture, Some(&described.token(&issuer_name)))?,
        200,
        "keys found by OpenID discovery"
    );
    assert_eq!(status(&fixture, None)?, 200, "a request without a token");
    assert_eq!(
        status(&fixture, Some(&forger.token("good")))?,
        401,
        "a token signed with another key"
    );
    assert_eq!(
        status(&fixture, Some(&first.token("hangs")))?,
        401,
        "a token of an issuer without keys"
    );
    assert_eq!(
        status(&fixture, Some(&first.token("nobody")))?,
        401,
        "a token of an unknown issuer"
    );

    rotate(&fixture, &sidecar, &good, &first, &second)?;
    last_good_keys_stay(&fixture, good, &good_url, &second)?;

    fixture.write("tokens.yaml", &policy(&[without_keys]));
    until_status(
        &fixture,
        "the policy without the good issuer",
        &second.token("good"),
        401,
    )?;
    assert_eq!(
        status(&fixture, Some(&first.token("hangs")))?,
        401,
        "the only issuer has no keys"
    );
    assert_eq!(status(&fixture, None)?, 200, "a request without a token");
    sidecar.rejected_nothing()?;
    Ok(())
}

/// New keys are used and old ones removed while another issuer's server hangs.
fn rotate(fixture: &Fixture, sidecar: &Envoy, good: &KeyServer, first: &Key, second: &Key) -> Result<(), Failed> {
    assert_eq!(
        status(fixture, Some(&second.token("good")))?,
        401,
        "a key that is not published yet"
    );
    good.set("/keys", key_set(&[first, second]));
    until_status(fixture, "the second key", &second.token("good"), 200)?;
    assert_eq!(status(fixture, Some(&first.token("good")))?, 200, "both keys are valid");
    good.set("/keys", key_set(&[second]));
    until_status(fixture, "the removal of the first key", &first.token("good"), 401)?;
    assert_eq!(
        status(fixture, Some(&second.token("good")))?,
        200,
        "only the second key is valid"
    );
    sidecar.rejected_nothing()?;
    Ok(())
}

/// The key server is gone, but its keys stay.
fn last_good_keys_stay(fixture: &Fixture, good: KeyServer, url: &str, key: &Key) -> Result<(), Failed> {
    drop(good);
    let report = wait::until("failures of the stopped server", TIMEOUT, || {
        Some(report(fixture, url)).filter(|report| report["failures"].as_u64() >= Some(2))
    })?;
    assert_eq!(report["keyIds"], json!([key.id]), "{report}");
    assert_eq!(report["wantedBy"], json!(["shop/tokens"]), "{report}");
    assert_eq!(
        status(fixture, Some(&key.token("good")))?,
        200,
        "the last valid key must stay"
    );
    fixture
        .daemon
        .process
        .until_logged(&["the last keys stay", "shop/tokens"])?;
    let metrics = http::get(fixture.daemon.monitoring, "istiod", "/metrics")?.body;
    for name in ["success", "fail"] {
        let counter = format!("pilot_jwks_resolver_network_fetch_{name}_total ");
        let counted = metrics.lines().find_map(|line| line.strip_prefix(counter.as_str()));
        assert!(counted.is_some_and(|count| count != "0"), "{counter} {counted:?}");
    }
    Ok(())
}
