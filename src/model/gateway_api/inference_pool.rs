//! InferencePools: routes to a pool use a headless Service that the control plane keeps for it.
//!
//! Parity (pilot/pkg/config/kube/gateway/inferencepool_collection.go): the names and labels of these Services are
//! Istio's, so that both control planes find each other's.

use std::fmt::Write;

use aws_lc_rs::digest::{SHA256, digest};
use smol_str::SmolStr;

/// Longest name of a Service.
const MAX_NAME: usize = 63;
/// Between the name of the pool and the hash.
const SEPARATOR: &str = "-ip-";
/// Bytes of the hash.
const HASH_BYTES: usize = 4;

/// Returns the name of a pool's Service: the pool's name, if necessary cut, and a hash of it.
pub fn service_name(pool: &str) -> SmolStr {
    let mut hash = String::new();
    for byte in &digest(&SHA256, pool.as_bytes()).as_ref()[..HASH_BYTES] {
        // Writing to a string cannot fail.
        let _ = write!(hash, "{byte:02x}");
    }
    let longest = MAX_NAME - SEPARATOR.len() - hash.len();
    let end = pool.floor_char_boundary(longest.min(pool.len()));
    [&pool[..end], SEPARATOR, &hash].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_end_with_a_hash() {
        assert_eq!(service_name("my-ip"), "my-ip-ip-03f70481");
        assert_eq!(service_name(&"a".repeat(70)).len(), MAX_NAME);
    }
}
