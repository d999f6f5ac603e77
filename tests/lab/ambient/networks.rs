//! Two clusters on two networks, each with a control plane, and a service that spans both: connections between them
//! are in two tunnels, of which the gateway of the other network, a real Envoy, ends the outer one.

use std::net::{IpAddr, Ipv4Addr};

use libtest_mimic::{Completion, Failed};
use serde_json::json;

use super::mesh::{self, Mesh, Place};
use super::{TUNNELS, WAYPOINT, call, direct, run_waypoint, spec, use_waypoint};
use crate::kube::tenant::{TIMEOUT, Tenant};
use crate::lab::host::Network;
use crate::lab::pods::Role;
use crate::lab::ztunnel::Subscription;
use crate::support::authority::Authority;
use crate::support::{missing, wait};

const PLACES: [Place; 2] = [
    Place {
        cluster: "east",
        network: "network-east",
    },
    Place {
        cluster: "west",
        network: "network-west",
    },
];

/// A service of the mesh. Each cluster has an address of its own for it.
const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: server, namespace: '{app}', labels: {scope: global}}
spec:
  clusterIP: 10.96.{n}.50
  selector: {app: server}
  ports: [{name: http, port: 80, targetPort: 8080, protocol: TCP}]
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: '{system}'}
spec: {mtls: {mode: STRICT}}
";

/// The gateway of a network.
const EAST_WEST: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: east-west, namespace: '{system}', labels: {topology.istio.io/network: NETWORK}}
spec:
  gatewayClassName: istio-east-west
  listeners:
  - name: mesh
    port: 15008
    protocol: HBONE
    tls: {mode: Terminate, options: {gateway.istio.io/tls-terminate-mode: ISTIO_MUTUAL}}
";

/// A policy of layer 7 of the waypoint in the client's cluster.
const ONLY_OPEN: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: only-open, namespace: '{app}'}
spec:
  targetRefs: [{group: '', kind: Service, name: server}]
  rules:
  - from: [{source: {principals: ['cluster.local/ns/{app}/sa/client']}}]
    to: [{operation: {paths: [/open]}}]
";

/// A policy of layer 4 that admits only one client.
const ONLY_CLIENT: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: only-client, namespace: '{app}'}
spec:
  selector: {matchLabels: {app: server}}
  rules:
  - from: [{source: {principals: ['cluster.local/ns/{app}/sa/client']}}]
";

fn outside(last: u8) -> IpAddr {
    Ipv4Addr::new(192, 168, 120, last).into()
}

/// Starts the control planes of both clusters, which read each other, behind routers on the outer network.
fn start(name: &str, outer: &mut Option<Network>) -> Result<[Mesh; 2], String> {
    let east = Tenant::within(mesh::cluster(0)?, name)?;
    let west = east.twin(mesh::cluster(1)?)?;
    let outer = outer.insert(Network::start("outer", 24, &east.folder)?);
    let root = Authority::new("east");
    let authorities = [root.sibling("east"), root.sibling("west")];
    let kubeconfig = |remote: &Tenant<'_>| {
        std::fs::read_to_string(remote.cluster.admin_kubeconfig()).map_err(|error| error.to_string())
    };
    let remotes = [kubeconfig(&west)?, kubeconfig(&east)?];
    let mut meshes = Vec::new();
    for (index, tenant) in [east, west].into_iter().enumerate() {
        let (place, other) = (PLACES[index], PLACES[1 - index]);
        let api = &tenant.cluster.api;
        let labels = json!({ "trial": tenant.trial, "topology.istio.io/network": place.network });
        tenant.cluster.namespace(&tenant.system, &labels)?;
        tenant.set_mesh("serviceScopeConfigs: [{servicesSelector: {matchLabels: {scope: global}}, scope: GLOBAL}]")?;
        api.apply(&authorities[index].secret(&tenant.system, None))?;
        api.apply(&json!({ "apiVersion": "v1", "kind": "Secret",
            "metadata": { "namespace": tenant.system, "name": "remote", "labels": { "istio/multiCluster": "true" } },
            "stringData": { other.cluster: remotes[index] } }))?;
        let mut mesh = Mesh::start(tenant, place, OBJECTS)?;
        mesh.base.connect_to(outer, outside(1 + u8::from(index == 1)))?;
        mesh.add_node("node", 201, [Subscription::OnDemand, Subscription::Wildcard][index])?;
        meshes.push(mesh);
    }
    <[Mesh; 2]>::try_from(meshes).map_err(|_| "there are two clusters".to_owned())
}

pub(super) fn networks_are_joined(name: &str) -> Result<Completion, Failed> {
    if let Some(reason) = mesh::missing_component() {
        return missing(reason);
    }
    let mut outer = None;
    let [mut east, mut west] = start(name, &mut outer)?;
    let outer = outer.as_ref().ok_or("the outer network has started")?;
    west.deploy(&EAST_WEST.replace("NETWORK", PLACES[1].network))?;
    let system = west.base.tenant.system.clone();
    let address = Some((outer, outside(10)));
    west.run_gateway((&system, "east-west"), "east-west-1", "node", 10, address)?;
    west.run(&spec("server", "server", "node", 1, Some(Role::Ambient)))?;
    east.run(&spec("client", "client", "node", 2, Some(Role::Ambient)))?;
    east.run(&spec("other", "other", "node", 3, Some(Role::Ambient)))?;

    let server = call(&east, "server", 50, "/open");
    let (client, other, gateway) = (east.pod("client"), east.pod("other"), west.pod("east-west-1"));
    client.until_status(&server, 200)?;
    let tunnels = gateway.sum(TUNNELS)?;
    assert!(tunnels > 0, "the gateway must have ended the outer tunnel");
    assert!(
        west.ztunnel("node").has_accepted("server", &east.identity("client")),
        "the inner tunnel must have the identity of the client"
    );
    other.until_status(&server, 200)?;
    west.base.tenant.apply(ONLY_CLIENT)?;
    other.until_refused(&server)?;
    client.until_status(&server, 200)?;
    west.base.tenant.delete(ONLY_CLIENT)?;

    // A local pod of the service shares its traffic with the other network.
    east.run(&spec("server-east", "server", "node", 1, Some(Role::Ambient)))?;
    let client = east.pod("client");
    for application in ["server", "server-east"] {
        wait::until(&format!("an answer of {application}"), TIMEOUT, || {
            let answer = server.from(&client.host).ok()?;
            (answer.application()? == application).then_some(())
        })?;
    }
    client.until_status(&direct(&east, "server-east"), 200)?;
    waypoints_cross(&mut east, &mut west)?;
    for (mesh, pod) in [(&west, "east-west-1"), (&west, "waypoint-1"), (&east, "waypoint-1")] {
        let rejected = mesh.pod(pod).sum("update_rejected")?;
        assert_eq!(rejected, 0, "{pod} must accept every update");
    }
    Ok(Completion::Completed)
}

/// With a waypoint in both clusters, that of the client's cluster enforces its policies and opens the two tunnels. The
/// gateway of the other network passes them by the waypoint there.
fn waypoints_cross(east: &mut Mesh, west: &mut Mesh) -> Result<(), String> {
    for mesh in [&mut *east, &mut *west] {
        mesh.deploy(WAYPOINT)?;
        run_waypoint(mesh, "waypoint-1", "node", 11)?;
    }
    for mesh in [&*east, &*west] {
        use_waypoint(mesh)?;
    }
    east.base.tenant.apply(ONLY_OPEN)?;
    let (open, closed) = (call(east, "server", 50, "/open"), call(east, "server", 50, "/closed"));
    let client = east.pod("client");
    client.until_status(&closed, 403)?;
    for application in ["server", "server-east"] {
        wait::until(
            &format!("an answer of {application} through a waypoint"),
            TIMEOUT,
            || {
                let answer = open.from(&client.host).ok()?;
                let is_expected = answer.application()? == application && east.pod("waypoint-1").sum(TUNNELS).ok()? > 0;
                is_expected.then_some(())
            },
        )?;
    }
    let waypoint = east.identity("waypoint");
    wait::until(
        "a tunnel of the waypoint to the pod of the other network",
        TIMEOUT,
        || {
            let _ = open.from(&client.host);
            west.ztunnel("node").has_accepted("server", &waypoint).then_some(())
        },
    )?;
    assert_eq!(
        west.pod("waypoint-1").sum(TUNNELS)?,
        0,
        "the other waypoint must be passed by"
    );
    Ok(())
}
