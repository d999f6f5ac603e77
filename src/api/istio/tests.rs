mod admitted;

use super::*;
use crate::{
    api::{
        Kind,
        diagnostics::REFUSED,
        document::{self, ParsedDocument},
        yaml,
    },
    base::ClusterId,
};

/// Parses an object of a kind and a YAML `spec`.
fn parsed(kind: &str, spec: &str) -> ParsedDocument {
    let kind = Kind::ALL.iter().find(|known| known.name() == kind).unwrap();
    let version = kind.version();
    let text = format!(
        "apiVersion: {}/{version}\nkind: {}\nmetadata: {{name: a, namespace: ns}}\nspec: {spec}",
        kind.group(),
        kind.name()
    );
    let value = yaml::documents(&text)[0].parse().unwrap();
    document::parse(&ClusterId::new("c"), &value)
}

/// Parses an object. Returns its diagnostics as `severity field`, and true if it applies.
fn findings(kind: &str, spec: &str) -> (Vec<String>, bool) {
    let parsed = parsed(kind, spec);
    let line = |diagnostic: &Diagnostic| format!("{:?} {}", diagnostic.severity, diagnostic.field);
    (parsed.diagnostics.iter().map(line).collect(), !parsed.rows.is_empty())
}

#[track_caller]
fn good(kind: &str, spec: &str) {
    assert_eq!(findings(kind, spec), (Vec::new(), true), "{kind} {spec}");
}

#[track_caller]
fn bad(kind: &str, spec: &str, fields: &[&str]) {
    let want = fields.iter().map(|field| format!("Error spec{field}")).collect();
    assert_eq!(findings(kind, spec), (want, false), "{kind} {spec}");
}

#[track_caller]
fn warned(kind: &str, spec: &str, fields: &[&str]) {
    let want = fields.iter().map(|field| format!("Warning spec{field}")).collect();
    assert_eq!(findings(kind, spec), (want, true), "{kind} {spec}");
}

/// Asserts errors in a policy that applies nonetheless.
#[track_caller]
fn refused(kind: &str, spec: &str, fields: &[&str]) {
    let want = fields.iter().map(|field| format!("Error spec{field}")).collect();
    assert_eq!(findings(kind, spec), (want, true), "{kind} {spec}");
}

/// A route to host `a`.
const TO_A: &str = "route: [{destination: {host: a}}]";

/// Returns the spec of a VirtualService with one HTTP rule.
fn http(rule: &str) -> String {
    format!("{{hosts: [a], http: [{{{rule}}}]}}")
}

/// Returns the spec of a DestinationRule with a traffic policy.
fn policy(policy: &str) -> String {
    format!("{{host: a, trafficPolicy: {{{policy}}}}}")
}

/// A decoder of Protobuf refuses what API servers accept.
#[test]
fn r2_deeply_nested_values_are_errors() {
    let plugin = |depth: usize| {
        let nested = (0..depth).fold("{}".to_owned(), |inner, _| format!("{{a: {inner}}}"));
        format!("{{url: 'oci://example.com/a:1', pluginConfig: {nested}}}")
    };
    good("WasmPlugin", &plugin(30));
    bad("WasmPlugin", &plugin(40), &[""]);
}

#[test]
fn http_routes_are_checked_field_by_field() {
    good("VirtualService", &http(TO_A));
    good(
        "VirtualService",
        &http(&format!(
            "{TO_A}, match: [{{uri: {{prefix: ''}}, withoutHeaders: {{x: {{regex: '*'}}}}, queryParams: {{q: {{}}}}}}]"
        )),
    );
    warned(
        "VirtualService",
        &http(&format!("{TO_A}, timeout: 0s")),
        &[".http[0].timeout"],
    );
    bad(
        "VirtualService",
        &http("route: [{destination: {host: a}, weight: -1}, {weight: 1}]"),
        &[
            ".http[0].route[1].destination",
            ".http[0].route[0].weight",
            ".http[0].route",
        ],
    );
    bad(
        "VirtualService",
        &http("route: [{destination: {host: 'a b', port: {number: 70000}}}]"),
        &[
            ".http[0].route[0].destination.host",
            ".http[0].route[0].destination.port.number",
        ],
    );
    bad(
        "VirtualService",
        &http(&format!("{TO_A}, redirect: {{uri: /x}}")),
        &[".http[0]"],
    );
    bad(
        "VirtualService",
        &http(&format!("{TO_A}, timeout: soon")),
        &[".http[0].timeout"],
    );
    bad(
        "VirtualService",
        &http(&format!("{TO_A}, timeout: 10us")),
        &[".http[0].timeout"],
    );
    bad(
        "VirtualService",
        &http(&format!("{TO_A}, fault: {{abort: {{httpStatus: 99}}}}")),
        &[".http[0].fault.abort.httpStatus"],
    );
    bad(
        "VirtualService",
        &http("directResponse: {status: 1}"),
        &[".http[0].directResponse.status"],
    );
    warned(
        "VirtualService",
        &http(&format!("{TO_A}, timeouts: 1s")),
        &[".http[0].timeouts"],
    );
    warned("VirtualService", "{hosts: [a]}", &[""]);
}

#[test]
fn headers_of_http_routes() {
    good(
        "VirtualService",
        &http(&format!(
            "{TO_A}, headers: {{request: {{set: {{':authority': x}}, remove: [z]}}}}"
        )),
    );
    good(
        "VirtualService",
        &http(&format!("{TO_A}, headers: {{request: {{add: {{host: x}}}}}}")),
    );
    warned(
        "VirtualService",
        &http(&format!("{TO_A}, headers: {{request: {{remove: [':path', Host]}}}}")),
        &[
            ".http[0].headers.request.remove[0]",
            ".http[0].headers.request.remove[1]",
        ],
    );
    bad(
        "VirtualService",
        &http(&format!("{TO_A}, headers: {{request: {{add: {{\"x\\n\": z}}}}}}")),
        &[".http[0].headers.request.add"],
    );
    for (route, field) in [
        (
            "headers: {response: {set: {x: \"\\x01\"}}}",
            ".http[0].headers.response.set.x",
        ),
        (
            "headers: {request: {set: {x: '50%'}}}",
            ".http[0].headers.request.set.x",
        ),
        (
            "headers: {request: {set: {x: '%VERSION%'}}}",
            ".http[0].headers.request.set.x",
        ),
        (
            "headers: {response: {add: {x: '%REQ(y)'}}}",
            ".http[0].headers.response.add.x",
        ),
        (
            "rewrite: {authority: a}, headers: {request: {set: {host: b}}}",
            ".http[0]",
        ),
        (
            "headers: {request: {set: {host: b}, add: {':authority': c}}}",
            ".http[0]",
        ),
    ] {
        warned("VirtualService", &http(&format!("{TO_A}, {route}")), &[field]);
    }
    good(
        "VirtualService",
        &http(&format!(
            "{TO_A}, headers: {{request: {{set: {{x: '%REQ(y)% 50%%'}}}}}}"
        )),
    );
    good(
        "VirtualService",
        &http(&format!("{TO_A}, headers: {{request: {{set: {{x: \"a\\tb\"}}}}}}")),
    );
}

#[test]
fn server_names_of_tls_routes() {
    good(
        "VirtualService",
        "{hosts: ['*.a.com'], gateways: [ns/gw], tls: [{match: [{sniHosts: [x.a.com]}], route: [{destination: {host: a}}]}]}",
    );
    bad(
        "VirtualService",
        "{hosts: [a.com], tls: [{match: [{sniHosts: [b.com]}]}]}",
        &[".tls[0].match[0].sniHosts[0]", ".tls[0].route"],
    );
    warned(
        "VirtualService",
        "{hosts: [10.0.0.1], tls: [{match: [{sniHosts: [10.0.0.1]}], route: [{destination: {host: a}}]}]}",
        &[".tls[0].match[0].sniHosts[0]"],
    );
}

#[test]
fn hosts_that_a_wildcard_covers_are_warned_of() {
    let hosts = |hosts: &str| format!("{{hosts: [{hosts}], gateways: [gw], http: [{{{TO_A}}}]}}");
    good("VirtualService", &hosts("'*.a.com', a.com, '*.b.com', c.b.org"));
    warned("VirtualService", &hosts("'*.a.com', x.a.com"), &[".hosts[1]"]);
    warned("VirtualService", &hosts("'*.x.a.com', '*.a.com'"), &[".hosts[0]"]);
    warned("VirtualService", &hosts("a.com, '*'"), &[".hosts[0]"]);
}

#[test]
fn rules_that_are_never_reached_are_warned_of() {
    let rules = |rules: &[&str]| {
        let rules: Vec<String> = rules.iter().map(|rule| format!("{{{TO_A}, {rule}}}")).collect();
        format!("{{hosts: [a], http: [{}]}}", rules.join(", "))
    };
    let path = |prefix: &str, more: &str| format!("match: [{{uri: {{prefix: {prefix}}}{more}}}]");
    let (any, long) = (path("/a", ""), path("/a/b", ""));
    good("VirtualService", &rules(&[&long, &any, "name: rest"]));
    warned(
        "VirtualService",
        &rules(&["name: a", &any, "name: b"]),
        &[".http[1]", ".http[2]"],
    );
    warned(
        "VirtualService",
        &rules(&[&any, &path("/a", ", name: other")]),
        &[".http[1].match[0]", ".http[1]"],
    );
    warned("VirtualService", &rules(&[&any, &long]), &[".http[1].match[0]"]);
    let post = ", method: {exact: POST}";
    good("VirtualService", &rules(&[&path("/a", post), &long]));
    warned(
        "VirtualService",
        &rules(&[&path("/a", post), &path("/a/b", post)]),
        &[".http[1].match[0]"],
    );
    good(
        "VirtualService",
        &rules(&[&path("/a", ", headers: {x: {exact: y1}}"), &long]),
    );
}

/// Envoy refuses all routes of a port if one has such a value. Istio's validation accepts some of them.
#[test]
fn values_that_envoy_refuses_are_errors() {
    let long = "x".repeat(16_385);
    for (field, value) in [
        ("headers.request.set.x", "\"default-src 'self'\\n\""),
        ("headers.request.set.host", "\"a\\r\""),
        ("headers.response.add.x", "\"a\\0\""),
        ("headers.response.add.x", long.as_str()),
        ("rewrite.uri", "\"/\\n\""),
        ("rewrite.authority", "\"a\\n\""),
    ] {
        let (head, tail) = field.rsplit_once('.').unwrap();
        let nested = head.replace('.', ": {");
        let closing = "}".repeat(field.matches('.').count());
        let spec = format!("{{hosts: [a], http: [{{{TO_A}, {nested}: {{{tail}: {value}{closing}}}]}}");
        bad("VirtualService", &spec, &[&format!(".http[0].{field}")]);
    }
    let long_name = format!("{{hosts: [a], http: [{{{TO_A}, headers: {{request: {{remove: [{long}]}}}}}}]}}");
    bad("VirtualService", &long_name, &[".http[0].headers.request.remove[0]"]);
    let headers = |count: usize| {
        let all: Vec<String> = (0..count).map(|number| format!("x{number}: a")).collect();
        all.join(", ")
    };
    let adding = |direction: &str, of_route: usize, of_destination: usize| {
        let [add, set] = [of_route, of_destination].map(headers);
        format!(
            "{{hosts: [a], http: [{{headers: {{{direction}: {{add: {{{add}}}}}}}, \
             route: [{{destination: {{host: a}}, headers: {{{direction}: {{set: {{{set}}}}}}}}}]}}]}}"
        )
    };
    good("VirtualService", &adding("response", 500, 499));
    bad("VirtualService", &adding("response", 500, 500), &[".http[0].headers"]);
    good("VirtualService", &adding("request", 500, 500));
    bad("VirtualService", &adding("request", 500, 501), &[".http[0].headers"]);
    let weighted = |last: u32| {
        let most = [("a", 0x7fff_ffff), ("b", 0x7fff_ffff), ("c", last)];
        let routes = most.map(|(host, weight)| format!("{{destination: {{host: {host}}}, weight: {weight}}}"));
        format!("{{hosts: [a], http: [{{route: [{}]}}]}}", routes.join(", "))
    };
    good("VirtualService", &weighted(1));
    bad("VirtualService", &weighted(2), &[".http[0].route"]);
    for (redirect, field) in [
        ("uri: /x, redirectCode: 305", "redirectCode"),
        ("uri: \"/x\\n\"", "uri"),
        ("authority: \"x\\n\"", "authority"),
    ] {
        let spec = format!("{{hosts: [a], http: [{{redirect: {{{redirect}}}}}]}}");
        bad("VirtualService", &spec, &[&format!(".http[0].redirect.{field}")]);
    }
    for code in [301, 302, 303, 307, 308] {
        let spec = format!("{{hosts: [a], http: [{{redirect: {{uri: /x, redirectCode: {code}}}}}]}}");
        good("VirtualService", &spec);
    }
    for (matched, field) in [
        ("headers: {x: {prefix: ''}}", "headers.x"),
        ("withoutHeaders: {x: {prefix: ''}}", "withoutHeaders.x"),
        ("queryParams: {x: {prefix: ''}}", "queryParams.x"),
        ("queryParams: {'': {exact: x}}", "queryParams"),
        (
            "headers: {'@request.auth.claims.a': {}}",
            "headers.@request.auth.claims.a",
        ),
        (
            "headers: {'@request.auth.claims.a': {regex: '*'}}",
            "headers.@request.auth.claims.a.regex",
        ),
        (
            "headers: {'@request.auth.claims.a..b': {exact: x}}",
            "headers.@request.auth.claims.a..b",
        ),
        (
            "headers: {'@request.auth.claims': {exact: x}}",
            "headers.@request.auth.claims",
        ),
    ] {
        let spec = format!("{{hosts: [a], gateways: [gw], http: [{{match: [{{{matched}}}], {TO_A}}}]}}");
        bad("VirtualService", &spec, &[&format!(".http[0].match[0].{field}")]);
    }
    let claim = "match: [{headers: {'@Request.auth.claims.group': {exact: x}}}]";
    good(
        "VirtualService",
        &format!("{{hosts: [a], gateways: [gw], http: [{{{claim}, {TO_A}}}]}}"),
    );
}

/// Envoy refuses all endpoints or listeners that it is sent with such an address.
#[test]
fn paths_of_sockets_fit_in_an_address() {
    let entry = |path: &str| format!("{{address: 'unix://{path}'}}");
    let service = |path: &str| {
        let endpoint = entry(path);
        format!(
            "{{hosts: [a.com], resolution: STATIC, endpoints: [{endpoint}], \
             ports: [{{number: 80, name: http, protocol: HTTP}}]}}"
        )
    };
    let gateway = |path: &str| {
        let port = "port: {number: 0, name: http, protocol: HTTP}";
        format!("{{servers: [{{hosts: ['*'], bind: 'unix://{path}', {port}}}]}}")
    };
    let path = |length: usize| format!("/{}", "x".repeat(length - 1));
    for accepted in [path(107), "@a".to_owned()] {
        good("WorkloadEntry", &entry(&accepted));
        good("ServiceEntry", &service(&accepted));
        good("Gateway", &gateway(&accepted));
    }
    for refused in [path(108), String::new()] {
        bad("WorkloadEntry", &entry(&refused), &[".address"]);
        bad("ServiceEntry", &service(&refused), &[".endpoints[0].address"]);
        bad("Gateway", &gateway(&refused), &[".servers[0].bind"]);
    }
}

#[test]
fn r1_expressions_have_limits_in_every_field() {
    let bomb = "(((x{1,99}){1,99}){1,99}){1,99}";
    for (matched, field) in [
        (format!("uri: {{regex: '{bomb}'}}"), "uri.regex"),
        (format!("headers: {{x: {{regex: '{bomb}'}}}}"), "headers.x.regex"),
        (
            format!("queryParams: {{q: {{regex: '{}'}}}}", "a".repeat(1025)),
            "queryParams.q.regex",
        ),
        ("withoutHeaders: {x: {regex: '('}}".to_owned(), "withoutHeaders.x.regex"),
    ] {
        let spec = format!("{{hosts: [a], http: [{{match: [{{{matched}}}], {TO_A}}}]}}");
        bad("VirtualService", &spec, &[&format!(".http[0].match[0].{field}")]);
    }
    let spec = format!("{{hosts: [a], http: [{{{TO_A}, corsPolicy: {{allowOrigins: [{{regex: '{bomb}'}}]}}}}]}}");
    bad("VirtualService", &spec, &[".http[0].corsPolicy.allowOrigins[0].regex"]);
    let spec =
        format!("{{hosts: [a], http: [{{{TO_A}, rewrite: {{uriRegexRewrite: {{match: '{bomb}', rewrite: x}}}}}}]}}");
    bad("VirtualService", &spec, &[".http[0].rewrite.uriRegexRewrite.match"]);
    let patch = format!(
        "{{configPatches: [{{applyTo: CLUSTER, match: {{proxy: {{proxyVersion: '{bomb}'}}}}, patch: {{operation: REMOVE}}}}]}}"
    );
    bad("EnvoyFilter", &patch, &[".configPatches[0].match.proxy.proxyVersion"]);
    let patches = (0..300).map(|release| {
        format!("{{applyTo: CLUSTER, match: {{proxy: {{proxyVersion: '{release}'}}}}, patch: {{operation: REMOVE}}}}")
    });
    let patches = patches.collect::<Vec<_>>().join(",");
    let (found, counts) = findings("EnvoyFilter", &format!("{{configPatches: [{patches}]}}"));
    assert!(
        found.len() == 300 - 64 && !counts,
        "what is kept is not kept without end: {found:?}"
    );
    let matches = (0..300).map(|path| format!("{{uri: {{regex: '/{path}'}}}}"));
    let long = format!("{{uri: {{regex: '{}'}}}}", "a".repeat(1025));
    let invalid = "{uri: {regex: '/(?!a)'}}".to_owned();
    let matches = matches.chain([long, invalid]).collect::<Vec<_>>().join(",");
    bad(
        "VirtualService",
        &format!("{{hosts: [a], http: [{{match: [{matches}], {TO_A}}}]}}"),
        &[".http[0].match[300].uri.regex", ".http[0].match[301].uri.regex"],
    );
    let long = "a".repeat(8193);
    bad(
        "Telemetry",
        &format!("{{accessLogging: [{{filter: {{expression: {long}}}}}]}}"),
        &[".accessLogging[0].filter.expression"],
    );
}

/// Each gateway that sees a rule may request all of its credentials.
#[test]
fn r21_credentials_of_a_rule_are_limited() {
    let rule = |count: u32| {
        let port = |n: u32| format!("{{port: {{number: {n}}}, tls: {{mode: SIMPLE, credentialName: c{n}}}}}");
        let ports: Vec<String> = (1..=count).map(port).collect();
        let ports = ports.join(", ");
        format!("{{host: a.example.com, trafficPolicy: {{portLevelSettings: [{ports}]}}}}")
    };
    good("DestinationRule", &rule(1_000));
    bad("DestinationRule", &rule(1_001), &[""]);
}

/// Objects are found by each of their namespaces, and DestinationRules for a host are compared by them.
#[test]
fn r21_namespaces_of_an_object_are_limited() {
    let ports = "ports: [{number: 80, name: http, protocol: HTTP}]";
    for (kind, fields) in [
        ("DestinationRule", "host: a.example.com".to_owned()),
        ("VirtualService", format!("hosts: [a], http: [{{{TO_A}}}]")),
        (
            "ServiceEntry",
            format!("hosts: [a.example.com], resolution: DNS, {ports}"),
        ),
    ] {
        let exported = |count: u32| {
            let names: Vec<String> = (1..=count).map(|n| format!("n{n}")).collect();
            format!("{{{fields}, exportTo: [{}]}}", names.join(", "))
        };
        good(kind, &exported(4_000));
        bad(kind, &exported(4_001), &[".exportTo"]);
    }
}

/// Each identity that an EnvoyFilter applies to has a resource for every credential.
#[test]
fn r21_credentials_of_an_envoy_filter_are_limited() {
    let filter = |names: &[String]| {
        let names = names.join(", ");
        format!(
            "{{configPatches: [{{applyTo: CLUSTER, patch: {{operation: ADD, value: {{name: x, metadata:
                {{filter_metadata: {{m: {{names: [{names}]}}}}}}}}}}}}]}}"
        )
    };
    let names = |count: u32| -> Vec<String> { (0..count).map(|n| format!("'kubernetes://s{n}'")).collect() };
    let twice = [names(1_000), names(1_000)].concat();
    warned("EnvoyFilter", &filter(&twice), &[""]);
    bad("EnvoyFilter", &filter(&names(1_001)), &[""]);
    let named = |len: usize| vec![format!("'configmap://{}'", "a".repeat(len - "configmap://".len()))];
    warned("EnvoyFilter", &filter(&named(1_024)), &[""]);
    bad("EnvoyFilter", &filter(&named(1_025)), &[""]);
}

#[test]
fn subsets_of_destination_rules_have_names_and_labels() {
    good(
        "DestinationRule",
        "{host: a, subsets: [{name: v1, labels: {version: v1}}], trafficPolicy: {tls: {mode: ISTIO_MUTUAL}}}",
    );
    bad(
        "DestinationRule",
        "{subsets: [{name: v1}, {name: v1}, {labels: {'a b': c}}]}",
        &[".host", ".subsets[1].name", ".subsets[2].name", ".subsets[2].labels"],
    );
}

#[test]
fn traffic_policies_are_checked_field_by_field() {
    warned("DestinationRule", &policy(""), &[".trafficPolicy"]);
    bad(
        "DestinationRule",
        &policy("connectionPool: {http: {maxRetries: -1}}"),
        &[".trafficPolicy.connectionPool.http.maxRetries"],
    );
    bad(
        "DestinationRule",
        &policy("loadBalancer: {simple: FASTEST}"),
        &[".trafficPolicy.loadBalancer.simple"],
    );
    bad(
        "DestinationRule",
        &policy("tls: {mode: MUTUAL}"),
        &[".trafficPolicy.tls.clientCertificate", ".trafficPolicy.tls.privateKey"],
    );
    bad(
        "DestinationRule",
        &policy("portLevelSettings: [{tls: {mode: SIMPLE}}]"),
        &[".trafficPolicy.portLevelSettings[0].port"],
    );
    let warmup = |window: &str| policy(&format!("loadBalancer: {{warmupDurationSecs: {window}}}"));
    for window in ["0s", "0.0005s", "30.0001s"] {
        good("DestinationRule", &warmup(window));
    }
    let field = ".trafficPolicy.loadBalancer.warmupDurationSecs";
    bad("DestinationRule", &warmup("-1s"), &[field]);
    let server_name = |length: usize| policy(&format!("tls: {{mode: SIMPLE, sni: {}}}", "x".repeat(length)));
    good("DestinationRule", &server_name(255));
    bad("DestinationRule", &server_name(256), &[".trafficPolicy.tls.sni"]);
}

#[test]
fn consistent_hashes_have_keys_and_sizes_that_envoy_accepts() {
    let hash = |hash: &str| policy(&format!("loadBalancer: {{consistentHash: {{{hash}}}}}"));
    let text = "x".repeat(1024);
    good("DestinationRule", &hash(&format!("httpHeaderName: {text}")));
    let ring = |size: u32| hash(&format!("useSourceIp: true, ringHash: {{minimumRingSize: {size}}}"));
    good("DestinationRule", &ring(8_388_608));
    for (spec, field) in [
        (hash("maglev: {tableSize: 10}, useSourceIp: true"), "maglev.tableSize"),
        (ring(8_388_609), "ringHash.minimumRingSize"),
        (hash("httpQueryParameterName: ''"), "httpQueryParameterName"),
        (
            hash("httpCookie: {name: c, ttl: 1s, attributes: [{name: a, value: \"b\\n\"}]}"),
            "httpCookie.attributes[0].value",
        ),
        (hash(&format!("httpHeaderName: x{text}")), "httpHeaderName"),
        (
            hash(&format!("httpQueryParameterName: x{text}")),
            "httpQueryParameterName",
        ),
        (
            hash(&format!("httpCookie: {{name: c, ttl: 1s, path: /{text}}}")),
            "httpCookie",
        ),
        (
            hash(&format!(
                "httpCookie: {{name: c, ttl: 1s, attributes: [{{name: a, value: {text}}}]}}"
            )),
            "httpCookie",
        ),
    ] {
        let field = format!(".trafficPolicy.loadBalancer.consistentHash.{field}");
        bad("DestinationRule", &spec, &[&field]);
    }
}

#[test]
fn locality_settings_have_limits() {
    let at = |field: &str| format!(".trafficPolicy.loadBalancer.localityLbSetting.{field}");
    let distribute = "outlierDetection: {}, loadBalancer: {localityLbSetting: {distribute: [{from: a/*, to: {b/*: 50, 'c/*': 49}}]}}";
    bad("DestinationRule", &policy(distribute), &[&at("distribute[0].to")]);
    // `N` in an item stands for its number.
    let locality = |field: &str, count: usize, item: &str| {
        let items = (0..count).map(|number| item.replace('N', &number.to_string()));
        let list = items.collect::<Vec<_>>().join(", ");
        let setting = format!("loadBalancer: {{localityLbSetting: {{{field}: [{list}]}}}}");
        policy(&format!("outlierDetection: {{}}, {setting}"))
    };
    for (field, limit, item) in [
        ("failoverPriority", 256, "lN"),
        ("failover", 1000, "{from: rN, to: s}"),
        ("distribute", 1000, "{from: rN, to: {s: 100}}"),
    ] {
        good("DestinationRule", &locality(field, limit, item));
        bad("DestinationRule", &locality(field, limit + 1, item), &[&at(field)]);
    }
    let text = "x".repeat(513);
    for (field, item, place) in [
        ("failoverPriority", text.clone(), "failoverPriority[0]"),
        ("failover", format!("{{from: {text}, to: s}}"), "failover[0].from"),
        ("failover", format!("{{from: s, to: {text}}}"), "failover[0].to"),
        (
            "distribute",
            format!("{{from: {text}, to: {{s: 100}}}}"),
            "distribute[0].from",
        ),
    ] {
        bad("DestinationRule", &locality(field, 1, &item), &[&at(place)]);
    }
}

#[test]
fn servers_of_gateways_have_ports_and_certificates() {
    let server = |server: &str| format!("{{servers: [{{hosts: ['*'], {server}}}]}}");
    good(
        "Gateway",
        &server("port: {number: 443, protocol: HTTPS, name: https}, tls: {mode: SIMPLE, credentialName: c}"),
    );
    good(
        "Gateway",
        "{servers: [{hosts: [10.0.0.1, ns/10.0.0.2], port: {number: 80, protocol: HTTP, name: http}}]}",
    );
    bad("Gateway", "{servers: []}", &[".servers"]);
    bad(
        "Gateway",
        &server("port: {number: 0, protocol: HTTP, name: http}"),
        &[".servers[0].port.number"],
    );
    bad(
        "Gateway",
        &server("port: {number: 443, protocol: HTTPS, name: https}"),
        &[".servers[0].tls"],
    );
    bad(
        "Gateway",
        &server("port: {number: 443, protocol: HTTPS, name: https}, tls: {mode: MUTUAL}"),
        &[
            ".servers[0].tls.serverCertificate",
            ".servers[0].tls.privateKey",
            ".servers[0].tls.caCertificates",
        ],
    );
    let named = "tls: {mode: SIMPLE, credentialName: c, subjectAltNames: [a]}";
    warned(
        "Gateway",
        &server(&format!("port: {{number: 443, protocol: HTTPS, name: https}}, {named}")),
        &[".servers[0].tls.subjectAltNames"],
    );
}

#[test]
fn hosts_and_addresses_of_service_entries_are_checked() {
    good(
        "ServiceEntry",
        "{hosts: [a.com], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}",
    );
    bad(
        "ServiceEntry",
        "{hosts: ['*'], addresses: [x], ports: [{number: 0, name: http}]}",
        &[".hosts[0]", ".addresses[0]", ".ports[0].number"],
    );
    bad(
        "ServiceEntry",
        "{hosts: [a.com], resolution: STATIC, endpoints: [{address: b.com}]}",
        &[".endpoints[0].address"],
    );
    warned(
        "ServiceEntry",
        "{hosts: ['*.a.com'], resolution: DNS, ports: [{number: 80, name: http}]}",
        &[".hosts[0]"],
    );
}

#[test]
fn workload_entries_need_addresses_and_groups_need_templates() {
    good(
        "WorkloadEntry",
        "{address: 10.0.0.1, ports: {http: 8080}, labels: {app: a}}",
    );
    bad("WorkloadEntry", "{ports: {http: 99999}}", &[".address", ".ports.http"]);
    bad("WorkloadGroup", "{probe: {}}", &[".template", ".probe"]);
}

#[test]
fn ingress_listeners_lead_to_the_own_workload() {
    good(
        "Sidecar",
        "{ingress: [{port: {number: 80, protocol: HTTP, name: h}, defaultEndpoint: '127.0.0.1:8080'}]}",
    );
    let ingress = |endpoint: &str| {
        format!("{{ingress: [{{port: {{number: 80, protocol: HTTP, name: h}}, defaultEndpoint: '{endpoint}'}}]}}")
    };
    for endpoint in [":8080", "[0.0.0.0]:8080", "[127.0.0.1]:8080", "[::1]:8080"] {
        good("Sidecar", &ingress(endpoint));
    }
    for endpoint in [
        "::1:8080",
        "[0.0.0.0:8080",
        "127.0.0.1:http",
        "127.0.0.1:0",
        "127.0.0.1",
    ] {
        bad("Sidecar", &ingress(endpoint), &[".ingress[0].defaultEndpoint"]);
    }
    bad(
        "Sidecar",
        "{ingress: [{defaultEndpoint: '10.0.0.1:8080'}]}",
        &[".ingress[0].port", ".ingress[0].defaultEndpoint"],
    );
}

#[test]
fn egress_listeners_name_hosts_once() {
    good("Sidecar", "{egress: [{hosts: ['./*', 'istio-system/*']}]}");
    good("Sidecar", "{egress: [{bind: 10.0.0.1, hosts: ['./*']}]}");
    bad(
        "Sidecar",
        "{egress: [{hosts: [a]}, {port: {number: 80}}]}",
        &[".egress[0].hosts[0]", ".egress[1].hosts", ".egress[0]"],
    );
    let egress = |hosts: &str| format!("{{egress: [{{hosts: [{hosts}]}}]}}");
    good("Sidecar", &egress("./*, istio-system/*, '*/a.com'"));
    warned("Sidecar", &egress("./a.b, ns/a.b"), &[".egress[0].hosts[1]"]);
    warned("Sidecar", &egress("x/*, x/a.b"), &[".egress[0].hosts[1]"]);
    warned("Sidecar", &egress("x/a.b, x/*"), &[".egress[0].hosts[1]"]);
    warned("Sidecar", &egress("'*/*', x/a.b"), &[".egress[0].hosts"]);
}

#[test]
fn r21_listeners_of_sidecars_are_limited() {
    let sidecar = |count: usize| {
        let listener = |port| format!("{{port: {{number: {port}, protocol: HTTP_PROXY, name: p}}, hosts: ['*/*']}}");
        let listeners: Vec<String> = (1..=count).map(listener).collect();
        format!("{{egress: [{}]}}", listeners.join(", "))
    };
    good("Sidecar", &sidecar(256));
    bad("Sidecar", &sidecar(257), &[".egress"]);
    let sidecar = |count: usize| {
        let listener = |port| format!("{{port: {{number: {port}, protocol: TCP, name: p}}, defaultEndpoint: ':80'}}");
        let listeners: Vec<String> = (1..=count).map(listener).collect();
        format!("{{ingress: [{}]}}", listeners.join(", "))
    };
    good("Sidecar", &sidecar(1000));
    bad("Sidecar", &sidecar(1001), &[".ingress"]);
}

#[test]
fn r21_ports_of_a_peer_authentication_are_limited() {
    let policy = |count: u32| {
        let ports: Vec<String> = (1..=count).map(|port| format!("{port}: {{mode: STRICT}}")).collect();
        let ports = ports.join(", ");
        format!("{{selector: {{matchLabels: {{app: a}}}}, portLevelMtls: {{{ports}}}}}")
    };
    good("PeerAuthentication", &policy(1_000));
    refused("PeerAuthentication", &policy(1_001), &[".portLevelMtls"]);
}

#[test]
fn authorization_policies_apply_with_errors() {
    good(
        "AuthorizationPolicy",
        "{rules: [{from: [{source: {namespaces: [a]}}], to: [{operation: {paths: ['/a/{*}/b/{**}'], ports: ['0']}}]}]}",
    );
    refused(
        "AuthorizationPolicy",
        "{rules: [{from: [{}], to: [{operation: {ports: [http, '+80'], paths: ['/{**}/{*}', '/{*}/a*', '/a{b']}}], \
         when: [{key: x, values: [z]}, {key: 'request.headers[]', values: [z]}, {key: source.user, values: [z]}]}]}",
        &[
            ".rules[0].from[0].source",
            ".rules[0].to[0].operation.ports[0]",
            ".rules[0].to[0].operation.ports[1]",
            ".rules[0].to[0].operation.paths[0]",
            ".rules[0].to[0].operation.paths[1]",
            ".rules[0].to[0].operation.paths[2]",
            ".rules[0].when[0].key",
            ".rules[0].when[1].key",
            ".rules[0].when[2].key",
        ],
    );
    refused(
        "AuthorizationPolicy",
        "{rules: [{from: [{source: {serviceAccounts: ['a/b/c', 'a*', '/a'], notTrustDomains: ['a*b', 'a/b']}}]}]}",
        &[
            ".rules[0].from[0].source.serviceAccounts[0]",
            ".rules[0].from[0].source.serviceAccounts[1]",
            ".rules[0].from[0].source.serviceAccounts[2]",
            ".rules[0].from[0].source.notTrustDomains[0]",
            ".rules[0].from[0].source.notTrustDomains[1]",
        ],
    );
    refused(
        "AuthorizationPolicy",
        "{action: CUSTOM, rules: [{from: [{source: {requestPrincipals: [a]}}]}]}",
        &[".provider", ".rules[0].from[0].source.requestPrincipals"],
    );
    refused("AuthorizationPolicy", "{action: DENY}", &[".rules"]);
    warned("AuthorizationPolicy", "{}", &[""]);
}

/// On TCP ports, such a rule denies every connection.
#[test]
fn deny_rules_without_conditions_on_connections_are_warned_of() {
    let denied = |rule: &str| format!("{{action: DENY, rules: [{{{rule}}}]}}");
    let (get, to_port) = (
        "to: [{operation: {methods: [GET]}}]",
        "to: [{operation: {ports: ['80']}}]",
    );
    warned("AuthorizationPolicy", &denied(get), &[".rules[0]"]);
    good("AuthorizationPolicy", &denied(to_port));
    good("AuthorizationPolicy", &denied("from: [{source: {namespaces: [a]}}]"));
}

#[test]
fn authentication_policies_apply_with_errors() {
    refused(
        "RequestAuthentication",
        "{selector: {matchLabels: {a: b}}, targetRefs: [{kind: Pod, name: a, namespace: b}]}",
        &["", ".targetRefs[0].namespace", ".targetRefs[0]"],
    );
    refused(
        "PeerAuthentication",
        "{selector: {matchLabels: {app: a}}, portLevelMtls: {0: {mode: STRICT}}}",
        &[".portLevelMtls"],
    );
    bad("PeerAuthentication", "{mtls: {mode: SOMETIMES}}", &[".mtls.mode"]);
    refused(
        "RequestAuthentication",
        "{jwtRules: [{}, {jwksUri: 'ftp://a'}, {issuer: a, jwks: '{}'}]}",
        &[".jwtRules[0].issuer", ".jwtRules[1].jwksUri", ".jwtRules[2].jwks"],
    );
    good("RequestAuthentication", "{jwtRules: [{jwksUri: 'HTTPS://a/keys'}]}");
}

#[test]
fn keys_of_tokens_are_checked() {
    let with_keys = |keys: &str| format!("{{jwtRules: [{{issuer: a, jwks: '{keys}'}}]}}");
    let rsa = r#"{"kty": "RSA", "n": "AQAB", "e": "AQAB"}"#;
    for keys in ["", rsa, r#"{"kty": "OKP", "crv": "Ed25519", "x": "AA"}"#] {
        good("RequestAuthentication", &with_keys(&format!(r#"{{"keys": [{keys}]}}"#)));
    }
    warned(
        "RequestAuthentication",
        &with_keys(r#"{"kty": "oct", "k": "AAAA"}"#),
        &[".jwtRules[0].jwks"],
    );
    refused(
        "RequestAuthentication",
        &with_keys(r#"{"kty": "EC"}"#),
        &[".jwtRules[0].jwks"],
    );
    for key in [
        r#"{"kty": "RSA", "n": "AQAB"}"#,
        r#"{"kty": "EC", "crv": "P-256", "x": "AA"}"#,
        r#"{"kty": "future"}"#,
        r#""a""#,
    ] {
        let keys = format!(r#"{{"keys": [{rsa}, {key}]}}"#);
        refused("RequestAuthentication", &with_keys(&keys), &[".jwtRules[0].jwks"]);
    }
}

#[test]
fn telemetry_and_extensions() {
    bad(
        "Telemetry",
        "{tracing: [{randomSamplingPercentage: 101}], accessLogging: [{filter: {expression: 'a(\"b'}}]}",
        &[
            ".tracing[0].randomSamplingPercentage",
            ".accessLogging[0].filter.expression",
        ],
    );
    good(
        "Telemetry",
        "{accessLogging: [{filter: {expression: \"response.code >= 400 && m['a)'] == \\\"x\\\"\"}}]}",
    );
    bad("ProxyConfig", "{concurrency: -1}", &[".concurrency"]);
    warned("WasmPlugin", "{url: 'ftp://a', sha256: xyz}", &[".url", ".sha256"]);
    bad("WasmPlugin", "{url: ':5000a'}", &[".url"]);
    good("WasmPlugin", "{url: 'oci://a/b:v1', phase: AUTHN}");
    bad("TrafficExtension", "{lua: {inlineCode: ''}}", &[".lua.inlineCode"]);
    bad("TrafficExtension", "{wasm: {url: a}, lua: {inlineCode: b}}", &[".wasm"]);
    bad(
        "EnvoyFilter",
        "{configPatches: [{patch: {}}]}",
        &[
            ".configPatches[0].applyTo",
            ".configPatches[0].patch.operation",
            ".configPatches[0].patch.value",
        ],
    );
}

/// Istio accepts these objects.
#[test]
fn unusual_names_and_expressions_are_accepted() {
    good(
        "DestinationRule",
        "{host: a, trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: ':authority'}}}}",
    );
    // A short name.
    warned(
        "ServiceEntry",
        "{hosts: ['123'], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}",
        &[".hosts[0]"],
    );
    good("VirtualService", &format!("{{hosts: ['123'], http: [{{{TO_A}}}]}}"));
    let regex = r"match: [{uri: {regex: '/\101'}}]";
    good(
        "VirtualService",
        &format!("{{hosts: [a], http: [{{{regex}, {TO_A}}}]}}"),
    );
}

/// Serving these objects is safe, but Istio's admission refuses them.
#[test]
fn admission_refuses_more_than_parsing() {
    let refused = |kind: &str, spec: &str, field: &str| {
        let parsed = parsed(kind, spec);
        let codes: Vec<_> = parsed
            .diagnostics
            .iter()
            .map(|found| (found.code.as_str(), found.field.as_str()))
            .collect();
        assert!(codes.contains(&(REFUSED, field)), "{kind} {spec}: {codes:?}");
        assert_eq!(parsed.rows.len(), 1, "{kind} {spec}");
    };
    let route = "route: [{destination: {host: a}}]";
    for (rest, field) in [
        ("retries: {attempts: 1, retryOn: never}", "spec.http[0].retries.retryOn"),
        (
            "headers: {response: {set: {host: x}}}",
            "spec.http[0].headers.response.set",
        ),
    ] {
        let spec = format!("{{hosts: [a], http: [{{{route}, {rest}}}]}}");
        refused("VirtualService", &spec, field);
    }
    refused("VirtualService", "{hosts: [a]}", "spec");
    refused("DestinationRule", "{host: a, exportTo: [b, b]}", "spec.exportTo[1]");
    let distribute = "[{from: 'a/*', to: {c: 100}}, {from: a/b, to: {d: 50, d/e: 50}}]";
    let spec = policy(&format!(
        "loadBalancer: {{localityLbSetting: {{distribute: {distribute}}}}}"
    ));
    let at = "spec.trafficPolicy.loadBalancer.localityLbSetting.distribute[1]";
    refused("DestinationRule", &spec, &format!("{at}.from"));
    refused("DestinationRule", &spec, &format!("{at}.to.d/e"));
    let port = "port: {number: 80, name: http, protocol: HTTP}";
    let gateway = |host: &str| format!("{{servers: [{{hosts: [{host}], {port}}}]}}");
    refused("Gateway", &gateway("short"), "spec.servers[0].hosts[0]");
    refused("Gateway", &gateway("a.com, 'ns/*a.com'"), "spec.servers[0].hosts[1]");
    refused(
        "Sidecar",
        "{egress: [{hosts: ['*/*a.com']}]}",
        "spec.egress[0].hosts[0]",
    );
    good("Gateway", &gateway("'*'"));
    let entry = |protocol: &str| {
        format!("{{hosts: [a.b, c.d], resolution: DNS, ports: [{{number: 80, name: p, protocol: {protocol}}}]}}")
    };
    refused("ServiceEntry", &entry("TCP"), "spec.ports[0].protocol");
    good("ServiceEntry", &entry("HTTP"));
    let socket = "{address: 'unix:///a/'}";
    refused("WorkloadEntry", socket, "spec.address");
    refused("WorkloadEntry", "{address: 10.0.0.1, ports: {'': 80}}", "spec.ports");
    let patch = |apply_to: &str, more: &str| format!("{{configPatches: [{{applyTo: {apply_to}, {more}}}]}}");
    let value = "spec.configPatches[0].patch.value";
    let add = |value: &str| format!("patch: {{operation: ADD, value: {value}}}");
    let typed = |name: &str| {
        add(&format!(
            "{{name: x, typed_config: {{'@type': type.googleapis.com/{name}}}}}"
        ))
    };
    let v2 = typed("envoy.config.filter.http.lua.v2.Lua");
    refused("EnvoyFilter", &patch("HTTP_FILTER", &v2), value);
    refused("EnvoyFilter", &patch("CLUSTER", &add("{connect_timeout: abc}")), value);
    refused("EnvoyFilter", &patch("HTTP_FILTER", &add("{typed_config: {}}")), value);
    // Istio knows the types of contributed extensions, and does not check patches of waypoints.
    let unknown = typed("envoy.extensions.filters.http.golang.v3alpha.Config");
    let place = ".configPatches[0].patch.value";
    let of_waypoints = format!("match: {{context: WAYPOINT}}, {v2}");
    for more in [&unknown, &of_waypoints] {
        warned("EnvoyFilter", &patch("HTTP_FILTER", more), &[place, ""]);
    }
    // Of two members of a oneof, and of two spellings, Istio takes one.
    for ambiguous in [
        "{type: EDS, cluster_type: {name: a}}",
        "{connect_timeout: 1s, connectTimeout: 2s}",
    ] {
        warned("EnvoyFilter", &patch("CLUSTER", &add(ambiguous)), &[place, ""]);
    }
    let matched = |filter: &str, context: &str| {
        let filter = format!("{{listener: {{filterChain: {{filter: {{{filter}}}}}}}, context: {context}}}");
        format!("match: {filter}, patch: {{operation: REMOVE}}")
    };
    let (unnamed, tcp) = ("", "name: envoy.tcp_proxy, subFilter: {name: x}");
    let name = "spec.configPatches[0].match.listener.filterChain.filter.name";
    for (apply_to, filter) in [("NETWORK_FILTER", unnamed), ("HTTP_FILTER", tcp)] {
        refused("EnvoyFilter", &patch(apply_to, &matched(filter, "ANY")), name);
        let of_waypoints = patch(apply_to, &matched(filter, "WAYPOINT"));
        warned("EnvoyFilter", &of_waypoints, &[""]);
    }
    for filter in [unnamed, tcp, "subFilter: {}"] {
        let of_listeners = patch("LISTENER_FILTER", &matched(filter, "ANY"));
        warned("EnvoyFilter", &of_listeners, &[""]);
    }
}
