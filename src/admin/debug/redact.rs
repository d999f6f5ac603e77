//! Redaction of private keys and image registry credentials.

use serde_json::Value;

/// Fields whose content is secret at any depth, with their redactions.
///
/// Parity (pilot/pkg/xds/debug.go).
const SECRET_FIELDS: [(&str, &str); 2] = [
    ("privateKey", REDACTED),
    ("ISTIO_META_WASM_IMAGE_PULL_SECRET", REDACTED_VARIABLE),
];
const REDACTED: &str = "[redacted]";
/// Redaction of a bytes field.
const REDACTED_BYTES: &str = "W3JlZGFjdGVkXQ==";
/// Redaction of an environment variable.
const REDACTED_VARIABLE: &str = "<Redacted>";

/// Returns a resource in JSON without secrets.
pub(super) fn redacted(mut resource: Value) -> Value {
    search(&mut resource);
    resource
}

fn search(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match SECRET_FIELDS.iter().find(|(secret, _)| name == secret) {
                    Some((_, with)) => blot(field, with),
                    None => search(field),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(search),
        _ => {}
    }
}

/// Replaces all texts; `with` replaces the innermost.
fn blot(value: &mut Value, with: &str) {
    match value {
        Value::String(text) => with.clone_into(text),
        Value::Object(fields) => {
            for (name, field) in fields {
                let with = if name == "inlineBytes" {
                    REDACTED_BYTES
                } else {
                    REDACTED
                };
                blot(field, with);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| blot(value, with)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_and_credentials_are_not_shown() {
        let shown = redacted(
            json!({"name": "kubernetes://a", "tlsCertificate": {"certificateChain": {"inlineBytes": "YQ=="},
            "privateKey": {"inlineBytes": "Yg=="},
            "privateKeyProvider": {"typedConfig": {"privateKey": {"inlineString": "c"}}}},
            "vm": [{"keyValues": {"ISTIO_META_WASM_IMAGE_PULL_SECRET": "{\"auths\": {}}", "OTHER": "d"}}]}),
        );
        let want = json!({"name": "kubernetes://a", "tlsCertificate": {"certificateChain": {"inlineBytes": "YQ=="},
            "privateKey": {"inlineBytes": REDACTED_BYTES},
            "privateKeyProvider": {"typedConfig": {"privateKey": {"inlineString": REDACTED}}}},
            "vm": [{"keyValues": {"ISTIO_META_WASM_IMAGE_PULL_SECRET": REDACTED_VARIABLE, "OTHER": "d"}}]});
        assert_eq!(shown, want);
    }
}
