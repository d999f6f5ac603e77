//! Access to debug pages, by one rule for HTTP and xDS.
//!
//! Callers on this machine and callers of the control plane's namespace may read all pages. All others may read only
//! the configuration of proxies of their own namespace.

use std::{net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::{ConnectInfo, Request, State},
    http::{StatusCode, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use smol_str::SmolStr;
use tokio::sync::watch;

use crate::{
    auth::{AuthenticationError, Authenticators, Credentials},
    base::{Namespace, SpiffeId},
    model::{MeshSnapshot, policy::root_namespace},
    table::Cx,
};

/// Path prefix of the pages.
pub(super) const PREFIX: &str = "/debug/";

/// Callers that may read a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readers {
    /// Callers with access to everything.
    ControlPlane,
    /// Also callers of the proxy's namespace: the page is about one proxy.
    ProxyNamespace,
}

/// Returns the readers of a page by its name.
pub(super) type ReadersOf = fn(&str) -> Readers;

/// Scope of a caller's access.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DebugScope {
    /// All pages and proxies.
    All,
    /// Proxies of this namespace.
    Namespace(Namespace),
}

impl DebugScope {
    /// Returns true if a page with these readers may be read.
    pub(super) fn permits(&self, readers: Readers) -> bool {
        *self == Self::All || readers == Readers::ProxyNamespace
    }

    /// Returns true if proxies of this namespace are visible.
    pub(super) fn sees(&self, namespace: &Namespace) -> bool {
        match self {
            Self::All => true,
            Self::Namespace(own) => own == namespace,
        }
    }
}

/// Access rules. Cheap to clone.
#[derive(Clone)]
pub struct Access {
    authenticators: Authenticators,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
}

impl Access {
    /// Returns rules that use these authenticators; the mesh defines its namespaces and trust domains.
    pub fn new(authenticators: Authenticators, mesh: watch::Receiver<Arc<MeshSnapshot>>) -> Self {
        Self { authenticators, mesh }
    }

    /// Returns the scope of a caller with these identities; `None` for no access.
    pub(super) fn scope(&self, identities: &[SmolStr]) -> Option<DebugScope> {
        if !self.is_enforced() {
            return Some(DebugScope::All);
        }
        self.scope_of_identities(identities)
    }

    /// Returns true if a caller with these identities is of the control plane, also where access does not depend on it:
    /// it may read everything, or it is of the namespace that the control plane runs in.
    pub(super) fn is_of_control_plane(&self, identities: &[SmolStr]) -> bool {
        let own = self.mesh.borrow().installation.namespace.clone();
        match self.scope_of_identities(identities) {
            Some(DebugScope::All) => true,
            Some(DebugScope::Namespace(namespace)) => namespace == own,
            None => false,
        }
    }

    fn scope_of_identities(&self, identities: &[SmolStr]) -> Option<DebugScope> {
        let mesh = self.mesh.borrow().clone();
        scope(&mesh, identities)
    }

    /// Returns true if a caller with these identities has access to everything.
    pub(super) fn permits_everything(&self, identities: &[SmolStr]) -> bool {
        self.scope(identities) == Some(DebugScope::All)
    }

    /// Returns true if access depends on the caller's identity.
    pub(super) fn is_enforced(&self) -> bool {
        self.mesh.borrow().installation.features.enable_debug_endpoint_auth
    }

    /// Guards pages by these rules; `readers_of` returns the readers of a page by its name. The scope of each caller is
    /// an extension of its request.
    pub(super) fn guard(&self, pages: Router, readers_of: ReadersOf) -> Router {
        pages.layer(middleware::from_fn_with_state((self.clone(), readers_of), guard))
    }

    async fn scope_of(&self, request: &Parts, readers_of: ReadersOf) -> Result<DebugScope, Response> {
        let peer = request.extensions.get::<ConnectInfo<SocketAddr>>();
        let address = peer.map(|ConnectInfo(address)| *address);
        if address.is_some_and(|address| address.ip().to_canonical().is_loopback()) {
            return Ok(DebugScope::All);
        }
        let credentials = Credentials {
            address,
            is_tls: false,
            certificate: None,
            headers: &request.headers,
        };
        let path = request.uri.path();
        let caller = self.authenticators.authenticate(credentials).await.map_err(|refused| {
            tracing::warn!(path, ?address, %refused, "debug page authentication failed");
            let try_again = refused
                .0
                .iter()
                .any(|(_, refusal)| matches!(refusal, AuthenticationError::Unavailable(_)));
            if try_again {
                return (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "authentication is unavailable; retry later\n",
                )
                    .into_response();
            }
            let hint =
                "authentication failed; hint: use a bearer token with the mesh's audience, or kubectl port-forward\n";
            (StatusCode::UNAUTHORIZED, hint).into_response()
        })?;
        if !self.is_enforced() {
            return Ok(DebugScope::All);
        }
        let readers = readers_of(path.strip_prefix(PREFIX).unwrap_or_default());
        let scope = self.scope(&caller.identities).filter(|scope| scope.permits(readers));
        scope.ok_or_else(|| {
            tracing::warn!(path, ?address, identities = ?caller.identities, "debug page access denied");
            (StatusCode::FORBIDDEN, "access denied\n").into_response()
        })
    }
}

async fn guard(State((access, readers_of)): State<(Access, ReadersOf)>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    match access.scope_of(&parts, readers_of).await {
        Ok(scope) => {
            parts.extensions.insert(scope);
            next.run(Request::from_parts(parts, body)).await
        }
        Err(refusal) => refusal,
    }
}

/// Returns the scope of a caller. The first identity that is a service account counts; one of a foreign trust domain
/// has no access, whatever its namespace.
fn scope(mesh: &MeshSnapshot, identities: &[SmolStr]) -> Option<DebugScope> {
    let id = identities.iter().find_map(|id| id.parse::<SpiffeId>().ok())?;
    let cx = Cx::untracked();
    let config = mesh.mesh_config(&cx);
    let mut domains = std::iter::once(&config.trust_domain).chain(&config.trust_domain_aliases);
    if id.namespace.is_empty() || !domains.any(|domain| domain.replace('@', ".") == id.trust_domain) {
        return None;
    }
    let allowed = &mesh.installation.features.debug_endpoint_auth_allowed_namespaces;
    let is_system = id.namespace == root_namespace(&cx, mesh)
        || allowed
            .iter()
            .any(|namespace| !namespace.is_empty() && id.namespace == **namespace);
    Some(if is_system {
        DebugScope::All
    } else {
        DebugScope::Namespace(id.namespace)
    })
}

#[cfg(test)]
mod tests;
