//! Decides which namespaces need their ConfigMap written: watch events in, names of namespaces out.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use crate::{
    base::{Labels, select::LabelSelector},
    status::watching::WatchedNamespaces,
};

/// Excluded namespaces. `kube-system` is not, because ztunnel may run there.
const EXCLUDED: [&str; 3] = ["kube-public", "kube-node-lease", "local-path-storage"];

/// Content of a ConfigMap, hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// Hash of the text; 0 for none.
    pub hash: u64,
    /// True if it has the required label.
    pub labelled: bool,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Active namespaces with their labels.
    namespaces: BTreeMap<SmolStr, Labels>,
    contents: BTreeMap<SmolStr, Content>,
    /// Discovery selectors. `None` while they are unknown: then no namespace is written, because it may belong to
    /// another control plane.
    selectors: Option<Vec<LabelSelector>>,
    /// Namespace of the control plane, which is always selected.
    own: SmolStr,
    /// The namespaces to write into.
    only: WatchedNamespaces,
    /// Hash of the distributed text; 0 if there is none. `None` while it is unknown: then nothing is written.
    text_hash: Option<u64>,
}

impl Plan {
    /// Returns an empty plan.
    pub fn new(own: SmolStr, only: WatchedNamespaces) -> Self {
        Self {
            own,
            only,
            ..Self::default()
        }
    }

    /// Sets the hash of the distributed text; returns true on a change.
    pub fn want(&mut self, text_hash: Option<u64>) -> bool {
        std::mem::replace(&mut self.text_hash, text_hash) != text_hash
    }

    /// Sets the discovery selectors; returns true on a change.
    pub fn select(&mut self, selectors: Vec<LabelSelector>) -> bool {
        let selectors = Some(selectors);
        let news = self.selectors != selectors;
        self.selectors = selectors;
        news
    }

    /// Adds a namespace with its labels, or removes one that is gone or terminating.
    pub fn namespace(&mut self, name: SmolStr, labels: Option<Labels>) {
        match labels {
            Some(labels) => self.namespaces.insert(name, labels),
            None => self.namespaces.remove(&name),
        };
    }

    /// Sets all namespaces.
    pub fn namespaces(&mut self, all: impl IntoIterator<Item = (SmolStr, Labels)>) {
        self.namespaces = all.into_iter().collect();
    }

    /// Sets the ConfigMap of a namespace, if there is one.
    pub fn content(&mut self, namespace: SmolStr, content: Option<Content>) {
        match content {
            Some(content) => self.contents.insert(namespace, content),
            None => self.contents.remove(&namespace),
        };
    }

    /// Sets all ConfigMaps.
    pub fn contents(&mut self, all: impl IntoIterator<Item = (SmolStr, Content)>) {
        self.contents = all.into_iter().collect();
    }

    /// Returns true if the ConfigMap of this namespace must be written.
    pub fn needs(&self, namespace: &SmolStr) -> bool {
        let Some(hash) = self.text_hash else { return false };
        let present = self.contents.get(namespace);
        let is_right = match hash {
            // A ConfigMap with a text is emptied, and none is created.
            0 => present.is_none_or(|present| present.hash == 0),
            hash => present == Some(&Content { hash, labelled: true }),
        };
        self.serves(namespace) && !is_right
    }

    /// Returns all namespaces whose ConfigMap must be written.
    pub fn pending(&self) -> BTreeSet<SmolStr> {
        self.namespaces
            .keys()
            .filter(|name| self.needs(name))
            .cloned()
            .collect()
    }

    fn serves(&self, namespace: &SmolStr) -> bool {
        let Some(labels) = self.namespaces.get(namespace) else {
            return false;
        };
        let excluded = EXCLUDED.contains(&namespace.as_str());
        let watched = self.only.contains(namespace);
        let Some(selectors) = &self.selectors else {
            return false;
        };
        let selected =
            selectors.is_empty() || *namespace == self.own || selectors.iter().any(|selector| selector.matches(labels));
        !excluded && watched && selected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(plan: &Plan) -> Vec<String> {
        plan.pending().iter().map(ToString::to_string).collect()
    }

    fn plan() -> Plan {
        let mut plan = Plan::new("istio-system".into(), WatchedNamespaces::default());
        plan.namespaces(
            ["a", "istio-system", "kube-public", "kube-system"].map(|name| (name.into(), Labels::default())),
        );
        plan.select(Vec::new());
        plan
    }

    #[test]
    fn nothing_is_written_before_ownership_is_known() {
        let mut plan = Plan::new("istio-system".into(), WatchedNamespaces::default());
        plan.namespaces([("a".into(), Labels::default())]);
        plan.want(Some(7));
        assert!(plan.pending().is_empty());
        assert!(plan.select(Vec::new()));
        assert_eq!(names(&plan), ["a"]);
    }

    #[test]
    fn nothing_is_written_before_a_root_exists() {
        let mut plan = plan();
        assert!(plan.pending().is_empty());
        assert!(plan.want(Some(7)) && !plan.want(Some(7)));
        assert_eq!(names(&plan), ["a", "istio-system", "kube-system"]);
    }

    #[test]
    fn correct_config_maps_are_not_rewritten() {
        let mut plan = plan();
        plan.want(Some(7));
        let right = Content {
            hash: 7,
            labelled: true,
        };
        plan.contents([
            ("a".into(), right),
            ("istio-system".into(), Content { hash: 6, ..right }),
            (
                "kube-system".into(),
                Content {
                    labelled: false,
                    ..right
                },
            ),
        ]);
        assert_eq!(names(&plan), ["istio-system", "kube-system"]);
        plan.want(Some(6));
        assert_eq!(names(&plan), ["a", "kube-system"]);
        plan.content("istio-system".into(), None);
        assert!(plan.needs(&"istio-system".into()), "it was deleted");
        plan.namespace("istio-system".into(), None);
        assert!(!plan.needs(&"istio-system".into()), "and its namespace with it");
    }

    #[test]
    fn config_maps_of_an_earlier_text_are_emptied() {
        let mut plan = plan();
        let written = Content {
            hash: 7,
            labelled: true,
        };
        let empty = Content {
            hash: 0,
            labelled: false,
        };
        plan.contents([("a".into(), written), ("kube-system".into(), empty)]);
        plan.want(Some(0));
        assert_eq!(names(&plan), ["a"]);
        plan.content("a".into(), Some(Content { hash: 0, ..written }));
        assert!(plan.pending().is_empty());
        plan.want(Some(7));
        assert_eq!(names(&plan), ["a", "istio-system", "kube-system"]);
    }

    #[test]
    fn selectors_choose_namespaces() {
        let mut plan = plan();
        plan.want(Some(7));
        let team = Labels::from_iter([("team".into(), "x".into())]);
        plan.namespace("b".into(), Some(team.clone()));
        let selector = LabelSelector {
            match_labels: team,
            ..LabelSelector::default()
        };
        assert!(plan.select(vec![selector.clone()]) && !plan.select(vec![selector]));
        assert_eq!(names(&plan), ["b", "istio-system"]);
        plan.only = WatchedNamespaces::new(["a".into()].into());
        assert!(names(&plan).is_empty());
        plan.select(Vec::new());
        plan.only = WatchedNamespaces::new(["a", "b", "gone"].map(SmolStr::new).into());
        assert_eq!(names(&plan), ["a", "b"]);
    }
}
