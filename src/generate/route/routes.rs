//! Encoded routes of virtual hosts.

use bytes::Bytes;
use prost::Message;

use crate::proto::envoy::config::route::v3::VirtualHost;

/// Encoded routes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    field: Bytes,
    /// Offset of the catch-all route, which can only be the last; otherwise the length.
    catch_all: usize,
}

impl Routes {
    /// Wraps encoded routes; `catch_all` is the offset of the catch-all route.
    pub(super) fn of_bytes(field: Vec<u8>, catch_all: Option<usize>) -> Self {
        debug_assert!(
            VirtualHost::decode(&*field).is_ok_and(|holder| holder.encode_to_vec() == field),
            "because routes are written in the order of their fields"
        );
        Self {
            catch_all: catch_all.unwrap_or(field.len()),
            field: field.into(),
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
    pub fn parts(&self) -> (Bytes, Bytes) {
        (self.field.slice(..self.catch_all), self.field.slice(self.catch_all..))
    }
}
