//! TCP ports of ServiceEntries, which only addresses tell apart.
//!
//! Parity (pkg/config/analysis/analyzers/serviceentry/protocoladdresses.go).

use super::{
    json::{indexed, items, text},
    mesh::Mesh,
    message::{ADDRESSES_REQUIRED, Report},
};
use crate::api::Kind;

/// Reports TCP ports of ServiceEntries that neither have addresses nor get them.
pub(super) fn addresses(mesh: &Mesh, report: &mut Report) {
    let metadata = &mesh.settings.config["defaultConfig"]["proxyMetadata"];
    let is_on = |name: &str| metadata[name] == "true";
    if is_on("ISTIO_META_DNS_CAPTURE")
        && (is_on("ISTIO_META_DNS_AUTO_ALLOCATE") || is_on("PILOT_ENABLE_IP_AUTOALLOCATE"))
    {
        return;
    }
    for entry in mesh.of(Kind::ServiceEntry) {
        let allocated = items(&entry.manifest["status"]["addresses"]);
        if !items(entry.spec("addresses")).is_empty() || !allocated.is_empty() {
            continue;
        }
        for (path, port) in indexed("spec.ports", entry.spec("ports")) {
            let protocol = text(&port["protocol"]);
            if protocol.is_empty() || protocol.eq_ignore_ascii_case("TCP") {
                let text = format!("{path}: a TCP port needs spec.addresses");
                report.add(ADDRESSES_REQUIRED, entry, text);
            }
        }
    }
}
