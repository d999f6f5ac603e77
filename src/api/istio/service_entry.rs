//! Validation of ServiceEntries.

use std::collections::BTreeSet;

use super::{common, field_path::FieldPath, workload};
use crate::{
    api::{
        Meta,
        names::{is_fqdn, is_partial_wildcard, is_wildcard_domain},
    },
    base::cidr,
    proto::istio::networking::v1alpha3::{
        ServiceEntry,
        service_entry::{Location, Resolution},
    },
};

/// The protocols in which proxies find the host to resolve.
const DYNAMIC_PROTOCOLS: [&str; 4] = ["HTTP", "HTTP2", "GRPC", "TLS"];
/// The protocols whose connections are told apart by their addresses or server names.
const TCP_PROTOCOLS: [&str; 6] = ["TCP", "TLS", "HTTPS", "MONGO", "REDIS", "MYSQL"];
/// The label of a ServiceEntry without allocated addresses: `false`.
const ALLOCATES: &str = "networking.istio.io/enable-autoallocate-ip";
/// The label with the waypoint of a service or namespace; `none` for none.
pub const USE_WAYPOINT: &str = "istio.io/use-waypoint";

/// Checks a ServiceEntry.
pub fn check(at: &FieldPath<'_>, entry: &ServiceEntry, meta: &Meta) {
    if let Some(selector) = &entry.workload_selector {
        let selector_at = at.field("workloadSelector");
        selector_at.require_on_admission(entry.endpoints.is_empty(), "cannot be combined with endpoints");
        common::selector_labels(&selector_at.field("labels"), &selector.labels);
        if selector.labels.is_empty() {
            selector_at.warning("without labels selects all workloads of the namespace");
        }
    }
    let resolution = entry.resolution();
    hosts(at, entry, resolution);
    at.each("addresses", &entry.addresses, |at, address| {
        common::address_range(at, address);
        let takes_ranges = matches!(resolution, Resolution::None | Resolution::Static);
        let message = "an address range needs resolution NONE or STATIC";
        if cidr::is_range(address) {
            at.require(takes_ranges, message);
        } else {
            // A range of one address is served as the address.
            at.require_on_admission(takes_ranges || !address.contains('/'), message);
        }
    });
    ports(at, entry);
    shared_addresses(at, entry, meta);
    by_resolution(at, entry, resolution);
    let waypoint = meta.labels.get(USE_WAYPOINT);
    let has_waypoint = waypoint.is_some_and(|name| !name.is_empty() && !name.eq_ignore_ascii_case("none"));
    if resolution == Resolution::DynamicDns && has_waypoint {
        at.field("location").require_on_admission(
            entry.location() == Location::MeshExternal,
            "waypoints serve hosts with resolution DYNAMIC_DNS only with MESH_EXTERNAL",
        );
    }
    common::export_to(at, &entry.export_to, meta.namespace(), true);
}

fn hosts(at: &FieldPath<'_>, entry: &ServiceEntry, resolution: Resolution) {
    at.field("hosts").require(!entry.hosts.is_empty(), "is required");
    at.each("hosts", &entry.hosts, |at, host| {
        if host == "*" || !is_wildcard_domain(host) {
            at.error(format!("{host:?} is not a host name"));
        } else if is_partial_wildcard(host) && resolution != Resolution::DynamicDns {
            at.warning(format!("{host:?} has a partial wildcard, want a whole label"));
        }
    });
}

fn ports(at: &FieldPath<'_>, entry: &ServiceEntry) {
    let (mut names, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    at.each("ports", &entry.ports, |at, port| {
        common::port(&at.field("number"), port.number);
        at.field("number")
            .require_on_admission(numbers.insert(port.number), "is a duplicate");
        if port.name.is_empty() {
            at.field("name").refuse("is required");
        } else {
            common::port_name(&at.field("name"), &port.name);
        }
        at.field("name")
            .require_on_admission(names.insert(port.name.as_str()), "is a duplicate");
        if !port.protocol.is_empty() && !common::is_protocol(&port.protocol) {
            at.field("protocol")
                .refuse(format!("{:?} is not a protocol; the port counts as TCP", port.protocol));
        }
        if port.target_port != 0 {
            common::port(&at.field("targetPort"), port.target_port);
        }
    });
}

/// Warns of ports whose connections proxies cannot tell from those of other hosts.
///
/// Parity (pkg/config/validation/validation.go, `ValidateServiceEntry`): an empty protocol counts as TCP. Addresses are
/// allocated by default (`PILOT_ENABLE_IP_AUTOALLOCATE`).
fn shared_addresses(at: &FieldPath<'_>, entry: &ServiceEntry, meta: &Meta) {
    let resolution = entry.resolution();
    let label = meta.labels.get(ALLOCATES);
    let opts_out = label.is_some_and(|value| value.eq_ignore_ascii_case("false"));
    if entry.addresses.is_empty() && (resolution == Resolution::None || opts_out) {
        at.each("ports", &entry.ports, |at, port| {
            if matches!(port.protocol.as_str(), "" | "TCP") {
                at.field("protocol")
                    .warning("without addresses, the port takes connections to all addresses");
            }
        });
    }
    let is_tcp = |protocol: &str| TCP_PROTOCOLS.iter().any(|known| known.eq_ignore_ascii_case(protocol));
    let by_dns = matches!(resolution, Resolution::Dns | Resolution::DnsRoundRobin);
    if by_dns
        && entry.hosts.len() > 1
        && !entry.addresses.is_empty()
        && entry.ports.iter().any(|port| is_tcp(&port.protocol))
    {
        at.field("addresses")
            .warning("are shared by several hosts, so proxies cannot tell connections to them apart");
    }
}

fn by_resolution(at: &FieldPath<'_>, entry: &ServiceEntry, resolution: Resolution) {
    match resolution {
        Resolution::None => {
            at.field("endpoints")
                .require_on_admission(entry.endpoints.is_empty(), "resolution NONE takes no endpoints");
            if entry.workload_selector.is_some() {
                at.field("workloadSelector")
                    .warning("has no effect with resolution NONE");
            }
        }
        Resolution::Static => static_endpoints(at, entry),
        Resolution::Dns | Resolution::DnsRoundRobin => resolved_hosts(at, entry, resolution),
        Resolution::DynamicDns => dynamic_hosts(at, entry),
    }
    if entry.hosts.len() > 1 && resolution != Resolution::None {
        at.each("ports", &entry.ports, |at, port| {
            let names_hosts = common::is_plain_http(&port.protocol) || common::is_tls(&port.protocol);
            at.field("protocol").require_on_admission(
                names_hosts,
                "several hosts need a protocol with host names, HTTP or TLS",
            );
        });
    }
    ports_of_endpoints(at, entry);
    if entry.location() == Location::MeshExternal && entry.ports.is_empty() && resolution == Resolution::Dns {
        at.field("ports").warning("without ports there is nothing to send to");
    }
}

/// Checks the addresses of endpoints with resolution STATIC.
fn static_endpoints(at: &FieldPath<'_>, entry: &ServiceEntry) {
    at.each("endpoints", &entry.endpoints, |at, endpoint| {
        let address = endpoint.address.as_str();
        let by_network = address.is_empty() && !endpoint.network.is_empty();
        let fits = by_network || address.starts_with("unix://") || cidr::parse_ip(address).is_some();
        at.field("address")
            .require(fits, "with resolution STATIC this is an IP address");
        if by_network {
            at.field("address")
                .warning("without an address the endpoint is reached through a gateway of its network only");
        }
        if let Some(path) = address.strip_prefix("unix://") {
            common::unix_path_on_admission(&at.field("address"), path);
            at.field("address").require_on_admission(
                entry.ports.len() == 1,
                "a unix socket needs a ServiceEntry with one port",
            );
            at.field("ports")
                .require_on_admission(endpoint.ports.is_empty(), "a unix socket has no ports");
        }
    });
}

/// Checks what DNS resolves: the addresses of endpoints, or else the hosts.
fn resolved_hosts(at: &FieldPath<'_>, entry: &ServiceEntry, resolution: Resolution) {
    if entry.endpoints.is_empty() {
        at.each("hosts", &entry.hosts, |at, host| {
            at.require_on_admission(
                is_fqdn(host),
                "without endpoints a host must be a full name for DNS to resolve",
            );
        });
    }
    if resolution == Resolution::DnsRoundRobin {
        at.field("endpoints").require_on_admission(
            entry.endpoints.len() <= 1,
            "resolution DNS_ROUND_ROBIN takes one endpoint",
        );
    }
    at.each("endpoints", &entry.endpoints, |at, endpoint| {
        let address = endpoint.address.as_str();
        let by_network = address.is_empty() && !endpoint.network.is_empty();
        let fits = by_network || is_fqdn(address) || cidr::parse_ip(address).is_some();
        at.field("address")
            .require(fits, "is neither a host name nor an IP address");
        at.field("address")
            .require_on_admission(!by_network, "is required with resolution DNS");
    });
}

/// Checks an entry whose hosts proxies resolve for each request or connection.
fn dynamic_hosts(at: &FieldPath<'_>, entry: &ServiceEntry) {
    at.each("hosts", &entry.hosts, |at, host| {
        at.require(host.starts_with('*'), "resolution DYNAMIC_DNS takes wildcard hosts");
    });
    at.field("addresses")
        .require_on_admission(entry.addresses.is_empty(), "resolution DYNAMIC_DNS takes no addresses");
    at.field("endpoints")
        .require_on_admission(entry.endpoints.is_empty(), "resolution DYNAMIC_DNS takes no endpoints");
    at.each("ports", &entry.ports, |at, port| {
        let mut known = DYNAMIC_PROTOCOLS.iter();
        let is_known = known.any(|known| known.eq_ignore_ascii_case(&port.protocol));
        at.field("protocol")
            .require_on_admission(is_known, "resolution DYNAMIC_DNS needs HTTP, HTTP2, GRPC or TLS");
    });
}

/// Checks ports and labels of endpoints.
fn ports_of_endpoints(at: &FieldPath<'_>, entry: &ServiceEntry) {
    let names: BTreeSet<&str> = entry.ports.iter().map(|port| port.name.as_str()).collect();
    at.each("endpoints", &entry.endpoints, |at, endpoint| {
        for name in endpoint.ports.keys() {
            if !names.contains(name.as_str()) {
                at.field("ports")
                    .refuse(format!("{name:?} is not a port of the ServiceEntry"));
            }
        }
        workload::ports_and_labels(at, endpoint);
    });
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::{
        api::istio::{ErrorPolicy, Validation},
        proto::istio::networking::v1alpha3::{ServicePort, WorkloadEntry},
    };

    #[test]
    fn many_ports_of_endpoints_are_checked_in_one_pass() {
        let names = || (0..50_000).map(|number| format!("p{number}"));
        let endpoint = WorkloadEntry {
            ports: names().chain(["unknown".to_owned()]).map(|name| (name, 80)).collect(),
            ..Default::default()
        };
        let port = |name| ServicePort {
            name,
            ..Default::default()
        };
        let entry = ServiceEntry {
            hosts: vec!["a.com".to_owned()],
            ports: names().map(port).collect(),
            endpoints: vec![endpoint],
            ..Default::default()
        };
        let validation = RefCell::<Validation>::default();
        let at = FieldPath::root("spec", ErrorPolicy::Reject, &validation);
        by_resolution(&at, &entry, Resolution::Dns);
        let found = validation.into_inner().refusals;
        let messages: Vec<&str> = found.iter().map(|found| found.message.as_str()).collect();
        assert_eq!(messages, ["\"unknown\" is not a port of the ServiceEntry"]);
    }
}
