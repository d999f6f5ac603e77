//! Verification of client certificates: a pool of roots for each trust domain, so that the CA of one domain cannot vouch for
//! workloads of another.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime},
    server::{
        VerifierBuilderError, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use smol_str::SmolStr;
use tokio::sync::watch;

use super::only_uri;
use crate::{auth::trust::TrustPools, base::spiffe::SpiffeId};

/// Longest chain that is looked at, the leaf included.
const MAX_CHAIN: usize = 8;

/// Verifiers of chains, made of pools.
struct Verifiers(BTreeMap<SmolStr, Arc<dyn ClientCertVerifier>>);

impl Verifiers {
    /// What cannot be used is left out and told: a bad certificate of one domain takes nothing from the others.
    fn new(pools: &TrustPools, provider: &Arc<CryptoProvider>) -> (Self, Vec<String>) {
        let mut problems = Vec::new();
        let stores: BTreeMap<_, _> = pools
            .domains
            .iter()
            .map(|(domain, roots)| (domain.clone(), store(domain, roots, &mut problems)))
            .collect();
        let revoked = revocation_lists(pools, &stores, provider, &mut problems);
        let mut verifiers = BTreeMap::new();
        for (domain, store) in stores {
            match verifier(store, &revoked, provider) {
                Ok(verifier) => drop(verifiers.insert(domain, verifier)),
                Err(error) => problems.push(format!("nobody can vouch for trust domain {domain}: {error}")),
            }
        }
        (Self(verifiers), problems)
    }

    /// Verifies a chain against the pool of its leaf's trust domain.
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if others.len() >= MAX_CHAIN {
            return Err(Error::General(format!("a chain of more than {MAX_CHAIN} certificates")));
        }
        let refused = |error: &dyn fmt::Display| Error::General(error.to_string());
        let id: SpiffeId = only_uri(leaf)
            .map_err(|error| refused(&error))?
            .parse()
            .map_err(|error| refused(&error))?;
        let Some(pool) = self.0.get(&id.trust_domain) else {
            let known: Vec<&str> = self.0.keys().map(SmolStr::as_str).collect();
            return Err(Error::General(format!(
                "no roots are known for trust domain {}; known are those of {}",
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

/// The lists that can be read. Whether one can is only told when it is used, with any root.
fn revocation_lists(
    pools: &TrustPools,
    stores: &BTreeMap<SmolStr, Arc<RootCertStore>>,
    provider: &Arc<CryptoProvider>,
    problems: &mut Vec<String>,
) -> Vec<CertificateRevocationListDer<'static>> {
    let Some(any) = stores.values().find(|store| !store.is_empty()) else {
        return Vec::new();
    };
    let mut revoked = Vec::new();
    for list in &pools.revoked {
        match verifier(any.clone(), std::slice::from_ref(list), provider) {
            Ok(_) => revoked.push(list.clone()),
            Err(error) => problems.push(format!("a list of revoked certificates cannot be used: {error}")),
        }
    }
    revoked
}

fn verifier(
    store: Arc<RootCertStore>,
    revoked: &[CertificateRevocationListDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, VerifierBuilderError> {
    // A list says what was revoked by one CA; of certificates of others it says nothing, which is no reason to refuse.
    WebPkiClientVerifier::builder_with_provider(store, provider.clone())
        .with_crls(revoked.iter().cloned())
        .allow_unknown_revocation_status()
        .build()
}

/// Verifies clients against the pools of the moment. A certificate is optional: there are other ways to be known.
pub(super) struct LiveVerifier {
    pools: watch::Receiver<Arc<TrustPools>>,
    provider: Arc<CryptoProvider>,
    /// What was made of the pools that were seen last. A lock, not a message: the library asks synchronously, and making
    /// it anew is a matter of milliseconds.
    made: Mutex<Option<(Arc<TrustPools>, Arc<Verifiers>)>>,
}

impl LiveVerifier {
    pub(super) fn new(pools: watch::Receiver<Arc<TrustPools>>, provider: Arc<CryptoProvider>) -> Self {
        Self {
            pools,
            provider,
            made: Mutex::default(),
        }
    }

    fn verifiers(&self) -> Arc<Verifiers> {
        let pools = self.pools.borrow().clone();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, verifiers)) = &*made
            && Arc::ptr_eq(of, &pools)
        {
            return verifiers.clone();
        }
        let (verifiers, problems) = Verifiers::new(&pools, &self.provider);
        for problem in problems {
            tracing::warn!("client certificates: {problem}");
        }
        let verifiers = Arc::new(verifiers);
        *made = Some((pools, verifiers.clone()));
        verifiers
    }
}

impl fmt::Debug for LiveVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LiveVerifier")
    }
}

impl ClientCertVerifier for LiveVerifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// None: clients have one certificate, and names of roots would only tell strangers about the mesh.
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

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rustls::{crypto::aws_lc_rs::default_provider, pki_types::pem::PemObject};

    use super::*;
    use crate::auth::tls::fixture::TestCa;

    #[test]
    fn what_cannot_be_read_takes_nothing_from_other_domains() {
        let root = TestCa::new("cluster.local");
        let good = CertificateDer::pem_slice_iter(root.pem.as_bytes()).map(|root| root.expect("our own PEM"));
        let domains = BTreeMap::from([
            ("broken".into(), vec![CertificateDer::from(vec![0])]),
            ("cluster.local".into(), good.collect()),
            ("empty".into(), Vec::new()),
        ]);
        let revoked = vec![CertificateRevocationListDer::from(vec![0])];
        let (verifiers, problems) = Verifiers::new(&TrustPools { domains, revoked }, &Arc::new(default_provider()));
        assert_eq!(problems.len(), 4, "{problems:?}");
        let client = root.client(&["spiffe://cluster.local/ns/default/sa/reviews"]);
        assert!(verifiers.verify(client.leaf(), &[], UnixTime::now()).is_ok());
    }
}
