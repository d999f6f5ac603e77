//! `istiod crds`.

use std::process::ExitCode;

use super::print;
use crate::api::crd;

/// Prints the CustomResourceDefinitions of Istio's kinds, as the base chart installs them.
pub fn run() -> ExitCode {
    print(&crd::text(), ExitCode::SUCCESS)
}
