//! Who is served: callers who are known, as long as they are, and only as what they are.

use futures::future::BoxFuture;
use http::Request;

use super::*;
use crate::auth::{AuthenticationError, Authenticator, CallerSource, Credentials, tls::PeerCertificate};
use crate::rpc::{Call, body::FlatBody, framing};

const WEB: &str = "spiffe://cluster.local/ns/default/sa/web";

/// Knows whoever has a certificate, and, for so long, who shows a token that is an identity.
struct Doorman(Duration);

impl Authenticator for Doorman {
    fn name(&self) -> &'static str {
        "doorman"
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

fn security(plaintext: bool, check: bool) -> Security {
    Security {
        authenticators: Authenticators::new(vec![Box::new(Doorman(Duration::from_hours(1)))]),
        plaintext,
        check,
    }
}

fn secured(security: Security) -> Bed {
    let mut bed = Bed::new(ServerOptions::default());
    bed.server = bed.server.clone().with_security(security);
    bed.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    bed
}

fn tls(certificate: Option<PeerCertificate>) -> Peer {
    Peer {
        address: SocketAddr::from(([127, 0, 0, 1], 1)),
        is_tls: true,
        certificate: certificate.map(Arc::new),
    }
}

async fn over_tls(bed: &Bed, certificate: Option<PeerCertificate>) -> Client {
    bed.client_of(Endpoint::from_static("http://istiod"), tls(certificate))
        .await
}

async fn open(client: &mut Client, token: &'static str) -> Result<Sotw, Status> {
    let (requests, receiver) = mpsc::channel(16);
    let mut request = tonic::Request::new(ReceiverStream::new(receiver));
    if !token.is_empty() {
        request.metadata_mut().insert("token", token.parse().expect("ASCII"));
    }
    let responses = client.stream_aggregated_resources(request).await?;
    Ok(Sotw {
        requests,
        responses: responses.into_inner(),
    })
}

#[tokio::test]
async fn callers_over_tls_have_to_be_known() {
    let bed = secured(security(false, true));
    let mut client = over_tls(&bed, None).await;
    for (token, code) in [("", Code::Unauthenticated), ("away", Code::Unavailable)] {
        let refused = open(&mut client, token).await.err().map(|status| status.code());
        assert_eq!(refused, Some(code), "{token:?}");
    }
    let mut stream = open(&mut client, WEB).await.expect("known");
    stream.ask(ResourceType::Cluster, &[], "").await;
    assert_eq!(texts(&stream.response().await), ["1"]);
    let identity = bed.server.registry().connections()[0].proxy.identity.clone();
    assert_eq!(identity.map(|id| id.service_account), Some("web".into()));
}

#[tokio::test]
async fn plaintext_callers_have_no_identity() {
    let bed = secured(security(false, true));
    let mut stream = open(&mut bed.client().await, WEB).await.expect("nobody asks");
    stream.ask(ResourceType::Cluster, &[], "").await;
    assert_eq!(texts(&stream.response().await), ["1"]);
    assert_eq!(bed.server.registry().connections()[0].proxy.identity, None);

    let bed = secured(security(true, true));
    let refused = open(&mut bed.client().await, "")
        .await
        .err()
        .map(|status| status.code());
    assert_eq!(refused, Some(Code::Unauthenticated), "XDS_AUTH_PLAINTEXT");
}

#[tokio::test]
async fn r10_a_client_is_what_its_caller_may_be() {
    let bed = secured(security(false, true));
    let mut client = over_tls(&bed, None).await;
    for other in [
        "spiffe://cluster.local/ns/other/sa/web",
        "web",
        "spiffe://cluster.local/ns/default",
    ] {
        let mut stream = open(&mut client, other).await.expect("known");
        stream.ask(ResourceType::Cluster, &[], "").await;
        let status = stream.end().await;
        assert_eq!(status.code(), Code::PermissionDenied, "{other}");
        assert!(status.message().starts_with("authorization failed: "), "{status}");
    }
    assert!(bed.server.registry().is_empty());

    let bed = secured(security(false, false));
    let mut stream = open(&mut over_tls(&bed, None).await, "web").await.expect("known");
    stream.ask(ResourceType::Cluster, &[], "").await;
    assert_eq!(
        texts(&stream.response().await),
        ["1"],
        "PILOT_ENABLE_XDS_IDENTITY_CHECK is off"
    );
    assert_eq!(bed.server.registry().connections()[0].proxy.identity, None);
}

#[test]
fn accounts_are_compared_where_the_node_names_one() {
    let metadata = [("SERVICE_ACCOUNT".to_owned(), "web".into())];
    let proxy = crate::generate::proxy::Proxy::new(
        "sidecar~10.0.0.1~web.default~default.svc.cluster.local",
        "",
        metadata.into(),
        SmolStr::default(),
        Default::default(),
    )
    .expect("a node");
    let fits = |id: &str| crate::xds::stream::matching_identity(&proxy, &["dns.name".into(), id.into()]).is_some();
    assert!(fits(WEB));
    assert!(fits("spiffe://elsewhere/ns/default/sa/web"), "any trust domain");
    assert!(!fits("spiffe://cluster.local/ns/default/sa/api"));
    assert!(!fits("spiffe://cluster.local/ns/web/sa/default"));
}

#[tokio::test]
async fn what_has_expired_is_served_no_longer() {
    let soon = Duration::from_secs(3);
    let options = ServerOptions {
        age_grace: Duration::from_millis(100),
        ..ServerOptions::default()
    };
    let mut bed = Bed::new(options);
    bed.server = bed.server.clone().with_security(Security {
        authenticators: Authenticators::new(vec![Box::new(Doorman(soon))]),
        ..security(false, true)
    });
    bed.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    let certificate = PeerCertificate {
        identities: vec![WEB.into()],
        expires_at: environment::wall_clock() + soon,
    };
    let mut clients = [over_tls(&bed, Some(certificate)).await, over_tls(&bed, None).await];
    for (client, token) in clients.iter_mut().zip(["", WEB]) {
        let mut stream = open(client, token).await.expect("known");
        stream.ask(ResourceType::Cluster, &[], "").await;
        assert_eq!(texts(&stream.response().await), ["1"]);
        let code = stream.end().await.code();
        assert!(matches!(code, Code::Unauthenticated | Code::Unavailable), "{code:?}");
    }
    assert!(bed.server.registry().is_empty());
}

#[tokio::test]
async fn r3_connections_and_streams_that_say_nothing_end() {
    let mut options = ServerOptions {
        pre_auth_timeout: Duration::from_millis(200),
        ..ServerOptions::default()
    };
    options.timeouts.first_request = Duration::from_millis(200);
    let mut bed = Bed::new(options);
    bed.server = bed.server.clone().with_security(security(false, true));
    let connections = bed.connections();
    let (ours, theirs) = tokio::io::duplex(16 << 10);
    let ended = tokio::time::timeout(Duration::from_secs(20), connections.connection(theirs, tls(None))).await;
    assert!(ended.is_ok(), "the connection ends");
    assert!(connections.limiter().is_empty());
    drop(ours);

    let mut stream = open(&mut over_tls(&bed, None).await, WEB).await.expect("known");
    assert_eq!(stream.end().await.code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn r3_rapid_resets_end_the_connection() {
    let bed = secured(security(false, true));
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    let connections = bed.connections();
    let serving = connections.connection(theirs, Peer::plaintext(SocketAddr::from(([127, 0, 0, 1], 1))));
    let resetting = async {
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(Executor(bed.environment.tasks.clone()), TokioIo::new(ours))
                .await
                .expect("the server is there");
        bed.environment
            .tasks
            .spawn("client", async move { drop(connection.await) });
        for count in 0.. {
            let request = Request::post(
                "http://istiod/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources",
            )
            .header(header::CONTENT_TYPE, "application/grpc")
            .body(http_body_util::Empty::<Bytes>::new())
            .expect("a request");
            // Who asks for nothing and goes has opened the stream in vain.
            if sender.ready().await.is_err() || sender.send_request(request).await.is_err() {
                return count;
            }
        }
        unreachable!("because counting does not end")
    };
    let ((), count) = tokio::join!(serving, resetting);
    assert!((100..400).contains(&count), "{count}");
}

#[test]
fn streams_run_where_they_are_to_run() {
    let runtime = |name| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(name)
            .enable_all()
            .build()
            .expect("threads")
    };
    let (short, long) = (runtime("short"), runtime("long"));
    long.block_on(async {
        let mut bed = secured(security(false, true));
        bed.server = bed.server.clone().with_stream_runtime(long.handle().clone());
        let listener = short.spawn(TcpListener::bind("127.0.0.1:0"));
        let listener = listener.await.expect("no panic").expect("loopback");
        let address = listener.local_addr().expect("bound");
        let connections = bed.connections().with_stream_runtime(long.handle().clone());
        let serving = connections.clone();
        bed.environment
            .tasks
            .spawn_on(short.handle(), "server", async move { serving.serve(listener).await });
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("a URI");
        let mut client = Client::new(endpoint.connect().await.expect("connected"));
        let mut stream = Sotw::open(&mut client).await.expect("served");
        stream.ask(ResourceType::Cluster, &[], "").await;
        assert_eq!(texts(&stream.response().await), ["1"]);
        bed.publish(2, &[(ResourceType::Cluster, "a", "2")]);
        assert!(connections.limiter().is_empty(), "the connection is admitted");
        // The one runtime has nothing left but to accept; its timers and its poll of sockets go on.
        let metrics = short.metrics();
        for _ in 0..200 {
            if metrics.num_alive_tasks() <= 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(metrics.num_alive_tasks() <= 1, "{}", metrics.num_alive_tasks());
        assert!(bed.environment.tasks.end(Duration::from_secs(5)).await);
    });
}

/// ResponseCache with what it was sent, or panics.
struct Echo;

impl Unary for Echo {
    fn path(&self) -> &'static str {
        "/test.Echo/Say"
    }

    fn call(&self, mut call: Call) -> BoxFuture<'_, Result<Bytes, Status>> {
        async move {
            let message = call.message(100).await?;
            assert!(!message.is_empty(), "nothing to say");
            Ok(message)
        }
        .boxed()
    }
}

#[tokio::test]
async fn calls_are_answered_and_survived() {
    let bed = secured(security(false, true));
    let router = Router::new(bed.server.clone(), vec![Arc::new(Echo)]);
    let say = async |message: &[u8]| {
        let body = http_body_util::Full::new(framing::framed(message).expect("small"));
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
        Some("0".parse().expect("ASCII"))
    );
    assert_eq!(collected.to_bytes(), "\0\0\0\0\x01a");
    assert_eq!(
        say(b"").await.headers()[Status::GRPC_STATUS],
        "13",
        "a panic ends the call alone"
    );
    assert_eq!(say(&[0; 101]).await.headers()[Status::GRPC_STATUS], "8");
}

/// Starts what hyper's client needs.
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
