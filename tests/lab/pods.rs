//! A mesh of pods in one cluster: a control plane with certificates, and pods on hosts of one network.

use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};

use super::agent::Agent;
use super::app::Call;
use super::host::{Host, Network};
use super::proxy::{Proxy, Role, Workload};
use crate::kube::tenant::{TIMEOUT, Tenant};
use crate::support::agent::{ClientCredentials, Trust};
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::{self, wait};

/// A control plane and the network of the pods.
pub(super) struct Mesh {
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
        let labels = labels(name, role);
        let workload = Workload {
            role: role.unwrap_or(Role::Sidecar),
            name: name.to_owned(),
            namespace: tenant.app.clone(),
            account: name.to_owned(),
            address,
            labels: labels.clone(),
            cluster: "Kubernetes".into(),
            network: String::new(),
            is_edge: false,
        };
        tenant.cluster.service_account(&tenant.app, name)?;
        tenant.cluster.api.apply(&json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": tenant.app, "name": name, "labels": labels },
            "spec": { "serviceAccountName": name, "nodeName": "node",
                "containers": [{ "name": "app", "image": "app" }] },
            "status": { "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
                "conditions": [{ "type": "Ready", "status": "True" }] } }))?;
        let host = Arc::new(Host::start(name, &tenant.folder)?);
        self.network.attach(&host, "eth0", address, true)?;
        let mut pod = Pod {
            host,
            agent: None,
            proxy: None,
        };
        if role.is_some() {
            let token = tenant.cluster.token(&tenant.app, name, &["istio-ca"])?;
            let agent = Agent::start(self.control_plane.clone(), ClientCredentials::token(token))
                .map_err(|error| format!("{name}: {error}\n{}", self.daemon.process.log_tail()))?;
            let known = agent.known();
            pod.proxy = Some(Proxy::start(
                &pod.host,
                &workload,
                &self.control_plane,
                known,
                &tenant.folder,
            )?);
            pod.agent = Some(agent);
        }
        Ok(pod)
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

/// Returns the roots that the control plane publishes for workloads.
pub(super) fn published(tenant: &Tenant) -> Option<String> {
    let map = Reference::new("v1", "ConfigMap", &tenant.app, "istio-ca-root-cert");
    let map = tenant.cluster.get(&map).ok()??;
    map["data"]["root-cert.pem"].as_str().map(str::to_owned)
}

/// The labels of a pod, among them those that the injector sets for its proxy.
fn labels(name: &str, role: Option<Role>) -> Value {
    let mode = match role {
        Some(Role::Sidecar | Role::HboneSidecar) => "istio",
        Some(Role::Gateway | Role::Waypoint) | None => "disabled",
    };
    let mut labels = json!({ "app": name, "security.istio.io/tlsMode": mode });
    if role == Some(Role::HboneSidecar) {
        labels["networking.istio.io/tunnel"] = json!("http");
    }
    labels
}
