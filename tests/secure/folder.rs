//! The secure port of a daemon that serves a folder, with a plugged-in CA.

use std::path::PathBuf;

use libtest_mimic::{Failed, Trial};
use serde_json::json;
use tonic::Code;

use super::authority::Authority;
use crate::support::agent::{Agent, ClientCredentials, KeyKind, Trust};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::http::RUNTIME;
use crate::support::{project, scratch, wait};

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const WEB: &str = "spiffe://cluster.local/ns/default/sa/web";

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "secure::folder::certificates_are_renewed_with_certificates",
            certificates_are_renewed_with_certificates,
        ),
        Trial::test(
            "secure::folder::certificates_need_authentication_of_clients",
            certificates_need_authentication_of_clients,
        ),
        Trial::test(
            "secure::folder::serving_certificate_is_reloaded",
            serving_certificate_is_reloaded,
        ),
    ]
}

fn node(namespace: &str, account: &str) -> Node {
    Node {
        id: format!("sidecar~10.0.0.1~pod.{namespace}~{namespace}.svc.cluster.local"),
        metadata: json!({ "NAMESPACE": namespace, "SERVICE_ACCOUNT": account }),
    }
}

fn sample() -> PathBuf {
    project().join("samples/helloworld")
}

fn daemon(name: &str, authority: &Authority, variables: &[(&str, &str)]) -> Result<(Daemon, PathBuf), String> {
    let folder = scratch(name);
    let plugged = folder.join("cacerts");
    authority.plug_into(&plugged);
    let daemon = Daemon::secured(&folder.join("istiod.log"), |command| {
        command.arg("--configDir").arg(sample()).env("ROOT_CA_DIR", &plugged);
        command.envs(variables.iter().copied());
    })?;
    Ok((daemon, folder))
}

fn certificates_are_renewed_with_certificates() -> Result<(), Failed> {
    let authority = Authority::new("trial");
    let (daemon, _) = daemon("secure-folder", &authority, &[])?;
    let agent = Agent::new(daemon.secure, Trust::Roots(authority.root.clone()));
    RUNTIME.block_on(async {
        let refused = agent
            .certificate(&ClientCredentials::default(), KeyKind::Ecdsa)
            .await
            .err();
        expect(
            refused.map(|status| status.code()),
            Some(Code::Unauthenticated),
            "an unauthenticated request for a certificate",
        )?;

        let first = ClientCredentials::certificate(authority.certificate(WEB));
        for kind in [KeyKind::Ecdsa, KeyKind::Rsa] {
            let next = agent
                .certificate(&first, kind)
                .await
                .map_err(|status| status.to_string())?;
            expect(
                next.roots.trim(),
                authority.root.trim(),
                "the last entry must be the root",
            )?;
            let credentials = ClientCredentials::certificate(next);
            let mut stream = agent
                .ads(&credentials, &node("default", "web"))
                .await
                .map_err(|status| status.to_string())?;
            let clusters = stream.ask(CLUSTER, &[]).await.map_err(|status| status.to_string())?;
            expect(clusters.resources.is_empty(), false, "no clusters")?;
            for (namespace, account) in [("other", "web"), ("default", "other")] {
                let mut stream = agent
                    .ads(&credentials, &node(namespace, account))
                    .await
                    .map_err(|status| status.to_string())?;
                let refused = stream.ask(CLUSTER, &[]).await.err().map(|status| status.code());
                expect(
                    refused,
                    Some(Code::PermissionDenied),
                    "configuration of another identity",
                )?;
            }
        }

        let refused = agent
            .ads(&ClientCredentials::default(), &node("default", "web"))
            .await
            .err();
        expect(
            refused.map(|status| status.code()),
            Some(Code::Unauthenticated),
            "an unauthenticated request for configuration",
        )?;
        let foreign = ClientCredentials::certificate(Authority::new("foreign").certificate(WEB));
        let refused = agent.certificate(&foreign, KeyKind::Ecdsa).await;
        expect(refused.is_err(), true, "a connection with a certificate of another CA")
    })?;
    Ok(())
}

/// Without authentication of clients, all get configuration, and none gets a certificate.
fn certificates_need_authentication_of_clients() -> Result<(), Failed> {
    let authority = Authority::new("unchecked");
    let (daemon, _) = daemon("secure-unchecked", &authority, &[("XDS_AUTH", "false")])?;
    let agent = Agent::new(daemon.secure, Trust::Roots(authority.root.clone()));
    RUNTIME.block_on(async {
        let credentials = ClientCredentials::certificate(authority.certificate(WEB));
        let refused = agent.certificate(&credentials, KeyKind::Ecdsa).await.err();
        expect(
            refused.map(|status| status.code()),
            Some(Code::Unauthenticated),
            "a request for a certificate",
        )?;
        let mut stream = agent
            .ads(&ClientCredentials::default(), &node("default", "web"))
            .await
            .map_err(|status| status.to_string())?;
        let clusters = stream.ask(CLUSTER, &[]).await.map_err(|status| status.to_string())?;
        expect(clusters.resources.is_empty(), false, "no clusters")
    })?;
    Ok(())
}

/// New connections get the new serving certificate; open streams stay.
fn serving_certificate_is_reloaded() -> Result<(), Failed> {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let folder = scratch("secure-swap");
    old.plug_into(&folder.join("cacerts"));
    let server = "istiod.istio-system.svc";
    let write = |authority: &Authority| authority.write_serving_certificate(&folder, server);
    write(&old);
    let daemon = Daemon::secured(&folder.join("istiod.log"), |command| {
        command.arg("--configDir").arg(sample());
        command.env("ROOT_CA_DIR", folder.join("cacerts"));
        for (flag, file) in [
            ("--tlsCertFile", "tls.crt"),
            ("--tlsKeyFile", "tls.key"),
            ("--caCertFile", "root.crt"),
        ] {
            command.arg(flag).arg(folder.join(file));
        }
    })?;
    let credentials = ClientCredentials::certificate(old.certificate(WEB));
    let agent = |authority: &Authority| Agent::new(daemon.secure, Trust::Roots(authority.root.clone()));
    let mut stream = RUNTIME
        .block_on(agent(&old).ads(&credentials, &node("default", "web")))
        .map_err(|status| status.to_string())?;
    RUNTIME
        .block_on(stream.ask(CLUSTER, &[]))
        .map_err(|status| status.to_string())?;
    write(&new);
    wait::until("the new certificate", std::time::Duration::from_secs(30), || {
        RUNTIME.block_on(agent(&new).channel(&credentials)).ok()
    })?;
    expect(
        RUNTIME.block_on(agent(&old).channel(&credentials)).is_err(),
        true,
        "the old certificate must no longer be used",
    )?;
    RUNTIME
        .block_on(stream.ask("type.googleapis.com/envoy.config.listener.v3.Listener", &[]))
        .map_err(|status| format!("the open stream: {status}"))?;
    Ok(())
}

pub(super) fn expect<T: PartialEq + std::fmt::Debug>(given: T, expected: T, what: &str) -> Result<(), String> {
    if given == expected {
        return Ok(());
    }
    Err(format!("{what}: {given:?}, not {expected:?}"))
}
