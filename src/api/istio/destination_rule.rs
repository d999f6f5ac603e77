//! Validation of DestinationRules.

use std::collections::BTreeSet;

use super::{common, field_path::FieldPath, traffic_policy};
use crate::{
    api::Meta,
    proto::istio::networking::v1alpha3::{DestinationRule, TrafficPolicy},
};

/// Most credentials of a rule: istiod prepares every one of them for each gateway that sees the rule.
const MAX_CREDENTIALS: usize = 1_000;

/// Checks a DestinationRule.
pub fn check(at: &FieldPath<'_>, rule: &DestinationRule, meta: &Meta) {
    common::wildcard_domain(&at.field("host"), &rule.host);
    traffic_policy::check(at, rule.traffic_policy.as_deref(), meta.namespace());
    let mut names = BTreeSet::new();
    at.each("subsets", &rule.subsets, |at, subset| {
        let name = at.field("name");
        common::subset_name(&name, &subset.name);
        name.require(names.insert(&subset.name), "is a duplicate");
        for (key, value) in &subset.labels {
            common::label(&at.field("labels"), key, value);
        }
        traffic_policy::check(at, subset.traffic_policy.as_deref(), meta.namespace());
    });
    at.require(
        credentials(rule).len() <= MAX_CREDENTIALS,
        "has more than 1,000 different values of credentialName",
    );
    common::export_to(at, &rule.export_to, meta.namespace(), false);
    if let Some(selector) = &rule.workload_selector {
        let selector_at = at.field("workloadSelector");
        common::selector_labels(&selector_at.field("matchLabels"), &selector.match_labels);
        if selector.match_labels.is_empty() {
            selector_at.warning("without labels selects all workloads of the namespace");
        }
        let own = rule
            .export_to
            .iter()
            .all(|entry| entry == "." || entry == meta.namespace().as_str());
        at.field("exportTo")
            .require_on_admission(own, "with a workloadSelector a rule counts in its own namespace only");
    }
}

/// Returns the different names of credentials in a rule.
fn credentials(rule: &DestinationRule) -> BTreeSet<&str> {
    let of_subsets = rule
        .subsets
        .iter()
        .filter_map(|subset| subset.traffic_policy.as_deref());
    let policies = rule.traffic_policy.as_deref().into_iter().chain(of_subsets);
    policies.flat_map(credentials_of_policy).collect()
}

fn credentials_of_policy(policy: &TrafficPolicy) -> impl Iterator<Item = &str> {
    let of_ports = policy.port_level_settings.iter().filter_map(|port| port.tls.as_deref());
    let settings = policy.tls.as_deref().into_iter().chain(of_ports);
    settings
        .map(|tls| tls.credential_name.as_str())
        .filter(|name| !name.is_empty())
}
