use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::api::document::parse_object;

fn cluster() -> ClusterId {
    ClusterId::new_static("c")
}

fn item(kind: Kind, value: &Value) -> WatchedObject {
    let parsed = parse_object(&cluster(), kind, value);
    let text = |name: &str| value["metadata"][name].as_str().unwrap_or_default();
    WatchedObject {
        kind,
        key: ObjectKey::new(&cluster(), text("namespace"), text("name")),
        revision: value["metadata"]["labels"]["istio.io/rev"].as_str().map(SmolStr::new),
        invalid: InvalidRoute::of(kind, &cluster(), value, &parsed.diagnostics).map(Shared::new),
        row: parsed.rows.into_iter().next(),
        findings: parsed.diagnostics,
        version: 0,
    }
}

fn namespace(name: &str, team: &str) -> WatchedObject {
    item(
        Kind::Namespace,
        &json!({"metadata": {"name": name, "labels": {"team": team}}}),
    )
}

fn sidecar(namespace: &str, name: &str, revision: Option<&str>, hosts: &Value) -> WatchedObject {
    let mut value = json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"egress": [{"hosts": hosts}]}});
    if let Some(revision) = revision {
        value["metadata"]["labels"] = json!({"istio.io/rev": revision});
    }
    item(Kind::Sidecar, &value)
}

fn teams(teams: &[&str]) -> Vec<LabelSelector> {
    let selector = |team: &&str| LabelSelector {
        match_labels: [(SmolStr::new("team"), SmolStr::new(team))].into_iter().collect(),
        ..LabelSelector::default()
    };
    teams.iter().map(selector).collect()
}

/// Rows of a listener after these changes.
fn follow(have: &mut BTreeMap<(Kind, ObjectKey), Row>, changes: &[Change]) {
    for change in changes {
        match change {
            Change::Upsert(row) => drop(have.insert((row.kind(), row.key().clone()), row.clone())),
            Change::Remove(kind, key) => drop(have.remove(&(*kind, key.clone()))),
            Change::Replace(source, rows) => {
                have.retain(|(kind, _), _| *kind != source.kind);
                have.extend(rows.iter().map(|row| ((row.kind(), row.key().clone()), row.clone())));
            }
            Change::RemoveCluster(_) => have.clear(),
        }
    }
}

fn summary(output: &FilterOutput) -> Vec<String> {
    let describe = |change: &Change| match change {
        Change::Upsert(row) => format!("+{}", row.key()),
        Change::Remove(_, key) => format!("-{key}"),
        other => format!("{other:?}"),
    };
    output.changes.iter().map(describe).collect()
}

#[test]
fn the_mesh_config_of_a_cluster_is_visible_in_any_namespace() {
    let mut filter = DiscoveryFilter::new(cluster(), "default".into());
    let mut output = FilterOutput::default();
    let selecting = Filters {
        selectors: teams(&["red"]),
        ..Filters::default()
    };
    filter.set_filters(selecting, &mut output);
    filter.apply(namespace("istio-system", "none"), &mut output);
    let labels = json!({"istio.io/rev": "other"});
    let map = json!({"metadata": {"name": "istio", "namespace": "istio-system", "labels": labels},
        "data": {"mesh": "trustDomain: td2"}});
    filter.apply(item(Kind::MeshConfig, &map), &mut output);
    assert_eq!(summary(&output), ["+istio-system", "+istio-system/istio"]);
}

#[test]
fn a_namespace_is_selected_by_its_labels() {
    let mut filter = DiscoveryFilter::new(cluster(), "default".into());
    let mut output = FilterOutput::default();
    filter.set_filters(
        Filters {
            selectors: teams(&["red", "blue"]),
            ..Filters::default()
        },
        &mut output,
    );
    filter.apply(sidecar("a", "s", None, &json!(["*/*"])), &mut output);
    assert_eq!(
        summary(&output),
        [] as [&str; 0],
        "a namespace that is not known has no labels"
    );
    filter.apply(namespace("a", "blue"), &mut output);
    filter.apply(namespace("b", "green"), &mut output);
    assert_eq!(
        summary(&output),
        ["+a", "+a/s", "+b"],
        "namespaces themselves always count"
    );
    let mut output = FilterOutput::default();
    filter.apply(namespace("a", "green"), &mut output);
    filter.set_filters(Filters::default(), &mut output);
    filter.delete(Kind::Namespace, &ObjectKey::new(&cluster(), "", "a"), &mut output);
    assert_eq!(summary(&output), ["+a", "-a/s", "+a/s", "-a"]);
}

#[test]
fn without_a_revision_the_objects_of_all_revisions_count() {
    let mut filter = DiscoveryFilter::new(cluster(), SmolStr::default());
    let mut output = FilterOutput::default();
    for (name, revision) in [("all", None), ("one", Some("v1")), ("other", Some("v2"))] {
        filter.apply(sidecar("a", name, revision, &json!(["*/*"])), &mut output);
    }
    assert_eq!(summary(&output), ["+a/all", "+a/one", "+a/other"]);
}

#[test]
fn an_object_counts_for_its_revision_and_the_tags_that_point_to_it() {
    let mut filter = DiscoveryFilter::new(cluster(), "v2".into());
    let mut output = FilterOutput::default();
    for (name, revision) in [
        ("none", None),
        ("own", Some("v2")),
        ("other", Some("v1")),
        ("tag", Some("prod")),
    ] {
        filter.apply(sidecar("a", name, revision, &json!(["*/*"])), &mut output);
    }
    assert_eq!(summary(&output), ["+a/none", "+a/own"]);
    let mut output = FilterOutput::default();
    let tags = Filters {
        tags: ["prod".into()].into(),
        ..Filters::default()
    };
    filter.set_filters(tags, &mut output);
    filter.set_filters(Filters::default(), &mut output);
    assert_eq!(summary(&output), ["+a/tag", "-a/tag"]);
}

#[test]
fn services_and_gateways_count_for_all_revisions() {
    let seen_by = |revision: &'static str| {
        let mut filter = DiscoveryFilter::new(cluster(), revision.into());
        let mut output = FilterOutput::default();
        let listeners = json!([{"name": "l", "port": 80, "protocol": "HTTP"}]);
        for (kind, name, spec) in [
            (Kind::Service, "service", json!({})),
            (
                Kind::KubeGateway,
                "gateway",
                json!({"gatewayClassName": "istio", "listeners": listeners}),
            ),
            (
                Kind::ListenerSet,
                "listeners",
                json!({"parentRef": {"name": "gateway"}, "listeners": listeners}),
            ),
        ] {
            let labels = json!({"istio.io/rev": "v1"});
            let object = json!({"metadata": {"name": name, "namespace": "a", "labels": labels}, "spec": spec});
            filter.apply(item(kind, &object), &mut output);
        }
        summary(&output)
    };
    assert_eq!(seen_by("v1"), ["+a/service", "+a/gateway", "+a/listeners"]);
    assert_eq!(seen_by("v2"), ["+a/service", "+a/gateway"]);
}

#[test]
fn gateways_to_networks_count_in_all_namespaces() {
    let gateway = |labels: &Value| {
        let spec = json!({"gatewayClassName": "istio", "listeners": [{"name": "l", "port": 80, "protocol": "HTTP"}]});
        let object = json!({"metadata": {"name": "g", "namespace": "a", "labels": labels}, "spec": spec});
        item(Kind::KubeGateway, &object)
    };
    let to_network = gateway(&json!({"topology.istio.io/network": "n2"}));
    let mut filter = DiscoveryFilter::new(cluster(), "default".into());
    let mut output = FilterOutput::default();
    let selecting = Filters {
        selectors: teams(&["red"]),
        ..Filters::default()
    };
    filter.set_filters(selecting, &mut output);
    filter.apply(gateway(&json!({})), &mut output);
    assert_eq!(summary(&output), [] as [&str; 0]);
    let mut known = BTreeMap::new();
    let mut kinds = |filter: &DiscoveryFilter, output: &FilterOutput| {
        follow(&mut known, &output.changes);
        let mut all = BTreeMap::new();
        let kinds = [Kind::Namespace, Kind::KubeGateway];
        follow(&mut all, &filter.everything(kinds).changes);
        assert_eq!(known, all);
        known.keys().map(|(kind, _)| *kind).collect::<Vec<_>>()
    };
    filter.apply(to_network.clone(), &mut output);
    assert_eq!(kinds(&filter, &output), [Kind::HiddenGateway]);
    let mut output = FilterOutput::default();
    filter.apply(namespace("a", "red"), &mut output);
    assert_eq!(kinds(&filter, &output), [Kind::Namespace, Kind::KubeGateway]);
    let mut output = FilterOutput::default();
    filter.apply(namespace("a", "blue"), &mut output);
    assert_eq!(kinds(&filter, &output), [Kind::Namespace, Kind::HiddenGateway]);
    let mut output = FilterOutput::default();
    filter.delete(Kind::KubeGateway, &to_network.key, &mut output);
    assert_eq!(kinds(&filter, &output), [Kind::Namespace]);
}

#[test]
fn an_invalid_route_is_passed_on_beside_its_last_valid_form() {
    let route = |kind: Kind, name: &str, expression: &str| {
        let path = json!({"path": {"type": "RegularExpression", "value": expression}});
        let spec = json!({"parentRefs": [{"name": "g"}], "rules": [{"matches": [path]}]});
        item(
            kind,
            &json!({"metadata": {"name": name, "namespace": "a"}, "spec": spec}),
        )
    };
    let mut filter = DiscoveryFilter::new(cluster(), "default".into());
    let mut known = BTreeMap::new();
    let mut names = |filter: &DiscoveryFilter, output: &FilterOutput| {
        follow(&mut known, &output.changes);
        let mut all = BTreeMap::new();
        follow(&mut all, &filter.everything([Kind::HttpRoute, Kind::GrpcRoute]).changes);
        assert_eq!(known, all);
        let names = known.keys().map(|(kind, key)| format!("{} {key}", kind.name()));
        names.collect::<Vec<_>>()
    };
    let mut output = FilterOutput::default();
    filter.apply(route(Kind::HttpRoute, "r", "/a.*"), &mut output);
    filter.apply(route(Kind::HttpRoute, "new", "/a("), &mut output);
    let grpc = json!({"metadata": {"name": "r", "namespace": "a"}, "spec": {"rules": [{"matches": [
        {"headers": [{"type": "RegularExpression", "name": "h", "value": "a("}]}]}]}});
    filter.apply(item(Kind::GrpcRoute, &grpc), &mut output);
    let (valid, new) = ("HTTPRoute a/r", "InvalidRoute a/http-route~new");
    let of_grpc = "InvalidRoute a/grpc-route~r";
    assert_eq!(names(&filter, &output), [valid, of_grpc, new]);
    let mut output = FilterOutput::default();
    filter.apply(route(Kind::HttpRoute, "r", "/a("), &mut output);
    let invalid = "InvalidRoute a/http-route~r";
    assert_eq!(names(&filter, &output), [valid, of_grpc, new, invalid]);
    // Rows of a namespace that is not selected do not count.
    let mut output = FilterOutput::default();
    let selecting = Filters {
        selectors: teams(&["red"]),
        ..Filters::default()
    };
    filter.set_filters(selecting, &mut output);
    assert_eq!(names(&filter, &output), [] as [&str; 0]);
    let mut output = FilterOutput::default();
    filter.set_filters(Filters::default(), &mut output);
    filter.apply(route(Kind::HttpRoute, "r", "/b.*"), &mut output);
    filter.delete(Kind::HttpRoute, &route(Kind::HttpRoute, "new", "").key, &mut output);
    assert_eq!(names(&filter, &output), [valid, of_grpc]);
}

#[test]
fn invalid_objects_keep_their_last_valid_form_and_are_reported() {
    let mut filter = DiscoveryFilter::new(cluster(), "v2".into());
    let mut output = FilterOutput::default();
    assert_eq!(
        filter.apply(sidecar("a", "s", None, &json!(["*/*"])), &mut output),
        ObjectEvent::Added
    );
    assert_eq!(
        filter.apply(sidecar("a", "s", None, &json!(7)), &mut output),
        ObjectEvent::Same
    );
    assert_eq!(summary(&output), ["+a/s"]);
    assert_eq!((output.findings.len(), output.findings[0].2.len()), (1, 1));
    let mut output = FilterOutput::default();
    filter.apply(sidecar("a", "s", Some("v1"), &json!(7)), &mut output);
    assert_eq!(summary(&output), ["-a/s"]);
    assert!(output.findings[0].2.is_empty(), "it is of no concern any more");
    let FilterOutput { changes, findings } = filter.everything([Kind::Sidecar]);
    assert!(matches!(&changes[..], [Change::Replace(_, rows)] if rows.is_empty()) && findings.is_empty());
}

#[derive(Clone, Debug)]
enum Step {
    Apply(WatchedObject),
    Delete(Kind, ObjectKey),
    Replace(Kind, Vec<WatchedObject>),
    Filter(Filters),
}

fn items() -> impl Strategy<Value = WatchedObject> {
    let names = || prop::sample::select(vec!["a", "b"]);
    let team = prop::sample::select(vec!["red", "blue"]);
    let revision = prop::sample::select(vec![None, Some("v1"), Some("v2"), Some("tag")]);
    let hosts = prop::sample::select(vec![json!(["*/*"]), json!(["./*"]), json!(7)]);
    prop_oneof![
        (names(), team).prop_map(|(name, team)| namespace(name, team)),
        (names(), names(), revision, hosts)
            .prop_map(|(namespace, name, revision, hosts)| sidecar(namespace, name, revision, &hosts)),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    let filters = (prop::sample::subsequence(vec!["red", "blue"], 0..=2), any::<bool>());
    let replace = (any::<bool>(), prop::collection::vec(items(), 0..4)).prop_map(|(namespaces, items)| {
        let kind = if namespaces { Kind::Namespace } else { Kind::Sidecar };
        let mut by_key = BTreeMap::new();
        by_key.extend(
            items
                .into_iter()
                .filter(|item| item.kind == kind)
                .map(|item| (item.key.clone(), item)),
        );
        Step::Replace(kind, by_key.into_values().collect())
    });
    prop_oneof![
        6 => items().prop_map(Step::Apply),
        2 => items().prop_map(|item| Step::Delete(item.kind, item.key)),
        1 => replace,
        2 => filters.prop_map(|(names, tagged)| Step::Filter(Filters {
            selectors: teams(&names),
            tags: tagged.then(|| SmolStr::new("tag")).into_iter().collect(),
        })),
    ]
}

proptest! {
    /// Any order of events and filters gives what the final state gives at once.
    #[test]
    fn passed_rows_equal_the_filtered_final_state(steps in prop::collection::vec(steps(), 0..40)) {
        let kinds = [Kind::Namespace, Kind::Sidecar];
        let mut filter = DiscoveryFilter::new(cluster(), "v2".into());
        let (mut have, mut good, mut filters) = (BTreeMap::new(), BTreeMap::new(), Filters::default());
        for step in steps {
            let mut output = FilterOutput::default();
            // The state of a reader of the same events, including last valid forms.
            let mut note = |item: &WatchedObject| {
                let place = (item.kind, item.key.clone());
                let last_valid = || good.get(&place).and_then(|item: &WatchedObject| item.row.clone());
                let row = item.row.clone().or_else(last_valid);
                good.insert(place, WatchedObject { row, ..item.clone() });
            };
            match step {
                Step::Apply(item) => {
                    note(&item);
                    filter.apply(item, &mut output);
                }
                Step::Delete(kind, key) => {
                    good.remove(&(kind, key.clone()));
                    filter.delete(kind, &key, &mut output);
                }
                Step::Replace(kind, items) => {
                    items.iter().for_each(&mut note);
                    good.retain(|(held, key), _| *held != kind || items.iter().any(|item| item.key == *key));
                    filter.replace(kind, None, items, &mut output);
                }
                Step::Filter(new) => {
                    filters = new.clone();
                    filter.set_filters(new, &mut output);
                }
            }
            follow(&mut have, &output.changes);
        }
        let mut fresh = DiscoveryFilter::new(cluster(), "v2".into());
        fresh.set_filters(filters, &mut FilterOutput::default());
        for item in good.into_values().rev() {
            fresh.apply(item, &mut FilterOutput::default());
        }
        let mut want = BTreeMap::new();
        follow(&mut want, &fresh.everything(kinds).changes);
        prop_assert_eq!(&have, &want);
        let mut again = BTreeMap::new();
        follow(&mut again, &filter.everything(kinds).changes);
        prop_assert_eq!(&again, &want);
    }
}
