//! The policy of the stable channel in a real API server.

use std::time::Duration;

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::kubernetes::{self, Cluster, api::plural};
use crate::support::{helm, missing, wait};

pub(super) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test(
        "charts::stable::other_channels_are_refused",
        other_channels_are_refused,
    )]
}

/// The revision of the test, so that the policy leaves objects of other tests alone.
const REVISION: &str = "only-stable";

/// Sends an object of a revision to the API server as a dry run.
fn try_out(cluster: &Cluster, revision: &str, (version, kind, spec): (&str, &str, &Value)) -> Result<Value, String> {
    let path = format!("/apis/{version}/namespaces/default/{}?dryRun=All", plural(kind));
    let metadata = json!({ "name": "tried-out", "labels": { "istio.io/rev": revision } });
    let object = json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec });
    cluster.api.post(&path, &object)
}

fn other_channels_are_refused() -> Result<Completion, Failed> {
    if !kubernetes::is_installed() || !helm::is_installed() {
        return missing("the Kubernetes API server or Helm is missing; `make tools` installs them");
    }
    let cluster = kubernetes::shared(0)?;
    let revision = format!("revision={REVISION}");
    let objects = helm::objects("istiod", &["experimental.stableValidationPolicy=true", &revision])?;
    let is_policy = |object: &&Value| {
        object["kind"]
            .as_str()
            .is_some_and(|kind| kind.contains("AdmissionPolicy"))
    };
    let policies: Vec<&Value> = objects.iter().filter(is_policy).collect();
    assert_eq!(policies.len(), 2, "a policy and its binding");
    for policy in policies {
        cluster.api.apply(policy)?;
    }
    let security = "security.istio.io/v1";
    let telemetry = "telemetry.istio.io/v1";
    let sources = |source: Value| json!({ "rules": [{ "to": [{}] }, { "from": [{ "source": source }] }] });
    let refused = [
        (
            "networking.istio.io/v1alpha3",
            "EnvoyFilter",
            json!({}),
            "EnvoyFilter is not in the stable channel",
        ),
        (
            "extensions.istio.io/v1alpha1",
            "WasmPlugin",
            json!({ "url": "example.com/filter" }),
            "WasmPlugin is not in the stable channel",
        ),
        (
            "networking.istio.io/v1beta1",
            "ProxyConfig",
            json!({}),
            "ProxyConfig is not in the stable channel",
        ),
        (
            telemetry,
            "Telemetry",
            json!({ "tracing": [{}, { "useRequestIdForTraceSampling": false }] }),
            "spec.tracing[].useRequestIdForTraceSampling",
        ),
        (
            telemetry,
            "Telemetry",
            json!({ "metrics": [{ "reportingInterval": "5s" }] }),
            "spec.metrics[].reportingInterval",
        ),
        (
            telemetry,
            "Telemetry",
            json!({ "accessLogging": [{ "filter": { "expression": "true" } }] }),
            "spec.accessLogging[].filter",
        ),
        (
            security,
            "AuthorizationPolicy",
            sources(json!({ "trustDomains": ["a"] })),
            "source.trustDomains",
        ),
        (
            security,
            "AuthorizationPolicy",
            sources(json!({ "notTrustDomains": ["a"] })),
            "notTrustDomains",
        ),
    ];
    // The API server enforces a new policy after a while.
    wait::until("the policy", Duration::from_mins(1), || {
        let (version, kind, spec, _) = &refused[0];
        try_out(cluster, REVISION, (version, kind, spec)).is_err().then_some(())
    })?;
    for (version, kind, spec, because) in &refused {
        let verdict = try_out(cluster, REVISION, (version, kind, spec));
        let error = verdict.err().ok_or_else(|| format!("{kind} {spec} was accepted"))?;
        assert!(error.contains(because), "{kind} {spec}: {error}");
        try_out(cluster, "another", (version, kind, spec)).map_err(|error| format!("{kind} {spec}: {error}"))?;
    }
    for (version, kind, spec) in [
        (
            "networking.istio.io/v1",
            "VirtualService",
            json!({ "hosts": ["a.example.com"] }),
        ),
        (telemetry, "Telemetry", json!({})),
        (
            telemetry,
            "Telemetry",
            json!({ "tracing": [{ "randomSamplingPercentage": 1 }], "metrics": [{}], "accessLogging": [{}] }),
        ),
        (security, "AuthorizationPolicy", json!({})),
        (security, "AuthorizationPolicy", sources(json!({ "principals": ["a"] }))),
    ] {
        try_out(cluster, REVISION, (version, kind, &spec)).map_err(|error| format!("{kind} {spec}: {error}"))?;
    }
    Ok(Completion::Completed)
}
