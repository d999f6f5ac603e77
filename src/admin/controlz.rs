//! ControlZ, for `istioctl admin log` and `istioctl dashboard controlz`: levels of the log, and facts of the process.
//!
//! Parity (pkg/ctrlz): paths, methods, states and JSON are Istio's; the pages are istiod's, without scripts.
//!
//! The port is open on this machine only, unless `--ctrlz_address` says otherwise. Callers from elsewhere need access
//! to all debug pages, because the environment may hold secrets. Web sites that a browser on this machine shows must
//! not reach it: requests for names other than addresses and `localhost` are refused, and so are changes from other
//! origins.

mod html;
mod process;

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use axum::{
    Form, Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, Request, State},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{Html, IntoResponse, Redirect, Response},
    routing::{get, put},
};
use http::uri::Authority;
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    access::{Access, Readers},
    metrics::build_info,
};
use crate::{
    base::url::argument_without_credentials,
    environment::Environment,
    log::{
        levels::Level,
        scope::{SCOPES, ScopeState, Scopes},
    },
};

/// Largest body of a request.
const BODY_BYTES: usize = 16 << 10;
/// Time between the request to end the process and its end.
///
/// Parity (pkg/ctrlz/home.go).
const EXIT_DELAY: Duration = Duration::from_secs(1);

/// Returns the pages, for callers on this machine and those that may read all debug pages. `others` are guarded pages
/// of the same port, such as profiles.
pub fn guarded_pages(environment: &Arc<Environment>, access: &Access, others: Router) -> Router {
    let pages = access.guard(pages(environment), |_| Readers::ControlPlane);
    pages.merge(others).layer(middleware::from_fn(own_origin))
}

fn pages(environment: &Arc<Environment>) -> Router {
    let slash = |path: &'static str| get(move || async move { moved(path) });
    Router::new()
        .route("/", get(home))
        .route("/homej", get(home_json))
        .route("/homej/", get(home_json))
        .route("/homej/exit", put(exit))
        .route("/scopez", get(scopes))
        .route("/scopez/", get(scopes))
        .route("/scopez/{scope}", get(scopes).post(submit_scope))
        .route("/scopej", slash("/scopej/"))
        .route("/scopej/", get(scopes_json))
        .route("/scopej/{scope}", get(scope_json).put(put_scope))
        .route("/envz", slash("/envz/"))
        .route("/envz/", get(variables))
        .route("/envj", slash("/envj/"))
        .route("/envj/", get(variables_json))
        .route("/procz", slash("/procz/"))
        .route("/procz/", get(process_page))
        .route("/procj", slash("/procj/"))
        .route("/procj/", get(process_json))
        .route("/memz", slash("/memz/"))
        .route("/memz/", get(memory))
        .route("/memj", slash("/memj/"))
        .route("/memj/", get(memory_json))
        // Freed memory returns to the system within seconds; there is nothing to collect.
        .route("/memj/forcecollection", put(|| async { StatusCode::ACCEPTED }))
        .route("/argz", slash("/argz/"))
        .route("/argz/", get(arguments))
        .route("/versionz", slash("/versionz/"))
        .route("/versionz/", get(version))
        .route("/versionj", slash("/versionj/"))
        .route("/versionj/", get(|| async { Json(build_info()) }))
        .route("/signalz", slash("/signalz/"))
        .route("/signalz/", get(|| async { html::signals() }))
        .route("/signalj/SIGUSR1", put(signal).post(signal))
        .fallback(missing)
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .with_state(environment.clone())
}

/// Parity (github.com/gorilla/mux): the answer to a path without its last slash.
fn moved(path: &'static str) -> Response {
    (StatusCode::MOVED_PERMANENTLY, [(header::LOCATION, path)]).into_response()
}

async fn missing(uri: Uri) -> Response {
    (StatusCode::NOT_FOUND, html::missing(uri.path())).into_response()
}

/// Refuses requests that a web site of another origin may have caused.
async fn own_origin(request: Request, next: Next) -> Response {
    match foreign(request.method(), request.headers(), request.uri()) {
        Some(reason) => (StatusCode::FORBIDDEN, reason).into_response(),
        None => next.run(request).await,
    }
}

fn foreign(method: &Method, headers: &HeaderMap, uri: &Uri) -> Option<&'static str> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let host = text(header::HOST)
        .or(uri.authority().map(Authority::as_str))
        .unwrap_or_default();
    let name = host.parse::<Authority>().ok();
    let name = name.as_ref().map_or("", Authority::host).trim_matches(['[', ']']);
    if name != "localhost" && name.parse::<IpAddr>().is_err() {
        return Some("the host must be localhost or an address\n");
    }
    let is_own = |origin: &str| origin.split_once("://").is_some_and(|(_, authority)| authority == host);
    let is_change = *method != Method::GET && *method != Method::HEAD;
    let is_foreign = is_change && text(header::ORIGIN).is_some_and(|origin| !is_own(origin));
    is_foreign.then_some("changes from other origins are refused\n")
}

/// A scope as JSON.
#[derive(Serialize)]
struct ScopeInfo {
    name: &'static str,
    description: &'static str,
    output_level: &'static str,
    stack_trace_level: &'static str,
    log_callers: bool,
}

impl ScopeInfo {
    fn of(scopes: &Scopes, index: usize) -> Self {
        let state = scopes.state(index);
        Self {
            name: SCOPES[index].name,
            description: SCOPES[index].description,
            output_level: state.output.name(),
            stack_trace_level: state.stack_trace.name(),
            log_callers: state.callers,
        }
    }

    fn all(scopes: &Scopes) -> Vec<Self> {
        (0..SCOPES.len()).map(|index| Self::of(scopes, index)).collect()
    }
}

/// A change of a scope. Missing members are empty, as in Go.
#[derive(Deserialize)]
struct ScopeChange {
    #[serde(default)]
    output_level: String,
    #[serde(default)]
    stack_trace_level: String,
    #[serde(default)]
    log_callers: bool,
}

impl ScopeChange {
    /// Parity (pkg/ctrlz/topics/scopes.go): an unknown level changes nothing.
    fn apply(&self, scopes: &Scopes, index: usize) {
        let known = |name: &str| Level::named(name).filter(|level| *level != Level::Fatal);
        let state = scopes.state(index);
        let changed = ScopeState {
            output: known(&self.output_level).unwrap_or(state.output),
            stack_trace: known(&self.stack_trace_level).unwrap_or(state.stack_trace),
            callers: self.log_callers,
        };
        if changed != state {
            scopes.set(index, changed);
            tracing::info!(
                scope_name = SCOPES[index].name,
                output_level = changed.output.name(),
                stack_trace_level = changed.stack_trace.name(),
                callers = changed.callers,
                "log scope changed"
            );
        }
    }
}

fn unknown(scope: &str) -> Response {
    (StatusCode::BAD_REQUEST, format!("unknown scope name: {scope}")).into_response()
}

async fn scopes_json(State(environment): State<Arc<Environment>>) -> Json<Vec<ScopeInfo>> {
    Json(ScopeInfo::all(&environment.scopes))
}

async fn scope_json(State(environment): State<Arc<Environment>>, Path(name): Path<String>) -> Response {
    match Scopes::named(&name) {
        Some(index) => Json(ScopeInfo::of(&environment.scopes, index)).into_response(),
        None => unknown(&name),
    }
}

async fn put_scope(State(environment): State<Arc<Environment>>, Path(name): Path<String>, body: Bytes) -> Response {
    let change: ScopeChange = match serde_json::from_slice(&body) {
        Ok(change) => change,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("unable to decode request: {error}")).into_response(),
    };
    match Scopes::named(&name) {
        Some(index) => {
            change.apply(&environment.scopes, index);
            StatusCode::ACCEPTED.into_response()
        }
        None => unknown(&name),
    }
}

/// The fields of a form on the page of scopes. An unchecked box is missing.
#[derive(Deserialize)]
struct ScopeForm {
    output_level: String,
    stack_trace_level: String,
    log_callers: Option<String>,
}

async fn submit_scope(
    State(environment): State<Arc<Environment>>,
    Path(name): Path<String>,
    Form(form): Form<ScopeForm>,
) -> Response {
    let Some(index) = Scopes::named(&name) else {
        return unknown(&name);
    };
    let change = ScopeChange {
        output_level: form.output_level,
        stack_trace_level: form.stack_trace_level,
        log_callers: form.log_callers.is_some(),
    };
    change.apply(&environment.scopes, index);
    Redirect::to(&format!("/scopez#{name}")).into_response()
}

async fn scopes(State(environment): State<Arc<Environment>>) -> Html<String> {
    html::scopes(&ScopeInfo::all(&environment.scopes))
}

fn of_environment(variables: &BTreeMap<String, String>) -> Vec<(&str, &str)> {
    let pairs = variables.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    pairs.collect()
}

async fn variables(State(environment): State<Arc<Environment>>) -> Html<String> {
    html::table(
        "Environment Variables",
        &of_environment(&environment.settings.variables),
    )
}

async fn variables_json(State(environment): State<Arc<Environment>>) -> Json<Vec<Value>> {
    let variables = of_environment(&environment.settings.variables).into_iter();
    Json(
        variables
            .map(|(name, value)| json!({ "name": name, "value": value }))
            .collect(),
    )
}

/// Returns the rows of an object of simple values, for a page.
fn rows(object: &Value) -> Vec<(String, String)> {
    let members = object.as_object().into_iter().flatten();
    let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    members.map(|(name, value)| (name.clone(), shown(value))).collect()
}

fn page_of(title: &str, object: &Value) -> Html<String> {
    let rows = rows(object);
    let rows: Vec<(&str, &str)> = rows
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    html::table(title, &rows)
}

async fn process_page(State(environment): State<Arc<Environment>>) -> Html<String> {
    page_of("Process Info", &process::process(&environment))
}

async fn process_json(State(environment): State<Arc<Environment>>) -> Json<Value> {
    Json(process::process(&environment))
}

async fn memory() -> Html<String> {
    let mut memory = process::memory();
    // Histories of garbage collections, which there are none of.
    for list in ["PauseNs", "PauseEnd", "BySize"] {
        memory.as_object_mut().and_then(|members| members.remove(list));
    }
    page_of("Memory Usage", &memory)
}

async fn memory_json() -> Json<Value> {
    Json(process::memory())
}

async fn arguments() -> Html<String> {
    let arguments: Vec<String> = std::env::args()
        .map(|argument| argument_without_credentials(&argument))
        .collect();
    let numbers: Vec<String> = (0..arguments.len()).map(|number| number.to_string()).collect();
    let rows: Vec<(&str, &str)> = numbers
        .iter()
        .zip(&arguments)
        .map(|(number, argument)| (number.as_str(), argument.as_str()))
        .collect();
    html::table("Command-Line Arguments", &rows)
}

async fn version() -> Html<String> {
    page_of("Version Info", &build_info())
}

async fn home() -> Html<String> {
    page_of("ControlZ", &process::home())
}

async fn home_json() -> Json<Value> {
    Json(process::home())
}

/// Ends the process like SIGTERM, after a second.
async fn exit(State(environment): State<Arc<Environment>>) -> StatusCode {
    tracing::warn!("ControlZ asked the process to end");
    environment.tasks.spawn_until_shutdown("ControlZ exit", async {
        tokio::time::sleep(EXIT_DELAY).await;
        if let Err(error) = kill_process(getpid(), Signal::TERM) {
            tracing::error!(%error, "failed to end the process");
        }
    });
    StatusCode::ACCEPTED
}

/// Parity (pkg/appsignals): nothing in istiod waits for the signal.
async fn signal() -> StatusCode {
    tracing::info!(signal = "SIGUSR1", "ControlZ sent a signal");
    StatusCode::ACCEPTED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn web_sites_do_not_reach_controlz() {
        let refused = |method: Method, headers: &[(header::HeaderName, &str)]| {
            let headers = headers
                .iter()
                .map(|(name, value)| (name.clone(), value.parse().expect("a value")));
            foreign(&method, &headers.collect(), &Uri::from_static("/scopej/")).is_some()
        };
        let host = |host: &'static str| (header::HOST, host);
        let origin = |origin: &'static str| (header::ORIGIN, origin);
        for own in [
            "localhost:9876",
            "localhost",
            "127.0.0.1:9876",
            "[::1]:9876",
            "10.0.0.1",
        ] {
            assert!(!refused(Method::GET, &[host(own)]), "{own}");
        }
        for other in [
            "evil.example:9876",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
        ] {
            assert!(refused(Method::GET, &[host(other)]), "{other}");
        }
        let local = host("localhost:9876");
        assert!(!refused(Method::PUT, std::slice::from_ref(&local)));
        assert!(!refused(
            Method::POST,
            &[local.clone(), origin("http://localhost:9876")]
        ));
        assert!(refused(Method::POST, &[local.clone(), origin("http://localhost:1")]));
        assert!(refused(Method::PUT, &[local, origin("null")]));
    }

    #[test]
    fn unknown_levels_change_nothing() {
        let scopes = Scopes::default();
        let change = |text: &str| {
            let change: ScopeChange = serde_json::from_str(text).expect("a change");
            change.apply(&scopes, 0);
            scopes.state(0)
        };
        let state = change(r#"{"output_level": "debug", "stack_trace_level": "error", "log_callers": true}"#);
        assert_eq!(
            (state.output, state.stack_trace, state.callers),
            (Level::Debug, Level::Error, true)
        );
        let state = change(r#"{"output_level": "loud", "name": "x"}"#);
        assert_eq!(
            (state.output, state.stack_trace, state.callers),
            (Level::Debug, Level::Error, false)
        );
        assert_eq!(change(r#"{"output_level": "fatal"}"#).output, Level::Debug);
    }
}
