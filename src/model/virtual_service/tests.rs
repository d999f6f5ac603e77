use super::*;
use crate::{
    api::Kind,
    model::{
        Change, World,
        fixture::{config, key, world},
        inputs::Row,
    },
    proto::istio::networking::v1alpha3::{
        Delegate, Destination as Target, HttpMatchRequest, HttpRoute, HttpRouteDestination, ServiceEntry, ServicePort,
        StringMatch, TlsMatchAttributes, TlsRoute, string_match::MatchType,
    },
};

fn prefix(path: &str) -> HttpMatchRequest {
    HttpMatchRequest {
        uri: Some(StringMatch {
            match_type: Some(MatchType::Prefix(path.into())),
        }),
        ..Default::default()
    }
}

fn route(name: &str, path: &str, host: &str) -> HttpRoute {
    HttpRoute {
        name: name.into(),
        r#match: vec![prefix(path)],
        route: vec![HttpRouteDestination {
            destination: Some(Target {
                host: host.into(),
                ..Default::default()
            }),
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn delegating(name: &str, path: &str, to: &str) -> HttpRoute {
    let (namespace, delegate) = to.split_once('/').unwrap();
    HttpRoute {
        delegate: Some(Box::new(Delegate {
            name: delegate.into(),
            namespace: namespace.into(),
        })),
        route: Vec::new(),
        ..route(name, path, "")
    }
}

fn service(name: &str, age: i64, spec: networking::VirtualService) -> Row {
    config(Kind::VirtualService, name, age, spec).into()
}

fn spec(hosts: &[&str], http: Vec<HttpRoute>) -> networking::VirtualService {
    networking::VirtualService {
        hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        http,
        ..Default::default()
    }
}

fn resolved_routes(row: &VirtualService) -> Vec<HttpRoute> {
    let installation = Installation::default();
    row.http.resolved(&installation).map(Cow::into_owned).collect()
}

#[test]
fn short_names_refer_to_the_own_namespace() {
    let mut reading = route("", "/", "ratings");
    reading.r#match[0].gateways = vec!["front".into()];
    reading.mirror = Some(Box::new(Target {
        host: "copy".into(),
        ..Default::default()
    }));
    let mut written = spec(&["reviews"], vec![reading]);
    written.gateways = vec![
        "mesh".into(),
        "front".into(),
        "./side".into(),
        "old.edge.svc.cluster.local".into(),
    ];
    let commit = world(vec![service("shop/a", 0, written)]);
    let row = commit
        .snapshot
        .virtual_services
        .get(&Cx::untracked(), &key("shop/a"))
        .unwrap();
    assert_eq!(row.hosts, vec![Hostname::new("reviews.shop.svc.cluster.local")]);
    assert_eq!(row.gateways, ["mesh", "shop/front", "shop/side", "edge/old"]);
    let destinations: Vec<_> = row.destinations.iter().map(|one| one.host.as_str()).collect();
    let want = ["copy.shop.svc.cluster.local", "ratings.shop.svc.cluster.local"];
    assert_eq!(destinations, want);
    let [route] = resolved_routes(row).try_into().expect("one route");
    assert_eq!(route.r#match[0].gateways, ["shop/front"]);
    let weighted = route.route[0].destination.as_ref();
    let hosts = [route.mirror.as_deref(), weighted].map(|to| to.map(|to| to.host.as_str()));
    assert_eq!(hosts, want.map(Some));
}

#[test]
fn destinations_are_sorted_and_listed_once() {
    let to = |host: &str| networking::RouteDestination {
        destination: Some(Target {
            host: host.into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let http = ["web", "ratings", "web"].map(|host| route("", "/", host));
    let mut written = spec(&["a"], http.into());
    written.tcp = vec![networking::TcpRoute {
        route: vec![to("web"), to("db")],
        ..Default::default()
    }];
    let commit = world(vec![service("shop/a", 0, written)]);
    let rows = &commit.snapshot.virtual_services;
    let row = rows.get(&Cx::untracked(), &key("shop/a")).unwrap();
    let hosts: Vec<_> = row.destinations.iter().map(|one| one.host.as_str()).collect();
    let want = ["db", "ratings", "web"].map(|name| format!("{name}.shop.svc.cluster.local"));
    assert_eq!(hosts, want);
}

#[test]
fn delegates_are_merged_where_they_agree() {
    let root = spec(
        &["shop.example"],
        vec![
            delegating("root", "/shop", "sub/cart"),
            delegating("gone", "/x", "sub/none"),
            route("rest", "/", "web"),
        ],
    );
    let cart = spec(
        &[],
        vec![route("cart", "/shop/cart", "cart"), route("other", "/other", "cart")],
    );
    let commit = world(vec![service("shop/root", 0, root), service("sub/cart", 1, cart)]);
    let cx = Cx::untracked();
    assert!(commit.snapshot.virtual_services.get(&cx, &key("sub/cart")).is_none());
    let row = commit.snapshot.virtual_services.get(&cx, &key("shop/root")).unwrap();
    let routes = resolved_routes(row);
    let names: Vec<_> = routes.iter().map(|route| route.name.as_str()).collect();
    assert_eq!(names, ["root-cart", "rest"]);
    assert_eq!(routes[0].r#match, [prefix("/shop/cart")]);
    let hosts = routes
        .iter()
        .map(|route| &route.route[0].destination.as_ref().unwrap().host);
    let hosts: Vec<_> = hosts.collect();
    assert_eq!(hosts, ["cart.sub.svc.cluster.local", "web.shop.svc.cluster.local"]);
}

#[test]
fn a_delegate_must_be_exported_to_its_root() {
    for (export_to, expected) in [(".", 0), ("shop", 1)] {
        let root = spec(&["shop.example"], vec![delegating("root", "/shop", "sub/cart")]);
        let mut cart = spec(&[], vec![route("cart", "/shop/cart", "cart")]);
        cart.export_to = vec![export_to.into()];
        let commit = world(vec![service("shop/root", 0, root), service("sub/cart", 1, cart)]);
        let virtual_services = &commit.snapshot.virtual_services;
        let row = virtual_services.get(&Cx::untracked(), &key("shop/root")).unwrap();
        assert_eq!(resolved_routes(row).len(), expected, "{export_to}");
    }
}

#[test]
fn a_gateway_lists_private_then_exported_then_public_virtual_services() {
    let with = |hosts: &[&str], export: &[&str]| networking::VirtualService {
        export_to: export.iter().map(|value| (*value).to_owned()).collect(),
        ..spec(hosts, Vec::new())
    };
    let commit = world(vec![
        service("a/public", 1, with(&["x"], &[])),
        service("b/shown", 2, with(&["x"], &["a"])),
        service("a/private", 3, with(&["x"], &["."])),
        service("b/hidden", 0, with(&["x"], &["."])),
    ]);
    let rows = for_gateway(&Cx::untracked(), &commit.snapshot, &Namespace::new("a"), MESH_GATEWAY);
    let names: Vec<_> = rows.iter().map(|(key, _)| key.to_string()).collect();
    assert_eq!(names, ["a/private", "b/shown", "a/public"]);
}

#[test]
fn other_gateways_list_the_virtual_services_that_a_namespace_sees() {
    let with = |export: &[&str]| networking::VirtualService {
        gateways: vec!["mesh".into(), "edge/front".into()],
        export_to: export.iter().map(|value| (*value).to_owned()).collect(),
        ..spec(&["x"], Vec::new())
    };
    let commit = world(vec![
        service("a/public", 1, with(&[])),
        service("b/shown", 2, with(&["a", "c"])),
        service("a/private", 3, with(&["."])),
        service("b/hidden", 0, with(&["."])),
    ]);
    let names = |gateway: &str| -> Vec<String> {
        let rows = for_gateway(&Cx::untracked(), &commit.snapshot, &Namespace::new("a"), gateway);
        rows.iter().map(|(key, _)| key.to_string()).collect()
    };
    assert_eq!(names("edge/front"), ["a/private", "b/shown", "a/public"]);
    assert_eq!(names(MESH_GATEWAY), names("edge/front"));
}

#[test]
fn index_keys_do_not_multiply_gateways_with_namespaces() {
    let numbered = |prefix: &str| -> Vec<String> { (0..100).map(|number| format!("{prefix}{number}")).collect() };
    let written = networking::VirtualService {
        gateways: [numbered("edge/g"), vec!["mesh".to_owned()]].concat(),
        export_to: numbered("n"),
        ..spec(&["x"], Vec::new())
    };
    let commit = world(vec![service("a/wide", 0, written)]);
    let (cx, key) = (Cx::untracked(), key("a/wide"));
    let summary = commit.snapshot.virtual_service_summaries.get(&cx, &key).unwrap();
    let mut keys = 0;
    export_keys(&key, summary, &mut |_| keys += 1);
    assert_eq!(keys, 200);
}

/// All scopes that see a VirtualService depend on its summary.
#[test]
fn summary_does_not_depend_on_the_number_of_tls_matches() {
    let with = |matches: usize| {
        let written = networking::VirtualService {
            tls: vec![TlsRoute {
                r#match: vec![TlsMatchAttributes::default(); matches],
                ..Default::default()
            }],
            ..spec(&["x"], Vec::new())
        };
        let mesh = world(vec![service("a/x", 0, written)]).snapshot;
        let (cx, key) = (Cx::untracked(), key("a/x"));
        let summary = mesh.virtual_service_summaries.get(&cx, &key).expect("a summary");
        let count = mesh.tls_match_counts.get(&cx, &key);
        (VirtualServiceSummary::clone(summary), count.map(|count| **count))
    };
    let (none, one, two) = (with(0), with(1), with(2));
    assert_eq!((none.1, one.1, two.1), (None, Some(1), Some(2)));
    assert_eq!(one.0, two.0);
}

#[test]
fn virtual_services_of_a_host_are_those_of_admitted_namespaces() {
    let exact = || spec(&["api.example.com"], Vec::new());
    let wildcard = || spec(&["*.example.com"], Vec::new());
    let commit = world(vec![
        service("a/exact", 1, exact()),
        service("b/exact", 2, exact()),
        service("c/exact", 3, exact()),
        service("b/wildcard", 4, wildcard()),
        service("c/wildcard", 5, wildcard()),
    ]);
    let found = |host: &str, admitted: &[&str]| -> Vec<String> {
        let admits = |namespace: &Namespace| admitted.contains(&namespace.as_str());
        let namespace = Namespace::new("a");
        let rows = for_host(
            &Cx::untracked(),
            &commit.snapshot,
            &namespace,
            &Hostname::new(host),
            admits,
        );
        rows.iter().map(|(key, _)| key.to_string()).collect()
    };
    for host in ["api.example.com", "*.example.com"] {
        let all = ["a/exact", "b/exact", "c/exact", "b/wildcard", "c/wildcard"];
        assert_eq!(found(host, &["a", "b", "c"]), all, "{host}");
        assert_eq!(found(host, &["a", "b"]), ["a/exact", "b/exact", "b/wildcard"], "{host}");
    }
}

fn entry(name: &str, age: i64, host: &str) -> Row {
    let port = ServicePort {
        number: 80,
        name: "http".into(),
        protocol: "HTTP".into(),
        ..Default::default()
    };
    let spec = ServiceEntry {
        hosts: vec![host.into()],
        ports: vec![port],
        ..Default::default()
    };
    config(Kind::ServiceEntry, name, age, spec).into()
}

/// Returns the VirtualServices that apply only to clients of their own namespaces.
fn restricted(world: &World) -> Vec<String> {
    let (mesh, cx) = (world.snapshot(), Cx::untracked());
    let rows = mesh.virtual_service_summaries.iter(&cx);
    let rows = rows.filter(|(_, summary)| summary.only_own_clients);
    rows.map(|(key, _)| key.to_string()).collect()
}

#[test]
fn r17_a_wildcard_above_services_of_other_namespaces_is_not_owned() {
    let mut installation = Installation::default();
    installation.features.pilot_strict_host_ownership = true;
    let mut world = World::new(installation);
    let of = |name: &str, host: &str| service(name, 0, spec(&[host], Vec::new()));
    let rows = vec![
        entry("a/alone", 0, "*.alone.example"),
        entry("a/own", 0, "*.own.example"),
        entry("a/below", 0, "x.own.example"),
        entry("a/above", 0, "*.above.example"),
        entry("b/above", 1, "x.above.example"),
        entry("a/partial", 0, "*-db.example"),
        entry("b/partial", 1, "main-db.example"),
        entry("a/wide", 0, "*.wide.example"),
        entry("b/wide", 1, "*.x.wide.example"),
        entry("a/same", 0, "*.same.example"),
        entry("b/same", 1, "*.same.example"),
        entry("a/capitals", 0, "X.ABOVE.example"),
        of("a/alone", "*.alone.example"),
        of("a/own", "*.own.example"),
        of("a/above", "*.above.example"),
        of("a/partial", "*-db.example"),
        of("a/wide", "*.wide.example"),
        of("a/same", "*.same.example"),
        of("b/same", "*.same.example"),
        of("a/capitals", "X.ABOVE.example"),
        of("a/undeclared", "*.undeclared.example"),
        of("istio-system/root", "*.above.example"),
    ];
    world.commit(rows.into_iter().map(Change::Upsert).collect());
    let expected = ["a/above", "a/capitals", "a/partial", "a/undeclared", "a/wide", "b/same"];
    assert_eq!(restricted(&world), expected);

    world.commit(vec![
        Change::Remove(Kind::ServiceEntry, key("b/above")),
        Change::Remove(Kind::ServiceEntry, key("a/capitals")),
        Change::Upsert(entry("b/late", 2, "x.alone.example")),
    ]);
    let expected = ["a/alone", "a/capitals", "a/partial", "a/undeclared", "a/wide", "b/same"];
    assert_eq!(restricted(&world), expected);
}
