//! `/metrics` has Istio's names, types, labels and buckets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use libtest_mimic::Failed;
use serde_json::json;

use super::{folder, gateway, sidecar};
use crate::secure::authority::Authority;
use crate::support::agent::{Agent, ClientCredentials, KeyKind, Trust};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::http::{self, RUNTIME};
use crate::support::{project, scratch, variable, wait};

/// The type, labels and buckets of a metric.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Shape {
    kind: String,
    labels: BTreeSet<String>,
    /// The texts of `le`, in order.
    buckets: Vec<String>,
}

type Shapes = BTreeMap<String, Shape>;

/// Reads an exposition. A metric that has no sample is left out.
fn parse(text: &str) -> Shapes {
    let mut kinds = BTreeMap::new();
    let mut shapes = Shapes::new();
    for line in text.lines() {
        if let Some(declared) = line.strip_prefix("# TYPE ") {
            kinds.extend(declared.split_once(' '));
        } else if !line.starts_with('#') {
            sample(line, &kinds, &mut shapes);
        }
    }
    shapes
}

fn sample(line: &str, kinds: &BTreeMap<&str, &str>, shapes: &mut Shapes) {
    let end = line.find(['{', ' ']).unwrap_or(line.len());
    let (sample, rest) = line.split_at(end);
    let family = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| {
        let family = sample.strip_suffix(suffix)?;
        matches!(kinds.get(family), Some(&("histogram" | "summary"))).then_some(family)
    });
    let name = family.unwrap_or(sample);
    let shape = shapes.entry(name.to_owned()).or_default();
    shape.kind = kinds.get(name).map(|kind| (*kind).to_owned()).unwrap_or_default();
    let Some((labels, _)) = rest.strip_prefix('{').and_then(|rest| rest.rsplit_once('}')) else {
        return;
    };
    // No value of the compared metrics contains `",`.
    for (label, value) in labels.split("\",").filter_map(|pair| pair.split_once("=\"")) {
        match label {
            "le" => {
                let bound = value.trim_end_matches('"').to_owned();
                if !shape.buckets.contains(&bound) {
                    shape.buckets.push(bound);
                }
            }
            "quantile" => {}
            label => {
                shape.labels.insert(label.to_owned());
            }
        }
    }
}

fn line(name: &str, shape: &Shape) -> String {
    let labels: Vec<&str> = shape.labels.iter().map(String::as_str).collect();
    format!("{name} {} {} {}", shape.kind, labels.join(","), shape.buckets.join(","))
}

/// Returns the lines of a file that are neither empty nor comments, split at the first space.
fn entries(text: &str) -> BTreeMap<&str, &str> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' ')).collect()
}

/// Writes the facts of the recorded metrics.
fn record(file: &Path) -> Result<(), Failed> {
    let set = project().join("../shared/conformance/upstream/debug/metrics.txt");
    let shapes = parse(&std::fs::read_to_string(set)?);
    let lines: Vec<String> = shapes.iter().map(|(name, shape)| line(name, shape)).collect();
    Ok(std::fs::write(file, lines.join("\n") + "\n")?)
}

/// Every metric of the recording exists with its type, labels and buckets, except for the listed ones.
pub(super) fn are_those_of_istio() -> Result<(), Failed> {
    let file = folder().join("metrics.txt");
    if variable("UPDATE_GOLDEN").is_some() {
        record(&file)?;
    }
    let given = parse(&served()?);
    let expected = std::fs::read_to_string(&file)?;
    let deviations = std::fs::read_to_string(folder().join("metrics-deviations.txt"))?;
    let deviations = entries(&deviations);
    let mut problems = Vec::new();
    for (name, fact) in entries(&expected) {
        let own = given.get(name).map(|shape| line(name, shape));
        let is_equal = own.as_deref() == Some(format!("{name} {fact}").as_str());
        match deviations.get(name) {
            None if !is_equal => problems.push(format!("Istio: {name} {fact}\n  here: {own:?}")),
            Some(_) if is_equal => problems.push(format!("{name} no longer deviates")),
            _ => {}
        }
    }
    let numbers: Vec<&String> = given.keys().filter(|name| name.starts_with("istiod_watch_")).collect();
    assert!(numbers.is_empty(), "a folder has no watches: {numbers:?}");
    if problems.is_empty() {
        return Ok(());
    }
    Err(problems.join("\n").into())
}

/// A sample of the one debug page that was requested over xDS.
const PAGE_SENT: &str = "pilot_xds_pushes{type=\"istio.io/debug\"} 1";

/// Returns the metrics of a daemon that serves two proxies, has issued a certificate and has shown a page over xDS.
fn served() -> Result<String, Failed> {
    let authority = Authority::new("metrics");
    let scratch = scratch("debug-metrics");
    let plugged = scratch.join("cacerts");
    authority.plug_into(&plugged);
    let daemon = Daemon::secured(&scratch.join("istiod.log"), |command| {
        command
            .arg("--configDir")
            .arg(folder().join("mesh"))
            .args(["-n", "istio-system"]);
        command.env("ROOT_CA_DIR", &plugged);
    })?;
    let _clients = (sidecar(&daemon)?, gateway(&daemon)?);
    let agent = Agent::new(daemon.secure, Trust::Roots(authority.root.clone()));
    let credentials = ClientCredentials::certificate(authority.certificate("spiffe://cluster.local/ns/app/sa/web"));
    RUNTIME
        .block_on(agent.certificate(&credentials, KeyKind::Ecdsa))
        .map_err(|status| status.to_string())?;
    let operator = authority.certificate("spiffe://cluster.local/ns/istio-system/sa/operator");
    let node = Node {
        id: "sidecar~10.1.0.9~operator.istio-system~istio-system.svc.cluster.local".to_owned(),
        metadata: json!({ "NAMESPACE": "istio-system", "SERVICE_ACCOUNT": "operator" }),
    };
    let page = RUNTIME.block_on(async {
        let mut stream = agent.ads(&ClientCredentials::certificate(operator), &node).await?;
        stream.ask("istio.io/debug", &["resourcesz"]).await
    });
    let page = page.map_err(|status| status.to_string())?;
    let over_http = http::get(daemon.monitoring, "istiod", "/debug/resourcesz")?.body;
    let over_xds: Vec<_> = page.resources.iter().map(|page| page.value.to_vec()).collect();
    assert_eq!(over_xds, [over_http.into_bytes()]);
    Ok(wait::until("a counted page", Duration::from_mins(1), || {
        let metrics = http::get(daemon.monitoring, "istiod", "/metrics").ok()?.body;
        metrics.lines().any(|line| line == PAGE_SENT).then_some(metrics)
    })?)
}
