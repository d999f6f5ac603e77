//! RouteRules to VirtualServices, DestinationPolicies to DestinationRules.
//!
//! Parity (istioctl/pkg/convert of release 0.8): the same objects, with the fields of today. Note: a match of sources
//! becomes labels, and a policy without labels the policy of the host.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{Converter, KubeService, Old, set, spec::Spec};

/// The conditions under which release 0.8 retried.
const RETRY_ON: &str = "5xx,connect-failure,refused-stream";
/// Headers that are attributes of a request.
const ATTRIBUTES: [&str; 4] = ["uri", "method", "authority", "scheme"];

/// Subsets and policies of a host, and the namespace of the first object that names it.
#[derive(Default)]
struct Host {
    namespace: String,
    subsets: BTreeMap<String, Map<String, Value>>,
    policies: BTreeMap<String, Value>,
    policy: Option<Value>,
}

type Hosts = BTreeMap<String, Host>;

/// A condition that cannot be mapped; a note names it.
struct NotMapped;

pub(super) fn convert(converter: &mut Converter<'_>) {
    let mut hosts = Hosts::new();
    route_rules(converter, &mut hosts);
    destination_policies(converter, &mut hosts);
    for (host, rules) in hosts {
        let subsets = rules.subsets.into_iter().map(|(name, labels)| {
            let mut subset = json!({ "name": name, "labels": labels });
            set(
                &mut subset,
                "trafficPolicy",
                rules.policies.get(&name).cloned().unwrap_or_default(),
            );
            subset
        });
        let subsets: Vec<Value> = subsets.collect();
        if subsets.is_empty() && rules.policy.is_none() {
            continue;
        }
        let spec = &mut converter.object("DestinationRule", &rules.namespace, &host)["spec"];
        spec["host"] = host.into();
        set(spec, "subsets", subsets.into());
        set(spec, "trafficPolicy", rules.policy.unwrap_or_default());
    }
}

fn entry<'h>(hosts: &'h mut Hosts, host: &str, namespace: &str) -> &'h mut Host {
    hosts.entry(host.to_owned()).or_insert_with(|| Host {
        namespace: namespace.to_owned(),
        ..Host::default()
    })
}

/// Returns the name of the subset with these labels.
fn subset_name(labels: &Map<String, Value>) -> String {
    let pairs = labels
        .iter()
        .map(|(key, value)| (key, value.as_str().unwrap_or_default()));
    let mut pairs: Vec<String> = pairs.map(|(key, value)| format!("{key}={value}")).collect();
    pairs.sort();
    pairs.join(",").replace(['=', '.', ',', '/', '_'], "-").to_lowercase()
}

/// Returns a destination, with its subset if it has labels.
fn destination(hosts: &mut Hosts, host: &str, namespace: &str, labels: Map<String, Value>) -> Value {
    if labels.is_empty() {
        return json!({ "host": host });
    }
    let name = subset_name(&labels);
    entry(hosts, host, namespace).subsets.insert(name.clone(), labels);
    json!({ "host": host, "subset": name })
}

fn route_rules(converter: &mut Converter<'_>, hosts: &mut Hosts) {
    let mut rules = converter.take("RouteRule");
    rules.sort_by_key(|rule| std::cmp::Reverse(rule.spec.integer("precedence").unwrap_or_default()));
    let mut services: BTreeMap<String, (String, Vec<Value>)> = BTreeMap::new();
    for rule in &rules {
        let Some(host) = converter.host(rule.spec.get("destination"), &rule.namespace) else {
            converter.note(
                rule,
                "spec.destination",
                "has neither name nor service; the rule is left out",
            );
            continue;
        };
        let Ok(route) = route(converter, hosts, rule, &host) else {
            continue;
        };
        let known = services
            .entry(host)
            .or_insert_with(|| (rule.namespace.clone(), Vec::new()));
        if known.0 != rule.namespace {
            let message = format!("rules of several namespaces are merged into namespace {}", known.0);
            converter.note(rule, "", &message);
        }
        known.1.push(route);
    }
    for (host, (namespace, routes)) in services {
        let spec = &mut converter.object("VirtualService", &namespace, &host)["spec"];
        spec["hosts"] = json!([host]);
        spec["http"] = routes.into();
    }
}

fn route(converter: &mut Converter<'_>, hosts: &mut Hosts, rule: &Old<'_>, host: &str) -> Result<Value, NotMapped> {
    let spec = rule.spec;
    let mut route = json!({});
    set(&mut route, "match", matches(converter, rule)?);
    if !spec.get("redirect").is_empty() {
        let redirect = spec.get("redirect");
        set(
            &mut route,
            "redirect",
            Value::Object(copied(redirect, &["uri", "authority"])),
        );
    } else {
        route["route"] = destinations(converter, hosts, rule, host);
    }
    set(
        &mut route,
        "rewrite",
        Value::Object(copied(spec.get("rewrite"), &["uri", "authority"])),
    );
    let timeout = spec.get("httpReqTimeout").get("simpleTimeout");
    set(&mut route, "timeout", timeout.get("timeout").0.clone());
    let retry = spec.get("httpReqRetries").get("simpleRetry");
    if !retry.is_empty() {
        let mut retries = Value::Object(copied(retry, &["perTryTimeout"]));
        retries["attempts"] = retry.integer("attempts").unwrap_or_default().into();
        retries["retryOn"] = RETRY_ON.into();
        route["retries"] = retries;
    }
    set(&mut route, "fault", fault(converter, rule));
    let mirror = spec.get("mirror");
    if !mirror.is_empty() {
        match converter.host(mirror, &rule.namespace) {
            Some(to) => route["mirror"] = destination(hosts, &to, &rule.namespace, mirror.labels("labels")),
            None => converter.note(rule, "spec.mirror", "has neither name nor service"),
        }
    }
    set(&mut route, "corsPolicy", cors(spec.get("corsPolicy")));
    let append = spec.labels("appendHeaders");
    if !append.is_empty() {
        route["headers"] = json!({ "request": { "add": append } });
    }
    note_lost_settings(converter, rule);
    Ok(route)
}

/// Returns the weighted destinations of a rule; without any, its own host.
fn destinations(converter: &Converter<'_>, hosts: &mut Hosts, rule: &Old<'_>, host: &str) -> Value {
    let routes: Vec<Spec<'_>> = rule.spec.items("route").collect();
    if routes.is_empty() {
        return json!([{ "destination": { "host": host } }]);
    }
    let destinations = routes.iter().map(|item| {
        let to = item.get("destination");
        let to_host = if to.is_empty() {
            None
        } else {
            converter.host(to, &rule.namespace)
        };
        let to_host = to_host.unwrap_or_else(|| host.to_owned());
        let destination = destination(hosts, &to_host, &rule.namespace, item.labels("labels"));
        let mut weighted = json!({ "destination": destination });
        let weight = item.integer("weight").unwrap_or_default();
        if routes.len() > 1 {
            weighted["weight"] = weight.into();
        }
        weighted
    });
    destinations.collect::<Vec<_>>().into()
}

/// Notes the settings of a rule that a VirtualService does not have.
fn note_lost_settings(converter: &mut Converter<'_>, rule: &Old<'_>) {
    let spec = rule.spec;
    let (timeout, retries) = (spec.get("httpReqTimeout"), spec.get("httpReqRetries"));
    let no_header = "proxies have no header that overrides it";
    converter.lost(
        rule,
        timeout.get("simpleTimeout"),
        "spec.httpReqTimeout.simpleTimeout.",
        &[("overrideHeaderName", no_header)],
    );
    converter.lost(
        rule,
        retries.get("simpleRetry"),
        "spec.httpReqRetries.simpleRetry.",
        &[("overrideHeaderName", no_header)],
    );
    let custom = "custom policies of proxies cannot be mapped";
    converter.lost(rule, timeout, "spec.httpReqTimeout.", &[("custom", custom)]);
    converter.lost(rule, retries, "spec.httpReqRetries.", &[("custom", custom)]);
    converter.lost(
        rule,
        spec,
        "spec.",
        &[("l4Fault", "faults of TCP connections cannot be mapped")],
    );
}

/// Returns these fields, where they are set.
fn copied(from: Spec<'_>, fields: &[&str]) -> Map<String, Value> {
    let present = fields.iter().filter(|field| !from.get(field).is_empty());
    present
        .map(|field| ((*field).to_owned(), from.get(field).0.clone()))
        .collect()
}

/// Returns a match of text; `None` if it is none.
fn text_match(given: Spec<'_>) -> Option<Value> {
    let kinds = ["exact", "prefix", "regex"].iter();
    let mut found = kinds.filter_map(|kind| Some(json!({ *kind: given.text(kind)? })));
    found.next()
}

/// Returns the conditions of a rule. Fails if one cannot be mapped: without it, the rule would apply to more requests.
fn matches(converter: &mut Converter<'_>, rule: &Old<'_>) -> Result<Value, NotMapped> {
    let given = rule.spec.get("match");
    if given.is_empty() {
        return Ok(Value::Null);
    }
    let mut matched = json!({});
    let mut is_lost = false;
    let mut headers = Map::new();
    for (name, value) in given.get("request").entries("headers") {
        match (text_match(value), ATTRIBUTES.contains(&name)) {
            (Some(value), true) => matched[name] = value,
            (Some(value), false) => {
                headers.insert(name.to_lowercase(), value);
            }
            (None, _) => {
                is_lost = true;
                let field = format!("spec.match.request.headers[{name}]");
                converter.note(rule, &field, "is neither exact, prefix nor regex");
            }
        }
    }
    set(&mut matched, "headers", headers.into());
    let source = given.get("source");
    if !source.is_empty() {
        let mut labels = source.labels("labels");
        let namespace = source.text("namespace").unwrap_or(&rule.namespace);
        if let Some(name) = source.text("name") {
            match converter.service(namespace, name).and_then(KubeService::selector) {
                Some(selector) => labels.extend(selector),
                None => {
                    is_lost = true;
                    let message = format!("Service {namespace}/{name} with a selector is not among the files");
                    converter.note(rule, "spec.match.source", &message);
                }
            }
            matched["sourceNamespace"] = namespace.into();
        } else if source.text("service").is_some() {
            is_lost = true;
            converter.note(
                rule,
                "spec.match.source.service",
                "a host is not a source; hint: match labels",
            );
        }
        set(&mut matched, "sourceLabels", labels.into());
    }
    is_lost |= !given.get("tcp").is_empty() || !given.get("udp").is_empty();
    let tcp = "matches of TCP connections cannot be mapped to HTTP routes";
    converter.lost(rule, given, "spec.match.", &[("tcp", tcp), ("udp", tcp)]);
    if is_lost {
        converter.note(
            rule,
            "spec.match",
            "the rule is left out, since it would apply to more requests",
        );
        return Err(NotMapped);
    }
    if matched.as_object().is_some_and(Map::is_empty) {
        return Ok(Value::Null);
    }
    Ok(json!([matched]))
}

fn fault(converter: &mut Converter<'_>, rule: &Old<'_>) -> Value {
    let given = rule.spec.get("httpFault");
    let mut fault = json!({});
    let percentage = |part: Spec<'_>| json!({ "value": part.get("percent").0.as_f64().unwrap_or(100.0) });
    let delay = given.get("delay");
    if !delay.is_empty() {
        if delay.get("fixedDelay").is_empty() {
            let message = "only fixed delays can be mapped";
            converter.note(rule, "spec.httpFault.delay.exponentialDelay", message);
        } else {
            fault["delay"] = json!({
                "percentage": percentage(delay),
                "fixedDelay": delay.get("fixedDelay").0,
            });
        }
        converter.lost(
            rule,
            delay,
            "spec.httpFault.delay.",
            &[("overrideHeaderName", "proxies have no header that overrides it")],
        );
    }
    let abort = given.get("abort");
    if !abort.is_empty() {
        let mut converted = json!({ "percentage": percentage(abort) });
        if let Some(status) = abort.integer("httpStatus") {
            converted["httpStatus"] = status.into();
            fault["abort"] = converted;
        } else if let Some(status) = abort.text("grpcStatus") {
            converted["grpcStatus"] = status.into();
            fault["abort"] = converted;
        } else {
            converter.note(
                rule,
                "spec.httpFault.abort",
                "only HTTP and gRPC statuses can be mapped",
            );
        }
        let no_header = "proxies have no header that overrides it";
        converter.lost(
            rule,
            abort,
            "spec.httpFault.abort.",
            &[("overrideHeaderName", no_header)],
        );
    }
    fault
}

fn cors(given: Spec<'_>) -> Value {
    if given.is_empty() {
        return Value::Null;
    }
    let lists = ["allowMethods", "allowHeaders", "exposeHeaders", "maxAge"];
    let mut cors = Value::Object(copied(given, &lists));
    let origins = given
        .texts("allowOrigin")
        .into_iter()
        .map(|origin| match origin.as_str() {
            "*" => json!({ "regex": ".*" }),
            origin => json!({ "exact": origin }),
        });
    set(&mut cors, "allowOrigins", origins.collect::<Vec<_>>().into());
    let credentials = given.get("allowCredentials").0;
    let credentials = credentials.as_bool().or_else(|| credentials["value"].as_bool());
    set(
        &mut cors,
        "allowCredentials",
        credentials.map(Value::from).unwrap_or_default(),
    );
    cors
}

fn destination_policies(converter: &mut Converter<'_>, hosts: &mut Hosts) {
    for policy in converter.take("DestinationPolicy") {
        let destination = policy.spec.get("destination");
        let Some(host) = converter.host(destination, &policy.namespace) else {
            converter.note(
                &policy,
                "spec.destination",
                "has neither name nor service; the policy is left out",
            );
            continue;
        };
        let traffic = traffic_policy(converter, &policy);
        let labels = destination.labels("labels");
        let known = entry(hosts, &host, &policy.namespace);
        let is_first = if labels.is_empty() {
            let is_first = known.policy.is_none();
            known.policy.get_or_insert(traffic);
            is_first
        } else {
            let name = subset_name(&labels);
            let is_first = !known.policies.contains_key(&name);
            known.subsets.insert(name.clone(), labels);
            known.policies.entry(name).or_insert(traffic);
            is_first
        };
        if !is_first {
            converter.note(&policy, "", "an earlier policy of the same destination counts");
        }
    }
}

fn traffic_policy(converter: &mut Converter<'_>, policy: &Old<'_>) -> Value {
    let spec = policy.spec;
    let mut traffic = json!({});
    let balancing = spec.get("loadBalancing");
    if let Some(name) = balancing.text("name") {
        let simple = match name {
            "LEAST_CONN" => Some("LEAST_REQUEST"),
            "ROUND_ROBIN" => Some("ROUND_ROBIN"),
            "RANDOM" => Some("RANDOM"),
            _ => None,
        };
        match simple {
            Some(simple) => traffic["loadBalancer"] = json!({ "simple": simple }),
            None => converter.note(
                policy,
                "spec.loadBalancing.name",
                &format!("{name:?} is not a load balancer"),
            ),
        }
    }
    let breaker = spec.get("circuitBreaker").get("simpleCb");
    let integers = |fields: &[(&str, &str)]| {
        let present = fields
            .iter()
            .filter_map(|(from, to)| Some(((*to).to_owned(), breaker.integer(from)?.into())));
        Value::Object(present.collect::<Map<String, Value>>())
    };
    let mut pool = json!({});
    set(&mut pool, "tcp", integers(&[("maxConnections", "maxConnections")]));
    let http = integers(&[
        ("httpMaxPendingRequests", "http1MaxPendingRequests"),
        ("httpMaxRequests", "http2MaxRequests"),
        ("httpMaxRequestsPerConnection", "maxRequestsPerConnection"),
        ("httpMaxRetries", "maxRetries"),
    ]);
    set(&mut pool, "http", http);
    set(&mut traffic, "connectionPool", pool);
    let mut outlier = integers(&[
        ("httpConsecutiveErrors", "consecutive5xxErrors"),
        ("httpMaxEjectionPercent", "maxEjectionPercent"),
    ]);
    set(&mut outlier, "interval", breaker.get("httpDetectionInterval").0.clone());
    set(&mut outlier, "baseEjectionTime", breaker.get("sleepWindow").0.clone());
    set(&mut traffic, "outlierDetection", outlier);
    let custom = "custom policies of proxies cannot be mapped";
    converter.lost(policy, balancing, "spec.loadBalancing.", &[("custom", custom)]);
    converter.lost(
        policy,
        spec.get("circuitBreaker"),
        "spec.circuitBreaker.",
        &[("custom", custom)],
    );
    let source = "policies for some clients cannot be mapped; hint: write it in the namespace of these clients";
    converter.lost(policy, spec, "spec.", &[("source", source), ("custom", custom)]);
    traffic
}
