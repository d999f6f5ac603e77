//! Connection managers that differ in nothing but their statistics and where their routes come from: encoded once.

use super::{HttpConnection, HttpRoutes, add_manager};
use crate::{
    generate::filter::{NetworkFilters, memo::Noted, stack::FilterStack},
    table::Memoized,
};

/// A connection manager without prefix of statistics and name of routes.
pub struct ManagerTemplate {
    common: Memoized<Noted<Vec<u8>>>,
    denied: bool,
}

impl ManagerTemplate {
    /// The connection manager of a connection whose routes are fetched, for any prefix and any routes.
    pub fn of(stack: &FilterStack, http: &HttpConnection) -> Self {
        Self {
            common: stack.shared_manager(http),
            denied: stack.denies_http(http.tunneled, http.port),
        }
    }

    /// Adds the network filter with this prefix and these routes.
    pub fn add(&self, filters: &mut NetworkFilters, stat_prefix: &str, route: &str) {
        let routes = HttpRoutes::Rds(route.to_owned());
        add_manager(filters, &self.common.value, stat_prefix, &routes, self.denied);
    }
}
