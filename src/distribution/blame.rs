//! Blame: the objects that cause a refused resource.
//!
//! Candidates are the objects that changed last, then the EnvoyFilters and the other configuration of the proxy's
//! namespace and the root namespace. A candidate is blamed if the resource would be different without it. The one
//! without which the proxy would have what it holds comes first.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;

use super::{Distribution, refused::RefusedObject, report::ObjectName};
use crate::{
    api::Kind,
    base::{ObjectKey, Version},
    environment,
    generate::ResourceType,
    model::{MeshSnapshot, policy::root_namespace},
    push::push_loop::PushHandle,
    table::Cx,
    xds::{
        registry::{LiveConnection, RefusedResource},
        share::quarantine::Refusal,
    },
};

/// The number of refused resources whose objects are remembered.
const REMEMBERED: usize = 1024;
/// The number of candidates that are tried.
const MAX_CANDIDATES: usize = 128;
/// The number of objects that are blamed for one resource.
const MAX_BLAMED: usize = 8;
/// Between two searches, nothing is searched for this many times the duration of the last one: clients decide how many
/// resources they refuse, and a search competes with pushes.
const REST: u32 = 4;
/// The longest rest.
const MAX_REST: Duration = Duration::from_mins(1);
/// A refusal announces its objects again after this time, in which others of the same content are not announced.
///
/// Parity (cmd/kube-apiserver of Kubernetes): `--event-ttl`, after which the API server forgets an Event.
const ANNOUNCED: Duration = Duration::from_hours(1);

/// The objects that are blamed for the last refused resources.
#[derive(Default)]
pub(super) struct BlameCache {
    /// The oldest first.
    known: VecDeque<Blame>,
    /// Content whose search was requested by a report.
    requested: BTreeSet<(ResourceType, Version)>,
}

struct Blame {
    resource_type: ResourceType,
    version: Version,
    objects: Vec<Candidate>,
    /// When the objects were announced last.
    announced_at: Instant,
}

impl BlameCache {
    /// Returns the objects that are blamed for refused content; `None` before they were searched.
    pub(super) fn objects(&self, resource_type: ResourceType, version: Version) -> Option<Vec<ObjectName>> {
        let mut blames = self.known.iter();
        let blame = blames.find(|blame| (blame.resource_type, blame.version) == (resource_type, version))?;
        let names = blame.objects.iter().map(|(kind, key)| ObjectName::of(*kind, key));
        Some(names.collect())
    }

    /// Returns the objects of content that is refused again, if they must be announced again; `None` before they were
    /// searched.
    fn refused_again(&mut self, resource_type: ResourceType, version: Version, now: Instant) -> Option<Vec<Candidate>> {
        let mut blames = self.known.iter_mut();
        let blame = blames.find(|blame| (blame.resource_type, blame.version) == (resource_type, version))?;
        if now.saturating_duration_since(blame.announced_at) < ANNOUNCED {
            return Some(Vec::new());
        }
        blame.announced_at = now;
        Some(blame.objects.clone())
    }

    fn add(&mut self, blame: Blame) {
        if self.known.len() >= REMEMBERED {
            self.known.pop_front();
        }
        self.known.push_back(blame);
    }

    /// Returns true if a report may request the search of content: no other did, and no blame was forgotten, which
    /// would be searched again and again.
    fn request(&mut self, resource_type: ResourceType, version: Version) -> bool {
        self.known.len() < REMEMBERED && self.requested.insert((resource_type, version))
    }
}

/// An object that may cause a refusal.
type Candidate = (Kind, ObjectKey);

impl Distribution {
    /// Searches the objects of refused resources, one resource after the other.
    pub(super) async fn attribute(self: Arc<Self>, mut refusals: mpsc::Receiver<RefusedResource>) {
        while let Some(RefusedResource { connection, refusal }) = refusals.recv().await {
            self.blame_cache()
                .requested
                .remove(&(refusal.resource_type, refusal.version));
            let started = environment::now();
            let known = self
                .blame_cache()
                .refused_again(refusal.resource_type, refusal.version, started);
            if let Some(objects) = known {
                self.announce(&refusal, &objects);
                continue;
            }
            let objects = self.search(&connection, &refusal).await;
            let took = environment::now().saturating_duration_since(started);
            if let Some(objects) = objects {
                self.blame(&refusal, objects);
            }
            tokio::time::sleep((took * REST).min(MAX_REST)).await;
        }
    }

    /// Records and logs the objects of a refused resource.
    fn blame(&self, refusal: &Arc<Refusal>, objects: Vec<Candidate>) {
        let names = objects.iter().map(|(kind, key)| ObjectName::of(*kind, key));
        let blamed: Vec<String> = names.map(|name| name.to_string()).collect();
        tracing::warn!(
            r#type = refusal.resource_type.short_name(),
            resource = refusal.name.as_str(),
            reason = refusal.reason,
            objects = blamed.join(", "),
            "refused resource attributed"
        );
        self.announce(refusal, &objects);
        self.blame_cache().add(Blame {
            resource_type: refusal.resource_type,
            version: refusal.version,
            objects,
            announced_at: environment::now(),
        });
        self.attributed.send_modify(|attributed| *attributed += 1);
    }

    /// Passes the objects of a refused resource to the writer of Events.
    fn announce(&self, refusal: &Arc<Refusal>, objects: &[Candidate]) {
        for (kind, key) in objects {
            let Some(sender) = self.refused.get() else { break };
            // An Event is a hint; what does not fit is still in the status.
            let _ = sender.try_send(RefusedObject {
                kind: *kind,
                key: key.clone(),
                refusal: refusal.clone(),
                connections: self.inputs.connections.clone(),
            });
        }
    }

    /// Requests a search for a report about a resource that was refused before and is present again: its connection
    /// does not refuse it a second time. What does not fit is requested by the next report.
    pub(super) fn request_search(&self, connection: &Arc<LiveConnection>, refusal: &Arc<Refusal>) {
        let content = (refusal.resource_type, refusal.version);
        if !self.blame_cache().request(content.0, content.1) {
            return;
        }
        let sent = self.refusals.try_send(RefusedResource {
            connection: connection.clone(),
            refusal: refusal.clone(),
        });
        if sent.is_err() {
            self.blame_cache().requested.remove(&content);
        }
    }

    /// Returns the objects that a refused resource would be different without; `None` if the connection has ended or
    /// has other content by now, so that the next refusal of the content starts another search.
    async fn search(&self, connection: &LiveConnection, refusal: &Refusal) -> Option<Vec<Candidate>> {
        let id = connection.subscription;
        let (resource_type, name, version) = (refusal.resource_type, refusal.name.clone(), refusal.version);
        // The snapshot is published to connections before it is published to pages.
        let state = PushHandle::ask(&self.inputs.inspect, move |world, store| {
            let resources = store.snapshot(store.group_of(id)?)?;
            let present = resources.resources(resource_type).get(&name);
            Some((
                world.snapshot(),
                present.is_some_and(|present| present.version == version),
            ))
        });
        let (mesh, is_present) = state.await.flatten()?;
        if !is_present {
            return None;
        }
        let namespace = &connection.proxy.node.namespace;
        let namespaces = [
            namespace.to_string(),
            root_namespace(&Cx::untracked(), &mesh).to_string(),
        ];
        let (mut blamed, mut first) = (Vec::new(), None);
        let recent = self.recent(&mesh);
        let number_of_recent = recent.len();
        let candidates = recent.into_iter().chain(configuration(&mesh, &namespaces));
        let mut tried: Vec<Candidate> = Vec::new();
        for candidate in candidates {
            // An object that changed recently explains the refusal.
            let is_explained = tried.len() >= number_of_recent && !blamed.is_empty();
            if is_explained || tried.len() >= MAX_CANDIDATES || blamed.len() >= MAX_BLAMED {
                break;
            }
            if tried.contains(&candidate) {
                continue;
            }
            tried.push(candidate.clone());
            let effects = self.effects(candidate.0, &candidate.1).await;
            let mut effects = effects.iter().flat_map(|(_, effects)| effects);
            let of_connection = effects.find(|effect| effect.connections.binary_search(&id).is_ok());
            let mut resources = of_connection.iter().flat_map(|effect| effect.resources.iter());
            let affected = resources.find(|resource| {
                resource.resource_type == refusal.resource_type
                    && resource.name == refusal.name
                    && resource.version == Some(refusal.version)
            });
            let Some(affected) = affected else { continue };
            if affected.without == refusal.held_version() && first.is_none() {
                first = Some(blamed.len());
            }
            blamed.push(candidate);
        }
        if let Some(first) = first {
            blamed[..=first].rotate_right(1);
        }
        Some(blamed)
    }

    /// Returns the objects that changed last, the newest first.
    fn recent(&self, mesh: &MeshSnapshot) -> Vec<Candidate> {
        let mut objects: Vec<Candidate> = Vec::new();
        for push in self.inputs.tracker.pushes().iter().rev() {
            for object in &push.objects {
                let candidate = (object.kind, object.key.clone());
                if mesh.object(object.kind, &object.key).is_some() && !objects.contains(&candidate) {
                    objects.push(candidate);
                }
            }
            if objects.len() >= MAX_CANDIDATES / 2 {
                break;
            }
        }
        objects
    }
}

/// Returns the configuration objects of namespaces, EnvoyFilters first: they are the usual cause.
fn configuration(mesh: &MeshSnapshot, namespaces: &[String]) -> Vec<Candidate> {
    let mut kinds: Vec<Kind> = Kind::ALL.iter().copied().filter(|kind| kind.is_config()).collect();
    kinds.sort_by_key(|kind| *kind != Kind::EnvoyFilter);
    let of_kind = |kind: Kind| {
        let keys = mesh.keys(kind).into_iter();
        let keys = keys.filter(|key| namespaces.iter().any(|namespace| *namespace == *key.namespace));
        keys.map(move |key| (kind, key)).collect::<Vec<_>>()
    };
    kinds.into_iter().flat_map(of_kind).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        distribution::tests::{Fixture, entries},
        model::fixture,
    };

    #[tokio::test]
    async fn content_that_is_not_present_is_attributed_when_it_is_again() {
        let fixture = Fixture::new();
        let names = ["shop".to_owned()];
        fixture.apply(entries(&names, "DNS")).await;
        let (refused, _stream) = fixture.refused("outbound|80||shop.example.com").await;
        let RefusedResource { connection, refusal } = refused;
        fixture.apply(entries(&names, "DNS_ROUND_ROBIN")).await;
        assert_eq!(fixture.distribution.search(&connection, &refusal).await, None);
        fixture.apply(entries(&names, "DNS")).await;
        let objects = fixture
            .distribution
            .search(&connection, &refusal)
            .await
            .expect("a search");
        let names: Vec<String> = objects
            .iter()
            .map(|(kind, key)| ObjectName::of(*kind, key).to_string())
            .collect();
        assert_eq!(names, ["ServiceEntry default/shop"]);
    }

    #[test]
    fn searches_are_requested_once_and_not_for_forgotten_blames() {
        let blame = |version: &[u8]| Blame {
            resource_type: ResourceType::Cluster,
            version: Version::of(version),
            objects: Vec::new(),
            announced_at: environment::now(),
        };
        let mut cache = BlameCache::default();
        let new = Version::of(b"new");
        assert!(cache.request(ResourceType::Cluster, new));
        assert!(!cache.request(ResourceType::Cluster, new), "it waits already");
        for number in 0..=REMEMBERED {
            cache.add(blame(&number.to_be_bytes()));
        }
        assert!(!cache.request(ResourceType::Cluster, Version::of(&0_usize.to_be_bytes())));
    }

    #[test]
    fn refused_content_is_announced_again_when_its_event_is_forgotten() {
        let (resource_type, version) = (ResourceType::Cluster, Version::default());
        let object: Candidate = (Kind::EnvoyFilter, fixture::key("shop/f"));
        let now = environment::now();
        let mut cache = BlameCache::default();
        assert_eq!(cache.refused_again(resource_type, version, now), None, "not searched");
        cache.add(Blame {
            resource_type,
            version,
            objects: vec![object.clone()],
            announced_at: now,
        });
        let mut again = |at| cache.refused_again(resource_type, version, at);
        assert_eq!(again(now + ANNOUNCED / 2), Some(Vec::new()));
        assert_eq!(again(now + ANNOUNCED), Some(vec![object]));
        assert_eq!(again(now + ANNOUNCED), Some(Vec::new()), "announced once");
    }
}
