//! Pages of distribution status: one answer, or events until the answer is final. They wait for other replicas, so they
//! are rendered beside other pages and not in turn with them.

use std::{convert::Infallible, time::Duration};

use axum::{
    Extension,
    extract::{Query, State},
    http::StatusCode,
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures::{Stream, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};

use super::pages::Shown;
use crate::{
    admin::{access::DebugScope, renderer::Renderer},
    api::Kind,
    base::{Namespace, duration},
    distribution::{ObjectQuery, replicas::Scope},
};

/// The longest time that events of one object are sent.
const MAX_TIMEOUT: Duration = Duration::from_mins(10);
/// The time without a time-out in the request.
const DEFAULT_TIMEOUT: Duration = Duration::from_mins(1);
/// The answer to clients beyond the limit.
const BUSY: (StatusCode, &str) = (
    StatusCode::SERVICE_UNAVAILABLE,
    "too many clients are waiting; retry later\n",
);

/// The parameters of both pages.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Parameters {
    kind: String,
    namespace: String,
    name: String,
    resource_version: String,
    #[serde(rename = "proxyID")]
    proxy_id: String,
    timeout: String,
    scope: String,
}

/// The namespace that a caller is restricted to.
fn visible(scope: &DebugScope) -> Option<Namespace> {
    match scope {
        DebugScope::All => None,
        DebugScope::Namespace(namespace) => Some(namespace.clone()),
    }
}

impl Parameters {
    /// Returns the replicas that are asked.
    fn replicas(&self) -> Result<Scope, (StatusCode, String)> {
        match self.scope.as_str() {
            "" => Ok(Scope::ControlPlane),
            "replica" => Ok(Scope::Replica),
            other => {
                let hint = "want replica, or nothing for all replicas";
                Err((
                    StatusCode::BAD_REQUEST,
                    format!("scope: {other:?} is not known; {hint}\n"),
                ))
            }
        }
    }

    /// Returns the query about an object; `None` if the request names none.
    fn query(&self, scope: &DebugScope) -> Result<Option<ObjectQuery>, (StatusCode, String)> {
        let refuse = |text: String| Err((StatusCode::BAD_REQUEST, text));
        if self.kind.is_empty() && self.name.is_empty() {
            return Ok(None);
        }
        let kinds = Kind::named(&self.kind);
        if kinds.is_empty() {
            let hint = "want a kind such as VirtualService or vs";
            return refuse(format!("kind: {:?} is not known; {hint}\n", self.kind));
        }
        if self.name.is_empty() {
            return refuse("name: is required\n".to_owned());
        }
        let namespace = if self.namespace.is_empty() {
            "default"
        } else {
            &self.namespace
        };
        let visible = visible(scope);
        if visible.as_ref().is_some_and(|visible| visible.as_str() != namespace) {
            return Err((StatusCode::FORBIDDEN, "access denied\n".to_owned()));
        }
        let resource_version = match self.resource_version.as_str() {
            "" => None,
            text => match text.parse() {
                Ok(version) => Some(version),
                Err(_) => return refuse(format!("resourceVersion: {text:?} is not a number\n")),
            },
        };
        Ok(Some(ObjectQuery {
            kinds,
            namespace: namespace.to_owned(),
            name: self.name.clone(),
            resource_version,
            proxy: self.proxy_id.clone(),
            visible,
        }))
    }
}

fn json(value: &impl Serialize) -> Response {
    axum::Json(value).into_response()
}

/// Returns the status of an object, or of the mesh.
pub(super) async fn status(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Extension(renderer): Extension<Renderer>,
    Query(parameters): Query<Parameters>,
) -> Response {
    let (query, replicas) = match (parameters.query(&scope), parameters.replicas()) {
        (Ok(query), Ok(replicas)) => (query, replicas),
        (Err(refusal), _) | (_, Err(refusal)) => return refusal.into_response(),
    };
    let visible = visible(&scope);
    let Some(permit) = sources.distribution.permit(visible.as_ref()) else {
        return BUSY.into_response();
    };
    let page = renderer.beside(async move {
        let distribution = &sources.distribution;
        let page = match query {
            Some(query) => json(&distribution.ask(&query, replicas).await),
            None => json(&distribution.overview(visible.as_ref(), replicas).await),
        };
        drop(permit);
        page
    });
    let page = page.await;
    page.unwrap_or_else(|| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

/// Sends the status of an object, or of the mesh, as server-sent events: whenever it changes, until it is final.
pub(super) async fn status_events(
    State(sources): Shown,
    Extension(scope): Extension<DebugScope>,
    Query(parameters): Query<Parameters>,
) -> Response {
    let timeout = match parameters.timeout.as_str() {
        "" => DEFAULT_TIMEOUT,
        text => match duration::parse(text) {
            Ok(timeout) => timeout.min(MAX_TIMEOUT),
            Err(error) => return (StatusCode::BAD_REQUEST, format!("timeout: {error}\n")).into_response(),
        },
    };
    let (query, replicas) = match (parameters.query(&scope), parameters.replicas()) {
        (Ok(query), Ok(replicas)) => (query, replicas),
        (Err(refusal), _) | (_, Err(refusal)) => return refusal.into_response(),
    };
    let distribution = sources.distribution.clone();
    let visible = visible(&scope);
    let permit = match query {
        Some(_) => distribution.permit(visible.as_ref()),
        None => distribution.follower_permit(visible.as_ref()),
    };
    let Some(permit) = permit else {
        return BUSY.into_response();
    };
    match query {
        Some(query) => {
            let (sender, reports) = mpsc::channel(1);
            let following = async move {
                distribution.follow(&query, timeout, replicas, sender).await;
                None
            };
            // The follower runs as part of the response, so it ends with it.
            let following = futures::stream::once(following);
            let reports = ReceiverStream::new(reports).map(Some);
            let reports = futures::stream::select(reports, following).filter_map(std::future::ready);
            // As one text: a report about thousands of proxies that is encoded into the event is searched for line ends
            // after each token.
            let event = |report| match serde_json::to_string(&report) {
                Ok(report) => Event::default().data(report),
                Err(error) => Event::default().event("error").data(error.to_string()),
            };
            events(permit, reports.map(event))
        }
        None => {
            let texts = WatchStream::new(distribution.follow_mesh(visible, replicas));
            let texts = texts.filter_map(std::future::ready);
            events(permit, texts.map(|text| Event::default().data(text)))
        }
    }
}

/// Sends events while the client reads them, and keeps its permit as long.
fn events(permit: OwnedSemaphorePermit, events: impl Stream<Item = Event> + Send + 'static) -> Response {
    let events = events.map(move |event| {
        let _ = &permit;
        Ok::<_, Infallible>(event)
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}
