//! R3: the cost of unauthenticated connections. A connection is unauthenticated until its first request is complete:
//! open without data, a partial preface, headers without an end, a partial message.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use libtest_mimic::Failed;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpSocket,
};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};

use super::{daemon, memory, secured};
use crate::support::{
    ads::AdsClient,
    agent::{Agent, Trust},
    daemon::Daemon,
    envoy::Node,
    http::{self, RUNTIME},
    wait,
};

/// Memory limit of an unauthenticated connection.
const ALLOWED_BYTES: usize = 64 << 10;
/// Memory limit of a connection whose bytes are buffered outside the connection's own limit: TLS records that have been
/// read but not consumed, and a partial message, which counts against a budget shared by all connections.
const ALLOWED_WAITING_BYTES: usize = 112 << 10;
/// The attack case with a partial message.
const PARTIAL_MESSAGE: &str = "partial message";
/// Number of connections of a flood.
const CONNECTIONS: usize = 10_000;
/// Number of connections of each attack case whose memory is measured.
const SAMPLE: usize = 256;

pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// An attack case: the bytes that a client sends before it stalls.
struct AttackCase {
    what: &'static str,
    sends: Vec<u8>,
}

pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a frame is small").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header field as a literal, without Huffman codes and tables.
pub(super) fn field(name: &str, value: &str) -> Vec<u8> {
    let mut out = vec![0];
    for text in [name, value] {
        // Seven bits of the length, then the rest in groups of seven.
        if text.len() < 127 {
            out.push(text.len() as u8);
        } else {
            out.push(127);
            prost::encoding::encode_varint((text.len() - 127) as u64, &mut out);
        }
        out.extend(text.as_bytes());
    }
    out
}

pub(super) fn headers(more: &[u8]) -> Vec<u8> {
    let path = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
    let fields = [
        b"\x83\x86".to_vec(),
        field(":path", path),
        field(":authority", "istiod"),
        field("content-type", "application/grpc"),
        more.to_vec(),
    ];
    fields.concat()
}

/// Inputs that are cheap for a client and may be expensive for a server.
fn attack_cases() -> Vec<AttackCase> {
    let opened = [PREFACE, &frame(4, 0, 0, &[])].concat();
    let after = |frames: Vec<Vec<u8>>| [opened.clone(), frames.concat()].concat();
    let case = |what, sends| AttackCase { what, sends };
    let large = field("authorization", &format!("Bearer {}", "x".repeat(12 << 10)));
    // Clients cannot send more than 64 KiB before the server enlarges the window.
    let message = [&b"\x00\x00\x3f\xff\xff"[..], &vec![0x1a; 16_379]].concat();
    let data: Vec<Vec<u8>> = (0..3).map(|_| frame(0, 0, 1, &message)).collect();
    let tiny_frames: Vec<Vec<u8>> = (0..15_000).map(|_| frame(0, 0, 1, b"\x00")).collect();
    let many = (0..90).map(|index| frame(1, 4, 2 * index + 1, &headers(&large)));
    vec![
        case("nothing", Vec::new()),
        case("partial preface", PREFACE[..10].to_vec()),
        case("preface and settings", opened.clone()),
        case("headers without an end", after(vec![frame(1, 0, 1, &headers(&large))])),
        case(
            "endless header continuation",
            after(
                std::iter::once(frame(1, 0, 1, &headers(&[])))
                    .chain((0..64).map(|_| frame(9, 0, 1, &field("x", "y").repeat(100))))
                    .collect(),
            ),
        ),
        case("stream without a message", after(vec![frame(1, 4, 1, &headers(&[]))])),
        case("streams with large headers", after(many.collect())),
        case(
            PARTIAL_MESSAGE,
            after([vec![frame(1, 4, 1, &headers(&[]))], data].concat()),
        ),
        case(
            "message in tiny frames",
            after([vec![frame(1, 4, 1, &headers(&[]))], tiny_frames].concat()),
        ),
        case("pings", after((0..2000).map(|_| frame(6, 0, 0, &[7; 8])).collect())),
        case("settings", after((0..2000).map(|_| frame(4, 0, 0, &[])).collect())),
        case(
            "partial TLS record",
            [&b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb\x03\x03"[..], &[0x42; 8 << 10]].concat(),
        ),
        case("TLS record with a wrong length", b"\x16\x03\x01\xff\xff".to_vec()),
    ]
}

pub(super) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

pub(super) type Stream = Box<dyn Duplex>;

/// Opens connections that each send some bytes and then stall. They use different source addresses.
async fn connect(port: u16, tls: Option<&TlsConnector>, number: usize, sends: &[u8]) -> Vec<Stream> {
    let mut streams = Vec::with_capacity(number);
    for index in 0..number {
        let socket = TcpSocket::new_v4().expect("the limit of open files is high enough");
        let source = Ipv4Addr::new(127, 1, (index / 200) as u8, (index % 200) as u8 + 1);
        socket.bind((source, 0).into()).expect("loopback has these addresses");
        let connecting = async {
            let stream = socket.connect((Ipv4Addr::LOCALHOST, port).into()).await.ok()?;
            let Some(tls) = tls else {
                return Some(Box::new(stream) as Stream);
            };
            let name = ServerName::try_from("istiod.istio-system.svc").expect("the server name is valid");
            let stream = tls.connect(name, stream).await.ok()?;
            Some(Box::new(stream) as Stream)
        };
        let Ok(Some(mut stream)) = tokio::time::timeout(Duration::from_secs(30), connecting).await else {
            continue;
        };
        // The server need not read it.
        let _ = tokio::time::timeout(Duration::from_millis(500), stream.write_all(sends)).await;
        streams.push(stream);
    }
    streams
}

/// Raises the limit of open files of this process and the daemon to the maximum: the usual 1024 are too few for ten
/// thousand connections.
fn allow_files(id: u32) {
    let raised = std::process::Command::new("prlimit")
        .args(["--nofile=20000:20000", "--pid", &id.to_string()])
        .status();
    if !raised.is_ok_and(|status| status.success()) {
        println!("cannot raise the limit of open files of process {id}");
    }
}

/// Returns the memory of a process once it is stable.
fn stable_memory(id: u32) -> Result<usize, String> {
    let (mut last, _) = memory(id)?;
    for _ in 0..10 {
        std::thread::park_timeout(Duration::from_millis(200));
        let (now, _) = memory(id)?;
        if now.abs_diff(last) < 256 << 10 {
            return Ok(now);
        }
        last = now;
    }
    Ok(last)
}

pub(super) fn unauthenticated_connections_use_bounded_memory() -> Result<(), Failed> {
    let (daemon, _) = daemon("bounds-unauthenticated")?;
    each_case_uses_bounded_memory(&daemon, daemon.xds, None, SAMPLE, attack_cases())
}

pub(super) fn unauthenticated_tls_connections_use_bounded_memory() -> Result<(), Failed> {
    let daemon = secured("bounds-unauthenticated-tls")?;
    let (shaking, speaking): (Vec<_>, Vec<_>) = attack_cases()
        .into_iter()
        .partition(|case| !case.sends.starts_with(b"PRI "));
    each_case_uses_bounded_memory(&daemon, daemon.secure, None, SAMPLE, shaking)?;
    // TLS handshakes of an unoptimised daemon are slow, so this uses fewer connections.
    let tls = Agent::new(daemon.secure, Trust::Anything).tls(None)?;
    let tls = TlsConnector::from(Arc::new(tls));
    each_case_uses_bounded_memory(&daemon, daemon.secure, Some(&tls), SAMPLE / 2, speaking)
}

fn each_case_uses_bounded_memory(
    daemon: &Daemon,
    port: u16,
    tls: Option<&TlsConnector>,
    sample: usize,
    attack_cases: Vec<AttackCase>,
) -> Result<(), Failed> {
    allow_files(daemon.process.id);
    allow_files(std::process::id());
    // Warm-up: shared structures are allocated now.
    drop(RUNTIME.block_on(connect(port, tls, 32, &attack_cases[attack_cases.len() / 2].sends)));
    let mut expensive = Vec::new();
    for case in attack_cases {
        let before = stable_memory(daemon.process.id)?;
        let streams = RUNTIME.block_on(connect(port, tls, sample, &case.sends));
        let grown = stable_memory(daemon.process.id)?.saturating_sub(before);
        let each = grown / streams.len().max(1);
        println!("bounds: {each} bytes per connection: {}", case.what);
        let waits = tls.is_some() || case.what == PARTIAL_MESSAGE;
        let allowed = if waits { ALLOWED_WAITING_BYTES } else { ALLOWED_BYTES };
        if each > allowed || streams.len() < sample {
            expensive.push(format!("{}: {each} bytes for each of {}", case.what, streams.len()));
        }
        // Kept until the measurement is done; otherwise the next case would reuse their memory.
        drop(streams);
    }
    if expensive.is_empty() {
        return Ok(());
    }
    Err(format!(
        "unauthenticated connections use too much memory\n{}",
        expensive.join("\n")
    )
    .into())
}

pub(super) fn slow_clients_do_not_delay_others() -> Result<(), Failed> {
    let (daemon, _) = daemon("bounds-crowd")?;
    flood(
        &daemon,
        daemon.xds,
        [0, 1, 2, 3, 5].map(|index| attack_cases().swap_remove(index)).into(),
    )
}

pub(super) fn slow_tls_clients_do_not_delay_others() -> Result<(), Failed> {
    let daemon = secured("bounds-crowd-tls")?;
    let slow =
        |case: &AttackCase| ["nothing", "partial TLS record", "TLS record with a wrong length"].contains(&case.what);
    flood(
        &daemon,
        daemon.secure,
        attack_cases().into_iter().filter(slow).collect(),
    )
}

pub(super) fn slow_page_clients_do_not_delay_others() -> Result<(), Failed> {
    let (daemon, _) = daemon("bounds-crowd-pages")?;
    let case = |what, sends: &[u8]| AttackCase {
        what,
        sends: sends.to_vec(),
    };
    let attack_cases = vec![
        case("nothing", b""),
        case("one byte", b"P"),
        case("partial request head", b"GET /ready HTTP/1.1\r\nhost: x\r\nx-"),
        case(
            "complete request, response not read",
            b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n",
        ),
        case(
            "partial body",
            b"POST /ready HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nx",
        ),
    ];
    flood(&daemon, daemon.http.port(), attack_cases)
}

/// Opens ten thousand connections that send nothing, or stall.
fn flood(daemon: &Daemon, port: u16, attack_cases: Vec<AttackCase>) -> Result<(), Failed> {
    // One flood at a time: each uses all open files that this process may have.
    static FLOODING: Mutex<()> = Mutex::new(());
    let _alone = FLOODING.lock().unwrap_or_else(PoisonError::into_inner);
    allow_files(daemon.process.id);
    allow_files(std::process::id());
    let before = stable_memory(daemon.process.id)?;
    let mut flood = Vec::new();
    for case in &attack_cases {
        flood.extend(RUNTIME.block_on(connect(port, None, CONNECTIONS / attack_cases.len(), &case.sends)));
    }
    let started_at = wait::now();
    served(daemon)?;
    let grown = memory(daemon.process.id)?.1.saturating_sub(before);
    println!(
        "bounds: {} stalled clients, {grown} bytes, proxy served after {:?}",
        flood.len(),
        started_at.elapsed()
    );
    if flood.len() < CONNECTIONS * 9 / 10 {
        return Err(format!("only {} of {CONNECTIONS} clients connected", flood.len()).into());
    }
    if grown > CONNECTIONS * ALLOWED_BYTES {
        return Err(format!("{} unauthenticated connections use {grown} bytes", flood.len()).into());
    }
    // Stalled connections are closed after a timeout.
    RUNTIME.block_on(async {
        let ended = tokio::time::timeout(Duration::from_mins(1), all_ended(flood)).await;
        ended.map_err(|_| Failed::from("stalled clients are still connected after a minute"))
    })?;
    served(daemon)
}

/// Reads until the server has closed every connection.
async fn all_ended(flood: Vec<Stream>) {
    let mut buffer = [0; 4096];
    for mut stream in flood {
        while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
    }
}

/// Checks that a new proxy gets its configuration, and that pages are served.
fn served(daemon: &Daemon) -> Result<(), Failed> {
    let node = Node {
        id: "sidecar~10.0.0.9~reader.app~app.svc.cluster.local".into(),
        metadata: serde_json::json!({ "NAMESPACE": "app", "CLUSTER_ID": "Kubernetes" }),
    };
    let client = AdsClient::connect(daemon.xds, &node);
    let resources = client.until("a configured proxy", Duration::from_secs(30), |resources| {
        Some(resources.len())
    })?;
    if resources == 0 {
        return Err("a new proxy gets no configuration".into());
    }
    let ready = http::get(daemon.http, "istiod", "/ready")?;
    if !ready.status.is_success() {
        return Err(format!("/ready: {}", ready.status).into());
    }
    Ok(())
}
