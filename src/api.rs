//! Resources as users write them: one file per kind, each converts a document to a typed row and diagnostics.
//!
//! Nothing here fails as a whole: an invalid object is a diagnostic that names it, next to the valid rows.

pub mod access_review;
pub mod ambiguous;
pub mod cel;
pub mod crd;
pub mod credential;
pub mod diagnostics;
pub mod document;
pub mod fetched_keys;
pub mod field;
pub mod folder;
pub mod gateway_api;
pub mod hidden_gateway;
pub mod invalid_route;
pub mod istio;
pub mod kind;
pub(crate) mod kinds;
pub mod kube;
pub mod label;
pub mod manifest;
pub mod mcs;
pub mod mesh_config;
pub mod mesh_networks;
pub mod meta;
pub mod names;
pub mod old_kinds;
pub mod regex;
pub mod resolved_host;
pub mod row;
pub mod trust_anchors;
pub mod typed;
pub mod unknown;
pub mod yaml;

pub use diagnostics::{Diagnostic, Severity};
pub use field::FieldError;
pub use kind::{Kind, KindClass};
pub use meta::{Config, Meta};
pub use row::Row;
