//! The time from a change of an endpoint in one cluster to its arrival in an Envoy of the other cluster.

use std::net::Ipv4Addr;
use std::time::Duration;

use super::endpoints::Endpoints;
use super::mesh::{GATEWAYS, Mesh, helloworld, outbound};
use crate::kube::tenant::TIMEOUT;
use crate::support::wait;
use crate::support::wait::now;

/// Number of measured changes: where the figures count, and on a busy machine.
const CHANGES: (usize, usize) = (100, 10);
/// The limit for 99 of 100 changes, with the default debounce of 100 ms.
const GOAL: Duration = Duration::from_millis(400);

/// Makes a pod of the second cluster ready and unready in turns; the weight of the gateway in cluster1's sleep follows.
pub(super) fn is_fast(mesh: &mut Mesh) -> Result<(), String> {
    let name = "helloworld-v2-measured";
    mesh.clusters[1].run(helloworld("v2", "-measured", Ipv4Addr::new(10, 42, 0, 19)))?;
    let gateway = format!("{}:15443", GATEWAYS[1]);
    let [near, far] = &mut mesh.clusters;
    let sleep = near.pod("sleep").proxy();
    let until_weight = |weight: u64| {
        wait::until("the gateway's new weight", TIMEOUT, || {
            let endpoints = Endpoints::of(sleep, &outbound("")).ok()?;
            let mut rows = endpoints.rows.iter();
            rows.any(|row| row.address == gateway && row.weight == weight)
                .then_some(())
        })
    };
    until_weight(2)?;
    let is_measured = mesh.report.is_shown();
    let changes = if is_measured { CHANGES.0 } else { CHANGES.1 };
    let mut took = Vec::with_capacity(changes);
    for change in 0..changes {
        let is_ready = change % 2 == 1;
        let started_at = now();
        far.set_ready(name, is_ready)?;
        until_weight(if is_ready { 2 } else { 1 })?;
        took.push(started_at.elapsed());
    }
    took.sort();
    let at = |share: usize| took[(took.len() * share).div_ceil(100).max(1) - 1];
    let millis = |share| at(share).as_millis();
    let seen = format!("p50 {} ms, p99 {} ms, most {} ms", millis(50), millis(99), millis(100));
    let what = format!("{changes} changes of an endpoint in cluster2, each until the Envoy in cluster1 has it");
    let expected = if is_measured {
        format!("p99 under {GOAL:?}")
    } else {
        "each arrives; `make lab` measures the time".to_owned()
    };
    let is_good = !is_measured || at(99) < GOAL;
    mesh.report.fact(&what, &expected, (is_good, seen))?;
    mesh.remove(1, name)
}
