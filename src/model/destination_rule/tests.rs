use super::*;
use crate::{
    api::Kind,
    model::{
        Commit,
        fixture::{config, labels, world},
    },
    proto::istio::{
        networking::v1alpha3::{
            ClientTlsSettings, PortSelector, Subset, TrafficPolicy, load_balancer_settings::ConsistentHashLb,
        },
        r#type::v1beta1::WorkloadSelector,
    },
};

const HOST: &str = "reviews.shop.svc.cluster.local";

fn rule(host: &str, export_to: &[&str], subsets: &[&str]) -> networking::DestinationRule {
    networking::DestinationRule {
        host: host.into(),
        export_to: export_to.iter().map(|value| (*value).to_owned()).collect(),
        subsets: subsets
            .iter()
            .map(|name| Subset {
                name: (*name).into(),
                ..Default::default()
            })
            .collect(),
        ..Default::default()
    }
}

fn with_selector(mut rule: networking::DestinationRule, label: (&str, &str)) -> networking::DestinationRule {
    rule.workload_selector = Some(WorkloadSelector {
        match_labels: [(label.0.to_owned(), label.1.to_owned())].into(),
    });
    rule
}

fn commit(rules: Vec<(&str, networking::DestinationRule)>) -> Commit {
    let rows = rules.into_iter().zip(0..);
    world(
        rows.map(|((name, spec), age)| config(Kind::DestinationRule, name, age, spec).into())
            .collect(),
    )
}

fn found(commit: &Commit, client: &str, client_labels: &[(&str, &str)]) -> Option<String> {
    let service = ServiceKey {
        hostname: HOST.into(),
        namespace: "shop".into(),
    };
    let client = Namespace::new(client);
    let labels = labels(client_labels);
    let cx = Cx::untracked();
    let (reference, rule) = find(&cx, &commit.snapshot, &client, Some(&labels), &service)?;
    assert_eq!(super::rule(&cx, &commit.snapshot, &reference), Some(rule.clone()));
    Some(rule.from.iter().map(ToString::to_string).collect::<Vec<_>>().join("+"))
}

#[test]
fn rules_of_one_host_are_merged() {
    let mut first = rule("reviews", &[], &["v1"]);
    let mut second = rule(HOST, &[], &["v1", "v2"]);
    second.traffic_policy = Some(Box::default());
    first.traffic_policy = None;
    let commit = commit(vec![("shop/a", first), ("shop/b", second)]);
    let key = RuleKey {
        namespace: "shop".into(),
        host: HOST.into(),
    };
    let rules = commit.snapshot.destination_rules.get(&Cx::untracked(), &key).unwrap();
    let [merged] = &*rules.local else { panic!() };
    let subsets: Vec<_> = merged.spec.subsets.iter().map(|subset| subset.name.as_str()).collect();
    assert_eq!(subsets, ["v1", "v2"]);
    assert!(merged.spec.traffic_policy.is_some());
    assert_eq!(merged.meta.name(), "a");
}

#[test]
fn subsets_are_found_by_name() {
    let label = |spec: &mut networking::DestinationRule, at: usize, value: &str| {
        spec.subsets[at].labels = [("version".to_owned(), value.to_owned())].into();
    };
    let mut first = rule(HOST, &[], &["v2", "v1", "v2"]);
    label(&mut first, 0, "of the first");
    label(&mut first, 2, "never");
    let mut second = rule(HOST, &[], &["v3", "v2", "v0"]);
    label(&mut second, 1, "never");
    let commit = commit(vec![("shop/a", first), ("shop/b", second)]);
    let service = ServiceKey {
        hostname: HOST.into(),
        namespace: "shop".into(),
    };
    let cx = Cx::untracked();
    let (_, merged) = find(&cx, &commit.snapshot, &Namespace::new("shop"), None, &service).expect("a rule");
    for name in ["v0", "v1", "v2", "v3"] {
        assert_eq!(merged.subset(name).map(|subset| subset.name.as_str()), Some(name));
    }
    assert!(merged.subset("").is_none() && merged.subset("v4").is_none());
    let labels = &merged.subset("v2").expect("subset v2").labels;
    assert_eq!(labels["version"], "of the first");
}

/// A service may have tens of thousands of ports, and a rule thousands of settings for single ones.
#[test]
fn r21_settings_of_ports_are_found_as_by_a_search() {
    for count in [0, 3, 100] {
        // Some ports have several settings, and one setting has no port.
        let policy = |first: u32| {
            let settings = |place: u32| PortTrafficPolicy {
                port: (place != 1).then_some(PortSelector {
                    number: (first + place) * 7 % 10,
                }),
                tls: Some(Box::new(ClientTlsSettings {
                    sni: place.to_string(),
                    ..Default::default()
                })),
                ..Default::default()
            };
            Some(Box::new(TrafficPolicy {
                port_level_settings: (0..count).map(settings).collect(),
                ..Default::default()
            }))
        };
        let mut first = rule(HOST, &[], &["v3", "v2", "v1"]);
        first.subsets[0].traffic_policy = policy(3);
        first.subsets[2].traffic_policy = policy(1);
        let mut second = rule(HOST, &[], &["v4"]);
        second.traffic_policy = policy(0);
        second.subsets[0].traffic_policy = policy(4);
        let commit = commit(vec![("shop/a", first), ("shop/b", second)]);
        let service = ServiceKey {
            hostname: HOST.into(),
            namespace: "shop".into(),
        };
        let cx = Cx::untracked();
        let (_, merged) = find(&cx, &commit.snapshot, &Namespace::new("shop"), None, &service).expect("a rule");
        for (subset, declared) in [
            (None, policy(0)),
            (Some("v1"), policy(1)),
            (Some("v2"), None),
            (Some("v3"), policy(3)),
            (Some("v4"), policy(4)),
            (Some("absent"), None),
        ] {
            let all = declared.map(|policy| policy.port_level_settings).unwrap_or_default();
            for port in 0..12 {
                let of_port = all
                    .iter()
                    .filter(|settings| settings.port.is_some_and(|selector| selector.number == port));
                let expected: Vec<&PortTrafficPolicy> = of_port.collect();
                let found: Vec<&PortTrafficPolicy> = merged.port_settings(subset, port).collect();
                assert_eq!(found, expected, "{count} {subset:?} {port}");
            }
        }
    }
}

#[test]
fn the_clients_namespace_precedes_the_services_and_the_root() {
    let all = vec![
        ("istio-system/r", rule("*.local", &[], &[])),
        ("shop/s", rule(HOST, &[], &[])),
        ("web/w", rule("*.shop.svc.cluster.local", &[], &[])),
    ];
    let rules = commit(all.clone());
    assert_eq!(found(&rules, "web", &[]).as_deref(), Some("web/w"));
    assert_eq!(found(&rules, "other", &[]).as_deref(), Some("shop/s"));
    assert_eq!(found(&rules, "istio-system", &[]).as_deref(), Some("shop/s"));
    let rules = commit(all[..1].to_vec());
    assert_eq!(found(&rules, "other", &[]).as_deref(), Some("istio-system/r"));
}

#[test]
fn private_rules_apply_to_their_namespace() {
    let rules = commit(vec![
        ("istio-system/own", rule("*.local", &["."], &[])),
        ("shop/private", rule(HOST, &["."], &[])),
        ("shop/shown", rule("*.shop.svc.cluster.local", &["web"], &[])),
    ]);
    assert_eq!(found(&rules, "shop", &[]).as_deref(), Some("shop/private"));
    assert_eq!(found(&rules, "web", &[]).as_deref(), Some("shop/shown"));
    assert_eq!(found(&rules, "other", &[]), None);
    assert_eq!(found(&rules, "istio-system", &[]).as_deref(), Some("istio-system/own"));
}

#[test]
fn rules_with_a_selector_take_precedence() {
    let rules = commit(vec![
        ("shop/general", rule(HOST, &[], &[])),
        ("shop/picky", with_selector(rule(HOST, &[], &[]), ("app", "web"))),
    ]);
    assert_eq!(found(&rules, "shop", &[("app", "web")]).as_deref(), Some("shop/picky"));
    assert_eq!(found(&rules, "shop", &[("app", "db")]).as_deref(), Some("shop/general"));
    assert_eq!(
        found(&rules, "other", &[("app", "web")]).as_deref(),
        Some("shop/general")
    );
}

#[test]
fn a_rule_with_a_wider_audience_is_merged_into_a_narrower_one() {
    let wider = commit(vec![
        ("shop/narrow", rule(HOST, &["web"], &["v1"])),
        ("shop/wide", rule(HOST, &["web", "app"], &["v2"])),
    ]);
    assert_eq!(found(&wider, "web", &[]).as_deref(), Some("shop/narrow+shop/wide"));
    // Parity (pilot/pkg/model/destination_rule.go): the merged rule is not kept separately, so clients that only it
    // selects have none.
    assert_eq!(found(&wider, "app", &[]), None);
    let apart = commit(vec![
        ("shop/narrow", rule(HOST, &["web"], &["v1"])),
        ("shop/other", rule(HOST, &["app"], &["v2"])),
    ]);
    assert_eq!(found(&apart, "web", &[]).as_deref(), Some("shop/narrow"));
    assert_eq!(found(&apart, "app", &[]).as_deref(), Some("shop/other"));
}

#[test]
fn a_dot_beside_namespaces_does_not_export_to_the_root_namespace_itself() {
    let commit = commit(vec![("istio-system/a", rule("*.local", &[".", "shop"], &[]))]);
    let a = Some("istio-system/a".to_owned());
    assert_eq!(found(&commit, "shop", &[]), a);
    assert_eq!(found(&commit, "istio-system", &[]), None);
    assert_eq!(found(&commit, "other", &[]), None);
}

/// Returns a rule with a consistent hash, either its own or that of a subset.
fn hashed(host: &str, export_to: &[&str], in_subset: bool) -> networking::DestinationRule {
    let settings = LoadBalancerSettings {
        lb_policy: Some(LbPolicy::ConsistentHash(ConsistentHashLb::default())),
        ..Default::default()
    };
    let policy = Some(Box::new(TrafficPolicy {
        load_balancer: Some(Box::new(settings)),
        ..Default::default()
    }));
    let mut rule = rule(host, export_to, &["v1"]);
    if in_subset {
        rule.subsets[0].traffic_policy = policy;
    } else {
        rule.traffic_policy = policy;
    }
    rule
}

#[test]
fn rules_with_a_consistent_hash_are_found_by_host() {
    let other = "ratings.shop.svc.cluster.local";
    let may = |rules: Vec<(&str, networking::DestinationRule)>| {
        let commit = commit(rules);
        [HOST, other].map(|host| may_have_consistent_hash(&Cx::untracked(), &commit.snapshot, &host.into()))
    };
    assert_eq!(may(vec![("shop/plain", rule(HOST, &[], &["v1"]))]), [false, false]);
    assert_eq!(may(vec![("shop/a", hashed("reviews", &["."], false))]), [true, false]);
    assert_eq!(may(vec![("any/a", hashed(HOST, &["."], true))]), [true, false]);
    assert_eq!(
        may(vec![("any/a", hashed("*.cluster.local", &["."], true))]),
        [true, true]
    );
}

#[test]
fn rules_of_a_namespace_concern_only_some_of_its_services() {
    let service = |host: &str| {
        let namespace = host.split('.').nth(1).expect("a namespace").into();
        ServiceKey {
            hostname: host.into(),
            namespace,
        }
    };
    let [details, other] = ["details.shop.svc.cluster.local", "other.elsewhere.svc.cluster.local"];
    let commit = commit(vec![
        ("shop/for-all", rule(HOST, &[], &["v1"])),
        ("shop/private", rule(details, &["."], &["v1"])),
        ("client/foreign", rule(other, &[], &["v1"])),
        ("elsewhere/told", rule(other, &["told"], &["v1"])),
        ("wild/all", rule("*.cluster.local", &[], &["v1"])),
    ]);
    let (cx, mesh, common) = (Cx::untracked(), &commit.snapshot, Namespace::default());
    let concerned = |client: &str| -> Vec<&str> {
        let client = Namespace::new(client);
        let own = OwnRules::of(&cx, mesh, &client);
        let hosts = [HOST, details, other].into_iter().filter(|host| {
            let service = service(host);
            let concerns = own.concern(&service);
            let found = |client| find(&cx, mesh, client, Some(&Labels::default()), &service);
            assert!(concerns || found(&client) == found(&common), "{client}: {host}");
            concerns
        });
        hosts.collect()
    };
    assert_eq!(concerned("any"), Vec::<&str>::new());
    assert_eq!(concerned("shop"), [details]);
    assert_eq!(concerned("client"), [other]);
    assert_eq!(concerned("told"), [other]);
    assert_eq!(concerned("wild"), [HOST, details, other]);
}

#[test]
fn a_rule_decides_a_consistent_hash_that_it_hides() {
    let other = "ratings.shop.svc.cluster.local";
    let decides = |rules: Vec<(&str, networking::DestinationRule)>| {
        let commit = commit(rules);
        let (cx, client) = (Cx::untracked(), Namespace::new("web"));
        OwnRules::of(&cx, &commit.snapshot, &client).may_decide_consistent_hash(&cx, &commit.snapshot)
    };
    let with = |host: &str| {
        vec![
            ("shop/a", hashed(HOST, &[], false)),
            ("web/w", rule(host, &[], &["v1"])),
        ]
    };
    assert!(decides(with(HOST)));
    assert!(decides(with("*.shop.svc.cluster.local")));
    assert!(!decides(with(other)));
    assert!(!decides(with("*.other.svc.cluster.local")));
    assert!(!decides(vec![("shop/a", hashed(HOST, &[], false))]));
    assert!(decides(vec![("web/w", hashed(HOST, &[], true))]));
    let root = ("istio-system/r", hashed("*.local", &[], false));
    assert!(decides(vec![root, ("web/w", rule(other, &[], &["v1"]))]));
}
