//! Reconciles declared remote clusters with running ones: what to start, replace and stop.
//!
//! Pure. The result depends on the present declarations and running clusters, never on the order of events. If several
//! Secrets name one cluster, the oldest valid one counts. Note: an invalid kubeconfig stops nothing. If there is no
//! valid one, the cluster keeps its last one while the same Secret or file names it.

use std::{collections::BTreeMap, fmt, sync::Arc};

use bytes::Bytes;
use smol_str::SmolStr;

use crate::{
    base::{ClusterId, ObjectKey},
    kube::kubeconfig::CheckedKubeconfig,
};

/// One Secret, or one file of a folder.
#[derive(Clone, Debug, Default)]
pub(super) struct Origin {
    /// `metadata.creationTimestamp`; empty for files.
    pub(super) created: SmolStr,
    /// Clusters that it names.
    pub(super) claims: BTreeMap<ClusterId, Claim>,
    /// Problem of the whole origin.
    pub(super) problem: Option<String>,
}

/// Declaration of one cluster. Its content is never printed.
#[derive(Clone)]
pub(super) struct Claim {
    /// Text of the kubeconfig. Equal texts are equivalent.
    pub(super) content: Bytes,
    /// Kubeconfig, or the reason why it is refused.
    pub(super) reading: Result<Arc<CheckedKubeconfig>, String>,
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Claim").field(&self.reading).finish()
    }
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        let contents = |origin: &Self| {
            let claims = origin.claims.iter();
            claims
                .map(|(cluster, claim)| (cluster.clone(), claim.content.clone()))
                .collect::<Vec<_>>()
        };
        self.created == other.created && self.problem == other.problem && contents(self) == contents(other)
    }
}

/// Action for a cluster.
#[derive(Clone, Debug)]
pub(super) enum Action {
    /// It is new.
    Start(Arc<CheckedKubeconfig>),
    /// Its kubeconfig changed: the previous source stays until the new one is complete.
    Replace(Arc<CheckedKubeconfig>),
    /// Only its origin changed.
    Adopt,
    /// No origin names it any more.
    Stop,
}

/// Reason why a declaration does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    /// Code of the diagnostic.
    pub(super) code: &'static str,
    /// Message for people.
    pub(super) message: String,
}

impl Problem {
    fn bad_kubeconfig(message: &str) -> Self {
        Self {
            code: "BadKubeconfig",
            message: message.to_owned(),
        }
    }
}

/// Subject of a problem: an origin and, unless it concerns the whole, the cluster.
pub(super) type ProblemAt = (ObjectKey, Option<ClusterId>);

/// Event of an origin, as in `remote_cluster_secret_events_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Add,
    Update,
    Delete,
}

#[derive(Clone, PartialEq)]
struct RequestedCluster {
    origin: ObjectKey,
    content: Bytes,
}

/// See the module's documentation.
pub(super) struct Reconciler {
    /// Config cluster, which no Secret may name.
    own: ClusterId,
    origins: BTreeMap<ObjectKey, Origin>,
    /// Last requested clusters.
    requested: BTreeMap<ClusterId, RequestedCluster>,
}

impl Reconciler {
    pub(super) fn new(own: ClusterId) -> Self {
        Self {
            own,
            origins: BTreeMap::new(),
            requested: BTreeMap::new(),
        }
    }

    /// Returns the origin of a cluster.
    #[cfg(test)]
    pub(super) fn running(&self) -> BTreeMap<ClusterId, (ObjectKey, Bytes)> {
        let requested = self.requested.iter();
        requested
            .map(|(cluster, requested)| (cluster.clone(), (requested.origin.clone(), requested.content.clone())))
            .collect()
    }

    /// Sets an origin. Returns `None` if it is unchanged.
    pub(super) fn put(&mut self, key: ObjectKey, origin: Origin) -> Option<Event> {
        match self.origins.get(&key) {
            Some(known) if *known == origin => None,
            Some(_) => {
                self.origins.insert(key, origin);
                Some(Event::Update)
            }
            None => {
                self.origins.insert(key, origin);
                Some(Event::Add)
            }
        }
    }

    /// Removes an origin. Returns `None` if it did not exist.
    pub(super) fn remove(&mut self, key: &ObjectKey) -> Option<Event> {
        self.origins.remove(key).map(|_| Event::Delete)
    }

    /// Sets all origins.
    pub(super) fn replace(&mut self, origins: BTreeMap<ObjectKey, Origin>) -> Vec<Event> {
        let gone: Vec<_> = self
            .origins
            .keys()
            .filter(|key| !origins.contains_key(*key))
            .cloned()
            .collect();
        let mut events: Vec<_> = gone.iter().filter_map(|key| self.remove(key)).collect();
        events.extend(origins.into_iter().filter_map(|(key, origin)| self.put(key, origin)));
        events
    }

    /// Returns the actions, one per cluster, and all active problems.
    pub(super) fn reconcile(&mut self) -> (BTreeMap<ClusterId, (ObjectKey, Action)>, BTreeMap<ProblemAt, Problem>) {
        let mut problems = BTreeMap::new();
        let owners = self.owners(&mut problems);
        let mut actions = BTreeMap::new();
        let mut requested = BTreeMap::new();
        for (cluster, (key, claim)) in owners {
            let running = self.requested.get(&cluster);
            let now = RequestedCluster {
                origin: key.clone(),
                content: claim.content.clone(),
            };
            match (&claim.reading, running) {
                (Ok(_), Some(running)) if *running == now => {}
                (Ok(_), Some(running)) if running.content == now.content => {
                    actions.insert(cluster.clone(), (key, Action::Adopt));
                }
                (Ok(kubeconfig), running) => {
                    let kubeconfig = kubeconfig.clone();
                    let action = if running.is_some() {
                        Action::Replace(kubeconfig)
                    } else {
                        Action::Start(kubeconfig)
                    };
                    actions.insert(cluster.clone(), (key, action));
                }
                (Err(message), running) => {
                    problems.insert((key.clone(), Some(cluster.clone())), Problem::bad_kubeconfig(message));
                    if let Some(running) = running.filter(|running| running.origin == key) {
                        requested.insert(cluster, running.clone());
                    }
                    continue;
                }
            }
            requested.insert(cluster, now);
        }
        for (cluster, running) in &self.requested {
            if !requested.contains_key(cluster) {
                actions.insert(cluster.clone(), (running.origin.clone(), Action::Stop));
            }
        }
        self.requested = requested;
        (actions, problems)
    }

    /// Returns the origin of each cluster: the oldest with a valid kubeconfig, and among equal ages the first by name.
    /// Without a valid one, it is the origin of the running cluster, or else the oldest.
    fn owners(&self, problems: &mut BTreeMap<ProblemAt, Problem>) -> BTreeMap<ClusterId, (ObjectKey, Claim)> {
        let mut ordered: Vec<_> = self.origins.iter().collect();
        ordered.sort_by(|(left_key, left), (right_key, right)| {
            (&left.created, left_key).cmp(&(&right.created, right_key))
        });
        let mut owners: BTreeMap<ClusterId, (ObjectKey, Claim)> = BTreeMap::new();
        for (key, origin) in ordered {
            if let Some(message) = &origin.problem {
                problems.insert((key.clone(), None), Problem::bad_kubeconfig(message));
            }
            for (cluster, claim) in &origin.claims {
                if *cluster == self.own {
                    continue;
                }
                let mut other = (key.clone(), claim.clone());
                let Some(owner) = owners.get_mut(cluster) else {
                    owners.insert(cluster.clone(), other);
                    continue;
                };
                let is_running = || {
                    self.requested
                        .get(cluster)
                        .is_some_and(|running| running.origin == *key)
                };
                if owner.1.reading.is_err() && (claim.reading.is_ok() || is_running()) {
                    std::mem::swap(owner, &mut other);
                }
                let (key, claim) = other;
                let problem = match &claim.reading {
                    Err(message) => Problem::bad_kubeconfig(message),
                    Ok(_) => Problem {
                        code: "DuplicateCluster",
                        message: format!("the cluster {cluster} is named by {} already, which counts", owner.0),
                    },
                };
                problems.insert((key, Some(cluster.clone())), problem);
            }
        }
        owners
    }
}
