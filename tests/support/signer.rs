//! A Kubernetes CSR signer, which signs approved requests. The test clusters run no controllers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, DnType, IsCa, KeyPair,
};
use serde_json::{Value, json};

use super::kubernetes::api::Api;

const API: &str = "certificates.k8s.io/v1";
const KIND: &str = "CertificateSigningRequest";
/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

type Issuer = CertifiedIssuer<'static, KeyPair>;

/// A signer that runs until it is dropped.
pub(crate) struct Signer {
    roots: BTreeMap<String, String>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    ends: AtomicBool,
    /// Locked during a round.
    pauses: Mutex<bool>,
    /// The `spec` of each signed request.
    signed: Mutex<Vec<Value>>,
}

impl Signer {
    /// Starts to sign for these signer names, each with its own root. Chains hold only the leaf.
    pub(crate) fn start(api: &Api, names: &[&str]) -> Signer {
        let issuers: BTreeMap<String, Issuer> = names.iter().map(|name| ((*name).to_owned(), root(name))).collect();
        let roots = issuers
            .iter()
            .map(|(name, issuer)| (name.clone(), issuer.pem()))
            .collect();
        let shared = Arc::new(Shared::default());
        let (api, sharing) = (api.clone(), shared.clone());
        let signing = move || {
            while !sharing.ends.load(Ordering::Relaxed) {
                let pauses = sharing.pauses.lock().unwrap_or_else(PoisonError::into_inner);
                if !*pauses {
                    sign_all(&api, &issuers, &sharing);
                }
                drop(pauses);
                std::thread::park_timeout(POLL_INTERVAL);
            }
        };
        Signer {
            roots,
            shared,
            thread: Some(std::thread::spawn(signing)),
        }
    }

    /// The root of a signer name, as PEM.
    pub(crate) fn root(&self, name: &str) -> &str {
        &self.roots[name]
    }

    /// Pauses or resumes signing. When it returns, the last round before the pause has ended.
    pub(crate) fn pause(&self, pauses: bool) {
        *self.shared.pauses.lock().unwrap_or_else(PoisonError::into_inner) = pauses;
    }

    /// Returns the `spec` of each signed request so far. None is missing whose certificate a client has received.
    pub(crate) fn signed(&self) -> Vec<Value> {
        // A request is recorded after its client can see the certificate, in the same round.
        let _round = self.shared.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared
            .signed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Signer {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn root(name: &str) -> Issuer {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("key generation succeeds");
    CertifiedIssuer::self_signed(params, key).expect("signing succeeds")
}

fn sign_all(api: &Api, issuers: &BTreeMap<String, Issuer>, shared: &Shared) {
    for object in api.list(API, KIND, "").unwrap_or_default() {
        let issuer = object["spec"]["signerName"].as_str().and_then(|name| issuers.get(name));
        let approved = object["status"]["conditions"].as_array().is_some_and(|all| {
            all.iter()
                .any(|one| one["type"] == "Approved" && one["status"] == "True")
        });
        let Some(issuer) = issuer.filter(|_| approved && object["status"]["certificate"].is_null()) else {
            continue;
        };
        let chain = sign(&object, issuer).expect("the API server accepted the request");
        let signed = json!({ "apiVersion": API, "kind": KIND,
            "metadata": { "name": object["metadata"]["name"] },
            "status": { "certificate": BASE64_STANDARD.encode(chain) } });
        // The client may have deleted it in the meantime.
        if api.apply_status(&signed).is_ok() {
            let mut all = shared.signed.lock().unwrap_or_else(PoisonError::into_inner);
            all.push(object["spec"].clone());
        }
    }
}

fn sign(object: &Value, issuer: &Issuer) -> Option<String> {
    let request = BASE64_STANDARD.decode(object["spec"]["request"].as_str()?).ok()?;
    let mut request = CertificateSigningRequestParams::from_pem(std::str::from_utf8(&request).ok()?).ok()?;
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().ok()?;
    let life = Duration::from_secs(object["spec"]["expirationSeconds"].as_u64().unwrap_or(86_400));
    let began = std::time::SystemTime::UNIX_EPOCH + now - Duration::from_mins(1);
    request.params.not_before = began.into();
    request.params.not_after = (began + life).into();
    Some(request.signed_by(issuer).ok()?.pem())
}
