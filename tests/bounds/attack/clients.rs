//! Attacks of clients: floods of frames, and requests or responses that occupy the daemon.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::{StreamExt, stream};
use istiod::proto::envoy::service::discovery::v3::DiscoveryRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

use super::{
    super::flood::{PREFACE, Stream, field, frame, headers},
    Counts,
    port::{AdsStream, CLUSTER, ENDPOINT, Port, names, request, sidecar},
};
use crate::support::http;

/// The setting of the initial window of streams (RFC 9113, section 6.5.2).
const INITIAL_WINDOW: u8 = 4;
/// The number of bytes that a slow reader reads in a second.
const SLOW_BYTES: usize = 1024;

/// Opens ten connections, each with a stream that was answered, and floods them with frames, which are numbered.
pub(super) async fn flood(port: Port, counts: Arc<Counts>, next: fn(usize) -> Vec<u8>) {
    repeated(&counts, || flooded(&port, &counts, next)).await;
}

/// Keeps ten connections of an attack open. Counts those that the daemon has closed.
pub(super) async fn repeated<A: Future<Output = std::io::Result<()>>>(counts: &Counts, attack: impl Fn() -> A) {
    let attacks = (0..10).map(|_| async {
        loop {
            if attack().await.is_err() {
                counts.cut_off.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    stream::iter(attacks).for_each_concurrent(None, |attack| attack).await;
}

/// Floods one connection until it is closed.
async fn flooded(port: &Port, counts: &Counts, next: fn(usize) -> Vec<u8>) -> std::io::Result<()> {
    let mut stream = port.open().await?;
    let message = framed(&request(&sidecar("flood"), ENDPOINT, names(9, 1)));
    let opened = [
        PREFACE.to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &headers(&[])),
        frame(0, 0, 1, &message),
    ];
    stream.write_all(&opened.concat()).await?;
    let (mut reader, writer) = tokio::io::split(stream);
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
    counts.reach();
    until_closed(reader, writer, next).await
}

/// Writes numbered frames until the connection is closed, and reads what arrives.
pub(super) async fn until_closed(
    mut reader: ReadHalf<Stream>,
    mut writer: WriteHalf<Stream>,
    next: fn(usize) -> Vec<u8>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 16 << 10];
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
pub(super) fn repeated_headers(number: usize) -> Vec<u8> {
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

pub(super) fn unknown_call(number: usize) -> Vec<u8> {
    let fields = [
        b"\x83\x86".to_vec(),
        field(":path", "/unknown.Service/Method"),
        field(":authority", "istiod"),
        field("content-type", "application/grpc"),
    ];
    frame(1, 5, 2 * number as u32 + 3, &fields.concat())
}

/// Subscribes to distinct names on 100 streams of 4 connections.
pub(super) async fn many_names(port: Port, counts: Arc<Counts>) {
    let connections = (0..4).map(async |connection| {
        let Ok(mut client) = port.client().await else { return };
        let mut held = Vec::new();
        for stream in 0..25 {
            let names = names(1 + 100 * connection + stream, 80_000);
            if let Ok(mut stream) = AdsStream::of_client(&mut client, "names", names).await {
                counts.reach();
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
pub(super) async fn stalled_requests(port: Port, counts: Arc<Counts>) {
    let begun = [begun_message(), frame(0, 0, 1, &[0x1a; 12_000])].concat();
    stalled(port, &counts, 16, &begun).await;
}

/// Opens 300 connections and then 16 each half second, which stall in the first frame of their first request.
pub(super) async fn stalled_frames(port: Port, counts: Arc<Counts>) {
    stalled(port, &counts, 300, &begun_message()[..8000]).await;
}

/// Returns a frame of 16 KiB that begins a message of 4 MiB.
fn begun_message() -> Vec<u8> {
    let message = [&b"\x00\x00\x3f\xff\xff"[..], &vec![0x1a; 16_379]].concat();
    frame(0, 0, 1, &message)
}

/// Opens connections, and 16 more each half second, which send this on their first stream and stall.
async fn stalled(port: Port, counts: &Counts, first: usize, data: &[u8]) {
    let opened = [PREFACE.to_vec(), frame(4, 0, 0, &[]), frame(1, 4, 1, &headers(&[]))];
    let sends = [&opened.concat(), data].concat();
    let mut held = Vec::new();
    loop {
        let new = if held.is_empty() { first } else { 16 };
        for _ in 0..new {
            let Ok(mut stream) = port.open().await else {
                continue;
            };
            if stream.write_all(&sends).await.is_ok() {
                counts.reach();
            }
            held.push(stream);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Opens 40 streams a second, each of which asks for a first configuration and does not read it.
pub(super) async fn unread_configurations(port: Port, counts: Arc<Counts>) {
    let mut held = tokio::task::JoinSet::new();
    let mut ticks = tokio::time::interval(Duration::from_millis(25));
    for number in 0.. {
        ticks.tick().await;
        let (port, counts) = (port.clone(), counts.clone());
        held.spawn(async move {
            let stream = AdsStream::open(&port, "unread", names(1000 + number, 12_000)).await;
            if stream.is_ok() {
                counts.reach();
            }
            std::future::pending::<()>().await;
            drop(stream);
        });
    }
}

/// Requests a page over 50 connections, again and again.
pub(super) async fn pages(address: SocketAddr, path: &'static str, counts: Arc<Counts>) {
    let readers = (0..50).map(async |_| {
        loop {
            match http::request(address, "istiod", path).await {
                Ok(answer) if answer.status.is_success() => counts.reach(),
                Ok(_) => {}
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    });
    futures::future::join_all(readers).await;
}

/// Returns the frame of a gRPC message.
fn framed(request: &DiscoveryRequest) -> Vec<u8> {
    let message = prost::Message::encode_to_vec(request);
    [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat()
}

/// Returns the first bytes of a connection with one stream, which requests clusters.
fn subscription(settings: &[u8]) -> Vec<u8> {
    let opened = [
        PREFACE.to_vec(),
        frame(4, 0, 0, settings),
        frame(1, 4, 1, &headers(&[])),
        frame(0, 0, 1, &framed(&request(&sidecar("slow"), CLUSTER, Vec::new()))),
    ];
    opened.concat()
}

/// Opens 40 connections a second that never open their windows.
pub(super) async fn closed_windows(port: Port, counts: Arc<Counts>) {
    let sends = subscription(&[0, INITIAL_WINDOW, 0, 0, 0, 0]);
    let mut held = tokio::task::JoinSet::new();
    let mut ticks = tokio::time::interval(Duration::from_millis(25));
    loop {
        ticks.tick().await;
        let (port, counts, sends) = (port.clone(), counts.clone(), sends.clone());
        held.spawn(async move {
            let mut stream = port.open().await?;
            stream.write_all(&sends).await?;
            counts.reach();
            let mut buffer = [0; 4096];
            while stream.read(&mut buffer).await? > 0 {}
            Ok::<_, std::io::Error>(())
        });
    }
}

/// Opens 300 connections that read one KiB a second each.
pub(super) async fn slow_readers(port: Port, counts: Arc<Counts>) {
    let readers = (0..300).map(|_| {
        let (port, counts) = (port.clone(), counts.clone());
        async move {
            loop {
                // The daemon has closed the connection.
                let _ = slow_reader(&port, &counts).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    });
    futures::future::join_all(readers).await;
}

async fn slow_reader(port: &Port, counts: &Counts) -> std::io::Result<()> {
    let mut stream = port.open_with_buffer(Some(4096)).await?;
    stream.write_all(&subscription(&[])).await?;
    let mut buffer = [0; SLOW_BYTES];
    let more = (SLOW_BYTES as u32).to_be_bytes();
    loop {
        if stream.read(&mut buffer).await? == 0 {
            return Ok(());
        }
        counts.reach();
        let windows = [frame(8, 0, 0, &more), frame(8, 0, 1, &more)].concat();
        stream.write_all(&windows).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
