//! The revisions that decide which control plane is responsible for an object of the Gateway API.

use std::collections::BTreeSet;

use smol_str::SmolStr;

use crate::{api::label::REVISION, base::ObjectKey, model::MeshSnapshot, table::Cx};

/// The revisions that decide which control plane is responsible for an object, besides the own one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revisions {
    /// Tags of the own revision.
    pub tags: BTreeSet<SmolStr>,
    /// The revision that the tag `default` points to by its webhook; empty without one.
    pub default_tag: SmolStr,
    /// The revision of the default validator; empty without one.
    pub default_validator: SmolStr,
}

impl Revisions {
    /// Returns true if this control plane is responsible for an object: `label`, the revision or tag of the object, or
    /// else that of its namespace, is its own. An object without a known namespace belongs to all control planes, as
    /// objects of the cluster do.
    ///
    /// Parity (pkg/revisions/tag_watcher.go, IsMine).
    pub fn is_own(&self, cx: &Cx, mesh: &MeshSnapshot, object: &ObjectKey, label: Option<&str>) -> bool {
        let own = mesh.installation.revision.as_str();
        if let Some(label) = label {
            return self.selects(own, label);
        }
        let namespace = ObjectKey::new(&object.cluster, "", SmolStr::new(object.namespace.as_str()));
        mesh.namespaces.get(cx, &namespace).is_none_or(|row| {
            let label = row.meta.labels.get(REVISION);
            self.selects(own, label.map_or("", SmolStr::as_str))
        })
    }

    /// Returns true if a revision or tag, empty for none, selects this control plane.
    fn selects(&self, own: &str, selected: &str) -> bool {
        let is_own = |name: &str| name == own || self.tags.contains(name);
        let is_default = || self.default_validator == own && self.default_tag.is_empty();
        is_own(selected) || selected.is_empty() && (is_own("default") || is_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revisions_select_their_control_plane() {
        let tagged = |tag: &'static str| Revisions {
            tags: [SmolStr::new_static(tag)].into(),
            ..Revisions::default()
        };
        let revisions = tagged("prod");
        let selects = |revisions: &Revisions, selected: &str| revisions.selects("canary", selected);
        assert!(selects(&revisions, "canary") && selects(&revisions, "prod"));
        assert!(!selects(&revisions, "") && !selects(&revisions, "default") && !selects(&revisions, "other"));
        let of_validator = Revisions {
            default_validator: "canary".into(),
            ..revisions
        };
        assert!(selects(&of_validator, "") && !selects(&of_validator, "default"));
        let of_tag = Revisions {
            default_tag: "other".into(),
            ..of_validator
        };
        assert!(!selects(&of_tag, ""), "the tag precedes the validator");
        assert!(selects(&tagged("default"), ""));
        let without = Revisions::default();
        assert!(without.selects("", "") && !without.selects("", "canary"));
    }
}
