//! The overlays that templates rendered last, parsed.
//!
//! Pods of one workload render the same text, and parsing YAML is half of an injection: it takes 0.25 ms of CPU time
//! if its overlays are kept, and 0.57 ms otherwise (`admission` in `benches/`).

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use serde_json::{Value as Json, json};

use super::{
    InjectError,
    merge::merge,
    schema::{Form, canonical},
};
use crate::api::yaml;

/// The maximum number of overlays. One takes about 50 KiB.
const MAX_ENTRIES: usize = 128;
/// Larger texts are not kept.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// The overlays that were used last, the latest first.
#[derive(Default)]
pub(super) struct Overlays(Mutex<VecDeque<Arc<Overlay>>>);

/// The parsed output of a template.
pub(super) struct Overlay {
    template: String,
    text: String,
    /// The partial pod.
    value: Json,
    /// The same merged into an empty pod.
    alone: OnceLock<Arc<Json>>,
}

impl Overlays {
    /// Returns the overlay of a template's output.
    pub(super) fn parsed(&self, template: &str, text: &str) -> Result<Arc<Overlay>, InjectError> {
        if let Some(known) = self.known(template, text) {
            return Ok(known);
        }
        let parsed = Arc::new(Overlay {
            template: template.to_owned(),
            text: text.to_owned(),
            value: parsed(template, text)?,
            alone: OnceLock::new(),
        });
        if text.len() <= MAX_TEXT_BYTES {
            let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            entries.push_front(parsed.clone());
            entries.truncate(MAX_ENTRIES);
        }
        Ok(parsed)
    }

    fn known(&self, template: &str, text: &str) -> Option<Arc<Overlay>> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let position = entries
            .iter()
            .position(|entry| entry.text == text && entry.template == template)?;
        let entry = entries.remove(position)?;
        entries.push_front(entry.clone());
        Some(entry)
    }
}

impl Overlay {
    /// Merges the overlay into a pod.
    pub(super) fn merged_into(&self, pod: Json) -> Result<Json, InjectError> {
        let error = |error: &dyn std::fmt::Display| InjectError::overlay(&self.template, error.to_string());
        let merged = merge("Pod", pod, self.value.clone()).map_err(|cause| error(&cause))?;
        canonical("Pod", merged, Form::Sparse).map_err(|cause| error(&cause))
    }

    /// Merges the overlay into an empty pod.
    pub(super) fn alone(&self) -> Result<Arc<Json>, InjectError> {
        if let Some(known) = self.alone.get() {
            return Ok(known.clone());
        }
        let merged = Arc::new(self.merged_into(json!({}))?);
        Ok(self.alone.get_or_init(|| merged).clone())
    }
}

/// Parses the output of a template.
fn parsed(template: &str, text: &str) -> Result<Json, InjectError> {
    let documents = yaml::documents(text);
    let Some(document) = documents.first() else {
        return Ok(json!({}));
    };
    match document.parse() {
        Ok(Json::Null) => Ok(json!({})),
        Ok(value @ Json::Object(_)) => Ok(value),
        Ok(_) => Err(InjectError::overlay(template, "the output must be an object")),
        Err(error) => Err(InjectError::overlay(
            template,
            format!("the output is not YAML: {error}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlays_are_kept_by_template_and_text() {
        let overlays = Overlays::default();
        let get = |template: &str, text: &str| overlays.parsed(template, text).expect("an overlay");
        let first = get("a", "spec: {hostNetwork: true}");
        assert_eq!(first.value, json!({"spec": {"hostNetwork": true}}));
        assert!(Arc::ptr_eq(&first, &get("a", "spec: {hostNetwork: true}")));
        assert!(!Arc::ptr_eq(&first, &get("b", "spec: {hostNetwork: true}")));
        for number in 0..MAX_ENTRIES {
            get("a", &format!("metadata: {{name: n{number}}}"));
        }
        assert!(
            !Arc::ptr_eq(&first, &get("a", "spec: {hostNetwork: true}")),
            "the oldest goes"
        );
        let large = format!("metadata: {{name: {}}}", "x".repeat(MAX_TEXT_BYTES));
        assert!(
            !Arc::ptr_eq(&get("a", &large), &get("a", &large)),
            "large ones are not kept"
        );
        assert!(overlays.parsed("a", "[").is_err() && overlays.parsed("a", "[]").is_err());
        assert_eq!(overlays.0.lock().expect("not poisoned").len(), MAX_ENTRIES);
    }
}
