//! The CA with a real API server: two replicas create one root, and a plugged-in CA replaces it.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use libtest_mimic::{Failed, Trial};
use serde_json::json;

use super::status::{SYSTEM, grant, no_request_was_forbidden, trial};
use crate::support::agent::{Agent, Certificate, ClientCredentials, KeyKind, Trust};
use crate::support::authority::{Authority, verify};
use crate::support::daemon::Daemon;
use crate::support::http::RUNTIME;
use crate::support::kubernetes::Cluster;
use crate::support::kubernetes::api::Reference;
use crate::support::wait;

/// Longer than the lease of a lock.
const TIMEOUT: Duration = Duration::from_mins(1);

pub(super) fn trials() -> Vec<Trial> {
    vec![trial(
        "kube::authority::replicas_share_one_root_and_adopt_a_plugged_in_ca",
        replicas_share_one_root_and_adopt_a_plugged_in_ca,
    )]
}

fn text_of(cluster: &Cluster, name: &str, key: &str) -> Option<String> {
    let found = cluster.get(&Reference::new("v1", "ConfigMap", "shop", name)).ok()??;
    found["data"][key].as_str().map(str::to_owned)
}

fn certificate(daemon: &Daemon, root: &str, token: &str) -> Result<Certificate, String> {
    let agent = Agent::new(daemon.secure, Trust::Roots(root.to_owned()));
    let credentials = ClientCredentials::token(token);
    let asked = agent.certificate(&credentials, KeyKind::Ecdsa);
    RUNTIME.block_on(asked).map_err(|status| status.to_string())
}

fn replicas_share_one_root_and_adopt_a_plugged_in_ca(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    let folder = crate::support::scratch(&format!("{name}-logs"));
    cluster.namespace(SYSTEM, &json!({}))?;
    cluster.account_kubeconfig("shop", "web", &folder.join("web"))?;
    let kubeconfig = grant(&cluster, &folder, &[])?;
    let start = |name: &'static str| {
        Daemon::secured(&folder.join(format!("{name}.log")), |command| {
            command.arg("--kubeconfig").arg(&kubeconfig).args(["-n", SYSTEM]);
            command.env("POD_NAME", name).env("ROOT_CA_DIR", folder.join("none"));
        })
    };
    let daemons = std::thread::scope(|scope| {
        let both = ["istiod-a", "istiod-b"].map(|name| scope.spawn(move || start(name)));
        both.map(|one| one.join().expect("starting a daemon does not panic"))
    });
    let [one, other] = daemons;
    let daemons = [one?, other?];

    let secret = Reference::new("v1", "Secret", SYSTEM, "istio-ca-secret");
    let kept = wait::until("a root", TIMEOUT, || cluster.get(&secret).ok()?)?;
    assert_eq!(kept["type"], "istio.io/ca-root");
    let root = BASE64_STANDARD.decode(kept["data"]["ca-cert.pem"].as_str().unwrap_or_default())?;
    let root = String::from_utf8(root)?;
    wait::until("the root in the namespace", TIMEOUT, || {
        (text_of(&cluster, "istio-ca-root-cert", "root-cert.pem")? == root).then_some(())
    })?;
    let token = cluster.token("shop", "web", &["istio-ca"])?;
    let mut before = Vec::new();
    for daemon in &daemons {
        let issued = certificate(daemon, &root, &token)?;
        assert_eq!(issued.roots, root, "replicas must use one root");
        verify(&issued.chain, &root)?;
        before.push(issued);
    }

    let authority = Authority::new("plugged in");
    let revoked = authority.revoked();
    cluster.api.apply(&authority.secret(SYSTEM, Some(&revoked)))?;
    for daemon in &daemons {
        // Clients that trust only the old root are served all the time.
        let issued = wait::until("a certificate of the other CA", TIMEOUT, || {
            let issued = certificate(daemon, &root, &token).expect("every handshake succeeds");
            issued.chain.contains(&authority.certificate()).then_some(issued)
        })?;
        verify(&issued.chain, &root)?;
        verify(&issued.chain, &authority.root())?;
        for old in &before {
            verify(&old.chain, &issued.roots)?;
        }
        // The serving certificate follows the signing CA once its key exists. Until then, no client trusts only the new
        // root.
        wait::until("a serving certificate of the new CA", TIMEOUT, || {
            certificate(daemon, &authority.root(), &token).ok()
        })?;
    }
    wait::until("both roots in the namespace", TIMEOUT, || {
        let roots = text_of(&cluster, "istio-ca-root-cert", "root-cert.pem")?;
        (roots.contains(&authority.root()) && roots.contains(&root)).then_some(())
    })?;
    wait::until("the revocation list in the namespace", TIMEOUT, || {
        (text_of(&cluster, "istio-ca-crl", "ca-crl.pem")? == revoked).then_some(())
    })?;
    no_request_was_forbidden(&cluster)?;
    Ok(())
}
