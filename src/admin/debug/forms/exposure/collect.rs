//! Collects the view of a service from the mesh.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use smol_str::SmolStr;

use super::{
    super::service::protocol, DestinationRule, Exposure, Gateway, HiddenBy, MAX_ROWS, Policy, Port, Route, Scopes,
    Seen, Server, Transport, Visibility, Waypoint, WaypointState, Workload,
};
use crate::{
    api::{Kind, Meta},
    base::{ClusterId, Labels, Namespace, ObjectKey, Shared, host},
    distribution::report::ObjectName,
    model::{
        MeshSnapshot, Service, ServiceKey, SidecarScope,
        ambient::policy::is_dry_run,
        authentication::{self, MtlsMode},
        destination_rule,
        endpoint::Endpoint,
        export::ExportTo,
        gateway::DeclaredServer,
        gateway_api::PARENTS_ANNOTATION,
        policy::{self, Attach, GATEWAY_NAME_LABEL, Subject, TargetService},
        service::ServicePort,
        sidecar_scope::ScopeKey,
        virtual_service::{self, MESH_GATEWAY, VirtualServiceSummary},
        waypoint::{self, NotAttached, Refusal},
    },
    proto::{
        istio::{
            extensions::v1alpha1::{TrafficExtension, WasmPlugin},
            networking::v1alpha3::{EnvoyFilter, client_tls_settings::TlSmode as ClientTls},
            security::v1beta1::{AuthorizationPolicy, RequestAuthentication, authorization_policy::Action},
            telemetry::v1alpha1::Telemetry,
        },
        json,
    },
    table::Cx,
};

/// A service in the mesh.
pub(super) struct View<'a> {
    pub(super) mesh: &'a MeshSnapshot,
    pub(super) cx: Cx,
    pub(super) key: &'a ServiceKey,
    pub(super) service: &'a Shared<Service>,
}

/// Endpoints of one workload.
struct Group<'a> {
    first: &'a Endpoint,
    endpoints: Vec<&'a Endpoint>,
    /// Labels of the workload, as selectors see them.
    labels: Labels,
}

impl View<'_> {
    pub(super) fn exposure(&self, scopes: &Scopes) -> Exposure {
        let endpoints = self
            .mesh
            .endpoints
            .get(&self.cx, self.key)
            .map(|row| row.endpoints.clone());
        let groups = self.groups(endpoints.as_deref().unwrap_or_default());
        let routes = self.routes();
        Exposure {
            host: self.key.hostname.to_string(),
            namespace: self.key.namespace.to_string(),
            objects: self.objects(),
            external: self.service.mesh_external,
            ports: self.service.ports.iter().map(|port| self.port(port, &groups)).collect(),
            workloads: groups.iter().take(MAX_ROWS).map(|group| self.workload(group)).collect(),
            workload_count: groups.len(),
            visibility: self.visibility(scopes),
            waypoint: self.waypoint(),
            policies: self.policies(&groups[..groups.len().min(MAX_ROWS)]),
            gateways: self.gateways(&routes),
            routes: routes.iter().map(|summary| self.route(summary)).collect(),
            destination_rule: self.destination_rule(),
        }
    }

    fn objects(&self) -> Vec<ObjectName> {
        let objects = self.service.all().map(|service| match &service.service_entry {
            Some(entry) => ObjectName::of(Kind::ServiceEntry, entry),
            None => {
                let cluster = &self.mesh.installation.cluster;
                let key = ObjectKey::new(cluster, service.key.namespace.clone(), service.name.clone());
                ObjectName::of(Kind::Service, &key)
            }
        });
        objects.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns the workloads, those with most endpoints first. An address counts once, whatever its ports.
    fn groups<'e>(&self, endpoints: &'e [Endpoint]) -> Vec<Group<'e>> {
        let mut groups: BTreeMap<(&SmolStr, &Namespace, &ClusterId, &SmolStr), Vec<&Endpoint>> = BTreeMap::new();
        for endpoint in endpoints {
            let origin = &endpoint.origin;
            let key = (
                &origin.workload_name,
                &origin.namespace,
                &origin.cluster,
                &origin.identity,
            );
            groups.entry(key).or_default().push(endpoint);
        }
        let mut groups: Vec<Group> = groups
            .into_values()
            .map(|endpoints| Group {
                first: endpoints[0],
                labels: self.labels(endpoints[0]),
                endpoints,
            })
            .collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.size()));
        groups
    }

    /// Returns the labels of the workload of an endpoint, without the added ones where it is known.
    fn labels(&self, endpoint: &Endpoint) -> Labels {
        let mut there = self.mesh.workloads_by_address.get(&self.cx, &endpoint.address);
        let own = there.find(|(key, _)| key.object.cluster == endpoint.origin.cluster);
        own.map_or_else(
            || Labels::clone(&endpoint.origin.labels),
            |(_, workload)| Labels::clone(&workload.labels),
        )
    }

    fn port(&self, port: &ServicePort, groups: &[Group]) -> Port {
        let mut mutual_tls = BTreeMap::new();
        let mut number = 0;
        for group in groups {
            let served = group.endpoints.iter().filter(|endpoint| endpoint.serves(port)).count();
            number += served;
            if let Some(mode) = self.mode(group, port) {
                *mutual_tls.entry(mode).or_default() += served;
            }
        }
        Port {
            number: port.number,
            name: port.name.to_string(),
            protocol: protocol(port.protocol),
            endpoints: number,
            mutual_tls,
        }
    }

    /// Returns the mode of mutual TLS of a workload at a port of the service; `None` if it does not serve the port, or
    /// nothing there enforces a mode.
    fn mode(&self, group: &Group, port: &ServicePort) -> Option<&'static str> {
        if Transport::of(group.first) == Transport::None {
            return None;
        }
        let target = group.endpoints.iter().find(|endpoint| endpoint.serves(port))?.port;
        let namespace = &group.first.origin.namespace;
        let mode = authentication::mtls_mode(&self.cx, self.mesh, namespace, &group.labels, target);
        Some(mode_name(mode))
    }

    fn workload(&self, group: &Group) -> Workload {
        let origin = &group.first.origin;
        let modes = self.service.ports.iter();
        let modes = modes.filter_map(|port| Some((port.number, self.mode(group, port)?)));
        let applies = |key: &ObjectKey| {
            let policy = self.mesh.authorization_policies.get(&self.cx, key);
            policy.is_some_and(|policy| policy.spec.action() == Action::Allow && !is_dry_run(policy))
        };
        let policies = policy::attached::<AuthorizationPolicy>(&self.cx, self.mesh, &group.subject());
        Workload {
            name: group.name(),
            namespace: origin.namespace.to_string(),
            cluster: origin.cluster.to_string(),
            identity: origin.identity.to_string(),
            endpoints: group.size(),
            transport: Transport::of(group.first),
            mutual_tls: modes.collect(),
            default_action: if policies.iter().any(applies) { "deny" } else { "allow" },
        }
    }

    fn visibility(&self, scopes: &Scopes) -> Visibility {
        let seen = scopes.iter().map(|(scope, proxies)| Seen {
            namespace: scope.key.namespace().to_string(),
            sidecar: scope.key.sidecar().map(|key| ObjectName::of(Kind::Sidecar, key)),
            gateway: matches!(scope.key, ScopeKey::Gateway(_)),
            proxies: *proxies,
            hidden_by: self.hidden_by(scope),
        });
        let mut seen: Vec<Seen> = seen.collect();
        let sum = |rows: &[Seen], is_counted: fn(&Seen) -> bool| -> usize {
            rows.iter().filter(|row| is_counted(row)).map(|row| row.proxies).sum()
        };
        let (seeing, proxies) = (sum(&seen, |row| row.hidden_by.is_none()), sum(&seen, |_| true));
        let scope_count = seen.len();
        seen.sort_by_key(|row| row.hidden_by.is_none());
        seen.truncate(MAX_ROWS);
        Visibility {
            export_to: self.export_to(),
            seeing,
            proxies,
            scopes: seen,
            scope_count,
        }
    }

    /// Returns the namespaces that a service of the host is exported to.
    fn export_to(&self) -> Vec<String> {
        let mut namespaces = BTreeSet::new();
        for service in self.service.all() {
            match &*service.export_to {
                ExportTo::Public => return vec!["*".to_owned()],
                ExportTo::None => {}
                ExportTo::Namespaces(some) => namespaces.extend(some.iter().map(ToString::to_string)),
            }
        }
        namespaces.into_iter().collect()
    }

    fn hidden_by(&self, scope: &SidecarScope) -> Option<HiddenBy> {
        let shown = scope.service(&self.key.hostname);
        if shown == Some(self.key) {
            return None;
        }
        let namespace = scope.key.namespace();
        if !self.service.all().any(|member| member.export_to.visible_to(namespace)) {
            return Some(HiddenBy::ExportTo);
        }
        Some(match shown {
            Some(_) => HiddenBy::AnotherService,
            None if scope.key.sidecar().is_some() => HiddenBy::Sidecar,
            None => HiddenBy::AnotherService,
        })
    }

    fn waypoint(&self) -> Option<Waypoint> {
        if !self.mesh.installation.features.pilot_enable_ambient {
            return None;
        }
        let (cluster, labels) = waypoint::declaration(&self.cx, self.mesh, self.service)?;
        let attached = waypoint::for_service(&self.cx, self.mesh, cluster, labels, &self.key.namespace);
        let (gateway, state) = match attached {
            Ok(gateway) => (gateway?, WaypointState::Used),
            Err(NotAttached { gateway, reason }) => (gateway, reason.into()),
        };
        Some(Waypoint {
            gateway: ObjectName::of(Kind::KubeGateway, &gateway),
            state,
        })
    }

    /// Returns the policies of the workloads, and those of the waypoint.
    fn policies(&self, groups: &[Group]) -> Vec<Policy> {
        let subjects: Vec<(Subject, String)> = groups.iter().map(|group| (group.subject(), group.name())).collect();
        let at_waypoint = self.mesh.service_waypoints.get(&self.cx, self.key).map(|row| {
            let labels = [(SmolStr::new_static(GATEWAY_NAME_LABEL), row.gateway.name.clone())];
            Subject {
                is_waypoint: true,
                ..Subject::workload(row.gateway.namespace.clone(), labels.into_iter().collect())
            }
            .with_service(TargetService::of(self.service))
        });
        let mut policies = Vec::new();
        self.authorization(&subjects, at_waypoint.as_ref(), &mut policies);
        self.attached::<RequestAuthentication>(
            Kind::RequestAuthentication,
            &subjects,
            at_waypoint.as_ref(),
            &mut policies,
        );
        self.attached::<Telemetry>(Kind::Telemetry, &subjects, at_waypoint.as_ref(), &mut policies);
        self.attached::<WasmPlugin>(Kind::WasmPlugin, &subjects, at_waypoint.as_ref(), &mut policies);
        self.attached::<TrafficExtension>(Kind::TrafficExtension, &subjects, at_waypoint.as_ref(), &mut policies);
        self.attached::<EnvoyFilter>(Kind::EnvoyFilter, &subjects, at_waypoint.as_ref(), &mut policies);
        policies
    }

    fn authorization(&self, subjects: &[(Subject, String)], at_waypoint: Option<&Subject>, policies: &mut Vec<Policy>) {
        let first = policies.len();
        self.attached::<AuthorizationPolicy>(Kind::AuthorizationPolicy, subjects, at_waypoint, policies);
        for policy in &mut policies[first..] {
            let (namespace, name) = (
                Namespace::new(&policy.object.namespace),
                SmolStr::new(&policy.object.name),
            );
            let key = ObjectKey::new(&self.mesh.installation.cluster, namespace, name);
            if let Some(row) = self.mesh.authorization_policies.get(&self.cx, &key) {
                policy.action = Some(row.spec.action().as_str_name());
                policy.dry_run = is_dry_run(row);
                policy.rules = rules(&json::to_json(&row.spec));
            }
        }
    }

    /// Adds the policies of a kind.
    fn attached<T: Attach + Send + Sync + 'static>(
        &self,
        kind: Kind,
        subjects: &[(Subject, String)],
        at_waypoint: Option<&Subject>,
        policies: &mut Vec<Policy>,
    ) {
        let mut by_key: Vec<(ObjectKey, BTreeSet<&str>)> = Vec::new();
        for (subject, name) in subjects {
            for key in policy::attached::<T>(&self.cx, self.mesh, subject) {
                match by_key.iter_mut().find(|(known, _)| *known == key) {
                    Some((_, workloads)) => drop(workloads.insert(name)),
                    None => by_key.push((key, BTreeSet::from([name.as_str()]))),
                }
            }
        }
        let all: BTreeSet<&str> = subjects.iter().map(|(_, name)| name.as_str()).collect();
        let policy = |key: &ObjectKey, at, workloads| Policy {
            object: ObjectName::of(kind, key),
            at,
            workloads,
            action: None,
            dry_run: false,
            rules: Vec::new(),
        };
        policies.extend(by_key.iter().map(|(key, workloads)| {
            let some = if *workloads == all { &BTreeSet::new() } else { workloads };
            policy(key, "workload", some.iter().map(|name| (*name).to_owned()).collect())
        }));
        let of_waypoint = at_waypoint.map(|subject| policy::attached::<T>(&self.cx, self.mesh, subject));
        let of_waypoint = of_waypoint.unwrap_or_default();
        policies.extend(of_waypoint.iter().map(|key| policy(key, "waypoint", Vec::new())));
    }

    /// Returns the VirtualServices for requests to the host, and those that lead to it.
    fn routes(&self) -> Vec<&VirtualServiceSummary> {
        let ServiceKey { hostname, namespace } = self.key;
        let own = virtual_service::for_host(&self.cx, self.mesh, namespace, hostname, |_| true);
        let leads_here = |summary: &VirtualServiceSummary| {
            let mut destinations = summary.destinations.iter();
            destinations.any(|destination| destination.host == self.key.hostname)
        };
        let all = self.mesh.virtual_service_summaries.iter(&self.cx);
        let others = all.filter(|(_, summary)| leads_here(summary));
        let rows: BTreeMap<&ObjectKey, &VirtualServiceSummary> =
            own.into_iter().chain(others).map(|(key, row)| (key, &**row)).collect();
        rows.into_values().collect()
    }

    fn covers_host(&self, summary: &VirtualServiceSummary) -> bool {
        let mut hosts = summary.hosts.iter();
        hosts.any(|name| host::overlaps(&self.key.hostname, name))
    }

    fn route(&self, summary: &VirtualServiceSummary) -> Route {
        Route {
            objects: origins(Kind::VirtualService, &summary.meta),
            hosts: summary.hosts.iter().map(ToString::to_string).collect(),
            gateways: summary.gateways.iter().map(ToString::to_string).collect(),
            own_host: self.covers_host(summary),
        }
    }

    /// Returns the gateways of routes that lead to the service, with the servers for their hosts.
    fn gateways(&self, routes: &[&VirtualServiceSummary]) -> Vec<Gateway> {
        let mut found: BTreeMap<&str, Gateway> = BTreeMap::new();
        for summary in routes {
            for name in summary.gateways.iter().filter(|name| *name != MESH_GATEWAY) {
                let Some((namespace, gateway)) = name.split_once('/') else {
                    continue;
                };
                let cluster = &self.mesh.installation.cluster;
                let key = ObjectKey::new(cluster, Namespace::new(namespace), SmolStr::new(gateway));
                let Some(row) = self.mesh.declared_gateways.get(&self.cx, &key) else {
                    continue;
                };
                let entry = found.entry(name).or_insert_with(|| Gateway {
                    objects: origins(Kind::Gateway, &row.meta),
                    hosts: Vec::new(),
                    servers: Vec::new(),
                });
                entry.hosts.extend(summary.hosts.iter().map(ToString::to_string));
                let servers = row.servers.iter().flatten();
                entry
                    .servers
                    .extend(servers.filter_map(|server| of_server(&self.cx, self.mesh, server, summary)));
            }
        }
        let sorted = |mut gateway: Gateway| {
            gateway.hosts.sort();
            gateway.hosts.dedup();
            gateway.servers.sort();
            gateway.servers.dedup();
            gateway
        };
        found.into_values().map(sorted).collect()
    }

    fn destination_rule(&self) -> Option<DestinationRule> {
        let (_, rule) = destination_rule::find(&self.cx, self.mesh, &self.key.namespace, None, self.key)?;
        let policy = rule.spec.traffic_policy.as_deref();
        let tls = policy.and_then(|policy| policy.tls.as_ref());
        Some(DestinationRule {
            objects: rule
                .from
                .iter()
                .map(|key| ObjectName::of(Kind::DestinationRule, key))
                .collect(),
            subsets: rule.spec.subsets.iter().map(|subset| subset.name.clone()).collect(),
            tls: tls.map_or("", |tls| ClientTls::as_str_name(&tls.mode())),
        })
    }
}

impl Group<'_> {
    fn name(&self) -> String {
        let name = &self.first.origin.workload_name;
        if name.is_empty() {
            self.first.address.to_string()
        } else {
            name.to_string()
        }
    }

    fn subject(&self) -> Subject {
        Subject::workload(self.first.origin.namespace.clone(), self.labels.clone())
    }

    /// Returns the number of addresses.
    fn size(&self) -> usize {
        let addresses: BTreeSet<&SmolStr> = self.endpoints.iter().map(|endpoint| &endpoint.address).collect();
        addresses.len()
    }
}

impl From<Refusal> for WaypointState {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::NotReady => Self::NotReady,
            Refusal::Denied => Self::Denied,
            Refusal::Unsupported => Self::Unsupported,
        }
    }
}

impl Transport {
    /// Returns what accepts mutual TLS at an endpoint.
    fn of(endpoint: &Endpoint) -> Self {
        if endpoint.supports_tunnel() {
            Self::Hbone
        } else if endpoint.origin.accepts_mutual_tls() {
            Self::Sidecar
        } else {
            Self::None
        }
    }
}

fn mode_name(mode: MtlsMode) -> &'static str {
    match mode {
        MtlsMode::Disable => "DISABLE",
        MtlsMode::Permissive => "PERMISSIVE",
        MtlsMode::Strict => "STRICT",
    }
}

/// Returns the objects that an object was made from, or the object itself.
pub(super) fn origins(kind: Kind, meta: &Meta) -> Vec<ObjectName> {
    let made_from = meta.annotations.get(PARENTS_ANNOTATION).filter(|text| !text.is_empty());
    let Some(parents) = made_from else {
        return vec![ObjectName::of(kind, &meta.key)];
    };
    // `KIND/NAME.NAMESPACE`, and for listeners `KIND/NAME/LISTENER.NAMESPACE`.
    let parent = |text: &str| {
        let (kind, rest) = text.split_once('/')?;
        let (path, namespace) = rest.rsplit_once('.')?;
        let name = path.split('/').next().unwrap_or_default();
        let kinds = Kind::named(kind);
        Some(ObjectName {
            kind: kind.to_owned(),
            group: kinds.last().map(|kind| kind.group().to_owned()).unwrap_or_default(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    };
    parents.split(',').filter_map(parent).collect()
}

/// Returns a server of a gateway, if routes of the VirtualService apply there.
fn of_server(cx: &Cx, mesh: &MeshSnapshot, server: &DeclaredServer, summary: &VirtualServiceSummary) -> Option<Server> {
    let offered = server.hosts_for(cx, mesh, summary.meta.namespace());
    let overlaps = |offered: &&&str| summary.hosts.iter().any(|host| host::overlaps(offered, host));
    let hosts: Vec<String> = offered.iter().filter(overlaps).map(|host| (*host).to_owned()).collect();
    (!hosts.is_empty()).then(|| Server {
        port: server.port(),
        protocol: server
            .spec
            .port
            .as_ref()
            .map_or_else(String::new, |port| port.protocol.clone()),
        hosts,
        tls: server.tls().map_or("", |tls| tls.mode().as_str_name()),
    })
}

/// Returns the rules of an AuthorizationPolicy in words: `from …; to …; when …`. The names of fields are as written.
fn rules(spec: &Value) -> Vec<String> {
    let rules = spec["rules"].as_array();
    let text = |rule: &Value| {
        let alternatives = |list: &str, member: &str| {
            let entries = rule[list].as_array().into_iter().flatten();
            let texts: Vec<String> = entries.map(|entry| fields(&entry[member])).collect();
            (!texts.is_empty()).then(|| format!("{list} {}", texts.join(" or ")))
        };
        let conditions = rule["when"].as_array().into_iter().flatten().map(condition);
        let conditions: Vec<String> = conditions.collect();
        let when = (!conditions.is_empty()).then(|| format!("when {}", conditions.join(" and ")));
        let parts = [alternatives("from", "source"), alternatives("to", "operation"), when];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        if parts.is_empty() {
            "any request".to_owned()
        } else {
            parts.join("; ")
        }
    };
    rules.into_iter().flatten().map(text).collect()
}

/// Returns the lists of a source or operation: `principals a, b and namespaces c`.
fn fields(entry: &Value) -> String {
    let fields = entry.as_object().into_iter().flatten();
    let texts: Vec<String> = fields.map(|(name, list)| format!("{name} {}", words(list))).collect();
    if texts.is_empty() {
        "anything".to_owned()
    } else {
        texts.join(" and ")
    }
}

fn condition(entry: &Value) -> String {
    let key = entry["key"].as_str().unwrap_or_default();
    let phrase = |list: &str, verb: &str| entry.get(list).map(|list| format!("{key} {verb} {}", words(list)));
    let texts = [phrase("values", "is"), phrase("notValues", "is not")];
    let texts: Vec<String> = texts.into_iter().flatten().collect();
    texts.join(" and ")
}

fn words(list: &Value) -> String {
    let words = list.as_array().into_iter().flatten().filter_map(Value::as_str);
    words.collect::<Vec<_>>().join(", ")
}
