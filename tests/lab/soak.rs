//! Random changes and faults under constant load. Only requests to a pod that has just crashed may fail, and at the end
//! every proxy has the configuration that fresh control planes would send.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Completion, Trial};
use serde_json::{Value, json};

use super::app::{Call, Failure, Load};
use super::cluster::EAST_WEST;
use super::host::Host;
use super::mesh::{DeploymentModel, Mesh, SECOND_GATEWAY, gateway, helloworld};
use super::missing_component;
use super::scenario::network_of_cluster2;
use super::state;
use crate::support::kubernetes::{self, api::Reference};
use crate::support::random::Random;
use crate::support::wait::{extended, now};
use crate::support::{missing, variable};

/// Interval between the requests of each client.
const INTERVAL: Duration = Duration::from_millis(50);
/// Default length.
const MINUTES: u64 = 3;
/// Maximum number of pods of one version in one cluster.
const MAX_PODS: usize = 3;
/// Maximum number of attempts at an event, each with another pod.
const MAX_ATTEMPTS: usize = 100;
/// Maximum number of failures in the report.
const MAX_REPORTED: usize = 10;
/// The time within which a control plane sends an endpoint's state that it has read. While endpoints change all the
/// time, it waits for at most 0.5 s.
const SENT: Duration = Duration::from_secs(2);

pub(super) fn trials() -> Vec<Trial> {
    vec![kubernetes::optional_trial("lab::mesh::soak", |folder| {
        if let Some(reason) = missing_component() {
            return missing(reason);
        }
        let number = |name: &str, otherwise| variable(name).map_or(Ok(otherwise), |text| text.parse());
        let minutes: u64 = number("SOAK_MINUTES", MINUTES).map_err(|error| format!("SOAK_MINUTES: {error}"))?;
        let seed: u64 = number("SOAK_SEED", 1).map_err(|error| format!("SOAK_SEED: {error}"))?;
        soak(Duration::from_secs(60 * minutes), seed, folder)?;
        Ok(Completion::Completed)
    })]
}

/// The sources of `network2` and its gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NetworkSource {
    Labels,
    /// Labels, and `meshNetworks` with this address.
    Both(Ipv4Addr),
    /// `meshNetworks` with this address.
    Networks(Ipv4Addr),
}

/// The state of a soak run.
struct Soak {
    mesh: Mesh,
    random: Random,
    /// The remote Secrets, by the control plane that reads them.
    secrets: [Value; 2],
    /// True if each of them exists.
    is_joined: [bool; 2],
    network_source: NetworkSource,
    /// Temporary pods by cluster: name and version.
    temporary_pods: [BTreeMap<String, &'static str>; 2],
    has_second_gateway: bool,
    /// Number of temporary pods so far, by cluster. No name or address is used twice.
    arrivals: [u16; 2],
    addresses: [Ipv4Addr; 2],
    /// The start of the load.
    started_at: Instant,
    /// For each crashed pod: the time of the crash, and the time after which no proxy may use its address any more.
    crashes: Vec<(Instant, Instant)>,
    counts: BTreeMap<&'static str, usize>,
}

/// An event: description, weight and action. The action returns false if there was nothing to do.
type Event = (&'static str, usize, fn(&mut Soak) -> Result<bool, String>);

const EVENTS: [Event; 10] = [
    ("a pod starts", 5, Soak::start_pod),
    ("a pod is deleted", 4, Soak::delete_pod),
    ("a pod crashes", 2, Soak::crash_pod),
    ("a pod is not ready for a while", 4, Soak::make_pod_unready),
    ("weights change", 4, Soak::change_weights),
    ("meshNetworks changes", 3, Soak::change_networks),
    ("a gateway starts or crashes", 2, Soak::toggle_gateway),
    ("a remote Secret is removed or added", 2, Soak::toggle_secret),
    ("an API server restarts", 1, Soak::restart_api_server),
    ("a control plane restarts", 2, Soak::restart_control_plane),
];

fn soak(length: Duration, seed: u64, folder: &str) -> Result<(), String> {
    let title = format!("random changes and faults for {} s, seed {seed}", length.as_secs());
    let mut mesh = Mesh::start(&title, DeploymentModel::MultiPrimary, folder)?;
    mesh.populate()?;
    let secrets = [mesh.join(0)?, mesh.join(1)?];
    // Each version runs in each cluster, so that neither cluster needs the other.
    mesh.clusters[0].run(helloworld("v2", "", Ipv4Addr::new(10, 42, 0, 20)))?;
    mesh.clusters[1].run(helloworld("v1", "", Ipv4Addr::new(10, 42, 0, 20)))?;
    mesh.split_traffic(50, 50)?;
    let addresses = mesh.add_gateway_addresses()?;
    for index in 0..2 {
        let host = Arc::clone(&mesh.clusters[index].pod("sleep").host);
        let call = mesh.call(index);
        mesh.report
            .step("workloads of both clusters", &"v1 and v2 answer", || {
                let tally = Mesh::tally(&call, &host, 40)?;
                Ok((tally.of("v1") > 0 && tally.of("v2") > 0, tally.to_string()))
            })?;
    }
    let mut soak = Soak {
        mesh,
        random: Random::new(seed),
        secrets,
        is_joined: [true; 2],
        network_source: NetworkSource::Labels,
        temporary_pods: [BTreeMap::new(), BTreeMap::new()],
        has_second_gateway: false,
        arrivals: [0; 2],
        addresses,
        started_at: now(),
        crashes: Vec::new(),
        counts: BTreeMap::new(),
    };
    let clients = soak.clients();
    let loads: Vec<(String, Load)> = clients
        .into_iter()
        .map(|(name, call, host)| (name, Load::start(host, call, INTERVAL)))
        .collect();
    let outcome = soak.run(length);
    let sent: Vec<_> = loads.into_iter().map(|(name, load)| (name, load.end())).collect();
    outcome?;
    for (name, sent) in sent {
        soak.check_failures(&name, sent.answered, &sent.failures)?;
    }
    soak.settle()?;
    state::equals_fresh_start(&mut soak.mesh)?;
    soak.mesh.no_update_is_rejected()
}

impl Soak {
    /// The clients that send requests all the time.
    fn clients(&self) -> Vec<(String, Call, Arc<Host>)> {
        let mesh = &self.mesh;
        let sleep = |index: usize| {
            let cluster = &mesh.clusters[index];
            (
                format!("sleep in {}", cluster.name),
                mesh.call(index),
                Arc::clone(&cluster.pod("sleep").host),
            )
        };
        let outside = (
            "outside".to_owned(),
            Mesh::call_from_outside(),
            Arc::clone(&mesh.outside),
        );
        vec![sleep(0), sleep(1), outside]
    }

    fn run(&mut self, length: Duration) -> Result<(), String> {
        let all = EVENTS.iter().map(|(_, often, _)| often).sum();
        while self.started_at.elapsed() < length {
            self.mesh.end_removals()?;
            let mut drawn = self.random.below(all);
            let event = EVENTS.iter().find(|(_, often, _)| {
                let is_it = drawn < *often;
                drawn = drawn.saturating_sub(*often);
                is_it
            });
            self.apply(*event.expect("the number is below the sum"))?;
        }
        // A slow machine has time for few events, but each kind must happen.
        for event in EVENTS {
            for _ in 0..MAX_ATTEMPTS {
                if self.counts.contains_key(event.0) {
                    break;
                }
                self.mesh.end_removals()?;
                if !self.apply(event)? {
                    self.start_pod()?;
                }
            }
            if !self.counts.contains_key(event.0) {
                return Err(format!("{}: never happened", event.0));
            }
        }
        let counts: Vec<String> = self
            .counts
            .iter()
            .map(|(name, count)| format!("{name}: {count}"))
            .collect();
        self.mesh.report.say(&counts.join(", "));
        Ok(())
    }

    fn apply(&mut self, (name, _, action): Event) -> Result<bool, String> {
        let (at, since) = (self.started_at.elapsed().as_secs_f64(), now());
        let has_happened = action(self).map_err(|error| format!("{name}: {error}"))?;
        let outcome = if has_happened {
            *self.counts.entry(name).or_default() += 1;
            format!("{:.1} s", since.elapsed().as_secs_f64())
        } else {
            "nothing to do".to_owned()
        };
        self.mesh.report.say(&format!("{at:>7.1} s  {name} ({outcome})"));
        Ok(has_happened)
    }

    /// Checks that requests were answered and none failed, except those under way when a pod crashed, or started while
    /// a proxy could still have its address.
    fn check_failures(&mut self, client: &str, answered: usize, failures: &[Failure]) -> Result<(), String> {
        let is_excused = |failure: &&Failure| {
            let mut crashes = self.crashes.iter();
            crashes.any(|(crashed, gone)| failure.ended >= *crashed && failure.started_at <= *gone)
        };
        let (excused, failed): (Vec<_>, Vec<_>) = failures.iter().partition(is_excused);
        for failure in failed.iter().take(MAX_REPORTED) {
            let at = |moment: Instant| moment.saturating_duration_since(self.started_at).as_secs_f64();
            let (start, end) = (at(failure.started_at), at(failure.ended));
            self.mesh.report.say(&format!(
                "{start:>7.1} s  failed request: {client}, until {end:.1} s: {}",
                failure.message
            ));
        }
        let mut seen = format!(
            "{} of {} failed, and {} during a crash of a pod",
            failed.len(),
            answered + failures.len(),
            excused.len()
        );
        if let Some(failure) = failed.first() {
            let past = self.crashes.iter().rfind(|(crashed, _)| *crashed <= failure.started_at);
            let since = past.map_or("before any crash".to_owned(), |(crashed, gone)| {
                let seconds = |moment: Instant| failure.started_at.saturating_duration_since(moment).as_secs_f64();
                let (crashed, gone) = (seconds(*crashed), seconds(*gone));
                format!("{crashed:.3} s after a crash and {gone:.3} s after its endpoints had to be gone")
            });
            let lasted = failure
                .ended
                .saturating_duration_since(failure.started_at)
                .as_secs_f64();
            let _ = write!(seen, "; the first, {since}, after {lasted:.3} s: {}", failure.message);
        }
        let is_good = failed.is_empty() && answered > 0;
        let what = format!("requests from {client}");
        self.mesh.report.fact(&what, &"none failed", (is_good, seen))
    }

    /// Restores everything that was removed. Additional pods stay.
    fn settle(&mut self) -> Result<(), String> {
        for index in 0..2 {
            self.mesh.until_ready(index)?;
            if !self.is_joined[index] {
                self.mesh.clusters[index].kubernetes.api.apply(&self.secrets[index])?;
            }
        }
        Ok(())
    }

    fn random_cluster(&mut self) -> usize {
        self.random.below(2)
    }

    /// Returns a temporary pod of a cluster, if it has one.
    fn temporary_pod(&mut self, cluster: usize) -> Option<String> {
        let count = self.temporary_pods[cluster].len();
        if count == 0 {
            return None;
        }
        let drawn = self.random.below(count);
        self.temporary_pods[cluster].keys().nth(drawn).cloned()
    }

    fn start_pod(&mut self) -> Result<bool, String> {
        let (cluster, version) = (self.random_cluster(), ["v1", "v2"][self.random.below(2)]);
        let present = self.temporary_pods[cluster]
            .values()
            .filter(|known| **known == version)
            .count();
        if present + 1 >= MAX_PODS {
            self.delete_pod()?;
            return Ok(false);
        }
        let number = self.arrivals[cluster];
        self.arrivals[cluster] += 1;
        let [third, fourth] = (256 + number).to_be_bytes();
        let spec = helloworld(version, &format!("-{number}"), Ipv4Addr::new(10, 42, third, fourth));
        self.temporary_pods[cluster].insert(spec.name.clone(), version);
        self.mesh.clusters[cluster].run(spec)?;
        Ok(true)
    }

    fn delete_pod(&mut self) -> Result<bool, String> {
        let cluster = self.random_cluster();
        let Some(name) = self.temporary_pod(cluster) else {
            return Ok(false);
        };
        self.temporary_pods[cluster].remove(&name);
        self.mesh.clusters[cluster].begin_removal(&name)?;
        Ok(true)
    }

    fn crash_pod(&mut self) -> Result<bool, String> {
        let cluster = self.random_cluster();
        let Some(name) = self.temporary_pod(cluster) else {
            return Ok(false);
        };
        self.temporary_pods[cluster].remove(&name);
        self.crash(cluster, &name)?;
        Ok(true)
    }

    fn crash(&mut self, cluster: usize, name: &str) -> Result<(), String> {
        let crashed = now();
        self.mesh.clusters[cluster].crash(name)?;
        self.mesh.delete_crashed(cluster, name)?;
        // The control plane may have read that the pod was ready, and have sent it to no proxy yet.
        self.crashes.push((crashed, now().max(crashed + extended(SENT))));
        Ok(())
    }

    fn make_pod_unready(&mut self) -> Result<bool, String> {
        let cluster = self.random_cluster();
        let Some(name) = self.temporary_pod(cluster) else {
            return Ok(false);
        };
        let cluster = &mut self.mesh.clusters[cluster];
        let is_ready = cluster.pod(&name).is_ready();
        cluster.set_ready(&name, !is_ready)?;
        Ok(true)
    }

    fn change_weights(&mut self) -> Result<bool, String> {
        let v1 = u32::try_from(self.random.below(101)).expect("the value is at most 100");
        self.mesh.split_traffic(v1, 100 - v1)?;
        Ok(true)
    }

    /// As an operator would do it: the network always has a gateway that each control plane knows.
    fn change_networks(&mut self) -> Result<bool, String> {
        let (address, drawn) = (self.addresses[self.random.below(2)], self.random.one_in(2));
        let mesh = &self.mesh;
        let tell = |address: Ipv4Addr| {
            mesh.set_networks(&json!({ "network2": network_of_cluster2(address) }))?;
            let address = address.to_string();
            (0..2).try_for_each(|control_plane| mesh.until_gateway(control_plane, |_, known| known == address))
        };
        self.network_source = match self.network_source {
            NetworkSource::Labels => {
                tell(address)?;
                NetworkSource::Both(address)
            }
            NetworkSource::Both(address) if drawn => {
                mesh.clusters[1].label_gateway(false)?;
                NetworkSource::Networks(address)
            }
            NetworkSource::Both(_) => {
                mesh.set_networks(&json!({}))?;
                NetworkSource::Labels
            }
            NetworkSource::Networks(old) if old == address => {
                mesh.clusters[1].label_gateway(true)?;
                // A control plane that does not read the cluster knows nothing in it.
                let readers = (0..2).filter(|control_plane| *control_plane == 1 || self.is_joined[*control_plane]);
                for control_plane in readers {
                    mesh.until_gateway(control_plane, |cluster, _| cluster == "cluster2")?;
                }
                NetworkSource::Both(address)
            }
            NetworkSource::Networks(_) => {
                tell(address)?;
                NetworkSource::Networks(address)
            }
        };
        Ok(true)
    }

    fn toggle_gateway(&mut self) -> Result<bool, String> {
        let name = format!("{EAST_WEST}-second");
        self.has_second_gateway = !self.has_second_gateway;
        if self.has_second_gateway {
            self.mesh.until_removed(1, &name)?;
            self.mesh.clusters[1].run(gateway(EAST_WEST, "-second", 12, SECOND_GATEWAY))?;
        } else if self.random.one_in(2) {
            self.mesh.clusters[1].begin_removal(&name)?;
        } else {
            self.crash(1, &name)?;
        }
        Ok(true)
    }

    fn toggle_secret(&mut self) -> Result<bool, String> {
        let reader = self.random_cluster();
        let (api, secret) = (&self.mesh.clusters[reader].kubernetes.api, &self.secrets[reader]);
        if self.is_joined[reader] {
            api.delete(&Reference::of(secret))?;
        } else {
            api.apply(secret)?;
        }
        self.is_joined[reader] = !self.is_joined[reader];
        Ok(true)
    }

    /// The other cluster changes while the server is down.
    fn restart_api_server(&mut self) -> Result<bool, String> {
        let cluster = self.random_cluster();
        self.mesh.clusters[cluster].kubernetes.stop_server();
        let other = 1 - cluster;
        if let Some(name) = self.temporary_pod(other) {
            let other = &mut self.mesh.clusters[other];
            let is_ready = other.pod(&name).is_ready();
            other.set_ready(&name, !is_ready)?;
        }
        self.mesh.clusters[cluster].kubernetes.start_server()?;
        Ok(true)
    }

    /// The next event may start while it is still down.
    fn restart_control_plane(&mut self) -> Result<bool, String> {
        let index = self.random_cluster();
        self.mesh.control_planes[index].restart();
        if !self.random.one_in(2) {
            self.mesh.until_ready(index)?;
        }
        Ok(true)
    }
}
