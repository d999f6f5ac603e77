//! What the control plane writes into Kubernetes: locks of leaders, root certificates, addresses, WorkloadEntries,
//! statuses. Decisions are pure functions beside each writer; what is written comes back as an event of a watch and
//! never otherwise.

pub mod analysis;
pub mod auto_allocation;
pub mod auto_registration;
pub mod cluster_trust_bundle;
pub mod leader;
pub mod mcs_export;
pub mod root_cert;
pub mod store;
pub mod watching;

pub use leader::{Election, Lock};
