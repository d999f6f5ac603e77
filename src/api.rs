//! What users write: one file per kind, each turns a document into a typed row and diagnostics.
//!
//! Nothing here fails as a whole: an invalid object is a diagnostic that names it, beside the rows that are fine.

pub mod diagnostics;
pub mod field;
pub mod kube;
pub mod meta;

pub use diagnostics::{Diagnostic, Severity};
pub use field::FieldError;
pub use meta::{Config, Kind, Meta};
