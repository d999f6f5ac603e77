//! The name table (NDS) of proxies that capture DNS: one unnamed resource.
//!
//! Note: it contains only hosts that egress listeners reach. Gateways have no egress listeners and get an empty table.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{
    BuildContext, EncodedResource, ProxyType,
    resource::Built,
    selected::{Selected, has_default_scope},
    vip::VipView,
    wire::Writer,
};
use crate::{
    base::{Namespace, NetworkId, Shared, cidr},
    model::{
        ScopeKey, Service, ServiceKey,
        endpoint::{HeadlessAddress, PortAddresses},
        service::{Registry, Resolution, ServicePort, UNSPECIFIED_IP},
    },
    proto::{
        field::{name_info, name_table},
        istio::networking::nds::v1::name_table::NameInfo,
    },
};

/// The number of addresses of a host above which each counts once.
///
/// Parity (pkg/dns/server/name_table.go): each of several headless ServiceEntries of a host has the addresses of all.
/// Those of thousands would be repeated millions of times.
const MANY_ADDRESSES: usize = 1000;

/// The entry of one host.
struct Row {
    /// Lists of addresses. Services of one host share them.
    ips: Vec<Shared<[SmolStr]>>,
    registry: Registry,
    short_name: SmolStr,
    namespace: Namespace,
    /// True for the name of single pods.
    of_pods: bool,
}

impl Row {
    fn of(service: &Service, ips: Vec<Shared<[SmolStr]>>) -> Self {
        let has_short_name =
            service.registry == Registry::Kubernetes && !service.key.hostname.ends_with(CLUSTER_SET_DOMAIN);
        let (short_name, namespace) = if has_short_name {
            (service.name.clone(), service.key.namespace.clone())
        } else {
            Default::default()
        };
        Self {
            ips,
            registry: service.registry,
            short_name,
            namespace,
            of_pods: false,
        }
    }

    /// Merges a later row of the same host: names of pods take precedence, then Kubernetes services.
    fn merge(&mut self, later: Self) {
        if later.of_pods {
            *self = later;
        } else if self.registry == Registry::Kubernetes {
            // The first Kubernetes service wins.
        } else if later.registry == Registry::External {
            self.ips.extend(later.ips);
        } else {
            *self = later;
        }
    }

    fn write(&self, out: &mut Writer<NameInfo>) {
        let lists = self.ips.iter();
        if lists.clone().map(|list| list.len()).sum::<usize>() <= MANY_ADDRESSES {
            lists
                .flat_map(|list| list.iter())
                .for_each(|ip| out.text(name_info::IPS, ip));
        } else {
            let (mut read, mut known) = (BTreeSet::new(), BTreeSet::new());
            let new = lists.filter(|list| read.insert(list.as_ptr()));
            let ips = new.flat_map(|list| list.iter()).filter(|ip| known.insert(*ip));
            ips.for_each(|ip| out.text(name_info::IPS, ip));
        }
        let registry = match self.registry {
            Registry::Kubernetes => "Kubernetes",
            Registry::External => "External",
        };
        out.text(name_info::REGISTRY, registry);
        out.text(name_info::SHORTNAME, &self.short_name);
        out.text(name_info::NAMESPACE, &self.namespace);
    }
}

/// The suffix of multi-cluster services, which have no short names.
const CLUSTER_SET_DOMAIN: &str = ".clusterset.local";

/// The inputs of a name table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NameTableKey {
    /// The scope whose services the table has.
    scope: ScopeKey,
    /// The visible addresses of services.
    vips: VipView,
    /// The network of the proxy. Pods of other networks are unreachable.
    network: NetworkId,
}

/// Returns the name table of a proxy.
pub fn select(ctx: &BuildContext, selected: &Selected) -> NameTableKey {
    NameTableKey {
        scope: scope(ctx, selected),
        vips: VipView::of(selected.proxy, &ctx.mesh.installation.features),
        // The tables of routers are empty.
        network: match selected.proxy.proxy_type {
            ProxyType::Router => NetworkId::default(),
            _ => selected.network.clone(),
        },
    }
}

/// Returns the scope of a proxy's table.
///
/// Parity (pilot/pkg/model/push_context.go): a waypoint takes the default scope of its namespace if a sidecar has made
/// Istio compute it. Here the workloads decide, so that all replicas agree.
fn scope(ctx: &BuildContext, selected: &Selected) -> ScopeKey {
    let namespace = selected.scope.namespace();
    let is_default = selected.proxy.proxy_type == ProxyType::Waypoint
        && ctx.mesh.sidecar_namespaces.get(ctx.cx, namespace).is_some()
        && has_default_scope(ctx, namespace);
    if is_default {
        ScopeKey::Default(namespace.clone())
    } else {
        selected.scope.clone()
    }
}

impl NameTableKey {
    /// Returns the scope whose services the table has.
    pub fn scope(&self) -> &ScopeKey {
        &self.scope
    }

    /// Builds the table.
    pub fn build(&self, ctx: &BuildContext) -> Built {
        let scope = ctx.tcp_scope(&self.scope);
        let mut found = Found::default();
        let listed = scope.egress.iter().flat_map(|listener| listener.services.iter());
        for (place, listed) in listed.enumerate() {
            if let Some(service) = ctx.member(listed) {
                self.add(ctx, place, service, &mut found);
            }
        }
        let table = found.merged();
        Built::new(EncodedResource::write(SmolStr::default(), |out| {
            for (host, row) in &table {
                out.entry(name_table::TABLE, host, |out| row.write(out));
            }
        }))
    }

    fn add<'a>(&self, ctx: &BuildContext<'a>, place: usize, service: &'a Service, found: &mut Found<'a>) {
        let mut own = self.vips.addresses(service);
        let headless = own.iter().any(|address| address == UNSPECIFIED_IP);
        // Ranges are used for matching and cannot answer a DNS query.
        own.retain(|address| is_usable(address));
        let mut ips: Vec<Shared<[SmolStr]>> = vec![own.into()];
        if headless && service.resolution == Resolution::Passthrough {
            ips.extend(self.pods(ctx, place, service, found));
        }
        if ips.iter().all(|list| list.is_empty()) {
            return;
        }
        let host = service.key.hostname.text().clone();
        found.rows.push((host, place, Row::of(service, ips)));
    }

    /// Returns the addresses of a headless service's pods, which also have the rows of pods with names.
    fn pods<'a>(
        &self,
        ctx: &BuildContext<'a>,
        place: usize,
        service: &'a Service,
        found: &mut Found<'a>,
    ) -> Option<Shared<[SmolStr]>> {
        let port = service.ports.first()?;
        let host = found.headless.entry(&service.key).or_insert_with(|| {
            let traits = ctx.mesh.endpoint_traits.get(ctx.cx, &service.key);
            let addresses = traits.map(|traits| traits.addresses.as_slice());
            HeadlessHost {
                addresses: PortAddresses::of(addresses.unwrap_or_default()),
                ports: BTreeMap::new(),
            }
        });
        let pods = host.pods(port, |pods| self.pods_of_port(ctx, service, pods));
        pods.last = (place, service.registry);
        Some(pods.ips.clone())
    }

    fn pods_of_port(&self, ctx: &BuildContext, service: &Service, pods: Vec<&HeadlessAddress>) -> PortPods {
        let several_clusters = ctx.mesh.installation.features.enable_multicluster_headless;
        let mut ips = Vec::new();
        let mut names: BTreeMap<SmolStr, NamedPods> = BTreeMap::new();
        for pod in pods.into_iter().filter(|pod| pod.healthy) {
            let own: Vec<SmolStr> = std::iter::once(&pod.address)
                .chain(&pod.extra_addresses)
                .cloned()
                .collect();
            if !self.reaches(&pod.network) || !own.iter().all(|address| is_usable(address)) {
                continue;
            }
            let clusters = (&self.vips.cluster, &pod.cluster);
            let same_cluster = clusters.0.is_empty() || clusters.1.is_empty() || clusters.0 == clusters.1;
            let own = || own.iter().cloned();
            if let Some((host, short_name)) = pod_name(service, pod) {
                let named = names.entry(host).or_default();
                named.short_name = short_name;
                if same_cluster {
                    named.local.extend(own());
                } else {
                    named.remote.extend(own());
                }
            }
            if same_cluster || several_clusters {
                ips.extend(own());
            }
        }
        PortPods {
            ips: ips.into(),
            names,
            last: (0, service.registry),
        }
    }

    fn reaches(&self, network: &NetworkId) -> bool {
        self.network.is_empty() || network.is_empty() || self.network == *network
    }
}

/// Rows by host, with the places of their services, in the order of lookup, which is nearly the order of hosts.
#[derive(Default)]
struct Found<'a> {
    rows: Vec<(SmolStr, usize, Row)>,
    headless: BTreeMap<&'a ServiceKey, HeadlessHost<'a>>,
}

impl Found<'_> {
    /// Merges the rows into one for each host, sorted by host.
    fn merged(self) -> Vec<(SmolStr, Row)> {
        let mut rows = self.rows;
        for (key, host) in self.headless {
            for pods in host.ports.into_values() {
                let (place, registry) = pods.last;
                let named = pods.names.into_iter();
                rows.extend(named.map(|(host, named)| (host, place, named.row(registry, &key.namespace))));
            }
        }
        rows.sort_by(|(a, a_place, _), (b, b_place, _)| (a, a_place).cmp(&(b, b_place)));
        let mut table: Vec<(SmolStr, Row)> = Vec::with_capacity(rows.len());
        for (host, _, row) in rows {
            match table.last_mut() {
                Some((last, first)) if *last == host => first.merge(row),
                _ => table.push((host, row)),
            }
        }
        table
    }
}

/// A headless host. Its services with the same port have the same pods, which are found once.
struct HeadlessHost<'a> {
    addresses: PortAddresses<'a>,
    /// Pods by the port's number, and by its name if that decides.
    ports: BTreeMap<(u32, Option<&'a SmolStr>), PortPods>,
}

impl<'a> HeadlessHost<'a> {
    fn pods(
        &mut self,
        port: &'a ServicePort,
        pods: impl FnOnce(Vec<&'a HeadlessAddress>) -> PortPods,
    ) -> &mut PortPods {
        let name = self.addresses.has_name(&port.name).then_some(&port.name);
        let addresses = &mut self.addresses;
        let of_port = self.ports.entry((port.number, name));
        of_port.or_insert_with(|| pods(addresses.take(port.number, &port.name)))
    }
}

/// The pods of one port of a headless host.
struct PortPods {
    ips: Shared<[SmolStr]>,
    /// The pods with names, by host.
    names: BTreeMap<SmolStr, NamedPods>,
    /// The place and the registry of the last service with the port, to which the rows of the pods belong: they replace
    /// those of earlier services.
    last: (usize, Registry),
}

/// The pods behind one pod name.
#[derive(Default)]
struct NamedPods {
    short_name: SmolStr,
    /// Addresses in the proxy's cluster.
    local: Vec<SmolStr>,
    /// Addresses in other clusters, used if the proxy's cluster has none.
    remote: Vec<SmolStr>,
}

impl NamedPods {
    fn row(self, registry: Registry, namespace: &Namespace) -> Row {
        let ips = if self.local.is_empty() { self.remote } else { self.local };
        Row {
            ips: vec![ips.into()],
            registry,
            short_name: self.short_name,
            namespace: namespace.clone(),
            of_pods: true,
        }
    }
}

/// Returns the name of a pod with a host name in the service's subdomain: `<hostname>.<subdomain>.<rest of the
/// service's host>`, and its short name, the first two parts.
fn pod_name(service: &Service, pod: &HeadlessAddress) -> Option<(SmolStr, SmolStr)> {
    let (_, rest) = service.key.hostname.split_once('.')?;
    if pod.subdomain.is_empty() {
        return None;
    }
    let short_name = format!("{}.{}", pod.hostname, pod.subdomain);
    Some((format!("{short_name}.{rest}").into(), short_name.into()))
}

fn is_usable(address: &str) -> bool {
    address != UNSPECIFIED_IP && cidr::parse_ip(address).is_some()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{
        generate::{ResourceType, fixture},
        model::Installation,
    };

    const NETWORK: &str = "topology.istio.io/network";
    const HEADLESS: &str = "
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {clusterIP: None, selector: {app: db}, ports: [{name: tcp, port: 5432}]}
";

    fn pod(name: &str, ip: &str) -> String {
        format!(
            "---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: db}}}}
spec: {{hostname: {name}, subdomain: db}}
status: {{phase: Running, podIP: {ip}, conditions: [{{type: Ready, status: 'True'}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: db-{name}, labels: {{kubernetes.io/service-name: db}}}}
addressType: IPv4
ports: [{{name: tcp, port: 5432}}]
endpoints: [{{addresses: [{ip}], conditions: {{ready: true}}, targetRef: {{kind: Pod, name: {name}, namespace: default}}}}]
"
        )
    }

    fn table(files: &[(&str, &str)]) -> Value {
        let client = fixture::client("sidecar~10.9.0.1~a-0.default~default.svc.cluster.local", &json!({}));
        let store = fixture::store(Installation::default(), files, vec![client]);
        fixture::resource(&store, 0, ResourceType::NameTable, "")["table"].clone()
    }

    #[test]
    fn names_of_pods_prefer_the_own_cluster() {
        let own = format!("{HEADLESS}{}", pod("db-0", "10.1.0.1"));
        let two = format!("{HEADLESS}{}{}", pod("db-0", "10.2.0.1"), pod("db-1", "10.2.0.2"));
        let three = format!("{HEADLESS}{}", pod("db-1", "10.3.0.2"));
        let table = table(&[("kube.yaml", &own), ("kube-c2.yaml", &two), ("kube-c3.yaml", &three)]);
        let ips = |name: &str| {
            let ips = table[format!("{name}.default.svc.cluster.local")]["ips"].as_array();
            ips.expect("addresses").len()
        };
        assert_eq!((ips("db"), ips("db-0.db"), ips("db-1.db")), (4, 1, 2));
        let row = &table["db-1.db.default.svc.cluster.local"];
        assert_eq!(
            (&row["shortname"], &row["namespace"]),
            (&json!("db-1.db"), &json!("default"))
        );
    }

    #[test]
    fn waypoints_have_the_table_of_sidecars_of_their_namespace() {
        let kube = "
apiVersion: v1
kind: Pod
metadata: {name: app, labels: {security.istio.io/tlsMode: istio}}
status: {phase: Running, podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.1, ports: [{name: http, port: 80}]}
";
        let sidecar = "
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: scope}
spec: {egress: [{hosts: ['./*']}]}
";
        let has_table = |proxy_type: &str, kube: &str, config: &str| {
            let node = format!("{proxy_type}~10.9.0.1~a-0.default~default.svc.cluster.local");
            let files = [("kube.yaml", kube), ("config.yaml", config)];
            let client = fixture::client(&node, &json!({}));
            let store = fixture::store(Installation::default(), &files, vec![client]);
            fixture::resource(&store, 0, ResourceType::NameTable, "")["table"].is_object()
        };
        assert!(has_table("waypoint", kube, ""));
        assert!(!has_table("router", kube, ""));
        let with_label = |label: &str| kube.replace("security.istio.io/tlsMode: istio", label);
        assert!(!has_table(
            "waypoint",
            &with_label("security.istio.io/tlsMode: disabled"),
            ""
        ));
        let gateway = with_label("security.istio.io/tlsMode: istio, gateway.networking.k8s.io/gateway-name: own");
        assert!(!has_table("waypoint", &gateway, ""));
        assert!(!has_table("waypoint", kube, sidecar));
        let selecting = sidecar.replace("spec: {", "spec: {workloadSelector: {labels: {app: b}}, ");
        assert!(has_table("waypoint", kube, &selecting));
    }

    #[test]
    fn waypoints_list_no_pods_of_other_networks() {
        let pod = |name: &str, ip: &str, network: &str| {
            let labels = format!("labels: {{app: db, security.istio.io/tlsMode: istio, {NETWORK}: {network}}}");
            pod(name, ip).replace("labels: {app: db}", &labels)
        };
        let kube = format!(
            "{HEADLESS}{}{}",
            pod("db-0", "10.1.0.1", "near"),
            pod("db-1", "10.2.0.1", "far")
        );
        let listed = |network: &str| {
            let node = "waypoint~10.9.0.1~a-0.default~default.svc.cluster.local";
            let client = fixture::client(node, &json!({"NETWORK": network}));
            let store = fixture::store(Installation::default(), &[("kube.yaml", &kube)], vec![client]);
            let table = fixture::resource(&store, 0, ResourceType::NameTable, "")["table"].clone();
            table["db.default.svc.cluster.local"]["ips"].clone()
        };
        assert_eq!(listed("near"), json!(["10.1.0.1"]));
        assert_eq!(listed(""), json!(["10.1.0.1", "10.2.0.1"]));
    }

    #[test]
    fn every_address_of_a_service_entry_is_listed() {
        let entry = "
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: out}
spec:
  hosts: [out.example.com]
  addresses: [240.0.0.1, 240.0.0.2, 10.0.0.0/8]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
";
        let table = table(&[("config.yaml", entry)]);
        assert_eq!(table["out.example.com"]["ips"], json!(["240.0.0.1", "240.0.0.2"]));
    }

    #[test]
    fn r21_many_headless_entries_of_a_host_list_each_address_once() {
        let entry = |number: usize| {
            format!(
                "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: db-{number}}}
spec:
  hosts: [db.test]
  resolution: NONE
  workloadSelector: {{labels: {{app: db}}}}
  ports: [{{number: 5432, name: tcp, protocol: TCP}}]
"
            )
        };
        let listed = |count: usize, host: &str| {
            let entries: String = (0..count).map(entry).collect();
            let kube = pod("db-0", "10.1.0.1");
            table(&[("kube.yaml", &kube), ("config.yaml", &entries)])[host]["ips"].clone()
        };
        // As in Istio: each entry has the endpoints of all.
        assert_eq!(listed(3, "db.test"), Value::from(vec!["10.1.0.1"; 9]));
        assert_eq!(listed(3, "db-0.db.test"), Value::from(vec!["10.1.0.1"; 3]));
        assert_eq!(listed(32, "db.test"), json!(["10.1.0.1"]));
        assert_eq!(listed(32, "db-0.db.test"), Value::from(vec!["10.1.0.1"; 32]));
    }
}
