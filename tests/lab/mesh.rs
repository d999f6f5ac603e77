//! Two clusters on two networks, their control planes and workloads, and requests to them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};

use super::app::Call;
use super::cluster::{Content, EAST_WEST, INGRESS, LabCluster, SAMPLE, SYSTEM, Spec};
use super::host::{Host, Network};
use super::report::Report;
use crate::kube::tenant::TIMEOUT;
use crate::support::agent::{Agent, Trust};
use crate::support::authority::Authority;
use crate::support::daemon::Daemon;
use crate::support::kubernetes::api::Reference;
use crate::support::{helm, http, remote_secret, scratch, wait};

/// The objects that control planes read in addition to those of a test.
const MESH: &str = include_str!("mesh.yaml");
/// Proxies log every request in their working folder, to debug failed ones.
const MESH_CONFIG: &str = "
defaultConfig: {meshId: mesh1}
accessLogFile: access.log
accessLogEncoding: JSON
";
/// The host name of the service under test.
pub(crate) const HELLOWORLD: &str = "helloworld.sample.svc.cluster.local";

/// Addresses on the network that both clusters can reach, and of pods. The pods of both clusters use one address range,
/// as in clusters with default settings.
pub(crate) const GATEWAYS: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 111, 205), Ipv4Addr::new(192, 168, 111, 131)];
pub(crate) const SECOND_GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 168, 111, 132);
pub(crate) const HELLOWORLDS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 42, 0, 59), Ipv4Addr::new(10, 42, 0, 15)];
const INGRESS_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 168, 111, 206);

/// The multicluster deployment model, and the source of network information.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DeploymentModel {
    /// A control plane in each cluster. Namespaces and gateways have network labels.
    MultiPrimary,
    /// The control plane of the first cluster also serves the second.
    PrimaryRemote,
    /// A control plane in each cluster. Networks and gateways come only from `meshNetworks`.
    MeshNetworks,
}

/// A control plane.
pub(crate) struct ControlPlane {
    pub(crate) daemon: Daemon,
    kubeconfig: PathBuf,
    cluster: &'static str,
    /// True if it serves other clusters besides its own.
    serves_remotes: bool,
    starts: usize,
    folder: PathBuf,
}

/// The two clusters with everything that runs in them.
pub(crate) struct Mesh {
    pub(crate) report: Report,
    pub(crate) clusters: [LabCluster; 2],
    /// In the order of their clusters.
    pub(crate) control_planes: Vec<ControlPlane>,
    /// The signing CA of each cluster.
    pub(crate) authorities: [Authority; 2],
    /// A host outside the mesh.
    pub(crate) outside: Arc<Host>,
    pub(crate) folder: PathBuf,
}

/// Number of answers from each version.
#[derive(PartialEq, Eq, Debug, Default)]
pub(crate) struct Tally(pub(crate) BTreeMap<String, usize>);

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let traffic_shares: Vec<String> = self
            .0
            .iter()
            .map(|(version, count)| format!("{version} {count}"))
            .collect();
        formatter.write_str(&traffic_shares.join(", "))
    }
}

impl Tally {
    /// Returns the number of answers from a version.
    pub(crate) fn of(&self, version: &str) -> usize {
        self.0.get(version).copied().unwrap_or_default()
    }
}

impl ControlPlane {
    fn start(cluster: &LabCluster, serves_remotes: bool, folder: &Path) -> Result<ControlPlane, String> {
        let kubeconfig = cluster.kubernetes.admin_kubeconfig();
        let daemon = Daemon::secured(&folder.join(format!("istiod-{}.log", cluster.name)), |command| {
            configure(command, &kubeconfig, cluster.name, serves_remotes);
        })?;
        Ok(ControlPlane {
            daemon,
            kubeconfig,
            cluster: cluster.name,
            serves_remotes,
            starts: 1,
            folder: folder.to_owned(),
        })
    }

    /// Kills the daemon and starts another. Does not wait for it.
    pub(crate) fn restart(&mut self) {
        self.starts += 1;
        let log = self.folder.join(format!("istiod-{}-{}.log", self.cluster, self.starts));
        self.daemon.restart_unready(&log, |command| {
            configure(command, &self.kubeconfig, self.cluster, self.serves_remotes);
        });
    }

    /// Starts a second replica that reads the same objects and has no clients yet.
    pub(crate) fn replica(&self) -> Result<Daemon, String> {
        let log = self.folder.join(format!("istiod-{}-replica.log", self.cluster));
        Daemon::secured(&log, |command| {
            configure(command, &self.kubeconfig, self.cluster, self.serves_remotes);
        })
    }
}

/// Installs the chart's injector, which calls the control plane. The cluster of a control plane that runs elsewhere is
/// named by the path of the webhook, so the values of its own cluster serve both.
fn install_injector(cluster: &LabCluster, control_plane: &ControlPlane) -> Result<(), String> {
    let name = format!("global.multiCluster.clusterName={}", cluster.name);
    let network = format!("global.network={}", cluster.network);
    // Envoy has one thread, since a machine runs all of the lab.
    let values = [
        name.as_str(),
        &network,
        "global.meshID=mesh1",
        "global.proxy.resources.limits.cpu=1",
    ];
    let path = if control_plane.cluster == cluster.name {
        String::new()
    } else {
        format!("/cluster/{}/net/{}", cluster.name, cluster.network)
    };
    for object in helm::objects("istiod", &values)? {
        let api = &cluster.kubernetes.api;
        if object["metadata"]["name"] != "istio-sidecar-injector" {
            continue;
        }
        if object["kind"] == "MutatingWebhookConfiguration" {
            let port = control_plane.daemon.webhooks;
            api.apply(&helm::with_local_webhooks(&object, port, &path))?;
        } else if path.is_empty() {
            api.apply(&object)?;
        }
    }
    Ok(())
}

fn configure(command: &mut Command, kubeconfig: &Path, cluster: &str, serves_remotes: bool) {
    command.arg("--kubeconfig").arg(kubeconfig).args(["-n", SYSTEM]);
    command
        .env("CLUSTER_ID", cluster)
        .env("ISTIOD_CUSTOM_HOST", "localhost");
    if serves_remotes {
        command.env("EXTERNAL_ISTIOD", "true");
    }
}

/// Installs what the charts install in a remote cluster: read access and the leader's roles for the control plane.
fn install_remote(cluster: &LabCluster) -> Result<(), String> {
    let mut objects = helm::objects("base", &[])?;
    objects.extend(helm::objects("istiod", &["global.externalIstiod=true"])?);
    let is_reader = |object: &&Value| {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let kinds = ["ServiceAccount", "ClusterRole", "ClusterRoleBinding"];
        name.starts_with("istio-reader") && kinds.contains(&object["kind"].as_str().unwrap_or_default())
    };
    let api = &cluster.kubernetes.api;
    objects
        .iter()
        .filter(is_reader)
        .try_for_each(|object| api.apply(object).map(|_| ()))?;
    let led = json!({ "metadata": { "annotations": { "topology.istio.io/controlPlaneClusters": "cluster1" } } });
    api.patch(&Reference::new("v1", "Namespace", "", SYSTEM), &led)?;
    Ok(())
}

impl Mesh {
    /// Starts both clusters with their gateways; helloworld v1 and sleep run in the first, v2 and sleep in the second.
    /// They do not know each other yet. `folder` is the test's.
    pub(crate) fn start(title: &str, form: DeploymentModel, folder: &str) -> Result<Mesh, String> {
        let work = scratch(&format!("{folder}/work"));
        let report = Report::start(title, &work)?;
        let shared = Arc::new(Network::start("shared", 24, &work)?);
        let outside = Arc::new(Host::start("outside", &work)?);
        shared.attach(&outside, "eth0", Ipv4Addr::new(192, 168, 111, 50).into(), true)?;
        let cluster = |name, network, last| {
            LabCluster::start((name, network), &shared, Ipv4Addr::new(192, 168, 111, last), folder)
        };
        let [first, second] = std::thread::scope(|scope| {
            let clusters = [("cluster1", "network1", 1), ("cluster2", "network2", 2)]
                .map(|(name, network, last)| scope.spawn(move || cluster(name, network, last)));
            clusters.map(|cluster| cluster.join().expect("starting a cluster does not panic"))
        });
        let clusters = [first?, second?];
        let root = Authority::new("cluster1");
        let authorities = [
            root.sibling("cluster1 intermediate"),
            root.sibling("cluster2 intermediate"),
        ];
        for (cluster, authority) in clusters.iter().zip(&authorities) {
            let api = &cluster.kubernetes.api;
            api.apply(&authority.secret(SYSTEM, None))?;
            api.apply(&json!({ "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": { "namespace": SYSTEM, "name": "istio" },
                "data": { "mesh": MESH_CONFIG, "meshNetworks": "networks: {}\n" } }))?;
            api.apply_all(MESH)?;
            if form != DeploymentModel::MeshNetworks {
                cluster.label_network()?;
            }
        }
        let control_planes = if form == DeploymentModel::PrimaryRemote {
            install_remote(&clusters[1])?;
            vec![ControlPlane::start(&clusters[0], true, &work)?]
        } else {
            let started = clusters
                .iter()
                .map(|cluster| ControlPlane::start(cluster, false, &work));
            started.collect::<Result<_, _>>()?
        };
        for (cluster, index) in clusters.iter().zip(0..) {
            install_injector(cluster, control_planes.get(index).unwrap_or(&control_planes[0]))?;
        }
        Ok(Mesh {
            report,
            clusters,
            control_planes,
            authorities,
            outside,
            folder: work,
        })
    }

    /// Starts the workloads of each cluster. Agents trust the roots that the control plane has published there.
    pub(crate) fn populate(&mut self) -> Result<(), String> {
        for (cluster, index) in self.clusters.iter_mut().zip(0..) {
            let control_plane = self.control_planes.get(index).unwrap_or(&self.control_planes[0]);
            let roots = wait::until("the root certificates of the mesh", TIMEOUT, || cluster.roots());
            let roots = roots
                .map_err(|error| format!("{}: {error}\n{}", cluster.name, control_plane.daemon.process.log_tail()))?;
            cluster.control_plane = Some(Agent::new(control_plane.daemon.secure, Trust::Roots(roots)));
        }
        let [first, second] = &mut self.clusters;
        std::thread::scope(|scope| {
            let populated = [(first, 0), (second, 1)].map(|(cluster, index)| {
                scope.spawn(move || {
                    cluster.run(gateway(EAST_WEST, "", 10, GATEWAYS[index]))?;
                    cluster.run(sleep())?;
                    cluster.run(helloworld(["v1", "v2"][index], "", HELLOWORLDS[index]))?;
                    if index == 0 {
                        cluster.run(gateway(INGRESS, "", 11, INGRESS_ADDRESS))?;
                    }
                    Ok::<_, String>(())
                })
            });
            populated
                .into_iter()
                .try_for_each(|cluster| cluster.join().expect("starting pods does not panic"))
        })
    }

    /// Gives the control plane at `reader` the remote Secret of the other cluster, and returns the Secret.
    pub(crate) fn join(&mut self, reader: usize) -> Result<Value, String> {
        let other = &self.clusters[1 - reader];
        let log = self.folder.join(format!("create-remote-secret-{}.log", other.name));
        let flags = ["--name", other.name, "--server", &other.kubernetes.url()];
        let secret = remote_secret::created_secret(&other.kubernetes, SYSTEM, &flags, &log)?;
        self.clusters[reader].kubernetes.api.apply(&secret)?;
        Ok(secret)
    }

    /// Edits `meshNetworks` of every control plane.
    pub(crate) fn set_networks(&self, networks: &Value) -> Result<(), String> {
        for cluster in &self.clusters[..self.control_planes.len()] {
            let map = Reference::new("v1", "ConfigMap", SYSTEM, "istio");
            let edit = json!({ "data": { "meshNetworks": json!({ "networks": networks }).to_string() } });
            cluster.kubernetes.api.patch(&map, &edit)?;
        }
        Ok(())
    }

    /// Applies an object in the clusters of all control planes.
    pub(crate) fn apply(&self, text: &str) -> Result<(), String> {
        self.clusters[..self.control_planes.len()]
            .iter()
            .try_for_each(|cluster| cluster.kubernetes.api.apply_all(text))
    }

    /// Splits helloworld requests by weight.
    pub(crate) fn split_traffic(&self, v1: u32, v2: u32) -> Result<(), String> {
        let to =
            |subset: &str, weight| json!({ "destination": { "host": HELLOWORLD, "subset": subset }, "weight": weight });
        let service = json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
            "metadata": { "namespace": SAMPLE, "name": "helloworld" },
            "spec": { "hosts": [HELLOWORLD], "http": [{ "route": [to("v1", v1), to("v2", v2)] }] } });
        self.apply(&service.to_string())
    }

    /// Removes the traffic split.
    pub(crate) fn remove_split(&self) -> Result<(), String> {
        let reference = Reference::new("networking.istio.io/v1", "VirtualService", SAMPLE, "helloworld");
        self.clusters[..self.control_planes.len()]
            .iter()
            .try_for_each(|cluster| cluster.kubernetes.api.delete(&reference))
    }

    /// Calls [`LabCluster::remove`] for a pod in this cluster.
    pub(crate) fn remove(&mut self, index: usize, name: &str) -> Result<(), String> {
        let (cluster, elsewhere) = self.cluster_and_other(index);
        cluster.remove(name, elsewhere)
    }

    /// Calls [`LabCluster::end_removals`] for both clusters.
    pub(crate) fn end_removals(&mut self) -> Result<(), String> {
        (0..2).try_for_each(|index| {
            let (cluster, elsewhere) = self.cluster_and_other(index);
            cluster.end_removals(elsewhere)
        })
    }

    /// Waits for the end of a pod that is being deleted.
    pub(crate) fn until_removed(&mut self, index: usize, name: &str) -> Result<(), String> {
        wait::until(&format!("the end of {name}"), TIMEOUT, || {
            let ended = self.end_removals();
            (ended.is_err() || !self.clusters[index].is_leaving(name)).then_some(ended)
        })?
    }

    /// Calls [`LabCluster::delete_crashed`] for a pod in this cluster.
    pub(crate) fn delete_crashed(&mut self, index: usize, name: &str) -> Result<(), String> {
        let (cluster, elsewhere) = self.cluster_and_other(index);
        cluster.delete_crashed(name, elsewhere)
    }

    fn cluster_and_other(&mut self, index: usize) -> (&mut LabCluster, &LabCluster) {
        let [first, second] = &mut self.clusters;
        if index == 0 { (first, second) } else { (second, first) }
    }

    /// A request from sleep in this cluster.
    pub(crate) fn call(&self, index: usize) -> Call {
        Call {
            host: "helloworld.sample:5000".into(),
            address: self.clusters[index].address_of("helloworld").into(),
            port: 5000,
            path: "/hello".into(),
            headers: Vec::new(),
        }
    }

    /// A request from outside the mesh.
    pub(crate) fn call_from_outside() -> Call {
        Call {
            host: "hello.example.com".into(),
            address: INGRESS_ADDRESS.into(),
            // The load balancer's port 80.
            port: 8080,
            path: "/hello".into(),
            headers: Vec::new(),
        }
    }

    /// Sends this number of requests from a host and counts the answers by version. A failed request is an error.
    pub(crate) fn tally(call: &Call, host: &Arc<Host>, requests: usize) -> Result<Tally, String> {
        let mut tally = Tally::default();
        for _ in 0..requests {
            let answer = call.from(host)?;
            let application = answer.application().filter(|_| answer.status.is_success());
            let application = application.ok_or_else(|| format!("{} {}", answer.status, answer.body))?;
            let version = application.split('-').nth(1).unwrap_or_default().to_owned();
            *tally.0.entry(version).or_default() += 1;
        }
        Ok(tally)
    }

    /// Waits until a control plane knows such a network gateway. `is_it` receives its cluster, empty if it comes from
    /// the mesh configuration, and its address.
    pub(crate) fn until_gateway(&self, control_plane: usize, is_it: impl Fn(&str, &str) -> bool) -> Result<(), String> {
        let address = self.control_planes[control_plane].daemon.monitoring;
        wait::until("the gateway of a network", TIMEOUT, || {
            let page = http::get(address, "istiod", "/debug/networkz").ok()?;
            let rows: Vec<Value> = serde_json::from_str(&page.body).ok()?;
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let mut known = rows.iter().map(|row| (text(&row["Cluster"]), text(&row["Addr"])));
            known.any(|(cluster, address)| is_it(&cluster, &address)).then_some(())
        })
    }

    /// Describes the clusters that a control plane reads, and its watches that wait or failed last, for messages.
    pub(crate) fn sources(&self, control_plane: usize) -> String {
        let address = self.control_planes[control_plane].daemon.monitoring;
        let page = |path: &str| http::get(address, "istiod", path).map_or_else(|error| error, |page| page.body);
        let watches: Vec<Value> = serde_json::from_str(&page("/debug/watchz")).unwrap_or_default();
        let failing = watches.iter().filter(|watch| watch["state"] != "watching");
        let failing: Vec<String> = failing.map(Value::to_string).collect();
        format!(
            "clusters: {}; watches that do not receive changes: [{}]",
            page("/debug/clusterz"),
            failing.join(", ")
        )
    }

    /// A step: no proxy has rejected an update.
    pub(crate) fn no_update_is_rejected(&mut self) -> Result<(), String> {
        let mut count = 0;
        let mut refusing = Vec::new();
        for cluster in &self.clusters {
            for (pod, proxy) in cluster.proxies() {
                count += 1;
                let refused = proxy.sum("update_rejected")?;
                if refused > 0 {
                    refusing.push(format!("{} in {} rejected {refused}", pod.spec.name, cluster.name));
                }
            }
        }
        let is_good = refusing.is_empty();
        let seen = if is_good {
            format!("{count} proxies, none rejected any")
        } else {
            refusing.join(", ")
        };
        self.report
            .fact("updates rejected by proxies", &"none", (is_good, seen))
    }

    /// Waits until a control plane is ready again.
    pub(crate) fn until_ready(&self, control_plane: usize) -> Result<(), String> {
        let daemon = &self.control_planes[control_plane].daemon;
        wait::until("a ready control plane", TIMEOUT, || daemon.is_ready().then_some(()))
            .map_err(|error| format!("{error}\n{}", daemon.process.log_tail()))
    }
}

/// The Envoy cluster name of helloworld, or of a subset of it.
pub(crate) fn outbound(subset: &str) -> String {
    format!("outbound|5000|{subset}|{HELLOWORLD}")
}

fn sleep() -> Spec {
    Spec {
        name: "sleep".into(),
        namespace: SAMPLE,
        app: "sleep",
        version: "",
        address: Ipv4Addr::new(10, 42, 0, 60),
        content: Content::Application {
            answers: false,
            has_sidecar: true,
        },
    }
}

/// A helloworld pod. `mark` distinguishes pods of one version.
pub(crate) fn helloworld(version: &'static str, mark: &str, address: Ipv4Addr) -> Spec {
    Spec {
        name: format!("helloworld-{version}{mark}"),
        namespace: SAMPLE,
        app: "helloworld",
        version,
        address,
        content: Content::Application {
            answers: true,
            has_sidecar: true,
        },
    }
}

/// A gateway pod. `last` is the last byte of its pod address.
pub(crate) fn gateway(app: &'static str, mark: &str, last: u8, outside: Ipv4Addr) -> Spec {
    Spec {
        name: format!("{app}{mark}"),
        namespace: SYSTEM,
        app,
        version: "",
        address: Ipv4Addr::new(10, 42, 0, last),
        content: Content::Gateway { outside },
    }
}
