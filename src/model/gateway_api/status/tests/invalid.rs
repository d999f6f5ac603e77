//! Routes with errors.

use super::*;
use crate::api::invalid_route::InvalidRoute;

/// Returns a version of the HTTPRoute `app/x` with a regular expression.
fn with_expression(generation: i64, expression: &str) -> Value {
    let matched = json!({"path": {"type": "RegularExpression", "value": expression}});
    let rule = json!({"matches": [matched], "backendRefs": [{"name": "web", "port": 80}]});
    let parent = json!({"name": "x", "namespace": "gw", "sectionName": "a"});
    let mut route = object("HTTPRoute", "app", &route(&parent, "a.test", &rule));
    route["metadata"]["generation"] = generation.into();
    route
}

/// Returns the row of a version with errors.
fn invalid(object: &Value) -> InvalidRoute {
    let parsed = document::parse(&cluster(), object);
    assert!(parsed.rows.is_empty());
    InvalidRoute::of(Kind::HttpRoute, &cluster(), object, &parsed.diagnostics).expect("it has errors")
}

/// Returns the conditions of the first entry as `type status reason generation`.
fn with_generations(status: &Value) -> Vec<String> {
    let conditions = &status["parents"][0]["conditions"];
    let generations = conditions.as_array().into_iter().flatten();
    let generations = generations.map(|condition| condition["observedGeneration"].to_string());
    let texts = reasons(conditions).into_iter().zip(generations);
    texts.map(|(text, generation)| format!("{text} {generation}")).collect()
}

#[test]
fn a_version_with_errors_is_not_accepted() {
    let mut world = mesh("HTTPRoute", &json!({}));
    let valid = put(&mut world, &[with_expression(3, "/a.*")]);
    let mut statuses = Statuses::new(Revisions::default());
    statuses.update(&valid, Vec::new());
    let attached = |statuses: &Statuses| {
        let gateway = merged(statuses, Kind::KubeGateway, "gw", "x");
        gateway["listeners"][0]["attachedRoutes"].clone()
    };
    let key = |kind: Kind, namespace: &str| StatusKey {
        kind,
        object: ObjectKey::new(&cluster(), namespace, "x"),
    };
    let (gateway, route) = (key(Kind::KubeGateway, "gw"), key(Kind::HttpRoute, "app"));
    let before = merged(&statuses, Kind::HttpRoute, "app", "x");
    let accepted = ["Accepted True Accepted 3", "ResolvedRefs True ResolvedRefs 3"];
    assert_eq!(with_generations(&before), accepted);
    assert_eq!(attached(&statuses), 1);

    let broken = invalid(&with_expression(4, "/a("));
    let mesh = world.commit(vec![Change::Upsert(broken.clone().into())]).snapshot;
    assert_eq!(statuses.update(&mesh, Vec::new()), [gateway.clone(), route.clone()]);
    let status = statuses.get(&route).expect("a status");
    assert_eq!(status.generation, 4);
    let after = status.merged(&before, &Namespace::new("app"), "now");
    assert_eq!(
        with_generations(&after),
        ["Accepted False UnsupportedValue 4", "ResolvedRefs True ResolvedRefs 3"]
    );
    let message = after["parents"][0]["conditions"][0]["message"]
        .as_str()
        .unwrap_or_default();
    assert!(
        message.starts_with("spec.rules[0].matches[0].path.value: ")
            && message.ends_with("; the last valid version of the route applies, if there was one"),
        "{message}"
    );
    assert_eq!(attached(&statuses), 0);

    // The next version is valid.
    let corrected = document::parse(&cluster(), &with_expression(5, "/b.*"))
        .rows
        .into_iter();
    let mut changes: Vec<Change> = corrected.map(Change::Upsert).collect();
    changes.push(Change::Remove(InvalidRoute::KIND, broken.key.clone()));
    let mesh = world.commit(changes).snapshot;
    assert_eq!(statuses.update(&mesh, Vec::new()), [gateway, route.clone()]);
    let status = statuses.get(&route).expect("a status");
    let accepted = ["Accepted True Accepted 5", "ResolvedRefs True ResolvedRefs 5"];
    assert_eq!(
        with_generations(&status.merged(&after, &Namespace::new("app"), "now")),
        accepted
    );
    assert_eq!(attached(&statuses), 1);
}

#[test]
fn a_route_without_a_valid_version_has_a_status_while_it_exists() {
    let mut world = mesh("HTTPRoute", &json!({}));
    let other = ObjectKey::new(&cluster(), "app", "x");
    world.commit(vec![Change::Remove(Kind::HttpRoute, other)]);
    let broken = invalid(&with_expression(1, "/a("));
    let mesh = world.commit(vec![Change::Upsert(broken.clone().into())]).snapshot;
    let mut statuses = Statuses::new(Revisions::default());
    statuses.update(&mesh, Vec::new());
    let status = merged(&statuses, Kind::HttpRoute, "app", "x");
    assert_eq!(with_generations(&status), ["Accepted False UnsupportedValue 1"]);
    let mesh = world
        .commit(vec![Change::Remove(InvalidRoute::KIND, broken.key.clone())])
        .snapshot;
    statuses.update(&mesh, Vec::new());
    assert_eq!(merged(&statuses, Kind::HttpRoute, "app", "x"), Value::Null);
}
