//! The record of one Envoy's stream: subscriptions, responses, ACKs and NACKs.

use std::collections::{BTreeMap, BTreeSet};

use istiod::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};

pub(super) const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
pub(super) const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
pub(super) const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// The record of one Envoy's stream.
#[derive(Default)]
pub(super) struct StreamRecord {
    /// By type URL.
    types: BTreeMap<String, Exchange>,
    /// Envoy's error messages for responses of the daemon that it rejected.
    pub(super) refusals: Vec<String>,
    /// Envoy's error messages for rejected secrets, which come from the relay.
    pub(super) refused_secrets: Vec<String>,
    /// Number of opened streams; more than one means that an earlier one ended.
    pub(super) streams: usize,
    /// The error of a failed stream.
    pub(super) broken: Option<String>,
}

#[derive(Default)]
struct Exchange {
    /// Subscribed names, except `*`.
    asked: BTreeSet<String>,
    /// Resources sent and not removed.
    sent: BTreeSet<String>,
    /// Nonces without a response from Envoy.
    open: BTreeSet<String>,
    answered: bool,
}

impl StreamRecord {
    /// Records a request, ACK or NACK of Envoy.
    pub(super) fn request(&mut self, request: &DeltaDiscoveryRequest) {
        let exchange = self.types.entry(request.type_url.clone()).or_default();
        let names = request.resource_names_subscribe.iter().filter(|name| *name != "*");
        exchange.asked.extend(names.cloned());
        for name in &request.resource_names_unsubscribe {
            exchange.asked.remove(name);
            exchange.sent.remove(name);
        }
        if !request.response_nonce.is_empty() {
            exchange.open.remove(&request.response_nonce);
            exchange.answered = true;
        }
        if let Some(error) = &request.error_detail {
            let messages = format!("{}: {}", short(&request.type_url), error.message);
            let refused = if request.type_url == SECRET {
                &mut self.refused_secrets
            } else {
                &mut self.refusals
            };
            refused.push(messages);
        }
    }

    /// Records a response of the daemon or the relay.
    pub(super) fn response(&mut self, response: &DeltaDiscoveryResponse) {
        let exchange = self.types.entry(response.type_url.clone()).or_default();
        exchange.open.insert(response.nonce.clone());
        exchange
            .sent
            .extend(response.resources.iter().map(|resource| resource.name.clone()));
        for name in &response.removed_resources {
            exchange.sent.remove(name);
        }
    }

    /// Reports whether all responses are acknowledged, and clusters and listeners are among them.
    pub(super) fn settled(&self) -> bool {
        let answered = |kind| self.types.get(kind).is_some_and(|exchange| exchange.answered);
        answered(CLUSTER) && answered(LISTENER) && self.types.values().all(|exchange| exchange.open.is_empty())
    }

    /// Returns the number of resources of a type sent to Envoy.
    pub(super) fn count(&self, kind: &str) -> u64 {
        self.types.get(kind).map_or(0, |exchange| exchange.sent.len() as u64)
    }

    /// Returns all of Envoy's error messages.
    pub(super) fn complaints(&self) -> Vec<&str> {
        let all = self.refusals.iter().chain(&self.refused_secrets);
        all.map(String::as_str).collect()
    }

    /// Describes what is still missing.
    pub(super) fn open(&self) -> String {
        let mut messages = Vec::new();
        for (kind, exchange) in &self.types {
            let missing: Vec<&String> = exchange.asked.difference(&exchange.sent).collect();
            let kind = short(kind);
            if !exchange.answered {
                messages.push(format!("{kind}: requested, but no response"));
            }
            if !exchange.open.is_empty() {
                messages.push(format!("{kind}: {} responses without ACK or NACK", exchange.open.len()));
            }
            if !missing.is_empty() {
                messages.push(format!("{kind}: missing resources: {missing:?}"));
            }
        }
        messages.join("; ")
    }
}

/// Returns the last segment of a type URL.
fn short(kind: &str) -> &str {
    kind.rsplit('.').next().unwrap_or(kind)
}
