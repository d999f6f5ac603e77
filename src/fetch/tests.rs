//! Tests with servers on loopback and a scripted resolver.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use hyper_util::client::proxy::matcher::Matcher;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use super::{FetchError, FetchOptions, Fetcher, Resolve};

const PATIENCE: Duration = Duration::from_secs(10);

/// Answers by name; each question takes the next answer, the last one stays.
#[derive(Default)]
struct Names {
    answers: Mutex<BTreeMap<String, Vec<Vec<IpAddr>>>>,
    questions: AtomicUsize,
}

impl Names {
    fn of(answers: &[(&str, &[&[&str]])]) -> Arc<Self> {
        let addresses = |list: &&[&str]| list.iter().map(|ip| ip.parse().expect("an address")).collect();
        let answers = answers
            .iter()
            .map(|(name, lists)| ((*name).to_owned(), lists.iter().map(addresses).collect()));
        Arc::new(Self {
            answers: Mutex::new(answers.collect()),
            questions: AtomicUsize::new(0),
        })
    }
}

impl Resolve for Names {
    fn addresses<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        self.questions.fetch_add(1, Ordering::Relaxed);
        let mut answers = self.answers.lock().expect("an unpoisoned lock");
        let answer = match answers.get_mut(host) {
            Some(list) if list.len() > 1 => Ok(list.remove(0)),
            Some(list) => Ok(list[0].clone()),
            None => Err(io::Error::other("no such name")),
        };
        Box::pin(async move { answer })
    }
}

/// A server that answers every request with the same bytes, and counts connections.
struct Server {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    /// The head of the last request.
    asked: Arc<Mutex<String>>,
    _tasks: JoinSet<()>,
}

impl Server {
    async fn start(ip: &str, answer: impl Into<Vec<u8>>) -> Self {
        Self::start_with(ip, answer, None).await
    }

    async fn start_with(ip: &str, answer: impl Into<Vec<u8>>, tls: Option<TlsAcceptor>) -> Self {
        let ip: IpAddr = ip.parse().expect("an address");
        let listener = TcpListener::bind((ip, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("a listening socket");
        let connections = Arc::new(AtomicUsize::new(0));
        let asked = Arc::new(Mutex::new(String::new()));
        let (answer, counter, heads) = (answer.into(), connections.clone(), asked.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::Relaxed);
                match &tls {
                    None => serve(stream, &answer, &heads).await,
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            serve(stream, &answer, &heads).await;
                        }
                    }
                }
            }
        });
        Self {
            address,
            connections,
            asked,
            _tasks: tasks,
        }
    }

    fn url(&self, host: &str) -> String {
        format!("http://{host}:{}/keys", self.address.port())
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Fails if something has connected. Connections are accepted in order, so the first one must be that of the check.
    async fn assert_unvisited(&self) {
        let visit = async {
            let mut stream = TcpStream::connect(self.address).await?;
            stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await?;
            stream.read_to_end(&mut Vec::new()).await
        };
        let served = tokio::time::timeout(PATIENCE, visit).await;
        assert!(served.is_ok_and(|read| read.is_ok()), "another connection is served");
        assert_eq!(self.connections(), 1, "another connection was served");
    }

    fn asked(&self) -> String {
        self.asked.lock().expect("an unpoisoned lock").clone()
    }
}

async fn serve(mut stream: impl AsyncRead + AsyncWrite + Unpin, answer: &[u8], asked: &Mutex<String>) {
    let head = read_head(&mut stream).await;
    *asked.lock().expect("an unpoisoned lock") = head;
    let _gone = stream.write_all(answer).await;
    let _gone = stream.shutdown().await;
}

async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(head).expect("a text header")
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn moved(to: &str) -> String {
    format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n")
}

fn blocking(ranges: &[&str]) -> FetchOptions {
    FetchOptions {
        blocked: ranges.iter().map(|range| range.parse().expect("a range")).collect(),
        ..FetchOptions::default()
    }
}

fn is_blocked(result: &Result<Bytes, FetchError>) -> bool {
    matches!(result, Err(FetchError::Blocked { .. }))
}

#[tokio::test]
async fn a_document_is_fetched_through_relative_and_absolute_redirects() {
    let last = Server::start("127.0.0.1", ok("keys")).await;
    let first = Server::start(
        "127.0.0.1",
        moved(&format!("//keys.test:{}/a?b=c", last.address.port())),
    )
    .await;
    let names = Names::of(&[("issuer.test", &[&["127.0.0.1"]]), ("keys.test", &[&["127.0.0.1"]])]);
    let fetcher = Fetcher::with_resolver(FetchOptions::default(), names);
    let body = fetcher
        .get(&first.url("issuer.test"), PATIENCE)
        .await
        .expect("a listening server");
    assert_eq!(body, "keys");
    assert!(last.asked().starts_with("GET /a?b=c HTTP/1.1\r\n"), "{}", last.asked());
    assert!(
        last.asked()
            .contains(&format!("host: keys.test:{}\r\n", last.address.port())),
        "{}",
        last.asked()
    );
}

#[tokio::test]
async fn redirects_end() {
    let server = Server::start("127.0.0.1", moved("/keys")).await;
    let fetcher = Fetcher::with_resolver(FetchOptions::default(), Names::of(&[]));
    let result = fetcher.get(&server.url("127.0.0.1"), PATIENCE).await;
    assert!(matches!(result, Err(FetchError::Redirect(_))), "{result:?}");
    assert_eq!(server.connections(), 11);
}

#[tokio::test]
async fn r6_an_address_is_blocked_however_it_is_written() {
    let server = Server::start("127.0.0.1", ok("secret")).await;
    let names = Names::of(&[
        ("inside.test", &[&["127.0.0.1"]]),
        ("mapped.test", &[&["::ffff:127.0.0.1"]]),
        ("unspecified.test", &[&["0.0.0.0"]]),
    ]);
    let fetcher = Fetcher::with_resolver(blocking(&["127.0.0.0/8", "::1/128"]), names);
    let spellings = [
        "127.0.0.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "127.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::127.0.0.1]",
        "[2002:7f00:1::]",
        "0.0.0.0",
        "0",
        "[::]",
        "[::ffff:0.0.0.0]",
        "inside.test",
        "mapped.test",
        "unspecified.test",
        "user:password@inside.test",
    ];
    for host in spellings {
        let result = fetcher.get(&server.url(host), PATIENCE).await;
        assert!(is_blocked(&result), "{host}: {result:?}");
    }
    server.assert_unvisited().await;
}

#[tokio::test]
async fn r6_a_redirect_is_checked_like_the_first_address() {
    let inside = Server::start("127.0.0.2", ok("secret")).await;
    let names = Names::of(&[("inside.test", &[&["127.0.0.2"]])]);
    let fetcher = Fetcher::with_resolver(blocking(&["127.0.0.2/32"]), names);
    for host in ["127.0.0.2", "[::ffff:127.0.0.2]", "inside.test"] {
        let outside = Server::start("127.0.0.1", moved(&inside.url(host))).await;
        let result = fetcher.get(&outside.url("127.0.0.1"), PATIENCE).await;
        assert!(is_blocked(&result), "{host}: {result:?}");
        assert_eq!(outside.connections(), 1);
    }
    inside.assert_unvisited().await;
}

/// A name that resolves to an allowed address when it is checked and to a blocked one later. It is resolved once.
#[tokio::test]
async fn r6_a_name_is_resolved_once_for_check_and_connection() {
    let harmless = Server::start("127.0.0.1", ok("harmless")).await;
    let port = harmless.address.port();
    let inside = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 2), port))
        .await
        .expect("a free port on both addresses");
    let names = Names::of(&[("rebound.test", &[&["127.0.0.1"], &["127.0.0.2"]])]);
    let fetcher = Fetcher::with_resolver(blocking(&["127.0.0.2/32"]), names.clone());
    let url = harmless.url("rebound.test");
    assert_eq!(
        fetcher.get(&url, PATIENCE).await.expect("the first answer is harmless"),
        "harmless"
    );
    assert_eq!(names.questions.load(Ordering::Relaxed), 1);
    let result = fetcher.get(&url, PATIENCE).await;
    assert!(is_blocked(&result), "{result:?}");
    // Connections are accepted in order, so the first one is this one.
    let own = TcpStream::connect(inside.local_addr().expect("a listening socket"))
        .await
        .expect("a connection");
    let (_, visitor) = inside.accept().await.expect("a connection");
    assert_eq!(visitor, own.local_addr().expect("a connected socket"));
}

#[tokio::test]
async fn r6_a_redirect_to_the_same_name_is_resolved_and_checked_again() {
    let names = Names::of(&[("rebound.test", &[&["127.0.0.1"], &["127.0.0.2"]])]);
    let server = Server::start("127.0.0.1", moved("/again")).await;
    let fetcher = Fetcher::with_resolver(blocking(&["127.0.0.2/32"]), names);
    let result = fetcher.get(&server.url("rebound.test"), PATIENCE).await;
    assert!(is_blocked(&result), "{result:?}");
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn r6_of_several_addresses_only_allowed_ones_are_tried() {
    let server = Server::start("127.0.0.1", ok("keys")).await;
    let names = Names::of(&[("both.test", &[&["127.0.0.2", "127.0.0.1"]])]);
    let fetcher = Fetcher::with_resolver(blocking(&["127.0.0.2/32"]), names);
    assert_eq!(
        fetcher
            .get(&server.url("both.test"), PATIENCE)
            .await
            .expect("one allowed address"),
        "keys"
    );
}

#[tokio::test]
async fn r6_blocked_addresses_are_not_requested_through_a_proxy() {
    let proxy = Server::start("127.0.0.1", ok("secret")).await;
    let matcher = Matcher::builder()
        .all(format!("http://127.0.0.1:{}", proxy.address.port()))
        .build();
    let names = Names::of(&[("inside.test", &[&["10.0.0.1"]])]);
    let fetcher = Fetcher::with(blocking(&["10.0.0.0/8", "127.0.0.0/8"]), names, matcher);
    for host in ["inside.test", "10.0.0.1"] {
        let result = fetcher.get(&format!("http://{host}/"), PATIENCE).await;
        assert!(is_blocked(&result), "{host}: {result:?}");
    }
    proxy.assert_unvisited().await;
    // A name that only the proxy can resolve is left to the proxy.
    let body = fetcher
        .get("http://outside.test/a", PATIENCE)
        .await
        .expect("the proxy answers");
    assert_eq!(body, "secret");
    assert!(
        proxy.asked().starts_with("GET http://outside.test/a HTTP/1.1\r\n"),
        "{}",
        proxy.asked()
    );
}

#[tokio::test]
async fn a_body_is_bounded() {
    let options = FetchOptions {
        max_bytes: 1000,
        ..FetchOptions::default()
    };
    let fetcher = Fetcher::with_resolver(options, Names::of(&[]));
    let long = "x".repeat(1001);
    let announced = Server::start("127.0.0.1", ok(&long)).await;
    let until_the_end = Server::start("127.0.0.1", format!("HTTP/1.1 200 OK\r\n\r\n{long}")).await;
    for server in [announced, until_the_end] {
        let result = fetcher.get(&server.url("127.0.0.1"), PATIENCE).await;
        assert_eq!(result, Err(FetchError::TooLarge(1000)));
    }
    let fits = Server::start("127.0.0.1", ok(&long[..1000])).await;
    assert_eq!(
        fetcher
            .get(&fits.url("127.0.0.1"), PATIENCE)
            .await
            .expect("a document within the limit")
            .len(),
        1000
    );
}

#[tokio::test]
async fn a_head_is_bounded() {
    let endless = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(200_000));
    let server = Server::start("127.0.0.1", endless).await;
    let fetcher = Fetcher::with_resolver(FetchOptions::default(), Names::of(&[]));
    let result = fetcher.get(&server.url("127.0.0.1"), PATIENCE).await;
    assert!(matches!(result, Err(FetchError::Http(_))), "{result:?}");
}

#[tokio::test]
async fn a_hanging_server_is_abandoned_after_the_timeout() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let url = format!("http://{}/", listener.local_addr().expect("a listening socket"));
    let fetcher = Fetcher::with_resolver(FetchOptions::default(), Names::of(&[]));
    let timeout = Duration::from_millis(100);
    assert_eq!(fetcher.get(&url, timeout).await, Err(FetchError::Timeout(timeout)));
}

/// The body of an error is not shown: it may come from a server that the user could not reach.
#[tokio::test]
async fn r6_an_error_does_not_repeat_the_answer() {
    let answer = "HTTP/1.1 500 Oops\r\ncontent-length: 6\r\n\r\nsecret";
    let server = Server::start("127.0.0.1", answer).await;
    let fetcher = Fetcher::with_resolver(FetchOptions::default(), Names::of(&[]));
    let result = fetcher.get(&server.url("127.0.0.1"), PATIENCE).await;
    assert_eq!(result, Err(FetchError::Status(500)));
    assert!(!FetchError::Status(500).to_string().contains("secret"));
}

#[tokio::test]
async fn invalid_urls_are_refused() {
    let fetcher = Fetcher::with_resolver(FetchOptions::default(), Names::of(&[]));
    for url in ["", "keys", "file:///etc/passwd", "http://", "gopher://a/"] {
        let result = fetcher.get(url, PATIENCE).await;
        assert!(matches!(result, Err(FetchError::Url(_))), "{url}: {result:?}");
    }
    let result = fetcher.get("http://missing.test/", PATIENCE).await;
    assert!(matches!(result, Err(FetchError::Resolve { .. })), "{result:?}");
}

/// A server's side of TLS for `keys.test`, and its root as PEM.
fn certificate() -> (TlsAcceptor, Bytes) {
    let certified = rcgen::generate_simple_self_signed(vec!["keys.test".to_owned()]).expect("a certificate");
    let key = rustls::pki_types::PrivateKeyDer::try_from(certified.signing_key.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("both versions")
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .expect("a matching key and certificate");
    (TlsAcceptor::from(Arc::new(config)), certified.cert.pem().into())
}

#[tokio::test]
async fn servers_are_verified() {
    let (tls, root) = certificate();
    let server = Server::start_with("127.0.0.1", ok("keys"), Some(tls)).await;
    let names = Names::of(&[("keys.test", &[&["127.0.0.1"]]), ("other.test", &[&["127.0.0.1"]])]);
    let url = |host: &str| format!("https://{host}:{}/", server.address.port());
    let trusting = FetchOptions {
        extra_roots: root,
        ..FetchOptions::default()
    };
    let careless = FetchOptions {
        insecure_skip_verify: true,
        ..FetchOptions::default()
    };
    let trusting = Fetcher::with_resolver(trusting, names.clone());
    let careless = Fetcher::with_resolver(careless, names.clone());
    let distrusting = Fetcher::with_resolver(FetchOptions::default(), names);
    assert_eq!(
        trusting
            .get(&url("keys.test"), PATIENCE)
            .await
            .expect("a trusted server"),
        "keys"
    );
    assert_eq!(
        careless
            .get(&url("other.test"), PATIENCE)
            .await
            .expect("an unverified server"),
        "keys"
    );
    for (fetcher, host) in [(&trusting, "other.test"), (&distrusting, "keys.test")] {
        let result = fetcher.get(&url(host), PATIENCE).await;
        assert!(matches!(result, Err(FetchError::Tls { .. })), "{host}: {result:?}");
    }
}

#[tokio::test]
async fn a_redirect_does_not_leave_tls() {
    let (tls, root) = certificate();
    let plain = Server::start("127.0.0.1", ok("forged")).await;
    let server = Server::start_with("127.0.0.1", moved(&plain.url("127.0.0.1")), Some(tls)).await;
    let options = FetchOptions {
        extra_roots: root,
        ..FetchOptions::default()
    };
    let fetcher = Fetcher::with_resolver(options, Names::of(&[("keys.test", &[&["127.0.0.1"]])]));
    let url = format!("https://keys.test:{}/", server.address.port());
    let result = fetcher.get(&url, PATIENCE).await;
    assert!(matches!(result, Err(FetchError::Redirect(_))), "{result:?}");
    plain.assert_unvisited().await;
}

#[tokio::test]
async fn https_uses_a_connect_tunnel_of_the_proxy() {
    let (tls, root) = certificate();
    let server = Server::start_with("127.0.0.1", ok("keys"), Some(tls)).await;
    let to = server.address;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let proxy = listener.local_addr().expect("a listening socket");
    let asked = Arc::new(Mutex::new(String::new()));
    let heads = asked.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (mut client, _) = listener.accept().await.expect("a client");
        *heads.lock().expect("an unpoisoned lock") = read_head(&mut client).await;
        client
            .write_all(b"HTTP/1.1 200 Connected\r\n\r\n")
            .await
            .expect("a listening socket");
        let mut server = TcpStream::connect(to).await.expect("a listening server");
        let _gone = tokio::io::copy_bidirectional(&mut client, &mut server).await;
    });
    let matcher = Matcher::builder().https(format!("http://user:word@{proxy}")).build();
    let options = FetchOptions {
        extra_roots: root,
        ..FetchOptions::default()
    };
    let fetcher = Fetcher::with(options, Names::of(&[]), matcher);
    assert_eq!(
        fetcher
            .get("https://keys.test/", PATIENCE)
            .await
            .expect("an answer through the tunnel"),
        "keys"
    );
    let head = asked.lock().expect("an unpoisoned lock").to_ascii_lowercase();
    assert!(head.starts_with("connect keys.test:443 http/1.1\r\n"), "{head}");
    assert!(head.contains("proxy-authorization: basic "), "{head}");
}
