//! A stream of a client that reads objects of configuration.
//!
//! Each requested type is answered with all its objects, and pushed when one of them has changed: all of them in state
//! of the world, and only the changes to incremental clients. Whatever a sidecar of the client's namespace would see
//! does not matter. A response is written before the next one is made, so a slow client gets the newest state later.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use smol_str::SmolStr;
use tokio::time::timeout;

#[cfg(doc)]
use super::StreamTimeouts;
use super::{
    Stream,
    debug_responder::DebugResponder,
    end::{EndReason, EndSignals},
    shared::Shared,
};
use crate::{
    generate::{EncodedResource, proxy::Proxy},
    task,
    xds::{
        admission::{Permit, Source},
        config_objects::{ConfigObjects, Resources},
        message::{ConfigResponse, Message, ResponseSender},
        protocol::Protocol,
        request::{IncomingRequest, RequestContent, Requests},
    },
};

/// The maximum number of types of a stream. All versions of all kinds are fewer.
const MAX_TYPES: usize = 128;
/// The maximum length of a type.
const MAX_TYPE_BYTES: usize = 256;

/// A stream of a client that reads objects.
pub(super) struct ConfigSession {
    shared: Arc<Shared>,
    objects: Arc<dyn ConfigObjects>,
    protocol: Protocol,
    node: SmolStr,
    version: SmolStr,
    source: Source,
    sender: ResponseSender,
    ends: EndSignals,
    changes: BoxStream<'static, ()>,
    debug_responder: DebugResponder,
    watched: Vec<Watched>,
    responses: u64,
    /// Held until the first request is answered, for at most [`StreamTimeouts::first_configuration`].
    first_permit: Option<Permit>,
}

/// The cause of a response.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// A request, which is answered in any case.
    Request,
    /// A change of objects, which may be of other types.
    Change,
}

/// A requested type.
struct Watched {
    type_url: String,
    /// The name of the objects that it is a version of; `None` if it is unknown.
    kind: Option<SmolStr>,
    /// False for another version of a type that was requested before. It has no objects, since a client that reads
    /// several versions would have every object several times.
    is_first_version: bool,
    nonce: SmolStr,
    sent: Resources,
}

impl Watched {
    /// Returns the present objects.
    fn present(&self, objects: &dyn ConfigObjects) -> Resources {
        let listed = self.is_first_version.then(|| objects.list(&self.type_url));
        listed.flatten().unwrap_or_default()
    }
}

impl ConfigSession {
    pub(super) fn new<B>(
        stream: &Stream<B>,
        proxy: &Proxy,
        objects: Arc<dyn ConfigObjects>,
        permit: Permit,
    ) -> ConfigSession
    where
        B: http_body::Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        let shared = stream.shared.clone();
        let version = proxy.node.version_text.clone();
        shared.metrics.connected(&version);
        tracing::info!(node = %proxy.id, peer = ?stream.peer, protocol = ?stream.protocol, "config client connected");
        Self {
            ends: EndSignals::new(&stream.sender, &stream.draining),
            changes: objects.changes(),
            objects,
            protocol: stream.protocol,
            node: proxy.id.clone(),
            version,
            source: stream.source.clone(),
            sender: stream.sender.clone(),
            debug_responder: stream.debug_responder(),
            shared,
            watched: Vec::new(),
            responses: 0,
            first_permit: Some(permit),
        }
    }

    /// Serves the stream until the client closes it.
    pub(super) async fn run<B>(
        mut self,
        requests: &mut Requests<B>,
        first: Box<IncomingRequest>,
    ) -> Result<(), EndReason>
    where
        B: http_body::Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        let (first_permit, limit) = (self.first_permit.take(), self.shared.timeouts.first_configuration);
        holding(first_permit, limit, self.on_request(first)).await?;
        loop {
            tokio::select! {
                biased;
                end = self.ends.next() => return Err(end),
                request = requests.next() => match request? {
                    Some(request) => self.on_request(request).await?,
                    None => return Ok(()),
                },
                changed = self.changes.next() => match changed {
                    Some(()) => {
                        let read_timeout = self.shared.timeouts.permit;
                        requests.pause_for(read_timeout, self.push()).await?;
                    }
                    // The push loop has ended. The objects stay, until the connection is drained.
                    None => self.changes = stream::pending().boxed(),
                },
            }
        }
    }

    async fn on_request(&mut self, incoming: Box<IncomingRequest>) -> Result<(), EndReason> {
        if matches!(incoming.content, RequestContent::Debug(_)) {
            return Box::pin(self.debug_responder.answer(&mut self.ends, incoming)).await;
        }
        self.shared.metrics.received(incoming.size_bytes);
        let IncomingRequest {
            type_url,
            content,
            permit,
            turn,
            ..
        } = *incoming;
        let RequestContent::Unserved(request) = content else {
            // An empty answer would say that the configuration of the proxy is empty.
            tracing::warn!(
                node = %self.node,
                r#type = type_url,
                "config client requested a type of proxies; hint: use a stream of its own"
            );
            return Ok(());
        };
        if type_url.is_empty() || type_url.len() > MAX_TYPE_BYTES {
            return Ok(());
        }
        if let Some(complaint) = &request.error {
            tracing::warn!(node = %self.node, r#type = type_url, complaint, "config client rejected objects");
            return Ok(());
        }
        let known = self.watched.iter().position(|watched| watched.type_url == type_url);
        let index = match known {
            // The first request of a stream may repeat a type; everything else acknowledges, or is outdated.
            Some(_) if self.protocol == Protocol::Delta || !request.nonce.is_empty() => return Ok(()),
            Some(index) => index,
            None if self.watched.len() >= MAX_TYPES => return Ok(()),
            None => self.watch(type_url),
        };
        // A client that does not read its answer must not delay the requests of others.
        drop((request, permit, turn));
        self.send(index, Cause::Request).await
    }

    /// Adds a type and returns its index.
    fn watch(&mut self, type_url: String) -> usize {
        let kind = self.objects.kind(&type_url);
        if kind.is_none() {
            tracing::warn!(node = %self.node, r#type = type_url, "config client requested an unknown type");
        }
        let is_first_version = kind.is_some() && self.watched.iter().all(|watched| watched.kind != kind);
        self.watched.push(Watched {
            type_url,
            kind,
            is_first_version,
            nonce: SmolStr::default(),
            sent: Resources::default(),
        });
        self.watched.len() - 1
    }

    /// Sends the types whose objects have changed.
    async fn push(&mut self) -> Result<(), EndReason> {
        let (objects, watched) = (&self.objects, &self.watched);
        // Together, because stepping aside takes longer than finding out that a type has not changed.
        let changed: Vec<usize> = task::aside(|| {
            let has_changed = |watched: &Watched| !Arc::ptr_eq(&watched.present(&**objects), &watched.sent);
            let changed = watched.iter().enumerate().filter(|(_, watched)| has_changed(watched));
            changed.map(|(index, _)| index).collect()
        });
        for index in changed {
            self.send(index, Cause::Change).await?;
        }
        Ok(())
    }

    /// Sends the objects of a type, if they have changed or were requested.
    async fn send(&mut self, index: usize, cause: Cause) -> Result<(), EndReason> {
        let rendering = (self.shared.clock)();
        let watched = &mut self.watched[index];
        let present = task::aside(|| watched.present(&*self.objects));
        if cause == Cause::Change && Arc::ptr_eq(&present, &watched.sent) {
            return Ok(());
        }
        let (resources, removed) = match (self.protocol, cause) {
            (Protocol::Sotw, _) | (Protocol::Delta, Cause::Request) => (present.clone(), Vec::new()),
            (Protocol::Delta, Cause::Change) => difference(&watched.sent, &present),
        };
        let is_same = resources.is_empty() && removed.is_empty() && watched.sent.is_empty() == present.is_empty();
        watched.sent = present;
        if is_same && cause == Cause::Change {
            return Ok(());
        }
        self.responses += 1;
        watched.nonce = SmolStr::from(self.responses.to_string());
        let response = ConfigResponse {
            type_url: watched.type_url.clone(),
            nonce: watched.nonce.to_string(),
            resources,
            removed,
        };
        let message = Message::of_config(self.protocol, response)?;
        let written = async {
            let sent = self
                .shared
                .write(&self.source, &self.sender, message, rendering)
                .await?;
            self.shared.metrics.sent_objects(&sent);
            Ok(())
        };
        tokio::select! {
            written = written => written,
            end = self.ends.next() => Err(end),
        }
    }
}

/// Runs work that holds a permit for at most this time. Longer work goes on without it: its client reads slowly.
async fn holding<T>(permit: Option<Permit>, limit: Duration, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    let done = timeout(limit, work.as_mut()).await;
    drop(permit);
    match done {
        Ok(done) => done,
        Err(_) => work.await,
    }
}

impl Drop for ConfigSession {
    fn drop(&mut self) {
        self.shared.metrics.disconnected(&self.version);
        tracing::info!(node = %self.node, "config client disconnected");
    }
}

/// Returns the changed resources and the names of removed ones. Both lists are sorted by name.
fn difference(before: &Resources, after: &Resources) -> (Resources, Vec<String>) {
    let (mut old, mut new) = (before.iter().peekable(), after.iter().peekable());
    let (mut changed, mut removed): (Vec<Arc<EncodedResource>>, Vec<String>) = (Vec::new(), Vec::new());
    while let Some(resource) = new.peek() {
        match old.peek() {
            Some(known) if known.name < resource.name => {
                removed.push(known.name.to_string());
                old.next();
                continue;
            }
            Some(known) if known.name == resource.name => {
                if !Arc::ptr_eq(known, resource) && known != resource {
                    changed.push((*resource).clone());
                }
                old.next();
            }
            Some(_) | None => changed.push((*resource).clone()),
        }
        new.next();
    }
    removed.extend(old.map(|known| known.name.to_string()));
    (changed.into(), removed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::istio::mcp::v1alpha1::{Metadata, Resource};

    fn resource(name: &str, version: &str) -> Arc<EncodedResource> {
        let metadata = Metadata {
            name: name.to_owned(),
            version: version.to_owned(),
            ..Metadata::default()
        };
        let resource = Resource {
            metadata: Some(metadata),
            body: None,
        };
        Arc::new(EncodedResource::new(name, &resource))
    }

    #[test]
    fn a_difference_has_changed_new_and_removed_resources() {
        let list = |pairs: &[(&str, &str)]| -> Resources {
            pairs.iter().map(|(name, version)| resource(name, version)).collect()
        };
        let before = list(&[("a", "1"), ("b", "1"), ("d", "1"), ("e", "1")]);
        let after = list(&[("b", "1"), ("c", "1"), ("d", "2")]);
        let (changed, removed) = difference(&before, &after);
        let names: Vec<&str> = changed.iter().map(|resource| resource.name.as_str()).collect();
        assert_eq!((names, removed), (vec!["c", "d"], vec!["a".to_owned(), "e".to_owned()]));
    }
}
