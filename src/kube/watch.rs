//! List and watch of one resource: all objects, then every change, until the receiver is closed.
//!
//! Note: a broken connection does not cause another list. The watch resumes after the last event or bookmark. Only a
//! server that no longer knows that version (410), that has an older one after an outage, or that stays silent after it
//! twice, makes it start over, and then the receiver gets the complete list. So no change is missed or invented,
//! whatever fails.

mod machine;
mod page;

use std::{sync::Arc, time::Duration};

use ::kube::{
    Client,
    api::{ListParams, WatchParams},
    client::Body,
    core::{ApiResource, Request, Resource},
};
use bytes::Bytes;
use http::{Response, StatusCode, header::RETRY_AFTER};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::Value;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

use self::{
    machine::{Ask, Machine},
    page::Line,
};
use super::{
    health::{WatchHealth, WatchState},
    object::Object,
};
use crate::task::Turns;

/// Objects per page of a list.
const PAGE: u32 = 500;
/// Objects per page if larger pages have too many bytes.
const SMALL_PAGE: u32 = 16;
/// Timeout of a page, in seconds.
const PAGE_TIMEOUT: u32 = 60;
/// Timeout for accepting a watch, in seconds.
const ACCEPT_TIMEOUT: u32 = 30;
/// Time without an event or bookmark after which a watch is dead, in seconds. API servers send bookmarks about once a
/// minute.
const SILENCE: u32 = 180;
/// Longest part of an error's text that is read.
const ERROR_BYTES: usize = 64 * 1024;
/// Largest event of a watch: API servers do not store objects of more than a few megabytes.
const MAX_LINE_BYTES: usize = 32 << 20;
/// Largest page of a list: more than a small one with the largest objects.
const MAX_PAGE_BYTES: usize = 64 << 20;
/// Largest list without pages.
const MAX_LIST_BYTES: usize = 512 << 20;

/// Turns for parsing pages, which take a thread each: hundreds of watches may list after an outage.
static PARSING: Turns = Turns::new(2);

/// Target of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchTarget {
    /// Kind.
    pub resource: ApiResource,
    /// Namespace; `None` for all.
    pub namespace: Option<String>,
    /// Label selector.
    pub labels: Option<String>,
    /// Field selector.
    pub fields: Option<String>,
    /// True if only `metadata` is requested.
    pub metadata_only: bool,
    /// True if a refusal for lack of a permission (403) before the first list is sent as an empty list, see
    /// [`WatchHealth::was_refused`].
    pub may_be_forbidden: bool,
}

impl WatchTarget {
    /// Returns the target of all objects of a kind.
    pub fn all(resource: ApiResource) -> Self {
        Self {
            resource,
            namespace: None,
            labels: None,
            fields: None,
            metadata_only: false,
            may_be_forbidden: false,
        }
    }

    /// Returns `plural.group`, with namespace and selectors: the name in pages and metrics.
    pub fn name(&self) -> String {
        let ApiResource { plural, group, .. } = &self.resource;
        let mut name = plural.clone();
        for (before, part) in [
            (".", Some(group)),
            ("/", self.namespace.as_ref()),
            ("?", self.labels.as_ref()),
            ("?", self.fields.as_ref()),
        ] {
            if let Some(part) = part.filter(|part| !part.is_empty()) {
                name.push_str(before);
                name.push_str(part);
            }
        }
        name
    }

    /// Returns a seed by target, so that watches that start together have different delays.
    fn seed(&self) -> u64 {
        xxhash_rust::xxh3::xxh3_64(self.name().as_bytes())
    }

    /// Returns the timeout of a watch: about five minutes, less than the 295 seconds that servers and clients agree on.
    fn timeout_seconds(&self) -> u32 {
        270 + (self.seed() % 25) as u32
    }

    fn request(&self, ask: &Ask) -> Result<http::Request<Vec<u8>>, ::kube::core::request::Error> {
        let request = Request::new(Object::url_path(&self.resource, self.namespace.as_deref()));
        match ask {
            Ask::Probe => {
                // With the selectors, because a role may grant no more.
                let parameters = ListParams {
                    label_selector: self.labels.clone(),
                    field_selector: self.fields.clone(),
                    limit: Some(1),
                    ..ListParams::default()
                };
                request.list_metadata(&parameters)
            }
            Ask::List { token, limit } => {
                let parameters = ListParams {
                    label_selector: self.labels.clone(),
                    field_selector: self.fields.clone(),
                    limit: *limit,
                    continue_token: token.as_ref().map(ToString::to_string),
                    ..ListParams::default()
                };
                if self.metadata_only {
                    request.list_metadata(&parameters)
                } else {
                    request.list(&parameters)
                }
            }
            Ask::Watch { after } => {
                let parameters = WatchParams {
                    label_selector: self.labels.clone(),
                    field_selector: self.fields.clone(),
                    timeout: Some(self.timeout_seconds()),
                    bookmarks: true,
                    send_initial_events: false,
                };
                if self.metadata_only {
                    request.watch_metadata(&parameters, after)
                } else {
                    request.watch(&parameters, after)
                }
            }
        }
    }
}

/// Event of a watch.
#[derive(Clone, Debug, PartialEq)]
pub enum WatchEvent<T = Object> {
    /// Exactly these objects exist.
    Restarted(Vec<T>),
    /// An object exists, with this content.
    Applied(T),
    /// An object was deleted; this is its last content.
    Deleted(T),
}

/// Failure of a request. All are retried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Failure {
    /// The server no longer knows the version, or the page.
    #[error("resource version expired: {0}")]
    Gone(String),
    /// The server refused the request.
    #[error("{code} {message}{hint}")]
    Refused {
        /// HTTP status.
        code: u16,
        /// Message of the server.
        message: String,
        /// Hint.
        hint: String,
        /// Delay before the next request that the server asks for.
        retry_after: Option<Duration>,
    },
    /// A page, or a list without pages, has too many bytes.
    #[error("the list has more than {0} bytes")]
    TooLarge(usize),
    /// No response.
    #[error("{0}")]
    Unreachable(String),
    /// The connection broke during a watch.
    #[error("connection lost: {0}")]
    Dropped(String),
    /// No event and no bookmark.
    #[error("no event within the idle timeout")]
    Silent,
}

impl Failure {
    /// Returns the delay that the server asks for.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// Watches until the receiver is closed. Waits if the receiver is slow.
pub async fn watch(client: Client, target: WatchTarget, health: Arc<WatchHealth>, out: mpsc::Sender<WatchEvent>) {
    watch_as(client, target, health, |object| object, out).await;
}

/// Watches and converts each object: a whole object is in memory only during its conversion.
pub async fn watch_as<T: Send + 'static>(
    client: Client,
    target: WatchTarget,
    health: Arc<WatchHealth>,
    convert: impl FnMut(Object) -> T + Send,
    out: mpsc::Sender<WatchEvent<T>>,
) {
    Watch::new(client, target, health, convert, out).until_closed().await;
}

/// The receiver is closed.
struct Closed;

struct Watch<T, C> {
    machine: Machine<T>,
    client: Client,
    target: WatchTarget,
    health: Arc<WatchHealth>,
    convert: C,
    out: mpsc::Sender<WatchEvent<T>>,
    /// True once a refused list was sent as an empty one.
    is_refusal_sent: bool,
    /// Duration of a second; shorter in tests.
    second: Duration,
    /// Largest page; smaller in tests.
    max_page_bytes: usize,
}

/// Result of one request, unless the receiver is closed.
type Ended = Result<(), Failure>;

impl<T: Send + 'static, C: FnMut(Object) -> T + Send> Watch<T, C> {
    fn new(
        client: Client,
        target: WatchTarget,
        health: Arc<WatchHealth>,
        convert: C,
        out: mpsc::Sender<WatchEvent<T>>,
    ) -> Self {
        Self {
            machine: Machine::new(target.seed()),
            client,
            target,
            health,
            convert,
            out,
            is_refusal_sent: false,
            second: Duration::from_secs(1),
            max_page_bytes: MAX_PAGE_BYTES,
        }
    }

    async fn until_closed(mut self) {
        let closed = self.out.clone();
        tokio::select! {
            () = closed.closed() => {}
            () = self.run() => {}
        }
    }

    async fn run(&mut self) {
        loop {
            let ask = self.machine.ask();
            let began = Instant::now();
            let ended = match &ask {
                Ask::List { .. } => self.list(&ask).await,
                Ask::Probe => Ok(self.probe().await),
                Ask::Watch { .. } => self.follow(&ask).await,
            };
            let Ok(ended) = ended else { return };
            let mut asked = Duration::ZERO;
            let wait = match (&ask, ended) {
                (Ask::List { .. } | Ask::Probe, Ok(())) => Duration::ZERO,
                (Ask::Watch { .. }, Ok(())) => self.machine.ended(began.elapsed()),
                (_, Err(failure)) => {
                    let is_absent = self.is_absent(&failure);
                    match &failure {
                        Failure::Silent => self.health.silent(),
                        Failure::Gone(_) | Failure::Dropped(_) => {
                            tracing::debug!(watch = %self.target.name(), "{failure}");
                        }
                        Failure::Refused { .. } if is_absent => self.health.not_permitted(&failure.to_string()),
                        Failure::Refused { .. } | Failure::TooLarge(_) | Failure::Unreachable(_) => {
                            self.health.failed(&failure.to_string());
                        }
                    }
                    if is_absent && !self.is_refusal_sent {
                        self.is_refusal_sent = true;
                        if self.send_event(WatchEvent::Restarted(Vec::new())).await.is_err() {
                            return;
                        }
                    }
                    asked = failure.retry_after().unwrap_or_default();
                    self.machine.failed(&failure)
                }
            };
            if !wait.is_zero() {
                self.health.enter(WatchState::Waiting);
                let recovered = self.health.recovered();
                let asked = asked.min(wait);
                if !asked.is_zero() {
                    // The server works for others already, whose success ends only the back-off.
                    sleep(self.second.mul_f64(asked.as_secs_f64())).await;
                }
                let rest = wait.saturating_sub(asked);
                tokio::select! {
                    () = sleep(self.second.mul_f64(rest.as_secs_f64())) => {}
                    () = recovered => {}
                }
            }
        }
    }

    /// Returns true if a failure means that there is nothing to read, which is no error. Listed objects stay known
    /// if the permission is lost later.
    fn is_absent(&self, failure: &Failure) -> bool {
        let is_forbidden = matches!(failure, Failure::Refused { code: 403, .. });
        is_forbidden && self.target.may_be_forbidden && !self.health.has_listed()
    }

    /// Reads one page.
    async fn list(&mut self, ask: &Ask) -> Result<Ended, Closed> {
        self.health.enter(WatchState::Listing);
        let max_bytes = if matches!(ask, Ask::List { limit: None, .. }) {
            MAX_LIST_BYTES
        } else {
            self.max_page_bytes
        };
        let bytes = match self.read(ask, max_bytes).await {
            Ok(bytes) => bytes,
            Err(failure) => return Ok(Err(failure)),
        };
        let (health, convert) = (&self.health, &mut self.convert);
        let mut object = |value: Result<Value, String>| match value.and_then(named) {
            Ok(object) => Some(convert(object)),
            Err(error) => {
                health.undecodable(&error);
                None
            }
        };
        // A page of pods has megabytes. All watches may list at the same time, on the threads that serve proxies.
        let page = match PARSING.aside(|| page::page(&bytes, &mut object)).await {
            Ok(page) => page,
            Err(error) => return Ok(Err(Failure::Unreachable(format!("cannot read list: {error}")))),
        };
        drop(bytes);
        let version = page.version.clone();
        if let Some(all) = self.machine.page(page) {
            self.health.listed(all.len(), &version);
            self.send_event(WatchEvent::Restarted(all)).await?;
        }
        Ok(Ok(()))
    }

    /// Reads the response to a list, within the time limit.
    async fn read(&self, ask: &Ask, max_bytes: usize) -> Result<Bytes, Failure> {
        let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
            if error.is::<LengthLimitError>() {
                Failure::TooLarge(max_bytes)
            } else {
                unreachable(&*error)
            }
        };
        let reading = async {
            let response = self.send(ask).await?;
            let body = Limited::new(response.into_body(), max_bytes).collect().await;
            Ok::<Bytes, Failure>(body.map_err(failed)?.to_bytes())
        };
        let read = timeout(self.second * PAGE_TIMEOUT, reading).await;
        read.unwrap_or_else(|_| Err(Failure::Unreachable("the list did not arrive in time".to_owned())))
    }

    /// Asks for the present version of the server.
    async fn probe(&mut self) -> Ended {
        let bytes = self.read(&Ask::Probe, self.max_page_bytes).await?;
        let mut skip = |_: Result<Value, String>| None::<()>;
        let page = page::page(&bytes, &mut skip);
        let page = page.map_err(|error| Failure::Unreachable(format!("cannot read list: {error}")))?;
        if self.machine.probed(&page.version) {
            tracing::warn!(watch = %self.target.name(), version = %page.version,
                "API server has an older version than before, listing again");
        }
        Ok(())
    }

    /// Reads changes until the stream ends.
    async fn follow(&mut self, ask: &Ask) -> Result<Ended, Closed> {
        let response = match timeout(self.second * ACCEPT_TIMEOUT, self.send(ask)).await {
            Ok(Ok(response)) => response,
            Ok(Err(failure)) => return Ok(Err(failure)),
            Err(_) => {
                return Ok(Err(Failure::Unreachable(
                    "the watch was not accepted in time".to_owned(),
                )));
            }
        };
        self.health.enter(WatchState::Watching);
        let mut body = response.into_body();
        let mut text = Vec::new();
        // Bytes alone do not show that the server works: a complete line does.
        let mut heard = Instant::now();
        loop {
            let bytes = match tokio::time::timeout_at(heard + self.second * SILENCE, body.frame()).await {
                Err(_) => return Ok(Err(Failure::Silent)),
                Ok(None) => return Ok(Ok(())),
                Ok(Some(Err(error))) => return Ok(Err(Failure::Dropped(chain(&error)))),
                Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
            };
            let mut rest = &bytes[..];
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                text.extend_from_slice(&rest[..end]);
                rest = &rest[end + 1..];
                let parsed = self.line(&text);
                text.clear();
                match parsed {
                    Ok(None) => {}
                    Ok(Some(event)) => self.send_event(event).await?,
                    Err(failure) => return Ok(Err(failure)),
                }
                heard = Instant::now();
            }
            if text.len() + rest.len() > MAX_LINE_BYTES {
                let message = format!("event exceeds {MAX_LINE_BYTES} bytes");
                return Ok(Err(Failure::Dropped(message)));
            }
            text.extend_from_slice(rest);
        }
    }

    /// Parses a line of a watch.
    fn line(&mut self, text: &[u8]) -> Result<Option<WatchEvent<T>>, Failure> {
        if text.trim_ascii().is_empty() {
            return Ok(None);
        }
        let line: Line = match serde_json::from_slice(text) {
            Ok(line) => line,
            Err(error) => {
                self.health.undecodable(&error.to_string());
                match page::deleted(text) {
                    Some(line) => line,
                    None => return Ok(None),
                }
            }
        };
        if line.kind == "ERROR" {
            return Err(self.refused(0, None, &line.object));
        }
        let version = line.object["metadata"]["resourceVersion"].as_str();
        let version = version.unwrap_or_default().to_owned();
        self.machine.progress(&version);
        let more = match line.kind.as_str() {
            "ADDED" => 1,
            "DELETED" => -1,
            _ => 0,
        };
        self.health.alive(&version, more);
        if !matches!(line.kind.as_str(), "ADDED" | "MODIFIED" | "DELETED") {
            return Ok(None);
        }
        match named(line.object) {
            Ok(object) => {
                let converted = (self.convert)(object);
                Ok(Some(if more < 0 {
                    WatchEvent::Deleted(converted)
                } else {
                    WatchEvent::Applied(converted)
                }))
            }
            Err(error) => {
                self.health.undecodable(&error);
                Ok(None)
            }
        }
    }

    async fn send(&self, ask: &Ask) -> Result<Response<Body>, Failure> {
        let request = self.target.request(ask);
        let request = request.map_err(|error| Failure::Unreachable(chain(&error)))?;
        let sent = self.client.send(request.map(Body::from)).await;
        let response = sent.map_err(|error| unreachable(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let retry_after = response.headers().get(RETRY_AFTER);
        let retry_after: Option<u64> = retry_after.and_then(|seconds| seconds.to_str().ok()?.trim().parse().ok());
        let text = Limited::new(response.into_body(), ERROR_BYTES).collect().await;
        let text = text.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let object = serde_json::from_slice(&text)
            .unwrap_or_else(|_| Value::from_iter([("message", String::from_utf8_lossy(&text).trim())]));
        Err(self.refused(status.as_u16(), retry_after, &object))
    }

    /// Returns the failure in a `Status`; its own code counts if the HTTP status has none, and its own delay without a
    /// header.
    fn refused(&self, code: u16, retry_after: Option<u64>, status: &Value) -> Failure {
        let code = if code == 0 {
            status["code"]
                .as_u64()
                .and_then(|code| code.try_into().ok())
                .unwrap_or(500)
        } else {
            code
        };
        let text = |name: &str| status[name].as_str().unwrap_or_default();
        let mut message = text("message").to_owned();
        if message.is_empty() {
            text("reason").clone_into(&mut message);
        }
        // A version in the future remains after a server was restored from a backup.
        let causes = status["details"]["causes"].as_array();
        let from_the_future = causes
            .into_iter()
            .flatten()
            .any(|cause| cause["reason"] == "ResourceVersionTooLarge");
        let watching = matches!(self.machine.ask(), Ask::Watch { .. });
        let is_gone = code == 410
            || matches!(text("reason"), "Expired" | "Gone")
            || watching && (from_the_future || code == 400 || message.contains("Too large resource version"));
        if is_gone {
            return Failure::Gone(message);
        }
        Failure::Refused {
            code,
            message,
            hint: self.hint(code),
            retry_after: retry_after
                .or_else(|| status["details"]["retryAfterSeconds"].as_u64())
                .filter(|seconds| *seconds > 0)
                .map(Duration::from_secs),
        }
    }

    fn hint(&self, code: u16) -> String {
        let ApiResource { plural, group, .. } = &self.target.resource;
        let group = if group.is_empty() { "core" } else { group };
        match StatusCode::from_u16(code) {
            Ok(StatusCode::FORBIDDEN) => {
                format!("; hint: the ClusterRole of istiod must allow list and watch of {plural} in group {group}")
            }
            Ok(StatusCode::UNAUTHORIZED) => {
                "; hint: the API server does not accept the token or certificate; has it expired?".to_owned()
            }
            Ok(StatusCode::NOT_FOUND) => {
                let version = &self.target.resource.api_version;
                format!("; hint: the API server does not serve {plural} of {version}; is the CRD installed?")
            }
            _ => String::new(),
        }
    }

    async fn send_event(&self, event: WatchEvent<T>) -> Result<(), Closed> {
        self.out.send(event).await.map_err(|_| Closed)
    }
}

/// Parses an object with a name.
fn named(value: Value) -> Result<Object, String> {
    let object = Object::from_value(value).map_err(|error| error.to_string())?;
    if object.name().is_empty() {
        return Err("it has no name".to_owned());
    }
    Ok(object)
}

fn unreachable(error: &(dyn std::error::Error + 'static)) -> Failure {
    Failure::Unreachable(chain(error))
}

/// Formats an error with its causes, because the first one alone seldom explains the failure.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
