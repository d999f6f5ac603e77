//! Callers by tokens that an OpenID Connect issuer has signed: for meshes whose control plane cannot ask an API server.
//!
//! The issuer's keys are fetched when a token first needs them, and again when they are old or a token names a key that is
//! not among them; but not more often than every few seconds, since anybody may name keys. What was fetched last stands
//! while the issuer is away.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use jsonwebtoken::{
    Algorithm, DecodingKey, Header, Validation,
    jwk::{Jwk, KeyAlgorithm, PublicKeyUse},
};
use serde::Deserialize;
use smol_str::SmolStr;
use tokio::sync::{Mutex, watch};

use super::{
    Authenticator, Caller, CallerSource, Credentials, Refusal, TrustDomains,
    token::{self, Claims},
};
use crate::{environment, fetch::Fetcher};

/// How long keys are believed without being fetched again.
const KEYS_AGE: Duration = Duration::from_mins(20);
/// How long nothing is fetched after an attempt.
const PAUSE: Duration = Duration::from_secs(10);
/// How long a fetch may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How far ahead of our clock an issuer's may be.
const LEEWAY: Duration = Duration::from_mins(5);
/// How many keys of an issuer are looked at.
const MAX_KEYS: usize = 64;
/// How signatures may be made: by a key that only the issuer has.
const ALGORITHMS: [Algorithm; 9] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
    Algorithm::ES256,
    Algorithm::ES384,
    Algorithm::EdDSA,
];

/// Whose tokens are good (`JWT_RULE`).
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct JwtRule {
    /// The issuer, as tokens name it.
    #[serde(default)]
    pub issuer: String,
    /// One of these a token must be for.
    #[serde(default)]
    pub audiences: Vec<String>,
    /// Where the issuer's keys are; empty: where its discovery document says.
    #[serde(default, rename = "jwksUri", alias = "jwks_uri")]
    pub jwks_uri: String,
}

/// How documents are fetched.
type Get = Arc<dyn Fn(String) -> BoxFuture<'static, Result<Bytes, String>> + Send + Sync>;

/// Believes what an issuer has signed.
pub struct OidcTokens {
    rule: JwtRule,
    domains: watch::Receiver<Arc<TrustDomains>>,
    get: Get,
    /// Held while keys are fetched, so that one fetch serves all who wait.
    keys: Mutex<Keys>,
    clock: fn() -> (Instant, SystemTime),
}

/// What is known of the issuer's keys.
#[derive(Default)]
struct Keys {
    set: Option<(Arc<[Jwk]>, Instant)>,
    attempted: Option<Instant>,
    problem: String,
}

#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<serde_json::Value>,
}

impl OidcTokens {
    /// Fetches keys by `fetcher`.
    pub fn new(rule: JwtRule, fetcher: Fetcher, domains: watch::Receiver<Arc<TrustDomains>>) -> Self {
        let get: Get = Arc::new(move |url| {
            let fetcher = fetcher.clone();
            async move { fetcher.get(&url, PATIENCE).await.map_err(|error| error.to_string()) }.boxed()
        });
        Self::with(rule, get, domains, || (environment::now(), environment::wall_clock()))
    }

    fn with(
        rule: JwtRule,
        get: Get,
        domains: watch::Receiver<Arc<TrustDomains>>,
        clock: fn() -> (Instant, SystemTime),
    ) -> Self {
        Self {
            rule,
            domains,
            get,
            keys: Mutex::default(),
            clock,
        }
    }

    async fn caller(&self, credentials: Credentials<'_>) -> Result<Caller, Refusal> {
        let token = token::bearer(credentials.headers)?;
        // What can be told without keys is told first: nothing is fetched for tokens of others.
        let claims = token::unverified(token)?;
        let (namespace, account) = self.acceptable(&claims)?;
        let header = jsonwebtoken::decode_header(token)
            .map_err(|error| Refusal::Invalid(format!("the token's header cannot be read: {error}")))?;
        if !ALGORITHMS.contains(&header.alg) {
            return Err(Refusal::Invalid(format!(
                "{:?} is no signature of an issuer",
                header.alg
            )));
        }
        let keys = self.keys(&header).await?;
        let is_signed = keys
            .iter()
            .filter(|key| may_have_signed(key, &header))
            .any(|key| has_signed(key, &header, token));
        if !is_signed {
            let text = format!("the token is not signed by issuer {:?}", self.rule.issuer);
            return Err(Refusal::Invalid(text));
        }
        let id = self.domains.borrow().id(namespace, account);
        Ok(Caller {
            source: CallerSource::IdToken,
            identities: vec![id.to_string().into()],
            kubernetes: None,
            expires_at: claims.expires_at(),
        })
    }

    /// Whom the claims mean, if they are for us and for now.
    fn acceptable(&self, claims: &Claims) -> Result<(crate::base::Namespace, SmolStr), Refusal> {
        let invalid = |text: String| Err(Refusal::Invalid(text));
        if claims.iss != self.rule.issuer {
            return invalid(format!(
                "the token is of issuer {:?}, want {:?}",
                claims.iss, self.rule.issuer
            ));
        }
        let (_, now) = (self.clock)();
        if claims.expires_at().is_none_or(|end| end <= now) {
            return invalid("the token has expired".into());
        }
        if claims.not_before().is_some_and(|begin| begin > now + LEEWAY) {
            return invalid("the token does not hold yet".into());
        }
        let is_for_us = claims
            .aud
            .all()
            .iter()
            .any(|audience| self.rule.audiences.contains(audience));
        if !is_for_us {
            return invalid("the token is for other audiences".into());
        }
        match token::service_account(&claims.sub) {
            Some(account) => Ok(account),
            None => invalid("the subject of the token is no service account".into()),
        }
    }

    /// The keys; fetched, if there is reason to.
    async fn keys(&self, header: &Header) -> Result<Arc<[Jwk]>, Refusal> {
        let mut keys = self.keys.lock().await;
        let (now, _) = (self.clock)();
        let is_known = |keys: &[Jwk]| keys.iter().any(|key| may_have_signed(key, header));
        let is_good =
            |(set, since): &(Arc<[Jwk]>, Instant)| now.saturating_duration_since(*since) < KEYS_AGE && is_known(set);
        let may_ask = keys
            .attempted
            .is_none_or(|last| now.saturating_duration_since(last) >= PAUSE);
        if !keys.set.as_ref().is_some_and(is_good) && may_ask {
            keys.attempted = Some(now);
            match self.fetch().await {
                Ok(set) => keys.set = Some((set, now)),
                Err(problem) => {
                    tracing::warn!(issuer = self.rule.issuer, "keys of callers' tokens: {problem}");
                    keys.problem = problem;
                }
            }
        }
        match &keys.set {
            Some((set, _)) => Ok(set.clone()),
            None => Err(Refusal::Unavailable(format!(
                "the keys of issuer {:?} are not known: {}",
                self.rule.issuer, keys.problem
            ))),
        }
    }

    async fn fetch(&self) -> Result<Arc<[Jwk]>, String> {
        let uri = if self.rule.jwks_uri.is_empty() {
            let url = format!(
                "{}/.well-known/openid-configuration",
                self.rule.issuer.trim_end_matches('/')
            );
            let document = (self.get)(url).await?;
            let found: Discovery =
                serde_json::from_slice(&document).map_err(|error| format!("discovery document: {error}"))?;
            if found.issuer != self.rule.issuer {
                return Err(format!("the discovery document is of issuer {:?}", found.issuer));
            }
            found.jwks_uri
        } else {
            self.rule.jwks_uri.clone()
        };
        let document = (self.get)(uri).await?;
        let set: KeySet = serde_json::from_slice(&document).map_err(|error| format!("key set: {error}"))?;
        // Keys of kinds that are not known here stand beside others.
        let keys = set.keys.into_iter().take(MAX_KEYS);
        let keys: Arc<[Jwk]> = keys.filter_map(|key| serde_json::from_value(key).ok()).collect();
        if keys.is_empty() {
            Err("the key set has no usable key".into())
        } else {
            Ok(keys)
        }
    }
}

impl Authenticator for OidcTokens {
    fn name(&self) -> &'static str {
        "OIDC token"
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, Refusal>> {
        self.caller(credentials).boxed()
    }
}

/// Whether what a key says of itself fits the header.
fn may_have_signed(key: &Jwk, header: &Header) -> bool {
    let common = &key.common;
    let is_named = header.kid.is_none() || header.kid == common.key_id;
    let is_for_signing = matches!(common.public_key_use, None | Some(PublicKeyUse::Signature));
    let fits = common.key_algorithm.is_none_or(|named| named == same(header.alg));
    is_named && is_for_signing && fits
}

fn same(algorithm: Algorithm) -> KeyAlgorithm {
    match algorithm {
        Algorithm::RS256 => KeyAlgorithm::RS256,
        Algorithm::RS384 => KeyAlgorithm::RS384,
        Algorithm::RS512 => KeyAlgorithm::RS512,
        Algorithm::PS256 => KeyAlgorithm::PS256,
        Algorithm::PS384 => KeyAlgorithm::PS384,
        Algorithm::PS512 => KeyAlgorithm::PS512,
        Algorithm::ES256 => KeyAlgorithm::ES256,
        Algorithm::ES384 => KeyAlgorithm::ES384,
        Algorithm::EdDSA => KeyAlgorithm::EdDSA,
        _ => KeyAlgorithm::UNKNOWN_ALGORITHM,
    }
}

/// Whether the signature is of the key. Claims are judged elsewhere, by our own clock.
fn has_signed(key: &Jwk, header: &Header, token: &str) -> bool {
    let Ok(key) = DecodingKey::from_jwk(key) else {
        return false;
    };
    let mut validation = Validation::new(header.alg);
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_nbf = false;
    validation.validate_aud = false;
    jsonwebtoken::decode::<serde::de::IgnoredAny>(token, &key, &validation).is_ok()
}

#[cfg(test)]
mod tests;
