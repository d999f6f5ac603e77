//! A cluster with nodes: ztunnels, ambient pods, pods with sidecars, and the gateways that the control plane deploys.
//! The lab acts as the controllers of Kubernetes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Value, json};

use crate::kube::tenant::{TIMEOUT, Tenant};
use crate::lab::app::Application;
use crate::lab::host::Network;
use crate::lab::pods::{self, Pod, Role, Spec, running};
use crate::lab::ztunnel::{self, Subscription, Ztunnel};
use crate::support::agent::ClientCredentials;
use crate::support::kubernetes::api::{Reference, documents};
use crate::support::kubernetes::{Cluster, crds};
use crate::support::{helm, project, wait};

/// The kinds of the Gateway API that the lab uses.
const KINDS: [&str; 2] = ["gatewayclasses", "gateways"];
/// The port of the applications.
const APPLICATION: u16 = 8080;
/// The time in which a gateway ends its connections (`terminationDrainDuration`).
const DRAIN: Duration = Duration::from_secs(5);
/// Connections of clients of an Envoy, but those of its admin interface.
const ACTIVE: &str = r"^listener\.[^a].*\.downstream_cx_active$";
/// The audience of tokens for the control plane.
const AUDIENCE: &str = "istio-ca";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Ready,
    Unready,
    Terminating,
}

/// A running pod.
struct Member {
    pod: Pod,
    node: String,
    state: State,
    application: Option<Application>,
}

/// A cluster and its network, by name.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) cluster: &'static str,
    /// Empty if networks have no names.
    pub(super) network: &'static str,
}

/// The only cluster of a mesh.
pub(super) const ALONE: Place = Place {
    cluster: "Kubernetes",
    network: "",
};

/// The cluster with everything that runs in it.
pub(super) struct Mesh {
    pub(super) base: pods::Mesh<'static>,
    place: Place,
    ztunnels: BTreeMap<String, Ztunnel>,
    members: BTreeMap<String, Member>,
    /// The last written EndpointSlices, by namespace and service.
    written: BTreeMap<(String, String), Value>,
}

fn definition(kind: &str) -> PathBuf {
    project().join(format!(".tools/gateway-api/gateway.networking.k8s.io_{kind}.yaml"))
}

/// Returns the missing component of the lab, if there is one.
pub(super) fn missing_component() -> Option<&'static str> {
    if !KINDS.iter().all(|kind| definition(kind).is_file()) {
        return Some("the Gateway API is missing; `make tools` installs it");
    }
    crate::lab::missing_component()
}

/// Returns one of two clusters that tests with ambient pods share. They have the Gateway API, whose definitions other
/// tests of Kubernetes add themselves.
pub(super) fn cluster(index: usize) -> Result<&'static Cluster, String> {
    static CLUSTERS: [OnceLock<Result<Cluster, String>>; 2] = [const { OnceLock::new() }; 2];
    let start = || {
        let cluster = Cluster::start(&format!("lab/ambient/cluster-{index}"))?;
        for kind in KINDS {
            let text = std::fs::read_to_string(definition(kind)).map_err(|error| error.to_string())?;
            for definition in documents(&text) {
                cluster.api.apply(&definition)?;
                crds::established(&cluster.api, &definition)?;
            }
        }
        Ok(cluster)
    };
    CLUSTERS[index].get_or_init(start).as_ref().map_err(Clone::clone)
}

impl Mesh {
    /// Starts the control plane of a cluster with these objects.
    pub(super) fn start(tenant: Tenant<'static>, place: Place, objects: &str) -> Result<Mesh, String> {
        tenant.apply(objects)?;
        install_templates(&tenant, place)?;
        let accounts = format!("{}/ztunnel", tenant.system);
        let base = pods::Mesh::within(tenant, |command| {
            command.env("PILOT_ENABLE_AMBIENT", "true");
            command.env("CA_TRUSTED_NODE_ACCOUNTS", accounts);
            command.env("CLUSTER_ID", place.cluster);
            if !place.network.is_empty() {
                command.env("AMBIENT_ENABLE_MULTI_NETWORK", "true");
            }
        })?;
        Ok(Mesh {
            base,
            place,
            ztunnels: BTreeMap::new(),
            members: BTreeMap::new(),
            written: BTreeMap::new(),
        })
    }

    /// The name of a node in Kubernetes, where tests share a cluster.
    fn node_name(&self, node: &str) -> String {
        self.base.tenant.fill(&format!("{{trial}}-{node}"))
    }

    /// The SPIFFE id of the pods of an app.
    pub(super) fn identity(&self, app: &str) -> String {
        format!("spiffe://cluster.local/ns/{}/sa/{app}", self.base.tenant.app)
    }

    /// Adds a node with a ztunnel, whose pod has the address that ends in `last`.
    pub(super) fn add_node(&mut self, node: &str, last: u8, subscription: Subscription) -> Result<(), String> {
        let tenant = &self.base.tenant;
        let (kube, node_name) = (tenant.cluster, self.node_name(node));
        kube.api.apply(&node_object(&node_name, "True"))?;
        let (name, address) = (format!("ztunnel-{node}"), self.base.address(last));
        kube.service_account(&tenant.system, "ztunnel")?;
        let pod = kube.api.apply(&json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": tenant.system, "name": name, "labels": { "app": "ztunnel" } },
            "spec": { "serviceAccountName": "ztunnel", "nodeName": node_name,
                "containers": [{ "name": "istio-proxy", "image": "ztunnel" }] },
            "status": running(address, true) }))?;
        let token = kube.bound_token(&tenant.system, "ztunnel", AUDIENCE, &pod)?;
        let spec = ztunnel::Spec {
            name,
            namespace: tenant.system.clone(),
            address,
            node: node_name,
            cluster: self.place.cluster.to_owned(),
            network: self.place.network.to_owned(),
            subscription,
        };
        let control_plane = self.base.control_plane.clone();
        let started = Ztunnel::start(spec, control_plane, ClientCredentials::token(token), &tenant.folder);
        let ztunnel = started.map_err(|error| format!("{error}\n{}", self.base.daemon.process.log_tail()))?;
        self.ztunnels.insert(node.to_owned(), ztunnel);
        Ok(())
    }

    /// Runs a pod with an application on a node.
    pub(super) fn run(&mut self, spec: &Spec<'_>) -> Result<(), String> {
        let node_name = self.node_name(spec.node);
        let pod = self.base.injected(&Spec {
            node: &node_name,
            ..*spec
        })?;
        let pod = self.base.start(&pod)?;
        let application = Application::start(&pod.host, spec.name, APPLICATION)?;
        if spec.role == Some(Role::Ambient) {
            let identity = self.identity(spec.app);
            let ztunnel = self.ztunnels.get_mut(spec.node).ok_or("the node has no ztunnel")?;
            ztunnel.adopt(spec.name, &pod.host, pod.address, &identity)?;
        }
        self.add(spec.name, spec.node, pod, Some(application))
    }

    /// Adds a running pod, which is ready from now on.
    fn add(&mut self, name: &str, node: &str, pod: Pod, application: Option<Application>) -> Result<(), String> {
        self.base.set_ready(&pod, true)?;
        let member = Member {
            pod,
            node: node.to_owned(),
            state: State::Ready,
            application,
        };
        self.members.insert(name.to_owned(), member);
        self.publish()
    }

    /// Creates a Gateway, and waits until the control plane has deployed it.
    pub(super) fn deploy(&self, gateway: &str) -> Result<(), String> {
        let tenant = &self.base.tenant;
        tenant.apply(gateway)?;
        for document in documents(&tenant.fill(gateway)) {
            // The Service is the last object of a deployment, and has the same name.
            let mut service = Reference::of(&document);
            (service.api_version, service.kind) = ("v1".to_owned(), "Service".to_owned());
            let deployed = wait::until("a deployed Gateway", TIMEOUT, || tenant.cluster.get(&service).ok()?);
            deployed.map_err(|error| format!("{error}\n{}", self.base.daemon.process.log_tail()))?;
        }
        Ok(())
    }

    /// Runs a pod of a deployed Gateway, as its Deployment describes it, with an address on the outer network if one is
    /// given.
    pub(super) fn run_gateway(
        &mut self,
        (namespace, gateway): (&str, &str),
        name: &str,
        node: &str,
        last: u8,
        outside: Option<(&Network, IpAddr)>,
    ) -> Result<(), String> {
        let kube = self.base.tenant.cluster;
        let deployment = Reference::new("apps/v1", "Deployment", namespace, gateway);
        let deployment = kube.get(&deployment)?.ok_or("there is no Deployment")?;
        let template = &deployment["spec"]["template"];
        let metadata = &template["metadata"];
        let mut pod = json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": namespace, "name": name, "labels": metadata["labels"],
                "annotations": metadata["annotations"] },
            "spec": template["spec"], "status": running(self.base.address(last), false) });
        pod["spec"]["nodeName"] = json!(self.node_name(node));
        let pod = self.base.start(&pod)?;
        if let Some((outer, address)) = outside {
            outer.attach(&pod.host, "eth1", address, false)?;
            let status = json!({ "loadBalancer": { "ingress": [{ "ip": address }] } });
            kube.api.apply_status(&json!({ "apiVersion": "v1", "kind": "Service",
                "metadata": { "namespace": namespace, "name": gateway }, "status": status }))?;
        }
        self.add(name, node, pod, None)
    }

    /// A pod. Panics if it does not run.
    pub(super) fn pod(&self, name: &str) -> &Pod {
        &self.members[name].pod
    }

    /// The ztunnel of a node. Panics if it does not run.
    pub(super) fn ztunnel(&self, node: &str) -> &Ztunnel {
        &self.ztunnels[node]
    }

    /// Writes changed EndpointSlices, as the controller for endpoints does.
    fn publish(&mut self) -> Result<(), String> {
        let tenant = &self.base.tenant;
        for namespace in [&tenant.app, &tenant.system] {
            for service in tenant.cluster.api.list("v1", "Service", namespace)? {
                let name = service["metadata"]["name"].as_str().unwrap_or_default();
                let Some(slice) = self.slice(&service, namespace, name) else {
                    continue;
                };
                let key = (namespace.clone(), name.to_owned());
                if self.written.get(&key) != Some(&slice) {
                    tenant.cluster.api.apply(&slice)?;
                    self.written.insert(key, slice);
                }
            }
        }
        Ok(())
    }

    /// The endpoints of a service with a selector.
    fn slice(&self, service: &Value, namespace: &str, name: &str) -> Option<Value> {
        let selector = service["spec"]["selector"].as_object()?;
        let is_selected = |member: &&Member| {
            let metadata = &member.pod.object["metadata"];
            let has = |(key, value): (&String, &Value)| metadata["labels"][key] == *value;
            metadata["namespace"] == namespace && selector.iter().all(has)
        };
        let endpoint = |member: &Member| {
            let metadata = &member.pod.object["metadata"];
            json!({
                "addresses": [member.pod.address],
                "nodeName": self.node_name(&member.node),
                "conditions": {
                    "ready": member.state == State::Ready,
                    "serving": member.state != State::Unready,
                    "terminating": member.state == State::Terminating,
                },
                "targetRef": { "kind": "Pod", "namespace": metadata["namespace"], "name": metadata["name"] },
            })
        };
        let port = |port: &Value| json!({ "name": port["name"], "port": port["targetPort"], "protocol": "TCP" });
        let ports = service["spec"]["ports"].as_array().into_iter().flatten();
        let metadata = json!({ "namespace": namespace, "name": format!("{name}-1"),
            "labels": { "kubernetes.io/service-name": name } });
        let endpoints: Vec<Value> = self.members.values().filter(is_selected).map(endpoint).collect();
        Some(
            json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata,
            "addressType": "IPv4", "endpoints": endpoints, "ports": ports.map(port).collect::<Vec<_>>() }),
        )
    }

    fn set_state(&mut self, name: &str, state: State) {
        if let Some(member) = self.members.get_mut(name) {
            member.state = state;
        }
    }

    /// Deletes pods as Kubernetes does: they lose their endpoints, end their connections within the drain time, and
    /// then are gone.
    pub(super) fn terminate(&mut self, names: &[&str]) -> Result<(), String> {
        let api = &self.base.tenant.cluster.api;
        let reference = |name: &str| Reference::new("v1", "Pod", &self.base.tenant.app, name);
        for name in names {
            api.begin_deletion(&reference(name))?;
        }
        for name in names {
            self.set_state(name, State::Terminating);
        }
        self.publish()?;
        for name in names {
            if let Some(proxy) = &self.pod(name).proxy {
                proxy.drain()?;
            }
        }
        self.until_unused(names)?;
        // Connections that remain after the drain time are closed.
        let _ = wait::until("the end of all connections", DRAIN, || {
            let active = names.iter().map(|name| self.pod(name).sum(ACTIVE).unwrap_or_default());
            (active.sum::<u64>() == 0).then_some(())
        });
        for name in names {
            let reference = Reference::new("v1", "Pod", &self.base.tenant.app, name);
            self.base.tenant.cluster.api.delete(&reference)?;
            self.members.remove(*name);
            self.ztunnels.values_mut().for_each(|ztunnel| ztunnel.release(name));
        }
        self.publish()
    }

    /// Cuts a node off: its pods are no longer reached, and nothing on it runs.
    pub(super) fn lose(&mut self, node: &str) -> Result<(), String> {
        for member in self.members.values_mut().filter(|member| member.node == node) {
            member.pod.host.ip("link set eth0 down")?;
            (member.pod.proxy, member.pod.agent, member.application) = (None, None, None);
        }
        self.ztunnels.remove(node);
        Ok(())
    }

    /// Declares a node as lost, as the controller for nodes does after its grace period, and waits until no proxy uses
    /// its pods.
    pub(super) fn declare_lost(&mut self, node: &str) -> Result<(), String> {
        let (tenant, node_name) = (&self.base.tenant, self.node_name(node));
        let api = &tenant.cluster.api;
        api.apply(&node_object(&node_name, "Unknown"))?;
        let on_node = self.members.iter().filter(|(_, member)| member.node == node);
        let on_node: Vec<String> = on_node.map(|(name, _)| name.clone()).collect();
        for name in &on_node {
            self.base.set_ready(self.pod(name), false)?;
        }
        for name in &on_node {
            self.set_state(name, State::Unready);
        }
        self.publish()?;
        self.until_unused(&on_node.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Waits until no ztunnel and no Envoy sends new connections to these pods.
    fn until_unused(&self, names: &[&str]) -> Result<(), String> {
        let addresses: Vec<IpAddr> = names.iter().map(|name| self.pod(name).address).collect();
        let mut user = String::new();
        let unused = wait::until("pods that no proxy uses", TIMEOUT, || {
            let found = addresses.iter().find_map(|address| self.user_of(*address));
            user = found.unwrap_or_default();
            user.is_empty().then_some(())
        });
        unused.map_err(|error| format!("{error}: {user} uses one of {names:?}"))
    }

    /// Returns the name of a proxy that sends connections to an address.
    fn user_of(&self, address: IpAddr) -> Option<String> {
        let mut ztunnels = self.ztunnels.iter().filter(|(_, ztunnel)| ztunnel.uses(address));
        let lists = |member: &&Member| {
            let proxy = member.pod.proxy.as_ref().filter(|_| member.state == State::Ready);
            let table = proxy.and_then(|proxy| proxy.ask("/clusters").ok()).unwrap_or_default();
            // Services with a preference for near endpoints also have the unhealthy ones.
            let is_used = |line: &str| {
                let is_endpoint = line.starts_with("outbound|") || line.starts_with("inbound-vip|");
                is_endpoint && line.contains(&format!("{address}:")) && line.ends_with("::health_flags::healthy")
            };
            table.lines().any(is_used)
        };
        let ztunnel = ztunnels.next().map(|(node, _)| format!("the ztunnel of {node}"));
        ztunnel.or_else(|| {
            let member = self.members.values().find(lists)?;
            Some(member.pod.host.name.clone())
        })
    }
}

/// Installs the chart's templates of deployments.
fn install_templates(tenant: &Tenant<'_>, place: Place) -> Result<(), String> {
    let cluster = format!("global.multiCluster.clusterName={}", place.cluster);
    let network = format!("global.network={}", place.network);
    let objects = helm::objects_in(&tenant.system, "istiod", &[&cluster, &network])?;
    let is_injector =
        |object: &&Value| object["kind"] == "ConfigMap" && object["metadata"]["name"] == "istio-sidecar-injector";
    let templates = objects
        .iter()
        .find(is_injector)
        .ok_or("the chart has no injector ConfigMap")?;
    tenant.cluster.api.apply(templates).map(|_| ())
}

/// A node with this status of its condition `Ready`.
fn node_object(name: &str, ready: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name },
        "status": { "conditions": [{ "type": "Ready", "status": ready }] } })
}
