//! Retry policies.

use crate::{
    api::names::is_http_status,
    proto::{
        Any,
        envoy::{
            config::route::v3::{
                RetryPolicy,
                retry_policy::{RetryBackOff, RetryHostPredicate, RetryPriority, retry_host_predicate, retry_priority},
            },
            extensions::retry::{
                host::previous_hosts::v3::PreviousHostsPredicate,
                priority::previous_priorities::v3::PreviousPrioritiesConfig,
            },
        },
        istio::networking::v1alpha3::HttpRetry,
    },
};

const DEFAULT_ATTEMPTS: u32 = 2;
const DEFAULT_RETRY_ON: &str = "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes";
const RETRIABLE_STATUS_CODES: &str = "retriable-status-codes";

/// True if the destination's load balancing pins a request to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Balancing {
    /// Any host is suitable, so a retry goes to another one.
    Free,
    /// Consistent hash: a retry must stay on the hashed host.
    ConsistentHash,
}

/// Returns the policy of a VirtualService, or else of the mesh; `None` if retries are disabled.
pub(crate) fn policy(declared: Option<&HttpRetry>, balancing: Balancing) -> Option<RetryPolicy> {
    let mut policy = RetryPolicy {
        num_retries: Some(DEFAULT_ATTEMPTS),
        retry_on: DEFAULT_RETRY_ON.to_owned(),
        host_selection_retry_max_attempts: 5,
        ..Default::default()
    };
    if balancing == Balancing::Free {
        policy.retry_host_predicate = vec![previous_hosts()];
    }
    let Some(declared) = declared else {
        return Some(policy);
    };
    let attempts = u32::try_from(declared.attempts).ok().filter(|attempts| *attempts > 0)?;
    policy.num_retries = Some(attempts);
    if !declared.retry_on.is_empty() {
        (policy.retry_on, policy.retriable_status_codes) = conditions(&declared.retry_on);
    }
    policy.per_try_timeout = declared.per_try_timeout;
    match declared.retry_ignore_previous_hosts {
        Some(true) => policy.retry_host_predicate = vec![previous_hosts()],
        Some(false) => policy.retry_host_predicate = Vec::new(),
        None => {}
    }
    if declared.retry_remote_localities == Some(true) {
        policy.retry_priority = Some(previous_priorities());
    }
    policy.retry_back_off = declared.backoff.map(|base| RetryBackOff {
        base_interval: Some(base),
        max_interval: None,
    });
    Some(policy)
}

/// Splits `retryOn` into Envoy's conditions and HTTP status codes, which need a condition of their own.
fn conditions(retry_on: &str) -> (String, Vec<u32>) {
    let mut codes = Vec::new();
    let mut names = Vec::new();
    for part in retry_on.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.parse::<u32>() {
            Ok(code) if is_http_status(code) => codes.push(code),
            _ => names.push(part),
        }
    }
    let mut joined = names.join(",");
    if !codes.is_empty() && !joined.contains(RETRIABLE_STATUS_CODES) {
        // Parity (pilot/pkg/networking/core/route/retry/retry.go): a list of codes alone keeps its leading comma.
        joined.push(',');
        joined.push_str(RETRIABLE_STATUS_CODES);
    }
    (joined, codes)
}

fn previous_hosts() -> RetryHostPredicate {
    RetryHostPredicate {
        name: "envoy.retry_host_predicates.previous_hosts".to_owned(),
        config_type: Some(retry_host_predicate::ConfigType::TypedConfig(Any::pack(
            &PreviousHostsPredicate {},
        ))),
    }
}

fn previous_priorities() -> RetryPriority {
    RetryPriority {
        name: "envoy.retry_priorities.previous_priorities".to_owned(),
        config_type: Some(retry_priority::ConfigType::TypedConfig(Any::pack(
            &PreviousPrioritiesConfig { update_frequency: 2 },
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn undeclared_fields_have_defaults() {
        let policy = policy(
            Some(&HttpRetry {
                attempts: 5,
                ..Default::default()
            }),
            Balancing::ConsistentHash,
        )
        .expect("retries");
        assert_eq!(policy.num_retries, Some(5));
        assert_eq!(policy.retry_on, DEFAULT_RETRY_ON);
        assert!(policy.retry_host_predicate.is_empty());
    }

    #[test]
    fn no_attempts_mean_no_policy() {
        assert_eq!(policy(Some(&HttpRetry::default()), Balancing::Free), None);
    }

    #[test]
    fn status_codes_are_split_from_conditions() {
        assert_eq!(
            conditions("5xx, 503,gateway-error"),
            ("5xx,gateway-error,retriable-status-codes".to_owned(), vec![503])
        );
        assert_eq!(conditions("retriable-status-codes,429").1, vec![429]);
        assert_eq!(conditions("999").0, "999");
        assert_eq!(conditions("503").0, ",retriable-status-codes");
    }
}
