//! `istiod status`: whether a change of an object has arrived at all proxies.

use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use super::mesh::MESH;
use super::tenant::{TIMEOUT, Tenant};
use crate::support::ads::{AdsClient, Type};
use crate::support::daemon::{Daemon, istiod};
use crate::support::kubernetes::{self, api::Reference};
use crate::support::process::Process;
use crate::support::{http, wait};

/// Number of proxies, one of which refuses the change.
const PROXIES: usize = 200;
const REFUSES: usize = 77;
pub(super) const REASON: &str = "Duplicate entry of domain web";
/// Time limit of the command after the last answer, with an unoptimised daemon on a quiet machine.
const LIMIT: Duration = Duration::from_secs(5);

pub(super) fn trials() -> Vec<Trial> {
    vec![
        kubernetes::trial("kube::distribution::a_change_is_awaited", a_change_is_awaited),
        kubernetes::trial(
            "kube::distribution::objects_without_effect_are_explained",
            objects_without_effect_are_explained,
        ),
    ]
}

pub(super) fn virtual_service(timeout: &str) -> String {
    format!(
        "apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {{name: awaited, namespace: '{{app}}'}}
spec:
  hosts: ['web.{{app}}.svc.cluster.local']
  http: [{{timeout: {timeout}, route: [{{destination: {{host: 'web.{{app}}.svc.cluster.local'}}}}]}}]
"
    )
}

/// A service of its own, so that no other object of the mesh decides about its routes.
pub(super) const WEB: &str = "apiVersion: v1
kind: Service
metadata: {name: web, namespace: '{app}'}
spec:
  clusterIP: 10.96.{n}.1
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080, protocol: TCP}]
";

/// A running `istiod status`.
pub(super) struct Command {
    process: Process,
}

impl Command {
    /// Starts `istiod status` with JSON output.
    pub(super) fn start(tenant: &Tenant, daemon: &Daemon, name: &str, arguments: &[&str]) -> Command {
        let mut command = istiod();
        command.arg("status").args(arguments);
        command.args(["-o", "json", "--port", &daemon.monitoring.port().to_string()]);
        command.arg("--kubeconfig").arg(tenant.cluster.admin_kubeconfig());
        let process = Process::start(&mut command, &tenant.folder.join(format!("{name}.log")));
        Command { process }
    }

    /// Returns the exit code and the report.
    pub(super) fn end(&self) -> Result<(Option<i32>, Value), String> {
        let status = self.process.end_of(TIMEOUT)?;
        let log = self.process.log();
        let report = log.lines().find(|line| line.starts_with('{'));
        let report = report.ok_or_else(|| format!("no report: {log}"))?;
        let report = serde_json::from_str(report).map_err(|error| format!("{error}: {log}"))?;
        Ok((status.code(), report))
    }
}

fn a_change_is_awaited(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    tenant.apply(WEB)?;
    tenant.apply(&virtual_service("10s"))?;
    let daemon = tenant.daemon("istiod")?;
    let proxies: Vec<AdsClient> = (0..PROXIES)
        .map(|number| {
            let mut node = tenant.sidecar(&json!({ "app": "client" }));
            node.id = format!(
                "sidecar~10.255.0.1~client-{number}.{app}~{app}.svc.cluster.local",
                app = tenant.app
            );
            AdsClient::connect(daemon.xds, &node)
        })
        .collect();
    for proxy in &proxies {
        proxy.first()?;
    }
    let object = format!("vs/awaited.{}", tenant.app);
    let arrived = Command::start(&tenant, &daemon, "first", &[&object, "--wait", "--timeout", "20s"]);
    let (code, report) = arrived.end()?;
    assert_eq!(
        (code, &report["state"]),
        (Some(0), &json!("Acknowledged")),
        "{report:#}"
    );
    assert_eq!(report["counts"]["acknowledged"], PROXIES, "{report:#}");

    proxies[REFUSES].refuse(Type::Route, REASON);
    let started_at = wait::now();
    tenant.apply(&virtual_service("11s"))?;
    let command = Command::start(&tenant, &daemon, "second", &[&object, "--wait", "--timeout", "20s"]);
    let (code, report) = command.end()?;
    eprintln!("refused after {:?}", started_at.elapsed());
    assert_eq!((code, &report["state"]), (Some(1), &json!("Refused")), "{report:#}");
    let counts = &report["counts"];
    let expected = (&json!(PROXIES), &json!(PROXIES - 1), &json!(1));
    assert_eq!(
        (&counts["proxies"], &counts["acknowledged"], &counts["refused"]),
        expected,
        "{counts}"
    );
    let refused = &report["proxies"][0];
    assert_eq!(
        refused["proxy"],
        format!("client-{REFUSES}.{}", tenant.app),
        "{refused:#}"
    );
    let resource = refused["resources"].as_array().ok_or("no resources")?;
    let resource = resource
        .iter()
        .find(|resource| resource["state"] == "Refused")
        .ok_or("nothing refused")?;
    let blamed = json!([{ "kind": "VirtualService", "group": "networking.istio.io", "namespace": tenant.app,
        "name": "awaited" }]);
    assert_eq!(
        (&resource["type"], &resource["reason"]),
        (&json!("rds"), &json!(REASON)),
        "{resource:#}"
    );
    assert_eq!(resource["blamed"], blamed, "{resource:#}");

    let event = wait::until("an Event about the object", TIMEOUT, || {
        let events = tenant.cluster.api.list("v1", "Event", &tenant.app).ok()?;
        events.into_iter().find(|event| event["reason"] == "ConfigRefused")
    })?;
    let involved = &event["involvedObject"];
    let reference = Reference::new("networking.istio.io/v1", "VirtualService", &tenant.app, "awaited");
    let applied = tenant.cluster.get(&reference)?.ok_or("no object")?;
    assert_eq!(
        (&event["type"], &involved["kind"]),
        (&json!("Warning"), &applied["kind"]),
        "{event:#}"
    );
    for field in ["name", "namespace", "uid"] {
        assert_eq!(involved[field], applied["metadata"][field], "{event:#}");
    }
    let message = event["message"].as_str().unwrap_or_default();
    let proxy = format!("Proxy client-{REFUSES}.{} refused it", tenant.app);
    assert!(message.starts_with(&proxy) && message.ends_with(REASON), "{message}");

    // All others have answered, so the answer about what did not change since comes at once.
    let started_at = wait::now();
    let again = Command::start(&tenant, &daemon, "third", &[&object, "--wait", "--timeout", "20s"]);
    let (code, _) = again.end()?;
    assert_eq!(code, Some(1));
    assert!(
        started_at.elapsed() < wait::extended(LIMIT),
        "{:?}",
        started_at.elapsed()
    );
    Ok(())
}

fn objects_without_effect_are_explained(name: &str) -> Result<(), Failed> {
    let tenant = Tenant::shared(0, name)?;
    tenant.apply(MESH)?;
    let daemon = tenant.daemon("istiod")?;
    let proxy = AdsClient::connect(daemon.xds, &tenant.sidecar(&json!({ "app": "client" })));
    proxy.first()?;
    tenant.apply(&virtual_service("10s").replace("  http:", "  gateways: [nothing]\n  http:"))?;
    let object = format!("vs/awaited.{}", tenant.app);
    let run = |log: &str, arguments: &[&str]| Command::start(&tenant, &daemon, log, arguments).end();
    let (code, report) = run("unused", &[&object, "--wait"])?;
    assert_eq!((code, &report["state"]), (Some(0), &json!("Unused")), "{report:#}");

    let (code, report) = run("unknown", &["vs", &format!("{}/nothing", tenant.app)])?;
    assert_eq!((code, &report["state"]), (Some(1), &json!("Unknown")), "{report:#}");

    let reference = Reference::new("networking.istio.io/v1", "VirtualService", &tenant.app, "awaited");
    let invalid = json!({ "spec": { "hosts": ["not a host"] } });
    tenant.cluster.api.patch(&reference, &invalid)?;
    let (code, report) = run("invalid", &[&object, "--wait", "--timeout", "20s"])?;
    assert_eq!((code, &report["state"]), (Some(1), &json!("Invalid")), "{report:#}");
    let diagnostics = report["diagnostics"].to_string();
    assert!(diagnostics.contains("spec.hosts[0]"), "{diagnostics}");

    // A resource version that never comes.
    let (code, report) = run(
        "awaited",
        &[
            &object,
            "--wait",
            "--resource-version",
            "999999999999",
            "--timeout",
            "1s",
        ],
    )?;
    assert_eq!((code, &report["state"]), (Some(1), &json!("Awaited")), "{report:#}");
    assert_eq!(report["timedOut"], true);

    let waits = |log: &str, arguments: &[&str]| {
        let mut command = istiod();
        command.args(["wait", "virtualservice", &format!("awaited.{}", tenant.app)]);
        command.args(["--port", &daemon.monitoring.port().to_string()]);
        command.args(arguments);
        command.arg("--kubeconfig").arg(tenant.cluster.admin_kubeconfig());
        let process = Process::start(&mut command, &tenant.folder.join(format!("{log}.log")));
        process.end_of(TIMEOUT).map(|status| (status.code(), process.log()))
    };
    let (code, log) = waits("wait-invalid", &[])?;
    assert_eq!(code, Some(1), "{log}");
    tenant.apply(&virtual_service("12s"))?;
    let generation = tenant.cluster.get(&reference)?.ok_or("no object")?["metadata"]["generation"].to_string();
    let (code, log) = waits("wait-distribution", &["--generation", &generation])?;
    assert_eq!(code, Some(0), "{log}");
    let (code, log) = waits("wait-future", &["--generation", "99999", "--timeout", "1s"])?;
    assert_eq!(code, Some(1), "{log}");
    let (code, log) = waits("wait-exists", &["--for=delete", "--timeout", "1s"])?;
    assert_eq!(code, Some(1), "{log}");

    tenant.cluster.api.delete(&reference)?;
    let (code, log) = waits("wait-delete", &["--for=delete"])?;
    assert_eq!(code, Some(0), "{log}");
    wait::until("the removed object", TIMEOUT, || {
        let (_, report) = run("removed", &[&object]).ok()?;
        (report["state"] == "Removed").then_some(())
    })?;
    let page = http::get(daemon.monitoring, "istiod", "/debug/status")?;
    let overview: Value = serde_json::from_str(&page.body)?;
    assert_eq!(overview["counts"]["proxies"], 1, "{overview:#}");
    Ok(())
}
