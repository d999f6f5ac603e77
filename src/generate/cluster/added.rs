//! Clusters that EnvoyFilters add.

use super::ClusterKey;
use crate::{
    base::Shared,
    generate::{
        BuildContext, EncodedResource,
        patch::{self, PatchContext, PatchRef, set},
        resource::Built,
        selected::Selected,
    },
    proto::envoy::config::cluster::v3::Cluster,
};

/// Clusters that patches add in one context.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AddedPart {
    /// Patches in order.
    pub patches: Shared<[PatchRef]>,
}

/// One added cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AddedKey {
    /// Patch that adds it.
    pub patch: PatchRef,
}

impl AddedPart {
    /// Selects the part of a proxy, if patches add clusters.
    pub fn select(ctx: &BuildContext, selected: &Selected, context: PatchContext) -> Option<Self> {
        let patches = patch::cluster::additions(ctx, &selected.patches.clusters, context);
        (!patches.is_empty()).then(|| Self {
            patches: patches.into(),
        })
    }

    /// Lists the clusters of the part.
    pub fn list(&self) -> impl Iterator<Item = ClusterKey> {
        let keys = self.patches.iter().map(|patch| AddedKey { patch: patch.clone() });
        keys.map(ClusterKey::Added)
    }
}

impl AddedKey {
    /// Builds the cluster. A cluster without a name is omitted: Envoy would refuse the whole response.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let refs = std::slice::from_ref(&self.patch);
        let Some(patch) = patch::resolve(ctx, refs).into_iter().next() else {
            return Built::none();
        };
        match patch.read::<Cluster>() {
            Some(cluster) if !cluster.name.is_empty() => {
                Built::new(EncodedResource::new(cluster.name.as_str(), &cluster)).with_notes(vec![set::applied(patch)])
            }
            _ => Built::none().with_notes(vec![set::problem(patch, "the cluster has no name")]),
        }
    }
}
