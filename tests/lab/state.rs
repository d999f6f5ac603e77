//! Comparison of long-lived proxies with the configuration of freshly started control planes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::Value;

use super::mesh::Mesh;
use super::proxy::Proxy;
use crate::support::ads::{AdsClient, Resources, Type, weighted_endpoints};
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;

/// The time limit for the changes of a soak to reach every proxy. After restarts of API servers and control planes,
/// four back-offs of up to 30 s may follow one another: those of the watch of remote Secrets, of the discovery of kinds
/// and the lists of the remote cluster, and of the proxy's connection.
const SETTLED: Duration = Duration::from_mins(3);

/// The resources of a proxy: the version of each, or its content where the proxy does not keep the version.
type HeldResources = BTreeMap<(Type, String), String>;

/// Starts a replica of every control plane and compares its resources with those of each proxy.
pub(super) fn equals_fresh_start(mesh: &mut Mesh) -> Result<(), String> {
    let twins = mesh
        .control_planes
        .iter()
        .map(super::mesh::ControlPlane::replica)
        .collect::<Result<Vec<Daemon>, _>>()?;
    for index in 0..mesh.clusters.len() {
        let replica = twins.get(index).unwrap_or(&twins[0]);
        let cluster = &mesh.clusters[index];
        let fresh = cluster.proxies().map(|(pod, proxy)| {
            let node = pod.node()?;
            let node = Node {
                id: node["id"].as_str().unwrap_or_default().to_owned(),
                metadata: node["metadata"].clone(),
            };
            let fresh = AdsClient::connect_with_extensions(replica.xds, &node, extensions(proxy)?);
            Ok((&pod.spec.name, proxy, fresh))
        });
        let fresh: Vec<_> = fresh.collect::<Result<_, String>>()?;
        let what = format!("resources of the proxies of {}", cluster.name);
        let compared = mesh.report.step_within(SETTLED, &what, &"those of a fresh start", || {
            let mut count = 0;
            for (name, proxy, fresh) in &fresh {
                let given = fresh
                    .complete()
                    .ok_or_else(|| format!("{name}: {}", fresh.outstanding()))?;
                let (expected, seen) = (of_resources(&given)?, of_proxy(proxy)?);
                let difference = difference(&expected, &seen);
                if !difference.is_empty() {
                    return Ok((false, format!("{name} {difference}")));
                }
                count += expected.len();
            }
            Ok((true, format!("the same {count} resources in {} proxies", fresh.len())))
        });
        let reader = index.min(mesh.control_planes.len() - 1);
        compared.map_err(|error| format!("{}\n{error}", mesh.sources(reader)))?;
    }
    Ok(())
}

/// Returns the extensions in the node of an Envoy, on which its configuration depends.
fn extensions(proxy: &Proxy) -> Result<Vec<String>, String> {
    let page: Value = serde_json::from_str(&proxy.ask("/config_dump")?).map_err(|error| error.to_string())?;
    let node = &page["configs"][0]["bootstrap"]["node"];
    let extensions = node["extensions"].as_array().into_iter().flatten();
    let names: Vec<String> = extensions
        .filter_map(|one| Some(one["name"].as_str()?.to_owned()))
        .collect();
    if names.is_empty() {
        return Err("the proxy lists no extensions".into());
    }
    Ok(names)
}

/// Returns the first few names whose content differs.
fn difference(expected: &HeldResources, seen: &HeldResources) -> String {
    let names = expected
        .keys()
        .chain(seen.keys().filter(|name| !expected.contains_key(*name)));
    let differing = names.filter(|name| expected.get(*name) != seen.get(*name));
    let message = differing
        .take(5)
        .map(|name| format!("has {:?} as {name:?}, not {:?}", seen.get(name), expected.get(name)));
    message.collect::<Vec<_>>().join(", ")
}

fn of_resources(resources: &Resources) -> Result<HeldResources, String> {
    let mut held = HeldResources::new();
    for (name, resource) in resources {
        let shown = match name.0 {
            Type::Endpoints => weighted_endpoints(resource)?,
            Type::Cluster | Type::Listener | Type::Route => resource.version.clone(),
        };
        held.insert(name.clone(), shown);
    }
    Ok(held)
}

fn of_proxy(proxy: &Proxy) -> Result<HeldResources, String> {
    let text = proxy.ask("/config_dump?include_eds")?;
    let page: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let mut held = HeldResources::new();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    // The dump also contains endpoints of other clusters.
    let mut asked_for = BTreeSet::new();
    let mut endpoints = HeldResources::new();
    for config in page["configs"].as_array().into_iter().flatten() {
        let entries = |key: &str| config[key].as_array().into_iter().flatten();
        for entry in entries("dynamic_active_clusters") {
            let cluster = &entry["cluster"];
            if cluster["type"] == "EDS" {
                let service = text(&cluster["eds_cluster_config"]["service_name"]);
                let name = if service.is_empty() {
                    text(&cluster["name"])
                } else {
                    service
                };
                asked_for.insert((Type::Endpoints, name));
            }
            // A version in capital letters is the same.
            let version = text(&entry["version_info"]).to_lowercase();
            held.insert((Type::Cluster, text(&cluster["name"])), version);
        }
        for entry in entries("dynamic_listeners") {
            held.insert(
                (Type::Listener, text(&entry["name"])),
                text(&entry["active_state"]["version_info"]),
            );
        }
        for entry in entries("dynamic_route_configs") {
            held.insert(
                (Type::Route, text(&entry["route_config"]["name"])),
                text(&entry["version_info"]),
            );
        }
        for entry in entries("dynamic_endpoint_configs") {
            let assignment = &entry["endpoint_config"];
            endpoints.insert((Type::Endpoints, text(&assignment["cluster_name"])), shown(assignment));
        }
    }
    held.extend(endpoints.into_iter().filter(|(name, _)| asked_for.contains(name)));
    Ok(held)
}

/// The endpoints of a dumped load assignment, in the form of [`weighted_endpoints`].
fn shown(assignment: &Value) -> String {
    let mut rows = Vec::new();
    for locality in assignment["endpoints"].as_array().into_iter().flatten() {
        for endpoint in locality["lb_endpoints"].as_array().into_iter().flatten() {
            let socket = &endpoint["endpoint"]["address"]["socket_address"];
            rows.push(format!(
                "{}:{} priority {} weight {}",
                socket["address"].as_str().unwrap_or_default(),
                socket["port_value"],
                locality["priority"].as_u64().unwrap_or_default(),
                endpoint["load_balancing_weight"].as_u64().unwrap_or(1),
            ));
        }
    }
    rows.sort();
    rows.join(" ")
}
