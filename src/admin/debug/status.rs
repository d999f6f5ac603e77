//! Pages of distribution status: one answer, or events until the answer is final.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::{Query, State},
    http::StatusCode,
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::pages::Shown;
use crate::{
    admin::access::DebugScope,
    api::Kind,
    base::{Namespace, duration},
    distribution::{Distribution, Question},
};

/// The longest time that events of one object are sent.
const MAX_TIMEOUT: Duration = Duration::from_mins(10);
/// The time without a time-out in the request.
const DEFAULT_TIMEOUT: Duration = Duration::from_mins(1);

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
}

/// The namespace that a caller is restricted to.
fn visible(scope: &DebugScope) -> Option<Namespace> {
    match scope {
        DebugScope::All => None,
        DebugScope::Namespace(namespace) => Some(namespace.clone()),
    }
}

impl Parameters {
    /// Returns the question about an object; `None` if the request names none.
    fn question(&self, scope: &DebugScope) -> Result<Option<Question>, (StatusCode, String)> {
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
        Ok(Some(Question {
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
    Query(parameters): Query<Parameters>,
) -> Response {
    match parameters.question(&scope) {
        Err(refusal) => refusal.into_response(),
        Ok(Some(question)) => json(&sources.distribution.ask(&question).await),
        Ok(None) => json(&sources.distribution.overview(visible(&scope).as_ref())),
    }
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
    let question = match parameters.question(&scope) {
        Ok(question) => question,
        Err(refusal) => return refusal.into_response(),
    };
    let Some(permit) = sources.distribution.permit() else {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "too many clients are waiting; retry later\n",
        )
            .into_response();
    };
    let distribution = sources.distribution.clone();
    match question {
        Some(question) => events(permit, move |sender| async move {
            distribution.follow(&question, timeout, sender).await;
        }),
        None => events(permit, move |sender| overviews(distribution, visible(&scope), sender)),
    }
}

async fn overviews(
    distribution: Arc<Distribution>,
    visible: Option<Namespace>,
    sender: mpsc::Sender<crate::distribution::overview::Overview>,
) {
    distribution.follow_mesh(visible.as_ref(), sender).await;
}

/// Runs a sender of events on the runtime of pages, while the client reads them.
fn events<T, F>(permit: impl Send + 'static, send: impl FnOnce(mpsc::Sender<T>) -> F) -> Response
where
    T: Serialize + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(1);
    let sending = send(sender);
    let sending = futures::stream::once(async move {
        sending.await;
        drop(permit);
        None
    });
    let receiving = ReceiverStream::new(receiver).map(Some);
    // The sender runs as part of the response, so it ends with it.
    let merged = futures::stream::select(receiving, sending).filter_map(std::future::ready);
    let events = merged.map(|report| {
        let event = Event::default().json_data(report);
        Ok::<_, Infallible>(event.unwrap_or_else(|error| Event::default().event("error").data(error.to_string())))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}
