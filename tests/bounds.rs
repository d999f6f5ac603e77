//! Resource limits against unauthenticated or malicious clients: size, nesting and number of their inputs. Test names
//! begin with the requirement that they check (SECURITY.md): R1 (expressions), R2 (nesting and sizes), R3 (memory and
//! connection lifetime), R20 (admitted clients).

mod attack;
mod expression;
mod flood;
mod nesting;

use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::Trial;

use crate::support::{daemon::Daemon, scratch};

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "bounds::r1_costly_expressions_are_bounded",
            expression::costly_expressions_are_bounded,
        ),
        Trial::test(
            "bounds::r2_parsers_reject_deep_nesting",
            nesting::parsers_reject_deep_nesting,
        ),
        Trial::test(
            "bounds::r2_daemon_survives_deep_nesting",
            nesting::daemon_survives_deep_nesting,
        ),
        Trial::test(
            "bounds::r2_pages_do_not_buffer_request_bodies",
            nesting::pages_do_not_buffer_request_bodies,
        ),
        Trial::test(
            "bounds::r3_unauthenticated_connections_use_bounded_memory",
            flood::unauthenticated_connections_use_bounded_memory,
        ),
        Trial::test(
            "bounds::r3_unauthenticated_tls_connections_use_bounded_memory",
            flood::unauthenticated_tls_connections_use_bounded_memory,
        ),
        Trial::test(
            "bounds::r3_slow_clients_do_not_delay_others",
            flood::slow_clients_do_not_delay_others,
        ),
        Trial::test(
            "bounds::r3_slow_tls_clients_do_not_delay_others",
            flood::slow_tls_clients_do_not_delay_others,
        ),
        Trial::test(
            "bounds::r3_slow_page_clients_do_not_delay_others",
            flood::slow_page_clients_do_not_delay_others,
        ),
        Trial::test(
            "bounds::r20_admitted_clients_do_not_harm_others",
            attack::admitted_clients_do_not_harm_others,
        ),
    ]
}

/// A daemon that serves a folder with one service.
fn daemon(name: &str) -> Result<(Daemon, PathBuf), String> {
    let (folder, mesh) = mesh(name);
    let daemon = Daemon::configured(&folder.join("istiod.log"), |command| {
        exact(command).arg("--configDir").arg(&mesh);
    })?;
    Ok((daemon, mesh))
}

/// Makes the allocator return free memory to the system at once, so that resident memory is used memory.
fn exact(command: &mut Command) -> &mut Command {
    command.env("_RJEM_MALLOC_CONF", "dirty_decay_ms:0")
}

/// Like [`daemon`], with the secure port and its own CA.
fn secured(name: &str) -> Result<Daemon, String> {
    let (folder, mesh) = mesh(name);
    Daemon::secured(&folder.join("istiod.log"), |command| {
        exact(command).arg("--configDir").arg(mesh);
    })
}

/// A folder for a test, and the mesh in it.
fn mesh(name: &str) -> (PathBuf, PathBuf) {
    let folder = scratch(name);
    let mesh = folder.join("mesh");
    std::fs::create_dir(&mesh).expect("target/ is writable");
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: app}\n\
                   spec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}\n";
    std::fs::write(mesh.join("objects.yaml"), service).expect("target/ is writable");
    (folder, mesh)
}

/// The resident memory of a process in bytes: current and peak.
fn memory(id: u32) -> Result<(usize, usize), String> {
    let status = std::fs::read_to_string(Path::new("/proc").join(id.to_string()).join("status"));
    let status = status.map_err(|error| format!("process {id}: {error}"))?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok());
        // A process that has ended has none.
        let kilobytes = kilobytes.ok_or_else(|| format!("process {id} has no {name}"))?;
        Ok::<_, String>(kilobytes << 10)
    };
    Ok((field("VmRSS:")?, field("VmHWM:")?))
}
