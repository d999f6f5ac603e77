//! Access to secrets while all of them are cached: every reader is checked itself.

use std::sync::Arc;

use super::*;
use crate::api::access_review::{Access, AccessReview, Subject};

/// A mesh with API servers that answer reviews, and proxies that connect and disconnect.
struct Fixture {
    world: World,
    store: ConfigStore,
}

fn account(proxy: &str) -> Subject {
    let (account, namespace) = proxy.split_once('.').expect("account.namespace");
    Subject {
        cluster: model::CLUSTER,
        namespace: namespace.into(),
        service_account: account.into(),
    }
}

impl Fixture {
    fn new(config: &str) -> Self {
        let installation = Installation {
            reviews_access: true,
            ..Installation::default()
        };
        let files = [("mesh.yaml", ""), ("kube.yaml", SECRETS), ("config.yaml", config)];
        Self {
            world: model::folder_world(installation, &files),
            store: ConfigStore::default(),
        }
    }

    /// Connects a gateway with the labels `app: gw`, the same node for all, and the verified identity
    /// `account.namespace`.
    fn join(&mut self, member: u64, identity: &str) {
        let Subject {
            namespace,
            service_account,
            cluster,
        } = account(identity);
        let proxy = Proxy {
            identity: Some(Identity {
                namespace,
                service_account,
            }),
            ..fixture::changed(router(), |kind| kind.cluster = cluster)
        };
        let connected = ProxyEvents {
            connected: vec![(ConnectionId(member), Arc::new(proxy))],
            ..ProxyEvents::default()
        };
        let snapshot = self.world.snapshot();
        self.store.update(&snapshot, &ChangeSet::default(), connected, &Serial);
    }

    fn leave(&mut self, member: u64) {
        let disconnected = ProxyEvents {
            disconnected: vec![ConnectionId(member)],
            ..ProxyEvents::default()
        };
        let snapshot = self.world.snapshot();
        self.store
            .update(&snapshot, &ChangeSet::default(), disconnected, &Serial);
    }

    fn answer(&mut self, identity: &str, access: Access) -> usize {
        let key = AccessReview::key(&model::CLUSTER, &account(identity));
        let commit = self
            .world
            .commit(vec![Change::Upsert(AccessReview { key, access }.into())]);
        let update = self
            .store
            .update(&commit.snapshot, &commit.changes, ProxyEvents::default(), &Serial);
        update.built
    }

    fn held(&self, member: u64) -> Vec<String> {
        names(&self.store, member, ResourceType::Secret)
    }

    fn subjects(&self) -> Vec<String> {
        self.store.subjects().iter().map(ToString::to_string).collect()
    }
}

const CRED: &str = "kubernetes://cred";

#[test]
fn r10_keys_are_sent_after_the_review_only() {
    let mut fixture = Fixture::new(&gateway("{mode: MUTUAL, credentialName: cred}"));
    fixture.join(0, "gw.default");
    // CA certificates are not secret in their own namespace. Before the first review there is nothing to note.
    assert_eq!(fixture.held(0), ["kubernetes://cred-cacert"]);
    assert!(
        remarks(&fixture.store)
            .iter()
            .all(|remark| !remark.contains("list Secrets"))
    );
    assert_eq!(fixture.subjects(), ["gw.default of cluster Kubernetes"]);
    // One resource is built, and nothing else of the gateway.
    assert_eq!(fixture.answer("gw.default", Access::Allowed), 1);
    assert_eq!(fixture.held(0), [CRED, "kubernetes://cred-cacert"]);
    assert_eq!(fixture.answer("gw.default", Access::Denied("no role".into())), 1);
    assert_eq!(fixture.held(0), ["kubernetes://cred-cacert"]);
    let remark = "kubernetes://cred: the service account may not list Secrets: no role; requested by gw.default of cluster \
                  Kubernetes";
    assert!(
        remarks(&fixture.store).contains(&remark.to_owned()),
        "{:?}",
        remarks(&fixture.store)
    );
    fixture.answer("gw.default", Access::Unknown("away".into()));
    assert_eq!(fixture.held(0), ["kubernetes://cred-cacert"]);
    let all = remarks(&fixture.store);
    assert!(
        all.iter().any(|remark| remark.contains("could not be reviewed")),
        "{all:?}"
    );
}

#[test]
fn r9_r10_cached_secrets_are_denied_to_other_accounts() {
    let mut fixture = Fixture::new(&gateway("{mode: SIMPLE, credentialName: cred}"));
    fixture.join(0, "gw.default");
    fixture.answer("gw.default", Access::Allowed);
    assert_eq!(fixture.held(0), [CRED]);
    // The same node, secret name and namespace, but another service account.
    fixture.join(1, "thief.default");
    assert_eq!(fixture.held(1), Vec::<String>::new());
    fixture.answer("thief.default", Access::Denied("no role".into()));
    assert_eq!((fixture.held(0), fixture.held(1)), (vec![CRED.to_owned()], Vec::new()));
    // A review counts for its subject alone.
    fixture.answer("thief.default", Access::Allowed);
    fixture.answer("gw.default", Access::Denied("taken away".into()));
    assert_eq!((fixture.held(0), fixture.held(1)), (Vec::new(), vec![CRED.to_owned()]));
}

#[test]
fn r9_r10_cached_secrets_are_denied_to_other_namespaces() {
    let mut fixture = Fixture::new(&gateway(
        "{mode: SIMPLE, credentialNames: [cred, 'kubernetes://default/cred']}",
    ));
    fixture.join(0, "gw.default");
    fixture.answer("gw.default", Access::Allowed);
    assert_eq!(fixture.held(0), [CRED, "kubernetes://default/cred"]);
    // The same account of another namespace may list the Secrets there: the short name refers to its own namespace.
    fixture.join(1, "gw.elsewhere");
    fixture.answer("gw.elsewhere", Access::Allowed);
    assert_eq!(fixture.held(1), Vec::<String>::new());
    let all = remarks(&fixture.store);
    assert!(
        all.iter().any(|remark| remark.contains("needs a ReferenceGrant")),
        "{all:?}"
    );
    assert!(
        all.iter().any(|remark| remark.contains("there is no such Secret")),
        "{all:?}"
    );
}

#[test]
fn r9_r10_accounts_are_reviewed_in_their_own_cluster() {
    let mut fixture = Fixture::new(&gateway("{mode: SIMPLE, credentialName: cred}"));
    fixture.join(0, "gw.default");
    fixture.answer("gw.default", Access::Allowed);
    let mut far = fixture::changed(router(), |kind| kind.cluster = "far".into());
    far.identity = Identity::from_spiffe("spiffe://cluster.local/ns/default/sa/gw");
    let connected = ProxyEvents {
        connected: vec![(ConnectionId(1), Arc::new(far))],
        ..ProxyEvents::default()
    };
    let snapshot = fixture.world.snapshot();
    fixture
        .store
        .update(&snapshot, &ChangeSet::default(), connected, &Serial);
    assert_eq!((fixture.held(0).len(), fixture.held(1).len()), (1, 0));
    assert_eq!(
        fixture.subjects(),
        ["gw.default of cluster Kubernetes", "gw.default of cluster far"]
    );
}

#[test]
fn verified_references_need_no_review() {
    let mut fixture = Fixture::new(&gateway(
        "{mode: SIMPLE, credentialName: 'kubernetes-gateway://default/cred'}",
    ));
    fixture.join(0, "gw.default");
    assert_eq!(fixture.held(0), ["kubernetes-gateway://default/cred"]);
    assert_eq!(fixture.subjects(), Vec::<String>::new());
}

#[test]
fn readers_are_reported_while_connected() {
    let mut fixture = Fixture::new(&gateway("{mode: SIMPLE, credentialName: cred}"));
    fixture.join(0, "gw.default");
    fixture.join(1, "gw.default");
    fixture.leave(0);
    assert_eq!(fixture.subjects().len(), 1);
    fixture.leave(1);
    assert_eq!(fixture.subjects(), Vec::<String>::new());
}
