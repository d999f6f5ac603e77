use super::*;
use crate::{
    model::{
        Change, Installation, World,
        fixture::{CLUSTER, config, folder},
        inputs::Row,
        snapshot::MeshSnapshot,
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
    let subset = |number| networking::Subset {
        name: format!("s{number}"),
        ..Default::default()
    };
    let spec = networking::DestinationRule {
        host: name.replace('/', "."),
        subsets: (0..subsets).map(subset).collect(),
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
    Some((row.hosts.len(), row.spec.http.len()))
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
    assert!(
        row.spec.http[0]
            .direct_response
            .as_ref()
            .is_some_and(|response| response.status == 404)
    );
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
    let text = format!(
        "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: edge, namespace: a}}\n\
         spec:\n  selector: {{istio: edge}}\n  servers:\n{servers}---\n\
         apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: tls, namespace: a}}\n\
         spec:\n  hosts: [\"*.example\"]\n  gateways: [edge]\n  tls:\n{matches}"
    );
    let mesh = mesh(folder(&installation(), &[("a.yaml", &text)]));
    assert_eq!(served(&mesh, &key("a/tls")), None);
    let row = mesh.virtual_services.get(&Cx::untracked(), &surplus_key(&key("a/tls")));
    let row = row.expect("a row refuses the connections");
    let [route] = row.spec.tls.as_slice() else {
        panic!("{} routes", row.spec.tls.len());
    };
    assert_eq!(
        route.r#match[0].sni_hosts.len(),
        20,
        "no name falls through to other routes"
    );
    assert!(messages(&mesh)[0].contains("120 routes"), "{:?}", messages(&mesh));
}
