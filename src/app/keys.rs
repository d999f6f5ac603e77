//! Setup of the HTTP fetcher and of JWKS fetching.

use std::{path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use ipnet::IpNet;
use tokio::sync::watch;

use super::AppError;
use crate::{
    base::cidr,
    environment::Environment,
    fetch::{FetchOptions, Fetcher},
    ingest::{
        diagnostics::Report,
        jwks::{self, KeyReports},
    },
    model::{Installation, features::Features, wants::Wants},
    push::PushHandle,
};

/// Additional root certificates for JWKS servers.
const EXTRA_ROOTS: &str = "/cacerts/extra.pem";

/// The longest wait for JWKS at startup.
pub(super) const JWKS_TIMEOUT: Duration = Duration::from_secs(6);

/// Starts fetching JWKS.
pub(super) fn start(
    environment: &Environment,
    installation: &Installation,
    fetcher: Fetcher,
    wants: watch::Receiver<Option<Arc<Wants>>>,
    push: &PushHandle,
    report: Report,
) -> Result<KeyReports, AppError> {
    let features = &installation.features;
    let reports = jwks::start(
        environment,
        installation.cluster.clone(),
        fetcher,
        features.pilot_jwt_pub_key_refresh_interval,
        wants,
        push.changes.clone(),
        report,
    )?;
    Ok(reports)
}

/// Creates the fetcher of user-provided URLs, without the address ranges that the operator blocks.
pub(super) fn fetcher(features: &Features) -> Result<Fetcher, AppError> {
    let ranges = features.blocked_cidrs_in_jwks_uris.iter().map(|text| text.trim());
    let blocked: Result<Vec<IpNet>, AppError> = ranges
        .filter(|text| !text.is_empty())
        .map(|text| cidr::parse(text).ok_or_else(|| AppError::BlockedRange(text.to_owned())))
        .collect();
    Ok(Fetcher::new(FetchOptions {
        blocked: blocked?,
        insecure_skip_verify: features.jwks_resolver_insecure_skip_verify,
        extra_roots: std::fs::read(Path::new(EXTRA_ROOTS))
            .map(Bytes::from)
            .unwrap_or_default(),
        ..FetchOptions::default()
    }))
}
