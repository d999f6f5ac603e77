//! Webhook configurations of Istio: overlaps, services, and addresses of external control planes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde_json::Value;

use super::{
    json::{is_set, items, labels, text, texts},
    mesh::Mesh,
    message::{EXTERNAL_ADDRESS_IS_IP, INVALID_EXTERNAL_ADDRESS, INVALID_WEBHOOK, Report},
    object::{Object, Type, full_name},
};
use crate::{
    api::{Kind, label::REVISION},
    base::{Labels, SmolStr, select::LabelSelector},
};

/// The maximum number of revisions of which overlaps are searched: each pair of their labels is tried.
const MAX_REVISIONS: usize = 32;

/// Returns the webhooks of Istio's injectors.
pub(super) fn of_istio(mesh: &Mesh) -> impl Iterator<Item = &Value> {
    let hooks = mesh.of(Type::MutatingWebhook).iter().flat_map(webhooks);
    hooks.filter(|hook| text(&hook["name"]).ends_with("istio.io"))
}

fn webhooks(configuration: &Object) -> &[Value] {
    items(&configuration.manifest["webhooks"])
}

/// Returns true if a label selector matches; a missing one matches everything, an invalid one nothing.
pub(super) fn selects(selector: &Value, labels: &Labels) -> bool {
    match selector {
        Value::Null => true,
        selector => parsed(selector).is_some_and(|selector| selector.matches(labels)),
    }
}

fn parsed(selector: &Value) -> Option<LabelSelector> {
    serde_json::from_value(selector.clone()).ok()
}

/// Reports webhooks that would inject a pod twice, and those of control planes that do not exist.
///
/// Parity (pkg/config/analysis/analyzers/webhook/webhook.go).
pub(super) fn injectors(mesh: &Mesh, report: &mut Report) {
    let is_injector = |configuration: &&Object| {
        webhooks(configuration)
            .iter()
            .any(|hook| text(&hook["name"]).ends_with("istio.io"))
            || revisions(configuration).next().is_some()
    };
    let injectors: Vec<&Object> = mesh.of(Type::MutatingWebhook).iter().filter(is_injector).collect();
    overlaps(&injectors, report);
    for injector in injectors {
        for hook in webhooks(injector) {
            let service = &hook["clientConfig"]["service"];
            let (namespace, name) = (text(&service["namespace"]), text(&service["name"]));
            if is_set(service) && mesh.find(Kind::Service, namespace, name).is_none() {
                let text = format!("the injector's Service {} does not exist", full_name(namespace, name));
                report.add(INVALID_WEBHOOK, injector, text);
            }
        }
    }
}

/// Returns the revisions that a configuration names.
fn revisions(configuration: &Object) -> impl Iterator<Item = SmolStr> {
    let own = configuration.labels.get(REVISION).cloned();
    let selectors = webhooks(configuration)
        .iter()
        .flat_map(|hook| [&hook["namespaceSelector"], &hook["objectSelector"]]);
    let named = selectors.flat_map(|selector| {
        let label = labels(&selector["matchLabels"]).get(REVISION).cloned();
        let expressions = items(&selector["matchExpressions"])
            .iter()
            .filter(|expression| expression["key"] == REVISION);
        let values = expressions
            .flat_map(|expression| texts(&expression["values"]))
            .map(SmolStr::new);
        label.into_iter().chain(values)
    });
    own.into_iter().chain(named)
}

/// A webhook with its selectors.
struct Hook<'a> {
    configuration: &'a Object,
    name: String,
    namespaces: &'a Value,
    objects: &'a Value,
}

/// Reports webhooks that select the same pods, for every combination of labels about injection.
fn overlaps(injectors: &[&Object], report: &mut Report) {
    let revisions: BTreeSet<SmolStr> = injectors.iter().flat_map(|injector| revisions(injector)).collect();
    let revisions: Vec<SmolStr> = revisions.into_iter().take(MAX_REVISIONS).collect();
    let namespaces = combinations("istio-injection", ["enabled", "disabled"], &revisions);
    let objects = combinations("sidecar.istio.io/inject", ["true", "false"], &revisions);
    let hooks: BTreeMap<String, Hook<'_>> = injectors
        .iter()
        .flat_map(|configuration| webhooks(configuration).iter().map(|hook| (*configuration, hook)))
        .map(|(configuration, hook)| Hook {
            configuration,
            name: format!("{}/{}", configuration.name, text(&hook["name"])),
            namespaces: &hook["namespaceSelector"],
            objects: &hook["objectSelector"],
        })
        .map(|hook| (hook.name.clone(), hook))
        .collect();
    let selected = |labels: &[Labels], of: fn(&Hook<'_>) -> Value| -> Vec<BTreeSet<&str>> {
        let matching = |labels: &Labels| {
            let hooks = hooks.values().filter(|hook| selects(&of(hook), labels));
            hooks.map(|hook| hook.name.as_str()).collect()
        };
        labels.iter().map(matching).collect()
    };
    let by_namespace = selected(&namespaces, |hook| hook.namespaces.clone());
    let by_object = selected(&objects, |hook| hook.objects.clone());
    let mut groups: BTreeSet<BTreeSet<&str>> = BTreeSet::new();
    for namespace in &by_namespace {
        groups.extend(by_object.iter().map(|object| namespace & object));
    }
    for group in groups.iter().filter(|group| group.len() > 1) {
        for name in group {
            let others: Vec<&str> = group.iter().copied().filter(|other| other != name).collect();
            let text = format!(
                "selects the same pods as {}, so they may be injected twice",
                others.join(", ")
            );
            report.add(INVALID_WEBHOOK, hooks[*name].configuration, text);
        }
    }
}

/// Returns every combination of a label, its two values or none, and each revision or none.
fn combinations(label: &str, values: [&str; 2], revisions: &[SmolStr]) -> Vec<Labels> {
    let values = [None, Some(values[0]), Some(values[1])];
    let revisions = || std::iter::once(None).chain(revisions.iter().map(Some));
    let mut all = Vec::new();
    for value in values {
        for revision in revisions() {
            let value = value.map(|value| (label.into(), value.into()));
            let revision = revision.map(|revision| (REVISION.into(), revision.clone()));
            all.push(value.into_iter().chain(revision).collect());
        }
    }
    all
}

/// Reports webhooks of external control planes without an address, or with one that is an IP address.
///
/// Parity (pkg/config/analysis/analyzers/externalcontrolplane/externalcontrolplane.go).
pub(super) fn external(mesh: &Mesh, report: &mut Report) {
    let validators = mesh.of(Type::ValidatingWebhook).iter();
    let validators = validators.filter(|configuration| {
        configuration.name == "istiod-default-validator" || configuration.name.starts_with("istio-validator")
    });
    let injectors = mesh.of(Type::MutatingWebhook).iter();
    let injectors = injectors.filter(|configuration| configuration.name.starts_with("istio-sidecar-injector"));
    for configuration in validators.chain(injectors) {
        for hook in webhooks(configuration) {
            address(configuration, hook, report);
        }
    }
}

fn address(configuration: &Object, hook: &Value, report: &mut Report) {
    let (name, client) = (text(&hook["name"]), &hook["clientConfig"]);
    if !is_set(&client["url"]) {
        if !is_set(&client["service"]) {
            let text = format!("webhook {name} has neither a url nor a service of the control plane");
            report.add(INVALID_EXTERNAL_ADDRESS, configuration, text);
        }
        return;
    }
    let written = text(&client["url"]);
    match url::Url::parse(written) {
        Err(error) if error != url::ParseError::RelativeUrlWithoutBase => {
            let text = format!("webhook {name}: {written:?} is not a URL: {error}");
            report.add(INVALID_EXTERNAL_ADDRESS, configuration, text);
        }
        Ok(url) => {
            let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
            if host.parse::<IpAddr>().is_ok() {
                let text = format!("webhook {name}: {written} is an IP address; use a host name in production");
                report.add(EXTERNAL_ADDRESS_IS_IP, configuration, text);
            }
        }
        Err(_) => {}
    }
}
