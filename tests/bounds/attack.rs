//! R20: the cost of admitted clients and of tenants. Each attack runs beside an honest proxy, which connects again and
//! again from the same address. The proxy must be served, and memory must stay bounded.
//!
//! `ATTACK_BIN` names an optimised daemon, and `ATTACK_ONLY` selects attacks by the start of their name. With
//! `ATTACK_SECONDS`, they run for so long, on a larger mesh, and the CPU time of an honest request is measured: time
//! with honest requests alternates with time without them, and the difference is theirs.

mod clients;
mod port;
mod tenant;
mod tokens;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::BoxFuture;
use libtest_mimic::Failed;

use self::{
    port::{AdsStream, ENDPOINT, Port, names, request, sidecar, text},
    tokens::Issuer,
};
use super::{exact, flood::frame, memory};
use crate::{
    secure::authority::Authority,
    support::{daemon::Daemon, http::RUNTIME, process, project, scratch, variable, wait},
};

/// The time limit of the honest proxy, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// The attempts of the honest proxy on a busy machine, where its own request may arrive as slowly as those that stall.
const ATTEMPTS: usize = 3;
/// The error for a client whose large request makes others wait.
const EVICTED: &str = "arrives slowly while others wait; try again";
/// The memory limit of the daemon, in MiB.
const MEMORY_MIB: usize = 640;
/// The interval at which honest requests begin and end in a measurement.
const SPAN: Duration = Duration::from_secs(2);

/// The size of a run.
#[derive(Clone, Copy)]
struct Scale {
    services: usize,
    duration: Duration,
    /// True if the figures are for people, so that limits do not apply.
    is_measurement: bool,
}

impl Scale {
    fn of_run() -> Self {
        let seconds = variable("ATTACK_SECONDS").and_then(|text| text.parse().ok());
        match seconds {
            None => Self {
                services: 300,
                duration: Duration::from_secs(3),
                is_measurement: false,
            },
            Some(seconds) => Self {
                services: 2000,
                duration: Duration::from_secs(seconds),
                is_measurement: true,
            },
        }
    }
}

/// The daemon as attackers and the honest proxy see it.
#[derive(Clone)]
struct Target {
    attackers: Port,
    honest: Port,
    pages: SocketAddr,
    monitoring: SocketAddr,
    mesh: PathBuf,
}

/// The request of the honest proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Size {
    Small,
    /// Above the size that needs a permit.
    Large,
    /// The first request is large.
    LargeFirst,
}

/// The ports of the attackers and of the honest proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ports {
    Plaintext,
    /// The secure port, with a certificate each.
    Secure,
    /// Attackers without credentials at the plaintext port, and an honest proxy at the secure one.
    Both,
    /// The secure port: attackers without a certificate, and an honest proxy with one. An issuer's tokens are accepted.
    Tokens,
    /// The port of the pages.
    Http,
}

/// Numbers of connections or requests of an attack, by their outcome.
#[derive(Default)]
struct Counts {
    /// The number of connections or requests that the daemon has accepted.
    reached: AtomicUsize,
    /// The number of connections that the daemon has closed.
    cut_off: AtomicUsize,
}

impl Counts {
    fn reach(&self) {
        self.reached.fetch_add(1, Ordering::Relaxed);
    }
}

struct Attack {
    what: &'static str,
    ports: Ports,
    honest: Size,
    /// Runs until it is cancelled.
    run: fn(Target, Arc<Counts>) -> BoxFuture<'static, ()>,
    /// True if the daemon must close connections of the attack.
    is_cut_off: bool,
}

impl Attack {
    fn at(self, what: &'static str, ports: Ports) -> Self {
        Self { what, ports, ..self }
    }

    fn with_requests(self, honest: Size) -> Self {
        Self { honest, ..self }
    }
}

fn attacks(scale: Scale) -> Vec<Attack> {
    let attack = |what, run: fn(Target, Arc<Counts>) -> BoxFuture<'static, ()>| Attack {
        what,
        ports: Ports::Plaintext,
        honest: Size::Small,
        run,
        is_cut_off: false,
    };
    let frames = |what, run| Attack {
        is_cut_off: true,
        ..attack(what, run)
    };
    let by_index = || {
        attack("headers by table index", |target, counts| {
            Box::pin(clients::flood(target.attackers, counts, clients::repeated_headers))
        })
    };
    let names = || {
        attack("many names", |target, counts| {
            Box::pin(clients::many_names(target.attackers, counts))
        })
    };
    let stalled = || {
        let stalled = attack("large requests that stall", |target, counts| {
            Box::pin(clients::stalled_requests(target.attackers, counts))
        });
        stalled.with_requests(Size::Large)
    };
    let stalled_frames = || {
        let stalled = attack("first frames that stall", |target, counts| {
            Box::pin(clients::stalled_frames(target.attackers, counts))
        });
        stalled.with_requests(Size::LargeFirst)
    };
    let unread = || {
        attack("first configurations that are not read", |target, counts| {
            Box::pin(clients::unread_configurations(target.attackers, counts))
        })
    };
    let settings = || {
        frames("settings", |target, counts| {
            Box::pin(clients::flood(target.attackers, counts, |_| frame(4, 0, 0, &[])))
        })
    };
    let mut attacks = vec![
        attack("no attack", |_, _| Box::pin(std::future::pending())),
        by_index(),
        names(),
        stalled(),
        stalled_frames(),
        unread(),
        attack("windows that stay closed", |target, counts| {
            Box::pin(clients::closed_windows(target.attackers, counts))
        }),
        attack("slow readers", |target, counts| {
            Box::pin(clients::slow_readers(target.attackers, counts))
        }),
        attack("config dumps", |target, counts| {
            Box::pin(clients::pages(target.pages, "/debug/config_dump?proxyID=held", counts))
        }),
        attack("metrics", |target, counts| {
            Box::pin(clients::pages(target.monitoring, "/metrics", counts))
        }),
        settings(),
        frames("pings", |target, counts| {
            Box::pin(clients::flood(target.attackers, counts, |_| frame(6, 0, 0, &[7; 8])))
        }),
        frames("priorities", |target, counts| {
            let priority = |_| frame(2, 0, 1, &[0, 0, 0, 0, 9]);
            Box::pin(clients::flood(target.attackers, counts, priority))
        }),
        frames("window updates", |target, counts| {
            let update = |_| frame(8, 0, 0, &[0, 0, 0, 1]);
            Box::pin(clients::flood(target.attackers, counts, update))
        }),
        frames("calls of unknown methods", |target, counts| {
            Box::pin(clients::flood(target.attackers, counts, clients::unknown_call))
        }),
        settings().at("settings at the HTTP port", Ports::Http),
        stalled().at("large requests that stall, honest proxy with TLS", Ports::Both),
        stalled_frames().at("first frames that stall, with TLS", Ports::Secure),
        by_index().at("headers by table index with TLS", Ports::Secure),
        unread().at("first configurations that are not read with TLS", Ports::Secure),
        // Their streams wait, so connections are not closed.
        attack("forged tokens", |target, counts| {
            Box::pin(tokens::forged(target.attackers, counts))
        })
        .at("forged tokens", Ports::Tokens),
    ];
    if scale.is_measurement {
        attacks.extend([
            attack("no attack with TLS", |_, _| Box::pin(std::future::pending()))
                .at("no attack with TLS", Ports::Secure),
            names().at("many names with TLS", Ports::Secure),
            stalled().at("large requests that stall with TLS", Ports::Secure),
            settings().at("settings with TLS", Ports::Secure),
            attack("tenant: subsets", |target, _| Box::pin(tenant::many_subsets(target))),
            attack("tenant: settings of ports", |target, _| {
                Box::pin(tenant::many_port_settings(target))
            }),
            attack("tenant: failover labels", |target, _| {
                Box::pin(tenant::many_failover_labels(target))
            }),
            attack("tenant: filter chains", |target, _| {
                Box::pin(tenant::many_chains(target))
            }),
            attack("tenant: listeners", |target, _| {
                Box::pin(tenant::many_listeners(target))
            }),
            attack("tenant: large routes", |target, _| {
                Box::pin(tenant::large_routes(target))
            }),
            attack("tenant: endpoints", |target, _| {
                Box::pin(tenant::many_endpoints(target))
            }),
        ]);
    }
    attacks
}

pub(super) fn admitted_clients_do_not_harm_others() -> Result<(), Failed> {
    let (folder, scale) = (scratch("bounds-attacks"), Scale::of_run());
    let authority = Authority::new("attacks");
    authority.plug_into(&folder.join("cacerts"));
    let only = variable("ATTACK_ONLY").unwrap_or_default();
    let failures: Vec<String> = attacks(scale)
        .into_iter()
        .filter(|attack| attack.what.starts_with(&only))
        .filter_map(|attack| {
            let failure = endured(&folder, &authority, &attack, scale).err()?;
            Some(format!("{}: {failure}", attack.what))
        })
        .collect();
    if failures.is_empty() {
        return Ok(());
    }
    Err(failures.join("\n").into())
}

/// Starts a daemon for an attack.
fn daemon(
    folder: &Path,
    authority: &Authority,
    issuer: &Issuer,
    attack: &Attack,
    scale: Scale,
) -> Result<(Daemon, Target), String> {
    let mesh = folder.join(attack.what);
    fs::create_dir(&mesh).expect("target/ is writable");
    fs::write(mesh.join("objects.yaml"), objects(scale.services)).expect("target/ is writable");
    let log = folder.join(format!("{}.log", attack.what));
    let daemon = match attack.ports {
        Ports::Plaintext | Ports::Http => Daemon::configured(&log, |command| {
            exact(measured(command)).arg("--configDir").arg(&mesh);
            if attack.ports == Ports::Http {
                command.arg("--grpcAddr=");
            }
        })?,
        Ports::Secure | Ports::Both | Ports::Tokens => Daemon::secured(&log, |command| {
            let command = exact(measured(command)).arg("--configDir").arg(&mesh);
            command.env("ROOT_CA_DIR", folder.join("cacerts"));
            if attack.ports == Ports::Tokens {
                command.env("JWT_RULE", issuer.rule());
            }
        })?,
    };
    let plaintext = match attack.ports {
        Ports::Http => Port::plaintext(daemon.http.port()),
        _ => Port::plaintext(daemon.xds),
    };
    let secure = |account| Port::secure(daemon.secure, authority, account);
    let (attackers, honest) = match attack.ports {
        Ports::Plaintext | Ports::Http => (plaintext.clone(), plaintext),
        Ports::Secure => (secure("attacker")?, secure("honest")?),
        Ports::Both => (plaintext, secure("honest")?),
        Ports::Tokens => (Port::unauthenticated(daemon.secure)?, secure("honest")?),
    };
    let target = Target {
        attackers,
        honest,
        pages: daemon.http,
        monitoring: daemon.monitoring,
        mesh,
    };
    Ok((daemon, target))
}

/// Makes a command start the binary that is measured, if there is one (`ATTACK_BIN`).
fn measured(command: &mut Command) -> &mut Command {
    if let Some(binary) = variable("ATTACK_BIN") {
        let mut other = Command::new(binary);
        other.env_clear().current_dir(project().join("target"));
        other.args(command.get_args());
        *command = other;
    }
    command
}

/// Runs one attack on a new daemon, and the honest proxy beside it.
fn endured(folder: &Path, authority: &Authority, attack: &Attack, scale: Scale) -> Result<(), String> {
    let issuer = Issuer::start();
    let (daemon, target) = daemon(folder, authority, &issuer, attack, scale)?;
    let id = daemon.process.id;
    // The proxy whose configuration is dumped.
    let _held = RUNTIME.block_on(AdsStream::open(&target.honest, "held", Vec::new()))?;
    let honest = Honest {
        port: target.honest.clone(),
        size: attack.honest,
        services: scale.services,
        process: id,
    };
    RUNTIME.block_on(honest.first_configuration())?;
    let (before, cpu) = (memory(id)?.0, process::cpu(id));
    let counts = Arc::new(Counts::default());
    let running = RUNTIME.spawn((attack.run)(target, counts.clone()));
    let started_at = wait::now();
    let mut served = Served::default();
    while started_at.elapsed() < scale.duration && served.failure.is_none() {
        let quiet = scale.is_measurement.then(|| honest.quiet());
        let span = if scale.is_measurement { SPAN } else { scale.duration };
        honest.connects(span, quiet, &mut served);
    }
    let used = process::cpu(id).saturating_sub(cpu).as_secs_f64();
    let seconds = started_at.elapsed().as_secs_f64();
    let happens = |what: &str, count: &AtomicUsize| {
        wait::until(what, PATIENCE, || (count.load(Ordering::Relaxed) > 0).then_some(())).is_ok()
    };
    let is_cut_off = !attack.is_cut_off || happens("closed connections", &counts.cut_off);
    // Measurements include attacks by objects.
    let is_idle = scale.is_measurement || attack.what.starts_with("no attack");
    let has_reached = is_idle || happens("an attack that reaches the daemon", &counts.reached);
    running.abort();
    if attack.ports == Ports::Tokens {
        let log = folder.join(format!("{}.log", attack.what));
        wait::until("a checked signature", PATIENCE, || {
            fs::read_to_string(&log).ok()?.contains(tokens::REFUSED).then_some(())
        })?;
    }
    let (_, peak) = memory(id).map_err(|error| served.failure.clone().unwrap_or(error))?;
    println!(
        "bounds: {}: {}, {} MiB before, {} MiB at most, {used:.2} CPU-s in {seconds:.1} s, {} closed",
        attack.what,
        served.figures(),
        before >> 20,
        peak >> 20,
        counts.cut_off.load(Ordering::Relaxed),
    );
    if let Some(failure) = served.failure {
        return Err(failure);
    }
    if peak > MEMORY_MIB << 20 && !scale.is_measurement {
        return Err(format!("{} MiB of memory", peak >> 20));
    }
    if !is_cut_off {
        return Err("no connection of the attack was closed".to_owned());
    }
    if !has_reached {
        return Err("the attack did not reach the daemon".to_owned());
    }
    Ok(())
}

/// The honest proxy.
struct Honest {
    port: Port,
    size: Size,
    services: usize,
    process: u32,
}

/// The figures of the honest proxy.
#[derive(Default)]
struct Served {
    waits: Vec<Duration>,
    /// The CPU time of a request in each span, in milliseconds: what the daemon uses beyond that of the span without
    /// requests before it.
    cpu: Vec<f64>,
    failure: Option<String>,
}

impl Served {
    fn figures(&self) -> String {
        let mut waits = self.waits.clone();
        waits.sort();
        let at = |share: f64| waits.get((waits.len() as f64 * share) as usize).or(waits.last());
        let number = waits.len();
        let mut cpu = self.cpu.clone();
        cpu.sort_by(f64::total_cmp);
        let cpu = cpu
            .get(cpu.len() / 2)
            .map(|median| format!(", {median:.1} CPU-ms each"));
        format!(
            "{number} served, p50 {:.1?}, p99 {:.1?}{}",
            at(0.5).unwrap_or(&PATIENCE),
            at(0.99).unwrap_or(&PATIENCE),
            cpu.unwrap_or_default()
        )
    }
}

impl Honest {
    /// Waits without requests. Returns the CPU time that the daemon uses in a second.
    fn quiet(&self) -> f64 {
        let (started_at, before) = (wait::now(), process::cpu(self.process));
        std::thread::park_timeout(SPAN);
        process::cpu(self.process).saturating_sub(before).as_secs_f64() / started_at.elapsed().as_secs_f64()
    }

    /// Connects again and again.
    fn connects(&self, span: Duration, quiet: Option<f64>, served: &mut Served) {
        let (started_at, before) = (wait::now(), process::cpu(self.process));
        let known = served.waits.len();
        while started_at.elapsed() < span && served.failure.is_none() {
            let asked_at = wait::now();
            let limit = wait::extended(PATIENCE);
            let connected = RUNTIME.block_on(async { tokio::time::timeout(limit, self.configured()).await });
            match connected {
                Ok(Ok(())) => served.waits.push(asked_at.elapsed()),
                Ok(Err(error)) => served.failure = Some(format!("the honest proxy is refused: {error}")),
                Err(_) => served.failure = Some(format!("the honest proxy is not served within {limit:?}")),
            }
            std::thread::park_timeout(Duration::from_millis(50));
        }
        if let Some(quiet) = quiet {
            let used = process::cpu(self.process).saturating_sub(before).as_secs_f64()
                - quiet * started_at.elapsed().as_secs_f64();
            let requests = served.waits.len() - known;
            served.cpu.push(used * 1000.0 / requests.max(1) as f64);
        }
    }

    /// Connects until it is configured. On a busy machine, it may be refused for the moment, but not again and again;
    /// on others it must not be refused.
    async fn configured(&self) -> Result<(), String> {
        let mut outcome = self.first_configuration().await;
        for _ in 1..ATTEMPTS {
            let is_busy = wait::extended(PATIENCE) > PATIENCE;
            if !is_busy || !outcome.as_ref().is_err_and(|error| error.contains(EVICTED)) {
                break;
            }
            outcome = self.first_configuration().await;
        }
        outcome
    }

    /// Connects and returns when it is configured.
    async fn first_configuration(&self) -> Result<(), String> {
        if self.size == Size::LargeFirst {
            let mut proxy = AdsStream::open(&self.port, "honest", names(0, 2000)).await?;
            return proxy.response().await.map(drop);
        }
        let mut proxy = AdsStream::open(&self.port, "honest", Vec::new()).await?;
        let clusters = proxy.response().await?;
        if clusters.resources.len() < self.services {
            return Err(format!("only {} clusters", clusters.resources.len()));
        }
        if self.size == Size::Large {
            let endpoints = request(&sidecar("honest"), ENDPOINT, names(0, 2000));
            proxy.requests.send(endpoints).await.map_err(text)?;
            proxy.response().await?;
        }
        Ok(())
    }
}

/// Services with one port each.
fn objects(services: usize) -> String {
    let service = |number| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web-{number}, namespace: app}}\n\
             spec: {{clusterIP: 10.96.{}.{}, selector: {{app: web}}, ports: [{{name: http, port: 80}}]}}\n---\n",
            number / 250,
            number % 250 + 1
        )
    };
    (0..services).map(service).collect()
}
