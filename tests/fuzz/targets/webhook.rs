//! Requests to the admission webhooks, whose clients send no credentials, and the injector's configuration.

use std::sync::Arc;

use istiod::{
    inject::{Environment, Injector, Namespace, Outcome, proxy_variables},
    template::Limits,
    webhook::{review::Review, validation},
};

use super::{Target, class_of, parts};

/// The body of a request to `/validate`.
pub(super) const REVIEW: Target = Target {
    name: "review",
    run: review,
    words: &[
        b"admission.k8s.io/v1",
        b"admission.k8s.io/v1beta1",
        b"AdmissionReview",
        b"\"request\"",
        b"\"object\"",
        b"\"operation\": \"CREATE\"",
        b"generateName",
        b"istio.io/dry-run",
        b"networking.istio.io/v1",
        b"VirtualService",
        b"null",
        b"{}",
        b"[]",
        b"[[[[[[[[",
        b"{\"a\":",
    ],
};

fn review(bytes: &[u8]) -> u64 {
    match Review::parse(bytes) {
        Ok(mut review) => {
            let outcome = validation::validate(&mut review.request);
            let response = review.response(&outcome.verdict);
            assert_eq!(response["response"]["allowed"], outcome.verdict.refusal.is_none());
            class_of(&response.to_string())
        }
        Err(error) => class_of(&error),
    }
}

/// A configuration, its values, a path and a pod as JSON, separated by zero bytes.
pub(super) const INJECTION: Target = Target {
    name: "injection",
    run: injection,
    words: &[
        b"policy: enabled",
        b"defaultTemplates: [a]",
        b"aliases: {b: [a, a]}",
        b"templates:\n  a: |\n    ",
        b"neverInjectSelector: [{matchExpressions: [{key: a, operator: Exists}]}]",
        b"alwaysInjectSelector: [{matchLabels: {a: b}}]",
        b"injectedAnnotations: {a: b}",
        b"rawTemplates: {}",
        b"{{ .ObjectMeta.Name }}",
        b"{{ .Spec.Containers }}",
        b"{{ .ProxyConfig.StatusPort }}",
        b"{{ range .Spec.Containers }}",
        b"{{ end }}",
        b"{{ toYaml .Values | nindent 4 }}",
        b"{{ annotation .ObjectMeta `a` 3 }}",
        b"{{ applicationPorts .Spec.Containers }}",
        b"{{ excludeInboundPort 1 `2` }}",
        b"{{ env \"A\" \"b\" }}",
        b"\"$patch\": \"delete\"",
        b"\"$setElementOrder/containers\": [{\"name\": \"a\"}]",
        b"\"$retainKeys\": []",
        b"\"annotations\": {\"inject.istio.io/templates\": \"a,b\"}",
        b"\"sidecar.istio.io/inject\": \"true\"",
        b"\"proxy.istio.io/config\": \"statusPort: 3\"",
        b"\"prometheus.io/scrape\": \"true\"",
        b"\"initContainers\": [{\"name\": \"istio-proxy\", \"image\": \"auto\"}]",
        b"\"readinessProbe\": {\"httpGet\": {\"port\": \"http\"}}",
        b"\"lifecycle\": {\"preStop\": {\"httpGet\": {\"port\": 1}}}",
        b"\"livenessProbe\": {\"grpc\": {\"port\": 1}}",
        b"\"name\": \"istio-proxy\"",
        b"/inject/cluster/a/net/b",
        b"/inject/:ENV:a=b:ENV:c=--slash--",
    ],
};

fn injection(bytes: &[u8]) -> u64 {
    let [config, values, path, pod] = parts::<4>(bytes).map(String::from_utf8_lossy);
    let limits = Limits {
        steps: 20_000,
        output_bytes: 1 << 16,
        value_bytes: 1 << 20,
        ..Limits::default()
    };
    let injector = match Injector::parse_with(&config, &values, &limits) {
        Ok(injector) => injector,
        Err(error) => return class_of(&error.to_string()),
    };
    let Ok(pod) = serde_json::from_str(&pod) else {
        return 0;
    };
    let environment = Environment {
        namespace: Arc::new(Namespace {
            name: "shop".to_owned(),
            ..Namespace::default()
        }),
        proxy_variables: proxy_variables(&path),
        ..Environment::default()
    };
    match injector.inject(&pod, &environment) {
        Ok(Outcome::Skipped(reason)) => class_of(&reason.to_string()),
        Ok(Outcome::Patch(patch)) => patch.operations().len().min(64) as u64,
        Err(error) => class_of(&error.to_string()),
    }
}
