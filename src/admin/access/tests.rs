use axum::routing::get;
use futures::future::BoxFuture;
use http_body_util::BodyExt;
use tower::ServiceExt;

use super::*;
use crate::{
    auth::{Authenticator, Caller, CallerSource},
    model::{Installation, fixture},
};

/// Accepts the bearer token as the identity.
struct TrustingAuthenticator;

impl Authenticator for TrustingAuthenticator {
    fn name(&self) -> &'static str {
        "trusting"
    }

    fn authenticate<'a>(&'a self, credentials: Credentials<'a>) -> BoxFuture<'a, Result<Caller, AuthenticationError>> {
        let token = credentials.headers.get("authorization");
        let token = token.and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let caller = match token {
            None => Err(AuthenticationError::Missing("token")),
            Some("away") => Err(AuthenticationError::Unavailable("the API server is away".to_owned())),
            Some(id) => Ok(Caller {
                source: CallerSource::IdToken,
                identities: vec![id.into()],
                kubernetes: None,
                expires_at: None,
            }),
        };
        Box::pin(async move { caller })
    }
}

/// Keeps the mesh's channel open.
struct Harness {
    pages: Router,
    _mesh: watch::Sender<Arc<MeshSnapshot>>,
}

impl Harness {
    fn new(change: impl FnOnce(&mut Installation)) -> Self {
        let mut installation = Installation::default();
        change(&mut installation);
        let mesh = "trustDomain: mesh.example\ntrustDomainAliases: [old.example]";
        let world = fixture::folder_world(installation, &[("mesh.yaml", mesh)]);
        let (sender, mesh) = watch::channel(world.snapshot());
        let access = Access::new(Authenticators::new(vec![Box::new(TrustingAuthenticator)]), mesh);
        let page = async |axum::Extension(scope): axum::Extension<DebugScope>| format!("{scope:?}");
        let pages = Router::new()
            .route("/debug/syncz", get(page))
            .route("/debug/config_dump", get(page))
            .route("/debug", get(page));
        Self {
            pages: access.guard(pages, |page| match page {
                "config_dump" => Readers::ProxyNamespace,
                _ => Readers::ControlPlane,
            }),
            _mesh: sender,
        }
    }

    /// Returns the status of a page, and the caller's scope.
    async fn get(&self, page: &str, address: &str, token: Option<&str>) -> (u16, String) {
        let mut request = axum::http::Request::get(page);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let address: SocketAddr = address.parse().unwrap();
        let request = request.extension(ConnectInfo(address)).body(axum::body::Body::empty());
        let response = self.pages.clone().oneshot(request.unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn status(&self, page: &str, token: &str) -> u16 {
        self.get(page, FAR, Some(token)).await.0
    }
}

const FAR: &str = "10.0.0.9:4000";
const SYNCZ: &str = "/debug/syncz";
const DUMP: &str = "/debug/config_dump?proxyID=a";
const SYSTEM: &str = "spiffe://mesh.example/ns/istio-system/sa/istiod";
const SHOP: &str = "spiffe://mesh.example/ns/shop/sa/default";

#[tokio::test]
async fn r5_pages_require_authentication() {
    let harness = Harness::new(|_| {});
    for page in [SYNCZ, DUMP, "/debug"] {
        assert_eq!(harness.get(page, FAR, None).await.0, 401, "{page}");
        assert_eq!(harness.get(page, FAR, Some("away")).await.0, 503, "{page}");
    }
    // A header does not make a caller local.
    assert_eq!(
        harness.get(SYNCZ, "127.0.0.1:4000", None).await,
        (200, "All".to_owned())
    );
    assert_eq!(harness.get(SYNCZ, "[::ffff:127.0.0.1]:1", None).await.0, 200);
    assert_eq!(harness.get(SYNCZ, "[::1]:1", None).await.0, 200);
}

#[tokio::test]
async fn r5_other_namespaces_see_only_their_own_proxies() {
    let harness = Harness::new(|_| {});
    assert_eq!(harness.get(SYNCZ, FAR, Some(SYSTEM)).await, (200, "All".to_owned()));
    assert_eq!(harness.status(SYNCZ, SHOP).await, 403);
    assert_eq!(harness.status("/debug", SHOP).await, 403);
    let own = (200, "Namespace(\"shop\")".to_owned());
    assert_eq!(harness.get(DUMP, FAR, Some(SHOP)).await, own);
}

#[tokio::test]
async fn r5_identities_outside_the_mesh_have_no_access() {
    let harness = Harness::new(|_| {});
    for id in [
        "spiffe://other.example/ns/istio-system/sa/istiod",
        "spiffe://mesh.example/ns//sa/istiod",
        "spiffe://mesh.example/gateway",
        "istiod.istio-system.svc",
    ] {
        assert_eq!(
            (harness.status(SYNCZ, id).await, harness.status(DUMP, id).await),
            (403, 403),
            "{id}"
        );
    }
    assert_eq!(
        harness
            .status(SYNCZ, "spiffe://old.example/ns/istio-system/sa/istiod")
            .await,
        200
    );
}

#[tokio::test]
async fn namespaces_can_be_allowed() {
    let allowed = Harness::new(|installation| {
        installation.features.debug_endpoint_auth_allowed_namespaces = vec!["".into(), "shop".into()];
    });
    assert_eq!(allowed.status(SYNCZ, SHOP).await, 200);
    let open = Harness::new(|installation| installation.features.enable_debug_endpoint_auth = false);
    assert_eq!(
        (open.status(SYNCZ, SHOP).await, open.get(SYNCZ, FAR, None).await.0),
        (200, 401)
    );
}
