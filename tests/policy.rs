//! AuthorizationPolicy, RequestAuthentication and PeerAuthentication: the generated filters, checked from the outside
//! as an attacker or auditor would.

mod builder;
mod defaults;
mod differential;
mod evaluator;
mod fixture;
mod gateways;
mod literals;
mod oracle;
mod ownership;
mod ztunnel;

use libtest_mimic::Trial;

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test(
            "policy::filters_equal_those_of_istios_builder",
            builder::filters_equal_those_of_istios_builder,
        ),
        Trial::ignorable_test(
            "policy::policies_of_ztunnels_equal_istios",
            ztunnel::policies_of_ztunnels_equal_istios,
        ),
        Trial::test(
            "policy::r15_filters_enforce_the_policies",
            differential::r15_filters_enforce_the_policies,
        ),
        Trial::test(
            "policy::r8_literals_are_not_expressions",
            literals::r8_literals_are_not_expressions,
        ),
        Trial::test(
            "policy::r13_passthrough_reaches_only_exported_mtls_endpoints",
            gateways::r13_passthrough_reaches_only_exported_mtls_endpoints,
        ),
        Trial::test(
            "policy::r14_policies_are_equal_for_all_proxy_versions",
            defaults::r14_policies_are_equal_for_all_proxy_versions,
        ),
        Trial::test(
            "policy::r16_paths_are_normalized_as_configured",
            defaults::r16_paths_are_normalized_as_configured,
        ),
        Trial::test(
            "policy::r17_strict_ownership_limits_virtual_services",
            ownership::r17_strict_ownership_limits_virtual_services,
        ),
    ]
}
