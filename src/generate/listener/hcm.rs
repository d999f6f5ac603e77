//! HTTP connection managers, for listeners of every kind.

mod template;

use std::{net::IpAddr, sync::LazyLock};

use prost::{Message, Name};

use super::{
    access_log::LogPlace,
    client::{FilterClient, ListenerClass},
    stack::FilterStack,
};
use crate::{
    base::{Hostname, cidr},
    generate::{
        constant::{ads_source, keep_header_case},
        extension, security, wire,
    },
    model::{extension::ExtensionLayer, service::Protocol},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{CidrRange, Http1ProtocolOptions, Http3ProtocolOptions, HttpProtocolOptions},
                listener::v3::Filter,
                route::v3::RouteConfiguration,
            },
            extensions::{
                filters::network::http_connection_manager::v3::{
                    HttpConnectionManager, Rds, RequestIdExtension,
                    http_connection_manager::{
                        CodecType, ForwardClientCertDetails as EnvoyForwardClientCert, InternalAddressConfig,
                        PathWithEscapedSlashesAction, RouteSpecifier, ServerHeaderTransformation,
                        SetCurrentClientCertDetails, UpgradeConfig,
                    },
                },
                request_id::uuid::v3::UuidRequestIdConfig,
            },
        },
        istio::mesh::v1alpha1::{
            ForwardClientCertDetails,
            mesh_config::{ProxyPathNormalization, proxy_path_normalization::NormalizationType},
            network::network_endpoints::Ne,
            proxy_config::proxy_headers::{MetadataExchangeMode, SetCurrentClientCertDetails as MeshClientCert},
        },
    },
};

pub use template::ManagerTemplate;

const STAT_PREFIX: u32 = 2;
const RDS: u32 = 3;
const ROUTE_CONFIG: u32 = 4;
/// The name of the filter.
pub const HTTP_CONNECTION_MANAGER: &str = "envoy.filters.network.http_connection_manager";

/// Where routes come from.
pub enum HttpRoutes {
    /// RDS by this name.
    Rds(String),
    /// They stand in the listener.
    Inline(Box<RouteConfiguration>),
}

/// What differs between connection managers. [`HttpConnection::new`] has what most want.
pub struct HttpConnection {
    /// Fields that the caller decides: protocol options, client certificates, and what is special. Everything that
    /// [`FilterStack::http_connection_manager`] sets is laid over it.
    pub base: HttpConnectionManager,
    /// The prefix of its statistics, with its delimiter.
    pub stat_prefix: String,
    /// The routes.
    pub routes: HttpRoutes,
    /// The protocol of the port.
    pub protocol: Protocol,
    /// The client's address is that of the connection.
    pub use_remote_address: bool,
    /// The port that extensions match: of the listener, inbound of the workload.
    pub port: u32,
    /// The traffic comes out of an HBONE tunnel.
    pub tunneled: bool,
    /// Metadata is not sent to services outside the mesh.
    pub mesh_only_exchange: bool,
    /// The wildcard host that is resolved from each request.
    pub dynamic_dns: Option<Hostname>,
    /// HTTP/3 over QUIC.
    pub http3: bool,
}

impl HttpConnection {
    /// It is declared to be gRPC-Web, which has a filter of its own; no other protocol shows in the filters.
    pub(super) fn is_grpc_web(&self) -> bool {
        self.protocol == Protocol::GrpcWeb
    }

    /// A connection manager with nothing special.
    pub fn new(stat_prefix: String, routes: HttpRoutes, protocol: Protocol, port: u32) -> Self {
        Self {
            base: HttpConnectionManager::default(),
            stat_prefix,
            routes,
            protocol,
            use_remote_address: false,
            port,
            tunneled: false,
            mesh_only_exchange: false,
            dynamic_dns: None,
            http3: false,
        }
    }
}

impl FilterStack<'_> {
    /// The connection manager as a network filter.
    pub fn http_connection_filter(&self, mut http: HttpConnection) -> Filter {
        let config = if http.dynamic_dns.is_none() {
            let common = self.manager_piece(&mut http);
            Any {
                type_url: HttpConnectionManager::type_url(),
                value: self.with_routes(&common, http).into(),
            }
        } else {
            Any::pack(&self.http_connection_manager(http))
        };
        super::tcp::filter(HTTP_CONNECTION_MANAGER, config)
    }

    /// A connection manager that is encoded already, with the prefix of its statistics and its routes.
    fn with_routes(&self, common: &[u8], http: HttpConnection) -> Vec<u8> {
        let mut routes = Vec::with_capacity(256);
        match http.routes {
            _ if self.denies_http(http.tunneled, http.port) => {
                wire::nested(&mut routes, ROUTE_CONFIG, |out| {
                    security::denied_routes().encode_raw(out);
                });
            }
            HttpRoutes::Rds(name) => wire::nested(&mut routes, RDS, |out| {
                static SOURCE: LazyLock<Vec<u8>> = LazyLock::new(|| {
                    let rds = Rds {
                        config_source: Some(ads_source()),
                        ..Default::default()
                    };
                    rds.encode_to_vec()
                });
                out.extend_from_slice(&SOURCE);
                wire::text(out, 2, &name);
            }),
            HttpRoutes::Inline(inline) => wire::nested(&mut routes, ROUTE_CONFIG, |out| inline.encode_raw(out)),
        }
        let mut prefix = Vec::with_capacity(http.stat_prefix.len() + 4);
        wire::text(&mut prefix, STAT_PREFIX, &http.stat_prefix);
        let mut manager = Vec::with_capacity(common.len() + prefix.len() + routes.len());
        // Whatever the routes are, they stand where RDS would.
        let pieces = [(STAT_PREFIX, prefix.as_slice()), (RDS, routes.as_slice())];
        wire::spliced(&mut manager, common, pieces, |field| field);
        manager
    }

    /// The connection manager.
    pub fn http_connection_manager(&self, http: HttpConnection) -> HttpConnectionManager {
        let tracing = self.tracing();
        let http_filters = self.http_filters(&http);
        let mut manager = http.base;
        manager.codec_type = CodecType::Auto as i32;
        if http.http3 {
            manager.codec_type = CodecType::Http3 as i32;
            manager.http3_protocol_options = Some(Http3ProtocolOptions::default());
        }
        let headers = &self.client.proxy_headers;
        if headers.preserve_http1_header_case.unwrap_or_default() {
            let options = manager.http_protocol_options.get_or_insert_default();
            options.header_key_format = Some(keep_header_case());
        }
        let ports = headers.x_forwarded_port.as_ref();
        manager.append_x_forwarded_port = ports.is_some_and(|ports| ports.enabled.unwrap_or_default());
        manager.stat_prefix = http.stat_prefix;
        self.normalize(&mut manager);
        manager.use_remote_address = Some(http.use_remote_address);
        manager.upgrade_configs = vec![UpgradeConfig {
            upgrade_type: "websocket".to_owned(),
            ..Default::default()
        }];
        if let Some(timeout) = self.client.idle_timeout() {
            manager.common_http_protocol_options = Some(HttpProtocolOptions {
                idle_timeout: Some(timeout),
                ..Default::default()
            });
        }
        manager.stream_idle_timeout = Some(prost_types::Duration::default());
        manager.route_specifier = Some(match http.routes {
            _ if self.denies_http(http.tunneled, http.port) => RouteSpecifier::RouteConfig(security::denied_routes()),
            HttpRoutes::Rds(name) => RouteSpecifier::Rds(Rds {
                config_source: Some(ads_source()),
                route_config_name: name,
            }),
            HttpRoutes::Inline(routes) => RouteSpecifier::RouteConfig(*routes),
        });
        manager.access_log = self.access_logs(LogPlace::Http);
        manager.tracing = tracing.tracing;
        manager.http_filters = http_filters;
        manager.request_id_extension = Some(RequestIdExtension {
            typed_config: Some(Any::pack(&UuidRequestIdConfig {
                use_request_id_for_trace_sampling: Some(tracing.use_request_id),
                ..Default::default()
            })),
        });
        if http.use_remote_address || self.features().enable_hcm_internal_networks {
            manager.internal_address_config = self.internal_addresses();
        }
        manager.proxy_100_continue = self.features().enable_100_continue_headers;
        manager
    }

    /// True if no request may pass, because the client cannot run what has to check it.
    fn denies_http(&self, tunneled: bool, port: u32) -> bool {
        let layers = [ExtensionLayer::Http, ExtensionLayer::Network];
        self.http_security(tunneled).denied || extension::denies(self, &layers, port)
    }

    fn normalize(&self, manager: &mut HttpConnectionManager) {
        let chosen = self.mesh.path_normalization.as_ref();
        let chosen = chosen.map_or(NormalizationType::Default, ProxyPathNormalization::normalization);
        let merge = matches!(
            chosen,
            NormalizationType::MergeSlashes | NormalizationType::DecodeAndMergeSlashes
        );
        manager.normalize_path = Some(chosen != NormalizationType::None);
        manager.merge_slashes = merge;
        manager.path_with_escaped_slashes_action = if chosen == NormalizationType::DecodeAndMergeSlashes {
            PathWithEscapedSlashesAction::UnescapeAndForward as i32
        } else {
            PathWithEscapedSlashesAction::KeepUnchanged as i32
        };
    }

    /// The address ranges of meshNetworks, sorted: what Envoy takes for internal.
    fn internal_addresses(&self) -> Option<InternalAddressConfig> {
        let key = self.view.mesh.installation.mesh_config_key();
        let networks = self.view.mesh.mesh_networks.get(self.view.cx, &key)?;
        let mut ranges: Vec<(IpAddr, u8)> = networks
            .spec
            .networks
            .values()
            .flat_map(|network| &network.endpoints)
            .filter_map(|endpoint| match &endpoint.ne {
                Some(Ne::FromCidr(range)) => cidr::parse(range),
                _ => None,
            })
            .map(|range| (range.addr(), range.prefix_len()))
            .collect();
        ranges.sort_unstable();
        (!ranges.is_empty()).then(|| InternalAddressConfig {
            cidr_ranges: ranges
                .into_iter()
                .map(|(address, length)| CidrRange {
                    address_prefix: address.to_string(),
                    prefix_len: Some(u32::from(length)),
                })
                .collect(),
            ..Default::default()
        })
    }
}

impl FilterClient {
    /// Server header and request id, for a connection manager of this direction.
    pub fn apply_headers(&self, class: ListenerClass, manager: &mut HttpConnectionManager) {
        // Envoy's own name stays on outbound traffic.
        if class != ListenerClass::SidecarOutbound {
            "istio-envoy".clone_into(&mut manager.server_name);
        }
        if let Some(server) = &self.proxy_headers.server {
            if server.disabled.unwrap_or_default() {
                manager.server_name.clear();
                manager.server_header_transformation = ServerHeaderTransformation::PassThrough as i32;
            } else if !server.value.is_empty() {
                manager.server_name.clone_from(&server.value);
            }
        }
        let request_id = self.proxy_headers.request_id.as_ref();
        if request_id.is_some_and(|request_id| request_id.disabled.unwrap_or_default()) {
            manager.generate_request_id = Some(false);
        }
    }

    /// What becomes of the client certificate header on inbound traffic of sidecars.
    pub fn apply_client_certificates(&self, manager: &mut HttpConnectionManager) {
        let forward = match self.proxy_headers.forwarded_client_cert() {
            ForwardClientCertDetails::Undefined | ForwardClientCertDetails::AppendForward => {
                EnvoyForwardClientCert::AppendForward
            }
            ForwardClientCertDetails::Sanitize => EnvoyForwardClientCert::Sanitize,
            ForwardClientCertDetails::ForwardOnly => EnvoyForwardClientCert::ForwardOnly,
            ForwardClientCertDetails::SanitizeSet => EnvoyForwardClientCert::SanitizeSet,
            ForwardClientCertDetails::AlwaysForwardOnly => EnvoyForwardClientCert::AlwaysForwardOnly,
        };
        let set = self.proxy_headers.set_current_client_cert_details.as_ref();
        let of = |field: fn(&MeshClientCert) -> Option<bool>, default: bool| set.and_then(field).unwrap_or(default);
        manager.forward_client_cert_details = forward as i32;
        manager.set_current_client_cert_details = Some(SetCurrentClientCertDetails {
            subject: Some(of(|set| set.subject, true)),
            cert: of(|set| set.cert, false),
            chain: of(|set| set.chain, false),
            dns: of(|set| set.dns, true),
            uri: of(|set| set.uri, true),
            ..Default::default()
        });
    }

    /// `envoyDebugHeaders.disabled`.
    pub fn suppresses_debug_headers(&self) -> bool {
        let headers = self.proxy_headers.envoy_debug_headers.as_ref();
        headers.is_some_and(|headers| headers.disabled.unwrap_or_default())
    }

    /// `metadataExchangeHeaders.mode: IN_MESH`.
    pub fn exchanges_in_mesh_only(&self) -> bool {
        let headers = self.proxy_headers.metadata_exchange_headers.as_ref();
        headers.is_some_and(|headers| headers.mode() == MetadataExchangeMode::InMesh)
    }

    /// `IDLE_TIMEOUT` as a message.
    pub fn idle_timeout(&self) -> Option<prost_types::Duration> {
        self.idle_timeout.and_then(|timeout| timeout.try_into().ok())
    }

    /// HTTP/1 options for a client that may speak HTTP/1.0.
    pub fn http10_options(&self, everywhere: bool) -> Option<Http1ProtocolOptions> {
        (everywhere || self.http10).then(|| Http1ProtocolOptions {
            accept_http_10: true,
            ..Default::default()
        })
    }
}
