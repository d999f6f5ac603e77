//! Decides how a webhook configuration should be: the configuration in, a new one or nothing out.

use base64::{Engine, prelude::BASE64_STANDARD};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::Value;

/// The end of the names of the injector's webhooks.
const INJECTOR: &str = "sidecar-injector.istio.io";

/// The CA bundle of this replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bundle {
    /// The bundle as in `caBundle`.
    pub(super) text: String,
    certificates: Vec<CertificateDer<'static>>,
    /// True if a bundle with further certificates must be replaced.
    pub(super) is_exact: bool,
}

impl Bundle {
    /// Returns the bundle of PEM certificates; `None` unless they can be parsed.
    pub(super) fn of(roots: &[u8]) -> Option<Self> {
        let certificates: Vec<_> = CertificateDer::pem_slice_iter(roots).collect::<Result<_, _>>().ok()?;
        (!certificates.is_empty()).then(|| Self {
            text: BASE64_STANDARD.encode(roots),
            certificates,
            is_exact: false,
        })
    }

    /// Returns true if a webhook may keep its bundle.
    fn accepts(&self, present: &str) -> bool {
        if self.is_exact || self.text == present {
            return self.text == present;
        }
        let present = BASE64_STANDARD.decode(present).ok();
        let present = present.and_then(|present| Self::of(&present));
        present.is_some_and(|present| self.certificates.iter().all(|own| present.certificates.contains(own)))
    }
}

/// The treatment of failure policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailurePolicy {
    /// They belong to the installation: configurations of the injector.
    Kept,
    /// They are raised to `Fail`, but not before the webhook has proved to work.
    Unproved,
    /// They are raised to `Fail`.
    Fail,
}

/// The configuration has no webhook of this control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoWebhook;

/// Returns the configuration with this CA bundle; `None` if it is as it should be.
pub(super) fn patched(found: &Value, bundle: &Bundle, policy: FailurePolicy) -> Result<Option<Value>, NoWebhook> {
    let mut new = found.clone();
    let mut counts = 0;
    let webhooks = new.get_mut("webhooks").and_then(Value::as_array_mut);
    for webhook in webhooks.into_iter().flatten() {
        // Parity (pkg/webhooks/webhookpatch.go): configurations of the injector may have webhooks of others.
        let is_own =
            policy != FailurePolicy::Kept || webhook["name"].as_str().is_some_and(|name| name.ends_with(INJECTOR));
        if !is_own || !webhook.is_object() {
            continue;
        }
        counts += 1;
        let present = webhook["clientConfig"]["caBundle"].as_str();
        if present.is_none_or(|present| !bundle.accepts(present)) {
            webhook["clientConfig"]["caBundle"] = bundle.text.as_str().into();
        }
        if policy == FailurePolicy::Fail {
            webhook["failurePolicy"] = "Fail".into();
        }
    }
    match counts {
        0 if policy == FailurePolicy::Kept => Err(NoWebhook),
        _ => Ok((new != *found).then_some(new)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn certificate(text: &str) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
    }

    fn bundle(certificates: &[&str]) -> Bundle {
        let certificates: String = certificates.iter().map(|text| certificate(text)).collect();
        Bundle::of(certificates.as_bytes()).expect("certificates")
    }

    #[test]
    fn bundles_are_pem_certificates() {
        let text = certificate("AAAA");
        assert_eq!(bundle(&["AAAA"]).text, BASE64_STANDARD.encode(&text));
        assert_eq!(Bundle::of(b""), None);
        assert_eq!(Bundle::of(b"text"), None);
        let broken = certificate("!");
        assert_eq!(Bundle::of(format!("{text}{broken}").as_bytes()), None);
    }

    #[test]
    fn bundles_with_the_own_roots_are_accepted() {
        let own = bundle(&["AAAA", "AAAB"]);
        assert!(own.accepts(&own.text));
        assert!(own.accepts(&bundle(&["AAAC", "AAAB", "AAAA"]).text));
        let (part, no_certificate) = (bundle(&["AAAA"]).text, BASE64_STANDARD.encode("text"));
        for other in ["", "!", &part, &no_certificate] {
            assert!(!own.accepts(other), "{other}");
        }
        let exact = Bundle { is_exact: true, ..own };
        assert!(exact.accepts(&exact.text));
        assert!(!exact.accepts(&bundle(&["AAAC", "AAAB", "AAAA"]).text));
    }

    fn configuration(bundle: Option<&str>, policy: &str) -> Value {
        let webhook = |name: &str| {
            let mut webhook =
                json!({"name": name, "failurePolicy": policy, "clientConfig": {"service": {"name": "a"}}});
            if let Some(bundle) = bundle {
                webhook["clientConfig"]["caBundle"] = bundle.into();
            }
            webhook
        };
        let webhooks = ["rev.namespace.sidecar-injector.istio.io", "other.example.com"].map(webhook);
        json!({"metadata": {"name": "x", "resourceVersion": "7"}, "webhooks": webhooks})
    }

    #[test]
    fn only_webhooks_of_the_injector_are_patched() {
        let (found, bundle) = (configuration(None, "Ignore"), bundle(&["AAAA"]));
        let new = patched(&found, &bundle, FailurePolicy::Kept)
            .expect("a webhook")
            .expect("a change");
        let mut want = found.clone();
        want["webhooks"][0]["clientConfig"]["caBundle"] = bundle.text.as_str().into();
        assert_eq!(new, want);
        assert_eq!(patched(&new, &bundle, FailurePolicy::Kept), Ok(None));
        let foreign = json!({"webhooks": [{"name": "other.example.com"}]});
        assert_eq!(patched(&foreign, &bundle, FailurePolicy::Kept), Err(NoWebhook));
    }

    #[test]
    fn validators_fail_closed_once_they_are_proved() {
        let (found, bundle) = (configuration(None, "Ignore"), bundle(&["AAAA"]));
        let patch =
            |found: &Value, policy| patched(found, &bundle, policy).expect("validators are not checked by name");
        let open = patch(&found, FailurePolicy::Unproved).expect("a change");
        assert_eq!(open["webhooks"][1]["clientConfig"]["caBundle"], bundle.text.as_str());
        assert_eq!(open["webhooks"][1]["failurePolicy"], "Ignore");
        assert_eq!(patch(&open, FailurePolicy::Unproved), None);
        let closed = patch(&open, FailurePolicy::Fail).expect("a change");
        assert_eq!(closed["webhooks"][0]["failurePolicy"], "Fail");
        assert_eq!(patch(&closed, FailurePolicy::Fail), None);
        assert_eq!(patch(&closed, FailurePolicy::Unproved), None, "never lowered");
    }

    #[test]
    fn malformed_configurations_change_nothing() {
        for found in [
            json!({}),
            json!({"webhooks": "x"}),
            json!({"webhooks": [7, null]}),
            Value::Null,
        ] {
            assert_eq!(patched(&found, &bundle(&["AAAA"]), FailurePolicy::Fail), Ok(None));
        }
    }
}
