//! Oracles over random meshes: proxies receive the same bytes, however the world reached its state.

mod corpus;
mod oracles;

use libtest_mimic::Trial;

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "properties::incremental_equals_from_scratch",
            oracles::incremental_equals_from_scratch,
        ),
        Trial::test(
            "properties::any_order_gives_the_same_bytes",
            oracles::any_order_gives_the_same_bytes,
        ),
        Trial::test(
            "properties::nobody_is_told_of_what_is_irrelevant",
            oracles::nobody_is_told_of_what_is_irrelevant,
        ),
        Trial::test(
            "properties::each_host_has_the_routes_that_a_sidecar_has",
            oracles::each_host_has_the_routes_that_a_sidecar_has,
        ),
        Trial::test(
            "properties::dependencies_grow_linearly",
            oracles::dependencies_grow_linearly,
        ),
    ]
}
