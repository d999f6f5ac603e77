//! Conditions.

use serde_json::{Map, Value, json};

use crate::model::gateway_api::Mistake;

/// Longest message that the API's schemas allow, in bytes.
const MAX_MESSAGE: usize = 32_768;

/// Status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// `True`.
    True,
    /// `False`.
    False,
    /// `Unknown`.
    Unknown,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// A condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// `type`.
    pub kind: &'static str,
    /// `status`.
    pub verdict: Verdict,
    /// `reason`.
    pub reason: &'static str,
    /// `message`.
    pub message: String,
}

impl Condition {
    /// Returns a condition that is met.
    pub fn met(kind: &'static str, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind,
            verdict: Verdict::True,
            reason,
            message: message.into(),
        }
    }

    /// Returns a condition that is not met.
    pub fn unmet(kind: &'static str, mistake: Mistake) -> Self {
        Self {
            kind,
            verdict: Verdict::False,
            reason: mistake.reason,
            message: mistake.message,
        }
    }

    /// Returns the condition, or the mistake because of which it is not met.
    pub fn unless(self, mistake: Option<Mistake>) -> Self {
        match mistake {
            Some(mistake) => Self::unmet(self.kind, mistake),
            None => self,
        }
    }
}

/// Returns conditions as an object has them: `own`, and those of other types that exist, in the existing order. New
/// ones follow by type. The time of a transition stays while the status is the same.
pub(super) fn merged(own: &[Condition], existing: &Value, generation: i64, now: &str) -> Vec<Value> {
    let existing = existing.as_array().map_or(&[][..], Vec::as_slice);
    let mut left: Vec<&Condition> = own.iter().collect();
    left.sort_by_key(|condition| condition.kind);
    let mut merged = Vec::with_capacity(existing.len() + left.len());
    for condition in existing {
        match left.iter().position(|own| condition["type"] == own.kind) {
            Some(position) => merged.push(to_json(left.remove(position), condition, generation, now)),
            None => merged.push(condition.clone()),
        }
    }
    let new = left.into_iter().map(|own| to_json(own, &Value::Null, generation, now));
    merged.extend(new);
    merged
}

/// Returns only the own conditions, with the times of existing ones.
pub(super) fn applied(own: &[Condition], existing: &Value, generation: i64, now: &str) -> Vec<Value> {
    let mut all = merged(own, existing, generation, now);
    all.retain(|condition| own.iter().any(|own| condition["type"] == own.kind));
    all
}

fn to_json(condition: &Condition, existing: &Value, generation: i64, now: &str) -> Value {
    let mut fields = Map::new();
    let status = condition.verdict.name();
    let since = existing["lastTransitionTime"].as_str();
    let since = since.filter(|_| existing["status"] == status).unwrap_or(now);
    let end = condition.message.floor_char_boundary(MAX_MESSAGE);
    fields.insert("type".to_owned(), condition.kind.into());
    fields.insert("status".to_owned(), status.into());
    fields.insert("reason".to_owned(), condition.reason.into());
    fields.insert("message".to_owned(), condition.message[..end].into());
    fields.insert("lastTransitionTime".to_owned(), since.into());
    if generation != 0 {
        fields.insert("observedGeneration".to_owned(), json!(generation));
    }
    Value::Object(fields)
}
