//! The CA of this process, live: whatever its certificate comes from, there is one authority at a time, and one set of roots.

use std::{sync::Arc, time::SystemTime};

use futures::{FutureExt, future::BoxFuture};
use tokio::sync::watch;

use super::{
    TrustBundle,
    authority::{Authority, Limits},
    signing::{Issued, SignError, SignErrorKind, Signer, SigningRequest},
};

/// What others need of the CA. Cheap to clone.
#[derive(Clone)]
pub struct LocalCa {
    /// Signs requests of workloads with the authority of the moment.
    pub signer: Arc<dyn Signer>,
    /// What signs now; none while nothing is known.
    pub authority: watch::Receiver<Option<Arc<Authority>>>,
    /// What the mesh trusts now; none while nothing is known.
    pub trust: watch::Receiver<Option<Arc<TrustBundle>>>,
}

/// Signs with the authority of the moment.
pub struct LocalSigner {
    authority: watch::Receiver<Option<Arc<Authority>>>,
    limits: Limits,
    clock: fn() -> SystemTime,
}

impl LocalSigner {
    /// A signer; `clock` says what time it is.
    pub fn new(authority: watch::Receiver<Option<Arc<Authority>>>, limits: Limits, clock: fn() -> SystemTime) -> Self {
        Self {
            authority,
            limits,
            clock,
        }
    }
}

impl Signer for LocalSigner {
    fn sign(&self, request: SigningRequest) -> BoxFuture<'_, Result<Issued, SignError>> {
        // In place: it is a millisecond of work that the caller's threads are there for.
        async move {
            let authority = self.authority.borrow().clone();
            let authority = authority.ok_or_else(|| SignError {
                kind: SignErrorKind::NotReady,
                text: "Istio CA is not ready: no signing certificate is known yet".into(),
            })?;
            authority.issue(&request, (self.clock)(), self.limits)
        }
        .boxed()
    }
}
