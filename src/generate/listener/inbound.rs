//! Inbound listeners of sidecars: `virtualInbound`, and the sockets of a Sidecar's ingress listeners.

pub mod chain;
mod filters;

use std::{
    borrow::Cow,
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use prost::Message;
use smol_str::SmolStr;

use super::{
    ListenerKey,
    filter_chain::max_connections_per_event,
    inspector::{InspectorsByPort, original_destination, original_source},
    outbound::{
        listener::{ChainKind, additional_addresses, exact_balance},
        listener_name,
        proxy_view::{is_own_port, own_ports},
    },
    termination::{self, Transport},
};
use crate::{
    api::{Config, Kind, Meta},
    base::{
        Hashed, Namespace, ObjectKey, Shared,
        cidr::{self, IpMode},
    },
    generate::{
        BuildContext,
        constant::{self, config_metadata, wildcards},
        filter::{
            PeerSource,
            chain_fields::{EncodedListener, NetworkFilters},
            proxy_view::{FilterProxyView, ListenerClass},
            stack::{FilterStack, LogPosition},
            tcp::add_black_hole,
            tls::{InnerProtocol, ServerCertificates},
        },
        patch::PatchContext,
        proxy::{InterceptionMode, MetadataKey},
        proxy_class::ServiceTarget,
        resource::Built,
        selected::Selected,
        wire::Encoded,
    },
    model::{
        ScopeKey, ServiceKey,
        authentication::{self, MtlsMode, PeerPolicy},
        service::{InboundPorts, Protocol},
    },
    proto::{
        envoy::config::{
            accesslog::v3::AccessLog,
            core::v3::{CidrRange, TrafficDirection, TransportSocket},
            listener::v3::{FilterChainMatch, Listener},
        },
        field::filter_chain,
        istio::networking::v1alpha3::{CaptureMode, IstioIngressListener, Sidecar},
    },
};
use chain::{ChainForm, chain_forms, terminating_form};
use filters::InboundPort;

/// Name of the listener of intercepted inbound connections.
pub const VIRTUAL_INBOUND: &str = "virtualInbound";
/// Name of the chain that drops connections.
pub const BLACK_HOLE_CHAIN: &str = "virtualInbound-blackhole";

/// Attributes of a sidecar that its inbound listeners depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InboundProxyView {
    /// Attributes that filters depend on.
    pub filters: Hashed<FilterProxyView>,
    /// Service ports that it serves, oldest service first.
    pub targets: Shared<[ServiceTarget]>,
    /// Sidecar whose ingress listeners replace them, if it has any.
    pub sidecar: Option<ObjectKey>,
    /// PeerAuthentication of its peers.
    pub peers: PeerPolicy,
    /// Address families.
    pub ip_mode: IpMode,
    /// Address of the instance, if ingress listeners bind to it.
    pub own_address: Option<SmolStr>,
    /// Interception mode.
    pub interception: InterceptionMode,
    /// True if it cannot bind ports below 1024.
    pub unprivileged: bool,
    /// Ports that Envoy itself serves.
    pub own_ports: [u32; 2],
    /// True if connections are balanced exactly over worker threads.
    pub exact_balance: bool,
    /// Certificates of its own in files.
    pub certificates: ServerCertificates,
    /// True if it has the socket of its own SDS provider.
    pub external_socket: bool,
}

/// Inbound listeners of sidecars with equal views.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InboundListenerPart {
    /// Attributes of the sidecar.
    pub client: Hashed<InboundProxyView>,
}

/// Inputs of one inbound listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InboundListenerKey {
    /// Attributes of the sidecar.
    pub client: Hashed<InboundProxyView>,
    /// Port of an ingress listener with a socket of its own; `None` for [`VIRTUAL_INBOUND`].
    pub own_socket: Option<u32>,
}

impl InboundProxyView {
    /// Returns the view of a selected sidecar.
    pub fn of(ctx: &BuildContext, selected: &Selected, filters: &Hashed<FilterProxyView>) -> Hashed<Self> {
        let proxy = selected.proxy;
        let sidecar = ingress_sidecar(ctx, &selected.scope);
        let peers = authentication::peer_policy(ctx.cx, ctx.mesh, &proxy.namespace, &selected.labels);
        let mut ports: BTreeSet<u32> = selected.targets.iter().map(|target| target.target_port).collect();
        if let Some(row) = sidecar.as_ref().and_then(|key| ctx.mesh.sidecars.get(ctx.cx, key)) {
            ports.extend(row.spec.ingress.iter().map(port_number));
        }
        ports.extend(peers.ports.keys());
        Hashed::new(Self {
            filters: FilterProxyView::with_inbound_ports(filters, ports.len()),
            targets: selected.targets.clone(),
            own_address: sidecar
                .as_ref()
                .and_then(|_| unicast_address(&selected.class.addresses)),
            sidecar,
            peers,
            ip_mode: proxy.ip_mode,
            interception: proxy.interception_mode,
            unprivileged: proxy.has(MetadataKey::UnprivilegedPod),
            own_ports: own_ports(proxy),
            exact_balance: proxy.has(MetadataKey::InboundExactBalance),
            certificates: ServerCertificates::of(proxy),
            external_socket: proxy.metadata_value(MetadataKey::Credential) == "true",
        })
    }

    /// Returns true if a listener may bind there.
    fn can_bind(&self, bind_to_port: bool, bind: &str, port: u32, protocol: Protocol) -> bool {
        if bind_to_port && self.unprivileged && (1..1024).contains(&port) {
            return false;
        }
        let at_wildcard = if bind.is_empty() {
            protocol.is_http()
        } else {
            bind == wildcards(self.ip_mode)[0]
        };
        !(at_wildcard && is_own_port(self.own_ports, port))
    }

    fn ingress_row<'a>(&self, ctx: &BuildContext<'a>) -> Option<&'a Shared<Config<Sidecar>>> {
        ctx.mesh.sidecars.get(ctx.cx, self.sidecar.as_ref()?)
    }

    /// Returns the ports with their own chains, by target port.
    fn ports(&self, stack: &FilterStack) -> BTreeMap<u32, InboundPort> {
        let ctx = &stack.ctx;
        let Some(sidecar) = self.ingress_row(ctx) else {
            // Without interception the workload itself listens on these ports.
            if self.interception == InterceptionMode::None {
                return BTreeMap::new();
            }
            return self.service_ports(stack, &BTreeSet::new());
        };
        let mut ports = self.ports_beside(stack, sidecar);
        for listener in &sidecar.spec.ingress {
            if let Some(port) = self.ingress_port(stack, sidecar, listener) {
                ports.entry(port.target_port).or_insert(port);
            }
        }
        ports
    }

    /// Returns the one of [`Self::ports`] with this target port. A Sidecar may have thousands of ingress listeners with
    /// sockets of their own, each of which needs one.
    fn port(&self, stack: &FilterStack, number: u32) -> Option<InboundPort> {
        let Some(sidecar) = self.ingress_row(&stack.ctx) else {
            return self.ports(stack).remove(&number);
        };
        let mut own = sidecar
            .spec
            .ingress
            .iter()
            .filter(|listener| port_number(listener) == number);
        own.find_map(|listener| self.ingress_port(stack, sidecar, listener))
            .or_else(|| self.ports_beside(stack, sidecar).remove(&number))
    }

    /// Returns the ports of services that count beside the ingress listeners of a Sidecar.
    fn ports_beside(&self, stack: &FilterStack, sidecar: &Config<Sidecar>) -> BTreeMap<u32, InboundPort> {
        if !stack.features().pilot_allow_sidecar_service_inbound_listener_merge {
            return BTreeMap::new();
        }
        let taken: BTreeSet<u32> = sidecar.spec.ingress.iter().map(port_number).collect();
        self.service_ports(stack, &taken)
    }

    /// Returns the ports of services; the oldest service owns a port that several services target.
    fn service_ports(&self, stack: &FilterStack, taken: &BTreeSet<u32>) -> BTreeMap<u32, InboundPort> {
        let binds = wildcards(self.ip_mode);
        let bind = binds[0];
        let bind_to_port = self.interception == InterceptionMode::None;
        let mut ports: BTreeMap<u32, InboundPort> = BTreeMap::new();
        let mut declared: BTreeMap<&ServiceKey, InboundPorts> = BTreeMap::new();
        for target in self.targets.iter() {
            let Some(service) = stack.ctx.service(&target.service) else {
                continue;
            };
            let all = declared
                .entry(&target.service)
                .or_insert_with(|| InboundPorts::of(service));
            let Some(port) = target.declared_among(all) else {
                continue;
            };
            let number = target.target_port;
            // The wildcard address with these ports belongs to the listeners of intercepted connections.
            let mesh = stack.mesh;
            let intercepting = [mesh.proxy_listen_port as u32, mesh.proxy_inbound_listen_port as u32];
            if !self.can_bind(bind_to_port, bind, number, port.protocol)
                || intercepting.contains(&number)
                || taken.contains(&number)
            {
                continue;
            }
            let port = InboundPort::of_service(service, port, number, binds, bind_to_port);
            if let Some(other) = ports.get(&number) {
                if other.protocol != port.protocol && other.hostname != port.hostname {
                    let detail = format!("port {number}: {} rejected {}", other.hostname, port.hostname);
                    stack.note("pilot_conflict_inbound_listener", detail);
                }
                continue;
            }
            ports.insert(number, port);
        }
        ports
    }

    fn ingress_port(
        &self,
        stack: &FilterStack,
        sidecar: &Config<Sidecar>,
        listener: &IstioIngressListener,
    ) -> Option<InboundPort> {
        let declared = listener.port.as_ref()?;
        let bind_to_port = match listener.capture_mode() {
            CaptureMode::Default => self.interception == InterceptionMode::None,
            mode => mode == CaptureMode::None,
        };
        let mut protocol = Protocol::parse(&declared.protocol);
        if !self.can_bind(bind_to_port, &listener.bind, declared.number, protocol) {
            return None;
        }
        let tls = listener
            .tls
            .as_ref()
            .filter(|_| stack.features().enable_tls_on_sidecar_ingress);
        if tls.is_some() {
            protocol = match protocol {
                Protocol::Https => Protocol::Http,
                Protocol::Tls => Protocol::Tcp,
                other => other,
            };
        }
        let namespace = &self.filters.namespace;
        let binds = self.ingress_binds(&listener.bind);
        Some(InboundPort {
            number: declared.number,
            name: declared.name.as_str().into(),
            protocol,
            target_port: declared.number,
            bind: binds.0,
            further_binds: binds.1,
            bind_to_port,
            hostname: format!("{}.{namespace}", sidecar.meta.name()),
            service: None,
            passthrough: false,
            peer_source: PeerSource::Tls,
            tls: tls.cloned(),
            metadata: Some(config_metadata(&sidecar_meta(&sidecar.meta, namespace))),
        })
    }

    fn ingress_binds(&self, bind: &str) -> (SmolStr, Vec<SmolStr>) {
        if !bind.is_empty() {
            return (SmolStr::new(bind), Vec::new());
        }
        if let Some(own) = &self.own_address {
            return (own.clone(), Vec::new());
        }
        let mut all = wildcards(self.ip_mode).iter().map(|bind| SmolStr::new_static(bind));
        let first = all.next().unwrap_or_default();
        (first, all.collect())
    }

    /// Returns ports with a policy of their own but without a chain.
    ///
    /// Unlike Istio, which forgets ports of services beside those of a Sidecar: Envoy refuses a listener of which two
    /// chains have the same match.
    fn unserved_policy_ports(&self, ctx: &BuildContext, with_chains: &BTreeMap<u32, InboundPort>) -> Vec<u32> {
        let served: BTreeSet<u32> = match self.ingress_row(ctx) {
            Some(sidecar) => sidecar.spec.ingress.iter().map(port_number).collect(),
            None => self.targets.iter().map(|target| target.target_port).collect(),
        };
        let ports = self.peers.ports.keys().copied();
        ports
            .filter(|port| !served.contains(port) && !with_chains.contains_key(port))
            .collect()
    }
}

fn port_number(listener: &IstioIngressListener) -> u32 {
    listener.port.as_ref().map_or(0, |port| port.number)
}

/// A Sidecar of the root namespace appears as one of the proxy's namespace.
fn sidecar_meta(meta: &Meta, namespace: &Namespace) -> Meta {
    Meta {
        kind: Kind::Sidecar,
        key: ObjectKey::new(meta.cluster(), namespace.clone(), meta.name().clone()),
        ..meta.clone()
    }
}

fn ingress_sidecar(ctx: &BuildContext, scope: &ScopeKey) -> Option<ObjectKey> {
    let ScopeKey::Sidecar(_, key) = scope else {
        return None;
    };
    let row = ctx.mesh.sidecars.get(ctx.cx, key)?;
    (!row.spec.ingress.is_empty()).then(|| key.clone())
}

/// Returns the first address that is neither loopback, link-local, multicast nor unspecified.
fn unicast_address(addresses: &[SmolStr]) -> Option<SmolStr> {
    let is_unicast = |text: &&SmolStr| match cidr::parse_ip(text) {
        Some(IpAddr::V4(ip)) => {
            !(ip.is_unspecified() || ip.is_loopback() || ip.is_link_local() || ip.is_multicast() || ip.is_broadcast())
        }
        Some(IpAddr::V6(ip)) => {
            !(ip.is_unspecified() || ip.is_loopback() || ip.is_unicast_link_local() || ip.is_multicast())
        }
        None => false,
    };
    addresses.iter().find(is_unicast).cloned()
}

impl InboundListenerPart {
    /// Lists the listeners, the virtual one first.
    pub fn list(&self, ctx: &BuildContext) -> Vec<ListenerKey> {
        let key = |own_socket| {
            ListenerKey::Inbound(InboundListenerKey {
                client: self.client.clone(),
                own_socket,
            })
        };
        let intercepted = self.client.interception != InterceptionMode::None;
        let mut keys: Vec<ListenerKey> = intercepted.then(|| key(None)).into_iter().collect();
        let stack = FilterStack::new(ctx, &self.client.filters, ListenerClass::SidecarInbound);
        let ports = self.client.ports(&stack);
        let bound = ports.values().filter(|port| port.bind_to_port);
        keys.extend(bound.map(|port| key(Some(port.target_port))));
        keys
    }
}

impl InboundListenerKey {
    /// Builds the listener.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let client = &*self.client;
        let builder = InboundListenerBuilder {
            stack: FilterStack::new(ctx, &client.filters, ListenerClass::SidecarInbound),
            client,
            sockets: Default::default(),
        };
        let listener = match self.own_socket {
            None => builder.virtual_listener(&client.ports(&builder.stack)),
            Some(number) => match client.port(&builder.stack, number) {
                Some(port) => builder.own_listener(&port),
                None => return Built::none(),
            },
        };
        listener.finish(ctx, builder.stack, PatchContext::SidecarInbound)
    }
}

/// The builder of an inbound listener.
pub(super) struct InboundListenerBuilder<'a> {
    /// Builder of filters.
    pub(super) stack: FilterStack<'a>,
    /// Attributes of the sidecar.
    pub(super) client: &'a InboundProxyView,
    /// Cached transport sockets of mutual TLS, encoded, by [`InnerProtocol`].
    pub(super) sockets: [OnceCell<Encoded<TransportSocket>>; 2],
}

/// Cached filters of a port, equal in all its chains of a kind.
#[derive(Default)]
struct PortFilters {
    http: OnceCell<NetworkFilters>,
    tcp: OnceCell<NetworkFilters>,
}

/// Chains of a listener under construction, with the inspectors that they need.
#[derive(Default)]
pub(super) struct Chains {
    pub(super) listener: EncodedListener,
    pub(super) needs: InspectorsByPort,
}

impl InboundListenerBuilder<'_> {
    fn virtual_listener(&self, ports: &BTreeMap<u32, InboundPort>) -> EncodedListener {
        let mut chains = Chains::default();
        self.add_black_hole(&mut chains);
        self.add_passthrough(&mut chains, 0, self.client.peers.mode);
        for port in self.client.unserved_policy_ports(&self.stack.ctx, ports) {
            self.add_passthrough(&mut chains, port, self.client.peers.mode_on(port));
        }
        for port in ports.values().filter(|port| !port.bind_to_port) {
            self.add_port(&mut chains, port);
        }
        let transparent = self.client.interception == InterceptionMode::Tproxy;
        let mut listener_filters = vec![original_destination()];
        listener_filters.extend(transparent.then(original_source));
        listener_filters.extend(chains.needs.inspectors());
        let mut binds = wildcards(self.client.ip_mode);
        if !self.stack.features().istio_dual_stack {
            binds = &binds[..1];
        }
        chains.listener.rest = Listener {
            name: VIRTUAL_INBOUND.to_owned(),
            transparent: transparent.then_some(true),
            listener_filters,
            ..self.listener(binds, self.stack.mesh.proxy_inbound_listen_port as u32)
        };
        chains.listener
    }

    fn own_listener(&self, port: &InboundPort) -> EncodedListener {
        let mut chains = Chains::default();
        self.add_port(&mut chains, port);
        let mut binds: Vec<&str> = vec![&port.bind];
        if self.stack.features().istio_dual_stack {
            binds.extend(port.further_binds.iter().map(SmolStr::as_str));
        }
        chains.listener.rest = Listener {
            name: listener_name(&port.bind, port.target_port).to_string(),
            listener_filters: chains.needs.inspectors(),
            ..self.listener(&binds, port.target_port)
        };
        chains.listener
    }

    fn listener(&self, binds: &[&str], port: u32) -> Listener {
        Listener {
            address: Some(constant::address(binds[0], port)),
            additional_addresses: additional_addresses(&binds[1..], port),
            traffic_direction: TrafficDirection::Inbound as i32,
            continue_on_listener_filters_timeout: true,
            listener_filters_timeout: self.stack.mesh.protocol_detection_timeout,
            max_connections_to_accept_per_socket_event: max_connections_per_event(self.stack.features()),
            connection_balance_config: self.client.exact_balance.then(exact_balance),
            access_log: self.access_logs(),
            ..Default::default()
        }
    }

    /// Returns the access logs of the listener; none if those of all ports that bind a socket would be too large.
    fn access_logs(&self) -> Vec<AccessLog> {
        let logs = self.stack.access_logs(LogPosition::Listener);
        let size = || -> usize { logs.iter().map(Message::encoded_len).sum() };
        if self.stack.exceeds_inbound_limit(1, size) {
            Vec::new()
        } else {
            logs
        }
    }

    /// Drops connections to the listener's own port, which would loop.
    fn add_black_hole(&self, chains: &mut Chains) {
        let mut filters = NetworkFilters::new();
        self.stack.add_metadata_exchange(&mut filters);
        self.stack.add_stats(&mut filters);
        add_black_hole(&mut filters);
        let chain_match = FilterChainMatch {
            destination_port: Some(self.stack.mesh.proxy_inbound_listen_port as u32),
            ..Default::default()
        };
        chains.needs.add(&chain_match);
        chains.listener.add_chain(|out| {
            out.message(filter_chain::FILTER_CHAIN_MATCH, &chain_match);
            out.fields(filters.fields());
            out.text(filter_chain::NAME, BLACK_HOLE_CHAIN);
        });
    }

    /// Returns the chains of tunnelled connections to these addresses: the ports in plaintext, then all others.
    pub(super) fn tunnel_chains(&self, addresses: &[CidrRange]) -> Chains {
        let features = self.stack.features();
        let mut chains = Chains::default();
        let tunneled = |form: &ChainForm| ChainForm { transport: "", ..*form };
        for (_, mut port) in self.client.ports(&self.stack) {
            port.peer_source = PeerSource::Tunnel;
            let declared = ChainKind::of(port.protocol).unwrap_or(ChainKind::Tcp);
            let filters = PortFilters::default();
            for form in chain_forms(declared, MtlsMode::Disable, features) {
                self.add_chain(&mut chains, &port, &tunneled(&form), &filters, addresses);
            }
        }
        // Parity (pilot/pkg/networking/core/listener_inbound.go): policies of all chains match the peer of the tunnel.
        // The connections inside have no TLS.
        let port = InboundPort {
            peer_source: PeerSource::Tunnel,
            ..InboundPort::passthrough(0)
        };
        let filters = PortFilters::default();
        for form in chain_forms(ChainKind::Auto, MtlsMode::Disable, features) {
            self.add_chain(&mut chains, &port, &tunneled(&form), &filters, addresses);
        }
        chains
    }

    fn add_passthrough(&self, chains: &mut Chains, port: u32, mode: MtlsMode) {
        let port = InboundPort::passthrough(port);
        let filters = PortFilters::default();
        for form in chain_forms(ChainKind::Auto, mode, self.stack.features()) {
            self.add_chain(chains, &port, &form, &filters, &[]);
        }
    }

    /// Adds the chains of a port by its mode of mutual TLS.
    fn add_port(&self, chains: &mut Chains, port: &InboundPort) {
        let mode = self.client.peers.mode_on(port.target_port);
        let declared = ChainKind::of(port.protocol).unwrap_or(ChainKind::Tcp);
        // TLS of the application excludes mutual TLS.
        let forms = if port.tls.is_some() && mode == MtlsMode::Disable {
            vec![terminating_form(declared)]
        } else {
            chain_forms(declared, mode, self.stack.features())
        };
        let filters = PortFilters::default();
        for form in &forms {
            self.add_chain(chains, port, form, &filters, &[]);
        }
    }

    fn add_chain(
        &self,
        chains: &mut Chains,
        port: &InboundPort,
        form: &ChainForm,
        filters: &PortFilters,
        addresses: &[CidrRange],
    ) {
        let chain_match = FilterChainMatch {
            destination_port: (port.target_port != 0).then_some(port.target_port),
            prefix_ranges: addresses.to_vec(),
            application_protocols: form.alpns.iter().map(|alpn| (*alpn).to_owned()).collect(),
            transport_protocol: form.transport.to_owned(),
            ..Default::default()
        };
        chains.needs.add(&chain_match);
        chains.listener.add_chain(|out| {
            out.message(filter_chain::FILTER_CHAIN_MATCH, &chain_match);
            let filters = match form.inside {
                InnerProtocol::Http => filters.http.get_or_init(|| self.http_filters(port)),
                InnerProtocol::Tcp => filters.tcp.get_or_init(|| self.tcp_filters(port)),
            };
            out.fields(filters.fields());
            if let Some(metadata) = &port.metadata {
                out.message(filter_chain::METADATA, metadata);
            }
            if form.terminates {
                out.encoded(filter_chain::TRANSPORT_SOCKET, &self.socket(port, form));
            }
            out.text(filter_chain::NAME, &port.chain_name(form.inside));
        });
    }

    /// Returns the encoded transport socket of a chain that terminates TLS.
    fn socket(&self, port: &InboundPort, form: &ChainForm) -> Cow<'_, Encoded<TransportSocket>> {
        let own_tls = port
            .tls
            .as_ref()
            .filter(|_| self.client.peers.mode_on(port.target_port) == MtlsMode::Disable);
        let Some(tls) = own_tls else {
            let made = &self.sockets[form.inside as usize];
            let socket = || Encoded::of(&self.stack.mutual_tls(&self.client.certificates, form.inside));
            return Cow::Borrowed(made.get_or_init(socket));
        };
        let context = termination::Context {
            certificates: &self.client.certificates,
            external_socket: self.client.external_socket,
            stack: &self.stack,
            transport: Transport::Tcp,
            // Parity (pilot/pkg/networking/core/listener_builder.go): the inner protocol does not count here.
            inside: InnerProtocol::Http,
            accepts_untrusted: false,
            is_shared: false,
        };
        Cow::Owned(Encoded::of(&context.socket(tls)))
    }
}
