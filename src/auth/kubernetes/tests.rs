use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use ::kube::client::Body;
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{HeaderMap, HeaderValue, Request, Response};
use serde_json::{Value, json};

use super::*;

/// Requests to an API server, and its responses.
struct Server {
    asked: Arc<AtomicUsize>,
    client: Client,
}

/// A server that answers with a status code and a body, after a while.
fn server(code: u16, answer: Value, delay: Duration) -> Server {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = asked.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        counter.fetch_add(1, Ordering::SeqCst);
        assert_eq!(request.uri().path(), "/apis/authentication.k8s.io/v1/tokenreviews");
        let body = answer.to_string();
        async move {
            tokio::time::sleep(delay).await;
            let answer = Response::builder().status(code).body(Body::from(body.into_bytes()));
            Ok::<_, std::convert::Infallible>(answer.expect("an answer"))
        }
    });
    Server {
        asked,
        client: Client::new(service, "default"),
    }
}

impl Server {
    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn reviewed(status: Value) -> Value {
    json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "metadata": {}, "spec": {"token": ""},
        "status": status})
}

fn reviews() -> Value {
    json!({"authenticated": true, "audiences": ["istio-ca"], "user": {
        "username": "system:serviceaccount:default:reviews",
        "groups": ["system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"],
        "extra": {"authentication.kubernetes.io/pod-name": ["reviews-1"],
            "authentication.kubernetes.io/pod-uid": ["u-1"]},
    }})
}

fn authenticator(servers: &[(&str, &Server)]) -> KubernetesTokens {
    authenticator_for(&["istio-ca".into()], servers)
}

fn authenticator_for(audiences: &[SmolStr], servers: &[(&str, &Server)]) -> KubernetesTokens {
    let map: BTreeMap<_, _> = servers
        .iter()
        .map(|(id, server)| (ClusterId::from(*id), server.client.clone()))
        .collect();
    let aliases = BTreeMap::from([("alias".into(), "Kubernetes".into())]);
    let clients = Clients::new("Kubernetes".into(), aliases, watch::channel(Arc::new(map)).1);
    KubernetesTokens::new(clients, audiences, watch::channel(Arc::default()).1)
}

/// A token that expires so many seconds from now.
fn token(seconds: i64) -> String {
    let now = environment::wall_clock()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("a time after 1970");
    let claims = json!({"exp": now.as_secs() as i64 + seconds, "sub": "system:serviceaccount:default:reviews"});
    format!("e30.{}.c2ln", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()))
}

async fn ask(authenticator: &KubernetesTokens, token: &str, cluster: &str) -> Result<Caller, AuthenticationError> {
    ask_from(None, authenticator, token, cluster).await
}

async fn ask_from(
    address: Option<SocketAddr>,
    authenticator: &KubernetesTokens,
    token: &str,
    cluster: &str,
) -> Result<Caller, AuthenticationError> {
    let mut headers = HeaderMap::new();
    let bearer = HeaderValue::from_str(&format!("Bearer {token}")).expect("a value");
    headers.insert("authorization", bearer);
    headers.insert("clusterid", HeaderValue::from_str(cluster).expect("a value"));
    let credentials = Credentials {
        address,
        is_tls: true,
        certificate: None,
        headers: &headers,
    };
    authenticator.authenticate(credentials).await
}

#[tokio::test]
async fn authenticated_tokens_yield_the_service_account() {
    let server = server(201, reviewed(reviews()), Duration::ZERO);
    let authenticator = authenticator(&[("Kubernetes", &server)]);
    let caller = ask(&authenticator, &token(60), "").await.expect("a caller");
    assert_eq!(caller.identities, ["spiffe://cluster.local/ns/default/sa/reviews"]);
    let info = caller.kubernetes.expect("the API server was asked");
    assert_eq!((info.pod_name.as_str(), info.pod_uid.as_str()), ("reviews-1", "u-1"));
    assert_eq!(info.cluster, "Kubernetes");
    let until = caller.expires_at.expect("tokens expire");
    let left = until.duration_since(environment::wall_clock()).expect("in the future");
    assert!(left > Duration::from_secs(55) && left <= Duration::from_mins(1));
}

#[tokio::test]
async fn rejected_tokens_are_invalid() {
    let with = |path: &str, value: Value| {
        let mut status = reviews();
        *status.pointer_mut(path).expect("a field") = value;
        status
    };
    let cases = [
        ("not authenticated", with("/authenticated", json!(false))),
        (
            "wrong audience",
            with("/audiences", json!(["https://kubernetes.default.svc"])),
        ),
        ("a server that knows no audiences", with("/audiences", json!([]))),
        ("a user", with("/user/groups", json!(["system:authenticated"]))),
        ("a node", with("/user/username", json!("system:node:a:b"))),
        (
            "an odd name",
            with("/user/username", json!("system:serviceaccount:a/sa/b:c")),
        ),
        (
            "an error",
            json!({"authenticated": true, "error": "expired", "audiences": ["istio-ca"]}),
        ),
        ("nothing", json!({})),
    ];
    for (what, status) in cases {
        let server = server(201, reviewed(status), Duration::ZERO);
        let authenticator = authenticator(&[("Kubernetes", &server)]);
        let refused = ask(&authenticator, &token(60), "").await;
        assert!(
            matches!(refused, Err(AuthenticationError::Invalid(_))),
            "{what}: {refused:?}"
        );
        assert_eq!(authenticator.cache.sizes(), (0, 0), "{what}: refusals are not kept");
    }
}

#[tokio::test]
async fn r11_without_audiences_no_token_is_accepted() {
    for accepted in [json!(["https://kubernetes.default.svc"]), json!([])] {
        let mut status = reviews();
        status["audiences"] = accepted;
        let server = server(201, reviewed(status), Duration::ZERO);
        for audiences in [&[][..], &[SmolStr::default()]] {
            let authenticator = authenticator_for(audiences, &[("Kubernetes", &server)]);
            let refused = ask(&authenticator, &token(60), "").await;
            assert!(matches!(refused, Err(AuthenticationError::Invalid(_))), "{refused:?}");
        }
    }
}

#[tokio::test]
async fn an_api_server_that_fails_is_not_the_callers_fault() {
    let status =
        |code: u16| json!({"kind": "Status", "status": "Failure", "message": "no", "reason": "x", "code": code});
    for code in [401, 403, 429, 500, 503] {
        let server = server(code, status(code), Duration::ZERO);
        let refused = ask(&authenticator(&[("Kubernetes", &server)]), &token(60), "").await;
        assert!(
            matches!(refused, Err(AuthenticationError::Unavailable(_))),
            "{code}: {refused:?}"
        );
    }
    let server = server(400, status(400), Duration::ZERO);
    let refused = ask(&authenticator(&[("Kubernetes", &server)]), &token(60), "").await;
    assert!(matches!(refused, Err(AuthenticationError::Invalid(_))), "{refused:?}");
}

#[tokio::test]
async fn tokens_are_reviewed_by_the_callers_cluster() {
    let (own, other) = (
        server(201, reviewed(reviews()), Duration::ZERO),
        server(201, reviewed(json!({"authenticated": false})), Duration::ZERO),
    );
    let authenticator = authenticator(&[("Kubernetes", &own), ("remote", &other)]);
    assert!(ask(&authenticator, &token(60), "alias").await.is_ok());
    assert!(
        ask(&authenticator, &token(60), "remote").await.is_err(),
        "a token of another cluster is not valid"
    );
    assert_eq!((own.asked(), other.asked()), (1, 1));
    let refused = ask(&authenticator, &token(60), "elsewhere")
        .await
        .expect_err("no such cluster");
    assert!(
        refused.to_string().contains("known clusters are Kubernetes, remote"),
        "{refused}"
    );
}

#[tokio::test]
async fn malformed_tokens_are_not_reviewed() {
    let server = server(201, reviewed(reviews()), Duration::ZERO);
    let authenticator = authenticator(&[("Kubernetes", &server)]);
    for bad in ["x", "a.b.c", &token(-1)] {
        assert!(matches!(
            ask(&authenticator, bad, "").await,
            Err(AuthenticationError::Invalid(_))
        ));
    }
    assert_eq!(server.asked(), 0);
}

#[tokio::test]
async fn concurrent_reviews_of_a_token_are_shared() {
    let server = server(201, reviewed(reviews()), Duration::from_millis(50));
    let authenticator = authenticator(&[("Kubernetes", &server)]);
    let token = token(60);
    let all = (0..20).map(|_| ask(&authenticator, &token, ""));
    let all = futures::future::join_all(all).await;
    assert!(all.iter().all(Result::is_ok));
    assert!(ask(&authenticator, &token, "").await.is_ok());
    assert_eq!(server.asked(), 1, "merged, then remembered");
    assert_eq!(authenticator.cache.sizes(), (1, 0));
    assert!(ask(&authenticator, &self::token(61), "").await.is_ok());
    assert_eq!(server.asked(), 2, "another token is another question");
}

#[tokio::test]
async fn an_abandoned_review_is_cancelled_and_restarted() {
    let server = server(201, reviewed(reviews()), Duration::from_millis(50));
    let authenticator = authenticator(&[("Kubernetes", &server)]);
    let token = token(60);
    let mut abandoned = Box::pin(ask(&authenticator, &token, ""));
    while server.asked() == 0 {
        assert!(futures::poll!(abandoned.as_mut()).is_pending());
        tokio::task::yield_now().await;
    }
    drop(abandoned);
    assert!(ask(&authenticator, &token, "").await.is_ok());
    assert_eq!(server.asked(), 2);
}

#[tokio::test]
async fn one_address_does_not_use_all_reviews() {
    let server = server(201, reviewed(reviews()), Duration::from_hours(1));
    let authenticator = authenticator(&[("Kubernetes", &server)]);
    let address = |last: u8| Some(SocketAddr::from(([10, 0, 0, last], 1)));
    let tokens: Vec<String> = (1..=MAX_CONCURRENT_REVIEWS as i64).map(|n| token(60 * n)).collect();
    let asked = tokens
        .iter()
        .map(|token| Box::pin(ask_from(address(1), &authenticator, token, "")));
    let mut asked: Vec<_> = asked.collect();
    for one in &mut asked {
        assert!(futures::poll!(one).is_pending());
        // Without a pause, tokio lets a task wait that has used many of its resources.
        tokio::task::yield_now().await;
    }
    let left = MAX_CONCURRENT_REVIEWS - MAX_REVIEWS_PER_ADDRESS;
    let available = || authenticator.permits.available("Kubernetes".into());
    assert_eq!(available(), left);
    let token = token(30);
    let mut other = std::pin::pin!(ask_from(address(2), &authenticator, &token, ""));
    assert!(futures::poll!(other.as_mut()).is_pending());
    assert_eq!(available(), left - 1);
    assert_eq!(
        authenticator.permits.available("other".into()),
        MAX_CONCURRENT_REVIEWS,
        "another API server may answer"
    );
}
