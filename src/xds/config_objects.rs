//! Objects of configuration over xDS (MCP): types `group/version/Kind`, for clients that are control planes themselves
//! (`GENERATOR: api` in the metadata of their nodes). The handler has the objects and decides about access.

use std::sync::Arc;

use futures::stream::BoxStream;
use smol_str::SmolStr;

use crate::generate::{EncodedResource, proxy::Proxy};

/// The key of node metadata that selects a generator.
const GENERATOR: &str = "GENERATOR";
/// The generator of objects.
const API: &str = "api";

/// The resources of one type, sorted by name. Equal lists of one handler are the same allocation.
pub type Resources = Arc<[Arc<EncodedResource>]>;

/// Returns true for clients that read objects.
pub(super) fn is_requested_by(proxy: &Proxy) -> bool {
    proxy.metadata.text(GENERATOR).is_some_and(|generator| generator == API)
}

/// A handler of requests for objects.
pub trait ConfigObjects: Send + Sync + 'static {
    /// Returns true if a caller with these identities may read objects. They are those of all namespaces.
    fn permits(&self, identities: &[SmolStr]) -> bool;

    /// Returns the present resources of a type; `None` if it is not a type of objects.
    fn list(&self, type_url: &str) -> Option<Resources>;

    /// Returns a name that is equal for types of the same objects, such as the versions of a kind.
    fn kind(&self, type_url: &str) -> Option<SmolStr>;

    /// Returns an item for each snapshot, the first at once.
    fn changes(&self) -> BoxStream<'static, ()>;
}
