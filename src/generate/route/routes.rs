//! Encoded routes of virtual hosts.

use bytes::Bytes;

use crate::{
    base::Version,
    generate::{
        block::Block,
        wire::{Encoded, debug_assert_canonical},
    },
    proto::envoy::config::route::v3::VirtualHost,
};

/// Encoded routes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    field: Bytes,
    /// Offset of the catch-all route, which can only be the last; otherwise the length.
    catch_all: usize,
    /// The hashes of what is before that offset and after it. They are here, so that a route configuration does not
    /// hash the routes of all its hosts again.
    versions: [Version; 2],
}

impl Routes {
    /// Wraps encoded routes; `catch_all` is the offset of the catch-all route.
    pub(super) fn new(field: Encoded<VirtualHost>, catch_all: Option<usize>) -> Self {
        debug_assert_canonical::<VirtualHost>(field.as_bytes());
        let catch_all = catch_all.unwrap_or(field.len());
        let (conditional, last) = field.as_bytes().split_at(catch_all);
        Self {
            catch_all,
            versions: [conditional, last].map(Version::of),
            field: field.into_bytes().into(),
        }
    }

    /// Returns true without routes.
    pub fn is_empty(&self) -> bool {
        self.field.is_empty()
    }

    /// Returns the field `routes` of a virtual host, with tags and lengths.
    pub fn field(&self) -> &Bytes {
        &self.field
    }

    /// Returns the conditional routes and the catch-all route separately.
    pub fn parts(&self) -> [Block; 2] {
        let [conditional, last] = self.versions;
        let part = |version, bytes| Block { version, bytes };
        [
            part(conditional, self.field.slice(..self.catch_all)),
            part(last, self.field.slice(self.catch_all..)),
        ]
    }
}
