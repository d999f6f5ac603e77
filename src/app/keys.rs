//! Setup of the fetchers of documents.

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

/// The author of URLs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Author {
    /// Users: the JWKS servers of RequestAuthentications.
    User,
    /// The operator: SPIFFE bundles of the mesh config, and the issuer of `JWT_RULE`.
    Operator,
}

/// Creates the fetcher of the URLs of an author.
pub(super) fn fetcher(features: &Features, author: Author) -> Result<Fetcher, AppError> {
    options(features, author).map(Fetcher::new)
}

/// Returns the options for the URLs of an author.
///
/// Parity (pilot/pkg/model/jwks_resolver.go): blocked ranges, additional roots and `JWKS_RESOLVER_INSECURE_SKIP_VERIFY`
/// are for JWKS servers of users. The documents of the operator's URLs decide whom the mesh trusts.
fn options(features: &Features, author: Author) -> Result<FetchOptions, AppError> {
    if author == Author::Operator {
        return Ok(FetchOptions::default());
    }
    let ranges = features.blocked_cidrs_in_jwks_uris.iter().map(|text| text.trim());
    let blocked: Result<Vec<IpNet>, AppError> = ranges
        .filter(|text| !text.is_empty())
        .map(|text| cidr::parse(text).ok_or_else(|| AppError::BlockedRange(text.to_owned())))
        .collect();
    Ok(FetchOptions {
        blocked: blocked?,
        insecure_skip_verify: features.jwks_resolver_insecure_skip_verify,
        extra_roots: std::fs::read(Path::new(EXTRA_ROOTS))
            .map(Bytes::from)
            .unwrap_or_default(),
        ..FetchOptions::default()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn exceptions_for_jwks_servers_do_not_apply_to_urls_of_the_operator() {
        let variables = [
            ("JWKS_RESOLVER_INSECURE_SKIP_VERIFY", "true"),
            ("BLOCKED_CIDRS_IN_JWKS_URIS", "10.0.0.0/8"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let (features, errors) = Features::parse(&BTreeMap::from(variables));
        assert!(errors.is_empty(), "{errors:?}");
        let of = |author| {
            let options = options(&features, author).expect("valid ranges");
            (options.insecure_skip_verify, options.blocked.len())
        };
        assert_eq!(of(Author::User), (true, 1));
        assert_eq!(of(Author::Operator), (false, 0));
    }
}
