//! A CertificateSigningRequest of Kubernetes: created, approved, awaited, and deleted in any case.

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

/// How long a signer may take.
pub const SIGNING_TIMEOUT: Duration = Duration::from_mins(1);
/// How long the object's deletion may take.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);
/// The wait before a broken watch is begun anew.
const WATCH_RETRY_DELAY: Duration = Duration::from_millis(500);
/// What all names begin with.
const NAME_PREFIX: &str = "csr-workload-";

/// What is asked of a signer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsrSpec {
    /// The certificate signing request, as PEM.
    pub csr: String,
    /// The signer's full name.
    pub signer: String,
    /// What the certificate is for.
    pub usages: &'static [&'static str],
    /// How long it is to hold; none: as long as the signer likes.
    pub lifetime: Option<Duration>,
    /// The names in the certificate, for the message of the approval.
    pub names: String,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CsrError {
    /// The API server refused, or could not be asked.
    #[error("cannot {action} a CertificateSigningRequest for signer {signer}: {error}; hint: {hint}")]
    Kubernetes {
        /// What was tried.
        action: &'static str,
        /// The signer.
        signer: String,
        /// What the API server says.
        error: Box<::kube::Error>,
        /// What may be wrong.
        hint: &'static str,
    },
    /// Somebody denied it, or the signer failed; not worth repeating at once.
    #[error("CertificateSigningRequest {name} was not signed: {reason}")]
    Refused {
        /// The object.
        name: String,
        /// What its conditions say.
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
    /// The signer is at fault.
    #[error("signer {signer} answered with something that is no certificate")]
    NoCertificate {
        /// The signer.
        signer: String,
    },
    /// The process ends.
    #[error("the control plane is shutting down")]
    ShuttingDown,
}

/// Has an order signed; the chain comes as PEM, leaf first. The object is deleted even if the caller stops waiting.
pub async fn sign(client: &Client, tasks: &Tasks, spec: CsrSpec) -> Result<String, CsrError> {
    let (sender, signed) = oneshot::channel();
    let (client, shutdown) = (client.clone(), tasks.shutdown().clone());
    tasks.spawn("certificate signing request", async move {
        let api: Api<CertificateSigningRequest> = Api::all(client);
        let ending = shutdown.cancelled();
        let result = create_and_wait(&api, &spec, ending).await;
        // Whoever asked may be gone.
        let _ = sender.send(result);
    });
    signed.await.unwrap_or(Err(CsrError::ShuttingDown))
}

async fn create_and_wait(
    api: &Api<CertificateSigningRequest>,
    spec: &CsrSpec,
    ending: impl Future<Output = ()>,
) -> Result<String, CsrError> {
    let created = api
        .create(&PostParams::default(), &object(spec))
        .await
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
        // Others clear up too.
        Ok(Err(::kube::Error::Api(status))) if status.code == 404 => {}
        Ok(Err(error)) => tracing::warn!(name, %error, "a CertificateSigningRequest could not be deleted"),
        Err(_) => tracing::warn!(name, "a CertificateSigningRequest could not be deleted in time"),
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
    let body = serde_json::to_value(&object).expect("an object of strings and numbers is JSON");
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
        // Nothing is missed: the watch begins behind the version that was looked at.
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

/// Watches until the certificate is there; nothing if the watch broke.
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

/// The certificate in an object, if it is there yet.
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
                "the ClusterRole has to allow certificatesigningrequests, their approval, and `approve` of the signer"
            } else {
                "is the API server there?"
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
    fn objects_say_what_is_ordered() {
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
        let params = rcgen::CertificateParams::new(vec!["a.b".to_owned()]).expect("names");
        let chain = params.self_signed(&key).expect("a certificate").pem();
        assert_eq!(look(&signed(&chain, "Approved")).expect("a chain"), Some(chain));
    }
}
