//! An API server for tests: objects by path, without watches.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ::kube::client::Body;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};

/// The objects by path. Clones share them.
#[derive(Clone, Default)]
pub(super) struct FakeApi(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    /// The number of writes.
    version: u64,
    /// The number of requests to fail.
    failures: u32,
    /// The number of requests by path.
    requests: BTreeMap<String, usize>,
}

impl FakeApi {
    /// Returns a client of the server.
    pub(super) fn client(&self) -> ::kube::Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.answer(request).await) }
        });
        ::kube::Client::new(service, "default")
    }

    /// Writes an object.
    pub(super) fn put(&self, path: &str, object: Value) {
        self.state().put(path.to_owned(), object);
    }

    /// Returns an object.
    pub(super) fn get(&self, path: &str) -> Option<Value> {
        self.state().objects.get(path).cloned()
    }

    /// Deletes an object.
    pub(super) fn delete(&self, path: &str) {
        self.state().objects.remove(path);
    }

    /// Makes the next requests fail.
    pub(super) fn fail(&self, requests: u32) {
        self.state().failures = requests;
    }

    /// Returns the number of requests for a path.
    pub(super) fn requests(&self, path: &str) -> usize {
        self.state().requests.get(path).copied().unwrap_or_default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.expect("a body").to_bytes();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let query = parts.uri.query().unwrap_or_default();
        let (status, answer) = match self.state().answer(&parts.method, parts.uri.path(), query, body) {
            Ok(answer) => (StatusCode::OK, answer.to_string()),
            Err(status) => (status, status.to_string()),
        };
        let response = Response::builder().status(status);
        response.body(Body::from(answer.into_bytes())).expect("a response")
    }
}

impl State {
    fn put(&mut self, path: String, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.objects.insert(path, object.clone());
        object
    }

    fn answer(&mut self, method: &Method, path: &str, query: &str, body: Value) -> Result<Value, StatusCode> {
        *self.requests.entry(path.to_owned()).or_default() += 1;
        if self.failures > 0 {
            self.failures -= 1;
            return Err(StatusCode::INTERNAL_SERVER_ERROR);
        }
        if method == Method::POST {
            let name = body["metadata"]["name"].as_str().unwrap_or_default();
            let path = format!("{path}/{name}");
            if self.objects.contains_key(&path) {
                return Err(StatusCode::CONFLICT);
            }
            return Ok(self.put(path, body));
        }
        if method == Method::GET && query.contains("fieldSelector") {
            let named = self.objects.iter().filter_map(|(key, object)| {
                let name = key.strip_prefix(path)?.strip_prefix('/')?;
                let is_named = query.contains(&format!("metadata.name%3D{name}"));
                is_named.then(|| json!({"metadata": object["metadata"]}))
            });
            return Ok(json!({"metadata": {}, "items": named.collect::<Vec<_>>()}));
        }
        let (path, is_status) = match path.strip_suffix("/status") {
            Some(path) => (path, true),
            None => (path, false),
        };
        let found = self.objects.get(path).cloned().ok_or(StatusCode::NOT_FOUND)?;
        let expected = match *method {
            Method::PUT => &body["metadata"]["resourceVersion"],
            Method::DELETE => &body["preconditions"]["resourceVersion"],
            _ => return Ok(found),
        };
        if !expected.is_null() && *expected != found["metadata"]["resourceVersion"] {
            return Err(StatusCode::CONFLICT);
        }
        if method == Method::DELETE {
            self.objects.remove(path);
            return Ok(found);
        }
        let new = if is_status {
            let mut new = found;
            new["status"] = body["status"].clone();
            new
        } else {
            body
        };
        Ok(self.put(path.to_owned(), new))
    }
}
