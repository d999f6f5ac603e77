//! Per-route configuration of HTTP filters: fault injection, CORS, stateful session, endpoint picker.

use crate::{
    api::names::grpc_status_code,
    generate::name,
    model::{Service, features::Features, gateway_api::inference_pool::Picker},
    proto::{
        Any,
        envoy::{
            config::core::v3::{
                GrpcService, RuntimeFractionalPercent, TypedExtensionConfig,
                grpc_service::{EnvoyGrpc, TargetSpecifier},
            },
            extensions::{
                filters::{
                    common::fault::v3::{FaultDelay, fault_delay::FaultDelaySecifier},
                    http::{
                        cors::v3::CorsPolicy as EnvoyCors,
                        ext_proc::v3::{
                            ExtProcOverrides, ExtProcPerRoute, ProcessingMode,
                            ext_proc_per_route::Override as ProcessingOverride,
                            processing_mode::{BodySendMode, HeaderSendMode},
                        },
                        fault::v3::{FaultAbort, HttpFault, fault_abort::ErrorType},
                        stateful_session::v3::{
                            StatefulSession, StatefulSessionPerRoute, stateful_session_per_route::Override,
                        },
                    },
                },
                http::stateful_session::{cookie::v3::CookieBasedSessionState, header::v3::HeaderBasedSessionState},
            },
            r#type::{
                http::v3::Cookie,
                matcher::v3::{StringMatcher, string_matcher::MatchPattern},
                v3::{FractionalPercent, fractional_percent::DenominatorType},
            },
        },
        istio::networking::v1alpha3::{
            CorsPolicy, HttpFaultInjection, Percent,
            cors_policy::UnmatchedPreflights,
            http_fault_injection::{Abort, Delay, abort, delay},
        },
    },
};

use super::matches;

/// Name of the fault filter.
pub(super) const FAULT: &str = "envoy.filters.http.fault";
/// Name of the CORS filter.
pub(crate) const CORS: &str = "envoy.filters.http.cors";
/// Name of the stateful session filter.
pub(crate) const STATEFUL_SESSION: &str = "envoy.filters.http.stateful_session";

/// Returns the configuration that makes a picker select the endpoint of each request. It reads headers and bodies of
/// requests, for the model that they name, and of responses, for statistics.
pub(crate) fn endpoint_picker(picker: &Picker) -> Any {
    let service = GrpcService {
        target_specifier: Some(TargetSpecifier::EnvoyGrpc(EnvoyGrpc {
            cluster_name: name::outbound_cluster(picker.port, "", &picker.host),
            // By default, Envoy sends the name of the cluster, which is no valid authority.
            authority: picker.host.to_string(),
            ..Default::default()
        })),
        ..Default::default()
    };
    let (headers, body) = (HeaderSendMode::Send.into(), BodySendMode::FullDuplexStreamed.into());
    Any::pack(&ExtProcPerRoute {
        r#override: Some(ProcessingOverride::Overrides(ExtProcOverrides {
            failure_mode_allow: Some(picker.fails_open),
            grpc_service: Some(service),
            processing_mode: Some(ProcessingMode {
                request_header_mode: headers,
                request_body_mode: body,
                request_trailer_mode: headers,
                response_header_mode: headers,
                response_body_mode: body,
                response_trailer_mode: headers,
            }),
            ..Default::default()
        })),
    })
}

/// Returns a percentage in Envoy's millionths; more than four decimals are cut off.
pub(crate) fn percent(declared: Percent) -> FractionalPercent {
    // Validation limits the value to 0 to 100; the cast saturates.
    let numerator = (declared.value * 10_000.0) as u32;
    FractionalPercent {
        numerator,
        denominator: DenominatorType::Million.into(),
    }
}

/// Returns a whole percentage.
pub(super) fn whole_percent(numerator: u32) -> FractionalPercent {
    FractionalPercent {
        numerator,
        denominator: DenominatorType::Hundred.into(),
    }
}

/// Returns the configuration of fault injection.
pub(crate) fn fault(declared: &HttpFaultInjection) -> Any {
    Any::pack(&HttpFault {
        delay: declared.delay.as_ref().and_then(fault_delay),
        abort: declared.abort.as_ref().and_then(fault_abort),
        ..Default::default()
    })
}

/// Returns a fixed delay; Envoy does not support other delays.
fn fault_delay(declared: &Delay) -> Option<FaultDelay> {
    let Some(delay::HttpDelayType::FixedDelay(fixed)) = declared.http_delay_type else {
        return None;
    };
    #[allow(deprecated, reason = "it counts without the field that replaces it")]
    let whole = u32::try_from(declared.percent).unwrap_or_default();
    Some(FaultDelay {
        percentage: Some(declared.percentage.map_or_else(|| whole_percent(whole), percent)),
        fault_delay_secifier: Some(FaultDelaySecifier::FixedDelay(fixed)),
    })
}

fn fault_abort(declared: &Abort) -> Option<FaultAbort> {
    let error = match declared.error_type.as_ref()? {
        abort::ErrorType::HttpStatus(status) => ErrorType::HttpStatus(u32::try_from(*status).unwrap_or_default()),
        abort::ErrorType::GrpcStatus(name) => {
            // Validation refuses unknown names.
            ErrorType::GrpcStatus(grpc_status_code(name).unwrap_or_default())
        }
        abort::ErrorType::Http2Error(_) => return None,
    };
    Some(FaultAbort {
        percentage: declared.percentage.map(percent),
        error_type: Some(error),
        ..Default::default()
    })
}

/// Returns a CORS policy.
pub(crate) fn cors(declared: &CorsPolicy) -> Any {
    let exact = |origin: &String| StringMatcher {
        match_pattern: Some(MatchPattern::Exact(origin.clone())),
        ..Default::default()
    };
    #[allow(deprecated, reason = "it counts without the field that replaces it")]
    let origins = if declared.allow_origins.is_empty() {
        declared.allow_origin.iter().map(exact).collect()
    } else {
        declared
            .allow_origins
            .iter()
            .filter_map(matches::string_matcher)
            .collect()
    };
    Any::pack(&EnvoyCors {
        allow_origin_string_match: origins,
        allow_methods: declared.allow_methods.join(","),
        allow_headers: declared.allow_headers.join(","),
        expose_headers: declared.expose_headers.join(","),
        max_age: declared.max_age.map(|age| age.seconds.to_string()).unwrap_or_default(),
        allow_credentials: declared.allow_credentials,
        filter_enabled: Some(RuntimeFractionalPercent {
            default_value: Some(whole_percent(100)),
            ..Default::default()
        }),
        forward_not_matching_preflights: Some(declared.unmatched_preflights() != UnmatchedPreflights::Ignore),
        ..Default::default()
    })
}

/// Returns the per-route session configuration that the labels of a service request.
pub(crate) fn stateful_session(service: &Service, features: &Features) -> Option<Any> {
    let session = session(service, features)?;
    Some(Any::pack(&StatefulSessionPerRoute {
        r#override: Some(Override::StatefulSession(session)),
    }))
}

/// Returns the session configuration that the labels of a service request.
pub(crate) fn session(service: &Service, features: &Features) -> Option<StatefulSession> {
    if !features.pilot_enable_persistent_session_filter {
        return None;
    }
    let label = |key: &str| service.label(key).filter(|value| !value.is_empty());
    let state = if let Some(cookie) = label(&features.pilot_persistent_session_label) {
        let (name, path) = cookie.split_once(':').unwrap_or((cookie, "/"));
        TypedExtensionConfig {
            name: "envoy.http.stateful_session.cookie".to_owned(),
            typed_config: Some(Any::pack(&CookieBasedSessionState {
                cookie: Some(Cookie {
                    name: name.to_owned(),
                    path: path.to_owned(),
                    ..Default::default()
                }),
            })),
        }
    } else {
        let name = label(&features.pilot_persistent_session_header_label)?;
        TypedExtensionConfig {
            name: "envoy.http.stateful_session.header".to_owned(),
            typed_config: Some(Any::pack(&HeaderBasedSessionState { name: name.to_string() })),
        }
    };
    Some(StatefulSession {
        session_state: Some(state),
        ..Default::default()
    })
}
