//! Decision whether a pod is injected, and with which templates.

use std::fmt;

use serde_json::Value as Json;

use super::{
    config::{Config, Policy, selects},
    pod,
};

/// Namespaces whose pods are never injected.
pub const IGNORED_NAMESPACES: [&str; 4] = ["kube-system", "kube-public", "kube-node-lease", "local-path-storage"];

/// Label and annotation that decide about the injection of a pod.
const INJECT: &str = "sidecar.istio.io/inject";
const TEMPLATES: &str = "inject.istio.io/templates";

/// The reason why a pod is not injected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Skipped {
    /// It uses the network of its node, where redirection of traffic would affect other pods.
    HostNetwork,
    /// It is in a namespace of the system.
    IgnoredNamespace,
    /// Its label or annotation `sidecar.istio.io/inject` is `false`.
    Disabled,
    /// It matches `neverInjectSelector`.
    NeverInjectSelector,
    /// Pods are not injected by default.
    Policy,
    /// The policy of the configuration is unknown, so that nothing is injected.
    UnknownPolicy(String),
}

impl fmt::Display for Skipped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostNetwork => formatter.write_str("it has host networking enabled"),
            Self::IgnoredNamespace => formatter.write_str("its namespace belongs to the system"),
            Self::Disabled => formatter.write_str("it has sidecar injection disabled"),
            Self::NeverInjectSelector => formatter.write_str("it matches neverInjectSelector"),
            Self::Policy => formatter.write_str("pods are not injected by default"),
            Self::UnknownPolicy(policy) => {
                write!(
                    formatter,
                    "the policy {policy:?} is unknown (hint: use enabled or disabled)"
                )
            }
        }
    }
}

/// Returns the reason why a pod is not injected; `None` if it is.
///
/// Parity (pkg/kube/inject/inject.go, injectRequired).
pub(super) fn skipped(config: &Config, pod: &Json) -> Option<Skipped> {
    if pod.pointer("/spec/hostNetwork") == Some(&Json::Bool(true)) {
        return Some(Skipped::HostNetwork);
    }
    if IGNORED_NAMESPACES.contains(&pod::metadata(pod, "namespace")) {
        return Some(Skipped::IgnoredNamespace);
    }
    if let Policy::Unknown(policy) = &config.policy {
        return Some(Skipped::UnknownPolicy(policy.clone()));
    }
    match choice(pod) {
        Some("true") => return None,
        Some("false") => return Some(Skipped::Disabled),
        _ => {}
    }
    let labels = pod::labels(pod);
    if config.never.iter().any(|selector| selects(selector, &labels)) {
        return Some(Skipped::NeverInjectSelector);
    }
    if config.always.iter().any(|selector| selects(selector, &labels)) {
        return None;
    }
    (config.policy == Policy::Disabled).then_some(Skipped::Policy)
}

/// Returns the value of the label, or else of the annotation, `sidecar.istio.io/inject`.
pub(super) fn choice(pod: &Json) -> Option<&str> {
    pod::label(pod, INJECT).or_else(|| pod::annotation(pod, INJECT))
}

/// Returns true if `sidecar.istio.io/inject` of a pod is neither `true` nor `false`, so that selectors and the policy
/// decide.
pub fn has_unknown_choice(pod: &Json) -> bool {
    choice(pod).is_some_and(|choice| !matches!(choice, "" | "true" | "false"))
}

/// Returns the names of the templates for a pod, in order.
pub(super) fn templates<'a>(config: &'a Config, pod: &'a Json) -> Vec<&'a str> {
    match pod::annotation(pod, TEMPLATES) {
        Some(names) => config.resolve(names.split(',').map(str::trim)),
        None => config.resolve(config.default_templates.iter().map(String::as_str)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::template::Limits;

    fn config(text: &str) -> Config {
        Config::parse(text, "", &Limits::default()).expect("the configuration is valid")
    }

    #[test]
    fn first_rule_that_applies_decides() {
        let enabled = "{policy: enabled, neverInjectSelector: [{matchLabels: {job: x}}, {}], \
                       alwaysInjectSelector: [{matchExpressions: [{key: always, operator: Exists}]}]}";
        let disabled = enabled.replace("enabled", "disabled");
        let off = enabled.replace("enabled", "sometimes");
        let pod = |labels: Json, annotation: &str| {
            let annotations = json!({"sidecar.istio.io/inject": annotation});
            json!({"metadata": {"labels": labels, "annotations": annotations}})
        };
        let never = Some(Skipped::NeverInjectSelector);
        for (text, pod, expected) in [
            (
                enabled,
                json!({"spec": {"hostNetwork": true}}),
                Some(Skipped::HostNetwork),
            ),
            (
                enabled,
                json!({"metadata": {"namespace": "kube-system"}}),
                Some(Skipped::IgnoredNamespace),
            ),
            (enabled, pod(json!({}), "false"), Some(Skipped::Disabled)),
            (enabled, pod(json!({"sidecar.istio.io/inject": "true"}), "false"), None),
            (enabled, pod(json!({"sidecar.istio.io/inject": ""}), "false"), None),
            (&disabled, pod(json!({}), "true"), None),
            (&disabled, pod(json!({}), "maybe"), Some(Skipped::Policy)),
            (enabled, pod(json!({"job": "x"}), ""), never.clone()),
            (enabled, pod(json!({"job": "x"}), "true"), None),
            (&disabled, pod(json!({"always": ""}), ""), None),
            (&disabled, pod(json!({"always": "", "job": "x"}), ""), never),
            (
                &off,
                pod(json!({}), "true"),
                Some(Skipped::UnknownPolicy("sometimes".to_owned())),
            ),
            (enabled, json!({}), None),
        ] {
            assert_eq!(skipped(&config(text), &pod), expected, "{text} {pod}");
        }
    }

    #[test]
    fn choices_are_true_or_false() {
        let pod = |label: Json, annotation: &str| {
            let (labels, annotations) = (json!({INJECT: label}), json!({INJECT: annotation}));
            json!({"metadata": {"labels": labels, "annotations": annotations}})
        };
        for (pod, expected) in [
            (json!({}), false),
            (pod(Json::Null, "maybe"), true),
            (pod(Json::Null, "false"), false),
            (pod(json!("True"), "true"), true),
            (pod(json!("true"), "maybe"), false),
            (pod(json!(""), "maybe"), false),
        ] {
            assert_eq!(has_unknown_choice(&pod), expected, "{pod}");
        }
    }

    #[test]
    fn annotations_and_aliases_choose_templates() {
        let config = config("{policy: enabled, aliases: {both: [sidecar, spire], spire: [x]}}");
        let annotated = json!({"metadata": {"annotations": {"inject.istio.io/templates": "both, grpc"}}});
        assert_eq!(templates(&config, &annotated), ["sidecar", "spire", "grpc"]);
        assert_eq!(templates(&config, &json!({})), ["sidecar"]);
    }
}
