//! `istiod version`.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::json;

use super::print;
use crate::admin::metrics::{ISTIO_VERSION, build_info};

/// Flags of `version`.
#[derive(Args)]
pub struct VersionFlags {
    /// Print only the version number.
    #[arg(short, long)]
    short: bool,
    /// Output format.
    #[arg(short, long, value_enum)]
    output: Option<Format>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Yaml,
    Json,
}

/// Prints the version of this build.
pub fn run(flags: &VersionFlags) -> ExitCode {
    let own = env!("CARGO_PKG_VERSION");
    let info = json!({ "clientVersion": build_info() });
    let text = match flags.output {
        _ if flags.short => ISTIO_VERSION.to_owned(),
        Some(Format::Json) => format!("{info:#}"),
        Some(Format::Yaml) => format!(
            "clientVersion:\n  golang_version: \"\"\n  revision: {own}\n  status: Clean\n  tag: {ISTIO_VERSION}\n  version: {ISTIO_VERSION}"
        ),
        None => format!(
            "version.BuildInfo{{Version:\"{ISTIO_VERSION}\", GitRevision:\"{own}\", BuildStatus:\"Clean\", GitTag:\"{ISTIO_VERSION}\"}}"
        ),
    };
    print(&format!("{text}\n"), ExitCode::SUCCESS)
}
