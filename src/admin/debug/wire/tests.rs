use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
};

use super::*;
use crate::{
    admin::debug::Dump,
    auth::{Authenticators, Caller, CallerSource},
    distribution::{Distribution, DistributionSources, replicas::OwnReplica},
    environment,
    kube::health::WatchMetrics,
    model::{Installation, MeshSnapshot, fixture},
    push::{delivery::Tracker, push_loop::Flushes},
    task::Tasks,
    xds::registry::ConnectionRegistry,
};

const SYSTEM: &str = "spiffe://cluster.local/ns/istio-system/sa/istiod";
const SHOP: &str = "spiffe://cluster.local/ns/shop/sa/default";

struct Harness {
    handler: XdsDebugHandler,
    _mesh: watch::Sender<Arc<MeshSnapshot>>,
}

impl Harness {
    fn new(change: impl FnOnce(&mut Installation)) -> Self {
        Self::with_mesh(change, "")
    }

    /// Returns a harness with a mesh config.
    fn with_mesh(change: impl FnOnce(&mut Installation), mesh: &str) -> Self {
        let mut installation = Installation::default();
        change(&mut installation);
        let world = fixture::folder_world(installation, &[("mesh.yaml", mesh)]);
        let (sender, mesh) = watch::channel(world.snapshot());
        let (inspect, _) = mpsc::channel(1);
        let (flushes, _) = Flushes::channel();
        let connections = Arc::<ConnectionRegistry>::default();
        let inputs = DistributionSources {
            mesh: mesh.clone(),
            inspect: inspect.clone(),
            flushes: flushes.clone(),
            tracker: Tracker::new(environment::now),
            connections: connections.clone(),
            ingest_status: Arc::default(),
            replica: OwnReplica::default(),
            peers: None,
            runtime: Handle::current(),
        };
        let sources = Sources {
            authority: watch::channel(None).1,
            anchors: watch::channel(Arc::default()).1,
            mesh: mesh.clone(),
            committed: mesh.clone(),
            inspect,
            flushes,
            connections,
            distribution: Distribution::start(&Tasks::default(), inputs).0,
            remote: None,
            watches: WatchMetrics::new(&prometheus::Registry::new()).unwrap(),
            keys: crate::ingest::jwks::KeyReports::none(),
            templates: None,
        };
        let access = Access::new(Authenticators::default(), mesh);
        Self {
            handler: XdsDebugHandler::new(
                Arc::new(sources),
                access,
                Renderer::new(Tasks::default(), Handle::current()),
                "istiod-0",
            ),
            _mesh: sender,
        }
    }

    async fn ask(&self, type_url: &str, names: &[&str], identity: Option<&str>) -> Result<DebugResponse, DebugError> {
        let caller = identity.map(|identity| Caller {
            source: CallerSource::ClientCertificate,
            identities: vec![identity.into()],
            kubernetes: None,
            expires_at: None,
        });
        let question = DebugRequest {
            type_url: type_url.to_owned(),
            names: names.iter().map(SmolStr::new).collect(),
            caller,
        };
        self.handler.answer(question).await
    }

    /// Returns the text of a page for the control plane's own account.
    async fn page(&self, name: &str) -> String {
        let answer = self.ask(PAGE, &[name], Some(SYSTEM)).await.unwrap();
        let any = answer.resources[0].any();
        assert_eq!((any.type_url.as_str(), answer.resources[0].name.as_str()), (PAGE, name));
        String::from_utf8(any.value.to_vec()).unwrap()
    }
}

#[tokio::test]
async fn pages_are_those_of_http() {
    let harness = Harness::new(|_| {});
    assert!(harness.page("list").await.contains("\"config_dump\""));
    assert_eq!(harness.page("connections?pretty=1").await.lines().count(), 3);
    assert_eq!(harness.page("nothing").await, "404 page not found\n");
    assert_eq!(
        harness.page("config_dump").await,
        "You must provide a proxyID in the query string\n"
    );
    assert!(
        harness
            .page("config_dump?proxyID=a")
            .await
            .starts_with("Proxy not connected to this Pilot instance.")
    );
}

#[tokio::test]
async fn r5_pages_that_are_off_are_off_over_xds() {
    let harness = Harness::new(|installation| installation.features.enable_debug_on_http = false);
    for page in ["list", "configz", "config_dump?proxyID=a", "status"] {
        assert_eq!(harness.page(page).await, "404 page not found\n", "{page}");
    }
    assert!(harness.ask(SYNC_STATUS, &[], Some(SYSTEM)).await.is_ok());
}

#[tokio::test]
async fn r5_pages_over_xds_require_access() {
    let harness = Harness::new(|_| {});
    let anonymous = harness.ask(PAGE, &["list"], None).await.unwrap_err();
    assert_eq!(anonymous, DebugError::Unauthenticated);
    for page in [
        "list",
        "syncz",
        "registryz?x=config_dump",
        "config_dump/../syncz",
        "config_dump%2f..%2fsyncz",
        "config_dump/",
    ] {
        let denial = harness.ask(PAGE, &[page], Some(SHOP)).await;
        assert_eq!(denial.unwrap_err(), DebugError::Forbidden(vec![SHOP.into()]), "{page}");
    }
    assert!(harness.ask(PAGE, &["edsz?proxyID=a"], Some(SHOP)).await.is_ok());
    let foreign = "spiffe://other.example/ns/istio-system/sa/istiod";
    assert!(matches!(
        harness.ask(PAGE, &["edsz"], Some(foreign)).await,
        Err(DebugError::Forbidden(_))
    ));
    for names in [&[][..], &["list", "syncz"]] {
        assert!(matches!(
            harness.ask(PAGE, names, Some(SYSTEM)).await,
            Err(DebugError::Malformed(_))
        ));
    }
    for name in ["\u{0}", "a b", "{x}\n"] {
        assert!(
            matches!(
                harness.ask(PAGE, &[name], Some(SYSTEM)).await,
                Err(DebugError::Malformed(_))
            ),
            "{name:?}"
        );
    }
}

#[tokio::test]
async fn r5_sync_status_requires_authentication() {
    let harness = Harness::new(|_| {});
    for url in [SYNC_STATUS, CONFIG_DUMP, "istio.io/debug/other"] {
        assert_eq!(
            harness.ask(url, &["a"], None).await.unwrap_err(),
            DebugError::Unauthenticated,
            "{url}"
        );
        // An absent proxy and an invisible one are indistinguishable.
        assert!(
            harness.ask(url, &["a"], Some(SHOP)).await.unwrap().resources.is_empty(),
            "{url}"
        );
    }
    let open = Harness::new(|installation| installation.features.enable_debug_endpoint_auth = false);
    assert!(open.ask(SYNC_STATUS, &[], None).await.is_ok());
    // Pages always require access, and pages about all proxies that of the control plane.
    assert_eq!(
        open.ask(PAGE, &["list"], None).await.unwrap_err(),
        DebugError::Unauthenticated
    );
    for page in ["list", "configz", "adsz?push=true"] {
        let denial = open.ask(PAGE, &[page], Some(SHOP)).await;
        assert_eq!(denial.unwrap_err(), DebugError::Forbidden(vec![SHOP.into()]), "{page}");
    }
    assert!(open.ask(PAGE, &["list"], Some(SYSTEM)).await.is_ok());
    assert!(open.ask(PAGE, &["edsz?proxyID=a"], Some(SHOP)).await.is_ok());
}

#[tokio::test]
async fn pages_are_for_the_namespace_of_the_control_plane() {
    const ROOT: &str = "spiffe://cluster.local/ns/mesh-config/sa/default";
    let harness = Harness::with_mesh(|_| {}, "rootNamespace: mesh-config");
    for identity in [SYSTEM, ROOT] {
        let answer = harness.ask(PAGE, &["list"], Some(identity)).await;
        assert!(answer.is_ok(), "{identity}: {answer:?}");
    }
    let denial = harness.ask(PAGE, &["list"], Some(SHOP)).await;
    assert_eq!(denial.unwrap_err(), DebugError::Forbidden(vec![SHOP.into()]));
}

#[tokio::test]
async fn responses_name_the_control_plane() {
    let harness = Harness::new(|_| {});
    let answer = harness.ask(SYNC_STATUS, &[], Some(SYSTEM)).await.unwrap();
    let who: Value = serde_json::from_str(&answer.control_plane.unwrap()).unwrap();
    assert_eq!(
        (&who["Component"], &who["ID"], &who["Info"]["version"]),
        (&json!("istiod"), &json!("istiod-0"), &json!(ISTIO_VERSION))
    );
}

#[test]
fn dumps_are_messages() {
    let dump = Dump {
        resources: Arc::new(crate::generate::ResourceSnapshot::empty()),
        types: Vec::new(),
        is_ztunnel: false,
    };
    let configs = dump.sections(true);
    let encoded: Vec<_> = configs.iter().filter_map(encoded).collect();
    assert_eq!(encoded.len(), configs.len());
    assert_eq!(
        encoded[0].any().type_url,
        "type.googleapis.com/envoy.admin.v3.BootstrapConfigDump"
    );
}
