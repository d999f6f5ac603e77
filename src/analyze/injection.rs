//! Injection: labels of namespaces, pods without sidecars, and their images.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    json::{is_set, labels, text},
    membership::{INJECT, proxies},
    mesh::Mesh,
    message::{
        AUTO_IMAGE_OF_DEPLOYMENT, AUTO_IMAGE_OF_POD, INJECTED_BY_DEFAULT, NAMESPACE_NOT_INJECTED, POD_MISSING_PROXY,
        PROXY_IMAGE_MISMATCH, Report, SEVERAL_INJECTION_LABELS,
    },
    object::{Object, Type},
    webhook,
};
use crate::{
    api::{Kind, label::REVISION, yaml},
    base::{Labels, select},
};

const INJECTION: &str = "istio-injection";
const MODE: &str = "istio.io/dataplane-mode";
/// The ConfigMap of the injector; those of other revisions than the default one have a suffix.
const CONFIG_MAP: &str = "istio-sidecar-injector";
/// The lists of a pod's containers.
const CONTAINERS: [&str; 2] = ["containers", "initContainers"];

/// The values of an injector.
fn values(config_map: &Object) -> Value {
    serde_json::from_str(text(&config_map.manifest["data"]["values"])).unwrap_or_default()
}

fn config_map_name(revision: &str) -> String {
    match revision {
        "" | "default" => CONFIG_MAP.to_owned(),
        revision => format!("{CONFIG_MAP}-{revision}"),
    }
}

/// Reports namespaces without injection, contradicting labels, and pods that lack the sidecar.
///
/// Parity (pkg/config/analysis/analyzers/injection/injection.go).
pub(super) fn injection(mesh: &Mesh, report: &mut Report) {
    let is_default = mesh
        .of(Kind::ConfigMap)
        .iter()
        .find(|map| map.name == CONFIG_MAP)
        .is_some_and(|map| values(map)["sidecarInjectorWebhook"]["enableNamespacesByDefault"] == true);
    for namespace in mesh.of(Kind::Namespace) {
        if namespace.name == "istio-system" {
            continue;
        }
        contradictions(namespace, report);
        if namespace.label(MODE) == "ambient" {
            continue;
        }
        match namespace.label(INJECTION) {
            "" if namespace.labels.contains_key(REVISION) => {}
            "" if is_default => {
                let text = "has no label about injection and is injected, because the injector's \
                            enableNamespacesByDefault is set";
                report.add(INJECTED_BY_DEFAULT, namespace, text);
            }
            "" => {
                let text = format!(
                    "has no label about injection, so its pods get no sidecar; label it {INJECTION}=enabled, or \
                     {INJECTION}=disabled if that is meant"
                );
                report.add(NAMESPACE_NOT_INJECTED, namespace, text);
            }
            "enabled" => missing_proxies(mesh, &namespace.name, report),
            _ => {}
        }
    }
}

fn contradictions(namespace: &Object, report: &mut Report) {
    let label = |name: &str| namespace.labels.get(name).map(|value| format!("{name}={value}"));
    let injection = label(INJECTION);
    let counts = injection.is_none() || namespace.label(INJECTION) == "enabled";
    let others = [REVISION, MODE].into_iter().filter(|_| counts).filter_map(label);
    let all: Vec<String> = injection.iter().cloned().chain(others).collect();
    if all.len() > 1 {
        let text = format!("the labels {} contradict each other; keep one", all.join(" and "));
        report.add(SEVERAL_INJECTION_LABELS, namespace, text);
    }
}

fn missing_proxies(mesh: &Mesh, namespace: &str, report: &mut Report) {
    for pod in mesh.within(Kind::Pod, namespace) {
        let choice = match pod.labels.get(INJECT) {
            Some(label) => label.as_str(),
            None => pod.annotation(INJECT),
        };
        let spec = &pod.manifest["spec"];
        let is_excluded = choice.eq_ignore_ascii_case("false") || spec["hostNetwork"] == true;
        let proxy = proxies(spec, &CONTAINERS).next();
        if !is_excluded && proxy.is_none_or(|proxy| text(&proxy["image"]).is_empty()) {
            report.add(
                POD_MISSING_PROXY,
                pod,
                "has no sidecar; recreate it, so that it is injected",
            );
        }
    }
}

/// Reports namespaces with pods whose sidecar is not the one that injection would add now.
///
/// Parity (pkg/config/analysis/analyzers/injection/injection-image.go).
pub(super) fn images(mesh: &Mesh, report: &mut Report) {
    let maps = mesh
        .of(Kind::ConfigMap)
        .iter()
        .filter(|map| map.name.starts_with(CONFIG_MAP));
    let injected: BTreeMap<&str, String> = maps
        .map(|map| (map.name.as_str(), image(&values(map)["global"])))
        .collect();
    let types = ImageTypes::of(mesh);
    for namespace in mesh.of(Kind::Namespace) {
        let revision = match namespace.labels.get(REVISION) {
            Some(revision) => revision.as_str(),
            None if namespace.label(INJECTION) == "enabled" => "default",
            None => continue,
        };
        let Some(image) = injected.get(config_map_name(revision).as_str()) else {
            continue;
        };
        let differs = |pod: &&Object| {
            let with_type = format!("{image}-{}", types.of_pod(pod));
            let mut proxies = proxies(&pod.manifest["spec"], &CONTAINERS).map(|proxy| text(&proxy["image"]));
            let has_own = !pod.annotation("sidecar.istio.io/proxyImage").is_empty();
            !has_own && proxies.any(|used| used != image && used != with_type)
        };
        let pods = mesh.within(Kind::Pod, &namespace.name).iter().filter(differs);
        let names: Vec<&str> = pods.map(|pod| pod.name.as_str()).collect();
        if !names.is_empty() {
            let text = format!(
                "pods have another proxy than {image}; recreate them: {}",
                names.join(", ")
            );
            report.add(PROXY_IMAGE_MISMATCH, namespace, text);
        }
    }
}

fn image(global: &Value) -> String {
    let image = text(&global["proxy"]["image"]);
    if image.contains('/') {
        return image.to_owned();
    }
    format!("{}/{image}:{}", text(&global["hub"]), text(&global["tag"]))
}

/// The image types that the mesh config and ProxyConfigs set.
///
/// Parity (pkg/config/analysis/analyzers/util/proxyconfig.go).
struct ImageTypes<'a> {
    mesh: &'a Mesh,
    everywhere: &'a str,
}

impl<'a> ImageTypes<'a> {
    fn of(mesh: &'a Mesh) -> Self {
        let in_mesh = text(&mesh.settings.config["defaultConfig"]["image"]["imageType"]);
        let in_root = mesh.within(Kind::ProxyConfig, mesh.root_namespace());
        Self {
            mesh,
            everywhere: last(in_mesh, in_root.iter().map(image_type)),
        }
    }

    fn of_pod(&self, pod: &Object) -> String {
        let mut found = self.everywhere;
        if pod.namespace != self.mesh.root_namespace() {
            let configs = self.mesh.within(Kind::ProxyConfig, &pod.namespace);
            let (selecting, general): (Vec<_>, Vec<_>) =
                configs.iter().partition(|config| is_set(config.spec("selector")));
            let selects =
                |config: &&Object| select::subset(&labels(&config.spec("selector")["matchLabels"]), &pod.labels);
            found = last(found, general.into_iter().map(image_type));
            found = last(found, selecting.into_iter().filter(selects).map(image_type));
        }
        let own = pod.annotation("proxy.istio.io/config");
        let own = yaml::documents(own).first().and_then(|document| document.parse().ok());
        let own = own.unwrap_or_default();
        match last(found, [text(&own["image"]["imageType"])].into_iter()) {
            "default" => String::new(),
            found => found.to_owned(),
        }
    }
}

fn image_type(config: &Object) -> &str {
    text(&config.spec("image")["imageType"])
}

/// Returns the last text that is set, or the first one.
fn last<'a>(first: &'a str, others: impl Iterator<Item = &'a str>) -> &'a str {
    others.filter(|text| !text.is_empty()).last().unwrap_or(first)
}

/// Reports workloads whose proxy has the image `auto`, which injection replaces, but that are not injected.
///
/// Parity (pkg/config/analysis/analyzers/injection/image-auto.go).
pub(super) fn auto_images(mesh: &Mesh, report: &mut Report) {
    let webhooks: Vec<&Value> = webhook::of_istio(mesh).collect();
    let has_auto = |spec: &Value| proxies(spec, &["containers"]).any(|proxy| proxy["image"] == "auto");
    for pod in mesh.of(Kind::Pod).iter().filter(|pod| has_auto(&pod.manifest["spec"])) {
        let text = "has the image auto, so it was not injected when it was created";
        report.add(AUTO_IMAGE_OF_POD, pod, text);
    }
    for deployment in mesh.of(Type::Deployment) {
        let template = deployment.spec("template");
        if !has_auto(&template["spec"]) {
            continue;
        }
        let namespace = match deployment.namespace.as_str() {
            "" => "default",
            namespace => namespace,
        };
        let namespace = mesh.find(Kind::Namespace, "", namespace);
        let namespace = namespace.map_or_else(Labels::new, |namespace| namespace.labels.clone());
        let pod = labels(&template["metadata"]["labels"]);
        let is_injected = webhooks.iter().any(|hook| {
            webhook::selects(&hook["namespaceSelector"], &namespace) && webhook::selects(&hook["objectSelector"], &pod)
        });
        if !is_injected {
            let text = "has the image auto, but no webhook of Istio injects its pods";
            report.add(AUTO_IMAGE_OF_DEPLOYMENT, deployment, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_name_the_image() {
        let global = serde_json::json!({"hub": "example.com", "tag": "v1", "proxy": {"image": "proxy"}});
        assert_eq!(image(&global), "example.com/proxy:v1");
        let global = serde_json::json!({"hub": "example.com", "tag": "v1", "proxy": {"image": "other/proxy:v2"}});
        assert_eq!(image(&global), "other/proxy:v2");
    }
}
