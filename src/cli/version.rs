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
    print(&format!("{}\n", text(flags)), ExitCode::SUCCESS)
}

/// Parity (pkg/version/cobra.go): the label, the members of the long form, and that a format precedes `--short`.
fn text(flags: &VersionFlags) -> String {
    let own = env!("CARGO_PKG_VERSION");
    match flags.output {
        Some(Format::Json) => format!("{:#}", json!({ "clientVersion": build_info() })),
        Some(Format::Yaml) => format!(
            "clientVersion:\n  golang_version: \"\"\n  revision: {own}\n  status: Clean\n  tag: {ISTIO_VERSION}\n  \
             version: {ISTIO_VERSION}"
        ),
        None if flags.short => format!("client version: {ISTIO_VERSION}"),
        None => format!(
            "client version: version.BuildInfo{{Version:\"{ISTIO_VERSION}\", GitRevision:\"{own}\", \
             GolangVersion:\"\", BuildStatus:\"Clean\", GitTag:\"{ISTIO_VERSION}\"}}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_written_as_by_istio() {
        let shown = |short, output| text(&VersionFlags { short, output });
        assert_eq!(shown(true, None), "client version: 1.30.3");
        let long = shown(false, None);
        assert!(
            long.starts_with("client version: version.BuildInfo{Version:\"1.30.3\", GitRevision:\""),
            "{long}"
        );
        let json = shown(true, Some(Format::Json));
        assert!(json.contains("\"clientVersion\": {"), "{json}");
        let yaml = shown(true, Some(Format::Yaml));
        assert!(
            yaml.starts_with("clientVersion:\n  golang_version: \"\"\n") && yaml.ends_with("\n  version: 1.30.3"),
            "{yaml}"
        );
    }
}
