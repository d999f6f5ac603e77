//! Metrics: Prometheus scrapes the proxy's agent, which also scrapes the application.

use serde_json::{Map, Value as Json, json};

use super::{pod, request::Request};
use crate::base::boolean;

const MERGE: &str = "prometheus.istio.io/merge-metrics";
const VARIABLE: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";

/// The settings of Prometheus' annotations.
#[derive(Clone, Copy, PartialEq)]
enum Setting {
    Scrape,
    Path,
    Port,
}

/// Returns the setting of an annotation. Prometheus sees all other characters than letters and digits as `_`.
fn setting(name: &str) -> Option<Setting> {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let name: String = name
        .chars()
        .map(|character| if is_plain(character) { character } else { '_' })
        .collect();
    match name.as_str() {
        "prometheus_io_scrape" => Some(Setting::Scrape),
        "prometheus_io_path" => Some(Setting::Path),
        "prometheus_io_port" => Some(Setting::Port),
        _ => None,
    }
}

fn value(pod: &Json, wanted: Setting) -> Option<&str> {
    let annotations = pod.pointer("/metadata/annotations")?.as_object()?;
    let found = annotations.iter().find(|(name, _)| setting(name) == Some(wanted));
    found.and_then(|(_, value)| value.as_str())
}

/// Returns the port that Prometheus scrapes.
pub(super) fn port(pod: &Json) -> Option<&str> {
    value(pod, Setting::Port)
}

/// Removes all annotations of Prometheus.
pub(super) fn clear(pod: &mut Json) {
    pod::annotations_mut(pod).retain(|name, _| setting(name).is_none());
}

/// Makes Prometheus scrape the agent, and tells the agent what the pod's annotations said.
///
/// Parity (pkg/kube/inject/webhook.go, applyPrometheusMerge).
pub(super) fn merge(request: &Request<'_>, pod: &mut Json) {
    let is_scraped = value(pod, Setting::Scrape).and_then(boolean::parse).unwrap_or(true);
    let by_annotation = pod::annotation(pod, MERGE).and_then(boolean::parse);
    let by_mesh = || request.mesh().config.enable_prometheus_merge.unwrap_or(true);
    let target = request.mesh().status_port().to_string();
    if !is_scraped || !by_annotation.unwrap_or_else(by_mesh) || port(pod) == Some(target.as_str()) {
        return;
    }
    let text = |setting| value(pod, setting).unwrap_or_default().to_owned();
    let [scrape, path, port] = [Setting::Scrape, Setting::Path, Setting::Port].map(text);
    if ![&scrape, &path, &port].into_iter().all(String::is_empty)
        && let Some(sidecar) = pod::sidecar_mut(pod)
    {
        let quoted = |text: String| Json::String(text).to_string();
        let (scrape, path, port) = (quoted(scrape), quoted(path), quoted(port));
        let settings = format!("{{\"scrape\":{scrape},\"path\":{path},\"port\":{port}}}");
        pod::items_mut(sidecar, "env").push(json!({"name": VARIABLE, "value": settings}));
    }
    clear(pod);
    let annotations: &mut Map<String, Json> = pod::annotations_mut(pod);
    annotations.insert("prometheus.io/port".to_owned(), Json::String(target));
    annotations.insert("prometheus.io/path".to_owned(), Json::from("/stats/prometheus"));
    annotations.insert("prometheus.io/scrape".to_owned(), Json::from("true"));
}
