//! AuthorizationPolicy, RequestAuthentication and PeerAuthentication: the generated filters, checked from the outside
//! as an attacker or auditor would.

mod bed;
mod builder;
mod defaults;
mod differential;
mod evaluator;
mod gateways;
mod literals;
mod oracle;
mod ownership;

use libtest_mimic::Trial;

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test(
            "policy::filters_are_those_of_the_builder_of_istio",
            builder::filters_are_those_of_the_builder_of_istio,
        ),
        Trial::test(
            "policy::r15_policies_mean_what_they_say",
            differential::r15_policies_mean_what_they_say,
        ),
        Trial::test(
            "policy::r8_a_literal_is_no_expression",
            literals::r8_a_literal_is_no_expression,
        ),
        Trial::test(
            "policy::r13_passing_on_reaches_only_what_is_exported_and_speaks_mtls",
            gateways::r13_passing_on_reaches_only_what_is_exported_and_speaks_mtls,
        ),
        Trial::test(
            "policy::r14_policies_are_the_same_for_every_version",
            defaults::r14_policies_are_the_same_for_every_version,
        ),
        Trial::test(
            "policy::r16_paths_are_normalized_as_the_mesh_says",
            defaults::r16_paths_are_normalized_as_the_mesh_says,
        ),
        Trial::test(
            "policy::r17_only_owners_decide_where_ownership_is_strict",
            ownership::r17_only_owners_decide_where_ownership_is_strict,
        ),
    ]
}
