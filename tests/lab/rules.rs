//! iptables rules on hosts: those of istio-init in a pod, which redirect all TCP traffic of the application to the
//! sidecar, those of the CNI plugin in an ambient pod, and the masquerading of a node.

use std::io::Write;
use std::process::Stdio;

use super::host::Host;
use crate::support::project;

/// The port of HBONE, which is not redirected.
const HBONE: &str = "15008";

/// The redirection of a pod's traffic to its proxy, as the arguments of istio-init say.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Redirection {
    outbound: String,
    inbound: String,
    /// The user of the proxy, whose own traffic is not redirected.
    user: String,
    /// Ports whose inbound traffic is not redirected.
    excluded_inbound: Vec<String>,
    /// Ports and ranges of addresses to which outbound traffic is not redirected.
    excluded_outbound: Vec<String>,
    excluded_ranges: Vec<String>,
}

impl Redirection {
    /// Reads the arguments of `pilot-agent` in the init container. Arguments that the lab does not implement are
    /// errors.
    pub(crate) fn parse(arguments: &[&str]) -> Result<Redirection, String> {
        let Some(("istio-iptables", mut rest)) = arguments.split_first().map(|(first, rest)| (*first, rest)) else {
            return Err(format!("istio-init runs {arguments:?}"));
        };
        let mut redirection = Redirection {
            outbound: String::new(),
            inbound: String::new(),
            user: String::new(),
            excluded_inbound: vec![HBONE.to_owned()],
            excluded_outbound: Vec::new(),
            excluded_ranges: Vec::new(),
        };
        let list = |text: &str| {
            text.split(',')
                .filter(|item| !item.is_empty())
                .map(str::to_owned)
                .collect()
        };
        while let Some((flag, values)) = rest.split_first() {
            if flag.starts_with("--log_output_level=") {
                rest = values;
                continue;
            }
            let (value, others) = values.split_first().ok_or(format!("{flag} has no value"))?;
            let value = *value;
            match *flag {
                "-p" => value.clone_into(&mut redirection.outbound),
                "-z" => value.clone_into(&mut redirection.inbound),
                "-u" => value.clone_into(&mut redirection.user),
                "-x" => redirection.excluded_ranges = list(value),
                "-o" => redirection.excluded_outbound = list(value),
                "-d" => redirection.excluded_inbound.extend::<Vec<String>>(list(value)),
                "-m" if value == "REDIRECT" => {}
                "-i" | "-b" if value == "*" => {}
                _ => return Err(format!("the lab does not implement {flag} {value} of istio-init")),
            }
            rest = others;
        }
        Ok(redirection)
    }

    /// The rules. A pod that calls its own address passes both redirections.
    fn rules(&self) -> String {
        let Redirection {
            outbound,
            inbound,
            user,
            excluded_inbound,
            ..
        } = self;
        let ranges = self.excluded_ranges.iter().map(|range| format!("-d {range}"));
        let ports = self
            .excluded_outbound
            .iter()
            .map(|port| format!("-p tcp --dport {port}"));
        let excluded: Vec<String> = ranges
            .chain(ports)
            .map(|which| format!("-A ISTIO_OUTPUT {which} -j RETURN\n"))
            .collect();
        let excluded = excluded.concat();
        format!(
            "*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m multiport --dports {excluded_inbound} -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports {inbound}
-A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport {HBONE} -m owner --uid-owner {user} -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner {user} -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner {user} -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
{excluded}-A ISTIO_OUTPUT -p tcp -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports {outbound}
COMMIT
",
            excluded_inbound = excluded_inbound.join(",")
        )
    }
}

/// The folder into which `make tools` unpacks iptables.
fn iptables() -> std::path::PathBuf {
    project().join(".tools/iptables")
}

/// Reports whether iptables is installed.
pub(crate) fn is_installed() -> bool {
    iptables().join("usr/sbin/xtables-legacy-multi").is_file()
}

/// Redirects the TCP traffic of a host to its sidecar.
pub(crate) fn redirect(host: &Host, redirection: &Redirection) -> Result<(), String> {
    restore(host, &redirection.rules())
}

/// Redirects the TCP traffic of an ambient pod to its ztunnel, whose own traffic has this mark.
///
/// Facts: Istio's ambient architecture, "traffic redirection inside the pod": outbound traffic goes to 15001, inbound
/// plaintext to 15006, and HBONE arrives unchanged.
pub(crate) fn capture(host: &Host, mark: u32) -> Result<(), String> {
    restore(
        host,
        &format!(
            "*nat
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -p tcp -j ISTIO_PRERT
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_PRERT ! -d 127.0.0.1/32 -p tcp ! --dport {HBONE} -m mark ! --mark {mark:#x} -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -p tcp -m mark --mark {mark:#x} -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -j REDIRECT --to-ports 15001
COMMIT
"
        ),
    )
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
