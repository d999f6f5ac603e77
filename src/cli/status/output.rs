//! Tables for people.

use std::fmt::Write;

use crate::distribution::{
    overview::Overview,
    report::{Counts, ObjectName, ObjectReport, ObjectState, ProxyState, ReplicaReport},
};

/// The number of proxies that are listed unless all are requested.
const LISTED: usize = 20;
/// The longest reason in a table, in characters.
const REASON: usize = 160;

/// Returns the first line: the object, its state and the number of proxies by state.
pub(super) fn headline(report: &ObjectReport) -> String {
    let state = match report.state {
        ObjectState::Unknown => "does not exist",
        ObjectState::Awaited => "has not reached the control plane yet",
        ObjectState::Invalid => "is invalid; its last valid version applies, if there was one",
        ObjectState::Unused => "affects no connected proxy",
        ObjectState::Pending => "is on its way",
        ObjectState::Acknowledged => "arrived",
        ObjectState::Incomplete => "may not have arrived everywhere: replicas of istiod did not answer",
        ObjectState::Refused => "was refused",
        ObjectState::Removed => "was removed",
    };
    let mut line = format!("{} {state}", report.object);
    if report.counts.proxies > 0 {
        let _ = write!(line, ": {}", counts(&report.counts));
    } else if report.unanswered > 0 {
        let _ = write!(line, ": {} proxies have not answered", report.unanswered);
    }
    if report.timed_out {
        line.push_str(" (time is over)");
    }
    line
}

fn counts(counts: &Counts) -> String {
    let Counts {
        proxies,
        acknowledged,
        sent,
        waiting,
        refused,
        unrequested,
    } = counts;
    let mut text = format!("{acknowledged} of {proxies} proxies acknowledged it");
    for (number, state) in [
        (refused, "refused it"),
        (sent, "have not answered"),
        (waiting, "were not sent it yet"),
        (unrequested, "do not subscribe to it"),
    ] {
        if *number > 0 {
            let _ = write!(text, ", {number} {state}");
        }
    }
    text
}

/// Returns the report of an object.
pub(super) fn object(report: &ObjectReport, all: bool) -> String {
    let mut text = headline(report) + "\n";
    if let Some(seconds) = report.seconds.filter(|_| report.unanswered == 0) {
        let _ = writeln!(text, "The last answer came {seconds:.3} s after the last change.");
    }
    missing(&report.replicas, &mut text);
    for diagnostic in &report.diagnostics {
        let _ = writeln!(text, "{diagnostic}");
    }
    let is_listed = |state: ProxyState| all || !matches!(state, ProxyState::Acknowledged | ProxyState::Unrequested);
    let mut table = Table::new(&["PROXY", "STATE", "TYPE", "RESOURCE", "EFFECT", "REASON"]);
    let proxies = report.proxies.iter().filter(|proxy| is_listed(proxy.state));
    let (mut listed, mut more) = (0, 0);
    for proxy in proxies {
        if !all && listed >= LISTED {
            more += 1;
            continue;
        }
        listed += 1;
        for resource in proxy.resources.iter().filter(|resource| is_listed(resource.state)) {
            table.row([
                &proxy.proxy,
                state(resource.state),
                &resource.resource_type,
                &resource.name,
                &resource.effect,
                &reason(&resource.reason, &resource.blamed, resource.quarantined),
            ]);
        }
    }
    table.write(&mut text);
    if more > 0 {
        let _ = writeln!(text, "{more} more proxies; --all lists them.");
    }
    text
}

/// Returns the status of the mesh.
pub(super) fn overview(overview: &Overview, all: bool) -> String {
    let Counts {
        proxies,
        acknowledged,
        waiting,
        refused,
        ..
    } = overview.counts;
    let mut text = format!(
        "{proxies} proxies at revision {}: {acknowledged} up to date, {waiting} on their way, {refused} with refused \
         resources\n",
        overview.revision
    );
    missing(&overview.replicas, &mut text);
    let mut table = Table::new(&["PROXY", "STATE", "VERSION", "CLUSTER", "ERROR"]);
    let listed = overview
        .proxies
        .iter()
        .filter(|proxy| all || proxy.state != ProxyState::Acknowledged);
    let listed: Vec<_> = listed.collect();
    let most = if all { listed.len() } else { LISTED };
    for proxy in listed.iter().take(most) {
        let error = shortened(&proxy.errors.join("; "));
        table.row([&proxy.proxy, state(proxy.state), &proxy.version, &proxy.cluster, &error]);
    }
    table.write(&mut text);
    if listed.len() > most {
        let _ = writeln!(text, "{} more proxies; --all lists them.", listed.len() - most);
    }
    let mut table = Table::new(&["TYPE", "REFUSED RESOURCE", "PROXIES", "REASON"]);
    for refusal in &overview.refusals {
        table.row([
            &refusal.resource_type,
            &refusal.name,
            &refusal.proxies.to_string(),
            &reason(&refusal.reason, &refusal.blamed, refusal.quarantined),
        ]);
    }
    table.write(&mut text);
    text
}

/// Names the replicas whose proxies are unknown.
fn missing(replicas: &[ReplicaReport], text: &mut String) {
    for replica in replicas.iter().filter(|replica| !replica.answered) {
        let names = [&replica.name, &replica.address];
        let names = names.into_iter().filter(|name| !name.is_empty()).cloned();
        let name = names.collect::<Vec<_>>().join(" at ");
        let name = if name.is_empty() {
            String::new()
        } else {
            format!(" {name}")
        };
        let _ = writeln!(text, "Replica{name} did not answer: {}", shortened(&replica.error));
    }
}

fn state(state: ProxyState) -> &'static str {
    match state {
        ProxyState::Unrequested => "not subscribed",
        ProxyState::Acknowledged => "acknowledged",
        ProxyState::Sent => "sent",
        ProxyState::Waiting => "waiting",
        ProxyState::Refused => "refused",
    }
}

fn reason(reason: &str, blamed: &[ObjectName], is_quarantined: bool) -> String {
    let mut text = shortened(reason);
    if !blamed.is_empty() {
        let blamed: Vec<String> = blamed.iter().map(ToString::to_string).collect();
        let _ = write!(text, " (because of {})", blamed.join(", "));
    }
    if is_quarantined {
        text.push_str(" [withheld until it changes]");
    }
    text
}

fn shortened(text: &str) -> String {
    let line = text.replace('\n', " ");
    match line.char_indices().nth(REASON) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Columns as wide as their widest cell.
struct Table<const N: usize> {
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    fn new(head: &[&str; N]) -> Self {
        Self {
            rows: vec![head.map(str::to_owned)],
        }
    }

    fn row(&mut self, cells: [&str; N]) {
        self.rows.push(cells.map(str::to_owned));
    }

    /// Writes the table after an empty line, unless it has no rows.
    fn write(&self, text: &mut String) {
        if self.rows.len() < 2 {
            return;
        }
        let widths: Vec<usize> = (0..N)
            .map(|column| {
                self.rows
                    .iter()
                    .map(|row| row[column].chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        text.push('\n');
        for row in &self.rows {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
            let line = cells.collect::<Vec<_>>().join("   ");
            text.push_str(line.trim_end());
            text.push('\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution::report::{ProxyReport, ResourceReport};

    #[test]
    fn a_refusal_is_explained() {
        let object_name = ObjectName {
            kind: "VirtualService".to_owned(),
            namespace: "shop".to_owned(),
            name: "reviews".to_owned(),
            ..ObjectName::default()
        };
        let report = ObjectReport {
            object: object_name.clone(),
            state: ObjectState::Refused,
            counts: Counts {
                proxies: 2,
                acknowledged: 1,
                refused: 1,
                ..Counts::default()
            },
            proxies: vec![ProxyReport {
                proxy: "a.shop".into(),
                state: ProxyState::Refused,
                resources: vec![ResourceReport {
                    resource_type: "rds".into(),
                    name: "80".into(),
                    effect: "changes".into(),
                    state: ProxyState::Refused,
                    reason: "bad regex".to_owned(),
                    blamed: vec![object_name],
                    ..ResourceReport::default()
                }],
                ..ProxyReport::default()
            }],
            ..ObjectReport::default()
        };
        let expected = "\
VirtualService shop/reviews was refused: 1 of 2 proxies acknowledged it, 1 refused it

PROXY    STATE     TYPE   RESOURCE   EFFECT    REASON
a.shop   refused   rds    80         changes   bad regex (because of VirtualService shop/reviews)
";
        assert_eq!(object(&report, false), expected);
    }

    #[test]
    fn missing_replicas_are_named() {
        let report = ObjectReport {
            object: ObjectName {
                kind: "VirtualService".to_owned(),
                namespace: "shop".to_owned(),
                name: "reviews".to_owned(),
                ..ObjectName::default()
            },
            state: ObjectState::Incomplete,
            replicas: vec![
                ReplicaReport {
                    answered: true,
                    ..ReplicaReport::default()
                },
                ReplicaReport {
                    name: "istiod-1".to_owned(),
                    address: "10.1.0.1:15012".to_owned(),
                    error: "no route to host".to_owned(),
                    ..ReplicaReport::default()
                },
            ],
            ..ObjectReport::default()
        };
        let expected = "\
VirtualService shop/reviews may not have arrived everywhere: replicas of istiod did not answer
Replica istiod-1 at 10.1.0.1:15012 did not answer: no route to host
";
        assert_eq!(object(&report, false), expected);
    }
}
