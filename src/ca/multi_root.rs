//! The trusted roots of the mesh: its own CA, the mesh config, and SPIFFE bundle endpoints.
//!
//! Note: a failing endpoint does not remove roots, unlike in Istio (pilot/pkg/trustbundle/trustbundle.go). Its last
//! roots stay until it returns others or the mesh config drops it, so that an outage does not break trust.

mod bundle;
mod endpoint;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, pending},
    stream::FuturesUnordered,
};
use rustls::pki_types::{CertificateRevocationListDer, pem::PemObject};
use smol_str::SmolStr;
use tokio::{sync::watch, time::sleep};

use self::{
    bundle::SpiffeBundleError,
    endpoint::{Endpoints, SchemeError},
};
use super::{
    TrustBundle,
    certificate::Certificate,
    channel::changed,
    mesh_trust::{Anchor, AnchorSource, MeshTrust},
};
use crate::{
    auth::trust::TrustPools,
    environment::{self, Environment},
    fetch::{FetchError, Fetcher},
    task,
};

/// The total timeout of a fetch, including retries.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// The first backoff between these retries; it doubles.
const FETCH_BACKOFF: Duration = Duration::from_millis(500);
/// The interval at which endpoints are checked for a due fetch.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The sources of trust.
pub struct TrustInputs {
    /// The trust bundle of the own CA, or of the Kubernetes signer.
    pub own: watch::Receiver<Option<Arc<TrustBundle>>>,
    /// The roots of the serving certificate. If another CA issued it, that CA may also certify workloads.
    pub published: watch::Receiver<Option<Arc<TrustBundle>>>,
    /// The trust settings of the mesh config.
    pub mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
    /// Fetches from endpoints; none unless `ISTIO_MULTIROOT_MESH` is on.
    pub multi_root: Option<Fetcher>,
}

/// Handles of the trusted roots. Cheap to clone.
#[derive(Clone)]
pub struct Trust {
    /// The roots for client certificates, by trust domain: the own one and its aliases.
    pub pools: watch::Receiver<Arc<TrustPools>>,
    /// The roots for workloads: sorted, unique PEM blocks of one root each. Only the own roots without multi-root.
    pub anchors: watch::Receiver<Arc<Vec<String>>>,
}

/// Starts the trust controller.
pub fn start(environment: &Environment, inputs: TrustInputs) -> Trust {
    let (pools, pools_receiver) = watch::channel(Arc::default());
    let (anchors, anchors_receiver) = watch::channel(Arc::default());
    let fetch = inputs.multi_root.map(|fetcher| {
        let fetch: Fetch = Arc::new(move |url| fetched(fetcher.clone(), url).boxed());
        fetch
    });
    let controller = TrustController {
        own: inputs.own,
        published: inputs.published,
        mesh: inputs.mesh,
        fetch,
        now: environment::now,
        poll_interval: POLL_INTERVAL,
        pools,
        anchors,
    };
    environment.tasks.spawn_until_shutdown("trust", controller.run());
    Trust {
        pools: pools_receiver,
        anchors: anchors_receiver,
    }
}

/// Reason why the roots of an endpoint are unknown.
#[derive(Debug, thiserror::Error)]
enum RootsError {
    /// Its URL is invalid.
    #[error(transparent)]
    Url(#[from] SchemeError),
    /// The bundle could not be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The document is not a bundle.
    #[error(transparent)]
    Bundle(#[from] SpiffeBundleError),
}

/// Fetches the roots of an endpoint.
type Fetch = Arc<dyn Fn(SmolStr) -> BoxFuture<'static, Result<Vec<Certificate>, RootsError>> + Send + Sync>;

/// Fetches the roots of an endpoint, with retries within the timeout.
async fn fetched(fetcher: Fetcher, url: SmolStr) -> Result<Vec<Certificate>, RootsError> {
    let url = endpoint::url(&url)?;
    let (mut left, mut pause) = (FETCH_TIMEOUT, FETCH_BACKOFF);
    loop {
        let began = environment::now();
        let error = match fetcher.get(&url, left).await {
            Ok(document) => return bundle::roots(&document).map_err(RootsError::from),
            Err(error) => error,
        };
        left = left.saturating_sub(began.elapsed() + pause);
        if left.is_zero() {
            return Err(error.into());
        }
        sleep(pause).await;
        pause *= 2;
    }
}

struct TrustController {
    own: watch::Receiver<Option<Arc<TrustBundle>>>,
    published: watch::Receiver<Option<Arc<TrustBundle>>>,
    mesh: watch::Receiver<Option<Arc<MeshTrust>>>,
    fetch: Option<Fetch>,
    now: fn() -> Instant,
    poll_interval: Duration,
    pools: watch::Sender<Arc<TrustPools>>,
    anchors: watch::Sender<Arc<Vec<String>>>,
}

impl TrustController {
    async fn run(mut self) {
        let mut endpoints = Endpoints::default();
        let mut fetching = FuturesUnordered::new();
        fetching.push(pending().boxed());
        let mut is_changed = true;
        loop {
            let mesh = {
                let mesh = self.mesh.borrow_and_update();
                // A change may arrive together with a response, whose branch is taken then.
                is_changed |= mesh.has_changed();
                mesh.clone().unwrap_or_default()
            };
            if let Some(fetch) = &self.fetch {
                let now = (self.now)();
                is_changed |= endpoints.set_urls(&endpoint_urls(&mesh), now);
                for url in endpoints.take_due(now) {
                    let fetched = fetch(url.clone());
                    fetching.push(fetched.map(|roots| (url, roots)).boxed());
                }
            }
            if std::mem::take(&mut is_changed) {
                self.publish(&mesh, &endpoints);
            }
            tokio::select! {
                () = changed(&mut self.own) => is_changed = true,
                () = changed(&mut self.published) => is_changed = true,
                () = changed(&mut self.mesh) => is_changed = true,
                Some((url, roots)) = fetching.next() => {
                    if let Err(error) = &roots {
                        tracing::warn!(%url, %error, "failed to fetch SPIFFE bundle, keeping the last roots");
                    }
                    is_changed = endpoints.record_response(&url, roots.ok(), (self.now)());
                }
                () = sleep(self.poll_interval), if self.fetch.is_some() => {}
            }
        }
    }

    fn publish(&mut self, mesh: &MeshTrust, endpoints: &Endpoints) {
        let own = self.own.borrow_and_update().clone();
        let published = self.published.borrow_and_update().clone();
        let own: Vec<&TrustBundle> = own.as_deref().into_iter().chain(published.as_deref()).collect();
        let trusted = TrustState::of(&own, mesh, endpoints, self.fetch.is_some());
        task::publish(&self.pools, Arc::new(trusted.pools));
        if task::publish(&self.anchors, Arc::new(trusted.anchors)) {
            tracing::info!(roots = self.anchors.borrow().len(), "trusted roots changed");
        }
    }
}

fn endpoint_urls(mesh: &MeshTrust) -> Vec<SmolStr> {
    let urls = mesh.anchors.iter().filter_map(|anchor| match &anchor.source {
        AnchorSource::Endpoint(url) => Some(url.clone()),
        AnchorSource::Pem(_) => None,
    });
    urls.collect()
}

/// The trusted roots at one point in time.
#[derive(Debug, Default, PartialEq, Eq)]
struct TrustState {
    pools: TrustPools,
    anchors: Vec<String>,
}

impl TrustState {
    fn of(own: &[&TrustBundle], mesh: &MeshTrust, endpoints: &Endpoints, multi_root: bool) -> Self {
        let mut domains: BTreeMap<SmolStr, Vec<Certificate>> = BTreeMap::new();
        let mut all: Vec<Certificate> = own
            .iter()
            .flat_map(|own| roots(&own.roots, "the mesh's own CA"))
            .collect();
        let own_domains = || std::iter::once(&mesh.trust_domain).chain(&mesh.aliases);
        for domain in own_domains() {
            domains.entry(domain.clone()).or_default().extend(all.iter().cloned());
        }
        for (index, anchor) in mesh.anchors.iter().enumerate() {
            let found = match &anchor.source {
                AnchorSource::Pem(pem) => only_cas(roots(pem.as_bytes(), &format!("caCertificates[{index}]")), index),
                AnchorSource::Endpoint(url) => endpoints.roots(url).to_vec(),
            };
            // Parity (pilot/pkg/bootstrap/server.go, createPeerCertVerifier): clients of other trust domains are not
            // admitted, since their namespaces and service accounts would count as those of this mesh.
            let for_domains: Vec<&SmolStr> = match anchor.trust_domains.as_slice() {
                [] if counts_for_own(anchor, multi_root) => own_domains().collect(),
                named => own_domains().filter(|own| named.contains(own)).collect(),
            };
            for domain in for_domains {
                domains.entry(domain.clone()).or_default().extend(found.iter().cloned());
            }
            if multi_root {
                all.extend(found);
            }
        }
        let crls = own
            .iter()
            .find_map(|own| own.crl.as_ref().filter(|pem| !pem.is_empty()))
            .map(|pem| parse_crls(pem))
            .unwrap_or_default();
        let domains = domains.into_iter().map(|(domain, roots)| {
            let mut roots: Vec<_> = roots.into_iter().map(|root| root.der).collect();
            roots.sort_unstable_by(|one, other| one.as_ref().cmp(other.as_ref()));
            roots.dedup();
            (domain, roots)
        });
        let pools = TrustPools {
            domains: domains.collect(),
            crls,
        };
        let mut anchors: Vec<String> = all.iter().map(Certificate::pem).collect();
        anchors.sort_unstable();
        anchors.dedup();
        Self { pools, anchors }
    }
}

/// Returns true if roots without trust domains apply to the own trust domain: with multi-root, or as roots of a
/// Kubernetes signer.
fn counts_for_own(anchor: &Anchor, multi_root: bool) -> bool {
    multi_root || !anchor.signers.is_empty()
}

fn roots(pem: &[u8], place: &str) -> Vec<Certificate> {
    Certificate::all_from_pem(pem).unwrap_or_else(|error| {
        tracing::error!(place, %error, "invalid root certificates ignored");
        Vec::new()
    })
}

/// Rejects an entry of the mesh config that has a non-CA certificate.
fn only_cas(roots: Vec<Certificate>, index: usize) -> Vec<Certificate> {
    match roots.iter().find(|root| !root.is_ca) {
        Some(leaf) => {
            let name = &leaf.name;
            tracing::error!(index, %name, "entry of caCertificates ignored: a certificate is not a CA");
            Vec::new()
        }
        None => roots,
    }
}

fn parse_crls(pem: &[u8]) -> Vec<CertificateRevocationListDer<'static>> {
    let parse_crls = CertificateRevocationListDer::pem_slice_iter(pem);
    parse_crls
        .filter_map(|list| {
            list.inspect_err(|error| tracing::error!(%error, "invalid CRL ignored"))
                .ok()
        })
        .collect()
}

#[cfg(test)]
mod tests;
