//! Validation of VirtualServices.

mod unreachable;

use std::collections::{BTreeMap, BTreeSet};

use super::{common, field_path::FieldPath, format_string};
use crate::{
    api::{
        Meta,
        names::{
            claim_path, grpc_status_code, is_cluster_server_name, is_fqdn, is_header_list, is_header_name,
            is_http_status, is_label, is_partial_wildcard, is_wildcard_domain,
        },
    },
    base::cidr,
    proto::istio::networking::v1alpha3::{
        CorsPolicy, Destination, Headers, HttpDirectResponse, HttpFaultInjection, HttpMatchRequest, HttpRedirect,
        HttpRetry, HttpRewrite, HttpRoute, HttpRouteDestination, L4MatchAttributes, Percent, RouteDestination,
        StringMatch, TcpRoute, TlsMatchAttributes, TlsRoute, VirtualService,
        headers::HeaderOperations,
        http_body::Specifier,
        http_fault_injection::{abort::ErrorType, delay::HttpDelayType},
        http_redirect::RedirectPort,
        string_match::MatchType,
    },
};

/// The maximum size of a direct response body, in bytes.
const MAX_BODY: usize = 1 << 20;
/// Bodies above this size get a warning.
const LARGE_BODY: usize = 100 << 10;
/// The maximum length of the name of a query parameter, in bytes.
const MAX_QUERY_PARAMETER: usize = 1024;
/// The pseudo-headers of HTTP/2 and HTTP/3.
const PSEUDO_HEADERS: [&str; 5] = [":method", ":scheme", ":authority", ":path", ":status"];
/// The maximum numbers of headers that a route adds to requests and to responses. Envoy accepts 1,000 of each, and one
/// of a response may advertise HTTP/3.
const MAX_ADDED_HEADERS: [usize; 2] = [1000, 999];
/// The smallest percentage of faults above 0: Envoy counts in parts of a million.
const LEAST_FAULTS: f64 = 0.0001;

/// Checks a VirtualService.
pub fn check(at: &FieldPath<'_>, service: &VirtualService, meta: &Meta) {
    let delegate = service.hosts.is_empty();
    if delegate {
        at.field("gateways").require_on_admission(
            service.gateways.is_empty(),
            "a VirtualService without hosts is a delegate and has no gateways",
        );
        at.field("tls")
            .require_on_admission(service.tls.is_empty(), "a delegate has only http routes");
        at.field("tcp")
            .require_on_admission(service.tcp.is_empty(), "a delegate has only http routes");
    }
    if service.http.is_empty() && service.tcp.is_empty() && service.tls.is_empty() {
        at.refuse("has no http, tcp or tls routes");
    }
    gateways(at, &service.gateways);
    hosts(at, service);
    common::export_to(at, &service.export_to, meta.namespace(), false);
    at.each("http", &service.http, |at, route| {
        http_route(at, route, delegate, &service.gateways);
    });
    let names = ServerNames::of(service);
    at.each("tls", &service.tls, |at, route| tls_route(at, route, &names));
    at.each("tcp", &service.tcp, tcp_route);
    unreachable::check(at, service);
}

/// Checks names of gateways.
///
/// Parity (pkg/config/validation/validation.go, `validateGatewayNames`): admission does not check those after the first
/// one without a slash.
fn gateways(at: &FieldPath<'_>, gateways: &[String]) {
    let mut is_checked = true;
    at.each("gateways", gateways, |at, gateway| {
        let fits = match gateway.split_once('/') {
            Some((namespace, name)) => is_label(namespace) && is_label(name),
            None => is_fqdn(gateway),
        };
        if !fits {
            let message = format!("{gateway:?} is not a gateway, want name or namespace/name");
            if is_checked {
                at.refuse(message);
            } else {
                at.warning(message);
            }
        } else if !gateway.contains('/') && gateway.contains('.') {
            at.warning(format!("{gateway:?}: write namespace/name"));
        }
        is_checked &= gateway.contains('/');
    });
}

fn hosts(at: &FieldPath<'_>, service: &VirtualService) {
    let mesh = includes_mesh(&service.gateways);
    let mut matches = service.tls.iter().flat_map(|route| &route.r#match);
    let by_server_name = !mesh && matches.any(|matched| !matched.sni_hosts.is_empty());
    let wildcards: BTreeSet<_> = service.hosts.iter().filter_map(|host| host.strip_prefix('*')).collect();
    let mut seen = BTreeSet::new();
    at.each("hosts", &service.hosts, |at, host| {
        let is_host = cidr::is_ip_or_zoned(host) || is_wildcard_domain(host);
        let is_server_name = by_server_name && is_cluster_server_name(host);
        if !(is_host || is_server_name) {
            at.error(format!("{host:?} is not a host name"));
        }
        if host == "*" && mesh {
            at.refuse("`*` needs a gateway other than mesh");
        }
        if !seen.insert(host) {
            at.refuse(format!("{host:?} is a duplicate"));
        } else if let Some(wildcard) = covering(host, &wildcards) {
            at.refuse(format!("{host:?} is a duplicate, \"*{wildcard}\" covers it"));
        }
    });
}

/// Returns true if the routes apply to sidecars.
fn includes_mesh(gateways: &[String]) -> bool {
    gateways.is_empty() || gateways.iter().any(|gateway| gateway == "mesh")
}

/// Returns the suffix of another wildcard that covers a host. The cost is that of the host's length, because a tenant
/// may write thousands of hosts.
fn covering<'w>(host: &str, wildcards: &BTreeSet<&'w str>) -> Option<&'w str> {
    let own = host.strip_prefix('*');
    let name = own.unwrap_or(host);
    let suffixes = name.char_indices().map(|(start, _)| &name[start..]).chain([""]);
    let mut others = suffixes.filter(|suffix| Some(*suffix) != own);
    others.find_map(|suffix| wildcards.get(suffix).copied())
}

fn http_route(at: &FieldPath<'_>, route: &HttpRoute, delegate: bool, gateways: &[String]) {
    at.each("match", &route.r#match, |at, matched| http_match(at, matched, gateways));
    actions(at, route, delegate);
    destinations(at, &route.route);
    let timeout = route
        .timeout
        .filter(|timeout| *timeout != prost_types::Duration::default());
    at.field("timeout").require_on_admission(
        route.timeout.is_none() || timeout.is_some(),
        "is 0, which is the default",
    );
    common::duration(&at.field("timeout"), timeout.as_ref());
    if let Some(redirect) = &route.redirect {
        http_redirect(&at.field("redirect"), redirect);
    }
    if let Some(response) = &route.direct_response {
        direct_response(&at.field("directResponse"), response);
    }
    if let Some(rewrite) = &route.rewrite {
        http_rewrite(&at.field("rewrite"), rewrite);
    }
    if let Some(retries) = &route.retries {
        let at = at.field("retries");
        http_retries(&at, retries);
        retry_conditions(&at.field("retryOn"), &retries.retry_on);
        // Parity (pkg/config/validation/validation.go, `validateHTTPRetry`): the mesh config may have 0.
        at.field("perTryTimeout").require_on_admission(
            retries.per_try_timeout != Some(prost_types::Duration::default()),
            "is 0, which is the default",
        );
    }
    if let Some(fault) = &route.fault {
        http_fault(&at.field("fault"), fault);
    }
    if let Some(cors) = &route.cors_policy {
        cors_policy(&at.field("corsPolicy"), cors);
    }
    mirrors(at, route);
    headers(at, route.headers.as_deref());
    let few = adds_few_headers(route);
    at.field("headers").require(
        few,
        "with those of destinations, adds more than 1000 headers to requests or 999 to responses",
    );
    authority(at, route);
}

/// Returns true if Envoy accepts the number of headers that a route adds. It adds those of its only destination too.
pub fn adds_few_headers(route: &HttpRoute) -> bool {
    let count = |operations: Option<&HeaderOperations>| {
        let names = operations
            .into_iter()
            .flat_map(|operations| operations.set.keys().chain(operations.add.keys()));
        names.filter(|name| !is_internal(name)).count()
    };
    let added = |headers: Option<&Headers>| {
        let operations = headers.map_or([None; 2], |headers| {
            [headers.request.as_ref(), headers.response.as_ref()]
        });
        operations.map(count)
    };
    let own = added(route.headers.as_deref());
    let of_destinations = route.route.iter().map(|destination| {
        let further = added(destination.headers.as_deref());
        match route.route.len() {
            1 => [own[0] + further[0], own[1] + further[1]],
            _ => further,
        }
    });
    let mut counts = of_destinations.chain([own]);
    counts.all(|added| added[0] <= MAX_ADDED_HEADERS[0] && added[1] <= MAX_ADDED_HEADERS[1])
}

/// Checks that at most one field of a route sets the authority.
fn authority(at: &FieldPath<'_>, route: &HttpRoute) {
    let rewrite = route.rewrite.as_ref().map(|rewrite| rewrite.authority.as_str());
    let operations = route.headers.as_ref().and_then(|headers| headers.request.as_ref());
    let names = operations
        .into_iter()
        .flat_map(|operations| operations.set.keys().chain(operations.add.keys()));
    let set = names.filter(|name| is_authority(name)).count();
    let rewritten = rewrite.is_some_and(|authority| !authority.is_empty());
    at.require_on_admission(set + usize::from(rewritten) < 2, "sets the authority more than once");
}

/// Returns true for pseudo-headers and `host`, which proxies do not add.
fn is_internal(name: &str) -> bool {
    name.starts_with(':') || name.eq_ignore_ascii_case("host")
}

fn is_authority(name: &str) -> bool {
    name.eq_ignore_ascii_case("host") || name.eq_ignore_ascii_case(":authority")
}

/// Checks that exactly one of route, redirect and directResponse is set; a root that delegates has none.
fn actions(at: &FieldPath<'_>, route: &HttpRoute, delegate: bool) {
    let given = [
        !route.route.is_empty(),
        route.redirect.is_some(),
        route.direct_response.is_some(),
    ];
    let given = given.into_iter().filter(|given| *given).count();
    if let Some(target) = &route.delegate {
        at.field("delegate").require(!delegate, "a delegate cannot delegate");
        // Parity (pkg/config/validation/virtualservice.go, `validateHTTPRouteConflict`): these are the only conflicts.
        at.require_on_admission(
            route.route.is_empty() && route.redirect.is_none(),
            "delegate cannot be combined with route or redirect",
        );
        if target.name.is_empty() {
            // Istio admits such an object, and serves its other routes.
            at.field("delegate")
                .field("name")
                .warning("is missing, so the route has no effect");
        }
        return;
    }
    if given != 1 {
        at.error("needs exactly one of route, redirect and directResponse");
    }
    if route.redirect.is_some() || route.direct_response.is_some() {
        at.field("fault").require_on_admission(
            route.fault.is_none(),
            "cannot be combined with redirect or directResponse",
        );
        at.field("rewrite").require_on_admission(
            route.rewrite.is_none(),
            "cannot be combined with redirect or directResponse",
        );
    }
}

fn http_match(at: &FieldPath<'_>, matched: &HttpMatchRequest, gateways: &[String]) {
    for (name, condition) in [
        ("uri", &matched.uri),
        ("scheme", &matched.scheme),
        ("method", &matched.method),
        ("authority", &matched.authority),
    ] {
        let at = at.field(name);
        common::string_match(&at, condition.as_ref());
        // An empty path prefix matches every path. Envoy rejects other empty matches.
        if name != "uri" {
            prefix_match(&at, condition.as_ref());
        }
    }
    for (name, map) in [
        ("headers", &matched.headers),
        ("withoutHeaders", &matched.without_headers),
        ("queryParams", &matched.query_params),
    ] {
        let at = at.field(name);
        for (key, condition) in map {
            let at = at.field(key);
            let is_claim = name != "queryParams" && claim_path(key).is_some();
            // `*` is not a valid expression, but has always meant that the header is present.
            let is_star = matches!(&condition.match_type, Some(MatchType::Regex(text)) if text == "*");
            if is_claim || !is_star {
                common::string_match(&at, Some(condition));
            } else if name != "withoutHeaders" {
                // Parity (pkg/config/validation/virtualservice.go): admission accepts it there only.
                at.refuse("`*` is not a regular expression; hint: write `{}` for any value");
            }
            prefix_match(&at, Some(condition));
            if is_claim {
                claim_match(&at, condition, gateways);
            } else if name == "queryParams" {
                at.require(
                    (1..=MAX_QUERY_PARAMETER).contains(&key.len()),
                    "the name needs 1 to 1024 bytes",
                );
            } else if !is_header_list(key.strip_prefix(':').unwrap_or(key)) {
                at.error(format!("{key:?} is not a header name"));
            } else if key.starts_with(':') && !PSEUDO_HEADERS.contains(&key.as_str()) {
                at.refuse(format!("{key:?} is not a pseudo-header"));
            }
        }
    }
    if matched.port > 65_535 {
        common::port(&at.field("port"), matched.port);
    }
    namespace(&at.field("sourceNamespace"), &matched.source_namespace);
    labels(&at.field("sourceLabels"), &matched.source_labels);
    self::gateways(at, &matched.gateways);
}

fn prefix_match(at: &FieldPath<'_>, condition: Option<&StringMatch>) {
    let matched = condition.and_then(|condition| condition.match_type.as_ref());
    let is_empty = matches!(matched, Some(MatchType::Prefix(text)) if text.is_empty());
    at.require(!is_empty, "the prefix is empty");
}

fn claim_match(at: &FieldPath<'_>, condition: &StringMatch, gateways: &[String]) {
    // Envoy refuses a match of a value without a pattern.
    at.require(condition.match_type.is_some(), "needs exact, prefix or regex");
    at.require_on_admission(!includes_mesh(gateways), "JWT claims can be matched at gateways only");
}

fn namespace(at: &FieldPath<'_>, namespace: &str) {
    at.require(namespace.is_empty() || is_label(namespace), "is not a namespace");
}

fn labels(at: &FieldPath<'_>, labels: &BTreeMap<String, String>) {
    for (key, value) in labels {
        common::label(at, key, value);
    }
}

fn destination(at: &FieldPath<'_>, destination: Option<&Destination>) {
    let Some(destination) = destination else {
        return at.error("is required");
    };
    // The host may be a wildcard: it selects the service entry with that host.
    if destination.host != "*" {
        common::wildcard_domain(&at.field("host"), &destination.host);
    } else {
        at.field("host").error("`*` is not a destination");
    }
    if !destination.subset.is_empty() {
        common::subset_name(&at.field("subset"), &destination.subset);
    }
    if let Some(port) = &destination.port {
        common::port(&at.field("port").field("number"), port.number);
    }
}

fn destinations(at: &FieldPath<'_>, routes: &[HttpRouteDestination]) {
    at.each("route", routes, |at, route| {
        destination(&at.field("destination"), route.destination.as_ref());
        headers(at, route.headers.as_deref());
    });
    let sum = weights(at, routes.iter().map(|route| route.weight));
    // Envoy refuses all routes of a port because of one such sum.
    at.field("route")
        .require(sum <= i64::from(u32::MAX), "the sum of the weights is above 4294967295");
}

fn l4_destinations(at: &FieldPath<'_>, routes: &[RouteDestination]) {
    at.field("route").require(!routes.is_empty(), "is required");
    at.each("route", routes, |at, route| {
        destination(&at.field("destination"), route.destination.as_ref());
    });
    weights(at, routes.iter().map(|route| route.weight));
}

/// Checks the weights of destinations. Returns their sum.
fn weights(at: &FieldPath<'_>, weights: impl ExactSizeIterator<Item = i32>) -> i64 {
    let count = weights.len();
    let mut sum = 0_i64;
    at.each("route", weights, |at, weight| {
        at.field("weight").require(weight >= 0, "must not be negative");
        sum += i64::from(weight);
    });
    at.field("route")
        .require(count < 2 || sum != 0, "the sum of the weights is 0");
    sum
}

fn mirrors(at: &FieldPath<'_>, route: &HttpRoute) {
    at.field("mirrors").require_on_admission(
        route.mirror.is_none() || route.mirrors.is_empty() || route.delegate.is_some(),
        "cannot be combined with mirror",
    );
    if route.mirror.is_some() {
        destination(&at.field("mirror"), route.mirror.as_deref());
    }
    at.each("mirrors", &route.mirrors, |at, mirror| {
        destination(&at.field("destination"), mirror.destination.as_ref());
        common::percent(&at.field("percentage"), mirror.percentage.as_ref());
    });
    common::percent(&at.field("mirrorPercentage"), route.mirror_percentage.as_ref());
    if let Some(percent) = route.mirror_percent {
        let at = at.field("mirrorPercent");
        at.require(percent <= 100, "is not a percentage, want 0 to 100");
        at.warning("is deprecated, write mirrorPercentage");
    }
}

fn http_redirect(at: &FieldPath<'_>, redirect: &HttpRedirect) {
    let empty = redirect.uri.is_empty()
        && redirect.authority.is_empty()
        && redirect.scheme.is_empty()
        && redirect.redirect_port.is_none();
    at.require(!empty, "needs uri, authority, scheme or port");
    let code = redirect.redirect_code;
    // Istio accepts all codes from 300 to 399. Envoy refuses every route of a port if one of them has no action.
    at.field("redirectCode").require(
        matches!(code, 0 | 301 | 302 | 303 | 307 | 308),
        "want 301, 302, 303, 307 or 308",
    );
    if let Some(RedirectPort::Port(port)) = redirect.redirect_port {
        at.field("port")
            .require_on_admission(port <= 65_535, "is not a port, want 1 to 65535");
    }
    common::header_text(&at.field("uri"), &redirect.uri);
    common::header_text(&at.field("authority"), &redirect.authority);
    let scheme = redirect.scheme.as_str();
    at.field("scheme")
        .require(matches!(scheme, "" | "http" | "https"), "want http or https");
}

fn direct_response(at: &FieldPath<'_>, response: &HttpDirectResponse) {
    at.field("status")
        .require((200..600).contains(&response.status), "want a status from 200 to 599");
    let length = match response.body.as_ref().and_then(|body| body.specifier.as_ref()) {
        Some(Specifier::String(text)) => text.len(),
        Some(Specifier::Bytes(bytes)) => bytes.len(),
        None => 0,
    };
    let at = at.field("body");
    if length > MAX_BODY {
        at.error(format!("has {length} bytes, the most is {MAX_BODY}"));
    } else if length > LARGE_BODY {
        at.warning(format!(
            "has {length} bytes and is sent to every proxy that has the route"
        ));
    }
}

fn http_rewrite(at: &FieldPath<'_>, rewrite: &HttpRewrite) {
    let by_regex = rewrite.uri_regex_rewrite.as_ref();
    at.require(
        rewrite.uri.is_empty() || by_regex.is_none(),
        "uri and uriRegexRewrite cannot be combined",
    );
    at.require(
        !rewrite.uri.is_empty() || !rewrite.authority.is_empty() || by_regex.is_some(),
        "needs uri, authority or uriRegexRewrite",
    );
    if let Some(by_regex) = by_regex {
        let at = at.field("uriRegexRewrite");
        common::regex(&at.field("match"), &by_regex.r#match);
        at.field("rewrite").require(!by_regex.rewrite.is_empty(), "is required");
        common::header_text(&at.field("rewrite"), &by_regex.rewrite);
    }
    common::header_text(&at.field("uri"), &rewrite.uri);
    common::header_text(&at.field("authority"), &rewrite.authority);
}

/// Conditions of `retryOn`, in addition to status codes.
const RETRY_ON: [&str; 16] = [
    "5xx",
    "gateway-error",
    "reset",
    "reset-before-request",
    "connect-failure",
    "envoy-ratelimited",
    "retriable-4xx",
    "refused-stream",
    "retriable-status-codes",
    "retriable-headers",
    "http3-post-connect-failure",
    "cancelled",
    "deadline-exceeded",
    "internal",
    "resource-exhausted",
    "unavailable",
];

/// Checks the retries of a route or of the mesh.
pub fn http_retries(at: &FieldPath<'_>, retries: &HttpRetry) {
    at.field("attempts")
        .require(retries.attempts >= 0, "must not be negative");
    let has_settings =
        !retries.retry_on.is_empty() || retries.per_try_timeout.is_some() || retries.retry_remote_localities.is_some();
    if retries.attempts == 0 && has_settings {
        at.refuse("attempts is 0, so the other fields have no effect");
    }
    if let Some(timeout) = retries
        .per_try_timeout
        .as_ref()
        .filter(|timeout| timeout.seconds != 0 || timeout.nanos != 0)
    {
        common::duration(&at.field("perTryTimeout"), Some(timeout));
    }
    if retries.backoff.is_some() {
        common::duration(&at.field("backoff"), retries.backoff.as_ref());
    }
}

/// Checks the conditions for retries of a route.
///
/// Parity (pkg/config/validation/validation.go, `validateHTTPRetry`): admission accepts no spaces. Istio does not check
/// the conditions of the mesh config.
fn retry_conditions(at: &FieldPath<'_>, text: &str) {
    let conditions = Some(text).filter(|text| !text.is_empty());
    for condition in conditions.into_iter().flat_map(|text| text.split(',')) {
        if !condition.parse().is_ok_and(is_http_status) && !RETRY_ON.contains(&condition) {
            at.refuse(format!("{condition:?} is not a condition for retries"));
        }
    }
}

fn http_fault(at: &FieldPath<'_>, fault: &HttpFaultInjection) {
    at.require(fault.delay.is_some() || fault.abort.is_some(), "needs delay or abort");
    if let Some(delay) = &fault.delay {
        let at = at.field("delay");
        fault_percentage(&at.field("percentage"), delay.percentage.as_ref());
        if !(0..=100).contains(&delay.percent) {
            at.field("percent").warning("is not a percentage, want 0 to 100");
        }
        // Parity (pilot/pkg/networking/core/route/route.go, TranslateFault): routes apply without an incomplete fault.
        match &delay.http_delay_type {
            Some(HttpDelayType::FixedDelay(fixed)) => common::duration(&at.field("fixedDelay"), Some(fixed)),
            Some(HttpDelayType::ExponentialDelay(_)) => at.field("exponentialDelay").refuse("is not supported"),
            None => at.warning("has no effect without fixedDelay"),
        }
    }
    if let Some(abort) = &fault.abort {
        let at = at.field("abort");
        fault_percentage(&at.field("percentage"), abort.percentage.as_ref());
        match &abort.error_type {
            Some(ErrorType::HttpStatus(status)) => {
                at.field("httpStatus")
                    .require((200..600).contains(status), "want a status from 200 to 599");
            }
            Some(ErrorType::GrpcStatus(status)) if grpc_status_code(status).is_none() => {
                at.field("grpcStatus").error(format!("{status:?} is not a gRPC status"));
            }
            Some(ErrorType::GrpcStatus(_)) => {}
            Some(ErrorType::Http2Error(_)) => at.field("http2Error").refuse("is not supported"),
            None => at.warning("has no effect without httpStatus or grpcStatus"),
        }
    }
}

fn fault_percentage(at: &FieldPath<'_>, percentage: Option<&Percent>) {
    common::percent(at, percentage);
    let is_tiny = percentage.is_some_and(|percentage| percentage.value > 0.0 && percentage.value < LEAST_FAULTS);
    at.require_on_admission(!is_tiny, "is not 0, and less than 0.0001");
}

/// The methods that CORS policies may allow.
const METHODS: [&str; 10] = [
    "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "CONNECT", "OPTIONS", "TRACE", "*",
];

fn cors_policy(at: &FieldPath<'_>, policy: &CorsPolicy) {
    at.each("allowOrigins", &policy.allow_origins, |at, origin: &StringMatch| {
        let text = match &origin.match_type {
            Some(MatchType::Exact(text) | MatchType::Prefix(text) | MatchType::Regex(text)) => text,
            None => "",
        };
        at.require(!text.is_empty(), "is empty");
        common::string_match(at, Some(origin));
    });
    at.each("allowMethods", &policy.allow_methods, |at, method| {
        common::header_text(at, method);
        at.require_on_admission(METHODS.contains(&method.as_str()), "is not an HTTP method");
    });
    for (name, headers) in [
        ("allowHeaders", &policy.allow_headers),
        ("exposeHeaders", &policy.expose_headers),
    ] {
        at.each(name, headers, |at, header| {
            common::header_text(at, header);
            at.require_on_admission(is_header_list(header), "is not a header name");
        });
    }
    if let Some(age) = &policy.max_age {
        common::duration(&at.field("maxAge"), Some(age));
        at.field("maxAge")
            .require_on_admission(age.nanos == 0, "only whole seconds are supported");
    }
}

fn headers(at: &FieldPath<'_>, headers: Option<&Headers>) {
    let Some(headers) = headers else { return };
    let at = at.field("headers");
    if let Some(operations) = &headers.request {
        header_operations(&at.field("request"), operations, Direction::Request);
    }
    if let Some(operations) = &headers.response {
        header_operations(&at.field("response"), operations, Direction::Response);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Request,
    Response,
}

fn header_operations(at: &FieldPath<'_>, operations: &HeaderOperations, direction: Direction) {
    // Pseudo headers and `host` have no effect, except to set the authority of a request.
    let named = |at: &FieldPath<'_>, name: &str| {
        if is_internal(name) {
            at.refuse(format!("{name:?} is not a header that can be changed here"));
        } else if name.is_empty() || !common::is_header_part(name) {
            at.error(format!("{name:?} is not a header name"));
        } else if !is_header_name(name) {
            // Istio admits such an object, and Envoy sends the header as it is.
            at.warning(format!("{name:?} is not a header name, so servers may refuse it"));
        }
    };
    for (field, map) in [("set", &operations.set), ("add", &operations.add)] {
        let at = at.field(field);
        for (name, value) in map {
            if direction == Direction::Response || !is_authority(name) {
                named(&at, name);
            }
            let at = at.field(name);
            common::header_value(&at, value);
            if let Err(error) = format_string::check(value) {
                at.refuse(error);
            } else if !format_string::is_valid(value) {
                // Istio admits such an object, and Envoy refuses all routes of the port.
                at.warning("has a command that proxies do not know, so it is literal; write %% for a percent sign");
            }
        }
    }
    at.each("remove", &operations.remove, |at, name| named(at, name));
}

fn tls_route(at: &FieldPath<'_>, route: &TlsRoute, names: &ServerNames<'_>) {
    at.field("match").require(!route.r#match.is_empty(), "is required");
    at.each("match", &route.r#match, |at, matched: &TlsMatchAttributes| {
        at.field("sniHosts")
            .require(!matched.sni_hosts.is_empty(), "is required");
        at.each("sniHosts", &matched.sni_hosts, |at, sni| {
            if cidr::is_ip_or_zoned(sni) {
                // Few clients send such an SNI. Parity (pkg/config/validation/validation.go, `validateSniHost`): it
                // need not be among the hosts.
                at.warning(format!("{sni:?} is an IP address"));
            } else if !names.may_contain(sni) {
                at.error(format!("{sni:?} is not a host name"));
            } else if !names.contain(sni) {
                at.error(format!("{sni:?} is not among the hosts of the VirtualService"));
            } else if is_partial_wildcard(sni) {
                at.warning(format!("{sni:?} is a partial wildcard, which proxies do not support"));
            }
        });
        l4_match(at, &matched.destination_subnets, matched.port);
        labels(&at.field("sourceLabels"), &matched.source_labels);
        gateways(at, &matched.gateways);
    });
    l4_destinations(at, &route.route);
}

/// Server names that the hosts of a VirtualService cover. Sets, since there may be thousands of hosts and server names.
#[derive(Default)]
struct ServerNames<'a> {
    exact: BTreeSet<&'a str>,
    /// The ends of names that wildcards cover.
    suffixes: BTreeSet<&'a str>,
    /// True unless the gateway `mesh` is named: gateways know clusters by server names.
    of_clusters: bool,
}

impl<'a> ServerNames<'a> {
    fn of(service: &'a VirtualService) -> Self {
        let mut names = Self {
            // Parity (pkg/config/validation/validation.go, `isGateway`): without gateways, too.
            of_clusters: service.gateways.iter().all(|gateway| gateway != "mesh"),
            ..Self::default()
        };
        for host in &service.hosts {
            match host.strip_prefix('*') {
                Some(suffix) => names.suffixes.insert(suffix),
                None => names.exact.insert(host),
            };
        }
        names
    }

    /// Returns true if `sni` has the form of a server name.
    fn may_contain(&self, sni: &str) -> bool {
        is_wildcard_domain(sni) || self.of_clusters && is_cluster_server_name(sni)
    }

    /// Returns true if one host covers every name that `sni` covers.
    fn contain(&self, sni: &str) -> bool {
        let mut ends = (0..=sni.len()).filter_map(|start| sni.get(start..));
        self.exact.contains(sni) || !self.suffixes.is_empty() && ends.any(|end| self.suffixes.contains(end))
    }
}

fn tcp_route(at: &FieldPath<'_>, route: &TcpRoute) {
    at.each("match", &route.r#match, |at, matched: &L4MatchAttributes| {
        l4_match(at, &matched.destination_subnets, matched.port);
        labels(&at.field("sourceLabels"), &matched.source_labels);
        gateways(at, &matched.gateways);
    });
    l4_destinations(at, &route.route);
}

/// Checks a match of connections. Parity (pkg/config/validation/validation.go): admission checks the source's namespace
/// in HTTP matches only.
fn l4_match(at: &FieldPath<'_>, subnets: &[String], port: u32) {
    at.each("destinationSubnets", subnets, |at, subnet| {
        common::address_range(at, subnet);
    });
    if port != 0 {
        common::port(&at.field("port"), port);
    }
}
