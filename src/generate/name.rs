//! Names that other resources and the proxies' extensions parse: clusters, SNI, statistics.

use std::borrow::Cow;

use crate::model::{
    Service,
    service::{Protocol, Registry, ServicePort},
};

/// The cluster of a service port or of a subset: `outbound|80|v1|host`.
pub fn outbound_cluster(port: u32, subset: &str, host: &str) -> String {
    joined("outbound|", port, "|", subset, host)
}

/// These parts with a separator between them, which every outbound cluster has several times over.
fn joined(kind: &str, port: u32, separator: &str, subset: &str, host: &str) -> String {
    // Ports stand in names by the thousand, so they are formatted without an allocation.
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

/// The cluster of a service port, or of a subset, behind a waypoint: `inbound-vip|80|http/v1|host`.
pub fn vip_cluster(port: u32, traffic: &str, host: &str) -> String {
    let number = &mut itoa::Buffer::new();
    ["inbound-vip|", number.format(port), "|", traffic, "|", host].concat()
}

/// What the name of an outbound cluster tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutboundName<'a> {
    /// The service port, never 0.
    pub port: u32,
    /// The subset, empty for the default cluster.
    pub subset: &'a str,
    /// The host, never empty.
    pub host: &'a str,
}

/// Reads the name of an outbound cluster, or the SNI of one; `None` for other texts.
pub fn parse_outbound(name: &str) -> Option<OutboundName<'_>> {
    let (rest, separator) = match name.strip_prefix("outbound_.") {
        Some(rest) => (rest, "_."),
        None => (name.strip_prefix("outbound|")?, "|"),
    };
    let (port, rest) = rest.split_once(separator)?;
    let (subset, host) = rest.split_once(separator)?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    (!host.is_empty() && !host.contains(separator)).then_some(OutboundName { port, subset, host })
}

/// The cluster of a port of the workload itself: `inbound|8080||`.
pub fn inbound_cluster(port: u32) -> String {
    ["inbound|", itoa::Buffer::new().format(port), "||"].concat()
}

/// The SNI of mutual TLS to a service, which is the cluster's name on gateways that pass it through:
/// `outbound_.80_.v1_.host`.
pub fn sni_cluster(port: u32, subset: &str, host: &str) -> String {
    joined("outbound_.", port, "_.", subset, host)
}

/// What statistics of a cluster or listener are kept under: the delimiter tells proxies where the name ends.
pub fn delimited_stat(name: &str) -> String {
    [name, ";"].concat()
}

/// Fills a pattern such as `%SERVICE_FQDN%_%SERVICE_PORT%`; unknown placeholders stay. Not delimited.
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

/// What outbound clusters are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClusterMode {
    /// For connections that the client makes.
    #[default]
    Default,
    /// For mutual TLS that a gateway passes through to the service named by the SNI.
    SniDnat,
    /// For what came to a waypoint at the service's own address.
    Vip(VipTraffic),
}

/// What a waypoint takes connections for: it has chains and clusters of their own for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum VipTraffic {
    /// Bytes.
    Tcp,
    /// Requests.
    Http,
}

impl VipTraffic {
    /// What a port of this protocol may carry, TCP first; nothing for ports that are not served.
    pub fn of(protocol: Protocol) -> &'static [Self] {
        match protocol {
            Protocol::Udp => &[],
            protocol if protocol.is_http() => &[Self::Http],
            protocol if protocol.is_tcp() => &[Self::Tcp],
            _ => &[Self::Tcp, Self::Http],
        }
    }

    /// What stands in names in place of the subset.
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
    /// The name of the cluster of a service port; `subset` is empty for the default one.
    pub fn cluster_name(self, port: u32, subset: &str, host: &str) -> String {
        match self {
            Self::Default => outbound_cluster(port, subset, host),
            Self::SniDnat => sni_cluster(port, subset, host),
            Self::Vip(traffic) => vip_cluster(port, &traffic.label(subset), host),
        }
    }

    /// True for clusters behind a waypoint.
    pub fn is_vip(self) -> bool {
        matches!(self, Self::Vip(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::kube::service::TargetPort, model::service::Protocol};

    #[test]
    fn fills_patterns() {
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
