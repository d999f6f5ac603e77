//! ServiceRoles, their bindings and RbacConfigs to AuthorizationPolicies.
//!
//! Parity (istioctl x authz convert of releases 1.4 and 1.5): the same names of objects. Note: also maps the fields
//! that it ignored, and writes nothing for services where RBAC is off, since a policy that allows denies everything
//! else.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{Converter, KubeService, Old, set, spec::Spec};
use crate::api::istio::DRY_RUN;

/// The claim that groups were compared with.
const GROUPS: &str = "request.auth.claims[groups]";
/// Properties of subjects that are fields of a source.
const SOURCES: [(&str, &str); 4] = [
    ("source.ip", "ipBlocks"),
    ("source.namespace", "namespaces"),
    ("source.principal", "principals"),
    ("request.auth.principal", "requestPrincipals"),
];

/// The scope in which RBAC is enabled.
enum Enabled {
    Everywhere,
    /// In these namespaces and services.
    In(Vec<String>, Vec<String>),
    /// Everywhere but in these.
    Except(Vec<String>, Vec<String>),
}

impl Enabled {
    fn has_namespace(&self, namespace: &str) -> bool {
        let named = |names: &[String]| names.iter().any(|name| name == namespace);
        match self {
            Self::Everywhere => true,
            Self::In(namespaces, _) => named(namespaces),
            Self::Except(namespaces, _) => !named(namespaces),
        }
    }

    fn has(&self, namespace: &str, host: &str) -> bool {
        let named = |names: &[String]| names.iter().any(|name| name == host);
        match self {
            Self::Everywhere => true,
            Self::In(_, services) => self.has_namespace(namespace) || named(services),
            Self::Except(_, services) => self.has_namespace(namespace) && !named(services),
        }
    }

    /// Returns true if no service of the namespace differs from it.
    fn is_uniform(&self, namespace: &str, suffix: &str) -> bool {
        let concerns = |services: &[String]| services.iter().any(|host| host.ends_with(suffix));
        match self {
            Self::Everywhere => true,
            Self::In(_, services) => self.has_namespace(namespace) || !concerns(services),
            Self::Except(_, services) => !concerns(services),
        }
    }
}

pub(super) fn convert(converter: &mut Converter<'_>) {
    let mut configs = converter.take("ClusterRbacConfig");
    configs.extend(converter.take("RbacConfig"));
    let (roles, bindings) = (converter.take("ServiceRole"), converter.take("ServiceRoleBinding"));
    let Some(config) = configs.first() else {
        for role in &roles {
            converter.note(
                role,
                "",
                "without a ClusterRbacConfig among the files RBAC is off, so nothing is written",
            );
        }
        return;
    };
    for other in &configs[1..] {
        converter.note(other, "", "another configuration counts");
    }
    let Some(enabled) = enabled(converter, config) else {
        converter.note(
            config,
            "spec.mode",
            "RBAC is off, so roles and bindings have no effect and nothing is written",
        );
        return;
    };
    let is_dry_run = config.spec.text("enforcementMode") == Some("PERMISSIVE");
    defaults(converter, config, &enabled, is_dry_run);
    for role in &roles {
        let bound: Vec<&Old<'_>> = bindings
            .iter()
            .filter(|binding| binding.namespace == role.namespace)
            .filter(|binding| binding.spec.get("roleRef").text("name") == Some(&role.name))
            .collect();
        if bound.is_empty() {
            converter.note(role, "", "no binding refers to it, so it permits nothing");
            continue;
        }
        convert_role(converter, role, &bound, &enabled, is_dry_run);
    }
    for binding in &bindings {
        let name = binding.spec.get("roleRef").text("name");
        let has_role = roles
            .iter()
            .any(|role| role.namespace == binding.namespace && name == Some(&role.name));
        if !has_role {
            converter.note(binding, "spec.roleRef", "the role is not among the files");
        }
    }
}

fn enabled(converter: &mut Converter<'_>, config: &Old<'_>) -> Option<Enabled> {
    let listed = |name: &str| {
        let part = config.spec.get(name);
        (part.texts("namespaces"), part.texts("services"))
    };
    match config.spec.text("mode").unwrap_or("OFF") {
        "OFF" => None,
        "ON" => Some(Enabled::Everywhere),
        "ON_WITH_INCLUSION" => {
            let (namespaces, services) = listed("inclusion");
            Some(Enabled::In(namespaces, services))
        }
        "ON_WITH_EXCLUSION" => {
            let (namespaces, services) = listed("exclusion");
            Some(Enabled::Except(namespaces, services))
        }
        mode => {
            converter.note(config, "spec.mode", &format!("{mode:?} is unknown"));
            None
        }
    }
}

/// An AuthorizationPolicy that allows what its rules match, so without rules nothing.
struct AllowPolicy<'p> {
    namespace: &'p str,
    name: &'p str,
    /// Labels of the workloads; `None` for all workloads of the namespace.
    selector: Option<Map<String, Value>>,
    rules: Vec<Value>,
    is_dry_run: bool,
}

impl AllowPolicy<'_> {
    fn write(self, converter: &mut Converter<'_>) {
        let object = converter.object("AuthorizationPolicy", self.namespace, self.name);
        if let Some(selector) = self.selector {
            object["spec"]["selector"] = json!({ "matchLabels": selector });
        }
        set(&mut object["spec"], "rules", self.rules.into());
        if self.is_dry_run {
            object["metadata"]["annotations"] = json!({ DRY_RUN: "true" });
        }
    }
}

/// Writes the policies that hold without roles.
fn defaults(converter: &mut Converter<'_>, config: &Old<'_>, enabled: &Enabled, is_dry_run: bool) {
    if matches!(enabled, Enabled::Everywhere | Enabled::Except(..)) {
        let policy = AllowPolicy {
            namespace: &converter.options.root_namespace,
            name: "generated-global-deny-all",
            selector: None,
            rules: Vec::new(),
            is_dry_run,
        };
        policy.write(converter);
    }
    let (namespaces, services, allows) = match enabled {
        Enabled::Everywhere => return,
        Enabled::In(namespaces, services) => (namespaces, services, false),
        Enabled::Except(namespaces, services) => (namespaces, services, true),
    };
    let rules = if allows { vec![json!({})] } else { Vec::new() };
    let effect = if allows { "allow-all" } else { "deny-all" };
    for namespace in namespaces {
        let policy = AllowPolicy {
            namespace,
            name: &format!("generated-namespace-{effect}"),
            selector: None,
            rules: rules.clone(),
            is_dry_run,
        };
        policy.write(converter);
    }
    for host in services {
        let mut parts = host.split('.');
        let (name, namespace) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let Some(selector) = converter.service(namespace, name).and_then(KubeService::selector) else {
            let message = format!("Service {namespace}/{name} with a selector is not among the files");
            converter.note(config, "spec.services", &message);
            continue;
        };
        let policy = AllowPolicy {
            namespace,
            name: &format!("generated-service-{effect}-{name}"),
            selector: Some(selector),
            rules: rules.clone(),
            is_dry_run,
        };
        policy.write(converter);
    }
}

/// A rule of a role that has bindings.
struct BoundRule<'r> {
    role: &'r Old<'r>,
    bindings: &'r [&'r Old<'r>],
    /// Position in the rules of the role.
    index: usize,
    permission: Permission,
    /// True if the policies of the whole mesh are in dry-run mode.
    is_dry_run: bool,
}

fn convert_role(
    converter: &mut Converter<'_>,
    role: &Old<'_>,
    bindings: &[&Old<'_>],
    enabled: &Enabled,
    is_dry_run: bool,
) {
    for (index, rule) in role.spec.items("rules").enumerate() {
        let Some(permission) = permission(converter, role, rule, index) else {
            continue;
        };
        let bound = BoundRule {
            role,
            bindings,
            index,
            permission,
            is_dry_run,
        };
        for (number, service) in rule.texts("services").iter().enumerate() {
            for (target, selector) in targets(converter, role, service, enabled).into_iter().enumerate() {
                let name = format!("generated-{}-rule{index}-svc{number}-target{target}", role.name);
                bound.convert_target(converter, &name, &selector.unwrap_or_default());
            }
        }
    }
}

impl BoundRule<'_> {
    /// Writes the policies of one target: those for each combination of labels that the rule demands.
    fn convert_target(&self, converter: &mut Converter<'_>, name: &str, target: &Map<String, Value>) {
        for (combination, labels) in self.permission.labels.iter().enumerate() {
            let conflicts = labels
                .iter()
                .any(|(key, value)| target.get(key).is_some_and(|known| known != value));
            if conflicts {
                let field = format!("spec.rules[{}].constraints", self.index);
                let message = "a label of the destination contradicts the selector of the service";
                converter.note(self.role, &field, message);
                continue;
            }
            let mut selector = target.clone();
            selector.extend(labels.clone());
            if self.permission.labels.len() > 1 {
                self.write_policies(converter, &format!("{name}-labels{combination}"), &selector);
            } else {
                self.write_policies(converter, name, &selector);
            }
        }
    }

    /// Writes a policy for the subjects of the enforced bindings, and one in dry-run mode for those of permissive ones.
    fn write_policies(&self, converter: &mut Converter<'_>, name: &str, selector: &Map<String, Value>) {
        for is_permissive in [false, true] {
            let mut rules = Vec::new();
            for binding in self.bindings {
                if (binding.spec.text("mode") == Some("PERMISSIVE")) == is_permissive {
                    let subjects = subjects(converter, binding);
                    rules.extend(subjects.into_iter().map(|subject| self.permission.with(subject)));
                }
            }
            if rules.is_empty() {
                continue;
            }
            let suffix = if is_permissive { "-dry-run" } else { "" };
            let policy = AllowPolicy {
                namespace: &self.role.namespace,
                name: &format!("{name}{suffix}"),
                selector: (!selector.is_empty()).then(|| selector.clone()),
                rules,
                is_dry_run: self.is_dry_run || is_permissive,
            };
            policy.write(converter);
        }
    }
}

/// Returns the selectors of the services that a name of a role means; `None` for all workloads of its namespace.
fn targets(
    converter: &mut Converter<'_>,
    role: &Old<'_>,
    pattern: &str,
    enabled: &Enabled,
) -> Vec<Option<Map<String, Value>>> {
    let suffix = format!(".{}.svc.{}", role.namespace, converter.options.domain);
    if pattern == "*" && enabled.is_uniform(&role.namespace, &suffix) {
        return if enabled.has_namespace(&role.namespace) {
            vec![None]
        } else {
            Vec::new()
        };
    }
    let matches = |host: &str| match (pattern.strip_suffix('*'), pattern.strip_prefix('*')) {
        (Some(prefix), _) => host.starts_with(prefix),
        (_, Some(suffix)) => host.ends_with(suffix),
        _ => host == pattern,
    };
    let (mut found, mut selectors, mut without) = (false, BTreeMap::new(), Vec::new());
    for service in converter
        .services
        .iter()
        .filter(|service| service.namespace == role.namespace)
    {
        let host = converter.fqdn(&service.name, &service.namespace);
        if !matches(&host) {
            continue;
        }
        found = true;
        if !enabled.has(&role.namespace, &host) {
            continue;
        }
        match service.selector() {
            Some(selector) => drop(selectors.insert(Value::from(selector.clone()).to_string(), selector)),
            None => without.push(service.name.clone()),
        }
    }
    for name in without {
        converter.note(role, "spec.rules.services", &format!("Service {name} has no selector"));
    }
    if !found {
        converter.note(
            role,
            "spec.rules.services",
            &format!("no Service among the files matches {pattern:?}"),
        );
    }
    selectors.into_values().map(Some).collect()
}

/// The permission of one rule of a role.
struct Permission {
    operation: Map<String, Value>,
    when: Vec<Value>,
    /// The combinations of labels that workloads must have; one without labels if there is no condition.
    labels: Vec<Map<String, Value>>,
}

impl Permission {
    /// Returns a rule with a subject.
    fn with(&self, (source, conditions): (Map<String, Value>, Vec<Value>)) -> Value {
        let mut rule = json!({});
        if !source.is_empty() {
            rule["from"] = json!([{ "source": source }]);
        }
        if !self.operation.is_empty() {
            rule["to"] = json!([{ "operation": self.operation }]);
        }
        let when: Vec<Value> = self.when.iter().cloned().chain(conditions).collect();
        set(&mut rule, "when", when.into());
        rule
    }
}

fn permission(converter: &mut Converter<'_>, role: &Old<'_>, rule: Spec<'_>, index: usize) -> Option<Permission> {
    let mut operation = Map::new();
    for field in ["hosts", "notHosts", "paths", "notPaths", "methods", "notMethods"] {
        add(&mut operation, field, rule.texts(field));
    }
    for field in ["ports", "notPorts"] {
        let ports = rule
            .items(field)
            .map(|port| port.0.to_string().trim_matches('"').to_owned());
        add(&mut operation, field, ports.collect());
    }
    let (mut when, mut labels) = (Vec::new(), vec![Map::new()]);
    for (position, constraint) in rule.items("constraints").enumerate() {
        let key = constraint.text("key").unwrap_or_default();
        let values = constraint.texts("values");
        let label = key
            .strip_prefix("destination.labels[")
            .and_then(|rest| rest.strip_suffix(']'));
        match (key, label) {
            (_, Some(label)) => {
                let combined = labels.iter().flat_map(|known| {
                    values.iter().map(|value| {
                        let mut labels = known.clone();
                        labels.insert(label.to_owned(), value.clone().into());
                        labels
                    })
                });
                labels = combined.collect();
            }
            ("destination.port", _) => add(&mut operation, "ports", values),
            ("destination.user", _) => {
                let field = format!("spec.rules[{index}].constraints[{position}]");
                converter.note(role, &field, "destination.user cannot be mapped; the rule is left out");
                return None;
            }
            // A policy applies to its own namespace only.
            ("destination.namespace", _) => {}
            _ => when.push(json!({ "key": key, "values": values })),
        }
    }
    Some(Permission {
        operation,
        when,
        labels,
    })
}

/// Adds values, unless one of them means any.
fn add(to: &mut Map<String, Value>, field: &str, values: Vec<String>) {
    if !values.is_empty() && !values.iter().any(|value| value == "*") {
        to.insert(field.to_owned(), values.into());
    }
}

/// Returns the sources and conditions of the subjects of a binding.
fn subjects(converter: &mut Converter<'_>, binding: &Old<'_>) -> Vec<(Map<String, Value>, Vec<Value>)> {
    let mut subjects = Vec::new();
    for subject in binding.spec.items("subjects") {
        let (mut source, mut when) = (Map::new(), Vec::new());
        let user = subject.text("user").map(str::to_owned);
        let principals: Vec<String> = user.into_iter().chain(subject.texts("names")).collect();
        add(&mut source, "principals", principals);
        for (from, to) in [
            ("notNames", "notPrincipals"),
            ("namespaces", "namespaces"),
            ("notNamespaces", "notNamespaces"),
            ("ips", "ipBlocks"),
            ("notIps", "notIpBlocks"),
        ] {
            add(&mut source, to, subject.texts(from));
        }
        let group = subject.text("group").map(str::to_owned);
        let groups: Vec<String> = group.into_iter().chain(subject.texts("groups")).collect();
        if !groups.is_empty() {
            when.push(json!({ "key": GROUPS, "values": groups }));
        }
        let not_groups = subject.texts("notGroups");
        if !not_groups.is_empty() {
            when.push(json!({ "key": GROUPS, "notValues": not_groups }));
        }
        for (key, value) in subject.entries("properties") {
            let value = value.0.as_str().unwrap_or_default().to_owned();
            if value == "*" {
                continue;
            }
            match SOURCES.iter().find(|(name, _)| *name == key) {
                Some((_, field)) if source.contains_key(*field) => {
                    when.push(json!({ "key": key, "values": [value] }));
                }
                Some((_, field)) => add(&mut source, field, vec![value]),
                None => when.push(json!({ "key": key, "values": [value] })),
            }
        }
        subjects.push((source, when));
    }
    if subjects.is_empty() {
        converter.note(binding, "spec.subjects", "is empty, so it permits nothing");
    }
    subjects
}
