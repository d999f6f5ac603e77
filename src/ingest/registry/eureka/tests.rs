use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::*;
use crate::{api::Diagnostic, ingest::registry_metrics::RegistryMetrics};

const APPS: &str = r#"{"applications": {"versions__delta": "1", "apps__hashcode": "DOWN_1_UP_1_", "application": [
    {"name": "SHOP", "instance": [
        {"instanceId": "a", "hostName": "shop.example.com", "ipAddr": "10.0.0.1", "status": "UP",
         "port": {"$": 8080, "@enabled": "true"}, "securePort": {"$": "8443", "@enabled": "true"},
         "metadata": {"@class": "java.util.Collections$EmptyMap", "istio.protocol": "http", "version": "v1"}},
        {"instanceId": "b", "hostName": "shop.example.com", "ipAddr": "10.0.0.2", "status": "DOWN",
         "port": {"$": 8080, "@enabled": "true"}, "securePort": {"$": 443, "@enabled": "false"}}]}]}}"#;
const DELTA: &str = r#"{"applications": {"apps__hashcode": "UP_1_", "application": {"name": "SHOP", "instance": [
    {"instanceId": "a", "hostName": "shop.example.com", "ipAddr": "10.0.0.1", "status": "UP", "actionType": "DELETED"},
    {"instanceId": "b", "hostName": "shop.example.com", "ipAddr": "10.0.0.2", "status": "UP",
     "port": {"$": 8080, "@enabled": true}, "actionType": "MODIFIED"}]}}}"#;

fn source(address: &str) -> Result<EurekaSource, EurekaSettingsError> {
    let metrics = RegistryMetrics::new(&prometheus::Registry::new()).expect("new names");
    let report = std::sync::Arc::new(|_: &Diagnostic| {});
    EurekaSource::new(
        address,
        Duration::from_secs(1),
        "Eureka".into(),
        metrics.of("Eureka"),
        report,
    )
}

fn client(address: &str) -> EurekaClient {
    source(address).expect("a valid address").client
}

fn parsed(text: &str) -> Applications {
    serde_json::from_str::<Envelope>(text).expect("valid JSON").applications
}

#[test]
fn instances_that_are_up_make_services() {
    let mut registered = Registered::default();
    registered.apply(parsed(APPS));
    assert_eq!(registered.hash(), "DOWN_1_UP_1_");
    let services = registered.services();
    let service = &services["shop.example.com"];
    let ports: Vec<(u32, &str, &str)> = service
        .ports
        .iter()
        .map(|(number, port)| (*number, port.name.as_str(), port.protocol))
        .collect();
    assert_eq!(ports, [(8080, "8080", "HTTP"), (8443, "8443", "HTTP")]);
    let instances: Vec<(&str, u32)> = service
        .instances
        .iter()
        .map(|instance| (instance.address.as_str(), instance.port))
        .collect();
    assert_eq!(instances, [("10.0.0.1", 8080), ("10.0.0.1", 8443)]);
    let labels = &service.instances.first().expect("an instance").labels;
    assert_eq!(labels, &[("version".to_owned(), "v1".to_owned())].into());
}

#[test]
fn names_that_clients_use_are_services_of_their_ports() {
    let mut registered = Registered::default();
    registered.apply(parsed(
        r#"{"applications": {"application": {"name": "SHOP", "instance": {"instanceId": "a",
        "hostName": "a.internal", "ipAddr": "10.0.0.1", "status": "UP", "vipAddress": "Shop,store:8080", "secureVipAddress": "shop",
        "port": {"$": 8080, "@enabled": "true"}, "securePort": {"$": 8443, "@enabled": "true"},
        "leaseInfo": null, "metadata": null}}}}"#,
    ));
    let services = registered.services();
    let ports: Vec<(&str, Vec<u32>)> = services
        .iter()
        .map(|(host, service)| (host.as_str(), service.ports.keys().copied().collect()))
        .collect();
    let both = vec![8080, 8443];
    assert_eq!(
        ports,
        [("a.internal", both.clone()), ("shop", both), ("store", vec![8080])]
    );
}

#[test]
fn changes_lead_to_the_state_whose_hash_the_server_reports() {
    let mut registered = Registered::default();
    registered.apply(parsed(APPS));
    let delta = parsed(DELTA);
    let hash = delta.hash.clone();
    registered.apply(delta);
    assert_eq!(registered.hash(), hash);
    let services = registered.services();
    let addresses: Vec<&str> = services["shop.example.com"]
        .instances
        .iter()
        .map(|instance| instance.address.as_str())
        .collect();
    assert_eq!(addresses, ["10.0.0.2"]);
}

#[test]
fn instances_that_miss_after_an_outage_stay_until_their_leases_end() {
    let mut client = client("http://eureka:1");
    let mut known = Registered::default();
    known.apply(parsed(APPS));
    let now = Instant::now();
    let read = |client: &mut EurekaClient, known: &Registered, seconds: u64| {
        let mut registered = Registered::default();
        client.keep_leased(&mut registered, Some(known), now + Duration::from_secs(seconds));
        registered
    };
    assert!(read(&mut client, &known, 0).leased.is_empty(), "no outage");
    client.is_lost = true;
    let after = read(&mut client, &known, 0);
    assert_eq!(after.leased, known.instances);
    assert_eq!(after.services(), known.services());
    assert_eq!(after.hash(), "", "the hash is that of the server's instances");
    let later = read(&mut client, &after, 89);
    assert_eq!(later.leased, known.instances);
    assert!(read(&mut client, &later, 91).leased.is_empty());
}

#[test]
fn failures_before_the_first_answer_are_no_outage() {
    let mut client = client("http://eureka:1");
    client.is_lost = true;
    let mut known = Registered::default();
    known.apply(parsed(APPS));
    client.keep_leased(&mut known, None, Instant::now());
    assert!(!client.is_lost);
    let mut registered = Registered::default();
    client.keep_leased(&mut registered, Some(&known), Instant::now());
    assert!(registered.leased.is_empty(), "the instances have left");
}

#[test]
fn changes_are_read_only_while_the_server_keeps_them() {
    let mut client = client("http://eureka:1");
    let now = Instant::now();
    assert!(!client.has_all_changes(now), "nothing was read");
    let after = |seconds: u64| now + Duration::from_secs(seconds);
    client.last_complete = Some(now);
    client.last_answer = Some(now);
    assert!(client.has_all_changes(after(119)) && !client.has_all_changes(after(120)));
    client.last_answer = Some(after(200));
    assert!(client.has_all_changes(after(299)), "changes followed");
    assert!(
        !client.has_all_changes(after(300)),
        "all instances are read at an interval"
    );
    client.is_lost = true;
    assert!(!client.has_all_changes(after(201)), "a request failed");
}

#[tokio::test]
async fn credentials_of_the_address_are_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a listening socket");
    let client = client(&format!("http://us%40er:secret@{address}/eureka"));
    let serve = async {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("a request"));
        }
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{APPS}", APPS.len());
        stream.write_all(answer.as_bytes()).await.expect("an open connection");
        String::from_utf8_lossy(&head).into_owned()
    };
    let (answer, head) = tokio::join!(client.get("/apps"), serve);
    assert!(answer.is_ok());
    assert!(head.contains("authorization: Basic dXNAZXI6c2VjcmV0\r\n"), "{head}");
}

#[test]
fn errors_do_not_show_credentials() {
    for address in [
        "ftp://user:secret@eureka",
        "http://user:secret@:1",
        "user:secret@eureka",
    ] {
        let Err(error) = source(address) else {
            panic!("{address} is invalid");
        };
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

#[test]
fn malformed_answers_are_errors() {
    for text in [
        "",
        "{",
        "[]",
        r#"{"applications": 1}"#,
        r#"{"applications": {"application": [{"instance": [{"port": {"$": 99999, "@enabled": "true"}}]}]}}"#,
        r#"{"applications": {"application": [{"instance": ["x"]}]}}"#,
    ] {
        assert!(serde_json::from_str::<Envelope>(text).is_err(), "{text}");
    }
}
