//! Tests of how long streams last, and of the options of their connections.

use super::*;

#[tokio::test]
async fn a_client_that_has_closed_its_side_is_answered() {
    let fixture = Fixture::new(&ServerOptions::default());
    let mut stream = Sotw::open(&mut fixture.client().await)
        .await
        .expect("an accepted stream");
    stream.request(ResourceType::Cluster, &[], "").await;
    // The client closes its side when the sender is dropped.
    stream.requests = mpsc::channel(1).0;
    fixture.until("pilot_xds", 1.0).await;
    fixture.publish(1, &[(ResourceType::Cluster, "a", "1")]);
    assert_eq!(texts(&stream.response().await), ["1"]);
    assert_eq!(stream.end().await.code(), Code::Ok);
}

#[tokio::test]
async fn no_limit_of_streams_admits_streams() {
    let fixture = Fixture::new(&ServerOptions {
        max_streams: 0,
        ..ServerOptions::default()
    });
    let mut client = fixture.client().await;
    let opened = tokio::time::timeout(Duration::from_secs(20), Sotw::open(&mut client)).await;
    assert!(matches!(opened, Ok(Ok(_))), "no stream can be opened");
}

#[test]
fn keepalive_times_are_those_of_grpc() {
    let times = |words: &[&str]| {
        let options = ServerOptions::of(&settings::fixture::settings(words, &[]));
        (options.keepalive_interval, options.keepalive_timeout)
    };
    let seconds = |interval, timeout| (Duration::from_secs(interval), Duration::from_secs(timeout));
    assert_eq!(times(&[]), seconds(30, 10));
    assert_eq!(
        times(&["--keepaliveInterval=0", "--keepaliveTimeout=0s"]),
        seconds(7200, 20)
    );
    assert_eq!(
        times(&["--keepaliveInterval=10ms", "--keepaliveTimeout=3s"]),
        seconds(1, 3)
    );
}
