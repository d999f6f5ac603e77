//! Parameters of users: strategic merge patches for the rendered objects.

use serde_json::Value as Json;

use super::{GatewayError, GatewayRequest, OVERLAY_KEYS, ObjectKind, Parameters, check, invalid, parameters_name};
use crate::{
    api::yaml,
    inject::{merge::merge, pod},
};

/// Metadata that a patch may not change.
const IDENTITY: [&str; 11] = [
    "name",
    "generateName",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "ownerReferences",
    "finalizers",
];

/// Returns the parameters in the order in which they are applied: those of the class, then those of the Gateway.
pub(super) fn overlays<'a>(request: &GatewayRequest<'a>) -> Result<Vec<&'a Parameters>, GatewayError> {
    let mut overlays: Vec<&Parameters> = request.class_parameters.into_iter().collect();
    if let Some(name) = parameters_name(request.gateway)? {
        let Some(parameters) = request.parameters else {
            let namespace = pod::metadata(request.gateway, "namespace");
            let message =
                format!("parametersRef targeting configmap \"{namespace}/{name}\", but configmap does not exist");
            return Err(invalid(request.gateway, "spec.infrastructure.parametersRef", message));
        };
        overlays.push(parameters);
    }
    for parameters in &overlays {
        if let Some(key) = parameters.data.keys().find(|key| !OVERLAY_KEYS.contains(&key.as_str())) {
            let supported = OVERLAY_KEYS.join(" ");
            return Err(parameters.error(key, format!("unsupported overlay {key:?} (supported: [{supported}])")));
        }
    }
    Ok(overlays)
}

/// Returns an object with its patches; `None` if it exists only with a patch and has none.
pub(super) fn patched(
    kind: ObjectKind,
    key: &str,
    object: Json,
    overlays: &[&Parameters],
) -> Result<Option<Json>, GatewayError> {
    let identity = identity(&object);
    let mut patched = object;
    let mut has_patch = false;
    for parameters in overlays {
        let Some(text) = parameters.data.get(key) else {
            continue;
        };
        let error = |message: String| parameters.error(key, message);
        let patch = patch(text).map_err(error)?;
        patched = merge(kind.name(), patched, patch)
            .map_err(|reason| error(format!("strategic merge patch failed: {reason}")))?;
        has_patch = true;
        if let Some(field) = changed(&identity, &patched) {
            return Err(error(format!(
                "illegal metadata change: metadata.{field} may not be set"
            )));
        }
        if ObjectKind::of(&patched).is_none() {
            return Err(error(check::unexpected_kind(&patched)));
        }
        if !patched["metadata"].is_object() {
            return Err(error("illegal metadata change: metadata must be an object".to_owned()));
        }
    }
    Ok((has_patch || !kind.needs_overlay()).then_some(patched))
}

fn patch(text: &str) -> Result<Json, String> {
    let documents = yaml::documents(text);
    if documents.len() > 1 {
        return Err("the patch must be one document".to_owned());
    }
    let Some(document) = documents.first() else {
        return Ok(Json::Object(serde_json::Map::new()));
    };
    match document.parse() {
        Ok(Json::Null) => Ok(Json::Object(serde_json::Map::new())),
        Ok(patch @ Json::Object(_)) => Ok(patch),
        Ok(_) => Err("the patch must be an object".to_owned()),
        Err(error) => Err(format!("the patch is not YAML: {error}")),
    }
}

fn identity(object: &Json) -> Vec<Json> {
    let field = |name: &&str| object["metadata"][*name].clone();
    IDENTITY.iter().map(field).collect()
}

/// Returns the first changed field of the identity.
fn changed(identity: &[Json], patched: &Json) -> Option<&'static str> {
    let metadata = &patched["metadata"];
    let mut fields = IDENTITY.into_iter().zip(identity);
    let changed = fields.find(|(name, before)| metadata[*name] != **before);
    let managed = (!metadata["managedFields"].is_null()).then_some("managedFields");
    changed.map(|(name, _)| name).or(managed)
}

impl Parameters {
    fn error(&self, key: &str, message: String) -> GatewayError {
        GatewayError {
            object: format!("ConfigMap {}/{}", self.namespace, self.name),
            field: format!("data.{key}"),
            message,
        }
    }
}
