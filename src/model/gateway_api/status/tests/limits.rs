//! Routes beyond the limits of what they produce.

use super::*;

/// Returns an empty world with low limits.
fn limited() -> World {
    let mut installation = Installation::default();
    installation.features.pilot_max_routes_per_object = 100;
    installation.features.pilot_max_routes_per_namespace = 150;
    World::new(installation)
}

/// Returns a Gateway with a number of listeners for routes of all namespaces.
fn wide_gateway(protocol: &str, listeners: u16) -> Value {
    let listener = |number: u16| {
        json!({"name": format!("l{number}"), "port": 8000 + number, "protocol": protocol,
            "allowedRoutes": {"namespaces": {"from": "All"}}})
    };
    gateway((0..listeners).map(listener).collect())
}

/// Returns an HTTPRoute `app/NAME`, created at a second of one minute, with a number of hosts.
fn wide_route(name: &str, second: u8, hosts: usize) -> Value {
    let hosts: Vec<String> = (0..hosts).map(|host| format!("h{host}.{name}.test")).collect();
    let parents = json!([{"name": "x", "namespace": "gw"}, {"name": "x", "namespace": "gw", "sectionName": "no"}]);
    let rules = json!([{"backendRefs": [{"name": "web", "port": 80}]}]);
    let mut route = object(
        "HTTPRoute",
        "app",
        &json!({"parentRefs": parents, "hostnames": hosts, "rules": rules}),
    );
    route["metadata"]["name"] = name.into();
    route["metadata"]["creationTimestamp"] = format!("2026-01-01T00:00:{second:02}Z").into();
    route
}

/// Returns the condition `Accepted` for one of the references of a route of `app`.
fn accepted(statuses: &Statuses, kind: Kind, name: &str, entry: usize) -> String {
    let status = merged(statuses, kind, "app", name);
    let conditions = &status["parents"][entry]["conditions"];
    let message = conditions[0]["message"].as_str().unwrap_or_default();
    format!("{}: {message}", reasons(conditions)[0])
}

/// Returns the number of routes of the first listener.
fn attached_routes(statuses: &Statuses) -> Value {
    merged(statuses, Kind::KubeGateway, "gw", "x")["listeners"][0]["attachedRoutes"].clone()
}

#[test]
fn r21_a_route_beyond_a_limit_is_not_accepted() {
    let mut world = limited();
    let mut statuses = Statuses::new(Revisions::default());
    let routes = [
        wide_route("large", 0, 13),
        wide_route("first", 1, 12),
        wide_route("later", 2, 7),
    ];
    put(&mut world, &[wide_gateway("HTTP", 8), service("app")]);
    let mesh = put(&mut world, &routes);
    statuses.update(&mesh, Vec::new());
    let of = |statuses: &Statuses, name: &str, entry: usize| accepted(statuses, Kind::HttpRoute, name, entry);
    let hint = "the route does not apply (hint: use fewer hostnames, listeners or services, or raise the limit)";
    assert_eq!(
        of(&statuses, "large", 1),
        format!(
            "Accepted False OutputLimitExceeded: 104 hosts of all parents exceed the limit of 100 \
             (PILOT_MAX_ROUTES_PER_OBJECT); {hint}"
        )
    );
    assert_eq!(
        of(&statuses, "later", 1),
        format!(
            "Accepted False OutputLimitExceeded: 56 hosts of all parents and those of older routes of the namespace \
             exceed the limit of 150 (PILOT_MAX_ROUTES_PER_NAMESPACE); {hint}"
        )
    );
    let valid = "Accepted True Accepted: Route was valid, bound to 8 parents";
    assert_eq!(of(&statuses, "first", 1), valid);
    // A reference that the route does not attach to has a reason of its own.
    let other = of(&statuses, "large", 0);
    assert!(other.starts_with("Accepted False NoMatchingParent"), "{other}");
    assert_eq!(attached_routes(&statuses), 1);

    // Room for the younger route changes no status but its own.
    let key = |name: &str| StatusKey {
        kind: Kind::HttpRoute,
        object: ObjectKey::new(&cluster(), "app", name),
    };
    let removed = world.commit(vec![Change::Remove(Kind::HttpRoute, key("first").object)]);
    assert_eq!(
        statuses.update(&removed.snapshot, Vec::new()),
        [key("first"), key("later")]
    );
    assert_eq!(of(&statuses, "later", 1), valid);
    assert_eq!(attached_routes(&statuses), 1);

    let mesh = put(&mut world, &[wide_gateway("HTTP", 7)]);
    statuses.update(&mesh, Vec::new());
    let valid = "Accepted True Accepted: Route was valid, bound to 7 parents";
    assert_eq!(of(&statuses, "large", 1), valid);
    assert_eq!(attached_routes(&statuses), 2);
}

#[test]
fn r21_rules_for_connections_count_for_each_host() {
    let mut world = limited();
    let rule = json!({"backendRefs": [{"name": "web", "port": 80}]});
    let hosts: Vec<String> = (0..7).map(|host| format!("h{host}.test")).collect();
    let spec = json!({"parentRefs": [{"name": "x", "namespace": "gw"}], "hostnames": hosts, "rules": [rule, rule]});
    let route = object("TLSRoute", "app", &spec);
    let mesh = put(&mut world, &[wide_gateway("TLS", 8), service("app"), route]);
    let mut statuses = Statuses::new(Revisions::default());
    statuses.update(&mesh, Vec::new());
    assert_eq!(
        accepted(&statuses, Kind::TlsRoute, "x", 0),
        "Accepted False OutputLimitExceeded: 112 rules for hosts of all parents exceed the limit of 100 \
         (PILOT_MAX_ROUTES_PER_OBJECT); the route does not apply (hint: use fewer rules, hosts, listeners or services, \
         or raise the limit)"
    );
}

/// Returns an HTTPRoute, created at a second of one minute, with a number of matches for some hosts.
fn route_with_matches(name: &str, second: u8, hosts: &[&str], matches: usize) -> Value {
    let (namespace, short) = name.split_once('/').expect("namespace/name");
    let matched = |number: usize| json!({"path": {"type": "Exact", "value": format!("/{short}/{number}")}});
    let matches: Vec<Value> = (0..matches).map(matched).collect();
    let rule = json!({"matches": matches, "backendRefs": [{"name": "web", "port": 80}]});
    let spec = json!({"parentRefs": [{"name": "x", "namespace": "gw"}], "hostnames": hosts, "rules": [rule]});
    let mut route = object("HTTPRoute", namespace, &spec);
    route["metadata"]["name"] = short.into();
    route["metadata"]["creationTimestamp"] = format!("2026-01-01T00:00:{second:02}Z").into();
    route
}

/// Routes of several namespaces are merged for a host, where those of each namespace have a limit.
#[test]
fn r21_a_route_beyond_the_limit_of_a_host_is_not_accepted_or_partially_invalid() {
    let mut world = limited();
    let mut statuses = Statuses::new(Revisions::default());
    let routes = [
        route_with_matches("a/first", 1, &["shop.test"], 30),
        route_with_matches("b/one", 2, &["shop.test", "b.test"], 60),
        route_with_matches("b/two", 3, &["shop.test"], 60),
    ];
    put(&mut world, &[wide_gateway("HTTP", 1), service("a"), service("b")]);
    let mesh = put(&mut world, &routes);
    statuses.update(&mesh, Vec::new());
    let written = |statuses: &Statuses, name: &str, existing: &Value| {
        let (namespace, short) = name.split_once('/').expect("namespace/name");
        let object = ObjectKey::new(&cluster(), namespace, short);
        let kind = Kind::HttpRoute;
        let status = statuses.get(&StatusKey { kind, object }).expect("a status");
        status.merged(existing, &Namespace::new(namespace), "now")
    };
    let conditions = |status: &Value| status["parents"][0]["conditions"].clone();
    let message = |conditions: &Value, position: usize| conditions[position]["message"].as_str().map(str::to_owned);
    let valid = ["Accepted True Accepted", "ResolvedRefs True ResolvedRefs"];
    assert_eq!(
        reasons(&conditions(&written(&statuses, "a/first", &Value::Null))),
        valid
    );
    let two = conditions(&written(&statuses, "b/two", &Value::Null));
    assert_eq!(
        reasons(&two),
        ["Accepted False OutputLimitExceeded", "ResolvedRefs True ResolvedRefs"]
    );
    let hint = "(hint: use fewer matches or smaller rules, or raise the limit)";
    // The virtual host counts, too.
    let of_shop = "host \"shop.test\": 121 matches of the namespace's routes exceed the limit of 100 \
                   (PILOT_MAX_ROUTES_PER_OBJECT)";
    let expected = format!("No rule applies: {of_shop} {hint}");
    assert_eq!(message(&two, 0), Some(expected));
    let dropped = written(&statuses, "b/one", &Value::Null);
    let one = conditions(&dropped);
    assert_eq!(
        reasons(&one),
        [valid[0], "PartiallyInvalid True OutputLimitExceeded", valid[1]]
    );
    let expected = format!("Dropped Rules for some hosts: {of_shop} {hint}");
    assert_eq!(message(&one, 1), Some(expected));
    assert_eq!(attached_routes(&statuses), 2);

    // Without the other route of the namespace, all rules apply. No other status changes.
    let key = |name: &str| StatusKey {
        kind: Kind::HttpRoute,
        object: ObjectKey::new(&cluster(), "b", name),
    };
    let removed = world.commit(vec![Change::Remove(Kind::HttpRoute, key("two").object)]);
    assert_eq!(statuses.update(&removed.snapshot, Vec::new()), [key("one"), key("two")]);
    assert_eq!(reasons(&conditions(&written(&statuses, "b/one", &dropped))), valid);

    // An older object uses up the limit of the namespace.
    let mesh = put(&mut world, &[route_with_matches("b/older", 0, &["older.test"], 90)]);
    statuses.update(&mesh, Vec::new());
    let one = conditions(&written(&statuses, "b/one", &Value::Null));
    let reason = "61 matches of the namespace's routes and those of older objects of the namespace exceed the limit of \
                  150 (PILOT_MAX_ROUTES_PER_NAMESPACE)";
    let expected = format!("No rule applies: host \"b.test\": {reason}; host \"shop.test\": {reason} {hint}");
    assert_eq!(message(&one, 0), Some(expected));
    assert_eq!(reasons(&one)[0], "Accepted False OutputLimitExceeded");
    assert_eq!(
        reasons(&conditions(&written(&statuses, "b/older", &Value::Null))),
        valid
    );
    assert_eq!(attached_routes(&statuses), 2);
}
