//! Verification of client certificates: one pool of roots per trust domain, so that the CA of one domain cannot issue
//! identities of another.
//!
//! Parity (pkg/spiffe/spiffe.go, PeerCertVerifier): the leaf's trust domain selects the pool.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use rustls::{
    DistinguishedName, Error, RootCertStore,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime},
    server::{
        VerifierBuilderError, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use smol_str::SmolStr;
use tokio::sync::watch;

use super::only_uri;
use crate::{
    auth::trust::TrustPools,
    base::{handshake::verify_signatures, spiffe::SpiffeId},
};

/// The maximum chain length, including the leaf.
const MAX_CHAIN: usize = 8;

/// Chain verifiers by trust domain.
struct PoolVerifiers(BTreeMap<SmolStr, Arc<dyn ClientCertVerifier>>);

impl PoolVerifiers {
    /// Builds the verifiers. Unusable roots and CRLs are skipped and returned as problems, so that a bad certificate of
    /// one domain does not affect the others.
    fn new(pools: &TrustPools, provider: &Arc<CryptoProvider>) -> (Self, Vec<String>) {
        let mut problems = Vec::new();
        let stores: BTreeMap<_, _> = pools
            .domains
            .iter()
            .map(|(domain, roots)| (domain.clone(), store(domain, roots, &mut problems)))
            .collect();
        let crls = revocation_lists(pools, &stores, provider, &mut problems);
        let mut verifiers = BTreeMap::new();
        for (domain, store) in stores {
            match verifier(store, &crls, provider) {
                Ok(verifier) => drop(verifiers.insert(domain, verifier)),
                Err(error) => problems.push(format!(
                    "no client certificate verifier for trust domain {domain}: {error}"
                )),
            }
        }
        (Self(verifiers), problems)
    }

    /// Verifies a chain against the pool of the trust domain in the leaf's SPIFFE id.
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if others.len() >= MAX_CHAIN {
            return Err(Error::General(format!(
                "the chain has more than {MAX_CHAIN} certificates"
            )));
        }
        let refused = |error: &dyn fmt::Display| Error::General(error.to_string());
        let id: SpiffeId = only_uri(leaf)
            .map_err(|error| refused(&error))?
            .parse()
            .map_err(|error| refused(&error))?;
        let Some(pool) = self.0.get(&id.trust_domain) else {
            let known: Vec<&str> = self.0.keys().map(SmolStr::as_str).collect();
            return Err(Error::General(format!(
                "no roots for trust domain {}; known trust domains: {}",
                id.trust_domain,
                known.join(", "),
            )));
        };
        pool.verify_client_cert(leaf, others, now)
    }
}

fn store(domain: &str, roots: &[CertificateDer<'static>], problems: &mut Vec<String>) -> Arc<RootCertStore> {
    let mut store = RootCertStore::empty();
    for root in roots {
        if let Err(error) = store.add(root.clone()) {
            problems.push(format!("a root of trust domain {domain} cannot be used: {error}"));
        }
    }
    store.into()
}

/// Returns the usable CRLs. rustls reports an unusable one only when a verifier is built, so one is built with any
/// root.
fn revocation_lists(
    pools: &TrustPools,
    stores: &BTreeMap<SmolStr, Arc<RootCertStore>>,
    provider: &Arc<CryptoProvider>,
    problems: &mut Vec<String>,
) -> Vec<CertificateRevocationListDer<'static>> {
    let Some(any) = stores.values().find(|store| !store.is_empty()) else {
        return Vec::new();
    };
    let mut crls = Vec::new();
    for list in &pools.crls {
        match verifier(any.clone(), std::slice::from_ref(list), provider) {
            Ok(_) => crls.push(list.clone()),
            Err(error) => problems.push(format!("a CRL cannot be used: {error}")),
        }
    }
    crls
}

fn verifier(
    store: Arc<RootCertStore>,
    crls: &[CertificateRevocationListDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, VerifierBuilderError> {
    // A CRL covers one CA only; certificates of other CAs have an unknown revocation status, which is accepted.
    WebPkiClientVerifier::builder_with_provider(store, provider.clone())
        .with_crls(crls.iter().cloned())
        .allow_unknown_revocation_status()
        .build()
}

/// Verifies clients against the current trust pools. The certificate is optional, since callers may use a token
/// instead.
pub(super) struct TrustPoolVerifier {
    pools: watch::Receiver<Arc<TrustPools>>,
    provider: Arc<CryptoProvider>,
    /// The verifiers of the pools that were seen last. A mutex, not a message: rustls calls synchronously, and a
    /// rebuild takes milliseconds.
    built: Mutex<Option<(Arc<TrustPools>, Arc<PoolVerifiers>)>>,
}

impl TrustPoolVerifier {
    pub(super) fn new(pools: watch::Receiver<Arc<TrustPools>>, provider: Arc<CryptoProvider>) -> Self {
        Self {
            pools,
            provider,
            built: Mutex::default(),
        }
    }

    fn verifiers(&self) -> Arc<PoolVerifiers> {
        let pools = self.pools.borrow().clone();
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((built_for, verifiers)) = &*built
            && Arc::ptr_eq(built_for, &pools)
        {
            return verifiers.clone();
        }
        let (verifiers, problems) = PoolVerifiers::new(&pools, &self.provider);
        for problem in problems {
            tracing::warn!(problem, "trust pool is incomplete");
        }
        let verifiers = Arc::new(verifiers);
        *built = Some((pools, verifiers.clone()));
        verifiers
    }
}

impl fmt::Debug for TrustPoolVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TrustPoolVerifier")
    }
}

impl ClientCertVerifier for TrustPoolVerifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// Empty: clients have one certificate, and names of roots would disclose the mesh to unauthenticated clients.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verifiers().verify(end_entity, intermediates, now)
    }

    verify_signatures!(provider);
}

#[cfg(test)]
mod tests {
    use rustls::{crypto::aws_lc_rs::default_provider, pki_types::pem::PemObject};

    use super::*;
    use crate::auth::tls::fixture::TestCa;

    #[test]
    fn unusable_roots_do_not_affect_other_trust_domains() {
        let root = TestCa::new("cluster.local");
        let good = CertificateDer::pem_slice_iter(root.pem.as_bytes()).map(|root| root.expect("our own PEM"));
        let domains = BTreeMap::from([
            ("broken".into(), vec![CertificateDer::from(vec![0])]),
            ("cluster.local".into(), good.collect()),
            ("empty".into(), Vec::new()),
        ]);
        let crls = vec![CertificateRevocationListDer::from(vec![0])];
        let (verifiers, problems) = PoolVerifiers::new(&TrustPools { domains, crls }, &Arc::new(default_provider()));
        assert_eq!(problems.len(), 4, "{problems:?}");
        let client = root.client(&["spiffe://cluster.local/ns/default/sa/reviews"]);
        assert!(verifiers.verify(client.leaf(), &[], UnixTime::now()).is_ok());
    }
}
