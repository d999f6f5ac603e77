//! A multicluster scenario from installation to failure tests, in each deployment model.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::{Completion, Trial};
use serde_json::{Value, json};

use super::app::{Call, Load};
use super::cluster::{Content, EAST_WEST};
use super::convergence;
use super::endpoints::Endpoints;
use super::host::Host;
use super::mesh::{
    DeploymentModel, GATEWAYS, HELLOWORLD, HELLOWORLDS, Mesh, SECOND_GATEWAY, gateway, helloworld, outbound,
};
use super::missing_component;
use super::report::Observed;
use crate::support::kubernetes::{self, api::Reference};
use crate::support::missing;

/// A number of requests large enough to measure traffic shares.
const REQUESTS: usize = 200;
/// Interval between background requests during a step.
const INTERVAL: Duration = Duration::from_millis(20);

/// The port of east-west gateways.
const EAST_WEST_PORT: u16 = 15443;
/// The port of helloworld.
const PORT: u16 = 5000;

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, title: &'static str, form, run: fn(&mut Mesh) -> Result<(), String>| {
        kubernetes::optional_trial(name, move |folder| {
            if let Some(reason) = missing_component() {
                return missing(reason);
            }
            let mut mesh = Mesh::start(title, form, folder)?;
            if form == DeploymentModel::PrimaryRemote {
                // Workloads of the second cluster get no certificates before its tokens can be reviewed.
                mesh.join(0)?;
            }
            mesh.populate()?;
            let outcome = run(&mut mesh).and_then(|()| mesh.no_update_is_rejected());
            mesh.report.say(if outcome.is_ok() {
                "=== all as expected"
            } else {
                "=== not as expected"
            });
            outcome?;
            Ok(Completion::Completed)
        })
    };
    vec![
        trial(
            "lab::mesh::multi_primary",
            "two primary clusters on two networks",
            DeploymentModel::MultiPrimary,
            multi_primary,
        ),
        trial(
            "lab::mesh::primary_remote",
            "a primary and a remote cluster on two networks",
            DeploymentModel::PrimaryRemote,
            primary_remote,
        ),
        trial(
            "lab::mesh::mesh_networks",
            "two primary clusters with networks from meshNetworks alone",
            DeploymentModel::MeshNetworks,
            mesh_networks,
        ),
    ]
}

impl Mesh {
    /// A step: the endpoints of helloworld, or of a subset of it, in the sleep of a cluster. Prints the table.
    fn has_endpoints(&mut self, index: usize, subset: &str, expected: &[(Ipv4Addr, u16, u64)]) -> Result<(), String> {
        let sleep = self.clusters[index].pod("sleep").proxy();
        let expected = Endpoints::expected(&outbound(subset), expected);
        let of = if subset.is_empty() {
            String::new()
        } else {
            format!(" {subset}")
        };
        let what = format!("endpoints of helloworld{of} in sleep of {}", self.clusters[index].name);
        self.report
            .equal(&what, &expected, || Endpoints::of(sleep, &outbound(subset)))?;
        let table = Endpoints::of(sleep, &outbound(subset))?.table();
        self.report.say(table.trim_end());
        Ok(())
    }

    /// A step: the share of requests that v1 answers, in per cent.
    fn traffic_shares(&mut self, what: &str, call: &Call, host: &Arc<Host>, v1: (usize, usize)) -> Result<(), String> {
        let (least, most) = v1;
        let expected = format!("v1 {least}..{most} % of {REQUESTS}, v2 the rest, no failure");
        self.report.step(what, &expected, || {
            let tally = Mesh::tally(call, host, REQUESTS)?;
            let share = tally.of("v1") * 100 / REQUESTS;
            let is_all = tally.of("v1") + tally.of("v2") == REQUESTS;
            Ok(((least..=most).contains(&share) && is_all, tally.to_string()))
        })
    }

    /// Checks [`Self::traffic_shares`] for sleep in each cluster.
    fn traffic_shares_of_sleep(&mut self, v1: (usize, usize)) -> Result<(), String> {
        for index in 0..2 {
            let host = Arc::clone(&self.clusters[index].pod("sleep").host);
            let what = format!("requests from sleep in {}", self.clusters[index].name);
            self.traffic_shares(&what, &self.call(index), &host, v1)?;
        }
        Ok(())
    }

    /// Gives the gateway host of the second cluster two more external addresses.
    pub(super) fn add_gateway_addresses(&self) -> Result<[Ipv4Addr; 2], String> {
        let addresses = [140, 141].map(|last| Ipv4Addr::new(192, 168, 111, last));
        let host = &self.clusters[1].pod(EAST_WEST).host;
        for address in addresses {
            host.ip(&format!("addr add {address}/24 dev eth1"))?;
        }
        Ok(addresses)
    }

    /// A step: each cluster sees its own pod by its address and the other by its network's gateway.
    fn has_both_endpoints(&mut self) -> Result<(), String> {
        for (index, address) in HELLOWORLDS.into_iter().enumerate() {
            let other = 1 - index;
            self.has_endpoints(index, "", &[(address, PORT, 1), (GATEWAYS[other], EAST_WEST_PORT, 1)])?;
        }
        Ok(())
    }

    fn has_own_endpoints_only(&mut self, index: usize) -> Result<(), String> {
        self.has_endpoints(index, "", &[(HELLOWORLDS[index], PORT, 1)])
    }

    /// Runs `during` under load from the sleep of a cluster. No request may fail.
    fn under_load(
        &mut self,
        index: usize,
        what: &str,
        during: impl FnOnce(&mut Mesh) -> Result<(), String>,
    ) -> Result<(), String> {
        let host = Arc::clone(&self.clusters[index].pod("sleep").host);
        let load = Load::start(host, self.call(index), INTERVAL);
        let outcome = during(self);
        // Wait for some requests after the change.
        let so_far = load.answered();
        let went_on = self.report.step(
            &format!("requests from sleep in {} continue", self.clusters[index].name),
            &"50 more are answered",
            || {
                let more = load.answered() - so_far;
                Ok((more >= 50, more.to_string()))
            },
        );
        let sent = load.end();
        let (count, first) = (
            sent.failures.len(),
            sent.failures.first().map(|failure| &failure.message),
        );
        let seen: Observed = (
            count == 0,
            format!(
                "{count} of {} {}",
                sent.answered + count,
                first.map_or("", |message| message)
            ),
        );
        self.report.fact(&format!("failed requests {what}"), &"none", seen)?;
        outcome.and(went_on)
    }
}

fn multi_primary(mesh: &mut Mesh) -> Result<(), String> {
    common_root(mesh)?;
    for index in 0..2 {
        mesh.has_own_endpoints_only(index)?;
    }
    mesh.join(0)?;
    let secret = mesh.join(1)?;
    mesh.has_both_endpoints()?;
    mesh.traffic_shares_of_sleep((30, 70))?;
    mutual_tls(mesh)?;
    weights(mesh)?;
    let host = Arc::clone(&mesh.outside);
    mesh.traffic_shares(
        "requests from outside through the ingress gateway",
        &Mesh::call_from_outside(),
        &host,
        (30, 70),
    )?;
    endpoint_weights(mesh)?;
    gateways_are_added_and_removed(mesh)?;
    mesh_networks_edits(mesh)?;
    secret_is_removed_and_restored(mesh, &secret)?;
    api_server_outage(mesh)?;
    convergence::is_fast(mesh)
}

/// Each cluster has its own intermediate under one root.
fn common_root(mesh: &mut Mesh) -> Result<(), String> {
    for index in 0..2 {
        let cluster = &mesh.clusters[index];
        let agent = cluster.pod("sleep").agent.as_ref().expect("the pod has one");
        let signed = agent.known().borrow().clone();
        let signer = index.min(mesh.control_planes.len() - 1);
        let own = mesh.authorities[signer].certificate();
        let is_own = signed.chain.contains(own.trim());
        let common = mesh.authorities[0].root();
        let published = cluster.roots().unwrap_or_default();
        let is_common = [&signed.roots, &published]
            .iter()
            .all(|roots| roots.trim() == common.trim());
        let seen = format!("signed by its intermediate: {is_own}, trusts only the common root: {is_common}");
        let what = format!("issuer and roots of workloads in {}", cluster.name);
        let expected = "signed by its intermediate: true, trusts only the common root: true";
        mesh.report.fact(&what, &expected, (seen == expected, seen))?;
    }
    Ok(())
}

/// The application in the other cluster receives the client's identity, and east-west gateways do not terminate TLS.
fn mutual_tls(mesh: &mut Mesh) -> Result<(), String> {
    for index in 0..2 {
        let other = 1 - index;
        let (call, host) = (mesh.call(index), Arc::clone(&mesh.clusters[index].pod("sleep").host));
        let far = format!("helloworld-v{}", other + 1);
        let what = format!("identities of sleep in {} and {far}", mesh.clusters[index].name);
        let account = |name: &str| format!("spiffe://cluster.local/ns/sample/sa/{name}");
        let expected = format!("By={} URI={}", account("helloworld"), account("sleep"));
        mesh.report.equal(&what, &expected, || {
            let answer = call.from(&host)?;
            if answer.application().is_none_or(|name| name != far) {
                return Err("an unexpected workload answered".into());
            }
            let seen: Value = serde_json::from_str(&answer.body).map_err(|error| error.to_string())?;
            let header = seen["headers"]["x-forwarded-client-cert"].as_str().unwrap_or_default();
            let field = |name: &str| {
                header
                    .split(';')
                    .find(|part| part.starts_with(name))
                    .unwrap_or_default()
            };
            Ok(format!("{} {}", field("By="), field("URI=")))
        })?;
        let gateway = mesh.clusters[other].pod(EAST_WEST).proxy();
        let what = format!(
            "endpoints of helloworld in the gateway of {}",
            mesh.clusters[other].network
        );
        let behind = format!("outbound_.5000_._.{HELLOWORLD}");
        let own = Endpoints::expected(&behind, &[(HELLOWORLDS[other], PORT, 1)]);
        mesh.report.equal(&what, &own, || Endpoints::of(gateway, &behind))?;
        let what = format!("the gateway of {}", mesh.clusters[other].network);
        mesh.report
            .step(&what, &"connections forwarded without a TLS handshake", || {
                let passed = gateway.sum(r"^tcp\..*\.downstream_cx_total$")?;
                let shaken = gateway.sum(r"^listener\.0\.0\.0\.0_15443\.ssl\.handshake$")?;
                Ok((
                    passed > 0 && shaken == 0,
                    format!("{passed} forwarded, {shaken} handshakes"),
                ))
            })?;
    }
    Ok(())
}

/// Routes split requests between versions that run in one cluster each.
fn weights(mesh: &mut Mesh) -> Result<(), String> {
    mesh.split_traffic(90, 10)?;
    mesh.traffic_shares_of_sleep((78, 99))?;
    mesh.has_endpoints(0, "v2", &[(GATEWAYS[1], EAST_WEST_PORT, 1)])?;
    mesh.has_endpoints(1, "v1", &[(GATEWAYS[0], EAST_WEST_PORT, 1)])?;
    mesh.split_traffic(0, 100)?;
    mesh.traffic_shares_of_sleep((0, 0))?;
    mesh.remove_split()?;
    mesh.traffic_shares_of_sleep((30, 70))
}

/// The weight of a gateway is the number of endpoints behind it. A pod without a sidecar is reachable only in its own
/// network.
fn endpoint_weights(mesh: &mut Mesh) -> Result<(), String> {
    let (second, plain) = (Ipv4Addr::new(10, 42, 0, 17), Ipv4Addr::new(10, 42, 0, 18));
    mesh.clusters[1].run(helloworld("v2", "-second", second))?;
    mesh.has_endpoints(0, "", &[(HELLOWORLDS[0], PORT, 1), (GATEWAYS[1], EAST_WEST_PORT, 2)])?;
    mesh.traffic_shares_of_sleep((18, 55))?;
    let mut bare = helloworld("v2", "-plain", plain);
    bare.content = Content::Application {
        answers: true,
        has_sidecar: false,
    };
    mesh.clusters[1].run(bare)?;
    let here = [
        (HELLOWORLDS[1], PORT, 1),
        (second, PORT, 1),
        (plain, PORT, 1),
        (GATEWAYS[0], EAST_WEST_PORT, 1),
    ];
    mesh.has_endpoints(1, "", &here)?;
    mesh.has_endpoints(0, "", &[(HELLOWORLDS[0], PORT, 1), (GATEWAYS[1], EAST_WEST_PORT, 2)])?;
    mesh.under_load(0, "while pods of cluster2 end", |mesh| {
        mesh.remove(1, "helloworld-v2-plain")?;
        mesh.remove(1, "helloworld-v2-second")?;
        mesh.has_both_endpoints()
    })
}

/// A second gateway of a network shares its traffic, and is removed when its pod dies.
fn gateways_are_added_and_removed(mesh: &mut Mesh) -> Result<(), String> {
    mesh.clusters[1].run(gateway(EAST_WEST, "-second", 12, SECOND_GATEWAY))?;
    let both = [
        (HELLOWORLDS[0], PORT, 2),
        (GATEWAYS[1], EAST_WEST_PORT, 1),
        (SECOND_GATEWAY, EAST_WEST_PORT, 1),
    ];
    mesh.has_endpoints(0, "", &both)?;
    mesh.traffic_shares_of_sleep((30, 70))?;
    mesh.clusters[1].crash("istio-eastwestgateway-second")?;
    mesh.under_load(0, "after a gateway's pod died", |mesh| {
        mesh.delete_crashed(1, "istio-eastwestgateway-second")?;
        mesh.has_both_endpoints()
    })
}

/// Edits of `meshNetworks`: a network is added, and its gateway replaces the labelled one; the gateway moves; the
/// network is removed, and the labelled one is used again.
fn mesh_networks_edits(mesh: &mut Mesh) -> Result<(), String> {
    let addresses = mesh.add_gateway_addresses()?;
    mesh.under_load(0, "while meshNetworks is edited", |mesh| {
        mesh.set_networks(&json!({ "network2": network_of_cluster2(addresses[0]) }))?;
        // As an operator would do it: the new gateway is known before the old one is removed.
        let first = addresses[0].to_string();
        (0..2).try_for_each(|control_plane| mesh.until_gateway(control_plane, |_, known| known == first))?;
        mesh.clusters[1].label_gateway(false)?;
        for address in addresses {
            mesh.set_networks(&json!({ "network2": network_of_cluster2(address) }))?;
            mesh.has_endpoints(0, "", &[(HELLOWORLDS[0], PORT, 1), (address, EAST_WEST_PORT, 1)])?;
            mesh.traffic_shares_of_sleep((30, 70))?;
        }
        mesh.clusters[1].label_gateway(true)?;
        (0..2).try_for_each(|control_plane| mesh.until_gateway(control_plane, |cluster, _| cluster == "cluster2"))?;
        mesh.set_networks(&json!({}))?;
        mesh.has_both_endpoints()
    })
}

/// A network with the endpoints of cluster2 and a gateway at this address.
pub(super) fn network_of_cluster2(gateway: Ipv4Addr) -> Value {
    json!({
        "endpoints": [{ "fromRegistry": "cluster2" }],
        "gateways": [{ "address": gateway, "port": EAST_WEST_PORT }],
    })
}

/// The remote cluster's endpoints follow its Secret.
fn secret_is_removed_and_restored(mesh: &mut Mesh, secret: &Value) -> Result<(), String> {
    mesh.under_load(1, "while the Secret of cluster1 is removed and added again", |mesh| {
        mesh.clusters[1].kubernetes.api.delete(&Reference::of(secret))?;
        mesh.has_own_endpoints_only(1)?;
        mesh.has_endpoints(0, "", &[(HELLOWORLDS[0], PORT, 1), (GATEWAYS[1], EAST_WEST_PORT, 1)])?;
        mesh.clusters[1].kubernetes.api.apply(secret)?;
        mesh.has_both_endpoints()
    })
}

/// An unreachable remote API server removes no endpoints, and its changes arrive once it is back.
fn api_server_outage(mesh: &mut Mesh) -> Result<(), String> {
    mesh.under_load(0, "while the API server of cluster2 is down", |mesh| {
        mesh.clusters[1].kubernetes.stop_server();
        mesh.traffic_shares_of_sleep((30, 70))?;
        mesh.has_both_endpoints()?;
        mesh.clusters[1].kubernetes.start_server()?;
        let second = Ipv4Addr::new(10, 42, 0, 17);
        mesh.clusters[1].run(helloworld("v2", "-second", second))?;
        mesh.has_endpoints(0, "", &[(HELLOWORLDS[0], PORT, 1), (GATEWAYS[1], EAST_WEST_PORT, 2)])?;
        mesh.remove(1, "helloworld-v2-second")?;
        mesh.has_both_endpoints()
    })
}

/// The control plane of the first cluster serves both clusters, and restarts.
fn primary_remote(mesh: &mut Mesh) -> Result<(), String> {
    common_root(mesh)?;
    mesh.has_both_endpoints()?;
    mesh.traffic_shares_of_sleep((30, 70))?;
    mutual_tls(mesh)?;
    weights(mesh)?;
    endpoint_weights(mesh)?;
    mesh.under_load(1, "while the control plane restarts", |mesh| {
        mesh.control_planes[0].restart();
        mesh.until_ready(0)?;
        mesh.has_both_endpoints()
    })
}

/// Without labels, networks come from `meshNetworks`. It is empty at first, so all clusters share one network.
fn mesh_networks(mesh: &mut Mesh) -> Result<(), String> {
    mesh.join(0)?;
    mesh.join(1)?;
    for index in 0..2 {
        mesh.has_endpoints(index, "", &HELLOWORLDS.map(|address| (address, PORT, 1)))?;
    }
    // One gateway is given as a Service, the other as an address.
    let service = json!({
        "endpoints": [{ "fromRegistry": "cluster1" }],
        "gateways": [{ "registryServiceName": "istio-eastwestgateway.istio-system.svc.cluster.local",
            "port": EAST_WEST_PORT }],
    });
    let networks = |address| json!({ "network1": service, "network2": network_of_cluster2(address) });
    mesh.set_networks(&networks(GATEWAYS[1]))?;
    mesh.has_both_endpoints()?;
    mesh.traffic_shares_of_sleep((30, 70))?;
    mutual_tls(mesh)?;
    let addresses = mesh.add_gateway_addresses()?;
    mesh.under_load(0, "while a gateway of meshNetworks moves", |mesh| {
        for address in addresses {
            mesh.set_networks(&networks(address))?;
            mesh.has_endpoints(0, "", &[(HELLOWORLDS[0], PORT, 1), (address, EAST_WEST_PORT, 1)])?;
            mesh.traffic_shares_of_sleep((30, 70))?;
        }
        Ok(())
    })?;
    mesh.set_networks(&json!({ "network1": service }))?;
    mesh.has_endpoints(0, "", &HELLOWORLDS.map(|address| (address, PORT, 1)))
}
