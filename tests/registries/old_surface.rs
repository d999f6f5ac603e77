//! Flags, ports, pages and protocols of old releases.

use std::net::SocketAddr;

use istiod::proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use istiod::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use libtest_mimic::{Failed, Trial};
use serde_json::Value;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::support::daemon::Daemon;
use crate::support::http::{self, RUNTIME};
use crate::support::{ports, scratch};

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("registries::old_surface::flags_act_or_name_their_successor", flags),
        Trial::test("registries::old_surface::pages_are_served", pages),
        Trial::test("registries::old_surface::v2_is_refused", v2_is_refused),
    ]
}

/// The flags without an effect, with a part of what is said about each.
const FLAGS: [(&str, &str); 8] = [
    ("--resync=30s", "watches do not need it"),
    ("--discovery_cache=false", "the xDS API v1 and its cache are gone"),
    ("--discoveryCache", "the xDS API v1 and its cache are gone"),
    ("--clusterRegistriesConfigMap=clusters", "istio/multiCluster=true"),
    ("--webhookEndpoint=http://127.0.0.1:1", "use an EnvoyFilter"),
    ("--plugins=authn,authz,health,mixer", "use EnvoyFilter, WasmPlugin"),
    ("--disable-install-crds=true", "CRDs are installed by the chart base"),
    ("--consulconfig=/etc/consul", "use --consulserverURL"),
];

fn flags() -> Result<(), Failed> {
    let folder = scratch("registries-old-flags");
    let monitoring = ports::free();
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command.args(["--registries=Mock", "--mockServices", "--domain=mesh.local"]);
        command.args(FLAGS.map(|(flag, _)| flag));
        command.args(["--plugins=authn", &format!("--monitoringPort={monitoring}")]);
    })?;
    let log = daemon.process.log();
    for (flag, said) in FLAGS {
        let name = flag.split('=').next().unwrap_or_default();
        let lines: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("flag has no effect") && line.contains(&format!("flag={name} ")))
            .collect();
        assert_eq!(lines.len(), 1, "{name} is said once: {lines:?}\n{log}");
        assert!(lines[0].contains(said), "{}", lines[0]);
    }
    // Port 9093 of old releases is any port today.
    let page = http::get(SocketAddr::from(([127, 0, 0, 1], monitoring)), "istiod", "/metrics")?;
    assert!(page.status.is_success() && page.body.contains("istiod_registry_objects"));
    let registered = http::get(daemon.http, "istiod", "/v1/registration")?.body;
    assert!(registered.contains("hello.default.svc.mesh.local"), "{registered}");
    Ok(())
}

fn pages() -> Result<(), Failed> {
    let folder = scratch("registries-old-pages");
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command.args(["--registries=Mock", "--mockServices"]);
    })?;
    let get = |path: &str| http::get(daemon.http, "istiod", path);
    let all: Vec<Value> = serde_json::from_str(&get("/v1/registration")?.body)?;
    let keys: Vec<&str> = all
        .iter()
        .filter_map(|service| service["service-key"].as_str())
        .collect();
    let mut sorted = keys.clone();
    sorted.sort_unstable();
    assert_eq!(
        (keys.len(), &keys),
        (10, &sorted),
        "two services with five ports, by key"
    );
    let host = "hello.default.svc.cluster.local";
    assert!(keys.contains(&format!("{host}|http").as_str()), "{keys:?}");
    let one = |key: &str| -> Result<usize, Failed> {
        let answer: Value = serde_json::from_str(&get(&format!("/v1/registration/{key}"))?.body)?;
        Ok(answer["hosts"].as_array().map_or(0, Vec::len))
    };
    assert_eq!(one(&format!("{host}%7Chttp"))?, 2);
    assert_eq!(one(&format!("{host}%7Chttp%7Cversion=v1"))?, 1);
    assert_eq!(one("absent%7Chttp")?, 0);
    assert_eq!(get("/cache_stats")?.body, "{\"cache_stats\":{}}");
    for gone in [
        "/v1/clusters/a/b",
        "/v1/routes/80/a/b",
        "/v1/listeners/a/b",
        "/v1/az/a/b",
    ] {
        let answer = get(gone)?;
        assert_eq!(answer.status.as_u16(), 410, "{gone}");
        assert!(
            answer.body.contains("hint: proxies connect to the xDS port"),
            "{}",
            answer.body
        );
    }
    Ok(())
}

fn v2_is_refused() -> Result<(), Failed> {
    let folder = scratch("registries-old-v2");
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command.arg("--registries=Mock");
    })?;
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", daemon.xds))?;
    let refused = |status: &Status, code: Code, hint: &str| {
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(hint), "{}", status.message());
    };
    RUNTIME.block_on(async {
        let channel = endpoint.connect().await?;
        for (service, method) in [
            (
                "envoy.service.discovery.v2.AggregatedDiscoveryService",
                "StreamAggregatedResources",
            ),
            (
                "envoy.service.discovery.v2.AggregatedDiscoveryService",
                "DeltaAggregatedResources",
            ),
            ("envoy.api.v2.EndpointDiscoveryService", "StreamEndpoints"),
        ] {
            let status = call(&channel, &format!("/{service}/{method}")).await;
            refused(&status, Code::Unimplemented, "ADS v3");
        }
        for name in ["Cluster", "ClusterLoadAssignment", "Listener", "RouteConfiguration"] {
            let mut request = DiscoveryRequest {
                type_url: format!("type.googleapis.com/envoy.api.v2.{name}"),
                ..DiscoveryRequest::default()
            };
            let node = request.node.get_or_insert_default();
            node.id = "sidecar~127.0.0.1~client.default~default.svc.cluster.local".to_owned();
            let mut client = AggregatedDiscoveryServiceClient::new(channel.clone());
            let requests = tokio_stream::iter([request]);
            let status = match client.stream_aggregated_resources(requests).await {
                Err(status) => status,
                Ok(response) => match response.into_inner().message().await {
                    Err(status) => status,
                    Ok(answer) => return Err(format!("{name}: {answer:?}").into()),
                },
            };
            refused(&status, Code::InvalidArgument, "v3");
        }
        Ok::<(), Failed>(())
    })
}

/// Calls a method with one request and returns the status.
async fn call(channel: &Channel, path: &str) -> Status {
    let mut client = tonic::client::Grpc::new(channel.clone());
    if let Err(error) = client.ready().await {
        return Status::unavailable(error.to_string());
    }
    let codec = tonic_prost::ProstCodec::<DiscoveryRequest, DiscoveryResponse>::default();
    let path = ::http::uri::PathAndQuery::try_from(path.to_owned()).expect("a valid path");
    let requests = tokio_stream::iter([DiscoveryRequest::default()]);
    match client.streaming(Request::new(requests), path, codec).await {
        Err(status) => status,
        Ok(response) => match response.into_inner().message().await {
            Err(status) => status,
            Ok(answer) => Status::ok(format!("{answer:?}")),
        },
    }
}
