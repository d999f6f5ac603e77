//! Access logs of connection managers, TCP proxies and listeners.
//!
//! Telemetries take precedence over the mesh config's file and service. Note: the kind of a provider is independent of
//! the position, so a TCP log service may be in an HTTP connection manager.

use prost_types::{Struct, Value, value::Kind};

use super::{
    stack::{FilterStack, LogPosition},
    telemetry::Logging,
};
use crate::proto::{
    Any,
    envoy::{
        config::{
            accesslog::v3::{
                AccessLog, AccessLogFilter, AndFilter, ComparisonFilter, ExtensionFilter, ResponseFlagFilter,
                StatusCodeFilter, access_log, access_log_filter::FilterSpecifier, comparison_filter, extension_filter,
            },
            core::v3::{
                ApiVersion, DataSource, GrpcService, JsonFormatOptions, RuntimeUInt32, SubstitutionFormatString,
                TypedExtensionConfig, data_source, grpc_service, substitution_format_string::Format,
            },
        },
        extensions::{
            access_loggers::{
                file::v3::{FileAccessLog, file_access_log::AccessLogFormat},
                filters::cel::v3::ExpressionFilter,
                grpc::v3::{CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig, TcpGrpcAccessLogConfig},
                open_telemetry::v3::OpenTelemetryAccessLogConfig,
            },
            formatter::req_without_query::v3::ReqWithoutQuery,
        },
    },
    istio::mesh::v1alpha1::mesh_config::{
        AccessLogEncoding,
        extension_provider::{
            EnvoyFileAccessLogProvider, EnvoyHttpGrpcV3LogProvider, EnvoyOpenTelemetryLogProvider,
            EnvoyTcpGrpcV3LogProvider, Provider, envoy_file_access_log_provider::log_format::LogFormat,
        },
    },
    opentelemetry::proto::common::v1::{AnyValue, KeyValue, KeyValueList, any_value},
};

const DEFAULT_TEXT: &str = "[%START_TIME%] \"%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%\" \
     %RESPONSE_CODE% %RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% \
     \"%UPSTREAM_TRANSPORT_FAILURE_REASON%\" %BYTES_RECEIVED% %BYTES_SENT% %DURATION% \
     %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% \"%REQ(X-FORWARDED-FOR)%\" \"%REQ(USER-AGENT)%\" \"%REQ(X-REQUEST-ID)%\" \
     \"%REQ(:AUTHORITY)%\" \"%UPSTREAM_HOST%\" %UPSTREAM_CLUSTER_RAW% %UPSTREAM_LOCAL_ADDRESS% \
     %DOWNSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_REMOTE_ADDRESS% %REQUESTED_SERVER_NAME% %ROUTE_NAME%\n";

const DEFAULT_JSON: &[(&str, &str)] = &[
    ("start_time", "%START_TIME%"),
    ("route_name", "%ROUTE_NAME%"),
    ("method", "%REQ(:METHOD)%"),
    ("path", "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%"),
    ("protocol", "%PROTOCOL%"),
    ("response_code", "%RESPONSE_CODE%"),
    ("response_flags", "%RESPONSE_FLAGS%"),
    ("response_code_details", "%RESPONSE_CODE_DETAILS%"),
    ("connection_termination_details", "%CONNECTION_TERMINATION_DETAILS%"),
    ("bytes_received", "%BYTES_RECEIVED%"),
    ("bytes_sent", "%BYTES_SENT%"),
    ("duration", "%DURATION%"),
    ("upstream_service_time", "%RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)%"),
    ("x_forwarded_for", "%REQ(X-FORWARDED-FOR)%"),
    ("user_agent", "%REQ(USER-AGENT)%"),
    ("request_id", "%REQ(X-REQUEST-ID)%"),
    ("authority", "%REQ(:AUTHORITY)%"),
    ("upstream_host", "%UPSTREAM_HOST%"),
    ("upstream_cluster", "%UPSTREAM_CLUSTER_RAW%"),
    ("upstream_local_address", "%UPSTREAM_LOCAL_ADDRESS%"),
    ("downstream_local_address", "%DOWNSTREAM_LOCAL_ADDRESS%"),
    ("downstream_remote_address", "%DOWNSTREAM_REMOTE_ADDRESS%"),
    ("requested_server_name", "%REQUESTED_SERVER_NAME%"),
    (
        "upstream_transport_failure_reason",
        "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
    ),
];

const PEER_STATE: &[&str] = &["upstream_peer", "downstream_peer"];
const WASM_PEER_STATE: &[&str] = &[
    "upstream_peer",
    "downstream_peer",
    "wasm.upstream_peer",
    "wasm.upstream_peer_id",
    "wasm.downstream_peer",
    "wasm.downstream_peer_id",
];

/// Path of a file log without one. Envoy refuses a listener with an empty path.
const STANDARD_OUTPUT: &str = "/dev/stdout";

const FILE_LOG: &str = "envoy.access_loggers.file";
const HTTP_GRPC_LOG: &str = "envoy.access_loggers.http_grpc";
const TCP_GRPC_LOG: &str = "envoy.tcp_grpc_access_log";
const OTEL_LOG: &str = "envoy.access_loggers.open_telemetry";
const CEL_FILTER: &str = "envoy.access_loggers.extension_filters.cel";
const REQ_WITHOUT_QUERY: &str = "envoy.formatter.req_without_query";

impl FilterStack<'_> {
    /// Returns the access logs of a position, the same for all chains of a listener.
    pub fn access_logs(&self, place: LogPosition) -> Vec<AccessLog> {
        if let Some((_, logs)) = self.logs.borrow().iter().find(|(made, _)| *made == place) {
            return logs.clone();
        }
        let logs = self.make_access_logs(place);
        self.logs.borrow_mut().push((place, logs.clone()));
        logs
    }

    fn make_access_logs(&self, place: LogPosition) -> Vec<AccessLog> {
        if place == LogPosition::Listener && self.mesh.disable_envoy_listener_log {
            return Vec::new();
        }
        let logging = self.telemetries.logging(self.class);
        let mut any_provider = false;
        let mut logs = Vec::new();
        for log in &logging {
            let Some((name, config)) = self.provider_log(log) else {
                continue;
            };
            any_provider = true;
            if log.enabled && log.filter.is_none_or(|_| self.has_extension(CEL_FILTER)) {
                logs.push(access_log(name, config, filters(place, log)));
            }
        }
        if any_provider { logs } else { self.mesh_logs(place) }
    }

    /// Returns the logs of the mesh config.
    fn mesh_logs(&self, place: LogPosition) -> Vec<AccessLog> {
        let mut logs = Vec::new();
        let place_filter = || place_filter(place).filter(|_| place != LogPosition::HboneForwarding);
        let filter = || place_filter().into_iter().collect();
        if !self.mesh.access_log_file.is_empty()
            && let Some(config) = self.mesh_file_log(&self.mesh.access_log_file)
        {
            logs.push(access_log(FILE_LOG, config, filter()));
        }
        let log_name = match place {
            LogPosition::Http => "http_envoy_accesslog",
            LogPosition::Tcp | LogPosition::HboneForwarding => "tcp_envoy_accesslog",
            LogPosition::Listener => "listener_envoy_accesslog",
            LogPosition::HboneOrigination | LogPosition::HboneTermination => return logs,
        };
        if self.mesh.enable_envoy_access_log_service {
            let common = Some(grpc_log(
                log_name,
                "envoy_accesslog_service",
                "",
                owned(WASM_PEER_STATE),
            ));
            let (name, config) = if place == LogPosition::Http {
                let config = HttpGrpcAccessLogConfig {
                    common_config: common,
                    ..Default::default()
                };
                (HTTP_GRPC_LOG, Any::pack(&config))
            } else {
                let config = TcpGrpcAccessLogConfig { common_config: common };
                (TCP_GRPC_LOG, Any::pack(&config))
            };
            logs.push(access_log(name, config, filter()));
        }
        logs
    }

    /// Returns name and configuration of a provider's log; `None` if it cannot log, or its service is unknown.
    fn provider_log(&self, log: &Logging) -> Option<(&'static str, Any)> {
        match log.provider.provider.as_ref()? {
            Provider::EnvoyFileAccessLog(provider) => {
                let built_in = log.provider.name == "envoy" && provider.log_format.is_none();
                let config = if built_in && !provider.omit_empty_values {
                    self.mesh_file_log(or(&provider.path, STANDARD_OUTPUT))
                } else {
                    self.provider_file_log(provider)
                };
                Some((FILE_LOG, config?))
            }
            Provider::EnvoyHttpAls(provider) => self.http_service_log(provider).map(|log| (HTTP_GRPC_LOG, log)),
            Provider::EnvoyTcpAls(provider) => self.tcp_service_log(provider).map(|log| (TCP_GRPC_LOG, log)),
            Provider::EnvoyOtelAls(provider) => self.open_telemetry_log(provider).map(|log| (OTEL_LOG, log)),
            _ => None,
        }
    }

    fn mesh_file_log(&self, path: &str) -> Option<Any> {
        let format = &self.mesh.access_log_format;
        let json = self.mesh.access_log_encoding == AccessLogEncoding::Json as i32;
        let format = if !json {
            text_format(format)
        } else if format.is_empty() {
            json_format(default_json())
        } else {
            json_format(parsed_json(format).unwrap_or_else(default_json))
        };
        self.file_log(path, format)
    }

    fn provider_file_log(&self, provider: &EnvoyFileAccessLogProvider) -> Option<Any> {
        let path = or(&provider.path, STANDARD_OUTPUT);
        let format = match provider.log_format.as_ref().map(|format| &format.log_format) {
            None => text_format(""),
            Some(Some(LogFormat::Labels(labels))) if labels.fields.is_empty() => json_format(default_json()),
            Some(Some(LogFormat::Labels(labels))) => json_format(labels.clone()),
            Some(Some(LogFormat::Text(text))) => text_format(text),
            // Parity (pilot/pkg/model/telemetry_logging.go): Envoy's own format applies.
            Some(None) => {
                return Some(Any::pack(&FileAccessLog {
                    path: path.to_owned(),
                    access_log_format: None,
                }));
            }
        };
        let format = SubstitutionFormatString {
            omit_empty_values: provider.omit_empty_values,
            ..format
        };
        self.file_log(path, format)
    }

    /// Returns a file log; `None` if its format needs a formatter that the proxy lacks.
    fn file_log(&self, path: &str, format: SubstitutionFormatString) -> Option<Any> {
        let uses = match &format.format {
            Some(Format::TextFormatSource(DataSource {
                specifier: Some(data_source::Specifier::InlineString(text)),
                ..
            })) => text.contains("%REQ_WITHOUT_QUERY"),
            Some(Format::JsonFormat(fields)) => uses_formatter(fields),
            _ => false,
        };
        let format = SubstitutionFormatString {
            formatters: self.formatters(uses)?,
            ..format
        };
        Some(Any::pack(&FileAccessLog {
            path: path.to_owned(),
            access_log_format: Some(AccessLogFormat::LogFormat(format)),
        }))
    }

    /// Returns the formatters of a format; `None` if the proxy lacks one.
    fn formatters(&self, uses: bool) -> Option<Vec<TypedExtensionConfig>> {
        if !uses {
            return Some(Vec::new());
        }
        self.has_extension(REQ_WITHOUT_QUERY).then(|| {
            vec![TypedExtensionConfig {
                name: REQ_WITHOUT_QUERY.to_owned(),
                typed_config: Some(Any::pack(&ReqWithoutQuery {})),
            }]
        })
    }

    fn http_service_log(&self, provider: &EnvoyHttpGrpcV3LogProvider) -> Option<Any> {
        let upstream = self.provider_cluster("envoyHTTPAls", &provider.service, provider.port)?;
        let name = or(&provider.log_name, "http_envoy_accesslog");
        let state = or_peers(&provider.filter_state_objects_to_log);
        Some(Any::pack(&HttpGrpcAccessLogConfig {
            common_config: Some(grpc_log(name, &upstream.cluster, &upstream.host, state)),
            additional_request_headers_to_log: provider.additional_request_headers_to_log.clone(),
            additional_response_headers_to_log: provider.additional_response_headers_to_log.clone(),
            additional_response_trailers_to_log: provider.additional_response_trailers_to_log.clone(),
        }))
    }

    fn tcp_service_log(&self, provider: &EnvoyTcpGrpcV3LogProvider) -> Option<Any> {
        let upstream = self.provider_cluster("envoyTCPAls", &provider.service, provider.port)?;
        let name = or(&provider.log_name, "tcp_envoy_accesslog");
        let state = or_peers(&provider.filter_state_objects_to_log);
        Some(Any::pack(&TcpGrpcAccessLogConfig {
            common_config: Some(grpc_log(name, &upstream.cluster, &upstream.host, state)),
        }))
    }

    fn open_telemetry_log(&self, provider: &EnvoyOpenTelemetryLogProvider) -> Option<Any> {
        let upstream = self.provider_cluster("envoyOtelAls", &provider.service, provider.port)?;
        let name = or(&provider.log_name, "otel_envoy_accesslog");
        let format = provider.log_format.as_ref();
        let text = or(format.map_or("", |format| &format.text), DEFAULT_TEXT);
        let labels = format.and_then(|format| format.labels.as_ref());
        let labels = labels.filter(|labels| !labels.fields.is_empty());
        let uses = text.contains("%REQ_WITHOUT_QUERY") || labels.is_some_and(uses_formatter);
        Some(Any::pack(&OpenTelemetryAccessLogConfig {
            common_config: Some(grpc_log(
                name,
                &upstream.cluster,
                &upstream.host,
                owned(WASM_PEER_STATE),
            )),
            disable_builtin_labels: true,
            body: Some(otel_text(text)),
            attributes: labels.map(|labels| KeyValueList {
                values: labels
                    .fields
                    .iter()
                    .map(|(key, value)| KeyValue {
                        key: key.clone(),
                        value: Some(otel_text(string_of(value))),
                        ..Default::default()
                    })
                    .collect(),
            }),
            formatters: self.formatters(uses)?,
            ..Default::default()
        }))
    }
}

fn access_log(name: &str, config: Any, mut filters: Vec<AccessLogFilter>) -> AccessLog {
    let filter = if filters.len() > 1 {
        Some(filter(FilterSpecifier::AndFilter(AndFilter { filters })))
    } else {
        filters.pop()
    };
    AccessLog {
        name: name.to_owned(),
        filter,
        config_type: Some(access_log::ConfigType::TypedConfig(config)),
    }
}

fn filters(place: LogPosition, log: &Logging) -> Vec<AccessLogFilter> {
    let expression = log.filter.map(|declared| {
        let config = ExpressionFilter {
            expression: declared.expression.clone(),
            ..Default::default()
        };
        filter(FilterSpecifier::ExtensionFilter(ExtensionFilter {
            name: CEL_FILTER.to_owned(),
            config_type: Some(extension_filter::ConfigType::TypedConfig(Any::pack(&config))),
        }))
    });
    place_filter(place).into_iter().chain(expression).collect()
}

fn filter(specifier: FilterSpecifier) -> AccessLogFilter {
    AccessLogFilter {
        filter_specifier: Some(specifier),
    }
}

fn place_filter(place: LogPosition) -> Option<AccessLogFilter> {
    let flag = |flag: &str| {
        filter(FilterSpecifier::ResponseFlagFilter(ResponseFlagFilter {
            flags: vec![flag.to_owned()],
        }))
    };
    match place {
        LogPosition::Http | LogPosition::Tcp => None,
        LogPosition::Listener => Some(flag("NR")),
        LogPosition::HboneOrigination | LogPosition::HboneForwarding => Some(flag("UF")),
        LogPosition::HboneTermination => Some(filter(FilterSpecifier::StatusCodeFilter(StatusCodeFilter {
            comparison: Some(ComparisonFilter {
                op: comparison_filter::Op::Ge as i32,
                value: Some(RuntimeUInt32 {
                    default_value: 400,
                    // Envoy requires a key; it is never set, so the default always applies.
                    runtime_key: "istio.io/unset".to_owned(),
                }),
            }),
        }))),
    }
}

fn grpc_log(name: &str, cluster: &str, authority: &str, state: Vec<String>) -> CommonGrpcAccessLogConfig {
    CommonGrpcAccessLogConfig {
        log_name: name.to_owned(),
        grpc_service: Some(envoy_grpc(cluster, authority)),
        transport_api_version: ApiVersion::V3 as i32,
        filter_state_objects_to_log: state,
        ..Default::default()
    }
}

/// Returns a gRPC service behind a cluster.
pub(crate) fn envoy_grpc(cluster: &str, authority: &str) -> GrpcService {
    GrpcService {
        target_specifier: Some(grpc_service::TargetSpecifier::EnvoyGrpc(grpc_service::EnvoyGrpc {
            cluster_name: cluster.to_owned(),
            authority: authority.to_owned(),
            ..Default::default()
        })),
        ..Default::default()
    }
}

fn text_format(text: &str) -> SubstitutionFormatString {
    let mut text = or(text, DEFAULT_TEXT).to_owned();
    if !text.ends_with('\n') {
        text.push('\n');
    }
    SubstitutionFormatString {
        format: Some(Format::TextFormatSource(DataSource {
            specifier: Some(data_source::Specifier::InlineString(text)),
            ..Default::default()
        })),
        ..Default::default()
    }
}

fn json_format(fields: Struct) -> SubstitutionFormatString {
    SubstitutionFormatString {
        json_format_options: Some(JsonFormatOptions { sort_properties: false }),
        format: Some(Format::JsonFormat(fields)),
        ..Default::default()
    }
}

fn default_json() -> Struct {
    let fields = DEFAULT_JSON.iter().map(|(key, operator)| {
        let value = Kind::StringValue((*operator).to_owned());
        ((*key).to_owned(), Value { kind: Some(value) })
    });
    Struct {
        fields: fields.collect(),
    }
}

fn parsed_json(text: &str) -> Option<Struct> {
    match value_of(serde_json::from_str(text).ok()?).kind {
        Some(Kind::StructValue(fields)) => Some(fields),
        _ => None,
    }
}

fn value_of(value: serde_json::Value) -> Value {
    use serde_json::Value as Json;
    let kind = match value {
        Json::Null => Kind::NullValue(0),
        Json::Bool(flag) => Kind::BoolValue(flag),
        Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Json::String(text) => Kind::StringValue(text),
        Json::Array(values) => Kind::ListValue(prost_types::ListValue {
            values: values.into_iter().map(value_of).collect(),
        }),
        Json::Object(fields) => Kind::StructValue(Struct {
            fields: fields.into_iter().map(|(key, value)| (key, value_of(value))).collect(),
        }),
    };
    Value { kind: Some(kind) }
}

fn uses_formatter(fields: &Struct) -> bool {
    fields
        .fields
        .values()
        .any(|value| string_of(value).contains("%REQ_WITHOUT_QUERY"))
}

fn string_of(value: &Value) -> &str {
    match &value.kind {
        Some(Kind::StringValue(text)) => text,
        _ => "",
    }
}

fn otel_text(text: &str) -> AnyValue {
    AnyValue {
        value: Some(any_value::Value::StringValue(text.to_owned())),
    }
}

fn or<'a>(text: &'a str, default: &'a str) -> &'a str {
    if text.is_empty() { default } else { text }
}

fn or_peers(names: &[String]) -> Vec<String> {
    if names.is_empty() {
        owned(PEER_STATE)
    } else {
        names.to_vec()
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{
        generate::{ResourceType, fixture},
        model::Installation,
    };

    /// Returns the file access log of a provider with these settings.
    fn file_log(name: &str, settings: &str) -> Value {
        let provider = format!("{{name: {name}, envoyFileAccessLog: {{{settings}}}}}");
        let mesh = format!("proxyListenPort: 15001\nextensionProviders: [{provider}]\n");
        let telemetry = format!(
            "apiVersion: telemetry.istio.io/v1\nkind: Telemetry\nmetadata: {{name: mesh, namespace: istio-system}}\n\
             spec: {{accessLogging: [{{providers: [{{name: {name}}}]}}]}}\n"
        );
        let files = [
            ("mesh.yaml", mesh.as_str()),
            ("kube.yaml", fixture::APP),
            ("config.yaml", telemetry.as_str()),
        ];
        let proxy = fixture::client("sidecar~10.1.0.1~a-0.default~default.svc.cluster.local", &json!({}));
        let store = fixture::store(Installation::default(), &files, vec![proxy]);
        let listener = fixture::resource(&store, 0, ResourceType::Listener, "virtualOutbound");
        listener["accessLog"][0]["typedConfig"].clone()
    }

    /// Returns the format of a file access log with these settings.
    fn format(settings: &str) -> Value {
        let log = file_log("log", &format!("path: /tmp/log{settings}"));
        assert_eq!(log["path"], "/tmp/log");
        log["logFormat"].clone()
    }

    #[test]
    fn a_log_format_without_a_member_is_that_of_envoy() {
        assert_eq!(format(", logFormat: {}"), Value::Null);
        assert_eq!(format(", logFormat: {labels: null}"), Value::Null);
        assert!(format("")["textFormatSource"].is_object());
    }

    #[test]
    fn file_logs_without_a_path_go_to_standard_output() {
        for name in ["log", "envoy"] {
            assert_eq!(file_log(name, "")["path"], "/dev/stdout", "{name}");
        }
    }
}
