//! Verdicts about the objects of Istio's conformance set equal those of Istio's webhook, where the set is next to the
//! project.

use std::collections::BTreeMap;

use istiod::webhook::{
    review::Request,
    validation::{self, Outcome},
};
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::Value;

use crate::support::kubernetes::api::documents;
use crate::support::project;

/// Objects with another verdict than Istio's, as `FILE DOCUMENT`, each with the reason.
const DIFFERENT: [(&str, &str); 1] = [(
    "peerauth-invalid.yaml 3",
    "an empty `portLevelMtls` is the same as none in protobuf; the CRD refuses it",
)];

pub(super) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test(
        "webhook::verdicts::equal_those_of_istios_webhook",
        equal_those_of_istios_webhook,
    )]
}

fn verdict(mut object: Value) -> Outcome {
    if let Some(fields) = object.as_object_mut() {
        // The expected error message of the CRD is not part of the object.
        fields.remove("_err");
    }
    validation::validate(&mut Request {
        operation: "CREATE".to_owned(),
        namespace: "default".to_owned(),
        object,
        ..Request::default()
    })
}

/// Returns the part of a refusal that programs may read.
fn class(message: &str) -> &str {
    message.split_once(':').map_or(message, |(class, _)| class)
}

fn equal_those_of_istios_webhook() -> Result<Completion, Failed> {
    let set = project().join("../shared/conformance/upstream/crd-validation");
    if !set.is_dir() {
        return Ok(Completion::ignored_with(
            "skipped: Istio's conformance set is not next to the project (../shared/conformance)",
        ));
    }
    let read = |name: &str| std::fs::read_to_string(set.join(name)).map_err(|error| format!("{name}: {error}"));
    let verdicts: Vec<Value> =
        serde_json::from_str(&read("webhook-verdicts.json")?).map_err(|error| error.to_string())?;
    assert!(!verdicts.is_empty(), "no verdicts");
    let mut files = BTreeMap::new();
    let (mut equal, mut different) = (0, Vec::new());
    for want in &verdicts {
        let file = want["file"].as_str().unwrap_or_default();
        if !files.contains_key(file) {
            files.insert(file, documents(&read(file)?));
        }
        let position = want["doc"].as_u64().unwrap_or_default();
        let document = &files[file][usize::try_from(position)?];
        let outcome = verdict(document.clone()).verdict;
        let (ours, istios) = (
            outcome.refusal.unwrap_or_default(),
            want["message"].as_str().unwrap_or_default(),
        );
        let warns = !want["warnings"].as_array().is_none_or(Vec::is_empty);
        // The rules of istiod have further warnings.
        let same_warnings = !ours.is_empty() || !warns || !outcome.warnings.is_empty();
        let name = format!("{file} {position}");
        let is_known = DIFFERENT.iter().any(|(known, _)| *known == name);
        if class(&ours) == class(istios) && same_warnings {
            equal += 1;
            if is_known {
                different.push(format!("{name}: is equal now; remove it from the list"));
            }
        } else if !is_known {
            different.push(format!(
                "{name}: {ours:?} {:?}, Istio: {istios:?} {}",
                outcome.warnings, want["warnings"]
            ));
        }
    }
    println!("{equal} of {} verdicts equal Istio's", verdicts.len());
    if different.is_empty() {
        Ok(Completion::Completed)
    } else {
        Err(different.join("\n").into())
    }
}
