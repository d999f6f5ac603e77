//! ControlZ: the requests of `istioctl admin log` and `istioctl dashboard controlz`, and what a browser on this machine
//! may not do. `controlz/requests.txt` has the requests with Istio's answers.

use std::net::SocketAddr;
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::support::ads::AdsClient;
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::{http, ports, project, scratch, wait};

const DEADLINE: Duration = Duration::from_mins(1);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "controlz::requests_are_answered_as_by_istio",
            requests_are_answered_as_by_istio,
        ),
        Trial::test("controlz::levels_change_the_log", levels_change_the_log),
        Trial::test("controlz::exit_ends_the_process", exit_ends_the_process),
        Trial::test(
            "controlz::a_port_in_use_does_not_end_the_start",
            a_port_in_use_does_not_end_the_start,
        ),
    ]
}

/// A daemon with ControlZ, and its address.
fn start(name: &str, port: u16) -> Result<(Daemon, SocketAddr), Failed> {
    let log = scratch(name).join("istiod.log");
    let daemon = Daemon::configured(&log, |command| {
        command.arg("--configDir").arg(project().join("samples/helloworld"));
        command.arg(format!("--ctrlz_port={port}")).env("POD_NAME", "istiod-1");
    })?;
    Ok((daemon, SocketAddr::from(([127, 0, 0, 1], port))))
}

/// Returns the members of an object, or of the first one in a list, by name.
fn members(value: &Value) -> String {
    let object = value.get(0).unwrap_or(value).as_object();
    let mut names: Vec<&str> = object.into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    names.join(" ")
}

/// Each line is `METHOD PATH BODY | STATUS | KIND CONTENT`. The kinds: `members` of a JSON document, `text` that is the
/// whole answer, `contains` for a part of it.
fn requests_are_answered_as_by_istio() -> Result<(), Failed> {
    let (_daemon, address) = start("controlz-requests", ports::free())?;
    let mut problems = Vec::new();
    for line in std::fs::read_to_string(project().join("tests/controlz/requests.txt"))?.lines() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let parts: Vec<&str> = line.split('|').map(str::trim).collect();
        let [request, status, expected] = parts[..] else {
            return Err(format!("{line:?} has not three parts").into());
        };
        let words: Vec<&str> = request.splitn(3, ' ').collect();
        let body = words.get(2).copied().unwrap_or_default();
        let answer = http::send(address, words[0], words[1], &[], body)?;
        let (kind, content) = expected.split_once(' ').unwrap_or((expected, ""));
        let is_equal = match kind {
            "members" => members(&serde_json::from_str(&answer.body)?) == content,
            "text" => answer.body == content,
            "contains" => answer.body.contains(content),
            other => return Err(format!("{line:?}: unknown kind {other:?}").into()),
        };
        if answer.status.as_str() != status || !is_equal {
            let start: String = answer.body.chars().take(300).collect();
            problems.push(format!("{line}\n  {} {start}", answer.status));
        }
    }
    for (headers, method, path) in [
        ([("host", "evil.example:9876"), ("x-any", "")], "GET", "/scopej/ads"),
        ([("host", "evil.example:9876"), ("x-any", "")], "GET", "/debug/pprof/"),
        (
            [("host", "localhost"), ("origin", "http://evil.example")],
            "PUT",
            "/scopej/ads",
        ),
    ] {
        let answer = http::send(address, method, path, &headers, r#"{"output_level":"debug"}"#)?;
        if answer.status != 403 {
            problems.push(format!("{method} {path} with {headers:?}: {}", answer.status));
        }
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems.join("\n").into())
    }
}

fn levels_change_the_log() -> Result<(), Failed> {
    let (daemon, address) = start("controlz-levels", ports::free())?;
    let set = |level: &str| {
        let body = format!(r#"{{"name":"ads","output_level":"{level}","stack_trace_level":"none"}}"#);
        http::send(address, "PUT", "/scopej/ads", &[], &body)
    };
    let connect = |pod: &str| {
        let node = Node {
            id: format!("sidecar~10.0.0.1~{pod}.app~app.svc.cluster.local"),
            metadata: json!({ "NAMESPACE": "app", "INSTANCE_IPS": "10.0.0.1" }),
        };
        AdsClient::connect(daemon.xds, &node).first()
    };
    set("none")?;
    connect("web-quiet")?;
    set("info")?;
    connect("web-logged")?;
    let log = wait::until("a line", DEADLINE, || {
        let log = daemon.process.log();
        let is_line = |line: &str| line.contains("\tinfo\tads\tproxy connected\t") && line.contains("web-logged.app");
        log.lines().any(is_line).then_some(log)
    })?;
    // Its end may be logged, since it comes after the change.
    if log
        .lines()
        .any(|line| line.contains("proxy connected") && line.contains("web-quiet"))
    {
        return Err(daemon.process.log_tail().into());
    }
    Ok(())
}

fn exit_ends_the_process() -> Result<(), Failed> {
    let (daemon, address) = start("controlz-exit", ports::free())?;
    let answer = http::send(address, "PUT", "/homej/exit", &[], "")?;
    let status = daemon.process.end_of(DEADLINE)?;
    if answer.status == 202 && status.success() {
        return Ok(());
    }
    Err(format!("{} and {status}", answer.status).into())
}

fn a_port_in_use_does_not_end_the_start() -> Result<(), Failed> {
    let (_first, address) = start("controlz-first", ports::free())?;
    let (second, _) = start("controlz-second", address.port())?;
    second.process.until_logged(&["\twarn\tControlZ is off\t"])?;
    Ok(())
}
