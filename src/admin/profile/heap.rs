//! Heap profiles: the allocations that the allocator samples while sampling is on.

mod allocator;
mod dump;

use std::{
    ffi::{CString, c_void},
    fs::File,
    io::{self, Read as _},
    os::fd::AsRawFd as _,
    time::{Duration, UNIX_EPOCH},
};

use axum::{
    Router,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use pprof::Symbol;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Deserialize;
use tokio::time::Instant;

use self::dump::{Dump, DumpError};
use super::{Profiles, encoded, failed, format::Kinds, is_too_long, pprof_file};
use crate::environment::wall_clock;

/// Values of samples, as Go's profiles have them.
const KINDS: Kinds = Kinds {
    values: &[
        ("alloc_objects", "count"),
        ("alloc_space", "bytes"),
        ("inuse_objects", "count"),
        ("inuse_space", "bytes"),
    ],
    period: ("space", "bytes"),
    default: "inuse_space",
};
/// The same with what was allocated first.
const ALLOCATED: Kinds = Kinds {
    default: "alloc_space",
    ..KINDS
};

const OFF: &str = "nothing has been sampled: sampling of allocations is off\n\
    hint: add ?seconds=30, or send PUT /debug/pprof/heap?active=true\n";
const UNAVAILABLE: &str = "heap profiles are not available: they were switched off by _RJEM_MALLOC_CONF (prof:false)\n";

/// The reason why there is no profile.
#[derive(Debug, thiserror::Error)]
enum HeapError {
    #[error("the allocator cannot write its samples: {0}")]
    Write(io::Error),
    #[error("the samples of the allocator cannot be read: {0}")]
    Read(io::Error),
    #[error(transparent)]
    Dump(#[from] DumpError),
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Parameters {
    /// The time of a profile of what changes; without it, the profile has all samples.
    seconds: Option<u64>,
}

/// The parameters of a change.
#[derive(Deserialize)]
struct Switch {
    active: bool,
}

/// Returns the pages.
pub(super) fn pages() -> Router<Profiles> {
    Router::new()
        .route("/debug/pprof/heap", get(heap).put(switch))
        .route("/debug/pprof/allocs", get(allocs))
}

async fn heap(State(profiles): State<Profiles>, Query(parameters): Query<Parameters>) -> Result<Response, Response> {
    let bytes = profile(&profiles, &KINDS, parameters.seconds).await?;
    Ok(pprof_file("heap", bytes))
}

async fn allocs(State(profiles): State<Profiles>, Query(parameters): Query<Parameters>) -> Result<Response, Response> {
    let bytes = profile(&profiles, &ALLOCATED, parameters.seconds).await?;
    Ok(pprof_file("allocs", bytes))
}

/// Switches sampling on or off.
async fn switch(State(profiles): State<Profiles>, Query(Switch { active }): Query<Switch>) -> Result<String, Response> {
    let _turn = profiles.turn().map_err(IntoResponse::into_response)?;
    check_available().map_err(IntoResponse::into_response)?;
    allocator::set_sampling(active).map_err(|error| failed(&error))?;
    tracing::info!(active, "sampling of allocations changed");
    let state = if active { "on" } else { "off" };
    Ok(format!("sampling of allocations is {state}\n"))
}

/// Returns an encoded profile.
async fn profile(profiles: &Profiles, kinds: &'static Kinds, seconds: Option<u64>) -> Result<Vec<u8>, Response> {
    if let Some(refusal) = seconds.and_then(is_too_long) {
        return Err(refusal);
    }
    let _turn = profiles.turn().map_err(IntoResponse::into_response)?;
    check_available().map_err(IntoResponse::into_response)?;
    let begun = (wall_clock(), Instant::now());
    let before = match seconds {
        None => Dump::default(),
        Some(seconds) => {
            let before = profiles.beside(dumped).await?;
            let _sampling = Sampling::begin().map_err(|error| failed(&error))?;
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            before
        }
    };
    let is_sampling = allocator::is_sampling().map_err(|error| failed(&error))?;
    let since = begun.0.duration_since(UNIX_EPOCH).unwrap_or_default();
    // Names of functions are looked up beside serving.
    let profile = profiles.beside(move || {
        let now = dumped()?;
        if seconds.is_none() && !is_sampling && now.is_empty() {
            return Ok(None);
        }
        let difference = now.since(&before);
        let profile = difference.profile(kinds, since, begun.1.elapsed(), symbols);
        encoded(&profile).map(Some).map_err(HeapError::Read)
    });
    profile
        .await?
        .ok_or_else(|| (StatusCode::CONFLICT, OFF).into_response())
}

fn check_available() -> Result<(), (StatusCode, &'static str)> {
    if allocator::can_sample() {
        Ok(())
    } else {
        Err((StatusCode::NOT_IMPLEMENTED, UNAVAILABLE))
    }
}

/// Sampling for the time of one profile. It ends with the request, unless it was on before.
struct Sampling {
    was_on: bool,
}

impl Sampling {
    fn begin() -> io::Result<Self> {
        let was_on = allocator::is_sampling()?;
        allocator::set_sampling(true)?;
        Ok(Self { was_on })
    }
}

impl Drop for Sampling {
    fn drop(&mut self) {
        if !self.was_on
            && let Err(error) = allocator::set_sampling(false)
        {
            tracing::error!(%error, "sampling of allocations cannot be switched off");
        }
    }
}

/// Returns the samples of the process. The allocator writes to a path, and the file system may be read-only, so the
/// file is in memory.
fn dumped() -> Result<Dump, HeapError> {
    let file = memfd_create("heap", MemfdFlags::CLOEXEC).map_err(|error| HeapError::Write(error.into()))?;
    let mut file = File::from(file);
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("because a path has no zero byte");
    allocator::dump(&path).map_err(HeapError::Write)?;
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(HeapError::Read)?;
    Ok(Dump::parse(&text)?)
}

/// Returns the functions at a return address, the innermost first.
fn symbols(address: usize) -> Vec<Symbol> {
    let mut symbols = Vec::new();
    backtrace::resolve(address as *mut c_void, |symbol| {
        symbols.push(Symbol {
            name: symbol.name().map(|name| name.as_bytes().to_vec()),
            addr: None,
            lineno: symbol.lineno(),
            filename: symbol.filename().map(Into::into),
        });
    });
    symbols
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::profile::tests::{Fixture, decoded};

    /// The size of each allocation: eight times the interval between samples, so that nearly each is sampled.
    const SIZE: usize = 4 << 20;
    const NUMBER: usize = 16;

    /// Allocates, without touching the memory.
    #[inline(never)]
    fn allocate_for_the_test() -> Vec<Vec<u8>> {
        (0..NUMBER).map(|_| Vec::with_capacity(SIZE)).collect()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn live_allocations_are_attributed() {
        let fixture = Fixture::new();
        let (status, text) = fixture.get("/debug/pprof/heap").await;
        assert_eq!((status, text), (StatusCode::CONFLICT, OFF.as_bytes().to_vec()));
        let (status, text) = fixture.request("PUT", "/debug/pprof/heap?active=true").await;
        assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&text));
        let held = allocate_for_the_test();
        let freed = allocate_for_the_test();
        drop(freed);
        let (status, _) = fixture.request("PUT", "/debug/pprof/heap?active=false").await;
        assert_eq!(status, StatusCode::OK);
        // Samples stay, and later allocations are not sampled.
        let (status, bytes) = fixture.get("/debug/pprof/heap").await;
        assert_eq!(status, StatusCode::OK);
        let profile = decoded(&bytes);
        let size = (SIZE * NUMBER) as i64;
        let is_near = |sum: i64, size: i64| (size * 3 / 4..size * 5 / 4).contains(&sum);
        let function = Some("allocate_for_the_test");
        let (live, all) = (
            profile.sum("inuse_space", function),
            profile.sum("alloc_space", function),
        );
        assert!(is_near(live, size), "{live} of {size}");
        assert!(is_near(all, 2 * size), "{all} of {}", 2 * size);
        drop(held);

        // A profile of a time has only what changed in it.
        let (profile, held) = tokio::join!(fixture.get("/debug/pprof/allocs?seconds=1"), async {
            while !allocator::is_sampling().expect("a state") {
                tokio::task::yield_now().await;
            }
            allocate_for_the_test()
        });
        let profile = decoded(&profile.1);
        assert!(profile.duration() >= Duration::from_secs(1));
        let (live, all) = (
            profile.sum("inuse_space", function),
            profile.sum("alloc_space", function),
        );
        assert!(is_near(live, size), "{live} of {size}");
        assert!(is_near(all, size), "{all} of {size}");
        assert!(
            !allocator::is_sampling().expect("a state"),
            "sampling ends with the profile"
        );
        drop(held);
    }
}
