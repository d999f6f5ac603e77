//! DestinationRules merged by host, and their lookup order.
//!
//! Rules of a host are merged once for clients of the same namespace and once for others, because each sees a different
//! set. Note: the first namespace with any rule for a host ends the search, even if a workload selector then excludes
//! all of them.

mod units;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
};

use smol_str::SmolStr;

pub use self::units::PolicySize;
use super::{
    MeshSnapshot,
    installation::Installation,
    output_limit::{self, Demand, Limits, SMALL},
    policy,
    service::{Service, ServiceKey},
};
use crate::{
    api::{Config, Kind, Meta},
    base::{Hostname, Labels, Namespace, ObjectKey, Shared, cidr, host, select},
    model::export::ExportTo,
    proto::istio::networking::v1alpha3::{
        self as networking, LoadBalancerSettings, load_balancer_settings::LbPolicy, traffic_policy::PortTrafficPolicy,
    },
    table::{Cx, TableWriter},
};

/// Key of the rules of one namespace for one host (fully qualified, may be a wildcard).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleKey {
    /// Namespace of the rules.
    pub namespace: Namespace,
    /// Resolved host.
    pub host: Hostname,
}

/// Merged rules of one (namespace, host). Several remain if `exportTo` or `workloadSelector` differ. In order of
/// precedence: with `workloadSelector` first, then older ones. A rule that is equal in two pools is one allocation.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct HostRules {
    /// Rules for clients of the own namespace.
    pub local: Box<[Shared<DestinationRule>]>,
    /// Rules for clients of other namespaces.
    pub exported: Box<[Shared<DestinationRule>]>,
    /// Rules of `local` that no other namespace sees, with which the lookup of clients in the root namespace starts.
    pub private: Box<[Shared<DestinationRule>]>,
}

/// One of the lists of [`HostRules`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pool {
    /// [`HostRules::local`].
    Local,
    /// [`HostRules::exported`].
    Exported,
    /// [`HostRules::private`].
    Private,
}

impl HostRules {
    /// Returns the rules of a pool.
    pub fn pool(&self, pool: Pool) -> &[Shared<DestinationRule>] {
        match pool {
            Pool::Local => &self.local,
            Pool::Exported => &self.exported,
            Pool::Private => &self.private,
        }
    }

    /// Returns true if clients of the own namespace and of all others see the same single rule.
    fn are_general(&self) -> bool {
        match (&*self.local, &*self.exported, &*self.private) {
            ([local], [exported], []) => {
                let is_public = exported.export_to == ExportTo::Public;
                local.ptr_eq(exported) && is_public && local.spec.workload_selector.is_none()
            }
            _ => false,
        }
    }
}

/// A merged DestinationRule.
#[derive(Clone, Debug, PartialEq)]
pub struct DestinationRule {
    /// Metadata of the first merged rule, for config metadata.
    pub meta: Shared<Meta>,
    /// All rules that were merged.
    pub from: Vec<ObjectKey>,
    /// Fully qualified host.
    pub host: Hostname,
    /// Visibility.
    pub export_to: ExportTo,
    /// Merged specification.
    pub spec: MergedSpec,
    /// Indexes of the subsets, sorted by name: each cluster of a subset looks it up several times.
    by_name: Vec<u32>,
    /// Settings for single ports, sorted.
    by_port: Box<[PortEntry]>,
    /// True if any part has a consistent hash.
    pub has_consistent_hash: bool,
}

/// Settings of a rule for a single port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PortEntry {
    /// Index of the subset that has the settings; `None` for those of the rule itself.
    subset: Option<u32>,
    /// Number of the port.
    port: u32,
    /// Index of the settings in the policy of the subset or the rule.
    index: u32,
}

impl DestinationRule {
    /// Returns the subset of this name; the first one if there are several.
    pub fn subset(&self, name: &str) -> Option<&networking::Subset> {
        self.spec.subsets.get(self.index_of(name)? as usize)
    }

    fn index_of(&self, name: &str) -> Option<u32> {
        let at = self.position_of(name).ok()?;
        Some(self.by_name[at])
    }

    /// Returns the settings for a port that a subset itself has, or the rule without a subset, in their order. Usually
    /// only the first ones count. A rule has room for thousands, and a service for tens of thousands of ports.
    pub fn port_settings<'a>(
        &'a self,
        subset: Option<&str>,
        port: u32,
    ) -> impl Iterator<Item = &'a PortTrafficPolicy> + use<'a> {
        let declared = match subset {
            None => Some((None, self.spec.traffic_policy.as_deref())),
            Some(name) => self.index_of(name).map(|index| {
                let subset = &self.spec.subsets[index as usize];
                (Some(index), subset.traffic_policy.as_deref())
            }),
        };
        let declared = declared.and_then(|(subset, policy)| Some((subset, policy?)));
        declared.into_iter().flat_map(move |(subset, policy)| {
            let begin = self
                .by_port
                .partition_point(|entry| (entry.subset, entry.port) < (subset, port));
            let entries = self.by_port[begin..].iter();
            let of_port = entries.take_while(move |entry| (entry.subset, entry.port) == (subset, port));
            of_port.map(move |entry| &policy.port_level_settings[entry.index as usize])
        })
    }

    /// Returns the policy that the subset itself has, or that of the rule if the name is empty.
    pub fn own_policy(&self, subset: &str) -> Option<&networking::TrafficPolicy> {
        match subset {
            "" => self.spec.traffic_policy.as_deref(),
            name => self.subset(name)?.traffic_policy.as_deref(),
        }
    }

    /// Returns the position of the subset in the sorted indexes, or its insertion point.
    fn position_of(&self, name: &str) -> Result<usize, usize> {
        self.by_name
            .binary_search_by(|index| self.spec.subsets[*index as usize].name.as_str().cmp(name))
    }
}

/// The specification of a merged rule. Its host and its visibility are as written.
#[derive(Clone, Debug)]
pub struct MergedSpec {
    /// The first object, with whose specification most rules do. With a copy of each, a mesh of 1,000 rules would take
    /// 2 MiB more.
    first: Shared<Config<networking::DestinationRule>>,
    /// The result with other objects, or without its surplus.
    changed: Option<Box<networking::DestinationRule>>,
}

impl MergedSpec {
    fn make_mut(&mut self) -> &mut networking::DestinationRule {
        self.changed.get_or_insert_with(|| Box::new(self.first.spec.clone()))
    }
}

impl Deref for MergedSpec {
    type Target = networking::DestinationRule;

    fn deref(&self) -> &networking::DestinationRule {
        self.changed.as_deref().unwrap_or(&self.first.spec)
    }
}

impl PartialEq for MergedSpec {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

/// Reference to a rule: a small key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleRef {
    /// Namespace and host of the rule (the host may be a wildcard that covers the service).
    pub key: RuleKey,
    /// Pool of the rule.
    pub pool: Pool,
    /// First object of the merged rule.
    pub first: ObjectKey,
}

/// Raw rules.
type RawRules = TableWriter<ObjectKey, Config<networking::DestinationRule>>;

/// Returns the (namespace, host) pairs that changed DestinationRules affect.
pub fn candidates(installation: &Installation, rules: &RawRules) -> Vec<RuleKey> {
    affected(installation, rules, |_| true)
}

/// Returns the (namespace, host) pairs of changed DestinationRules with large policies.
pub fn large_policy_candidates(installation: &Installation, rules: &RawRules) -> Vec<RuleKey> {
    affected(installation, rules, |rule| PolicySize::of_rule(rule).is_large())
}

/// Returns the (namespace, host) pairs of changed DestinationRules that meet a condition.
fn affected(
    installation: &Installation,
    rules: &RawRules,
    condition: impl Fn(&networking::DestinationRule) -> bool,
) -> Vec<RuleKey> {
    let changes = rules.changes().iter();
    let versions = changes.flat_map(|(_, old, new)| [old, new].into_iter().flatten());
    let versions = versions.filter(|rule| condition(&rule.spec));
    versions.map(|rule| rule_key(installation, rule)).collect()
}

/// Returns the key under which a rule is merged.
fn rule_key(installation: &Installation, rule: &Config<networking::DestinationRule>) -> RuleKey {
    let namespace = rule.meta.namespace();
    RuleKey {
        namespace: namespace.clone(),
        host: resolve_host(installation, &rule.spec.host, namespace),
    }
}

/// Returns the fully qualified host: names without a dot are services of that namespace.
pub fn resolve_host(installation: &Installation, host: &str, namespace: &Namespace) -> Hostname {
    if host.is_empty() || host.contains('.') || host == "*" || cidr::parse_ip(host).is_some() {
        Hostname::new(host)
    } else {
        Hostname::from(format!("{host}.{namespace}.svc.{}", installation.domain))
    }
}

/// Emits the index key of a raw rule: namespace and host as written.
pub fn raw_key(
    key: &ObjectKey,
    rule: &Config<networking::DestinationRule>,
    emit: &mut dyn FnMut((Namespace, SmolStr)),
) {
    emit((key.namespace.clone(), SmolStr::new(&rule.spec.host)));
}

/// Emits the index key of merged rules for a wildcard host: the namespace. Exact hosts are found by their key.
pub fn wildcard_key(key: &RuleKey, _: &HostRules, emit: &mut dyn FnMut(Namespace)) {
    if host::is_wildcard(&key.host) {
        emit(key.namespace.clone());
    }
}

/// Emits the index key of merged rules with a consistent hash: the host, or `None` for a wildcard host.
pub fn consistent_hash_key(key: &RuleKey, rules: &HostRules, emit: &mut dyn FnMut(Option<Hostname>)) {
    let mut all = [&rules.local, &rules.exported, &rules.private].into_iter().flatten();
    if all.any(|rule| rule.has_consistent_hash) {
        emit((!host::is_wildcard(&key.host)).then(|| key.host.clone()));
    }
}

fn has_consistent_hash(rule: &networking::DestinationRule) -> bool {
    let is_hash = |settings: Option<&LoadBalancerSettings>| {
        let policy = settings.and_then(|settings| settings.lb_policy.as_ref());
        matches!(policy, Some(LbPolicy::ConsistentHash(_)))
    };
    let subsets = rule.subsets.iter().map(|subset| subset.traffic_policy.as_deref());
    subsets.chain([rule.traffic_policy.as_deref()]).flatten().any(|policy| {
        let ports = policy
            .port_level_settings
            .iter()
            .map(|port| port.load_balancer.as_deref());
        ports.chain([policy.load_balancer.as_deref()]).any(is_hash)
    })
}

/// Returns true if a rule with a consistent hash may apply to a host. Routes depend on no other rules, and looking one
/// up reads several keys for each service and namespace.
pub fn may_have_consistent_hash(cx: &Cx, mesh: &MeshSnapshot, host: &Hostname) -> bool {
    let rules = &mesh.consistent_hash_rules;
    [Some(host.clone()), None]
        .iter()
        .any(|key| rules.get(cx, key).next().is_some())
}

/// Derives the merged rules of one (namespace, host).
pub fn host_rules(cx: &Cx, mesh: &MeshSnapshot, key: &RuleKey) -> Option<HostRules> {
    let mut raw = raw_rules(cx, mesh, key);
    if raw.is_empty() {
        return None;
    }
    raw.sort_by_key(|rule| (rule.spec.workload_selector.is_none(), rule.meta.age_order()));
    let private_by_default = has(&mesh.mesh_config(cx).default_destination_rule_export_to, ".");
    let enhanced = mesh.installation.features.enable_enhanced_destinationrule_merge;
    let inherits = mesh.large_policies.get(cx, key).is_some();
    let [mut local, mut exported, mut private] = [(); 3].map(|()| ConsolidatedRules::new(enhanced));
    for rule in raw {
        let candidate = Candidate::new(rule, key, applied_subsets(cx, mesh, rule, inherits));
        if candidate.is_local(&key.namespace) {
            local.add(&candidate);
        }
        if candidate.is_private(&key.namespace, private_by_default) {
            private.add(&candidate);
        } else {
            exported.add(&candidate);
        }
    }
    let exported = exported.finish();
    let shared = |rule: Shared<DestinationRule>| {
        let same = exported.iter().find(|exported| **exported == rule);
        same.cloned().unwrap_or(rule)
    };
    Some(HostRules {
        local: local.finish().into_iter().map(shared).collect(),
        private: private.finish().into_iter().map(shared).collect(),
        exported,
    })
}

/// Returns the raw rules whose host resolves to that of the key: written in full, or as a short name in its own
/// namespace.
fn raw_rules<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    key: &RuleKey,
) -> Vec<&'a Shared<Config<networking::DestinationRule>>> {
    let suffix = format!(".{}.svc.{}", key.namespace, mesh.installation.domain);
    let short = key.host.strip_suffix(suffix.as_str());
    let forms = std::iter::once(&*key.host).chain(short);
    forms
        .filter(|form| resolve_host(&mesh.installation, form, &key.namespace) == key.host)
        .flat_map(|form| {
            let index = &mesh.raw_rules_by_host;
            index.get(cx, &(key.namespace.clone(), SmolStr::new(form)))
        })
        .map(|(_, rule)| rule)
        .collect()
}

/// Derives the size of the large policies of a (namespace, host), which the subsets of all its rules may inherit; no
/// row without any.
pub fn large_policy(cx: &Cx, mesh: &MeshSnapshot, key: &RuleKey) -> Option<PolicySize> {
    let rules = raw_rules(cx, mesh, key).into_iter();
    let sizes = rules.map(|rule| PolicySize::of_rule(&rule.spec));
    sizes.filter(|size| size.is_large()).reduce(PolicySize::largest)
}

/// Returns true if the subsets of a rule count more than those of a small object, as far as the rule alone shows.
fn may_be_large(rule: &networking::DestinationRule) -> bool {
    units::of_subsets(rule, PolicySize::of_rule(rule)).sum::<u64>() > SMALL
}

/// Returns the changed rules whose subsets may count more than those of a small object, and the rules for which other
/// large policies hold than before.
pub fn demand_candidates(
    mesh: &MeshSnapshot,
    rules: &RawRules,
    policies: &TableWriter<RuleKey, PolicySize>,
) -> Vec<ObjectKey> {
    let cx = Cx::untracked();
    let is_concerned = |rule: &Config<networking::DestinationRule>| {
        let key = rule_key(&mesh.installation, rule);
        may_be_large(&rule.spec) || mesh.large_policies.get(&cx, &key).is_some()
    };
    let changed = rules.changes().iter().filter(|(_, old, new)| {
        let mut versions = [old, new].into_iter().flatten();
        versions.any(|rule| is_concerned(rule))
    });
    let policies = policies.changes().iter();
    let heirs = policies.flat_map(|(key, ..)| raw_rules(&cx, mesh, key));
    let heirs = heirs.map(|rule| rule.meta.key.clone());
    changed.map(|(key, ..)| key.clone()).chain(heirs).collect()
}

/// Derives what the subsets of one rule count, unless it is small.
pub fn demand(cx: &Cx, mesh: &MeshSnapshot, key: &ObjectKey) -> Option<Demand> {
    let raw = mesh.raw_destination_rules.get(cx, key)?;
    let own = PolicySize::of_rule(&raw.spec);
    let large = mesh.large_policies.get(cx, &rule_key(&mesh.installation, raw));
    let inherited = large.map_or(own, |large| own.largest(**large));
    let limit = Limits::of(mesh, Kind::DestinationRule).object;
    let (mut declared, mut applied, mut kept) = (0, 0, 0);
    for (position, units) in units::of_subsets(&raw.spec, inherited).enumerate() {
        declared += units;
        if declared <= limit {
            (applied, kept) = (declared, position + 1);
        }
    }
    (declared > SMALL).then(|| Demand {
        meta: raw.meta.clone(),
        declared,
        applied,
        parts: raw.spec.subsets.len(),
        kept,
        shares: Default::default(),
    })
}

/// Returns how many subsets of a rule apply. `inherits` is true if they may inherit a large policy.
fn applied_subsets(cx: &Cx, mesh: &MeshSnapshot, raw: &Config<networking::DestinationRule>, inherits: bool) -> usize {
    let is_small = !inherits && !may_be_large(&raw.spec);
    let kept = (!is_small).then(|| output_limit::kept(cx, mesh, Kind::DestinationRule, &raw.meta.key));
    kept.flatten().unwrap_or(raw.spec.subsets.len())
}

fn has(values: &[String], expected: &str) -> bool {
    values.iter().any(|value| value == expected)
}

/// A raw rule with its `exportTo` as a set of the written values, which merging compares.
struct Candidate {
    rule: Shared<DestinationRule>,
    written: BTreeSet<String>,
}

impl Candidate {
    /// Returns a rule with its first subsets, at most this many.
    fn new(raw: &Shared<Config<networking::DestinationRule>>, key: &RuleKey, most_subsets: usize) -> Self {
        // A rule with a selector applies to workloads of its own namespace, whatever its `exportTo`.
        let written: Vec<String> = match raw.spec.workload_selector {
            None => raw.spec.export_to.clone(),
            Some(_) => vec![".".to_owned()],
        };
        // `~` is not a namespace, so it needs no case of its own. Parity (pilot/pkg/model/push_context.go): neither is
        // `.`, because clients of the own namespace find the rule first. Only those in the root namespace do not.
        let export_to = if written.is_empty() || has(&written, "*") {
            ExportTo::Public
        } else {
            ExportTo::Namespaces(written.iter().map(Namespace::new).collect())
        };
        let mut spec = MergedSpec {
            first: raw.clone(),
            changed: None,
        };
        if spec.subsets.len() > most_subsets {
            spec.make_mut().subsets.truncate(most_subsets);
        }
        Self {
            rule: Shared::new(DestinationRule {
                meta: raw.meta.clone(),
                from: vec![raw.meta.key.clone()],
                host: key.host.clone(),
                export_to,
                by_name: indexes_by_name(&spec),
                by_port: Box::default(),
                has_consistent_hash: false,
                spec,
            }),
            written: written.into_iter().collect(),
        }
    }

    fn names(&self, value: &str) -> bool {
        self.written.contains(value)
    }

    /// Returns true if its own namespace sees it; the mesh's default does not matter here.
    fn is_local(&self, own: &Namespace) -> bool {
        self.written.is_empty() || ["*", ".", own].into_iter().any(|value| self.names(value))
    }

    /// Returns true if only its own namespace sees it.
    fn is_private(&self, own: &Namespace, private_by_default: bool) -> bool {
        match self.written.len() {
            0 => private_by_default,
            1 => self.names(".") || self.names(own),
            _ => false,
        }
    }
}

/// Merges the rules of one pool, in order of precedence.
struct ConsolidatedRules {
    enhanced: bool,
    merged: Vec<(BTreeSet<String>, DestinationRule)>,
}

impl ConsolidatedRules {
    fn new(enhanced: bool) -> Self {
        Self {
            enhanced,
            merged: Vec::new(),
        }
    }

    /// Merges a rule into every earlier one that accepts it, and keeps it separately if no rule accepted it completely.
    fn add(&mut self, candidate: &Candidate) {
        let mut apart = true;
        for (written, existing) in &mut self.merged {
            if self.enhanced {
                let same = candidate.written == *written;
                let wider = !written.is_empty() && candidate.written.is_superset(written);
                apart = !same;
                if !same && !wider {
                    continue;
                }
            }
            match (&candidate.rule.spec.workload_selector, &existing.spec.workload_selector) {
                (Some(a), Some(b)) if a.match_labels != b.match_labels => {
                    apart = true;
                    continue;
                }
                (Some(_), Some(_)) | (None, None) => apart = false,
                _ => {}
            }
            merge(existing, &candidate.rule);
        }
        if apart {
            let rule = DestinationRule::clone(&candidate.rule);
            self.merged.push((candidate.written.clone(), rule));
        }
    }

    fn finish(self) -> Box<[Shared<DestinationRule>]> {
        let finished = |(_, rule): (_, DestinationRule)| DestinationRule {
            by_port: port_entries(&rule.spec),
            has_consistent_hash: has_consistent_hash(&rule.spec),
            ..rule
        };
        self.merged.into_iter().map(finished).map(Shared::new).collect()
    }
}

/// Returns the indexes of the subsets, sorted by name; the first one counts if several have a name.
fn indexes_by_name(spec: &networking::DestinationRule) -> Vec<u32> {
    let name = |index: &u32| spec.subsets[*index as usize].name.as_str();
    let mut indexes: Vec<u32> = (0..spec.subsets.len() as u32).collect();
    indexes.sort_by_key(name);
    indexes.dedup_by(|later, first| name(later) == name(first));
    indexes
}

/// Returns the settings for single ports, sorted. Those without a port are omitted.
fn port_entries(spec: &networking::DestinationRule) -> Box<[PortEntry]> {
    let of_subsets = spec.subsets.iter().map(|subset| subset.traffic_policy.as_deref());
    let policies = (0..).map(Some).zip(of_subsets);
    let policies = std::iter::once((None, spec.traffic_policy.as_deref())).chain(policies);
    let mut found: Vec<PortEntry> = Vec::new();
    for (subset, policy) in policies {
        let all: &[PortTrafficPolicy] = policy.map_or(&[][..], |policy| &policy.port_level_settings);
        found.extend((0..).zip(all).filter_map(|(index, settings)| {
            let port = settings.port?.number;
            Some(PortEntry { subset, port, index })
        }));
    }
    found.sort_unstable();
    found.into_boxed_slice()
}

/// Adds subsets that do not exist yet, and the traffic policy if there is none.
fn merge(into: &mut DestinationRule, rule: &DestinationRule) {
    into.from.extend(rule.from.iter().cloned());
    for subset in &rule.spec.subsets {
        if let Err(at) = into.position_of(&subset.name) {
            into.by_name.insert(at, into.spec.subsets.len() as u32);
            into.spec.make_mut().subsets.push(subset.clone());
        }
    }
    if into.spec.traffic_policy.is_none() && rule.spec.traffic_policy.is_some() {
        into.spec
            .make_mut()
            .traffic_policy
            .clone_from(&rule.spec.traffic_policy);
    }
}

/// Emits the index keys of the rules of a host: the client labels in their selectors.
pub fn selector_labels(key: &RuleKey, rules: &HostRules, emit: &mut dyn FnMut((Namespace, SmolStr))) {
    let selectors = rules
        .local
        .iter()
        .filter_map(|rule| rule.spec.workload_selector.as_ref());
    let names: BTreeSet<&String> = selectors.flat_map(|selector| selector.match_labels.keys()).collect();
    for name in names {
        emit((key.namespace.clone(), SmolStr::new(name)));
    }
}

/// Emits the index keys of the rules of a host: the namespaces whose clients may see another rule than all others.
pub fn client_namespaces(key: &RuleKey, rules: &HostRules, emit: &mut dyn FnMut(Namespace)) {
    let mut namespaces = BTreeSet::from([&key.namespace]);
    for rule in &rules.exported {
        if let ExportTo::Namespaces(audience) = &rule.export_to {
            namespaces.extend(audience);
        }
    }
    for namespace in namespaces {
        emit(namespace.clone());
    }
}

/// The rules that may give clients of a namespace another one than all others have: those of the namespace, and those
/// that are exported to it by name.
pub struct OwnRules<'a> {
    client: &'a Namespace,
    /// By host. True if clients of all namespaces see the same rule for a service of this namespace.
    exact: BTreeMap<&'a Hostname, bool>,
    wildcards: Vec<&'a Hostname>,
}

impl<'a> OwnRules<'a> {
    /// Returns the rules of clients in a namespace.
    pub fn of(cx: &Cx, mesh: &'a MeshSnapshot, client: &'a Namespace) -> Self {
        let mut own = Self {
            client,
            exact: BTreeMap::new(),
            wildcards: Vec::new(),
        };
        for (key, rules) in mesh.rules_by_client.get(cx, client) {
            if host::is_wildcard(&key.host) {
                own.wildcards.push(&key.host);
            } else {
                let is_general = key.namespace == *client && rules.are_general();
                own.exact
                    .entry(&key.host)
                    .and_modify(|all| *all &= is_general)
                    .or_insert(is_general);
            }
        }
        own
    }

    /// Returns true if clients of the namespace may have another rule for a service than all others.
    pub fn concern(&self, service: &ServiceKey) -> bool {
        let host = &service.hostname;
        let is_general = |is_general: &bool| *is_general && service.namespace == *self.client;
        !self.exact.get(host).is_none_or(is_general) || self.wildcards.iter().any(|wild| host::subset_of(host, wild))
    }

    /// Returns true if one may concern a service to which a rule with a consistent hash applies: either it has the hash
    /// itself, or it takes precedence over the rule that has it.
    pub fn may_decide_consistent_hash(&self, cx: &Cx, mesh: &MeshSnapshot) -> bool {
        let is_covered = |hashed: &Option<Hostname>| match hashed {
            Some(host) => self.wildcards.iter().any(|wild| host::subset_of(host, wild)),
            None => true,
        };
        let mut exact = self.exact.keys();
        exact.any(|host| may_have_consistent_hash(cx, mesh, host))
            || !self.wildcards.is_empty() && mesh.consistent_hash_rules.keys(cx).any(is_covered)
    }
}

/// Returns the rule of a client in a namespace for a service; `labels` are the client's, for rules with a selector.
pub fn lookup(
    cx: &Cx,
    mesh: &MeshSnapshot,
    client: &Namespace,
    labels: &Labels,
    service: &Service,
) -> Option<Shared<DestinationRule>> {
    find(cx, mesh, client, Some(labels), &service.key).map(|(_, rule)| rule)
}

/// Returns a rule by its reference.
pub fn rule(cx: &Cx, mesh: &MeshSnapshot, found: &RuleRef) -> Option<Shared<DestinationRule>> {
    let rules = mesh.destination_rules.get(cx, &found.key)?;
    let mut rules = rules.pool(found.pool).iter();
    rules.find(|rule| rule.from.first() == Some(&found.first)).cloned()
}

/// Looks up like [`lookup`], and returns the reference too. Without labels, rules with a selector are skipped.
///
/// Order: rules of the client's own namespace (in the root namespace only its private ones, because the others are for
/// all namespaces), rules that the service's namespace exports, rules that the root namespace exports.
pub fn find(
    cx: &Cx,
    mesh: &MeshSnapshot,
    client: &Namespace,
    labels: Option<&Labels>,
    service: &ServiceKey,
) -> Option<(RuleRef, Shared<DestinationRule>)> {
    let root = policy::root_namespace(cx, mesh);
    let own_pool = if *client == root { Pool::Private } else { Pool::Local };
    if let Some((key, rules)) = most_specific(cx, mesh, client, &service.hostname, own_pool) {
        let rule = choose(client, labels, rules.pool(own_pool).iter())?;
        // If others see the same rule, both use one reference, so that their resources are shared.
        let is_exported = rules.exported.iter().any(|exported| exported.ptr_eq(rule));
        let pool = if is_exported { Pool::Exported } else { own_pool };
        return Some(reference(key, pool, rule));
    }
    [&service.namespace, &root].into_iter().find_map(|namespace| {
        let (key, rules) = most_specific(cx, mesh, namespace, &service.hostname, Pool::Exported)?;
        let seen = rules.exported.iter().filter(|rule| rule.export_to.visible_to(client));
        choose(client, labels, seen).map(|rule| reference(key, Pool::Exported, rule))
    })
}

fn reference(key: &RuleKey, pool: Pool, rule: &Shared<DestinationRule>) -> (RuleRef, Shared<DestinationRule>) {
    let found = RuleRef {
        key: key.clone(),
        pool,
        first: rule.meta.key.clone(),
    };
    (found, rule.clone())
}

/// Returns the rules of a namespace for the most specific host that covers this one: the host itself, or else the
/// longest wildcard.
fn most_specific<'a>(
    cx: &Cx,
    mesh: &'a MeshSnapshot,
    namespace: &Namespace,
    hostname: &Hostname,
    pool: Pool,
) -> Option<(&'a RuleKey, &'a Shared<HostRules>)> {
    let exact = RuleKey {
        namespace: namespace.clone(),
        host: hostname.clone(),
    };
    let table = &mesh.destination_rules;
    if let Some((key, rules)) = table.get_key_value(cx, &exact)
        && !rules.pool(pool).is_empty()
    {
        return Some((key, rules));
    }
    let wildcards = mesh.wildcard_rules_by_namespace.get(cx, namespace);
    wildcards
        .filter(|(key, rules)| host::subset_of(hostname, &key.host) && !rules.pool(pool).is_empty())
        .min_by(|(a, _), (b, _)| host::more_specific(&a.host, &b.host))
}

/// Returns the first rule of a host whose selector matches the client, or else the last one without a selector.
fn choose<'a>(
    client: &Namespace,
    labels: Option<&Labels>,
    rules: impl Iterator<Item = &'a Shared<DestinationRule>>,
) -> Option<&'a Shared<DestinationRule>> {
    let mut general = None;
    for rule in rules {
        match (&rule.spec.workload_selector, labels) {
            (None, _) => general = Some(rule),
            (Some(selector), Some(labels)) if rule.meta.namespace() == client => {
                let pairs = selector.match_labels.iter();
                if select::matches(pairs.map(|(k, v)| (k.as_str(), v.as_str())), labels) {
                    return Some(rule);
                }
            }
            _ => {}
        }
    }
    general
}

#[cfg(test)]
mod tests;
