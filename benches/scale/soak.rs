//! A hundred thousand short connections and as many changes, after which the daemon's idle memory must be unchanged.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use super::fleet::{Load, Plan};
use super::mesh::Mesh;
use super::source::Source;
use super::ticker::Ticker;
use crate::support::daemon::Daemon;
use crate::support::{self, http, wait};
use crate::usage::Usage;

const MESH: Mesh = Mesh {
    services: 100,
    endpoints: 5,
    namespaces: 50,
};
/// Temporary services outside [`MESH`].
const TEMPORARY: usize = 50;
const CONNECTIONS: usize = 100_000;
const CHANGES: usize = 100_000;
/// Number of connections at a time.
const WAVE: usize = 500;
/// Number of measurements.
const STEPS: usize = 20;
/// Number of warm-up steps; the measurements after them are compared.
const WARM_UP: usize = STEPS / 4;
const MAX_RATIO: f64 = 1.05;
const CHANGES_A_SECOND: f64 = 150.0;
/// Idle time before each measurement.
const REST: Duration = Duration::from_secs(5);

/// Gauges of what the daemon holds.
const GAUGES: [&str; 5] = [
    "istiod_proxies",
    "istiod_groups",
    "istiod_resources",
    "istiod_resource_bytes",
    "istiod_dependencies",
];

/// Runs a part of the soak. The error names what grew.
pub(crate) fn run(part: f64) -> Result<(), String> {
    let share = |all: usize| ((all as f64 * part / STEPS as f64).ceil() as usize).max(1);
    let (connections, changes) = (share(CONNECTIONS), share(CHANGES));
    let source = Source::spread("soak", MESH)?;
    let log = support::scratch("bench/scale/soak/daemon").join("istiod.log");
    let daemon = source.daemon(&log)?;
    let started_at = wait::now();
    println!(
        "{:>6}{:>14}{:>10}{:>9}{:>9}{:>10}{:>9}{:>11}{:>14}{:>14}",
        "s", "connections", "changes", "MiB", "proxies", "groups", "CPU-s", "resources", "bytes", "dependencies"
    );
    let mut resident = Vec::new();
    let mut round = 0;
    for step in 0..=STEPS {
        if step > 0 {
            std::thread::scope(|scope| {
                let changer = scope.spawn(|| change(&source, &mut round, changes));
                let waves = waves(&daemon, (step - 1) * connections, connections);
                let changed = changer
                    .join()
                    .unwrap_or_else(|_| Err("the thread that makes changes panicked".into()));
                waves.and(changed)
            })?;
            for passing in 0..TEMPORARY {
                source.remove(&MESH.service_of(MESH.services + passing))?;
            }
        }
        rest();
        let usage = Usage::of(&daemon.process)?;
        let gauges = gauges(&daemon)?;
        println!(
            "{:>6.0}{:>14}{:>10}{:>9.1}{:>9}{:>10}{:>9.1}{:>11}{:>14}{:>14}",
            started_at.elapsed().as_secs_f64(),
            step * connections,
            step * changes,
            usage.resident_mib,
            gauges[0],
            gauges[1],
            usage.cpu_seconds,
            gauges[2],
            gauges[3],
            gauges[4]
        );
        if gauges[0] > 0.0 {
            return Err(format!("{} proxies in the daemon, but none is connected", gauges[0]));
        }
        resident.push(usage.resident_mib);
    }
    let warm = &resident[WARM_UP..];
    let most = warm.iter().copied().fold(0.0, f64::max);
    let least = warm.iter().copied().fold(f64::INFINITY, f64::min);
    println!(
        "\nbetween {least:.1} and {most:.1} MiB after the first quarter: {:.3} times",
        most / least
    );
    if most / least > MAX_RATIO {
        return Err(format!("resident memory is not stable: more than {MAX_RATIO} times"));
    }
    Ok(())
}

fn rest() {
    let started_at = wait::now();
    let _ = wait::until("rest", REST, || (started_at.elapsed() >= REST).then_some(()));
}

/// Connects new proxies, waits until they are configured, and disconnects them. Every fourth wave uses state of the
/// world.
fn waves(daemon: &Daemon, first: usize, connections: usize) -> Result<(), String> {
    let mut done = 0;
    while done < connections {
        let proxies = WAVE.min(connections - done);
        let plan = Plan {
            proxies,
            workloads: 100,
            namespaces: MESH.namespaces,
            ramp: Duration::ZERO,
            is_delta: ((first + done) / WAVE) % 4 != 3,
        };
        let address = SocketAddr::from(([127, 0, 0, 1], daemon.xds));
        let mut load = Load::starting_at(address, plan, first + done);
        load.connect(Duration::ZERO)?;
        done += proxies;
    }
    Ok(())
}

/// Changes endpoints and routing, and adds and removes services.
fn change(source: &Source, round: &mut usize, changes: usize) -> Result<(), String> {
    let mut ticker = Ticker::new(CHANGES_A_SECOND);
    let mut there = [false; TEMPORARY];
    for _ in 0..changes {
        ticker.wait();
        *round += 1;
        let service = *round % MESH.services;
        match *round % 4 {
            0 | 1 => source.put(&MESH.slice(service, 1 + *round % 200))?,
            2 => source.put(&MESH.virtual_service(service, 1 + *round % 200))?,
            _ => {
                let passing = *round / 4 % TEMPORARY;
                let objects: Vec<Value> = MESH.service_of(MESH.services + passing);
                if there[passing] {
                    source.remove(&objects)?;
                } else {
                    source.put_all(&objects)?;
                }
                there[passing] = !there[passing];
            }
        }
    }
    Ok(())
}

fn gauges(daemon: &Daemon) -> Result<[f64; GAUGES.len()], String> {
    let page = http::get(daemon.monitoring, "istiod", "/metrics")?;
    Ok(GAUGES.map(|name| {
        let values = page.body.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let labelled = || rest.strip_prefix('{')?.split_once("} ").map(|(_, value)| value);
            rest.strip_prefix(' ').or_else(labelled)?.trim().parse::<f64>().ok()
        });
        values.sum()
    }))
}
