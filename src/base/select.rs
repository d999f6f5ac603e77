//! Label selection: equality maps (`selector`, `workloadSelector`) and Kubernetes `LabelSelector`s.

use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

use super::Labels;

/// Returns true if `labels` contains every pair of `selector`; an empty selector matches everything.
pub fn matches<'a>(selector: impl IntoIterator<Item = (&'a str, &'a str)>, labels: &Labels) -> bool {
    selector
        .into_iter()
        .all(|(key, value)| labels.get(key).is_some_and(|have| have == value))
}

/// Matches like [`matches`], with a whole label map.
pub fn subset(selector: &Labels, labels: &Labels) -> bool {
    matches(selector.iter().map(|(k, v)| (k.as_str(), v.as_str())), labels)
}

/// A Kubernetes `metav1.LabelSelector`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    /// Pairs that must all be present.
    pub match_labels: Labels,
    /// Requirements that must all hold.
    pub match_expressions: Vec<Requirement>,
}

/// One requirement of a [`LabelSelector`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(default)]
pub struct Requirement {
    /// The label's key.
    pub key: SmolStr,
    /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
    pub operator: SmolStr,
    /// The values for `In` and `NotIn`.
    pub values: Vec<SmolStr>,
}

impl LabelSelector {
    /// Returns true if the labels satisfy the selector. An unknown operator never holds, as in Kubernetes.
    pub fn matches(&self, labels: &Labels) -> bool {
        subset(&self.match_labels, labels) && self.match_expressions.iter().all(|r| r.holds(labels))
    }
}

impl Requirement {
    fn holds(&self, labels: &Labels) -> bool {
        let value = labels.get(&self.key);
        match self.operator.as_str() {
            "In" => value.is_some_and(|v| self.values.contains(v)),
            "NotIn" => value.is_none_or(|v| !self.values.contains(v)),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            _ => false,
        }
    }
}
