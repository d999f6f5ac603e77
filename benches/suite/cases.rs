//! The cases, each with the time of istiod 1.30.3 on a machine with two cores, for one proxy and with its cache off.

use istiod::{
    generate::ResourceType,
    model::{Installation, features::Features},
};
use serde_json::Value;

use super::meshes::*;

/// Istiod's time and output: milliseconds, kB, resources. A size of 0 is unknown.
#[derive(Clone, Copy)]
pub(super) struct Istiod(pub(super) f64, pub(super) f64, pub(super) usize);

pub(super) struct Case {
    pub(super) name: &'static str,
    /// The type of the proxy.
    pub(super) proxy: &'static str,
    pub(super) mesh: fn() -> Vec<Value>,
    /// The time of istiod's push context.
    pub(super) model: Option<f64>,
    pub(super) types: &'static [(ResourceType, Istiod)],
    /// True if istiod's times come from another machine: those published by its project.
    pub(super) is_elsewhere: bool,
}

const SIDECAR: &str = "sidecar";
const ROUTER: &str = "router";
const WAYPOINT: &str = "waypoint";

const fn case(
    name: &'static str,
    proxy: &'static str,
    mesh: fn() -> Vec<Value>,
    model: f64,
    types: &'static [(ResourceType, Istiod)],
) -> Case {
    Case {
        name,
        proxy,
        mesh,
        model: Some(model),
        types,
        is_elsewhere: false,
    }
}

const fn endpoint_case(name: &'static str, mesh: fn() -> Vec<Value>, types: &'static [(ResourceType, Istiod)]) -> Case {
    Case {
        name,
        proxy: SIDECAR,
        mesh,
        model: None,
        types,
        is_elsewhere: true,
    }
}

const fn single_case(
    name: &'static str,
    proxy: &'static str,
    mesh: fn() -> Vec<Value>,
    types: &'static [(ResourceType, Istiod)],
) -> Case {
    Case {
        name,
        proxy,
        mesh,
        model: None,
        types,
        is_elsewhere: false,
    }
}

const ROUTES: ResourceType = ResourceType::Route;
const CLUSTERS: ResourceType = ResourceType::Cluster;
const LISTENERS: ResourceType = ResourceType::Listener;
const ENDPOINTS: ResourceType = ResourceType::Endpoint;

pub(super) const CASES: &[Case] = &[
    case(
        "gateways",
        ROUTER,
        || gateways(1000),
        14.70,
        &[
            (ROUTES, Istiod(61.97, 1138.0, 1001)),
            (CLUSTERS, Istiod(23.87, 534.4, 1003)),
            (LISTENERS, Istiod(29.13, 2296.0, 2)),
        ],
    ),
    case(
        "gateways-shared",
        ROUTER,
        || gateways_shared(1000),
        7.38,
        &[
            (ROUTES, Istiod(123.15, 5202.0, 2)),
            (CLUSTERS, Istiod(21.32, 534.4, 1003)),
            (LISTENERS, Istiod(0.076, 4.445, 2)),
        ],
    ),
    case(
        "knative-gateway",
        ROUTER,
        || knative(100),
        0.255,
        &[
            (ROUTES, Istiod(6.79, 252.0, 2)),
            (CLUSTERS, Istiod(0.043, 1.417, 3)),
            (LISTENERS, Istiod(0.070, 3.997, 2)),
        ],
    ),
    case(
        "http",
        SIDECAR,
        || services(100, HTTP),
        0.287,
        &[
            (ROUTES, Istiod(0.917, 41.66, 1)),
            (CLUSTERS, Istiod(2.54, 99.02, 105)),
            (LISTENERS, Istiod(0.236, 14.75, 3)),
        ],
    ),
    case(
        "tcp",
        SIDECAR,
        || services(100, TCP),
        0.286,
        &[
            (CLUSTERS, Istiod(2.64, 99.83, 105)),
            (LISTENERS, Istiod(1.40, 34.92, 103)),
        ],
    ),
    case(
        "tls",
        SIDECAR,
        || services(100, TLS),
        0.272,
        &[
            (CLUSTERS, Istiod(2.80, 99.83, 105)),
            (LISTENERS, Istiod(1.32, 35.25, 103)),
        ],
    ),
    case(
        "auto",
        SIDECAR,
        || services(100, SNIFFED),
        0.257,
        &[
            (ROUTES, Istiod(1.92, 82.03, 101)),
            (CLUSTERS, Istiod(4.28, 114.7, 105)),
            (LISTENERS, Istiod(4.00, 253.1, 103)),
        ],
    ),
    case(
        "strict",
        SIDECAR,
        || mutual_tls_mode("STRICT"),
        0.016,
        &[(LISTENERS, Istiod(0.332, 17.54, 6))],
    ),
    case(
        "disabled",
        SIDECAR,
        || mutual_tls_mode("DISABLE"),
        0.015,
        &[(LISTENERS, Istiod(0.189, 14.57, 6))],
    ),
    case(
        "externalname",
        SIDECAR,
        || external_names(100),
        0.227,
        &[
            (ROUTES, Istiod(0.140, 0.421, 1)),
            (CLUSTERS, Istiod(0.065, 1.875, 5)),
            (LISTENERS, Istiod(0.230, 14.75, 3)),
        ],
    ),
    case(
        "telemetry-api",
        SIDECAR,
        || telemetry(100),
        0.375,
        &[
            (ROUTES, Istiod(1.54, 81.15, 2)),
            (CLUSTERS, Istiod(7.18, 230.8, 411)),
            (LISTENERS, Istiod(3.45, 208.8, 6)),
        ],
    ),
    case(
        "virtualservice",
        SIDECAR,
        || virtual_services(100),
        0.457,
        &[
            (ROUTES, Istiod(2.30, 96.13, 1)),
            (CLUSTERS, Istiod(2.04, 54.18, 105)),
            (LISTENERS, Istiod(0.247, 14.75, 3)),
        ],
    ),
    case(
        "authorizationpolicy",
        SIDECAR,
        || authorization_policies(100),
        0.149,
        &[(LISTENERS, Istiod(2.39, 110.6, 4))],
    ),
    case(
        "serviceentry-workloadentry",
        SIDECAR,
        || workload_entries(100, 1000),
        0.564,
        &[
            (ROUTES, Istiod(1.59, 81.15, 2)),
            (CLUSTERS, Istiod(13.41, 429.9, 411)),
            (LISTENERS, Istiod(2.48, 50.14, 6)),
        ],
    ),
    case(
        "waypoint",
        WAYPOINT,
        || behind_waypoint(100),
        0.330,
        &[
            (CLUSTERS, Istiod(4.66, 126.0, 203)),
            (LISTENERS, Istiod(12.68, 451.9, 3)),
        ],
    ),
    single_case(
        "names of 1000 services",
        SIDECAR,
        || services(1000, TCP),
        &[(ResourceType::NameTable, Istiod(1.69, 53.45, 1))],
    ),
    single_case(
        "10 secrets",
        ROUTER,
        || secrets(10),
        &[(ResourceType::Secret, Istiod(0.233, 30.31, 10))],
    ),
    single_case(
        "1000 secrets",
        ROUTER,
        || secrets(1000),
        &[(ResourceType::Secret, Istiod(22.54, 3033.0, 1000))],
    ),
    endpoint_case(
        "endpoints 1/100",
        || endpoints(1, 100),
        &[(ENDPOINTS, Istiod(0.451, 16.2, 100))],
    ),
    endpoint_case(
        "endpoints 10/10",
        || endpoints(10, 10),
        &[(ENDPOINTS, Istiod(0.250, 13.0, 10))],
    ),
    endpoint_case(
        "endpoints 100/10",
        || endpoints(100, 10),
        &[(ENDPOINTS, Istiod(2.04, 128.0, 10))],
    ),
    endpoint_case(
        "endpoints 1000/1",
        || endpoints(1000, 1),
        &[(ENDPOINTS, Istiod(2.10, 129.0, 1))],
    ),
];

impl Case {
    /// Istiod's total time for one proxy.
    pub(super) fn istiod(&self) -> f64 {
        self.types.iter().map(|(_, Istiod(time, ..))| time).sum()
    }

    /// The installation for the case: waypoints need ambient. istiod's suite runs them in one network.
    pub(super) fn installation(&self) -> Installation {
        let is_ambient = self.proxy == WAYPOINT;
        Installation {
            features: Features {
                pilot_enable_ambient: is_ambient,
                pilot_enable_ambient_waypoints: is_ambient,
                ..Features::default()
            },
            ..Installation::default()
        }
    }
}
