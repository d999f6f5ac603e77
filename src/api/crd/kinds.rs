//! The parts of the definitions that are not schema: names, versions, columns of `kubectl get`.

use prost::Name;

use crate::api::{Config, Kind, kinds::with_kinds, row::types};

/// The definition of one kind.
pub(super) struct Definition {
    /// The description shown by `kubectl explain`.
    pub(super) description: &'static str,
    /// The short name for `kubectl get`, or empty.
    pub(super) short_name: &'static str,
    /// The version that the API server stores.
    pub(super) storage: &'static str,
    /// True if an object without `spec` is refused.
    pub(super) requires_spec: bool,
    /// The value of the label `istio`, or empty.
    pub(super) component: &'static str,
    /// Further columns of `kubectl get`, in order.
    pub(super) columns: &'static [Column],
}

/// A column of `kubectl get`.
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) path: &'static str,
    /// The description shown by `kubectl explain`.
    pub(super) description: &'static str,
}

/// The path of the only column with a date.
pub(super) const CREATION: &str = ".metadata.creationTimestamp";

const AGE: Column = column("Age", CREATION, "Time since the object was created");

const fn column(name: &'static str, path: &'static str, description: &'static str) -> Column {
    Column {
        name,
        path,
        description,
    }
}

/// A definition with its kind and message.
pub(super) struct KindDefinition {
    pub(super) kind: Kind,
    /// The full name of the message in `spec`.
    pub(super) message: String,
    pub(super) definition: Definition,
}

macro_rules! definitions {
    ($($(#[$doc:meta])* $kind:ident: $row:ty { table: $table:ident, class: $class:ident, $($column:tt)* })*) => {
        /// Returns the definitions of all Istio kinds, by API group and name.
        pub(super) fn definitions() -> Vec<KindDefinition> {
            let mut definitions = Vec::new();
            $(definitions!($class, Kind::$kind, types::$kind, definitions);)*
            definitions.sort_by_key(|definition| (definition.kind.group(), definition.kind.name()));
            definitions
        }
    };
    (Istio, $kind:expr, $row:ty, $definitions:ident) => { $definitions.extend([kind_definition::<$row>($kind)]) };
    ($class:ident, $kind:expr, $row:ty, $definitions:ident) => {};
}

with_kinds!(definitions);

/// A row type with a definition.
trait Defined {
    const DEFINITION: Definition;
}

/// A row type whose `spec` is a protobuf message.
trait SpecMessage {
    /// Returns the full name of the message.
    fn full_name() -> String;
}

impl<M: Name> SpecMessage for Config<M> {
    fn full_name() -> String {
        M::full_name()
    }
}

fn kind_definition<T: Defined + SpecMessage>(kind: Kind) -> KindDefinition {
    KindDefinition {
        kind,
        message: T::full_name(),
        definition: T::DEFINITION,
    }
}

impl Defined for types::TrafficExtension {
    const DEFINITION: Definition = Definition {
        description: "Adds a WebAssembly or Lua filter to proxies.",
        short_name: "",
        storage: "v1alpha1",
        requires_spec: true,
        component: "",
        columns: &[AGE],
    };
}

impl Defined for types::WasmPlugin {
    const DEFINITION: Definition = Definition {
        description: "Adds a WebAssembly filter to proxies.",
        short_name: "",
        storage: "v1alpha1",
        requires_spec: true,
        component: "",
        columns: &[AGE],
    };
}

impl Defined for types::DestinationRule {
    const DEFINITION: Definition = Definition {
        description: "Policies for the traffic to a service after routing: subsets, load balancing, limits, TLS.",
        short_name: "dr",
        storage: "v1",
        requires_spec: false,
        component: "",
        columns: &[column("Host", ".spec.host", "The service of the rule"), AGE],
    };
}

impl Defined for types::EnvoyFilter {
    const DEFINITION: Definition = Definition {
        description: "Patches of the configuration of proxies.",
        short_name: "",
        storage: "v1alpha3",
        requires_spec: false,
        component: "",
        columns: &[],
    };
}

impl Defined for types::Gateway {
    const DEFINITION: Definition = Definition {
        description: "Ports and hosts of proxies at the edge of the mesh.",
        short_name: "gw",
        storage: "v1",
        requires_spec: false,
        component: "",
        columns: &[],
    };
}

impl Defined for types::ProxyConfig {
    const DEFINITION: Definition = Definition {
        description: "Settings that proxies read when they start.",
        short_name: "",
        storage: "v1beta1",
        requires_spec: false,
        component: "",
        columns: &[],
    };
}

impl Defined for types::ServiceEntry {
    const DEFINITION: Definition = Definition {
        description: "A service outside the platform's registry.",
        short_name: "se",
        storage: "v1",
        requires_spec: true,
        component: "",
        columns: &[
            column("Hosts", ".spec.hosts", "The names of the service"),
            column(
                "Location",
                ".spec.location",
                "Location of the service: in the mesh or outside",
            ),
            column("Resolution", ".spec.resolution", "Method of finding its addresses"),
            AGE,
        ],
    };
}

impl Defined for types::Sidecar {
    const DEFINITION: Definition = Definition {
        description: "Listeners of a workload's sidecar, and the services that it can reach.",
        short_name: "",
        storage: "v1",
        requires_spec: false,
        component: "",
        columns: &[],
    };
}

impl Defined for types::VirtualService {
    const DEFINITION: Definition = Definition {
        description: "Routes of requests to hosts.",
        short_name: "vs",
        storage: "v1",
        requires_spec: false,
        component: "",
        columns: &[
            column(
                "Gateways",
                ".spec.gateways",
                "The gateways, or mesh, that the routes are for",
            ),
            column("Hosts", ".spec.hosts", "The hosts of the routes"),
            AGE,
        ],
    };
}

impl Defined for types::WorkloadEntry {
    const DEFINITION: Definition = Definition {
        description: "A workload outside Kubernetes, such as a virtual machine.",
        short_name: "we",
        storage: "v1",
        requires_spec: true,
        component: "",
        columns: &[AGE, column("Address", ".spec.address", "Address of the workload")],
    };
}

impl Defined for types::WorkloadGroup {
    const DEFINITION: Definition = Definition {
        description: "Template of the WorkloadEntries of machines that register themselves.",
        short_name: "wg",
        storage: "v1",
        requires_spec: true,
        component: "",
        columns: &[AGE],
    };
}

impl Defined for types::AuthorizationPolicy {
    const DEFINITION: Definition = Definition {
        description: "Rules that allow or deny requests to workloads.",
        short_name: "ap",
        storage: "v1",
        requires_spec: false,
        component: "security",
        columns: &[column("Action", ".spec.action", "Effect on requests that match"), AGE],
    };
}

impl Defined for types::PeerAuthentication {
    const DEFINITION: Definition = Definition {
        description: "Mutual TLS mode of connections to workloads.",
        short_name: "pa",
        storage: "v1",
        requires_spec: false,
        component: "security",
        columns: &[column("Mode", ".spec.mtls.mode", "Mutual TLS mode"), AGE],
    };
}

impl Defined for types::RequestAuthentication {
    const DEFINITION: Definition = Definition {
        description: "Tokens that requests may carry, and where proxies find them.",
        short_name: "ra",
        storage: "v1",
        requires_spec: false,
        component: "security",
        columns: &[],
    };
}

impl Defined for types::Telemetry {
    const DEFINITION: Definition = Definition {
        description: "Metrics, access logs and traces of workloads.",
        short_name: "telemetry",
        storage: "v1alpha1",
        requires_spec: false,
        component: "telemetry",
        columns: &[AGE],
    };
}
