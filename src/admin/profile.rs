//! Profiles of this process under `/debug/pprof`, for `go tool pprof`.
//!
//! A CPU profile is taken while its request waits: a timer signal samples the running threads. Nothing is sampled at
//! other times. The pages are beside those of [`super::debug`], because only one of those is rendered at a time.

mod format;

use std::{io::Write as _, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Query, State},
    http::{StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use flate2::{Compression, write::GzEncoder};
use pprof::{ProfilerGuardBuilder, UnresolvedReport};
use prost::Message;
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::{
    access::{Access, Readers},
    renderer::Renderer,
};

/// Samples in a second of CPU time. Not a divisor of common intervals, so that periodic work is not missed.
const FREQUENCY_HZ: i32 = 99;
/// The longest profile.
const MAX_SECONDS: u64 = 60;
/// Libraries whose frames are not unwound: a signal may arrive while they hold a lock that unwinding needs.
const NOT_UNWOUND: [&str; 4] = ["libc", "libgcc", "pthread", "vdso"];

const INDEX: &str = "<html><head><title>/debug/pprof/</title></head><body><ul>\
    <li><a href=\"/debug/pprof/profile?seconds=30\">profile</a>: CPU profile; seconds, at most 60</li>\
    </ul></body></html>";
const BUSY: &str = "another profile is being taken; retry when it has ended\n";
const NO_HEAP: &str = "heap profiles are not available: the memory allocator is built without profiling, which would \
    slow down every allocation\nhint: the metrics istiod_* and process_resident_memory_bytes show what uses memory\n";

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
            .route("/debug/pprof/profile", get(profile))
            .route(
                "/debug/pprof/heap",
                get(|| async { (StatusCode::NOT_IMPLEMENTED, NO_HEAP) }),
            )
            .with_state(self)
    }

    /// Returns the pages, for callers who may read all debug pages.
    pub fn guarded_pages(&self, access: &Access) -> Router {
        access.guard(self.clone().pages(), |_| Readers::ControlPlane)
    }
}

async fn profile(State(profiles): State<Profiles>, Query(parameters): Query<Parameters>) -> Response {
    let seconds = parameters.seconds;
    if !(1..=MAX_SECONDS).contains(&seconds) {
        let message = format!("seconds: {seconds} is not between 1 and {MAX_SECONDS}\n");
        return (StatusCode::BAD_REQUEST, message).into_response();
    }
    let Ok(_turn) = profiles.turn.try_acquire() else {
        return (StatusCode::SERVICE_UNAVAILABLE, BUSY).into_response();
    };
    let samples = match samples(Duration::from_secs(seconds)).await {
        Ok(samples) => samples,
        Err(error) => return failed(&error),
    };
    // Names of functions are looked up beside serving.
    match profiles.renderer.run(async move { encoded(samples) }).await {
        Ok(Some(Ok(bytes))) => {
            let headers = [
                (header::CONTENT_TYPE, "application/octet-stream"),
                (header::CONTENT_DISPOSITION, "attachment; filename=\"profile\""),
            ];
            (headers, bytes).into_response()
        }
        Ok(Some(Err(error))) => failed(&error),
        Ok(None) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Err(busy) => busy.into_response(),
    }
}

fn failed(error: &dyn std::error::Error) -> Response {
    let message = format!("the profile cannot be taken: {error}\n");
    (StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
}

/// Samples the process for a time. Sampling ends with the request too.
async fn samples(duration: Duration) -> Result<UnresolvedReport, pprof::Error> {
    let builder = ProfilerGuardBuilder::default();
    let guard = builder.frequency(FREQUENCY_HZ).blocklist(&NOT_UNWOUND).build()?;
    tokio::time::sleep(duration).await;
    guard.report().build_unresolved()
}

/// Returns a profile in the format of pprof, compressed.
fn encoded(samples: UnresolvedReport) -> std::io::Result<Vec<u8>> {
    let profile = format::profile(samples, FREQUENCY_HZ);
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

    async fn answer(pages: Router, path: String) -> (StatusCode, Vec<u8>) {
        let request = Request::get(path).body(Body::empty()).expect("a request");
        let Ok(response) = pages.oneshot(request).await;
        let status = response.status();
        let body = response.into_body().collect().await.expect("a body in memory");
        (status, body.to_bytes().to_vec())
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_profile_at_a_time_is_taken() {
        let pages = Profiles::new(Renderer::new(Tasks::default(), Handle::current())).pages();
        let profile = |seconds: u64| answer(pages.clone(), format!("/debug/pprof/profile?seconds={seconds}"));
        assert_eq!(
            (profile(0).await.0, profile(61).await.0),
            (StatusCode::BAD_REQUEST, StatusCode::BAD_REQUEST)
        );
        let both = tokio::join!(profile(1), profile(1));
        let ((status, bytes), (refused, text)) = both;
        assert_eq!((status, refused), (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE));
        assert_eq!(text, BUSY.as_bytes());
        let mut encoded = Vec::new();
        GzDecoder::new(&bytes[..])
            .read_to_end(&mut encoded)
            .expect("valid gzip");
        let profile = format::Profile::decode(&encoded[..]).expect("a profile");
        profile.check();
    }
}
