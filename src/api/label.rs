//! Keys of labels that several modules read or write.

/// The revision or tag of an object, or of all objects of a namespace.
pub const REVISION: &str = "istio.io/rev";
/// The network of a workload, of a gateway, or of a cluster (on its system namespace).
pub const NETWORK: &str = "topology.istio.io/network";
