//! Connection managers that differ in nothing but their statistics and where their routes come from: encoded once.

use prost::{
    Message, Name,
    encoding::{self, WireType},
};

use super::{HTTP_CONNECTION_MANAGER, HttpConnection, HttpRoutes};
use crate::{
    generate::{
        constant::ads_source,
        listener::{stack::FilterStack, tcp},
    },
    proto::{
        Any,
        envoy::{
            config::listener::v3::Filter,
            extensions::filters::network::http_connection_manager::v3::{
                HttpConnectionManager, Rds, http_connection_manager::RouteSpecifier,
            },
        },
    },
};

/// Fields of connection managers, which are written in the order of their numbers.
mod field {
    /// The prefix of statistics; only the type of the codec comes before it.
    pub(super) const STAT_PREFIX: u32 = 2;
    /// Where routes are fetched from; everything else comes behind it.
    pub(super) const RDS: u32 = 3;
    /// Of the latter: the name; only the source comes before it.
    pub(super) const ROUTE_CONFIG_NAME: u32 = 2;
}

/// A connection manager without prefix of statistics and name of routes.
pub struct ManagerTemplate {
    codec: Vec<u8>,
    routes: Routes,
    rest: Vec<u8>,
    type_url: String,
}

enum Routes {
    /// They are fetched: the field of the source.
    Fetched(Vec<u8>),
    /// They are the same whatever was asked for: their field.
    Fixed(Vec<u8>),
}

impl ManagerTemplate {
    /// The connection manager of a connection whose routes are fetched, for any prefix and any routes.
    pub fn of(stack: &FilterStack, http: HttpConnection) -> Self {
        let mut manager = stack.http_connection_manager(HttpConnection {
            stat_prefix: String::new(),
            routes: HttpRoutes::Rds(String::new()),
            ..http
        });
        let codec = HttpConnectionManager {
            codec_type: std::mem::take(&mut manager.codec_type),
            ..Default::default()
        };
        let routes = match manager.route_specifier.take() {
            Some(RouteSpecifier::Rds(_)) => {
                let source = Rds {
                    config_source: Some(ads_source()),
                    ..Default::default()
                };
                Routes::Fetched(source.encode_to_vec())
            }
            fixed => {
                let fixed = HttpConnectionManager {
                    route_specifier: fixed,
                    ..Default::default()
                };
                Routes::Fixed(fixed.encode_to_vec())
            }
        };
        Self {
            codec: codec.encode_to_vec(),
            routes,
            rest: manager.encode_to_vec(),
            type_url: HttpConnectionManager::type_url(),
        }
    }

    /// The network filter with this prefix and these routes.
    pub fn filter(&self, stat_prefix: &String, route: &String) -> Filter {
        let room = self.codec.len() + self.rest.len() + stat_prefix.len() + route.len() + 64;
        let mut value = Vec::with_capacity(room);
        value.extend_from_slice(&self.codec);
        if !stat_prefix.is_empty() {
            encoding::string::encode(field::STAT_PREFIX, stat_prefix, &mut value);
        }
        match &self.routes {
            Routes::Fetched(source) => {
                let name_len = if route.is_empty() {
                    0
                } else {
                    encoding::string::encoded_len(field::ROUTE_CONFIG_NAME, route)
                };
                encoding::encode_key(field::RDS, WireType::LengthDelimited, &mut value);
                encoding::encode_varint((source.len() + name_len) as u64, &mut value);
                value.extend_from_slice(source);
                if !route.is_empty() {
                    encoding::string::encode(field::ROUTE_CONFIG_NAME, route, &mut value);
                }
            }
            Routes::Fixed(routes) => value.extend_from_slice(routes),
        }
        value.extend_from_slice(&self.rest);
        debug_assert!(
            HttpConnectionManager::decode(&*value).is_ok_and(|manager| manager.encode_to_vec() == value),
            "because fields are written in their order"
        );
        let config = Any {
            type_url: self.type_url.clone(),
            value: value.into(),
        };
        tcp::filter(HTTP_CONNECTION_MANAGER, config)
    }
}
