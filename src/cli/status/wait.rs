//! `istiod wait TYPE NAME[.NAMESPACE]`: waits until an object is distributed or deleted, with the flags of istioctl's
//! `experimental wait`.

use std::{process::ExitCode, time::Duration};

use clap::{Args, ValueEnum};
use tokio::time::Instant;

use super::{
    ClusterError, Format, InCluster, MARGIN, NOT_ARRIVED, Named, ServerFlags, StatusError, StatusFlags, ask, finish,
    in_cluster, or_warn, output, parse, query,
};
use crate::{
    base::duration,
    cli::print,
    distribution::report::{ObjectReport, ObjectState},
};

/// Interval of questions about what istiod does not announce: an object that does not exist yet, or still exists.
const INTERVAL: Duration = Duration::from_millis(500);

/// Arguments of `wait`.
#[derive(Args)]
pub struct WaitFlags {
    /// The kind, such as virtualservice.
    #[arg(value_name = "TYPE")]
    kind: String,
    /// The name, with or without the namespace.
    #[arg(value_name = "NAME[.NAMESPACE]")]
    name: String,
    /// Namespace of the object.
    #[arg(long, short)]
    namespace: Option<String>,
    /// The condition.
    #[arg(long = "for", value_enum, default_value_t = Condition::Distribution)]
    condition: Condition,
    /// Longest time to wait.
    #[arg(long, default_value = "30s", value_parser = duration::parse)]
    timeout: Duration,
    /// The share of proxies that is enough, from 0 to 1.
    #[arg(long, default_value_t = 1.0, value_parser = share)]
    threshold: f64,
    /// Generation of the object that must have arrived, or a later one, instead of the latest in Kubernetes.
    #[arg(long)]
    generation: Option<i64>,
    /// Wait only for proxies whose id contains this text.
    #[arg(long, default_value = "")]
    proxy: String,
    #[command(flatten)]
    servers: ServerFlags,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Condition {
    /// The proxies run the object.
    Distribution,
    /// The object was removed, and all proxies have answered.
    Delete,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "want a number from 0 to 1".to_owned())
}

/// Waits and prints the result.
pub fn run(flags: WaitFlags) -> ExitCode {
    finish(wait(flags))
}

async fn wait(flags: WaitFlags) -> Result<ExitCode, StatusError> {
    let deadline = Instant::now() + flags.timeout;
    let status = StatusFlags {
        object: vec![flags.kind, flags.name],
        namespace: flags.namespace,
        proxy: flags.proxy,
        wait: true,
        timeout: flags.timeout,
        resource_version: None,
        all: false,
        output: Format::Table,
        servers: flags.servers,
    };
    let Some(object) = Named::of(&status.object, status.namespace.as_deref())? else {
        return Err(StatusError::NothingToWaitFor);
    };
    let mut version = None;
    if flags.condition == Condition::Distribution {
        let read = in_cluster(&status, &object, status.timeout).await;
        let mut found = verifiable(read, flags.generation)?;
        while !has_reached(found.as_ref(), flags.generation) {
            tokio::time::sleep(INTERVAL).await;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                eprintln!("error: the object has not reached the generation (time is over)");
                return Ok(ExitCode::from(NOT_ARRIVED));
            }
            // After a failure, the generation is as unknown as before.
            if let Ok(read) = in_cluster(&status, &object, left).await {
                found = read;
            }
        }
        version = found.and_then(|found| found.version);
    }
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut query = query(&object, &status.proxy, version);
        let query = query
            .append_pair("timeout", &format!("{}ms", left.as_millis()))
            .finish();
        let mut answers = ask(&status, "status_events", &query, left + MARGIN).await?;
        let mut last = ObjectReport::default();
        while let Some(event) = answers.event().await? {
            last = parse(&event)?;
            if is_met(flags.condition, flags.threshold, &last) {
                let text = format!("{}\n", output::headline(&last));
                return Ok(print(&text, ExitCode::SUCCESS));
            }
        }
        if Instant::now() >= deadline || is_hopeless(flags.condition, last.state) {
            match flags.condition {
                Condition::Delete => eprintln!("error: {} still exists (time is over)", last.object),
                Condition::Distribution => eprintln!("error: {}", output::headline(&last)),
            }
            return Ok(ExitCode::from(NOT_ARRIVED));
        }
        tokio::time::sleep_until(deadline.min(Instant::now() + INTERVAL)).await;
    }
}

/// Returns what the cluster has. If that is unknown, fails if a generation is wanted, or else warns.
fn verifiable(
    found: Result<Option<InCluster>, ClusterError>,
    wanted: Option<i64>,
) -> Result<Option<InCluster>, StatusError> {
    match found {
        Err(error) if wanted.is_some() => Err(StatusError::Generation(error)),
        found => Ok(or_warn(found)),
    }
}

/// Returns true if the object in the cluster has this generation or a later one, or if none is wanted.
fn has_reached(found: Option<&InCluster>, wanted: Option<i64>) -> bool {
    wanted.is_none_or(|wanted| found.and_then(|found| found.generation) >= Some(wanted))
}

/// Returns true if the condition is met. `threshold` is the share of proxies that must have acknowledged the object.
fn is_met(condition: Condition, threshold: f64, report: &ObjectReport) -> bool {
    match condition {
        Condition::Delete => matches!(report.state, ObjectState::Removed | ObjectState::Unknown),
        Condition::Distribution => {
            let counts = &report.counts;
            let is_under_way = matches!(report.state, ObjectState::Pending | ObjectState::Refused);
            // The proxies of a replica that did not answer are not counted.
            let is_complete = report.replicas.iter().all(|replica| replica.answered);
            let is_enough = is_complete && counts.acknowledged as f64 >= threshold * counts.proxies as f64;
            report.has_arrived() || is_under_way && counts.proxies > 0 && is_enough
        }
    }
}

/// Returns true if nothing but another change of the object can meet the condition.
fn is_hopeless(condition: Condition, state: ObjectState) -> bool {
    condition == Condition::Distribution && matches!(state, ObjectState::Refused | ObjectState::Invalid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cli::status::tests::unreachable, distribution::report::Counts};

    #[tokio::test]
    async fn a_generation_that_cannot_be_verified_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let waited = |generation| {
            wait(WaitFlags {
                kind: "virtualservice".to_owned(),
                name: "reviews".to_owned(),
                namespace: None,
                condition: Condition::Distribution,
                timeout: Duration::ZERO,
                threshold: 1.0,
                generation,
                proxy: String::new(),
                servers: unreachable(folder.path()),
            })
        };
        let error = waited(Some(2)).await.err();
        assert!(
            matches!(error, Some(StatusError::Generation(ClusterError::Request(_)))),
            "{error:?}"
        );
        let error = waited(None).await.err();
        assert!(matches!(error, Some(StatusError::Unreachable(..))), "{error:?}");
    }

    #[test]
    fn an_object_that_does_not_exist_has_no_generation() {
        let of = |generation| InCluster {
            version: Some(1),
            generation,
        };
        assert!(has_reached(Some(&of(Some(2))), Some(2)) && has_reached(Some(&of(Some(3))), Some(2)));
        assert!(!has_reached(Some(&of(Some(1))), Some(2)) && !has_reached(Some(&of(None)), Some(2)));
        assert!(!has_reached(None, Some(2)) && has_reached(None, None));
    }

    #[test]
    fn the_threshold_is_a_share_of_the_proxies() {
        let report = |state, acknowledged| ObjectReport {
            state,
            counts: Counts {
                proxies: 100,
                acknowledged,
                ..Counts::default()
            },
            ..ObjectReport::default()
        };
        let met =
            |threshold, state, acknowledged| is_met(Condition::Distribution, threshold, &report(state, acknowledged));
        assert!(met(0.99, ObjectState::Pending, 99) && !met(0.99, ObjectState::Pending, 98));
        assert!(met(0.5, ObjectState::Refused, 99) && !met(1.0, ObjectState::Refused, 99));
        assert!(met(1.0, ObjectState::Acknowledged, 100));
        // No proxy runs an object that istiod has not read yet.
        assert!(!met(0.0, ObjectState::Awaited, 0) && !met(0.0, ObjectState::Unknown, 0));
        let deleted = |state| is_met(Condition::Delete, 1.0, &report(state, 0));
        assert!(deleted(ObjectState::Removed) && deleted(ObjectState::Unknown) && !deleted(ObjectState::Pending));
    }

    #[test]
    fn the_threshold_is_between_0_and_1() {
        assert_eq!(share("0.99"), Ok(0.99));
        assert!(share("1.1").is_err() && share("-1").is_err() && share("NaN").is_err() && share("x").is_err());
    }
}
