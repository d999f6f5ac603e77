//! Queries to replicas that are played by channels.

use std::sync::Mutex;

use tokio::runtime::Handle;
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::{
    distribution::{
        DistributionSources,
        report::{Counts, ObjectState},
    },
    environment,
    model::{Installation, fixture},
    push::{delivery::Tracker, push_loop::Flushes},
    task::Tasks,
};

const OWN: &str = "own";
/// Never reached when a test passes.
const LONG: Duration = Duration::from_mins(1);

/// Answers to one query: what to send, in order, and whether the stream then stays open.
type Script = (Vec<Result<Bytes, PeerError>>, bool);

/// Replicas whose answers follow a script by name. One without a script cannot be reached.
struct Played {
    replicas: watch::Receiver<Replicas>,
    scripts: Mutex<BTreeMap<SmolStr, Vec<Script>>>,
    queries: Mutex<Vec<(SmolStr, PeerQuery)>>,
    /// Keeps streams open.
    open: Mutex<Vec<mpsc::Sender<Result<Bytes, PeerError>>>>,
}

impl Peers for Played {
    fn replicas(&self) -> watch::Receiver<Replicas> {
        self.replicas.clone()
    }

    fn ask(&self, replica: &Replica, query: String) -> BoxFuture<'static, Result<Reports, PeerError>> {
        let query = serde_json::from_str(&query).expect("a query");
        self.queries.lock().unwrap().push((replica.name.clone(), query));
        let mut scripts = self.scripts.lock().unwrap();
        let script = scripts.get_mut(&replica.name).filter(|scripts| !scripts.is_empty());
        let Some((answers, stays)) = script.map(|scripts| scripts.remove(0)) else {
            let error = PeerError::Closed("connection refused".to_owned());
            return std::future::ready(Err(error)).boxed();
        };
        let (sender, receiver) = mpsc::channel(16);
        for answer in answers {
            sender.try_send(answer).expect("a short script");
        }
        if stays {
            self.open.lock().unwrap().push(sender);
        }
        std::future::ready(Ok(ReceiverStream::new(receiver).boxed())).boxed()
    }
}

fn replica(name: &str, serves: bool) -> Replica {
    Replica {
        name: name.into(),
        host: format!("host-{name}").into(),
        port: 15012,
        is_ready: serves,
        serves,
    }
}

fn set(names: &[&str]) -> Replicas {
    Some(Arc::new(names.iter().map(|name| replica(name, true)).collect()))
}

struct Harness {
    distribution: Arc<Distribution>,
    played: Arc<Played>,
    replicas: watch::Sender<Replicas>,
    _mesh: watch::Sender<Arc<crate::model::MeshSnapshot>>,
    tasks: Tasks,
}

impl Harness {
    fn new(replicas: Replicas, scripts: Vec<(&str, Vec<Script>)>) -> Self {
        let (sender, receiver) = watch::channel(replicas);
        let scripts = scripts.into_iter().map(|(name, script)| (name.into(), script));
        let played = Arc::new(Played {
            replicas: receiver,
            scripts: Mutex::new(scripts.collect()),
            queries: Mutex::default(),
            open: Mutex::default(),
        });
        let world = fixture::folder_world(Installation::default(), &[("mesh.yaml", "")]);
        let (mesh_sender, mesh) = watch::channel(world.snapshot());
        let tasks = Tasks::default();
        let inputs = DistributionSources {
            mesh,
            inspect: mpsc::channel(1).0,
            flushes: Flushes::channel().0,
            tracker: Tracker::new(environment::now),
            connections: Arc::default(),
            ingest_status: Arc::default(),
            replica: OwnReplica {
                name: "istiod-0".into(),
                id: OWN.into(),
            },
            peers: Some(played.clone()),
            runtime: Handle::current(),
        };
        Self {
            distribution: Distribution::start(&tasks, inputs).0,
            played,
            replicas: sender,
            _mesh: mesh_sender,
            tasks,
        }
    }

    /// Returns the status of the mesh: the number of proxies, and the names of replicas with true if they answered.
    async fn overview(&self) -> (usize, Vec<(String, bool)>) {
        let overview = self.distribution.overview(None, Scope::ControlPlane).await;
        (overview.counts.proxies, answered(&overview.replicas))
    }
}

fn answered(replicas: &[ReplicaReport]) -> Vec<(String, bool)> {
    let replicas = replicas.iter();
    replicas
        .map(|replica| (replica.name.clone(), replica.answered))
        .collect()
}

fn expected(replicas: &[(&str, bool)]) -> Vec<(String, bool)> {
    let replicas = replicas.iter();
    replicas
        .map(|(name, answered)| ((*name).to_owned(), *answered))
        .collect()
}

fn json(value: &impl Serialize) -> Result<Bytes, PeerError> {
    Ok(serde_json::to_vec(value).expect("JSON").into())
}

fn of(id: &str) -> Vec<ReplicaReport> {
    vec![ReplicaReport {
        name: format!("istiod-{id}"),
        id: id.to_owned(),
        answered: true,
        ..ReplicaReport::default()
    }]
}

fn proxies(id: &str, proxies: usize) -> Result<Bytes, PeerError> {
    json(&Overview {
        counts: Counts {
            proxies,
            ..Counts::default()
        },
        replicas: of(id),
        ..Overview::default()
    })
}

fn object(id: &str, state: ObjectState) -> Result<Bytes, PeerError> {
    let report = ObjectReport {
        state,
        replicas: of(id),
        ..ObjectReport::default()
    };
    json(&ObjectReport {
        is_final: report.is_settled(),
        ..report
    })
}

/// The end of a connection before the last report.
fn cut() -> Result<Bytes, PeerError> {
    Err(PeerError::Failed("Unavailable: the connection is closing".to_owned()))
}

fn object_query() -> ObjectQuery {
    ObjectQuery {
        kinds: Kind::named("vs"),
        namespace: "shop".to_owned(),
        name: "reviews".to_owned(),
        resource_version: None,
        proxy: String::new(),
        visible: None,
    }
}

/// Follows the object, and returns the receiver of its reports.
fn follow(harness: &Harness, time: Duration) -> mpsc::Receiver<ObjectReport> {
    let (sender, reports) = mpsc::channel(1);
    let distribution = harness.distribution.clone();
    harness.tasks.spawn("test", async move {
        distribution
            .follow(&object_query(), time, Scope::ControlPlane, sender)
            .await;
    });
    reports
}

#[tokio::test]
async fn all_replicas_answer() {
    let scripts = vec![
        ("istiod-1", vec![(vec![proxies("1", 3)], false)]),
        ("istiod-2", vec![(vec![proxies("2", 4)], false)]),
    ];
    let harness = Harness::new(set(&["istiod-0", "istiod-1", "istiod-2"]), scripts);
    let names = [("istiod-0", true), ("istiod-1", true), ("istiod-2", true)];
    assert_eq!(harness.overview().await, (7, expected(&names)));
    // Now they cannot be reached any more: their proxies are unknown.
    let names = [("istiod-0", true), ("istiod-1", false), ("istiod-2", false)];
    assert_eq!(harness.overview().await, (0, expected(&names)));
    let queries = harness.played.queries.lock().unwrap().clone();
    assert_eq!(queries.len(), 4);
    let once = PeerQuery::about_mesh(None, Some(Duration::ZERO));
    assert!(queries.iter().all(|(_, query)| *query == once), "{queries:?}");
    let alone = harness.distribution.overview(None, Scope::Replica).await;
    assert_eq!(answered(&alone.replicas), expected(&[("istiod-0", true)]));
}

#[tokio::test]
async fn a_replica_recognises_itself() {
    // Without the name of a pod.
    let own = || (vec![proxies(OWN, 9)], false);
    let harness = Harness::new(set(&[""]), vec![("", vec![own(), own()])]);
    let alone = || (0, expected(&[("istiod-0", true)]));
    assert_eq!(harness.overview().await, alone());
    assert_eq!(harness.overview().await, alone());
    let queries = harness.played.queries.lock().unwrap().len();
    assert_eq!(queries, 1, "an address is recognised once");
}

#[tokio::test]
async fn replicas_that_do_not_serve_may_be_closed() {
    let replicas = [replica("istiod-1", false), replica("istiod-2", false)];
    let scripts = vec![("istiod-1", vec![(vec![proxies("1", 1)], false)])];
    let harness = Harness::new(Some(Arc::new(replicas.into())), scripts);
    let names = [("istiod-0", true), ("istiod-1", true)];
    assert_eq!(harness.overview().await, (1, expected(&names)));
}

#[tokio::test]
async fn an_answer_is_final_when_all_are() {
    let harness = Harness::new(
        set(&["istiod-1"]),
        vec![(
            "istiod-1",
            vec![
                // The connection ends, and is made again.
                (vec![object("1", ObjectState::Pending), cut()], false),
                (vec![object("1", ObjectState::Unknown)], true),
            ],
        )],
    );
    let mut reports = follow(&harness, LONG);
    let mut states = Vec::new();
    while let Some(report) = reports.recv().await {
        states.push((report.state, report.is_final));
    }
    let last = states.pop();
    assert_eq!(last, Some((ObjectState::Unknown, true)));
    assert!(states.iter().all(|(_, is_final)| !is_final), "{states:?}");
    assert!(states.contains(&(ObjectState::Pending, false)), "{states:?}");
}

#[tokio::test]
async fn only_whole_reports_are_complete() {
    let pending = || object("1", ObjectState::Pending);
    for (script, queries) in [
        (vec![(vec![pending()], false)], 1),
        (vec![(vec![pending(), cut()], false), (vec![pending()], false)], 2),
    ] {
        let harness = Harness::new(set(&["istiod-1"]), vec![("istiod-1", script)]);
        let mut reports = follow(&harness, Duration::from_millis(500));
        let mut last = None;
        while let Some(report) = reports.recv().await {
            last = Some(report);
        }
        let report = last.expect("a report");
        assert_eq!((report.state, report.timed_out), (ObjectState::Pending, true));
        let asked = harness.played.queries.lock().unwrap().len();
        assert_eq!(asked, queries, "a replica is asked again only after an error");
    }
    // The answer to a query for one report counts if it is whole.
    let single = vec![("istiod-1", vec![(vec![proxies("1", 3), cut()], false)])];
    let harness = Harness::new(set(&["istiod-1"]), single);
    let mut fan_out = FanOut::<Overview>::new(
        &harness.distribution,
        PeerQuery::about_mesh(None, Some(Duration::ZERO)),
        Scope::ControlPlane,
        |_| std::future::ready(()).boxed(),
    );
    while !fan_out.has_ended() {
        fan_out.next().await;
    }
    let answers = fan_out.answers.values();
    let failed = answers.filter(|answer| matches!(answer, Answer::Failed(_)));
    assert_eq!(failed.count(), 1);
}

#[tokio::test]
async fn an_unreachable_replica_is_waited_for_until_it_is_gone() {
    let harness = Harness::new(set(&["istiod-1"]), Vec::new());
    let mut reports = follow(&harness, LONG);
    while let Some(report) = reports.recv().await {
        assert_eq!((report.state, report.is_final), (ObjectState::Incomplete, false));
        if report.replicas.iter().any(|replica| replica.error.contains("refused")) {
            break;
        }
    }
    harness.replicas.send_replace(set(&[]));
    let report = reports.recv().await.expect("a report");
    assert_eq!((report.state, report.is_final), (ObjectState::Unknown, true));
    assert_eq!(answered(&report.replicas), expected(&[("istiod-0", true)]));
}

#[tokio::test]
async fn a_missing_replica_is_reported_when_the_time_is_over() {
    let harness = Harness::new(set(&["istiod-1"]), Vec::new());
    let mut reports = follow(&harness, Duration::from_millis(50));
    let mut last = None;
    while let Some(report) = reports.recv().await {
        last = Some(report);
    }
    let report = last.expect("a report");
    assert_eq!((report.state, report.timed_out), (ObjectState::Incomplete, true));
}

#[tokio::test]
async fn replicas_that_are_not_known_are_unknown() {
    let harness = Harness::new(None, Vec::new());
    let mut reports = follow(&harness, LONG);
    let report = reports.recv().await.expect("a report");
    assert_eq!((report.state, report.is_final), (ObjectState::Incomplete, false));
    assert_eq!(report.replicas.len(), 2);
    harness.replicas.send_replace(set(&["istiod-0"]));
    let report = reports.recv().await.expect("a report");
    assert_eq!((report.state, report.is_final), (ObjectState::Unknown, true));
}

#[tokio::test]
async fn a_debounced_query_is_debounced_in_all_replicas() {
    let scripts = vec![("istiod-1", vec![(vec![object("1", ObjectState::Unknown)], true)])];
    let harness = Harness::new(set(&["istiod-1"]), scripts);
    let (sender, mut reports) = mpsc::channel(1);
    let query = object_query();
    let following = harness
        .distribution
        .follow_debounced(&query, LONG, Scope::ControlPlane, sender);
    tokio::join!(following, async { while reports.recv().await.is_some() {} });
    let queries = harness.played.queries.lock().unwrap().clone();
    let timings: Vec<PushTiming> = queries.iter().map(|(_, query)| query.timing()).collect();
    assert_eq!(timings, [PushTiming::Debounced]);
}

#[tokio::test]
async fn queries_of_other_replicas_are_answered_alone() {
    let harness = Harness::new(set(&["istiod-1"]), Vec::new());
    let (sender, mut answers) = mpsc::channel(1);
    let query = serde_json::to_string(&PeerQuery::about(&object_query(), Duration::ZERO, PushTiming::AtOnce)).unwrap();
    let answering = harness
        .distribution
        .clone()
        .answer(&query, sender)
        .expect("a valid query");
    harness.tasks.spawn("test", answering);
    let report: ObjectReport = serde_json::from_slice(&answers.recv().await.expect("an answer")).unwrap();
    assert_eq!((report.state, report.is_final), (ObjectState::Unknown, true));
    assert_eq!(answered(&report.replicas), expected(&[("istiod-0", true)]));
    assert!(answers.recv().await.is_none(), "more than one report");
    let queries = harness.played.queries.lock().unwrap().len();
    assert_eq!(queries, 0);
    let malformed = r#"{"object": {"kinds": ["nothing.example.com"]}}"#;
    let (sender, _) = mpsc::channel(1);
    assert!(harness.distribution.clone().answer(malformed, sender).is_err());
}

/// Waits for the next text of a view, and returns the number of proxies in it.
async fn next(texts: &mut watch::Receiver<Option<Arc<str>>>) -> (Arc<str>, usize) {
    let text = texts.wait_for(Option::is_some).await.expect("a text").clone();
    let text = text.expect("a text");
    texts.mark_unchanged();
    let overview: Overview = serde_json::from_str(&text).expect("an overview");
    (text, overview.counts.proxies)
}

/// Waits for a text about this number of proxies.
async fn until_proxies(texts: &mut watch::Receiver<Option<Arc<str>>>, expected: usize) -> Arc<str> {
    loop {
        let (text, found) = next(texts).await;
        if found == expected {
            return text;
        }
        texts.changed().await.expect("another text");
    }
}

#[tokio::test]
async fn clients_share_the_texts_of_a_view() {
    let script = || (vec![proxies("1", 3)], true);
    let scripts = vec![("istiod-1", vec![script(), script(), script()])];
    let harness = Harness::new(set(&["istiod-1"]), scripts);
    let follow = |visible: Option<&str>| {
        let visible = visible.map(Namespace::new);
        harness.distribution.follow_mesh(visible, Scope::ControlPlane)
    };
    let queries = || harness.played.queries.lock().unwrap().len();
    let (mut first, mut second) = (follow(None), follow(None));
    let text = until_proxies(&mut first, 3).await;
    assert!(Arc::ptr_eq(&text, &until_proxies(&mut second, 3).await));
    assert_eq!(queries(), 1);
    until_proxies(&mut follow(Some("shop")), 3).await;
    assert_eq!(queries(), 2, "another view");
    // One that comes later sees the last text at once.
    let mut third = follow(None);
    assert!(Arc::ptr_eq(&text, &next(&mut third).await.0));
    assert_eq!(queries(), 2);

    let open = harness.played.open.lock().unwrap()[0].clone();
    open.send(proxies("1", 4)).await.expect("an open stream");
    first.changed().await.expect("another text");
    assert_eq!(next(&mut first).await.1, 4);

    // Without clients, nothing is asked; a new client starts anew.
    drop((first, second, third));
    open.closed().await;
    until_proxies(&mut follow(None), 3).await;
    assert_eq!(queries(), 3);
}

#[tokio::test]
async fn texts_end_at_shutdown() {
    let harness = Harness::new(set(&[]), Vec::new());
    let mut texts = harness.distribution.follow_mesh(None, Scope::ControlPlane);
    next(&mut texts).await;
    assert!(harness.tasks.end(LONG).await);
    while texts.changed().await.is_ok() {}
}
