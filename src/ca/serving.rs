//! The serving certificate of the control plane: from files, the mesh's CA, or a Kubernetes signer.
//!
//! Note: a failure never removes a certificate. Unreadable files and failing signers leave the last one in use and are
//! retried. Parity (pilot/pkg/bootstrap/certcontroller.go, pilot/pkg/bootstrap/server.go).

mod material;

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use ::kube::Client;
use bytes::Bytes;
use smol_str::{SmolStr, format_smolstr};
use tokio::{sync::watch, task::JoinError, time::sleep};

pub use self::material::{ChainError, KeyError, MaterialError, certificate};
use super::{
    TrustBundle,
    authority::Authority,
    channel::{self, changed},
    files::FileWatch,
    mesh_trust::MeshTrust,
    registration::request::{self, CsrError},
    signing::SignError,
};
use crate::{
    auth::tls::ServingCertificate,
    base::{Sensitive, duration},
    environment::{self, Environment},
    settings::Settings,
    task::Tasks,
};

/// The default mount paths, without flags.
const MOUNTED: &str = "./var/run/secrets/istiod/tls/tls.crt";
const MOUNTED_KEY: &str = "./var/run/secrets/istiod/tls/tls.key";
const MOUNTED_ROOTS: [&str; 2] = [
    "./var/run/secrets/istiod/ca/root-cert.pem",
    "./var/run/secrets/istiod/tls/ca.crt",
];
/// The prefix of `PILOT_CERT_PROVIDER` for a Kubernetes signer.
const SIGNER_PREFIX: &str = "k8s.io/";
/// The default lifetime: ten years, like the self-signed root (`CITADEL_SELF_SIGNED_CA_CERT_TTL`).
const LIFETIME: Duration = Duration::from_hours(87_600);
/// The first backoff after a failure; it doubles.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_mins(1);
/// The interval at which the wall clock is polled. A timer does not suffice: clocks are adjusted, and machines sleep.
const CLOCK_POLL_INTERVAL: Duration = Duration::from_mins(1);
/// The key usages of a certificate of a Kubernetes signer.
const USAGES: &[&str] = &["digital signature", "key encipherment", "server auth"];

/// The source of the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServingSource {
    /// Files named by flags, or at the default mount paths.
    Files(ServingFiles),
    /// The mesh's own CA.
    Authority,
    /// A Kubernetes signer.
    Kubernetes {
        /// Its name.
        signer: SmolStr,
    },
    /// None: TLS is not served.
    None,
}

/// The files of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServingFiles {
    /// The chain, leaf first (`--tlsCertFile`).
    pub certificate: PathBuf,
    /// Its key (`--tlsKeyFile`).
    pub key: PathBuf,
    /// The roots for clients (`--caCertFile`).
    pub roots: PathBuf,
}

/// The rules of the serving certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServingRules {
    /// The source.
    pub source: ServingSource,
    /// The DNS names, besides the host of the mesh's discovery address.
    pub names: BTreeSet<SmolStr>,
    /// The maximum lifetime.
    pub lifetime: Duration,
}

/// Invalid settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServingError {
    /// Kubernetes removed this signer.
    #[error(
        "PILOT_CERT_PROVIDER=kubernetes is not possible: Kubernetes does not sign such certificates any more; \
         hint: use istiod, or k8s.io/ and the name of a signer"
    )]
    LegacyProvider,
}

impl ServingRules {
    /// Reads the settings. `serves_ca` is `ENABLE_CA_SERVER`.
    pub fn of(settings: &Settings, namespace: &str, revision: &str, serves_ca: bool) -> Result<Self, ServingError> {
        let lifetime = match settings
            .variable("CITADEL_SELF_SIGNED_CA_CERT_TTL")
            .map(duration::parse)
        {
            Some(Ok(lifetime)) if !lifetime.is_zero() => lifetime,
            _ => LIFETIME,
        };
        Ok(Self {
            source: source(settings, serves_ca, &Path::is_file)?,
            names: names(
                namespace,
                revision,
                settings.variable("ISTIOD_CUSTOM_HOST").unwrap_or_default(),
            ),
            lifetime,
        })
    }

    /// All DNS names, sorted.
    fn all_names(&self, discovery_host: &SmolStr) -> Vec<SmolStr> {
        let mut names = self.names.clone();
        if !discovery_host.is_empty() {
            names.insert(discovery_host.clone());
        }
        names.into_iter().collect()
    }
}

/// Returns the source: flags, then mounted files, then `PILOT_CERT_PROVIDER`.
fn source(
    settings: &Settings,
    serves_ca: bool,
    is_file: &dyn Fn(&Path) -> bool,
) -> Result<ServingSource, ServingError> {
    let flags = &settings.flags;
    let flags = [&flags.tls_cert_file, &flags.tls_key_file, &flags.ca_cert_file]
        .map(|file| file.clone().filter(|file| !file.as_os_str().is_empty()));
    if let [Some(certificate), Some(key), Some(roots)] = flags {
        return Ok(ServingSource::Files(ServingFiles {
            certificate,
            key,
            roots,
        }));
    }
    // Parity (pilot/pkg/bootstrap/server.go): the flags are used only if all three are set.
    if flags.iter().any(Option::is_some) {
        tracing::warn!("--tlsCertFile, --tlsKeyFile and --caCertFile are ignored unless all three are set");
    }
    let (certificate, key) = (Path::new(MOUNTED), Path::new(MOUNTED_KEY));
    let roots = MOUNTED_ROOTS.into_iter().map(Path::new).find(|path| is_file(path));
    if let Some(roots) = roots.filter(|_| is_file(certificate) && is_file(key)) {
        return Ok(ServingSource::Files(ServingFiles {
            certificate: certificate.into(),
            key: key.into(),
            roots: roots.into(),
        }));
    }
    let provider = settings.variable("PILOT_CERT_PROVIDER").unwrap_or("istiod");
    match (provider, provider.strip_prefix(SIGNER_PREFIX)) {
        // Parity (pilot/pkg/bootstrap/server.go, maybeCreateCA): also beside a signer of workload certificates.
        ("istiod", _) if serves_ca => Ok(ServingSource::Authority),
        ("kubernetes", _) => Err(ServingError::LegacyProvider),
        (_, Some(signer)) if !signer.is_empty() => Ok(ServingSource::Kubernetes { signer: signer.into() }),
        _ => {
            tracing::warn!(
                provider,
                serves_ca,
                "no serving certificate source, TLS is not served; \
                 hint: PILOT_CERT_PROVIDER is istiod (with ENABLE_CA_SERVER), or k8s.io/ and the name of a signer"
            );
            Ok(ServingSource::None)
        }
    }
}

/// Returns the DNS names of the control plane, besides its discovery address.
fn names(namespace: &str, revision: &str, custom_hosts: &str) -> BTreeSet<SmolStr> {
    let mut services: Vec<SmolStr> = ["istiod", "istiod-remote", "istio-pilot"].map(SmolStr::new).to_vec();
    if !matches!(revision, "" | "default") {
        services.push(format_smolstr!("istiod-{revision}"));
    }
    let known = services
        .into_iter()
        .map(|service| format_smolstr!("{service}.{namespace}.svc"));
    let custom = custom_hosts.split(',').map(str::trim).filter(|host| !host.is_empty());
    known.chain(custom.map(SmolStr::new)).collect()
}

/// The inputs of the serving certificate.
pub struct ServingInputs {
    /// The mesh's own CA; none while there is none.
    pub authority: watch::Receiver<Option<Arc<Authority>>>,
    /// The trust bundle of that CA.
    pub trust: watch::Receiver<Option<Arc<TrustBundle>>>,
    /// The trust settings of the mesh config.
    pub mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
    /// The config cluster, for Kubernetes signers.
    pub client: Option<Client>,
}

/// The current serving certificate; `None` until there is one. The sender is dropped if there will never be one.
pub type ServingReceiver = watch::Receiver<Option<Arc<ServingCertificate>>>;

/// Starts to maintain the certificate.
pub fn start(environment: &Environment, rules: ServingRules, inputs: ServingInputs) -> ServingReceiver {
    let (out, serving) = watch::channel(None);
    let tasks = &environment.tasks;
    let clock = Clock {
        now: environment::wall_clock,
        poll_interval: CLOCK_POLL_INTERVAL,
    };
    match rules.source.clone() {
        ServingSource::Files(files) => {
            tasks.spawn_until_shutdown("own certificate", follow_files(files, clock, out));
        }
        ServingSource::Authority => {
            let following = follow_authority(rules, inputs, clock, out);
            tasks.spawn_until_shutdown("own certificate", following);
        }
        ServingSource::Kubernetes { signer } => match inputs.client {
            Some(client) => {
                let signer_client = SignerClient {
                    client,
                    tasks: tasks.clone(),
                    signer,
                };
                let following = follow_signer(rules, signer_client, inputs.mesh, clock, out);
                tasks.spawn_until_shutdown("own certificate", following);
            }
            None => tracing::error!(
                %signer,
                "PILOT_CERT_PROVIDER names a Kubernetes signer but there is no cluster, TLS is not served"
            ),
        },
        ServingSource::None => {}
    }
    serving
}

/// Returns the roots that clients verify the control plane with. A certificate of another CA has its own roots.
pub fn published_trust(
    environment: &Environment,
    rules: &ServingRules,
    serving: ServingReceiver,
    trust: watch::Receiver<Option<Arc<TrustBundle>>>,
) -> watch::Receiver<Option<Arc<TrustBundle>>> {
    if matches!(rules.source, ServingSource::Authority | ServingSource::None) {
        return trust;
    }
    let (out, published) = watch::channel(None);
    let publishing = channel::combine(serving, trust, out, |serving, trust| {
        published_now(serving.as_deref(), trust.as_deref())
    });
    environment
        .tasks
        .spawn_until_shutdown("roots of the serving certificate", publishing);
    published
}

fn published_now(serving: Option<&ServingCertificate>, trust: Option<&TrustBundle>) -> Option<Arc<TrustBundle>> {
    let roots = serving?.roots.clone();
    let crl = trust.and_then(|trust| trust.crl.clone());
    Some(Arc::new(TrustBundle { roots, crl }))
}

/// A wall clock and its poll interval.
#[derive(Clone, Copy)]
struct Clock {
    now: fn() -> SystemTime,
    poll_interval: Duration,
}

type ServingSender = watch::Sender<Option<Arc<ServingCertificate>>>;

fn publish(out: &ServingSender, certificate: ServingCertificate, from: &str) {
    let expires_at = time::OffsetDateTime::from(certificate.expires_at);
    tracing::info!(from, %expires_at, "serving certificate changed");
    out.send_replace(Some(Arc::new(certificate)));
}

/// Returns the time until renewal at half of the lifetime; zero if overdue.
fn time_until_renewal(issued_at: SystemTime, expires_at: SystemTime, now: SystemTime) -> Duration {
    let life = expires_at.duration_since(issued_at).unwrap_or_default();
    (issued_at + life / 2).duration_since(now).unwrap_or_default()
}

fn retry_after(failures: u32) -> Duration {
    (RETRY_MIN * 2_u32.saturating_pow(failures.min(10))).min(RETRY_MAX)
}

async fn follow_files(files: ServingFiles, clock: Clock, out: ServingSender) {
    let paths = [&files.certificate, &files.key, &files.roots];
    let mut watch = FileWatch::new(paths.map(PathBuf::as_path));
    let (mut loaded, mut last_error) = (None, String::new());
    loop {
        let read = files.read();
        // A failure is retried, since time may have made the certificate valid.
        if read.is_err() || loaded.as_ref() != read.as_ref().ok() {
            match read.and_then(|contents| Ok((files.certificate_of(&contents, (clock.now)())?, contents))) {
                Ok((certificate, contents)) => {
                    publish(&out, certificate, "files");
                    (loaded, last_error) = (Some(contents), String::new());
                }
                Err(error) => {
                    let error = error.to_string();
                    if error != last_error {
                        tracing::error!(error, "failed to load serving certificate, keeping the last one");
                        last_error = error;
                    }
                }
            }
        }
        watch.changed().await;
    }
}

/// Unusable files. Retryable: their content may change, and time may make a certificate valid.
#[derive(Debug, thiserror::Error)]
enum FilesError {
    /// One of them cannot be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        error: io::Error,
    },
    /// One of them is invalid.
    #[error("{}: {error}", path.display())]
    Material {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        error: MaterialError,
    },
}

/// The content of certificate, key and roots.
type FileContents = [Sensitive; 3];

impl ServingFiles {
    fn read(&self) -> Result<FileContents, FilesError> {
        let read = |path: &PathBuf| match std::fs::read(path) {
            Ok(bytes) => Ok(Sensitive::new(bytes.into())),
            Err(error) => Err(FilesError::Read {
                path: path.clone(),
                error,
            }),
        };
        Ok([read(&self.certificate)?, read(&self.key)?, read(&self.roots)?])
    }

    fn certificate_of(&self, contents: &FileContents, now: SystemTime) -> Result<ServingCertificate, FilesError> {
        let [chain, key, roots] = contents;
        certificate(chain.reveal(), key, roots.reveal().clone(), now).map_err(|error| {
            let file = match &error {
                MaterialError::Key(_) => &self.key,
                MaterialError::Roots(_) => &self.roots,
                _ => &self.certificate,
            };
            FilesError::Material {
                path: file.clone(),
                error,
            }
        })
    }
}

async fn follow_authority(rules: ServingRules, inputs: ServingInputs, clock: Clock, out: ServingSender) {
    let ServingInputs {
        mut authority,
        mut trust,
        mut mesh,
        ..
    } = inputs;
    let mut issued: Option<IssuedCertificate> = None;
    let mut failures = 0;
    loop {
        let (signer, bundle) = (authority.borrow_and_update().clone(), trust.borrow_and_update().clone());
        let names = mesh
            .borrow_and_update()
            .as_ref()
            .map(|mesh| rules.all_names(&mesh.discovery_host));
        let mut wait = clock.poll_interval;
        if let (Some(signer), Some(bundle), Some(names)) = (signer, bundle, names) {
            let now = (clock.now)();
            let is_current = issued.as_ref().filter(|own| own.is_current(&signer, &names, now));
            let own = match is_current {
                Some(own) => Ok(own.clone()),
                None => IssuedCertificate::issue(signer, names, rules.lifetime, now).await,
            };
            let set = own.and_then(|own| {
                let now = (clock.now)();
                if !own.is_served(&out, &bundle.roots) {
                    publish(&out, own.certificate(bundle.roots.clone(), now)?, "the mesh's CA");
                }
                Ok(own)
            });
            match set {
                Ok(own) => {
                    issued = Some(own);
                    failures = 0;
                }
                Err(error) => {
                    tracing::error!(%error, "serving certificate signing by the mesh CA failed");
                    wait = retry_after(failures);
                    failures += 1;
                }
            }
        }
        tokio::select! {
            () = changed(&mut authority) => {}
            () = changed(&mut trust) => {}
            () = changed(&mut mesh) => {}
            () = sleep(wait) => {}
        }
    }
}

/// Reason why a CA has issued no serving certificate. Retryable.
#[derive(Debug, thiserror::Error)]
enum IssueError {
    /// The mesh's CA did not sign.
    #[error(transparent)]
    Sign(#[from] SignError),
    /// The CSR could not be generated.
    #[error(transparent)]
    Request(#[from] rcgen::Error),
    /// The Kubernetes signer did not sign.
    #[error(transparent)]
    Kubernetes(#[from] CsrError),
    /// The certificate is invalid.
    #[error(transparent)]
    Material(#[from] MaterialError),
    /// Key generation panicked, or the process is shutting down.
    #[error(transparent)]
    Task(#[from] JoinError),
}

/// A serving certificate of the mesh's CA, and its inputs.
#[derive(Clone)]
struct IssuedCertificate {
    signer: Arc<Authority>,
    names: Vec<SmolStr>,
    chain: Bytes,
    key: Sensitive,
    issued_at: SystemTime,
    expires_at: SystemTime,
}

impl IssuedCertificate {
    async fn issue(
        signer: Arc<Authority>,
        names: Vec<SmolStr>,
        lifetime: Duration,
        now: SystemTime,
    ) -> Result<Self, IssueError> {
        // Generating an RSA key takes a good part of a second.
        let making = tokio::task::spawn_blocking(move || -> Result<Self, SignError> {
            let issued = signer.issue_serving(&names, lifetime, now)?;
            Ok(Self {
                signer,
                names,
                chain: issued.chain.into(),
                key: issued.key,
                issued_at: now,
                expires_at: issued.expires_at,
            })
        });
        Ok(making.await??)
    }

    /// Returns true if the certificate need not be reissued.
    fn is_current(&self, signer: &Arc<Authority>, names: &[SmolStr], now: SystemTime) -> bool {
        Arc::ptr_eq(&self.signer, signer)
            && self.names == names
            && !time_until_renewal(self.issued_at, self.expires_at, now).is_zero()
    }

    fn is_served(&self, out: &ServingSender, roots: &Bytes) -> bool {
        let served = out.borrow();
        let leaf = served.as_ref().and_then(|served| served.key.cert.first().cloned());
        let same = leaf.is_some() && leaf == material::leaf(&self.chain);
        same && served.as_ref().is_some_and(|served| served.roots == *roots)
    }

    fn certificate(&self, roots: Bytes, now: SystemTime) -> Result<ServingCertificate, MaterialError> {
        certificate(&self.chain, &self.key, roots, now)
    }
}

/// The inputs of a certificate of a Kubernetes signer.
#[derive(PartialEq)]
struct SignerInputs {
    names: Vec<SmolStr>,
    /// The roots that the mesh config declares for the signer, as PEM.
    roots: Bytes,
}

/// The client of a Kubernetes signer.
struct SignerClient {
    client: Client,
    tasks: Tasks,
    signer: SmolStr,
}

impl SignerClient {
    /// Returns the inputs of a certificate; `None` while the mesh config is unknown or has no root of the signer.
    fn inputs(&self, rules: &ServingRules, trust: Option<&MeshTrust>) -> Option<SignerInputs> {
        let trust = trust?;
        let Some(roots) = trust.signer_roots(&self.signer) else {
            tracing::error!(
                signer = %self.signer,
                "the mesh config has no root of the signer, no serving certificate is requested; \
                 hint: add an entry to caCertificates whose certSigners has the signer"
            );
            return None;
        };
        Some(SignerInputs {
            names: rules.all_names(&trust.discovery_host),
            roots: Bytes::from(roots.to_owned()),
        })
    }

    /// Returns a new serving certificate, and the time of its renewal.
    async fn issue(
        &self,
        inputs: &SignerInputs,
        lifetime: Duration,
        clock: Clock,
    ) -> Result<(ServingCertificate, SystemTime), IssueError> {
        let (chain, key) = self.certificate(&inputs.names, lifetime).await?;
        let now = (clock.now)();
        let own = certificate(&chain, &key, inputs.roots.clone(), now)?;
        let renew_at = now + time_until_renewal(now, own.expires_at, now);
        Ok((own, renew_at))
    }

    /// Generates a key, and has a certificate signed for it.
    async fn certificate(&self, names: &[SmolStr], lifetime: Duration) -> Result<(Bytes, Sensitive), IssueError> {
        let requested = names.to_vec();
        let making = tokio::task::spawn_blocking(move || material::request(&requested));
        let (csr, key) = making.await??;
        let spec = request::CsrSpec {
            csr,
            signer: self.signer.to_string(),
            usages: USAGES,
            lifetime: Some(lifetime),
            names: names.join(","),
        };
        let chain = request::sign(&self.client, &self.tasks, spec, ()).await?;
        Ok((chain.into(), key))
    }
}

async fn follow_signer(
    rules: ServingRules,
    signer_client: SignerClient,
    mut mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
    clock: Clock,
    out: ServingSender,
) {
    let mut failures = 0;
    // The inputs of the last certificate, and the time of its renewal.
    let mut last: Option<(SignerInputs, SystemTime)> = None;
    loop {
        let trust = mesh.borrow_and_update().clone();
        let mut wait = clock.poll_interval;
        if let Some(inputs) = signer_client.inputs(&rules, trust.as_deref())
            && last
                .as_ref()
                .is_none_or(|(known, renew_at)| *known != inputs || *renew_at <= (clock.now)())
        {
            match signer_client.issue(&inputs, rules.lifetime, clock).await {
                Ok((own, renew_at)) => {
                    publish(&out, own, "a Kubernetes signer");
                    (last, failures) = (Some((inputs, renew_at)), 0);
                }
                Err(error) => {
                    tracing::error!(%error, "serving certificate signing by Kubernetes failed");
                    wait = retry_after(failures);
                    failures += 1;
                }
            }
        }
        tokio::select! {
            () = changed(&mut mesh) => {}
            () = sleep(wait) => {}
        }
    }
}

#[cfg(test)]
mod tests;
