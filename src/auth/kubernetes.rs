//! Authentication by service account token, through a TokenReview at the API server of the caller's cluster.
//!
//! Only the API server knows whether a pod or account still exists, so a result is cached for seconds, not for the
//! lifetime of the token. Concurrent requests with one token share one review: a proxy requests its certificate and its
//! configuration at the same time.

mod review;
mod review_cache;

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Instant, SystemTime},
};

use ::kube::Client;
use futures::{FutureExt, future::BoxFuture};
use smol_str::SmolStr;
use tokio::sync::watch;

use self::review_cache::{CacheKey, ReviewCache};
use super::{
    AuthenticationError, Authenticator, Caller, CallerSource, Credentials, KubernetesInfo, TOKEN_REVIEW_TIMEOUT,
    TrustDomains, shares::Shares, token,
};
use crate::{base::ClusterId, environment, kube::clients::Clients};

/// The maximum number of concurrent reviews of each API server; others wait. Unauthenticated clients can send tokens
/// and must not overload it. A server that does not answer delays only its own cluster.
const MAX_CONCURRENT_REVIEWS: usize = 64;
/// The maximum number of concurrent reviews of each API server for clients of one address. Tokens may be forged, so the
/// address is the only source that is known.
const MAX_REVIEWS_PER_ADDRESS: usize = 32;

/// Accepts service account tokens that an API server authenticates.
#[doc(alias = "KubeJWTAuthenticator")]
#[derive(Clone)]
pub struct KubernetesTokens {
    clients: Clients,
    audiences: Arc<[SmolStr]>,
    domains: watch::Receiver<Arc<TrustDomains>>,
    cache: ReviewCache,
    permits: Arc<Shares<ClusterId>>,
    permits_of_addresses: Arc<Shares<(ClusterId, Option<IpAddr>)>>,
    clock: fn() -> (Instant, SystemTime),
}

/// A token that an API server has authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ReviewedToken {
    info: KubernetesInfo,
    /// The expiry in the token's claims, which the API server has verified.
    expires_at: Option<SystemTime>,
}

impl KubernetesTokens {
    /// Reviews tokens at the API servers of `clients`, for any of the audiences (`TOKEN_AUDIENCES`). Without audiences,
    /// no token is accepted, as in Istio: many programs hold tokens for the API server itself.
    pub fn new(clients: Clients, audiences: &[SmolStr], domains: watch::Receiver<Arc<TrustDomains>>) -> Self {
        let audiences = audiences.iter().filter(|audience| !audience.is_empty());
        Self {
            clients,
            audiences: audiences.cloned().collect(),
            domains,
            cache: ReviewCache::default(),
            permits: Arc::new(Shares::new(MAX_CONCURRENT_REVIEWS)),
            permits_of_addresses: Arc::new(Shares::new(MAX_REVIEWS_PER_ADDRESS)),
            clock: || (environment::now(), environment::wall_clock()),
        }
    }

    async fn caller(&self, credentials: Credentials<'_>) -> Result<Caller, AuthenticationError> {
        let token = token::bearer(credentials.headers)?;
        let asked = token::cluster(credentials.headers);
        let (cluster, client) = self
            .clients
            .get(asked)
            .map_err(|unknown| AuthenticationError::Invalid(format!("header clusterid: {unknown}")))?;
        let claims = token::unverified_claims(token)?;
        let (now, wall_clock) = (self.clock)();
        let expires_at = claims.expires_at();
        if expires_at.is_some_and(|end| end <= wall_clock) {
            return Err(AuthenticationError::Invalid("the token has expired".into()));
        }
        let key = CacheKey::new(&cluster, token);
        let address = credentials.address.map(|address| address.ip());
        let review = self.review(address, cluster, client, token.to_owned(), expires_at);
        let reviewed = self.cache.get_or(key, now, wall_clock, review, self.clock).await?;
        let info = reviewed.info.clone();
        let domains = self.domains.borrow().clone();
        let id = domains.id(info.namespace.clone(), info.service_account.clone());
        Ok(Caller {
            source: CallerSource::IdToken,
            identities: vec![id.to_string().into()],
            kubernetes: Some(info),
            expires_at: reviewed.expires_at,
        })
    }

    /// Reviews a token of a client, within the timeout and the concurrency limits.
    fn review(
        &self,
        address: Option<IpAddr>,
        cluster: ClusterId,
        client: Client,
        token: String,
        expires_at: Option<SystemTime>,
    ) -> BoxFuture<'static, Result<ReviewedToken, AuthenticationError>> {
        let audiences = self.audiences.clone();
        let (permits, of_addresses) = (self.permits.clone(), self.permits_of_addresses.clone());
        let id = cluster.clone();
        let asking = async move {
            let _of_address = of_addresses.acquire((cluster.clone(), address)).await;
            let _permit = permits.acquire(cluster.clone()).await;
            let info = review::review(client, cluster, token, &audiences).await?;
            Ok(ReviewedToken { info, expires_at })
        };
        async move {
            match tokio::time::timeout(TOKEN_REVIEW_TIMEOUT, asking).await {
                Ok(answer) => answer,
                Err(_) => {
                    let seconds = TOKEN_REVIEW_TIMEOUT.as_secs();
                    let text = format!("the API server of cluster {id} did not review the token within {seconds} s");
                    Err(AuthenticationError::Unavailable(text))
                }
            }
        }
        .boxed()
    }
}

impl Authenticator for KubernetesTokens {
    fn name(&self) -> &'static str {
        "Kubernetes token"
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        self.caller(credentials).boxed()
    }
}

#[cfg(test)]
mod tests;
