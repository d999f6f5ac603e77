//! The templates and values that the chart of this version installs by default, for `--builtIn`.

use serde_json::{Map, Value, json};

use super::{InjectFlags, Sources};
use crate::api::yaml::{self, YamlError};

/// The default values of the chart.
const VALUES: &str = include_str!("../../../charts/istiod/values.yaml");
/// The key of the default values; Helm keeps the user's values outside it.
const DEFAULTS: &str = "_internal_defaults_do_not_set";
/// The part that the chart puts in front of each template.
const SHARED: &str = include_str!("../../../charts/istiod/files/injection/shared.yaml");
/// The templates by name.
const TEMPLATES: [(&str, &str); 4] = [
    (
        "sidecar",
        include_str!("../../../charts/istiod/files/injection/sidecar.yaml"),
    ),
    (
        "gateway",
        include_str!("../../../charts/istiod/files/injection/gateway.yaml"),
    ),
    (
        "grpc-agent",
        include_str!("../../../charts/istiod/files/injection/grpc-agent.yaml"),
    ),
    (
        "grpc-simple",
        include_str!("../../../charts/istiod/files/injection/grpc-simple.yaml"),
    ),
];

/// Returns what the chart would install with its default values, for the revision and namespace of the control plane.
pub(super) fn sources(flags: &InjectFlags) -> Result<Sources, YamlError> {
    let revision = match flags.revision.as_str() {
        "default" => "",
        revision => revision,
    };
    let values = values(revision, &flags.istio_namespace)?;
    let suffix = match revision {
        "" => String::new(),
        revision => format!("-{revision}"),
    };
    let address = format!("istiod{suffix}.{}.svc:15012", flags.istio_namespace);
    Ok(Sources {
        config: config(&values).to_string(),
        values: values.to_string(),
        mesh: json!({ "defaultConfig": { "discoveryAddress": address } }).to_string(),
        kubelets: Default::default(),
    })
}

/// Returns the values that the templates read (`istiod.injectionValues` in the chart).
fn values(revision: &str, namespace: &str) -> Result<Value, YamlError> {
    let documents = yaml::documents(VALUES);
    let file = documents.first().map(yaml::Document::parse).transpose()?;
    let mut values = file.unwrap_or_default()[DEFAULTS].take();
    values["global"]["istioNamespace"] = json!(namespace);
    separate_image(&mut values["global"]);
    Ok(json!({
        "global": values["global"],
        "gateways": values["gateways"],
        "pilot": { "cni": values["cni"], "env": values["env"], "crlConfigMapName": values["crlConfigMapName"] },
        "revision": revision,
        "sidecarInjectorWebhook": values["sidecarInjectorWebhook"],
    }))
}

/// Replaces the default image by its hub, tag and name: image types apply to names without a hub only.
fn separate_image(global: &mut Value) {
    let image = global["proxy"]["image"].as_str().unwrap_or_default().to_owned();
    let parts = image
        .rsplit_once('/')
        .and_then(|(hub, image)| Some((hub, image.rsplit_once(':')?)));
    let Some((hub, (name, tag))) = parts else {
        return;
    };
    global["hub"] = json!(hub);
    global["tag"] = json!(tag);
    for container in ["proxy", "proxy_init"] {
        global[container]["image"] = json!(name);
    }
}

/// Returns the key `config` of the injector's ConfigMap.
fn config(values: &Value) -> Value {
    let injector = &values["sidecarInjectorWebhook"];
    let templates = TEMPLATES.map(|(name, text)| (name.to_owned(), json!(format!("{SHARED}\n{text}"))));
    json!({
        "policy": values["global"]["proxy"]["autoInject"],
        "defaultTemplates": ["sidecar"],
        "alwaysInjectSelector": injector["alwaysInjectSelector"],
        "neverInjectSelector": injector["neverInjectSelector"],
        "injectedAnnotations": injector["injectedAnnotations"],
        "templates": Map::from_iter(templates),
    })
}
