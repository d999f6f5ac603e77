//! The states of proxies: what each connection has acknowledged, compared with what it should hold.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use smol_str::SmolStr;

use super::{
    Distribution, ObjectQuery,
    report::{Counts, ObjectReport, ObjectState, ProxyReport, ProxyState, ResourceReport},
};
use crate::{
    generate::store::{
        ConnectionId,
        effect::{AffectedResource, Effect, GroupEffect},
    },
    xds::{registry::LiveConnection, share::quarantine::Refusal, watched::Progress},
};

/// A connection that an object has an effect on.
struct Affected<'a> {
    live: Arc<LiveConnection>,
    effect: &'a GroupEffect,
    progress: Vec<Progress>,
    /// True if it acknowledged everything earlier, and later changes of the same resources are outstanding.
    was_done: bool,
}

impl Affected<'_> {
    fn state(&self) -> ProxyState {
        if self.was_done {
            return ProxyState::Acknowledged;
        }
        self.progress.iter().map(proxy_state).max().unwrap_or_default()
    }
}

/// Returns the counts of the proxies of a report, and also their rows if nothing is outstanding or `with_rows` asks for
/// them. Most reports about thousands of proxies say only how many are left. `done` are connections that acknowledged
/// everything earlier, which later changes of the same resources do not undo.
pub(super) fn proxies(
    distribution: &Distribution,
    query: &ObjectQuery,
    effects: &[GroupEffect],
    done: &mut FxHashSet<ConnectionId>,
    with_rows: bool,
) -> (Counts, Vec<ProxyReport>) {
    let proxies = affected(distribution, query, effects, done);
    let counts = counts(&proxies);
    let is_outstanding = counts.sent + counts.waiting > 0;
    if is_outstanding && !with_rows {
        return (counts, Vec::new());
    }
    request_searches(distribution, &proxies);
    let rows = proxies.into_iter().map(|proxy| row(distribution, proxy));
    let mut rows: Vec<ProxyReport> = rows.collect();
    let order = |row: &ProxyReport| (std::cmp::Reverse(row.state), row.proxy.clone());
    rows.sort_by_cached_key(order);
    (counts, rows)
}

/// Returns the connections that the query is about and that the object has an effect on. Those that have
/// acknowledged everything are added to `done`.
fn affected<'a>(
    distribution: &Distribution,
    query: &ObjectQuery,
    effects: &'a [GroupEffect],
    done: &mut FxHashSet<ConnectionId>,
) -> Vec<Affected<'a>> {
    let of_connection = effects
        .iter()
        .flat_map(|effect| effect.connections.iter().map(move |id| (*id, effect)));
    let of_connection: FxHashMap<ConnectionId, &GroupEffect> = of_connection.collect();
    let mut proxies = Vec::new();
    for live in distribution.inputs.connections.connections() {
        let proxy = &live.proxy;
        let is_visible = query
            .visible
            .as_ref()
            .is_none_or(|namespace| *namespace == proxy.node.namespace);
        if !is_visible || !live.id.contains(&query.proxy) {
            continue;
        }
        let Some(effect) = of_connection.get(&live.subscription).copied() else {
            continue;
        };
        let id = live.subscription;
        let mut affected = Affected {
            progress: progress(&live, effect),
            live,
            effect,
            was_done: false,
        };
        match affected.state() {
            ProxyState::Acknowledged => {
                done.insert(id);
            }
            ProxyState::Sent | ProxyState::Waiting => affected.was_done = done.contains(&id),
            ProxyState::Unrequested | ProxyState::Refused => {}
        }
        proxies.push(affected);
    }
    proxies
}

fn counts(proxies: &[Affected]) -> Counts {
    let mut counts = Counts::default();
    for proxy in proxies {
        let state = proxy.state();
        counts.proxies += usize::from(state != ProxyState::Unrequested);
        let count = match state {
            ProxyState::Unrequested => &mut counts.unrequested,
            ProxyState::Acknowledged => &mut counts.acknowledged,
            ProxyState::Sent => &mut counts.sent,
            ProxyState::Waiting => &mut counts.waiting,
            ProxyState::Refused => &mut counts.refused,
        };
        *count += 1;
    }
    counts
}

/// Requests a search for the objects of each refused content, once.
fn request_searches(distribution: &Distribution, proxies: &[Affected]) {
    let mut unsearched = FxHashSet::default();
    for proxy in proxies {
        for refusal in proxy.progress.iter().filter_map(refusal_of) {
            let content = (refusal.resource_type, refusal.version);
            if distribution.blamed(refusal).is_none() && unsearched.insert(content) {
                distribution.request_search(&proxy.live, refusal);
            }
        }
    }
}

fn row(distribution: &Distribution, proxy: Affected) -> ProxyReport {
    let Affected {
        live,
        effect,
        progress,
        was_done,
    } = proxy;
    let mut resources = resources(distribution, effect, progress);
    if was_done {
        for resource in &mut resources {
            resource.state = ProxyState::Acknowledged;
        }
    }
    ProxyReport {
        proxy: live.proxy.id.clone(),
        cluster: live.proxy.node.cluster.as_str().into(),
        replica: SmolStr::default(),
        state: resources
            .iter()
            .map(|resource| resource.state)
            .max()
            .unwrap_or_default(),
        resources,
    }
}

/// Returns the state of a known object.
pub(super) fn state(report: &ObjectReport, is_stale: bool) -> ObjectState {
    let counts = &report.counts;
    if counts.refused > 0 {
        ObjectState::Refused
    } else if counts.sent + counts.waiting > 0 || is_stale {
        ObjectState::Pending
    } else if counts.proxies > 0 {
        ObjectState::Acknowledged
    } else {
        ObjectState::Unused
    }
}

/// Returns the progress of each resource, and that of unknown route configurations if the object has an effect on them.
fn progress(live: &LiveConnection, effect: &GroupEffect) -> Vec<Progress> {
    let wanted = effect.resources.iter();
    let wanted = wanted.map(|resource| (resource.resource_type, &resource.name, resource.version));
    let mut progress = live.progress(wanted);
    if effect.unknown_routes {
        progress.push(live.progress_of_unknown_routes(&effect.group.unknown_routes));
    }
    progress
}

fn resources(distribution: &Distribution, effect: &GroupEffect, progress: Vec<Progress>) -> Vec<ResourceReport> {
    let mut progress = progress.into_iter();
    let known = effect.resources.iter().zip(progress.by_ref());
    let mut reports: Vec<ResourceReport> = known
        .map(|(resource, progress)| resource_report(distribution, resource, progress))
        .collect();
    if let Some(progress) = progress.next() {
        let mut report = ResourceReport {
            resource_type: SmolStr::new_static("rds"),
            name: SmolStr::new_static("*"),
            effect: SmolStr::new_static("changes"),
            ..ResourceReport::default()
        };
        set_progress(distribution, &mut report, progress);
        reports.push(report);
    }
    reports
}

fn resource_report(distribution: &Distribution, resource: &AffectedResource, progress: Progress) -> ResourceReport {
    let effect = match resource.effect {
        Effect::Adds => "adds",
        Effect::Changes => "changes",
        Effect::Removes => "removes",
    };
    let mut report = ResourceReport {
        resource_type: SmolStr::new_static(resource.resource_type.short_name()),
        name: resource.name.clone(),
        effect: SmolStr::new_static(effect),
        ..ResourceReport::default()
    };
    set_progress(distribution, &mut report, progress);
    report
}

fn proxy_state(progress: &Progress) -> ProxyState {
    match progress {
        Progress::Unrequested => ProxyState::Unrequested,
        Progress::Waiting => ProxyState::Waiting,
        Progress::Sent => ProxyState::Sent,
        Progress::Acknowledged => ProxyState::Acknowledged,
        Progress::Refused(_) | Progress::Rejected(_) => ProxyState::Refused,
    }
}

fn refusal_of(progress: &Progress) -> Option<&Arc<Refusal>> {
    match progress {
        Progress::Refused(refusal) => Some(refusal),
        _ => None,
    }
}

fn set_progress(distribution: &Distribution, report: &mut ResourceReport, progress: Progress) {
    report.state = proxy_state(&progress);
    match progress {
        Progress::Unrequested | Progress::Waiting | Progress::Sent | Progress::Acknowledged => {}
        Progress::Refused(refusal) => {
            report.reason.clone_from(&refusal.reason);
            report.quarantined = refusal.is_quarantined();
            let blamed = distribution.blamed(&refusal);
            report.is_attributed = blamed.is_some();
            report.blamed = blamed.unwrap_or_default();
        }
        Progress::Rejected(error) => {
            report.reason = error;
            report.is_attributed = true;
        }
    }
}
