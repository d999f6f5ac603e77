//! `istiod crds`.

use std::{
    io::{Write, stdout},
    process::ExitCode,
};

use super::FAILURE;
use crate::api::crd;

/// Prints the CustomResourceDefinitions of Istio's kinds, as the base chart installs them.
pub fn run() -> ExitCode {
    // The reader may stop early (`istiod crds | head`), which is not an error.
    match stdout().lock().write_all(crd::text().as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(FAILURE),
    }
}
