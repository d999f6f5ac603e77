//! Validation of ProxyConfigs.

use super::{common, field_path::FieldPath};
use crate::{api::Meta, proto::istio::networking::v1beta1::ProxyConfig};

/// Checks a ProxyConfig.
pub fn check(at: &FieldPath<'_>, config: &ProxyConfig, _meta: &Meta) {
    common::selector(at, config.selector.as_ref());
    at.field("concurrency")
        .require(config.concurrency.unwrap_or_default() >= 0, "must not be negative");
}
