//! The daemon as a process: flags, exit codes, signals, addresses, and the search for the config cluster.

use std::io::{ErrorKind, Read};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::json;

use crate::support::ads::{AdsClient, Resources};
use crate::support::daemon::{Daemon, istiod};
use crate::support::envoy::Node;
use crate::support::process::Process;
use crate::support::{http, ports, project, scratch, wait};

const DEADLINE: Duration = Duration::from_mins(1);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("command_line::exit_codes_are_istios", exit_codes_are_istios),
        Trial::test("command_line::readers_may_stop_early", readers_may_stop_early),
        Trial::test(
            "command_line::flags_may_precede_and_repeat",
            flags_may_precede_and_repeat,
        ),
        Trial::test(
            "command_line::ports_open_on_both_address_families",
            ports_open_on_both_address_families,
        ),
        Trial::test("command_line::user_signals_are_ignored", user_signals_are_ignored),
        Trial::test("command_line::logs_have_istios_forms", logs_have_istios_forms),
        Trial::test(
            "command_line::kubeconfigs_are_found_like_istios",
            kubeconfigs_are_found_like_istios,
        ),
        Trial::test(
            "command_line::missing_kubeconfig_is_waited_for",
            missing_kubeconfig_is_waited_for,
        ),
        Trial::test(
            "command_line::proxy_of_a_kubeconfig_is_used",
            proxy_of_a_kubeconfig_is_used,
        ),
        Trial::test(
            "command_line::aliases_of_clusters_apply_to_proxies",
            aliases_of_clusters_apply_to_proxies,
        ),
    ]
}

/// Runs the binary to its end and returns its exit code and its whole output.
fn run(words: &[&str]) -> Result<(Option<i32>, String), Failed> {
    let output = istiod().args(words).output()?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&text).into_owned()))
}

fn exit_codes_are_istios() -> Result<(), Failed> {
    for (line, code, text) in [
        ("", 0, "Usage:"),
        ("--help", 0, "Usage:"),
        ("--x version", 0, "Usage:"),
        ("version --short", 0, "client version: 1.30"),
        ("discovery --help", 0, "--kubeconfig"),
        ("discovery -z -h", 0, "--kubeconfig"),
        ("completion bash", 0, "--log_output_level"),
        ("completion zsh", 0, "#compdef istiod"),
        ("completion fish", 0, "complete -c istiod"),
        ("completion powershell", 0, "Register-ArgumentCompleter"),
        ("completion csh", 255, "csh"),
        ("nonsense", 255, "nonsense"),
        ("version --bogus", 255, "--bogus"),
        ("request GET", 255, "<PATH>"),
        ("wait virtualservice", 255, "NAME"),
        ("wait nonsense a.b", 255, "nonsense"),
        ("wait vs a.b --for=ever", 255, "--for"),
        ("wait vs a.b --threshold=2", 255, "from 0 to 1"),
        ("discovery word", 255, "word"),
        ("discovery --domain", 255, "--domain"),
        ("discovery --profile=maybe", 255, "--profile"),
        (
            "discovery --registries=Bogus",
            255,
            "service registry Bogus is not supported",
        ),
        (
            "discovery --registries=Mock,CloudFoundry",
            255,
            "--registries=CloudFoundry needs --cfConfig",
        ),
        (
            "discovery --tls-min-version=TLS1_2",
            255,
            "Only 1.2 and 1.3 are supported",
        ),
        (
            "discovery --clusterAliases=a=1,b=1",
            255,
            "More than one cluster alias for cluster id: 1",
        ),
        (
            "discovery --log_output_level=bogus",
            255,
            "Error: invalid output level 'bogus'\n",
        ),
        (
            "discovery --log_stacktrace_level=ads:loud",
            255,
            "Error: invalid output level 'ads:loud'\n",
        ),
        (
            "discovery --log_target=/nowhere/istiod.log",
            255,
            "Error: failed to open log target /nowhere/istiod.log: ",
        ),
        ("discovery --httpAddr=8080", 255, "missing port in address"),
        ("discovery --configDir=/nowhere", 255, "/nowhere"),
        ("discovery --kubeconfig=/nowhere/config", 255, "/nowhere/config"),
    ] {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (found, output) = run(&words)?;
        if found != Some(code) || !output.contains(text) {
            return Err(format!("{line:?}: exit code {found:?}, want {code} with {text:?}:\n{output}").into());
        }
    }
    Ok(())
}

/// A pipe without a reader ends commands without a message, such as that of a panic.
fn readers_may_stop_early() -> Result<(), Failed> {
    for line in ["version", "crds", "completion bash", "analyze --list-analyzers"] {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let output = istiod().args(line.split_whitespace()).stdout(writer).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*errors), (Some(255), ""), "{line}");
    }
    Ok(())
}

/// Starts `istiod discovery` for a folder or a cluster, without its other ports.
fn start(name: &str, configure: impl FnOnce(&mut Command)) -> Process {
    let mut command = istiod();
    command.args([
        "--ctrlz_port=0",
        "--httpsAddr=",
        "discovery",
        "--secureGRPCAddr=",
        "--grpcAddr=127.0.0.1:0",
    ]);
    command.arg("--monitoringAddr=localhost:");
    configure(&mut command);
    Process::start(&mut command, &scratch(name).join("istiod.log"))
}

fn sample() -> PathBuf {
    project().join("samples/helloworld")
}

/// Waits until the readiness page answers with this status.
fn until_status(process: &Process, address: SocketAddr, status: u16) -> Result<(), Failed> {
    wait::until(&format!("status {status} of {address}/ready"), DEADLINE, || {
        if let Some(ended) = process.ended() {
            return Some(Err(format!("the daemon exited: {ended}\n{}", process.log_tail())));
        }
        let answer = http::get(address, "istiod", "/ready").ok()?;
        (answer.status.as_u16() == status).then_some(Ok(()))
    })
    .map_err(|error| format!("{error}\n{}", process.log_tail()))??;
    Ok(())
}

fn flags_may_precede_and_repeat() -> Result<(), Failed> {
    let port = ports::free();
    let mut command = istiod();
    command.args(["--bogus", "60s", "--resync", "60s", "-n", "mesh", "--domain=a.b"]);
    command.args([
        "discovery",
        "--secureGRPCAddr=",
        "--grpcAddr=127.0.0.1:0",
        "--monitoringAddr=127.0.0.1:0",
    ]);
    command.args([
        "--httpsAddr=",
        "-y",
        "ns",
        "-z",
        "--domain=c.d",
        "--profile=0",
        "--log_as_json=T",
    ]);
    command
        .arg("--httpAddr=256.0.0.1:1")
        .arg(format!("--httpAddr=127.0.0.1:{port}"));
    command.arg("--configDir=/nowhere").arg("--configDir").arg(sample());
    let process = Process::start(&mut command, &scratch("command-line-flags").join("istiod.log"));
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    until_status(&process, address, 200)?;
    let services = http::get(address, "istiod", "/debug/registryz")?.body;
    assert!(
        services.contains(".c.d\"") && !services.contains(".a.b\""),
        "{services}"
    );
    let log = process.until_logged(&[
        "unknown flags ignored",
        "\"flags\":\"--bogus -y -z\"",
        "watches do not need it",
    ])?;
    assert!(log.starts_with('{'), "{log}");
    Ok(())
}

fn ports_open_on_both_address_families() -> Result<(), Failed> {
    let port = ports::free();
    let process = start("command-line-families", |command| {
        command
            .arg(format!("--httpAddr=:{port}"))
            .arg("--configDir")
            .arg(sample());
    });
    let ipv4 = SocketAddr::from(([127, 0, 0, 1], port));
    until_status(&process, ipv4, 200)?;
    // A peer of this machine is trusted with debug pages in either form of its address.
    let mut addresses = vec![ipv4];
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
        addresses.push(SocketAddr::from((Ipv6Addr::LOCALHOST, port)));
    }
    for address in addresses {
        let answer = http::get(address, "istiod", "/debug/syncz").map_err(|error| format!("{address}: {error}"))?;
        assert_eq!(answer.status.as_u16(), 200, "{address}");
    }
    Ok(())
}

/// Each target receives the same lines, in the form and with the levels that the flags say.
fn logs_have_istios_forms() -> Result<(), Failed> {
    let folder = scratch("command-line-logs");
    let (file, rotated) = (folder.join("file.log"), folder.join("rotated.log"));
    for (is_json, levels) in [
        ("false", "default:info"),
        ("true", "default:debug,all:error"),
        ("true", "ads:none"),
    ] {
        for path in [&file, &rotated] {
            std::fs::write(path, "")?;
        }
        let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
            command.arg("--configDir").arg(sample());
            command.arg(format!("--log_as_json={is_json}"));
            command.arg(format!("--log_output_level={levels}"));
            command.arg(format!("--log_target=stdout,{}", file.display()));
            command.arg(format!("--log_rotate={}", rotated.display()));
            command.arg("--log_caller=default");
        })?;
        daemon.process.terminate();
        daemon.process.end_of(DEADLINE)?;
        let log = std::fs::read_to_string(&file)?;
        assert_eq!(log, daemon.process.log(), "{levels}");
        assert_eq!(log, std::fs::read_to_string(&rotated)?, "{levels}");
        let is_line = |line: &str, scope: &str, text: &str| {
            if is_json == "false" {
                let columns: Vec<&str> = line.split('\t').collect();
                return columns.get(1) == Some(&"info")
                    && columns.contains(&text)
                    && (scope.is_empty() || columns[2] == scope);
            }
            let line: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            line["msg"] == *text && line["scope"].as_str().unwrap_or_default() == scope && line["level"] == "info"
        };
        let says = |scope: &str, text: &str| log.lines().any(|line| is_line(line, scope, text));
        let is_quiet = levels.ends_with("all:error");
        assert!(
            says("", "ready") != is_quiet && says("", "shutting down") != is_quiet,
            "{levels}:\n{log}"
        );
        assert_eq!(says("ads", "push"), levels == "default:info", "{levels}:\n{log}");
        let caller = if is_json == "true" {
            "\"caller\":\"src/app.rs:"
        } else {
            "\tsrc/app.rs:"
        };
        assert_eq!(log.contains(caller), !is_quiet, "{levels}:\n{log}");
    }
    Ok(())
}

fn user_signals_are_ignored() -> Result<(), Failed> {
    let folder = scratch("command-line-signals");
    let daemon = Daemon::start(&sample(), &folder.join("istiod.log"))?;
    for signal in ["-USR1", "-USR2"] {
        let sent = Command::new("kill")
            .args([signal, &daemon.process.id.to_string()])
            .status()?;
        assert!(sent.success(), "kill {signal}: {sent}");
    }
    // Signals are delivered before the process answers the next request or ends by SIGTERM.
    daemon.until_ready()?;
    daemon.process.terminate();
    let ended = daemon.process.end_of(DEADLINE)?;
    assert_eq!(ended.code(), Some(0), "{ended}");
    Ok(())
}

/// Writes a kubeconfig without credentials.
fn kubeconfig(path: &Path, server: &str, proxy: Option<SocketAddr>) -> Result<(), Failed> {
    std::fs::create_dir_all(path.parent().ok_or("a file has a folder")?)?;
    let proxy = proxy.map_or_else(String::new, |address| format!(", proxy-url: 'http://{address}'"));
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{name: c, cluster: {{server: '{server}'{proxy}}}}}]\n\
         users: [{{name: u, user: {{}}}}]\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n"
    );
    Ok(std::fs::write(path, text)?)
}

/// Returns the first line that a client of this listener sends. Connections of clients that have ended are skipped.
fn first_line(process: &Process, listener: &TcpListener) -> Result<String, Failed> {
    listener.set_nonblocking(true)?;
    let accepted = || match listener.accept() {
        Ok((stream, _)) => match first_line_of(stream) {
            Ok(line) if line.is_empty() => None,
            read => Some(read.map_err(|error| error.to_string())),
        },
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            let ended = process.ended()?;
            Some(Err(format!("the daemon exited: {ended}\n{}", process.log_tail())))
        }
        Err(error) => Some(Err(error.to_string())),
    };
    let line = wait::until("a request", DEADLINE, accepted);
    Ok(line.map_err(|error| format!("{error}\n{}", process.log_tail()))??)
}

fn first_line_of(mut stream: TcpStream) -> std::io::Result<String> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    let mut buffer = [0; 512];
    let count = stream.read(&mut buffer)?;
    let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// Sets arguments and variables of a command.
type Arguments<'a> = &'a dyn Fn(&mut Command);

fn kubeconfigs_are_found_like_istios() -> Result<(), Failed> {
    let folder = scratch("command-line-kubeconfigs");
    let used = TcpListener::bind("127.0.0.1:0")?;
    let server = format!("http://{}", used.local_addr()?);
    let (good, other, missing) = (folder.join("good"), folder.join("other"), folder.join("missing"));
    kubeconfig(&good, &server, None)?;
    kubeconfig(&other, "http://127.0.0.1:1", None)?;
    let home = folder.join("home");
    kubeconfig(&home.join(".kube/config"), &server, None)?;
    let list = format!("{}:{}:{}", missing.display(), good.display(), other.display());
    let cases: [(&str, Arguments<'_>); 4] = [
        ("flag", &|command| {
            command.arg("--kubeconfig").arg(&good).env("KUBECONFIG", &other);
        }),
        ("variable", &|command| {
            command.env("KUBECONFIG", &list).env("HOME", "/nowhere");
        }),
        ("home", &|command| {
            command.env("HOME", &home);
        }),
        // Configuration from a folder, services from the cluster.
        ("folder", &|command| {
            command.env("KUBECONFIG", &good).arg("--configDir").arg(sample());
        }),
    ];
    for (name, configure) in cases {
        let process = start(&format!("command-line-kubeconfigs-{name}"), |command| {
            command.arg("--httpAddr=127.0.0.1:0");
            configure(command);
        });
        let line = first_line(&process, &used).map_err(|error| format!("{name}: {}", error.message().unwrap_or("")))?;
        assert!(line.starts_with("GET /"), "{name}: {line}");
    }
    Ok(())
}

fn missing_kubeconfig_is_waited_for() -> Result<(), Failed> {
    let port = ports::free();
    let process = start("command-line-missing", |command| {
        command
            .env("KUBECONFIG", "/nowhere/config")
            .arg(format!("--httpAddr=127.0.0.1:{port}"));
    });
    until_status(&process, SocketAddr::from(([127, 0, 0, 1], port)), 503)?;
    process.until_logged(&["no kubeconfig and no service account found"])?;
    Ok(())
}

fn proxy_of_a_kubeconfig_is_used() -> Result<(), Failed> {
    let folder = scratch("command-line-proxy");
    let proxy = TcpListener::bind("127.0.0.1:0")?;
    let file = folder.join("config");
    kubeconfig(&file, "https://192.0.2.1:6443", Some(proxy.local_addr()?))?;
    let process = start("command-line-proxied", |command| {
        command.arg("--httpAddr=127.0.0.1:0").arg("--kubeconfig").arg(&file);
    });
    let line = first_line(&process, &proxy)?;
    assert!(line.starts_with("CONNECT 192.0.2.1:6443"), "{line}");
    Ok(())
}

/// A workload with a service, so that its proxy has an inbound cluster.
const WORKLOAD: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: app}
spec: {selector: {app: web}, clusterIP: 10.1.0.1, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, namespace: app, labels: {app: web}}
spec: {serviceAccountName: web, containers: [{name: web}]}
status: {phase: Running, podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: app, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.0.0.1], targetRef: {kind: Pod, name: web-1, namespace: app}}]
ports: [{name: http, port: 8080, protocol: TCP}]
";

fn aliases_of_clusters_apply_to_proxies() -> Result<(), Failed> {
    let folder = scratch("command-line-aliases");
    let mesh = folder.join("mesh");
    std::fs::create_dir(&mesh)?;
    std::fs::write(mesh.join("objects.yaml"), WORKLOAD)?;
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        command
            .arg("--clusterAliases=old=Kubernetes")
            .arg("--configDir")
            .arg(&mesh);
    })?;
    let node = |cluster: &str| Node {
        id: "sidecar~10.0.0.1~web-1.app~app.svc.cluster.local".to_owned(),
        metadata: json!({ "NAMESPACE": "app", "CLUSTER_ID": cluster, "INSTANCE_IPS": "10.0.0.1" }),
    };
    let (real, alias, unknown) = (node("Kubernetes"), node("old"), node("other"));
    let expected = AdsClient::connect(daemon.xds, &real).first()?;
    let found = AdsClient::connect(daemon.xds, &alias).first()?;
    let without = AdsClient::connect(daemon.xds, &unknown).first()?;
    let names = |resources: &Resources| resources.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
    assert!(
        names(&expected)
            .iter()
            .any(|(_, name)| name.starts_with("inbound|8080|"))
    );
    assert!(
        !names(&without)
            .iter()
            .any(|(_, name)| name.starts_with("inbound|8080|"))
    );
    Ok(())
}
