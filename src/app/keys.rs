//! Setup of the fetcher of user-provided URLs.

use std::path::Path;

use bytes::Bytes;
use ipnet::IpNet;

use super::AppError;
use crate::{
    base::cidr,
    fetch::{FetchOptions, Fetcher},
    model::features::Features,
};

/// Additional root certificates for JWKS servers.
const EXTRA_ROOTS: &str = "/cacerts/extra.pem";

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
