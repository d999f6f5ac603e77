//! One ADS stream: reads requests, follows its group, writes responses. What is sent is decided by [`Connection`]; here
//! is the waiting.
//!
//! A response is written before the next one is begun, so a stream holds one response at a time; a reader that is slow
//! finds the newest revision when it is ready for it, and holds nobody up: its share of the work in flight is taken from
//! it after a second.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use smol_str::SmolStr;
use tokio::time::{Instant as Timer, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    admission::{Admission, Busy, Share},
    body::{Gone, Message, Outlet, TooLarge},
    connection::{Outcome, Protocol, Refusal, Request, Response},
    debug::{self, Debugger, Denial, Question},
    events::{self, Attachment, Events, Health, Rejection},
    metrics::Metrics,
    names::KnownNames,
    registry::{Arrival, Registration, Registry},
    request::{Incoming, RequestError, Requests},
};
use crate::{
    auth::Caller,
    base,
    generate::{
        RequestedResources, ResourceType,
        proxy::{Identity, NodeError, NodeMetadataPool, Proxy},
    },
    push::groups::{Groups, Member, Publication},
    rpc::{Guest, connection::reached},
};

/// The type of messages by which agents tell the health of their workload; they are no requests.
const HEALTH_INFORMATION: &str = "type.googleapis.com/istio.v1.HealthInformation";
/// How long things may take before it is said, or work for others goes on.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long a response may hold its share of the work in flight; then the reader is slow.
    pub share: Duration,
    /// A response that is not written by then is counted (`pilot_xds_write_timeout`).
    pub write: Duration,
    /// How long a first configuration may hold its share of the work in flight.
    pub first: Duration,
    /// How long a stream may take to send its first request.
    pub request: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            share: Duration::from_secs(1),
            write: Duration::from_secs(5),
            first: Duration::from_secs(10),
            request: Duration::from_secs(30),
        }
    }
}

/// What streams share.
pub(super) struct Shared {
    pub(super) groups: Groups,
    pub(super) registry: Arc<Registry>,
    pub(super) metrics: Metrics,
    pub(super) admission: Arc<Admission>,
    pub(super) patience: Patience,
    pub(super) max_message_bytes: usize,
    pub(super) clock: fn() -> Instant,
    pub(super) wall_clock: fn() -> SystemTime,
    /// Who keeps WorkloadEntries, if anybody does.
    pub(super) events: Option<Events>,
    /// Who answers questions about the control plane, if anybody does.
    pub(super) debugger: Arc<OnceLock<Arc<dyn Debugger>>>,
    /// What clients ask for, so that equal lists are held once.
    pub(super) known_names: Arc<KnownNames>,
    /// What clients are, so that equal ones hold it once.
    pub(super) kinds: NodeMetadataPool,
}

/// Why a stream ended, other than by the client's wish.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum End {
    #[error("the client is gone")]
    Gone,
    #[error("the connection is being closed; connect again")]
    Draining,
    #[error("the control plane is shutting down")]
    ShuttingDown,
    #[error("the first request did not come in time")]
    Silent,
    #[error("what the client showed of itself has expired; connect again")]
    Expired,
    #[error("authorization failed: {0}")]
    Forbidden(String),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Busy(#[from] Busy),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    #[error(transparent)]
    Rejected(#[from] Rejection),
    #[error(transparent)]
    Denied(#[from] Denial),
}

impl From<Gone> for End {
    fn from(_: Gone) -> Self {
        Self::Gone
    }
}

/// See the module's text.
pub(super) struct Stream<B> {
    pub(super) shared: Arc<Shared>,
    pub(super) protocol: Protocol,
    pub(super) peer: Option<SocketAddr>,
    /// Who opened it; none where nobody has to be known.
    pub(super) caller: Option<Caller>,
    /// The client has to be what the caller may be.
    pub(super) check: bool,
    /// Its connection.
    pub(super) guest: Option<Arc<Guest>>,
    pub(super) requests: Requests<B>,
    pub(super) outlet: Outlet,
    pub(super) draining: CancellationToken,
}

impl<B> Stream<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    /// Runs until the client ends the stream.
    pub(super) async fn run(&mut self) -> Result<(), End> {
        let expires_at = self.caller.as_ref().and_then(|caller| caller.expires_at);
        let wall_clock = self.shared.wall_clock;
        let serving = self.serve();
        match expires_at {
            None => serving.await,
            Some(at) => tokio::select! {
                ended = serving => ended,
                () = reached(at, wall_clock) => Err(End::Expired),
            },
        }
    }

    async fn serve(&mut self) -> Result<(), End> {
        let waiting = self.guest.as_ref().map(Guest::waits);
        let mut ends = Ends::of(&self.outlet, &self.draining);
        let first = timeout(self.shared.patience.request, self.first(&mut ends))
            .await
            .unwrap_or(Err(End::Silent));
        drop(waiting);
        if let Some(guest) = &self.guest {
            match &first {
                Ok(Some(_)) => guest.admit(),
                Ok(None) | Err(_) => guest.offend(),
            }
        }
        let Some((mut proxy, mut first)) = first? else {
            return Ok(());
        };
        self.identify(&mut proxy)?;
        // Who only asks about the control plane is no proxy, and nothing is made for it.
        while debug::is_debug(&first.type_url) {
            // Boxed, since hardly any stream asks and all have room for what they might do.
            Box::pin(self.inquiry().answer(first)).await?;
            let next = tokio::select! {
                request = self.requests.next() => request?,
                end = ends.next() => return Err(end),
            };
            let Some(next) = next else { return Ok(()) };
            first = next;
        }
        self.shared.kinds.share(&mut proxy);
        // A machine's own WorkloadEntry stands before its configuration is made, which depends on it.
        let attachment = tokio::select! {
            attachment = attach(&self.shared, &proxy) => attachment?,
            end = ends.next() => return Err(end),
        };
        let share = tokio::select! {
            share = self.shared.admission.first_configuration() => share?,
            end = ends.next() => return Err(end),
        };
        let mut session = Session::new(self, ends, Arc::new(proxy), attachment, share);
        session.on_request(first).await?;
        loop {
            let hoarded = session.first_share.as_ref().map(|(_, until)| *until);
            // Requests come before pushes: what a client has just asked for decides what a push holds.
            tokio::select! {
                biased;
                end = session.ends.next() => return Err(end),
                request = self.requests.next() => match request? {
                    Some(request) => session.on_request(request).await?,
                    None => return Ok(()),
                },
                publication = session.member.receiver.changed() => {
                    publication.map_err(|_| End::ShuttingDown)?;
                    let publication = session.member.receiver.borrow_and_update().clone();
                    session.on_publication(publication).await?;
                }
                () = sleep_until(hoarded.unwrap_or_else(Timer::now)), if hoarded.is_some() => session.first_share = None,
            }
        }
    }

    fn inquiry(&self) -> Inquiry {
        Inquiry {
            shared: self.shared.clone(),
            protocol: self.protocol,
            caller: self.caller.clone(),
            outlet: self.outlet.clone(),
            draining: self.draining.clone(),
        }
    }

    /// What a client says of itself has to be what its caller may say.
    fn identify(&self, proxy: &mut Proxy) -> Result<(), End> {
        let Some(caller) = self.caller.as_ref().filter(|_| self.check) else {
            return Ok(());
        };
        proxy.identity = fitting(proxy, &caller.identities);
        if proxy.identity.is_some() {
            return Ok(());
        }
        let why = format!(
            "no identity of {:?} is that of service account {:?} in namespace {:?}",
            caller.identities,
            proxy.service_account,
            proxy.namespace.as_str(),
        );
        tracing::warn!(node = %proxy.id, peer = ?self.peer, why, "a client is not what it says");
        Err(End::Forbidden(why))
    }

    /// The first request that is one, with the client that sent it.
    async fn first(&mut self, ends: &mut Ends) -> Result<Option<(Proxy, Incoming)>, End> {
        loop {
            let request = tokio::select! {
                request = self.requests.next() => request?,
                end = ends.next() => return Err(end),
            };
            let Some(request) = request else { return Ok(None) };
            if request.type_url == HEALTH_INFORMATION {
                continue;
            }
            let node = request.node.as_ref().ok_or(NodeError::Missing)?;
            return Ok(Some((Proxy::from_node(node)?, request)));
        }
    }
}

/// The first identity that is of the namespace and service account which the client names; what it does not name may be any.
pub(super) fn fitting(proxy: &Proxy, identities: &[SmolStr]) -> Option<Identity> {
    identities.iter().filter_map(|id| Identity::from_spiffe(id)).find(|id| {
        let namespace = proxy.namespace.as_str().is_empty() || proxy.namespace == id.namespace;
        let account = proxy.service_account.is_empty() || proxy.service_account == id.service_account;
        namespace && account
    })
}

/// Tells whoever keeps WorkloadEntries, if the client stands for a machine.
async fn attach(shared: &Shared, proxy: &Proxy) -> Result<Option<Attachment>, Rejection> {
    let Some(events) = &shared.events else {
        return Ok(None);
    };
    let identity = proxy.identity.as_ref().map(|identity| events::Identity {
        namespace: identity.namespace.as_str().into(),
        service_account: identity.service_account.clone(),
    });
    let Some(machine) = events.machine(proxy, identity) else {
        return Ok(None);
    };
    let attached = events.connect(machine, (shared.wall_clock)()).await;
    if let Err(rejection) = &attached {
        tracing::warn!(node = %proxy.id, %rejection, "a machine is not served");
    }
    attached.map(Some)
}

/// What ends a stream whatever it waits for. Each is looked at only when it was woken: a stream waits several times for
/// every response.
struct Ends(FuturesUnordered<BoxFuture<'static, End>>);

impl Ends {
    fn of(outlet: &Outlet, draining: &CancellationToken) -> Self {
        let (outlet, draining) = (outlet.clone(), draining.clone());
        let ends = FuturesUnordered::<BoxFuture<End>>::new();
        ends.push(Box::pin(async move {
            outlet.closed().await;
            End::Gone
        }));
        ends.push(Box::pin(draining.cancelled_owned().map(|()| End::Draining)));
        Self(ends)
    }

    /// Why the stream is to end, once it is.
    async fn next(&mut self) -> End {
        self.0.next().await.unwrap_or(End::Gone)
    }
}

/// A stream whose client is known.
struct Session {
    shared: Arc<Shared>,
    outlet: Outlet,
    ends: Ends,
    guest: Option<Arc<Guest>>,
    registration: Registration,
    member: Member,
    /// Held until the first configuration is on its way, and never longer than [`Patience::first`].
    first_share: Option<(Share, Timer)>,
    /// When the oldest change arrived of which not everything was sent yet.
    since: Option<Instant>,
    /// Refusals that were counted for this node, with the code.
    refusals: Vec<(ResourceType, &'static str)>,
    /// What the client was last said to ask for, if it is served on demand.
    demand: Option<base::Shared<RequestedResources>>,
    /// Held while the client stands for a machine.
    attachment: Option<Attachment>,
    inquiry: Inquiry,
}

impl Session {
    fn new<B>(stream: &Stream<B>, ends: Ends, proxy: Arc<Proxy>, attachment: Option<Attachment>, share: Share) -> Self
    where
        B: http_body::Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        let shared = stream.shared.clone();
        let patience = shared.patience;
        let member = shared.groups.join(proxy.clone());
        shared.metrics.connected(&proxy.version_text);
        let registration = shared.registry.register(Arrival {
            peer: stream.peer,
            connected_at: (shared.wall_clock)(),
            proxy,
            member: member.id,
            protocol: stream.protocol,
        });
        tracing::debug!(connection = %registration.connection.id, peer = ?stream.peer, protocol = ?stream.protocol, "a proxy connected");
        Self {
            shared,
            outlet: stream.outlet.clone(),
            ends,
            guest: stream.guest.clone(),
            registration,
            member,
            first_share: Some((share, Timer::now() + patience.first)),
            since: None,
            refusals: Vec::new(),
            demand: None,
            attachment,
            inquiry: stream.inquiry(),
        }
    }

    fn node(&self) -> &str {
        &self.registration.connection.proxy.id
    }

    async fn on_request(&mut self, incoming: Incoming) -> Result<(), End> {
        self.shared.metrics.received(incoming.size_bytes);
        let Some(request) = incoming.request else {
            if incoming.type_url == HEALTH_INFORMATION {
                self.on_health(incoming.complaint).await;
            } else if debug::is_debug(&incoming.type_url) {
                return Box::pin(self.inquiry.answer(incoming)).await;
            } else {
                tracing::debug!(
                    node = self.node(),
                    r#type = incoming.type_url,
                    "a type that is not served was asked for"
                );
            }
            return Ok(());
        };
        let rendering = (self.shared.clock)();
        let responses = self.react(request, incoming.error_code)?;
        // A reader that is slow keeps nobody else's request waiting.
        drop(incoming.share);
        self.write(responses, rendering).await
    }

    /// An agent told the health of its workload: a complaint, or none.
    async fn on_health(&mut self, complaint: Option<String>) {
        let Some(attachment) = &self.attachment else {
            return tracing::debug!(
                node = self.node(),
                "health is told of a workload without a WorkloadEntry"
            );
        };
        let health = Health {
            healthy: complaint.is_none(),
            message: complaint.unwrap_or_default(),
            at: (self.shared.wall_clock)(),
        };
        attachment.health(health).await;
    }

    fn react(&mut self, request: Request, error_code: i32) -> Result<Vec<Response>, End> {
        let resource_type = request.resource_type;
        let (reaction, demand) = {
            let connection = &mut self.registration.connection.state().connection;
            (connection.on_request(request)?, connection.demand())
        };
        if let Some(demand) = demand {
            self.demand(demand);
        }
        match reaction.outcome {
            Outcome::Nacked(message) => self.refused(resource_type, error_code, &message),
            Outcome::Stale => self.shared.metrics.expired(resource_type),
            outcome @ (Outcome::Subscribed | Outcome::Acked | Outcome::Unsubscribed) => {
                tracing::debug!(
                    node = self.node(),
                    r#type = resource_type.short_name(),
                    ?outcome,
                    "request"
                );
            }
        }
        Ok(reaction.responses)
    }

    /// Tells what the client asks for, if that has changed; what is made for it comes as a publication.
    fn demand(&mut self, demand: RequestedResources) {
        if self.demand.as_deref() == Some(&demand) {
            return;
        }
        let demand = base::Shared::new(demand);
        self.member.demand(demand.clone());
        self.demand = Some(demand);
    }

    fn refused(&mut self, resource_type: ResourceType, error_code: i32, message: &str) {
        let code = code_name(error_code);
        let short = resource_type.short_name();
        tracing::warn!(
            node = self.node(),
            r#type = short,
            code,
            message,
            "the proxy refused its configuration"
        );
        self.shared.metrics.rejected(resource_type, self.node(), code);
        if !self.refusals.contains(&(resource_type, code)) {
            self.refusals.push((resource_type, code));
        }
    }

    async fn on_publication(&mut self, publication: Publication) -> Result<(), End> {
        let Some(resources) = publication.resources else {
            return Ok(());
        };
        let rendering = (self.shared.clock)();
        let responses = self.registration.connection.state().connection.on_snapshot(resources);
        if let Some(since) = publication.since.take() {
            self.since = Some(self.since.map_or(since, |earlier| earlier.min(since)));
        }
        self.write(responses, rendering).await?;
        self.first_share = None;
        if let Some(guest) = &self.guest {
            guest.serve();
        }
        Ok(())
    }

    async fn write(&mut self, responses: Vec<Response>, rendering: Instant) -> Result<(), End> {
        let wrote = !responses.is_empty();
        for response in responses {
            let resource_type = response.resource_type;
            let size_bytes = match self.write_one(response).await {
                Ok((size_bytes, sending)) => {
                    let pushing = (self.shared.clock)().saturating_duration_since(rendering);
                    self.shared.metrics.sent(resource_type, size_bytes, sending, pushing);
                    size_bytes
                }
                Err(end) => {
                    self.shared.metrics.send_failed(resource_type);
                    return Err(end);
                }
            };
            tracing::debug!(
                node = self.node(),
                r#type = resource_type.short_name(),
                size_bytes,
                "sent"
            );
        }
        // A type that waits for an ACK is sent later; a change that means nothing to this proxy did not have to reach it.
        if self.since.is_some() && self.registration.connection.state().connection.is_settled() {
            let since = self.since.take().filter(|_| wrote);
            if let Some(since) = since {
                let delay = (self.shared.clock)().saturating_duration_since(since);
                self.shared.metrics.converged(delay);
            }
        }
        Ok(())
    }

    /// Writes a response; gives its size and how long the transport took.
    async fn write_one(&mut self, response: Response) -> Result<(usize, Duration), End> {
        let resource_type = response.resource_type;
        let (message, mut sent) = Message::new(self.registration.connection.protocol, response)?;
        let share = tokio::select! {
            share = self.shared.admission.response(sent.size_bytes) => share,
            end = self.ends.next() => return Err(end),
        };
        let sending = (self.shared.clock)();
        self.registration.connection.state().sent_at[resource_type as usize] = Some((self.shared.wall_clock)());
        self.outlet.send(message).await?;
        self.settle(&mut sent.written, share, resource_type).await?;
        Ok((
            sent.size_bytes,
            (self.shared.clock)().saturating_duration_since(sending),
        ))
    }

    /// Waits until the transport has written a response.
    async fn settle(
        &mut self,
        written: &mut tokio::sync::oneshot::Receiver<()>,
        share: Option<Share>,
        resource_type: ResourceType,
    ) -> Result<(), End> {
        let mut share = share;
        let started = Timer::now();
        let gives_way_at = started + self.shared.patience.share;
        let overdue_at = started + self.shared.patience.write;
        let mut counted = false;
        loop {
            let gives_way = share.is_some().then_some(gives_way_at);
            let next = gives_way.into_iter().chain((!counted).then_some(overdue_at)).min();
            tokio::select! {
                biased;
                end = self.ends.next() => return Err(end),
                _ = &mut *written => return Ok(()),
                () = sleep_until(next.unwrap_or(started)), if next.is_some() => {}
            }
            if next == gives_way {
                share = None;
                self.first_share = None;
            } else {
                counted = true;
                self.shared.metrics.write_timeout.inc();
                tracing::warn!(
                    node = self.node(),
                    r#type = resource_type.short_name(),
                    "the proxy does not read its configuration"
                );
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let connection = &self.registration.connection;
        self.shared.metrics.disconnected(&connection.proxy.version_text);
        for (resource_type, code) in &self.refusals {
            self.shared.metrics.forget(*resource_type, &connection.proxy.id, code);
        }
        tracing::debug!(connection = %connection.id, "a proxy is gone");
    }
}

/// What it takes to answer questions about the control plane.
struct Inquiry {
    shared: Arc<Shared>,
    protocol: Protocol,
    caller: Option<Caller>,
    outlet: Outlet,
    draining: CancellationToken,
}

impl Inquiry {
    /// Answers once; nothing is acknowledged, and nothing follows.
    async fn answer(&self, asked: Incoming) -> Result<(), End> {
        self.shared.metrics.received(asked.size_bytes);
        let Some(debugger) = self.shared.debugger.get() else {
            return Ok(());
        };
        let url = asked.type_url.clone();
        let question = Question {
            type_url: asked.type_url,
            names: asked.asked,
            caller: self.caller.clone(),
        };
        let mut ends = Ends::of(&self.outlet, &self.draining);
        let answer = tokio::select! {
            answer = debugger.answer(question) => answer?,
            end = ends.next() => return Err(end),
        };
        let nonce = answer.version.clone();
        let (message, mut sent) = Message::of_debug(self.protocol, (url, nonce), answer)?;
        let written = async {
            let share = self.shared.admission.response(sent.size_bytes).await;
            self.outlet.send(message).await?;
            // A reader that is slow keeps no share; that all was written is told by an error.
            if timeout(self.shared.patience.share, &mut sent.written).await.is_err() {
                drop(share);
                let _ = sent.written.await;
            }
            Ok(())
        };
        tokio::select! {
            written = written => written,
            end = ends.next() => Err(end),
        }
    }
}

/// A gRPC code as Go writes it, for the label `err`.
fn code_name(code: i32) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "Canceled",
        "Unknown",
        "InvalidArgument",
        "DeadlineExceeded",
        "NotFound",
        "AlreadyExists",
        "PermissionDenied",
        "ResourceExhausted",
        "FailedPrecondition",
        "Aborted",
        "OutOfRange",
        "Unimplemented",
        "Internal",
        "Unavailable",
        "DataLoss",
        "Unauthenticated",
    ];
    usize::try_from(code)
        .ok()
        .and_then(|code| NAMES.get(code))
        .copied()
        .unwrap_or("Unknown")
}
