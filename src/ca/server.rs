//! The gRPC service `IstioCertificateService`: signs certificates for authenticated workloads.
//!
//! The message is not read before the caller is authenticated. Many calls of one identity wait for each other, and
//! leave room for those of other identities; those that send no message delay only calls from their own address. The
//! certificate has the identities that the authenticators return; names in the CSR are ignored. Parity
//! (security/pkg/server/ca/server.go): status codes and metrics.

use std::{net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use prometheus::{IntCounter, IntCounterVec, Registry};
use prost::Message;
use prost_types::value::Kind;
use smol_str::SmolStr;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, watch};
use tonic::{Code, Status};

use super::signing::{SignError, SignErrorKind, SignedCertificate, Signer, SigningRequest};
use crate::{
    auth::{Authenticators, Caller, TrustDomains, shares::Shares},
    base::spiffe,
    metrics,
    proto::istio::v1::auth::{IstioCertificateRequest, IstioCertificateResponse},
    rpc::{Call, Unary},
};

const CREATE_CERTIFICATE: &str = "/istio.v1.auth.IstioCertificateService/CreateCertificate";
/// Fields of the metadata of a request.
const IMPERSONATED: &str = "ImpersonatedIdentity";
const CERT_SIGNER: &str = "CertSigner";
/// The maximum number of concurrent calls of authenticated callers; a call may wait for its message or a signer.
const MAX_CONCURRENT_CALLS: usize = 1024;
/// The maximum number of concurrent calls of one identity whose message has arrived, and of those from one address
/// whose message is awaited. Further calls wait. All replicas of a workload, and all ztunnels, have the same identity.
const MAX_CALLS_PER_IDENTITY: usize = 64;
/// The maximum wait.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// The maximum message size; a CSR with the largest accepted key needs a tenth of it.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// Checks whether a caller may obtain a certificate of another identity; `Err` is the reason.
pub type MayImpersonate = Box<dyn Fn(&Caller, &str) -> Result<(), String> + Send + Sync>;

/// The certificate service.
pub struct CertificateService {
    authenticators: Authenticators,
    signer: Arc<dyn Signer>,
    domains: watch::Receiver<Arc<TrustDomains>>,
    may_impersonate: MayImpersonate,
    calls: Semaphore,
    /// Calls whose message is awaited, by identity and address. Calls from one address must not delay those of other
    /// clients with the same identity.
    unread_calls: Shares<(SmolStr, Option<IpAddr>)>,
    /// Calls with a message, by identity.
    signed_calls: Shares<SmolStr>,
    metrics: Metrics,
    accepts_plaintext: bool,
}

impl CertificateService {
    /// Creates the service. Fails if a metric name is already registered.
    pub fn new(
        authenticators: Authenticators,
        signer: Arc<dyn Signer>,
        domains: watch::Receiver<Arc<TrustDomains>>,
        may_impersonate: MayImpersonate,
        registry: &Registry,
    ) -> Result<Self, prometheus::Error> {
        Ok(Self {
            authenticators,
            signer,
            domains,
            may_impersonate,
            calls: Semaphore::new(MAX_CONCURRENT_CALLS),
            unread_calls: Shares::new(MAX_CALLS_PER_IDENTITY),
            signed_calls: Shares::new(MAX_CALLS_PER_IDENTITY),
            metrics: Metrics::new(registry)?,
            accepts_plaintext: false,
        })
    }

    /// Returns the same service, which also authenticates callers without TLS if this is true (`XDS_AUTH_PLAINTEXT`).
    #[must_use]
    pub fn accepting_plaintext(mut self, accepts_plaintext: bool) -> Self {
        self.accepts_plaintext = accepts_plaintext;
        self
    }

    async fn create(&self, mut call: Call) -> Result<Bytes, Status> {
        self.metrics.requests.inc();
        let caller = self.caller(&mut call).await?;
        let identity = caller.identities.first().cloned().unwrap_or_default();
        let (message, _permit) = self.message(&mut call, &identity).await?;
        let _share = share(&self.signed_calls, identity).await?;
        let request = IstioCertificateRequest::decode(message).map_err(|error| {
            self.metrics.unreadable.inc();
            Status::invalid_argument(format!("the request cannot be decoded: {error}"))
        })?;
        let identities = self.identities(&caller, text(&request, IMPERSONATED))?;
        let request = SigningRequest {
            identities,
            lifetime: lifetime(request.validity_duration),
            signer: text(&request, CERT_SIGNER).into(),
            csr: request.csr.into_bytes(),
        };
        match self.signer.sign(request).await {
            Ok(issued) => {
                self.metrics.issued.inc();
                Ok(response(issued).encode_to_vec().into())
            }
            Err(error) => Err(self.failed(&caller, &error)),
        }
    }

    async fn caller(&self, call: &mut Call) -> Result<Caller, Status> {
        let credentials = call.credentials();
        // Parity (pkg/security/authentication.go): callers without TLS are not authenticated, whatever they show.
        if !credentials.is_tls && !self.accepts_plaintext {
            self.metrics.unauthenticated.inc();
            call.record_violation();
            tracing::warn!(
                address = ?credentials.address,
                "certificate request without TLS denied; hint: set XDS_AUTH_PLAINTEXT if a trusted proxy terminates TLS"
            );
            return Err(Status::unauthenticated("request authenticate failure"));
        }
        match self.authenticators.authenticate(credentials).await {
            Ok(caller) if !caller.identities.is_empty() => {
                call.admit();
                Ok(caller)
            }
            Ok(_) => {
                self.metrics.nameless.inc();
                call.record_violation();
                Err(Status::unauthenticated("request authenticate failure"))
            }
            Err(refused) => {
                self.metrics.unauthenticated.inc();
                if !refused.is_unavailable() {
                    call.record_violation();
                }
                tracing::warn!(address = ?credentials.address, %refused, "client authentication failed");
                Err(if refused.is_unavailable() {
                    Status::unavailable(
                        "request authenticate failure: the authentication backend is unavailable; retry",
                    )
                } else {
                    Status::unauthenticated("request authenticate failure")
                })
            }
        }
    }

    /// Reads the message. Returns it with a permit of the call.
    async fn message(&self, call: &mut Call, identity: &SmolStr) -> Result<(Bytes, SemaphorePermit<'_>), Status> {
        let address = call.credentials().address.map(|address| address.ip());
        let _share = share(&self.unread_calls, (identity.clone(), address)).await?;
        let permit = self.calls.try_acquire();
        let permit = permit.map_err(|_| exhausted(MAX_CONCURRENT_CALLS, ""))?;
        Ok((call.message(MAX_REQUEST_BYTES).await?, permit))
    }

    /// Returns the identities of the certificate.
    fn identities(&self, caller: &Caller, impersonated: &str) -> Result<Vec<SmolStr>, Status> {
        if impersonated.is_empty() {
            return self.own_identities(caller);
        }
        match (self.may_impersonate)(caller, impersonated) {
            Ok(()) => Ok(vec![impersonated.into()]),
            Err(why) => {
                self.metrics.unauthenticated.inc();
                tracing::warn!(caller = ?caller.identities, impersonated, why, "impersonation denied");
                Err(Status::unauthenticated("request impersonation authentication failure"))
            }
        }
    }

    /// Returns the caller's own identities. A trusted gateway may forward those of another trust domain, which this CA
    /// must not certify.
    fn own_identities(&self, caller: &Caller) -> Result<Vec<SmolStr>, Status> {
        let domains = self.domains.borrow().clone();
        let is_foreign = |name: &&SmolStr| spiffe::trust_domain(name).is_some_and(|domain| !domains.contains(domain));
        let Some(foreign) = caller.identities.iter().find(is_foreign) else {
            return Ok(caller.identities.clone());
        };
        self.metrics.unauthenticated.inc();
        tracing::warn!(%foreign, "certificate request from another trust domain denied");
        Err(Status::unauthenticated("request authenticate failure"))
    }

    fn failed(&self, caller: &Caller, error: &SignError) -> Status {
        tracing::warn!(caller = ?caller.identities, %error, "certificate signing failed");
        self.metrics.failed.with_label_values(&[error.kind.label()]).inc();
        let code = match error.kind {
            SignErrorKind::Csr => {
                self.metrics.unreadable.inc();
                Code::InvalidArgument
            }
            SignErrorKind::Ttl => Code::InvalidArgument,
            SignErrorKind::NotReady | SignErrorKind::Generation => Code::Internal,
        };
        Status::new(code, error.to_string())
    }
}

impl Unary for CertificateService {
    fn path(&self) -> &'static str {
        CREATE_CERTIFICATE
    }

    fn call(&self, call: Call) -> BoxFuture<'_, Result<Bytes, Status>> {
        self.create(call).boxed()
    }
}

/// Waits for a permit of a caller.
async fn share<K: Ord>(shares: &Shares<K>, caller: K) -> Result<OwnedSemaphorePermit, Status> {
    let share = tokio::time::timeout(LONGEST_WAIT, shares.acquire(caller)).await;
    share.map_err(|_| exhausted(MAX_CALLS_PER_IDENTITY, " of this identity"))
}

fn exhausted(calls: usize, whose: &str) -> Status {
    let message = format!("{calls} certificate requests{whose} are in progress; retry in some seconds");
    Status::resource_exhausted(message)
}

/// Returns a string field of the metadata; else empty.
fn text<'a>(request: &'a IstioCertificateRequest, field: &str) -> &'a str {
    let value = request
        .metadata
        .as_ref()
        .and_then(|metadata| metadata.fields.get(field));
    match value.and_then(|value| value.kind.as_ref()) {
        Some(Kind::StringValue(text)) => text,
        _ => "",
    }
}

/// Converts the requested lifetime; zero or negative means the default.
fn lifetime(seconds: i64) -> Option<Duration> {
    u64::try_from(seconds)
        .ok()
        .filter(|seconds| *seconds > 0)
        .map(Duration::from_secs)
}

/// Builds the response. Clients expect all roots in the last entry.
fn response(issued: SignedCertificate) -> IstioCertificateResponse {
    let mut cert_chain = issued.chain;
    cert_chain.extend(Some(issued.roots).filter(|roots| !roots.is_empty()));
    IstioCertificateResponse { cert_chain }
}

struct Metrics {
    requests: IntCounter,
    unauthenticated: IntCounter,
    unreadable: IntCounter,
    nameless: IntCounter,
    failed: IntCounterVec,
    issued: IntCounter,
}

impl Metrics {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str| metrics::counter(registry, name, help);
        Ok(Self {
            requests: counter("citadel_server_csr_count", "Certificate requests received.")?,
            unauthenticated: counter(
                "citadel_server_authentication_failure_count",
                "Certificate requests with failed authentication or denied impersonation.",
            )?,
            unreadable: counter(
                "citadel_server_csr_parsing_err_count",
                "Certificate requests that could not be parsed.",
            )?,
            nameless: counter(
                "citadel_server_id_extraction_err_count",
                "Certificate requests from callers without an identity.",
            )?,
            failed: metrics::counters(
                registry,
                "citadel_server_csr_sign_err_count",
                "Certificate requests that failed to be signed, by error type.",
                &["error"],
            )?,
            issued: counter("citadel_server_success_cert_issuance_count", "Certificates issued.")?,
        })
    }
}

#[cfg(test)]
mod tests;
