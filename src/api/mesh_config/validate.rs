//! Validation of mesh configs. After an error the last valid one stays in use.

use std::collections::BTreeSet;

use prost_types::Duration;

use crate::{
    api::{
        istio::{common, field_path::FieldPath, traffic_policy, virtual_service},
        mesh_config::selector,
        names::{is_fqdn, is_label, is_partial_wildcard, is_wildcard_domain},
    },
    base::{
        address::{HostPort, Port},
        cidr,
        url::{Url, is_escaped_well},
    },
    proto::istio::mesh::v1alpha1::{
        MeshConfig, ProxyConfig,
        mesh_config::{ExtensionProvider, extension_provider::Provider as Extension},
        private_key_provider::Provider,
        proxy_config::ClusterName,
        tracing::{Tracer, custom_tag::Type},
    },
};

const NO_PORT: &str = "is not a port, want 1 to 65535";
/// The variable that made agents allocate addresses.
const AUTO_ALLOCATION: &str = "ISTIO_META_DNS_AUTO_ALLOCATE";
/// The ECDH curves of BoringSSL. Parity (pkg/config/security/security.go).
const CURVES: [&str; 7] = [
    "P-224",
    "P-256",
    "P-384",
    "P-521",
    "X25519",
    "X25519Kyber768Draft00",
    "X25519MLKEM768",
];
/// The maximum connect timeout, in seconds.
const MAX_CONNECT_TIMEOUT: i64 = 3600;

/// Checks a merged mesh config.
pub(super) fn mesh_config(at: &FieldPath<'_>, config: &MeshConfig) {
    at.field("proxyListenPort")
        .require(is_port(config.proxy_listen_port), NO_PORT);
    // Istio does not check the others.
    let inbound = at.field("proxyInboundListenPort");
    inbound.require_on_admission(config.proxy_inbound_listen_port != 0, NO_PORT);
    if !is_port_or_unset(config.proxy_inbound_listen_port) {
        inbound.warning("is not a port, which proxies reject; the default applies");
    }
    if !is_port_or_unset(config.proxy_http_port) {
        at.field("proxyHttpPort")
            .warning("is not a port, which proxies reject; they have no such listener");
    }
    durations(at, config);
    trust_domains(at, config);
    if let Some(setting) = &config.locality_lb_setting {
        traffic_policy::locality(&at.field("localityLbSetting"), setting);
    }
    at.each("serviceSettings", &config.service_settings, |at, settings| {
        at.field("hosts")
            .require_on_admission(!settings.hosts.is_empty(), "is empty, so the settings have no effect");
        at.each("hosts", &settings.hosts, |at, host| common::wildcard_domain(at, host));
    });
    at.each("discoverySelectors", &config.discovery_selectors, |at, written| {
        if !selector(written).is_valid() {
            at.warning(
                "is not a valid label selector, so discoverySelectors are ignored, and the last valid ones stay; \
                 hint: In and NotIn need values, Exists and DoesNotExist have none",
            );
        }
    });
    if let Some(retries) = &config.default_http_retry_policy {
        virtual_service::http_retries(&at.field("defaultHttpRetryPolicy"), retries);
    }
    if let Some(tls) = &config.mesh_m_tls {
        at.field("meshMTLS")
            .field("ecdhCurves")
            .require(tls.ecdh_curves.is_empty(), "is not supported for mutual TLS");
    }
    if let Some(tls) = &config.tls_defaults {
        ecdh_curves(&at.field("tlsDefaults"), &tls.ecdh_curves);
    }
    extension_providers(at, &config.extension_providers);
    match &config.default_config {
        Some(proxy) => proxy_config(&at.field("defaultConfig"), proxy),
        None => at.field("defaultConfig").error("is required"),
    }
}

fn ecdh_curves(at: &FieldPath<'_>, curves: &[String]) {
    let mut seen = BTreeSet::new();
    at.each("ecdhCurves", curves, |at, curve| {
        if !curve.is_empty() && !CURVES.contains(&curve.as_str()) {
            at.warning(format!(
                "{curve:?} is not a curve that proxies know, so they may refuse all listeners with TLS"
            ));
        } else if !seen.insert(curve) {
            at.warning(format!("{curve:?} is a duplicate"));
        }
    });
}

fn durations(at: &FieldPath<'_>, config: &MeshConfig) {
    let connect = at.field("connectTimeout");
    match &config.connect_timeout {
        None => connect.error("is required"),
        Some(timeout) => {
            common::duration(&connect, Some(timeout));
            connect.require(timeout.nanos % 1_000_000 == 0, "only whole milliseconds are supported");
            connect.require(timeout.seconds <= MAX_CONNECT_TIMEOUT, "is longer than 1h");
        }
    }
    if let Some(timeout) = &config.protocol_detection_timeout {
        let at = at.field("protocolDetectionTimeout");
        if is_negative(timeout) {
            at.warning("is negative and counts as 0s");
        }
        at.require(timeout.nanos % 1_000_000 == 0, "only whole milliseconds are supported");
    }
    if config.dns_refresh_rate.as_ref().is_some_and(is_below_a_millisecond) {
        at.field("dnsRefreshRate")
            .warning("is below 1ms, which proxies reject; their default applies");
    }
}

/// Returns true if one of `discoverySelectors` is invalid.
pub(super) fn has_invalid_selectors(config: &MeshConfig) -> bool {
    config
        .discovery_selectors
        .iter()
        .any(|written| !selector(written).is_valid())
}

/// Replaces values that Istio accepts and proxies reject.
pub(super) fn normalize(config: &mut MeshConfig) {
    if config.protocol_detection_timeout.as_ref().is_some_and(is_negative) {
        config.protocol_detection_timeout = Some(Duration::default());
    }
    if config.dns_refresh_rate.as_ref().is_some_and(is_below_a_millisecond) {
        config.dns_refresh_rate = None;
    }
    if !is_port_or_unset(config.proxy_inbound_listen_port) {
        config.proxy_inbound_listen_port = super::defaults().proxy_inbound_listen_port;
    }
    if !is_port_or_unset(config.proxy_http_port) {
        config.proxy_http_port = 0;
    }
    // Without the invalid one, the others would select less than the user wants.
    if has_invalid_selectors(config) {
        config.discovery_selectors.clear();
    }
    let headers = config
        .default_config
        .as_mut()
        .and_then(|proxy| proxy.proxy_headers.as_mut());
    if let Some(server) = headers.and_then(|headers| headers.server.as_mut())
        && !common::is_header_text(&server.value)
    {
        server.value.clear();
    }
}

fn is_negative(duration: &Duration) -> bool {
    duration.seconds < 0 || duration.nanos < 0
}

fn is_below_a_millisecond(duration: &Duration) -> bool {
    is_negative(duration) || duration.seconds == 0 && duration.nanos < 1_000_000
}

fn is_port(port: i32) -> bool {
    (1..=65_535).contains(&port)
}

fn is_port_or_unset(port: i32) -> bool {
    port == 0 || is_port(port)
}

fn trust_domains(at: &FieldPath<'_>, config: &MeshConfig) {
    // Unlike a host name, it may end with a number, such as that of an account.
    let fits = |domain: &str| {
        let domain = domain.replace(['@', '_'], "-");
        let mut labels = domain.strip_suffix('.').unwrap_or(&domain).split('.');
        labels.all(is_label)
    };
    at.field("trustDomain")
        .require(fits(&config.trust_domain), "is not a trust domain");
    at.each("trustDomainAliases", &config.trust_domain_aliases, |at, alias| {
        at.require(fits(alias), "is not a trust domain");
    });
}

/// Checks providers. All problems are warnings: an invalid provider is ignored, the rest of the mesh config applies.
fn extension_providers(at: &FieldPath<'_>, providers: &[ExtensionProvider]) {
    let mut names = BTreeSet::new();
    at.each("extensionProviders", providers, |at, provider| {
        at.field("name")
            .require_on_admission(!provider.name.is_empty(), "is required");
        at.field("name")
            .require_on_admission(names.insert(&provider.name), "is a duplicate");
        match &provider.provider {
            Some(kind) => extension_provider(at, kind),
            None => at.refuse("names no kind of provider"),
        }
    });
}

/// Checks the settings of a provider.
///
/// Parity (pkg/config/validation/agent/extensionprovider.go).
fn extension_provider(at: &FieldPath<'_>, provider: &Extension) {
    let (kind, service, port) = match provider {
        Extension::EnvoyExtAuthzHttp(settings) => ("envoyExtAuthzHttp", &settings.service, settings.port),
        Extension::EnvoyExtAuthzGrpc(settings) => ("envoyExtAuthzGrpc", &settings.service, settings.port),
        Extension::Zipkin(settings) => ("zipkin", &settings.service, settings.port),
        Extension::Lightstep(settings) => ("lightstep", &settings.service, settings.port),
        Extension::Datadog(settings) => ("datadog", &settings.service, settings.port),
        Extension::Opencensus(settings) => ("opencensus", &settings.service, settings.port),
        Extension::Skywalking(settings) => ("skywalking", &settings.service, settings.port),
        Extension::Opentelemetry(settings) => ("opentelemetry", &settings.service, settings.port),
        Extension::EnvoyHttpAls(settings) => ("envoyHttpAls", &settings.service, settings.port),
        Extension::EnvoyTcpAls(settings) => ("envoyTcpAls", &settings.service, settings.port),
        Extension::EnvoyOtelAls(settings) => ("envoyOtelAls", &settings.service, settings.port),
        Extension::Stackdriver(_) | Extension::Prometheus(_) | Extension::EnvoyFileAccessLog(_) | Extension::Sds(_) => {
            return;
        }
    };
    let at = at.field(kind);
    at.field("service")
        .require_on_admission(is_service(service), "want a host, or namespace/host");
    at.field("port")
        .require_on_admission((1..=65_535).contains(&port), NO_PORT);
    match provider {
        Extension::EnvoyExtAuthzHttp(authorizer) => {
            let prefix = &authorizer.path_prefix;
            let is_path = prefix.starts_with('/') && Url::parse(prefix).is_some();
            at.field("pathPrefix")
                .require_on_admission(prefix.is_empty() || is_path, "is no path, so the policies deny");
        }
        Extension::Lightstep(tracer) => at
            .field("accessToken")
            .require_on_admission(!tracer.access_token.is_empty(), "is required"),
        Extension::Opentelemetry(tracer) => {
            at.require_on_admission(tracer.http.is_none() || tracer.grpc.is_none(), "has both http and grpc");
            let path = tracer.http.as_ref().map_or("", |http| http.path.as_str());
            at.field("http")
                .field("path")
                .require_on_admission(is_escaped_well(path), "has an invalid escape, so no traces are sent");
        }
        _ => {}
    }
}

/// Returns true for the host of a service, which a namespace and a slash may precede.
fn is_service(text: &str) -> bool {
    match text.split_once('/') {
        None => is_fqdn(text) || cidr::is_ip_or_zoned(text),
        Some((namespace, host)) => {
            let is_full = host == "*" || host.contains('.');
            (matches!(namespace, "*" | "." | "~") || is_label(namespace))
                && is_wildcard_domain(host)
                && is_full
                && !is_partial_wildcard(host)
        }
    }
}

/// Checks a proxy config of the mesh or of an annotation.
pub(super) fn proxy_config(at: &FieldPath<'_>, config: &ProxyConfig) {
    at.field("configPath")
        .require(!config.config_path.is_empty(), "is required");
    at.field("binaryPath")
        .require(!config.binary_path.is_empty(), "is required");
    if let Some(ClusterName::ServiceCluster(name)) = &config.cluster_name {
        at.field("serviceCluster").require(!name.is_empty(), "is empty");
    }
    if let Some(matcher) = &config.proxy_stats_matcher {
        let at = at.field("proxyStatsMatcher");
        at.each("inclusionRegexps", &matcher.inclusion_regexps, |at, expression| {
            // Istio does not check these, and proxies accept longer ones than those of routes.
            at.warn_of_regex(expression);
        });
    }
    if let Some(duration) = &config.drain_duration {
        whole_seconds(&at.field("drainDuration"), duration);
    }
    at.field("discoveryAddress")
        .require(is_host_and_port(&config.discovery_address), "want host:port");
    for (name, address) in [
        ("statsdUdpAddress", &config.statsd_udp_address),
        ("envoyMetricsServiceAddress", &config.envoy_metrics_service_address),
    ] {
        at.field(name)
            .require(address.is_empty() || is_host_and_port(address), "want host:port");
    }
    for (name, service) in [
        ("envoyMetricsService", &config.envoy_metrics_service),
        ("envoyAccessLogService", &config.envoy_access_log_service),
    ] {
        let address = service.as_ref().map_or("", |service| service.address.as_str());
        at.field(name)
            .field("address")
            .require(address.is_empty() || is_host_and_port(address), "want host:port");
    }
    let metadata = at.field("proxyMetadata");
    if config.proxy_metadata.contains_key(AUTO_ALLOCATION) {
        metadata
            .field(AUTO_ALLOCATION)
            .warning("is deprecated, because addresses are allocated in the statuses of ServiceEntries");
    }
    tracing(at, config);
    let headers = config.proxy_headers.as_ref();
    if let Some(server) = headers.and_then(|headers| headers.server.as_ref())
        && !common::is_header_text(&server.value)
    {
        at.field("proxyHeaders")
            .field("server")
            .field("value")
            .warning("has a line break, which proxies reject; the default applies");
    }
    for (name, port) in [
        ("proxyAdminPort", config.proxy_admin_port),
        ("statusPort", config.status_port),
    ] {
        at.field(name).require(is_port(port), NO_PORT);
    }
    at.field("concurrency")
        .require_on_admission(config.concurrency.unwrap_or_default() >= 0, "must not be negative");
    let Some(keys) = &config.private_key_provider else {
        return;
    };
    let at = at.field("privateKeyProvider");
    let delay = match &keys.provider {
        Some(Provider::Cryptomb(provider)) => provider.poll_delay.as_ref(),
        Some(Provider::Qat(provider)) => provider.poll_delay.as_ref(),
        None => return at.error("names no provider, want cryptomb or qat"),
    };
    let positive = delay.is_some_and(|delay| delay.seconds > 0 || delay.seconds == 0 && delay.nanos > 0);
    at.require(positive, "pollDelay is required and must be above 0");
}

fn tracing(at: &FieldPath<'_>, config: &ProxyConfig) {
    let Some(tracing) = &config.tracing else { return };
    let at = at.field("tracing");
    if let Some(Tracer::Lightstep(tracer)) = &tracing.tracer {
        at.field("lightstep")
            .field("accessToken")
            .require(!tracer.access_token.is_empty(), "is required");
    }
    let address = match &tracing.tracer {
        Some(Tracer::Zipkin(tracer)) => Some(&tracer.address),
        Some(Tracer::Lightstep(tracer)) => Some(&tracer.address),
        Some(Tracer::Datadog(tracer)) => Some(&tracer.address),
        Some(Tracer::OpenCensusAgent(_) | Tracer::Stackdriver(_)) | None => None,
    };
    // Without one, agents would not start.
    at.require(
        address.is_none_or(|address| is_host_and_port(address)),
        "the address: want host:port",
    );
    if let Some(tls) = &tracing.tls_settings {
        traffic_policy::client_tls(&at.field("tlsSettings").strict(), tls, "");
    }
    // Parity (pkg/config/validation/agent/validation.go, `validateCustomTags`): Istio refuses nil tags only, and its
    // parser never makes one: `null` is an empty tag.
    let tags = at.field("customTags");
    for (name, tag) in &tracing.custom_tags {
        let text = match &tag.r#type {
            Some(Type::Literal(literal)) => literal.value.as_str(),
            Some(Type::Environment(environment)) => &environment.name,
            Some(Type::Header(header)) => &header.name,
            None => "",
        };
        if name.is_empty() || text.is_empty() {
            tags.field(name)
                .warning("has no effect: want a name, and a literal, environment or header with a value");
        }
    }
    let at = at.field("sampling");
    if tracing.sampling > 100.0 {
        // Parity (pilot/pkg/networking/core/tracing.go).
        at.warning("is above 100 and counts as 1");
    } else if tracing.sampling < 0.0 {
        at.warning("is negative, which proxies reject; the default applies");
    }
}

fn whole_seconds(at: &FieldPath<'_>, duration: &Duration) {
    at.require(
        duration.seconds >= 1 || duration.seconds == 0 && duration.nanos > 0,
        "must be above 0",
    );
    at.require(duration.nanos == 0, "only whole seconds are supported");
}

/// Returns true for `host:port`. The agent replaces variables such as `$(HOST_IP)`.
///
/// Parity (pkg/config/validation/agent/validation.go, `ValidateProxyAddress`): IPv6 addresses have brackets.
fn is_host_and_port(text: &str) -> bool {
    let Ok(HostPort { host, port }) = HostPort::parse(text) else {
        return false;
    };
    let is_known = host.contains('$') || is_fqdn(&host) || cidr::is_ip_or_zoned(&host);
    is_known && matches!(port, Port::Number(1..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_agents_have_a_host_and_a_port() {
        for (text, is_address) in [
            ("istiod.istio-system.svc:15012", true),
            ("10.0.0.1:9125", true),
            ("[fd00::1]:15012", true),
            ("[fe80::1%eth0]:9125", true),
            ("$(HOST_IP):8126", true),
            ("fd00::1:15012", false),
            ("[fd00::1]", false),
            ("istiod", false),
            ("istiod:", false),
            ("istiod:0", false),
            ("istiod:70000", false),
            ("istiod:https", false),
            (":15012", false),
            ("a b:1", false),
        ] {
            assert_eq!(is_host_and_port(text), is_address, "{text}");
        }
    }
}
