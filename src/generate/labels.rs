//! Labels of a proxy in keys.

use super::{BuildContext, selected::Selected};
use crate::base::{Labels, Shared};

/// Returns the labels of a proxy that rules refer to: `sourceLabels` of a VirtualService, or `workloadSelector` of a
/// DestinationRule in its namespace. Proxies that differ in other labels share their resources.
pub fn relevant(ctx: &BuildContext, selected: &Selected) -> Shared<Labels> {
    let namespace = selected.scope.namespace();
    let is_relevant = |key: &smol_str::SmolStr| {
        ctx.mesh.virtual_services_by_source_label.contains(ctx.cx, key)
            || ctx
                .mesh
                .rules_by_selector_label
                .contains(ctx.cx, &(namespace.clone(), key.clone()))
    };
    let relevant = selected.labels.iter().filter(|(key, _)| is_relevant(key));
    Shared::new(relevant.map(|(key, value)| (key.clone(), value.clone())).collect())
}
