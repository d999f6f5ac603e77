//! Label selection: equality maps (`selector`, `workloadSelector`) and Kubernetes `LabelSelector`s.

mod index;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use smol_str::SmolStr;

pub use self::index::LabelIndex;
use super::Labels;

/// The maximum length of a label value, and of the name part of a label key.
const MAX_NAME: usize = 63;
/// The maximum length of the part of a label key before the slash.
const MAX_SUBDOMAIN: usize = 253;
/// The number of pairs, requirements or values of a selector up to which they are looked up one by one.
const FEW_PAIRS: usize = 16;

/// Returns true if `labels` contains every pair of `selector`; an empty selector matches everything.
pub fn matches<'a>(selector: impl IntoIterator<Item = (&'a str, &'a str)>, labels: &Labels) -> bool {
    selector
        .into_iter()
        .all(|(key, value)| labels.get(key).is_some_and(|have| have == value))
}

/// Matches like [`matches`], with a whole label map. Both maps are sorted, so a long selector is compared with the
/// labels side by side, unless there are many more labels: either may have a hundred thousand pairs.
pub fn subset(selector: &Labels, labels: &Labels) -> bool {
    if selector.len() <= FEW_PAIRS || FEW_PAIRS * selector.len() <= labels.len() {
        return matches(selector.iter().map(|(k, v)| (k.as_str(), v.as_str())), labels);
    }
    let mut rest = labels.iter();
    selector.len() <= labels.len()
        && selector.iter().all(|(key, value)| {
            let next = rest.find(|(other, _)| *other >= key);
            next.is_some_and(|found| found == (key, value))
        })
}

/// A Kubernetes `metav1.LabelSelector`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    /// Pairs that must all be present.
    pub match_labels: Labels,
    /// Requirements that must all hold.
    pub match_expressions: Requirements,
}

/// The requirements of a [`LabelSelector`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(from = "Vec<Requirement>", into = "Vec<Requirement>")]
pub struct Requirements {
    written: Vec<Requirement>,
    /// The same by key, if there are many. An object has room for ten thousand, and a namespace has few labels: these
    /// are then looked up among the requirements, not each requirement among the labels.
    by_key: BTreeMap<SmolStr, OfKey>,
    /// The number of keys in `by_key` that must exist.
    required: usize,
    /// True if Kubernetes accepts all of them.
    is_valid: bool,
}

/// The requirements for one key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct OfKey {
    must_exist: bool,
    must_be_missing: bool,
    /// The values that all requirements with `In` have in common; `None` without any.
    allowed: Option<BTreeSet<SmolStr>>,
    denied: BTreeSet<SmolStr>,
}

/// One requirement of a [`LabelSelector`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(from = "WrittenRequirement")]
pub struct Requirement {
    key: SmolStr,
    operator: SmolStr,
    values: Vec<SmolStr>,
    /// The values in order, if there are many. An object has room for a hundred thousand, which must not be looked
    /// through for each namespace.
    #[serde(skip_serializing)]
    sorted: Vec<SmolStr>,
    #[serde(skip_serializing)]
    is_valid: bool,
}

/// A requirement as it is written.
#[derive(Default, Deserialize)]
#[serde(default)]
struct WrittenRequirement {
    key: SmolStr,
    operator: SmolStr,
    values: Vec<SmolStr>,
}

impl From<WrittenRequirement> for Requirement {
    fn from(written: WrittenRequirement) -> Self {
        Self::new(written.key, written.operator, written.values)
    }
}

impl LabelSelector {
    /// Returns true if the labels satisfy the selector. One that Kubernetes calls invalid selects nothing.
    pub fn matches(&self, labels: &Labels) -> bool {
        subset(&self.match_labels, labels) && self.match_expressions.hold(labels)
    }

    /// Returns true if Kubernetes accepts all pairs and requirements.
    pub fn is_valid(&self) -> bool {
        let is_pair = |(key, value): (&SmolStr, &SmolStr)| is_key(key) && is_value(value);
        self.match_labels.iter().all(is_pair) && self.match_expressions.is_valid
    }
}

impl Requirements {
    /// Returns true if there is none.
    pub fn is_empty(&self) -> bool {
        self.written.is_empty()
    }

    fn hold(&self, labels: &Labels) -> bool {
        if self.by_key.is_empty() || labels.len() > self.written.len() {
            return self.written.iter().all(|requirement| requirement.holds(labels));
        }
        let mut found = 0;
        for (key, value) in labels {
            let Some(of_key) = self.by_key.get(key) else {
                continue;
            };
            if !of_key.accepts(value) {
                return false;
            }
            found += usize::from(of_key.must_exist);
        }
        self.is_valid && found == self.required
    }
}

impl Default for Requirements {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl From<Vec<Requirement>> for Requirements {
    fn from(written: Vec<Requirement>) -> Self {
        let mut by_key: BTreeMap<SmolStr, OfKey> = BTreeMap::new();
        if written.len() > FEW_PAIRS {
            for requirement in &written {
                by_key.entry(requirement.key.clone()).or_default().add(requirement);
            }
        }
        Self {
            required: by_key.values().filter(|of_key| of_key.must_exist).count(),
            by_key,
            is_valid: written.iter().all(|requirement| requirement.is_valid),
            written,
        }
    }
}

impl From<Requirements> for Vec<Requirement> {
    fn from(requirements: Requirements) -> Self {
        requirements.written
    }
}

impl FromIterator<Requirement> for Requirements {
    fn from_iter<I: IntoIterator<Item = Requirement>>(requirements: I) -> Self {
        Vec::from_iter(requirements).into()
    }
}

impl OfKey {
    fn add(&mut self, requirement: &Requirement) {
        let values = requirement.values.iter().cloned();
        match requirement.operator.as_str() {
            "In" => {
                let values: BTreeSet<SmolStr> = values.collect();
                match &mut self.allowed {
                    Some(allowed) => allowed.retain(|value| values.contains(value)),
                    None => self.allowed = Some(values),
                }
                self.must_exist = true;
            }
            "NotIn" => self.denied.extend(values),
            "Exists" => self.must_exist = true,
            "DoesNotExist" => self.must_be_missing = true,
            _ => {}
        }
    }

    fn accepts(&self, value: &SmolStr) -> bool {
        let is_allowed = self.allowed.as_ref().is_none_or(|allowed| allowed.contains(value));
        is_allowed && !self.must_be_missing && !self.denied.contains(value)
    }
}

impl Requirement {
    /// Returns a requirement. The operator is `In`, `NotIn`, `Exists` or `DoesNotExist`; the first two need values.
    pub fn new(key: SmolStr, operator: SmolStr, values: Vec<SmolStr>) -> Self {
        let mut sorted = Vec::new();
        if values.len() > FEW_PAIRS {
            sorted.clone_from(&values);
            sorted.sort_unstable();
        }
        Self {
            is_valid: is_requirement(&key, &operator, &values),
            key,
            operator,
            values,
            sorted,
        }
    }

    fn holds(&self, labels: &Labels) -> bool {
        if !self.is_valid {
            return false;
        }
        let value = labels.get(&self.key);
        match self.operator.as_str() {
            "In" => value.is_some_and(|value| self.has_value(value)),
            "NotIn" => value.is_none_or(|value| !self.has_value(value)),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            _ => false,
        }
    }

    fn has_value(&self, value: &SmolStr) -> bool {
        if self.sorted.is_empty() {
            self.values.contains(value)
        } else {
            self.sorted.binary_search(value).is_ok()
        }
    }
}

/// Returns true if Kubernetes accepts a requirement.
///
/// Parity (k8s.io/apimachinery/pkg/labels/selector.go, `NewRequirement`).
fn is_requirement(key: &str, operator: &str, values: &[SmolStr]) -> bool {
    let fits_operator = match operator {
        "In" | "NotIn" => !values.is_empty(),
        "Exists" | "DoesNotExist" => values.is_empty(),
        _ => false,
    };
    fits_operator && is_key(key) && values.iter().all(|value| is_value(value))
}

/// Returns true for the key of a label: a name, and a DNS subdomain before it if it has a slash.
fn is_key(text: &str) -> bool {
    match text.split_once('/') {
        None => is_name(text),
        Some((prefix, name)) => is_subdomain(prefix) && is_name(name),
    }
}

/// Returns true for the value of a label.
fn is_value(text: &str) -> bool {
    text.is_empty() || is_name(text)
}

fn is_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    text.len() <= MAX_NAME && is_enclosed(text, |byte| byte.is_ascii_alphanumeric()) && text.bytes().all(is_inner)
}

fn is_subdomain(text: &str) -> bool {
    let is_edge = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_part = |part: &str| is_enclosed(part, is_edge) && part.bytes().all(|byte| is_edge(byte) || byte == b'-');
    text.len() <= MAX_SUBDOMAIN && text.split('.').all(is_part)
}

/// Returns true if a text begins and ends with such bytes.
fn is_enclosed(text: &str, is_edge: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    let edges = [bytes.first(), bytes.last()];
    edges.into_iter().all(|byte| byte.is_some_and(|byte| is_edge(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selects(key: &str, operator: &str, values: &[&str]) -> bool {
        let selector = LabelSelector {
            match_labels: Labels::new(),
            match_expressions: vec![Requirement::new(
                key.into(),
                operator.into(),
                values.iter().map(SmolStr::new).collect(),
            )]
            .into(),
        };
        let mut labels = Labels::new();
        labels.insert("team".into(), "a".into());
        selector.matches(&labels)
    }

    #[test]
    fn r21_long_selectors_select_as_short_ones() {
        let of = |numbers: &[usize], value: &str| -> Labels {
            let pair = |number: &usize| (SmolStr::from(format!("k{number:03}")), SmolStr::new(value));
            numbers.iter().map(pair).collect()
        };
        let all: Vec<usize> = (0..100).collect();
        let even: Vec<usize> = (0..50).map(|number| 2 * number).collect();
        let last = [&even[..], &[99]].concat();
        // Many more than those of some selectors.
        let many: Vec<usize> = (0..1000).filter(|number| number % 20 != 19).collect();
        for selector in [&all, &even, &last, &Vec::new()] {
            for labels in [&all, &even, &last, &many] {
                for value in ["v", "other"] {
                    let (selector, labels) = (of(selector, "v"), of(labels, value));
                    let pairs = selector.iter().map(|(key, value)| (key.as_str(), value.as_str()));
                    assert_eq!(
                        subset(&selector, &labels),
                        matches(pairs, &labels),
                        "{selector:?} {labels:?}"
                    );
                }
            }
        }
        assert!(subset(&of(&even, "v"), &of(&all, "v")) && !subset(&of(&last, "v"), &of(&even, "v")));
    }

    #[test]
    fn r21_many_values_select_as_few() {
        let mut values: Vec<String> = (0..100).rev().map(|number| format!("v{number}")).collect();
        let selects_a = |operator: &str, values: &[String]| {
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            selects("team", operator, &values)
        };
        assert!(!selects_a("In", &values) && selects_a("NotIn", &values));
        values.push("a".to_owned());
        assert!(selects_a("In", &values) && !selects_a("NotIn", &values));
        values.push("not valid".to_owned());
        assert!(!selects_a("In", &values) && !selects_a("NotIn", &values));
        let written = serde_json::json!({"key": "team", "operator": "In", "values": ["b", "a"]});
        let requirement: Requirement = serde_json::from_value(written.clone()).expect("a requirement");
        assert_eq!(serde_json::to_value(requirement).expect("its fields"), written);
    }

    #[test]
    fn r21_many_requirements_select_as_few() {
        let requirement = |(key, operator, values): &(&str, &str, &[&str])| {
            let values = values.iter().map(SmolStr::new).collect();
            Requirement::new((*key).into(), (*operator).into(), values)
        };
        let other = |number: usize| {
            let key = format!("other{number}");
            requirement(&(key.as_str(), "DoesNotExist", &[]))
        };
        let others: Vec<Requirement> = (0..40).map(other).collect();
        let labels = |pairs: &[(&str, &str)]| -> Labels {
            let pairs = pairs.iter();
            pairs.map(|(key, value)| ((*key).into(), (*value).into())).collect()
        };
        let labelled = [
            labels(&[]),
            labels(&[("team", "a")]),
            labels(&[("team", "b"), ("zone", "z")]),
            labels(&[("other7", "x"), ("team", "a")]),
        ];
        let cases: [&[(&str, &str, &[&str])]; 8] = [
            &[],
            &[("team", "In", &["a", "b"])],
            &[("team", "In", &["a", "b"]), ("team", "In", &["b"])],
            &[("team", "In", &["a"]), ("team", "NotIn", &["a"])],
            &[("team", "NotIn", &["b"]), ("zone", "DoesNotExist", &[])],
            &[("team", "Exists", &[]), ("zone", "Exists", &[])],
            &[("team", "Exists", &[]), ("team", "DoesNotExist", &[])],
            &[("team", "Never", &[])],
        ];
        let mut selected = 0;
        for case in cases {
            let many: Requirements = others.iter().cloned().chain(case.iter().map(requirement)).collect();
            assert!(!many.by_key.is_empty());
            for labels in &labelled {
                let expected = many.written.iter().all(|requirement| requirement.holds(labels));
                assert_eq!(many.hold(labels), expected, "{labels:?}");
                selected += usize::from(expected);
            }
        }
        assert_eq!(selected, 9);
        let selector = LabelSelector {
            match_expressions: others.into(),
            ..LabelSelector::default()
        };
        assert!(selector.is_valid() && LabelSelector::default().is_valid());
        let written = serde_json::to_value(&selector).expect("its fields");
        assert_eq!(written["matchExpressions"].as_array().map(Vec::len), Some(40));
        let read: LabelSelector = serde_json::from_value(written).expect("a selector");
        assert_eq!(read, selector);
    }

    #[test]
    fn invalid_pairs_make_a_selector_invalid() {
        let is_valid = |key: &str, value: &str| {
            let selector = LabelSelector {
                match_labels: [(SmolStr::new(key), SmolStr::new(value))].into_iter().collect(),
                ..LabelSelector::default()
            };
            selector.is_valid()
        };
        assert!(is_valid("example.com/team", "a_1") && is_valid("team", ""));
        assert!(!is_valid("team", "a b") && !is_valid("a b", "c") && !is_valid("", "c"));
    }

    #[test]
    fn invalid_requirements_select_nothing() {
        assert!(selects("team", "In", &["a", ""]));
        assert!(selects("team", "NotIn", &["b"]));
        assert!(selects("team", "Exists", &[]));
        assert!(selects("example.com/Other_1", "DoesNotExist", &[]));
        let long = "a".repeat(MAX_NAME + 1);
        let invalid: [(&str, &str, &[&str]); 14] = [
            ("other", "NotIn", &[]),
            ("team", "In", &[]),
            ("team", "Exists", &["a"]),
            ("other", "DoesNotExist", &["a"]),
            ("other", "Never", &[]),
            ("", "DoesNotExist", &[]),
            ("an other", "DoesNotExist", &[]),
            ("Example.com/other", "DoesNotExist", &[]),
            ("/other", "DoesNotExist", &[]),
            ("a/b/other", "DoesNotExist", &[]),
            ("team", "In", &["a", "a b"]),
            ("team", "NotIn", &["-"]),
            (long.as_str(), "DoesNotExist", &[]),
            ("team", "NotIn", &[long.as_str()]),
        ];
        for (key, operator, values) in invalid {
            assert!(!selects(key, operator, values), "{key} {operator} {values:?}");
        }
    }
}
