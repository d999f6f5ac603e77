//! The secrets of the Envoys. The agent's own secrets (the workload's certificate, roots, files) are one fixed pair.
//! The daemon sends its secrets only to authenticated proxies, and these Envoys use plaintext, so they get those that
//! `istiod render` writes for the proxy.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;

use istiod::proto::Any;
use istiod::proto::json::{Unknown, any_from_json};
use serde_json::{Value, json};

use crate::support::daemon;

/// A certificate that is also its own root, and its key, as PEM.
pub(super) const CERTIFICATE: &str = include_str!("identity.pem");
pub(super) const KEY: &str = include_str!("identity-key.pem");

/// A secret of the agent: roots for the well-known root names, a certificate for all others.
pub(super) fn of_agent(name: &str) -> Any {
    let certificate = json!({ "inlineString": CERTIFICATE });
    let body = if name == "ROOTCA" || name.starts_with("file-root:") || name.ends_with("-cacert") {
        json!({ "validationContext": { "trustedCa": certificate } })
    } else {
        let key = json!({ "inlineString": KEY });
        json!({ "tlsCertificate": { "certificateChain": certificate, "privateKey": key } })
    };
    let mut secret = json!({ "@type": super::record::SECRET, "name": name });
    if let (Some(secret), Some(body)) = (secret.as_object_mut(), body.as_object()) {
        secret.extend(body.clone());
    }
    any_from_json(&secret, Unknown::Deny).expect("it is a valid secret")
}

type Secrets = Result<BTreeMap<String, Any>, String>;

/// The daemon's secrets for one proxy, by name; rendered at the first request.
pub(super) type Rendered = LazyLock<Secrets, Box<dyn FnOnce() -> Secrets + Send>>;

/// See [`Rendered`].
pub(super) fn rendered(scenario: &Path, out: &Path, proxy: &str) -> Rendered {
    let (scenario, out, proxy) = (scenario.to_owned(), out.to_owned(), proxy.to_owned());
    LazyLock::new(Box::new(move || {
        daemon::render(&scenario, &out)?;
        let file = out.join(&proxy).join("sds.json");
        let Ok(text) = std::fs::read_to_string(&file) else {
            return Ok(BTreeMap::new());
        };
        let json: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let mut secrets = BTreeMap::new();
        for entry in json["resources"].as_array().into_iter().flatten() {
            let name = entry["name"].as_str().unwrap_or_default();
            let secret = any_from_json(&entry["resource"], Unknown::Deny).map_err(|error| error.to_string())?;
            secrets.insert(name.to_owned(), secret);
        }
        Ok(secrets)
    }))
}
