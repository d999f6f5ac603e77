//! Input from an unauthenticated connection: HTTP/2, gRPC messages, discovery requests, nodes.

use std::{collections::BTreeMap, hash::Hasher, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use clap::Parser;
use http::Request;
use http_body_util::{BodyExt, StreamBody};
use istiod::{
    environment::Environment,
    generate::{
        EncodedResource, Proxy, ResourceSnapshot, ResourceType,
        proxy::Extensions,
        resource::{PartResources, TypeResources, UnknownRoutes},
    },
    model::Revision,
    proto::envoy::config::{cluster::v3::Cluster, core::v3::Node},
    push::testing::manual_groups,
    rpc::{Connections, Peer, Router},
    settings::{DiscoveryFlags, Settings},
    xds::server::{Server, ServerOptions},
};
use prost::Message;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    runtime::Runtime,
    sync::watch,
};

use super::{Target, class_of, parts};

/// The bytes of a connection; the HTTP/2 preface may be omitted.
pub(super) const HTTP2: Target = Target {
    name: "http2",
    run: http2,
    words: &[
        PREFACE,
        b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\x00\x00\x04\x08\x00\x00\x00\x00\x01",
        b"\x00\x00\x04\x03\x00\x00\x00\x00\x01",
        b"\x00\x00\x08\x06\x00\x00\x00\x00\x00",
        b"\x00\x00\x08\x07\x00\x00\x00\x00\x00",
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x01",
        b"\x00\x00\x00\x01\x25\x00\x00\x00\x03",
        b"\x00\x00\x00\x09\x04\x00\x00\x00\x01",
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        b"application/grpc",
        b"grpc-encoding",
        b"content-length",
        b"transfer-encoding",
        b":path",
    ],
};

/// The gRPC messages of a state-of-the-world stream.
pub(super) const SOTW: Target = Target {
    name: "xds_sotw",
    run: |bytes| exchange("StreamAggregatedResources", bytes),
    words: WORDS,
};

/// The gRPC messages of a delta stream.
pub(super) const DELTA: Target = Target {
    name: "xds_delta",
    run: |bytes| exchange("DeltaAggregatedResources", bytes),
    words: WORDS,
};

/// A node as protobuf, or its id, cluster and metadata as texts.
pub(super) const NODE: Target = Target {
    name: "node",
    run: node,
    words: &[
        b"sidecar~10.0.0.1~a.b~b.svc.cluster.local",
        b"router~::1~",
        b"ztunnel~",
        b"INSTANCE_IPS",
        b"LABELS",
        b"STATIC_LABELS",
        b"PROXY_CONFIG",
        b"ISTIO_VERSION",
        b"REQUESTED_NETWORK_VIEW",
        b"ANNOTATIONS",
        b"NAMESPACE",
        b"{\"a\":",
        b"[",
        b"~",
        b"1e308",
    ],
};

const WORDS: &[&[u8]] = &[
    b"\x00\x00\x00\x00\x00",
    b"\x00\x00\x00\x00\x02\x10\x01",
    b"\x01\x00\x00\x00\x01",
    b"\x00\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"type.googleapis.com/envoy.config.cluster.v3.Cluster",
    b"type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
    b"type.googleapis.com/envoy.config.listener.v3.Listener",
    b"type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
    b"type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
    b"type.googleapis.com/istio.v1.HealthInformation",
    b"istio.io/debug/config_dump",
    b"*",
    b"\x0b\x0c",
    b"\x13\x14",
];

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// A time limit that only a hanging input exceeds.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    flags: DiscoveryFlags,
}

/// A server whose mesh has one cluster. It runs on the thread of the target.
struct Fixture {
    runtime: Runtime,
    router: Router<Server>,
    connections: Connections<Router<Server>>,
    _feed: watch::Sender<Option<Arc<ResourceSnapshot>>>,
}

impl Fixture {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime can be created");
        let flags = Line::try_parse_from(["istiod"]).expect("all flags have defaults").flags;
        let environment = Environment::new(Settings {
            flags,
            variables: BTreeMap::new(),
        });
        environment.ready.send_replace(true);
        let entered = runtime.enter();
        let (groups, feed) = manual_groups(&environment.tasks);
        let options = ServerOptions {
            // Bytes beyond the limit of an unauthenticated connection are not read, so its end is not seen either.
            pre_auth_timeout: Duration::from_millis(200),
            ..ServerOptions::default()
        };
        let server = Server::new(&environment, groups, options, None).expect("the registry is empty");
        let router = Router::new(server, Vec::new());
        drop(entered);
        feed.send_replace(Some(Arc::new(mesh())));
        Self {
            runtime,
            connections: Connections::new(
                router.clone(),
                router.streams().connection_options(),
                environment.tasks.clone(),
            ),
            router,
            _feed: feed,
        }
    }
}

fn mesh() -> ResourceSnapshot {
    let views = ResourceType::ALL.iter().map(|resource_type| {
        let mut part = PartResources::default();
        if *resource_type == ResourceType::Cluster {
            let resource = EncodedResource::new("a", &Cluster::default());
            part.digest = resource.version.value();
            part.resources.insert("a".into(), Arc::new(resource));
        }
        TypeResources {
            parts: [Arc::new(part)].into(),
            ..TypeResources::default()
        }
    });
    ResourceSnapshot::new(Revision(1), views.collect(), UnknownRoutes::Omitted)
}

thread_local! {
    static FIXTURE: Fixture = Fixture::new();
}

fn http2(bytes: &[u8]) -> u64 {
    let opening = [PREFACE, b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"].concat();
    let sent = if bytes.starts_with(b"P") {
        bytes.to_vec()
    } else {
        [&opening, bytes].concat()
    };
    let answer = FIXTURE.with(|fixture| {
        fixture.runtime.block_on(async {
            let (mut ours, theirs) = tokio::io::duplex(32 << 10);
            let address = SocketAddr::from(([127, 0, 0, 1], 1));
            let (mut reader, mut writer) = tokio::io::split(&mut ours);
            let serving = fixture.connections.connection(theirs, Peer::plaintext(address));
            let writing = async {
                // The server may close the connection at any point.
                let _ = writer.write_all(&sent).await;
                settle().await;
                let _ = writer.shutdown().await;
            };
            let mut answer = Vec::new();
            let exchanged = tokio::time::timeout(TIMEOUT, async {
                tokio::join!(serving, writing, reader.read_to_end(&mut answer))
            });
            assert!(exchanged.await.is_ok(), "the connection must end");
            settle().await;
            answer
        })
    });
    frames(&answer)
}

/// Lets other tasks run.
async fn settle() {
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
}

/// Returns the class of a response: its frames and errors.
fn frames(mut answer: &[u8]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    while let Some((head, rest)) = answer.split_first_chunk::<9>() {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let (payload, rest) = rest.split_at(length.min(rest.len()));
        hasher.write_u8(head[3]);
        // The error code comes first in RST_STREAM, and after the stream id in GOAWAY.
        match head[3] {
            3 => hasher.write(payload),
            7 => hasher.write(payload.get(4..8).unwrap_or_default()),
            _ => hasher.write_u8(head[4]),
        }
        answer = rest;
    }
    hasher.finish()
}

fn exchange(method: &str, bytes: &[u8]) -> u64 {
    let path = format!("/envoy.service.discovery.v3.AggregatedDiscoveryService/{method}");
    let mut pieces = Vec::new();
    let mut rest = bytes;
    // One message at a time with a part of the next one, so that messages arrive both whole and in parts.
    while !rest.is_empty() {
        let length = rest.get(1..5).map_or(rest.len(), |length| {
            let length = length.iter().fold(0, |length, byte| (length << 8) | usize::from(*byte));
            (length + 5 + length % 3).min(rest.len())
        });
        let (piece, after) = rest.split_at(length.max(1));
        pieces.push(Bytes::copy_from_slice(piece));
        rest = after;
    }
    let body = futures::stream::unfold(pieces.into_iter(), |mut pieces| async {
        settle().await;
        let piece = pieces.next()?;
        Some((Ok::<_, std::convert::Infallible>(http_body::Frame::data(piece)), pieces))
    });
    let request = Request::post(path)
        .header("content-type", "application/grpc")
        .body(StreamBody::new(Box::pin(body)))
        .expect("the request is valid");
    FIXTURE.with(|fixture| {
        fixture.runtime.block_on(async {
            let response = fixture.router.handle(request).await;
            let outcome = tokio::time::timeout(TIMEOUT, outcome(response.into_body())).await;
            outcome.expect("the stream ends")
        })
    })
}

/// Reads a response to its end, frame by frame: the next frame is written only after the previous one is dropped.
/// Returns the class of its status and size.
async fn outcome(mut body: impl http_body::Body<Data: bytes::Buf, Error = std::convert::Infallible> + Unpin) -> u64 {
    let (mut bytes, mut sort) = (0, 0);
    while let Some(Ok(frame)) = body.frame().await {
        if let Some(data) = frame.data_ref() {
            bytes += bytes::Buf::remaining(data);
        }
        let message = frame.trailers_ref().and_then(|trailers| trailers.get("grpc-message"));
        sort ^= message.map_or(1, |message| class_of(&String::from_utf8_lossy(message.as_bytes())));
    }
    sort.rotate_left(8) ^ bytes.min(4096) as u64
}

fn node(bytes: &[u8]) -> u64 {
    let [id, cluster, metadata] = parts(bytes).map(|part| String::from_utf8_lossy(part));
    let as_text = serde_json::from_str(&metadata)
        .map(|metadata| Proxy::new(&id, &cluster, metadata, "r/z".into(), Extensions::default()));
    let as_message = Node::decode(bytes).map(|node| Proxy::from_node(&node));
    let sort = |proxy: Result<Proxy, _>| match proxy {
        Ok(proxy) => {
            let _ = (
                proxy.node.ip_mode,
                proxy.node.is_proxyless(),
                proxy.labels(),
                proxy.metadata.values(),
            );
            2
        }
        Err::<Proxy, istiod::generate::proxy::NodeError>(error) => class_of(&error.to_string()),
    };
    as_text.map_or(0, sort) ^ as_message.map_or(1, sort).rotate_left(1)
}
