//! Rules of iptables on hosts: what istio-init sets in a pod, so that all TCP of the application goes through the sidecar, and
//! what a node does with what leaves its pods.

use std::io::Write;
use std::process::Stdio;

use super::host::Host;
use crate::support::project;

/// The user that sidecars run as; their own traffic is left alone.
pub(crate) const SIDECAR: u32 = 1337;

/// Inbound to 15006 and outbound to 15001, but for the sidecar's own ports, its own traffic, and what stays on loopback. A
/// pod that calls itself by its own address goes through both.
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

/// Where `make tools` unpacks iptables.
fn iptables() -> std::path::PathBuf {
    project().join(".tools/iptables")
}

/// Whether it did.
pub(crate) fn is_installed() -> bool {
    iptables().join("usr/sbin/xtables-legacy-multi").is_file()
}

/// Leads all TCP of a host through its sidecar.
pub(crate) fn redirect(host: &Host) -> Result<(), String> {
    restore(host, RULES)
}

/// Lets what leaves a router by that device do so under the router's own address.
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
    let mut input = child.stdin.take().expect("it was asked for");
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
