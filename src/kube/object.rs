//! An object as JSON: fields common to all kinds are parsed, the rest is kept as received.

use std::borrow::Cow;

use ::kube::core::{ApiResource, DynamicResourceScope, Resource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;

/// An object of any kind. `metadata.managedFields`, often half of an object, is dropped on arrival.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Object {
    /// `metadata`, used when the object is written.
    pub metadata: ObjectMeta,
    /// Whole object, with its metadata as read. Items of lists may lack `apiVersion` and `kind`.
    pub value: Value,
}

/// Reason why JSON is not a Kubernetes object. Not retryable: the API server sent it.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The value is not a JSON object, or has no metadata.
    #[error("not a JSON object with metadata")]
    NoObject,
    /// The metadata is malformed.
    #[error("invalid metadata: {0}")]
    Metadata(#[from] serde_json::Error),
}

impl Object {
    /// Parses the JSON of an object.
    pub fn from_value(mut value: Value) -> Result<Self, ObjectError> {
        let metadata = value.get_mut("metadata").and_then(Value::as_object_mut);
        let metadata = metadata.ok_or(ObjectError::NoObject)?;
        metadata.remove("managedFields");
        let metadata = ObjectMeta::deserialize(&value["metadata"])?;
        Ok(Self { metadata, value })
    }

    /// Returns `metadata.name`, empty if unset.
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Returns `metadata.namespace`, empty for cluster-scoped objects.
    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// Returns `metadata.resourceVersion`, empty if unset.
    pub fn resource_version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

impl Serialize for Object {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut value = self.value.clone();
        if value.is_null() {
            value = Value::Object(serde_json::Map::new());
        }
        value["metadata"] = serde_json::to_value(&self.metadata).map_err(serde::ser::Error::custom)?;
        value.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_value(Value::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl Resource for Object {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        resource.kind.as_str().into()
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        resource.group.as_str().into()
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        resource.version.as_str().into()
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        resource.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn metadata_round_trips_without_managed_fields() {
        let value =
            json!({"kind": "Pod", "metadata": {"name": "a", "namespace": "b", "managedFields": [{}]}, "spec": {}});
        let mut object = Object::from_value(value).unwrap();
        assert_eq!(
            (object.name(), object.namespace(), object.resource_version()),
            ("a", "b", "")
        );
        object.metadata.resource_version = Some("7".into());
        let want =
            json!({"kind": "Pod", "metadata": {"name": "a", "namespace": "b", "resourceVersion": "7"}, "spec": {}});
        assert_eq!(serde_json::to_value(&object).unwrap(), want);
        assert!(Object::from_value(json!([])).is_err());
        assert!(Object::from_value(json!({"metadata": {"labels": 3}})).is_err());
    }
}
