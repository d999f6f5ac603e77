//! Custom kinds that the API server serves, with their versions: an input like any other, unknown until reported.
//!
//! Definitions are watched as metadata only, because their schemas are megabytes and unused. The versions are part of
//! the schemas, so the API's discovery is queried for them when a definition appears or changes, and once more after a
//! while: discovery follows the definitions with a delay, which differs between the servers of an API.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use ::kube::{Client, core::ApiResource};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{context::IngestContext, kinds::resource};
use crate::{
    api::Kind,
    base::{ClusterId, SmolStr},
    kube::{
        Object,
        health::WatchHealth,
        watch::{WatchEvent, WatchTarget, watch_as},
    },
    task,
};

/// First retry delay of discovery.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Timeout of a request for the resources of a group version.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest retry delay of discovery.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Time after which an answer about a new or changed definition is confirmed.
const CONFIRM_AFTER: Duration = Duration::from_secs(5);

/// Served kinds with the version to read.
pub type Served = BTreeMap<Kind, ApiResource>;

/// A kind that may be served.
#[derive(Clone, Debug)]
pub struct CustomKind {
    /// Kind.
    pub kind: Kind,
    /// Group.
    pub group: SmolStr,
    /// Supported versions, the preferred one first.
    pub versions: Vec<SmolStr>,
}

impl CustomKind {
    fn definition(&self) -> SmolStr {
        SmolStr::from(format!("{}.{}", self.kind.plural(), self.group))
    }
}

/// State of the definitions of supported kinds.
struct Definitions {
    kinds: BTreeMap<SmolStr, CustomKind>,
    /// Existing definitions.
    present: BTreeSet<SmolStr>,
    /// Definitions whose versions are not known yet.
    unresolved: BTreeSet<SmolStr>,
    /// New and changed definitions, with the time at which their versions are looked up again.
    unconfirmed: BTreeMap<SmolStr, Instant>,
    served: Served,
    listed: bool,
}

/// Watches the definitions until the receiver is closed. `None` means unknown.
pub async fn follow(
    cluster: ClusterId,
    client: Client,
    kinds: Vec<CustomKind>,
    shared: Arc<IngestContext>,
    out: watch::Sender<Option<Served>>,
) {
    let target = WatchTarget {
        metadata_only: true,
        ..WatchTarget::all(resource(
            "CustomResourceDefinition",
            "customresourcedefinitions",
            "apiextensions.k8s.io",
            "v1",
        ))
    };
    let health = WatchHealth::new(&cluster, &target.name(), &shared.watch_metrics);
    let (sender, mut events) = mpsc::channel(64);
    let name = |object: Object| SmolStr::new(object.name());
    let watching = watch_as(client.clone(), target, health.clone(), name, sender);
    shared.environment.tasks.spawn_until_shutdown("watch", watching);
    let mut definitions = Definitions::new(kinds);
    let mut wait = FIRST_WAIT;
    loop {
        let confirm_at = definitions.unconfirmed.values().min().copied();
        let waiting = definitions.listed && !definitions.unresolved.is_empty();
        tokio::select! {
            () = out.closed() => return,
            event = events.recv() => {
                let Some(event) = event else { return };
                if definitions.apply_event(event) {
                    wait = FIRST_WAIT;
                }
                while let Ok(event) = events.try_recv() {
                    definitions.apply_event(event);
                }
            }
            () = sleep(wait), if waiting => {
                if wait < LONGEST_WAIT && wait * 2 >= LONGEST_WAIT {
                    let names: Vec<&str> = definitions.unresolved.iter().map(SmolStr::as_str).collect();
                    tracing::warn!(%cluster, names = names.join(" "), "CustomResourceDefinitions not served in a supported version");
                }
                wait = (wait * 2).min(LONGEST_WAIT);
            }
            () = health.recovered(), if waiting => wait = FIRST_WAIT,
            () = sleep_until(confirm_at.unwrap_or_else(Instant::now)), if confirm_at.is_some() => {
                definitions.look_up_again(Instant::now());
                wait = FIRST_WAIT;
            }
        }
        let known = definitions.resolve(&client).await;
        if definitions.listed && (known || out.borrow().is_some()) {
            task::publish(&out, Some(definitions.served.clone()));
        }
    }
}

impl Definitions {
    fn new(kinds: Vec<CustomKind>) -> Self {
        Self {
            kinds: kinds.into_iter().map(|kind| (kind.definition(), kind)).collect(),
            present: BTreeSet::new(),
            unresolved: BTreeSet::new(),
            unconfirmed: BTreeMap::new(),
            served: Served::new(),
            listed: false,
        }
    }

    /// Applies an event. Returns true if discovery must be queried.
    fn apply_event(&mut self, event: WatchEvent<SmolStr>) -> bool {
        let confirm_at = Instant::now() + CONFIRM_AFTER;
        match event {
            WatchEvent::Restarted(all) => {
                let present: BTreeSet<SmolStr> = all.into_iter().filter(|name| self.kinds.contains_key(name)).collect();
                for gone in self.present.difference(&present).cloned().collect::<Vec<_>>() {
                    self.forget(&gone);
                }
                self.unresolved.clone_from(&present);
                self.unconfirmed = present.iter().map(|name| (name.clone(), confirm_at)).collect();
                self.present = present;
                self.listed = true;
                !self.unresolved.is_empty()
            }
            WatchEvent::Applied(name) if self.kinds.contains_key(&name) => {
                self.present.insert(name.clone());
                self.unconfirmed.insert(name.clone(), confirm_at);
                self.unresolved.insert(name);
                true
            }
            WatchEvent::Applied(_) => false,
            WatchEvent::Deleted(name) => {
                self.forget(&name);
                false
            }
        }
    }

    fn forget(&mut self, name: &SmolStr) {
        self.present.remove(name);
        self.unresolved.remove(name);
        self.unconfirmed.remove(name);
        if let Some(custom_kind) = self.kinds.get(name) {
            self.served.remove(&custom_kind.kind);
        }
    }

    /// Marks the definitions whose versions are to be looked up again now.
    fn look_up_again(&mut self, now: Instant) {
        let due = self.unconfirmed.extract_if(.., |_, at| *at <= now);
        self.unresolved.extend(due.map(|(name, _)| name));
    }

    /// Queries discovery. A definition that is not served yet is queried again later. Returns true if the API answered
    /// completely, so that missing kinds are known not to be served.
    async fn resolve(&mut self, client: &Client) -> bool {
        let mut answers: BTreeMap<SmolStr, BTreeSet<String>> = BTreeMap::new();
        for name in self.unresolved.clone() {
            let Some(custom_kind) = self.kinds.get(&name) else {
                continue;
            };
            let mut found = None;
            for version in &custom_kind.versions {
                let group_version = SmolStr::from(format!("{}/{version}", custom_kind.group));
                if !answers.contains_key(&group_version) {
                    let Some(plurals) = plurals(client, &group_version).await else {
                        return false;
                    };
                    answers.insert(group_version.clone(), plurals);
                }
                if answers[&group_version].contains(custom_kind.kind.plural()) {
                    found = Some(resource(
                        custom_kind.kind.name(),
                        custom_kind.kind.plural(),
                        &custom_kind.group,
                        version,
                    ));
                    break;
                }
            }
            if let Some(resource) = found {
                self.served.insert(custom_kind.kind, resource);
                self.unresolved.remove(&name);
            }
        }
        true
    }
}

/// Returns the resources of a group version; empty if the API server does not know it, `None` without a response.
async fn plurals(client: &Client, group_version: &str) -> Option<BTreeSet<String>> {
    let request = client.list_api_group_resources(group_version);
    let Ok(answer) = timeout(REQUEST_TIMEOUT, request).await else {
        tracing::warn!(
            group_version, timeout = ?REQUEST_TIMEOUT,
            "failed to list API resources in time"
        );
        return None;
    };
    match answer {
        Ok(list) => Some(list.resources.into_iter().map(|resource| resource.name).collect()),
        Err(::kube::Error::Api(status)) if status.code == 404 => Some(BTreeSet::new()),
        Err(error) => {
            tracing::warn!(
                group_version, %error,
                "failed to list API resources"
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use ::kube::client::Body;
    use serde_json::json;

    use super::*;

    fn definitions() -> Definitions {
        let custom_kind = |kind: Kind| CustomKind {
            kind,
            group: kind.group().into(),
            versions: vec!["v1".into()],
        };
        Definitions::new(vec![custom_kind(Kind::Sidecar), custom_kind(Kind::VirtualService)])
    }

    #[test]
    fn definitions_are_added_changed_and_removed() {
        let mut definitions = definitions();
        let sidecars = SmolStr::from("sidecars.networking.istio.io");
        assert!(!definitions.apply_event(WatchEvent::Applied("others.example.com".into())));
        assert!(definitions.apply_event(WatchEvent::Restarted(vec![
            sidecars.clone(),
            "others.example.com".into()
        ])));
        assert_eq!(definitions.unresolved, [sidecars.clone()].into());
        let served = resource("Sidecar", "sidecars", "networking.istio.io", "v1");
        definitions.served.insert(Kind::Sidecar, served.clone());
        definitions.unresolved.clear();
        assert!(
            definitions.apply_event(WatchEvent::Applied(sidecars.clone())),
            "its versions may be others now"
        );
        assert_eq!(
            definitions.served[&Kind::Sidecar],
            served,
            "but it is served while they are looked up"
        );
        definitions.apply_event(WatchEvent::Deleted(sidecars.clone()));
        assert!(definitions.served.is_empty() && definitions.unresolved.is_empty());
        definitions.apply_event(WatchEvent::Restarted(vec![sidecars]));
        definitions.apply_event(WatchEvent::Restarted(vec![]));
        assert!(definitions.present.is_empty() && definitions.unconfirmed.is_empty());
    }

    #[tokio::test]
    async fn an_outdated_answer_of_discovery_is_replaced() {
        let version = Arc::new(Mutex::new("v1alpha3"));
        let answering = version.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let is_served = request.uri().path().ends_with(*answering.lock().unwrap());
            async move {
                let sidecar =
                    json!({"name": "sidecars", "singularName": "", "namespaced": true, "kind": "Sidecar", "verbs": []});
                let resources = if is_served { vec![sidecar] } else { Vec::new() };
                let list = json!({"groupVersion": "g", "resources": resources});
                Ok::<_, std::io::Error>(http::Response::new(Body::from(list.to_string().into_bytes())))
            }
        });
        let client = Client::new(service, "default");
        let mut definitions = Definitions::new(vec![CustomKind {
            kind: Kind::Sidecar,
            group: Kind::Sidecar.group().into(),
            versions: vec!["v1".into(), "v1alpha3".into()],
        }]);
        definitions.apply_event(WatchEvent::Applied("sidecars.networking.istio.io".into()));
        assert!(definitions.resolve(&client).await);
        assert_eq!(definitions.served[&Kind::Sidecar].version, "v1alpha3");
        *version.lock().unwrap() = "v1";
        definitions.look_up_again(Instant::now());
        assert!(definitions.unresolved.is_empty(), "discovery has time to follow");
        definitions.look_up_again(Instant::now() + CONFIRM_AFTER);
        assert!(definitions.resolve(&client).await);
        assert_eq!(definitions.served[&Kind::Sidecar].version, "v1");
        assert!(definitions.unresolved.is_empty() && definitions.unconfirmed.is_empty());
    }
}
