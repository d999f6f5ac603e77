//! Counts object events of clusters, under Istio's names.

use prometheus::{IntCounterVec, Registry};

use super::discovery_filter::ObjectEvent;
use crate::{api::Kind, metrics};

/// `pilot_k8s_reg_events` and `pilot_k8s_cfg_events`.
#[derive(Clone)]
pub struct EventMetrics {
    registry: IntCounterVec,
    config: IntCounterVec,
}

impl EventMetrics {
    /// Registers the counters.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = |name: &str, help: &str| metrics::counters(registry, name, help, &["type", "event"]);
        Ok(Self {
            registry: counters("pilot_k8s_reg_events", "Events from k8s registry.")?,
            config: counters("pilot_k8s_cfg_events", "Events from k8s config.")?,
        })
    }

    /// Counts events of objects of a kind.
    pub fn count(&self, kind: Kind, events: &[ObjectEvent]) {
        let (counter, name) = match kind {
            Kind::Namespace => (&self.registry, "Namespaces"),
            Kind::Node => (&self.registry, "Nodes"),
            Kind::Pod => (&self.registry, "Pods"),
            Kind::Service => (&self.registry, "Services"),
            Kind::EndpointSlice => (&self.registry, "EndpointSlice"),
            kind => (&self.config, kind.name()),
        };
        // Istio watches these objects twice, for what they say beside their main content.
        let second = match kind {
            Kind::Namespace => Some("Namespaces-TrafficDistribution"),
            Kind::KubeGateway => Some("Gateways"),
            _ => None,
        };
        for event in events {
            let event = match event {
                ObjectEvent::Added => "add",
                ObjectEvent::Updated => "update",
                ObjectEvent::Same => "updatesame",
                ObjectEvent::Deleted => "delete",
            };
            counter.with_label_values(&[name, event]).inc();
            if let Some(second) = second {
                self.registry.with_label_values(&[second, event]).inc();
            }
        }
    }
}
