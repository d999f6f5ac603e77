//! The state machine of one ADS stream, without I/O. Requests and snapshots go in, responses come out.
//!
//! One response of a type is in flight at a time. A type that waits for its ACK is skipped, and is sent from the newest
//! snapshot later. So a slow client does not delay others and uses bounded memory. Only clusters do not wait forever
//! (`Connection::supersede_clusters`). Listeners and routes wait for new clusters (`Connection::lacks_clusters`).

use std::{collections::BTreeSet, sync::Arc};

use smol_str::{SmolStr, format_smolstr};

use super::{
    delta, order,
    protocol::Protocol,
    share::{
        coalesced::CoalescedResources,
        held::{Charge, size_of_private},
        initial_versions::InitialVersions,
        names::Names,
        quarantine::{Build, ByVersion, Quarantine, Refusal},
        response_cache::ResponseCache,
    },
    sotw,
    watched::{InFlight, WatchedResource},
};
use crate::{
    base::Version,
    generate::{
        EncodedResource, RequestedResources, ResourceSnapshot, ResourceType,
        requested::{ADDRESSES, ON_DEMAND},
    },
};

/// The maximum number of names that a connection may subscribe to, over all types.
const MAX_NAMES: usize = 100_000;
/// The maximum number of names of a client that is served on demand: its configuration is generated for them.
const MAX_ON_DEMAND_NAMES: usize = 10_000;
/// The maximum size of these names.
const MAX_NAME_BYTES: usize = 16 << 20;

/// The number of resources from which on those that only one response has are charged.
const MIN_CHARGED_RESOURCES: usize = 256;

/// A request, reduced to the fields that the state machine uses.
#[derive(Clone, Debug)]
pub struct Request {
    /// The type.
    pub resource_type: ResourceType,
    /// `response_nonce`; empty for a spontaneous request.
    pub nonce: SmolStr,
    /// `error_detail.message` of a NACK.
    pub error: Option<String>,
    /// The change of the subscription.
    pub change: SubscriptionChange,
}

/// The change of a subscription by a request.
#[derive(Clone, Debug)]
pub enum SubscriptionChange {
    /// State of the world: exactly these names.
    Names(Arc<Names>),
    /// Incremental: added and removed names, and what the client holds already.
    Change {
        /// `resource_names_subscribe`; `*` means everything.
        subscribe: Arc<Names>,
        /// `resource_names_unsubscribe`.
        unsubscribe: Vec<SmolStr>,
        /// `initial_resource_versions`.
        initial_versions: InitialVersions,
    },
}

/// A response.
#[derive(Clone, Debug)]
pub struct Response {
    /// The type.
    pub resource_type: ResourceType,
    /// The nonce, which the client repeats in its ACK or NACK.
    pub nonce: SmolStr,
    /// The version of the whole view.
    pub version: Version,
    /// The resources, sorted by name.
    pub resources: Arc<[Arc<EncodedResource>]>,
    /// The encoded resources, if other streams are sent the same list.
    pub coalesced: Option<Arc<CoalescedResources>>,
    /// The names of removed resources (incremental protocol only).
    pub removed: Vec<SmolStr>,
    /// The memory of resources that only this response has.
    pub held: Option<Arc<Charge>>,
}

/// The answer to the last response that a request contains.
struct Answer {
    /// Empty for a spontaneous request.
    nonce: SmolStr,
    /// The error of a NACK.
    error: Option<String>,
}

/// The meaning of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A new or changed subscription.
    Subscribed,
    /// An ACK of the last response.
    Acked,
    /// A NACK of the last response, with its error.
    Nacked(String),
    /// A request with an outdated nonce, which is ignored, except for a change of an incremental subscription.
    Stale,
    /// The end of the subscription.
    Unsubscribed,
}

/// The result of a request.
#[derive(Debug)]
pub struct Reaction {
    /// The meaning of the request.
    pub outcome: Outcome,
    /// The responses to send.
    pub responses: Vec<Response>,
    /// The resources that a NACK refuses, as far as its error says which they are.
    pub refused: Vec<Arc<Refusal>>,
}

/// An invalid subscription, which ends the stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubscriptionError {
    /// Too many names, or too many bytes of names.
    #[error(
        "too many resource names: {names} names with {bytes} bytes; \
         at most {most} names with {MAX_NAME_BYTES} bytes are accepted; \
         hint: limit the scope of the client with a Sidecar"
    )]
    TooManyNames {
        /// The number of names.
        names: usize,
        /// Their size.
        bytes: usize,
        /// The maximum number.
        most: usize,
    },
}

/// The state of one ADS stream.
#[derive(Debug)]
pub struct Connection {
    protocol: Protocol,
    on_demand: bool,
    latest: Option<Arc<ResourceSnapshot>>,
    types: [Option<Box<WatchedResource>>; ResourceType::ALL.len()],
    responses: u64,
    /// Changed clusters that were sent before the client subscribed to endpoints (incremental protocol only).
    warming: BTreeSet<SmolStr>,
    /// Responses that are shared with other connections.
    cache: Arc<ResponseCache>,
    /// The quarantine of refused resources with the client's build, unless it is off.
    quarantine: Option<(Arc<Quarantine>, Build)>,
}

impl Connection {
    /// Creates a connection without subscriptions.
    pub fn new(protocol: Protocol) -> Self {
        Self {
            protocol,
            on_demand: false,
            latest: None,
            types: Default::default(),
            responses: 0,
            warming: BTreeSet::new(),
            cache: Arc::default(),
            quarantine: None,
        }
    }

    /// Returns the same connection, which withholds what clients of its build refused.
    #[must_use]
    pub(super) fn with_quarantine(mut self, quarantine: Option<(Arc<Quarantine>, Build)>) -> Self {
        self.quarantine = quarantine;
        self
    }

    /// Returns the same connection, which shares responses with other connections.
    #[must_use]
    pub fn sharing(mut self, cache: Arc<ResponseCache>) -> Self {
        self.cache = cache;
        self
    }

    /// Creates the connection of a client that requests clusters and listeners by name too. Its snapshots are generated
    /// for the requested names, so a response waits for the snapshot with its names.
    pub fn on_demand(protocol: Protocol) -> Self {
        Self {
            on_demand: true,
            ..Self::new(protocol)
        }
    }

    /// Returns the requested names of the types that are generated on demand; `None` for clients without such types.
    pub fn requested_resources(&self) -> Option<RequestedResources> {
        let of_client = if self.on_demand { ON_DEMAND.as_slice() } else { &[] };
        let types = of_client.iter().chain(&ADDRESSES);
        let watched = types.filter_map(|resource_type| Some((*resource_type, self.watched(*resource_type)?)));
        let mut requested = watched
            .map(|(resource_type, watched)| (resource_type, watched.requested_names().iter().cloned().collect()))
            .peekable();
        (self.on_demand || requested.peek().is_some()).then(|| RequestedResources::new(requested))
    }

    fn is_on_demand(&self, resource_type: ResourceType) -> bool {
        self.on_demand && ON_DEMAND.contains(&resource_type)
    }

    /// Returns true if an empty list of names means all resources of the type.
    fn is_wildcard(&self, resource_type: ResourceType) -> bool {
        resource_type.is_wildcard() && !self.is_on_demand(resource_type)
    }

    /// Returns the state of a type, for debug pages.
    pub fn watched(&self, resource_type: ResourceType) -> Option<&WatchedResource> {
        self.types[resource_type as usize].as_deref()
    }

    /// Returns true if everything of the newest snapshot was sent. Responses may still wait for their ACK.
    pub fn is_up_to_date(&self) -> bool {
        let Some(latest) = &self.latest else { return false };
        ResourceType::ALL.iter().all(|resource_type| {
            let watched = self.types[*resource_type as usize].as_ref();
            watched.is_none_or(|watched| {
                watched.is_up_to_date(latest.resources(*resource_type)) && watched.deferred_removals.is_empty()
            })
        })
    }

    /// Returns true if everything of the newest snapshot was sent and answered.
    pub fn is_settled(&self) -> bool {
        self.types.iter().flatten().all(|watched| watched.in_flight.is_none()) && self.is_up_to_date()
    }

    /// Returns true if the client was sent changed clusters whose endpoints wait for the ACK of earlier ones.
    pub fn is_warming(&self) -> bool {
        let endpoints = self.watched(order::WARMED_BY_CLUSTERS);
        endpoints.is_some_and(|watched| watched.in_flight.is_some() && !watched.pending.is_empty())
    }

    /// Returns true if clusters have changed, and wait for the answer to the last ones.
    pub(super) fn holds_back_clusters(&self) -> bool {
        let (Some(latest), Some(clusters)) = (&self.latest, self.watched(ResourceType::Cluster)) else {
            return false;
        };
        let is_up_to_date = clusters.is_up_to_date(latest.resources(ResourceType::Cluster));
        let has_changed = !is_up_to_date || !clusters.deferred_removals.is_empty();
        has_changed && clusters.in_flight.is_some()
    }

    /// Returns true if new clusters wait for the answer to the last ones. Requests whose routes refer to an unknown
    /// cluster fail, and Envoy refuses a listener with a tracer that does (`Config::Utility::checkCluster`). A client
    /// that is served on demand requests clusters after it has received what refers to them.
    fn lacks_clusters(&self, latest: &ResourceSnapshot) -> bool {
        let clusters = self.watched(ResourceType::Cluster);
        let waiting = clusters.filter(|clusters| clusters.in_flight.is_some() && !clusters.on_demand);
        let Some(sent) = waiting.and_then(|clusters| clusters.sent.as_ref()) else {
            return false;
        };
        let difference = sent.difference(latest.resources(ResourceType::Cluster));
        difference
            .changed
            .iter()
            .any(|cluster| sent.get(&cluster.name).is_none())
    }

    /// Returns what can be sent without an answer to the last clusters. Envoy applies clusters while others warm, but
    /// does not answer: a cluster whose secret is missing would keep all changes from the client, also its correction.
    pub(super) fn supersede_clusters(&mut self) -> Vec<Response> {
        if let Some(clusters) = &mut self.types[ResourceType::Cluster as usize] {
            clusters.supersede();
        }
        self.flush()
    }

    /// Returns true if a subscription waits for its first response.
    pub(super) fn owes_response(&self) -> bool {
        self.types.iter().flatten().any(|watched| watched.must_respond)
    }

    /// Returns the newest snapshot that the connection has received.
    pub fn latest(&self) -> Option<&Arc<ResourceSnapshot>> {
        self.latest.as_ref()
    }

    /// Handles a newer snapshot of the connection's group, which may be another group than before.
    pub fn on_snapshot(&mut self, resources: Arc<ResourceSnapshot>) -> Vec<Response> {
        self.cache.advance(&resources);
        if let Some(before) = self.latest.replace(resources) {
            self.renew_placeholders(&before);
        }
        self.flush()
    }

    /// Marks the requested route configurations that do not exist, if the answer to their names changed.
    fn renew_placeholders(&mut self, before: &ResourceSnapshot) {
        let (Some(latest), Some(routes)) = (&self.latest, &mut self.types[ResourceType::Route as usize]) else {
            return;
        };
        if before.unknown_routes == latest.unknown_routes {
            return;
        }
        let view = latest.resources(ResourceType::Route);
        let absent = routes.names.iter().filter(|name| view.get(name).is_none());
        routes.pending.extend(absent.cloned());
    }

    /// Handles a request of the client.
    pub fn on_request(&mut self, request: Request) -> Result<Reaction, SubscriptionError> {
        let Request {
            resource_type,
            nonce,
            error,
            change,
        } = request;
        let answer = Answer { nonce, error };
        let mut refused = Vec::new();
        let outcome = match change {
            SubscriptionChange::Names(names) => self.sotw_request(resource_type, answer, names, &mut refused),
            SubscriptionChange::Change {
                subscribe,
                unsubscribe,
                initial_versions,
            } => self.delta_request(
                resource_type,
                answer,
                subscribe,
                unsubscribe,
                initial_versions,
                &mut refused,
            ),
        };
        self.quarantine(resource_type, &mut refused);
        self.check_names()?;
        self.charge_names(resource_type);
        Ok(Reaction {
            outcome,
            responses: self.flush(),
            refused,
        })
    }

    /// Puts refused resources into quarantine, where others may have put them before.
    fn quarantine(&mut self, resource_type: ResourceType, refused: &mut [Arc<Refusal>]) {
        let (Some((quarantine, build)), Some(watched)) = (&self.quarantine, &mut self.types[resource_type as usize])
        else {
            return;
        };
        for refusal in refused {
            *refusal = quarantine.add(*build, refusal.clone());
            if let Some(withheld) = watched.refused.get_mut(&refusal.name) {
                withheld.refusal = refusal.clone();
            }
        }
    }

    fn sotw_request(
        &mut self,
        resource_type: ResourceType,
        Answer { nonce, error }: Answer,
        names: Arc<Names>,
        refused: &mut Vec<Arc<Refusal>>,
    ) -> Outcome {
        let quarantines = self.quarantine.is_some();
        let is_address = ADDRESSES.contains(&resource_type);
        // Parity (pilot/pkg/xds/cds.go, lds.go): names do not restrict these types.
        let wildcard = self.is_wildcard(resource_type) && (names.is_empty() || !is_address);
        let on_demand = self.is_on_demand(resource_type) || (is_address && !wildcard);
        let slot = &mut self.types[resource_type as usize];
        // Envoy keeps an error that it could not send before its stream broke, and sends it with the first request of
        // the next one (`GrpcMuxImpl::clearNonce`). That is a subscription all the same.
        let is_first = slot.is_none() && nonce.is_empty();
        if let Some(error) = error.filter(|_| !is_first) {
            match slot {
                Some(watched) if watched.nonce_sent == nonce => {
                    *refused = watched.nack(resource_type, error.clone(), quarantines);
                    // The names may have changed while the response was in flight, and are not sent again.
                    if wildcard || !names.is_empty() {
                        watched.set_names(names, wildcard);
                    }
                }
                Some(_) => return Outcome::Stale,
                None => {}
            }
            return Outcome::Nacked(error);
        }
        if names.is_empty() && !wildcard {
            *slot = None;
            return Outcome::Unsubscribed;
        }
        match slot {
            Some(watched) if !nonce.is_empty() => {
                if watched.nonce_sent != nonce {
                    return Outcome::Stale;
                }
                watched.ack(resource_type, self.quarantine.as_ref());
                if watched.set_names(names, wildcard) {
                    Outcome::Subscribed
                } else {
                    Outcome::Acked
                }
            }
            _ => {
                *slot = Some(Box::new(WatchedResource {
                    wildcard,
                    on_demand,
                    has_aliases: is_address,
                    names: names.set().clone(),
                    name_bytes: names.size_bytes(),
                    requested: names,
                    resend_all: true,
                    must_respond: true,
                    ..WatchedResource::default()
                }));
                if resource_type == ResourceType::Cluster {
                    self.warm_everything();
                }
                Outcome::Subscribed
            }
        }
    }

    fn delta_request(
        &mut self,
        resource_type: ResourceType,
        Answer { nonce, error }: Answer,
        subscribe: Arc<Names>,
        unsubscribe: Vec<SmolStr>,
        initial_versions: InitialVersions,
        refused: &mut Vec<Arc<Refusal>>,
    ) -> Outcome {
        let quarantines = self.quarantine.is_some();
        let on_demand = self.is_on_demand(resource_type);
        let is_wildcard = self.is_wildcard(resource_type);
        let asks_for_clusters = self.watched(ResourceType::Cluster).is_some();
        let slot = &mut self.types[resource_type as usize];
        let first = slot.is_none();
        // The answer to an earlier stream. The subscription of this stream follows.
        if first && error.is_some() && !nonce.is_empty() {
            return Outcome::Stale;
        }
        let watched = slot.get_or_insert_default();
        let mut outcome = match error {
            // Without a nonce or an earlier response, the request answers nothing.
            None if first || nonce.is_empty() => Outcome::Acked,
            _ if watched.nonce_sent != nonce => Outcome::Stale,
            Some(error) => {
                *refused = watched.nack(resource_type, error.clone(), quarantines);
                Outcome::Nacked(error)
            }
            None => {
                watched.ack(resource_type, self.quarantine.as_ref());
                Outcome::Acked
            }
        };
        // A subscription changes even if the nonce is outdated, since changes are sent only once.
        if first {
            let names_nothing = subscribe.is_empty();
            watched.has_aliases = ADDRESSES.contains(&resource_type);
            watched.on_demand = on_demand;
            watched.wildcard = is_wildcard && (names_nothing || !watched.has_aliases);
            watched.must_respond = true;
            watched.initial_versions = initial_versions;
            if !watched.wildcard && names_nothing {
                watched
                    .names
                    .extend(watched.initial_versions.versions().keys().map(SmolStr::new));
                watched.measure_names();
            }
        }
        if first || !subscribe.is_empty() || !unsubscribe.is_empty() {
            if matches!(outcome, Outcome::Acked) {
                outcome = Outcome::Subscribed;
            }
            watched.update_names(subscribe, &unsubscribe, first);
        }
        if first && watched.has_aliases && !watched.wildcard {
            watched.serve_on_demand();
        }
        if first && resource_type == order::WARMED_BY_CLUSTERS {
            let warming = std::mem::take(&mut self.warming).into_iter();
            watched
                .pending
                .extend(warming.filter(|name| watched.names.contains(name)));
            watched.resend_all |= !asks_for_clusters;
        }
        if first && resource_type == ResourceType::Cluster {
            self.warm_everything();
        }
        outcome
    }

    /// Sends all endpoints again: a client that subscribes to clusters again warms all of them.
    fn warm_everything(&mut self) {
        if let Some(endpoints) = &mut self.types[order::WARMED_BY_CLUSTERS as usize] {
            endpoints.resend_all = true;
        }
    }

    fn check_names(&self) -> Result<(), SubscriptionError> {
        let watched = || self.types.iter().flatten();
        let at_most = watched().map(|watched| watched.names.len() + watched.pending.len());
        let most = if self.on_demand { MAX_ON_DEMAND_NAMES } else { MAX_NAMES };
        let size_bytes = watched().map(|watched| watched.name_bytes);
        // Few names are not counted: any client may have as many.
        if at_most.sum::<usize>() <= MAX_ON_DEMAND_NAMES && size_bytes.sum::<usize>() <= MAX_NAME_BYTES {
            return Ok(());
        }
        // Most pending names are part of the subscription.
        let names = watched().flat_map(|watched| {
            let pending = watched.pending.iter();
            let others = pending.filter(move |name| !watched.names.contains(*name));
            watched.names.iter().chain(others)
        });
        let lengths = names.map(SmolStr::len);
        let (count, bytes) = lengths.fold((0, 0), |(count, bytes), len| (count + 1, bytes + len));
        if count > most || bytes > MAX_NAME_BYTES {
            Err(SubscriptionError::TooManyNames {
                names: count,
                bytes,
                most,
            })
        } else {
            Ok(())
        }
    }

    /// Charges the names of a type that are not part of a shared list.
    fn charge_names(&mut self, resource_type: ResourceType) {
        if let Some(watched) = &mut self.types[resource_type as usize] {
            let (count, size_bytes) = watched.unshared_names();
            watched.held = self.cache.held().charge_names(count, size_bytes);
        }
    }

    /// Returns the memory that the subscriptions hold. What other connections hold too counts in part.
    pub(super) fn held_bytes(&self) -> usize {
        let watched = self.types.iter().flatten();
        watched.map(|watched| watched.held_bytes()).sum()
    }

    /// Returns the responses that can be sent now: each type once, in order, from the latest snapshot; removals come
    /// last.
    fn flush(&mut self) -> Vec<Response> {
        let Some(latest) = self.latest.clone() else {
            return Vec::new();
        };
        let lacks_clusters = self.lacks_clusters(&latest);
        let mut responses = Vec::new();
        for resource_type in ResourceType::ALL {
            if lacks_clusters && order::REFERRING.contains(resource_type) {
                continue;
            }
            let Some(watched) = &mut self.types[*resource_type as usize] else {
                continue;
            };
            if watched.in_flight.is_some() {
                continue;
            }
            if !watched.refused.is_empty() {
                watched.release();
            }
            if watched.is_up_to_date(latest.resources(*resource_type)) {
                continue;
            }
            // Before a snapshot was generated for these names, it is not known which of them exist.
            let is_generated_on_request = watched.on_demand || watched.has_aliases;
            if is_generated_on_request && !latest.is_made_for(*resource_type, &watched.requested_names()) {
                continue;
            }
            let of_others = match &self.quarantine {
                Some((quarantine, build)) => quarantine.withheld(*build, *resource_type),
                None => ByVersion::default(),
            };
            let may_withhold = !of_others.is_empty() || !watched.refused.is_empty();
            let awaited = may_withhold.then(|| watched.awaited());
            let content = match self.protocol {
                Protocol::Sotw => sotw::content(watched, *resource_type, &latest, &self.cache),
                Protocol::Delta => delta::content(watched, *resource_type, &latest, &self.cache),
            };
            if !watched.refused.is_empty() {
                watched.forget_refusals(latest.resources(*resource_type));
            }
            let content = match &awaited {
                Some(awaited) => content
                    .and_then(|content| watched.withhold(*resource_type, content, awaited, self.protocol, &of_others)),
                None => content,
            };
            // Parity (pilot/pkg/xds/sds.go, pcds.go): a response without resources is not sent.
            let is_sent_empty = !matches!(resource_type, ResourceType::Secret | ResourceType::ProxyConfig);
            let content = content.filter(|content| is_sent_empty || !content.resources.is_empty());
            let Some(mut content) = content else {
                watched.skip();
                continue;
            };
            if *resource_type == ResourceType::Cluster {
                self.warm(&mut content);
                self.retry_with_clusters(&latest);
            }
            responses.push(self.respond(*resource_type, content, &latest));
        }
        responses.extend(self.removals(&latest));
        responses
    }

    /// Marks the endpoints of changed clusters: Envoy waits for them, even if it announces that it holds them. If this
    /// process is killed before it has sent them, the next one must do it. A client that asks for clusters shows by
    /// their versions which have changed; a client that asks for endpoints only is sent all of them.
    fn warm(&mut self, clusters: &mut InFlight) {
        // A client without any cluster is sent the whole list, and hardly ever holds endpoints. Over SotW, a
        // subscription begins with all.
        let endpoints = self.watched(order::WARMED_BY_CLUSTERS);
        let holds_endpoints = endpoints.is_some_and(WatchedResource::may_hold_any);
        let is_update = self.protocol == Protocol::Delta && (clusters.coalesced.is_none() || holds_endpoints);
        let names = clusters.resources.iter().map(|cluster| &cluster.name);
        let names = names.chain(clusters.unconfirmed.iter());
        let Some(endpoints) = &mut self.types[order::WARMED_BY_CLUSTERS as usize] else {
            if is_update {
                self.warming.extend(names.cloned());
                clusters.confirm_later(&self.cache, |_| true);
            }
            return;
        };
        for name in names {
            if let Some(name) = endpoints.names.get(name) {
                endpoints.pending.insert(name.clone());
            }
        }
        if is_update {
            clusters.confirm_later(&self.cache, |name| endpoints.names.contains(name));
        }
    }

    /// Sends what the client refused for want of a cluster together with that cluster.
    fn retry_with_clusters(&mut self, latest: &ResourceSnapshot) {
        for resource_type in order::REFERRING {
            if let Some(watched) = &mut self.types[resource_type as usize] {
                watched.retry_with(latest.resources(ResourceType::Cluster));
            }
        }
    }

    fn removals(&mut self, latest: &Arc<ResourceSnapshot>) -> Vec<Response> {
        let referring_types_are_outdated = order::REFERRING.iter().any(|resource_type| {
            let watched = self.types[*resource_type as usize].as_ref();
            watched.is_some_and(|watched| !watched.is_up_to_date(latest.resources(*resource_type)))
        });
        let mut responses = Vec::new();
        if referring_types_are_outdated {
            return responses;
        }
        for resource_type in ResourceType::ALL {
            let Some(watched) = &mut self.types[*resource_type as usize] else {
                continue;
            };
            if watched.in_flight.is_some() || watched.deferred_removals.is_empty() {
                continue;
            }
            let removed = std::mem::take(&mut watched.deferred_removals).into_iter().collect();
            responses.push(self.respond(
                *resource_type,
                InFlight {
                    removed,
                    ..InFlight::default()
                },
                latest,
            ));
        }
        responses
    }

    fn respond(&mut self, resource_type: ResourceType, mut content: InFlight, latest: &ResourceSnapshot) -> Response {
        self.responses += 1;
        let nonce = format_smolstr!("{}-{}", latest.revision.0, self.responses);
        // Those of the cache are charged.
        if content.coalesced.is_none() && content.resources.len() >= MIN_CHARGED_RESOURCES {
            let private = size_of_private(&content.resources);
            content.held = (private > 0).then(|| self.cache.held().charge(private));
        }
        let response = Response {
            resource_type,
            nonce: nonce.clone(),
            version: latest.resources(resource_type).version(),
            resources: content.resources.clone(),
            coalesced: content.coalesced.take(),
            removed: content.removed.clone(),
            held: content.held.clone(),
        };
        if let Some(watched) = &mut self.types[resource_type as usize] {
            watched.nonce_sent = nonce;
            watched.in_flight = Some(Box::new(content));
        }
        response
    }
}
