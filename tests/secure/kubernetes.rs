//! The secure port with a real API server, which reviews tokens and stores the root.

use libtest_mimic::{Failed, Trial};
use serde_json::json;
use tonic::Code;

use super::folder::expect;
use crate::support::agent::{Agent, ClientCredentials, KeyKind, Trust};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::http::RUNTIME;
use crate::support::kubernetes::api::Reference;
use crate::support::kubernetes::{self, Cluster};
use crate::support::{scratch, wait};

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

pub(super) fn trials() -> Vec<Trial> {
    vec![kubernetes::trial(
        "secure::kubernetes::tokens_authenticate_certificate_requests",
        tokens_authenticate_certificate_requests,
    )]
}

fn tokens_authenticate_certificate_requests(name: &str) -> Result<(), Failed> {
    let cluster = Cluster::start(name)?;
    let system = "istio-system";
    cluster.namespace(system, &json!({}))?;
    cluster.account_kubeconfig("shop", "web", &scratch(&format!("{name}-account")).join("kubeconfig"))?;
    let kubeconfig = cluster.admin_kubeconfig();
    let logs = scratch(&format!("{name}-daemons"));
    let start = |log: &str| {
        Daemon::secured(&logs.join(log), |command| {
            command.arg("--kubeconfig").arg(&kubeconfig).args(["-n", system]);
        })
    };
    let daemon = start("first.log")?;
    let reference = Reference::of(&json!({ "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "namespace": "shop", "name": "istio-ca-root-cert" } }));
    let root = wait::until(
        "the root certificate in the namespace",
        std::time::Duration::from_mins(1),
        || {
            let map = cluster.get(&reference).ok()??;
            map["data"]["root-cert.pem"].as_str().map(str::to_owned)
        },
    )?;
    let token = cluster.token("shop", "web", &["istio-ca"])?;
    let other = cluster.token("shop", "web", &["somebody-else"])?;
    let node = Node {
        id: "sidecar~10.0.0.1~web.shop~shop.svc.cluster.local".to_owned(),
        metadata: json!({ "NAMESPACE": "shop", "SERVICE_ACCOUNT": "web", "CLUSTER_ID": "Kubernetes" }),
    };
    let agent = Agent::new(daemon.secure, Trust::Roots(root.clone()));
    let credentials = RUNTIME.block_on(async {
        for wrong in [
            ClientCredentials::token(other),
            ClientCredentials::token("no.token.atall"),
            ClientCredentials::default(),
        ] {
            let refused = agent.certificate(&wrong, KeyKind::Ecdsa).await.err();
            expect(
                refused.map(|status| status.code()),
                Some(Code::Unauthenticated),
                "a token for another audience",
            )?;
        }
        let by_token = ClientCredentials::token(token);
        let certificate = agent
            .certificate(&by_token, KeyKind::Ecdsa)
            .await
            .map_err(|status| status.to_string())?;
        expect(
            certificate.roots.trim(),
            root.trim(),
            "the roots must equal those of the ConfigMap",
        )?;
        let credentials = ClientCredentials::certificate(certificate);
        for credentials in [&by_token, &credentials] {
            let mut stream = agent
                .ads(credentials, &node)
                .await
                .map_err(|status| status.to_string())?;
            stream.ask(CLUSTER, &[]).await.map_err(|status| status.to_string())?;
        }
        Ok::<_, String>(credentials)
    })?;
    drop(daemon);

    let daemon = start("second.log")?;
    let agent = Agent::new(daemon.secure, Trust::Roots(root));
    RUNTIME.block_on(async {
        let mut stream = agent
            .ads(&credentials, &node)
            .await
            .map_err(|status| status.to_string())?;
        stream.ask(CLUSTER, &[]).await.map_err(|status| status.to_string())
    })?;
    Ok(())
}
