//! HTTP servers: `/ready` and debug pages on `--httpAddr`, metrics and version on `--monitoringAddr`.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    extract::{ConnectInfo, Request, State},
    http::{StatusCode, Uri},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use prometheus::Gauge;

use tokio::sync::mpsc;

use super::{
    metrics::{
        self, NoteMetrics, VERSION,
        exposition::Exposition,
        mesh::{MeshMetrics, Observed},
    },
    renderer::Renderer,
};
use crate::{
    environment::{self, Environment},
    generate::{
        ResourceKey,
        resource::Built,
        store::{self, ConfigStore},
    },
    model::{MeshSnapshot, World},
    push::push_loop::{Inspect, PushHandle},
    table::Table,
};

/// Path of the metrics.
const METRICS: &str = "/metrics";
/// Time for what the thread of pushes answers. A push may take longer; then its gauges keep their last values, so that
/// the other metrics arrive in time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Data of the pages.
struct Pages {
    environment: Arc<Environment>,
    uptime: Gauge,
    notes: NoteMetrics,
    mesh: MeshMetrics,
    inspect: mpsc::Sender<Inspect>,
}

/// The inputs of gauges and counters from the thread of pushes.
struct Collected {
    resources: Table<ResourceKey, Built>,
    mesh: Arc<MeshSnapshot>,
    observed: Observed,
}

/// Returns the readiness page: 200 once every source is synced and the first snapshot exists, otherwise 503.
pub fn readiness(environment: &Arc<Environment>) -> Router {
    let ready = environment.ready.subscribe();
    let page = move || async move {
        if *ready.borrow() {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    Router::new().route("/ready", get(page))
}

/// Returns `/metrics` and `/version`.
pub fn monitoring(
    environment: &Arc<Environment>,
    inspect: mpsc::Sender<Inspect>,
    renderer: &Renderer,
) -> Result<Router, prometheus::Error> {
    let uptime = metrics::register_process(&environment.registry, environment.tasks.clone())?;
    let notes = NoteMetrics::new(&environment.registry)?;
    let pages = Arc::new(Pages {
        environment: environment.clone(),
        uptime,
        notes,
        mesh: MeshMetrics::new(&environment.registry)?,
        inspect,
    });
    let metrics = Router::new().route(METRICS, get(metrics_page)).with_state(pages);
    let is_local_only = environment.settings.is_on("METRICS_LOCALHOST_ACCESS_ONLY");
    // In front of the renderer, which gives callers the same answer.
    let metrics = restricted(renderer.render(metrics), is_local_only);
    Ok(metrics.route("/version", get(|| async { VERSION })))
}

/// Returns the page of metrics for peers that may read it. Only the form of its answer depends on the request.
fn restricted(metrics: Router, is_local_only: bool) -> Router {
    let restriction = move |ConnectInfo(peer): ConnectInfo<SocketAddr>, mut request: Request, next: Next| async move {
        match refusal(is_local_only, peer) {
            Some(refusal) => refusal.into_response(),
            None => {
                let form = Exposition::negotiated(request.headers());
                request.extensions_mut().insert(form);
                // It has no parameters. Those of a client would make it many pages, which keep others waiting.
                *request.uri_mut() = Uri::from_static(METRICS);
                next.run(request).await
            }
        }
    };
    metrics.route_layer(middleware::from_fn(restriction))
}

/// Returns the answer to a peer that may not read metrics (`METRICS_LOCALHOST_ACCESS_ONLY`).
///
/// Parity (pilot/pkg/bootstrap/monitoring.go): other pages are not restricted.
fn refusal(is_local_only: bool, peer: SocketAddr) -> Option<(StatusCode, &'static str)> {
    let is_refused = is_local_only && !peer.ip().is_loopback();
    is_refused.then_some((StatusCode::FORBIDDEN, "Only requests from localhost are allowed\n"))
}

async fn metrics_page(State(pages): State<Arc<Pages>>, Extension(form): Extension<Exposition>) -> Response {
    let started = pages.environment.started;
    pages
        .uptime
        .set(environment::now().saturating_duration_since(started).as_secs_f64());
    if let Some(collected) = answer(&pages.inspect, ANSWER_TIMEOUT).await {
        let features = &collected.mesh.installation.features;
        let notes = store::notes(&collected.resources);
        pages.notes.set(&notes, features.pilot_envoy_filter_stats);
        pages
            .notes
            .count_certificates(&collected.resources, environment::wall_clock());
        pages.mesh.set(&collected.mesh, &collected.observed);
    }
    form.response(&pages.environment.registry.gather())
}

/// Returns what gauges are computed from; `None` if the thread of pushes does not answer within this time.
async fn answer(inspect: &mpsc::Sender<Inspect>, limit: Duration) -> Option<Collected> {
    let collect = |world: &World, store: &ConfigStore| Collected {
        resources: store.resources().clone(),
        mesh: world.snapshot(),
        observed: Observed::of(store),
    };
    let answered = tokio::time::timeout(limit, PushHandle::ask(inspect, collect)).await;
    answered.ok().flatten()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn r20_parameters_do_not_multiply_metrics() {
        let page = Router::new().route(METRICS, get(async |uri: Uri| uri.to_string()));
        let pages = restricted(page, false);
        let peer = SocketAddr::from(([10, 0, 0, 1], 9));
        for path in ["/metrics", "/metrics?a", "http://other/metrics?a=b"] {
            let request = http::Request::get(path)
                .extension(ConnectInfo(peer))
                .body(Body::empty());
            let Ok(response) = pages.clone().oneshot(request.expect("a request")).await;
            let rendered = response.into_body().collect().await.expect("a body in memory");
            assert_eq!(rendered.to_bytes(), METRICS);
        }
    }

    #[tokio::test]
    async fn metrics_do_not_wait_for_a_push() {
        let (inspect, mut questions) = mpsc::channel(1);
        assert!(answer(&inspect, Duration::ZERO).await.is_none());
        assert!(questions.recv().await.is_some());
    }

    #[test]
    fn metrics_may_be_restricted_to_this_machine() {
        let (own, other) = (
            SocketAddr::from(([127, 0, 0, 1], 9)),
            SocketAddr::from(([10, 0, 0, 1], 9)),
        );
        assert_eq!(refusal(true, own), None);
        assert_eq!(refusal(false, other), None);
        assert_eq!(
            refusal(true, other).map(|(status, _)| status),
            Some(StatusCode::FORBIDDEN)
        );
    }
}
