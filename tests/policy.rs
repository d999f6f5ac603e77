//! Policies: what AuthorizationPolicy, RequestAuthentication and PeerAuthentication become, seen from outside, as an
//! attacker or an auditor would look at it.

mod bed;
mod builder;

use libtest_mimic::Trial;

/// The trials of this module.
pub(crate) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test(
        "policy::filters_are_those_of_the_builder_of_istio",
        builder::filters_are_those_of_the_builder_of_istio,
    )]
}
