//! One report of the reports of all replicas. A replica that did not answer is unknown, not without proxies.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use smol_str::SmolStr;

use super::{
    overview::{ConnectedProxy, Overview, RefusalReport},
    report::{ObjectReport, ObjectState, ProxyReport, ReplicaReport},
};

/// The answer of a replica.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer<T> {
    /// None yet.
    Waiting,
    /// None, for this reason.
    Failed(String),
    /// Its report.
    Report(T),
}

/// The answer of a replica, with its name and address.
#[derive(Clone, Debug)]
pub(super) struct ReplicaAnswer<'a, T> {
    /// The name of the pod; empty if unknown.
    pub(super) name: String,
    /// The address.
    pub(super) address: String,
    /// The answer.
    pub(super) answer: &'a Answer<T>,
}

/// A report of one replica.
pub(super) trait OfReplica {
    /// Returns the replica that the report is of.
    fn replica(&self) -> Option<&ReplicaReport>;
}

impl OfReplica for ObjectReport {
    fn replica(&self) -> Option<&ReplicaReport> {
        self.replicas.first()
    }
}

impl OfReplica for Overview {
    fn replica(&self) -> Option<&ReplicaReport> {
        self.replicas.first()
    }
}

/// Replicas and the reports of those that answered, with their names.
struct Answers<'a, T> {
    replicas: Vec<ReplicaReport>,
    reports: Vec<(String, &'a T)>,
    /// The number of replicas without a report.
    missing: usize,
    /// True if a replica may still answer without a new attempt.
    is_waiting: bool,
}

impl<'a, T: OfReplica> Answers<'a, T> {
    /// Sorts the answers. A replica with several addresses counts once.
    fn of(replicas: &[ReplicaAnswer<'a, T>]) -> Self {
        let mut answers = Self {
            replicas: Vec::new(),
            reports: Vec::new(),
            missing: 0,
            is_waiting: false,
        };
        let mut ids = BTreeSet::new();
        for answer in replicas {
            let mut replica = ReplicaReport {
                name: answer.name.clone(),
                address: answer.address.clone(),
                ..ReplicaReport::default()
            };
            match answer.answer {
                Answer::Report(report) => {
                    let own = report.replica().cloned().unwrap_or_default();
                    if !own.id.is_empty() && !ids.insert(own.id.clone()) {
                        continue;
                    }
                    if !own.name.is_empty() {
                        replica.name = own.name;
                    }
                    (replica.id, replica.answered) = (own.id, true);
                    answers.reports.push((replica.name.clone(), report));
                }
                Answer::Waiting => {
                    "it has not answered yet".clone_into(&mut replica.error);
                    (answers.missing, answers.is_waiting) = (answers.missing + 1, true);
                }
                Answer::Failed(error) => {
                    replica.error.clone_from(error);
                    answers.missing += 1;
                }
            }
            answers.replicas.push(replica);
        }
        answers
    }
}

/// Returns the report about an object. The first replica is the one that answers for all.
pub(super) fn object(answers: &[ReplicaAnswer<'_, ObjectReport>]) -> ObjectReport {
    let answers = Answers::of(answers);
    let Some((_, first)) = answers.reports.first() else {
        return ObjectReport {
            replicas: answers.replicas,
            ..ObjectReport::default()
        };
    };
    let mut merged = ObjectReport {
        object: first.object.clone(),
        revision: first.revision,
        ..ObjectReport::default()
    };
    for (name, report) in &answers.reports {
        merged.counts += report.counts;
        merged.unanswered += report.unanswered;
        add_new(&mut merged.diagnostics, &report.diagnostics);
        let name = SmolStr::from(name.as_str());
        let rows = report.proxies.iter().map(|row| ProxyReport {
            replica: name.clone(),
            ..row.clone()
        });
        merged.proxies.extend(rows);
    }
    let order = |row: &ProxyReport| (Reverse(row.state), row.proxy.clone());
    merged.proxies.sort_by_cached_key(order);
    if merged.unanswered == 0 && answers.missing == 0 {
        // A replica that started later does not know the change.
        let seconds = answers.reports.iter().filter_map(|(_, report)| report.seconds);
        merged.seconds = seconds.reduce(f64::max);
    }
    let states: Vec<ObjectState> = answers.reports.iter().map(|(_, report)| report.state).collect();
    merged.state = state(&states, answers.missing);
    let are_final = answers.reports.iter().all(|(_, report)| report.is_final);
    merged.is_final = are_final
        && !differ(&states)
        && match merged.state {
            ObjectState::Awaited | ObjectState::Pending | ObjectState::Incomplete => false,
            // Only another change can help, whatever the others would answer.
            ObjectState::Refused | ObjectState::Invalid => !answers.is_waiting,
            _ => true,
        };
    merged.replicas = answers.replicas;
    merged
}

/// Returns true if the object exists for some replicas only: the others have not seen the last change.
fn differ(states: &[ObjectState]) -> bool {
    let is_absent = |state: &ObjectState| matches!(state, ObjectState::Unknown | ObjectState::Removed);
    let is_open = |state: &ObjectState| matches!(state, ObjectState::Awaited | ObjectState::Pending);
    let is_present = |state: &ObjectState| !is_absent(state) && !is_open(state);
    states.iter().any(is_absent) && states.iter().any(is_present)
}

/// Returns the state of an object from the states in all replicas that answered.
fn state(states: &[ObjectState], missing: usize) -> ObjectState {
    for worst in [
        ObjectState::Invalid,
        ObjectState::Refused,
        ObjectState::Awaited,
        ObjectState::Pending,
    ] {
        if states.contains(&worst) {
            return worst;
        }
    }
    if differ(states) {
        return ObjectState::Pending;
    }
    if missing > 0 {
        return ObjectState::Incomplete;
    }
    for best in [
        ObjectState::Incomplete,
        ObjectState::Acknowledged,
        ObjectState::Unused,
        ObjectState::Removed,
    ] {
        if states.contains(&best) {
            return best;
        }
    }
    ObjectState::Unknown
}

/// Returns the status of the mesh. The first replica is the one that answers for all.
pub(super) fn overview(answers: &[ReplicaAnswer<'_, Overview>]) -> Overview {
    let answers = Answers::of(answers);
    let mut merged = Overview::default();
    let mut refusals: BTreeMap<(String, String, String), RefusalReport> = BTreeMap::new();
    if let Some((_, first)) = answers.reports.first() {
        merged.revision = first.revision;
        merged.pushes.clone_from(&first.pushes);
    }
    for (name, report) in &answers.reports {
        merged.counts += report.counts;
        add_new(&mut merged.diagnostics, &report.diagnostics);
        let rows = report.proxies.iter().map(|row| ConnectedProxy {
            replica: name.clone(),
            ..row.clone()
        });
        merged.proxies.extend(rows);
        for refusal in &report.refusals {
            let RefusalReport {
                resource_type,
                name,
                version,
                ..
            } = refusal;
            let of_content = refusals.entry((resource_type.clone(), name.clone(), version.clone()));
            let known = of_content.or_insert_with(|| RefusalReport {
                proxies: 0,
                ..refusal.clone()
            });
            known.proxies += refusal.proxies;
            known.quarantined |= refusal.quarantined;
            add_new(&mut known.blamed, &refusal.blamed);
        }
    }
    let order = |row: &ConnectedProxy| (Reverse(row.state), row.proxy.clone());
    merged.proxies.sort_by_cached_key(order);
    merged.refusals = refusals.into_values().collect();
    merged.refusals.sort();
    merged.replicas = answers.replicas;
    merged
}

/// Adds the elements that a list does not have yet.
fn add_new<T: Clone + Ord>(list: &mut Vec<T>, more: &[T]) {
    let known: BTreeSet<&T> = list.iter().collect();
    let new: Vec<T> = more
        .iter()
        .filter(|element| !known.contains(element))
        .cloned()
        .collect();
    list.extend(new);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution::report::{Counts, ObjectName, ProxyState};

    /// Returns a final report of a replica with this state.
    fn report(id: &str, state: ObjectState) -> ObjectReport {
        let report = ObjectReport {
            state,
            replicas: vec![ReplicaReport {
                name: format!("istiod-{id}"),
                id: id.to_owned(),
                answered: true,
                ..ReplicaReport::default()
            }],
            ..ObjectReport::default()
        };
        ObjectReport {
            is_final: report.is_settled(),
            ..report
        }
    }

    fn answer_of_replica<T>(answer: &Answer<T>) -> ReplicaAnswer<'_, T> {
        ReplicaAnswer {
            name: String::new(),
            address: "10.0.0.1:15012".to_owned(),
            answer,
        }
    }

    /// Returns the merged state, and true if it is final.
    fn merged(states: &[ObjectState], others: &[Answer<ObjectReport>]) -> (ObjectState, bool) {
        let reports = states.iter().enumerate();
        let reports = reports.map(|(index, state)| Answer::Report(report(&index.to_string(), *state)));
        let answers: Vec<_> = reports.chain(others.iter().cloned()).collect();
        let merged = object(&answers.iter().map(answer_of_replica).collect::<Vec<_>>());
        (merged.state, merged.is_final)
    }

    #[test]
    fn the_state_is_that_of_all_replicas() {
        use ObjectState::{Acknowledged, Awaited, Incomplete, Invalid, Pending, Refused, Removed, Unknown, Unused};
        for (states, expected, is_final) in [
            (&[Acknowledged, Acknowledged][..], Acknowledged, true),
            (&[Unused, Acknowledged], Acknowledged, true),
            (&[Unused, Unused], Unused, true),
            (&[Acknowledged, Refused], Refused, true),
            (&[Invalid, Acknowledged], Invalid, true),
            (&[Acknowledged, Pending], Pending, false),
            (&[Refused, Pending], Refused, false),
            (&[Acknowledged, Awaited], Awaited, false),
            (&[Unknown, Unknown], Unknown, true),
            (&[Unknown, Removed], Removed, true),
            (&[Removed, Pending], Pending, false),
            // One of them has not seen the last change.
            (&[Acknowledged, Unknown], Pending, false),
            (&[Removed, Unused], Pending, false),
            (&[Refused, Removed], Refused, false),
        ] {
            assert_eq!(merged(states, &[]), (expected, is_final), "{states:?}");
            let reversed: Vec<_> = states.iter().rev().copied().collect();
            assert_eq!(merged(&reversed, &[]), (expected, is_final), "{reversed:?}");
        }
        for missing in [Answer::Waiting, Answer::Failed("no route".to_owned())] {
            for state in [Acknowledged, Unused, Removed, Unknown] {
                let found = merged(&[state], std::slice::from_ref(&missing));
                assert_eq!(found, (Incomplete, false), "{state:?} {missing:?}");
            }
            assert_eq!(
                merged(&[Pending], std::slice::from_ref(&missing)),
                (Pending, false),
                "{missing:?}"
            );
            let is_final = missing != Answer::Waiting;
            assert_eq!(merged(&[Refused], &[missing]), (Refused, is_final));
        }
    }

    #[test]
    fn counts_add_up_and_proxies_are_in_order() {
        let row = |proxy: &str, state| ProxyReport {
            proxy: proxy.into(),
            state,
            ..ProxyReport::default()
        };
        let counts = |acknowledged, refused| Counts {
            proxies: acknowledged + refused,
            acknowledged,
            refused,
            ..Counts::default()
        };
        let one = ObjectReport {
            counts: counts(2, 0),
            seconds: Some(0.5),
            diagnostics: vec!["same".to_owned()],
            proxies: vec![row("a", ProxyState::Acknowledged), row("d", ProxyState::Acknowledged)],
            ..report("1", ObjectState::Acknowledged)
        };
        let other = ObjectReport {
            counts: counts(1, 1),
            seconds: Some(0.25),
            diagnostics: vec!["same".to_owned(), "more".to_owned()],
            proxies: vec![row("c", ProxyState::Refused), row("b", ProxyState::Acknowledged)],
            ..report("2", ObjectState::Refused)
        };
        let answers = [&one, &other, &other].map(|report| Answer::Report(report.clone()));
        let report = object(&answers.each_ref().map(answer_of_replica));
        assert_eq!(report.counts, counts(3, 1), "a replica with two addresses counts once");
        assert_eq!(report.replicas.len(), 2);
        let proxies: Vec<(&str, &str)> = report
            .proxies
            .iter()
            .map(|row| (row.proxy.as_str(), row.replica.as_str()))
            .collect();
        assert_eq!(
            proxies,
            [
                ("c", "istiod-2"),
                ("a", "istiod-1"),
                ("b", "istiod-2"),
                ("d", "istiod-1")
            ]
        );
        assert_eq!(report.seconds, Some(0.5));
        assert_eq!(report.diagnostics, ["same", "more"]);
        let failed = Answer::Failed("no route".to_owned());
        let incomplete = object(&[answer_of_replica(&answers[0]), answer_of_replica(&failed)]);
        assert_eq!((incomplete.seconds, incomplete.counts), (None, counts(2, 0)));
        let missing = &incomplete.replicas[1];
        assert_eq!(
            (missing.answered, missing.error.as_str(), missing.address.as_str()),
            (false, "no route", "10.0.0.1:15012")
        );
    }

    #[test]
    fn refusals_of_the_same_content_are_one() {
        let refusal = |proxies, blamed: &[&str]| RefusalReport {
            resource_type: "rds".to_owned(),
            name: "80".to_owned(),
            version: "1".to_owned(),
            proxies,
            blamed: blamed
                .iter()
                .map(|name| ObjectName {
                    name: (*name).to_owned(),
                    ..ObjectName::default()
                })
                .collect(),
            ..RefusalReport::default()
        };
        let answer = |refusal| {
            Answer::Report(Overview {
                refusals: vec![refusal],
                ..Overview::default()
            })
        };
        let answers = [answer(refusal(2, &[])), answer(refusal(3, &["reviews"]))];
        let merged = overview(&answers.each_ref().map(answer_of_replica));
        assert_eq!(merged.refusals, [refusal(5, &["reviews"])]);
    }
}
