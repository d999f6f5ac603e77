//! Validation of Sidecars.

use std::collections::{BTreeMap, BTreeSet};

use super::{common, field_path::FieldPath, gateway, traffic_policy};
use crate::{
    api::{
        Meta,
        names::{is_label, is_partial_wildcard, is_wildcard_domain},
    },
    base::{
        address::{HostPort, Port},
        cidr,
    },
    proto::istio::networking::v1alpha3::{
        CaptureMode, IstioEgressListener, IstioIngressListener, OutboundTrafficPolicy, Sidecar, SidecarPort,
        outbound_traffic_policy::Mode, server_tls_settings::TlSmode as TlsMode,
    },
};

/// The maximum number of egress listeners: each of them may show all services of the mesh.
const MAX_EGRESS: usize = 256;
/// The maximum number of ingress listeners. Each has a cluster, and a chain or listener.
const MAX_INGRESS: usize = 1000;

/// Checks a Sidecar.
pub fn check(at: &FieldPath<'_>, sidecar: &Sidecar, meta: &Meta) {
    if let Some(selector) = &sidecar.workload_selector {
        let at = at.field("workloadSelector");
        common::selector_labels(&at.field("labels"), &selector.labels);
        if selector.labels.is_empty() {
            at.warning("without labels selects all workloads of the namespace");
        }
    }
    let empty = sidecar.egress.is_empty()
        && sidecar.ingress.is_empty()
        && sidecar.inbound_connection_pool.is_none()
        && sidecar.outbound_traffic_policy.is_none();
    at.require_on_admission(
        !empty,
        "needs egress, ingress, inboundConnectionPool or outboundTrafficPolicy",
    );
    traffic_policy::connection_pool(
        &at.field("inboundConnectionPool"),
        sidecar.inbound_connection_pool.as_ref(),
    );
    let (mut ports, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    at.field("ingress")
        .require(sidecar.ingress.len() <= MAX_INGRESS, "has more than 1000 listeners");
    at.each("ingress", &sidecar.ingress, |at, listener| {
        ingress(at, listener);
        let number = listener.port.as_ref().map(|port| port.number);
        let socket = (listener.bind.as_str(), number);
        at.field("port").require(ports.insert(socket), "is a duplicate");
        at.field("port")
            .require_on_admission(numbers.insert(number), "has the number of another listener");
    });
    egress(at, &sidecar.egress, meta);
    if let Some(policy) = &sidecar.outbound_traffic_policy {
        outbound_policy(&at.field("outboundTrafficPolicy"), policy);
    }
}

fn ingress(at: &FieldPath<'_>, listener: &IstioIngressListener) {
    match &listener.port {
        Some(port) => self::port(&at.field("port"), port, false),
        None => at.field("port").error("is required"),
    }
    bind(&at.field("bind"), &listener.bind);
    at.field("bind").require_on_admission(
        !listener.bind.starts_with("unix://"),
        "unix sockets are for egress only",
    );
    let endpoint = listener.default_endpoint.as_str();
    if !endpoint.is_empty() {
        default_endpoint(&at.field("defaultEndpoint"), endpoint);
    }
    let pool = listener.connection_pool.as_ref();
    traffic_policy::connection_pool(&at.field("connectionPool"), pool);
    let protocol = listener.port.as_ref().map_or("", |port| port.protocol.as_str());
    if pool.is_some_and(|pool| pool.http.is_some()) && listener.port.is_some() && !common::is_plain_http(protocol) {
        at.field("connectionPool")
            .field("http")
            .warning("has no effect, because the protocol of the port is not HTTP");
    }
    if let Some(tls) = &listener.tls {
        let at = at.field("tls");
        at.require_on_admission(common::is_tls(protocol), "needs the protocol HTTPS or TLS");
        at.field("httpsRedirect")
            .require_on_admission(!tls.https_redirect, "has no meaning in a Sidecar");
        // Istio admits PASSTHROUGH, the default. It counts with ENABLE_TLS_ON_SIDECAR_INGRESS only.
        at.field("mode").require_on_admission(
            !matches!(tls.mode(), TlsMode::AutoPassthrough | TlsMode::IstioMutual),
            "AUTO_PASSTHROUGH is for gateways, and ISTIO_MUTUAL that of PeerAuthentication",
        );
        let no_credential = tls.credential_name.is_empty() && tls.credential_names.is_empty();
        at.field("credentialName")
            .require_on_admission(no_credential, "is not supported in a Sidecar");
        at.field("tlsCertificates")
            .require_on_admission(tls.tls_certificates.is_empty(), "is not supported in a Sidecar");
        at.field("subjectAltNames")
            .require_on_admission(tls.subject_alt_names.is_empty(), "is not supported in a Sidecar");
        gateway::server_tls(&at, tls);
    }
}

fn default_endpoint(at: &FieldPath<'_>, endpoint: &str) {
    if let Some(path) = endpoint.strip_prefix("unix://") {
        return common::unix_path(at, path);
    }
    let Ok(HostPort { host, port }) = HostPort::parse(endpoint) else {
        return at.error("want 127.0.0.1:port, 0.0.0.0:port, [::1]:port, [::]:port or unix:///path");
    };
    let known = matches!(host.as_str(), "" | "127.0.0.1" | "0.0.0.0" | "::1" | "::");
    at.require(known, "want 127.0.0.1, 0.0.0.0, [::1] or [::] as address");
    at.require(
        matches!(port, Port::Number(number) if number != 0),
        "the port is invalid",
    );
}

fn port(at: &FieldPath<'_>, port: &SidecarPort, unix: bool) {
    if unix {
        at.field("number")
            .require(port.number == 0, "must be 0 with a unix socket");
    } else {
        common::port(&at.field("number"), port.number);
    }
    if !port.protocol.is_empty() && !common::is_protocol(&port.protocol) {
        at.field("protocol")
            .refuse(format!("{:?} is not a protocol", port.protocol));
    }
    at.field("name").require_on_admission(
        port.name.is_empty() || is_label(&port.name),
        "is not a port name, want letters, digits and `-`",
    );
    at.field("targetPort")
        .require_on_admission(port.target_port == 0, "has no meaning in a Sidecar");
}

fn bind(at: &FieldPath<'_>, bind: &str) {
    if !bind.is_empty() && !bind.starts_with("unix://") && cidr::parse_ip(bind).is_none() {
        at.error(format!("{bind:?} is not an IP address"));
    }
}

fn egress(at: &FieldPath<'_>, listeners: &[IstioEgressListener], meta: &Meta) {
    let (mut sockets, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    at.field("egress")
        .require(listeners.len() <= MAX_EGRESS, "has more than 256 listeners");
    at.each("egress", listeners, |at, listener| {
        let path = listener.bind.strip_prefix("unix://");
        let unix = path.is_some();
        bind(&at.field("bind"), &listener.bind);
        if let Some(path) = path.filter(|_| listener.port.is_some()) {
            common::unix_path_on_admission(&at.field("bind"), path);
        }
        // A listener without a port has the ports of its services.
        if let Some(port) = &listener.port {
            self::port(&at.field("port"), port, unix);
            let is_new = sockets.insert((listener.bind.as_str(), port.number));
            at.field("port").require(is_new, "is a duplicate");
            if is_new && port.number != 0 {
                at.field("port")
                    .require_on_admission(numbers.insert(port.number), "has the number of another listener");
            }
            let captured = listener.capture_mode == CaptureMode::Iptables as i32;
            at.field("captureMode")
                .require(!(unix && captured), "a unix socket cannot be captured");
        }
        at.field("hosts").require(!listener.hosts.is_empty(), "is required");
        at.each("hosts", &listener.hosts, |at, host| egress_host(at, host));
        duplicate_hosts(at, &listener.hosts, meta.namespace());
    });
    let without_port = listeners.iter().position(|listener| listener.port.is_none());
    if let Some(position) = without_port {
        let last = position + 1 == listeners.len();
        at.field("egress")
            .item(position)
            .require(last, "the one listener without port must be the last");
    }
}

/// Warns of hosts that others of the same listener select as well.
fn duplicate_hosts(at: &FieldPath<'_>, hosts: &[String], own: &str) {
    let mut seen: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    at.each("hosts", hosts, |at, text| {
        let Some((namespace, host)) = text.split_once('/') else {
            return;
        };
        let namespace = if namespace == "." { own } else { namespace };
        let others = seen.entry(namespace).or_default();
        let is_duplicate = match host {
            "*" => !others.is_empty(),
            _ => others.contains(host) || others.contains("*"),
        };
        if is_duplicate {
            at.warning(format!("{text:?} is a duplicate"));
        }
        others.insert(host);
    });
    let selects_all = seen.get("*").is_some_and(|hosts| hosts.contains("*"));
    if selects_all && seen.len() > 1 {
        at.field("hosts")
            .warning("\"*/*\" selects everything, so other hosts have no effect");
    }
}

fn egress_host(at: &FieldPath<'_>, text: &str) {
    let Some((namespace, host)) = text.split_once('/') else {
        return at.error(format!("{text:?}: want namespace/host"));
    };
    let known = matches!(namespace, "*" | "." | "~") || is_label(namespace);
    at.require(
        known,
        "the part before the slash is not a namespace, want a name, `*`, `.` or `~`",
    );
    if !is_wildcard_domain(host) {
        at.error(format!("{host:?} is not a host name"));
    } else if is_partial_wildcard(host) {
        at.refuse(format!("{host:?} is a partial wildcard, want `*` or `*.` and a domain"));
    } else if host != "*" && !host.contains('.') {
        at.refuse(format!("{host:?} is a short name, want a full one"));
    }
}

fn outbound_policy(at: &FieldPath<'_>, policy: &OutboundTrafficPolicy) {
    let Some(proxy) = &policy.egress_proxy else { return };
    let at = at.field("egressProxy");
    at.require_on_admission(
        policy.mode == Mode::AllowAny as i32,
        "has an effect with ALLOW_ANY only",
    );
    common::host(&at.field("host"), &proxy.host);
    if !proxy.subset.is_empty() {
        common::subset_name(&at.field("subset"), &proxy.subset);
    }
    match &proxy.port {
        Some(port) => common::port(&at.field("port").field("number"), port.number),
        None => at.field("port").error("is required"),
    }
}
