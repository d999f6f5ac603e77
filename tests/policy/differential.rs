//! R15: random policies and random traffic, judged by an evaluator of the generated filters and by an oracle for the
//! policies. Both must agree, on requests and on connections.

use std::{collections::BTreeMap, net::IpAddr};

use istiod::model::Installation;
use libtest_mimic::Failed;
use proptest::{
    collection::vec,
    prelude::*,
    sample::{select, subsequence},
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use serde_json::{Value, json};

use super::{
    evaluator::{self, Outcome, Request, Traffic},
    fixture::{Fixture, INBOUND, TUNNELED, sidecar},
    oracle::{self, Action, Attribute, Item, Policy, Rule},
};

/// Number of policy sets, and number of traffic samples for each.
const CASES: u32 = 300;
const TRAFFIC: usize = 30;

/// Trust domains, namespaces and accounts that are similar enough to be confused.
const PEERS: [&str; 12] = [
    "td1/ns/foo/sa/a",
    "td1/ns/foo/sa/a-b",
    "td1/ns/foo-bar/sa/a",
    "td1/ns/bar/sa/b.c",
    "td1/ns/bar/sa/bxc",
    "old-td/ns/foo/sa/a",
    "old-td/ns/bar/sa/b.c",
    "cluster.local/ns/foo/sa/a",
    "other/ns/foo/sa/a",
    "other.td/ns/bar/sa/b.c",
    "other-td/ns/sa/sa/ns",
    "td1x/ns/ba/sa/sa",
];

/// Values of each attribute; some of the traffic has each of them.
fn values(attribute: Attribute) -> &'static [&'static str] {
    match attribute {
        Attribute::Principal => &[
            "*",
            "td1/ns/foo/sa/a",
            "old-td/ns/foo/sa/a",
            "cluster.local/ns/foo/sa/a",
            "other/ns/foo/sa/a",
            "td1/ns/foo*",
            "td1/ns/foo/sa/a*",
            "*/sa/b.c",
            "*/ns/bar/sa/b.c",
            "*-td/ns/bar/sa/b.c",
            "*td/ns/foo/sa/a",
            "foo/sa/a",
        ],
        Attribute::RequestPrincipal => &[
            "*",
            "https://issuer/alice",
            "https://issuer/al*",
            "https://issuer/*",
            "*/alice",
            "*suer/bob",
            "*ice",
            "https*",
            "plain/bob",
            "pla*",
            "plain",
        ],
        Attribute::ServiceAccount => &["a", "foo/a", "bar/b.c", "bar/b", "foo/a-b"],
        Attribute::TrustDomain => &["*", "td1", "old-td", "other", "other*", "*td", "cluster.local", "td*"],
        Attribute::Namespace => &["*", "foo", "foo*", "*bar", "*a", "ba", "*r", "sa", "f*o"],
        Attribute::RemoteIp | Attribute::Ip | Attribute::DestinationIp => &[
            "10.0.0.1",
            "10.0.0.0/8",
            "10.1.0.0/16",
            "192.0.2.7/24",
            "2001:db8::/32",
            "2001:db8::1",
        ],
        Attribute::Host => &[
            "*",
            "a.example.com",
            "A.Example.com",
            "*.example.com",
            "a.*",
            "a.example.com:80",
        ],
        Attribute::Method => &["*", "GET", "POST", "P*", "*T", "get"],
        Attribute::Path => &[
            "*",
            "/",
            "/info",
            "/info*",
            "*.html",
            "/data/{*}",
            "/data/{**}",
            "/{*}/x/{**}",
            "/{**}/x",
            "/data/*",
            "/data/a.b",
        ],
        Attribute::Port => &["80", "8080", "9090", "443"],
        Attribute::Header => &["*", "blue", "bl*", "*ue", "Blue"],
        Attribute::Audience | Attribute::Presenter => &["*", "app", "ap*", "*pp", "web"],
        Attribute::Claim | Attribute::NestedClaim => &["*", "admin", "adm*", "*min", "user"],
        Attribute::ServerName => &["*", "a.example.com", "*.example.com", "a.*"],
        Attribute::Metadata => &["*", "v", "[v]", "[*]", "v*", "[*w]"],
    }
}

const SOURCES: [Attribute; 7] = [
    Attribute::Principal,
    Attribute::RequestPrincipal,
    Attribute::ServiceAccount,
    Attribute::TrustDomain,
    Attribute::Namespace,
    Attribute::RemoteIp,
    Attribute::Ip,
];
const OPERATIONS: [Attribute; 4] = [Attribute::Host, Attribute::Method, Attribute::Path, Attribute::Port];
const CONDITIONS: [Attribute; 16] = [
    Attribute::Principal,
    Attribute::RequestPrincipal,
    Attribute::ServiceAccount,
    Attribute::TrustDomain,
    Attribute::Namespace,
    Attribute::RemoteIp,
    Attribute::Ip,
    Attribute::Port,
    Attribute::Header,
    Attribute::Audience,
    Attribute::Presenter,
    Attribute::Claim,
    Attribute::NestedClaim,
    Attribute::DestinationIp,
    Attribute::ServerName,
    Attribute::Metadata,
];

fn item(attribute: Attribute) -> impl Strategy<Value = Item> {
    let some = || {
        let picked = vec(select(values(attribute)), 1..3);
        picked.prop_map(|values| values.into_iter().map(str::to_owned).collect::<Vec<_>>())
    };
    prop_oneof![
        3 => (some(), Just(Vec::new())),
        2 => (Just(Vec::new()), some()),
        1 => (some(), some()),
    ]
    .prop_map(move |(values, not_values)| Item {
        attribute,
        values,
        not_values,
    })
}

/// Items with different attributes.
fn items(attributes: &'static [Attribute]) -> impl Strategy<Value = Vec<Item>> {
    let some = subsequence(attributes.to_vec(), 1..=2);
    some.prop_flat_map(|attributes| attributes.into_iter().map(item).collect::<Vec<_>>())
}

fn rule() -> impl Strategy<Value = Rule> {
    let conditions = subsequence(CONDITIONS.to_vec(), 0..=2);
    let conditions = conditions.prop_flat_map(|attributes| attributes.into_iter().map(item).collect::<Vec<_>>());
    let parts = (vec(items(&SOURCES), 0..3), vec(items(&OPERATIONS), 0..3), conditions);
    parts.prop_map(|(from, to, when)| Rule { from, to, when })
}

fn policy() -> impl Strategy<Value = Policy> {
    let action = prop_oneof![
        3 => Just(Action::Allow),
        3 => Just(Action::Deny),
        1 => Just(Action::Audit),
        1 => Just(Action::Custom),
    ];
    let parts = (action, prop::bool::weighted(0.2), vec(rule(), 0..3));
    parts.prop_map(|(action, dry_run, rules)| Policy {
        // A CUSTOM policy has no dry run.
        dry_run: dry_run && action != Action::Custom,
        action,
        rules,
    })
}

fn ip() -> impl Strategy<Value = IpAddr> {
    let all: &[&str] = &[
        "10.0.0.1",
        "10.1.2.3",
        "192.0.2.200",
        "198.51.100.1",
        "2001:db8::1",
        "::1",
    ];
    select(all).prop_map(|ip| ip.parse().expect("the address is valid"))
}

fn claims() -> impl Strategy<Value = Value> {
    let text = |all: &'static [&'static str]| select(all).prop_map(Value::from);
    let list = |all: &'static [&'static str]| vec(select(all), 0..3).prop_map(|all| json!(all));
    let none = || Just(Value::Null);
    let identity = (
        text(&["https://issuer", "plain", "https:/", "https://other"]),
        text(&["alice", "bob", "al", ""]),
        prop_oneof![none(), text(&["app", "web"]), list(&["app", "web", "x"])],
        prop_oneof![none(), text(&["app", "web"])],
    );
    let roles: &[&str] = &["admin", "user", "min"];
    let more = (
        prop_oneof![none(), text(roles), list(roles)],
        prop_oneof![none(), text(roles), list(roles)],
    );
    (identity, more).prop_map(|((iss, sub, aud, azp), (role, roles))| {
        json!({"iss": iss, "sub": sub, "aud": aud, "azp": azp, "role": role, "realm": {"roles": roles}})
    })
}

fn request() -> impl Strategy<Value = Request> {
    let paths: &[&str] = &[
        "/",
        "/info",
        "/info?x=.html",
        "/information",
        "/x.html",
        "/data/a.b",
        "/data/a-b",
        "/data/",
        "/data",
        "/data/a/b",
        "/a/x/b/c",
        "/a/x/",
        "/x",
        "/a/b/x?q=/y",
    ];
    let hosts: &[&str] = &[
        "a.example.com",
        "A.EXAMPLE.com",
        "b.example.com",
        "a.example.com:80",
        "axexample.com",
    ];
    let header = prop::option::of(select(["blue", "Blue", "blub", "", "true"].as_slice()));
    let methods: &[&str] = &["GET", "POST", "PUT", "get"];
    (select(methods), select(hosts), select(paths), header).prop_map(|(method, host, path, header)| Request {
        method: method.to_owned(),
        host: host.to_owned(),
        path: path.to_owned(),
        headers: header
            .map(|value| ("x-team".to_owned(), value.to_owned()))
            .into_iter()
            .collect(),
    })
}

fn traffic() -> impl Strategy<Value = Traffic> {
    let names: &[&str] = &["", "a.example.com", "b.example.com", "a.b", "example.com"];
    let ports: &[u16] = &[80, 8080, 9090, 443, 1];
    let found = vec![Value::Null, json!("v"), json!("vw"), json!(["v", "w"]), json!([])];
    let connection = (
        prop::option::weighted(0.9, select(PEERS.as_slice())),
        (ip(), ip(), ip()),
        select(ports),
        select(names),
    );
    (connection, prop::option::of(claims()), select(found), request()).prop_map(
        |((peer, (direct_ip, remote_ip, own_ip), port, name), claims, found, request)| Traffic {
            peer: peer.map(|name| format!("spiffe://{name}")),
            direct_ip,
            remote_ip,
            destination: (own_ip, port),
            server_name: name.to_owned(),
            metadata: BTreeMap::from([
                ("envoy.filters.http.jwt_authn".to_owned(), json!({"payload": claims})),
                ("envoy.filters.test".to_owned(), json!({"key": found})),
            ]),
            request: Some(request),
        },
    )
}

/// Mesh config with the oracle's trust domains and the only provider.
pub(super) fn mesh() -> String {
    let [own, aliases @ ..] = oracle::TRUST_DOMAINS;
    let provider = json!({
        "name": "default",
        "envoyExtAuthzGrpc": {"service": "my-custom-ext-authz.foo.svc.cluster.local", "port": 9000},
    });
    json!({"trustDomain": own, "trustDomainAliases": aliases, "extensionProviders": [provider]}).to_string()
}

/// A runner with a fixed seed, for reproducible cases.
pub(super) fn runner(cases: u32) -> TestRunner {
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2_000,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[15; 32]))
}

/// The test of R15.
pub(super) fn r15_filters_enforce_the_policies() -> Result<(), Failed> {
    // The workload also accepts connections through HBONE tunnels, where the peer's identity has another source.
    let mut installation = Installation::default();
    installation.features.pilot_enable_sidecar_listening_hbone = true;
    let tunneled = sidecar(&json!({"ENABLE_HBONE": "true"}));
    let fixture = std::cell::RefCell::new(Fixture::of(installation, &mesh(), "", tunneled)?);
    let seen = std::cell::RefCell::new(BTreeMap::<&str, u32>::new());
    let cases = (vec(policy(), 1..4), vec(traffic(), TRAFFIC));
    let result = runner(CASES).run(&cases, |(policies, traffic)| {
        let objects = policies.iter().enumerate().map(|(index, policy)| policy.object(index));
        let mut fixture = fixture.borrow_mut();
        let failed = |failed: Failed| TestCaseError::fail(failed.message().unwrap_or_default().to_owned());
        fixture.declare(objects.collect()).map_err(failed)?;
        for listener in [INBOUND, TUNNELED] {
            let http = fixture.http_filters_of(listener).map_err(failed)?;
            let network = fixture.network_filters_of(listener).map_err(failed)?;
            for one in &traffic {
                let found = evaluator::http(&http, one);
                prop_assert_eq!(&found, &oracle::judge(&policies, one), "HTTP, {}, {:?}", listener, one);
                count(&mut seen.borrow_mut(), "HTTP", &found);
                let connection = Traffic {
                    request: None,
                    ..one.clone()
                };
                let found = evaluator::network(&network, &connection);
                let expected = oracle::judge(&policies, &connection);
                prop_assert_eq!(&found, &expected, "TCP, {}, {:?}", listener, connection);
                count(&mut seen.borrow_mut(), "TCP", &found);
            }
        }
        Ok(())
    });
    result.map_err(|failed| format!("{failed}"))?;
    let seen = seen.into_inner();
    println!("policy: outcomes: {seen:?}");
    // Outcomes that never occur are not tested.
    let rare: Vec<_> = OUTCOMES
        .iter()
        .filter(|name| seen.get(*name).is_none_or(|times| *times < 100))
        .collect();
    if rare.is_empty() {
        Ok(())
    } else {
        Err(format!("outcomes that are too rare: {rare:?}").into())
    }
}

const OUTCOMES: [&str; 8] = [
    "HTTP denied",
    "HTTP passed",
    "HTTP audited",
    "HTTP asked",
    "TCP denied",
    "TCP passed",
    "TCP audited",
    "TCP asked",
];

fn count(seen: &mut BTreeMap<&'static str, u32>, transport: &str, outcome: &Outcome) {
    let facts = [
        ("denied", outcome.denied),
        ("passed", !outcome.denied),
        ("audited", outcome.audited),
        ("asked", !outcome.asked.is_empty()),
    ];
    for name in OUTCOMES {
        let holds = |(fact, is): &(&str, bool)| *is && name.strip_suffix(fact).map(str::trim_end) == Some(transport);
        if facts.iter().any(holds) {
            *seen.entry(name).or_default() += 1;
        }
    }
}
