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
/// The part of it for bodies of one address. With fewer connections than an API server, a client could otherwise hold
/// all of it, and have those of the API server evicted.
const BUDGET_OF_ADDRESS: usize = BUDGET / 2;
const UNIT: usize = 4 << 10;
/// The time that a request waits for memory before a connection is evicted.
const EVICTION_DELAY: Duration = Duration::from_millis(250);
/// The size of bodies that are processed one at a time. Parsed, a body takes up to sixteen times its size.
const LARGE_BYTES: usize = 256 << 10;

/// The bounds of all bodies. Cheap to clone.
#[derive(Clone)]
pub struct Bodies {
    budget: Arc<Semaphore>,
    budgets_of_addresses: Arc<Shares<Option<IpAddr>>>,
    slots: Arc<ProcessingSlots>,
    limiter: PreAuthLimiter,
}

/// Slots of processing.
struct ProcessingSlots {
    /// For large bodies, one at a time. Those of an address wait for each other first, so that others get their turn.
    large: Semaphore,
    large_of_addresses: Shares<Option<IpAddr>>,
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
            large_of_addresses: Shares::new(1),
            of_addresses: Shares::new(processors),
            all: Semaphore::new(processors + 1),
        };
        Self {
            budget: Arc::new(Semaphore::new(BUDGET)),
            budgets_of_addresses: Arc::new(Shares::new(BUDGET_OF_ADDRESS)),
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
                held.extend(self.reserve(address, units).await);
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

    /// Waits for memory: the part of the address, then that of all. While there is none, connections of the address are
    /// evicted, or of the address with the most connections, which releases theirs.
    async fn reserve(&self, address: Option<IpAddr>, units: usize) -> [OwnedSemaphorePermit; 2] {
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let of_address = self.budgets_of_addresses.acquire_many(address, units);
        let of_address = evicting(of_address, || match address {
            Some(address) => self.limiter.evict_oldest_of(address),
            None => self.limiter.evict_oldest(),
        });
        let of_address = of_address.await;
        let of_all = self.budget.clone().acquire_many_owned(units);
        let of_all = evicting(of_all, || self.limiter.evict_oldest()).await;
        [of_address, of_all.expect("because the semaphore is never closed")]
    }
}

/// Waits for memory, and evicts a connection again and again until there is some.
async fn evicting<T>(memory: impl Future<Output = T>, evict: impl Fn() -> bool) -> T {
    let mut memory = std::pin::pin!(memory);
    loop {
        match tokio::time::timeout(EVICTION_DELAY, memory.as_mut()).await {
            Ok(memory) => return memory,
            Err(_) => evict(),
        };
    }
}

impl Body {
    /// Runs a function of the body when it is its turn, aside from the threads of other tasks.
    pub async fn process<R>(self, work: impl FnOnce(&[u8]) -> R) -> R {
        let ProcessingSlots {
            large,
            large_of_addresses,
            of_addresses,
            all,
        } = &*self.slots;
        let (shares, slots) = if self.bytes.len() > LARGE_BYTES {
            (large_of_addresses, large)
        } else {
            (of_addresses, all)
        };
        let _share = shares.acquire(self.address).await;
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

    #[tokio::test]
    async fn r20_bodies_of_one_address_leave_memory_for_others() {
        let bodies = Bodies::new(PreAuthLimiter::new(1));
        let address = |last| Some(IpAddr::from([10, 0, 0, last]));
        let held = bodies.reserve(address(1), BUDGET / 2).await;
        let mut more = std::pin::pin!(bodies.reserve(address(1), 1));
        assert!(futures::poll!(more.as_mut()).is_pending());
        drop(bodies.reserve(address(2), BUDGET / 2).await);
        drop(held);
        drop(more.await);
    }

    #[tokio::test]
    async fn r20_large_bodies_of_one_address_do_not_delay_those_of_others() {
        let bodies = Bodies::with(PreAuthLimiter::new(1), 1);
        let length = LARGE_BYTES + 1;
        let slot = bodies.slots.large.acquire().await.expect("an open semaphore");
        let mut waiting = [1, 1, 2].map(|last| {
            let body = Body {
                bytes: vec![b' '; length].into(),
                address: Some(IpAddr::from([10, 0, 0, last])),
                slots: bodies.slots.clone(),
                _held: Vec::new(),
            };
            Box::pin(body.process(<[u8]>::len))
        });
        for body in &mut waiting {
            assert!(futures::poll!(body.as_mut()).is_pending());
        }
        drop(slot);
        let [first, mut second, other] = waiting;
        assert_eq!(first.await, length);
        assert!(futures::poll!(second.as_mut()).is_pending(), "another address is next");
        assert_eq!(other.await, length);
        assert_eq!(second.await, length);
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
