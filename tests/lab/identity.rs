//! Authentication and authorization with certificates of the control plane's CA in real Envoys, with policies and user
//! tokens, and a root rotation under load.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use libtest_mimic::{Completion, Failed, Trial};
use rcgen::PublicKeyData;
use serde_json::{Value, json};

use super::agent::Agent;
use super::app::{Application, Call, Load};
use super::host::{Host, Network};
use super::missing_component;
use super::proxy::{Proxy, Role, Workload};
use crate::kube::tenant::{TIMEOUT, Tenant};
use crate::support::agent::{ClientCredentials, Trust};
use crate::support::daemon::Daemon;
use crate::support::kubernetes::{self, api::Reference};
use crate::support::{self, authority::Authority, missing, scratch, wait};

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

/// A service `reviews` and its clients, all with sidecars except `bare`.
struct Mesh {
    tenant: Tenant<'static>,
    control_plane: support::agent::Agent,
    network: Network,
    daemon: Daemon,
}

/// A pod, with its sidecar if it has one.
struct Pod {
    host: Arc<Host>,
    agent: Option<Agent>,
    sidecar: Option<Proxy>,
}

impl Mesh {
    fn new(name: &str, jwks: &str, configure: impl FnOnce(&mut Command)) -> Result<Mesh, String> {
        let tenant = Tenant::shared(0, name)?;
        tenant.apply(&MESH.replace("{jwks}", jwks))?;
        let kubeconfig = tenant.cluster.admin_kubeconfig();
        let daemon = Daemon::secured(&tenant.folder.join("istiod.log"), |command| {
            command
                .arg("--kubeconfig")
                .arg(&kubeconfig)
                .args(["-n", &tenant.system]);
            configure(command);
        })?;
        let roots = wait::until("ConfigMap istio-ca-root-cert", TIMEOUT, || published(&tenant))?;
        let mut control_plane = support::agent::Agent::new(daemon.secure, Trust::Roots(roots));
        control_plane.server = format!("istiod.{}.svc", tenant.system);
        let network = Network::start("network", 16, &tenant.folder)?;
        Ok(Mesh {
            tenant,
            control_plane,
            network,
            daemon,
        })
    }

    fn address(&self, last: u8) -> IpAddr {
        self.tenant
            .fill(&format!("10.{{n}}.0.{last}"))
            .parse()
            .expect("the address is valid")
    }

    /// Creates a pod in Kubernetes, and a host and, if wanted, a sidecar for it.
    fn pod(&self, name: &str, last: u8, has_sidecar: bool) -> Result<Pod, String> {
        let (tenant, address) = (&self.tenant, self.address(last));
        let labels =
            json!({ "app": name, "security.istio.io/tlsMode": if has_sidecar { "istio" } else { "disabled" } });
        let workload = Workload {
            role: Role::Sidecar,
            name: name.to_owned(),
            namespace: tenant.app.clone(),
            account: name.to_owned(),
            address,
            labels: labels.clone(),
            cluster: "Kubernetes".into(),
            network: String::new(),
            is_edge: false,
        };
        tenant.cluster.service_account(&tenant.app, name)?;
        tenant.cluster.api.apply(&json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": tenant.app, "name": name, "labels": labels },
            "spec": { "serviceAccountName": name, "nodeName": "node",
                "containers": [{ "name": "app", "image": "app" }] },
            "status": { "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
                "conditions": [{ "type": "Ready", "status": "True" }] } }))?;
        let host = Arc::new(Host::start(name, &tenant.folder)?);
        self.network.attach(&host, "eth0", address, true)?;
        let mut pod = Pod {
            host,
            agent: None,
            sidecar: None,
        };
        if has_sidecar {
            let token = tenant.cluster.token(&tenant.app, name, &["istio-ca"])?;
            let agent = Agent::start(self.control_plane.clone(), ClientCredentials::token(token))
                .map_err(|error| format!("{name}: {error}\n{}", self.daemon.process.log_tail()))?;
            let known = agent.known();
            pod.sidecar = Some(Proxy::start(
                &pod.host,
                &workload,
                &self.control_plane,
                known,
                &tenant.folder,
            )?);
            pod.agent = Some(agent);
        }
        Ok(pod)
    }

    /// A request to the service's cluster IP.
    fn call(&self, path: &str) -> Call {
        Call {
            host: format!("reviews.{}", self.tenant.app),
            address: self.tenant.fill("10.96.{n}.50").parse().expect("the address is valid"),
            port: 80,
            path: path.to_owned(),
            headers: Vec::new(),
        }
    }

    fn call_with(&self, path: &str, token: &str) -> Call {
        let mut call = self.call(path);
        call.headers.push(("authorization", format!("Bearer {token}")));
        call
    }
}

impl Pod {
    /// Waits until a call gets this status: configuration and endpoints arrive asynchronously.
    fn until_status(&self, call: &Call, status: u16) -> Result<(), String> {
        let mut last = String::new();
        wait::until(&format!("status {status} for {}", call.path), TIMEOUT, || {
            last = match call.from(&self.host) {
                Ok(answer) if answer.status == status => return Some(()),
                Ok(answer) => format!("{} {}", answer.status, answer.body),
                Err(error) => error,
            };
            None
        })
        .map_err(|error| format!("{}: {error}; last answer: {last}", self.host.name))
    }

    fn status(&self, call: &Call) -> Result<u16, String> {
        call.from(&self.host).map(|answer| answer.status.as_u16())
    }
}

/// Returns the roots that the control plane publishes for workloads.
fn published(tenant: &Tenant) -> Option<String> {
    let map = Reference::new("v1", "ConfigMap", &tenant.app, "istio-ca-root-cert");
    let map = tenant.cluster.get(&map).ok()??;
    map["data"]["root-cert.pem"].as_str().map(str::to_owned)
}

fn policies_are_enforced(name: &str) -> Result<Completion, Failed> {
    if let Some(reason) = missing_component() {
        return missing(reason);
    }
    let (issuer, forger) = (TokenIssuer::new(), TokenIssuer::new());
    let mesh = Mesh::new(name, &issuer.jwks(), |_| {})?;
    let reviews = mesh.pod("reviews", 1, true)?;
    let _application = Application::start(&reviews.host, "reviews", 8080)?;
    let friend = mesh.pod("friend", 2, true)?;
    let other = mesh.pod("other", 3, true)?;
    let bare = mesh.pod("bare", 4, false)?;

    friend.until_status(&mesh.call("/open"), 200)?;
    let answer = mesh.call("/open").from(&friend.host)?;
    let seen: Value = serde_json::from_str(&answer.body).map_err(|error| error.to_string())?;
    let certificate = seen["headers"]["x-forwarded-client-cert"].as_str().unwrap_or_default();
    let expected = format!("URI=spiffe://cluster.local/ns/{}/sa/friend", mesh.tenant.app);
    assert!(
        certificate.contains(&expected),
        "the application receives the client's identity: {certificate:?}"
    );

    assert_eq!(
        mesh.call("/other").from(&friend.host)?.status,
        403,
        "a path without a rule"
    );
    other.until_status(&mesh.call("/open"), 403)?;

    let mut direct = mesh.call("/open");
    (direct.address, direct.port) = (mesh.address(1), 8080);
    let refused = direct.from(&bare.host);
    assert!(refused.is_err(), "plaintext must be refused before HTTP: {refused:?}");
    let sidecar = reviews.sidecar.as_ref().expect("the pod has one");
    let unmatched = sidecar.sum("listener.0.0.0.0_15006.no_filter_chain_match")?;
    assert!(unmatched > 0, "the sidecar must have refused it");

    assert_eq!(friend.status(&mesh.call("/token"))?, 403, "no token");
    assert_eq!(
        friend.status(&mesh.call_with("/token", &issuer.token("ann")))?,
        200,
        "a valid token"
    );
    assert_eq!(
        other.status(&mesh.call_with("/token", &issuer.token("ann")))?,
        200,
        "the token decides, not the client certificate"
    );
    assert_eq!(
        friend.status(&mesh.call_with("/token", &issuer.token("eve")))?,
        403,
        "a token of another user"
    );
    assert_eq!(
        friend.status(&mesh.call_with("/token", &forger.token("ann")))?,
        401,
        "a forged token"
    );
    assert_eq!(
        friend.status(&mesh.call_with("/open", "nonsense"))?,
        401,
        "a malformed token"
    );

    assert!(sidecar.sum("ssl.handshake")? > 0, "the sidecars must use TLS");
    for pod in [&reviews, &friend, &other] {
        let rejected = pod.sidecar.as_ref().expect("the pod has one").sum("update_rejected")?;
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
    let mesh = Mesh::new(name, &TokenIssuer::new().jwks(), |command| {
        command.env("ROOT_CA_DIR", &folder).env("ISTIO_MULTIROOT_MESH", "true");
    })?;
    let reviews = mesh.pod("reviews", 1, true)?;
    let _application = Application::start(&reviews.host, "reviews", 8080)?;
    let friend = mesh.pod("friend", 2, true)?;
    friend.until_status(&mesh.call("/open"), 200)?;

    let load = Load::start(Arc::clone(&friend.host), mesh.call("/open"), INTERVAL);
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
