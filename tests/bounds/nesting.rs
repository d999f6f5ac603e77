//! R2: inputs that are nested too deeply or too large.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use istiod::{
    api::{folder::FileContent, yaml},
    base::ClusterId,
    generate::{Proxy, proxy::Extensions},
    proto::envoy::config::core::v3::Node,
};
use libtest_mimic::Failed;
use prost::Message;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{daemon, memory};
use crate::support::{
    ads::AdsClient,
    envoy,
    http::{self, RUNTIME},
    wait,
};

const DEEP: usize = 1_000_000;

/// The time limit of a request.
const ANSWERED: Duration = Duration::from_secs(20);

/// Texts that every parser must refuse.
fn deep_texts() -> Vec<(&'static str, String)> {
    let repeated =
        |open: &str, middle: &str, close: &str| [open.repeat(DEEP), middle.to_owned(), close.repeat(DEEP)].concat();
    vec![
        ("JSON objects", repeated("{\"a\":", "1", "}")),
        (
            "JSON lists in a spec",
            format!(
                "{{\"kind\":\"Service\",\"apiVersion\":\"v1\",\"spec\":{}}}",
                repeated("[", "", "]")
            ),
        ),
        ("open brackets", "[".repeat(DEEP)),
        ("open braces", "{a: ".repeat(DEEP)),
        ("block lists", "- ".repeat(DEEP)),
        (
            "block mappings",
            (0..2000)
                .flat_map(|depth| [" ".repeat(depth), "a:\n".to_owned()])
                .collect(),
        ),
        ("explicit keys", "? ".repeat(DEEP)),
        ("tags and anchors", "&a !!seq [".repeat(DEEP)),
    ]
}

/// A message with nested groups, and a node whose metadata is nested structs.
fn deep_messages() -> Vec<(&'static str, Vec<u8>)> {
    let groups = [vec![0x0b; DEEP], vec![0x0c; DEEP]].concat();
    // Each level is `Value { struct_value { fields { key: "a", value: .. } } }`, written from the inside out, reversed.
    let mut reversed = Vec::new();
    let wrap = |tag: u8, reversed: &mut Vec<u8>| {
        let mut length = Vec::new();
        prost::encoding::encode_varint(reversed.len() as u64, &mut length);
        reversed.extend(length.iter().rev());
        reversed.push(tag);
    };
    while reversed.len() < 3 << 20 {
        wrap(0x12, &mut reversed);
        reversed.extend([b'a', 1, 0x0a]);
        wrap(0x0a, &mut reversed);
        wrap(0x2a, &mut reversed);
    }
    // The outermost value is in a field of a struct, which is the node's metadata.
    wrap(0x12, &mut reversed);
    reversed.extend([b'a', 1, 0x0a]);
    wrap(0x0a, &mut reversed);
    wrap(0x1a, &mut reversed);
    reversed.reverse();
    let id = b"\x0a\x32sidecar~10.0.0.1~a-0.default~default.svc.cluster.l";
    vec![("groups", groups), ("structs", [&id[..], &reversed].concat())]
}

/// Every parser returns an error, within the stack size of the daemon's worker threads.
pub(super) fn parsers_reject_deep_nesting() -> Result<(), Failed> {
    let parsing = std::thread::Builder::new().stack_size(2 << 20).spawn(|| {
        for (what, text) in deep_texts() {
            let read = FileContent::read("objects.yaml", text.as_bytes(), &ClusterId::new("c"));
            assert!(
                read.unreadable && !read.diagnostics.is_empty(),
                "a file of {what} must be refused"
            );
            for document in yaml::documents(&text) {
                assert!(document.parse().is_err(), "{what} must be refused");
            }
            assert!(
                serde_json::from_str::<serde_json::Value>(&text).is_err(),
                "an object of {what} must be refused"
            );
            // Text with invalid JSON counts as a plain string.
            let metadata: BTreeMap<_, _> = ["LABELS", "PROXY_CONFIG", "ANNOTATIONS"]
                .into_iter()
                .map(|key| (key.to_owned(), text.clone().into()))
                .collect();
            let id = "sidecar~10.0.0.1~a-0.default~default.svc.cluster.local";
            let proxy = Proxy::new(id, "", metadata, "".into(), Extensions::default());
            assert!(
                proxy.is_ok_and(|proxy| proxy.labels().is_empty()),
                "{what} must not be labels"
            );
        }
        for (what, message) in deep_messages() {
            assert!(Node::decode(&message[..]).is_err(), "{what} must be refused");
        }
    });
    let parsed = parsing.expect("a thread can be created").join();
    parsed.map_err(|panic| Failed::from(panic.downcast_ref::<String>().cloned().unwrap_or_default()))
}

/// Like the test above, against a real daemon's ports and folder.
pub(super) fn daemon_survives_deep_nesting() -> Result<(), Failed> {
    let (daemon, mesh) = daemon("bounds-nesting")?;
    for (what, message) in deep_messages() {
        // Field 2 of a request is its node.
        let mut request = Vec::new();
        prost::encoding::encode_key(2, prost::encoding::WireType::LengthDelimited, &mut request);
        prost::encoding::encode_varint(message.len() as u64, &mut request);
        request.extend(message);
        let framed = [&[0][..], &u32::to_be_bytes(request.len() as u32), &request].concat();
        let status = RUNTIME.block_on(grpc_status(daemon.xds, framed.into()))?;
        if status == "0" {
            return Err(format!("a request with {what} was accepted").into());
        }
    }
    for (index, (_, text)) in deep_texts().into_iter().enumerate() {
        std::fs::write(mesh.join(format!("deep-{index}.yaml")), text).expect("target/ is writable");
    }
    wait::until("an error for every deeply nested file", Duration::from_mins(1), || {
        let log = daemon.process.log();
        (0..deep_texts().len())
            .all(|index| log.contains(&format!("deep-{index}.yaml")))
            .then_some(())
    })?;
    still_serves(&daemon)
}

fn still_serves(daemon: &crate::support::daemon::Daemon) -> Result<(), Failed> {
    if let Some(status) = daemon.process.ended() {
        return Err(format!("the daemon exited: {status}\n{}", daemon.process.log_tail()).into());
    }
    let node = envoy::Node {
        id: "sidecar~10.0.0.9~reader.app~app.svc.cluster.local".into(),
        metadata: serde_json::json!({ "NAMESPACE": "app", "CLUSTER_ID": "Kubernetes" }),
    };
    let client = AdsClient::connect(daemon.xds, &node);
    let resources = client.first()?;
    if resources.is_empty() {
        return Err("a proxy gets no configuration".into());
    }
    Ok(())
}

/// Returns the status of a stream with one message.
async fn grpc_status(port: u16, message: Bytes) -> Result<String, String> {
    let exchange = async {
        let stream = TcpStream::connect(("127.0.0.1", port))
            .await
            .map_err(|error| error.to_string())?;
        let connected = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (mut sender, connection) = connected.map_err(|error| error.to_string())?;
        RUNTIME.spawn(async move { drop(connection.await) });
        let path = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
        let request = ::http::Request::post(format!("http://istiod{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Full::new(message))
            .expect("the request is valid");
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| error.to_string())?;
        let of_trailers = body.trailers().and_then(|trailers| trailers.get("grpc-status"));
        let status = of_trailers.or(head.headers.get("grpc-status"));
        let status = status.ok_or_else(|| format!("a response without a status: {head:?}"))?;
        Ok(String::from_utf8_lossy(status.as_bytes()).into_owned())
    };
    let exchanged = tokio::time::timeout(wait::extended(ANSWERED), exchange).await;
    exchanged.unwrap_or_else(|_| Err("no response on the stream".to_owned()))
}

/// The maximum size of a body that a webhook reads.
const WEBHOOK_BYTES: usize = 6 << 20;
/// The size of what no page may hold in memory.
const LARGE_BYTES: usize = 64 << 20;

/// Pages are read-only: large bodies and heads are refused or ignored, and not buffered.
pub(super) fn pages_do_not_buffer_request_bodies() -> Result<(), Failed> {
    let (daemon, _) = daemon("bounds-pages")?;
    let deep = vec![b'['; DEEP];
    let large = vec![b'x'; LARGE_BYTES];
    let (_, before) = memory(daemon.process.id)?;
    for address in [daemon.http, daemon.monitoring] {
        for path in [
            "/debug/configz",
            "/ready",
            "/metrics",
            "/version",
            "/inject",
            "/validate",
        ] {
            let is_webhook = path == "/validate" && address == daemon.http;
            // The answer does not wait for the rest of the body. Everything sent is read, so the answer is not lost.
            let part: &[u8] = if is_webhook { &large[..=WEBHOOK_BYTES] } else { &[] };
            let status = exchange(address, &head(path, LARGE_BYTES), part)?;
            if !status.is_some_and(|status| status.is_client_error()) {
                return Err(format!("POST {path} with {} bytes of a body: {status:?}", part.len()).into());
            }
            for body in [&deep, &large] {
                let status = exchange(address, &head(path, body.len()), body)?;
                let is_right = if is_webhook && body.len() <= WEBHOOK_BYTES {
                    // A body that is not a review is answered with a verdict.
                    status.is_some_and(|status| status.is_success())
                } else {
                    // The server may close the connection before it has received everything.
                    status.is_none_or(|status| status.is_client_error())
                };
                if !is_right {
                    return Err(format!("POST {path} with {} bytes: {status:?}", body.len()).into());
                }
            }
        }
        let status = exchange(address, "GET /ready HTTP/1.1\r\nhost: istiod\r\nx-long: ", &large)?;
        if status.is_some_and(|status| !status.is_client_error()) {
            return Err(format!("a head of {LARGE_BYTES} bytes: {status:?}").into());
        }
    }
    let grown = memory(daemon.process.id)?.1.saturating_sub(before);
    if grown > 16 << 20 {
        return Err(format!("requests use {grown} bytes of memory").into());
    }
    if !http::get(daemon.http, "istiod", "/ready")?.status.is_success() {
        return Err("the daemon is no longer ready".into());
    }
    Ok(())
}

/// Returns the head of a request with a body of this size.
fn head(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: istiod\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    )
}

/// Sends two parts of a request, and returns the status of its answer; `None` if the connection ends without one.
fn exchange(address: SocketAddr, first: &str, second: &[u8]) -> Result<Option<::http::StatusCode>, String> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        let (mut reader, mut writer) = stream.split();
        let sending = async {
            writer.write_all(first.as_bytes()).await?;
            writer.write_all(second).await
        };
        let mut answer = Vec::new();
        // Both fail if the server closes the connection before it has received everything.
        let _ = tokio::join!(sending, reader.read_to_end(&mut answer));
        let line = String::from_utf8_lossy(&answer);
        let code = line.split(' ').nth(1);
        Ok(code.and_then(|code| code.parse::<::http::StatusCode>().ok()))
    };
    let limited = async { tokio::time::timeout(wait::extended(ANSWERED), exchange).await };
    RUNTIME
        .block_on(limited)
        .unwrap_or_else(|_| Err(format!("{address}: no answer in time")))
}
