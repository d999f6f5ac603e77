//! One ADS stream: reads requests, follows its group, and writes responses. [`Connection`](super::Connection) decides
//! what is sent; this module waits for events.
//!
//! A response is written before the next one is encoded, so a stream holds one response at a time. A slow reader gets
//! the newest revision when it is ready for it. It does not delay other streams: its permits are released a
//! moment after a response is passed to the transport.

mod config_session;
mod debug_responder;
mod end;
mod session;
mod shared;
mod unserved;

use std::{net::SocketAddr, pin::pin, sync::Arc};

use bytes::Bytes;
use smol_str::SmolStr;
use tokio::time::{Instant as Timer, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use self::{
    config_session::ConfigSession,
    debug_responder::DebugResponder,
    end::EndSignals,
    session::{AdmittedClient, Session},
};
pub(super) use self::{
    end::EndReason,
    shared::{Ambient, Shared, StreamTimeouts},
};
use super::{
    admission::Source,
    config_objects::{self, ConfigObjects},
    events::{self, Attachment, Rejection},
    message::ResponseSender,
    protocol::Protocol,
    request::{IncomingRequest, RequestContent, Requests},
};
use crate::{
    auth::Caller,
    generate::proxy::{Identity, NodeError, Proxy, ProxyType},
    rpc::{ServedStream, UnauthenticatedConnection, connection::reached},
};

/// The type of health reports by agents; these messages are not requests.
const HEALTH_INFORMATION: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// The number of requests in a row after which all else that waits goes first: more than a client sends at once when it
/// reconnects. Otherwise a client that sends requests without a pause would be sent nothing, and keep its permit.
///
/// Parity (pkg/xds/server.go, `Stream`): a wave of requests does not hold up pushes.
const REQUESTS_IN_A_ROW: u32 = 32;

/// See the module's documentation.
pub(super) struct Stream<B> {
    pub(super) shared: Arc<Shared>,
    pub(super) protocol: Protocol,
    pub(super) peer: Option<SocketAddr>,
    /// The authenticated caller; `None` where authentication is not required.
    pub(super) caller: Option<Caller>,
    /// True if the node must match an identity of the caller (`PILOT_ENABLE_XDS_IDENTITY_CHECK`).
    pub(super) checks_identity: bool,
    /// Its connection, which may still be unauthenticated.
    pub(super) pre_auth: Option<Arc<UnauthenticatedConnection>>,
    /// The source whose share of budgets the stream uses.
    pub(super) source: Source,
    pub(super) requests: Requests<B>,
    pub(super) sender: ResponseSender,
    pub(super) draining: CancellationToken,
}

/// A stream whose first request is handled next.
struct BegunStream {
    client: Client,
    first: Box<IncomingRequest>,
    /// Held until the stream ends.
    served: Option<ServedStream>,
}

/// The client of a stream.
enum Client {
    /// A proxy.
    Proxy(Box<Session>),
    /// A control plane that reads objects of configuration.
    Config(Box<ConfigSession>),
}

impl<B> Stream<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    /// Runs the stream until the client closes it.
    pub(super) async fn run(&mut self) -> Result<(), EndReason> {
        let expires_at = self.caller.as_ref().and_then(|caller| caller.expires_at);
        let wall_clock = self.shared.wall_clock;
        // Pinned, since a future that is moved into one of several branches is stored for each of them.
        let mut serving = pin!(self.serve());
        match expires_at {
            None => serving.await,
            Some(at) => tokio::select! {
                ended = &mut serving => ended,
                () = reached(at, wall_clock) => Err(EndReason::Expired),
            },
        }
    }

    async fn serve(&mut self) -> Result<(), EndReason> {
        // Its future is larger than the rest of the stream's task and is gone before the stream is idle. The same holds
        // for the handling of a request.
        let Some(begun) = Box::pin(self.begin()).await? else {
            return Ok(());
        };
        let BegunStream {
            client,
            first,
            served: _served,
        } = begun;
        let mut session = match client {
            Client::Proxy(session) => session,
            Client::Config(session) => return Box::pin(session.run(&mut self.requests, first)).await,
        };
        Box::pin(session.on_request(first)).await?;
        let read_timeout = self.shared.timeouts.permit;
        let (mut is_open, mut in_a_row) = (true, 0_u32);
        loop {
            // A client may close its side after its requests, as `grpcurl -d` does.
            if !is_open && !session.owes_response() {
                return Ok(());
            }
            let are_others_first = in_a_row >= REQUESTS_IN_A_ROW && session.has_other_work();
            let due_at = session.due_at();
            // Requests are handled before pushes, since they decide what a push contains.
            tokio::select! {
                biased;
                end = session.ends.next() => return Err(end),
                request = self.requests.next(), if is_open && !are_others_first => match request? {
                    Some(request) => {
                        in_a_row = in_a_row.saturating_add(1);
                        Box::pin(session.on_request(request)).await?;
                    }
                    None => is_open = false,
                },
                publication = session.subscription.next() => {
                    in_a_row = 0;
                    let (publication, unreceived) = publication.ok_or(EndReason::ShuttingDown)?;
                    let work = session.on_publication(publication, unreceived);
                    Box::pin(self.requests.pause_for(read_timeout, work)).await?;
                }
                () = sleep_until(due_at.unwrap_or_else(Timer::now)), if due_at.is_some() => {
                    in_a_row = 0;
                    Box::pin(self.requests.pause_for(read_timeout, session.on_due())).await?;
                }
            }
        }
    }

    /// Waits for the first request, checks the client and admits it; `None` if the client has closed the stream.
    async fn begin(&mut self) -> Result<Option<BegunStream>, EndReason> {
        let mut ends = EndSignals::new(&self.sender, &self.draining);
        let Some((mut proxy, first)) = self.timely_request(&mut ends).await? else {
            return Ok(None);
        };
        let served = self.pre_auth.as_ref().map(UnauthenticatedConnection::serve_stream);
        // Parity (pilot/pkg/xds/ads.go): refused before the identity is checked.
        if proxy.node.proxy_type == ProxyType::Ztunnel && self.shared.ambient == Ambient::Off {
            return Err(EndReason::NoAmbient);
        }
        self.check_identity(&mut proxy)?;
        self.shared.resolve_alias(&mut proxy);
        let Some(mut first) = self.request_of_configuration(&mut ends, first).await? else {
            return Ok(None);
        };
        // Its names are read, and there is no response before the client is admitted.
        first.turn = None;
        // Parity (pilot/pkg/xds/xdsgen.go): types of proxies are configuration for these clients, too.
        let objects = self.shared.config_objects.get().cloned();
        let objects = objects.filter(|_| {
            config_objects::is_requested_by(&proxy) && matches!(first.content, RequestContent::Unserved(_))
        });
        let client = match objects {
            Some(objects) => self.config_client(&mut ends, &proxy, objects).await?,
            None => self.proxy_client(ends, proxy).await?,
        };
        Ok(Some(BegunStream { client, first, served }))
    }

    /// Waits for the first request for a limited time, and reports to the connection whether it came.
    async fn timely_request(
        &mut self,
        ends: &mut EndSignals,
    ) -> Result<Option<(Proxy, Box<IncomingRequest>)>, EndReason> {
        let waiting = self
            .pre_auth
            .as_ref()
            .map(UnauthenticatedConnection::open_silent_stream);
        let first = timeout(self.shared.timeouts.first_request, self.first_request(ends))
            .await
            .unwrap_or(Err(EndReason::Silent));
        drop(waiting);
        if let Some(pre_auth) = &self.pre_auth {
            match &first {
                Ok(Some(_)) => pre_auth.admit(),
                Ok(None) | Err(_) => pre_auth.record_violation(),
            }
        }
        first
    }

    /// Answers debug requests. Returns the first other request; `None` if the client has closed the stream. A client
    /// that only sends debug requests is not a proxy; no configuration is generated for it.
    async fn request_of_configuration(
        &mut self,
        ends: &mut EndSignals,
        mut request: Box<IncomingRequest>,
    ) -> Result<Option<Box<IncomingRequest>>, EndReason> {
        while matches!(request.content, RequestContent::Debug(_)) {
            self.debug_responder().answer(ends, request).await?;
            let next = tokio::select! {
                request = self.requests.next() => request?,
                end = ends.next() => return Err(end),
            };
            let Some(next) = next else { return Ok(None) };
            request = next;
        }
        Ok(Some(request))
    }

    /// Admits a control plane that reads objects of configuration.
    async fn config_client(
        &mut self,
        ends: &mut EndSignals,
        proxy: &Proxy,
        objects: Arc<dyn ConfigObjects>,
    ) -> Result<Client, EndReason> {
        if let Some(caller) = &self.caller
            && !objects.permits(&caller.identities)
        {
            tracing::warn!(node = %proxy.id, peer = ?self.peer, identities = ?caller.identities, "config client denied");
            return Err(EndReason::NoConfigAccess(caller.identities.clone()));
        }
        let permit = tokio::select! {
            permit = self.shared.admission.first_configuration(&self.source) => permit?,
            end = ends.next() => return Err(end),
        };
        if let Some(pre_auth) = &self.pre_auth {
            pre_auth.lift_read_limit();
        }
        let session = ConfigSession::new(self, proxy, objects, permit);
        Ok(Client::Config(Box::new(session)))
    }

    /// Admits a proxy.
    async fn proxy_client(&mut self, mut ends: EndSignals, mut proxy: Proxy) -> Result<Client, EndReason> {
        self.shared.node_metadata.share(&mut proxy);
        // A machine's configuration depends on its WorkloadEntry, so that is written first.
        let attachment = tokio::select! {
            attachment = attach(&self.shared, &proxy) => attachment?,
            end = ends.next() => return Err(end),
        };
        let permit = tokio::select! {
            permit = self.shared.admission.first_configuration(&self.source) => permit?,
            end = ends.next() => return Err(end),
        };
        let client = AdmittedClient {
            proxy: Arc::new(proxy),
            attachment,
            permit,
        };
        Ok(Client::Proxy(Box::new(Session::new(self, ends, client))))
    }

    fn debug_responder(&self) -> DebugResponder {
        DebugResponder {
            shared: self.shared.clone(),
            protocol: self.protocol,
            caller: self.caller.clone(),
            source: self.source.clone(),
            sender: self.sender.clone(),
        }
    }

    /// Checks that the node matches an identity of the caller, and sets that identity.
    fn check_identity(&self, proxy: &mut Proxy) -> Result<(), EndReason> {
        let Some(caller) = self.caller.as_ref().filter(|_| self.checks_identity) else {
            return Ok(());
        };
        proxy.identity = matching_identity(proxy, &caller.identities);
        if proxy.identity.is_some() {
            return Ok(());
        }
        let reason = format!(
            "no identity of {:?} matches service account {:?} in namespace {:?}",
            caller.identities,
            proxy.service_account,
            proxy.node.namespace.as_str(),
        );
        tracing::warn!(node = %proxy.id, peer = ?self.peer, reason, "client identity does not match its node");
        Err(EndReason::Forbidden(reason))
    }

    /// Returns the first request that is not a health report, and its client.
    async fn first_request(
        &mut self,
        ends: &mut EndSignals,
    ) -> Result<Option<(Proxy, Box<IncomingRequest>)>, EndReason> {
        loop {
            let request = tokio::select! {
                request = self.requests.next() => request?,
                end = ends.next() => return Err(end),
            };
            let Some(mut request) = request else { return Ok(None) };
            if request.type_url == HEALTH_INFORMATION {
                continue;
            }
            if Protocol::is_old_type(&request.type_url) {
                return Err(EndReason::OldType(request.type_url));
            }
            // Not kept, since a decoded node takes many times its size and a request may wait long for its response.
            let node = request.node.take().ok_or(NodeError::Missing)?;
            self.requests.ignore_nodes();
            return Ok(Some((Proxy::from_node(&node)?, request)));
        }
    }
}

/// Returns the first identity with the namespace and service account of the node. An empty one matches any.
pub(super) fn matching_identity(proxy: &Proxy, identities: &[SmolStr]) -> Option<Identity> {
    identities.iter().filter_map(|id| Identity::from_spiffe(id)).find(|id| {
        let namespace = proxy.node.namespace.as_str().is_empty() || proxy.node.namespace == id.namespace;
        let account = proxy.service_account.is_empty() || proxy.service_account == id.service_account;
        namespace && account
    })
}

/// Announces a client that represents a machine to the controller of WorkloadEntries.
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
        tracing::warn!(node = %proxy.id, %rejection, "machine rejected");
    }
    attached.map(Some)
}
