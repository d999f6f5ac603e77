//! Identity and trust: the CA, the serving certificate, the mesh's roots, authenticators, and the CA service.

use std::{sync::Arc, time::Duration};

use ::kube::Client;
use futures::{FutureExt, future::BoxFuture};
use smol_str::SmolStr;
use tokio::{runtime::Handle, sync::watch, time::timeout};

use super::{
    controllers,
    grpc::{Health, Reflection},
    report_variables,
};
use crate::{
    auth::{
        Authenticators, TrustDomains,
        chain::{ChainError, ChainOptions, Chains, ISTIO_TOKEN_PATH},
        tls::{Acceptor, TlsOptions, TlsOptionsError},
        trust::TrustPools,
    },
    ca::{
        TrustBundle,
        authority::Authority,
        impersonation::NodeAuthorizer,
        local::{self, LocalCa, LocalError, options::LocalOptions},
        mesh_trust::{self, MeshTrust},
        multi_root::{self, TrustInputs},
        registration::{self, Registration, RegistrationError, RegistrationRules},
        secrets::{KubernetesSecretStore, SecretStore},
        server::{CertificateService, MayImpersonate},
        serving::{self, ServingError, ServingInputs, ServingReceiver, ServingRules, ServingSource},
        signing::{SignError, SignErrorKind, SignedCertificate, Signer, SigningRequest},
    },
    environment::Environment,
    fetch::Fetcher,
    kube::{clients::Clients, health::WatchMetrics},
    model::{Installation, MeshSnapshot},
    rpc::{CallMetrics, Measured, Router, Unary},
    settings::Settings,
    table::Cx,
    xds::{Security, Server},
};

/// Reason why there is no identity. Not retryable: flags, variables or files are wrong.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Error of the CA bundle.
    #[error(transparent)]
    Authority(#[from] LocalError),
    /// Error of Kubernetes signers.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// Error of the serving certificate.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// Error of authenticators.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// Error of TLS flags.
    #[error(transparent)]
    Options(#[from] TlsOptionsError),
    /// Error of rustls with these flags.
    #[error("invalid TLS configuration: {0}")]
    Tls(#[from] rustls::Error),
    /// The name of a metric is in use.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// The maximum wait for the trust domains of the mesh.
const DOMAINS_TIMEOUT: Duration = Duration::from_secs(5);

/// Inputs of an identity.
pub(super) struct IdentityInputs<'a> {
    pub(super) environment: &'a Arc<Environment>,
    pub(super) installation: &'a Installation,
    /// Config cluster.
    pub(super) client: Option<Client>,
    /// Clients of all clusters.
    pub(super) clients: Option<Clients>,
    pub(super) watches: WatchMetrics,
    pub(super) mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// Fetcher of documents that the operator names by URL.
    pub(super) fetcher: Fetcher,
}

/// Identity and trust of the control plane.
pub(super) struct Identity {
    /// Authenticators of other replicas.
    pub(super) authenticators: Authenticators,
    /// Authenticators of debug pages; none without authentication of ADS streams.
    pub(super) page_authenticators: Authenticators,
    /// Trust domains of the mesh.
    pub(super) domains: watch::Receiver<Arc<TrustDomains>>,
    /// Authentication of ADS streams; `None` if disabled (`XDS_AUTH`).
    pub(super) security: Option<Security>,
    /// Roots that clients verify the control plane with; `None` if nothing is served with TLS and none are distributed.
    pub(super) trust: Option<watch::Receiver<Option<Arc<TrustBundle>>>>,
    /// The CA of this process, once it has one. With signers of Kubernetes, it may sign the serving certificate.
    pub(super) authority: watch::Receiver<Option<Arc<Authority>>>,
    /// Roots for workloads, merged with those of the mesh config; sorted PEM blocks.
    pub(super) anchors: watch::Receiver<Arc<Vec<String>>>,
    /// Accepts TLS connections; `None` if nothing is served with TLS.
    pub(super) acceptor: Option<Acceptor>,
    /// Accepts TLS connections of the webhooks; `None` if they are not served with TLS.
    pub(super) webhooks: Option<Acceptor>,
    /// Signs certificates of workloads.
    pub(super) signer: Arc<dyn Signer>,
    /// Methods of the CA service.
    pub(super) methods: Vec<Arc<dyn Unary>>,
}

impl Identity {
    /// Returns the routers of the plaintext and the secure port. The CA service is on the secure port, if there is one.
    pub(super) fn routers(
        &self,
        xds: Server,
        ready: &watch::Receiver<bool>,
    ) -> (Router<Server>, Option<(Router<Server>, Acceptor)>) {
        let xds = match &self.security {
            Some(security) => xds.with_security(security.clone()),
            None => xds,
        };
        let router = |xds: Server, mut methods: Vec<Arc<dyn Unary>>| {
            let has_certificates = !methods.is_empty();
            let health = Arc::new(Health { ready: ready.clone() });
            methods.push(health.clone());
            Router::new(xds, methods)
                .with_server_stream(health)
                .with_exchange(Arc::new(Reflection { has_certificates }))
        };
        match &self.acceptor {
            Some(acceptor) => {
                let secure = xds.clone().with_stream_runtime(Handle::current());
                let secure = router(secure, self.methods.clone());
                (router(xds, Vec::new()), Some((secure, acceptor.clone())))
            }
            None => (router(xds, self.methods.clone()), None),
        }
    }
}

/// Starts the CA and what follows from it: the serving certificate, trust, authenticators, and the CA service.
pub(super) async fn start(inputs: IdentityInputs<'_>) -> Result<Identity, IdentityError> {
    let IdentityInputs {
        environment,
        installation,
        ..
    } = &inputs;
    let settings = &environment.settings;
    let features = &installation.features;
    let mesh_trust = mesh_trust::follow(environment, inputs.mesh.clone());
    let rules = ServingRules::of(
        settings,
        installation.namespace.as_str(),
        &installation.revision,
        features.enable_ca_server,
    )?;
    let (ca, workload_trust) = authority(&inputs, &rules.source, mesh_trust.clone()).await?;
    let has_certificate = rules.source != ServingSource::None;
    let serving_inputs = ServingInputs {
        authority: ca.authority.clone(),
        trust: ca.trust.clone(),
        mesh: mesh_trust.clone(),
        client: inputs.client.clone(),
    };
    let serving = serving::start(environment, rules.clone(), serving_inputs);
    let published = serving::published_trust(environment, &rules, serving.clone(), ca.trust.clone());
    let trust = multi_root::start(
        environment,
        TrustInputs {
            own: workload_trust,
            published: published.clone(),
            mesh: mesh_trust.clone(),
            multi_root: features.istio_multiroot_mesh.then(|| inputs.fetcher.clone()),
        },
    );
    let domains = domains(environment, mesh_trust);
    let chains = chains(&inputs, &domains)?;
    let authenticators = chains.requests.clone();
    // Parity (pkg/security/authentication.go, pilot/pkg/bootstrap/server.go): requests for certificates and debug pages
    // cannot be authenticated either.
    let chains = if features.xds_auth {
        chains
    } else {
        tracing::warn!("XDS_AUTH is off: requests for certificates and for remote debug pages are denied");
        Chains::default()
    };
    let acceptors = if has_certificate {
        acceptors(settings, &serving, &trust.pools)?
    } else {
        Acceptors::default()
    };
    let signer = ca.signer.clone();
    let mut methods: Vec<Arc<dyn Unary>> = Vec::new();
    if features.enable_ca_server {
        methods.push(certificate_service(&inputs, chains.signing, ca.signer, &domains)?);
    }
    Ok(Identity {
        security: features.xds_auth.then(|| Security {
            authenticators: chains.requests.clone(),
            plaintext: features.xds_auth_plaintext,
            checks_identity: features.pilot_enable_xds_identity_check,
        }),
        authenticators,
        page_authenticators: chains.requests,
        domains,
        authority: ca.authority,
        anchors: trust.anchors,
        trust: (has_certificate || controllers::distributes_roots(settings, features)).then_some(published),
        acceptor: acceptors.secure,
        webhooks: acceptors.webhooks,
        signer,
        methods,
    })
}

/// The acceptors of the ports with TLS; `None` for a port that is not served.
#[derive(Default)]
struct Acceptors {
    /// That of xDS and the CA service.
    secure: Option<Acceptor>,
    webhooks: Option<Acceptor>,
}

/// Returns the acceptors of the ports that flags open.
fn acceptors(
    settings: &Settings,
    serving: &ServingReceiver,
    pools: &watch::Receiver<Arc<TrustPools>>,
) -> Result<Acceptors, IdentityError> {
    let is_served = settings.flags.secure_grpc_addr.0.is_some();
    let serves_webhooks = settings.flags.https_addr.0.is_some();
    let mut acceptors = Acceptors::default();
    if is_served || serves_webhooks {
        let compliance = settings.variable("COMPLIANCE_POLICY").unwrap_or_default();
        let options = TlsOptions::new(&settings.flags, compliance)?;
        if serves_webhooks {
            acceptors.webhooks = Some(Acceptor::of_webhooks(&options, serving.clone())?);
        }
        if is_served {
            acceptors.secure = Some(Acceptor::new(&options, serving.clone(), pools.clone())?);
        }
    }
    Ok(acceptors)
}

/// Starts the CA of this process, and the signer of workloads: that CA, or a Kubernetes signer (`EXTERNAL_CA`). Also
/// returns the roots of workload certificates.
async fn authority(
    inputs: &IdentityInputs<'_>,
    serving: &ServingSource,
    mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
) -> Result<(LocalCa, watch::Receiver<Option<Arc<TrustBundle>>>), IdentityError> {
    let settings = &inputs.environment.settings;
    let no_authority = || watch::channel(None).1;
    if !inputs.installation.features.enable_ca_server {
        let trust = watch::channel(None).1;
        let ca = LocalCa {
            signer: Arc::new(DisabledSigner),
            authority: no_authority(),
            trust: trust.clone(),
        };
        return Ok((ca, trust));
    }
    let namespace = inputs.installation.namespace.as_str();
    let (options, errors) = LocalOptions::new(&settings.variables, &inputs.installation.features, namespace);
    report_variables(&errors);
    let Some(rules) = RegistrationRules::of(settings, options.limits)? else {
        let ca = local_authority(inputs, options, mesh).await?;
        let trust = ca.trust.clone();
        return Ok((ca, trust));
    };
    let registered = registration::start(inputs.environment, rules, inputs.client.clone(), mesh.clone())?;
    let Registration { signer, trust } = registered;
    let ca = if *serving == ServingSource::Authority {
        let local = local_authority(inputs, options, mesh).await?;
        LocalCa { signer, ..local }
    } else {
        LocalCa {
            signer,
            authority: no_authority(),
            trust: trust.clone(),
        }
    };
    Ok((ca, trust))
}

/// Starts the CA of this process.
async fn local_authority(
    inputs: &IdentityInputs<'_>,
    options: LocalOptions,
    mut mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
) -> Result<LocalCa, IdentityError> {
    let secrets = inputs.client.clone().map(|client| {
        let secrets: Arc<dyn SecretStore> = Arc::new(KubernetesSecretStore {
            client,
            cluster: inputs.installation.cluster.clone(),
            namespace: inputs.installation.namespace.to_string(),
            metrics: inputs.watches.clone(),
        });
        secrets
    });
    let organization = async move {
        match mesh.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(mesh)) => mesh.trust_domain.clone(),
            Ok(None) | Err(_) => SmolStr::default(),
        }
    };
    Ok(local::start(inputs.environment, options, secrets, organization.boxed()).await?)
}

/// Refuses all requests, because this control plane is not the CA (`ENABLE_CA_SERVER=false`).
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

/// Returns the authenticators.
fn chains(inputs: &IdentityInputs<'_>, domains: &watch::Receiver<Arc<TrustDomains>>) -> Result<Chains, IdentityError> {
    let features = &inputs.installation.features;
    let own_token = std::fs::read_to_string(ISTIO_TOKEN_PATH).ok();
    let options = ChainOptions::new(
        &inputs.environment.settings,
        own_token.as_deref(),
        &features.trusted_gateway_cidr,
        &features.token_audiences,
        inputs.clients.clone(),
    )?;
    Ok(options.chains(&inputs.fetcher, domains, &inputs.environment.tasks))
}

/// Returns the CA service, with metrics of its calls.
fn certificate_service(
    inputs: &IdentityInputs<'_>,
    authenticators: Authenticators,
    signer: Arc<dyn Signer>,
    domains: &watch::Receiver<Arc<TrustDomains>>,
) -> Result<Arc<dyn Unary>, IdentityError> {
    let registry = &inputs.environment.registry;
    let may_impersonate = may_impersonate(inputs, domains);
    let service = CertificateService::new(authenticators, signer, domains.clone(), may_impersonate, registry)?;
    let service = service.accepting_plaintext(inputs.installation.features.xds_auth_plaintext);
    let calls = CallMetrics::new(registry)?;
    Ok(Arc::new(Measured::new(Arc::new(service), calls)))
}

/// Returns the accounts that may request certificates for others: node proxies.
fn may_impersonate(inputs: &IdentityInputs<'_>, domains: &watch::Receiver<Arc<TrustDomains>>) -> MayImpersonate {
    let accounts = &inputs.installation.features.ca_trusted_node_accounts;
    let (authorizer, wrong) = NodeAuthorizer::new(accounts, domains.clone(), inputs.mesh.clone());
    for account in wrong {
        tracing::error!(%account, "account of CA_TRUSTED_NODE_ACCOUNTS ignored; hint: want namespace/name");
    }
    Box::new(move |caller, identity| {
        authorizer
            .authorize(caller, identity)
            .map_err(|error| error.to_string())
    })
}

/// Watches the trust domains of the mesh config.
fn domains(
    environment: &Environment,
    mut mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
) -> watch::Receiver<Arc<TrustDomains>> {
    let (out, domains) = watch::channel(Arc::default());
    environment.tasks.spawn_until_shutdown("trust domains", async move {
        loop {
            if let Some(config) = mesh.borrow_and_update().clone() {
                out.send_replace(Arc::new(trust_domains(&config)));
            }
            if mesh.changed().await.is_err() {
                return;
            }
        }
    });
    domains
}

fn trust_domains(config: &MeshTrust) -> TrustDomains {
    TrustDomains {
        own: config.trust_domain.clone(),
        aliases: config.aliases.clone(),
    }
}

/// Waits until the trust domains are those of the mesh: certificates with the default trust domain would be used for a
/// day. The task that follows the mesh may be late while the first configurations are generated.
pub(super) async fn domains_known(
    mut domains: watch::Receiver<Arc<TrustDomains>>,
    mesh: &watch::Receiver<Arc<MeshSnapshot>>,
) {
    // Without any object, the defaults stay.
    let of_mesh = || {
        let mesh = mesh.borrow();
        (mesh.revision.0 > 0).then(|| trust_domains(&MeshTrust::of(mesh.mesh_config(&Cx::untracked()))))
    };
    let known = domains.wait_for(|known| of_mesh().is_none_or(|of_mesh| **known == of_mesh));
    // The timeout is for a mesh config that changes at the same time.
    let _ = timeout(DOMAINS_TIMEOUT, known).await;
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::pending};

    use ::kube::client::Body;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

    use super::*;
    use crate::{fetch::FetchOptions, model::fixture::folder_world, settings::fixture::settings};

    fn environment(variables: &[(&str, &str)]) -> Arc<Environment> {
        Arc::new(Environment::new(settings(&[], variables)))
    }

    /// Returns the inputs with an API server that does not answer.
    fn inputs<'a>(environment: &'a Arc<Environment>, installation: &'a Installation) -> IdentityInputs<'a> {
        let silent = tower::service_fn(|_: http::Request<Body>| pending::<Result<http::Response<Body>, Infallible>>());
        let mesh = folder_world(installation.clone(), &[("mesh.yaml", "")]).snapshot();
        IdentityInputs {
            environment,
            installation,
            client: Some(Client::new(silent, "default")),
            clients: None,
            watches: WatchMetrics::new(&environment.registry).expect("unused names"),
            mesh: watch::channel(mesh).1,
            fetcher: Fetcher::new(FetchOptions::default()),
        }
    }

    #[tokio::test]
    async fn the_trust_domains_of_the_mesh_are_waited_for() {
        let files = [("mesh.yaml", "trustDomain: corp.example")];
        let mesh = watch::channel(folder_world(Installation::default(), &files).snapshot()).1;
        let (sender, domains) = watch::channel(Arc::default());
        let mut known = std::pin::pin!(domains_known(domains, &mesh));
        assert!(futures::poll!(known.as_mut()).is_pending());
        sender.send_replace(Arc::new(TrustDomains {
            own: "corp.example".into(),
            aliases: Vec::new(),
        }));
        assert!(futures::poll!(known.as_mut()).is_ready());
    }

    /// Parity (pilot/pkg/bootstrap/server.go, maybeCreateCA).
    #[tokio::test]
    async fn the_own_ca_signs_for_the_control_plane_beside_a_kubernetes_signer() {
        let folder = tempfile::tempdir().expect("a folder");
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = params.self_signed(&key).expect("a root").pem();
        for (name, text) in [
            ("ca-cert.pem", root.clone()),
            ("ca-key.pem", key.serialize_pem()),
            ("root-cert.pem", root),
            ("cert-chain.pem", String::new()),
        ] {
            std::fs::write(folder.path().join(name), text).expect("a file");
        }
        let path = folder.path().display().to_string();
        let variables = [
            ("EXTERNAL_CA", "ISTIOD_RA_KUBERNETES_API"),
            ("K8S_SIGNER", "a.b/c"),
            ("ROOT_CA_DIR", path.as_str()),
        ];
        let environment = environment(&variables);
        let installation = Installation::default();
        let inputs = inputs(&environment, &installation);
        for (serving, has_authority) in [(ServingSource::Authority, true), (ServingSource::None, false)] {
            let (ca, workload_trust) = authority(&inputs, &serving, watch::channel(None).1)
                .await
                .expect("valid settings");
            assert_eq!(ca.authority.borrow().is_some(), has_authority);
            assert_eq!(*workload_trust.borrow(), None, "the roots of the signer are unknown");
        }
    }

    /// Parity (pilot/pkg/bootstrap/server.go, initIstiodCerts): webhook configurations keep their roots otherwise.
    #[tokio::test]
    async fn without_tls_roots_are_published_only_for_their_distribution() {
        for (provider, is_published) in [("none", false), ("custom", true)] {
            let environment = environment(&[("PILOT_CERT_PROVIDER", provider)]);
            let installation = Installation::default();
            let identity = start(inputs(&environment, &installation))
                .await
                .expect("valid settings");
            assert_eq!(identity.trust.is_some(), is_published, "{provider}");
        }
    }
}
