//! Namespaces of a mesh folder that `discoverySelectors` of its mesh config select.

use std::collections::BTreeSet;

use crate::{
    api::{Kind, Row, mesh_config},
    base::{ClusterId, Namespace},
};

/// Namespaces whose objects count, of each cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SelectedNamespaces(Option<BTreeSet<(ClusterId, Namespace)>>);

impl SelectedNamespaces {
    /// Selects among the Namespaces of `objects`. `settings` has the mesh config; without selectors every namespace
    /// counts.
    pub fn of<'a>(settings: &[Row], objects: impl IntoIterator<Item = &'a Row>) -> Self {
        let config = settings.iter().find_map(|row| match row {
            Row::MeshConfig(config) => Some(config),
            _ => None,
        });
        let selectors = config.map(|config| mesh_config::discovery_selectors(&config.spec));
        let Some(selectors) = selectors.filter(|selectors| !selectors.is_empty()) else {
            return Self(None);
        };
        let namespaces = objects.into_iter().filter_map(|row| match row {
            Row::Namespace(namespace) => Some(namespace),
            _ => None,
        });
        let selected = namespaces.filter(|namespace| {
            let labels = &namespace.meta.labels;
            selectors.iter().any(|selector| selector.matches(labels))
        });
        let key = |cluster: &ClusterId, name: &str| (cluster.clone(), Namespace::new(name));
        Self(Some(
            selected.map(|row| key(row.meta.cluster(), row.meta.name())).collect(),
        ))
    }

    /// Returns true if an object counts.
    pub fn contain(&self, row: &Row) -> bool {
        let kind = row.kind();
        let Some(selected) = &self.0 else { return true };
        if kind.is_cluster_scoped() || matches!(kind, Kind::MeshConfig | Kind::MeshNetworks) {
            return true;
        }
        let key = row.key();
        selected.contains(&(key.cluster.clone(), key.namespace.clone()))
    }

    /// Returns the row of a Gateway that counts only as a gateway to another network.
    pub fn hidden_gateway(&self, row: &Row) -> Option<Row> {
        row.hidden_gateway().filter(|_| !self.contain(row))
    }
}
