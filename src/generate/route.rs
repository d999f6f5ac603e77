//! Routes.

use super::{
    View,
    group::{Built, Listed},
    select::Selected,
};

/// What a part of this kind is selected by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RoutePart {}

/// What one resource is built from, besides what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RouteKey {}

/// The parts of this kind that a proxy gets.
pub fn select(_view: &View, _selected: &Selected) -> Vec<RoutePart> {
    vec![RoutePart {}]
}

impl RoutePart {
    /// The resources of the part, in order.
    pub fn list(&self, _view: &View) -> Vec<Listed> {
        Vec::new()
    }
}

impl RouteKey {
    /// Builds the resource.
    pub fn build(&self, _view: &View) -> Built {
        Built::none()
    }
}
