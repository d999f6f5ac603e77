use super::*;
use crate::model::{
    Installation,
    fixture::{folder_world, labels},
};

const POLICIES: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: all, namespace: istio-system}
spec: {}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: class, namespace: istio-system}
spec: {targetRefs: [{group: gateway.networking.k8s.io, kind: GatewayClass, name: istio-waypoint}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: own, namespace: shop}
spec: {}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: gateway, namespace: shop}
spec: {targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: front}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: service, namespace: data}
spec: {targetRefs: [{group: '', kind: Service, name: db}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: web, namespace: shop, creationTimestamp: '2023-01-01T00:00:00Z'}
spec: {selector: {matchLabels: {app: web}}}
";

fn found(subject: &Subject) -> Vec<String> {
    let world = folder_world(Installation::default(), &[("config.yaml", POLICIES)]);
    let mesh = world.snapshot();
    let keys = attached::<security::AuthorizationPolicy>(&Cx::untracked(), &mesh, subject);
    keys.iter().map(ToString::to_string).collect()
}

#[test]
fn policies_select_workloads_by_labels() {
    let web = Subject::workload("shop".into(), labels(&[("app", "web")]));
    assert_eq!(found(&web), ["istio-system/all", "shop/web", "shop/own"]);
    let other = Subject::workload("other".into(), labels(&[("app", "web")]));
    assert_eq!(found(&other), ["istio-system/all"]);
}

#[test]
fn policies_select_gateways_by_labels_or_reference() {
    let front = labels(&[(GATEWAY_NAME_LABEL, "front")]);
    let gateway = Subject::workload("shop".into(), front);
    assert_eq!(found(&gateway), ["istio-system/all", "shop/gateway", "shop/own"]);
}

#[test]
fn policies_select_waypoints_by_reference() {
    let service = TargetService {
        registry: Registry::Kubernetes,
        namespace: "data".into(),
        name: "db".into(),
    };
    let waypoint = Subject {
        is_waypoint: true,
        services: vec![service],
        ..Subject::workload("shop".into(), labels(&[(GATEWAY_NAME_LABEL, "front")]))
    };
    assert_eq!(found(&waypoint), ["istio-system/class", "shop/gateway", "data/service"]);
}
