//! `istiod version`.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::json;

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
    if flags.short {
        println!("{ISTIO_VERSION}");
        return ExitCode::SUCCESS;
    }
    let info = json!({ "clientVersion": build_info() });
    match flags.output {
        Some(Format::Json) => println!("{info:#}"),
        Some(Format::Yaml) => {
            println!(
                "clientVersion:\n  golang_version: \"\"\n  revision: {own}\n  status: Clean\n  tag: {ISTIO_VERSION}\n  version: {ISTIO_VERSION}"
            );
        }
        None => println!(
            "version.BuildInfo{{Version:\"{ISTIO_VERSION}\", GitRevision:\"{own}\", BuildStatus:\"Clean\", GitTag:\"{ISTIO_VERSION}\"}}"
        ),
    }
    ExitCode::SUCCESS
}
