//! Profiles of this process under `/debug/pprof`, for `go tool pprof`.
//!
//! A CPU profile is taken while its request waits: a timer signal samples the running threads. Nothing is sampled at
//! other times. The allocator samples allocations while that is switched on ([`heap`]). The pages are beside those of
//! [`super::debug`], because only one of those is rendered at a time.

mod cpu;
mod format;
#[cfg(all(feature = "jemalloc", not(fuzzing)))]
mod heap;

use std::{error::Error, io::Write as _, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Query, State},
    http::{StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use flate2::{Compression, write::GzEncoder};
use prost::Message;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    access::{Access, Readers},
    renderer::Renderer,
};
use crate::base::url::argument_without_credentials;

/// The longest profile.
const MAX_SECONDS: u64 = 60;

const INDEX: &str = "<html><head><title>/debug/pprof/</title></head><body><ul>\
    <li><a href=\"/debug/pprof/allocs?seconds=30\">allocs</a>: the heap profile, with all allocations first</li>\
    <li><a href=\"/debug/pprof/cmdline\">cmdline</a>: the command line</li>\
    <li><a href=\"/debug/pprof/heap?seconds=30\">heap</a>: allocations that have not been freed; with seconds, at most \
    60, those of this time, otherwise those since sampling was switched on</li>\
    <li><a href=\"/debug/pprof/profile?seconds=30\">profile</a>: CPU profile; seconds, at most 60</li>\
    </ul></body></html>";
const BUSY: &str = "another profile is being taken; retry when it has ended\n";

#[derive(Deserialize)]
#[serde(default)]
struct Parameters {
    seconds: u64,
}

impl Default for Parameters {
    /// The default of Go.
    fn default() -> Self {
        Self { seconds: 30 }
    }
}

/// The profiler of the process. Cheap to clone.
#[derive(Clone)]
pub struct Profiles {
    renderer: Renderer,
    /// Its permit is that of the one profile that is being taken.
    turn: Arc<Semaphore>,
}

impl Profiles {
    /// Creates the profiler, which looks up names on the runtime of the renderer.
    pub fn new(renderer: Renderer) -> Self {
        Self {
            renderer,
            turn: Arc::new(Semaphore::new(1)),
        }
    }

    fn pages(self) -> Router {
        Router::new()
            .route("/debug/pprof/", get(|| async { Html(INDEX) }))
            .route("/debug/pprof/cmdline", get(|| async { command_line() }))
            .route("/debug/pprof/profile", get(cpu_profile))
            .merge(heap_pages())
            .with_state(self)
    }

    /// Returns the pages, for callers who may read all debug pages.
    pub fn guarded_pages(&self, access: &Access) -> Router {
        access.guard(self.clone().pages(), |_| Readers::ControlPlane)
    }

    /// Returns the permit of a profile, or the answer while another one is being taken.
    fn turn(&self) -> Result<OwnedSemaphorePermit, (StatusCode, &'static str)> {
        let turn = self.turn.clone().try_acquire_owned();
        turn.map_err(|_| (StatusCode::SERVICE_UNAVAILABLE, BUSY))
    }

    /// Does work beside serving.
    async fn beside<T, E>(&self, work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, Response>
    where
        T: Send + 'static,
        E: Error + Send + 'static,
    {
        match self.renderer.run(async move { work() }).await {
            Ok(Some(result)) => result.map_err(|error| failed(&error)),
            Ok(None) => Err(StatusCode::INTERNAL_SERVER_ERROR.into_response()),
            Err(busy) => Err(busy.into_response()),
        }
    }
}

#[cfg(all(feature = "jemalloc", not(fuzzing)))]
fn heap_pages() -> Router<Profiles> {
    heap::pages()
}

#[cfg(not(all(feature = "jemalloc", not(fuzzing))))]
fn heap_pages() -> Router<Profiles> {
    const NO_HEAP: &str = "heap profiles are not available: this build has the allocator of the C library\n\
        hint: the feature jemalloc, which is on by default, has the allocator with profiles\n";
    let none = || get(|| async { (StatusCode::NOT_IMPLEMENTED, NO_HEAP) });
    Router::new()
        .route("/debug/pprof/heap", none())
        .route("/debug/pprof/allocs", none())
}

/// Returns the arguments of the process, separated by zero bytes as in Go.
fn command_line() -> String {
    let arguments: Vec<String> = std::env::args_os()
        .map(|argument| argument_without_credentials(&argument.to_string_lossy()))
        .collect();
    arguments.join("\0")
}

async fn cpu_profile(
    State(profiles): State<Profiles>,
    Query(Parameters { seconds }): Query<Parameters>,
) -> Result<Response, Response> {
    if let Some(refusal) = is_too_long(seconds) {
        return Err(refusal);
    }
    let _turn = profiles.turn().map_err(IntoResponse::into_response)?;
    let samples = cpu::samples(Duration::from_secs(seconds)).await;
    let samples = samples.map_err(|error| failed(&error))?;
    // Names of functions are looked up beside serving.
    let bytes = profiles.beside(move || encoded(&cpu::profile(samples))).await?;
    Ok(pprof_file("profile", bytes))
}

/// Returns the answer to a request for a profile of a time that is not allowed.
fn is_too_long(seconds: u64) -> Option<Response> {
    if (1..=MAX_SECONDS).contains(&seconds) {
        return None;
    }
    let message = format!("seconds: {seconds} is not between 1 and {MAX_SECONDS}\n");
    Some((StatusCode::BAD_REQUEST, message).into_response())
}

fn failed(error: &dyn Error) -> Response {
    let message = format!("the profile cannot be taken: {error}\n");
    (StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
}

/// Returns an encoded profile as a file.
fn pprof_file(name: &str, bytes: Vec<u8>) -> Response {
    let disposition = format!("attachment; filename=\"{name}\"");
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::CONTENT_DISPOSITION, disposition.as_str()),
    ];
    (headers, bytes).into_response()
}

/// Returns a profile in the format of pprof, compressed.
fn encoded(profile: &format::Profile) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&profile.encode_to_vec())?;
    encoder.finish()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use axum::body::Body;
    use flate2::read::GzDecoder;
    use http::Request;
    use http_body_util::BodyExt;
    use tokio::runtime::Handle;
    use tower::ServiceExt;

    use super::*;
    use crate::task::Tasks;

    /// The pages.
    pub(super) struct Fixture(Router);

    impl Fixture {
        /// Creates the pages on the runtime of the caller.
        pub(super) fn new() -> Self {
            Self(Profiles::new(Renderer::new(Tasks::default(), Handle::current())).pages())
        }

        /// Sends a request.
        pub(super) async fn request(&self, method: &str, path: &str) -> (StatusCode, Vec<u8>) {
            let request = Request::builder().method(method).uri(path).body(Body::empty());
            let Ok(response) = self.0.clone().oneshot(request.expect("a request")).await;
            let status = response.status();
            let body = response.into_body().collect().await.expect("a body in memory");
            (status, body.to_bytes().to_vec())
        }

        /// Sends a GET request.
        pub(super) async fn get(&self, path: &str) -> (StatusCode, Vec<u8>) {
            self.request("GET", path).await
        }
    }

    /// Returns a profile that a page sent.
    pub(super) fn decoded(bytes: &[u8]) -> format::Profile {
        let mut encoded = Vec::new();
        GzDecoder::new(bytes).read_to_end(&mut encoded).expect("valid gzip");
        let profile = format::Profile::decode(&encoded[..]).expect("a profile");
        profile.check();
        profile
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_profile_at_a_time_is_taken() {
        let fixture = Fixture::new();
        let profile = async |seconds: u64| fixture.get(&format!("/debug/pprof/profile?seconds={seconds}")).await;
        assert_eq!(
            (profile(0).await.0, profile(61).await.0),
            (StatusCode::BAD_REQUEST, StatusCode::BAD_REQUEST)
        );
        let both = tokio::join!(profile(1), profile(1));
        let ((status, bytes), (refused, text)) = both;
        assert_eq!((status, refused), (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE));
        assert_eq!(text, BUSY.as_bytes());
        assert!(decoded(&bytes).duration() >= Duration::from_secs(1));
    }

    #[tokio::test]
    async fn the_command_line_has_a_zero_byte_between_arguments() {
        let (status, text) = Fixture::new().get("/debug/pprof/cmdline").await;
        let first = std::env::args().next().unwrap_or_default();
        assert_eq!(status, StatusCode::OK);
        assert_eq!(text.split(|byte| *byte == 0).next(), Some(first.as_bytes()));
    }
}
