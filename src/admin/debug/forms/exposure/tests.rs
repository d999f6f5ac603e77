use std::sync::Arc;

use serde_json::{Value, json};

use super::{collect::origins, *};
use crate::{
    api::{Kind, Meta},
    model::{
        Installation, fixture,
        gateway_api::PARENTS_ANNOTATION,
        sidecar_scope::{self, ScopeKey},
    },
};

/// A service with two workloads, of which one has a policy of its own; the client's namespace imports nothing else.
const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: reviews, namespace: shop, annotations: {networking.istio.io/exportTo: 'shop,front,back'}}
spec:
  clusterIP: 10.0.0.1
  selector: {app: reviews}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp-admin, port: 9000}]
---
apiVersion: v1
kind: Pod
metadata: {name: v1-a, generateName: v1-, namespace: shop, labels: {app: reviews, version: v1, security.istio.io/tlsMode: istio},
  ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: v1, controller: true}]}
spec: {serviceAccountName: reviews, containers: [{name: c}]}
status: {phase: Running, podIP: 10.1.0.1, podIPs: [{ip: 10.1.0.1}], conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Pod
metadata: {name: v2-a, generateName: v2-, namespace: shop, labels: {app: reviews, version: v2, security.istio.io/tlsMode: istio},
  ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: v2, controller: true}]}
spec: {serviceAccountName: reviews, containers: [{name: c}]}
status: {phase: Running, podIP: 10.1.0.2, podIPs: [{ip: 10.1.0.2}], conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: reviews-a, namespace: shop, labels: {kubernetes.io/service-name: reviews}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}, {name: tcp-admin, port: 9000, protocol: TCP}]
endpoints:
- {addresses: [10.1.0.1], conditions: {ready: true}, targetRef: {kind: Pod, name: v1-a, namespace: shop}}
- {addresses: [10.1.0.2], conditions: {ready: true}, targetRef: {kind: Pod, name: v2-a, namespace: shop}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: shop}
spec: {mtls: {mode: STRICT}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: v2, namespace: shop}
spec: {selector: {matchLabels: {version: v2}}, mtls: {mode: STRICT}, portLevelMtls: {9000: {mode: PERMISSIVE}}}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: v1-only, namespace: shop}
spec:
  selector: {matchLabels: {version: v1}}
  rules:
  - from: [{source: {principals: [cluster.local/ns/front/sa/web]}}]
    to: [{operation: {methods: [GET, HEAD], paths: [/reviews/*]}}]
    when: [{key: 'request.headers[x]', values: [a, b]}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: no-guests, namespace: istio-system}
spec: {action: DENY, rules: [{from: [{source: {notNamespaces: [front, shop]}}]}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: other, namespace: front}
spec: {}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: public, namespace: edge}
spec:
  selector: {istio: ingressgateway}
  servers:
  - {port: {number: 443, name: https, protocol: HTTPS}, hosts: ['*.example.com'], tls: {mode: SIMPLE, credentialName: c}}
  - {port: {number: 80, name: http, protocol: HTTP}, hosts: [other.test]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: shop, namespace: edge}
spec:
  hosts: [shop.example.com]
  gateways: [public]
  http: [{route: [{destination: {host: reviews.shop.svc.cluster.local}}]}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: reviews, namespace: shop}
spec: {hosts: [reviews], http: [{route: [{destination: {host: reviews, subset: v1}}]}]}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: reviews, namespace: shop}
spec: {host: reviews, trafficPolicy: {tls: {mode: ISTIO_MUTUAL}}, subsets: [{name: v1, labels: {version: v1}}]}
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: default, namespace: back}
spec: {egress: [{hosts: ['./*']}]}
";

fn mesh() -> Arc<MeshSnapshot> {
    let installation = Installation {
        namespace: "istio-system".into(),
        ..Installation::default()
    };
    fixture::folder_world(installation, &[("kube.yaml", OBJECTS)]).snapshot()
}

fn key() -> ServiceKey {
    ServiceKey {
        hostname: "reviews.shop.svc.cluster.local".into(),
        namespace: "shop".into(),
    }
}

fn scope(mesh: &MeshSnapshot, key: &ScopeKey) -> Shared<SidecarScope> {
    let scope = sidecar_scope::scope(&Cx::untracked(), mesh, key);
    Shared::new(scope.expect("a scope"))
}

/// Returns the view for these scopes as JSON.
fn view(mesh: &MeshSnapshot, key: &ServiceKey, scopes: &Scopes) -> Value {
    json!(of_service(mesh, key, scopes).expect("a service"))
}

fn names(list: &Value) -> Vec<String> {
    let objects = list.as_array().into_iter().flatten();
    let name = |object: &Value| {
        format!(
            "{} {}/{}",
            text(object, "kind"),
            text(object, "namespace"),
            text(object, "name")
        )
    };
    objects.map(name).collect()
}

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object[field].as_str().unwrap_or_default()
}

#[test]
fn modes_of_mutual_tls_are_those_of_ports() {
    let view = view(&mesh(), &key(), &Vec::new());
    assert_eq!(
        view["ports"],
        json!([
            { "number": 80, "name": "http", "protocol": "HTTP", "endpoints": 2, "mutualTls": { "STRICT": 2 } },
            { "number": 9000, "name": "tcp-admin", "protocol": "TCP", "endpoints": 2,
              "mutualTls": { "PERMISSIVE": 1, "STRICT": 1 } },
        ])
    );
    let workloads = view["workloads"].as_array().expect("workloads");
    let of = |name: &str| workloads.iter().find(|workload| workload["name"] == name);
    let second = of("v2").expect("the second workload");
    assert_eq!(second["mutualTls"], json!({ "80": "STRICT", "9000": "PERMISSIVE" }));
    assert_eq!(second["identity"], "spiffe://cluster.local/ns/shop/sa/reviews");
    assert_eq!(second["transport"], "sidecar");
}

#[test]
fn policies_are_those_of_its_workloads() {
    let view = view(&mesh(), &key(), &Vec::new());
    assert_eq!(
        names(&view["policies"]),
        [
            "AuthorizationPolicy istio-system/no-guests",
            "AuthorizationPolicy shop/v1-only"
        ]
    );
    let (general, own) = (&view["policies"][0], &view["policies"][1]);
    assert_eq!(
        (&general["action"], &general["workloads"]),
        (&json!("DENY"), &json!([]))
    );
    assert_eq!(general["rules"], json!(["from notNamespaces front, shop"]));
    assert_eq!((&own["action"], &own["workloads"]), (&json!("ALLOW"), &json!(["v1"])));
    assert_eq!(
        own["rules"],
        json!([
            "from principals cluster.local/ns/front/sa/web; to methods GET, HEAD and paths /reviews/*; \
                when request.headers[x] is a, b"
        ])
    );
    let actions: BTreeMap<&str, &str> = view["workloads"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|workload| (text(workload, "name"), text(workload, "defaultAction")))
        .collect();
    assert_eq!(actions, BTreeMap::from([("v1", "deny"), ("v2", "allow")]));
}

#[test]
fn gateways_and_routes_lead_to_it() {
    let view = view(&mesh(), &key(), &Vec::new());
    let routes = view["routes"].as_array().expect("routes");
    let route = |route: &Value| {
        (
            names(&route["objects"]),
            route["gateways"].clone(),
            route["ownHost"].clone(),
        )
    };
    let routes: Vec<_> = routes.iter().map(route).collect();
    assert_eq!(
        routes,
        [
            (
                vec!["VirtualService edge/shop".to_owned()],
                json!(["edge/public"]),
                json!(false)
            ),
            (
                vec!["VirtualService shop/reviews".to_owned()],
                json!(["mesh"]),
                json!(true)
            ),
        ]
    );
    let gateway = &view["gateways"][0];
    assert_eq!(names(&gateway["objects"]), ["Gateway edge/public"]);
    assert_eq!(gateway["hosts"], json!(["shop.example.com"]));
    // The server for another host does not count.
    assert_eq!(
        gateway["servers"],
        json!([{ "port": 443, "protocol": "HTTPS", "hosts": ["*.example.com"], "tls": "SIMPLE" }])
    );
    let rule = &view["destinationRule"];
    assert_eq!((text(rule, "tls"), &rule["subsets"]), ("ISTIO_MUTUAL", &json!(["v1"])));
}

#[test]
fn clients_see_it_by_export_and_sidecar() {
    let mesh = mesh();
    let keys = [
        (ScopeKey::Default("front".into()), 3),
        (ScopeKey::Default("guest".into()), 2),
        (ScopeKey::Sidecar("back".into(), fixture::key("back/default")), 1),
        (ScopeKey::Gateway("shop".into()), 1),
    ];
    let scopes: Scopes = keys
        .iter()
        .map(|(key, proxies)| (scope(&mesh, key), *proxies))
        .collect();
    let visibility = &view(&mesh, &key(), &scopes)["visibility"];
    assert_eq!(visibility["exportTo"], json!(["back", "front", "shop"]));
    assert_eq!((&visibility["seeing"], &visibility["proxies"]), (&json!(4), &json!(7)));
    let rows = visibility["scopes"].as_array().expect("scopes");
    let row = |row: &Value| (text(row, "namespace").to_owned(), text(row, "hiddenBy").to_owned());
    let rows: Vec<_> = rows.iter().map(row).collect();
    assert_eq!(
        rows,
        [("guest", "exportTo"), ("back", "Sidecar"), ("front", ""), ("shop", "")]
            .map(|(namespace, by)| (namespace.to_owned(), by.to_owned()))
    );
}

#[test]
fn an_object_that_routes_were_made_from_is_named() {
    let annotations = fixture::labels(&[(PARENTS_ANNOTATION, "HTTPRoute/a.b.shop,Gateway/gw/http.edge")]);
    let meta = Meta {
        annotations,
        ..(*fixture::meta(Kind::VirtualService, "shop/made", 1)).clone()
    };
    let named: Vec<String> = origins(Kind::VirtualService, &meta)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(named, ["HTTPRoute shop/a.b", "Gateway edge/gw"]);
}

#[test]
fn waypoints_have_policies_of_their_own() {
    let objects = "
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio.io/use-waypoint: way}}
---
apiVersion: v1
kind: Service
metadata: {name: reviews, namespace: shop}
spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: way, namespace: shop}
spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}
status: {addresses: [{type: IPAddress, value: 10.0.0.9}]}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: at-way, namespace: shop}
spec: {targetRefs: [{group: '', kind: Service, name: reviews}], rules: [{}]}
";
    let mut installation = Installation::default();
    installation.features.pilot_enable_ambient = true;
    let mesh = fixture::folder_world(installation, &[("kube.yaml", objects)]).snapshot();
    let view = view(&mesh, &key(), &Vec::new());
    assert_eq!(view["waypoint"]["state"], "used");
    assert_eq!(text(&view["waypoint"]["gateway"], "name"), "way");
    let policy = &view["policies"][0];
    assert_eq!((text(policy, "name"), text(policy, "at")), ("at-way", "waypoint"));
    assert_eq!(policy["rules"], json!(["any request"]));
}
