//! Reads and writes whole objects of one resource as JSON, so that unknown fields are kept.

use ::kube::{
    Client, Error, Resource,
    core::params::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
    core::{ApiResource, DynamicObject, Request},
};
use serde_json::Value;

use crate::kube::client::limited;

/// A resource of one cluster. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    client: Client,
    resource: ApiResource,
}

/// Reason of a failed write.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Another writer was faster: read and decide again.
    #[error("conflict: {0}")]
    Conflict(String),
    /// The object, its namespace or its kind does not exist. A retry helps only once it does.
    #[error("not found: {0}")]
    NotFound(String),
    /// Refused permanently: permissions, an invalid object, or a terminating namespace.
    #[error("refused by the API server: {0}; hint: check that ClusterRole and CRDs are of this release")]
    Refused(String),
    /// The API server was unreachable, failed, did not respond in time, or did not accept the credentials. Retryable.
    #[error(transparent)]
    Failed(Box<Error>),
}

impl From<Error> for WriteError {
    fn from(error: Error) -> Self {
        let Error::Api(status) = &error else {
            return Self::Failed(Box::new(error));
        };
        let message = status.message.clone();
        match status.code {
            404 => Self::NotFound(message),
            409 => Self::Conflict(message),
            400 | 403 | 405 | 413 | 422 => Self::Refused(message),
            // Also 401: credentials are renewed, and a server that starts does not know accounts yet.
            _ => Self::Failed(Box::new(error)),
        }
    }
}

/// Returns a resource by group (empty for core), version, kind and plural.
pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    let api_version = if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    };
    ApiResource {
        group: group.into(),
        version: version.into(),
        api_version,
        kind: kind.into(),
        plural: plural.into(),
    }
}

/// Returns true if a resource version is older than another one of the same kind. Versions are numbers in all known
/// servers.
pub(super) fn is_older(version: &str, other: &str) -> bool {
    matches!((version.parse::<u64>(), other.parse::<u64>()), (Ok(version), Ok(other)) if version < other)
}

fn json_patch(operations: &Value) -> Result<Patch<()>, WriteError> {
    let operations = serde_json::from_value(operations.clone());
    let operations = operations.map_err(|error| WriteError::Failed(Box::new(Error::SerdeError(error))))?;
    Ok(Patch::Json(operations))
}

fn applying(manager: &str) -> PatchParams {
    PatchParams::apply(manager).force()
}

impl Store {
    /// Returns the store of a resource by group, version, kind and plural.
    pub fn new(client: Client, group: &str, version: &str, kind: &str, plural: &str) -> Self {
        Self::of(client, resource(group, version, kind, plural))
    }

    /// Returns the store of a resource.
    pub fn of(client: Client, resource: ApiResource) -> Self {
        Self { client, resource }
    }

    /// Returns the resource.
    pub fn resource(&self) -> &ApiResource {
        &self.resource
    }

    fn request(&self, namespace: &str) -> Request {
        let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
        Request::new(DynamicObject::url_path(&self.resource, namespace))
    }

    async fn send(
        &self,
        request: Result<http::Request<Vec<u8>>, ::kube::core::request::Error>,
    ) -> Result<Value, WriteError> {
        let request = request.map_err(|error| WriteError::Failed(Box::new(Error::BuildRequest(error))))?;
        Ok(limited(self.client.request::<Value>(request)).await?)
    }

    /// Returns an object; `None` if it does not exist.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Option<Value>, WriteError> {
        match self
            .send(self.request(namespace).get(name, &GetParams::default()))
            .await
        {
            Ok(object) => Ok(Some(object)),
            Err(WriteError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the metadata of an object; `None` if it does not exist. It takes the right to list, not that to get.
    pub async fn metadata(&self, namespace: &str, name: &str) -> Result<Option<Value>, WriteError> {
        let parameters = ListParams::default().fields(&format!("metadata.name={name}"));
        let mut list = self.send(self.request(namespace).list_metadata(&parameters)).await?;
        Ok(list.pointer_mut("/items/0/metadata").map(Value::take))
    }

    /// Creates an object; a conflict means that the name is in use.
    pub async fn create(&self, namespace: &str, object: &Value) -> Result<Value, WriteError> {
        let body = object.to_string().into_bytes();
        self.send(self.request(namespace).create(&PostParams::default(), body))
            .await
    }

    /// Asks whether an object could be created, without storing it (dry run).
    pub async fn try_create(&self, namespace: &str, object: &Value) -> Result<Value, WriteError> {
        let parameters = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let body = object.to_string().into_bytes();
        self.send(self.request(namespace).create(&parameters, body)).await
    }

    /// Replaces an object if its resource version is still that of the new content.
    pub async fn replace(&self, namespace: &str, name: &str, object: &Value) -> Result<Value, WriteError> {
        let body = object.to_string().into_bytes();
        let request = self.request(namespace).replace(name, &PostParams::default(), body);
        self.send(request).await
    }

    /// Replaces the status of an object if its resource version is still that of the new content.
    pub async fn replace_status(&self, namespace: &str, name: &str, object: &Value) -> Result<Value, WriteError> {
        let body = object.to_string().into_bytes();
        let request = self.request(namespace);
        self.send(request.replace_subresource("status", name, &PostParams::default(), body))
            .await
    }

    /// Patches the status of an object by JSON patch; a failed test is a refusal.
    pub async fn patch_status(&self, namespace: &str, name: &str, operations: &Value) -> Result<Value, WriteError> {
        let (request, patch) = (self.request(namespace), json_patch(operations)?);
        self.send(request.patch_subresource("status", name, &PatchParams::default(), &patch))
            .await
    }

    /// Patches an object by JSON patch; a failed test is a refusal.
    pub async fn patch(&self, namespace: &str, name: &str, operations: &Value) -> Result<Value, WriteError> {
        let (request, patch) = (self.request(namespace), json_patch(operations)?);
        self.send(request.patch(name, &PatchParams::default(), &patch)).await
    }

    /// Merges fields into an object by its subresource `status`. With `metadata.resourceVersion` in the fields, it is
    /// a conflict if the object has changed since.
    pub async fn merge_status(&self, namespace: &str, name: &str, fields: &Value) -> Result<Value, WriteError> {
        let request = self.request(namespace);
        let parameters = PatchParams::default();
        self.send(request.patch_subresource("status", name, &parameters, &Patch::Merge(fields)))
            .await
    }

    /// Applies an object (server-side apply) for a field manager, which takes its fields from others. It is a conflict
    /// if the object has a `metadata.resourceVersion` that is no longer the present one.
    pub async fn apply(&self, namespace: &str, name: &str, manager: &str, object: &Value) -> Result<Value, WriteError> {
        let request = self.request(namespace);
        self.send(request.patch(name, &applying(manager), &Patch::Apply(object)))
            .await
    }

    /// Applies an object by its subresource `status`, in the place of all that this field manager applied before. It
    /// changes annotations, too.
    pub async fn apply_status(
        &self,
        namespace: &str,
        name: &str,
        manager: &str,
        object: &Value,
    ) -> Result<Value, WriteError> {
        let request = self.request(namespace);
        self.send(request.patch_subresource("status", name, &applying(manager), &Patch::Apply(object)))
            .await
    }

    /// Deletes an object if its resource version is still this one.
    pub async fn delete(&self, namespace: &str, name: &str, resource_version: &str) -> Result<(), WriteError> {
        let parameters = DeleteParams {
            preconditions: Some(Preconditions {
                resource_version: Some(resource_version.to_owned()),
                uid: None,
            }),
            ..DeleteParams::default()
        };
        self.send(self.request(namespace).delete(name, &parameters))
            .await
            .map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use ::kube::core::Status;

    use super::*;

    #[test]
    fn credentials_that_are_not_accepted_may_be_later() {
        let of = |code: u16| {
            let status = Status {
                code,
                ..Status::failure("refused", "Refused")
            };
            WriteError::from(Error::Api(Box::new(status)))
        };
        assert!(matches!(of(401), WriteError::Failed(_)));
        assert!(matches!(of(403), WriteError::Refused(_)));
    }
}
