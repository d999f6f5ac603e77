use super::*;
use crate::{
    api::Kind,
    model::{
        Installation,
        fixture::{self, folder_world, labels},
    },
    proto::istio::r#type::v1beta1::WorkloadSelector,
};

const POLICIES: &str = "
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: mesh, namespace: istio-system}
spec: {mtls: {mode: STRICT}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: late, namespace: shop, creationTimestamp: '2024-03-01T00:00:00Z'}
spec: {mtls: {mode: DISABLE}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: general, namespace: shop}
spec: {mtls: {mode: PERMISSIVE}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: web, namespace: shop}
spec:
  selector: {matchLabels: {app: web}}
  portLevelMtls: {8080: {mode: DISABLE}, 9090: {}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: late-web, namespace: shop, creationTimestamp: '2024-03-01T00:00:00Z'}
spec: {selector: {matchLabels: {app: web}}, mtls: {mode: STRICT}}
";

#[test]
fn the_narrowest_policy_that_is_set_counts() {
    let world = folder_world(Installation::default(), &[("config.yaml", POLICIES)]);
    let (cx, mesh) = (Cx::untracked(), world.snapshot());
    let mode = |namespace: &str, app: &str, port: u32| {
        mtls_mode(&cx, &mesh, &Namespace::new(namespace), &labels(&[("app", app)]), port)
    };
    assert_eq!(mode("other", "web", 1), MtlsMode::Strict);
    assert_eq!(mode("shop", "db", 8080), MtlsMode::Permissive);
    assert_eq!(mode("shop", "web", 8080), MtlsMode::Disable);
    assert_eq!(mode("shop", "web", 9090), MtlsMode::Permissive);
    assert_eq!(mode("istio-system", "web", 8080), MtlsMode::Strict);
    let policy = peer_policy(&cx, &mesh, &"shop".into(), &labels(&[("app", "web")]));
    let ports = [(8080, MtlsMode::Disable), (9090, MtlsMode::Permissive)];
    assert_eq!((policy.mode, policy.ports), (MtlsMode::Permissive, ports.into()));
    assert_eq!(namespace_mode(&cx, &mesh, &"shop".into()), MtlsMode::Permissive);
    assert_eq!(namespace_mode(&cx, &mesh, &"other".into()), MtlsMode::Strict);
}

#[test]
fn without_policies_mtls_is_permissive() {
    let world = folder_world(Installation::default(), &[]);
    let mode = namespace_mode(&Cx::untracked(), &world.snapshot(), &"shop".into());
    assert_eq!(mode, MtlsMode::Permissive);
}

#[test]
fn r21_ports_with_modes_of_their_own_are_limited() {
    let policy = |surplus: Mode| {
        let ports = (1..=1_000).map(|port| (port, Mode::Disable)).chain([(2_000, surplus)]);
        let spec = security::PeerAuthentication {
            selector: Some(WorkloadSelector {
                match_labels: [("app".to_owned(), "web".to_owned())].into(),
            }),
            port_level_mtls: ports
                .map(|(port, mode)| (port, MutualTls { mode: mode.into() }))
                .collect(),
            ..Default::default()
        };
        let row = fixture::config(Kind::PeerAuthentication, "shop/web", 0, spec);
        let mesh = fixture::world(vec![row.into()]).snapshot;
        let policy = peer_policy(&Cx::untracked(), &mesh, &"shop".into(), &labels(&[("app", "web")]));
        (policy.ports.len(), policy.mode_on(1_000), policy.mode_on(2_000))
    };
    assert_eq!(policy(Mode::Disable), (1_000, MtlsMode::Disable, MtlsMode::Permissive));
    assert_eq!(policy(Mode::Strict), (1_000, MtlsMode::Disable, MtlsMode::Strict));
}
