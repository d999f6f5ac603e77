//! Objects of an API server, as JSON.

use std::future::Future;
use std::time::Duration;

use ::kube::{Client, Config};
use http::{Method, Request};
use serde_json::{Value, json};

use crate::support::http::RUNTIME;
use crate::support::wait;
use istiod::api::yaml;

/// Time limit of a request on a quiet machine.
const ANSWERED: Duration = Duration::from_mins(1);

/// Access to an API server as one user. The errors are texts.
#[derive(Clone)]
pub(crate) struct Api {
    client: Client,
}

/// The identity of an object.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    /// `v1` or `group/version`.
    pub(crate) api_version: String,
    pub(crate) kind: String,
    /// Empty for cluster-scoped objects.
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Reference {
    pub(crate) fn new(api_version: &str, kind: &str, namespace: &str, name: &str) -> Reference {
        let [api_version, kind, namespace, name] = [api_version, kind, namespace, name].map(str::to_owned);
        Reference {
            api_version,
            kind,
            namespace,
            name,
        }
    }

    /// The identity of the object in a document.
    pub(crate) fn of(document: &Value) -> Reference {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Reference {
            api_version: text(&document["apiVersion"]),
            kind: text(&document["kind"]),
            namespace: text(&document["metadata"]["namespace"]),
            name: text(&document["metadata"]["name"]),
        }
    }

    /// The path of the collection of its kind and namespace.
    fn folder(&self) -> String {
        let root = if self.api_version.contains('/') { "apis" } else { "api" };
        let resource = plural(&self.kind);
        if self.namespace.is_empty() {
            format!("/{root}/{}/{resource}", self.api_version)
        } else {
            format!("/{root}/{}/namespaces/{}/{resource}", self.api_version, self.namespace)
        }
    }

    fn path(&self) -> String {
        format!("{}/{}", self.folder(), self.name)
    }
}

/// Returns the plural of a kind, as in paths.
pub(crate) fn plural(kind: &str) -> String {
    let lower = kind.to_lowercase();
    let vowel_before_y = lower.ends_with("ay") || lower.ends_with("ey");
    match lower.strip_suffix('y') {
        Some(stem) if !vowel_before_y => format!("{stem}ies"),
        _ if lower.ends_with('s') => format!("{lower}es"),
        _ => format!("{lower}s"),
    }
}

/// Returns the documents of a YAML text.
pub(crate) fn documents(text: &str) -> Vec<Value> {
    yaml::documents(text)
        .iter()
        .map(|document| {
            document
                .parse()
                .unwrap_or_else(|error| panic!("line {}: {error}", document.line))
        })
        .collect()
}

impl Api {
    pub(crate) fn new(url: &str, authority: &str, token: &str) -> Result<Api, String> {
        let mut config = Config::new(url.parse().map_err(|error| format!("{url}: {error}"))?);
        config.root_cert = Some(certificates(authority)?);
        config.auth_info.token = Some(token.to_owned().into());
        let _runtime = RUNTIME.enter();
        let client = Client::try_from(config).map_err(|error| error.to_string())?;
        Ok(Api { client })
    }

    /// Writes the object and its status as in the document, like `kubectl apply --server-side`.
    pub(crate) fn apply(&self, document: &Value) -> Result<Value, String> {
        let reference = Reference::of(document);
        let query = "fieldManager=trial&force=true";
        let apply = |path: String, document: &Value| {
            self.ask(
                Method::PATCH,
                &format!("{path}?{query}"),
                "application/apply-patch+yaml",
                Some(document),
            )
        };
        let mut stored = apply(reference.path(), document)?;
        if !document["status"].is_null() {
            let mut identity = document["metadata"].clone();
            identity
                .as_object_mut()
                .into_iter()
                .for_each(|fields| fields.retain(|name, _| name == "name" || name == "namespace"));
            let status = json!({ "apiVersion": document["apiVersion"], "kind": document["kind"],
                "metadata": identity, "status": document["status"] });
            stored = apply(format!("{}/status", reference.path()), &status)?;
        }
        Ok(stored)
    }

    /// Writes the status in the document. The rest of the object stays.
    pub(crate) fn apply_status(&self, document: &Value) -> Result<Value, String> {
        let path = format!("{}/status", Reference::of(document).path());
        self.ask(Method::PATCH, &path, "application/merge-patch+json", Some(document))
    }

    /// Calls [`Api::apply`] for each document of a YAML text.
    pub(crate) fn apply_all(&self, text: &str) -> Result<(), String> {
        documents(text)
            .iter()
            .try_for_each(|document| self.apply(document).map(|_| ()))
    }

    /// Creates an object that must not exist yet, without its status.
    pub(crate) fn create(&self, document: &Value) -> Result<Value, String> {
        self.post(&Reference::of(document).folder(), document)
    }

    /// Returns the object, if it exists.
    pub(crate) fn get(&self, reference: &Reference) -> Result<Option<Value>, String> {
        match self.ask(Method::GET, &reference.path(), "", None) {
            Ok(object) => Ok(Some(object)),
            Err(error) if error.contains("NotFound") || error.contains("404") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns all objects of a kind in a namespace.
    pub(crate) fn list(&self, api_version: &str, kind: &str, namespace: &str) -> Result<Vec<Value>, String> {
        let folder = Reference::new(api_version, kind, namespace, "").folder();
        let list = self.ask(Method::GET, &folder, "", None)?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// Applies a JSON merge patch (null removes) to the object, like `kubectl edit`.
    pub(crate) fn patch(&self, reference: &Reference, patch: &Value) -> Result<Value, String> {
        self.ask(
            Method::PATCH,
            &reference.path(),
            "application/merge-patch+json",
            Some(patch),
        )
    }

    /// Deletes the object, which must exist.
    pub(crate) fn delete(&self, reference: &Reference) -> Result<(), String> {
        let at_once = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0 });
        self.ask(Method::DELETE, &reference.path(), "application/json", Some(&at_once))
            .map(|_| ())
    }

    /// Begins to delete a pod that runs on a node: it stays, with a deletion timestamp, until [`Self::delete`].
    pub(crate) fn begin_deletion(&self, reference: &Reference) -> Result<(), String> {
        let later = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 300 });
        self.ask(Method::DELETE, &reference.path(), "application/json", Some(&later))
            .map(|_| ())
    }

    /// Posts a document to a path.
    pub(crate) fn post(&self, path: &str, document: &Value) -> Result<Value, String> {
        self.ask(Method::POST, path, "application/json", Some(document))
    }

    /// Returns the text at a path that is not an object's.
    pub(crate) fn text(&self, path: &str) -> Result<String, String> {
        let request = Request::get(path).body(Vec::new()).map_err(|error| error.to_string())?;
        answered(self.client.request_text(request))
    }

    fn ask(&self, method: Method, path: &str, content: &str, document: Option<&Value>) -> Result<Value, String> {
        let with_request = |error: &dyn std::fmt::Display| format!("{method} {path}: {error}");
        let mut request = Request::builder().method(&method).uri(path);
        if document.is_some() {
            request = request.header("content-type", content);
        }
        let body = document.map(|document| document.to_string().into_bytes());
        let request = request
            .body(body.unwrap_or_default())
            .map_err(|error| with_request(&error))?;
        answered(self.client.request(request)).map_err(|error| with_request(&error))
    }
}

/// Waits for the answer to a request, for a limited time: limits of [`wait::until`] act only between requests.
fn answered<T>(request: impl Future<Output = Result<T, ::kube::Error>>) -> Result<T, String> {
    let limited = async { tokio::time::timeout(wait::extended(ANSWERED), request).await };
    let answer = RUNTIME.block_on(limited).map_err(|_| "no answer in time".to_owned())?;
    answer.map_err(|error| error.to_string())
}

/// Returns the certificates of a PEM text, each as DER.
fn certificates(pem: &str) -> Result<Vec<Vec<u8>>, String> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .map(|certificate| certificate.map(|der| der.to_vec()).map_err(|error| error.to_string()))
        .collect()
}
