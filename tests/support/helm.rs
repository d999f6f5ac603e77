//! The real Helm, and the objects that it renders from the charts.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::{missing, project};

fn binary() -> Option<PathBuf> {
    let path = project().join(".tools/bin/helm");
    path.is_file().then_some(path)
}

/// Reports whether Helm is installed.
pub(crate) fn is_installed() -> bool {
    binary().is_some()
}

/// A test that is skipped where Helm is missing.
pub(crate) fn trial(name: &str, trial: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || {
        if !is_installed() {
            return missing("Helm is missing; `make tools` installs it");
        }
        trial().map(|()| libtest_mimic::Completion::Completed)
    })
}

/// Runs Helm with an empty environment in the folder of the charts. Returns its standard output.
pub(crate) fn run(arguments: &[&str]) -> Result<String, String> {
    let mut helm = Command::new(binary().ok_or("no Helm")?);
    let home = project().join("target/integration/helm");
    helm.env_clear()
        // Less frequent garbage collection saves a fifth of the CPU time of a rendering.
        .env("GOGC", "400")
        .envs(["HOME", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"].map(|name| (name, &home)))
        .current_dir(project().join("charts"))
        .args(arguments);
    let output = helm.output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(format!(
            "helm {}: {}{}",
            arguments.join(" "),
            text(&output.stdout),
            text(&output.stderr)
        ))
    }
}

/// Renders a chart as the release `mesh` in istio-system with these values (`name=value`).
pub(crate) fn objects(chart: &str, values: &[&str]) -> Result<Vec<Value>, String> {
    objects_in("istio-system", chart, values)
}

/// Like [`objects`], for another namespace of the control plane. Without values, a chart is rendered once for all
/// tests.
pub(crate) fn objects_in(namespace: &str, chart: &str, values: &[&str]) -> Result<Vec<Value>, String> {
    /// Objects by namespace and chart.
    type Defaults = BTreeMap<(String, String), Vec<Value>>;
    static DEFAULTS: Mutex<Defaults> = Mutex::new(BTreeMap::new());
    if !values.is_empty() {
        return rendered(namespace, chart, values);
    }
    let mut defaults = DEFAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    match defaults.entry((namespace.to_owned(), chart.to_owned())) {
        Entry::Occupied(known) => Ok(known.get().clone()),
        Entry::Vacant(place) => Ok(place.insert(rendered(namespace, chart, &[])?).clone()),
    }
}

fn rendered(namespace: &str, chart: &str, values: &[&str]) -> Result<Vec<Value>, String> {
    let root = format!("global.istioNamespace={namespace}");
    let mut arguments = vec!["template", "mesh", chart, "--namespace", namespace, "--set", &root];
    for value in values {
        arguments.extend(["--set", value]);
    }
    let text = run(&arguments)?;
    let documents = istiod::api::yaml::documents(&text);
    documents
        .iter()
        .map(|document| document.parse().map_err(|error| error.to_string()))
        .collect()
}

/// Returns the environment variables with a literal value in the Deployment of a chart.
pub(crate) fn environment(objects: &[Value]) -> Vec<(String, String)> {
    let deployment = objects.iter().find(|object| object["kind"] == "Deployment");
    let container = deployment.map(|deployment| &deployment["spec"]["template"]["spec"]["containers"][0]);
    let entries = container
        .and_then(|container| container["env"].as_array())
        .into_iter()
        .flatten();
    entries
        .filter_map(|entry| Some((entry["name"].as_str()?.to_owned(), entry["value"].as_str()?.to_owned())))
        .collect()
}

/// Returns the keys `config` and `values` of the injector's ConfigMap in the objects of a chart.
pub(crate) fn injector(objects: &[Value]) -> Result<[&str; 2], String> {
    let is_injector =
        |object: &&Value| object["kind"] == "ConfigMap" && object["metadata"]["name"] == "istio-sidecar-injector";
    let found = objects.iter().find(is_injector);
    let key = |name| found.and_then(|found| found["data"][name].as_str());
    let texts = key("config").zip(key("values"));
    let (config, values) = texts.ok_or("the chart has no injector ConfigMap")?;
    Ok([config, values])
}

/// Returns a webhook configuration that calls this port of the machine instead of a Service. `suffix` is appended to
/// the paths.
pub(crate) fn with_local_webhooks(configuration: &Value, port: u16, suffix: &str) -> Value {
    let mut configuration = configuration.clone();
    for webhook in configuration["webhooks"].as_array_mut().into_iter().flatten() {
        let path = webhook["clientConfig"]["service"]["path"].as_str().unwrap_or_default();
        webhook["clientConfig"] = json!({ "url": format!("https://localhost:{port}{path}{suffix}") });
    }
    configuration
}
