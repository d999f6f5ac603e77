use std::sync::{
    Mutex as StdMutex,
    atomic::{AtomicU64, Ordering},
};

use http::{HeaderMap, HeaderValue};
use jsonwebtoken::EncodingKey;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde_json::{Value, json};

use super::*;

const ISSUER: &str = "https://issuer.example.com";

/// An issuer with one key, and what it serves.
struct Issuer {
    key: EncodingKey,
    jwk: Value,
    asked: Arc<StdMutex<Vec<String>>>,
    served: Arc<StdMutex<Result<Value, String>>>,
}

fn issuer(kid: &str) -> Issuer {
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key");
    let key = EncodingKey::from_ec_der(&pair.serialize_der());
    let mut jwk =
        serde_json::to_value(Jwk::from_encoding_key(&key, Algorithm::ES256).expect("a key")).expect("valid JSON");
    jwk["kid"] = json!(kid);
    let served = Ok(json!({"keys": [{"kty": "odd"}, jwk.clone()]}));
    Issuer {
        key,
        jwk,
        asked: Arc::default(),
        served: Arc::new(StdMutex::new(served)),
    }
}

/// Seconds that have gone by since the clock was looked at first. Tests of this file share them.
fn clock() -> (Instant, SystemTime) {
    (environment::now(), environment::wall_clock())
}

fn seconds_from_now(seconds: i64) -> i64 {
    let now = environment::wall_clock()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("a time after 1970");
    now.as_secs() as i64 + seconds
}

fn claims() -> Value {
    json!({"iss": ISSUER, "sub": "system:serviceaccount:default:reviews", "aud": ["other", "istio-ca"],
        "exp": seconds_from_now(60)})
}

impl Issuer {
    fn authenticator(&self, jwks_uri: &str) -> OidcTokens {
        let (asked, served) = (self.asked.clone(), self.served.clone());
        let get: Fetch = Arc::new(move |url| {
            asked.lock().expect("no panic").push(url.clone());
            let answer = match url.strip_suffix("/.well-known/openid-configuration") {
                Some(issuer) => Ok(json!({"issuer": issuer, "jwks_uri": "https://keys.example.com/keys"})),
                None => served.lock().expect("no panic").clone(),
            };
            async move { answer.map(|answer| Bytes::from(answer.to_string())) }.boxed()
        });
        let rule = JwtRule {
            issuer: ISSUER.into(),
            audiences: vec!["istio-ca".into()],
            jwks_uri: jwks_uri.into(),
        };
        OidcTokens::with(rule, get, watch::channel(Arc::default()).1, Tasks::default(), clock)
    }

    fn sign(&self, kid: &str, claims: &Value) -> String {
        let mut header = Header::new(Algorithm::ES256);
        header.kid = Some(kid.into());
        jsonwebtoken::encode(&header, claims, &self.key).expect("a token")
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("no panic").clone()
    }
}

async fn ask(authenticator: &OidcTokens, token: &str) -> Result<Caller, AuthenticationError> {
    let mut headers = HeaderMap::new();
    let bearer = HeaderValue::from_str(&format!("Bearer {token}")).expect("a value");
    headers.insert("authorization", bearer);
    let credentials = Credentials {
        address: None,
        is_tls: true,
        certificate: None,
        headers: &headers,
    };
    authenticator.authenticate(credentials).await
}

#[tokio::test]
async fn tokens_of_the_issuer_are_accepted() {
    let issuer = issuer("k1");
    let authenticator = issuer.authenticator("");
    let caller = ask(&authenticator, &issuer.sign("k1", &claims()))
        .await
        .expect("a caller");
    assert_eq!(caller.identities, ["spiffe://cluster.local/ns/default/sa/reviews"]);
    assert!(caller.expires_at.is_some());
    assert!(ask(&authenticator, &issuer.sign("k1", &claims())).await.is_ok());
    let discovery = format!("{ISSUER}/.well-known/openid-configuration");
    assert_eq!(
        issuer.asked(),
        [discovery, "https://keys.example.com/keys".into()],
        "keys are kept"
    );
}

#[tokio::test]
async fn claims_are_checked() {
    let issuer = issuer("k1");
    let authenticator = issuer.authenticator("https://keys.example.com/keys");
    let with = |key: &str, value: Value| {
        let mut claims = claims();
        claims[key] = value;
        claims
    };
    let bad = [
        with("iss", json!("https://evil.example.com")),
        with("aud", json!("other")),
        with("aud", json!([])),
        with("exp", json!(seconds_from_now(-1))),
        with("exp", Value::Null),
        with("nbf", json!(seconds_from_now(600))),
        with("sub", json!("reviews")),
        with("sub", json!("system:serviceaccount")),
        with("sub", json!("system:serviceaccount:a/sa/b:c")),
    ];
    for claims in bad {
        let refused = ask(&authenticator, &issuer.sign("k1", &claims)).await;
        assert!(
            matches!(refused, Err(AuthenticationError::Invalid(_))),
            "{claims}: {refused:?}"
        );
    }
    assert_eq!(issuer.asked(), Vec::<String>::new(), "nothing is fetched for them");
    assert!(
        ask(&authenticator, &issuer.sign("k1", &with("aud", json!("istio-ca"))))
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn foreign_signatures_are_rejected() {
    let (issuer, forger) = (issuer("k1"), self::issuer("k1"));
    let authenticator = issuer.authenticator("https://keys.example.com/keys");
    let good = issuer.sign("k1", &claims());
    let (message, _) = good.rsplit_once('.').expect("three parts");
    let secret = EncodingKey::from_secret(issuer.jwk.to_string().as_bytes());
    let hmac = jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims(), &secret).expect("a token");
    let (_, payload) = message.split_once('.').expect("three parts");
    // {"alg":"none"}
    let unsigned = format!("eyJhbGciOiJub25lIn0.{payload}.");
    for bad in [forger.sign("k1", &claims()), format!("{message}."), hmac, unsigned] {
        let refused = ask(&authenticator, &bad).await;
        assert!(
            matches!(refused, Err(AuthenticationError::Invalid(_))),
            "{bad}: {refused:?}"
        );
    }
    assert!(ask(&authenticator, &good).await.is_ok());
}

#[tokio::test]
async fn unknown_keys_are_fetched_with_a_cooldown() {
    static LATER: AtomicU64 = AtomicU64::new(0);
    let issuer = issuer("k1");
    let mut authenticator = issuer.authenticator("https://keys.example.com/keys");
    authenticator.clock = || {
        let later = Duration::from_secs(LATER.load(Ordering::SeqCst));
        (environment::now() + later, environment::wall_clock())
    };
    *issuer.served.lock().expect("no panic") = Err("down".into());
    let token = issuer.sign("k1", &claims());
    let refused = ask(&authenticator, &token).await;
    assert!(
        matches!(refused, Err(AuthenticationError::Unavailable(_))),
        "{refused:?}"
    );
    *issuer.served.lock().expect("no panic") = Ok(json!({"keys": [issuer.jwk]}));
    assert!(ask(&authenticator, &token).await.is_err(), "nothing is fetched so soon");
    LATER.store(11, Ordering::SeqCst);
    assert!(ask(&authenticator, &token).await.is_ok());
    for _ in 0..5 {
        assert!(ask(&authenticator, &issuer.sign("forged", &claims())).await.is_err());
    }
    assert_eq!(issuer.asked().len(), 2);
    LATER.store(22, Ordering::SeqCst);
    assert!(ask(&authenticator, &issuer.sign("forged", &claims())).await.is_err());
    assert_eq!(issuer.asked().len(), 3, "it might have been a new key");
    *issuer.served.lock().expect("no panic") = Err("down".into());
    LATER.store(3600, Ordering::SeqCst);
    assert!(
        ask(&authenticator, &token).await.is_ok(),
        "the keys fetched last stay in use"
    );
    assert_eq!(issuer.asked().len(), 4);
}

#[tokio::test]
async fn a_slow_fetch_delays_only_unknown_keys() {
    static LATER: AtomicU64 = AtomicU64::new(0);
    let issuer = issuer("k1");
    let mut authenticator = issuer.authenticator("https://keys.example.com/keys");
    authenticator.clock = || {
        let later = Duration::from_secs(LATER.load(Ordering::SeqCst));
        (environment::now() + later, environment::wall_clock())
    };
    let known = issuer.sign("k1", &claims());
    assert!(ask(&authenticator, &known).await.is_ok());

    let (answer, answered) = tokio::sync::oneshot::channel::<()>();
    let answered = answered.map(|_| Err::<Bytes, _>("down".to_owned())).shared();
    let asked = issuer.asked.clone();
    authenticator.get = Arc::new(move |url| {
        asked.lock().expect("no panic").push(url);
        answered.clone().boxed()
    });
    LATER.store(3600, Ordering::SeqCst);
    let unknown = issuer.sign("k2", &claims());
    let mut first = std::pin::pin!(ask(&authenticator, &unknown));
    let mut second = std::pin::pin!(ask(&authenticator, &unknown));
    assert!(futures::poll!(first.as_mut()).is_pending());
    assert!(futures::poll!(second.as_mut()).is_pending());
    let at_once = ask(&authenticator, &known).now_or_never();
    assert!(at_once.is_some_and(|caller| caller.is_ok()), "the cached keys are used");

    LATER.store(3700, Ordering::SeqCst);
    drop(answer);
    assert!(first.await.is_err() && second.await.is_err());
    assert_eq!(issuer.asked().len(), 2, "both shared one fetch");
}

#[tokio::test]
async fn a_client_that_goes_away_does_not_end_the_fetch() {
    let issuer = issuer("k1");
    let mut authenticator = issuer.authenticator("https://keys.example.com/keys");
    let (answer, answered) = tokio::sync::oneshot::channel::<Bytes>();
    let answered = answered.map(|keys| keys.map_err(|_| "down".to_owned())).shared();
    let asked = issuer.asked.clone();
    authenticator.get = Arc::new(move |url| {
        asked.lock().expect("no panic").push(url);
        answered.clone().boxed()
    });
    let forged = issuer.sign("forged", &claims());
    let mut first = Box::pin(ask(&authenticator, &forged));
    assert!(futures::poll!(first.as_mut()).is_pending());
    drop(first);
    let keys = json!({"keys": [issuer.jwk]}).to_string();
    answer.send(keys.into()).expect("the fetch goes on");
    assert!(ask(&authenticator, &issuer.sign("k1", &claims())).await.is_ok());
    assert_eq!(issuer.asked().len(), 1);
}

#[test]
fn rules_have_two_spellings() {
    let rule: JwtRule = serde_json::from_str(r#"{"issuer":"a","jwks_uri":"b","audiences":["c"]}"#).expect("a rule");
    let other: JwtRule = serde_json::from_str(r#"{"issuer":"a","jwksUri":"b","audiences":["c"]}"#).expect("a rule");
    assert_eq!(rule, other);
}
