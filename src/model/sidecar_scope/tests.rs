use super::*;
use crate::model::{Installation, World, fixture::folder_world};

const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}, {name: admin, port: 9000}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: data}
spec: {clusterIP: 10.0.0.2, ports: [{name: tcp, port: 5432}]}
---
apiVersion: v1
kind: Service
metadata: {name: hidden, namespace: data, annotations: {networking.istio.io/exportTo: .}}
spec: {clusterIP: 10.0.0.3, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: a, namespace: data, creationTimestamp: '2024-01-01T00:00:00Z'}
spec: {hosts: [x.example.com], resolution: DNS, ports: [{number: 80, name: http, protocol: HTTP}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: b, namespace: shop, creationTimestamp: '2024-02-01T00:00:00Z'}
spec: {hosts: [x.example.com], resolution: DNS, ports: [{number: 80, name: http, protocol: HTTP}]}
";

fn world(config: &str) -> World {
    folder_world(
        Installation::default(),
        &[("kube.yaml", SERVICES), ("config.yaml", config)],
    )
}

fn computed(world: &World, key: &ScopeKey) -> SidecarScope {
    scope(&Cx::untracked(), &world.snapshot(), key).unwrap()
}

fn names(services: &[ServiceKey]) -> Vec<String> {
    let mut names: Vec<String> = services
        .iter()
        .map(|key| format!("{}/{}", key.namespace, key.hostname))
        .collect();
    names.sort();
    names
}

fn listed(egress: &EgressListener) -> Vec<String> {
    let keys: Vec<ServiceKey> = egress.services.iter().map(|service| service.key.clone()).collect();
    names(&keys)
}

fn sidecar_key(namespace: &str, of: &str) -> ScopeKey {
    ScopeKey::Sidecar(Namespace::new(namespace), crate::model::fixture::key(of))
}

#[test]
fn by_default_every_exported_service_is_visible_once() {
    let world = world("");
    let shop = computed(&world, &ScopeKey::Default("shop".into()));
    let expected = [
        "data/db.data.svc.cluster.local",
        "shop/web.shop.svc.cluster.local",
        "shop/x.example.com",
    ];
    assert_eq!(names(&shop.services), expected);
    let other = computed(&world, &ScopeKey::Default("other".into()));
    assert_eq!(other.service("x.example.com").unwrap().namespace, "data");
    let data = computed(&world, &ScopeKey::Default("data".into()));
    assert!(data.service("hidden.data.svc.cluster.local").is_some());
    let gateway = computed(&world, &ScopeKey::Gateway("other".into()));
    assert_eq!(names(&gateway.services), names(&other.services));
    assert!(gateway.egress.is_empty());
}

#[test]
fn services_of_one_host_are_visible_one_by_one() {
    let entry = |name: &str, created: &str, port: u32, rest: &str| {
        format!(
            "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: {name}, namespace: data, creationTimestamp: '{created}T00:00:00Z'}}
spec: {{hosts: [y.example.com], {rest}, ports: [{{number: {port}, name: p, protocol: HTTP}}]}}
---"
        )
    };
    let config = [
        entry("all", "2024-01-01", 81, "resolution: DNS"),
        entry("own", "2024-01-02", 82, "resolution: DNS, exportTo: [.]"),
        entry("more", "2024-01-03", 83, "resolution: DNS"),
        entry("other", "2024-01-04", 84, "resolution: NONE"),
    ];
    let world = world(&config.concat());
    let key = ServiceKey {
        hostname: "y.example.com".into(),
        namespace: "data".into(),
    };
    let seen = |namespace: &str| {
        let scope = computed(&world, &ScopeKey::Default(namespace.into()));
        let listed = scope.egress[0].services.iter().filter(|service| service.key == key);
        let listed: Vec<u32> = listed.map(|service| service.member).collect();
        let merged = &scope.merged[&key];
        let ports: Vec<(u32, u32)> = merged.ports.iter().map(|(port, member)| (*port, *member)).collect();
        (listed, merged.member, ports)
    };
    // Clusters have the ports of the oldest visible one, and of those that agree with it.
    assert_eq!(seen("shop"), (vec![0, 2, 3], 0, vec![(81, 0), (83, 2)]));
    // A namespace sees those exported to it alone first.
    assert_eq!(seen("data"), (vec![1, 0, 2, 3], 1, vec![(82, 1)]));
}

#[test]
fn a_sidecar_imports_hosts_and_ports() {
    let world = world(
        "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s, namespace: shop}
spec:
  outboundTrafficPolicy: {mode: REGISTRY_ONLY}
  egress:
  - port: {number: 9000, protocol: HTTP, name: admin}
    hosts: ['./*']
  - hosts: ['data/*.svc.cluster.local', '~/*']
",
    );
    let scope = computed(&world, &sidecar_key("shop", "shop/s"));
    assert!(scope.outbound_policy.registry_only);
    let expected = ["data/db.data.svc.cluster.local", "shop/web.shop.svc.cluster.local"];
    assert_eq!(names(&scope.services), expected);
    let web = scope.service("web.shop.svc.cluster.local").unwrap();
    assert!(scope.shows_port(web, 9000) && !scope.shows_port(web, 80));
    assert!(!scope.egress[0].shows_port(web, 80));
    assert_eq!(listed(&scope.egress[1]), expected[..1]);
}

#[test]
fn aliases_of_a_service_are_imported_by_their_own_names() {
    let db = "db.data.svc.cluster.local";
    let alias = |name: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: legacy}}\n\
             spec: {{type: ExternalName, externalName: {db}}}\n"
        )
    };
    let shown = |hosts: &str| {
        let sidecar = format!(
            "---\napiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {{name: s, namespace: shop}}\n\
             spec: {{egress: [{{hosts: {hosts}}}]}}\n"
        );
        let scope = computed(
            &world(&[alias("one"), alias("two"), sidecar].concat()),
            &sidecar_key("shop", "shop/s"),
        );
        let [egress] = scope.egress.as_slice() else { panic!() };
        let key = scope.service(db).expect("the service");
        egress.alias_filters.get(key).map(|aliases| names(aliases))
    };
    assert_eq!(shown("[data/*]"), None, "all");
    assert_eq!(shown(&format!("[data/{db}]")), Some(Vec::new()));
    assert_eq!(
        shown(&format!("[data/{db}, data/two.legacy.svc.cluster.local]")),
        Some(vec!["legacy/two.legacy.svc.cluster.local".to_owned()])
    );
}

#[test]
fn destinations_of_virtual_services_are_imported() {
    let world = world(
        "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s, namespace: shop}
spec: {egress: [{hosts: [shop/x.example.com]}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: v, namespace: shop}
spec:
  hosts: [x.example.com]
  http:
  - match: [{sourceNamespace: other}]
    route: [{destination: {host: hidden.data.svc.cluster.local}}]
  - route: [{destination: {host: web, port: {number: 80}}, weight: 50}, {destination: {host: db.data.svc.cluster.local}, weight: 50}]
",
    );
    let scope = computed(&world, &sidecar_key("shop", "shop/s"));
    let expected = [
        "data/db.data.svc.cluster.local",
        "shop/web.shop.svc.cluster.local",
        "shop/x.example.com",
    ];
    assert_eq!(names(&scope.services), expected);
    assert_eq!(listed(&scope.egress[0]), expected[2..]);
    let web = scope.service("web.shop.svc.cluster.local").unwrap();
    assert!(scope.shows_port(web, 80) && !scope.shows_port(web, 9000));
    assert_eq!(scope.virtual_services.len(), 1);
}

#[test]
fn each_listener_shows_its_port_of_the_destinations() {
    let with = |listeners: &[(u32, &str)]| {
        let listener = |(number, protocol): &(u32, &str)| {
            let port = format!("{{number: {number}, protocol: {protocol}, name: p{number}}}");
            format!("{{port: {port}, hosts: [shop/x.example.com]}}")
        };
        let listeners: Vec<String> = listeners.iter().map(listener).collect();
        let world = world(&format!(
            "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {{name: s, namespace: shop}}
spec: {{egress: [{}]}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: v, namespace: shop}}
spec:
  hosts: [x.example.com]
  http: [{{route: [{{destination: {{host: web}}}}], mirror: {{host: db.data.svc.cluster.local}}}}]
",
            listeners.join(", ")
        ));
        computed(&world, &sidecar_key("shop", "shop/s"))
    };
    let shown = |scope: &SidecarScope| {
        let web = scope.service("web.shop.svc.cluster.local").unwrap();
        [80, 9000].map(|port| scope.shows_port(web, port))
    };
    let one = with(&[(80, "HTTP")]);
    assert_eq!(
        names(&one.services),
        ["shop/web.shop.svc.cluster.local", "shop/x.example.com"]
    );
    assert_eq!(shown(&one), [true, false]);
    let three = with(&[(9000, "HTTP"), (5432, "TCP"), (80, "HTTP")]);
    assert_eq!(names(&three.services)[0], "data/db.data.svc.cluster.local");
    assert_eq!(shown(&three), [true, true]);
}

/// A Sidecar may have hundreds of listeners that reach the same VirtualServices, whose destinations may have tens of
/// thousands of ports.
#[test]
fn r21_destinations_are_added_once_for_listeners_of_one_port() {
    let with = |listeners: &[&str]| {
        let world = world(&format!(
            "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {{name: s, namespace: shop}}
spec: {{egress: [{}]}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: v, namespace: shop}}
spec:
  hosts: [x.example.com]
  http: [{{route: [{{destination: {{host: web, port: {{number: 80}}}}}}], mirror: {{host: db.data.svc.cluster.local}}}}]
",
            listeners.join(", ")
        ));
        computed(&world, &sidecar_key("shop", "shop/s"))
    };
    // Those for HTTP proxies accept requests for any port.
    let first = "{port: {number: 3128, protocol: HTTP_PROXY, name: a}, hosts: [shop/x.example.com]}";
    let wider = "{port: {number: 3129, protocol: HTTP_PROXY, name: b}, hosts: [shop/x.example.com, none/*]}";
    let on_port = "{port: {number: 9000, protocol: HTTP, name: c}, hosts: [shop/x.example.com]}";
    let (one, several) = (with(&[first]), with(&[first, wider]));
    assert_eq!(names(&one.services), names(&several.services));
    assert_eq!(one.port_filters, several.port_filters);
    assert_eq!(several.egress[0].virtual_services, several.egress[1].virtual_services);
    let web = several.service("web.shop.svc.cluster.local").unwrap();
    assert!(several.shows_port(web, 80) && !several.shows_port(web, 9000));
    // Another port of the same destinations counts.
    let other = with(&[first, on_port, wider]);
    let web = other.service("web.shop.svc.cluster.local").unwrap();
    assert!(other.shows_port(web, 80) && other.shows_port(web, 9000));
}

#[test]
fn an_egress_proxy_is_kept_as_written() {
    let world = world(
        "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s, namespace: istio-system}
spec:
  outboundTrafficPolicy: {mode: ALLOW_ANY, egressProxy: {host: db.data.svc.cluster.local, subset: v1, port: {number: 5432}}}
",
    );
    let scope = computed(&world, &sidecar_key("shop", "istio-system/s"));
    let proxy = |host: &str, subset: &str, port: u32| {
        Some(EgressProxy {
            host: host.into(),
            subset: subset.into(),
            port,
        })
    };
    let policy = &scope.outbound_policy;
    assert_eq!(policy.egress_proxy, proxy("db.data.svc.cluster.local", "v1", 5432));
    assert!(!policy.registry_only);
    let sidecar: networking::Sidecar = networking::Sidecar {
        outbound_traffic_policy: Some(networking::OutboundTrafficPolicy {
            egress_proxy: Some(networking::Destination {
                host: "alias.data.svc.cluster.local".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let without_port = proxy("alias.data.svc.cluster.local", "", 0);
    assert_eq!(super::egress_proxy(&sidecar), without_port);
}

#[test]
fn a_scope_stays_the_same_when_only_the_content_of_a_service_changes() {
    let (before, after) = (world(""), {
        let changed = SERVICES.replace("10.0.0.1", "10.0.0.9");
        folder_world(Installation::default(), &[("kube.yaml", &changed)])
    });
    let key = ScopeKey::Default("shop".into());
    assert_eq!(computed(&before, &key), computed(&after, &key));
}

/// Objects that make namespaces see something else than all others.
const OWN_VIEWS: &str = "
apiVersion: v1
kind: Service
metadata: {name: told, namespace: data, annotations: {networking.istio.io/exportTo: audience}}
spec: {clusterIP: 10.0.0.4, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: unseen, namespace: secret, annotations: {networking.istio.io/exportTo: '~'}}
spec: {clusterIP: 10.0.0.5, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: told, namespace: public}
spec:
  hosts: [told.example.com]
  exportTo: [reader]
  http: [{route: [{destination: {host: web.shop.svc.cluster.local}}]}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: source, namespace: public}
spec:
  hosts: [source.example.com]
  http:
  - match: [{sourceNamespace: source}]
    route: [{destination: {host: unseen.secret.svc.cluster.local}}]
  - route: [{destination: {host: web.shop.svc.cluster.local}}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: route, namespace: consumer}
spec:
  parentRefs: [{group: '', kind: Service, name: web, namespace: shop}]
  rules: [{backendRefs: [{name: web, port: 80}]}]
";

#[test]
fn namespaces_with_another_view_are_exceptions() {
    let world = world(OWN_VIEWS);
    let (cx, mesh, pool) = (Cx::untracked(), world.snapshot(), ScopePool::default());
    for of in [ScopeKey::Default as fn(Namespace) -> ScopeKey, ScopeKey::Gateway] {
        let common = of("any".into()).common().expect("a scope without a Sidecar");
        let common = CommonScope::of(&cx, &mesh, &common, &pool).expect("a scope");
        let namespaces = [
            "audience", "consumer", "data", "other", "public", "reader", "secret", "shop", "source",
        ];
        let mut exceptions = Vec::new();
        for namespace in namespaces {
            let key = of(namespace.into());
            match common.all(&key) {
                Some(scope) => assert_eq!(scope, computed(&world, &key), "{namespace}"),
                None => exceptions.push(namespace),
            }
            assert_eq!(common.tcp(&key).is_none(), common.all(&key).is_none());
        }
        assert_eq!(
            exceptions,
            [
                "audience", "consumer", "data", "public", "reader", "secret", "shop", "source"
            ]
        );
    }
    assert_eq!(sidecar_key("shop", "shop/one").common(), None);
}

#[test]
fn empty_elements_of_export_lists_name_no_namespace() {
    let service = |name: &str, export_to: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\n\
             metadata: {{name: {name}, namespace: data, annotations: {{networking.istio.io/exportTo: '{export_to}'}}}}\n\
             spec: {{clusterIP: 10.0.0.6, ports: [{{name: http, port: 80}}]}}\n"
        )
    };
    let world = world(&[service("for-shop", "shop,"), service("for-none", ",")].concat());
    let (cx, mesh, pool) = (Cx::untracked(), world.snapshot(), ScopePool::default());
    let sees = |scope: &SidecarScope, name: &str| scope.service(&format!("{name}.data.svc.cluster.local")).is_some();
    for of in [ScopeKey::Default as fn(Namespace) -> ScopeKey, ScopeKey::Gateway] {
        let shop = computed(&world, &of("shop".into()));
        assert!(sees(&shop, "for-shop") && !sees(&shop, "for-none"));
        let other = of("other".into());
        let common = other.common().expect("a scope without a Sidecar");
        let common = CommonScope::of(&cx, &mesh, &common, &pool).expect("a scope");
        let scope = common.all(&other).expect("the namespace is no exception");
        assert!(!sees(&scope, "for-shop") && !sees(&scope, "for-none"));
        assert!(sees(&scope, "db"));
    }
}

#[test]
fn r21_equal_selections_of_listeners_are_made_once() {
    let world = world(
        "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s, namespace: shop}
spec:
  egress:
  - {port: {number: 8001, protocol: HTTP_PROXY, name: a}, bind: 127.0.0.1, hosts: ['*/*']}
  - {port: {number: 8002, protocol: HTTP_PROXY, name: b}, captureMode: NONE, hosts: ['*/*']}
  - {port: {number: 80, protocol: HTTP, name: c}, hosts: ['*/*']}
  - {hosts: ['*/*']}
",
    );
    let scope = computed(&world, &sidecar_key("shop", "shop/s"));
    let [first, second, third, last] = &scope.egress[..] else {
        panic!("{:?}", scope.egress)
    };
    assert!(first.services.ptr_eq(&second.services) && first.services.ptr_eq(&last.services));
    assert_eq!(listed(first), names(&scope.services));
    assert_eq!(listed(third).len(), 2, "services with this port: {third:?}");
    let own = |listener: &EgressListener| {
        let port = listener.port.as_ref().map(|port| port.number);
        (listener.index, port, listener.bind.to_string(), listener.capture_none)
    };
    let expected = [
        (0, Some(8001), "127.0.0.1".to_owned(), false),
        (1, Some(8002), String::new(), true),
        (2, Some(80), String::new(), false),
        (3, None, String::new(), false),
    ];
    assert_eq!([first, second, third, last].map(own), expected);
}
