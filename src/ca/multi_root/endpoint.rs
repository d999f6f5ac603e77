//! When SPIFFE bundle endpoints are asked, and what they told.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use smol_str::SmolStr;

use crate::ca::certificate::Certificate;

/// How often an endpoint is asked.
pub(super) const INTERVAL: Duration = Duration::from_mins(30);
/// The first wait after a failure; each next one is twice as long, up to [`INTERVAL`].
pub(super) const RETRY: Duration = Duration::from_mins(1);

/// Endpoints by URL as the mesh config has it.
#[derive(Default)]
pub(super) struct Endpoints(BTreeMap<SmolStr, Endpoint>);

struct Endpoint {
    roots: Vec<Certificate>,
    /// When it is to be asked; none while it is.
    due: Option<SystemTime>,
    failures: u32,
}

impl Endpoints {
    /// These endpoints count. New ones are due at once; true if some are gone that told something.
    pub(super) fn set_urls(&mut self, urls: &[SmolStr]) -> bool {
        let mut has_lost_roots = false;
        self.0.retain(|url, endpoint| {
            let stays = urls.contains(url);
            has_lost_roots |= !stays && !endpoint.roots.is_empty();
            stays
        });
        for url in urls {
            self.0.entry(url.clone()).or_insert_with(|| Endpoint {
                roots: Vec::new(),
                due: Some(SystemTime::UNIX_EPOCH),
                failures: 0,
            });
        }
        has_lost_roots
    }

    /// The endpoints that are to be asked now; each is told of once.
    pub(super) fn take_due(&mut self, now: SystemTime) -> Vec<SmolStr> {
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

    /// An endpoint answered. True if that changes what it told.
    pub(super) fn record_response(
        &mut self,
        url: &str,
        roots: Result<Vec<Certificate>, String>,
        now: SystemTime,
    ) -> bool {
        // Nobody may want to know any more.
        let Some(endpoint) = self.0.get_mut(url) else {
            return false;
        };
        match roots {
            Ok(roots) => {
                endpoint.due = Some(now + INTERVAL);
                endpoint.failures = 0;
                let is_changed = endpoint.roots != roots;
                endpoint.roots = roots;
                is_changed
            }
            Err(_) => {
                let wait = RETRY * 2_u32.saturating_pow(endpoint.failures.min(10));
                endpoint.due = Some(now + wait.min(INTERVAL));
                endpoint.failures += 1;
                false
            }
        }
    }

    /// What an endpoint told last.
    pub(super) fn roots(&self, url: &str) -> &[Certificate] {
        self.0.get(url).map_or(&[], |endpoint| &endpoint.roots)
    }
}

/// The URL of an endpoint. They are asked over HTTPS; the scheme may be left out.
pub(super) fn url(text: &str) -> Result<String, String> {
    match text.split_once("://") {
        Some(("https", _)) => Ok(text.to_owned()),
        Some((scheme, _)) => Err(format!("{scheme} is not possible: bundles are fetched over https")),
        None => Ok(format!("https://{text}")),
    }
}
