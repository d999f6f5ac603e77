//! Writes dangling references and exceeded limits of an object into its status (`PILOT_ENABLE_ANALYSIS`), in the form
//! of `istioctl analyze` and Istio's own analysis: `status.validationMessages`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    leader::{Election, Lock},
    store::{Store, WriteError},
};
use crate::{
    api::{Diagnostic, Kind, Severity},
    base::ObjectKey,
    model::snapshot::MeshSnapshot,
    table::Cx,
};

/// Istio's codes of our diagnostics.
const CODES: [(&str, &str); 1] = [("ReferencedResourceNotFound", "IST0101")];
/// Attempts to read and write a status after conflicts.
const ATTEMPTS: u32 = 5;

/// Kind and key of an object.
type ObjectId = (Kind, ObjectKey);

/// Runs analyses while this replica leads, at most once per interval (`PILOT_ANALYSIS_INTERVAL`).
pub async fn run(election: &Election, mesh: watch::Receiver<Arc<MeshSnapshot>>, interval: Duration) {
    election
        .run(Lock::ANALYSIS, |token| {
            analyse(election.client.clone(), mesh.clone(), interval, token)
        })
        .await;
}

async fn analyse(
    client: ::kube::Client,
    mut mesh: watch::Receiver<Arc<MeshSnapshot>>,
    interval: Duration,
    token: CancellationToken,
) {
    let mut published = BTreeMap::<ObjectId, Vec<Value>>::new();
    mesh.mark_changed();
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            changed = mesh.changed() => if changed.is_err() { return },
        }
        let snapshot = mesh.borrow_and_update().clone();
        let found = messages(&findings(&snapshot));
        for id in changes(&published, &found) {
            let messages = found.get(&id).cloned().unwrap_or_default();
            let (kind, key) = &id;
            let store = Store::new(client.clone(), kind.group(), kind.version(), kind.name(), kind.plural());
            match write(&store, key, &messages).await {
                Ok(()) => {}
                Err(error) => {
                    tracing::warn!(kind = kind.name(), object = %key, %error, "failed to write validation messages");
                    // The next analysis retries failed writes.
                    continue;
                }
            }
            if messages.is_empty() {
                published.remove(&id);
            } else {
                published.insert(id, messages);
            }
        }
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
    }
}

fn findings(mesh: &MeshSnapshot) -> BTreeSet<Diagnostic> {
    let cx = Cx::untracked();
    let mut findings = mesh.missing_references(&cx);
    findings.extend(mesh.exceeded_limits(&cx));
    findings
}

/// Returns the messages of each object, in order.
fn messages(findings: &BTreeSet<Diagnostic>) -> BTreeMap<ObjectId, Vec<Value>> {
    let mut messages = BTreeMap::<ObjectId, Vec<Value>>::new();
    for finding in findings {
        let Some(kind) = finding.kind else { continue };
        // Only Istio's own kinds have this status.
        if kind.group().ends_with("istio.io") && kind.is_object() {
            messages
                .entry((kind, finding.key.clone()))
                .or_default()
                .push(message(finding));
        }
    }
    messages
}

fn message(finding: &Diagnostic) -> Value {
    let code = CODES
        .iter()
        .find(|(name, _)| finding.code == *name)
        .map(|(_, code)| *code);
    let level = match finding.severity {
        Severity::Error => "ERROR",
        Severity::Warning => "WARNING",
    };
    let mut kind = json!({"name": finding.code});
    if let Some(code) = code {
        kind["code"] = code.into();
    }
    let mut message = json!({"type": kind, "level": level, "message": finding.message});
    if let Some(code) = code {
        let code = code.to_ascii_lowercase();
        message["documentationUrl"] = format!("https://istio.io/latest/docs/reference/config/analysis/{code}/").into();
    }
    message
}

/// Returns the objects whose messages changed.
fn changes(published: &BTreeMap<ObjectId, Vec<Value>>, found: &BTreeMap<ObjectId, Vec<Value>>) -> BTreeSet<ObjectId> {
    let all: BTreeSet<&ObjectId> = published.keys().chain(found.keys()).collect();
    all.into_iter()
        .filter(|id| published.get(*id) != found.get(*id))
        .cloned()
        .collect()
}

async fn write(store: &Store, key: &ObjectKey, messages: &[Value]) -> Result<(), WriteError> {
    let mut last = WriteError::Conflict("no attempt was made".into());
    for _ in 0..ATTEMPTS {
        let Some(mut found) = store.get(&key.namespace, &key.name).await? else {
            return Ok(());
        };
        if !put(&mut found, messages) {
            return Ok(());
        }
        match store.replace_status(&key.namespace, &key.name, &found).await {
            Ok(_) | Err(WriteError::NotFound(_)) => return Ok(()),
            Err(error @ WriteError::Conflict(_)) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Sets the messages in an object's status; returns false if they are there already.
fn put(object: &mut Value, messages: &[Value]) -> bool {
    let known = object["status"]["validationMessages"].as_array();
    if known.map_or(messages.is_empty(), |known| known == messages) {
        return false;
    }
    let generation = object["metadata"]["generation"].clone();
    object["status"]["validationMessages"] = messages.into();
    if !generation.is_null() {
        object["status"]["observedGeneration"] = generation;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::field::FieldError;

    fn finding(name: &str, message: &str) -> Diagnostic {
        let key = ObjectKey::new(&"Kubernetes".into(), "default", name);
        let finding = FieldError {
            field: "spec".into(),
            message: message.into(),
        };
        Diagnostic::of_object(
            Kind::VirtualService,
            key,
            Severity::Error,
            "ReferencedResourceNotFound",
            finding,
        )
    }

    #[test]
    fn findings_are_reported_once_and_withdrawn() {
        let one = messages(&BTreeSet::from([
            finding("a", "x"),
            finding("a", "y"),
            finding("b", "x"),
        ]));
        let other = messages(&BTreeSet::from([finding("a", "x"), finding("b", "x")]));
        let names = |changes: BTreeSet<ObjectId>| -> Vec<String> {
            changes.into_iter().map(|(_, key)| key.name.to_string()).collect()
        };
        assert_eq!(names(changes(&BTreeMap::new(), &one)), ["a", "b"]);
        assert_eq!(names(changes(&one, &other)), ["a"]);
        assert_eq!(names(changes(&other, &BTreeMap::new())), ["a", "b"]);
    }

    #[test]
    fn messages_have_istios_form() {
        let all = messages(&BTreeSet::from([finding("a", "no service has the host x")]));
        let messages = all.values().next().expect("one object");
        let mut object = json!({"metadata": {"name": "a", "generation": 3}, "status": {"conditions": []}});
        assert!(put(&mut object, messages) && !put(&mut object, messages));
        assert_eq!(
            object["status"],
            json!({
                "conditions": [],
                "observedGeneration": 3,
                "validationMessages": [{
                    "type": {"name": "ReferencedResourceNotFound", "code": "IST0101"},
                    "level": "ERROR",
                    "message": "no service has the host x",
                    "documentationUrl": "https://istio.io/latest/docs/reference/config/analysis/ist0101/",
                }],
            })
        );
        assert!(put(&mut object, &[]));
        assert!(!put(&mut json!({"metadata": {}}), &[]), "nothing to take back");
    }
}
