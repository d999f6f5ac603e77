//! The conformance suite of the Gateway API, against the daemon in a cluster of processes with real Envoys. The program
//! of `tests/conformance/cluster` runs the cluster in namespaces of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use libtest_mimic::{Completion, Failed, Trial};

use crate::support::daemon;
use crate::support::process::Process;
use crate::support::{envoy, missing, netns, project, scratch};

/// The time limit of a cluster with its tests, on a busy machine.
const TIMEOUT: Duration = Duration::from_mins(15);

/// The programs in `.tools/bin` that a cluster consists of.
const COMPONENTS: [&str; 8] = [
    "cluster",
    "controllers",
    "coredns",
    "echo-basic",
    "etcd",
    "gateway-conformance",
    "helm",
    "kube-apiserver",
];

/// The profiles of [`CHOSEN`].
const PROFILES: &str = "GATEWAY-HTTP,GATEWAY-TLS,GATEWAY-GRPC,MESH-HTTP,MESH-GRPC";

/// The settings of the mesh, as `make conformance` has them.
const VALUES: [&str; 2] = [
    "env.PILOT_ENABLE_ALPHA_GATEWAY_API=true",
    "env.PILOT_GATEWAY_API_STANDARD_REASONS=true",
];

/// The tests of the suite that continuous integration runs: a few that need most parts of the profiles, and those that
/// Istio skips.
const CHOSEN: [&str; 36] = [
    "BackendTLSPolicy",
    "BackendTLSPolicyConflictResolution",
    "GRPCExactMethodMatching",
    "GatewayBackendClientCertificateFeature",
    "GatewayFrontendClientCertificateValidation",
    "GatewayFrontendClientCertificateValidationInsecureFallback",
    "GatewayFrontendInvalidDefaultClientCertificateValidation",
    "GatewayHTTPListenerIsolation",
    "GatewayInfrastructure",
    "GatewayInvalidFrontendClientCertificateValidation",
    "GatewayInvalidTLSBackendConfiguration",
    "GatewayModifyListeners",
    "GatewaySecretReferenceGrantSpecific",
    "GatewayStaticAddresses",
    "GatewayWithAttachedRoutes",
    "HTTPRouteCORS",
    "HTTPRouteHTTPSListener",
    "HTTPRouteHTTPSListenerDetectMisdirectedRequests",
    "HTTPRouteMatchingAcrossRoutes",
    "HTTPRouteReferenceGrant",
    "HTTPRouteRequestMirror",
    "HTTPRouteRewritePath",
    "HTTPRouteTimeoutRequest",
    "ListenerSetHTTPRouting",
    "ListenerSetHostnameConflict",
    "ListenerSetProtocolConflict",
    "ListenerSetReferenceGrant",
    "MeshBasic",
    "MeshConsumerRoute",
    "MeshFrontend",
    "MeshGRPCRouteWeight",
    "MeshHTTPRouteMatching",
    "MeshHTTPRouteRewritePath",
    "MeshPorts",
    "MeshTrafficSplit",
    "TLSRouteMixedTerminationSameNamespace",
];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("conformance::node_agent_runs_pods", node_agent_runs_pods),
        trial("conformance::chosen_tests_pass", chosen_tests_pass),
    ]
}

fn node_agent_runs_pods(cluster: &mut Cluster) -> Result<(), String> {
    let output = cluster.run(&["-test.run=^TestNode$"])?;
    // Without a test of that name, the command would succeed as well.
    if output.contains("--- PASS: TestNode ") {
        return Ok(());
    }
    Err("TestNode did not run".to_owned())
}

fn chosen_tests_pass(cluster: &mut Cluster) -> Result<(), String> {
    let output = cluster.mesh().run(&[
        &format!("-test.run=^TestConformance$/^({})$", CHOSEN.join("|")),
        "-gateway-class=istio",
        &format!("-conformance-profiles={PROFILES}"),
        "-all-features",
        "-namespace-labels=istio-injection=enabled",
        "-usable-address=infra-backend-v1.gateway-conformance-infra.svc.cluster.local",
        "-unusable-address=foo",
        "-cleanup-base-resources=false",
    ])?;
    // A name that the suite does not know, and a skipped test, would not fail.
    let passed = |name: &&str| output.contains(&format!("--- PASS: TestConformance/{name} "));
    let others: Vec<_> = CHOSEN.into_iter().filter(|name| !passed(name)).collect();
    if others.is_empty() {
        return Ok(());
    }
    Err(format!("these tests did not run: {}", others.join(", ")))
}

/// A test that is skipped where a component is missing.
fn trial(name: &'static str, run: impl FnOnce(&mut Cluster) -> Result<(), String> + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || {
        if let Some(reason) = missing_component() {
            return missing(&reason);
        }
        run(&mut Cluster::new(&name.replace("::", "/")))?;
        Ok::<_, Failed>(Completion::Completed)
    })
}

fn tools() -> PathBuf {
    project().join(".tools")
}

fn missing_component() -> Option<String> {
    let lacks = |path: &Path| !path.exists();
    let programs = COMPONENTS.map(|name| tools().join("bin").join(name));
    let folders = ["iptables", "gateway-api"].map(|name| tools().join(name));
    if let Some(path) = programs.iter().chain(&folders).find(|path| lacks(path)) {
        let name = path.file_name().unwrap_or_default().display();
        return Some(format!("{name} is missing; `make tools` installs it"));
    }
    if envoy::binary().is_none() {
        return Some("Envoy is missing; `make tools` installs it".to_owned());
    }
    netns::unavailable().map(str::to_owned)
}

/// A cluster that runs one command.
struct Cluster {
    folder: PathBuf,
    command: Command,
}

impl Cluster {
    fn new(name: &str) -> Cluster {
        let folder = scratch(name);
        let mut command = Command::new(tools().join("bin/cluster"));
        command.arg("run").arg("-tools").arg(tools());
        command.arg("-folder").arg(folder.join("cluster"));
        Cluster { folder, command }
    }

    /// Installs the daemon with its charts.
    fn mesh(&mut self) -> &mut Cluster {
        let istiod = daemon::istiod();
        self.command.arg("-istiod").arg(istiod.get_program());
        self.command.arg("-charts").arg(project().join("charts"));
        for value in VALUES {
            self.command.args(["-set", value]);
        }
        self
    }

    /// Runs the suite with these arguments. Returns its output, or an error if a test fails.
    fn run(&mut self, arguments: &[&str]) -> Result<String, String> {
        self.command.arg("--").arg(tools().join("bin/gateway-conformance"));
        self.command.args(["-test.v", "-test.timeout=0"]).args(arguments);
        let process = Process::start(&mut self.command, &self.folder.join("output.log"));
        let status = process.end_of(TIMEOUT)?;
        let output = process.log();
        if status.success() {
            return Ok(output);
        }
        let failed = output.lines().filter(|line| line.trim_start().starts_with("--- FAIL"));
        Err(format!(
            "{status}\n{}\n{}",
            failed.collect::<Vec<_>>().join("\n"),
            process.log_tail()
        ))
    }
}
