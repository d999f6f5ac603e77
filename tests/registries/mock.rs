//! The registry in memory.

use libtest_mimic::{Failed, Trial};

use super::{TIMEOUT, sidecar};
use crate::support::ads::{AdsClient, Type};
use crate::support::daemon::Daemon;
use crate::support::scratch;

pub(super) fn trials() -> Vec<Trial> {
    vec![Trial::test("registries::mock::needs_no_files", needs_no_files)]
}

fn needs_no_files() -> Result<(), Failed> {
    let folder = scratch("registries-mock");
    let start = |name: &str, more: &[&str]| {
        Daemon::configured(&folder.join(name), |command| {
            command.arg("--registries=Mock,Mock").args(more);
        })
    };
    let hello = |number: u32| {
        (
            Type::Cluster,
            format!("outbound|{number}||hello.default.svc.cluster.local"),
        )
    };
    let empty = start("empty.log", &[])?;
    let resources = AdsClient::connect(empty.xds, &sidecar()).first()?;
    assert!(!resources.contains_key(&hello(80)));
    empty.process.until_logged(&["listed twice"])?;
    let full = start("full.log", &["--mockServices"])?;
    let proxy = AdsClient::connect(full.xds, &sidecar());
    proxy.until("the services", TIMEOUT, |resources| {
        let all = [80, 81, 90, 100, 110].map(hello);
        all.iter().all(|name| resources.contains_key(name)).then_some(())
    })?;
    Ok(())
}
