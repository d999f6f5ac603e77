//! The chart istiod next to Istio's own, rendered with its defaults.

use std::collections::{BTreeMap, BTreeSet};

use istiod::api::yaml;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::Value;

use super::presets::data;
use super::rendered::{find, names};
use crate::support::{helm, missing, project};

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, check: Check| {
        Trial::ignorable_test(format!("charts::conformance::{name}"), move || of_istio(check))
    };
    vec![
        trial("objects_equal_those_of_istio", objects_equal_those_of_istio),
        trial("fields_equal_those_of_istio", fields_equal_those_of_istio),
        trial("values_equal_those_of_istio", values_equal_those_of_istio),
    ]
}

/// A comparison of the objects of Istio's chart with those of this one.
type Check = fn(&[Value], &[Value]) -> Result<(), Failed>;

/// The objects of Istio's chart, where its conformance set is next to the project.
pub(super) const RENDERED: &str = "../shared/conformance/upstream/chart/istio-discovery-1.30.3.yaml";

fn of_istio(check: Check) -> Result<Completion, Failed> {
    let Ok(text) = std::fs::read_to_string(project().join(RENDERED)) else {
        return Ok(Completion::ignored_with(
            "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
        ));
    };
    if !helm::is_installed() {
        return missing("Helm is missing; `make tools` installs it");
    }
    let istio: Result<Vec<Value>, _> = yaml::documents(&text).iter().map(yaml::Document::parse).collect();
    let istio: Vec<Value> = istio?.into_iter().filter(Value::is_object).collect();
    check(&istio, &helm::objects("istiod", &[])?).map(|()| Completion::Completed)
}

fn objects_equal_those_of_istio(istio: &[Value], ours: &[Value]) -> Result<(), Failed> {
    let different: BTreeSet<String> = names(istio).symmetric_difference(&names(ours)).cloned().collect();
    assert!(different.is_empty(), "objects of one chart only: {different:?}");
    Ok(())
}

/// Fields that differ, by kind, name and the beginning of the path, with the reason.
const FIELDS: &[(&str, &str, &str)] = &[
    (
        "",
        "metadata labels app.kubernetes.io/instance",
        "the name of the release",
    ),
    (
        "",
        "metadata labels app.kubernetes.io/version",
        "the version of the chart",
    ),
    ("", "metadata labels helm.sh/chart", "the version of the chart"),
    ("", "metadata labels release", "the name of the release"),
    (
        "ConfigMap istio",
        "metadata labels app",
        "all objects of the chart have the label",
    ),
    (
        "ConfigMap istio-sidecar-injector",
        "metadata labels app",
        "all objects of the chart have the label",
    ),
    (
        "ConfigMap istio-sidecar-injector",
        "data",
        "the project's own templates; the suite `inject` compares their effect",
    ),
    (
        "ConfigMap values",
        "data",
        "`values_equal_those_of_istio` compares them",
    ),
    (
        "ConfigMap values",
        "metadata annotations",
        "the text of the description",
    ),
    (
        "ConfigMap values",
        "metadata labels app",
        "all objects of the chart have the label",
    ),
    (
        "ValidatingWebhookConfiguration istio-validator-istio-system",
        "metadata labels install.operator.istio.io/owning-resource",
        "all objects of a revision have the label",
    ),
    (
        "ValidatingWebhookConfiguration istio-validator-istio-system",
        "metadata labels operator.istio.io/component",
        "all objects of a revision have the label",
    ),
    (
        "ClusterRole istiod-clusterrole-istio-system",
        "rules",
        "only what istiod uses; the suite `charts` proves it",
    ),
    (
        "ClusterRole istiod-gateway-controller-istio-system",
        "rules",
        "only what istiod uses; the suite `charts` proves it",
    ),
    (
        "ClusterRole istio-reader-clusterrole-istio-system",
        "rules",
        "only what istiod uses",
    ),
    (
        "Role istiod",
        "rules",
        "only what istiod uses; the suite `charts` proves it",
    ),
    (
        "Deployment istiod",
        "spec template metadata labels app.kubernetes.io/instance",
        "the name of the release",
    ),
    (
        "Deployment istiod",
        "spec template metadata labels app.kubernetes.io/version",
        "the version of the chart",
    ),
    (
        "Deployment istiod",
        "spec template metadata labels helm.sh/chart",
        "the version of the chart",
    ),
    (
        "Deployment istiod",
        "spec template metadata labels release",
        "pods have all labels of the revision",
    ),
    (
        "Deployment istiod",
        "spec template metadata annotations cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes",
        "states of remote clusters",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery image",
        "the image of this project",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery args 7",
        "states of remote clusters",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery env GOMAXPROCS",
        "of Go's runtime",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery env PILOT_ENABLE_ANALYSIS",
        "false is the default",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery env TOKEN_AUDIENCES",
        "from global.sds.token.aud",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery volumeMounts local-certs",
        "nothing is written there",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery volumeMounts remote-state",
        "states of remote clusters",
    ),
    (
        "Deployment istiod",
        "spec template spec volumes local-certs",
        "nothing is written there",
    ),
    (
        "Deployment istiod",
        "spec template spec volumes remote-state",
        "states of remote clusters",
    ),
    (
        "Deployment istiod",
        "spec template spec volumes istio-csr-ca-configmap configMap defaultMode",
        "420 is the default",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery env POD_NAME valueFrom fieldRef apiVersion",
        "v1 is the default",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery env POD_NAMESPACE valueFrom fieldRef apiVersion",
        "v1 is the default",
    ),
    (
        "Deployment istiod",
        "spec template spec containers discovery env SERVICE_ACCOUNT valueFrom fieldRef apiVersion",
        "v1 is the default",
    ),
];

fn fields_equal_those_of_istio(istio: &[Value], ours: &[Value]) -> Result<(), Failed> {
    let mut different = Vec::new();
    let mut used = BTreeSet::new();
    for object in istio {
        let text = |field: &Value| field.as_str().unwrap_or_default().to_owned();
        let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
        let Some(own) = ours
            .iter()
            .find(|it| it["kind"] == kind && it["metadata"]["name"] == name)
        else {
            continue;
        };
        let (theirs, own) = (fields(object), fields(own));
        let paths: BTreeSet<&String> = theirs.keys().chain(own.keys()).collect();
        for path in paths.into_iter().filter(|path| theirs.get(*path) != own.get(*path)) {
            let listed = FIELDS.iter().position(|(object, prefix, _)| {
                (object.is_empty() || *object == format!("{kind} {name}")) && path.starts_with(prefix)
            });
            match listed {
                Some(index) => used.extend([index]),
                None => different.push(format!(
                    "{kind} {name}: {path}: Istio has {:?}, this chart {:?}",
                    theirs.get(path),
                    own.get(path)
                )),
            }
        }
    }
    assert!(different.is_empty(), "unlisted differences:\n{}", different.join("\n"));
    let unused: Vec<_> = (0..FIELDS.len())
        .filter(|index| !used.contains(index))
        .map(|index| FIELDS[index])
        .collect();
    assert!(unused.is_empty(), "listed differences that do not exist: {unused:?}");
    Ok(())
}

/// Returns the scalars of an object by path. Items with a name have it in place of their number. Texts that are mesh
/// config are read as YAML.
fn fields(object: &Value) -> BTreeMap<String, Value> {
    fn add(fields: &mut BTreeMap<String, Value>, path: &str, value: &Value) {
        let mut below = |name: &str, value: &Value| add(fields, format!("{path} {name}").trim_start(), value);
        match value {
            Value::Object(entries) if !entries.is_empty() => {
                entries.iter().for_each(|(name, value)| below(name, value));
            }
            Value::Array(items) if !items.is_empty() => {
                for (index, item) in items.iter().enumerate() {
                    below(item["name"].as_str().unwrap_or(&index.to_string()), item);
                }
            }
            scalar => {
                fields.insert(path.to_owned(), scalar.clone());
            }
        }
    }
    let mut object = object.clone();
    for key in ["mesh", "meshNetworks"] {
        let parsed = object["data"][key]
            .as_str()
            .map(|text| yaml::documents(text)[0].parse());
        if let Some(Ok(parsed)) = parsed {
            object["data"][key] = parsed;
        }
    }
    let mut found = BTreeMap::new();
    add(&mut found, "", &object);
    found
}

/// Defaults that differ, with the reason.
const VALUES: &[(&str, &str)] = &[
    ("global hub", "the image is built by its user"),
    ("global proxy image", "the hub has no proxies"),
    ("global proxy_init image", "the hub has no proxies"),
];

fn values_equal_those_of_istio(istio: &[Value], ours: &[Value]) -> Result<(), Failed> {
    let theirs = fields(&data(istio, "values", "merged-values")?);
    let values = data(ours, "values", "merged-values")?;
    let own = fields(&values);
    let different: Vec<&str> = theirs
        .iter()
        .filter(|(path, value)| own.get(*path) != Some(value))
        .map(|(path, _)| path.as_str())
        .collect();
    let listed: Vec<&str> = VALUES.iter().map(|(path, _)| *path).collect();
    assert_eq!(different, listed);
    let accounts = find(ours, "ConfigMap", "values")["data"]["original-values"].as_str();
    assert!(
        accounts.is_some_and(|text| text.contains("istioNamespace")),
        "the user's values are kept apart"
    );
    Ok(())
}
