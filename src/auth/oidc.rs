//! Authentication by tokens of an OpenID Connect issuer, for meshes whose control plane has no API server.
//!
//! The issuer's key set is fetched on first use, when it is old, and when a token names an unknown key id. A cooldown
//! bounds the fetches, since any client can send unknown key ids. The last key set stays in use while the issuer is
//! slow or unavailable: a fetch delays only the request that starts it and those with unknown key ids. It goes on if
//! these clients go away.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
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
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use super::{
    AuthenticationError, Authenticator, Caller, CallerSource, Credentials, TrustDomains,
    token::{self, Claims},
};
use crate::{environment, fetch::Fetcher, task::Tasks};

/// The age at which the key set is fetched again.
const KEY_SET_TTL: Duration = Duration::from_mins(20);
/// The minimum interval between two fetches.
const FETCH_COOLDOWN: Duration = Duration::from_secs(10);
/// The timeout of a fetch.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// The tolerated clock skew for `nbf`.
const LEEWAY: Duration = Duration::from_mins(5);
/// The maximum number of keys of a key set.
const MAX_KEYS: usize = 64;
/// The accepted signature algorithms: asymmetric ones only, never `none` or HMAC.
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

/// An issuer whose tokens are accepted (`JWT_RULE`).
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct JwtRule {
    /// The issuer (claim `iss`).
    #[serde(default)]
    pub issuer: String,
    /// The accepted audiences; a token must have at least one of them.
    #[serde(default)]
    pub audiences: Vec<String>,
    /// The URL of the key set; if empty, the discovery document names it.
    #[serde(default, rename = "jwksUri", alias = "jwks_uri")]
    pub jwks_uri: String,
}

/// Fetches a document.
type Fetch = Arc<dyn Fn(String) -> BoxFuture<'static, Result<Bytes, String>> + Send + Sync>;

/// Accepts tokens that an issuer has signed.
#[doc(alias = "JwtAuthenticator")]
pub struct OidcTokens {
    rule: JwtRule,
    domains: watch::Receiver<Arc<TrustDomains>>,
    get: Fetch,
    tasks: Tasks,
    /// Locked for one look-up or change.
    keys: Arc<Mutex<CachedKeySet>>,
    /// The turn to fetch the key set. All requests that wait for it share the result.
    fetching: Arc<Semaphore>,
    clock: fn() -> (Instant, SystemTime),
}

/// The cached key set, and the state of the last fetch.
#[derive(Default)]
struct CachedKeySet {
    set: Option<(Arc<[Jwk]>, Instant)>,
    attempted_at: Option<Instant>,
    last_error: String,
}

impl CachedKeySet {
    /// Returns true if a key of the set matches the token header.
    fn has_key(&self, header: &Header) -> bool {
        let mut keys = self.set.iter().flat_map(|(keys, _)| keys.iter());
        keys.any(|key| key_matches(key, header))
    }

    /// Returns true if the set must be fetched for this token header, and records the attempt.
    fn begin_fetch(&mut self, header: &Header, now: Instant) -> bool {
        let age = |since: Instant| now.saturating_duration_since(since);
        let is_fresh = self.set.as_ref().is_some_and(|(_, since)| age(*since) < KEY_SET_TTL);
        let may_fetch = self.attempted_at.is_none_or(|last| age(last) >= FETCH_COOLDOWN);
        let is_due = may_fetch && !(is_fresh && self.has_key(header));
        if is_due {
            self.attempted_at = Some(now);
        }
        is_due
    }
}

#[derive(Deserialize)]
struct DiscoveryDocument {
    issuer: String,
    jwks_uri: String,
}

#[derive(Deserialize)]
struct JsonWebKeySet {
    keys: Vec<serde_json::Value>,
}

impl OidcTokens {
    /// Creates an authenticator that fetches key sets through `fetcher`, in tasks of its own.
    pub fn new(rule: JwtRule, fetcher: Fetcher, domains: watch::Receiver<Arc<TrustDomains>>, tasks: Tasks) -> Self {
        let get: Fetch = Arc::new(move |url| {
            let fetcher = fetcher.clone();
            async move {
                fetcher
                    .get(&url, FETCH_TIMEOUT)
                    .await
                    .map_err(|error| error.to_string())
            }
            .boxed()
        });
        let clock = || (environment::now(), environment::wall_clock());
        Self::with(rule, get, domains, tasks, clock)
    }

    fn with(
        rule: JwtRule,
        get: Fetch,
        domains: watch::Receiver<Arc<TrustDomains>>,
        tasks: Tasks,
        clock: fn() -> (Instant, SystemTime),
    ) -> Self {
        Self {
            rule,
            domains,
            get,
            tasks,
            keys: Arc::default(),
            fetching: Arc::new(Semaphore::new(1)),
            clock,
        }
    }

    async fn caller(&self, credentials: Credentials<'_>) -> Result<Caller, AuthenticationError> {
        let token = token::bearer(credentials.headers)?;
        // Checks that need no keys come first, so that tokens of other issuers trigger no fetch.
        let claims = token::unverified_claims(token)?;
        let (namespace, account) = self.check_claims(&claims)?;
        let header = jsonwebtoken::decode_header(token)
            .map_err(|error| AuthenticationError::Invalid(format!("the token's header cannot be read: {error}")))?;
        if !ALGORITHMS.contains(&header.alg) {
            return Err(AuthenticationError::Invalid(format!(
                "signature algorithm {:?} is not accepted",
                header.alg
            )));
        }
        let keys = self.keys(&header).await?;
        let is_signed = keys
            .iter()
            .filter(|key| key_matches(key, &header))
            .any(|key| signature_is_valid(key, &header, token));
        if !is_signed {
            let text = format!("the token has no valid signature of issuer {:?}", self.rule.issuer);
            return Err(AuthenticationError::Invalid(text));
        }
        let id = self.domains.borrow().id(namespace, account);
        Ok(Caller {
            source: CallerSource::IdToken,
            identities: vec![id.to_string().into()],
            kubernetes: None,
            expires_at: claims.expires_at(),
        })
    }

    /// Checks issuer, validity and audience of the claims, and returns the service account.
    fn check_claims(&self, claims: &Claims) -> Result<(crate::base::Namespace, SmolStr), AuthenticationError> {
        let invalid = |text: String| Err(AuthenticationError::Invalid(text));
        if claims.iss != self.rule.issuer {
            return invalid(format!(
                "the token has issuer {:?}, want {:?}",
                claims.iss, self.rule.issuer
            ));
        }
        let (_, now) = (self.clock)();
        if claims.expires_at().is_none_or(|end| end <= now) {
            return invalid("the token has expired".into());
        }
        if claims.not_before().is_some_and(|begin| begin > now + LEEWAY) {
            return invalid("the token is not valid yet".into());
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
            None => invalid("the subject of the token is not a service account".into()),
        }
    }

    /// Returns the key set, and fetches it first if needed.
    async fn keys(&self, header: &Header) -> Result<Arc<[Jwk]>, AuthenticationError> {
        let is_known = self.cached().has_key(header);
        let fetching = self.fetching.clone();
        let turn = if is_known {
            fetching.try_acquire_owned().ok()
        } else {
            fetching.acquire_owned().await.ok()
        };
        let (now, _) = (self.clock)();
        let is_due = turn.is_some() && self.cached().begin_fetch(header, now);
        if let Some(turn) = turn.filter(|_| is_due) {
            // An error means that the process shuts down.
            let _ = self.start_fetch(turn, now).await;
        }
        let keys = self.cached();
        match &keys.set {
            Some((set, _)) => Ok(set.clone()),
            None => Err(AuthenticationError::Unavailable(format!(
                "no key set of issuer {:?}: {}",
                self.rule.issuer, keys.last_error
            ))),
        }
    }

    /// Starts to fetch the key set. The receiver completes at the end.
    ///
    /// The fetch is a task, because a client that goes away must not end it: others could not repeat it before the end
    /// of the cooldown.
    fn start_fetch(&self, turn: OwnedSemaphorePermit, now: Instant) -> oneshot::Receiver<()> {
        let (done, end) = oneshot::channel();
        let (rule, get, keys, clock) = (self.rule.clone(), self.get.clone(), self.keys.clone(), self.clock);
        self.tasks.spawn_until_shutdown("keys of an issuer", async move {
            let fetched = fetch(&rule, &get).await;
            let mut keys = lock(&keys);
            // The cooldown begins anew, so that those who wait do not fetch one after the other.
            keys.attempted_at = Some(clock().0);
            match fetched {
                Ok(set) => keys.set = Some((set, now)),
                Err(last_error) => {
                    tracing::warn!(issuer = rule.issuer, error = last_error, "JWKS fetch failed");
                    keys.last_error = last_error;
                }
            }
            drop(keys);
            drop(turn);
            // The client may have gone away.
            let _ = done.send(());
        });
        end
    }

    fn cached(&self) -> MutexGuard<'_, CachedKeySet> {
        lock(&self.keys)
    }
}

fn lock(keys: &Mutex<CachedKeySet>) -> MutexGuard<'_, CachedKeySet> {
    keys.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fetches the key set of an issuer. The error is the reason.
async fn fetch(rule: &JwtRule, get: &Fetch) -> Result<Arc<[Jwk]>, String> {
    let uri = if rule.jwks_uri.is_empty() {
        let url = format!("{}/.well-known/openid-configuration", rule.issuer.trim_end_matches('/'));
        let document = get(url).await?;
        let found: DiscoveryDocument =
            serde_json::from_slice(&document).map_err(|error| format!("discovery document: {error}"))?;
        if found.issuer != rule.issuer {
            return Err(format!("the discovery document has issuer {:?}", found.issuer));
        }
        found.jwks_uri
    } else {
        rule.jwks_uri.clone()
    };
    let document = get(uri).await?;
    let set: JsonWebKeySet = serde_json::from_slice(&document).map_err(|error| format!("key set: {error}"))?;
    // A key set may hold keys of unsupported types; these are skipped.
    let keys = set.keys.into_iter().take(MAX_KEYS);
    let keys: Arc<[Jwk]> = keys.filter_map(|key| serde_json::from_value(key).ok()).collect();
    if keys.is_empty() {
        Err("the key set has no usable key".into())
    } else {
        Ok(keys)
    }
}

impl Authenticator for OidcTokens {
    fn name(&self) -> &'static str {
        "OIDC token"
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        self.caller(credentials).boxed()
    }
}

/// Returns true if the key's id, use and algorithm match the token header.
fn key_matches(key: &Jwk, header: &Header) -> bool {
    let common = &key.common;
    let is_named = header.kid.is_none() || header.kid == common.key_id;
    let is_for_signing = matches!(common.public_key_use, None | Some(PublicKeyUse::Signature));
    let fits = common
        .key_algorithm
        .is_none_or(|named| named == key_algorithm(header.alg));
    is_named && is_for_signing && fits
}

fn key_algorithm(algorithm: Algorithm) -> KeyAlgorithm {
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

/// Verifies the signature. `check_claims` checks the claims, by the injected clock.
fn signature_is_valid(key: &Jwk, header: &Header, token: &str) -> bool {
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
