//! The certificate part of istio-agent: it creates a key, has it signed with a token of the workload's service account,
//! and does so again on request.

use std::sync::Arc;

use tokio::sync::watch;

use crate::support::agent::{self, Certificate, ClientCredentials, KeyKind, Trust};
use crate::support::http::RUNTIME;

/// The current certificate and roots of a workload.
pub(crate) type CertificateWatch = watch::Receiver<Arc<Certificate>>;

/// The certificate client of one workload.
pub(crate) struct Agent {
    /// The control plane, with the roots of the first connection.
    control_plane: agent::Agent,
    /// A token of the service account for the audience of the mesh's CA, and the cluster that issued it.
    token: ClientCredentials,
    certificate: watch::Sender<Arc<Certificate>>,
}

impl Agent {
    /// Requests the first certificate.
    pub(crate) fn start(control_plane: agent::Agent, token: ClientCredentials) -> Result<Agent, String> {
        let first = RUNTIME.block_on(control_plane.certificate(&token, KeyKind::Ecdsa));
        let first = first.map_err(|status| status.to_string())?;
        Ok(Agent {
            control_plane,
            token,
            certificate: watch::Sender::new(Arc::new(first)),
        })
    }

    pub(crate) fn known(&self) -> CertificateWatch {
        self.certificate.subscribe()
    }

    /// The control plane, verified against the workload's current roots.
    fn control_plane(&self) -> agent::Agent {
        let mut control_plane = self.control_plane.clone();
        control_plane.trust = Trust::Roots(self.certificate.borrow().roots.clone());
        control_plane
    }

    /// Requests a certificate for a new key. The workload then uses it, and the roots that came with it.
    pub(crate) fn renew(&self) -> Result<(), String> {
        let renewed = RUNTIME.block_on(self.control_plane().certificate(&self.token, KeyKind::Ecdsa));
        let renewed = renewed.map_err(|status| status.to_string())?;
        self.certificate.send_replace(Arc::new(renewed));
        Ok(())
    }
}
