//! The growth curves of a mesh: the five most important ones, and closer looks at combinations of long lists.

use serde_json::{Value, json};

use super::objects::*;

/// A growth curve of a mesh.
pub(super) struct Curve {
    pub(super) name: &'static str,
    /// The smallest size.
    pub(super) first: usize,
    /// The objects of a mesh of this size.
    pub(super) mesh: fn(usize) -> Vec<Value>,
}

pub(super) const CURVES: &[Curve] = &[
    Curve {
        name: "services",
        first: 125,
        mesh: |size| (0..size).flat_map(service).collect(),
    },
    Curve {
        name: "VirtualServices",
        first: 125,
        mesh: |size| with_base((0..size).map(|n| virtual_service(n, &[host(n)]))),
    },
    Curve {
        name: "VirtualServices with a DestinationRule each",
        first: 125,
        mesh: |size| with_services(size, (0..size).flat_map(routed_service)),
    },
    Curve {
        name: "Gateways on one HTTP port",
        first: 125,
        mesh: |size| {
            with_base((0..size).map(|n| gateway(n, &json!({ "number": 80, "protocol": "HTTP", "name": "http" }), None)))
        },
    },
    Curve {
        name: "Gateways on one HTTPS port",
        first: 125,
        mesh: |size| {
            with_base((0..size).map(|n| {
                gateway(
                    n,
                    &json!({ "number": 443, "protocol": "HTTPS", "name": "https" }),
                    Some(n),
                )
            }))
        },
    },
    Curve {
        name: "Gateways with a VirtualService each",
        first: 125,
        mesh: |size| {
            let port = json!({ "number": 80, "protocol": "HTTP", "name": "http" });
            with_base(
                (0..size)
                    .flat_map(|n| [gateway(n, &port, None), bound(n)])
                    .collect::<Vec<_>>(),
            )
        },
    },
    Curve {
        name: "Gateways with separate ports",
        first: 62,
        mesh: |size| {
            with_base((0..size).map(|n| {
                gateway(
                    n,
                    &json!({ "number": 10_000 + n, "protocol": "HTTP", "name": "http" }),
                    None,
                )
            }))
        },
    },
    Curve {
        name: "HTTPRoutes of one Gateway",
        first: 312,
        mesh: |size| with_base(kube_gateway().into_iter().chain((0..size).map(http_route))),
    },
    Curve {
        name: "hosts in one VirtualService",
        first: 250,
        mesh: |size| with_base([virtual_service(0, &(0..size).map(host).collect::<Vec<_>>())]),
    },
    Curve {
        name: "services as hosts of one VirtualService",
        first: 125,
        mesh: |size| {
            with_services(
                size,
                [virtual_service(0, &(0..size).map(service_host).collect::<Vec<_>>())],
            )
        },
    },
    Curve {
        name: "routes in one VirtualService",
        first: 250,
        mesh: |size| with_base([long_virtual_service(size)]),
    },
    Curve {
        name: "EnvoyFilters",
        first: 62,
        mesh: |size| with_base((0..size).map(|n| envoy_filter(n, n % 2 == 0))),
    },
    Curve {
        name: "EnvoyFilters that match nothing",
        first: 62,
        mesh: |size| with_base((0..size).map(|n| envoy_filter(n, false))),
    },
    Curve {
        name: "hosts in one ServiceEntry",
        first: 125,
        mesh: |size| with_base([service_entry(0, &(0..size).map(host).collect::<Vec<_>>(), 80)]),
    },
    Curve {
        name: "TCP services on one port",
        first: 125,
        mesh: |size| (0..size).map(tcp_service).collect(),
    },
    Curve {
        name: "endpoints of one service",
        first: 250,
        mesh: |size| with_base([slice(0, size)]),
    },
    Curve {
        name: "Sidecars",
        first: 125,
        mesh: |size| with_base((0..size).map(sidecar)),
    },
    Curve {
        name: "VirtualServices of one host",
        first: 125,
        mesh: |size| with_base((0..size).map(part)),
    },
    Curve {
        name: "delegate VirtualServices",
        first: 125,
        mesh: |size| with_base((0..size).map(delegate).chain([delegating(size)])),
    },
    Curve {
        name: "VirtualServices with wildcards",
        first: 62,
        mesh: |size| {
            let entry = |n: usize| service_entry(n, &[format!("a.domain-{n}.example.com")], 80);
            let wild = |n: usize| virtual_service(n, &[format!("*.domain-{n}.example.com")]);
            with_base((0..size).flat_map(|n| [entry(n), wild(n)]).collect::<Vec<_>>())
        },
    },
    Curve {
        name: "DestinationRules of one host",
        first: 62,
        mesh: |size| with_base((0..size).map(rule_of_one)),
    },
    Curve {
        name: "ServiceEntries of one host",
        first: 62,
        mesh: |size| with_base((0..size).map(|n| service_entry(n, &[host(0)], 80 + n as u16))),
    },
    Curve {
        name: "ServiceEntries that select a WorkloadEntry each",
        first: 62,
        mesh: |size| with_base((0..size).flat_map(selecting).collect::<Vec<_>>()),
    },
    Curve {
        name: "services with a pod each",
        first: 125,
        mesh: |size| (0..size).flat_map(|n| service(n).into_iter().chain([pod(n)])).collect(),
    },
    Curve {
        name: "headless services",
        first: 125,
        mesh: |size| with_base((0..size).flat_map(|n| [headless(n), slice(n, 3)]).collect::<Vec<_>>()),
    },
    Curve {
        name: "endpoints of a headless service",
        first: 125,
        mesh: |size| with_base([headless(20), slice(20, size)]),
    },
    Curve {
        name: "namespaces with a service each",
        first: 125,
        mesh: |size| (0..size).flat_map(elsewhere).collect(),
    },
    Curve {
        name: "AuthorizationPolicies",
        first: 125,
        mesh: |size| with_base((0..size).map(authorization_policy)),
    },
];
