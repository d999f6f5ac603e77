//! The cost of following a change: the CPU seconds of VirtualService changes that a query awaits, or that clients of
//! the page see, compared with those of changes that are not followed. The three kinds of rounds alternate in each of
//! their orders, so that other load and the round before affect them alike, and the medians are compared, so that a
//! round during which the machine was slow does not count more than another. Queries about a change that has arrived
//! are measured too: they show the cost of a query without the spread of the rounds.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread::{JoinHandle, spawn};

use serde_json::Value;

use Followers::{Clients, Nobody, Query};

use super::fleet::{Load, Plan};
use super::mesh::{self, Mesh};
use super::report::Report;
use super::source::Source;
use super::{address, rest};
use crate::support;
use crate::support::ads::Type;
use crate::support::http;
use crate::usage::Usage;

const NAME: &str = "2000 sidecars, delta, 200 services: followed VirtualService";
/// Number of changes of each kind, a multiple of the number of orders.
const ROUNDS: usize = 18;
/// Number of queries about a change that has arrived.
const QUERIES: usize = 100;
/// Number of clients of the page.
const CLIENTS: usize = 20;

/// The followers of a change.
#[derive(Clone, Copy, Debug)]
enum Followers {
    Nobody,
    /// A query such as that of `istiod status --wait`.
    Query,
    /// Clients of the page.
    Clients,
}

/// The orders of the three kinds of rounds.
const ORDERS: [[Followers; 3]; 6] = [
    [Nobody, Query, Clients],
    [Query, Clients, Nobody],
    [Clients, Nobody, Query],
    [Query, Nobody, Clients],
    [Nobody, Clients, Query],
    [Clients, Query, Nobody],
];

/// A client that reads events about the mesh until it is dropped.
struct Client {
    stream: TcpStream,
    reader: Option<JoinHandle<u64>>,
}

impl Client {
    fn connect(monitoring: SocketAddr) -> std::io::Result<Client> {
        let mut stream = TcpStream::connect(monitoring)?;
        stream.write_all(b"GET /debug/status_events HTTP/1.1\r\nHost: istiod\r\n\r\n")?;
        let mut reading = stream.try_clone()?;
        let reader = spawn(move || {
            let (mut bytes, mut buffer) = (0, vec![0; 64 << 10]);
            while let Ok(read @ 1..) = reading.read(&mut buffer) {
                bytes += read as u64;
            }
            bytes
        });
        Ok(Client {
            stream,
            reader: Some(reader),
        })
    }

    /// Ends, and returns the number of bytes that it has read.
    fn end(mut self) -> u64 {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.reader
            .take()
            .and_then(|reader| reader.join().ok())
            .unwrap_or_default()
    }
}

/// Waits for the final report about this version of an object.
fn awaited(monitoring: SocketAddr, object: &Value) -> Result<Value, String> {
    let metadata = &object["metadata"];
    let text = |field: &str| metadata[field].as_str().unwrap_or_default();
    let path = format!(
        "/debug/status_events?kind=VirtualService&namespace={}&name={}&resourceVersion={}&timeout=60s",
        text("namespace"),
        text("name"),
        text("resourceVersion")
    );
    let answer = http::get(monitoring, "istiod", &path)?;
    let last = answer.body.lines().rev().find_map(|line| line.strip_prefix("data: "));
    let last = last.ok_or_else(|| format!("no report: {}", answer.body))?;
    serde_json::from_str(last).map_err(|error| error.to_string())
}

/// Returns an error unless this report says that all proxies acknowledged the change.
fn check_arrived(answer: &Value, proxies: usize) -> Result<(), String> {
    if answer["state"] == "Acknowledged" && answer["counts"]["acknowledged"] == proxies {
        return Ok(());
    }
    Err(format!(
        "the change has not arrived: {} {}",
        answer["state"], answer["counts"]
    ))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs the case.
pub(crate) fn run(report: &mut Report, plan: Plan) -> Result<(), String> {
    let mesh = Mesh {
        services: 200,
        endpoints: 5,
        namespaces: plan.namespaces,
    };
    let source = Source::cluster("tracked", mesh)?;
    let log = support::scratch("bench/scale/tracked/daemon").join("istiod.log");
    let daemon = source.daemon(&log)?;
    let mut load = Load::new(address(&daemon), plan);
    load.connect(plan.ramp)?;
    rest();
    let (mut cpu, mut bytes) = ([const { Vec::new() }; 3], 0);
    let mut round = 0;
    for order in ORDERS.iter().cycle().take(ROUNDS) {
        for followers in *order {
            round += 1;
            let clients = match followers {
                Clients => CLIENTS,
                Nobody | Query => 0,
            };
            let clients = (0..clients).map(|_| Client::connect(daemon.monitoring));
            let clients: Vec<Client> = clients.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
            rest();
            let before = Usage::of(&daemon.process)?;
            let mut query = None;
            let write = || {
                let stored = source.store(&mesh.virtual_service(0, round))?;
                if matches!(followers, Query) {
                    let monitoring = daemon.monitoring;
                    query = Some(spawn(move || awaited(monitoring, &stored)));
                }
                Ok(())
            };
            load.converge(Type::Route, &mesh::path(round), write)?;
            if let Some(query) = query {
                let answer = query.join().map_err(|_| "the query panicked")??;
                check_arrived(&answer, plan.proxies)?;
            }
            rest();
            cpu[followers as usize].push(Usage::of(&daemon.process)?.cpu_seconds - before.cpu_seconds);
            bytes += clients.into_iter().map(Client::end).sum::<u64>();
        }
    }
    for followers in [Nobody, Query, Clients] {
        eprintln!(
            "{NAME}: CPU-s of each round, followers: {followers:?}: {:.2?}",
            cpu[followers as usize]
        );
    }
    let [alone, query, clients] = cpu.map(median);
    report.note(NAME, "CPU-s for each", alone);
    report.goal(NAME, "times that, with a query", 1.05, query / alone);
    report.note(NAME, "times that, with 20 clients", clients / alone);
    let stored = source.store(&mesh.virtual_service(0, round + 1))?;
    load.converge(Type::Route, &mesh::path(round + 1), || Ok(()))?;
    rest();
    let before = Usage::of(&daemon.process)?;
    for _ in 0..QUERIES {
        check_arrived(&awaited(daemon.monitoring, &stored)?, plan.proxies)?;
    }
    let used = Usage::of(&daemon.process)?.cpu_seconds - before.cpu_seconds;
    report.note(NAME, "CPU-s for a query afterwards", used / QUERIES as f64);
    let each = bytes as f64 / (ROUNDS * CLIENTS) as f64;
    report.note(NAME, "KiB to each client", each / 1024.0);
    Ok(())
}
