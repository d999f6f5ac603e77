//! The HTTP handlers of the webhooks.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::any,
};
use prometheus::Registry;
use tokio::sync::watch;

use super::{
    body::{Bodies, Body},
    host::ProcessHost,
    injection::{self, Injection},
    injector::{InjectorReceiver, InjectorState},
    metrics::{InjectionMetrics, ValidationMetrics},
    review::{Review, unparsed},
    validation::{self, Reason},
};
use crate::{
    api::Kind,
    environment,
    inject::{self, Injector},
    model::MeshSnapshot,
    rpc::PreAuthLimiter,
};

/// The time limit for the injection of one pod. An API server waits 10 s by default.
const INJECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// The inputs of injection.
pub struct InjectionInputs {
    /// The injector.
    pub injector: InjectorReceiver,
    /// The environment of pods, without what a request decides.
    pub environment: watch::Receiver<inject::Environment>,
    /// The mesh.
    pub mesh: watch::Receiver<Arc<MeshSnapshot>>,
    /// The environment variables of the process, which templates may read.
    pub variables: Arc<BTreeMap<String, String>>,
}

/// The state of `/validate`.
struct Validation {
    bodies: Bodies,
    metrics: ValidationMetrics,
}

/// The state of `/inject`.
struct Injecting {
    bodies: Bodies,
    metrics: InjectionMetrics,
    inputs: InjectionInputs,
}

/// Returns the pages of the webhooks. `limiter` has the connections of their server. Without inputs of injection there
/// is no page for it.
///
/// # Errors
/// If the name of a metric is in use.
pub fn pages(
    registry: &Registry,
    limiter: PreAuthLimiter,
    injection: Option<InjectionInputs>,
) -> Result<Router, prometheus::Error> {
    let bodies = Bodies::new(limiter);
    let validation = Arc::new(Validation {
        bodies: bodies.clone(),
        metrics: ValidationMetrics::new(registry)?,
    });
    let router = Router::new()
        .route("/validate", any(validate))
        .route("/validate/", any(validate))
        .route("/validate/{*rest}", any(validate))
        .with_state(validation);
    let Some(inputs) = injection else {
        return Ok(router);
    };
    let injecting = Arc::new(Injecting {
        bodies,
        metrics: InjectionMetrics::new(registry)?,
        inputs,
    });
    let injection = Router::new()
        .route("/inject", any(inject))
        .route("/inject/", any(inject))
        .route("/inject/{*rest}", any(inject))
        .with_state(injecting);
    Ok(router.merge(injection))
}

async fn validate(State(validation): State<Arc<Validation>>, request: Request) -> Response {
    let body = match validation.bodies.read(request).await {
        Ok(body) => body,
        Err(error) => {
            validation.metrics.count_http_error(error.status().as_u16());
            return error.into_response();
        }
    };
    let response = body.process(|body| match Review::parse(body) {
        Ok(review) => judge(&validation.metrics, review),
        Err(error) => unparsed(error),
    });
    Json(response.await).into_response()
}

async fn inject(State(injecting): State<Arc<Injecting>>, request: Request) -> Response {
    let state = injecting.inputs.injector.borrow().clone();
    // Parity (pilot/pkg/bootstrap/sidecarinjector.go): without a configuration there is no handler.
    let InjectorState::Valid(injector) = state else {
        return (StatusCode::NOT_FOUND, "no injector configuration\n").into_response();
    };
    injecting.metrics.count_request();
    let path = request.uri().path().to_owned();
    match injecting.bodies.read(request).await {
        Ok(body) => Json(answer(&injecting, &injector, &path, body).await).into_response(),
        Err(error) => {
            injecting.metrics.count_malformed();
            error.into_response()
        }
    }
}

async fn answer(injecting: &Injecting, injector: &Injector, path: &str, body: Body) -> serde_json::Value {
    let started = environment::now();
    let response = body.process(|body| match Review::parse(body) {
        Ok(review) => {
            let variables = injecting.inputs.variables.clone();
            let host = ProcessHost::new(variables, Some(started + INJECTION_TIMEOUT));
            let environment = inject::Environment {
                host: Arc::new(host),
                ..injecting.inputs.environment.borrow().clone()
            };
            let mesh = injecting.inputs.mesh.borrow().clone();
            let (verdict, outcome) = injection::inject(injector, environment, &mesh, path, &review.request);
            report(&review, &outcome, verdict.refusal.as_deref());
            (review.response(&verdict), outcome)
        }
        Err(error) => (unparsed(error), Injection::Failed),
    });
    let (response, outcome) = response.await;
    let took = environment::now().saturating_duration_since(started);
    injecting.metrics.count(&outcome, took.as_secs_f64());
    response
}

fn report(review: &Review, outcome: &Injection, error: Option<&str>) {
    let request = &review.request;
    let namespace = request.namespace.as_str();
    let pod = ["name", "generateName"].map(|field| request.object["metadata"][field].as_str());
    let pod = pod.into_iter().flatten().next().unwrap_or_default();
    if inject::has_unknown_choice(&request.object) {
        tracing::warn!(
            namespace,
            pod,
            "sidecar.istio.io/inject is neither true nor false, the injection policy decides"
        );
    }
    match outcome {
        Injection::Injected => tracing::debug!(namespace, pod, "pod injected"),
        Injection::Skipped(reason) => tracing::debug!(namespace, pod, reason, "pod not injected"),
        Injection::Failed => tracing::error!(namespace, pod, error, "failed to inject pod"),
    }
}

fn judge(metrics: &ValidationMetrics, mut review: Review) -> serde_json::Value {
    let outcome = validation::validate(&mut review.request);
    let request = &review.request;
    if !request.dry_run {
        metrics.count(outcome.kind, outcome.reason);
    }
    if let Some(reason) = outcome.reason.filter(|reason| *reason != Reason::UnsupportedOperation) {
        tracing::debug!(
            kind = outcome.kind.map_or("unknown", Kind::name),
            namespace = request.namespace,
            name = request.name,
            dry_run = request.dry_run,
            reason = reason.label(),
            error = outcome.verdict.refusal,
            "object refused"
        );
    }
    review.response(&outcome.verdict)
}
