//! Encoded routes of virtual hosts.

use bytes::Bytes;

use crate::{
    generate::wire::{Encoded, debug_assert_canonical},
    proto::envoy::config::route::v3::VirtualHost,
};

/// Encoded routes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    field: Bytes,
    /// Offset of the catch-all route, which can only be the last; otherwise the length.
    catch_all: usize,
}

impl Routes {
    /// Wraps encoded routes; `catch_all` is the offset of the catch-all route.
    pub(super) fn new(field: Encoded<VirtualHost>, catch_all: Option<usize>) -> Self {
        debug_assert_canonical::<VirtualHost>(field.as_bytes());
        Self {
            catch_all: catch_all.unwrap_or(field.len()),
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

    /// Returns [`Self::field`], without the rest.
    pub fn into_field(self) -> Bytes {
        self.field
    }

    /// Returns the conditional routes and the catch-all route separately.
    pub fn parts(&self) -> (Bytes, Bytes) {
        (self.field.slice(..self.catch_all), self.field.slice(self.catch_all..))
    }
}
