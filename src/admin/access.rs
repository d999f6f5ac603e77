//! Who may read debug pages, over HTTP and over xDS: one rule for both.
//!
//! Callers from this machine may read all of them, and those of the control plane's namespace. All others may ask for the
//! configuration of proxies of their own namespace, and for nothing else.

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

/// Where the pages are.
pub(super) const PREFIX: &str = "/debug/";

/// The pages that tell of one proxy, which those of its namespace may read.
const OF_A_PROXY: [&str; 3] = ["config_dump", "edsz", "ndsz"];

/// How much a caller may see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// Everything.
    All,
    /// Proxies of this namespace.
    Namespace(Namespace),
}

impl Sight {
    /// Whether a page, named as in `/debug/list`, may be read at all.
    pub(super) fn permits(&self, page: &str) -> bool {
        *self == Self::All || OF_A_PROXY.contains(&page)
    }

    /// Whether a proxy of this namespace may be seen.
    pub(super) fn sees(&self, namespace: &Namespace) -> bool {
        match self {
            Self::All => true,
            Self::Namespace(own) => own == namespace,
        }
    }
}

/// What decides who may read what. Cheap to clone.
#[derive(Clone)]
pub struct Access {
    authenticators: Authenticators,
    mesh: watch::Receiver<Arc<MeshSnapshot>>,
}

impl Access {
    /// Callers are known by these authenticators; the mesh says which namespaces and trust domains are its own.
    pub fn new(authenticators: Authenticators, mesh: watch::Receiver<Arc<MeshSnapshot>>) -> Self {
        Self { authenticators, mesh }
    }

    /// What somebody with these identities may see; `None`: nothing.
    pub(super) fn sight(&self, identities: &[SmolStr]) -> Option<Sight> {
        let mesh = self.mesh.borrow().clone();
        sight(&mesh, identities)
    }

    /// True if callers are told apart by their namespaces, and nobody reads without being known.
    pub(super) fn is_enforced(&self) -> bool {
        self.mesh.borrow().installation.features.enable_debug_endpoint_auth
    }

    /// Pages for callers who may read them. What each may see is an extension of its request.
    pub fn guard(&self, pages: Router) -> Router {
        pages.layer(middleware::from_fn_with_state(self.clone(), guard))
    }

    async fn sight_of(&self, request: &Parts) -> Result<Sight, Response> {
        let peer = request.extensions.get::<ConnectInfo<SocketAddr>>();
        let address = peer.map(|ConnectInfo(address)| *address);
        if address.is_some_and(|address| address.ip().to_canonical().is_loopback()) {
            return Ok(Sight::All);
        }
        let credentials = Credentials {
            address,
            is_tls: false,
            certificate: None,
            headers: &request.headers,
        };
        let path = request.uri.path();
        let caller = self.authenticators.authenticate(credentials).await.map_err(|refused| {
            tracing::warn!(path, ?address, %refused, "a caller of a debug page is not known");
            let try_again = refused
                .0
                .iter()
                .any(|(_, refusal)| matches!(refusal, AuthenticationError::Unavailable(_)));
            if try_again {
                return (StatusCode::SERVICE_UNAVAILABLE, "who calls cannot be found out now\n").into_response();
            }
            let hint = "who calls is not known; hint: a bearer token of the mesh's audience, or kubectl port-forward\n";
            (StatusCode::UNAUTHORIZED, hint).into_response()
        })?;
        if !self.is_enforced() {
            return Ok(Sight::All);
        }
        let page = path.strip_prefix(PREFIX).unwrap_or_default();
        let sight = self.sight(&caller.identities).filter(|sight| sight.permits(page));
        sight.ok_or_else(|| {
            tracing::warn!(path, ?address, identities = ?caller.identities, "a caller may not read a debug page");
            (StatusCode::FORBIDDEN, "not for this caller\n").into_response()
        })
    }
}

async fn guard(State(access): State<Access>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    match access.sight_of(&parts).await {
        Ok(sight) => {
            parts.extensions.insert(sight);
            next.run(Request::from_parts(parts, body)).await
        }
        Err(refusal) => refusal,
    }
}

/// What somebody with these identities may see. The first that is an account counts; one of a foreign trust domain is
/// nobody here, whatever namespace it names.
fn sight(mesh: &MeshSnapshot, identities: &[SmolStr]) -> Option<Sight> {
    let features = &mesh.installation.features;
    if !features.enable_debug_endpoint_auth {
        return Some(Sight::All);
    }
    let id = identities.iter().find_map(|id| id.parse::<SpiffeId>().ok())?;
    let cx = Cx::untracked();
    let config = mesh.mesh_config(&cx);
    let mut domains = std::iter::once(&config.trust_domain).chain(&config.trust_domain_aliases);
    if id.namespace.is_empty() || !domains.any(|domain| domain.replace('@', ".") == id.trust_domain) {
        return None;
    }
    let allowed = &features.debug_endpoint_auth_allowed_namespaces;
    let is_system = id.namespace == root_namespace(&cx, mesh)
        || allowed
            .iter()
            .any(|namespace| !namespace.is_empty() && id.namespace == **namespace);
    Some(if is_system {
        Sight::All
    } else {
        Sight::Namespace(id.namespace)
    })
}

#[cfg(test)]
mod tests;
