//! Debug pages have the shapes of Istio's: the names of fields and their types. Metrics have the names, types, labels
//! and buckets of Istio's.
//!
//! The facts in `debug/` were recorded from istiod 1.30.3 with the mesh in `debug/mesh`. `UPDATE_GOLDEN=1` reads them
//! again from Istio's conformance set, where it is next to the project.

mod facts;
mod metrics;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use libtest_mimic::{Completion, Failed, Trial};
use serde_json::{Value, json};

use crate::support::ads::AdsClient;
use crate::support::daemon::Daemon;
use crate::support::envoy::Node;
use crate::support::{go_run, http, missing, project, scratch, variable, wait};
use facts::{Deviations, Facts};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("debug::pages_have_the_shapes_of_istio", shapes),
        Trial::test("debug::pages_that_act", pages_that_act),
        Trial::test(
            "debug::followers_leave_room_for_queries",
            followers_leave_room_for_queries,
        ),
        Trial::test("debug::metrics_are_those_of_istio", metrics::are_those_of_istio),
        Trial::ignorable_test("debug::profiles_are_read_by_gos_pprof", profiles_are_read_by_gos_pprof),
    ]
}

/// The client whose pages are compared.
const PROXY: &str = "web-1.app";

/// The recorded pages, as requested.
const PAGES: [&str; 30] = [
    "adsz",
    "ambientz",
    "authorizationz",
    "cachez?sizes=true",
    "clusterz",
    "config_dump?proxyID=web-1.app",
    "config_dump?proxyID=web-1.app&include_eds",
    "config_dump?proxyID=web-1.app&types=eds,cds",
    "configz",
    "connections",
    "ecdsz?proxyID=web-1.app",
    "edsz?proxyID=web-1.app",
    "endpointShardz",
    "endpointz",
    "instancesz",
    "krtz",
    "list",
    "mcsz",
    "mesh",
    "ndsz?proxyID=web-1.app",
    "networkz",
    "push_status",
    "pushcontext",
    "registryz",
    "resourcesz",
    "sidecarz?proxyID=web-1.app",
    "syncz",
    "syncz?namespace=app",
    "telemetryz",
    "telemetryz?proxyID=web-1.app",
];

fn folder() -> PathBuf {
    project().join("tests/debug")
}

/// Returns the file of a page in the recording.
fn recording(page: &str) -> String {
    let name: String = page
        .chars()
        .map(|character| if "?&=".contains(character) { '_' } else { character })
        .collect();
    format!("dbg_{name}.json")
}

fn daemon(name: &str, variables: &[(&str, &str)]) -> Result<Daemon, String> {
    let mesh = folder().join("mesh");
    Daemon::configured(&scratch(name).join("istiod.log"), |command| {
        command.arg("--configDir").arg(mesh).args(["-n", "istio-system"]);
        command.envs(variables.iter().copied());
    })
}

fn client(daemon: &Daemon, id: &str, metadata: Value) -> Result<AdsClient, String> {
    let node = Node {
        id: id.to_owned(),
        metadata,
    };
    let client = AdsClient::connect(daemon.xds, &node);
    client.first()?;
    Ok(client)
}

fn sidecar(daemon: &Daemon) -> Result<AdsClient, String> {
    let metadata = json!({ "ISTIO_VERSION": "1.30.3", "LABELS": { "app": "web", "version": "v1" }, "NAMESPACE": "app",
        "SERVICE_ACCOUNT": "web", "CLUSTER_ID": "Kubernetes" });
    client(daemon, "sidecar~10.1.0.1~web-1.app~app.svc.cluster.local", metadata)
}

fn gateway(daemon: &Daemon) -> Result<AdsClient, String> {
    let metadata = json!({ "ISTIO_VERSION": "1.30.3", "LABELS": { "istio": "ingressgateway" },
        "NAMESPACE": "istio-system", "SERVICE_ACCOUNT": "gw", "CLUSTER_ID": "Kubernetes" });
    client(
        daemon,
        "router~10.1.0.3~gw-1.istio-system~istio-system.svc.cluster.local",
        metadata,
    )
}

fn page(daemon: &Daemon, page: &str) -> Result<Value, String> {
    let answer = http::get(daemon.monitoring, "istiod", &format!("/debug/{page}"))?;
    if !answer.status.is_success() {
        return Err(format!("/debug/{page}: {} {}", answer.status, answer.body));
    }
    serde_json::from_str(&answer.body).map_err(|error| format!("/debug/{page}: {error}"))
}

/// Every page has the fields of Istio's, with their types, except for the listed deviations.
fn shapes() -> Result<(), Failed> {
    let file = folder().join("shapes.txt");
    if variable("UPDATE_GOLDEN").is_some() {
        record(&file)?;
    }
    let expected = Facts::read(&file)?;
    let daemon = daemon("debug-shapes", &[])?;
    let _clients = (sidecar(&daemon)?, gateway(&daemon)?);
    let is_acknowledged = |row: &Value| {
        let types = row["resources"].as_object();
        types.is_some_and(|types| types.values().all(|status| status["acked"] == status["sent"]))
    };
    wait::until("acknowledged configuration", Duration::from_mins(1), || {
        let rows = page(&daemon, "syncz").ok()?;
        rows.as_array()?.iter().all(is_acknowledged).then_some(())
    })?;
    let mut given = Facts::default();
    for name in PAGES {
        given.add(name, &page(&daemon, name)?);
    }
    let deviations = Deviations::read(&folder().join("deviations.txt"))?;
    deviations.explain(&expected, &given)?;
    Ok(())
}

/// Writes the facts of the recorded pages.
fn record(file: &Path) -> Result<(), Failed> {
    let set = project().join("../shared/conformance/upstream/debug");
    let mut facts = Facts::default();
    for name in PAGES {
        let text = std::fs::read_to_string(set.join(recording(name)))?;
        facts.add(name, &serde_json::from_str(&text)?);
    }
    facts.write(file)?;
    Ok(())
}

/// Statuses of requests for an unknown proxy, and the pages with an effect.
fn pages_that_act() -> Result<(), Failed> {
    let daemon = daemon("debug-acts", &[("UNSAFE_ENABLE_ADMIN_ENDPOINTS", "true")])?;
    let sidecar = sidecar(&daemon)?;
    let get = |path: &str| http::get(daemon.monitoring, "istiod", &format!("/debug/{path}"));
    for page in [
        "adsz",
        "config_dump",
        "ecdsz",
        "edsz",
        "force_disconnect",
        "ndsz",
        "sidecarz",
        "telemetryz",
    ] {
        let answer = get(&format!("{page}?proxyID=nobody"))?;
        assert_eq!(answer.status, 404, "{page}: {}", answer.body);
    }
    assert_eq!(get("adsz?push=true")?.body, "Pushed to 1 servers\n");
    assert_eq!(get("cachez?clear=true")?.body, "Cache cleared\n");
    let cluster = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
    let cached = page(&daemon, "cachez")?;
    let names = cached[cluster].as_array().cloned().unwrap_or_default();
    assert!(
        names.contains(&json!("outbound|80||web.app.svc.cluster.local")),
        "{cached}"
    );
    assert_eq!(sidecar.ended(), None);
    assert_eq!(get(&format!("force_disconnect?proxyID={PROXY}"))?.body, "OK");
    let ended = wait::until("a closed connection", Duration::from_mins(1), || sidecar.ended())?;
    assert!(ended.contains("an operator has closed the connection"), "{ended}");
    Ok(())
}

/// A client more than may follow the mesh is refused, and queries about objects are answered all the same.
fn followers_leave_room_for_queries() -> Result<(), Failed> {
    let daemon = daemon("debug-followers", &[])?;
    let follow = || -> std::io::Result<(BufReader<TcpStream>, String)> {
        let mut stream = TcpStream::connect(daemon.monitoring)?;
        stream.write_all(b"GET /debug/status_events HTTP/1.1\r\nHost: istiod\r\n\r\n")?;
        let (mut stream, mut status) = (BufReader::new(stream), String::new());
        stream.read_line(&mut status)?;
        Ok((stream, status))
    };
    let followers = (0..64).map(|_| follow()).collect::<Result<Vec<_>, _>>()?;
    assert!(
        followers.iter().all(|(_, status)| status.contains("200")),
        "{followers:?}"
    );
    let (_, status) = follow()?;
    assert!(status.contains("503"), "{status}");
    let query = "/debug/status?kind=Service&namespace=app&name=web";
    let answer = http::get(daemon.monitoring, "istiod", query)?;
    assert_eq!(answer.status, 200, "{}", answer.body);
    Ok(())
}

/// Go's pprof shows functions of istiod with their memory and time. Allocations are sampled from the first one on.
fn profiles_are_read_by_gos_pprof() -> Result<Completion, Failed> {
    let daemon = daemon(
        "debug-profiles",
        &[("_RJEM_MALLOC_CONF", "prof_active:true,lg_prof_sample:14")],
    )?;
    let _sidecar = sidecar(&daemon)?;
    let profile = |page: &str, kind: &str| -> Result<Option<String>, String> {
        let address = format!("http://{}/debug/pprof/{page}", daemon.monitoring);
        // Go does not ship the binary of `go tool pprof`.
        let mut command = go_run();
        command.args([
            "cmd/pprof",
            "-top",
            "-cum",
            "-nodefraction=0",
            "-nodecount=100000",
            "-symbolize=none",
        ]);
        // An unoptimised build looks names up slowly, and pages give way to other work.
        let timeout = wait::extended(Duration::from_mins(5));
        command.arg(format!("-timeout={}", timeout.as_secs()));
        command.arg(format!("-sample_index={kind}")).arg(address);
        command.env("PPROF_TMPDIR", scratch("debug-pprof"));
        let Ok(output) = command.output() else {
            return Ok(None);
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            return Ok(Some(text(&output.stdout)));
        }
        Err(format!("pprof of {page}: {}", text(&output.stderr)))
    };
    let Some(live) = profile("heap", "inuse_space")? else {
        return missing("Go is missing");
    };
    for part in ["Type: inuse_space", "istiod::main", "istiod::ingest::file"] {
        assert!(live.contains(part), "{part} is not in\n{live}");
    }
    assert!(!live.contains("_rjem_"), "{live}");
    let all = profile("allocs", "alloc_objects")?.unwrap_or_default();
    assert!(all.contains("Type: alloc_objects") && all.contains("istiod::"), "{all}");
    // Its default is what was allocated.
    let default = profile("allocs", "")?.unwrap_or_default();
    assert!(default.contains("Type: alloc_space"), "{default}");
    let cpu = profile("profile?seconds=1", "cpu")?.unwrap_or_default();
    assert!(cpu.contains("Type: cpu"), "{cpu}");
    let switched = http::send(daemon.monitoring, "PUT", "/debug/pprof/heap?active=false", &[], "")?;
    assert_eq!(switched.body, "sampling of allocations is off\n");
    Ok(Completion::Completed)
}
