//! A cluster of the lab: an API server and a network of pods. The lab itself acts as the controllers, kubelets and load
//! balancers.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::agent::Agent;
use super::app::Application;
use super::host::{Host, Network};
use super::injected::Injected;
use super::proxy::Proxy;
use crate::kube::tenant::TIMEOUT;
use crate::support::agent::ClientCredentials;
use crate::support::kubernetes::Cluster;
use crate::support::kubernetes::api::Reference;
use crate::support::{self, wait};

/// The control plane's namespace.
pub(crate) const SYSTEM: &str = "istio-system";
/// The applications' namespace.
pub(crate) const SAMPLE: &str = "sample";

/// The drain time of a terminating pod (`terminationDrainDuration`).
const DRAIN: Duration = Duration::from_secs(5);

/// A service of each cluster. It selects pods whose label `app` has its name.
struct Service {
    namespace: &'static str,
    name: &'static str,
    /// Last byte of its address.
    last: u8,
    /// Port name, port and target port.
    ports: &'static [(&'static str, u16, u16)],
    /// True if a load balancer gives it external addresses.
    is_outside: bool,
}

const SERVICES: [Service; 4] = [
    Service {
        namespace: SAMPLE,
        name: "helloworld",
        last: 50,
        ports: &[("http", 5000, 5000)],
        is_outside: false,
    },
    Service {
        namespace: SAMPLE,
        name: "sleep",
        last: 51,
        ports: &[("http", 80, 80)],
        is_outside: false,
    },
    Service {
        namespace: SYSTEM,
        name: EAST_WEST,
        last: 52,
        ports: &[("status-port", 15021, 15021), ("tls", 15443, 15443)],
        is_outside: true,
    },
    Service {
        namespace: SYSTEM,
        name: INGRESS,
        last: 53,
        ports: &[("status-port", 15021, 15021), ("http2", 80, 8080)],
        is_outside: true,
    },
];

/// The east-west gateway.
pub(crate) const EAST_WEST: &str = "istio-eastwestgateway";
/// The ingress gateway.
pub(crate) const INGRESS: &str = "istio-ingressgateway";

/// The content of a pod.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content {
    /// An application on port 5000, or a pod without one.
    Application { answers: bool, has_sidecar: bool },
    /// A gateway with an external address.
    Gateway { outside: Ipv4Addr },
}

/// The specification of a pod.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) namespace: &'static str,
    /// Its service. The service account has the same name.
    pub(crate) app: &'static str,
    /// Empty if it has none.
    pub(crate) version: &'static str,
    pub(crate) address: Ipv4Addr,
    pub(crate) content: Content,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Ready,
    Unready,
    Terminating,
}

/// A running pod.
pub(crate) struct Pod {
    pub(crate) spec: Spec,
    pub(crate) host: Arc<Host>,
    /// The object in Kubernetes, as it was admitted.
    object: Value,
    pub(crate) agent: Option<Agent>,
    proxy: Option<Proxy>,
    application: Option<Application>,
    state: State,
}

/// A cluster with everything that runs in it.
pub(crate) struct LabCluster {
    pub(crate) name: &'static str,
    pub(crate) network: &'static str,
    pub(crate) kubernetes: Cluster,
    /// The control plane of its agents, once there is one.
    pub(crate) control_plane: Option<support::agent::Agent>,
    pods: Network,
    outside: Arc<Network>,
    folder: PathBuf,
    running: BTreeMap<String, Pod>,
    /// The pods that are being deleted, with the end of their drain time.
    leaving: BTreeMap<String, Instant>,
    /// The last written EndpointSlices and Service statuses.
    written: BTreeMap<String, Value>,
}

impl Pod {
    /// Returns its proxy. Panics if it has none.
    pub(crate) fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().expect("this pod has a proxy")
    }

    /// Returns the node of its proxy.
    pub(crate) fn node(&self) -> Result<Value, String> {
        let injected = Injected::of(&self.object);
        injected.ok_or("the pod has no proxy")?.node()
    }

    /// True if it answers and accepts new requests.
    pub(crate) fn is_ready(&self) -> bool {
        self.state == State::Ready
    }
}

impl LabCluster {
    /// Starts an API server with the namespaces and Services of the mesh, and a network of pods behind a router to
    /// `outside`, where the router has the address `router`. `folder` is the test's folder, relative to that of all
    /// tests.
    pub(crate) fn start(
        (name, network): (&'static str, &'static str),
        outside: &Arc<Network>,
        router: Ipv4Addr,
        folder: &str,
    ) -> Result<LabCluster, String> {
        let kubernetes = Cluster::start(&format!("{folder}/{name}"))?;
        let work = support::scratch(&format!("{folder}/{name}-pods"));
        let mut pods = Network::start(&format!("{name}-network"), 16, &work)?;
        pods.connect_to(outside, Ipv4Addr::new(10, 42, 0, 1).into(), router.into())?;
        let cluster = LabCluster {
            name,
            network,
            kubernetes,
            control_plane: None,
            pods,
            outside: Arc::clone(outside),
            folder: work,
            running: BTreeMap::new(),
            leaving: BTreeMap::new(),
            written: BTreeMap::new(),
        };
        cluster.kubernetes.namespace(SYSTEM, &json!({}))?;
        cluster
            .kubernetes
            .namespace(SAMPLE, &json!({ "istio-injection": "enabled" }))?;
        for service in &SERVICES {
            cluster.kubernetes.api.apply(&service.object(&cluster))?;
        }
        Ok(cluster)
    }

    /// The address of a service in this cluster.
    pub(crate) fn address_of(&self, service: &str) -> Ipv4Addr {
        let service = SERVICES.iter().find(|known| known.name == service);
        self.service_address(service.expect("it is one of the mesh's services"))
    }

    fn service_address(&self, service: &Service) -> Ipv4Addr {
        // Each cluster uses its own service addresses.
        let cluster = if self.name == "cluster1" { 1 } else { 2 };
        Ipv4Addr::new(10, 96, cluster, service.last)
    }

    /// Returns the roots published for workloads of this cluster, if there are any.
    pub(crate) fn roots(&self) -> Option<String> {
        let map = Reference::new("v1", "ConfigMap", SAMPLE, "istio-ca-root-cert");
        let map = self.kubernetes.get(&map).ok()??;
        map["data"]["root-cert.pem"].as_str().map(str::to_owned)
    }

    /// Labels the network of the cluster and its gateway.
    pub(crate) fn label_network(&self) -> Result<(), String> {
        let namespace = Reference::new("v1", "Namespace", "", SYSTEM);
        self.kubernetes
            .api
            .patch(&namespace, &network_label(json!(self.network)))?;
        self.label_gateway(true)
    }

    /// Adds or removes the network label of the gateway's Service.
    pub(crate) fn label_gateway(&self, is_labelled: bool) -> Result<(), String> {
        let label = if is_labelled { json!(self.network) } else { Value::Null };
        let gateway = Reference::new("v1", "Service", SYSTEM, EAST_WEST);
        self.kubernetes.api.patch(&gateway, &network_label(label))?;
        Ok(())
    }

    /// Starts a pod and marks it ready.
    pub(crate) fn run(&mut self, spec: Spec) -> Result<(), String> {
        let pod = self.started(spec)?;
        self.running.insert(pod.spec.name.clone(), pod);
        self.publish()
    }

    fn started(&self, spec: Spec) -> Result<Pod, String> {
        let Spec {
            name,
            namespace,
            app,
            address,
            ..
        } = &spec;
        let object = self.admitted(&spec)?;
        let host = Arc::new(Host::start(name, &self.folder)?);
        self.pods.attach(&host, "eth0", (*address).into(), true)?;
        let application = match spec.content {
            Content::Gateway { outside } => {
                self.outside.attach(&host, "eth1", outside.into(), false)?;
                None
            }
            Content::Application { answers: false, .. } => None,
            Content::Application { .. } => Some(Application::start(&host, name, 5000)?),
        };
        let (mut agent, mut proxy) = (None, None);
        if let Some(injected) = Injected::of(&object) {
            let control_plane = self
                .control_plane
                .as_ref()
                .ok_or("the control plane is not running yet")?;
            let audience = injected.audience()?;
            let mut token = ClientCredentials::token(self.kubernetes.token(namespace, app, &[audience])?);
            token.cluster = Some(injected.cluster()?);
            // Retry: a control plane may not have read the cluster yet.
            let mut refused = String::new();
            let asking = wait::until("a certificate", TIMEOUT, || {
                let started = Agent::start(control_plane.clone(), token.clone());
                started.map_err(|error| refused = error).ok()
            });
            let asking = asking.map_err(|error| format!("{name}: {error}: {refused}"))?;
            proxy = Some(Proxy::start(
                &host,
                &injected,
                control_plane,
                asking.known(),
                &self.folder,
            )?);
            agent = Some(asking);
        }
        Ok(Pod {
            spec,
            host,
            object,
            agent,
            proxy,
            application,
            state: State::Ready,
        })
    }

    /// Creates a pod as a ReplicaSet does, again and again until the injector has admitted it. A pod that exists was
    /// restarted.
    fn admitted(&self, spec: &Spec) -> Result<Value, String> {
        let api = &self.kubernetes.api;
        api.apply(&json!({ "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": { "namespace": spec.namespace, "name": spec.app } }))?;
        let wanted = spec.object(self.network);
        let reference = Reference::of(&wanted);
        let mut refused = String::new();
        let created = wait::until("an admitted pod", TIMEOUT, || {
            let existing = api.get(&reference).ok().flatten();
            existing.or_else(|| api.create(&wanted).map_err(|error| refused = error).ok())
        });
        created.map_err(|error| format!("{}: {error}: {refused}", spec.name))?;
        let address = spec.address;
        let (version, kind) = (&wanted["apiVersion"], &wanted["kind"]);
        api.apply_status(&json!({ "apiVersion": version, "kind": kind,
            "metadata": { "namespace": spec.namespace, "name": spec.name },
            "status": { "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
                "conditions": [{ "type": "Ready", "status": "True" }] } }))
    }

    pub(crate) fn pod(&self, name: &str) -> &Pod {
        &self.running[name]
    }

    /// Returns all running proxies with their pods.
    pub(crate) fn proxies(&self) -> impl Iterator<Item = (&Pod, &Proxy)> {
        self.running.values().filter_map(|pod| Some((pod, pod.proxy.as_ref()?)))
    }

    /// Sets the result of a pod's readiness probe.
    pub(crate) fn set_ready(&mut self, name: &str, is_ready: bool) -> Result<(), String> {
        let state = if is_ready { State::Ready } else { State::Unready };
        self.set_state(name, state)
    }

    fn set_state(&mut self, name: &str, state: State) -> Result<(), String> {
        let pod = self.running.get_mut(name).ok_or_else(|| format!("no pod {name}"))?;
        pod.state = state;
        self.publish()
    }

    /// Deletes a pod: its endpoints are removed first, and connections get the drain time to end. Proxies of
    /// `elsewhere` may have its endpoints too, if it is a gateway.
    pub(crate) fn remove(&mut self, name: &str, elsewhere: &LabCluster) -> Result<(), String> {
        self.terminate(name)?;
        self.until_unlisted(name, elsewhere)?;
        if let Some(proxy) = &self.running[name].proxy {
            // Connections that remain after the drain time are closed.
            let _ = wait::until("the end of all connections", DRAIN, || {
                let active = proxy.sum(r"^listener\.[^a].*\.downstream_cx_active$").ok()?;
                (active == 0).then_some(())
            });
        }
        self.forget(name)
    }

    /// Begins to delete a pod as Kubernetes does: it ends some time after it has lost its endpoints, whether or not
    /// proxies know that, see [`Self::end_removals`].
    pub(crate) fn begin_removal(&mut self, name: &str) -> Result<(), String> {
        self.terminate(name)?;
        self.leaving.insert(name.to_owned(), wait::now() + DRAIN);
        Ok(())
    }

    /// Ends the pods whose drain time is over. Those that a proxy still uses, since a control plane or an API server is
    /// down, go on.
    pub(crate) fn end_removals(&mut self, elsewhere: &LabCluster) -> Result<(), String> {
        let ended = self.leaving.iter().filter(|(_, end)| **end <= wait::now());
        let ended: Vec<String> = ended.map(|(name, _)| name.clone()).collect();
        for name in ended {
            if self.is_unlisted(&name, elsewhere) {
                self.leaving.remove(&name);
                self.forget(&name)?;
            }
        }
        Ok(())
    }

    /// True if this pod is being deleted.
    pub(crate) fn is_leaving(&self, name: &str) -> bool {
        self.leaving.contains_key(name)
    }

    fn terminate(&mut self, name: &str) -> Result<(), String> {
        self.set_state(name, State::Terminating)?;
        self.running[name].proxy.as_ref().map_or(Ok(()), Proxy::drain)
    }

    /// Kills a pod's processes, as a crash does. The endpoints stay until [`Self::delete_crashed`].
    pub(crate) fn crash(&mut self, name: &str) -> Result<(), String> {
        let pod = self.running.get_mut(name).ok_or_else(|| format!("no pod {name}"))?;
        (pod.proxy, pod.application, pod.agent) = (None, None, None);
        Ok(())
    }

    /// Removes the endpoints of a crashed pod that is not restarted.
    pub(crate) fn delete_crashed(&mut self, name: &str, elsewhere: &LabCluster) -> Result<(), String> {
        self.set_state(name, State::Unready)?;
        self.until_unlisted(name, elsewhere)?;
        self.forget(name)
    }

    /// Its host stays until no proxy has its address, so that connections are refused at once, as by a node without
    /// such a pod.
    fn forget(&mut self, name: &str) -> Result<(), String> {
        let Some(pod) = self.running.remove(name) else {
            return Ok(());
        };
        self.kubernetes
            .api
            .delete(&Reference::new("v1", "Pod", pod.spec.namespace, name))?;
        self.publish()
    }

    fn until_unlisted(&self, name: &str, elsewhere: &LabCluster) -> Result<(), String> {
        let what = format!("the removal of {name} from every endpoint table");
        wait::until(&what, TIMEOUT, || self.is_unlisted(name, elsewhere).then_some(()))
    }

    /// True if no proxy has an endpoint of this pod.
    fn is_unlisted(&self, name: &str, elsewhere: &LabCluster) -> bool {
        let spec = &self.running[name].spec;
        let outside = match spec.content {
            Content::Gateway { outside } => Some(format!("::{outside}:")),
            Content::Application { .. } => None,
        };
        let is_listed = self.lists(&format!("::{}:", spec.address))
            || outside.is_some_and(|outside| self.lists(&outside) || elsewhere.lists(&outside));
        !is_listed
    }

    /// True if a proxy of this cluster has, or may have, an endpoint in whose line this text occurs. A proxy that does
    /// not answer may.
    fn lists(&self, endpoint: &str) -> bool {
        self.proxies().any(|(_, proxy)| {
            let Ok(table) = proxy.ask("/clusters") else {
                return true;
            };
            let mut lines = table.lines().filter(|line| line.starts_with("outbound"));
            lines.any(|line| line.contains(endpoint))
        })
    }

    /// Writes changed EndpointSlices and load balancer addresses.
    fn publish(&mut self) -> Result<(), String> {
        for service in &SERVICES {
            let pods: Vec<&Pod> = self
                .running
                .values()
                .filter(|pod| pod.spec.namespace == service.namespace && pod.spec.app == service.name)
                .collect();
            let slice = service.slice(&pods);
            let status = service.is_outside.then(|| service.status(&pods));
            for (kind, document) in [("slice", Some(slice)), ("status", status)] {
                let Some(document) = document else { continue };
                let key = format!("{kind} of {}", service.name);
                if self.written.get(&key) == Some(&document) {
                    continue;
                }
                if kind == "slice" {
                    self.kubernetes.api.apply(&document)?;
                } else {
                    self.kubernetes.api.apply_status(&document)?;
                }
                self.written.insert(key, document);
            }
        }
        Ok(())
    }
}

fn network_label(label: Value) -> Value {
    json!({ "metadata": { "labels": { "topology.istio.io/network": label } } })
}

impl Spec {
    /// The pod as its Deployment describes it, before injection.
    fn object(&self, network: &str) -> Value {
        let mut labels = json!({ "app": self.app });
        if !self.version.is_empty() {
            labels["version"] = json!(self.version);
        }
        let mut annotations = json!({});
        let mut container = json!({ "name": "app", "image": "app", "ports": [{ "containerPort": 5000 }] });
        match self.content {
            Content::Application { has_sidecar: true, .. } => {}
            Content::Application { .. } => labels["sidecar.istio.io/inject"] = json!("false"),
            Content::Gateway { .. } => {
                labels["istio"] = json!(self.app.trim_start_matches("istio-"));
                labels["sidecar.istio.io/inject"] = json!("true");
                annotations["inject.istio.io/templates"] = json!("gateway");
                container = json!({ "name": "istio-proxy", "image": "auto" });
            }
        }
        if self.app == EAST_WEST {
            // It sees only endpoints of its own network: traffic from another one that arrives there goes no further.
            container["env"] = json!([{ "name": "ISTIO_META_REQUESTED_NETWORK_VIEW", "value": network }]);
        }
        json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": self.namespace, "name": self.name, "labels": labels,
                "annotations": annotations },
            "spec": { "serviceAccountName": self.app, "nodeName": "node", "containers": [container] } })
    }
}

impl Service {
    fn object(&self, cluster: &LabCluster) -> Value {
        let ports = self
            .ports
            .iter()
            .map(|(name, port, target)| json!({ "name": name, "port": port, "targetPort": target, "protocol": "TCP" }));
        let labels = json!({ "app": self.name });
        json!({ "apiVersion": "v1", "kind": "Service",
            "metadata": { "namespace": self.namespace, "name": self.name, "labels": labels },
            "spec": {
                "type": if self.is_outside { "LoadBalancer" } else { "ClusterIP" },
                "clusterIP": cluster.service_address(self),
                "selector": { "app": self.name },
                "ports": ports.collect::<Vec<_>>(),
            } })
    }

    fn slice(&self, pods: &[&Pod]) -> Value {
        let endpoint = |pod: &&Pod| {
            json!({
                "addresses": [pod.spec.address],
                "conditions": {
                    "ready": pod.state == State::Ready,
                    "serving": pod.state != State::Unready,
                    "terminating": pod.state == State::Terminating,
                },
                "targetRef": { "kind": "Pod", "namespace": self.namespace, "name": pod.spec.name },
            })
        };
        let ports = self
            .ports
            .iter()
            .map(|(name, _, target)| json!({ "name": name, "port": target, "protocol": "TCP" }));
        json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "namespace": self.namespace, "name": format!("{}-1", self.name),
                "labels": { "kubernetes.io/service-name": self.name } },
            "addressType": "IPv4",
            "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
            "ports": ports.collect::<Vec<_>>() })
    }

    /// One external address for each ready pod, as a load balancer on the nodes assigns.
    fn status(&self, pods: &[&Pod]) -> Value {
        let outside = pods
            .iter()
            .filter(|pod| pod.is_ready())
            .filter_map(|pod| match pod.spec.content {
                Content::Gateway { outside } => Some(json!({ "ip": outside })),
                Content::Application { .. } => None,
            });
        json!({ "apiVersion": "v1", "kind": "Service",
            "metadata": { "namespace": self.namespace, "name": self.name },
            "status": { "loadBalancer": { "ingress": outside.collect::<Vec<_>>() } } })
    }
}
