//! Load assignments. Which there are follows from the clusters: the cluster part lists them.

use super::{View, group::Built};

/// What one load assignment is built from, besides what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EndpointKey {}

impl EndpointKey {
    /// Builds the load assignment.
    pub fn build(&self, _view: &View) -> Built {
        Built::none()
    }
}
