//! Authentication and authorization with certificates of the control plane's CA in real Envoys, with policies and user
//! tokens, and a root rotation under load.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use libtest_mimic::{Completion, Failed, Trial};
use rcgen::PublicKeyData;
use serde_json::{Value, json};

use super::app::{Application, Load};
use super::missing_component;
use super::pods::{Mesh, Role, published};
use crate::kube::tenant::TIMEOUT;
use crate::support::kubernetes;
use crate::support::{authority::Authority, missing, scratch, wait};

const MESH: &str = include_str!("identity.yaml");
/// Interval between requests during the root rotation.
const INTERVAL: Duration = Duration::from_millis(10);
const ISSUER: &str = "https://issuer.example";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::optional_trial("lab::identity::policies_are_enforced", policies_are_enforced),
        kubernetes::optional_trial("lab::identity::root_rotation_under_load", root_rotation_under_load),
    ]
}

/// A key that signs user tokens.
struct TokenIssuer {
    key: rcgen::KeyPair,
}

impl TokenIssuer {
    fn new() -> TokenIssuer {
        let key = rcgen::KeyPair::generate().expect("key generation succeeds");
        TokenIssuer { key }
    }

    /// The keys that verify the tokens.
    fn jwks(&self) -> String {
        // An uncompressed point: a marker byte, then the coordinates.
        let point = self.key.der_bytes();
        let (x, y) = point[1..].split_at(32);
        let text = |bytes| BASE64_URL_SAFE_NO_PAD.encode(bytes);
        json!({ "keys": [{ "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "one", "x": text(x),
            "y": text(y) }] })
        .to_string()
    }

    fn token(&self, subject: &str) -> String {
        let mut header = Header::new(Algorithm::ES256);
        header.kid = Some("one".into());
        // The expiry is so far away that no clock matters.
        let claims = json!({ "iss": ISSUER, "sub": subject, "exp": 4_102_444_800_u64 });
        let key = EncodingKey::from_ec_der(&self.key.serialize_der());
        jsonwebtoken::encode(&header, &claims, &key).expect("the claims are JSON")
    }
}

fn policies_are_enforced(name: &str) -> Result<Completion, Failed> {
    if let Some(reason) = missing_component() {
        return missing(reason);
    }
    let (issuer, forger) = (TokenIssuer::new(), TokenIssuer::new());
    let mesh = Mesh::new(name, &MESH.replace("{jwks}", &issuer.jwks()), |_| {})?;
    let reviews = mesh.pod("reviews", 1, Some(Role::Sidecar))?;
    let _application = Application::start(&reviews.host, "reviews", 8080)?;
    let friend = mesh.pod("friend", 2, Some(Role::Sidecar))?;
    let other = mesh.pod("other", 3, Some(Role::Sidecar))?;
    let bare = mesh.pod("bare", 4, None)?;

    friend.until_status(&mesh.call("reviews", "/open"), 200)?;
    let answer = mesh.call("reviews", "/open").from(&friend.host)?;
    let seen: Value = serde_json::from_str(&answer.body).map_err(|error| error.to_string())?;
    let certificate = seen["headers"]["x-forwarded-client-cert"].as_str().unwrap_or_default();
    let expected = format!("URI=spiffe://cluster.local/ns/{}/sa/friend", mesh.tenant.app);
    assert!(
        certificate.contains(&expected),
        "the application receives the client's identity: {certificate:?}"
    );

    assert_eq!(
        mesh.call("reviews", "/other").from(&friend.host)?.status,
        403,
        "a path without a rule"
    );
    other.until_status(&mesh.call("reviews", "/open"), 403)?;

    let mut direct = mesh.call("reviews", "/open");
    (direct.address, direct.port) = (mesh.address(1), 8080);
    let refused = direct.from(&bare.host);
    assert!(refused.is_err(), "plaintext must be refused before HTTP: {refused:?}");
    let unmatched = reviews.sum("listener.0.0.0.0_15006.no_filter_chain_match")?;
    assert!(unmatched > 0, "the sidecar must have refused it");

    assert_eq!(friend.status(&mesh.call("reviews", "/token"))?, 403, "no token");
    assert_eq!(
        friend.status(&mesh.call_with("reviews", "/token", &issuer.token("ann")))?,
        200,
        "a valid token"
    );
    assert_eq!(
        other.status(&mesh.call_with("reviews", "/token", &issuer.token("ann")))?,
        200,
        "the token decides, not the client certificate"
    );
    assert_eq!(
        friend.status(&mesh.call_with("reviews", "/token", &issuer.token("eve")))?,
        403,
        "a token of another user"
    );
    assert_eq!(
        friend.status(&mesh.call_with("reviews", "/token", &forger.token("ann")))?,
        401,
        "a forged token"
    );
    assert_eq!(
        friend.status(&mesh.call_with("reviews", "/open", "nonsense"))?,
        401,
        "a malformed token"
    );

    assert!(reviews.sum("ssl.handshake")? > 0, "the sidecars must use TLS");
    for pod in [&reviews, &friend, &other] {
        let rejected = pod.sum("update_rejected")?;
        assert_eq!(rejected, 0, "{} must accept every update", pod.host.name);
    }
    Ok(Completion::Completed)
}

/// Writes a bundle with these roots into a folder as the kubelet does: it switches a symlink to a new folder, so all
/// files change at once.
fn mount(authority: &Authority, folder: &Path, generation: u32, roots: &str) -> std::io::Result<()> {
    let data = folder.join(format!("..{generation}"));
    std::fs::create_dir(&data)?;
    let mut files = authority.files();
    files.insert("root-cert.pem", roots.to_owned());
    for (name, text) in files {
        std::fs::write(data.join(name), text)?;
        let link = folder.join(name);
        if !link.is_symlink() {
            std::os::unix::fs::symlink(format!("..data/{name}"), link)?;
        }
    }
    let draft = folder.join("..draft");
    std::os::unix::fs::symlink(format!("..{generation}"), &draft)?;
    std::fs::rename(draft, folder.join("..data"))
}

/// The steps of a root rotation: both roots are trusted, then the new one signs, then only the new one is trusted.
/// Requests go on all the time, and none fails.
fn root_rotation_under_load(name: &str) -> Result<Completion, Failed> {
    if let Some(reason) = missing_component() {
        return missing(reason);
    }
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let folder = scratch(&format!("{name}/cacerts"));
    mount(&old, &folder, 1, &old.root())?;
    let mesh = Mesh::new(name, &MESH.replace("{jwks}", &TokenIssuer::new().jwks()), |command| {
        command.env("ROOT_CA_DIR", &folder).env("ISTIO_MULTIROOT_MESH", "true");
    })?;
    let reviews = mesh.pod("reviews", 1, Some(Role::Sidecar))?;
    let _application = Application::start(&reviews.host, "reviews", 8080)?;
    let friend = mesh.pod("friend", 2, Some(Role::Sidecar))?;
    friend.until_status(&mesh.call("reviews", "/open"), 200)?;

    let load = Load::start(Arc::clone(&friend.host), mesh.call("reviews", "/open"), INTERVAL);
    let both = old.root() + &new.root();
    let steps = [(&old, both.clone()), (&new, both), (&new, new.root())];
    for (generation, (authority, roots)) in (2..).zip(steps) {
        mount(authority, &folder, generation, &roots)?;
        let expected: BTreeSet<String> = certificates(&roots);
        wait::until("the new roots", TIMEOUT, || {
            (certificates(&published(&mesh.tenant)?) == expected).then_some(())
        })?;
        for pod in [&reviews, &friend] {
            let agent = pod.agent.as_ref().expect("the pod has one");
            wait::until("a certificate of the new CA", TIMEOUT, || {
                agent.renew().ok()?;
                let known = agent.known().borrow().clone();
                let is_signed = known.chain.contains(authority.certificate().trim());
                (is_signed && certificates(&known.roots) == expected).then_some(())
            })?;
        }
        // Wait for requests after each step, which use the current roots.
        let so_far = load.answered();
        wait::until("requests after the step", TIMEOUT, || {
            (load.answered() > so_far + 50).then_some(())
        })?;
    }
    let outcome = load.end();
    assert!(outcome.failures.is_empty(), "{outcome:#?}");
    Ok(Completion::Completed)
}

/// Returns the certificates of a PEM text, as text.
fn certificates(text: &str) -> BTreeSet<String> {
    const END: &str = "-----END CERTIFICATE-----";
    let blocks = text.split_inclusive(END).map(|block| block.trim().to_owned());
    blocks.filter(|block| block.ends_with(END)).collect()
}
