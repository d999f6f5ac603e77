//! The mesh's certificate authority. For now: the root certificates that the mesh trusts, wherever they come from.

pub mod root;
