//! A real Envoy, configured over ADS by the daemon under test.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::process::Process;
use super::{http, project, wait};

/// The variant of the xDS protocol that the Envoy uses.
#[derive(Clone, Copy)]
pub(crate) enum Protocol {
    StateOfTheWorld,
    Delta,
}

/// The node of the Envoy.
pub(crate) struct Node {
    /// `type~ip~pod.namespace~namespace.svc.cluster.local`.
    pub(crate) id: String,
    pub(crate) metadata: Value,
}

impl Node {
    /// A sidecar of a pod in the namespace `shop`.
    pub(crate) fn in_shop(pod: &str) -> Node {
        Node {
            id: format!("sidecar~127.0.0.1~{pod}.shop~shop.svc.cluster.local"),
            metadata: json!({
                "NAMESPACE": "shop",
                "CLUSTER_ID": "Kubernetes",
                "ISTIO_VERSION": "1.30.3",
                "INSTANCE_IPS": "127.0.0.1",
                "LABELS": { "app": "client" },
            }),
        }
    }
}

/// Returns the binary installed by `make tools`, if it exists.
pub(crate) fn binary() -> Option<PathBuf> {
    let path = project().join(".tools/py/bin/envoy");
    path.is_file().then_some(path)
}

/// A running Envoy. Dropping it kills it.
pub(crate) struct Envoy {
    process: Process,
    admin: SocketAddr,
}

impl Envoy {
    /// Starts an Envoy with ADS from the daemon on port `xds`, and waits for its first configuration.
    pub(crate) fn start(folder: &Path, name: &str, node: &Node, xds: u16, protocol: Protocol) -> Result<Envoy, String> {
        let config = folder.join(format!("{name}.json"));
        let admin = folder.join(format!("{name}-admin"));
        std::fs::write(&config, bootstrap(node, xds, protocol).to_string()).map_err(|error| error.to_string())?;
        let mut command = Command::new(binary().ok_or("no Envoy; `make tools` installs it")?);
        command.args(["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]);
        command.arg("-c").arg(&config).arg("--admin-address-path").arg(&admin);
        let process = Process::start(&mut command, &folder.join(format!("{name}.log")));
        let address = wait::until("Envoy's admin interface", Duration::from_secs(30), || {
            std::fs::read_to_string(&admin).ok()?.trim().parse().ok()
        });
        let admin = address.map_err(|error| format!("{error}\n{}", process.log_tail()))?;
        let envoy = Envoy { process, admin };
        wait::until("a ready Envoy", Duration::from_mins(1), || {
            http::get(admin, "admin", "/ready")
                .ok()
                .filter(|answer| answer.status.is_success())
        })
        .map_err(|error| format!("{error}\n{}", envoy.process.log_tail()))?;
        Ok(envoy)
    }

    /// The address of the admin interface.
    pub(crate) fn admin(&self) -> SocketAddr {
        self.admin
    }

    fn ask(&self, path: &str) -> String {
        let answer = http::get(self.admin, "admin", path).expect("Envoy's admin interface answers");
        assert!(answer.status.is_success(), "{path}: {} {}", answer.status, answer.body);
        answer.body
    }

    fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.ask(path)).expect("Envoy writes JSON on request")
    }

    /// Returns the counters and gauges whose name matches `filter`, a regular expression, with their values.
    pub(crate) fn stats(&self, filter: &str) -> Vec<(String, u64)> {
        let stats = self.json(&format!("/stats?format=json&filter={filter}"));
        let rows = stats["stats"].as_array().into_iter().flatten();
        rows.filter_map(|row| Some((row["name"].as_str()?.to_owned(), row["value"].as_u64()?)))
            .collect()
    }

    /// Returns the sum of the counters whose name matches `filter`.
    pub(crate) fn sum(&self, filter: &str) -> u64 {
        self.stats(filter).iter().map(|(_, value)| value).sum()
    }

    /// Fails, with Envoy's reasons, if Envoy has rejected an update.
    pub(crate) fn rejected_nothing(&self) -> Result<(), String> {
        let refused: Vec<_> = self
            .stats("update_rejected")
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .collect();
        if refused.is_empty() {
            Ok(())
        } else {
            Err(format!("refused: {refused:?}\n{}", self.process.log_tail()))
        }
    }

    /// Returns the names of the clusters, listeners and routes received from the daemon.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for config in self.json("/config_dump")["configs"].as_array().into_iter().flatten() {
            let dynamic = ["dynamic_active_clusters", "dynamic_listeners", "dynamic_route_configs"];
            let entries = dynamic.iter().filter_map(|key| config[key].as_array()).flatten();
            let name = |entry: &Value| {
                let named = [
                    &entry["cluster"]["name"],
                    &entry["name"],
                    &entry["route_config"]["name"],
                ];
                named.into_iter().find_map(Value::as_str).map(str::to_owned)
            };
            names.extend(entries.filter_map(name));
        }
        names
    }

    /// Returns the configuration of a cluster received from the daemon.
    pub(crate) fn cluster(&self, name: &str) -> Option<Value> {
        let dump = self.json("/config_dump?resource=dynamic_active_clusters");
        let clusters = dump["configs"].as_array().into_iter().flatten();
        let mut named = clusters.filter(|cluster| cluster["cluster"]["name"] == name);
        named.next().map(|cluster| cluster["cluster"].clone())
    }

    /// Returns the addresses of a cluster's endpoints.
    pub(crate) fn endpoints(&self, cluster: &str) -> Vec<String> {
        let clusters = self.json("/clusters?format=json");
        let statuses = clusters["cluster_statuses"].as_array().into_iter().flatten();
        let hosts = statuses
            .filter(|status| status["name"] == cluster)
            .filter_map(|status| status["host_statuses"].as_array());
        let addresses = hosts.flatten().map(|host| &host["address"]["socket_address"]);
        addresses
            .map(|socket| {
                format!(
                    "{}:{}",
                    socket["address"].as_str().unwrap_or_default(),
                    socket["port_value"]
                )
            })
            .collect()
    }
}

fn bootstrap(node: &Node, xds: u16, protocol: Protocol) -> Value {
    let api_type = match protocol {
        Protocol::StateOfTheWorld => "GRPC",
        Protocol::Delta => "DELTA_GRPC",
    };
    let over_ads = json!({ "ads": {}, "resource_api_version": "V3", "initial_fetch_timeout": "0s" });
    json!({
        "node": { "id": node.id, "cluster": "test", "metadata": node.metadata },
        "admin": { "address": { "socket_address": { "address": "127.0.0.1", "port_value": 0 } } },
        "dynamic_resources": {
            "ads_config": {
                "api_type": api_type,
                "transport_api_version": "V3",
                "set_node_on_first_message_only": true,
                "grpc_services": [{ "envoy_grpc": { "cluster_name": "xds-grpc" } }],
            },
            "cds_config": over_ads,
            "lds_config": over_ads,
        },
        "static_resources": { "clusters": [{
            "name": "xds-grpc",
            "type": "STATIC",
            "connect_timeout": "1s",
            "typed_extension_protocol_options": { "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": { "http2_protocol_options": {} },
            } },
            "load_assignment": { "cluster_name": "xds-grpc", "endpoints": [{ "lb_endpoints": [{ "endpoint": {
                "address": { "socket_address": { "address": "127.0.0.1", "port_value": xds } },
            } }] }] },
        }] },
    })
}
