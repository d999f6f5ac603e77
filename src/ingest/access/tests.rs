use super::*;
use crate::{
    api::Row,
    ingest::fixture::{AnswerTable, settle},
    model::change::Batch,
};

const CONFIG: ClusterId = ClusterId::new_static("config");

type Answer = Result<Access, ReviewError>;
type Table = AnswerTable<Subject, Answer>;

impl Review for Table {
    fn review(self: Arc<Self>, subject: Subject, wait: Duration) -> BoxFuture<'static, Answer> {
        self.answer(subject, wait)
    }
}

struct Fixture {
    table: Arc<Table>,
    subjects: watch::Sender<OrdSet<Subject>>,
    known: watch::Sender<u64>,
    changes: mpsc::Receiver<Batch>,
}

fn subject(account: &str) -> Subject {
    Subject {
        cluster: "c1".into(),
        namespace: "shop".into(),
        service_account: account.into(),
    }
}

fn denied(reason: &'static str) -> Answer {
    Ok(Access::Denied(reason.into()))
}

fn failed() -> Answer {
    Err(ReviewError::Failed("away".into()))
}

impl Fixture {
    fn new() -> Self {
        let (subjects, subjects_in) = watch::channel(OrdSet::new());
        let (known, known_in) = watch::channel(0);
        let (changes_out, changes) = mpsc::channel(8);
        let table = Arc::new(Table::default());
        let counts = Counts::new(&Registry::new()).unwrap();
        let reviewer = Reviewer::new(CONFIG, table.clone(), changes_out, counts);
        crate::task::Tasks::default().spawn("reviews", reviewer.run(subjects_in, known_in));
        Self {
            table,
            subjects,
            known,
            changes,
        }
    }

    fn set(&self, account: &str, answer: Answer) {
        self.table.insert(subject(account), answer);
    }

    fn read(&self, accounts: &[&str]) {
        self.subjects
            .send_replace(accounts.iter().map(|account| subject(account)).collect());
    }

    async fn sleep(&self, seconds: u64) {
        self.table.sleep(seconds).await;
    }

    /// The changes that are there now, in words.
    async fn summary(&mut self) -> Vec<String> {
        settle().await;
        let mut summary = Vec::new();
        while let Ok(batch) = self.changes.try_recv() {
            summary.extend(batch.iter().map(|change| match change {
                Change::Upsert(Row::AccessReview(review)) => format!("{} {:?}", review.key.name, review.access),
                Change::Remove(kind, key) => format!("{} -{}", kind.name(), key.name),
                other => panic!("unexpected {other:?}"),
            }));
        }
        summary
    }
}

#[tokio::test]
async fn r10_a_decision_is_reported_once_and_renewed() {
    let mut fixture = Fixture::new();
    fixture.set("gw", Ok(Access::Allowed));
    fixture.set("other", denied("no role"));
    fixture.read(&["gw", "other"]);
    assert_eq!(
        fixture.summary().await,
        ["c1/gw Allowed", "c1/other Denied(\"no role\")"]
    );
    // A denial is valid for one minute, a permission for five.
    fixture.set("other", Ok(Access::Allowed));
    fixture.sleep(60).await;
    assert_eq!(fixture.summary().await, ["c1/other Allowed"]);
    fixture.set("gw", denied("taken away"));
    fixture.sleep(180).await;
    assert_eq!(fixture.summary().await, Vec::<String>::new());
    fixture.sleep(60).await;
    assert_eq!(fixture.summary().await, ["c1/gw Denied(\"taken away\")"]);
    assert!(fixture.table.asked() < 10);
}

#[tokio::test]
async fn an_unreachable_api_server_changes_nothing() {
    let mut fixture = Fixture::new();
    fixture.set("new", failed());
    fixture.set("gw", Ok(Access::Allowed));
    fixture.set("other", denied("no role"));
    fixture.read(&["gw", "new", "other"]);
    let first = fixture.summary().await;
    // An account without any answer is denied, with the reason.
    assert!(first.contains(&"c1/new Unknown(\"away\")".to_owned()), "{first:?}");
    for account in ["gw", "other"] {
        fixture.set(account, failed());
    }
    fixture.sleep(3600).await;
    assert_eq!(fixture.summary().await, Vec::<String>::new());
    fixture.set("new", Ok(Access::Allowed));
    fixture.sleep(60).await;
    assert_eq!(fixture.summary().await, ["c1/new Allowed"]);
}

#[tokio::test]
async fn an_unknown_cluster_denies_until_it_is_added() {
    let mut fixture = Fixture::new();
    fixture.set("gw", Err(ReviewError::UnknownCluster("which?".into())));
    fixture.read(&["gw"]);
    assert_eq!(fixture.summary().await, ["c1/gw Denied(\"which?\")"]);
    fixture.set("gw", Ok(Access::Allowed));
    fixture.known.send_modify(|changes| *changes += 1);
    assert_eq!(fixture.summary().await, ["c1/gw Allowed"]);
    // A removed cluster removes its permissions.
    fixture.set("gw", Err(ReviewError::UnknownCluster("gone".into())));
    fixture.known.send_modify(|changes| *changes += 1);
    assert_eq!(fixture.summary().await, ["c1/gw Denied(\"gone\")"]);
}

#[tokio::test]
async fn unused_decisions_are_dropped() {
    let mut fixture = Fixture::new();
    fixture.set("gw", Ok(Access::Allowed));
    fixture.read(&["gw"]);
    assert_eq!(fixture.summary().await, ["c1/gw Allowed"]);
    fixture.read(&[]);
    assert_eq!(fixture.summary().await, ["AccessReview -c1/gw"]);
    fixture.sleep(600).await;
    assert_eq!(fixture.table.asked(), 1);
}
