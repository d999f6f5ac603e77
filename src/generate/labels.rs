//! The labels of a client that some rule asks for: what is left of them in keys.

use super::{BuildContext, selected::Selected};
use crate::base::{Labels, Shared};

/// The client's labels as far as they can decide about it: those that `sourceLabels` of a VirtualService or
/// `workloadSelector` of a DestinationRule of its namespace name. Proxies that differ in others share everything.
pub fn asked(ctx: &BuildContext, selected: &Selected) -> Shared<Labels> {
    let namespace = selected.scope.namespace();
    let is_asked = |key: &smol_str::SmolStr| {
        ctx.mesh.virtual_services_by_source_label.contains(ctx.cx, key)
            || ctx
                .mesh
                .rules_by_selector_label
                .contains(ctx.cx, &(namespace.clone(), key.clone()))
    };
    let asked = selected.labels.iter().filter(|(key, _)| is_asked(key));
    Shared::new(asked.map(|(key, value)| (key.clone(), value.clone())).collect())
}
