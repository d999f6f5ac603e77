//! Validation of WorkloadEntries and WorkloadGroups.

use super::{common, field_path::FieldPath};
use crate::{
    api::{
        Meta,
        names::{is_fqdn, is_label},
    },
    base::cidr,
    proto::istio::networking::v1alpha3::{
        ReadinessProbe, WorkloadEntry, WorkloadGroup, readiness_probe::HealthCheckMethod,
    },
};

/// Checks a WorkloadEntry.
pub fn entry(at: &FieldPath<'_>, entry: &WorkloadEntry, _meta: &Meta) {
    let address_at = at.field("address");
    let address = entry.address.as_str();
    if address.is_empty() {
        address_at.require(!entry.network.is_empty(), "is required, unless a network is given");
        if !entry.network.is_empty() {
            address_at.warning("without an address the entry is reached through a gateway of its network only");
        }
    } else if let Some(path) = address.strip_prefix("unix://") {
        common::unix_path(&address_at, path);
        at.field("ports")
            .require(entry.ports.is_empty(), "a unix socket has no ports");
    } else {
        let fits = is_fqdn(address) || cidr::parse_ip(address).is_some();
        address_at.require(fits, "is neither a host name nor an IP address");
    }
    ports_and_labels(at, entry);
}

/// Checks ports and labels of a WorkloadEntry or of an endpoint in a ServiceEntry.
pub fn ports_and_labels(at: &FieldPath<'_>, entry: &WorkloadEntry) {
    for (name, number) in &entry.ports {
        let at = at.field("ports");
        common::port_name(&at, name);
        common::port(&at.field(name), *number);
    }
    for (key, value) in &entry.labels {
        common::label(&at.field("labels"), key, value);
    }
}

/// Checks a WorkloadGroup.
pub fn group(at: &FieldPath<'_>, group: &WorkloadGroup, _meta: &Meta) {
    match &group.template {
        Some(found) => template(&at.field("template"), found),
        None => at.field("template").error("is required"),
    }
    if let Some(metadata) = &group.metadata {
        for (key, value) in &metadata.labels {
            common::label(&at.field("metadata").field("labels"), key, value);
        }
    }
    if let Some(probe) = &group.probe {
        self::probe(&at.field("probe"), probe);
    }
}

/// Warns of ports and labels of a template with which machines cannot be registered.
///
/// Parity (pkg/config/validation/validation.go, `ValidateWorkloadGroup`): admission does not check the template. The
/// labels of the group's metadata and those of a machine replace those of the template.
fn template(at: &FieldPath<'_>, template: &WorkloadEntry) {
    for (name, number) in &template.ports {
        if !is_label(name) || !(1..=65_535).contains(number) {
            at.field("ports")
                .field(name)
                .warning("needs a name of letters, digits and `-`, and a port from 1 to 65535");
        }
    }
    for (key, value) in &template.labels {
        if !common::is_label_pair(key, value) {
            at.field("labels")
                .warning(format!("{key:?} with the value {value:?} is not a label"));
        }
    }
}

fn probe(at: &FieldPath<'_>, probe: &ReadinessProbe) {
    for (name, number) in [
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ] {
        at.field(name).require(number >= 0, "must not be negative");
    }
    match &probe.health_check_method {
        Some(HealthCheckMethod::HttpGet(http)) => {
            let at = at.field("httpGet");
            common::port(&at.field("port"), http.port);
            let scheme = http.scheme.as_str();
            at.field("scheme")
                .require(matches!(scheme, "" | "HTTP" | "HTTPS"), "want HTTP or HTTPS");
            at.each("httpHeaders", &http.http_headers, |at, header| {
                let at = at.field("name");
                common::header_name(&at, &header.name);
                // Parity (pkg/config/validation/validation.go, `ValidateProbeHeaderName`).
                at.require_on_admission(!header.name.contains('_'), "has an underscore");
            });
        }
        Some(HealthCheckMethod::TcpSocket(tcp)) => common::port(&at.field("tcpSocket").field("port"), tcp.port),
        Some(HealthCheckMethod::Grpc(grpc)) => common::port(&at.field("grpc").field("port"), grpc.port),
        Some(HealthCheckMethod::Exec(exec)) => {
            at.field("exec")
                .field("command")
                .require(!exec.command.is_empty(), "is required");
        }
        None => at.error("needs httpGet, tcpSocket, exec or grpc"),
    }
}
