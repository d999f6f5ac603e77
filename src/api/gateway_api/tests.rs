use std::collections::BTreeSet;

use crate::{
    api::{Kind, Row, document, yaml},
    base::ClusterId,
};

/// Returns the rows and diagnostics of YAML documents.
fn parsed(text: &str) -> document::ParsedDocument {
    let mut parsed = document::ParsedDocument::default();
    for document in yaml::documents(text) {
        parsed.extend(document::parse(&ClusterId::new("c"), &document.parse().unwrap()));
    }
    parsed
}

#[track_caller]
fn good(text: &str) -> Row {
    let parsed = parsed(text);
    assert_eq!(parsed.diagnostics, []);
    parsed.rows.into_iter().next().unwrap()
}

/// Returns the diagnostics as text.
#[track_caller]
fn bad(text: &str) -> String {
    let parsed = parsed(text);
    assert!(parsed.rows.is_empty() && parsed.rejected.len() == 1, "{parsed:?}");
    let messages: Vec<_> = parsed.diagnostics.iter().map(ToString::to_string).collect();
    messages.join("\n")
}

const GATEWAY: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: east, namespace: ns, labels: {topology.istio.io/network: n}}
spec:
  gatewayClassName: istio
  somethingNew: {a: 1}
  listeners:
  - {name: tls, port: 15443, protocol: TLS, hostname: null, tls: {mode: Passthrough, options: {a: b}}}
  - name: http
    port: 80
    protocol: HTTP
    allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {a: b}}}, kinds: [{kind: HTTPRoute}]}
  addresses: [{type: Hostname, value: east.example.com}]
";

#[test]
fn gateways_of_both_groups() {
    let Row::KubeGateway(gateway) = good(GATEWAY) else {
        panic!("not a Gateway of the Gateway API");
    };
    let listeners: Vec<_> = gateway
        .spec
        .listeners
        .iter()
        .map(|l| (l.name.as_str(), l.port))
        .collect();
    assert_eq!(listeners, [("tls", 15443), ("http", 80)]);
    assert_eq!(gateway.spec.addresses[0].value, "east.example.com");
    assert_eq!(gateway.meta.kind, Kind::KubeGateway);

    let own = "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {name: a}\nspec: {servers: [{port: {number: 80, name: http, protocol: HTTP}, hosts: [a.com]}]}";
    assert_eq!(good(own).kind(), Kind::Gateway);
}

#[test]
fn invalid_fields_are_reported() {
    let wrong = GATEWAY.replace("port: 80", "port: many");
    let message = bad(&wrong);
    assert!(
        message.starts_with("Gateway ns/east: spec.listeners[1].port: "),
        "{message}"
    );
    let message = bad(&GATEWAY.replace("port: 80", "port: 70000"));
    assert!(
        message.starts_with("Gateway ns/east: spec.listeners[1].port: "),
        "{message}"
    );
    let message = bad(&GATEWAY.replace("gatewayClassName: istio", "listenerz: []"));
    assert_eq!(message, "Gateway ns/east: spec: missing field `gatewayClassName`");
    let message = bad(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: a}\nspec: {rules: [{matches: [{path: /}]}]}",
    );
    assert!(
        message.starts_with("HTTPRoute default/a: spec.rules[0].matches[0].path: "),
        "{message}"
    );
    let message = bad("apiVersion: gateway.networking.k8s.io/v1alpha2\nkind: HTTPRoute\nmetadata: {name: a}");
    assert!(message.contains("apiVersion: "), "{message}");
}

#[test]
fn every_kind_has_a_row() {
    let route = "{parentRefs: [{name: g, sectionName: l, port: 80}], rules: [{name: r, backendRefs: [{name: s, port: 80, weight: 1}]}]}";
    let policy = "targetRefs: [{group: '', kind: Service, name: s, sectionName: http}]";
    let objects = [
        ("gateway.networking.k8s.io/v1", "GatewayClass", "{controllerName: a/b}"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute", route),
        ("gateway.networking.k8s.io/v1", "GRPCRoute", route),
        ("gateway.networking.k8s.io/v1", "TLSRoute", route),
        ("gateway.networking.k8s.io/v1alpha2", "TCPRoute", route),
        ("gateway.networking.k8s.io/v1alpha2", "UDPRoute", route),
        (
            "gateway.networking.k8s.io/v1",
            "BackendTLSPolicy",
            &format!("{{{policy}, validation: {{hostname: a.com, wellKnownCACertificates: System}}}}"),
        ),
        (
            "gateway.networking.k8s.io/v1",
            "ListenerSet",
            "{parentRef: {name: g}, listeners: [{name: a, port: 80, protocol: HTTP}]}",
        ),
        (
            "gateway.networking.k8s.io/v1beta1",
            "ReferenceGrant",
            "{from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: a}], to: [{group: '', kind: Service}]}",
        ),
        (
            "gateway.networking.x-k8s.io/v1alpha1",
            "XBackendTrafficPolicy",
            &format!("{{{policy}, retryConstraint: {{budget: {{percent: 20, interval: 10s}}}}}}"),
        ),
        (
            "networking.k8s.io/v1",
            "Ingress",
            "{rules: [{host: a.com, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: s, port: {number: 80}}}}]}}]}",
        ),
        (
            "networking.k8s.io/v1",
            "IngressClass",
            "{controller: istio.io/ingress-controller}",
        ),
        ("multicluster.x-k8s.io/v1alpha1", "ServiceExport", "{}"),
        (
            "multicluster.x-k8s.io/v1alpha1",
            "ServiceImport",
            "{type: ClusterSetIP, ips: [10.0.0.1]}",
        ),
    ];
    for (version, kind, spec) in objects {
        let row = good(&format!(
            "apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a}}\nspec: {spec}"
        ));
        assert_eq!(row.kind().name(), kind);
        assert_eq!(row.key().namespace.is_empty(), row.kind().is_cluster_scoped(), "{kind}");
        assert_eq!(format!("{}/{}", row.kind().group(), row.kind().version()), version);
    }
}

#[test]
fn routes_keep_all_fields() {
    let text = "
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: a}
spec:
  hostnames: [a.com]
  rules:
  - matches:
    - {path: {type: Exact, value: /a}, headers: [{name: h, value: v}], queryParams: [{type: RegularExpression, name: q, value: .*}], method: GET}
    filters:
    - {type: RequestMirror, requestMirror: {backendRef: {name: m, port: 80}, fraction: {numerator: 1}}}
    - {type: RequestRedirect, requestRedirect: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /b}, statusCode: 301}}
    - {type: CORS, cors: {allowOrigins: ['*'], maxAge: 10}}
    timeouts: {request: 1s}
    retry: {codes: [503], attempts: 2, backoff: 1s}
";
    let Row::HttpRoute(route) = good(text) else {
        panic!("not an HTTPRoute");
    };
    let rule = &route.spec.rules[0];
    assert_eq!(rule.matches[0].path.as_ref().unwrap().value.as_deref(), Some("/a"));
    assert_eq!(
        rule.matches[0].query_params[0].match_type.as_deref(),
        Some("RegularExpression")
    );
    assert_eq!(rule.filters[0].request_mirror.as_ref().unwrap().backend_ref.name, "m");
    assert_eq!(
        rule.filters[1].request_redirect.as_ref().unwrap().status_code,
        Some(301)
    );
    assert_eq!(rule.filters[2].cors.as_ref().unwrap().max_age, Some(10));
    assert_eq!(rule.retry.as_ref().unwrap().codes, [503]);
}

#[test]
fn kinds_of_equal_names_are_distinguished() {
    let names: BTreeSet<_> = Kind::ALL.iter().map(|kind| (kind.group(), kind.name())).collect();
    let resources: BTreeSet<_> = Kind::ALL.iter().map(|kind| (kind.group(), kind.plural())).collect();
    assert_eq!((names.len(), resources.len()), (Kind::ALL.len(), Kind::ALL.len()));
    let custom = Kind::ALL.iter().filter(|kind| kind.is_custom()).count();
    assert_eq!(custom, 15 + 12 + 2, "Istio, Gateway API with inference, MCS");
    assert!(Kind::KubeGateway.counts_in_remote_clusters() && !Kind::HttpRoute.counts_in_remote_clusters());
    assert!(Kind::Pod.counts_in_remote_clusters() && !Kind::Gateway.counts_in_remote_clusters());
}

#[test]
fn r1_expressions_of_routes_have_limits() {
    let route = |kind: &str, matched: &str| {
        format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: {kind}\nmetadata: {{name: r, namespace: a}}\nspec: {{rules: [{{matches: [{matched}]}}]}}"
        )
    };
    let bomb = "(((x{1,99}){1,99}){1,99}){1,99}";
    good(&route("HTTPRoute", "{path: {type: RegularExpression, value: '/a.*'}}"));
    good(&route("HTTPRoute", "{path: {type: Exact, value: '/('}}"));
    for (kind, matched, field) in [
        (
            "HTTPRoute",
            format!("{{path: {{type: RegularExpression, value: '{bomb}'}}}}"),
            "path.value",
        ),
        (
            "HTTPRoute",
            format!(
                "{{headers: [{{name: h, type: RegularExpression, value: '{}'}}]}}",
                "a".repeat(1025)
            ),
            "headers[0].value",
        ),
        (
            "HTTPRoute",
            "{queryParams: [{name: h, type: RegularExpression, value: '('}]}".to_owned(),
            "queryParams[0].value",
        ),
        (
            "GRPCRoute",
            format!("{{method: {{type: RegularExpression, service: '{bomb}'}}}}"),
            "method.service",
        ),
    ] {
        let message = bad(&route(kind, &matched));
        assert!(
            message.contains(&format!("spec.rules[0].matches[0].{field}")),
            "{message}"
        );
    }
}
