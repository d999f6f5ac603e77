//! HTTP connection managers, for all kinds of listeners.

mod template;

use std::{net::IpAddr, sync::LazyLock};

use prost::Message;

use super::{
    chain_fields::NetworkFilters,
    chain_limit::HTTP_CHAINS,
    extension,
    memo::{ManagerKey, Noted},
    proxy_view::{FilterProxyView, ListenerClass},
    security,
    security_filters::PeerSource,
    stack::{FilterStack, LogPosition},
    tracing::HttpTracing,
};
use crate::{
    base::{Hashed, Hostname, cidr},
    generate::{
        constant::{HTTP_CONNECTION_MANAGER, ads_source, keep_header_case},
        wire::{Encoded, Writer},
    },
    model::{extension::ExtensionLayer, service::Protocol},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{CidrRange, Http1ProtocolOptions, Http3ProtocolOptions, HttpProtocolOptions},
                route::v3::RouteConfiguration,
            },
            extensions::{
                filters::network::http_connection_manager::v3::{
                    HttpConnectionManager, Rds, RequestIdExtension,
                    http_connection_manager::{
                        CodecType, ForwardClientCertDetails as EnvoyForwardClientCert, InternalAddressConfig,
                        PathWithEscapedSlashesAction, ServerHeaderTransformation, SetCurrentClientCertDetails,
                        UpgradeConfig,
                    },
                },
                request_id::uuid::v3::UuidRequestIdConfig,
            },
        },
        field::{http_connection_manager, rds},
        istio::mesh::v1alpha1::{
            ForwardClientCertDetails,
            mesh_config::{ProxyPathNormalization, proxy_path_normalization::NormalizationType},
            network::network_endpoints::Ne,
            proxy_config::proxy_headers::{MetadataExchangeMode, SetCurrentClientCertDetails as MeshClientCert},
        },
    },
    table::Memoized,
};

pub use template::ManagerTemplate;

/// Source of routes.
pub enum HttpRoutes {
    /// RDS by this name.
    Rds(String),
    /// Inline routes.
    Inline(Box<RouteConfiguration>),
    /// Encoded inline routes.
    Encoded(Encoded<RouteConfiguration>),
    /// Routes that deny every request.
    Denied,
}

/// Inputs that differ between connection managers. [`HttpConnection::new`] has the usual values.
pub struct HttpConnection {
    /// Fields set by the caller, such as protocol options and client certificates.
    /// [`FilterStack::http_connection_manager`] overrides them.
    pub base: HttpConnectionManager,
    /// Statistics prefix, with its delimiter.
    pub stat_prefix: String,
    /// Routes.
    pub routes: HttpRoutes,
    /// Protocol of the port.
    pub protocol: Protocol,
    /// True if the client address is that of the connection.
    pub use_remote_address: bool,
    /// Port that extensions match: of the listener, or inbound of the workload.
    pub port: u32,
    /// Source of the identity of the peer.
    pub peer_source: PeerSource,
    /// True if peers exchange metadata in headers.
    pub exchanges_metadata: bool,
    /// True if metadata is not sent to services outside the mesh.
    pub mesh_only_exchange: bool,
    /// Wildcard host that is resolved per request.
    pub dynamic_dns: Option<Hostname>,
    /// True if it is HTTP/3 over QUIC.
    pub http3: bool,
}

impl HttpConnection {
    /// Returns true for gRPC-Web, the only declared protocol with a filter of its own.
    pub(super) fn is_grpc_web(&self) -> bool {
        self.protocol == Protocol::GrpcWeb
    }

    /// Returns a connection manager with the usual values.
    pub fn new(stat_prefix: String, routes: HttpRoutes, protocol: Protocol, port: u32) -> Self {
        Self {
            base: HttpConnectionManager::default(),
            stat_prefix,
            routes,
            protocol,
            use_remote_address: false,
            port,
            peer_source: PeerSource::Tls,
            exchanges_metadata: true,
            mesh_only_exchange: false,
            dynamic_dns: None,
            http3: false,
        }
    }
}

impl FilterStack<'_> {
    /// Returns the encoded connection manager without statistics prefix and routes.
    fn shared_manager(&self, http: &HttpConnection) -> Memoized<Noted<Encoded<HttpConnectionManager>>> {
        let key = ManagerKey {
            stack: self.key(),
            base: http.base.encode_to_vec(),
            is_grpc_web: http.is_grpc_web(),
            use_remote_address: http.use_remote_address,
            port: if self.client.extension_filters.is_empty() {
                0
            } else {
                http.port
            },
            peer_source: http.peer_source,
            exchanges_metadata: http.exchanges_metadata,
            mesh_only_exchange: http.mesh_only_exchange,
            http3: http.http3,
        };
        let managers = &self.memo().managers;
        self.shared(managers, key, |stack| stack.http_connection_manager(http))
    }

    /// Returns the encoded connection manager of chains that deny every request because of their limit. It has nothing
    /// that objects of users add.
    fn denying_manager(&self, http: &HttpConnection) -> Memoized<Noted<Encoded<HttpConnectionManager>>> {
        let client = Hashed::new(self.client.without_policies());
        let stack = FilterStack::new(&self.ctx, &client, self.class);
        let bare = HttpConnection {
            use_remote_address: http.use_remote_address,
            exchanges_metadata: false,
            http3: http.http3,
            ..HttpConnection::new(String::new(), HttpRoutes::Rds(String::new()), http.protocol, http.port)
        };
        stack.shared_manager(&bare)
    }

    /// Adds the connection manager as a network filter.
    pub fn add_http_connection(&self, filters: &mut NetworkFilters, http: &HttpConnection) {
        let denied = self.denies_http(http.peer_source, http.port);
        let (shared, own);
        let common = if http.dynamic_dns.is_none() {
            shared = self.shared_manager(http);
            &shared.value
        } else {
            own = self.http_connection_manager(http);
            &own
        };
        if self.exceeds_inbound_limit(HTTP_CHAINS, || filters.fields().len() + common.len()) {
            *filters = NetworkFilters::new();
            let common = self.denying_manager(http);
            add_manager(filters, &common.value, &http.stat_prefix, &HttpRoutes::Denied);
        } else {
            let routes = if denied { &HttpRoutes::Denied } else { &http.routes };
            add_manager(filters, common, &http.stat_prefix, routes);
        }
    }

    /// Encodes the connection manager without statistics prefix and routes.
    fn http_connection_manager(&self, http: &HttpConnection) -> Encoded<HttpConnectionManager> {
        let HttpTracing {
            tracing,
            use_request_id,
        } = self.tracing();
        let mut manager = http.base.clone();
        let http_filters = self.http_filters(http);
        manager.request_id_extension = Some(RequestIdExtension {
            typed_config: Some(Any::pack(&UuidRequestIdConfig {
                use_request_id_for_trace_sampling: Some(use_request_id),
                ..Default::default()
            })),
        });
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
        manager.access_log = self.access_logs(LogPosition::Http);
        if http.use_remote_address || self.features().enable_hcm_internal_networks {
            manager.internal_address_config = self.internal_addresses();
        }
        manager.proxy_100_continue = self.features().enable_100_continue_headers;
        let tracing = tracing.map(|tracing| {
            Encoded::write(tracing.len() + 4, |out| {
                out.encoded(http_connection_manager::TRACING, &tracing);
            })
        });
        let pieces = std::iter::once(&http_filters).chain(&tracing);
        Encoded::write(http_filters.len() + 2048, |out| out.spliced(&manager, pieces))
    }

    /// Returns true if no request may pass because the proxy cannot run a required check.
    fn denies_http(&self, peer_source: PeerSource, port: u32) -> bool {
        let layers = [ExtensionLayer::Http, ExtensionLayer::Network];
        self.http_security(peer_source).denied || extension::denies(self, &layers, port)
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

    /// Returns the address ranges of meshNetworks, sorted, which Envoy treats as internal.
    fn internal_addresses(&self) -> Option<InternalAddressConfig> {
        let key = self.ctx.mesh.installation.mesh_config_key();
        let networks = self.ctx.mesh.mesh_networks.get(self.ctx.cx, &key)?;
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

/// Adds an encoded connection manager with its statistics prefix and routes.
fn add_manager(
    filters: &mut NetworkFilters,
    common: &Encoded<HttpConnectionManager>,
    stat_prefix: &str,
    routes: &HttpRoutes,
) {
    let head = Encoded::write(256, |out| {
        out.text(http_connection_manager::STAT_PREFIX, stat_prefix);
        let route_config = http_connection_manager::ROUTE_CONFIG;
        match routes {
            HttpRoutes::Rds(name) => out.nested(http_connection_manager::RDS, |out| write_rds(out, name)),
            HttpRoutes::Inline(inline) => out.message(route_config, inline),
            HttpRoutes::Encoded(routes) => out.encoded(route_config, routes),
            HttpRoutes::Denied => out.message(route_config, &security::denied_routes()),
        }
    });
    filters.write(HTTP_CONNECTION_MANAGER, |out| {
        out.spliced_bytes(common.as_bytes(), [&head]);
    });
}

fn write_rds(out: &mut Writer<Rds>, name: &str) {
    static SOURCE: LazyLock<Encoded<Rds>> = LazyLock::new(|| {
        Encoded::of(&Rds {
            config_source: Some(ads_source()),
            ..Default::default()
        })
    });
    out.fields(&SOURCE);
    out.text(rds::ROUTE_CONFIG_NAME, name);
}

impl FilterProxyView {
    /// Sets server header and request id for this direction.
    pub fn apply_headers(&self, class: ListenerClass, manager: &mut HttpConnectionManager) {
        // Outbound traffic keeps Envoy's own server name.
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

    /// Sets the handling of the client certificate header on inbound traffic of sidecars.
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
        let detail = |field: fn(&MeshClientCert) -> Option<bool>, default: bool| set.and_then(field).unwrap_or(default);
        manager.forward_client_cert_details = forward as i32;
        manager.set_current_client_cert_details = Some(SetCurrentClientCertDetails {
            subject: Some(detail(|set| set.subject, true)),
            cert: detail(|set| set.cert, false),
            chain: detail(|set| set.chain, false),
            dns: detail(|set| set.dns, true),
            uri: detail(|set| set.uri, true),
            ..Default::default()
        });
    }

    /// Returns `envoyDebugHeaders.disabled`.
    pub fn suppresses_debug_headers(&self) -> bool {
        let headers = self.proxy_headers.envoy_debug_headers.as_ref();
        headers.is_some_and(|headers| headers.disabled.unwrap_or_default())
    }

    /// Returns true for `metadataExchangeHeaders.mode: IN_MESH`.
    pub fn exchanges_in_mesh_only(&self) -> bool {
        let headers = self.proxy_headers.metadata_exchange_headers.as_ref();
        headers.is_some_and(|headers| headers.mode() == MetadataExchangeMode::InMesh)
    }

    /// Returns `IDLE_TIMEOUT` as a message.
    pub fn idle_timeout(&self) -> Option<prost_types::Duration> {
        self.idle_timeout.and_then(|timeout| timeout.try_into().ok())
    }

    /// Returns the HTTP/1 options of a proxy that may use HTTP/1.0.
    pub fn http10_options(&self, everywhere: bool) -> Option<Http1ProtocolOptions> {
        (everywhere || self.http10).then(|| Http1ProtocolOptions {
            accept_http_10: true,
            ..Default::default()
        })
    }
}
