//! Services: one row for each (namespace, host name), merged over clusters and registries.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{MeshSnapshot, installation::Installation};
use crate::{
    api::{Config, kube::service::TargetPort},
    base::{ClusterId, Hostname, Labels, Namespace, ObjectKey},
    proto::istio::networking::v1alpha3 as networking,
    table::Cx,
};

/// Names a service: host first, so that rows of one host stand together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    /// The fully qualified host name.
    pub hostname: Hostname,
    /// The namespace that declares it.
    pub namespace: Namespace,
}

/// Where a service comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Registry {
    /// A Kubernetes Service.
    Kubernetes,
    /// A ServiceEntry.
    External,
}

/// How proxies find a service's endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resolution {
    /// EDS: ClusterIP services and ServiceEntries with `STATIC`.
    ClientSideLb,
    /// `DNS`: STRICT_DNS.
    DnsLb,
    /// `DNS_ROUND_ROBIN`: LOGICAL_DNS.
    DnsRoundRobinLb,
    /// Headless services and `NONE`: the address that the client asked for.
    Passthrough,
    /// An ExternalName that stands for another service.
    Alias,
    /// `DYNAMIC_DNS`: resolved by the proxy from the request.
    DynamicDns,
}

/// A port's application protocol (`protocol.Instance`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// Not declared: sniffed.
    Unsupported,
    /// HTTP/1.1.
    Http,
    /// HTTP proxy (egress listener).
    HttpProxy,
    /// HTTP/2.
    Http2,
    /// HTTPS passed through (SNI routing).
    Https,
    /// gRPC.
    Grpc,
    /// gRPC-Web.
    GrpcWeb,
    /// Opaque TCP.
    Tcp,
    /// TLS passed through (SNI routing).
    Tls,
    /// UDP: not served.
    Udp,
    /// MongoDB.
    Mongo,
    /// Redis.
    Redis,
    /// MySQL.
    Mysql,
    /// HBONE (gateway listeners).
    Hbone,
}

impl Protocol {
    /// HTTP, HTTP/2, gRPC and their kin.
    pub fn is_http(self) -> bool {
        matches!(
            self,
            Self::Http | Self::Http2 | Self::HttpProxy | Self::Grpc | Self::GrpcWeb
        )
    }

    /// HTTP/2 on the wire.
    pub fn is_http2(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc | Self::GrpcWeb)
    }

    /// HTTPS or TLS: routed by SNI.
    pub fn is_tls(self) -> bool {
        matches!(self, Self::Https | Self::Tls)
    }

    /// TCP-like: bytes are passed on, TLS included.
    pub fn is_tcp(self) -> bool {
        matches!(
            self,
            Self::Tcp | Self::Https | Self::Tls | Self::Mongo | Self::Redis | Self::Mysql
        )
    }

    /// Not declared: the proxy must sniff.
    pub fn is_unsupported(self) -> bool {
        self == Self::Unsupported
    }

    /// Parses a protocol name (`http`, `GRPC`, `grpc-web`, …), in any case; unknown ones are [`Protocol::Unsupported`].
    pub fn parse(name: &str) -> Self {
        match name.to_ascii_lowercase().as_str() {
            "tcp" => Self::Tcp,
            "udp" => Self::Udp,
            "grpc" => Self::Grpc,
            "grpc-web" => Self::GrpcWeb,
            "http" => Self::Http,
            "http_proxy" => Self::HttpProxy,
            "http2" => Self::Http2,
            "https" => Self::Https,
            "tls" => Self::Tls,
            "mongo" => Self::Mongo,
            "redis" => Self::Redis,
            "mysql" => Self::Mysql,
            "hbone" => Self::Hbone,
            _ => Self::Unsupported,
        }
    }
}

/// One port of a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePort {
    /// The name, unique in the service.
    pub name: SmolStr,
    /// The port that clients use.
    pub number: u32,
    /// Where it leads, when the service itself tells (Kubernetes `targetPort`, ServiceEntry `targetPort`).
    pub target: TargetPort,
    /// The application protocol.
    pub protocol: Protocol,
}

/// Who may see a config object: the reading of `exportTo`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExportTo {
    /// `*`.
    Public,
    /// `~`: nobody.
    Nobody,
    /// These namespaces (`.` already replaced by the own one).
    Namespaces(BTreeSet<Namespace>),
}

impl ExportTo {
    /// True if the namespace may see the object.
    pub fn visible_to(&self, namespace: &Namespace) -> bool {
        match self {
            Self::Public => true,
            Self::Nobody => false,
            Self::Namespaces(namespaces) => namespaces.contains(namespace),
        }
    }
}

/// `trafficDistribution` of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TrafficDistribution {
    /// Not given.
    #[default]
    Any,
    /// `PreferClose` or `PreferSameZone`.
    PreferSameZone,
    /// `PreferSameNode`.
    PreferSameNode,
}

/// A service as every proxy sees it. Endpoints are elsewhere: this row does not change when pods do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Host and namespace.
    pub key: ServiceKey,
    /// The name of the object: Kubernetes Service or ServiceEntry.
    pub name: SmolStr,
    /// The registry.
    pub registry: Registry,
    /// The ServiceEntry that the row was made from, if any (the oldest where several were merged).
    pub service_entry: Option<ObjectKey>,
    /// Age, for order and conflicts.
    pub creation: i64,
    /// The ports, in declared order.
    pub ports: Vec<ServicePort>,
    /// Virtual IPs by cluster; a ServiceEntry has its `addresses` (IPs or CIDRs) under the config cluster.
    pub cluster_vips: BTreeMap<ClusterId, Vec<SmolStr>>,
    /// `0.0.0.0` when the service has no address of its own; else the first address.
    pub default_address: SmolStr,
    /// Auto-allocated IPv4 address (ServiceEntries without addresses), empty when none.
    pub auto_ipv4: SmolStr,
    /// Auto-allocated IPv6 address, empty when none.
    pub auto_ipv6: SmolStr,
    /// How endpoints are found.
    pub resolution: Resolution,
    /// Outside the mesh: `MESH_EXTERNAL`, or a Kubernetes ExternalName.
    pub mesh_external: bool,
    /// Who may see it.
    pub export_to: ExportTo,
    /// Extra accounts from annotations or `subjectAltNames`, sorted.
    pub service_accounts: Vec<SmolStr>,
    /// Labels of the object.
    pub labels: Labels,
    /// Label selector of the Kubernetes Service or `workloadSelector` of the ServiceEntry.
    pub selector: Labels,
    /// ExternalName services that resolve to this one, sorted.
    pub aliases: Vec<ServiceKey>,
    /// The external name of a Kubernetes ExternalName service, empty otherwise.
    pub external_name: Hostname,
    /// `internalTrafficPolicy: Local`.
    pub node_local: bool,
    /// Traffic distribution.
    pub traffic_distribution: TrafficDistribution,
    /// `publishNotReadyAddresses`.
    pub publish_not_ready: bool,
    /// ServiceEntry annotation: DNS connect strategy RACE_FIRST_TCP_CONNECT.
    pub race_first_tcp_connect: bool,
    /// The service is headless (`clusterIP: None`).
    pub headless: bool,
    /// External addresses by cluster (load balancer, externalIPs, nodes of a NodePort), for gateways.
    pub external_addresses: BTreeMap<ClusterId, Vec<SmolStr>>,
    /// Service port → node port by cluster, where external addresses are nodes.
    pub external_ports: BTreeMap<ClusterId, BTreeMap<u32, u32>>,
}

/// The address of services that have none.
pub const UNSPECIFIED_IP: &str = "0.0.0.0";

impl Service {
    /// The port with this number.
    pub fn port(&self, number: u32) -> Option<&ServicePort> {
        self.ports.iter().find(|port| port.number == number)
    }

    /// The value of a label, if it is there.
    pub fn label(&self, key: &str) -> Option<&SmolStr> {
        self.labels.get(key)
    }
}

/// What decides whether and in which order a service is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// Who may see it.
    pub export_to: ExportTo,
    /// The registry.
    pub registry: Registry,
    /// Age.
    pub creation: i64,
    /// The port numbers, sorted (an egress listener may name one).
    pub ports: Vec<u32>,
}

/// The (host, namespace) pairs of a ServiceEntry: keys of the index by host.
pub fn entry_keys(key: &ObjectKey, entry: &Config<networking::ServiceEntry>, emit: &mut dyn FnMut(ServiceKey)) {
    for host in &entry.spec.hosts {
        emit(ServiceKey {
            hostname: Hostname::new(host),
            namespace: key.namespace.clone(),
        });
    }
}

/// The services that a change of Kubernetes Services or ServiceEntries may concern.
pub fn candidates(
    installation: &Installation,
    kube: &BTreeSet<(Namespace, SmolStr)>,
    entries: &BTreeSet<ServiceKey>,
) -> Vec<ServiceKey> {
    let kube = kube.iter().map(|(namespace, name)| ServiceKey {
        hostname: Hostname::from(format!("{name}.{namespace}.svc.{}", installation.domain)),
        namespace: namespace.clone(),
    });
    kube.chain(entries.iter().cloned()).collect()
}

/// Derives one service.
pub fn service(_cx: &Cx, _mesh: &MeshSnapshot, _key: &ServiceKey) -> Option<Service> {
    None
}

/// Derives the visibility of one service.
pub fn visibility(cx: &Cx, mesh: &MeshSnapshot, key: &ServiceKey) -> Option<Visibility> {
    let service = mesh.services.get(cx, key)?;
    let mut ports: Vec<u32> = service.ports.iter().map(|port| port.number).collect();
    ports.sort_unstable();
    Some(Visibility {
        export_to: service.export_to.clone(),
        registry: service.registry,
        creation: service.creation,
        ports,
    })
}
