//! The lifecycle of a Kubernetes CertificateSigningRequest: create, approve, wait, and always delete.
//!
//! Parity (security/pkg/k8s/chiron/utils.go).

use std::time::Duration;

use ::kube::{
    Api, Client,
    api::{DeleteParams, PostParams, WatchEvent, WatchParams},
};
use futures::TryStreamExt;
use k8s_openapi::{
    ByteString,
    api::certificates::v1::{
        CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};

use crate::task::Tasks;

/// The signing timeout.
pub const SIGNING_TIMEOUT: Duration = Duration::from_mins(1);
/// The timeout of the deletion.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);
/// The delay before a broken watch is restarted.
const WATCH_RETRY_DELAY: Duration = Duration::from_millis(500);
/// The `generateName` of the objects.
const NAME_PREFIX: &str = "csr-workload-";

/// The parameters of a CertificateSigningRequest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsrSpec {
    /// The certificate signing request, as PEM.
    pub csr: String,
    /// The signer's full name.
    pub signer: String,
    /// The key usages.
    pub usages: &'static [&'static str],
    /// The requested lifetime; none: the signer decides.
    pub lifetime: Option<Duration>,
    /// The names in the certificate, for the approval message.
    pub names: String,
}

/// A failed signing.
#[derive(Debug, thiserror::Error)]
pub enum CsrError {
    /// The API server rejected the request, or is unavailable.
    #[error("cannot {action} a CertificateSigningRequest for signer {signer}: {error}; hint: {hint}")]
    Kubernetes {
        /// The attempted action.
        action: &'static str,
        /// The signer.
        signer: String,
        /// The API error.
        error: Box<::kube::Error>,
        /// A hint at the cause.
        hint: &'static str,
    },
    /// The request was denied, or signing failed. Not retryable at once.
    #[error("CertificateSigningRequest {name} was not signed: {reason}")]
    Refused {
        /// The object.
        name: String,
        /// The reason in its conditions.
        reason: String,
    },
    /// Retryable.
    #[error(
        "signer {signer} did not sign CertificateSigningRequest {name} within {} s; hint: is the signer's controller running?",
        SIGNING_TIMEOUT.as_secs()
    )]
    Timeout {
        /// The object.
        name: String,
        /// The signer.
        signer: String,
    },
    /// The signer returned an invalid certificate.
    #[error("signer {signer} returned an invalid certificate")]
    NoCertificate {
        /// The signer.
        signer: String,
    },
    /// The process is shutting down.
    #[error("the control plane is shutting down")]
    ShuttingDown,
}

/// Has a CSR signed and returns the chain as PEM, leaf first. The object is deleted even if the caller stops waiting.
/// `permits` are held until then, so that callers that go away do not exceed a limit.
pub async fn sign(
    client: &Client,
    tasks: &Tasks,
    spec: CsrSpec,
    permits: impl Send + 'static,
) -> Result<String, CsrError> {
    let (sender, signed) = oneshot::channel();
    let (client, shutdown) = (client.clone(), tasks.shutdown().clone());
    tasks.spawn("certificate signing request", async move {
        let api: Api<CertificateSigningRequest> = Api::all(client);
        let ending = shutdown.cancelled();
        let result = create_and_wait(&api, &spec, ending).await;
        drop(permits);
        // The caller may have stopped waiting.
        let _ = sender.send(result);
    });
    signed.await.unwrap_or(Err(CsrError::ShuttingDown))
}

async fn create_and_wait(
    api: &Api<CertificateSigningRequest>,
    spec: &CsrSpec,
    ending: impl Future<Output = ()>,
) -> Result<String, CsrError> {
    let created = timeout(SIGNING_TIMEOUT, api.create(&PostParams::default(), &object(spec)))
        .await
        .unwrap_or_else(|elapsed| Err(::kube::Error::Service(elapsed.into())))
        .map_err(|error| spec.failed("create", error))?;
    let name = created.metadata.name.clone().unwrap_or_default();
    let waiting = timeout(SIGNING_TIMEOUT, approve_and_wait(api, spec, created));
    let result = tokio::select! {
        result = waiting => result.unwrap_or_else(|_| Err(CsrError::Timeout {
            name: name.clone(),
            signer: spec.signer.clone(),
        })),
        () = ending => Err(CsrError::ShuttingDown),
    };
    match timeout(CLEANUP_TIMEOUT, api.delete(&name, &DeleteParams::default())).await {
        Ok(Ok(_)) => {}
        // Kubernetes removes old objects too.
        Ok(Err(::kube::Error::Api(status))) if status.code == 404 => {}
        Ok(Err(error)) => tracing::warn!(name, %error, "CertificateSigningRequest deletion failed"),
        Err(_) => tracing::warn!(name, "CertificateSigningRequest deletion timed out"),
    }
    result
}

fn object(spec: &CsrSpec) -> CertificateSigningRequest {
    CertificateSigningRequest {
        metadata: ObjectMeta {
            generate_name: Some(NAME_PREFIX.into()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(spec.csr.clone().into_bytes()),
            signer_name: spec.signer.clone(),
            usages: Some(spec.usages.iter().map(ToString::to_string).collect()),
            expiration_seconds: spec.lifetime.map(seconds),
            ..CertificateSigningRequestSpec::default()
        },
        ..CertificateSigningRequest::default()
    }
}

fn seconds(lifetime: Duration) -> i32 {
    i32::try_from(lifetime.as_secs()).unwrap_or(i32::MAX)
}

async fn approve_and_wait(
    api: &Api<CertificateSigningRequest>,
    spec: &CsrSpec,
    mut object: CertificateSigningRequest,
) -> Result<String, CsrError> {
    let name = object.metadata.name.clone().unwrap_or_default();
    let message = format!("CSR ({name}) for the certificate ({}) is approved", spec.names);
    object
        .status
        .get_or_insert_default()
        .conditions
        .get_or_insert_default()
        .push(CertificateSigningRequestCondition {
            type_: "Approved".into(),
            status: "True".into(),
            reason: Some(message.clone()),
            message: Some(message),
            ..CertificateSigningRequestCondition::default()
        });
    let body = serde_json::to_value(&object).expect("because strings and numbers are valid JSON");
    let mut object: CertificateSigningRequest = api
        .replace_subresource("approval", &name, &PostParams::default(), &body)
        .await
        .map_err(|error| spec.failed("approve", error))?;
    let parameters = WatchParams::default()
        .fields(&format!("metadata.name={name}"))
        .timeout(SIGNING_TIMEOUT.as_secs() as u32);
    loop {
        if let Some(chain) = certificate(spec, &name, &object)? {
            return Ok(chain);
        }
        // The watch starts at the inspected version, so no change is missed.
        let version = object.metadata.resource_version.clone().unwrap_or_default();
        if let Some(chain) = watched(api, spec, &name, &parameters, &version).await? {
            return Ok(chain);
        }
        sleep(WATCH_RETRY_DELAY).await;
        if let Ok(now) = api.get(&name).await {
            object = now;
        }
    }
}

/// Watches until the certificate is issued; `None` if the watch broke.
async fn watched(
    api: &Api<CertificateSigningRequest>,
    spec: &CsrSpec,
    name: &str,
    parameters: &WatchParams,
    version: &str,
) -> Result<Option<String>, CsrError> {
    let Ok(events) = api.watch(parameters, version).await else {
        return Ok(None);
    };
    let mut events = std::pin::pin!(events);
    while let Ok(Some(event)) = events.try_next().await {
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                if let Some(chain) = certificate(spec, name, &object)? {
                    return Ok(Some(chain));
                }
            }
            WatchEvent::Deleted(_) => {
                return Err(CsrError::Refused {
                    name: name.to_owned(),
                    reason: "it was deleted".into(),
                });
            }
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(_) => return Ok(None),
        }
    }
    Ok(None)
}

/// Returns the certificate of an object, once issued.
fn certificate(spec: &CsrSpec, name: &str, object: &CertificateSigningRequest) -> Result<Option<String>, CsrError> {
    let Some(status) = &object.status else { return Ok(None) };
    let conditions = status.conditions.as_deref().unwrap_or_default();
    let refusal = conditions
        .iter()
        .find(|condition| matches!(condition.type_.as_str(), "Denied" | "Failed"));
    if let Some(refusal) = refusal {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        return Err(CsrError::Refused {
            name: name.to_owned(),
            reason: format!(
                "{}: {} {}",
                refusal.type_,
                text(&refusal.reason),
                text(&refusal.message)
            ),
        });
    }
    let Some(chain) = status.certificate.as_ref().filter(|chain| !chain.0.is_empty()) else {
        return Ok(None);
    };
    let mut certificates = CertificateDer::pem_slice_iter(&chain.0);
    let is_chain = matches!(certificates.next(), Some(Ok(_))) && certificates.all(|certificate| certificate.is_ok());
    match String::from_utf8(chain.0.clone()) {
        Ok(text) if is_chain => Ok(Some(text)),
        _ => Err(CsrError::NoCertificate {
            signer: spec.signer.clone(),
        }),
    }
}

impl CsrSpec {
    fn failed(&self, action: &'static str, error: ::kube::Error) -> CsrError {
        let forbidden = matches!(&error, ::kube::Error::Api(status) if status.code == 403);
        CsrError::Kubernetes {
            action,
            signer: self.signer.clone(),
            error: Box::new(error),
            hint: if forbidden {
                "the ClusterRole must allow certificatesigningrequests, their approval, and `approve` on the signer"
            } else {
                "check that the API server is available"
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::certificates::v1::CertificateSigningRequestStatus;

    use super::*;

    fn spec() -> CsrSpec {
        CsrSpec {
            csr: "csr".into(),
            signer: "example.com/mesh".into(),
            usages: &["server auth"],
            lifetime: Some(Duration::from_hours(1)),
            names: "a.b".into(),
        }
    }

    fn signed(chain: &str, condition: &str) -> CertificateSigningRequest {
        CertificateSigningRequest {
            status: Some(CertificateSigningRequestStatus {
                certificate: Some(ByteString(chain.into())),
                conditions: Some(vec![CertificateSigningRequestCondition {
                    type_: condition.into(),
                    status: "True".into(),
                    reason: Some("Because".into()),
                    ..CertificateSigningRequestCondition::default()
                }]),
            }),
            ..CertificateSigningRequest::default()
        }
    }

    #[test]
    fn requests_contain_csr_signer_and_lifetime() {
        let object = object(&spec());
        assert_eq!(object.metadata.generate_name.as_deref(), Some("csr-workload-"));
        assert_eq!(object.spec.expiration_seconds, Some(3600));
        assert_eq!(object.spec.usages, Some(vec!["server auth".to_owned()]));
        assert_eq!(seconds(Duration::MAX), i32::MAX);
        let unlimited = super::object(&CsrSpec {
            lifetime: None,
            ..spec()
        });
        assert_eq!(unlimited.spec.expiration_seconds, None);
    }

    #[test]
    fn certificates_are_waited_for() {
        let look = |object: &CertificateSigningRequest| certificate(&spec(), "csr-workload-x", object);
        assert!(matches!(look(&CertificateSigningRequest::default()), Ok(None)));
        assert!(matches!(look(&signed("", "Approved")), Ok(None)));
        let refused = look(&signed("", "Denied")).expect_err("a denial").to_string();
        assert!(
            refused.contains("csr-workload-x") && refused.contains("Because"),
            "{refused}"
        );
        assert!(matches!(look(&signed("", "Failed")), Err(CsrError::Refused { .. })));
        assert!(matches!(
            look(&signed("nonsense", "Approved")),
            Err(CsrError::NoCertificate { .. })
        ));
        let key = rcgen::KeyPair::generate().expect("a key");
        let params = rcgen::CertificateParams::new(vec!["a.b".to_owned()]).expect("valid names");
        let chain = params.self_signed(&key).expect("a certificate").pem();
        assert_eq!(look(&signed(&chain, "Approved")).expect("a chain"), Some(chain));
    }
}
