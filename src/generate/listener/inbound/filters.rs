//! Filters of one inbound port of a sidecar.

use smol_str::SmolStr;

use super::{InboundListenerBuilder, VIRTUAL_INBOUND};
use crate::{
    api::kube::service::TargetPort,
    base::Shared,
    generate::{
        filter::{
            PeerSource,
            chain_fields::NetworkFilters,
            hcm::{HttpConnection, HttpRoutes},
            proxy_view::ListenerClass,
            stack::FilterStack,
            tcp::{TcpChain, plain_proxy},
            tls::InnerProtocol,
        },
        listener::outbound::listener_name,
        name::{self, INBOUND_PASSTHROUGH},
        patch,
    },
    model::{
        Service,
        service::{Protocol, ServicePort},
    },
    proto::{
        envoy::config::{
            core::v3::{Http2ProtocolOptions, Metadata},
            route::v3::{
                Decorator, RetryPolicy, Route, RouteAction, RouteConfiguration, RouteMatch, VirtualHost, route,
                route_action::{ClusterSpecifier, MaxStreamDuration},
                route_match::PathSpecifier,
            },
        },
        istio::networking::v1alpha3::ServerTlsSettings,
    },
};

/// Placeholder of the workload's port in statistics patterns.
const TARGET_PORT: &str = "%TARGET_PORT%";

/// A workload port with its own chains, or (passthrough) all other ports.
#[derive(Clone, Debug)]
pub(crate) struct InboundPort {
    /// Port of the service or of the ingress listener, used in traces and statistics.
    pub(crate) number: u32,
    /// Name of the port.
    pub(crate) name: SmolStr,
    /// Protocol.
    pub(crate) protocol: Protocol,
    /// Port of the workload; 0 means any.
    pub(crate) target_port: u32,
    /// Address, which is part of names even if the virtual listener has the chains.
    pub(crate) bind: SmolStr,
    /// Additional addresses.
    pub(super) further_binds: Vec<SmolStr>,
    /// True if it binds a socket of its own.
    pub(crate) bind_to_port: bool,
    /// Host of the service, or a name for the Sidecar.
    pub(crate) hostname: String,
    /// Service.
    pub(crate) service: Option<Shared<Service>>,
    /// True if it represents all undeclared ports.
    pub(crate) passthrough: bool,
    /// Source of the identity of the peer.
    pub(crate) peer_source: PeerSource,
    /// TLS that an ingress listener terminates.
    pub(crate) tls: Option<ServerTlsSettings>,
    /// Metadata with its origin.
    pub(crate) metadata: Option<Metadata>,
}

impl InboundPort {
    /// Returns a port of a service, with all wildcard addresses.
    pub(crate) fn of_service(
        service: &Shared<Service>,
        port: &ServicePort,
        target_port: u32,
        binds: &[&'static str],
        bind_to_port: bool,
    ) -> Self {
        Self {
            number: port.number,
            name: port.name.clone(),
            protocol: port.protocol,
            bind: SmolStr::new_static(binds[0]),
            further_binds: binds[1..].iter().map(|bind| SmolStr::new_static(bind)).collect(),
            bind_to_port,
            hostname: service.key.hostname.to_string(),
            service: Some(service.clone()),
            passthrough: false,
            ..Self::passthrough(target_port)
        }
    }

    /// Returns the remaining ports (0), or a port with a policy of its own.
    pub(crate) fn passthrough(target_port: u32) -> Self {
        Self {
            number: 0,
            name: SmolStr::new_static(VIRTUAL_INBOUND),
            protocol: Protocol::Unsupported,
            target_port,
            bind: SmolStr::default(),
            further_binds: Vec::new(),
            bind_to_port: false,
            hostname: String::new(),
            service: None,
            passthrough: true,
            peer_source: PeerSource::Tls,
            tls: None,
            metadata: None,
        }
    }

    /// Returns true if HTTP peers exchange metadata.
    ///
    /// Parity (pilot/pkg/networking/core/listener_inbound.go): in tunnels they do so on undeclared ports only.
    fn exchanges_http_metadata(&self) -> bool {
        self.passthrough || self.peer_source == PeerSource::Tls
    }

    /// Returns the cluster.
    pub(crate) fn cluster(&self) -> String {
        if self.passthrough {
            INBOUND_PASSTHROUGH.to_owned()
        } else {
            name::inbound_cluster(self.target_port)
        }
    }

    /// Returns the name of its chains.
    pub(super) fn chain_name(&self, inside: InnerProtocol) -> String {
        match (self.passthrough, inside) {
            (true, InnerProtocol::Http) => "virtualInbound-catchall-http".to_owned(),
            (true, InnerProtocol::Tcp) => VIRTUAL_INBOUND.to_owned(),
            (false, _) => listener_name(&self.bind, self.target_port).to_string(),
        }
    }

    fn http_stat_prefix(&self) -> String {
        name::delimited_stat(&if self.passthrough {
            self.cluster()
        } else {
            format!("inbound_{}", self.chain_name(InnerProtocol::Http))
        })
    }

    /// Returns the routes: everything to one cluster, without a timeout.
    fn routes(&self) -> RouteConfiguration {
        let cluster = self.cluster();
        let unlimited = Some(prost_types::Duration::default());
        let is_grpc = matches!(self.protocol, Protocol::Grpc | Protocol::GrpcWeb);
        let action = RouteAction {
            cluster_specifier: Some(ClusterSpecifier::Cluster(cluster.clone())),
            timeout: unlimited,
            max_stream_duration: Some(MaxStreamDuration {
                max_stream_duration: unlimited,
                grpc_timeout_header_max: unlimited,
                ..Default::default()
            }),
            // gRPC streams are not retried.
            retry_policy: (!is_grpc).then(|| RetryPolicy {
                retry_on: "reset-before-request".to_owned(),
                num_retries: Some(2),
                ..Default::default()
            }),
            ..Default::default()
        };
        let route = Route {
            name: "default".to_owned(),
            r#match: Some(RouteMatch {
                path_specifier: Some(PathSpecifier::Prefix("/".to_owned())),
                ..Default::default()
            }),
            decorator: Some(Decorator {
                operation: format!("{}:{}/*", self.hostname, self.number),
                ..Default::default()
            }),
            action: Some(route::Action::Route(action)),
            ..Default::default()
        };
        RouteConfiguration {
            name: cluster,
            virtual_hosts: vec![VirtualHost {
                name: format!("inbound|http|{}", self.number),
                domains: vec!["*".to_owned()],
                routes: vec![route],
                ..Default::default()
            }],
            validate_clusters: Some(false),
            ..Default::default()
        }
    }
}

impl FilterStack<'_> {
    /// Applies patches to the routes inside an inbound listener.
    pub(crate) fn patched_routes(&self, routes: RouteConfiguration) -> RouteConfiguration {
        let patches = &self.client.route_patches;
        let mut notes = Vec::new();
        let routes = patch::inbound_routes(&self.ctx, patches, routes, &mut notes);
        for note in notes {
            self.note(note.code, note.detail);
        }
        routes
    }
}

impl InboundListenerBuilder<'_> {
    /// Returns the filters of an HTTP chain.
    pub(crate) fn http_filters(&self, port: &InboundPort) -> NetworkFilters {
        let client = self.stack.client;
        let routes = HttpRoutes::Inline(Box::new(self.stack.patched_routes(port.routes())));
        let mut http = HttpConnection::new(port.http_stat_prefix(), routes, port.protocol, port.target_port);
        http.peer_source = port.peer_source;
        http.exchanges_metadata = port.exchanges_http_metadata();
        client.apply_headers(ListenerClass::SidecarInbound, &mut http.base);
        client.apply_client_certificates(&mut http.base);
        http.base.http_protocol_options = client.http10_options(self.stack.features().pilot_http10);
        if port.protocol.is_http2() {
            http.base.http2_protocol_options = Some(Http2ProtocolOptions::default());
        }
        let mut filters = self
            .stack
            .filters_before_http(port.target_port, http.exchanges_metadata);
        self.stack.add_http_connection(&mut filters, &http);
        filters
    }

    /// Returns the filters of a TCP chain.
    pub(super) fn tcp_filters(&self, port: &InboundPort) -> NetworkFilters {
        let cluster = port.cluster();
        let mut proxy = plain_proxy(&cluster);
        let pattern = &self.stack.mesh.inbound_cluster_stat_name;
        if !pattern.is_empty() {
            proxy.stat_prefix = inbound_stat_prefix(pattern, port);
        }
        let chain = TcpChain {
            port: port.number,
            exchanges_metadata: true,
            peer_source: port.peer_source,
            ..Default::default()
        };
        self.stack.complete_tcp_chain(chain, None, |filters| {
            self.stack.add_protocol_filters(filters, port.protocol, proxy, &cluster);
        })
    }
}

/// Substitutes the pattern. Parity (pilot/pkg/networking/core/listener_inbound.go): the target port is unknown here, so
/// its placeholder stays.
fn inbound_stat_prefix(pattern: &str, port: &InboundPort) -> String {
    let service_port = ServicePort {
        name: port.name.clone(),
        number: port.number,
        target: TargetPort::Number(port.target_port),
        protocol: port.protocol,
    };
    let pieces = pattern.split(TARGET_PORT).map(|piece| {
        let service = port.service.as_deref();
        name::stat_prefix(piece, &port.hostname, "", &service_port, 0, service)
    });
    pieces.collect::<Vec<_>>().join(TARGET_PORT)
}
