//! R20: the cost of admitted clients. Each attack runs beside an honest proxy, which connects again and again from the
//! same address. The proxy must be served, and memory must stay bounded.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt, future::BoxFuture, stream};
use istiod::proto::envoy::{
    config::core::v3,
    service::discovery::v3::{
        DiscoveryRequest, DiscoveryResponse,
        aggregated_discovery_service_client::AggregatedDiscoveryServiceClient as Client,
    },
};
use libtest_mimic::Failed;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Endpoint};

use super::{
    exact,
    flood::{PREFACE, field, frame, headers},
    memory,
};
use crate::support::{
    daemon::Daemon,
    http::{self, RUNTIME},
    scratch, wait,
};

/// The number of services of the mesh.
const SERVICES: usize = 300;
/// The duration of an attack.
const DURATION: Duration = Duration::from_secs(4);
/// The time limit of the honest proxy, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// The memory limit of the daemon, in MiB.
const MEMORY_MIB: usize = 640;

const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const ENDPOINT: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// The addresses of the daemon.
#[derive(Clone, Copy)]
struct Target {
    xds: u16,
    pages: SocketAddr,
    monitoring: SocketAddr,
}

/// The request of the honest proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Size {
    Small,
    /// Above the size that needs a permit.
    Large,
}

struct Attack {
    what: &'static str,
    honest: Size,
    /// Runs until it is cancelled. Counts connections that the daemon has closed.
    run: fn(Target, Arc<AtomicUsize>) -> BoxFuture<'static, ()>,
    /// True if the daemon must close connections of the attack.
    is_cut_off: bool,
}

fn attacks() -> Vec<Attack> {
    let attack = |what, run: fn(Target, Arc<AtomicUsize>) -> BoxFuture<'static, ()>| Attack {
        what,
        honest: Size::Small,
        run,
        is_cut_off: false,
    };
    let frames = |what, run| Attack {
        is_cut_off: true,
        ..attack(what, run)
    };
    vec![
        attack("no attack", |_, _| Box::pin(std::future::pending())),
        attack("headers by table index", |target, cut| {
            Box::pin(flood(target.xds, cut, repeated_headers))
        }),
        attack("many names", |target, _| Box::pin(many_names(target.xds))),
        Attack {
            honest: Size::Large,
            ..attack("large requests that stall", |target, _| {
                Box::pin(stalled_requests(target.xds))
            })
        },
        attack("first configurations that are not read", |target, _| {
            Box::pin(unread_configurations(target.xds))
        }),
        attack("config dumps", |target, _| {
            Box::pin(pages(target.pages, "/debug/config_dump?proxyID=held"))
        }),
        attack("metrics", |target, _| Box::pin(pages(target.monitoring, "/metrics"))),
        frames("settings", |target, cut| {
            Box::pin(flood(target.xds, cut, |_| frame(4, 0, 0, &[])))
        }),
        frames("pings", |target, cut| {
            Box::pin(flood(target.xds, cut, |_| frame(6, 0, 0, &[7; 8])))
        }),
        frames("priorities", |target, cut| {
            Box::pin(flood(target.xds, cut, |_| frame(2, 0, 1, &[0, 0, 0, 0, 9])))
        }),
        frames("window updates", |target, cut| {
            Box::pin(flood(target.xds, cut, |_| frame(8, 0, 0, &[0, 0, 0, 1])))
        }),
        frames("calls of unknown methods", |target, cut| {
            Box::pin(flood(target.xds, cut, unknown_call))
        }),
    ]
}

pub(super) fn admitted_clients_do_not_harm_others() -> Result<(), Failed> {
    let folder = scratch("bounds-attacks");
    let mesh = folder.join("mesh");
    fs::create_dir(&mesh).expect("target/ is writable");
    fs::write(mesh.join("objects.yaml"), objects()).expect("target/ is writable");
    let failures: Vec<String> = attacks()
        .into_iter()
        .filter_map(|attack| {
            let log = folder.join(format!("{}.log", attack.what));
            let failure = endured(&mesh, &log, &attack).err()?;
            Some(format!("{}: {failure}", attack.what))
        })
        .collect();
    if failures.is_empty() {
        return Ok(());
    }
    Err(failures.join("\n").into())
}

/// Runs one attack on a new daemon, and the honest proxy beside it.
fn endured(mesh: &Path, log: &Path, attack: &Attack) -> Result<(), String> {
    let daemon = Daemon::configured(log, |command| {
        exact(command).arg("--configDir").arg(mesh);
    })?;
    let (id, target) = (
        daemon.process.id,
        Target {
            xds: daemon.xds,
            pages: daemon.http,
            monitoring: daemon.monitoring,
        },
    );
    // The proxy whose configuration is dumped.
    let _held = RUNTIME.block_on(AdsStream::open(target.xds, "held", Vec::new()))?;
    RUNTIME.block_on(first_configuration(target.xds, attack.honest))?;
    let (before, cpu) = (memory(id).0, cpu_ticks(id));
    let cut_off = Arc::new(AtomicUsize::new(0));
    let running = RUNTIME.spawn((attack.run)(target, cut_off.clone()));
    let started_at = wait::now();
    let (mut waits, mut failure) = (Vec::new(), None);
    while started_at.elapsed() < DURATION && failure.is_none() {
        let asked_at = wait::now();
        let served = RUNTIME
            .block_on(async { tokio::time::timeout(PATIENCE, first_configuration(target.xds, attack.honest)).await });
        match served {
            Ok(Ok(())) => waits.push(asked_at.elapsed()),
            Ok(Err(error)) => failure = Some(format!("the honest proxy is refused: {error}")),
            Err(_) => failure = Some(format!("the honest proxy is not served within {PATIENCE:?}")),
        }
        std::thread::park_timeout(Duration::from_millis(50));
    }
    let (used, seconds) = (cpu_ticks(id) - cpu, started_at.elapsed().as_secs_f64());
    let is_cut_off = !attack.is_cut_off
        || wait::until("closed connections", PATIENCE, || {
            (cut_off.load(Ordering::Relaxed) > 0).then_some(())
        })
        .is_ok();
    running.abort();
    let peak = memory(id).1;
    waits.sort();
    let at = |share: f64| waits.get((waits.len() as f64 * share) as usize).or(waits.last());
    println!(
        "bounds: {}: {} served, p50 {:?}, p99 {:?}, {} MiB before, {} MiB at most, {} CPU-s in {seconds:.1} s, \
         {} closed",
        attack.what,
        waits.len(),
        at(0.5).unwrap_or(&PATIENCE),
        at(0.99).unwrap_or(&PATIENCE),
        before >> 20,
        peak >> 20,
        used as f64 / 100.0,
        cut_off.load(Ordering::Relaxed),
    );
    if let Some(failure) = failure {
        return Err(failure);
    }
    if peak > MEMORY_MIB << 20 {
        return Err(format!("{} MiB of memory", peak >> 20));
    }
    if !is_cut_off {
        return Err("no connection of the attack was closed".to_owned());
    }
    Ok(())
}

/// Services with one port each.
fn objects() -> String {
    let service = |number| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web-{number}, namespace: app}}\n\
             spec: {{clusterIP: 10.96.{}.{}, selector: {{app: web}}, ports: [{{name: http, port: 80}}]}}\n---\n",
            number / 250,
            number % 250 + 1
        )
    };
    (0..SERVICES).map(service).collect()
}

/// Returns the CPU time of a process, in hundredths of a second.
fn cpu_ticks(id: u32) -> usize {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields
        .skip(11)
        .take(2)
        .filter_map(|ticks| ticks.parse::<usize>().ok())
        .sum()
}

/// A stream of a client, with its first request sent.
struct AdsStream {
    requests: mpsc::Sender<DiscoveryRequest>,
    responses: Streaming<DiscoveryResponse>,
}

fn request(pod: &str, type_url: &str, names: Vec<String>) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(v3::Node {
            id: format!("sidecar~10.0.0.9~{pod}.app~app.svc.cluster.local"),
            ..Default::default()
        }),
        type_url: type_url.to_owned(),
        resource_names: names,
        ..Default::default()
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

async fn client(xds: u16) -> Result<Client<tonic::transport::Channel>, String> {
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{xds}")).map_err(text)?;
    let endpoint = endpoint.initial_stream_window_size(65_535);
    Ok(Client::new(endpoint.connect().await.map_err(text)?).max_decoding_message_size(256 << 20))
}

impl AdsStream {
    /// Subscribes to endpoints of these names, or to clusters.
    async fn open(xds: u16, pod: &str, names: Vec<String>) -> Result<Self, String> {
        Self::of_client(&mut client(xds).await?, pod, names).await
    }

    async fn of_client(
        client: &mut Client<tonic::transport::Channel>,
        pod: &str,
        names: Vec<String>,
    ) -> Result<Self, String> {
        let type_url = if names.is_empty() { CLUSTER } else { ENDPOINT };
        let (requests, outbox) = mpsc::channel(4);
        requests.send(request(pod, type_url, names)).await.map_err(text)?;
        let responses = client.stream_aggregated_resources(ReceiverStream::new(outbox)).await;
        Ok(Self {
            requests,
            responses: responses.map_err(text)?.into_inner(),
        })
    }

    async fn response(&mut self) -> Result<DiscoveryResponse, String> {
        let response = self.responses.message().await.map_err(text)?;
        response.ok_or_else(|| "the stream has ended".to_owned())
    }
}

/// Returns distinct names, each about 45 bytes long.
fn names(list: usize, number: usize) -> Vec<String> {
    let name = |name| format!("outbound|80||{list}-{name}.app.svc.cluster.local");
    (0..number).map(name).collect()
}

/// Connects as an honest proxy and returns when it is configured.
async fn first_configuration(xds: u16, size: Size) -> Result<(), String> {
    let mut proxy = AdsStream::open(xds, "honest", Vec::new()).await?;
    let clusters = proxy.response().await?;
    if clusters.resources.len() < SERVICES {
        return Err(format!("only {} clusters", clusters.resources.len()));
    }
    if size == Size::Large {
        let endpoints = request("honest", ENDPOINT, names(0, 2000));
        proxy.requests.send(endpoints).await.map_err(text)?;
        proxy.response().await?;
    }
    Ok(())
}

/// Opens ten connections, each with a stream that was answered, and floods them with frames, which are numbered.
async fn flood(xds: u16, cut_off: Arc<AtomicUsize>, next: fn(usize) -> Vec<u8>) {
    let floods = (0..10).map(|_| {
        let cut_off = cut_off.clone();
        async move {
            loop {
                if flooded(xds, next).await.is_err() {
                    cut_off.fetch_add(1, Ordering::Relaxed);
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    });
    stream::iter(floods).for_each_concurrent(None, |flood| flood).await;
}

/// Floods one connection until it is closed.
async fn flooded(xds: u16, next: fn(usize) -> Vec<u8>) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", xds)).await?;
    let first = prost::Message::encode_to_vec(&request("flood", ENDPOINT, names(9, 1)));
    let message = [&[0][..], &(first.len() as u32).to_be_bytes(), &first].concat();
    let opened = [
        PREFACE.to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &headers(&[])),
        frame(0, 0, 1, &message),
    ];
    stream.write_all(&opened.concat()).await?;
    let (mut reader, mut writer) = stream.into_split();
    let mut answered = 0;
    let mut buffer = vec![0; 16 << 10];
    // The head of the response, and the response.
    while answered < 200 {
        let read = reader.read(&mut buffer).await?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        answered += read;
    }
    let reading = async {
        while reader.read(&mut buffer).await? > 0 {}
        Err::<(), std::io::Error>(std::io::ErrorKind::UnexpectedEof.into())
    };
    let writing = async {
        let mut number = 0;
        loop {
            let frames: Vec<u8> = (number..number + 1000).flat_map(next).collect();
            number += 1000;
            writer.write_all(&frames).await?;
        }
    };
    tokio::select! {
        ended = reading => ended,
        ended = writing => ended,
    }
}

/// Returns a request whose headers are in the dynamic table: a few bytes are almost 4 KiB. The first one fills the
/// table.
fn repeated_headers(number: usize) -> Vec<u8> {
    let stream = 2 * number as u32 + 3;
    if number > 0 {
        return frame(1, 4, stream, &[0x83, 0x86, 0xc1, 0xc0, 0xbf, 0xbe]);
    }
    // Literals with incremental indexing begin with 0x40 instead of 0.
    let indexed = |name: &str, value: &str| {
        let mut field = field(name, value);
        field[0] = 0x40;
        field
    };
    let path = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
    let fields = [
        b"\x83\x86".to_vec(),
        indexed(":path", path),
        indexed(":authority", "istiod"),
        indexed("content-type", "application/grpc"),
        indexed("x-large", &"x".repeat(3600)),
    ];
    frame(1, 4, stream, &fields.concat())
}

fn unknown_call(number: usize) -> Vec<u8> {
    let fields = [
        b"\x83\x86".to_vec(),
        field(":path", "/unknown.Service/Method"),
        field(":authority", "istiod"),
        field("content-type", "application/grpc"),
    ];
    frame(1, 5, 2 * number as u32 + 3, &fields.concat())
}

/// Subscribes to distinct names on 100 streams of 4 connections.
async fn many_names(xds: u16) {
    let connections = (0..4).map(async |connection| {
        let Ok(mut client) = client(xds).await else { return };
        let mut held = Vec::new();
        for stream in 0..25 {
            let names = names(1 + 100 * connection + stream, 80_000);
            if let Ok(mut stream) = AdsStream::of_client(&mut client, "names", names).await {
                // Requests of one connection share its window, so they are sent one after the other.
                let _ = stream.response().await;
                held.push(stream);
            }
        }
        std::future::pending::<()>().await;
    });
    futures::future::join_all(connections).await;
}

/// Opens 16 connections each half second, which begin a request of 4 MiB and stall.
async fn stalled_requests(xds: u16) {
    let message = [&b"\x00\x00\x3f\xff\xff"[..], &vec![0x1a; 16_379]].concat();
    let sends = [
        PREFACE.to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &headers(&[])),
        frame(0, 0, 1, &message),
        frame(0, 0, 1, &[0x1a; 12_000]),
    ]
    .concat();
    let mut held = Vec::new();
    loop {
        for _ in 0..16 {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", xds)).await else {
                continue;
            };
            let _ = stream.write_all(&sends).await;
            held.push(stream);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Opens 40 streams a second, each of which asks for a first configuration and does not read it.
async fn unread_configurations(xds: u16) {
    let mut held = tokio::task::JoinSet::new();
    let mut ticks = tokio::time::interval(Duration::from_millis(25));
    for number in 0.. {
        ticks.tick().await;
        held.spawn(async move {
            let stream = AdsStream::open(xds, "unread", names(1000 + number, 12_000)).await;
            std::future::pending::<()>().await;
            drop(stream);
        });
    }
}

/// Requests a page over 50 connections, again and again.
async fn pages(address: SocketAddr, path: &'static str) {
    let readers = (0..50).map(async |_| {
        loop {
            if http::request(address, "istiod", path).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    });
    futures::future::join_all(readers).await;
}
