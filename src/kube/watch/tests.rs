use std::{io, sync::Mutex};

use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::Frame;
use prometheus::Registry;
use serde_json::json;
use tokio::sync::oneshot;
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::{base::ClusterId, kube::health::WatchMetrics, task::Tasks};

type Answer = Response<BoxBody<Bytes, io::Error>>;
type Request = (http::Request<Body>, oneshot::Sender<Answer>);

/// Duration of one second of a real watch in these tests.
const SECOND: Duration = Duration::from_millis(5);
/// Largest page in these tests.
const PAGE_BYTES: usize = 64 << 10;

/// A simulated API server and a watch connected to it, without sockets.
struct Fixture {
    requests: mpsc::Receiver<Request>,
    events: mpsc::Receiver<WatchEvent>,
    health: Arc<WatchHealth>,
}

/// A request that waits for its answer.
struct PendingRequest {
    query: String,
    accept: String,
    answer: oneshot::Sender<Answer>,
}

/// The stream of a watch that was accepted.
struct Stream(mpsc::Sender<io::Result<Frame<Bytes>>>);

impl Fixture {
    fn new(target: WatchTarget) -> Self {
        let metrics = WatchMetrics::new(&Registry::new()).unwrap();
        Self::with(target, &metrics, SECOND)
    }

    fn with(target: WatchTarget, metrics: &WatchMetrics, second: Duration) -> Self {
        Self::converting(target, metrics, second, |object| object)
    }

    fn converting(
        target: WatchTarget,
        metrics: &WatchMetrics,
        second: Duration,
        convert: impl FnMut(Object) -> Object + Send + Sync + 'static,
    ) -> Self {
        let (sender, requests) = mpsc::channel::<Request>(1);
        let service = tower::service_fn(move |request| {
            let sender = sender.clone();
            async move {
                let (answer, answered) = oneshot::channel();
                let sent = sender.send((request, answer)).await;
                sent.map_err(|_| io::ErrorKind::ConnectionRefused)?;
                answered
                    .await
                    .map_err(|_| io::Error::from(io::ErrorKind::ConnectionReset))
            }
        });
        let client = Client::new(service, "default");
        let health = WatchHealth::new(&ClusterId::new("c"), &target.name(), metrics);
        let (out, events) = mpsc::channel(8);
        let watch = Watch {
            second,
            max_page_bytes: PAGE_BYTES,
            ..Watch::new(client, target, health.clone(), convert, out)
        };
        Tasks::default().spawn("watch", watch.until_closed());
        Self {
            requests,
            events,
            health,
        }
    }

    fn pods() -> Self {
        Self::new(WatchTarget::all(pods()))
    }

    async fn next_request(&mut self) -> PendingRequest {
        let (request, answer) = self.requests.recv().await.unwrap();
        let accept = request.headers().get(http::header::ACCEPT);
        PendingRequest {
            query: request.uri().query().unwrap_or_default().to_owned(),
            accept: accept.map_or("", |value| value.to_str().unwrap()).to_owned(),
            answer,
        }
    }

    /// Answers the first list and accepts the watch that follows it.
    async fn watching(&mut self, version: &str, names: &[&str]) -> Stream {
        self.next_request().await.list(version, names, "");
        assert_eq!(self.next_event().await, format!("all {}", names.join(" ")));
        self.next_request().await.accept_after(version)
    }

    /// Completes when the watch waits before its next request.
    async fn waits(&self) {
        while self.health.report().state != WatchState::Waiting {
            tokio::task::yield_now().await;
        }
    }

    async fn next_event(&mut self) -> String {
        let name = |object: &Object| object.name().to_owned();
        match self.events.recv().await.unwrap() {
            WatchEvent::Restarted(all) => format!("all {}", all.iter().map(name).collect::<Vec<_>>().join(" ")),
            WatchEvent::Applied(object) => format!("+{}", name(&object)),
            WatchEvent::Deleted(object) => format!("-{}", name(&object)),
        }
    }
}

impl PendingRequest {
    fn has(&self, part: &str) -> bool {
        self.query.split('&').any(|have| have == part)
    }

    fn reply(self, code: u16, value: &Value) {
        let body = Full::new(Bytes::from(value.to_string())).map_err(|never| match never {});
        let answer = Response::builder().status(code).body(body.boxed()).unwrap();
        drop(self.answer.send(answer));
    }

    fn list(self, version: &str, names: &[&str], token: &str) {
        assert!(!self.query.contains("watch"), "{}", self.query);
        assert!(
            !self.query.contains("resourceVersion"),
            "a list must be the newest: {}",
            self.query
        );
        let items: Vec<Value> = names.iter().map(|name| json!({"metadata": {"name": name}})).collect();
        let metadata = json!({"resourceVersion": version, "continue": token});
        self.reply(200, &json!({"kind": "PodList", "metadata": metadata, "items": items}));
    }

    /// Answers the question for the present version.
    fn probe(self, version: &str) {
        assert!(self.has("limit=1"), "{}", self.query);
        assert!(self.accept.contains("as=PartialObjectMetadataList"), "{}", self.accept);
        self.list(version, &["first"], "more");
    }

    /// Refuses the request for so many seconds.
    fn busy(self, seconds: &str) {
        let body = Full::new(Bytes::new()).map_err(|never| match never {});
        let answer = Response::builder().status(429).header(RETRY_AFTER, seconds);
        drop(self.answer.send(answer.body(body.boxed()).unwrap()));
    }

    fn accept_after(self, version: &str) -> Stream {
        assert!(
            self.has("watch=true") && self.has("allowWatchBookmarks=true"),
            "{}",
            self.query
        );
        assert!(self.has(&format!("resourceVersion={version}")), "{}", self.query);
        let (sender, receiver) = mpsc::channel(8);
        let body = StreamBody::new(ReceiverStream::new(receiver));
        drop(self.answer.send(Response::new(BodyExt::boxed(body))));
        Stream(sender)
    }
}

impl Stream {
    async fn text(&self, text: String) {
        self.0.send(Ok(Frame::data(Bytes::from(text)))).await.unwrap();
    }

    async fn line(&self, kind: &str, object: Value) {
        self.text(format!("{}\n", json!({"type": kind, "object": object})))
            .await;
    }

    async fn event(&self, kind: &str, name: &str, version: &str) {
        let object = json!({"metadata": {"name": name, "resourceVersion": version}});
        self.line(kind, object).await;
    }

    async fn bookmark(&self, version: &str) {
        self.line("BOOKMARK", json!({"metadata": {"resourceVersion": version}}))
            .await;
    }

    async fn cut(self) {
        drop(self.0.send(Err(io::Error::other("cut"))).await);
    }
}

fn pods() -> ApiResource {
    ApiResource {
        group: String::new(),
        version: "v1".into(),
        api_version: "v1".into(),
        kind: "Pod".into(),
        plural: "pods".into(),
    }
}

fn gone() -> Value {
    json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"})
}

#[tokio::test]
async fn a_closed_watch_resumes_at_its_last_version() {
    let mut fixture = Fixture::pods();
    let first = fixture.next_request().await;
    assert!(first.has("limit=500"), "{}", first.query);
    first.list("10", &["a"], "next");
    let second = fixture.next_request().await;
    assert!(second.has("continue=next"), "{}", second.query);
    second.list("10", &["b"], "");
    assert_eq!(fixture.next_event().await, "all a b");
    let stream = fixture.next_request().await.accept_after("10");
    stream.event("ADDED", "c", "11").await;
    stream.event("DELETED", "a", "12").await;
    assert_eq!(
        (fixture.next_event().await, fixture.next_event().await),
        ("+c".into(), "-a".into())
    );
    stream.cut().await;
    let stream = fixture.next_request().await.accept_after("12");
    stream.bookmark("30").await;
    // A line may arrive in pieces. An incomplete line at the end of the stream is ignored.
    stream
        .text(r#"{"type":"MODIFIED","object":{"metadata":{"name":"c","#.into())
        .await;
    stream.text("\"resourceVersion\":\"31\"}}}\n{\"type\":".into()).await;
    assert_eq!(fixture.next_event().await, "+c");
    drop(stream);
    fixture.next_request().await.accept_after("31");
    let report = fixture.health.report();
    assert_eq!((report.objects, report.restarts, report.undecodable), (2, 0, 0));
}

#[tokio::test]
async fn an_expired_version_causes_a_new_list() {
    let mut fixture = Fixture::pods();
    let stream = fixture.watching("10", &["a"]).await;
    stream.line("ERROR", gone()).await;
    let stream = fixture.watching("20", &["b"]).await;
    drop(stream);
    fixture.next_request().await.reply(410, &gone());
    let stream = fixture.watching("30", &[]).await;
    stream.cut().await;
    let future = json!({"code": 504, "message": "Too large resource version: 30, current: 3"});
    fixture.next_request().await.reply(504, &future);
    drop(fixture.watching("3", &["c"]).await);
    assert_eq!(fixture.health.report().restarts, 3);
}

#[tokio::test]
async fn pages_that_expire_are_read_as_one() {
    let mut fixture = Fixture::pods();
    fixture.next_request().await.list("10", &["a"], "next");
    fixture.next_request().await.reply(410, &gone());
    let again = fixture.next_request().await;
    assert!(
        !again.query.contains("limit") && !again.query.contains("continue"),
        "{}",
        again.query
    );
    again.list("20", &["b"], "");
    assert_eq!(fixture.next_event().await, "all b");
    assert!(fixture.health.has_listed());
}

#[tokio::test]
async fn r2_pages_with_too_many_bytes_are_followed_by_smaller_ones() {
    let mut fixture = Fixture::pods();
    let first = fixture.next_request().await;
    first.list("10", &["a"], "next");
    let large = fixture.next_request().await;
    assert!(large.has("limit=500"), "{}", large.query);
    large.list("10", &["b".repeat(PAGE_BYTES).as_str()], "");
    for (names, token, next) in [(["b"], "next", "more"), (["c"], "more", "")] {
        let small = fixture.next_request().await;
        assert!(
            small.has("limit=16") && small.has(&format!("continue={token}")),
            "{}",
            small.query
        );
        small.list("10", &names, next);
    }
    assert_eq!(fixture.next_event().await, "all a b c");
    let stream = fixture.next_request().await.accept_after("10");
    stream.line("ERROR", gone()).await;
    let again = fixture.next_request().await;
    assert!(again.has("limit=500"), "{}", again.query);
}

#[tokio::test]
async fn a_list_starts_again_if_a_page_is_refused() {
    let mut fixture = Fixture::pods();
    fixture.next_request().await.list("10", &["a"], "next");
    let busy = json!({"code": 429, "message": "too many requests"});
    fixture.next_request().await.reply(429, &busy);
    let same = fixture.next_request().await;
    assert!(same.has("continue=next"), "{}", same.query);
    let future = json!({"code": 500, "message": "required revision is a future revision"});
    same.reply(500, &future);
    let again = fixture.next_request().await;
    assert!(
        again.has("limit=500") && !again.query.contains("continue"),
        "{}",
        again.query
    );
    again.list("5", &["b"], "");
    assert_eq!(fixture.next_event().await, "all b");
}

#[tokio::test]
async fn a_silent_watch_is_resumed_and_a_quiet_one_is_not() {
    let mut fixture = Fixture::pods();
    let quiet = fixture.watching("10", &["a"]).await;
    let began = Instant::now();
    for minute in 1..=4 {
        sleep(SECOND * 60).await;
        quiet.bookmark(&format!("1{minute}")).await;
    }
    let silent = fixture.next_request().await;
    assert!(began.elapsed() >= SECOND * (4 * 60 + 180), "{:?}", began.elapsed());
    assert_eq!(fixture.health.report().state, WatchState::Silent);
    silent.probe("20");
    let stream = fixture.next_request().await.accept_after("14");
    tokio::task::yield_now().await;
    stream.bookmark("21").await;
    stream.event("MODIFIED", "a", "22").await;
    assert_eq!(fixture.next_event().await, "+a");
    let report = fixture.health.report();
    assert_eq!(
        (report.state, report.silences, report.restarts),
        (WatchState::Watching, 1, 0)
    );
}

#[tokio::test]
async fn a_watch_that_stays_silent_lists_again() {
    let mut fixture = Fixture::pods();
    let _before = fixture.watching("1200", &["a"]).await;
    fixture.next_request().await.probe("1200");
    let _after = fixture.next_request().await.accept_after("1200");
    drop(fixture.watching("1200", &["b"]).await);
    let report = fixture.health.report();
    assert_eq!((report.silences, report.restarts), (2, 1));
}

#[tokio::test]
async fn a_server_that_returns_with_an_older_version_is_listed_again() {
    let mut fixture = Fixture::pods();
    let stream = fixture.watching("1200", &["a"]).await;
    stream.cut().await;
    let down = json!({"code": 503, "message": "no backend"});
    fixture.next_request().await.reply(503, &down);
    // The outage goes on.
    fixture.next_request().await.reply(503, &down);
    fixture.next_request().await.probe("1000");
    let stream = fixture.watching("1001", &["b"]).await;
    assert_eq!(fixture.health.report().restarts, 1);
    stream.event("ADDED", "c", "1002").await;
    assert_eq!(fixture.next_event().await, "+c");
}

#[tokio::test]
async fn a_watch_resumes_after_an_outage_without_a_list() {
    let mut fixture = Fixture::pods();
    let stream = fixture.watching("10", &["a"]).await;
    stream.cut().await;
    drop(fixture.next_request().await.answer);
    fixture.next_request().await.probe("30");
    let stream = fixture.next_request().await.accept_after("10");
    stream.event("ADDED", "b", "12").await;
    assert_eq!(fixture.next_event().await, "+b");
    // A connection that ends while the server works is no outage.
    stream.cut().await;
    fixture.next_request().await.accept_after("12");
    assert_eq!(fixture.health.report().restarts, 0);
}

#[tokio::test]
async fn a_watch_resumes_without_an_answer_to_probes_that_are_refused() {
    let mut fixture = Fixture::pods();
    let stream = fixture.watching("10", &["a"]).await;
    stream.cut().await;
    let refusals = [503, 403, 503, 403, 406, 403];
    for (number, code) in refusals.into_iter().enumerate() {
        let request = fixture.next_request().await;
        assert_eq!(request.has("limit=1"), number > 0, "{}", request.query);
        request.reply(code, &json!({"code": code, "message": "refused"}));
    }
    let stream = fixture.next_request().await.accept_after("10");
    stream.event("ADDED", "b", "12").await;
    assert_eq!(fixture.next_event().await, "+b");
}

#[tokio::test]
async fn a_server_that_asks_for_a_delay_gets_it() {
    let mut fixture = Fixture::pods();
    let first = fixture.next_request().await;
    let began = Instant::now();
    first.busy("20");
    let second = fixture.next_request().await;
    assert!(began.elapsed() >= SECOND * 20, "{:?}", began.elapsed());
    let began = Instant::now();
    second.reply(503, &json!({"code": 503, "details": {"retryAfterSeconds": 20}}));
    fixture.next_request().await.list("10", &["a"], "");
    assert!(began.elapsed() >= SECOND * 20, "{:?}", began.elapsed());
    assert_eq!(fixture.next_event().await, "all a");
    let refused = |seconds| Failure::Refused {
        code: 429,
        message: String::new(),
        hint: String::new(),
        retry_after: Some(Duration::from_secs(seconds)),
    };
    let mut machine = Machine::<()>::new(7);
    assert_eq!(machine.failed(&refused(10)), Duration::from_secs(10));
    assert_eq!(machine.failed(&refused(3600)), Duration::from_secs(30), "but not any");
}

#[tokio::test]
async fn a_success_of_another_watch_ends_the_wait_after_the_asked_delay() {
    let metrics = WatchMetrics::new(&Registry::new()).unwrap();
    let (target, second) = (WatchTarget::all(pods()), Duration::from_millis(100));
    let mut machine = Machine::<()>::new(target.seed());
    let starting = Failure::Unreachable("starting".into());
    let is_long = |_| machine.failed(&starting) >= Duration::from_secs(20);
    let failures = (0..64).position(is_long).expect("a long delay");
    let other = WatchHealth::new(&ClusterId::new("c"), "services", &metrics);
    let succeed = || {
        other.failed("refused");
        other.enter(WatchState::Watching);
    };
    let mut pods = Fixture::with(target, &metrics, second);
    for _ in 0..failures {
        let request = pods.next_request().await;
        request.reply(503, &json!({"code": 503, "message": "starting"}));
        pods.waits().await;
        succeed();
    }
    let request = pods.next_request().await;
    let began = Instant::now();
    request.busy("1");
    pods.waits().await;
    succeed();
    pods.next_request().await.list("10", &["a"], "");
    let waited = began.elapsed();
    assert!(waited >= second && waited < second * 15, "{waited:?}");
}

#[tokio::test]
async fn undecodable_objects_do_not_end_the_watch() {
    let mut fixture = Fixture::pods();
    let list =
        json!({"metadata": {"resourceVersion": "10"}, "items": [7, {"metadata": {"name": "a"}}, {"metadata": {}}]});
    fixture.next_request().await.reply(200, &list);
    assert_eq!(fixture.next_event().await, "all a");
    let stream = fixture.next_request().await.accept_after("10");
    stream.text("no JSON\n\n".into()).await;
    stream.line("MODIFIED", json!([])).await;
    stream
        .line(
            "ADDED",
            json!({"metadata": {"name": "b", "labels": 7, "resourceVersion": "11"}}),
        )
        .await;
    stream.line("UNHEARD OF", json!({})).await;
    stream.event("ADDED", "c", "12").await;
    assert_eq!(fixture.next_event().await, "+c");
    assert_eq!(fixture.health.report().undecodable, 5);
}

#[tokio::test]
async fn r2_one_object_that_is_nested_too_deeply_does_not_hide_others() {
    let deep = (0..120).fold(json!(1), |inner, _| json!({ "a": inner }));
    let object = |spec: &Value| json!({"metadata": {"name": "deep", "resourceVersion": "11"}, "spec": spec});
    let mut fixture = Fixture::pods();
    let items = json!([object(&deep), {"metadata": {"name": "a"}}]);
    let list = json!({"metadata": {"resourceVersion": "10"}, "items": items});
    fixture.next_request().await.reply(200, &list);
    assert_eq!(fixture.next_event().await, "all a");
    let stream = fixture.next_request().await.accept_after("10");
    stream.line("ADDED", object(&json!({}))).await;
    assert_eq!(fixture.next_event().await, "+deep");
    let deeper = (0..10).fold(deep, |inner, _| json!({ "a": inner }));
    stream.line("MODIFIED", object(&deeper)).await;
    assert_eq!(fixture.next_event().await, "-deep");
    assert_eq!(fixture.health.report().undecodable, 2);
}

#[tokio::test]
async fn refused_requests_are_reported_with_a_hint_and_retried() {
    let mut fixture = Fixture::pods();
    let forbidden = json!({"code": 403, "message": "pods is forbidden"});
    fixture.next_request().await.reply(403, &forbidden);
    let again = fixture.next_request().await;
    let error = fixture.health.report().last_error;
    assert!(
        error.contains("403 pods is forbidden; hint: ") && error.contains("ClusterRole"),
        "{error}"
    );
    again.list("10", &["a"], "");
    assert_eq!(fixture.next_event().await, "all a");
    fixture.next_request().await.reply(
        404,
        &json!({"message": "the server could not find the requested resource"}),
    );
    fixture
        .next_request()
        .await
        .accept_after("10")
        .event("ADDED", "b", "11")
        .await;
    assert_eq!(fixture.next_event().await, "+b");
    assert!(fixture.health.report().last_error.contains("is the CRD installed?"));
}

#[tokio::test]
async fn forbidden_objects_are_absent_until_they_may_be_read() {
    let registry = Registry::new();
    let target = WatchTarget {
        may_be_forbidden: true,
        ..WatchTarget::all(pods())
    };
    let mut fixture = Fixture::with(target, &WatchMetrics::new(&registry).unwrap(), SECOND);
    let errors = || {
        let families = registry.gather();
        let mut errors = families
            .iter()
            .filter(|family| family.name() == "controller_sync_errors_total");
        errors.next().unwrap().get_metric()[0]
            .get_counter()
            .get_value()
            .to_string()
    };
    let forbidden = json!({"code": 403, "message": "pods is forbidden"});
    fixture.next_request().await.reply(403, &forbidden);
    assert_eq!(fixture.next_event().await, "all ");
    fixture.next_request().await.reply(403, &forbidden);
    let stream = fixture.watching("10", &["a"]).await;
    assert_eq!(errors(), "0", "alerts count errors");
    // A permission that is lost later removes nothing.
    stream.line("ERROR", gone()).await;
    fixture.next_request().await.reply(403, &forbidden);
    drop(fixture.watching("20", &["b"]).await);
    assert_eq!(errors(), "1");
}

#[tokio::test]
async fn the_first_watch_that_succeeds_again_wakes_the_others() {
    let metrics = WatchMetrics::new(&Registry::new()).unwrap();
    let [mut pods, mut services] = ["pods", "services"].map(|plural| {
        let target = WatchTarget::all(ApiResource {
            plural: plural.into(),
            ..pods()
        });
        // The delays of this test are longer than its time limit.
        Fixture::with(target, &metrics, Duration::from_mins(10))
    });
    let unavailable = json!({"code": 503, "message": "starting"});
    pods.next_request().await.reply(503, &unavailable);
    let services_request = services.next_request().await;
    pods.waits().await;
    services.health.failed("refused");
    services_request.list("10", &["a"], "");
    assert_eq!(services.next_event().await, "all a");
    pods.next_request().await.list("10", &["b"], "");
    assert_eq!(pods.next_event().await, "all b");
}

#[test]
fn retries_back_off_up_to_thirty_seconds() {
    let refused = Failure::Unreachable("no route".into());
    let waits = |seed: u64| -> Vec<Duration> {
        let mut machine = Machine::<()>::new(seed);
        (0..9).map(|_| machine.failed(&refused)).collect()
    };
    let seeds = (0..100).map(|number: u64| waits(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let all: Vec<Vec<Duration>> = seeds.collect();
    let bounds = |attempt: usize| {
        let waits = all.iter().map(|waits| waits[attempt]);
        (waits.clone().min().unwrap(), waits.max().unwrap())
    };
    let first = Duration::from_millis(800);
    assert_eq!(bounds(0), (first / 8, first));
    assert_eq!(bounds(1), (first / 4, first * 2));
    assert_eq!(bounds(8), (Duration::from_millis(3750), Duration::from_secs(30)));
    let mut machine = Machine::<()>::new(7);
    machine.progress("1");
    let gone = Failure::Gone(String::new());
    assert_eq!(
        machine.failed(&gone),
        Duration::ZERO,
        "one expired version is retried at once"
    );
    assert!(
        machine.failed(&gone) >= Duration::from_millis(100),
        "but not at every attempt"
    );
    machine.progress("2");
    assert_eq!(machine.ended(Duration::ZERO), Duration::ZERO);
    assert!(
        machine.ended(Duration::ZERO) >= Duration::from_millis(100),
        "a stream that ends at once fails"
    );
    assert_eq!(machine.ended(Duration::from_secs(5)), Duration::ZERO);
}

#[tokio::test]
async fn metadata_watches_request_partial_objects() {
    let target = WatchTarget {
        metadata_only: true,
        labels: Some("a=b".into()),
        ..WatchTarget::all(pods())
    };
    assert_eq!(target.name(), "pods?a=b");
    let mut fixture = Fixture::new(target);
    let list = fixture.next_request().await;
    assert!(list.accept.contains("as=PartialObjectMetadataList"), "{}", list.accept);
    assert!(list.has("labelSelector=a%3Db"), "{}", list.query);
    list.list("1", &[], "");
    assert_eq!(fixture.next_event().await, "all ");
    let watch = fixture.next_request().await;
    assert!(watch.accept.contains("as=PartialObjectMetadata;"), "{}", watch.accept);
    watch.accept_after("1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn other_tasks_continue_while_a_page_is_parsed() {
    let (began, mut parsing) = mpsc::channel(1);
    let (proceed, proceeds) = std::sync::mpsc::sync_channel(1);
    let proceeds = Mutex::new(proceeds);
    let convert = move |object: Object| {
        began.try_send(()).expect("one object");
        let proceeded = proceeds.lock().expect("one user").recv_timeout(Duration::from_secs(30));
        proceeded.expect("the other task of this thread continues");
        object
    };
    let metrics = WatchMetrics::new(&Registry::new()).unwrap();
    let mut fixture = Fixture::converting(WatchTarget::all(pods()), &metrics, Duration::from_secs(1), convert);
    fixture.next_request().await.list("1", &["a"], "");
    parsing.recv().await.expect("a page");
    Tasks::default().spawn("other task", async move {
        proceed.send(()).expect("the page is parsed");
    });
    assert_eq!(fixture.next_event().await, "all a");
}
