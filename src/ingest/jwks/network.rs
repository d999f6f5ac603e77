//! Fetches key sets over the network.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use prometheus::{IntCounter, Registry};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::{
    Fetch, KeySet,
    keys::NoKeySet,
    shares::{KEYS_KIB, SourceShares},
};
use crate::{
    api::fetched_keys::KeySource,
    environment,
    fetch::{FetchError, Fetcher},
    metrics,
    task::jittered,
};

/// Concurrent fetches, which bounds the sockets of thousands of policies.
const MAX_FETCHES: usize = 256;

/// Reason why there is no key set, for the author of the policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchFailure {
    /// The document could not be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// It is not a key set.
    #[error(transparent)]
    NoKeySet(#[from] NoKeySet),
    /// The issuer's discovery document has no URL of keys.
    #[error("the OpenID discovery document has no jwks_uri")]
    NoKeysUrl,
    /// The discovery document could be fetched, but not the keys.
    #[error("jwks_uri {url} of the OpenID discovery document: {error}")]
    Described {
        /// URL of the keys.
        url: String,
        /// Error.
        error: FetchError,
    },
    /// The key sets of the policy's namespace take too much memory.
    #[error("the keys of all issuers of the namespace take more than {KEYS_KIB} KiB of memory")]
    NoMemory,
}

/// `pilot_jwks_resolver_network_fetch_success_total` and `..._fail_total`.
#[derive(Clone)]
pub struct NetworkMetrics {
    success: IntCounter,
    fail: IntCounter,
}

impl NetworkMetrics {
    /// Registers the counters.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        Ok(Self {
            success: metrics::counter(
                registry,
                "pilot_jwks_resolver_network_fetch_success_total",
                "Total number of successfully network fetch by pilot jwks resolver",
            )?,
            fail: metrics::counter(
                registry,
                "pilot_jwks_resolver_network_fetch_fail_total",
                "Total number of failed network fetch by pilot jwks resolver",
            )?,
        })
    }
}

/// Fetches over the network.
pub(super) struct Network {
    fetcher: Fetcher,
    metrics: NetworkMetrics,
    fetches: Semaphore,
}

impl Network {
    pub(super) fn new(fetcher: Fetcher, metrics: NetworkMetrics) -> Self {
        Self {
            fetcher,
            metrics,
            fetches: Semaphore::new(MAX_FETCHES),
        }
    }

    async fn get(&self, url: &str, timeout: Duration) -> Result<Bytes, FetchError> {
        let answer = self.fetcher.get(url, timeout).await;
        let counter = if answer.is_ok() {
            &self.metrics.success
        } else {
            &self.metrics.fail
        };
        counter.inc();
        answer
    }

    async fn keys(&self, source: &KeySource, timeout: Duration) -> Result<KeySet, FetchFailure> {
        let begin = environment::now();
        let first = self.get(&source.url(), timeout).await?;
        let document = match source {
            KeySource::Keys(_) => first,
            KeySource::Discovery(_) => {
                let url = keys_url(&first).ok_or(FetchFailure::NoKeysUrl)?;
                let rest = timeout.saturating_sub(environment::now().saturating_duration_since(begin));
                let keys = self.get(&url, rest).await;
                keys.map_err(|error| FetchFailure::Described { url, error })?
            }
        };
        Ok(KeySet::parse(&document)?)
    }
}

impl Fetch for Network {
    fn fetch(
        self: Arc<Self>,
        source: KeySource,
        timeout: Duration,
        wait: Duration,
        shares: SourceShares,
    ) -> BoxFuture<'static, Result<KeySet, FetchFailure>> {
        Box::pin(async move {
            // Replicas and sources do not fetch at the same time.
            tokio::time::sleep(jittered(wait)).await;
            // The share of the namespace comes first: a fetch that waits for it must hold no permit that others need.
            let _share = shares.fetch().await;
            // The semaphore is never closed; without a permit only the bound would be lost.
            let _permit = self.fetches.acquire().await;
            self.keys(&source, timeout).await
        })
    }
}

/// Returns `jwks_uri` of a discovery document.
fn keys_url(description: &[u8]) -> Option<String> {
    let description: Value = serde_json::from_slice(description).ok()?;
    Some(description.get("jwks_uri")?.as_str()?.to_owned())
}
