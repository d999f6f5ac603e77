//! Callers by tokens of their service account, which the API server of their cluster is asked about.
//!
//! Only the API server knows whether a pod or account still exists, so its answer is believed for seconds, not for the life
//! of the token. Requests with one token that come at once are one review: a proxy asks for its certificate and its
//! configuration at the same moment.

mod memory;
mod review;

use std::{
    sync::Arc,
    time::{Instant, SystemTime},
};

use ::kube::Client;
use futures::{FutureExt, future::BoxFuture};
use smol_str::SmolStr;
use tokio::sync::{Semaphore, watch};

use self::memory::{Key, Memory};
use super::{
    Authenticator, Caller, CallerSource, Credentials, KubernetesInfo, REVIEW_PATIENCE, Refusal, TrustDomains, token,
};
use crate::{base::ClusterId, environment, kube::clients::Clients};

/// How many reviews are under way at most; others wait for a place. Whoever may connect can send tokens, and the API server
/// has other things to do.
const REVIEWS: usize = 64;

/// Believes what API servers say of tokens.
#[derive(Clone)]
pub struct KubernetesTokens {
    clients: Clients,
    audiences: Arc<[SmolStr]>,
    domains: watch::Receiver<Arc<TrustDomains>>,
    memory: Memory,
    places: Arc<Semaphore>,
    clock: fn() -> (Instant, SystemTime),
}

/// What is known of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Reviewed {
    info: KubernetesInfo,
    /// When the token expires, by its own claims, which the API server has verified.
    expires_at: Option<SystemTime>,
}

impl KubernetesTokens {
    /// Asks the API servers of `clients` about tokens for any of the audiences (`TOKEN_AUDIENCES`); without audiences, about
    /// tokens for the API server itself.
    pub fn new(clients: Clients, audiences: &[SmolStr], domains: watch::Receiver<Arc<TrustDomains>>) -> Self {
        let audiences = audiences.iter().filter(|audience| !audience.is_empty());
        Self {
            clients,
            audiences: audiences.cloned().collect(),
            domains,
            memory: Memory::default(),
            places: Arc::new(Semaphore::new(REVIEWS)),
            clock: || (environment::now(), environment::wall_clock()),
        }
    }

    async fn caller(&self, credentials: Credentials<'_>) -> Result<Caller, Refusal> {
        let token = token::bearer(credentials.headers)?;
        let asked = token::cluster(credentials.headers);
        let (cluster, client) = self
            .clients
            .get(asked)
            .map_err(|unknown| Refusal::Invalid(format!("the caller says that it is elsewhere: {unknown}")))?;
        let claims = token::unverified(token)?;
        let (now, calendar) = (self.clock)();
        let expires_at = claims.expires_at();
        if expires_at.is_some_and(|end| end <= calendar) {
            return Err(Refusal::Invalid("the token has expired".into()));
        }
        let key = Key::new(&cluster, token);
        let review = self.review(cluster, client, token.to_owned(), expires_at);
        let reviewed = self.memory.get_or(key, now, calendar, review, self.clock).await?;
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

    /// Asks, within bounds of time and number.
    fn review(
        &self,
        cluster: ClusterId,
        client: Client,
        token: String,
        expires_at: Option<SystemTime>,
    ) -> BoxFuture<'static, Result<Reviewed, Refusal>> {
        let (audiences, places) = (self.audiences.clone(), self.places.clone());
        let id = cluster.clone();
        let asking = async move {
            let _place = places.acquire().await;
            let info = review::review(client, cluster, token, &audiences).await?;
            Ok(Reviewed { info, expires_at })
        };
        async move {
            match tokio::time::timeout(REVIEW_PATIENCE, asking).await {
                Ok(answer) => answer,
                Err(_) => {
                    let seconds = REVIEW_PATIENCE.as_secs();
                    let text = format!("the API server of cluster {id} did not review the token within {seconds} s");
                    Err(Refusal::Unavailable(text))
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

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, Refusal>> {
        self.caller(credentials).boxed()
    }
}

#[cfg(test)]
mod tests;
