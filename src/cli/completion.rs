//! `istiod completion SHELL`: prints the script with which a shell completes commands and flags.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use clap_complete::Shell;

use super::print;

/// Arguments of `completion`.
#[derive(Args)]
pub struct CompletionFlags {
    /// The shell.
    shell: ShellName,
}

/// The shells that Istio's command supports.
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
    // The generator panics if it cannot write.
    let mut script: Vec<u8> = Vec::new();
    clap_complete::generate(shell, command, program, &mut script);
    print(&String::from_utf8_lossy(&script), ExitCode::SUCCESS)
}
