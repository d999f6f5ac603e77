//! How fetching is doing, for the debug page and for whoever waits for the first answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::Serialize;
use smol_str::{SmolStr, ToSmolStr};
use tokio::{sync::watch, time::Instant};

use super::{FetchFailure, KeySet};
use crate::{api::fetched_keys::KeySource, base::ObjectKey, model::wants::Wants};

/// A source as the debug page shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KeysReport {
    /// What is fetched.
    pub url: SmolStr,
    /// The RequestAuthentications that name it, as `namespace/name`.
    pub wanted_by: Vec<SmolStr>,
    /// The ids of the keys that serve; none if there are no keys.
    pub key_ids: Option<Vec<SmolStr>>,
    /// Failures since the last good answer.
    pub failures: u32,
    /// The last failure, empty if the last answer was good.
    pub last_error: String,
    /// Seconds since the last good answer.
    pub fetched_seconds_ago: Option<u64>,
    #[serde(skip)]
    fetched: Option<Instant>,
}

/// What an answer changes in a report.
pub(super) struct Answered {
    key_ids: Option<Vec<SmolStr>>,
    failures: u32,
    error: Option<String>,
}

impl Answered {
    pub(super) fn new(told: Option<&KeySet>, failures: u32, failure: Option<&FetchFailure>) -> Self {
        Self {
            key_ids: told.map(|keys| keys.ids().map(SmolStr::new).collect()),
            failures,
            error: failure.map(ToString::to_string),
        }
    }
}

impl KeysReport {
    pub(super) fn take(&mut self, source: &KeySource, by: &BTreeSet<ObjectKey>, answer: Answered) {
        self.url = source.to_smolstr();
        let name = |key: &ObjectKey| SmolStr::new(format!("{}/{}", key.namespace, key.name));
        self.wanted_by = by.iter().map(name).collect();
        self.key_ids = answer.key_ids;
        self.failures = answer.failures;
        if answer.error.is_none() {
            self.fetched = Some(Instant::now());
        }
        self.last_error = answer.error.unwrap_or_default();
    }
}

/// The reports of all sources that were asked at least once. Cheap to clone.
#[derive(Clone)]
pub struct KeyReports(watch::Receiver<BTreeMap<KeySource, KeysReport>>);

impl KeyReports {
    pub(super) fn new(reports: watch::Receiver<BTreeMap<KeySource, KeysReport>>) -> Self {
        Self(reports)
    }

    /// No source is wanted and none ever will be.
    pub fn none() -> Self {
        Self(watch::Sender::default().subscribe())
    }

    /// How every source is doing now.
    pub fn all(&self) -> Vec<KeysReport> {
        let reports = self.0.borrow();
        let with_age = |report: &KeysReport| KeysReport {
            fetched_seconds_ago: report.fetched.map(|at| at.elapsed().as_secs()),
            ..report.clone()
        };
        reports.values().map(with_age).collect()
    }

    /// Waits until every source that is wanted has been asked, well or not, and what it answered was sent; at most so
    /// long. A control plane that has just started would else tell proxies that there are no keys, when there are.
    pub async fn answered(&self, wants: &Wants, patience: Duration) {
        let mut reports = self.0.clone();
        let all = reports.wait_for(|reports| wants.keys.keys().all(|source| reports.contains_key(source)));
        if tokio::time::timeout(patience, all).await.is_err() {
            tracing::warn!("JWKS not fetched yet, rejecting tokens of its issuers");
        }
    }
}
