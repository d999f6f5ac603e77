//! Subcommands, one file each.

pub mod crds;
pub mod create_remote_secret;
pub mod discovery;
pub mod render;
pub mod request;
pub mod version;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::settings::{DiscoveryFlags, without_unknown_flags};

/// The control plane of an Istio service mesh.
#[derive(Parser)]
#[command(name = "istiod", version)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the control plane.
    Discovery(Box<DiscoveryFlags>),
    /// Print the version.
    Version(version::VersionFlags),
    /// Query the running istiod on this machine: metrics and debug pages.
    Request(request::RequestFlags),
    /// Print the CustomResourceDefinitions of Istio's kinds as YAML.
    Crds,
    /// Print a Secret with which a control plane in another cluster can read this one.
    CreateRemoteSecret(Box<create_remote_secret::CreateRemoteSecretFlags>),
    /// Write the configuration of each proxy of a mesh folder, without serving.
    Render {
        /// Mesh folder.
        folder: PathBuf,
        /// Output folder: OUT/<proxy>/<type>.json.
        #[arg(long)]
        out: PathBuf,
    },
}

/// Runs the command line and returns the exit code.
pub fn run(mut words: Vec<String>) -> ExitCode {
    let mut unknown = Vec::new();
    if let Some(index) = words.iter().position(|word| word == "discovery") {
        let command = <Line as clap::CommandFactory>::command();
        if let Some(discovery) = command.find_subcommand("discovery") {
            let (kept, dropped) = without_unknown_flags(discovery, words.split_off(index + 1));
            words.extend(kept);
            unknown = dropped;
        }
    }
    match Line::parse_from(words).command {
        Command::Discovery(flags) => discovery::run(*flags, &unknown),
        Command::Version(flags) => version::run(&flags),
        Command::Request(flags) => request::run(&flags),
        Command::Crds => crds::run(),
        Command::CreateRemoteSecret(flags) => create_remote_secret::run(&flags),
        Command::Render { folder, out } => render::run(&folder, &out),
    }
}
