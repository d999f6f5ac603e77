//! `istiod discovery`: runs the control plane.

use std::{collections::BTreeSet, process::ExitCode};

use super::FAILURE;
use crate::{
    admin::metrics::VERSION,
    app,
    base::url::argument_without_credentials,
    environment,
    log::{Encoding, LogError, Logging, Options},
    settings::{DiscoveryFlags, OLD_FLAGS, Settings},
};

/// Runs until a signal.
pub fn run(flags: DiscoveryFlags, unknown: &[String]) -> ExitCode {
    let checked = flags.check().map_err(|error| error.to_string());
    let logging = match checked.and_then(|()| logging(&flags).map_err(|error| error.to_string())) {
        Ok(logging) => logging,
        // Parity (github.com/spf13/cobra): the prefix.
        Err(error) => {
            eprintln!("Error: {error}");
            return ExitCode::from(FAILURE);
        }
    };
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .map(|argument| argument_without_credentials(&argument))
        .collect();
    tracing::info!(version = VERSION, arguments = arguments.join(" "), "starting");
    report_unknown(unknown);
    match app::run(Settings::from_process(flags), logging.scopes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::from(FAILURE)
        }
    }
}

/// Logs flags that have no effect: each flag of an old release once, with its successor, and the others together.
fn report_unknown(flags: &[String]) {
    let (mut unknown, mut reported) = (Vec::new(), BTreeSet::new());
    for flag in flags {
        let name = flag.trim_start_matches('-').split('=').next().unwrap_or_default();
        match OLD_FLAGS.iter().find(|(old, _)| *old == name) {
            Some((old, reason)) if reported.insert(*old) => {
                tracing::warn!(flag = format!("--{old}"), reason, "flag has no effect");
            }
            Some(_) => {}
            None => unknown.push(flag.as_str()),
        }
    }
    if !unknown.is_empty() {
        tracing::warn!(flags = unknown.join(" "), "unknown flags ignored");
    }
}

fn logging(flags: &DiscoveryFlags) -> Result<Logging, LogError> {
    Logging::start(&Options {
        output_levels: flags.log_output_level.clone(),
        stack_trace_levels: flags.log_stacktrace_level.clone(),
        callers: flags.log_caller.clone(),
        targets: flags.log_target.clone(),
        rotated: flags.rotated_log(),
        encoding: if flags.log_as_json {
            Encoding::Json
        } else {
            Encoding::Text
        },
        clock: environment::wall_clock,
    })
}
