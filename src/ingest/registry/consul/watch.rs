//! The watcher of one datacenter.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use smol_str::SmolStr;
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, sleep, sleep_until},
};

use super::{
    FIRST_DELAY, LONGEST_DELAY,
    api::{Catalog, Check, ConsulClient, HealthEntry, Indexed, QueryError},
};
use crate::ingest::{backoff::Backoff, in_flight::InFlight, registry_metrics::OfRegistry};

/// The number of services that are read at the same time.
const CONCURRENT: usize = 16;
/// Shortest interval between two answers of a blocking query, after a burst of two.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Delay of a complete reading after a registration that names no service. The checks of a registration arrive earlier.
const UNEXPLAINED: Duration = Duration::from_millis(300);
/// Delay of a complete reading after registrations that named their services, however many follow. It finds those that
/// came between.
const RECONCILE: Duration = Duration::from_secs(10);
/// The service of Consul's servers.
const SERVERS: &str = "consul";

/// A change of a datacenter.
#[derive(Debug)]
pub(super) enum Update {
    /// A service has these instances.
    Service(SmolStr, Vec<HealthEntry>),
    /// A service does not exist any more.
    Gone(SmolStr),
    /// All services were read once.
    Synced,
}

/// An answer of a blocking query.
enum Answer {
    Catalog(Catalog),
    Checks(Vec<Check>),
}

/// An answer that lists things.
trait Listing {
    /// Returns their identities.
    fn ids(&self) -> BTreeSet<String>;
}

impl Listing for Catalog {
    fn ids(&self) -> BTreeSet<String> {
        self.keys().cloned().collect()
    }
}

impl Listing for Vec<Check> {
    fn ids(&self) -> BTreeSet<String> {
        let id = |check: &Check| format!("{}/{}", check.node, check.check_id);
        self.iter().map(id).collect()
    }
}

impl Listing for Vec<HealthEntry> {
    fn ids(&self) -> BTreeSet<String> {
        let id = |entry: &HealthEntry| {
            let HealthEntry { node, service, .. } = entry;
            format!("{}/{}/{}", node.address, service.address, service.port)
        };
        self.iter().map(id).collect()
    }
}

/// The rights of the token, as the answers to one query show them.
#[derive(Default)]
struct Rights {
    /// True if objects were missing from the last answer.
    are_limited: bool,
    /// Identities in the last answer, unless objects were missing from it.
    known: BTreeSet<String>,
}

impl Rights {
    /// Returns the answer. Fails if objects are missing from it for the first time, and some that the last answer had
    /// are not in it: the token lost rights. New objects that it may not read are no loss.
    fn check<T: Listing>(&mut self, answer: Indexed<T>) -> Result<Indexed<T>, QueryError> {
        let ids = answer.value.ids();
        if answer.is_filtered && !self.are_limited && !self.known.is_subset(&ids) {
            return Err(QueryError::Filtered);
        }
        self.are_limited = answer.is_filtered;
        self.known = if answer.is_filtered { BTreeSet::new() } else { ids };
        Ok(answer)
    }
}

/// A complete reading in the future.
#[derive(Clone, Copy)]
struct Sweep {
    at: Instant,
    /// The time until which changes that name their services may postpone it.
    deadline: Instant,
}

/// The watcher.
pub(super) struct Watcher {
    client: ConsulClient,
    datacenter: Option<String>,
    interval: Duration,
    metrics: OfRegistry,
    /// The services with their tags; `None` before the first answer.
    catalog: Option<Catalog>,
    /// The status of all checks, sorted; `None` before the first answer.
    checks: Option<Vec<Check>>,
    reading: InFlight<SmolStr, Result<Indexed<Vec<HealthEntry>>, QueryError>>,
    permits: Arc<Semaphore>,
    /// The services that are being read.
    pending: BTreeSet<SmolStr>,
    /// Failed attempts in a row, by service.
    failures: BTreeMap<SmolStr, u32>,
    /// By service.
    rights: BTreeMap<SmolStr, Rights>,
    is_synced: bool,
    next_sweep: Option<Sweep>,
    last_sweep: Option<Instant>,
    last_explained: Option<Instant>,
}

impl Watcher {
    /// Returns the watcher of a datacenter. `interval` is the shortest one between two complete readings.
    pub(super) fn new(
        client: ConsulClient,
        datacenter: Option<String>,
        interval: Duration,
        metrics: OfRegistry,
    ) -> Self {
        Self {
            client,
            datacenter,
            interval,
            metrics,
            catalog: None,
            checks: None,
            reading: InFlight::default(),
            permits: Arc::new(Semaphore::new(CONCURRENT)),
            pending: BTreeSet::new(),
            failures: BTreeMap::new(),
            rights: BTreeMap::new(),
            is_synced: false,
            next_sweep: None,
            last_sweep: None,
            last_explained: None,
        }
    }

    /// Sends updates until the receiver is closed.
    pub(super) async fn run(mut self, index: usize, updates: mpsc::Sender<(usize, Update)>) {
        let (answers_out, mut answers) = mpsc::channel(2);
        let (client, datacenter) = (self.client.clone(), self.datacenter.clone());
        let query = |name: &'static str| Query {
            name,
            answers: answers_out.clone(),
            metrics: self.metrics.clone(),
            interval: self.interval,
        };
        let catalog = query("catalog").follow(Answer::Catalog, |at| {
            let (client, datacenter) = (client.clone(), datacenter.clone());
            async move { client.catalog(datacenter.as_deref(), at).await }
        });
        let checks = query("checks").follow(Answer::Checks, |at| {
            let (client, datacenter) = (client.clone(), datacenter.clone());
            async move { client.checks(datacenter.as_deref(), at).await }
        });
        let handling = async {
            loop {
                let sweep_at = self.next_sweep.map(|sweep| sweep.at);
                let update = tokio::select! {
                    answer = answers.recv() => match answer {
                        Some(Answer::Catalog(catalog)) => self.on_catalog(catalog),
                        Some(Answer::Checks(checks)) => self.on_checks(checks),
                        None => return,
                    },
                    (name, answer) = self.reading.next() => self.on_service(name, answer),
                    () = sleep_until(sweep_at.unwrap_or_else(Instant::now)), if sweep_at.is_some() => {
                        self.sweep();
                        Vec::new()
                    }
                };
                for update in update {
                    if updates.send((index, update)).await.is_err() {
                        return;
                    }
                }
            }
        };
        tokio::select! {
            () = handling => {}
            () = catalog => {}
            () = checks => {}
        }
    }

    fn on_catalog(&mut self, mut catalog: Catalog) -> Vec<Update> {
        catalog.remove(SERVERS);
        let known = self.catalog.take();
        let is_first = known.is_none();
        let known = known.unwrap_or_default();
        let mut is_explained = false;
        let mut updates = Vec::new();
        for (name, tags) in &catalog {
            if known.get(name) != Some(tags) {
                is_explained = true;
                self.read(SmolStr::new(name), Duration::ZERO);
            }
        }
        for name in known.into_keys().filter(|name| !catalog.contains_key(name)) {
            is_explained = true;
            let name = SmolStr::from(name);
            self.reading.cancel(&name);
            self.pending.remove(&name);
            self.failures.remove(&name);
            self.rights.remove(&name);
            updates.push(Update::Gone(name));
        }
        self.catalog = Some(catalog);
        if is_first {
            updates.extend(self.synced());
        } else {
            let is_explained = is_explained || self.last_explained.is_some_and(|at| at.elapsed() < UNEXPLAINED);
            self.schedule_sweep(if is_explained { RECONCILE } else { UNEXPLAINED }, RECONCILE);
        }
        updates
    }

    fn on_checks(&mut self, mut checks: Vec<Check>) -> Vec<Update> {
        checks.sort_unstable();
        let Some(known) = self.checks.replace(checks) else {
            // A service that was read before this answer may have changed since; this answer does not show it.
            for name in self.names() {
                self.read(name, Duration::ZERO);
            }
            return Vec::new();
        };
        let checks = self.checks.as_deref().unwrap_or_default();
        let (mut services, mut nodes) = (BTreeSet::new(), BTreeSet::new());
        for check in differences(&known, checks) {
            match &check.service_name {
                name if name.is_empty() => drop(nodes.insert(&check.node)),
                name => drop(services.insert(name.clone())),
            }
        }
        // A check of a node concerns all its instances. Those without checks of their own are not known here.
        if !nodes.is_empty() {
            let of_nodes = checks.iter().filter(|check| nodes.contains(&check.node));
            let of_services = of_nodes.filter(|check| !check.service_name.is_empty());
            services.extend(of_services.map(|check| check.service_name.clone()));
        }
        let has_nodes = !nodes.is_empty();
        let exists = |name: &SmolStr| {
            self.catalog
                .as_ref()
                .is_some_and(|catalog| catalog.contains_key(name.as_str()))
        };
        let services: Vec<SmolStr> = services.into_iter().filter(exists).collect();
        if !services.is_empty() {
            let now = Instant::now();
            self.last_explained = Some(now);
            if let Some(sweep) = &mut self.next_sweep {
                sweep.at = sweep.at.max(now + RECONCILE).min(sweep.deadline);
            }
        }
        if has_nodes {
            self.schedule_sweep(UNEXPLAINED, UNEXPLAINED);
        }
        for name in services {
            self.read(name, Duration::ZERO);
        }
        Vec::new()
    }

    fn on_service(&mut self, name: SmolStr, answer: Result<Indexed<Vec<HealthEntry>>, QueryError>) -> Vec<Update> {
        let rights = self.rights.entry(name.clone()).or_default();
        match answer.and_then(|answer| rights.check(answer)) {
            Ok(answer) => {
                self.pending.remove(&name);
                self.failures.remove(&name);
                let mut updates = vec![Update::Service(name, answer.value)];
                updates.extend(self.synced());
                updates
            }
            Err(error) => {
                self.metrics.failed(error.label(), 1);
                let failures = self.failures.entry(name.clone()).or_default();
                let delay = FIRST_DELAY.saturating_mul(1 << (*failures).min(6)).min(LONGEST_DELAY);
                *failures += 1;
                tracing::warn!(service = %name, %error, retry_in = ?delay, "failed to read a service of Consul");
                self.read(name, delay);
                Vec::new()
            }
        }
    }

    /// Starts reading a service after a delay.
    fn read(&mut self, name: SmolStr, delay: Duration) {
        let (client, datacenter, permits) = (self.client.clone(), self.datacenter.clone(), self.permits.clone());
        let service = name.clone();
        self.pending.insert(name.clone());
        self.reading.insert(name, async move {
            sleep(delay).await;
            let _permit = permits.acquire().await;
            client.service(datacenter.as_deref(), &service).await
        });
    }

    /// Returns the names of all services.
    fn names(&self) -> Vec<SmolStr> {
        self.catalog.iter().flat_map(BTreeMap::keys).map(SmolStr::new).collect()
    }

    /// Reads all services.
    fn sweep(&mut self) {
        self.next_sweep = None;
        self.last_sweep = Some(Instant::now());
        for name in self.names() {
            if !self.pending.contains(&name) {
                self.read(name, Duration::ZERO);
            }
        }
    }

    /// Schedules a complete reading after a delay, which may be postponed up to the longest delay.
    fn schedule_sweep(&mut self, delay: Duration, longest_delay: Duration) {
        let now = Instant::now();
        let earliest = |at: Instant| self.last_sweep.map_or(at, |last| at.max(last + self.interval));
        let next = Sweep {
            at: earliest(now + delay),
            deadline: earliest(now + longest_delay),
        };
        let known = self.next_sweep.unwrap_or(next);
        self.next_sweep = Some(Sweep {
            at: known.at.min(next.at),
            deadline: known.deadline.min(next.deadline),
        });
    }

    /// Returns an update when all services have been read for the first time.
    fn synced(&mut self) -> Option<Update> {
        let is_complete = self.catalog.is_some() && self.pending.is_empty();
        (is_complete && !std::mem::replace(&mut self.is_synced, is_complete)).then_some(Update::Synced)
    }
}

/// Returns the checks that only one of two sorted lists has.
fn differences<'a>(before: &'a [Check], after: &'a [Check]) -> Vec<&'a Check> {
    let (mut old, mut new) = (before.iter().peekable(), after.iter().peekable());
    let mut found = Vec::new();
    loop {
        let order = match (old.peek(), new.peek()) {
            (Some(old), Some(new)) => old.cmp(new),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return found,
        };
        if order == Ordering::Equal {
            old.next();
            new.next();
        } else if order == Ordering::Less {
            found.extend(old.next());
        } else {
            found.extend(new.next());
        }
    }
}

/// A blocking query that is repeated.
struct Query {
    name: &'static str,
    answers: mpsc::Sender<Answer>,
    metrics: OfRegistry,
    interval: Duration,
}

impl Query {
    /// Sends each changed answer. An answer is no proof of a change, and a lower index starts again.
    async fn follow<T: Listing, F>(self, wrap: fn(T) -> Answer, mut ask: impl FnMut(u64) -> F)
    where
        F: Future<Output = Result<Indexed<T>, QueryError>>,
    {
        let mut backoff = Backoff::new(FIRST_DELAY, LONGEST_DELAY);
        let (mut index, mut was_filtered) = (0, false);
        let mut rights = Rights::default();
        let mut tokens = Tokens::new();
        loop {
            match ask(index).await.and_then(|answer| rights.check(answer)) {
                Ok(answer) => {
                    backoff.reset();
                    self.metrics.connected(true);
                    if answer.is_filtered && !was_filtered {
                        tracing::warn!(query = self.name, "Consul's token may not read all services and nodes");
                    }
                    was_filtered = answer.is_filtered;
                    if answer.index > 0 && answer.index < index {
                        // The server lost its state or was replaced: its next answer is complete.
                        index = 0;
                        tokens.take().await;
                        continue;
                    }
                    let is_same = answer.index == index && index > 0;
                    if !is_same && self.answers.send(wrap(answer.value)).await.is_err() {
                        return;
                    }
                    if answer.index == 0 {
                        // The server does not block: poll.
                        index = 0;
                        sleep(self.interval).await;
                        continue;
                    }
                    index = answer.index;
                    tokens.take().await;
                }
                Err(error) => {
                    self.metrics.failed(error.label(), 1);
                    self.metrics.connected(false);
                    let retry_in = backoff.next();
                    tracing::warn!(query = self.name, %error, ?retry_in, "Consul query failed, keeping the last state");
                    // After an outage, the state is read again instead of waiting for a change.
                    index = 0;
                    sleep(retry_in).await;
                }
            }
        }
    }
}

/// A token bucket of two.
struct Tokens {
    next: Instant,
}

impl Tokens {
    fn new() -> Self {
        Self { next: Instant::now() }
    }

    async fn take(&mut self) {
        let now = Instant::now();
        self.next = self.next.max(now) + MIN_INTERVAL;
        // One more token may be taken ahead of its time.
        sleep_until(self.next - 2 * MIN_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::{super::api::Instance, *};
    use crate::{
        fetch::{Dialer, Endpoint, HttpClient},
        ingest::registry_metrics::RegistryMetrics,
    };

    fn watcher() -> Watcher {
        let dialer = Dialer::new(Endpoint::Host("consul".to_owned(), 8500), None).expect("a host");
        let client = ConsulClient::new(HttpClient::new(dialer, HeaderMap::new(), 0), &[]);
        let metrics = RegistryMetrics::new(&prometheus::Registry::new()).expect("new names");
        Watcher::new(client, None, Duration::ZERO, metrics.of("Consul"))
    }

    /// The catalog of one service.
    fn catalog() -> Catalog {
        [("web".to_owned(), Vec::new())].into()
    }

    /// The answer about a service with instances on these ports.
    fn answer(is_filtered: bool, ports: &[u32]) -> Result<Indexed<Vec<HealthEntry>>, QueryError> {
        let instance = |port: &u32| HealthEntry {
            service: Instance {
                port: *port,
                ..Instance::default()
            },
            ..HealthEntry::default()
        };
        Ok(Indexed {
            value: ports.iter().map(instance).collect(),
            index: 1,
            is_filtered,
        })
    }

    fn check(node: &str, id: &str, status: &str) -> Check {
        Check {
            node: node.into(),
            check_id: id.into(),
            service_name: id.into(),
            status: status.into(),
        }
    }

    #[test]
    fn differences_are_new_changed_and_removed_checks() {
        let before = [
            check("a", "1", "passing"),
            check("a", "2", "passing"),
            check("b", "1", "passing"),
        ];
        let after = [
            check("a", "2", "critical"),
            check("b", "1", "passing"),
            check("c", "1", "passing"),
        ];
        let found: Vec<(&str, &str, &str)> = differences(&before, &after)
            .into_iter()
            .map(|check| (check.node.as_str(), check.check_id.as_str(), check.status.as_str()))
            .collect();
        let expected = [
            ("a", "1", "passing"),
            ("a", "2", "critical"),
            ("a", "2", "passing"),
            ("c", "1", "passing"),
        ];
        assert_eq!(found, expected);
        assert!(differences(&after, &after).is_empty());
    }

    #[test]
    fn complete_readings_are_postponed_up_to_a_deadline() {
        let mut watcher = watcher();
        let sweep = |watcher: &Watcher| watcher.next_sweep.expect("a scheduled reading");
        watcher.on_catalog(catalog());
        watcher.on_checks(vec![check("a", "web", "passing")]);
        watcher.on_catalog(catalog());
        let unexplained = sweep(&watcher);
        assert!(unexplained.at < unexplained.deadline);
        for status in ["critical", "passing"] {
            watcher.on_checks(vec![check("a", "web", status)]);
            assert_eq!(sweep(&watcher).at, unexplained.deadline, "{status}");
        }
    }

    #[test]
    fn complete_readings_because_of_nodes_are_not_postponed() {
        let mut watcher = watcher();
        let of_node = |status: &str| Check {
            service_name: SmolStr::default(),
            ..check("a", "serfHealth", status)
        };
        watcher.on_catalog(catalog());
        watcher.on_checks(vec![check("a", "web", "passing"), of_node("passing")]);
        watcher.on_checks(vec![check("a", "web", "passing"), of_node("critical")]);
        let at = |watcher: &Watcher| watcher.next_sweep.expect("a scheduled reading").at;
        let scheduled = at(&watcher);
        watcher.on_checks(vec![check("a", "web", "critical"), of_node("critical")]);
        watcher.on_checks(vec![check("a", "web", "critical"), of_node("passing")]);
        assert_eq!(at(&watcher), scheduled);
    }

    #[test]
    fn services_that_were_read_before_the_first_checks_are_read_again() {
        let mut watcher = watcher();
        watcher.on_catalog(catalog());
        watcher.on_service("web".into(), answer(false, &[]));
        assert!(watcher.pending.is_empty());
        watcher.on_checks(Vec::new());
        assert!(watcher.pending.contains("web"));
    }

    #[test]
    fn answers_after_a_loss_of_rights_are_failures() {
        let mut full = watcher();
        full.on_catalog(catalog());
        let updates = full.on_service("web".into(), answer(false, &[1, 2]));
        assert_eq!(updates.len(), 2, "the service, and synced");
        for ports in [&[][..], &[1]] {
            assert!(full.on_service("web".into(), answer(true, ports)).is_empty());
            assert!(full.pending.contains("web"), "it is read again");
        }
        assert_eq!(full.on_service("web".into(), answer(false, &[1])).len(), 1);
        // A new instance that the token may not read. From then on, answers are as complete as they can be.
        assert_eq!(full.on_service("web".into(), answer(true, &[1, 3])).len(), 1);
        assert_eq!(full.on_service("web".into(), answer(true, &[3])).len(), 1);
        // A token that had limited rights from the start.
        let mut limited = watcher();
        limited.on_catalog(catalog());
        for ports in [&[1, 2][..], &[1], &[]] {
            assert!(!limited.on_service("web".into(), answer(true, ports)).is_empty());
        }
    }
}
