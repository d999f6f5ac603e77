use super::*;
use crate::{
    auth::CallerSource,
    model::{Installation, fixture},
};

const REVIEWS: &str = "spiffe://cluster.local/ns/default/sa/reviews";

fn pod(name: &str, account: &str, node: &str, phase: &str) -> String {
    let (namespace, name) = name.split_once('/').expect("namespace/name");
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {namespace}, uid: u-{name}}}\n\
         spec: {{nodeName: '{node}', serviceAccountName: {account}}}\nstatus: {{phase: {phase}}}\n---\n"
    )
}

fn authorizer(accounts: &[&str]) -> NodeAuthorizer {
    let west =
        pod("istio-system/ztunnel-1", "ztunnel", "n2", "Running") + &pod("default/west-1", "west", "n1", "Running");
    let own = [
        pod("istio-system/ztunnel-1", "ztunnel", "n1", "Running"),
        pod("istio-system/ztunnel-0", "ztunnel", "", "Pending"),
        pod("default/reviews-1", "reviews", "n1", "Running"),
        pod("default/ratings-1", "ratings", "n2", "Running"),
        pod("default/details-1", "details", "n1", "Failed"),
        pod("default/pending-1", "pending", "", "Pending"),
    ];
    let files = [("kube.yaml", own.concat()), ("kube-west.yaml", west)];
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let installation = Installation {
        cluster: fixture::CLUSTER,
        ..Installation::default()
    };
    let mesh = fixture::folder_world(installation, &files).snapshot();
    let accounts: Vec<SmolStr> = accounts.iter().map(SmolStr::new).collect();
    let domains = TrustDomains {
        own: "cluster.local".into(),
        aliases: vec!["old.local".into()],
    };
    let (authorizer, wrong) =
        NodeAuthorizer::new(&accounts, watch::channel(Arc::new(domains)).1, watch::channel(mesh).1);
    assert_eq!(wrong, Vec::<SmolStr>::new());
    authorizer
}

fn ztunnel() -> KubernetesInfo {
    KubernetesInfo {
        cluster: fixture::CLUSTER,
        namespace: "istio-system".into(),
        service_account: "ztunnel".into(),
        pod_name: "ztunnel-1".into(),
        pod_uid: "u-ztunnel-1".into(),
    }
}

fn caller(kubernetes: Option<KubernetesInfo>) -> Caller {
    Caller {
        source: CallerSource::IdToken,
        identities: vec!["spiffe://cluster.local/ns/istio-system/sa/ztunnel".into()],
        kubernetes,
        expires_at: None,
    }
}

#[test]
fn a_node_may_impersonate_its_own_workloads() {
    let authorizer = authorizer(&["istio-system/ztunnel"]);
    let ask = |identity: &str| authorizer.authorize(&caller(Some(ztunnel())), identity);
    assert_eq!(ask(REVIEWS), Ok(()));
    assert_eq!(
        ask("spiffe://old.local/ns/default/sa/reviews"),
        Ok(()),
        "an alias is ours"
    );
    for elsewhere in ["ratings", "details", "pending", "west", "nobody"] {
        let refused = ask(&format!("spiffe://cluster.local/ns/default/sa/{elsewhere}"));
        assert!(
            matches!(refused, Err(ImpersonationError::NotOnNode(..))),
            "{elsewhere}: {refused:?}"
        );
    }
    let foreign = ask("spiffe://other/ns/default/sa/reviews");
    assert_eq!(foreign, Err(ImpersonationError::TrustDomain("other".into())));
    for bad in [
        "",
        "reviews",
        "spiffe://cluster.local/ns/default/sa/reviews/x",
        "spiffe://cluster.local/default/reviews",
    ] {
        assert!(matches!(ask(bad), Err(ImpersonationError::Identity(_))), "{bad}");
    }
}

#[test]
fn the_caller_must_be_the_pod_of_its_token() {
    let authorizer = authorizer(&["istio-system/ztunnel"]);
    let ask = |info: Option<KubernetesInfo>| authorizer.authorize(&caller(info), REVIEWS).expect_err("refused");
    assert_eq!(ask(None), ImpersonationError::NoToken);
    let with = |change: &dyn Fn(&mut KubernetesInfo)| {
        let mut info = ztunnel();
        change(&mut info);
        ask(Some(info))
    };
    let reborn = with(&|info| info.pod_uid = "u-old".into());
    assert!(
        matches!(reborn, ImpersonationError::PodMismatch { field: "uid", .. }),
        "{reborn}"
    );
    let unbound = with(&|info| info.pod_uid = "".into());
    assert!(matches!(unbound, ImpersonationError::Unbound(..)), "{unbound}");
    let unknown = with(&|info| info.pod_name = "ztunnel-2".into());
    assert!(matches!(unknown, ImpersonationError::Pod(..)), "{unknown}");
    let other = with(&|info| info.service_account = "reviews".into());
    assert!(matches!(other, ImpersonationError::Account(..)), "{other}");
    let homeless = with(&|info| (info.pod_name, info.pod_uid) = ("ztunnel-0".into(), "u-ztunnel-0".into()));
    assert!(matches!(homeless, ImpersonationError::NotOnNode(..)), "{homeless}");
    // The same names in another cluster are another pod, on another node.
    let west = with(&|info| info.cluster = "west".into());
    assert!(matches!(west, ImpersonationError::NotOnNode(..)), "{west}");
}

#[test]
fn the_service_account_of_the_pod_must_match() {
    let authorizer = authorizer(&["istio-system/ztunnel", "default/reviews"]);
    let info = KubernetesInfo {
        namespace: "default".into(),
        pod_name: "ratings-1".into(),
        pod_uid: "u-ratings-1".into(),
        service_account: "reviews".into(),
        ..ztunnel()
    };
    let refused = authorizer.authorize(&caller(Some(info)), REVIEWS).expect_err("refused");
    assert!(
        matches!(
            refused,
            ImpersonationError::PodMismatch {
                field: "service account",
                ..
            }
        ),
        "{refused}"
    );
}

#[test]
fn impersonation_is_disabled_without_trusted_accounts() {
    let refused = authorizer(&[]).authorize(&caller(Some(ztunnel())), REVIEWS);
    assert_eq!(refused, Err(ImpersonationError::Disabled));
    let channel = (
        watch::channel(Arc::default()).1,
        watch::channel(fixture::world(Vec::new()).snapshot).1,
    );
    let (_, wrong) = NodeAuthorizer::new(&["ztunnel".into(), "a/b/c".into(), "/x".into()], channel.0, channel.1);
    assert_eq!(wrong.len(), 3);
}
