//! Registration authority for Kubernetes signers: checks a CSR, has it signed by a CertificateSigningRequest, and
//! returns the chain.
//!
//! Note: the certificate has the names of the CSR. The own CA ignores those and writes the caller's identities; an
//! external signer does not know the caller, so a CSR with any other name is rejected here.
//!
//! Parity (security/pkg/pki/ra/k8s_ra.go).

mod check;
pub mod request;

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use ::kube::Client;
use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use smol_str::SmolStr;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, timeout_at},
};

use self::request::{CsrError, CsrSpec};
use super::{
    TrustBundle,
    authority::TtlLimits,
    bundle::{self, ExpiryCheck, PathError},
    certificate::{Certificate, CertificateError},
    channel,
    files::FileWatch,
    mesh_trust::MeshTrust,
    signing::{SignError, SignErrorKind, SignedCertificate, Signer, SigningRequest},
};
use crate::{
    auth::shares::Shares,
    base::duration,
    environment::{self, Environment},
    settings::Settings,
    task::{self, Tasks},
};

/// The value of `EXTERNAL_CA`.
const KUBERNETES: &str = "ISTIOD_RA_KUBERNETES_API";
/// The mount path of the signer's root.
const ROOTS: &str = "./etc/external-ca-cert/root-cert.pem";
/// The root of the cluster's own CA.
const CLUSTER_ROOTS: &str = "./var/run/secrets/kubernetes.io/serviceaccount/ca.crt";
/// The maximum number of concurrent CertificateSigningRequests; each has a watch at the API server.
const MAX_CONCURRENT_REQUESTS: usize = 64;
/// The maximum number of concurrent requests for one identity, which all replicas of a workload have in common. A
/// signer may take a minute, so otherwise one workload could use up [`MAX_CONCURRENT_REQUESTS`].
const MAX_REQUESTS_PER_IDENTITY: usize = 16;
/// The key usages of workload certificates.
const USAGES: &[&str] = &["digital signature", "key encipherment", "server auth", "client auth"];

/// The rules of the registration authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrationRules {
    /// `K8S_SIGNER`: the default signer; may be empty.
    pub signer: SmolStr,
    /// `CERT_SIGNER_DOMAIN`: the domain of signers that callers may name; if empty, they may not name any.
    pub domain: SmolStr,
    /// The file with the signer's roots; none: they come from the mesh config or the chain.
    pub roots: Option<PathBuf>,
    /// The signer of the serving certificate, if `PILOT_CERT_PROVIDER` names one; its root is trusted.
    pub own_signer: SmolStr,
    /// The lifetimes of certificates.
    pub limits: TtlLimits,
}

/// Invalid settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationError {
    /// Unknown external CA.
    #[error("EXTERNAL_CA={0} is not supported; hint: the only value is {KUBERNETES}")]
    UnknownCa(String),
    /// There is no cluster.
    #[error("EXTERNAL_CA={KUBERNETES} needs a Kubernetes cluster; hint: run istiod in one, or set --kubeconfig")]
    NoCluster,
}

impl RegistrationRules {
    /// Reads the settings; `None` if the own CA signs.
    pub fn of(settings: &Settings, limits: TtlLimits) -> Result<Option<Self>, RegistrationError> {
        let text = |name: &str| SmolStr::from(settings.variable(name).unwrap_or_default());
        match text("EXTERNAL_CA").as_str() {
            "" => return Ok(None),
            KUBERNETES => {}
            other => return Err(RegistrationError::UnknownCa(other.to_owned())),
        }
        let domain = text("CERT_SIGNER_DOMAIN");
        let provider = text("PILOT_CERT_PROVIDER");
        Ok(Some(Self {
            signer: text("K8S_SIGNER"),
            roots: roots_file(&domain, &Path::is_file),
            domain,
            own_signer: provider.strip_prefix("k8s.io/").unwrap_or_default().into(),
            limits,
        }))
    }

    /// Returns the full name of the signer.
    fn signer(&self, named: &str) -> Result<String, RequestError> {
        match (named, self.domain.as_str(), self.signer.as_str()) {
            ("", _, "") => Err(RequestError::NoSigner),
            ("", _, signer) => Ok(signer.to_owned()),
            (named, "", _) => Err(RequestError::NoDomain(named.to_owned())),
            (named, domain, _) if is_path_segment(named) => Ok(format!("{domain}/{named}")),
            (named, ..) => Err(RequestError::InvalidSigner(named.to_owned())),
        }
    }

    /// Returns the lifetime to request; none: the signer decides.
    fn lifetime(&self, asked: Option<Duration>) -> Result<Option<Duration>, RequestError> {
        match asked {
            Some(asked) if asked > self.limits.max => Err(RequestError::Lifetime {
                asked,
                max: self.limits.max,
            }),
            Some(Duration::ZERO) => Ok(None),
            other => Ok(other),
        }
    }
}

/// Reason why no certificate is requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum RequestError {
    /// Neither the caller nor the settings name a signer.
    #[error("the request names no signer, and K8S_SIGNER is not set")]
    NoSigner,
    /// The caller names a signer, and the settings no domain for it.
    #[error("certSignerDomain is required for signer {0}")]
    NoDomain(String),
    /// The signer may be outside the domain.
    #[error("{0:?} is not a valid signer name")]
    InvalidSigner(String),
    /// The lifetime is too long.
    #[error(
        "requested TTL {} is greater than the max allowed TTL {}",
        duration::format_seconds(*.asked),
        duration::format_seconds(*.max)
    )]
    Lifetime {
        /// The requested lifetime.
        asked: Duration,
        /// The longest one.
        max: Duration,
    },
    /// Too many requests for this identity. Retryable.
    #[error("{MAX_REQUESTS_PER_IDENTITY} signing requests for {0} are in progress; try again later")]
    IdentityBusy(String),
    /// Too many requests. Retryable.
    #[error("too many signing requests in progress; try again later")]
    Busy,
}

/// Returns true if the name is one segment of `domain/path`. A slash would let a caller select a signer outside the
/// domain.
fn is_path_segment(name: &str) -> bool {
    name.len() <= 253
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte))
}

fn roots_file(domain: &str, is_file: &dyn Fn(&Path) -> bool) -> Option<PathBuf> {
    match (is_file(Path::new(ROOTS)), domain) {
        (true, _) => Some(ROOTS.into()),
        (false, "") => Some(CLUSTER_ROOTS.into()),
        // Each signer of the domain has its own roots.
        (false, _) => None,
    }
}

/// Handles of the registration authority. Cheap to clone.
#[derive(Clone)]
pub struct Registration {
    /// Signs workload CSRs.
    pub signer: Arc<dyn Signer>,
    /// The trust bundle: the roots of the file and those of the signers in the mesh config; `None` while none is known.
    pub trust: watch::Receiver<Option<Arc<TrustBundle>>>,
}

/// Starts to watch the roots, and creates the signer.
pub fn start(
    environment: &Environment,
    rules: RegistrationRules,
    client: Option<Client>,
    mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
) -> Result<Registration, RegistrationError> {
    let client = client.ok_or(RegistrationError::NoCluster)?;
    let (files, roots) = watch::channel(None);
    if let Some(path) = rules.roots.clone() {
        let reading = watch_root_file(path, files);
        environment.tasks.spawn_until_shutdown("roots of the signer", reading);
    }
    let (out, trust) = watch::channel(None);
    let (trust_rules, trust_roots, trust_mesh) = (rules.clone(), roots.clone(), mesh.clone());
    let following = channel::combine(trust_roots, trust_mesh, out, move |roots, mesh| {
        trust_bundle(&trust_rules, roots.as_ref(), mesh.as_deref())
    });
    environment.tasks.spawn_until_shutdown("trust of the signer", following);
    let signer = KubernetesSigner {
        rules,
        client,
        tasks: environment.tasks.clone(),
        roots,
        mesh,
        permits: Permits::new(),
    };
    Ok(Registration {
        signer: Arc::new(signer),
        trust,
    })
}

/// Reason why the file with the signer's roots is not used.
#[derive(Debug, thiserror::Error)]
enum RootFileError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// One of its certificates cannot be parsed.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// It has no certificate.
    #[error("no PEM block CERTIFICATE")]
    NoCertificate,
}

fn read_root_file(path: &Path) -> Result<Bytes, RootFileError> {
    let pem = std::fs::read(path)?;
    if Certificate::all_from_pem(&pem)?.is_empty() {
        return Err(RootFileError::NoCertificate);
    }
    Ok(Bytes::from(pem))
}

/// Reads the file whenever it changes; an invalid one keeps the last roots.
async fn watch_root_file(path: PathBuf, roots: watch::Sender<Option<Bytes>>) {
    let mut watch = FileWatch::new([path.as_path()]);
    let mut last_error = String::new();
    loop {
        match read_root_file(&path) {
            Ok(pem) => {
                last_error.clear();
                task::publish(&roots, Some(pem));
            }
            Err(error) => {
                let error = error.to_string();
                if error != last_error {
                    tracing::error!(file = %path.display(), error, "signer root file is invalid");
                    last_error = error;
                }
            }
        }
        tokio::select! {
            () = watch.changed() => {}
            () = roots.closed() => return,
        }
    }
}

/// Merges the roots of the file and of the configured signers, without duplicates.
fn trust_bundle(
    rules: &RegistrationRules,
    roots: Option<&Bytes>,
    mesh: Option<&MeshTrust>,
) -> Option<Arc<TrustBundle>> {
    let signers = [&rules.own_signer, &rules.signer]
        .into_iter()
        .filter(|name| !name.is_empty());
    let named = signers.filter_map(|signer| mesh?.signer_roots(signer));
    let texts = roots.map(Bytes::as_ref).into_iter().chain(named.map(str::as_bytes));
    let mut all: Vec<Certificate> = Vec::new();
    for text in texts {
        match Certificate::all_from_pem(text) {
            Ok(certificates) => all.extend(certificates),
            Err(error) => tracing::error!(%error, "caCertificates: invalid signer roots ignored"),
        }
    }
    let mut blocks: Vec<String> = Vec::new();
    for block in all.iter().map(Certificate::pem) {
        if !blocks.contains(&block) {
            blocks.push(block);
        }
    }
    let roots = (!blocks.is_empty()).then(|| Bytes::from(blocks.concat()))?;
    let crl = Some(Bytes::new());
    Some(Arc::new(TrustBundle { roots, crl }))
}

/// A signer that uses CertificateSigningRequests.
#[doc(alias = "KubernetesRA")]
struct KubernetesSigner {
    rules: RegistrationRules,
    client: Client,
    tasks: Tasks,
    /// The file's roots.
    roots: watch::Receiver<Option<Bytes>>,
    mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
    permits: Permits,
}

/// Permits for CertificateSigningRequests.
struct Permits {
    all: Arc<Semaphore>,
    of_identities: Shares<String>,
}

impl Permits {
    fn new() -> Self {
        Self {
            all: Arc::new(Semaphore::new(MAX_CONCURRENT_REQUESTS)),
            of_identities: Shares::new(MAX_REQUESTS_PER_IDENTITY),
        }
    }

    /// Waits for the permits to request a certificate of an identity; `Err` is the reason why there are none in time.
    async fn acquire(&self, identity: &str, longest: Duration) -> Result<[OwnedSemaphorePermit; 2], RequestError> {
        let deadline = Instant::now() + longest;
        let share = timeout_at(deadline, self.of_identities.acquire(identity.to_owned())).await;
        let share = share.map_err(|_| RequestError::IdentityBusy(identity.to_owned()))?;
        match timeout_at(deadline, self.all.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok([share, permit]),
            _ => Err(RequestError::Busy),
        }
    }
}

impl Signer for KubernetesSigner {
    fn sign(&self, request: SigningRequest) -> BoxFuture<'_, Result<SignedCertificate, SignError>> {
        self.request_certificate(request).boxed()
    }
}

impl KubernetesSigner {
    async fn request_certificate(&self, request: SigningRequest) -> Result<SignedCertificate, SignError> {
        let csr = check::check(&request.csr, &request.identities).map_err(|why| {
            let text = format!("unable to validate SAN Identities in CSR: {why}");
            error(SignErrorKind::Csr, text)
        })?;
        let lifetime = self.rules.lifetime(request.lifetime);
        let spec = CsrSpec {
            csr,
            lifetime: lifetime.map_err(|why| error(SignErrorKind::Ttl, why))?,
            signer: (self.rules.signer(&request.signer)).map_err(|why| error(SignErrorKind::Generation, why))?,
            usages: USAGES,
            names: request.identities.join(","),
        };
        let signer = spec.signer.clone();
        let permits = self.permits.acquire(&spec.names, request::SIGNING_TIMEOUT).await;
        let permits = permits.map_err(|why| error(SignErrorKind::NotReady, why))?;
        let signed = request::sign(&self.client, &self.tasks, spec, permits).await;
        let chain = signed.map_err(|failure| {
            let kind = match failure {
                CsrError::ShuttingDown => SignErrorKind::NotReady,
                _ => SignErrorKind::Generation,
            };
            error(kind, failure)
        })?;
        let file = self.roots.borrow().clone();
        let mesh = self.mesh.borrow().clone();
        let known = SignerRoots {
            file: file.as_deref(),
            mesh: mesh.as_ref().and_then(|mesh| mesh.signer_roots(&signer)),
            // Parity (security/pkg/pki/ra/k8s_ra.go): only the chain of a signer that the caller named is verified.
            must_verify: !request.signer.is_empty(),
        };
        issued(&chain, &known, environment::wall_clock()).map_err(|why| error(SignErrorKind::Csr, why))
    }
}

/// The roots that a chain may end at.
struct SignerRoots<'a> {
    /// The roots of the file, as PEM. Always trusted.
    file: Option<&'a [u8]>,
    /// The signer's roots in the mesh config, as PEM.
    mesh: Option<&'a str>,
    /// True if the chain must end at one of them.
    must_verify: bool,
}

/// Reason why the chain of a signer is not accepted.
#[derive(Debug, thiserror::Error)]
enum IssuedError {
    /// One of its certificates cannot be parsed.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// It is empty.
    #[error("the signer returned no certificate")]
    Empty,
    /// One of the signer's roots in the mesh config cannot be parsed.
    #[error("caCertificates of the mesh config: {0}")]
    MeshRoots(#[source] CertificateError),
    /// The signer has no roots.
    #[error(
        "failed to find root cert from either signed cert-chain or mesh config; \
         hint: add an entry to caCertificates whose certSigners has the signer"
    )]
    NoRoot,
    /// It does not end at a root.
    #[error("root cert from signed cert-chain is invalid ({0})")]
    NoPath(#[source] PathError),
}

/// Returns the chain, and the roots unless the chain ends with them.
fn issued(chain: &str, known: &SignerRoots<'_>, now: SystemTime) -> Result<SignedCertificate, IssuedError> {
    let certificates = Certificate::all_from_pem(chain.as_bytes())?;
    let blocks = certificates.iter().map(Certificate::pem).collect();
    if let Some(file) = known.file {
        return Ok(SignedCertificate {
            chain: blocks,
            roots: String::from_utf8_lossy(file).into_owned(),
        });
    }
    let (leaf, above) = certificates.split_first().ok_or(IssuedError::Empty)?;
    let last = above
        .last()
        .filter(|last| last.is_ca && last.is_self_issued() && last.is_issued_by(last));
    let roots = match (known.mesh, last) {
        (Some(mesh), _) => Certificate::all_from_pem(mesh.as_bytes()).map_err(IssuedError::MeshRoots)?,
        (None, Some(last)) => vec![last.clone()],
        (None, None) if known.must_verify => return Err(IssuedError::NoRoot),
        (None, None) => Vec::new(),
    };
    if known.must_verify {
        bundle::path(leaf, above, &roots, now, ExpiryCheck::Enforced).map_err(IssuedError::NoPath)?;
    }
    let stands_at_the_end = matches!(roots.as_slice(), [root] if last == Some(root));
    Ok(SignedCertificate {
        chain: blocks,
        roots: if stands_at_the_end {
            String::new()
        } else {
            roots.iter().map(Certificate::pem).collect()
        },
    })
}

fn error(kind: SignErrorKind, why: impl fmt::Display) -> SignError {
    SignError {
        kind,
        text: why.to_string(),
    }
}

#[cfg(test)]
mod tests;
