//! A host of the lab: a network namespace with its own loopback device. Only a process holds it, so it ends with that
//! process, whichever way the run ends.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::rules;
use crate::support::process::Process;
use crate::support::wait;

/// Script that reports that the namespace exists, then holds it. It works without IPv6 too.
const HOLD: &str = "ip link set lo up || exit 125; echo held; exec sleep infinity";

/// A network namespace and the process that holds it.
pub(crate) struct Host {
    pub(crate) name: String,
    holder: Process,
}

impl Host {
    /// Creates a host whose holder writes its log into `folder`.
    pub(crate) fn start(name: &str, folder: &Path) -> Result<Host, String> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", HOLD]);
        let holder = Process::start_bound(command, &folder.join(format!("{name}-host.log")));
        wait::until("a network namespace", Duration::from_secs(20), || {
            if let Some(status) = holder.ended() {
                return Some(Err(format!("no network namespace for {name}: {status}")));
            }
            holder.log().contains("held").then_some(Ok(()))
        })
        .flatten()
        .map_err(|error| format!("{error}\n{}", holder.log_tail()))?;
        Ok(Host {
            name: name.to_owned(),
            holder,
        })
    }

    /// The process id of the holder, by which tools refer to the namespace.
    pub(crate) fn id(&self) -> u32 {
        self.holder.id
    }

    /// Returns a command that runs on this host.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.id())).arg(program);
        command
    }

    /// Runs `ip` with these arguments on this host.
    pub(crate) fn ip(&self, arguments: &str) -> Result<(), String> {
        let mut command = self.command("ip");
        run(command.args(arguments.split(' ')))
    }

    /// Creates sockets on this host: `make` runs on a thread inside the namespace, and sockets stay in it.
    pub(crate) fn enter<T: Send>(&self, make: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let namespace = File::open(format!("/proc/{}/ns/net", self.id()))?;
        std::thread::scope(|scope| {
            let entered = scope.spawn(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                make()
            });
            entered.join().expect("creating a socket does not panic")
        })
    }
}

/// A network whose hosts reach only one another. It is a bridge on a separate host.
pub(crate) struct Network {
    bridge: Host,
    /// Prefix length of all its addresses.
    prefix: u8,
    /// The default gateway, if there is one.
    router: Option<IpAddr>,
}

impl Network {
    /// Creates a network.
    pub(crate) fn start(name: &str, prefix: u8, folder: &Path) -> Result<Network, String> {
        let bridge = Host::start(name, folder)?;
        // A bridge without its own address uses that of a port, and another one when the port is removed. Neighbours
        // with the old address in their caches would then lose packets for a while.
        bridge.ip("link add bridge0 address 02:00:00:00:00:01 type bridge")?;
        bridge.ip("link set bridge0 up")?;
        Ok(Network {
            bridge,
            prefix,
            router: None,
        })
    }

    /// Connects hosts that are attached from now on to an outer network, as nodes of a cluster do: through a router
    /// with an address on each side, which hides the inner addresses. No route leads back.
    pub(crate) fn connect_to(&mut self, outer: &Network, inside: IpAddr, outside: IpAddr) -> Result<(), String> {
        let router = &self.bridge;
        router.ip(&format!("addr add {inside}/{} dev bridge0", self.prefix))?;
        outer.attach(router, "outer0", outside, false)?;
        let forward = "echo 1 > /proc/sys/net/ipv4/ip_forward";
        run(router.command("sh").args(["-c", forward]))?;
        rules::masquerade(router, "outer0")?;
        self.router = Some(inside);
        Ok(())
    }

    /// Attaches a host to this network with a device of this name and address. The first device of a host is also its
    /// default route, so that traffic to other networks passes its iptables rules.
    pub(crate) fn attach(&self, host: &Host, device: &str, address: IpAddr, is_default: bool) -> Result<(), String> {
        let port = format!("{device}.{}", host.id());
        let peer = format!("type veth peer name {device} netns {}", host.id());
        self.bridge.ip(&format!("link add {port} {peer}"))?;
        self.bridge.ip(&format!("link set {port} master bridge0 up"))?;
        if let IpAddr::V4(address) = address {
            // A MAC address derived from the IP address: neighbour caches stay valid for its next owner.
            let [a, b, c, d] = address.octets();
            host.ip(&format!(
                "link set {device} address 02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}"
            ))?;
        }
        host.ip(&format!("addr add {address}/{} dev {device}", self.prefix))?;
        host.ip(&format!("link set {device} up"))?;
        if is_default {
            let way = self.router.map_or(String::new(), |router| format!("via {router} "));
            host.ip(&format!("route add default {way}dev {device}"))?;
        }
        Ok(())
    }
}

/// Runs a command to its end. Its standard error is the error.
pub(crate) fn run(command: &mut Command) -> Result<(), String> {
    let command_line = format!("{command:?}");
    let output = command.output().map_err(|error| format!("{command_line}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command_line}: {}: {}", output.status, said.trim()))
}
