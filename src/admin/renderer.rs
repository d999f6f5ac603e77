//! Renders pages beside serving: on a runtime of their own with low priority, one at a time. Requests for the same page
//! share one answer.
//!
//! A page may take a second and many megabytes. Rendered by the threads that serve proxies, a few dozen callers of a
//! debug page would keep proxies from their configuration.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header, uri::PathAndQuery},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture, future::Shared};
use http_body_util::BodyExt;
use tokio::{
    runtime::Handle,
    sync::{Semaphore, oneshot},
    time::Instant,
};

use super::{access::DebugScope, metrics::exposition::Exposition};
use crate::task::Tasks;

/// The maximum number of different pages that are rendered or wait for it.
const MAX_WAITING: usize = 32;
/// The maximum number of those for callers that see one namespace. The rest is for operators and metrics.
const MAX_WAITING_OF_TENANTS: usize = MAX_WAITING / 2;
/// The size of pages that were rendered and not read, above which no more are rendered.
const MAX_UNREAD_BYTES: usize = 256 << 20;
/// The answer to requests beyond these limits.
const BUSY: &str = "too many debug pages or metrics are being rendered; retry later\n";

/// A renderer of pages. Cheap to clone.
#[derive(Clone)]
pub struct Renderer {
    tasks: Tasks,
    runtime: Handle,
    inner: Arc<Inner>,
}

struct Inner {
    turn: Semaphore,
    /// The number of callers that wait for their turn.
    waiting: AtomicUsize,
    /// By scope and address. Locked for one lookup.
    pages: Mutex<BTreeMap<PageKey, SharedPage>>,
    unread_bytes: Arc<AtomicUsize>,
}

/// A scope, the form that the client's headers choose, and the path of a page with its parameters: whatever a page
/// depends on. The host of a request is not part of it, since clients choose it.
type PageKey = (Option<DebugScope>, Option<Exposition>, String);

/// A page that is being rendered or was rendered; `None` if that failed.
type SharedPage = Shared<BoxFuture<'static, Option<Page>>>;

#[derive(Clone)]
struct Page {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// The bytes of a page, which count as unread until the last response with them is written.
struct PageBytes {
    bytes: Bytes,
    unread_bytes: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for PageBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for PageBytes {
    fn drop(&mut self) {
        self.unread_bytes.fetch_sub(self.bytes.len(), Ordering::AcqRel);
    }
}

/// Too many pages are waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy;

impl IntoResponse for Busy {
    fn into_response(self) -> Response {
        (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], BUSY).into_response()
    }
}

impl Renderer {
    /// Creates a renderer on this runtime.
    pub fn new(tasks: Tasks, runtime: Handle) -> Self {
        Self {
            tasks,
            runtime,
            inner: Arc::new(Inner {
                turn: Semaphore::new(1),
                waiting: AtomicUsize::new(0),
                pages: Mutex::default(),
                unread_bytes: Arc::default(),
            }),
        }
    }

    /// Returns the same pages, rendered here. The scopes of callers are extensions of requests.
    pub(super) fn render(&self, pages: Router) -> Router {
        pages.layer(middleware::from_fn_with_state(self.clone(), render))
    }

    /// Runs work that is not shared; `None` if it panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<Option<T>, Busy> {
        if self.inner.waiting.load(Ordering::Acquire) >= MAX_WAITING {
            return Err(Busy);
        }
        Ok(self.start(work).await.ok())
    }

    /// Runs work that mostly waits: on the same runtime, without a turn. `None` if it panics. The caller limits how
    /// much of it there is.
    pub(super) async fn beside<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let (mut sender, receiver) = oneshot::channel();
        self.tasks.spawn_on(&self.runtime, "page", async move {
            let work = std::panic::AssertUnwindSafe(work).catch_unwind();
            // A caller that has left needs no answer.
            let result = tokio::select! {
                result = work => result,
                () = sender.closed() => return,
            };
            let _ = result.map(|result| sender.send(result));
        });
        receiver.await.ok()
    }

    fn start<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> oneshot::Receiver<T> {
        let (sender, receiver) = oneshot::channel();
        let inner = self.inner.clone();
        inner.waiting.fetch_add(1, Ordering::AcqRel);
        self.tasks.spawn_on(&self.runtime, "page", async move {
            let turn = inner.turn.acquire().await;
            // A caller that has left needs no answer.
            if !sender.is_closed() {
                let result = std::panic::AssertUnwindSafe(work).catch_unwind().await;
                let _ = result.map(|result| sender.send(result));
            }
            drop(turn);
            inner.waiting.fetch_sub(1, Ordering::AcqRel);
        });
        receiver
    }

    /// Returns the page of a key, which `page` renders if no request for it is being answered.
    ///
    /// A rendered page is kept for as long as it took to render, so that callers in a loop use at most half of the
    /// time of the runtime.
    fn page(&self, key: PageKey, page: impl Future<Output = Response> + Send + 'static) -> Result<SharedPage, Busy> {
        let mut pages = self.inner.lock();
        if let Some(shared) = pages.get(&key) {
            return Ok(shared.clone());
        }
        let of_tenants = pages.keys().filter(|key| is_of_tenant(key)).count();
        if pages.len() >= MAX_WAITING
            || is_of_tenant(&key) && of_tenants >= MAX_WAITING_OF_TENANTS
            || self.inner.unread_bytes.load(Ordering::Acquire) > MAX_UNREAD_BYTES
        {
            return Err(Busy);
        }
        let (inner, tasks, forgotten) = (self.inner.clone(), self.tasks.clone(), key.clone());
        let runtime = self.runtime.clone();
        let unread_bytes = inner.unread_bytes.clone();
        let rendered = self.start(async move {
            let started = Instant::now();
            let page = collected(page.await, unread_bytes).await;
            let took = started.elapsed();
            tasks.spawn_on(&runtime, "page", async move {
                tokio::time::sleep(took).await;
                inner.lock().remove(&forgotten);
            });
            page
        });
        let (inner, forgotten) = (self.inner.clone(), key.clone());
        let shared = rendered.map(move |page| {
            if page.is_err() {
                inner.lock().remove(&forgotten);
            }
            page.ok()
        });
        let shared = shared.boxed().shared();
        pages.insert(key, shared.clone());
        Ok(shared)
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<PageKey, SharedPage>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns true for a page of callers that see one namespace.
fn is_of_tenant((scope, ..): &PageKey) -> bool {
    matches!(scope, Some(DebugScope::Namespace(_)))
}

async fn collected(response: Response, unread_bytes: Arc<AtomicUsize>) -> Page {
    let (parts, body) = response.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes);
    let bytes = body.unwrap_or_default();
    unread_bytes.fetch_add(bytes.len(), Ordering::AcqRel);
    Page {
        status: parts.status,
        headers: parts.headers,
        body: Bytes::from_owner(PageBytes { bytes, unread_bytes }),
    }
}

async fn render(State(renderer): State<Renderer>, mut request: Request, next: Next) -> Response {
    if request.method() == Method::HEAD {
        // The handler of GET answers it, which costs as much; the router leaves out the body.
        *request.method_mut() = Method::GET;
    }
    if request.method() != Method::GET {
        return next.run(request).await;
    }
    let scope = request.extensions().get::<DebugScope>().cloned();
    let form = request.extensions().get::<Exposition>().copied();
    let address = request.uri().path_and_query().map_or("", PathAndQuery::as_str);
    let key = (scope, form, address.to_owned());
    let page = match renderer.page(key, next.run(request)) {
        Ok(page) => page.await,
        Err(busy) => return busy.into_response(),
    };
    let Some(Page { status, headers, body }) = page else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use axum::routing::get;
    use tokio::sync::Notify;
    use tower::ServiceExt;

    use super::*;

    struct Fixture {
        pages: Router,
        /// The number of pages that were rendered.
        rendered: Arc<AtomicUsize>,
        go: Arc<Notify>,
    }

    impl Fixture {
        /// Pages that are rendered when they are notified.
        fn new() -> Self {
            let (rendered, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
            let (counted, wait) = (rendered.clone(), go.clone());
            let page = move || {
                let (counted, wait) = (counted.clone(), wait.clone());
                async move {
                    let number = counted.fetch_add(1, Ordering::AcqRel);
                    wait.notified().await;
                    format!("page {number}")
                }
            };
            let renderer = Renderer::new(Tasks::default(), Handle::current());
            Self {
                pages: renderer.render(Router::new().route("/page", get(page))),
                rendered,
                go,
            }
        }

        async fn until_rendered(&self, number: usize) {
            while self.rendered.load(Ordering::Acquire) < number {
                tokio::task::yield_now().await;
            }
        }

        fn get(&self, path: &str) -> impl Future<Output = (StatusCode, Bytes)> + use<> {
            self.answer(http::Request::get(path))
        }

        fn answer(&self, request: http::request::Builder) -> impl Future<Output = (StatusCode, Bytes)> + use<> {
            let request = request.body(Body::empty()).expect("a request");
            let pages = self.pages.clone();
            async move {
                let Ok(response) = pages.oneshot(request).await;
                let status = response.status();
                let body = response.into_body().collect().await.expect("a body in memory");
                (status, body.to_bytes())
            }
        }
    }

    #[tokio::test]
    async fn r20_equal_requests_share_one_answer() {
        let fixture = Fixture::new();
        let mut answers = std::pin::pin!(futures::future::join_all((0..50).map(|_| fixture.get("/page?a"))));
        assert!(futures::poll!(answers.as_mut()).is_pending());
        fixture.until_rendered(1).await;
        fixture.go.notify_one();
        let answers = answers.await;
        assert!(
            answers
                .iter()
                .all(|(status, body)| status.is_success() && body == "page 0")
        );
        fixture.go.notify_one();
        // An answer is used for as long as it took to render.
        while fixture.get("/page?a").await.1 == "page 0" {
            tokio::task::yield_now().await;
        }
        assert_eq!(fixture.rendered.load(Ordering::Acquire), 2);
    }

    #[tokio::test]
    async fn r20_methods_and_hosts_do_not_bypass_the_renderer() {
        let fixture = Fixture::new();
        let answer = |request| Box::pin(fixture.answer(request));
        let mut first = answer(http::Request::get("/page"));
        let mut others = [
            answer(http::Request::head("/page")),
            answer(http::Request::get("http://other/page")),
        ];
        for answer in std::iter::once(&mut first).chain(&mut others) {
            assert!(futures::poll!(answer.as_mut()).is_pending());
        }
        assert_eq!(fixture.rendered.load(Ordering::Acquire), 0, "rendered while serving");
        fixture.until_rendered(1).await;
        fixture.go.notify_one();
        assert_eq!(first.await.1, "page 0");
        for (mut answer, body) in others.into_iter().zip(["", "page 0"]) {
            let answer = futures::poll!(answer.as_mut());
            assert_eq!(answer, Poll::Ready((StatusCode::OK, Bytes::from(body))));
        }
    }

    #[tokio::test]
    async fn r20_few_pages_are_rendered_at_a_time() {
        let fixture = Fixture::new();
        let paths: Vec<String> = (0..MAX_WAITING).map(|number| format!("/page?{number}")).collect();
        let mut waiting = std::pin::pin!(futures::future::join_all(paths.iter().map(|path| fixture.get(path))));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        fixture.until_rendered(1).await;
        let (status, body) = fixture.get("/page?more").await;
        assert_eq!((status, &body[..]), (StatusCode::SERVICE_UNAVAILABLE, BUSY.as_bytes()));
        let release = async {
            for number in 0..MAX_WAITING {
                fixture.until_rendered(number + 1).await;
                assert_eq!(fixture.rendered.load(Ordering::Acquire), number + 1, "one at a time");
                fixture.go.notify_one();
            }
        };
        let (answers, ()) = tokio::join!(waiting, release);
        assert!(answers.iter().all(|(status, _)| status.is_success()));
    }

    #[tokio::test]
    async fn r20_pages_of_tenants_leave_room_for_others() {
        let fixture = Fixture::new();
        let tenant = || http::Request::builder().extension(DebugScope::Namespace("a".into()));
        let paths = (0..MAX_WAITING_OF_TENANTS).map(|number| tenant().uri(format!("/page?{number}")));
        let requests: Vec<_> = paths.map(|request| fixture.answer(request)).collect();
        let mut waiting = std::pin::pin!(futures::future::join_all(requests));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        let (status, _) = fixture.answer(tenant().uri("/page?more")).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        let others = [
            http::Request::get("/page").extension(DebugScope::All),
            http::Request::get("/page"),
        ];
        for request in others {
            let mut answer = std::pin::pin!(fixture.answer(request));
            assert!(futures::poll!(answer.as_mut()).is_pending(), "it has no room");
        }
    }
}
