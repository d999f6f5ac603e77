//! What istio-agent does for its workload: it makes a key, has the control plane certify it for a token of the workload's
//! service account, and does so again when it is told to.

use std::sync::Arc;

use tokio::sync::watch;

use crate::support::agent::{self, Certificate, KeyKind, Shown, Trust};
use crate::support::http::RUNTIME;

/// What a workload shows and trusts, now and from now on.
pub(crate) type Known = watch::Receiver<Arc<Certificate>>;

/// See the module's text.
pub(crate) struct Agent {
    /// The control plane, with what it was verified against at first.
    control_plane: agent::Agent,
    /// A token of the service account for the audience of the mesh's certificate authority, and the cluster that it is of.
    token: Shown,
    certificate: watch::Sender<Arc<Certificate>>,
}

impl Agent {
    /// Has the first key certified.
    pub(crate) fn start(control_plane: agent::Agent, token: Shown) -> Result<Agent, String> {
        let first = RUNTIME.block_on(control_plane.certificate(&token, KeyKind::Ecdsa));
        let first = first.map_err(|status| status.to_string())?;
        Ok(Agent {
            control_plane,
            token,
            certificate: watch::Sender::new(Arc::new(first)),
        })
    }

    pub(crate) fn known(&self) -> Known {
        self.certificate.subscribe()
    }

    /// The control plane, verified against what the workload trusts now.
    fn control_plane(&self) -> agent::Agent {
        let mut control_plane = self.control_plane.clone();
        control_plane.trust = Trust::Roots(self.certificate.borrow().roots.clone());
        control_plane
    }

    /// Has a new key certified; from then on the workload shows that, and trusts what the control plane says with it.
    pub(crate) fn renew(&self) -> Result<(), String> {
        let renewed = RUNTIME.block_on(self.control_plane().certificate(&self.token, KeyKind::Ecdsa));
        let renewed = renewed.map_err(|status| status.to_string())?;
        self.certificate.send_replace(Arc::new(renewed));
        Ok(())
    }
}
