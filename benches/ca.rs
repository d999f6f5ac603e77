//! Certificates signed per second, by kind of key, and the latency of a certificate request: on an idle daemon, and
//! while every proxy constantly receives new configuration.
//!
//! `ca` prints a table with the figures and those in `benches/figures.json`; `--keep` writes them there.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use istiod::ca::authority::{Authority, TtlLimits};
use istiod::ca::key::KeyKind;
use istiod::ca::plugged_in::BundleFiles;
use istiod::ca::self_signed::{Root, RootOptions};
use istiod::ca::signing::SigningRequest;
use istiod::proto::istio::v1::auth::IstioCertificateRequest;
use istiod::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;
use serde_json::json;
use tonic::transport::Channel;

use crate::support;

use support::ads::AdsClient;
use support::agent::{self, Agent, Certificate, ClientCredentials, Trust};
use support::daemon::Daemon;
use support::envoy::Node;
use support::figures;
use support::http::RUNTIME;
use support::wait;

const DAY: Duration = Duration::from_hours(24);
/// Duration of a rate measurement.
const SPAN: Duration = Duration::from_secs(5);
/// Number of requests in a latency measurement; a hundredth of them are slower than the figure.
const SAMPLES: usize = 1_000;
/// Interval between requests in a latency measurement.
const APART: Duration = Duration::from_millis(10);
/// Services of the mesh, and proxies that receive all of it.
const SERVICES: usize = 500;
const PROXIES: usize = 20;
/// Number of parallel connections when the daemon's rate is measured.
const CLIENTS: usize = 8;
/// The identity of the caller.
const IDENTITY: &str = "spiffe://cluster.local/ns/default/sa/bench";

type Figures = BTreeMap<String, f64>;

pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    report(&measure()?, arguments.iter().any(|argument| argument == "--keep"))
}

fn measure() -> Result<Figures, String> {
    let mut figures = Figures::new();
    let kinds = [("ECDSA P-256", KeyKind::P256), ("RSA 2048", KeyKind::Rsa(2048))];
    for (name, kind) in kinds {
        let authority = Ca::new(kind)?.authority;
        for (key, asked) in [("ECDSA", agent::KeyKind::Ecdsa), ("RSA", agent::KeyKind::Rsa)] {
            let rate = signed_in_process(&authority, asked)?;
            figures.insert(format!("a second on one core, CA {name}, key {key}"), rate);
        }
    }
    for (name, kind) in kinds {
        let fixture = Fixture::start(name, &Ca::new(kind)?)?;
        figures.insert(format!("a second of the daemon, CA {name}"), fixture.rate()?);
        let quiet = fixture.slow_answer()?;
        let busy = fixture.under_constant_pushes(|| fixture.slow_answer())?;
        figures.insert(format!("ms p99 while idle, CA {name}"), quiet);
        figures.insert(format!("ms p99 during constant pushes, CA {name}"), busy);
        figures.insert(format!("p99 during pushes / idle, CA {name}"), busy / quiet);
    }
    Ok(figures)
}

#[expect(clippy::disallowed_methods, reason = "certificates are signed with the current time")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// A CA with its files.
struct Ca {
    root: Root,
    authority: Authority,
}

impl Ca {
    fn new(key: KeyKind) -> Result<Self, String> {
        let options = RootOptions {
            lifetime: 365 * DAY,
            key,
        };
        let root = Root::new("cluster.local", &options, wall_clock()).map_err(|error| error.to_string())?;
        let bundle = root.bundle("bench".into(), &BundleFiles::default(), wall_clock());
        let authority = Authority::new(bundle, wall_clock()).map_err(|error| error.to_string())?;
        Ok(Self { root, authority })
    }

    /// Writes the files of a plugged-in CA.
    fn plug_into(&self, folder: &Path) -> Result<(), String> {
        std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
        let files = [
            ("ca-cert.pem", &self.root.certificate),
            ("root-cert.pem", &self.root.certificate),
            ("cert-chain.pem", &self.root.certificate),
            ("ca-key.pem", self.root.key.reveal()),
        ];
        files
            .into_iter()
            .try_for_each(|(name, text)| std::fs::write(folder.join(name), text).map_err(|error| error.to_string()))
    }

    /// The certificate that the caller already has.
    fn client(&self) -> Result<Certificate, String> {
        let (key, csr) = agent::signing_request(agent::KeyKind::Ecdsa);
        let issued = self.authority.issue(&request(&csr), wall_clock(), limits());
        let issued = issued.map_err(|error| error.to_string())?;
        Ok(Certificate {
            chain: issued.chain.concat(),
            key,
            roots: issued.roots,
        })
    }
}

fn limits() -> TtlLimits {
    TtlLimits { default: DAY, max: DAY }
}

fn request(csr: &str) -> SigningRequest {
    SigningRequest {
        csr: csr.as_bytes().to_vec(),
        identities: vec![IDENTITY.into()],
        lifetime: None,
        signer: "".into(),
    }
}

/// Returns certificates per second, signed sequentially.
fn signed_in_process(authority: &Authority, kind: agent::KeyKind) -> Result<f64, String> {
    let (_, csr) = agent::signing_request(kind);
    let request = request(&csr);
    let started_at = wait::now();
    let mut signed = 0_u32;
    while started_at.elapsed() < SPAN {
        let issued = authority.issue(&request, wall_clock(), limits());
        issued.map_err(|error| error.to_string())?;
        signed += 1;
    }
    Ok(f64::from(signed) / started_at.elapsed().as_secs_f64())
}

/// A daemon with a mesh, proxies and a workload that requests certificates.
struct Fixture {
    mesh: PathBuf,
    agent: Agent,
    client: Certificate,
    /// Proxies, which only receive.
    _proxies: Vec<AdsClient>,
    daemon: Daemon,
}

impl Fixture {
    fn start(name: &str, ca: &Ca) -> Result<Self, String> {
        let folder = support::scratch(&format!("bench/ca/{}", name.replace(' ', "-")));
        let (mesh, certificates) = (folder.join("mesh"), folder.join("cacerts"));
        std::fs::create_dir_all(&mesh).map_err(|error| error.to_string())?;
        ca.plug_into(&certificates)?;
        write(&mesh, "services.yaml", &services())?;
        write(&mesh, "mesh.yaml", "trustDomain: cluster.local\n")?;
        let daemon = Daemon::secured(&folder.join("istiod.log"), |command| {
            command.arg("--configDir").arg(&mesh).args(["-n", "istio-system"]);
            command.env("ROOT_CA_DIR", &certificates);
        })?;
        let proxies: Vec<AdsClient> = (0..PROXIES)
            .map(|index| AdsClient::connect(daemon.xds, &node(index)))
            .collect();
        for proxy in &proxies {
            proxy.first()?;
        }
        Ok(Self {
            agent: Agent::new(daemon.secure, Trust::Anything),
            mesh,
            client: ca.client()?,
            _proxies: proxies,
            daemon,
        })
    }

    fn channel(&self) -> Result<Channel, String> {
        let credentials = ClientCredentials::certificate(self.client.clone());
        RUNTIME.block_on(self.agent.channel(&credentials))
    }

    /// Returns certificates per second, requested over several connections at once.
    fn rate(&self) -> Result<f64, String> {
        let channels: Vec<Channel> = (0..CLIENTS).map(|_| self.channel()).collect::<Result<_, _>>()?;
        let (_, csr) = agent::signing_request(agent::KeyKind::Ecdsa);
        let started_at = wait::now();
        let askers: Vec<_> = channels
            .into_iter()
            .map(|channel| {
                let csr = csr.clone();
                RUNTIME.spawn(async move {
                    let mut signed = 0_u32;
                    while started_at.elapsed() < SPAN {
                        ask(channel.clone(), &csr).await?;
                        signed += 1;
                    }
                    Ok::<_, String>(signed)
                })
            })
            .collect();
        let mut signed = 0;
        for asker in askers {
            signed += RUNTIME.block_on(asker).map_err(|error| error.to_string())??;
        }
        Ok(f64::from(signed) / started_at.elapsed().as_secs_f64())
    }

    /// Returns the 99th percentile of the response time, in milliseconds.
    fn slow_answer(&self) -> Result<f64, String> {
        let channel = self.channel()?;
        let (_, csr) = agent::signing_request(agent::KeyKind::Ecdsa);
        let sampling = async {
            let mut pace = tokio::time::interval(APART);
            pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            let mut times = Vec::with_capacity(SAMPLES);
            for _ in 0..SAMPLES {
                pace.tick().await;
                let started_at = wait::now();
                ask(channel.clone(), &csr).await?;
                times.push(started_at.elapsed());
            }
            Ok::<_, String>(times)
        };
        let mut times = RUNTIME.block_on(sampling)?;
        times.sort_unstable();
        let slow = times.get(SAMPLES * 99 / 100).ok_or("no samples")?;
        Ok(slow.as_secs_f64() * 1000.0)
    }

    /// Runs `action` while the mesh config changes constantly, and with it every listener of every proxy.
    fn under_constant_pushes<T>(&self, action: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let ended = Arc::new(AtomicBool::new(false));
        let (over, mesh) = (ended.clone(), self.mesh.clone());
        let busy = std::thread::spawn(move || {
            let mut round = 0_u32;
            while !over.load(Ordering::Relaxed) {
                round += 1;
                let text = format!("trustDomain: cluster.local\naccessLogFile: /dev/stdout{}\n", round % 2);
                write(&mesh, "mesh.yaml", &text)?;
                std::thread::park_timeout(Duration::from_millis(100));
            }
            Ok::<_, String>(round)
        });
        let done = action();
        ended.store(true, Ordering::Relaxed);
        let rounds = busy
            .join()
            .map_err(|_| "the thread that changes the mesh config panicked".to_owned())??;
        if rounds < 10 || self.daemon.process.ended().is_some() {
            return Err(format!("only {rounds} changes of the mesh config"));
        }
        done
    }
}

async fn ask(channel: Channel, csr: &str) -> Result<(), String> {
    let request = IstioCertificateRequest {
        csr: csr.to_owned(),
        validity_duration: 3600,
        metadata: None,
    };
    let answer = IstioCertificateServiceClient::new(channel)
        .create_certificate(request)
        .await;
    answer.map(|_| ()).map_err(|status| status.to_string())
}

fn node(index: usize) -> Node {
    Node {
        id: format!("sidecar~10.9.0.{index}~client-{index}.ns-{index}~ns-{index}.svc.cluster.local"),
        metadata: json!({ "NAMESPACE": format!("ns-{index}"), "CLUSTER_ID": "Kubernetes", "ISTIO_VERSION": "1.30.3",
            "INSTANCE_IPS": format!("10.9.0.{index}"), "LABELS": {} }),
    }
}

fn services() -> String {
    (0..SERVICES).fold(String::new(), |mut text, index| {
        let address = format!("10.8.{}.{}", index >> 8, index & 255);
        let written = write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: svc-{index}, namespace: shop}}\nspec: {{clusterIP: {address}, \
             ports: [{{name: http, port: {}}}, {{name: tcp, port: {}}}]}}\n",
            8000 + index,
            18_000 + index
        );
        written.expect("writing to a string succeeds");
        text
    })
}

/// Replaces a file atomically, as editors and Kubernetes do.
fn write(folder: &Path, name: &str, text: &str) -> Result<(), String> {
    let draft = folder.join(format!(".{name}.draft"));
    let written = std::fs::write(&draft, text).and_then(|()| std::fs::rename(&draft, folder.join(name)));
    written.map_err(|error| error.to_string())
}

fn report(measured: &Figures, keep: bool) -> Result<(), String> {
    let kept = figures::kept("ca");
    println!("{SERVICES} services, {PROXIES} proxies that see all of them");
    println!(
        "on {}; kept figures are from {}\n",
        figures::machine(),
        figures::kept_on("ca")
    );
    println!("{:<52} {:>10} {:>10} {:>6}", "certificates", "now", "kept", "ratio");
    for (figure, value) in measured {
        let before = kept[figure].as_f64();
        let ratio = before.map_or("-".to_owned(), |before| format!("{:.2}", value / before));
        let before = before.map_or("-".to_owned(), |before| format!("{before:.1}"));
        println!("{figure:<52} {value:>10.1} {before:>10} {ratio:>6}");
    }
    let seen: Vec<_> = measured
        .iter()
        .map(|(name, value)| figures::Figure::new("", name, (value * 10.0).round() / 10.0))
        .collect();
    figures::seen("ca", &seen)?;
    if keep {
        let rounded: BTreeMap<&String, f64> = measured
            .iter()
            .map(|(name, value)| (name, (value * 10.0).round() / 10.0))
            .collect();
        figures::keep("ca", json!(rounded))?;
    }
    Ok(())
}
