use std::net::{Ipv4Addr, SocketAddr};

use futures::FutureExt;
use hickory_resolver::{
    TokioResolver,
    config::{ConnectionConfig, NameServerConfig, ResolverConfig},
    net::runtime::TokioRuntimeProvider,
    proto::{
        op::{Message, MessageType, OpCode, ResponseCode},
        rr::{Name, RData, Record, RecordType},
    },
};
use tokio::net::UdpSocket;

use super::*;
use crate::{
    api::Row,
    ingest::fixture::{AnswerTable, settle},
    model::change::Batch,
};

const CLUSTER: ClusterId = ClusterId::new_static("c");

type Table = AnswerTable<SmolStr, Result<Answer, LookupError>>;

impl Table {
    fn set(&self, host: &'static str, addresses: &[&str], seconds: u64) {
        let answer = Answer {
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            ttl: (seconds > 0).then(|| Duration::from_secs(seconds)),
        };
        self.insert(host.into(), Ok(answer));
    }

    fn fail(&self, host: &'static str) {
        let error = LookupError("no server".into());
        self.insert(host.into(), Err(error));
    }
}

impl Lookup for Table {
    fn lookup(self: Arc<Self>, host: SmolStr, wait: Duration) -> BoxFuture<'static, Result<Answer, LookupError>> {
        self.answer(host, wait)
    }
}

struct Fixture {
    table: Arc<Table>,
    dependencies: watch::Sender<Option<Arc<ExternalDependencies>>>,
    changes: mpsc::Receiver<Batch>,
    answered: watch::Receiver<BTreeSet<SmolStr>>,
}

fn required(hosts: &[&'static str]) -> ExternalDependencies {
    ExternalDependencies {
        hosts: hosts.iter().copied().map(SmolStr::new_static).collect(),
        ..ExternalDependencies::default()
    }
}

impl Fixture {
    fn new() -> Self {
        let (dependencies, dependencies_in) = watch::channel(None);
        let (changes_out, changes) = mpsc::channel(8);
        let table = Arc::new(Table::default());
        let resolver = Resolver::new(CLUSTER, table.clone(), changes_out);
        let answered = resolver.answered.subscribe();
        crate::task::Tasks::default().spawn("resolver", resolver.run(dependencies_in));
        Self {
            table,
            dependencies,
            changes,
            answered,
        }
    }

    fn want(&self, hosts: &[&'static str]) {
        self.dependencies.send_replace(Some(Arc::new(required(hosts))));
    }

    /// Returns true if a start with these hosts waits no longer.
    fn is_answered(&self, hosts: &[&'static str]) -> bool {
        let dependencies = required(hosts);
        let waiting = answered(self.answered.clone(), &dependencies, START_TIMEOUT);
        waiting.now_or_never().is_some()
    }

    /// Lets time pass, second by second.
    async fn sleep(&self, seconds: u64) {
        self.table.sleep(seconds).await;
    }

    /// The next change in words, and the seconds until it came.
    async fn next(&mut self) -> (String, u64) {
        let (batch, waited) = self.table.next(&mut self.changes).await;
        let words = batch.iter().map(|change| match change {
            Change::Upsert(Row::ResolvedHost(host)) => format!("{} {:?}", host.key.name, host.addresses),
            Change::Remove(kind, key) => format!("{} -{}", kind.name(), key.name),
            other => panic!("unexpected {other:?}"),
        });
        (words.collect::<Vec<_>>().join(", "), waited)
    }

    /// The next two changes, in the order of their words.
    async fn both(&mut self) -> [String; 2] {
        let mut both = [self.next().await.0, self.next().await.0];
        both.sort();
        both
    }
}

#[tokio::test]
async fn hosts_are_resolved_again_when_their_records_expire() {
    let mut fixture = Fixture::new();
    fixture.table.set("a", &["2.2.2.2", "1.1.1.1", "2.2.2.2"], 120);
    fixture.want(&["a"]);
    assert_eq!(fixture.next().await, ("a [1.1.1.1, 2.2.2.2]".into(), 0));
    fixture.table.set("a", &["3.3.3.3"], 1);
    assert_eq!(fixture.next().await, ("a [3.3.3.3]".into(), 120));
    fixture.table.set("a", &["4.4.4.4"], 100_000);
    assert_eq!(fixture.next().await, ("a [4.4.4.4]".into(), 30), "no sooner than 30 s");
    fixture.table.set("a", &[], 0);
    assert_eq!(fixture.next().await, ("a []".into(), 3600), "no later than an hour");
    fixture.table.set("a", &["5.5.5.5"], 60);
    assert_eq!(fixture.next().await, ("a [5.5.5.5]".into(), 30), "without records");
}

#[tokio::test]
async fn equal_answers_are_not_sent_and_failures_keep_the_last() {
    let mut fixture = Fixture::new();
    fixture.table.fail("a");
    fixture.want(&["a"]);
    assert_eq!(fixture.next().await, ("a []".into(), 0), "nothing waits for it");
    fixture.sleep(95).await;
    assert_eq!(
        fixture.table.asked(),
        8,
        "at once, after 1, 2, 4, 8 and 16 s, then every 30 s"
    );
    assert!(fixture.changes.is_empty(), "nothing is known");
    fixture.table.set("a", &["1.1.1.1"], 60);
    assert_eq!(fixture.next().await, ("a [1.1.1.1]".into(), 26));
    fixture.table.fail("a");
    fixture.sleep(200).await;
    fixture.table.set("a", &["1.1.1.1"], 60);
    fixture.sleep(600).await;
    assert!(fixture.changes.is_empty(), "the addresses are what they were");
}

#[tokio::test]
async fn the_start_waits_for_the_first_addresses_of_each_host() {
    let mut fixture = Fixture::new();
    fixture.table.set("a", &["1.1.1.1"], 60);
    fixture.table.fail("b");
    assert!(fixture.is_answered(&[]) && !fixture.is_answered(&["a", "b"]));
    fixture.want(&["a", "b"]);
    settle().await;
    assert!(fixture.is_answered(&["a"]) && !fixture.is_answered(&["a", "b"]));
    assert_eq!(fixture.both().await, ["a [1.1.1.1]", "b []"], "sent before");
    fixture.table.set("b", &["2.2.2.2"], 60);
    assert_eq!(
        fixture.next().await,
        ("b [2.2.2.2]".into(), 1),
        "a failure is repeated soon"
    );
    assert!(fixture.is_answered(&["a", "b"]));
    answered(fixture.answered.clone(), &required(&["c"]), Duration::ZERO).await;
}

#[tokio::test]
async fn hosts_are_added_and_removed() {
    let mut fixture = Fixture::new();
    fixture.table.set("a", &["1.1.1.1"], 60);
    fixture.table.set("b", &["2.2.2.2"], 60);
    fixture.table.fail("c");
    fixture.want(&["a", "c"]);
    assert_eq!(fixture.both().await, ["a [1.1.1.1]", "c []"]);
    fixture.want(&["b"]);
    let (first, second) = (fixture.next().await.0, fixture.next().await.0);
    assert_eq!(
        (first.as_str(), second.as_str()),
        ("ResolvedHost -a, ResolvedHost -c", "b [2.2.2.2]")
    );
    let asked = fixture.table.asked();
    fixture.sleep(61).await;
    assert_eq!(fixture.table.asked(), asked + 1, "only b");
    fixture.want(&["b", "a"]);
    assert_eq!(fixture.next().await.0, "a [1.1.1.1]", "published again");
}

/// A DNS server: `a.example.com` has an alias and addresses, `v4.example.com` fails for IPv6, `half.example.com` has no
/// IPv6 address and fails for IPv4, `broken.example.com` fails for both, everything else does not exist.
async fn serve(socket: UdpSocket) {
    let mut buffer = [0; 1024];
    while let Ok((length, client)) = socket.recv_from(&mut buffer).await {
        let question = Message::from_vec(&buffer[..length]).unwrap();
        let query = question.queries[0].clone();
        let mut reply = Message::new(question.metadata.id, MessageType::Response, OpCode::Query);
        let record = |name: &str, ttl, data| Record::from_rdata(Name::from_ascii(name).unwrap(), ttl, data);
        let name = query.name().to_ascii();
        match (name.as_str(), query.query_type()) {
            ("a.example.com.", RecordType::A) => {
                let target = Name::from_ascii("lb.example.com.").unwrap();
                let alias = RData::CNAME(hickory_resolver::proto::rr::rdata::CNAME(target));
                reply.add_answer(record(&name, 45, alias));
                reply.add_answer(record(
                    "lb.example.com.",
                    300,
                    RData::A(Ipv4Addr::new(10, 0, 0, 2).into()),
                ));
                reply.add_answer(record(
                    "lb.example.com.",
                    300,
                    RData::A(Ipv4Addr::new(10, 0, 0, 1).into()),
                ));
            }
            ("a.example.com.", RecordType::AAAA) => {
                let address: std::net::Ipv6Addr = "2001:db8::1".parse().unwrap();
                reply.add_answer(record(&name, 100, RData::AAAA(address.into())));
            }
            ("v4.example.com.", RecordType::A) => {
                reply.add_answer(record(&name, 50, RData::A(Ipv4Addr::new(10, 0, 0, 3).into())));
            }
            ("half.example.com.", RecordType::AAAA) => {}
            ("v4.example.com." | "half.example.com." | "broken.example.com.", _) => {
                reply.metadata.response_code = ResponseCode::ServFail;
            }
            _ => reply.metadata.response_code = ResponseCode::NXDomain,
        }
        reply.add_query(query);
        socket.send_to(&reply.to_vec().unwrap(), client).await.unwrap();
    }
}

#[tokio::test]
async fn both_address_families_are_queried() {
    let socket = UdpSocket::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        .await
        .unwrap();
    let mut connection = ConnectionConfig::udp();
    connection.port = socket.local_addr().unwrap().port();
    crate::task::Tasks::default().spawn("dns", serve(socket));
    let server = NameServerConfig::new(Ipv4Addr::LOCALHOST.into(), true, vec![connection]);
    let config = ResolverConfig::from_parts(None, vec![Name::from_ascii("search.example.").unwrap()], vec![server]);
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    dns::set_options(builder.options_mut());
    let resolver = builder.build().unwrap();

    let answer = dns::answer(&resolver, "a.example.com").await.unwrap();
    let mut addresses: Vec<_> = answer.addresses.iter().map(ToString::to_string).collect();
    addresses.sort();
    assert_eq!(addresses, ["10.0.0.1", "10.0.0.2", "2001:db8::1"]);
    assert_eq!(answer.ttl, Some(Duration::from_secs(45)), "that of the alias");
    let answer = dns::answer(&resolver, "v4.example.com.").await.unwrap();
    assert_eq!((answer.addresses.len(), answer.ttl), (1, Some(Duration::from_secs(50))));
    assert_eq!(
        dns::answer(&resolver, "nowhere.example.com").await,
        Ok(Answer::default())
    );
    for host in ["broken.example.com", "half.example.com"] {
        assert!(dns::answer(&resolver, host).await.is_err(), "{host}");
    }
}
