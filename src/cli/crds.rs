//! `istiod crds`.

use std::{
    io::{Write, stdout},
    process::ExitCode,
};

use crate::api::crd;

/// Prints the CustomResourceDefinitions of Istio's kinds, as the base chart installs them.
pub fn run() -> ExitCode {
    // Whoever reads may stop early (`istiod crds | head`); that is no failure worth a word.
    match stdout().lock().write_all(crd::text().as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
