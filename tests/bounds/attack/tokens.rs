//! An attack of unauthenticated clients at the secure port: calls with tokens that name the right issuer and key, so
//! that the daemon checks a signature for each.

use std::{
    convert::Infallible,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use http_body_util::Full;
use hyper::{Response, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::{io::AsyncWriteExt, net::TcpListener, task::JoinHandle};

use super::{
    super::flood::{PREFACE, field, frame, headers},
    Counts,
    clients::{repeated, until_closed},
    port::Port,
};
use crate::support::http::{RUNTIME, quietly};

const ISSUER: &str = "https://issuer.example.com";
const AUDIENCE: &str = "istio-ca";
const KEY: &str = "signing-key";
/// The length of the modulus and of signatures: RSA with 2048 bits.
const RSA_BYTES: usize = 256;
/// The part of the log line about a token whose signature was checked.
pub(super) const REFUSED: &str = "has no valid signature";

/// Serves the key set of the issuer.
pub(super) struct Issuer {
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl Issuer {
    pub(super) fn start() -> Self {
        let listener = RUNTIME
            .block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .expect("a loopback address can be bound");
        let address = listener.local_addr().expect("a bound socket has an address");
        let server = RUNTIME.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answer = service_fn(async |_| Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(key_set()))));
                let connection = hyper::server::conn::http1::Builder::new();
                RUNTIME.spawn(quietly(connection.serve_connection(TokioIo::new(stream), answer)));
            }
        });
        Self { address, server }
    }

    /// Returns the variable `JWT_RULE` for a daemon that accepts tokens of the issuer.
    pub(super) fn rule(&self) -> String {
        let keys = format!("http://{}/keys", self.address);
        json!({ "issuer": ISSUER, "audiences": [AUDIENCE], "jwks_uri": keys }).to_string()
    }
}

impl Drop for Issuer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn key_set() -> Bytes {
    // A modulus is odd and has its highest bit set.
    let modulus = URL_SAFE_NO_PAD.encode([0xc5; RSA_BYTES]);
    let key = json!({ "kty": "RSA", "use": "sig", "alg": "RS256", "kid": KEY, "n": modulus, "e": "AQAB" });
    json!({ "keys": [key] }).to_string().into()
}

/// Returns a token that is valid but for its signature.
fn token(number: usize) -> String {
    let part = |value: serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let header = part(json!({ "alg": "RS256", "kid": KEY, "typ": "JWT" }));
    let claims = part(
        json!({ "iss": ISSUER, "aud": [AUDIENCE], "exp": 4_000_000_000_u64, "jti": number.to_string(),
        "sub": "system:serviceaccount:app:web" }),
    );
    let signature = URL_SAFE_NO_PAD.encode([0x5a; RSA_BYTES]);
    format!("{header}.{claims}.{signature}")
}

/// Floods ten connections with calls, each with another forged token.
pub(super) async fn forged(port: Port, counts: Arc<Counts>) {
    repeated(&counts, || flooded(&port, &counts)).await;
}

/// Floods one connection until it is closed.
async fn flooded(port: &Port, counts: &Counts) -> std::io::Result<()> {
    let mut stream = port.open().await?;
    stream.write_all(&[PREFACE, &frame(4, 0, 0, &[])].concat()).await?;
    counts.reach();
    let (reader, writer) = tokio::io::split(stream);
    until_closed(reader, writer, call).await
}

fn call(number: usize) -> Vec<u8> {
    let authorization = field("authorization", &format!("Bearer {}", token(number)));
    frame(1, 5, 2 * number as u32 + 1, &headers(&authorization))
}
