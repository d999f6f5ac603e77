//! OTLP traces of the daemon's own work, by the standard variables (`OTEL_*`).
//!
//! Nothing runs without an endpoint. The variables are those of the OpenTelemetry specification ("Environment Variable
//! Specification" and "OpenTelemetry Protocol Exporter"); the SDK reads most of them itself. Spans wait in a bounded
//! queue, so a slow or absent collector delays nothing: what does not fit is dropped and counted.

mod export;
mod pushes;

use std::{sync::Arc, time::Duration};

use hyper_rustls::HttpsConnectorBuilder;
use opentelemetry::{KeyValue, trace::TracerProvider};
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{
    ExporterBuildError, SpanExporter, WithHttpConfig, WithTonicConfig, tonic_types::transport::ClientTlsConfig,
};
use opentelemetry_sdk::{
    Resource,
    resource::{EnvResourceDetector, TelemetryResourceDetector},
    trace::SdkTracerProvider,
};
use prometheus::Registry;
use rustls::{ClientConfig, RootCertStore, crypto::aws_lc_rs};
use tokio::runtime::Handle;

pub use self::pushes::Clocks;
use self::{export::Exporting, pushes::Pushes};
use crate::{push::delivery::PushTracer, settings::Settings, task::Tasks};

/// The time for the last spans at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// The default of `OTEL_EXPORTER_OTLP_TIMEOUT`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// A failure to export traces as the variables request.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A variable has a value that is not supported.
    #[error("{variable}: {value:?} is not supported; hint: want one of {supported}")]
    Unsupported {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The supported values.
        supported: &'static str,
    },
    /// A variable is not a number.
    #[error("{variable}: {value:?} is not {wanted}")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The range of values.
        wanted: &'static str,
    },
    /// The endpoint or the headers are invalid.
    #[error("OTEL_EXPORTER_OTLP_*: {0}")]
    Exporter(#[from] ExporterBuildError),
    /// Two metrics share a name; a defect.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// The transport of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Grpc,
    Http,
}

/// The settings that are not read by the SDK.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    protocol: Protocol,
    timeout: Duration,
}

/// Returns the first of the variables that is set, and its value. The variable of one signal precedes the general one.
fn first<'a>(settings: &'a Settings, variables: [&'static str; 2]) -> Option<(&'static str, &'a str)> {
    let mut set = variables
        .into_iter()
        .filter_map(|name| Some((name, settings.variable(name)?)));
    set.next()
}

/// Returns the options; `None` if traces are off.
fn options(settings: &Settings) -> Result<Option<Options>, TraceError> {
    let unsupported = |(variable, value): (&'static str, &str), supported| TraceError::Unsupported {
        variable,
        value: value.to_owned(),
        supported,
    };
    let is_disabled = settings
        .variable("OTEL_SDK_DISABLED")
        .is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let endpoint = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
    if is_disabled || first(settings, endpoint).is_none() {
        return Ok(None);
    }
    match settings.variable("OTEL_TRACES_EXPORTER") {
        None | Some("otlp") => {}
        Some("none") => return Ok(None),
        Some(other) => return Err(unsupported(("OTEL_TRACES_EXPORTER", other), "otlp, none")),
    }
    let protocol = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
    let protocol = match first(settings, protocol) {
        Some((_, "grpc")) => Protocol::Grpc,
        None | Some((_, "http/protobuf")) => Protocol::Http,
        Some(other) => return Err(unsupported(other, "grpc, http/protobuf")),
    };
    let timeout = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
    let timeout = match first(settings, timeout) {
        None => DEFAULT_TIMEOUT,
        Some((variable, value)) => match value.parse() {
            Ok(milliseconds) => Duration::from_millis(milliseconds),
            Err(_) => {
                return Err(TraceError::NotANumber {
                    variable,
                    value: value.to_owned(),
                    wanted: "a number of milliseconds",
                });
            }
        },
    };
    check_sampler(settings)?;
    Ok(Some(Options { protocol, timeout }))
}

/// Checks the sampler, because the SDK would replace an invalid one by its default.
fn check_sampler(settings: &Settings) -> Result<(), TraceError> {
    let (variable, argument) = ("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG");
    match settings.variable(variable) {
        None | Some("always_on" | "always_off" | "parentbased_always_on" | "parentbased_always_off") => Ok(()),
        Some("traceidratio" | "parentbased_traceidratio") => match settings.variable(argument) {
            Some(value) if !value.parse().is_ok_and(|ratio: f64| (0.0..=1.0).contains(&ratio)) => {
                Err(TraceError::NotANumber {
                    variable: argument,
                    value: value.to_owned(),
                    wanted: "a number from 0 to 1",
                })
            }
            _ => Ok(()),
        },
        Some(other) => Err(TraceError::Unsupported {
            variable,
            value: other.to_owned(),
            supported: "always_on, always_off, traceidratio, parentbased_always_on, parentbased_always_off, \
                parentbased_traceidratio",
        }),
    }
}

/// The running export of traces.
pub struct Traces {
    provider: SdkTracerProvider,
    clocks: Clocks,
}

impl Traces {
    /// Starts the export on this runtime; `None` if traces are off.
    pub fn start(
        settings: &Settings,
        tasks: &Tasks,
        registry: &Registry,
        clocks: Clocks,
    ) -> Result<Option<Self>, TraceError> {
        let Some(options) = options(settings)? else {
            return Ok(None);
        };
        let exporting = Exporting::new(registry, tasks.clone(), Handle::current())?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource(settings))
            .with_span_processor(exporting.processor(exporter(&options)?))
            .build();
        Ok(Some(Self { provider, clocks }))
    }

    /// Returns the tracer of pushes.
    pub fn pushes(&self) -> Box<dyn PushTracer> {
        Box::new(Pushes::new(self.provider.tracer("istiod"), self.clocks))
    }

    /// Sends the last spans, for at most [`FLUSH_TIMEOUT`]. Blocks this thread.
    pub fn end(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH_TIMEOUT) {
            tracing::debug!(%error, "last traces were not exported");
        }
    }
}

/// Returns the attributes of this process. Those of `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` precede ours.
fn resource(settings: &Settings) -> Resource {
    let mut attributes = vec![
        KeyValue::new("service.name", "istiod"),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
    ];
    let places = [("POD_NAME", "k8s.pod.name"), ("POD_NAMESPACE", "k8s.namespace.name")];
    for (variable, attribute) in places {
        let value = settings.variable(variable).map(ToOwned::to_owned);
        attributes.extend(value.map(|value| KeyValue::new(attribute, value)));
    }
    let resource = Resource::builder_empty()
        .with_attributes(attributes)
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_detector(Box::new(EnvResourceDetector::new()));
    match settings.variable("OTEL_SERVICE_NAME") {
        Some(name) => resource.with_service_name(name.to_owned()).build(),
        None => resource.build(),
    }
}

fn exporter(options: &Options) -> Result<SpanExporter, ExporterBuildError> {
    match options.protocol {
        Protocol::Grpc => SpanExporter::builder()
            .with_tonic()
            .with_tls_config(ClientTlsConfig::new().with_native_roots())
            .build(),
        Protocol::Http => SpanExporter::builder()
            .with_http()
            .with_http_client(http_client(options.timeout))
            .build(),
    }
}

fn http_client(
    timeout: Duration,
) -> HyperClient<hyper_rustls::HttpsConnector<hyper_util::client::legacy::connect::HttpConnector>> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("because the provider supports both versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_or_http()
        .enable_http1()
        .build();
    HyperClient::new(connector, timeout, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::fixture::settings;

    fn options_of(variables: &[(&str, &str)]) -> Result<Option<Options>, String> {
        options(&settings(&[], variables)).map_err(|error| error.to_string())
    }

    #[test]
    fn traces_are_off_without_an_endpoint() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317");
        for off in [
            &[][..],
            &[("OTEL_TRACES_EXPORTER", "otlp")],
            &[endpoint, ("OTEL_TRACES_EXPORTER", "none")],
            &[endpoint, ("OTEL_SDK_DISABLED", "True")],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")],
        ] {
            assert_eq!(options_of(off), Ok(None), "{off:?}");
        }
    }

    #[test]
    fn variables_of_traces_precede_general_ones() {
        let options = options_of(&[
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4317"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "500"),
        ]);
        let expected = Options {
            protocol: Protocol::Grpc,
            timeout: Duration::from_millis(500),
        };
        assert_eq!(options, Ok(Some(expected)));
    }

    #[test]
    fn unsupported_values_are_errors_that_name_the_variable() {
        for (variable, value) in [
            ("OTEL_TRACES_EXPORTER", "zipkin"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
            ("OTEL_TRACES_SAMPLER", "xray"),
        ] {
            let variables = [
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317"),
                (variable, value),
            ];
            let error = options_of(&variables).expect_err("an error");
            assert!(error.starts_with(&format!("{variable}: \"{value}\"")), "{error}");
        }
        let error = options_of(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317"),
            ("OTEL_TRACES_SAMPLER", "traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "2"),
        ]);
        assert!(error.is_err_and(|error| error.starts_with("OTEL_TRACES_SAMPLER_ARG: \"2\"")));
    }
}
