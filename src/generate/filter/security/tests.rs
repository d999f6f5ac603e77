//! Rules as policies of Envoy, without a mesh around them.

use prost::Message;
use serde_json::{Value, json};

use super::{
    Excess, Traffic,
    item::{Leniency, RuleContext},
    rule::{self, Skipped},
    trust_domain::MeshTrustDomains,
};
use crate::{
    base::Namespace,
    generate::filter::PeerSource,
    proto::{
        envoy::config::rbac::v3::Policy,
        istio::{mesh::v1alpha1::MeshConfig, security::v1beta1::Rule},
        json::{self, Unknown},
    },
};

const HTTP: (Traffic, Leniency) = (Traffic::Http, Leniency::SkipRule);

fn mesh() -> MeshConfig {
    MeshConfig {
        trust_domain: "new".to_owned(),
        trust_domain_aliases: vec!["old".to_owned()],
        ..Default::default()
    }
}

fn policy(rule: &Value, (traffic, leniency): (Traffic, Leniency)) -> Result<Policy, Skipped> {
    let mesh = mesh();
    let context = RuleContext {
        traffic,
        peer_source: PeerSource::Tls,
        namespace: &Namespace::new("own"),
        leniency,
    };
    let rule: Rule = json::from_json(rule, Unknown::Deny).expect("a rule");
    rule::policy(&rule, &MeshTrustDomains::of(&mesh), &context)
}

/// The items of the first alternative of each side.
fn items(rule: &Value, place: (Traffic, Leniency)) -> (Value, Value) {
    let policy = json::to_json(&policy(rule, place).expect("a policy"));
    (
        policy["permissions"][0]["andRules"]["rules"].clone(),
        policy["principals"][0]["andIds"]["ids"].clone(),
    )
}

fn from(source: Value) -> Value {
    json!({"from": [{"source": source}]})
}

fn peers(names: &[Value]) -> Value {
    let peers = names
        .iter()
        .map(|name| json!({"authenticated": {"principalName": name}}));
    json!({"orIds": {"ids": peers.collect::<Vec<_>>()}})
}

fn regex(regex: &str) -> Value {
    json!({"safeRegex": {"regex": regex}})
}

#[test]
fn an_empty_rule_always_matches() {
    assert_eq!(
        items(&json!({}), HTTP),
        (json!([{"any": true}]), json!([{"any": true}]))
    );
}

#[test]
fn principals_count_in_every_trust_domain_of_the_mesh() {
    let names = [
        "cluster.local/ns/a/sa/b",
        "*ew/ns/a/sa/c",
        "foreign/ns/a/sa/d",
        "*/ns/a/sa/e",
        "o*/ns/a/sa/f",
    ];
    let expected = peers(&[
        json!({"exact": "spiffe://new/ns/a/sa/b"}),
        json!({"exact": "spiffe://old/ns/a/sa/b"}),
        regex("spiffe://.*ew/ns/a/sa/c"),
        json!({"exact": "spiffe://old/ns/a/sa/c"}),
        json!({"exact": "spiffe://foreign/ns/a/sa/d"}),
        regex("spiffe://.*/ns/a/sa/e"),
        json!({"exact": "spiffe://new/ns/a/sa/f"}),
        json!({"exact": "spiffe://old/ns/a/sa/f"}),
    ]);
    assert_eq!(items(&from(json!({"principals": names})), HTTP).1, json!([expected]));
}

#[test]
fn names_inside_identities_are_no_expressions() {
    let source = json!({"serviceAccounts": ["a.b", "n/c"], "notNamespaces": ["x.*"], "trustDomains": ["t.*", "new"]});
    let expected = json!([
        peers(&[
            regex(r"spiffe://.+/ns/own/(.+/|)sa/a\.b(/.+)?"),
            regex("spiffe://.+/ns/n/(.+/|)sa/c(/.+)?"),
        ]),
        peers(&[
            regex(r"spiffe://t\.[^/]*/.*"),
            json!({"prefix": "spiffe://new/"}),
            json!({"prefix": "spiffe://old/"}),
        ]),
        {"notId": peers(&[regex(r".*/ns/x\..*/.*")])},
    ]);
    assert_eq!(items(&from(source), HTTP).1, expected);
}

#[test]
fn conditions_follow_the_items_of_every_alternative() {
    let rule = json!({
        "to": [{"operation": {"paths": ["/a/{*}"]}}, {"operation": {"notMethods": ["P*"]}}],
        "when": [{"key": "destination.port", "values": ["80"]}, {"key": "request.headers[x]", "values": ["*"]}],
    });
    let policy = json::to_json(&policy(&rule, HTTP).expect("a policy"));
    let port = json!({"orRules": {"rules": [{"destinationPort": 80}]}});
    let second = &policy["permissions"][1]["andRules"]["rules"];
    let method = json!({"header": {"name": ":method", "stringMatch": {"prefix": "P"}}});
    assert_eq!(second, &json!([{"notRule": {"orRules": {"rules": [method]}}}, port]));
    let first = &policy["permissions"][0]["andRules"]["rules"];
    let template = &first[0]["orRules"]["rules"][0]["uriTemplate"]["typedConfig"]["pathTemplate"];
    assert_eq!((template, &first[1]), (&json!("/a/*"), &port));
    let header = json!({"header": {"name": "x", "presentMatch": true}});
    let ids = &policy["principals"][0]["andIds"]["ids"];
    assert_eq!(ids, &json!([{"orIds": {"ids": [header]}}]));
}

#[test]
fn http_attributes_on_tcp_never_allow_more() {
    let rule = json!({
        "from": [{"source": {"namespaces": ["n"], "requestPrincipals": ["i/s"]}}],
        "to": [{"operation": {"methods": ["GET"]}}],
    });
    let skipped = policy(&rule, (Traffic::Tcp, Leniency::SkipRule));
    assert_eq!(skipped, Err(Skipped::NotApplicable));
    let (permissions, principals) = items(&rule, (Traffic::Tcp, Leniency::DropItem));
    assert_eq!(permissions, json!([{"any": true}]));
    assert_eq!(principals, json!([peers(&[regex(".*/ns/n/.*")])]));
    let unreadable = json!({"when": [{"key": "request.headers[x", "values": ["a"]}]});
    assert_eq!(policy(&unreadable, HTTP), Err(Skipped::NotApplicable));
}

#[test]
fn an_unknown_condition_skips_its_rule() {
    let rule = json!({"when": [{"key": "source.mood", "values": ["good"]}]});
    let skipped = policy(&rule, (Traffic::Http, Leniency::DropItem));
    assert_eq!(skipped, Err(Skipped::UnknownKey("source.mood".to_owned())));
}

#[test]
fn claims_are_texts_or_lists() {
    let rule = json!({"when": [{"key": "request.auth.claims[a][b.c]", "notValues": ["v"]}]});
    let text = json!({"stringMatch": {"exact": "v"}});
    let expected = json!({"notId": {"metadata": {
        "filter": "envoy.filters.http.jwt_authn",
        "path": [{"key": "payload"}, {"key": "a"}, {"key": "b.c"}],
        "value": {"orMatch": {"valueMatchers": [{"listMatch": {"oneOf": text}}, text]}},
    }}});
    assert_eq!(items(&rule, HTTP).1, json!([expected]));
}

#[test]
fn values_that_envoy_would_reject_are_omitted() {
    let operation = |field: &str, value: &str| {
        let mut operation = json!({});
        operation[field] = json!([value]);
        json!({"to": [{"operation": operation}]})
    };
    let condition = |key: &str| json!({"when": [{"key": key, "values": ["v"]}]});
    let long = format!("/{{*}}/{}", "x".repeat(300));
    let longer = format!("*{}", "x".repeat(1024));
    let rules = [
        from(json!({"principals": [longer]})),
        from(json!({"notNamespaces": [longer]})),
        operation("paths", "{*}/a"),
        operation("paths", "/a*/{*}"),
        operation("paths", "/{**}/{*}"),
        operation("paths", "/{*}//a"),
        operation("paths", &long),
        operation("ports", "+80"),
        operation("ports", "65536"),
        condition("request.headers[]"),
        condition("request.headers[a\nb]"),
        condition("request.auth.claims[a][]"),
        condition("experimental.envoy.filters.a[]"),
    ];
    for rule in rules {
        assert_eq!(policy(&rule, HTTP), Err(Skipped::NotApplicable), "{rule}");
        // A policy that denies does so without looking at it.
        let (permissions, principals) = items(&rule, (Traffic::Http, Leniency::DropItem));
        assert_eq!(
            (permissions, principals),
            (json!([{"any": true}]), json!([{"any": true}])),
            "{rule}"
        );
    }
    assert!(policy(&operation("paths", "/a/{*}/b/{**}"), HTTP).is_ok());
    assert!(policy(&operation("paths", "/{**}/"), HTTP).is_ok());
    assert!(policy(&operation("ports", "080"), HTTP).is_ok());
}

#[test]
fn stars_reach_as_far_as_they_should() {
    let source = json!({"namespaces": ["*a", "*b", "x*sa"], "trustDomains": ["a*b*"]});
    let expected = json!([
        peers(&[regex(r"spiffe://a[^/]*b\*/.*")]),
        peers(&[
            regex(".*/ns/[^/]*a/.*"),
            regex(".*/ns/.*b/.*"),
            regex(".*/ns/x[^/]*sa/.*"),
        ]),
    ]);
    assert_eq!(items(&from(source), HTTP).1, expected);
}

#[test]
fn brackets_inside_of_brackets_belong_to_the_name() {
    let rule = json!({"when": [{"key": "request.headers[[x]]", "values": ["v"]}]});
    let header = json!({"header": {"name": "[x]", "stringMatch": {"exact": "v"}}});
    assert_eq!(items(&rule, HTTP).1, json!([{"orIds": {"ids": [header]}}]));
}

#[test]
fn many_trust_domains_keep_their_order() {
    let first = ["a", "old", "a", "new"].map(str::to_owned).into_iter();
    // Comparing each of them with all others takes minutes.
    let names: Vec<String> = first.chain((0..100_000).map(|number| format!("d{number}"))).collect();
    let expanded = MeshTrustDomains::of(&mesh()).expand_domains(&names);
    assert_eq!(expanded[..4], ["a", "new", "old", "d0"]);
    assert_eq!(expanded[3..], names[4..]);
}

#[test]
fn r21_usual_policies_are_never_too_large() {
    // 100 KB of policies, several times as large in filters, for 100 ports.
    for traffic in [Traffic::Http, Traffic::Tcp] {
        let chains = |ports: usize| traffic.chains_of_a_port() * ports;
        assert!(Excess::of(600 << 10, chains(128)).is_none(), "{traffic:?}");
        // All keys that istiod fetches for a namespace and for the root namespace.
        assert!(Excess::of(17 << 20, chains(4)).is_none(), "{traffic:?}");
        assert!(Excess::of(3 << 20, chains(1024)).is_some(), "{traffic:?}");
        assert!(Excess::of(usize::MAX, chains(4)).is_some(), "{traffic:?}");
    }
}

#[test]
fn large_conditions_of_many_sources_appear_once() {
    let names: Vec<String> = (0..1000).map(|number| format!("n{number}")).collect();
    let sources = names.iter().map(|name| json!({"source": {"namespaces": [name]}}));
    let sources: Vec<Value> = sources.collect();
    let rule = |key: &str| json!({"from": sources, "when": [{"key": key, "values": names}]});
    let found = policy(&rule("source.namespace"), HTTP).expect("a policy");
    // In each source, the condition would add a million principals.
    assert!(found.encoded_len() < 1 << 20, "{} bytes", found.encoded_len());
    let found = json::to_json(&found);
    assert_eq!(found["permissions"], json!([{"andRules": {"rules": [{"any": true}]}}]));
    assert_eq!(found["principals"].as_array().map(Vec::len), Some(1));
    let ids = &found["principals"][0]["andIds"]["ids"];
    let source = &ids[0]["orIds"]["ids"][7];
    assert_eq!(*source, json!({"andIds": {"ids": [peers(&[regex(".*/ns/n7/.*")])]}}));
    let condition = ids[1]["andIds"]["ids"][0]["orIds"]["ids"].as_array();
    assert_eq!(condition.map(Vec::len), Some(1000));

    let of_requests = rule("request.headers[x]");
    let skipped = policy(&of_requests, (Traffic::Tcp, Leniency::SkipRule));
    assert_eq!(skipped, Err(Skipped::NotApplicable));
    let (_, ids) = items(&of_requests, (Traffic::Tcp, Leniency::DropItem));
    assert_eq!(ids[1], json!({"andIds": {"ids": [{"any": true}]}}));
}
