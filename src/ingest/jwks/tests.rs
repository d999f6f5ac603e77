//! The schedule, against an outside world of a table and a clock that trials set.

use std::sync::Mutex;

use super::*;
use crate::{
    api::Row,
    fetch::FetchError,
    ingest::fixture::{AnswerTable, settle},
    model::change::Batch,
};

const CLUSTER: ClusterId = ClusterId::new_static("c");
const REFRESH: Duration = Duration::from_mins(20);

/// Answers by URL: the id of the only key. None: the server hangs.
type Servers = AnswerTable<String, Option<Result<&'static str, FetchFailure>>>;

impl Servers {
    fn set(&self, url: &'static str, kid: &'static str) {
        self.insert(url.to_owned(), Some(Ok(kid)));
    }

    fn fail(&self, url: &'static str) {
        let failure = FetchFailure::Fetch(FetchError::Status(500));
        self.insert(url.to_owned(), Some(Err(failure)));
    }

    fn hang(&self, url: &'static str) {
        self.insert(url.to_owned(), None);
    }
}

impl Fetch for Servers {
    fn fetch(
        self: Arc<Self>,
        source: KeySource,
        _timeout: Duration,
        wait: Duration,
        _shares: SourceShares,
    ) -> BoxFuture<'static, Result<KeySet, FetchFailure>> {
        let answer = self.answer(source.url(), wait);
        Box::pin(async move {
            match answer.await {
                None => std::future::pending().await,
                Some(answer) => answer.map(|kid| {
                    KeySet::parse(format!(r#"{{"keys":[{{"kty":"oct","k":"AAAA","kid":"{kid}"}}]}}"#).as_bytes())
                        .unwrap()
                }),
            }
        })
    }
}

struct Fixture {
    servers: Arc<Servers>,
    dependencies: watch::Sender<Option<Arc<ExternalDependencies>>>,
    changes: mpsc::Receiver<Batch>,
    reports: KeyReports,
    found: Arc<Mutex<Vec<String>>>,
}

impl Fixture {
    fn new() -> Self {
        let (dependencies, dependencies_in) = watch::channel(None);
        let (changes_out, changes) = mpsc::channel(8);
        let servers = Arc::new(Servers::default());
        let found = Arc::new(Mutex::new(Vec::new()));
        let telling = found.clone();
        let report: Report =
            Arc::new(move |diagnostic: &Diagnostic| telling.lock().unwrap().push(diagnostic.to_string()));
        let resolver = Resolver::new(CLUSTER, servers.clone(), REFRESH, changes_out, report);
        let reports = KeyReports::new(resolver.reports.subscribe());
        crate::task::Tasks::default().spawn("jwks", resolver.run(dependencies_in));
        Self {
            servers,
            dependencies,
            changes,
            reports,
            found,
        }
    }

    fn want(&self, urls: &[&'static str]) -> ExternalDependencies {
        self.want_by(&["policy"], urls)
    }

    fn want_by(&self, policies: &[&'static str], urls: &[&'static str]) -> ExternalDependencies {
        let policies = policies.iter().map(|name| ObjectKey::new(&CLUSTER, "ns", *name));
        let required = RequiredKeys {
            timeout: Duration::from_secs(5),
            by: policies.collect(),
        };
        let keys = urls
            .iter()
            .map(|url| (KeySource::Keys(SmolStr::new_static(url)), required.clone()));
        let dependencies = ExternalDependencies {
            keys: keys.collect(),
            ..ExternalDependencies::default()
        };
        self.dependencies.send_replace(Some(Arc::new(dependencies.clone())));
        dependencies
    }

    /// Lets time pass, second by second.
    async fn sleep(&self, seconds: u64) {
        self.servers.sleep(seconds).await;
    }

    /// The next change in words, and the seconds until it came.
    async fn next(&mut self) -> (String, u64) {
        let (batch, waited) = self.servers.next(&mut self.changes).await;
        let words = batch.iter().map(|change| match change {
            Change::Upsert(Row::FetchedKeys(row)) => {
                let keys = KeySet::parse(row.keys.as_bytes()).unwrap();
                format!("{} {}", row.key.name, keys.ids().collect::<String>())
            }
            Change::Remove(kind, key) => format!("{} -{}", kind.name(), key.name),
            other => panic!("unexpected {other:?}"),
        });
        (words.collect::<Vec<_>>().join(", "), waited)
    }
}

#[tokio::test]
async fn keys_are_refreshed_and_sent_only_if_changed() {
    let mut fixture = Fixture::new();
    fixture.servers.set("http://a", "1");
    fixture.want(&["http://a"]);
    assert_eq!(fixture.next().await, ("http://a 1".into(), 0));
    fixture.sleep(2 * REFRESH.as_secs()).await;
    assert_eq!(fixture.servers.asked(), 3);
    assert!(fixture.changes.is_empty());
    fixture.servers.set("http://a", "2");
    assert_eq!(fixture.next().await, ("http://a 2".into(), REFRESH.as_secs()));
}

#[test]
fn keys_take_memory_of_a_namespace_that_requires_them() {
    let mut shares = Shares::default();
    let required = RequiredKeys {
        by: [ObjectKey::new(&CLUSTER, "ns", "policy")].into(),
        ..RequiredKeys::default()
    };
    let set = |kid: &str, eighths: usize| {
        let kid = kid.repeat(eighths << 17);
        KeySet::parse(format!(r#"{{"keys":[{{"kty":"oct","k":"AAAA","kid":"{kid}"}}]}}"#).as_bytes()).unwrap()
    };
    let mut state = || KeyState::new(required.clone(), shares.of(&required.by));
    let (mut first, mut second) = (state(), state());
    let others = first.shares.subscribe().memory((shares::KEYS_KIB - 1024) * 1024);
    assert!(others.is_some(), "1 MiB is left");
    assert!(first.succeed(set("a", 5)).is_ok());
    assert!(second.succeed(set("b", 4)).is_err());
    assert!(
        first.succeed(set("c", 7)).is_ok(),
        "they take the place of their predecessors"
    );
    assert!(first.succeed(set("d", 9)).is_err());
    assert!(first.published == Some(set("c", 7)), "the last keys stay");
    assert!(second.succeed(set("b", 2)).is_err(), "the last keys keep their memory");
    assert!(first.succeed(set("c", 7)).is_ok(), "the same keys need no more memory");
    drop(first);
    assert!(second.succeed(set("b", 4)).is_ok());
}

#[test]
fn published_keys_keep_the_memory_of_a_namespace_that_requires_them_no_longer() {
    let mut shares = Shares::default();
    let by = |namespace: &str| BTreeSet::from([ObjectKey::new(&CLUSTER, namespace, "policy")]);
    let set = |kid: &str| {
        KeySet::parse(format!(r#"{{"keys":[{{"kty":"oct","k":"AAAA","kid":"{kid}"}}]}}"#).as_bytes()).unwrap()
    };
    let mut state = KeyState::new(RequiredKeys::default(), shares.of(&by("a")));
    assert!(state.succeed(set("first")).is_ok());
    shares.update(&state.shares, &by("b"));
    let all = state.shares.subscribe().memory(shares::KEYS_KIB * 1024);
    assert!(all.is_some() && state.succeed(set("second")).is_err());
    assert!(state.memory.is_some());
}

#[test]
fn servers_are_not_asked_without_a_pause() {
    let report: Report = Arc::new(|_: &Diagnostic| {});
    let changes = mpsc::channel(1).0;
    let resolver = Resolver::new(CLUSTER, Arc::new(Servers::default()), Duration::ZERO, changes, report);
    assert_eq!(resolver.refresh, FIRST_RETRY);
}

#[tokio::test]
async fn the_last_valid_keys_stay_while_their_server_fails() {
    let mut fixture = Fixture::new();
    fixture.servers.set("http://a", "1");
    fixture.want(&["http://a"]);
    fixture.next().await;
    fixture.servers.fail("http://a");
    fixture.sleep(REFRESH.as_secs() + 3600).await;
    assert!(fixture.changes.is_empty(), "nothing is taken away");
    let found = fixture.found.lock().unwrap().clone();
    assert_eq!(found.len(), 1, "reported once while it lasts: {found:?}");
    assert!(
        found[0].contains("ns/policy") && found[0].contains("http://a"),
        "{found:?}"
    );
    assert!(found[0].contains("the last keys stay"), "{found:?}");
    let report = &fixture.reports.all()[0];
    assert_eq!(report.key_ids.as_deref(), Some(&["1".into()][..]));
    assert_eq!(report.required_by, ["ns/policy"]);
    assert_eq!(report.last_error, "server returned status 500");
    fixture.servers.set("http://a", "2");
    let (words, waited) = fixture.next().await;
    assert_eq!(words, "http://a 2");
    assert!(waited <= 600, "{waited}");
    assert_eq!(fixture.reports.all()[0].last_error, "");
}

#[tokio::test]
async fn a_further_policy_is_warned_of_a_failing_issuer_at_once() {
    let fixture = Fixture::new();
    fixture.servers.fail("http://a");
    fixture.want(&["http://a"]);
    fixture.sleep(0).await;
    fixture.want_by(&["other", "policy"], &["http://a"]);
    fixture.sleep(0).await;
    assert_eq!(fixture.servers.asked(), 1);
    let found = fixture.found.lock().unwrap().clone();
    assert!(found.len() == 2 && found[1].contains("ns/other"), "{found:?}");
    assert_eq!(fixture.reports.all()[0].required_by, ["ns/other", "ns/policy"]);
    fixture.want_by(&["other"], &["http://a"]);
    fixture.sleep(0).await;
    assert_eq!(fixture.reports.all()[0].required_by, ["ns/other"]);
}

#[tokio::test]
async fn without_keys_fetches_are_retried_in_seconds() {
    let mut fixture = Fixture::new();
    fixture.servers.fail("http://a");
    fixture.want(&["http://a"]);
    fixture.sleep(0).await;
    assert_eq!(fixture.servers.asked(), 1);
    fixture.sleep(7).await;
    assert_eq!(fixture.servers.asked(), 4, "after 1, 2 and 4 seconds");
    fixture.sleep(3600).await;
    let found = fixture.found.lock().unwrap().clone();
    assert!(found[0].contains("all tokens of this issuer are refused"), "{found:?}");
    fixture.servers.set("http://a", "1");
    let (words, waited) = fixture.next().await;
    assert_eq!(words, "http://a 1");
    assert!(waited <= 60, "{waited}");
}

#[tokio::test]
async fn a_failing_issuer_does_not_delay_others() {
    let mut fixture = Fixture::new();
    fixture.servers.hang("http://hangs");
    fixture.servers.fail("http://fails");
    fixture.servers.set("http://good", "1");
    fixture.want(&["http://fails", "http://good", "http://hangs"]);
    assert_eq!(fixture.next().await, ("http://good 1".into(), 0));
    fixture.servers.set("http://good", "2");
    assert_eq!(fixture.next().await, ("http://good 2".into(), REFRESH.as_secs()));
}

#[tokio::test]
async fn expired_keys_are_dropped() {
    let mut fixture = Fixture::new();
    fixture.servers.set("http://a", "1");
    fixture.want(&["http://a"]);
    fixture.next().await;
    fixture.servers.fail("http://a");
    // The clock advances in large steps, because a week has many seconds.
    let step = LONGEST_RETRY.as_secs();
    let mut waited = 0;
    while fixture.changes.is_empty() {
        fixture.servers.advance(step);
        settle().await;
        waited += step;
        assert!(waited < 2 * OLDEST.as_secs(), "nothing comes");
    }
    assert_eq!(fixture.next().await.0, "FetchedKeys -http://a");
    let week = OLDEST.as_secs();
    assert!((week - 3600..week + 7200).contains(&waited), "{waited}");
    fixture.servers.set("http://a", "1");
    assert_eq!(fixture.next().await.0, "http://a 1", "reported again");
}

#[tokio::test]
async fn sources_are_added_and_removed() {
    let mut fixture = Fixture::new();
    fixture.servers.set("http://a", "1");
    fixture.servers.set("http://b", "2");
    fixture.want(&["http://a"]);
    assert_eq!(fixture.next().await.0, "http://a 1");
    fixture.want(&["http://b"]);
    assert_eq!(fixture.next().await.0, "FetchedKeys -http://a");
    assert_eq!(fixture.next().await.0, "http://b 2");
    let asked = fixture.servers.asked();
    fixture.sleep(REFRESH.as_secs()).await;
    assert_eq!(fixture.servers.asked(), asked + 1, "only b");
    assert_eq!(fixture.reports.all().len(), 1);
    fixture.want(&["http://a", "http://b"]);
    assert_eq!(fixture.next().await.0, "http://a 1");
}

#[tokio::test]
async fn the_first_answers_can_be_waited_for() {
    let mut fixture = Fixture::new();
    fixture.servers.set("http://a", "1");
    fixture.servers.fail("http://b");
    let dependencies = fixture.want(&["http://a", "http://b"]);
    fixture.reports.answered(&dependencies, Duration::from_secs(10)).await;
    assert_eq!(fixture.changes.try_recv().expect("it was sent before").len(), 1);
}
