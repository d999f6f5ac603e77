//! The status of all proxies, refusals and pushes.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    Distribution,
    report::{Counts, ObjectName, ProxyState, ReplicaReport},
};
use crate::{
    base::Namespace,
    environment,
    generate::ProxyType,
    push::delivery::PushRecord,
    xds::{registry::LiveConnection, share::quarantine::Refusal},
};

/// The number of pushes in an overview.
const PUSHES: usize = 50;

/// The status of the mesh.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Overview {
    /// The revision of the mesh, in the replica that answers.
    pub revision: u64,
    /// The replicas that were asked, the one that answers first.
    pub replicas: Vec<ReplicaReport>,
    /// The number of proxies by state.
    pub counts: Counts,
    /// The proxies: those with problems first.
    pub proxies: Vec<ConnectedProxy>,
    /// The refused resources.
    pub refusals: Vec<RefusalReport>,
    /// The last pushes of the replica that answers, the newest first.
    pub pushes: Vec<PushSummary>,
    /// Errors and warnings of objects.
    pub diagnostics: Vec<String>,
}

/// A connected proxy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectedProxy {
    /// The id, `<pod>.<namespace>`.
    pub proxy: String,
    /// `sidecar`, `router`, `waypoint`, `ztunnel` or `agentgateway`.
    #[serde(rename = "type")]
    pub proxy_type: String,
    /// The namespace.
    pub namespace: String,
    /// The cluster.
    pub cluster: String,
    /// The version.
    pub version: String,
    /// The name of the replica that it is connected to.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub replica: String,
    /// `acknowledged`: it has answered everything; `waiting`: not yet; `refused`: it refused a resource.
    pub state: ProxyState,
    /// The errors of responses that it rejected and that name no resource.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}

/// A refused resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RefusalReport {
    /// The type, `cds`.
    #[serde(rename = "type")]
    pub resource_type: String,
    /// The name.
    pub name: String,
    /// The refused content.
    pub version: String,
    /// The reason, in the words of a proxy.
    pub reason: String,
    /// The objects that are blamed.
    pub blamed: Vec<ObjectName>,
    /// True if the resource is withheld until it changes.
    pub quarantined: bool,
    /// The number of proxies that keep what they had before.
    pub proxies: usize,
}

/// A push.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PushSummary {
    /// The revision.
    pub revision: u64,
    /// The time since its first change, in seconds.
    pub age_seconds: f64,
    /// The number of changes.
    pub changes: usize,
    /// The number of changed objects by kind.
    pub kinds: BTreeMap<String, usize>,
    /// Changed configuration objects.
    pub objects: Vec<ObjectName>,
    /// The wait of the oldest change, in seconds.
    pub waited_seconds: f64,
    /// The duration of commit and generation, in seconds.
    pub worked_seconds: f64,
    /// The number of resources that were built.
    pub built: usize,
    /// The number of proxies that it was published to.
    pub proxies: usize,
    /// The number of proxies that have not answered.
    pub unanswered: usize,
    /// The number of refused responses.
    pub refused: u32,
    /// The time from the first change to the last answer, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
}

impl Overview {
    /// Takes the ages of pushes, which differ between two equal overviews.
    pub(super) fn take_ages(&mut self) -> Vec<f64> {
        let ages = self.pushes.iter_mut().map(|push| std::mem::take(&mut push.age_seconds));
        ages.collect()
    }

    /// Sets the ages of pushes.
    pub(super) fn set_ages(&mut self, ages: Vec<f64>) {
        for (push, age) in self.pushes.iter_mut().zip(ages) {
            push.age_seconds = age;
        }
    }
}

impl Distribution {
    /// Returns the status of the proxies of this replica, only those of one namespace if one is given.
    pub(super) fn own_overview(&self, visible: Option<&Namespace>) -> Overview {
        let mut overview = Overview {
            revision: self.inputs.mesh.borrow().revision.0,
            replicas: vec![self.own_replica()],
            ..Overview::default()
        };
        let mut refusals: BTreeMap<*const Refusal, (Arc<Refusal>, usize)> = BTreeMap::new();
        for live in self.inputs.connections.connections() {
            if visible.is_some_and(|namespace| *namespace != live.proxy.node.namespace) {
                continue;
            }
            let (refused, errors) = live.refusals();
            let proxy = connected(&live, !refused.is_empty(), errors);
            let counts = &mut overview.counts;
            counts.proxies += 1;
            match proxy.state {
                ProxyState::Acknowledged => counts.acknowledged += 1,
                ProxyState::Refused => counts.refused += 1,
                _ => counts.waiting += 1,
            }
            for refusal in refused {
                refusals.entry(Arc::as_ptr(&refusal)).or_insert((refusal, 0)).1 += 1;
            }
            overview.proxies.push(proxy);
        }
        let order = |row: &ConnectedProxy| (std::cmp::Reverse(row.state), row.proxy.clone());
        overview.proxies.sort_by_cached_key(order);
        let refusals = refusals.into_values();
        let refusals = refusals.map(|(refusal, proxies)| self.refusal_report(&refusal, proxies));
        overview.refusals = refusals.collect();
        overview.refusals.sort();
        // A caller of one namespace does not see the configuration of others.
        if visible.is_none() {
            let pushes = self.inputs.tracker.pushes();
            overview.pushes = pushes.iter().rev().take(PUSHES).map(|push| summary(push)).collect();
            overview.diagnostics = self
                .inputs
                .ingest_status
                .all()
                .iter()
                .map(ToString::to_string)
                .collect();
        }
        overview
    }

    /// Returns the resources that a proxy has refused.
    pub fn refusals_of(&self, live: &LiveConnection) -> Vec<RefusalReport> {
        let (refused, _) = live.refusals();
        refused.iter().map(|refusal| self.refusal_report(refusal, 1)).collect()
    }

    fn refusal_report(&self, refusal: &Refusal, proxies: usize) -> RefusalReport {
        RefusalReport {
            resource_type: refusal.resource_type.short_name().to_owned(),
            name: refusal.name.to_string(),
            version: refusal.version.to_string(),
            reason: refusal.reason.clone(),
            blamed: self.blamed(refusal).unwrap_or_default(),
            quarantined: refusal.is_quarantined(),
            proxies,
        }
    }
}

fn connected(
    live: &LiveConnection,
    has_refused: bool,
    errors: Vec<(crate::generate::ResourceType, String)>,
) -> ConnectedProxy {
    let node = &live.proxy.node;
    let state = if has_refused || !errors.is_empty() {
        ProxyState::Refused
    } else if live.is_settled() {
        ProxyState::Acknowledged
    } else {
        ProxyState::Waiting
    };
    let proxy_type = match node.proxy_type {
        ProxyType::Sidecar => "sidecar",
        ProxyType::Router => "router",
        ProxyType::Waypoint => "waypoint",
        ProxyType::Ztunnel => "ztunnel",
        ProxyType::Agentgateway => "agentgateway",
    };
    let errors = errors.into_iter();
    ConnectedProxy {
        proxy: live.proxy.id.to_string(),
        proxy_type: proxy_type.to_owned(),
        namespace: node.namespace.to_string(),
        cluster: node.cluster.to_string(),
        version: node.version_text.to_string(),
        replica: String::new(),
        state,
        errors: errors
            .map(|(resource_type, error)| format!("{}: {error}", resource_type.short_name()))
            .collect(),
    }
}

fn summary(push: &PushRecord) -> PushSummary {
    let age = environment::now().saturating_duration_since(push.since);
    let objects = push.objects.iter();
    PushSummary {
        revision: push.revision.0,
        age_seconds: age.as_secs_f64(),
        changes: push.events,
        kinds: push
            .kinds
            .iter()
            .map(|(kind, number)| (kind.name().to_owned(), *number))
            .collect(),
        objects: objects.map(|object| ObjectName::of(object.kind, &object.key)).collect(),
        waited_seconds: push.waited.as_secs_f64(),
        worked_seconds: push.worked.as_secs_f64(),
        built: push.built,
        proxies: push.connections,
        unanswered: push.outstanding(),
        refused: push.refused(),
        seconds: push.delivered().map(|took| took.as_secs_f64()),
    }
}
