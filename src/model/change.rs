//! Changes of the inputs, as sources report them.

use super::inputs::Row;
use crate::{
    api::Kind,
    base::{ClusterId, ObjectKey},
};

/// Source of objects: one kind of one cluster. Files belong to the config cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId {
    /// The cluster.
    pub cluster: ClusterId,
    /// The kind.
    pub kind: Kind,
}

/// One change of the inputs.
#[derive(Clone, Debug)]
pub enum Change {
    /// An object exists, with this content.
    Upsert(Row),
    /// An object was removed.
    Remove(Kind, ObjectKey),
    /// The source has exactly these objects; its other objects were removed.
    Replace(SourceId, Vec<Row>),
    /// A cluster was removed with all its objects.
    RemoveCluster(ClusterId),
}

/// Changes that are committed together, in order.
pub type Batch = Vec<Change>;
