//! Subcommands, one file each, and what they share.

pub mod analyze;
pub mod arguments;
pub mod completion;
pub mod convert;
pub mod crds;
pub mod create_remote_secret;
pub mod discovery;
pub mod inject;
pub mod render;
pub mod request;
mod retry;
pub mod status;
pub mod version;

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{CommandFactory, Parser, Subcommand};

use crate::settings::DiscoveryFlags;

/// Exit code of every failure.
///
/// Parity (pilot/cmd/pilot-discovery/main.go): Istio exits with -1.
const FAILURE: u8 = 255;

/// The control plane of an Istio service mesh.
#[derive(Parser)]
#[command(name = "istiod", version)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run the control plane.
    Discovery(Box<DiscoveryFlags>),
    /// Print the version.
    Version(version::VersionFlags),
    /// Query the running istiod on this machine: metrics and debug pages.
    Request(request::RequestFlags),
    /// Show which proxies run an object, or wait until they do.
    Status(Box<status::StatusFlags>),
    /// Wait until an object is distributed or deleted, with the flags of `istioctl experimental wait`.
    Wait(Box<status::wait::WaitFlags>),
    /// Report mistakes in the configuration of a cluster or of files.
    Analyze(Box<analyze::AnalyzeFlags>),
    /// Print the completion script of a shell.
    Completion(completion::CompletionFlags),
    /// Turn objects of old releases (RouteRule, Policy, ServiceRole, …) into today's kinds, and name what is lost.
    Convert(convert::ConvertFlags),
    /// Print the CustomResourceDefinitions of Istio's kinds as YAML.
    Crds,
    /// Print a Secret with which a control plane in another cluster can read this one.
    CreateRemoteSecret(Box<create_remote_secret::CreateRemoteSecretFlags>),
    /// Add the sidecar to the workloads of a file, as the webhook would to their pods.
    Inject(Box<inject::InjectFlags>),
    /// Write the configuration of each proxy of a mesh folder, without serving.
    Render {
        /// Mesh folder.
        folder: PathBuf,
        /// Output folder: OUT/<proxy>/<type>.json.
        #[arg(long)]
        out: PathBuf,
    },
}

/// Runs the command line and returns the exit code. Without a subcommand it prints the help.
pub fn run(line: Vec<String>) -> ExitCode {
    let mut line = line.into_iter();
    let program = line.next();
    let arguments = arguments::rewrite(&CommandLine::command(), line.collect());
    let usage_error = match arguments.kept.first().map(String::as_str) {
        Some("analyze") => analyze::INCORRECT_USAGE,
        _ => FAILURE,
    };
    // The binary may be called pilot-discovery.
    let name = program.as_deref().map(Path::new).and_then(Path::file_stem);
    let name = name.map_or_else(|| "istiod".into(), |name| name.to_string_lossy().into_owned());
    let parsed = CommandLine::try_parse_from(program.into_iter().chain(arguments.kept));
    let command = match parsed {
        Ok(CommandLine { command: Some(command) }) => command,
        Ok(CommandLine { command: None }) => return printed(CommandLine::command().print_help(), ExitCode::SUCCESS),
        Err(error) => {
            let code = if error.use_stderr() {
                ExitCode::from(usage_error)
            } else {
                ExitCode::SUCCESS
            };
            return printed(error.print(), code);
        }
    };
    match command {
        Command::Discovery(flags) => discovery::run(*flags, &arguments.unknown),
        Command::Version(flags) => version::run(&flags),
        Command::Request(flags) => request::run(&flags),
        Command::Status(flags) => status::run(&flags),
        Command::Wait(flags) => status::wait::run(*flags),
        Command::Analyze(flags) => analyze::run(&flags),
        Command::Completion(flags) => completion::run(&flags, &mut CommandLine::command(), &name),
        Command::Convert(flags) => convert::run(&flags),
        Command::Crds => crds::run(),
        Command::CreateRemoteSecret(flags) => create_remote_secret::run(&flags),
        Command::Inject(flags) => inject::run(&flags),
        Command::Render { folder, out } => render::run(&folder, &out),
    }
}

/// Prints a text and returns the exit code.
fn print(text: &str, code: ExitCode) -> ExitCode {
    printed(write(text), code)
}

/// Writes a text to the standard output. `println!` would panic if the reader stops early (`istiod crds | head`).
fn write(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}

fn printed(result: io::Result<()>, code: ExitCode) -> ExitCode {
    if result.is_ok() { code } else { ExitCode::from(FAILURE) }
}
