use super::*;
use crate::table::{RelationId, TableWriter, Transaction};

const NOW: &str = "2026-01-01T00:00:00Z";
const BOUND: &str = "istio.io/WaypointBound";

/// A table of rows, and a plan that follows it.
struct Fixture {
    table: TableWriter<StatusTarget, ObjectConditions>,
    plan: Plan,
}

fn target(name: &str) -> StatusTarget {
    target_of(Kind::Service, name)
}

fn target_of(kind: Kind, name: &str) -> StatusTarget {
    StatusTarget {
        kind,
        object: ObjectKey::new(&"c".into(), "n", name),
    }
}

fn condition(message: &str) -> Condition {
    Condition {
        is_true: true,
        reason: "Reason",
        message: message.to_owned(),
        observed_generation: 0,
    }
}

impl Fixture {
    fn new() -> Self {
        Self {
            table: TableWriter::new(RelationId(1)),
            plan: Plan::new("c".into()),
        }
    }

    /// Sets the row of an object: a condition with this text, or none.
    fn row(&mut self, name: &str, message: Option<&str>) {
        self.row_of(target(name), message);
    }

    fn row_of(&mut self, target: StatusTarget, message: Option<&str>) {
        let row = ObjectConditions {
            manager: "manager",
            conditions: vec![(BOUND, message.map(condition))],
        };
        let mut transaction = Transaction::default();
        self.table.put(&mut transaction, target, Shared::new(row));
        self.plan.observe(self.table.table());
    }

    fn applied(&mut self, object: Published) {
        self.plan.apply_event(Kind::Service, WatchEvent::Applied(object));
    }

    /// Returns the names of the objects that are written, with the conditions.
    fn writes(&mut self) -> Vec<(String, Value)> {
        let writes = std::iter::from_fn(|| self.plan.next(NOW));
        let writes = writes.map(|write| {
            let conditions = write.fields["status"]["conditions"].clone();
            (write.target.object.name.to_string(), conditions)
        });
        writes.collect()
    }
}

/// Returns an object with this resource version and these conditions.
fn object(name: &str, version: u64, conditions: &Value) -> Published {
    object_of(Kind::Service, name, version, conditions)
}

fn object_of(kind: Kind, name: &str, version: u64, conditions: &Value) -> Published {
    let value = json!({
        "metadata": { "namespace": "n", "name": name, "uid": name, "resourceVersion": version.to_string() },
        "status": { "conditions": conditions },
    });
    Published::of(kind, &Object::from_value(value).expect("an object"))
}

fn rendered(message: &str) -> Value {
    json!([{ "type": BOUND, "status": "True", "reason": "Reason", "message": message, "lastTransitionTime": NOW }])
}

#[test]
fn a_change_is_written_once() {
    let mut fixture = Fixture::new();
    fixture.row("a", Some("one"));
    assert_eq!(fixture.writes(), [], "the object is unknown");
    fixture.applied(object("a", 1, &json!(null)));
    assert_eq!(fixture.writes(), [("a".to_owned(), rendered("one"))]);
    fixture.plan.written(&target("a"), object("a", 2, &rendered("one")));
    // An older version and the written one arrive; a table without a change is observed again.
    fixture.applied(object("a", 1, &json!(null)));
    fixture.applied(object("a", 2, &rendered("one")));
    fixture.row("a", Some("one"));
    assert_eq!(fixture.writes(), []);
    // The result of the write counts before its event arrives.
    fixture.row("a", Some("two"));
    assert_eq!(fixture.writes(), [("a".to_owned(), rendered("two"))]);
    fixture.plan.written(&target("a"), object("a", 3, &rendered("two")));
    fixture.row("a", Some("one"));
    assert_eq!(fixture.writes(), [("a".to_owned(), rendered("one"))]);
}

#[test]
fn equal_conditions_are_not_written() {
    let mut fixture = Fixture::new();
    let all = vec![
        object("a", 1, &rendered("one")),
        object("b", 1, &json!([])),
        object("c", 1, &rendered("old")),
        object("d", 1, &rendered("gone")),
    ];
    fixture.plan.apply_event(Kind::Service, WatchEvent::Restarted(all));
    fixture.row("a", Some("one"));
    fixture.row("b", None);
    fixture.row("c", Some("new"));
    fixture.row("d", None);
    assert_eq!(
        fixture.writes(),
        [("c".to_owned(), rendered("new")), ("d".to_owned(), json!([]))]
    );
    assert!(!fixture.plan.is_due());
}

#[test]
fn the_time_of_a_transition_changes_with_the_status() {
    let mut fixture = Fixture::new();
    let old = "2020-01-01T00:00:00Z";
    let with = |status: &str| json!([{ "type": BOUND, "status": status, "reason": "Reason", "message": "old", "lastTransitionTime": old }]);
    fixture.applied(object("a", 1, &with("True")));
    fixture.applied(object("b", 1, &with("False")));
    fixture.row("a", Some("new"));
    fixture.row("b", Some("new"));
    let times: Vec<Value> = fixture
        .writes()
        .iter()
        .map(|(_, conditions)| conditions[0]["lastTransitionTime"].clone())
        .collect();
    assert_eq!(times, [json!(old), json!(NOW)]);
}

#[test]
fn statuses_of_others_are_no_reason_to_write() {
    let mut fixture = Fixture::new();
    fixture.applied(object("a", 1, &rendered("one")));
    fixture.row("a", Some("one"));
    assert_eq!(fixture.writes(), []);
    fixture.applied(object("a", 2, &rendered("of another")));
    assert_eq!(fixture.writes(), []);
}

#[test]
fn conditions_of_a_restored_server_are_compared() {
    let mut fixture = Fixture::new();
    let mut writes_after = |version: u64, message: &str| {
        let all = vec![object("a", version, &rendered(message))];
        fixture.plan.apply_event(Kind::Service, WatchEvent::Restarted(all));
        fixture.row("a", Some("one"));
        fixture.writes()
    };
    assert_eq!(writes_after(7, "one"), []);
    assert_eq!(writes_after(8, "of another"), []);
    assert_eq!(writes_after(5, "old"), [("a".to_owned(), rendered("one"))]);
}

#[test]
fn an_object_that_was_created_again_is_written() {
    let mut fixture = Fixture::new();
    fixture.applied(object("a", 1, &rendered("one")));
    fixture.row("a", Some("one"));
    assert_eq!(fixture.writes(), []);
    let mut again = object("a", 5, &json!(null));
    again.uid = "another".into();
    fixture
        .plan
        .apply_event(Kind::Service, WatchEvent::Restarted(vec![again]));
    assert_eq!(fixture.writes(), [("a".to_owned(), rendered("one"))]);
    fixture.plan.written(&target("a"), object("a", 6, &rendered("one")));
    fixture
        .plan
        .apply_event(Kind::Service, WatchEvent::Deleted(object("a", 7, &rendered("one"))));
    fixture.applied(object("a", 8, &json!(null)));
    assert_eq!(fixture.writes(), [("a".to_owned(), rendered("one"))]);
}

#[test]
fn the_result_of_a_write_does_not_bring_back_a_deleted_object() {
    let mut fixture = Fixture::new();
    fixture.applied(object("a", 1, &json!(null)));
    fixture.row("a", Some("one"));
    assert_eq!(fixture.writes(), [("a".to_owned(), rendered("one"))]);
    fixture
        .plan
        .apply_event(Kind::Service, WatchEvent::Deleted(object("a", 3, &rendered("one"))));
    fixture.plan.written(&target("a"), object("a", 2, &rendered("one")));
    fixture.row("a", Some("two"));
    assert_eq!(fixture.writes(), [], "the object does not exist");
}

#[test]
fn conditions_of_others_stay_in_a_list_that_is_replaced() {
    let mut fixture = Fixture::new();
    let kind = Kind::WorkloadEntry;
    let target = target_of(kind, "a");
    let health = |status: &str| json!({ "type": "Healthy", "status": status });
    let entry = |version: u64, conditions: &Value| WatchEvent::Applied(object_of(kind, "a", version, conditions));
    fixture.row_of(target.clone(), Some("one"));
    fixture.plan.apply_event(kind, entry(1, &json!([health("True")])));
    let write = fixture.plan.next(NOW).expect("a write");
    assert_eq!(write.fields["metadata"]["resourceVersion"], "1");
    let all = json!([health("True"), rendered("one")[0]]);
    assert_eq!(write.fields["status"]["conditions"], all);
    // The health has changed in the meantime, which the watch has not reported yet.
    fixture.plan.conflicted(&target);
    fixture.plan.apply_event(kind, entry(1, &json!([health("True")])));
    assert_eq!(fixture.plan.next(NOW), None);
    fixture.plan.apply_event(kind, entry(2, &json!([health("False")])));
    let write = fixture.plan.next(NOW).expect("a write");
    assert_eq!(write.fields["metadata"]["resourceVersion"], "2");
    let all = json!([health("False"), rendered("one")[0]]);
    assert_eq!(write.fields["status"]["conditions"], all);
    fixture.plan.written(&target, object_of(kind, "a", 3, &all));
    fixture.plan.apply_event(kind, entry(4, &all));
    assert_eq!(fixture.plan.next(NOW), None);
}

#[test]
fn conditions_of_others_stay_without_a_write_in_a_list_with_keys() {
    let mut fixture = Fixture::new();
    fixture.row("a", Some("one"));
    fixture.applied(object("a", 1, &json!([{ "type": "Other", "status": "True" }])));
    let write = fixture.plan.next(NOW).expect("a write");
    assert_eq!(write.fields["metadata"], json!({ "name": "a" }));
    assert_eq!(write.fields["status"]["conditions"], rendered("one"));
}

#[test]
fn failed_writes_are_tried_a_few_times() {
    let mut fixture = Fixture::new();
    fixture.applied(object("a", 1, &json!(null)));
    fixture.row("a", Some("one"));
    for attempt in 1..=ATTEMPTS {
        assert_eq!(fixture.writes().len(), 1, "attempt {attempt}");
        fixture.plan.failed(&target("a"));
        assert_eq!(fixture.writes(), [], "not at once");
        assert_eq!(fixture.plan.failed_attempts(), (attempt < ATTEMPTS).then_some(attempt));
        fixture.plan.retry();
    }
    assert_eq!(fixture.writes(), []);
    fixture.row("a", Some("two"));
    assert_eq!(fixture.writes().len(), 1, "a change starts over");
}

#[test]
fn writes_wait_for_the_end_of_an_outage() {
    let mut fixture = Fixture::new();
    fixture.applied(object("a", 1, &json!(null)));
    fixture.row("a", Some("one"));
    for attempt in 1..=2 * ATTEMPTS {
        assert_eq!(fixture.writes().len(), 1, "attempt {attempt}");
        fixture.plan.unanswered(&target("a"));
        assert_eq!(fixture.plan.failed_attempts(), Some(attempt.min(ATTEMPTS)));
        fixture.plan.retry();
    }
}

#[test]
fn generations_that_istio_wrote_as_text_are_read() {
    let mut written = rendered("one");
    written[0]["observedGeneration"] = json!("4");
    let present = &object("a", 1, &written).conditions[0];
    assert!(present.equals(&Condition {
        observed_generation: 4,
        ..condition("one")
    }));
    assert!(!present.equals(&condition("one")));
}
