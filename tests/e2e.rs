//! The daemon with real Envoys and real requests.

mod fixture;
mod inference;
mod quarantine;
mod rolling;
mod sample;
mod tokens;
mod warming;

use std::time::Duration;

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::json;

use crate::support::ads::AdsClient;
use crate::support::daemon::Daemon;
use crate::support::envoy::{self, Envoy, Node, Protocol};
use crate::support::{http, missing, project, scratch, wait};
use fixture::{Fixture, TIMEOUT, WEB, answered_by, answers};

/// A test that runs with both variants of the xDS protocol.
type ProtocolTest = fn(&str, Protocol) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let both: [(&str, ProtocolTest); 6] = [
        ("sidecar_is_configured_and_routes", sidecar_is_configured_and_routes),
        ("gateway_is_configured_and_routes", gateway_is_configured_and_routes),
        ("new_weights_change_only_routes", new_weights_change_only_routes),
        ("removed_endpoint_drains", removed_endpoint_drains),
        (
            "refused_listener_is_withheld_until_it_changes",
            quarantine::refused_listener_is_withheld_until_it_changes,
        ),
        (
            "invisible_service_causes_no_updates",
            invisible_service_causes_no_updates,
        ),
    ];
    let mut trials: Vec<Trial> = both
        .into_iter()
        .flat_map(|(name, trial)| {
            [("sotw", Protocol::StateOfTheWorld), ("delta", Protocol::Delta)]
                .map(|(form, protocol)| with_envoy(format!("e2e::{name}::{form}"), move |name| trial(name, protocol)))
        })
        .collect();
    trials.push(with_envoy(
        "e2e::invalid_file_changes_nothing".to_owned(),
        invalid_file_changes_nothing,
    ));
    trials.push(Trial::test("e2e::many_proxies_with_large_nodes_are_served", || {
        many_proxies_with_large_nodes_are_served("e2e/many_proxies_with_large_nodes_are_served")
    }));
    trials.push(with_envoy(
        "e2e::daemon_restart_does_not_affect_traffic".to_owned(),
        daemon_restart_does_not_affect_traffic,
    ));
    trials.push(with_envoy(
        "e2e::endpoints_that_were_lost_are_sent_again".to_owned(),
        warming::endpoints_that_were_lost_are_sent_again,
    ));
    trials.push(with_envoy(
        "e2e::tokens_are_verified_with_fetched_keys".to_owned(),
        tokens::are_verified_with_fetched_keys,
    ));
    trials.push(with_envoy(
        "e2e::inference_picker_selects_endpoints".to_owned(),
        inference::picker_selects_endpoints,
    ));
    trials.push(with_envoy(
        "e2e::restart_of_replicas_is_not_noticed".to_owned(),
        rolling::restart_of_replicas_is_not_noticed,
    ));
    trials.push(Trial::test("e2e::daemon_exits_on_sigterm", daemon_exits_on_sigterm));
    trials.push(with_envoy("e2e::sample_runs_once".to_owned(), sample::runs_once));
    trials
}

/// A test that is skipped where Envoy is missing. It receives its name, for its folder.
fn with_envoy(name: String, trial: impl FnOnce(&str) -> Result<(), Failed> + Send + 'static) -> Trial {
    let folder = name.replace("::", "/");
    Trial::ignorable_test(name, move || {
        if envoy::binary().is_none() {
            return missing("Envoy is missing; `make tools` installs it");
        }
        trial(&folder).map(|()| Completion::Completed)
    })
}

fn sidecar_is_configured_and_routes(name: &str, protocol: Protocol) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let sidecar = fixture.sidecar(protocol)?;
    sidecar.rejected_nothing()?;
    let names = sidecar.names();
    for cluster in [fixture.cluster(""), fixture.cluster("v1"), fixture.cluster("v2")] {
        assert!(names.contains(&cluster), "no {cluster} among {names:?}");
    }
    assert_eq!(
        answers(fixture.outbound(), WEB, 10)?,
        ["v1"; 10],
        "v1 has all the weight"
    );
    assert_eq!(
        answers(fixture.inbound(), "client", 1)?,
        ["client"],
        "the sidecar must forward inbound requests to its application"
    );
    Ok(())
}

fn gateway_is_configured_and_routes(name: &str, protocol: Protocol) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let gateway = fixture.gateway(protocol)?;
    gateway.rejected_nothing()?;
    assert_eq!(answers(fixture.edge(), WEB, 10)?, ["v1"; 10], "v1 has all the weight");
    let unknown = http::get(fixture.edge(), "unknown.example.com", "/")?;
    assert_eq!(
        unknown.status, 404,
        "a host without a VirtualService must have no route"
    );
    Ok(())
}

/// Many proxies connect at once with large nodes, as Envoys with all their extensions send. Data sent before the first
/// window update does not block them.
fn many_proxies_with_large_nodes_are_served(name: &str) -> Result<(), Failed> {
    let folder = scratch(name);
    let daemon = Daemon::start(&project().join("samples/helloworld"), &folder.join("istiod.log"))?;
    let window = first_window(daemon.xds).map_err(|error| error.to_string())?;
    assert!(
        window.is_none_or(|window| window >= 65_535),
        "unexpected initial window of streams: {window:?}"
    );
    let proxies = (0..200).map(|index| {
        // Up to several times the read limit of an unauthenticated connection.
        let extensions: Vec<String> = (0..10 * index)
            .map(|number| format!("envoy.extensions.of_some_kind.number_{number}"))
            .collect();
        let node = Node {
            id: format!("sidecar~127.0.0.1~client-{index}.hello~hello.svc.cluster.local"),
            metadata: json!({ "NAMESPACE": "hello", "SERVICE_ACCOUNT": "client", "ISTIO_VERSION": "1.30.3" }),
        };
        AdsClient::connect_with_extensions(daemon.xds, &node, extensions)
    });
    for proxy in proxies.collect::<Vec<_>>() {
        proxy
            .first()
            .map_err(|error| format!("{error}: {}", proxy.outstanding()))?;
    }
    Ok(())
}

/// Returns the stream window in the daemon's first SETTINGS frame, if it has one: setting 4 (RFC 9113, 6.5).
fn first_window(port: u16) -> std::io::Result<Option<u32>> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")?;
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    assert_eq!(head[3], 4, "the first frame must be SETTINGS");
    let mut settings = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
    stream.read_exact(&mut settings)?;
    let mut settings = settings.chunks_exact(6);
    let window = settings.find(|setting| setting[..2] == [0, 4]);
    Ok(window.map(|setting| u32::from_be_bytes([setting[2], setting[3], setting[4], setting[5]])))
}

/// Counters of accepted updates, as regular expressions.
const CLUSTERS: &str = r"^cluster_manager\.cds\.update_success$";
const ENDPOINTS: &str = r"^cluster\..*\.update_success$";
const LISTENERS: &str = r"^listener_manager\.lds\.update_success$";
const ROUTES: &str = r"\.rds\..*\.update_success$";

/// Returns the number of accepted updates of each kind. Each must be at least one; otherwise the expression is wrong.
fn counts<const N: usize>(envoy: &Envoy, kinds: [&str; N]) -> [u64; N] {
    let counts = kinds.map(|kind| envoy.sum(kind));
    assert!(counts.iter().all(|count| *count > 0), "{kinds:?}: {counts:?}");
    counts
}

fn new_weights_change_only_routes(name: &str, protocol: Protocol) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let sidecar = fixture.sidecar(protocol)?;
    answered_by("v1", fixture.outbound(), WEB)?;
    let before = counts(&sidecar, [CLUSTERS, ENDPOINTS, LISTENERS]);
    fixture.split_traffic(0, 100);
    answered_by("v2", fixture.outbound(), WEB)?;
    assert_eq!(
        answers(fixture.outbound(), WEB, 10)?,
        ["v2"; 10],
        "v2 has all the weight"
    );
    let after = counts(&sidecar, [CLUSTERS, ENDPOINTS, LISTENERS]);
    assert_eq!(after, before, "weights must change only routes");
    sidecar.rejected_nothing()?;
    Ok(())
}

fn removed_endpoint_drains(name: &str, protocol: Protocol) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let sidecar = fixture.sidecar(protocol)?;
    fixture.split_traffic(0, 100);
    answered_by("v2", fixture.outbound(), WEB)?;
    let address = fixture.outbound();
    let pending = http::RUNTIME.spawn(async move { http::request(address, WEB, "/hold").await });
    wait::until("the pending request at v2", TIMEOUT, || {
        (fixture.v2.pending() == 1).then_some(())
    })?;

    let before = counts(&sidecar, [CLUSTERS, LISTENERS, ROUTES]);
    fixture.remove_v2();
    let endpoints = wait::until("a service without v2", TIMEOUT, || {
        let endpoints = sidecar.endpoints(&fixture.cluster(""));
        (endpoints.len() == 1).then_some(endpoints)
    })?;
    assert_eq!(endpoints, [fixture.v1.address.to_string()], "v1 stays");
    let after = counts(&sidecar, [CLUSTERS, LISTENERS, ROUTES]);
    assert_eq!(after, before, "an endpoint must change only endpoints");
    fixture.split_traffic(100, 0);
    answered_by("v1", fixture.outbound(), WEB)?;

    fixture.v2.release();
    let answer = http::RUNTIME.block_on(pending)??;
    assert_eq!(
        answer.application().as_deref(),
        Some("v2"),
        "a request under way must complete"
    );
    sidecar.rejected_nothing()?;
    Ok(())
}

fn invisible_service_causes_no_updates(name: &str, protocol: Protocol) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let sidecar = fixture.sidecar(protocol)?;
    answered_by("v1", fixture.outbound(), WEB)?;
    let before = counts(&sidecar, [CLUSTERS, ENDPOINTS, LISTENERS, ROUTES]);
    fixture.add_invisible_service();
    wait::until("the invisible service in the daemon", TIMEOUT, || {
        let services = http::get(fixture.daemon.monitoring, "istiod", "/debug/registryz").ok()?;
        services.body.contains("unseen.elsewhere").then_some(())
    })?;
    // The weights change later, so once they arrive, any update for the service would have arrived too.
    fixture.split_traffic(0, 100);
    answered_by("v2", fixture.outbound(), WEB)?;
    let after = counts(&sidecar, [CLUSTERS, ENDPOINTS, LISTENERS, ROUTES]);
    assert_eq!(after[..3], before[..3], "an invisible service must change nothing");
    assert_eq!(after[3], before[3] + 1, "only the weights may change the routes");
    Ok(())
}

fn invalid_file_changes_nothing(name: &str) -> Result<(), Failed> {
    let fixture = Fixture::start(name)?;
    let sidecar = fixture.sidecar(Protocol::Delta)?;
    fixture.write_invalid_file();
    wait::until("the invalid file in the log", TIMEOUT, || {
        fixture.daemon.process.log().contains("spoilt.yaml").then_some(())
    })?;
    assert_eq!(
        answers(fixture.outbound(), WEB, 5)?,
        ["v1"; 5],
        "proxies must keep their configuration"
    );
    fixture.split_traffic(0, 100);
    answered_by("v2", fixture.outbound(), WEB)?;
    sidecar.rejected_nothing()?;
    Ok(())
}

fn daemon_restart_does_not_affect_traffic(name: &str) -> Result<(), Failed> {
    let mut fixture = Fixture::start(name)?;
    let sidecar = fixture.sidecar(Protocol::Delta)?;
    answered_by("v1", fixture.outbound(), WEB)?;
    fixture.restart()?;
    assert_eq!(
        answers(fixture.outbound(), WEB, 5)?,
        ["v1"; 5],
        "an Envoy without a control plane must continue to serve"
    );
    fixture.split_traffic(0, 100);
    answered_by("v2", fixture.outbound(), WEB)?;
    sidecar.rejected_nothing()?;
    Ok(())
}

fn daemon_exits_on_sigterm() -> Result<(), Failed> {
    let fixture = Fixture::start("e2e/daemon_exits_on_sigterm")?;
    fixture.daemon.process.terminate();
    let status = fixture.daemon.process.end_of(Duration::from_secs(20))?;
    assert!(status.success(), "SIGTERM must end the daemon with success: {status}");
    Ok(())
}
