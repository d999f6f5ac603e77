//! Names of clusters, SNI values and statistics, which other resources and the proxies' extensions parse.

use std::borrow::Cow;

use smol_str::SmolStr;

use crate::model::{
    Service,
    service::{Protocol, Registry, ServicePort},
    sidecar_scope::OutboundPolicy,
};

/// The cluster that drops traffic.
pub const BLACK_HOLE: &str = "BlackHoleCluster";
/// The cluster of the original destination.
pub const PASSTHROUGH: &str = "PassthroughCluster";
/// The cluster of inbound traffic to workload ports without a service.
pub const INBOUND_PASSTHROUGH: &str = "InboundPassthroughCluster";
/// The cluster of destinations without a host. It does not exist, so that they cannot be reached.
pub const UNKNOWN_SERVICE: &str = "UnknownService";

/// Returns the name of the cluster of a service port or subset: `outbound|80|v1|host`.
pub fn outbound_cluster(port: u32, subset: &str, host: &str) -> String {
    joined("outbound|", port, "|", subset, host)
}

/// Joins the parts of a cluster name.
fn joined(kind: &str, port: u32, separator: &str, subset: &str, host: &str) -> String {
    // Formats the port without an allocation: each cluster name is made several times.
    [
        kind,
        itoa::Buffer::new().format(port),
        separator,
        subset,
        separator,
        host,
    ]
    .concat()
}

/// Returns the name of the cluster of a service port or subset behind a waypoint: `inbound-vip|80|http/v1|host`.
pub fn vip_cluster(port: u32, traffic: &str, host: &str) -> String {
    let number = &mut itoa::Buffer::new();
    ["inbound-vip|", number.format(port), "|", traffic, "|", host].concat()
}

/// Returns the name of the cluster of traffic to unknown destinations, where a policy allows it.
pub fn allowed_cluster(policy: &OutboundPolicy) -> SmolStr {
    match &policy.egress_proxy {
        None => SmolStr::new_static(PASSTHROUGH),
        Some(proxy) if proxy.host.is_empty() => SmolStr::new_static(UNKNOWN_SERVICE),
        Some(proxy) => outbound_cluster(proxy.port, &proxy.subset, &proxy.host).into(),
    }
}

/// The parts of a cluster name: `outbound|80|v1|host`, or separated by `_.` as in an SNI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterName<'a> {
    /// The first part.
    pub direction: &'a str,
    /// The port; 0 if absent.
    pub port: u32,
    /// The subset; empty for the default cluster.
    pub subset: &'a str,
    /// The host; empty if absent.
    pub host: &'a str,
}

impl<'a> ClusterName<'a> {
    /// Parses the parts of a name as far as it has the form.
    pub fn parse(name: &'a str) -> Self {
        let is_sni = name.starts_with("outbound_") || name.starts_with("inbound_");
        let mut words = name.split(if is_sni { "_." } else { "|" });
        let mut parsed = Self::default();
        // Parity (pilot/pkg/model/service.go, ParseSubsetKey): a part counts only if another one follows.
        let (Some(direction), Some(port)) = (words.next(), words.next()) else {
            return parsed;
        };
        parsed.direction = direction;
        let Some(subset) = words.next() else { return parsed };
        parsed.port = port.parse().unwrap_or_default();
        let Some(host) = words.next() else { return parsed };
        parsed.subset = subset;
        if words.next().is_none() {
            parsed.host = host;
        }
        parsed
    }

    /// Parses the name of an outbound cluster, or its SNI. Returns `None` for other texts.
    pub fn outbound(name: &'a str) -> Option<Self> {
        let parsed = Self::parse(name);
        let is_complete = parsed.port != 0 && !parsed.host.is_empty();
        (parsed.direction == "outbound" && is_complete).then_some(parsed)
    }
}

/// Returns the name of the cluster of a port of the workload: `inbound|8080||`.
pub fn inbound_cluster(port: u32) -> String {
    ["inbound|", itoa::Buffer::new().format(port), "||"].concat()
}

/// Returns the SNI of mutual TLS to a service: `outbound_.80_.v1_.host`. On gateways that pass TLS through, it is also
/// the cluster name.
pub fn sni_cluster(port: u32, subset: &str, host: &str) -> String {
    joined("outbound_.", port, "_.", subset, host)
}

/// Returns the name of the statistics of a cluster or listener. Its delimiter tells proxies where the name ends.
pub fn delimited_stat(name: &str) -> String {
    [name, ";"].concat()
}

/// Fills a pattern such as `%SERVICE_FQDN%_%SERVICE_PORT%`. Keeps unknown placeholders; adds no delimiter.
pub fn stat_prefix(
    pattern: &str,
    host: &str,
    subset: &str,
    port: &ServicePort,
    target_port: u32,
    service: Option<&Service>,
) -> String {
    let kubernetes = service.filter(|service| service.registry == Registry::Kubernetes);
    let short = kubernetes.map_or_else(
        || host.to_owned(),
        |service| format!("{}.{}", service.name, service.key.namespace),
    );
    let name = kubernetes.map_or(host, |service| service.name.as_str());
    pattern
        .replace("%SERVICE%", &short)
        .replace("%SERVICE_NAME%", name)
        .replace("%SERVICE_FQDN%", host)
        .replace("%SUBSET_NAME%", subset)
        .replace("%TARGET_PORT%", &target_port.to_string())
        .replace("%SERVICE_PORT%", &port.number.to_string())
        .replace("%SERVICE_PORT_NAME%", &port.name)
}

/// The purpose of outbound clusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClusterMode {
    /// Connections from the proxy's workload or clients.
    #[default]
    Default,
    /// Mutual TLS that a gateway passes through to the service in the SNI.
    SniDnat,
    /// Connections that reached a waypoint at the service's address.
    Vip(VipTraffic),
}

/// The traffic of a connection to a waypoint. Each kind has its own chains and clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum VipTraffic {
    /// TCP.
    Tcp,
    /// HTTP requests.
    Http,
}

impl VipTraffic {
    /// Returns the kinds of traffic of a protocol, TCP first; none for ports that waypoints do not serve.
    pub fn of(protocol: Protocol) -> &'static [Self] {
        match protocol {
            Protocol::Udp => &[],
            protocol if protocol.is_http() => &[Self::Http],
            protocol if protocol.is_tcp() => &[Self::Tcp],
            _ => &[Self::Tcp, Self::Http],
        }
    }

    /// Returns the text that replaces the subset in names.
    pub fn label(self, subset: &str) -> Cow<'static, str> {
        let own = match self {
            Self::Tcp => "tcp",
            Self::Http => "http",
        };
        match subset {
            "" => Cow::Borrowed(own),
            subset => Cow::Owned([own, "/", subset].concat()),
        }
    }
}

impl ClusterMode {
    /// Returns the name of the cluster of a service port; `subset` is empty for the default cluster.
    pub fn cluster_name(self, port: u32, subset: &str, host: &str) -> String {
        match self {
            Self::Default => outbound_cluster(port, subset, host),
            Self::SniDnat => sni_cluster(port, subset, host),
            Self::Vip(traffic) => vip_cluster(port, &traffic.label(subset), host),
        }
    }

    /// Returns true for clusters behind a waypoint.
    pub fn is_vip(self) -> bool {
        matches!(self, Self::Vip(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::kube::service::TargetPort,
        model::{service::Protocol, sidecar_scope::EgressProxy},
    };

    #[test]
    fn cluster_names_are_parsed_leniently() {
        let parsed = |name: &'static str| {
            let parsed = ClusterName::parse(name);
            (parsed.direction, parsed.port, parsed.subset, parsed.host)
        };
        assert_eq!(parsed("outbound|80|v1|a.b"), ("outbound", 80, "v1", "a.b"));
        assert_eq!(parsed("outbound_.80_.v1_.a.b"), ("outbound", 80, "v1", "a.b"));
        assert_eq!(parsed("inbound|8080||"), ("inbound", 8080, "", ""));
        assert_eq!(parsed("BlackHoleCluster"), ("", 0, "", ""));
        assert_eq!(parsed("outbound|80"), ("outbound", 0, "", ""));
        assert_eq!(parsed("outbound|80|v1"), ("outbound", 80, "", ""));
        assert_eq!(parsed("outbound|80|v1|a|b"), ("outbound", 80, "v1", ""));
    }

    #[test]
    fn outbound_names_are_complete() {
        let host = |name: &'static str| ClusterName::outbound(name).map(|name| name.host);
        assert_eq!(host("outbound|80||a.b"), Some("a.b"));
        assert_eq!(host("outbound_.80_._.a.b"), Some("a.b"));
        for name in [
            "outbound|0||a",
            "outbound|x||a",
            "outbound|80||",
            "outbound|80||a|b",
            "inbound|80||a",
            "outbound|80",
        ] {
            assert_eq!(host(name), None, "{name}");
        }
    }

    #[test]
    fn traffic_to_unknown_destinations_uses_the_egress_proxy() {
        let allowed = |egress_proxy: Option<EgressProxy>| {
            allowed_cluster(&OutboundPolicy {
                registry_only: false,
                egress_proxy,
            })
        };
        let proxy = |host: &str, subset: &str, port: u32| {
            Some(EgressProxy {
                host: host.into(),
                subset: subset.into(),
                port,
            })
        };
        assert_eq!(allowed(None), PASSTHROUGH);
        assert_eq!(allowed(proxy("a.b", "v1", 80)), "outbound|80|v1|a.b");
        assert_eq!(allowed(proxy("a.b", "", 0)), "outbound|0||a.b");
        assert_eq!(allowed(proxy("", "v1", 80)), "UnknownService");
    }

    #[test]
    fn patterns_are_filled() {
        let port = ServicePort {
            name: "http".into(),
            number: 8000,
            target: TargetPort::Number(8080),
            protocol: Protocol::Http,
        };
        let filled = stat_prefix(
            "%SERVICE%_%SERVICE_PORT%_%TARGET_PORT%_%WHAT%",
            "a.example.com",
            "",
            &port,
            8080,
            None,
        );
        assert_eq!(filled, "a.example.com_8000_8080_%WHAT%");
        assert_eq!(
            stat_prefix(
                "%SERVICE_FQDN%_%SERVICE_PORT_NAME%_%SUBSET_NAME%",
                "h",
                "v1",
                &port,
                0,
                None
            ),
            "h_http_v1"
        );
        assert_eq!(outbound_cluster(80, "", "a.b"), "outbound|80||a.b");
        assert_eq!(outbound_cluster(0, "v1", "a"), "outbound|0|v1|a");
        assert_eq!(sni_cluster(4_294_967_295, "v1", "a.b"), "outbound_.4294967295_.v1_.a.b");
    }
}
