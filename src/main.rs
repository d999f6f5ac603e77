//! The `istiod` binary: arguments in, exit code out.

use std::process::ExitCode;

fn main() -> ExitCode {
    istiod::cli::run(std::env::args().collect())
}
