//! What went over one Envoy's stream: what it asked for, was sent, accepted and refused.

use std::collections::{BTreeMap, BTreeSet};

use istiod::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};

pub(super) const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
pub(super) const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
pub(super) const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// See the module.
#[derive(Default)]
pub(super) struct Ledger {
    /// By type.
    types: BTreeMap<String, Exchange>,
    /// Responses of the daemon that Envoy refused, in its words.
    pub(super) refusals: Vec<String>,
    /// Secrets, which the daemon does not send here, that Envoy refused, in its words.
    pub(super) refused_secrets: Vec<String>,
    /// Streams that were opened; a second one means that the first ended.
    pub(super) streams: usize,
    /// How a stream failed.
    pub(super) broken: Option<String>,
}

#[derive(Default)]
struct Exchange {
    /// Names asked for, `*` aside.
    asked: BTreeSet<String>,
    /// Resources that Envoy was sent and not told to forget.
    sent: BTreeSet<String>,
    /// Nonces that Envoy has yet to answer.
    open: BTreeSet<String>,
    answered: bool,
}

impl Ledger {
    /// Envoy asks, accepts or refuses.
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
            let words = format!("{}: {}", short(&request.type_url), error.message);
            let refused = if request.type_url == SECRET {
                &mut self.refused_secrets
            } else {
                &mut self.refusals
            };
            refused.push(words);
        }
    }

    /// The daemon, or whoever stands in for it, answers.
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

    /// Whether all that was sent has been answered, clusters and listeners among it.
    pub(super) fn settled(&self) -> bool {
        let answered = |kind| self.types.get(kind).is_some_and(|exchange| exchange.answered);
        answered(CLUSTER) && answered(LISTENER) && self.types.values().all(|exchange| exchange.open.is_empty())
    }

    /// How many resources of that type Envoy was sent.
    pub(super) fn count(&self, kind: &str) -> u64 {
        self.types.get(kind).map_or(0, |exchange| exchange.sent.len() as u64)
    }

    /// All that Envoy refused, in its words.
    pub(super) fn complaints(&self) -> Vec<&str> {
        let all = self.refusals.iter().chain(&self.refused_secrets);
        all.map(String::as_str).collect()
    }

    /// What is still open, in words.
    pub(super) fn open(&self) -> String {
        let mut words = Vec::new();
        for (kind, exchange) in &self.types {
            let lacking: Vec<&String> = exchange.asked.difference(&exchange.sent).collect();
            let kind = short(kind);
            if !exchange.answered {
                words.push(format!("{kind}: asked for and never answered"));
            }
            if !exchange.open.is_empty() {
                words.push(format!(
                    "{kind}: {} responses not taken or refused",
                    exchange.open.len()
                ));
            }
            if !lacking.is_empty() {
                words.push(format!("{kind}: not sent: {lacking:?}"));
            }
        }
        words.join("; ")
    }
}

/// The last word of a type.
fn short(kind: &str) -> &str {
    kind.rsplit('.').next().unwrap_or(kind)
}
