//! Requests and responses of admission webhooks (`AdmissionReview` of `admission.k8s.io`, v1 and v1beta1).

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

const KIND: &str = "AdmissionReview";
const V1: &str = "admission.k8s.io/v1";
const V1BETA1: &str = "admission.k8s.io/v1beta1";

/// A request of an API server.
#[derive(Clone, Debug, PartialEq)]
pub struct Review {
    /// `apiVersion` of the request, which is also that of the response.
    api_version: &'static str,
    /// The object and what happens to it.
    pub request: Request,
}

/// The part of a request that webhooks read.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Request {
    /// Identifies the request in its response.
    #[serde(deserialize_with = "or_default")]
    pub uid: String,
    /// The resource of the request's path.
    #[serde(deserialize_with = "or_default")]
    pub resource: GroupResource,
    /// The namespace of the object; empty for cluster-scoped objects.
    #[serde(deserialize_with = "or_default")]
    pub namespace: String,
    /// The name of the object; empty on creation if the API server generates it.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// `CREATE`, `UPDATE`, `DELETE` or `CONNECT`.
    #[serde(deserialize_with = "or_default")]
    pub operation: String,
    /// True if nothing is stored.
    #[serde(deserialize_with = "or_default")]
    pub dry_run: bool,
    /// The new object; null if it is deleted.
    pub object: Value,
}

/// A resource by its names in paths.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GroupResource {
    /// The API group.
    #[serde(deserialize_with = "or_default")]
    pub group: String,
    /// The plural name.
    #[serde(deserialize_with = "or_default")]
    pub resource: String,
}

/// The decision about an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The reason of a refusal.
    pub refusal: Option<String>,
    /// Texts for the user, who sees each on a line of its own.
    pub warnings: Vec<String>,
    /// A JSON patch of the object, as text.
    pub patch: Option<Vec<u8>>,
}

impl Verdict {
    /// Returns a refusal.
    pub fn refused(reason: impl Into<String>) -> Self {
        Self {
            refusal: Some(reason.into()),
            ..Self::default()
        }
    }

    /// Returns an approval with a JSON patch of the object.
    pub fn patched(patch: Vec<u8>) -> Self {
        Self {
            patch: Some(patch),
            ..Self::default()
        }
    }
}

impl Review {
    /// Parses the body of a request. The nesting of JSON is limited to 128 levels.
    ///
    /// # Errors
    /// The reason, for the client.
    pub fn parse(body: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        #[derive(Default)]
        struct Envelope {
            #[serde(deserialize_with = "or_default")]
            api_version: String,
            #[serde(deserialize_with = "or_default")]
            kind: String,
            request: Option<Request>,
        }
        let envelope: Envelope =
            serde_json::from_slice(body).map_err(|error| format!("could not decode body: {error}"))?;
        let (version, kind) = (envelope.api_version, envelope.kind);
        let api_version = [V1, V1BETA1].into_iter().find(|known| *known == version);
        let api_version = api_version
            .filter(|_| kind == KIND)
            .ok_or_else(|| format!("could not decode body: no kind {kind:?} is registered for version {version:?}"))?;
        let request = envelope
            .request
            .ok_or("could not decode body: the review has no request")?;
        Ok(Self { api_version, request })
    }

    /// Returns the response with a verdict.
    pub fn response(&self, verdict: &Verdict) -> Value {
        response(self.api_version, &self.request.uid, verdict)
    }
}

/// Returns the response to a request that cannot be parsed.
pub fn unparsed(reason: String) -> Value {
    response(V1, "", &Verdict::refused(reason))
}

fn response(api_version: &str, uid: &str, verdict: &Verdict) -> Value {
    let mut response = json!({"uid": uid, "allowed": verdict.refusal.is_none()});
    if let Some(reason) = &verdict.refusal {
        response["status"] = json!({"metadata": {}, "message": reason});
    }
    if !verdict.warnings.is_empty() {
        response["warnings"] = json!(verdict.warnings);
    }
    if let Some(patch) = &verdict.patch {
        response["patchType"] = json!("JSONPatch");
        response["patch"] = json!(STANDARD.encode(patch));
    }
    json!({"kind": KIND, "apiVersion": api_version, "response": response})
}

/// Reads null as the default, as Go does.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_has_version_and_uid_of_the_request() {
        for version in [V1, V1BETA1] {
            let body = json!({"kind": KIND, "apiVersion": version, "request": {"uid": "7", "object": null}});
            let review = Review::parse(body.to_string().as_bytes()).expect("a review");
            let want = json!({"kind": KIND, "apiVersion": version, "response": {"uid": "7", "allowed": true}});
            assert_eq!(review.response(&Verdict::default()), want);
            let refused = review.response(&Verdict::refused("no"));
            assert_eq!(refused["response"]["allowed"], false);
            assert_eq!(refused["response"]["status"], json!({"metadata": {}, "message": "no"}));
            let patched = review.response(&Verdict::patched(b"[]".to_vec()));
            let want = json!({"uid": "7", "allowed": true, "patchType": "JSONPatch", "patch": "W10="});
            assert_eq!(patched["response"], want);
        }
    }

    #[test]
    fn malformed_reviews_are_errors() {
        let deep = "[".repeat(1_000_000);
        let nested = format!("{{\"request\": {{\"object\": {deep}");
        for (body, want) in [
            ("", "EOF"),
            ("{", "EOF"),
            ("[]", "could not decode body"),
            ("{}", "no kind \"\" is registered"),
            (r#"{"kind": "AdmissionReview", "apiVersion": "v1"}"#, "no kind"),
            (
                r#"{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}"#,
                "no request",
            ),
            (r#"{"request": {"uid": 3}}"#, "expected a string"),
            (&deep, "could not decode body"),
            (&nested, "recursion limit"),
        ] {
            let error = Review::parse(body.as_bytes()).expect_err("a malformed review");
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn nulls_are_defaults() {
        let body = json!({"kind": KIND, "apiVersion": V1, "request": {"uid": null, "resource": null, "dryRun": null}});
        let review = Review::parse(body.to_string().as_bytes()).expect("a review");
        assert_eq!(review.request, Request::default());
    }
}
