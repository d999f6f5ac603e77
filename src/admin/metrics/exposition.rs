//! The text of `/metrics`: Prometheus text format 0.0.4 or OpenMetrics 1.0, by content negotiation.
//!
//! Numbers are written as Go writes them, because clients compare the text of `le`: `1e+06`, not `1000000`.

use std::{fmt::Write as _, io::Write as _};

use axum::response::{IntoResponse, Response};
use flate2::{Compression, write::GzEncoder};
use http::{HeaderMap, StatusCode, header};
use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

/// The form and encoding of a response, which its request chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::admin) struct Exposition {
    format: Format,
    encoding: Encoding,
}

impl Exposition {
    /// Returns what a client prefers.
    pub(in crate::admin) fn negotiated(headers: &HeaderMap) -> Self {
        Self {
            format: Format::negotiated(headers),
            encoding: Encoding::negotiated(headers),
        }
    }

    /// Returns the response with these families.
    pub(in crate::admin) fn response(self, families: &[MetricFamily]) -> Response {
        let text = self.format.text(families);
        let content_type = [(header::CONTENT_TYPE, self.format.content_type())];
        match self.encoding {
            Encoding::Plain => (content_type, text).into_response(),
            Encoding::Gzip => match compressed(&text) {
                Ok(bytes) => (content_type, [(header::CONTENT_ENCODING, "gzip")], bytes).into_response(),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
            },
        }
    }
}

fn compressed(text: &str) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes())?;
    encoder.finish()
}

/// The form of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Format {
    /// Prometheus text format 0.0.4.
    Text,
    /// OpenMetrics 1.0. A counter without the suffix `_total` has the type `unknown`, so that it keeps its name.
    OpenMetrics,
}

/// The encoding of the content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Encoding {
    Plain,
    Gzip,
}

impl Format {
    /// Returns the form that a client prefers.
    fn negotiated(headers: &HeaderMap) -> Self {
        let accepted = accepted(headers, header::ACCEPT);
        let quality = |names: &[&str]| {
            let of_name = accepted.iter().filter(|(name, _)| names.contains(&name.as_str()));
            of_name.map(|(_, quality)| *quality).fold(0.0, f32::max)
        };
        let open = quality(&["application/openmetrics-text"]);
        if open > 0.0 && open >= quality(&["text/plain"]) {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// Returns the content type.
    fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Returns the families as text.
    fn text(self, families: &[MetricFamily]) -> String {
        let mut text = String::new();
        for family in families {
            self.family(family, &mut text);
        }
        if self == Self::OpenMetrics {
            text.push_str("# EOF\n");
        }
        text
    }

    fn family(self, family: &MetricFamily, text: &mut String) {
        let name = family.name();
        let kind = match (family.get_field_type(), self) {
            (MetricType::COUNTER, Self::OpenMetrics) if !name.ends_with("_total") => "unknown",
            (MetricType::COUNTER, _) => "counter",
            (MetricType::GAUGE, _) => "gauge",
            (MetricType::HISTOGRAM, _) => "histogram",
            (MetricType::SUMMARY, _) => "summary",
            (MetricType::UNTYPED, Self::Text) => "untyped",
            (MetricType::UNTYPED, Self::OpenMetrics) => "unknown",
        };
        // OpenMetrics names the family of a counter without its suffix.
        let declared = match self {
            Self::OpenMetrics if kind == "counter" => name.trim_end_matches("_total"),
            _ => name,
        };
        let help = family.help().replace('\\', "\\\\").replace('\n', "\\n");
        let _ = write!(text, "# HELP {declared} {help}\n# TYPE {declared} {kind}\n");
        for metric in family.get_metric() {
            let labels = metric.get_label();
            match family.get_field_type() {
                MetricType::COUNTER => sample(text, name, labels, None, metric.get_counter().get_value()),
                MetricType::HISTOGRAM => histogram(text, name, metric),
                MetricType::GAUGE | MetricType::SUMMARY | MetricType::UNTYPED => {
                    sample(text, name, labels, None, metric.get_gauge().get_value());
                }
            }
        }
    }
}

impl Encoding {
    /// Returns the encoding that a client accepts.
    fn negotiated(headers: &HeaderMap) -> Self {
        let accepted = accepted(headers, header::ACCEPT_ENCODING);
        if accepted.iter().any(|(name, quality)| name == "gzip" && *quality > 0.0) {
            Self::Gzip
        } else {
            Self::Plain
        }
    }
}

/// Returns the elements of a header with their qualities, without parameters.
fn accepted(headers: &HeaderMap, name: header::HeaderName) -> Vec<(String, f32)> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    let element = |element: &str| {
        let mut parts = element.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default().to_ascii_lowercase();
        let quality = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok());
        (name, quality.unwrap_or(1.0))
    };
    values.flat_map(|value| value.split(',')).map(element).collect()
}

fn histogram(text: &mut String, name: &str, metric: &Metric) {
    let (labels, histogram) = (metric.get_label(), metric.get_histogram());
    let bucket = format!("{name}_bucket");
    for counted in histogram.get_bucket() {
        let count = counted.cumulative_count() as f64;
        sample(text, &bucket, labels, Some(counted.upper_bound()), count);
    }
    let count = histogram.get_sample_count() as f64;
    let is_complete = histogram.get_bucket().last();
    if is_complete.is_none_or(|last| last.upper_bound() != f64::INFINITY) {
        sample(text, &bucket, labels, Some(f64::INFINITY), count);
    }
    sample(text, &format!("{name}_sum"), labels, None, histogram.get_sample_sum());
    sample(text, &format!("{name}_count"), labels, None, count);
}

fn sample(text: &mut String, name: &str, labels: &[LabelPair], bound: Option<f64>, value: f64) {
    text.push_str(name);
    let mut separator = '{';
    for label in labels {
        let value = label
            .value()
            .replace('\\', "\\\\")
            .replace('\n', "\\n")
            .replace('"', "\\\"");
        let _ = write!(text, "{separator}{}=\"{value}\"", label.name());
        separator = ',';
    }
    if let Some(bound) = bound {
        let _ = write!(text, "{separator}le=\"{}\"", number(bound));
        separator = ',';
    }
    if separator == ',' {
        text.push('}');
    }
    let _ = writeln!(text, " {}", number(value));
}

/// Returns a number in the shortest form that Go's `strconv.FormatFloat(value, 'g', -1, 64)` would have.
fn number(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if (-4..6).contains(&exponent) {
        return format!("{value}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use prometheus::{Counter, Histogram, HistogramOpts, IntGaugeVec, Opts, Registry};

    use super::*;

    #[test]
    fn numbers_are_written_as_by_go() {
        let numbers = [
            0.0,
            1.0,
            0.01,
            100_000.0,
            1e6,
            4e7,
            1_234_567.0,
            0.000_05,
            0.86,
            u64::MAX as f64,
            -2.5,
        ];
        let texts = numbers.map(number);
        let expected = [
            "0",
            "1",
            "0.01",
            "100000",
            "1e+06",
            "4e+07",
            "1.234567e+06",
            "5e-05",
            "0.86",
            "1.8446744073709552e+19",
            "-2.5",
        ];
        assert_eq!(texts, expected);
        assert_eq!(
            [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(number),
            ["NaN", "+Inf", "-Inf"]
        );
    }

    fn families() -> Vec<MetricFamily> {
        let registry = Registry::new();
        let gauge = IntGaugeVec::new(Opts::new("a", "First\nline."), &["of"]).expect("a valid name");
        gauge.with_label_values(&["x\"y"]).set(3);
        let pushes = Counter::new("b_pushes", "Pushes.").expect("a valid name");
        let total = Counter::new("c_total", "Total.").expect("a valid name");
        let opts = HistogramOpts::new("d", "Sizes.").buckets(vec![1.0, 1e6]);
        let sizes = Histogram::with_opts(opts).expect("a valid name");
        sizes.observe(5.0);
        registry.register(Box::new(gauge)).expect("a new name");
        registry.register(Box::new(pushes)).expect("a new name");
        registry.register(Box::new(total)).expect("a new name");
        registry.register(Box::new(sizes)).expect("a new name");
        registry.gather()
    }

    #[test]
    fn both_forms_keep_the_names_of_samples() {
        let text = "# HELP a First\\nline.\n# TYPE a gauge\na{of=\"x\\\"y\"} 3\n\
            # HELP b_pushes Pushes.\n# TYPE b_pushes counter\nb_pushes 0\n\
            # HELP c_total Total.\n# TYPE c_total counter\nc_total 0\n\
            # HELP d Sizes.\n# TYPE d histogram\nd_bucket{le=\"1\"} 0\nd_bucket{le=\"1e+06\"} 1\n\
            d_bucket{le=\"+Inf\"} 1\nd_sum 5\nd_count 1\n";
        assert_eq!(Format::Text.text(&families()), text);
        let open = text
            .replace("TYPE b_pushes counter", "TYPE b_pushes unknown")
            .replace("# HELP c_total", "# HELP c")
            .replace("# TYPE c_total", "# TYPE c");
        assert_eq!(Format::OpenMetrics.text(&families()), open + "# EOF\n");
    }

    #[test]
    fn clients_choose_the_form() {
        let chosen = |accept: &str, encoding: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, accept.parse().expect("a header"));
            headers.insert(header::ACCEPT_ENCODING, encoding.parse().expect("a header"));
            (Format::negotiated(&headers), Encoding::negotiated(&headers))
        };
        let of_prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.1";
        assert_eq!(chosen(of_prometheus, "gzip"), (Format::OpenMetrics, Encoding::Gzip));
        assert_eq!(chosen("*/*", "identity"), (Format::Text, Encoding::Plain));
        let text = "text/plain;version=0.0.4,application/openmetrics-text;q=0.5";
        assert_eq!(chosen(text, "gzip;q=0"), (Format::Text, Encoding::Plain));
    }
}
