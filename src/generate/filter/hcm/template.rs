//! Connection managers that differ only in statistics prefix and route name, encoded once.

use super::{HttpConnection, HttpRoutes, add_manager};
use crate::{
    generate::{
        filter::{NetworkFilters, memo::Noted, stack::FilterStack},
        wire::Encoded,
    },
    proto::envoy::extensions::filters::network::http_connection_manager::v3::HttpConnectionManager,
    table::Memoized,
};

/// A connection manager without statistics prefix and route name.
pub struct ManagerTemplate {
    common: Memoized<Noted<Encoded<HttpConnectionManager>>>,
    denied: bool,
}

impl ManagerTemplate {
    /// Returns the template of a connection manager with RDS.
    pub fn of(stack: &FilterStack, http: &HttpConnection) -> Self {
        Self {
            common: stack.shared_manager(http),
            denied: stack.denies_http(http.peer_source, http.port),
        }
    }

    /// Returns the template of one that denies every request, with nothing that objects of users add.
    pub fn denying(stack: &FilterStack, http: &HttpConnection) -> Self {
        Self {
            common: stack.denying_manager(http),
            denied: true,
        }
    }

    /// Returns its size without prefix and route name.
    pub fn size(&self) -> usize {
        self.common.value.len()
    }

    /// Adds the network filter with this prefix and route name.
    pub fn add(&self, filters: &mut NetworkFilters, stat_prefix: &str, route: &str) {
        let routes = if self.denied {
            HttpRoutes::Denied
        } else {
            HttpRoutes::Rds(route.to_owned())
        };
        add_manager(filters, &self.common.value, stat_prefix, &routes);
    }
}
