//! What a definition says beside its schema: names, versions, columns of `kubectl get`.

use crate::api::Kind;

/// One kind's definition.
pub(super) struct Definition {
    pub(super) kind: Kind,
    /// The message of `spec`.
    pub(super) message: &'static str,
    /// What the kind is for, as `kubectl explain` tells it.
    pub(super) about: &'static str,
    /// The short name of `kubectl get`, or empty.
    pub(super) short_name: &'static str,
    /// The version that the API server stores.
    pub(super) storage: &'static str,
    /// Whether an object without `spec` is refused.
    pub(super) needs_spec: bool,
    /// The value of the label `istio`, or empty.
    pub(super) component: &'static str,
    /// Further columns of `kubectl get`, in order.
    pub(super) columns: &'static [Column],
}

/// A column of `kubectl get`.
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) path: &'static str,
    pub(super) about: &'static str,
}

/// The path of the one column that is a date.
pub(super) const CREATION: &str = ".metadata.creationTimestamp";

const AGE: Column = column("Age", CREATION, "Time since the object was created");

const fn column(name: &'static str, path: &'static str, about: &'static str) -> Column {
    Column { name, path, about }
}

/// All definitions, by API group and then by name.
pub(super) const DEFINITIONS: &[Definition] = &[
    Definition {
        kind: Kind::TrafficExtension,
        message: "istio.extensions.v1alpha1.TrafficExtension",
        about: "Adds a WebAssembly or Lua filter to proxies.",
        short_name: "",
        storage: "v1alpha1",
        needs_spec: true,
        component: "",
        columns: &[AGE],
    },
    Definition {
        kind: Kind::WasmPlugin,
        message: "istio.extensions.v1alpha1.WasmPlugin",
        about: "Adds a WebAssembly filter to proxies.",
        short_name: "",
        storage: "v1alpha1",
        needs_spec: true,
        component: "",
        columns: &[AGE],
    },
    Definition {
        kind: Kind::DestinationRule,
        message: "istio.networking.v1alpha3.DestinationRule",
        about: "What applies to traffic for a service after it was routed: subsets, load balancing, limits, TLS.",
        short_name: "dr",
        storage: "v1",
        needs_spec: false,
        component: "",
        columns: &[column("Host", ".spec.host", "The service that the rule is about"), AGE],
    },
    Definition {
        kind: Kind::EnvoyFilter,
        message: "istio.networking.v1alpha3.EnvoyFilter",
        about: "Patches of the configuration that proxies are sent.",
        short_name: "",
        storage: "v1alpha3",
        needs_spec: false,
        component: "",
        columns: &[],
    },
    Definition {
        kind: Kind::Gateway,
        message: "istio.networking.v1alpha3.Gateway",
        about: "Ports and hosts that proxies at the edge of the mesh serve.",
        short_name: "gw",
        storage: "v1",
        needs_spec: false,
        component: "",
        columns: &[],
    },
    Definition {
        kind: Kind::ProxyConfig,
        message: "istio.networking.v1beta1.ProxyConfig",
        about: "Settings of proxies that count from their start on.",
        short_name: "",
        storage: "v1beta1",
        needs_spec: false,
        component: "",
        columns: &[],
    },
    Definition {
        kind: Kind::ServiceEntry,
        message: "istio.networking.v1alpha3.ServiceEntry",
        about: "A service that the platform's registry does not know.",
        short_name: "se",
        storage: "v1",
        needs_spec: true,
        component: "",
        columns: &[
            column("Hosts", ".spec.hosts", "The names of the service"),
            column(
                "Location",
                ".spec.location",
                "Whether the service is in the mesh or outside",
            ),
            column("Resolution", ".spec.resolution", "How its addresses are found"),
            AGE,
        ],
    },
    Definition {
        kind: Kind::Sidecar,
        message: "istio.networking.v1alpha3.Sidecar",
        about: "What the sidecar of a workload serves, and which services it sees.",
        short_name: "",
        storage: "v1",
        needs_spec: false,
        component: "",
        columns: &[],
    },
    Definition {
        kind: Kind::VirtualService,
        message: "istio.networking.v1alpha3.VirtualService",
        about: "How requests for hosts are routed.",
        short_name: "vs",
        storage: "v1",
        needs_spec: false,
        component: "",
        columns: &[
            column(
                "Gateways",
                ".spec.gateways",
                "The gateways, or mesh, that the routes are for",
            ),
            column("Hosts", ".spec.hosts", "The hosts that are routed"),
            AGE,
        ],
    },
    Definition {
        kind: Kind::WorkloadEntry,
        message: "istio.networking.v1alpha3.WorkloadEntry",
        about: "A workload that is no pod, such as a virtual machine.",
        short_name: "we",
        storage: "v1",
        needs_spec: true,
        component: "",
        columns: &[AGE, column("Address", ".spec.address", "Where the workload is reached")],
    },
    Definition {
        kind: Kind::WorkloadGroup,
        message: "istio.networking.v1alpha3.WorkloadGroup",
        about: "What workloads that register themselves have in common.",
        short_name: "wg",
        storage: "v1",
        needs_spec: true,
        component: "",
        columns: &[AGE],
    },
    Definition {
        kind: Kind::AuthorizationPolicy,
        message: "istio.security.v1beta1.AuthorizationPolicy",
        about: "Who may do what with workloads.",
        short_name: "ap",
        storage: "v1",
        needs_spec: false,
        component: "security",
        columns: &[
            column("Action", ".spec.action", "What happens to requests that match"),
            AGE,
        ],
    },
    Definition {
        kind: Kind::PeerAuthentication,
        message: "istio.security.v1beta1.PeerAuthentication",
        about: "Whether mutual TLS is required of those who connect to workloads.",
        short_name: "pa",
        storage: "v1",
        needs_spec: false,
        component: "security",
        columns: &[column("Mode", ".spec.mtls.mode", "Whether mutual TLS is required"), AGE],
    },
    Definition {
        kind: Kind::RequestAuthentication,
        message: "istio.security.v1beta1.RequestAuthentication",
        about: "Which tokens of requests are accepted, and where they are found.",
        short_name: "ra",
        storage: "v1",
        needs_spec: false,
        component: "security",
        columns: &[],
    },
    Definition {
        kind: Kind::Telemetry,
        message: "istio.telemetry.v1alpha1.Telemetry",
        about: "Metrics, access logs and traces of workloads.",
        short_name: "telemetry",
        storage: "v1alpha1",
        needs_spec: false,
        component: "telemetry",
        columns: &[AGE],
    },
];
