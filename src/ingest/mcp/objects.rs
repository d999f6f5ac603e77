//! The objects of one server, as rows. Without I/O.
//!
//! A server answers each requested type, which is a version of a kind, with all its objects at first and then with
//! those that changed (incremental) or all of them (state of the world). Servers serve different versions, so all are
//! requested, and an object exists while any version has it.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use prost::Message;
use prost_reflect::DynamicMessage;
use serde_json::{Map, Value, json};
use smol_str::SmolStr;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    api::{
        Diagnostic, FieldError, Kind, Row, Severity,
        diagnostics::INVALID,
        document::{self, ParsedDocument},
        label::REVISION,
    },
    base::{ClusterId, ObjectKey},
    ingest::defect,
    model::change::{Change, SourceId},
    proto::{
        Any,
        istio::mcp::v1alpha1::{Metadata, Resource},
        json::dynamic_to_json,
        message_descriptor,
    },
};

/// The largest number of changed rows that are sent individually.
const FEW_ROWS: usize = 16;

/// Returns the types to request: all versions of Istio's kinds, those of a kind together and the preferred one first.
pub(super) fn requested_types() -> impl Iterator<Item = (Kind, String)> {
    let kinds = Kind::ALL.iter().copied().filter(|kind| kind.is_istio());
    kinds.flat_map(|kind| {
        let versions = kind.versions().iter();
        versions.map(move |version| (kind, format!("{}/{version}/{}", kind.group(), kind.name())))
    })
}

/// One response of a server, for a requested type.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    /// The type.
    pub(super) type_url: String,
    /// The objects, as packed [`Resource`]s.
    pub(super) resources: Vec<Any>,
    /// The names of removed objects.
    pub(super) removed: Vec<String>,
    /// True if all objects of the type are in the response, and others do not exist.
    pub(super) is_complete: bool,
}

/// The effect of a response.
#[derive(Debug, Default)]
pub(super) struct Effect {
    /// The changes of the kind.
    pub(super) changes: Vec<Change>,
    /// The unusable resources, without a name. Nothing is removed by a response that has some.
    pub(super) unusable: Vec<String>,
    /// The number of objects that were refused. Their last valid form stays.
    pub(super) refused: usize,
}

/// The objects of one server.
pub(super) struct Objects {
    cluster: ClusterId,
    revision: SmolStr,
    kinds: BTreeMap<Kind, KindObjects>,
    /// True if the received bytes are kept, for the state on disk.
    keeps_bytes: bool,
    diagnostics: BTreeMap<(Kind, SmolStr), BTreeSet<Diagnostic>>,
}

/// The objects of one kind.
#[derive(Default)]
struct KindObjects {
    /// The names of each version.
    versions: BTreeMap<String, BTreeSet<SmolStr>>,
    rows: BTreeMap<SmolStr, Row>,
    received: BTreeMap<SmolStr, Bytes>,
}

/// An object that was received.
struct Received {
    name: SmolStr,
    resource: Resource,
    bytes: Bytes,
}

impl Objects {
    /// Returns no objects. Objects of other revisions are ignored.
    pub(super) fn new(cluster: ClusterId, revision: SmolStr, keeps_bytes: bool) -> Self {
        Self {
            cluster,
            revision,
            kinds: BTreeMap::new(),
            keeps_bytes,
            diagnostics: BTreeMap::new(),
        }
    }

    /// Returns the number of objects.
    pub(super) fn len(&self) -> usize {
        self.kinds.values().map(|objects| objects.rows.len()).sum()
    }

    /// Returns the present diagnostics.
    pub(super) fn diagnostics(&self) -> BTreeSet<Diagnostic> {
        self.diagnostics.values().flatten().cloned().collect()
    }

    /// Applies a response.
    pub(super) fn apply(&mut self, kind: Kind, answer: Answer) -> Effect {
        let mut effect = Effect::default();
        let mut received: Vec<Received> = Vec::new();
        for any in answer.resources {
            match unpack(any) {
                Ok(object) => received.push(object),
                Err(problem) => effect.unusable.push(problem),
            }
        }
        let objects = self.kinds.entry(kind).or_default();
        let mut present = objects.versions.remove(&answer.type_url).unwrap_or_default();
        let names: BTreeSet<SmolStr> = received.iter().map(|object| object.name.clone()).collect();
        let mut gone: Vec<SmolStr> = answer.removed.iter().map(SmolStr::new).collect();
        if answer.is_complete && effect.unusable.is_empty() {
            gone.extend(present.iter().cloned());
        }
        gone.retain(|name| !names.contains(name));
        let (mut upserts, mut removed) = (Vec::new(), Vec::new());
        for object in received {
            let name = object.name.clone();
            if is_of_other_revision(&object.resource, &self.revision) {
                gone.push(name);
                continue;
            }
            present.insert(name.clone());
            let parsed = parse(&self.cluster, kind, &object);
            let found: BTreeSet<Diagnostic> = parsed.diagnostics.into_iter().collect();
            if found.is_empty() {
                self.diagnostics.remove(&(kind, name.clone()));
            } else {
                self.diagnostics.insert((kind, name.clone()), found);
            }
            match parsed.row {
                None => effect.refused += 1,
                Some(row) => {
                    if self.keeps_bytes {
                        objects.received.insert(name.clone(), object.bytes);
                    }
                    if objects.rows.get(&name) != Some(&row) {
                        objects.rows.insert(name, row.clone());
                        upserts.push(row);
                    }
                }
            }
        }
        for name in gone {
            present.remove(&name);
            if objects.versions.values().any(|names| names.contains(&name)) {
                continue;
            }
            objects.received.remove(&name);
            self.diagnostics.remove(&(kind, name.clone()));
            if let Some(row) = objects.rows.remove(&name) {
                removed.push(row.key().clone());
            }
        }
        objects.versions.insert(answer.type_url, present);
        let source = SourceId {
            cluster: self.cluster.clone(),
            kind,
        };
        effect.changes = changes(source, &objects.rows, upserts, removed);
        effect
    }

    /// Returns the objects as complete responses of the preferred versions.
    pub(super) fn answers(&self) -> Vec<(Kind, Answer)> {
        let mut answers = Vec::new();
        for (kind, objects) in &self.kinds {
            let resources = objects.received.values().map(|value| Any {
                type_url: resource_url(),
                value: value.clone(),
            });
            let answer = Answer {
                type_url: format!("{}/{}/{}", kind.group(), kind.version(), kind.name()),
                resources: resources.collect(),
                removed: Vec::new(),
                is_complete: true,
            };
            answers.push((*kind, answer));
        }
        answers
    }

    /// Prepares for a new stream: each version may have all objects until it is answered, so an object is removed when
    /// all versions are answered without it.
    pub(super) fn begin_stream(&mut self) {
        for (kind, type_url) in requested_types() {
            let objects = self.kinds.entry(kind).or_default();
            let reported = self.diagnostics.keys().filter(|(reported, _)| *reported == kind);
            let all = objects.rows.keys().chain(reported.map(|(_, name)| name));
            let all = all.cloned().collect();
            objects.versions.insert(type_url, all);
        }
    }
}

/// Returns the changes of a kind: single rows if few have changed, and otherwise all rows.
fn changes(source: SourceId, rows: &BTreeMap<SmolStr, Row>, upserts: Vec<Row>, removed: Vec<ObjectKey>) -> Vec<Change> {
    if upserts.len() + removed.len() > FEW_ROWS {
        return vec![Change::Replace(source, rows.values().cloned().collect())];
    }
    let upserts = upserts.into_iter().map(Change::Upsert);
    let removed = removed.into_iter().map(|key| Change::Remove(source.kind, key));
    upserts.chain(removed).collect()
}

/// Returns the type URL of a packed object.
pub(super) fn resource_url() -> String {
    <Resource as prost::Name>::type_url()
}

/// Decodes an object. The error describes it without its content.
fn unpack(any: Any) -> Result<Received, String> {
    if any.type_url != resource_url() {
        return Err(format!("unknown type {:?}", shortened(&any.type_url)));
    }
    let resource = Resource::decode(any.value.clone()).map_err(|error| error.to_string())?;
    let name = resource.metadata.as_ref().map_or("", |metadata| &metadata.name);
    let is_valid = name
        .split_once('/')
        .is_some_and(|(_, name)| !name.is_empty() && !name.contains('/'));
    if !is_valid {
        return Err(format!("name {:?} is not of the form namespace/name", shortened(name)));
    }
    Ok(Received {
        name: SmolStr::new(name),
        // A copy, since the bytes are a slice of the whole response.
        bytes: Bytes::copy_from_slice(&any.value),
        resource,
    })
}

fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}

/// Parity (pkg/adsc/adsc.go): an object with another revision is ignored, one without a revision is not.
fn is_of_other_revision(resource: &Resource, own: &str) -> bool {
    let labels = resource.metadata.as_ref().map(|metadata| &metadata.labels);
    let revision = labels.and_then(|labels| labels.get(REVISION)).map(String::as_str);
    let normal = |revision: &str| {
        if revision.is_empty() {
            "default".to_owned()
        } else {
            revision.to_owned()
        }
    };
    revision.is_some_and(|revision| normal(revision) != normal(own))
}

/// A parsed object.
struct Parsed {
    /// The row; `None` if the object does not apply.
    row: Option<Row>,
    diagnostics: Vec<Diagnostic>,
}

fn parse(cluster: &ClusterId, kind: Kind, object: &Received) -> Parsed {
    let metadata = object.resource.metadata.clone().unwrap_or_default();
    let (namespace, name) = object.name.split_once('/').unwrap_or_default();
    let key = ObjectKey::new(cluster, namespace, name);
    let parsed = defect::parsed(kind, &key, || match spec(kind, object.resource.body.as_ref()) {
        Ok(spec) => {
            let manifest = json!({ "metadata": manifest_metadata(&metadata, namespace, name), "spec": spec });
            document::parse_object(cluster, kind, &manifest)
        }
        Err(message) => {
            let found = FieldError {
                field: "spec".to_owned(),
                message,
            };
            ParsedDocument {
                diagnostics: vec![Diagnostic::of_object(
                    kind,
                    key.clone(),
                    Severity::Error,
                    INVALID,
                    found,
                )],
                ..ParsedDocument::default()
            }
        }
    });
    Parsed {
        row: parsed.rows.into_iter().next(),
        diagnostics: parsed.diagnostics,
    }
}

/// Returns the body of an object as JSON.
fn spec(kind: Kind, body: Option<&Any>) -> Result<Value, String> {
    let Some(body) = body else {
        return Ok(Value::Object(Map::new()));
    };
    let name = body.type_url.rsplit('/').next().unwrap_or_default();
    let is_of_kind = name.starts_with("istio.") && name.rsplit('.').next() == Some(kind.name());
    let descriptor = message_descriptor(name).filter(|_| is_of_kind);
    let descriptor = descriptor.ok_or_else(|| format!("has the body of a {:?}", shortened(&body.type_url)))?;
    let message = DynamicMessage::decode(descriptor, body.value.clone()).map_err(|error| error.to_string())?;
    Ok(dynamic_to_json(&message))
}

fn manifest_metadata(metadata: &Metadata, namespace: &str, name: &str) -> Value {
    let created = metadata.create_time.as_ref();
    let created = created.and_then(|time| {
        OffsetDateTime::from_unix_timestamp(time.seconds)
            .ok()?
            .format(&Rfc3339)
            .ok()
    });
    let mut manifest = json!({
        "name": name,
        "namespace": namespace,
        "labels": metadata.labels,
        "annotations": metadata.annotations,
    });
    if let Some(created) = created {
        manifest["creationTimestamp"] = created.into();
    }
    if !metadata.version.is_empty() {
        manifest["resourceVersion"] = metadata.version.clone().into();
    }
    manifest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{ingest::fixture::commit, proto::istio::networking::v1alpha3 as networking};

    const V1: &str = "networking.istio.io/v1/ServiceEntry";
    const BETA: &str = "networking.istio.io/v1beta1/ServiceEntry";

    fn objects() -> Objects {
        Objects::new("Kubernetes".into(), SmolStr::default(), true)
    }

    fn entry(host: &str) -> networking::ServiceEntry {
        networking::ServiceEntry {
            hosts: vec![host.to_owned()],
            ports: vec![networking::ServicePort {
                number: 80,
                name: "http".to_owned(),
                protocol: "HTTP".to_owned(),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    fn packed(name: &str, labels: &[(&str, &str)], spec: &networking::ServiceEntry) -> Any {
        let pairs = labels.iter();
        Any::pack(&Resource {
            metadata: Some(Metadata {
                name: name.to_owned(),
                labels: pairs.map(|(key, value)| ((*key).into(), (*value).into())).collect(),
                ..Default::default()
            }),
            body: Some(Any::pack(spec)),
        })
    }

    fn complete(type_url: &str, resources: Vec<Any>) -> Answer {
        Answer {
            type_url: type_url.to_owned(),
            resources,
            removed: Vec::new(),
            is_complete: true,
        }
    }

    fn summary(effect: &Effect) -> Vec<String> {
        let text = |change: &Change| match change {
            Change::Upsert(row) => format!("+{}", row.key().name),
            Change::Remove(_, key) => format!("-{}", key.name),
            other => format!("{other:?}"),
        };
        effect.changes.iter().map(text).collect()
    }

    #[test]
    fn an_object_exists_while_any_version_has_it() {
        let mut objects = objects();
        objects.begin_stream();
        let kind = Kind::ServiceEntry;
        let both = vec![
            packed("shop/a", &[], &entry("a.com")),
            packed("shop/b", &[], &entry("b.com")),
        ];
        assert_eq!(summary(&objects.apply(kind, complete(V1, both.clone()))), ["+a", "+b"]);
        assert!(objects.apply(kind, complete(BETA, Vec::new())).changes.is_empty());
        // A new stream, to a server that has other versions.
        objects.begin_stream();
        assert!(objects.apply(kind, complete(V1, Vec::new())).changes.is_empty());
        assert!(
            objects
                .apply(kind, complete(BETA, both[..1].to_vec()))
                .changes
                .is_empty()
        );
        let last = objects.apply(kind, complete("networking.istio.io/v1alpha3/ServiceEntry", Vec::new()));
        assert_eq!(summary(&last), ["-b"]);
        assert_eq!(objects.len(), 1);
    }

    #[test]
    fn changes_are_applied_alone() {
        let mut objects = objects();
        let kind = Kind::ServiceEntry;
        objects.apply(kind, complete(V1, vec![packed("shop/a", &[], &entry("a.com"))]));
        let answer = Answer {
            type_url: V1.to_owned(),
            resources: vec![packed("shop/b", &[], &entry("b.com"))],
            removed: vec!["shop/a".to_owned(), "shop/unknown".to_owned()],
            is_complete: false,
        };
        assert_eq!(summary(&objects.apply(kind, answer)), ["+b", "-a"]);
    }

    #[test]
    fn unusable_resources_remove_nothing() {
        let mut objects = objects();
        let kind = Kind::ServiceEntry;
        objects.apply(kind, complete(V1, vec![packed("shop/a", &[], &entry("a.com"))]));
        let garbage = [
            Any {
                type_url: resource_url(),
                value: Bytes::from_static(b"\xff\xff\xff"),
            },
            Any {
                type_url: "type.googleapis.com/x".to_owned(),
                value: Bytes::new(),
            },
            packed("no-namespace", &[], &entry("c.com")),
        ];
        for any in garbage {
            let effect = objects.apply(kind, complete(V1, vec![any]));
            assert_eq!((effect.unusable.len(), effect.changes.len()), (1, 0));
        }
        assert_eq!(objects.len(), 1);
    }

    #[test]
    fn an_invalid_object_keeps_its_last_form() {
        let mut objects = objects();
        let kind = Kind::ServiceEntry;
        objects.apply(kind, complete(V1, vec![packed("shop/a", &[], &entry("a.com"))]));
        let effect = objects.apply(
            kind,
            complete(V1, vec![packed("shop/a", &[], &networking::ServiceEntry::default())]),
        );
        assert_eq!((effect.refused, effect.changes.len()), (1, 0));
        assert_eq!((objects.len(), objects.diagnostics().is_empty()), (1, false));
        let mut other = packed("shop/a", &[], &entry("a.com"));
        let mut resource: Resource = other.unpack().unwrap().unwrap();
        resource.body = Some(Any::pack(&networking::Gateway::default()));
        other = Any::pack(&resource);
        assert_eq!(
            objects.apply(kind, complete(V1, vec![other])).refused,
            1,
            "a body of another kind"
        );
        objects.apply(kind, complete(V1, vec![packed("shop/a", &[], &entry("a.com"))]));
        assert!(objects.diagnostics().is_empty());
    }

    #[test]
    fn an_object_that_was_never_valid_is_forgotten_with_its_removal_between_streams() {
        let mut objects = objects();
        let kind = Kind::ServiceEntry;
        objects.begin_stream();
        let invalid = packed("shop/a", &[], &networking::ServiceEntry::default());
        objects.apply(kind, complete(V1, vec![invalid]));
        assert!(!objects.diagnostics().is_empty());
        objects.begin_stream();
        for (_, type_url) in requested_types().filter(|(of, _)| *of == kind) {
            objects.apply(kind, complete(&type_url, Vec::new()));
        }
        assert!(objects.diagnostics().is_empty());
    }

    #[test]
    fn objects_of_other_revisions_are_absent() {
        let mut objects = objects();
        let kind = Kind::ServiceEntry;
        let with = |revision: &str| packed("shop/a", &[("istio.io/rev", revision)], &entry("a.com"));
        assert_eq!(
            summary(&objects.apply(kind, complete(V1, vec![with("default")]))),
            ["+a"]
        );
        assert_eq!(
            summary(&objects.apply(kind, complete(V1, vec![with("canary")]))),
            ["-a"]
        );
    }

    #[test]
    fn stored_answers_restore_the_objects() {
        let mut objects = objects();
        objects.apply(
            Kind::ServiceEntry,
            complete(BETA, vec![packed("shop/a", &[], &entry("a.com"))]),
        );
        let mut restored = self::objects();
        for (kind, answer) in objects.answers() {
            assert_eq!(summary(&restored.apply(kind, answer)), ["+a"]);
        }
        assert_eq!(restored.len(), 1);
    }

    proptest! {
        /// Each step changes some objects and is sent as a whole or as a difference. Some steps begin a new stream.
        #[test]
        fn any_series_of_responses_ends_as_its_last_state(
            steps in proptest::collection::vec(
                (proptest::collection::btree_map(0..40_u8, proptest::option::of(0..4_u8), 0..25), 0..4_u8),
                1..8,
            ),
        ) {
            let kind = Kind::ServiceEntry;
            let named = |name: u8| format!("shop/e{name}");
            let resource = |name: u8, host: u8| packed(&named(name), &[], &entry(&format!("h{host}.com")));
            let (mut incremental, mut model) = (objects(), BTreeMap::new());
            let mut last: BTreeMap<u8, u8> = BTreeMap::new();
            for (changes, form) in steps {
                for (name, host) in &changes {
                    match host {
                        Some(host) => last.insert(*name, *host),
                        None => last.remove(name),
                    };
                }
                let whole = || complete(V1, last.iter().map(|(name, host)| resource(*name, *host)).collect());
                let answer = match form {
                    0 => whole(),
                    1 => {
                        incremental.begin_stream();
                        for (_, type_url) in requested_types().filter(|(of, url)| *of == kind && url != V1) {
                            let empty = incremental.apply(kind, complete(&type_url, Vec::new()));
                            commit(&mut model, empty.changes);
                        }
                        whole()
                    }
                    _ => Answer {
                        type_url: V1.to_owned(),
                        resources: changes
                            .iter()
                            .filter_map(|(name, host)| Some(resource(*name, (*host)?)))
                            .collect(),
                        removed: changes
                            .iter()
                            .filter(|(_, host)| host.is_none())
                            .map(|(name, _)| named(*name))
                            .collect(),
                        is_complete: false,
                    },
                };
                commit(&mut model, incremental.apply(kind, answer).changes);
            }
            let (mut scratch, mut expected) = (objects(), BTreeMap::new());
            let all = last.iter().rev().map(|(name, host)| resource(*name, *host)).collect();
            commit(&mut expected, scratch.apply(kind, complete(V1, all)).changes);
            prop_assert_eq!(model, expected);
        }
    }
}
