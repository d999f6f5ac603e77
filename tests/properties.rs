//! Oracles over random meshes: proxies receive the same bytes, however the world reached its state, and every
//! reference in them has a target.

mod control_plane;
mod corpus;
pub(crate) mod meshes;
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
            "properties::irrelevant_changes_cause_no_updates",
            oracles::irrelevant_changes_cause_no_updates,
        ),
        Trial::test(
            "properties::grpc_clients_get_the_routes_of_sidecars",
            oracles::grpc_clients_get_the_routes_of_sidecars,
        ),
        Trial::test(
            "properties::dependencies_grow_linearly",
            oracles::dependencies_grow_linearly,
        ),
        Trial::test(
            "properties::effects_equal_a_mesh_without_the_object",
            oracles::effects_equal_a_mesh_without_the_object,
        ),
        Trial::test("properties::meshes_are_consistent", meshes::are_consistent),
    ]
}
