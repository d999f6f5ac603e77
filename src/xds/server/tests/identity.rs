//! Tests of authentication: callers are served while their credentials are valid, and only with their own identity.

use futures::future::BoxFuture;
use http::Request;

use super::*;
use crate::auth::{AuthenticationError, Authenticator, CallerSource, Credentials, tls::PeerCertificate};
use crate::rpc::{Call, body::FlatBody, framing};

const WEB: &str = "spiffe://cluster.local/ns/default/sa/web";

/// Accepts any certificate, and any token as an identity that is valid for this time.
struct FakeAuthenticator(Duration);

impl Authenticator for FakeAuthenticator {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        let token = credentials.headers.get("token").and_then(|token| token.to_str().ok());
        let caller = |identities: Vec<SmolStr>, expires_at| Caller {
            source: CallerSource::IdToken,
            identities,
            kubernetes: None,
            expires_at,
        };
        let known = match (credentials.certificate, token) {
            (Some(certificate), _) => Ok(caller(certificate.identities.clone(), Some(certificate.expires_at))),
            (None, Some("away")) => Err(AuthenticationError::Unavailable("away".into())),
            (None, Some(id)) => Ok(caller(vec![id.into()], Some(environment::wall_clock() + self.0))),
            (None, None) => Err(AuthenticationError::Missing("token")),
        };
        async { known }.boxed()
    }
}

fn security(plaintext: bool, checks_identity: bool) -> Security {
    Security {
        authenticators: Authenticators::new(vec![Box::new(FakeAuthenticator(Duration::from_hours(1)))]),
        plaintext,
        checks_identity,
    }
}

fn secured(security: Security) -> Fixture {
    let mut fixture = Fixture::new(&ServerOptions::default());
    fixture.server = fixture.server.clone().with_security(security);
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    fixture
}

fn tls(certificate: Option<PeerCertificate>) -> Peer {
    Peer {
        address: SocketAddr::from(([127, 0, 0, 1], 1)),
        is_tls: true,
        certificate: certificate.map(Arc::new),
    }
}

async fn over_tls(fixture: &Fixture, certificate: Option<PeerCertificate>) -> Client {
    fixture
        .client_of(Endpoint::from_static("http://istiod"), tls(certificate))
        .await
}

async fn open(client: &mut Client, token: &'static str) -> Result<Sotw, Status> {
    let (requests, receiver) = mpsc::channel(16);
    let mut request = tonic::Request::new(ReceiverStream::new(receiver));
    if !token.is_empty() {
        request
            .metadata_mut()
            .insert("token", token.parse().expect("ASCII text"));
    }
    let responses = client.stream_aggregated_resources(request).await?;
    Ok(Sotw {
        requests,
        responses: responses.into_inner(),
    })
}

#[tokio::test]
async fn callers_over_tls_need_authentication() {
    let fixture = secured(security(false, true));
    let mut client = over_tls(&fixture, None).await;
    for (token, code) in [("", Code::Unauthenticated), ("away", Code::Unavailable)] {
        let refused = open(&mut client, token).await.err().map(|status| status.code());
        assert_eq!(refused, Some(code), "{token:?}");
    }
    let mut stream = open(&mut client, WEB).await.expect("an authenticated stream");
    stream.request(ResourceType::Cluster, &[], "").await;
    assert_eq!(texts(&stream.response().await), ["1"]);
    let identity = fixture.server.registry().connections()[0].proxy.identity.clone();
    assert_eq!(identity.map(|id| id.service_account), Some("web".into()));
}

/// Clients behind a gateway share a connection, and retry while the API server is away.
#[tokio::test]
async fn callers_that_cannot_be_authenticated_now_do_not_close_their_connection() {
    let fixture = secured(security(false, true));
    let mut client = over_tls(&fixture, None).await;
    let mut stream = open(&mut client, WEB).await.expect("an authenticated stream");
    stream.request(ResourceType::Cluster, &[], "").await;
    let clusters = stream.response().await;
    stream.request(ResourceType::Cluster, &[], &clusters.nonce).await;
    for _ in 0..200 {
        let refused = open(&mut client, "away").await.err().map(|status| status.code());
        assert_eq!(refused, Some(Code::Unavailable));
    }
    fixture.publish(2, &[(ResourceType::Cluster, "a", "2")]);
    assert_eq!(texts(&stream.response().await), ["2"]);
}

#[tokio::test]
async fn plaintext_callers_have_no_identity() {
    let fixture = secured(security(false, true));
    let mut stream = open(&mut fixture.client().await, WEB).await.expect("no authentication");
    stream.request(ResourceType::Cluster, &[], "").await;
    assert_eq!(texts(&stream.response().await), ["1"]);
    assert_eq!(fixture.server.registry().connections()[0].proxy.identity, None);

    let fixture = secured(security(true, true));
    let refused = open(&mut fixture.client().await, "")
        .await
        .err()
        .map(|status| status.code());
    assert_eq!(refused, Some(Code::Unauthenticated), "XDS_AUTH_PLAINTEXT");
}

#[tokio::test]
async fn r10_a_node_must_match_the_identity_of_its_caller() {
    let fixture = secured(security(false, true));
    let mut client = over_tls(&fixture, None).await;
    for other in [
        "spiffe://cluster.local/ns/other/sa/web",
        "web",
        "spiffe://cluster.local/ns/default",
    ] {
        let mut stream = open(&mut client, other).await.expect("an authenticated stream");
        stream.request(ResourceType::Cluster, &[], "").await;
        let status = stream.end().await;
        assert_eq!(status.code(), Code::PermissionDenied, "{other}");
        assert!(status.message().starts_with("authorization failed: "), "{status}");
    }
    assert!(fixture.server.registry().is_empty());

    let fixture = secured(security(false, false));
    let mut stream = open(&mut over_tls(&fixture, None).await, "web")
        .await
        .expect("an authenticated stream");
    stream.request(ResourceType::Cluster, &[], "").await;
    assert_eq!(
        texts(&stream.response().await),
        ["1"],
        "PILOT_ENABLE_XDS_IDENTITY_CHECK is off"
    );
    assert_eq!(fixture.server.registry().connections()[0].proxy.identity, None);
}

#[test]
fn service_accounts_are_compared_if_the_node_names_one() {
    let metadata = [("SERVICE_ACCOUNT".to_owned(), "web".into())];
    let proxy = crate::generate::proxy::Proxy::new(
        "sidecar~10.0.0.1~web.default~default.svc.cluster.local",
        "",
        metadata.into(),
        SmolStr::default(),
        Default::default(),
    )
    .expect("a node");
    let matches = |id: &str| crate::xds::stream::matching_identity(&proxy, &["dns.name".into(), id.into()]).is_some();
    assert!(matches(WEB));
    assert!(matches("spiffe://elsewhere/ns/default/sa/web"), "any trust domain");
    assert!(!matches("spiffe://cluster.local/ns/default/sa/api"));
    assert!(!matches("spiffe://cluster.local/ns/web/sa/default"));
}

#[tokio::test]
async fn streams_end_when_credentials_expire() {
    let soon = Duration::from_secs(3);
    let options = ServerOptions {
        age_grace: Duration::from_millis(100),
        ..ServerOptions::default()
    };
    let mut fixture = Fixture::new(&options);
    fixture.server = fixture.server.clone().with_security(Security {
        authenticators: Authenticators::new(vec![Box::new(FakeAuthenticator(soon))]),
        ..security(false, true)
    });
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let certificate = PeerCertificate {
        identities: vec![WEB.into()],
        expires_at: environment::wall_clock() + soon,
    };
    let mut clients = [
        over_tls(&fixture, Some(certificate)).await,
        over_tls(&fixture, None).await,
    ];
    for (client, token) in clients.iter_mut().zip(["", WEB]) {
        let mut stream = open(client, token).await.expect("an authenticated stream");
        stream.request(ResourceType::Cluster, &[], "").await;
        assert_eq!(texts(&stream.response().await), ["1"]);
        let code = stream.end().await.code();
        assert!(matches!(code, Code::Unauthenticated | Code::Unavailable), "{code:?}");
    }
    assert!(fixture.server.registry().is_empty());
}

#[tokio::test]
async fn r3_silent_connections_and_streams_time_out() {
    let mut options = ServerOptions {
        pre_auth_timeout: Duration::from_millis(200),
        ..ServerOptions::default()
    };
    options.timeouts.first_request = Duration::from_millis(200);
    let mut fixture = Fixture::new(&options);
    fixture.server = fixture.server.clone().with_security(security(false, true));
    let connections = fixture.connections();
    let (ours, theirs) = tokio::io::duplex(16 << 10);
    let ended = tokio::time::timeout(Duration::from_secs(20), connections.connection(theirs, tls(None))).await;
    assert!(ended.is_ok(), "the connection ends");
    assert!(connections.limiter().is_empty());
    drop(ours);

    let mut stream = open(&mut over_tls(&fixture, None).await, WEB)
        .await
        .expect("an authenticated stream");
    assert_eq!(stream.end().await.code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn r3_rapid_resets_close_the_connection() {
    let fixture = secured(security(false, true));
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    let connections = fixture.connections();
    let serving = connections.connection(theirs, Peer::plaintext(SocketAddr::from(([127, 0, 0, 1], 1))));
    let resetting = async {
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(Executor(fixture.environment.tasks.clone()), TokioIo::new(ours))
                .await
                .expect("a running server");
        fixture
            .environment
            .tasks
            .spawn("client", async move { drop(connection.await) });
        for count in 0.. {
            let request = Request::post(
                "http://istiod/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources",
            )
            .header(header::CONTENT_TYPE, "application/grpc")
            .body(http_body_util::Empty::<Bytes>::new())
            .expect("a request");
            // A stream that is reset without a request is a violation.
            if sender.ready().await.is_err() || sender.send_request(request).await.is_err() {
                return count;
            }
        }
        unreachable!("because the loop has no end")
    };
    let ((), count) = tokio::join!(serving, resetting);
    assert!((100..400).contains(&count), "{count}");
}

#[test]
fn streams_run_on_the_stream_runtime() {
    let runtime = |name| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(name)
            .enable_all()
            .build()
            .expect("a thread")
    };
    let (short, long) = (runtime("short"), runtime("long"));
    long.block_on(async {
        let mut fixture = secured(security(false, true));
        fixture.server = fixture.server.clone().with_stream_runtime(long.handle().clone());
        let listener = short.spawn(TcpListener::bind("127.0.0.1:0"));
        let listener = listener.await.expect("no panic").expect("loopback");
        let address = listener.local_addr().expect("a bound address");
        let connections = fixture.connections().with_stream_runtime(long.handle().clone());
        let serving = connections.clone();
        fixture
            .environment
            .tasks
            .spawn_on(short.handle(), "server", async move { serving.serve(listener).await });
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("a URI");
        let mut client = Client::new(endpoint.connect().await.expect("a connection"));
        let mut stream = Sotw::open(&mut client).await.expect("an accepted stream");
        stream.request(ResourceType::Cluster, &[], "").await;
        assert_eq!(texts(&stream.response().await), ["1"]);
        fixture.publish(2, &[(ResourceType::Cluster, "a", "2")]);
        assert!(connections.limiter().is_empty(), "the connection is admitted");
        // The accepting runtime has no other task left.
        let metrics = short.metrics();
        for _ in 0..200 {
            if metrics.num_alive_tasks() <= 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(metrics.num_alive_tasks() <= 1, "{}", metrics.num_alive_tasks());
        assert!(fixture.environment.tasks.end(Duration::from_secs(5)).await);
    });
}

/// Returns its request, or panics.
struct Echo;

impl Unary for Echo {
    fn path(&self) -> &'static str {
        "/test.Echo/Say"
    }

    fn call(&self, mut call: Call) -> BoxFuture<'_, Result<Bytes, Status>> {
        async move {
            let message = call.message(100).await?;
            assert!(!message.is_empty(), "the message is empty");
            Ok(message)
        }
        .boxed()
    }
}

#[tokio::test]
async fn unary_calls_are_answered_and_may_panic() {
    let fixture = secured(security(false, true));
    let router = Router::new(fixture.server.clone(), vec![Arc::new(Echo)]);
    let say = async |message: &[u8]| {
        let body = http_body_util::Full::new(framing::framed(message).expect("a message within the size limit"));
        let request = Request::post("/test.Echo/Say")
            .header(header::CONTENT_TYPE, "application/grpc")
            .body(body)
            .expect("a request");
        router.handle(request).await
    };
    let collected = http_body_util::BodyExt::collect(FlatBody::from(say(b"a").await.into_body()));
    let collected = collected.await.expect("cannot fail");
    assert_eq!(
        collected
            .trailers()
            .map(|trailers| trailers[Status::GRPC_STATUS].clone()),
        Some("0".parse().expect("ASCII text"))
    );
    assert_eq!(collected.to_bytes(), "\0\0\0\0\x01a");
    assert_eq!(
        say(b"").await.headers()[Status::GRPC_STATUS],
        "13",
        "a panic ends this call only"
    );
    assert_eq!(say(&[0; 101]).await.headers()[Status::GRPC_STATUS], "8");
}

/// The executor of hyper's client.
#[derive(Clone)]
struct Executor(Tasks);

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn("client", task);
    }
}
