//! Decides how a webhook configuration should be: the configuration in, a new one or nothing out.

use serde_json::Value;

/// The end of the names of the injector's webhooks.
const INJECTOR: &str = "sidecar-injector.istio.io";

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
pub(super) fn patched(found: &Value, bundle: &str, policy: FailurePolicy) -> Result<Option<Value>, NoWebhook> {
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
        webhook["clientConfig"]["caBundle"] = bundle.into();
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
        let found = configuration(None, "Ignore");
        let new = patched(&found, "AAAA", FailurePolicy::Kept)
            .expect("a webhook")
            .expect("a change");
        let mut want = found.clone();
        want["webhooks"][0]["clientConfig"]["caBundle"] = "AAAA".into();
        assert_eq!(new, want);
        assert_eq!(patched(&new, "AAAA", FailurePolicy::Kept), Ok(None));
        let foreign = json!({"webhooks": [{"name": "other.example.com"}]});
        assert_eq!(patched(&foreign, "AAAA", FailurePolicy::Kept), Err(NoWebhook));
    }

    #[test]
    fn validators_fail_closed_once_they_are_proved() {
        let found = configuration(None, "Ignore");
        let patch = |found: &Value, policy| patched(found, "AAAA", policy).expect("validators are not checked by name");
        let open = patch(&found, FailurePolicy::Unproved).expect("a change");
        assert_eq!(open["webhooks"][1]["clientConfig"]["caBundle"], "AAAA");
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
            assert_eq!(patched(&found, "AAAA", FailurePolicy::Fail), Ok(None));
        }
    }
}
