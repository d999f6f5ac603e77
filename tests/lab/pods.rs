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
    /// It is the workload itself, and enforces policies of an ambient mesh.
    Waypoint,
}

/// A control plane and the network of the pods.
pub(super) struct Mesh {
    injector: Injector,
    pub(super) tenant: Tenant<'static>,
    control_plane: support::agent::Agent,
    network: Network,
    pub(super) daemon: Daemon,
}

/// A pod, with its proxy if it has one.
pub(super) struct Pod {
    pub(super) host: Arc<Host>,
    pub(super) agent: Option<Agent>,
    pub(super) proxy: Option<Proxy>,
}

impl Mesh {
    /// Applies these objects and starts a daemon, which `configure` gives further flags and variables.
    pub(super) fn new(name: &str, objects: &str, configure: impl FnOnce(&mut Command)) -> Result<Mesh, String> {
        let tenant = Tenant::shared(0, name)?;
        tenant.apply(objects)?;
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

    pub(super) fn address(&self, last: u8) -> IpAddr {
        self.tenant
            .fill(&format!("10.{{n}}.0.{last}"))
            .parse()
            .expect("the address is valid")
    }

    /// Creates a pod in Kubernetes, and a host and, for a role, a proxy for it.
    pub(super) fn pod(&self, name: &str, last: u8, role: Option<Role>) -> Result<Pod, String> {
        let (tenant, address) = (&self.tenant, self.address(last));
        tenant.cluster.service_account(&tenant.app, name)?;
        let object = tenant.cluster.api.apply(&self.injected(name, address, role)?)?;
        let host = Arc::new(Host::start(name, &tenant.folder)?);
        self.network.attach(&host, "eth0", address, true)?;
        let mut pod = Pod {
            host,
            agent: None,
            proxy: None,
        };
        if let Some(injected) = Injected::of(&object) {
            let token = tenant.cluster.token(&tenant.app, name, &[injected.audience()?])?;
            let agent = Agent::start(self.control_plane.clone(), ClientCredentials::token(token))
                .map_err(|error| format!("{name}: {error}\n{}", self.daemon.process.log_tail()))?;
            let known = agent.known();
            pod.proxy = Some(Proxy::start(
                &pod.host,
                &injected,
                &self.control_plane,
                known,
                &tenant.folder,
            )?);
            pod.agent = Some(agent);
        }
        Ok(pod)
    }

    /// Returns the object of a pod after its injection. The test injects it itself: an API server that tests share can
    /// have no webhooks of one of them.
    fn injected(&self, name: &str, address: IpAddr, role: Option<Role>) -> Result<Value, String> {
        let namespace = &self.tenant.app;
        let pod = with_role(
            json!({ "apiVersion": "v1", "kind": "Pod",
                "metadata": { "namespace": namespace, "name": name, "labels": { "app": name }, "annotations": {} },
                "spec": { "serviceAccountName": name, "nodeName": "node",
                    "containers": [{ "name": "app", "image": "app" }] } }),
            role,
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
        if role == Some(Role::Waypoint) {
            // The pod of a waypoint is that of a gateway but for its role.
            object["spec"]["containers"][0]["args"][1] = json!("waypoint");
        }
        object["status"] = json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
            "conditions": [{ "type": "Ready", "status": "True" }] });
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

/// Adds what a pod of this role says to the injector.
fn with_role(mut pod: Value, role: Option<Role>) -> Value {
    let metadata = &mut pod["metadata"];
    match role {
        None => metadata["labels"]["sidecar.istio.io/inject"] = json!("false"),
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
