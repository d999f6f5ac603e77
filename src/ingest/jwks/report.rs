//! State of fetching, for the debug page and for waiting for the first results.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::Serialize;
use smol_str::{SmolStr, ToSmolStr};
use tokio::{sync::watch, time::Instant};

use super::{FetchFailure, KeySet};
use crate::{api::fetched_keys::KeySource, base::ObjectKey, model::external_dependencies::ExternalDependencies};

/// A source on the debug page.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KeysReport {
    /// URL.
    pub url: SmolStr,
    /// RequestAuthentications that refer to it, as `namespace/name`.
    #[serde(rename = "wantedBy")]
    pub required_by: Vec<SmolStr>,
    /// Ids of the present keys; `None` without keys.
    pub key_ids: Option<Vec<SmolStr>>,
    /// Failures since the last success.
    pub failures: u32,
    /// Last error, empty after a success.
    pub last_error: String,
    /// Seconds since the last success.
    pub fetched_seconds_ago: Option<u64>,
    #[serde(skip)]
    fetched: Option<Instant>,
}

/// Update of a report after a fetch.
pub(super) struct FetchResult {
    key_ids: Option<Vec<SmolStr>>,
    failures: u32,
    error: Option<String>,
}

impl FetchResult {
    pub(super) fn new(published: Option<&KeySet>, failures: u32, failure: Option<&FetchFailure>) -> Self {
        Self {
            key_ids: published.map(|keys| keys.ids().map(SmolStr::new).collect()),
            failures,
            error: failure.map(ToString::to_string),
        }
    }
}

impl KeysReport {
    pub(super) fn update(&mut self, source: &KeySource, by: &BTreeSet<ObjectKey>, result: FetchResult) {
        self.url = source.to_smolstr();
        self.set_required_by(by);
        self.key_ids = result.key_ids;
        self.failures = result.failures;
        if result.error.is_none() {
            self.fetched = Some(Instant::now());
        }
        self.last_error = result.error.unwrap_or_default();
    }

    pub(super) fn set_required_by(&mut self, by: &BTreeSet<ObjectKey>) {
        let name = |key: &ObjectKey| SmolStr::new(format!("{}/{}", key.namespace, key.name));
        self.required_by = by.iter().map(name).collect();
    }
}

/// Reports of all sources that were fetched at least once. Cheap to clone.
#[derive(Clone)]
pub struct KeyReports(watch::Receiver<BTreeMap<KeySource, KeysReport>>);

impl KeyReports {
    pub(super) fn new(reports: watch::Receiver<BTreeMap<KeySource, KeysReport>>) -> Self {
        Self(reports)
    }

    /// Returns reports that stay empty.
    pub fn none() -> Self {
        Self(watch::Sender::default().subscribe())
    }

    /// Returns the present state of every source.
    pub fn all(&self) -> Vec<KeysReport> {
        let reports = self.0.borrow();
        let with_age = |report: &KeysReport| KeysReport {
            fetched_seconds_ago: report.fetched.map(|at| at.elapsed().as_secs()),
            ..report.clone()
        };
        reports.values().map(with_age).collect()
    }

    /// Waits until every required source was fetched, successfully or not, and its result was sent, up to a timeout.
    /// Without this, a control plane that has just started would report missing keys to proxies.
    pub async fn answered(&self, dependencies: &ExternalDependencies, patience: Duration) {
        let mut reports = self.0.clone();
        let all = reports.wait_for(|reports| dependencies.keys.keys().all(|source| reports.contains_key(source)));
        if tokio::time::timeout(patience, all).await.is_err() {
            tracing::warn!("JWKS not fetched yet, rejecting tokens of its issuers");
        }
    }
}
