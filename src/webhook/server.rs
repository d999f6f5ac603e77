//! The HTTP handlers of the webhooks.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Request, State},
    response::{IntoResponse, Response},
    routing::any,
};
use prometheus::Registry;

use super::{
    body::Bodies,
    metrics::ValidationMetrics,
    review::{Review, unparsed},
    validation::{self, Reason},
};
use crate::{api::Kind, rpc::PreAuthLimiter};

/// The state of `/validate`.
struct Validation {
    bodies: Bodies,
    metrics: ValidationMetrics,
}

/// Returns the pages of the webhooks. `limiter` has the connections of their server.
///
/// # Errors
/// If the name of a metric is in use.
pub fn pages(registry: &Registry, limiter: PreAuthLimiter) -> Result<Router, prometheus::Error> {
    let validation = Arc::new(Validation {
        bodies: Bodies::new(limiter),
        metrics: ValidationMetrics::new(registry)?,
    });
    Ok(Router::new()
        .route("/validate", any(validate))
        .route("/validate/", any(validate))
        .route("/validate/{*rest}", any(validate))
        .with_state(validation))
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
