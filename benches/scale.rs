//! The cost of thousands of sidecars: the server's CPU seconds and memory, and the time until a change has reached all
//! of them.
//!
//! `scale` runs every case and prints a table with goals, figures and those in `benches/figures.json`; `--keep` writes
//! them there. Names of cases select them (`sotw`, `delta`, `many`, `reconnect`, `churn`, `tracked`, `large`,
//! `ambient`). `--api` reads the mesh from a real API server instead of a folder, and `--own` makes every proxy a
//! separate workload.
//!
//! `soak` runs only where it is named: a hundred thousand connections and changes, after which the daemon must not use
//! more memory than before (`--part 0.01` for a hundredth of it). The proxies run on the server's machine, so latencies
//! are meaningful only on an otherwise idle machine; CPU seconds and memory are those of the server alone.

mod ads_stream;
mod ambient;
mod churn;
mod fleet;
pub(crate) mod mesh;
mod proxy;
mod report;
mod soak;
mod source;
mod ticker;
mod tracked;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::support;
use crate::usage::Usage;
use churn::Churn;
use fleet::{Load, Plan, Times};
use mesh::Mesh;
use report::Report;
use source::Source;
use ticker::Ticker;

use support::ads::Type;
use support::daemon::Daemon;
use support::wait;

/// Number of repetitions of each change.
const ROUNDS: usize = 5;
/// Time after which the effects of a change, or of many proxies, are over.
const QUIET: Duration = Duration::from_secs(3);

/// The command line arguments.
struct Options {
    cases: Vec<String>,
    keep: bool,
    /// True if the mesh comes from an API server.
    api: bool,
    /// True if every proxy is a separate workload.
    own: bool,
    /// The part of a soak to run.
    part: f64,
}

/// A case in which proxies are configured and then receive changes.
struct Case {
    name: &'static str,
    services: usize,
    plan: Plan,
    goals: Goals,
}

/// Upper limits of the figures.
struct Goals {
    cpu_seconds: f64,
    highest_mib: f64,
    /// CPU-seconds and the 99th percentile in milliseconds of a changed EndpointSlice.
    endpoints: (f64, f64),
    /// The same for a changed VirtualService.
    routes: (f64, f64),
}

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let mut options = Options {
        cases: Vec::new(),
        keep: false,
        api: false,
        own: false,
        part: 1.0,
    };
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--keep" => options.keep = true,
            "--api" => options.api = true,
            "--own" => options.own = true,
            "--part" => {
                let part = arguments.next().and_then(|part| part.parse().ok());
                options.part = part.ok_or("--part must be a number")?;
            }
            case => options.cases.push(case.to_owned()),
        }
    }
    measure(&options)
}

fn measure(options: &Options) -> Result<(), String> {
    let open_files = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: open_files.maximum,
        ..open_files
    };
    setrlimit(Resource::Nofile, all).map_err(|error| error.to_string())?;
    if options.cases.iter().any(|case| case == "soak") {
        return soak::run(options.part);
    }
    let mut report = Report::default();
    let is_selected = |name: &str| options.cases.is_empty() || options.cases.iter().any(|case| case == name);
    let plan = |proxies: usize, ramp: u64, is_delta: bool, workloads: usize| Plan {
        proxies,
        workloads: if options.own { proxies } else { workloads },
        namespaces: 50,
        ramp: Duration::from_secs(ramp),
        is_delta,
    };
    if is_selected("sotw") {
        let case = Case {
            name: "200 sidecars, SotW, 1000 services",
            services: 1000,
            plan: plan(200, 10, false, 50),
            goals: Goals {
                cpu_seconds: 5.0,
                highest_mib: 350.0,
                endpoints: (0.05, 150.0),
                routes: (0.8, 1500.0),
            },
        };
        configured(options, &mut report, &case)?;
    }
    if is_selected("delta") {
        let case = Case {
            name: "2000 sidecars, delta, 200 services",
            services: 200,
            plan: plan(2000, 5, true, 500),
            goals: Goals {
                cpu_seconds: 8.0,
                highest_mib: 400.0,
                endpoints: (0.1, 200.0),
                routes: (1.0, 1000.0),
            },
        };
        configured(options, &mut report, &case)?;
    }
    if is_selected("many") {
        let case = Case {
            name: "10000 sidecars, delta, 200 services",
            services: 200,
            plan: plan(10_000, 25, true, 2500),
            goals: Goals {
                cpu_seconds: 6.0,
                highest_mib: 500.0,
                endpoints: (0.15, 1000.0),
                routes: (0.6, 2000.0),
            },
        };
        configured(options, &mut report, &case)?;
    }
    if is_selected("reconnect") {
        reconnected(options, &mut report, plan(5000, 30, true, 1250))?;
    }
    if is_selected("churn") {
        churned(&mut report, plan(2000, 5, true, 500))?;
    }
    if is_selected("tracked") {
        tracked::run(&mut report, plan(2000, 5, true, 500))?;
    }
    if is_selected("large") {
        large(&mut report)?;
    }
    if is_selected("ambient") {
        ambient::run(&mut report)?;
    }
    report.print(options.keep)
}

fn sized(services: usize) -> Mesh {
    Mesh {
        services,
        endpoints: 5,
        namespaces: 50,
    }
}

/// A mesh in its source, and a daemon that serves it.
fn served(options: &Options, name: &str, services: usize) -> Result<(Source, Daemon), String> {
    let source = if options.api {
        Source::cluster(name, sized(services))?
    } else {
        Source::folder(name, sized(services))?
    };
    let log = support::scratch(&format!("bench/scale/{name}/daemon")).join("istiod.log");
    let daemon = source.daemon(&log)?;
    Ok((source, daemon))
}

fn label(options: &Options, name: &str) -> String {
    let source = if options.api { "API server" } else { "folder" };
    let own = if options.own { ", each its own workload" } else { "" };
    format!("{name}{own}, {source}")
}

fn address(daemon: &Daemon) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], daemon.xds))
}

fn rest() {
    let started_at = wait::now();
    // A fixed pause.
    let _ = wait::until("quiet", QUIET, || (started_at.elapsed() >= QUIET).then_some(()));
}

/// Configures proxies, then changes one EndpointSlice and one VirtualService.
fn configured(options: &Options, report: &mut Report, case: &Case) -> Result<(), String> {
    let name = label(options, case.name);
    let (source, daemon) = served(options, &case.name.replace([' ', ','], "-"), case.services)?;
    rest();
    let before = Usage::of(&daemon.process)?;
    let mut load = Load::new(address(&daemon), case.plan);
    let times = load.connect(case.plan.ramp)?;
    rest();
    let after = Usage::of(&daemon.process)?;
    let cpu = after.cpu_seconds - before.cpu_seconds;
    report.goal(&name, "CPU-s to configure", case.goals.cpu_seconds, cpu);
    report.goal(&name, "MiB peak", case.goals.highest_mib, after.highest_mib);
    report.note(&name, "MiB without proxies", before.resident_mib);
    report.note(&name, "MiB configured", after.resident_mib);
    report.note(&name, "s until all are configured", times.all);
    report.note(&name, "s for one, p99", times.p99);
    report_responses(report, &name, &load);
    let mesh = sized(case.services);
    changed(
        report,
        &format!("{name}: EndpointSlice"),
        (&daemon, &load),
        case.goals.endpoints,
        |round| {
            let write = || source.put(&mesh.slice(0, round));
            load.converge(Type::Endpoints, &mesh::moved(0, round), write)
        },
    )?;
    changed(
        report,
        &format!("{name}: VirtualService"),
        (&daemon, &load),
        case.goals.routes,
        |round| {
            let write = || source.put(&mesh.virtual_service(0, round));
            load.converge(Type::Route, &mesh::path(round), write)
        },
    )?;
    report.note(&name, "MiB at end", Usage::of(&daemon.process)?.resident_mib);
    report.goal(&name, "broken streams", 0.0, load.sums().broken as f64);
    Ok(())
}

/// Reports the responses so far.
fn report_responses(report: &mut Report, name: &str, load: &Load) {
    let sums = load.sums();
    report.note(name, "responses", sums.responses as f64);
    report.note(name, "resources", sums.resources as f64);
    report.note(name, "MiB received", sums.bytes as f64 / f64::from(1 << 20));
}

fn changed(
    report: &mut Report,
    name: &str,
    (daemon, load): (&Daemon, &Load),
    goals: (f64, f64),
    mut round: impl FnMut(usize) -> Result<Vec<Duration>, String>,
) -> Result<(), String> {
    let (mut cpu, mut waits) = (0.0, Vec::new());
    let bytes = load.sums().bytes;
    for number in 1..=ROUNDS {
        let before = Usage::of(&daemon.process)?;
        waits.extend(round(number)?);
        rest();
        cpu += Usage::of(&daemon.process)?.cpu_seconds - before.cpu_seconds;
    }
    let times = Load::times(waits);
    report.goal(name, "CPU-s for each", goals.0, cpu / ROUNDS as f64);
    report.goal(name, "ms to all, p99", goals.1, times.p99 * 1000.0);
    report.note(name, "ms to all, longest", times.all * 1000.0);
    let bytes = (load.sums().bytes - bytes) as f64 / ROUNDS as f64;
    report.note(name, "KiB received for each", bytes / 1024.0);
    Ok(())
}

/// Closes the connections of all proxies at once; they reconnect with the resources that they hold.
fn reconnected(options: &Options, report: &mut Report, plan: Plan) -> Result<(), String> {
    const SERVICES: usize = 200;
    let name = label(options, "5000 sidecars reconnect at once, delta, 200 services");
    let (_source, daemon) = served(options, "reconnect", SERVICES)?;
    let mut load = Load::new(address(&daemon), plan);
    load.connect(plan.ramp)?;
    rest();
    let (before, sums) = (Usage::of(&daemon.process)?, load.sums());
    load.disconnect();
    let Times { all, p99 } = load.connect(Duration::ZERO)?;
    rest();
    let (after, again) = (Usage::of(&daemon.process)?, load.sums());
    report.goal(&name, "s until all are current", 30.0, all);
    report.note(&name, "s for one, p99", p99);
    let bytes = (again.bytes_resent - sums.bytes_resent) as f64;
    report.goal(&name, "KiB of unchanged resources sent", 0.0, bytes / 1024.0);
    report.note(&name, "KiB received", (again.bytes - sums.bytes) as f64 / 1024.0);
    report.note(&name, "broken streams", (again.broken - sums.broken) as f64);
    report.note(&name, "CPU-s to reconnect", after.cpu_seconds - before.cpu_seconds);
    report.note(&name, "MiB before", before.resident_mib);
    report.note(&name, "MiB peak", after.highest_mib);
    Ok(())
}

/// Changes all services constantly for twenty seconds: endpoints, then routing.
fn churned(report: &mut Report, plan: Plan) -> Result<(), String> {
    const SERVICES: usize = 200;
    const SECONDS: usize = 20;
    let mesh = sized(SERVICES);
    let source = Source::spread("churn", mesh)?;
    let log = support::scratch("bench/scale/churn/daemon").join("istiod.log");
    let daemon = source.daemon(&log)?;
    let mut load = Load::new(address(&daemon), plan);
    load.connect(plan.ramp)?;
    rest();
    let name = "2000 sidecars, delta, 200 services, folder: churn of";
    let all_series: [ChangeSeries; 2] = [
        ChangeSeries {
            name: format!("{name} endpoints"),
            a_second: 100,
            churn: Churn::new(
                Type::Endpoints,
                mesh::MOVED,
                |[round, index]| (index - 1, round),
                SERVICES,
                plan.proxies,
            )?,
            write: |source, mesh, service, round| source.put(&mesh.slice(service, round)),
        },
        ChangeSeries {
            name: format!("{name} routes"),
            a_second: 20,
            churn: Churn::new(
                Type::Route,
                mesh::PATH,
                |[mark, _]| (mark % SERVICES, mark / SERVICES),
                SERVICES,
                plan.proxies,
            )?,
            write: |source, mesh, service, round| {
                source.put(&mesh.virtual_service(service, round * SERVICES + service))
            },
        },
    ];
    for series in all_series {
        let churn = Arc::new(series.churn);
        load.follow(Some(churn.clone()));
        let (before, sums) = (Usage::of(&daemon.process)?, load.sums());
        let (started_at, mut ticker) = (wait::now(), Ticker::new(series.a_second as f64));
        for number in 0..SECONDS * series.a_second {
            ticker.wait();
            let service = number % SERVICES;
            churn.writes(service);
            (series.write)(&source, mesh, service, 1 + number / SERVICES)?;
        }
        let written = started_at.elapsed();
        let waits = churn.settle(Duration::from_mins(2))?;
        rest();
        load.follow(None);
        let (after, name) = (Usage::of(&daemon.process)?, &series.name);
        let changes = churn.changes() as f64;
        report.note(name, "changes a second", changes / written.as_secs_f64());
        report.note(
            name,
            "CPU-ms for each change",
            (after.cpu_seconds - before.cpu_seconds) * 1000.0 / changes,
        );
        report.note(name, "ms to a proxy, p50", waits.p50);
        report.note(name, "ms to a proxy, p99", waits.p99);
        report.note(name, "ms to a proxy, longest", waits.longest);
        let bytes = (load.sums().bytes - sums.bytes) as f64;
        report.note(name, "KiB received for each change", bytes / changes / 1024.0);
        report.note(
            name,
            "responses for each proxy",
            (load.sums().responses - sums.responses) as f64 / plan.proxies as f64,
        );
        report.note(name, "MiB peak", after.highest_mib);
        report.goal(
            name,
            "broken streams",
            0.0,
            load.sums().broken as f64 - sums.broken as f64,
        );
    }
    Ok(())
}

/// A series of changes of one kind.
struct ChangeSeries {
    name: String,
    a_second: usize,
    churn: Churn,
    /// Writes a round of changes of a service.
    write: fn(&Source, Mesh, usize, usize) -> Result<(), String>,
}

/// Starts with a large mesh in a real API server, without proxies.
fn large(report: &mut Report) -> Result<(), String> {
    let mesh = Mesh {
        services: 10_000,
        endpoints: 10,
        namespaces: 200,
    };
    let name = "10000 services of 10 endpoints each, API server";
    let source = Source::cluster("large", mesh)?;
    let log = support::scratch("bench/scale/large/daemon").join("istiod.log");
    let started_at = wait::now();
    let daemon = source.daemon(&log)?;
    let ready = started_at.elapsed();
    rest();
    let usage = Usage::of(&daemon.process)?;
    report.goal(name, "s to ready", 15.0, ready.as_secs_f64());
    report.goal(name, "MiB peak", 600.0, usage.highest_mib);
    report.note(name, "MiB later", usage.resident_mib);
    report.note(name, "CPU-s", usage.cpu_seconds);
    Ok(())
}
