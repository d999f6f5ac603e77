//! Tracing in HTTP connection managers: provider, sampling, tags.

use std::{borrow::Cow, collections::BTreeMap, sync::LazyLock};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

use super::{
    access_log::envoy_grpc,
    proxy_view::ServiceTags,
    stack::{FilterStack, ProviderCluster},
    telemetry::TracingSpec,
};
use crate::{
    api::istio::{common::is_header_text, format_string},
    base::url::is_escaped_well,
    generate::{proxy::ProxyType, proxy_class::names_by_conventions, wire::Encoded},
    proto::{
        Any,
        envoy::{
            config::{
                core::v3::{
                    HeaderValue, HeaderValueOption, HttpService, HttpUri, TypedExtensionConfig, header_value_option,
                    http_uri,
                },
                trace::v3::{
                    DatadogConfig, OpenTelemetryConfig, SkyWalkingConfig, ZipkinConfig, tracing as provider,
                    zipkin_config::{CollectorEndpointVersion, TraceContextOption},
                },
            },
            extensions::{
                filters::network::http_connection_manager::v3::http_connection_manager::Tracing,
                tracers::opentelemetry::{
                    resource_detectors::v3::{DynatraceResourceDetectorConfig, EnvironmentResourceDetectorConfig},
                    samplers::v3::DynatraceSamplerConfig,
                },
            },
            r#type::{
                metadata::v3::{MetadataKey, MetadataKind, metadata_key, metadata_kind},
                tracing::v3::{CustomTag, custom_tag},
                v3::Percent,
            },
        },
        field::{custom_tag as custom_tag_fields, literal, tracing},
        istio::{
            mesh::v1alpha1::{
                mesh_config::{
                    ExtensionProvider,
                    extension_provider::{
                        HttpHeader, HttpService as ProviderHttpService, OpenTelemetryTracingProvider, Provider,
                        ZipkinTracingProvider, http_header,
                        open_telemetry_tracing_provider::{DynatraceSampler, Sampling},
                    },
                },
                tracing as legacy,
            },
            telemetry::v1alpha1::tracing as telemetry,
        },
    },
};

const ZIPKIN: &str = "envoy.tracers.zipkin";
const DATADOG: &str = "envoy.tracers.datadog";
const SKYWALKING: &str = "envoy.tracers.skywalking";
const OPEN_TELEMETRY: &str = "envoy.tracers.opentelemetry";
/// The bytes of a path that Go's `net/url` encodes where it encodes a path.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'$')
    .remove(b'&')
    .remove(b'+')
    .remove(b',')
    .remove(b'/')
    .remove(b':')
    .remove(b';')
    .remove(b'=')
    .remove(b'@');

/// Tracing settings of a connection manager.
pub struct HttpTracing {
    /// Field `tracing`, encoded.
    pub tracing: Option<Encoded<Tracing>>,
    /// True if the request id carries the sampling decision.
    pub use_request_id: bool,
}

/// A tracer with the settings that depend on it.
struct Tracer {
    name: &'static str,
    config: Any,
    max_tag_length: u32,
    /// True if the tracer receives every span and samples itself.
    samples: bool,
}

impl FilterStack<'_> {
    /// Returns the tracing of this direction.
    pub fn tracing(&self) -> HttpTracing {
        let untraced = HttpTracing {
            tracing: None,
            use_request_id: true,
        };
        let Some(spec) = self.telemetries.tracing(self.class) else {
            return HttpTracing {
                tracing: self.mesh.enable_tracing.then(|| self.mesh_tracing()),
                ..untraced
            };
        };
        let Some(provider) = spec.provider.filter(|_| !spec.disabled) else {
            return untraced;
        };
        match self.tracer(provider) {
            Some(tracer) => HttpTracing {
                tracing: Some(self.provider_tracing(&spec, tracer)),
                use_request_id: spec.use_request_id,
            },
            None => untraced,
        }
    }

    /// Returns tracing by the bootstrap's tracer.
    fn mesh_tracing(&self) -> Encoded<Tracing> {
        let config = &self.client.tracing;
        let istio_tags = config.enable_istio_tags.unwrap_or(true);
        let tags = self.custom_tags(istio_tags, None);
        self.sampled(self.default_sampling(), &tags, Tracing::default())
    }

    fn provider_tracing(&self, spec: &TracingSpec, tracer: Tracer) -> Encoded<Tracing> {
        let sampling = if tracer.samples {
            100.0
        } else {
            spec.random_sampling.unwrap_or_else(|| self.default_sampling())
        };
        let router = self.client.proxy_type == ProxyType::Router;
        let spawn = tracer.name == SKYWALKING || router && self.features().pilot_spawn_upstream_span_for_gateway;
        let tags = self.custom_tags(spec.istio_tags, spec.custom_tags);
        let tracing = Tracing {
            max_path_tag_length: (tracer.max_tag_length != 0).then_some(tracer.max_tag_length),
            provider: Some(provider::Http {
                name: tracer.name.to_owned(),
                config_type: Some(provider::http::ConfigType::TypedConfig(tracer.config)),
            }),
            spawn_upstream_span: spawn.then_some(true),
            no_context_propagation: spec.no_context_propagation && self.client.version.at_least(1, 30),
            ..Default::default()
        };
        self.sampled(sampling, &tags, tracing)
    }

    /// Encodes the message with encoded tags, the sampling percentages, and the tag length of the bootstrap.
    fn sampled(&self, random: f64, tags: &Encoded<Tracing>, tracing: Tracing) -> Encoded<Tracing> {
        let percent = |value| Some(Percent { value });
        let legacy_length = self.client.tracing.max_path_tag_length;
        let tracing = Tracing {
            client_sampling: percent(100.0),
            overall_sampling: percent(100.0),
            random_sampling: percent(random),
            max_path_tag_length: tracing
                .max_path_tag_length
                .or((legacy_length != 0).then_some(legacy_length)),
            ..tracing
        };
        Encoded::write(tags.len() + 64, |out| out.spliced(&tracing, [tags]))
    }

    /// Returns the sampling percentage without a Telemetry.
    ///
    /// Parity (pilot/pkg/networking/core/tracing.go, `proxyConfigSamplingValue`): Istio sends negative ones, too, which
    /// Envoy rejects.
    fn default_sampling(&self) -> f64 {
        match self.client.tracing.sampling {
            sampling if sampling > 100.0 => 1.0,
            sampling if sampling > 0.0 => sampling,
            _ => self.features().pilot_trace_sampling,
        }
    }

    /// Encodes the tags, sorted by name.
    fn custom_tags(&self, istio: bool, user: Option<&BTreeMap<String, telemetry::CustomTag>>) -> Encoded<Tracing> {
        let mut tags: Vec<EncodedTag> = Vec::with_capacity(16);
        if istio {
            tags.extend(self.client.tags.custom_tags());
            tags.extend(dry_run_tags());
        }
        if self.client.proxy_type == ProxyType::Waypoint {
            tags.extend(waypoint_tags().map(encoded));
        }
        match user.filter(|user| !user.is_empty()) {
            Some(user) => {
                let tag = |(tag, how): (&String, _)| self.user_tag(tag, how).map(encoded);
                tags.extend(user.iter().filter_map(tag));
            }
            None => {
                let legacy = self.client.tracing.custom_tags.iter();
                tags.extend(legacy.filter_map(|(tag, how)| legacy_tag(tag, how).map(encoded)));
            }
        }
        tags.sort_by(|(a, _), (b, _)| a.cmp(b));
        Encoded::write(1024, |out| tags.iter().for_each(|(_, tag)| out.fields(tag)))
    }

    /// Returns a tag of a Telemetry; `None` for one that the proxy does not support, or because of which Envoy would
    /// refuse the listener: that of a waypoint has the services of several namespaces.
    fn user_tag(&self, tag: &str, how: &telemetry::CustomTag) -> Option<CustomTag> {
        use telemetry::custom_tag::Type;
        let r#type = match how.r#type.as_ref()? {
            Type::Literal(literal) => literal_tag(&literal.value),
            Type::Environment(from) => environment_tag(&from.name, &from.default_value),
            Type::Header(from) if is_header_text(&from.name) => header_tag(&from.name, &from.default_value),
            Type::Formatter(format) if self.client.version.at_least(1, 29) => {
                custom_tag::Type::Value(format_string::accepted(&format.value).into_owned())
            }
            Type::Header(_) | Type::Formatter(_) => return None,
        };
        Some(custom_tag(tag, r#type))
    }

    /// Returns the tracer of a provider; `None`, with a note, if it cannot be used.
    fn tracer(&self, provider: &ExtensionProvider) -> Option<Tracer> {
        let tracer = match provider.provider.as_ref()? {
            Provider::Zipkin(zipkin) => Tracer {
                name: ZIPKIN,
                config: self.zipkin(zipkin)?,
                max_tag_length: zipkin.max_tag_length,
                samples: false,
            },
            Provider::Datadog(datadog) => {
                let upstream = self.provider_cluster("datadog", &datadog.service, datadog.port)?;
                Tracer {
                    name: DATADOG,
                    config: Any::pack(&DatadogConfig {
                        collector_cluster: upstream.cluster,
                        service_name: self.client.service_cluster.to_string(),
                        collector_hostname: upstream.host,
                        ..Default::default()
                    }),
                    max_tag_length: datadog.max_tag_length,
                    samples: false,
                }
            }
            Provider::Skywalking(skywalking) => {
                let upstream = self.provider_cluster("skywalking", &skywalking.service, skywalking.port)?;
                Tracer {
                    name: SKYWALKING,
                    config: Any::pack(&SkyWalkingConfig {
                        grpc_service: Some(envoy_grpc(&upstream.cluster, &upstream.host)),
                        ..Default::default()
                    }),
                    max_tag_length: 0,
                    samples: false,
                }
            }
            Provider::Opentelemetry(otel) => Tracer {
                name: OPEN_TELEMETRY,
                config: self.open_telemetry(otel)?,
                max_tag_length: otel.max_tag_length,
                samples: otel.sampling.is_some(),
            },
            _ => return None,
        };
        self.has_extension(tracer.name).then_some(tracer)
    }

    fn zipkin(&self, zipkin: &ZipkinTracingProvider) -> Option<Any> {
        let upstream = self.provider_cluster("zipkin", &zipkin.service, zipkin.port)?;
        let path = if zipkin.path.is_empty() {
            "/api/v2/spans"
        } else {
            &zipkin.path
        };
        let mut config = ZipkinConfig {
            collector_endpoint_version: CollectorEndpointVersion::HttpJson as i32,
            trace_id_128bit: !zipkin.enable_64bit_trace_id,
            shared_span_context: Some(false),
            ..Default::default()
        };
        // Older proxies lack `collector_service`.
        if self.client.version.at_least(1, 29) {
            let uri = format!("http://{}{path}", upstream.host);
            config.collector_service = Some(self.http_service(uri, upstream, zipkin.timeout, &zipkin.headers));
        } else {
            config.collector_cluster = upstream.cluster;
            path.clone_into(&mut config.collector_endpoint);
            config.collector_hostname = upstream.host;
        }
        let option = TraceContextOption::try_from(zipkin.trace_context_option).unwrap_or_default();
        if self.client.version.at_least(1, 28) {
            config.trace_context_option = option as i32;
        }
        Some(Any::pack(&config))
    }

    fn open_telemetry(&self, otel: &OpenTelemetryTracingProvider) -> Option<Any> {
        let upstream = self.provider_cluster("opentelemetry", &otel.service, otel.port)?;
        let enriched = names_by_conventions(otel);
        let service_name = if enriched {
            &self.client.otel_service_name
        } else {
            &self.client.service_cluster
        };
        let mut config = OpenTelemetryConfig {
            service_name: service_name.to_string(),
            resource_detectors: resource_detectors(otel, enriched),
            ..Default::default()
        };
        if let Some(Sampling::DynatraceSampler(sampler)) = &otel.sampling {
            config.sampler = Some(self.dynatrace_sampler(otel, sampler, &upstream)?);
        }
        if let Some(http) = &otel.http {
            let uri = join_path(&upstream.host, &http.path)?;
            config.http_service = Some(self.http_service(uri, upstream, http.timeout, &http.headers));
        } else {
            let mut service = envoy_grpc(&upstream.cluster, &upstream.host);
            if let Some(grpc) = &otel.grpc {
                service.timeout = grpc.timeout;
                let metadata = grpc.initial_metadata.iter();
                service.initial_metadata = metadata.map(|from| self.header(from)).collect();
            }
            config.grpc_service = Some(service);
        }
        Some(Any::pack(&config))
    }

    fn dynatrace_sampler(
        &self,
        otel: &OpenTelemetryTracingProvider,
        sampler: &DynatraceSampler,
        upstream: &ProviderCluster,
    ) -> Option<TypedExtensionConfig> {
        let service = if let Some(api) = &sampler.http_service {
            let http: &ProviderHttpService = api.http.as_ref()?;
            let upstream = self.provider_cluster("dynatrace", &api.service, api.port)?;
            let uri = join_path(&upstream.host, &http.path)?;
            self.http_service(uri, upstream, http.timeout, &http.headers)
        } else {
            let http = otel.http.as_ref()?;
            let upstream = ProviderCluster {
                host: upstream.host.clone(),
                cluster: upstream.cluster.clone(),
            };
            let uri = join_path(&upstream.host, "api/v2/samplingConfiguration")?;
            self.http_service(uri, upstream, http.timeout, &http.headers)
        };
        Some(TypedExtensionConfig {
            name: "envoy.tracers.opentelemetry.samplers.dynatrace".to_owned(),
            typed_config: Some(Any::pack(&DynatraceSamplerConfig {
                tenant: sampler.tenant.clone(),
                cluster_id: sampler.cluster_id,
                http_service: Some(service),
                root_spans_per_minute: sampler.root_spans_per_minute,
            })),
        })
    }

    fn http_service(
        &self,
        uri: String,
        upstream: ProviderCluster,
        declared_timeout: Option<prost_types::Duration>,
        headers: &[HttpHeader],
    ) -> HttpService {
        HttpService {
            http_uri: Some(HttpUri {
                uri,
                timeout: Some(timeout(declared_timeout)),
                http_upstream_type: Some(http_uri::HttpUpstreamType::Cluster(upstream.cluster)),
            }),
            request_headers_to_add: headers
                .iter()
                .map(|from| HeaderValueOption {
                    header: Some(self.header(from)),
                    append_action: header_value_option::HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        }
    }

    /// Returns a configured header. `envName` is a variable of the control plane.
    ///
    /// Parity (pilot/pkg/networking/core/tracing.go): a variable that is not set is an empty value. Line breaks at the
    /// end are cut, since a Secret that was made from a file often has one, and so does a literal block of YAML. Envoy
    /// refuses them.
    fn header(&self, from: &HttpHeader) -> HeaderValue {
        let variables = &self.ctx.mesh.installation.variables;
        let value = match &from.header_value {
            Some(http_header::HeaderValue::Value(value)) => value.as_str(),
            Some(http_header::HeaderValue::EnvName(name)) => variables.value(name),
            None => "",
        };
        HeaderValue {
            key: from.name.clone(),
            value: value.trim_end_matches(['\r', '\n']).to_owned(),
            ..Default::default()
        }
    }
}

fn resource_detectors(otel: &OpenTelemetryTracingProvider, enriched: bool) -> Vec<TypedExtensionConfig> {
    let wanted = otel.resource_detectors.as_ref();
    let environment = TypedExtensionConfig {
        name: "envoy.tracers.opentelemetry.resource_detectors.environment".to_owned(),
        typed_config: Some(Any::pack(&EnvironmentResourceDetectorConfig {})),
    };
    let dynatrace = TypedExtensionConfig {
        name: "envoy.tracers.opentelemetry.resource_detectors.dynatrace".to_owned(),
        typed_config: Some(Any::pack(&DynatraceResourceDetectorConfig {})),
    };
    let has_environment = wanted.is_some_and(|detectors| detectors.environment.is_some());
    let has_dynatrace = wanted.is_some_and(|detectors| detectors.dynatrace.is_some());
    let first = has_environment.then(|| environment.clone());
    let second = has_dynatrace.then_some(dynatrace);
    let added = (enriched && !has_environment).then_some(environment);
    [first, second, added].into_iter().flatten().collect()
}

/// Returns the timeout of requests to a collector. Envoy refuses an `HttpUri` without one, or with a value out of
/// range.
///
/// Parity (pilot/pkg/networking/core/tracing.go): the default of Zipkin. Istio sends other collectors none.
fn timeout(declared: Option<prost_types::Duration>) -> prost_types::Duration {
    let is_valid = |timeout: &prost_types::Duration| (0..1 << 32).contains(&timeout.seconds) && timeout.nanos >= 0;
    let default = prost_types::Duration { seconds: 5, nanos: 0 };
    declared.filter(is_valid).unwrap_or(default)
}

/// Joins a host and a path as Go's `url.JoinPath` does: empty and dot segments are removed, a trailing slash stays. If
/// the path contains a character that no path may contain, all of it is encoded; a query becomes part of the path.
/// Returns `None` if a percent sign begins no escaped byte: such a provider is not used.
fn join_path(host: &str, path: &str) -> Option<String> {
    let mut segments = vec![host];
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => _ = segments.pop(),
            other => segments.push(other),
        }
    }
    let slash = if path.ends_with('/') { "/" } else { "" };
    let joined = format!("{}{slash}", segments.join("/"));
    if !is_escaped_well(&joined) {
        return None;
    }
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@!'()*[]%".contains(&byte);
    if joined.bytes().all(is_valid) {
        return Some(joined);
    }
    let plain: Vec<u8> = percent_decode_str(&joined).collect();
    Some(percent_encode(&plain, ENCODED).to_string())
}

/// Name of a tag, and the tag encoded as a field.
type EncodedTag = (Cow<'static, str>, Cow<'static, Encoded<Tracing>>);

fn encoded(tag: CustomTag) -> EncodedTag {
    let field = Encoded::write(0, |out| out.message(tracing::CUSTOM_TAGS, &tag));
    (tag.tag.into(), Cow::Owned(field))
}

impl ServiceTags {
    fn custom_tags(&self) -> impl Iterator<Item = EncodedTag> {
        [
            ("istio.canonical_revision", &self.revision),
            ("istio.canonical_service", &self.service),
            ("istio.mesh_id", &self.mesh),
            ("istio.namespace", &self.namespace),
            ("istio.cluster_id", &self.cluster),
        ]
        .into_iter()
        .map(|(tag, value)| {
            let field = Encoded::write(tag.len() + value.len() + 12, |out| {
                out.nested(tracing::CUSTOM_TAGS, |out| {
                    out.text(custom_tag_fields::TAG, tag);
                    out.nested(custom_tag_fields::LITERAL, |out| out.text(literal::VALUE, value));
                });
            });
            (tag.into(), Cow::Owned(field))
        })
    }
}

/// Returns tags with the decisions of dry-run policies.
fn dry_run_tags() -> impl Iterator<Item = EncodedTag> {
    static TAGS: LazyLock<Vec<(String, Encoded<Tracing>)>> = LazyLock::new(|| {
        let tags = new_dry_run_tags().map(encoded);
        tags.map(|(name, field)| (name.into_owned(), field.into_owned()))
            .collect()
    });
    TAGS.iter()
        .map(|(name, field)| (name.as_str().into(), Cow::Borrowed(field)))
}

fn new_dry_run_tags() -> impl Iterator<Item = CustomTag> {
    [
        ("allow_policy.name", "allow_shadow_effective_policy_id"),
        ("allow_policy.result", "allow_shadow_engine_result"),
        ("deny_policy.name", "deny_shadow_effective_policy_id"),
        ("deny_policy.result", "deny_shadow_engine_result"),
    ]
    .into_iter()
    .map(|(tag, key)| {
        let segment = metadata_key::path_segment::Segment::Key(format!("istio_dry_run_{key}"));
        let metadata = custom_tag::Metadata {
            kind: Some(MetadataKind {
                kind: Some(metadata_kind::Kind::Request(metadata_kind::Request {})),
            }),
            metadata_key: Some(MetadataKey {
                key: "envoy.filters.http.rbac".to_owned(),
                path: vec![metadata_key::PathSegment { segment: Some(segment) }],
            }),
            ..Default::default()
        };
        custom_tag(
            &format!("istio.authorization.dry_run.{tag}"),
            custom_tag::Type::Metadata(metadata),
        )
    })
}

/// Returns tags with source and destination of a connection through a waypoint.
fn waypoint_tags() -> impl Iterator<Item = CustomTag> {
    let fields = [
        ("workload", "workload"),
        ("namespace", "namespace"),
        ("cluster_id", "cluster"),
        ("canonical_service", "service"),
        ("canonical_revision", "revision"),
        ("app", "app"),
        ("app_version", "version"),
        ("workload_type", "type"),
        ("instance_name", "name"),
    ];
    [("destination", "upstream"), ("source", "downstream")]
        .into_iter()
        .flat_map(move |(role, peer)| {
            fields.into_iter().map(move |(tag, field)| {
                let value = format!("%FILTER_STATE({peer}_peer_obj:FIELD:{field})%");
                custom_tag(&format!("istio.{role}_{tag}"), custom_tag::Type::Value(value))
            })
        })
}

/// Returns a tag of a ProxyConfig; `None` if Envoy would refuse it, and the listener with it.
///
/// Parity (pilot/pkg/networking/core/tracing.go): tags without a known type are omitted. Istio sends empty texts.
fn legacy_tag(tag: &str, how: &legacy::CustomTag) -> Option<CustomTag> {
    use legacy::custom_tag::Type;
    let (text, r#type) = match how.r#type.as_ref()? {
        Type::Literal(literal) => (&literal.value, literal_tag(&literal.value)),
        Type::Environment(from) => (&from.name, environment_tag(&from.name, &from.default_value)),
        Type::Header(from) => (&from.name, header_tag(&from.name, &from.default_value)),
    };
    (!tag.is_empty() && !text.is_empty()).then(|| custom_tag(tag, r#type))
}

fn custom_tag(tag: &str, r#type: custom_tag::Type) -> CustomTag {
    CustomTag {
        tag: tag.to_owned(),
        r#type: Some(r#type),
    }
}

fn literal_tag(value: &str) -> custom_tag::Type {
    custom_tag::Type::Literal(custom_tag::Literal {
        value: value.to_owned(),
    })
}

fn environment_tag(name: &str, default: &str) -> custom_tag::Type {
    custom_tag::Type::Environment(custom_tag::Environment {
        name: name.to_owned(),
        default_value: default.to_owned(),
    })
}

fn header_tag(name: &str, default: &str) -> custom_tag::Type {
    custom_tag::Type::RequestHeader(custom_tag::Header {
        name: name.to_owned(),
        default_value: default.to_owned(),
    })
}

#[cfg(test)]
mod tests;
