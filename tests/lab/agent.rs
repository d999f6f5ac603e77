//! The certificate part of istio-agent: it creates a key, has it signed with a token of the workload's service account,
//! and does so again on request. A ztunnel does the same for the workloads of its node, with its own token.

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
    /// The identity of the certificates, if it is not that of the token.
    identity: Option<String>,
    certificate: watch::Sender<Arc<Certificate>>,
}

impl Agent {
    /// Requests the first certificate.
    pub(crate) fn start(control_plane: agent::Agent, token: ClientCredentials) -> Result<Agent, String> {
        Agent::start_for(control_plane, token, None)
    }

    /// Like [`Self::start`], for the identity of another workload if one is given.
    pub(crate) fn start_for(
        control_plane: agent::Agent,
        token: ClientCredentials,
        identity: Option<String>,
    ) -> Result<Agent, String> {
        let first = RUNTIME.block_on(control_plane.certificate_for(&token, KeyKind::Ecdsa, identity.as_deref()));
        let first = first.map_err(|status| status.to_string())?;
        Ok(Agent {
            control_plane,
            token,
            identity,
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
        let control_plane = self.control_plane();
        let renewed = control_plane.certificate_for(&self.token, KeyKind::Ecdsa, self.identity.as_deref());
        let renewed = RUNTIME.block_on(renewed);
        let renewed = renewed.map_err(|status| status.to_string())?;
        self.certificate.send_replace(Arc::new(renewed));
        Ok(())
    }
}
