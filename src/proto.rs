//! The generated messages and their JSON form.

pub use istiod_proto::*;
