//! The vocabulary of ingestion: what the outside world says about the inputs.

use super::inputs::Row;
use crate::{
    api::Kind,
    base::{ClusterId, ObjectKey},
};

/// Who says it: one kind of one cluster. Files speak for the config cluster.
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
    /// An object is there, with this content.
    Upsert(Row),
    /// An object is gone.
    Remove(Kind, ObjectKey),
    /// The source has exactly these objects; the rest of what it had is gone.
    Replace(SourceId, Vec<Row>),
    /// A cluster is gone with all it had.
    RemoveCluster(ClusterId),
}

/// Changes that are committed together, in order.
pub type Batch = Vec<Change>;
