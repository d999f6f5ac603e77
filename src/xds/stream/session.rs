//! A stream after its first request: applies requests and publications, and writes responses.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::time::{Instant as Timer, sleep_until};
use tonic::Code;

#[cfg(doc)]
use super::StreamTimeouts;
use super::{
    HEALTH_INFORMATION, Stream,
    debug_responder::DebugResponder,
    end::{EndReason, EndSignals},
    shared::Shared,
    unserved::UnservedTypes,
};
use crate::{
    base,
    generate::{RequestedResources, ResourceType, proxy::Proxy},
    push::groups::{Deliveries, Publication, Subscription, Unreceived},
    rpc::{UnauthenticatedConnection, code_name},
    task,
    xds::{
        admission::{Permit, Source},
        connection::{Outcome, Request, Response},
        events::{Attachment, Health},
        message::{Message, ResponseSender},
        metrics::SentResponse,
        protocol::Protocol,
        registry::{NewConnection, Registration},
        request::{IncomingRequest, RequestContent, UnservedRequest},
        share::quarantine::Refusal,
    },
};

/// A client that may be sent its first configuration.
pub(super) struct AdmittedClient {
    pub(super) proxy: Arc<Proxy>,
    /// Its WorkloadEntry, if it represents a machine.
    pub(super) attachment: Option<Attachment>,
    /// The permit of its first configuration.
    pub(super) permit: Permit,
}

/// A stream after its first request.
pub(super) struct Session {
    shared: Arc<Shared>,
    sender: ResponseSender,
    source: Source,
    pub(super) ends: EndSignals,
    pre_auth: Option<Arc<UnauthenticatedConnection>>,
    registration: Registration,
    pub(super) subscription: Subscription,
    /// Held until the first configuration is sent, for at most [`StreamTimeouts::first_configuration`].
    first_permit: Option<(Permit, Timer)>,
    /// The time when the last clusters were written.
    clusters_sent_at: Option<Timer>,
    /// The arrival time of the oldest change that was not sent completely.
    since: Option<Instant>,
    /// The pushes that the client has not answered yet.
    deliveries: Deliveries,
    /// NACKs that were counted for this node, with the code.
    nacks: Vec<(ResourceType, &'static str)>,
    /// The resources that were requested last, if the client is served on demand.
    requested: Option<base::Shared<RequestedResources>>,
    /// Held while the client represents a machine.
    attachment: Option<Attachment>,
    debug_responder: DebugResponder,
    unserved: UnservedTypes,
}

impl Session {
    pub(super) fn new<B>(stream: &Stream<B>, mut ends: EndSignals, client: AdmittedClient) -> Self
    where
        B: http_body::Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        let AdmittedClient {
            proxy,
            attachment,
            permit,
        } = client;
        let shared = stream.shared.clone();
        let timeouts = shared.timeouts;
        let subscription = shared.groups.join(proxy.clone());
        shared.metrics.connected(&proxy.node.version_text);
        let registration = shared.registry.register(NewConnection {
            peer: stream.peer,
            connected_at: (shared.wall_clock)(),
            proxy,
            subscription: subscription.id,
            protocol: stream.protocol,
            source: stream.source.clone(),
        });
        ends.add_eviction(registration.connection.clone(), shared.max_held_bytes);
        tracing::info!(
            connection = %registration.connection.id,
            peer = stream.peer.map(|peer| peer.to_string()),
            protocol = ?stream.protocol,
            "proxy connected"
        );
        Self {
            shared,
            sender: stream.sender.clone(),
            source: stream.source.clone(),
            ends,
            pre_auth: stream.pre_auth.clone(),
            registration,
            subscription,
            first_permit: Some((permit, Timer::now() + timeouts.first_configuration)),
            clusters_sent_at: None,
            since: None,
            deliveries: Deliveries::default(),
            nacks: Vec::new(),
            requested: None,
            attachment,
            debug_responder: stream.debug_responder(),
            unserved: UnservedTypes::default(),
        }
    }

    fn node(&self) -> &str {
        &self.registration.connection.proxy.id
    }

    /// Returns true if the client waits for the first response to a subscription.
    pub(super) fn owes_response(&self) -> bool {
        self.registration.connection.state().connection.owes_response()
    }

    /// Returns the time of the next [`Self::on_due`].
    pub(super) fn due_at(&self) -> Option<Timer> {
        let first_permit = self.first_permit.as_ref().map(|(_, until)| *until);
        first_permit.into_iter().chain(self.clusters_due_at()).min()
    }

    /// Returns true if something other than a request waits: a publication, or [`Self::on_due`].
    pub(super) fn has_other_work(&self) -> bool {
        self.subscription.has_next() || self.due_at().is_some_and(|due_at| due_at <= Timer::now())
    }

    /// Returns the time when changed clusters are sent although the client has not answered the last ones; `None` if
    /// none wait for that. See [`StreamTimeouts::clusters`].
    fn clusters_due_at(&self) -> Option<Timer> {
        let sent_at = self.clusters_sent_at?;
        let is_held_back = self.registration.connection.state().connection.holds_back_clusters();
        is_held_back.then(|| sent_at + self.shared.timeouts.clusters)
    }

    /// Releases the permit of the first configuration, and sends changed clusters, as far as they are due.
    pub(super) async fn on_due(&mut self) -> Result<(), EndReason> {
        let now = Timer::now();
        if self.first_permit.as_ref().is_some_and(|(_, until)| *until <= now) {
            self.first_permit = None;
        }
        if self.clusters_due_at().is_none_or(|at| at > now) {
            return Ok(());
        }
        tracing::debug!(
            node = self.node(),
            "proxy does not answer clusters, some may be warming"
        );
        let rendering = (self.shared.clock)();
        let responses = self.registration.connection.state().connection.supersede_clusters();
        self.write(responses, rendering).await
    }

    pub(super) async fn on_request(&mut self, mut incoming: Box<IncomingRequest>) -> Result<(), EndReason> {
        self.shared.metrics.received(incoming.size_bytes);
        let request = match incoming.content {
            RequestContent::Configuration(request) => request,
            RequestContent::Debug(_) => {
                incoming.release();
                // A client that does not read the answer must not delay the first configurations of others.
                self.first_permit = None;
                return Box::pin(self.debug_responder.answer(&mut self.ends, incoming)).await;
            }
            RequestContent::Unserved(request) => {
                drop((incoming.permit, incoming.turn));
                if incoming.type_url == HEALTH_INFORMATION {
                    self.on_health(request.error).await;
                    return Ok(());
                }
                if Protocol::is_old_type(&incoming.type_url) {
                    return Err(EndReason::OldType(incoming.type_url));
                }
                return Box::pin(self.on_unserved(incoming.type_url, request)).await;
            }
        };
        let rendering = (self.shared.clock)();
        let responses = match incoming.turn {
            None => self.handle(request, incoming.error_code)?,
            Some(_) => task::aside(|| self.handle(request, incoming.error_code))?,
        };
        self.make_room()?;
        // A slow reader must not delay the requests of others.
        drop((incoming.permit, incoming.turn));
        self.write(responses, rendering).await
    }

    /// Answers a request for a type that is not served.
    async fn on_unserved(&mut self, type_url: String, request: UnservedRequest) -> Result<(), EndReason> {
        let protocol = self.registration.connection.protocol;
        let answer = self.unserved.answer(protocol, &type_url, request);
        tracing::debug!(
            node = self.node(),
            r#type = type_url,
            answered = answer.is_some(),
            "received request for a type that is not served"
        );
        let Some(answer) = answer else { return Ok(()) };
        let (message, mut sent) = Message::empty(protocol, type_url.clone(), answer.nonce.into(), answer.removed)?;
        self.sender.send(message).await?;
        self.await_written(&mut sent.written, None, &type_url).await
    }

    /// Handles a health report of an agent: a complaint, or none.
    async fn on_health(&mut self, complaint: Option<String>) {
        let Some(attachment) = &self.attachment else {
            return tracing::debug!(
                node = self.node(),
                "ignored health report of a workload without WorkloadEntry"
            );
        };
        let health = Health {
            healthy: complaint.is_none(),
            message: complaint.unwrap_or_default(),
            at: (self.shared.wall_clock)(),
        };
        attachment.health(health).await;
    }

    fn handle(&mut self, request: Request, error_code: i32) -> Result<Vec<Response>, EndReason> {
        let resource_type = request.resource_type;
        let (reaction, requested) = {
            let connection = &mut self.registration.connection.state().connection;
            (connection.on_request(request)?, connection.requested_resources())
        };
        if let Some(requested) = requested {
            self.request_resources(requested);
        }
        match reaction.outcome {
            Outcome::Nacked(message) => self.on_nack(resource_type, error_code, &message, reaction.refused),
            Outcome::Stale => self.shared.metrics.expired(resource_type),
            outcome @ (Outcome::Subscribed | Outcome::Acked | Outcome::Unsubscribed) => {
                tracing::debug!(
                    node = self.node(),
                    r#type = resource_type.short_name(),
                    ?outcome,
                    "received request"
                );
            }
        }
        self.on_answer(reaction.responses.is_empty());
        Ok(reaction.responses)
    }

    /// Ends the deliveries of pushes once nothing is left to send or to answer.
    fn on_answer(&mut self, is_idle: bool) {
        if is_idle && !self.deliveries.is_empty() && self.registration.connection.is_settled() {
            self.deliveries.clear(&self.registration.connection.id);
        }
        self.shared.registry.answered();
    }

    /// Checks the memory that subscriptions hold.
    fn make_room(&self) -> Result<(), EndReason> {
        let Shared {
            registry,
            max_held_bytes,
            ..
        } = &*self.shared;
        Ok(registry.make_room(&self.registration.connection, *max_held_bytes)?)
    }

    /// Requests resources by name, if the names have changed. The resources arrive as a publication.
    fn request_resources(&mut self, requested: RequestedResources) {
        if self.requested.as_deref() == Some(&requested) {
            return;
        }
        let requested = base::Shared::new(requested);
        self.subscription.request(requested.clone());
        self.requested = Some(requested);
    }

    fn on_nack(&mut self, resource_type: ResourceType, error_code: i32, message: &str, refused: Vec<Arc<Refusal>>) {
        let connection = &self.registration.connection;
        self.shared.registry.accept_held(connection, &refused);
        let code = code_name(Code::from(error_code));
        let short = resource_type.short_name();
        tracing::warn!(
            node = self.node(),
            r#type = short,
            code,
            error = message,
            "proxy rejected its configuration"
        );
        self.deliveries.refuse();
        for refusal in refused {
            tracing::warn!(
                node = self.node(),
                r#type = short,
                resource = refusal.name.as_str(),
                reason = refusal.reason,
                quarantined = refusal.is_quarantined(),
                "proxy refused a resource"
            );
            self.shared.metrics.refused(resource_type);
            self.shared.refused(&self.registration.connection, refusal);
        }
        self.shared.metrics.nacked(resource_type, self.node(), code);
        if !self.nacks.contains(&(resource_type, code)) {
            self.nacks.push((resource_type, code));
        }
    }

    pub(super) async fn on_publication(
        &mut self,
        publication: Publication,
        unreceived: Unreceived,
    ) -> Result<(), EndReason> {
        let Some(resources) = publication.resources else {
            return Ok(());
        };
        let rendering = (self.shared.clock)();
        // Parity (pilot/pkg/xds/discovery.go): only changes are queued, not first configurations.
        if unreceived.since.is_some()
            && let Some(published_at) = publication.published_at
        {
            let queued = rendering.saturating_duration_since(published_at);
            self.shared.metrics.dequeued(queued);
        }
        let responses = self.registration.connection.state().connection.on_snapshot(resources);
        self.make_room()?;
        if let Some(since) = unreceived.since {
            self.since = Some(self.since.map_or(since, |earlier| earlier.min(since)));
        }
        self.deliveries.append(unreceived.deliveries);
        self.on_answer(responses.is_empty());
        if let Some(pre_auth) = &self.pre_auth {
            pre_auth.lift_read_limit();
        }
        self.write(responses, rendering).await?;
        self.first_permit = None;
        Ok(())
    }

    async fn write(&mut self, responses: Vec<Response>, rendering: Instant) -> Result<(), EndReason> {
        let wrote = !responses.is_empty();
        // Otherwise a client could lack the endpoints of a cluster that it was sent, and not get them from the next
        // control plane, because it announces to hold both.
        self.ends.set_finishes_first(wrote);
        for response in responses {
            let resource_type = response.resource_type;
            let size_bytes = match self.write_one(response).await {
                Ok((size_bytes, sending)) => {
                    let sent = SentResponse {
                        size_bytes,
                        sending,
                        pushing: (self.shared.clock)().saturating_duration_since(rendering),
                    };
                    self.shared.metrics.sent(resource_type, &sent);
                    size_bytes
                }
                Err(end) => {
                    if end.is_send_error() {
                        self.shared.metrics.send_failed(resource_type);
                    }
                    return Err(end);
                }
            };
            tracing::debug!(
                node = self.node(),
                r#type = resource_type.short_name(),
                size_bytes,
                "sent response"
            );
        }
        let is_warming = self.registration.connection.state().connection.is_warming();
        self.ends.set_finishes_first(is_warming);
        if wrote {
            self.deliveries.sent((self.shared.clock)());
        }
        // A type that waits for an ACK is sent later. A change that does not affect this proxy is not measured.
        if self.since.is_some() && self.registration.connection.state().connection.is_up_to_date() {
            let since = self.since.take().filter(|_| wrote);
            if let Some(since) = since {
                let delay = (self.shared.clock)().saturating_duration_since(since);
                self.shared.metrics.converged(delay);
            }
        }
        Ok(())
    }

    /// Writes a response and returns its size and the time that the transport took.
    async fn write_one(&mut self, response: Response) -> Result<(usize, Duration), EndReason> {
        let resource_type = response.resource_type;
        let (message, mut sent) = Message::new(self.registration.connection.protocol, response)?;
        let permit = tokio::select! {
            permit = self.shared.admission.response(&self.source, sent.size_bytes) => permit,
            end = self.ends.next() => return Err(end),
        };
        let sending = (self.shared.clock)();
        self.registration.connection.state().sent_at[resource_type as usize] = Some((self.shared.wall_clock)());
        self.sender.send(message).await?;
        self.await_written(&mut sent.written, Some(permit), resource_type.short_name())
            .await?;
        if resource_type == ResourceType::Cluster {
            self.clusters_sent_at = Some(Timer::now());
        }
        Ok((
            sent.size_bytes,
            (self.shared.clock)().saturating_duration_since(sending),
        ))
    }

    /// Waits until the transport has written a response. A slow reader soon loses its permits, so it does not hold up
    /// others. It is logged and counted later.
    async fn await_written(
        &mut self,
        written: &mut tokio::sync::oneshot::Receiver<()>,
        mut permit: Option<Permit>,
        resource_type: &str,
    ) -> Result<(), EndReason> {
        let started = Timer::now();
        let timeouts = self.shared.timeouts;
        let first_release_at = started + timeouts.first_permit;
        let (release_at, overdue_at) = (started + timeouts.permit, started + timeouts.write);
        let mut counted = false;
        loop {
            let release = permit.is_some().then_some(release_at);
            let first_release = self.first_permit.is_some().then_some(first_release_at);
            let overdue = (!counted).then_some(overdue_at);
            let next = [first_release, release, overdue].into_iter().flatten().min();
            tokio::select! {
                biased;
                end = self.ends.next() => return Err(end),
                _ = &mut *written => return Ok(()),
                () = sleep_until(next.unwrap_or(started)), if next.is_some() => {}
            }
            if next == first_release {
                self.first_permit = None;
            } else if next == release {
                permit = None;
            } else {
                counted = true;
                self.shared.metrics.write_timeout.inc();
                tracing::warn!(
                    node = self.node(),
                    r#type = resource_type,
                    "proxy does not read its configuration"
                );
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let connection = &self.registration.connection;
        self.shared.metrics.disconnected(&connection.proxy.node.version_text);
        for (resource_type, code) in &self.nacks {
            self.shared
                .metrics
                .forget_nacks(*resource_type, &connection.proxy.id, code);
        }
        tracing::info!(connection = %connection.id, "proxy disconnected");
    }
}
