//! Request bodies of unauthenticated clients: bounded in size, time and, for all of them together, in memory. They are
//! processed in turn, aside from the threads that sign certificates: one of a few kilobytes may take a tenth of a
//! second.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    extract::{ConnectInfo, Request},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{auth::shares::Shares, rpc::PreAuthLimiter, task};

/// The maximum size of a body, which is also Istio's.
pub const MAX_BYTES: usize = 6 << 20;
/// The time limit for receiving a body.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The memory for bodies of all requests, in units of [`UNIT`] bytes.
const BUDGET: usize = (64 << 20) / UNIT;
const UNIT: usize = 4 << 10;
/// The time that a request waits for memory before a connection is evicted.
const EVICTION_DELAY: Duration = Duration::from_millis(250);
/// The size of bodies that are processed one at a time. Parsed, a body takes up to sixteen times its size.
const LARGE_BYTES: usize = 256 << 10;

/// The bounds of all bodies. Cheap to clone.
#[derive(Clone)]
pub struct Bodies {
    budget: Arc<Semaphore>,
    slots: Arc<ProcessingSlots>,
    limiter: PreAuthLimiter,
}

/// Slots of processing.
struct ProcessingSlots {
    /// For large bodies, one at a time.
    large: Semaphore,
    /// For other bodies, by the address of the client, and for all of them together.
    of_addresses: Shares<Option<IpAddr>>,
    all: Semaphore,
}

/// A body with its share of the memory.
pub struct Body {
    bytes: Bytes,
    address: Option<IpAddr>,
    slots: Arc<ProcessingSlots>,
    _held: Vec<OwnedSemaphorePermit>,
}

/// A refused body, with Istio's status and text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The client sent less than it announced, or too slowly.
    #[error("could not read the body: {0}")]
    Unreadable(String),
    /// It is larger than [`MAX_BYTES`].
    #[error("request body too large: limit is {MAX_BYTES} bytes")]
    TooLarge,
    /// There is none.
    #[error("no body found")]
    Missing,
    /// It is not JSON.
    #[error("invalid Content-Type, want `application/json`")]
    ContentType,
}

impl BodyError {
    /// Returns the HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Unreadable(_) | Self::TooLarge | Self::Missing => StatusCode::BAD_REQUEST,
            Self::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        }
    }
}

impl IntoResponse for BodyError {
    fn into_response(self) -> Response {
        (self.status(), format!("{self}\n")).into_response()
    }
}

impl Bodies {
    /// Creates the bounds of a server whose connections are in `limiter`.
    pub fn new(limiter: PreAuthLimiter) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with(limiter, processors)
    }

    /// The clients of one address use as many threads as there are processors, so one is left for others.
    fn with(limiter: PreAuthLimiter, processors: usize) -> Self {
        let slots = ProcessingSlots {
            large: Semaphore::new(1),
            of_addresses: Shares::new(processors),
            all: Semaphore::new(processors + 1),
        };
        Self {
            budget: Arc::new(Semaphore::new(BUDGET)),
            slots: Arc::new(slots),
            limiter,
        }
    }

    /// Receives the body of a request.
    ///
    /// # Errors
    /// The order of the checks is Istio's.
    pub async fn read(&self, request: Request) -> Result<Body, BodyError> {
        let (head, body) = request.into_parts();
        let client = head.extensions.get::<ConnectInfo<SocketAddr>>();
        let address = client.map(|ConnectInfo(address)| address.ip());
        let reading = tokio::time::timeout(TIMEOUT, self.collect(body, address));
        let timed_out = |_| BodyError::Unreadable(format!("not received within {} s", TIMEOUT.as_secs()));
        let body = reading.await.map_err(timed_out)??;
        if body.bytes.is_empty() {
            return Err(BodyError::Missing);
        }
        if !is_json(&head.headers) {
            return Err(BodyError::ContentType);
        }
        Ok(body)
    }

    async fn collect(&self, mut body: axum::body::Body, address: Option<IpAddr>) -> Result<Body, BodyError> {
        let (mut bytes, mut held, mut reserved) = (Vec::new(), Vec::new(), 0);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| BodyError::Unreadable(error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            let len = bytes.len() + data.len();
            if len > MAX_BYTES {
                return Err(BodyError::TooLarge);
            }
            while reserved < len {
                let units = (len - reserved).div_ceil(UNIT);
                held.push(self.reserve(units).await);
                reserved += units * UNIT;
            }
            bytes.extend_from_slice(&data);
        }
        Ok(Body {
            bytes: bytes.into(),
            address,
            slots: self.slots.clone(),
            _held: held,
        })
    }

    /// Waits for memory. While there is none, connections of the address with the most connections are evicted, which
    /// releases theirs.
    async fn reserve(&self, units: usize) -> OwnedSemaphorePermit {
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let mut acquiring = std::pin::pin!(self.budget.clone().acquire_many_owned(units));
        loop {
            match tokio::time::timeout(EVICTION_DELAY, acquiring.as_mut()).await {
                Ok(acquired) => return acquired.expect("because the semaphore is never closed"),
                Err(_) => drop(self.limiter.evict_oldest()),
            }
        }
    }
}

impl Body {
    /// Runs a function of the body when it is its turn, aside from the threads of other tasks.
    pub async fn process<R>(self, work: impl FnOnce(&[u8]) -> R) -> R {
        let ProcessingSlots {
            large,
            of_addresses,
            all,
        } = &*self.slots;
        let is_large = self.bytes.len() > LARGE_BYTES;
        let _share = if is_large {
            None
        } else {
            Some(of_addresses.acquire(self.address).await)
        };
        let slots = if is_large { large } else { all };
        let _slot = slots.acquire().await.expect("because the semaphore is never closed");
        task::aside(|| work(&self.bytes))
    }
}

/// Parity (pkg/webhooks/validation/server/server.go): parameters such as a charset are refused.
fn is_json(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|value| value == "application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(content_type: &str, body: impl Into<axum::body::Body>) -> Result<usize, BodyError> {
        let request = Request::builder()
            .header("content-type", content_type)
            .body(body.into());
        let bodies = Bodies::new(PreAuthLimiter::new(1));
        let body = bodies.read(request.expect("a request")).await?;
        Ok(body.process(<[u8]>::len).await)
    }

    #[tokio::test]
    async fn bodies_are_checked_in_the_order_of_istio() {
        assert_eq!(read("text/plain", "").await, Err(BodyError::Missing));
        assert_eq!(read("text/plain", "{}").await, Err(BodyError::ContentType));
        let charset = read("application/json; charset=utf-8", "{}").await;
        assert_eq!(charset, Err(BodyError::ContentType));
        assert_eq!(read("application/json", "{}").await, Ok(2));
        assert_eq!(read("application/json", vec![b' '; MAX_BYTES]).await, Ok(MAX_BYTES));
        let too_large = read("text/plain", vec![b' '; MAX_BYTES + 1]).await;
        assert_eq!(too_large, Err(BodyError::TooLarge));
        assert_eq!(BodyError::TooLarge.status(), StatusCode::BAD_REQUEST);
        assert_eq!(BodyError::ContentType.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }

    #[tokio::test]
    async fn r20_clients_of_one_address_leave_a_slot_for_others() {
        let bodies = Bodies::with(PreAuthLimiter::new(1), 1);
        let body = async |last: u8| {
            let request = Request::builder()
                .header("content-type", "application/json")
                .body("{}".into());
            let mut request = request.expect("a request");
            let address = SocketAddr::from(([10, 0, 0, last], 1));
            request.extensions_mut().insert(ConnectInfo(address));
            bodies.read(request).await.expect("a body")
        };
        let (first, second, other) = (body(1).await, body(1).await, body(2).await);
        let share = bodies.slots.of_addresses.acquire(first.address).await;
        let slot = bodies.slots.all.acquire().await.expect("an open semaphore");
        let mut waiting = std::pin::pin!(second.process(<[u8]>::len));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        assert_eq!(other.process(<[u8]>::len).await, 2);
        drop((share, slot));
        assert_eq!(waiting.await, 2);
    }

    /// Slow bodies use up the memory: the connections of their client are evicted, and another request succeeds.
    #[tokio::test]
    async fn memory_of_slow_bodies_is_reclaimed() {
        let bodies = Bodies::new(PreAuthLimiter::new(64));
        let address = std::net::Ipv4Addr::LOCALHOST.into();
        let tasks = task::Tasks::default();
        for _ in 0..=BUDGET / (MAX_BYTES / UNIT) {
            let connection = bodies.limiter.register(address).expect("free capacity");
            let bodies = bodies.clone();
            tasks.spawn_until_shutdown("slow request", async move {
                let start = futures::stream::iter([Ok::<_, std::io::Error>(vec![b' '; MAX_BYTES - 1])]);
                let body = axum::body::Body::from_stream(futures::StreamExt::chain(start, futures::stream::pending()));
                let request = Request::builder().body(body).expect("a request");
                tokio::select! {
                    read = bodies.read(request) => drop(read),
                    () = connection.evicted() => {}
                }
            });
        }
        let started = tokio::time::Instant::now();
        let request = Request::builder()
            .header("content-type", "application/json")
            .body("{}".into());
        bodies
            .read(request.expect("a request"))
            .await
            .map(drop)
            .expect("a body");
        assert!(started.elapsed() < TIMEOUT / 2, "{:?}", started.elapsed());
        tasks.end(TIMEOUT).await;
    }
}
