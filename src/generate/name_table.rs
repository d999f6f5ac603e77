//! The name table (NDS) of proxies that capture DNS: one unnamed resource.
//!
//! Note: it contains only hosts that egress listeners reach. Gateways have no egress listeners and get an empty table.

use std::collections::BTreeMap;

use smol_str::SmolStr;

use super::{
    BuildContext, EncodedResource, ProxyType,
    resource::Built,
    selected::{Selected, has_default_scope},
    vip::VipView,
    wire::Writer,
};
use crate::{
    base::{Namespace, NetworkId, cidr},
    model::{
        ScopeKey, Service,
        endpoint::HeadlessAddress,
        service::{Registry, Resolution, UNSPECIFIED_IP},
    },
    proto::{
        field::{name_info, name_table},
        istio::networking::nds::v1::name_table::NameInfo,
    },
};

/// Rows by host, in the order of lookup, which is nearly the order of hosts.
type Rows = Vec<(SmolStr, Row)>;

/// The entry of one host.
struct Row {
    ips: Vec<SmolStr>,
    registry: Registry,
    short_name: SmolStr,
    namespace: Namespace,
    /// True for the name of single pods.
    of_pods: bool,
}

impl Row {
    fn of(service: &Service, ips: Vec<SmolStr>) -> Self {
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
        for ip in &self.ips {
            out.text(name_info::IPS, ip);
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
        let count = scope.egress.iter().map(|listener| listener.services.len()).sum();
        let mut found = Rows::with_capacity(count);
        for listed in scope.egress.iter().flat_map(|listener| listener.services.iter()) {
            if let Some(service) = ctx.member(listed) {
                self.add(ctx, service, &mut found);
            }
        }
        let table = merged(found);
        Built::new(EncodedResource::write(SmolStr::default(), |out| {
            for (host, row) in &table {
                out.entry(name_table::TABLE, host, |out| row.write(out));
            }
        }))
    }

    fn add(&self, ctx: &BuildContext, service: &Service, found: &mut Rows) {
        let mut ips = self.vips.addresses(service);
        let headless = ips.iter().any(|address| address == UNSPECIFIED_IP);
        // Ranges are used for matching and cannot answer a DNS query.
        ips.retain(|address| is_usable(address));
        if headless && service.resolution == Resolution::Passthrough {
            ips.extend(self.pods(ctx, service, found));
        }
        if ips.is_empty() {
            return;
        }
        found.push((service.key.hostname.text().clone(), Row::of(service, ips)));
    }

    /// Returns the addresses of a headless service's pods, and adds rows for pods with names.
    fn pods(&self, ctx: &BuildContext, service: &Service, found: &mut Rows) -> Vec<SmolStr> {
        let traits = ctx.mesh.endpoint_traits.get(ctx.cx, &service.key);
        let (Some(traits), Some(port)) = (traits, service.ports.first()) else {
            return Vec::new();
        };
        let several_clusters = ctx.mesh.installation.features.enable_multicluster_headless;
        let mut ips = Vec::new();
        let mut names: BTreeMap<SmolStr, NamedPods> = BTreeMap::new();
        for pod in traits
            .addresses
            .iter()
            .filter(|pod| pod.serves(port.number, &port.name) && pod.healthy)
        {
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
        let rows = names.into_iter().map(|(host, named)| (host, named.row(service)));
        found.extend(rows);
        ips
    }

    fn reaches(&self, network: &NetworkId) -> bool {
        self.network.is_empty() || network.is_empty() || self.network == *network
    }
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
    fn row(self, service: &Service) -> Row {
        Row {
            ips: if self.local.is_empty() { self.remote } else { self.local },
            registry: service.registry,
            short_name: self.short_name,
            namespace: service.key.namespace.clone(),
            of_pods: true,
        }
    }
}

/// Merges rows into one for each host, sorted by host.
fn merged(mut found: Rows) -> Rows {
    // A stable sort keeps the order of the rows of one host.
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut table = Rows::with_capacity(found.len());
    for (host, row) in found {
        match table.last_mut() {
            Some((last, first)) if *last == host => first.merge(row),
            _ => table.push((host, row)),
        }
    }
    table
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
}
