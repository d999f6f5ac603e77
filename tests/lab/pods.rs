//! A mesh of pods in one cluster: a control plane with certificates, and pods on hosts of one network.

use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use istiod::inject::{Environment, Injector, Namespace, Outcome};
use serde_json::{Value, json};

use super::agent::Agent;
use super::app::Call;
use super::host::{Host, Network};
use super::injected::Injected;
use super::proxy::Proxy;
use crate::inject::compare;
use crate::kube::tenant::{TIMEOUT, Tenant};
use crate::support::agent::{ClientCredentials, Trust};
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::{self, helm, wait};

/// The variable that makes a proxy accept HBONE.
const HBONE: &str = "ISTIO_META_ENABLE_HBONE";

/// The role of a proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// It receives all traffic of an application.
    Sidecar,
    /// It is a sidecar that accepts HBONE, too.
    HboneSidecar,
    /// The ztunnel of its node: the pod itself has no proxy.
    Ambient,
    /// It is the workload itself, and enforces policies of an ambient mesh.
    Waypoint,
}

/// A control plane and the network of the pods.
pub(super) struct Mesh<'c> {
    injector: Injector,
    pub(super) tenant: Tenant<'c>,
    /// The secure port of the daemon, with the roots that it has published.
    pub(super) control_plane: support::agent::Agent,
    network: Network,
    pub(super) daemon: Daemon,
}

/// The description of a pod.
pub(super) struct Spec<'s> {
    pub(super) name: &'s str,
    /// The value of its label `app`, and its service account.
    pub(super) app: &'s str,
    pub(super) node: &'s str,
    /// The last byte of its address.
    pub(super) last: u8,
    /// The role of its proxy, if it has one.
    pub(super) role: Option<Role>,
}

/// A pod, with its proxy if it has one.
pub(super) struct Pod {
    /// The object in Kubernetes.
    pub(super) object: Value,
    pub(super) address: IpAddr,
    pub(super) host: Arc<Host>,
    pub(super) agent: Option<Agent>,
    pub(super) proxy: Option<Proxy>,
}

impl Mesh<'static> {
    /// Applies these objects to a shared cluster and starts a daemon, which `configure` gives further flags and
    /// variables.
    pub(super) fn new(name: &str, objects: &str, configure: impl FnOnce(&mut Command)) -> Result<Self, String> {
        let tenant = Tenant::shared(0, name)?;
        tenant.apply(objects)?;
        Mesh::within(tenant, configure)
    }
}

impl<'c> Mesh<'c> {
    /// Starts a daemon, which `configure` gives further flags and variables.
    pub(super) fn within(tenant: Tenant<'c>, configure: impl FnOnce(&mut Command)) -> Result<Self, String> {
        let kubeconfig = tenant.cluster.admin_kubeconfig();
        let daemon = Daemon::secured(&tenant.folder.join("istiod.log"), |command| {
            command
                .arg("--kubeconfig")
                .arg(&kubeconfig)
                .args(["-n", &tenant.system]);
            configure(command);
        })?;
        let roots = wait::until("ConfigMap istio-ca-root-cert", TIMEOUT, || published(&tenant))?;
        let mut control_plane = support::agent::Agent::new(daemon.secure, Trust::Roots(roots));
        control_plane.server = format!("istiod.{}.svc", tenant.system);
        let network = Network::start("network", 16, &tenant.folder)?;
        Ok(Mesh {
            injector: injector(&tenant.system)?,
            tenant,
            control_plane,
            network,
            daemon,
        })
    }

    /// Replaces the daemon by one with other flags or variables, and waits until it is ready.
    pub(super) fn restart(&mut self, log: &Path, configure: impl FnOnce(&mut Command)) -> Result<(), String> {
        let kubeconfig = self.tenant.cluster.admin_kubeconfig();
        let system = &self.tenant.system;
        self.daemon.restart_unready(log, |command| {
            command.arg("--kubeconfig").arg(kubeconfig).args(["-n", system]);
            configure(command);
        });
        self.daemon.until_ready()
    }

    /// Connects the network of the pods to an outer one, where its router has this address. Earlier pods stay without.
    pub(super) fn connect_to(&mut self, outer: &Network, address: IpAddr) -> Result<(), String> {
        let inside = self.address(254);
        self.network.connect_to(outer, inside, address)
    }

    pub(super) fn address(&self, last: u8) -> IpAddr {
        self.tenant
            .fill(&format!("10.{{n}}.0.{last}"))
            .parse()
            .expect("the address is valid")
    }

    /// Runs a pod whose label `app` is its name, on a node without other pods.
    pub(super) fn pod(&self, name: &str, last: u8, role: Option<Role>) -> Result<Pod, String> {
        self.run(&Spec {
            name,
            app: name,
            node: "node",
            last,
            role,
        })
    }

    /// Creates a pod in Kubernetes and runs it.
    fn run(&self, spec: &Spec<'_>) -> Result<Pod, String> {
        let pod = self.start(&self.injected(spec)?)?;
        self.set_ready(&pod, true)?;
        Ok(pod)
    }

    /// Writes the result of a pod's readiness probe.
    pub(super) fn set_ready(&self, pod: &Pod, is_ready: bool) -> Result<(), String> {
        let metadata = &pod.object["metadata"];
        self.tenant
            .cluster
            .api
            .apply_status(&json!({ "apiVersion": "v1", "kind": "Pod",
                "metadata": { "namespace": metadata["namespace"], "name": metadata["name"] },
                "status": running(pod.address, is_ready) }))
            .map(|_| ())
    }

    /// Creates a pod with its status in Kubernetes, and a host and, if it has one, a proxy for it.
    pub(super) fn start(&self, pod: &Value) -> Result<Pod, String> {
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let [name, namespace] = ["/metadata/name", "/metadata/namespace"].map(text);
        let (account, address) = (text("/spec/serviceAccountName"), text("/status/podIP"));
        let address: IpAddr = address.parse().map_err(|error| format!("{name}: {error}"))?;
        let tenant = &self.tenant;
        tenant.cluster.service_account(namespace, account)?;
        let object = tenant.cluster.api.apply(pod)?;
        let host = Arc::new(Host::start(name, &tenant.folder)?);
        self.network.attach(&host, "eth0", address, true)?;
        let (mut agent, mut proxy) = (None, None);
        if let Some(injected) = Injected::of(&object) {
            let token = tenant.cluster.token(namespace, account, &[injected.audience()?])?;
            let asking = Agent::start(self.control_plane.clone(), ClientCredentials::token(token))
                .map_err(|error| format!("{name}: {error}\n{}", self.daemon.process.log_tail()))?;
            proxy = Some(Proxy::start(
                &host,
                &injected,
                &self.control_plane,
                asking.known(),
                &tenant.folder,
            )?);
            agent = Some(asking);
        }
        Ok(Pod {
            object,
            address,
            host,
            agent,
            proxy,
        })
    }

    /// Returns the object of a pod after its injection, not ready yet. The test injects it itself: an API server that
    /// tests share can have no webhooks of one of them.
    pub(super) fn injected(&self, spec: &Spec<'_>) -> Result<Value, String> {
        let namespace = &self.tenant.app;
        let pod = with_role(
            json!({ "apiVersion": "v1", "kind": "Pod",
                "metadata": { "namespace": namespace, "name": spec.name, "labels": { "app": spec.app },
                    "annotations": {} },
                "spec": { "serviceAccountName": spec.app, "nodeName": spec.node,
                    "containers": [{ "name": "app", "image": "app" }] } }),
            spec.role,
        );
        let environment = Environment {
            namespace: Arc::new(Namespace {
                name: namespace.clone(),
                ..Namespace::default()
            }),
            ..Environment::default()
        };
        let mut object = match self.injector.inject(&pod, &environment) {
            Ok(Outcome::Patch(patch)) => {
                compare::patched(&pod, patch.operations()).map_err(|error| format!("{error:?}"))?
            }
            Ok(Outcome::Skipped(_)) => pod,
            Err(error) => return Err(error.to_string()),
        };
        if spec.role == Some(Role::Waypoint) {
            // The pod of a waypoint is that of a gateway but for its role.
            object["spec"]["containers"][0]["args"][1] = json!("waypoint");
        }
        object["status"] = running(self.address(spec.last), false);
        Ok(object)
    }

    /// A request to a service at the cluster IP that ends in 50.
    pub(super) fn call(&self, service: &str, path: &str) -> Call {
        Call {
            host: format!("{service}.{}", self.tenant.app),
            address: self.tenant.fill("10.96.{n}.50").parse().expect("the address is valid"),
            port: 80,
            path: path.to_owned(),
            headers: Vec::new(),
        }
    }

    /// Like [`Self::call`], with a bearer token.
    pub(super) fn call_with(&self, service: &str, path: &str, token: &str) -> Call {
        let mut call = self.call(service, path);
        call.headers.push(("authorization", format!("Bearer {token}")));
        call
    }
}

impl Pod {
    /// Waits until a call gets this status: configuration and endpoints arrive asynchronously.
    pub(super) fn until_status(&self, call: &Call, status: u16) -> Result<(), String> {
        let mut last = String::new();
        wait::until(&format!("status {status} for {}", call.path), TIMEOUT, || {
            last = match call.from(&self.host) {
                Ok(answer) if answer.status == status => return Some(()),
                Ok(answer) => format!("{} {}", answer.status, answer.body),
                Err(error) => error,
            };
            None
        })
        .map_err(|error| format!("{}: {error}; last answer: {last}", self.host.name))
    }

    /// Waits until a call fails without a response.
    pub(super) fn until_refused(&self, call: &Call) -> Result<(), String> {
        let mut last = String::new();
        wait::until(&format!("a refused connection for {}", call.path), TIMEOUT, || {
            match call.from(&self.host) {
                Ok(answer) => last = format!("{} {}", answer.status, answer.body),
                Err(_) => return Some(()),
            }
            None
        })
        .map_err(|error| format!("{}: {error}; last answer: {last}", self.host.name))
    }

    /// Returns the sum of the counters of the pod's proxy whose name matches `filter`.
    pub(super) fn sum(&self, filter: &str) -> Result<u64, String> {
        self.proxy.as_ref().ok_or("the pod has no proxy")?.sum(filter)
    }

    pub(super) fn status(&self, call: &Call) -> Result<u16, String> {
        call.from(&self.host).map(|answer| answer.status.as_u16())
    }
}

/// Returns the chart's injector.
fn injector(system: &str) -> Result<Injector, String> {
    // Envoy has one thread, since a machine runs all of the lab.
    let objects = helm::objects_in(system, "istiod", &["global.proxy.resources.limits.cpu=1"])?;
    let [config, values] = helm::injector(&objects)?;
    Injector::parse(config, values).map_err(|error| error.to_string())
}

/// Returns the roots that the control plane publishes for workloads.
pub(super) fn published(tenant: &Tenant) -> Option<String> {
    let map = Reference::new("v1", "ConfigMap", &tenant.app, "istio-ca-root-cert");
    let map = tenant.cluster.get(&map).ok()??;
    map["data"]["root-cert.pem"].as_str().map(str::to_owned)
}

/// The status of a running pod.
pub(super) fn running(address: IpAddr, is_ready: bool) -> Value {
    let ready = if is_ready { "True" } else { "False" };
    json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
        "conditions": [{ "type": "Ready", "status": ready }] })
}

/// Adds what a pod of this role says to the injector.
fn with_role(mut pod: Value, role: Option<Role>) -> Value {
    let metadata = &mut pod["metadata"];
    match role {
        None => metadata["labels"]["sidecar.istio.io/inject"] = json!("false"),
        Some(Role::Ambient) => {
            metadata["labels"]["sidecar.istio.io/inject"] = json!("false");
            // The CNI plugin of the node adds it.
            metadata["annotations"]["ambient.istio.io/redirection"] = json!("enabled");
        }
        Some(Role::Sidecar) => metadata["labels"]["sidecar.istio.io/inject"] = json!("true"),
        Some(Role::HboneSidecar) => {
            metadata["labels"]["sidecar.istio.io/inject"] = json!("true");
            let config = json!({ "proxyMetadata": { HBONE: "true" } });
            metadata["annotations"]["proxy.istio.io/config"] = json!(config.to_string());
        }
        Some(Role::Waypoint) => {
            metadata["labels"]["sidecar.istio.io/inject"] = json!("true");
            metadata["annotations"]["inject.istio.io/templates"] = json!("gateway");
            pod["spec"]["containers"] = json!([{ "name": "istio-proxy", "image": "auto",
                "env": [{ "name": HBONE, "value": "true" }] }]);
        }
    }
    pod
}
