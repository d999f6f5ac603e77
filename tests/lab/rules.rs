//! iptables rules on hosts: those of istio-init in a pod, which redirect all TCP traffic of the application to the
//! sidecar, and the masquerading of a node.

use std::io::Write;
use std::process::Stdio;

use super::host::Host;
use crate::support::project;

/// The user id of sidecars. Their own traffic is not redirected.
pub(crate) const SIDECAR: u32 = 1337;

/// Redirects inbound traffic to 15006 and outbound traffic to 15001, except for the sidecar's own ports and traffic,
/// and loopback. A pod that calls its own address passes both.
const RULES: &str = "*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m multiport --dports 15008,15020,15021,15090 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -p tcp -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
";

/// The folder into which `make tools` unpacks iptables.
fn iptables() -> std::path::PathBuf {
    project().join(".tools/iptables")
}

/// Reports whether iptables is installed.
pub(crate) fn is_installed() -> bool {
    iptables().join("usr/sbin/xtables-legacy-multi").is_file()
}

/// Redirects all TCP traffic of a host to its sidecar.
pub(crate) fn redirect(host: &Host) -> Result<(), String> {
    restore(host, RULES)
}

/// Gives traffic that leaves a router through this device the router's own source address.
pub(crate) fn masquerade(router: &Host, device: &str) -> Result<(), String> {
    restore(
        router,
        &format!("*nat\n-A POSTROUTING -o {device} -j MASQUERADE\nCOMMIT\n"),
    )
}

fn restore(host: &Host, rules: &str) -> Result<(), String> {
    let libraries = iptables()
        .join("usr/lib")
        .join(format!("{}-linux-gnu", std::env::consts::ARCH));
    let mut command = host.command(iptables().join("usr/sbin/xtables-legacy-multi"));
    command.env("LD_LIBRARY_PATH", &libraries);
    command.env("XTABLES_LIBDIR", libraries.join("xtables"));
    command
        .arg("iptables-restore")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("iptables-restore: {error}"))?;
    let mut input = child.stdin.take().expect("stdin is piped");
    input.write_all(rules.as_bytes()).map_err(|error| error.to_string())?;
    drop(input);
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "iptables-restore: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}
