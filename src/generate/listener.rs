//! Listeners.

pub mod access_log;
pub mod client;
pub mod hcm;
pub mod http_filters;
pub mod stack;
pub mod stats;
pub mod tcp;
pub mod telemetry;
pub mod tracing;

pub use client::{FilterClient, ListenerClass};
pub use stack::FilterStack;

use super::{
    View,
    group::{Built, Listed},
    select::Selected,
};

/// What a part of this kind is selected by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ListenerPart {}

/// What one resource is built from, besides what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ListenerKey {}

/// The parts of this kind that a proxy gets.
pub fn select(_view: &View, _selected: &Selected) -> Vec<ListenerPart> {
    vec![ListenerPart {}]
}

impl ListenerPart {
    /// The resources of the part, in order.
    pub fn list(&self, _view: &View) -> Vec<Listed> {
        Vec::new()
    }
}

impl ListenerKey {
    /// Builds the resource.
    pub fn build(&self, _view: &View) -> Built {
        Built::none()
    }
}
