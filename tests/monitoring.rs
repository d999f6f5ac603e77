//! Dashboards and alerts: every query names metrics that exist, and a real Prometheus that scrapes the daemon under
//! load has data for each panel of Istio's dashboards that concerns istiod.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::ads::{AdsClient, Type};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::process::Process;
use crate::support::{http, kubernetes, missing, ports, project, scratch, wait};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "monitoring::queries_name_documented_metrics",
            queries_name_documented_metrics,
        ),
        Trial::ignorable_test("monitoring::rules_are_valid", rules_are_valid),
        kubernetes::optional_trial("monitoring::panels_have_data", panels_have_data),
    ]
}

const MISSING: &str = "Prometheus is missing; `make tools` installs it";

fn tool(name: &str) -> Option<PathBuf> {
    let path = project().join(".tools/bin").join(name);
    path.is_file().then_some(path)
}

fn rules() -> PathBuf {
    project().join("charts/istiod/files/monitoring/rules.yaml")
}

/// Returns the queries of the dashboard and of the alerts in the chart, as Prometheus receives them.
fn own_queries() -> Result<Vec<String>, Failed> {
    let text = std::fs::read_to_string(project().join("charts/istiod/files/monitoring/dashboard.json"))?;
    let dashboard: Value = serde_json::from_str(&text)?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut queries = Vec::new();
    for panel in list(&dashboard["panels"]) {
        for target in list(&panel["targets"]) {
            queries.push(target["expr"].as_str().ok_or("a target without a query")?.to_owned());
        }
    }
    let panels = queries.len();
    for document in istiod::api::yaml::documents(&std::fs::read_to_string(rules())?) {
        let document = document.parse().map_err(|error| error.to_string())?;
        for group in list(&document["groups"]) {
            for rule in list(&group["rules"]) {
                queries.push(rule["expr"].as_str().ok_or("an alert without a query")?.to_owned());
            }
        }
    }
    if panels == 0 || queries.len() == panels {
        return Err("the dashboard or the alerts have no query".into());
    }
    let with_values = |query: String| query.replace("$__rate_interval", "1m").replace("$instance", ".+");
    Ok(queries.into_iter().map(with_values).collect())
}

/// Returns the names of metrics in a query: words outside of selectors, ranges and lists of labels that are no function
/// and no operator.
fn metrics(query: &str) -> BTreeSet<String> {
    let mut text = String::new();
    let mut depth = 0;
    for character in query.chars() {
        match character {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            other if depth == 0 => text.push(other),
            _ => {}
        }
    }
    for keyword in ["by", "without", "on", "ignoring"] {
        while let Some(start) = text.find(&format!(" {keyword} (")) {
            let end = text[start..].find(')').map_or(text.len(), |end| start + end + 1);
            text.replace_range(start..end, " ");
        }
    }
    let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let mut names = BTreeSet::new();
    let mut rest = text.as_str();
    while let Some(start) = rest.find(is_name) {
        let end = rest[start..]
            .find(|character| !is_name(character))
            .map_or(rest.len(), |end| start + end);
        let (word, after) = (&rest[start..end], rest[end..].trim_start());
        let is_word = word.starts_with(|first: char| first.is_ascii_alphabetic());
        if is_word && !after.starts_with('(') && !["or", "and", "unless", "bool"].contains(&word) {
            names.insert(word.to_owned());
        }
        rest = &rest[end..];
    }
    names
}

fn queries_name_documented_metrics() -> Result<(), Failed> {
    let document = std::fs::read_to_string(project().join("docs/metrics.md"))?;
    let is_documented = |name: &str| document.contains(&format!("`{name}`"));
    let queries = own_queries()?;
    let unknown = |name: &String| {
        let parts = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|part| name.strip_suffix(part));
        !is_documented(name) && !parts.is_some_and(is_documented)
    };
    let unknown: BTreeSet<String> = queries
        .iter()
        .flat_map(|query| metrics(query))
        .filter(unknown)
        .collect();
    assert_eq!(
        metrics("sum by (le) (rate(a_bucket{b=\"c\"}[1m])) > 2 * time() or d")
            .into_iter()
            .collect::<Vec<_>>(),
        ["a_bucket", "d"]
    );
    if unknown.is_empty() {
        Ok(())
    } else {
        Err(format!("docs/metrics.md lacks {unknown:?}").into())
    }
}

fn rules_are_valid() -> Result<Completion, Failed> {
    let Some(tool) = tool("promtool") else {
        return missing(MISSING);
    };
    let output = Command::new(tool).args(["check", "rules"]).arg(rules()).output()?;
    if output.status.success() {
        return Ok(Completion::Completed);
    }
    Err(format!("{}", String::from_utf8_lossy(&output.stderr)).into())
}

/// Queries of the panels of Istio's dashboards that concern istiod (control plane and performance), in the forms that
/// Grafana sends.
const PANELS: &[&str] = &[
    "sum(istio_build{component=\"pilot\"}) by (tag)",
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "go_memstats_heap_sys_bytes",
    "go_memstats_heap_alloc_bytes",
    "go_memstats_alloc_bytes",
    "go_memstats_heap_inuse_bytes",
    "go_memstats_stack_inuse_bytes",
    "sum by (pod) (irate(process_cpu_seconds_total[1m]))",
    "go_goroutines",
    "rate(go_memstats_mallocs_total[1m])",
    "rate(go_memstats_alloc_bytes_total[1m])",
    "sum(irate(pilot_xds_pushes{type=\"cds\"}[1m]))",
    "sum(irate(pilot_xds_pushes{type=\"eds\"}[1m]))",
    "sum(irate(pilot_xds_pushes{type=\"lds\"}[1m]))",
    "sum(irate(pilot_xds_pushes{type=\"rds\"}[1m]))",
    "sum by (type) (irate(pilot_xds_pushes[1m]))",
    "sum by (type) (rate(pilot_k8s_cfg_events[1m]))",
    "sum by (type) (rate(pilot_k8s_reg_events[1m]))",
    "sum by (type) (rate(pilot_push_triggers[1m]))",
    "pilot_proxy_convergence_time_sum / pilot_proxy_convergence_time_count",
    "histogram_quantile(0.5, sum by (le) (rate(pilot_proxy_convergence_time_bucket[1m])))",
    "histogram_quantile(0.99, sum by (le) (rate(pilot_proxy_convergence_time_bucket[1m])))",
    "histogram_quantile(0.99, sum by (le) (rate(pilot_xds_push_time_bucket[1m])))",
    "sum(rate(pilot_xds_push_time_bucket{}[1m])) by (le)",
    "sum by (le) (rate(pilot_xds_config_size_bytes_bucket[1m]))",
    "histogram_quantile(0.99, sum by (le) (rate(pilot_proxy_queue_time_bucket[1m])))",
    "avg(pilot_virt_services)",
    "avg(pilot_services)",
    "sum(pilot_xds)",
    "pilot_xds",
    "sum by (version) (pilot_info)",
    "pilot_conflict_inbound_listener",
    "pilot_conflict_outbound_listener_tcp_over_current_tcp",
    "pilot_vservice_dup_domain",
    "pilot_eds_no_instances",
    "pilot_endpoint_not_ready",
    "pilot_no_ip",
    "pilot_destrule_subsets",
    "pilot_duplicate_envoy_clusters",
    "pilot_total_xds_internal_errors",
    "sum by (type) (rate(pilot_total_xds_rejects[1m]))",
    "sum by (type) (pilot_xds_cds_reject)",
    "sum(rate(sidecar_injection_success_total[1m]))",
    "sum(rate(sidecar_injection_failure_total[1m]))",
    "sum(rate(galley_validation_passed[1m]))",
    "sum(rate(galley_validation_failed[1m]))",
];

/// The answer of Prometheus to a query: its result, or its error.
fn ask(prometheus: SocketAddr, query: &str) -> Result<Vec<Value>, String> {
    let encoded: String = percent_encoding::utf8_percent_encode(query, percent_encoding::NON_ALPHANUMERIC).collect();
    let answer = http::get(prometheus, "prometheus", &format!("/api/v1/query?query={encoded}"))?;
    let answer: Value = serde_json::from_str(&answer.body).map_err(|error| format!("{error}: {}", answer.body))?;
    match &answer["data"]["result"] {
        Value::Array(result) => Ok(result.clone()),
        _ => Err(format!("{query}: {answer}")),
    }
}

fn virtual_service(namespace: &str, weight: u32) -> Value {
    let route = |host: &str, weight: u32| json!({ "destination": { "host": host }, "weight": weight });
    json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": { "namespace": namespace, "name": "web" },
        "spec": { "hosts": ["web"], "http": [{ "route": [route("web", weight), route("other", 100 - weight)] }] } })
}

fn review(weight: i32) -> String {
    let mut object = virtual_service("default", 50);
    object["spec"]["http"][0]["route"][0]["weight"] = json!(weight);
    json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "1", "operation": "CREATE", "namespace": "default", "name": "web",
        "kind": { "group": "networking.istio.io", "version": "v1", "kind": "VirtualService" },
        "resource": { "group": "networking.istio.io", "version": "v1", "resource": "virtualservices" },
        "object": object } })
    .to_string()
}

fn panels_have_data(name: &str) -> Result<Completion, Failed> {
    let Some(binary) = tool("prometheus") else {
        return missing(MISSING);
    };
    let folder = scratch(name);
    let namespace = "monitoring";
    let cluster = kubernetes::shared(0)?;
    cluster.namespace(namespace, &json!({}))?;
    for host in ["web", "other"] {
        cluster.api.apply(&json!({ "apiVersion": "v1", "kind": "Service",
            "metadata": { "namespace": namespace, "name": host },
            "spec": { "selector": { "app": host }, "ports": [{ "name": "http", "port": 80 }] } }))?;
    }
    let kubeconfig = cluster.admin_kubeconfig();
    let daemon = Daemon::in_kubernetes(&kubeconfig, "istio-system", &folder.join("istiod.log"), |_| {})?;
    let config = format!(
        "global: {{scrape_interval: 1s}}\nscrape_configs:\n- job_name: istiod\n  static_configs:\n  \
         - targets: ['{}']\n    labels: {{pod: istiod-1}}\n",
        daemon.monitoring
    );
    std::fs::write(folder.join("prometheus.yaml"), config)?;
    let prometheus = SocketAddr::from(([127, 0, 0, 1], ports::free()));
    let mut command = Command::new(binary);
    command.arg(format!("--config.file={}", folder.join("prometheus.yaml").display()));
    command.arg(format!("--storage.tsdb.path={}", folder.join("data").display()));
    command.arg(format!("--web.listen-address={prometheus}"));
    let scraper = Process::start(&mut command, &folder.join("prometheus.log"));
    let node = |pod: &str| Node {
        id: format!("sidecar~10.9.0.1~{pod}.{namespace}~{namespace}.svc.cluster.local"),
        metadata: json!({ "NAMESPACE": namespace, "CLUSTER_ID": "Kubernetes", "ISTIO_VERSION": "1.30.3" }),
    };
    let (proxy, refusing) = (
        AdsClient::connect(daemon.xds, &node("web-1")),
        AdsClient::connect(daemon.xds, &node("web-2")),
    );
    proxy.first()?;
    refusing.first()?;
    for resource_type in Type::ALL {
        refusing.refuse(resource_type, "refused by the test");
    }
    let mut empty: Vec<&str> = PANELS.to_vec();
    let mut round = 0;
    let mut scraped_at = Value::Null;
    let outcome = wait::until("data in every panel", Duration::from_secs(90), || {
        // Between two scrapes, more load would change no answer, but occupy all daemons of the shared cluster.
        let last = ask(prometheus, "timestamp(up)").unwrap_or_default();
        let last = last.first().map_or(Value::Null, |sample| sample["value"][1].clone());
        if round > 0 && last == scraped_at {
            return None;
        }
        scraped_at = last;
        round += 1;
        // Load: configuration, the registry, and admission.
        let written = cluster
            .api
            .apply(&virtual_service(namespace, round % 100))
            .and_then(|_| {
                let service = json!({ "apiVersion": "v1", "kind": "Service",
                "metadata": { "namespace": namespace, "name": format!("web-{round}") },
                "spec": { "ports": [{ "name": "http", "port": 80 }] } });
                cluster.api.apply(&service)
            });
        for weight in [50, -1] {
            let headers = [("content-type", "application/json")];
            let _ = http::send(daemon.http, "POST", "/validate", &headers, &review(weight));
        }
        let _ = http::send(
            daemon.http,
            "POST",
            "/inject",
            &[("content-type", "application/json")],
            "{}",
        );
        let asked = written.map(|_| {
            let mut still = Vec::new();
            for query in &empty {
                if ask(prometheus, query).unwrap_or_default().is_empty() {
                    still.push(*query);
                }
            }
            still
        });
        match asked {
            Ok(still) => {
                empty = still;
                empty.is_empty().then_some(Ok(()))
            }
            Err(error) => Some(Err(error)),
        }
    });
    match outcome {
        Ok(written) => written?,
        Err(error) => return Err(format!("{error}: {empty:#?}\n{}", scraper.log_tail()).into()),
    }
    // Own queries are understood; that names exist is another test.
    for query in own_queries()? {
        ask(prometheus, &query)?;
    }
    Ok(Completion::Completed)
}
