//! The service with fake authenticators and a fake signer.

use std::{collections::BTreeMap, convert::Infallible, sync::Mutex};

use http::{HeaderMap, Request};
use http_body::Frame;
use http_body_util::{Full, StreamBody};

use super::*;
use crate::{
    auth::{AuthenticationError, Authenticator, CallerSource, Credentials},
    rpc::{Peer, PreAuthLimiter, framing},
};

/// Authenticates by the header `caller`.
struct HeaderAuthenticator;

impl Authenticator for HeaderAuthenticator {
    fn name(&self) -> &'static str {
        "header"
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        let name = |headers: &HeaderMap| {
            headers
                .get("caller")
                .and_then(|name| name.to_str().ok())
                .map(SmolStr::new)
        };
        let caller = match name(credentials.headers) {
            None => Err(AuthenticationError::Missing("header")),
            Some(name) if name == "slow" => return futures::future::pending().boxed(),
            Some(name) if name == "away" => Err(AuthenticationError::Unavailable("away".into())),
            Some(name) => Ok(Caller {
                source: CallerSource::IdToken,
                identities: name.split(',').filter(|id| !id.is_empty()).map(SmolStr::new).collect(),
                kubernetes: None,
                expires_at: None,
            }),
        };
        async { caller }.boxed()
    }
}

#[derive(Default)]
struct FakeSigner {
    asked: Mutex<Vec<SigningRequest>>,
    error: Option<SignErrorKind>,
}

impl Signer for FakeSigner {
    fn sign(&self, request: SigningRequest) -> BoxFuture<'_, Result<SignedCertificate, SignError>> {
        self.asked.lock().expect("an unpoisoned lock").push(request);
        let answer = match self.error {
            Some(kind) => Err(SignError {
                kind,
                text: "no".into(),
            }),
            None => Ok(SignedCertificate {
                chain: vec!["leaf\n".into(), "ca\n".into()],
                roots: "a\nb\n".into(),
            }),
        };
        async { answer }.boxed()
    }
}

struct Fixture {
    service: CertificateService,
    signer: Arc<FakeSigner>,
    registry: Registry,
}

impl Fixture {
    fn new(signer: FakeSigner) -> Self {
        Self::with(signer, Box::new(|_, _| Err("not on its node".into())))
    }

    fn with(signer: FakeSigner, may_impersonate: MayImpersonate) -> Self {
        let (signer, registry) = (Arc::new(signer), Registry::new());
        let authenticators = Authenticators::new(vec![Box::new(HeaderAuthenticator)]);
        let domains = watch::channel(Arc::new(TrustDomains::default())).1;
        let service = CertificateService::new(authenticators, signer.clone(), domains, may_impersonate, &registry);
        Self {
            service: service.expect("an empty registry").accepting_plaintext(true),
            signer,
            registry,
        }
    }

    async fn ask(&self, caller: &str, request: &IstioCertificateRequest) -> Result<Vec<String>, Status> {
        self.send(caller, &request.encode_to_vec()).await
    }

    async fn send(&self, caller: &str, message: &[u8]) -> Result<Vec<String>, Status> {
        let body = Full::new(framing::framed(message).expect("a message within the size limit"));
        let mut request = Request::post(CREATE_CERTIFICATE);
        if !caller.is_empty() {
            request = request.header("caller", caller);
        }
        let answer = self
            .service
            .call(Call::new(request.body(body).expect("a request")))
            .await?;
        let response = IstioCertificateResponse::decode(answer).expect("a response");
        Ok(response.cert_chain)
    }

    /// Starts more calls than are served, without messages.
    async fn calls_without_message(&self, caller: &str) -> Vec<BoxFuture<'_, Result<Bytes, Status>>> {
        let mut calls = Vec::new();
        for _ in 0..=MAX_CONCURRENT_CALLS {
            let body = StreamBody::new(futures::stream::pending::<Result<Frame<Bytes>, Infallible>>());
            let request = Request::post(CREATE_CERTIFICATE).header("caller", caller).body(body);
            let mut call = self.service.call(Call::new(request.expect("a request")));
            assert!(futures::poll!(&mut call).is_pending());
            calls.push(call);
            // Without a pause, tokio lets a task wait that has used many of its resources.
            tokio::task::yield_now().await;
        }
        calls
    }

    fn counts(&self) -> BTreeMap<String, u64> {
        let families = self.registry.gather();
        let counts = families.iter().filter_map(|family| {
            let count: f64 = family
                .get_metric()
                .iter()
                .map(|metric| metric.get_counter().get_value())
                .sum();
            let name = family.name().strip_prefix("citadel_server_")?.strip_suffix("_count")?;
            (count > 0.0).then(|| (name.to_owned(), count as u64))
        });
        counts.collect()
    }
}

fn request(metadata: &[(&str, &str)]) -> IstioCertificateRequest {
    let fields = metadata.iter().map(|(name, text)| {
        let kind = Some(Kind::StringValue((*text).to_owned()));
        ((*name).to_owned(), prost_types::Value { kind })
    });
    IstioCertificateRequest {
        csr: "csr".into(),
        validity_duration: 60,
        metadata: Some(prost_types::Struct {
            fields: fields.collect(),
        }),
    }
}

const WEB: &str = "spiffe://cluster.local/ns/default/sa/web";

#[tokio::test]
async fn the_roots_are_the_last_entry() {
    let fixture = Fixture::new(FakeSigner::default());
    let chain = fixture
        .ask(WEB, &request(&[(CERT_SIGNER, "mine")]))
        .await
        .expect("a signed certificate");
    assert_eq!(chain, ["leaf\n", "ca\n", "a\nb\n"]);
    let asked = fixture.signer.asked.lock().expect("an unpoisoned lock");
    let expected = SigningRequest {
        csr: b"csr".to_vec(),
        identities: vec![WEB.into()],
        lifetime: Some(Duration::from_mins(1)),
        signer: "mine".into(),
    };
    assert_eq!(*asked, [expected]);
    assert_eq!(
        fixture.counts(),
        BTreeMap::from([("csr".into(), 1), ("success_cert_issuance".into(), 1)])
    );
}

#[tokio::test]
async fn r11_unauthenticated_callers_get_no_certificate() {
    let fixture = Fixture::new(FakeSigner::default());
    for (caller, code) in [
        ("", Code::Unauthenticated),
        (",", Code::Unauthenticated),
        ("away", Code::Unavailable),
    ] {
        let status = fixture.ask(caller, &request(&[])).await.expect_err("refused");
        assert_eq!(status.code(), code, "{caller}");
        assert!(status.message().starts_with("request authenticate failure"), "{status}");
    }
    assert!(fixture.signer.asked.lock().expect("an unpoisoned lock").is_empty());
    let counts = [("authentication_failure", 2), ("csr", 3), ("id_extraction_err", 1)];
    assert_eq!(
        fixture.counts(),
        counts.map(|(name, count)| (name.to_owned(), count)).into()
    );
}

#[tokio::test]
async fn callers_whose_credentials_cannot_be_checked_violate_nothing() {
    let fixture = Fixture::new(FakeSigner::default());
    let limiter = PreAuthLimiter::new(1);
    let connection = limiter.register([10, 0, 0, 1].into()).expect("an empty limiter");
    for (caller, is_closed) in [("away", false), (",", true)] {
        for _ in 0..200 {
            let request = Request::post(CREATE_CERTIFICATE)
                .header("caller", caller)
                .extension(connection.clone())
                .body(Full::new(Bytes::new()));
            let call = Call::new(request.expect("a request"));
            fixture.service.call(call).await.expect_err("refused");
        }
        assert_eq!(connection.evicted().now_or_never().is_some(), is_closed, "{caller}");
    }
}

#[tokio::test]
async fn r11_callers_without_tls_get_no_certificate() {
    let mut fixture = Fixture::new(FakeSigner::default());
    fixture.service = fixture.service.accepting_plaintext(false);
    let call = |is_tls: bool| {
        let message = framing::framed(&request(&[]).encode_to_vec()).expect("a message within the size limit");
        let peer = Peer {
            is_tls,
            ..Peer::plaintext(([10, 0, 0, 1], 1).into())
        };
        let request = Request::post(CREATE_CERTIFICATE).header("caller", WEB).extension(peer);
        Call::new(request.body(Full::new(message)).expect("a request"))
    };
    let status = fixture.service.call(call(false)).await.expect_err("refused");
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unauthenticated, "request authenticate failure")
    );
    fixture.service.call(call(true)).await.expect("a signed certificate");
    let counts = [("authentication_failure", 1), ("csr", 2), ("success_cert_issuance", 1)];
    assert_eq!(
        fixture.counts(),
        counts.map(|(name, count)| (name.to_owned(), count)).into()
    );
}

#[tokio::test]
async fn r11_impersonation_requires_authorization() {
    let asked = request(&[(IMPERSONATED, "spiffe://cluster.local/ns/default/sa/other")]);
    let fixture = Fixture::new(FakeSigner::default());
    let status = fixture.ask(WEB, &asked).await.expect_err("refused");
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(status.message(), "request impersonation authentication failure");
    assert!(fixture.signer.asked.lock().expect("an unpoisoned lock").is_empty());

    let fixture = Fixture::with(FakeSigner::default(), Box::new(|_, _| Ok(())));
    fixture.ask(WEB, &asked).await.expect("a signed certificate");
    let asked = fixture.signer.asked.lock().expect("an unpoisoned lock");
    assert_eq!(asked[0].identities, ["spiffe://cluster.local/ns/default/sa/other"]);
}

#[tokio::test]
async fn r11_identities_of_other_trust_domains_are_not_certified() {
    let fixture = Fixture::new(FakeSigner::default());
    let answer = fixture.ask("spiffe://elsewhere/ns/a/sa/b", &request(&[])).await;
    assert_eq!(answer.expect_err("not ours").code(), Code::Unauthenticated);
    assert!(
        fixture
            .ask("spiffe://cluster.local/ns/a/sa/b", &request(&[]))
            .await
            .is_ok()
    );
    assert_eq!(fixture.counts()["authentication_failure"], 1);
}

#[tokio::test]
async fn errors_have_istios_codes() {
    for (kind, code) in [
        (SignErrorKind::Csr, Code::InvalidArgument),
        (SignErrorKind::Ttl, Code::InvalidArgument),
        (SignErrorKind::NotReady, Code::Internal),
        (SignErrorKind::Generation, Code::Internal),
    ] {
        let error = Some(kind);
        let fixture = Fixture::new(FakeSigner {
            error,
            ..FakeSigner::default()
        });
        let status = fixture.ask(WEB, &request(&[])).await.expect_err("refused");
        assert_eq!((status.code(), status.message()), (code, "CSR signing error (no)"));
        assert_eq!(fixture.counts()["csr_sign_err"], 1);
    }
    let fixture = Fixture::new(FakeSigner::default());
    let status = fixture.send(WEB, b"\xff").await.expect_err("no message");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(fixture.counts()["csr_parsing_err"], 1);
    let status = fixture
        .send(WEB, &vec![0; MAX_REQUEST_BYTES + 1])
        .await
        .expect_err("too large");
    assert_eq!(status.code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn concurrent_calls_are_bounded() {
    let fixture = Fixture::new(FakeSigner::default());
    let all = fixture
        .service
        .calls
        .try_acquire_many(MAX_CONCURRENT_CALLS as u32)
        .expect("none in progress");
    let status = fixture.ask(WEB, &request(&[])).await.expect_err("too many");
    assert_eq!(status.code(), Code::ResourceExhausted);
    drop(all);
    fixture.ask(WEB, &request(&[])).await.expect("a signed certificate");
}

#[tokio::test]
async fn calls_that_wait_for_authentication_do_not_delay_others() {
    let fixture = Fixture::new(FakeSigner::default());
    let _slow = fixture.calls_without_message("slow").await;
    fixture.ask(WEB, &request(&[])).await.expect("a signed certificate");
}

#[tokio::test]
async fn calls_of_one_identity_do_not_delay_others() {
    let fixture = Fixture::new(FakeSigner::default());
    let silent = fixture.calls_without_message(WEB).await;
    assert_eq!(
        fixture.service.calls.available_permits(),
        MAX_CONCURRENT_CALLS - MAX_CALLS_PER_IDENTITY
    );
    let asked = request(&[]);
    let other = "spiffe://cluster.local/ns/default/sa/other";
    fixture.ask(other, &asked).await.expect("a signed certificate");
    let message = framing::framed(&asked.encode_to_vec()).expect("a message within the size limit");
    let elsewhere = Request::post(CREATE_CERTIFICATE)
        .header("caller", WEB)
        .extension(Peer::plaintext(([10, 0, 0, 1], 1).into()))
        .body(Full::new(message));
    let elsewhere = fixture.service.call(Call::new(elsewhere.expect("a request")));
    elsewhere.await.expect("a signed certificate");
    let mut own = std::pin::pin!(fixture.ask(WEB, &asked));
    assert!(futures::poll!(own.as_mut()).is_pending());
    drop(silent);
    own.await.expect("a signed certificate");
}

#[test]
fn zero_and_negative_lifetimes_mean_the_default() {
    assert_eq!([-1, 0, 1].map(lifetime), [None, None, Some(Duration::from_secs(1))]);
    assert!(lifetime(i64::MAX).is_some());
}
