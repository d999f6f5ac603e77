//! Labelled objects by label.

use std::{collections::BTreeMap, slice};

use smol_str::SmolStr;

use super::{LabelSelector, Labels, Requirement};

/// Labelled objects by label, so that a selector is compared with few of them. There may be thousands of both.
#[derive(Default)]
pub struct LabelIndex<'a> {
    count: usize,
    by_key: BTreeMap<&'a str, LabelledPositions<'a>>,
}

/// The positions of objects with one key, ascending.
#[derive(Default)]
struct LabelledPositions<'a> {
    all: Vec<usize>,
    by_value: BTreeMap<&'a str, Vec<usize>>,
}

impl<'a> LabelIndex<'a> {
    /// Indexes the labels of objects.
    pub fn of(objects: impl Iterator<Item = &'a Labels>) -> Self {
        let mut index = Self::default();
        for (position, labels) in objects.enumerate() {
            index.count += 1;
            for (key, value) in labels {
                let of_key = index.by_key.entry(key.as_str()).or_default();
                of_key.all.push(position);
                of_key.by_value.entry(value.as_str()).or_default().push(position);
            }
        }
        index
    }

    /// Returns the positions of the objects that a selector may match, ascending; `None` if these may be most.
    pub fn candidates(&self, selector: &LabelSelector) -> Option<Vec<usize>> {
        let pairs = selector.match_labels.iter();
        let pairs = pairs.map(|(key, value)| self.with_values(key, slice::from_ref(value)));
        let written = selector.match_expressions.written.iter();
        let required = written.filter_map(|requirement| self.required(requirement));
        let count = |lists: &Vec<&[usize]>| lists.iter().map(|list| list.len()).sum::<usize>();
        let fewest = pairs.chain(required).min_by_key(count)?;
        if count(&fewest) > self.count / 2 {
            return None;
        }
        let mut positions = fewest.concat();
        positions.sort_unstable();
        positions.dedup();
        Some(positions)
    }

    /// Returns the objects with a label that a requirement needs; `None` if it needs none.
    fn required(&self, requirement: &Requirement) -> Option<Vec<&[usize]>> {
        match requirement.operator.as_str() {
            "In" => Some(self.with_values(&requirement.key, &requirement.values)),
            "Exists" => {
                let of_key = self.by_key.get(requirement.key.as_str());
                Some(of_key.into_iter().map(|of_key| of_key.all.as_slice()).collect())
            }
            _ => None,
        }
    }

    fn with_values(&self, key: &str, values: &[SmolStr]) -> Vec<&[usize]> {
        let of_key = self.by_key.get(key);
        let lists = values.iter().filter_map(|value| of_key?.by_value.get(value.as_str()));
        lists.map(Vec::as_slice).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r21_selectors_are_compared_with_few_objects() {
        let label = |key: &str, value: String| (SmolStr::new(key), SmolStr::from(value));
        let labels = |position: usize| -> Labels {
            let own = label("name", format!("n{position}"));
            let shared = label("team", format!("t{}", position % 4));
            let rare = position.is_multiple_of(10).then(|| label("rare", String::new()));
            [own, shared].into_iter().chain(rare).collect()
        };
        let objects: Vec<Labels> = (0..40).map(labels).collect();
        let index = LabelIndex::of(objects.iter());
        let requirement = |key: &str, operator: &str, values: &[&str]| {
            let values = values.iter().map(SmolStr::new).collect();
            Requirement::new(key.into(), operator.into(), values)
        };
        let pair = |key: &str, value: &str| label(key, value.to_owned());
        let cases = [
            (vec![pair("name", "n7"), pair("team", "t3")], vec![], Some(1)),
            (vec![pair("name", "n7"), pair("team", "t2")], vec![], Some(1)),
            (vec![pair("absent", "a")], vec![], Some(0)),
            (vec![], vec![requirement("team", "In", &["t1", "t1"])], Some(10)),
            (vec![], vec![requirement("rare", "Exists", &[])], Some(4)),
            (vec![], vec![requirement("absent", "Exists", &[])], Some(0)),
            (
                vec![pair("team", "t2")],
                vec![requirement("rare", "DoesNotExist", &[])],
                Some(10),
            ),
            (vec![], vec![requirement("name", "Exists", &[])], None),
            (vec![], vec![requirement("team", "NotIn", &["t1"])], None),
            (vec![], vec![], None),
        ];
        for (pairs, requirements, expected) in cases {
            let selector = LabelSelector {
                match_labels: pairs.into_iter().collect(),
                match_expressions: requirements.into(),
            };
            let candidates = index.candidates(&selector);
            assert_eq!(candidates.as_ref().map(Vec::len), expected, "{selector:?}");
            let selected = (0..objects.len()).filter(|position| selector.matches(&objects[*position]));
            let Some(candidates) = candidates else { continue };
            for position in selected {
                assert!(candidates.contains(&position), "{selector:?} {position}");
            }
        }
    }
}
