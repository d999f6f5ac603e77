//! The fetch schedule and the last roots of SPIFFE bundle endpoints.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use smol_str::SmolStr;

use crate::ca::certificate::Certificate;

/// The fetch interval. Parity (pilot/pkg/trustbundle/trustbundle.go): 30 minutes.
pub(super) const INTERVAL: Duration = Duration::from_mins(30);
/// The first backoff after a failure; it doubles up to [`INTERVAL`].
pub(super) const RETRY: Duration = Duration::from_mins(1);

/// Endpoints by URL as in the mesh config.
#[derive(Default)]
pub(super) struct Endpoints(BTreeMap<SmolStr, Endpoint>);

struct Endpoint {
    roots: Vec<Certificate>,
    /// The time of the next fetch; none during a fetch. Monotonic: the wall clock may be set back.
    due: Option<Instant>,
    failures: u32,
}

impl Endpoints {
    /// Sets the endpoints. New ones are due at once. Returns true if an endpoint with roots was removed.
    pub(super) fn set_urls(&mut self, urls: &[SmolStr], now: Instant) -> bool {
        let mut has_lost_roots = false;
        self.0.retain(|url, endpoint| {
            let stays = urls.contains(url);
            has_lost_roots |= !stays && !endpoint.roots.is_empty();
            stays
        });
        for url in urls {
            self.0.entry(url.clone()).or_insert_with(|| Endpoint {
                roots: Vec::new(),
                due: Some(now),
                failures: 0,
            });
        }
        has_lost_roots
    }

    /// Returns the endpoints to fetch now, each once.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<SmolStr> {
        let due = self
            .0
            .iter_mut()
            .filter(|(_, endpoint)| endpoint.due.is_some_and(|due| due <= now));
        due.map(|(url, endpoint)| {
            endpoint.due = None;
            url.clone()
        })
        .collect()
    }

    /// Records the result of a fetch; `None` if it failed. Returns true if the roots changed.
    pub(super) fn record_response(&mut self, url: &str, roots: Option<Vec<Certificate>>, now: Instant) -> bool {
        // The endpoint may have been removed.
        let Some(endpoint) = self.0.get_mut(url) else {
            return false;
        };
        match roots {
            Some(roots) => {
                endpoint.due = Some(now + INTERVAL);
                endpoint.failures = 0;
                let is_changed = endpoint.roots != roots;
                endpoint.roots = roots;
                is_changed
            }
            None => {
                let wait = RETRY * 2_u32.saturating_pow(endpoint.failures.min(10));
                endpoint.due = Some(now + wait.min(INTERVAL));
                endpoint.failures += 1;
                false
            }
        }
    }

    /// Returns the last roots of an endpoint.
    pub(super) fn roots(&self, url: &str) -> &[Certificate] {
        self.0.get(url).map_or(&[], |endpoint| &endpoint.roots)
    }
}

/// The scheme of a URL is not `https`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("scheme {0} is not supported: want https")]
pub(super) struct SchemeError(String);

/// Returns the URL of an endpoint, with `https://` as the only and default scheme.
pub(super) fn url(text: &str) -> Result<String, SchemeError> {
    match text.split_once("://") {
        Some(("https", _)) => Ok(text.to_owned()),
        Some((scheme, _)) => Err(SchemeError(scheme.to_owned())),
        None => Ok(format!("https://{text}")),
    }
}
