//! istiod.
