//! Who the control plane is and whom it believes: the CA, the own certificate, the trust of the mesh, the ways of knowing
//! callers, and the service that signs for them.

use std::sync::Arc;

use ::kube::Client;
use futures::{FutureExt, future::BoxFuture};
use smol_str::SmolStr;
use tokio::{runtime::Handle, sync::watch};

use crate::{
    auth::{
        Authenticators, TrustDomains,
        chain::{ChainError, ChainOptions, Chains, ISTIO_TOKEN_PATH},
        tls::{Acceptor, TlsOptions, TlsOptionsError},
    },
    ca::{
        TrustBundle,
        impersonation::NodeAuthorizer,
        local::{self, LocalCa, LocalError, options::LocalOptions},
        mesh_trust::{self, MeshTrust},
        multi_root::{self, TrustInputs},
        registration::{self, RegistrationError, RegistrationRules},
        secrets::{KubernetesSecretStore, SecretStore},
        server::{CertificateService, MayImpersonate},
        serving::{self, ServingError, ServingInputs, ServingRules, ServingSource},
        signing::{SignError, SignErrorKind, SignedCertificate, Signer, SigningRequest},
    },
    environment::Environment,
    fetch::Fetcher,
    kube::{clients::Clients, health::WatchMetrics},
    model::{Installation, MeshSnapshot},
    rpc::{Router, Unary},
    xds::{Security, Server},
};

/// Why there is no identity. Not retryable: flags, variables or files are wrong.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The bundle of the CA.
    #[error(transparent)]
    Authority(#[from] LocalError),
    /// The signers of Kubernetes.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// The own certificate.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// The ways of knowing callers.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// TLS flags.
    #[error(transparent)]
    Options(#[from] TlsOptionsError),
    /// What TLS flags leave over.
    #[error("invalid TLS configuration: {0}")]
    Tls(#[from] rustls::Error),
    /// The name of a metric is taken.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// What an identity is made from.
pub(super) struct Parts<'a> {
    pub(super) environment: &'a Arc<Environment>,
    pub(super) installation: &'a Installation,
    /// The config cluster.
    pub(super) client: Option<Client>,
    /// All clusters.
    pub(super) clients: Option<Clients>,
    pub(super) watches: WatchMetrics,
    pub(super) mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Fetches what users and operators name by URL.
    pub(super) fetcher: Fetcher,
}

/// See the module's text.
pub(super) struct Identity {
    /// The ways of knowing callers of configuration and debug pages.
    pub(super) authenticators: Authenticators,
    /// How callers of ADS are known; none if they are not (`XDS_AUTH`).
    pub(super) security: Option<Security>,
    /// What the mesh trusts; none if this process has nothing to do with the CA.
    pub(super) trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
    /// Makes TLS connections; none if nothing is served with TLS.
    pub(super) acceptor: Option<Acceptor>,
    /// The methods of the CA.
    pub(super) methods: Vec<Arc<dyn Unary>>,
}

impl Identity {
    /// The servers of the plaintext port and of the secure one. Certificates are signed at the secure port, if there is one.
    pub(super) fn routers(self, xds: Server) -> (Router<Server>, Option<(Router<Server>, Acceptor)>) {
        let xds = match self.security {
            Some(security) => xds.with_security(security),
            None => xds,
        };
        match self.acceptor {
            Some(acceptor) => {
                let secure = Router::new(xds.clone().with_stream_runtime(Handle::current()), self.methods);
                (Router::new(xds, Vec::new()), Some((secure, acceptor)))
            }
            None => (Router::new(xds, self.methods), None),
        }
    }
}

/// Starts everything.
pub(super) async fn start(parts: Parts<'_>) -> Result<Identity, IdentityError> {
    let Parts {
        environment,
        installation,
        ..
    } = &parts;
    let settings = &environment.settings;
    let features = &installation.features;
    let mesh_trust = mesh_trust::follow(environment, parts.mesh.clone());
    let ca = authority(&parts, mesh_trust.clone()).await?;
    let rules = ServingRules::of(
        settings,
        installation.namespace.as_str(),
        &installation.revision,
        features.enable_ca_server,
    )?;
    let is_served = rules.source != ServingSource::None && settings.flags.secure_grpc_addr.0.is_some();
    let inputs = ServingInputs {
        authority: ca.authority.clone(),
        trust: ca.trust.clone(),
        mesh: mesh_trust.clone(),
        client: parts.client.clone(),
    };
    let serving = serving::start(environment, rules.clone(), inputs);
    let published = serving::published_trust(environment, &rules, serving.clone(), ca.trust.clone());
    let trust = multi_root::start(
        environment,
        TrustInputs {
            own: ca.trust,
            published: published.clone(),
            mesh: mesh_trust.clone(),
            multi_root: features.istio_multiroot_mesh.then(|| parts.fetcher.clone()),
        },
    );
    let domains = domains(environment, mesh_trust);
    let chains = chains(&parts, &domains)?;
    let acceptor = if is_served {
        let compliance = settings.variable("COMPLIANCE_POLICY").unwrap_or_default();
        let options = TlsOptions::new(&settings.flags, compliance)?;
        Some(Acceptor::new(&options, serving, trust.pools)?)
    } else {
        None
    };
    let mut methods: Vec<Arc<dyn Unary>> = Vec::new();
    if features.enable_ca_server {
        let may_impersonate = may_impersonate(&parts, &domains);
        let service = CertificateService::new(
            chains.signing,
            ca.signer,
            domains.clone(),
            may_impersonate,
            &environment.registry,
        )?;
        methods.push(Arc::new(service));
    }
    Ok(Identity {
        security: features.xds_auth.then(|| Security {
            authenticators: chains.requests.clone(),
            plaintext: features.xds_auth_plaintext,
            check: features.pilot_enable_xds_identity_check,
        }),
        authenticators: chains.requests,
        trust: (features.enable_ca_server || rules.source != ServingSource::None).then_some(published),
        acceptor,
        methods,
    })
}

/// The CA: this process, or a signer of Kubernetes (`EXTERNAL_CA`); then there is no authority here.
async fn authority(
    parts: &Parts<'_>,
    mut mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
) -> Result<LocalCa, IdentityError> {
    let settings = &parts.environment.settings;
    let namespace = parts.installation.namespace.as_str();
    if !parts.installation.features.enable_ca_server {
        return Ok(LocalCa {
            signer: Arc::new(DisabledSigner),
            authority: watch::channel(None).1,
            trust: watch::channel(None).1,
        });
    }
    let (options, errors) = LocalOptions::new(&settings.variables, namespace);
    for error in errors {
        tracing::error!("{error}");
    }
    if let Some(rules) = RegistrationRules::of(settings, options.limits)? {
        let registration = registration::start(parts.environment, rules, parts.client.clone(), mesh)?;
        return Ok(LocalCa {
            signer: registration.signer,
            authority: watch::channel(None).1,
            trust: registration.trust,
        });
    }
    let secrets = parts.client.clone().map(|client| {
        let secrets: Arc<dyn SecretStore> = Arc::new(KubernetesSecretStore {
            client,
            cluster: parts.installation.cluster.clone(),
            namespace: namespace.to_owned(),
            metrics: parts.watches.clone(),
        });
        secrets
    });
    let organization = async move {
        match mesh.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(mesh)) => mesh.trust_domain.clone(),
            Ok(None) | Err(_) => SmolStr::default(),
        }
    };
    Ok(local::start(parts.environment, options, secrets, organization.boxed()).await?)
}

/// A signer that refuses all requests: this control plane is not the CA (`ENABLE_CA_SERVER=false`).
struct DisabledSigner;

impl Signer for DisabledSigner {
    fn sign(&self, _: SigningRequest) -> BoxFuture<'_, Result<SignedCertificate, SignError>> {
        let error = SignError {
            kind: SignErrorKind::NotReady,
            text: "the CA server is disabled (ENABLE_CA_SERVER)".into(),
        };
        async { Err(error) }.boxed()
    }
}

/// The ways of knowing callers.
fn chains(parts: &Parts<'_>, domains: &watch::Receiver<Arc<TrustDomains>>) -> Result<Chains, IdentityError> {
    let features = &parts.installation.features;
    let own_token = std::fs::read_to_string(ISTIO_TOKEN_PATH).ok();
    let options = ChainOptions::new(
        &parts.environment.settings,
        own_token.as_deref(),
        &features.trusted_gateway_cidr,
        &features.token_audiences,
        parts.clients.clone(),
    )?;
    Ok(options.chains(&parts.fetcher, domains))
}

/// Who may have certificates of others: proxies of nodes.
fn may_impersonate(parts: &Parts<'_>, domains: &watch::Receiver<Arc<TrustDomains>>) -> MayImpersonate {
    let accounts = &parts.installation.features.ca_trusted_node_accounts;
    let (authorizer, wrong) = NodeAuthorizer::new(accounts, domains.clone(), parts.mesh.clone());
    for account in wrong {
        tracing::error!(
            "CA_TRUSTED_NODE_ACCOUNTS: {account:?} is not a service account, ignoring it; hint: want namespace/name"
        );
    }
    Box::new(move |caller, identity| {
        authorizer
            .authorize(caller, identity)
            .map_err(|error| error.to_string())
    })
}

/// Follows the mesh config: which trust domains are ours.
fn domains(
    environment: &Environment,
    mut mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
) -> watch::Receiver<Arc<TrustDomains>> {
    let (out, domains) = watch::channel(Arc::default());
    environment.tasks.spawn_until_shutdown("trust domains", async move {
        loop {
            if let Some(config) = mesh.borrow_and_update().clone() {
                out.send_replace(Arc::new(TrustDomains {
                    own: config.trust_domain.clone(),
                    aliases: config.aliases.clone(),
                }));
            }
            if mesh.changed().await.is_err() {
                return;
            }
        }
    });
    domains
}
