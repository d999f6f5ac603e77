//! `istiod discovery`: runs the control plane.

use std::{collections::BTreeSet, process::ExitCode};

use tracing_subscriber::{EnvFilter, fmt};

use super::FAILURE;
use crate::{
    app,
    settings::{DiscoveryFlags, OLD_FLAGS, Settings},
};

/// Runs until a signal.
pub fn run(flags: DiscoveryFlags, unknown: &[String]) -> ExitCode {
    if let Err(error) = flags.check() {
        eprintln!("error: {error}");
        return ExitCode::from(FAILURE);
    }
    let filter = filter(&flags.log_output_level);
    let builder = fmt().with_env_filter(filter).with_target(true);
    if flags.log_as_json {
        builder.json().init();
    } else {
        builder.with_ansi(false).init();
    }
    let (mut strange, mut told) = (Vec::new(), BTreeSet::new());
    for flag in unknown {
        let name = flag.trim_start_matches('-').split('=').next().unwrap_or_default();
        match OLD_FLAGS.iter().find(|(old, _)| *old == name) {
            Some((old, reason)) if told.insert(*old) => {
                tracing::warn!(flag = format!("--{old}"), reason, "flag has no effect");
            }
            Some(_) => {}
            None => strange.push(flag.as_str()),
        }
    }
    if !strange.is_empty() {
        tracing::warn!("unknown flags ignored: {}", strange.join(" "));
    }
    match app::run(Settings::from_process(flags)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::from(FAILURE)
        }
    }
}

/// Converts Istio's `scope:level` pairs to a filter; scopes map to modules with the same meaning.
fn filter(levels: &str) -> EnvFilter {
    let directives: Vec<String> = levels
        .split(',')
        .filter_map(|pair| {
            let (scope, level) = pair.trim().split_once(':').unwrap_or(("default", pair.trim()));
            let level = match level {
                "none" => "off",
                "fatal" => "error",
                "debug" | "info" | "warn" | "error" => level,
                _ => return None,
            };
            let module = match scope {
                "default" | "all" => return Some(level.to_owned()),
                "ads" | "delta" => "istiod::xds",
                "model" => "istiod::push",
                "file" => "istiod::ingest",
                _ => return None,
            };
            Some(format!("{module}={level}"))
        })
        .collect();
    let mut filter = if directives.is_empty() {
        "info".to_owned()
    } else {
        directives.join(",")
    };
    // The client library logs every failed request as an error; watches and writers log those that matter.
    filter.push_str(",kube_client=off");
    EnvFilter::new(filter)
}
