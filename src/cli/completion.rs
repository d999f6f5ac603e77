//! `istiod completion SHELL`: prints the script with which a shell completes commands and flags.

use std::{io, process::ExitCode};

use clap::{Args, ValueEnum};
use clap_complete::Shell;

/// Arguments of `completion`.
#[derive(Args)]
pub struct CompletionFlags {
    /// The shell.
    shell: ShellName,
}

/// The shells of Istio's command.
#[derive(Clone, Copy, ValueEnum)]
enum ShellName {
    Bash,
    Zsh,
    Fish,
    Powershell,
}

/// Prints the script for the program with this name.
pub fn run(flags: &CompletionFlags, command: &mut clap::Command, program: &str) -> ExitCode {
    let shell = match flags.shell {
        ShellName::Bash => Shell::Bash,
        ShellName::Zsh => Shell::Zsh,
        ShellName::Fish => Shell::Fish,
        ShellName::Powershell => Shell::PowerShell,
    };
    clap_complete::generate(shell, command, program, &mut io::stdout());
    ExitCode::SUCCESS
}
