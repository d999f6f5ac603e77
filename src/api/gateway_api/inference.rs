//! InferencePool (API version 1.4.0).

use serde::Deserialize;
use smol_str::SmolStr;

use crate::base::Labels;

/// The API group.
pub const GROUP: &str = "inference.networking.k8s.io";

/// Pods that serve models, and the service that picks one of them for each request.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InferencePool {
    /// The pods.
    pub selector: PodSelector,
    /// The ports of the pods.
    pub target_ports: Vec<Port>,
    /// The application protocol of the ports: `http` or `kubernetes.io/h2c`.
    pub app_protocol: Option<SmolStr>,
    /// The endpoint picker.
    pub endpoint_picker_ref: Option<EndpointPicker>,
}

/// A selector of pods in the namespace of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSelector {
    /// The labels.
    pub match_labels: Labels,
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
pub struct Port {
    /// The number.
    pub number: u16,
}

/// A reference to a service that picks endpoints by ext_proc.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointPicker {
    /// The group; core if absent.
    pub group: Option<SmolStr>,
    /// The kind; `Service` if absent.
    pub kind: Option<SmolStr>,
    /// The name.
    pub name: SmolStr,
    /// The port of the service.
    pub port: Option<Port>,
    /// `FailOpen` or `FailClose`; `FailClose` if absent.
    pub failure_mode: Option<SmolStr>,
}
