use super::*;
use crate::{
    base::Hostname,
    model::{
        Change, Installation, World,
        fixture::{CLUSTER, config, folder},
        gateway_api::route::AttachedRouteKey,
        inputs::Row,
        service::ServiceKey,
        snapshot::MeshSnapshot,
        virtual_service::VirtualService,
    },
    proto::istio::networking::v1alpha3 as networking,
};

fn installation() -> Installation {
    let mut installation = Installation::default();
    let features = &mut installation.features;
    features.pilot_max_routes_per_object = 100;
    features.pilot_max_routes_per_namespace = 150;
    features.pilot_max_subsets_per_object = 30;
    features.pilot_max_subsets_per_namespace = 50;
    features.pilot_max_endpoints_per_object = 100;
    features.pilot_max_endpoints_per_namespace = 150;
    installation
}

fn world(rows: Vec<Row>) -> World {
    let mut world = World::new(installation());
    world.commit(rows.into_iter().map(Change::Upsert).collect());
    world
}

fn mesh(rows: Vec<Row>) -> MeshSnapshot {
    MeshSnapshot::clone(&world(rows).snapshot())
}

fn key(name: &str) -> ObjectKey {
    let (namespace, name) = name.split_once('/').expect("namespace/name");
    ObjectKey::new(&CLUSTER, namespace, name)
}

fn rule(name: &str, age: i64, subsets: usize) -> Row {
    rule_with_policy(name, age, &name.replace('/', "."), subsets, 0)
}

/// Returns a rule for a host with a policy of some KiB.
fn rule_with_policy(name: &str, age: i64, host: &str, subsets: usize, kib: usize) -> Row {
    let subset = |number| networking::Subset {
        name: format!("s{number}"),
        ..Default::default()
    };
    let tls = networking::ClientTlsSettings {
        subject_alt_names: vec!["n".repeat(1 << 10); kib],
        ..Default::default()
    };
    let policy = networking::TrafficPolicy {
        tls: Some(Box::new(tls)),
        ..Default::default()
    };
    let spec = networking::DestinationRule {
        host: host.to_owned(),
        subsets: (0..subsets).map(subset).collect(),
        traffic_policy: (kib > 0).then(|| policy.into()),
        ..Default::default()
    };
    config(Kind::DestinationRule, name, age, spec).into()
}

fn route_text(number: usize) -> String {
    format!("  - match: [{{uri: {{exact: /{number}}}}}]\n    route: [{{destination: {{host: web}}}}]\n")
}

fn virtual_service(name: &str, age: i64, hosts: usize, routes: usize) -> Row {
    let (namespace, short) = name.split_once('/').expect("namespace/name");
    let hosts: Vec<String> = (0..hosts).map(|host| format!("h{host}.{short}.example")).collect();
    let routes = (0..routes).map(route_text).collect::<Vec<_>>().concat();
    let text = format!(
        "apiVersion: networking.istio.io/v1\nkind: VirtualService\n\
         metadata: {{name: {short}, namespace: {namespace}, creationTimestamp: \"2026-01-01T00:00:0{age}Z\"}}\n\
         spec:\n  hosts: [{}]\n  http:\n{routes}",
        hosts.join(", ")
    );
    let rows = folder(&installation(), &[("a.yaml", &text)]);
    let mut rows = rows.into_iter().filter(|row| row.kind() == Kind::VirtualService);
    rows.next().expect("one object")
}

/// Returns the numbers of subsets that apply.
fn subsets(mesh: &MeshSnapshot, names: &[&str]) -> Vec<usize> {
    let cx = Cx::untracked();
    let of = |name: &&str| {
        let rules = mesh.destination_rules.iter(&cx);
        let mut rules = rules.flat_map(|(_, rules)| rules.exported.iter());
        let rule = rules.find(|rule| rule.meta.key == key(name)).expect("the rule applies");
        rule.spec.subsets.len()
    };
    names.iter().map(of).collect()
}

/// Returns the hosts and the number of routes of a row.
fn served(mesh: &MeshSnapshot, key: &ObjectKey) -> Option<(usize, usize)> {
    let row = mesh.virtual_services.get(&Cx::untracked(), key)?;
    Some((row.hosts.len(), row.http.as_written().count()))
}

fn messages(mesh: &MeshSnapshot) -> Vec<String> {
    let found = exceeded(&Cx::untracked(), mesh);
    found.iter().map(ToString::to_string).collect()
}

#[test]
fn r21_surplus_subsets_do_not_apply() {
    let mesh = mesh(vec![rule("a/large", 1, 40), rule("a/small", 2, 3)]);
    assert_eq!(subsets(&mesh, &["a/large", "a/small"]), [30, 3]);
    let [message] = messages(&mesh).try_into().expect("one finding");
    assert_eq!(
        message,
        "DestinationRule a/large: spec.subsets: 40 subsets exceed the limit of 30 (PILOT_MAX_SUBSETS_PER_OBJECT); the \
         first 30 apply, requests to the others fail"
    );
}

#[test]
fn r21_older_objects_use_the_limit_of_a_namespace_first() {
    let rows = || {
        vec![
            rule("a/third", 3, 25),
            rule("a/first", 1, 28),
            rule("a/second", 2, 25),
            rule("a/small", 9, 20),
            rule("b/other", 4, 30),
        ]
    };
    let names = ["a/first", "a/second", "a/third", "a/small", "b/other"];
    let expected = [28, 0, 0, 20, 30];
    assert_eq!(subsets(&mesh(rows()), &names), expected);
    // One at a time, in another order.
    let mut world = world(Vec::new());
    for row in rows().into_iter().rev() {
        world.commit(vec![Change::Upsert(row)]);
    }
    assert_eq!(subsets(&world.snapshot(), &names), expected);
    // A smaller object makes room.
    world.commit(vec![Change::Upsert(rule("a/first", 1, 25))]);
    assert_eq!(subsets(&world.snapshot(), &names), [25, 25, 0, 20, 30]);
    assert_eq!(messages(&world.snapshot()).len(), 1);
}

#[test]
fn r21_each_kib_of_a_policy_counts_for_each_subset() {
    let mesh = mesh(vec![
        rule_with_policy("a/large", 1, "large.example", 10, 9),
        rule_with_policy("a/usual", 2, "usual.example", 20, 0),
    ]);
    assert_eq!(subsets(&mesh, &["a/large", "a/usual"]), [3, 20]);
    let [message] = messages(&mesh).try_into().expect("one finding");
    assert!(
        message.contains("100 subsets exceed the limit of 30") && message.contains("the first 3 apply"),
        "{message}"
    );
}

#[test]
fn r21_a_policy_counts_for_the_subsets_of_other_rules_of_its_host() {
    let of_host = |name: &str, age, subsets, kib| rule_with_policy(name, age, "h.example", subsets, kib);
    let declared = |world: &World, name: &str| {
        let key = DemandKey {
            kind: Kind::DestinationRule,
            object: key(name),
        };
        let mesh = world.snapshot();
        let demand = mesh.demands.get(&Cx::untracked(), &key);
        demand.map(|demand| demand.declared)
    };
    let mut world = world(vec![of_host("a/subsets", 1, 10, 0)]);
    assert_eq!(subsets(&world.snapshot(), &["a/subsets"]), [10]);
    world.commit(vec![Change::Upsert(of_host("a/policy", 2, 0, 9))]);
    assert_eq!(subsets(&world.snapshot(), &["a/subsets"]), [3]);
    assert_eq!(declared(&world, "a/policy"), None, "it has no subset");
    // A rule that comes later, and one of another namespace, whose subsets inherit nothing.
    let later = ["a/later", "b/other"].map(|name| Change::Upsert(of_host(name, 3, 11, 0)));
    world.commit(later.into());
    assert_eq!(declared(&world, "a/later"), Some(110));
    assert_eq!(declared(&world, "b/other"), None);
    world.commit(vec![Change::Upsert(of_host("a/policy", 2, 0, 0))]);
    assert_eq!(subsets(&world.snapshot(), &["a/subsets"]), [11]);
    assert_eq!(declared(&world, "a/later"), None);
}

#[test]
fn r21_requests_to_surplus_hosts_are_refused() {
    let (large, surplus) = (key("a/large"), surplus_key(&key("a/large")));
    let mut world = world(vec![
        virtual_service("a/large", 1, 5, 30),
        virtual_service("a/small", 2, 2, 4),
    ]);
    let mesh = world.snapshot();
    assert_eq!(served(&mesh, &large), Some((3, 30)));
    assert_eq!(served(&mesh, &surplus), Some((2, 1)), "a refusal for the other hosts");
    let row = mesh
        .virtual_services
        .get(&Cx::untracked(), &surplus)
        .expect("it exists");
    let first = row.http.as_written().next();
    let response = first.and_then(|route| route.direct_response.as_ref());
    assert!(response.is_some_and(|response| response.status == 404));
    assert_eq!(served(&mesh, &key("a/small")), Some((2, 4)));
    let [message] = messages(&mesh).try_into().expect("one finding");
    assert_eq!(
        message,
        "VirtualService a/large: spec.hosts: 150 routes of all hosts exceed the limit of 100 \
         (PILOT_MAX_ROUTES_PER_OBJECT); routes of the first 3 hosts apply, requests to the others are refused"
    );
    world.commit(vec![Change::Upsert(virtual_service("a/large", 1, 5, 20))]);
    assert_eq!(served(&world.snapshot(), &large), Some((5, 20)));
    assert_eq!(served(&world.snapshot(), &surplus), None);
    // Older ones of the namespace are served first.
    world.commit(vec![Change::Upsert(virtual_service("a/older", 0, 2, 40))]);
    let mesh = world.snapshot();
    assert_eq!(served(&mesh, &large), None);
    assert_eq!(served(&mesh, &surplus), Some((5, 1)));
    world.commit(vec![Change::Remove(Kind::VirtualService, key("a/older"))]);
    assert_eq!(served(&world.snapshot(), &large), Some((5, 20)));
    world.commit(vec![Change::Remove(Kind::VirtualService, large.clone())]);
    assert_eq!(served(&world.snapshot(), &surplus), None);
    assert!(messages(&world.snapshot()).is_empty());
}

/// Returns a VirtualService with hosts `h0.example`, `h1.example` and so on.
fn with_routes(name: &str, hosts: usize, http: Vec<networking::HttpRoute>) -> Row {
    let spec = networking::VirtualService {
        hosts: (0..hosts).map(|host| format!("h{host}.example")).collect(),
        http,
        ..Default::default()
    };
    config(Kind::VirtualService, name, 1, spec).into()
}

/// Returns a route that answers with a body of this size.
fn answer(bytes: usize) -> networking::HttpRoute {
    let body = networking::HttpBody {
        specifier: Some(networking::http_body::Specifier::String("b".repeat(bytes))),
    };
    networking::HttpRoute {
        direct_response: Some(Box::new(networking::HttpDirectResponse {
            status: 200,
            body: Some(body),
        })),
        ..Default::default()
    }
}

#[test]
fn r21_http_routes_apply_on_fewer_ports_the_more_they_are() {
    let connections = networking::VirtualService {
        hosts: vec!["tcp.example".to_owned()],
        tcp: vec![networking::TcpRoute::default()],
        ..Default::default()
    };
    let mesh = mesh(vec![
        virtual_service("a/few", 0, 1, 3),
        virtual_service("a/many", 0, 1, 80),
        config(Kind::VirtualService, "a/tcp", 0, connections).into(),
    ]);
    let most = |name: &str| {
        let summary = mesh.virtual_service_summaries.get(&Cx::untracked(), &key(name));
        summary.expect("it applies").most_ports
    };
    assert_eq!((most("a/few"), most("a/many")), (25, 20));
    assert_eq!(most("a/tcp"), u32::MAX, "without HTTP routes");
}

#[test]
fn r21_a_large_body_counts_for_each_host() {
    let mesh = mesh(vec![
        with_routes("a/large", 5, vec![answer(30 << 10)]),
        with_routes("b/usual", 20, vec![answer(900)]),
    ]);
    // The body counts as 31 routes.
    assert_eq!(served(&mesh, &key("a/large")), Some((3, 1)));
    assert_eq!(served(&mesh, &surplus_key(&key("a/large"))), Some((2, 1)));
    assert_eq!(served(&mesh, &key("b/usual")), Some((20, 1)));
    let [message] = messages(&mesh).try_into().expect("one finding");
    assert!(message.contains("155 routes of all hosts"), "{message}");
}

#[test]
fn r21_many_destinations_of_one_route_count() {
    let destination = networking::Destination {
        host: "w".to_owned(),
        ..Default::default()
    };
    let weighted = networking::HttpRouteDestination {
        destination: Some(destination.clone()),
        ..Default::default()
    };
    let mirror = networking::HttpMirrorPolicy {
        destination: Some(destination),
        ..Default::default()
    };
    let route = networking::HttpRoute {
        route: vec![weighted; 160],
        mirrors: vec![mirror; 160],
        ..Default::default()
    };
    let mesh = mesh(vec![with_routes("a/wide", 10, vec![route])]);
    // The destinations count ten, their size of more than two KiB two.
    assert_eq!(served(&mesh, &key("a/wide")), Some((7, 1)));
    assert_eq!(served(&mesh, &surplus_key(&key("a/wide"))), Some((3, 1)));
}

/// Returns a route of which `a/part` is the delegate.
fn delegating(conditions: Vec<networking::HttpMatchRequest>) -> networking::HttpRoute {
    networking::HttpRoute {
        r#match: conditions,
        delegate: Some(Box::new(networking::Delegate {
            name: "part".to_owned(),
            namespace: "a".to_owned(),
        })),
        ..Default::default()
    }
}

#[test]
fn r21_routes_of_delegates_count_where_no_server_has_them() {
    let root = networking::VirtualService {
        hosts: vec!["h.example".to_owned()],
        gateways: vec!["a/none".to_owned()],
        http: vec![delegating(Vec::new()); 11],
        ..Default::default()
    };
    let mesh = mesh(vec![
        config(Kind::VirtualService, "a/root", 1, root).into(),
        with_routes("a/part", 0, vec![answer(1); 10]),
    ]);
    assert_eq!(served(&mesh, &key("a/root")), None);
    assert_eq!(served(&mesh, &surplus_key(&key("a/root"))), Some((1, 1)));
    assert!(messages(&mesh)[0].contains("110 routes"), "{:?}", messages(&mesh));
}

#[test]
fn r21_the_size_of_a_delegate_counts_for_each_match_of_its_root() {
    let path = |path: &str| networking::HttpMatchRequest {
        uri: Some(networking::StringMatch {
            match_type: Some(networking::string_match::MatchType::Prefix(path.to_owned())),
        }),
        ..Default::default()
    };
    let root = delegating(vec![path("/a"), path("/b")]);
    let mut world = world(vec![
        with_routes("a/root", 5, vec![root]),
        with_routes("a/part", 0, vec![answer(10 << 10)]),
    ]);
    // Each of two matches counts as 11 routes.
    assert_eq!(served(&world.snapshot(), &key("a/root")), Some((4, 1)));
    world.commit(vec![Change::Upsert(with_routes("a/part", 0, vec![answer(900)]))]);
    assert_eq!(served(&world.snapshot(), &key("a/root")), Some((5, 1)));
}

/// Returns an HTTPRoute for `shop.example` with a number of matches.
fn http_route(name: &str, age: i64, matches: usize) -> String {
    let (namespace, short) = name.split_once('/').expect("namespace/name");
    let path = |number| format!("{{path: {{type: Exact, value: /{short}/{number}}}}}");
    let matches: Vec<String> = (0..matches).map(path).collect();
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
         metadata: {{name: {short}, namespace: {namespace}, creationTimestamp: \"2026-01-01T00:00:0{age}Z\"}}\n\
         spec:\n  parentRefs: [{{name: edge, namespace: gw}}]\n  hostnames: [shop.example]\n  \
         rules: [{{matches: [{}], backendRefs: [{{name: web, port: 80}}]}}]\n---\n",
        matches.join(", ")
    )
}

/// Returns a Gateway that takes routes of all namespaces, and a Service for the routes of `a` and of `b`.
fn shared_gateway() -> String {
    let service = |namespace: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: {namespace}}}\n\
             spec: {{ports: [{{name: http, port: 80}}]}}\n---\n"
        )
    };
    let gateway = "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: edge, namespace: gw}\n\
                   spec:\n  gatewayClassName: istio\n  listeners:\n  - {name: web, port: 80, protocol: HTTP, \
                   allowedRoutes: {namespaces: {from: All}}}\n---\n";
    [gateway, &service("a"), &service("b")].concat()
}

/// Returns the rows for `shop.example`: the namespace, the number of routes, and true if it refuses requests.
fn shop(mesh: &MeshSnapshot) -> Vec<(String, usize, bool)> {
    let cx = Cx::untracked();
    let rows = mesh.virtual_services.iter(&cx);
    let rows = rows.filter(|(_, row)| row.hosts == [Hostname::new("shop.example")]);
    let summary = |(key, row): (&ObjectKey, &Shared<VirtualService>)| {
        (
            key.namespace.to_string(),
            row.http.as_written().count(),
            surplus_of(key).is_some(),
        )
    };
    rows.map(summary).collect()
}

#[test]
fn r21_routes_use_the_limit_of_their_own_namespace() {
    let changes = |texts: &[String]| {
        let rows = folder(&installation(), &[("a.yaml", &texts.concat())]);
        rows.into_iter().map(Change::Upsert).collect()
    };
    let mut world = world(Vec::new());
    let of_b = |count| http_route("b/one", 2, count);
    world.commit(changes(&[shared_gateway(), http_route("a/first", 1, 30), of_b(60)]));
    world.commit(vec![Change::Upsert(virtual_service("a/plain", 9, 2, 40))]);
    let applied = |routes: usize| vec![("a".to_owned(), routes, false)];
    let check = |world: &World, expected: &[(String, usize, bool)]| {
        let mesh = world.snapshot();
        assert_eq!(shop(&mesh), expected);
        assert_eq!(served(&mesh, &key("a/plain")), Some((2, 40)));
    };
    check(&world, &applied(90));
    assert!(messages(&world.snapshot()).is_empty());

    // Beyond the limit of an object.
    world.commit(changes(&[http_route("b/two", 3, 60)]));
    check(&world, &applied(30));
    let [message] = messages(&world.snapshot()).try_into().expect("one finding");
    let expected = "spec.http: the routes of namespaces b do not apply: they exceed the limit of 100 for one host \
                    (PILOT_MAX_ROUTES_PER_OBJECT), or that of 150 for all (PILOT_MAX_ROUTES_PER_NAMESPACE)";
    assert!(message.ends_with(expected), "{message}");
    world.commit(vec![Change::Remove(Kind::HttpRoute, key("b/two"))]);
    check(&world, &applied(90));

    // Beyond the limit of the namespace.
    world.commit(vec![Change::Upsert(virtual_service("b/older", 0, 2, 50))]);
    check(&world, &applied(30));
    world.commit(changes(&[of_b(20)]));
    check(&world, &applied(50));

    // Nothing is left, so that no wildcard host answers.
    world.commit(changes(&[http_route("a/first", 1, 101), of_b(101)]));
    check(&world, &[("a".to_owned(), 1, true)]);
}

#[test]
fn r21_the_size_of_merged_routes_counts_for_their_namespace() {
    let header = |number| format!("{{name: x-{number}, value: {}}}", "v".repeat(4000));
    let headers: Vec<String> = (0..8).map(header).collect();
    let filter = format!(
        "{{type: ResponseHeaderModifier, responseHeaderModifier: {{set: [{}]}}}}",
        headers.join(", ")
    );
    let large = http_route("b/large", 2, 4).replace("backendRefs", &format!("filters: [{filter}], backendRefs"));
    let texts = [shared_gateway(), http_route("a/small", 1, 1), large].concat();
    let mesh = mesh(folder(&installation(), &[("a.yaml", &texts)]));
    // Each of the four counts as 32.
    assert_eq!(shop(&mesh), [("a".to_owned(), 1, false)]);
}

/// Returns a Gateway with listeners for routes of all namespaces.
fn wide_gateway(listeners: usize) -> String {
    let listener = |number| {
        let port = 8000 + number;
        format!("  - {{name: l{number}, port: {port}, protocol: HTTP, allowedRoutes: {{namespaces: {{from: All}}}}}}\n")
    };
    let listeners: Vec<String> = (0..listeners).map(listener).collect();
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: wide, namespace: gw}}\n\
         spec:\n  gatewayClassName: istio\n  listeners:\n{}---\n",
        listeners.concat()
    )
}

/// Returns a route with some hosts and one parent.
fn route_with_hosts(name: &str, age: i64, hosts: usize, parent: &str) -> String {
    let (namespace, short) = name.split_once('/').expect("namespace/name");
    let hosts: Vec<String> = (0..hosts).map(|host| format!("h{host}.{short}.example")).collect();
    let rule = "{backendRefs: [{name: web, port: 80}]}";
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
         metadata: {{name: {short}, namespace: {namespace}, creationTimestamp: \"2026-01-01T00:00:0{age}Z\"}}\n\
         spec:\n  parentRefs: [{parent}]\n  hostnames: [{}]\n  rules: [{rule}]\n---\n",
        hosts.join(", ")
    )
}

/// Each host of each listener becomes a VirtualService.
#[test]
fn r21_hosts_of_routes_count_for_each_listener_and_service() {
    let changes = |texts: &[String]| {
        let rows = folder(&installation(), &[("a.yaml", &texts.concat())]);
        rows.into_iter().map(Change::Upsert).collect()
    };
    let wide = "{name: wide, namespace: gw}";
    let section = "{name: wide, namespace: gw, sectionName: l3}";
    let contributions = |world: &World, names: &[&str]| {
        let mesh = world.snapshot();
        let of = |name: &&str| {
            let key = AttachedRouteKey {
                kind: Kind::HttpRoute,
                object: key(name),
            };
            let row = mesh.attached_routes.get(&Cx::untracked(), &key);
            row.expect("it is converted").contributions.len()
        };
        names.iter().map(of).collect::<Vec<usize>>()
    };
    let mut world = world(Vec::new());
    world.commit(changes(&[
        route_with_hosts("a/large", 0, 13, wide),
        route_with_hosts("a/later", 2, 7, wide),
        route_with_hosts("a/most", 1, 12, wide),
        route_with_hosts("a/section", 3, 13, section),
        route_with_hosts("a/small", 4, 2, wide),
        route_with_hosts("b/other", 5, 12, wide),
    ]));
    world.commit(changes(&[shared_gateway(), wide_gateway(8)]));
    let names = ["a/large", "a/later", "a/most", "a/section", "a/small", "b/other"];
    assert_eq!(contributions(&world, &names), [0, 0, 96, 13, 16, 96]);
    let expected = [
        "HTTPRoute a/large: spec.parentRefs: 104 hosts of all parents exceed the limit of 100 \
         (PILOT_MAX_ROUTES_PER_OBJECT); the route does not apply (hint: use fewer hostnames, listeners or services, or \
         raise the limit)",
        "HTTPRoute a/later: spec.parentRefs: 56 hosts of all parents and those of older routes of the namespace exceed \
         the limit of 150 (PILOT_MAX_ROUTES_PER_NAMESPACE); the route does not apply (hint: use fewer hostnames, \
         listeners or services, or raise the limit)",
    ];
    assert_eq!(messages(&world.snapshot()), expected);
    world.commit(vec![Change::Remove(Kind::HttpRoute, key("a/most"))]);
    assert_eq!(contributions(&world, &["a/large", "a/later"]), [0, 56]);
    world.commit(changes(&[wide_gateway(7)]));
    assert_eq!(contributions(&world, &["a/large", "a/later"]), [91, 49]);
    assert!(messages(&world.snapshot()).is_empty());
    // Hosts of a ServiceEntry count like listeners.
    let hosts: Vec<String> = (0..101).map(|host| format!("h{host}.test")).collect();
    let entry = format!(
        "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: many, namespace: b}}\n\
         spec: {{hosts: [{}], resolution: DNS, ports: [{{number: 80, name: http, protocol: HTTP}}]}}\n---\n",
        hosts.join(", ")
    );
    let parent = "{group: networking.istio.io, kind: ServiceEntry, name: many}";
    world.commit(changes(&[entry, route_with_hosts("b/entry", 6, 1, parent)]));
    assert_eq!(contributions(&world, &["b/entry", "b/other"]), [0, 84]);
}

fn entry(name: &str, age: i64, counts: [u8; 3], endpoints: u8) -> Row {
    config(Kind::ServiceEntry, name, age, entry_spec(name, counts, endpoints)).into()
}

/// Returns a ServiceEntry with these numbers of hosts, addresses and ports, and of endpoints.
fn entry_spec(name: &str, [hosts, addresses, ports]: [u8; 3], endpoints: u8) -> networking::ServiceEntry {
    let port = |number: u8| networking::ServicePort {
        number: 8000 + u32::from(number),
        name: format!("tcp-{number}"),
        protocol: "TCP".to_owned(),
        ..Default::default()
    };
    let endpoint = |number: u8| networking::WorkloadEntry {
        address: format!("10.2.0.{number}"),
        ..Default::default()
    };
    let mut spec = networking::ServiceEntry {
        hosts: (0..hosts)
            .map(|host| format!("h{host}.{name}").replace('/', "."))
            .collect(),
        addresses: (0..addresses).map(|address| format!("10.1.0.{address}")).collect(),
        ports: (0..ports).map(port).collect(),
        endpoints: (0..endpoints).map(endpoint).collect(),
        ..Default::default()
    };
    spec.set_resolution(networking::service_entry::Resolution::Static);
    spec
}

/// Returns the numbers of services and endpoints of each host of the entry `a/NAME`.
fn produced(mesh: &MeshSnapshot, name: &str, hosts: u8) -> Vec<(usize, usize)> {
    let cx = Cx::untracked();
    let of_host = |host: u8| {
        let key = ServiceKey {
            hostname: format!("h{host}.a.{name}").into(),
            namespace: "a".into(),
        };
        let endpoints = mesh.endpoints.get(&cx, &key);
        (
            mesh.services.get(&cx, &key).map_or(0, |service| service.all().count()),
            endpoints.map_or(0, |row| row.endpoints.len()),
        )
    };
    (0..hosts).map(of_host).collect()
}

#[test]
fn r21_surplus_hosts_of_entries_are_no_services() {
    let mesh = mesh(vec![
        entry("a/large", 1, [3, 2, 2], 9),
        entry("a/small", 2, [1, 2, 2], 4),
    ]);
    // Each host has two addresses with two ports, and nine endpoints for each of these.
    assert_eq!(produced(&mesh, "large", 3), [(2, 36), (2, 36), (0, 0)]);
    assert_eq!(produced(&mesh, "small", 1), [(2, 16)]);
    let [message] = messages(&mesh).try_into().expect("one finding");
    assert_eq!(
        message,
        "ServiceEntry a/large: spec.hosts: 120 endpoints of all hosts exceed the limit of 100 \
         (PILOT_MAX_ENDPOINTS_PER_OBJECT); the first 2 hosts apply, the others are unknown to proxies"
    );
}

#[test]
fn r21_names_of_entries_count_for_each_host() {
    let mut spec = entry_spec("a/names", [3, 1, 1], 0);
    spec.subject_alt_names = (0..40).map(|number| format!("spiffe://td/{number}")).collect();
    spec.export_to = (0..9).map(|number| format!("n{number}")).collect();
    let mesh = mesh(vec![config(Kind::ServiceEntry, "a/names", 1, spec).into()]);
    // Each host has one port and 49 names.
    assert_eq!(produced(&mesh, "names", 3), [(1, 0), (1, 0), (0, 0)]);
}

#[test]
fn r21_older_entries_use_the_limit_of_a_namespace_first() {
    let rows = || vec![entry("a/second", 2, [1, 2, 4], 10), entry("a/first", 1, [1, 2, 4], 9)];
    let expected = [[(2, 72)], [(0, 0)]];
    let found = |mesh: &MeshSnapshot| ["first", "second"].map(|name| produced(mesh, name, 1));
    assert_eq!(found(&mesh(rows())), expected);
    // One at a time, in another order.
    let mut world = world(Vec::new());
    for row in rows() {
        world.commit(vec![Change::Upsert(row)]);
    }
    assert_eq!(found(&world.snapshot()), expected);
    world.commit(vec![Change::Remove(Kind::ServiceEntry, key("a/first"))]);
    assert_eq!(produced(&world.snapshot(), "second", 1), [(2, 80)]);
    assert!(messages(&world.snapshot()).is_empty());
    // Its own limit admits its first host, that of the namespace does not.
    world.commit(vec![Change::Upsert(entry("a/third", 3, [1, 2, 4], 14))]);
    assert_eq!(produced(&world.snapshot(), "third", 1), [(0, 0)]);
    let [message] = messages(&world.snapshot()).try_into().expect("one finding");
    assert_eq!(
        message,
        "ServiceEntry a/third: spec.hosts: the endpoints of the namespace exceed the limit of 150 \
         (PILOT_MAX_ENDPOINTS_PER_NAMESPACE); the first 0 hosts apply, the others are unknown to proxies"
    );
}

#[test]
fn r21_the_first_host_of_an_entry_applies_up_to_ten_times_the_limit() {
    let mut installation = installation();
    installation.features.pilot_max_endpoints_per_namespace = 0;
    let mut world = World::new(installation);
    let wide = |hosts, endpoints| vec![Change::Upsert(entry("a/wide", 1, [hosts, 2, 10], endpoints))];
    world.commit(wide(2, 49));
    assert_eq!(produced(&world.snapshot(), "wide", 2), [(2, 980), (0, 0)]);
    let [message] = messages(&world.snapshot()).try_into().expect("one finding");
    assert!(message.contains("2000 endpoints of all hosts"), "{message}");
    world.commit(wide(1, 49));
    assert_eq!(produced(&world.snapshot(), "wide", 1), [(2, 980)]);
    assert!(messages(&world.snapshot()).is_empty());
    world.commit(wide(1, 50));
    assert_eq!(produced(&world.snapshot(), "wide", 1), [(0, 0)]);
    let [message] = messages(&world.snapshot()).try_into().expect("one finding");
    assert!(message.contains("1020 endpoints of all hosts"), "{message}");
}

#[test]
fn r21_a_host_that_proxies_resolve_counts_as_an_endpoint() {
    let mut spec = entry_spec("a/resolved", [1, 1, 20], 0);
    spec.set_resolution(networking::service_entry::Resolution::Dns);
    let mesh = mesh(vec![config(Kind::ServiceEntry, "a/resolved", 1, spec).into()]);
    let key = DemandKey {
        kind: Kind::ServiceEntry,
        object: key("a/resolved"),
    };
    let demand = mesh.entry_demands.get(&Cx::untracked(), &key);
    assert_eq!(demand.map(|demand| demand.declared), Some(40));
}

#[test]
fn r21_selected_workloads_count_as_endpoints() {
    let workload = |number: u8| -> Row {
        let spec = networking::WorkloadEntry {
            address: format!("10.3.0.{number}"),
            labels: [("app".to_owned(), "w".to_owned())].into(),
            ..Default::default()
        };
        config(Kind::WorkloadEntry, &format!("a/w{number}"), 1, spec).into()
    };
    let mut spec = entry_spec("a/chosen", [2, 1, 1], 0);
    spec.workload_selector = Some(networking::WorkloadSelector {
        labels: [("app".to_owned(), "w".to_owned())].into(),
    });
    let mut world = world(vec![config(Kind::ServiceEntry, "a/chosen", 1, spec).into()]);
    world.commit((1..=49).map(workload).map(Change::Upsert).collect());
    assert_eq!(produced(&world.snapshot(), "chosen", 2), [(1, 49), (1, 49)]);
    world.commit(vec![Change::Upsert(workload(50))]);
    assert_eq!(produced(&world.snapshot(), "chosen", 2), [(1, 50), (0, 0)]);
    // Beyond the limit of the object, the first host stays.
    world.commit((51..=120).map(workload).map(Change::Upsert).collect());
    assert_eq!(produced(&world.snapshot(), "chosen", 2), [(1, 120), (0, 0)]);
}

#[test]
fn r21_routes_of_a_proxy_use_the_limits_of_object_and_namespace() {
    let mut budget = RouteBudget::of(&mesh(Vec::new()));
    assert!(budget.take(&key("a/one"), 60));
    assert!(!budget.take(&key("a/one"), 41), "the object");
    assert!(budget.take(&key("a/one"), 40), "refused routes count nothing");
    assert!(!budget.take(&key("a/two"), 51), "the namespace");
    assert!(budget.take(&key("a/two"), 50));
    assert!(budget.take(&key("b/one"), 100));
}

#[test]
fn r21_servers_multiply_routes_of_connections() {
    let server = |number: usize| {
        let port = format!("{{number: {}, name: tls-{number}, protocol: TLS}}", 8000 + number);
        format!("  - {{port: {port}, hosts: [\"*.example\"], tls: {{mode: PASSTHROUGH}}}}\n")
    };
    let route = |number: usize| {
        format!("  - match: [{{sniHosts: [h{number}.example]}}]\n    route: [{{destination: {{host: web}}}}]\n")
    };
    let servers = (0..6).map(server).collect::<Vec<_>>().concat();
    let matches = (0..20).map(route).collect::<Vec<_>>().concat();
    // A Gateway that is named again has the same servers.
    let text = format!(
        "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: edge, namespace: a}}\n\
         spec:\n  selector: {{istio: edge}}\n  servers:\n{servers}---\n\
         apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: tls, namespace: a}}\n\
         spec:\n  hosts: [\"*.example\"]\n  gateways: [edge, a/edge, edge]\n  tls:\n{matches}"
    );
    let mesh = mesh(folder(&installation(), &[("a.yaml", &text)]));
    assert_eq!(served(&mesh, &key("a/tls")), None);
    let row = mesh.virtual_services.get(&Cx::untracked(), &surplus_key(&key("a/tls")));
    let row = row.expect("a row refuses the connections");
    let [route] = row.tls.as_slice() else {
        panic!("{} routes", row.tls.len());
    };
    assert_eq!(
        route.r#match[0].sni_hosts.len(),
        20,
        "no name falls through to other routes"
    );
    assert!(messages(&mesh)[0].contains("120 routes"), "{:?}", messages(&mesh));
}
