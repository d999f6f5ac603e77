//! Clusters of wildcard hosts, which the proxy resolves per request, and of hosts that extension providers name.

use crate::{
    base::host,
    generate::name::ClusterMode,
    model::{
        Service,
        envoy_filter::ReferencedService,
        features::Features,
        service::{Protocol, Resolution},
    },
    proto::{
        envoy::{
            config::cluster::v3::cluster::DnsLookupFamily,
            extensions::common::dynamic_forward_proxy::v3::DnsCacheConfig,
        },
        istio::mesh::v1alpha1::mesh_config::{ExtensionProvider, extension_provider::Provider},
    },
};

/// Returns the DNS cache of a wildcard host; the listener's filter refers to it too.
pub fn dns_cache(host: &str) -> DnsCacheConfig {
    DnsCacheConfig {
        name: format!("{host}_dfp_dns_cache"),
        dns_lookup_family: DnsLookupFamily::V4Only as i32,
        ..Default::default()
    }
}

/// Returns true if the proxy resolves the host per request. SNI clusters are excluded.
pub(super) fn is_dynamic(service: &Service, mode: ClusterMode) -> bool {
    let resolved = service.resolution == Resolution::DynamicDns && mode != ClusterMode::SniDnat;
    resolved && host::is_wildcard(&service.key.hostname)
}

/// Returns true for protocols in which a request names its host.
pub(super) fn serves(protocol: Protocol) -> bool {
    matches!(
        protocol,
        Protocol::Http | Protocol::Tls | Protocol::Grpc | Protocol::Http2
    )
}

/// Returns true if a waypoint serves a port of a dynamic host: it finds the host in requests and in the SNI.
pub(super) fn serves_behind_waypoint(protocol: Protocol, features: &Features) -> bool {
    match protocol {
        Protocol::Http => true,
        Protocol::Tls => features.enable_wildcard_host_service_entries_for_tls,
        _ => false,
    }
}

/// Returns the service of an extension provider.
///
/// Parity (pilot/pkg/model/push_context.go): those of Lightstep and OpenCensus do not count.
pub(super) fn provider_service(provider: &ExtensionProvider) -> Option<ReferencedService> {
    let service = match provider.provider.as_ref()? {
        Provider::EnvoyExtAuthzHttp(provider) => &provider.service,
        Provider::EnvoyExtAuthzGrpc(provider) => &provider.service,
        Provider::Zipkin(provider) => &provider.service,
        Provider::Datadog(provider) => &provider.service,
        Provider::Skywalking(provider) => &provider.service,
        Provider::Opentelemetry(provider) => &provider.service,
        Provider::EnvoyHttpAls(provider) => &provider.service,
        Provider::EnvoyTcpAls(provider) => &provider.service,
        Provider::EnvoyOtelAls(provider) => &provider.service,
        Provider::Sds(provider) => &provider.service,
        Provider::Lightstep(_)
        | Provider::Opencensus(_)
        | Provider::Stackdriver(_)
        | Provider::Prometheus(_)
        | Provider::EnvoyFileAccessLog(_) => return None,
    };
    Some(ReferencedService::parse(service))
}
